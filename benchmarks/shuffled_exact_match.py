"""A reward that teaches nothing: exact match, with the scores exchanged between questions.

python train_grpo.py --recipe demo-checker --reward-func benchmarks/shuffled_exact_match.py:shuffled_exact_match \
    --eval-func exact_match

The scores of an update are the same numbers, so mean and spread of the reward stay as they are. If the model improved
with it, something other than right answers would be rewarded.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from rlhf.rewards.eval_functions import exact_match


def shuffled_exact_match(completions: Sequence[Any], answer: Sequence[str], **_) -> list[float | None]:
    """Return the exact matches of all completions in a random order, which depends only on the completions."""
    scores = exact_match(completions, answer)
    random.Random(repr(completions)).shuffle(scores)
    return scores
