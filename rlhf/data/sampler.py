"""Samples the prompts of each update, from all prompts or topic by topic. Depends only on (seed, topic, pass)."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from rlhf.data.prompts import Prompt
from rlhf.settings.training import Config
from rlhf.utils.rng import rng_for

_NOT_IN_TAGS = re.compile(r"[^\w.-]+")  # invalid in a TensorBoard tag, and the slash, which would create groups
MAX_NAME_LENGTH = 40  # characters of a topic's name on the console and in metrics

MAX_SCANNED_UPDATES = 10_000  # scanning ten million updates would take minutes


class PromptSampler:
    """Samples the training prompts of each update. It has no state that a checkpoint must store.

    Without `steps_per_topic`, each pass visits all prompts in a new random order. With it, `steps_per_topic` updates
    use prompts of the first topic, the next ones use prompts of the second topic, and so on. Topics follow in order of
    first appearance. After the last topic the first one continues where it stopped. A batch may span two passes, so
    every batch is full and the number of optimizer steps is as planned.
    """

    def __init__(self, config: Config, prompts: Sequence[Prompt]):
        self.config = config
        self.steps = config.data.steps_per_topic
        self.by_topic: dict[str | None, list[Prompt]] = {}  # all prompts are under None without steps_per_topic
        for prompt in prompts:
            self.by_topic.setdefault(prompt.example.topic if self.steps else None, []).append(prompt)
        self._topics = list(self.by_topic)
        self._all = len(prompts)

    @property
    def topics(self) -> list[str]:
        """The topics in training order; empty without `steps_per_topic`."""
        return self._topics if self.steps else []

    @property
    def updates(self) -> int:
        """The number of updates in the whole run."""
        return self.config.updates(self._all, len(self._topics))

    def topic_of(self, update: int) -> str | None:
        """Return the topic of an update (counted from 1), or None without `steps_per_topic`."""
        return self._topics[self._position(update)[0]] if self._topics else None

    def _position(self, update: int) -> tuple[int, int]:
        """Return an update's topic index, and the number of earlier updates with the same topic."""
        if self.steps is None:
            return 0, update - 1
        block, step = divmod(update - 1, self.steps)
        rounds, number = divmod(block, len(self._topics))
        return number, rounds * self.steps + step

    def prompts_of(self, update: int) -> list[Prompt]:
        """Return the prompts of an update (counted from 1)."""
        number, before = self._position(update)
        prompts = self.by_topic[self._topics[number]]
        size = self.config.batch.batch_size
        # detail 4: a batch may span two passes (this project). Otherwise the last prompts of a pass are lost.
        positions = (divmod(n, len(prompts)) for n in range(before * size, (before + 1) * size))
        return [prompts[_order(self.config.run.seed, number, p, len(prompts))[i]] for p, i in positions]

    def other_prompts(self, update: int, count: int, drawn: Sequence[Prompt]) -> list[Prompt]:
        """Return `count` prompts for dynamic sampling, ordered by (seed, update).

        Prompts that the update has not `drawn` come first, then those that it has drawn least often. With topics, all
        are of the update's topic.
        """
        topic, _ = self._position(update)
        prompts = self.by_topic[self._topics[topic]]
        uses = Counter(map(id, drawn))
        order = rng_for(self.config.run.seed, update, "other prompts", 1).permutation(len(prompts)).tolist()
        order.sort(key=lambda i: uses[id(prompts[i])])  # a stable sort: otherwise the order stays random
        return [prompts[order[n % len(order)]] for n in range(count)]

    def epochs(self, update: int) -> float:
        """Return the passes over the prompts completed after an update. With topics: the rounds over all topics."""
        if not self._all:
            return 0.0
        if self.steps is None:
            return update * self.config.batch.batch_size / self._all
        return update / (self.steps * len(self._topics))

    def longest_batch(self, updates: int) -> list[Prompt]:
        """Return the batch with the most prompt tokens among the first `updates` updates (at most 10,000 of them)."""
        batches = (self.prompts_of(update) for update in range(1, min(updates, MAX_SCANNED_UPDATES) + 1))
        return max(batches, key=lambda batch: sum(len(prompt.ids) for prompt in batch))


@functools.lru_cache(maxsize=8)  # an update needs one or two orders, usually those of the previous update
def _order(seed: int, topic: int, number: int, count: int) -> np.ndarray:
    """Return the permutation of one pass (`number`) over a topic of `count` prompts."""
    return rng_for(seed, number, "order", topic).permutation(count)


def planned_updates(config: Config, prompts: Sequence[Prompt]) -> int:
    """Return the number of updates of a run with these training prompts."""
    return PromptSampler(config, prompts).updates


def shorten(topic: str) -> str:
    """Return a topic's name for the console: one line of at most 40 characters."""
    return " ".join(topic.split())[:MAX_NAME_LENGTH]


def metric_names(topics: Iterable[str | None]) -> dict[str, str]:
    """Return a unique name for each topic that is valid in a TensorBoard tag."""
    names: dict[str, str] = {}
    for topic in topics:
        if topic is not None and topic not in names:
            plain = _NOT_IN_TAGS.sub("_", topic)[:MAX_NAME_LENGTH].strip("_") or "topic"
            taken = set(names.values())
            number = 2
            name = plain
            while name in taken:
                name = f"{plain}_{number}"
                number = number + 1
            names[topic] = name
    return names


def drawn(prompts: Sequence[Prompt], seed: int) -> list[int]:
    """Return the indices of all prompts in a random order. The topics alternate, so that the first ones are spread
    evenly over the topics."""
    topics: dict[str | None, list[int]] = {}
    for i, prompt in enumerate(prompts):
        topics.setdefault(prompt.example.topic, []).append(i)
    orders = [rng_for(seed, 0, "draw", n).permutation(len(rows)) for n, rows in enumerate(topics.values())]
    mixed = [[rows[i] for i in order] for rows, order in zip(topics.values(), orders, strict=True)]
    return [rows[turn] for turn in range(max(map(len, mixed), default=0)) for rows in mixed if turn < len(rows)]
