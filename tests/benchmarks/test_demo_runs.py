"""Tests of the benchmarks that train the demos: the commands are valid, and changes are paired by prompt."""

from __future__ import annotations

import json

import pytest

from benchmarks.demo_checker import CONTROL, NORMAL, checker_runs
from benchmarks.demo_runs import SEEDS, DemoRun
from benchmarks.knobs import FOR_ALL, NONE, ONLY, change, knob_runs
from rlhf.algorithms.table import ALGORITHMS
from rlhf.config import parse_cli
from rlhf.settings.recipes import DEMOS
from rlhf.settings.training import Config


@pytest.mark.parametrize("recipe", DEMOS)
def test_every_knob_is_a_valid_command_that_changes_a_setting(recipe):
    runs = knob_runs(recipe, list(ONLY), [1, 2], 640)
    plain = {run.algorithm: config_of(run, recipe) for run in runs if run.name == NONE}
    assert set(plain) == set(ONLY)
    for run in runs:
        assert (config_of(run, recipe) == plain[run.algorithm]) == (run.name == NONE), run.name
    assert {run.name for run in runs} <= {NONE, *FOR_ALL, *(name for own in ONLY.values() for name in own)}
    assert ("critic from reward model" in {run.name for run in runs}) == (recipe == "demo")


def config_of(run: DemoRun, recipe: str) -> Config:
    return parse_cli(["--recipe", recipe, *run.words], run.algorithm)


def test_every_algorithm_and_seed_has_a_control():
    runs = checker_runs(list(SEEDS))
    assert len({(run.name, run.algorithm, run.seed) for run in runs}) == 2 * 3 * len(ALGORITHMS)
    assert {run.name for run in runs} == {NORMAL, CONTROL}
    for run in runs:
        assert config_of(run, "demo-checker").reward.eval_func == ("exact_match",)


def test_change_by_a_knob_is_paired_by_prompt(tmp_path):
    """Prompt a changes by +1 and 0 in the two seeds, prompt b by 0 and 0: means 0.5 and 0, so 0.25."""
    plain, knob = ([DemoRun("ppo", seed, name, ()) for seed in (1, 2)] for name in (NONE, "x"))
    scores = {NONE: [{"a": 0, "b": 1}, {"b": 0, "a": 0}], "x": [{"b": 1, "a": 1}, {"a": 0, "b": 0}]}
    for runs in (plain, knob):
        for run, found in zip(runs, scores[runs[0].name], strict=True):
            folder = run.folder(tmp_path) / "samples"
            folder.mkdir(parents=True)
            (folder / "update-000000.jsonl").write_text("")
            rows = [{"prompt": prompt, "score": score} for prompt, score in found.items()]
            (folder / "update-000025.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = change(knob, plain, tmp_path)
    assert found.value == 0.25 and found.low < 0.25 < found.high
