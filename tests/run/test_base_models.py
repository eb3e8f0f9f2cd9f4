"""Runs of base models from start to end: plain prompts, worked examples, stop strings, evaluation, model card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import evaluate_generations
import train_grpo
import train_ppo
from rlhf.checkpoints.run_record import RunRecord
from rlhf.data.chat_template import encode_prompt, with_shots
from rlhf.data.tokenizer import eos_ids, load_tokenizer
from rlhf.settings.recipes import find_recipe
from tests.shapes import make_base_model, make_start_model

STOP = ["e", "a", "n"]
CODE = """
import json

def recorded(prompts, completions, completion_ids, ended, answer, log_extra=None, **_):
    with open({file!r}, "a", encoding="utf-8") as stream:
        for row in zip(prompts, completions, completion_ids, ended):
            stream.write(json.dumps(row) + "\\n")
    return [len(text) / 10 for text in completions]
"""


@pytest.fixture
def inputs(tmp_path) -> Path:
    """Return a folder with a base model, prompts, worked examples and a reward function that records its inputs."""
    make_base_model(tmp_path / "base")
    rows = [{"prompt": f"number {i} =", "answer": str(i)} for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shots = [{"prompt": "one =", "answer": "1"}, {"prompt": "two:\n", "answer": "2"}]
    (tmp_path / "shots.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shots))
    (tmp_path / "rule.py").write_text(CODE.format(file=str(tmp_path / "seen.jsonl")))
    return tmp_path


def flags(folder: Path, *more: object) -> list[str]:
    words = [
        *("--actor-model", folder / "base", "--prompts", folder / "prompts.jsonl", "--rm-model", "none"),
        *("--reward-func", f"{folder / 'rule.py'}:recorded", "--output", folder / "run", "--eval-prompts", 4),
        *("--num-iterations", 1, "--batch-size", 2, "--max-new-tokens", 30, "--temperature", 1),
        *("--stop", *STOP, "--few-shot", folder / "shots.jsonl", *more),
    ]
    return [str(word) for word in words]


def test_base_model_from_start_to_end(inputs, capsys, monkeypatch):
    monkeypatch.setattr("rlhf.callbacks.reward_warning.MOST_SECONDS", 0.0)  # the function records all its calls
    train_grpo.main(flags(inputs, "--K", 4, "--use-lora"))
    run = inputs / "run"
    tokenizer = load_tokenizer(str(inputs / "base"))
    output = capsys.readouterr().out
    assert "stop 'e' 'a' 'n'" in output
    seen = [json.loads(line) for line in (inputs / "seen.jsonl").read_text().splitlines()]
    for prompt, text, ids, ended in seen:
        assert prompt.startswith("number "), "reward functions receive the prompt without worked examples"
        assert not set("ean") & set(text)
        stopped = bool(set("ean") & set(tokenizer.decode(ids)))
        assert ended == (stopped or ids[-1] in eos_ids(tokenizer))
        assert not set("ean") & set(tokenizer.decode(ids[:-1], skip_special_tokens=True)), "the last token stops"
    assert sum(ended for *_, ended in seen) > len(seen) / 2
    record = RunRecord.read(run)
    assert record.flat_settings["stop"] == STOP and len(record.data["few_shot"]) == 4
    card = (run / "README.md").read_text(encoding="utf-8")
    assert 'stop_strings=["e", "a", "n"], tokenizer=tokenizer)' in card
    assert 'prompt = "one = 1\\n\\ntwo:\\n2\\n\\nWrite' in card
    assert "eos_token_id=[0, 2]," in card


def test_evaluation_of_a_base_model_samples_as_its_run(inputs):
    """The completions of the start model in an evaluation stop at the same strings, after the same prompts."""
    train_ppo.main(flags(inputs))
    (inputs / "seen.jsonl").unlink()
    words = ["--model-path", inputs / "run", "--output", inputs / "out", "--num-prompts", 3, "--trust-reward-code"]
    evaluate_generations.main([str(word) for word in words])
    report = json.loads((inputs / "out" / "evaluation.json").read_text(encoding="utf-8"))
    seen = [json.loads(line) for line in (inputs / "seen.jsonl").read_text().splitlines()]
    assert seen and not any(set("ean") & set(text) for _, text, *_ in seen)
    assert any("stop 'e' 'a' 'n'" in str(value) for value in report.values())
    (inputs / "shots.jsonl").rename(inputs / "moved.jsonl")
    with pytest.raises(Exception, match="shots.jsonl"):
        evaluate_generations.main([str(word) for word in words])


def test_prompt_of_a_base_model_follows_worked_examples_directly(inputs):
    """A space separates prompt and answer if neither has white space there."""
    tokenizer = load_tokenizer(str(inputs / "base"))
    shots = [{"role": "user", "content": "one ="}, {"role": "assistant", "content": "1"},
             {"role": "user", "content": "two:\n"}, {"role": "assistant", "content": "2"},
             {"role": "user", "content": "three ="}, {"role": "assistant", "content": " 3"}]  # fmt: skip
    ids = encode_prompt(tokenizer, [{"role": "user", "content": "four ="}], shots)
    assert tokenizer.decode(ids) == "one = 1\n\ntwo:\n2\n\nthree = 3\n\nfour ="


def test_worked_examples_of_a_chat_follow_its_system_message(tmp_path):
    tokenizer = load_tokenizer(str(make_start_model(tmp_path / "start")))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    shots = [{"role": "system", "content": "Other."}, {"role": "user", "content": "1 + 1?"},
             {"role": "assistant", "content": "2"}]  # fmt: skip
    assert with_shots(tokenizer, messages, shots) == [messages[0], *shots[1:], messages[1]]


def test_stop_none_removes_the_stop_strings_of_a_recipe(run_flags):
    from rlhf.config import make_config, parse_cli

    assert find_recipe("qwen3-tldr").training["stop"][0] == "\n"
    assert make_config("qwen3-tldr").sampling.stops == ("\n",)
    assert parse_cli(["--recipe", "qwen3-tldr", "--stop", "none"], "ppo").sampling.stops == ()


def test_empty_stop_string_is_refused(configured, user_error):
    with user_error("--stop"):
        configured("--stop", "a", "")
