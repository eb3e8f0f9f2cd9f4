"""Finds models with equal weights, so that each is evaluated once. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.analysis.models import ModelRef, in_4_bit, updates_of
from rlhf.utils.files import files_print

if TYPE_CHECKING:
    from rlhf.analysis.evaluator import GenerationResults, ModelEvaluator
    from rlhf.utils.console import Screen

START = -1  # in place of a model's index


def equal_weights(models: Sequence[ModelRef], start: ModelRef | None) -> dict[int, int]:
    """Returns the models whose weights another one has, too: index -> index of the earlier one, or START.

    Compares what runs recorded: two models of a run are equal if they were saved after the same update, and a model
    saved after update 0 is the start model, if that has the hash that the run recorded.
    """
    found, known = {}, {}
    for i, model in enumerate(models):
        if model.run is None:
            continue
        if model.update == 0 and start is not None and not in_4_bit(model) and _is_start_of(model, start):
            found[i] = START
            continue
        key = model.run.id, model.update, model.base  # a merged adapter has no base, and was rounded
        if key in known:
            found[i] = known[key]
        known.setdefault(key, i)
    return found


def _is_start_of(model: ModelRef, start: ModelRef) -> bool:
    """True if `start` is the model that the run of `model` started with, and has not changed since."""
    recorded, name = model.run.data.get("start_model"), model.run.flat_settings["actor_model"]
    return start.name == name and recorded is not None and files_print(start.source, "*.safetensors") == recorded


def evaluate_once(
    evaluator: ModelEvaluator, models: Sequence[ModelRef], screen: Screen
) -> tuple[GenerationResults | None, list[GenerationResults]]:
    """Evaluates the start model, if there is one, and the models. Models with equal weights share their results."""
    equal = equal_weights(models, evaluator.start)
    start = evaluator.evaluate_start(screen) if evaluator.start is not None else None
    measured: list[GenerationResults] = []
    for i, model in enumerate(models):
        same = start if equal.get(i) == START else measured[equal[i]] if i in equal else None
        measured.append(replace(same, label=model.label) if same is not None else evaluator.evaluate(model, screen))
    return start, measured


def equal_in_words(models: Sequence[ModelRef], start: ModelRef | None) -> list[str]:
    """Returns one sentence per model whose weights another one has, also if the other one is not evaluated."""
    sentences = []
    for i, other in (equal := equal_weights(models, start)).items():
        name = f"{models[i].label} has the weights of"
        if other == START:
            sentences.append(
                f"{name} the start model, because no later evaluation was better. Both were evaluated once"
            )
        else:
            sentences.append(f"{name} {models[other].label}. Both were evaluated once")
    best = [m for i, m in enumerate(models) if i not in equal and m.run is not None and m.which == "best"]
    return sentences + [f"{m.label} has the final weights of its run" for m in best if m.update == updates_of(m.run)]
