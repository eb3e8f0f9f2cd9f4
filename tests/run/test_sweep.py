"""Tests --sweep: the combinations, their folders, what is refused, the table, resuming; and the example of a tuner."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf.checkpoints.run_record import RunRecord
from rlhf.commands.train import train_command
from rlhf.config import parse_cli
from rlhf.run import parallel_seeds, sweep
from rlhf.run.sweep import folder_parts, points_of
from rlhf.utils import libraries
from rlhf.utils.console import Screen
from rlhf.utils.errors import RunError
from rlhf.utils.system import WINDOWS
from tests.documents import ROOT, python_block


def flags_of(command: str) -> list[str]:
    """Returns the arguments of a printed command."""
    words = shlex.split(command)
    return words[next(i for i, word in enumerate(words) if word.startswith("-")) :]


def points(*words: str, algorithm: str = "ppo") -> list[sweep.Point]:
    argv = ["--recipe", "demo", "--output", "out", *words]
    return points_of(parse_cli(argv, algorithm), argv)


def test_grid_has_every_combination_and_the_last_setting_changes_fastest():
    found = points("--sweep", "learning_rate=1e-5,3e-5", "kl-target=3/sequence,6/sequence", "--seeds", "1", "2")
    assert [point.name for point in found] == [
        f"learning_rate {rate}, kl_target {target}/sequence" for rate in ("1e-05", "3e-05") for target in (3, 6)
    ]
    assert [point.config.optimizer.learning_rate for point in found] == [1e-5, 1e-5, 3e-5, 3e-5]
    assert [str(point.config.kl.targets[0]) for point in found] == ["3/sequence", "6/sequence"] * 2
    assert list(map(str, found[1].folders.values())) == [
        f"out_learning_rate=1e-05_kl_target=6-sequence_seed{seed}" for seed in (1, 2)
    ]
    assert not any(point.config.run.sweep for point in found)


def test_names_of_other_trainers_have_their_meaning():
    """A length replaces the recipe's length, and target is in nats per sequence."""
    found = points("--sweep", "num_train_epochs=1,2", "target=5")
    assert [point.config.run.epochs for point in found] == [1, 2] and found[0].config.run.episodes is None
    assert found[0].settings == {"epochs": "1.0", "kl_target": "5/sequence"}


def test_values_of_a_list_are_separated_by_spaces():
    found = points("--kl-schedule", "phased", "--sweep", "kl_target=3/sequence 1/sequence,4/sequence 2/sequence")
    assert [point.settings["kl_target"] for point in found] == ["3/sequence 1/sequence", "4/sequence 2/sequence"]
    rules = points("--sweep", "reward_func=length_penalty keyword_bonus,keyword_bonus")
    assert [point.config.reward.reward_func for point in rules] == [
        ("length_penalty", "keyword_bonus"), ("keyword_bonus",),
    ]  # fmt: skip


def test_powershell_splits_an_argument_at_its_commas():
    assert len(points("--sweep", "learning_rate=1e-5", "3e-5", "1e-4", "gamma=1", "0.99")) == 6


def test_the_flag_can_be_repeated():
    found = points("--sweep", "learning_rate=1e-5,3e-5", "--seeds", "1", "--sweep", "gamma=1,0.99")
    assert [point.name for point in found[:2]] == ["learning_rate 1e-05, gamma 1.0", "learning_rate 1e-05, gamma 0.99"]
    assert len(found) == 4


def test_the_printed_command_resumes_without_replacing():
    argv = ["--overwrite", "true", "--resume=false", "--no-overwrite", "--output", "out", "--overwrite"]
    config = parse_cli(["--recipe", "demo", "--sweep", "gamma=1,0.9"])
    assert flags_of(sweep.resume_of(config, argv)) == ["--output", "out", "--resume"]


def test_one_combination_is_counted_in_the_singular(capsys):
    sweep.show_grid(points("--sweep", "gamma=0.9"), Screen())
    assert "sweep: 1 combination x 1 seed = 1 run\n" in capsys.readouterr().out.replace(" \n", "\n")


