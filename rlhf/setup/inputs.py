"""Checks that a command's input files exist, before torch is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.checkpoints.replacing import restore_replaced
from rlhf.settings.next_commands import names_code, reward_model_command
from rlhf.settings.recipes import DEMOS, find_recipe
from rlhf.utils.errors import raise_if
from rlhf.utils.paths import is_path, missing_path, resolve_path

if TYPE_CHECKING:
    from rlhf.settings.reward_model import RewardModelConfig
    from rlhf.settings.training import Config


BUILT = ("actor_model", "rm_model", "prompts")  # inputs that the demo recipes make


def check_inputs(config: Config) -> None:
    """Raise UserError that lists every missing local input of a training run. Hub names are checked later."""
    built = {find_recipe(config.recipe).value(name) for name in BUILT} if config.recipe in DEMOS else set()
    problems = []
    for flag, name in inputs_of(config):
        on_hub = flag in ("--actor-model", "--rm-model", "--prompts") and not is_path(name)
        if name in built or on_hub or resolve_path(name).exists():
            continue
        if flag != "--rm-model":
            problems += _missing(flag, name)
        elif not restore_replaced(resolve_path(name)):  # otherwise its replacement was interrupted
            problems.append(
                f"no reward model: {flag} {name}. Train one with: {reward_model_command(config)}, or use only reward "
                "functions: --rm-model none --reward-func ..."
            )
    raise_if(problems)


def check_reward_inputs(config: RewardModelConfig) -> None:
    """Raise UserError that lists every missing local input of `python -m reward_model.train`."""
    named = [
        ("--pairs", config.data.pairs),
        ("--base-model", config.training.base_model),
        ("--actor-model", config.calibration.actor_model),
    ]
    named = [(flag, name) for flag, name in named if name and is_path(name) and not resolve_path(name).exists()]
    raise_if([problem for flag, name in named for problem in _missing(flag, name)])


def _missing(flag: str, name: str) -> list[str]:
    """Return the error line for a missing input."""
    if flag in ("--actor-model", "--base-model"):
        what, hint = "model", f"{flag} takes a Hugging Face model folder or a hub name"
    elif flag in ("--prompts", "--pairs"):
        what, hint = "data file", f"{flag} takes a data file, a folder or the name of a hub dataset"
    else:
        what, hint = "file", f"{flag} takes a file"
    return missing_path(name, what, hint).problems


def inputs_of(config: Config) -> list[tuple[str, str]]:
    """Return what a run reads, as (flag, path or hub name)."""
    named = [
        ("--actor-model", config.model.actor_model), ("--rm-model", config.model.rm_model),
        ("--prompts", config.data.prompts), ("--eval-text", config.data.eval_text),
    ]  # fmt: skip
    rules = {"--reward-func": config.reward.reward_func, "--eval-func": config.reward.eval_func}
    named += [(flag, rule.rpartition(":")[0]) for flag, found in rules.items() for rule in names_code(found)]
    return [(flag, name) for flag, name in named if name]
