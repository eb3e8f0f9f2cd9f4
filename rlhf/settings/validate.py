"""Checks of combinations of settings in a training run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlhf.settings.training import (
    BEST_RULES,
    EVAL_METRICS,
    MAX_CONSECUTIVE_SKIPS,
    Config,
    function_name,
)
from rlhf.settings.types import Renaming
from rlhf.utils.errors import Problem
from rlhf.utils.processes import size


def validate_training(config: Config) -> list[Problem]:
    """Return the errors in the settings of a training run, one line each."""
    checks = (_batch, _sampling, _clip, _warmup, _kl, _rewards, _evaluation, _run)
    return [*renaming_problems(config.data.columns), *(problem for check in checks for problem in check(config))]


def renaming_problems(columns: Sequence[Renaming]) -> list[Problem]:
    """Return the errors in the renamed columns: each old and each new name may occur once."""
    problems = []
    for kind, names in (("renamed", [c.old for c in columns]), ("the new name of a column", [c.new for c in columns])):
        twice = sorted({name for name in names if names.count(name) > 1})
        problems += [
            Problem(f"{name!r} is {kind} twice", fix="Give each name once", settings=("columns",)) for name in twice
        ]
    return problems


def _batch(config: Config) -> Iterator[Problem]:
    episodes = config.episodes_per_update
    parts = config.batch.minibatches
    steps = config.batch.gradient_accumulation_steps
    at_once = config.batch.micro_batch_size
    if steps is not None and episodes % (steps * (at_once or 1)):
        of = f"{at_once} episodes (--micro-batch-size) x {steps}" if at_once else f"{steps}"
        yield Problem(
            f"{of} micro-batches per optimizer step do not divide the {episodes} episodes of an update",
            fix="Give a divisor, or use --minibatches and --micro-batch-size",
            settings=("gradient_accumulation_steps",),
        )
    if episodes % parts:
        nearest = min((d for d in range(1, episodes + 1) if episodes % d == 0), key=lambda d: (abs(d - parts), d))
        of = "batch_size" if config.group_size == 1 else "batch_size x K ="
        yield Problem(
            f"minibatches {parts} does not divide {of} {episodes}", fix=f"Try {nearest}", settings=("minibatches",)
        )
    if config.run.episodes is not None and config.run.episodes < episodes:
        yield Problem(
            f"episodes {config.run.episodes} is less than one update of {episodes}",
            fix=f"Try {episodes}, or a smaller --batch-size",
            settings=("episodes",),
        )
    seeds = config.run.seeds or ()
    if len(set(seeds)) != len(seeds):
        yield Problem("a seed appears twice", fix="Give each seed once", settings=("seeds",))


def _sampling(config: Config) -> Iterator[Problem]:
    if config.model.has_adapter_dropout and "lm_head" in config.model.lora_targets:
        yield Problem(
            "the head's adapter has no dropout", fix="Remove one of them", settings=("lora_dropout", "lora_targets")
        )
    if config.speed.rollout_engine != "vllm":
        return
    if size() > 1:
        yield Problem(
            f"vLLM samples in one process only, but a launcher started {size()}",
            fix="Remove it",
            settings=("rollout_engine",),
        )
    if config.sampling.filters:
        yield Problem(
            "vLLM does not report which tokens top-k or top-p allow, so the KL cannot be computed",
            fix="Remove one of them",
            settings=("rollout_engine", "top_k", "top_p"),
        )


def _clip(config: Config) -> Iterator[Problem]:
    _, high, delta = config.batch.clip
    if delta is not None and delta <= 1 + high:
        yield Problem(
            f"delta {delta:g} is not above 1 + epsilon_high = {1 + high:g}, the limit of the clipped ratio",
            fix=f"Give a larger value, such as {max(3, math.ceil(2 + high))}, or remove it",
            settings=("delta",),
        )
    if config.batch.mask_truncated_completions and config.reward.missing_eos_penalty and config.compared == 1:
        yield Problem(
            "the penalty is for completions that are left out of the loss",
            fix="Remove one of them",
            settings=("missing_eos_penalty", "mask_truncated_completions"),
        )


def _warmup(config: Config) -> Iterator[Problem]:
    steps = config.optimizer.warmup_steps
    updates = config.run.num_iterations
    rising = 0 if updates is None else config.optimizer.warmup_updates(updates)
    if steps >= 1 and steps != int(steps):
        yield Problem(
            f"warmup_steps {steps:g} is not a number of updates",
            fix="Give a whole number, or a share of the run below 1",
            settings=("warmup_steps",),
        )
    elif rising and rising >= updates:
        yield Problem(
            f"the learning rate would rise for {rising} of {updates} updates and never reach its value",
            fix="Give a smaller number",
            settings=("warmup_steps",),
        )


def _kl(config: Config) -> Iterator[Problem]:
    kl = config.kl
    if kl.kl_coef == 0 and kl.steered:
        yield Problem(
            "beta starts at 0 and is changed by factors, so it would stay 0",
            fix="Add --kl-schedule fixed, or give a --kl-coef above 0",
            settings=("kl_coef", "kl_schedule"),
        )
    count = len(kl.targets)
    if (count > 1) != (kl.kl_schedule == "phased"):
        yield Problem(
            f"{count} KL target{'s' if count > 1 else ''} with kl_schedule {kl.kl_schedule}",
            fix="Give several for phased, otherwise one",
            settings=("kl_target",),
        )
    if len({target.per for target in kl.targets}) > 1:
        yield Problem(
            "KL targets per sequence and per token in one run",
            fix="Use the same unit for all",
            settings=("kl_target",),
        )
    if kl.kl_placement == "reward" and config.grpo.scale_rewards != "none":
        yield Problem(
            (
                "a KL in the reward would be divided by the standard deviation of the "
                f"{config.grpo.scale_rewards}, and beta would have no fixed unit"
            ),
            fix="Add --kl-placement loss, or --scale-rewards none",
            settings=("scale_rewards",),
        )


def _rewards(config: Config) -> Iterator[Problem]:
    learned = config.model.rm_model is not None
    rules = config.reward.reward_func
    weights = config.reward.reward_weights
    if config.critic_from_reward_model and not learned:
        yield Problem(
            "no reward model to start from",
            fix="Give a reward model, or use --critic separate",
            settings=("critic", "rm_model"),
        )
    if config.critic_from_reward_model and config.model.load_in_4bit:
        yield Problem(
            "the reward model is not loaded in 4 bits",
            fix="Remove one of them, or use --critic separate",
            settings=("critic", "load_in_4bit"),
        )
    if not learned and not rules and not config.in_python:  # make_trainer() may receive them
        yield Problem(
            "no reward model and no reward function",
            fix="Give one of them (--rm-model, --reward-func)",
            settings=("rm_model",),
        )
    if config.reward.control != "none" and config.batch.batch_size == 1:
        yield Problem(
            "the scores of one prompt cannot be exchanged with those of others",
            fix="Give a larger --batch-size",
            settings=("control", "batch_size"),
        )
    if weights is not None and len(weights) != learned + len(rules):
        named = [*(["reward model"] if learned else []), *rules]
        fix = f"Give one for each, in this order: {', '.join(named)}" if named else "Remove it: there are no rewards"
        yield Problem(f"{len(weights)} weights for {len(named)} rewards", fix=fix, settings=("reward_weights",))


def _evaluation(config: Config) -> Iterator[Problem]:
    names = [function_name(rule) for rule in config.reward.eval_func]
    for problem in name_problems(names, ""):
        yield replace(problem, settings=("eval_func",))
    rules = (*BEST_RULES, *names)
    if config.run.best_rule not in rules:
        yield Problem(
            f"best_rule is {config.run.best_rule!r}", fix=f"Give one of {', '.join(rules)}", settings=("best_rule",)
        )
    if config.run.eval_temperature == 0 and config.run.eval_samples > 1:
        yield Problem(
            "greedy completions of one prompt are all equal",
            fix="Remove one of them",
            settings=("eval_samples", "eval_temperature"),
        )


def _run(config: Config) -> Iterator[Problem]:
    run = config.run
    if run.rollback_on_kl and (run.keep - 1) * run.save_every < MAX_CONSECUTIVE_SKIPS:
        yield Problem(
            f"after {MAX_CONSECUTIVE_SKIPS} updates with a high KL, all checkpoints from before them are deleted",
            fix="Raise one of the last two",
            settings=("rollback_on_kl", "keep", "save_every"),
        )
    looks = {"check": bool(run.check), "write_parts": run.write_parts is not None}
    others = {"dry_run": run.dry_run, "resume": run.resume}
    look = next((name for name, given in looks.items() if given), None)  # if both are given, the other one is refused
    for name, given in (others | looks).items():
        if given and look not in (None, name):
            yield Problem("this command stops before a run", fix="Remove one of them", settings=(look, name))
    repository = config.export.push_to_hub
    if repository is not None and run.seeds is not None:
        yield Problem(
            "several runs and one repository",
            fix=f"Push one run afterwards: --resume --push-to-hub {repository} --output RUN",
            settings=("seeds", "push_to_hub"),
        )


def name_problems(names: Sequence[str], source: str) -> list[Problem]:
    """Return the errors in the names of evaluation functions, which become the names of metrics. `source` is the
    setting or argument that gave them."""
    problems = []
    for name in dict.fromkeys(names):
        if name in EVAL_METRICS:
            problems.append(Problem(f"every evaluation has a metric named {name!r}", source, "Rename the function"))
        elif not name.isidentifier():
            problems.append(Problem(f"{name!r} cannot be the name of a metric", source, "Use a function with a name"))
        elif names.count(name) > 1:
            problems.append(
                Problem(f"{names.count(name)} evaluation functions are named {name!r}", source, "Rename them")
            )
    return problems
