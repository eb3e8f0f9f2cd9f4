"""`python train.py --algorithm NAME`, or `FILE.py:CLASS`: trains a language model with any algorithm."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.flags.safe_path:  # python -I or PYTHONSAFEPATH: Python does not search the script's folder for packages
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from rlhf.commands.train import INTERRUPTED, train_command
from rlhf.utils.errors import run_command


def main(argv: list[str] | None = None) -> None:
    train_command(None, argv, Path(__file__).with_name("config.py"))


if __name__ == "__main__":
    run_command(main, INTERRUPTED)
