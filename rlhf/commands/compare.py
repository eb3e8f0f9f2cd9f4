"""The command `compare_runs.py`: compares groups of runs over seeds, and the start model, on the same prompts."""

from __future__ import annotations

from pathlib import Path

from rlhf.analysis.compared_runs import check_groups, check_named, groups_of
from rlhf.analysis.models import ModelRef, find_models, require_trusted_code
from rlhf.distributed.join import leave_others
from rlhf.settings.evaluation import HELD_OUT_PROMPTS_TO_COMPARE, ComparisonConfig, parse_comparison_cli
from rlhf.utils.console import Screen, quiet_imports
from rlhf.utils.files import check_folder
from rlhf.utils.libraries import check_libraries, import_libraries

INTERRUPTED = "stopped"  # printed after Ctrl-C


def compare_command(argv: list[str] | None = None) -> None:
    """Compare the runs of a command line."""
    config = parse_comparison_cli(argv)  # torch is imported later, so that --help and errors are printed at once
    if leave_others():
        return
    screen = Screen()
    screen.say("comparison: checking the runs")
    quiet_imports()
    check_libraries()
    check_libraries("matplotlib")
    check_folder(config.comparison.output)
    check_named(config.comparison.runs)
    models = find_models(config.comparison.runs, config.measure, "RUN")
    check_groups(models, config.comparison.label)
    require_trusted_code(models, config.measure)
    import_libraries(screen)
    compare(config, models, screen)


def compare(config: ComparisonConfig, models: list[ModelRef], screen: Screen) -> None:
    from rlhf.analysis.curves import read_runs
    from rlhf.analysis.equal_budget import read_eval_points
    from rlhf.analysis.equal_weights import equal_in_words, evaluate_once
    from rlhf.analysis.evaluator import ModelEvaluator
    from rlhf.models.device import start_device
    from rlhf.reports.comparison_report import make_comparison, make_groups, show_comparison, write_comparison
    from rlhf.reports.comparison_tables import tables

    folder = check_folder(config.comparison.output)
    curves = read_runs([Path(name) for name in config.comparison.runs])
    labels = config.comparison.label
    name_of = {i: group.label for group in groups_of(models, labels) for i in group.members}
    eval_points = [(name_of[i], read_eval_points(run)) for i, run in enumerate(curves)]
    device = start_device(screen)
    evaluator = ModelEvaluator(models, config.measure, device, screen, HELD_OUT_PROMPTS_TO_COMPARE)
    screen.facts(evaluator.facts())
    start, measured = evaluate_once(evaluator, models, screen)
    groups = make_groups(models, measured, labels)
    report = make_comparison(evaluator, groups, start, eval_points, equal_in_words(models, evaluator.start))
    made = tables(report, groups)
    write_comparison(report, made, groups, start, curves, folder, screen, labels)
    show_comparison(report, made, screen)
