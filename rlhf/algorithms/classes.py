"""The class of each algorithm: settings -> an object with the methods `advantages` and `loss`."""

from __future__ import annotations

from rlhf.algorithms.grpo import GRPO
from rlhf.algorithms.policy_gradient import PolicyGradient
from rlhf.algorithms.ppo import PPO
from rlhf.algorithms.reinforce_pp import ReinforcePlusPlus
from rlhf.algorithms.rloo import RLOO

CLASSES: dict[str, type[PolicyGradient]] = {
    "ppo": PPO,
    "grpo": GRPO,
    "rloo": RLOO,
    "reinforce_pp": ReinforcePlusPlus,
}
