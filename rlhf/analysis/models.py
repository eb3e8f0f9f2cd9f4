"""Finds the models to evaluate: runs, checkpoints, model folders, hub names. Imports no torch."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlhf.analysis.groups import settings_compared
from rlhf.checkpoints.manifest import update_number
from rlhf.checkpoints.model_folder import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    WEIGHTS_FILE,
    find_base,
    find_model,
    find_recorded,
)
from rlhf.checkpoints.run_folder import BEST_FOLDER, MERGED_FOLDER, PROMPTS_FOLDER, present_status
from rlhf.checkpoints.run_record import RUN_FILE, RunRecord, differences, last_run
from rlhf.config import config_of_run, make_config
from rlhf.settings.evaluation import MeasureSettings
from rlhf.settings.fields import flag_of
from rlhf.settings.next_commands import CODE, code_in, code_words, names_code, resume_command
from rlhf.settings.training import Config
from rlhf.settings.types import IN_PYTHON
from rlhf.utils.command_lines import command
from rlhf.utils.errors import Problem, UserError, raise_if
from rlhf.utils.paths import is_gguf, is_path, local_path, missing_path, path_on_page

# settings that describe a run's own data, and their values for --prompts
OF_THE_FILE = {
    **dict.fromkeys(("eval_dataset", "split", "dataset_config", "dataset_split", "skip_bad_rows")),
    "columns": (),
}
# settings of a run that decide its completions and scores
MEASURED_WITH = (
    *("actor_model", "rm_model", "rm_text", "reward_func", "reward_weights", "eval_func", "keywords", "plain_prompts"),
    *("chat_template_kwargs", "prompts", *OF_THE_FILE, "prompt_length", "eval_text", "few_shot"),
    *("max_new_tokens", "temperature", "top_k", "top_p", "stop"),
    *("environment", "max_turns", "max_observation_tokens", "max_episode_tokens"),
)


@dataclass(frozen=True)
class ModelRef:
    """A model on this disk or on the hub."""

    name: str  # as the user wrote it
    source: str  # a folder, or a hub name
    base: str | None = None  # base model of an adapter
    run: RunRecord | None = None  # the run that it belongs to
    which: str = ""  # "final", "best", either of them with ", merged", a checkpoint's name, or "" without a run
    update: int | None = None  # update after which these weights were saved
    shown: str = ""  # its name in tables and on pages; empty: that of `path_on_page`

    @property
    def run_folder(self) -> Path:
        """The folder of the run that it belongs to."""
        source = Path(self.source)
        return source if (source / RUN_FILE).is_file() else source.parent

    @property
    def label(self) -> str:
        """The model's name in tables, with its weights."""
        return self.short if self.run is None else f"{self.short} ({self.which}, after update {self.update})"

    @property
    def short(self) -> str:
        """The model's name in tables."""
        return self.shown or path_on_page(self.name)


def find_models(names: Sequence[str], measure: MeasureSettings, flag: str) -> list[ModelRef]:
    """Return the named models, or the last run in this folder. Raises UserError with all models that do not exist."""
    names = names or [str(last_run(flag))]
    twice = sorted({name for name in names if names.count(name) > 1})
    found = []
    problems = [Problem("given twice", f"{flag} {name}", "Give each model once") for name in twice]
    for name in dict.fromkeys(names):
        try:
            found.append(find_model_ref(name, measure.which, measure.baseline, flag))
        except UserError as error:
            problems += error.problems
    raise_if(problems)
    shown = [model.short for model in found]
    return [replace(model, shown=model.name) if shown.count(model.short) > 1 else model for model in found]


