"""Accuracy of a reward model on preference pairs: how often it scores the chosen completion higher."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rlhf.data.row import Example
from rlhf.rewards.reward_model import RewardModel


def pairs_that_fit(model: RewardModel, pairs: Sequence[Example]) -> list[Example]:
    """Return the pairs whose sides fit the model's context."""
    return [p for p in pairs if model.context is None or pair_length(model, p) <= model.context]


def pair_length(model: RewardModel, pair: Example) -> int:
    """Return the number of tokens of the longer side of a pair, prompt included."""
    return max(len(ids) for ids in pair_ids(model, pair).values())


def pair_ids(model: RewardModel, pair: Example) -> dict[str, list[int]]:
    """Return the ids of both sides of a pair, in RewardTrainer's columns for tokenized data."""
    return {
        "chosen_ids": model.encode(pair.messages, pair.chosen),
        "rejected_ids": model.encode(pair.messages, pair.rejected, pair.rejected_ended),
    }


def pair_accuracy(model: RewardModel, pairs: Sequence[Example]) -> dict[str, Any]:
    """Return the accuracy of the model, and that of a rule that compares only lengths, on held-out pairs: the first
    keys of metrics.json."""
    messages = [p.messages for p in pairs]
    always = [True] * len(pairs)
    chosen = model.score(messages, [p.chosen for p in pairs], always)
    rejected = model.score(messages, [p.rejected for p in pairs], [p.rejected_ended for p in pairs])
    margins = [c - r for c, r in zip(chosen, rejected, strict=True)]
    for i, pair in enumerate(pairs):
        ids = pair_ids(model, pair)
        if ids["chosen_ids"] == ids["rejected_ids"]:
            margins[i] = 0.0  # equal ids tie; their scores differ by rounding, which depends on the batch
    wins = [_wins(m) for m in margins]
    longer = [_wins(len(p.chosen) - len(p.rejected)) for p in pairs]
    longer_rate = sum(longer) / len(pairs)
    length_wins = longer if longer_rate >= 0.5 else [1 - x for x in longer]
    against = [w for w, baseline in zip(wins, length_wins, strict=True) if baseline < 0.5]
    flaws = sorted({p.flaw for p in pairs if p.flaw})
    return {
        "accuracy": fmean(wins),  # share of pairs with chosen > rejected; ties count half
        "margin": sum(margins) / len(margins),  # mean of chosen - rejected, score units
        # the better of "longer wins" and "shorter wins" (characters; ties count half)
        "length_baseline": max(longer_rate, 1 - longer_rate),
        # on the pairs that the better length rule gets wrong; None without any
        "accuracy_against_baseline": sum(against) / len(against) if against else None,
        # of each flaw of the rejected completion
        "by_flaw": {f: fmean([w for w, p in zip(wins, pairs, strict=True) if p.flaw == f]) for f in flaws},
        "pairs": len(pairs),
    }


def _wins(difference: float) -> float:
    """Return 1 if a difference is above 0, 0.5 if it is 0, otherwise 0."""
    return 0.5 if difference == 0 else float(difference > 0)
