"""A run's folder is data: what its files name is not executed, unless the command line says so."""

from __future__ import annotations

import json
import shlex
import shutil

import pytest

import compare_runs
import evaluate_generations
import train_ppo
from rlhf.checkpoints.run_record import RunRecord
from rlhf.utils.errors import UserError
from tests.conftest import typed
from tests.trainer.test_nan import nan_rule, run


@pytest.fixture
def trap(runs, tmp_path):
    """Somebody's finished run whose run.json names a file that leaves a mark when it is executed."""
    folder = tmp_path / "theirs"
    shutil.copytree(runs["ppo", 1], folder)
    (tmp_path / "notes.py").write_text(
        f"open({str(tmp_path / 'mark')!r}, 'w')\ndef f(completions, **_):\n    return [1.0] * len(completions)\n"
    )
    record = json.loads((folder / "run.json").read_text())
    record["settings"]["reward"]["reward_func"] = [f"{tmp_path / 'notes.py'}:f"]
    (folder / "run.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize("command", ["evaluate", "compare", "resume", "resume-seeds", "replay"])
def test_a_runs_files_execute_nothing(trap, tmp_path, command):
    output = ["--output", str(tmp_path / "out")]
    rule = f"{tmp_path / 'notes.py'}:f"
    if command.startswith("resume"):
        record = json.loads((trap / "run.json").read_text())
        (trap / "run.json").write_text(json.dumps({**record, "status": "stopped"}))
    words = {
        "evaluate": lambda: evaluate_generations.main(["--model-path", str(trap), *output]),
        "compare": lambda: compare_runs.main([str(trap), *output]),
        "resume": lambda: train_ppo.main(["--resume", "--output", str(trap)]),
        "resume-seeds": lambda: train_ppo.main(["--resume", "--seeds", "1", "--output", seeds_of(trap)]),
        "replay": lambda: train_ppo.main(["--replay", incident(trap)]),
    }[command]
    with pytest.raises(UserError) as refused:
        words()
    assert rule in str(refused.value) and "--reward-func" in str(refused.value)
    assert not (tmp_path / "mark").exists(), "the file was executed"


def seeds_of(trap) -> str:
    trap.rename(f"{trap}_seed1")
    return str(trap)


def incident(trap) -> str:
    """A folder with all that an incident's reader looks at first."""
    from safetensors.torch import save_file

    folder = trap / "incidents" / "update-000001"
    folder.mkdir(parents=True)
    record = json.loads((trap / "run.json").read_text())
    message = {"algorithm": "ppo", "settings": record["settings"], "update": 1}
    (folder / "incident.json").write_text(json.dumps(message))
    (folder / "batch.jsonl").write_text("")
    save_file({}, folder / "tensors.safetensors")
    return str(folder)


@pytest.mark.parametrize("consent", ["--trust-reward-code", "--reward-func"])
def test_with_consent_the_code_runs(trap, tmp_path, consent):
    words = [consent] if consent == "--trust-reward-code" else [consent, f"{tmp_path / 'notes.py'}:f"]
    out = ["--output", str(tmp_path / "out"), "--num-prompts", "2"]
    evaluate_generations.main(["--model-path", str(trap), *words, *out])
    assert (tmp_path / "mark").exists()


def test_a_finished_run_is_exported_without_its_code(trap, tmp_path, capsys):
    train_ppo.main(["--resume", "--output", str(trap)])
    assert "nothing to train" in capsys.readouterr().out
    assert not (tmp_path / "mark").exists()


def test_the_printed_resume_command_names_the_code_and_works(run_flags, tmp_path, capsys):
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
    nan_rule(tmp_path, 10**5)  # the user fixes it
    run([*typed(printed), "--resume-anyway"])  # because the file has changed
    assert RunRecord.read(tmp_path / "run").status == "finished"
    (replay,) = (
        line.split("step by step with: ")[1] for line in output.out.splitlines() if "step by step with: " in line
    )
    run(typed(replay))
    assert "found" in capsys.readouterr().out
