"""Several seeds in one command: run one after another, skip what is finished, end with a table over seeds."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev

import torch

from rlhf.algorithms.kl_control import with_horizon
from rlhf.checkpoints.run_folder import read_status, seed_folder
from rlhf.checkpoints.run_record import RUN_FILE, SEEDS_MAY_DIFFER, RunRecord, differences
from rlhf.run.resume import prepare_resume
from rlhf.run.train import check_run_folder
from rlhf.settings.fields import to_dict
from rlhf.settings.next_commands import resume_command
from rlhf.settings.training import Config
from rlhf.utils.console import Screen, clock
from rlhf.utils.errors import UserError
from rlhf.utils.files import write_json
from rlhf.utils.signals import TrainingInterrupted
from rlhf.utils.system import command

# figure in run.json -> how it is shown
SHOWN = {
    "score_before": "score before",
    "score_after": "score after",
    "score_rise_in_start_sd": "rise, sd of the start's scores",
    "gold_before": "gold quality before",
    "gold_after": "gold quality after",
    "kl_last_10_updates": "KL at the end",
    "perplexity_before": "perplexity before",
    "perplexity_after": "perplexity after",
    "length_before": "reply tokens before",
    "length_after": "reply tokens after",
    "eos_rate_after": "share of replies that end",
    "peak_memory_gib": "peak memory, GiB",
    "seconds": "seconds",
}


def for_each_seed(train: Callable[[Config, Screen], None], config: Config, screen: Screen) -> None:
    """`train` with the configuration itself, or with each of its `seeds` in turn, each into a folder of its own."""
    if config.run.seeds is None:
        config = prepare_resume(config, screen) if config.run.resume else config
        return None if config is None else train(config, screen)
    configs = {seed: with_seed(config, seed) for seed in config.run.seeds}
    finished = {seed: is_finished(one) for seed, one in configs.items()}
    for seed, one in configs.items():
        if not finished[seed]:
            check_run_folder(one)  # report the problems of all folders before the first run
    for seed, one in configs.items():
        if finished[seed]:
            screen.say(f"seed {seed}: finished before, in {one.run.output} (delete the folder to run it again)")
            continue
        screen.say(f"seed {seed}: into {one.run.output}")
        resumed = prepare_resume(one, screen) if one.run.resume else one
        if resumed is None:  # a plan of several seeds looks at finished ones, too
            continue
        try:
            train(resumed, screen)
        except TrainingInterrupted as stopped:
            stopped.problems.append(f"for this and the other seeds: {resume_command(config)}")
            raise
        gc.collect()  # a run's models must not weigh on the next one's peak memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if not config.run.dry_run and not config.run.check:
        runs = {seed: RunRecord.require(Path(one.run.output), "--output") for seed, one in configs.items()}
        show_seeds(config, {seed: run.figures for seed, run in runs.items()}, screen)


def with_seed(config: Config, seed: int) -> Config:
    """The configuration of one seed's run."""
    output = seed_folder(config.run.output, seed)
    resume = config.run.resume and RunRecord.read(Path(output)) is not None  # seeds that were not begun are begun
    changed = {"seed": seed, "seeds": None, "output": output, "resume": resume}
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **changed))


def is_finished(config: Config) -> bool:
    """Return whether this very run is done. Raises UserError if its folder has another finished run, or one of another
    format, and --overwrite does not replace it."""
    folder = Path(config.run.output)
    if config.run.dry_run or read_status(folder) != "finished":
        return False
    try:
        run = RunRecord.require(folder, "--output")
    except UserError:
        if config.run.overwrite:
            return False
        raise
    differ = differences(run.settings, to_dict(with_horizon(config, run.plan.updates)), SEEDS_MAY_DIFFER)
    if differ and not config.run.overwrite:
        raise UserError(
            f"a finished run with other settings ({', '.join(differ)}) is there: {config.run.output}. "
            "Add --overwrite to replace it, or name another folder with --output"
        )
    return not differ


def show_seeds(config: Config, runs: dict[int, dict], screen: Screen) -> None:
    """Every figure by seed, with mean and spread (standard deviation over seeds), on the screen and as JSON. `runs`:
    seed -> figures of its run."""
    table, summary = [], {}
    for name, label in SHOWN.items():
        values = [v for figures in runs.values() if (v := figures.get(name)) is not None]
        if len(values) < len(runs):
            continue
        spread = stdev(values) if len(values) > 1 else None
        summary[name] = {"by_seed": dict(zip(runs, values, strict=True)), "mean": fmean(values), "sd": spread}
        show = clock if name == "seconds" else "{:.3f}".format
        cells = [show(v) for v in (*values, fmean(values))]
        table.append((label, *cells, "-" if spread is None else show(spread)))
    columns = ["", *(f"seed {seed}" for seed in runs), "mean", "sd over seeds"]
    screen.table(f"{config.algorithm.upper()}, {len(runs)} seeds", columns, table)
    file = Path(f"{Path(config.run.output)}_seeds.json")
    write_json(file, {"algorithm": config.algorithm, "recipe": config.recipe, "figures": summary})
    screen.say(f"saved: {file}; the rest is in each seed's {RUN_FILE}")
    folders = [str(Path(with_seed(config, seed).run.output)) for seed in runs]
    screen.say("next:")
    screen.facts(
        [
            ("the curves", command("python", "plot_training_progress.py", *folders)),
            ("the verdict; add other algorithms' runs", command("python", "compare_runs.py", *folders)),
        ]
    )
