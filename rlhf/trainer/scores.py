"""What the algorithm receives of an update's scores, and which groups teach nothing about the score."""

from __future__ import annotations

import math

from torch import Tensor

from rlhf.algorithms.normalizer import ScoreNormalizer
from rlhf.rewards.scores import score_tensor


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
