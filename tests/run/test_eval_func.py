"""Tests of --eval-func, --eval-samples and --best-rule NAME in whole runs of a tiny model."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from statistics import fmean

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train_grpo
import train_ppo
from rlhf.api import make_trainer
from rlhf.checkpoints.manifest import find_checkpoints
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import config_of_run, make_config, parse_cli
from rlhf.rewards.find import find_eval_functions
from rlhf.setup.fit import estimator_of
from rlhf.trainer.evaluation import flat
from rlhf.utils.errors import RunError
from tests.conftest import attach, typed

FUNCTIONS = """
def odd(completions, completion_ids, answer, **_):
    print("seen")
    return [None if a is None else float(len(ids) % 2) for a, ids in zip(answer, completion_ids)]
def size(completions, **_):
    return [len(text) for text in completions]
def applies(completions, answer, **_):
    return [None if a is None else len(text) for a, text in zip(answer, completions)]
def never(completions, **_):
    return [None] * len(completions)
"""


@pytest.fixture
def questions(tmp_path) -> Path:
    """Rows of gsm8k's form. The first third has no answer."""
    rows = [{"question": f"How much is {i} and {i}?", "answer": f"Add.\n#### {2 * i}"} for i in range(60)]
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(json.dumps(row if i >= 20 else row | {"answer": None}) for i, row in enumerate(rows)))
    (tmp_path / "checks.py").write_text(FUNCTIONS)
    return file


@pytest.fixture
def flags(run_flags, questions):
    """Return a function that adds flags to those of a tiny run with a reward function and no reward model."""

    def make(*more) -> list[str]:
        base = run_flags("--rm-model", "none", "--reward-func", "length_penalty", "--prompts", questions)
        return [*base, "--split", "0/80/20", "--eval-prompts", "8", "--kl-schedule", "fixed", *map(str, more)]

    return make


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder / "logs"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def samples(folder: Path, update: int) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples" / f"update-{update:06d}.jsonl").open(encoding="utf-8")]


def test_a_run_with_evaluation_functions_and_four_samples(flags, tmp_path, capsys, user_error, monkeypatch):
    """Tags, run.json, the best checkpoint, samples, console, model card and printed text of one run, and a resume
    with bit-identical results after an interruption."""
    monkeypatch.setattr("rlhf.checkpoints.best.PERPLEXITY_GATE", 100.0)
    rule = f"{tmp_path / 'checks.py'}:odd"
    more = ["--eval-func", rule, "exact_match", "--eval-samples", 4, "--best-rule", "odd", "--eval-every", 1]
    argv = flags(*more, "--save-every", 1, "--keep", 9)
    train_ppo.main(argv)
    run = tmp_path / "run"
    out = capsys.readouterr().out
    record = RunRecord.read(run)
    logged = scalars(run)
    found = record.best.evaluations
    rows = samples(run, 2)
    assert len(rows) == 8 * 4 and [r["prompt"] for r in rows[:4]] == [rows[0]["prompt"]] * 4
    values = [row["metrics"]["odd"] for row in rows]
    by_prompt = [v for i in range(0, 32, 4) if None not in (v := values[i : i + 4])]
    assert 0 < len(by_prompt) < 8, "some rows have no answer"
    mean = sum(map(sum, by_prompt)) / (4 * len(by_prompt))
    at_end = found[-1]["metrics"]["odd"]
    assert at_end["value"] == pytest.approx(mean) and at_end["low"] <= mean <= at_end["high"]
    pairs = [1 - (4 - sum(v)) * (3 - sum(v)) / 12 for v in by_prompt]  # 1 - C(4 - c, 2) / C(4, 2)
    assert at_end["pass_at_2"] == pytest.approx(sum(pairs) / len(pairs))
    assert at_end["pass_at_4"] == pytest.approx(sum(sum(v) > 0 for v in by_prompt) / len(by_prompt))
    for key in ("low", "high", "pass_at_1", "pass_at_2", "pass_at_4"):
        assert logged[f"eval/odd/{key}"][-1] == (2, pytest.approx(at_end[key]))
    assert [step for step, _ in logged["eval/odd"]] == [0, 1, 2]
    assert logged["eval/exact_match"][-1][1] == 0.0
    best = max(found, key=lambda e: (e["metrics"]["odd"]["value"], -e["update"]))
    assert record.best.update == best["update"] and record.best.why.startswith("the highest odd (")
    figures = record.figures
    assert figures["eval/odd_after"] == at_end["value"] and len(figures["eval/odd_rise_interval"]) == 2
    assert f"odd {at_end['value']:.3f} (" in out and f"pass@4 {at_end['pass_at_4']:.3f}" in out
    assert "odd/pass_at_4" in out, "the summary"
    assert "| odd |" in (run / "README.md").read_text()
    assert f"--eval-func {rule} exact_match" in out, "the next commands"
    assert "odd, exact_match; 4 " in out, "the plan"
    assert set(record.data["rules"]) == {"length_penalty", rule, "exact_match"}
    assert record.data["rules"][rule] is not None
    check_resume(run, rule, logged, user_error)
    assert "update 1 of 2, " in capsys.readouterr().out


