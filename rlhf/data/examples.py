"""Read and check the rows of a data file, a folder, a hub dataset or a Python list."""

from __future__ import annotations

import difflib
import json
import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from rlhf.data.formats import EXPECTED_COLUMNS, parts_of, shown
from rlhf.data.readers import read_rows
from rlhf.data.source import DataSource
from rlhf.settings.types import Renaming
from rlhf.utils.errors import MAX_PRINTED, UserError, did_you_mean, raise_if

REPEATED_SHARE = 0.05  # duplicate rows: above this share a warning is printed
COLUMNS = (
    *("system", "question", "prompt", "messages", "conversations", "chosen", "rejected"),
    *("rejected_ended", "topic", "flaw"),
)


@dataclass(frozen=True)
class Example:
    """One row of data: a prompt and, for preference pairs, its two completions."""

    messages: tuple[dict[str, str], ...]
    chosen: str | None = None
    rejected: str | None = None
    rejected_ended: bool = True  # False: the completion was cut off, so no EOS follows it
    topic: str | None = None
    flaw: str | None = None  # what is wrong with the rejected completion, if the data contains it
    columns: dict[str, Any] = field(default_factory=dict)  # all columns of the row, for reward functions
    conversational: bool = False  # the row's prompt is a list of messages, so reward functions receive messages

    @property
    def question(self) -> str:
        """The text of the user messages, normalised as the key for splits.

        Questions that differ only in case, spacing, invisible characters or Unicode form (NFC or NFD) are equal.
        """
        text = "\n".join(m["content"] for m in self.messages if m["role"] == "user")
        visible = "".join(c for c in unicodedata.normalize("NFC", text).casefold() if unicodedata.category(c) != "Cf")
        return unicodedata.normalize("NFC", " ".join(visible.split()))


def load_examples(
    source: DataSource | str, pairs: bool = False, say: Callable[[str], None] = print, topics: bool = False
) -> list[Example]:
    """Return all rows of a data file, a folder or a hub dataset, in order.

    Raises UserError that lists every invalid row with its position, unless the source allows to skip that many rows.
    Skipped rows and more than 5% of duplicate rows are reported with `say`.

    Args:
        source: where the data is; a text is the path of a file or folder, or the name of a hub dataset.
        pairs: if True, every row needs "chosen" and "rejected".
        say: prints one line.
        topics: if True, every row needs a "topic".
    """
    source = DataSource(source) if isinstance(source, str) else source
    rows = _renamed(read_rows(source, say), source)
    examples, problems = _checked(rows, pairs, topics)
    if problems:
        _report_bad_rows(problems, len(rows), source, say)
    if not examples:
        raise UserError(f"no rows: {source.name}. Each row must be an object with {EXPECTED_COLUMNS}")
    _note_implicit_prompts(examples, source, say)
    repeated = len(examples) - len({json.dumps((e.messages, e.chosen, e.rejected)) for e in examples})
    if repeated > REPEATED_SHARE * len(examples):
        say(f"warning: {repeated} of {len(examples):,} rows are duplicates: {source.name}. Remove them if unintended")
    return examples


def _checked(rows: Sequence[tuple[str, Any]], pairs: bool, topics: bool) -> tuple[list[Example], list[str]]:
    """Return the examples of the usable rows, and one error line for each other row."""
    every = dict.fromkeys(name for _, row in rows if isinstance(row, dict) for name in row)
    columns = every.keys() & set(COLUMNS)
    examples, problems = [], []
    for where, row in rows:
        try:
            examples.append(_example(row, where, pairs, columns, topics, every))
        except UserError as error:
            problems += error.problems
    return examples, problems


def _report_bad_rows(problems: list[str], rows: int, source: DataSource, say: Callable[[str], None]) -> None:
    """Print the rows that are skipped. Raises UserError if they are more than the source allows."""
    percent, first = 100 * len(problems) / rows, problems[0]
    missing = {problem.partition(", columns ")[2] for problem in problems}  # empty: not a problem of the columns
    if len(problems) == rows > 1 and len(missing) == 1 and missing != {""}:
        raise UserError(f"{first}. All {rows:,} rows have this problem")
    if len(problems) == rows:
        raise UserError(problems)
    if percent > source.bad_percent:
        flag = f"--skip-bad-rows {math.ceil(percent)}"
        raise UserError([f"{first}. To skip all bad rows ({len(problems)} of {rows:,}), add {flag}", *problems[1:]])
    say(f"skipped {len(problems)} of {rows:,} rows because they cannot be used: {source.name}")
    for problem in problems[:MAX_PRINTED]:
        say(f"  {problem}")
    if len(problems) > MAX_PRINTED:
        say(f"  and {len(problems) - MAX_PRINTED} more")


