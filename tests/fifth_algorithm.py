"""A plugin of pytest that adds one more row to the table of algorithms: `pytest -p tests.fifth_algorithm`. Its
advantages are not linear in the score, and it reads one setting of a group."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.algorithms.classes import CLASSES
from rlhf.algorithms.experience import Experience
from rlhf.algorithms.grpo import GRPO
from rlhf.algorithms.table import ALGORITHMS, Algorithm
from rlhf.rollout.completions import Rollout


class Fifth(GRPO):
    """GRPO with the hyperbolic tangent of the scores."""

    def advantages(self, rollout: Rollout, scores: Tensor, kl_coef: float) -> Experience:
        return super().advantages(rollout, torch.tanh(scores), kl_coef)


for name in ("fifth", "sixth", "seventh"):
    ALGORITHMS[name] = Algorithm(
        name=name,
        label=name.title(),
        title="GRPO of bounded scores",
        group_size=8,
        settings=("scale_rewards",),
        defaults={"clip_range": 0.3},
        refuses=("delta",),
    )
    CLASSES[name] = Fifth
