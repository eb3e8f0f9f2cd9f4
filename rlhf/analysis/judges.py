"""The judges: ratings of completions by a second reward model, evaluation functions, or the demo's gold quality."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf.analysis.models import ModelRef
from rlhf.checkpoints.model_folder import find_model, same_weights
from rlhf.config import config_of_run
from rlhf.data.chat_template import encode_completion
from rlhf.data.prompts import Prompt
from rlhf.data.row import Example
from rlhf.demo.parts import gold_of
from rlhf.models.device import autocast_dtype
from rlhf.rewards.checks import check_measured
from rlhf.rewards.find import EVAL_FUNCTION, find_rule
from rlhf.rewards.functions import LearnedReward, RewardFunction
from rlhf.rewards.reward_model import RewardModel
from rlhf.rewards.rewards import Rewards
from rlhf.settings.evaluation import MeasureSettings
from rlhf.settings.next_commands import names_code
from rlhf.settings.training import Config, function_name
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError
from rlhf.utils.paths import resolve_path


@dataclass(frozen=True)
class Judge:
    """One judge. A judge that is not `independent` is an evaluation function that is also a reward function."""

    rewards: Rewards  # of one function
    independent: bool = True  # RL training did not use it
    accuracy: str = ""  # of a judge model, in words

    @property
    def name(self) -> str:
        """Its name in tables."""
        return self.rewards.names[0]

    @property
    def is_function(self) -> bool:
        """True for an evaluation function."""
        return self.rewards.kind == EVAL_FUNCTION

    def __str__(self) -> str:
        return f"{self.name} ({self.accuracy})" if self.accuracy else self.name


@dataclass(frozen=True)
class JudgeSources:
    """What the judges are made from. The judge model is not loaded yet."""

    folder: str | None  # of the judge model; None: there is none
    functions: list[RewardFunction | nn.Module]  # the evaluation functions of the settings


def find_judges(config: Config, models: Sequence[ModelRef], settings: MeasureSettings) -> JudgeSources:
    """Return the judge model's folder and the evaluation functions. Raises UserError if one does not exist, or if the
    judge model is the reward model of the scores or of a run."""
    functions = [find_rule(rule, config.reward.keywords, "--eval-func") for rule in config.reward.eval_func]
    if settings.judge_model in (None, "none"):
        return JudgeSources(None, functions)
    folder = find_model(settings.judge_model, "--judge-model")
    used = [("the scores", config.model.rm_model, None)]
    for model in models:
        if (run := model.run) is not None:
            used.append((model.name, config_of_run(run).model.rm_model, run.data.get("reward_model_files")))
    for used_by, name, recorded in used:
        if name is not None and same_weights(name, folder, recorded):
            raise UserError(
                f"the judge is also the reward model of {used_by}",
                f"--judge-model {settings.judge_model}",
                "Give a reward model that was not used in RL training",
            )
    return JudgeSources(folder, functions)


def load_judges(
    config: Config,
    sources: JudgeSources,
    models: Sequence[ModelRef],
    settings: MeasureSettings,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    date: str | None,
    examples: Sequence[Example],
    screen: Screen,
) -> list[Judge]:
    """Return the judge model, the evaluation functions and the demo's gold quality, those that there are. The first
    one decides. Prints what is doubtful about the judge model on the evaluation prompts `examples`. `date`: as in
    `load_tokenizer`."""
    judges = []
    runs = [config_of_run(m.run) for m in models if m.run is not None]
    trained_on = {_identity(rule) for run in runs or [config] for rule in run.reward.reward_func}
    if sources.folder is not None:
        dtype = autocast_dtype(config.model.bf16, device)
        how = config.model.rm_text, date, config.data.chat_template_kwargs
        model = RewardModel.load(sources.folder, device, dtype, "--judge-model", *how)
        accuracy = check_measured(model, f"judge {settings.judge_model}", examples, screen)
        rewards = Rewards([LearnedReward(model)], None, tokenizer, names=[settings.judge_model], kind="judge")
        judges.append(Judge(rewards, accuracy=accuracy))
    for rule, function in zip(config.reward.eval_func, sources.functions, strict=True):
        limit_s = config.reward.reward_timeout
        rewards = Rewards([function], None, tokenizer, limit_s, [function_name(rule)], EVAL_FUNCTION)
        judges.append(Judge(rewards, _identity(rule) not in trained_on))
    gold = None if settings.judge_model == "none" else gold_of(config)
    if gold is not None:

        def gold_quality(prompts: Sequence[str], completions: Sequence[str], *, ended: Sequence[bool], **_) -> list:
            return [gold(*row) for row in zip(prompts, completions, ended, strict=True)]

        judges.append(Judge(Rewards([gold_quality], None, tokenizer, names=["gold quality"], kind="judge")))
    return judges


def _identity(rule: str) -> str:
    """Return a text that is equal for two spellings of one function's file."""
    if not names_code([rule]):
        return rule
    file, _, name = rule.rpartition(":")
    return f"{resolve_path(file)}:{name}"


# --- ratings ---------------------------------------------------------------------------------------------------------


def as_key(messages: Sequence[dict[str, str]]) -> str:
    """Return a text that is equal for equal prompts."""
    return json.dumps(list(messages))


def rate_stored(
    judge: Judge,
    rows: Sequence[dict[str, Any]],
    known: dict[str, Example],
    tokenizer: PreTrainedTokenizerBase,
    as_logged: bool,
) -> np.ndarray | None:
    """Return a judge's ratings of completions that a run stored.

    An evaluation function may need the columns of the data, which are not stored. Returns None if a prompt is not
    `known`, or the function names groups, turns or log-probs, and the run stored no ratings either.

    `known` has the rows of the data by their prompts (`as_key`). `as_logged`: the judge is a function of the runs, so
    the ratings that they stored are its ratings.
    """
    if judge.is_function and as_logged and all(judge.name in row.get("metrics", {}) for row in rows):
        return np.array([row["metrics"][judge.name] for row in rows], dtype=float)
    examples = [known.get(as_key(row["prompt"])) for row in rows]
    if judge.is_function and (None in examples or judge.rewards.named):
        return None
    prompts = [Prompt((), e or Example(tuple(row["prompt"]))) for e, row in zip(examples, rows, strict=True)]
    texts = [row["completion"] for row in rows]
    ended = [row["ended"] for row in rows]
    end = [tokenizer.eos_token_id]  # a completion has at least one token
    ids = [encode_completion(tokenizer, *pair) or end for pair in zip(texts, ended, strict=True)]
    return np.array(judge.rewards.score(prompts, texts, ids, ended).total, dtype=float)
