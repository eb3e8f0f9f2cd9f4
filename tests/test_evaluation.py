"""Evaluation and the report: perplexity, paired evaluations, figures and intervals, by hand or against plain code."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap
from transformers import AutoModelForCausalLM

from rlhf.evaluation import Evaluation, FixedText, fixed_text, perplexity
from rlhf.knobs import KLTarget
from rlhf.models import load_tokenizer
from rlhf.prompts import Example, Prompt, encode_prompt, encode_reply
from rlhf.report import compare, gold_scores, last_kl, mean_interval

CPU = torch.device("cpu")


def evaluation(scores, update=0, **more) -> Evaluation:
    count = len(scores)
    rest = {"texts": ["yes"] * count, "kl": [0.5] * count, "lengths": [4] * count, "ended": [True] * count}
    return Evaluation(update=update, scores=scores, perplexity=2.0, **{**rest, **more})


def prompts(count: int, **more) -> list[Prompt]:
    return [Prompt((1, 2), Example(messages=({"role": "user", "content": f"q {i}"},), **more)) for i in range(count)]


def test_perplexity_against_a_plain_forward(start_model):
    """Replies of unlike length, temperature 1, EOS included, padding without effect."""
    tokenizer = load_tokenizer(str(start_model))
    policy = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32).eval()
    rows = [("the cat", "yes"), ("what is the capital of France?", "Paris, on the river Seine")]
    examples = [Example(messages=({"role": "user", "content": q},), chosen=a) for q, a in rows]
    made = [Prompt(tuple(encode_prompt(tokenizer, e.messages)), e) for e in examples]
    replies = [encode_reply(tokenizer, answer) for _, answer in rows]
    total, tokens = 0.0, 0
    for prompt, reply in zip(made, replies, strict=True):
        with torch.no_grad():
            logp = policy(torch.tensor([[*prompt.ids, *reply]])).logits[0].log_softmax(-1)
        total -= sum(float(logp[len(prompt.ids) - 1 + i, token]) for i, token in enumerate(reply))
        tokens += len(reply)
    text = FixedText(made, replies, "two")
    found = perplexity(policy, text, tokenizer.pad_token_id, CPU, None)
    assert found == pytest.approx(math.exp(total / tokens), rel=1e-5)


def test_perplexity_is_taken_on_chosen_replies_or_says_that_it_is_not(start_model):
    tokenizer = load_tokenizer(str(start_model))
    pairs = prompts(3, chosen="yes", rejected="no")
    assert fixed_text(tokenizer, pairs, [], 10).source == "3 held-out chosen replies"
    text = fixed_text(tokenizer, prompts(2), [("first", True), ("second", False)], 10)
    assert text.source == "one fixed sample of the start model's replies (2)"
    assert text.replies == [encode_reply(tokenizer, "first"), encode_reply(tokenizer, "second", False)]


def test_evaluations_use_the_same_random_numbers(build):
    trainer = build()
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first.texts == second.texts and first.scores == second.scores
    assert len(set(first.texts)) > 1


def test_metrics_of_an_evaluation_by_hand():
    looked = evaluation([1.0, 3.0], kl=[2.0, 4.0], lengths=[10, 20], ended=[True, False])
    said = looked.metrics()
    assert (said["eval/score"], said["eval/kl_divergence"]) == (2.0, 3.0)
    assert said["eval/kl_divergence/token"] == pytest.approx(6 / 30)
    assert (said["eval/reply_length"], said["eval/eos_rate"], said["eval/perplexity"]) == (15, 0.5, 2.0)


def test_the_report_by_hand():
    before, after = evaluation([0.0, 2.0, 4.0], lengths=[4, 4, 4]), evaluation([3.0, 5.0, 7.0], lengths=[8, 8, 8])
    figures = compare(before, after, prompts(3), None, seed=1)
    assert (figures["score_before"], figures["score_after"]) == (2.0, 5.0)
    assert figures["score_rise_in_start_sd"] == pytest.approx(3 / 2)  # the start's scores have standard deviation 2
    assert figures["score_rise_interval"] == [3.0, 3.0], "every prompt rose by 3"
    assert (figures["length_before"], figures["length_after"]) == (4, 8)
    assert "gold_before" not in figures


def test_gold_quality_is_asked_with_question_reply_and_ending():
    asked = []
    looked = evaluation([0.0], texts=["plum"], ended=[False])
    assert gold_scores(looked, prompts(1), lambda *a: asked.append(a) or 0.25) == [0.25]
    assert asked == [("q 0", "plum", False)]
    figures = compare(looked, evaluation([1.0], texts=["fig"]), prompts(1), lambda q, t, e: float(t == "fig"), seed=1)
    assert (figures["gold_before"], figures["gold_after"], figures["gold_rise_interval"]) == (0.0, 1.0, [1.0, 1.0])


def test_intervals_against_scipy():
    differences = np.random.default_rng(0).normal(0.3, 1, 40).tolist()
    low, high = mean_interval(differences, seed=3)
    same = bootstrap((np.array(differences),), np.mean, n_resamples=5000, rng=np.random.default_rng(3))
    assert (low, high) == (same.confidence_interval.low, same.confidence_interval.high)
    assert low < np.mean(differences) < high


def test_last_kl_reads_the_targets_unit():
    history = [{"kl_divergence": float(i), "kl_divergence/token": i / 100} for i in range(20)] + [{"eval/score": 1.0}]
    assert last_kl(history, KLTarget(6, "sequence")) == pytest.approx(14.5)
    assert last_kl(history, KLTarget(0.05, "token")) == pytest.approx(0.145)
