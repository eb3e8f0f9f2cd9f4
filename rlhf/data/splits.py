"""Which part of the data a question belongs to. The part depends on the question's text alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

from rlhf.data.examples import Example
from rlhf.settings.types import Split


def part_of(example: Example, split: Split) -> str:
    """ "reward", "rl" or "evaluation": from a hash of the question, so that a question is in one part only, always."""
    bucket = int(question_hash(example)[:8], 16) % 100
    return "reward" if bucket < split.reward else "rl" if bucket < split.reward + split.rl else "evaluation"


def split_examples(examples: Sequence[Example], split: Split) -> dict[str, list[Example]]:
    """The three parts by name. The part follows from the question alone, so none stands in two of them."""
    parts: dict[str, list[Example]] = {"reward": [], "rl": [], "evaluation": []}
    for example in examples:
        parts[part_of(example, split)].append(example)
    return parts


def question_hash(example: Example) -> str:
    """Twelve hexadecimal digits that tell questions apart."""
    return hashlib.sha256(example.question.encode()).hexdigest()[:12]


def distinct_questions(examples: Iterable[Example], by_topic: bool = False) -> list[Example]:
    """The first example of every distinct prompt (system text counts, and if asked the topic), in order."""

    def key(example: Example) -> str:
        return json.dumps((example.messages, example.topic if by_topic else None))

    return list({key(e): e for e in reversed(list(examples))}.values())[::-1]
