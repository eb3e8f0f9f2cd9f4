"""Trains one run, from its settings to the saved model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import perf_counter

from rlhf.checkpoints.run_record import environment
from rlhf.demo.parts import gold_of
from rlhf.distributed.group import agree, in_turn, require_equal
from rlhf.models.device import start_device
from rlhf.run.session import RunSession
from rlhf.settings.training import Config
from rlhf.setup.build import load_models, prepare_demo_components
from rlhf.setup.fit import settle
from rlhf.setup.inputs import check_export
from rlhf.setup.load_inputs import load_inputs
from rlhf.setup.plan import show_plan
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.console import Screen
from rlhf.utils.timing import timed


def train(config: Config, screen: Screen) -> None:
    """Train, save and summarize one run."""
    agree(lambda: load_trainer(config, screen)).train()


def load_trainer(config: Config, screen: Screen) -> OnPolicyLoop:
    """Load the parts of a run, and print its plan. Returns its trainer. Raises UserError."""
    device = start_device(screen, config.run.deterministic, config.run.ddp_timeout)
    require_equal(environment()["versions"], "Install the same versions everywhere")
    check_export(config)
    with timed("demo parts"):
        in_turn(lambda: prepare_demo_components(config, screen, device))
    began = perf_counter()
    with timed("models and data"):
        inputs = load_inputs(config, screen)
    with timed("checks"):
        config = settle(config, inputs, device, screen)
        predicted = show_plan(config, inputs, device, screen)
    with timed("models and data"):
        components = replace(load_models(config, inputs, device, screen), gold=gold_of(config))
        trainer = RunSession(config, components, screen, folder=Path(config.run.output)).build_trainer()
    trainer.progress.predicted = predicted
    trainer.progress.spend("start", began)
    return trainer
