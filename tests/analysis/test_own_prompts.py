"""Tests evaluations on a file of prompts: every prompt is used, and rows that a run trained on are reported."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

from rlhf.analysis.evaluator import ModelEvaluator
from rlhf.analysis.models import find_models, shared_settings
from rlhf.analysis.prompts import _trained_on, choose_prompts
from rlhf.checkpoints.model_folder import METRICS_FILE
from rlhf.data.examples import examples_of, load_examples
from rlhf.data.prompts import fingerprint, load_prompts
from rlhf.data.splits import part_of
from rlhf.data.tokenizer import load_tokenizer
from rlhf.settings.evaluation import MeasureSettings, parse_evaluation_cli
from rlhf.settings.training import DataSettings
from rlhf.settings.types import Renaming, Split
from rlhf.utils.console import Screen

QUESTIONS = [f"How many steps are in answer {i}?" for i in range(10)]


@pytest.fixture
def own_prompts(tmp_path):
    """Return a function that writes questions to a file."""

    def write(*questions: str, **more: str):
        file = tmp_path / "own.jsonl"
        file.write_text("".join(json.dumps({"question": q, **more}) + "\n" for q in questions))
        return file

    return write


def evaluator_of(run, prompts, **settings) -> ModelEvaluator:
    measure = MeasureSettings(prompts=str(prompts), completions=1, max_new_tokens=4, **settings)
    return ModelEvaluator(find_models([str(run)], measure, "--model-path"), measure, torch.device("cpu"), Screen())


def warnings_in(capsys) -> list[str]:
    """Return the printed warnings about prompts that a run trained on."""
    return [line for line in capsys.readouterr().out.splitlines() if "warning: " in line and "--prompts" in line]


def asked(evaluator: ModelEvaluator) -> list[str]:
    return [e.messages[-1]["content"] for e in evaluator.examples]


def test_every_row_of_a_file_is_used_in_order(runs, own_prompts, capsys):
    """Ten questions, of which a split would keep about one."""
    evaluator = evaluator_of(runs["ppo", 1], own_prompts(*QUESTIONS))
    assert asked(evaluator) == QUESTIONS and " 10 rows " in dict(evaluator.facts())["prompts"]
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1 and METRICS_FILE in warnings[0], "the accuracy of the reward model; no trained question"
    assert len(evaluator.evaluate_start(Screen()).texts) == 10


def test_num_prompts_draws_from_the_file_at_random(runs, own_prompts):
    evaluator = evaluator_of(runs["ppo", 1], own_prompts(*QUESTIONS), num_prompts=4)
    drawn = asked(evaluator)
    assert len(set(drawn)) == 4 and set(drawn) < set(QUESTIONS) and drawn != QUESTIONS[:4]
    assert asked(evaluator) == sorted(asked(evaluator)), "in the order of the file"
    assert dict(evaluator.facts())["prompts"].startswith("4 drawn ")
    more = evaluator_of(runs["ppo", 1], own_prompts(*QUESTIONS), num_prompts=11)
    assert asked(more) == QUESTIONS and "--num-prompts 11" in more.prompts.line


def test_rows_that_are_too_long_or_repeated_are_counted_and_not_used(runs, own_prompts, user_error):
    long = "Why " + "is the table " * 100
    evaluator = evaluator_of(runs["ppo", 1], own_prompts(*QUESTIONS, long, QUESTIONS[3], QUESTIONS[4]))
    assert sorted(asked(evaluator)) == QUESTIONS, "independent prompts"
    line = evaluator.prompts.line
    assert all(part in line for part in ("10 of the 13 ", " 1 longer ", "--prompt-length 100", " 2 that repeat "))
    with user_error("own.jsonl", "1 rows", "--prompt-length"):
        evaluator_of(runs["ppo", 1], own_prompts(long))


def test_split_of_the_command_line_selects_the_evaluation_part(runs, pairs_file):
    evaluator = evaluator_of(runs["ppo", 1], pairs_file, split=Split(45, 45, 10), num_prompts=500)
    examples = load_examples(str(pairs_file))
    held_out = {e.question for e in examples if part_of(e, Split(45, 45, 10)) == "evaluation"}
    assert {e.question for e in evaluator.examples} == held_out


def test_prompts_that_a_run_trained_on_are_counted(runs, pairs_file, own_prompts, capsys):
    """The run's own file, a copy of some of its rows, and the same warning once for two runs with the same data."""
    distinct = {e.question: part_of(e, Split(45, 45, 10)) for e in load_examples(str(pairs_file))}
    evaluator = evaluator_of(runs["ppo", 1], pairs_file)
    assert len(evaluator.examples) == len(distinct)
    (warning,) = warnings_in(capsys)
    trained, learned = ([part_of(e, Split(45, 45, 10)) for e in evaluator.examples].count(p) for p in ("rl", "reward"))
    assert trained == list(distinct.values()).count("rl") > 9
    assert learned == list(distinct.values()).count("reward") > 9
    assert [int(number) for number in re.findall(r" (\d+) ", warning)] == [len(evaluator.examples), trained, learned]
    assert str(runs["ppo", 1]) in warning and f"--prompts {pairs_file}" in warning
    known = next(q for q, part in distinct.items() if part == "rl")
    measure = MeasureSettings(prompts=str(own_prompts(known, *QUESTIONS)), max_new_tokens=4)
    models = find_models([str(runs["ppo", 1]), str(runs["grpo", 1])], measure, "--model-path")
    ModelEvaluator(models, measure, torch.device("cpu"), Screen())
    (both,) = warnings_in(capsys)
    assert re.findall(r" (\d+) ", both) == ["11", "1"]


