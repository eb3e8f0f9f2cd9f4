"""Continuous batching: when completions end, waiting prompts take their slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.data.prompts import Prompt
from rlhf.models.logprobs import backbone_of
from rlhf.models.packing import on_device, run_packed
from rlhf.rollout.decoder import make_decoder
from rlhf.rollout.kv_cache import SlotKVCache, pack_prompts
from rlhf.rollout.sampling import sample_tokens
from rlhf.rollout.stopping import CHECK_EVERY, StoppingCriterion
from rlhf.settings.training import SamplingSettings
from rlhf.utils.errors import RunError

# the number of cache columns that a step attends to is rounded up to a multiple of this, by device type
KV_BLOCK = {"cpu": 16, "cuda": 64}


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
        criterion: StoppingCriterion,
        slots: int,
        graph: bool,
    ):
        self.policy, self.prompts, self.sampling, self.criterion = policy, prompts, sampling, criterion
        self.device, self.length, self.graph = uniform.device, sampling.max_new_tokens, graph
        self.waiting = list(range(len(prompts)))[::-1]
        columns = max(len(p.ids) for p in prompts) + self.length
        self.cache = SlotKVCache(slots, round_up(columns, self.device))
        self.decoder = make_decoder(policy, slots, self.cache.columns)
        self.uniform = torch.cat([uniform, uniform[:1]])[:, : self.length].contiguous()  # (B + 1, T)
        self.completions = torch.full((len(prompts) + 1, self.length), criterion.eos, device=self.device)
        self.allowed_tokens: Tensor | None = None  # (B + 1, T, ceil(V / 8))
        self.idle = len(prompts) * self.length  # place of the idle row's first token
        # of each slot: its last token, the cache's next column, the place of its next token in the flat (B + 1, T)
        # tensors, and the place of the last token that its completion may have
        self.token, self.at, self.place = (torch.zeros(slots, dtype=torch.long, device=self.device) for _ in range(3))
        self.place += self.idle
        self.last = self.place + self.length - 1
        self.used = [0] * slots  # upper bound of the filled columns per slot; Python ints, to avoid synchronizations
        self.captured: dict[int, torch.cuda.CUDAGraph] = {}  # by the number of columns that are attended to

    def run(self) -> tuple[Tensor, Tensor | None]:
        """Return completion ids (B, T) and the bit-packed masks of allowed tokens. Ignore both after the end."""
        steps = 1 if self.device.type == "cpu" else CHECK_EVERY
        free = list(range(len(self.used)))
        while self.waiting or len(free) < len(self.used):
            if self.waiting and len(free) >= min(len(self.waiting), -(-len(self.used) // 4)):
                self.prefill(free)
            elif not self.waiting and len(free) >= len(self.used) / (2 if self.graph else 4):
                self.compact(sorted(set(range(len(self.used))) - set(free)))
            for _ in range(steps):
                self.decode()
            if self.criterion.stop:
                self.free_stopped()
            free = [slot for slot, place in enumerate(self.place.tolist()) if place >= self.idle]
            for slot in free:
                self.used[slot] = 0
        return self.completions[:-1], None if self.allowed_tokens is None else self.allowed_tokens[:-1]

    def prefill(self, free: list[int]) -> None:
        """Fill free slots with waiting prompts: one packed forward pass over the distinct prompts, which also gives
        the first tokens."""
        taken = [self.waiting.pop() for _ in range(min(len(free), len(self.waiting)))]
        slots = free[: len(taken)]
        packed = pack_prompts([self.prompts[r].ids for r in taken], slots, self.device)
        self.cache.begin_prefill(packed.slots, packed.columns, packed.gather_index)
        hidden = run_packed(backbone_of(self.policy), packed.ids, packed.positions, packed.layout, self.cache)
        into, places = on_device(self.device, np.array(slots)), on_device(self.device, np.array(taken) * self.length)
        self.place[into], self.last[into] = places, places + self.length - 1
        self.at[into] = packed.lengths
        for slot, row in zip(slots, taken, strict=True):
            self.used[slot] = len(self.prompts[row].ids)
        self.sample_next(hidden.index_select(0, packed.last), into)

    def decode(self) -> None:
        """Sample one token for every slot."""
        self.used = [used + 1 for used in self.used]
        needed = min(round_up(max(self.used), self.device), self.cache.columns)
        if self.graph:
            self._replay(graph_span(needed, self.cache.columns))
        else:
            self._decode(needed)

    def _decode(self, span: int) -> None:
        hidden = self.decoder.hidden(self.token, self.at, span, self.cache)
        self.at.add_(1).clamp_(max=self.cache.columns - 1)
        self.sample_next(hidden, None)

    def sample_next(self, hidden: Tensor, slots: Tensor | None) -> None:
        """Sample the next token of some slots (None: all) from their hidden states (n, H)."""
        place, last = (self.place, self.last) if slots is None else (self.place[slots], self.last[slots])
        logits = self.decoder.logits(hidden, self.sampling.temperature)
        token, allowed = sample_tokens(logits, self.uniform.take(place), self.sampling)
        if allowed is not None:
            if self.allowed_tokens is None:
                self.allowed_tokens = allowed.new_zeros(*self.completions.shape, allowed.shape[-1])
            self.allowed_tokens.view(-1, allowed.shape[-1]).index_copy_(0, place, allowed)
        self.completions.view(-1).scatter_(0, place, token)
        over = self.criterion.is_eos(token).logical_or_(place == last)
        following = (place + 1).masked_fill_(over, self.idle)
        if slots is None:
            torch.clamp(token, max=logits.shape[-1] - 1, out=self.token)  # without a token: no index of an embedding
            self.place.copy_(following)
            self.last.masked_fill_(over, self.idle + self.length - 1)
        else:
            self.token[slots], self.place[slots] = token.clamp(max=logits.shape[-1] - 1), following
            self.last[slots] = last.masked_fill_(over, self.idle + self.length - 1)

    def free_stopped(self) -> None:
        """Free the slots whose completions contain a stop string."""
        back = torch.arange(-self.criterion.window, 0, device=self.device)
        tokens = self.completions.view(-1).take((self.place.unsqueeze(1) + back).clamp(min=0)).tolist()
        rows = [(slot, place % self.length) for slot, place in enumerate(self.place.tolist()) if place < self.idle]
        stopped = [slot for slot, count in rows if self.criterion.found(tokens[slot][-count:])]
        if stopped:
            slots = on_device(self.device, np.array(stopped))
            self.place[slots], self.last[slots] = self.idle, self.idle + self.length - 1

    def compact(self, live: list[int]) -> None:
        """Keep only the slots in `live`. Called when no prompt is waiting."""
        if not live:
            return
        kept = on_device(self.device, np.array(live))
        self.token, self.at, self.place, self.last = (x[kept] for x in (self.token, self.at, self.place, self.last))
        self.used = [self.used[s] for s in live]
        self.cache.compact(kept)
        self.captured.clear()

    def _replay(self, span: int) -> None:
        """Run the decoding step over `span` columns as a CUDA graph. It is captured at its first use, and again after
        the number of slots changes.

        Raises RunError if it cannot be captured. The process cannot continue on the GPU: torch stays on the capture's
        stream, and its allocator still waits for the end of the capture.
        """
        if span in self.captured:
            return self.captured[span].replay()
        self._decode(span)  # a warm-up selects kernels and allocates memory before the capture; it is this step
        captured = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other in self.captured.values()), None)  # one pool of memory for all graphs
        try:
            with torch.cuda.graph(captured, pool=pool):
                self._decode(span)
        except RuntimeError as error:  # the model synchronizes with the GPU, or the driver has no CUDA graphs
            first = error.__context__ or error  # the end of a failed capture raises an error of its own
            if isinstance(first, torch.OutOfMemoryError):
                first.in_capture = True  # it must not be handled
                raise first from None
            raise RunError(
                f"the decoding step cannot be captured as a CUDA graph ({str(first).splitlines()[0]:.200}): "
                "--rollout-engine graph. Use --rollout-engine slots; to resume a run, add --resume --resume-anyway"
            ) from None
        self.captured[span] = captured  # the capture itself runs nothing
        return None


def round_up(columns: int, device: torch.device) -> int:
    """Return a number of cache columns, rounded up to whole blocks."""
    block = KV_BLOCK.get(device.type, KV_BLOCK["cuda"])
    return -(-columns // block) * block


def graph_span(needed: int, columns: int) -> int:
    """Return how many columns a captured step attends to: `needed`, rounded up to a quarter, half or three quarters of
    all `columns`, or to all. More sizes would need more captures than they save."""
    quarter = -(-columns // 4)
    return min(-(-needed // quarter) * quarter, columns)
