"""Save and load the weights of a policy as Hugging Face files, with the value head in a separate file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peft import PeftModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from rlhf.checkpoints.model_folder import ADAPTER_FILE, VALUE_HEAD_FILE, WEIGHTS_FILE
from rlhf.checkpoints.trust import read_adapter_config
from rlhf.checkpoints.weight_names import check_loaded, tensor_differences
from rlhf.data.tokenizer import eos_ids
from rlhf.models.actor_critic import Actor, ActorCritic
from rlhf.models.load import bad_weights, load_adapter_weights, read_model
from rlhf.settings.training import CRITIC_FILE, SamplingSettings
from rlhf.utils.errors import RunError, UserError
from rlhf.utils.files import saving_tensors
from rlhf.utils.paths import local_path

OTHER_MODEL = "They belong to another model. Give a folder that this model's run saved"
WITHOUT_BIAS = {"bias": "none"}  # metadata of a value head that has none, as in TRL's value models
ONE_FILE = "1000GB"  # max_shard_size: a single weights file can be replaced atomically


def generation_config(sampling: SamplingSettings, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """Return the settings with which transformers' `generate` samples from the same distribution as training.

    It replaces the start model's: `generate` applies everything in there that is not an argument, such as a repetition
    penalty, and training applies none of it. Stop strings are not included, because every call of `generate` would
    then fail without the argument `tokenizer`, also those of other programs. The model card has them.
    """
    return GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=eos_ids(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
    )


def save_policy(
    actor: Actor, tokenizer: PreTrainedTokenizerBase, sampling: SamplingSettings, folder: str | Path
) -> None:
    """Write the policy (with LoRA its adapter), the tokenizer, and the critic if there is one, to `folder`.

    `AutoModelForCausalLM` or `PeftModel` can load the folder; they ignore the value head and the critic's backbone.
    Raises RunError and writes nothing if a weight is not finite.
    """
    folder = Path(local_path(folder))
    bad = bad_weights(actor)
    if bad:
        raise RunError(f"{len(bad)} weights are not finite, the first is {bad[0]}", folder, "They are not saved")
    more = {} if isinstance(actor.policy, PeftModel) else {"max_shard_size": ONE_FILE}
    actor.policy.generation_config = generation_config(sampling, tokenizer)
    with saving_tensors(folder):
        actor.policy.save_pretrained(folder, **more)
        actor.policy.generation_config.save_pretrained(folder)  # peft does not save it
        tokenizer.save_pretrained(folder)
        if isinstance(actor, ActorCritic):
            head = {name: tensor.contiguous().cpu() for name, tensor in actor.value_head.state_dict().items()}
            save_file(head, folder / VALUE_HEAD_FILE, WITHOUT_BIAS if actor.value_head.summary.bias is None else None)
            if actor.critic is not None:
                critic = {name: w.detach().contiguous().cpu() for name, w in trained_of(actor.critic).items()}
                save_file(critic, folder / CRITIC_FILE, {"base": actor.critic.config.name_or_path})


def trained_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable weights by name."""
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}


def load_policy_weights(actor: Actor, folder: str | Path) -> None:
    """Load a saved policy (or adapter), and its value head if both the actor and the folder have one.

    Raises UserError if the folder has no such weights, or those of another model.
    """
    folder = Path(local_path(folder))
    is_adapter = isinstance(actor.policy, PeftModel)
    file = folder / (ADAPTER_FILE if is_adapter else WEIGHTS_FILE)
    if not file.is_file():
        kind = "a LoRA run" if is_adapter else "a run without LoRA"
        raise UserError(f"no {file.name}", folder, f"Give a folder that save_model wrote in {kind}")
    if is_adapter:
        check_adapter(actor.policy, folder)
        load_adapter_weights(actor.policy, str(folder), OTHER_MODEL)
    else:
        # some names in the file differ (such as the head of GPT-NeoX), so transformers must read it
        saved, found = read_model(type(actor.policy), folder, config=actor.policy.config)
        check_loaded(found, folder, fix=OTHER_MODEL)
        actor.policy.load_state_dict(saved.state_dict())
    if isinstance(actor, ActorCritic) and (folder / VALUE_HEAD_FILE).is_file():
        load_critic(actor.value_head, actor.critic, folder)


def load_critic(value_head: nn.Module, critic: nn.Module | None, folder: Path) -> None:
    """Load a saved value head and, if the critic is a second network, its trainable weights. Raises UserError if
    there is no file, or if it is of another model."""
    file = folder / CRITIC_FILE
    if critic is not None and not file.is_file():
        raise UserError(
            f"no {file.name}", folder, "The critic of that run shared the policy's backbone. Use --critic shared"
        )
    if _is_without_bias(folder / VALUE_HEAD_FILE):
        value_head.summary.bias = None
    _load_file(value_head, folder / VALUE_HEAD_FILE)
    if critic is not None:
        _load_file(critic, file)


def _is_without_bias(file: Path) -> bool:
    with _complete(file), safe_open(file, "pt") as tensors:
        return WITHOUT_BIAS.items() <= (tensors.metadata() or {}).items()


@contextmanager
def _complete(file: Path) -> Iterator[None]:
    """Context manager around the reading of a file. Raises UserError if it is not complete."""
    try:
        yield
    except SafetensorError as error:
        raise UserError(f"not a complete file ({error})", file, "Use another folder of that run") from None


def _load_file(module: nn.Module, file: Path) -> None:
    """Load the trainable weights of a module. Raises UserError if the file has others."""
    with _complete(file):
        saved = load_file(file)
    check_loaded(tensor_differences(saved, trained_of(module)), file, fix=OTHER_MODEL)
    module.load_state_dict(saved, strict=False)


def check_adapter(policy: PeftModel, folder: Path) -> None:
    """Raise UserError if a saved adapter has another configuration. peft only compares shapes."""
    policy_config = policy.peft_config["default"]
    saved_config = read_adapter_config(folder)
    for name in ("r", "lora_alpha", "target_modules"):
        here, there = (
            set(v) if isinstance(v := getattr(c, name), (set, list)) else v for c in (policy_config, saved_config)
        )
        if here != there:
            raise UserError(
                f"another adapter configuration ({name} is {there}, not {here})",
                folder,
                "Give a folder that this model's run saved",
            )
