"""Models found and measured alike: runs, adapters, plain models; and chance is not called a difference."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf.analysis.evaluator import GenerationResults, ModelEvaluator
from rlhf.analysis.models import find_model_ref, find_models, shared_settings
from rlhf.analysis.verdict import RunGroup, judge_runs
from rlhf.config import make_config
from rlhf.data.prompts import Prompt
from rlhf.models.budget import BUDGETS
from rlhf.settings.evaluation import MeasureSettings
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError
from tests.records import record_of
from tests.shapes import make_base_model, make_reward_model, make_start_model

CPU = torch.device("cpu")


@pytest.fixture
def settings(start_model, reward_folder, pairs_file) -> MeasureSettings:
    return MeasureSettings(
        baseline=str(start_model),
        rm_model=str(reward_folder),
        prompts=str(pairs_file),
        num_prompts=4,
        completions=2,
        max_new_tokens=8,
        temperature=1.0,
    )


def evaluator_of(names, settings) -> tuple[ModelEvaluator, list]:
    models = find_models([str(name) for name in names], settings, "--model-path")
    return ModelEvaluator(models, settings, CPU, Screen()), models


# --- finding ---------------------------------------------------------------------------------------------------------


def test_a_run_is_found_by_its_folder_and_says_which_weights(runs):
    final, best = (find_model_ref(str(runs["ppo", 1]), which, None) for which in ("final", "best"))
    assert (final.which, final.update, best.which) == ("final", 2, "best")
    assert final.label == f"{runs['ppo', 1]} (final, after update 2)"
    chosen = json.loads((runs["ppo", 1] / "run.json").read_text())["best"]["update"]
    assert best.update == chosen and best.source.endswith("best")
    inside = find_model_ref(str(runs["ppo", 1] / "best"), "final", None)
    assert (inside.which, inside.update) == ("best", chosen), "a folder inside a run is known as the run's"


def test_an_adapter_is_found_with_its_base(runs, start_model):
    found = find_model_ref(str(runs["grpo", 1]), "final", None)
    assert found.base == str(start_model) and found.source == str(runs["grpo", 1])


def test_an_adapter_whose_base_is_gone(runs, tmp_path, start_model):
    """One line that names adapter, base and the way out; and the way out works."""
    orphan = tmp_path / "orphan"
    orphan.mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(runs["grpo", 1] / file, orphan)
    facts = json.loads((orphan / "adapter_config.json").read_text())
    (orphan / "adapter_config.json").write_text(json.dumps({**facts, "base_model_name_or_path": "/gone/model"}))
    with pytest.raises(UserError) as error:
        find_model_ref(str(orphan), "final", None)
    assert str(error.value) == (
        f"the adapter's base model is missing (/gone/model): --model-path {orphan}. Give it with --baseline FOLDER"
    )
    assert find_model_ref(str(orphan), "final", str(start_model)).base == str(start_model)


def test_a_named_start_model_does_not_take_the_place_of_an_adapters_own_base(runs, start_model, tmp_path):
    other = make_start_model(tmp_path / "other", seed=4)
    assert find_model_ref(str(runs["grpo", 1]), "final", str(other)).base == str(start_model)


def test_a_bare_adapters_base_is_its_start_model(runs, start_model, settings, tmp_path):
    bare = shutil.copytree(runs["grpo", 1], tmp_path / "bare")
    (bare / "run.json").unlink()
    evaluator, models = evaluator_of([bare], dataclasses.replace(settings, baseline=None))
    assert evaluator.start.source == str(start_model) and (f"base of {bare}", str(start_model)) in evaluator.facts()
    assert evaluator.evaluate(models[0], Screen()).kl is not None


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("adapter_config.json", '{"base', "invalid JSON: .*adapter_config.json"),
        ("run.json", '{"status": "fin', "run.json is incomplete or corrupted: .*torn. Restore the file"),
        ("run.json", '{"status": "failed"}', "run.json has no settings, so this is not a training run: .*torn"),
        ("run.json", '{"status": "failed", "format": 2}', "corrupted, 'id' is missing or invalid: .*torn. Restore"),
    ],
)
def test_a_torn_file_of_a_model_is_named(runs, tmp_path, file, text, words):
    folder = shutil.copytree(runs["grpo", 1], tmp_path / "torn")
    (folder / file).write_text(text)
    with pytest.raises(UserError, match=words):
        find_model_ref(str(folder), "final", None)


def test_what_is_not_there_is_said_together(tmp_path, settings):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as error:
        find_models([str(tmp_path / n) for n in ("nowhere", "empty", "empty")], settings, "--model-path")
    twice, nowhere, empty = error.value.problems
    assert "given twice" in twice and "model not found" in nowhere and "no model in this folder" in empty


def test_an_unfinished_run_has_no_final_weights(runs, tmp_path):
    folder = tmp_path / "going"
    shutil.copytree(runs["ppo", 1], folder)
    (folder / "model.safetensors").unlink()
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, "status": "running"}))
    with pytest.raises(
        UserError, match="no final weights because the run is running: --model-path .* Add --which best"
    ):
        find_model_ref(str(folder), "final", None)
    assert find_model_ref(str(folder), "best", None).which == "best"


def test_settings_come_from_the_run_and_flags_win(runs):
    models = [find_model_ref(str(runs["ppo", 1]), "final", None)]
    plain = shared_settings(models, MeasureSettings())
    assert (plain.sampling.max_new_tokens, plain.sampling.temperature) == (8, 0.7)
    told = shared_settings(models, MeasureSettings(temperature=0.5, max_new_tokens=5))
    assert (told.sampling.max_new_tokens, told.sampling.temperature) == (5, 0.5)
    assert shared_settings([], MeasureSettings(like="demo")).data.prompts == make_config("demo").data.prompts


def test_runs_measured_with_unlike_settings_are_refused_until_a_flag_decides(runs):
    one, other = (find_model_ref(str(runs[name]), "final", None) for name in (("ppo", 1), ("grpo", 1)))
    settings = {**other.run.settings, "sampling": {**other.run.settings["sampling"], "temperature": 0.9}}
    other = dataclasses.replace(other, run=dataclasses.replace(other.run, settings=settings))
    with pytest.raises(
        UserError, match=r"the runs differ in temperature: 0.7 in .*, 0.9 in .*Set it with --temperature"
    ):
        shared_settings([one, other], MeasureSettings())
    assert shared_settings([one, other], MeasureSettings(temperature=0.8)).sampling.temperature == 0.8


# --- measuring -------------------------------------------------------------------------------------------------------


def test_the_start_model_measured_as_a_model_is_itself(settings, start_model):
    """Same weights, same random numbers: the same replies, no KL."""
    evaluator, models = evaluator_of([start_model], settings)
    start, same = evaluator.evaluate_start(Screen()), evaluator.evaluate(models[0], Screen())
    assert start.texts == same.texts and start.perplexity == same.perplexity
    assert np.abs(same.kl).max() < 1e-6 and np.array_equal(start.scores, same.scores)
    assert len({text for row in start.texts for text in row}) > 1, "completions differ from each other"


def test_another_model_differs_and_its_kl_is_measured(settings, start_model, tmp_path):
    policy = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32)
    with torch.no_grad():
        policy.get_input_embeddings().weight.mul_(60)  # tied to the head: sharper, and far from the start
    other = shutil.copytree(start_model, tmp_path / "other")
    policy.save_pretrained(other)
    evaluator, models = evaluator_of([other], settings)
    measured, start = evaluator.evaluate(models[0], Screen()), evaluator.evaluate_start(Screen())
    assert measured.kl.mean() > 1 and measured.texts != start.texts
    assert measured.perplexity != pytest.approx(start.perplexity, rel=0.01)


def test_a_trained_adapter_is_measured_as_the_run_measured_it(runs):
    """The bench's perplexity of a run's start and of its final weights are the run's own."""
    run = json.loads((runs["grpo", 1] / "run.json").read_text())
    evaluator, models = evaluator_of([runs["grpo", 1]], MeasureSettings(num_prompts=3))
    measured = evaluator.evaluate(models[0], Screen())
    assert measured.perplexity == pytest.approx(run["figures"]["perplexity_after"], rel=1e-4)
    assert evaluator.text.source == run["figures"]["perplexity_text"]
    start = evaluator.evaluate_start(Screen())
    assert start.perplexity == pytest.approx(run["figures"]["perplexity_before"], rel=1e-4)


