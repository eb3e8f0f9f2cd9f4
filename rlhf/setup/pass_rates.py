"""`--keep-pass-rate`: keeps the training prompts whose pass rate with the start model is in a range.

Bae et al. 2025, "Online Difficulty Filtering for Reasoning Oriented Reinforcement Learning" (arXiv 2504.03380) filter
during training. Here the start model's pass rates decide, once, before training.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rlhf.data.prompts import Prompt
from rlhf.data.sampler import PromptSampler, planned_updates, shorten
from rlhf.settings.training import Config
from rlhf.setup.build import Components
from rlhf.setup.inputs import check_warmup
from rlhf.setup.load_inputs import check_topics
from rlhf.setup.scan_figures import in_range
from rlhf.setup.start_samples import Sampled, drawn, sample_and_score
from rlhf.utils.console import Screen, clock
from rlhf.utils.errors import UserError
from rlhf.utils.files import write_text

PASS_RATES_FILE = "pass_rates.jsonl"


@dataclasses.dataclass(frozen=True)
class PassRates:
    """The pass rates of the sampled training prompts."""

    by_prompt: dict[str, float | None]  # hash of a prompt -> pass rate; None: its completions have no score
    topics: dict[str, str | None]  # hash of a prompt -> topic
    episodes: int  # completions that were sampled
    limits: tuple[float, float]

    def keeps(self, key: str) -> bool:
        """True if the prompt with this hash was sampled and its pass rate is in the range."""
        rate = self.by_prompt.get(key)
        return rate is not None and in_range([rate], self.limits)

    @property
    def counts(self) -> dict[str, int]:
        """The numbers that run.json stores."""
        kept = sum(map(self.keeps, self.by_prompt))
        return {"prompts": len(self.by_prompt), "episodes": self.episodes, "kept": kept}

    def write(self, folder: Path) -> None:
        """Write one JSON object per sampled prompt to the run's folder."""
        rows = [
            {"prompt": key, "topic": self.topics[key], "pass_rate": rate, "kept": self.keeps(key)}
            for key, rate in self.by_prompt.items()
        ]
        write_text(folder / PASS_RATES_FILE, "".join(json.dumps(row) + "\n" for row in rows))

    @classmethod
    def read(cls, folder: Path, limits: tuple[float, float]) -> PassRates:
        """Return the pass rates that `write` stored. Raises UserError if the file is missing or invalid."""
        file = folder / PASS_RATES_FILE
        try:
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            rates = {row["prompt"]: row["pass_rate"] for row in rows}
            return cls(rates, {row["prompt"]: row["topic"] for row in rows}, 0, limits)
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(
                f"the pass rates of the run are missing or corrupted: --resume, --keep-pass-rate, {file}. Restore the "
                "file from a backup, or remove --keep-pass-rate if the run was started without it"
            ) from None


def key_of(prompt: Prompt) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a prompt's ids and topic."""
    return hashlib.sha256(json.dumps([prompt.ids, prompt.example.topic]).encode()).hexdigest()[:16]


def keep_by_pass_rate(
    config: Config, components: Components, screen: Screen, folder: Path | None
) -> tuple[Components, PassRates | None]:
    """With --keep-pass-rate, return the components with only the kept training prompts, and the pass rates. Otherwise
    return the components, and None.

    A resumed run reads the pass rates from its `folder`. --dry-run, --check and --scan sample nothing and use all
    prompts. Raises UserError if fewer prompts than a batch are kept, or for a score outside [0, 1].
    """
    if config.data.keep_pass_rate is None:
        return components, None
    low, high = config.data.keep_pass_rate
    if config.run.only_looks:
        return components, None
    if config.run.resume and folder is not None:
        rates = PassRates.read(folder, (low, high))
    else:
        with screen:
            rates = sample_pass_rates(config, components, screen)
    kept = [prompt for prompt in components.prompts.train if rates.keeps(key_of(prompt))]
    show_kept(rates, screen)
    if len(kept) < config.batch.batch_size:
        raise UserError(
            f"{len(kept)} of {len(rates.by_prompt):,} prompts have a pass rate from {low:g} to {high:g}, fewer than a "
            f"batch of {config.batch.batch_size}: --keep-pass-rate. Use a wider range, more prompts or a smaller "
            "--batch-size; --scan prints the pass rates"
        )
    check_warmup(config, PromptSampler(config, kept).updates)
    check_topics(config, kept, screen)
    return dataclasses.replace(components, prompts=dataclasses.replace(components.prompts, train=kept)), rates


def most_needed(config: Config, train: Sequence[Prompt]) -> int:
    """Return how many kept prompts the run can use: those of all its updates, with those that --dynamic-sampling may
    draw in addition, and at most all prompts. Topics are trained in turn, so with --steps-per-topic all are needed."""
    if config.data.steps_per_topic is not None:
        return len(train)
    rounds = 1 + config.group.dynamic_sampling
    return min(len(train), planned_updates(config, train) * config.batch.batch_size * rounds)


def sample_pass_rates(config: Config, components: Components, screen: Screen) -> PassRates:
    """Sample the training prompts in a random order, until the run has enough kept prompts or none is left."""
    train, samples = components.prompts.train, config.run.scan_samples
    needed, limits = most_needed(config, train), tuple(config.data.keep_pass_rate)
    order, began = drawn(train, config.run.seed, by_topic=False), time.monotonic()
    rates, topics, kept = {}, {}, 0
    for part in sample_and_score(config, components, order, samples):
        for one in part:
            key, rate = key_of(one.prompt), rate_of(one)
            rates[key], topics[key] = rate, one.prompt.example.topic
            kept += rate is not None and in_range([rate], limits)
        done = len(rates) == len(train) or kept >= needed
        to_come = min(len(train) - len(rates), (needed - kept) * len(rates) / max(kept, 1))
        left = clock(max(0.0, (time.monotonic() - began) / len(rates) * to_come))
        screen.progress(
            f"pass rates: {len(rates):,} prompts sampled, {kept:,} kept of at most {needed:,} that the run can use, "
            f"about {left} left",
            last=done,
        )
        if done:
            break
    return PassRates(rates, topics, len(rates) * samples, limits)


def rate_of(sampled: Sampled) -> float | None:
    """Return the mean raw score of a prompt; None if no completion has a score. Raises UserError for a score outside
    [0, 1]."""
    wrong = [score for score in sampled.raw if not 0 <= score <= 1]
    if wrong:
        raise UserError(
            f"the score {wrong[0]:g} is not between 0 and 1, so there is no pass rate: --keep-pass-rate. Remove it, "
            "or use rewards from 0 to 1 (--reward-func, --reward-weights)"
        )
    return fmean(sampled.raw) if sampled.raw else None


def show_kept(rates: PassRates, screen: Screen) -> None:
    """Print how many of the sampled prompts are kept, in total and per topic."""
    low, high = rates.limits
    sampled = Counter(rates.topics[key] for key in rates.by_prompt)
    kept = Counter(rates.topics[key] for key in rates.by_prompt if rates.keeps(key))
    total = rates.counts
    named = [f"{shorten(topic or 'no topic')} {kept[topic]} of {count}" for topic, count in sampled.items()]
    each = f" ({', '.join(named)})" if len(named) > 1 else ""
    screen.say(
        f"kept {total['kept']:,} of {total['prompts']:,} sampled prompts, with a pass rate from {low:g} to {high:g}"
        f"{each}"
    )
