"""Loading: tokenizer and policy; precision, LoRA, 4-bit."""

from __future__ import annotations

import contextlib
import json
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

from rlhf.data.chat_template import end_of_turn
from rlhf.models.device import autocast
from rlhf.models.reference import release_mmap, store_frozen_weights
from rlhf.models.self_test import check_forward_matches
from rlhf.utils.errors import UserError, did_you_mean
from rlhf.utils.hub import require_hub
from rlhf.utils.paths import is_path, missing_path, resolve_path

ADAPTER_CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"  # peft's name for every linear layer but the head
PAD_TOKENS = ("<|endoftext|>", "<|finetune_right_pad_id|>", "<|pad|>", "<pad>", "[PAD]", "<|PAD_TOKEN|>")


def find_model(name: str, flag: str) -> str:
    """Where to load a model from: a folder here (its full path, so that an adapter finds its base from anywhere), or
    a name that the hub answers to. Raises UserError, at once, if it is neither."""
    folder = resolve_path(name)
    if folder.is_dir():
        if (folder / ADAPTER_CONFIG).is_file():  # over which transformers would load a base without a word
            raise UserError(
                f"an adapter, not a full model: {flag} {name}. Merge it into its base ({base_of_adapter(folder)}): "
                f"peft.AutoPeftModelForCausalLM.from_pretrained({name!r}).merge_and_unload().save_pretrained(FOLDER)"
            )
        if not (folder / "config.json").is_file():
            raise UserError(
                f"no model in this folder (no config.json): {name}. {flag} takes a Hugging Face model folder"
            )
        return str(folder)
    if is_path(name):
        raise missing_path(name, "model", f"{flag} takes a Hugging Face model folder or a hub name")
    return require_hub(name, "model", f"{flag} FOLDER")


def base_of_adapter(folder: Path) -> str | None:
    """What an adapter was trained on, as its folder names it. Raises UserError where that file is torn."""
    file = folder / ADAPTER_CONFIG
    try:
        return json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except ValueError as error:
        raise UserError(f"invalid JSON: {file} ({error}). Save the adapter again, or give another folder") from None


@contextlib.contextmanager
def readable(name: str, hint: str = "Give a complete model folder with safetensors weights") -> Iterator[None]:
    """What transformers cannot load from `name` (no safetensors, torn files, unknown types) as one UserError."""
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
    """The tokenizer of a model, padding on the left, with the EOS that its replies end with, and a pad token that is
    not EOS; `plain`, without its chat template, which base models may have, too.

    SmolLM2's chat tokenizer ships pad = EOS: whoever masks by `ids != pad` would then never learn to stop. A reply of
    a Gemma that was tuned on chats ends with `<end_of_turn>`, whereas its tokenizer's EOS ends a document.
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
    """The tokens at which the model's own generation stops; none where it does not say."""
    try:
        stops = GenerationConfig.from_pretrained(name).eos_token_id
    except OSError:  # models need not have that file
        return []
    return stops if isinstance(stops, list) else [stops]


def _free_token(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    """A special token of this vocabulary that neither ends nor begins a text and stands in no chat template."""
    vocabulary, template = tokenizer.get_vocab(), tokenizer.chat_template or ""
    special = [t for t in tokenizer.all_special_tokens if t in vocabulary]
    added = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]  # others are text: runs of spaces
    for token in (*(t for t in PAD_TOKENS if t in vocabulary), *special, *added):
        if token not in (tokenizer.eos_token, tokenizer.bos_token) and token not in template:
            return token
    raise UserError(
        f"no pad token other than EOS, and no unused special token: tokenizer of {name}. "
        "Set pad_token in its tokenizer_config.json to a token that no text needs"
    )


def load_config(name: str) -> PretrainedConfig:
    """A model's config.json. Raises UserError where it needs code of its own."""
    with readable(name):
        return AutoConfig.from_pretrained(name, trust_remote_code=False)


def check_policy(name: str, vocabulary: int, targets: Collection[str] = ()) -> PretrainedConfig:
    """The config of a start model whose layers fit: found from its outline, before any weight is read.

    Raises UserError where a tokenizer of `vocabulary` tokens has more than there are embeddings, or no module has the
    name of an adapter's target.
    """
    config = load_config(name)
    with readable(name), torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    check_vocabulary(vocabulary, outline.get_input_embeddings().num_embeddings, name)
    _check_targets(outline, targets, name)
    return config


def check_vocabulary(tokens: int, embeddings: int, name: str) -> None:
    """Raises UserError where a tokenizer has ids that its model has no embedding for."""
    if tokens > embeddings:
        raise UserError(
            f"the tokenizer has {tokens} tokens, but the model has only {embeddings} embeddings: {name}. "
            "Use a model with its own tokenizer, in one folder"
        )


