"""The settings of the commands that evaluate, compare, plot and export. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.settings.fields import same_as, setting
from rlhf.settings.flags import CommandLine
from rlhf.settings.merge import Command, build, read_command
from rlhf.settings.recipes import DEFAULT_RECIPE, shipped_recipes
from rlhf.settings.training import (
    LARGEST_SEED,
    DataSettings,
    EnvironmentSettings,
    ModelSettings,
    RewardSettings,
    SamplingSettings,
)
from rlhf.settings.types import ArmName, PathName, Renaming, Split, StopText
from rlhf.utils.errors import Problem

OF_RUN = "as in the run, or the default for --prompts"  # settings that describe the data
HELD_OUT_PROMPTS = 20  # drawn by default
HELD_OUT_PROMPTS_TO_COMPARE = 128
MEASURED = ("!chat", "!tokens")  # needs of the settings that only an evaluation or a comparison reads
OF_PROMPTS = ("prompts", *MEASURED)  # and of those that describe --prompts: a run's own data is read as in the run
# declares a setting of a run again: unset, it is as in the run
as_in_run = partial(same_as, default=None, unset="as in the run", brief=False, needs=MEASURED)
# the same for what `none` unsets: it gives another value than None, which is "as in the run"
or_none = partial(as_in_run, none="none")
functions_or_none = partial(as_in_run, none=())


@dataclass(frozen=True)
class MeasureSettings:
    """Measurement; unset settings are those of the runs, or of the recipe in --like"""

    which: str = setting(
        "final",
        "weights of a run to use: the final ones, or the best checkpoint",
        choices=("final", "best"),
        brief=True,
        needs="!tokens",
    )
    baseline: PathName | None = setting(
        None,
        "start model to compare with: a folder or a hub name; unset: the start model of the runs",
        brief="start model to compare with; unset: that of the runs",
        needs="!tokens",
    )
    judge_model: PathName | None = setting(
        None,
        "second reward model, not used in training, that also scores the completions; unset: gold quality in the "
        "demo; none: not that either",
        brief="second reward model, not used in training",
        needs=MEASURED,
        none="none",
    )
    num_prompts: int | None = setting(
        None,
        "number of evaluation prompts, drawn at random; unset: every row of --prompts, or held-out prompts of the "
        "runs (20 to evaluate, 128 to compare)",
        ge=1,
        brief="prompts to draw; unset: all of --prompts, or held-out prompts: 20, or 128 to compare",
        needs=MEASURED,
    )
    completions: int = setting(
        4,
        "completions sampled for each prompt",
        ge=1,
        aliases=("num_completions",),
        brief="completions per prompt",
        needs=MEASURED,
    )
    seed: int = setting(
        42,
        "random seed of the choice of prompts, the sampling and the confidence intervals",
        brief="random seed",
        ge=0,
        le=LARGEST_SEED,
        needs="!tokens",
    )
    like: str = setting(
        DEFAULT_RECIPE,
        "recipe whose settings are used for models that are not run folders",
        choices=shipped_recipes(),
        needs="!tokens",
    )
    rm_model: PathName | None = or_none(
        ModelSettings,
        "rm_model",
        help="reward model: a folder or a hub name",
        brief="reward model; unset: as in the run",
    )
    rm_text: str | None = or_none(ModelSettings, "rm_text")
    prompts: PathName | None = as_in_run(
        DataSettings,
        "prompts",
        help="file or hub dataset of which every row is an evaluation prompt, or, with --split, its evaluation part",
        unset="held-out prompts of the run",
        brief="evaluation prompts, all rows; unset: held-out prompts of the run",
    )
    split: Split | None = or_none(DataSettings, "split", unset="as in the run, or no split of --prompts")
    dataset_config: str | None = as_in_run(DataSettings, "dataset_config", unset=OF_RUN, needs=OF_PROMPTS)
    dataset_split: str | None = as_in_run(DataSettings, "dataset_split", unset=OF_RUN, needs=OF_PROMPTS)
    columns: tuple[Renaming, ...] | None = as_in_run(DataSettings, "columns", unset=OF_RUN, needs=OF_PROMPTS)
    skip_bad_rows: float | None = as_in_run(DataSettings, "skip_bad_rows", unset=OF_RUN, needs=OF_PROMPTS)
    prompt_length: int | None = as_in_run(DataSettings, "prompt_length")
    eval_text: PathName | None = or_none(DataSettings, "eval_text")
    max_new_tokens: int | None = as_in_run(SamplingSettings, "max_new_tokens", needs="!tokens")
    temperature: float | None = as_in_run(
        SamplingSettings, "temperature", brief="sampling temperature; unset: as in the run", needs="!tokens"
    )
    top_k: int | None = as_in_run(SamplingSettings, "top_k", needs="!tokens")
    top_p: float | None = as_in_run(SamplingSettings, "top_p", needs="!tokens")
    stop: tuple[StopText, ...] | None = or_none(SamplingSettings, "stop", needs="!tokens")
    reward_func: tuple[str, ...] | None = functions_or_none(
        RewardSettings,
        "reward_func",
        help="reward functions: a built-in name, trl:NAME, or FILE.py:NAME, which executes that file",
        brief="reward functions; unset: as in the run",
    )
    reward_weights: tuple[float, ...] | None = or_none(RewardSettings, "reward_weights")
    eval_func: tuple[str, ...] | None = functions_or_none(
        RewardSettings,
        "eval_func",
        help="evaluation functions, which judge the completions as a judge model does; values of 0 and 1 give pass@k. "
        "The same names and signature as --reward-func, for example exact_match, which compares with the column "
        "answer",
        unset="those of the runs, if all have the same ones",
        brief="evaluation functions as judges; unset: those of the runs",
    )
    environment: str | None = or_none(EnvironmentSettings, "environment", needs="!tokens")
    max_turns: int | None = as_in_run(EnvironmentSettings, "max_turns", needs="!tokens")
    rollout_engine: str | None = setting(
        None,
        "how completions are sampled: graph (with CUDA graphs), slots (without them, if they fail), plain, or auto: "
        "graph on a GPU, slots on a CPU; unset: as in the run",
        choices=("auto", "plain", "slots", "graph"),
        needs="!tokens",
    )
    trust_reward_code: bool = setting(
        False,
        "allow to execute the Python files of reward and evaluation functions, and of an environment, that are listed "
        "in a run's run.json",
        needs="!tokens",
    )

    @property
    def chosen_prompts(self) -> tuple:
        """The settings that choose other evaluation prompts than those of the runs; empty if none is given."""
        return tuple(filter(None, (self.prompts, self.split, self.prompt_length)))


@dataclass(frozen=True)
class EvaluationSettings:
    """Evaluation"""

    model_path: tuple[PathName, ...] = setting(
        (),
        "run folders, model or adapter folders, or hub names; unset: the last run in this folder",
        aliases=("model",),
        brief="runs, models or adapters; unset: the last run in this folder",
        needs="!tokens",
    )
    output: PathName = setting(
        "./evaluation_output",
        "folder for the report (HTML and JSON)",
        aliases=("output_dir",),
        brief=True,
        needs="!chat",
    )
    tokens: PathName | None = setting(
        None,
        "make a page of the recorded tokens of this run (trained with --record-tokens), instead of an evaluation",
        brief="make a page of the recorded tokens of this run",
    )
    chat: bool = setting(
        False,
        "chat with the model in the terminal, instead of an evaluation",
        brief="chat with the model",
        needs="!tokens",
    )


@dataclass(frozen=True)
class EvaluationConfig(Command):
    """All settings of `evaluate_generations.py`."""

    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    measure: MeasureSettings = field(default_factory=MeasureSettings)

    def validate(self) -> list[Problem]:
        models = len(self.evaluation.model_path)
        if self.evaluation.chat and models > 1:
            return [Problem(f"--chat takes one model, not {models}", "--model-path", "Give one")]
        return []


@dataclass(frozen=True)
class ComparisonSettings:
    """Comparison"""

    runs: tuple[PathName, ...] = setting(
        (),
        "run folders; those with the same settings except for the seed form a group",
        brief="run folders; equal settings, except for the seed, form a group",
        positional=True,
    )
    arm: tuple[ArmName, ...] = setting(
        (),
        "more arms: NAME=MODEL for a run folder, a model or adapter folder, a GGUF file or a hub name; models with "
        "one name are seeds of one arm; and the baselines start and best-of-N",
        aliases=("arms",),
        brief="more arms: NAME=MODEL, start, best-of-N",
    )
    few_shot: PathName | None = setting(
        None,
        "file with worked examples (prompt, and chosen, completion or answer), which the start model gets before each "
        "prompt in one more row of the table, if the judge (or the score) is a checker",
    )
    limit_minutes: float = setting(
        2.0,
        "minutes for sampling the start model; the samples give best-of-n, are stored in --output and used again; 0: "
        "no sampling",
        ge=0,
    )
    full: bool = setting(False, "print all tables of the page, and a sentence for each pair and each arm", brief=True)
    output: PathName = setting(
        "./comparison_output", "folder for the reports and the plots", aliases=("output_dir",), brief=True
    )


@dataclass(frozen=True)
class ComparisonConfig(Command):
    """All settings of `compare_runs.py`."""

    comparison: ComparisonSettings = field(default_factory=ComparisonSettings)
    measure: MeasureSettings = field(default_factory=MeasureSettings)

    def validate(self) -> list[Problem]:
        given = self.comparison.runs or any(arm.model for arm in self.comparison.arm)
        return (
            []
            if given
            else [Problem("no model given", "command line", "Give run folders, or models with --arm NAME=MODEL")]
        )


@dataclass(frozen=True)
class PlotSettings:
    """Plot"""

    runs: tuple[PathName, ...] = setting(
        (),
        "run folders; none: the last run in this folder",
        brief="run folders; none: the last run in this folder",
        positional=True,
    )
    arm: tuple[ArmName, ...] = setting(
        (),
        "more run folders, NAME=RUN; those with one name are one group, which has this name",
        aliases=("arms",),
        brief="more run folders, with the name of their group: NAME=RUN",
    )
    x: str = setting("updates", "unit of the horizontal axis", brief=True, choices=("updates", "episodes", "time"))
    smooth: int = setting(10, "length of the moving average (thick lines), in updates", ge=1, brief=True)
    output: PathName = setting("./training_progress", "name of the files to write, without .png and .csv", brief=True)


@dataclass(frozen=True)
class PlotConfig(Command):
    """All settings of `plot_training_progress.py`."""

    plot: PlotSettings = field(default_factory=PlotSettings)

    def validate(self) -> list[Problem]:
        return [
            Problem("a baseline has no curve", f"--arm {arm}", "Give NAME=RUN")
            for arm in self.plot.arm
            if not arm.model
        ]


@dataclass(frozen=True)
class FormatSettings:
    """Export"""

    run: tuple[PathName, ...] = setting((), "folder of a run", brief=True, positional=True)
    to: str = setting(
        "gguf",
        "format: gguf (a model file for llama.cpp and Ollama), or verl (the run's prompts, rewards and settings)",
        choices=("gguf", "verl"),
        brief=True,
    )
    output: PathName | None = setting(
        None,
        "new folder for the files",
        unset="RUN/gguf, or RUN/verl",
        brief="new folder; unset: RUN/gguf, or RUN/verl",
        aliases=("output_dir",),
    )
    type: str = setting(
        "f16",
        "number format of the weights: f16 (16 bits), or q8_0 (8 bits)",
        choices=("f16", "q8_0"),
        brief=True,
        needs="to=gguf",
    )
    which: str = same_as(MeasureSettings, "which", aliases=("from",), needs="to=gguf")
    baseline: PathName | None = same_as(
        MeasureSettings,
        "baseline",
        help="base model of the run's adapter, if the recorded one no longer exists",
        brief=False,
        needs="to=gguf",
    )


@dataclass(frozen=True)
class ExportConfig(Command):
    """All settings of `export_model.py`."""

    export: FormatSettings = field(default_factory=FormatSettings)

    def validate(self) -> list[Problem]:
        runs = len(self.export.run)
        return [] if runs == 1 else [Problem(f"one run is needed, not {runs}", "command line", "Give its folder")]

    @property
    def folder(self) -> Path:
        """The folder for the files."""
        return Path(self.export.output or Path(self.export.run[0], self.export.to))


EVALUATION = CommandLine(
    EvaluationConfig,
    "evaluate",
    "Scores and ranks the completions of trained models, and compares them with the start model's.",
    (
        ("", "the last run in this folder"),
        ("--model-path RUN --which best", "a run's best checkpoint"),
        ("--chat --model-path RUN", "chat with a model"),
    ),
)
COMPARISON = CommandLine(
    ComparisonConfig,
    "compare",
    "Compares groups of runs, such as algorithms or learning rates over seeds, and the start model, on the same "
    "prompts. Writes a report with a verdict.",
    (
        ("ppo_seed42 ppo_seed123 grpo_seed42 grpo_seed123", "two algorithms over two seeds"),
        ("grpo_seed42 --arm DPO=./dpo_model best-of-4", "with a model of another trainer and a baseline"),
        ("RUN ... --judge-model MODEL", "also by a second reward model that was not used in training"),
    ),
)
PLOT = CommandLine(
    PlotConfig,
    "plot",
    "Draws the training curves of one run, or of groups of runs over seeds. Writes a plot and a table.",
    (
        ("", "the last run in this folder"),
        ("ppo_seed42 grpo_seed42 --x episodes", "two runs over the number of completions"),
        ("RUN --smooth 1 --output ./curves", "without smoothing, into curves.png and curves.csv"),
    ),
)
EXPORT = CommandLine(
    ExportConfig,
    "export",
    "Writes a finished run in the format of another program.",
    (
        ("RUN --to gguf", "for llama.cpp and Ollama, into RUN/gguf"),
        ("RUN --to gguf --type q8_0 --output ./my_model", "weights of 8 bits"),
        ("RUN --to verl", "for a training on a cluster"),
    ),
)


def _parse(line: CommandLine, argv: Sequence[str] | None = None) -> Any:
    """Return the configuration of a command without recipes. Raises UserError that lists all errors."""
    given = read_command(line, argv, lambda *_: [], lambda _: None)
    return build(line.config_class, [given.flags], given.problems, checks=(line.config_class.validate,))


parse_evaluation_cli = partial(_parse, EVALUATION)  # argv -> EvaluationConfig
parse_comparison_cli = partial(_parse, COMPARISON)  # argv -> ComparisonConfig
parse_plot_cli = partial(_parse, PLOT)  # argv -> PlotConfig
parse_export_cli = partial(_parse, EXPORT)  # argv -> ExportConfig
