"""Types the fix of an error, in the state in which the user then is: the error is gone, or another step follows.

tests/test_advice.py checks what all texts name: flags, values, classes, packages and pages.
tests/scripts/test_bad_inputs.py types the flags in the fix of each of its rows.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas
import peft
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import compare_runs
import evaluate_generations
import plot_training_progress
import train_grpo
from rlhf.analysis.models import find_models, shared_settings
from rlhf.checkpoints.model_folder import find_model, policy_problems, reward_model_problems
from rlhf.config import parse_cli
from rlhf.data.examples import load_examples
from rlhf.data.row import Example
from rlhf.data.source import DataSource
from rlhf.rewards.arguments import check_columns
from rlhf.rewards.checks import check_functions
from rlhf.rewards.reward_model import RewardModel
from rlhf.rewards.rewards import Rewards
from rlhf.settings.evaluation import parse_comparison_cli, parse_evaluation_cli
from rlhf.settings.types import Renaming
from rlhf.setup.inputs import check_fills_a_batch
from rlhf.utils.errors import Problem, RunError, UserError
from tests.advice import FLAG
from tests.conftest import typed
from tests.documents import python_block
from tests.settings.test_next_commands import commands_in
from tests.systems import words_of

ROOT = Path(__file__).resolve().parents[2]
ROWS = [{"prompt": f"What is cat {i}?"} for i in range(6)]


def problems_of(call: Callable[[], object], kind: type[UserError] = UserError) -> list[Problem]:
    with pytest.raises(kind) as error:
        call()
    return error.value.problems


def problem_of(call: Callable[[], object], kind: type[UserError] = UserError) -> Problem:
    (problem,) = problems_of(call, kind)
    return problem


# --- data files ------------------------------------------------------------------------------------------------------


def test_a_file_of_a_saved_dataset(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    problem = problem_of(lambda: load_examples(str(file)))
    assert problem.place == file and "save_to_disk" in problem.fix
    assert len(load_examples(str(file.parent))) == 6
    code = re.search(r"datasets\.\S+", problem.fix)[0].replace("'NEW.parquet'", repr(str(tmp_path / "NEW.parquet")))
    exec(f"import datasets; {code}")
    assert len(load_examples(str(tmp_path / "NEW.parquet"))) == 6


def as_pandas_writes(folder: Path) -> tuple[Path, Path]:
    pandas.DataFrame(ROWS).to_json(folder / "bad.json")
    frame = pandas.read_json(folder / "bad.json")
    frame.to_json(folder / "good.json", orient="records")
    return folder / "bad.json", folder / "good.json"


def under_a_name(folder: Path) -> tuple[Path, Path]:
    (folder / "bad.json").write_text(json.dumps({"version": "1", "data": ROWS}, indent=2))
    (folder / "good.json").write_text(json.dumps(ROWS))
    return folder / "bad.json", folder / "good.json"


@pytest.mark.parametrize(("make", "words"), [(as_pandas_writes, "orient='records'"), (under_a_name, "inner list")])
def test_json_that_is_one_object(tmp_path, make, words):
    bad, good = make(tmp_path)
    problem = problem_of(lambda: load_examples(str(bad)))
    assert problem.place == bad and words in problem.fix
    assert len(load_examples(str(good))) == 6


@pytest.mark.parametrize("row", [{"prompt": "a", "tags": ["b"]}, {"messages": [{"role": "user", "content": "a"}]},
                                 {"prompt": "a", "meta": {"id": 1}}])  # fmt: skip
def test_a_file_of_one_row_is_read(tmp_path, row):
    (tmp_path / "one.jsonl").write_text(json.dumps(row))
    assert len(load_examples(str(tmp_path / "one.jsonl"))) == 1


@pytest.mark.parametrize(("column", "new"), [("Question", "question"), ("PROMPT", "prompt"), ("Text", "prompt")])
def test_a_column_in_capital_letters(tmp_path, column, new):
    (tmp_path / "a.csv").write_text(f"{column},Answer\na?,1\nb?,2\n")
    problem = problem_of(lambda: load_examples(str(tmp_path / "a.csv")))
    flag = re.search(r"--columns (\S+?)(\.|$)", problem.fix)[1]
    assert flag == f"{new}={column}"
    assert len(load_examples(DataSource(str(tmp_path / "a.csv"), columns=(Renaming.parse(flag),)))) == 2


def test_a_file_of_excel_that_is_not_utf_8(tmp_path):
    (tmp_path / "a.csv").write_bytes("prompt\nIst das schön?\n".encode("cp1252"))
    problem = problem_of(lambda: load_examples(str(tmp_path / "a.csv")))
    assert str(problem.place).startswith(f"{tmp_path / 'a.csv'}, byte ") and "CSV UTF-8" in problem.fix
    (tmp_path / "a.csv").write_bytes("prompt\nIst das schön?\n".encode("utf-8-sig"))  # as Excel's CSV UTF-8
    assert load_examples(str(tmp_path / "a.csv"))[0].messages[0]["content"] == "Ist das schön?"


@pytest.mark.parametrize("names", [("role", "content"), ("from", "value")])
def test_the_role_developer_is_system(tmp_path, names):
    chat = [dict(zip(names, pair, strict=True)) for pair in (("developer", "Be brief."), ("user", "a?"))]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat}))
    assert [m["role"] for m in load_examples(str(tmp_path / "a.jsonl"))[0].messages] == ["system", "user"]


@pytest.mark.parametrize(("prompts", "flags", "size"), [
    (52, "--batch-size 200 --K 2 --minibatches 8", 52), (7, "--batch-size 16 --K 2 --minibatches 8", 4),
    (3, "--batch-size 16 --K 2 --minibatches 16", 3),
])  # fmt: skip
def test_the_largest_batch_that_fits(prompts, flags, size):
    argv = [*"--rm-model none --reward-func length_penalty".split(), *flags.split()]
    problem = problem_of(lambda: check_fills_a_batch(parse_cli(argv, "grpo"), prompts))
    fix = re.search(r"add (--batch-size .*)$", problem.fix)[1]
    config = parse_cli([*argv, *fix.split()], "grpo")
    check_fills_a_batch(config, prompts)
    assert config.batch.batch_size == size
    larger = ["--batch-size", str(size + 1)]  # the next one does not fit, or the minibatches do not divide it
    with pytest.raises(UserError):
        check_fills_a_batch(parse_cli([*argv, *larger], "grpo"), prompts)


# --- reward functions ------------------------------------------------------------------------------------------------


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """In verl's form."""
    return 1.0 if ground_truth in solution_str and data_source == "sums" else 0.0


