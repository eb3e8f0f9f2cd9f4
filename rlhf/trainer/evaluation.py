"""Evaluation of a policy on fixed prompts: completions, scores, KL, lengths, and the perplexity on a fixed text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlhf.algorithms.objectives import kl_k1
from rlhf.data.chat_template import encode_completion
from rlhf.data.examples import GivenPrompt, examples_of, worked_examples
from rlhf.data.prompts import Prompt, encode_prompts, ids_alone, paragraphs_of
from rlhf.demo.tasks import Gold
from rlhf.distributed.group import gather
from rlhf.models.actor_critic import Actor
from rlhf.models.attention import packable
from rlhf.models.budget import budget_of
from rlhf.models.device import autocast
from rlhf.models.logprobs import base_of
from rlhf.models.packing import PackedMicroBatch, PaddedMicroBatch
from rlhf.rewards.arguments import RewardLog
from rlhf.rewards.rewards import Rewards
from rlhf.rollout.completions import Completions, Rollout, token_batch
from rlhf.settings.training import Config, SamplingSettings
from rlhf.trainer.collect import RolloutCollector
from rlhf.trainer.eval_metrics import figures_of, tag_of
from rlhf.utils.errors import RunError, UserError
from rlhf.utils.paths import path_on_page
from rlhf.utils.processes import rank, size
from rlhf.utils.rng import rng_for
from rlhf.utils.statistics import is_binary, scored
from rlhf.utils.system import release_gpu_cache

FIXED_TEXTS = 128


@dataclass(frozen=True)
class FixedText:
    """The text on which the perplexity is computed throughout a run."""

    prompts: list[Prompt]
    completions: list[list[int]]  # token ids whose log-probabilities are averaged
    source: str  # description, printed next to the perplexity
    by_start: bool = False  # the start model sampled it; False: others wrote it


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation of a model found: P prompts, K completions of each.

    A field with an entry for each completion is an array (P, K), or a list of P lists of K.
    """

    texts: list[list[str]]
    scores: np.ndarray  # (P, K) score units; NaN, also in `judged`: no function applies to the completion
    lengths: np.ndarray  # (P, K) tokens, EOS included
    ended: np.ndarray  # (P, K) True if the completion ends with EOS or a stop string
    kl: np.ndarray | None = None  # (P, K) k1 to the start model, nats/sequence; None if it cannot be computed
    perplexity: float | None = None  # at temperature 1, on the evaluator's text
    # judge or evaluation function -> its ratings (P, K); the first one decides
    judged: dict[str, np.ndarray] = field(default_factory=dict)
    ids: list[list[list[int]]] = field(default_factory=list)  # EOS included; empty: they were not kept
    update: int = 0  # of the run, before the evaluation
    topics: list[str | None] | None = None  # (P,) as in the metrics' names; None if the run has no metrics per topic
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
    def checked(self) -> bool:
        """True if what decides is a checker: all its values are 0 or 1."""
        return is_binary(self.deciding)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a run's evaluation by TensorBoard tag. docs/metrics.md describes them."""
        kl = flat(self.kl)
        return {
            "eval/score": self.score,
            **({"eval/gold": fmean(flat(self.gold))} if self.gold is not None else {}),
            "eval/kl_divergence": fmean(kl),
            "eval/kl_divergence/token": sum(kl) / int(self.lengths.sum()),
            "eval/perplexity": self.perplexity,
            "eval/length": fmean(flat(self.lengths)),
            "eval/eos_rate": fmean(flat(self.ended)),
            **{tag_of(name, key): value for name, found in self.figures.items() for key, value in found.items()},
            **{f"topic/{name}/eval_score": fmean(scores) for name, scores in self._by_topic().items()},
        }

    @property
    def not_finite(self) -> str:
        """Lists the KL and the perplexity if they are not finite, for an error message; "" if both are finite."""
        figures = {"KL": fmean(flat(self.kl)), "perplexity": self.perplexity}
        return ", ".join(f"the {name} is {value}" for name, value in figures.items() if not math.isfinite(value))

    def _by_topic(self) -> dict[str, list[float]]:
        scores: dict[str, list[float]] = {}
        for name, row in zip(self.topics or [], self.scores, strict=False):
            known = scored(row).tolist()
            if name is not None and known:
                scores.setdefault(name, []).extend(known)
        return scores

    def select(self, index: np.ndarray) -> Evaluation:
        """Return these completions of each prompt, `index` (P, M). All fields that are not of completions stay."""
        return replace(self, **{field.name: _chosen(getattr(self, field.name), index) for field in fields(self)})

    def write(self, folder: Path, prompts: Sequence[Prompt]) -> None:
        """Writes every completion with its score and its value of each evaluation function, one JSON object per
        line."""
        rows = [prompt for prompt in prompts for _ in range(self.samples)]
        metrics = {name: flat(values) for name, values in self.judged.items()}
        extra = {name: flat(values) for name, values in self.extra.items()}
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"update-{self.update:06d}.jsonl").open(
            "w", encoding="utf-8", errors="backslashreplace"
        ) as file:
            columns = zip(rows, *map(flat, (self.texts, self.scores, self.kl, self.ended)), strict=True)
            for i, (prompt, text, score, kl, ended) in enumerate(columns):
                row = {"prompt": prompt.example.messages, "completion": text, "score": score, "kl": kl, "ended": ended}
                if metrics:
                    row["metrics"] = {name: values[i] for name, values in metrics.items()}
                if extra:
                    row["extra"] = {name: values[i] for name, values in extra.items()}
                if prompt.example.topic is not None:
                    row["topic"] = prompt.example.topic
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


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


