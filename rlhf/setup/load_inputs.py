"""Loads what a run needs before its models: the tokenizer, the prompts and the reward functions, and checks them.

Reads no weights and imports none of the slow libraries' models, so that a plan is printed within seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import is_bitsandbytes_available

from rlhf.checkpoints.model_folder import ALL_LINEAR, find_model, linear_modules, missing_targets
from rlhf.checkpoints.run_record import RunRecord
from rlhf.data.chat_template import date_of, encode_prompt, today
from rlhf.data.examples import GivenPrompt, worked_examples
from rlhf.data.prompts import Prompt, PromptSets, given_prompts, load_prompts, or_longest, paragraphs_of
from rlhf.data.sampler import PromptSampler, shorten
from rlhf.data.splits import question_hash
from rlhf.data.tokenizer import check_kwargs, check_vocabulary, config_values, context_problems, ids_of, load_tokenizer
from rlhf.distributed.group import from_first
from rlhf.environments.environment import Environment, make_environment
from rlhf.environments.find import find_instance, gives_rewards
from rlhf.models.device import autocast_dtype
from rlhf.rewards.checks import check_functions, check_reward_folder
from rlhf.rewards.find import (
    EVAL_FUNCTION,
    RewardSources,
    find_eval_functions,
    find_given,
    find_rewards,
    given_eval_functions,
)
from rlhf.rewards.functions import EnvironmentReward
from rlhf.rollout.choice import check_engine
from rlhf.rollout.vllm import require_vllm
from rlhf.settings.fields import convert, settings_of
from rlhf.settings.training import Config
from rlhf.setup.inputs import check_fills_a_batch, check_warmup
from rlhf.setup.run_critic import check_critic_of_run
from rlhf.setup.shape import is_packable, weights_of
from rlhf.utils.console import Screen, counted
from rlhf.utils.errors import Problem, UserError, raise_if
from rlhf.utils.libraries import pip_install

if TYPE_CHECKING:
    from torch import nn

    from rlhf.rewards.find import Functions
    from rlhf.rewards.functions import RewardFunction

PROMPTS_TO_COMPARE = 20  # encoded by the tokenizers of the start model and of the reward model


@dataclass(frozen=True)
class StartModel:
    """A start model before its weights are read."""

    name: str  # as the user wrote it
    folder: str  # or a hub name
    tokenizer: PreTrainedTokenizerBase
    context: int | None  # context length in tokens; None if the model's config has none
    packs: bool  # its episodes can be packed
    date: str  # of the run's start (ISO 8601, local), for chat templates that write the present date


@dataclass(frozen=True)
class RunInputs:
    """What a run needs before its models."""

    start: StartModel
    prompts: PromptSets
    rewards: RewardSources
    eval_functions: dict[str, RewardFunction | nn.Module]  # name in metrics -> function
    teacher: str | None = None  # a folder or hub name
    environment: Environment | None = None


def load_inputs(
    config: Config,
    screen: Screen,
    prompts: Sequence[GivenPrompt] | None = None,
    evaluation_prompts: Sequence[GivenPrompt] | None = None,
    rewards: Functions | None = None,
    reward_weights: Sequence[float] | None = None,
    eval_functions: Functions | None = None,
    environment: Any = None,
) -> RunInputs:
    """Load and check the inputs that the settings describe. Raises UserError.

    Args:
        config: the settings of the run.
        screen: prints notes and warnings.
        prompts: training prompts given in Python. None: use the prompts of the settings.
        evaluation_prompts: evaluation prompts, only with `prompts`. None: hold out a part of `prompts`.
        rewards: one or several functions, modules or names. They replace the settings' reward model and functions.
        reward_weights: one weight per entry of `rewards`. None: all weights are 1.
        eval_functions: evaluation functions. They replace those of the settings.
        environment: the class of an environment. It replaces that of the settings.
    """
    if config.optimizer.optim == "adamw_8bit" and not is_bitsandbytes_available():
        raise UserError(
            "bitsandbytes is not installed", "--optim adamw_8bit", f"Install it with: {pip_install('4bit')}"
        )
    if config.speed.rollout_engine == "vllm":
        require_vllm()
    if rewards is None and reward_weights is not None:
        raise UserError(
            "reward_weights without rewards",
            "reward_weights=",
            "Weights of the configured rewards are those of make_config(reward_weights=)",
        )
    weights = given_weights(reward_weights)
    given = [] if rewards is None else find_given(rewards, config, "rewards")
    sources = find_rewards(config) if rewards is None else RewardSources(None, given, weights)
    construct, instance = find_instance(config, environment)
    learned = sources.folder is not None or any(isinstance(rule, torch.nn.Module) for rule in sources.rules)
    if instance is not None and learned:  # make_config() accepts it
        raise UserError(
            "a reward model scores one completion, not the turns of an environment",
            "environment, rm_model or rewards",
            "Use rm_model=None, and give scores in the environment or with functions",
        )
    if gives_rewards(instance):
        sources = sources.and_also(EnvironmentReward(type(instance).__name__))
    if sources.is_empty and config.model.teacher is None:  # make_config() accepts it
        raise UserError(
            "no reward model and no reward function",
            "rewards",
            "Pass rewards= to make_trainer(), or set rm_model, reward_func or teacher in make_config()",
        )
    watched = find_eval_functions(config) if eval_functions is None else given_eval_functions(config, eval_functions)
    start = find_start_model(config, "--actor-model" if prompts is None else "actor_model")
    sets = _load_prompt_sets(config, start, sources, screen, prompts, evaluation_prompts)
    if config.data.eval_text is not None:
        paragraphs_of(start.tokenizer, config.data.eval_text)
    if sources.folder is not None:
        planned = replace(sets, train=or_longest(sets.train, config.data))
        check_reward_folder(sources.folder, planned, start.tokenizer, config, screen)
    if config.critic_from_reward_model or config.critic.run is not None:
        check_critic(config, sources.folder, start, sets)
    held_out = [p.example for p in sets.evaluation]
    check_functions(list(watched.values()), held_out, "the evaluation prompts", EVAL_FUNCTION)
    teacher = find_teacher(config, start, sets)
    plays = None
    if instance is not None:
        plays = make_environment(config, construct, instance, start.tokenizer, config.run.seed)
    return RunInputs(start, sets, sources, watched, teacher, plays)


def given_weights(weights: Sequence[float] | None) -> tuple[float, ...] | None:
    """Return the weights of reward functions given in Python. Raises UserError for what --reward-weights refuses."""
    return convert(settings_of(Config)["reward_weights"], weights, "reward_weights=")


def find_start_model(config: Config, flag: str) -> StartModel:
    """Find the start model, load its tokenizer and check its config. Does not read the weights. Raises UserError."""
    m = config.model
    folder = find_model(m.actor_model, flag)
    date = from_first(today)
    if config.run.resume:
        date = RunRecord.require(Path(config.run.output), "--resume, --output").date
    data = config.data
    tokenizer = load_tokenizer(folder, data.plain_prompts, date, data.chat_template_kwargs)
    check_kwargs(tokenizer, data.chat_template_kwargs, f"{flag} {m.actor_model}")
    values = config_values(folder)
    check_vocabulary(ids_of(tokenizer), values["vocab_size"], folder)
    targets = set(m.lora_targets) - {ALL_LINEAR} if m.use_lora and "quantization_config" not in values else set()
    raise_if(missing_targets(linear_modules(weights_of(folder)), targets, folder) if targets else [])
    context = values.get("max_position_embeddings")
    return StartModel(m.actor_model, folder, tokenizer, context, is_packable(folder), date)


def check_device(config: Config, start: StartModel, device: torch.device) -> None:
    """Raise UserError if the device does not support the settings' precision or rollout engine, or the start model
    does not support the engine."""
    autocast_dtype(config.model.bf16, device)
    check_engine(config.speed.rollout_engine, start.packs, f"--actor-model {start.name}", device)


def reads_ids(folder: str, tokenizer: PreTrainedTokenizerBase, start: StartModel) -> bool:
    """Return whether the model in `folder`, with its tokenizer, can read the start model's ids as the same tokens."""
    own, needed = (config_values(name)["vocab_size"] for name in (folder, start.folder))
    return own >= needed and tokenizer.get_vocab() == start.tokenizer.get_vocab()


