"""`python plot_training_progress.py`: the training curves of one run, or of several algorithms over seeds."""

from __future__ import annotations

import os
from pathlib import Path

from rlhf.settings.evaluation import PlotConfig, parse_plot_cli
from rlhf.utils.errors import UserError, run_command


def main(argv: list[str] | None = None) -> None:
    config = parse_plot_cli(argv)  # before matplotlib and TensorBoard are imported: mistakes are answered at once
    picture, table = output_files(config.plot.output)
    from rlhf.analysis.curves import read_runs, write_table
    from rlhf.reports.curve_chart import Chart
    from rlhf.reports.curve_plots import draw
    from rlhf.reports.plot_style import save_picture
    from rlhf.utils.console import Screen

    screen = Screen()
    runs = read_runs(run_folders(config))
    chart = Chart(runs, config.plot.x, config.plot.smooth)
    save_picture(draw(chart), picture)
    rows = write_table(runs, table)
    show_runs(chart, screen)
    count = "six" if chart.topics else "four"
    screen.say(f"wrote {picture} ({count} panels over {chart.axis.label}) and {table} ({rows:,} rows)")


def output_files(output: str) -> tuple[Path, Path]:
    """The picture and the table. Raises UserError where they cannot be written."""
    path = Path(output)
    if path.suffix in (".png", ".csv"):
        path = path.with_suffix("")
    files = path.with_name(path.name + ".png"), path.with_name(path.name + ".csv")
    if not path.parent.is_dir():
        raise UserError(f"no such folder: --output {output}. Make {path.parent} first, or name another with --output")
    if not os.access(path.parent, os.W_OK) or any(file.is_dir() for file in files):
        raise UserError(f"cannot write there: --output {output}. Name another with --output")
    return files


def run_folders(config: PlotConfig) -> list[Path]:
    """The runs that were named, else the last one here."""
    from rlhf.checkpoints.run_record import last_run

    return [Path(run) for run in config.plot.runs] or [last_run("plot_training_progress.py")]


def show_runs(chart, screen) -> None:
    """How far each run has come, where its four figures stand, and what a reader of the curves must know."""
    screen.say(f"at the end ({chart.averaged}):")
    screen.facts([(str(run.folder), standing(run, chart)) for run in chart.runs])
    for line in [*(line for run in chart.runs for line in run.remarks), *unlike(chart)]:
        screen.say(line)


def standing(run, chart) -> str:
    """A run's updates, and the ends of its lines."""
    from rlhf.analysis.curves import running_mean

    status = run.run.status
    remarks = [f"{run.last_update:,} of {run.planned:,} updates{'' if status == 'finished' else f' ({status})'}"]
    for panel in chart.panels:
        value = "not logged"
        if panel.tag in run.scalars:
            curve = run.scalars[panel.tag]
            value = f"{running_mean(curve.updates, curve.values, panel.span(chart.smooth))[-1]:.3g}"
        remarks.append(f"{panel.tag} {value}")
    aim = "no KL target" if run.targets is None else f"KL target {run.targets.target_of(run.last_update)}"
    return ", ".join([*remarks, aim])


def unlike(chart) -> list[str]:
    """How the runs differ in what a reader takes to be equal, a line each."""
    from rlhf.checkpoints.run_record import SEEDS_MAY_DIFFER, differences
    from rlhf.utils.console import clock

    remarks = []
    recipes = sorted({run.config.recipe for run in chart.runs})
    if len(recipes) > 1:
        remarks.append(f"the runs are of different recipes: {', '.join(recipes)}")
    if len(chart.aims) > 1:
        units = {run.config.kl.targets[0].per for run in chart.runs}
        shown = "; the KL is shown in nats per sequence" if len(units) > 1 else ""
        remarks.append(f"the runs hold different KL targets: {', '.join(chart.aims)}; none is drawn{shown}")
    for group in chart.groups:
        updates, first = [run.last_update for run in group.runs], group.runs[0].run.settings
        times = [run.seconds for run in group.runs]
        lengths = f"{min(updates):,} to {max(updates):,} updates" if len(set(updates)) > 1 else None
        if chart.x == "time" and clock(min(times)) != clock(max(times)):
            lengths = f"{clock(min(times))} to {clock(max(times))}"
        if lengths:
            remarks.append(
                f"the {group.name} runs differ in length, {lengths}: their mean ends with the shortest, and what "
                "comes after is not drawn"
            )
        mixed = {name for run in group.runs for name in differences(first, run.run.settings, SEEDS_MAY_DIFFER)}
        if mixed:
            remarks.append(
                f"the {group.name} runs differ in {', '.join(sorted(mixed))}: their mean mixes settings. Draw one "
                "setting of an algorithm at a time"
            )
    return remarks


if __name__ == "__main__":
    run_command(main)
