"""The models to evaluate: runs, checkpoints, folders and hub names; and the judge."""

from __future__ import annotations

import filecmp
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.checkpoints.manifest import update_number
from rlhf.checkpoints.run_folder import BEST_FOLDER, MERGED_FOLDER
from rlhf.checkpoints.run_record import RUN_FILE, RunRecord, differences, last_run
from rlhf.config import config_of_run, make_config
from rlhf.demo.parts import gold_of
from rlhf.models.device import autocast_dtype
from rlhf.models.load import ADAPTER_CONFIG, base_of_adapter, find_model, load_adapter, load_policy
from rlhf.models.save import ADAPTER_FILE, WEIGHTS_FILE
from rlhf.rewards.functions import LearnedReward
from rlhf.rewards.reward_model import RewardModel
from rlhf.rewards.rewards import Rewards
from rlhf.settings.evaluation import MeasureSettings
from rlhf.settings.next_commands import code_words, names_code
from rlhf.settings.training import Config
from rlhf.utils.errors import UserError, raise_if
from rlhf.utils.paths import is_path, missing_path
from rlhf.utils.system import command

# of a run's settings, those that decide what its replies and scores are
MEASURED_WITH = (
    *("actor_model", "rm_model", "reward_func", "reward_weights", "keywords", "plain_prompts"),
    *("prompts", "split", "prompt_length", "eval_text", "max_new_tokens", "temperature", "top_k", "top_p"),
)


@dataclass(frozen=True)
class ModelRef:
    """A model that is on this disk, or on the hub."""

    name: str  # as the user wrote it
    source: str  # a folder, or a hub name
    base: str | None = None  # what an adapter was trained on
    run: RunRecord | None = None  # of which it is a model
    which: str = ""  # "final", "best", either of them merged, a checkpoint's name, or "" where it is not of a run
    update: int | None = None  # after which update these weights were kept

    @property
    def label(self) -> str:
        """In words, for tables: which weights of what."""
        if self.run is None:
            return self.name
        return f"{self.name} ({self.which}, after update {self.update})"


def find_models(names: Sequence[str], measure: MeasureSettings, flag: str) -> list[ModelRef]:
    """The models that were named; none: the last run's here. Raises UserError with all that are not there."""
    names = names or [str(last_run(flag))]
    twice = sorted({name for name in names if names.count(name) > 1})
    found, problems = [], [f"named twice: {flag} {name}. Name each once" for name in twice]
    for name in dict.fromkeys(names):
        try:
            found.append(find_model_ref(name, measure.which, measure.baseline, flag))
        except UserError as error:
            problems += error.problems
    raise_if(problems)
    return found


def find_model_ref(name: str, which: str, baseline: str | None, flag: str = "--model-path") -> ModelRef:
    """A run's folder, a folder inside one, a model's or an adapter's folder, or a hub name.

    `baseline` takes the place of an adapter's base that is gone. Raises UserError where there is nothing to load.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if is_path(name):
            raise missing_path(name, "model", f"{flag} takes a run's folder, a model's folder or a hub name")
        return ModelRef(name, find_model(name, flag))
    run = RunRecord.read(folder)
    if run is not None:
        return _of_run(name, folder, run, which, baseline, flag)
    whole, inner = folder.resolve().parent, folder.resolve().name
    if inner == BEST_FOLDER and (outer := RunRecord.read(whole)) is not None:
        return _of_run(name, whole, outer, "best", baseline, flag)
    if inner == MERGED_FOLDER and (outer := RunRecord.read(whole)) is not None and outer.merged is not None:
        which, kept = f"{outer.merged.which}, merged", outer.merged.update
        return ModelRef(name, *_weights(folder, baseline, flag), outer, which, kept)
    update = update_number(inner)
    if update is not None and (outer := RunRecord.read(whole)) is not None:
        return ModelRef(name, *_weights(folder, baseline, flag), outer, inner, update)
    return ModelRef(name, *_weights(folder, baseline, flag))


def _of_run(name: str, folder: Path, run: RunRecord, which: str, baseline: str | None, flag: str) -> ModelRef:
    if which == "best":
        if run.best is None:
            raise UserError(f"no best checkpoint yet: {flag} {name}. Wait for the run's first evaluation")
        return ModelRef(name, *_weights(folder / BEST_FOLDER, baseline, flag), run, which, run.best.update)
    if not any((folder / file).is_file() for file in (WEIGHTS_FILE, ADAPTER_FILE)):
        raise UserError(f"no final weights, the run is {run.status}: {flag} {name}. Add --which best")
    return ModelRef(name, *_weights(folder, baseline, flag), run, which, updates_of(run))


def updates_of(run: RunRecord) -> int:
    """The update after which a run's final weights were saved. A run that is being extended has the weights of its
    first end, and the plan of its second."""
    return (run.spent or run.plan).updates


def _weights(folder: Path, baseline: str | None, flag: str) -> tuple[str, str | None]:
    """Where to load a folder's weights from, and the base under them where they are an adapter's."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return find_model(str(folder), flag), None
    base = base_of_adapter(folder)
    try:
        return str(folder), find_model(base or "nothing", flag)
    except UserError:
        if baseline is None:
            raise UserError(
                f"the adapter's base is gone ({base}): {flag} {folder}. Name it with --baseline FOLDER"
            ) from None
        return str(folder), find_model(baseline, "--baseline")


