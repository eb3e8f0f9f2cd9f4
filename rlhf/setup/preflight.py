"""Preflight checks that need no forward pass of the policy."""

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
from rlhf.models.load import NF4_ERROR, nf4_error
from rlhf.models.logprobs import base_of
from rlhf.rewards.functions import LearnedReward, ModuleReward
from rlhf.rewards.reward_model import RewardModel
from rlhf.rewards.rewards import Rewards
from rlhf.rollout.graph_trial import try_graphs
from rlhf.settings.training import Config
from rlhf.setup.shape import FLOAT
from rlhf.utils.console import gib

COPIES = 3  # a checkpoint holds the trained weights and AdamW's two moments
WITHOUT_MOMENTS = 2  # best/ and the final weights
# largest change of a score by rounding if padding is added, in standard deviations of the start model's scores
SCORE_ROUNDING = {None: 1e-3, torch.bfloat16: 1e-1}
MOST_IDS = 64  # printed ids of a prompt


@dataclass(frozen=True)
class Check:
    """The result of a check, and how to fix a failure."""

    name: str
    found: str
    ok: bool
    hint: str = ""

    @property
    def problem(self) -> str:
        return f"{self.found}: {self.name}. {self.hint}"


def start_checks(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    policy: PreTrainedModel | PeftModel,
    reward_model: RewardModel | None,
    writes: bool = True,
) -> list[Check]:
    """Return the checks that every run makes before training, because they are fast; that of the disk only if the run
    `writes` files."""
    found = [pad_is_not_eos(tokenizer), vocabularies_fit(tokenizer, policy, reward_model)]
    if writes:
        found.append(disk_has_room(config, policy, reward_model.model if reward_model is not None else None))
    return found


def pad_is_not_eos(tokenizer: PreTrainedTokenizerBase) -> Check:
    """Check that pad and EOS are different tokens. Otherwise code that ignores padding also ignores EOS, and the
    policy does not learn to end a completion."""
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
    """Check that every token id has an embedding in its model, and report if both vocabularies are the same."""
    sides = {"--actor-model": (tokenizer, base_of(policy))}
    if reward_model is not None:
        sides["--rm-model"] = (reward_model.tokenizer, reward_model.model)
    sizes = {flag: (max(t.get_vocab().values()) + 1, rows_of(model)) for flag, (t, model) in sides.items()}
    short = {flag: sizes[flag] for flag in sizes if sizes[flag][0] > sizes[flag][1]}
    if short:
        found = ", ".join(
            f"the tokenizer has {ids} ids, the model {rows} embeddings ({f})" for f, (ids, rows) in short.items()
        )
    elif reward_model is None:
        found = f"policy {sizes['--actor-model'][0]} tokens, no reward model"
    elif reward_model.tokenizer.get_vocab() == tokenizer.get_vocab():
        found = f"policy and reward model have the same {sizes['--actor-model'][0]} tokens"
    else:
        found = (
            f"policy {sizes['--actor-model'][0]} tokens, reward model {sizes['--rm-model'][0]} tokens; the "
            "vocabularies differ, so completions are re-tokenized"
        )
    return Check(
        "vocabularies", found, not short, f"Use a model folder with its matching tokenizer: {', '.join(short)}"
    )


def rows_of(model: PreTrainedModel) -> int:
    """Return the number of embeddings of a model."""
    return model.get_input_embeddings().num_embeddings


def disk_has_room(
    config: Config, policy: PreTrainedModel | PeftModel, reward_model: PreTrainedModel | None = None
) -> Check:
    """Check the disk space for checkpoints, best/, the final weights and with --merge-lora the merged model."""
    trained = sum(w.numel() for w in policy.parameters() if w.requires_grad)
    if config.critic_from_reward_model and reward_model is not None and not config.model.use_lora:
        trained += reward_model.num_parameters()
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
    text, ids = tokenizer.decode(list(prompt.ids)), list(prompt.ids)
    missing = [m["role"] for m in prompt.example.messages if not _holds(tokenizer, text, m["content"])]
    shown = ", ".join(map(str, ids[:MOST_IDS])) + (", ..." if len(ids) > MOST_IDS else "")
    return Check(
        "first prompt",
        f"{len(ids)} tokens, {text!r} = [{shown}]"
        + (f", the text of these roles is missing: {', '.join(missing)}" if missing else ""),
        not missing,
        "Fix the chat template of --actor-model, or the prompts",
    )


def _holds(tokenizer: PreTrainedTokenizerBase, rendered: str, content: str) -> bool:
    """True if `rendered` contains `content`, apart from the tokenizer's changes to spaces, case and characters."""
    written = tokenizer.decode(encode_text(tokenizer, content))
    return any("".join(form.split()).casefold() in "".join(rendered.split()).casefold() for form in (content, written))


def determinism(device: torch.device) -> Check:
    """Report if deterministic algorithms are on. If they are, check that no other setting undoes them: cuDNN's
    benchmark selects kernels by timing, and cuBLAS needs a fixed workspace."""
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


def nf4_layer_works(device: torch.device) -> Check:
    """Check that bitsandbytes quantizes and multiplies a layer correctly on this device."""
    error = nf4_error(device)
    return Check(
        "4-bit layer",
        f"largest error of a layer with weights in [-1, 1]: {error:.3f} on {device.type}",
        error <= NF4_ERROR,
        "Install another release of bitsandbytes, or remove --load-in-4bit",
    )


def graphs_do_not_hang() -> Check:
    """Sample with CUDA graphs in a separate process under a time limit: on some GPUs with some drivers, mostly of
    laptops, a graph never ends. The processes of a run that hangs can only be killed."""
    problem = try_graphs()
    return Check(
        "CUDA graphs",
        problem or "sampling with CUDA graphs gives the tokens of sampling without them",
        problem is None,
        "Update the GPU's driver, or use --rollout-engine slots",
    )


def padding_changes_no_score(rewards: Rewards, prompt: Prompt, dtype: torch.dtype | None) -> Check:
    """Check that padding does not change a score: score a completion alone, and padded in a batch with a longer one.

    Only reward models and modules are checked. Reward functions receive text, which has no padding.
    """
    short = "Yes."
    chat, moved = list(prompt.example.messages), {}
    for name, function in zip(rewards.names, rewards.functions, strict=True):
        if isinstance(function, (LearnedReward, ModuleReward)):
            long = _long_completion(function, chat)
            alone = function([short], messages=[chat], ended=[True])[0]
            padded = function([short, long], messages=[chat, chat], ended=[True, True])[0]
            moved[name] = abs(alone - padded)
    return Check(
        "padding",
        ", ".join(f"padding changes a score of {name} by {by:.2g}" for name, by in moved.items())
        or "only reward functions, nothing is padded",
        all(by <= SCORE_ROUNDING[dtype] for by in moved.values()),
        "Make the model use attention_mask, and set pad_token_id in its config.json",
    )


def _long_completion(function: LearnedReward | ModuleReward, chat: list[dict[str, str]]) -> str:
    """Return several sentences that fit into a reward model's context after the prompt."""
    sentence, most = "Yes, and that is all there is to say. ", 8
    if isinstance(function, LearnedReward) and (context := function.model.context) is not None:
        fits = [n for n in range(most + 1) if len(function.model.encode(chat, sentence * n)) <= context]
        most = max(fits, default=0)
    return sentence * most
