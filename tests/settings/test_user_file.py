"""Tests the root config.py: the user's settings, which apply to the default recipe only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import train_ppo
from rlhf.algorithms.table import ALGORITHMS
from rlhf.checkpoints.run_log import RunLog
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import make_config, parse_cli, usual_config
from rlhf.settings.next_commands import reward_model_line, training_command
from rlhf.settings.reward_model import parse_reward_cli
from rlhf.settings.user_file import read_user_file
from rlhf.utils.errors import UserError
from tests.conftest import typed
from tests.records import facts_of
from tests.settings.test_help import shown
from tests.systems import make_link, words_of

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "config.py"


@pytest.fixture
def write(tmp_path):
    """Writes a config.py; returns its path."""

    def write(text: str) -> Path:
        (tmp_path / "config.py").write_text(text)
        return tmp_path / "config.py"

    return write


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_shipped_file_equals_the_declared_defaults(algorithm):
    assert parse_cli([], algorithm, SHIPPED) == parse_cli([], algorithm)
    assert parse_cli(["--kl-schedule", "phased"], algorithm, SHIPPED) == parse_cli(
        ["--kl-schedule", "phased"], algorithm
    )


def test_shipped_file_is_short_and_has_the_common_settings():
    settings = read_user_file(SHIPPED, ())
    assert 20 <= len(settings) <= 30 and len(SHIPPED.read_text(encoding="utf-8").splitlines()) <= 55
    assert {"clip_range", "kl_target", "gamma", "lam", "max_new_tokens", "learning_rate"} <= set(settings)


def test_shipped_file_also_applies_to_the_reward_model():
    assert parse_reward_cli([], SHIPPED) == parse_reward_cli([])


def test_order_of_the_layers(write, tmp_path):
    """Declared defaults, config.py, --config, flags."""
    file = write("clip_range = 0.1\ngamma = 0.9\nlam = 0.8\n")
    (tmp_path / "a.yaml").write_text("gamma: 0.7\nlam: 0.6\n")
    config = parse_cli(["--config", str(tmp_path / "a.yaml"), "--lam", "0.5"], user_file=file)
    assert (config.batch.clip_range, config.critic.gamma, config.critic.lam) == (0.1, 0.7, 0.5)
    assert parse_cli(["--recipe", "smollm2-orca"], user_file=file).batch.clip_range == 0.1
    assert parse_cli(["--recipe", "demo"], user_file=file).batch.clip_range == 0.2, "another recipe replaces the file"
    (tmp_path / "demo.yaml").write_text("recipe: demo\n")
    assert parse_cli(["--config", str(tmp_path / "demo.yaml")], user_file=file).batch.clip_range == 0.2


def test_allowed_contents(write):
    """Python code and other trainers' names. Names with an underscore, modules and functions are not settings."""
    config = parse_cli(
        user_file=write(
            "import math\n_half = 1 / 2\n\n\ndef f():\n    x = 1\n\n\n"
            "init_kl_coef: float = _half * 0.2\ntarget = 6.5\nper_device_train_batch_size = int(math.sqrt(64))\n"
            "if True:\n    lora_targets = ['q_proj']\nreward_func = ('length_penalty',)\nrm_model = None\n"
        ),
        argv=[],
    )
    assert (config.kl.kl_coef, config.batch.batch_size, config.model.lora_targets) == (0.1, 8, ("q_proj",))
    assert [str(t) for t in config.kl.targets] == ["6.5/sequence"] and config.model.rm_model is None


