"""Saves completions: those of every evaluation, and of updates whose reward functions log columns; tables of them."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf.callbacks.base import Callback
from rlhf.data.prompts import Prompt
from rlhf.trainer.evaluation import Evaluation, flat
from rlhf.utils.errors import visible


def sample_table(evaluation: Evaluation, prompts: Sequence[Prompt]) -> tuple[list[str], list[list]]:
    """Return the columns of a table of an evaluation, and its rows: one for each completion. The prompt is its last
    message. `prompts` are the evaluation prompts."""
    columns = {
        "prompt": [[as_utf8(p.example.messages[-1]["content"])] * evaluation.samples for p in prompts],
        "completion": evaluation.texts,
        "score": evaluation.scores,
        **({"gold": evaluation.gold} if evaluation.gold is not None else {}),
        **evaluation.judged,
        "kl": evaluation.kl,
        "length": evaluation.lengths,
        "ended": evaluation.ended,
    }
    return list(columns), [list(row) for row in zip(*map(flat, columns.values()), strict=True)]


LONGEST_CELL = 1_000  # characters of a text in a Markdown table
_SPECIAL = re.compile(r"([\\`*_\[\]#|])")


def as_utf8(text: str) -> str:
    """Return the text with lone surrogates, which a data file can contain, as escape sequences."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def markdown(text: str) -> str:
    """Return text as one line of Markdown that is shown as it is, also in a cell of a table. A long text is cut."""
    shown = visible(as_utf8(text if len(text) <= LONGEST_CELL else text[:LONGEST_CELL] + " ..."))
    return _SPECIAL.sub(r"\\\1", html.escape(shown, quote=False)).replace("\n", "<br>").replace("\t", " ")


def table_text(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table. Numbers have two decimals."""

    def cell(value: Any) -> str:
        return markdown(f"{value:.2f}" if isinstance(value, float) else str(value))

    lines = [columns, ["---"] * len(columns), *([cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Samples(Callback):
    """Writes the completions of every evaluation to files, and of every update in which a function calls log_extra.

    An update that is trained again after a resume replaces its file.
    """

    def __init__(self, folder: Path, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase):
        """`prompts` are the evaluation prompts, `tokenizer` the policy's."""
        self.folder = folder
        self.prompts = prompts
        self.tokenizer = tokenizer

    def on_batch(self, update, batch, scores):
        if not scores.extra:
            return
        texts = batch.completions.texts(self.tokenizer)
        columns = zip(batch.prompts, texts, scores.raw.tolist(), strict=True)
        rows = [
            {
                "prompt": prompt.example.messages,
                "completion": text,
                "score": None if math.isnan(score) else score,
                "extra": {name: values[i] for name, values in scores.extra.items()},
            }
            for i, (prompt, text, score) in enumerate(columns)
        ]
        self._write(f"rollout-{update:06d}.jsonl", rows)

    def on_evaluation(self, evaluation):
        self._write(f"update-{evaluation.update:06d}.jsonl", evaluation.rows(self.prompts))

    def _write(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        """Write a file with one JSON object per line."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / name).open("w", encoding="utf-8", errors="backslashreplace") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
