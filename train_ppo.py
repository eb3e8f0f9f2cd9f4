"""`python train_ppo.py`: PPO from a start model and a reward to a better model."""

from __future__ import annotations

from pathlib import Path

from rlhf.run.command import train_command
from rlhf.utils.errors import run_command


def main(argv: list[str] | None = None) -> None:
    train_command("ppo", argv, Path(__file__).with_name("config.py"))


if __name__ == "__main__":
    run_command(main, "stopped; a run that has a checkpoint resumes from it with --resume")
