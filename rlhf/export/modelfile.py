"""The Modelfile of Ollama: template, worked examples, stop strings and sampling settings of a run."""

from __future__ import annotations

import jinja2
from transformers import PreTrainedTokenizerBase

from rlhf.data.chat_template import Messages, render_chat, with_shots
from rlhf.data.tokenizer import eos_ids
from rlhf.settings.training import Config

TURN = "<|im_start|>{}\n{}<|im_end|>\n"  # of ChatML
LEAST_CONTEXT = 4096  # tokens, for a conversation of several turns; Ollama uses the model's if that is smaller


def modelfile(file: str, tokenizer: PreTrainedTokenizerBase, settings: Config, shots: Messages) -> str:
    """Return the text of a Modelfile for a GGUF file beside it."""
    sampling = settings.sampling
    context = max(settings.data.prompt_length + sampling.max_new_tokens, LEAST_CONTEXT)
    lines = [f"FROM ./{file}"]
    if tokenizer.chat_template is None:
        texts = with_shots(tokenizer, [{"role": "user", "content": "{{ .Prompt }}"}], shots)
        lines.append(quoted("TEMPLATE", "\n\n".join(text["content"] for text in texts)))
    else:
        lines += [quoted("TEMPLATE", template) for template in ollama_template(tokenizer)]
        lines += [quoted(f"MESSAGE {shot['role']}", shot["content"]) for shot in shots]
    lines += [
        f"PARAMETER temperature {sampling.temperature:g}",
        f"PARAMETER top_k {sampling.top_k}",
        f"PARAMETER top_p {sampling.top_p:g}",
        "PARAMETER min_p 0",  # Ollama's default settings would change the distribution
        "PARAMETER repeat_penalty 1",
        f"PARAMETER num_predict {sampling.max_new_tokens}",
        f"PARAMETER num_ctx {context}",
    ]
    stops = [*tokenizer.convert_ids_to_tokens(eos_ids(tokenizer)), *sampling.stops]
    return "\n".join([*lines, *(quoted("PARAMETER stop", stop) for stop in stops), ""])


def quoted(words: str, text: str) -> str:
    """Return an instruction with a text that may have several lines."""
    return f'{words} """{text}"""'


def ollama_template(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the chat template of a tokenizer in Ollama's language, or nothing if it is not ChatML."""

    def rendered(*roles: str) -> str:
        messages = [{"role": role, "content": role} for role in roles]
        return render_chat(tokenizer, messages, add_generation_prompt=True)

    default, turn, end = rendered("user").rpartition(TURN.format("user", "user"))
    chat = ("system", "user", "assistant", "user")
    try:
        is_chatml = turn and rendered(*chat) == "".join(TURN.format(role, role) for role in chat) + end
    except jinja2.TemplateError:  # some templates reject a system message
        is_chatml = False
    if not is_chatml:
        return []
    start = f"{{{{ if not .System }}}}{default}{{{{ end }}}}" if default else ""
    turns = TURN.format("{{ .Role }}", "{{ .Content }}")
    return [f"{start}{{{{ range .Messages }}}}{turns}{{{{ end }}}}{end}"]