def test_kl_and_lengths_by_hand(settings, start_model, tmp_path):
    """Each reply's KL from plain forward passes: log-softmax at the sampling temperature, summed over its tokens."""
    policy = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32)
    with torch.no_grad():
        policy.get_input_embeddings().weight.mul_(20)
    other = shutil.copytree(start_model, tmp_path / "other")
    policy.save_pretrained(other)
    settings = dataclasses.replace(settings, temperature=0.7, num_prompts=3)
    evaluator, models = evaluator_of([other], settings)
    kept = []
    sample = evaluator._sample
    evaluator._sample = lambda *a: kept.append(sample(*a)) or kept[-1]
    measured = evaluator.evaluate(models[0], Screen())
    (completions,) = kept
    start = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32).eval()
    for row in range(6):
        ids = [*completions.prompt_ids[row][completions.prompt_mask[row]].tolist(), *completions.rows()[row]]
        count = len(completions.rows()[row])
        with torch.no_grad():
            one, two = (
                (m(torch.tensor([ids])).logits[0] / 0.7).log_softmax(-1)[range(-count - 1, -1), ids[-count:]].sum()
                for m in (policy.eval(), start)
            )
        assert measured.kl[row // 2, row % 2] == pytest.approx(float(one - two), abs=1e-3)
        assert measured.lengths[row // 2, row % 2] == count


def test_every_reply_has_random_numbers_of_its_own(settings, start_model, monkeypatch):
    """However many are sampled at once: a second part is not the first one over again."""
    same_prompt = dataclasses.replace(settings, num_prompts=1, completions=8)
    evaluator, _ = evaluator_of([start_model], same_prompt)
    with monkeypatch.context() as patch:
        patch.setitem(BUDGETS, "cpu", dataclasses.replace(BUDGETS["cpu"], generation_batch_size=4))
        apart = evaluator.evaluate_start(Screen()).texts[0]
    assert apart[:4] != apart[4:]
    assert evaluator.evaluate_start(Screen()).texts[0] == apart, "and the parts change nothing"


def swapped(folder):
    """Another tokenizer of the same size: two words change places."""
    facts = json.loads((folder / "tokenizer.json").read_text())
    a, b = (token for token, i in facts["model"]["vocab"].items() if i in (300, 301))
    facts["model"]["vocab"][a], facts["model"]["vocab"][b] = facts["model"]["vocab"][b], facts["model"]["vocab"][a]
    (folder / "tokenizer.json").write_text(json.dumps(facts))
    return folder


def test_another_tokenizer_has_no_kl_and_its_own_perplexity(settings, tmp_path):
    """Different vocabularies have no common tokens to compare the probabilities of. The perplexity is what it is
    beside no start model at all: prompts and replies are read by the model's own tokenizer."""
    other = swapped(make_start_model(tmp_path / "other", seed=3))
    evaluator, models = evaluator_of([other], settings)
    measured = evaluator.evaluate(models[0], Screen())
    assert measured.kl is None and len(measured.texts) == 4
    alone, models = evaluator_of([other], dataclasses.replace(settings, baseline=None))
    assert measured.perplexity == alone.evaluate(models[0], Screen()).perplexity


def test_a_base_model_without_a_chat_template_and_no_start(settings, tmp_path):
    """Any Hugging Face model: without a start model there is no KL, and the chosen replies serve the perplexity."""
    base = make_base_model(tmp_path / "base")
    evaluator, models = evaluator_of([base], dataclasses.replace(settings, baseline=None))
    measured = evaluator.evaluate(models[0], Screen())
    assert measured.kl is None and measured.perplexity > 1 and evaluator.start is None


def test_the_judge_is_another_reward_model(settings, start_model, reward_folder, tmp_path):
    judge = make_reward_model(tmp_path / "judge", seed=7)
    evaluator, _ = evaluator_of([start_model], dataclasses.replace(settings, judge_model=str(judge)))
    start = evaluator.evaluate_start(Screen())
    assert start.judged.shape == start.scores.shape and not np.allclose(start.judged, start.scores)
    copied = shutil.copytree(reward_folder, tmp_path / "copied")
    for same in (reward_folder, copied):
        with pytest.raises(UserError, match="the judge is also the reward model of the scores: --judge-model"):
            evaluator_of([start_model], dataclasses.replace(settings, judge_model=str(same)))


def test_a_judge_that_training_saw_is_refused_whatever_scores_now(runs, reward_folder, tmp_path):
    other = make_reward_model(tmp_path / "other", seed=7)
    settings = MeasureSettings(num_prompts=2, rm_model=str(other), judge_model=str(reward_folder))
    with pytest.raises(UserError, match=f"the judge is also the reward model of {runs['ppo', 1]}: --judge-model"):
        evaluator_of([runs["ppo", 1]], settings)
    evaluator, _ = evaluator_of([runs["ppo", 1]], dataclasses.replace(settings, judge_model=None))
    assert evaluator.score_name == "not the training reward"
    assert evaluator_of([runs["ppo", 1]], MeasureSettings(num_prompts=2))[0].score_name == "the training reward"


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (float("nan"), r"NaN or infinity in score\.weight: weights of .*judge"),
        (1e30, r"score .* is too large \(the limit is 1e\+09\): reward function judge"),
    ],
)
def test_a_judge_whose_scores_say_nothing_is_named(settings, start_model, tmp_path, weight, message):
    """One line, before anything is made of it."""
    judge = make_reward_model(tmp_path / "judge", seed=7)
    model = AutoModelForSequenceClassification.from_pretrained(judge)
    with torch.no_grad():
        model.score.weight.fill_(weight)
    model.save_pretrained(judge)
    with pytest.raises(UserError, match=message):
        evaluator, _ = evaluator_of([start_model], dataclasses.replace(settings, judge_model=str(judge)))
        evaluator.evaluate_start(Screen())


