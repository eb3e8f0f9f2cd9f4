"""Convert text to token ids and back with the chat template. No other module renders prompts.

Reward model training, scoring and RL use the same rendering. Text from the data never becomes a special token,
because the chat template's own text and the message contents are tokenized separately.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jinja2

from rlhf.utils.errors import UserError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[dict[str, str]]
_SLOT = "\ue000{}\ue001"  # private-use characters, which no chat template writes
_SLOTS = re.compile("\ue000([0-9]+)\ue001")
THINKING = ("<think>", "</think>")
SOME_CHAT = ({"role": "user", "content": "?"},)  # to find out what a template writes
# the marks of well-known chat templates: ChatML, Llama 3, DeepSeek and others; Gemma; Llama 2 and Mistral. Plain words
# ("Assistant:", "### Response:") are no marks: questions and prompts of base models have them, too
KNOWN_MARKS = r"<[|\uff5c][\w\u2581]+[|\uff5c]>|<(?:start|end)_of_turn>|\[/INST\]\s*(?:\0|\Z)"
CLOCK = "strftime_now"  # transformers' function with which a chat template writes the present date or time
DATE = "chat_template_date"  # key of tokenizer_config.json
KWARGS = "chat_template_kwargs"  # key of tokenizer_config.json
DATE_CODES = r"(?<![{%])%[-#_0^EO]?[A-Za-z]"  # in a chat template; `{%` opens a block


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Messages, **more: Any) -> str:
    """Return the text of a chat. `more` are further arguments of `apply_chat_template`. Raises what the template does.

    A chat template that writes the present date (Llama 3.1 and 3.2, Granite) gets the tokenizer's date: otherwise the
    prompts of a run that is resumed, or evaluated, on another day would differ from those that it was trained on.
    """
    date = date_of(tokenizer)
    template = None if date is None else _at_date(tokenizer.chat_template, date)  # None: the tokenizer's own
    more = kwargs_of(tokenizer) | more
    return tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template, **more)


@lru_cache
def _at_date(template: str, date: str) -> str:
    """Return a chat template whose `strftime_now` formats `date` (ISO 8601): a macro hides transformers' function.

    A function as a template variable would hide it, too, but transformers 5.23 replaces variables that are no data.
    """
    when = datetime.fromisoformat(date)
    parts = []
    for code in sorted({*re.findall(DATE_CODES, template)}):
        with contextlib.suppress(ValueError):  # on Windows, for a code that its C library does not know
            parts.append(f"|replace({code!r}, {when.strftime(code)!r})")
    return f"{{% macro {CLOCK}(format) %}}{{{{ format{''.join(parts)} }}}}{{% endmacro %}}\n{template}"


def template_for_others(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template with which other programs render the prompts of `encode_prompt`: with the tokenizer's
    date. For a tokenizer without one, it joins the texts in the same way."""
    if tokenizer.chat_template is None:
        start = tokenizer.bos_token if _bos(tokenizer) else ""
        return f"{{{{ {start!r} + messages | map(attribute='content') | join('\n\n') }}}}"
    date = date_of(tokenizer)
    return tokenizer.chat_template if date is None else _at_date(tokenizer.chat_template, date)


def date_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the date with which `render_chat` replaces the present one; None if the chat template writes none."""
    return tokenizer.init_kwargs.get(DATE)


def kwargs_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the variables that `render_chat` gives to the chat template."""
    return tokenizer.init_kwargs.get(KWARGS, {})


def template_rows(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """Return the rows of a plan, or of an evaluation, about the date in prompts and the chat template's variables."""
    date = date_of(tokenizer)
    rows = {"date": date and f"{date}: the chat template writes it into all prompts"}
    rows[KWARGS] = str(kwargs_of(tokenizer) or "")
    return [row for row in rows.items() if row[1]]


def today() -> str:
    """Return the local date and time in ISO 8601, as `strftime_now` would use them."""
    return datetime.now().isoformat(timespec="seconds")


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, shots: Messages = (), **how: Any
) -> list[int]:
    """Return the token ids of a prompt after the worked examples `shots`, up to where the completion starts. `how`:
    further arguments of `apply_chat_template`, such as the tools.

    Uses the tokenizer's chat template if it has one. Otherwise (a base model) the contents are joined with blank
    lines, and the completion follows directly. Template and contents are tokenized as one text, as in the model's
    fine-tuning, unless a content would then produce special tokens. In that case they are tokenized separately.
    Raises UserError if the chat template fails.
    """
    messages = with_shots(tokenizer, messages, shots)
    contents = [m["content"] for m in messages]
    if tokenizer.chat_template is None:
        return _bos(tokenizer) + encode_text(tokenizer, "\n\n".join(contents))
    return _ids_of(tokenizer, *_rendered(tokenizer, messages, add_generation_prompt=True, **how), contents)