def shared_settings(models: Sequence[ModelRef], measure: MeasureSettings) -> Config:
    """The settings with which all `models` are measured: their runs', where the command line does not say otherwise.

    Raises UserError where runs differ in what decides replies or scores, and no flag decides between them.
    """
    given = {name: value for name, value in vars(measure).items() if name in MEASURED_WITH and value is not None}
    if measure.baseline is not None:
        given["actor_model"] = measure.baseline
    runs = [(m.name, m.run) for m in models if m.run is not None]
    if not runs:
        bases = [{"actor_model": m.base} for m in models if m.base is not None]
        return make_config(measure.like, **{**(bases[0] if bases else {}), **given})
    first, run = runs[0]
    here, problems = run.flat_settings, {}
    for where, other in runs[1:]:
        there = other.flat_settings
        for name in differences(run.settings, other.settings, given):
            if name in MEASURED_WITH:
                problems[name] = (
                    f"{name} is {here.get(name)} in {first} and {there.get(name)} in {where}: the runs' settings. "
                    + _way_out(name)
                )
    raise_if(list(problems.values()))
    return config_of_run(run, **given)


def require_trusted_code(models: Sequence[ModelRef], measure: MeasureSettings) -> None:
    """Raise UserError if a run's settings name reward code, and the command line neither names reward functions nor
    trusts the run's."""
    if measure.reward_func is not None or measure.trust_reward_code:
        return
    problems = []
    for model in models:
        code = names_code(model.run.flat_settings.get("reward_func") or ()) if model.run else []
        if code:
            rules = command(*code_words(model.run.flat_settings["reward_func"]))
            problems.append(
                f"reward code that the run's {RUN_FILE} names is not run: {model.name}, {', '.join(code)}. Add {rules}"
                ", or, if you trust the files, --trust-reward-code"
            )
    raise_if(problems)


def has_start(models: Sequence[ModelRef], measure: MeasureSettings) -> bool:
    """Whether a start model is known: named, a run's own, or under an adapter."""
    return measure.baseline is not None or any(m.run is not None or m.base is not None for m in models)


def episodes_of(model: ModelRef) -> int:
    """The episodes after which a run's weights were kept."""
    plan = model.run.plan
    return model.update * plan.episodes // plan.updates


def in_4_bit(model: ModelRef) -> bool:
    """Whether its run kept the frozen weights in 4 bits, under this adapter. What was merged is in full precision."""
    return model.run is not None and model.base is not None and config_of_run(model.run).model.load_in_4bit


def _way_out(name: str) -> str:
    flag = "baseline" if name == "actor_model" else name
    known = flag in {f.name for f in fields(MeasureSettings)}
    return f"Decide with --{flag.replace('_', '-')}" if known else "Measure one of them at a time"


def load_model_ref(
    model: ModelRef,
    tokenizer: PreTrainedTokenizerBase,
    load_in_4bit: bool,
    dtype: torch.dtype | None,
    device: torch.device,
) -> PreTrainedModel:
    """To sample from and to measure; an adapter over its base, whose weights are in 4 bits if `load_in_4bit`."""
    policy = load_policy(
        model.base or model.source,
        load_in_4bit=load_in_4bit,
        dtype=dtype,
        device=device,
        vocabulary=len(tokenizer) if model.base is None else 0,
    )
    return (load_adapter(policy, model.source) if model.base is not None else policy).eval()


def find_start(config: Config) -> ModelRef:
    """The start model that the settings name. Raises UserError where it is not there."""
    name = config.model.actor_model
    return ModelRef(name, find_model(name, "--baseline"))


def find_judge(config: Config, models: Sequence[ModelRef], settings: MeasureSettings) -> str | None:
    """The folder of the reward model that judges. Raises UserError where training saw it, or it is the scorer."""
    if settings.judge_model is None:
        return None
    folder = find_model(settings.judge_model, "--judge-model")
    trained_on = {m.name: config_of_run(m.run).model.rm_model for m in models if m.run is not None}
    for where, name in {"the scores": config.model.rm_model, **trained_on}.items():
        if name is not None and _same_weights(Path(name).expanduser(), Path(folder)):
            raise UserError(
                f"the judge is the reward model of {where}: --judge-model {settings.judge_model}. "
                "Name one that no training saw"
            )
    return folder


def _same_weights(one: Path, other: Path) -> bool:
    """The same folder, or a copy of its weights."""
    files = [folder / WEIGHTS_FILE for folder in (one, other)]
    if one.resolve() == other.resolve() or not all(file.is_file() for file in files):
        return one.resolve() == other.resolve()
    return filecmp.cmp(*files, shallow=False)


def load_judge(
    config: Config,
    folder: str | None,
    settings: MeasureSettings,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> tuple[str | None, Rewards | None]:
    """Its name and itself: a reward model, else the demo's gold quality, else none."""
    gold = gold_of(config)
    if folder is not None:
        model = RewardModel.load(folder, device, autocast_dtype(config.model.bf16, device), "--judge-model")
        judge = LearnedReward(model)
        judge.__name__ = "judge"
        return f"judge {settings.judge_model}", Rewards([judge], None, tokenizer)
    if gold is None:
        return None, None

    def gold_quality(prompts: Sequence[str], completions: Sequence[str], *, ended: Sequence[bool], **_) -> list[float]:
        return [gold(*row) for row in zip(prompts, completions, ended, strict=True)]

    return "gold quality", Rewards([gold_quality], None, tokenizer)
