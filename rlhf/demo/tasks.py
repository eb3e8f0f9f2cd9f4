"""Questions and the judge of the demo. Uses only the standard library.

`gold_quality` is the judge. It ranks the sampled completions into preference pairs and measures the final result. RL
training never uses it.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from functools import lru_cache
from zlib import crc32

from rlhf.demo.families import FAMILIES, OFF_TOPIC, TOPIC_WORDS, Judgement, Sort, mentioned

Gold = Callable[[str, str, bool], float]  # (question, completion, True if it ended) -> quality in [0, 1]
SPLITS = ("train", "demo")
LIST_FORM = re.compile(r"[a-z]+(?:, [a-z]+)*(?: and [a-z]+)?|first [a-z]+(?:, then [a-z]+)*")
PLAIN_FORM = re.compile(r"[a-z]+(?: [a-z]+)*")
MAX_CHARACTERS = (
    2000  # of a completion that are judged: far more than a good completion has, and a limit on the run time
)


@lru_cache(maxsize=20_000)
def parse(question: str) -> tuple[str, object]:
    """Return (family name, task) of a question. Raises ValueError if the text is not a question of any family."""
    for name, family in FAMILIES.items():
        match = family.pattern.fullmatch(question)
        if match:
            return name, family.parse(match)
    raise ValueError(f"not one of the demo's questions: {question[:80]!r}")


def part_of_task(question: str) -> str:
    """Return 'train' (the start model's corpus) or 'demo' (pairs, prompts, evaluation).

    Depends on the question's words but not on their order. Therefore the start model is never trained on a reordered
    demo question.
    """
    words = sorted(word.strip(".,:?") for word in question.split())
    return SPLITS[crc32(" ".join(words).encode()) % 2]


def ask(family: str, rng: random.Random, split: str = "demo") -> str:
    """Return one random question of a family from the given split."""
    while True:
        question = FAMILIES[family].ask(rng)
        if part_of_task(question) == split:
            return question


def questions(count: int, seed: int) -> list[str]:
    """Return `count` distinct questions. The families alternate, and the same seed gives the same questions.

    A longer list starts with the shorter list of the same seed. Raises ValueError if a family has too few questions.
    """
    rng = random.Random(f"questions demo {seed}")
    found: dict[str, None] = {}
    for family in itertools.islice(itertools.cycle(FAMILIES), count):
        for _ in range(1000):
            question = ask(family, rng)
            if question not in found:
                break
        else:
            raise ValueError(f"{count} distinct questions are more than {family!r} has")
        found[question] = None
    return list(found)


def _tidiness(first: str, is_list: bool) -> float:
    """Return 1 for correct capitals, full stop, spaces and commas, minus 0.25 for each defect."""
    body = first.rstrip(" .,!?")
    form = LIST_FORM if is_list else PLAIN_FORM
    defects = (not first[:1].isupper(), first != body + ".", form.fullmatch(body.lower()) is None)
    return 1 - 0.25 * sum(defects)


@lru_cache(maxsize=100_000)
def _assess(question: str, completion: str, ended: bool) -> tuple[float, str | None]:
    """Return (gold quality, flaw) of a completion."""
    _, task = parse(question)
    text = completion[:MAX_CHARACTERS].strip()
    sentences = [part for part in re.split(r"[.!?\n]+", text) if part.strip()]
    words = re.findall(r"\w+", sentences[0].lower()) if sentences else []
    if not words:
        return 0.0, "incomplete"
    verdict = task.judge(words)
    if verdict is OFF_TOPIC and not mentioned(words, TOPIC_WORDS):
        verdict = Judgement(0.0, "incomplete")  # a stub such as "It is the" has no topic
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
    """Return the quality of a completion in [0, 1]: content x tidiness x brevity.

    The value is 1 only for a complete, correct, tidy answer that stops after one sentence. It is halved if `ended` is
    False (the completion reached the length limit). Accepts any text as a completion.
    """
    return _assess(question, completion, ended)[0]


def flaw_of(question: str, completion: str, ended: bool = True) -> str | None:
    """Return the completion's main flaw: "wrong", "off_topic", "incomplete", "rambling" or "format"; None if it is
    good (gold quality 1)."""
    return _assess(question, completion, ended)[1]
