"""Checks whether the critic of another run fits a run, from files and before models are loaded."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from rlhf.checkpoints.model_folder import ADAPTER_FILE, VALUE_HEAD_FILE, same_weights
from rlhf.checkpoints.run_record import read_json
from rlhf.settings.training import CRITIC_FILE, Config
from rlhf.utils.errors import UserError


def check_critic_of_run(config: Config, run: str, start: str) -> None:
    """Raise UserError if the critic in the folder `run` does not fit the start model, a folder or hub name.

    A value head alone needs the hidden states that it was trained on: those of its run's policy. A separate critic
    with all weights needs the same architecture: `load_critic` compares names and shapes. One with adapters also needs
    their base model.
    """
    folder = Path(run)
    place = f"--critic {run}, --actor-model {config.model.actor_model}"
    if not (folder / VALUE_HEAD_FILE).is_file():
        raise UserError(
            f"no {VALUE_HEAD_FILE} in this folder", f"--critic {run}", "Give the folder of a run with a critic"
        )
    if config.separate_critic:
        _check_backbone(config.model.use_lora, folder / CRITIC_FILE, start, place)
    elif not same_weights(run, start):
        # no run can start from an adapter, and merged weights would be rounded
        policy = "" if (folder / ADAPTER_FILE).is_file() else f"--actor-model {folder}, "
        raise UserError(
            "the value head was trained on the hidden states of that run's policy, and this run starts from other "
            "weights",
            place,
            f"Use {policy}a run with --critic separate, or a new critic",
        )


def _check_backbone(use_lora: bool, file: Path, start: str, place: str) -> None:
    """Raise UserError if only one of the saved backbone and the run's has adapters, or if the base models differ."""
    try:
        with safe_open(file, "numpy") as tensors:
            names = list(tensors.keys())
            base = (tensors.metadata() or {}).get("base", "unknown")
    except SafetensorError as error:
        raise UserError(f"not a complete file ({error})", file, "Use another folder of that run") from None
    adapters = any("lora_" in name for name in names)
    if adapters != use_lora:
        kind, fix = ("adapters only", "Add --use-lora") if adapters else ("all weights", "Remove --use-lora")
        raise UserError(f"that run trained {kind} of its critic", place, f"{fix}, or use --critic separate")
    recorded = (read_json(file.parent) or {}).get("data", {}).get("start_model_files")
    if adapters and not (same_weights(base, start) and same_weights(base, start, recorded)):
        raise UserError(
            f"the critic's adapters belong to another base model ({base} at that time)",
            place,
            "Use a run whose critic started from this start model, or --critic separate",
        )
