"""The conditions under which numbers were measured: only numbers of equal ones are compared. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf.checkpoints.model_folder import model_files
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import config_of_run
from rlhf.data.examples import worked_examples
from rlhf.rewards.find import code_print
from rlhf.settings.evaluation import MeasureSettings
from rlhf.settings.training import Config, SamplingSettings, function_name

# conditions of completions -> words for a difference; of their scores, of the ratings that a run stored, of the KL
SAMPLED = {
    "prompts": "other prompts, worked examples or chat template",
    "sampling": "other sampling ({}, not {})",
}
SCORED = {**SAMPLED, "rewards": "other rewards"}
RATED = {**SAMPLED, "judges": "other code of an evaluation function"}
KL = {"start_model": "another start model", "kl_temperature": "log-probabilities at temperature {:g}, not {:g}"}


@dataclass(frozen=True)
class Conditions:
    """The conditions of evaluations: of those during a run, or of a comparison. Models and functions are compared by
    hashes of their files."""

    prompts: Any
    sampling: SamplingSettings
    rewards: str
    judges: Mapping[str, tuple]  # name of an evaluation function -> its code
    start_model: Any
    kl_temperature: float  # of the log-probabilities; if `sampling` has another one, the KL is not the policy's

    def difference(self, other: Conditions, conditions: Mapping[str, str]) -> str:
        """Return in words those of the conditions that `other` does not share; "" if it shares all. An evaluation
        function that only one of the two has is no difference."""
        words = []
        for name, difference in conditions.items():
            mine = getattr(self, name)
            its = getattr(other, name)
            if name == "judges":
                mine, its = ({key: of[key] for key in self.judges.keys() & other.judges} for of in (mine, its))
            if mine != its:
                words.append(difference.format(mine, its))
        return ", ".join(words)


def of_run(config: Config, run: RunRecord) -> Conditions:
    """Return the conditions of the evaluations during a run with this configuration."""
    return _conditions(config, config.eval_sampling, run.data)


def of_comparison(config: Config, measure: MeasureSettings, run: RunRecord) -> Conditions:
    """Return the conditions under which a comparison evaluates a run. Files are those of today, if the run recorded
    hashes of the files that it used. The prompts are those of the run, or held out from the same data, unless others
    are chosen."""
    today = {
        "few_shot": worked_examples(config.data.few_shot),
        "reward_model_files": model_files(config.model.rm_model),
        "rules": {rule: code_print(rule) for rule in config.rules},
    }
    if measure.baseline is not None:  # without it, the start model is the recorded one
        today |= {"start_model_files": model_files(measure.baseline), "start_model_gguf": None}
    recorded = {name: value for name, value in today.items() if run.data.get(name) is not None}
    recorded["teacher_files"] = None  # a comparison does not load a teacher, whose scores those of the run contain
    recorded["evaluation_sha256"] = measure.chosen_prompts or run.data.get("evaluation_sha256")
    return _conditions(config, config.sampling, run.data | recorded)


def unlike(
    arms: Mapping[str, Sequence[RunRecord]], config: Config, measure: MeasureSettings, conditions: Mapping[str, str]
) -> dict[str, str]:
    """Return name of an arm -> how the evaluations during its training differ from those of a comparison, for each arm
    with a difference. A judge that the comparison does not have must be that of the first run with it."""
    found = {}
    judges = {}
    for name, runs in arms.items():
        for run in runs:
            trained = of_run(config_of_run(run), run)
            today = of_comparison(config, measure, run)
            judges = {**trained.judges, **judges, **today.judges}
            if difference := trained.difference(replace(today, judges=judges), conditions):
                found[name] = f"{name} was evaluated during training with {difference}"
    return found


def changed_code(runs: Sequence[RunRecord], config: Config) -> list[str]:
    """Return one sentence for each function whose file is not the one that a run recorded."""
    codes = [(Path(rule).name, code) for run in runs for rule, code in run.data.get("rules", {}).items() if code]
    return [
        f"the file of {rule} is not that of a run, and its code gives the values here"
        for rule in config.rules
        if any(name == Path(rule).name and code != code_print(rule) for name, code in codes)
    ]


def _conditions(config: Config, sampling: SamplingSettings, data: Mapping[str, Any]) -> Conditions:
    """Return the conditions with these settings. `data` has hashes of files as in run.json."""
    model = config.model
    reward = config.reward
    code = {rule: _code(rule, reward.keywords, data) for rule in config.rules}
    sources = [code[rule] for rule in reward.reward_func]
    if model.rm_model is not None:
        sources.insert(0, (data.get("reward_model_files") or model.rm_model, model.rm_text))
    environment = config.environment
    if environment.environment is not None:
        sources.append((code[environment.environment], replace(environment, environment=None), config.episode_tokens))
    if data.get("teacher_files") is not None:
        sources.append(data["teacher_files"])
    return Conditions(
        prompts=(data.get("evaluation_sha256"), data.get("few_shot") or config.data.few_shot),
        sampling=sampling,
        rewards=str((sources, reward.reward_weights or (1.0,) * len(sources))),
        judges={function_name(rule): code[rule] for rule in reward.eval_func},
        start_model=data.get("start_model_gguf") or data.get("start_model_files") or model.actor_model,
        kl_temperature=config.sampling.temperature,
    )


def _code(rule: str, keywords: Any, data: Mapping[str, Any]) -> tuple:
    """Return what identifies a function: its name with the hash of its file, or for a function of this project its
    name with the keywords that it reads."""
    stored = data.get("rules", {}).get(rule)
    if stored:
        return function_name(rule), stored
    return rule, keywords if rule == "keyword_bonus" else None
