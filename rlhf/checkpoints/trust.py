"""What a model folder of other people must not contain: code, kernels from the hub, and adapters that import modules.

`trust_remote_code` is False wherever a model is loaded, and weights are read from safetensors files only, which cannot
contain code. What remains are the names in JSON files, for which transformers and peft import modules.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, get_tokenizer_config
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import CONFIG_NAME, cached_file

from rlhf.checkpoints.model_folder import ADAPTER_CONFIG, ADAPTER_FILE, read_object
from rlhf.utils.errors import Problem, UserError, advice_for, first_line, raise_if, torch_error

if TYPE_CHECKING:
    from peft import LoraConfig


@contextlib.contextmanager
def readable(name: str, hint: str = "Give a complete model folder with safetensors weights") -> Iterator[None]:
    """Context manager that turns loading errors of transformers and peft into one UserError, except those of memory.
    Files that are corrupted, or have odd values, raise errors of many classes."""
    try:
        yield
    except (MemoryError, UserError):
        raise
    except Exception as error:
        if torch_error(error) is not None:
            raise
        if "trust_remote_code" in str(error):
            raise UserError(needs_code(name)) from None
        for file in Path(name).glob("*.safetensors") if isinstance(error, FileNotFoundError) else ():
            file.open("rb").close()  # safetensors reports a file as missing if the system refuses to read it
        reason = first_line(error, type(error).__name__)[:200]
        raise UserError("cannot be loaded", f"{name} ({reason})", advice_for(error, hint)) from None


# --- code and kernels that files name --------------------------------------------------------------------------------

# values that transformers computes with torch; the others load kernels from the hub, or import other packages
COMPUTED_WITH = {
    "attn_implementation": ("eager", "sdpa", "flex_attention"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
QUANTIZATION = "bitsandbytes"  # the method that --load-in-4bit uses, too
# transformers would use any of its classes that a file names; these two load further folders and their code
TOKENIZER_CLASS = re.compile(r"(?!Auto|Rag)\w*(Tokenizer|TokenizerFast|Backend)")


def check_no_code(name: str) -> None:
    """Raise UserError if a model's config.json or tokenizer_config.json names code or kernels."""
    problems = tokenizer_code_problems(get_tokenizer_config(name), name)
    if file_of(name, CONFIG_NAME) is not None:
        config, _ = PreTrainedConfig.get_config_dict(name)  # config.json may name another file for this version
        problems += code_problems(config, name)
    raise_if(problems)


def code_problems(config: dict[str, Any], name: str) -> list[Problem]:
    """Return what a model's config.json names that would load code or kernels, one line each.

    An `auto_map` beside a model type of transformers is not used: without trust_remote_code, transformers has its own
    classes for it. Inside the config of a part of the model it is an error: transformers may offer to run that code.
    """
    place = f"{CONFIG_NAME} of {name}"
    model_type = config.get("model_type")
    is_known = isinstance(model_type, str) and model_type in CONFIG_MAPPING_NAMES
    problems = [needs_code(f"auto_map in {place}")] if config.get("auto_map") and not is_known else []
    problems += _class_problems(config.get("tokenizer_class"), place)
    return problems + [line for key, value in config.items() for line in _value_problems(key, value, place)]


def _value_problems(key: str, value: Any, place: str, is_part: bool = False) -> Iterator[Problem]:
    """Yields the problems of `code_problems` for one key, and for the keys in its value."""
    setting = key.strip("_").removesuffix("_internal")
    if setting in COMPUTED_WITH:
        allowed = COMPUTED_WITH[setting]
        for one in value.values() if isinstance(value, dict) else [value]:
            if one is not None and one not in allowed:
                fix = f"Set it to one of {', '.join(allowed)}"
                yield Problem(f"{key} {one!r:.80} would load a kernel or a package", place, fix)
    elif setting == "quantization_config" and value:
        method = value.get("quant_method") if isinstance(value, dict) else value
        in_bits = isinstance(value, dict) and (value.get("load_in_4bit") or value.get("load_in_8bit"))
        if method != QUANTIZATION and not in_bits:
            yield Problem(
                f"quantization method {method!r:.80} is not supported",
                f"{key} in {place}",
                f"Use weights that are not quantized, or quantized with {QUANTIZATION}",
            )
    elif setting == "auto_map" and is_part and value:
        yield needs_code(f"auto_map inside {place}")
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, one in parts:
        yield from _value_problems(str(part), one, place, is_part=True)


