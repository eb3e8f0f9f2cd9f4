"""Trains one run, from its settings to the saved model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from rlhf.algorithms.kl_control import KLController, kl_controller, with_horizon
from rlhf.callbacks.base import Callback
from rlhf.callbacks.checkpointing import BestCheckpoint, Checkpoints
from rlhf.callbacks.findings import show_run_findings
from rlhf.callbacks.incidents import Incidents
from rlhf.callbacks.kl import attach_kl_control
from rlhf.callbacks.logging import FindingsWarning, ProgressLine, TensorBoardLog
from rlhf.callbacks.metrics_file import MetricsFile
from rlhf.callbacks.samples import Samples
from rlhf.callbacks.token_recorder import TokenRecord
from rlhf.callbacks.trackers import Trackers
from rlhf.checkpoints.gguf import gguf_record
from rlhf.checkpoints.model_folder import find_model
from rlhf.checkpoints.run_folder import METRICS_LOG, SAMPLES_FOLDER, claim_output
from rlhf.checkpoints.run_log import FollowingLog, RunLog
from rlhf.checkpoints.run_record import RunRecord, environment
from rlhf.checkpoints.token_record import TOKENS_FOLDER
from rlhf.data.prompts import Selection, fingerprint, topics_fingerprint
from rlhf.data.sampler import planned_updates
from rlhf.demo.parts import gold_of
from rlhf.distributed.group import agree, from_first, in_turn, on_first, require_equal
from rlhf.distributed.weights import require_equal_weights
from rlhf.models.device import start_device
from rlhf.rewards.find import code_print
from rlhf.rewards.printing import printed_file
from rlhf.run.export import export_run
from rlhf.run.resume import resume_run
from rlhf.run.resume_checks import check_same_run
from rlhf.run.summary import finish_run
from rlhf.settings.fields import to_dict
from rlhf.settings.training import Config
from rlhf.settings.types import IN_PYTHON
from rlhf.setup.build import Components, build_trainer, load_models, prepare_demo_components
from rlhf.setup.fit import choose_settings, estimator_of, what_helps
from rlhf.setup.inputs import check_export, check_run_folder, placing
from rlhf.setup.load_inputs import load_inputs
from rlhf.setup.pass_rates import PassRates, keep_by_pass_rate
from rlhf.setup.plan import budget, plan_run
from rlhf.setup.scan import scan_run
from rlhf.setup.trial import check_run, check_start
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.console import Screen
from rlhf.utils.files import files_print
from rlhf.utils.hub import is_on_hub
from rlhf.utils.paths import is_gguf
from rlhf.utils.processes import is_first
from rlhf.utils.signals import GracefulStop


def train(config: Config, screen: Screen, selection: Selection | None = None) -> None:
    """Train, save and summarize one run. With --check only check it, with --scan only print what can be learned.
    `selection` has the rows of the data, if they were read already."""
    device = agree(lambda: start_device(screen, config.run.deterministic, config.run.ddp_timeout))
    asked, components, pass_rates = agree(lambda: load_parts(config, screen, device, selection))
    updates = planned_updates(asked, components.prompts.train)
    config = with_horizon(asked, updates)
    if config.run.check:
        return check_run(config, components, screen)
    if config.run.scan:
        return scan_run(asked, components, screen)
    agree(lambda: check_start(config, components))
    with (
        screen,
        GracefulStop(screen.say) as stop,  # until run.json is written
        start_run(config, components, updates, screen, pass_rates) as log,
        Trackers(config, screen, log.record.id) as trackers,
    ):
        trainer = agree(lambda: build_trainer(config, components))
        trainer.evaluator.gold = gold_of(config)
        with attached(trainer, config, log, screen, stop):
            trainer.add_callback(trackers)
            agree(lambda: resume_run(trainer, config, log, screen))
            require_equal({"the update": trainer.state.global_step}, "Give all machines the same run folder")
            trainer.train()
        require_equal_weights(trainer.model, "the last update")
        on_first(lambda: finish(trainer, config, log, screen, screen))
        trackers.finish(log.record.figures)
    if is_first():  # the others need not wait: an upload may take longer than --ddp-timeout
        export_run(config, screen)


def load_parts(
    config: Config, screen: Screen, device: torch.device, selection: Selection | None
) -> tuple[Config, Components, PassRates | None]:
    """Load the parts of a run, and print its plan. Returns them with the completed configuration, and
    the pass rates of --keep-pass-rate. Raises UserError."""
    require_equal(environment()["versions"], "Install the same versions everywhere")
    check_run_folder(config)
    check_export(config)
    in_turn(lambda: prepare_demo_components(config, screen, device))
    inputs = load_inputs(config, screen, selection=selection)
    config = config if config.run.resume else choose_settings(config, inputs, device, screen)
    filtered = config.data.keep_pass_rate is not None and not config.run.only_looks
    if not filtered:
        plan_run(config, inputs, device, screen)
    components = load_models(config, inputs, device, screen)
    components, pass_rates = keep_by_pass_rate(config, components, screen, Path(config.run.output))
    if filtered:
        final = with_horizon(config, planned_updates(config, components.prompts.train))
        plan_run(final, replace(inputs, prompts=components.prompts), device, screen)
    return config, components, pass_rates


def finish(trainer: OnPolicyLoop, config: Config, log: RunLog, screen: Screen, warnings: Screen) -> None:
    """Save the model, and print the summary and the warnings of a run whose training has ended."""
    trainer.save_model(config.run.output)
    finish_run(config, trainer, log, screen)
    show_run_findings(trainer, warnings)


@contextmanager
def attached(
    trainer: OnPolicyLoop, config: Config, log: RunLog, screen: Screen, stop: GracefulStop, progress: bool = True
) -> Iterator[None]:
    """Attach the callbacks that every run has to the trainer, with the user's among them (`attach_callbacks`). At the
    end, also after an error, close their files and remove them: the user's callbacks remain."""
    others, trainer.events.callbacks = trainer.events.callbacks, []
    try:
        attach_callbacks(trainer, config, log, screen, stop, others, progress)
        yield
    finally:
        for callback in trainer.events.callbacks:
            if isinstance(callback, (TensorBoardLog, MetricsFile)):
                callback.close()
        trainer.events.callbacks = others


