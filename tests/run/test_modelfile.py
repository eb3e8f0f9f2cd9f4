"""Tests of the Modelfile for Ollama: its template renders what the chat template renders, or there is none."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import train_grpo
from rlhf.data.tokenizer import load_tokenizer
from rlhf.demo.ready import WEIGHTS
from rlhf.run.modelfile import NotTranslated, go_template, modelfile
from tests.shapes import (
    SMOLLM2_TEMPLATE,
    gemma_tokenizer,
    gpt_neox_tokenizer,
    mistral_tokenizer,
    qwen3_tokenizer,
    smollm2_tokenizer,
)

# written by hand, with Ollama's documentation of templates
SMOLLM2_IN_GO = (
    '{{ range $i, $_ := .Messages }}{{ if and (eq $i 0) (ne .Role "system") }}<|im_start|>system\n'
    "You are a helpful assistant<|im_end|>\n{{ end }}"
    '{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
    '{{ else if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
    '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n'
    "{{ end }}{{ end }}<|im_start|>assistant\n"
)
WORDS_IN_GO = (
    '{{ range $i, $_ := .Messages }}{{ if eq .Role "system" }}{{ "{{" }}{{ .Content }}}}\n'
    '{{ else if eq .Role "user" }}User: {{ .Content }}\n{{ else if eq .Role "assistant" }}Bot: {{ .Content }}\n'
    "{{ end }}{{ end }}Bot:"
)
WORDS = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ '{{' + m.content + '}}' }}{% else %}"
    "{{ 'User' if m.role == 'user' else 'Bot' }}: {{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Bot:{% endif %}"
)
BRACES = (
    "{% for m in messages %}{{ m.role + ' {' + m.content + '}{{{' }}{% endfor %}"
    "{% if add_generation_prompt %}bot {{ '{' }}{% endif %}"
)
BRACES_IN_GO = (
    '{{ range $i, $_ := .Messages }}{{ if eq .Role "system" }}system {{ "{" }}{{ .Content }}}{{ "{{{" }}'
    '{{ else if eq .Role "user" }}user {{ "{" }}{{ .Content }}}{{ "{{{" }}'
    '{{ else if eq .Role "assistant" }}assistant {{ "{" }}{{ .Content }}}{{ "{{{" }}{{ end }}{{ end }}bot {{ "{" }}'
)
WITH_BOS = "{{ bos_token }}" + WORDS.replace("'{{' + m.content + '}}'", "m.content")


def with_template(tokenizer, template: str):
    """Return a function that returns the tokenizer with this chat template."""
    tokenizer.chat_template = template
    return lambda: tokenizer


TRANSLATED = {
    "smollm2": (smollm2_tokenizer, SMOLLM2_IN_GO),
    "words": (with_template(smollm2_tokenizer(), WORDS), WORDS_IN_GO),
    "braces": (with_template(smollm2_tokenizer(), BRACES), BRACES_IN_GO),
    "bos": (
        with_template(gemma_tokenizer(), WITH_BOS),
        WORDS_IN_GO.replace('{{ "{{" }}', "").replace("}}}}", "}}"),
    ),
    "plain": (gpt_neox_tokenizer, "{{ range $i, $_ := .Messages }}{{ if $i }}\n\n{{ end }}{{ .Content }}{{ end }}"),
}
TRIMMED = SMOLLM2_TEMPLATE.replace("['content']", "['content'].strip()")
NUMBERED = "{% for m in messages %}{{ m.role }} {{ loop.index }}: {{ m.content }}\n{% endfor %}"
QUOTED = WORDS.replace("Bot:{% endif %}", 'Bot: """{% endif %}')
NOT_TRANSLATED = {
    "no system message": (mistral_tokenizer, "rejects chats that Ollama may send (only user and assistant)"),
    "trimmed": (with_template(qwen3_tokenizer(), TRIMMED), "does more than write text around messages (roles user)"),
    "last": (with_template(qwen3_tokenizer(), "{{ messages[-1].content }}"), "omits or moves messages"),
    "numbered": (with_template(qwen3_tokenizer(), NUMBERED), "depends on other messages"),
    "BOS of Ollama only": (with_template(gemma_tokenizer(), WORDS), "Ollama starts every prompt with <bos>"),
    "quotes": (with_template(qwen3_tokenizer(), QUOTED), 'contains """'),
}


@pytest.mark.parametrize("name", TRANSLATED)
def test_chat_templates_are_translated_to_go(name):
    make, expected = TRANSLATED[name]
    assert go_template(make()) == expected


def test_template_of_the_demo_and_of_qwen3_is_translated_without_a_default_system_message():
    start, turns = "{{ range $i, $_ := .Messages }}", SMOLLM2_IN_GO[SMOLLM2_IN_GO.index('{{ if eq .Role "system"') :]
    assert go_template(qwen3_tokenizer()) == start + turns
    assert go_template(load_tokenizer(str(WEIGHTS))) == start + turns


