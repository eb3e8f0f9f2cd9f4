"""Writes the missing parts of demo-checker (start model and questions) and of smollm2-sums (questions)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import partial

from rlhf.demo import checker_questions, ready, sums_questions
from rlhf.utils.console import Screen
from rlhf.utils.files import atomic_write, write_json, write_text
from rlhf.utils.system import waiting_lock

Rows = list[dict[str, str]]


def prepare_checker(screen: Screen, recipe: str = "demo-checker") -> None:
    """Write the folder of parts unless it is complete. It is written again if the start model or the questions
    change."""
    parts = ready.parts_of_demo(recipe)
    if parts.are_complete():
        return screen.say(f"{recipe}: the parts are in {parts.folder}")
    parts.folder.mkdir(exist_ok=True)
    with waiting_lock(parts.folder / ".lock"):  # runs may start at the same time
        if not parts.are_complete():
            _write(parts, screen)


def _write(parts: ready.CheckerParts, screen: Screen) -> None:
    """Write all parts, each file in one step, because a run may be reading the old one. The stamp comes last."""
    (parts.folder / ready.STAMP_FILE).unlink(missing_ok=True)
    for file in parts.start_model_files:
        atomic_write(parts.folder / "start_model" / file.name, partial(shutil.copyfile, file))
    if parts.recipe == "demo-checker":
        files = {ready.QUESTIONS_FILE: rows_of(checker_questions.questions(ready.PER_CELL, ready.SEED))}
    else:
        files = sums_rows()
    for name, rows in files.items():
        write_text(parts.folder / name, "".join(json.dumps(row) + "\n" for row in rows))
    write_json(parts.folder / ready.STAMP_FILE, parts.stamp())
    screen.say(f"{parts.recipe}: wrote the parts to {parts.folder}")


def rows_of(questions: Sequence[checker_questions.Question | sums_questions.Question]) -> Rows:
    """Return the rows of a file of questions: question, answer and topic (family and level, or kind and size)."""
    return [{"question": one.text, "answer": str(one.answer), "topic": one.topic} for one in questions]


def sums_rows() -> dict[str, Rows]:
    """Return the rows of the files of smollm2-sums."""
    return {
        ready.SUMS_FILES[part]: rows_of(sums_questions.questions(part, per_topic, ready.SEED))
        for part, per_topic in ready.SUMS_PER_TOPIC.items()
    }
