"""The result of an evaluation: completions of some prompts with their scores, KL and lengths, and a perplexity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import fmean
from typing import Any

import numpy as np

from rlhf.data.prompts import Prompt
from rlhf.demo.tasks import Gold
from rlhf.utils.rng import rng_for
from rlhf.utils.statistics import A_SHARE, interval_of, is_binary, mean_pass_at_k, over_prompts, per_prompt, scored

KL_PROMPTS = 64  # the KL is measured on at most so many prompts, the same ones for all seeds and algorithms


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation of a model found: P prompts, K completions of each.

    A field with an entry for each completion is an array (P, K), or a list of P lists of K.
    """

    texts: list[list[str]]
    scores: np.ndarray  # (P, K) score units; NaN, also in `judged`: no function applies to the completion
    lengths: np.ndarray  # (P, K) tokens, EOS included
    ended: np.ndarray  # (P, K) True if the completion ends with EOS or a stop string
    # (P, K) k1 to the start model, nats/sequence; NaN: not measured on this prompt; None: it cannot be computed
    kl: np.ndarray | None = None
    teacher_kl: np.ndarray | None = None  # (P, K) the same to the teacher, which the scores contain; None: no teacher
    perplexity: float | None = None  # at temperature 1, on the evaluator's text
    bits_per_byte: float | None = None  # the same per UTF-8 byte of the text; None unless it is in `units`
    # the figures that give the perplexity and the lengths, in units in which other models have them, too
    units: tuple[str, ...] = ("perplexity", "length")
    # judge or evaluation function -> its ratings (P, K); the first one decides
    judged: dict[str, np.ndarray] = field(default_factory=dict)
    update: int = 0  # of the run, before the evaluation
    topics: list[list[str | None]] | None = None  # as in the metrics' names; None if the run has no metrics per topic
    figures: dict[str, dict[str, float]] = field(default_factory=dict)  # of each evaluation function: `figures_of`
    extra: dict[str, list[list]] = field(default_factory=dict)  # columns that functions logged with log_extra
    gold: np.ndarray | None = None  # (P, K) gold quality in [0, 1]; None without a gold judge
    functions: tuple[str, ...] = ()  # the judges that are evaluation functions
    # of a checker (0 or 1): "greedy", more tokens, worked examples -> its mean, sampled in this way
    variants: dict[str, float] = field(default_factory=dict)
    more: Evaluation | None = None  # more completions of this model, (P, N), which its measures are of

    @property
    def samples(self) -> int:
        """The number of completions of each prompt, K."""
        return self.scores.shape[1]

    @property
    def score(self) -> float:
        """The mean score of the completions that have one."""
        return fmean(scored(self.scores))

    @property
    def measures(self) -> dict[str, np.ndarray]:
        """Everything that rates the model: "score", "judge" (the first judge), and "judge/NAME" of the other judges,
        (P, K), or (P, N) if there are more completions."""
        of = self.more or self
        names = [f"judge/{name}" if i else "judge" for i, name in enumerate(of.judged)]
        return {"score": of.scores, **dict(zip(names, of.judged.values(), strict=True))}

    @property
    def deciding(self) -> np.ndarray:
        """The first judge's ratings (P, K); the scores without a judge."""
        return next(iter(self.judged.values()), self.scores)

    @property
    def kl_per_token(self) -> float:
        """The KL of all completions for which it was measured, nats/token."""
        return float(np.nansum(self.kl) / self.lengths[~np.isnan(self.kl)].sum())

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a run's evaluation by TensorBoard tag. docs/metrics.md describes them."""
        return {
            "eval/score": self.score,
            **({"eval/gold": fmean(self.gold.ravel())} if self.gold is not None else {}),
            "eval/kl_divergence": fmean(scored(self.kl)),
            "eval/kl_divergence/token": self.kl_per_token,
            **({"eval/teacher_kl": fmean(self.teacher_kl.ravel())} if self.teacher_kl is not None else {}),
            **({"eval/perplexity": self.perplexity} if self.perplexity is not None else {}),
            "eval/length": fmean(self.lengths.ravel()),
            "eval/eos_rate": fmean(self.ended.ravel()),
            **{tag_of(name, key): value for name, found in self.figures.items() for key, value in found.items()},
            **{f"topic/{name}/eval_score": fmean(scores) for name, scores in self._by_topic().items()},
        }

    @property
    def not_finite(self) -> str:
        """Lists the KL and the perplexity if they are not finite, for an error message; "" if both are finite."""
        figures = {"KL": fmean(scored(self.kl)), "perplexity": self.perplexity or 0.0}
        return ", ".join(f"the {name} is {value}" for name, value in figures.items() if not math.isfinite(value))

    def _by_topic(self) -> dict[str, list[float]]:
        scores: dict[str, list[float]] = {}
        for name, score in zip(flat(self.topics or []), flat(self.scores), strict=False):
            if name is not None and score is not None:
                scores.setdefault(name, []).append(score)
        return scores

    def select(self, index: np.ndarray) -> Evaluation:
        """Return these completions of each prompt, `index` (P, M). All fields that are not of completions stay."""
        return replace(self, **{field.name: _chosen(getattr(self, field.name), index) for field in fields(self)})

    def gold_of(self, prompts: Sequence[Prompt], gold: Gold) -> np.ndarray:
        """Return the gold quality of the completions, (P, K) in [0, 1]."""
        rows = zip(prompts, self.texts, self.ended.tolist(), strict=True)
        return np.array(
            [
                [gold(prompt.example.messages[-1]["content"], *row) for row in zip(texts, ended, strict=True)]
                for prompt, texts, ended in rows
            ]
        )

    def rows(self, prompts: Sequence[Prompt]) -> Iterator[dict[str, Any]]:
        """Yield every completion with its score and its value of each evaluation function."""
        whole = [prompt for prompt in prompts for _ in range(self.samples)]
        metrics = {name: flat(values) for name, values in self.judged.items()}
        extra = {name: flat(values) for name, values in self.extra.items()}
        columns = zip(whole, *map(flat, (self.texts, self.scores, self.kl, self.ended)), strict=True)
        for i, (prompt, text, score, kl, ended) in enumerate(columns):
            row = {"prompt": prompt.example.messages, "completion": text, "score": score, "kl": kl, "ended": ended}
            if metrics:
                row["metrics"] = {name: values[i] for name, values in metrics.items()}
            if extra:
                row["extra"] = {name: values[i] for name, values in extra.items()}
            if prompt.example.topic is not None:
                row["topic"] = prompt.example.topic
            yield row


