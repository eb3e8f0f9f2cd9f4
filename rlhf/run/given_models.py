"""Stores models that a program gives as objects in folders: a run records them by name, and its other processes, a
resumed run and an evaluation load them from there."""

from __future__ import annotations

import atexit
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from rlhf.checkpoints.model_folder import VALUE_HEAD_FILE, find_model
from rlhf.checkpoints.weight_names import check_loaded
from rlhf.data.tokenizer import EOS_IDS, eos_ids, load_tokenizer
from rlhf.distributed.group import from_first
from rlhf.models.load import read_model
from rlhf.models.save import ONE_FILE, WITHOUT_BIAS
from rlhf.settings.training import CRITIC_FILE
from rlhf.utils.errors import UserError
from rlhf.utils.files import saving_tensors, update_dir_atomically

UNHASHED = ("transformers_version", "_name_or_path", "_from_model_config")  # of configs: they change nothing


def check_given_model(model: Any, tokenizer: Any) -> None:
    """Raise UserError for what is neither a name nor a model, and for what is no tokenizer."""
    if isinstance(model, PeftModel):
        raise UserError(
            "a model with an adapter", "model=", "Give model.merge_and_unload(), or its base with the settings of LoRA"
        )
    is_model = isinstance(model, PreTrainedModel) and model.can_generate()
    if not (is_model or isinstance(model, str | Path | None)):
        raise UserError(
            f"neither a name nor a causal model: {model!r:.60}", "model=", "Give a causal model of transformers"
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase | None):
        place = "tokenizer=, processing_class="
        raise UserError(f"not a tokenizer: {tokenizer!r:.60}", place, "Give a tokenizer of transformers")


def stored_start_model(
    model: PreTrainedModel | str | None,
    tokenizer: PreTrainedTokenizerBase | None,
    actor_model: str,
    output: Path | None,
) -> str:
    """Return the name of the start model: of `model`, a name or an object; None: `actor_model`. An object, or a model
    that is given with a `tokenizer`, is stored in the folder OUTPUT_start_model_HASH; without `output` in a folder
    that the program removes at its end. Raises UserError."""
    check_given_model(model, tokenizer)
    is_name = not isinstance(model, PreTrainedModel)
    name = str(model or actor_model)
    if is_name and (tokenizer is None or is_tokenizer_of(tokenizer, find_model(name, "model="))):
        return name

    def store() -> str:
        own = tokenizer
        if own is None:
            own = load_tokenizer(model.config.name_or_path)
            own.init_kwargs[EOS_IDS] = []  # those of its folder: the object's generation config may have others
        whole = model
        if is_name:
            found = find_model(name, "model=")
            whole, tensors = read_model(AutoModelForCausalLM, found)
            check_loaded(tensors, found)
        try:
            whole.generation_config.validate(strict=True)  # as transformers does before it saves
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{reason:.200}", "model.generation_config", "Give the model with valid values") from None
        configs = [
            {key: value for key, value in config.to_diff_dict().items() if key not in UNHASHED}
            for config in (whole.config, whole.generation_config)
        ]
        text = [configs, own.get_vocab(), own.special_tokens_map, own.chat_template]
        identity = hash_of(whole.state_dict(), json.dumps(text, sort_keys=True, default=str))

        def write(staging: Path) -> None:
            with saving_tensors(staging):
                whole.save_pretrained(staging, max_shard_size=ONE_FILE)
                own.save_pretrained(staging)

        beside = output or temporary_folder() / "program"
        return store_once(beside, f"start_model_{identity}", write)

    return from_first(store)


def is_tokenizer_of(tokenizer: PreTrainedTokenizerBase, folder: str) -> bool:
    """Return whether a tokenizer is that of a model: it gives the same ids, and completions end as with it."""
    own = load_tokenizer(folder)
    same = own.get_vocab() == tokenizer.get_vocab() and own.chat_template == tokenizer.chat_template
    return same and tokenizer.eos_token_id in eos_ids(own)


def temporary_folder() -> Path:
    """Return a new folder that is removed when the program ends."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def stored_critic(model: PreTrainedModel, output: Path) -> str:
    """Store a value model, a backbone with the linear layer `score` of one output, as a run stores its critic. Returns
    the folder, OUTPUT_critic_HASH, for the setting `critic`. Raises UserError."""
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise UserError(
            "its head is not one linear layer `score` with one output",
            f"value_model, {type(model).__name__}",
            "Use AutoModelForSequenceClassification with num_labels=1",
        )
    backbone = getattr(model, model.base_model_prefix)

    def write(staging: Path) -> None:
        staging.mkdir()
        with saving_tensors(staging):
            of_head = named(head, "summary.")
            save_file(of_head, staging / VALUE_HEAD_FILE, WITHOUT_BIAS if head.bias is None else None)
            save_file(named(backbone), staging / CRITIC_FILE, {"base": model.config.name_or_path})

    return from_first(lambda: store_once(output, f"critic_{hash_of(model.state_dict())}", write))


def named(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Return the weights of a module on the CPU, with a prefix in their names."""
    return {prefix + name: weight.detach().contiguous().cpu() for name, weight in module.named_parameters()}


def store_once(output: Path, name: str, write: Callable[[Path], None]) -> str:
    """Write a folder beside the run's, if it does not exist. Returns its path."""
    folder = output.with_name(f"{output.name}_{name}")
    if not folder.exists():
        update_dir_atomically(folder, write)
    return str(folder)


def hash_of(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """Return 12 digits of the SHA-256 of named tensors and a text."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:12]


def same_tensors(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two models have the same named tensors."""
    return hash_of(one.state_dict()) == hash_of(other.state_dict())
