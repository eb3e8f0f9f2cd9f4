"""Tests runs with a folder that are started in Python: their files, resuming, incidents, and the commands that read
them."""

from __future__ import annotations

import json
import random
import signal
import time
from datetime import date
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

import compare_runs
import evaluate_generations
import plot_training_progress
import train_ppo
from rlhf.analysis.curves import read_curves
from rlhf.analysis.equal_budget import read_eval_points
from rlhf.api import make_trainer
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import make_config
from rlhf.rewards.find import find_rule, name_in_settings
from rlhf.rewards.functions import length_penalty
from rlhf.run.session import write_prompts
from rlhf.settings.next_commands import code_words, resume_command
from rlhf.trainer.events import Events
from rlhf.utils.errors import RunError, UserError
from rlhf.utils.signals import TrainingInterrupted

PROMPTS = [{"prompt": f"What is number {i}?", "answer": str(i)} for i in range(8)]
HELD_OUT = [{"prompt": f"What is river {i}?", "answer": "x"} for i in range(4)]


def words(completions, **kwargs):
    """The number of words, with noise from Python's random numbers, which a resumed run must repeat."""
    return [len(text.split()) + random.random() for text in completions]


@pytest.fixture
def made(start_model, tmp_path, monkeypatch):
    """Return a function that makes a tiny trainer with the output folder `run`."""
    monkeypatch.chdir(tmp_path)
    tiny = {
        "actor_model": str(start_model),
        "batch_size": 2,
        "max_new_tokens": 6,
        "num_iterations": 4,
        "ppo_epochs": 1,
    }
    tiny |= {"eval_every": 2, "save_every": 2, "learning_rate": 1e-3}

    def make(rewards=words, callbacks=(), output="run", algorithm="ppo", **settings):
        config = make_config(algorithm=algorithm, **tiny | settings)
        return make_trainer(
            config, PROMPTS, rewards, callbacks=callbacks, evaluation_prompts=HELD_OUT, output=output, progress=False
        )

    return make


class Interrupts:
    """Sends Ctrl-C to this process in one update. Its state counts the updates of the whole run. A checkpoint must
    restore the states of the random numbers that it draws."""

    def __init__(self, update: int | None = None):
        self.update = update
        self.count = 0
        self.drawn = []

    def on_update_end(self, update, metrics):
        self.count += 1
        self.drawn.append((random.random(), np.random.random(), torch.rand(()).item()))
        if update == self.update:
            signal.raise_signal(signal.SIGINT)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def same_weights(one: Path, other: Path) -> bool:
    a = load_file(one / "model.safetensors")
    b = load_file(other / "model.safetensors")
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def without_time(metrics: dict) -> dict:
    return {n: v for n, v in metrics.items() if not n.startswith(("time/", "throughput/", "memory/"))}


def test_a_run_folder_has_the_files_of_a_scripts_run(made):
    trainer = made(algorithm="grpo", K=2)
    trainer.train()
    written = Path("run/metrics.jsonl").read_text()
    assert trainer.evaluate()["eval/score"] > 0 and Path("run/metrics.jsonl").read_text() == written, (
        "the run has ended"
    )
    names = {path.relative_to("run").parts[0] for path in Path("run").rglob("*")}
    assert {"run.json", "README.md", "model.safetensors", "best", "checkpoint-2", "checkpoint-4", "logs", "samples",
            "prompts", "tokenizer.json"} <= names  # fmt: skip
    run = RunRecord.read(Path("run"))
    assert run.status == "finished" and run.spent.updates == 4 and run.best is not None
    assert run.flat_settings["prompts"] == "(given in Python)" and run.flat_settings["rm_model"] is None
    rows = [json.loads(line) for line in Path("run/prompts/evaluation.jsonl").read_text().splitlines()]
    assert rows == HELD_OUT and len(Path("run/prompts/train.jsonl").read_text().splitlines()) == 8
    assert "(given in Python)" in Path("run/README.md").read_text()


def test_a_jump_of_the_clock_is_not_training_time(made, monkeypatch):
    jump = [0.0]
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump[0])

    class Jumps:
        def on_update_end(self, update, metrics):
            jump[0] = {2: 3600.0, 3: -86400.0}.get(update, jump[0])

    made(callbacks=[Jumps()], eval_every=1).train()
    seconds = [point.seconds for point in read_eval_points(read_curves(Path("run")))]
    assert len(seconds) == 5 and all(before < after for before, after in pairwise(seconds))
    assert seconds[0] == 0 and seconds[-1] <= RunRecord.read(Path("run")).figures["seconds"]


