"""Tests of environments on the command line: training, trust of their code, resume, evaluation, chat and pages."""

from __future__ import annotations

import io
import json
import sys

import pytest

import compare_runs
import evaluate_generations
import train_ppo
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import config_of_run
from rlhf.utils.errors import UserError

GAME = '''
from pathlib import Path

Path(__file__).with_name("mark").touch()


class Game:
    """Two turns; the second one is paid."""

    def reset(self, question, seed, **row):
        self.turn = 0
        return f" ({seed % 3})"

    def observe(self, completion):
        self.turn += 1
        return ("again", 0.0) if self.turn == 1 else (None, len(set(completion)) / 10)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("game")
    (made / "game.py").write_text(GAME, encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def flags(start_model, pairs_file, folder):
    def make(output, *more):
        words = ["--actor-model", start_model, "--prompts", pairs_file, "--rm-model", "none", "--eval-prompts", 4,
                 "--environment", f"{folder / 'game.py'}:Game", "--max-new-tokens", 6, "--max-episode-tokens", 40,
                 "--prompt-length", 100, "--batch-size", 4, "--num-iterations", 2, "--save-every", 1,
                 "--output", output, *more]  # fmt: skip
        return [str(word) for word in words]

    return make


@pytest.fixture(scope="module")
def run(flags, folder):
    output = folder / "run"
    train_ppo.main(flags(output, "--record-tokens"))
    return output


def test_a_run_records_the_environment_and_its_code(run, folder):
    record = RunRecord.read(run)
    rule = f"{folder / 'game.py'}:Game"
    assert config_of_run(record).environment.environment == rule
    assert record.data["rules"][rule]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert any(row.get("environment/turns") == 2 for row in metrics)


@pytest.mark.parametrize("command", ["evaluate", "compare", "chat", "resume"])
def test_the_code_of_a_run_needs_permission(run, folder, tmp_path, monkeypatch, command):
    mark = folder / "mark"
    mark.unlink(missing_ok=True)
    (run / "run.json").write_text(
        (run / "run.json").read_text(encoding="utf-8").replace("game.py:Game", "other.py:Game"), encoding="utf-8"
    )
    (folder / "other.py").write_text(GAME, encoding="utf-8")
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    stopped = record | {"status": "stopped" if command == "resume" else "finished"}
    (run / "run.json").write_text(json.dumps(stopped), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    output = ["--output", str(tmp_path / "out")]
    call = {
        "evaluate": lambda: evaluate_generations.main(["--model-path", str(run), *output]),
        "compare": lambda: compare_runs.main([str(run), *output]),
        "chat": lambda: evaluate_generations.main(["--chat", "--model-path", str(run)]),
        "resume": lambda: train_ppo.main(["--resume", "--output", str(run)]),
    }[command]
    try:
        with pytest.raises(UserError) as refused:
            call()
    finally:
        record["status"] = "finished"
        text = json.dumps(record).replace("other.py:Game", "game.py:Game")
        (run / "run.json").write_text(text, encoding="utf-8")
    (problem,) = refused.value.problems
    assert "other.py:Game" in str(problem) and "--environment" in str(problem)
    assert not mark.exists()


def test_an_evaluation_shows_the_turns_and_scores_them(run, folder, tmp_path):
    words = ["--model-path", run, "--num-prompts", 3, "--completions", 2, "--trust-reward-code"]
    evaluate_generations.main([str(word) for word in [*words, "--output", tmp_path / "out"]])
    report = json.loads((tmp_path / "out" / "evaluation.json").read_text(encoding="utf-8"))
    text = json.dumps(report["prompts"])
    assert text.count("[again]") >= 12  # two models, three prompts, two completions
    scores = [model["figures"]["score"] for model in (report["start"], *report["models"])]
    assert len(scores) == 2 and all(0 < score < 1 for score in scores)
    limited = [*words, "--max-turns", 1, "--output", tmp_path / "one"]
    evaluate_generations.main([str(word) for word in limited])
    assert "[again]" not in (tmp_path / "one" / "evaluation.json").read_text(encoding="utf-8")


def test_a_judge_model_is_refused_in_one_line(run, tmp_path, reward_folder):
    words = ["--model-path", run, "--trust-reward-code", "--judge-model", reward_folder, "--output", tmp_path / "out"]
    with pytest.raises(UserError) as refused:
        evaluate_generations.main([str(word) for word in words])
    (problem,) = refused.value.problems
    assert "--judge-model" in problem.place


@pytest.mark.ci
def test_a_comparison_plays_episodes(run, tmp_path):
    compare_runs.main([str(run), "--trust-reward-code", "--num-prompts", "4", "--output", str(tmp_path / "out")])
    assert "[again]" in (tmp_path / "out" / "comparison.json").read_text(encoding="utf-8")


def test_a_chat_plays_an_episode_per_line(run, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nOnce more\n"))
    evaluate_generations.main(["--chat", "--model-path", str(run), "--environment", f"{folder / 'game.py'}:Game"])
    assert capsys.readouterr().out.count("[again]") == 0  # a line has no column question, so the episode fails


def test_the_token_page_has_the_environments_texts(run, tmp_path):
    evaluate_generations.main(["--tokens", str(run), "--output", str(tmp_path / "page")])
    rows = [json.loads(line) for line in (run / "tokens" / "update-000001.jsonl").read_text("utf-8").splitlines()]
    starts = [row for row in rows if row["before"]]
    assert len(starts) == len({row["episode"] for row in rows}) and all("again" in row["before"] for row in starts)
    assert (tmp_path / "page" / "tokens.html").read_text(encoding="utf-8").count("again") >= len(starts)


def test_a_stopped_run_resumes_to_the_same_weights(run, flags, tmp_path, monkeypatch):
    from rlhf.trainer.loop import OnPolicyLoop

    output = tmp_path / "stopped"
    original = OnPolicyLoop.update_step

    def stops(self, update):
        if update == 2:
            raise KeyboardInterrupt
        return original(self, update)

    monkeypatch.setattr(OnPolicyLoop, "update_step", stops)
    with pytest.raises(KeyboardInterrupt):
        train_ppo.main(flags(output, "--record-tokens"))
    monkeypatch.setattr(OnPolicyLoop, "update_step", original)
    words = flags(output)
    train_ppo.main(["--resume", "--output", str(output), *words[words.index("--environment") :][:2]])
    assert (output / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