def check_resume(run: Path, rule: str, logged: dict, user_error) -> None:
    """Resume a copy of a finished run after its first update: all results must be the same, bit by bit."""
    other = run.with_name("other")
    shutil.copytree(run, other)
    shutil.rmtree(find_checkpoints(other, RunRecord.read(other).id).valid[2])
    record = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps({**record, "status": "stopped"}))
    with user_error("--eval-func ", "checks.py:odd exact_match"):
        train_ppo.main(["--resume", "--output", str(other)])
    without = config_of_run(RunRecord.read(other), eval_func=())
    assert (without.reward.eval_func, without.run.best_rule) == ((), "score")
    train_ppo.main(["--resume", "--eval-func", rule, "exact_match", "--output", str(other)])
    again = RunRecord.read(other)
    same = lambda e: {k: v for k, v in e.items() if k != "peak_memory_gib"}  # noqa: E731
    assert [same(e) for e in again.best.evaluations] == [same(e) for e in record["best"]["evaluations"]]
    assert {k: v for k, v in again.figures.items() if k.startswith("eval/")} == {
        k: v for k, v in record["figures"].items() if k.startswith("eval/")
    }
    assert samples(other, 2) == samples(run, 2)
    assert scalars(other)["eval/odd"] == logged["eval/odd"]


def test_an_evaluation_function_changes_nothing_that_is_learned(build, questions, tmp_path):
    """With one sample, all other metrics are the same, too. The first of several samples is that of one sample."""
    seen = {}
    for name, more in (("plain", []), ("watched", ["--eval-func", f"{tmp_path / 'checks.py'}:size"]),
                       ("three", ["--eval-samples", 3])):  # fmt: skip
        trainer = build("--prompts", questions, "--split", "0/80/20", "--output", tmp_path / name, *more)
        trainer.train()
        weights = [w.detach().clone() for w in trainer.host.model.parameters()]
        seen[name] = weights, trainer.evaluations[-1]
    for name in ("watched", "three"):
        assert all(torch.equal(a, b) for a, b in zip(seen["plain"][0], seen[name][0], strict=True))
    plain, watched, three = (seen[name][1] for name in ("plain", "watched", "three"))
    added = {"eval/size", "eval/size/low", "eval/size/high"}
    assert {k: v for k, v in watched.metrics().items() if k not in added} == plain.metrics()
    assert flat(watched.judged["size"]) == [len(text) for text in flat(watched.texts)]
    assert [row[:1] for row in three.texts] == plain.texts and len(set(three.texts[0])) > 1
    assert three.perplexity == plain.perplexity, "the fixed text does not depend on the number of samples"


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["--best-rule", "right"], ["best_rule ", "'right': --best-rule right. ", "score, perplexity"]),
        (["--eval-func", "exact_match", "--best-rule", "x"], ["--best-rule x. ", "score, perplexity, exact_match"]),
        (["--eval-func", "a.py:score"], ["'score': --eval-func a.py:score. "]),
        (["--eval-func", "a.py:perplexity"], ["'perplexity': --eval-func a.py:perplexity. "]),
        (["--eval-func", "a.py:f", "b.py:f"], ["2 ", "'f': --eval-func a.py:f b.py:f. "]),
        (["--eval-func", "a.py:f g"], ["'f g' ", ": --eval-func"]),
        (["--eval-samples", "0"], ["eval_samples"]),
        (["--eval-samples", "2", "--eval-temperature", "0"], ["--eval-samples", "--eval-temperature 0"]),
    ],
)
def test_errors_of_the_settings(more, parts, user_error):
    with user_error(*parts) as refused:
        parse_cli(more, "ppo")
    assert len(refused.value.problems) == 1