def test_prompts_that_no_run_looked_at_come_first(settings, start_model, runs):
    """Of the evaluation part, 6 are followed by the runs: the others are drawn while they are enough."""
    few, _ = evaluator_of([runs["ppo", 1]], MeasureSettings(num_prompts=3))
    followed = {p.example.question for p in few.followed}
    assert "that no run used for its own evaluations" in few.prompts_line
    assert not followed & {e.question for e in few.examples} and len(few.examples) == 3
    many, _ = evaluator_of([runs["ppo", 1]], MeasureSettings(num_prompts=500))
    assert "--num-prompts 500 is more than there are" in many.prompts_line and len(many.examples) > 6


def test_runs_that_followed_unlike_numbers_of_prompts(runs):
    """The prompts of the one that followed most are looked at; and each run's own are known for its own."""
    models = [find_model_ref(str(runs[name]), "final", None) for name in (("ppo", 1), ("ppo", 2))]
    evaluator, _ = evaluator_of([runs["ppo", 1]], MeasureSettings(num_prompts=2))
    longer = [p for p in evaluator.followed] + [Prompt((), evaluator.examples[0])]
    data = {"evaluation_prompts": 8, "evaluation_sha256": "another"}
    models[1] = dataclasses.replace(models[1], run=dataclasses.replace(models[1].run, data=data))
    seen = {p.example.question for p in longer}
    made = ModelEvaluator(models, MeasureSettings(num_prompts=2), CPU, Screen())
    assert len(seen) == 7 and "held-out prompts that no run used for its own evaluations" in made.prompts_line
    alone = ModelEvaluator(models[:1], MeasureSettings(num_prompts=2), CPU, Screen())
    count = [int(b.prompts_line.split(" from ")[1].split()[0]) for b in (alone, made)]
    assert count[0] - count[1] == 2, "6 were followed by the one, 8 by the other"