def test_chosen_completions_of_the_file_are_the_text_for_the_perplexity(runs, own_prompts):
    pairs = own_prompts(*QUESTIONS[:5], chosen="step by step", rejected="no")
    evaluator = evaluator_of(runs["ppo", 1], pairs, num_prompts=2)
    assert len(evaluator.text.completions) == 5 and "own.jsonl" in evaluator.text.source
    without = evaluator_of(runs["ppo", 1], own_prompts(*QUESTIONS))
    assert len(without.text.completions) == 10 and "start model" in without.text.source


def test_run_that_selected_other_parts_can_share_a_file(runs, own_prompts):
    """The split of the runs does not apply to --prompts, so runs with different splits can be evaluated together."""
    prompts = own_prompts(*QUESTIONS)
    measure = MeasureSettings(prompts=str(prompts), completions=1, max_new_tokens=4)
    one, other = find_models([str(runs["ppo", 1]), str(runs["ppo", 2])], measure, "--model-path")
    settings = {**other.run.settings, "data": {**other.run.settings["data"], "split": "10/80/10"}}
    other = dataclasses.replace(other, run=dataclasses.replace(other.run, settings=settings))
    evaluator = ModelEvaluator([one, other], measure, torch.device("cpu"), Screen())
    assert asked(evaluator) == QUESTIONS


def test_data_flags_belong_to_the_file(runs, own_prompts, tmp_path):
    """A CSV file with other column names is read with --columns. The columns of the run do not apply to it."""
    (tmp_path / "own.csv").write_text("ask,answer\nWhat is 1 + 1?,2\nWhat is 1 + 2?,3\n,4\n")
    columns = (Renaming("question=ask"),)
    evaluator = evaluator_of(runs["ppo", 1], tmp_path / "own.csv", columns=columns, skip_bad_rows=50.0)
    assert asked(evaluator) == ["What is 1 + 1?", "What is 1 + 2?"]
    assert [str(e.columns["answer"]) for e in evaluator.examples] == ["2", "3"]
    (model,) = find_models([str(runs["ppo", 1])], MeasureSettings(), "--model-path")
    settings = {**model.run.settings, "data": {**model.run.settings["data"], "columns": ["question=ask"]}}
    renamed = dataclasses.replace(model, run=dataclasses.replace(model.run, settings=settings))
    assert shared_settings([renamed], MeasureSettings()).data.columns == columns
    measure = MeasureSettings(prompts=str(own_prompts(*QUESTIONS)), max_new_tokens=4)
    assert asked(ModelEvaluator([renamed], measure, torch.device("cpu"), Screen())) == QUESTIONS
    given = MeasureSettings(prompts="openai/gsm8k", dataset_config="main", dataset_split="test")
    assert shared_settings([renamed], given).data.dataset_split == "test"


