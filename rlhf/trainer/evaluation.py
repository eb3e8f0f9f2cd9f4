"""Evaluation of a policy on fixed prompts: completions, scores, KL, lengths, and the perplexity on a fixed text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from transformers import PreTrainedTokenizerBase

from rlhf.algorithms.objectives import kl_k1
from rlhf.data.chat_template import encode_completion, encode_text
from rlhf.data.prompts import Prompt, ids_alone
from rlhf.data.readers import read_text
from rlhf.models.actor_critic import Actor
from rlhf.models.attention import packable
from rlhf.models.budget import budget_of
from rlhf.models.device import autocast
from rlhf.models.logprobs import base_of
from rlhf.models.packing import PackedMicroBatch, PaddedMicroBatch
from rlhf.rewards.rewards import Rewards
from rlhf.rollout.completions import Rollout, token_batch
from rlhf.settings.training import Config
from rlhf.trainer.collect import RolloutCollector
from rlhf.utils.errors import UserError


@dataclass(frozen=True)
class FixedText:
    """The text on which the perplexity is computed throughout a run."""

    prompts: list[Prompt]
    completions: list[list[int]]  # token ids whose log-probabilities are averaged
    source: str  # description, printed next to the perplexity


@dataclass(frozen=True)
class Evaluation:
    """Results of one evaluation of the policy. Lists have one entry per evaluation prompt."""

    update: int
    texts: list[str]
    scores: list[float]
    kl: list[float]  # nats per sequence, k1
    lengths: list[int]  # tokens, EOS included
    ended: list[bool]
    perplexity: float
    topics: list[str | None] | None = None  # as in the metrics' names; None if the run has no metrics per topic

    def metrics(self) -> dict[str, float]:
        """Returns the metrics by TensorBoard tag. docs/metrics.md describes them."""
        return {
            "eval/score": fmean(self.scores),
            "eval/kl_divergence": fmean(self.kl),
            "eval/kl_divergence/token": sum(self.kl) / sum(self.lengths),
            "eval/perplexity": self.perplexity,
            "eval/reply_length": fmean(self.lengths),
            "eval/eos_rate": fmean(self.ended),
            **{f"topic/{name}/eval_score": fmean(scores) for name, scores in self._by_topic().items()},
        }

    @property
    def not_finite(self) -> str:
        """Lists the KL and the perplexity if they are not finite, for an error message; "" if both are finite."""
        figures = {"KL": fmean(self.kl), "perplexity": self.perplexity}
        return ", ".join(f"the {name} is {value}" for name, value in figures.items() if not math.isfinite(value))

    def _by_topic(self) -> dict[str, list[float]]:
        scores: dict[str, list[float]] = {}
        for name, score in zip(self.topics or [], self.scores, strict=False):
            if name is not None:
                scores.setdefault(name, []).append(score)
        return scores

    def write(self, folder: Path, prompts: Sequence[Prompt]) -> None:
        """Writes every completion with its score, one JSON object per line."""
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"update-{self.update:06d}.jsonl").open("w", encoding="utf-8") as file:
            for prompt, text, score, kl, ended in zip(
                prompts, self.texts, self.scores, self.kl, self.ended, strict=True
            ):
                row = {"prompt": prompt.example.messages, "reply": text, "score": score, "kl": kl, "ended": ended}
                if prompt.example.topic is not None:
                    row["topic"] = prompt.example.topic
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def fixed_text(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    start: Callable[[Sequence[Prompt]], Sequence[Rollout]],
    file: str | None,
    most: int = 128,
) -> FixedText:
    """Returns the text for the perplexity of a run.

    It is the text of `file`, if given. Otherwise it is the chosen completions of the evaluation prompts, if there are
    any, and otherwise completions of the start model, which `start` samples. At most `most` completions are used.
    """
    if file is not None:
        return text_of_file(tokenizer, file)
    with_chosen = [p for p in prompts if p.example.chosen is not None][:most]
    if with_chosen:
        completions = [encode_completion(tokenizer, p.example.chosen) for p in with_chosen]
        return FixedText(with_chosen, completions, f"{len(completions)} held-out chosen completions")
    parts = start(prompts[:most])
    rows = [(p, row) for part in parts for p, row in zip(part.prompts, part.completions.rows(), strict=True)]
    source = f"one fixed sample of the start model's completions ({len(rows)})"
    return FixedText([p for p, _ in rows], [row for _, row in rows], source)


def text_of_file(tokenizer: PreTrainedTokenizerBase, file: str) -> FixedText:
    """Returns the paragraphs of a text file. The first token of each is its prompt.

    Raises UserError if the file does not exist, or has no paragraph with at least 2 tokens.
    """
    if not Path(file).is_file():
        raise UserError(f"file not found: --eval-text {file}. Give the path of an existing text file")
    paragraphs = [p for p in read_text(Path(file)).split("\n\n") if p.strip()]
    rows = [ids for p in paragraphs if len(ids := encode_text(tokenizer, p.strip())) > 1]
    if not rows:
        raise UserError(f"no paragraph with at least 2 tokens: --eval-text {file}. Give a longer text")
    return FixedText(
        [ids_alone(row[:1]) for row in rows], [row[1:] for row in rows], f"{len(rows)} paragraphs of {file}"
    )


@torch.no_grad()
def perplexity(policy, text: FixedText, pad: int, device: torch.device, dtype: torch.dtype | None) -> float:
    """Returns the perplexity per completion token of the text, at temperature 1; infinity if a float overflows."""
    total, tokens, packed = 0.0, 0, packable(base_of(policy))
    order = sorted(range(len(text.completions)), key=lambda i: len(text.completions[i]))
    size = budget_of(device).eval_batch_size
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        prompts, completions = [text.prompts[i].ids for i in rows], [text.completions[i] for i in rows]
        micro_batch = (PackedMicroBatch if packed else PaddedMicroBatch)(
            token_batch(prompts, completions, pad, device), range(len(rows))
        )
        with autocast(device, dtype):
            logprobs, _, _ = Actor(policy)(micro_batch, 1.0)
        total -= float(logprobs.double().sum())
        tokens += sum(map(len, completions))
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
    ):
        """`prompts` are the evaluation prompts of the run. `topic_tags` maps each topic to its name in metric tags."""
        self.config, self.tokenizer, self.collector = config, tokenizer, collector
        self.prompts, self.topic_tags = prompts, topic_tags
        self.text: FixedText | None = None

    def evaluate(self, prompts: Sequence[Prompt], update: int) -> Evaluation:
        """Samples and scores completions to `prompts`, and computes the perplexity on the run's fixed text."""
        self.fix_text()
        rollouts, topics = self.rollouts(prompts), [self.topic_tags.get(p.example.topic) for p in prompts]
        host, collector = self.collector.host, self.collector
        with collector.micro_batch_budget.raise_on_oom("an evaluation"):
            parts = host.actor, collector.rewards, self.text, self.tokenizer.pad_token_id, collector.dtype, topics
            return evaluate(rollouts, update, *parts)

    def rollouts(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        """Samples one completion per prompt, in batches."""
        rows, size = list(enumerate(prompts)), budget_of(self.collector.device).eval_batch_size
        return [
            self.collector.collect(rows[start : start + size], 0, "evaluate") for start in range(0, len(rows), size)
        ]

    def fix_text(self) -> None:
        """Chooses the text for the perplexity, on the first call. The policy must still be the start model then."""
        if self.text is None:
            self.text = fixed_text(self.tokenizer, self.prompts, self.rollouts, self.config.data.eval_text)


def evaluate(
    parts: Sequence[Rollout],
    update: int,
    actor: Actor,
    rewards: Rewards,
    text: FixedText,
    pad: int,
    dtype: torch.dtype | None,
    topics: list[str | None] | None = None,
) -> Evaluation:
    """Scores the rollout of the evaluation prompts, and computes the perplexity on the fixed text.

    Args:
        parts: the rollout, in batches.
        update: number of updates before this evaluation.
        actor: the policy.
        rewards: the reward functions.
        text: text for the perplexity.
        pad: id of the pad token.
        dtype: autocast precision; None: float32.
        topics: topic of each prompt as in metric tags, None for a prompt without one.
    """
    prompts = [prompt for part in parts for prompt in part.prompts]
    texts = [text for part in parts for text in part.texts]
    ended = [ended for part in parts for ended in part.completions.ended.tolist()]
    rows = [row for part in parts for row in part.completions.rows()]
    return Evaluation(
        update=update,
        texts=texts,
        scores=rewards.score(prompts, texts, rows, ended).total,
        kl=[kl for p in parts for kl in kl_k1(p.logprobs, p.ref_logprobs, p.mask).sum(1).tolist()],
        lengths=[len(row) for row in rows],
        ended=ended,
        perplexity=perplexity(actor.policy, text, pad, parts[0].mask.device, dtype),
        topics=topics if topics and any(topics) else None,
    )