def attach_callbacks(
    trainer: OnPolicyLoop,
    config: Config,
    log: RunLog,
    screen: Screen,
    stop: GracefulStop,
    others: Sequence = (),
    progress: bool = True,
) -> None:
    """Attach the callbacks that every run has. KL control comes after the progress line, because the line prints the
    beta that the update used.

    `others` are the user's callbacks: after KL control, so that a beta which they set is not overwritten, and before
    the checkpoints, which save their state. Without `progress` the lines of updates and evaluations are not printed.
    """
    controller = kl_controller(config, trainer.updates)
    output = Path(config.run.output)
    for functions in filter(None, [trainer.rewards, trainer.evaluator.functions]):
        functions.printed = printed_file(output)
    trainer.passes.oom_hint = lambda: what_helps(config, estimator_of(trainer))
    if is_first():
        for callback in writers(trainer, config, log, screen, controller):
            if progress or not isinstance(callback, ProgressLine):
                trainer.add_callback(callback)
    trainer.add_callback(BestCheckpoint(trainer, config, controller, log))
    attach_kl_control(trainer, controller, log, screen)
    for callback in others:
        trainer.add_callback(callback)
    checkpoints = Checkpoints(trainer, config, log, screen, stop)
    trainer.recovery = checkpoints.recovery
    trainer.add_callback(checkpoints)


def writers(
    trainer: OnPolicyLoop, config: Config, log: RunLog, screen: Screen, controller: KLController
) -> list[Callback]:
    """Return the callbacks that only print and write files, so that one process needs them."""
    output, tokenizer = Path(config.run.output), trainer.processing_class
    tokens = TokenRecord(output / TOKENS_FOLDER, config, tokenizer, trainer.train_prompts)
    return [
        TensorBoardLog(output / "logs", log.training_time),
        MetricsFile(output / METRICS_LOG),
        Samples(output / SAMPLES_FOLDER, trainer.evaluation_prompts, tokenizer),
        *([tokens] if config.record.record_tokens else []),
        ProgressLine(trainer, screen, controller),
        Incidents(trainer, config, screen),
        FindingsWarning(trainer, screen),
    ]


def start_run(
    config: Config, components: Components, updates: int, screen: Screen, pass_rates: PassRates | None = None
) -> RunLog:
    """Claim the output folder and write a new run.json, and the pass rates of --keep-pass-rate. With --resume continue
    the existing run.json; raises UserError if its data differs."""
    data, folder = data_of(config, components), Path(config.run.output)
    require_equal(data, "Give all machines the same files")
    began: list[RunLog] = []

    def begin() -> RunRecord:
        log = (
            continued(config, data, screen)
            if config.run.resume
            else claimed(config, components, data, updates, screen)
        )
        began.append(log)
        if pass_rates is not None and not config.run.resume:
            pass_rates.write(folder)
            log.add(pass_rates=pass_rates.counts)
        return log.record

    record = from_first(begin)
    return began[0] if began else FollowingLog(folder, record)


def continued(config: Config, data: dict, screen: Screen) -> RunLog:
    """Continue the run.json in the output folder. Raises UserError if the run's data differs."""
    folder = Path(config.run.output)
    before = RunRecord.require(folder, "--resume, --output").data
    known = before.keys() & data.keys()
    changed = [
        f"{name} was {before[name]} in this run and is {data[name]} now"
        for name in data
        if name in known and before[name] != data[name]
    ]
    check_same_run(config, changed, screen)
    return RunLog(folder, resume=True)


def claimed(config: Config, components: Components, data: dict, updates: int, screen: Screen) -> RunLog:
    """Claim the output folder and write a new run.json."""
    folder = Path(config.run.output)
    used = (config.model.actor_model, config.data.prompts, config.data.eval_dataset)
    held, moved = claim_output(folder, **placing(config))
    if moved:
        screen.say(moved)
    return RunLog(
        folder,
        held,
        algorithm=config.algorithm,
        settings=to_dict(config),
        seed=config.run.seed,
        data=data,
        plan=budget(config, updates),
        prompts={"rows": components.prompts.rows, "split": str(components.prompts.split)},
        on_hub=[name for name in used if name and name != IN_PYTHON and is_on_hub(name)],
    )


def data_of(config: Config, components: Components) -> dict:
    """Return what run.json stores of a run's data: numbers of prompts, and hashes of prompts, models and reward
    functions."""
    start = config.model.actor_model
    start = find_model(start, "--actor-model") if is_gguf(start) else start
    data = {
        "train_prompts": len(components.prompts.train),
        "evaluation_prompts": len(components.prompts.evaluation),
        "too_long": components.prompts.too_long,
        "train_sha256": fingerprint(components.prompts.train),
        "evaluation_sha256": fingerprint(components.prompts.evaluation),
        "start_model": files_print(start, "*.safetensors"),
        "reward_model": files_print(config.model.rm_model, "*.safetensors"),
        "rules": {rule: code_print(rule) for rule in config.reward.functions},
    }
    if (source := gguf_record(start)) is not None:
        data["start_model_gguf"] = source
    if config.data.steps_per_topic is not None:
        data["topics_sha256"] = topics_fingerprint(components.prompts.train)
    return data
