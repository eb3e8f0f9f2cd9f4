"""Trains several seeds in one command, one after another, also shared by several processes; prints a table."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev

from rlhf.checkpoints.run_folder import is_in_use, read_status, release, reserve, seed_folder
from rlhf.checkpoints.run_record import RUN_FILE, SEEDS_MAY_DIFFER, RunRecord, differences, read_json
from rlhf.distributed.group import from_first
from rlhf.reports.tables import ENDS, figure_label, figure_text
from rlhf.run.resume_checks import as_other_seeds, with_choices_of
from rlhf.settings.fields import replaced, to_dict, values_in
from rlhf.settings.next_commands import code_words, resume_command
from rlhf.settings.training import Config
from rlhf.setup.inputs import check_run_folder
from rlhf.utils.command_lines import script_command
from rlhf.utils.console import Screen
from rlhf.utils.errors import Problem, UserError
from rlhf.utils.files import write_json
from rlhf.utils.processes import is_first
from rlhf.utils.results import result
from rlhf.utils.signals import TrainingInterrupted
from rlhf.utils.timing import timed

SHOWN = ("score_rise_in_start_sd", "kl_last_10_updates", "peak_memory_gib", "seconds")  # beside before and after


def for_each_seed(train: Callable[[Config, Screen], None], config: Config, screen: Screen) -> None:
    """Call `train` with the configuration, or if it has `seeds` once per seed, each with a separate output folder.

    Several processes with the same command share the seeds. The lock of a seed's folder decides who trains it, and a
    process never touches a run that another one has started since the command began, whatever became of it. The table
    over seeds is printed if all are finished, so by the process that ends last.
    """
    if config.run.seeds is None:
        config = from_first(lambda: resumed_config(config, screen))
        return None if config is None else train(config, screen)
    configs, before = from_first(lambda: configs_of_seeds(config))
    folders = [Path(one.run.output) for one in configs.values()]
    for (seed, one), folder in zip(configs.items(), folders, strict=True):
        try:
            skipped = from_first(lambda one=one, seed=seed: reserved_or_why_not(one, before[seed]))
            if skipped is not None:
                screen.say(f"seed {seed}: {skipped}")
                continue
            screen.say(f"seed {seed}: output folder {folder}")
            resumed = from_first(lambda one=one: resumed_config(as_other_seeds(one, folders), screen))
            if resumed is not None:  # with --dry-run finished seeds come here, too
                train(resumed, screen)
        except TrainingInterrupted as stopped:
            fix = f"Resume this and the other seeds with: {resume_command(config)}"
            stopped.problems.append(Problem("a command with --seeds", fix=fix))
            raise
        finally:
            release(folder)
        free_models()
        timed.restart()
    if not config.run.only_looks and is_first():
        end_seeds(config, configs, screen)


def reserved_or_why_not(config: Config, before: dict | None) -> str | None:
    """Reserve the folder of a seed for this process and return None, or return why this process does not train it.
    Raises UserError if another process trains it with other settings. `before`: the folder's run.json when the command
    began."""
    folder = Path(config.run.output)
    looks = config.run.only_looks
    if not looks and not reserve(folder):
        differ = [] if config.run.overwrite or read_status(folder) != "running" else other_settings(config)
        if differ:
            raise UserError(
                f"another process trains this seed with other settings ({', '.join(differ)})",
                folder,
                "Use another folder with --output",
            )
        return "another process trains it"
    if is_finished(config):
        return f"already finished in {folder} (delete the folder to train it again)"
    if not looks and read_json(folder) != before:
        return f"another process has started it after this command, and it is {read_status(folder)}: {folder}"
    return None


def free_models() -> None:
    """Free the memory of a finished run: otherwise its models count in the next run's peak memory."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def end_seeds(config: Config, configs: dict[int, Config], screen: Screen) -> None:
    """Print and save the table over seeds, from the run.json of each; or print which seeds are not finished.
    `configs`: seed -> configuration of its run."""
    folders = {seed: Path(one.run.output) for seed, one in configs.items()}
    used = {seed: is_in_use(folder) for seed, folder in folders.items()}  # first: a run finishes before it unlocks
    missing = [seed for seed, one in configs.items() if not is_finished(one)]
    for seed in missing:
        if used[seed]:
            screen.say(f"seed {seed}: another process still trains it. The process that ends last prints the table")
        else:
            status = read_status(folders[seed]) or "not started"
            screen.say(
                f"warning: no table, because seed {seed} is not finished (status: {status}): {folders[seed]}. "
                f"Continue with: {resume_command(config)}"
            )
    if not missing:
        runs = {seed: RunRecord.require(folder, "--output") for seed, folder in folders.items()}
        show_seeds(config, {seed: run.figures for seed, run in runs.items()}, screen)