def _note_implicit_prompts(examples: Sequence[Example], source: DataSource, say: Callable[[str], None]) -> None:
    """Print a note if the prompts are the common beginnings of texts: the data may have the prompts elsewhere."""
    found = [
        e
        for e in examples
        if e.chosen is not None and not e.conversational and {"question", "prompt"}.isdisjoint(e.columns)
    ]
    if found:
        say(
            f"note: {len(found):,} rows have no prompt column, so the prompt is the common beginning of chosen and "
            f"rejected, such as {found[0].messages[-1]['content'][:60]!r}: {source.flag} {source.name}"
        )


def _renamed(rows: list[tuple[str, Any]], source: DataSource) -> list[tuple[str, Any]]:
    """Return the rows with the new names of --columns. Raises UserError if it renames a column that the data lacks, or
    to a name that another column has."""
    if not source.columns:
        return rows
    names = list(dict.fromkeys(name for _, row in rows if isinstance(row, dict) for name in row))
    olds = {c.old for c in source.columns}
    problems = []
    for c in source.columns:
        if c.old not in names:
            near = did_you_mean(c.old, names, f"The columns are {', '.join(map(repr, names))}").strip()
            problems.append(f"no column {c.old!r}: --columns {c}, {source.flag} {source.name}. {near}")
        elif c.new in names and c.new not in olds:
            problems.append(
                f"the data already has a column {c.new!r}: --columns {c}, {source.flag} {source.name}. Rename that "
                f"one, too: --columns {c} OTHER={c.new}"
            )
    raise_if(problems)
    return [(where, source.rename(row) if isinstance(row, dict) else row) for where, row in rows]


def _example(
    row: Any,
    where: str,
    pairs: bool,
    columns: Set[str] = frozenset(),
    topics: bool = False,
    others: Iterable[str] = (),
) -> Example:
    """Return one checked row. Raises UserError if the row is invalid; `where` is its position.

    `columns` are the names of COLUMNS that occur in the data. `others` are all column names of the data; those that
    this row does not have become None in `Example.columns`.
    """
    if not isinstance(row, dict):
        raise UserError(f"not a JSON object: {where}. Each row must be an object with {EXPECTED_COLUMNS}")
    _check_spelling(row, where, columns)
    parts = parts_of(row, where)
    if pairs and parts.chosen is None:
        raise UserError(
            f'no "chosen" and "rejected": {where}, columns {sorted(row)}. A reward model is trained on pairs'
        )
    topic = _typed(row, "topic", str, None, where)
    if topics and not (topic or "").strip():
        raise UserError(
            f'no "topic": {where}, columns {sorted(row)}. Add a topic to every row, or remove --steps-per-topic'
        )
    example = Example(
        messages=tuple(parts.messages),
        chosen=parts.chosen,
        rejected=parts.rejected,
        rejected_ended=_typed(row, "rejected_ended", bool, True, where),
        topic=topic,
        flaw=_typed(row, "flaw", str, None, where),
        columns={**dict.fromkeys(others), **row},
        conversational=parts.conversational,
    )
    if example.chosen is not None and example.chosen == example.rejected and example.rejected_ended:
        raise UserError(f"chosen equals rejected: {where}. Correct or remove that row")
    return example


def _check_spelling(row: dict, where: str, columns: Set[str]) -> None:
    """Raise UserError for a column whose name looks like a misspelling of a column that other rows have."""
    for name in row.keys() - set(COLUMNS):
        near = difflib.get_close_matches(name, sorted(columns - row.keys()), n=1, cutoff=0.8)
        if near:
            raise UserError(f"unknown column {name!r}: {where}. Did you mean {near[0]!r}, which other rows have?")


def _typed(row: dict, key: str, kind: type, default: Any, where: str) -> Any:
    """Return an optional column's value, or the default if the row does not have it. Raises UserError if its type is
    not `kind`."""
    value = row.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        expected = {bool: "true or false", str: "text"}[kind]
        raise UserError(f"{key} is {shown(value)}, not {expected}: {where}. Correct or remove that row")
    return value


GivenPrompt = str | Sequence[dict[str, str]] | dict[str, Any]


def examples_of(
    prompts: Sequence[GivenPrompt], topics: bool = False, columns: Sequence[Renaming] = ()
) -> list[Example]:
    """Return checked rows for prompts given in Python. Raises UserError that lists every invalid prompt.

    Each prompt is a text, a chat of {"role", "content"}, or a row with a data file's columns. Only a row can have a
    topic. `columns` are new names for the columns of rows.
    """
    rows = []
    for i, prompt in enumerate(prompts):
        is_chat = isinstance(prompt, Sequence) and not isinstance(prompt, str)
        row = prompt if isinstance(prompt, dict) else {"messages": list(prompt)} if is_chat else {"prompt": prompt}
        rows.append((f"prompt {i + 1}", row))
    if any(isinstance(prompt, dict) for prompt in prompts):
        rows = _renamed(rows, DataSource("in Python", columns=tuple(columns), flag="prompts"))
    examples, problems = _checked(rows, pairs=False, topics=topics)
    raise_if(problems)
    return examples
