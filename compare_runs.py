"""`python compare_runs.py RUN ...`: compares algorithms over seeds, and the start model, on the same prompts."""

from __future__ import annotations

from rlhf.commands.compare import INTERRUPTED
from rlhf.commands.compare import compare_command as main
from rlhf.utils.errors import run_command

if __name__ == "__main__":
    run_command(main, INTERRUPTED)
