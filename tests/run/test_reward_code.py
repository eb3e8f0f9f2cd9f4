"""Tests that code whose path is stored in a run folder is executed only if the command line allows it."""

from __future__ import annotations

import io
import json
import shlex
import shutil
import sys

import pytest

import compare_runs
import evaluate_generations
import train_ppo
from rlhf.checkpoints.run_record import RunRecord
from rlhf.utils.errors import UserError
from tests.conftest import typed
from tests.trainer.test_nan import nan_rule, run


@pytest.fixture
def untrusted_run(runs, tmp_path):
    """A finished run of somebody else. The reward function in its run.json creates the file `mark` if executed."""
    folder = tmp_path / "theirs"
    shutil.copytree(runs["ppo", 1], folder)
    (tmp_path / "notes.py").write_text(
        f"open({str(tmp_path / 'mark')!r}, 'w')\ndef f(completions, **_):\n    return [1.0] * len(completions)\n"
    )
    record = json.loads((folder / "run.json").read_text())
    record["settings"]["reward"]["reward_func"] = [f"{tmp_path / 'notes.py'}:f"]
    (folder / "run.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize("command", ["evaluate", "compare", "resume", "resume-seeds"])
def test_code_of_a_run_is_not_executed_by_default(untrusted_run, tmp_path, command):
    output = ["--output", str(tmp_path / "out")]
    rule = f"{tmp_path / 'notes.py'}:f"
    if command.startswith("resume"):
        record = json.loads((untrusted_run / "run.json").read_text())
        (untrusted_run / "run.json").write_text(json.dumps({**record, "status": "stopped"}))
    call = {
        "evaluate": lambda: evaluate_generations.main(["--model-path", str(untrusted_run), *output]),
        "compare": lambda: compare_runs.main([str(untrusted_run), *output]),
        "resume": lambda: train_ppo.main(["--resume", "--output", str(untrusted_run)]),
        "resume-seeds": lambda: train_ppo.main(["--resume", "--seeds", "1", "--output", seeds_of(untrusted_run)]),
    }[command]
    with pytest.raises(UserError) as refused:
        call()
    assert rule in str(refused.value) and "--reward-func" in str(refused.value)
    assert not (tmp_path / "mark").exists(), "the file was executed"


@pytest.mark.parametrize("merged", [False, True])
def test_a_chat_needs_no_code_of_its_run(untrusted_run, tmp_path, monkeypatch, capsys, merged):
    """The command that a run prints has no reward function."""
    model = untrusted_run
    if merged:
        record = json.loads((model / "run.json").read_text())
        (model / "run.json").write_text(json.dumps({**record, "merged": {"which": "final", "update": 2}}))
        model = shutil.copytree(untrusted_run, tmp_path / "copy").rename(untrusted_run / "merged")
        (model / "run.json").unlink()
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    evaluate_generations.main(["--chat", "--model-path", str(model), "--max-new-tokens", "3"])
    assert "/exit" in capsys.readouterr().out
    assert not (tmp_path / "mark").exists(), "the file was executed"


@pytest.mark.parametrize("command", ["resume", "resume-seeds", "export"])
def test_code_of_an_evaluation_function_is_not_executed_by_default(untrusted_run, tmp_path, command, user_error):
    """An export of a finished run needs none."""
    rule = f"{tmp_path / 'notes.py'}:f"
    record = json.loads((untrusted_run / "run.json").read_text())
    record["settings"]["reward"] |= {"reward_func": [], "eval_func": [rule]}
    record["settings"]["run"]["best_rule"] = "f"
    record["status"] = "finished" if command == "export" else "stopped"
    (untrusted_run / "run.json").write_text(json.dumps(record))
    if command == "export":
        train_ppo.main(["--resume", "--output", str(untrusted_run)])
    else:
        output = seeds_of(untrusted_run) if command == "resume-seeds" else str(untrusted_run)
        seeds = ["--seeds", "1"] if command == "resume-seeds" else []
        with user_error("--eval-func") as refused:
            train_ppo.main(["--resume", *seeds, "--output", output])
        assert rule in str(refused.value)
    assert not (tmp_path / "mark").exists(), "the file was executed"


def seeds_of(untrusted_run) -> str:
    untrusted_run.rename(f"{untrusted_run}_seed1")
    return str(untrusted_run)


@pytest.mark.parametrize("consent", ["--trust-reward-code", "--reward-func"])
def test_code_of_a_run_is_executed_if_a_flag_allows_it(untrusted_run, tmp_path, consent):
    words = [consent] if consent == "--trust-reward-code" else [consent, f"{tmp_path / 'notes.py'}:f"]
    out = ["--output", str(tmp_path / "out"), "--num-prompts", "2"]
    evaluate_generations.main(["--model-path", str(untrusted_run), *words, *out])
    assert (tmp_path / "mark").exists()


def test_finished_run_is_exported_without_executing_its_code(untrusted_run, tmp_path, capsys):
    train_ppo.main(["--resume", "--output", str(untrusted_run)])
    assert "nothing to train" in capsys.readouterr().out
    assert not (tmp_path / "mark").exists()


@pytest.mark.ci
def test_printed_evaluation_and_comparison_commands_contain_the_code(run_flags, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.py").write_text("def words(completions, **_): return [len(c.split()) for c in completions]")
    train_ppo.main(run_flags("--reward-func", "rules.py:words", "length_penalty", "--seeds", 1, 2))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    code = " --reward-func rules.py:words length_penalty"
    evaluate = [line for line in lines if line.startswith("evaluate the model")]
    compare = [line for line in lines if line.startswith("compare; add other runs after")]
    assert len(evaluate) == 2 and len(compare) == 3 and all(line.endswith(code) for line in [*evaluate, *compare])
    few = ["--num-prompts", "2"]
    evaluate_generations.main([*typed(evaluate[0][evaluate[0].index("python ") :]), *few])
    compare_runs.main([*typed(compare[-1][compare[-1].index("python ") :]), *few, "--limit-minutes", "0"])


def test_printed_resume_command_contains_the_code_and_works(run_flags, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rlhf.callbacks.reward_warning.MOST_SECONDS", 0.0)  # the function counts its calls
    rule = nan_rule(tmp_path, 3)
    flags = run_flags("--num-iterations", 6, "--save-every", 1, "--rm-model", "none", "--reward-func", rule)
    run(flags, 1)
    output = capsys.readouterr()
    (printed,) = (line.split("resume with: ")[1] for line in output.err.splitlines() if "resume with: " in line)
    printed = printed.split("; its inputs are saved")[0]
    assert f"--reward-func {shlex.quote(rule)}" in printed
    with pytest.raises(UserError) as refused:
        train_ppo.main(["--resume", "--output", str(tmp_path / "run")])
    assert str(refused.value).endswith(f"Resume with: {printed}")
    nan_rule(tmp_path, 10**5)  # the user fixes the reward function
    run([*typed(printed), "--resume-anyway"])  # needed because the file has changed
    assert RunRecord.read(tmp_path / "run").status == "finished"
