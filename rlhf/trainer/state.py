"""A trainer between two updates, as files, and back: all that the next update depends on.

Rollouts and minibatches draw from (seed, update, purpose, episode) and so need nothing; the random states of Python,
numpy and torch are kept for reward functions that draw from them.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from rlhf.data.prompts import ids_alone
from rlhf.models.save import load_policy_weights
from rlhf.trainer.evaluation import Evaluation, FixedText
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.progress import Progress
from rlhf.utils.files import disk_errors

TENSORS_FILE, STATE_FILE = "training.safetensors", "training.json"


def save_trainer_state(trainer: OnPolicyLoop, folder: Path) -> None:
    """Into an empty folder: weights as `save_model` writes them, optimizer, scheduler, counters, random states."""
    trainer.save_model(folder)
    optimizer, normalizer = trainer.optimizer.state_dict(), trainer.collector.normalizer
    tensors = {
        f"optimizer/{number}/{name}": value.detach().cpu().contiguous()
        for number, state in optimizer["state"].items()
        for name, value in state.items()
    }
    with disk_errors():
        save_file({**tensors, **_random_tensors()}, folder / TENSORS_FILE)
    state = {
        "update": trainer.state.global_step,
        "episode": trainer.state.episode,
        "epoch": trainer.state.epoch,
        "log_history": trainer.state.log_history,
        "kl_coef": trainer.kl_coef,
        "progress": asdict(trainer.progress),
        "this_epoch": trainer.this_epoch,
        "normalizer": normalizer.state_dict() if normalizer is not None else None,
        "evaluations": [asdict(evaluation) for evaluation in trainer.evaluations],
        "text": _text_to_json(trainer.evaluator.text),
        "param_groups": optimizer["param_groups"],
        "scheduler": trainer.lr_scheduler.state_dict(),
        "listeners": {name: callback.state_dict() for name, callback in _stateful(trainer).items()},
        "random": {"python": random.getstate(), "numpy": _numpy_state()},
    }
    (folder / STATE_FILE).write_text(json.dumps(state, default=_plain), encoding="utf-8")


def load_trainer_state(trainer: OnPolicyLoop, folder: Path) -> None:
    """Load into a new trainer, with its callbacks attached, what `save_trainer_state` wrote."""
    state, tensors = load_weights(trainer, folder)
    base_lrs = schedule_of(trainer).base_lrs  # the same, unless --learning-rate was changed
    trainer.lr_scheduler.load_state_dict({**state["scheduler"], "base_lrs": base_lrs})
    set_learning_rates(trainer)
    trainer.state.global_step, trainer.state.episode = state["update"], state["episode"]
    trainer.state.epoch, trainer.state.log_history = state["epoch"], state["log_history"]
    trainer.kl_coef, trainer.this_epoch = state["kl_coef"], state["this_epoch"]
    vars(trainer.progress).update(asdict(Progress(**state["progress"])))  # in place: the loop's parts share it
    normalizer = trainer.collector.normalizer
    if normalizer is not None and state["normalizer"] is not None:  # with --resume-anyway it may be new
        normalizer.load_state_dict(state["normalizer"])
    trainer.evaluations = [Evaluation(**evaluation) for evaluation in state["evaluations"]]
    trainer.evaluator.text = _text_from_json(state["text"])
    for name, callback in _stateful(trainer).items():
        if name in state["listeners"]:
            callback.load_state_dict(state["listeners"][name])
    _restore_random(tensors, state["random"])


def load_weights(trainer: OnPolicyLoop, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The weights and the optimizer's moments alone; returns what else is there.

    Copied: a checkpoint whose file is still mapped could not be removed on Windows.
    """
    state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    tensors = load_file(folder / TENSORS_FILE)
    load_policy_weights(trainer.actor, folder)
    by_number: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        kind, number, *rest = name.split("/")
        if kind == "optimizer":
            by_number.setdefault(int(number), {})["/".join(rest)] = value.clone()
    trainer.optimizer.load_state_dict({"state": by_number, "param_groups": state["param_groups"]})
    set_learning_rates(trainer)
    return state, tensors


def schedule_of(trainer: OnPolicyLoop) -> LambdaLR:
    """torch's own, under what accelerate makes of it."""
    return getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)


def set_learning_rates(trainer: OnPolicyLoop) -> None:
    """Those of the schedule, where it stands: the optimizer's file has those of another update or run."""
    schedule = schedule_of(trainer)
    bases = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    rates = [base * share(schedule.last_epoch) for base, share in bases]
    schedule._last_lr = rates
    for group, rate in zip(trainer.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _stateful(trainer: OnPolicyLoop) -> dict[str, Any]:
    """Callbacks that remember something: KL control, the best checkpoint, a user's own. By class, and by their order
    where several are of one."""
    found: dict[str, Any] = {}
    for callback in trainer.events.callbacks:
        if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
            name = type(callback).__name__
            found[f"{name} {sum(k.split()[0] == name for k in found) + 1}"] = callback
    return found


def _plain(value: Any) -> Any:
    """For JSON, numbers of numpy and torch as Python's."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"no JSON for {type(value).__name__}")


# --- the text of the perplexity --------------------------------------------------------------------------------------


def _text_to_json(text: FixedText) -> dict[str, Any]:
    return {"prompts": [list(p.ids) for p in text.prompts], "replies": text.completions, "source": text.source}


def _text_from_json(state: dict[str, Any]) -> FixedText:
    return FixedText([ids_alone(ids) for ids in state["prompts"]], state["replies"], state["source"])


# --- random states ---------------------------------------------------------------------------------------------------


def _random_tensors() -> dict[str, Tensor]:
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"random/torch": torch.get_rng_state(), **{f"random/cuda/{n}": s for n, s in enumerate(gpus)}}


def _numpy_state() -> list:
    name, keys, *rest = np.random.get_state()
    return [name, keys.tolist(), *rest]


def _restore_random(tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(tensors["random/torch"])
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"random/cuda/{number}" in tensors:
            torch.cuda.set_rng_state(tensors[f"random/cuda/{number}"], number)
