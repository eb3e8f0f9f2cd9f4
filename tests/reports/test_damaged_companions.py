"""Files next to weights and reports that a comparison reads: each is missing, empty, `[]`, cut off, or lacks a part.

The comparison reads around it with a note, or one line names the file and the fix.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest

import compare_runs
from rlhf.analysis.curves import read_curves, read_runs
from rlhf.analysis.equal_budget import read_eval_points
from rlhf.analysis.models import find_models
from rlhf.analysis.prompts import _trained_on, choose_prompts
from rlhf.analysis.start_samples import read_samples
from rlhf.checkpoints.run_record import RUN_FILE, RunRecord
from rlhf.config import config_of_run
from rlhf.data.examples import examples_of
from rlhf.data.tokenizer import load_tokenizer
from rlhf.settings.evaluation import MeasureSettings
from rlhf.settings.training import DataSettings
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError

SAMPLES = {"key": "key", "minutes": 0.5, "samples": [[[[1, 2], [3]], [True, False]]]}
DAMAGES = ["empty", "[]", "cut off"]


def damage(file, how: str) -> None:
    text = file.read_bytes()
    file.write_bytes({"empty": b"", "[]": b"[]", "cut off": text[: len(text) - len(text) // 3]}[how])


@pytest.fixture
def copy(runs, tmp_path):
    """A copy of a run."""
    return shutil.copytree(runs["ppo", 1], tmp_path / "copy")


@pytest.mark.parametrize("how", [*DAMAGES, "null", "no key", "no minutes", "no samples", "a number as samples"])
def test_damaged_start_samples_are_sampled_again(tmp_path, how):
    file = tmp_path / "start_samples.json"
    part = how.rpartition(" ")[2]
    kept = {name: value for name, value in SAMPLES.items() if not (how.startswith("no ") and name == part)}
    kept |= {"samples": 3} if how.startswith("a number") else {}
    file.write_text("null" if how == "null" else json.dumps(kept))
    if how in DAMAGES:
        damage(file, how)
    screen = Screen()
    assert read_samples(file, "key", screen) == ([], 0.0)
    assert len(screen.notes) == 1 and file.name in screen.notes[0]


@pytest.mark.parametrize("how", [*DAMAGES, "a row is a list", *("prompt", "completion", "score", "kl", "ended")])
def test_a_damaged_file_of_completions_names_itself_and_the_fix(copy, user_error, how):
    file = copy / "samples" / "update-000002.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    if how in DAMAGES:
        damage(file, how)
    else:
        rows[1] = [] if how == "a row is a list" else {name: v for name, v in rows[1].items() if name != how}
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_curves(copy)
    with user_error("update-000002.jsonl", "Delete it"):
        read_eval_points(run)
    file.unlink()
    assert [point.update for point in read_eval_points(run)] == [0, 1]


@pytest.mark.parametrize("how", ["missing", "no file", *DAMAGES])
def test_a_run_without_its_logs_is_compared_without_curves(copy, how):
    (events,) = (copy / "logs").glob("*tfevents*")
    if how == "missing":
        shutil.rmtree(copy / "logs")
    elif how == "no file":
        events.unlink()
    else:
        damage(events, how)
    (run,) = read_runs([copy], without_scalars=True)
    assert any("logs" in remark for remark in run.remarks)
    assert bool(run.scalars) == (how == "cut off") and (run.scalars or read_eval_points(run) == [])
    if not run.scalars:
        with pytest.raises(UserError):
            read_runs([copy])


@pytest.mark.parametrize("how", ["missing", *DAMAGES])
def test_a_damaged_record_of_a_run_is_one_line(copy, how):
    if how == "missing":
        (copy / RUN_FILE).unlink()
    else:
        damage(copy / RUN_FILE, how)
    with pytest.raises(UserError) as caught:
        RunRecord.require(copy, "run")
    (problem,) = caught.value.problems
    assert str(copy) in str(problem.place) and problem.fix


@pytest.mark.parametrize("part", ["evaluation_prompts", "evaluation_sha256"])
def test_a_record_without_its_evaluation_prompts_has_a_warning(runs, part):
    (model,) = find_models([str(runs["ppo", 1])], MeasureSettings(), "RUN")
    lost = replace(model, run=replace(model.run, data={n: v for n, v in model.run.data.items() if n != part}))
    said = []
    tokenizer = load_tokenizer(model.source)
    choose_prompts(
        config_of_run(lost.run),
        [lost],
        MeasureSettings(num_prompts=3),
        3,
        tokenizer,
        {model.source: tokenizer},
        said.append,
    )
    (line,) = [line for line in said if RUN_FILE in line]
    assert line.startswith("warning: ") and model.name in line


def test_a_record_without_its_split_has_a_warning(runs):
    (model,) = find_models([str(runs["ppo", 1])], MeasureSettings(), "RUN")
    for prompts in ({}, {"split": "no split"}):
        lost = replace(model, run=replace(model.run, prompts=prompts))
        data = DataSettings(prompts=model.run.flat_settings["prompts"])
        (warning,) = _trained_on(examples_of(["A question?"]), data, [lost])
        assert "not known" in warning and model.name in warning


def test_a_comparison_of_runs_without_several_companions(runs, copy, tmp_path, capsys):
    """What the console says, the page and the JSON file say, too."""
    record = json.loads((copy / RUN_FILE).read_text())
    del record["data"]["evaluation_prompts"], record["data"]["rules"], record["prompts"]["split"]
    (copy / RUN_FILE).write_text(json.dumps(record))
    shutil.rmtree(copy / "logs")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "start_samples.json").write_text("[]")
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"question": f"Is {i % 4} odd?"}) + "\n" for i in range(40)))
    words = [copy, runs["grpo", 2], "--prompts", file, "--completions", 2, "--limit-minutes", 0.001,
             "--output", tmp_path / "out"]  # fmt: skip
    compare_runs.main([str(word) for word in words])
    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    report = json.loads((tmp_path / "out" / "comparison.json").read_text(encoding="utf-8"))
    page = (tmp_path / "out" / "comparison.html").read_text(encoding="utf-8")
    expected = {"warnings": ["36 of 40 rows", "not known"], "notes": ["start_samples.json", "no scalars", "only 4 "]}
    for kind, parts in expected.items():
        for part in parts:
            assert [part in line for line in report[kind]].count(True) == 1 and part in page
            assert re.search(rf"{kind[:-1]}: [^│]*{part}", printed) and printed.count(part) == 1
    assert "At equal budgets" not in page, "an empty table"
    assert str(tmp_path) not in page, "no path of this machine"
    assert len(json.loads((tmp_path / "out" / "start_samples.json").read_text())["samples"]) >= 8
