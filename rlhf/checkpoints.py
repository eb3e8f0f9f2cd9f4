"""What a run leaves on the disk as weights: plain Hugging Face files, and the value head beside them."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from rlhf.actor_critic import ActorCritic

VALUE_HEAD_FILE = "value_head.safetensors"


def save_policy(actor_critic: ActorCritic, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the policy (under LoRA its adapter), the tokenizer and the value head into `folder`.

    Loads with `AutoModelForCausalLM` or `PeftModel`, which do not look at the value head.
    """
    actor_critic.policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    head = {name: tensor.contiguous().cpu() for name, tensor in actor_critic.value_head.state_dict().items()}
    save_file(head, folder / VALUE_HEAD_FILE)


def load_value_head(actor_critic: ActorCritic, folder: Path) -> None:
    """Put a saved value head back."""
    actor_critic.value_head.load_state_dict(load_file(folder / VALUE_HEAD_FILE))