def tokenizer_code_problems(settings: dict[str, Any], name: str) -> list[Problem]:
    """Return what a tokenizer_config.json names that would load code, one line each. An `auto_map` beside a class of
    transformers is not used."""
    place = f"{TOKENIZER_CONFIG_FILE} of {name}"
    named = settings.get("tokenizer_class")
    if problems := _class_problems(named, place):
        return problems
    known = {"PreTrainedTokenizer", "TokenizersBackend", *TOKENIZER_MAPPING_NAMES.values()}
    known = {one.removesuffix("Fast") for one in known if one is not None}
    needed = settings.get("auto_map") and (named is None or named.removesuffix("Fast") not in known)
    return [needs_code(f"auto_map in {place}")] if needed else []


def _class_problems(named: Any, place: str) -> list[Problem]:
    """Return an error line if a file names a class that is not a tokenizer's."""
    if named is None or (isinstance(named, str) and TOKENIZER_CLASS.fullmatch(named)):
        return []
    return [Problem(f"tokenizer_class {named!r:.80} is not a tokenizer", place, "Give a model with its own tokenizer")]


def needs_code(place: str) -> Problem:
    """Return the error for a model that is not part of transformers."""
    return Problem(
        "the model needs trust_remote_code, which is not supported",
        place,
        "Use a model whose architecture is part of transformers",
    )


def file_of(name: str, file: str) -> str | None:
    """Return the path of a file of a model, from its folder, the local cache or the hub; None if it has no such
    file."""
    return cached_file(name, file, _raise_exceptions_for_missing_entries=False)


# --- adapters --------------------------------------------------------------------------------------------------------

# keys of adapter_config.json that may have any value: LoRA as in this project and in most published adapters. Not
# use_dora and lora_bias: rollouts merge the matrices of an adapter only.
LORA_KEYS = {
    *("task_type", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "r", "target_modules"),
    *("exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias", "use_rslora", "modules_to_save"),
    *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
}
INITS = (True, False, "gaussian")  # values of init_lora_weights that leave the base model unchanged


def read_adapter_config(folder: str | Path) -> LoraConfig:
    """Return the configuration of the LoRA adapter in a folder, from known keys only: some others make peft import the
    module that they name. Raises UserError if the folder has no safetensors file, or if a key that is not known has
    another value than peft's default."""
    from peft import LoraConfig  # slow to import, and only adapters need it

    if not Path(folder, ADAPTER_FILE).is_file():  # peft would unpickle adapter_model.bin without a warning
        raise UserError(f"no {ADAPTER_FILE}", folder, "Save the adapter with safetensors")
    file = Path(folder, ADAPTER_CONFIG)
    stored = read_object(file)
    defaults = LoraConfig().to_dict()
    problems = [
        Problem(
            f"{key} is not a setting of a plain LoRA adapter ({value!r:.80})",
            file,
            "Merge the adapter into its base model with the program that made it, or remove the key if it has no "
            "effect",
        )
        for key, value in stored.items()
        if key not in LORA_KEYS and value and value != defaults.get(key) and not _has_no_effect(key, value)
    ]
    raise_if(problems)
    with readable(str(folder)):
        return LoraConfig(**{key: value for key, value in stored.items() if key in LORA_KEYS})


def _has_no_effect(key: str, value: Any) -> bool:
    """True for a value that says how the adapter was made, and that peft is not given here."""
    if key == "auto_mapping":  # the class of the base model, if it is one of transformers
        return isinstance(value, dict) and str(value.get("parent_library")).split(".")[0] == "transformers"
    return key == "init_lora_weights" and value in INITS
