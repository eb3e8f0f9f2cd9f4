"""Tests of examples/rank1_voice_loop.py: the document's settings and calls, its topics, a run, and its resume."""

from __future__ import annotations

import ast
import inspect
import json

import pytest
import torch

from examples import rank1_voice_loop as example
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import parse_cli
from tests.scripts.test_references import RANK_1_VOICE_SETTINGS, values

# what `train_step` of the document calls, in its order
CALLS = ["tokenize", "trainer.generate", "decode", "reward_model.score", "trainer.step"]
ROWS = [{"prompt": f"Say {i} about {topic}.", "topic": topic} for i in range(20) for topic in ("bread", "boats")]


def test_the_step_makes_the_calls_of_the_document():
    tree = ast.parse(inspect.getsource(example.train_step))
    calls = sorted((node for node in ast.walk(tree) if isinstance(node, ast.Call)), key=lambda node: node.lineno)
    assert [name for name in (ast.unparse(call.func) for call in calls) if name != "zip"] == CALLS


def test_the_settings_are_those_of_the_document(monkeypatch):
    made = []
    monkeypatch.setattr(example, "make_trainer", lambda config, *_, **__: made.append(config))
    example.create_ppo_trainer("model", None, ROWS, ROWS[:2], updates=100)
    (config,) = made
    expected = {name: value for name, value in RANK_1_VOICE_SETTINGS.items() if name != "steps_per_topic"}
    assert values(config, expected) == expected and config.model.actor_model == "model"
    recipe = parse_cli(["--recipe", "rank1-voice"])
    assert RANK_1_VOICE_SETTINGS["steps_per_topic"] == example.STEPS_PER_TOPIC
    same = ["kl_target", "kl_schedule", "lr_schedule", "minibatches", "temperature"]
    assert values(config, same) == values(recipe, same)


def test_prompts_depend_on_the_update_and_follow_the_topics():
    steps = example.STEPS_PER_TOPIC
    batches = [example.prompts_of(ROWS, update) for update in range(3 * steps)]
    assert [{prompt.split()[-1] for prompt in batch} for batch in batches] == (
        [{"bread."}] * steps + [{"boats."}] * steps + [{"bread."}] * steps
    )
    assert [prompt for batch in batches[:5] for prompt in batch] == [row["prompt"] for row in ROWS[::2]]
    assert batches[2 * steps] == example.prompts_of(ROWS, 0), "50 x 4 prompts are ten passes over 20"


@pytest.fixture
def words(monkeypatch, start_model, reward_folder, tmp_path):
    """Return the words of the command for three updates of short completions."""
    make = example.make_config
    small = {"max_new_tokens": 6, "learning_rate": 1e-3, "save_every": 1}
    monkeypatch.setattr(example, "make_config", lambda **settings: make(**settings | small))
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    return [str(start_model), str(reward_folder), str(tmp_path / "prompts.jsonl"), "--updates", "3"]


class InterruptedAfterTwo(Exception):
    pass


def test_the_loop_trains_and_resumes_bit_identically(words, tmp_path, monkeypatch):
    step = example.train_step
    logged = []

    def recorded(trainer, reward_model, prompts):
        scores = []
        with monkeypatch.context() as patch:
            score = reward_model.score
            patch.setattr(reward_model, "score", lambda *given: scores.append(score(*given)) or scores[-1])
            logged.append(step(trainer, reward_model, prompts)["rewards/mean"])
        assert len(set(scores)) > 1 and logged[-1] == pytest.approx(sum(scores) / len(scores))

    def interrupted(trainer, *given):
        if trainer.update == 2:
            error = InterruptedAfterTwo()
            trainer.by_hand.__exit__(type(error), error, None)  # what the end of the program would close
            raise error
        return step(trainer, *given)

    with monkeypatch.context() as patch:
        patch.setattr(example, "train_step", lambda *given: recorded(*given) or {})
        straight = example.main([*words, "--output", str(tmp_path / "straight")])
    run = RunRecord.read(tmp_path / "straight")
    assert (run.status, run.spent.updates, run.spent.episodes, len(logged)) == ("finished", 3, 12, 3)
    with monkeypatch.context() as patch, pytest.raises(InterruptedAfterTwo):
        patch.setattr(example, "train_step", interrupted)
        example.main([*words, "--output", str(tmp_path / "two")])
    resumed = example.main([*words, "--output", str(tmp_path / "two"), "--resume"])
    one, other = (dict(trainer.host.model.named_parameters()) for trainer in (straight, resumed))
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert RunRecord.read(tmp_path / "two").status == "finished"
