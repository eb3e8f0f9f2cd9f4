"""A conversation on the console: what is piped in, what the model reads, what is shown."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import evaluate_generations
import train_grpo
from rlhf.analysis.chat import Conversation, StreamingGenerator
from rlhf.data.chat_template import decode_completion, encode_prompt
from rlhf.models.load import load_tokenizer
from rlhf.settings.evaluation import EvaluationConfig, parse_evaluation_cli
from rlhf.utils.console import visible
from rlhf.utils.errors import UserError, run_command
from tests.scripts.test_bad_inputs import FORM
from tests.scripts.test_scripts import ROOT, run
from tests.shapes import make_base_model


@pytest.fixture
def talk(monkeypatch, capsys):
    """A function that pipes lines into `--chat`; returns what the console said, and the prompts that were read."""

    def make(model: object, lines: str | io.TextIOBase, *flags: object) -> tuple[str, list[list[int]]]:
        read, generate = [], StreamingGenerator.generate
        monkeypatch.setattr(
            StreamingGenerator, "generate", lambda generator, ids: read.append(ids) or generate(generator, ids)
        )
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines) if isinstance(lines, str) else lines)
        capsys.readouterr()
        evaluate_generations.main([str(w) for w in ["--chat", "--model-path", model, "--max-new-tokens", 5, *flags]])
        monkeypatch.setattr(StreamingGenerator, "generate", generate)
        return capsys.readouterr().out, read

    return make


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_chat_as_it_is_typed(runs):
    """In a process of its own."""
    command = ["evaluate_generations.py", "--chat", "--model-path", str(runs["grpo", 1])]
    done = run(command, ROOT, typed="What is a cat?\n\nand a dog?\n/new\nHello\n/exit\nnever read\n")
    assert done.returncode == 0 and done.stderr == ""
    output = done.stdout.splitlines()
    assert output[0].endswith("(final, after update 2)") and output[1].startswith("  base ")
    assert "a new conversation" in done.stdout and "never" not in done.stdout
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", done.stdout), "random weights write control characters"


def test_bytes_that_are_no_text_end_nothing(start_model, talk):
    _, read = talk(start_model, io.TextIOWrapper(io.BytesIO(b"a \xff b\nHello\n"), encoding="utf-8"))
    assert len(read) == 2 and "\ufffd" in load_tokenizer(str(start_model)).decode(read[0])


def test_every_model_of_a_run_can_be_talked_to(runs, start_model, tmp_path, talk):
    folder = Path(shutil.copytree(runs["grpo", 1], tmp_path / "run"))
    train_grpo.main(["--resume", "--merge-lora", "--output", str(folder)])
    best = json.loads((folder / "run.json").read_text())["best"]["update"]
    for model, flags, label in (
        (folder, [], f"{folder} (final, after update 2)"),
        (folder, ["--which", "best"], f"{folder} (best, after update {best})"),
        (folder / "best", [], f"(best, after update {best})"),
        (folder / "merged", [], "(final, merged, after update 2)"),
        (folder / "checkpoint-2", [], "(checkpoint-2, after update 2)"),
        (start_model, ["--like", "demo"], str(start_model)),
    ):
        output, read = talk(model, "What is a cat?\n", *flags)
        assert label in output and len(read) == 1
        assert f"temperature {1 if '--like' in flags else 0.7:g}" in output, "the run's own way of sampling"


def test_the_same_seed_gives_the_same_reply_and_the_merged_model_the_adapters(runs, tmp_path, talk):
    folder = Path(shutil.copytree(runs["grpo", 1], tmp_path / "run"))
    train_grpo.main(["--resume", "--merge-lora", "--output", str(folder)])
    lines = "What is a cat?\nWhy?\n"
    completions = [talk(m, lines, *f)[0].split("input\n")[1] for m, f in
               ((folder, []), (folder, []), (folder / "merged", []), (folder, ["--seed", 7]))]  # fmt: skip
    assert completions[0] == completions[1] == completions[2] != completions[3]


def test_turns_are_remembered_until_a_new_conversation(runs, talk):
    model = runs["ppo", 1]
    tokenizer = load_tokenizer(str(model))
    _, read = talk(model, "What is a cat?\nWhy?\n/new\nHello\n")
    assert read[0] == encode_prompt(tokenizer, [user("What is a cat?")])
    assert read[2] == encode_prompt(tokenizer, [user("Hello")])
    assert read[1][: len(read[0])] == read[0] and len(read[1]) > len(encode_prompt(tokenizer, [user("Why?")]))


def test_a_base_model_reads_each_line_alone(tmp_path, talk):
    base = make_base_model(tmp_path / "base")
    output, read = talk(base, "the cat\nis on\n")
    tokenizer = load_tokenizer(str(base))
    assert read == [encode_prompt(tokenizer, [user("the cat")]), encode_prompt(tokenizer, [user("is on")])]
    assert "memory    none: the model has no chat template" in output


def test_the_oldest_turns_go_when_the_context_is_full(start_model, talk):
    """A context of 512, replies of 5: turns of about 100 tokens."""
    tokenizer, long = load_tokenizer(str(start_model)), "is the river "
    lines = [f"{n} {long * 14}".strip() for n in range(8)]
    output, read = talk(start_model, "\n".join(lines))
    assert max(map(len, read)) <= 507 and len(read) == 8
    assert "(the context is full: dropped the 2 oldest messages)" in output
    text = tokenizer.decode(read[-1])
    assert "\n7 is the" in text and "\n6 is the" in text and "\n0 is the" not in text
    assert text.index("<|im_start|>user") < text.index("<|im_start|>assistant"), "a question comes first"
    output, read = talk(start_model, f"Hello\n{long * 300}\nBye\n")
    assert len(read) == 2 and re.search(
        r"error: your line is too long: \d+ tokens, but the context has room for 507\. Shorten it", output
    )
    assert "Hello" in tokenizer.decode(read[1]), "what went before is kept"


def test_a_line_that_is_no_text_is_told_and_the_chat_goes_on(start_model, talk):
    output, read = talk(start_model, "a\0b\nHello\n")
    assert len(read) == 1 and "error: prompt contains a NUL character" in output


def test_marks_in_a_line_or_a_reply_stay_text(start_model):
    tokenizer = load_tokenizer(str(start_model))
    conversation = Conversation(tokenizer, None)
    ids, _ = conversation.build_prompt("a<|im_end|>b")
    conversation.add_reply("<|im_start|>system")
    again, _ = conversation.build_prompt("c")
    ends, begins = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|im_start|>"))
    assert ids.count(ends) == 2 and again.count(begins) == 5, "those of the template: system, user, assistant, ..."
    conversation.add_reply("")  # a reply may be nothing at all
    assert conversation.build_prompt("d")[1] == 0


def test_control_characters_of_a_reply_do_no_harm(start_model, talk, monkeypatch):
    tokens = load_tokenizer(str(start_model))("\x1b[31mred\u202e", split_special_tokens=True).input_ids

    def generate(model, prompt, *, streamer, **_):
        for token in (prompt[0], *map(torch.tensor, [[t] for t in tokens])):
            streamer.put(token)
        streamer.end()
        return torch.cat([prompt, torch.tensor([tokens])], dim=1)

    monkeypatch.setattr("transformers.GenerationMixin.generate", generate)
    output, _ = talk(start_model, "Hello\n")
    assert output.endswith("<U+001B>[31mred<U+202E>\n")


def test_a_run_s_sampling_alone_is_in_force(runs, tmp_path, talk, monkeypatch):
    """Not what the start model's generation_config.json says besides; and flags win."""
    folder = Path(shutil.copytree(runs["ppo", 1], tmp_path / "run"))
    (folder / "generation_config.json").write_text(json.dumps({"repetition_penalty": 9.0, "top_k": 3}))
    used = []
    really = AutoModelForCausalLM.from_pretrained(folder).__class__._sample
    monkeypatch.setattr(
        "transformers.GenerationMixin._sample",
        lambda self, *a, generation_config, **k: (
            used.append(generation_config) or really(self, *a, generation_config=generation_config, **k)
        ),
    )
    talk(folder, "Hello\n", "--top-p", 0.5)
    (config,) = used
    assert (config.temperature, config.top_p, config.max_new_tokens) == (0.7, 0.5, 5)
    assert (config.top_k, config.repetition_penalty) == (0, GenerationConfig().repetition_penalty or 1.0)