def test_without_output_nothing_is_written(made, tmp_path):
    made(output=None, num_iterations=1).train()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_resumed_run_is_bit_identical(made, user_error):
    random.seed(0)
    np.random.seed(0)
    whole = made(output="whole", callbacks=[uninterrupted := Interrupts()]).train()
    random.seed(0)
    np.random.seed(0)
    with user_error("update 2 of 4. ", "make_config(..., resume=True)", kind=TrainingInterrupted):
        made(callbacks=[Interrupts(2)]).train()
    assert RunRecord.read(Path("run")).status == "stopped"
    random.seed(1)
    np.random.seed(1)
    resumed = made(callbacks=[watch := Interrupts()], resume=True).train()
    assert same_weights(Path("run"), Path("whole")) and same_weights(Path("run/best"), Path("whole/best"))
    assert without_time(resumed) == without_time(whole) and watch.count == uninterrupted.count == 4
    assert watch.drawn == uninterrupted.drawn[2:]
    runs = [RunRecord.read(Path(name)) for name in ("run", "whole")]
    assert runs[0].best.evaluations[-1]["score"] == runs[1].best.evaluations[-1]["score"]
    assert len(runs[0].sessions) == 1


@pytest.mark.ci
def test_a_run_whose_callback_failed_is_resumed_from_its_checkpoint(made):
    class Fails:
        def on_update_end(self, update, metrics):
            assert update < 4, "a mistake"

    random.seed(0)
    with pytest.raises(AssertionError, match="a mistake"):
        made(callbacks=[Fails()]).train()
    assert RunRecord.read(Path("run")).reason == "AssertionError: a mistake\nassert 4 < 4"
    made(resume=True).train()
    random.seed(0)
    made(output="whole").train()
    assert same_weights(Path("run"), Path("whole"))


def test_after_an_error_the_files_are_closed_and_the_trainer_has_only_the_callbacks_of_the_user(made, monkeypatch):
    class Fails:
        def on_evaluation(self, evaluation):
            raise ValueError("a mistake")

    trainer = made(callbacks=[callback := Fails()], num_iterations=1)
    with monkeypatch.context() as patched, pytest.raises(UserError, match="no space"):
        patched.setattr("rlhf.run.session.write_prompts", lambda *_: None)
        patched.setattr("rlhf.run.session.resume_run", Mock(side_effect=UserError("no space")))
        trainer.train()
    assert trainer.events.callbacks == [callback]
    trainer = made(callbacks=[callback], num_iterations=1, overwrite=True)
    with pytest.raises(ValueError, match="a mistake"):
        trainer.train()
    assert Path("run/metrics.jsonl").stat().st_size > 0 and trainer.events.callbacks == [callback]
    folder = Path("run").resolve()
    assert not [file.path for file in psutil.Process().open_files() if folder in Path(file.path).parents]


def test_the_order_of_the_callbacks_changes_nothing(made, monkeypatch):
    """Also with KL control, checkpoints, best/ and two callbacks of the user."""
    settings = {"kl_target": "0.001/sequence", "kl_coef": 0.5, "num_iterations": 6}

    class Asks:
        def on_train_begin(self, trainer):
            self.trainer = trainer

        def on_update_end(self, update, metrics):
            if update == 3:
                self.trainer.set_kl_coef(0.3)

    original = Events.extended
    betas = []
    for order in range(4):

        def shuffled(self, callbacks, check, order=order):
            together = [*callbacks, *self.callbacks]
            self.callbacks = random.Random(order).sample(together, len(together)) if order else together
            return original(self, [], check)

        monkeypatch.setattr(Events, "extended", shuffled)
        random.seed(0)
        made(callbacks=[Asks(), Interrupts()], output=f"run-{order}", **settings).train()
        assert same_weights(Path("run-0"), Path(f"run-{order}"))
        rows = map(json.loads, Path(f"run-{order}/metrics.jsonl").read_text().splitlines())
        betas.append([row["kl_coef"] for row in rows if "kl_coef" in row])
    assert all(found == betas[0] for found in betas) and betas[0][3] == 0.3 and len(set(betas[0])) > 3


def test_a_run_is_moved_aside_with_overwrite(made, capsys):
    made(num_iterations=1).train()
    made(num_iterations=1, overwrite=True).train()
    assert sorted(path.name for path in Path().glob("run*")) == ["run", "run_1"] and "run_1" in capsys.readouterr().out


