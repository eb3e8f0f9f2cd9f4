"""Read and check the rows of a data file, a folder, a hub dataset or a Python list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf.data.formats import EXPECTED_COLUMNS, PROMPT_COLUMNS, completion_of, parts_of
from rlhf.data.messages import check_text, row_value
from rlhf.data.notices import print_notes, report_bad_rows, warn_about_chat_texts
from rlhf.data.readers import read_rows
from rlhf.data.row import Example
from rlhf.data.source import DataSource, read_once
from rlhf.data.tables import plain
from rlhf.settings.reward_model import RewardDataSettings
from rlhf.settings.types import Renaming
from rlhf.utils.errors import Problem, Say, UserError, did_you_mean, print_line, raise_if

COLUMNS = (
    *("system", "question", "prompt", "messages", "conversations", "chosen", "rejected"),
    *("rejected_ended", "topic", "flaw"),
)


def load_examples(
    source: DataSource | str, pairs: bool = False, say: Say = print_line, topics: bool = False
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
    rows = _renamed(read_rows(source), source)
    examples, problems = _checked(rows, pairs, topics)
    if problems:
        report_bad_rows(problems, len(rows), source, say)
    if not examples:
        raise UserError("no rows", source.name, f"Each row must be an object with {EXPECTED_COLUMNS}")
    print_notes(examples, source, say)
    warn_about_chat_texts(examples, source, say)
    return examples


def load_pairs(data: RewardDataSettings, say: Say = print_line) -> list[Example]:
    """Return the preference pairs of the settings, read as `read_once`. Raises UserError as `load_examples`."""
    source = DataSource.of(data)
    return read_once((data, say), [source], lambda: load_examples(source, pairs=True, say=say))


def worked_examples(file: str | None, say: Say = lambda _: None) -> list[dict[str, str]]:
    """Return the prompts and answers (`answer_of`) of a file as messages; none without a file. Raises UserError for a
    row without an answer. `say` prints notes about the rows."""
    shots = []
    missing = []
    for example in [] if file is None else load_examples(DataSource(file, flag="--few-shot"), say=say):
        answer = answer_of(example)
        missing += [] if answer else [example.where]
        shots += [*example.messages, {"role": "assistant", "content": answer}]
    if missing:
        raise UserError(
            "no answer", f"--few-shot {file}, {missing[0]}", "Give each row a column chosen, completion or answer"
        )
    return shots


def answer_of(example: Example) -> str | None:
    """Return the answer in a row: its chosen completion, the last message of its chat, or the column completion or
    answer; None if it has none. Raises UserError if a completion is not text or one message of the assistant."""
    values = (example.chosen, example.answer, example.columns.get("completion"), example.columns.get("answer"))
    value = next((value for value in values if value is not None), None)
    if isinstance(value, (list, dict)):
        return completion_of(value, example.messages, example.where)
    return None if value is None else str(value)


def _checked(rows: Sequence[tuple[str, Any]], pairs: bool, topics: bool) -> tuple[list[Example], list[Problem]]:
    """Return the examples of the usable rows, and one error line for each other row."""
    every = dict.fromkeys(name for _, row in rows if isinstance(row, dict) for name in row)
    examples = []
    problems = []
    for where, row in rows:
        try:
            examples.append(_example(row, where, pairs, topics, every))
        except UserError as error:
            problems += error.problems
    return examples, problems


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
            problems.append(Problem(f"no column {c.old!r}", f"--columns {c}, {source.flag} {source.name}", near))
        elif c.new in names and c.new not in olds:
            problems.append(
                Problem(
                    f"the data already has a column {c.new!r}",
                    f"--columns {c}, {source.flag} {source.name}",
                    f"Rename that one, too: --columns {c} OTHER={c.new}",
                )
            )
        elif (first := _read_before(c.new, names, source)) is not None:
            problems.append(
                Problem(
                    f"the prompt is the column {first!r}, not {c.new!r}",
                    f"--columns {c}, {source.flag} {source.name}",
                    f"Give --columns prompt={c.old}{' OTHER=prompt' if first == 'prompt' else ''}",
                )
            )
    raise_if(problems)
    return [(where, source.rename(row) if isinstance(row, dict) else row) for where, row in rows]


def _read_before(name: str, names: Sequence[str], source: DataSource) -> str | None:
    """Return the column that contains the prompt although another one was given the `name` of a prompt column."""
    if name not in PROMPT_COLUMNS:
        return None
    before = PROMPT_COLUMNS[: PROMPT_COLUMNS.index(name)]
    present = source.rename(dict.fromkeys(names))
    return next((column for column in before if column in present), None)


def _example(
    row: Any,
    where: str,
    pairs: bool,
    topics: bool,
    others: Iterable[str],
) -> Example:
    """Return one checked row. Raises UserError if the row is invalid; `where` is its position.

    `others` are all column names of the data; those that this row does not have become None in `Example.columns`.
    """
    if not isinstance(row, dict):
        raise UserError("not a JSON object", where, f"Each row must be an object with {EXPECTED_COLUMNS}")
    odd = next((name for name in row if not isinstance(name, str)), None)
    if odd is not None:
        raise UserError(f"the column name {odd!r:.40} is not text", where, "Rename that column")
    parts = parts_of(row, where)
    if pairs and parts.chosen is None:
        raise UserError(
            f'no "chosen" and "rejected" among the columns {sorted(row)}', where, "A reward model is trained on pairs"
        )
    topic = _typed(row, "topic", str, None, where)
    if topics and not (topic or "").strip():
        raise UserError(
            f'no "topic" among the columns {sorted(row)}',
            where,
            "Add a topic to every row, or train without --steps-per-topic",
        )
    example = replace(
        parts,
        rejected_ended=_typed(row, "rejected_ended", bool, True, where),
        topic=topic,
        flaw=_typed(row, "flaw", str, None, where),
        columns={**dict.fromkeys(others), **row},
        where=where,
    )
    if example.chosen is not None and example.chosen == example.rejected and example.rejected_ended:
        raise UserError("chosen equals rejected", where, "Correct or remove that row")
    return example


def _typed(row: dict, key: str, kind: type, default: Any, where: str) -> Any:
    """Return an optional column's value, or the default if the row does not have it. Raises UserError if its type is
    not `kind`."""
    value = row.get(key)
    if value is None:
        return default
    if kind is str and isinstance(value, str) and value.strip():
        return check_text(value, key, where)
    if not isinstance(value, kind):
        expected = {bool: "true or false", str: "text"}[kind]
        raise UserError(f"{key} is {row_value(value)}, not {expected}", where, "Correct or remove that row")
    return value


GivenPrompt = str | Sequence[dict[str, str]] | dict[str, Any]


def examples_of(
    prompts: Sequence[GivenPrompt],
    topics: bool = False,
    columns: Sequence[Renaming] = (),
    skip_bad_rows: float | None = None,
    say: Say = print_line,
) -> list[Example]:
    """Return checked rows for prompts given in Python. Raises UserError that lists every invalid prompt.

    Each prompt is a text, a chat of {"role", "content"}, or a row with a data file's columns. Only a row can have a
    topic. `columns` are new names for the columns of rows. Up to `skip_bad_rows` percent of the prompts may be
    invalid; `say` prints them. Values of numpy and pandas become those that a file with the same rows gives.
    """
    _check_container(prompts)
    source = DataSource("in Python", columns=tuple(columns), skip_bad_rows=skip_bad_rows or 0.0, flag="prompts")
    given = [(f"prompt {i + 1}", plain(prompt)) for i, prompt in enumerate(prompts)]
    if any(isinstance(prompt, dict) for _, prompt in given):  # texts and chats have no columns
        given = _renamed(given, source)
    rows = []
    for where, prompt in given:
        column = "messages" if isinstance(prompt, list) else "prompt"
        rows.append((where, prompt if isinstance(prompt, dict) else {column: prompt}))
    examples, problems = _checked(rows, pairs=False, topics=topics)
    if problems and source.skip_bad_rows:
        report_bad_rows(problems, len(rows), source, say)
    else:
        raise_if(problems)
    warn_about_chat_texts(examples, source, say)
    return examples


def _check_container(prompts: Any) -> None:
    """Raise UserError if `prompts` is not a list of prompts: a text gives letters, a table its columns."""
    is_table = hasattr(prompts, "columns") or hasattr(prompts, "to_pylist")  # of pandas, polars or pyarrow
    is_list = hasattr(prompts, "__len__") and hasattr(prompts, "__getitem__") and not is_table
    if not is_list or isinstance(prompts, (str, bytes, Mapping)):
        raise UserError(
            f"not a list of prompts but a {type(prompts).__name__}",
            "prompts",
            'Give a list of texts, chats or rows, for example DataFrame.to_dict("records") or Table.to_pylist(). To '
            "read a file, use the setting prompts (--prompts FILE)",
        )
