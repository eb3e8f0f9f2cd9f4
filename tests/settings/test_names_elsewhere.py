"""Tests names of other trainers: the accepted ones keep their meaning, and unknown ones get the nearest name here."""

from __future__ import annotations

import re

import pytest

from rlhf.algorithms.table import ALGORITHMS
from rlhf.config import command_line, make_config, parse_cli
from rlhf.settings.fields import name_table, settings_of
from rlhf.settings.training import Config
from rlhf.settings.translate import REMOVED
from rlhf.utils.errors import UserError
from tests.documents import ROOT

NAMES = name_table(settings_of(Config))
PAGE = "docs/coming_from_trl.md lists other trainers' names"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("learning_rat", "Did you mean --learning-rate?"),
        ("completely_unknown", f"--help-all lists all settings; {PAGE}"),
        ("actor_rollout_ref.actor.ppo_epochs", f"Did you mean --ppo-epochs? {PAGE}"),
        ("trainer.critic_warmup", f"Did you mean --critic-warmup? {PAGE}"),  # verl's counts one update more
    ],
)
def test_an_unknown_name_gets_the_nearest_one(name, answer):
    _, (problem,) = command_line(ALGORITHMS["ppo"]).read([f"--{name}", "1"])
    assert (problem.what, problem.place, problem.fix) == (f"unknown flag --{name}", "command line", answer)


def test_unknown_names_in_files_and_in_python_have_no_dashes(tmp_path, user_error):
    with user_error("make_config(kl_coeff=)", "kl_coef?") as error:
        make_config(kl_coeff=0.1)
    assert "--" not in str(error.value)
    file = tmp_path / "grpo.yaml"
    file.write_text("trainer:\n  max_new_token: 64\n")
    with user_error("max_new_token: ", ":2", "max_new_tokens?"):
        parse_cli(["--config", str(file)])


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_name_gets_its_advice_wherever_it_is_written(name, tmp_path):
    assert name not in NAMES
    advice = REMOVED[name].advice
    flag = name.replace("_", "-")
    files = {"a.yaml": f"{name}: 1", "config.py": f"{name} = 1"}
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    config_file, user_file = (tmp_path / file for file in files)
    ways = {
        f"--{flag}": lambda: parse_cli([f"--{flag}", "1"]),
        f"--no-{flag}": lambda: parse_cli([f"--no-{flag}"], "grpo"),
        f"--{name}": lambda: parse_cli([f"--{name}=1"], "rloo"),
        f"{config_file}:1": lambda: parse_cli(["--config", str(config_file)]),
        f"{user_file}:1": lambda: parse_cli([], "ppo", user_file),
        f"make_config({name}=)": lambda: make_config(**{name: 1}),
    }
    for place, way in ways.items():
        with pytest.raises(UserError) as caught:
            way()
        (problem,) = map(str, caught.value.problems)
        assert place in problem and problem.endswith(f". It was removed. {advice}")


def test_the_advice_names_flags_that_exist():
    flags = [word for one in REMOVED.values() for word in re.findall(r"--([a-z-]+)", one.advice)]
    assert flags and [flag for flag in flags if flag.replace("-", "_") not in NAMES] == []


def test_assignments_as_in_verl_get_the_flag():
    with pytest.raises(UserError) as caught:
        parse_cli(["+actor_rollout_ref.actor.ppo_epochs=4", "learning_rate=1e-5"])
    first, second = str(caught.value).split("\n")
    assert first.endswith(f"Settings are given as flags. Did you mean --ppo-epochs? {PAGE}")
    assert second.endswith("Did you mean --learning-rate?")


def test_a_kl_target_without_a_unit_is_accepted_only_if_its_unit_is_known(user_error):
    """verl's target_kl is per token, that of the documents with TRL's first PPO per completion."""
    with user_error("target_kl", "0.1"):
        parse_cli(["--target-kl", "0.1"])
    with user_error("target_kl", "0.1", "make_config"):
        make_config(target_kl=0.1)
    assert str(parse_cli(["--target-kl", "0.1/token"]).kl.targets[0]) == "0.1/token"
    assert str(parse_cli(["--init-kl-coef", "0.2", "--target-kl", "6"]).kl.targets[0]) == "6/sequence"
    assert str(make_config(target=6).kl.targets[0]) == "6/sequence", "a name of TRL's first PPO only"


def test_the_page_gives_kl_targets_and_beta_with_their_unit_and_place():
    text = (ROOT / "docs" / "coming_from_trl.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    (verl,) = (row for row in rows if "`kl_ctrl.target_kl`" in row)
    (openrlhf,) = (row for row in rows if "`--kl_target`" in row)
    assert "N/token" in verl and "N/token" in openrlhf and "sequence" not in verl + openrlhf
    (beta,) = (row for row in rows if row.startswith("| `beta`"))
    assert re.search(r"GRPO.*--kl-placement loss", beta) and re.search(r"RLOO.*--kl-placement reward", beta)


def test_names_of_other_trainers_that_are_accepted():
    names = (
        "optim weight_decay warmup_ratio epsilon_high gae_lambda vf_coef cliprange dataset_name num_train_epochs lr"
    )
    names = [*names.split(), "max_completion_length", "total_episodes", "num_ppo_epochs", "init_kl_coef"]
    assert [name for name in names if name not in NAMES] == []


# --- the page --------------------------------------------------------------------------------------------------------


def test_names_marked_as_the_same_on_the_page_are_accepted():
    text = (ROOT / "docs" / "coming_from_trl.md").read_text(encoding="utf-8").split("## PPOConfig, GRPOConfig")[1]
    rows = re.findall(r"^\| ([^|]*`[^|]*) \| same\b(?!, same|.*, in|.*, not)[^|]*\|$", text, re.MULTILINE)
    spans = [span for row in rows for span in re.findall(r"`([^`]+)`", re.sub(r"\([^)]*\)", "", row))]
    names = [span.rpartition(".")[-1].lstrip("-") for span in spans]
    assert len(names) > 25
    assert [name for name in names if name not in NAMES] == []
