"""Rollout engines: how replies are sampled, token by token. PPO, GRPO and evaluation use the same ones.

`plain`  every row runs until the last has ended, over transformers' own cache: the twin that the others are tested on
`slots`  rows that have ended leave, waiting prompts take their slots, prompts run packed and once for all replies
`graph`  `slots` with its decoding step as one CUDA graph: a token costs one launch in place of a thousand

A token depends on its episode's random number and on the policy alone: these engines sample the same replies.
rlhf/vllm_engine.py is another, with random numbers of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from config import SamplingSettings
from rlhf.data.prompts import Prompt
from rlhf.decoding import DecodeLayout, SlotCache, blocked_weights, pack_prompts
from rlhf.models.attention import packable
from rlhf.models.logprobs import backbone_of, base_of, scaled_logits
from rlhf.models.packing import run_packed
from rlhf.rollout import Replies, draw, nucleus_of, pack_bits, pad_prompts
from rlhf.utils.errors import Notice, UserError

LOOK_EVERY = 4  # decoding steps between looks at whether rows have ended: on a card each look waits for it
SPAN = 64  # columns of the cache that a step attends to are rounded up to a multiple of this


@torch.no_grad()
def sample_replies(
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
) -> Replies:
    """Sample one reply per prompt. `uniform` (B, reply_length) in [0, 1): one random number per token.

    `slots` is the number of replies written at a time (0: as the device likes it). The policy must be in eval mode:
    with gradient checkpointing in train mode the cache is silently dropped.
    """
    uniform = uniform.to(device)
    if engine == "auto":
        engine = default_engine(policy, device)
    check_engine(engine, policy, device)
    if engine == "plain":
        reply_ids, nucleus = _plain(policy, prompts, uniform, sampling, eos, pad)
    else:
        size = min(slots or slots_for(device), len(prompts))
        with blocked_weights(base_of(policy), size, device):
            reply_ids, nucleus = Slots(policy, prompts, uniform, sampling, eos, size, engine == "graph").run()
    vocabulary = base_of(policy).get_input_embeddings().num_embeddings
    return Replies.of(prompts, reply_ids, eos=eos, pad=pad, vocabulary=vocabulary, nucleus=nucleus)


def default_engine(policy: PreTrainedModel, device: torch.device) -> str:
    """`graph` on a CUDA card, else `slots`; `plain` for an architecture whose attention cannot be exchanged."""
    if not packable(base_of(policy)):
        return "plain"
    return "graph" if device.type == "cuda" else "slots"


def check_engine(engine: str, policy: PreTrainedModel, device: torch.device) -> None:
    """Raises UserError for an engine that this model or device cannot have."""
    if engine == "graph" and device.type != "cuda":
        raise UserError("a CUDA graph needs a CUDA card: --rollout-engine graph. Leave it out")
    if engine in ("slots", "graph") and not packable(base_of(policy)):
        raise UserError(
            f"the attention of {type(base_of(policy)).__name__} cannot be exchanged: --rollout-engine {engine}. "
            "Leave it out"
        )


def slots_for(device: torch.device) -> int:
    """Replies written at a time: on a card the more the better; a processor is busy with 32."""
    return 256 if device.type == "cuda" else 32


def sample_tokens(logits: Tensor, uniform: Tensor, sampling: SamplingSettings) -> tuple[Tensor, Tensor | None]:
    """Tokens (B,) from logits (B, V) by random numbers (B,), and the packed nucleus that they came from, if any."""
    if not sampling.filters:
        return draw(logits, uniform), None
    allowed = nucleus_of(logits, sampling.top_k, sampling.top_p)
    return draw(logits.masked_fill(~allowed, -torch.inf), uniform), pack_bits(allowed)


# --- plain -----------------------------------------------------------------------------------------------------------


def _plain(policy, prompts, uniform: Tensor, sampling: SamplingSettings, eos: int, pad: int):
    device = uniform.device
    prompt_ids, prompt_mask = pad_prompts([p.ids for p in prompts], pad, device)
    (rows, context), length = prompt_ids.shape, sampling.reply_length
    attention = torch.cat([prompt_mask, torch.ones(rows, length, dtype=torch.bool, device=device)], dim=1)
    positions = (prompt_mask.long().cumsum(1) - 1).clamp(min=0)
    replies = torch.full((rows, length), eos, device=device)
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    nucleus: list[Tensor] = []
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
            nucleus.append(allowed)
        replies[:, t] = token
        done = done | (token == eos)
        if t % LOOK_EVERY == LOOK_EVERY - 1 and bool(done.all()):
            break
        inputs, positions = token.unsqueeze(1), positions[:, -1:] + 1
    return replies, torch.stack(nucleus, dim=1) if nucleus else None


# --- slots -----------------------------------------------------------------------------------------------------------


class Slots:
    """Replies being written, one to a slot. B episodes, S slots.

    All that a decoding step reads and writes stays where it is in memory, so that the step can be a CUDA graph. A
    slot whose reply has ended writes on into a row that nobody reads (row B), until it is looked at.
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
        self.device, self.length, self.graph = uniform.device, sampling.reply_length, graph
        self.waiting = list(range(len(prompts)))[::-1]
        size, longest = slots, max(len(p.ids) for p in prompts)
        columns = longest + self.length
        self.cache = SlotCache(size, -(-columns // SPAN) * SPAN)
        self.nobody = len(prompts)
        self.uniform = torch.cat([uniform, uniform[:1]])  # (B + 1, T)
        self.replies = torch.full((len(prompts) + 1, self.length), eos, device=self.device)
        self.nucleus = None
        self.token, self.at, self.step = (torch.zeros(size, dtype=torch.long, device=self.device) for _ in range(3))
        self.row = torch.full((size,), self.nobody, device=self.device)
        self.used = [0] * size  # columns that each slot's reply has filled at most, as a plain number
        self.captured: torch.cuda.CUDAGraph | None = None

    def run(self) -> tuple[Tensor, Tensor | None]:
        """Reply ids (B, T), what stands behind an EOS being nothing, and the packed nucleus."""
        look = 1 if self.device.type == "cpu" else LOOK_EVERY
        free = list(range(len(self.used)))
        while self.waiting or len(free) < len(self.used):
            if self.waiting and len(free) >= min(len(self.waiting), -(-len(self.used) // 4)):
                self.admit(free)
            elif not self.waiting and len(free) >= len(self.used) / (2 if self.graph else 4):
                self.shrink([s for s in range(len(self.used)) if s not in set(free)])
            for _ in range(look):
                self.decode()
            free = [s for s, row in enumerate(self.row.tolist()) if row == self.nobody]
            self.used = [0 if s in set(free) else used for s, used in enumerate(self.used)]
        return self.replies[:-1], None if self.nucleus is None else self.nucleus[:-1]

    def admit(self, free: list[int]) -> None:
        """Waiting prompts into free slots: one packed pass over the prompts, each once, and the first tokens."""
        taken = [self.waiting.pop() for _ in range(min(len(free), len(self.waiting)))]
        slots = free[: len(taken)]
        packed = pack_prompts([self.prompts[r].ids for r in taken], slots, self.device)
        self.cache.fill(packed.slots, packed.columns, packed.places)
        hidden = run_packed(backbone_of(self.policy), packed.ids, packed.positions, packed.layout, self.cache)
        into = torch.tensor(slots, device=self.device)
        self.row[into] = torch.tensor(taken, device=self.device)
        self.step[into] = 0
        self.at[into] = packed.lengths
        for slot, row in zip(slots, taken, strict=True):
            self.used[slot] = len(self.prompts[row].ids)
        self.choose(hidden.index_select(0, packed.last), into)

    def decode(self) -> None:
        """One token for every slot."""
        self.used = [used + 1 for used in self.used]
        if self.graph:
            self._replay()
        else:
            self._decode(min(-(-max(self.used) // SPAN) * SPAN, self.cache.columns))

    def _decode(self, span: int) -> None:
        self.cache.write(self.at, span)
        output = backbone_of(self.policy)(
            input_ids=self.token.unsqueeze(1),
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device),
            position_ids=self.at.unsqueeze(1),
            past_key_values=self.cache,
            use_cache=True,
            layout=DecodeLayout(self.at, span),
        )
        self.at.add_(1).clamp_(max=self.cache.columns - 1)
        self.choose(output.last_hidden_state[:, 0], slice(None))

    def choose(self, hidden: Tensor, slots: Tensor | slice) -> None:
        """Sample the next token of some slots from their hidden states (n, H)."""
        row, step = self.row[slots], self.step[slots]
        logits = scaled_logits(self.policy, hidden, self.sampling.temperature)
        token, allowed = sample_tokens(logits, self.uniform[row, step], self.sampling)
        if allowed is not None:
            if self.nucleus is None:
                self.nucleus = allowed.new_zeros(len(self.replies), self.length, allowed.shape[-1])
            self.nucleus[row, step] = allowed
        self.replies[row, step] = token
        over = (token == self.eos) | (step + 1 >= self.length)
        self.token[slots] = token
        self.step[slots] = (step + 1).clamp(max=self.length - 1)
        self.row[slots] = torch.where(over, self.nobody, row)

    def shrink(self, live: list[int]) -> None:
        """Nobody waits: go on with the slots that still write."""
        if not live:
            return
        kept = torch.tensor(live, device=self.device)
        self.token, self.at, self.step, self.row = (x[kept] for x in (self.token, self.at, self.step, self.row))
        self.used = [self.used[s] for s in live]
        self.cache.keep(kept)
        self.captured = None

    def _replay(self) -> None:
        """The decoding step as a CUDA graph, captured when the slots change (Windows has this, too)."""
        if self.captured is None:
            self._decode(self.cache.columns)  # kernels are chosen and memory is claimed before the capture
            captured = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(captured):
                    self._decode(self.cache.columns)
            except RuntimeError as error:  # an architecture that waits for the card, or a driver that cannot
                fault = str(error).splitlines()[0]
                warnings.warn(f"no CUDA graph ({fault}): decoding goes on without", Notice, stacklevel=2)
                self.graph = False
                return
            self.captured = captured  # the capture ran nothing: the step that it stands for is the next replay's
        else:
            self.captured.replay()
