"""Rollout engines: how replies are sampled, token by token. All algorithms and evaluations use the same ones.

`plain`  every row runs until the last has ended, over transformers' own cache: the twin that the others are tested on
`slots`  rows that have ended leave, waiting prompts take their slots, prompts run packed and once for all replies
`graph`  `slots` with its decoding step as one CUDA graph: a token costs one launch in place of a thousand

A token depends on its episode's random number and on the policy alone: these engines sample the same replies.
rlhf/rollout/vllm.py is another, with random numbers of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlhf.data.prompts import Prompt
from rlhf.models.attention import packable
from rlhf.models.budget import budget_of
from rlhf.models.logprobs import backbone_of, base_of, scaled_logits
from rlhf.rollout.completions import Completions, pad_prompts
from rlhf.rollout.continuous_batching import EOS_CHECK_EVERY, ContinuousBatcher
from rlhf.rollout.cpu_weights import prepacked_weights
from rlhf.rollout.sampling import sample_tokens
from rlhf.settings.training import SamplingSettings
from rlhf.utils.errors import UserError


@torch.no_grad()
def sample_completions(
    policy: PreTrainedModel,
    prompts: Sequence[Prompt],
    uniform: Tensor,
    sampling: SamplingSettings,
    *,
    eos: int,
    pad: int,
    device: torch.device,
    engine: str = "auto",
    slots: int = 0,
) -> Completions:
    """Sample one reply per prompt. `uniform` (B, max_new_tokens) in [0, 1): one random number per token.

    `slots` is the number of replies written at a time (0: as the device likes it). The policy must be in eval mode:
    with gradient checkpointing in train mode the cache is silently dropped.
    """
    uniform = uniform.to(device)
    if engine == "auto":
        engine = default_engine(policy, device)
    check_engine(engine, policy, device)
    if engine == "plain":
        completion_ids, allowed_tokens = _plain(policy, prompts, uniform, sampling, eos, pad)
    else:
        size = min(slots or budget_of(device).rollout_slots, len(prompts))
        with prepacked_weights(base_of(policy), size, device):
            completion_ids, allowed_tokens = ContinuousBatcher(
                policy, prompts, uniform, sampling, eos, size, engine == "graph"
            ).run()
    vocabulary = base_of(policy).get_input_embeddings().num_embeddings
    return Completions.of(
        prompts, completion_ids, eos=eos, pad=pad, vocabulary=vocabulary, allowed_tokens=allowed_tokens
    )


def default_engine(policy: PreTrainedModel, device: torch.device) -> str:
    """`graph` on a CUDA card, else `slots`; `plain` for an architecture whose attention cannot be exchanged."""
    if not packable(base_of(policy)):
        return "plain"
    return "graph" if device.type == "cuda" else "slots"


def check_engine(engine: str, policy: PreTrainedModel, device: torch.device) -> None:
    """Raises UserError for an engine that this model or device cannot have."""
    if engine == "graph" and device.type != "cuda":
        raise UserError("CUDA graphs require a CUDA GPU: --rollout-engine graph. Remove the flag")
    if engine in ("slots", "graph") and not packable(base_of(policy)):
        raise UserError(
            f"the attention of {type(base_of(policy)).__name__} cannot be replaced: --rollout-engine {engine}. "
            "Remove the flag"
        )


def _plain(policy, prompts, uniform: Tensor, sampling: SamplingSettings, eos: int, pad: int):
    device = uniform.device
    prompt_ids, prompt_mask = pad_prompts([p.ids for p in prompts], pad, device)
    (rows, context), length = prompt_ids.shape, sampling.max_new_tokens
    attention = torch.cat([prompt_mask, torch.ones(rows, length, dtype=torch.bool, device=device)], dim=1)
    positions = (prompt_mask.long().cumsum(1) - 1).clamp(min=0)
    completions = torch.full((rows, length), eos, device=device)
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    allowed_tokens: list[Tensor] = []
    cache, inputs, backbone = DynamicCache(config=policy.config), prompt_ids, backbone_of(policy)
    for t in range(length):
        output = backbone(
            input_ids=inputs,
            attention_mask=attention[:, : context + t],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        logits = scaled_logits(policy, output.last_hidden_state[:, -1], sampling.temperature)
        token, allowed = sample_tokens(logits, uniform[:, t], sampling)
        if allowed is not None:
            allowed_tokens.append(allowed)
        completions[:, t] = token
        done = done | (token == eos)
        if t % EOS_CHECK_EVERY == EOS_CHECK_EVERY - 1 and bool(done.all()):
            break
        inputs, positions = token.unsqueeze(1), positions[:, -1:] + 1
    return completions, torch.stack(allowed_tokens, dim=1) if allowed_tokens else None
