"""Runs tests that are run for each algorithm with more rows in the table: a new algorithm needs no entry in them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.test_structure import ROOT

# one test of each file that once named the algorithms, or counted them
FAST = [
    "tests/reports/test_many_algorithms.py",
    "tests/settings/test_config.py",
    "tests/settings/test_dependent_settings.py",
    "tests/rewards/test_contract.py::test_completion_without_a_score_has_advantage_0_and_moves_no_other[fifth]",
    "tests/trainer/test_loop.py::test_drifting_scores_do_not_change_their_scale[fifth-3.0]",
]
SHARED = ["tests/algorithms", "tests/callbacks", "tests/rewards", "tests/settings", "tests/trainer", "tests/models"]


def passed_with_more_rows(*words: str) -> int:
    """Return how many tests pass with the plugin. The others' output is that of the failure."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "tests.fifth_algorithm", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    return int(re.search(r"(\d+) passed", done.stdout)[1])


@pytest.mark.ci
def test_tests_hold_for_more_algorithms():
    assert passed_with_more_rows("-m", "not proof", *FAST) > 50


@pytest.mark.ci
def test_tests_of_each_algorithm_hold_for_a_new_one():
    scripts = "--ignore=tests/settings/test_next_commands.py"  # it imports the script of each row
    chosen = "fifth and not test_fifth and not phased_kl"  # a recipe needs a horizon for each algorithm with groups
    words = ("-m", "not proof and not demo", "-k", chosen, scripts)
    assert passed_with_more_rows(*words, *SHARED) > 100
