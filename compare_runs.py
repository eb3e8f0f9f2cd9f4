"""`python compare_runs.py RUN ...`: compares algorithms over seeds, and the start model, on the same prompts."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.flags.safe_path:  # python -I or PYTHONSAFEPATH: Python does not search the script's folder for packages
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from rlhf.commands.compare import INTERRUPTED
from rlhf.commands.compare import compare_command as main
from rlhf.utils.errors import run_command

if __name__ == "__main__":
    run_command(main, INTERRUPTED)
