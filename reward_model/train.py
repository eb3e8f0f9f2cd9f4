"""`python -m reward_model.train`: trains a reward model from preference pairs."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # started as a file, whose folder is not the one with the packages
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rlhf.commands.reward_model import INTERRUPTED, reward_model_command
from rlhf.utils.errors import run_command


def main(argv: list[str] | None = None) -> None:
    reward_model_command(argv, Path(__file__).parent.parent / "config.py")


if __name__ == "__main__":
    run_command(main, INTERRUPTED)