def reward_func(queries, prompts, labels):
    """In OpenRLHF's form."""
    return [0.0 for _ in queries]


@pytest.mark.parametrize("function", [compute_score, reward_func])
def test_functions_in_the_form_of_another_trainer(function):
    rows = [Example(({"role": "user", "content": "2 + 2?"},), columns={"ground_truth": "4", "data_source": "sums"})]
    problem = problem_of(lambda: check_columns([function], rows, "--prompts x.jsonl"))
    assert function.__name__ in problem.what and problem.place == "--prompts x.jsonl"
    assert "completions" in problem.fix and "docs/coming_from_trl.md#" in problem.fix


def test_the_three_lines_around_a_function_of_verl(monkeypatch, tmp_path):
    module = type(sys)("my_verl_rewards")
    module.compute_score = compute_score
    monkeypatch.setitem(sys.modules, "my_verl_rewards", module)
    names: dict = {}
    exec(python_block("from my_verl_rewards"), names)
    rows = [Example(({"role": "user", "content": "2 + 2?"},), columns={"ground_truth": "4", "data_source": "sums"})]
    check_functions([names["score"]], rows, "--prompts x.jsonl")
    assert names["score"](["4", "5"], ["sums"] * 2, ["4"] * 2, other=None) == [1.0, 0.0]


CHAT = Example(({"role": "user", "content": "2 + 2?"},), conversational=True)


def of_texts(completions, **_):
    return [float(len(completion.strip())) for completion in completions]


def test_a_function_that_takes_chats_for_texts():
    problem = problem_of(lambda: check_functions([of_texts], [CHAT], "--prompts x.jsonl"))
    path = re.search(r"is (completion\S+)$", problem.fix)[1]
    assert "of_texts" in str(problem.place)
    names: dict = {}
    exec(f"def fixed(completions, **_): return [len({path}.strip()) for completion in completions]", names)
    check_functions([names["fixed"]], [CHAT], "--prompts x.jsonl")
    check_functions([of_texts], [Example(CHAT.messages)], "--prompts x.jsonl")  # a row with a text


