"""One decoding step of a policy: from the last token of each slot to the logits of the next one.

`ModelDecoder` calls the model's own layers. `FusedDecoder` uses copies of the weights of Llama and its relatives, in
half as many operators: q, k and v are one matrix, so are gate and up, and the rotary embedding rotates queries and
keys together. Adapters are merged in float32, and stay apart in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel

from rlhf.models import llama
from rlhf.models.attention import Kernel
from rlhf.models.cast_weights import product, stored
from rlhf.models.logprobs import backbone_of, base_of, forward_dtype, joined, scaled_logits, upcast
from rlhf.models.packing import run_packed
from rlhf.rollout.cpu_weights import copied_product
from rlhf.rollout.kv_cache import DecodeLayout, SlotKVCache

Product = Callable[[Tensor], Tensor]  # (S, in) -> (S, out)


class ModelDecoder:
    """The layers of the model, for every architecture whose attention can be replaced."""

    def __init__(self, policy: PreTrainedModel | PeftModel):
        self.policy = policy
        self.backbone = backbone_of(policy)

    def hidden(self, tokens: Tensor, at: Tensor, span: int, cache: SlotKVCache) -> Tensor:
        """Return the hidden states (S, H) of tokens (S,) at positions (S,), after storing their keys and values.

        The first `span` columns of the cache are attended to.
        """
        cache.begin_decode(at, span)
        return run_packed(self.backbone, tokens.unsqueeze(1), at.unsqueeze(1), DecodeLayout(at, span), cache)

    def logits(self, hidden: Tensor, temperature: float) -> Tensor:
        """Return the logits (S, V) of hidden states (S, H), divided by the temperature."""
        return scaled_logits(self.policy, hidden, temperature)


def can_fuse(policy: PreTrainedModel | PeftModel) -> bool:
    """True if a FusedDecoder can copy the weights of this policy: not 4-bit weights, and of adapters only LoRA and
    rsLoRA, not DoRA or other variants."""

    def plain(m: nn.Module) -> bool:
        lora = type(m) is LoraLinear and not (m.lora_variant or m.fan_in_fan_out or any(m.lora_bias.values()))
        return type(m.get_base_layer() if lora else m) is nn.Linear

    backbone = backbone_of(policy)
    return llama.supports(backbone) and all(plain(m) for layer in backbone.layers for m in _linears(layer))


def _linears(layer: nn.Module) -> list[nn.Module]:
    attention = layer.self_attn
    mlp = layer.mlp
    projections = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
    return [*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def adapters_of(layer: nn.Module) -> list[str]:
    """Return the names of the adapters that are active and not merged."""
    if type(layer) is nn.Linear or layer.disable_adapters or layer.merged:
        return []
    return [name for name in layer.active_adapters if name in layer.lora_A]


def decoding_weight(layer: nn.Module, merge: bool) -> Tensor:
    """Return the weight (out, in) of a linear layer: with its adapters if `merge`, otherwise its copy in the precision
    of the forward pass, if one exists. A decoder takes the weights of all its products from here."""
    weight = (layer if type(layer) is nn.Linear else layer.get_base_layer()).weight
    adapters = adapters_of(layer)
    if not (merge and adapters):
        return stored(weight).detach()
    return weight.detach() + sum(layer.get_delta_weight(name).detach() for name in adapters)


class _Product:
    """Products of a row (S, in) with the weights of linear layers that have the same input, as one matrix."""

    def __init__(self, layers, dtype: torch.dtype, slots: int, static: bool, outputs=None, inputs=None):
        """
        Args:
            layers: the linear layers.
            dtype: precision of the products.
            slots: number of rows.
            static: later calls of `load` copy into the tensors of the first one.
            outputs: function that changes the rows of matrices (out, ...).
            inputs: function that changes the columns of matrices (..., in).
        """
        self.layers = layers
        self.dtype = dtype
        self.slots = slots
        self.static = static
        self.outputs = outputs or (lambda rows: rows)
        self.inputs = inputs or (lambda columns: columns)
        # in bfloat16 a merged weight would lose most of a small update
        self.apart = dtype == torch.bfloat16 and any(map(adapters_of, layers))
        self.kept: dict[str, Tensor] = {}  # in `dtype`; a and b are those of all adapters of the layers
        self.product: Product | None = None
        self.load()

    def load(self) -> None:
        """Copy the present weights."""
        layers = self.layers
        outputs = self.outputs
        weight = joined([decoding_weight(layer, not self.apart) for layer in layers])
        parts = {"weight": outputs(self.inputs(weight))}
        if self.apart:
            a = [layer.lora_A[name].weight for layer in layers for name in adapters_of(layer)]
            parts |= {"a": self.inputs(torch.cat(a)), "b": outputs(torch.block_diag(*map(_scaled_b, layers)))}
        if any(layer.bias is not None for layer in layers):
            parts["bias"] = outputs(torch.cat([layer.bias for layer in layers]))
        for name, values in parts.items():
            self.kept[name] = self.kept[name].copy_(values) if name in self.kept else values.detach().to(self.dtype)
        if not self.static:
            self.product = copied_product(self.kept.pop("weight"), self.kept.get("bias"), self.slots)

    def __call__(self, row: Tensor) -> Tensor:
        """Return the products (S, out)."""
        kept = self.kept
        found = linear(row, kept["weight"], kept.get("bias")) if self.static else self.product(row)
        return found.addmm_(linear(row, kept["a"]), kept["b"].t()) if self.apart else found

    def floats(self, row: Tensor) -> Tensor:
        """Return the products in float32 or float64."""
        if self.kept.keys() == {"weight"}:
            full = torch.float32 if row.dtype == torch.bfloat16 else row.dtype
            return product(row, self.kept["weight"].t(), full)
        return upcast(self(row))


def _scaled_b(layer: nn.Module) -> Tensor:
    """Return B (out, r) of all adapters of a layer, with their scaling factors; r is 0 without adapters."""
    scaled = [layer.lora_B[name].weight * layer.scaling[name] for name in adapters_of(layer)]
    return torch.cat(scaled, 1) if scaled else decoding_weight(layer, False)[:, :0].float()


class FusedDecoder:
    """Copies of the weights of a policy, which must not change while they are used.

    On a GPU, and if `static`, `load` copies into the same tensors, so that a CUDA graph stays valid. On a CPU the
    copies have the layout that is fastest there. `slots` is the number of rows, `columns` the number of positions.
    """

    def __init__(self, policy: PreTrainedModel | PeftModel, slots: int, columns: int, static: bool = False):
        self.policy = policy
        self.backbone = backbone_of(policy)
        embeddings = policy.get_input_embeddings().weight
        head = base_of(policy).get_output_embeddings()
        self.dtype = forward_dtype(embeddings)
        static = static or embeddings.is_cuda

        self.products: list[_Product] = []

        def make_product(*layers: nn.Module, **changes) -> _Product:
            self.products.append(_Product(layers, self.dtype, slots, static, **changes))
            return self.products[-1]

        self.norm = _Norm(self.backbone.norm, static)
        self.layers = [_FusedLayer(layer, make_product, static) for layer in self.backbone.layers]
        self.head = make_product(head) if type(head) is nn.Linear else None  # None: another kind of head
        self.columns = torch.arange(columns, device=embeddings.device)
        # cosines and signed sines of all positions, (columns, 2, 1, D)
        self.cos_sin = torch.stack(llama.rotary(self.backbone, upcast(embeddings), self.columns), 1)

    def fits(self, policy: PreTrainedModel | PeftModel, columns: int) -> bool:
        """True if these are copies of this policy in the present precision, for texts of so many tokens."""
        same = policy is self.policy and self.dtype == forward_dtype(policy.get_input_embeddings().weight)
        return same and columns <= len(self.columns)

    def load(self) -> None:
        """Copy the present weights of the policy."""
        for one in self.products:
            one.load()

    @property
    def size(self) -> int:
        """Bytes of the copies."""
        return sum(tensor.nbytes for product in self.products for tensor in product.kept.values())

    def hidden(self, tokens: Tensor, at: Tensor, span: int, cache: SlotKVCache) -> Tensor:
        """As in ModelDecoder."""
        cache.begin_decode(at, span)
        hidden = self.backbone.embed_tokens(tokens)
        layout = DecodeLayout(at, span, self.columns)
        cos, sin = self.cos_sin.index_select(0, at).unbind(1)  # (S, 1, D) each
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, cos, sin, layout, cache, number)
        return self.norm(hidden, self.cos_sin.dtype)

    def logits(self, hidden: Tensor, temperature: float) -> Tensor:
        """As in ModelDecoder."""
        if self.head is None:
            return scaled_logits(self.policy, hidden, temperature)
        # fewer numbers than the logits, and divided before they are rounded
        hidden = hidden if temperature == 1 else hidden / temperature
        return self.head.floats(hidden.to(self.dtype))


class _Norm:
    """A norm of rlhf.models.llama in fewer operators, with precomputed constants."""

    def __init__(self, module: nn.Module, static: bool):
        """`static`: read the module's gain at every step, because it may have changed."""
        gain = upcast(module.weight.detach())
        self.module = module
        self.static = static
        width = gain.numel()
        self.gain = gain * width**0.5
        self.floor = torch.full((1,), (width * module.variance_epsilon) ** 0.5, dtype=gain.dtype, device=gain.device)

    def __call__(self, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the norm of hidden states (..., H) in `dtype`."""
        if self.static:
            return llama.norm(self.module, hidden, dtype)
        hidden = upcast(hidden)
        # sqrt(mean x^2 + eps) = sqrt(sum x^2 + H eps) / sqrt(H)
        size = torch.hypot(torch.linalg.vector_norm(hidden, dim=-1, keepdim=True), self.floor)
        return (hidden / size).mul_(self.gain).to(dtype)


class _FusedLayer:
    """One transformer layer of a FusedDecoder."""

    def __init__(self, layer: nn.Module, product: Callable[..., _Product], static: bool):
        self.attention = attention = layer.self_attn
        query, key, value, out, gate, up, down = _linears(layer)
        self.kv_heads = key.out_features // attention.head_dim
        self.turned = query.out_features // attention.head_dim + self.kv_heads  # heads of queries and keys
        # products with exchanged halves of weights replace an exchange of halves in every step. Their weights are an
        # eighth more to read, which takes longer than the exchange on a CPU.
        self.exchanged = static and not hasattr(attention, "q_norm")
        self.before = _Norm(layer.input_layernorm, static)
        self.between = _Norm(layer.post_attention_layernorm, static)
        self.qkv = product(query, key, value, outputs=self._with_exchanged_halves if self.exchanged else None)
        self.static = static
        self.out = product(out, inputs=self._as_attended if static else None)
        self.gate_up = product(gate, up)
        self.down = product(down)
        self.window = llama.window_of(attention)
        self.kernel = Kernel(attention.scaling, None)

    def _with_exchanged_halves(self, rows: Tensor) -> Tensor:
        """Return the rows (out, ...) of q, k and v, and after them those of q and k with exchanged halves of heads."""
        size = self.attention.head_dim
        halves = rows[: self.turned * size].unflatten(0, (-1, 2, size // 2))
        return torch.cat([rows, halves.flip(1).flatten(0, 2)])

    def _as_attended(self, columns: Tensor) -> Tensor:
        """Return columns (..., heads * D) in the order in which attention returns the heads: the first query head of
        every key head, then the second ones."""
        return columns.unflatten(-1, (self.kv_heads, -1, self.attention.head_dim)).transpose(-3, -2).flatten(-3)

    def __call__(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, layout: DecodeLayout, cache: SlotKVCache, number: int
    ) -> Tensor:
        """Return the hidden states (S, H) after the layer."""
        attention = self.attention
        count = self.kv_heads
        turned = self.turned
        dtype = self.qkv.dtype
        row = self.before(hidden, dtype)
        heads = self.qkv(row).unflatten(-1, (-1, attention.head_dim))  # (S, heads + 2 KV heads, D), or more
        if hasattr(attention, "q_norm"):
            heads = upcast(heads)
            heads[:, : turned - count] = llama.norm(attention.q_norm, heads[:, : turned - count])
            heads[:, turned - count : turned] = llama.norm(attention.k_norm, heads[:, turned - count : turned])
        rotated = heads[:, :turned]  # queries and keys
        other = heads[:, turned + count :] if self.exchanged else rotated.roll(attention.head_dim // 2, -1)
        torch.addcmul(rotated * cos, other, sin, out=rotated)  # in the precision of cos
        new = heads[:, turned - count : turned + count].unflatten(1, (2, count))
        keys, values = cache.store(new, number)
        grouped = heads[:, : turned - count].unflatten(1, (count, -1)).to(keys.dtype)
        attended = self.kernel.as_given(grouped, keys, values, layout.mask(self.window, keys.dtype), False)
        # the order of the heads in memory, so that nothing is copied
        hidden = hidden + self.out((attended.transpose(1, 2) if self.static else attended).flatten(1))
        gate, up = self.gate_up(self.between(hidden, dtype)).chunk(2, -1)
        return hidden + self.down(silu(gate).mul_(up))


Decoder = ModelDecoder | FusedDecoder  # from tokens to logits


def make_decoder(policy: PreTrainedModel | PeftModel, slots: int, columns: int, static: bool = False) -> Decoder:
    """Return the decoder with the fewest operators for this policy. `columns` are the tokens of the longest text;
    `static` as in FusedDecoder."""
    return FusedDecoder(policy, slots, columns, static) if can_fuse(policy) else ModelDecoder(policy)
