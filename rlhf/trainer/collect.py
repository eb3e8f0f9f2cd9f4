"""From prompts to a scored rollout: sample completions, compute their log-probabilities, score them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.algorithms.normalizer import ScoreNormalizer
from rlhf.data.prompts import Prompt
from rlhf.distributed.group import agree
from rlhf.distributed.shares import by_group
from rlhf.models.device import autocast, autocast_dtype
from rlhf.models.reference import Reference
from rlhf.rewards.call import BadScore
from rlhf.rewards.rewards import Rewards
from rlhf.rollout.cached_forward import CachedForward
from rlhf.rollout.completions import Completions, ForwardPass, Rollout
from rlhf.rollout.engine import sample_completions
from rlhf.rollout.exchange import exchange_completions, exchange_logprobs
from rlhf.rollout.logprobs import compute_logprobs_and_values
from rlhf.rollout.sampling import uniform_noise
from rlhf.rollout.vllm import VLLMEngine
from rlhf.settings.training import Config
from rlhf.trainer.micro_batch import MicroBatchBudget
from rlhf.trainer.safety import SkipUpdate, check_finite
from rlhf.trainer.scores import Scores, score_tensor, shaped
from rlhf.trainer.trl_host import Host
from rlhf.utils.processes import rank, size
from rlhf.utils.system import release_gpu_cache


class RolloutCollector:
    """Collects rollouts with the current policy. Random numbers depend on (seed, update, purpose, episode) only."""

    def __init__(
        self,
        config: Config,
        host: Host,
        tokenizer: PreTrainedTokenizerBase,
        reference: Reference,
        rewards: Rewards,
        micro_batch_budget: MicroBatchBudget,
    ):
        self.config, self.host, self.tokenizer = config, host, tokenizer
        self.reference, self.rewards, self.micro_batch_budget = reference, rewards, micro_batch_budget
        self.device, self.sampling = host.accelerator.device, config.sampling
        self.dtype = autocast_dtype(config.model.bf16, self.device)
        self.normalizer = ScoreNormalizer(config.reward.score_ema) if config.reward.normalize_scores else None
        self.cached_forward = CachedForward()
        self.sampled_tokens = [0] * size()  # of completions, by process; counted if there are several
        self.vllm = None
        if config.speed.rollout_engine == "vllm":
            parts = (host.actor.policy, host.accelerator, tokenizer, self.sampling, config.data.prompt_length)
            self.vllm = VLLMEngine(*parts)

    def collect(self, episodes: Sequence[tuple[int, Prompt]], update: int, purpose: str = "rollout") -> Rollout:
        """Sample one completion per episode, and compute log-probs, reference log-probs and values.

        Args:
            episodes: (number of the episode in the run, prompt) of each completion.
            update: number of the update, from 1; 0 for evaluations.
            purpose: "rollout", "evaluate" or a draw of dynamic sampling; each has separate random numbers.
        """
        prompts = [prompt for _, prompt in episodes]
        release_gpu_cache()  # of the last update
        completions = self.sample(episodes, update, purpose)
        release_gpu_cache()  # of sampling
        logprobs, ref_logprobs, values = self.logprobs(completions, keep_forward=purpose == "rollout")
        return Rollout(completions, prompts, completions.texts(self.tokenizer), logprobs, ref_logprobs, values)

    def sample(self, episodes: Sequence[tuple[int, Prompt]], update: int, purpose: str) -> Completions:
        """Sample one completion per episode. Each process samples its share, and receives the others'."""
        if size() == 1:
            return self._sample(episodes, update, purpose)
        prompts = [prompt for _, prompt in episodes]
        shares = by_group([prompt.ids for prompt in prompts], size())
        rows = shares[rank()]
        own = agree(lambda: self._sample([episodes[row] for row in rows], update, purpose) if rows else None)
        length = self.sampling.max_new_tokens
        completions = exchange_completions(own, rows, prompts, self.tokenizer, length, self.device)
        for process, share in enumerate(shares):
            self.sampled_tokens[process] += sum(completions.completion_lengths[row] for row in share)
        return completions

    def _sample(self, episodes: Sequence[tuple[int, Prompt]], update: int, purpose: str) -> Completions:
        """Sample one completion per episode. Evaluations do not use vLLM: it has a separate random stream, and
        evaluations need the same random numbers every time."""
        prompts, length = [prompt for _, prompt in episodes], self.sampling.max_new_tokens
        uniform = uniform_noise(self.config.run.seed, update, purpose, [number for number, _ in episodes], length)
        tokens = {"eos": self.tokenizer.eos_token_id, "pad": self.tokenizer.pad_token_id, "device": self.device}
        self.host.model.eval()  # in train mode, gradient checkpointing disables the KV cache
        training = purpose != "evaluate"
        phase = "the rollout" if training else "an evaluation"
        with self.micro_batch_budget.raise_on_oom(phase), autocast(self.device, self.dtype):
            if self.vllm is not None and training:
                return self.vllm.sample(prompts, **tokens)
            speed = self.config.speed
            return sample_completions(
                self.host.actor.policy, prompts, uniform, self.sampling, **tokens, engine=speed.own_engine,
                slots=speed.rollout_slots,
            )  # fmt: skip

    def logprobs(self, completions: Completions, keep_forward: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute log-probs, reference log-probs and values of the completions, each (B, T).

        The computation is that of the loss, without dropout, in as many forward passes as the memory requires. With
        `keep_forward`, the pass is stored for the first optimizer step, if that step needs exactly the same pass.
        Each process computes its share, that of an optimizer step over all completions, and receives the others'.
        """
        self.host.model.eval()
        self.cached_forward.clear()
        rows = completions.shares(range(len(completions.mask)), size())[rank()]
        computed = agree(lambda: self._own_logprobs(completions, rows, keep_forward) if rows else None)
        return exchange_logprobs(computed, completions.mask) if size() > 1 else computed

    def _own_logprobs(
        self, completions: Completions, rows: Sequence[int], keep_forward: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute log-probs, reference log-probs and values of `rows`, as `logprobs` does; 0 in other rows."""
        if keep_forward and self.first_step_is_one_pass(completions, rows):
            try:
                return self._compute_logprobs(completions, rows, self.precompute_first_forward(completions, rows))
            except torch.OutOfMemoryError:  # without a stored graph the pass takes less memory
                self.cached_forward.clear()
        return self.micro_batch_budget.run_with_oom_retry(
            "computing log-probabilities", completions, lambda: self._compute_logprobs(completions, rows), rows
        )

    def first_step_is_one_pass(self, completions: Completions, rows: Sequence[int]) -> bool:
        """True if the first optimizer step is one forward pass over all of `rows`, without dropout."""
        batch, model = self.config.batch, self.config.model
        one_pass = batch.minibatches == 1 and len(self.micro_batch_budget.split(completions, rows)) == 1
        return one_pass and not model.gradient_checkpointing and not model.has_adapter_dropout

    def precompute_first_forward(self, completions: Completions, rows: Sequence[int]) -> ForwardPass:
        """Run the forward pass of the first optimizer step and store it. It needs a separate autocast context, so that
        autocast's cached bfloat16 weights keep their autograd graph."""
        (rows,) = self.micro_batch_budget.split(completions, rows)
        micro_batch = self.micro_batch_budget.micro_batch(completions, rows)
        with autocast(self.device, self.dtype):
            return self.cached_forward.store(completions, (micro_batch, self.host.actor.forward_backbone(micro_batch)))

    def _compute_logprobs(
        self, completions: Completions, rows: Sequence[int], cached_forward: ForwardPass | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        budget = self.micro_batch_budget
        limits = budget.max_rows, budget.packed, cached_forward, budget.max_tokens
        with autocast(self.device, self.dtype):
            return compute_logprobs_and_values(
                self.host.actor, self.reference, completions, self.sampling.temperature, *limits, rows
            )

    def score(self, rollout: Rollout, drawn_again: bool = False) -> Scores:
        """Score the completions. NaN marks a completion without a score. Raises SkipUpdate if a score is not finite.
        `drawn_again` as in `shaped`."""
        completions, reward = rollout.completions, self.config.reward
        try:
            with self.micro_batch_budget.raise_on_oom("scoring"):
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
