"""Token records: the values that the trainer saw, every one of them; and where there are none."""

from __future__ import annotations

import json

import pytest
import torch

from rlhf.algorithms.objectives import td_errors
from rlhf.algorithms.table import ALGORITHMS
from rlhf.checkpoints.token_record import QUANTITIES, TOKENS_FOLDER, read_tokens, recorded_updates
from rlhf.utils.errors import UserError
from tests.conftest import attach

SAPAIR = {"state", "token", "token_id", "logprob", "ref_logprob", "kl", "value", "advantage", "return",
          "prompt_index", "step"}  # the state-action pair of MLX token-level PPO, by our names  # fmt: skip


class Spy:
    """Keeps each update's batch as the optimizer will see it."""

    def __init__(self):
        self.batches = {}

    def on_batch(self, update, batch, scored):
        self.batches[update] = batch, scored


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_record_is_what_the_trainer_saw(build, tmp_path, algorithm, form):
    trainer = build("--record-tokens", "--record-format", form, "--record-every", 2, "--record-prompts", 2,
                    "--num-iterations", 3, "--kl-coef", 0.3, algorithm=algorithm)  # fmt: skip
    attach(trainer)
    spy = Spy()
    trainer.add_callback(spy)
    trainer.train()
    files = sorted((tmp_path / "run" / TOKENS_FOLDER).iterdir())
    assert [f.name for f in files] == [f"update-{n:06d}.{form}" for n in (1, 2)], "the first, and every second"
    for update, file in zip((1, 2), files, strict=True):
        batch, scored = spy.batches[update]
        rows = read_tokens(file)
        completions = 2 * trainer.config.group_size  # GRPO's whole groups
        assert len(rows) == int(batch.mask[:completions].sum())
        for row in rows:
            e, t = row["episode"], row["step"]
            prompt = trainer.train_prompts[row["prompt_index"]]
            assert prompt is batch.prompts[e] and row["prompt"] == prompt.example.messages[-1]["content"]
            assert row["token_id"] == int(batch.completions.completion_ids[e, t])
            assert row["state"] == trainer.processing_class.decode(
                [*prompt.ids, *batch.completions.completion_ids[e, :t].tolist()]
            )
            seen = {"logprob": batch.logprobs, "ref_logprob": batch.ref_logprobs, "kl": batch.kl,
                    "advantage": batch.raw_advantages, "weight": batch.advantages}  # fmt: skip
            if algorithm == "ppo":
                seen |= {"reward": batch.rewards, "value": batch.values, "return": batch.returns}
            assert {k: row[k] for k in seen} == {k: float(v[e, t]) for k, v in seen.items()}
            assert row["kl"] == pytest.approx(row["logprob"] - row["ref_logprob"], abs=1e-6)
            assert row["score"] == float(scored.raw[e]) and row["update"] == update
    assert set(rows[0]) >= (SAPAIR if algorithm == "ppo" else SAPAIR - {"value", "return"})
    assert (set(QUANTITIES) <= set(rows[0])) is (algorithm == "ppo")


def test_a_ppo_records_numbers_fit_together(runs):
    """By the definitions: delta = r + gamma V' - V, return = advantage + V, the score is in the last reward."""
    rows = [r for r in read_tokens(recorded_updates(runs["ppo", 1], "--tokens")[0]) if r["episode"] == 0]
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        next_value = after["value"] if after else 0.0
        assert row["td_error"] == pytest.approx(row["reward"] + next_value - row["value"], abs=1e-5)  # gamma 1
        assert row["return"] == pytest.approx(row["advantage"] + row["value"], abs=1e-5)
    beta = json.loads((runs["ppo", 1] / "run.json").read_text())["settings"]["kl"]["kl_coef"]
    last = rows[-1]
    assert last["reward"] == pytest.approx(last["score"] - beta * last["kl"], abs=1e-5)


def test_td_errors_by_hand():
    """gamma .9: .5 + .9 x 2 - 1 = 1.3; 1 + 0 - 2 = -1; what stands behind the end counts for nothing."""
    rewards, values = torch.tensor([[0.5, 1.0, 7.0]]), torch.tensor([[1.0, 2.0, 9.0]])
    found = td_errors(rewards, values, torch.tensor([[True, True, False]]), 0.9)
    torch.testing.assert_close(found, torch.tensor([[1.3, -1.0, 0.0]]))


def test_grpos_advantage_is_the_groups(runs):
    rows = read_tokens(recorded_updates(runs["grpo", 1], "--tokens")[0])
    for episode in {row["episode"] for row in rows}:
        assert len({row["advantage"] for row in rows if row["episode"] == episode}) == 1


def test_nothing_is_recorded_unasked(build, tmp_path):
    trainer = build("--num-iterations", 1)
    attach(trainer)
    trainer.train()
    assert not (tmp_path / "run" / TOKENS_FOLDER).exists()


def test_where_there_is_no_record(runs, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text((runs["ppo", 1] / "run.json").read_text())
    with pytest.raises(UserError, match=r"this run has no recorded tokens: --tokens .*Train with --record-tokens"):
        recorded_updates(run, "--tokens")
    with pytest.raises(UserError, match="folder not found: --tokens"):
        recorded_updates(tmp_path / "nowhere", "--tokens")


@pytest.mark.parametrize("name", ["update-000001.jsonl", "update-000001.parquet"])
def test_a_torn_record_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b'{"update": 1, "tok')
    with pytest.raises(UserError, match=f"cannot read this token record: .*{name}"):
        read_tokens(tmp_path / name)
