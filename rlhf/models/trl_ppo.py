"""The only file that imports `trl.experimental`, for the three names that we use.

TRL dropped PPO in release 1.13. More than this import depends on it: rlhf/trainer/trl_host.py constructs a PPOTrainer,
whose accelerator, optimizer, scheduler, state and callback handler the loop uses, and rlhf/models/actor_critic.py
reads the value head of AutoModelForCausalLMWithValueHead.
"""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # we know that it is experimental: requirements.txt pins it

from trl.experimental.ppo import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

__all__ = ["AutoModelForCausalLMWithValueHead", "PPOConfig", "PPOTrainer"]
