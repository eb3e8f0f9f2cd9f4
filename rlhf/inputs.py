"""What a command reads from this disk, checked before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.commands import names_code
from rlhf.errors import raise_if

if TYPE_CHECKING:
    from config import Config


def inputs_of(config: Config) -> list[tuple[str, str]]:
    """What a run reads from this disk: (flag, path); hub names among them."""
    named = [
        ("--actor-model", config.model.actor_model), ("--rm-model", config.model.rm_model),
        ("--prompts", config.data.prompts), ("--eval-text", config.data.eval_text),
    ]  # fmt: skip
    named += [("--reward-func", rule.rpartition(":")[0]) for rule in names_code(config.reward.reward_func)]
    return [(flag, name) for flag, name in named if name]


def check_inputs_outside(output: str, inputs: Sequence[tuple[str, str]], flag: str) -> None:
    """Raise UserError if an input lies in the output folder: replacing the folder would remove it."""
    folder = Path(output).resolve()
    raise_if(
        [
            f"the output folder {output} holds an input: {input_flag} {name}. Name another folder with {flag}"
            for input_flag, name in inputs
            if folder in (place := Path(name).expanduser().resolve(), *place.parents)
        ]
    )
