"""Samples the start model many times for each prompt, and stores the completions for the next comparison."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from rlhf.analysis.evaluator import ModelEvaluator
from rlhf.checkpoints.model_folder import model_files
from rlhf.data.prompts import Prompt, fingerprint
from rlhf.trainer.evaluation import Evaluation
from rlhf.utils.console import Screen
from rlhf.utils.files import write_text

MOST = 256  # completions of each prompt

Samples = list[tuple[list[list[int]], list[bool]]]  # n times one completion of each prompt: token ids, and ended


@torch.no_grad()
def sample_start(
    evaluator: ModelEvaluator,
    minutes: float,
    least: int,
    file: Path,
    screen: Screen,
    check: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Return n completions of each prompt by the start model: as many as `minutes` allow, from `least` to MOST.

    They are stored in `file`. If it has completions of the same model, prompts and sampling settings, these are used,
    and more are added if `minutes` are more than they took. `check` is called before `file` is written.
    """
    prompts = evaluator.encoded(evaluator.tokenizer)
    key = _key(evaluator, prompts)
    of_start = evaluator.evaluator(evaluator.reference.copy, evaluator.tokenizer)
    player = of_start.player
    # the rewards of an environment cannot be computed again from stored tokens
    stored, spent = read_samples(file, key, screen) if player.environment is None else ([], 0.0)
    samples = [[player.of_ids(*pair) for pair in zip(prompts, ids, strict=True)] for ids, _ in stored]
    if len(samples) < least or (spent < minutes and len(samples) < MOST):
        end = time.monotonic() + 60 * (minutes - spent)
        with player.sampler.same_weights():
            while len(samples) < least or (len(samples) < MOST and time.monotonic() < end):
                episodes = player.started(list(enumerate(prompts)), len(samples), "start samples", 1)
                player.play(episodes, masked=())
                samples.append(episodes)
                screen.progress(f"start model: {len(samples)} completions of each prompt", last=False)
        check()
        if player.environment is None:
            pairs = [([one.ids for one in part], [one.ended for one in part]) for part in samples]
            write_text(file, json.dumps({"key": key, "minutes": max(minutes, spent), "samples": pairs}))
    screen.progress(f"start model: {len(samples)} completions of each prompt", last=True)
    return of_start.rate([part[p] for p in range(len(prompts)) for part in samples], len(samples))


def _key(evaluator: ModelEvaluator, prompts: Sequence[Prompt]) -> str:
    """Return a text that is equal for equal start model, encoded prompts and sampling settings."""
    model = model_files(evaluator.start.source) or evaluator.start.name
    config = evaluator.config
    how = config.speed.own_engine, str(config.sampling), evaluator.settings.seed, str(evaluator.dtype)
    return json.dumps([model, fingerprint(prompts), *how])


def read_samples(file: Path, key: str, screen: Screen) -> tuple[Samples, float]:
    """Return the stored completions and their minutes; none if there is no file, or it has those of another key.
    Prints a note and returns none if the file is corrupted."""
    if not file.is_file():
        return [], 0.0
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored["key"] != key:
            return [], 0.0
        return [(ids, ended) for ids, ended in stored["samples"]], float(stored["minutes"])
    except (ValueError, TypeError, KeyError):
        screen.say(f"note: {file} is incomplete or corrupted, so the start model is sampled again")
        return [], 0.0
