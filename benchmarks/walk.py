"""Counts the way of a PPO prompt through the code, from the command to the new weights.

    python -m benchmarks.walk [--output FOLDER] [--list]

The script runs one update of the offline demo with a LoRA adapter, on one thread, and follows the calls of Python
functions until the first optimizer step returns. A reader of the code follows each function once, where it is called
first. So the walk is the list of the functions' files in the order of their first calls. Three counts describe it:

- files: different files of the project on the walk,
- moves: changes from one file to another,
- returns: moves to a file that the walk had left before.

Code that runs while a module is imported, such as a declaration of settings, is not part of the walk.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
COMMAND = (
    "--recipe", "demo", "--use-lora", "--num-iterations", "1", "--batch-size", "8", "--eval-prompts", "4",
)  # fmt: skip


class Walk:
    """Records the files of the project's functions, in the order of the functions' first calls."""

    def __init__(self, root: Path):
        self.root = f"{root.resolve()}/"
        self.known: set[CodeType] = set()
        self.steps: list[tuple[str, str]] = []  # (file, function) of each first call
        self.importing = 0  # modules whose code is running now, one inside the other
        self.ended = False

    def follow(self, frame: FrameType, event: str, _: Any) -> None:
        """Receive an event of `sys.setprofile`."""
        code = frame.f_code
        if code.co_name == "<module>":
            self.importing += {"call": 1, "return": -1}.get(event, 0)
        elif event == "return" and code.co_name == "step" and code.co_filename.endswith("torch/optim/adam.py"):
            self.ended = True
            sys.setprofile(None)
        elif event == "call" and not self.importing and not self.ended and code not in self.known:
            self.known.add(code)
            if code.co_filename.startswith(self.root) and ".venv" not in code.co_filename:
                self.steps.append((code.co_filename.removeprefix(self.root), code.co_qualname))

    def files(self) -> list[str]:
        """Return the files of the walk; calls within one file are one stay."""
        stays: list[str] = []
        for file, _ in self.steps:
            if stays[-1:] != [file]:
                stays.append(file)
        return stays


def counts(stays: list[str]) -> dict[str, int]:
    """Return the counts of a walk from its stays. A stay in a file of an earlier stay is a return."""
    files = len(set(stays))
    return {"files": files, "moves": len(stays) - 1, "returns": len(stays) - files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="folder of the run; without it a temporary one")
    parser.add_argument("--list", action="store_true", help="print each function of the walk, too")
    args = parser.parse_args()
    sys.path.insert(0, str(Path.cwd()))
    import train_ppo

    walk = Walk(Path.cwd())
    with tempfile.TemporaryDirectory() as folder:
        threading.setprofile(walk.follow)
        sys.setprofile(walk.follow)
        train_ppo.main([*COMMAND, "--overwrite", "--output", args.output or f"{folder}/run"])
    if args.list:
        before = ""
        for file, name in walk.steps:
            print(f"{'' if file == before else file:45} {name}")
            before = file
    print(f"walk: {counts(walk.files())}, {len(walk.steps)} functions, the optimizer step was reached: {walk.ended}")


if __name__ == "__main__":
    main()
