"""`python compare_runs.py RUN ...`: start model and algorithms over seeds on the same prompts: a report, a verdict."""

from __future__ import annotations

from rlhf.settings.evaluation import ComparisonConfig, parse_comparison_cli
from rlhf.utils.errors import run_command
from rlhf.utils.requirements import check_libraries


def main(argv: list[str] | None = None) -> None:
    config = parse_comparison_cli(argv)  # before torch is imported: --help and mistakes are answered at once
    check_libraries()
    from rlhf.utils.console import Screen, quiet_libraries

    quiet_libraries()
    compare(config, Screen())


def compare(config: ComparisonConfig, screen) -> None:
    from pathlib import Path

    from rlhf.analysis.curves import read_runs
    from rlhf.analysis.equal_budget import read_eval_points
    from rlhf.analysis.evaluator import ModelEvaluator
    from rlhf.analysis.models import find_models
    from rlhf.models.device import start_device
    from rlhf.reports.comparison_report import (
        check_named,
        check_sides,
        make_comparison,
        make_sides,
        show_comparison,
        write_comparison,
    )
    from rlhf.reports.comparison_tables import tables
    from rlhf.rewards.printing import PRINTED_FILE
    from rlhf.utils.files import check_folder

    folder = check_folder(config.comparison.output)
    check_named(config.comparison.runs)
    models = find_models(config.comparison.runs, config.measure, "RUN")
    check_sides(models)
    curves = read_runs([Path(name) for name in config.comparison.runs])
    looks = [(run.algorithm, read_eval_points(run)) for run in curves]
    bench = ModelEvaluator(models, config.measure, start_device(screen), screen)
    bench.rewards.printed = folder / PRINTED_FILE
    screen.facts(bench.facts())
    start = bench.measure_start(screen)
    sides = make_sides(models, [bench.measure(model, screen) for model in models])
    report = make_comparison(bench, sides, start, looks)
    made = tables(report, sides)
    write_comparison(report, made, sides, start, curves, folder, screen)
    show_comparison(report, made, screen)


if __name__ == "__main__":
    run_command(main)