def test_what_cannot_be_resumed_is_one_line(made, user_error):
    with user_error("output run"):
        made(resume=True)
    made(num_iterations=2).train()
    with user_error("make_config", "load_model", "'run'"):
        made(num_iterations=2, resume=True)
    with user_error("--output run"):
        made()
    with user_error("learning_rate", "0.001", "0.1"):
        made(num_iterations=2, learning_rate=0.1, resume=True)
    script = ["--resume", "--resume-anyway", "--num-iterations", "3", "--output", "run"]
    with user_error("--resume", "--output run"):
        train_ppo.main([*script, "--reward-func", "length_penalty"])
    made(resume=True, resume_anyway=True).train()
    assert RunRecord.read(Path("run")).spent.updates == 4, "trained further"
    run = RunRecord.read(Path("run"))
    run.__class__(**{**vars(run), "status": "stopped"}).write(Path("run"))
    with user_error("--resume", "--output run"):
        train_ppo.main(["--resume", "--output", "run"])


def test_a_skipped_update_is_saved(made, user_error):
    def nothing(prompts, completions, **_):
        """NaN for the training prompts, which skips an update. An evaluation would end the run."""
        return [float("nan") if "number" in prompt else 1.0 for prompt in prompts]

    with user_error("3", "make_config", kind=RunError):
        made(nothing).train()
    incident = Path("run/incidents/update-000003")
    assert (incident / "incident.json").is_file()


@pytest.mark.ci
def test_the_commands_read_a_run_of_python(made, capsys, tmp_path, user_error):
    """Two algorithms with the same prompts are compared. The function is defined in this test, so the commands ask
    for a file."""

    def letters(completions, **_):
        return [float(len(text)) for text in completions]

    for algorithm, more in (("ppo", {}), ("grpo", {"K": 2})):
        made(letters, output=algorithm, algorithm=algorithm, **more).train()
    with user_error(" letters ", ": --reward-func. "):
        evaluate_generations.main(["--model-path", "ppo"])
    (tmp_path / "mine.py").write_text(
        "def letters(completions, **_):\n    return [float(len(t)) for t in completions]\n"
    )
    reward = ["--reward-func", "mine.py:letters"]
    evaluate_generations.main(["--model-path", "ppo", *reward, "--output", "evaluated"])
    assert "from 4 held-out prompts" in capsys.readouterr().out
    compare_runs.main(["ppo", "grpo", *reward, "--output", "compared", "--limit-minutes", "0"])
    printed = capsys.readouterr().out
    assert "PPO" in printed and "GRPO" in printed and "have changed since" not in printed
    plot_training_progress.main(["ppo", "grpo", "--output", "plot.png"])
    assert Path("plot.png").is_file()


def test_names_of_functions_in_run_json():
    assert name_in_settings(length_penalty) == "length_penalty"
    assert name_in_settings(lambda completions: []) == "python:<lambda>"
    assert name_in_settings(words).endswith("tests/run/test_python_run.py:words")
    from trl.rewards import think_format_reward

    assert name_in_settings(think_format_reward) == "trl:think_format_reward"


def test_a_printed_command_has_the_form_of_a_function_in_a_file(user_error):
    assert code_words({"reward_func": ["python:words"]}) == ["--reward-func", "FILE.py:words"]
    rules = ["python:<lambda>", "length_penalty"]
    assert code_words({"reward_func": rules}) == ["--reward-func", "FILE.py:NAME", "length_penalty"]
    with user_error("--reward-func", "FILE.py:NAME"):
        find_rule("python:<lambda>")


def test_prompts_are_valid_json_in_the_run_folder(tmp_path):
    row = {"prompt": "a", "weight": float("nan"), "day": date(2026, 1, 2)}
    prompts = [SimpleNamespace(example=SimpleNamespace(columns=row))]
    write_prompts(tmp_path, SimpleNamespace(train_prompts=prompts, evaluation_prompts=prompts))
    line = (tmp_path / "prompts" / "evaluation.jsonl").read_text()
    assert line == '{"prompt": "a", "weight": null, "day": "2026-01-02"}\n'


def test_the_command_that_resumes_a_run_of_python():
    printed = "make_config(..., resume=True, resume_anyway=True, learning_rate=1e-06) and the same make_trainer(...)"
    assert resume_command(make_config(), resume_anyway=True, learning_rate=1e-6) == printed
