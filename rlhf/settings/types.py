"""Types of settings that are more than a number or a text: a KL target, a split, a repository's name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

KL_METRICS = {"sequence": "kl_divergence", "token": "kl_divergence/token"}  # unit -> metric, as logged


@dataclass(frozen=True)
class KLTarget:
    """A KL to hold: `nats` per whole reply ("sequence") or per reply token ("token"). Never a bare number."""

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
        """The metric that is in this target's unit."""
        return KL_METRICS[self.per]

    def __str__(self) -> str:
        return f"{self.nats:g}/{self.per}"

    expects = "a number of nats above 0 with its unit, such as 6/sequence or 0.05/token"


def bare_targets(value: Any) -> Any:
    """Return KL targets that other trainers write as numbers, with their units: one number is nats per sequence (TRL's
    first PPO, and the SmolLM2-orca and rank-1 documents), several are nats per token (the phased-KL documents)."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    words = [word.strip() for part in parts for word in str(part).split(",")]
    unit = "sequence" if len(words) == 1 else "token"
    return [f"{word}/{unit}" if re.fullmatch(r"[-+.\deE]+", word) else word for word in words]


@dataclass(frozen=True)
class Split:
    """Percent of the questions that go to the reward model, to RL and to evaluation."""

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


class HubName(str):
    """A repository's name on the hub, with its owner."""

    @classmethod
    def parse(cls, text: str) -> HubName:
        from huggingface_hub.utils import validate_repo_id  # only where a name is given: --help does not wait for it

        validate_repo_id(str(text))
        if str(text).count("/") != 1:
            raise ValueError(text)
        return cls(text)

    expects = "owner/name, of letters, digits, and - _ . between them, such as ada/my-model"
