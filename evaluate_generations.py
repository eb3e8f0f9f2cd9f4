"""`python evaluate_generations.py --model-path RUN`: scores and ranks completions, next to the start model's.

`--tokens RUN` makes a page of the recorded tokens of a run. `--chat` starts a chat.
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.flags.safe_path:  # python -I or PYTHONSAFEPATH: Python does not search the script's folder for packages
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from rlhf.commands.evaluate import INTERRUPTED
from rlhf.commands.evaluate import evaluate_command as main
from rlhf.utils.errors import run_command

if __name__ == "__main__":
    run_command(main, INTERRUPTED)
