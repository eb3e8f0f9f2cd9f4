"""Models found and measured alike: runs, adapters, plain models; and chance is not called a difference."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from config import MeasureSettings, make_config
from rlhf.console import Screen
from rlhf.errors import UserError
from rlhf.measuring import Bench, Generations
from rlhf.trained import find_models, find_trained, shared_settings
from rlhf.verdict import Side, judge_runs
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
        reply_length=8,
        temperature=1.0,
    )


def bench_of(names, settings, start=True) -> tuple[Bench, list]:
    models = find_models([str(name) for name in names], settings, "--model-path")
    return Bench(models, settings, CPU, Screen(), start), models


# --- finding ---------------------------------------------------------------------------------------------------------


def test_a_run_is_found_by_its_folder_and_says_which_weights(runs):
    final, best = (find_trained(str(runs["ppo", 1]), which, None) for which in ("final", "best"))
    assert (final.which, final.update, best.which) == ("final", 2, "best")
    assert final.label == f"{runs['ppo', 1]} (final, after update 2)"
    chosen = json.loads((runs["ppo", 1] / "run.json").read_text())["best"]["update"]
    assert best.update == chosen and best.source.endswith("best")
    inside = find_trained(str(runs["ppo", 1] / "best"), "final", None)
    assert (inside.which, inside.update) == ("best", chosen), "a folder inside a run is known as the run's"


def test_an_adapter_is_found_with_its_base(runs, start_model):
    found = find_trained(str(runs["grpo", 1]), "final", None)
    assert found.base == str(start_model) and found.source == str(runs["grpo", 1])


def test_an_adapter_whose_base_is_gone(runs, tmp_path, start_model):
    """One line that names adapter, base and the way out; and the way out works."""
    orphan = tmp_path / "orphan"
    orphan.mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(runs["grpo", 1] / file, orphan)
    said = json.loads((orphan / "adapter_config.json").read_text())
    (orphan / "adapter_config.json").write_text(json.dumps({**said, "base_model_name_or_path": "/gone/model"}))
    with pytest.raises(UserError) as error:
        find_trained(str(orphan), "final", None)
    assert str(error.value) == (
        f"the adapter's base is gone (/gone/model): --model-path {orphan}. Name it with --baseline FOLDER"
    )
    assert find_trained(str(orphan), "final", str(start_model)).base == str(start_model)


def test_what_is_not_there_is_said_together(tmp_path, settings):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as error:
        find_models([str(tmp_path / "nowhere"), str(tmp_path / "empty")], settings, "--model-path")
    assert len(error.value.faults) == 2 and "no model in this folder" in error.value.faults[1]


def test_an_unfinished_run_has_no_final_weights(runs, tmp_path):
    folder = tmp_path / "going"
    shutil.copytree(runs["ppo", 1], folder)
    (folder / "model.safetensors").unlink()
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, "status": "running"}))
    with pytest.raises(UserError, match="no final weights, the run is running: --model-path .* Add --which best"):
        find_trained(str(folder), "final", None)
    assert find_trained(str(folder), "best", None).which == "best"


def test_settings_come_from_the_run_and_flags_win(runs):
    models = [find_trained(str(runs["ppo", 1]), "final", None)]
    plain = shared_settings(models, MeasureSettings())
    assert (plain.sampling.reply_length, plain.sampling.temperature) == (8, 0.7)
    told = shared_settings(models, MeasureSettings(temperature=0.5, reply_length=5))
    assert (told.sampling.reply_length, told.sampling.temperature) == (5, 0.5)
    assert shared_settings([], MeasureSettings(like="demo")).data.prompts == make_config("demo").data.prompts


def test_runs_measured_with_unlike_settings_are_refused_until_a_flag_decides(runs):
    one, other = (find_trained(str(runs[name]), "final", None) for name in (("ppo", 1), ("grpo", 1)))
    settings = {**other.run["settings"], "sampling": {**other.run["settings"]["sampling"], "temperature": 0.9}}
    other = dataclasses.replace(other, run={**other.run, "settings": settings})
    with pytest.raises(UserError, match=r"temperature is 0.7 in .* and 0.9 in .*Decide with --temperature"):
        shared_settings([one, other], MeasureSettings())
    assert shared_settings([one, other], MeasureSettings(temperature=0.8)).sampling.temperature == 0.8


# --- measuring -------------------------------------------------------------------------------------------------------


def test_the_start_model_measured_as_a_model_is_itself(settings, start_model):
    """Same weights, same random numbers: the same replies, no KL."""
    bench, models = bench_of([start_model], settings)
    start, same = bench.measure_start(Screen()), bench.measure(models[0], Screen())
    assert start.texts == same.texts and start.perplexity == same.perplexity
    assert np.abs(same.kl).max() < 1e-6 and np.array_equal(start.scores, same.scores)
    assert len({text for row in start.texts for text in row}) > 1, "completions differ from each other"


def test_another_model_differs_and_its_kl_is_measured(settings, start_model, tmp_path):
    policy = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32)
    with torch.no_grad():
        policy.get_input_embeddings().weight.mul_(60)  # tied to the head: sharper, and far from the start
    other = shutil.copytree(start_model, tmp_path / "other")
    policy.save_pretrained(other)
    bench, models = bench_of([other], settings)
    measured, start = bench.measure(models[0], Screen()), bench.measure_start(Screen())
    assert measured.kl.mean() > 1 and measured.texts != start.texts
    assert measured.perplexity != pytest.approx(start.perplexity, rel=0.01)


def test_a_trained_adapter_is_measured_as_the_run_measured_it(runs):
    """The bench's perplexity and KL of a run's final weights are the run's own last ones, on its own prompts."""
    run = json.loads((runs["grpo", 1] / "run.json").read_text())
    bench, models = bench_of([runs["grpo", 1]], MeasureSettings(num_prompts=3))
    measured = bench.measure(models[0], Screen())
    assert measured.perplexity == pytest.approx(run["figures"]["perplexity_after"], rel=1e-4)
    assert bench.text_source == run["figures"]["perplexity_text"]
    start = bench.measure_start(Screen())
    assert start.perplexity == pytest.approx(run["figures"]["perplexity_before"], rel=1e-4)


