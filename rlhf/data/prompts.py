"""Prompts as token ids: the training set and the evaluation set of a run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from rlhf.data.chat_template import encode_prompt
from rlhf.data.examples import Example, load_examples
from rlhf.data.splits import distinct_questions, split_examples
from rlhf.settings.types import Split
from rlhf.utils.errors import UserError

FEW_PROMPTS = 20  # with fewer evaluation prompts than this, means and intervals are rough


@dataclass(frozen=True)
class Prompt:
    """A prompt that fits: its ids and the row that it came from."""

    ids: tuple[int, ...]
    example: Example


def ids_alone(ids: Sequence[int]) -> Prompt:
    """A prompt for code that reads ids alone, such as the first token of a text. It belongs to no row of the data."""
    return Prompt(tuple(ids), Example(({"role": "user", "content": ""},)))


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], longest: int
) -> tuple[list[Prompt], int]:
    """The prompts of at most `longest` tokens, in order, and how many were left out. None is ever cut."""
    prompts = [Prompt(tuple(encode_prompt(tokenizer, e.messages)), e) for e in examples]
    fitting = [p for p in prompts if len(p.ids) <= longest]
    return fitting, len(prompts) - len(fitting)


@dataclass(frozen=True)
class PromptSets:
    """What a run trains and evaluates on, and the count of everything that was left out."""

    train: list[Prompt]
    evaluation: list[Prompt]
    too_long: int
    rows: int = 0
    split: Split | None = None  # None: the two lists were given
    parts: dict[str, int] = field(default_factory=dict)  # rows per part


def load_prompts(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    split: Split | None,
    longest: int,
    most: int,
    most_evaluation: int,
    say: Callable[[str], None] = print,
    topics: bool = False,
    evaluation_alone: bool = False,
) -> PromptSets:
    """Read, split and render; with `topics` each row has one. Raises UserError if no prompt remains to train on (not
    with `evaluation_alone`) or to evaluate on. Prints a warning for a topic of which none remains to train on."""
    examples = load_examples(source, say=say, topics=topics)
    has_pairs = any(e.chosen is not None for e in examples)
    split = split or (Split(45, 45, 10) if has_pairs else Split(0, 90, 10))
    parts = split_examples(examples, split)
    sets = render_sets(tokenizer, parts["rl"], parts["evaluation"], longest, topics)
    for name, kept, part in (("train", sets.train, parts["rl"]), ("evaluate", sets.evaluation, parts["evaluation"])):
        if not kept and not (evaluation_alone and name == "train"):
            shortest = min((len(encode_prompt(tokenizer, e.messages)) for e in part), default=0)
            raise UserError(
                f"no prompt left to {name} on: {source}, {len(examples)} rows, split {split}, {len(part)} in this "
                f"part, the shortest of {shortest} tokens. Give more rows, another --split or a larger --prompt-length"
            )
    train = sets.train[:most]
    left = {p.example.topic for p in train}
    gone = [topic for topic in dict.fromkeys(e.topic for e in examples) if topic not in left] if topics else []
    if gone:
        say(
            f"warning: no prompt left to train on of {len(gone)} topics ({', '.join(gone)}): {source}. Give more rows "
            "of them, another --split, or a larger --max-prompts or --prompt-length"
        )
    return dataclasses.replace(
        sets,
        train=train,
        evaluation=sets.evaluation[:most_evaluation],
        rows=len(examples),
        split=split,
        parts={name: len(part) for name, part in parts.items()},
    )


def render_sets(
    tokenizer: PreTrainedTokenizerBase,
    train: Sequence[Example],
    evaluation: Sequence[Example],
    longest: int,
    by_topic: bool = False,
) -> PromptSets:
    """The distinct prompts of two lists, as ids; `by_topic`, a prompt of two topics is two."""
    kept, too_long = encode_prompts(tokenizer, distinct_questions(train, by_topic), longest)
    held_out, too_long_evaluation = encode_prompts(tokenizer, distinct_questions(evaluation, by_topic), longest)
    return PromptSets(kept, held_out, too_long=too_long + too_long_evaluation)


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of the prompts' ids: the same data in the same order, or not."""
    return hashlib.sha256(json.dumps([p.ids for p in prompts]).encode()).hexdigest()


def topics_fingerprint(prompts: Sequence[Prompt]) -> str:
    """The same of their topics."""
    return hashlib.sha256(json.dumps([p.example.topic for p in prompts]).encode()).hexdigest()
