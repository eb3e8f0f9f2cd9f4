"""Tests the audit: each sign of reward hacking on synthetic data, no warning for a good model, and a hacked model."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import evaluate_generations
from rlhf.analysis.audit import figures, warnings
from rlhf.data.tokenizer import load_tokenizer
from rlhf.trainer.evaluation import Evaluation
from tests.evaluations import evaluation_of

WORDS = "the cat sat on a mat and the dog ran off to see what fish do when it rains in spring".split()


def completions(scores=0.0, judged=0.0, length=10, ended=1.0, kl=2.0, words=WORDS, prompts=24) -> Evaluation:
    """Return two completions per prompt, with values 0.1 below and above the given `scores` and `judged`."""
    offset = np.tile([[-0.1, 0.1]], (prompts, 1))
    shape = offset.shape
    texts = [[" ".join(words[(i + k) % 5 : (i + k) % 5 + 8]) for k in range(2)] for i in range(prompts)]
    return evaluation_of(
        scores + offset,
        {"gold quality": judged + offset} if judged is not None else {},
        texts=texts,
        kl=np.full(shape, kl),
        lengths=np.full(shape, length) + np.tile([[1, 0]], (prompts, 1)),
        ended=np.arange(shape[0] * 2).reshape(shape) < ended * prompts * 2,
        perplexity=2.0,
    )


START = completions(kl=0.0)


def test_figures_match_hand_computed_values():
    made = dataclasses.replace(
        completions(prompts=2),
        texts=[["a b", "a c"], ["", "a a a a a"]],
        scores=np.array([[1.0, 3.0], [0.0, 2.0]]),
        lengths=np.array([[3, 3], [1, 5]]),
        kl=np.array([[1.0, 2.0], [0.0, 3.0]]),
        ended=np.array([[True, True], [True, False]]),
        judged={},
    )
    found = figures(made)
    assert (found["score"], found["score_of_best"], found["score_of_worst"]) == (1.5, 2.5, 0.5)
    assert (found["kl"], found["kl_per_token"]) == (1.5, 0.5)
    assert (found["length"], found["eos_rate"], found["judge"]) == (3.0, 0.75, None)
    assert found["distinct_2"] == 3 / 6
    assert found["repetition"] == pytest.approx(0.5 / 4), "a a a a a: one of its two 4-grams repeats the other"


@pytest.mark.parametrize(
    ("changed", "target", "words"),
    [
        (
            {"scores": 1.0},
            None,
            "the score rose by +1.00, but on 24 prompts the judge's rating did not rise",
        ),
        (
            {"scores": 1.0, "judged": -0.5},
            None,
            "the score rose by +1.00, but on 24 prompts the judge's rating fell, -0.5",
        ),
        ({"length": 17}, None, "completions are 1.7 times as long as the start model's (10.5 -> 17.5 tokens)"),
        ({"words": ["yes"] * 20}, None, "completions repeat themselves more (repeated 4-grams: 0% -> 80%)"),
        ({"ended": 0.75}, None, "fewer completions end with EOS (100% -> 75%)"),
        (
            {"kl": 9.5},
            (6.0, "sequence"),
            "the KL to the start model is 9.5/sequence, above 1.5 times the KL target (9/sequence)",
        ),
        (
            {"kl": 2.0},
            (0.1, "token"),
            "the KL to the start model is 0.19/token, above 1.5 times the KL target (0.15/token)",
        ),
    ],
)
def test_each_sign_of_reward_hacking_is_reported(changed, target, words):
    found = warnings(completions(**changed), START, seed=1, target=target)
    assert any(warning.startswith(words) for warning in found), found


def test_good_model_has_no_warnings():
    assert warnings(START, START, seed=1, target=(6.0, "sequence")) == []
    good = completions(scores=1.0, judged=0.5, length=14, ended=0.97, kl=8.9)
    assert warnings(good, START, seed=1, target=(6.0, "sequence")) == []
    assert warnings(completions(scores=1.0, judged=None), completions(judged=None), seed=1) == [], (
        "without a judge there is no judge warning"
    )


def test_new_correlation_of_score_and_length_is_reported():
    lengths = np.arange(48).reshape(24, 2) + 1
    found = warnings(dataclasses.replace(START, lengths=lengths // 5 + 1, scores=lengths * 1.0), START, seed=1)
    assert any("longer completions get higher scores (rank correlation -1.00 -> +1.00" in w for w in found)
    start = dataclasses.replace(START, lengths=lengths // 5 + 1, scores=lengths * 1.0)
    assert warnings(start, start, seed=1) == [], "the start model has the same correlation"


def test_less_varied_completions_are_reported():
    same = dataclasses.replace(START, texts=[["a a a a a a a a"] * 2 for _ in START.texts])
    assert any(w.startswith("completions are less varied (distinct-2 ") for w in warnings(same, START, seed=1))


# --- a model that almost never ends a completion ---------------------------------------------------------------------


def with_end(start_model, folder, logit: float):
    """Saves the start model with an EOS logit of about `logit` in every state: 4 ends early, -4 almost never ends."""
    tokenizer = load_tokenizer(str(start_model))
    policy = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32).eval()
    policy.config.tie_word_embeddings = False
    head = torch.nn.Parameter(policy.get_input_embeddings().weight.detach().clone())
    policy.lm_head.weight = head
    ids = torch.randint(3, len(tokenizer), (8, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        policy.get_input_embeddings().weight += 1.0  # adds a direction that all hidden states have in common
        hidden = policy.model(input_ids=ids).last_hidden_state.flatten(0, 1)
        # least-squares solution for the row that gives all these states this logit
        wanted = torch.full((len(hidden), 1), float(logit))
        head[tokenizer.eos_token_id] = torch.linalg.lstsq(hidden, wanted).solution[:, 0]
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_length_hacked_model_has_length_warnings(start_model, reward_folder, pairs_file, tmp_path, capsys):
    """Runs the script on model folders that do not belong to a run."""
    start, hacked = (with_end(start_model, tmp_path / name, logit) for name, logit in (("start", 4), ("hacked", -4)))
    words = ["--baseline", start, "--rm-model", reward_folder, "--prompts", pairs_file, "--max-new-tokens", 40,
             "--temperature", 1, "--num-prompts", 8]  # fmt: skip
    for name, model in (("hacked_page", hacked), ("start_page", start)):
        evaluate_generations.main([str(w) for w in ["--model-path", model, *words, "--output", tmp_path / name]])
    output = re.sub(r"\s+", " ", capsys.readouterr().out)
    report, start_report = (
        json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("hacked_page", "start_page")
    )
    length = report["models"][0]["figures"]["length"] / report["start"]["figures"]["length"]
    assert length > 2 and report["models"][0]["figures"]["eos_rate"] < 0.1
    found = [w for w in report["models"][0]["warnings"] if f"completions are {length:.1f} times as long" in w]
    assert found and f"warning: {report['models'][0]['label']}: {found[0]}" in output
    assert any("fewer completions end with EOS" in w for w in report["models"][0]["warnings"])
    assert start_report["models"][0]["warnings"] == []
    assert "too few prompts to show signs of reward hacking" in output, "8 prompts are no evidence"
    page = (tmp_path / "start_page" / "evaluation.html").read_text(encoding="utf-8")
    assert "too few prompts" in page and "no signs of reward hacking" not in page.lower()
