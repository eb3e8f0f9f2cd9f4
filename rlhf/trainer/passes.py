"""Forward passes over completions: micro-batches, smaller ones after an out-of-memory error, and the pass that the
rollout's log-probabilities share with the first optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from rlhf.distributed.shares import own_share
from rlhf.models import llama
from rlhf.models.actor_critic import Actor
from rlhf.models.attention import packable
from rlhf.models.budget import budget_of
from rlhf.models.cast_weights import CastWeights
from rlhf.models.device import autocast, free_and_warn
from rlhf.models.logprobs import base_of
from rlhf.models.packing import MicroBatch, PackedMicroBatch, PaddedMicroBatch
from rlhf.models.reference import Reference
from rlhf.rollout.completions import Completions, LogProbs
from rlhf.rollout.exchange import exchange_logprobs
from rlhf.utils.errors import RunError
from rlhf.utils.timing import timed

T = TypeVar("T")


def default_oom_hint() -> str:
    """Return the advice for a trainer that is used alone, and for an evaluation."""
    return "Halve --max-new-tokens, or train with --use-lora or --gradient-checkpointing"


class Pass(NamedTuple):
    """One forward pass of the actor's backbone."""

    micro_batch: MicroBatch
    # (M, H) the hidden states from which the M completion tokens are predicted; None: the reference scores them
    hidden: Tensor | None


