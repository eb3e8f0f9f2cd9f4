"""Checks before the first update, without a forward pass of the policy."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.data.chat_template import encode_text
from rlhf.data.prompts import Prompt
from rlhf.models.determinism import CUBLAS, REPRODUCIBLE_CUBLAS
from rlhf.models.logprobs import base_of
from rlhf.rewards.functions import LearnedReward, ModuleReward
from rlhf.rewards.reward_model import RewardModel
from rlhf.rewards.rewards import Rewards
from rlhf.settings.training import Config
from rlhf.setup.footprint import FLOAT
from rlhf.utils.console import gib

COPIES = 3  # of the trained weights in a checkpoint: themselves, and AdamW's two moments
WITHOUT_MOMENTS = 2  # best/ and the final weights
# how far padding may move a score by rounding, in standard deviations of the start model's scores
SCORE_ROUNDING = {None: 1e-3, torch.bfloat16: 1e-1}
MOST_IDS = 64  # of a prompt, shown


@dataclass(frozen=True)
class Check:
    """What a check found, and what to do where it fails."""

    name: str
    found: str
    ok: bool
    hint: str = ""

    @property
    def fault(self) -> str:
        return f"{self.found}: {self.name}. {self.hint}"


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
        f"{gib(free)} GiB free in {there}, {gib(needed)} GiB needed by {copies} checkpoints, best/"
        + (", the final weights and the merged model" if merged else " and the final weights"),
        free >= needed,
        "Free some, name another folder with --output, or train adapters with --use-lora",
    )


def prompt_is_rendered(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Check:
    """The question stands in what the model reads: a chat template may leave a part of a chat out."""
    text, ids = tokenizer.decode(list(prompt.ids)), list(prompt.ids)
    missing = [m["role"] for m in prompt.example.messages if not _holds(tokenizer, text, m["content"])]
    shown = ", ".join(map(str, ids[:MOST_IDS])) + (", ..." if len(ids) > MOST_IDS else "")
    return Check(
        "first prompt",
        f"{len(ids)} tokens, {text!r} = [{shown}]"
        + (f", without its {' and '.join(missing)} text" if missing else ""),
        not missing,
        "Mend the chat template of --actor-model, or the prompts",
    )


def _holds(tokenizer: PreTrainedTokenizerBase, rendered: str, content: str) -> bool:
    """Whether a text stands in another, whatever the tokenizer does to spaces, case and characters it lacks."""
    written = tokenizer.decode(encode_text(tokenizer, content))
    return any("".join(form.split()).casefold() in "".join(rendered.split()).casefold() for form in (content, written))


def determinism(device: torch.device) -> Check:
    """On or off; on, nothing may undo it: cuDNN's trials choose by the clock, cuBLAS needs a workspace of its own."""
    on, cudnn = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn
    undone = [("torch.backends.cudnn.benchmark is on", cudnn.benchmark)]
    if device.type == "cuda":
        workspace = os.environ.get(CUBLAS)
        undone.append((f"{CUBLAS} is {workspace}", workspace not in REPRODUCIBLE_CUBLAS))
    against = [what for what, is_so in undone if is_so and on]
    return Check(
        "determinism",
        f"{'on' if on else 'off'} (torch.use_deterministic_algorithms); cudnn.deterministic "
        f"{'on' if cudnn.deterministic else 'off'}, cudnn.benchmark {'on' if cudnn.benchmark else 'off'}"
        + "".join(f"; {what}" for what in against),
        not against,
        f"Switch cudnn.benchmark off, set {CUBLAS}={REPRODUCIBLE_CUBLAS[0]}, or leave determinism off",
    )


def padding_changes_no_score(rewards: Rewards, prompt: Prompt, dtype: torch.dtype | None) -> Check:
    """A reply scored alone and beside a longer one, to whose length it is padded. Rules read text."""
    short = "Yes."
    chat, moved = list(prompt.example.messages), {}
    for name, function in zip(rewards.names, rewards.functions, strict=True):
        if isinstance(function, (LearnedReward, ModuleReward)):
            long = _long_reply(function, chat)
            alone = function([short], messages=[chat], ended=[True])[0]
            padded = function([short, long], messages=[chat, chat], ended=[True, True])[0]
            moved[name] = abs(alone - padded)
    return Check(
        "padding",
        ", ".join(f"a score of {name} moves by {by:.2g} beside a longer reply" for name, by in moved.items())
        or "rules alone, nothing is padded",
        all(by <= SCORE_ROUNDING[dtype] for by in moved.values()),
        "The model reads its padding: let it heed attention_mask, and set pad_token_id in its config.json",
    )


def _long_reply(function: LearnedReward | ModuleReward, chat: list[dict[str, str]]) -> str:
    """Some sentences, no more than fit a reward model's context behind a prompt."""
    sentence, most = "Yes, and that is all there is to say. ", 8
    if isinstance(function, LearnedReward) and (context := function.model.context) is not None:
        fits = [n for n in range(most + 1) if len(function.model.encode(chat, sentence * n)) <= context]
        most = max(fits, default=0)
    return sentence * most