def encode_whole(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, completion: str, ended: bool = True
) -> list[int]:
    """Return the token ids of a prompt with its completion as a reward model reads them: what the chat template writes
    for the whole chat, up to the end if the completion `ended`, otherwise up to the end of the completion.

    Without a chat template: prompt, completion and, if it ended, EOS as one text. TRL's RewardTrainer encodes pairs in
    the same way. Contents never become special tokens, as in `encode_prompt`. Raises UserError if the chat template
    fails.
    """
    chat = [*messages, {"role": "assistant", "content": completion}]
    contents = [m["content"] for m in chat]
    if tokenizer.chat_template is None:
        contents = ["\n\n".join(contents[:-1]), completion]
        end = tokenizer.eos_token if ended else ""
        slots = _SLOT.format(0) + _SLOT.format(1) + end
        return _bos(tokenizer) + _ids_of(tokenizer, slots, "".join(contents) + end, contents)
    is_blank = not completion.strip()
    if is_blank:  # some templates reject an assistant message without text
        chat[-1] = {**chat[-1], "content": "yes"}
    slots, text = _rendered(tokenizer, chat)
    if is_blank:
        text = _SLOTS.sub(lambda found: contents[int(found[1])], slots)
    tail = _SLOTS.split(slots)[-1]
    if not ended:
        slots = slots.removesuffix(tail)
        text = text.removesuffix(tail)
    return _ids_of(tokenizer, slots, text, contents)


