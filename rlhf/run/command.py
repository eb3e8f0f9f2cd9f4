"""The training commands: `train_ppo.py` and the scripts of the other algorithms.

Parses the command line before it imports torch, so that `--help` and errors print at once.
"""

from __future__ import annotations

from pathlib import Path

from rlhf.config import parse_cli
from rlhf.setup.inputs import check_inputs
from rlhf.utils.requirements import check_libraries


def train_command(algorithm: str, argv: list[str] | None = None, user_file: Path | None = None) -> None:
    """Run a training command: train one run or several seeds, or with --replay repeat a skipped update.

    `user_file` is the user's config.py. Installed commands have none.
    """
    config = parse_cli(argv, algorithm, user_file)
    if config.run.replay is None and not config.run.resume:
        check_inputs(config)
    check_libraries()
    from rlhf.utils.console import Screen, quiet_libraries

    quiet_libraries()  # before the import of libraries that print at import
    if config.run.replay is not None:
        from rlhf.run.replay import replay_incident

        return replay_incident(config, Screen())
    from rlhf.run.seeds import for_each_seed
    from rlhf.run.train import train

    for_each_seed(train, config, Screen())
