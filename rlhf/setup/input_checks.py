"""Checks the prompts against the start model and the batch. Raises errors or prints warnings."""

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
from rlhf.utils.errors import raise_if


@dataclass(frozen=True)
class StartModel:
    """A start model before its weights are read."""

    name: str  # as the user wrote it
    folder: str  # or a hub name
    tokenizer: PreTrainedTokenizerBase
    context: int | None  # context length in tokens; None if the model's config has none


def check_prompts(
    prompts: PromptSets, start: StartModel, max_new_tokens: int, source: str, screen: Screen, plain: bool = False
) -> None:
    """Raise UserError if prompts are too long for the start model's context, or are chats and it has no chat template.

    Args:
        prompts: training and evaluation prompts.
        start: the start model.
        max_new_tokens: tokens of a completion, which must fit into the context after the prompt.
        source: the flag or argument that gave the prompts, for messages.
        screen: prints a note if prompts are read as plain text.
        plain: --plain-prompts was given.
    """
    every = [*prompts.train, *prompts.evaluation]
    chats = sum(len(p.example.messages) > 1 for p in every)
    problems = context_problems([len(p.ids) for p in every], start.context, max_new_tokens, source)
    if start.tokenizer.chat_template is None:
        if chats:
            problems.append(
                f"{chats} prompts are chats of several messages, and the start model has no chat template: {source}, "
                f"start model {start.name}. Use a chat model, or prompts that are one text each"
            )
        else:
            why = "--plain-prompts was given" if plain else f"{start.name} has no chat template"
            screen.say(f"note: {why}, so prompts are used as plain text without a chat template")
    raise_if(problems)


def check_topics(config: Config, train: Sequence[Prompt], screen: Screen) -> None:
    """Warn if a topic has fewer prompts than a batch: some prompts are then repeated within a batch."""
    sampler, size = PromptSampler(config, train), config.batch.batch_size
    counts = {shorten(topic): len(sampler.by_topic[topic]) for topic in sampler.topics}
    short = [f"{topic} {count}" for topic, count in counts.items() if count < size]
    if short:
        screen.say(
            f"warning: {len(short)} topics have fewer prompts than a batch of {size} ({', '.join(short)}), so batches "
            "repeat prompts: --steps-per-topic. Use more prompts or a smaller --batch-size"
        )


def check_overlap(prompts: PromptSets, screen: Screen) -> None:
    """Warn if evaluation prompts are training prompts too."""
    trained = {question_hash(p.example) for p in prompts.train}
    known = sum(question_hash(p.example) in trained for p in prompts.evaluation)
    if known:
        screen.say(
            f"warning: {known} of the {len(prompts.evaluation)} evaluation prompts are also training prompts, so "
            "evaluation results are too good: evaluation_prompts. Use other prompts for evaluation"
        )
