"""Which rollout engine a run uses. Imports no model code, so that a plan is printed within seconds."""

from __future__ import annotations

import torch

from rlhf.utils.errors import UserError

# largest share of a GPU's memory that a decoder, its KV cache and its CUDA graphs take between rollouts. Updates need
# the rest. A model for which they are larger decodes so slowly that the captures of a rollout take little of its time.
KEPT_SHARE = 1 / 8
WITH_SLOTS = ("slots", "graph")  # engines that pack prompts and sample a number of completions at a time


def graph_slots(completions: int, most: int) -> int:
    """Return the number of slots with which a CUDA graph samples so many completions: a power of two from 8 on, or
    `most`. Other numbers would need more captures, and with fewer than 8 slots a GPU is no faster."""
    return min(max(8, 1 << (completions - 1).bit_length()), most)


def choose_engine(engine: str | None, packs: bool, device: torch.device) -> str:
    """Return the engine that samples: `engine`, or if it is "auto", the default of the model and the device.

    The default is "graph" on a CUDA GPU and "slots" on a CPU, and "plain" for a model that does not support packing
    (`packs` is False). None is "auto" without "graph".
    """
    if engine not in ("auto", None):
        return engine
    if not packs:
        return "plain"
    return "graph" if engine == "auto" and device.type == "cuda" else "slots"


def check_engine(engine: str, packs: bool, model: str, device: torch.device) -> None:
    """Raise UserError if this model or device does not support the engine. `model` names the model in the error."""
    if engine == "graph" and device.type != "cuda":
        raise UserError("CUDA graphs require a CUDA GPU", "--rollout-engine graph", "Use --rollout-engine auto")
    if engine in WITH_SLOTS and not packs:
        raise UserError(
            f"the attention of {model} cannot be replaced", f"--rollout-engine {engine}", "Use --rollout-engine auto"
        )
