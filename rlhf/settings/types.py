"""Types of settings with a format: a KL target, a split, a renamed column, a memory size, a repository name."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from rlhf.utils.errors import UserError
from rlhf.utils.paths import exists, is_path, local_path

FROM_TRL = "trl:"  # before the name of a reward function of trl.rewards
FROM_PYTHON = "python:"  # before the name of a function that a program or a notebook defines, in run.json only
IN_PYTHON = "(given in Python)"  # the setting prompts of a run whose prompts are a list; they are in RUN/prompts
LONGEST_SHOWN = 80  # characters of a value in an error message
KL_METRICS = {"sequence": "kl_divergence", "token": "kl_divergence/token"}  # unit -> metric, as logged


@dataclass(frozen=True)
class KLTarget:
    """A KL target: `nats` per completion ("sequence") or per token ("token"). The unit is required."""

    nats: float
    per: str

    @classmethod
    def parse(cls, text: str) -> KLTarget:
        number, _, per = str(text).partition("/")
        per = {"seq": "sequence", "tok": "token"}.get(per.strip(), per.strip())
        target = cls(float(number), per)
        if per not in ("sequence", "token") or not 0 < target.nats < math.inf:
            raise ValueError(text)
        return target

    @property
    def metric(self) -> str:
        """The name of the KL metric with the same unit."""
        return KL_METRICS[self.per]

    def __str__(self) -> str:
        return f"{self.nats:g}/{self.per}"

    expects = "a number of nats above 0 with its unit, such as 6/sequence or 0.05/token"


def kl_text(nats: float, per: str) -> str:
    """Return a KL with its unit, such as 2.95/sequence or 0.0312/token. A negative number that rounds to 0 has no
    sign."""
    return f"{nats:z.{4 if per == 'token' else 2}f}/{per}"


def value_text(value: Any) -> str:
    """Return a written value as text for an error message."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print numbers with more than 4,300 digits
        return "a number with thousands of digits"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]} ..."


