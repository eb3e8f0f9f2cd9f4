"""Summarizes a finished run: results before and after training, saved files, and the next commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlhf.algorithms.kl_control import in_band, kl_controller
from rlhf.checkpoints.run_folder import BEST_FOLDER, MERGED_FOLDER
from rlhf.checkpoints.run_log import RunLog
from rlhf.checkpoints.run_record import RunRecord, Spent
from rlhf.data.prompts import Prompt
from rlhf.reports.tables import before_and_after, rows_of_run
from rlhf.run.figures import LAST_UPDATES, kl_of_phases, last_kl, results_of
from rlhf.settings.fields import values_in
from rlhf.settings.next_commands import code_words
from rlhf.settings.training import CONTROL_MEANS, Config
from rlhf.settings.types import KLTarget, kl_text
from rlhf.trainer.evaluation import Evaluation, shown_prompts
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.progress import parts_text
from rlhf.utils.command_lines import command, script_command
from rlhf.utils.console import Screen
from rlhf.utils.files import update_dir_atomically
from rlhf.utils.results import results
from rlhf.utils.timing import timed


def show_figures(figures: dict, averaged: int, screen: Screen) -> None:
    """Print the results of `results_of`, and the KL. `averaged` is the number of updates whose KL is averaged in
    `kl_last_10_updates`."""
    facts = _kl_rows(figures, averaged)
    rows = rows_of_run(figures)
    if rows:
        caption = f"before -> after training, on {figures['prompts']} evaluation prompts:"
        table = before_and_after(caption, ["before", "after"], rows)
        screen.say(table.caption)
        screen.columns([table.columns, *table.rows])
        rise = figures["score_rise_in_start_sd"]
        change = [("score", f"change {rise:.2f} standard deviations of the start model's scores")] if rise else []
        facts = [*change, *facts, ("perplexity", f"on {figures['perplexity_text']}")]
    screen.facts(facts)


def _kl_rows(figures: dict, averaged: int) -> list[tuple[str, str]]:
    """Return the rows of the KL at the end of the run, and of each phase if there are several."""
    per = figures["kl_unit"].removeprefix("nats/")
    kl = figures["kl_last_10_updates"]
    measured = "not measured, because every update was skipped"
    if kl is not None:
        updates = f"mean of the last {averaged} updates" if averaged > 1 else "one update"
        measured = f"{kl_text(kl, per)} ({updates})"
    rows = [("KL", f"{measured}{_aim(kl, figures['kl_target'], per)}")]
    if figures["kl_target"] is not None and len(figures["kl_phases"]) > 1:
        for phase in figures["kl_phases"]:
            first, last = phase["updates"]
            ended = phase["kl_last_10_updates"]
            aim = _aim(ended, phase["target"], per)
            measured = "all skipped" if ended is None else f"{kl_text(ended, per)} at the end"
            rows.append(("", f"updates {first} to {last}: {measured}{aim}"))
    return rows


def _aim(kl: float | None, target: float | None, per: str) -> str:
    """Return in words if a KL is in its target's band; "" if beta was not steered or there is no KL."""
    if target is None or kl is None:
        return ""
    where = "within" if in_band(kl, target) else "outside"
    return f", {where} the range of 0.5 to 1.5 x the target {KLTarget(target, per)}"


def show_samples(before: Evaluation, after: Evaluation, prompts: Sequence[Prompt], seed: int, screen: Screen) -> None:
    """Print a table of completions before and after training, for some randomly drawn evaluation prompts: the first
    completion of each."""
    drawn = shown_prompts(len(prompts), seed)
    rows = [[prompts[i].example.messages[-1]["content"], _sample(before, i), _sample(after, i)] for i in drawn]
    screen.table(f"{len(drawn)} random evaluation prompts", ["prompt", "before", "after"], rows)


def _sample(evaluation: Evaluation, prompt: int) -> str:
    """Return the first completion of a prompt, with its ratings."""
    gold = {} if evaluation.gold is None else {"gold quality": evaluation.gold}
    rated = {"score": evaluation.scores, **gold, **evaluation.judged}
    cells = [f"{name} {'none' if np.isnan(of[prompt, 0]) else f'{of[prompt, 0]:.2f}'}" for name, of in rated.items()]
    return f"{evaluation.texts[prompt][0]}\n[{', '.join(cells)}]"