def flat(values: np.ndarray | Sequence[Sequence]) -> list:
    """Return one entry for each completion, prompt by prompt, from an array (P, K) or P lists of K; None for NaN."""
    rows = values.tolist() if isinstance(values, np.ndarray) else values
    return [None if value != value else value for row in rows for value in row]


def by_prompt(values: Sequence, samples: int) -> list[list]:
    """Return one list of `samples` entries for each prompt. The inverse of `flat`."""
    return [list(values[start : start + samples]) for start in range(0, len(values), samples)]


def as_array(values: Sequence[float | None], samples: int) -> np.ndarray:
    """Return an entry for each completion, prompt by prompt, as an array (P, samples), with NaN for None."""
    return np.array(values, dtype=float if None in values else None).reshape(-1, samples)


def of_completions(value: Any) -> bool:
    """Return whether a field has an entry for each completion: an array (P, K), or P lists of K."""
    return isinstance(value, np.ndarray) or (isinstance(value, list) and isinstance(next(iter(value), None), list))


def _chosen(value: Any, index: np.ndarray) -> Any:
    """Return a field for these completions of each prompt."""
    if isinstance(value, dict):
        return {name: _chosen(of, index) for name, of in value.items()}
    if isinstance(value, np.ndarray):
        return np.take_along_axis(value, index, axis=1)
    if of_completions(value):
        return [[row[i] for i in rows] for row, rows in zip(value, index, strict=True)]
    return value


def shown_prompts(count: int, seed: int, most: int = 5) -> list[int]:
    """Return the indices of up to `most` randomly drawn evaluation prompts out of `count`: the same ones throughout a
    run."""
    return sorted(rng_for(seed, 0, "show").permutation(count)[:most].tolist())


# --- the metrics of an evaluation function ---------------------------------------------------------------------------


def figures_of(values: np.ndarray, seed: int) -> dict[str, float]:
    """Return the metrics of one evaluation function.

    `value` is the mean over the prompts' means, `low` and `high` its 95% interval over prompts. With several samples
    and only the values 0 and 1, `pass_at_K` is the mean of pass@k over the prompts with at least K values. A prompt
    without a value is left out. Empty if no completion has a value; without interval for one prompt.

    Args:
        values: (P, K) of each completion; NaN if the function does not apply.
        seed: of the bootstrap.
    """
    means = scored(per_prompt(values, exact=True))
    if not means.size:
        return {}
    samples = values.shape[1]
    is_right = is_binary(values)
    found = over_prompts(means, seed, limits=A_SHARE if is_right else None)
    figures = {"value": found.value, "low": found.low, "high": found.high}
    if is_right and samples > 1:
        figures |= {f"pass_at_{k}": mean for k, mean in mean_pass_at_k(values, samples).items()}
    return {name: figure for name, figure in figures.items() if figure is not None}


def tag_of(name: str, figure: str) -> str:
    """Return the TensorBoard tag of a figure of `figures_of`, of the evaluation function `name`."""
    return f"eval/{name}" if figure == "value" else f"eval/{name}/{figure}"


def shown(figures: dict[str, float]) -> str:
    """Return the figures in words, for the console."""
    if not figures:
        return "no value"
    most = max((int(name.removeprefix("pass_at_")) for name in figures if name.startswith("pass_at_")), default=None)
    passed = "" if most is None else f", pass@{most} {figures[f'pass_at_{most}']:.3f}"
    return interval_of({"low": None, **figures}, "") + passed
