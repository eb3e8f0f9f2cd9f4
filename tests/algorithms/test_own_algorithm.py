"""Tests algorithms of users: a class in their own file, from the command line and from Python."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import compare_runs
import evaluate_generations
import plot_training_progress
import train
from rlhf import make_config, make_trainer, register
from rlhf.algorithms.classes import CLASSES
from rlhf.algorithms.grpo import GRPO
from rlhf.algorithms.table import ALGORITHMS, Algorithm, label_of
from rlhf.analysis.groups import group_runs
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import config_of_run, parse_cli
from rlhf.settings.next_commands import resume_command
from rlhf.utils.command_lines import script_words
from tests.conftest import forget
from tests.systems import words_of

CODE = '''
"""GRPO with twice the score, and its own defaults."""

import torch  # as files of users do

from rlhf.algorithms.grpo import GRPO
from rlhf.algorithms.table import Algorithm


class Twice(GRPO):
    row = Algorithm(
        name="twice", label="Twice", title="GRPO with twice the score", group_size=2,
        settings=("scale_rewards",), defaults={"clip_range": 0.4}, refuses=("delta",),
    )

    def advantages(self, rollout, scores, kl_coef):
        return super().advantages(rollout, 2 * scores, kl_coef)
'''


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """Return the value of --algorithm for a class in a file, in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("twice.py").write_text(CODE)
    return "twice.py:Twice"


def in_groups(run_flags, *flags: object) -> list[str]:
    return run_flags("--batch-size", 2, "--save-every", 1, *flags)


# --- the row ---------------------------------------------------------------------------------------------------------


def test_a_row_reads_single_settings_and_has_defaults(own, tmp_path, user_error):
    def parsed(*words: str):
        return parse_cli([f"--algorithm={own}", *words], None)

    config = parsed()
    assert (config.algorithm, config.group_size, config.batch.clip_range) == ("twice", 2, 0.4)
    assert config.run.output == "./twice_training_output"
    assert parsed("--clip-range", "0.3", "--scale-rewards", "none").batch.clip_range == 0.3
    for value, used in ((0.2, 0.4), (0.1, 0.1)):  # config.py lists the declared defaults
        Path("config.py").write_text(f"clip_range = {value}\n")
        assert parse_cli([f"--algorithm={own}"], None, Path("config.py")).batch.clip_range == used
    with user_error("--loss-type", "train_grpo.py"):
        parsed("--loss-type", "cispo")  # in the same group as scale_rewards
    with user_error("--delta", "Twice"):
        parsed("--delta", "3")
    with user_error("--clip-ratio-c", "Twice"):  # another name of delta
        parsed("--clip-ratio-c", "3")
    with user_error("make_config(delta=)", "Twice", "'twice'"):
        make_config(algorithm="twice", delta=3.0)
    with user_error("--scale-rewards", "train_grpo.py", "train.py --algorithm twice.py:Twice"):
        parse_cli(["--scale-rewards", "none"], "ppo")
    (tmp_path / "shared.yaml").write_text("delta: 3\nloss_type: cispo\nscale_rewards: none\n")
    config = parsed("--config", "shared.yaml")  # files are shared, so other algorithms' settings are ignored
    assert (config.batch.delta, config.grpo.loss_type, config.grpo.scale_rewards) == (None, "dapo", "none")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"name": "two words"}, ["'two words'"]),
        ({"name": "grpo"}, ["'grpo'"]),
        ({"name": "plot"}, ["'plot'"]),
        ({"settings": ("scale_reward",)}, ["settings", "'scale_reward'", "scale_rewards?"]),
        ({"settings": ("clip_range",)}, ["settings", "'clip_range'"]),  # all algorithms read it
        ({"defaults": {"clip": 0.4}}, ["defaults", "'clip'"]),
        ({"greedy": 2}, ["greedy", "2"]),
        ({"refuses": ("loss_type", "deltas")}, ["refuses", "'loss_type'", "'deltas'", "delta?"]),
    ],
    ids=str,
)
def test_an_error_in_a_row_is_named(changed, words, user_error):
    class Wrong(GRPO):
        row = replace(Algorithm(name="wrong", label="Wrong", title="Wrong", group_size=2), **changed)

    before = dict(ALGORITHMS)
    with user_error("register(Wrong)", *words):
        register(Wrong)
    assert before == ALGORITHMS


