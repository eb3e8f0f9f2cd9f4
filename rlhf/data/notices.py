"""What is printed about rows: bad rows, duplicates, and columns that may belong to the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.data.chat_template import marks_of
from rlhf.data.formats import PROMPT_COLUMNS, columns_flag
from rlhf.data.messages import chat_in
from rlhf.data.row import Example
from rlhf.data.source import DataSource
from rlhf.utils.errors import MAX_PRINTED, Problem, Say, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPEATED_SHARE = 0.05  # duplicate rows: above this share a warning is printed
# columns that other trainers add to the prompt -> how to use them here
UNUSED = {
    "system_prompt": f"If it is a system message, add {columns_flag('system', 'system_prompt')}",
    "input": "If it belongs to the prompt, write both into one column 'prompt'",
    "history": "If earlier turns belong to the prompt, write all turns into one column 'messages'",
}


def report_bad_rows(problems: list[Problem], rows: int, source: DataSource, say: Say) -> None:
    """Print the rows that are skipped. Raises UserError if they are more than the source allows."""
    count = len(problems)
    if count == rows > 1 and len({(problem.what, problem.fix) for problem in problems}) == 1:
        raise UserError([_with_more(problems[0], f"All {rows:,} rows have this problem")])
    if count == rows:
        raise UserError(problems)
    if 100 * count > source.bad_percent * rows:
        needed = -(-1000 * count // rows) / 10  # percent, rounded up; the flag accepts less than 100
        skip = f"To skip all bad rows ({count} of {rows:,}), add --skip-bad-rows {needed:g}"
        raise UserError([_with_more(problems[0], skip), *problems[1:]] if needed < 100 else problems)
    say(f"note: skipped {count} of {rows:,} rows because they cannot be used: {source.name}")
    for problem in problems[:MAX_PRINTED]:
        say(f"  {problem}")
    if count > MAX_PRINTED:
        say(f"  and {count - MAX_PRINTED} more")


def _with_more(problem: Problem, sentence: str) -> Problem:
    """Return a problem with another sentence after its fix."""
    return replace(problem, fix=f"{problem.fix}{'' if problem.fix.endswith('?') else '.'} {sentence}")


def print_notes(examples: Sequence[Example], source: DataSource, say: Say) -> None:
    """Print notes on prompts that may be incomplete, and a warning if many rows are duplicates."""
    for name, fix in UNUSED.items():
        count = sum(_is_unused(name, e) for e in examples)
        if count:
            say(
                f"note: the column {name!r} is not part of the prompt ({count:,} rows have it): {source.flag} "
                f"{source.name}. {fix}"
            )
    repeated = len(examples) - len({repr(e.columns) for e in examples})
    if repeated > REPEATED_SHARE * len(examples):
        say(f"warning: {repeated} of {len(examples):,} rows are duplicates: {source.name}. Remove them if unintended")


def warn_about_chat_texts(examples: Sequence[Example], source: DataSource, say: Say) -> None:
    """Print a warning for each column whose texts are chats, such as '[{"role": "user", ...'."""
    for name in ("prompt", "question", "chosen", "rejected"):
        found = [e.where for e in examples if chat_in(e.columns.get(name))]
        if found:
            fix = "Give lists of messages"
            if name in PROMPT_COLUMNS and source.flag != "--few-shot":  # no --columns for that file
                fix += f", or read them with {columns_flag('messages', *source.before_renaming([name]))}"
            say(
                f"warning: {len(found):,} of {len(examples):,} rows have a chat as text in the column {name!r}, which "
                f"is used as one message: {found[0]}. {fix}"
            )


def warn_about_marks(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], say: Say) -> None:
    """Print a warning about texts with the marks of a chat template, which become ordinary tokens."""
    if not examples:
        return
    marks = marks_of(tokenizer, examples[0].messages)
    found = []
    for example in examples:
        texts = [*(m["content"] for m in example.messages), example.chosen or "", example.rejected or ""]
        mark = marks.search("\0".join(texts))
        found += [f"{mark[0].strip()!r}, {example.where}"] if mark else []
    if found:
        say(
            f"warning: {len(found):,} of {len(examples):,} rows contain marks of a chat template, which are used as "
            f"ordinary text: {found[0]}. If a chat template has rendered these texts, give their messages instead"
        )


def warn_about_lost_rows(lost: Sequence[tuple[Example, Example, list[str]]], say: Say) -> None:
    """Print a warning about rows that are not used although they differ from the row that is: `lost` has the used
    row, the lost row, and the columns in which they differ."""
    if lost:
        first, other, _ = lost[0]
        names = ", ".join(map(repr, dict.fromkeys(name for _, _, columns in lost for name in columns)))
        say(
            f"warning: {len(lost):,} rows are not used, because an earlier row has the same prompt, with another "
            f"{names}: for example {other.where}, after {first.where}. Write what belongs to one prompt into one row"
        )


def _is_unused(name: str, example: Example) -> bool:
    """True if a row has a text or list in a column of UNUSED, and uses it for nothing."""
    row = example.columns
    if name == "input" and "output" not in row:  # without an output it is a column of another kind of data
        return False
    if name == "system_prompt" and any(m["role"] == "system" for m in example.messages):
        return False
    return isinstance(row.get(name), (str, list)) and len(row[name]) > 0
