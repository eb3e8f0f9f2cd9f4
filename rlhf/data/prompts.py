"""Training and evaluation prompts of a run, as token ids."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.data.chat_template import Messages, date_of, encode_prompt, encode_text
from rlhf.data.examples import GivenPrompt, examples_of, load_examples, worked_examples
from rlhf.data.lengths import warn_about_length
from rlhf.data.notices import warn_about_lost_rows, warn_about_marks
from rlhf.data.readers import read_text
from rlhf.data.row import Example
from rlhf.data.source import DataSource, read_once
from rlhf.data.splits import distinct_questions, lost_rows, shared_start, split_examples
from rlhf.settings.training import DataSettings
from rlhf.settings.types import Split
from rlhf.utils.errors import Say, UserError, print_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKEN_IDS = "prompt_token_ids"  # a column, with vLLM's name
FEW_PROMPTS = 20  # with fewer evaluation prompts than this, means and intervals are rough


@dataclass(frozen=True)
class Prompt:
    """A prompt's token ids and the row that it came from."""

    ids: tuple[int, ...]
    example: Example
    # tokens that can follow, if they are fewer than those of a completion
    room: int | None = field(default=None, compare=False)

    def length(self, most: int) -> int:
        """Return the largest number of tokens of the text with a completion of at most `most` tokens."""
        return len(self.ids) + (most if self.room is None else min(most, self.room))


def ids_alone(ids: Sequence[int]) -> Prompt:
    """Return a prompt that belongs to no row of the data, for code that reads only the ids."""
    return Prompt(tuple(ids), Example(({"role": "user", "content": ""},)))


def or_longest(prompts: Sequence[Prompt], data: DataSettings) -> Sequence[Prompt]:
    """Return the training prompts of a run; without any, as a loop by hand may be, one of the largest length, for
    which the run then has room."""
    return prompts or [ids_alone([0] * data.prompt_length)]


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], longest: int, shots: Messages = ()
) -> list[Prompt]:
    """Return the prompts of at most `longest` tokens, in order. Prompts are never truncated. The worked examples
    `shots` precede each one and count."""
    # detail 3: dropped, not truncated (this project). A truncated prompt would be another question.
    return [p for p in encode_all(tokenizer, examples, shots) if len(p.ids) <= longest]


def encode_all(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], shots: Messages = ()) -> list[Prompt]:
    """Return the prompts of all lengths, each after the worked examples `shots`. Raises UserError as `ids_in`."""
    return [Prompt(ids_in(e, tokenizer) or tuple(encode_prompt(tokenizer, e.messages, shots)), e) for e in examples]


