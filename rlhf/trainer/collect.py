"""From prompts to a scored rollout: sample completions, compute their log-probabilities, score them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from rlhf.algorithms.normalizer import ScoreNormalizer
from rlhf.data.prompts import Prompt
from rlhf.distributed.group import agree
from rlhf.distributed.shares import by_group
from rlhf.models.budget import budget_of
from rlhf.rewards.call import BadScore
from rlhf.rewards.rewards import Rewards
from rlhf.rollout.completions import Completions, Rollout
from rlhf.rollout.exchange import exchange_completions
from rlhf.rollout.sampler import Sampler
from rlhf.rollout.vllm import VLLMEngine
from rlhf.settings.training import Config, SamplingSettings
from rlhf.trainer.passes import ForwardPasses
from rlhf.trainer.progress import Progress
from rlhf.trainer.safety import SkipUpdate, check_finite
from rlhf.trainer.scores import Scores, score_tensor, shaped
from rlhf.trainer.trl_host import Host
from rlhf.utils.processes import rank
from rlhf.utils.system import release_gpu_cache


@dataclass
class RolloutCollector:
    """Collects rollouts with the current policy. Random numbers depend on (seed, update, purpose, episode) only."""

    config: Config
    host: Host
    tokenizer: PreTrainedTokenizerBase
    rewards: Rewards
    passes: ForwardPasses
    progress: Progress  # counts what is sampled for training
    longest_prompt: int = 0  # tokens of the run's longest prompt, for which the KV cache has room from the start

    def __post_init__(self):
        config = self.config
        reward = config.reward
        self.normalizer = ScoreNormalizer(reward.score_ema) if reward.normalize_scores else None
        accelerator = self.host.accelerator
        device = accelerator.device
        policy = self.host.actor.policy
        self.sampler = Sampler.of(
            policy,
            self.tokenizer,
            config.sampling,
            device,
            dtype=self.passes.dtype,
            engine=config.speed.own_engine,
            slots=budget_of(device, config).rollout_slots,
            longest_prompt=self.longest_prompt,
        )
        self.vllm = None
        if config.speed.rollout_engine == "vllm":
            self.vllm = VLLMEngine(policy, accelerator, self.tokenizer, config.sampling, config.data.prompt_length)

    def collect(
        self, episodes: Sequence[tuple[int, Prompt]], update: int, purpose: str = "rollout", keep_pass: bool = True
    ) -> Rollout:
        """Sample one completion per episode for training, and compute log-probs, reference log-probs and values.

        Args:
            episodes: (number of the episode in the run, prompt) of each completion.
            update: number of the update, from 1.
            purpose: name of the stream of random numbers: "rollout", or a draw of dynamic sampling.
            keep_pass: store the forward pass for the first optimizer step, if it is shared (`ForwardPasses`).
        """
        self.passes.clear()  # of the rollout whose groups are replaced: sampling needs its memory
        release_gpu_cache()  # of the last update
        completions = self._sample(self.vllm or self.sampler, episodes, update, purpose, "the rollout")
        self.progress.episodes += len(episodes)
        self.progress.completion_tokens += completions.tokens
        return self.with_logprobs(completions, [prompt for _, prompt in episodes], keep_pass)

    def sample_for_evaluation(
        self, episodes: Sequence[tuple[int, Prompt]], sampling: SamplingSettings | None = None
    ) -> Completions:
        """Sample one completion per episode with the same random numbers every time: those of update 0, and never with
        vLLM, which has a separate stream. `sampling`: other settings than those of training."""
        # detail 38: the numbers of update 0 (common random numbers). New ones would add noise to every comparison.
        completions = self._sample(self.sampler, episodes, 0, "evaluate", "an evaluation", sampling)
        if sampling is not None and sampling.top_k == 1:  # a single allowed token has log-prob 0, and a KL of 0
            return replace(completions, allowed_tokens=None)
        return completions

    def _sample(
        self,
        sampler: Sampler | VLLMEngine,
        episodes: Sequence[tuple[int, Prompt]],
        update: int,
        purpose: str,
        phase: str,
        sampling: SamplingSettings | None = None,
    ) -> Completions:
        """Sample one completion per episode. Each process samples its share, and receives the others'."""
        prompts = [prompt for _, prompt in episodes]
        rows = by_group([prompt.ids for prompt in prompts])[rank()]
        self.host.model.eval()  # in train mode, gradient checkpointing disables the KV cache

        def sample_share() -> Completions | None:
            own = [prompts[row] for row in rows]
            numbers = [episodes[row][0] for row in rows]
            with self.passes.raise_on_oom(phase):
                return sampler.sample(own, self.config.run.seed, update, purpose, numbers, sampling=sampling)

        share = agree(sample_share if rows else lambda: None)
        length = (sampling or self.config.sampling).max_new_tokens
        own = self.sampler
        return exchange_completions(share, rows, prompts, own.criterion, own.pad, length, own.device)

    def with_logprobs(self, completions: Completions, prompts: list[Prompt], keep_pass: bool = False) -> Rollout:
        """Return completions with their texts, log-probs at training's temperature, and values."""
        release_gpu_cache()  # of sampling
        texts = completions.texts(self.tokenizer)
        return Rollout(completions, prompts, texts, *self.passes.logprobs(completions, keep_pass))

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
