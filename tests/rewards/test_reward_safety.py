"""Tests the isolation of user-written reward functions: copied arguments, redirected output, exceptions, columns."""

from __future__ import annotations

import json
import threading

import pytest

import evaluate_generations
import train_grpo
import train_ppo
from rlhf.api import make_trainer
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import parse_cli
from rlhf.data.examples import examples_of, load_examples
from rlhf.data.prompts import Prompt
from rlhf.data.row import Example
from rlhf.rewards.arguments import check_columns, required_columns
from rlhf.rewards.find import find_rule
from rlhf.rewards.rewards import Rewards
from rlhf.utils.errors import RunError, UserError, run_command
from tests.trainer.test_nan import run

CHAT = ({"role": "user", "content": "2 + 2?"},)
COMPLETIONS = (["4", "five"], [[5, 2], [5, 6, 7]], [True, False])  # texts, ids, ended


def score(*functions, prompts=None, limit_s=None):
    prompts = prompts or [Prompt((1,), Example(CHAT, columns={"answer": 4}))] * 2
    return Rewards(functions, None, None, limit_s).score(prompts, *COMPLETIONS)


# --- copies ----------------------------------------------------------------------------------------------------------


def change_arguments(prompts, completions, completion_ids, messages, ended, answer):
    for chat in messages:
        chat[-1]["content"] += " !"
        chat.append({"role": "user", "content": "more"})
    for row in completion_ids:
        row.append(99)
    completions.clear()
    prompts.clear()
    ended.clear()
    answer.clear()
    return [0.0, 0.0]


def test_changed_arguments_do_not_affect_other_functions():
    seen = {}

    def record(**kwargs):
        seen.update(kwargs)
        return [1.0, 2.0]

    prompts = [Prompt((1,), Example(({"role": "user", "content": "2 + 2?"},), columns={"answer": [4]}))] * 2
    assert score(change_arguments, record, prompts=prompts).total == [1.0, 2.0]
    assert seen["messages"] == [[{"role": "user", "content": "2 + 2?"}]] * 2
    assert seen["completions"] == ["4", "five"] and seen["completion_ids"] == [[5, 2], [5, 6, 7]]
    assert seen["prompts"] == ["2 + 2?"] * 2 and seen["ended"] == [True, False] and seen["answer"] == [[4], [4]]
    assert prompts[0].example.messages[0]["content"] == "2 + 2?"


def test_rows_of_one_prompt_have_separate_copies():
    """Changing the chat of one completion in a GRPO group does not change the chats of the others."""

    def add_exclamation_mark(messages, **_):
        for chat in messages:
            chat[-1]["content"] += "!"
        return [float(chat[-1]["content"].count("!")) for chat in messages]

    assert score(add_exclamation_mark).total == [1.0, 1.0]


def test_column_that_cannot_be_copied_is_passed_unchanged():
    lock = threading.Lock()
    prompts = [Prompt((1,), Example(CHAT, columns={"lock": lock}))] * 2
    assert score(lambda lock, **_: [float(one.locked()) for one in lock], prompts=prompts).total == [0.0, 0.0]


def test_function_that_changes_the_chats_does_not_affect_evaluation(build):
    """The reward model's score of an unchanged policy stays the same."""

    def add_exclamation_mark(messages, **_):
        for chat in messages:
            chat[-1]["content"] += " !"
        return [0.0] * len(messages)

    trainer = build("--learning-rate", "1e-12", "--num-iterations", 1)
    trainer.rewards.functions.append(add_exclamation_mark)
    trainer.rewards.names.append("add_exclamation_mark")
    trainer.rewards.weights.append(0.0)
    trainer.rewards.limits_s.append(None)
    scores = [trainer.evaluate()["eval/score"] for _ in range(3)]
    assert scores[0] == scores[1] == scores[2]


# --- exceptions ------------------------------------------------------------------------------------------------------

RAISED = {
    "sys.exit(0)": "SystemExit: 0",
    "sys.exit('bye')": "SystemExit: bye",
    "raise Odd('odd')": "Odd: odd",
    "raise GeneratorExit": "GeneratorExit",
    "return [10**400] * len(completions)": "a score is larger than the largest float",
    "return [Fraction(10**400)] * len(completions)": "a score is larger than the largest float",
    "import torch; return [torch.ones(2)] * len(completions)": "RuntimeError: a Tensor with 2 elements cannot be",
    "return [-(10**400)] * len(completions)": "a score is larger than the largest float",
}


@pytest.mark.parametrize("line", RAISED)
@pytest.mark.parametrize("script", [train_ppo, train_grpo])
def test_exceptions_of_a_function_are_one_line_and_status_1(run_flags, tmp_path, capsys, script, line):
    file = tmp_path / "rules.py"
    head = "import sys\nfrom fractions import Fraction\nclass Odd(BaseException): pass\n"
    file.write_text(f"{head}def f(completions):\n    {line}\n")
    groups = ["--batch-size", 2, "--K", 2] if script is train_grpo else []
    flags = run_flags("--rm-model", "none", "--reward-func", f"{file}:f", *groups)
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: script.main(flags))
    output = capsys.readouterr().err
    assert ended.value.code == 1 and RunRecord.read(tmp_path / "run").status == "failed"
    assert (
        output.startswith("error: ")
        and output.count("\n") == 1
        and RAISED[line] in output
        and "Traceback" not in output
    )