def test_missing_files_and_columns_are_errors_before_a_model_loads(
    flags, questions, tmp_path, monkeypatch, user_error
):
    with user_error("nowhere.py", "--eval-func takes"):
        train_ppo.main(flags("--eval-func", tmp_path / "nowhere.py:f"))
    plain = tmp_path / "plain.jsonl"
    plain.write_text("\n".join(json.dumps({"question": f"What is {i}?"}) for i in range(60)))
    monkeypatch.setattr("rlhf.setup.build.load_start_policy", lambda *_: pytest.fail("a model was loaded"))
    with user_error("'exact_match'", "'answer'"):
        train_ppo.main(flags("--prompts", plain, "--eval-func", "exact_match"))


def test_evaluation_functions_from_python(start_model, tmp_path, user_error):
    config = make_config(actor_model=str(start_model), num_iterations=1, max_new_tokens=6, batch_size=2, ppo_epochs=1)

    def words(completions, **_):
        return [float(len(text.split())) for text in completions]

    asked = [f"What is {i}?" for i in range(4)]
    trainer = make_trainer(config, asked, rewards=[lambda completions, **_: [0.0] * len(completions)],
                           eval_functions=[words])  # fmt: skip
    metrics = trainer.train()
    assert metrics["eval/words"] == pytest.approx(
        fmean(len(text.split()) for text in flat(trainer.evaluations[-1].texts))
    )
    with user_error("'<lambda>'", "eval_functions"):
        make_trainer(config, asked, rewards=[words], eval_functions=[lambda completions, **_: [0.0]])


def test_reward_functions_may_return_none_in_an_evaluation(flags, tmp_path):
    rule = f"{tmp_path / 'checks.py'}:applies"
    train_grpo.main([*flags("--reward-func", rule, "--K", 2, "--batch-size", 2), "--output", str(tmp_path / "run")])
    rows = samples(tmp_path / "run", 0)
    scores = [row["score"] for row in rows if row["score"] is not None]
    assert 0 < len(scores) < len(rows)
    assert RunRecord.read(tmp_path / "run").figures["score_before"] == pytest.approx(sum(scores) / len(scores))


def test_an_evaluation_without_any_score_ends_the_run(build, questions, tmp_path, user_error):
    trainer = build("--prompts", questions, "--split", "0/80/20", "--rm-model", "none", "--reward-func",
                    f"{tmp_path / 'checks.py'}:never")  # fmt: skip
    attach(trainer)
    with user_error("never", "update 0", kind=RunError):
        trainer.train()


def test_a_function_without_values_is_shown_and_has_no_metric(build, questions, tmp_path, capsys):
    trainer = build("--prompts", questions, "--split", "0/80/20", "--eval-func", f"{tmp_path / 'checks.py'}:never")
    log = attach(trainer)
    trainer.train()
    assert "eval/never" not in trainer.evaluations[-1].metrics()
    shown = set(re.findall(r", (never [^,\n]*)", capsys.readouterr().out))
    assert shown == {"never no value"}
    assert log.record.best.evaluations[-1]["metrics"] == {"never": {}}


def test_functions_of_trl_are_named_without_their_arguments():
    rule = "trl:get_repetition_penalty_reward(ngram_size=2)"
    config = parse_cli(["--eval-func", rule, "--best-rule", "get_repetition_penalty_reward"], "ppo")
    assert list(find_eval_functions(config)) == ["get_repetition_penalty_reward"]


def test_several_samples_need_more_memory_for_the_masks_of_allowed_tokens(build):
    trainer = build("--top-k", 5)
    lengths = [len(prompt.ids) for prompt in trainer.evaluation_prompts]
    estimate = dataclasses.replace(estimator_of(trainer), evaluation=lengths)
    four = dataclasses.replace(trainer.config, run=dataclasses.replace(trainer.config.run, eval_samples=4))
    one, more = (estimate(config).held["token masks"] for config in (trainer.config, four))
    assert more == 4 * one > 0


def test_next_commands_and_resume_contain_the_evaluation_code():
    from rlhf.settings.next_commands import code_words, resume_command

    config = parse_cli(["--eval-func", "my.py:right", "--best-rule", "right"], "ppo")
    rules = ["my.py:right", "exact_match"]
    assert code_words({"eval_func": rules}) == ["--eval-func", "my.py:right", "exact_match"]
    assert code_words({"reward_func": ["length_penalty"], "eval_func": ["exact_match"]}) == []
    assert parse_cli([w for w in typed(resume_command(config)) if w != "--resume"], "ppo").reward.eval_func == (
        "my.py:right",
    )
