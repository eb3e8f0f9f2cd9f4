"""The question families of the demo. Uses only the standard library.

Each family generates questions, and judges a completion:

    pick   Which of these is a fruit: goat, plum, hammer?       Plum is a fruit.
    sort   Order from small to big: horse, ant, fox.            First ant, then fox, then horse.
    kinds  What are plum and saw?                               Plum is a fruit and saw is a tool.
    scene  Write about an old fruit under a new tool.           Today the old plum lies under the new saw.
"""

import random
import re
from dataclasses import dataclass

KINDS = {
    "animal": ["ant", "bee", "frog", "rat", "cat", "fox", "goat", "pig", "horse", "whale"],
    "fruit": ["apple", "cherry", "fig", "grape", "lemon", "mango", "melon", "peach", "pear", "plum"],
    "tool": ["axe", "drill", "file", "hammer", "ladder", "pliers", "rake", "saw", "shovel", "wrench"],
    "instrument": ["banjo", "cello", "drum", "flute", "gong", "harp", "lute", "piano", "trumpet", "violin"],
    "vehicle": ["bike", "boat", "bus", "car", "plane", "scooter", "ship", "tractor", "train", "truck"],
    "garment": ["belt", "boot", "cap", "coat", "dress", "glove", "hat", "scarf", "shirt", "skirt"],
}
SIZES = KINDS["animal"]  # from small to big, the order in `sort` questions
KIND_OF = {noun: kind for kind, nouns in KINDS.items() for noun in nouns}
NOUNS = tuple(KIND_OF)
TOPIC_WORDS = {*NOUNS, *KINDS, *(f"{kind}s" for kind in KINDS)}
VERBS = ["lies", "rests", "sits", "stands", "stays", "waits"]
PLACES = ["behind", "beside", "by", "near", "under"]
LOOKS = ["big", "clean", "little", "new", "old", "wet"]


@dataclass(frozen=True)
class Judgement:
    """Judgement of a completion's first sentence. `content` is in [0, 1] and is 1 only if `flaw` is None."""

    content: float
    flaw: str | None = None


GOOD = Judgement(1.0)
OFF_TOPIC = Judgement(0.0, "off_topic")


