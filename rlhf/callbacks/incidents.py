"""Incidents: the files of a skipped update, to find out where its numbers stopped being finite."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from rlhf.algorithms.experience import Experience
from rlhf.callbacks.base import Callback
from rlhf.checkpoints.run_record import environment
from rlhf.rollout.completions import Rollout
from rlhf.settings.fields import to_dict
from rlhf.settings.training import MAX_CONSECUTIVE_SKIPS, Config
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.safety import SkipUpdate
from rlhf.utils.console import Screen
from rlhf.utils.files import saving_tensors, write_json, write_jsonl

INCIDENT_FILE = "incident.json"
BATCH_FILE = "batch.jsonl"
TENSORS_FILE = "tensors.safetensors"
WEIGHTS = "weights"
# fields of the experience in tensors.safetensors
LEARNED = ("scores", "kl", "raw_advantages", "advantages", "returns", "rewards")


def save_incident(
    trainer: Any, folder: Path, update: int, rollout: Rollout, batch: Experience | None, found: SkipUpdate
) -> None:
    """Save the files of a skipped update.

    These are the batch as text and ids, its log-probs, the scores that the algorithm received, the settings and
    versions, and the trainable weights when the update was skipped, that is, after its earlier optimizer steps.
    `batch` is None if the update was skipped before its advantages were computed; `found` is the reason.
    """
    trainer.save_model(folder / WEIGHTS)
    completions = rollout.completions
    rows = [
        {
            "prompt": p.example.messages,
            "columns": p.example.columns,
            "prompt_ids": list(p.ids),
            "completion": text,
            "completion_ids": ids,
        }
        for p, text, ids in zip(rollout.prompts, rollout.texts, completions.rows(), strict=True)
    ]
    write_jsonl(folder / BATCH_FILE, rows)
    tensors = {"logprobs": rollout.logprobs, "ref_logprobs": rollout.ref_logprobs, "values": rollout.values}
    tensors |= {"sampled_logprobs": completions.sampled_logprobs, "nucleus": completions.allowed_tokens}
    if batch is not None:
        tensors |= {field: getattr(batch, field) for field in LEARNED}
    with saving_tensors(folder):
        save_file({n: t.detach().cpu().clone() for n, t in tensors.items() if t is not None}, folder / TENSORS_FILE)
    write_json(
        folder / INCIDENT_FILE,
        {"update": update, "found": str(found), "rows": found.rows, "kl_coef": trainer.kl_coef,
         "algorithm": trainer.config.algorithm, "settings": to_dict(trainer.config), **environment()},
    )  # fmt: skip


@dataclass
class Incidents(Callback):
    """Before a run gives up, saves its last skipped update as an incident."""

    trainer: OnPolicyLoop
    config: Config
    screen: Screen

    def on_update_skipped(self, update, rollout, batch, reason):
        if self.trainer.progress.skipped_in_a_row == MAX_CONSECUTIVE_SKIPS:
            folder = Path(self.config.run.output) / "incidents" / f"update-{update:06d}"
            try:
                save_incident(self.trainer, folder, update, rollout, batch, reason)
            except OSError as error:  # the reason why the run gives up must be reported
                return self.screen.say(f"warning: the skipped update could not be saved ({error}): {folder}")
            self.screen.say(f"the skipped update is saved in {folder}")
