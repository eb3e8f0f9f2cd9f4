"""`python train_grpo.py`: GRPO from a start model and a reward to a better model."""

from __future__ import annotations

from config import Config, parse_cli
from rlhf.setup.inputs import check_inputs
from rlhf.utils.errors import run_command
from rlhf.utils.requirements import check_libraries


def main(argv: list[str] | None = None) -> None:
    config = parse_cli(argv, algorithm="grpo")  # before torch is imported: --help and mistakes are answered at once
    if config.run.replay is None and not config.run.resume:
        check_inputs(config)
    check_libraries()
    from rlhf.utils.console import Screen, quiet_libraries

    quiet_libraries()
    from rlhf.run.seeds import for_each_seed

    if config.run.replay is not None:
        return replay_update(config, Screen())
    for_each_seed(train, config, Screen())


def train(config: Config, screen) -> None:
    from rlhf.algorithms.kl_control import with_horizon
    from rlhf.data.sampler import planned_updates
    from rlhf.models.device import start_device
    from rlhf.run.export import check_export, export_run
    from rlhf.run.resume import resume_run
    from rlhf.run.summary import finish_run
    from rlhf.run.train import attach_callbacks, check_run_folder, start_run
    from rlhf.setup.build import load_parts, prepare_demo_parts
    from rlhf.setup.plan import show_plan
    from rlhf.setup.trial import check_run, check_start
    from rlhf.trainer.grpo import GRPO
    from rlhf.utils.signals import StopRequest

    check_run_folder(config)
    check_export(config)
    device = start_device(screen, config.run.deterministic)
    prepare_demo_parts(config, screen, device)
    parts = load_parts(config, device, screen)
    updates = planned_updates(config, parts.prompts.train)
    config = with_horizon(config, updates)
    show_plan(config, parts, updates, device, screen)
    if config.run.dry_run:
        return
    if config.run.check:
        return check_run(GRPO, config, parts, screen)
    check_start(config, parts)
    with screen, start_run(config, parts, updates, screen) as log, StopRequest(screen.say) as stop:
        trainer = GRPO(config, **parts.for_trainer)
        attach_callbacks(trainer, config, log, screen, stop)
        resume_run(trainer, config, log, screen)
        trainer.train()
        trainer.save_model(config.run.output)
        finish_run(config, trainer, log, screen)
    export_run(config, screen)


def replay_update(config: Config, screen) -> None:
    from rlhf.run.replay import replay_incident
    from rlhf.trainer.grpo import GRPO

    replay_incident(GRPO, config, screen)


if __name__ == "__main__":
    run_command(main, "stopped; a run that has a checkpoint resumes from it with --resume")
