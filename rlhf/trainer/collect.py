"""From prompts to a scored rollout: sample completions, compute their log-probabilities, score them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.algorithms.normalizer import ScoreNormalizer
from rlhf.data.prompts import Prompt
from rlhf.distributed.group import agree
from rlhf.distributed.shares import by_group
from rlhf.models.budget import budget_of
from rlhf.models.device import autocast
from rlhf.rewards.call import BadScore
from rlhf.rewards.rewards import Rewards
from rlhf.rollout.completions import Completions, Rollout
from rlhf.rollout.engine import KeptBatcher, default_engine, sample_completions
from rlhf.rollout.exchange import exchange_completions
from rlhf.rollout.sampling import uniform_noise
from rlhf.rollout.stopping import stopping_criterion
from rlhf.rollout.vllm import VLLMEngine
from rlhf.settings.training import Config, SamplingSettings
from rlhf.trainer.passes import ForwardPasses, free_and_warn
from rlhf.trainer.safety import SkipUpdate, check_finite
from rlhf.trainer.scores import Scores, score_tensor, shaped
from rlhf.trainer.trl_host import Host
from rlhf.utils.processes import rank
from rlhf.utils.system import release_gpu_cache


class RolloutCollector:
    """Collects rollouts with the current policy. Random numbers depend on (seed, update, purpose, episode) only."""

    def __init__(
        self,
        config: Config,
        host: Host,
        tokenizer: PreTrainedTokenizerBase,
        rewards: Rewards,
        passes: ForwardPasses,
        longest_prompt: int = 0,
    ):
        """`longest_prompt`: tokens of the run's longest prompt, for which the KV cache has room from the start."""
        self.config = config
        self.host = host
        self.tokenizer = tokenizer
        self.rewards = rewards
        self.passes = passes
        self.device = host.accelerator.device
        self.sampling = config.sampling
        self.normalizer = ScoreNormalizer(config.reward.score_ema) if config.reward.normalize_scores else None
        self.criterion = stopping_criterion(tokenizer, config.sampling.stops)
        self.kept = KeptBatcher(longest_prompt + config.sampling.max_new_tokens)
        self.slots = budget_of(self.device, config).rollout_slots  # half of them after an out-of-memory error
        self.vllm = None
        if config.speed.rollout_engine == "vllm":
            policy = host.actor.policy
            self.vllm = VLLMEngine(policy, host.accelerator, tokenizer, self.sampling, config.data.prompt_length)

    def collect(
        self,
        episodes: Sequence[tuple[int, Prompt]],
        update: int,
        purpose: str = "rollout",
        sampling: SamplingSettings | None = None,
    ) -> Rollout:
        """Sample one completion per episode, and compute log-probs, reference log-probs and values.

        Args:
            episodes: (number of the episode in the run, prompt) of each completion.
            update: number of the update, from 1; 0 for evaluations.
            purpose: "rollout", "evaluate" or a draw of dynamic sampling; each has separate random numbers.
            sampling: other settings than those of training. Log-probs are computed at training's temperature.
        """
        prompts = [prompt for _, prompt in episodes]
        self.passes.clear()  # of the rollout whose groups are replaced: sampling needs its memory
        release_gpu_cache()  # of the last update
        completions = self.sample(episodes, update, purpose, sampling)
        if sampling is not None and sampling.top_k == 1:  # a single allowed token has log-prob 0, and a KL of 0
            completions = replace(completions, allowed_tokens=None)
        release_gpu_cache()  # of sampling
        texts = completions.texts(self.tokenizer)
        return Rollout(completions, prompts, texts, *self.passes.logprobs(completions, purpose == "rollout"))

    def sample(
        self,
        episodes: Sequence[tuple[int, Prompt]],
        update: int,
        purpose: str,
        sampling: SamplingSettings | None = None,
    ) -> Completions:
        """Sample one completion per episode. Each process samples its share, and receives the others'."""
        prompts = [prompt for _, prompt in episodes]
        rows = by_group([prompt.ids for prompt in prompts])[rank()]
        share = [episodes[row] for row in rows]
        own = agree(lambda: self._sample(share, update, purpose, sampling or self.sampling) if share else None)
        pad = self.tokenizer.pad_token_id
        length = self.sampling.max_new_tokens
        return exchange_completions(own, rows, prompts, self.criterion, pad, length, self.device)

    def _sample(
        self, episodes: Sequence[tuple[int, Prompt]], update: int, purpose: str, sampling: SamplingSettings
    ) -> Completions:
        """Sample one completion per episode. Evaluations do not use vLLM: it has a separate random stream, and
        evaluations need the same random numbers every time."""
        prompts = [prompt for _, prompt in episodes]
        length = sampling.max_new_tokens
        uniform = uniform_noise(self.config.run.seed, update, purpose, [number for number, _ in episodes], length)
        self.host.model.eval()  # in train mode, gradient checkpointing disables the KV cache
        training = purpose != "evaluate"
        phase = "the rollout" if training else "an evaluation"
        with self.passes.raise_on_oom(phase), autocast(self.device, self.passes.dtype):
            if self.vllm is not None and training:
                return self.vllm.sample(prompts, self.tokenizer.pad_token_id, self.device)
            return self._sample_in_slots(prompts, uniform, sampling, phase)

    def _sample_in_slots(
        self, prompts: Sequence[Prompt], uniform: Tensor, sampling: SamplingSettings, phase: str
    ) -> Completions:
        """Sample with one of the project's engines. An out-of-memory error halves the slots for the rest of the
        training run, and all are sampled again, with the same random numbers. With one slot, with the engine "plain",
        and after a failed capture of a CUDA graph, the error is raised."""
        policy = self.host.actor.policy
        engine = self.config.speed.own_engine
        has_slots = "plain" not in (engine, default_engine(policy, self.device))
        while True:
            used = min(self.slots, len(prompts))
            try:
                return sample_completions(
                    policy,
                    prompts,
                    uniform,
                    sampling,
                    eos=self.criterion,
                    pad=self.tokenizer.pad_token_id,
                    device=self.device,
                    engine=engine,
                    slots=self.slots,
                    kept=self.kept,
                )
            except torch.OutOfMemoryError as error:
                if used == 1 or not has_slots or getattr(error, "in_capture", False):
                    raise
            self.slots = -(-used // 2)
            self.kept.slots = self.slots  # otherwise the next batcher would have the old number
            free_and_warn(phase, f"rollout slots to {self.slots}", "The completions change by rounding only")

    def score(self, rollout: Rollout, drawn_again: bool = False) -> Scores:
        """Score the completions. NaN marks a completion without a score. Raises SkipUpdate if a score is not finite.
        `drawn_again` as in `shaped`."""
        completions = rollout.completions
        reward = self.config.reward
        try:
            with self.passes.raise_on_oom("scoring"):
                given = self.rewards.score(
                    rollout.prompts, rollout.texts, completions.rows(), completions.ended.tolist()
                )
        except BadScore as error:
            raise SkipUpdate(str(error), by_score=True) from None
        raw = score_tensor(given.total, completions.ended.device)
        try:
            check_finite(scores=raw[[i for i, score in enumerate(given.total) if score is not None]])
        except SkipUpdate as found:  # a large float64 overflows in float32
            raise SkipUpdate(str(found), by_score=True) from None
        return Scores(
            raw=raw,
            shaped=shaped(raw, completions.ended, reward.missing_eos_penalty, self.normalizer, drawn_again),
            by_function=given.by_function,
            extra=given.extra,
            logged=given.metrics,
        )
