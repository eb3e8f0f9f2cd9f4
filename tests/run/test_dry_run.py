"""Tests of --dry-run: it imports little, and prints the plan that the run prints."""

from __future__ import annotations

import subprocess
import sys

import pytest

import train_ppo
from tests.scripts.test_scripts import ROOT

SLOW = ("trl", "peft", "bitsandbytes", "scipy", "transformers.modeling_utils", "transformers.activations")


@pytest.mark.ci
def test_dry_run_does_not_import_the_training_loop(run_flags):
    """These imports take most of the time of a start. The plan needs config.json, headers and the tokenizer."""
    plain = run_flags("--dry-run")
    fit = run_flags("--dry-run", "--use-lora", "--fit", "8GB")
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import train_ppo\n"
        f"train_ppo.main({plain!r})\ntrain_ppo.main({fit!r})\n"
        f"found = [name for name in {SLOW} if name in sys.modules]\nassert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("first prompt with special tokens") == 2


@pytest.mark.parametrize("more", [[], ["--use-lora"]])
def test_the_plan_of_a_dry_run_is_the_plan_of_the_run(run_flags, capsys, more):
    """Except for the memory of the libraries, which a dry run does not import."""
    plans = []
    for mode in (["--dry-run"], ["--check"], []):
        train_ppo.main(run_flags(*more, *mode))
        output = capsys.readouterr().out
        plans.append([line for line in output[output.index("  algorithm") : output.index("first prompt")].splitlines()
                      if not line.strip().startswith(("memory", "parts, GiB"))])  # fmt: skip
    assert plans[0] == plans[1] == plans[2] and len(plans[0]) > 8


def test_the_plan_for_another_machine_has_its_memory(run_flags, capsys):
    train_ppo.main(run_flags("--dry-run", "--memory", "8GB"))
    output = capsys.readouterr().out
    assert " of 8.00 GiB" in output and "warning: the predicted peak" not in output
    train_ppo.main(run_flags("--dry-run", "--memory", "100MB"))
    output = capsys.readouterr().out
    assert " of 0.10 GiB" in output and " 0.10 GiB free" in output and output.count("GiB less)") == 3
