"""Tests examples/gdpo.py, an algorithm in a user's file, and the scores of each function that it reads."""

from __future__ import annotations

import ast
import json
import math
from types import SimpleNamespace

import torch
from torch.testing import assert_close

import train
from rlhf.algorithms.classes import CLASSES
from rlhf.config import parse_cli
from rlhf.rollout.completions import Rollout
from tests.documents import ROOT, blocks

SOURCE = f"{ROOT}/examples/gdpo.py:GDPO"
NAN = math.nan


def advantages(function_scores, scores, *flags: str, weights=(1.0, 1.0)) -> list[float]:
    """Return the advantage of each of four completions with two tokens, of two prompts."""
    words = ["--algorithm", SOURCE, "--K", "2", "--batch-size", "2", "--kl-coef", "0.5", *flags]
    config = parse_cli(words, None)
    mask = torch.ones(4, 2, dtype=torch.bool)
    completions = SimpleNamespace(action_mask=mask, ended=mask[:, 0], sampled_logprobs=None)
    kl = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    rollout = Rollout(completions, [], kl, torch.zeros(4, 2))
    rollout.function_scores = torch.tensor(function_scores)
    rollout.function_weights = weights
    batch = CLASSES["gdpo"](config).advantages(rollout, torch.tensor(scores), 0.5)
    assert torch.equal(batch.advantages[:, 0], batch.advantages[:, 1])
    return batch.advantages[:, 0]


def class_in(source: str) -> str:
    """Return the syntax tree of the class GDPO as text, without comments and docstrings."""
    (found,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    for node in (found, *(part for part in found.body if isinstance(part, ast.FunctionDef))):
        node.body = node.body[ast.get_docstring(node) is not None :]
    return ast.dump(found)


def test_the_page_on_adding_an_algorithm_quotes_the_file():
    (block,) = [b for b in blocks(ROOT / "docs" / "adding_an_algorithm.md", "python") if "class GDPO" in b]
    assert class_in(block) == class_in((ROOT / "examples" / "gdpo.py").read_text("utf-8"))


BOTH = [[1.0, 0.0], [3.0, 10.0], [2.0, 5.0], [2.0, 0.0]]
LOSS = ("--kl-placement", "loss")


def test_advantages_match_values_computed_by_hand():
    """Of two values, the normalized ones are -0.7071 and 0.7071, whatever their distance, and 0 if they are equal. The
    sums -1.414, 1.414, 0.707 and -0.707 have variance 5 / 3."""
    found = advantages(BOTH, [1.0, 13.0, 7.0, 2.0], *LOSS)
    assert_close(found, torch.tensor([-2.0, 2.0, 1.0, -1.0]) / math.sqrt(2) / math.sqrt(5 / 3), atol=1e-3, rtol=0)


def test_weights_and_missing_scores():
    """The second function counts twice. Of the first group, the first completion has no score of the first function,
    so that the other's is alone: nothing to compare. The last completion has no score at all."""
    scores = [[NAN, 0.0], [3.0, 10.0], [2.0, 5.0], [NAN, NAN]]
    found = advantages(scores, [0.0, 23.0, 12.0, NAN], *LOSS, weights=(1.0, 2.0))
    # -1.414, 1.414 and 0: variance 2
    assert_close(found, torch.tensor([-1.0, 1.0, 0.0, 0.0]), atol=1e-3, rtol=0)


def test_the_kl_in_the_reward_is_charged_before_the_last_normalization():
    """0.5 x 2 nats: the sums are -2.414, 1.414, 0.707 and -0.707, with mean -0.25."""
    found = advantages(BOTH, [1.0, 13.0, 7.0, 2.0])
    sums = [-2.41421, 1.41421, 0.70711, -0.70711]
    variance = sum((value + 0.25) ** 2 for value in sums) / 3
    assert_close(found, (torch.tensor(sums) + 0.25) / math.sqrt(variance), atol=1e-3, rtol=0)


def test_it_trains_with_several_functions(run_flags, tmp_path):
    rewards = ("--rm-model", "none", "--reward-func", "length_penalty", "word_penalty", "--reward-weights", 1, 0.1)
    train.main(run_flags("--algorithm", SOURCE, *rewards, "--K", 4, "--batch-size", 1))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["algorithm"], record["status"], record["row"]["label"]) == ("gdpo", "finished", "GDPO")


def test_an_algorithm_receives_the_scores_of_each_function(build):
    """With dynamic sampling, they are those of the completions that are kept; in a control run, shuffled as the
    sums."""

    def first(completions, **_):
        return [None, *(float(len(completions) + row) for row in range(1, len(completions)))]

    def second(completions, **_):
        return [0.5] * len(completions)

    seen = {}
    for flags in ((), ("--dynamic-sampling", 2), ("--control", "shuffled")):
        trainer = build(*flags, algorithm="grpo", rewards=[first, second])
        learn = trainer.algorithm.advantages
        trainer.algorithm.advantages = lambda rollout, *given, learn=learn: (
            seen.update(rollout=rollout, scores=given[0]) or learn(rollout, *given)
        )
        trainer.update_step(1)
        each = seen["rollout"].function_scores
        assert each.shape == (4, 2) and seen["rollout"].function_weights == (1.0, 1.0)
        assert_close(each.nansum(1), seen["scores"]), flags
        assert each[:, 1].tolist() == [0.5] * 4 and int(each[:, 0].isnan().sum()) == 1


def test_settings_that_change_only_the_sum_are_refused(user_error):
    for flag in ("--missing-eos-penalty", "--score-ema"):
        with user_error(flag, "GDPO"):
            parse_cli(["--algorithm", SOURCE, flag, "0.5"], None)
