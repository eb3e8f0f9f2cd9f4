"""Tests of token records: their values are those that the trainer used. Missing or damaged records are errors."""

from __future__ import annotations

import json

import pytest
import torch

from rlhf.algorithms.objectives import td_errors
from rlhf.algorithms.table import ALGORITHMS
from rlhf.callbacks import token_recorder
from rlhf.checkpoints.token_record import QUANTITIES, TOKENS_FOLDER, read_tokens, recorded_updates
from tests.conftest import BY_TIER, attach

TOKEN_FIELDS = {"state", "token", "token_id", "logprob", "ref_logprob", "kl", "value", "advantage", "return",
                "prompt_index", "step"}  # the fields of MLX token-level PPO, with this project's names  # fmt: skip


class BatchRecorder:
    """A callback that stores each update's batch before the optimizer uses it."""

    def __init__(self):
        self.batches = {}

    def on_batch(self, update, batch, scored):
        self.batches[update] = batch, scored


@pytest.mark.parametrize("algorithm", BY_TIER)
def test_token_record_contains_the_trainers_values(build, tmp_path, algorithm, monkeypatch):
    monkeypatch.setattr(token_recorder, "UPDATES", 2)
    trainer = build("--record-tokens", "--num-iterations", 3, "--kl-coef", 0.3, algorithm=algorithm)
    attach(trainer)
    recorder = BatchRecorder()
    trainer.add_callback(recorder)
    trainer.train()
    files = sorted((tmp_path / "run" / TOKENS_FOLDER).iterdir())
    assert [f.name for f in files] == [f"update-{n:06d}.jsonl" for n in (1, 2)], (
        "the first update and every second update are recorded"
    )
    for update, file in zip((1, 2), files, strict=True):
        batch, scored = recorder.batches[update]
        rows = read_tokens(file)
        completions = 2 * trainer.config.group_size  # GRPO records whole groups
        assert len(rows) == int(batch.mask[:completions].sum())
        for row in rows:
            e = row["episode"]
            t = row["step"]
            prompt = trainer.train_prompts[row["prompt_index"]]
            assert prompt is batch.prompts[e] and row["prompt"] == prompt.example.messages[-1]["content"]
            assert row["token_id"] == int(batch.completions.completion_ids[e, t])
            assert row["state"] == trainer.processing_class.decode(
                [*prompt.ids, *batch.completions.completion_ids[e, :t].tolist()]
            )
            expected = {"logprob": batch.logprobs, "ref_logprob": batch.ref_logprobs, "kl": batch.kl,
                        "advantage": batch.raw_advantages, "weight": batch.advantages}  # fmt: skip
            more = {"reward": batch.rewards, "value": batch.values, "return": batch.returns}
            expected |= {name: tensor for name, tensor in more.items() if tensor is not None}
            assert {k: row[k] for k in expected} == {k: float(v[e, t]) for k, v in expected.items()}
            assert row["kl"] == pytest.approx(row["logprob"] - row["ref_logprob"], abs=1e-6)
            assert row["score"] == float(scored.raw[e]) and row["update"] == update
    has_critic = ALGORITHMS[algorithm].has_critic
    assert set(rows[0]) >= (TOKEN_FIELDS if has_critic else TOKEN_FIELDS - {"value", "return"})
    assert (set(QUANTITIES) <= set(rows[0])) is has_critic


def test_ppo_record_satisfies_the_definitions(runs):
    """Checks delta = r + gamma V' - V and return = advantage + V, and that the last reward contains the score."""
    rows = [r for r in read_tokens(recorded_updates(runs["ppo", 1], "--tokens")[0]) if r["episode"] == 0]
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        next_value = after["value"] if after else 0.0
        assert row["td_error"] == pytest.approx(row["reward"] + next_value - row["value"], abs=1e-5)  # gamma 1
        assert row["return"] == pytest.approx(row["advantage"] + row["value"], abs=1e-5)
    beta = json.loads((runs["ppo", 1] / "run.json").read_text())["settings"]["kl"]["kl_coef"]
    last = rows[-1]
    assert last["reward"] == pytest.approx(last["score"] - beta * last["kl"], abs=1e-5)


def test_td_errors_match_hand_computed_values():
    """With gamma 0.9: 0.5 + 0.9 x 2 - 1 = 1.3, and 1 + 0 - 2 = -1. Values after the end of an episode are ignored."""
    rewards = torch.tensor([[0.5, 1.0, 7.0]])
    values = torch.tensor([[1.0, 2.0, 9.0]])
    found = td_errors(rewards, values, torch.tensor([[True, True, False]]), 0.9)
    torch.testing.assert_close(found, torch.tensor([[1.3, -1.0, 0.0]]))


def test_grpo_advantage_is_the_same_for_all_tokens_of_an_episode(runs):
    rows = read_tokens(recorded_updates(runs["grpo", 1], "--tokens")[0])
    for episode in {row["episode"] for row in rows}:
        assert len({row["advantage"] for row in rows if row["episode"] == episode}) == 1


def test_nothing_is_recorded_by_default(build, tmp_path):
    trainer = build("--num-iterations", 1)
    attach(trainer)
    trainer.train()
    assert not (tmp_path / "run" / TOKENS_FOLDER).exists()


def test_missing_token_records_are_an_error(runs, tmp_path, user_error):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text((runs["ppo", 1] / "run.json").read_text())
    with user_error("--tokens", "--record-tokens"):
        recorded_updates(run, "--tokens")
    with user_error("--tokens"):
        recorded_updates(tmp_path / "nowhere", "--tokens")


def test_incomplete_token_record_is_an_error_with_its_file_name(tmp_path, user_error):
    name = "update-000001.jsonl"
    (tmp_path / name).write_bytes(b'{"update": 1, "tok')
    with user_error(name):
        read_tokens(tmp_path / name)
