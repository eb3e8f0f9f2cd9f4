"""The start model of demo-checker: a small Llama that can answer the questions, but often makes a mistake.

It is first trained on right answers, then on a mixture with many wrong answers: more in some families than in others,
more at higher levels, and nearly all at the highest level. Nothing in it was trained by RL. The weights are
shipped in `rlhf/demo/checker_weights/`. Rebuild them with

    python -m benchmarks.checker_start_model --rebuild
"""

import itertools
import random
from collections.abc import Iterator

from benchmarks.pretraining import Pretraining, rebuild_command
from rlhf.demo.checker_questions import CELLS, LETTERS, Question, ask
from rlhf.demo.ready import CHECKER_WEIGHTS

# shares of right answers in the mixture: of each family at level 1, and of each level relative to level 1
RIGHT_AT_LEVEL_1 = {"shift": 0.7, "sort": 0.3, "reverse": 0.85, "remove": 0.5, "after": 0.4, "alternate": 0.6}
LEVEL_FACTOR = {1: 1.0, 2: 0.65, 3: 0.35, 4: 0.04}


def right_share(family: str, level: int) -> float:
    """Return the share of right answers in the mixture for a family and level (benchmarks/experiment_log.md)."""
    return RIGHT_AT_LEVEL_1[family] * LEVEL_FACTOR[level]


def corpus(seed: int, mixed: bool) -> Iterator[tuple[str, str]]:
    """Yield (question, answer) endlessly, from the split 'corpus'. Unless `mixed`, all answers are right."""
    rng = random.Random(f"checker corpus {seed} {mixed}")
    for family, level in itertools.cycle(CELLS):
        question = ask(family, level, rng, "corpus")
        share = right_share(family, level) if mixed else 1.0
        yield question.text, unreliable_answer(question, share, rng)


def unreliable_answer(question: Question, share: float, rng: random.Random) -> str:
    """Return an answer that is right with the probability `share`, which is above 0 and at most 1.

    Half of the mistakes are the answer of a wrong method. In the other half, letters are replaced by other letters,
    each with the same probability.
    """
    wrong_method = (1 - share) / 2
    if rng.random() < wrong_method:
        return misread(question)
    letters = question.answer.split()
    slip = 1 - (share / (1 - wrong_method)) ** (1 / len(letters))  # so that no letter slips in `share` of all answers
    return " ".join(another(letter, rng) if rng.random() < slip else letter for letter in letters)


def another(letter: str, rng: random.Random) -> str:
    return rng.choice(LETTERS.replace(letter, ""))


def misread(question: Question) -> str:
    """Return the answer of a wrong method: the letters before instead of after each letter, the reverse order, only
    the first two letters exchanged, the next letter left out, one letter too early, the second row first."""
    row = [letter for letter in question.given if len(letter) == 1]
    target = question.given[-1].strip("->")
    if question.family == "shift":
        wrong = [LETTERS[LETTERS.index(letter) - 1] for letter in row]
    elif question.family == "sort":
        wrong = sorted(row, reverse=True)
    elif question.family == "reverse":
        wrong = [row[1], row[0], *row[2:]]
    elif question.family == "remove":
        gone = (row.index(target) + 1) % len(row)
        wrong = row[:gone] + row[gone + 1 :]
    elif question.family == "after":
        at = row.index(target)
        wrong = row[at : at + question.level]
    else:
        half = len(row) // 2
        wrong = [letter for pair in zip(row[half:], row[:half], strict=True) for letter in pair]
    return " ".join(wrong)


PRETRAINING = Pretraining(corpus, clean_share=0.7, steps=7000, vocabulary=400)

if __name__ == "__main__":
    rebuild_command(PRETRAINING, CHECKER_WEIGHTS, "benchmarks.checker_start_model")
