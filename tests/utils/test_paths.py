"""Tests that `~` is the home folder wherever a path enters, so that no folder with this name is ever created."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.api import make_trainer
from rlhf.checkpoints.run_record import RunRecord
from rlhf.commands.plot import output_files
from rlhf.config import make_config, parse_cli
from rlhf.settings.evaluation import (
    ComparisonConfig,
    EvaluationConfig,
    ExportConfig,
    PlotConfig,
    parse_comparison_cli,
    parse_plot_cli,
)
from rlhf.settings.fields import settings_of
from rlhf.settings.reward_model import RewardModelConfig, parse_reward_cli
from rlhf.settings.training import Config
from rlhf.settings.types import PathName
from rlhf.utils.files import check_folder
from rlhf.utils.paths import local_path, text_on_page
from tests.test_structure import PACKAGE, module_of

COMMANDS = (Config, RewardModelConfig, EvaluationConfig, ComparisonConfig, PlotConfig, ExportConfig)
# settings with text that is no path
TEXTS = {
    *("dataset_config", "dataset_split", "lora_targets", "keywords", "best_rule"),
    *("reward_func", "eval_func"),  # FILE.py:NAME, whose file is expanded when it is read
}


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """The home folder. The current folder is another one."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


def from_flags(**settings) -> Config:
    return parse_cli([word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)])


def from_yaml(**settings) -> Config:
    Path("settings.yaml").write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))
    return parse_cli(["--config", "settings.yaml"])


def from_user_file(**settings) -> Config:
    Path("config.py").write_text("".join(f"{name} = {value!r}\n" for name, value in settings.items()))
    return parse_cli([], user_file=Path("config.py"))


def from_python(**settings) -> Config:
    return make_config(**settings)


@pytest.mark.parametrize("read", [from_flags, from_yaml, from_user_file, from_python])
def test_a_setting_means_the_same_in_every_place(home, read):
    config = read(output="~/run", actor_model="~/start", prompts="~/rows.jsonl", eval_text="./~/text")
    found = (config.run.output, config.model.actor_model, config.data.prompts, config.data.eval_text)
    assert found == (f"{home}/run", f"{home}/start", f"{home}/rows.jsonl", "./~/text")


def test_every_setting_with_a_path_has_its_type():
    """A new setting with text is a path, or is added to TEXTS."""
    for command in COMMANDS:
        for setting in settings_of(command).values():
            if setting.choices is None and "str" in str(setting.type):
                assert setting.name in TEXTS, f"{command.__name__}: {setting.name}"
    assert sum(PathName.__name__ in str(s.type) for command in COMMANDS for s in settings_of(command).values()) > 20


def test_outputs_of_the_other_commands_are_in_the_home_folder(home):
    assert parse_reward_cli(["--rm-output", "~/judge"]).training.rm_output == f"{home}/judge"
    assert parse_comparison_cli(["~/a", "~/b", "--output", "~/out"]).comparison.output == f"{home}/out"
    assert parse_comparison_cli(["~/a", "~/b"]).comparison.runs == (f"{home}/a", f"{home}/b")
    assert output_files(parse_plot_cli(["--output", "~/plot"]).plot.output) == (home / "plot.png", home / "plot.csv")
    assert check_folder("~/out") == home / "out"


def test_files_of_settings_and_recipes_are_found_in_the_home_folder(home):
    (home / "mine.yaml").write_text("gamma: 0.5\n")
    (home / "recipe.yaml").write_text("kind: recipe\ngamma: 0.25\n")
    assert parse_cli(["--config", "~/mine.yaml"]).critic.gamma == 0.5
    assert parse_cli(["--recipe", "~/recipe.yaml"]).critic.gamma == 0.25


def test_a_run_from_python_is_in_the_home_folder(home, start_model):
    settings = {"batch_size": 2, "max_new_tokens": 4, "num_iterations": 1, "ppo_epochs": 1, "rm_model": "none"}
    config = make_config(actor_model=str(start_model), reward_func=["length_penalty"], **settings)
    trainer = make_trainer(config, ["a cat?", "a dog?"], output="~/run", progress=False)
    trainer.train()
    trainer.save_model("~/model")
    trainer.load_model("~/model")
    assert RunRecord.read(home / "run").status == "finished" and (home / "model" / "model.safetensors").is_file()
    assert not list(Path().iterdir()), "nothing is in the current folder"


def test_the_home_folder_of_an_unknown_user_is_refused(home, user_error):
    with user_error("~nobody9/x"):
        local_path("~nobody9/x")
    for read in (from_flags, from_yaml, from_python):
        with user_error("'~nobody9/x'"):
            read(output="~nobody9/x")
    assert local_path("./~nobody9") == "./~nobody9" and local_path("owner/name~1") == "owner/name~1"


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("**/*.py")), ids=module_of)
def test_one_function_expands_the_home_folder(path):
    of_a_variable = "rlhf.checkpoints.gguf"  # HF_HOME, as transformers reads it
    uses = "expanduser" in path.read_text(encoding="utf-8")
    assert not uses or module_of(path) in ("rlhf.utils.paths", of_a_variable)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("the data of /disk/user/runs/one and /disk/x.json: gone", "the data of runs/one and disk/x.json: gone"),
        ("KL 0.2/sequence, owner/name/x, a / b, ./here/is/it", "KL 0.2/sequence, owner/name/x, a / b, ./here/is/it"),
        ("warning (--prompts '/disk/user/a/b.jsonl')", "warning (--prompts 'a/b.jsonl')"),
        ("base /home/a/.cache/hub/models--owner--a-model/snapshots/0a1b", "base owner/a-model"),
        ("/home/a/.cache/hub/models--gpt2/snapshots/0a1b", "snapshots/0a1b"),
    ],
)
def test_a_text_on_a_page_has_no_path_of_this_machine(text, shown):
    assert text_on_page(text) == shown
