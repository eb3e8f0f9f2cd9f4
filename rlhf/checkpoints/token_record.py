"""Token records: files with one row per token of some episodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.checkpoints.run_record import RunRecord
from rlhf.utils.errors import UserError
from rlhf.utils.files import read_jsonl, write_jsonl

TOKENS_FOLDER = "tokens"
# quantity -> description and unit. Algorithms without a critic have no value and TD error, those with one reward per
# completion also no reward and return
QUANTITIES = {
    "logprob": "log-probability under the policy that sampled it, nats",
    "ref_logprob": "log-probability under the start model, nats",
    "kl": "KL to the start model (k1), nats",
    "advantage": "advantage, score units",
    "weight": "advantage as used in the loss, whitened if configured",
    "reward": "reward: KL penalty, and the score at the last token, score units",
    "value": "the critic's value before the token, score units",
    "td_error": "TD error: reward + gamma x next value - value",
    "return": "reward to go, the critic's target, score units",
}
ALWAYS = {"update", "episode", "prompt_index", "prompt", "score", "step", "state", "token_id", "token",
          "logprob", "ref_logprob", "kl", "advantage", "weight"}  # fmt: skip


def write_tokens(folder: Path, update: int, rows: Sequence[dict[str, Any]]) -> Path:
    """Write the rows of one update to `update-N.jsonl` atomically, and return the file."""
    file = folder / f"update-{update:06d}.jsonl"
    write_jsonl(file, rows)
    return file


def recorded_updates(run: Path, flag: str) -> list[Path]:
    """Return the files of a run's token records, sorted by update. Raises UserError if there are none."""
    RunRecord.require(run, flag)
    files = sorted((run / TOKENS_FOLDER).glob("update-*.jsonl"))
    if not files:
        raise UserError("this run has no recorded tokens", f"{flag} {run}", "Train with --record-tokens")
    return files


def read_tokens(file: Path) -> list[dict[str, Any]]:
    """Return the rows of one update. Raises UserError if the file is corrupted, empty, or has incomplete rows."""
    rows = read_jsonl(file, "Delete the file")
    if not rows or any(not isinstance(row, dict) or not row.keys() >= ALWAYS for row in rows):
        raise UserError(f"this token record is {'incomplete' if rows else 'empty'}", file, "Delete the file")
    return rows
