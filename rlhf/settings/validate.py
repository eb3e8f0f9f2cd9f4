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
    checks = (_batch, _dropout, _processes, _clip, _speed, _warmup, _kl, _rollback, _rewards)
    checks += (_evaluation, _looks, _export)
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


def _problem(what: str, fix: str, *settings: str) -> Problem:
    return Problem(what, fix=fix, settings=settings)


def _batch(config: Config) -> Iterator[Problem]:
    episodes = config.episodes_per_update
    parts = config.batch.minibatches
    steps = config.batch.gradient_accumulation_steps
    at_once = config.batch.micro_batch_size
    if steps is not None and episodes % (steps * (at_once or 1)):
        of = f"{at_once} episodes (--micro-batch-size) x {steps}" if at_once else f"{steps}"
        yield _problem(
            f"{of} micro-batches per optimizer step do not divide the {episodes} episodes of an update",
            "Give a divisor, or use --minibatches and --micro-batch-size",
            "gradient_accumulation_steps",
        )
    if episodes % parts:
        nearest = min((d for d in range(1, episodes + 1) if episodes % d == 0), key=lambda d: (abs(d - parts), d))
        of = "batch_size" if config.group_size == 1 else "batch_size x K ="
        yield _problem(f"minibatches {parts} does not divide {of} {episodes}", f"Try {nearest}", "minibatches")
    if config.run.episodes is not None and config.run.episodes < episodes:
        yield _problem(
            f"episodes {config.run.episodes} is less than one update of {episodes}",
            f"Try {episodes}, or a smaller --batch-size",
            "episodes",
        )
    seeds = config.run.seeds or ()
    if len(set(seeds)) != len(seeds):
        yield _problem("a seed appears twice", "Give each seed once", "seeds")


def _clip(config: Config) -> Iterator[Problem]:
    _, high, delta = config.batch.clip
    if delta is not None and delta <= 1 + high:
        yield _problem(
            f"delta {delta:g} is not above 1 + epsilon_high = {1 + high:g}, the limit of the clipped ratio",
            f"Give a larger value, such as {max(3, math.ceil(2 + high))}, or remove it",
            "delta",
        )
    if config.batch.mask_truncated_completions and config.reward.missing_eos_penalty and config.compared == 1:
        yield _problem(
            "the penalty is for completions that are left out of the loss",
            "Remove one of them",
            "missing_eos_penalty",
            "mask_truncated_completions",
        )


def _dropout(config: Config) -> Iterator[Problem]:
    if config.model.has_adapter_dropout and "lm_head" in config.model.lora_targets:
        yield _problem("the head's adapter has no dropout", "Remove one of them", "lora_dropout", "lora_targets")


def _processes(config: Config) -> Iterator[Problem]:
    if config.speed.rollout_engine == "vllm" and size() > 1:
        yield _problem(
            f"vLLM samples in one process only, but a launcher started {size()}", "Remove it", "rollout_engine"
        )


def _speed(config: Config) -> Iterator[Problem]:
    if config.speed.rollout_engine == "vllm" and config.sampling.filters:
        yield _problem(
            "vLLM does not report which tokens top-k or top-p allow, so the KL cannot be computed",
            "Remove one of them",
            "rollout_engine",
            "top_k",
            "top_p",
        )


def _warmup(config: Config) -> Iterator[Problem]:
    steps = config.optimizer.warmup_steps
    updates = config.run.num_iterations
    if steps >= 1 and steps != int(steps):
        yield _problem(
            f"warmup_steps {steps:g} is not a number of updates",
            "Give a whole number, or a share of the run below 1",
            "warmup_steps",
        )
        return
    rising = 0 if updates is None else config.optimizer.warmup_updates(updates)
    if rising and rising >= updates:
        yield _problem(
            f"the learning rate would rise for {rising} of {updates} updates and never reach its value",
            "Give a smaller number",
            "warmup_steps",
        )


