"""Other trainers' names and meanings, in this project's settings."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rlhf.settings.fields import UNREADABLE, Layer, Setting, hint, is_unset, name_table
from rlhf.settings.types import bare_targets

LENGTHS = ("epochs", "num_iterations", "episodes")  # of a run: one of them counts
BARE_TARGETS = ("target", "target_kl")  # names under which other trainers write a KL target without its unit


def translate(layer: Layer, settings: dict[str, Setting]) -> tuple[Layer, list[str]]:
    """Return one layer of settings under their first names, and the problems with its names, one line each.

    A name of another trainer keeps the meaning that it has there, which may set more than one setting. A setting that
    replaces others (one of the run's lengths, say) unsets those of lower layers. A name with a colon is a block of a
    YAML file (`lora:`).
    """
    known, problems = _under_first_names(layer, settings)

    def add(name: str, value: Any, because: str) -> None:
        """Set `name` beside the setting `because`, unless the layer sets it, or the command lacks it."""
        if name in settings:
            known.setdefault(name, (value, (layer.get(because) or known[because])[1]))

    def is_set(name: str) -> bool:
        return name in known and not is_unset(known[name][0])

    if "mini_batch_size" in layer:  # TRL's first PPO: an optimizer step after each of them
        add("gradient_accumulation_steps", 1, "mini_batch_size")
    if "normalizer_alpha" in layer:
        add("normalize_scores", True, "normalizer_alpha")
    if "lora:" in layer:
        add("use_lora", True, "lora:")
    for length in filter(is_set, ("steps_per_topic", *LENGTHS)):
        for other in LENGTHS:
            add(other, None, length)
    if is_set("minibatches") and is_set("gradient_accumulation_steps"):
        places = " and ".join(known[name][1] for name in ("minibatches", "gradient_accumulation_steps"))
        problems.append(f"minibatches and gradient_accumulation_steps set the same thing: {places}. Keep one")
    elif is_set("minibatches"):
        add("gradient_accumulation_steps", None, "minibatches")
    elif is_set("gradient_accumulation_steps"):
        add("minibatches", 1, "gradient_accumulation_steps")
    if is_set("kl_schedule") and known["kl_schedule"][0] != "adaptive":
        add("kl_target", None, "kl_schedule")  # a lower layer's target belongs to its adaptive schedule
    return known, problems


def only(layer: Layer, settings: dict[str, Setting], names: Collection[str]) -> Layer:
    """Return the part of a layer that sets one of `names`, under whatever name."""
    first = name_table(settings)
    return {name: found for name, found in layer.items() if first.get(name) in names}


def _under_first_names(layer: Layer, settings: dict[str, Setting]) -> tuple[Layer, list[str]]:
    """Return the layer with each setting's first name in place of the name that was written, and the problems with
    the names, one line each."""
    names, problems, known = name_table(settings), [], {}
    for name, (value, where) in layer.items():
        if name.endswith(":"):
            continue
        if name == UNREADABLE:
            problems.append(value)
        elif name not in names:
            helper = ". A name that is no setting begins with _" if ".py" in where else ""
            problems.append(f"unknown setting {name}: {where}. {hint(name, names)}{helper}")
        elif names[name] in known:
            problems.append(f"{name} is set twice: {where} and {known[names[name]][1]}. Keep one")
        else:
            known[names[name]] = (bare_targets(value) if name in BARE_TARGETS else value, where)
    return known, problems
