"""Evaluations with given scores, for tests that need no model."""

from __future__ import annotations

import numpy as np

from rlhf.trainer.evaluation import Evaluation

TEXT = "a b c d"
LENGTH = 5  # with EOS


def evaluation_of(scores, judged=None, **more) -> Evaluation:
    """Return an evaluation with these scores (P, K) and ratings of the judges; None stands for NaN.

    All completions have the same text and length, and have ended, unless `more` has other values.
    """
    scores = np.array(scores, dtype=float)
    same = {
        "texts": [[TEXT] * scores.shape[1]] * scores.shape[0],
        "lengths": np.full(scores.shape, LENGTH),
        "ended": np.full(scores.shape, True),
    }
    rated = {name: np.array(values, dtype=float) for name, values in (judged or {}).items()}
    return Evaluation(scores=scores, judged=rated, **same | more)
