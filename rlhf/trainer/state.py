"""Save and load the state of a trainer between two updates: everything that the next update depends on.

Rollouts and minibatches take random numbers from (seed, update, purpose, episode), so they have no state. The states
of Python's, NumPy's and torch's random generators are saved for callbacks and models that use them.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from rlhf.models.save import load_policy_weights
from rlhf.trainer.evaluation import Evaluation, as_array, by_prompt, flat, of_completions
from rlhf.trainer.evaluator import FixedText
from rlhf.trainer.progress import Progress
from rlhf.utils.errors import UserError
from rlhf.utils.files import saving_tensors
from rlhf.utils.timing import timed
from rlhf.utils.user_code import generators

TENSORS_FILE = "training.safetensors"
STATE_FILE = "training.json"


def save_trainer_state(trainer: Any, folder: Path) -> None:
    """Write weights (as `save_model` does), optimizer, scheduler, counters and random states to an empty folder, or to
    one that has these weights already."""
    if not any(folder.glob("*.safetensors")):
        trainer.save_model(folder)
    optimizer = trainer.host.optimizer.state_dict()
    normalizer = trainer.collector.normalizer
    with timed("copy"):
        tensors = {
            f"optimizer/{number}/{name}": _tensor(name, value)
            for number, state in optimizer["state"].items()
            for name, value in _flat(state).items()
        }
    with saving_tensors(folder):
        randoms = {name: generator.get_state() for name, generator in generators().items()}
        save_file({**tensors, **randoms}, folder / TENSORS_FILE)
    state = {
        "update": trainer.host.state.global_step,
        "episode": trainer.host.state.episode,
        "epoch": trainer.host.state.epoch,
        "log_history": trainer.host.state.log_history,
        "kl": trainer.kl.state_dict(),
        "progress": asdict(trainer.progress),
        "this_epoch": trainer.this_epoch,
        "normalizer": normalizer.state_dict() if normalizer is not None else None,
        "evaluations": [_evaluation_to_json(evaluation) for evaluation in trainer.evaluations],
        "text": trainer.evaluator.text and asdict(trainer.evaluator.text),
        "param_groups": optimizer["param_groups"],
        "scheduler": trainer.host.lr_scheduler.state_dict(),
        "listeners": {name: callback.state_dict() for name, callback in _stateful(trainer).items()},
        "random": {"python": random.getstate(), "numpy": np.random.get_state()},
    }
    (folder / STATE_FILE).write_text(json.dumps(state, default=_json_number), encoding="utf-8")


def load_trainer_state(trainer: Any, folder: Path) -> None:
    """Load what `save_trainer_state` wrote into a new trainer. Its callbacks must be attached already."""
    state, tensors = load_weights(trainer, folder)
    base_lrs = schedule_of(trainer).base_lrs  # differs from the saved one if --learning-rate was changed
    trainer.host.lr_scheduler.load_state_dict({**state["scheduler"], "base_lrs": base_lrs})
    set_learning_rates(trainer)
    trainer.host.state.global_step = state["update"]
    trainer.host.state.episode = state["episode"]
    trainer.host.state.epoch = state["epoch"]
    trainer.host.state.log_history = state["log_history"]
    trainer.kl.load_state_dict(state["kl"])
    trainer.this_epoch = state["this_epoch"]
    progress = {"episodes": state["episode"]} | state["progress"]
    progress.pop("explained", None)  # in older checkpoints
    vars(trainer.progress).update(asdict(Progress(**progress)))  # in place, because other objects share it
    normalizer = trainer.collector.normalizer
    if normalizer is not None and state["normalizer"] is not None:  # --resume-anyway may have added a normalizer
        normalizer.load_state_dict(state["normalizer"])
    trainer.evaluations = [_evaluation_from_json(evaluation) for evaluation in state["evaluations"]]
    trainer.evaluator.text = state["text"] and FixedText(**state["text"])
    for name, callback in _stateful(trainer).items():
        if name in state["listeners"]:
            callback.load_state_dict(state["listeners"][name])
    _restore_random(tensors, state["random"])


def load_weights(trainer: Any, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Load only the weights and the optimizer's moments. Returns the rest of the state, and all saved tensors."""
    state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    tensors = load_file(folder / TENSORS_FILE)
    load_policy_weights(trainer.actor, folder)
    by_number: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        kind, number, *rest = name.split("/")
        if kind == "optimizer":
            # cloned, because Windows cannot delete a checkpoint file that is still memory-mapped
            by_number.setdefault(int(number), {})["/".join(rest)] = _number(value.clone())
    _check_optimizer(trainer, by_number)
    # --resume-anyway may change these
    kept = [{name: group[name] for name in ("weight_decay", "betas")} for group in trainer.host.optimizer.param_groups]
    trainer.host.optimizer.load_state_dict({"state": by_number, "param_groups": state["param_groups"]})
    for group, values in zip(trainer.host.optimizer.param_groups, kept, strict=True):
        group.update(values)
    set_learning_rates(trainer)
    return state, tensors


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    """Return one weight's optimizer state without the inner dictionary of bitsandbytes, which it does not need when it
    loads the state."""
    flat: dict[str, Any] = {}
    for name, value in state.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


