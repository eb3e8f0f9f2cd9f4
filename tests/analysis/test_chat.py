"""Tests `evaluate_generations.py --chat`: the input lines, the prompts of the model and the console output."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import evaluate_generations
import train_grpo
from rlhf.analysis import chat
from rlhf.analysis.chat import ReplyGenerator, newest_turns
from rlhf.data.chat_template import decode_completion, encode_prompt
from rlhf.data.tokenizer import load_tokenizer
from rlhf.rollout import sampler
from rlhf.rollout.episodes import Episode
from rlhf.settings.evaluation import EvaluationConfig, parse_evaluation_cli
from rlhf.utils.errors import RunError, UserError, run_command, visible
from tests.rollout.test_engine import HeadWithBadLogits
from tests.scripts.test_bad_inputs import FORM
from tests.scripts.test_scripts import ROOT, run
from tests.shapes import make_base_model


@pytest.fixture
def talk(monkeypatch, capsys):
    """Return a function that pipes lines into `--chat` and returns the console output and the prompts (token ids)."""

    def make(model: object, lines: str | io.TextIOBase, *flags: object) -> tuple[str, list[list[int]]]:
        prompts = []
        generate = ReplyGenerator.generate
        monkeypatch.setattr(
            ReplyGenerator, "generate", lambda generator, ids: prompts.append(ids) or generate(generator, ids)
        )
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines) if isinstance(lines, str) else lines)
        capsys.readouterr()
        evaluate_generations.main([str(w) for w in ["--chat", "--model-path", model, "--max-new-tokens", 5, *flags]])
        monkeypatch.setattr(ReplyGenerator, "generate", generate)
        return capsys.readouterr().out, prompts

    return make


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_bad_logits_end_the_chat_in_one_line(start_model, talk, monkeypatch, value):
    load = chat.load_model_ref

    def with_bad_logits(*arguments):
        policy = load(*arguments)
        policy.set_output_embeddings(HeadWithBadLogits(policy.get_output_embeddings(), value, 7))
        return policy

    monkeypatch.setattr(chat, "load_model_ref", with_bad_logits)
    with pytest.raises(RunError, match="NaN or infinity in the logits of 1 of 1 completions") as error:
        talk(start_model, "Hello\n")
    assert len(error.value.problems) == 1


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.ci
def test_chat_in_a_separate_process(runs):
    command = ["evaluate_generations.py", "--chat", "--model-path", str(runs["grpo", 1])]
    done = run(command, ROOT, typed="What is a cat?\n\nand a dog?\n/new\nHello\n/exit\nnever read\n")
    assert done.returncode == 0 and done.stderr == ""
    output = [line for line in done.stdout.splitlines() if not line.startswith("loading the libraries: ")]
    assert output[0].startswith("evaluation: checking the models")
    assert output[1].endswith("(final, after update 2)") and output[2].startswith("  sampling ")
    assert "a new conversation" in done.stdout and "never" not in done.stdout
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", done.stdout), (
        "random weights generate control characters, which must be escaped"
    )


def test_invalid_utf8_input_does_not_end_the_chat(start_model, talk):
    _, prompts = talk(start_model, io.TextIOWrapper(io.BytesIO(b"a \xff b\nHello\n"), encoding="utf-8"))
    assert len(prompts) == 2 and "\ufffd" in load_tokenizer(str(start_model)).decode(prompts[0])


def test_chat_with_every_model_of_a_run(runs, start_model, tmp_path, talk):
    folder = Path(shutil.copytree(runs["grpo", 1], tmp_path / "run"))
    train_grpo.main(["--resume", "--merge-lora", "--output", str(folder)])
    best = json.loads((folder / "run.json").read_text())["best"]["update"]
    for model, flags, label in (
        (folder, [], "/run (final, after update 2)"),
        (folder, ["--which", "best"], f"/run (best, after update {best})"),
        (folder / "best", [], f"(best, after update {best})"),
        (folder / "merged", [], "(final, merged, after update 2)"),
        (folder / "checkpoint-2", [], "(checkpoint-2, after update 2)"),
        (start_model, ["--like", "demo"], start_model.name),
    ):
        output, prompts = talk(model, "What is a cat?\n", *flags)
        assert label in output and len(prompts) == 1
        assert f"temperature {1 if '--like' in flags else 0.7:g}" in output, "the sampling settings of the run"


def test_same_seed_gives_same_replies_from_adapter_and_merged_model(runs, tmp_path, talk):
    folder = Path(shutil.copytree(runs["grpo", 1], tmp_path / "run"))
    train_grpo.main(["--resume", "--merge-lora", "--output", str(folder)])
    lines = "What is a cat?\nWhy?\n"
    completions = [talk(m, lines, *f)[0].split("input\n")[1] for m, f in
               ((folder, []), (folder, []), (folder / "merged", []), (folder, ["--seed", 7]))]  # fmt: skip
    assert completions[0] == completions[1] == completions[2] != completions[3]


def test_history_is_kept_until_a_new_conversation(runs, talk):
    model = runs["ppo", 1]
    tokenizer = load_tokenizer(str(model))
    _, prompts = talk(model, "What is a cat?\nWhy?\n/new\nHello\n")
    assert prompts[0] == encode_prompt(tokenizer, [user("What is a cat?")])
    assert prompts[2] == encode_prompt(tokenizer, [user("Hello")])
    assert prompts[1][: len(prompts[0])] == prompts[0] and len(prompts[1]) > len(
        encode_prompt(tokenizer, [user("Why?")])
    )


def test_base_model_without_chat_template_has_no_history(tmp_path, talk):
    base = make_base_model(tmp_path / "base")
    output, prompts = talk(base, "the cat\nis on\n")
    tokenizer = load_tokenizer(str(base))
    assert prompts == [encode_prompt(tokenizer, [user("the cat")]), encode_prompt(tokenizer, [user("is on")])]
    assert "memory    none: the model has no chat template" in output


def test_reply_ends_before_a_stop_string(tmp_path, talk):
    """Of 40 random tokens, some contain one of these letters. The console has the text before the first one."""
    base = make_base_model(tmp_path / "base")
    whole, short = (
        talk(base, "the cat\n", "--max-new-tokens", 40, *flags)[0].split("input\n")[1]
        for flags in ((), ("--stop", *"aeiou"))
    )
    assert set("aeiou") & set(whole)
    assert short.rstrip("\n") == re.split("[aeiou]", whole)[0].rstrip("\n")


def test_worked_examples_precede_each_line_of_a_base_model(tmp_path):
    base = make_base_model(tmp_path / "base")
    shots = [user("1 + 1 ="), {"role": "assistant", "content": "2"}]
    tokenizer = load_tokenizer(str(base))
    ids, turns = newest_turns(tokenizer, [user("2 + 2 =")], None, shots)
    assert tokenizer.decode(ids) == "1 + 1 = 2\n\n2 + 2 ="
    assert turns == [user("2 + 2 =")]


def test_oldest_messages_are_dropped_when_the_context_is_full(start_model, talk):
    """The context has 512 tokens, a reply has 5, and each line has about 100."""
    tokenizer = load_tokenizer(str(start_model))
    long = "is the river "
    lines = [f"{n} {long * 14}".strip() for n in range(8)]
    output, prompts = talk(start_model, "\n".join(lines))
    assert max(map(len, prompts)) <= 507 and len(prompts) == 8
    assert "(the context is full: dropped the 2 oldest messages)" in output
    text = tokenizer.decode(prompts[-1])
    assert "\n7 is the" in text and "\n6 is the" in text and "\n0 is the" not in text
    assert text.index("<|im_start|>user") < text.index("<|im_start|>assistant"), (
        "the history starts with a user message"
    )
    output, prompts = talk(start_model, f"Hello\n{long * 300}\nBye\n")
    assert len(prompts) == 2 and re.search(
        r"error: your line is too long: \d+ tokens, but the context has room for 507\. Shorten it", output
    )
    assert "Hello" in tokenizer.decode(prompts[1]), "the earlier messages are kept"


def test_invalid_line_is_reported_and_the_chat_continues(start_model, talk):
    output, prompts = talk(start_model, "a\0b\nHello\n")
    assert len(prompts) == 1 and "error: prompt contains a NUL character" in output


def test_special_tokens_in_a_line_or_a_reply_are_encoded_as_text(start_model):
    tokenizer = load_tokenizer(str(start_model))
    turns = [user("a<|im_end|>b"), {"role": "assistant", "content": "<|im_start|>system"}, user("c")]
    ids, again = (newest_turns(tokenizer, turns[:count], None)[0] for count in (1, 3))
    end, start = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|im_start|>"))
    assert ids.count(end) == 2 and again.count(start) == 5, (
        "only those of the chat template: system, user, assistant, ..."
    )
    longer = [*turns, {"role": "assistant", "content": ""}, user("d")]
    assert newest_turns(tokenizer, longer, None)[1] == longer, "a reply may be empty"


def test_control_characters_in_a_reply_are_escaped(start_model, talk, monkeypatch):
    tokens = load_tokenizer(str(start_model))("\x1b[31mred\u202e", split_special_tokens=True).input_ids
    text = load_tokenizer(str(start_model)).decode(tokens)
    monkeypatch.setattr(Episode, "last_completion", text)
    output, _ = talk(start_model, "Hello\n")
    assert output.endswith("<U+001B>[31mred<U+202E>\n")


def test_chat_uses_the_sampling_settings_of_the_run_only(runs, tmp_path, talk, monkeypatch):
    """The values of generation_config.json are ignored, and flags override the settings of the run."""
    folder = Path(shutil.copytree(runs["ppo", 1], tmp_path / "run"))
    (folder / "generation_config.json").write_text(json.dumps({"repetition_penalty": 9.0, "top_k": 3}))
    used = []
    sample = sampler.sample_completions
    monkeypatch.setattr(sampler, "sample_completions", lambda *a, **k: used.append(a[3]) or sample(*a, **k))
    changed, _ = talk(folder, "Hello\n", "--top-p", 0.5)
    [sampling] = used
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens) == (0.7, 0.5, 0, 5)
    unchanged, _ = talk(runs["ppo", 1], "Hello\n", "--top-p", 0.5)
    assert changed.split("input\n")[1] == unchanged.split("input\n")[1]


def test_reply_at_low_temperature_is_greedy_decoding(runs, talk):
    """The reply equals transformers' greedy decoding of the same prompt."""
    model = runs["ppo", 1]
    tokenizer = load_tokenizer(str(runs["ppo", 1]))
    output, (ids,) = talk(model, "What is a cat?\n", "--temperature", "1e-4")
    policy = AutoModelForCausalLM.from_pretrained(model).eval()
    prompt = torch.tensor([ids])
    greedy = policy.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=5)
    expected = decode_completion(tokenizer, greedy[0, len(ids) :])
    assert output.split("input\n")[1] == visible(expected) + "\n"


