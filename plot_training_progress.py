"""`python plot_training_progress.py`: draws the training curves of one run, or of several algorithms over seeds."""

from __future__ import annotations

from rlhf.commands.plot import INTERRUPTED
from rlhf.commands.plot import plot_command as main
from rlhf.utils.errors import run_command

if __name__ == "__main__":
    run_command(main, INTERRUPTED)
