"""What a run leaves on the disk as weights: plain Hugging Face files, and the value head beside them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from peft import PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from rlhf.actor_critic import Actor, ActorCritic
from rlhf.errors import UserError
from rlhf.files import disk_errors
from rlhf.system import sync_file

WEIGHTS_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
BEST_FOLDER = "best"
MERGED_FOLDER = "merged"
VALUE_HEAD_FILE = "value_head.safetensors"
ONE_FILE = "1000GB"  # weights in one file can be put in place at one stroke


def save_policy(actor: Actor, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the policy (under LoRA its adapter), the tokenizer and the value head, if there is one, into `folder`.

    Loads with `AutoModelForCausalLM` or `PeftModel`, which do not look at the value head.
    """
    more = {} if isinstance(actor.policy, PeftModel) else {"max_shard_size": ONE_FILE}
    with disk_errors():
        actor.policy.save_pretrained(folder, **more)
        tokenizer.save_pretrained(folder)
        if isinstance(actor, ActorCritic):
            head = {name: tensor.contiguous().cpu() for name, tensor in actor.value_head.state_dict().items()}
            save_file(head, folder / VALUE_HEAD_FILE)


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Renew a saved model in place: `write` fills a folder beside it, then file by file takes the old one's place.

    So `folder` holds a loadable model at all times: the weights are one file, and the others do not change in a run.
    """
    beside = folder.with_name(folder.name + ".new")
    shutil.rmtree(beside, ignore_errors=True)
    write(beside)
    for file in beside.iterdir():  # names may reach the disk before what they name
        sync_file(file)
    if not folder.exists():
        beside.rename(folder)
        return
    for file in sorted(beside.iterdir()):
        os.replace(file, folder / file.name)
    beside.rmdir()


def load_policy_weights(actor: Actor, folder: Path) -> None:
    """Put a saved policy (or adapter) back, and its value head where actor and folder both have one.

    Raises UserError where the folder holds no such weights or another model's.
    """
    is_adapter = isinstance(actor.policy, PeftModel)
    file = folder / (ADAPTER_FILE if is_adapter else WEIGHTS_FILE)
    if not file.is_file():
        raise UserError(f"no {file.name}: {folder}. Give a folder that save_model wrote, of the same kind of run")
    try:
        if is_adapter:
            _check_adapter(actor.policy, folder)
            set_peft_model_state_dict(actor.policy, load_peft_weights(str(folder), device="cpu"))
        else:
            missing, unknown = actor.policy.load_state_dict(load_file(file), strict=False)
            tied = set(actor.policy.all_tied_weights_keys)
            if set(missing) - tied or unknown:
                raise RuntimeError(f"{len(set(missing) - tied)} weights missing, {len(unknown)} unknown")
        head = folder / VALUE_HEAD_FILE
        if isinstance(actor, ActorCritic) and head.is_file():
            actor.value_head.load_state_dict(load_file(head))
    except RuntimeError as error:
        raise UserError(
            f"another model's weights: {folder} ({str(error).splitlines()[0]:.120}). Give this model's"
        ) from None


def _check_adapter(policy: PeftModel, folder: Path) -> None:
    """peft loads another adapter's weights without a word where the shapes happen to fit."""
    mine, theirs = policy.peft_config["default"], PeftConfig.from_pretrained(str(folder))
    for name in ("r", "lora_alpha", "target_modules"):
        here, there = (set(v) if isinstance(v := getattr(c, name), (set, list)) else v for c in (mine, theirs))
        if here != there:
            raise UserError(f"another adapter's weights ({name} {there}, not {here}): {folder}. Give this model's")
