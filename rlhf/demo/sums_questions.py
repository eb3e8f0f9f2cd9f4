"""One-step sums and word problems with one right number, made by a procedure. Uses only the standard library.

    add          What is 7 + 5?                                                             12
    subtract     Calculate 12 - 7.                                                          5
    multiply     How much is 6 times 8?                                                     48
    get more     Anna has 7 apples. She buys 5 more. How many apples does she have now?     12
    give away    Tom has 12 stamps and gives 7 of them to Lucy. How many are left?          5
    groups of    There are 6 boxes with 8 pens in each box. How many pens are there?        48
    price        One ticket costs 6 dollars. How much do 8 tickets cost, in dollars?        48

A topic is a kind and a size, such as `add small`. Every question has exactly two numbers. The evaluation questions
share no pair of numbers with the training questions, and for the kinds in OTHER_PATTERNS no sentence pattern.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

PARTS = ("train", "evaluation")
Pair = tuple[int, int]


@dataclass(frozen=True)
class Question:
    """A question with its right answer."""

    text: str
    answer: int
    topic: str  # kind and size, such as `add small`


# --- sentence patterns -----------------------------------------------------------------------------------------------

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Henry", "Julia", "Leo", "Lucy", "Mark", "Nina",
         "Oscar", "Paula", "Sam", "Sara", "Tom")  # fmt: skip
THINGS = ("apples", "balls", "books", "buttons", "candles", "cards", "coins", "cookies", "eggs", "flowers", "marbles",
          "oranges", "pencils", "shells", "stamps", "stickers")  # fmt: skip
HOLDERS = ("bag", "basket", "bowl", "box", "drawer", "jar", "packet", "tray")

# {a} and {b}: the numbers; {x} and {y}: two names; {things}, {holder}: what is counted, and what it is in
PATTERNS = {
    "add": (
        "What is {a} + {b}?", "{a} + {b} = ?", "Calculate {a} + {b}.", "How much is {a} plus {b}?",
        "What is the sum of {a} and {b}?", "Add {a} and {b}.", "What do you get if you add {b} to {a}?",
    ),
    "subtract": (
        "What is {a} - {b}?", "{a} - {b} = ?", "Calculate {a} - {b}.", "How much is {a} minus {b}?",
        "Subtract {b} from {a}.", "What is left if you take {b} away from {a}?",
    ),
    "multiply": (
        "What is {a} * {b}?", "{a} * {b} = ?", "Calculate {a} * {b}.", "How much is {a} times {b}?",
        "Multiply {a} by {b}.", "What is the product of {a} and {b}?", "What is {a} times {b}?",
    ),
    "get more": (
        "{x} has {a} {things}. {y} gives {x} {b} more. How many {things} does {x} have now?",
        "{x} has {a} {things} and buys {b} more. How many {things} does {x} have in total?",
        "There are {a} {things} on the table. {x} puts {b} more {things} there. How many {things} are on the table?",
        "{x} found {a} {things} in the morning and {b} {things} in the evening. How many {things} did {x} find?",
        "{x} collects {things}. Yesterday {x} had {a}, and today {x} got {b} new ones. How many are there now?",
        "{x} has {a} {things} and {y} has {b}. How many {things} do they have together?",
    ),
    "give away": (
        "{x} has {a} {things} and gives {b} of them to {y}. How many {things} does {x} have left?",
        "{x} had {a} {things}, but lost {b}. How many {things} are left?",
        "There were {a} {things} in the shop. {b} of them were sold. How many {things} are still in the shop?",
        "{x} bought {a} {things} and used {b} of them. How many {things} remain?",
        "A shelf holds {a} {things}. {x} takes {b} {things} away. How many {things} stay on the shelf?",
    ),
    "groups of": (
        "There are {a} {holder}s with {b} {things} in each {holder}. How many {things} are there?",
        "{x} has {a} {holder}s. Each {holder} holds {b} {things}. How many {things} does {x} have?",
        "{x} fills {a} {holder}s and puts {b} {things} into each one. How many {things} does {x} need?",
        "A shop sells {things} by the {holder}, with {b} in every {holder}. How many {things} are in {a} {holder}s?",
        "{x} packs {b} {things} per {holder}. How many {things} are packed in {a} {holder}s?",
    ),
    "price": (
        "One ticket costs {b} dollars. How much do {a} tickets cost, in dollars?",
        "{x} buys {a} books for {b} dollars each. How many dollars does {x} pay?",
        "A cup of tea costs ${b}. How many dollars do {a} cups cost?",
        "{x} earns {b} dollars per hour and works {a} hours. How many dollars does {x} earn?",
        "The price of a ball is {b} dollars. {x} wants {a} balls. How many dollars does {x} need?",
    ),
}  # fmt: skip
# the evaluation's patterns of these kinds; training never uses them
OTHER_PATTERNS = {
    "give away": (
        "{x} picked {a} {things}. Then {y} took {b} of them. How many {things} does {x} still have?",
        "Of the {a} {things} in the room, {b} are broken. How many {things} are not broken?",
        "{x} must carry {a} {things} home and has already carried {b}. How many {things} are still to be carried?",
        "From a pile of {a} {things}, {b} fall down. How many {things} are still in the pile?",
    ),
    "groups of": (
        "Each of {a} children brings {b} {things}. How many {things} do the children bring?",
        "{things} are laid out in {a} rows of {b}. What is the number of {things}?",
        "On {a} days, {x} made {b} {things} a day. How many {things} did {x} make?",
        "A wall has {a} shelves, and on every shelf there are {b} {things}. How many {things} are on the wall?",
    ),
}


# --- numbers ---------------------------------------------------------------------------------------------------------


def _sum(least: int, most: int) -> Callable[[random.Random], Pair]:
    return lambda rng: (rng.randint(least, most), rng.randint(least, most))


def _difference(least: int, most: int) -> Callable[[random.Random], Pair]:
    """Two numbers, the larger one first, at least 2 apart."""

    def draw(rng: random.Random) -> Pair:
        larger = rng.randint(least, most)
        return larger, rng.randint(2, larger - 2)

    return draw


def _product(least: int, most: int) -> Callable[[random.Random], Pair]:
    """Two factors from 2 to 10 whose product is in a range."""
    pairs = [(a, b) for a in range(2, 11) for b in range(2, 11) if least <= a * b <= most]
    return lambda rng: rng.choice(pairs)


SMALL_SUM = _sum(2, 12)
LARGE_SUM = _sum(13, 25)
SMALL_DIFFERENCE = _difference(4, 15)
SMALL_PRODUCT = _product(4, 30)
LARGE_PRODUCT = _product(31, 100)
# topic -> its pairs of numbers
TOPICS: dict[str, Callable[[random.Random], Pair]] = {
    "add small": SMALL_SUM,
    "add large": LARGE_SUM,
    "subtract small": SMALL_DIFFERENCE,
    "multiply small": SMALL_PRODUCT,
    "multiply large": LARGE_PRODUCT,
    "get more small": SMALL_SUM,
    "get more large": LARGE_SUM,
    "give away small": SMALL_DIFFERENCE,
    "groups of small": SMALL_PRODUCT,
    "groups of large": LARGE_PRODUCT,
    "price small": SMALL_PRODUCT,
}
ANSWERS: dict[str, Callable[[int, int], int]] = {
    **dict.fromkeys(("add", "get more"), lambda a, b: a + b),
    **dict.fromkeys(("subtract", "give away"), lambda a, b: a - b),
    **dict.fromkeys(("multiply", "groups of", "price"), lambda a, b: a * b),
}


def part_of_sum(pair: Pair) -> str:
    """Return "train" or "evaluation", from a hash of the two numbers in any order: a third is for evaluation."""
    return PARTS[crc32(f"{min(pair)} {max(pair)}".encode()) % 3 == 0]


# --- questions -------------------------------------------------------------------------------------------------------


def questions(part: str, per_topic: int, seed: int) -> list[Question]:
    """Return shuffled questions for a part, "train" or "evaluation": `per_topic` of each topic, no text twice. Raises
    ValueError if a topic has too few questions."""
    rng = random.Random(f"sums {part} {seed}")
    found = []
    for topic in TOPICS:
        found += _questions_of(topic, part, per_topic, rng)
    rng.shuffle(found)
    return found


def _questions_of(topic: str, part: str, count: int, rng: random.Random) -> list[Question]:
    found: dict[str, Question] = {}
    for _ in range(100 * count):
        question = _ask(topic, part, rng)
        found.setdefault(question.text, question)
        if len(found) == count:
            return list(found.values())
    raise ValueError(f"{topic} has fewer than {count} distinct questions for {part}")


def _ask(topic: str, part: str, rng: random.Random) -> Question:
    """Return one random question of a topic, with numbers of this part."""
    kind = topic.rpartition(" ")[0]
    a, b = TOPICS[topic](rng)
    while part_of_sum((a, b)) != part:
        a, b = TOPICS[topic](rng)
    patterns = PATTERNS | OTHER_PATTERNS if part == "evaluation" else PATTERNS
    pattern = rng.choice(patterns[kind])
    x, y = rng.sample(NAMES, 2)
    text = pattern.format(a=a, b=b, x=x, y=y, things=rng.choice(THINGS), holder=rng.choice(HOLDERS))
    text = text.replace("boxs", "boxes")
    return Question(text[0].upper() + text[1:], ANSWERS[kind](a, b), topic)
