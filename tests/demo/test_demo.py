"""Tests the demo with the README's commands: it must learn, within the documented time.

`.ci/run` trains PPO, which makes the demo parts, and then GRPO, with seed 42. Other algorithms, other seeds and
falling KL targets have the marker `proof`: `python -m pytest -n 0 -m proof`. tests/demo/test_small_demo.py runs the
same steps on a small scale.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from rlhf.algorithms.table import ALGORITHMS
from tests.scripts.test_scripts import copy_project, run

pytestmark = pytest.mark.demo
IN_CI = [("ppo", "42"), ("grpo", "42")]
# on 2 cores, with nothing else running: about twice the measured time, because a shared machine can be slower
FIRST_TIME_S = 6 * 60
CACHED_S = 210


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return copy_project(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def demo(project):
    """Return seconds, output, run.json and the reward model's metrics.json of `python train_ppo.py --recipe demo`."""
    return run_demo(project, "ppo")


@pytest.fixture(scope="module")
def grpo_demo(project, demo):
    """Return the same for GRPO, which finds the parts of PPO's demo."""
    return run_demo(project, "grpo")


def run_demo(project: Path, algorithm: str, *flags: str):
    started = time.monotonic()
    done = run(
        [f"train_{algorithm}.py", "--recipe", "demo", *flags], project, OMP_NUM_THREADS="2", OMP_WAIT_POLICY=None
    )
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    log = json.loads((project / f"{algorithm}_training_output" / "run.json").read_text(encoding="utf-8"))
    record = json.loads((project / "demo_parts" / "reward_model" / "metrics.json").read_text(encoding="utf-8"))
    print(f"{seconds:.0f} s", json.dumps(log["figures"]))
    return seconds, done.stdout, log, record


def check_learning(figures: dict) -> None:
    assert figures["prompts"] >= 100
    assert figures["score_rise_in_start_sd"] >= 1
    assert figures["gold_rise_interval"][0] > 0
    assert 0.5 <= figures["kl_last_10_updates"] / figures["kl_target"] <= 1.5
    assert 0.5 <= figures["length_after"] / figures["length_before"] <= 2


def test_reward_model_detects_every_kind_of_flaw(demo):
    record = demo[3]
    assert record["accuracy"] >= 0.85
    assert record["accuracy"] >= record["length_baseline"] + 0.15
    assert len(record["by_flaw"]) >= 3 and min(record["by_flaw"].values()) >= 0.75, record["by_flaw"]
    assert record["accuracy_against_baseline"] is not None


def test_ppo_learns(demo):
    check_learning(demo[2]["figures"])


def test_grpo_learns_from_as_many_episodes(demo, grpo_demo):
    seconds, output, log, _ = grpo_demo
    assert "demo parts: cached" in output
    assert seconds <= CACHED_S
    check_learning(log["figures"])
    for count in ("episodes", "optimizer_steps"):
        assert log["spent"][count] == demo[2]["spent"][count] == log["plan"][count]


def test_a_trained_model_teaches_the_start_model(project, demo):
    """The KL to the teacher falls, and the gold quality rises: neither a reward nor the gold quality trained it."""
    started = time.monotonic()
    done = run(["train_reinforce_pp.py", "--recipe", "distill"], project, OMP_NUM_THREADS="2", OMP_WAIT_POLICY=None)
    assert done.returncode == 0, done.stderr
    seconds = time.monotonic() - started
    output = project / "reinforce_pp_training_output"
    figures = json.loads((output / "run.json").read_text(encoding="utf-8"))["figures"]
    print(f"{seconds:.0f} s", json.dumps(figures))
    assert figures["teacher_kl_after"] < figures["teacher_kl_before"] / 2
    assert figures["score_rise_interval"][0] > 0 and figures["gold_rise_interval"][0] > 0
    assert seconds <= CACHED_S