@pytest.mark.parametrize("name", NOT_TRANSLATED)
def test_a_template_that_cannot_be_translated_gives_the_reason(name):
    make, reason = NOT_TRANSLATED[name]
    with pytest.raises(NotTranslated) as error:
        go_template(make())
    assert reason in str(error.value)


def test_modelfile_without_a_template_has_the_reason_in_a_comment():
    settings = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "max_new_tokens": 128}
    lines = modelfile(mistral_tokenizer(), settings).splitlines()
    assert not any(line.startswith("TEMPLATE") for line in lines) and 'PARAMETER stop "</s>"' in lines
    assert "# There is no TEMPLATE here, because the chat template rejects chats that Ollama may send (only user" in (
        "\n".join(lines)
    )


def test_stops_are_eos_and_the_end_of_a_turn():
    settings = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "max_new_tokens": 128}
    lines = modelfile(gemma_tokenizer(), settings).splitlines()
    assert [line for line in lines if " stop " in line] == ['PARAMETER stop "<eos>"', 'PARAMETER stop "<end_of_turn>"']


def test_every_whole_model_of_a_run_has_a_modelfile_with_the_runs_sampling(runs, tmp_path):
    """A full model has it in the run's folder and in best/, an adapter only in merged/."""
    full, adapter = runs["ppo", 1], Path(shutil.copytree(runs["grpo", 1], tmp_path / "grpo"))
    train_grpo.main(["--resume", "--merge-lora", "--output", str(adapter)])
    assert not (adapter / "Modelfile").exists() and not (adapter / "best" / "Modelfile").exists()
    for folder in (full, full / "best", adapter / "merged"):
        text = (folder / "Modelfile").read_text(encoding="utf-8")
        template = text.split('TEMPLATE """')[1].split('"""')[0]
        assert template == SMOLLM2_IN_GO
        lines = text.replace(template, "").splitlines()
        assert [line for line in lines if line and not line.startswith("#")] == [
            "FROM ./model.gguf", 'TEMPLATE """"""', "PARAMETER temperature 0.7", "PARAMETER top_k 0",
            "PARAMETER top_p 1.0", "PARAMETER min_p 0", "PARAMETER repeat_penalty 1", "PARAMETER num_predict 8",
            'PARAMETER stop "<|im_end|>"',
        ]  # fmt: skip


# --- the real text/template of Go ------------------------------------------------------------------------------------

# reads {"template", "chats"} and prints each chat as JSON, with the fields that Ollama gives a template
GO_PROGRAM = """
package main

import ("bytes"; "encoding/json"; "os"; "text/template")

type Message struct { Role, Content string }

func main() {
	var input struct { Template string; Chats [][]Message }
	if err := json.NewDecoder(os.Stdin).Decode(&input); err != nil { panic(err) }
	parsed := template.Must(template.New("").Parse(input.Template))
	texts := []string{}
	for _, chat := range input.Chats {
		var text bytes.Buffer
		data := map[string]any{"Messages": chat, "System": "", "Response": ""}
		if err := parsed.Execute(&text, data); err != nil { panic(err) }
		texts = append(texts, text.String())
	}
	json.NewEncoder(os.Stdout).Encode(texts)
}
"""


def chats() -> list[list[dict[str, str]]]:
    user, bot = {"role": "user", "content": "2 < 3 & <|im_end|>"}, {"role": "assistant", "content": " {{ yes }}\n"}
    system = {"role": "system", "content": "Be\n\nshort."}
    return [[user], [system, user], [user, bot, user], [system, user, bot, user, bot, user]]


@pytest.mark.proof
@pytest.mark.skipif(shutil.which("go") is None, reason="Go is not installed (package golang-go)")
@pytest.mark.parametrize("name", [*TRANSLATED, "qwen3", "demo"])
def test_go_renders_what_the_chat_template_renders(name, tmp_path):
    others = {"qwen3": qwen3_tokenizer, "demo": lambda: load_tokenizer(str(WEIGHTS))}
    tokenizer = others[name]() if name in others else TRANSLATED[name][0]()
    (tmp_path / "main.go").write_text(GO_PROGRAM, encoding="utf-8")
    done = subprocess.run(
        ["go", "run", "main.go"],
        cwd=tmp_path,
        input=json.dumps({"Template": go_template(tokenizer), "Chats": chats()}),
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    expected = ["\n\n".join(m["content"] for m in chat) for chat in chats()]
    if tokenizer.chat_template is not None:
        expected = [
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats()
        ]
    if name == "bos":
        expected = [text.removeprefix("<bos>") for text in expected]
    assert json.loads(done.stdout) == expected
