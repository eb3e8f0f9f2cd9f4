"""The only file that imports `trl.experimental`, for the three names that we use.

TRL dropped PPO in release 1.13. More than this import depends on it: `PPO` in rlhf/trainer/ppo.py is a PPOTrainer, the
loop uses that trainer's accelerator, optimizer, scheduler, state and callback handler, and rlhf/models/actor_critic.py
reads its value head.
"""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # we know that it is experimental: requirements.txt pins it

from trl.experimental.ppo import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

__all__ = ["AutoModelForCausalLMWithValueHead", "PPOConfig", "PPOTrainer"]
