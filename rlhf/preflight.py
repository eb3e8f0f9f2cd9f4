"""What can be known before the first step to be wrong, said before it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from config import Config
from reward_model.scorer import METRICS_FILE, RewardModel, pair_accuracy, pairs_that_fit
from rlhf.data.chat_template import encode_prompt
from rlhf.data.examples import Example
from rlhf.data.prompts import Prompt, PromptSets
from rlhf.data.sampler import Dealing, one_line
from rlhf.data.splits import question_hash
from rlhf.models.load import context_faults, context_of, load_config, load_tokenizer
from rlhf.models.logprobs import base_of
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError, raise_if

LOWEST_ACCURACY = 0.6
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


def check_reward_context(folder: str, examples: Sequence[Example], reply_length: int, source: str) -> None:
    """Raise UserError if prompts with completions of `reply_length` tokens exceed a reward model's context.

    Reads its tokenizer and configuration alone. If its tokenizer is not the start model's, completions may turn out
    longer: then `RewardModel.raw_scores` raises.
    """
    context = context_of(load_config(folder))
    if context is None or not examples:
        return
    tokenizer = load_tokenizer(folder)
    lengths = [len(encode_prompt(tokenizer, e.messages)) for e in examples]
    raise_if(context_faults(lengths, context, reply_length, source, "reward model"))


def check_reward_model(
    model: RewardModel, name: str, pairs: Sequence[Example], allow_weak: bool, screen: Screen
) -> None:
    """Refuse a reward model that is hardly better than chance, or no better than the replies' length.

    Its own metrics.json says how good it is; a foreign one is measured on held-out `pairs` where there are any.
    """
    if model.record is not None:
        accuracy, baseline, source = model.record["accuracy"], model.record["length_baseline"], METRICS_FILE
    else:
        known = pairs_that_fit(model, [p for p in pairs if p.chosen is not None], None)
        if not known:
            screen.say(
                f"warning: no {METRICS_FILE} beside {name}, and no pairs to measure it on: its scores are unproved"
            )
            return
        measured = pair_accuracy(model, known)
        accuracy, baseline, source = measured.accuracy, measured.length_baseline, f"{len(known)} held-out pairs"
        screen.say(f"warning: no {METRICS_FILE} beside {name}: measured on {source}, accuracy {accuracy:.3f}")
    weak = weakness({"accuracy": accuracy, "length_baseline": baseline})
    if weak is None:
        return
    fault = f"{weak}, from {source}: --rm-model {name}"
    if not allow_weak:
        raise UserError(f"{fault}. Train a better one, or add --allow-weak-reward-model")
    screen.say(f"warning: {fault}; going on as asked")


def weakness(record: dict) -> str | None:
    """Why training refuses a reward model with this record, in words; None if it does not."""
    accuracy, baseline = record["accuracy"], record["length_baseline"]
    if accuracy >= max(LOWEST_ACCURACY, baseline):
        return None
    return f"a weak reward model (accuracy {accuracy:.3f}, length baseline {baseline:.3f}; at least {LOWEST_ACCURACY})"


def check_leaks(model: RewardModel, prompts: PromptSets, screen: Screen) -> None:
    """Warn where the reward model was trained on questions that it is now to judge: its scores of those flatter."""
    seen = set((model.record or {}).get("train_questions", []))
    for name, part in (("evaluation", prompts.evaluation), ("training", prompts.train)):
        known = sum(question_hash(p.example) in seen for p in part)
        if known:
            screen.say(
                f"warning: the reward model was trained on {known} of the {len(part)} {name} prompts' questions. "
                "Give both commands the same data and --split"
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


def check_tokenizers(model: RewardModel, name: str, tokenizer: PreTrainedTokenizerBase, screen: Screen) -> None:
    """Say where replies are encoded a second time."""
    if model.tokenizer.get_vocab() != tokenizer.get_vocab():
        screen.say(
            f"warning: the reward model's tokenizer is not the start model's: --rm-model {name}. "
            "Replies reach it as text, encoded again by its own"
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