def test_a_setting_of_one_algorithm():
    assert [point.config.batch.K for point in points("--sweep", "K=2,4", algorithm="grpo")] == [2, 4]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["learning_rate=x"], ["learning_rate is 'x': --sweep learning_rate=x. "]),
        (["learning_rate=1e-5,-1"], ["learning_rate is -1: --sweep learning_rate=-1. "]),
        (["lerning_rate=1"], [" lerning_rate: --sweep lerning_rate=1. ", " learning_rate?"]),
        (["dynamic_sampling=1,2"], ["train_grpo.py", "train_rloo.py: --sweep dynamic_sampling=1,2. "]),
        (["seed=1,2"], ["seed ", ": --sweep seed=1,2. "]),
        (["seeds=1,2"], ["seeds ", ": --sweep seeds=1,2. "]),
        (["output=a,b"], ["output ", ": --sweep output=a,b. "]),
        (["keep=1,2"], ["keep ", ": --sweep keep=1,2. "]),
        (["resume=true,false"], ["resume ", ": --sweep resume=true,false. "]),
        (["dry_run=true"], ["dry_run ", ": --sweep dry_run=true. "]),
        (["eval_func=length_penalty"], ["eval_func ", ": --sweep eval_func=length_penalty. "]),
        (["recipe=demo,phased-kl"], ["recipe ", ": --sweep recipe=demo,phased-kl. "]),
        (["learning_rate"], ["'learning_rate'", "NAME=VALUE,VALUE: --sweep. "]),
        (["learning_rate=1,,2"], ["'learning_rate=1,,2'", "NAME=VALUE,VALUE: --sweep. "]),
        (["learning_rate=1", "learning-rate=2"], [": --sweep learning-rate=2 and --sweep learning_rate. "]),
        (["learning_rate=1", "--learning-rate", "2"], ["learning_rate ", " and --learning-rate. "]),
        (["episodes=64,128", "--num-iterations", "3"], [": --sweep episodes=64,128 and --num-iterations. "]),
        (["num_iterations=2,3", "epochs=1,2"], [" and --sweep num_iterations. "]),
        (["micro_batch_size=8,16", "--fit", "8GB"], [" micro_batch_size: --fit, --sweep micro_batch_size"]),
        (["gamma=1,0.9", "--push-to-hub", "a/b"], [": --sweep, --push-to-hub a/b"]),
        (["learning_rate=1e-5,0.00001"], [": --sweep, learning_rate=1e-05. "]),
        (
            ["batch_size=64,63", "--minibatches", "2"],
            ["minibatches 2 ", " batch_size 63: --minibatches, with --sweep batch_size=63. "],
        ),
        (["learning_rate=1", "--check"], [": --sweep, --check. "]),
    ],
)
def test_wrong_sweeps(words, parts, user_error):
    with user_error(*parts):
        points("--sweep", *words)


def test_a_launcher_is_refused(monkeypatch, user_error):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with user_error("--sweep"):
        points("--sweep", "learning_rate=1e-5,3e-5")


def test_folders_have_only_characters_that_shells_and_windows_allow():
    paths = [{"actor_model": value} for value in ("./a b/c", r"C:\m\x", "./A B/C", "f(a=1,b=2)", "x" * 300)]
    parts = folder_parts(paths)
    assert len({part.casefold() for part in parts}) == 5, "./a b/c and ./A B/C are the same folder on Windows"
    assert all(len(part) < 140 and not set(part) & set('<>:"/\\|?*, ()') for part in parts)
    assert parts[1] == "actor_model=C-m-x"


# --- training, with a process that only writes run.json --------------------------------------------------------------

PRETENDS = """
import os, pickle, sys
sys.path[:] = {path!r}
sys.argv, config = pickle.load(sys.stdin.buffer)
from pathlib import Path
from rlhf.algorithms.kl_control import with_horizon
from rlhf.checkpoints.run_log import RunLog
from rlhf.utils.errors import RunError, run_command
from tests.records import facts_of

def train():
    folder, rate, seed = Path(config.run.output), config.optimizer.learning_rate, config.run.seed
    folder.mkdir(parents=True, exist_ok=config.run.resume)
    print("update 1 |", flush=True)
    print("warning: a tracker", os.environ.get("LOCAL_RANK"), flush=True)
    with RunLog(folder, **facts_of(with_horizon(config, 2))) as log:
        if rate == 2e-5 and seed == 2 and not config.run.resume:
            raise RunError("a test")
        log.add(figures=dict(score_rise_in_start_sd=seed * rate * 1e5, kl_last_10_updates=rate * 1e5, seconds=60.0,
                             gold_after=0.5, kl_unit="nats/sequence", **{{"eval/right_after": 0.25}}))

run_command(train)
"""