def find_model_ref(name: str, which: str, baseline: str | None, flag: str = "--model-path") -> ModelRef:
    """Return the model of a run folder, a folder inside a run, a model or adapter folder, or a hub name.

    `baseline` replaces an adapter's base model that no longer exists or is not the one that its run recorded. Raises
    UserError if there is nothing to load.
    """
    folder = Path(local_path(name))
    if not folder.is_dir():
        if is_path(name) and not is_gguf(name):
            raise missing_path(name, "model", f"{flag} takes a run folder, a model folder, a GGUF file or a hub name")
        return ModelRef(name, find_model(name, flag))
    run = RunRecord.read(folder)
    inside = folder.resolve()
    if run is not None:
        folder = folder / BEST_FOLDER if which == "best" else folder
    elif inside.name in (BEST_FOLDER, MERGED_FOLDER) or update_number(inside.name) is not None:
        run = RunRecord.read(inside.parent)
        which = inside.name
        folder = inside
    if run is None or (which == MERGED_FOLDER and run.merged is None):
        return ModelRef(name, *_weights(folder, baseline, flag))
    if which == "best":
        if run.best is None:
            raise UserError("no best checkpoint yet", f"{flag} {name}", "The run has not made its first evaluation")
        update = run.best.update
    elif which == MERGED_FOLDER:
        which = f"{run.merged.which}, merged"
        update = run.merged.update
    elif which == "final":
        if not any((folder / file).is_file() for file in (WEIGHTS_FILE, ADAPTER_FILE)):
            status = present_status(folder, run.status)
            resume = f"Resume it ({resume_command(config_of_run(run, output=name))})"
            fix = "Wait for its end" if status == "running" else resume
            best = "" if run.best is None else ", or add --which best, the best checkpoint so far"
            raise UserError(f"no final weights because the run is {status}", f"{flag} {name}", fix + best)
        # while a finished run is being extended, its final weights are old, but its plan is already the new one
        update = (run.spent or run.plan).updates
    else:
        update = update_number(which)
    return ModelRef(name, *_weights(folder, baseline, flag, run), run, which, update)


def equal_to_start(models: Sequence[ModelRef]) -> list[str]:
    """Return one sentence per model that has the weights with which its run started."""
    return [
        f"{model.label} has the weights of the run's start model, because no later evaluation was better"
        for model in models
        if model.update == 0
    ]


