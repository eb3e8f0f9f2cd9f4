"""The one way from prompts to completions: training, evaluations, comparisons, chat, pairs and calibration use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.data.prompts import Prompt
from rlhf.models.budget import budget_of
from rlhf.models.device import autocast, free_and_warn
from rlhf.rollout.completions import Completions
from rlhf.rollout.continuous_batching import OutOfMemoryInCapture
from rlhf.rollout.engine import KeptBatcher, default_engine, free_copies, sample_completions
from rlhf.rollout.sampling import uniform_noise
from rlhf.rollout.stopping import StoppingCriterion, stopping_criterion
from rlhf.settings.training import SamplingSettings


@dataclass
class Sampler:
    """Samples completions of one policy with one of the project's engines.

    A completion depends on the policy's weights and on its random numbers only: those of (seed, update, purpose,
    episode).
    """

    policy: PreTrainedModel  # it must be in eval mode when it samples
    sampling: SamplingSettings
    eos: StoppingCriterion | int  # what ends a completion; a number is the id of EOS
    pad: int  # id of the pad token
    device: torch.device  # the policy's
    dtype: torch.dtype | None = None  # precision of autocast; None: that of the weights
    engine: str | None = None  # as in `sample_completions`
    slots: int = 0  # completions sampled at a time; 0: the device's default. An out-of-memory error halves them.
    longest_text: int = 0  # tokens of a prompt with its completion, for which the KV cache has room from the start

    def __post_init__(self):
        self.criterion = StoppingCriterion.of(self.eos)
        self.slots = self.slots or budget_of(self.device).rollout_slots
        self.kept = KeptBatcher(self.longest_text)

    @classmethod
    def of(
        cls,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingSettings,
        device: torch.device,
        **how: object,
    ) -> Sampler:
        """Return the sampler of completions that end at EOS of `tokenizer` or a stop string. `how`: other fields."""
        return cls(
            policy, sampling, stopping_criterion(tokenizer, sampling.stops), tokenizer.pad_token_id, device, **how
        )

    def criterion_of(self, sampling: SamplingSettings | None) -> StoppingCriterion:
        """Return what ends a completion with these settings; None: with the sampler's."""
        if sampling is None or sampling.stops == self.sampling.stops:
            return self.criterion
        return stopping_criterion(self.criterion.tokenizer, sampling.stops)

    @property
    def has_slots(self) -> bool:
        """True if the engine samples a number of completions at a time."""
        return "plain" not in (self.engine, default_engine(self.policy, self.device))

    def calls(self, rows: Sequence, sampling: SamplingSettings | None = None) -> list[Sequence]:
        """Return the rows to sample with one call each: all, or as many as there are slots if all of a call are in the
        cache together, or have masks of allowed tokens. `sampling` as in `sample`."""
        limited = not self.has_slots or (sampling or self.sampling).filters
        most = self.slots if limited else len(rows)
        return [rows[start : start + most] for start in range(0, len(rows), most)]

    def sample(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        update: int,
        purpose: str,
        episodes: Sequence[int] | None = None,
        first: Sequence[int] | None = None,
        sampling: SamplingSettings | None = None,
    ) -> Completions:
        """Sample one completion per prompt. Raises as `sample_completions` does.

        Args:
            prompts: B prompts.
            seed: seed of the random numbers.
            update: number of the update in the random numbers.
            purpose: name of the stream of random numbers, nothing else.
            episodes: number of each row in that stream; None: 0 to B - 1.
            first: index of the first random number of each row: its tokens so far in an episode; None: 0.
            sampling: settings for this call in place of the sampler's.
        """
        how = sampling or self.sampling
        numbers = range(len(prompts)) if episodes is None else episodes
        uniform = uniform_noise(seed, update, purpose, numbers, how.max_new_tokens, first)
        while True:
            used = min(self.slots, len(prompts))
            try:
                with autocast(self.device, self.dtype):
                    return sample_completions(
                        self.policy,
                        prompts,
                        uniform,
                        how,
                        eos=self.criterion_of(sampling),
                        pad=self.pad,
                        device=self.device,
                        engine=self.engine,
                        slots=self.slots,
                        kept=self.kept,
                    )
            except torch.OutOfMemoryError as error:
                if used == 1 or not self.has_slots or isinstance(error, OutOfMemoryInCapture):
                    raise
            self.slots = -(-used // 2)
            self.kept.slots = self.slots  # otherwise the next batcher would have the old number
            free_and_warn("sampling", f"rollout slots to {self.slots}", "The completions change by rounding only")

    def free(self) -> None:
        """Free what is kept between calls."""
        self.kept = KeptBatcher(self.kept.columns)

    @contextmanager
    def same_weights(self) -> Iterator[None]:
        """Context manager for several calls between which the weights do not change: the decoder copies them once."""
        self.kept.hold()
        try:
            yield
        finally:
            self.kept.release()
            free_copies(self.policy, self.device)
