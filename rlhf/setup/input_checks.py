"""Checks of the prompts against the start model: errors for what cannot work, warnings for what is unusual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rlhf.data.prompts import Prompt, PromptSets
from rlhf.data.sampler import PromptSampler, shorten
from rlhf.data.splits import question_hash
from rlhf.models.load import context_problems
from rlhf.settings.training import Config
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError, raise_if


@dataclass(frozen=True)
class StartModel:
    """A start model before its weights are read."""

    name: str  # as the user wrote it
    folder: str  # or a hub name
    tokenizer: PreTrainedTokenizerBase
    context: int | None  # positions that it was made for, tokens; None: no such number


def check_prompts(
    prompts: PromptSets, start: StartModel, max_new_tokens: int, source: str, screen: Screen, plain: bool = False
) -> None:
    """Refuse prompts that the start model cannot read: too long for its context, or chats where it has no template."""
    every = [*prompts.train, *prompts.evaluation]
    chats = sum(len(p.example.messages) > 1 for p in every)
    problems = context_problems([len(p.ids) for p in every], start.context, max_new_tokens, source)
    if start.tokenizer.chat_template is None:
        if chats:
            problems.append(
                f"no chat template, and {chats} prompts are chats of several messages: {source}, start model "
                f"{start.name}. Give a model tuned on chats, or prompts of one text each"
            )
        else:
            why = "--plain-prompts" if plain else f"{start.name} has no chat template"
            screen.say(f"{why}: the model reads prompts as plain text, and the completion follows at once")
    raise_if(problems)


def check_fills_a_batch(config: Config, train: Sequence[Prompt]) -> None:
    """Raise UserError if a batch has more prompts than there are: the same ones, repeated, would fill it."""
    if len(train) < config.batch.batch_size:
        raise UserError(
            f"{len(train)} prompts to train on, fewer than a batch of {config.batch.batch_size}: --prompts "
            f"{config.data.prompts}. Give more (--prompts, --split, --max-prompts), or a smaller --batch-size"
        )


def check_topics(config: Config, train: Sequence[Prompt], screen: Screen) -> None:
    """Warn where a topic has fewer prompts than a batch, so that some come several times in one."""
    sampler, size = PromptSampler(config, train), config.batch.batch_size
    counts = {shorten(topic): len(sampler.by_topic[topic]) for topic in sampler.topics}
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