def configs_of_seeds(config: Config) -> tuple[dict[int, Config], dict[int, dict | None]]:
    """Return the configuration of each seed's run, and the present content of its run.json. Raises UserError for a
    folder that cannot be used, unless a live process uses it."""
    configs = {seed: with_seed(config, seed) for seed in config.run.seeds}
    before = {seed: read_json(Path(one.run.output)) for seed, one in configs.items()}
    for one in configs.values():
        if is_finished(one):
            continue
        try:
            check_run_folder(one)
        except UserError:  # before the look at the lock: another process may start the seed at this moment
            if config.run.only_looks or not is_in_use(Path(one.run.output)):
                raise
    return configs, before


def resumed_config(config: Config, screen: Screen) -> Config | None:
    """Return the configuration to train with: with --resume that of `prepare_resume`, otherwise the given one."""
    if not config.run.resume:
        return config
    from rlhf.run.resume import prepare_resume  # imports the training loop

    return prepare_resume(config, screen)


def with_seed(config: Config, seed: int) -> Config:
    """Return the configuration of one seed's run."""
    output = seed_folder(config.run.output, seed)
    run = RunRecord.read(Path(output)) if config.run.resume else None  # seeds that did not start are started
    if run is not None:
        config = with_choices_of(config, run)
    return replaced(config, seed=seed, seeds=None, output=output, resume=run is not None)


def is_finished(config: Config) -> bool:
    """Return True if this run is finished. Raises UserError if its folder has a finished run with other settings, or a
    run.json of another format, unless --overwrite moves it aside."""
    folder = Path(config.run.output)
    if config.run.only_looks or read_status(folder) != "finished":
        return False
    try:
        differ = other_settings(config)
    except UserError:
        if config.run.overwrite:
            return False
        raise
    if differ and not config.run.overwrite:
        raise UserError(
            f"the folder holds a finished run with other settings ({', '.join(differ)})",
            config.run.output,
            "Add --overwrite to move it aside, or use another folder with --output",
        )
    return not differ


def other_settings(config: Config) -> list[str]:
    """Return the settings in which the run in the output folder differs from this configuration. Raises UserError for
    a run.json of another format."""
    run = RunRecord.require(Path(config.run.output), "--output")
    return differences(run.settings, to_dict(with_choices_of(config, run)), SEEDS_MAY_DIFFER)


def summary_of(runs: dict[int, dict]) -> dict[str, dict]:
    """Return the figures that all runs have: name -> value by seed, mean and standard deviation (None for one seed).

    `runs`: seed -> figures of its run.
    """
    summary = {}
    first = next(iter(runs.values()))
    for name in [name for name in first if name.endswith(ENDS) or name in SHOWN]:
        values = [v for figures in runs.values() if (v := figures.get(name)) is not None]
        if len(values) == len(runs):
            spread = stdev(values) if len(values) > 1 else None
            summary[name] = {"by_seed": dict(zip(runs, values, strict=True)), "mean": fmean(values), "sd": spread}
    return summary


def show_seeds(config: Config, runs: dict[int, dict], screen: Screen) -> None:
    """Print a table of the figures by seed, with mean and standard deviation over seeds, and save it as JSON.

    `runs`: seed -> figures of its run.
    """
    table = []
    summary = summary_of(runs)
    for name, found in summary.items():
        values = (*found["by_seed"].values(), found["mean"])
        spread = figure_text(name, found["sd"]).removeprefix("+")
        table.append([figure_label(name), *(figure_text(name, value) for value in values), spread])
    columns = ["", *(f"seed {seed}" for seed in runs), "mean", "standard deviation"]
    screen.table(f"{config.title}, {len(runs)} seeds", columns, table)
    file = Path(f"{Path(config.run.output)}_seeds.json")
    report = {"algorithm": config.algorithm, "recipe": config.recipe, "figures": summary}
    write_json(file, report)
    result(**report)
    screen.say(f"saved: {file} (details: {RUN_FILE} of each seed)")
    folders = [seed_folder(config.run.output, seed) for seed in runs]
    code = code_words(values_in(config))
    screen.say("next:")
    screen.facts(
        [
            ("plot the training curves", script_command("plot", *folders)),
            ("compare; add other runs after these", script_command("compare", *folders, *code)),
        ]
    )
