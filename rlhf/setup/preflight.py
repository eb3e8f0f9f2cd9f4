"""Preflight checks that need no forward pass of the policy. What can be wrong with a model or its tokenizer is checked
when they are loaded."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.data.chat_template import encode_text
from rlhf.data.prompts import Prompt
from rlhf.models.logprobs import base_of
from rlhf.rewards.functions import ModuleReward
from rlhf.rewards.reward_model import RewardModel
from rlhf.rewards.rewards import Rewards
from rlhf.rollout.graph_trial import graph_problem
from rlhf.settings.training import Config
from rlhf.setup.shape import FLOAT
from rlhf.utils.console import gib
from rlhf.utils.errors import Problem

COPIES = 3  # a checkpoint holds the trained weights and AdamW's two moments
WITHOUT_MOMENTS = 2  # best/ and the final weights
# largest change of a score by rounding if padding is added, in standard deviations of the start model's scores
SCORE_ROUNDING = {None: 1e-3, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Check:
    """The result of a check, and how to fix a failure."""

    name: str
    found: str
    ok: bool
    hint: str = ""

    @property
    def problem(self) -> Problem:
        return Problem(self.found, self.name, self.hint)


def disk_has_room(
    config: Config, policy: PreTrainedModel | PeftModel, reward_model: RewardModel | None = None
) -> Check:
    """Check the disk space for checkpoints, best/, the final weights and with --merge-lora the merged model."""
    trained = sum(w.numel() for w in policy.parameters() if w.requires_grad)
    if config.critic_from_reward_model and reward_model is not None and not config.model.use_lora:
        trained += reward_model.model.num_parameters()
    elif config.separate_critic or config.critic_from_reward_model:
        trained *= 2
    weights = FLOAT * trained
    copies = config.run.keep + 1  # one more exists while it is being written
    merged = FLOAT * base_of(policy).num_parameters() if config.export.merge_lora else 0
    needed = weights * (COPIES * copies + WITHOUT_MOMENTS) + merged
    output = Path(config.run.output).absolute()
    there = next(place for place in (output, *output.parents) if place.exists())
    free = shutil.disk_usage(there).free
    if config.run.resume:  # the run's existing checkpoints will be replaced
        free += sum(file.stat().st_size for file in output.glob("checkpoint-*/*.safetensors"))
    return Check(
        "free disk",
        f"{gib(free)} GiB free in {there}, {gib(needed)} GiB needed for {copies} checkpoints, best/"
        + (", the final weights and the merged model" if merged else " and the final weights"),
        free >= needed,
        "Free disk space, use another folder with --output, or train adapters with --use-lora",
    )


def prompt_is_rendered(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Check:
    """Check that the model's input contains all messages of a prompt: a chat template may omit some."""
    text = tokenizer.decode(list(prompt.ids))
    missing = [m["role"] for m in prompt.example.messages if not _holds(tokenizer, text, m["content"])]
    return Check(
        "first prompt",
        f"{len(prompt.ids)} tokens, {text!r}"
        + (f", the text of these roles is missing: {', '.join(missing)}" if missing else ""),
        not missing,
        "Fix the chat template of --actor-model, or the prompts",
    )


def _holds(tokenizer: PreTrainedTokenizerBase, rendered: str, content: str) -> bool:
    """True if `rendered` contains `content`, apart from the tokenizer's changes to spaces, case and characters."""
    written = tokenizer.decode(encode_text(tokenizer, content))
    return any("".join(form.split()).casefold() in "".join(rendered.split()).casefold() for form in (content, written))


def graphs_do_not_hang(policy: PreTrainedModel | PeftModel, dtype: torch.dtype | None, again: bool = True) -> Check:
    """Sample with CUDA graphs in a separate process under a time limit: on some GPUs with some drivers, mostly of
    laptops, a graph never ends. The processes of a run that hangs can only be killed. `again`: `graph_problem`."""
    problem = graph_problem(base_of(policy).config.model_type, "float32" if dtype is None else "bfloat16", again)
    return Check(
        "CUDA graphs",
        problem or "sampling with CUDA graphs gives the tokens of sampling without them",
        problem is None,
        "Update the GPU's driver, or use --rollout-engine slots",
    )


def padding_changes_no_score(rewards: Rewards, prompt: Prompt, dtype: torch.dtype | None) -> Check:
    """Check that padding does not change a score: score a completion alone, and padded in a batch with a longer one.

    Only modules are checked. Reward functions receive text, which has no padding, and reward models are loaded with a
    class of transformers that uses the mask.
    """
    short = "Yes."
    long = "Yes, and that is all there is to say. " * 8
    chat = list(prompt.example.messages)
    moved = {}
    for name, function in zip(rewards.names, rewards.functions, strict=True):
        if isinstance(function, ModuleReward):
            alone = function([short], messages=[chat], ended=[True])[0]
            padded = function([short, long], messages=[chat, chat], ended=[True, True])[0]
            moved[name] = abs(alone - padded)
    return Check(
        "padding",
        ", ".join(f"padding changes a score of {name} by {by:.2g}" for name, by in moved.items())
        or "no modules as reward functions, nothing is padded",
        all(by <= SCORE_ROUNDING[dtype] for by in moved.values()),
        "Make the model use attention_mask, and set pad_token_id in its config.json",
    )
