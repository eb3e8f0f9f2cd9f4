"""Tests the scripts end to end, each in a separate process and in a copy of the project."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhf.algorithms.table import ALGORITHMS

ROOT = Path(__file__).parents[2]
SKIP = shutil.ignore_patterns(
    ".git", ".venv", "*_output*", "*_parts", "*_runs", "__pycache__", ".pytest_cache", ".ruff_cache", "build"
)


def copy_project(folder: Path) -> Path:
    return Path(shutil.copytree(ROOT, folder / "project", ignore=SKIP))


def run(command: list[str], cwd: Path, typed: str = "", **environment: str | None) -> subprocess.CompletedProcess:
    """Runs a python command offline and on one thread. `typed` is its standard input. A variable of `environment` that
    is None is removed."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "120", **environment}
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={name: value for name, value in env.items() if value is not None},
        input=typed,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return copy_project(tmp_path_factory.mktemp("scripts"))


@pytest.fixture
def flags(start_model, reward_folder, pairs_file) -> list[str]:
    words = ["--actor-model", start_model, "--rm-model", reward_folder, "--prompts", pairs_file, "--num-iterations", 3,
             "--max-new-tokens", 8, "--eval-every", 2, "--allow-weak-reward-model"]  # fmt: skip
    return [str(word) for word in words]


SCRIPTS = [*sorted(path.name for path in ROOT.glob("*.py") if path.name != "config.py"), "reward_model/train.py"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_start_if_python_does_not_search_their_folder(script, tmp_path):
    """With PYTHONSAFEPATH, which some clusters and containers set, as with `python -I`."""
    done = run([str(ROOT / script), "--help"], tmp_path, PYTHONSAFEPATH="1")
    assert done.returncode == 0 and done.stdout.startswith("usage"), done.stderr


ALONE = ([], "4 prompts = 4 episodes per update; minibatches")
GROUPS = (["--K", "2", "--batch-size", "2"], "2 prompts x 2 completions = 4 episodes per update; minibatches")
OTHER_ALGORITHMS = [pytest.param(name, marks=pytest.mark.ci) for name in ALGORITHMS if name != "ppo"]


@pytest.mark.parametrize("algorithm", ["ppo", *OTHER_ALGORITHMS])
def test_a_run_from_start_to_saved_model(project, forks, flags, algorithm):
    """PPO in a new process."""
    more, batch = ALONE if ALGORITHMS[algorithm].group_size == 1 else GROUPS
    script = f"train_{algorithm}.py"
    flags = [*flags, *more]
    name = f"{algorithm}_training_output"
    done = run([script, *flags], project) if algorithm == "ppo" else forks.run([script, *flags], project)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no warnings, progress bars or retries of libraries"
    assert "{'" not in done.stdout, "no raw dictionaries"
    for words in ("first prompt with special tokens: '<|im_start|>", batch,
                  "update 3/3 | score", "/sequence (target 6) | beta", "tokens/s", "evaluation after update 0",
                  "random evaluation prompts", "before -> after",
                  "add other runs after this one"):  # fmt: skip
        assert words in done.stdout
    for part in ("3 updates x 4 = 12 ", "tensorboard --logdir"):
        assert done.stdout.count(part) == 1
    output = project / name
    log = json.loads((output / "run.json").read_text())
    assert (log["status"], log["algorithm"]) == ("finished", algorithm)
    assert log["plan"] == {"updates": 3, "episodes": 12, "optimizer_steps": 12, "completion_tokens_at_most": 96}
    spent = log["spent"]
    assert (spent["updates"], spent["episodes"], spent["optimizer_steps"]) == (3, 12, 12)
    assert 12 <= spent["completion_tokens"] <= 96 and log["figures"]["perplexity_text"].startswith("19 ")
    time = log["time"]
    assert all(time[part] > 0 for part in (
        "imports", "checks", "models and data", "sampling", "scoring", "log-probs", "optimizer steps",
        "evaluation/sampling", "evaluation/log-probs", "evaluation/scoring", "evaluation/perplexity",
        "checkpoints/copy", "checkpoints/hash", "checkpoints/write", "checkpoints/sync",
        "best/write", "final save/write",
    ))  # fmt: skip
    # at least 95% of the time has a name; a fork, which imports nothing, takes only a second
    assert time["other"] <= max(0.05 * sum(time.values()), 0.25)
    assert log["best"]["update"] in (0, 2, 3) and (output / "best" / "model.safetensors").is_file()
    assert sorted(p.name for p in (output / "samples").iterdir()) == [f"update-00000{n}.jsonl" for n in (0, 2, 3)]
    events = EventAccumulator(str(output / "logs"), size_guidance={"scalars": 0}).Reload()
    assert {"loss", "rewards/mean", "kl_divergence", "learning_rate", "eval/score"} <= set(events.Tags()["scalars"])
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3]
    assert [e.step for e in events.Scalars("eval/score")] == [0, 2, 3]


