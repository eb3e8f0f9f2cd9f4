"""The only file that imports `trl.experimental`: hands on the three names that we use.

TRL dropped PPO in release 1.13. The day PPO must leave TRL, this file changes and no other.
"""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # we know that it is experimental: requirements.txt pins it

from trl.experimental.ppo import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

__all__ = ["AutoModelForCausalLMWithValueHead", "PPOConfig", "PPOTrainer"]
