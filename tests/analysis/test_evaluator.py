"""Tests how models are found and evaluated (runs, adapters, plain models), and the verdict's false positive rate."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf.analysis.audit import figures, warnings
from rlhf.analysis.evaluator import ModelEvaluator
from rlhf.analysis.models import ModelRef, find_model_ref, find_models, shared_settings
from rlhf.analysis.verdict import START, Arm, Evidence, contrast, judge_arms
from rlhf.checkpoints.run_folder import RunLock
from rlhf.config import make_config
from rlhf.data.prompts import Prompt
from rlhf.reports.comparison_tables import figure_table
from rlhf.rewards.reward_model import RewardModel
from rlhf.rollout.sampler import Sampler
from rlhf.settings.evaluation import MeasureSettings
from rlhf.settings.types import Split
from rlhf.trainer.evaluation import Evaluation
from rlhf.trainer.passes import ForwardPasses
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError
from rlhf.utils.paths import path_on_page
from tests.shapes import change_first_weight, make_base_model, make_reward_model, make_start_model, smollm2_tokenizer

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


def test_run_folder_resolves_to_its_final_or_best_weights(runs):
    final, best = (find_model_ref(str(runs["ppo", 1]), which, None) for which in ("final", "best"))
    assert (final.which, final.update, best.which) == ("final", 2, "best")
    assert final.label == "runs/ppo_1 (final, after update 2)"
    chosen = json.loads((runs["ppo", 1] / "run.json").read_text())["best"]["update"]
    assert best.update == chosen and best.source.endswith("best")
    inside = find_model_ref(str(runs["ppo", 1] / "best"), "final", None)
    assert (inside.which, inside.update) == ("best", chosen), "a folder inside a run is recognized as part of the run"


def test_adapter_is_found_with_its_base_model(runs, start_model):
    found = find_model_ref(str(runs["grpo", 1]), "final", None)
    assert found.base == str(start_model) and found.source == str(runs["grpo", 1])


def test_missing_base_model_of_an_adapter_is_an_error_with_a_fix(runs, tmp_path, start_model):
    """The error reports the adapter, the base model and the fix, and the fix works."""
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


def test_baseline_does_not_replace_an_existing_base_model(runs, start_model, tmp_path):
    other = make_start_model(tmp_path / "other", seed=4)
    assert find_model_ref(str(runs["grpo", 1]), "final", str(other)).base == str(start_model)


def test_start_model_of_an_adapter_without_a_run_is_its_base_model(runs, start_model, settings, tmp_path):
    bare = shutil.copytree(runs["grpo", 1], tmp_path / "bare")
    (bare / "run.json").unlink()
    evaluator, models = evaluator_of([bare], dataclasses.replace(settings, baseline=None))
    assert (
        evaluator.start.source == str(start_model)
        and path_on_page(str(start_model)) in dict(evaluator.facts()).values()
    )
    assert evaluator.evaluate(models[0], Screen()).kl is not None


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("adapter_config.json", '{"base', "not valid JSON: .*adapter_config.json"),
        ("run.json", '{"status": "fin', "run.json is incomplete or corrupted: .*corrupted_model. Restore the file"),
        (
            "run.json",
            '{"status": "failed"}',
            "run.json has no settings, so this is not a training run: .*corrupted_model",
        ),
        (
            "run.json",
            '{"status": "failed", "format": 4}',
            "corrupted, 'id' is missing or invalid: .*corrupted_model. Restore",
        ),
    ],
)
def test_error_reports_the_corrupted_file_of_a_model(runs, tmp_path, file, text, words):
    folder = shutil.copytree(runs["grpo", 1], tmp_path / "corrupted_model")
    (folder / file).write_text(text)
    with pytest.raises(UserError, match=words):
        find_model_ref(str(folder), "final", None)


def test_all_missing_models_are_reported_in_one_error(tmp_path, settings):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as error:
        find_models([str(tmp_path / n) for n in ("nowhere", "empty", "empty")], settings, "--model-path")
    twice, nowhere, empty = map(str, error.value.problems)
    assert "given twice" in twice and "model not found" in nowhere and "no model in this folder" in empty


def test_unfinished_run_has_no_final_weights(runs, tmp_path):
    folder = tmp_path / "running"
    shutil.copytree(runs["ppo", 1], folder)
    (folder / "model.safetensors").unlink()
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, "status": "running"}))
    with RunLock(folder), pytest.raises(UserError, match="running: --model-path .* --which best") as error:
        find_model_ref(str(folder), "final", None)
    assert "--resume" not in str(error.value)
    with pytest.raises(UserError, match=f"killed: --model-path .*--resume.* --output {folder}.* --which best"):
        find_model_ref(str(folder), "final", None)
    assert find_model_ref(str(folder), "best", None).which == "best"


def test_settings_come_from_the_run_unless_a_flag_is_set(runs):
    models = [find_model_ref(str(runs["ppo", 1]), "final", None)]
    plain = shared_settings(models, MeasureSettings())
    assert (plain.sampling.max_new_tokens, plain.sampling.temperature) == (8, 0.7)
    with_flags = shared_settings(models, MeasureSettings(temperature=0.5, max_new_tokens=5))
    assert (with_flags.sampling.max_new_tokens, with_flags.sampling.temperature) == (5, 0.5)
    assert shared_settings([], MeasureSettings(like="demo")).data.prompts == make_config("demo").data.prompts


def test_runs_with_different_settings_require_a_flag(runs):
    one, other = (find_model_ref(str(runs[name]), "final", None) for name in (("ppo", 1), ("grpo", 1)))
    settings = {**other.run.settings, "sampling": {**other.run.settings["sampling"], "temperature": 0.9}}
    other = dataclasses.replace(other, run=dataclasses.replace(other.run, settings=settings))
    with pytest.raises(
        UserError, match=r"the runs differ in temperature: 0.7 in .*, 0.9 in .*Set it with --temperature"
    ):
        shared_settings([one, other], MeasureSettings())
    assert shared_settings([one, other], MeasureSettings(temperature=0.8)).sampling.temperature == 0.8


# --- evaluation ------------------------------------------------------------------------------------------------------


def test_start_model_evaluated_as_a_model_gives_the_same_results(settings, start_model):
    """The weights and random numbers are the same, so the completions are the same and the KL is 0."""
    evaluator, models = evaluator_of([start_model], settings)
    start = evaluator.evaluate_start(Screen())
    same = evaluator.evaluate(models[0], Screen())
    assert start.texts == same.texts and start.perplexity == same.perplexity
    assert np.abs(same.kl).max() < 1e-6 and np.array_equal(start.scores, same.scores)
    assert len({text for row in start.texts for text in row}) > 1, "completions differ from each other"


def test_changed_model_has_other_completions_and_a_positive_kl(settings, start_model, tmp_path):
    policy = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32)
    with torch.no_grad():
        policy.get_input_embeddings().weight.mul_(60)  # tied to the LM head: sharper logits, far from the start model
    other = shutil.copytree(start_model, tmp_path / "other")
    policy.save_pretrained(other)
    evaluator, models = evaluator_of([other], settings)
    measured = evaluator.evaluate(models[0], Screen())
    start = evaluator.evaluate_start(Screen())
    assert measured.kl.mean() > 1 and measured.texts != start.texts
    assert measured.perplexity != pytest.approx(start.perplexity, rel=0.01)


def test_perplexity_of_an_adapter_equals_that_of_its_run(runs):
    """The evaluator computes the same perplexity as the run, for the start model and for the final weights."""
    run = json.loads((runs["grpo", 1] / "run.json").read_text())
    evaluator, models = evaluator_of([runs["grpo", 1]], MeasureSettings(num_prompts=3))
    measured = evaluator.evaluate(models[0], Screen())
    assert measured.perplexity == pytest.approx(run["figures"]["perplexity_after"], rel=1e-4)
    assert evaluator.text.source == run["figures"]["perplexity_text"]
    start = evaluator.evaluate_start(Screen())
    assert start.perplexity == pytest.approx(run["figures"]["perplexity_before"], rel=1e-4)


def test_kl_and_lengths_match_plain_forward_passes(settings, start_model, tmp_path, monkeypatch):
    """The KL of a completion is the sum over its tokens of log-softmax differences at the sampling temperature."""
    policy = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32)
    with torch.no_grad():
        policy.get_input_embeddings().weight.mul_(20)
    other = shutil.copytree(start_model, tmp_path / "other")
    policy.save_pretrained(other)
    settings = dataclasses.replace(settings, temperature=0.7, num_prompts=3)
    evaluator, models = evaluator_of([other], settings)
    sampled_completions = []
    sample = Sampler.sample
    monkeypatch.setattr(
        Sampler, "sample", lambda *a, **k: sampled_completions.append(sample(*a, **k)) or sampled_completions[-1]
    )
    measured = evaluator.evaluate(models[0], Screen())
    (completions,) = sampled_completions
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


def test_completions_do_not_depend_on_the_calls_of_the_sampler(settings, start_model, monkeypatch):
    """Each completion has separate random numbers, so a second call does not repeat the first."""
    same_prompt = dataclasses.replace(settings, num_prompts=1, completions=8)
    evaluator, _ = evaluator_of([start_model], same_prompt)
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "calls", lambda self, rows, sampling=None: [rows[:4], rows[4:]])
        in_two_calls = evaluator.evaluate_start(Screen()).texts[0]
    assert in_two_calls[:4] != in_two_calls[4:]
    assert evaluator.evaluate_start(Screen()).texts[0] == in_two_calls, "one call gives the same"


def test_the_start_model_has_a_kl_of_0_without_a_pass_of_its_own(settings, start_model, monkeypatch):
    """A model with its weights is another model."""
    evaluator, models = evaluator_of([start_model], settings)
    passes = []
    original = ForwardPasses.logprobs
    monkeypatch.setattr(ForwardPasses, "logprobs", lambda *a: passes.append(1) or original(*a))
    assert not evaluator.evaluate_start(Screen()).kl.any() and not passes
    assert np.abs(evaluator.evaluate(models[0], Screen()).kl).max() < 1e-6 and len(passes) == 1


def swap_two_tokens(folder):
    """Changes a model's tokenizer: two tokens exchange their ids. The vocabulary size stays the same."""
    facts = json.loads((folder / "tokenizer.json").read_text())
    a, b = (token for token, i in facts["model"]["vocab"].items() if i in (300, 301))
    facts["model"]["vocab"][a], facts["model"]["vocab"][b] = facts["model"]["vocab"][b], facts["model"]["vocab"][a]
    (folder / "tokenizer.json").write_text(json.dumps(facts))
    return folder


