"""Tests of the benchmarks that train the demos: the commands are valid, and old results are not mixed with new."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks import demo_runs
from benchmarks.demo_checker import CONTROL, NORMAL, checker_runs
from benchmarks.demo_runs import SEEDS, DemoRun, run_all
from benchmarks.knobs import FOR_ALL, NONE, ONLY, change, knob_runs
from rlhf.algorithms.table import ALGORITHMS
from rlhf.config import parse_cli
from rlhf.settings.recipes import DEMOS
from rlhf.settings.training import Config
from tests.records import record_of


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


def test_change_by_a_knob_by_hand():
    """Changes of 1, 2 and 3 in three seeds: mean 2, standard error 1 / sqrt(3), t = 4.303 (2 degrees of freedom)."""
    found = change([2.0, 4.0, 3.0], [1.0, 2.0, 0.0])
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2 - 2.484, 2 + 2.484), abs=1e-3)


def test_finished_runs_are_kept_only_with_the_same_settings(tmp_path, monkeypatch):
    """A run of other settings in the same folder is trained again, and not shown as a result of these."""
    started = []
    done = SimpleNamespace(returncode=0)
    monkeypatch.setattr(demo_runs.subprocess, "run", lambda words, **_: started.append(words) or done)
    short, long = (DemoRun("ppo", 42, "x", ("--episodes", episodes)) for episodes in ("640", "1280"))
    folder = short.folder(tmp_path)
    folder.mkdir()
    record_of(config_of(short, "demo-checker")).write(folder)
    run_all([short], "demo-checker", tmp_path, 1, print)
    assert started == []
    run_all([long], "demo-checker", tmp_path, 1, print)
    assert len(started) == 1 and "1280" in started[0]
