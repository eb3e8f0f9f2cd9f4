"""Tokenizer, actor-critic and reference: loading, precision, LoRA, 4-bit. One backbone serves actor and critic."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D

from rlhf.errors import UserError, did_you_mean
from rlhf.hub import is_path, missing_path, require_hub
from rlhf.trl_ppo import AutoModelForCausalLMWithValueHead

PAD_TOKENS = ("<|endoftext|>", "<|finetune_right_pad_id|>", "<|pad|>", "<pad>", "[PAD]", "<|PAD_TOKEN|>")


def find_model(name: str, flag: str) -> str:
    """Where to load a model from: a folder here (its full path, so that an adapter finds its base from anywhere), or
    a name that the hub answers to. Raises UserError, at once, if it is neither."""
    folder = Path(name).expanduser().resolve()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(
                f"no model in this folder (no config.json): {name}. {flag} takes a Hugging Face model folder"
            )
        return str(folder)
    if is_path(name):
        raise missing_path(name, "model", f"{flag} takes a Hugging Face model folder or a hub name")
    return require_hub(name, "model", f"{flag} FOLDER")


@contextlib.contextmanager
def readable(name: str) -> Iterator[None]:
    """What transformers cannot load from `name` (no safetensors, torn files, unknown types) as one UserError."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(f"cannot be loaded: {name} ({reason}). Give a whole model folder with safetensors") from None


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, padding on the left, with a pad token that is not EOS.

    SmolLM2's chat tokenizer ships pad = EOS: whoever masks by `ids != pad` would then never learn to stop.
    """
    with readable(name):
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    if tokenizer.eos_token_id is None:
        raise UserError(f"no EOS token: tokenizer of {name}. Set eos_token in its tokenizer_config.json")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = _free_token(tokenizer, name)
    return tokenizer


def _free_token(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    """A special token of this vocabulary that neither ends nor begins a text and stands in no chat template."""
    vocabulary, template = tokenizer.get_vocab(), tokenizer.chat_template or ""
    special = [t for t in tokenizer.all_special_tokens if t in vocabulary]
    added = [str(t) for t in tokenizer.added_tokens_decoder.values()]
    for token in (*(t for t in PAD_TOKENS if t in vocabulary), *special, *added):
        if token not in (tokenizer.eos_token, tokenizer.bos_token) and token not in template:
            return token
    raise UserError(
        f"no pad token other than EOS, and no spare special token: tokenizer of {name}. "
        "Add one to its tokenizer_config.json as pad_token"
    )


def autocast_dtype(wanted: bool | None, device: torch.device) -> torch.dtype | None:
    """bfloat16, or None for float32. `wanted` None: on a CUDA card that really has it.

    `is_bf16_supported()` says yes on cards that only emulate it, slowly: hence including_emulation=False.
    """
    has_it = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if wanted and not has_it:
        raise UserError(f"no bfloat16 on this card ({torch.cuda.get_device_name(device)}): --bf16. Leave it out")
    use = wanted if wanted is not None else device.type == "cuda" and has_it
    return torch.bfloat16 if use else None


def autocast(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    """The forward's precision. PPOConfig(bf16=True) leaves accelerate's mixed precision at "no": so we set it here."""
    return torch.autocast(device.type, dtype=dtype) if dtype is not None else contextlib.nullcontext()


# --- policy ----------------------------------------------------------------------------------------------------------


def load_policy(
    name: str,
    *,
    lora: LoraConfig | None = None,
    load_in_4bit: bool = False,
    dtype: torch.dtype | None = None,
    gradient_checkpointing: bool = False,
    device: torch.device,
    vocabulary: int,
) -> PreTrainedModel | PeftModel:
    """The start model as a causal LM in float32, its frozen weights in NF4 if `load_in_4bit`, with adapters if `lora`.

    `dtype` is the forward's precision (None: float32), in which 4-bit weights are multiplied. `vocabulary` is the
    tokenizer's size: a model that has fewer embeddings is refused.
    """
    quantization = (
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype or torch.float32)
        if load_in_4bit
        else None
    )
    placement = {"device_map": {"": device}} if load_in_4bit else {}
    with readable(name):
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, quantization_config=quantization, use_safetensors=True, **placement
        )
    rows = model.get_input_embeddings().num_embeddings
    if vocabulary > rows:
        raise UserError(
            f"tokenizer of {vocabulary} tokens, model of {rows} embeddings: {name}. Give them as one folder"
        )
    if load_in_4bit:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=gradient_checkpointing)
    if lora is not None:
        _check_targets(model, lora.target_modules, name)
        model = get_peft_model(model, lora)
    base_of(model).config.attention_dropout = 0.0  # it would act in train mode, which checkpointing needs
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model


def _check_targets(model: PreTrainedModel, targets: Sequence[str], name: str) -> None:
    leaves = {n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    missing = [t for t in targets if t not in leaves]
    if missing:
        raise UserError(
            f"no module named {', '.join(missing)}: --lora-targets, {name}. {did_you_mean(missing[0], leaves)} "
            f"There are {', '.join(sorted(leaves))}"
        )


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
        policy, summary_dropout_prob=0.0, v_head_init_strategy="normal", v_head_initializer_range=0.0
    )


# --- forward ---------------------------------------------------------------------------------------------------------


def reply_hidden(policy: PreTrainedModel | PeftModel, ids: Tensor, attention: Tensor, context: int) -> Tensor:
    """Hidden states from which each reply token is predicted: (B, T, H) for ids (B, C + T) and `context` C."""
    positions = (attention.long().cumsum(1) - 1).clamp(min=0)
    output = backbone_of(policy)(input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False)
    return output.last_hidden_state[:, context - 1 : -1]


def scaled_logits(policy: PreTrainedModel | PeftModel, hidden: Tensor, temperature: float) -> Tensor:
    """Logits (..., V) in float32 at least, divided by the temperature; soft-capped where the architecture says so."""
    base = base_of(policy)
    logits = upcast(base.get_output_embeddings()(hidden))
    cap = getattr(base.config, "final_logit_softcapping", None)
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits / temperature


def upcast(values: Tensor) -> Tensor:
    """Half precisions as float32; float32 and float64 as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