def test_another_tokenizer_has_no_kl(settings, tmp_path):
    """Different vocabularies have no common tokens to compare the probabilities of."""
    other = make_start_model(tmp_path / "other", seed=3)
    said = json.loads((other / "tokenizer.json").read_text())
    a, b = (token for token, i in said["model"]["vocab"].items() if i in (300, 301))
    said["model"]["vocab"][a], said["model"]["vocab"][b] = said["model"]["vocab"][b], said["model"]["vocab"][a]
    (other / "tokenizer.json").write_text(json.dumps(said))
    bench, models = bench_of([other], settings)
    measured = bench.measure(models[0], Screen())
    assert measured.kl is None and measured.perplexity is not None and len(measured.texts) == 4


def test_a_base_model_without_a_chat_template_and_no_start(settings, tmp_path):
    """Any Hugging Face model: without a start model there is no KL, and the chosen replies serve the perplexity."""
    base = make_base_model(tmp_path / "base")
    bench, models = bench_of([base], dataclasses.replace(settings, baseline=None), start=False)
    measured = bench.measure(models[0], Screen())
    assert measured.kl is None and measured.perplexity > 1 and bench.start is None


def test_the_judge_is_another_reward_model(settings, start_model, reward_folder, tmp_path):
    judge = make_reward_model(tmp_path / "judge", seed=7)
    bench, _ = bench_of([start_model], dataclasses.replace(settings, judge_model=str(judge)))
    start = bench.measure_start(Screen())
    assert start.judged.shape == start.scores.shape and not np.allclose(start.judged, start.scores)
    with pytest.raises(UserError, match="the judge is the reward model itself: --judge-model"):
        bench_of([start_model], dataclasses.replace(settings, judge_model=str(reward_folder)))


def test_prompts_that_no_run_looked_at_come_first(settings, start_model, runs):
    """Of the evaluation part, 6 are followed by the runs: the others are drawn while they are enough."""
    few, _ = bench_of([runs["ppo", 1]], MeasureSettings(num_prompts=3))
    followed = {p.example.question for p in few.prompts}
    assert "that no run looked at" in few.prompts_line
    assert not followed & {e.question for e in few.examples} and len(few.examples) == 3
    many, _ = bench_of([runs["ppo", 1]], MeasureSettings(num_prompts=500))
    assert "all there are, 500 were asked for" in many.prompts_line and len(many.examples) > 6


def test_changed_evaluation_prompts_are_said(runs, tmp_path, capsys, pairs_file):
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("\n".join(pairs_file.read_text().splitlines()[30:]))
    bench_of([runs["ppo", 1]], MeasureSettings(num_prompts=3, prompts=str(fewer)))
    assert "the evaluation prompts are no longer those of the run" in capsys.readouterr().out


def sampled(bench: Bench, seed: int) -> Generations:
    bench.settings = dataclasses.replace(bench.settings, seed=seed)
    return bench.measure_start(Screen())


def test_a_model_against_itself_is_seldom_called_different(settings, start_model):
    """The same weights under other sampling seeds, 100 times: at most 10 verdicts name a better side."""
    settings = dataclasses.replace(settings, num_prompts=12, completions=2, reply_length=4)
    bench, _ = bench_of([start_model], settings)
    bench.text = None  # perplexity draws nothing
    run, called = {"seed": 1, "spent": {"episodes": 1}}, 0
    start = sampled(bench, 0)
    for trial in range(100):
        sides = [Side(name, [run], [sampled(bench, 2 * trial + i + 1)]) for i, name in enumerate(("ppo", "grpo"))]
        sentence = judge_runs(sides, start, None, trial).sentences[0]
        assert sentence.startswith("No difference shown") or "replies are better than" in sentence
        called += "better" in sentence
    assert 0 <= called <= 10
