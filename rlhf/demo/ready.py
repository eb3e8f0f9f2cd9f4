"""Tells whether the parts of a demo exist, and were made by this version. Imports no torch."""

from __future__ import annotations

import hashlib
import json
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
# demo-game
GAME_FOLDER = Path("demo_game_parts")
GAMES_FILE = "games.jsonl"
GAMES = 512
BUILD_TIME = {
    "demo": "about a minute on two CPU cores",
    "demo-checker": "a second",
    "demo-game": "half a minute on two CPU cores",
    "smollm2-sums": "a second",
}


def is_ready(recipe: str) -> bool:
    """Return True if all parts of a demo exist and were made by this version."""
    return parts_of_demo(recipe).are_complete()


def is_to_be_built(recipe: str) -> bool:
    """Return True if a run with this recipe would first build its parts."""
    return recipe in DEMOS and not is_ready(recipe)


@dataclass(frozen=True)
class DemoParts:
    """The parts of a demo: what a program makes, and a copy of the start model if one is shipped."""

    recipe: str
    folder: Path
    made: tuple[str, ...]  # files that the program makes
    settings: tuple  # of the program
    code: tuple[Path, ...]  # of the program
    weights: Path | None = None  # the shipped start model; None: the recipe names another one

    @property
    def start_model_files(self) -> list[Path]:
        return sorted(self.weights.iterdir()) if self.weights is not None else []

    def are_complete(self) -> bool:
        """Return True if all parts exist and were made by this version."""
        files = (*self.made, *(f"start_model/{file.name}" for file in self.start_model_files))
        records = [self.folder / file for file in self.made if file.endswith(".json")]
        try:
            stamp, *read = (
                json.loads(file.read_text(encoding="utf-8")) for file in (self.folder / STAMP_FILE, *records)
            )
            are_whole = all(isinstance(found, dict) for found in read)
            return are_whole and stamp == self.stamp() and all((self.folder / file).stat().st_size for file in files)
        except (OSError, ValueError):
            return False

    def stamp(self) -> dict[str, str]:
        """Return a hash of the program's code, its settings and the start model."""
        digest = hashlib.sha256(repr(self.settings).encode())
        for file in (*self.code, *([] if self.weights is None else [self.weights / WEIGHTS_FILE])):
            digest.update(file.read_bytes())
        return {"made_from": digest.hexdigest()}


def parts_of_demo(recipe: str) -> DemoParts:
    """Return the parts of a demo."""
    if recipe == "demo":
        made = ("pairs.jsonl", f"reward_model/{WEIGHTS_FILE}", f"reward_model/{METRICS_FILE}")
        settings = (to_dict(parse_reward_cli(["--recipe", "demo"])), QUESTIONS, SAMPLES_PER_QUESTION, SEED)
        code = [HERE / name for name in ("families.py", "tasks.py", "pairs.py")]
        code.append(HERE.parent / "rewards" / "calibration.py")
        return DemoParts(recipe, FOLDER, made, settings, tuple(code), WEIGHTS)
    if recipe == "demo-checker":
        code = HERE / "checker_questions.py"
        return DemoParts(recipe, CHECKER_FOLDER, (QUESTIONS_FILE,), (PER_CELL, SEED), (code,), CHECKER_WEIGHTS)
    if recipe == "demo-game":
        code = (HERE / "crossing.py", HERE / "crossing_start.py")
        return DemoParts(recipe, GAME_FOLDER, (GAMES_FILE,), (GAMES,), code, WEIGHTS)
    code = HERE / "sums_questions.py"
    return DemoParts(recipe, SUMS_FOLDER, tuple(SUMS_FILES.values()), (SUMS_PER_TOPIC, SEED), (code,))
