"""`--replay`: repeats a skipped update from its saved files, to find where numbers stop being finite."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlhf.algorithms.experience import Experience, tokens_of_loss
from rlhf.callbacks.incidents import INCIDENT_FILE, LEARNED, WEIGHTS, Incident
from rlhf.checkpoints.run_record import flat_settings
from rlhf.models.device import start_device
from rlhf.rollout.completions import Rollout
from rlhf.settings.next_commands import names_code, replay_command
from rlhf.settings.training import Config
from rlhf.settings.types import FROM_PYTHON, IN_PYTHON
from rlhf.setup.build import build_trainer, load_components
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.scores import Scores, score_tensor, shaped
from rlhf.utils.command_lines import short_name
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError


def replay_incident(config: Config, screen: Screen) -> None:
    """Repeat the incident in `config.run.replay` with a trainer of its settings, and print the result of each step.

    Raises UserError if it is not an incident of this algorithm.
    """
    incident = Incident.read(config.run.replay)
    of = incident.facts["algorithm"]
    if of != config.algorithm:
        raise UserError(
            f"this incident is from {short_name(of)}: --replay {config.run.replay}. Replay it with that command"
        )
    settings, given = flat_settings(incident.facts["settings"]), config.reward.reward_func
    rules, changed = settings.get("reward_func", []), {}
    if any(rule.startswith(FROM_PYTHON) for rule in rules):  # they can only be found under other names
        changed = {"reward_func": given}
    if (changed and len(given) != len(rules)) or (not changed and set(names_code(rules)) - set(given)):
        raise UserError(
            f"reward code must be given on the command line: --replay, {', '.join(r for r in rules if ':' in r)} in "
            f"{incident.folder / INCIDENT_FILE}. Replay with: {replay_command(of, config.run.replay, rules)}"
        )
    with tempfile.TemporaryDirectory(prefix="rlhf_replay_", ignore_cleanup_errors=True) as folder:
        config = incident.config(folder, **changed)
        rows = [row["columns"] for row in incident.rows] if settings.get("prompts") == IN_PYTHON else None
        device = start_device(screen, config.run.deterministic)
        components = load_components(config, device, screen, prompts=rows, evaluation_prompts=rows)
        screen.facts(replay(build_trainer(config, components), incident))


def replay(trainer: OnPolicyLoop, incident: Incident) -> list[tuple[str, str]]:
    """Compute the update again from the saved weights, without an optimizer step. Returns rows of (name, result)."""
    trainer.load_model(incident.folder / WEIGHTS)
    trainer.state.global_step = incident.facts["update"] - 1  # as reward functions saw it in the run
    trainer.set_kl_coef(incident.facts["kl_coef"])
    rollout, lines = incident.rollout(trainer), [("found", incident.facts["found"])]
    lines += [(f"weight {n}", state_of(w)) for n, w in trainer.actor.named_parameters() if not w.isfinite().all()]
    for name, again in trainer.passes.logprobs(rollout.completions)._asdict().items():
        if again is not None:
            lines += [
                (f"{name}, recorded", state_of(getattr(rollout, name))),
                (f"{name}, recomputed", state_of(again)),
            ]
    scores = scores_again(trainer, rollout)
    lines += [(f"scores of {name}", _state_of_scores(given)) for name, given in scores.items()]
    batch = batch_of(trainer, incident, rollout, scores)
    trainer.model.train()
    update, found = incident.facts["update"], incident.facts["rows"]
    for step, rows in enumerate([found] if found else trainer.policy_optimizer.minibatches(update, 0)):
        trainer.policy_optimizer.seed_dropout(update, step)
        lines += gradients_again(trainer, batch, rows)
    return lines


def gradients_again(trainer: OnPolicyLoop, batch: Experience, rows: Sequence[int]) -> list[tuple[str, str]]:
    """Compute one minibatch's gradients without a step. Returns its statistics and the non-finite gradients."""
    stats = trainer.policy_optimizer.minibatch_gradients(batch, rows)
    lines = [(name, f"{float(value):.6g}") for name, value in stats.items()]
    gradients = [(name, w.grad) for name, w in trainer.actor.named_parameters() if w.grad is not None]
    lines += [(f"gradient of {name}", state_of(grad)) for name, grad in gradients if not grad.isfinite().all()]
    trainer.optimizer.zero_grad()
    return lines


def scores_again(trainer: OnPolicyLoop, rollout: Rollout) -> dict[str, list[float | None]]:
    """Return the scores of each reward function now, also if they are not finite."""
    completions = rollout.completions
    return trainer.rewards.scores_by_function(
        rollout.prompts, rollout.texts, completions.rows(), completions.ended.tolist(), finite=False
    )


def batch_of(
    trainer: OnPolicyLoop, incident: Incident, rollout: Rollout, scores: dict[str, list[float | None]]
) -> Experience:
    """Return the saved batch. If the update was skipped before its advantages, compute them from the new scores."""
    tensors = {name: tensor.to(rollout.mask.device) for name, tensor in incident.tensors.items()}
    config, facts = trainer.config, incident.facts
    if "advantages" in tensors:
        learned = {field: tensors.get(name) for name, field in LEARNED.items()}
        weighted, mask = learned.pop("advantages"), tokens_of_loss(rollout, config.batch.mask_truncated_completions)
        experience = Experience.of(rollout, kl_coef=facts["kl_coef"], loss_mask=mask, **learned)
        return replace(experience, advantages=weighted)  # as saved: the importance weights are in them
    normalizer = trainer.collector.normalizer
    if normalizer is not None and facts.get("normalizer") is not None:  # incidents of earlier versions have none
        normalizer.load_state_dict(facts["normalizer"])
    raw, ended = score_tensor(trainer.rewards.weighted(scores), rollout.mask.device), rollout.completions.ended
    given = shaped(raw, ended, config.reward.missing_eos_penalty, normalizer, bool(facts.get("drawn_again")))
    given = Scores(raw, given, scores).for_control(config.reward.control, config.run.seed, facts["update"]).shaped
    return trainer.advantages(rollout, given)


def _state_of_scores(scores: Sequence[float | None]) -> str:
    """Return in words how many scores are None, and the state of the others."""
    known = [score for score in scores if score is not None]
    none = f"{len(scores) - len(known)} of {len(scores)} None"
    if len(known) == len(scores):
        return state_of(torch.tensor(known))
    return f"{none}; {state_of(torch.tensor(known))}" if known else none


def state_of(tensor: Tensor) -> str:
    """Return in words how many numbers are not finite, or their range."""
    values = tensor.detach().float()
    bad = int((~values.isfinite()).sum())
    if bad:
        return f"{bad:,} of {values.numel():,} not finite"
    return f"all finite, {float(values.min()):.6g} to {float(values.max()):.6g}"
