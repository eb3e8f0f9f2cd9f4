"""Samples the start model many times for each prompt, and stores the completions for the next comparison."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rlhf.analysis.evaluator import GenerationResults, ModelEvaluator
from rlhf.analysis.judges import as_key
from rlhf.analysis.models import ModelRef
from rlhf.analysis.statistics import scored
from rlhf.data.chat_template import date_row
from rlhf.rollout.sampling import uniform_noise
from rlhf.utils.console import Screen
from rlhf.utils.files import files_print, write_text

MOST = 256  # completions of each prompt

Samples = list[tuple[list[list[int]], list[bool]]]  # n times one completion of each prompt: token ids, and ended


@torch.no_grad()
def sample_start(
    evaluator: ModelEvaluator, minutes: float, least: int, file: Path, screen: Screen
) -> GenerationResults:
    """Returns n completions of each prompt by the start model: as many as `minutes` allow, from `least` to MOST.

    They are stored in `file`. If it has completions of the same model, prompts and sampling settings, these are used,
    and more are added if `minutes` are more than they took.
    """
    prompts, key, seed = evaluator.encoded(evaluator.tokenizer), _key(evaluator), evaluator.settings.seed
    length, model = evaluator.config.sampling.max_new_tokens, evaluator.reference.copy
    samples, spent = read_samples(file, key)
    if len(samples) < least or (spent < minutes and len(samples) < MOST):
        end = time.monotonic() + 60 * (minutes - spent)
        while len(samples) < least or (len(samples) < MOST and time.monotonic() < end):
            uniform = uniform_noise(seed, len(samples), "start samples", range(len(prompts)), length)
            completions = evaluator.sample(model, evaluator.tokenizer, prompts, uniform)
            samples.append((completions.rows(), completions.ended.tolist()))
            screen.progress(f"start model: {len(samples)} completions of each prompt", last=False)
        write_text(file, json.dumps({"key": key, "minutes": max(minutes, spent), "samples": samples}))
    screen.progress(f"start model: {len(samples)} completions of each prompt", last=True)
    ids, ended = ([part[i][p] for p in range(len(prompts)) for part in samples] for i in (0, 1))
    return evaluator.rated("start model", evaluator.tokenizer, [p for p in prompts for _ in samples], ids, ended)


@torch.no_grad()
def with_proposals(
    evaluator: ModelEvaluator,
    samples: GenerationResults,
    arms: Sequence[tuple[ModelRef, GenerationResults]],
    screen: Screen,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the scores (P, M) of the start model's completions and of the arms', and their log weights (P, M): log
    of start model / mixture of all proposals, in nats (deterministic mixture weights, Owen and Zhou 2000).

    A tilted start model at a high KL has completions that the start model rarely samples, but trained arms often do.
    Only the start model's scores, and None, if all scores are 0 or 1 (the limit is exact in the pass rates), or if
    completions were not sampled from the whole distribution (top-k, top-p). Arms with another chat template or
    vocabulary are no proposals.
    """
    sampling, prompts = evaluator.config.sampling, evaluator.encoded(evaluator.tokenizer)
    arms = [
        (m, r) for m, r in arms if r.kl is not None and evaluator.encoded(evaluator.tokenizers[m.source]) == prompts
    ]
    if not arms or np.isin(scored(samples.scores), (0, 1)).all() or sampling.top_p < 1 or sampling.top_k:
        return samples.scores, None
    every = [samples, *(results for _, results in arms)]
    pool = [row for i in range(len(prompts)) for results in every for row in results.ids_of(i)]
    counts = [results.scores.shape[1] for results in every]
    rows = [prompt for prompt in prompts for _ in range(sum(counts))]
    parts = [np.full(len(pool), np.log(counts[0] / sum(counts)))]
    for (model, _), count in zip(arms, counts[1:], strict=True):
        ratios = evaluator.log_ratios(model, rows, pool, screen)
        parts.append(np.log(count / sum(counts)) + np.array(ratios))
    weights = -np.logaddexp.reduce(parts, axis=0)
    scores = np.concatenate([results.scores for results in every], axis=1)
    return scores, weights.reshape(scores.shape)


def _key(evaluator: ModelEvaluator) -> str:
    """Returns a text that is equal for equal start model, prompts and sampling settings."""
    prompts = hashlib.sha256("\n".join(as_key(e.messages) for e in evaluator.examples).encode()).hexdigest()
    weights = files_print(evaluator.start.source, "*.safetensors") or evaluator.start.name
    config = evaluator.config
    how = config.speed.own_engine, str(config.sampling), evaluator.settings.seed, str(evaluator.dtype)
    return json.dumps([weights, prompts, *how, *date_row(evaluator.tokenizer)])


def read_samples(file: Path, key: str) -> tuple[Samples, float]:
    """Returns the stored completions and their minutes; none if there is no file, or it has those of another key."""
    stored = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return (stored["samples"], stored["minutes"]) if stored.get("key") == key else ([], 0.0)
