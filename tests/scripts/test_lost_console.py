"""Tests that losing standard output loses no work: a run ends as always and stores the loss, and other commands write
their files. tests/utils/test_streams.py tests the streams themselves."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import compare_runs
import evaluate_generations
import plot_training_progress
import train_grpo
from reward_model import train as reward_script
from rlhf.api import make_trainer
from rlhf.checkpoints.run_folder import METRICS_LOG
from rlhf.checkpoints.run_log import RunLog
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import make_config
from rlhf.utils.errors import print_line, run_command
from rlhf.utils.streams import lost_streams
from tests.distributed.ranks import free_port
from tests.kills import differing, metrics_of
from tests.scripts.test_scripts import ROOT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="terminals and closed pipes as on Linux and macOS")
REASONS = {"pipe": "Broken pipe", "terminal": "Input/output error", "full disk": "No space left on device"}
CHATTY = "def chatty(completions, **_):\n    print('scored ' * 5000)\n    return [len(str(c)) for c in completions]\n"


def follow(reader: int, last: bytes) -> None:
    """Read a pipe or terminal until it has printed `last` or its writer has ended, and close it."""
    printed = b""
    while last not in printed and (more := os.read(reader, 65536)):
        printed += more
    os.close(reader)


@pytest.fixture
def lose(monkeypatch):
    """Return a function that puts another standard output in place, which is lost after it has printed `last`; without
    it, from the start. A full disk is full from the start."""
    opened = []

    def make(kind: str, last: str = "") -> None:
        if kind == "full disk":
            stream = open("/dev/full", "w")  # noqa: SIM115
        else:
            reader, writer = os.pipe() if kind == "pipe" else os.openpty()
            stream = open(writer, "w")  # noqa: SIM115
            threading.Thread(target=follow, args=(reader, last.encode()), daemon=True).start()
        opened.append(stream)
        for name in ("stdout", "__stdout__"):
            monkeypatch.setattr(sys, name, stream)

    lost_streams.clear()
    yield make
    lost_streams.clear()
    for stream in opened:
        stream.close()


def rows_with_loss(run: Path) -> list[int]:
    """Return the updates of the lines of metrics.jsonl that have the loss."""
    rows = map(json.loads, (run / METRICS_LOG).read_text(encoding="utf-8").splitlines())
    return [row["update"] for row in rows if "console_lost" in row]


def test_a_run_ends_as_always(run_flags, tmp_path, lose, capsys):
    """The reward function prints much: its print does not fail, either."""
    (tmp_path / "reward.py").write_text(CHATTY)
    flags = run_flags("--batch-size", 2, "--K", 2, "--num-iterations", 4, "--eval-every", 2, "--save-every", 2)
    flags += ["--rm-model", "none", "--reward-func", f"{tmp_path / 'reward.py'}:chatty"]
    plain = tmp_path / "run"
    train_grpo.main(flags)
    capsys.readouterr()
    for kind, reason in REASONS.items():
        lost = tmp_path / kind
        lost_streams.clear()
        lose(kind, "evaluation after update 2")
        run_command(lambda lost=lost: train_grpo.main([*flags, "--output", str(lost)]))
        errors = capsys.readouterr().err
        assert errors.count("\n") == 1 and reason in errors and str(lost) not in errors
        record = RunRecord.read(lost)
        assert record.status == "finished" and record.console_lost == {"stdout": reason}
        assert rows_with_loss(lost)[0] in ((0,) if kind == "full disk" else (2, 3))
        rows = [{key: row[key] for key in row if key != "console_lost"} for row in metrics_of(lost)]
        assert rows == metrics_of(plain)
        assert set(differing(plain, lost)) <= {f"{METRICS_LOG} differs"}, "weights, best/, checkpoints, TensorBoard"
        assert {f.name for f in plain.iterdir()} == {f.name for f in lost.iterdir()}
    assert rows_with_loss(plain) == [] and RunRecord.read(plain).console_lost is None


def test_a_run_in_a_python_program_ends_as_always(start_model, tmp_path, lose):
    """The program's stream is back afterwards, open."""
    tiny = {"actor_model": str(start_model), "batch_size": 2, "max_new_tokens": 6, "num_iterations": 3}
    config = make_config(algorithm="ppo", **tiny, eval_every=1)
    trainer = make_trainer(config, ["one", "two", "three"], ["length_penalty"], output=tmp_path / "run")
    lose("pipe")
    own = sys.stdout
    trainer.train()
    assert sys.stdout is own and not own.closed
    record = RunRecord.read(tmp_path / "run")
    assert record.status == "finished" and record.console_lost == {"stdout": REASONS["pipe"]}
    lost_streams.clear()
    with RunLog(tmp_path / "run", resume=True) as log:
        assert log.record.console_lost == record.console_lost, "a resumed run keeps it"


