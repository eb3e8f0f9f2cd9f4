"""Splits data into parts for the reward model, RL and evaluation. The part depends only on the question's text."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence

from rlhf.data.examples import COLUMNS
from rlhf.data.row import Example
from rlhf.settings.types import Split


def part_of(example: Example, split: Split) -> str:
    """Return "reward", "rl" or "evaluation", from a hash of the question. A question is always in the same part.

    Preference pairs with the same first user turn are in the same part: in data of several turns, one conversation can
    give several pairs.
    """
    text = example.question if example.chosen is None else example.first_turn
    bucket = int(_text_hash(text)[:8], 16) % 100
    return "reward" if bucket < split.reward else "rl" if bucket < split.reward + split.rl else "evaluation"


def split_examples(examples: Sequence[Example], split: Split) -> dict[str, list[Example]]:
    """Return the three parts by name. They share no question."""
    parts: dict[str, list[Example]] = {"reward": [], "rl": [], "evaluation": []}
    for example in examples:
        parts[part_of(example, split)].append(example)
    return parts


def shared_start(examples: Sequence[Example]) -> str:
    """Return the end of an error about an empty part: that many pairs begin with the same user message, if they do."""
    turns = Counter(e.first_turn for e in examples if e.chosen is not None)
    most = max(turns.values(), default=0)
    if most <= len(examples) / 2:
        return ""
    return (
        f". {most} of {len(examples)} pairs begin with the same user message, so they are in one part. Use data with "
        "other first messages, or a separate file for each command"
    )


def question_hash(example: Example) -> str:
    """Return the first twelve hexadecimal digits of the SHA-256 of the question."""
    return _text_hash(example.question)


def _text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def pairs_hash(pairs: Iterable[Example]) -> str:
    """Return the SHA-256 of the questions and completions of preference pairs."""
    texts = [[pair.messages, str(pair.chosen), str(pair.rejected)] for pair in pairs]
    return hashlib.sha256(json.dumps(texts, default=str).encode()).hexdigest()


def distinct_questions(examples: Iterable[Example], by_topic: bool = False) -> list[Example]:
    """Return the first example of every distinct prompt, in the order of the prompts' last rows. Prompts differ if any
    message differs or, with `by_topic`, if the topic differs."""
    # another order would give each prompt other random numbers, and runs other results than the published ones
    return list({_prompt_key(e, by_topic): e for e in reversed(list(examples))}.values())[::-1]


def lost_rows(examples: Sequence[Example], by_topic: bool) -> list[tuple[Example, Example, list[str]]]:
    """Return the rows without a pair that `distinct_questions` removes although they differ from the row that it
    keeps: the kept row, the removed row, and the columns in which they differ."""
    first: dict[str, Example] = {}
    lost = []
    for example in examples:
        kept = first.setdefault(_prompt_key(example, by_topic), example)
        if kept is not example and example.chosen is None:
            names = [name for name in example.columns if name not in COLUMNS]
            differ = [name for name in names if repr(example.columns[name]) != repr(kept.columns.get(name))]
            lost += [(kept, example, differ)] if differ else []
    return lost


def _prompt_key(example: Example, by_topic: bool) -> str:
    return json.dumps((example.messages, example.topic if by_topic else None))
