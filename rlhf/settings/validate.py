"""Checks of combinations of settings in a training run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlhf.settings.training import (
    BEST_RULES,
    EVAL_METRICS,
    MAX_CONSECUTIVE_SKIPS,
    Config,
    function_name,
)
from rlhf.settings.types import Renaming
from rlhf.utils.processes import size


def validate_training(config: Config) -> list[str]:
    """Return the errors in the settings of a training run, one line each."""
    checks = (_batch, _dropout, _processes, _clip, _speed, _warmup, _kl, _rollback, _rewards)
    checks += (_evaluation, _scan, _export)
    return [*renaming_problems(config.data.columns), *(problem for check in checks for problem in check(config))]


def renaming_problems(columns: Sequence[Renaming]) -> list[str]:
    """Return the errors in the renamed columns: each old and each new name may occur once."""
    problems = []
    for kind, names in (("renamed", [c.old for c in columns]), ("the new name of a column", [c.new for c in columns])):
        twice = sorted({name for name in names if names.count(name) > 1})
        problems += [f"{name!r} is {kind} twice: --columns. Give each name once" for name in twice]
    return problems


def _batch(config: Config) -> list[str]:
    problems = []
    episodes, parts = config.episodes_per_update, config.batch.minibatches
    steps, at_once = config.batch.gradient_accumulation_steps, config.batch.micro_batch_size
    if steps is not None and episodes % (steps * (at_once or 1)):
        of = f"{at_once} episodes (--micro-batch-size) x {steps}" if at_once else f"{steps}"
        problems.append(
            f"{of} micro-batches per optimizer step do not divide the {episodes} episodes of an update: "
            "--gradient-accumulation-steps. Give a divisor, or use --minibatches and --micro-batch-size"
        )
    if episodes % parts:
        nearest = min((d for d in range(1, episodes + 1) if episodes % d == 0), key=lambda d: (abs(d - parts), d))
        of = "batch_size" if config.group_size == 1 else "batch_size x K ="
        problems.append(f"minibatches {parts} does not divide {of} {episodes}: --minibatches. Try {nearest}")
    if config.run.episodes is not None and config.run.episodes < episodes:
        problems.append(
            f"episodes {config.run.episodes} is less than one update of {episodes}: --episodes. "
            f"Try {episodes}, or a smaller --batch-size"
        )
    seeds = config.run.seeds or ()
    if len(set(seeds)) != len(seeds):
        problems.append("a seed appears twice: --seeds. Give each seed once")
    return problems


def _clip(config: Config) -> list[str]:
    problems, (_, high, delta) = [], config.batch.clip
    if delta is not None and delta <= 1 + high:
        problems.append(
            f"delta {delta:g} is not above 1 + epsilon_high = {1 + high:g}, the limit of the clipped ratio: --delta. "
            f"Give a larger value, such as {max(3, math.ceil(2 + high))}, or remove it"
        )
    if config.batch.mask_truncated_completions and config.reward.missing_eos_penalty and config.compared == 1:
        problems.append(
            "the penalty is for completions that are left out of the loss: --missing-eos-penalty with "
            "--mask-truncated-completions. Remove one of them"
        )
    return problems


def _dropout(config: Config) -> list[str]:
    if config.model.has_adapter_dropout and "lm_head" in config.model.lora_targets:
        return ["the head's adapter has no dropout: --lora-dropout, --lora-targets lm_head. Remove one of them"]
    return []


def _processes(config: Config) -> list[str]:
    if config.speed.rollout_engine == "vllm" and size() > 1:
        return [f"vLLM samples in one process only, but a launcher started {size()}: --rollout-engine vllm. Remove it"]
    return []


def _speed(config: Config) -> list[str]:
    if config.speed.rollout_engine == "vllm" and config.sampling.filters:
        return [
            "vLLM does not report which tokens top-k or top-p allow, so the KL cannot be computed: "
            "--rollout-engine vllm with --top-k or --top-p. Remove one of them"
        ]
    return []


def _warmup(config: Config) -> list[str]:
    steps, updates = config.optimizer.warmup_steps, config.run.num_iterations
    if steps >= 1 and steps != int(steps):
        return [
            f"warmup_steps {steps:g} is not a number of updates: --warmup-steps. Give a whole number, or a share of "
            "the run below 1"
        ]
    rising = 0 if updates is None else config.optimizer.warmup_updates(updates)
    if rising and rising >= updates:
        return [
            f"the learning rate would rise for {rising} of {updates} updates and never reach its value: "
            "--warmup-steps. Give a smaller number"
        ]
    return []


def _kl(config: Config) -> list[str]:
    problems, kl = [], config.kl
    if kl.kl_coef == 0 and kl.steered:
        problems.append(
            f"beta starts at 0 and is changed by factors, so it would stay 0: --kl-coef 0, kl_schedule "
            f"{kl.kl_schedule}. Add --kl-schedule fixed, or give a --kl-coef above 0"
        )
    count = len(kl.targets)
    if (count > 1) != (kl.kl_schedule == "phased"):
        problems.append(
            f"{count} KL target{'s' if count > 1 else ''} with kl_schedule {kl.kl_schedule}: --kl-target. "
            "Give several for phased, otherwise one"
        )
    if len({target.per for target in kl.targets}) > 1:
        problems.append("KL targets per sequence and per token in one run: --kl-target. Use the same unit for all")
    if kl.kl_placement == "reward" and config.grpo.scale_rewards != "none":
        problems.append(
            f"a KL in the reward would be divided by the standard deviation of the {config.grpo.scale_rewards}, and "
            f"beta would have no fixed unit: --scale-rewards {config.grpo.scale_rewards}. "
            "Add --kl-placement loss, or --scale-rewards none"
        )
    return problems


def _rollback(config: Config) -> list[str]:
    run = config.run
    if run.rollback_on_kl and (run.keep - 1) * run.save_every < MAX_CONSECUTIVE_SKIPS:
        return [
            f"after {MAX_CONSECUTIVE_SKIPS} updates with a high KL, all checkpoints from before them are deleted: "
            f"--rollback-on-kl, --keep {run.keep}, --save-every {run.save_every}. Raise one of the last two"
        ]
    return []


def _rewards(config: Config) -> list[str]:
    problems = []
    learned, rules, weights = (
        config.model.rm_model is not None,
        config.reward.reward_func,
        config.reward.reward_weights,
    )
    if config.critic_from_reward_model and not learned:
        problems.append(
            "no reward model to start from: --critic reward-model, --rm-model none. Give a reward model, or use "
            "--critic separate"
        )
    if config.critic_from_reward_model and config.model.load_in_4bit:
        problems.append(
            "the reward model is not loaded in 4 bits: --critic reward-model with --load-in-4bit. Remove one of them, "
            "or use --critic separate"
        )
    if not learned and not rules and not config.in_python:  # make_trainer() may receive them
        problems.append(
            "no reward model and no reward function: --rm-model none. Give one of them (--rm-model, --reward-func)"
        )
    if config.reward.control != "none" and config.batch.batch_size == 1:
        problems.append(
            "the scores of one prompt cannot be exchanged with those of others: --control with --batch-size 1. Give a "
            "larger --batch-size"
        )
    if weights is not None and len(weights) != learned + len(rules):
        named = [*(["reward model"] if learned else []), *rules]
        fix = f"Give one for each, in this order: {', '.join(named)}" if named else "Remove it: there are no rewards"
        problems.append(f"{len(weights)} weights for {len(named)} rewards: --reward-weights. {fix}")
    return problems


def _evaluation(config: Config) -> list[str]:
    names = [function_name(rule) for rule in config.reward.eval_func]
    problems, rules = name_problems(names, "--eval-func"), (*BEST_RULES, *names)
    if config.run.best_rule not in rules:
        problems.append(f"best_rule is {config.run.best_rule!r}: --best-rule. Give one of {', '.join(rules)}")
    if config.run.eval_temperature == 0 and config.run.eval_samples > 1:
        problems.append(
            "greedy completions of one prompt are all equal: --eval-samples with --eval-temperature 0. Remove one of "
            "them"
        )
    return problems


def name_problems(names: Sequence[str], source: str) -> list[str]:
    """Return the errors in the names of evaluation functions, which become the names of metrics. `source` is the
    setting or argument that gave them."""
    problems = []
    for name in dict.fromkeys(names):
        if name in EVAL_METRICS:
            problems.append(f"every evaluation has a metric named {name!r}: {source}. Rename the function")
        elif not name.isidentifier():
            problems.append(f"{name!r} cannot be the name of a metric: {source}. Use a function with a name")
        elif names.count(name) > 1:
            problems.append(f"{names.count(name)} evaluation functions are named {name!r}: {source}. Rename them")
    return problems


def _scan(config: Config) -> list[str]:
    run = config.run
    others = {
        "--dry-run": run.dry_run,
        "--check": run.check,
        "--resume": run.resume,
    }
    looks = {"--check-reward": run.check_reward, "--scan": run.scan}
    look = next((flag for flag, given in looks.items() if given), None)  # if both are given, the other one is refused
    return [
        f"this command stops before a run: {look} with {flag}. Remove one of them"
        for flag, given in (others | looks).items()
        if given and look not in (None, flag)
    ]


def _export(config: Config) -> list[str]:
    name = config.export.push_to_hub
    if name is not None and config.run.seeds is not None:
        return [
            f"several runs and one repository: --seeds, --push-to-hub {name}. Push one run afterwards: "
            f"--resume --push-to-hub {name} --output RUN"
        ]
    return []
