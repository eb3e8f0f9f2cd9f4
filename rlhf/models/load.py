"""Loads a policy, with LoRA adapters and 4-bit weights if configured."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    load_peft_weights,
    prepare_model_for_kbit_training,
    set_peft_model_state_dict,
)
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import is_bitsandbytes_available

from rlhf.checkpoints.model_folder import ALL_LINEAR, missing_targets, model_files
from rlhf.checkpoints.trust import read_adapter_config, readable
from rlhf.checkpoints.weight_names import check_loaded
from rlhf.data.tokenizer import check_vocabulary, load_config
from rlhf.models.device import autocast
from rlhf.models.reference import release_mmap, store_frozen_weights
from rlhf.models.self_test import check_forward_matches
from rlhf.utils.errors import UserError, first_line, print_line, raise_if, torch_error
from rlhf.utils.libraries import pip_install
from rlhf.utils.paths import is_on_hub


def bad_weights(module: nn.Module, frozen: bool = False) -> list[str]:
    """Return the names of trainable weights (with `frozen`, of all weights) that contain NaN or infinity.

    Synchronizes with the device once.
    """
    weights = {name: weight.detach() for name, weight in module.named_parameters() if frozen or weight.requires_grad}
    weights = {name: weight for name, weight in weights.items() if weight.is_floating_point()}
    if not weights:
        return []
    # the largest absolute value of each weight: NaN if one is NaN
    finite = torch.stack(torch._foreach_norm(list(weights.values()), torch.inf)).isfinite().tolist()
    return [name for name, is_finite in zip(weights, finite, strict=True) if not is_finite]


def check_weights(model: nn.Module, name: str) -> None:
    """Raise UserError if a weight contains NaN or infinity."""
    broken = bad_weights(model, frozen=True)
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise UserError(
            f"NaN or infinity in {broken[0]}{more}", f"weights of {name}", "Use an earlier checkpoint of it"
        )


def four_bit(dtype: torch.dtype | None) -> BitsAndBytesConfig:
    """Return the config of NF4 weights that compute in `dtype` (None: float32). Raises UserError if bitsandbytes is
    not installed."""
    if not is_bitsandbytes_available():
        raise UserError("bitsandbytes is not installed", "--load-in-4bit", f"Install it with: {pip_install('4bit')}")
    compute = dtype or torch.float32
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)


NF4_ERROR = 0.2  # half of the largest gap between NF4's 16 values in [-1, 1] is 0.152


@torch.no_grad()
def check_nf4(device: torch.device) -> None:
    """Quantize a layer with weights in [-1, 1] to NF4 on a device, and check its output.

    Raises UserError if bitsandbytes cannot do this. Its wheels have one library per CUDA version, and may have none
    for the CUDA version of the installed torch.
    """
    weights = torch.linspace(-1, 1, 64).repeat(64, 1)
    try:
        from bitsandbytes.nn import Linear4bit

        layer = Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32)
        layer.load_state_dict({"weight": weights})
        found = layer.to(device)(torch.eye(64, device=device)).cpu()
    except Exception as error:  # without its library, bitsandbytes raises errors of many classes
        reason = first_line(error, type(error).__name__)
        cuda = f" and CUDA {torch.version.cuda}" if device.type == "cuda" else ""
        raise UserError(
            f"bitsandbytes cannot quantize on this device ({reason:.200})",
            "--load-in-4bit",
            f"Install a release for torch {torch.__version__}{cuda} with: pip install --upgrade bitsandbytes, or "
            "train without the flag",
        ) from None
    error = float((found - weights.T).abs().max())
    if not error <= NF4_ERROR:
        raise UserError(
            f"a layer with weights in [-1, 1] has an error of {error:.3f} on {device.type}",
            "--load-in-4bit",
            "Install another release of bitsandbytes, or train without the flag",
        )


def load_policy(
    name: str,
    *,
    lora: LoraConfig | None = None,
    load_in_4bit: bool = False,
    frozen: bool = False,
    dtype: torch.dtype | None = None,
    gradient_checkpointing: bool = False,
    device: torch.device,
    vocabulary: int,
) -> PreTrainedModel | PeftModel:
    """Load the start model in float32, with frozen NF4 weights if `load_in_4bit`, and with adapters if `lora`. With
    `frozen`, load a teacher, whose weights are not trained.

    `dtype` is the precision of the forward pass (None: float32), `vocabulary` the number of the tokenizer's tokens.
    Raises UserError if the file has other tensors than the model, if the model has fewer embeddings than the tokenizer
    has tokens, or no module for a LoRA target, and if a weight contains NaN or infinity.
    """
    config = load_config(name)
    disable_dropout(config)
    quantization = four_bit(dtype) if load_in_4bit else None
    if quantization is not None:
        check_nf4(device)
    model = _read_policy(name, config, quantization, device)
    check_vocabulary(vocabulary, model.get_input_embeddings().num_embeddings, name)
    _check_targets(model, lora.target_modules if lora is not None else (), name)
    check_weights(model, name)
    if load_in_4bit:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=gradient_checkpointing)
        _disable_repacking(model)
    if frozen:
        model.requires_grad_(False)
    if lora is not None:
        model = get_peft_model(model, lora)
    if frozen or lora is not None:
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
    model, found = read_model(AutoModelForCausalLM, name, config=config, quantization_config=quantization, **placement)
    found["mismatched_keys"] |= _reshaped(model)
    check_loaded(found, name)
    return model


def read_model(kind: type, name: str | Path, **more: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Read a model in float32 from safetensors files. Returns it with transformers' loading info, which the caller
    must give to `check_loaded`: otherwise missing weights are random, and those of another shape, too.

    `kind` is a model class or an auto class of transformers, `more` are further arguments of its `from_pretrained`.
    Raises UserError if the files cannot be read.
    """
    name = str(name)
    if is_on_hub(name) and model_files(name) is None:
        print_line(f"downloading the weights of {name}")
    with readable(name):
        return kind.from_pretrained(
            name,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **more,
        )