def test_only_a_class_with_its_row_can_be_registered(user_error):
    class WithoutRow(GRPO):
        pass

    with user_error("register(WithoutRow)", "row"):
        register(WithoutRow)
    for wrong in (5, "grpo", dict, len):
        with user_error("register("):
            register(wrong)


# --- the command line ------------------------------------------------------------------------------------------------


def test_the_value_of_algorithm_is_checked(own, user_error, capsys):
    assert parse_cli([], None).algorithm == "ppo" and parse_cli(["--algorithm", "rloo"], None).algorithm == "rloo"
    for value, words in {
        "grop": ["mean grpo?"],
        "twice": ["FILE.py:CLASS"],
        "none.py:Twice": ["no such file"],
        "twice.py:Twic": ["twice.py", "mean Twice?"],
        "twice.py:Algorithm": ["methods"],
        "twice.py:GRPO": ["row"],
    }.items():
        with user_error("--algorithm", value, *words):
            parse_cli(["--algorithm", value], None)
    with user_error("--algorithm"):
        parse_cli(["--algorithm"], None)
    with user_error("unknown flag --algorithm"):
        parse_cli(["--algorithm", own], "grpo")
    Path("broken.py").write_text("import no_such_module\n")
    with user_error("--algorithm broken.py", "no_such_module"):
        parse_cli(["--algorithm", "broken.py:X"], None)
    with pytest.raises(SystemExit):
        parse_cli(["--algorithm", own, "--help"], None)
    text = capsys.readouterr().out
    assert "--algorithm twice.py:Twice --recipe demo" in text and "GRPO with twice the score" in text


def test_a_run_is_trained_and_resumed_with_the_same_file_only(own, run_flags, tmp_path, user_error):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train.main(in_groups(run_flags, "--algorithm", own, "--output", whole))
    record = json.loads((whole / "run.json").read_text())
    assert (record["algorithm"], record["status"]) == ("twice", "finished")
    assert record["row"]["source"] == own and len(record["data"]["algorithm_sha256"]) == 64
    assert record["settings"]["batch"]["clip_range"] == 0.4
    card = (whole / "README.md").read_text(encoding="utf-8")
    assert "Twice (GRPO with twice the score)" in card and "| `scale_rewards` |" in card and "| `delta` |" not in card
    shutil.copytree(whole, stopped)
    shutil.rmtree(stopped / "checkpoint-2")
    facts = record | {"status": "stopped"}
    (stopped / "run.json").write_text(json.dumps(facts))

    forget()
    Path("twice.py").write_text("raise SystemExit('this code was run without the flag')")
    with user_error("--resume", f"train.py --algorithm {own}"):
        parse_cli(["--resume", "--output", str(stopped)], None)
    Path("twice.py").write_text(CODE.replace("2 * scores", "3 * scores"))
    again = ["--resume", "--algorithm", own, "--output", str(stopped)]
    with user_error("algorithm_sha256", "--resume-anyway"):
        train.main(again)
    Path("twice.py").write_text(CODE)
    train.main(again)
    for name, weight in load_file(whole / "model.safetensors").items():
        assert torch.equal(weight, load_file(stopped / "model.safetensors")[name]), name


def test_a_folder_knows_the_algorithm_without_its_file(own, run_flags, tmp_path, runs):
    train.main(in_groups(run_flags, "--algorithm", own, "--scale-rewards", "none", "--record-tokens"))
    forget()
    Path("twice.py").unlink()
    run = tmp_path / "run"
    record = RunRecord.read(run)
    assert label_of("twice") == "Twice" and config_of_run(record).grpo.scale_rewards == "none"
    assert script_words("twice")[-2:] == ("--algorithm", own)
    evaluate_generations.main(["--model-path", str(run), "--num-prompts", "4"])
    evaluate_generations.main(["--tokens", str(run)])
    forget()
    plot_training_progress.main([str(run), str(runs["ppo", 1])])
    forget()
    compare_runs.main([str(run), str(runs["ppo", 1]), "--limit-minutes", "0", "--num-prompts", "4"])
    report = json.loads(Path("comparison_output/comparison.json").read_text())
    assert "PPO - Twice" in {contrast["name"] for contrast in report["contrasts"]}
    assert CLASSES.get("twice") is None


