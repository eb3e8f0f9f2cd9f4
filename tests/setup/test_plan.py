"""Tests of the plan that is printed before a run."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
import torch

import train_grpo
import train_ppo
from rlhf.checkpoints.run_record import RunRecord
from rlhf.setup.build import load_components
from rlhf.setup.load_inputs import load_inputs
from rlhf.setup.plan import kl_line, show_plan, warmup_warning
from rlhf.setup.shape import base_parameters, parameters_in, weights_of
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError

CPU = torch.device("cpu")


@pytest.mark.parametrize("flags", [(), ("--use-lora",), ("--use-lora", "--load-in-4bit")])
def test_parameter_count_is_that_of_the_start_model(configured, flags):
    """Adapter parameters are not counted. 4-bit weights are counted as weights, not as packed bytes."""
    plain = load_components(configured(), CPU, Screen()).policy
    expected = sum(weight.numel() for weight in plain.parameters())
    config = configured(*flags)
    assert base_parameters(load_components(config, CPU, Screen()).policy) == expected
    assert parameters_in(weights_of(config.model.actor_model)) == expected


def test_kl_phase_without_updates_is_not_listed(configured):
    """Two updates for three KL targets: the plan must not print `updates 2 to 1`."""
    line = kl_line(configured("--kl-schedule", "phased"), 2)
    assert line.count("(updates") == 2 and "0.05/token (updates 1 to 1), 0.01/token (updates 2 to 2)" in line


def test_the_plan_has_the_share_of_a_logged_kl(configured):
    assert "1 completion in 8" in kl_line(configured("--kl-placement", "none"), 2)


def test_plan_prints_the_maximum_change_of_beta(configured, capsys):
    config = configured("--kl-schedule", "phased", "--num-iterations", 800, "--kl-horizon", 2000)
    show_plan(config, load_inputs(config, Screen()), CPU, Screen())
    plan, warning = [line for line in capsys.readouterr().out.splitlines() if "1.11-fold" in line]
    assert "horizon 2,000 " in plan and " 3-fold " in plan and "warning: " in warning and " 266 updates" in warning


def test_warm_up_that_is_not_shorter_than_the_run_is_a_warning(configured):
    """The number of updates may depend on the data, so this is known only when the plan is printed."""
    config = configured("--warmup-steps", 1)
    assert warmup_warning(config, 2) is None
    expected = "rises for 1 updates and the run has 1, so it never reaches its value: --warmup-steps"
    assert expected in warmup_warning(config, 1)
    share = configured("--warmup-steps", 0.4)
    assert warmup_warning(share, 2) is None
    assert expected in warmup_warning(share, 1), "a share is rounded up"


ROWS = [{"prompt": f"What is {i} + 1?", "answer": i + 1} for i in range(2000)]


@pytest.fixture
def warned(run_flags, tmp_path, capsys):
    """Return a function that makes the plan of a run on some rows and returns its warnings about the evaluation."""

    def lines(rows: int, *flags: object) -> list[str]:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:rows]))
        flags = ("--prompts", file, "--eval-prompts", 128, *flags)  # the last one counts
        with contextlib.suppress(UserError):
            train_grpo.main(run_flags("--rm-model", "none", "--reward-func", "last_number", *flags, "--dry-run"))
        return [line for line in capsys.readouterr().out.splitlines() if "points" in line]

    return lines


@pytest.mark.parametrize(
    ("rows", "flags", "fixes"),
    [
        (80, (), ["--eval-dataset"]),  # 10 held out
        (1300, (), ["--eval-samples 8", "--split 0/70/30 --eval-prompts 349"]),  # about 130
        (2000, ("--split", "0/70/30"), ["--eval-samples 8", "--eval-prompts 349"]),  # about 600, limited to 128
        (2000, ("--split", "0/70/30", "--eval-temperature", 0), ["--eval-prompts 349"]),
        pytest.param(
            2000,
            ("--split", "0/70/30", "--eval-prompts", 200),
            ["--eval-samples 4", "--eval-prompts 349"],
            marks=pytest.mark.ci,
        ),
    ],
)
def test_too_few_evaluation_prompts_are_a_warning_whose_fixes_work(warned, rows, flags, fixes):
    (line,) = warned(rows, *flags)
    advice = line.split("Use ")[1]
    assert all(fix in advice for fix in fixes) and line.startswith("warning: ") and " 349 prompts" in line
    for fix in advice.split(" or ") if "--eval-dataset" not in advice else ():
        assert warned(rows, *flags, *fix.split()) == [], fix


def test_enough_evaluation_prompts_are_no_warning(warned):
    assert warned(1300, "--eval-samples", 8) == []


def test_the_smallest_change_of_few_prompts_is_in_the_plan(warned):
    """2.80 x sqrt((1/9 + 1/3) / n) of one completion each, but not more than the whole range of a score."""
    (line,) = warned(150, "--eval-prompts", 10)
    assert "10 evaluation prompts" in line and " 59 points" in line and " 1.2 standard deviations" in line
    (line,) = warned(150, "--eval-prompts", 2)
    assert " 100 points" in line


def test_plan_of_ten_million_updates_takes_seconds(configured, capsys):
    config = configured("--num-iterations", 10_000_000, "--batch-size", 1)
    start = time.monotonic()
    show_plan(config, load_inputs(config, Screen()), CPU, Screen())
    assert time.monotonic() - start < 20
    assert "10,000,000 updates" in capsys.readouterr().out


def test_default_kl_horizon_is_stored_as_a_number_in_run_json(run_flags, tmp_path):
    train_ppo.main(run_flags("--num-iterations", 3))
    assert RunRecord.read(tmp_path / "run").settings["kl"]["kl_horizon"] == 8, "the episodes of two updates"
    train_ppo.main(run_flags("--num-iterations", 3, "--kl-horizon", 77, "--overwrite"))
    assert RunRecord.read(tmp_path / "run").settings["kl"]["kl_horizon"] == 77