@pytest.mark.ci
def test_several_seeds_in_one_command(flags, tmp_path, monkeypatch, capsys):
    """Runs two seeds, then three: finished seeds are skipped, and the table has all of them."""
    import train_grpo

    monkeypatch.chdir(tmp_path)
    few = [*flags, "--num-iterations", "1", "--K", "2", "--batch-size", "2", "--output", "many"]
    train_grpo.main([*few, "--seeds", "1", "2"])
    printed = capsys.readouterr().out
    assert "GRPO, 2 seeds" in printed and "standard deviation" in printed
    train_grpo.main([*few, "--seeds", "1", "2", "3"])
    printed = capsys.readouterr().out
    assert "GRPO, 3 seeds" in printed
    assert " many_seed2 (" in printed, "skipped"
    rises = json.loads((tmp_path / "many_seeds.json").read_text())["figures"]["score_rise_in_start_sd"]
    assert list(rises["by_seed"]) == ["1", "2", "3"] and rises["sd"] is not None


def test_training_scripts_differ_only_in_the_algorithms_name():
    ppo = (ROOT / "train_ppo.py").read_text()
    for name, row in ALGORITHMS.items():
        text = (ROOT / f"train_{name}.py").read_text()
        assert text.replace(row.label, "PPO").replace(name, "ppo") == ppo, "only the algorithm's name differs"


@pytest.mark.ci
def test_all_algorithms_plan_the_same_budget(project, forks, flags):
    plans = []
    at = flags.index("--num-iterations")
    flags = [*flags[:at], *flags[at + 2 :]]
    for algorithm, row in ALGORITHMS.items():
        more = ["--batch-size", "4"] if row.group_size == 1 else GROUPS[0]
        done = forks.run([f"train_{algorithm}.py", *flags, *more, "--episodes", "30", "--dry-run"], project)
        assert done.returncode == 0, done.stderr
        plans.append(next(line for line in done.stdout.splitlines() if line.startswith("  budget")))
    assert len(plans) == len(ALGORITHMS) and len(set(plans)) == 1
    assert "8 updates x 4 = 32 episodes (--episodes 30, " in plans[0] and "), 32 optimizer steps" in plans[0]


def test_unfinished_run_is_not_overwritten(project, forks, flags):
    folder = project / "mine"
    folder.mkdir()
    (folder / "run.json").write_text('{"status": "running"}')
    done = forks.run(["train_ppo.py", *flags, "--output", "mine"], project)
    assert done.returncode == 2
    assert all(part in done.stderr for part in (": --output mine. ", "--resume", "--overwrite"))
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


ERRORS = {
    "no model folder": (["--actor-model", "./nowhere"], ": ./nowhere"),
    "no reward model folder": (["--rm-model", "./nowhere"], ": --rm-model ./nowhere. "),
    "no prompts file": (["--prompts", "nowhere.jsonl"], ": nowhere.jsonl"),
    "no hub": (["--actor-model", "someone/model"], ": someone/model ("),
    "no prompt fits": (["--prompt-length", "3"], "--prompt-length"),
    "a weak reward model": (["--no-allow-weak-reward-model", "--rm-model", "weak"], "weak"),
}  # fmt: skip


# tests/scripts/test_bad_inputs.py tests all errors without a process for each
@pytest.mark.ci
@pytest.mark.parametrize("what", ERRORS)
def test_errors_are_one_line_with_exit_status_2(project, forks, flags, reward_folder, what):
    weak = project / "weak"
    if not weak.exists():
        shutil.copytree(reward_folder, weak)
        (weak / "metrics.json").write_text('{"accuracy": 0.4, "length_baseline": 0.5, "calibration": {}}')
    more, part = ERRORS[what]
    done = forks.run(["train_ppo.py", *flags, "--output", "unused", *more], project)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and part in done.stderr and done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert not (project / "unused").exists()


@pytest.mark.ci
def test_prompts_that_do_not_parse_are_reported_by_line(project, forks, flags):
    (project / "bad.jsonl").write_text('{"prompt": "fine"}\n' + "{oops\n" * 12)
    done = forks.run(["train_ppo.py", *flags, "--output", "unused", "--prompts", "bad.jsonl"], project)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[0].startswith("error: ") and "bad.jsonl:2" in lines[0]
    assert len(lines) == 6 and lines[-1] == "and 7 more"


@pytest.mark.ci
def test_training_works_on_a_cp1252_console(project, flags):
    """An encoding of Windows consoles. The second run moves the folder of the first one."""
    for _ in range(2):
        done = run(["train_ppo.py", *flags, "--output", "cp1252", "--overwrite"], project, PYTHONIOENCODING="cp1252")
        assert done.returncode == 0, done.stderr
    assert " cp1252_1\n" in done.stdout


def test_failing_reward_function_ends_the_run_with_status_1(build, capsys):
    from rlhf.utils.errors import run_command

    def broken(completions, **_):
        return [float("nan")] * len(completions)

    trainer = build(rewards=[broken])
    with pytest.raises(SystemExit) as ended:
        run_command(trainer.train)
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert "nan" in error and "'broken'" in error
