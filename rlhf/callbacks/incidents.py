"""Incidents: the files of a skipped update, from which `--replay` repeats it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf.algorithms.experience import Experience
from rlhf.callbacks.base import Callback
from rlhf.checkpoints.run_record import environment, flat_settings
from rlhf.config import config_of_settings
from rlhf.data.examples import Example
from rlhf.data.prompts import Prompt
from rlhf.rollout.completions import Completions, Rollout
from rlhf.settings.fields import to_dict
from rlhf.settings.next_commands import replay_command
from rlhf.settings.training import MAX_CONSECUTIVE_SKIPS, Config
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.safety import SkipUpdate
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError
from rlhf.utils.files import saving_tensors, write_json
from rlhf.utils.paths import note_names

INCIDENT_FILE, BATCH_FILE, TENSORS_FILE, WEIGHTS = "incident.json", "batch.jsonl", "tensors.safetensors", "weights"
# name in tensors.safetensors -> field of the experience
LEARNED = {
    "scores": "scores",
    "kl": "kl",
    "advantages": "raw_advantages",
    "weights": "advantages",
    "returns": "returns",
    "rewards": "rewards",
}


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
            "conversational": p.example.conversational,
            "prompt_ids": list(p.ids),
            "completion": text,
            "completion_ids": ids,
        }
        for p, text, ids in zip(rollout.prompts, rollout.texts, completions.rows(), strict=True)
    ]
    (folder / BATCH_FILE).write_text(
        "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows),
        encoding="utf-8",
        errors="backslashreplace",  # lone surrogates in a column
    )
    tensors = {"logprobs": rollout.logprobs, "ref_logprobs": rollout.ref_logprobs, "values": rollout.values}
    tensors |= {"sampled_logprobs": completions.sampled_logprobs, "nucleus": completions.allowed_tokens}
    if batch is not None:
        tensors |= {name: getattr(batch, field) for name, field in LEARNED.items()}
    normalizer = trainer.collector.normalizer
    with saving_tensors(folder):
        save_file({n: t.detach().cpu().clone() for n, t in tensors.items() if t is not None}, folder / TENSORS_FILE)
    write_json(
        folder / INCIDENT_FILE,
        {"update": update, "found": str(found), "rows": found.rows, "kl_coef": trainer.kl_coef,
         "normalizer": normalizer and normalizer.state_dict(), "drawn_again": found.rollout is not None,
         "algorithm": trainer.config.algorithm, "settings": to_dict(trainer.config), **environment()},
    )  # fmt: skip


@dataclass
class Incident:
    """The files of `save_incident`, read back."""

    folder: Path
    facts: dict[str, Any]  # of incident.json
    rows: list[dict[str, Any]]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, name: str) -> Incident:
        """Read the incident in a folder. Raises UserError if it is missing or incomplete."""
        folder = Path(name)
        try:
            facts = json.loads((folder / INCIDENT_FILE).read_text(encoding="utf-8"))
            rows = [json.loads(line) for line in (folder / BATCH_FILE).read_text(encoding="utf-8").split("\n")[:-1]]
            # cloned, because Windows cannot remove a file that is memory-mapped
            tensors = {name: tensor.clone() for name, tensor in load_file(folder / TENSORS_FILE).items()}
            note_names(folder / INCIDENT_FILE, flat_settings(facts["settings"]).values())
            return cls(folder, facts, rows, tensors)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:  # odd JSON, too
            raise UserError(
                f"no complete incident in this folder: --replay {name} ({error}). Use a folder "
                "RUN/incidents/update-NUMBER"
            ) from None

    def config(self, output: str, **changed: Any) -> Config:
        """Return the run's configuration with another output folder, without evaluation functions, and with other
        `changed` settings."""
        changed |= {"output": output, "resume": False, "replay": str(self.folder), "eval_func": ()}
        return config_of_settings(self.facts["algorithm"], self.facts["settings"], **changed)

    def rollout(self, trainer: Any) -> Rollout:
        """Return the sampled batch with its recorded log-probs and values."""
        device = trainer.accelerator.device
        prompts = [Prompt(tuple(row["prompt_ids"]), _example(row)) for row in self.rows]
        pad, criterion = trainer.processing_class.pad_token_id, trainer.collector.criterion
        width = self.tensors["logprobs"].shape[1]
        ids = [row["completion_ids"] + [criterion.eos] * (width - len(row["completion_ids"])) for row in self.rows]
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        vocabulary = trainer.actor.policy.get_input_embeddings().num_embeddings
        completions = Completions.of(
            prompts, torch.tensor(ids, device=device), eos=criterion, pad=pad, vocabulary=vocabulary,
            allowed_tokens=tensors.get("nucleus"), sampled_logprobs=tensors.get("sampled_logprobs"),
        )  # fmt: skip
        return Rollout(
            completions, prompts, [row["completion"] for row in self.rows],
            tensors["logprobs"], tensors["ref_logprobs"], tensors.get("values"),
        )  # fmt: skip


def _example(row: dict[str, Any]) -> Example:
    return Example(
        tuple(row["prompt"]),
        columns=row["columns"],
        conversational=row["conversational"],
    )


class Incidents(Callback):
    """Before a run gives up, saves its last skipped update as an incident."""

    def __init__(self, trainer: OnPolicyLoop, config: Config, screen: Screen):
        self.trainer, self.config, self.screen = trainer, config, screen

    def on_update_skipped(self, update, rollout, batch, reason):
        if self.trainer.progress.skipped_in_a_row == MAX_CONSECUTIVE_SKIPS:
            folder = Path(self.config.run.output) / "incidents" / f"update-{update:06d}"
            save_incident(self.trainer, folder, update, rollout, batch, reason)
            self.screen.say(f"the skipped update is saved in {folder}")
            replay = replay_command(self.config.algorithm, str(folder), self.config.reward.reward_func)
            self.screen.say(f"repeat it step by step with: {replay}")