def test_runs_of_two_codes_are_two_groups(own, run_flags, tmp_path):
    train.main(in_groups(run_flags, "--algorithm", own))
    one = RunRecord.read(tmp_path / "run")
    other = replace(one, data=one.data | {"algorithm_sha256": "f" * 64})
    assert len(group_runs([one, replace(one, seed=7)])) == 1
    assert [group.settings for group in group_runs([one, other])] != [{}, {}]


def test_a_row_in_run_json_is_read_as_untrusted(own, run_flags, tmp_path, user_error):
    train.main(in_groups(run_flags, "--algorithm", own))
    file = tmp_path / "run" / "run.json"
    facts = json.loads(file.read_text())
    forget()
    facts["row"]["defaults"]["reward_func"] = ["./evil.py:f"]
    del facts["settings"]["reward"]["reward_func"]
    file.write_text(json.dumps(facts))
    assert config_of_run(RunRecord.read(tmp_path / "run")).reward.reward_func == ()
    forget()
    for row in ({**facts["row"], "group_size": "many"}, {"name": "twice"}):
        file.write_text(json.dumps(facts | {"row": row}))
        with user_error("run.json", "row."):
            RunRecord.read(tmp_path / "run")
    before = ALGORITHMS["ppo"]
    file.write_text(json.dumps(facts | {"algorithm": "ppo"}))
    RunRecord.read(tmp_path / "run")
    assert ALGORITHMS["ppo"] is before, "no file replaces an algorithm of the library"


# --- Python ----------------------------------------------------------------------------------------------------------


def settings_of_run(start_model) -> dict:
    return {
        "actor_model": str(start_model), "rm_model": None, "reward_func": ["length_penalty"], "batch_size": 2,
        "num_iterations": 2, "max_new_tokens": 6, "ppo_epochs": 1,
    }  # fmt: skip


PROMPTS = [f"What is number {i}?" for i in range(8)]


def test_a_registered_class_trains_from_python(start_model, user_error):
    @register
    class Mine(GRPO):
        row = Algorithm(name="mine", label="Mine", title="Mine", group_size=3)

    config = make_config(algorithm="mine", **settings_of_run(start_model), output="./mine")
    assert config.group_size == 3
    trainer = make_trainer(config, PROMPTS, output="./mine")
    assert type(trainer.algorithm) is Mine and trainer.train()["optimizer_steps"] == 2
    record = RunRecord.read(Path("mine"))
    assert record.row.source == "python:Mine" and "algorithm_sha256" not in record.data
    with user_error("--resume", "FILE.py:Mine"):
        parse_cli(["--resume", "--output", "mine"], None)

    class Again(GRPO):  # a cell of a notebook that is run again
        row = Mine.row

    register(Again)
    assert CLASSES["mine"] is Again
    forget()
    RunRecord.read(Path("mine"))
    with user_error("'mine'", "register("):
        make_trainer(make_config(algorithm="mine", **settings_of_run(start_model)), PROMPTS)


def test_a_class_of_a_module_is_recorded_with_its_file(start_model, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "twice", raising=False)  # of another test
    from twice import Twice

    assert register(Twice) is Twice
    config = make_config(algorithm="twice", **settings_of_run(start_model))
    make_trainer(config, PROMPTS, output="./run").train()
    record = RunRecord.read(Path("run"))
    assert record.row.source == "twice.py:Twice" and record.data["algorithm_sha256"]


def test_the_printed_command_can_be_typed(own):
    config = parse_cli(["--algorithm", own], None)
    assert f"train.py --algorithm {own} --resume" in resume_command(config)
    words = words_of("python train.py --algorithm twice.py:Twice")
    assert list(script_words("twice"))[2:] == words[2:]