@pytest.fixture
def pretended(monkeypatch, tmp_path):
    """Returns a function that runs `train_ppo.py --sweep` in tmp_path. Its processes train nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parallel_seeds, "CHILD", PRETENDS)
    monkeypatch.setattr(parallel_seeds, "visible_gpus", lambda: [])
    monkeypatch.setattr(parallel_seeds, "build_demo", lambda *_: None)
    monkeypatch.setattr(sweep, "build_demo", lambda *_: None)
    monkeypatch.setattr(sweep, "check_inputs", lambda *_: None)
    grid = ["--sweep", "learning_rate=1e-5,2e-5", "--seeds", "1", "2"]
    return lambda *flags: train_command("ppo", ["--recipe", "demo", "--output", "out", *grid, *flags])


def test_a_failed_run_is_reported_the_others_finish_and_resume_trains_it_again(pretended, capsys, user_error):
    with user_error("learning_rate 2e-05, seed 2: a test", kind=RunError):
        pretended("--parallel")
    printed = capsys.readouterr().out
    (again,) = [line.split(": ", 1)[1] for line in printed.splitlines() if line.startswith("train the failed runs")]
    assert again.endswith("--parallel --resume")
    statuses = [RunRecord.read(path).status for path in sorted(Path().glob("out_*_seed?"))]
    assert statuses == ["finished", "finished", "finished", "failed"]
    train_command("ppo", flags_of(again))
    printed = capsys.readouterr().out
    assert printed.count("already finished") == 3 and "learning_rate 2e-05, seed 2: finished" in printed


def test_table_and_json_have_means_over_seeds(pretended, capsys, monkeypatch, snapshot):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(RunError):
        pretended()
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("training 4 runs, ")]
    snapshot(line, varying=r"(?<=each on: ).*")  # one after another without --parallel
    table = json.loads(Path("out_sweep.json").read_text(encoding="utf-8"))
    one, other = table["combinations"]
    assert (table["algorithm"], table["recipe"], one["settings"]) == ("ppo", "demo", {"learning_rate": "1e-05"})
    assert one["figures"]["score_rise_in_start_sd"] == {
        "by_seed": {"1": 1.0, "2": 2.0}, "mean": 1.5, "sd": pytest.approx(0.5**0.5),
    }  # fmt: skip
    assert other["runs"]["2"] == {"output": "out_learning_rate=2e-05_seed2", "status": "failed"}
    assert other["figures"]["score_rise_in_start_sd"] == {"by_seed": {"1": 2.0}, "mean": 2.0, "sd": None}
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│ 1e-05" in line]
    assert cells[-1][:3] == ["1e-05", "2 of 2", "+1.50 (0.71)"] and "1:00 (0 s)" in cells[-1][-1]
    folders = "out_learning_rate=1e-05_seed1 out_learning_rate=1e-05_seed2 out_learning_rate=2e-05_seed1"
    assert len(re.findall(rf"(?:compare|plot)\S* {re.escape(folders)}\n", printed)) == 2


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (["temperature=0.7,1"], "--temperature 0.7"),
        (["gamma=1,0.9"], "run"),
        (["actor_model=./a,./b", "rm_model=./c,./d"], "--baseline ./a --rm-model ./c"),
        (["reward_func=length_penalty keyword_bonus,keyword_bonus"], "--reward-func length_penalty keyword_bonus"),
        (["keywords=a,b", "--reward-func", "keyword_bonus"], "cannot use one value of keywords for all runs"),
    ],
)
def test_the_printed_comparison_has_one_value_of_what_decides_completions_and_scores(words, end, capsys):
    config = parse_cli(["--recipe", "demo", "--sweep", *words])
    unequal = [name for name in (word.partition("=")[0] for word in words) if name in sweep.MEASURED_WITH]
    sweep.show_next(["run"], config, Screen(), unequal)
    assert "".join(capsys.readouterr().out.splitlines()).endswith(end)


def test_warnings_of_the_processes_are_printed_and_a_launcher_of_one_process_is_hidden_from_them(
    pretended, capsys, monkeypatch
):
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(RunError):
        pretended()
    printed = capsys.readouterr().out.splitlines()
    assert printed.count("learning_rate 1e-05, seed 1: warning: a tracker None") == 1
    assert sum("warning: a tracker None" in line for line in printed) == 4


def test_a_missing_tracker_is_refused_before_the_first_run(pretended, monkeypatch, tmp_path, user_error):
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    with user_error("--report-to wandb"):
        pretended("--report-to", "wandb")
    assert not list(tmp_path.iterdir())


@pytest.mark.ci
def test_resume_with_other_settings_is_refused(pretended, user_error):
    with pytest.raises(RunError):
        pretended()
    with user_error("gamma", "out_"):
        pretended("--resume", "--gamma", "0.9")
    with user_error("seed2", "--resume"):
        pretended()


def test_dry_run_prints_the_grid_and_the_plan_of_the_first_run(monkeypatch, tmp_path, capsys, snapshot):
    monkeypatch.chdir(tmp_path)
    flags = ["--sweep", "num_iterations=3,5", "learning_rate=1e-5,2e-5", "--seeds", "1", "2", "--dry-run"]
    train_command("ppo", ["--recipe", "demo", *flags])
    printed = capsys.readouterr().out
    (grid,) = [line for line in printed.splitlines() if "sweep: 4 " in line and " = 8 " in line]
    (plan,) = [line for line in printed.splitlines() if "the plan" in line]
    snapshot(grid, plan)
    assert not list(tmp_path.iterdir())
    first = sweep.first_run(points(*flags)).run
    assert first.num_iterations == 3 and first.seed == 1
    assert first.output == "out_num_iterations=3_learning_rate=1e-05_seed1"


# --- training --------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(start_model, reward_folder, pairs_file) -> list[str]:
    """Returns the flags of a short run."""
    return ["--actor-model", str(start_model), "--rm-model", str(reward_folder), "--prompts", str(pairs_file),
            "--batch-size", "4", "--save-every", "2", "--eval-every", "50", "--max-new-tokens", "8",
            "--prompt-length", "100", "--eval-prompts", "6", "--allow-weak-reward-model"]  # fmt: skip


@pytest.mark.ci
@pytest.mark.skipif(WINDOWS, reason="a test cannot send Ctrl-C to one process on Windows")
def test_ctrl_c_saves_all_runs_and_the_printed_command_resumes_them(tiny, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}

    def start(*flags: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "train_ppo.py"), *flags], cwd=tmp_path, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True, env=environment,
        )  # fmt: skip

    process = start(
        *tiny, "--num-iterations", "60", "--sweep", "learning_rate=1e-4,1e-3", "--parallel", "--output", "s"
    )
    folders, until = (
        [tmp_path / f"s_learning_rate={rate}_seed42" for rate in ("0.0001", "0.001")],
        time.monotonic() + 120,
    )
    while not all(list(folder.glob("checkpoint-*[0-9]")) for folder in folders):
        assert process.poll() is None and time.monotonic() < until, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and [RunRecord.read(f).status for f in folders] == ["stopped"] * 2, printed
    (resume,) = [line.split(": ", 1)[1] for line in printed.splitlines() if line.startswith("stopped. Resume with")]
    process = start(*flags_of(resume))
    printed = process.communicate(timeout=200)[0]
    assert process.returncode == 0 and "2 combinations: " in printed, printed
    assert [RunRecord.read(folder).spent.updates for folder in folders] == [60, 60]


def random_search(settings: random.Random) -> SimpleNamespace:
    """Returns a stand-in for the part of optuna that the example uses."""

    def suggest_float(name: str, low: float, high: float, log: bool = False) -> float:
        return settings.uniform(low, high)

    def create_study(direction: str) -> SimpleNamespace:
        study = SimpleNamespace(values=[])

        def optimize(objective, n_trials: int) -> None:
            for number in range(n_trials):
                study.values.append(objective(SimpleNamespace(number=number, suggest_float=suggest_float)))
            study.best_value, study.best_params = max(study.values), {}

        study.optimize = optimize
        return study

    return SimpleNamespace(create_study=create_study)


@pytest.mark.ci
def test_the_example_of_a_tuner_runs(tiny, tmp_path, monkeypatch, capsys):
    """The page's code with one short trial; without optuna, with a random search in its place."""
    block = python_block("import optuna")
    assert len(block.strip().splitlines()) <= 20
    recipe, trials = '"--recipe", "demo"', "n_trials=20"
    assert recipe in block and trials in block and '"gold_after"' in block
    block = block.replace(recipe, ", ".join(map(repr, [*tiny, "--num-iterations", "2"])))
    block = block.replace(trials, "n_trials=1").replace('"gold_after"', '"score_after"')
    block = block.replace('"train_ppo.py"', repr(str(ROOT / "train_ppo.py")))
    monkeypatch.chdir(tmp_path)
    try:
        import optuna  # noqa: F401
    except ImportError:
        monkeypatch.setitem(sys.modules, "optuna", random_search(random.Random(0)))
    exec(block, {"__name__": "__main__"})
    runs = sorted(tmp_path.glob("tuning_*"))
    scores = [RunRecord.read(run).figures["score_after"] for run in runs]
    assert len(runs) == 1 and str(max(scores)) in capsys.readouterr().out


def test_the_screen_shows_a_sweep_without_a_finished_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = points("--sweep", "learning_rate=1e-5,3e-5")
    sweep.show_sweep(found, found[0].config, Screen())
    assert "0 of 1" in capsys.readouterr().out