def test_readme_commands_evaluate_plot_and_compare_the_runs(project, demo, grpo_demo):
    """Covers evaluation, curves and verdict of the runs with seed 42, and the page of recorded tokens."""
    run_names = ["ppo_training_output", "grpo_training_output"]
    done = run(["evaluate_generations.py", "--model-path", run_names[0]], project)
    assert done.returncode == 0, done.stderr
    report = json.loads((project / "evaluation_output" / "evaluation.json").read_text(encoding="utf-8"))
    by_score, by_judge = report["contrasts"]
    assert by_score["win_rate"]["low"] > 0.5 and by_judge["difference"]["low"] > 0
    assert report["facts"]["judge"] == "gold quality" and len(report["prompts"]) == 20
    done = run(["plot_training_progress.py", *run_names], project)
    assert done.returncode == 0 and (project / "training_progress.png").is_file(), done.stderr
    done = run(["compare_runs.py", *run_names, "--limit-minutes", "0.2"], project)
    assert done.returncode == 0, done.stderr
    compared = json.loads((project / "comparison_output" / "comparison.json").read_text(encoding="utf-8"))
    pair, *against_start = compared["verdict"]
    assert "(gold quality, " in pair and "9,600 episodes" in pair
    assert len(against_start) == 2
    for label in ("PPO", "GRPO"):
        assert f"{label} is better " in " ".join(against_start)
    train = ["train_ppo.py", "--recipe", "demo", "--num-iterations", "2", "--record-tokens", "--output", "./recorded"]
    for command in (train, ["evaluate_generations.py", "--tokens", "./recorded"]):
        done = run(command, project)
        assert done.returncode == 0, done.stderr
    assert (project / "evaluation_output" / "tokens.html").is_file()


def test_first_run_takes_the_documented_time(demo):
    assert demo[0] <= FIRST_TIME_S


def test_output_ends_with_results_and_next_steps(demo):
    for words in ("before", "after", "random evaluation", "gold quality", "not used in RL training", "saved:",
                  "next:"):  # fmt: skip
        assert words in demo[1]


def test_questions_are_many_and_in_only_one_part(project, demo):
    from rlhf.data.examples import load_examples
    from rlhf.data.splits import split_examples
    from rlhf.settings.types import Split

    examples = load_examples(str(project / "demo_parts" / "pairs.jsonl"), pairs=True)
    assert len({e.question for e in examples}) >= 2000
    split_examples(examples, Split(45, 45, 10))  # raises if two parts share a question


@pytest.mark.proof
@pytest.mark.parametrize(
    ("algorithm", "seed"),
    [(name, seed) for name in ALGORITHMS for seed in ("42", "123", "777") if (name, seed) not in IN_CI],
)
def test_other_seeds_and_algorithms_learn(project, demo, algorithm, seed):
    seconds, output, log, _ = run_demo(project, algorithm, "--seed", seed)
    assert "demo parts: cached" in output
    assert seconds <= CACHED_S
    check_learning(log["figures"])


PHASED = [
    "--kl-schedule", "phased", "--kl-target", "0.05/token", "0.02/token", "0.01/token", "--kl-coef", "0.5",
    "--kl-horizon", "256", "--num-iterations", "600", "--learning-rate", "1e-4", "--lr-schedule", "linear",
    "--ppo-epochs", "1",
]  # fmt: skip


@pytest.mark.proof
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_kl_follows_a_falling_target(project, demo, algorithm):
    """The last 10 updates of each third have a KL of 0.5 to 1.5 x the target: 0.05, 0.02 and 0.01 nats/token."""
    _, output, log, _ = run_demo(project, algorithm, *PHASED)
    phases = log["figures"]["kl_phases"]
    assert [p["target"] for p in phases] == [0.05, 0.02, 0.01]
    for phase in phases:
        assert 0.5 <= phase["kl_last_10_updates"] / phase["target"] <= 1.5, phases
    within = re.findall(r"within .* 0\.5 to 1\.5 x ", output)
    assert len(within) == 4, "one line for the end of the run and one per third"
