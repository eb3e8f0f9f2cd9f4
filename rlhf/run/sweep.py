"""`--sweep`: trains one run per combination of settings and seed, and prints one table. Imports no torch itself."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.algorithms.table import ALGORITHMS
from rlhf.analysis.models import MEASURED_WITH
from rlhf.checkpoints.run_folder import is_in_use, seed_folder
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import combinations, resolve_cli
from rlhf.run.parallel_seeds import build_demo, report_rest, train_runs
from rlhf.run.resume_checks import check_resume
from rlhf.run.seeds import configs_of_seeds, show_next, summary_of, with_seed
from rlhf.settings.fields import Layer, as_text, name_table, settings_of
from rlhf.settings.flags import flags_of_booleans
from rlhf.settings.training import FITTED, Config
from rlhf.setup.inputs import check_inputs
from rlhf.utils.command_lines import command, script_words
from rlhf.utils.console import Screen, clock, counted
from rlhf.utils.errors import UserError, raise_if
from rlhf.utils.files import write_json
from rlhf.utils.libraries import check_libraries, check_trackers

LONGEST_PART = 120  # characters of the settings in a folder's name
SCORE, KL, TIME = "score_rise_in_start_sd", "kl_last_10_updates", "seconds"


@dataclass(frozen=True)
class Point:
    """One combination of the values of a sweep."""

    settings: dict[str, str]  # the settings of the sweep, as text
    config: Config  # with all seeds; its output folder is the one of the runs without _seedN

    @property
    def name(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.settings.items())

    @property
    def folders(self) -> dict[int, Path]:
        """The run folder of each seed."""
        run = self.config.run
        return {seed: Path(seed_folder(run.output, seed)) for seed in run.seeds}


# --- the combinations ------------------------------------------------------------------------------------------------


def points_of(config: Config, argv: Sequence[str] | None = None) -> list[Point]:
    """Return the combinations of a command line with --sweep. Each has the configuration of the same command with the
    values as flags. Raises UserError with the errors of all combinations."""
    words = sys.argv[1:] if argv is None else argv
    found, problems = [], []
    for combination in combinations(ALGORITHMS[config.algorithm], config.run.sweep):
        try:
            one = resolve_cli(words, config.algorithm, config.user_file, combination)
            found.append((_texts(one, combination), one))
        except UserError as error:
            problems += [_with_values(problem, combination) for problem in error.problems]
    raise_if(list(dict.fromkeys(problems)))
    fitted = {name: None for settings, one in found if one.speed.fit for name in settings if name in FITTED}
    raise_if([f"--fit chooses {name}: --fit, --sweep {name}. Remove one" for name in fitted])
    texts = [", ".join(f"{name}={value}" for name, value in settings.items()) for settings, _ in found]
    raise_if([f"two combinations are equal: --sweep, {t}. Keep one" for t in sorted(set(texts)) if texts.count(t) > 1])
    return [
        Point(settings, _of_point(one, part))
        for (settings, one), part in zip(found, folder_parts([settings for settings, _ in found]), strict=True)
    ]


def _texts(config: Config, combination: Layer) -> dict[str, str]:
    """Return the settings of a combination: first name -> value as text, in one form for all spellings."""
    settings = settings_of(Config)
    first, texts = name_table(settings), {}
    for name, (value, _) in combination.items():
        setting = settings[first[name]]
        used = getattr(getattr(config, setting.group), setting.name)
        texts[setting.name] = as_text(value if used is None else used, " ")
    return texts


def _with_values(problem: str, combination: Layer) -> str:
    """Return an error with the combination in which it occurs."""
    if "--sweep" in problem:
        return problem
    head, dot, fix = problem.partition(". ")
    return f"{head}, with {', '.join(place for _, place in combination.values())}{dot}{fix}"


def _of_point(config: Config, part: str) -> Config:
    run = config.run
    seeds, output = run.seeds or (run.seed,), f"{Path(run.output)}_{part}"
    return dataclasses.replace(config, run=dataclasses.replace(run, sweep=(), seeds=seeds, output=output))


def folder_parts(points: Sequence[dict[str, str]]) -> list[str]:
    """Return the part of each combination in the names of its folders: kl_target=3-sequence_learning_rate=1e-05.

    It has only characters that need no quotes in a shell and that Windows allows, and no comma, which separates the
    values of a flag. A part that is too long, or equal to another one if upper and lower case are not distinguished,
    ends with a hash of the settings.
    """
    texts = ["_".join(f"{name}={value}" for name, value in settings.items()) for settings in points]
    parts = [re.sub(r"[^\w.+=-]+", "-", text) for text in texts]
    folded = [part.casefold() for part in parts]
    hashes = [hashlib.sha256(text.encode()).hexdigest()[:8] for text in texts]
    return [
        f"{part[:LONGEST_PART]}-{mark}" if len(part) > LONGEST_PART or folded.count(part.casefold()) > 1 else part
        for part, mark in zip(parts, hashes, strict=True)
    ]


def show_grid(points: Sequence[Point], screen: Screen) -> None:
    """Print the combinations and the number of runs."""
    count, seeds = len(points), len(points[0].config.run.seeds)
    of = f"{counted(count, 'combination')} x {counted(seeds, 'seed')} = {counted(count * seeds, 'run')}"
    rows = [list(point.settings.values()) for point in points]
    screen.table(f"sweep: {of}", list(points[0].settings), rows, lines=False)
    screen.say(f"the first run folder: {next(iter(points[0].folders.values()))}")


def first_run(points: Sequence[Point]) -> Config:
    """Return the configuration of the first run."""
    return with_seed(points[0].config, points[0].config.run.seeds[0])


# --- training --------------------------------------------------------------------------------------------------------


def train_sweep(points: Sequence[Point], config: Config, argv: Sequence[str] | None, screen: Screen) -> None:
    """Train the runs of a sweep, each in a separate process, and print one table. With --parallel several run at the
    same time. Finished runs are skipped; with --resume interrupted ones continue.

    Raises UserError before the first run, RunError if a run fails (the others finish before), and TrainingInterrupted
    after a stop signal.
    """
    check_trackers(config.record.report_to or ())
    check_all_inputs(points, screen.say)
    check_libraries()
    runs: dict[str, Config] = {}
    done = set()
    for point in points:
        configs, finished = configs_of_seeds(point.config, with_others=True)
        for seed, one in configs.items():
            name = f"{point.name}, seed {seed}"
            runs[name] = one
            if finished[seed]:
                done.add(name)
            elif one.run.resume and not is_in_use(Path(one.run.output)):
                check_resume(one)
    build_demo(config, screen)
    again = resume_of(config, argv)
    ended = train_runs(runs, done, screen, again, config.run.parallel)
    show_sweep(points, config, screen)
    if any(run.process.returncode for run in ended):
        screen.say(f"train the failed runs again with: {again}")
    report_rest(runs, ended, screen)


def check_all_inputs(points: Sequence[Point], say: Callable[[str], None]) -> None:
    """Raise UserError for wrong inputs of a combination. Combinations with the same inputs are checked once."""
    checked = []
    for point in points:
        config = point.config
        inputs = (config.model, config.data, config.reward, config.batch, config.critic, config.run.num_iterations)
        if inputs not in checked:
            checked.append(inputs)
            check_inputs(config, say)


def resume_of(config: Config, argv: Sequence[str] | None) -> str:
    """Return the command that resumes a sweep: the same command with --resume, so that runs that were not started have
    the same settings."""
    words, names = sys.argv[1:] if argv is None else argv, settings_of(Config)
    removed = flags_of_booleans(names["resume"], names["overwrite"])
    kept = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if word.partition("=")[0] not in removed and (before not in removed or word.startswith("-"))
    ]
    return command(*script_words(config.algorithm), *kept, "--resume")


# --- results ---------------------------------------------------------------------------------------------------------


def results_of(point: Point) -> dict[str, Any]:
    """Return the settings, the runs and the figures (means over the finished seeds) of a combination."""
    records = {seed: RunRecord.read(folder) for seed, folder in point.folders.items()}
    finished = {seed: run for seed, run in records.items() if run is not None and run.status == "finished"}
    runs = {
        seed: {"output": str(point.folders[seed]), "status": run.status if run else "not started"}
        for seed, run in records.items()
    }
    unit = next((run.figures["kl_unit"] for run in finished.values() if "kl_unit" in run.figures), None)
    figures = summary_of({seed: run.figures for seed, run in finished.items()}) if finished else {}
    return {"settings": point.settings, "runs": runs, "kl_unit": unit, "figures": figures}


def show_sweep(points: Sequence[Point], config: Config, screen: Screen) -> None:
    """Print the table of a sweep, save it as JSON, and print the next commands."""
    results = [results_of(point) for point in points]
    shown = _columns(results)
    rows = []
    for found in results:
        finished = [run for run in found["runs"].values() if run["status"] == "finished"]
        cells = [_cell(found["figures"].get(name), name) for name in shown]
        rows.append([*found["settings"].values(), f"{len(finished)} of {len(found['runs'])}", *cells])
    title = f"{config.title}, {counted(len(points), 'combination')}: mean over seeds (standard deviation)"
    screen.table(title, [*results[0]["settings"], "finished", *shown.values()], rows, lines=False)
    if len(points) > 2:
        screen.say(
            f"note: the best of {len(points)} combinations is partly chance. Train it and the one to beat with new "
            "seeds, and compare these two"
        )
    file = Path(f"{Path(config.run.output)}_sweep.json")
    write_json(file, {"algorithm": config.algorithm, "recipe": config.recipe, "combinations": results})
    screen.say(f"saved: {file}")
    runs = [run for found in results for run in found["runs"].values()]
    folders = [run["output"] for run in runs if run["status"] == "finished"]
    if folders:
        show_next(folders, config, screen, [name for name in points[0].settings if name in MEASURED_WITH])


def _columns(results: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the figures of the table that a combination has, with their labels."""
    every = dict.fromkeys(name for found in results for name in found["figures"])
    watched = {
        name: name.removesuffix("_after") for name in every if name.startswith("eval/") and name.endswith("_after")
    }
    units = {found["kl_unit"] for found in results if found["kl_unit"] is not None}
    of_kl = f"KL ({units.pop()})" if len(units) == 1 else "KL (unit of its target)"
    labels = {
        SCORE: "score change (sd of start model)",
        "gold_after": "gold quality",
        **watched,
        KL: of_kl,
        TIME: "time",
    }
    return {name: label for name, label in labels.items() if name in every}


def _cell(found: dict[str, Any] | None, name: str) -> str:
    if found is None:
        return "-"
    show = clock if name == TIME else "{:+z.2f}".format if name == SCORE else "{:.3f}".format
    return show(found["mean"]) + ("" if found["sd"] is None else f" ({show(found['sd']).lstrip('+')})")