@pytest.mark.ci
def test_other_commands_write_their_files(runs, pairs_file, start_model, tmp_path, lose, capsys):
    model = str(runs["ppo", 1])
    lose("pipe")
    run_command(lambda: print_line("x" * 100_000))
    assert "Broken pipe" in capsys.readouterr().err
    lose("full disk")
    for command in (
        lambda: plot_training_progress.main([model, "--output", str(tmp_path / "plot")]),
        lambda: evaluate_generations.main(
            ["--model-path", model, "--num-prompts", "4", "--output", str(tmp_path / "evaluation")]
        ),
        lambda: compare_runs.main([model, "--num-prompts", "4", "--output", str(tmp_path / "comparison")]),
        lambda: reward_script.main(
            ["--pairs", str(pairs_file), "--base-model", str(start_model), "--actor-model", "none", "--rm-epochs", "1",
             "--rm-output", str(tmp_path / "rm")]
        ),
    ):  # fmt: skip
        run_command(command)
    files = ["plot.png", "plot.csv", "rm/model.safetensors"]
    files += ["evaluation/evaluation.json", "comparison/comparison.html"]
    assert [file for file in files if not (tmp_path / file).is_file()] == []


@pytest.mark.parametrize("kind", ["pipe", "full disk"])
def test_a_chat_ends_when_nobody_sees_the_replies(runs, lose, monkeypatch, kind):
    class Endless(io.StringIO):
        def readline(self, *_):
            return "Hello\n"

    monkeypatch.setattr(sys, "stdin", Endless())
    lose(kind)
    chat = ["--chat", "--model-path", str(runs["ppo", 1]), "--max-new-tokens", "5"]
    run_command(lambda: evaluate_generations.main(chat))


@pytest.mark.ci
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_run_whose_streams_are_closed(run_flags, tmp_path, closed):
    flags = [*run_flags("--batch-size", 2, "--K", 2), "--output", str(tmp_path / "run")]
    command = ["bash", "-c", f'"$@" {closed}', "bash", sys.executable, str(ROOT / "train_grpo.py"), *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert RunRecord.read(tmp_path / "run").status == "finished"
    for file in (tmp_path / "run").rglob("*.json*"):
        assert "update 2/2" not in file.read_text(encoding="utf-8"), "no print has reached a file of the run"


@pytest.mark.ci
def test_two_processes_without_standard_output_and_one_without_standard_error(run_flags, tmp_path):
    """No process ends, and none reports that another one has ended."""
    flags = [*run_flags("--batch-size", 2, "--K", 2, "--num-iterations", 4), "--output", str(tmp_path / "run")]
    (tmp_path / "train.py").write_text(
        "import os, sys, warnings\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from rlhf.utils.errors import RLHFWarning, run_command\n"
        "import train_grpo\n"
        "if os.environ['RANK'] == '1':\n"
        "    reader, writer = os.pipe()\n"
        "    os.close(reader)\n"
        "    os.dup2(writer, 2)\n"
        "def main():\n"
        "    print('a line on standard error', file=sys.stderr)\n"
        "    train_grpo.main(sys.argv[1:])\n"
        "run_command(main)\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    with subprocess.Popen(
        [sys.executable, *torchrun, str(tmp_path / "train.py"), *flags], cwd=tmp_path, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as launcher:  # fmt: skip
        follow(os.dup(launcher.stdout.fileno()), b"evaluation after update 0")
        launcher.stdout.close()
        launcher.stdout = None
        _, errors = launcher.communicate(timeout=200)
    lines = errors.decode().splitlines()
    assert launcher.returncode == 0, lines
    assert lines.count("a line on standard error") == 1
    assert [line for line in lines if "error:" in line] == []
    assert sum("Broken pipe" in line for line in lines) == 1
    record = RunRecord.read(tmp_path / "run")
    assert record.status == "finished" and record.console_lost == {"stdout": "Broken pipe"}
