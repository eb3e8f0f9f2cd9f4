"""Translates names and meanings of other trainers into the settings of this project.

TRL 1.12, transformers, OpenRLHF, verl, LLaMA-Factory, Unsloth and CleanRL. docs/coming_from_trl.md explains the names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from rlhf.settings.fields import UNREADABLE, Layer, Setting, as_text, is_on, is_unset, name_table, word_of
from rlhf.settings.types import bare_targets, is_bare_number
from rlhf.utils.errors import Problem, did_you_mean

LENGTHS = ("epochs", "num_iterations", "episodes")  # the length of a run: exactly one of them is in effect
BARE_TARGETS = ("target", "target_kl")  # names of other trainers for a KL target without a unit
LOOKS = {"check_reward": "reward", "scan": "prompts"}  # names of parts of --check
FIRST_TRL = "init_kl_coef"  # next to this name of TRL before 0.12, a bare target_kl has the unit of its KL
# name, or name=value -> settings that it sets, too, if the layer does not; `lora:` is a block of a YAML file
IMPLIED: dict[str, dict[str, Any]] = {
    # in TRL's first PPO, an optimizer step follows each one
    "mini_batch_size": {"gradient_accumulation_steps": 1, "minibatches": 1},
    "normalizer_alpha": {"normalize_scores": True},
    "lora:": {"use_lora": True},
    # a setting that replaces others unsets those of lower layers
    **{name: dict.fromkeys(LENGTHS) for name in ("steps_per_topic", *LENGTHS)},
    "gradient_accumulation_steps": {"minibatches": 1},
    "minibatches": {"gradient_accumulation_steps": None},
    # a lower layer's target belongs to its adaptive schedule
    "kl_schedule=fixed": {"kl_target": None},
    "kl_schedule=phased": {"kl_target": None},
}


def translate(layer: Layer, settings: Mapping[str, Setting]) -> tuple[Layer, list[Problem]]:
    """Return a layer with the first names of its settings, and the errors in its names. A name of another trainer
    keeps its meaning there, and can set more than one setting."""
    names = name_table(settings)
    known: Layer = {}
    problems = []
    for name, (value, place) in layer.items():
        first = names.get(name, name)
        if name == UNREADABLE:
            problems.append(value)
        elif name.endswith(":"):
            continue
        elif first not in settings:
            helper = ". Start the names of helper variables with _" if ".py" in place and not removed(name) else ""
            problems.append(Problem(f"unknown setting {name}", place, f"{hint(name, names)}{helper}"))
        elif first in known:
            problems.append(Problem(f"{name} is set twice", f"{place} and {known[first][1]}", "Keep one"))
        elif name == "target_kl" and FIRST_TRL not in layer and is_bare_number(value):
            number = as_text(value)
            fix = f"Give {number}/token as in verl, or {number}/sequence as in TRL before 0.12"
            problems.append(Problem(f"target_kl {number} has no unit", place, fix))
        elif name in BARE_TARGETS:
            known[first] = (bare_targets(value), place)
        else:
            known[first] = (LOOKS[name] if name in LOOKS and is_on(value) else value, place)
    written = {}
    for name, (value, place) in (layer | known).items():
        written |= {} if is_unset(value) else {name: place, f"{name}={word_of(value)}": place}
    for name, others in IMPLIED.items():
        for other in others.keys() & settings.keys() if name in written else ():
            known.setdefault(other, (others[other], written[name]))
    steps = known.get("gradient_accumulation_steps", (None, ""))
    if "minibatches" in written and not is_unset(steps[0]):
        places = f"{written['minibatches']} and {steps[1]}"
        problems.append(Problem("minibatches and gradient_accumulation_steps exclude each other", places, "Keep one"))
    return known, problems


def only(layer: Layer, settings: Mapping[str, Setting], names: Collection[str]) -> Layer:
    """Return the part of a layer that sets one of `names`, under any name of the setting."""
    first = name_table(settings)
    return {name: found for name, found in layer.items() if first.get(name) in names}


# --- unknown names ---------------------------------------------------------------------------------------------------


class Removed(NamedTuple):
    """A setting that older versions had."""

    advice: str  # what to use instead
    default: Any  # as run.json stores it: a run with this value can be resumed


REMOVED = {
    "sweep": Removed("Start one command per value: docs/settings.md has a loop of three lines", []),
    "parallel": Removed("Start the command with --seeds once per GPU: the processes share the seeds", False),
    "keep_pass_rate": Removed("--dynamic-sampling replaces groups that teach nothing", None),
    "kl_boundaries": Removed("The phases of --kl-schedule phased have equal lengths", None),
    "perplexity_gate": Removed("If a reward model gives scores, --best-rule score has a limit of perplexity", None),
    "record_prompts": Removed("--record-tokens records the completions of 2 prompts", 2),
    "record_every": Removed("--record-tokens records update 1 and every 50 updates", 50),
    "critic_warmup_patience": Removed("--critic-warmup has its full length", None),
    "fused_head": Removed("The head is always computed in chunks", True),
    "scan_samples": Removed("--check prompts samples 8 completions per prompt, or K if that is more", 8),
    "scan_prompts": Removed("--check prompts samples up to 128 prompts in at most 20 seconds", 128),
}


def removed(name: str) -> Removed | None:
    """Return the removed setting with this name, also if it is written as a flag; None if there is none."""
    plain = name.lstrip("-").replace("-", "_")
    return REMOVED.get(plain) or REMOVED.get(plain.removeprefix("no_"))


def removed_from(settings: dict[str, Any]) -> list[str]:
    """Return one line for each removed setting that has another value than its default in the settings of a run."""
    return [
        f"{name} was {as_text(settings[name], ' ')} in this run, and only older versions have this setting"
        for name, one in REMOVED.items()
        if settings.get(name, one.default) != one.default
    ]


def hint(name: str, known: Iterable[str]) -> str:
    """Return how to fix an unknown name: the advice for a removed one, otherwise the closest name in `known`, or where
    all names are listed. Of a dotted name, as in verl, the last part counts; its meaning there can differ, so the
    answer names the page as well."""
    if (gone := removed(name)) is not None:
        return f"It was removed. {gone.advice}"
    page = "docs/coming_from_trl.md lists other trainers' names"
    near = did_you_mean(name.rpartition(".")[-1], known).strip()
    if not near:
        return f"--help-all lists all settings; {page}"
    return f"{near} {page}" if "." in name else near
