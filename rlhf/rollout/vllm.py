"""vLLM as a rollout engine, where it is installed (Linux): TRL's own wrapper, weights handed over before each rollout.

Its kernels are not those of the training forward, and its random numbers are a stream of its own: replies come with
the log-probs that they were sampled with, the loss is corrected for the gap, and a run does not repeat to the bit.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.data.prompts import Prompt
from rlhf.rollout.completions import Completions, padded
from rlhf.settings.training import SamplingSettings
from rlhf.utils.errors import UserError

MEMORY_SHARE = 0.3  # of the card: vLLM claims its share at once and keeps it


def is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def require_vllm() -> None:
    if not is_installed():
        raise UserError("vLLM is not installed: --rollout-engine vllm. Remove the flag, or run: pip install vllm")


class VLLMEngine:
    """Samples with vLLM in this process, beside the trainer."""

    def __init__(
        self,
        policy: PreTrainedModel,
        accelerator: Accelerator,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingSettings,
        prompt_length: int,
    ):
        """Raises UserError where vLLM is not installed."""
        require_vllm()
        from trl.generation.vllm_generation import VLLMGeneration

        self.vocabulary = policy.get_input_embeddings().num_embeddings
        self.generation = VLLMGeneration(
            policy,
            accelerator,
            tokenizer,
            gpu_memory_utilization=MEMORY_SHARE,
            max_model_length=prompt_length + sampling.max_new_tokens,
            temperature=sampling.temperature,
            max_completion_length=sampling.max_new_tokens,
            logprobs=0,  # of the sampled token alone
        )

    def sample(self, prompts: Sequence[Prompt], *, eos: int, pad: int, device: torch.device) -> Completions:
        """One reply per prompt, with the log-probs that vLLM sampled them with."""
        self.generation.sync_weights()
        _, rows, logprobs, _ = self.generation.generate([list(p.ids) for p in prompts], None, 1)
        sampled = padded([[step[0] for step in row] for row in logprobs], 0.0, device)
        return Completions.of(
            prompts,
            padded(rows, eos, device),
            eos=eos,
            pad=pad,
            vocabulary=self.vocabulary,
            sampled_logprobs=sampled,
        )