def test_other_errors_of_a_function_are_left_to_the_run():
    calls = []

    def of_groups(completions, **_):
        calls.append(len(completions))
        raise ValueError("needs two")

    check_functions([of_groups], [CHAT], "--prompts x.jsonl")
    check_functions([of_groups], [Example(CHAT.messages)], "--prompts x.jsonl")
    assert calls == [1], "rows with texts need no call"


def test_the_same_cause_is_named_during_a_run():
    from rlhf.data.prompts import Prompt

    def of_long_texts(completions, **_):
        return [0.0 if len(c[0]["content"]) < 4 else float(len(c.strip())) for c in completions]

    check_functions([of_long_texts], [CHAT], "--prompts x.jsonl")  # "yes" is short enough
    rewards = Rewards([of_long_texts], None, None)
    score = lambda: rewards.score([Prompt((1,), CHAT)], ["a long text"], [[5]], [True])  # noqa: E731
    assert "completion[0]['content']" in problem_of(score, RunError).fix


# --- adapters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--rm-model", "--judge-model", "--actor-model"])
@pytest.mark.parametrize("named", [True, False])
def test_an_adapter_is_merged_as_typed(flag, named, start_model, reward_folder, tmp_path, monkeypatch):
    """Also if its config does not name its task: then the flag decides."""
    scores = flag != "--actor-model"
    kind, base = (AutoModelForSequenceClassification, reward_folder) if scores else (AutoModelForCausalLM, start_model)
    task = "SEQ_CLS" if scores else "CAUSAL_LM"
    model = peft.get_peft_model(
        kind.from_pretrained(base), peft.LoraConfig(task_type=task if named else None, target_modules=["q_proj"])
    )
    for name, weights in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weights, std=0.1)
    model.save_pretrained(tmp_path / "it's")
    problem = problem_of(lambda: find_model(str(tmp_path / "it's"), flag))
    assert problem.place == f"{flag} {tmp_path}/it's"
    python, option, code = words_of(problem.fix[problem.fix.index("python -c") :])
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    check = reward_model_problems if scores else policy_problems
    assert (python, option) == ("python", "-c") and check(str(tmp_path / "FOLDER"), flag) == []
    if scores:
        RewardModel.load(str(tmp_path / "FOLDER"), torch.device("cpu"), None)
    merged = kind.from_pretrained(tmp_path / "FOLDER").eval()
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, model.eval()(ids).logits, atol=1e-4, rtol=1e-4)
        assert not torch.equal(merged(ids).logits, kind.from_pretrained(base).eval()(ids).logits)


# --- evaluation and comparison ---------------------------------------------------------------------------------------


@pytest.fixture
def with_settings(runs, tmp_path):
    """Return a function that copies a run of PPO, with other settings in its run.json."""

    def make(name: str, **changed: object) -> Path:
        folder = Path(shutil.copytree(runs["ppo", 1], tmp_path / name))
        record = json.loads((folder / "run.json").read_text())
        for values in record["settings"].values():
            if isinstance(values, dict):
                values |= {key: value for key, value in changed.items() if key in values}
        (folder / "run.json").write_text(json.dumps(record))
        return folder

    return make


def settings_of_models(argv: list[object], compares: bool = False):
    """Return the settings with which a command evaluates its models."""
    parse = parse_comparison_cli if compares else parse_evaluation_cli
    config = parse([str(word) for word in argv])
    names = config.comparison.runs if compares else config.evaluation.model_path
    return shared_settings(find_models(names, config.measure, "--model-path"), config.measure)


@pytest.mark.parametrize(("name", "stored", "left"), [
    ("reward_func", ["my.py:f"], ()), ("eval_func", ["my.py:f"], ()), ("stop", ["x"], None), ("rm_text", "eos", None),
    ("eval_text", "a.txt", None), ("reward_weights", [2.0], None), ("split", "10/80/10", None),
])  # fmt: skip
def test_none_unsets_a_setting_of_a_run(with_settings, name, stored, left):
    run = with_settings("run", **{name: stored})
    values = lambda config: {k: v for group in vars(config).values() if hasattr(group, "__dict__")  # noqa: E731
                             for k, v in vars(group).items()}  # fmt: skip
    kept = values(settings_of_models(["--model-path", run]))[name]
    assert kept is not None and [*kept] == [*stored] if isinstance(stored, list) else str(kept) == stored
    flag = f"--{name.replace('_', '-')}"
    assert values(settings_of_models(["--model-path", run, flag, "none"]))[name] == left
    assert values(settings_of_models([run, flag, "none"], compares=True))[name] == left