BAD = {
    "an unknown name": ("clip_rang = 0.2\n", ["clip_rang: ", "config.py:1", "clip_range"]),
    "out of range": ("seed = 1\nclip_range = 7\n", ["clip_range is 7: ", "config.py:2", "above 0", "below 1"]),
    "not Python": ("clip_range = 0.2\nseed = \n", ["(invalid syntax): ", "config.py:2"]),
    "an error": ("a = 1\nseed = 1 / 0\n", ["ZeroDivisionError (division by zero): ", "config.py:2"]),
    "an error in a function": ("def f():\n    return 1 / 0\nseed = f()\n", ["ZeroDivisionError", "config.py:2"]),
    "twice by its alias": ("lam = 1\ngae_lambda = 0.5\n", ["gae_lambda", "config.py:2 and ", "config.py:1"]),
    "not UTF-8": ("", ["UTF-8: ", "config.py, byte 0"]),
    "a return": ("seed = 1\nreturn\n", ["('return' outside function): ", "config.py:2"]),
    "an exit": ("import sys\nsys.exit()\n", ["SystemExit (): ", "config.py:2"]),
    "a function": ("def reward_func(completions):\n    return [1]\n", ["reward_func is <function ", "config.py:1"]),
    "a tuple": ("actor_model = './start',\n", ["actor_model is ('./start',): ", "config.py:1"]),
    "a huge number": ("max_prompts = 10**5000\n", ["max_prompts", "config.py:1"]),
    "a helper": ("base = './x'\n", ["base: ", "config.py:1", "with _"]),
    "settings that do not fit": (
        "kl_schedule = 'fixed'\nseed = 2\nkl_target = ['6/sequence', '3/sequence']\n",
        ["2 KL targets", "--kl-target 6/sequence 3/sequence (", "config.py:3)"],
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_an_error_is_one_line_with_file_and_line(what, write, user_error):
    text, parts = BAD[what]
    file = write(text)
    if what == "not UTF-8":
        file.write_bytes(b"\xff\xfe\x00")
    with user_error(*parts) as caught:
        parse_cli([], user_file=file)
    assert len(caught.value.problems) == 1


def test_settings_may_be_imported(write, tmp_path, monkeypatch):
    (tmp_path / "shared_settings.py").write_text("learning_rate = 2e-6\nother = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for line in ("from shared_settings import learning_rate", "from shared_settings import *"):
        assert parse_cli([], user_file=write(f"{line}\n")).optimizer.learning_rate == 2e-6


def test_error_in_a_value_that_a_flag_replaces_is_ignored(write, run_flags, monkeypatch, capsys):
    monkeypatch.setattr(train_ppo, "__file__", str(write("learning_rate = 'much'\n")))
    train_ppo.main(run_flags("--num-iterations", 2, "--learning-rate", "1e-4", "--dry-run"))
    assert plan_rows(capsys.readouterr().out) == ["edited (with errors)"]


def test_errors_of_file_and_flags_are_reported_together(write):
    with pytest.raises(UserError) as caught:
        parse_cli(["--lam", "x"], user_file=write("gamma = 2\nseeed = 1\n"))
    assert len(caught.value.problems) == 3


def edits_in(line: str) -> list[str]:
    """Return the settings that config.py changes, of a line that reports that config.py is not used."""
    return re.findall(
        r"(\w+) [^ ]+ \(default", line.partition("config.py: ")[2].partition("not used: --re")[0] or line
    )


def help_text(capsys, *words, algorithm="ppo", file=None) -> str:
    with pytest.raises(SystemExit) as ended:
        parse_cli(list(words), algorithm, file)
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_shows_edited_settings(write, capsys):
    file = write("learning_rate = 3e-6\nmax_new_tokens = 99\ngamma = 0.5\n")
    text = help_text(capsys, "--help", file=file)
    assert (shown(text, "--learning-rate"), shown(text, "--max-new-tokens")) == ("3e-06", "99")
    assert "recipe smollm2-orca; config.py: max_new_tokens 99 (default 128), gamma 0.5 (default 1.0), learning" in text
    assert "[3e-06, above 0]" in help_text(capsys, "--help-all", file=file)
    assert "gamma" not in help_text(capsys, "--help", algorithm="grpo", file=file), "GRPO does not read gamma"
    text = help_text(capsys, "--recipe", "demo", "--help", file=file)
    assert shown(text, "--learning-rate") == "0.0003"
    assert edits_in(text) == ["max_new_tokens", "gamma", "learning_rate"]
    assert "config.py" not in help_text(capsys, "--help", file=SHIPPED)


def test_errors_in_a_file_that_is_not_used_are_ignored(write, capsys):
    for text in ("clip_rang = 1\n", "learning_rate =\n", "import sys\nsys.exit()\n"):
        file = write(text)
        assert parse_cli(["--recipe", "demo"], user_file=file).recipe == "demo"
        assert parse_reward_cli(["--recipe", "demo"], file).recipe == "demo"
        text = help_text(capsys, "--recipe", "demo", "--help", file=file)


def test_resume_uses_the_output_folder_of_the_file(write, tmp_path, monkeypatch):
    """Settings and checkpoints come from the same run. A file with errors does not prevent resuming."""
    monkeypatch.chdir(tmp_path)
    for folder, rate in (("mine", 1e-3), ("ppo_training_output", 1e-4)):
        (tmp_path / folder).mkdir()
        config = make_config(learning_rate=rate)
        with RunLog(tmp_path / folder, **facts_of(config)):
            pass
    config = parse_cli(["--resume"], user_file=write("output = './mine'\n"))
    assert (config.run.output, config.optimizer.learning_rate) == ("./mine", 1e-3)
    config = parse_cli(["--resume"], user_file=write("learning_rate = 7\noutputt = './mine'\n"))
    assert (config.run.output, config.optimizer.learning_rate) == ("./ppo_training_output", 1e-4)
    config = parse_cli(["--resume"], user_file=write("learning_rate = \n"))
    assert config.optimizer.learning_rate == 1e-4


@pytest.mark.parametrize("place", ["config.py", "recipe"])
def test_reward_code_named_only_in_run_json_is_not_run(write, tmp_path, place, user_error):
    """The command line must name the code, also if config.py or the recipe names other code."""
    (tmp_path / "stranger").mkdir()
    with RunLog(tmp_path / "stranger", **facts_of(make_config(reward_func=["./evil.py:g"]))):
        pass
    words = ["--resume", "--resume-anyway", "--output", str(tmp_path / "stranger")]
    file = None
    if place == "config.py":
        file = write("reward_func = ['mine.py:f']\n")
    else:
        (tmp_path / "r.yaml").write_text("kind: recipe\nreward_func: ['mine.py:f']\n")
        words += ["--recipe", str(tmp_path / "r.yaml")]
    with user_error("--resume", "evil.py:g"):
        parse_cli(words, user_file=file)
    config = parse_cli([*words, "--reward-func", "./evil.py:g"], user_file=file)
    assert config.reward.reward_func == ("./evil.py:g",)


def test_reward_model_help_shows_the_shared_settings(write, capsys):
    file = write("temperature = 1.1\nclip_range = 0.1\n")
    with pytest.raises(SystemExit):
        parse_reward_cli(["--help"], file)
    text = " ".join(capsys.readouterr().out.split())
    assert text.endswith("recipe smollm2-orca; config.py: temperature 1.1 (default 0.7)")


def plan_rows(printed: str) -> list[str]:
    return [line.split(maxsplit=1)[1] for line in printed.splitlines() if line.strip().startswith("config.py ")]


def test_plan_shows_edited_settings_or_that_they_are_not_used(run_flags, write, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_ppo, "__file__", str(write("clip_range = 0.1\n")))
    words = run_flags("--num-iterations", 2)
    train_ppo.main([*words, "--dry-run"])
    assert plan_rows(capsys.readouterr().out) == ["clip_range 0.1 (default 0.2)"]
    train_ppo.main(words)
    assert RunRecord.read(tmp_path / "run").settings["batch"]["clip_range"] == 0.1
    capsys.readouterr()
    (tmp_path / "mine.yaml").write_text("kind: recipe\n")
    train_ppo.main([*words, "--dry-run", "--recipe", str(tmp_path / "mine.yaml"), "--overwrite"])
    (by_recipe,) = plan_rows(capsys.readouterr().out)
    assert edits_in(by_recipe) == ["clip_range"] and f"not used: --recipe {tmp_path / 'mine.yaml'}" in by_recipe
    write("clip_range = 0.3\nmax_grad_norm = 0.5\n")
    train_ppo.main(["--resume", "--resume-anyway", "--num-iterations", "3", "--output", str(tmp_path / "run")])
    (by_resume,) = plan_rows(capsys.readouterr().out)
    assert edits_in(by_resume) == ["clip_range", "max_grad_norm"] and "not used: --resume" in by_resume
    run = RunRecord.read(tmp_path / "run")
    assert run.settings["batch"]["clip_range"] == 0.1 and run.spent.updates == 3


def test_only_the_file_next_to_the_script_is_read(tmp_path):
    """Also if the command runs in another folder that has a config.py."""
    (tmp_path / "config.py").write_text("raise SystemExit('a config.py of another project')\n")
    project = tmp_path / "project"
    project.mkdir()
    for name in ("train_ppo.py", "rlhf", "reward_model"):
        make_link(project / name, ROOT / name)
    shutil.copy(ROOT / "train_ppo.py", project / "train_ppo.copy")
    (project / "train_ppo.py").unlink()
    (project / "train_ppo.copy").rename(project / "train_ppo.py")
    (project / "config.py").write_text("learning_rate = 7e-6\n")
    done = subprocess.run(
        [sys.executable, project / "train_ppo.py", "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and "config.py: learning_rate 7e-06" in done.stdout
    installed = (
        "from rlhf.commands.train import train_command; train_command('ppo', ['--help'])"  # as a console command
    )
    done = subprocess.run(
        [sys.executable, "-c", installed], cwd=project, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "config.py" not in done.stdout
    assert shown(" ".join(done.stdout.split()), "--learning-rate") == "5e-06"


def test_reward_model_uses_the_settings_that_both_commands_have(write, tmp_path):
    file = write("temperature = 1.1\nactor_model = './start'\nlearning_rate = 1e-4\nclip_range = 0.1\nseed = 7\n")
    made = parse_reward_cli([], file)
    assert (made.sampling.temperature, made.calibration.actor_model, made.training.base_model) == (
        1.1, "./start", "./start"
    )  # fmt: skip
    assert (made.training.rm_learning_rate, made.training.rm_seed) == (2e-5, 42), (
        "the policy's learning rate and seed are not used"
    )
    assert parse_reward_cli(["--recipe", "demo"], file).sampling.temperature == 1.0
    assert parse_reward_cli(["--base-model", "other"], file).training.base_model == "other"
    assert parse_reward_cli([], write("dataset = 'me/pairs'\n")).data.pairs == "me/pairs"
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "no pair"}\n')
    assert parse_reward_cli([], write(f"prompts = {str(tmp_path / 'prompts.jsonl')!r}\n")).data == made.data


def test_printed_commands_are_correct_with_an_edited_file(write, tmp_path):
    """Both commands use the settings of the file."""
    file = write("clip_range = 0.1\nactor_model = './start'\nsplit = '60/30/10'\nprompts = './pairs.jsonl'\n")
    config = parse_cli(["--clip-range", "0.2", "--split", "45/45/10"], user_file=file)
    made = parse_reward_cli(words_of(reward_model_line(config))[3:], file)
    assert (made.training.base_model, made.calibration.actor_model) == ("./start", "./start")
    assert str(made.data.split) == "45/45/10"
    usual = usual_config(made.recipe, made.user_file)
    again = parse_cli(typed(training_command(made, usual)), user_file=file)
    assert again.model.actor_model == "./start" and str(again.data.split) == "45/45/10"
    assert again.data.prompts == "./pairs.jsonl"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prompts = './pairs.jsonl'", ["--prompts", "Intel/orca_dpo_pairs"]),
        ("split = '60/30/10'", ["--split", "none"]),
        ("plain_prompts = True", ["--no-plain-prompts"]),
        ("actor_model = './start'", ["--actor-model", "./other"]),
        ("rm_model = './judge'", []),
    ],
)
def test_reward_model_command_includes_flags_that_replace_the_file(write, text, words):
    file = write(text + "\n")
    config = parse_cli(words, user_file=file)
    made = parse_reward_cli(words_of(reward_model_line(config))[3:], file)
    assert (made.data.pairs, made.data.split) == (config.data.prompts, config.data.split)
    assert made.data.plain_prompts == config.data.plain_prompts
    assert made.training.base_model == made.calibration.actor_model == config.model.actor_model
    assert made.training.rm_output == config.model.rm_model


def test_file_with_group_settings_works_for_the_reward_model(write):
    """The minibatches divide GRPO's 32 episodes but not PPO's 4."""
    file = write("batch_size = 4\nK = 8\nminibatches = 16\n")
    assert parse_cli([], "grpo", file).batch.minibatches == 16
    made = parse_reward_cli([], file)
    assert training_command(made, usual_config(made.recipe, made.user_file)) == "python train_ppo.py"


def test_a_lambda_is_no_setting(write):
    file = write("double = lambda x: 2 * x\nbatch_size = double(4)\n")
    assert parse_cli([], user_file=file).batch.batch_size == 8
