"""The command `compare_runs.py`: compares arms over seeds, and the start model, on the same prompts."""

from __future__ import annotations

from dataclasses import replace

from rlhf.analysis.arms import find_arms
from rlhf.analysis.groups import SettingsGroup, mixed
from rlhf.analysis.models import ModelRef, equal_to_start, require_trusted_code
from rlhf.checkpoints.run_folder import RUN_AGAIN, RunLock
from rlhf.distributed.join import leave_others
from rlhf.settings.evaluation import HELD_OUT_PROMPTS_TO_COMPARE, ComparisonConfig, parse_comparison_cli
from rlhf.utils.console import Screen, quiet_imports
from rlhf.utils.files import check_folder
from rlhf.utils.libraries import check_libraries, import_libraries

INTERRUPTED = "stopped"  # printed after Ctrl-C
# samples of the start model per prompt: completions of each best-of-n, and at least
BLOCKS = 4
LEAST = 8


def compare_command(argv: list[str] | None = None) -> None:
    """Compare the arms of a command line."""
    config = parse_comparison_cli(argv)  # torch is imported later, so that --help and errors are printed at once
    if leave_others():
        return
    screen = Screen()
    screen.say("comparison: checking the models")
    quiet_imports()
    check_libraries()
    check_libraries("matplotlib")
    folder = check_folder(config.comparison.output)
    models, groups = find_arms(config.comparison, config.measure)
    require_trusted_code(models, config.measure)
    with RunLock(folder, RUN_AGAIN) as lock:  # another comparison would replace its files
        import_libraries(screen)
        compare_arms(config, models, groups, lock, screen)


def compare_arms(
    config: ComparisonConfig, models: list[ModelRef], groups: list[SettingsGroup], lock: RunLock, screen: Screen
) -> None:
    """Compare the arms, and write the report into the locked folder."""
    from rlhf.analysis.curves import read_runs
    from rlhf.analysis.equal_budget import read_eval_points
    from rlhf.analysis.evaluator import ModelEvaluator
    from rlhf.analysis.start_samples import sample_start
    from rlhf.analysis.verdict import START, Arm
    from rlhf.data.examples import worked_examples
    from rlhf.models.device import start_device
    from rlhf.reports.comparison_report import comparison_page, make_comparison

    asked = config.comparison
    runs = [(group.label, i) for group in groups for i in group.members if models[i].run is not None]
    read = read_runs([models[i].run_folder for _, i in runs], without_scalars=True)
    for remark in [remark for run in read for remark in run.remarks]:
        screen.say(f"note: {remark}")
    curves = [(name, run) for (name, _), run in zip(runs, read, strict=True)]
    eval_points = {name: [read_eval_points(run) for of, run in curves if of == name] for name, _ in curves}
    shots = worked_examples(asked.few_shot)
    usual = HELD_OUT_PROMPTS_TO_COMPARE
    device = start_device(screen)
    evaluator = ModelEvaluator(models, config.measure, device, screen, usual, shots)
    screen.facts(evaluator.facts())
    start = evaluator.evaluate_start(screen)
    measured = [evaluator.evaluate(model, screen) for model in models]
    arms = []
    notes = equal_to_start(models)
    for group in groups:
        members = sorted(group.members, key=lambda i: models[i].run.seed if models[i].run else i)
        results = [measured[i] for i in members]
        arms.append(Arm(group.label, results, [models[i] for i in members], group.settings))
        notes += mixed(group, arms[-1].runs)
    best_of = list(dict.fromkeys(arm.best_of for arm in asked.arm if arm.best_of))
    samples = None
    if best_of or asked.limit_minutes:
        least = max([LEAST, *(BLOCKS * n for n in best_of)])
        file = lock.folder / "start_samples.json"
        samples = sample_start(evaluator, asked.limit_minutes, least, file, screen, lock.check)
    start = Arm(START, [replace(start, more=samples)])
    arms, report = make_comparison(evaluator, arms, start, samples, best_of, eval_points, notes)
    page = comparison_page(report, start, arms, [(name, run) for name, run in curves if run.scalars])
    page.write(lock.folder, lock.check)
    page.show(screen, lock.folder, asked.full)