def test_other_split_of_a_hub_dataset_was_not_trained_on(runs):
    """The rows of a hub dataset are those of the run only if its configuration and split are the same, too."""
    (model,) = find_models([str(runs["ppo", 1])], MeasureSettings(), "--model-path")
    data = {**model.run.settings["data"], "prompts": "openai/gsm8k", "dataset_config": "main", "split": "0/100/0"}
    run = dataclasses.replace(model.run, settings={**model.run.settings, "data": data})
    run = dataclasses.replace(run, prompts={"rows": 10, "split": "0/100/0"})
    trained = dataclasses.replace(model, run=run)
    examples = examples_of(QUESTIONS)
    same = DataSettings(prompts="openai/gsm8k", dataset_config="main")
    assert "10" in _trained_on(examples, same, [trained])[0]
    assert _trained_on(examples, dataclasses.replace(same, dataset_split="test"), [trained]) == []


def test_data_of_a_run_that_is_gone_is_reported(runs):
    """For example because the run stores a relative path, and the command runs in another folder."""
    (model,) = find_models([str(runs["ppo", 1])], MeasureSettings(), "--model-path")
    data = {**model.run.settings["data"], "prompts": "./gone.jsonl"}
    moved = dataclasses.replace(
        model, run=dataclasses.replace(model.run, settings={**model.run.settings, "data": data})
    )
    (warning,) = _trained_on(examples_of(QUESTIONS), DataSettings(prompts="own.jsonl"), [moved])
    assert "./gone.jsonl" in warning and str(runs["ppo", 1]) in warning


def test_a_run_with_an_evaluation_file_is_evaluated_on_it(runs, own_prompts):
    """Its training file is not needed for that. --prompts replaces it."""
    (model,) = find_models([str(runs["ppo", 1])], MeasureSettings(), "--model-path")
    file = str(own_prompts(*QUESTIONS))
    data = {**model.run.settings["data"], "eval_dataset": file, "prompts": "./moved.jsonl"}
    changed = dataclasses.replace(
        model, run=dataclasses.replace(model.run, settings={**model.run.settings, "data": data})
    )
    settings = shared_settings([changed], MeasureSettings())
    assert settings.data.eval_dataset == file
    tokenizer = load_tokenizer(model.source)
    own = {model.source: tokenizer}
    chosen = choose_prompts(settings, [changed], MeasureSettings(num_prompts=4), 20, tokenizer, own, print)
    assert {e.question for e in chosen.examples} < {q.casefold() for q in QUESTIONS} and len(chosen.examples) == 4
    assert "own.jsonl" in chosen.line and file not in chosen.line
    assert shared_settings([changed], MeasureSettings(prompts="other.jsonl")).data.eval_dataset is None


def test_flags_of_a_file_need_the_file(user_error):
    """Otherwise they would silently change how the run's own data is read."""
    with user_error("--dataset-split", "--columns", "--prompts") as caught:
        parse_evaluation_cli(["--model-path", "RUN", "--columns", "a=b", "--dataset-split", "test"])
    assert len(caught.value.problems) == 2
    assert parse_evaluation_cli(["--model-path", "RUN", "--split", "0/0/100"]).measure.split == Split(0, 0, 100)


def test_held_out_prompts_are_those_of_the_runs_without_the_flag(runs, start_model, pairs_file):
    """Nothing changes without --prompts: the first held-out prompts are the runs' own evaluation prompts."""
    measure = MeasureSettings(num_prompts=3, completions=1)
    models = find_models([str(runs["ppo", 1])], measure, "--model-path")
    evaluator = ModelEvaluator(models, measure, torch.device("cpu"), Screen())
    data = DataSettings(prompts=str(pairs_file), prompt_length=100, eval_prompts=6)
    sets = load_prompts(data, load_tokenizer(str(start_model)))
    assert fingerprint(evaluator.prompts.of_text, evaluator.tokenizer) == fingerprint(
        sets.evaluation, evaluator.tokenizer
    )
