"""What can be known before the first step to be wrong, said before it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from config import Config
from rlhf.data.prompts import Prompt, PromptSets
from rlhf.data.sampler import Dealing, one_line
from rlhf.data.splits import question_hash
from rlhf.models.load import context_faults
from rlhf.models.logprobs import base_of
from rlhf.rewards.reward_model import RewardModel
from rlhf.utils.console import Screen
from rlhf.utils.errors import raise_if

COPIES = 3  # of the trained weights in a checkpoint: themselves, and AdamW's two moments
WITHOUT_MOMENTS = 2  # best/ and the final weights
FLOAT = 4  # bytes


@dataclass(frozen=True)
class StartModel:
    """A start model before its weights are read."""

    name: str  # as the user wrote it
    folder: str  # or a hub name
    tokenizer: PreTrainedTokenizerBase
    context: int | None  # positions that it was made for, tokens; None: no such number


def check_prompts(
    prompts: PromptSets, start: StartModel, reply_length: int, source: str, screen: Screen, plain: bool = False
) -> None:
    """Refuse prompts that the start model cannot read: too long for its context, or chats where it has no template."""
    every = [*prompts.train, *prompts.evaluation]
    chats = sum(len(p.example.messages) > 1 for p in every)
    faults = context_faults([len(p.ids) for p in every], start.context, reply_length, source)
    if start.tokenizer.chat_template is None:
        if chats:
            faults.append(
                f"no chat template, and {chats} prompts are chats of several messages: {source}, start model "
                f"{start.name}. Give a model tuned on chats, or prompts of one text each"
            )
        else:
            why = "--plain-prompts" if plain else f"{start.name} has no chat template"
            screen.say(f"{why}: the model reads prompts as plain text, and the completion follows at once")
    raise_if(faults)


def check_topics(config: Config, train: Sequence[Prompt], screen: Screen) -> None:
    """Warn where a topic has fewer prompts than a batch, so that some come several times in one."""
    dealing, size = Dealing(config, train), config.batch.batch_size
    counts = {one_line(topic): len(dealing.stacks[topic]) for topic in dealing.topics}
    short = [f"{topic} {count}" for topic, count in counts.items() if count < size]
    if short:
        screen.say(
            f"warning: {len(short)} topics have fewer prompts than a batch of {size} ({', '.join(short)}): "
            "--steps-per-topic. Some will stand several times in a batch; give more, or a smaller --batch-size"
        )


def check_overlap(prompts: PromptSets, screen: Screen) -> None:
    """Warn where prompts are given for evaluation that are trained on, too."""
    trained = {question_hash(p.example) for p in prompts.train}
    known = sum(question_hash(p.example) in trained for p in prompts.evaluation)
    if known:
        screen.say(
            f"warning: {known} of the {len(prompts.evaluation)} evaluation prompts are trained on, too: "
            "evaluation_prompts. Give others: figures of these flatter"
        )


# --- checks that cost nothing ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """What a check found, and what to do where it fails."""

    name: str
    found: str
    ok: bool
    way_out: str = ""

    @property
    def fault(self) -> str:
        return f"{self.found}: {self.name}. {self.way_out}"


def start_checks(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    policy: PreTrainedModel | PeftModel,
    reward_model: RewardModel | None,
) -> list[Check]:
    """What every start checks, as it needs no forward pass."""
    return [
        pad_is_not_eos(tokenizer),
        vocabularies_fit(tokenizer, policy, reward_model),
        disk_has_room(config, policy),
    ]


def pad_is_not_eos(tokenizer: PreTrainedTokenizerBase) -> Check:
    """Else whoever takes padding for nothing takes the end of a reply for nothing, too, and replies never end."""
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    return Check(
        "pad and EOS",
        f"pad {tokenizer.pad_token!r} ({pad}), EOS {tokenizer.eos_token!r} ({eos})",
        pad is not None and eos is not None and pad != eos,
        "Set pad_token in the start model's tokenizer_config.json to another token than eos_token",
    )


def vocabularies_fit(
    tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel | PeftModel, reward_model: RewardModel | None
) -> Check:
    """Every id that a tokenizer writes has an embedding in its model; and whether both models have one vocabulary."""
    sides = {"--actor-model": (tokenizer, base_of(policy))}
    if reward_model is not None:
        sides["--rm-model"] = (reward_model.tokenizer, reward_model.model)
    sizes = {flag: (max(t.get_vocab().values()) + 1, rows_of(model)) for flag, (t, model) in sides.items()}
    short = {flag: sizes[flag] for flag in sizes if sizes[flag][0] > sizes[flag][1]}
    if short:
        found = ", ".join(
            f"tokenizer of {ids} ids, model of {rows} embeddings ({f})" for f, (ids, rows) in short.items()
        )
    elif reward_model is None:
        found = f"the policy's {sizes['--actor-model'][0]} tokens; no reward model"
    elif reward_model.tokenizer.get_vocab() == tokenizer.get_vocab():
        found = f"policy and reward model have the same {sizes['--actor-model'][0]} tokens"
    else:
        found = (
            f"the policy's {sizes['--actor-model'][0]} tokens are not the reward model's {sizes['--rm-model'][0]}: "
            "text is re-encoded"
        )
    return Check("vocabularies", found, not short, f"Give model and tokenizer as one folder: {', '.join(short)}")


def rows_of(model: PreTrainedModel) -> int:
    """Embeddings that a model has."""
    return model.get_input_embeddings().num_embeddings


def disk_has_room(config: Config, policy: PreTrainedModel | PeftModel) -> Check:
    """For the checkpoints to come, best/ and the final weights, and a whole model where adapters are merged."""
    weights = FLOAT * sum(w.numel() for w in policy.parameters() if w.requires_grad)
    weights *= 1 + config.separate_critic
    copies = config.run.keep + 1  # and the one that is being written
    merged = FLOAT * base_of(policy).num_parameters() if config.export.merge_lora else 0
    needed = weights * (COPIES * copies + WITHOUT_MOMENTS) + merged
    output = Path(config.run.output).absolute()
    there = next(place for place in (output, *output.parents) if place.exists())
    free = shutil.disk_usage(there).free
    if config.run.resume:  # what the run has there already is not needed again
        free += sum(file.stat().st_size for file in output.glob("checkpoint-*/*.safetensors"))
    return Check(
        "free disk",
        f"{free / 2**30:.2f} GiB free in {there}, {needed / 2**30:.2f} GiB needed by {copies} checkpoints, best/"
        + (", the final weights and the merged model" if merged else " and the final weights"),
        free >= needed,
        "Free some, name another folder with --output, or train adapters with --use-lora",
    )
