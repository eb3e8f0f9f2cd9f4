"""`python -m reward_model.train`: a reward model from preference pairs."""

from __future__ import annotations

from config import parse_reward_cli
from rlhf.errors import run_command
from rlhf.libraries import check_libraries


def main(argv: list[str] | None = None) -> None:
    config = parse_reward_cli(argv)  # before torch is imported: --help and mistakes are answered at once
    check_libraries()
    from reward_model.training import train_reward_model
    from rlhf.console import Screen, quiet_libraries
    from rlhf.preflight import start_device

    quiet_libraries()
    with Screen() as screen:
        train_reward_model(config, screen, start_device(screen))
    screen.say("next: python train_ppo.py")


if __name__ == "__main__":
    run_command(main)
