"""Constants that several benchmarks share. This module imports nothing of the project."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # of the checkout
SEEDS = (42, 123, 777)
# training runs of real_smollm2.py: name in the tables -> algorithm, flags
KINDS = {
    "ppo": ("ppo", ()),
    "grpo": ("grpo", ()),
    "rloo": ("rloo", ()),
    "control": ("grpo", ("--control", "shuffled")),
}
# the time of a run: from the command to the first evaluation; evaluations; checkpoints; updates
TIMES = ("start", "measuring", "checkpoints", "learning")
# stock_sums.py
EPISODES = 64  # completions per update
GOAL = 0.4  # share of right answers