def _targets(value: Any) -> list[str]:
    """Return the KL targets in a written value."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    texts = [value_text(part) if isinstance(part, int) else str(part) for part in parts]
    return [word.strip() for text in texts for word in text.split(",")]


def bare_targets(value: Any) -> list[str]:
    """Return KL targets of other trainers, written as numbers, with units. One number means nats per sequence (TRL's
    first PPO, the SmolLM2-orca and rank-1 documents); several mean nats per token (the phased-KL documents)."""
    words = _targets(value)
    unit = "sequence" if len(words) == 1 else "token"
    return [f"{word}/{unit}" if re.fullmatch(r"[-+.\deE]+", word) else word for word in words]


def is_bare_number(value: Any) -> bool:
    """True for one KL target that is written as a number without a unit."""
    words = _targets(value)
    return len(words) == 1 and re.fullmatch(r"[.\d][.\deE-]*", words[0]) is not None


@dataclass(frozen=True)
class Split:
    """Percent of the questions for the reward model, for RL and for evaluation."""

    reward: int
    rl: int
    evaluation: int

    @classmethod
    def parse(cls, text: str) -> Split:
        parts = [int(part) for part in str(text).split("/")]
        if len(parts) != 3 or sum(parts) != 100 or min(parts) < 0:
            raise ValueError(text)
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.reward}/{self.rl}/{self.evaluation}"

    expects = "three whole percentages that add up to 100, such as 45/45/10"


RESERVED = ("start", "start model")  # names of arms that would be confused with the start model


class PathName(str):
    """A path, or another name in its place, such as one of the hub. `~` is the home folder."""

    @classmethod
    def parse(cls, text: str) -> PathName:
        try:
            return cls(local_path(str(text)))
        except UserError:
            raise ValueError(text) from None

    expects = "text; in a path, ~NAME is the home folder of a user of this machine, and ./~NAME is a file or folder"


class CriticName(PathName):
    """A kind of critic, or the folder of a run whose critic is loaded."""

    KINDS = ("shared", "separate", "reward-model")

    @classmethod
    def parse(cls, text: str) -> CriticName:
        name = super().parse(text)
        if name not in cls.KINDS and not (is_path(name) or exists(name)):
            raise ValueError(text)
        return name

    expects = f"{', '.join(KINDS)}, or the folder of a run with a critic, such as ./my_run"


class Renaming(str):
    """A new name for a column of the data, NEW=OLD."""

    @classmethod
    def parse(cls, text: str) -> Renaming:
        new, equals, old = str(text).partition("=")
        if not (new.strip() and equals and old.strip()):
            raise ValueError(text)
        return cls(f"{new.strip()}={old}")

    @property
    def new(self) -> str:
        return self.partition("=")[0]

    @property
    def old(self) -> str:
        return self.partition("=")[2]

    expects = "NEW=OLD, such as prompt=question"


UNESCAPED = {r"\n": "\n", r"\t": "\t", r"\\": "\\"}


class StopText(str):
    """A text that ends a completion, on one line: a line break in it is a backslash and an n."""

    at_commas = False  # the text may contain commas

    @classmethod
    def parse(cls, text: str) -> StopText:
        if not str(text):
            raise ValueError(text)
        return cls(str(text).replace("\n", r"\n").replace("\t", r"\t"))

    @property
    def text(self) -> str:
        """The text with its line breaks and tabs. Two backslashes are one."""
        return re.sub(r"\\[nt\\]", lambda found: UNESCAPED[found[0]], self)

    expects = r"a text that is not empty, such as '\n\nQuestion:'"


class ArmName(str):
    """An arm of a comparison: NAME=MODEL, the baseline `start`, or the baseline `best-of-N`."""

    at_commas = False  # a name may contain commas

    @classmethod
    def parse(cls, text: str) -> ArmName:
        name, equals, model = (part.strip() for part in str(text).partition("="))
        is_baseline = re.fullmatch(r"start|best-of-([2-9]|[1-9]\d+)", name) is not None
        if equals and (is_baseline or name.lower() in RESERVED):
            raise UserError(f"{name!r} is the name of a baseline", f"--arm {text}", "Give the model another name")
        if not is_baseline and not (name and name.isprintable() and model):
            raise ValueError(text)
        return cls(f"{name}{equals}{PathName.parse(model) if model else ''}")

    @property
    def name(self) -> str:
        return self.partition("=")[0]

    @property
    def model(self) -> str:
        """The model's folder, GGUF file or hub name; empty for a baseline."""
        return self.partition("=")[2]

    @property
    def best_of(self) -> int:
        """N of best-of-N; 0 for other arms."""
        return int(self.rpartition("-")[2]) if self.name.startswith("best-of-") and not self.model else 0

    expects = "NAME=MODEL, start, or best-of-N, such as DPO=./dpo_model best-of-4"


class JsonObject(str):
    """A JSON object as text; in Python also a dict."""

    @classmethod
    def parse(cls, given: str | dict[str, Any]) -> JsonObject:
        found = given if isinstance(given, dict) else json.loads(str(given))
        return cls(json.dumps({**found}, sort_keys=True))  # TypeError if it is no object

    expects = 'a JSON object, such as {"enable_thinking": false}'


class MemorySize(str):
    """An amount of memory, such as 8GB. A GB is 2**30 bytes, as in the names of GPUs."""

    @classmethod
    def parse(cls, text: str) -> MemorySize:
        found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([gm])i?b?", str(text).strip().lower())
        if found is None or float(found[1]) == 0:
            raise ValueError(text)
        return cls(f"{float(found[1]):g}{found[2].upper()}B")

    @property
    def bytes(self) -> int:
        return int(float(self[:-2]) * 2 ** {"G": 30, "M": 20}[self[-2]])

    expects = "a size with its unit, such as 8GB or 6000MB"


class HubName(str):
    """The name of a hub repository, with its owner."""

    @classmethod
    def parse(cls, text: str) -> HubName:
        from huggingface_hub.utils import validate_repo_id  # slow import, only needed if a name is given

        validate_repo_id(str(text))
        if str(text).count("/") != 1:
            raise ValueError(text)
        return cls(text)

    expects = "owner/name, with letters, digits, - _ and . only, such as ada/my-model"
