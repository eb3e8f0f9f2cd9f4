"""The demo's start model: a small Llama trained on completions of mixed quality.

It is first trained on good completions, then on a mixture. Most completions of the mixture have a flaw, like human
demonstrations. As a result it can solve the tasks, and about one completion in three is good. The weights are shipped
in `rlhf/demo/weights/`. Rebuild them with

    python -m benchmarks.start_model --rebuild
"""

import itertools
import random
from collections.abc import Iterator, Sequence

from benchmarks.pretraining import Pretraining, rebuild_command
from rlhf.demo.families import (
    FAMILIES,
    KIND_OF,
    KINDS,
    LOOKS,
    NOUNS,
    PLACES,
    SIZES,
    VERBS,
    Kinds,
    Pick,
    Scene,
    Sort,
    article,
)
from rlhf.demo.ready import WEIGHTS
from rlhf.demo.tasks import ask, flaw_of, parse

FLAWS = ("wrong", "off_topic", "incomplete", "rambling", "format")
GOOD_SHARE = 0.35  # of the mixture; the others have one flaw each. benchmarks/experiment_log.md


def corpus(seed: int, mixed: bool) -> Iterator[tuple[str, str]]:
    """Yield (question, completion) endlessly, from the 'train' split. If not `mixed`, only good completions."""
    rng = random.Random(f"corpus {seed} {mixed}")
    for family in itertools.cycle(FAMILIES):
        question = ask(family, rng, "train")
        good = not mixed or rng.random() < GOOD_SHARE
        yield question, demonstration(question, rng) if good else flawed(question, rng.choice(FLAWS), rng)


# --- completions of each family --------------------------------------------------------------------------------------


def sentence_case(text: str) -> str:
    """Upper-case the first letter and keep the rest: 'ant, Ben' -> 'Ant, Ben'."""
    return text[:1].upper() + text[1:]


def say_kind(rng: random.Random, task: Pick, noun: str) -> str:
    is_kind = f"is {article(task.kind)}"
    return rng.choice([f"{sentence_case(noun)} {is_kind}.", f"The {noun} {is_kind}."])


def say_order(rng: random.Random, items: list[str]) -> str:
    """Return one of 'X, y, z.', 'X, y and z.' and 'First x, then y, then z.', chosen at random."""
    wordings = ", ".join(items), ", ".join(items[:-1]) + " and " + items[-1], "first " + ", then ".join(items)
    return sentence_case(rng.choice(wordings)) + "."


def say_kinds(rng: random.Random, nouns: Sequence[str], kinds: Sequence[str]) -> str:
    the = rng.choice(("", "the "))
    (first, second), (kind, other_kind) = nouns, kinds
    return sentence_case(f"{the}{first} is {article(kind)} and {the}{second} is {article(other_kind)}.")


def say_scene(rng: random.Random, looks: Sequence[str], kinds: Sequence[str], place: str) -> str:
    first, second = (f"the {look} {rng.choice(KINDS[kind])}" for look, kind in zip(looks, kinds, strict=True))
    return sentence_case(f"{rng.choice(['', '', 'Today ', 'Now '])}{first} {rng.choice(VERBS)} {place} {second}.")


def demonstration(question: str, rng: random.Random) -> str:
    """Return a good completion in one of several wordings. Its gold quality is 1."""
    _, task = parse(question)
    if isinstance(task, Pick):
        return say_kind(rng, task, task.answer)
    if isinstance(task, Sort):
        return say_order(rng, list(task.expected))
    if isinstance(task, Kinds):
        return say_kinds(rng, task.nouns, [KIND_OF[noun] for noun in task.nouns])
    return say_scene(rng, task.looks, task.kinds, task.place)


def wrong(question: str, rng: random.Random) -> str:
    """Return a completion with a wrong fact."""
    _, task = parse(question)
    if isinstance(task, Pick):
        return say_kind(rng, task, rng.choice([option for option in task.options if option != task.answer]))
    if isinstance(task, Sort):
        return say_order(rng, wrong_order(task, rng))
    if isinstance(task, Kinds):
        return wrong_kinds(task, rng)
    return wrong_scene(task, rng)


def wrong_order(task: Sort, rng: random.Random) -> list[str]:
    items = list(task.expected)
    if rng.random() < 0.3:
        stranger = rng.choice([noun for noun in SIZES if noun not in items])
        items[rng.randrange(len(items))] = stranger
    while items == list(task.expected):
        rng.shuffle(items)
    return items


def wrong_kinds(task: Kinds, rng: random.Random) -> str:
    nouns = list(task.nouns)
    kinds = [KIND_OF[noun] for noun in task.nouns]
    index = rng.randrange(2)
    if rng.random() < 0.7:
        kinds[index] = rng.choice([kind for kind in KINDS if kind != kinds[index]])
    else:
        nouns[index] = rng.choice([noun for noun in NOUNS if noun not in nouns])
    return say_kinds(rng, nouns, kinds)


def wrong_scene(task: Scene, rng: random.Random) -> str:
    looks = list(task.looks)
    kinds = list(task.kinds)
    place = task.place
    index = rng.randrange(2)
    what = rng.choice(("look", "kind", "kind", "place"))
    if what == "look":
        looks[index] = rng.choice([look for look in LOOKS if look != looks[index]])
    elif what == "kind":
        kinds[index] = rng.choice([kind for kind in KINDS if kind not in kinds])
    else:
        place = rng.choice([other for other in PLACES if other != place])
    return say_scene(rng, looks, kinds, place)


# --- flaws -----------------------------------------------------------------------------------------------------------


def another_answer(question: str, rng: random.Random) -> str:
    """Return a good answer to another question that is off-topic for this one."""
    while True:
        completion = demonstration(ask(rng.choice(list(FAMILIES)), rng), rng)
        if flaw_of(question, completion) == "off_topic":
            return completion


def cut_short(question: str, rng: random.Random) -> str:
    """Return a good completion without its last words, with a full stop in half of the cases."""
    words = demonstration(question, rng)[:-1].split(" ")
    kept = words[: rng.randint(max(1, len(words) // 3), len(words) - 1)]
    if kept[-1] in ("and", "then") and len(kept) > 1:
        kept.pop()
    return " ".join(kept).rstrip(",") + "." if rng.random() < 0.5 else " ".join(kept)


def ramble(question: str, rng: random.Random) -> str:
    """Return a good completion followed by 1, 2 or 6 sentences that repeat it or are off-topic."""
    sentences = [demonstration(question, rng)]
    for _ in range(rng.choice((1, 1, 2, 6))):
        sentences.append(another_answer(question, rng) if rng.random() < 0.4 else demonstration(question, rng))
    return " ".join(sentences)


def sloppy(question: str, rng: random.Random) -> str:
    """Return a good completion with a formatting error: capital letter, full stop, punctuation or commas."""
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
    """Return a completion with one flaw; `kind` is one of FLAWS."""
    makers = {
        "wrong": wrong,
        "off_topic": another_answer,
        "incomplete": cut_short,
        "rambling": ramble,
        "format": sloppy,
    }
    return makers[kind](question, rng)


PRETRAINING = Pretraining(corpus, clean_share=0.6, steps=4000, vocabulary=768)

if __name__ == "__main__":
    rebuild_command(PRETRAINING, WEIGHTS, "benchmarks.start_model")
