"""Writes the missing parts of demo-checker: the start model and the questions."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from filelock import FileLock

from rlhf.demo import checker_questions
from rlhf.demo.checker_start_model import WEIGHTS
from rlhf.models.save import WEIGHTS_FILE
from rlhf.utils.console import Screen
from rlhf.utils.files import write_json, write_text

FOLDER = Path("demo_checker_parts")
QUESTIONS_FILE = "questions.jsonl"
PER_CELL = 190  # questions of each family and level
SEED = 42  # of the questions, independent of the run's seed


def prepare_checker(screen: Screen) -> None:
    """Write `demo_checker_parts/` unless it exists. It is written again if the start model or the questions change."""
    FOLDER.mkdir(exist_ok=True)
    with FileLock(FOLDER / ".lock"):  # runs may start at the same time
        stamp, stamp_file = {"made_from": _fingerprint()}, FOLDER / "stamp.json"
        if _is_complete(stamp_file, stamp):
            return screen.say(f"demo-checker: start model and questions are in {FOLDER}")
        stamp_file.unlink(missing_ok=True)
        shutil.copytree(WEIGHTS, FOLDER / "start_model", dirs_exist_ok=True)
        rows = question_rows()
        text = "".join(json.dumps(row) + "\n" for row in rows)
        write_text(FOLDER / QUESTIONS_FILE, text)
        write_json(stamp_file, stamp)
        screen.say(f"demo-checker: wrote the start model and {len(rows):,} questions to {FOLDER}")


def question_rows() -> list[dict[str, str]]:
    """Return the rows of the questions file: question, answer and topic (family and level)."""
    return [
        {"question": one.text, "answer": one.answer, "topic": one.topic}
        for one in checker_questions.questions(PER_CELL, SEED)
    ]


def _is_complete(stamp_file: Path, stamp: dict) -> bool:
    files = (FOLDER / QUESTIONS_FILE, FOLDER / "start_model" / WEIGHTS_FILE)
    try:
        return json.loads(stamp_file.read_text(encoding="utf-8")) == stamp and all(file.is_file() for file in files)
    except (OSError, ValueError):
        return False


def _fingerprint() -> str:
    """Return a hash of the generator's code, its settings and the start model."""
    digest = hashlib.sha256(repr((PER_CELL, SEED)).encode())
    for file in (checker_questions.__file__, WEIGHTS / WEIGHTS_FILE):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()
