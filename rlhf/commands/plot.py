"""The command `plot_training_progress.py`: draws the training curves of one run, or of groups of runs over seeds."""

from __future__ import annotations

import os
from pathlib import Path

from rlhf.algorithms.table import label_of
from rlhf.analysis.groups import group_runs
from rlhf.checkpoints.run_record import RunRecord, last_run
from rlhf.settings.evaluation import PlotConfig, parse_plot_cli
from rlhf.utils.command_lines import short_name
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError
from rlhf.utils.files import rename_synced, staged
from rlhf.utils.libraries import check_libraries
from rlhf.utils.results import result

INTERRUPTED = "stopped"  # printed after Ctrl-C


def plot_command(argv: list[str] | None = None) -> None:
    """Draw the runs of a command line."""
    config = parse_plot_cli(argv)  # before the slow imports, so that errors are reported at once
    picture, table = output_files(config.plot.output)
    screen = Screen()
    screen.say("plot: reading the runs")
    folders, names = run_folders(config)
    records = [RunRecord.require(folder, "run") for folder in folders]
    group_runs(records, names)  # raises an error for wrong names
    check_libraries("matplotlib", "tensorboard")
    from rlhf.analysis.curves import read_runs, write_table
    from rlhf.reports.curve_chart import Chart
    from rlhf.reports.curve_plots import draw
    from rlhf.reports.plot_style import save_picture

    runs = read_runs(folders)
    chart = Chart(runs, config.plot.x, config.plot.smooth, names)
    figure = draw(chart)
    group_of = {run.folder: group.name for group in chart.groups for run in group.runs}
    with staged(picture) as new_picture, staged(table) as new_table:  # the disk may be full after the first one
        save_picture(figure, new_picture)
        rows = write_table(runs, new_table, group_of)
        rename_synced(new_picture, picture)
        rename_synced(new_table, table)
    show_runs(chart, screen)
    ends = {str(run.folder): {"updates": run.last_update, **last_values(run, chart)} for run in runs}
    result(runs=ends, picture=picture, table=table)
    screen.say(f"wrote {picture} ({len(figure.axes)} panels over {chart.x_label}) and {table} ({rows:,} rows)")


def output_files(output: str) -> tuple[Path, Path]:
    """Return the paths of the plot and the table. Raises UserError if they cannot be written."""
    path = Path(output)
    if path.suffix in (".png", ".csv"):
        path = path.with_suffix("")
    files = path.with_name(path.name + ".png"), path.with_name(path.name + ".csv")
    if not path.parent.is_dir():
        raise UserError("no such folder", f"--output {output}", f"Create {path.parent} first, or give another name")
    if not os.access(path.parent, os.W_OK) or any(file.is_dir() for file in files):
        raise UserError("cannot write the files", f"--output {output}", "Give another name")
    return files


def run_folders(config: PlotConfig) -> tuple[list[Path], list[str | None]]:
    """Return the given run folders, or the last run in the working directory; and the names that the user gave."""
    given = [(run, None) for run in config.plot.runs] + [(arm.model, arm.name) for arm in config.plot.arm]
    given = given or [(last_run(short_name("plot")), None)]
    return [Path(run) for run, _ in given], [name for _, name in given]


def show_runs(chart, screen) -> None:
    """Print the groups if there are several settings, the progress of each run, its final values, and remarks."""
    if any(group.name != label_of(group.algorithm) for group in chart.groups):
        screen.say("groups:")
        screen.facts([(group.name, ", ".join(str(run.folder) for run in group.runs)) for group in chart.groups])
    screen.say(f"at the end ({chart.averaged}):")
    screen.facts([(str(run.folder), final_values(run, chart)) for run in chart.runs])
    for line in [line for run in chart.runs for line in run.remarks]:
        screen.say(line)


def last_values(run, chart) -> dict[str, float | None]:
    """Return the last value of each curve of a run; None if it is not logged."""
    from rlhf.analysis.curves import running_mean

    values = {}
    for panel in (*chart.panels, *chart.small_panels):
        curve = run.scalars.get(panel.tag)
        smooth = chart.smooth if panel.smoothed else 1
        values[panel.tag] = curve and running_mean(curve.updates, curve.values, smooth)[-1]
    return values


def final_values(run, chart) -> str:
    """Return the number of updates of a run, and the last values of its curves, on one line."""
    status = run.run.status
    remarks = [f"{run.last_update:,} of {run.planned:,} updates{'' if status == 'finished' else f' ({status})'}"]
    for tag, value in last_values(run, chart).items():
        remarks.append(f"{tag} {'not logged' if value is None else f'{value:.3g}'}")
    aim = "no KL target" if run.targets is None else f"KL target {run.targets.target_of(run.last_update)}"
    return ", ".join([*remarks, aim])
