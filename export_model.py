"""`python export_model.py RUN --to gguf`: writes a finished run in the format of another program."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.flags.safe_path:  # python -I or PYTHONSAFEPATH: Python does not search the script's folder for packages
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from rlhf.commands.export import INTERRUPTED
from rlhf.commands.export import export_command as main
from rlhf.utils.errors import run_command

if __name__ == "__main__":
    run_command(main, INTERRUPTED)
