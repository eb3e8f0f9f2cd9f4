"""Actor, critic and reference: one backbone or two, two heads, and log-probs on reply positions only."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.packing import Passage
from rlhf.trl_ppo import AutoModelForCausalLMWithValueHead


def base_of(policy: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The causal LM itself; adapters live inside its modules."""
    return policy.get_base_model() if isinstance(policy, PeftModel) else policy


def backbone_of(policy: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The transformer under the language-model head."""
    base = base_of(policy)
    return getattr(base, base.base_model_prefix)


def with_value_head(policy: PreTrainedModel | PeftModel) -> AutoModelForCausalLMWithValueHead:
    """TRL's container for the policy and its value head.

    The head starts at zero, the mean of calibrated scores, and has no dropout (TRL's default of 0.1 would make the
    first ratio differ from 1). Given a model object and not a name, TRL does not ask the hub for an adapter.
    """
    return AutoModelForCausalLMWithValueHead.from_pretrained(
        policy,
        summary_dropout_prob=0.0,
        v_head_init_strategy="normal",
        v_head_initializer_range=0.0,
        device_map={"": policy.device},  # where it is; without it TRL warns about a model in 4 bits
    )


def scaled_logits(policy: PreTrainedModel | PeftModel, hidden: Tensor, temperature: float) -> Tensor:
    """Logits (..., V) in float32 at least, divided by the temperature; soft-capped where the architecture says so."""
    base = base_of(policy)
    logits = upcast(base.get_output_embeddings()(hidden))
    cap = _softcap(policy)
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits / temperature


def _softcap(policy: PreTrainedModel | PeftModel) -> float | None:
    return getattr(base_of(policy).config, "final_logit_softcapping", None)


def upcast(values: Tensor) -> Tensor:
    """Half precisions as float32; float32 and float64 as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


# --- log-probabilities -----------------------------------------------------------------------------------------------


def logits_at_once(device: torch.device) -> int:
    """Logits that may exist together in the forward's precision: in bfloat16 64 MiB on a CPU, 256 MiB on a card."""
    return 2**27 if device.type == "cuda" else 2**25


def floats_at_once(device: torch.device) -> int:
    """Logits that are worked on together in float32: what a processor's caches hold, or all on a card."""
    return 2**27 if device.type == "cuda" else 2**20


def token_logprobs(
    policy: PreTrainedModel | PeftModel,
    hidden: Tensor,
    tokens: Tensor,
    temperature: float,
    allowed: Tensor | None = None,
    entropy: str = "none",
    fused: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token and entropy of its distribution, both (N,), nats, at the sampling temperature.

    hidden (N, H), tokens (N,), `allowed` (N, V) or None: the rollout policy's nucleus, to which the distribution is
    renormalised. `entropy` is "none" (zeros), "value" or "gradient". Without gradients, logits exist for some
    positions at a time. With them, `fused` keeps the probabilities alone, where the head is a plain matrix.
    """
    head = base_of(policy).get_output_embeddings()
    plain = type(head) is nn.Linear and head.bias is None and _softcap(policy) is None
    if torch.is_grad_enabled():
        if fused and plain and entropy != "gradient":
            return _FusedLogprobs.apply(hidden, head.weight, tokens, temperature, allowed, entropy)
        return _logprobs_of(scaled_logits(policy, hidden, temperature), tokens, allowed, entropy)
    dtype = forward_dtype(hidden)
    weight = head.weight.to(dtype) if plain else None  # under autocast rounded once, and not for every block
    parts = []
    for rows in blocks(len(hidden), head.weight.shape[0], logits_at_once(hidden.device)):
        limits = None if allowed is None else allowed[rows]
        if plain:
            logits = hidden[rows].to(dtype) @ weight.t()
            parts.append(_probabilities(logits, tokens[rows], temperature, limits, entropy == "value"))
        else:
            parts.append(_logprobs_of(scaled_logits(policy, hidden[rows], temperature), tokens[rows], limits, entropy))
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropies for _, entropies in parts])


def blocks(rows: int, width: int, most: int) -> list[slice]:
    """Slices of `rows` rows of so many numbers, of which `most` may stand together."""
    size = max(1, most // width)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def forward_dtype(values: Tensor) -> torch.dtype:
    """The precision of matrix products of `values`: autocast's, or their own."""
    device = values.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else values.dtype


def _logprobs_of(logits: Tensor, tokens: Tensor, allowed: Tensor | None, entropy: str) -> tuple[Tensor, Tensor]:
    if allowed is not None:
        logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
    log_total = logits.logsumexp(-1)
    logprobs = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - log_total
    if entropy == "none":
        return logprobs, torch.zeros_like(log_total)
    with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
        return logprobs, log_total - (torch.softmax(logits, -1) * logits).sum(-1)


def _probabilities(
    logits: Tensor, tokens: Tensor, temperature: float, allowed: Tensor | None, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Turns logits (N, V) into probabilities, in place and in float32 block by block; returns the tokens'
    log-probabilities and, if asked, the entropies, (N,)."""
    logprobs = torch.empty(len(logits), dtype=upcast(logits[:0]).dtype, device=logits.device)
    entropies = torch.zeros_like(logprobs)
    for rows in blocks(*logits.shape, floats_at_once(logits.device)):
        values = upcast(logits[rows]).div_(temperature)
        if allowed is not None:
            values.masked_fill_(~allowed[rows], torch.finfo(values.dtype).min)
        values.sub_(values.logsumexp(-1, keepdim=True))
        logprobs[rows] = values.gather(-1, tokens[rows].unsqueeze(-1)).squeeze(-1)
        if entropy:
            entropies[rows] = -(values.exp() * values).sum(-1)
        logits[rows] = values.exp_()
    return logprobs, entropies


class _FusedLogprobs(torch.autograd.Function):
    """Head, softmax and gather in one, which keeps the probabilities and nothing else of the vocabulary's width.

    The gradient by the logits is g (1[token] - p) / temperature, and takes the probabilities' place in memory.
    """

    @staticmethod
    def forward(ctx, hidden, weight, tokens, temperature, allowed, entropy):
        dtype = forward_dtype(hidden)
        states, head = hidden.to(dtype), weight.to(dtype)
        ctx.kept = states @ head.t()
        logprobs, entropies = _probabilities(ctx.kept, tokens, temperature, allowed, entropy == "value")
        ctx.temperature, ctx.dtypes = temperature, (hidden.dtype, weight.dtype)
        ctx.save_for_backward(states, head, tokens, logprobs)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, by_logprobs, _):
        states, head, tokens, logprobs = ctx.saved_tensors
        by_logits, ctx.kept = ctx.kept, None
        scale = (by_logprobs / ctx.temperature).unsqueeze(-1)
        by_logits.mul_(-scale.to(by_logits.dtype))
        # 1 - p from the log-probability: a rounded p near 1 would lose it
        by_token = -torch.expm1(logprobs).unsqueeze(-1) * scale
        by_logits.scatter_(1, tokens.unsqueeze(-1), by_token.to(by_logits.dtype))
        by_hidden = (by_logits @ head).to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        by_weight = (by_logits.t() @ states).to(ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
        return by_hidden, by_weight, None, None, None, None


# --- adapters' dropout -----------------------------------------------------------------------------------------------


def set_adapter_dropout(policy: nn.Module, share: float) -> None:
    """In all adapters; it acts in train mode. TRL's __init__ sets every dropout of the policy to 0."""
    for module in policy.modules():
        if isinstance(module, LoraLayer):
            for dropout in module.lora_dropout.values():
                if isinstance(dropout, nn.Dropout):  # without any, peft has an identity there
                    dropout.p = share


# --- actor and critic ------------------------------------------------------------------------------------------------


class Actor(nn.Module):
    """A causal LM as a policy over reply tokens."""

    def __init__(self, policy: PreTrainedModel | PeftModel):
        super().__init__()
        self.policy = policy

    @property
    def config(self):
        return self.policy.config

    def forward(
        self,
        passage: Passage,
        temperature: float,
        allowed: Tensor | None = None,
        entropy: str = "none",
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs, entropy and values of a passage's reply tokens, each (R, T) and 0 off the mask, in one backbone
        pass; an actor without a critic has no values. `allowed` and `entropy` as in token_logprobs."""
        return self.heads(self.hidden(passage), passage.tokens, passage.mask, temperature, allowed, entropy)

    def hidden(self, passage: Passage) -> Tensor:
        """The hidden states from which a passage's M reply tokens are predicted, (M, H)."""
        return passage.hidden(backbone_of(self.policy))

    def heads(
        self,
        hidden: Tensor,
        tokens: Tensor,
        mask: Tensor,
        temperature: float,
        allowed: Tensor | None,
        entropy: str,
        fused: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What `forward` gives, from hidden states (M, H): log-probs, entropy, values."""
        states = self.states(hidden)
        logprobs, entropies = token_logprobs(self.policy, states, tokens, temperature, allowed, entropy, fused)
        return spread(logprobs, mask), spread(entropies, mask), self.values(hidden, mask)

    def states(self, hidden: Tensor) -> Tensor:
        """Of hidden states, what the language-model head reads, (..., H)."""
        return hidden

    def values(self, hidden: Tensor, mask: Tensor) -> Tensor | None:
        """Values of hidden states (N, H), as (B, T)."""
        return None


class ActorCritic(Actor):
    """One backbone, two heads. It takes the place of TRL's PolicyAndValueWrapper, which runs two backbones.

    With a `critic`, a backbone of its own, the value head reads that one's hidden states. Both backbones' states of a
    token stand side by side, (M, 2H), so that all that is done with hidden states is done with both.
    """

    def __init__(self, container: AutoModelForCausalLMWithValueHead, critic: PreTrainedModel | None = None):
        super().__init__(container.pretrained_model)  # TRL looks for the policy under the name `policy`
        self.value_head, self.critic = container.v_head, critic

    def hidden(self, passage: Passage) -> Tensor:
        states = super().hidden(passage)
        return states if self.critic is None else torch.cat([states, passage.hidden(self.critic)], -1)

    def states(self, hidden: Tensor) -> Tensor:
        return hidden if self.critic is None else hidden.chunk(2, -1)[0]

    def values(self, hidden: Tensor, mask: Tensor) -> Tensor:
        own = hidden if self.critic is None else hidden.chunk(2, -1)[1]
        with torch.autocast(hidden.device.type, enabled=False):  # one column: float32 costs nothing here
            return spread(self.value_head(upcast(own)).squeeze(-1), mask)


def critic_backbone(policy: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """A backbone for a critic of its own, before training: the start model's, trained where the policy's is (under
    LoRA in adapters of its own, over quantized weights of its own)."""
    return backbone_of(copy.deepcopy(policy))


def spread(flat: Tensor, mask: Tensor) -> Tensor:
    """(N,) values of the masked tokens, back to (B, T); 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


# --- reference -------------------------------------------------------------------------------------------------------


class Reference:
    """The frozen start model: a model of its own, or under LoRA the policy with its adapters switched off."""

    def __init__(self, policy: PreTrainedModel | PeftModel, copy: PreTrainedModel | None):
        """`copy` None: the adapters of `policy` can be switched off."""
        self.policy, self.copy = policy, copy

    @classmethod
    def before_training(cls, policy: PreTrainedModel | PeftModel, dtype: torch.dtype | None) -> Reference:
        """Of a policy that will be trained. `dtype` is its forward precision: a KL between unlike precisions would
        measure the rounding."""
        return cls(policy, None if isinstance(policy, PeftModel) else frozen_copy(policy, dtype))

    @contextlib.contextmanager
    def model(self) -> Iterator[PreTrainedModel | PeftModel]:
        """The reference as a causal LM, while the context lasts."""
        with contextlib.nullcontext() if self.copy is not None else self.policy.disable_adapter():
            yield self.copy if self.copy is not None else self.policy

    def logprobs(self, passage: Passage, temperature: float, allowed: Tensor | None) -> Tensor:
        """Log-probs of a passage's reply tokens under the start model, (R, T) and 0 off the mask."""
        with self.model() as model:
            hidden = passage.hidden(backbone_of(model))
            return spread(token_logprobs(model, hidden, passage.tokens, temperature, allowed)[0], passage.mask)


def frozen_copy(policy: PreTrainedModel, dtype: torch.dtype | None) -> PreTrainedModel:
    """A copy without gradients, its linear layers stored in `dtype` if there is one."""
    frozen = copy.deepcopy(policy).eval().requires_grad_(False)
    store_frozen_weights(frozen, dtype)
    return frozen


def store_frozen_weights(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Linear layers that are not trained, stored in the forward's precision.

    Those are the weights that autocast would round anyway, each time anew, so outputs stay the same to the bit.
    Embeddings and norms stay in float32, as autocast leaves them; so does a head that is tied to the embeddings.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        if dtype is not None and type(module) is nn.Linear:
            weights = list(module.parameters(recurse=False))
            if not any(w.requires_grad or id(w) in embeddings for w in weights):
                module.to(dtype)


def let_go_of_files(model: nn.Module) -> None:
    """Copies what a loaded model still reads from its mapped file, once other weights were rounded or quantized: the
    mapping stays as a whole as long as one weight of it is in use."""
    weights = list(model.parameters())
    if any(w.dtype != torch.float32 for w in weights):
        for weight in weights:
            if weight.device.type == "cpu" and weight.dtype == torch.float32 and not weight.requires_grad:
                weight.data = weight.data.clone()
