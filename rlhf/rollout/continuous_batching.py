"""Continuous batching: when completions end, waiting prompts take their slots."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.data.prompts import Prompt
from rlhf.models.logprobs import backbone_of, forward_dtype
from rlhf.models.packing import on_device, run_packed
from rlhf.rollout.choice import graph_slots
from rlhf.rollout.decoder import FusedDecoder, make_decoder
from rlhf.rollout.kv_cache import SlotKVCache, chosen_rows, pack_prompts
from rlhf.rollout.sampling import sample_tokens
from rlhf.rollout.stopping import CHECK_EVERY, StoppingCriterion
from rlhf.settings.training import SamplingSettings
from rlhf.utils.errors import RunError

# the number of cache columns that a step attends to is rounded up to a multiple of this, by device type
KV_BLOCK = {"cpu": 16, "cuda": 64}


class ContinuousBatcher:
    """Samples completions in slots, one per slot at a time.

    The tensors that a decoding step reads and writes keep their memory addresses, so that the step can be a CUDA
    graph, also of later rollouts. After its completion has ended, a slot writes into the idle row (row 0), which is
    never read, until the next check.
    """

    def __init__(
        self, policy: PreTrainedModel, device: torch.device, slots: int, columns: int, places: int, graph: bool
    ):
        """Make room for `slots` completions at a time, texts of `columns` tokens (prompt and completion), and `places`
        tokens: those of all completions, and of one more. `graph`: run the decoding step as a CUDA graph."""
        self.policy = policy
        self.device = device
        self.graph = graph
        self.places = places
        self.cache = SlotKVCache(slots, round_up(columns, device), static=graph)
        self.decoder = make_decoder(policy, slots, self.cache.columns, static=graph)
        self.uniform = torch.zeros(places, dtype=torch.float64, device=device)
        self.completions = torch.zeros(places, dtype=torch.long, device=device)
        self.allowed_tokens: Tensor | None = None  # (places, ceil(V / 8))
        # of each slot: its last token, the cache's next column, the place of its next token, and the place of
        # the last token that its completion may have
        self.whole = [torch.zeros(slots, dtype=torch.long, device=device) for _ in range(4)]
        self.captured: dict[tuple, torch.cuda.CUDAGraph] = {}  # by what a captured step cannot read from tensors

    def fits(self, policy: PreTrainedModel, slots: int, columns: int, places: int) -> bool:
        """True if there is room for a rollout of this size from this policy, in the present precision."""
        same = policy is self.policy and isinstance(self.decoder, FusedDecoder)
        large = len(self.whole[0]) >= slots and self.cache.columns >= columns and self.places >= places
        return same and large and self.decoder.dtype == forward_dtype(policy.get_input_embeddings().weight)

    @property
    def size(self) -> float:
        """Bytes of the cache, the decoder's weights and the masks. Infinity if captured graphs are not valid after the
        rollout, because autocast frees its copies of the weights of a model's own layers."""
        if not (self.graph and isinstance(self.decoder, FusedDecoder) and self.decoder.head is not None):
            return math.inf
        tensors = [*self.cache.whole.values(), *filter(None.__ne__, [self.allowed_tokens])]
        return self.decoder.size + sum(tensor.nbytes for tensor in tensors)

    def run(
        self, prompts: Sequence[Prompt], uniform: Tensor, sampling: SamplingSettings, criterion: StoppingCriterion,
        slots: int,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return completion ids (B, T) and the bit-packed masks of allowed tokens, for random numbers (B, T). Ignore
        both after the end. `slots` completions are sampled at a time."""
        self._start(prompts, uniform, sampling, criterion, slots)
        steps = 1 if self.device.type == "cpu" else CHECK_EVERY
        free = list(range(slots))
        while self.waiting or len(free) < len(self.used):
            if self.waiting and len(free) >= min(len(self.waiting), -(-len(self.used) // 4)):
                self.prefill(free)
            elif not self.waiting and len(free) >= len(self.used) / (2 if self.graph else 4):
                self.compact(free)
            for _ in range(steps):
                self.decode()
            if self.criterion.stop:
                self.free_stopped()
            free = [slot for slot, place in enumerate(self.place.tolist()) if place < self.length]
            for slot in free:
                self.used[slot] = 0
        end = (len(prompts) + 1) * self.length
        shape = (len(prompts), self.length)
        found = [self.completions, *([self.allowed_tokens] if sampling.filters else [])]
        found = [x[self.length : end].unflatten(0, shape) for x in found]
        found = [x.clone() for x in found] if self.graph else found  # a later rollout writes into the same tensors
        return found[0], found[1] if sampling.filters else None

    def _start(self, prompts, uniform: Tensor, sampling: SamplingSettings, criterion, slots: int) -> None:
        """Prepare for a rollout."""
        self.prompts = prompts
        self.sampling = sampling
        self.criterion = criterion
        self.length, self.waiting = sampling.max_new_tokens, list(range(len(prompts)))[::-1]
        self.cache.use(slots)
        self.token, self.at, self.place, self.last = (values[:slots].zero_() for values in self.whole)
        self.last += self.length - 1
        self.used = [0] * slots  # upper bound of the filled columns per slot; Python ints, to avoid synchronizations
        first = self.length
        end = (len(prompts) + 1) * self.length
        self.uniform[first:end].view(len(prompts), -1).copy_(uniform[:, : self.length])
        self.completions[:end].fill_(criterion.eos)

    def prefill(self, free: list[int]) -> None:
        """Fill free slots with waiting prompts: one packed forward pass over the distinct prompts, which also gives
        the first tokens."""
        taken = [self.waiting.pop() for _ in range(min(len(free), len(self.waiting)))]
        slots = free[: len(taken)]
        packed = pack_prompts([self.prompts[r].ids for r in taken], slots, self.device)
        self.cache.begin_prefill(packed.slots, packed.columns, packed.gather_index)
        hidden = run_packed(backbone_of(self.policy), packed.ids, packed.positions, packed.layout, self.cache)
        into, places = (on_device(self.device, np.array(x)) for x in (slots, [(r + 1) * self.length for r in taken]))
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
                self.allowed_tokens = allowed.new_zeros(self.places, allowed.shape[-1])
            self.allowed_tokens.index_copy_(0, place, allowed)
        self.completions.scatter_(0, place, token)
        over = self.criterion.is_eos(token).logical_or_(place == last)
        following = (place + 1).masked_fill_(over, 0)
        if slots is None:
            torch.clamp(token, max=logits.shape[-1] - 1, out=self.token)  # without a token: no index of an embedding
            self.place.copy_(following)
            self.last.masked_fill_(over, self.length - 1)
        else:
            self.token[slots], self.place[slots] = token.clamp(max=logits.shape[-1] - 1), following
            self.last[slots] = last.masked_fill_(over, self.length - 1)

    def free_stopped(self) -> None:
        """Free the slots whose completions contain a stop string."""
        back = torch.arange(-self.criterion.window, 0, device=self.device)
        tokens = self.completions.take((self.place.unsqueeze(1) + back).clamp(min=0)).tolist()
        rows = [(slot, place % self.length) for slot, place in enumerate(self.place.tolist()) if place >= self.length]
        stopped = [slot for slot, count in rows if self.criterion.found(tokens[slot][-count:])]
        if stopped:
            slots = on_device(self.device, np.array(stopped))
            self.place[slots], self.last[slots] = 0, self.length - 1

    def compact(self, free: list[int]) -> None:
        """Keep only the slots with a completion; for a graph as many slots as `graph_slots`. Called when no prompt is
        waiting."""
        live = sorted(set(range(len(self.used))) - set(free))
        size = graph_slots(len(live), len(self.used)) if self.graph else len(live)
        if size == len(self.used) or not live:
            return
        chosen = [*live, *free[: size - len(live)]]
        kept = on_device(self.device, np.array(chosen))
        state = self.token, self.at, self.place, self.last
        self.token, self.at, self.place, self.last = (chosen_rows(x, kept, 0, self.graph) for x in state)
        self.used = [self.used[s] for s in chosen]
        self.cache.compact(kept)

    def _replay(self, span: int) -> None:
        """Run the decoding step over `span` columns as a CUDA graph. It is captured at its first use.

        Raises RunError if it cannot be captured. The process cannot continue on the GPU: torch stays on the capture's
        stream, and its allocator still waits for the end of the capture.
        """
        how = self.sampling
        key = len(self.used), span, self.length, how.temperature, how.top_k, how.top_p, *self.criterion.eos_ids
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
                first.in_capture = True  # nothing may be sampled again: torch is still in the capture
                raise first from None
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