LOGITS_AT_ONCE = 2**24  # 64 MiB in float32: more positions than fit are done chunk by chunk


def token_logprobs(
    policy: PreTrainedModel | PeftModel,
    hidden: Tensor,
    tokens: Tensor,
    temperature: float,
    allowed: Tensor | None = None,
    entropy: str = "none",
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token and entropy of its distribution, both (N,), nats, at the sampling temperature.

    hidden (N, H), tokens (N,), `allowed` (N, V) or None: the rollout policy's nucleus, to which the distribution is
    renormalised. `entropy` is "none" (zeros), "value" or "gradient". Logits exist for one chunk of positions at a
    time; where a gradient is wanted, a chunk's logits are computed again in the backward pass.
    """
    size = max(1, LOGITS_AT_ONCE // base_of(policy).get_input_embeddings().num_embeddings)
    if len(tokens) <= size:
        return _chunk_logprobs(policy, hidden, tokens, temperature, allowed, entropy)
    masks = allowed.split(size) if allowed is not None else [None] * -(-len(tokens) // size)
    parts = [
        checkpoint(_chunk_logprobs, policy, h, t, temperature, m, entropy, use_reentrant=False)
        if torch.is_grad_enabled()
        else _chunk_logprobs(policy, h, t, temperature, m, entropy)
        for h, t, m in zip(hidden.split(size), tokens.split(size), masks, strict=True)
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropies for _, entropies in parts])


def _chunk_logprobs(policy, hidden, tokens, temperature, allowed, entropy) -> tuple[Tensor, Tensor]:
    logits = scaled_logits(policy, hidden, temperature)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
    log_total = logits.logsumexp(-1)
    logprobs = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - log_total
    if entropy == "none":
        return logprobs, torch.zeros_like(log_total)
    with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
        return logprobs, log_total - (torch.softmax(logits, -1) * logits).sum(-1)


class ActorCritic(nn.Module):
    """One backbone, two heads. It takes the place of TRL's PolicyAndValueWrapper, which runs two backbones."""

    def __init__(self, container: AutoModelForCausalLMWithValueHead):
        super().__init__()
        self.policy = container.pretrained_model  # TRL looks for the policy under this name
        self.value_head = container.v_head

    @property
    def config(self):
        return self.policy.config

    def forward(
        self,
        ids: Tensor,
        attention: Tensor,
        mask: Tensor,
        temperature: float,
        allowed: Tensor | None = None,
        entropy: str = "none",
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropy and values of the reply tokens, each (B, T) and 0 off the mask, in one backbone pass.

        ids, attention (B, C + T); mask (B, T); `allowed` (N, V) for the N tokens of the mask, row by row; `entropy`
        as in token_logprobs.
        """
        context = ids.shape[1] - mask.shape[1]
        hidden = reply_hidden(self.policy, ids, attention, context)[mask]
        tokens = ids[:, context:][mask]
        logprobs, entropies = token_logprobs(self.policy, hidden, tokens, temperature, allowed, entropy)
        with torch.autocast(hidden.device.type, enabled=False):  # one column: float32 costs nothing here
            values = self.value_head(upcast(hidden)).squeeze(-1)
        return spread(logprobs, mask), spread(entropies, mask), spread(values, mask)


def spread(flat: Tensor, mask: Tensor) -> Tensor:
    """(N,) values of the masked tokens, back to (B, T); 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


# --- reference -------------------------------------------------------------------------------------------------------


class Reference:
    """The frozen start model: a copy, or under LoRA the policy with its adapters switched off."""

    def __init__(self, policy: PreTrainedModel | PeftModel, dtype: torch.dtype | None):
        """`dtype` is the policy's forward precision. A KL between unlike precisions would measure the rounding."""
        self.policy = policy
        self.copy = None if isinstance(policy, PeftModel) else frozen_copy(policy, dtype)

    @contextlib.contextmanager
    def model(self) -> Iterator[PreTrainedModel | PeftModel]:
        """The reference as a causal LM, while the context lasts."""
        with contextlib.nullcontext() if self.copy is not None else self.policy.disable_adapter():
            yield self.copy if self.copy is not None else self.policy

    def logprobs(
        self, ids: Tensor, attention: Tensor, mask: Tensor, temperature: float, allowed: Tensor | None
    ) -> Tensor:
        """Log-probs of the reply tokens under the start model, (B, T); arguments as in ActorCritic.forward."""
        context = ids.shape[1] - mask.shape[1]
        with self.model() as model:
            hidden = reply_hidden(model, ids, attention, context)[mask]
            return spread(token_logprobs(model, hidden, ids[:, context:][mask], temperature, allowed)[0], mask)


def frozen_copy(policy: PreTrainedModel, dtype: torch.dtype | None) -> PreTrainedModel:
    """A copy without gradients. With `dtype` its linear layers are stored in that type.

    Those are the weights that autocast would round anyway, so the copy's outputs are the policy's to the bit.
    Embeddings and norms stay in float32, as autocast leaves them.
    """
    frozen = copy.deepcopy(policy).eval().requires_grad_(False)
    if dtype is not None:
        tied = frozen.get_input_embeddings().weight
        for module in frozen.modules():
            if isinstance(module, nn.Linear) and module.weight is not tied:
                module.to(dtype)
    return frozen
