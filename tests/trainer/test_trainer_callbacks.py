"""Tests that TrainerCallbacks of transformers get their events with a real state, and can stop a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback, TrainerControl

from rlhf.algorithms.table import ALGORITHMS
from rlhf.callbacks.base import Callback
from rlhf.checkpoints.manifest import find_checkpoints
from rlhf.trainer.events import EVENTS, Events
from rlhf.trainer.safety import SkipUpdate
from rlhf.utils.user_code import settings_restored
from tests.conftest import attach
from tests.documents import python_block

OTHER_ALGORITHMS = [name for name in ALGORITHMS if name != "ppo"]


class Recorder(TrainerCallback):
    """Records the events, each with the step, and what it receives."""

    def __init__(self):
        self.events = []
        self.states = []
        self.logs = []
        self.evaluations = []

    def _record(self, event, state):
        self.events.append((event, state.global_step))
        self.states.append((event, state.max_steps, state.epoch, state.is_world_process_zero, len(state.log_history)))

    def on_train_begin(self, args, state, control, **kwargs):
        assert kwargs["model"] is not None and kwargs["processing_class"] is not None
        self._record("train_begin", state)

    def on_step_begin(self, args, state, control, **kwargs):
        self._record("step_begin", state)

    def on_step_end(self, args, state, control, **kwargs):
        self._record("step_end", state)

    def on_log(self, args, state, control, logs, **kwargs):
        self.logs.append((state.global_step, logs))
        self._record("log", state)

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.evaluations.append((state.global_step, metrics))
        self._record("evaluate", state)

    def on_epoch_end(self, args, state, control, **kwargs):
        self._record("epoch_end", state)

    def on_save(self, args, state, control, **kwargs):
        assert Path(args.output_dir, f"checkpoint-{state.global_step}").is_dir()
        self._record("save", state)

    def on_train_end(self, args, state, control, **kwargs):
        self._record("train_end", state)


@pytest.mark.parametrize("algorithm", ["ppo", *(pytest.param(a, marks=pytest.mark.ci) for a in OTHER_ALGORITHMS)])
def test_a_trainer_callback_gets_the_events_with_a_real_state(build, algorithm):
    trainer = build("--num-iterations", 3, "--eval-every", 2, algorithm=algorithm)
    recorder = Recorder()
    trainer.add_callback(recorder)
    with attach(trainer):
        trainer.train()
    assert recorder.events == [
        ("train_begin", 0), ("log", 0), ("evaluate", 0),
        ("step_begin", 0), ("log", 1), ("step_end", 1),
        ("step_begin", 1), ("log", 2), ("step_end", 2), ("log", 2), ("evaluate", 2),
        ("step_begin", 2), ("log", 3), ("step_end", 3), ("log", 3), ("evaluate", 3), ("save", 3),
        ("train_end", 3),
    ]  # fmt: skip
    _, most, epoch, first, logged = recorder.states[-1]
    assert (most, first, logged) == (3, True, 6) and epoch == trainer.sampler.epochs(3) > 0
    assert [step for step, _ in recorder.evaluations] == [0, 2, 3]
    assert recorder.evaluations[-1][1] == trainer.evaluations[-1].metrics()
    assert dict(recorder.logs)[1]["rewards/mean"] == trainer.host.state.log_history[1]["rewards/mean"]


def test_an_epoch_ends_after_the_update_that_completes_it(build):
    trainer = build("--num-iterations", "none", "--epochs", 1, "--max-prompts", 8)
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.train()
    assert [e for e in recorder.events if e[0] == "epoch_end"] == [("epoch_end", trainer.host.state.global_step)]


class StopsIn(TrainerCallback):
    """Requests the end of the training in one event of one update."""

    def __init__(self, event: str, update: int):
        self.update = update
        setattr(self, event, self.stop)

    def stop(self, args, state, control, **kwargs):
        control.should_training_stop = control.should_training_stop or state.global_step == self.update


@pytest.mark.parametrize("event", ["on_log", "on_step_end", "on_evaluate"])
def test_a_trainer_callback_stops_the_run_after_the_update_which_is_saved(build, event):
    trainer = build("--num-iterations", 6, "--eval-every", 2)
    trainer.add_callback(StopsIn(event, 2))
    with attach(trainer) as log:
        metrics = trainer.train()
    folder = Path(trainer.config.run.output)
    assert trainer.host.state.global_step == trainer.updates == 2
    assert [e.update for e in trainer.evaluations] == [0, 2], "the final weights are evaluated, once"
    assert list(find_checkpoints(folder, log.record.id).valid) == [2]
    assert metrics["eval/score"] == trainer.evaluations[-1].score


def test_the_callback_of_the_page_stops_above_its_score():
    made: dict = {}
    exec(python_block("StopAtScore"), made)
    control = TrainerControl()
    for score, stops in ((0.9, False), (1.1, True)):
        made["StopAtScore"]().on_evaluate(None, None, control, {"eval/score": score})
        assert control.should_training_stop is stops


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_the_callback_of_the_page_calls_the_policy_in_a_bfloat16_run_with_lora(build, algorithm):
    """Without autocast, the float32 output of the embeddings would meet frozen layers in bfloat16."""
    made: dict = {}
    exec(python_block("class NextTokens"), made)
    callback = made["NextTokens"]()
    build("--num-iterations", 1, "--bf16", "--use-lora", algorithm=algorithm, callbacks=[callback]).train()
    assert callback.next.values.isfinite().all() and len(callback.next.indices) == 5


def test_a_run_that_is_not_stopped_ends_as_planned(build):
    trainer = build("--num-iterations", 3)
    trainer.add_callback(StopsIn("on_log", 7))
    trainer.train()
    assert trainer.host.state.global_step == 3


def test_a_stop_in_one_process_is_a_stop_in_all(monkeypatch):
    """The other process has requested the stop."""

    class Host:
        args = state = None
        control = TrainerControl()

        class callback_handler:
            @staticmethod
            def on_save(args, state, control, **_):
                return control

    monkeypatch.setattr("rlhf.trainer.events.gather", lambda value: [value, True])
    Events(Host).call("on_save", 1)
    assert Host.control.should_training_stop


class Steps(Callback):
    """Records the update of some events, and the step of transformers' state at that time."""

    def on_train_begin(self, trainer):
        self.state = trainer.host.state
        self.events = []

    def on_update_begin(self, update):
        self.events.append(("begin", update, self.state.global_step))

    def on_update_skipped(self, update, rollout, batch, reason):
        self.events.append(("skipped", update, self.state.global_step))

    def on_save(self, update):
        self.events.append(("save", update, self.state.global_step))


