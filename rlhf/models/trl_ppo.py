"""The only file that imports `trl.experimental`. It needs four names.

TRL removed PPO in release 1.13. Other files depend on these classes: rlhf/trainer/trl_host.py constructs a PPOTrainer,
whose accelerator, optimizer, scheduler, state and callback handler the training loop uses, and
rlhf/models/actor_critic.py uses the value head of AutoModelForCausalLMWithValueHead, and rlhf/trl.py scores as TRL's
PPO does. See docs/decisions/runs.md.
"""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # the warning is not needed, because TRL's version is pinned

from trl.experimental.ppo import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from trl.experimental.utils import get_reward

__all__ = ["AutoModelForCausalLMWithValueHead", "PPOConfig", "PPOTrainer", "get_reward"]
