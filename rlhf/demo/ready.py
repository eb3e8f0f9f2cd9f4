"""Tells whether the parts of a demo exist, and were made by this version. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from rlhf.checkpoints.model_folder import METRICS_FILE, WEIGHTS_FILE
from rlhf.settings.fields import to_dict
from rlhf.settings.reward_model import parse_reward_cli

HERE = Path(__file__).parent
WEIGHTS, CHECKER_WEIGHTS = HERE / "weights", HERE / "checker_weights"  # the shipped start models
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
BUILD_TIME = {"demo": "about a minute on two CPU cores", "demo-checker": "a second"}


def is_ready(recipe: str) -> bool:
    """Return True if all parts of a demo exist and were made by this version."""
    return record_of_demo() is not None if recipe == "demo" else checker_is_complete()


def record_of_demo() -> dict | None:
    """Return the reward model's record if all parts of the demo exist and were made by this version, else None."""
    files = ("pairs.jsonl", f"start_model/{WEIGHTS_FILE}", f"reward_model/{WEIGHTS_FILE}")
    if not _is_complete(FOLDER, files, demo_stamp()):
        return None
    try:
        return json.loads((FOLDER / "reward_model" / METRICS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def checker_is_complete() -> bool:
    """Return True if all parts of demo-checker exist and were made by this version."""
    files = (QUESTIONS_FILE, *(f"start_model/{file.name}" for file in CHECKER_WEIGHTS.iterdir()))
    return _is_complete(CHECKER_FOLDER, files, checker_stamp())


def _is_complete(folder: Path, files: Iterable[str], stamp: dict[str, str]) -> bool:
    try:
        written = json.loads((folder / STAMP_FILE).read_text(encoding="utf-8"))
        return written == stamp and all((folder / file).stat().st_size for file in files)
    except (OSError, ValueError):
        return False


def demo_stamp() -> dict[str, str]:
    """Return a hash of the generator's code, the start model, and the settings of pairs and reward model."""
    settings = to_dict(parse_reward_cli(["--recipe", "demo", "--rm-overwrite"]))
    code = [HERE / name for name in ("families.py", "tasks.py", "pairs.py")]
    return _stamp((settings, QUESTIONS, SAMPLES_PER_QUESTION, SEED), [*code, WEIGHTS / WEIGHTS_FILE])


def checker_stamp() -> dict[str, str]:
    """Return a hash of the generator's code, its settings and the start model."""
    return _stamp((PER_CELL, SEED), [HERE / "checker_questions.py", CHECKER_WEIGHTS / WEIGHTS_FILE])


def _stamp(settings: tuple, files: Iterable[Path]) -> dict[str, str]:
    digest = hashlib.sha256(repr(settings).encode())
    for file in files:
        digest.update(file.read_bytes())
    return {"made_from": digest.hexdigest()}