def _chosen(value: Any, index: np.ndarray) -> Any:
    """Return a field for these completions of each prompt."""
    if isinstance(value, dict):
        return {name: _chosen(of, index) for name, of in value.items()}
    if isinstance(value, np.ndarray):
        return np.take_along_axis(value, index, axis=1)
    if isinstance(value, list) and value and isinstance(value[0], list):
        return [[row[i] for i in rows] for row, rows in zip(value, index, strict=True)]
    return value


def shown_prompts(count: int, seed: int, most: int = 5) -> list[int]:
    """Return the indices of up to `most` randomly drawn evaluation prompts out of `count`: the same ones throughout a
    run."""
    return sorted(rng_for(seed, 0, "show").permutation(count)[:most].tolist())


def gold_qualities(prompts: Iterable[Prompt], texts: Sequence[str], ended: Sequence[bool], gold: Gold) -> list[float]:
    """Return the gold quality of each completion, in [0, 1]. `prompts` has one entry per completion."""
    questions = [prompt.example.messages[-1]["content"] for prompt in prompts]
    return [gold(*row) for row in zip(questions, texts, ended, strict=True)]


def fixed_text(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    start: Callable[[Sequence[Prompt]], Sequence[list[int]]],
    file: str | None,
) -> FixedText:
    """Return the text for the perplexity of a run.

    It is the text of `file`, if given. Otherwise it is the chosen completions of the evaluation prompts, if there are
    any, and otherwise completions of the start model, whose ids `start` samples. At most FIXED_TEXTS completions
    are used.
    """
    if file is not None:
        return text_of_file(tokenizer, file)
    with_chosen = [p for p in prompts if p.example.chosen is not None][:FIXED_TEXTS]
    if with_chosen:
        completions = [encode_completion(tokenizer, p.example.chosen) for p in with_chosen]
        return FixedText(with_chosen, completions, f"{len(completions)} held-out chosen completions")
    completions = list(start(prompts[:FIXED_TEXTS]))
    source = f"one fixed sample of the start model's completions ({len(completions)})"
    return FixedText(list(prompts[:FIXED_TEXTS]), completions, source, by_start=True)


def text_of_file(tokenizer: PreTrainedTokenizerBase, file: str) -> FixedText:
    """Return the paragraphs of a text file. The first token of each is its prompt. Raises UserError as
    `paragraphs_of` does."""
    rows = paragraphs_of(tokenizer, file)
    return FixedText(
        [ids_alone(row[:1]) for row in rows],
        [row[1:] for row in rows],
        f"{len(rows)} paragraphs of {path_on_page(file)}",
    )


@torch.no_grad()
def perplexity(policy, text: FixedText, pad: int, device: torch.device, dtype: torch.dtype | None) -> float:
    """Return the perplexity per completion token of the text, at temperature 1; infinity if a float overflows.

    Each process computes its share of the text.
    """
    total = 0.0
    tokens = 0
    packed = packable(base_of(policy))
    order = sorted(range(len(text.completions)), key=lambda i: len(text.completions[i]))
    batch = budget_of(device).eval_batch_size
    for start in range(rank() * batch, len(order), size() * batch):
        rows = order[start : start + batch]
        prompts = [text.prompts[i].ids for i in rows]
        completions = [text.completions[i] for i in rows]
        micro_batch = (PackedMicroBatch if packed else PaddedMicroBatch)(
            token_batch(prompts, completions, pad, device), range(len(rows))
        )
        with autocast(device, dtype):
            logprobs, _, _ = Actor(policy)(micro_batch, 1.0)
        total -= float(logprobs.double().sum())
        tokens += sum(map(len, completions))
    total, tokens = (sum(parts) for parts in zip(*gather((total, tokens)), strict=True))
    try:
        # exp(-sum_t log p_t / tokens)
        return math.exp(total / tokens)
    except OverflowError:
        return math.inf