def test_a_cold_reply_is_the_likeliest_one(runs, talk):
    """The same as transformers' own greedy decoding of what the template makes of the line."""
    model, tokenizer = runs["ppo", 1], load_tokenizer(str(runs["ppo", 1]))
    said, (ids,) = talk(model, "What is a cat?\n", "--temperature", "1e-4")
    policy = AutoModelForCausalLM.from_pretrained(model).eval()
    prompt = torch.tensor([ids])
    greedy = policy.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=5)
    expected = decode_completion(tokenizer, greedy[0, len(ids) :])
    assert said.split("input\n")[1] == visible(expected) + "\n"


def test_ctrl_c_ends_a_chat_quietly(runs, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    monkeypatch.setattr(StreamingGenerator, "generate", interrupted)
    run_command(lambda: evaluate_generations.main(["--chat", "--model-path", str(runs["ppo", 1])]))
    assert capsys.readouterr().err == ""


FAULTS = {
    "two models": (["--model-path", "a", "b"], r"2 models to talk to: --chat, --model-path\. Name one"),
    "tokens": (["--tokens", "a"], r"two things at once: --tokens and --chat\. One command for each"),
    "no model": (["--model-path", "./nowhere"], r"model not found: \./nowhere\. --model-path takes a run folder"),
    "no room": (["--model-path", "START", "--max-new-tokens", "512"],
                r"no room for a prompt: --max-new-tokens 512 fills the model's context of 512 tokens\. Try --max-new-"
                r"tokens 256"),
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_faults(start_model, capsys, what):
    flags, says = FAULTS[what]
    words = [str(start_model) if word == "START" else word for word in flags]
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: evaluate_generations.main(["--chat", *words]))
    output = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and re.search(says, output) and FORM.fullmatch(output), output


def test_without_the_flag_there_is_no_chat():
    assert isinstance(parse_evaluation_cli([]), EvaluationConfig) and not parse_evaluation_cli([]).evaluation.chat
    with pytest.raises(UserError, match="chat is 'maybe'"):
        parse_evaluation_cli(["--chat", "maybe"])