def finish_run(config: Config, trainer: OnPolicyLoop, log: RunLog, screen: Screen) -> None:
    """Compare the model before and after training, save it, print the results and write them to run.json."""
    evaluations = trainer.evaluations
    text = trainer.evaluator.text
    target = config.kl.targets[-1]
    history = trainer.host.state.log_history
    phases = kl_controller(config, trainer.sampler.updates).phases
    figures = results_of(evaluations, config.run.seed) | {
        "kl_last_10_updates": last_kl(history, target),
        "kl_target": target.nats if config.kl.steered else None,
        "kl_unit": f"nats/{target.per}",
        "kl_phases": kl_of_phases(history, phases),
        "perplexity_text": text and text.source,
        "peak_memory_gib": trainer.progress.peak_memory / 2**30,
        "seconds": log.seconds(),
        "cpu_seconds": log.cpu_seconds(),
    }
    spent = Spent(
        updates=trainer.updates,
        episodes=trainer.episodes,
        optimizer_steps=trainer.progress.optimizer_steps,
        completion_tokens=trainer.progress.completion_tokens,
        resampled_episodes=trainer.progress.resampled_episodes,
    )
    with timed("final save"):
        update_dir_atomically(log.folder, trainer.save_model, log.check_place)
    log.add(figures=figures, spent=spent)
    if evaluations:
        show_samples(evaluations[0], evaluations[-1], trainer.evaluation_prompts, config.run.seed, screen)
    logged = sum(target.metric in entry for entry in history)
    show_figures(figures, min(LAST_UPDATES, logged), screen)
    spent = {part: sum(each) for part, each in trainer.progress.seconds.items()}
    times = trainer.progress.predicted | {"time": spent}
    screen.facts([(name, parts_text(parts)) for name, parts in times.items()])
    show_time(log.time(), screen)
    if config.reward.control != "none":
        screen.say(f"{config.title}: {CONTROL_MEANS}, so the reward did not cause these changes")


def show_time(seconds: Mapping[str, float], screen: Screen) -> None:
    """Print how the time of a command divides among its parts."""
    whole = sum(seconds.values())
    longest = [(part, passed) for part, passed in sorted(seconds.items()) if passed >= 0.05]
    rows = [[part, f"{passed:.1f}", f"{passed / whole:.1%}"] for part, passed in longest]
    screen.say("where the time went:")
    screen.columns([["", "seconds", "share"], *rows, ["together", f"{whole:.1f}", ""]])


def show_where(config: Config, run: RunRecord, screen: Screen) -> None:
    """Print the saved files of a finished run and the next commands."""
    output = config.run.output
    results.setdefault("runs", {})[output] = run.as_json()
    best = run.best
    merged = run.merged
    code = code_words(values_in(config))
    played = code_words({"environment": config.environment.environment})
    asked = code if best is not None else ["--prompts", "FILE.jsonl", *code]
    loader = "peft.AutoPeftModelForCausalLM" if config.model.use_lora else "transformers.AutoModelForCausalLM"
    whole = f"{output}/{MERGED_FOLDER}"
    load_whole = f"transformers.AutoModelForCausalLM.from_pretrained({whole!r})"
    evaluated = []
    if best is not None:
        best_model = f"the model after update {best.update}"
        if best.update == 0:
            best_model = "the start model, because no later evaluation is better"
        evaluated = [(f"{output}/{BEST_FOLDER}", f"{best_model}: {best.why}")]
    screen.say("saved:")
    screen.facts(
        [
            (output, f"final model and tokenizer; load with {loader}.from_pretrained({output!r})"),
            *evaluated,
            *([(whole, f"the {merged.which} weights with merged adapter; load with {load_whole}")] if merged else []),
            (f"{output}/README.md", "model card: results, settings, and code to load the model"),
            (f"{output}/samples", "completions of every evaluation with their scores"),
            (f"{output}/run.json", "settings, versions, results"),
        ]
    )
    tokens = script_command("evaluate", "--tokens", output)
    screen.say("next:")
    screen.facts(
        [
            ("evaluate the model", script_command("evaluate", "--model-path", output, *asked)),
            *([("view recorded tokens", tokens)] if config.record.record_tokens else []),
            ("plot the training curves", script_command("plot", output)),
            ("open TensorBoard", command("tensorboard", "--logdir", f"{output}/logs")),
            ("compare; add other runs after this one", script_command("compare", output, *asked)),
            ("chat with the model", script_command("evaluate", "--chat", "--model-path", output, *played)),
        ]
    )