def encode_reply(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """Return the token ids between an assistant's completion and the next one, with messages between them: what the
    chat template writes from the end of the first turn to the start of the second. The messages never produce special
    tokens, as in `encode_prompt`. Messages of tools answer calls of the completion. Raises UserError without a chat
    template, or if it fails."""
    if tokenizer.chat_template is None:
        raise UserError(
            "the model has no chat template", f"message {messages[0]!r:.60}", "Give the observation as text"
        )
    mark = _SLOT.format(1)
    turn = {"role": "assistant", "content": mark}
    behind_call = 0
    if messages[0]["role"] == "tool":  # some templates write the answer of a tool only after a call
        turn["tool_calls"] = [{"type": "function", "function": {"name": messages[0]["name"], "arguments": {}}}]
        end = end_of_turn(tokenizer)
        called = _rendered(tokenizer, [*SOME_CHAT, turn])[0].split(mark)[-1]
        behind_call = 0 if end is None else max(0, called.rfind(tokenizer.convert_ids_to_tokens(end)))
    chat = [*SOME_CHAT, turn, *messages]
    whole = _rendered(tokenizer, chat, add_generation_prompt=True)
    slots, text = (one.split(mark)[-1][behind_call:] for one in whole)
    return _ids_of(tokenizer, slots, text, [m["content"] for m in chat])


def _bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return BOS, if this tokenizer adds one to a text; otherwise no id."""
    start = tokenizer("").input_ids
    return start[:1] if start and start[0] == tokenizer.bos_token_id else []


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Messages, **how: Any) -> tuple[str, str]:
    """Return a chat as its template writes it: with a slot in place of each content, and with the contents. Raises
    UserError if the template fails."""
    slots = [{**m, "content": _SLOT.format(i)} for i, m in enumerate(messages)]
    try:
        return render_chat(tokenizer, slots, **how), render_chat(tokenizer, messages, **how)
    except Exception as error:  # a template is code and may raise anything; some reject a system message
        roles = ", ".join(m["role"] for m in messages)
        last = messages[-1]["content"]
        reason = first_line(error, "")
        kind = "rejects it" if isinstance(error, jinja2.TemplateError) else f"fails with {type(error).__name__}"
        raise UserError(
            f"the chat template {kind} ({reason:.200})",
            f"prompt with the roles {roles}, {last!r:.40}",
            "Write chats in the form that the model's chat template accepts",
        ) from None


def _ids_of(tokenizer: PreTrainedTokenizerBase, slots: str, text: str, contents: Sequence[str]) -> list[int]:
    """Return the ids of `text`. If a content in it would produce special tokens, the pieces around the slots and the
    contents are tokenized separately."""
    pieces = _SLOTS.split(slots)
    # no marks of a turn: a template may read them in a completion, as Qwen 3's does
    thinking = {i for token, i in tokenizer.get_added_vocab().items() if token in THINKING}
    special = _special_ids(tokenizer) - thinking
    together = tokenizer(text, add_special_tokens=False).input_ids
    of_template = tokenizer("".join(pieces[::2]), add_special_tokens=False).input_ids
    if [i for i in together if i in special] == [i for i in of_template if i in special]:
        return together
    ids: list[int] = []
    for i, piece in enumerate(pieces):
        if i % 2:
            ids += encode_text(tokenizer, contents[int(piece)])
        elif piece:
            ids += tokenizer(piece, add_special_tokens=False).input_ids
    return ids


def with_shots(tokenizer: PreTrainedTokenizerBase, messages: Messages, shots: Messages) -> list[dict[str, str]]:
    """Return the messages of a prompt after worked examples.

    With a chat template, these are turns after the prompt's system message. Without one, each is one text: its answer
    follows its prompt as a completion does, after a space if neither has one there.
    """
    if tokenizer.chat_template is not None:
        lead = [m for m in messages[:1] if m["role"] == "system"]
        return [*lead, *(m for m in shots if m["role"] != "system"), *messages[len(lead) :]]
    texts: list[str] = []
    for role, content in ((m["role"], m["content"]) for m in shots):
        before = texts.pop() if role == "assistant" else ""
        gap = " " if before and not (before[-1].isspace() or content[0].isspace()) else ""
        texts.append(before + gap + content)
    return [*({"role": "user", "content": text} for text in texts), *messages]


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the first special token that the chat template writes after a completion, or None if there is none.

    Also None if the template fails: `encode_prompt` reports that.
    """
    if tokenizer.chat_template is None:
        return None
    try:
        text = render_chat(tokenizer, [*SOME_CHAT, {"role": "assistant", "content": _SLOT.format(0)}])
    except Exception:  # a template may raise anything; encode_prompt reports it
        return None
    ids = tokenizer(text.split(_SLOT.format(0))[-1], add_special_tokens=False).input_ids
    special = _special_ids(tokenizer)
    return next((i for i in ids if i in special), None)


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of all tokens that message contents must not produce."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special | set(tokenizer.all_special_ids) | _turn_ids(tokenizer)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of text from data or a model. They contain no special tokens, whatever the text is."""
    # detail 2: a text gives ordinary tokens only (this project). Otherwise a message could end its own turn.
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    return ids if _turn_ids(tokenizer).isdisjoint(ids) else _encode_by_pieces(tokenizer, text)


def _turn_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of the chat template's added tokens that are not marked as special, such as DeepSeek's
    `<｜User｜>`. `split_special_tokens` does not split these, so a text could produce them."""
    if not tokenizer.is_fast or tokenizer.chat_template is None:
        return set()
    template = str(tokenizer.chat_template)
    added = tokenizer.added_tokens_decoder.items()
    return {i for i, token in added if not token.special and token.content.strip() and token.content in template}


def marks_of(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> re.Pattern[str]:
    """Return the pattern of what chat templates write around messages: the special tokens around these `messages`, and
    the marks of well-known templates. BOS, EOS and <think> are no marks: HTML has <s>, and instructions have <think>.
    """
    special = _special_ids(tokenizer).intersection(encode_prompt(tokenizer, messages))
    own = {*tokenizer.convert_ids_to_tokens([*special])} - {tokenizer.bos_token, tokenizer.eos_token, "<think>"}
    return re.compile("|".join([KNOWN_MARKS, *map(re.escape, own)]))


def _encode_by_pieces(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenize a text without the tokenizer's search for added tokens."""
    backend = tokenizer.backend_tokenizer
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    words = [text]
    if backend.pre_tokenizer is not None:
        words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return [token.id for word in words for token in backend.model.tokenize(word)]


def encode_completion(tokenizer: PreTrainedTokenizerBase, text: str, ended: bool = True) -> list[int]:
    """Return the ids of a completion, with EOS if the completion ended."""
    return encode_text(tokenizer, text) + ([tokenizer.eos_token_id] if ended else [])


def decode_completion(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """Return the text of a completion without special tokens, up to the first of the stop strings."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return text[: min((at for one in stop if (at := text.find(one)) >= 0), default=None)]


def removed_tags(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the pairs of tags, such as <think> and </think>, that are special tokens: `decode_completion` removes
    them."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    tags = special - {tokenizer.bos_token, tokenizer.eos_token}
    names = {tag: tag.strip("</>") for tag in tags}
    return sorted(tag for tag, name in names.items() if {f"<{name}>", f"</{name}>"} <= tags)
