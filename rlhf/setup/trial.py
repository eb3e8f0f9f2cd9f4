"""`--check update`: all preflight checks of a run, including one trial update. A check is a function that returns a
`Check`.

Every training run that writes files makes only the check of the disk, and prints nothing unless it fails.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from rlhf.models.actor_critic import set_adapter_dropout
from rlhf.models.device import autocast, autocast_dtype, available, memory_in_use
from rlhf.models.logprobs import base_of, scaled_logits
from rlhf.models.save import load_policy_weights
from rlhf.rollout.completions import Rollout
from rlhf.rollout.engine import default_engine
from rlhf.settings.fields import replaced
from rlhf.settings.training import Config
from rlhf.setup.build import Components, build_trainer
from rlhf.setup.fit import estimator_of
from rlhf.setup.preflight import (
    Check,
    disk_has_room,
    graphs_do_not_hang,
    padding_changes_no_score,
    prompt_is_rendered,
)
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.safety import SkipUpdate
from rlhf.utils.console import Screen, gib
from rlhf.utils.errors import Problem, RunError, first_line
from rlhf.utils.results import result

# Largest mean distance of a ratio from 1 and of a log-ratio from 0: rounding differs with the other rows of a batch
# (bfloat16 has 8 significant bits).
ROUNDING = {None: 1e-4, torch.bfloat16: 2e-2}
RELOADED = 1e-4  # logits and score units; the same weights in the same forward pass should give equal outputs
# The forecast assumes full completions to the longest prompts, so it is usually above the measured memory. Library
# memory differs between machines.
MORE = 1.25
SLACK = 128 * 2**20


# --- running the checks ----------------------------------------------------------------------------------------------


def check_run(config: Config, components: Components, screen: Screen) -> list[Problem]:
    """Make all checks and print one line each: name, ok or FAILED, result, and for a failure how to fix it. Does not
    touch the output folder.

    Return one line with the names of the checks that fail; none if all are ok.
    """
    found: list[Check] = []
    with tempfile.TemporaryDirectory(prefix="rlhf_check_", ignore_cleanup_errors=True) as folder:
        try:
            for check in all_checks(config, components, Path(folder)):
                found.append(check)
        except Exception as error:  # any error of a library or a reward function is a failed check
            reason = first_line(error, "")
            hint = "Fix this, then check again: the remaining checks did not run"
            kind = "" if isinstance(error, (SkipUpdate, RunError)) else f"{type(error).__name__}: "
            found.append(Check("error", f"{kind}{reason:.200}", False, hint))
    screen.say("checks:")
    screen.facts([(c.name, f"ok      {c.found}" if c.ok else f"FAILED  {c.found}. {c.hint}") for c in found])
    result(checks=[dataclasses.asdict(check) for check in found])
    failed = [check.name for check in found if not check.ok]
    what = f"{len(failed)} of {len(found)} checks failed ({', '.join(failed)})"
    return [Problem(what, "--check update", "See the FAILED lines above")] if failed else []


def all_checks(config: Config, components: Components, folder: Path) -> Iterator[Check]:
    """Yield the results of all checks. `folder` is for temporary files. At the end the weights are what they were
    before."""
    yield disk_has_room(config, components.policy, components.reward_model)
    device = base_of(components.policy).device
    yield prompt_is_rendered(components.tokenizer, components.prompts.train[0])
    engine = config.speed.rollout_engine
    own = replaced(config, output=str(folder / "run"))
    if (default_engine(components.policy, device) if engine == "auto" else engine) == "graph":
        graphs = graphs_do_not_hang(components.policy, autocast_dtype(config.model.bf16, device))
        yield graphs
        if not graphs.ok:
            own = replaced(own, rollout_engine="slots")  # otherwise the other checks would hang, too
    yield padding_changes_no_score(
        components.rewards, components.prompts.train[0], autocast_dtype(config.model.bf16, device)
    )
    yield from update_checks(build_trainer(own, components), components, folder / "saved")


def update_checks(trainer: OnPolicyLoop, components: Components, folder: Path) -> Iterator[Check]:
    """Yield the checks that need a trainer: on a rollout, on one update, and on weights that are saved before the
    update and loaded after it."""
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    yield first_kl_is_zero(rollout, trainer.dtype)
    yield first_ratio_is_one(trainer, rollout)
    before = outputs(trainer, rollout)
    trainer.save_model(folder)
    make_update(trainer, rollout)
    yield memory_matches_estimate(trainer, components)
    yield weights_come_back(trainer, rollout, before, folder)


# --- before the first step -------------------------------------------------------------------------------------------


def first_kl_is_zero(rollout: Rollout, dtype: torch.dtype | None) -> Check:
    """Check that the KL is 0 before the first step: policy and reference model are both the start model."""
    apart = (rollout.logprobs - rollout.ref_logprobs)[rollout.mask]
    kl = float(apart.sum()) / len(rollout.mask)
    return Check(
        "first KL",
        f"{kl:.2g} nats/sequence, mean absolute log-prob difference {float(apart.abs().mean()):.2g} nats/token "
        f"({len(rollout.mask)} completions)",
        float(apart.abs().mean()) <= ROUNDING[dtype],
        "The reference model differs from the policy. As --actor-model use a full model, or one with merged adapters",
    )


@torch.no_grad()
def first_ratio_is_one(trainer: OnPolicyLoop, rollout: Rollout) -> Check:
    """Check that P_new / P_rollout is 1 before any step, in train mode, on the minibatches of the first pass.

    Finds dropout in the model, and rows that attend to another row's tokens. The adapters' dropout (--lora-dropout) is
    turned off for the check.
    """
    trainer.host.model.train()
    set_adapter_dropout(trainer.actor, 0.0, trainer.actor.dropout)
    apart = _apart_from_one(trainer, rollout)
    set_adapter_dropout(trainer.actor, trainer.config.model.lora_dropout, trainer.actor.dropout)
    return Check(
        "first ratio",
        f"difference from 1: mean {float(apart.mean()):.2g}, max {float(apart.max()):.2g} ({len(apart):,} tokens)",
        float(apart.mean()) <= ROUNDING[trainer.dtype],
        "The training forward pass differs from the one of the rollout. Try --no-packed, and report this as a bug",
    )


def _apart_from_one(trainer: OnPolicyLoop, rollout: Rollout) -> Tensor:
    """Return |ratio - 1| of each completion token, (N,)."""
    passes = trainer.passes
    completions = rollout.completions
    apart = []
    for minibatch in trainer.policy_optimizer.minibatches(1, 0):
        rows = [row for row in minibatch if completions.turns[row]]
        if not rows:  # greedy completions
            continue
        parts = passes.split(completions, rows)
        new = passes.heads(completions, (passes.run(completions, part) for part in parts)).logprobs
        apart.append((torch.exp(new - rollout.logprobs) - 1)[rows][rollout.mask[rows]].abs())
    return torch.cat(apart)


@torch.no_grad()
def outputs(trainer: OnPolicyLoop, rollout: Rollout) -> list[Tensor]:
    """Return the logits (M, V) of the first completion and with a critic its values (M,), on the CPU."""
    trainer.host.model.eval()
    _, hidden = trainer.passes.run(rollout.completions, [0])
    with autocast(trainer.passes.device, trainer.passes.dtype):
        found = [
            scaled_logits(trainer.actor.policy, trainer.actor.policy_hidden(hidden), 1.0),
            trainer.actor.values(hidden),
        ]
    return [tensor.cpu() for tensor in found if tensor is not None]


# --- one update ------------------------------------------------------------------------------------------------------


def make_update(trainer: OnPolicyLoop, rollout: Rollout) -> None:
    """Take the optimizer steps of one update on the rollout: the first one that trains the policy. It counts as none:
    only the loop counts updates."""
    rollout, scores = trainer.with_teacher(rollout, trainer.collector.score(rollout))
    experience = trainer.advantages(rollout, scores.shaped)
    trainer.policy_optimizer.run(experience, trainer.config.critic.critic_warmup + 1)


def memory_matches_estimate(trainer: OnPolicyLoop, components: Components) -> Check:
    """Check the update's measured memory against the forecast, and the forecast against the free memory."""
    device = trainer.host.accelerator.device
    measured = memory_in_use(device)
    evaluation = [len(prompt.ids) for prompt in components.prompts.evaluation]
    whole = dataclasses.replace(estimator_of(trainer), evaluation=evaluation, libraries=components.memory_before)
    predicted = whole(trainer.config)
    there = available(device)
    return Check(
        "memory",
        f"{gib(predicted.peak)} GiB predicted for full-length completions, {gib(measured)} GiB used by one update, "
        f"{gib(there)} GiB available",
        measured <= predicted.peak * MORE + SLACK and predicted.peak <= there,
        "Reduce memory: --micro-batch-size 1, --gradient-checkpointing, --use-lora or a smaller --max-new-tokens",
    )


def weights_come_back(trainer: OnPolicyLoop, rollout: Rollout, before: list[Tensor], folder: Path) -> Check:
    """Load the weights that were saved before the update, and check that logits and values equal those of `before`.

    Raises UserError if they cannot be loaded.
    """
    with torch.no_grad():
        for weight in trainer.host.model.parameters():
            if weight.requires_grad:
                weight.add_(1.0)  # the update may change too little: weights that are not restored must show
    load_policy_weights(trainer.actor, folder)
    after = outputs(trainer, rollout)
    apart = [float((a - b).abs().max()) for a, b in zip(after, before, strict=True)]
    named = zip(("logits", "values"), apart, strict=False)  # only PPO has values
    return Check(
        "save and reload",
        "largest difference: " + ", ".join(f"{what} {by:.2g}" for what, by in named),
        all(by <= RELOADED for by in apart),  # False for NaN
        "Saved and trained weights differ. Report this as a bug, with these settings",
    )