def test_ctrl_c_ends_the_chat_without_a_traceback(runs, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    monkeypatch.setattr(ReplyGenerator, "generate", interrupted)
    run_command(lambda: evaluate_generations.main(["--chat", "--model-path", str(runs["ppo", 1])]))
    assert capsys.readouterr().err == ""


ERRORS = {
    "two models": (["--model-path", "a", "b"], r"--chat takes one model, not 2: --model-path\. Give one"),
    "tokens": (["--tokens", "a"], r"chat has no effect with --tokens: --chat\. Remove --tokens, or remove --chat"),
    "no model": (["--model-path", "./nowhere"], r"model not found: \./nowhere\. --model-path takes a run folder"),
    "no room": (["--model-path", "START", "--max-new-tokens", "512"],
                r"no room for a prompt: --max-new-tokens 512 fills the model's context of 512 tokens\. Try --max-new-"
                r"tokens 256"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_invalid_flags_are_one_line_errors(start_model, capsys, case):
    flags, message = ERRORS[case]
    words = [str(start_model) if word == "START" else word for word in flags]
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: evaluate_generations.main(["--chat", *words]))
    output = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and re.search(message, output) and FORM.fullmatch(output), output


def test_chat_is_off_by_default_and_takes_no_value():
    assert isinstance(parse_evaluation_cli([]), EvaluationConfig) and not parse_evaluation_cli([]).evaluation.chat
    with pytest.raises(UserError, match="chat is 'maybe'"):
        parse_evaluation_cli(["--chat", "maybe"])
