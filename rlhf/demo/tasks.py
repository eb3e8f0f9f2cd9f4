"""What the demo asks, what a good reply is worth, and the ways in which replies go wrong. Standard library only.

`gold_quality` is the truth about a reply. It decides which of two sampled replies the demo's preference pairs prefer,
and it measures the result; no training reads it.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from functools import lru_cache
from zlib import crc32

from rlhf.demo.families import FAMILIES, OFF_TOPIC, TOPIC_WORDS, Sort, Verdict, mentioned

Gold = Callable[[str, str, bool], float]  # question, reply, whether it ended -> quality in [0, 1]
FLAWS = ("wrong", "off_topic", "incomplete", "rambling", "format")
SPLITS = ("train", "demo")
LIST_FORM = re.compile(r"[a-z]+(?:, [a-z]+)*(?: and [a-z]+)?|first [a-z]+(?:, then [a-z]+)*")
PLAIN_FORM = re.compile(r"[a-z]+(?: [a-z]+)*")
MAX_CHARACTERS = 2000  # of a reply that are looked at: far more than any good reply has, and a bound on the work


@lru_cache(maxsize=20_000)
def parse(question: str) -> tuple[str, object]:
    """(family name, task) of a question. Raises ValueError for text that no family asks."""
    for name, family in FAMILIES.items():
        match = family.pattern.fullmatch(question)
        if match:
            return name, family.parse(match)
    raise ValueError(f"not one of the demo's questions: {question[:80]!r}")


def family_of(question: str) -> str:
    """The family's name: pick, sort, kinds or scene."""
    return parse(question)[0]


def split_of(question: str) -> str:
    """'train' (the start model's corpus) or 'demo' (pairs, prompts, evaluation).

    Decided by the question's words without their order, so no reordering of a demo question is ever trained on.
    """
    words = sorted(word.strip(".,:?") for word in question.split())
    return SPLITS[crc32(" ".join(words).encode()) % 2]


def ask(family: str, rng: random.Random, split: str = "demo") -> str:
    """One random question of a family, from the given split."""
    while True:
        question = FAMILIES[family].ask(rng)
        if split_of(question) == split:
            return question


def questions(count: int, seed: int, split: str = "demo") -> list[str]:
    """`count` distinct questions, the families in turn, the same for the same seed.

    A longer list begins with the shorter one of the same seed. Raises ValueError where a family runs out.
    """
    rng = random.Random(f"questions {split} {seed}")
    found: dict[str, None] = {}
    for family in itertools.islice(itertools.cycle(FAMILIES), count):
        for _ in range(1000):
            question = ask(family, rng, split)
            if question not in found:
                break
        else:
            raise ValueError(f"{count} distinct questions are more than {family!r} has")
        found[question] = None
    return list(found)


def demonstration(question: str, rng: random.Random) -> str:
    """A good reply, in one of several wordings. Its gold quality is 1."""
    return parse(question)[1].good(rng)


def _another_answer(question: str, rng: random.Random) -> str:
    """A good answer to some other question that doesn't happen to touch this one."""
    while True:
        completion = demonstration(ask(rng.choice(list(FAMILIES)), rng), rng)
        if flaw_of(question, completion) == "off_topic":
            return completion


def _cut_short(question: str, rng: random.Random) -> str:
    """A good reply without its last words; sometimes with a full stop all the same."""
    words = demonstration(question, rng)[:-1].split(" ")
    kept = words[: rng.randint(max(1, len(words) // 3), len(words) - 1)]
    if kept[-1] in ("and", "then") and len(kept) > 1:
        kept.pop()
    return " ".join(kept).rstrip(",") + "." if rng.random() < 0.5 else " ".join(kept)


def _ramble(question: str, rng: random.Random) -> str:
    """A good reply that goes on: says it again, or tells of other things. One in four goes on and on."""
    sentences = [demonstration(question, rng)]
    for _ in range(rng.choice((1, 1, 2, 6))):
        sentences.append(_another_answer(question, rng) if rng.random() < 0.4 else demonstration(question, rng))
    return " ".join(sentences)


def _sloppy(question: str, rng: random.Random) -> str:
    """A good reply, carelessly typed: no capital, no full stop, other punctuation, missing commas or little words."""
    completion = demonstration(question, rng)
    habits = [
        lambda text: text[:1].lower() + text[1:],
        lambda text: text[:-1],
        lambda text: text[:1].lower() + text[1:-1],
        lambda text: text[:-1] + rng.choice(["!", "...", " .", ","]),
        lambda text: text.replace(", ", " ") if "," in text else text.replace(" ", ", ", 1),
    ]
    return rng.choice(habits)(completion)


def flawed(question: str, kind: str, rng: random.Random) -> str:
    """A reply with one natural flaw; `kind` is one of FLAWS."""
    if kind == "wrong":
        return parse(question)[1].wrong(rng)
    makers = {"off_topic": _another_answer, "incomplete": _cut_short, "rambling": _ramble, "format": _sloppy}
    return makers[kind](question, rng)


def _tidiness(first: str, is_list: bool) -> float:
    """1 for a capital, one full stop, single spaces and commas where they belong; a quarter less for each defect."""
    body = first.rstrip(" .,!?")
    form = LIST_FORM if is_list else PLAIN_FORM
    defects = (not first[:1].isupper(), first != body + ".", form.fullmatch(body.lower()) is None)
    return 1 - 0.25 * sum(defects)


@lru_cache(maxsize=100_000)
def _assess(question: str, completion: str, ended: bool) -> tuple[float, str | None]:
    """(gold quality, flaw) of a reply."""
    _, task = parse(question)
    text = completion[:MAX_CHARACTERS].strip()
    sentences = [part for part in re.split(r"[.!?\n]+", text) if part.strip()]
    words = re.findall(r"\w+", sentences[0].lower()) if sentences else []
    if not words:
        return 0.0, "incomplete"
    verdict = task.judge(words)
    if verdict is OFF_TOPIC and not mentioned(words, TOPIC_WORDS):
        verdict = Verdict(0.0, "incomplete")  # a stub such as "It is the": nothing in it is off the topic
    more = sum(len(part.split()) for part in sentences[1:])
    first = text if len(sentences) == 1 else text[: text.index(sentences[0]) + len(sentences[0]) + 1]
    tidiness = _tidiness(first, is_list=isinstance(task, Sort))
    brevity = max(0.2, 0.55 - 0.03 * more) if more else 1.0
    gold = verdict.content * tidiness * brevity * (1.0 if ended else 0.5)
    if verdict.flaw in ("wrong", "off_topic"):
        return gold, verdict.flaw
    if more or not ended:
        return gold, "rambling"
    return gold, verdict.flaw or ("format" if tidiness < 1 else None)


def gold_quality(question: str, completion: str, ended: bool = True) -> float:
    """How good a reply is, in [0, 1]: content x tidiness x brevity, judged from the question itself.

    `ended` False says that the reply hit the length limit without stopping; that halves it. 1 only for a complete,
    right, tidy answer that stops after one sentence. Any text may be given as a reply.
    """
    return _assess(question, completion, ended)[0]


def flaw_of(question: str, completion: str, ended: bool = True) -> str | None:
    """The reply's main flaw, one of FLAWS; None where it is good (gold quality 1)."""
    return _assess(question, completion, ended)[1]