def _tensor(name: str, value: Tensor | int) -> Tensor:
    """Return an entry of the optimizer's state as a tensor that can be saved. Step counts of bitsandbytes are ints."""
    saved = torch.as_tensor(value).detach().cpu().contiguous()
    return saved.clone() if name.startswith("qmap") else saved  # weights share this table; safetensors refuses that


def _number(value: Tensor) -> Tensor | int:
    """Return what `_tensor` was given: AdamW of torch has no state of whole numbers."""
    return int(value) if value.dtype == torch.int64 else value


def _check_optimizer(trainer: Any, saved: dict[int, dict[str, Any]]) -> None:
    """Raise UserError if the saved state is that of another optimizer, after --resume-anyway with another --optim."""
    optim = trainer.config.optimizer.optim
    if any(("state1" in state) != (optim == "adamw_8bit") for state in saved.values()):
        raise UserError(f"its optimizer state is not that of {optim}", "--optim", "Use the optimizer of the run")


def schedule_of(trainer: Any) -> LambdaLR:
    """Return torch's scheduler, without accelerate's wrapper."""
    return getattr(trainer.host.lr_scheduler, "scheduler", trainer.host.lr_scheduler)


def set_learning_rates(trainer: Any) -> None:
    """Set the optimizer's learning rates to those of the schedule at its current step.

    The saved optimizer has the learning rates of the checkpoint, which may be from another update or another run.
    """
    schedule = schedule_of(trainer)
    bases = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    rates = [base * share(schedule.last_epoch) for base, share in bases]
    schedule._last_lr = rates
    for group, rate in zip(trainer.host.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _stateful(trainer: Any) -> dict[str, Any]:
    """Return the callbacks that have a state by class name and number within the class."""
    found: dict[str, Any] = {}
    for callback in trainer.events.callbacks:
        if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
            name = type(callback).__name__
            found[f"{name} {sum(k.split()[0] == name for k in found) + 1}"] = callback
    return found


def _json_number(value: Any) -> Any:
    """Convert scalars and arrays of NumPy and torch to Python numbers and lists, for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"cannot convert {type(value).__name__} to JSON")


# --- evaluations: lists over the completions, prompt by prompt ------------------------------------------------------

STORED_AS = {"judged": "values"}  # field -> its name in a checkpoint, if that is another


def _evaluation_to_json(evaluation: Evaluation) -> dict[str, Any]:
    def stored(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: stored(of) for name, of in value.items()}
        return flat(value) if of_completions(value) else value

    values = {STORED_AS.get(name, name): stored(value) for name, value in vars(evaluation).items()}
    return {**values, "samples": evaluation.samples}


def _evaluation_from_json(state: dict[str, Any]) -> Evaluation:
    def restored(kind: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: restored(kind, of) for name, of in value.items()}
        if "ndarray" in kind:
            return as_array(value, state["samples"]) if value else None
        return by_prompt(value, state["samples"]) if "list[list" in kind and value else value

    stored = [(field, STORED_AS.get(field.name, field.name)) for field in fields(Evaluation)]
    return Evaluation(**{field.name: restored(field.type, state[name]) for field, name in stored if name in state})


# --- random states ---------------------------------------------------------------------------------------------------


def _restore_random(tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(state["numpy"])
    for name, generator in generators().items():
        if name in tensors:
            generator.set_state(tensors[name])