@dataclass
class ForwardPasses:
    """Runs the policy and the reference over completions, in micro-batches that fit into memory.

    The split into micro-batches changes memory, not the result.
    """

    actor: Actor  # the policy, with the critic if there is one
    reference: Reference | None  # the frozen reference, or a teacher; None: `logprobs` cannot be called
    temperature: float  # of sampling; log-probabilities are computed at this temperature
    dtype: torch.dtype | None = None  # precision of the forward passes; None: float32
    packed: bool = True  # pack the completions, if the architecture supports it
    max_rows: int = 0  # largest number of completions in a forward pass; 0: no limit
    max_tokens: int = 0  # largest number of tokens in a forward pass; 0: that of the device's budget
    share_first: bool = False  # the first optimizer step uses all completions, in the forward pass of the rollout
    oom_hint: Callable[[], str] = default_oom_hint  # returns the advice at the end of an out-of-memory message

    def __post_init__(self):
        base = base_of(self.actor.policy)
        self.device = base.device
        self.packed = self.packed and packable(base)
        self.max_tokens = self.max_tokens or budget_of(base.device).tokens_per_micro_batch
        layers = llama.plain_weights(self.actor) if self.packed else ()
        self.weights = CastWeights([base.get_output_embeddings().weight, *layers], self.dtype)
        self._kept: tuple[Completions, Pass] | None = None

    @timed("log-probs")
    def logprobs(
        self,
        completions: Completions,
        keep_first: bool = False,
        reference_every: int = 1,
        rows: Sequence[int] | None = None,
    ) -> LogProbs:
        """Compute log-probs, reference log-probs and values of the completions, each (B, T). `reference_every` is the
        `every` of `reference_logprobs`. `rows` are those of the policy's pass, None: all; other log-probs are NaN.

        With `keep_first` and `share_first`, the pass is stored with its autograd graph for the first optimizer step,
        if all completions fit into one pass. Each process computes its share of the completions, that of an optimizer
        step over all of them, and receives the others'.
        """
        self.actor.eval()
        self.clear()
        # before the policy's pass, which may be stored
        reference = self.reference_logprobs(completions, reference_every)
        found = self.policy_logprobs(completions, keep_first, rows)
        return found._replace(logprobs=found.logprobs.to(reference.dtype), ref_logprobs=reference)

    def policy_logprobs(
        self, completions: Completions, keep_first: bool = False, rows: Sequence[int] | None = None
    ) -> LogProbs:
        """Compute log-probs and values of the completions, as `logprobs` does."""
        self.actor.eval()
        rows = range(len(completions.mask)) if rows is None else rows
        rows = [row for row in rows if completions.turns[row]]  # not greedy completions
        logprobs = torch.full(completions.mask.shape, torch.nan, device=self.device)
        if not rows:
            return LogProbs(logprobs)
        keep = keep_first and len(rows) == sum(map(bool, completions.turns))
        # detail 9: from the forward pass of training (this project). Decoding rounds differently: the first ratio is
        # not 1.
        _, own = own_share(completions.shares(rows), lambda share: self._own_logprobs(completions, share, keep))
        found = exchange_logprobs(own, completions.mask)
        logprobs = logprobs.to(found.logprobs.dtype)
        logprobs[rows] = found.logprobs[rows]
        return LogProbs(logprobs, values=found.values)

    def token_logprobs(self, completions: Completions) -> list[list[float]]:
        """Return the log-probs of each completion's tokens, nats, as lists; 0 at an environment's tokens."""
        found = self.policy_logprobs(completions).logprobs.tolist()
        return [row[:length] for row, length in zip(found, completions.completion_lengths, strict=True)]

    def reference_logprobs(self, completions: Completions, every: int = 1) -> Tensor:
        """Compute the reference's log-probs, (B, T), as `logprobs` does. If `every` is N, those of the rows 0, N, 2 N
        and so on; they are NaN in other rows."""
        work = partial(self.heads, completions)
        phase = f"computing the {self.reference.name}'s log-probabilities"

        def run(rows: Sequence[int]) -> Pass:
            return Pass(self.micro_batch(completions, rows), None)

        shares = completions.shares(range(0, len(completions.mask), every))
        _, own = own_share(shares, lambda rows: self.over(completions, rows, work, phase, run))
        found = exchange_logprobs(own, completions.mask).ref_logprobs
        whole = torch.full_like(found, torch.nan)
        whole[::every] = found[::every]
        return whole

    def _own_logprobs(self, completions: Completions, rows: Sequence[int], keep_first: bool) -> LogProbs:
        """Compute the log-probs of `rows`, as `logprobs` does. They are 0 in other rows."""
        parts = self.split(completions, rows)
        if keep_first and self.share_first and len(parts) == 1:
            try:
                # detail 10: also the first optimizer step's pass (this project). A second would only repeat it.
                self._kept = completions, self.run(completions, parts[0])
                return self.heads(completions, [self._kept[1]])
            except torch.OutOfMemoryError:  # without a stored graph the pass takes less memory
                self.clear()
        return self.over(completions, rows, partial(self.heads, completions), "computing log-probabilities")

    @torch.no_grad()
    def heads(self, completions: Completions, passes: Iterable[Pass]) -> LogProbs:
        """Compute the log-probs and values, or the reference's log-probs, of the passes' completions, each (B, T).
        They are 0 in other rows."""
        whole: LogProbs | None = None
        with autocast(self.device, self.dtype):
            for micro_batch, hidden in passes:
                allowed = completions.allowed_mask(micro_batch)
                if hidden is None:
                    found = LogProbs(ref_logprobs=self.reference.logprobs(micro_batch, self.temperature, allowed))
                else:
                    outputs = self.actor.forward_heads(
                        hidden.detach(), micro_batch.tokens, micro_batch.mask, self.temperature, allowed, "none"
                    )
                    found = LogProbs(outputs.logprobs, values=outputs.values)
                if whole is None:
                    whole = LogProbs(*(v if v is None else v.new_zeros(completions.mask.shape) for v in found))
                for into, new in zip(whole, found, strict=True):
                    if into is not None:
                        into.index_copy_(0, micro_batch.row_index, new)
        return whole

    def over(
        self,
        completions: Completions,
        rows: Sequence[int],
        work: Callable[[Iterator[Pass]], T],
        phase: str,
        run: Callable[[Sequence[int]], Pass] | None = None,
    ) -> T:
        """Return `work(passes)`. `passes` calls `run` over `rows`, one micro-batch at a time. None: it runs the
        actor's backbone.

        After an out-of-memory error, the micro-batch size is halved for the rest of the training run, and `work` is
        called again. Raises RunError if the micro-batches have only one completion. Messages contain `phase`, what
        `work` does.
        """
        run = run or (lambda part: self._pop(completions, part) or self.run(completions, part))
        while True:
            parts = self.split(completions, rows)
            try:
                return work(map(run, parts))
            except torch.OutOfMemoryError as error:
                reason = str(error).splitlines()[0]
            largest = max(map(len, parts))
            if largest == 1:
                raise RunError("out of memory with one completion at a time", f"{phase} ({reason})", self.oom_hint())
            self.max_rows = -(-largest // 2)
            free_and_warn(phase, f"micro-batch size to {self.max_rows}", "The optimizer steps do not change")

    def run(self, completions: Completions, rows: Sequence[int]) -> Pass:
        """Run the actor's backbone over one micro-batch, `rows`."""
        micro_batch = self.micro_batch(completions, rows)
        # a separate context: under no_grad, autocast would cache bfloat16 weights without their autograd graph
        with autocast(self.device, self.dtype):
            return Pass(micro_batch, self.actor.forward_backbone(micro_batch))

    def micro_batch(self, completions: Completions, rows: Sequence[int]) -> MicroBatch:
        """Return the micro-batch of `rows`."""
        return (PackedMicroBatch if self.packed else PaddedMicroBatch)(completions, rows)

    def _pop(self, completions: Completions, rows: Sequence[int]) -> Pass | None:
        """Return the stored pass if it covers exactly these rows, otherwise None. It is removed in either case: it is
        valid once, because the optimizer step changes the weights."""
        kept = self._kept
        self._kept = None
        valid = kept is not None and kept[0] is completions and kept[1].micro_batch.rows == rows
        return kept[1] if valid else None

    def clear(self) -> None:
        """Free the memory of the stored pass."""
        self._kept = None

    def split(self, completions: Completions, rows: Sequence[int]) -> list[list[int]]:
        """Split `rows` into micro-batches of completions with similar lengths; no micro-batch without rows.

        A row longer than `max_tokens` is a micro-batch alone. Completions of one prompt stay together if possible. If
        they are packed, their prompt counts once.
        """
        width = completions.prompt_ids.shape[1] + completions.completion_ids.shape[1]  # tokens per row if not packed
        prompts = completions.prompt_lengths
        lengths = completions.completion_lengths
        groups = completions.groups
        sizes = {r: prompts[r] + lengths[r] if self.packed else width for r in rows}
        longest: dict[int, int] = {}
        for r in rows:
            longest[groups[r]] = max(longest.get(groups[r], 0), sizes[r])
        parts = []
        tokens = 0
        for r in sorted(rows, key=lambda r: (longest[groups[r]], groups[r], r)):
            shared = self.packed and bool(parts) and groups[parts[-1][-1]] == groups[r]
            more = lengths[r] if shared else sizes[r]
            if not parts or len(parts[-1]) == self.max_rows or tokens + more > self.max_tokens:
                parts.append([])
                tokens = 0
                more = sizes[r]
            parts[-1].append(r)
            tokens += more
        return parts

    @contextmanager
    def raise_on_oom(self, phase: str) -> Iterator[None]:
        """Context manager for work that cannot be split. Raises RunError if it runs out of memory."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            place = f"{phase} ({str(error).splitlines()[0]})"
            raise RunError("out of memory", place, self.oom_hint()) from error.__cause__  # perhaps RaisedByAll