@pytest.mark.parametrize("code", ["import sys\nsys.exit(0)", "raise BaseException('no')", "def f(: pass"])
def test_reward_file_that_fails_on_import_is_refused(tmp_path, code, user_error):
    (tmp_path / "rules.py").write_text(code)
    with user_error("--reward-func", "rules.py"):
        find_rule(f"{tmp_path}/rules.py:f", ())


def test_failing_seed_stops_the_command_with_status_1(run_flags, tmp_path):
    file = tmp_path / "rules.py"
    file.write_text("import sys\ndef f(completions):\n    sys.exit(0)\n")
    run(run_flags("--rm-model", "none", "--reward-func", f"{file}:f", "--seeds", 1, 2), 1)


def test_function_without_a_signature_is_called():
    with pytest.raises(RunError, match="TypeError"):
        score(dict.fromkeys)


# --- the dataset's columns -------------------------------------------------------------------------------------------


def exact(completions, answer):
    return [float(text == str(expected)) for text, expected in zip(completions, answer, strict=True)]


def test_function_receives_the_columns_in_its_signature():
    assert score(exact).total == [1.0, 0.0]
    assert score(lambda **kwargs: [float(a) for a in kwargs["answer"]]).total == [4.0, 4.0]
    assert required_columns(exact) == ["answer"]
    assert required_columns(lambda completions, weight=2, **_: 0) == []


def test_row_without_the_column_gives_none(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b"}\n')
    assert [e.columns["answer"] for e in load_examples(str(file))] == [1, None]
    assert [e.columns["answer"] for e in examples_of([{"prompt": "a", "answer": 1}, {"prompt": "b"}])] == [1, None]


def test_missing_required_column_is_reported(user_error):
    rows = examples_of([{"prompt": "a", "anwser": "1"}])
    with user_error("'exact'", "'answer'", ": prompts. ", "'anwser'"):
        check_columns([exact], rows, "prompts")


def test_all_columns_that_a_function_lacks_are_one_problem():
    """Each would have the same cause: usually, the function is written for another trainer."""

    def foreign(completions, data_source, weight, style=None):
        return [0.0] * len(completions)

    with pytest.raises(UserError) as caught:
        check_columns([foreign, exact], examples_of(["a"]), "prompts")
    first, second = (problem.what for problem in caught.value.problems)
    assert all(name in first for name in ("'foreign'", "'data_source'", "'weight'")) and "style" not in first
    assert all(name in second for name in ("'exact'", "'answer'"))


@pytest.fixture
def sums(tmp_path):
    """Writes rows with a column "answer" and a reward function that requires it. Returns their folder."""
    rows = [{"prompt": f"{i} + 1?", "answer": i + 1} for i in range(60)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rules.py").write_text(
        "def right(completions, prompts, answer):\n"
        "    assert all(int(p.split()[0]) + 1 == a for p, a in zip(prompts, answer)), (prompts, answer)\n"
        "    return [float(a) for a in answer]\n"
    )
    return tmp_path


@pytest.mark.parametrize("script", [train_ppo, train_grpo])
def test_columns_of_a_file_reach_training_and_evaluation(run_flags, sums, script):
    groups = ["--batch-size", 2, "--K", 2] if script is train_grpo else []
    rule = f"{sums}/rules.py:right"
    script.main(run_flags("--prompts", sums / "sums.jsonl", "--rm-model", "none", "--reward-func", rule, *groups))
    figures = RunRecord.read(sums / "run").figures
    assert figures["score_before"] == figures["score_after"] > 1
    out = ["--output", str(sums / "evaluated"), "--num-prompts", "3"]
    evaluate_generations.main(["--model-path", str(sums / "run"), "--reward-func", rule, *out])
    report = json.loads((sums / "evaluated" / "evaluation.json").read_text())
    for prompt in report["prompts"]:
        answer = int(prompt["messages"][-1]["content"].split()[0]) + 1
        assert {c["score"] for side in prompt["sides"] for c in side["completions"]} == {answer}


def test_missing_column_is_refused_before_loading_a_model(run_flags, sums, monkeypatch, capsys):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    rule = f"{sums}/rules.py:right"
    run(run_flags("--rm-model", "none", "--reward-func", rule), 2)
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "'right'" in error and "'answer'" in error


def test_columns_reach_a_function_passed_in_python(start_model, tmp_path, user_error, monkeypatch):
    monkeypatch.setattr("rlhf.callbacks.reward_warning.MOST_SECONDS", 0.0)  # the function records all its calls
    seen = []

    def right(completions, answer):
        seen.extend(answer)
        return [float(a) for a in answer]

    flags = ["--actor-model", start_model, "--output", tmp_path, "--num-iterations", 1, "--max-new-tokens", 4]
    config = parse_cli([str(flag) for flag in flags])
    rows = [{"prompt": f"{i} + 1?", "answer": i + 1} for i in range(8)]
    trainer = make_trainer(config, rows, rewards=[right])
    trainer.train()
    assert set(seen) <= set(range(1, 9)) and len(seen) == 8 + 4 + 8
    with user_error("'answer'", "prompts"):
        make_trainer(config, ["1 + 1?"] * 4, rewards=[right])