def test_model_with_another_tokenizer_has_a_perplexity_but_no_kl(settings, tmp_path):
    """Models with different vocabularies have no common tokens, so there is no KL. The perplexity uses the model's own
    tokenizer, so it is the same with and without a start model."""
    other = swap_two_tokens(make_start_model(tmp_path / "other", seed=3))
    evaluator, models = evaluator_of([other], settings)
    measured = evaluator.evaluate(models[0], Screen())
    assert measured.kl is None and len(measured.texts) == 4
    without_start, models = evaluator_of([other], dataclasses.replace(settings, baseline=None))
    assert measured.perplexity == without_start.evaluate(models[0], Screen()).perplexity


def bits_of(folder, evaluator) -> float:
    """Return the bits per UTF-8 byte of the chosen completions, each after its own prompt and with its EOS."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    nats = 0.0
    size = 0
    for example in (prompt.example for prompt in evaluator.prompts.of_text):
        prompt = tokenizer.apply_chat_template(list(example.messages), add_generation_prompt=True, tokenize=False)
        before = tokenizer(prompt, add_special_tokens=False).input_ids
        ids = [*tokenizer(example.chosen, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        with torch.no_grad():
            logprobs = model(torch.tensor([before + ids])).logits[0].double().log_softmax(-1).numpy()
        nats -= sum(logprobs[len(before) + i - 1, token] for i, token in enumerate(ids))
        size += len(example.chosen.encode("utf-8"))
    return np.log2(np.e) * nats / size


def with_smaller_vocabulary(folder):
    """Return a model whose tokenizer cuts texts into more tokens."""
    make_start_model(folder, seed=3)
    tokenizer = smollm2_tokenizer(300)
    tokenizer.save_pretrained(folder)
    return folder


def with_another_template(start_model, folder):
    """Return the start model with a sentence before each prompt."""
    shutil.copytree(start_model, folder)
    template = folder / "chat_template.jinja"
    template.write_text("{{ 'Answer in verse, please. ' }}" + template.read_text())
    return folder


def measured_figures(evaluator, models) -> list[dict]:
    everyone = [evaluator.evaluate_start(Screen()), *(evaluator.evaluate(model, Screen()) for model in models)]
    return [figures(found) for found in everyone]


def test_models_with_another_tokenizer_have_no_figure_per_token(settings, start_model, tmp_path):
    """Their perplexity is compared per byte of the text, and lengths are compared in characters."""
    other = with_smaller_vocabulary(tmp_path / "other")
    evaluator, models = evaluator_of([start_model, other], settings)
    start, same, foreign = measured_figures(evaluator, models)
    assert not {"perplexity", "length"} & {*foreign} and foreign["kl"] is None
    for found, folder in ((start, start_model), (foreign, other)):
        assert found["bits_per_byte"] == pytest.approx(bits_of(folder, evaluator), rel=1e-5)
    assert (same["perplexity"], same["bits_per_byte"]) == (start["perplexity"], start["bits_per_byte"])
    texts = evaluator.evaluate(models[1], Screen()).texts
    assert foreign["characters"] == np.mean([len(text) for row in texts for text in row])
    assert "other" in dict(evaluator.facts())["own prompts"], "the facts name the model"


def test_warning_of_longer_completions_is_in_characters_for_another_tokenizer():
    units = {"start": ("perplexity", "length", "characters"), "foreign": ("bits_per_byte", "characters")}
    lengths = {"start": ("a b c", 3), "foreign": ("a b c d e f", 30)}
    rows = {
        name: Evaluation([[text] * 2] * 3, np.zeros((3, 2)), np.full((3, 2), tokens), np.ones((3, 2), bool),
                         units=units[name])
        for name, (text, tokens) in lengths.items()
    }  # fmt: skip
    (warning,) = (line for line in warnings(rows["foreign"], rows["start"], 0) if "as long" in line)
    assert "2.2 times" in warning and "characters" in warning and "tokens" not in warning


def test_verdict_has_no_ratio_of_unlike_perplexities(settings, start_model, tmp_path):
    other = with_smaller_vocabulary(tmp_path / "other")
    evaluator, models = evaluator_of([start_model, other], settings)
    start = Arm(START, [evaluator.evaluate_start(Screen())])
    arms = [Arm(f"arm {i}", [evaluator.evaluate(model, Screen())], [model]) for i, model in enumerate(models)]
    sentences = " ".join(judge_arms(arms, start, 0, Evidence(None)).sentences)
    assert "perplexity x" not in sentences and sentences.count("bits per byte") == 2
    assert f"{arms[1].mean('bits_per_byte'):.3f} bits per byte" in sentences
    both = Arm("both", [arm.measured[0] for arm in arms], models)
    assert both.mean("perplexity") is None and both.mean("kl") is None, "a mean over one of two models"
    rows = {row[0]: row[1:] for row in figure_table([start, both], []).rows}
    assert rows["perplexity"][1] == "-" and rows["completion length (characters)"][1] != "-"


@pytest.mark.parametrize("chosen", [True, False])
def test_model_with_another_chat_template_is_measured_after_its_own_prompts(settings, start_model, tmp_path, chosen):
    """Its KL would be one to the start model after prompts that the start model does not get."""
    if not chosen:  # the perplexity's text is then the start model's
        (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "Name {i} cats."}}\n' for i in range(6)))
        settings = dataclasses.replace(settings, prompts=str(tmp_path / "prompts.jsonl"))
    other = with_another_template(start_model, tmp_path / "template")
    evaluator, models = evaluator_of([start_model, other], settings)
    start, same, own = measured_figures(evaluator, models)
    assert own["kl"] is None and "perplexity" not in own and "length" in own
    assert same["kl"] == pytest.approx(0, abs=1e-5) and same["perplexity"] == pytest.approx(start["perplexity"])
    assert own["bits_per_byte"] != pytest.approx(start["bits_per_byte"], rel=1e-6)
    if chosen:
        assert own["bits_per_byte"] == pytest.approx(bits_of(other, evaluator), rel=1e-5)
    evaluator, models = evaluator_of([start_model], settings)
    assert "own prompts" not in dict(evaluator.facts())
    assert "bits_per_byte" not in measured_figures(evaluator, models)[1], "all models have the same prompts"


def test_a_file_is_compared_within_one_vocabulary(settings, start_model, tmp_path):
    """The first token of a paragraph is its prompt, so another vocabulary predicts other bytes; a template does not
    matter."""
    (tmp_path / "text.txt").write_text("The cat sat on the mat.\n\nInternational trains run on Sundays.")
    settings = dataclasses.replace(settings, eval_text=str(tmp_path / "text.txt"))
    others = with_smaller_vocabulary(tmp_path / "other"), with_another_template(start_model, tmp_path / "template")
    evaluator, models = evaluator_of(others, settings)
    start, foreign, own = measured_figures(evaluator, models)
    assert not any("bits_per_byte" in found for found in (start, foreign, own)) and "perplexity" not in foreign
    assert own["perplexity"] == pytest.approx(start["perplexity"]) and own["kl"] is None


def test_a_text_of_eos_only_has_no_bits_per_byte(settings, start_model, tmp_path):
    evaluator, _ = evaluator_of([with_another_template(start_model, tmp_path / "template")], settings)
    eos = [[evaluator.tokenizer.eos_token_id]] * len(evaluator.text.completions)
    evaluator.text = dataclasses.replace(evaluator.text, completions=eos)
    found = evaluator.evaluate_start(Screen())
    assert found.bits_per_byte is None and found.perplexity > 1


def test_equal_completions_have_one_score_of_a_module(settings, start_model, tmp_path):
    """As reward and as judge, whose rounding depends on the batch; the same text that was cut off is another one."""
    file = tmp_path / "scores.py"
    file.write_text(
        "import torch\n\n\nclass Rounding(torch.nn.Module):\n    def forward(self, input_ids, attention_mask):\n"
        "        return attention_mask.sum(1).float() + torch.arange(len(input_ids)) / 1e3\n"
    )
    names = (f"{file}:Rounding",)
    settings = dataclasses.replace(settings, rm_model="none", reward_func=names, eval_func=names)
    evaluator, _ = evaluator_of([start_model], settings)
    functions = [rewards.functions[0] for rewards in (evaluator.rewards, evaluator.judges[0].rewards)]
    chat = [[{"role": "user", "content": "Why?"}]] * 3
    for function in functions:
        once = function(["No.", "No.", "No."], messages=chat, ended=[True, True, False])
        assert once[0] == once[1] != once[2]
        assert function(["Yes, yes.", "No."], messages=chat[:2], ended=[True, True])[1] == once[0]


def test_base_model_without_chat_template_and_without_start_model(settings, tmp_path):
    """Without a start model there is no KL. The perplexity is computed on the chosen replies of the data."""
    base = make_base_model(tmp_path / "base")
    evaluator, models = evaluator_of([base], dataclasses.replace(settings, baseline=None))
    measured = evaluator.evaluate(models[0], Screen())
    assert measured.kl is None and measured.perplexity > 1 and evaluator.start is None


def test_judge_must_differ_from_the_reward_model(settings, start_model, reward_folder, tmp_path):
    judge = make_reward_model(tmp_path / "judge", seed=7)
    evaluator, _ = evaluator_of([start_model], dataclasses.replace(settings, judge_model=str(judge)))
    start = evaluator.evaluate_start(Screen())
    (rating,) = start.judged.values()
    assert rating.shape == start.scores.shape and not np.allclose(rating, start.scores)
    copied = shutil.copytree(reward_folder, tmp_path / "copied")
    for same in (reward_folder, copied):
        with pytest.raises(UserError, match="the judge is also the reward model of the scores: --judge-model"):
            evaluator_of([start_model], dataclasses.replace(settings, judge_model=str(same)))


def test_reward_model_of_training_is_refused_as_judge(runs, reward_folder, tmp_path):
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
        (1e30, r"score .* is too large \(the limit is 1e\+09\): judge '.*judge'"),
    ],
)
def test_invalid_scores_of_a_judge_are_an_error(settings, start_model, tmp_path, weight, message):
    judge = make_reward_model(tmp_path / "judge", seed=7)
    model = AutoModelForSequenceClassification.from_pretrained(judge)
    with torch.no_grad():
        model.score.weight.fill_(weight)
    model.save_pretrained(judge)
    with pytest.raises(UserError, match=message):
        evaluator, _ = evaluator_of([start_model], dataclasses.replace(settings, judge_model=str(judge)))
        evaluator.evaluate_start(Screen())


def test_prompts_not_used_by_the_runs_are_preferred(settings, start_model, runs):
    """The runs used 6 of the held-out prompts for their own evaluations. The others are used if there are enough."""
    few, _ = evaluator_of([runs["ppo", 1]], MeasureSettings(num_prompts=3))
    followed = {p.example.question for p in few.prompts.of_text}
    assert "that no run used for its own evaluations" in few.prompts.line
    assert not followed & {e.question for e in few.examples} and len(few.examples) == 3
    many, _ = evaluator_of([runs["ppo", 1]], MeasureSettings(num_prompts=500))
    assert "--num-prompts 500 is more than there are" in many.prompts.line and len(many.examples) > 6


def test_runs_with_different_numbers_of_evaluation_prompts(runs):
    """The evaluator excludes the prompts of the run that used the most for its own evaluations."""
    models = [find_model_ref(str(runs[name]), "final", None) for name in (("ppo", 1), ("ppo", 2))]
    evaluator, _ = evaluator_of([runs["ppo", 1]], MeasureSettings(num_prompts=2))
    longer = [p for p in evaluator.prompts.of_text] + [Prompt((), evaluator.examples[0])]
    data = {"evaluation_prompts": 8, "evaluation_sha256": "another"}
    models[1] = dataclasses.replace(models[1], run=dataclasses.replace(models[1].run, data=data))
    seen = {p.example.question for p in longer}
    both = ModelEvaluator(models, MeasureSettings(num_prompts=2), CPU, Screen())
    assert len(seen) == 7 and "held-out prompts that no run used for its own evaluations" in both.prompts.line
    first_only = ModelEvaluator(models[:1], MeasureSettings(num_prompts=2), CPU, Screen())
    count = [int(b.prompts.line.split(" from ")[1].split()[0]) for b in (first_only, both)]
    assert count[0] - count[1] == 2, "one run used 6 prompts, the other 8"


def test_changed_evaluation_prompts_are_reported(runs, capsys):
    """Other prompts that the user chose are no change."""
    model = find_model_ref(str(runs["ppo", 1]), "final", None)
    changed = dataclasses.replace(model.run, data=model.run.data | {"evaluation_sha256": "another"})
    for run, more, reported in (
        (changed, {}, True),
        (model.run, {}, False),
        (model.run, {"split": Split(45, 45, 10)}, False),
        (model.run, {"prompt_length": 42}, False),
    ):
        ModelEvaluator([dataclasses.replace(model, run=run)], MeasureSettings(num_prompts=3, **more), CPU, Screen())
        assert ("the evaluation prompts have changed since the run" in capsys.readouterr().out) == reported


def test_prompts_have_not_changed_if_only_the_tokenizer_of_the_baseline_is_another(runs, tmp_path, capsys):
    other = swap_two_tokens(make_start_model(tmp_path / "other", seed=3))
    template = other / "chat_template.jinja"
    template.write_text("{{ 'Hello. ' }}" + template.read_text())
    evaluator_of([runs["ppo", 1]], MeasureSettings(num_prompts=3, baseline=str(other)))
    assert "have changed since the run" not in capsys.readouterr().out


def test_score_of_models_without_a_run_may_be_a_training_reward(settings, start_model):
    evaluator, _ = evaluator_of([start_model], settings)
    assert evaluator.score_name not in ("the training reward", "not the training reward")


def test_score_that_only_some_runs_were_trained_with(runs):
    evaluator, _ = evaluator_of([runs["ppo", 1]], MeasureSettings(num_prompts=2))
    (run,) = evaluator.runs
    reward = {**run.settings["reward"], "reward_func": ["length_penalty"]}
    evaluator.runs.append(dataclasses.replace(run, settings={**run.settings, "reward": reward}))
    assert evaluator.score_name not in ("the training reward", "not the training reward")
    del evaluator.runs[0]
    assert evaluator.score_name == "not the training reward"


def test_a_score_that_is_not_the_training_reward_is_not_called_so():
    scores = np.arange(8.0).reshape(4, 2)
    one, other = (Evaluation([["a"] * 2] * 4, rows, rows + 1, rows > -1) for rows in (scores + scores % 3, scores))
    for name, noted in (("the training reward", True), ("not the training reward", False)):
        verdict = judge_arms([Arm("A", [one])], Arm(START, [other]), 0, Evidence(None, name))
        assert any("no judge" in caveat for caveat in verdict.caveats) == noted
        assert f"({name})" in verdict.sentences[0]


def test_adapters_with_different_base_models_need_a_baseline(runs, start_model, settings, tmp_path):
    """The base model of the first one would otherwise be the start model of both."""
    adapters = [shutil.copytree(runs["grpo", 1], tmp_path / name) for name in ("one", "two")]
    for adapter in adapters:
        (adapter / "run.json").unlink()
    facts = json.loads((adapters[1] / "adapter_config.json").read_text())
    other = make_start_model(tmp_path / "base", seed=4)
    (adapters[1] / "adapter_config.json").write_text(json.dumps({**facts, "base_model_name_or_path": str(other)}))
    alone = dataclasses.replace(settings, baseline=None)
    models = find_models([str(adapter) for adapter in adapters], alone, "--model-path")
    with pytest.raises(UserError) as caught:
        shared_settings(models, alone)
    (problem,) = caught.value.problems
    assert "--baseline" in problem.fix and str(start_model) in problem.place and str(other) in problem.place
    assert shared_settings(models, settings).model.actor_model == str(start_model)
    assert shared_settings(models[1:], alone).model.actor_model == str(other)


def evaluate_start_with_seed(evaluator: ModelEvaluator, seed: int) -> Evaluation:
    evaluator.settings = dataclasses.replace(evaluator.settings, seed=seed)
    return evaluator.evaluate_start(Screen())


@pytest.mark.ci
def test_false_positive_rate_of_a_model_against_itself(settings, start_model):
    """Compares the same weights with different sampling seeds 100 times. At most 10 verdicts are significant."""
    settings = dataclasses.replace(settings, num_prompts=12, completions=2, max_new_tokens=4)
    evaluator, _ = evaluator_of([start_model], settings)
    evaluator.text = None  # the perplexity does not depend on the seed
    significant = 0
    for trial in range(100):
        results = [evaluate_start_with_seed(evaluator, 2 * trial + i + 1) for i in range(2)]
        one, other = (Arm(str(i), [completions], [ModelRef("run", "run")]) for i, completions in enumerate(results))
        significant += contrast(one, other, "score", trial).difference.excludes(0)
    assert significant <= 10


def test_models_with_the_same_end_of_their_paths_have_separate_names(start_model, settings, tmp_path):
    places = [shutil.copytree(start_model, tmp_path / part / "ppo" / "seed1") for part in ("monday", "tuesday")]
    found = find_models([str(place) for place in places], settings, "--model-path")
    assert [model.label for model in found] == [str(place) for place in places]
    assert find_models([str(places[0])], settings, "--model-path")[0].label == "ppo/seed1"


def test_equal_completions_of_two_models_have_one_score(settings, start_model, reward_folder, tmp_path, monkeypatch):
    """Across evaluations, whose batches have other shapes. The judge's ratings, too."""
    judge = shutil.copytree(reward_folder, tmp_path / "judge")
    change_first_weight(judge / "model.safetensors")
    settings = dataclasses.replace(settings, judge_model=str(judge))
    evaluator, _ = evaluator_of([start_model], settings)
    given = RewardModel.score
    monkeypatch.setattr(
        RewardModel, "score", lambda *args: [s + 1e-7 * i for i, s in enumerate(given(*args))]
    )  # rounding by the place in the batch
    policy, prompts = evaluator.reference.copy, evaluator.encoded(evaluator.tokenizer)
    one, other = [[5, 6], [7, 8]], [[7, 8], [5, 6]]
    of_model = evaluator.evaluator(policy, evaluator.tokenizer)
    first, second = (
        of_model.rate([of_model.player.of_ids(prompts[0], row) for row in ids], 2) for ids in (one, other)
    )
    assert first.texts[0] == second.texts[0][::-1] and first.texts[0][0] != first.texts[0][1]
    for measure in ("score", "judge"):
        assert first.measures[measure].tolist() == second.measures[measure][:, ::-1].tolist()