def _kl(config: Config) -> Iterator[Problem]:
    kl = config.kl
    if kl.kl_coef == 0 and kl.steered:
        yield _problem(
            "beta starts at 0 and is changed by factors, so it would stay 0",
            "Add --kl-schedule fixed, or give a --kl-coef above 0",
            "kl_coef",
            "kl_schedule",
        )
    count = len(kl.targets)
    if (count > 1) != (kl.kl_schedule == "phased"):
        yield _problem(
            f"{count} KL target{'s' if count > 1 else ''} with kl_schedule {kl.kl_schedule}",
            "Give several for phased, otherwise one",
            "kl_target",
        )
    if len({target.per for target in kl.targets}) > 1:
        yield _problem("KL targets per sequence and per token in one run", "Use the same unit for all", "kl_target")
    if kl.kl_placement == "reward" and config.grpo.scale_rewards != "none":
        yield _problem(
            "a KL in the reward would be divided by the standard deviation of the "
            f"{config.grpo.scale_rewards}, and beta would have no fixed unit",
            "Add --kl-placement loss, or --scale-rewards none",
            "scale_rewards",
        )


def _rollback(config: Config) -> Iterator[Problem]:
    run = config.run
    if run.rollback_on_kl and run.save_every and (run.keep - 1) * run.save_every < MAX_CONSECUTIVE_SKIPS:
        yield _problem(
            f"after {MAX_CONSECUTIVE_SKIPS} updates with a high KL, all checkpoints from before them are deleted",
            "Raise one of the last two",
            "rollback_on_kl",
            "keep",
            "save_every",
        )


def _rewards(config: Config) -> Iterator[Problem]:
    learned = config.model.rm_model is not None
    rules = config.reward.reward_func
    weights = config.reward.reward_weights
    if config.critic_from_reward_model and not learned:
        yield _problem(
            "no reward model to start from", "Give a reward model, or use --critic separate", "critic", "rm_model"
        )
    if config.critic_from_reward_model and config.model.load_in_4bit:
        yield _problem(
            "the reward model is not loaded in 4 bits",
            "Remove one of them, or use --critic separate",
            "critic",
            "load_in_4bit",
        )
    teacher = config.model.teacher is not None
    has_environment = config.environment.environment is not None
    if has_environment and learned:
        yield _problem(
            "a reward model scores one completion, not the turns of an environment",
            "Add --rm-model none, and give scores in the environment or with --reward-func",
            "environment",
            "rm_model",
        )
    if has_environment and config.speed.rollout_engine == "vllm":
        yield _problem("vLLM samples one turn of an episode", "Remove one of them", "environment", "rollout_engine")
    if not (learned or rules or teacher or has_environment or config.in_python):  # make_trainer() may receive them
        yield _problem(
            "no reward model and no reward function",
            "Give one of them (--rm-model, --reward-func), or a teacher if the algorithm uses one",
            "rm_model",
        )
    if config.reward.control != "none" and teacher:
        yield _problem("the teacher's scores are not exchanged", "Remove one of them", "control", "teacher")
    if config.reward.control != "none" and config.batch.batch_size == 1:
        yield _problem(
            "the scores of one prompt cannot be exchanged with those of others",
            "Give a larger --batch-size",
            "control",
            "batch_size",
        )
    if weights is not None and len(weights) != learned + len(rules):
        named = [*(["reward model"] if learned else []), *rules]
        fix = f"Give one for each, in this order: {', '.join(named)}" if named else "Remove it: there are no rewards"
        yield _problem(f"{len(weights)} weights for {len(named)} rewards", fix, "reward_weights")


def _evaluation(config: Config) -> Iterator[Problem]:
    names = [function_name(rule) for rule in config.reward.eval_func]
    yield from (replace(p, settings=("eval_func",)) for p in name_problems(names, ""))
    rules = (*BEST_RULES, *names)
    if config.run.best_rule not in rules:
        yield _problem(f"best_rule is {config.run.best_rule!r}", f"Give one of {', '.join(rules)}", "best_rule")
    if config.run.eval_temperature == 0 and config.run.eval_samples > 1:
        yield _problem(
            "greedy completions of one prompt are all equal", "Remove one of them", "eval_samples", "eval_temperature"
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


def _looks(config: Config) -> list[Problem]:
    run = config.run
    looks = {"check": bool(run.check), "write_parts": run.write_parts is not None}
    others = {"dry_run": run.dry_run, "resume": run.resume}
    look = next((name for name, given in looks.items() if given), None)  # if both are given, the other one is refused
    return [
        Problem("this command stops before a run", fix="Remove one of them", settings=(look, name))
        for name, given in (others | looks).items()
        if given and look not in (None, name)
    ]


def _export(config: Config) -> Iterator[Problem]:
    name = config.export.push_to_hub
    if name is not None and config.run.seeds is not None:
        yield _problem(
            "several runs and one repository",
            f"Push one run afterwards: --resume --push-to-hub {name} --output RUN",
            "seeds",
            "push_to_hub",
        )
