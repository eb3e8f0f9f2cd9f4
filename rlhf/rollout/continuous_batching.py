"""Continuous batching: when completions end, waiting prompts take their slots."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.data.prompts import Prompt
from rlhf.models.logprobs import backbone_of, scaled_logits
from rlhf.models.packing import run_packed
from rlhf.rollout.kv_cache import DecodeLayout, SlotKVCache, pack_prompts
from rlhf.rollout.sampling import sample_tokens
from rlhf.settings.training import SamplingSettings
from rlhf.utils.errors import RLHFWarning

EOS_CHECK_EVERY = 4  # decoding steps between checks for ended completions; each check synchronizes with the GPU
KV_BLOCK = 64  # the number of cache columns that a step attends to is rounded up to a multiple of this


class ContinuousBatcher:
    """Samples B completions in S slots, one per slot at a time.

    The tensors that a decoding step reads and writes keep their memory addresses, so that the step can be a CUDA
    graph. After its completion has ended, a slot writes into the idle row (row B), which is never read, until the
    next check.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        prompts: Sequence[Prompt],
        uniform: Tensor,
        sampling: SamplingSettings,
        eos: int,
        slots: int,
        graph: bool,
    ):
        self.policy, self.prompts, self.sampling, self.eos = policy, prompts, sampling, eos
        self.device, self.length, self.graph = uniform.device, sampling.max_new_tokens, graph
        self.waiting = list(range(len(prompts)))[::-1]
        size, longest = slots, max(len(p.ids) for p in prompts)
        columns = longest + self.length
        self.cache = SlotKVCache(size, -(-columns // KV_BLOCK) * KV_BLOCK)
        self.idle_row = len(prompts)
        self.uniform = torch.cat([uniform, uniform[:1]])  # (B + 1, T)
        self.completions = torch.full((len(prompts) + 1, self.length), eos, device=self.device)
        self.allowed_tokens = None
        self.token, self.at, self.step = (torch.zeros(size, dtype=torch.long, device=self.device) for _ in range(3))
        self.row = torch.full((size,), self.idle_row, device=self.device)
        self.used = [0] * size  # upper bound of the filled columns per slot; Python ints, to avoid synchronizations
        self.captured: torch.cuda.CUDAGraph | None = None

    def run(self) -> tuple[Tensor, Tensor | None]:
        """Return completion ids (B, T) and the bit-packed masks of allowed tokens. Ignore both after the first EOS."""
        steps = 1 if self.device.type == "cpu" else EOS_CHECK_EVERY
        free = list(range(len(self.used)))
        while self.waiting or len(free) < len(self.used):
            if self.waiting and len(free) >= min(len(self.waiting), -(-len(self.used) // 4)):
                self.prefill(free)
            elif not self.waiting and len(free) >= len(self.used) / (2 if self.graph else 4):
                self.compact([s for s in range(len(self.used)) if s not in set(free)])
            for _ in range(steps):
                self.decode()
            free = [s for s, row in enumerate(self.row.tolist()) if row == self.idle_row]
            self.used = [0 if s in set(free) else used for s, used in enumerate(self.used)]
        return self.completions[:-1], None if self.allowed_tokens is None else self.allowed_tokens[:-1]

    def prefill(self, free: list[int]) -> None:
        """Fill free slots with waiting prompts: one packed forward pass over the distinct prompts, which also gives
        the first tokens."""
        taken = [self.waiting.pop() for _ in range(min(len(free), len(self.waiting)))]
        slots = free[: len(taken)]
        packed = pack_prompts([self.prompts[r].ids for r in taken], slots, self.device)
        self.cache.begin_prefill(packed.slots, packed.columns, packed.gather_index)
        hidden = run_packed(backbone_of(self.policy), packed.ids, packed.positions, packed.layout, self.cache)
        into = torch.tensor(slots, device=self.device)
        self.row[into] = torch.tensor(taken, device=self.device)
        self.step[into] = 0
        self.at[into] = packed.lengths
        for slot, row in zip(slots, taken, strict=True):
            self.used[slot] = len(self.prompts[row].ids)
        self.sample_next(hidden.index_select(0, packed.last), into)

    def decode(self) -> None:
        """Sample one token for every slot."""
        self.used = [used + 1 for used in self.used]
        if self.graph:
            self._replay()
        else:
            self._decode(min(-(-max(self.used) // KV_BLOCK) * KV_BLOCK, self.cache.columns))

    def _decode(self, span: int) -> None:
        self.cache.begin_decode(self.at, span)
        output = backbone_of(self.policy)(
            input_ids=self.token.unsqueeze(1),
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device),
            position_ids=self.at.unsqueeze(1),
            past_key_values=self.cache,
            use_cache=True,
            layout=DecodeLayout(self.at, span),
        )
        self.at.add_(1).clamp_(max=self.cache.columns - 1)
        self.sample_next(output.last_hidden_state[:, 0], slice(None))

    def sample_next(self, hidden: Tensor, slots: Tensor | slice) -> None:
        """Sample the next token of some slots from their hidden states (n, H)."""
        row, step = self.row[slots], self.step[slots]
        logits = scaled_logits(self.policy, hidden, self.sampling.temperature)
        token, allowed = sample_tokens(logits, self.uniform[row, step], self.sampling)
        if allowed is not None:
            if self.allowed_tokens is None:
                self.allowed_tokens = allowed.new_zeros(len(self.completions), self.length, allowed.shape[-1])
            self.allowed_tokens[row, step] = allowed
        self.completions[row, step] = token
        over = (token == self.eos) | (step + 1 >= self.length)
        self.token[slots] = token
        self.step[slots] = (step + 1).clamp(max=self.length - 1)
        self.row[slots] = torch.where(over, self.idle_row, row)

    def compact(self, live: list[int]) -> None:
        """Keep only the slots in `live`. Called when no prompt is waiting."""
        if not live:
            return
        kept = torch.tensor(live, device=self.device)
        self.token, self.at, self.step, self.row = (x[kept] for x in (self.token, self.at, self.step, self.row))
        self.used = [self.used[s] for s in live]
        self.cache.compact(kept)
        self.captured = None

    def _replay(self) -> None:
        """Run the decoding step as a CUDA graph, which is captured again after the number of slots changes."""
        if self.captured is None:
            self._decode(self.cache.columns)  # a warm-up selects kernels and allocates memory before the capture
            captured = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(captured):
                    self._decode(self.cache.columns)
            except RuntimeError as error:  # the model synchronizes with the GPU, or the driver has no CUDA graphs
                reason = str(error).splitlines()[0]
                warnings.warn(f"no CUDA graph ({reason}): decoding continues without one", RLHFWarning, stacklevel=2)
                self.graph = False
                return
            self.captured = captured  # the capture itself runs nothing; the warm-up was this step
        else:
            self.captured.replay()