class PolicyEvaluator:
    """Evaluates the current policy, with the same random numbers every time."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        collector: RolloutCollector,
        prompts: Sequence[Prompt],
        topic_tags: dict[str, str],
        functions: Rewards | None = None,
        gold: Gold | None = None,
    ):
        """
        Args:
            config: the settings of the run.
            tokenizer: the policy's.
            collector: samples and scores as in training.
            prompts: the evaluation prompts of the run.
            topic_tags: topic -> its name in metric tags.
            functions: evaluation functions, which training never calls.
            gold: the demo's judge, which training never calls.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.collector = collector
        self.prompts = prompts
        self.topic_tags = topic_tags
        self.functions = functions
        self.gold = gold
        self.text: FixedText | None = None

    def read(self, given: Sequence[GivenPrompt]) -> list[Prompt]:
        """Return prompts in a form that `examples_of` reads, without those that are too long. Raises UserError if
        none is left, or they cannot be read."""
        longest = self.config.data.prompt_length
        examples = examples_of(given)
        if not examples:
            raise UserError("an empty list", "evaluate()", "Pass texts or chats")
        shots = worked_examples(self.config.data.few_shot)
        kept = encode_prompts(self.tokenizer, examples, longest, shots)
        if not kept:
            raise UserError(f"no prompt of at most {longest} tokens", "evaluate()", "Give shorter ones")
        return kept

    def evaluate(self, prompts: Sequence[Prompt], update: int) -> Evaluation:
        """Samples and scores completions to `prompts`, and computes the perplexity on the run's fixed text."""
        self.fix_text()
        batches = self._batches(prompts, self.config.run.eval_samples)
        how = None if self.config.run.eval_temperature is None else self.config.eval_sampling
        sampled = self._sample(batches, how)
        rollouts = [
            self.collector.with_logprobs(completions, [prompt for _, prompt in rows])
            for rows, completions in zip(batches, sampled, strict=True)
        ]
        with self.collector.passes.raise_on_oom("an evaluation"):
            return self._measured(rollouts, update)

    def _batches(self, prompts: Sequence[Prompt], samples: int = 1) -> list[list[tuple[int, Prompt]]]:
        """Return the episodes of `samples` completions per prompt, in batches. The random numbers of the first one of
        each prompt do not depend on `samples`."""
        rows = [(sample * len(prompts) + i, prompt) for i, prompt in enumerate(prompts) for sample in range(samples)]
        batch = size() * budget_of(self.collector.sampler.device, self.config).eval_batch_size
        return [rows[start : start + batch] for start in range(0, len(rows), batch)]

    def _sample(
        self, batches: Sequence[list[tuple[int, Prompt]]], sampling: SamplingSettings | None = None
    ) -> list[Completions]:
        """Sample one completion per episode of each batch. `sampling`: other settings than those of training."""
        self.collector.passes.clear()  # sampling needs the memory
        release_gpu_cache()
        with self.collector.sampler.same_weights():
            return [self.collector.sample_for_evaluation(rows, sampling) for rows in batches]

    def _start_completions(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Samples one completion per prompt as an evaluation does, without its log-probs."""
        return [row for completions in self._sample(self._batches(prompts)) for row in completions.rows()]

    def fix_text(self) -> None:
        """Chooses the text for the perplexity, on the first call. The policy must still be the start model then."""
        if self.text is None:
            self.text = fixed_text(self.tokenizer, self.prompts, self._start_completions, self.config.data.eval_text)

    def _measured(self, parts: Sequence[Rollout], update: int) -> Evaluation:
        """Computes the results of the rollout. Raises RunError if no completion has a score."""
        collector = self.collector
        run = self.config.run
        prompts = [prompt for part in parts for prompt in part.prompts]
        texts = [text for part in parts for text in part.texts]
        rows = [row for part in parts for row in part.completions.rows()]
        ended = [ended for part in parts for ended in part.completions.ended.tolist()]
        given = collector.rewards.score(prompts, texts, rows, ended)
        log = RewardLog(len(texts))
        if all(score is None for score in given.total):
            names = ", ".join(collector.rewards.names)
            raise RunError(
                f"no completion has a score, because every reward function returned None ({names})",
                f"the evaluation after update {update}",
                "Use prompts to which a reward function applies, or another function",
            )
        values = {}
        if self.functions is not None:
            values = self.functions.scores_by_function(prompts, texts, rows, ended, log=log)
        samples = run.eval_samples
        judged = {name: as_array(found, samples) for name, found in values.items()}
        topics = [self.topic_tags.get(prompt.example.topic) for prompt in prompts[::samples]]
        policy = collector.host.actor.policy
        pad = self.tokenizer.pad_token_id
        device = parts[0].mask.device
        kl = [kl for p in parts for kl in kl_k1(p.logprobs, p.ref_logprobs, p.mask).sum(1).tolist()]
        gold = None
        if self.gold is not None:
            gold = as_array(gold_qualities(prompts, texts, ended, self.gold), samples)
        return Evaluation(
            update=update,
            texts=by_prompt(texts, samples),
            scores=as_array(given.total, samples),
            kl=as_array(kl, samples),
            lengths=as_array(list(map(len, rows)), samples),
            ended=as_array(ended, samples),
            perplexity=perplexity(policy, self.text, pad, device, collector.passes.dtype),
            topics=topics if any(topics) else None,
            judged=judged,
            figures={name: figures_of(found, run.seed) for name, found in judged.items()},
            extra={name: by_prompt(column, samples) for name, column in {**given.extra, **log.extra}.items()},
            gold=gold,
        )
