"""Rollout engines, which sample completions token by token. All algorithms and evaluations use them.

`plain`  all rows run until the last one has ended, with transformers' cache: the reference implementation in tests
`slots`  continuous batching: ended rows free their slots for waiting prompts; prompts are packed, and equal prompts
         run once
`graph`  `slots` with the decoding step as one CUDA graph: one launch per step instead of one per kernel

These engines sample the same completions, because a token depends only on the policy and on its episode's random
numbers. rlhf/rollout/vllm.py is another engine, with separate random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlhf.data.prompts import Prompt
from rlhf.models.attention import packable
from rlhf.models.budget import budget_of
from rlhf.models.device import installed
from rlhf.models.logprobs import backbone_of, base_of, scaled_logits
from rlhf.rollout.choice import KEPT_SHARE, check_engine, choose_engine, graph_slots
from rlhf.rollout.completions import Completions, pad_prompts
from rlhf.rollout.continuous_batching import ContinuousBatcher, round_up
from rlhf.rollout.cpu_weights import prepacked_weights
from rlhf.rollout.decoder import FusedDecoder, can_fuse
from rlhf.rollout.sampling import sample_tokens
from rlhf.rollout.stopping import CHECK_EVERY, StoppingCriterion
from rlhf.settings.training import SamplingSettings
from rlhf.utils.system import release_freed_memory

LARGE_MODEL = 2**24  # parameters; the copies of smaller models leave no gaps worth the time


class KeptBatcher:
    """Keeps from one call to the next what takes time to make: CUDA graphs with their decoder and KV cache, and from
    `hold` to `release` a decoder's copies of the weights."""

    def __init__(self, columns: int = 0):
        """`columns`: tokens of the longest text of the run; 0: unknown. Longer texts need new tensors and captures."""
        self.columns = columns
        self.places = 0
        self.slots = 0
        self.batcher: ContinuousBatcher | None = None  # with CUDA graphs
        self.held = False
        self.decoder: FusedDecoder | None = None  # has copies of the present weights

    def hold(self) -> None:
        """The weights do not change until `release`."""
        self.held = True

    def release(self) -> None:
        """The weights may change, so the copies are not used again."""
        self.held = False
        self.decoder = None

    def run(
        self, policy: PreTrainedModel, prompts: Sequence[Prompt], uniform: Tensor, sampling: SamplingSettings,
        criterion: StoppingCriterion, slots: int, graph: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Sample as `ContinuousBatcher.run`, with what is kept of the last call if it is large enough."""
        batcher = self.batcher
        held = self.decoder
        self.batcher = None  # after an error the cache may have NaN
        self.decoder = None
        columns = max(prompt.length(sampling.max_new_tokens) for prompt in prompts)
        places = (len(prompts) + 1) * sampling.max_new_tokens
        if graph or self.held:  # with room for the largest rollout so far, so that later ones need nothing new
            self.columns = columns = max(self.columns, columns)
        if graph:
            self.slots = max(self.slots, slots)
            self.places = max(self.places, places)
        if batcher is not None and batcher.fits(policy, slots, columns, places):
            if batcher.decoder is not held:
                batcher.decoder.load()  # the policy may have other weights
        else:
            del batcher  # its memory is needed, and that of a decoder that does not fit
            if graph or (held is not None and not held.fits(policy, round_up(columns, uniform.device))):
                held = None
            room = (self.slots, columns, self.places) if graph else (slots, columns, places)
            batcher = ContinuousBatcher(policy, uniform.device, *room, graph, held)
        found = batcher.run(prompts, uniform, sampling, criterion, slots)
        if graph and batcher.size <= KEPT_SHARE * installed(uniform.device):
            self.batcher = batcher
        # a decoder without its graphs cannot be used again, and would be in memory beside the next one
        usable = isinstance(batcher.decoder, FusedDecoder) and (not graph or self.batcher is not None)
        self.decoder = batcher.decoder if self.held and usable else None
        return found


@torch.no_grad()
def sample_completions(
    policy: PreTrainedModel,
    prompts: Sequence[Prompt],
    uniform: Tensor,
    sampling: SamplingSettings,
    *,
    eos: int | StoppingCriterion,
    pad: int,
    device: torch.device,
    engine: str | None = None,
    slots: int = 0,
    kept: KeptBatcher | None = None,
) -> Completions:
    """Sample one completion per prompt.

    The policy must be in eval mode, because gradient checkpointing in train mode disables the KV cache. Raises
    UserError if the model or the device does not support `engine`, BadLogits if a completion has logits with NaN or
    infinity, and RunError if the engine "graph" fails.

    Args:
        prompts: B prompts.
        uniform: (B, max_new_tokens) random numbers in [0, 1), one per token.
        eos: what ends a completion; a number is the id of EOS.
        pad: id of the pad token.
        engine: "plain", "slots", "graph" or "auto"; None: "auto" without CUDA graphs, for commands without
            --rollout-engine, because a graph that fails ends the command.
        slots: completions sampled at a time; 0: the default of the device.
        kept: of a caller that samples several times.
    """
    uniform = uniform.to(device)
    criterion = StoppingCriterion.of(eos)
    base = base_of(policy)
    engine = choose_engine(engine, packable(base), device)
    check_engine(engine, packable(base), type(base).__name__, device)
    if engine == "plain":
        completion_ids, allowed_tokens = _sample_plain(policy, prompts, uniform, sampling, criterion, pad)
    else:
        most = slots or budget_of(device).rollout_slots
        graph = engine == "graph"
        size = graph_slots(len(prompts), most) if graph else min(most, len(prompts))
        batcher = kept if kept is not None and (graph or kept.held) else KeptBatcher()
        with nullcontext() if can_fuse(policy) else prepacked_weights(base, size, device):
            completion_ids, allowed_tokens = batcher.run(policy, prompts, uniform, sampling, criterion, size, graph)
        if not batcher.held:
            free_copies(policy, device)
    vocabulary = base.get_input_embeddings().num_embeddings
    return Completions.of(
        prompts, completion_ids, eos=criterion, pad=pad, vocabulary=vocabulary, allowed_tokens=allowed_tokens
    )


def free_copies(policy: PreTrainedModel, device: torch.device) -> None:
    """Return the memory of a decoder's copies of the weights to the system."""
    if device.type == "cpu" and base_of(policy).num_parameters() > LARGE_MODEL:
        release_freed_memory()


def default_engine(policy: PreTrainedModel, device: torch.device) -> str:
    """Return the engine of a loaded model if none is set, as `choose_engine` does."""
    return choose_engine("auto", packable(base_of(policy)), device)


def _sample_plain(
    policy, prompts, uniform: Tensor, sampling: SamplingSettings, criterion: StoppingCriterion, pad: int
):
    device = uniform.device
    prompt_ids, prompt_mask = pad_prompts([p.ids for p in prompts], pad, device)
    rows, context = prompt_ids.shape
    length = sampling.max_new_tokens
    attention = torch.cat([prompt_mask, torch.ones(rows, length, dtype=torch.bool, device=device)], dim=1)
    positions = (prompt_mask.long().cumsum(1) - 1).clamp(min=0)
    completions = torch.full((rows, length), criterion.eos, device=device)
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    allowed_tokens: list[Tensor] = []
    cache = DynamicCache(config=policy.config)
    inputs = prompt_ids
    backbone = backbone_of(policy)
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
        done = done | criterion.is_eos(token)
        if t % CHECK_EVERY == CHECK_EVERY - 1:
            if criterion.stop:
                last = completions[:, max(0, t + 1 - criterion.window) : t + 1].tolist()
                done = done | torch.tensor([criterion.found(row) for row in last], device=device)
            if bool(done.all()):
                break
        inputs = token.clamp(max=logits.shape[-1] - 1).unsqueeze(1)
        positions = positions[:, -1:] + 1
    return completions, torch.stack(allowed_tokens, dim=1) if allowed_tokens else None
