"""One update's scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch
from torch import Tensor

from rlhf.algorithms.normalizer import ScoreNormalizer
from rlhf.utils.rng import rng_for


@dataclass
class Scores:
    """One update's scores. B episodes. NaN marks a completion to which no reward function applies."""

    raw: Tensor  # (B,) weighted sum of the reward functions
    shaped: Tensor  # (B,) raw minus the missing-EOS penalty, normalized if configured; input of the algorithm
    # each function's scores before its weight, B values each; None: the function does not apply
    by_function: dict[str, list[float | None]]
    extra: dict[str, list] = field(default_factory=dict)  # columns logged with log_extra, B values each
    # metrics logged with log_metric: means over all scored completions, also those that dynamic sampling replaced
    logged: dict[str, float] = field(default_factory=dict)

    @property
    def per_function(self) -> dict[str, float]:
        """The mean of each of several functions over the completions to which it applies. A single function's mean is
        that of the score."""
        if len(self.by_function) == 1:
            return {}
        known = {name: [s for s in scores if s is not None] for name, scores in self.by_function.items()}
        return {name: fmean(scores) for name, scores in known.items() if scores}

    def for_control(self, control: str, seed: int, update: int) -> Scores:
        """Return the scores of a control run: `shaped` is in a random order by (seed, update), across prompts. All
        else, such as `raw`, stays true. Without a control, return the scores unchanged.

        Each completion can receive each score of the batch, its own too, with equal probability, so the score that it
        receives says nothing about it. A completion without a score keeps none. Source: random rewards as a control,
        Shao et al. 2025, arXiv 2506.10947.
        """
        if control == "none":
            return self
        scored = (~self.shaped.isnan()).nonzero().flatten()
        order = rng_for(seed, update, "control").permutation(len(scored)).tolist()
        return replace(self, shaped=self.shaped.index_copy(0, scored, self.shaped[scored[order]]))

    def replaced(self, rows: Sequence[int], new: Scores) -> Scores:
        """Return the scores with those of `rows` replaced by the scores `new` of other completions, in this order.

        A column that only one of them logged has None for the other's completions.
        """
        count = len(self.raw)
        index = torch.tensor(rows, device=self.raw.device)
        place = dict(zip(rows, range(len(rows)), strict=True))

        def column(own: Sequence | None, other: Sequence | None) -> list:
            sources = [(other, place[r]) if r in place else (own, r) for r in range(count)]
            return [None if source is None else source[at] for source, at in sources]

        def columns(own: dict[str, list], other: dict[str, list]) -> dict[str, list]:
            return {name: column(own.get(name), other.get(name)) for name in {**own, **other}}

        return Scores(
            raw=self.raw.index_copy(0, index, new.raw),
            shaped=self.shaped.index_copy(0, index, new.shaped),
            by_function=columns(self.by_function, new.by_function),
            extra=columns(self.extra, new.extra),
            logged=self.logged,
        )


def score_tensor(scores: Sequence[float | None], device: torch.device) -> Tensor:
    """Return scores as a tensor (B,), with NaN for None."""
    return torch.tensor([math.nan if s is None else s for s in scores], dtype=torch.float32, device=device)


def shaped(
    raw: Tensor,
    ended: Tensor,
    missing_eos_penalty: float,
    normalizer: ScoreNormalizer | None,
    drawn_again: bool,
) -> Tensor:
    """Return what the algorithm receives, (B,): the raw scores minus the missing-EOS penalty, then normalized.

    Args:
        raw: (B,) score units; NaN stays NaN.
        ended: (B,) False if the completion does not end with EOS.
        missing_eos_penalty: score units.
        normalizer: updates its estimates with these scores; None: no normalization.
        drawn_again: the completions were sampled in place of others of the same update. They are normalized with the
            estimates of the first ones: a second step of the estimates would give a few completions the weight of a
            whole batch.
    """
    # detail 17: 0 by default (N details). Without a penalty, only the reward can teach the policy to stop.
    scores = raw - missing_eos_penalty * (~ended).float()
    known = scores.isfinite().nonzero().flatten()
    if normalizer is not None and len(known):
        normalize = normalizer.normalized if drawn_again and normalizer.batches else normalizer
        scores[known] = score_tensor(normalize(scores[known].tolist()), scores.device)
    return scores


def equal_groups(scores: Tensor, group_size: int) -> Tensor:
    """Return which groups have equal scores, or fewer than two, (B / group_size,): they teach nothing about the score.

    `scores` are (B,), NaN without a score.
    """
    groups = scores.view(-1, group_size)
    return groups.nan_to_num(-math.inf).amax(1) <= groups.nan_to_num(math.inf).amin(1)