def _weights(folder: Path, baseline: str | None, flag: str, run: RunRecord | None = None) -> tuple[str, str | None]:
    """Return the folder to load weights from, and the base model if they are an adapter. `run` trained them."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return find_model(str(folder), flag), None
    try:
        return str(folder), find_base(folder, flag, "Give it with --baseline FOLDER", run)
    except UserError:
        if baseline is None:
            raise
        return str(folder), find_model(baseline, "--baseline")


def shared_settings(models: Sequence[ModelRef], measure: MeasureSettings) -> Config:
    """Return the settings with which all `models` are evaluated: those of their runs, overridden by the command line.

    Raises UserError if runs differ in settings that decide completions or scores and no flag overrides them.
    """
    replacing = (*MEASURED_WITH, "rollout_engine")
    given = {name: value for name, value in vars(measure).items() if name in replacing and value is not None}
    if measure.prompts is not None:
        given = OF_THE_FILE | given
    if measure.eval_func is None:
        given["eval_func"] = common_eval_functions(models) or ()
    if measure.baseline is not None:
        given["actor_model"] = measure.baseline
    runs = [m for m in models if m.run is not None]
    if not runs:
        bases = list(dict.fromkeys(m.base for m in models if m.base is not None))
        if len(bases) > 1 and measure.baseline is None:
            what = "the adapters have different base models, so there is no common start model"
            raise UserError(what, ", ".join(bases), "Choose one with --baseline FOLDER")
        return make_config(measure.like, **{**({"actor_model": bases[0]} if bases else {}), **given})
    _check_same_settings(runs, given)
    if measure.prompts is None and runs[0].run.flat_settings.get("prompts") == IN_PYTHON:
        folder = str(runs[0].run_folder / PROMPTS_FOLDER)
        given |= OF_THE_FILE | {"prompts": folder, "dataset_split": "test", "split": "0/0/100"}
    return config_of_run(runs[0].run, **given)


def _check_same_settings(runs: Sequence[ModelRef], given: Container[str]) -> None:
    """Raises UserError if runs differ in settings that decide completions or scores and are not `given`, or in
    evaluation prompts that were given in Python."""
    first = runs[0]
    problems = {}
    here = first.run.flat_settings
    for other in runs[1:]:
        there = other.run.flat_settings
        by_value = differences(first.run.settings, other.run.settings, given)
        by_code = differences(settings_compared(first.run), settings_compared(other.run))
        for name in set(MEASURED_WITH).intersection(by_value, by_code):
            flag = "baseline" if name == "actor_model" else name
            fix = (
                f"Set it with {flag_of(flag)}"
                if hasattr(MeasureSettings, flag)
                else "Give only runs with the same value"
            )
            values = f"{here.get(name)} in {first.name}, {there.get(name)} in {other.name}"
            problems[name] = Problem(f"the runs differ in {name}", values, fix)
            if name in ("prompts", *OF_THE_FILE) and name != "split":  # another setting of one run does not help
                raise UserError(
                    f"the runs have different data ({name}) and cannot be compared on it",
                    values,
                    "Give only runs of one task, or evaluation prompts for all of them with --prompts",
                )
        in_python = "prompts" not in given and here.get("prompts") == there.get("prompts") == IN_PYTHON
        if in_python and first.run.data.get("evaluation_sha256") != other.run.data.get("evaluation_sha256"):
            problems["prompts"] = Problem(
                "the runs have different evaluation prompts, which were given in Python",
                f"{first.name}, {other.name}",
                "Set them with --prompts",
            )
    raise_if([problems[name] for name in sorted(problems)])


def common_eval_functions(models: Sequence[ModelRef]) -> tuple[str, ...] | None:
    """Return the evaluation functions that all runs were trained with; None if they differ."""
    functions = {tuple(m.run.flat_settings.get("eval_func") or ()) for m in models if m.run is not None}
    return None if len(functions) > 1 else next(iter(functions), ())


def require_trusted_code(models: Sequence[ModelRef], measure: MeasureSettings, settings: Sequence[str] = CODE) -> None:
    """Raises UserError if these settings of a run name code that the command line neither replaces nor trusts."""
    if measure.trust_reward_code:
        return
    problems = []
    for model in models:
        stored = model.run.flat_settings if model.run else {}
        used = stored | {"eval_func": common_eval_functions(models) if model.run else ()}
        used = {name: used.get(name) for name in settings if getattr(measure, name) is None}
        code = dict.fromkeys(rule for rules in code_in(used).values() for rule in names_code(rules))
        if code:
            words = command(*code_words(used))
            problems.append(
                Problem(
                    f"reward code from the run's {RUN_FILE} is not executed without permission",
                    f"{model.name}, {', '.join(code)}",
                    f"Add {words}, or --trust-reward-code if you trust these files",
                )
            )
    raise_if(problems)


def has_start(models: Sequence[ModelRef], measure: MeasureSettings) -> bool:
    """True if there is a start model: --baseline, the one of a run, or the base model of an adapter."""
    return measure.baseline is not None or any(m.run is not None or m.base is not None for m in models)


def episodes_of(model: ModelRef) -> int:
    """Return the number of episodes after which these weights of a run were saved.

    With dynamic sampling it is known for evaluated weights, such as the final and the best ones. For others it is the
    number without the additional episodes.
    """
    run = model.run
    plan = model.run.plan
    known = run.best.evaluations if run.best and run.flat_settings.get("dynamic_sampling") else []
    evaluated = {e["update"]: e["episodes"] for e in known}
    return evaluated.get(model.update, model.update * plan.episodes // plan.updates)


def in_4_bit(model: ModelRef) -> bool:
    """True for an adapter whose run had its base model in 4 bits. Merged weights are in full precision."""
    return model.run is not None and model.base is not None and config_of_run(model.run).model.load_in_4bit


def find_start(config: Config, models: Sequence[ModelRef], measure: MeasureSettings) -> ModelRef | None:
    """Return the start model of the settings, or None if there is none. Raises UserError if it does not exist.

    Without --baseline it must be the model that all runs recorded: a KL to another model would be a wrong number. The
    model of --baseline is the user's choice.
    """
    if not has_start(models, measure):
        return None
    name = config.model.actor_model
    runs = [model.run for model in models if model.run is not None and measure.baseline is None]
    found = {find_recorded(run, "start_model", name, "--baseline") for run in runs} or {find_model(name, "--baseline")}
    if len(found) > 1:
        raise UserError("the runs started from different models", name, "Choose one with --baseline FOLDER")
    return ModelRef(name, found.pop())