def find_teacher(config: Config, start: StartModel, prompts: PromptSets) -> str | None:
    """Return where to load the teacher from; None without one. Raises UserError if it cannot read the start model's
    ids, or if prompts are too long for it."""
    name = config.model.teacher
    if name is None:
        return None
    folder = find_model(name, "--teacher")
    place = f"--teacher {name}"
    if not reads_ids(folder, load_tokenizer(folder), start):
        raise UserError(
            "the teacher's tokenizer differs from the start model's",
            f"{place}, --actor-model {start.name}",
            "Use a teacher of the start model's family",
        )
    lengths = [len(prompt.ids) for prompt in [*prompts.train, *prompts.evaluation]]
    context = config_values(folder).get("max_position_embeddings")
    raise_if(context_problems(lengths, context, config.sampling.max_new_tokens, place, "teacher"))
    return folder


def check_critic(config: Config, folder: str | None, start: StartModel, prompts: PromptSets) -> None:
    """Raise UserError if a critic cannot start from the reward model in `folder` (None: there is none), or from the
    run of --critic.

    The critic reads the policy's ids in the same micro-batches, and its value head is the reward model's head: one
    linear layer on the hidden states of a causal model.
    """
    if config.critic.run is not None:
        return check_critic_of_run(config, config.critic.run, start.folder)
    m = config.model
    place = f"--critic reward-model, --rm-model {m.rm_model}"
    if folder is None:
        raise UserError("no reward model to start from", "--critic reward-model", "Use --critic separate")
    tensors = weights_of(folder)
    tokenizer = load_tokenizer(folder, date=date_of(start.tokenizer), kwargs=config.data.chat_template_kwargs)
    if len(tensors.get("score.weight", ())) != 2:
        raise UserError("the head is not one linear layer on a causal model", place, "Use --critic separate")
    same = reads_ids(folder, tokenizer, start)
    some = prompts.train[:PROMPTS_TO_COMPARE]
    shots = worked_examples(config.data.few_shot)
    if not same or any(encode_prompt(tokenizer, p.example.messages, shots) != list(p.ids) for p in some):
        raise UserError(
            "the reward model's tokenizer or chat template differs from the start model's",
            place,
            "Use a reward model that was trained from the start model's family, or --critic separate",
        )
    if m.use_lora and not {ALL_LINEAR, *linear_modules(tensors)} & {*m.lora_targets}:
        raise UserError(
            f"the reward model has no module named {', '.join(m.lora_targets)}",
            f"{place}, --lora-targets",
            "Give modules that both models have, or all-linear",
        )
    if config.speed.packed and start.packs and not is_packable(folder):
        raise UserError("the reward model's attention cannot be replaced", place, "Add --no-packed")