@pytest.mark.parametrize("critic", ["shared", "reward-model"])
def test_none_unsets_the_reward_model_of_a_run(with_settings, critic):
    """Also if the critic of the run started from it."""
    run = with_settings("run", critic=critic)
    problem = problem_of(lambda: settings_of_models(["--model-path", run, "--rm-model", "none"]))
    assert problem.settings == ("rm_model",) and "--reward-func" in problem.fix
    argv = ["--model-path", run, "--rm-model", "none", "--reward-func", "length_penalty"]
    config = settings_of_models(argv)
    assert config.model.rm_model is None and config.reward.reward_func == ("length_penalty",)


def test_a_run_with_a_reward_model_is_compared_with_one_that_has_rules_only(with_settings):
    rules = with_settings("rules", rm_model=None, reward_func=["length_penalty"])
    learned = with_settings("learned")
    argv = [rules, learned, "--reward-func", "length_penalty"]
    assert "rm_model" in problem_of(lambda: settings_of_models(argv, compares=True)).what
    config = settings_of_models([*argv, "--rm-model", "none"], compares=True)
    assert config.model.rm_model is None and config.reward.reward_func == ("length_penalty",)


def test_runs_of_two_tasks(with_settings, tmp_path):
    (tmp_path / "other.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    other = {"prompts": str(tmp_path / "other.jsonl"), "reward_func": ["length_penalty"]}
    argv = [with_settings("one"), with_settings("two", **other)]
    problem = problem_of(lambda: settings_of_models(argv, compares=True))
    assert "data" in problem.what and "cannot be compared" in problem.what and "--prompts" in problem.fix
    argv += ["--prompts", tmp_path / "other.jsonl"]
    problem = problem_of(lambda: settings_of_models(argv, compares=True))  # the next step
    assert "reward_func" in problem.what and problem.fix.endswith("--reward-func")
    assert settings_of_models([*argv, "--reward-func", "none"], compares=True).reward.reward_func == ()


def test_every_setting_in_which_runs_can_differ_has_a_fix(with_settings):
    """Each flag that the error names is typed."""
    values = {
        "rm_text": "eos",
        "stop": ["x"],
        "max_new_tokens": 9,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "prompt_length": 50,
        "reward_func": ["length_penalty"],
        "split": "10/80/10",
        "eval_text": "README.md",
    }
    for name, value in values.items():
        one, two = with_settings(f"one_{name}"), with_settings(f"two_{name}", **{name: value})
        problem = problem_of(lambda argv=(one, two): settings_of_models([*argv], compares=True))
        flag = re.fullmatch(r"Set it with (--[\w-]+)", problem.fix)[1]
        given = value if isinstance(value, list) else [value]
        settings_of_models([one, two, flag, *given], compares=True)


def test_a_run_whose_data_has_changed(with_settings, pairs_file, tmp_path):
    """The advice of the reader is for training: an evaluation reads the data as the run did."""
    data = tmp_path / "data.jsonl"
    data.write_text(pairs_file.read_text() + '{"question": " "}\n')
    argv = [str(word) for word in ("--model-path", with_settings("run", prompts=str(data)), "--num-prompts", 2,
                                   "--max-new-tokens", 4, "--output", tmp_path / "out")]  # fmt: skip
    first, row = problems_of(lambda: evaluate_generations.main(argv))
    assert first.place == str(data) and str(row.place).startswith(f"{data}:121")
    assert "--skip-bad-rows" in row.fix and FLAG.findall(first.fix) == ["--prompts"]
    skip = problem_of(lambda: parse_evaluation_cli([*argv, "--skip-bad-rows", "1"]))
    assert "--prompts" in skip.fix
    evaluate_generations.main([*argv, "--prompts", str(pairs_file)])
    data.write_text(pairs_file.read_text())
    evaluate_generations.main(argv)


def test_a_model_without_a_run_is_evaluated_by_a_rule(start_model, tmp_path):
    """It fails at the reward model of the recipe, and does what the fix names."""
    (tmp_path / "p.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    argv = ["--model-path", start_model, "--prompts", tmp_path / "p.jsonl", "--completions", 1, "--max-new-tokens", 4,
            "--reward-func", "length_penalty", "--output", tmp_path / "out"]  # fmt: skip
    argv = [str(word) for word in argv]
    problems = problems_of(lambda: evaluate_generations.main(argv))
    assert "--rm-model none --reward-func" in problems[-1].fix and problems[-1].place.startswith("--like")
    evaluate_generations.main([*argv, "--rm-model", "none"])
    report = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert "length_penalty" in json.dumps(report)
    words = [*argv[2:-2], "--arm", f"A={start_model}", "--baseline", str(start_model), "--rm-model", "none"]
    compare_runs.main([*words, "--limit-minutes", "0", "--output", str(tmp_path / "compared")])
    notes = " ".join(json.loads((tmp_path / "compared" / "comparison.json").read_text())["notes"])
    assert "a run has no stored evaluations" not in notes, "no arm is a run"


def test_no_reward_names_the_flags(start_model, tmp_path):
    (tmp_path / "p.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    argv = ["--model-path", start_model, "--rm-model", "none", "--prompts", tmp_path / "p.jsonl", "--output",
            tmp_path / "out"]  # fmt: skip
    assert "--reward-func" in problem_of(lambda: evaluate_generations.main([str(word) for word in argv])).fix


# --- all that a run prints -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_run(made_once, start_model, pairs_file):
    """Return a folder with a run by the user's own functions, merged, and what the run printed."""

    def train(folder: Path) -> None:
        (folder / "my rules.py").write_text(
            "def words(completions, **_):\n    return [float(len(c.split())) for c in completions]\n"
            "def right(completions, **_):\n    return [float('a' in c) for c in completions]\n"
        )
        flags = ["--actor-model", start_model, "--rm-model", "none", "--prompts", pairs_file, "--output", "run",
                 "--batch-size", 2, "--K", 2, "--num-iterations", 2, "--max-new-tokens", 6, "--prompt-length", 100,
                 "--eval-prompts", 6, "--use-lora", "--merge-lora", "--record-tokens", "--reward-func",
                 "my rules.py:words", "--eval-func", "my rules.py:right"]  # fmt: skip
        done = subprocess.run(
            [sys.executable, ROOT / "train_grpo.py", *map(str, flags)], cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        (folder / "printed.txt").write_text(done.stdout)

    return made_once("own_run", train)


MAINS = {"evaluate_generations.py": evaluate_generations.main, "compare_runs.py": compare_runs.main,
         "plot_training_progress.py": plot_training_progress.main, "train_grpo.py": train_grpo.main}  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("name", ["run", "run/merged"])
def test_every_printed_command_works_as_typed(own_run, name, tmp_path, monkeypatch, capsys):
    """After a run with reward code of the user; also with the folder of the merged model in place of the run."""
    work = Path(shutil.copytree(own_run, tmp_path / "work"))
    monkeypatch.chdir(work)
    lines = commands_in((work / "printed.txt").read_text())
    assert len(lines) == 6 and sum("--chat" in line for line in lines) == 1
    for line in lines:
        words = words_of(line)
        if words[0] == "tensorboard":
            assert Path(words[2]).is_dir()
            continue
        script, argv = Path(words[1]).name, typed(line)
        if name != "run":
            if not {"--chat", "--model-path"} & {*argv} or "--tokens" in argv:
                continue
            argv = [name if word == "run" else word for word in argv]
        more = ["--num-prompts", "2"] if script != "plot_training_progress.py" else []
        more = [] if {"--chat", "--tokens"} & {*argv} else more
        monkeypatch.setattr(sys, "stdin", io.StringIO("What is a cat?\n/exit\n"))
        MAINS[script]([*argv, *more])
    assert "my rules.py" not in capsys.readouterr().err


@pytest.mark.ci
def test_reward_code_is_named_for_what_executes_it(own_run, tmp_path, monkeypatch):
    """An evaluation needs it, and its fix works; a chat does not, so a flag that gives it has no effect."""
    monkeypatch.chdir(shutil.copytree(own_run, tmp_path / "work"))
    argv = ["--model-path", "run"]
    problem = problem_of(lambda: evaluate_generations.main(argv))
    flags = words_of(re.search(r"Add (.*), or --trust-reward-code", problem.fix)[1])
    assert flags == ["--reward-func", "my rules.py:words", "--eval-func", "my rules.py:right"]
    evaluate_generations.main([*argv, *flags, "--num-prompts", "2"])
    (problem,) = problems_of(lambda: evaluate_generations.main(["--chat", *argv, *flags[:2]]))
    assert problem.fix == f"Remove --chat, or remove {flags[0]}"
    assert os.listdir("run")
