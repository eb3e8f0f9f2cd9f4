"""Tests the settings and the data of reward-model training, its leftovers, and the checks of judges."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from trl import RewardTrainer

from rlhf.checkpoints.model_folder import METRICS_FILE, find_model
from rlhf.checkpoints.run_folder import LOCK_FILE
from rlhf.checkpoints.run_record import RUN_FILE
from rlhf.data.prompts import select_examples
from rlhf.data.row import Example
from rlhf.data.splits import part_of, split_examples
from rlhf.rewards.calibration import calibration_completions
from rlhf.rewards.checks import check_measured
from rlhf.rewards.pair_accuracy import pair_accuracy
from rlhf.rewards.reward_model import RewardModel
from rlhf.rewards.training import remove_interrupted_saves, run_training, train_reward_model, training_rows
from rlhf.settings.reward_model import parse_reward_cli
from rlhf.settings.training import DataSettings
from rlhf.settings.types import Split
from rlhf.utils.console import Screen
from rlhf.utils.system import lock
from tests.shapes import make_reward_model

CPU = torch.device("cpu")


def pair(question: str, chosen: str = "yes", rejected: str = "no", **more) -> Example:
    return Example(messages=({"role": "user", "content": question},), chosen=chosen, rejected=rejected, **more)


@pytest.fixture
def model(reward_folder) -> RewardModel:
    return RewardModel.load(str(reward_folder), CPU, None)


@pytest.fixture
def asked(start_model, tmp_path):
    """Return a function that makes the configuration of a tiny training from flags."""

    def make(*more: object):
        words = ["--base-model", start_model, "--actor-model", start_model, "--rm-output", tmp_path / "rm",
                 "--max-new-tokens", 4, *more]  # fmt: skip
        return parse_reward_cli([str(word) for word in words])

    return make


# --- epochs and margins ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pairs", "batch", "epochs"), [(3, 8, 10), (9, 8, 2), (11, 8, 1), (17, 8, 3), (16, 8, 1)])
def test_epochs_are_passes_over_all_pairs(model, asked, monkeypatch, pairs, batch, epochs):
    """The last batch of an epoch is smaller. Each pair is used once in each epoch."""
    used: list[int] = []
    original = RewardTrainer.compute_loss

    def count(self, model, inputs, *args, **kwargs):
        used.append(len(inputs["input_ids"]) // 2)
        return original(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(RewardTrainer, "compute_loss", count)
    rows = [pair(f"question {i}?", f"yes {i}") for i in range(pairs)]
    run_training(model, rows, asked("--rm-batch-size", batch, "--rm-epochs", epochs), Screen())
    assert sum(used) == pairs * epochs and len(used) == epochs * math.ceil(pairs / batch)


def test_margins_are_part_of_the_loss_as_in_trl(model, asked, monkeypatch):
    """At equal scores the loss is -log sigmoid(-margin): 0.693 without a margin, 2.127 with a margin of 2."""
    losses = []
    original = RewardTrainer.compute_loss

    def record(self, model, inputs, *args, **kwargs):
        losses.append(float(original(self, model, inputs, *args, **kwargs)))
        return original(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(RewardTrainer, "compute_loss", record)
    torch.nn.init.zeros_(model.model.score.weight)
    config = asked("--rm-batch-size", 2, "--rm-learning-rate", 1e-9)
    run_training(model, [pair("a?"), pair("b?")], config, Screen())
    run_training(model, [pair("a?", columns={"margin": 2}), pair("b?", columns={"margin": "2.0"})], config, Screen())
    assert losses == pytest.approx([math.log(2), math.log(1 + math.exp(2))], abs=1e-4)


@pytest.mark.parametrize("margin", [None, "much", math.nan, math.inf])
def test_a_margin_that_is_no_number_is_refused(model, margin, user_error):
    pairs = [pair("a?", columns={"margin": 1.0}), pair("b?", columns={"margin": margin}, where="file:2")]
    with user_error("margin", "file:2", "--columns"):
        training_rows(model, pairs)


# --- accuracy and calibration ----------------------------------------------------------------------------------------


def test_equal_ids_tie_whatever_their_batch(model):
    """The template of this model removes spaces, so both sides are the same ids. Their scores differ by rounding."""
    model.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
    words = [" ".join("the cat is on the table".split()[: 1 + i % 6]) for i in range(60)]
    found = pair_accuracy(model, [pair(f"{i}?", word, f"{word}  ") for i, word in enumerate(words)])
    assert found["accuracy"] == 0.5 and found["margin"] == 0.0


@pytest.mark.parametrize("start", [True, False], ids=["start model", "chosen completions"])
def test_calibration_uses_distinct_prompts_in_any_order_of_the_file(model, asked, start):
    rows = [pair(f"question {i % 30}?", f"yes {i % 30}") for i in range(90)]
    more = () if start else ("--actor-model", "none")
    if not start:  # nothing is sampled
        config = parse_reward_cli([*more, "--calibration-prompts", "20"])
    else:
        config = asked("--calibration-prompts", 20)
    first, _ = calibration_completions(rows, config, CPU, model)
    again, _ = calibration_completions(random.Random(3).sample(rows, 90), config, CPU, model)
    prompts = [completion[0][0]["content"] for completion in first]
    assert len(set(prompts)) == len(prompts) == 20 and first == again
    assert prompts != [f"question {i}?" for i in range(20)], "a random sample, not the first rows"


# --- the parts of the data -------------------------------------------------------------------------------------------


def test_pairs_with_the_same_first_user_turn_are_in_one_part():
    """One conversation can give several pairs. Rows without a pair are split by all their user turns, as before."""
    split = Split(45, 45, 10)
    opening = {"role": "user", "content": "Hello, can you help me?"}

    def rows(**more) -> list[Example]:
        said = {"role": "assistant", "content": "Of course."}
        return [Example((opening, said, {"role": "user", "content": f"Then {i}?"}), **more) for i in range(40)]

    assert (
        len({part_of(row, split) for row in [pair("hello,  CAN you help me?"), *rows(chosen="a", rejected="b")]}) == 1
    )
    assert len({part_of(row, split) for row in rows()}) == 3
    single = [pair(f"{i}?") for i in range(40)]
    alone = [Example(one.messages) for one in single]
    assert [part_of(one, split) for one in single] == [part_of(one, split) for one in alone], "as before"
    assert sum(map(len, split_examples(single, split).values())) == 40


def test_an_empty_part_is_named(asked, tmp_path, user_error):
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps({"question": f"{i}?", "chosen": "a", "rejected": "b"}) + "\n" for i in range(9))
    )
    with user_error("pairs.jsonl", "--split") as caught:
        train_reward_model(asked("--pairs", tmp_path / "pairs.jsonl", "--split", "100/0/0"), Screen(), CPU)
    assert "--pair-length" not in str(caught.value) and "30 of 30" not in str(caught.value)


# --- leftovers of interrupted trainings ------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from rlhf.rewards import training
from rlhf.rewards.reward_model import RewardModel

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

setattr(training, sys.argv[3], die)
model = RewardModel.load(sys.argv[1], torch.device("cpu"), None)
training.save_reward_model(model, {}, Path(sys.argv[2]))
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
@pytest.mark.parametrize(
    ("moment", "complete"), [pytest.param("write_json", False, marks=pytest.mark.ci), ("rename_synced", True)]
)
def test_what_a_killed_training_leaves_is_named_and_removed(
    forks, reward_folder, tmp_path, capsys, user_error, moment, complete
):
    """A complete model that was not moved to its name is kept."""
    folder = tmp_path / "rm"
    (tmp_path / "killed.py").write_text(KILLED)
    done = forks.run(["killed.py", str(reward_folder), str(folder), moment], tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (tmp_path / "killed.py").unlink()
    (left,) = tmp_path.glob("rm.new-*")
    with user_error(left.name):
        find_model(str(folder), "--rm-model")
    if not complete:
        with user_error("--rm-model", left.name):
            find_model(str(left), "--rm-model")
    remove_interrupted_saves(folder, Screen())
    assert left.name in capsys.readouterr().out and not left.exists()
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == (["rm_1"] if complete else [])
    if complete:
        assert (tmp_path / "rm_1" / RUN_FILE).is_file() and not (tmp_path / "rm_1" / LOCK_FILE).exists()
        assert RewardModel.load(str(tmp_path / "rm_1"), CPU, None).record is None
    remove_interrupted_saves(folder, Screen())
    assert capsys.readouterr().out == ""


def test_a_folder_that_another_training_writes_stays(tmp_path, capsys):
    staging = tmp_path / "rm.new-12345678"
    staging.mkdir()
    held = lock(staging / LOCK_FILE)
    remove_interrupted_saves(tmp_path / "rm", Screen())
    assert staging.is_dir() and capsys.readouterr().out == ""
    held.close()
    remove_interrupted_saves(tmp_path / "rm", Screen())
    assert not staging.exists()


def test_folders_of_the_user_are_never_leftovers(tmp_path, reward_folder, capsys):
    """Only the names and the content that a killed training leaves are removed or renamed."""
    others = (
        "rm.new-dataset",
        "rm.new-12345678",
        "rm.new-1234567",
        "rm.new-abcdef01.new-abcdef01",
        "other.new-12345678",
    )
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.jsonl").write_text("{}")
        (tmp_path / name / RUN_FILE).write_text("{}")
    (tmp_path / "rm.new-abcdef02").write_text("a file")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    remove_interrupted_saves(tmp_path / "rm", Screen())
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    assert capsys.readouterr().out == ""
    named = shutil.copytree(reward_folder, tmp_path / "rm.new-york")
    assert find_model(str(named), "--rm-model") == str(named)


def test_pairs_that_all_begin_alike_are_named_as_the_reason(asked, tmp_path, user_error):
    opening = {"role": "user", "content": "Hello"}
    rows = [{"prompt": [opening, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": f"{i}?"}],
             "chosen": "a", "rejected": "b"} for i in range(30)]  # fmt: skip
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with user_error("pairs.jsonl", "30 of 30", "--split"):
        train_reward_model(asked("--pairs", tmp_path / "pairs.jsonl"), Screen(), CPU)
    with user_error("pairs.jsonl", "30 of 30", "--split"):
        select_examples(DataSettings(prompts=str(tmp_path / "pairs.jsonl")))


# --- judges ----------------------------------------------------------------------------------------------------------


def record(folder: Path, accuracy: float, **more) -> RewardModel:
    found = {"accuracy": accuracy, "length_baseline": 0.55, "pairs": 40, "calibration": {}, "text": "template", **more}
    (folder / METRICS_FILE).write_text(json.dumps(found))
    return RewardModel.load(str(folder), CPU, None)


def test_a_judge_is_checked_like_a_reward_model(tmp_path, capsys):
    """A weak judge, one without a record, and one that was trained on the evaluation prompts are reported."""
    folder = make_reward_model(tmp_path / "judge")
    unknown = RewardModel.load(str(folder), CPU, None)
    measured = check_measured(unknown, "judge j", [Example(pair("a?").messages)], Screen())
    assert measured and not any(character.isdigit() for character in measured), "no number that nobody measured"
    form, accuracy = capsys.readouterr().out.splitlines()
    assert "judge j" in form and "--rm-text" in form and "judge j" in accuracy and accuracy.startswith("warning")
    measured = check_measured(unknown, "judge j", [pair("a?"), pair("b?")], Screen())
    assert "2 held-out pairs" in measured
    capsys.readouterr()
    good = check_measured(record(folder, 0.9), "judge j", [], Screen())
    assert "0.900" in good and "0.550" in good and capsys.readouterr().out == ""
    check_measured(record(folder, 0.58), "judge j", [], Screen())
    assert "warning" in (printed := capsys.readouterr().out) and "0.580" in printed and "judge j" in printed
    from rlhf.data.splits import question_hash

    known = record(folder, 0.9, train_questions=[question_hash(pair("a?"))])
    check_measured(known, "judge j", [pair("a?"), pair("b?")], Screen())
    assert "1 of the 2" in capsys.readouterr().out
