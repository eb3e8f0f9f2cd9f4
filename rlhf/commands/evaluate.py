"""The command `evaluate_generations.py`: scores and ranks completions, makes a page of recorded tokens, or chats."""

from __future__ import annotations

from pathlib import Path

from rlhf.analysis.models import ModelRef, find_models, require_trusted_code
from rlhf.checkpoints.run_folder import RUN_AGAIN, RunLock
from rlhf.checkpoints.run_record import RunRecord
from rlhf.distributed.join import leave_others
from rlhf.settings.evaluation import EvaluationConfig, parse_evaluation_cli
from rlhf.utils.console import Screen, quiet_imports
from rlhf.utils.files import check_folder
from rlhf.utils.libraries import check_libraries, import_libraries

INTERRUPTED = "stopped"  # printed after Ctrl-C


def evaluate_command(argv: list[str] | None = None) -> None:
    """Evaluate the models of a command line."""
    config = parse_evaluation_cli(argv)  # torch is imported later, so that --help and errors are printed at once
    if leave_others():
        return
    screen = Screen()
    if config.evaluation.tokens is not None:
        RunRecord.require(Path(config.evaluation.tokens), "--tokens")
        from rlhf.reports.token_page import write_token_page

        return write_token_page(config.evaluation.tokens, config.evaluation.output, screen)
    screen.say("evaluation: checking the models")
    quiet_imports()
    check_libraries()
    if not config.evaluation.chat:
        check_libraries("matplotlib")
    folder = check_folder(config.evaluation.output)
    models = find_models(config.evaluation.model_path, config.measure, "--model-path")
    if config.evaluation.chat:
        import_libraries(screen)
        from rlhf.analysis.chat import chat

        return chat(config, screen)
    require_trusted_code(models, config.measure)
    with RunLock(folder, RUN_AGAIN) as lock:  # another evaluation would replace its files
        import_libraries(screen)
        return evaluate(config, models, lock, screen)


def evaluate(config: EvaluationConfig, models: list[ModelRef], lock: RunLock, screen: Screen) -> None:
    """Evaluate the models, and write the report into the locked folder."""
    from rlhf.analysis.evaluator import ModelEvaluator
    from rlhf.analysis.verdict import START, Arm
    from rlhf.models.device import start_device
    from rlhf.reports.evaluation_report import evaluation_page, make_report, show_prompts

    evaluator = ModelEvaluator(models, config.measure, start_device(screen), screen)
    screen.facts(evaluator.facts())
    start = Arm(START, [evaluator.evaluate_start(screen)]) if evaluator.start is not None else None
    arms = [Arm(model.label, [evaluator.evaluate(model, screen)], [model]) for model in models]
    report = make_report(evaluator, arms, start)
    show_prompts(report, screen)
    page = evaluation_page(report, arms, start)
    page.write(lock.folder, lock.check)
    page.show(screen, lock.folder, full=True)