def _reshaped(model: PreTrainedModel) -> set[tuple]:
    """Return name, shape and needed shape of 4-bit weights of another shape: transformers does not compare them."""
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            quantized = getattr(module.weight, "quant_state", None)
            needed = (module.out_features, module.in_features)
            if quantized is not None and quantized.shape != needed:
                found.add((f"{name}.weight", quantized.shape, needed))
    return found


def load_adapter(base: PreTrainedModel, folder: str) -> PeftModel:
    """Load a trained adapter onto its base, without gradients. Raises UserError if it has no safetensors file, is not
    a plain LoRA adapter, or does not fit."""
    config = read_adapter_config(folder)
    config.inference_mode = True
    with readable(folder):
        model = get_peft_model(base, config)
        load_adapter_weights(model, folder, "They belong to another model. Give the adapter's base with --baseline")
    return model


def load_adapter_weights(model: PeftModel, folder: str, fix: str) -> None:
    """Load the weights of a saved adapter. peft itself only warns about missing tensors, and drops unknown ones.

    Raises UserError, whose message ends with `fix`, if the file has other tensors than the model's adapter.
    """
    try:
        found = set_peft_model_state_dict(model, load_peft_weights(folder, device="cpu"))
    except RuntimeError as error:  # shapes that do not fit
        if torch_error(error) is not None:
            raise
        reason = str(error).strip().splitlines()[-1].strip()[:160]
        raise UserError(f"the tensors have other shapes than the model's ({reason})", folder, fix) from None
    adapter = ".default"  # peft's name of the adapter, which is not in the file. Other missing names are of the base
    missing = [name.replace(adapter, "") for name in found.missing_keys if adapter in name]
    unknown = [name.replace(adapter, "") for name in found.unexpected_keys]
    check_loaded({"missing_keys": missing, "unexpected_keys": unknown, "mismatched_keys": ()}, folder, fix=fix)


def disable_dropout(config: PretrainedConfig) -> None:
    """Set every dropout in the config to 0. TRL disables only dropout modules; layers that call the dropout function
    read its probability from the config. With dropout, the values of a rollout would be random."""
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        if "drop" in name and isinstance(value, float):
            # detail 37: layers without a dropout module, too (this project). With dropout, the first ratio is not 1.
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