def test_changed_evaluation_prompts_are_said(runs, tmp_path, capsys, pairs_file):
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("\n".join(pairs_file.read_text().splitlines()[30:]))
    evaluator_of([runs["ppo", 1]], MeasureSettings(num_prompts=3, prompts=str(fewer)))
    assert "the evaluation prompts have changed since the run" in capsys.readouterr().out


def sampled(evaluator: ModelEvaluator, seed: int) -> GenerationResults:
    evaluator.settings = dataclasses.replace(evaluator.settings, seed=seed)
    return evaluator.evaluate_start(Screen())


@pytest.mark.ci
def test_a_model_against_itself_is_seldom_called_different(settings, start_model):
    """The same weights under other sampling seeds, 100 times: at most 10 verdicts name a better side."""
    settings = dataclasses.replace(settings, num_prompts=12, completions=2, max_new_tokens=4)
    evaluator, _ = evaluator_of([start_model], settings)
    evaluator.text = None  # a perplexity draws nothing
    run, called = record_of(seed=1), 0
    start = sampled(evaluator, 0)
    for trial in range(100):
        made = [sampled(evaluator, 2 * trial + i + 1) for i in range(2)]
        groups = [
            RunGroup(name, [run], [completions], [1]) for name, completions in zip(("ppo", "grpo"), made, strict=True)
        ]
        sentence = judge_runs(groups, start, None, trial).sentences[0]
        assert sentence.startswith("No difference shown") or "replies are better than" in sentence
        called += "better" in sentence
    assert called <= 10
