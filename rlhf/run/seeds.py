"""Trains several seeds in one command: one after another, skips finished ones, and prints a table over seeds."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev

from rlhf.algorithms.kl_control import with_horizon
from rlhf.analysis.models import measuring_flags
from rlhf.checkpoints.run_folder import is_in_use, read_status, seed_folder
from rlhf.checkpoints.run_record import RUN_FILE, SEEDS_MAY_DIFFER, RunRecord, differences
from rlhf.distributed.group import from_first
from rlhf.run.resume_checks import in_one_precision, with_choices_of
from rlhf.settings.fields import to_dict
from rlhf.settings.next_commands import code_words, resume_command
from rlhf.settings.training import Config
from rlhf.setup.inputs import check_run_folder
from rlhf.utils.command_lines import command, script_words, short_name
from rlhf.utils.console import Screen, clock
from rlhf.utils.errors import UserError
from rlhf.utils.files import write_json
from rlhf.utils.processes import is_first
from rlhf.utils.signals import TrainingInterrupted

# figure in run.json -> label in the table
SHOWN = {
    "score_before": "score before",
    "score_after": "score after",
    "score_rise_in_start_sd": "score change, standard deviations of the start model's scores",
    "gold_before": "gold quality before",
    "gold_after": "gold quality after",
    "kl_last_10_updates": "KL, mean of the last 10 updates",
    "perplexity_before": "perplexity before",
    "perplexity_after": "perplexity after",
    "length_before": "completion tokens before",
    "length_after": "completion tokens after",
    "eos_rate_after": "share of completions with EOS",
    "peak_memory_gib": "peak memory, GiB",
    "seconds": "seconds",
}


def for_each_seed(train: Callable[[Config, Screen], None], config: Config, screen: Screen) -> None:
    """Call `train` with the configuration, or if it has `seeds` once per seed, each with a separate output folder."""
    if config.run.seeds is None:
        config = from_first(lambda: resumed_config(config, screen))
        return None if config is None else train(config, screen)
    configs, finished = from_first(lambda: configs_of_seeds(config))
    for seed, one in configs.items():
        if finished[seed]:
            screen.say(f"seed {seed}: already finished in {one.run.output} (delete the folder to train it again)")
            continue
        screen.say(f"seed {seed}: output folder {one.run.output}")
        resumed = from_first(lambda one=one: resumed_config(one, screen))
        if resumed is None:  # with --dry-run finished seeds come here, too
            continue
        try:
            train(resumed, screen)
        except TrainingInterrupted as stopped:
            stopped.problems.append(f"Resume this and the other seeds with: {resume_command(config)}")
            raise
        free_memory()
    if not config.run.only_looks and is_first():
        show_results(config, configs, screen)


def free_memory() -> None:
    """Free the memory of a finished run: otherwise its models count in the next run's peak memory."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def show_results(config: Config, configs: dict[int, Config], screen: Screen) -> None:
    """Print and save the table over seeds, from the run.json of each. `configs`: seed -> configuration of its run."""
    runs = {seed: RunRecord.require(Path(one.run.output), "--output") for seed, one in configs.items()}
    show_seeds(config, {seed: run.figures for seed, run in runs.items()}, screen)


def configs_of_seeds(config: Config, with_others: bool = False) -> tuple[dict[int, Config], dict[int, bool]]:
    """Return the configuration of each seed's run, and whether it is finished. Raises UserError for a folder that
    cannot be used; `with_others`: folders that a live process uses are accepted."""
    configs = {seed: with_seed(config, seed) for seed in config.run.seeds}
    finished = {seed: is_finished(one) for seed, one in configs.items()}
    for seed, one in configs.items():
        if not finished[seed] and not (with_others and is_in_use(Path(one.run.output))):
            check_run_folder(one)
    return in_one_precision(configs), finished


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
    if run is not None:  # settings that followed from the length of the run, and those that it chose
        config = with_horizon(with_choices_of(config, run), run.plan.updates)
    changed = {"seed": seed, "seeds": None, "parallel": False, "output": output, "resume": run is not None}
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **changed))