def article(noun: str) -> str:
    """Return the noun with its article: 'a fox', 'an ant'."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def mentioned(words: list[str], vocabulary) -> list[str]:
    """Return the words that belong to a vocabulary, in order."""
    return [word for word in words if word in vocabulary]


def shape_verdict(words: list[str], longest: int) -> Judgement:
    """Judge a sentence with correct facts that has none of the good forms: it is cut, too long or sloppy."""
    if len(words) > longest:
        return Judgement(0.6, "rambling")
    cut = words[-1] in ("a", "an", "the", "and", "is", "has")
    return Judgement(0.6, "incomplete") if cut else Judgement(0.7, "format")


@dataclass(frozen=True)
class Pick:
    """Selects the one of three things that has the given kind."""

    kind: str
    options: tuple[str, ...]
    pattern = re.compile(r"Which of these is an? (\w+): (\w+), (\w+), (\w+)\?")

    @classmethod
    def ask(cls, rng: random.Random) -> str:
        kinds = rng.sample(sorted(KINDS), 3)
        options = [rng.choice(KINDS[kind]) for kind in kinds]
        return f"Which of these is {article(rng.choice(kinds))}: {', '.join(options)}?"

    @classmethod
    def parse(cls, match: re.Match) -> "Pick":
        return cls(match[1], match.groups()[1:])

    @property
    def answer(self) -> str:
        return next(option for option in self.options if KIND_OF[option] == self.kind)

    def judge(self, words: list[str]) -> Judgement:
        named = set(mentioned(words, KIND_OF))
        kinds = set(mentioned(words, KINDS))
        if not named & set(self.options) and self.kind not in kinds:
            return OFF_TOPIC
        if named - {self.answer} or kinds - {self.kind}:
            return Judgement(0.1, "wrong")
        if not named:
            return Judgement(0.15, "incomplete")
        is_kind = f"is {article(self.kind)}"
        if " ".join(words) in (f"{self.answer} {is_kind}", f"the {self.answer} {is_kind}", f"it is the {self.answer}"):
            return GOOD
        return Judgement(0.5, "incomplete") if len(words) < 4 else shape_verdict(words, 5)


@dataclass(frozen=True)
class Sort:
    """Orders three or four animals from small to big."""

    expected: tuple[str, ...]
    pattern = re.compile(r"Order from small to big: (\w+(?:, \w+){2,3})\.")

    @classmethod
    def ask(cls, rng: random.Random) -> str:
        return f"Order from small to big: {', '.join(rng.sample(SIZES, rng.choice((3, 3, 4))))}."

    @classmethod
    def parse(cls, match: re.Match) -> "Sort":
        return cls(tuple(sorted(match[1].split(", "), key=SIZES.index)))

    def judge(self, words: list[str]) -> Judgement:
        items = [word for word in words if word not in ("and", "first", "then")]
        expected = list(self.expected)
        if not set(words) & set(expected):
            return OFF_TOPIC
        if any(item not in KIND_OF for item in items):
            return Judgement(0.05, "wrong")
        if items == expected:
            return GOOD
        if items[: len(expected)] == expected:
            return Judgement(0.5, "rambling")
        places = [expected.index(item) for item in items if item in expected]
        if len(places) == len(items) and places == sorted(set(places)):
            return Judgement(0.6 * len(items) / len(expected), "incomplete")
        hits = sum(item == wanted for item, wanted in zip(items, expected, strict=False))
        return Judgement(0.2 * hits / len(expected), "wrong")


@dataclass(frozen=True)
class Kinds:
    """Names the kinds of two things."""

    nouns: tuple[str, str]
    pattern = re.compile(r"What are (\w+) and (\w+)\?")
    form = re.compile(r"(?:the )?(\w+) is an? (\w+) and (?:the )?(\w+) is an? (\w+)")

    @classmethod
    def ask(cls, rng: random.Random) -> str:
        first, second = rng.sample(NOUNS, 2)
        return f"What are {first} and {second}?"

    @classmethod
    def parse(cls, match: re.Match) -> "Kinds":
        return cls(match.groups())

    def judge(self, words: list[str]) -> Judgement:
        named = mentioned(words, KIND_OF)
        kinds = mentioned(words, KINDS)
        if not set(named) & set(self.nouns):
            return OFF_TOPIC
        expected = [KIND_OF[noun] for noun in self.nouns]
        if any(noun != wanted for noun, wanted in zip(named, self.nouns, strict=False)):
            return Judgement(0.15, "wrong")
        if any(kind != wanted for kind, wanted in zip(kinds, expected, strict=False)):
            return Judgement(0.2, "wrong")
        if len(named) < 2 or len(kinds) < 2:
            return Judgement(0.15 * (len(named) + len(kinds)), "incomplete")
        if len(named) > 2 or len(kinds) > 2:
            return Judgement(0.5, "rambling")
        return GOOD if self.form.fullmatch(" ".join(words)) else shape_verdict(words, 11)


@dataclass(frozen=True)
class Scene:
    """Writes one sentence of a fixed grammar about two things with given kinds, looks and place."""

    looks: tuple[str, str]
    kinds: tuple[str, str]
    place: str
    pattern = re.compile(r"Write about an? (\w+) (\w+) (\w+) an? (\w+) (\w+)\.")
    form = re.compile(rf"(?:(?:today|now) )?(?:an?|the) \w+ \w+ (?:{'|'.join(VERBS)}) \w+ (?:an?|the) \w+ \w+")

    @classmethod
    def ask(cls, rng: random.Random) -> str:
        looks = rng.sample(LOOKS, 2)
        kinds = rng.sample(sorted(KINDS), 2)
        first, second = (article(f"{look} {kind}") for look, kind in zip(looks, kinds, strict=True))
        return f"Write about {first} {rng.choice(PLACES)} {second}."

    @classmethod
    def parse(cls, match: re.Match) -> "Scene":
        return cls((match[1], match[4]), (match[2], match[5]), match[3])

    def judge(self, words: list[str]) -> Judgement:
        nouns = mentioned(words, KIND_OF)
        looks = mentioned(words, LOOKS)
        places = mentioned(words, PLACES)
        named = [*(KIND_OF[noun] for noun in nouns[:2]), *looks[:2], *places[:1]]
        wanted = [*self.kinds[: len(nouns)], *self.looks[: len(looks)], *[self.place][: len(places)]]
        hits = sum(word == other for word, other in zip(named, wanted, strict=True))
        other_kinds = nouns and not {KIND_OF[noun] for noun in nouns} & set(self.kinds)
        if other_kinds or hits < len(named) - 2:
            return OFF_TOPIC
        if hits < len(named):
            return Judgement(0.25 if hits == 4 else 0.1, "wrong")
        if len(named) < 5:
            return Judgement((0.1 if nouns else 0.05) * hits, "incomplete")
        if self.form.fullmatch(" ".join(words)):
            return GOOD
        return Judgement(0.5, "rambling") if len(words) > 9 else Judgement(0.6, "format")


FAMILIES = {"pick": Pick, "sort": Sort, "kinds": Kinds, "scene": Scene}
