"""The settings of the commands that evaluate, compare and plot. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf.settings.fields import Layer, inherited, setting
from rlhf.settings.flags import CommandLine
from rlhf.settings.merge import Command, build, read_given, show_help, values_of
from rlhf.settings.recipes import DEFAULT_RECIPE, shipped_recipes
from rlhf.settings.training import (
    LARGEST_SEED,
    DataSettings,
    ModelSettings,
    RewardSettings,
    SamplingSettings,
)
from rlhf.settings.types import Split

AS_IN_RUN = "as in the run"


@dataclass(frozen=True)
class MeasureSettings:
    """On what models are measured; what is unset is taken from their runs, or from --like."""

    which: str = setting(
        "final", "of a run: its final weights, or its best checkpoint", choices=("final", "best"), brief=True
    )
    baseline: str | None = setting(
        None,
        "start model to compare with, a folder or a hub name; unset: the runs' own",
        brief="start model to compare with",
    )
    judge_model: str | None = setting(
        None, "a reward model that training never saw; unset: the gold quality in the demo, elsewhere none", brief=True
    )
    num_prompts: int = setting(20, "evaluation prompts, drawn at random", ge=1, brief=True)
    completions: int = setting(
        4, "replies sampled to each prompt", ge=1, aliases=("num_completions",), brief="completions per prompt"
    )
    seed: int = setting(
        42,
        "draws the prompts, the replies and the intervals",
        brief="draws the prompts and the completions",
        ge=0,
        le=LARGEST_SEED,
    )
    like: str = setting(
        DEFAULT_RECIPE, "recipe whose settings serve models that are not of a run", choices=shipped_recipes()
    )
    rm_model: str | None = inherited(
        ModelSettings,
        "rm_model",
        AS_IN_RUN,
        "reward model: a folder or a hub name",
        "reward model; unset: as in the run",
    )
    prompts: str | None = inherited(DataSettings, "prompts", AS_IN_RUN, brief="prompts; unset: as in the run")
    split: Split | None = inherited(DataSettings, "split", AS_IN_RUN)
    prompt_length: int | None = inherited(DataSettings, "prompt_length", AS_IN_RUN)
    eval_text: str | None = inherited(DataSettings, "eval_text", AS_IN_RUN)
    max_new_tokens: int | None = inherited(SamplingSettings, "max_new_tokens", AS_IN_RUN)
    temperature: float | None = inherited(
        SamplingSettings, "temperature", AS_IN_RUN, brief="sampling temperature; unset: as in the run"
    )
    top_k: int | None = inherited(SamplingSettings, "top_k", AS_IN_RUN)
    top_p: float | None = inherited(SamplingSettings, "top_p", AS_IN_RUN)
    reward_func: tuple[str, ...] | None = inherited(
        RewardSettings,
        "reward_func",
        AS_IN_RUN,
        "reward functions; FILE.py:NAME runs that file",
        "reward functions; unset: as in the run",
    )
    reward_weights: tuple[float, ...] | None = inherited(RewardSettings, "reward_weights", AS_IN_RUN)
    trust_reward_code: bool = setting(
        False, "run the files of reward functions that a run's run.json names; without it they are refused"
    )


@dataclass(frozen=True)
class EvaluationSettings:
    """What is evaluated, and where to."""

    model_path: tuple[str, ...] = setting(
        (),
        "run folders, model or adapter folders, hub names; unset: the last run here",
        aliases=("model",),
        brief="runs, models or adapters; unset: the last run here",
    )
    output: str = setting(
        "./evaluation_output", "folder of the page and the JSON file", aliases=("output_dir",), brief=True
    )
    tokens: str | None = setting(
        None,
        "a run whose recorded tokens become a page, in place of an evaluation",
        brief="a run whose recorded tokens become a page",
    )
    chat: bool = setting(
        False, "talk to the model, a line a turn, in place of an evaluation", brief="talk to the model"
    )


@dataclass(frozen=True)
class EvaluationConfig(Command):
    """All settings of `evaluate_generations.py`."""

    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    measure: MeasureSettings = field(default_factory=MeasureSettings)

    def validate(self) -> list[str]:
        problems, named = [], self.evaluation.model_path
        if self.evaluation.tokens is not None and (named or self.evaluation.chat):
            other = "--model-path" if named else "--chat"
            problems.append(f"two things at once: --tokens and {other}. One command for each")
        if self.evaluation.chat and len(named) > 1:
            problems.append(f"{len(named)} models to talk to: --chat, --model-path. Name one")
        return problems


@dataclass(frozen=True)
class ComparisonSettings:
    """What is compared, and where to."""

    runs: tuple[str, ...] = setting(
        (), "run folders, of one algorithm or several, over seeds", brief=True, positional=True
    )
    output: str = setting(
        "./comparison_output", "folder of the reports and the pictures", aliases=("output_dir",), brief=True
    )


@dataclass(frozen=True)
class ComparisonConfig(Command):
    """All settings of `compare_runs.py`."""

    comparison: ComparisonSettings = field(default_factory=ComparisonSettings)
    measure: MeasureSettings = field(default_factory=MeasureSettings)

    def validate(self) -> list[str]:
        return [] if self.comparison.runs else ["no run is named: command line. Give one or more run folders"]


@dataclass(frozen=True)
class PlotSettings:
    """What is drawn, and how."""

    runs: tuple[str, ...] = setting(
        (), "run folders; none: the last run here", brief="run folders; none: the last run here", positional=True
    )
    x: str = setting("updates", "the horizontal axis", brief=True, choices=("updates", "episodes", "time"))
    smooth: int = setting(10, "updates over which the thick lines average; 1: none", ge=1, brief=True)
    output: str = setting("./training_progress", "files to write: this name with .png and .csv", brief=True)


@dataclass(frozen=True)
class PlotConfig(Command):
    """All settings of `plot_training_progress.py`."""

    plot: PlotSettings = field(default_factory=PlotSettings)


EVALUATION = CommandLine(
    EvaluationConfig,
    "evaluate_generations.py",
    "Scores and ranks the completions of trained models, and compares them with the start model's.",
    (
        ("", "the last run in this folder"),
        ("--model-path RUN --which best", "a run's best checkpoint"),
        ("--chat --model-path RUN", "talk to a model"),
    ),
)
COMPARISON = CommandLine(
    ComparisonConfig,
    "compare_runs.py",
    "Compares algorithms over seeds, and the start model, on the same prompts: a report with a verdict.",
    (
        ("ppo_seed42 ppo_seed123 grpo_seed42 grpo_seed123", "two algorithms over two seeds"),
        ("RUN ... --which best", "the best checkpoints"),
        ("RUN ... --judge-model MODEL", "by a reward model that training never saw"),
    ),
)
PLOT = CommandLine(
    PlotConfig,
    "plot_training_progress.py",
    "Draws the training curves of one run, or of several algorithms over seeds: a picture and a table.",
    (
        ("", "the last run in this folder"),
        ("ppo_seed42 grpo_seed42 --x episodes", "two runs on the same axis"),
        ("RUN --smooth 1 --output ./curves", "without averages, into curves.png and curves.csv"),
    ),
)


def parse_evaluation_cli(argv: Sequence[str] | None = None) -> EvaluationConfig:
    """Return the configuration of `evaluate_generations.py`. Raises UserError with all errors of the command line."""
    return _parse(EVALUATION, argv)


def parse_comparison_cli(argv: Sequence[str] | None = None) -> ComparisonConfig:
    """Return the configuration of `compare_runs.py`. Raises UserError with all errors of the command line."""
    return _parse(COMPARISON, argv, {"num_prompts": (128, "default")})


def parse_plot_cli(argv: Sequence[str] | None = None) -> PlotConfig:
    """Return the configuration of `plot_training_progress.py`. Raises UserError with all of its errors."""
    return _parse(PLOT, argv)


def _parse(line: CommandLine, argv: Sequence[str] | None, defaults: Layer | None = None) -> Any:
    """Return the configuration of a command that has no recipes; `defaults` replace the declared ones."""
    argv, lower = sys.argv[1:] if argv is None else argv, [defaults or {}]
    show_help(line, argv, lambda _: (lower, None))
    given = read_given(line, argv)
    values = values_of(line.config_class, [*lower, *given.layers], given.problems)
    return build(line.config_class, values, checks=(line.config_class.validate,))
