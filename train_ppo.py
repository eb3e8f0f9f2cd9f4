"""`python train_ppo.py`: PPO from a start model and a reward model to a better model."""

from __future__ import annotations

from config import parse_cli
from rlhf.errors import run_command


def main(argv: list[str] | None = None) -> None:
    config = parse_cli(argv)  # before torch is imported: --help and mistakes are answered at once
    from rlhf.assembly import check_run_folder, finish_run, load_parts, prepare_demo_parts, show_plan, start_run
    from rlhf.callbacks import attach_callbacks
    from rlhf.console import Screen, quiet_libraries
    from rlhf.ppo_trainer import PPO, updates_planned
    from rlhf.preflight import start_device

    quiet_libraries()
    screen = Screen()
    check_run_folder(config)
    device = start_device(screen)
    prepare_demo_parts(config, screen, device)
    parts = load_parts(config, device, screen)
    updates = updates_planned(config, len(parts.prompts.train))
    show_plan(config, parts, updates, device, screen)
    if config.run.dry_run:
        return
    with screen, start_run(config, parts, updates, screen) as log:
        trainer = PPO(
            config,
            parts.policy,
            parts.tokenizer,
            parts.prompts.train,
            parts.prompts.evaluation,
            parts.reward_functions,
        )
        attach_callbacks(trainer, config, screen)
        trainer.train()
        trainer.save_model(config.run.output)
        finish_run(config, trainer, log, screen)


if __name__ == "__main__":
    run_command(main)
