"""Which prompts an update has: pass by pass over all of them, or topic by topic. From (seed, topic, pass) alone."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence

import numpy as np

from rlhf.data.prompts import Prompt
from rlhf.settings.training import Config
from rlhf.utils.rng import rng_for

_NOT_IN_TAGS = re.compile(r"[^\w.-]+")  # what TensorBoard does not take, and the slash, which would make groups
LONGEST_NAME = 40  # letters of a topic's name, shown or among the metrics

MOST_LOOKED_AT = 10_000  # updates; all of ten million would take minutes


class PromptSampler:
    """Samples the training prompts of each update. A resumed run needs no stored state of it.

    Without `steps_per_topic` the prompts are sampled pass by pass; with it, so many updates from the first topic's,
    then as many from the next one's, in order of first appearance and round and round; a topic that comes again
    continues where it was left. Each pass over a topic has a separate order, and a batch may span two passes: every
    batch is full, and every optimizer step that is planned is taken.
    """

    def __init__(self, config: Config, prompts: Sequence[Prompt]):
        self.config, self.steps = config, config.data.steps_per_topic
        self.by_topic: dict[str | None, list[Prompt]] = {}  # under None all, if topics are not looked at
        for prompt in prompts:
            self.by_topic.setdefault(prompt.example.topic if self.steps else None, []).append(prompt)
        self._topics, self._all = list(self.by_topic), len(prompts)

    @property
    def topics(self) -> list[str]:
        """In the order in which they are trained; none where topics are not looked at."""
        return self._topics if self.steps else []

    @property
    def updates(self) -> int:
        """In the whole run."""
        return self.config.updates(self._all, len(self._topics))

    def topic_of(self, update: int) -> str | None:
        """None where topics are not looked at."""
        return self._topics[self._position(update)[0]]

    def _position(self, update: int) -> tuple[int, int]:
        """The number of an update's topic, and how many updates had prompts of it before."""
        if self.steps is None:
            return 0, update - 1
        block, step = divmod(update - 1, self.steps)
        rounds, number = divmod(block, len(self._topics))
        return number, rounds * self.steps + step

    def prompts_of(self, update: int) -> list[Prompt]:
        """A batch of prompts."""
        number, before = self._position(update)
        prompts, size = self.by_topic[self._topics[number]], self.config.batch.batch_size
        positions = (divmod(n, len(prompts)) for n in range(before * size, (before + 1) * size))
        return [prompts[_order(self.config.run.seed, number, p, len(prompts))[i]] for p, i in positions]

    def epochs(self, update: int) -> float:
        """Passes over the prompts that are done after an update; under topics, rounds of all topics."""
        if self.steps is None:
            return update * self.config.batch.batch_size / self._all
        return update / (self.steps * len(self._topics))

    def longest_batch(self, updates: int) -> list[Prompt]:
        """The batch that has the most prompt tokens among those of so many updates; of a longer run, among the first
        10,000."""
        batches = (self.prompts_of(update) for update in range(1, min(updates, MOST_LOOKED_AT) + 1))
        return max(batches, key=lambda batch: sum(len(prompt.ids) for prompt in batch))


@functools.lru_cache(maxsize=8)  # an update asks for one or two, and the next one for the same
def _order(seed: int, topic: int, number: int, count: int) -> np.ndarray:
    """The order of one pass over a topic of `count` prompts."""
    return rng_for(seed, number, "order", topic).permutation(count)


def planned_updates(config: Config, prompts: Sequence[Prompt]) -> int:
    """Updates of a run over these training prompts."""
    return PromptSampler(config, prompts).updates


def shorten(topic: str) -> str:
    """A topic's name as it is shown."""
    return " ".join(topic.split())[:LONGEST_NAME]


def metric_names(topics: Iterable[str | None]) -> dict[str, str]:
    """Each topic's name among the metrics: what TensorBoard takes, and no two the same."""
    names: dict[str, str] = {}
    for topic in topics:
        if topic is not None and topic not in names:
            plain = _NOT_IN_TAGS.sub("_", topic)[:LONGEST_NAME].strip("_") or "topic"
            taken, number = set(names.values()), 2
            name = plain
            while name in taken:
                name, number = f"{plain}_{number}", number + 1
            names[topic] = name
    return names