def check_weights(model: nn.Module, name: str) -> None:
    """Raises UserError where a weight is NaN or infinite: everything computed from it would be."""
    broken = [n for n, w in model.named_parameters() if w.is_floating_point() and not w.detach().sum().isfinite()]
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise UserError(f"NaN or infinity in {broken[0]}{more}: weights of {name}. Use an earlier checkpoint of it")


def context_of(config: PretrainedConfig) -> int | None:
    """Positions, in tokens, that a model was made for; None where its kind has no such number."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def four_bit(dtype: torch.dtype | None) -> BitsAndBytesConfig:
    """NF4 weights, multiplied in `dtype` (None: float32). Raises UserError without bitsandbytes."""
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
    """The start model as a causal LM in float32, its frozen weights in NF4 if `load_in_4bit`, with adapters if `lora`.

    `dtype` is the forward's precision (None: float32), in which 4-bit weights are multiplied. `vocabulary` is the
    tokenizer's size. Raises UserError as `check_policy`, and for weights that are no numbers.
    """
    config = check_policy(name, vocabulary, lora.target_modules if lora is not None else ())
    _drop_nothing(config)
    model = _read_policy(name, config, four_bit(dtype) if load_in_4bit else None, device)
    check_weights(model, name)
    if load_in_4bit:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=gradient_checkpointing)
        _keep_one_forward(model)
    if lora is not None:
        model = get_peft_model(model, lora)
        store_frozen_weights(model, dtype)
        release_mmap(model)
    if not load_in_4bit:  # those weights are there already
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
    """The causal LM in float32 on the CPU; or, quantized, on the device, because quantizing takes place there."""
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
    """A trained adapter over its base. Raises UserError where its weights would have to be unpickled."""
    if not Path(folder, SAFETENSORS_WEIGHTS_NAME).is_file():  # peft would take adapter_model.bin without a word
        raise UserError(f"no {SAFETENSORS_WEIGHTS_NAME}: {folder}. Save the adapter with safetensors")
    try:
        with readable(folder):
            return PeftModel.from_pretrained(base, folder)
    except RuntimeError as error:  # shapes that do not fit
        reason = str(error).strip().splitlines()[-1].strip()[:160]
        raise UserError(
            f"the adapter does not fit the base model: {folder} ({reason}). Give its base model with --baseline"
        ) from None


def _drop_nothing(config: PretrainedConfig) -> None:
    """Dropout would act in train mode, and the first ratio would not be 1. TRL turns off what is a module; the rest
    are functions, whose shares the layers read as they are made."""
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        if "drop" in name and isinstance(value, float):
            setattr(text, name, 0.0)


def _keep_one_forward(model: PreTrainedModel) -> None:
    """Sampling and training must see the same weights. On a CPU with bfloat16, bitsandbytes repacks 4-bit weights in
    eval mode, with rounder scales: the first ratio would not be 1, and layers narrower than a block fail."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def lora_modules(targets: Sequence[str]) -> list[str] | str:
    """The modules that get an adapter, as peft takes them: by their names, or all linear layers but the head."""
    return ALL_LINEAR if ALL_LINEAR in targets else list(targets)


def _check_targets(model: PreTrainedModel, targets: Collection[str], name: str) -> None:
    if ALL_LINEAR in targets:
        return
    leaves = {n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    missing = [t for t in targets if t not in leaves]
    if missing:
        raise UserError(
            f"no module named {', '.join(missing)}: --lora-targets, {name}. {did_you_mean(missing[0], leaves)}"
            f"Choose from {', '.join(sorted(leaves))}, or give {ALL_LINEAR}"
        )


def context_problems(
    lengths: Sequence[int], context: int | None, max_new_tokens: int, source: str, model: str = "start model"
) -> list[str]:
    """What is wrong if prompts of so many tokens, alone or with their completions, exceed a model's context."""
    longest = max(lengths)
    if context is None or longest + max_new_tokens <= context:
        return []
    alone = longest > context
    room, flag, more = context, "", ""
    if not alone:
        room, flag, more = context - max_new_tokens, f" plus --max-new-tokens {max_new_tokens}", f" + {max_new_tokens}"
    fixes = [f"--max-new-tokens {context - longest}"] if longest < context else []
    if max_new_tokens < context:
        fixes.append(f"--prompt-length {context - max_new_tokens} (longer prompts are skipped)")
    return [
        f"{sum(n > room for n in lengths)} of {len(lengths)} prompts{flag} are longer than the {model}'s context "
        f"of {context} tokens (the longest: {longest}{more}): {source}. Try "
        f"{' or '.join(fixes) or 'shorter completions'}"
    ]