def test_a_skipped_update_is_a_step_of_both_kinds_of_callbacks(build, monkeypatch):
    trainer = build("--num-iterations", 2, "--save-every", 1)
    own, recorder = Steps(), Recorder()
    for callback in (own, recorder):
        trainer.add_callback(callback)
    monkeypatch.setattr(
        "rlhf.trainer.loop.check_finite", lambda **_: skip() if trainer.host.state.global_step else None
    )
    with attach(trainer):
        trainer.train()
    assert own.events == [("begin", 1, 0), ("save", 1, 1), ("begin", 2, 1), ("skipped", 2, 2), ("save", 2, 2)]
    assert [step for event, step in recorder.events if event == "step_end"] == [1, 2]


def skip() -> None:
    raise SkipUpdate("a test")


def test_the_base_class_documents_all_events():
    assert sorted(EVENTS) == sorted(name for name in vars(Callback) if name.startswith("on_"))


def test_callbacks_change_no_setting_of_torch(build):
    """Neither this project's callbacks nor those of transformers, in any event."""

    def change(*_, **__):
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")

    own = type("Own", (), dict.fromkeys(EVENTS, change))
    host = type("Host", (TrainerCallback,), {name: change for name in dir(TrainerCallback) if name.startswith("on_")})
    weights = []
    with settings_restored():
        for callbacks in ([], [own(), host()]):
            trainer = build("--num-iterations", 2, "--eval-every", 1, callbacks=callbacks)
            trainer.train()
            weights.append([weight.tolist() for weight in trainer.host.model.parameters()])
            assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
            assert torch.get_default_device() == torch.device("cpu")
    assert weights[0] == weights[1]
