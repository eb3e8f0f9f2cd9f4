"""The scores of completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from rlhf.utils.rng import rng_for


@dataclass
class Scores:
    """The scores of B completions. Each list has one entry per completion; None: no reward function applies to it."""

    total: list[float | None]  # the weighted sum over the functions that apply
    by_function: dict[str, list[float | None]]  # before the weights
    extra: dict[str, list] = field(default_factory=dict)  # columns that functions logged with log_extra
    # means of what functions logged with log_metric, over all scored completions, also those that dynamic sampling
    # replaced
    logged: dict[str, float] = field(default_factory=dict)
    # of an update: (B,), NaN for a completion without a score
    raw: Tensor | None = None  # `total`
    shaped: Tensor | None = None  # what the algorithm receives: without the missing-EOS penalty, then normalized
    # (B,) KL to the teacher, nats, which `raw` and `shaped` contain; NaN: another policy sampled; None: no teacher
    teacher_kl: Tensor | None = None
    # what is paid at each token of each completion, a plain score at its last one of the policy; its sum is the score.
    # None: all scores are plain
    by_token: list[list[float]] | None = None
    each: Tensor | None = None  # (B, F) `by_function`
    weights: tuple[float, ...] = (1.0,)  # (F,) of the functions

    @property
    def per_function(self) -> dict[str, float]:
        """The mean of each of several functions over the completions to which it applies. A single function's mean is
        that of the score."""
        if len(self.by_function) == 1 and self.teacher_kl is None:
            return {}
        known = {name: [s for s in scores if s is not None] for name, scores in self.by_function.items()}
        return {name: fmean(scores) for name, scores in known.items() if scores}

    def select(self, rows: Sequence[int]) -> Scores:
        """Return the scores of these rows."""
        return self.joined(self, rows)

    def equal_groups(self, group_size: int) -> Tensor:
        """Return which groups have equal `shaped` scores, as `have_equal_scores` does."""
        return have_equal_scores(self.shaped, group_size)

    def for_control(self, control: str, seed: int, update: int) -> Scores:
        """Return the scores of a control run: `shaped` and `each` are in a random order by (seed, update), across
        prompts. All else, such as `raw`, stays true. Without a control, return the scores unchanged.

        Each completion can receive each score of the batch, its own too, with equal probability, so the score that it
        receives says nothing about it. A completion without a score keeps none. Source: random rewards as a control,
        Shao et al. 2025, arXiv 2506.10947.
        """
        if control == "none":
            return self
        scored = (~self.shaped.isnan()).nonzero().flatten()
        order = rng_for(seed, update, "control").permutation(len(scored)).tolist()
        shuffled = {
            name: given.index_copy(0, scored, given[scored[order]])
            for name, given in (("shaped", self.shaped), ("each", self.each))
            if given is not None
        }
        return replace(self, **shuffled)

    def joined(self, new: Scores, rows: Sequence[int]) -> Scores:
        """Return the scores of `rows`: first come these B completions, then those of `new`.

        A column that only one of them logged has None for the other's completions. `logged` has the means over all
        completions. Other fields without an entry for each completion stay.
        """
        counts = len(self.total), len(new.total)

        def chosen(own: Any, other: Any) -> Any:
            if isinstance(own, Tensor):
                return torch.cat([own, other])[rows]
            if isinstance(own, list):
                both = own + other
                return [both[row] for row in rows]
            columns = {**own, **other} if isinstance(own, dict) else {"": own}
            if not all(isinstance(column, list) for column in columns.values()):
                return own
            missing = [[None] * count for count in counts]
            return {n: chosen(own.get(n, missing[0]), other.get(n, missing[1])) for n in columns}

        found = {f.name: chosen(getattr(self, f.name), getattr(new, f.name)) for f in fields(self)}
        logged = {}
        for name in {**self.logged, **new.logged}:
            parts = zip(counts, (self.logged, new.logged), strict=True)
            known = [(count, means[name]) for count, means in parts if name in means]
            logged[name] = sum(count * mean for count, mean in known) / sum(count for count, _ in known)
        return replace(self, **found | {"logged": logged})


def have_equal_scores(scores: Tensor, group_size: int) -> Tensor:
    """Return which groups have equal scores (B,), or fewer than two, (B / group_size,): they teach nothing about the
    score. NaN: no score."""
    groups = scores.view(-1, group_size)
    return groups.nan_to_num(-math.inf).amax(1) <= groups.nan_to_num(math.inf).amin(1)


def score_tensor(scores: Sequence[float | None], device: torch.device) -> Tensor:
    """Return scores as a tensor (B,), with NaN for None."""
    return torch.tensor([math.nan if s is None else s for s in scores], dtype=torch.float32, device=device)
