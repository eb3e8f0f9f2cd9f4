"""The evaluator of runs, evaluations and comparisons: samples completions, scores them, and computes their KL and the
perplexity on a fixed text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlhf.algorithms.objectives import kl_k1
from rlhf.data.chat_template import encode_completion
from rlhf.data.prompts import Prompt, paragraphs_of
from rlhf.distributed.group import gather
from rlhf.distributed.weights import checksums
from rlhf.models.actor_critic import Actor
from rlhf.models.attention import packable
from rlhf.models.budget import budget_of
from rlhf.models.device import autocast
from rlhf.models.logprobs import base_of
from rlhf.models.packing import PackedMicroBatch, PaddedMicroBatch
from rlhf.rewards.find import EVAL_FUNCTION
from rlhf.rewards.rewards import Rewards, not_known
from rlhf.rollout.completions import Completions, token_batch
from rlhf.rollout.episodes import Episode
from rlhf.rollout.sampler import Sampler
from rlhf.settings.training import SamplingSettings
from rlhf.trainer.evaluation import KL_PROMPTS, Evaluation, as_array, by_prompt, shown_prompts
from rlhf.trainer.passes import ForwardPasses
from rlhf.trainer.play import Numbered, Player
from rlhf.utils.paths import path_on_page
from rlhf.utils.processes import rank, size
from rlhf.utils.system import release_gpu_cache
from rlhf.utils.timing import timed

FIXED_TEXTS = 128


# returns one episode of each prompt
Played = Callable[[Sequence[Prompt]], Sequence[Episode]]


@dataclass(frozen=True)
class FixedText:
    """The text on which the perplexity is computed throughout a run."""

    prompts: list[Sequence[int]]  # token ids
    completions: list[list[int]]  # token ids whose log-probabilities are averaged
    source: str  # description, printed next to the perplexity
    by_start: bool = False  # the start model sampled it; False: others wrote it


def fixed_text(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    start: Played | None,
    file: str | None,
) -> FixedText | None:
    """Return the text for the perplexity of a run.

    It is the text of `file`, if given. Otherwise it is the chosen completions of the evaluation prompts, if there are
    any, and otherwise first turns of the start model, which `start` samples; None without `start` or prompts. At most
    FIXED_TEXTS completions are used.
    """
    if file is not None:
        return text_of_file(tokenizer, file)
    with_chosen = [p for p in prompts if p.example.chosen is not None][:FIXED_TEXTS]
    if with_chosen:
        completions = [encode_completion(tokenizer, p.example.chosen) for p in with_chosen]
        return FixedText([p.ids for p in with_chosen], completions, f"{len(completions)} held-out chosen completions")
    if start is None or not prompts:
        return None
    played = [episode for episode in start(prompts[:FIXED_TEXTS]) if episode.spans]
    completions = [episode.ids[: episode.spans[0].stop] for episode in played]
    source = f"one fixed sample of the start model's completions ({len(completions)})"
    return FixedText([episode.prompt.ids for episode in played], completions, source, by_start=True)


def text_of_file(tokenizer: PreTrainedTokenizerBase, file: str) -> FixedText:
    """Return the paragraphs of a text file. The first token of each is its prompt. Raises UserError as
    `paragraphs_of` does."""
    rows = paragraphs_of(tokenizer, file)
    return FixedText(
        [row[:1] for row in rows],
        [row[1:] for row in rows],
        f"{len(rows)} paragraphs of {path_on_page(file)}",
    )


@timed("perplexity")
@torch.no_grad()
def perplexity(sampler: Sampler, text: FixedText) -> float:
    """Return the perplexity of the sampler's policy per completion token of the text, at temperature 1; infinity if a
    float overflows.

    Each process computes its share of the text.
    """
    total = 0.0
    tokens = 0
    packed = packable(base_of(sampler.policy))
    order = sorted(range(len(text.completions)), key=lambda i: len(text.completions[i]))
    batch = budget_of(sampler.device).eval_batch_size
    for start in range(rank() * batch, len(order), size() * batch):
        rows = order[start : start + batch]
        prompts = [text.prompts[i] for i in rows]
        completions = [text.completions[i] for i in rows]
        micro_batch = (PackedMicroBatch if packed else PaddedMicroBatch)(
            token_batch(prompts, completions, sampler.pad, sampler.device), range(len(rows))
        )
        with autocast(sampler.device, sampler.dtype):
            logprobs, _, _ = Actor(sampler.policy)(micro_batch, 1.0)
        total -= float(logprobs.double().sum())
        tokens += sum(map(len, completions))
    total, tokens = (sum(parts) for parts in zip(*gather((total, tokens)), strict=True))
    try:
        # exp(-sum_t log p_t / tokens)
        return math.exp(total / tokens)
    except OverflowError:
        return math.inf


@dataclass
class Evaluator:
    """Evaluates a policy, with the same random numbers every time: those of (seed, update 0, purpose, episode)."""

    player: Player
    passes: ForwardPasses  # compute the KL to their reference; without a reference there is no KL
    tokenizer: PreTrainedTokenizerBase
    rewards: Rewards
    judges: Sequence[Rewards]  # also rate the completions; training never calls them
    purpose: str  # name of the stream of random numbers
    teacher: ForwardPasses | None = None  # compute the KL to the teacher, which is their reference
    keeps_graphs: bool = False  # of the decoder, while the log-probs are computed
    text: FixedText | None = None  # for the perplexity; None: it is not computed
    units: tuple[str, ...] = Evaluation.units
    latest: tuple = ()  # what the last call of `evaluate` measured, after what this depends on

    def evaluate(
        self,
        rows: Numbered,
        samples: int,
        sampling: SamplingSettings | None = None,
        scores_only: bool = False,
        sampled: Callable[[list[Episode]], None] = lambda _: None,
    ) -> Evaluation:
        """Sample, score and rate completions, and compute their KL and the perplexity on `text`. With the weights and
        arguments of the last call, only scores and ratings are computed again: functions may depend on the update.

        Args:
            rows: (number, prompt) of each completion, prompt by prompt.
            samples: completions of each prompt.
            sampling: settings in place of the sampler's, with the same stop strings.
            scores_only: neither KL nor perplexity.
            sampled: receives the episodes before `text` is used.
        """
        weights = checksums(self.sampler.policy)
        reference = None if scores_only else self.passes.reference
        prompts = len(rows) // samples
        drawn = shown_prompts(prompts, 0, prompts if self.teacher else KL_PROMPTS) if reference else []
        chosen = [prompt * samples + k for prompt in drawn for k in range(samples)]
        given = weights, rows, sampling, scores_only
        if self.latest[:4] != given:
            is_reference = reference and (self.sampler.policy is reference.copy or weights == reference.start)
            measured = [] if is_reference and not self.teacher else chosen
            episodes, logprobs, parts = self._played(rows, samples, sampling, measured)
            sampled(episodes)
            kl = [0.0] * len(chosen) if is_reference else self._kl(self.passes, parts)
            to_teacher = self._kl(self.teacher, parts) if self.teacher and chosen else None
            per_token = perplexity(self.sampler, self.text) if self.text and not scores_only else None
            kl = dict(zip(chosen, kl, strict=True))
            self.latest = *given, episodes, logprobs, kl, to_teacher, per_token
        *_, episodes, logprobs, kl, to_teacher, per_token = self.latest
        found = self.rate(episodes, samples, lambda: logprobs)
        if chosen:
            found = replace(found, kl=as_array([kl.get(row) for row in range(len(episodes))], samples))
        if to_teacher is not None:  # of all completions, because it is a part of their scores
            to_teacher = as_array(to_teacher, samples)
            found = replace(found, teacher_kl=to_teacher, scores=np.nan_to_num(found.scores) - to_teacher)
        if per_token is None:
            return found
        bits = self._bits_per_byte(per_token) if "bits_per_byte" in self.units else None
        return replace(found, perplexity=per_token, bits_per_byte=bits)

    def _bits_per_byte(self, per_token: float) -> float | None:
        """Return the bits, those of EOS included, for each UTF-8 byte of the text; None if it has only EOS."""
        texts = self.tokenizer.batch_decode(
            self.text.completions, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        size = sum(len(text.encode()) for text in texts)
        return math.log2(per_token) * sum(map(len, self.text.completions)) / size if size else None

    @property
    def sampler(self) -> Sampler:
        """The sampler of the policy."""
        return self.player.sampler

    def start_completions(self, prompts: Sequence[Prompt]) -> list[Episode]:
        """Return one episode of each prompt, as an evaluation plays them."""
        return self._played(list(enumerate(prompts)))[0]

    def _played(
        self, rows: Numbered, samples: int = 1, sampling: SamplingSettings | None = None, measured: Sequence[int] = ()
    ) -> tuple[list[Episode], list[list[float]], list[Completions]]:
        """Play an episode of each row. Returns them, their log-probs (empty if no function reads them), and the
        `measured` ones as batches, with the masks of allowed tokens."""
        logprobs = []
        parts = []
        reads = any(functions.reads_logprobs for functions in (self.rewards, *self.judges))
        # detail 38: the numbers of update 0 (common random numbers). New ones would add noise to every comparison.
        episodes = self.player.started(rows, 0, self.purpose, samples)
        # a single allowed token would have log-prob 0: a KL of 0
        read = set(episodes) if reads else {episodes[row] for row in measured}
        masked = read if sampling is None or sampling.top_k != 1 else set()
        wanted = set(measured)
        with self.sampler.same_weights():
            self.player.play(episodes, sampling, masked)
            for call in self.sampler.calls(range(len(rows)), sampling):
                chosen = [episodes[row] for row in call if row in wanted]
                if chosen:
                    parts.append(self.player.completions(chosen))
                if reads:
                    logprobs += self.passes.token_logprobs(self.player.completions([episodes[row] for row in call]))
        for episode in masked:
            episode.allowed_tokens.clear()  # the batches have them
        if not self.keeps_graphs:  # a large model and the decoder's copy of it may not fit beside the log-probs
            self.sampler.free()
        release_gpu_cache()
        return episodes, logprobs, parts

    def _kl(self, passes: ForwardPasses, parts: Sequence[Completions]) -> list[float]:
        """Return the KL of each completion to the reference of `passes`, k1, nats/sequence; infinity if it is not a
        number."""
        kl = []
        for completions in parts:
            logprobs, ref_logprobs, _ = passes.logprobs(completions)
            kl += kl_k1(logprobs, ref_logprobs, completions.action_mask).sum(1).nan_to_num(math.inf, math.inf).tolist()
        return kl

    @timed("scoring")
    def rate(self, episodes: Sequence[Episode], samples: int, logprobs: Callable = not_known) -> Evaluation:
        """Score and rate episodes, `samples` of each prompt, prompt by prompt. KL and perplexity are None."""
        ended = [episode.ended for episode in episodes]
        given, *ratings = (
            functions.score(
                [episode.prompt for episode in episodes],
                [episode.text for episode in episodes],
                [episode.ids for episode in episodes],
                ended,
                samples,
                logprobs,
                episodes,
            )
            for functions in (self.rewards, *self.judges)
        )
        return Evaluation(
            texts=by_prompt([episode.shown for episode in episodes], samples),
            scores=as_array(given.total, samples),
            lengths=as_array([episode.actions for episode in episodes], samples),
            ended=as_array(ended, samples),
            judged={name: as_array(values, samples) for by in ratings for name, values in by.by_function.items()},
            extra={name: by_prompt(column, samples) for by in (given, *ratings) for name, column in by.extra.items()},
            functions=tuple(name for judge in self.judges if judge.kind == EVAL_FUNCTION for name in judge.names),
            units=self.units,
        )
