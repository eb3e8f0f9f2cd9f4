"""`--check`: all checks of a run, and one update tried out. Every check is a function that returns one `Check`.

Every start runs those of `preflight.start_checks`, which cost nothing; it prints nothing unless one fails.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from rlhf.models.actor_critic import set_adapter_dropout
from rlhf.models.budget import budget_of
from rlhf.models.device import autocast, autocast_dtype, available, memory_in_use
from rlhf.models.logprobs import base_of, scaled_logits
from rlhf.models.save import load_policy_weights
from rlhf.rollout.completions import Rollout
from rlhf.settings.training import Config
from rlhf.setup.build import Components, build_trainer
from rlhf.setup.memory import forecaster_of
from rlhf.setup.preflight import Check, determinism, padding_changes_no_score, prompt_is_rendered, start_checks
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.console import Screen, gib
from rlhf.utils.errors import UserError, raise_if

# How far from 1 a ratio, and from 0 a log-ratio, may be on average: what rounding does if rows of other lengths stand
# beside (bfloat16 has 8 bits).
ROUNDING = {None: 1e-4, torch.bfloat16: 2e-2}
RELOADED = 1e-4  # logits and score units: the same weights in the same forward differ by nothing
# The forecast is of full replies to the longest prompts, so above what is measured; libraries differ by machine.
MORE, SLACK = 1.25, 128 * 2**20


# --- all of them -----------------------------------------------------------------------------------------------------


def check_start(config: Config, components: Components) -> None:
    """What every start checks: silent where all holds. Raises UserError with all that fails."""
    raise_if([check.fault for check in _start_checks(config, components) if not check.ok])


def check_run(config: Config, components: Components, screen: Screen) -> None:
    """All checks, a line each. Raises UserError where one fails. The output folder is not touched."""
    found: list[Check] = []
    with tempfile.TemporaryDirectory(prefix="rlhf_check_", ignore_cleanup_errors=True) as folder:
        try:
            for check in all_checks(config, components, Path(folder)):
                found.append(check)
        except Exception as error:  # whatever a library or a reward raises at a fault is what a check is to find
            reason = (str(error).strip().splitlines() or [""])[0]
            found.append(Check("the rest", f"{type(error).__name__}: {reason:.200}", False, "Mend this, then again"))
    show_checks(found, screen)
    failed = [check.name for check in found if not check.ok]
    if failed:
        raise UserError(
            f"{len(failed)} of {len(found)} checks failed ({', '.join(failed)}): --check. The way out stands above"
        )


def show_checks(found: list[Check], screen: Screen) -> None:
    """A line each: the check, whether it holds, what was found, and where it fails the way out."""
    screen.say("checks:")
    screen.facts([(c.name, f"ok      {c.found}" if c.ok else f"FAILED  {c.found}. {c.hint}") for c in found])


def all_checks(config: Config, components: Components, folder: Path) -> Iterator[Check]:
    """One after another; `folder` is for what must be written. The weights are afterwards what they were before."""
    yield from _start_checks(config, components)
    device = base_of(components.policy).device
    yield prompt_is_rendered(components.tokenizer, components.prompts.train[0])
    yield determinism(device)
    yield padding_changes_no_score(
        components.rewards, components.prompts.train[0], autocast_dtype(config.model.bf16, device)
    )
    own = dataclasses.replace(config, run=dataclasses.replace(config.run, output=str(folder / "run")))
    yield from update_checks(build_trainer(own, components), components, folder / "saved")


def _start_checks(config: Config, components: Components) -> list[Check]:
    return start_checks(config, components.tokenizer, components.policy, components.reward_model)


def update_checks(trainer: OnPolicyLoop, components: Components, folder: Path) -> Iterator[Check]:
    """On one rollout, before any step; on one update; on the weights, saved before it and loaded after."""
    rollout = trainer.collector.collect(trainer.prompts_of(1), 1)
    yield first_kl_is_zero(rollout, trainer.dtype)
    yield first_ratio_is_one(trainer, rollout)
    before = outputs(trainer, rollout)
    trainer.save_model(folder)
    yield steps_are_as_planned(trainer, rollout)
    yield memory_matches_estimate(trainer, components)
    yield weights_come_back(trainer, rollout, before, folder)


# --- before the first step -------------------------------------------------------------------------------------------


def first_kl_is_zero(rollout: Rollout, dtype: torch.dtype | None) -> Check:
    """Policy and reference are the start model, both, so their log-probabilities are the same."""
    apart = (rollout.logprobs - rollout.ref_logprobs)[rollout.mask]
    kl = float(apart.sum()) / len(rollout.mask)
    return Check(
        "first KL",
        f"{kl:.2g} nats/sequence, log-probabilities {float(apart.abs().mean()):.2g} apart per token, on "
        f"{len(rollout.mask)} replies",
        float(apart.abs().mean()) <= ROUNDING[dtype],
        "The reference is not the start model: give a whole model, or an adapter merged into it, as --actor-model",
    )


@torch.no_grad()
def first_ratio_is_one(trainer: OnPolicyLoop, rollout: Rollout) -> Check:
    """P_new / P_rollout under the forward of the first pass's minibatches, in train mode, before any step: dropout of
    the model's own, or a row that sees another's tokens, would show. The adapters' dropout is asked for: without it
    the ratio must be 1, and what it makes of it is told."""
    trainer.model.train()
    set_adapter_dropout(trainer.actor.policy, 0.0)
    plain = _apart_from_one(trainer, rollout)
    with_dropout = ""
    if trainer.config.model.has_adapter_dropout:
        share = trainer.config.model.lora_dropout
        set_adapter_dropout(trainer.actor.policy, share)
        with trainer.learner.dropout_stream(1):
            dropped = float(_apart_from_one(trainer, rollout).mean())
        with_dropout = f" without dropout; {dropped:.2g} on average with --lora-dropout {share:g}"
    return Check(
        "first ratio",
        f"{float(plain.mean()):.2g} from 1 on average, {float(plain.max()):.2g} at most, on {len(plain):,} "
        f"tokens{with_dropout}",
        float(plain.mean()) <= ROUNDING[trainer.dtype],
        "The training forward is not the one that measured the rollout: try --no-packed, and report it",
    )


def _apart_from_one(trainer: OnPolicyLoop, rollout: Rollout) -> Tensor:
    """How far from 1 the ratio is, of each reply token, (N,)."""
    device, completions, most = trainer.accelerator.device, rollout.completions, trainer.config.batch.micro_batch_size
    tokens, apart = budget_of(device).tokens_per_micro_batch, []
    for rows in trainer.learner.minibatches(1, 0):
        for part in completions.split(rows, most, tokens, trainer.micro_batch_budget.packed):
            micro_batch = completions.micro_batch(part, trainer.micro_batch_budget.packed)
            with autocast(device, trainer.dtype):
                logprobs, _, _ = trainer.actor(
                    micro_batch, trainer.config.sampling.temperature, completions.allowed_mask(micro_batch)
                )
            apart.append((torch.exp(logprobs - rollout.logprobs[micro_batch.row_index]) - 1)[micro_batch.mask].abs())
    return torch.cat(apart)


@torch.no_grad()
def outputs(trainer: OnPolicyLoop, rollout: Rollout) -> list[Tensor]:
    """Logits (M, V) of the first reply, and under PPO its values (1, T); kept off the device."""
    trainer.model.eval()
    micro_batch = rollout.completions.micro_batch([0], trainer.micro_batch_budget.packed)
    with autocast(trainer.accelerator.device, trainer.dtype):
        hidden = trainer.actor.forward_backbone(micro_batch)
        found = [
            scaled_logits(trainer.actor.policy, trainer.actor.policy_hidden(hidden), 1.0),
            trainer.actor.values(hidden, micro_batch.mask),
        ]
    return [tensor.cpu() for tensor in found if tensor is not None]


# --- one update ------------------------------------------------------------------------------------------------------


def steps_are_as_planned(trainer: OnPolicyLoop, rollout: Rollout) -> Check:
    """Takes an update on the rollout, and counts what the optimizer does."""
    taken: list[int] = []
    hook = register_optimizer_step_post_hook(lambda *_: taken.append(1))
    try:
        trainer.learner.run(trainer.advantages(rollout, trainer.collector.score(rollout).shaped), 1)
    finally:
        hook.remove()
    planned = trainer.config.optimizer_steps(1)
    return Check(
        "optimizer steps",
        f"{planned:,} planned in an update, {len(taken):,} taken, {trainer.progress.optimizer_steps:,} logged; "
        f"{trainer.config.optimizer_steps(trainer.updates):,} planned in {trainer.updates:,} updates",
        planned == len(taken) == trainer.progress.optimizer_steps,
        "The plan is not what is trained: report it with these settings",
    )


def memory_matches_estimate(trainer: OnPolicyLoop, components: Components) -> Check:
    """What the update took, against the plan's forecast of updates: of full replies, so that it is seldom reached."""
    device = trainer.accelerator.device
    measured = memory_in_use(device) - components.memory_before
    predicted, there = forecaster_of(trainer)(trainer.config), available(device)
    return Check(
        "memory",
        f"about {gib(predicted.peak)} GiB predicted for full replies, {gib(measured)} GiB taken by one update, "
        f"{gib(there)} GiB free for it",
        measured <= predicted.peak * MORE + SLACK and predicted.peak <= there,
        "Make room: --micro-batch-size 1, --gradient-checkpointing, --use-lora or a smaller --max-new-tokens",
    )


def weights_come_back(trainer: OnPolicyLoop, rollout: Rollout, before: list[Tensor], folder: Path) -> Check:
    """Weights saved before the update, loaded after it: logits and values are those of `before`."""
    name, hint = "save and reload", "What is saved is not what is trained: report it with these settings"
    with torch.no_grad():
        for weight in trainer.model.parameters():
            if weight.requires_grad:
                weight.add_(1.0)  # a step may move too little to see; what is not put back shall show
    try:
        load_policy_weights(trainer.actor, folder)
    except UserError as error:
        return Check(name, "; ".join(error.problems), False, hint)
    after = outputs(trainer, rollout)
    apart = [float((a - b).abs().max()) for a, b in zip(after, before, strict=True)]
    named = zip(("logits", "values"), apart, strict=False)  # GRPO has no values
    return Check(
        name,
        ", ".join(f"{what} {by:.2g} apart" for what, by in named),
        all(by <= RELOADED for by in apart),  # not of a NaN
        hint,
    )
