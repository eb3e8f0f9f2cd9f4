"""The training commands: `train_ppo.py` and the scripts of the other algorithms, and `train.py --algorithm NAME`.

Checks the command line, the settings, the folders and the data before it imports torch, so that `--help`, the first
line and errors print at once. Each stage imports what it needs.
"""

from __future__ import annotations

from pathlib import Path

from rlhf.checkpoints.run_folder import read_status
from rlhf.config import parse_cli
from rlhf.distributed.join import leave, leave_others, use_own_gpu
from rlhf.settings.training import Config
from rlhf.utils.console import Screen, quiet_imports, quiet_libraries
from rlhf.utils.libraries import check_libraries, check_trackers, import_libraries
from rlhf.utils.timing import timed

INTERRUPTED = "stopped; if the run has a checkpoint, resume it with --resume"  # printed after Ctrl-C


def train_command(algorithm: str | None, argv: list[str] | None = None, user_file: Path | None = None) -> None:
    """Run a training command: train one run or several seeds.

    `algorithm`: None: that of --algorithm. `user_file` is the user's config.py. Installed commands have none.
    """
    timed.restart()
    with timed("checks"):
        config = parse_cli(argv, algorithm, user_file)
    quiet_imports()
    if config.run.only_looks and leave_others():
        return None
    use_own_gpu()
    screen = Screen()
    screen.say(f"{config.title}: checking the settings and inputs")
    if config.run.write_parts is not None:
        from rlhf.data.parts import write_parts

        return None if misses_parts(config, screen) else write_parts(config.data, config.run.write_parts, screen.say)
    with timed("checks"):
        check_before_imports(config, screen)
    if config.run.dry_run and misses_parts(config, screen):
        return None
    check_libraries()
    if config.run.only_looks:
        quiet_libraries()
        from rlhf.run.looks import look as one_run
    else:
        with timed("imports"):
            import_libraries(screen, "rlhf.run.train")
            from rlhf.distributed.join import join
            from rlhf.run.train import train as one_run

        join(config.run.ddp_timeout)
    from rlhf.run.seeds import for_each_seed

    for_each_seed(one_run, config, screen)
    leave()


def check_before_imports(config: Config, screen: Screen) -> None:
    """Raise UserError for everything that flags, paths, JSON files and data tell."""
    from rlhf.run.resume_checks import check_resume
    from rlhf.setup.inputs import check_inputs, check_run_folder

    exported = config.run.resume and read_status(Path(config.run.output)) == "finished"
    if not exported:  # also before a dry run, which would otherwise promise a run that cannot start
        check_trackers(config.record.report_to or ())
    if config.run.seeds is None:
        if config.run.resume:
            check_resume(config)
        check_run_folder(config)
    if not config.run.resume:
        check_inputs(config, screen.say)


def misses_parts(config: Config, screen: Screen) -> bool:
    """Return True if the parts of a demo are not built yet, and print that its plan needs them."""
    from rlhf.demo.ready import BUILD_TIME, is_to_be_built

    if not is_to_be_built(config.recipe):
        return False
    screen.say(
        f"demo parts: not built yet; a run builds them first, which takes {BUILD_TIME[config.recipe]}. This command "
        "needs them. --check plan builds them, too"
    )
    return True
