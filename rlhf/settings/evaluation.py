"""The settings of the commands that evaluate, compare and plot. Imports no torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from rlhf.settings.fields import as_in, knob
from rlhf.settings.merge import resolve
from rlhf.settings.recipes import RECIPES
from rlhf.settings.training import (
    LARGEST_SEED,
    Command,
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

    which: str = knob("final", "of a run: its final weights, or its best checkpoint", choices=("final", "best"))
    baseline: str | None = knob(None, "start model to compare with, a folder or a hub name; unset: the runs' own")
    judge_model: str | None = knob(
        None, "a reward model that training never saw; unset: the gold quality in the demo, elsewhere none"
    )
    num_prompts: int = knob(20, "evaluation prompts, drawn at random", low=1)
    completions: int = knob(4, "replies sampled to each prompt", low=1, aliases=("num_completions",))
    seed: int = knob(42, "draws the prompts, the replies and the intervals", low=0, high=LARGEST_SEED)
    like: str = knob(
        "smollm2-orca", "recipe whose settings serve models that are not of a run", choices=tuple(RECIPES)
    )
    rm_model: str | None = as_in(ModelSettings, "rm_model", AS_IN_RUN, "reward model: a folder or a hub name")
    prompts: str | None = as_in(DataSettings, "prompts", AS_IN_RUN)
    split: Split | None = as_in(DataSettings, "split", AS_IN_RUN)
    prompt_length: int | None = as_in(DataSettings, "prompt_length", AS_IN_RUN)
    eval_text: str | None = as_in(DataSettings, "eval_text", AS_IN_RUN)
    reply_length: int | None = as_in(SamplingSettings, "reply_length", AS_IN_RUN)
    temperature: float | None = as_in(SamplingSettings, "temperature", AS_IN_RUN)
    top_k: int | None = as_in(SamplingSettings, "top_k", AS_IN_RUN)
    top_p: float | None = as_in(SamplingSettings, "top_p", AS_IN_RUN)
    reward_func: tuple[str, ...] | None = as_in(
        RewardSettings, "reward_func", AS_IN_RUN, "reward functions; FILE.py:NAME runs that file"
    )
    reward_weights: tuple[float, ...] | None = as_in(RewardSettings, "reward_weights", AS_IN_RUN)
    trust_reward_code: bool = knob(
        False, "run the files of reward functions that a run's run.json names; without it they are refused"
    )


@dataclass(frozen=True)
class EvaluationSettings:
    """What is evaluated, and where to."""

    model_path: tuple[str, ...] = knob(
        (), "run folders, model or adapter folders, hub names; unset: the last run here", aliases=("model",)
    )
    output: str = knob("./evaluation_output", "folder of the page and the JSON file", aliases=("output_dir",))
    tokens: str | None = knob(None, "a run whose recorded tokens become a page, in place of an evaluation")
    chat: bool = knob(False, "talk to the model, a line a turn, in place of an evaluation")


@dataclass(frozen=True)
class EvaluationConfig(Command):
    """Everything `evaluate_generations.py` can be told."""

    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    measure: MeasureSettings = field(default_factory=MeasureSettings)

    def faults(self) -> list[str]:
        faults, named = [], self.evaluation.model_path
        if self.evaluation.tokens is not None and (named or self.evaluation.chat):
            other = "--model-path" if named else "--chat"
            faults.append(f"two things at once: --tokens and {other}. One command for each")
        if self.evaluation.chat and len(named) > 1:
            faults.append(f"{len(named)} models to talk to: --chat, --model-path. Name one")
        return faults


@dataclass(frozen=True)
class ComparisonSettings:
    """What is compared, and where to."""

    runs: tuple[str, ...] = knob((), "run folders, of one algorithm or several, over seeds", positional=True)
    output: str = knob("./comparison_output", "folder of the reports and the pictures", aliases=("output_dir",))


@dataclass(frozen=True)
class ComparisonConfig(Command):
    """Everything `compare_runs.py` can be told."""

    comparison: ComparisonSettings = field(default_factory=ComparisonSettings)
    measure: MeasureSettings = field(default_factory=MeasureSettings)

    def faults(self) -> list[str]:
        return [] if self.comparison.runs else ["no run is named: command line. Give one or more run folders"]


@dataclass(frozen=True)
class PlotSettings:
    """What is drawn, and how."""

    runs: tuple[str, ...] = knob((), "run folders; none: the last run here", positional=True)
    x: str = knob("updates", "the horizontal axis", choices=("updates", "episodes", "time"))
    smooth: int = knob(10, "updates over which the thick lines average; 1: none", low=1)
    output: str = knob("./training_progress", "files to write: this name with .png and .csv")


@dataclass(frozen=True)
class PlotConfig(Command):
    """Everything `plot_training_progress.py` can be told."""

    plot: PlotSettings = field(default_factory=PlotSettings)


def parse_evaluation_cli(argv: list[str] | None = None) -> EvaluationConfig:
    """The configuration of `evaluate_generations.py`. Raises UserError with all faults of the command line."""
    said = "Replies of trained models, scored, ranked and compared with the start model's."
    return _parse(EvaluationConfig, argv, "evaluate_generations.py", said)


def parse_comparison_cli(argv: list[str] | None = None) -> ComparisonConfig:
    """The configuration of `compare_runs.py`. Raises UserError with all faults of the command line."""
    said = "Compares algorithms over seeds, and the start model, on the same prompts: a report with a verdict."
    return _parse(ComparisonConfig, argv, "compare_runs.py", said, {"num_prompts": 128})


def parse_plot_cli(argv: list[str] | None = None) -> PlotConfig:
    """The configuration of `plot_training_progress.py`. Raises UserError with all faults of the command line."""
    said = "The training curves of one run, or of several algorithms over seeds: a picture and a table."
    return _parse(PlotConfig, argv, "plot_training_progress.py", said)


def _parse(command: type, argv: list[str] | None, name: str, said: str, defaults: dict | None = None) -> Any:
    """The configuration of a command that has no recipes."""
    return resolve(command, None, sys.argv[1:] if argv is None else argv, name, said, defaults=defaults)
