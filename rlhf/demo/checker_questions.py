"""Questions with one right answer, made by a procedure: six families of four levels. Uses only the standard library.

    shift      Next letter of each: a f k.              b g l
    sort       Sort by alphabet: m a k.                 a k m
    reverse    Reverse: m a k.                          k a m
    remove     Remove k: m k a f.                       m a f
    after      The 2 letters after k: m k a f d.        a f
    alternate  Alternate: m a and f k.                  m f a k

A question of a higher level has more letters.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_lowercase as LETTERS
from zlib import crc32

LEVELS = (1, 2, 3, 4)
SPLITS = ("corpus", "prompts")  # of the start model's corpus, and of the prompts of RL training and evaluation


@dataclass(frozen=True)
class Question:
    """A question with its right answer."""

    family: str
    level: int
    text: str
    answer: str
    given: tuple[str, ...]  # the material that the answer is computed from

    @property
    def topic(self) -> str:
        """The cell of the question: family and level, such as `sort 3`."""
        return f"{self.family} {self.level}"

    @property
    def key(self) -> str:
        """The family and the material without its order: the letters, and the target of `remove` and `after`."""
        return f"{self.family} {' '.join(sorted(self.given))}"


def shift(level: int, rng: random.Random) -> Question:
    """Replace each letter by the next one of the alphabet."""
    row = rng.sample(LETTERS, level + 2)
    moved = [LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)] for letter in row]
    return _question("shift", level, f"Next letter of each: {' '.join(row)}.", moved, row)


def sort(level: int, rng: random.Random) -> Question:
    """Sort letters by the alphabet."""
    row = rng.sample(LETTERS, level + 2)
    return _question("sort", level, f"Sort by alphabet: {' '.join(row)}.", sorted(row), row)


def reverse(level: int, rng: random.Random) -> Question:
    """Reverse a row of letters."""
    row = rng.sample(LETTERS, level + 2)
    return _question("reverse", level, f"Reverse: {' '.join(row)}.", row[::-1], row)


def remove(level: int, rng: random.Random) -> Question:
    """Leave one letter out of a row of letters."""
    row = rng.sample(LETTERS, level + 3)
    at = rng.randrange(level + 3)
    left = row[:at] + row[at + 1 :]
    return _question("remove", level, f"Remove {row[at]}: {' '.join(row)}.", left, (*row, f"-{row[at]}"))


def after(level: int, rng: random.Random) -> Question:
    """Name the `level` letters that follow one letter of a row."""
    row = rng.sample(LETTERS, level + 3)
    at = rng.randrange(3)
    which = "letter" if level == 1 else f"{level} letters"
    text = f"The {which} after {row[at]}: {' '.join(row)}."
    return _question("after", level, text, row[at + 1 : at + 1 + level], (*row, f"{row[at]}>"))


def alternate(level: int, rng: random.Random) -> Question:
    """Take letters from two rows in turn."""
    letters = rng.sample(LETTERS, 2 * (level + 1))
    first = letters[: level + 1]
    second = letters[level + 1 :]
    mixed = [letter for pair in zip(first, second, strict=True) for letter in pair]
    return _question("alternate", level, f"Alternate: {' '.join(first)} and {' '.join(second)}.", mixed, letters)


def _question(family: str, level: int, text: str, right: Sequence[str], given: Sequence[str]) -> Question:
    return Question(family, level, text, " ".join(right), tuple(given))


FAMILIES = {
    "shift": shift,
    "sort": sort,
    "reverse": reverse,
    "remove": remove,
    "after": after,
    "alternate": alternate,
}
CELLS = tuple(itertools.product(FAMILIES, LEVELS))


def part_of_key(question: Question) -> str:
    """Return 'corpus' or 'prompts'. Depends on the key, so a reordered question is in the same split."""
    return SPLITS[crc32(question.key.encode()) % 2]


def ask(family: str, level: int, rng: random.Random, split: str) -> Question:
    """Return one random question of a cell from the given split."""
    while True:
        question = FAMILIES[family](level, rng)
        if part_of_key(question) == split:
            return question


def questions(per_cell: int, seed: int) -> list[Question]:
    """Return shuffled questions of the split 'prompts', `per_cell` of each cell, no two with the same key.

    Therefore no evaluation question can be answered from a training question, however they are split. Raises
    ValueError if a cell has too few questions.
    """
    rng = random.Random(f"checker questions {seed}")
    keys = set()
    found = []
    for family, level in CELLS:
        found += itertools.islice(_new_questions(family, level, rng, keys), per_cell)
    rng.shuffle(found)
    return found


def _new_questions(family: str, level: int, rng: random.Random, keys: set[str]) -> Iterator[Question]:
    """Yield questions whose key is not in `keys`, and add it."""
    while True:
        for _ in range(1000):
            question = ask(family, level, rng, "prompts")
            if question.key not in keys:
                break
        else:
            raise ValueError(f"{family} {level} has too few distinct questions")
        keys.add(question.key)
        yield question