def ids_in(example: Example, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids in a row's column TOKEN_IDS, which are used as they are; none without it. Raises UserError for
    what is no id of the tokenizer."""
    given = example.columns.get(TOKEN_IDS) or ()
    ids = given if isinstance(given, (list, tuple)) else [str(given)]
    size = len(tokenizer)
    odd = next((i for i in ids if not (isinstance(i, int) and 0 <= i < size)), None)
    if odd is not None:
        raise UserError(
            f"{odd!r} in {TOKEN_IDS} is no id of the tokenizer", example.where, f"Give ids from 0 to {size - 1}"
        )
    return tuple(ids)


def paragraphs_of(tokenizer: PreTrainedTokenizerBase, file: str) -> list[list[int]]:
    """Return the token ids of the paragraphs of a text file, without those that have a single token.

    Raises UserError if the file does not exist, or has no paragraph with at least 2 tokens.
    """
    if not Path(file).is_file():
        raise UserError("file not found", f"--eval-text {file}", "Give the path of an existing text file")
    paragraphs = [p.strip() for p in read_text(Path(file)).split("\n\n") if p.strip()]
    rows = [ids for p in paragraphs if len(ids := encode_text(tokenizer, p)) > 1]
    if not rows:
        raise UserError("no paragraph with at least 2 tokens", f"--eval-text {file}", "Give a longer text")
    return rows


@dataclass(frozen=True)
class PromptSets:
    """The prompts that a run trains and evaluates on, and counts of rows and skipped prompts."""

    train: list[Prompt]
    evaluation: list[Prompt]
    too_long: int  # skipped prompts
    rows: int = 0
    split: Split | None = None  # None: the prompts were given in Python
    parts: dict[str, int] = field(default_factory=dict)  # rows per part
    repeated: int = 0  # rows whose prompt another row of the same part has


@dataclass(frozen=True)
class Selection:
    """The rows of a run's data, split into parts."""

    examples: list[Example]  # all rows of --prompts
    split: Split
    parts: dict[str, list[Example]]
    distinct: int  # different training prompts, at most --max-prompts


def select_examples(data: DataSettings, say: Say = print_line, evaluation_alone: bool = False) -> Selection:
    """Read and split the data of the settings, as `read_once`. Needs no tokenizer. Raises UserError for rows that are
    not valid.

    With --eval-dataset, its rows are the evaluation part, and no row of --prompts is held out. If `evaluation_alone`,
    --prompts is then not read.
    """
    sources = [DataSource.of(data)]
    if data.eval_dataset is not None:
        sources = [DataSource.of_evaluation(data)] + ([] if evaluation_alone else sources)
    return read_once((data, evaluation_alone, say), sources, lambda: _selected(data, say, evaluation_alone))


def _selected(data: DataSettings, say: Say, evaluation_alone: bool) -> Selection:
    by_topic = data.steps_per_topic is not None
    separate = data.eval_dataset is not None
    held_out = load_examples(DataSource.of_evaluation(data), say=say) if separate else []
    unread = separate and evaluation_alone
    examples = [] if unread else load_examples(DataSource.of(data), say=say, topics=by_topic)
    has_pairs = any(e.chosen is not None for e in examples)
    split = data.split or (Split(45, 45, 10) if has_pairs else Split(0, 90, 10))
    split = Split(split.reward, split.rl + split.evaluation, 0) if separate else split
    parts = split_examples(examples, split)
    parts["evaluation"] += held_out
    for name, use in (("rl", "train"), ("evaluation", "evaluate")):
        if not parts[name] and not (name == "rl" and evaluation_alone):
            where = f"{data.prompts}, {len(examples)} rows, split {split}"
            raise UserError(
                f"no prompt left to {use} on",
                f"{where}, this part is empty",
                f"Add rows, or change --split{shared_start(examples)}",
            )
    return Selection(examples, split, parts, len(distinct_questions(parts["rl"], by_topic)[: data.max_prompts]))


def load_prompts(
    data: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    say: Say = print_line,
    evaluation_alone: bool = False,
) -> PromptSets:
    """Load, split and encode the prompts of the file or hub dataset in the settings.

    Prints a warning if a topic has no training prompt. Raises UserError if no training prompt is left (unless
    `evaluation_alone`) or no evaluation prompt.
    """
    by_topic = data.steps_per_topic is not None
    selection = select_examples(data, say, evaluation_alone)
    examples = selection.examples
    split = selection.split
    parts = selection.parts
    sets = render_sets(tokenizer, parts["rl"], parts["evaluation"], data, f"--prompts {data.prompts}", say)
    where = f"{data.prompts}, {len(examples)} rows, split {split}"
    if not sets.train and not evaluation_alone:
        raise _no_prompts("train", where, parts["rl"], tokenizer, data)
    if not sets.evaluation:
        where = where if data.eval_dataset is None else f"--eval-dataset {data.eval_dataset}"
        raise _no_prompts("evaluate", where, parts["evaluation"], tokenizer, data)
    train = sets.train[: data.max_prompts]
    if by_topic and not evaluation_alone:
        _warn_about_lost_topics(examples, train, data.prompts, say)
    return dataclasses.replace(
        sets,
        train=train,
        evaluation=sets.evaluation[: data.eval_prompts],
        rows=len(examples),
        split=split,
        parts={name: len(part) for name, part in parts.items()},
    )


def _no_prompts(
    name: str, where: str, part: Sequence[Example], tokenizer: PreTrainedTokenizerBase, data: DataSettings
) -> UserError:
    """Return the error for a part of the data without prompts to train or evaluate on."""
    shortest = min(len(p.ids) for p in encode_all(tokenizer, part, worked_examples(data.few_shot)))
    return UserError(
        f"no prompt left to {name} on",
        f"{where}, {len(part)} rows in this part, shortest prompt {shortest} tokens",
        "Add rows, change --split or raise --prompt-length",
    )


def load_every_row(data: DataSettings, tokenizer: PreTrainedTokenizerBase, say: Say) -> PromptSets:
    """Load and encode every row of the settings' data as an evaluation prompt: there is no split. Rows with the same
    prompt are one prompt, because statistics are over independent prompts. Raises UserError if no row is short
    enough."""
    examples = load_examples(DataSource.of(data), say=say)
    sets = render_sets(tokenizer, [], examples, data, f"--prompts {data.prompts}", say)
    if not sets.evaluation:
        shortest = min(len(p.ids) for p in encode_all(tokenizer, examples, worked_examples(data.few_shot)))
        where = f"{data.prompts}, {len(examples)} rows, shortest prompt {shortest} tokens"
        raise UserError("no prompt left to evaluate on", where, "Raise --prompt-length")
    return dataclasses.replace(sets, rows=len(examples))


def _warn_about_lost_topics(examples: Sequence[Example], train: Sequence[Prompt], source: str, say: Say) -> None:
    left = {p.example.topic for p in train}
    gone = [topic for topic in dict.fromkeys(e.topic for e in examples) if topic not in left]
    if gone:
        say(
            f"warning: no prompt left to train on for {len(gone)} topics ({', '.join(gone)}): {source}. Add rows for "
            "them, change --split, or raise --max-prompts or --prompt-length"
        )


def given_prompts(
    data: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[GivenPrompt],
    evaluation: Sequence[GivenPrompt] | None,
    say: Say = print_line,
    repeats: bool = False,
) -> PromptSets:
    """Encode prompts given in Python; with `repeats`, also those that occur several times.

    If `evaluation` is None, the evaluation prompts are those of `eval_dataset`. Without that, a tenth of `prompts` is
    held out, selected by the hash of the question. With fewer than FEW_PROMPTS prompts none is held out, and the
    training prompts are also the evaluation prompts. Either list may be empty. Raises UserError if a prompt is invalid
    or none of a list is short enough.
    """
    by_topic = data.steps_per_topic is not None
    train = examples_of(prompts, by_topic, data.columns, data.skip_bad_rows, say)
    if evaluation is None and data.eval_dataset is not None:
        held_out = load_examples(DataSource.of_evaluation(data), say=say)
    elif evaluation is None:
        parts = split_examples(train, Split(0, 90, 10))
        enough = len(train) >= FEW_PROMPTS and parts["rl"] and parts["evaluation"]
        train, held_out = (parts["rl"], parts["evaluation"]) if enough else (train, train)
    else:
        held_out = examples_of(evaluation, False, data.columns, data.skip_bad_rows, say)
    sets = render_sets(tokenizer, train, held_out, data, "prompts", say, repeats)
    if (train and not sets.train) or (held_out and not sets.evaluation):
        raise UserError(f"no prompt has at most {data.prompt_length} tokens", "prompts", "Raise prompt_length")
    return dataclasses.replace(sets, evaluation=sets.evaluation[: data.eval_prompts])


def render_sets(
    tokenizer: PreTrainedTokenizerBase,
    train: Sequence[Example],
    evaluation: Sequence[Example],
    data: DataSettings,
    source: str,
    say: Say,
    repeats: bool = False,
) -> PromptSets:
    """Return the distinct prompts of two lists (with `repeats`, all of them) as ids, those of at most
    `data.prompt_length` tokens. Prompts of different topics are distinct with --steps-per-topic. Prints a warning if
    many of them, from `source`, are too long, and if rows with the same prompt differ in other columns."""
    by_topic = data.steps_per_topic is not None
    parts = [list(train), list(evaluation)]
    if not repeats:
        for examples in [train] if train is evaluation else [train, evaluation]:
            warn_about_lost_rows(lost_rows(examples, by_topic), say)
        parts = [distinct_questions(examples, by_topic) for examples in parts]
    (kept, held_out), lengths = _encode(tokenizer, parts, data, source, say)
    return PromptSets(
        kept,
        held_out,
        too_long=len(lengths) - len(kept) - len(held_out),
        repeated=len(train) + len(evaluation) - len(lengths),
    )


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    parts: Sequence[Sequence[Example]],
    data: DataSettings,
    source: str,
    say: Say,
) -> tuple[list[list[Prompt]], list[int]]:
    """Return the prompts of each part, those of at most `data.prompt_length` tokens, and the lengths of all. Prints
    warnings about marks of a chat template, also in the worked examples, and if many prompts are too long."""
    shots = worked_examples(data.few_shot, say)
    longest = data.prompt_length
    every = {id(e): e for part in parts for e in part}  # the same rows may be used for training and evaluation
    given = [Example(tuple(shots), where=f"--few-shot {data.few_shot}")] if shots else []
    warn_about_marks(tokenizer, [*every.values(), *given], say)
    prompts = [encode_all(tokenizer, part, shots) for part in parts]
    lengths = [len(prompt.ids) for part in prompts for prompt in part]
    warn_about_length(lengths, longest, "prompts", source, "--prompt-length", say)
    return [[p for p in part if len(p.ids) <= longest] for part in prompts], lengths


def fingerprint(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """Return the SHA-256 of the prompts' ids in order. Equal values mean the same data in the same order.

    If the chat template of `tokenizer` writes the date, that of the template and the messages: runs of two days have
    the same data.
    """
    rows = [p.ids for p in prompts]
    if tokenizer is not None and date_of(tokenizer):
        rows = [tokenizer.chat_template, *(p.example.messages for p in prompts)]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def topics_fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return the SHA-256 of the prompts' topics in order."""
    return hashlib.sha256(json.dumps([p.example.topic for p in prompts]).encode()).hexdigest()
