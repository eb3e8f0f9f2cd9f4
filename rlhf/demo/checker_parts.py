"""Writes the missing parts of demo-checker: the start model and the questions."""

from __future__ import annotations

import json
import shutil
from functools import partial

from filelock import FileLock

from rlhf.demo import checker_questions, ready
from rlhf.utils.console import Screen
from rlhf.utils.files import atomic_write, write_json, write_text


def prepare_checker(screen: Screen) -> None:
    """Write `demo_checker_parts/` unless it is complete. It is written again if the start model or the questions
    change."""
    if ready.checker_is_complete():
        return screen.say(f"demo-checker: start model and questions are in {ready.CHECKER_FOLDER}")
    ready.CHECKER_FOLDER.mkdir(exist_ok=True)
    with FileLock(ready.CHECKER_FOLDER / ".lock"):  # runs may start at the same time
        if not ready.checker_is_complete():
            _write(ready.checker_stamp(), screen)


def _write(stamp: dict[str, str], screen: Screen) -> None:
    """Write all parts, each file in one step, because a run may be reading the old one. The stamp comes last."""
    (ready.CHECKER_FOLDER / ready.STAMP_FILE).unlink(missing_ok=True)
    for file in ready.CHECKER_WEIGHTS.iterdir():
        atomic_write(ready.CHECKER_FOLDER / "start_model" / file.name, partial(shutil.copyfile, file))
    rows = question_rows()
    write_text(ready.CHECKER_FOLDER / ready.QUESTIONS_FILE, "".join(json.dumps(row) + "\n" for row in rows))
    write_json(ready.CHECKER_FOLDER / ready.STAMP_FILE, stamp)
    screen.say(f"demo-checker: wrote the start model and {len(rows):,} questions to {ready.CHECKER_FOLDER}")


def question_rows() -> list[dict[str, str]]:
    """Return the rows of the questions file: question, answer and topic (family and level)."""
    return [
        {"question": one.text, "answer": one.answer, "topic": one.topic}
        for one in checker_questions.questions(ready.PER_CELL, ready.SEED)
    ]