def is_finished(config: Config) -> bool:
    """Return True if this run is finished. Raises UserError if its folder has a finished run with other settings, or a
    run.json of another format, unless --overwrite moves it aside."""
    folder = Path(config.run.output)
    if config.run.dry_run or config.run.check_reward or config.run.scan or read_status(folder) != "finished":
        return False
    try:
        run = RunRecord.require(folder, "--output")
    except UserError:
        if config.run.overwrite:
            return False
        raise
    differ = differences(
        run.settings, to_dict(with_horizon(with_choices_of(config, run), run.plan.updates)), SEEDS_MAY_DIFFER
    )
    if differ and not config.run.overwrite:
        raise UserError(
            f"the folder holds a finished run with other settings ({', '.join(differ)}): {config.run.output}. "
            "Add --overwrite to move it aside, or use another folder with --output"
        )
    return not differ


def summary_of(runs: dict[int, dict]) -> dict[str, dict]:
    """Return the figures that all runs have: name -> value by seed, mean and standard deviation (None for one seed).

    `runs`: seed -> figures of its run.
    """
    summary = {}
    for name in labels_of(next(iter(runs.values()), {})):
        values = [v for figures in runs.values() if (v := figures.get(name)) is not None]
        if len(values) == len(runs):
            spread = stdev(values) if len(values) > 1 else None
            summary[name] = {"by_seed": dict(zip(runs, values, strict=True)), "mean": fmean(values), "sd": spread}
    return summary


def labels_of(figures: dict) -> dict[str, str]:
    """Return the figures of the tables, with their labels. Those of evaluation functions depend on the run."""
    ends = ("before", "after")
    watched = [name for name in figures if name.startswith("eval/")]
    evaluated = {n: f"{n[5:].removesuffix(f'_{e}')} {e}" for n in watched for e in ends if n.endswith(f"_{e}")}
    return SHOWN | evaluated


def show_seeds(config: Config, runs: dict[int, dict], screen: Screen) -> None:
    """Print a table of the figures by seed, with mean and standard deviation over seeds, and save it as JSON.

    `runs`: seed -> figures of its run.
    """
    table, summary, labels = [], summary_of(runs), labels_of(next(iter(runs.values())))
    for name, found in summary.items():
        show = clock if name == "seconds" else "{:.3f}".format
        cells = [show(v) for v in (*found["by_seed"].values(), found["mean"])]
        table.append((labels[name], *cells, "-" if found["sd"] is None else show(found["sd"])))
    columns = ["", *(f"seed {seed}" for seed in runs), "mean", "standard deviation"]
    screen.table(f"{config.title}, {len(runs)} seeds", columns, table)
    file = Path(f"{Path(config.run.output)}_seeds.json")
    write_json(file, {"algorithm": config.algorithm, "recipe": config.recipe, "figures": summary})
    screen.say(f"saved: {file} (details: {RUN_FILE} of each seed)")
    show_next([str(Path(with_seed(config, seed).run.output)) for seed in runs], config, screen)


def show_next(folders: list[str], config: Config, screen: Screen, unequal: Sequence[str] = ()) -> None:
    """Print the commands that plot and compare the runs in these folders.

    Args:
        folders: the run folders.
        config: the configuration of the first run.
        screen: prints the commands.
        unequal: settings in which the runs differ and that decide completions or scores. A comparison needs one value
            for all runs: the one of the first run.
    """
    names, flags = " and ".join(unequal), measuring_flags(config, unequal)
    if flags is None:
        last = ("compare", f"not possible: {short_name('compare')} cannot use one value of {names} for all runs")
    else:
        rules = () if "reward_func" in unequal else config.reward.reward_func
        words = [*script_words("compare"), *folders, *code_words(rules, config.reward.eval_func), *flags]
        equal = f", all with the {names} of the first" if unequal else ""
        last = (f"compare{equal}; add other runs after these", command(*words))
    screen.say("next:")
    screen.facts(
        [
            ("plot the training curves", command(*script_words("plot"), *folders)),
            last,
        ]
    )
