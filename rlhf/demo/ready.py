"""Tells whether the parts of a demo exist, and were made by this version. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlhf.checkpoints.model_folder import METRICS_FILE, WEIGHTS_FILE
from rlhf.settings.fields import to_dict
from rlhf.settings.recipes import DEMOS
from rlhf.settings.reward_model import parse_reward_cli

HERE = Path(__file__).parent
# the shipped start models
WEIGHTS = HERE / "weights"
CHECKER_WEIGHTS = HERE / "checker_weights"
STAMP_FILE = "stamp.json"  # in a folder of parts; written last
# demo
FOLDER = Path("demo_parts")
QUESTIONS = 3_000
SAMPLES_PER_QUESTION = 6
SEED = 42  # of questions, completions and reward model, independent of the run's seed
# demo-checker
CHECKER_FOLDER = Path("demo_checker_parts")
QUESTIONS_FILE = "questions.jsonl"
PER_CELL = 190  # questions of each family and level
# smollm2-sums
SUMS_FOLDER = Path("smollm2_sums_parts")
SUMS_FILES = {"train": "train.jsonl", "evaluation": "eval.jsonl"}  # part -> its file
SUMS_PER_TOPIC = {"train": 120, "evaluation": 24}  # questions of each of the 11 topics
BUILD_TIME = {"demo": "about a minute on two CPU cores", "demo-checker": "a second", "smollm2-sums": "a second"}


def is_ready(recipe: str) -> bool:
    """Return True if all parts of a demo exist and were made by this version."""
    return record_of_demo() is not None if recipe == "demo" else parts_of_demo(recipe).are_complete()


def is_to_be_built(recipe: str) -> bool:
    """Return True if a run with this recipe would first build its parts."""
    return recipe in DEMOS and not is_ready(recipe)


def record_of_demo() -> dict | None:
    """Return the reward model's record if all parts of the demo exist and were made by this version, else None."""
    files = ("pairs.jsonl", f"start_model/{WEIGHTS_FILE}", f"reward_model/{WEIGHTS_FILE}")
    if not _are_complete(FOLDER, files, demo_stamp()):
        return None
    try:
        return json.loads((FOLDER / "reward_model" / METRICS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class CheckerParts:
    """The parts of a demo whose answers a program checks: files of questions, and a start model if one is shipped."""

    recipe: str
    folder: Path
    questions: tuple[str, ...]  # files
    settings: tuple  # of the generator
    generator: Path  # its code
    weights: Path | None = None  # the shipped start model; None: the recipe names another one

    @property
    def start_model_files(self) -> list[Path]:
        return sorted(self.weights.iterdir()) if self.weights is not None else []

    def are_complete(self) -> bool:
        """Return True if all parts exist and were made by this version."""
        files = (*self.questions, *(f"start_model/{file.name}" for file in self.start_model_files))
        return _are_complete(self.folder, files, self.stamp())

    def stamp(self) -> dict[str, str]:
        """Return a hash of the generator's code, its settings and the start model."""
        weights = [] if self.weights is None else [self.weights / WEIGHTS_FILE]
        return _stamp(self.settings, [self.generator, *weights])


def parts_of_demo(recipe: str) -> CheckerParts:
    """Return the parts of demo-checker or smollm2-sums."""
    if recipe == "demo-checker":
        code = HERE / "checker_questions.py"
        settings = (PER_CELL, SEED)
        return CheckerParts(recipe, CHECKER_FOLDER, (QUESTIONS_FILE,), settings, code, CHECKER_WEIGHTS)
    code = HERE / "sums_questions.py"
    settings = (SUMS_PER_TOPIC, SEED)
    return CheckerParts(recipe, SUMS_FOLDER, tuple(SUMS_FILES.values()), settings, code)


def _are_complete(folder: Path, files: Iterable[str], stamp: dict[str, str]) -> bool:
    try:
        written = json.loads((folder / STAMP_FILE).read_text(encoding="utf-8"))
        return written == stamp and all((folder / file).stat().st_size for file in files)
    except (OSError, ValueError):
        return False


def demo_stamp() -> dict[str, str]:
    """Return a hash of the generator's and the calibration's code, the start model, and the settings of pairs and
    reward model."""
    settings = to_dict(parse_reward_cli(["--recipe", "demo"]))
    code = [HERE / name for name in ("families.py", "tasks.py", "pairs.py")]
    code.append(HERE.parent / "rewards" / "calibration.py")
    return _stamp((settings, QUESTIONS, SAMPLES_PER_QUESTION, SEED), [*code, WEIGHTS / WEIGHTS_FILE])


def _stamp(settings: tuple, files: Iterable[Path]) -> dict[str, str]:
    digest = hashlib.sha256(repr(settings).encode())
    for file in files:
        digest.update(file.read_bytes())
    return {"made_from": digest.hexdigest()}