def _load_prompt_sets(
    config: Config,
    start: StartModel,
    sources: RewardSources,
    screen: Screen,
    prompts: Sequence[GivenPrompt] | None,
    evaluation_prompts: Sequence[GivenPrompt] | None,
) -> PromptSets:
    """Return the prompts given in Python or those of the settings, checked against the start model and the rewards."""
    data = config.data
    if prompts is None:
        source = f"--prompts {data.prompts}"
        sets = load_prompts(data, start.tokenizer, screen.say)
        if not config.run.only_reward:
            check_fills_a_batch(config, len(sets.train))
    else:
        source = "prompts"
        sets = given_prompts(data, start.tokenizer, prompts, evaluation_prompts, screen.say)
        run = config.run
        if not sets.train and (data.steps_per_topic or run.num_iterations is run.episodes is None):
            fix = "Set num_iterations, and no steps_per_topic, for a loop by hand; or pass texts or chats"
            raise UserError("an empty list", "prompts", fix)
        short = 0 < len(sets.train) < config.batch.batch_size
        if short and not config.run.only_reward:  # a flag is refused; a list in a program is often a first try
            screen.say(
                f"warning: {counted(len(sets.train), 'training prompt')} for batches of {config.batch.batch_size}, so "
                "batches repeat prompts: prompts. Give more prompts, or a smaller batch_size"
            )
    planned = replace(sets, train=or_longest(sets.train, data))
    check_prompts(planned, start, config.episode_tokens, source, screen, data.plain_prompts)
    separate = f"--eval-dataset {data.eval_dataset}" if data.eval_dataset and evaluation_prompts is None else None
    check_overlap(sets, separate or "evaluation_prompts", screen)
    if not config.run.only_reward:
        check_topics(config, sets.train, screen)
        check_warmup(config, PromptSampler(config, sets.train).updates)
    train, evaluation = ([p.example for p in part] for part in (sets.train, sets.evaluation))
    if separate is None:
        check_functions(sources.rules, [*train, *evaluation], source)
    else:  # prompts of --eval-dataset need the columns, too
        check_functions(sources.rules, train, source)
        check_functions(sources.rules, evaluation, separate)
    return sets


def check_prompts(
    prompts: PromptSets, start: StartModel, max_new_tokens: int, source: str, screen: Screen, plain: bool
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
                Problem(
                    f"{chats} prompts are chats of several messages, and the start model has no chat template",
                    f"{source}, start model {start.name}",
                    "Use a chat model, or prompts that are one text each",
                )
            )
        else:
            why = "--plain-prompts was given" if plain else f"{start.name} has no chat template"
            screen.say(f"note: {why}, so prompts are used as plain text without a chat template")
    raise_if(problems)


def check_topics(config: Config, train: Sequence[Prompt], screen: Screen) -> None:
    """Warn if a topic has fewer prompts than a batch: some prompts are then repeated within a batch."""
    sampler = PromptSampler(config, train)
    size = config.batch.batch_size
    counts = {shorten(topic): len(sampler.by_topic[topic]) for topic in sampler.topics}
    short = [f"{topic} {count}" for topic, count in counts.items() if count < size]
    if short:
        screen.say(
            f"warning: {len(short)} topics have fewer prompts than a batch of {size} ({', '.join(short)}), so batches "
            "repeat prompts: --steps-per-topic. Use more prompts or a smaller --batch-size"
        )


def check_overlap(prompts: PromptSets, source: str, screen: Screen) -> None:
    """Warn if evaluation prompts are training prompts too. `source` is the flag or argument that gave them."""
    trained = {question_hash(p.example) for p in prompts.train}
    known = sum(question_hash(p.example) in trained for p in prompts.evaluation)
    if known:
        screen.say(
            f"warning: {known} of the {len(prompts.evaluation)} evaluation prompts are also training prompts, so "
            f"evaluation results are too good: {source}. Use other prompts for evaluation"
        )
