"""Writes the missing parts of demo-checker: the start model and the questions."""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path

from filelock import FileLock

from rlhf.checkpoints.model_folder import WEIGHTS_FILE
from rlhf.demo import checker_questions
from rlhf.demo.checker_start_model import WEIGHTS
from rlhf.utils.console import Screen
from rlhf.utils.files import atomic_write, write_json, write_text

FOLDER = Path("demo_checker_parts")
QUESTIONS_FILE = "questions.jsonl"
STAMP_FILE = "stamp.json"
PER_CELL = 190  # questions of each family and level
SEED = 42  # of the questions, independent of the run's seed


def prepare_checker(screen: Screen) -> None:
    """Write `demo_checker_parts/` unless it is complete. It is written again if the start model or the questions
    change."""
    wanted = {"made_from": _fingerprint()}
    if _is_complete(wanted):
        return screen.say(f"demo-checker: start model and questions are in {FOLDER}")
    FOLDER.mkdir(exist_ok=True)
    with FileLock(FOLDER / ".lock"):  # runs may start at the same time
        if not _is_complete(wanted):
            _write(wanted, screen)


def _write(stamp: dict[str, str], screen: Screen) -> None:
    """Write all parts, each file in one step, because a run may be reading the old one. The stamp comes last."""
    (FOLDER / STAMP_FILE).unlink(missing_ok=True)
    for file in WEIGHTS.iterdir():
        atomic_write(FOLDER / "start_model" / file.name, partial(shutil.copyfile, file))
    rows = question_rows()
    write_text(FOLDER / QUESTIONS_FILE, "".join(json.dumps(row) + "\n" for row in rows))
    write_json(FOLDER / STAMP_FILE, stamp)
    screen.say(f"demo-checker: wrote the start model and {len(rows):,} questions to {FOLDER}")


def question_rows() -> list[dict[str, str]]:
    """Return the rows of the questions file: question, answer and topic (family and level)."""
    return [
        {"question": one.text, "answer": one.answer, "topic": one.topic}
        for one in checker_questions.questions(PER_CELL, SEED)
    ]


def _is_complete(stamp: dict[str, str]) -> bool:
    files = (QUESTIONS_FILE, *(f"start_model/{file.name}" for file in WEIGHTS.iterdir()))
    try:
        written = json.loads((FOLDER / STAMP_FILE).read_text(encoding="utf-8"))
        return written == stamp and all((FOLDER / file).stat().st_size for file in files)
    except (OSError, ValueError):
        return False


def _fingerprint() -> str:
    """Return a hash of the generator's code, its settings and the start model."""
    digest = hashlib.sha256(repr((PER_CELL, SEED)).encode())
    for file in (checker_questions.__file__, WEIGHTS / WEIGHTS_FILE):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()
