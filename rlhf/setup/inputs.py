"""Checks that a command's input files exist, before torch is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.checkpoints.replacing import restore_replaced
from rlhf.settings.next_commands import names_code, reward_model_command
from rlhf.settings.recipes import find_recipe
from rlhf.utils.errors import raise_if
from rlhf.utils.paths import is_path, missing_path, resolve_path

if TYPE_CHECKING:
    from rlhf.settings.training import Config


BUILT = ("actor_model", "rm_model", "prompts")  # inputs that the demo recipe builds


def check_inputs(config: Config) -> None:
    """Raise UserError that lists every missing local input of a training run. Hub names are checked later."""
    built = {find_recipe("demo").value(name) for name in BUILT} if config.recipe == "demo" else set()
    problems = []
    for flag, name in inputs_of(config):
        on_hub = flag in ("--actor-model", "--rm-model", "--prompts") and not is_path(name)
        if name in built or on_hub or resolve_path(name).exists():
            continue
        if flag == "--rm-model":
            if restore_replaced(resolve_path(name)):  # its replacement was interrupted
                continue
            problems.append(
                f"no reward model: {flag} {name}. Train one with: {reward_model_command(config)}, or use only reward "
                "functions: --rm-model none --reward-func ..."
            )
        elif flag == "--actor-model":
            problems += missing_path(name, "model", f"{flag} takes a Hugging Face model folder or a hub name").problems
        elif flag == "--prompts":
            problems += missing_path(name, "data file", "Use a JSONL file or the name of a hub dataset").problems
        else:
            problems += missing_path(name, "file", f"{flag} takes a file").problems
    raise_if(problems)


def inputs_of(config: Config) -> list[tuple[str, str]]:
    """Return what a run reads, as (flag, path or hub name)."""
    named = [
        ("--actor-model", config.model.actor_model), ("--rm-model", config.model.rm_model),
        ("--prompts", config.data.prompts), ("--eval-text", config.data.eval_text),
    ]  # fmt: skip
    rules = {"--reward-func": config.reward.reward_func, "--eval-func": config.reward.eval_func}
    named += [(flag, rule.rpartition(":")[0]) for flag, found in rules.items() for rule in names_code(found)]
    return [(flag, name) for flag, name in named if name]
