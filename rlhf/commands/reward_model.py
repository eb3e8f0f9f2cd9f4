"""The command `python -m reward_model.train`: trains a reward model from preference pairs."""

from __future__ import annotations

from pathlib import Path

from rlhf.config import usual_config
from rlhf.distributed.group import agree
from rlhf.distributed.join import use_own_gpu
from rlhf.settings.next_commands import training_command
from rlhf.settings.reward_model import parse_reward_cli, reward_file_line
from rlhf.utils.console import Screen, quiet_imports
from rlhf.utils.errors import naming
from rlhf.utils.libraries import check_libraries, import_libraries
from rlhf.utils.processes import is_first
from rlhf.utils.results import result

# printed after Ctrl-C
INTERRUPTED = "stopped: the output folder contains its previous content, or the complete new reward model"


def reward_model_command(argv: list[str] | None = None, user_file: Path | None = None) -> None:
    """Train the reward model of a command line. `user_file` is the user's config.py; installed commands have none."""
    config = parse_reward_cli(argv, user_file)  # torch is imported later, so that errors are printed at once
    use_own_gpu()
    usual = usual_config(config.recipe, config.user_file)
    screen = Screen()
    screen.say("reward model: checking the settings and pairs")
    quiet_imports()
    check_libraries()
    from rlhf.setup.inputs import check_reward_inputs

    check_reward_inputs(config, screen.say)
    import_libraries(screen)
    from rlhf.checkpoints.model_folder import read_record
    from rlhf.models.device import start_device
    from rlhf.rewards.checks import weakness
    from rlhf.rewards.training import train_reward_model

    with screen:
        if (edits := reward_file_line(config.user_file, config.recipe)) is not None:
            screen.say(f"config.py: {edits}")
        with naming(config.training.rm_output):
            folder = agree(lambda: train_reward_model(config, screen, start_device(screen)))
    if not is_first():
        return
    record = read_record(folder)
    weak = weakness(record)
    figures = {name: value for name, value in record.items() if name != "train_questions"}  # thousands of hashes
    result(reward_model=folder, weakness=weak, **figures)
    screen.say(
        f"next: {training_command(config, usual)}"
        if weak is None
        else f"warning: training will reject this reward model: {weak}. Use more pairs or more --rm-epochs"
    )
