"""Continuous batching: when completions end, waiting prompts take their slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.data.prompts import Prompt
from rlhf.models.logprobs import backbone_of
from rlhf.models.packing import on_device, run_packed
from rlhf.rollout.choice import graph_slots
from rlhf.rollout.decoder import Decoder, FusedDecoder, make_decoder
from rlhf.rollout.kv_cache import SlotKVCache, chosen_rows, pack_prompts
from rlhf.rollout.sampling import sample_tokens
from rlhf.rollout.stopping import CHECK_EVERY, StoppingCriterion
from rlhf.settings.training import SamplingSettings
from rlhf.utils.errors import RunError
from rlhf.utils.timing import timed

# the number of cache columns that a step attends to is rounded up to a multiple of this, by device type
KV_BLOCK = {"cpu": 16, "cuda": 64}


class OutOfMemoryInCapture(torch.OutOfMemoryError):
    """Nothing can be sampled again after this error: torch is still in the capture of the CUDA graph."""


@dataclass(frozen=True)
class Slots:
    """What a decoding step reads and changes of S slots, (S,) int64 each.

    A place is an index of the flat tensor of completions. An idle slot has a place in row 0, which is never read.
    """

    token: Tensor  # the slot's newest token, which the next step runs through the model
    column: Tensor  # where the cache stores the keys and values of that token; also its position
    place: Tensor  # of the token that is sampled next
    last: Tensor  # the place of the last token that the completion may have

    @classmethod
    def zeros(cls, count: int, device: torch.device) -> Slots:
        """Return `count` slots with separate tensors of zeros."""
        return cls(*(torch.zeros(count, dtype=torch.long, device=device) for _ in range(4)))

    def first(self, count: int) -> Slots:
        """Return the first `count` slots, in the same memory."""
        return Slots(self.token[:count], self.column[:count], self.place[:count], self.last[:count])

    def chosen(self, rows: Tensor, static: bool) -> Slots:
        """Return these slots; `static` as in `chosen_rows`."""
        return Slots(
            token=chosen_rows(self.token, rows, 0, static),
            column=chosen_rows(self.column, rows, 0, static),
            place=chosen_rows(self.place, rows, 0, static),
            last=chosen_rows(self.last, rows, 0, static),
        )

    def put(self, rows: Tensor, others: Slots) -> None:
        """Replace these slots by others."""
        self.token[rows] = others.token
        self.column[rows] = others.column
        self.place[rows] = others.place
        self.last[rows] = others.last


class ContinuousBatcher:
    """Samples completions in slots, one per slot at a time.

    The tensors that a decoding step reads and writes keep their memory addresses, so that the step can be a CUDA
    graph, also of later rollouts. After its completion has ended, a slot is idle until the next check.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        device: torch.device,
        slots: int,
        columns: int,
        places: int,
        graph: bool,
        decoder: Decoder | None = None,
    ):
        """
        Args:
            policy: the policy.
            device: its device.
            slots: completions at a time.
            columns: tokens of the longest text, prompt and completion.
            places: tokens of all completions, and of one more.
            graph: run the decoding step as a CUDA graph.
            decoder: has the policy's present weights, and at least as many columns; None: they are copied.
        """
        self.policy = policy
        self.device = device
        self.graph = graph
        self.places = places
        self.cache = SlotKVCache(slots, round_up(columns, device), static=graph)
        self.decoder = decoder or make_decoder(policy, slots, self.cache.columns, static=graph)
        self.uniform = torch.zeros(places, dtype=torch.float64, device=device)
        self.completions = torch.zeros(places, dtype=torch.long, device=device)
        self.allowed_tokens: Tensor | None = None  # (places, ceil(V / 8))
        self.all_slots = Slots.zeros(slots, device)
        self.slots = self.all_slots  # those that this rollout still uses
        self.captured: dict[tuple, torch.cuda.CUDAGraph] = {}  # by what a captured step cannot read from tensors

    def fits(self, policy: PreTrainedModel, slots: int, columns: int, places: int) -> bool:
        """True if there is room for a rollout of this size from this policy, in the present precision."""
        if slots > len(self.all_slots.place) or columns > self.cache.columns or places > self.places:
            return False
        return isinstance(self.decoder, FusedDecoder) and self.decoder.fits(policy, columns)

    @property
    def size(self) -> float:
        """Bytes of the cache, the decoder's weights and the masks. Infinity if captured graphs are not valid after the
        rollout, because autocast frees its copies of the weights of a model's own layers."""
        if not (self.graph and isinstance(self.decoder, FusedDecoder) and self.decoder.head is not None):
            return math.inf
        size = self.decoder.size + sum(tensor.nbytes for tensor in self.cache.whole.values())
        if self.allowed_tokens is not None:
            size += self.allowed_tokens.nbytes
        return size

    def run(
        self, prompts: Sequence[Prompt], uniform: Tensor, sampling: SamplingSettings, criterion: StoppingCriterion,
        slots: int,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return completion ids (B, T) and the bit-packed masks of allowed tokens, for random numbers (B, T). Ignore
        both after the end. `slots` completions are sampled at a time."""
        self._start(prompts, uniform, sampling, criterion, slots)
        # each check for free slots waits for the device, so that a GPU makes several steps between two of them
        steps = 1 if self.device.type == "cpu" else CHECK_EVERY
        free = list(range(slots))
        while self.waiting or len(free) < len(self.used):
            self._use_free(free)
            for _ in range(steps):
                self.decode()
            if self.criterion.stop:
                self.free_stopped()
            free = [slot for slot, place in enumerate(self.slots.place.tolist()) if place < self.length]
            for slot in free:
                self.used[slot] = 0
        allowed = self._sampled(self.allowed_tokens) if sampling.filters else None
        return self._sampled(self.completions), allowed

    def _start(self, prompts, uniform: Tensor, sampling: SamplingSettings, criterion, slots: int) -> None:
        """Prepare for a rollout: all slots are idle, and all prompts wait."""
        self.prompts = prompts
        self.sampling = sampling
        self.criterion = criterion
        self.length = sampling.max_new_tokens
        self.waiting = list(range(len(prompts)))[::-1]  # numbers of the prompts; the last one is the next
        self.cache.use(slots)
        self.slots = self.all_slots.first(slots)
        self.slots.token.zero_()
        self.slots.column.zero_()
        self.slots.place.zero_()
        self.slots.last.fill_(self.length - 1)
        self.used = [0] * slots  # upper bound of the filled columns per slot; Python ints, to avoid synchronizations
        first = self.length  # row 0 is that of idle slots
        end = (len(prompts) + 1) * self.length
        self.uniform[first:end].view(len(prompts), -1).copy_(uniform[:, : self.length])
        self.completions[:end].fill_(criterion.eos)

    def _sampled(self, stored: Tensor) -> Tensor:
        """Return what is stored for the prompts' completions, (B, T, ...)."""
        count = len(self.prompts)
        rows = stored[self.length : (count + 1) * self.length].unflatten(0, (count, self.length))
        return rows.clone() if self.graph else rows  # a later rollout writes into the same tensors

    def _use_free(self, free: list[int]) -> None:
        """Fill the free slots with waiting prompts, or if none waits, drop them. Both cost time, so it is done only if
        there are enough of them: a quarter of the slots, or half of them before a graph with fewer slots replaces the
        present one."""
        if self.waiting:
            if len(free) >= min(len(self.waiting), -(-len(self.used) // 4)):
                self.prefill(free)
        elif len(free) >= len(self.used) / (2 if self.graph else 4):
            self.compact(free)

    @timed("reading")
    def prefill(self, free: list[int]) -> None:
        """Fill free slots with waiting prompts: one packed forward pass over the distinct prompts, which also gives
        the first tokens."""
        count = min(len(free), len(self.waiting))
        rows = [self.waiting.pop() for _ in range(count)]
        filled = free[:count]
        packed = pack_prompts([self.prompts[row].ids for row in rows], filled, self.device)
        self.cache.prompts = packed
        hidden = run_packed(backbone_of(self.policy), packed.ids, packed.positions, packed.layout, self.cache)
        place = on_device(self.device, np.array([(row + 1) * self.length for row in rows]))
        own = [self.prompts[row] for row in rows]
        most = on_device(self.device, np.array([prompt.length(self.length) - len(prompt.ids) for prompt in own]))
        started = Slots(torch.empty_like(place), packed.lengths, place, place + most - 1)
        self._sample_next(hidden.index_select(0, packed.last), started)
        self.slots.put(on_device(self.device, np.array(filled)), started)
        for slot, row in zip(filled, rows, strict=True):
            self.used[slot] = len(self.prompts[row].ids)

    def decode(self) -> None:
        """Sample one token for every slot."""
        self.used = [used + 1 for used in self.used]
        needed = min(round_up(max(self.used), self.device), self.cache.columns)
        if self.graph:
            self._replay(graph_span(needed, self.cache.columns))
        else:
            self._decode(needed)

    def _decode(self, span: int) -> None:
        """Run every slot's newest token through the model, and sample the next one. The first `span` columns of the
        cache are attended to."""
        slots = self.slots
        hidden = self.decoder.hidden(slots.token, slots.column, span, self.cache)
        slots.column.add_(1).clamp_(max=self.cache.columns - 1)  # an idle slot stays within the cache
        self._sample_next(hidden, slots)

    def _sample_next(self, hidden: Tensor, slots: Slots) -> None:
        """Sample the next token of each slot from its hidden state (S, H), store it, and advance the slots in place.
        Slots whose completion has ended become idle."""
        logits = self.decoder.logits(hidden, self.sampling.temperature)
        token, allowed = sample_tokens(logits, self.uniform.take(slots.place), self.sampling)
        if allowed is not None:
            if self.allowed_tokens is None:
                self.allowed_tokens = allowed.new_zeros(self.places, allowed.shape[-1])
            self.allowed_tokens.index_copy_(0, slots.place, allowed)
        self.completions.scatter_(0, slots.place, token)
        ended = self.criterion.is_eos(token).logical_or_(slots.place == slots.last)
        torch.clamp(token, max=logits.shape[-1] - 1, out=slots.token)  # without a token: no index of an embedding
        slots.place.add_(1).masked_fill_(ended, 0)
        slots.last.masked_fill_(ended, self.length - 1)

    def free_stopped(self) -> None:
        """Free the slots whose completions contain a stop string."""
        # the newest tokens of every slot; those before the first token of a completion are cut off below
        back = torch.arange(-self.criterion.window, 0, device=self.device)
        tokens = self.completions.take((self.slots.place.unsqueeze(1) + back).clamp(min=0)).tolist()
        stopped = []
        for slot, place in enumerate(self.slots.place.tolist()):
            if place < self.length:  # idle
                continue
            count = place % self.length  # of the completion's tokens
            if self.criterion.found(tokens[slot][-count:]):
                stopped.append(slot)
        if stopped:
            rows = on_device(self.device, np.array(stopped))
            self.slots.place[rows] = 0
            self.slots.last[rows] = self.length - 1

    def compact(self, free: list[int]) -> None:
        """Keep only the slots with a completion; for a graph as many slots as `graph_slots`. Called when no prompt is
        waiting."""
        live = sorted(set(range(len(self.used))) - set(free))
        size = graph_slots(len(live), len(self.used)) if self.graph else len(live)
        if size == len(self.used) or not live:
            return
        kept = [*live, *free[: size - len(live)]]
        rows = on_device(self.device, np.array(kept))
        self.slots = self.slots.chosen(rows, self.graph)
        self.used = [self.used[slot] for slot in kept]
        self.cache.compact(rows)

    def _replay(self, span: int) -> None:
        """Run the decoding step over `span` columns as a CUDA graph. It is captured at its first use.

        Raises RunError if it cannot be captured. The process cannot continue on the GPU: torch stays on the capture's
        stream, and its allocator still waits for the end of the capture.
        """
        how = self.sampling
        limits = how.temperature, how.top_k, how.top_p
        key = len(self.used), span, self.length, *limits, *self.criterion.eos_ids
        if key in self.captured:
            return self.captured[key].replay()
        self._decode(span)  # a warm-up selects kernels and allocates memory before the capture; it is this step
        captured = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other in self.captured.values()), None)  # one pool of memory for all graphs
        try:
            with torch.cuda.graph(captured, pool=pool):
                self._decode(span)
        except RuntimeError as error:  # the model synchronizes with the GPU, or the driver has no CUDA graphs
            first = error.__context__ or error  # the end of a failed capture raises an error of its own
            if isinstance(first, torch.OutOfMemoryError):
                raise OutOfMemoryInCapture(str(first)) from None
            raise RunError(
                (f"the decoding step cannot be captured as a CUDA graph ({str(first).splitlines()[0]:.200})"),
                "--rollout-engine graph",
                "Use --rollout-engine slots; to resume a run, add --resume --resume-anyway",
            ) from None
        self.captured[key] = captured  # the capture itself runs nothing
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
