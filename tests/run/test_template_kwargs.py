"""Tests `--chat-template-kwargs` with Qwen3's thinking switch: every prompt of a run, its evaluation, chat, model card
and the models trained from it has the variables."""

from __future__ import annotations

import io
import json
import sys

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config

import evaluate_generations
import train_grpo
from rlhf.analysis.chat import ReplyGenerator
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import make_config, parse_cli
from rlhf.data.chat_template import encode_reply, kwargs_of
from rlhf.data.parts import write_parts
from rlhf.data.tokenizer import load_tokenizer
from rlhf.rewards.checks import encodes_alike
from rlhf.rewards.training import train_reward_model
from rlhf.rollout import sampler
from rlhf.settings.next_commands import reward_model_line
from rlhf.settings.reward_model import parse_reward_cli
from rlhf.utils.console import Screen
from tests.shapes import GROUPED, QWEN3_TEMPLATE, make_family, qwen3_tokenizer

OFF = '{"enable_thinking": false}'
CHAT = [{"role": "user", "content": "What is a cat?"}]
NO_THINKING = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3") / "start"
    return make_family(folder, qwen3_tokenizer(), Qwen3Config, **GROUPED)


@pytest.fixture(scope="module")
def words(start, tmp_path_factory):
    """Return the flags of a run in a new folder."""
    folder = tmp_path_factory.mktemp("run")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"What is {i}?"}) + "\n" for i in range(40)))
    flags = ["--actor-model", start, "--prompts", prompts, "--rm-model", "none", "--reward-func", "length_penalty",
             "--output", folder / "run", "--num-iterations", 1, "--batch-size", 2, "--K", 2, "--eval-prompts", 3,
             "--max-new-tokens", 4]  # fmt: skip
    return list(map(str, flags))


def sampled_in(command, argv) -> set[str]:
    """Return the ends of all prompts that a command samples after, as text."""
    seen = set()
    sample = sampler.Sampler.sample
    with pytest.MonkeyPatch.context() as patch:

        def recorded(self, prompts, *given, **how):
            tokenizer = load_tokenizer(str(argv[1]))
            seen.update(tokenizer.decode(list(p.ids)).rpartition("<|im_end|>\n")[-1] for p in prompts)
            return sample(self, prompts, *given, **how)

        patch.setattr(sampler.Sampler, "sample", recorded)
        command([str(word) for word in argv])
    return seen


@pytest.fixture(scope="module")
def trained(words):
    """Return the folder of a run without thinking, and the ends of its prompts."""
    ends = sampled_in(train_grpo.main, [*words, "--chat-template-kwargs", OFF])
    return words[words.index("--output") + 1], ends


def test_training_and_evaluations_render_the_variables(trained, words, tmp_path):
    """The run's first evaluation samples with the start model, the training with the policy."""
    assert trained[1] == {NO_THINKING}
    assert sampled_in(train_grpo.main, [*words, "--output", tmp_path / "thinking"]) == {"<|im_start|>assistant\n"}


def test_evaluation_and_chat_take_them_from_the_run(trained, start, tmp_path, monkeypatch):
    """An evaluation samples with the start model, too, whose folder has no variables."""
    more = ["--num-prompts", 2, "--completions", 1, "--output", tmp_path / "out"]
    assert sampled_in(evaluate_generations.main, ["--model-path", trained[0], *more]) == {NO_THINKING}
    prompts = []
    monkeypatch.setattr(ReplyGenerator, "generate", lambda _generator, ids: prompts.append(ids) or "a cat")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nand a dog?\n"))
    evaluate_generations.main(["--chat", "--model-path", trained[0]])
    assert all(load_tokenizer(str(start)).decode(ids).endswith(NO_THINKING) for ids in prompts) and len(prompts) == 2


def test_they_are_recorded_saved_and_on_the_card(trained, tmp_path):
    record = RunRecord.read(tmp_path / trained[0])
    assert record.flat_settings["chat_template_kwargs"] == OFF
    saved = AutoTokenizer.from_pretrained(trained[0])
    assert saved.chat_template == QWEN3_TEMPLATE
    card = (tmp_path / trained[0] / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in card.splitlines() if "apply_chat_template" in line]
    assert line.endswith(', return_tensors="pt", enable_thinking=False)')
    named = {"tokenizer": saved, "messages": CHAT}
    ids = eval(line.partition(" = ")[2], named)["input_ids"]  # the card's own line
    assert saved.decode(ids[0]).endswith(NO_THINKING)


def test_another_run_keeps_those_of_its_start_model_or_sets_its_own(trained, words, tmp_path):
    again = [*words, "--actor-model", trained[0], "--output", tmp_path / "again"]
    assert sampled_in(train_grpo.main, again) == {NO_THINKING}
    on = ["--chat-template-kwargs", '{"enable_thinking": true}', "--overwrite"]
    assert sampled_in(train_grpo.main, [*again, *on]) == {"<|im_start|>assistant\n"}


def test_a_resumed_run_must_have_the_same(trained, user_error):
    on = '{"enable_thinking": true}'
    with user_error("chat_template_kwargs", "--resume", "false", "true"):
        train_grpo.main(["--resume", "--output", trained[0], "--chat-template-kwargs", on])


def test_answers_of_an_environment_have_them(start):
    tokenizer = load_tokenizer(str(start), kwargs=OFF)
    assert tokenizer.decode(encode_reply(tokenizer, CHAT)).endswith(NO_THINKING)
    assert not encodes_alike(tokenizer, load_tokenizer(str(start)))
    assert kwargs_of(load_tokenizer(str(start), plain=True, kwargs=OFF)) == {}


def test_a_reward_model_stores_them_and_is_named_with_them(start, pairs_file, tmp_path, capsys):
    """Its calibration samples the start model without thinking."""
    given = ["--base-model", start, "--actor-model", start, "--pairs", pairs_file, "--rm-output", tmp_path / "rm",
             "--max-new-tokens", 4, "--chat-template-kwargs", OFF]  # fmt: skip
    given = list(map(str, given))

    def trained_by(argv):
        train_reward_model(parse_reward_cli(argv), Screen(), torch.device("cpu"))

    assert sampled_in(trained_by, given) == {NO_THINKING}
    assert kwargs_of(load_tokenizer(str(tmp_path / "rm"))) == {"enable_thinking": False}
    config = parse_cli(["--actor-model", str(start), "--chat-template-kwargs", OFF])
    assert f"--chat-template-kwargs '{OFF}'" in reward_model_line(config)


def test_written_parts_have_trls_column(words, tmp_path):
    rows = [{"prompt": f"What is {i}?", "answer": str(i)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = parse_cli(["--prompts", str(tmp_path / "rows.jsonl"), "--split", "30/60/10", "--chat-template-kwargs", OFF])
    write_parts(data.data, str(tmp_path / "parts"), print)
    (file,) = (tmp_path / "parts").rglob("sft/*.jsonl")
    assert json.loads(file.read_text().splitlines()[0])["chat_template_kwargs"] == {"enable_thinking": False}


def test_text_python_and_yaml_give_the_same(tmp_path):
    (tmp_path / "a.yaml").write_text("chat_template_kwargs: {enable_thinking: false, budget: 512, effort: low}\n")
    expected = {"enable_thinking": False, "budget": 512, "effort": "low"}
    for config in (
        parse_cli(["--config", str(tmp_path / "a.yaml")]),
        parse_cli(["--chat-template-kwargs", json.dumps(expected)]),
        make_config(chat_template_kwargs=expected),
    ):
        assert json.loads(config.data.chat_template_kwargs) == expected
