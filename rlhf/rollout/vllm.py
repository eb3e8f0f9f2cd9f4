"""vLLM as a rollout engine, if it is installed (Linux). Uses TRL's wrapper; copies the weights before each rollout.

vLLM's kernels differ from those of the training forward pass. It therefore also returns the log-probs of its samples,
and the loss corrects the difference by importance weights. Its random numbers come from a separate stream, so runs are
not reproducible to the bit.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf.data.prompts import Prompt
from rlhf.models.budget import VLLM_MEMORY_SHARE
from rlhf.settings.training import SamplingSettings
from rlhf.utils.errors import UserError
from rlhf.utils.libraries import pip_install

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlhf.rollout.completions import Completions


def is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def require_vllm() -> None:
    if not is_installed():
        raise UserError(
            "vLLM is not installed", "--rollout-engine vllm", f"Remove the flag, or run: {pip_install('vllm')}"
        )


class VLLMEngine:
    """Samples with vLLM in the same process as the trainer."""

    def __init__(
        self,
        policy: PreTrainedModel,
        accelerator: Accelerator,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingSettings,
        prompt_length: int,
    ):
        """Raises UserError if vLLM is not installed."""
        require_vllm()
        from trl.generation.vllm_generation import VLLMGeneration

        from rlhf.rollout.stopping import stopping_criterion

        self.sampling = sampling
        self.pad = tokenizer.pad_token_id
        self.device = accelerator.device
        self.criterion = stopping_criterion(tokenizer, sampling.stops)
        self.vocabulary = policy.get_input_embeddings().num_embeddings
        self.generation = VLLMGeneration(
            policy,
            accelerator,
            tokenizer,
            gpu_memory_utilization=VLLM_MEMORY_SHARE,
            max_model_length=prompt_length + sampling.max_new_tokens,
            temperature=sampling.temperature,
            max_completion_length=sampling.max_new_tokens,
            logprobs=0,  # log-prob of the sampled token only
            # vLLM ends a completion at the same token, or later; Completions.of has the last word
            generation_kwargs={"stop": list(sampling.stops), "stop_token_ids": self.criterion.eos_ids},
        )

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
        """Sample one completion per prompt, as `Sampler.sample`, but with vLLM's own random numbers. The result
        includes vLLM's log-probs of the sampled tokens. Raises ValueError for what vLLM cannot be given per call."""
        from rlhf.rollout.completions import Completions, padded  # slow imports, which `require_vllm` does not need

        if any(first or ()) or sampling not in (None, self.sampling):
            raise ValueError("vLLM samples with the settings of the run, from the first token of an episode")
        self.generation.sync_weights()
        _, rows, logprobs, _ = self.generation.generate([list(p.ids) for p in prompts], None, 1)
        sampled = padded([[step[0] for step in row] for row in logprobs], 0.0, self.device)
        return Completions.of(
            prompts,
            padded(rows, self.criterion.eos, self.device),
            eos=self.criterion,
            pad=self.pad,
            vocabulary=self.vocabulary,
            sampled_logprobs=sampled,
        )
