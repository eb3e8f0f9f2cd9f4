"""Load a tokenizer and a policy, with LoRA adapters and 4-bit weights if configured."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils import is_bitsandbytes_available

from rlhf.checkpoints.model_folder import ALL_LINEAR, missing_targets, vocabulary_problem
from rlhf.data.chat_template import end_of_turn
from rlhf.models.device import autocast
from rlhf.models.reference import release_mmap, store_frozen_weights
from rlhf.models.self_test import check_forward_matches
from rlhf.utils.errors import UserError, raise_if

PAD_TOKENS = ("<|endoftext|>", "<|finetune_right_pad_id|>", "<|pad|>", "<pad>", "[PAD]", "<|PAD_TOKEN|>")


@contextlib.contextmanager
def readable(name: str, hint: str = "Give a complete model folder with safetensors weights") -> Iterator[None]:
    """Context manager that turns loading errors of transformers (such as corrupted files) into one UserError."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        if "trust_remote_code" in str(error):
            raise UserError(
                f"the model needs trust_remote_code, which is not supported: {name}. "
                "Use a model whose architecture is part of transformers"
            ) from None
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(f"cannot be loaded: {name} ({reason}). {hint}") from None


def load_tokenizer(name: str, plain: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, with left padding; `plain` removes its chat template. Raises UserError if it has
    no EOS, or no token for padding.

    A pad token that equals EOS (SmolLM2) is replaced: otherwise a mask `ids != pad` also masks EOS, and the model
    never learns to stop. EOS becomes the token that ends completions: chat models of Gemma end them with
    `<end_of_turn>`, but their tokenizer's EOS ends a document.
    """
    with readable(name, "Give a model folder that includes its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", trust_remote_code=False)
    if plain:
        tokenizer.chat_template = None
    if tokenizer.eos_token_id is None:
        raise UserError(f"no EOS token: tokenizer of {name}. Set eos_token in its tokenizer_config.json")
    end = end_of_turn(tokenizer)
    if end is not None and end != tokenizer.eos_token_id and end in _stops(name):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = _free_token(tokenizer, name)
    return tokenizer


def _stops(name: str) -> list[int]:
    """Return the EOS ids in the model's generation_config.json; [] if it has none."""
    try:
        stops = GenerationConfig.from_pretrained(name).eos_token_id
    except OSError:  # the file is optional
        return []
    return stops if isinstance(stops, list) else [stops]


def _free_token(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    """Return a special token that is not EOS or BOS, and is not part of the chat template."""
    vocabulary, template = tokenizer.get_vocab(), tokenizer.chat_template or ""
    special = [t for t in tokenizer.all_special_tokens if t in vocabulary]
    added = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]  # others are text, such as spaces
    for token in (*(t for t in PAD_TOKENS if t in vocabulary), *special, *added):
        if token not in (tokenizer.eos_token, tokenizer.bos_token) and token not in template:
            return token
    raise UserError(
        f"no pad token other than EOS, and no unused special token: tokenizer of {name}. "
        "Set pad_token in its tokenizer_config.json to a token that no text needs"
    )


def load_config(name: str) -> PretrainedConfig:
    """Load a model's config.json. Raises UserError if it cannot be loaded or needs trust_remote_code."""
    with readable(name):
        return AutoConfig.from_pretrained(name, trust_remote_code=False)


def check_policy(name: str, vocabulary: int, targets: Collection[str] = ()) -> PretrainedConfig:
    """Check a start model without reading its weights, and return its config. Raises UserError if it has fewer
    embeddings than the tokenizer's `vocabulary`, or no module for a LoRA target."""
    config = load_config(name)
    with readable(name), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    check_vocabulary(vocabulary, model.get_input_embeddings().num_embeddings, name)
    _check_targets(model, targets, name)
    return config


def check_vocabulary(tokens: int, embeddings: int, name: str) -> None:
    """Raise UserError if a tokenizer has more tokens than its model has embeddings."""
    problem = vocabulary_problem(tokens, embeddings, name)
    if problem is not None:
        raise UserError(problem)


def check_weights(model: nn.Module, name: str) -> None:
    """Raise UserError if a weight contains NaN or infinity."""
    broken = [n for n, w in model.named_parameters() if w.is_floating_point() and not w.detach().sum().isfinite()]
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise UserError(f"NaN or infinity in {broken[0]}{more}: weights of {name}. Use an earlier checkpoint of it")


def context_of(config: PretrainedConfig) -> int | None:
    """Return the context length of a model in tokens; None if its config has none."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def four_bit(dtype: torch.dtype | None) -> BitsAndBytesConfig:
    """Return the config of NF4 weights that compute in `dtype` (None: float32). Raises UserError if bitsandbytes is
    not installed."""
    if not is_bitsandbytes_available():
        raise UserError("bitsandbytes is not installed: --load-in-4bit. Install it with: pip install bitsandbytes")
    compute = dtype or torch.float32
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)


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
    """Load the start model in float32, with frozen NF4 weights if `load_in_4bit`, and with adapters if `lora`.

    `dtype` is the precision of the forward pass (None: float32), `vocabulary` the number of the tokenizer's tokens.
    Raises UserError as `check_policy` does, and if a weight contains NaN or infinity.
    """
    config = check_policy(name, vocabulary, lora.target_modules if lora is not None else ())
    _disable_dropout(config)
    model = _read_policy(name, config, four_bit(dtype) if load_in_4bit else None, device)
    check_weights(model, name)
    if load_in_4bit:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=gradient_checkpointing)
        _disable_repacking(model)
    if lora is not None:
        model = get_peft_model(model, lora)
        store_frozen_weights(model, dtype)
        release_mmap(model)
    if not load_in_4bit:  # 4-bit weights are on the device already
        model = model.to(device)  # before the reference is copied from it
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    with autocast(device, dtype):
        check_forward_matches(model.eval(), name)
    return model


def _read_policy(
    name: str, config: PretrainedConfig, quantization: BitsAndBytesConfig | None, device: torch.device
) -> PreTrainedModel:
    """Read a causal LM in float32 on the CPU, or quantized on the device, where bitsandbytes quantizes."""
    placement = {"device_map": {"": device}} if quantization is not None else {}
    with readable(name):
        return AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            quantization_config=quantization,
            use_safetensors=True,
            trust_remote_code=False,
            **placement,
        )


def load_adapter(base: PreTrainedModel, folder: str) -> PeftModel:
    """Load a trained adapter onto its base. Raises UserError if it has no safetensors file or does not fit."""
    if not Path(folder, SAFETENSORS_WEIGHTS_NAME).is_file():  # peft would unpickle adapter_model.bin without a warning
        raise UserError(f"no {SAFETENSORS_WEIGHTS_NAME}: {folder}. Save the adapter with safetensors")
    try:
        with readable(folder):
            return PeftModel.from_pretrained(base, folder)
    except RuntimeError as error:  # shapes that do not fit
        reason = str(error).strip().splitlines()[-1].strip()[:160]
        raise UserError(
            f"the adapter does not fit the base model: {folder} ({reason}). Give its base model with --baseline"
        ) from None


def _disable_dropout(config: PretrainedConfig) -> None:
    """Set every dropout in the config to 0, because with dropout the first ratio would not be 1. TRL disables only
    dropout modules; layers that call the dropout function read its probability from the config."""
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        if "drop" in name and isinstance(value, float):
            setattr(text, name, 0.0)


def _disable_repacking(model: PreTrainedModel) -> None:
    """Prevent bitsandbytes from repacking 4-bit weights in eval mode on a CPU with bfloat16. This rounds the scales,
    so the first ratio would not be 1, and it fails for layers narrower than a block."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def lora_modules(targets: Sequence[str]) -> list[str] | str:
    """Return LoRA's target modules in the form that peft requires: a list of names, or "all-linear"."""
    return ALL_LINEAR if ALL_LINEAR in targets else list(targets)


def _check_targets(model: PreTrainedModel, targets: Collection[str], name: str) -> None:
    if ALL_LINEAR in targets:
        return
    leaves = {n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    raise_if(missing_targets(leaves, targets, name))


def context_problems(
    lengths: Sequence[int], context: int | None, max_new_tokens: int, source: str, model: str = "start model"
) -> list[str]:
    """Return an error if prompts of these lengths (tokens), alone or with completions of `max_new_tokens`, exceed a
    model's context (None: no limit). The message contains `source` and `model`."""
    longest = max(lengths)
    if context is None or longest + max_new_tokens <= context:
        return []
    alone = longest > context
    room = context if alone else context - max_new_tokens
    flag, more = ("", "") if alone else (f" plus --max-new-tokens {max_new_tokens}", f" + {max_new_tokens}")
    fixes = [f"--max-new-tokens {context - longest}"] if longest < context else []
    if max_new_tokens < context:
        fixes.append(f"--prompt-length {context - max_new_tokens} (longer prompts are skipped)")
    return [
        f"{sum(n > room for n in lengths)} of {len(lengths)} prompts{flag} are longer than the {model}'s context "
        f"of {context} tokens (the longest: {longest}{more}): {source}. Try "
        f"{' or '.join(fixes) or 'shorter completions'}"
    ]
