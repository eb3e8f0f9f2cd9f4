"""Tests of evaluations and of the before/after report: perplexity, paired evaluations, figures and intervals.

Expected values are computed by hand or with a plain forward pass.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf.analysis.audit import figures
from rlhf.data.chat_template import decode_completion, encode_completion, encode_prompt, encode_text
from rlhf.data.prompts import Prompt
from rlhf.data.row import Example
from rlhf.data.tokenizer import load_tokenizer
from rlhf.models.reference import Reference
from rlhf.rollout import continuous_batching
from rlhf.rollout.sampler import Sampler
from rlhf.run.figures import compare, kl_of_phases, last_kl
from rlhf.settings.training import SamplingSettings
from rlhf.settings.types import KLTarget, kl_text
from rlhf.trainer import evaluator
from rlhf.trainer.evaluation import KL_PROMPTS, Evaluation, flat, shown_prompts
from rlhf.trainer.evaluator import FixedText, fixed_text, perplexity
from rlhf.trainer.state import _evaluation_from_json, _evaluation_to_json
from tests.conftest import attach
from tests.evaluations import evaluation_of

CPU = torch.device("cpu")


def evaluation(scores, **more) -> Evaluation:
    """Return an evaluation of a run with these scores (P, K)."""
    return evaluation_of(scores, **{"kl": np.full(np.shape(scores), 0.5), "perplexity": 2.0, **more})


def prompts(count: int, **more) -> list[Prompt]:
    return [Prompt((1, 2), Example(messages=({"role": "user", "content": f"q {i}"},), **more)) for i in range(count)]


def test_perplexity_matches_a_plain_forward_pass(start_model):
    """Completions of different lengths at temperature 1: EOS counts, and padding has no effect."""
    tokenizer = load_tokenizer(str(start_model))
    policy = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32).eval()
    rows = [("the cat", "yes"), ("what is the capital of France?", "Paris, on the river Seine")]
    examples = [Example(messages=({"role": "user", "content": q},), chosen=a) for q, a in rows]
    prompt_rows = [Prompt(tuple(encode_prompt(tokenizer, e.messages)), e) for e in examples]
    completions = [encode_completion(tokenizer, answer) for _, answer in rows]
    total = 0.0
    tokens = 0
    for prompt, completion in zip(prompt_rows, completions, strict=True):
        with torch.no_grad():
            logp = policy(torch.tensor([[*prompt.ids, *completion]])).logits[0].log_softmax(-1)
        total -= sum(float(logp[len(prompt.ids) - 1 + i, token]) for i, token in enumerate(completion))
        tokens += len(completion)
    text = FixedText([p.ids for p in prompt_rows], completions, "two")
    actual = perplexity(Sampler.of(policy, tokenizer, SamplingSettings(), CPU), text)
    assert actual == pytest.approx(math.exp(total / tokens), rel=1e-5)


def test_perplexity_uses_the_chosen_completions(start_model):
    tokenizer = load_tokenizer(str(start_model))
    pairs = prompts(3, chosen="yes", rejected="no")
    text = fixed_text(tokenizer, pairs, lambda _: pytest.fail("nothing to sample"), None)
    assert text.source == "3 held-out chosen completions" and not text.by_start
    assert text.completions == [encode_completion(tokenizer, "yes")] * 3


def test_perplexity_without_pairs_uses_completions_of_the_start_model(build, tmp_path, capsys):
    """The output names the source of the text, and the text is the same throughout the run."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"What is number {i}?"}) for i in range(80)))
    trainer = build("--prompts", file, "--num-iterations", 1)
    log = attach(trainer)
    trainer.train()
    count = len(trainer.evaluation_prompts)
    source = f"one fixed sample of the start model's completions ({count})"
    text = trainer.evaluator.text
    assert text.source == source == log.record.best.perplexity_text and text.by_start
    samples = log.folder / "samples" / "update-000000.jsonl"
    start = [json.loads(line)["completion"] for line in samples.open()]
    decoded = [decode_completion(trainer.processing_class, ids) for ids in trainer.evaluator.text.completions]
    assert decoded == start, "the decoded completions must equal the recorded samples"
    assert capsys.readouterr().out.count(f"on {source}") == 2, "once before and once after training"


def test_eval_text_file_is_used_for_perplexity(build, start_model, tmp_path, user_error):
    file = tmp_path / "text.txt"
    file.write_text("the cat sat\n\nParis is a city\non a river\n\n\n")
    trainer = build("--eval-text", file)
    trainer.evaluate()
    tokenizer = load_tokenizer(str(start_model))
    ids = [encode_text(tokenizer, p) for p in ("the cat sat", "Paris is a city\non a river")]
    assert trainer.evaluator.text.source == f"2 paragraphs of {tmp_path.name}/text.txt"
    assert [
        [*p, *r] for p, r in zip(trainer.evaluator.text.prompts, trainer.evaluator.text.completions, strict=True)
    ] == ids
    (tmp_path / "empty.txt").write_text("\n\n")
    with user_error("--eval-text", 2):
        build("--eval-text", tmp_path / "empty.txt")
    with user_error("--eval-text"):
        build("--eval-text", tmp_path / "nowhere.txt")


def test_evaluations_use_the_same_random_numbers(build):
    trainer = build()
    trainer.evaluate()
    trainer.evaluator.latest = ()  # otherwise it is returned, because the weights are the same
    trainer.evaluate()
    first, second = trainer.evaluations
    assert first.texts == second.texts and np.array_equal(first.scores, second.scores)
    assert len(set(flat(first.texts))) > 1


def test_an_evaluation_of_a_run_copies_the_weights_once(build, monkeypatch):
    """Whatever the number of calls of the sampler. The kept forward pass of a rollout is released before."""
    trainer = build("--eval-prompts", 6, "--rollout-engine", "slots", "--rollout-slots", 2, "--top-p", 0.9)
    copied = []
    kept = []
    sampled = samplings_of(monkeypatch)
    make = continuous_batching.make_decoder
    monkeypatch.setattr(
        continuous_batching,
        "make_decoder",
        lambda *given, **more: copied.append(1) or kept.append(trainer.passes._kept) or make(*given, **more),
    )
    monkeypatch.setattr(trainer.passes, "_kept", object())
    trainer.evaluate()
    assert trainer.evaluations[-1].kl.shape == (6, 1)
    assert [len(rows) for rows in sampled] == [2, 2, 2], "masks of allowed tokens of as many as there are slots"
    assert len(copied) == 1 and kept == [None]


# --- nothing is computed twice ---------------------------------------------------------------------------------------


def samplings_of(monkeypatch) -> list[list[int]]:
    """Return a list that receives the numbers of the episodes of each call of the sampler."""
    calls = []
    original = Sampler.sample

    def sample(self, prompts, seed, update, purpose, episodes=None, *more):
        calls.append(list(episodes))
        return original(self, prompts, seed, update, purpose, episodes, *more)

    monkeypatch.setattr(Sampler, "sample", sample)
    return calls


@pytest.fixture
def many_prompts(tmp_path):
    """Return a file of 40 evaluation prompts without completions: more than a CPU's forward pass of 32 texts."""
    file = tmp_path / "many.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"What is number {i}?"}) for i in range(40)))
    return file


@pytest.mark.parametrize(
    ("flags", "samplings"),
    [
        ((), [40]),
        (("--eval-samples", 2), [80]),
        (("--eval-temperature", 0.7, "--temperature", 0.7), [40]),
        (("--eval-temperature", 0), [40, 40]),  # the text keeps the temperature of training
        (("--rollout-engine", "plain"), [40]),
    ],
)
def test_the_first_evaluation_is_one_rollout_and_its_completions_are_the_text(
    build, many_prompts, monkeypatch, flags, samplings
):
    """Prompts sampled apart, as for an evaluation of other prompts, give the same text."""
    flags = ("--eval-dataset", many_prompts, "--eval-prompts", 40, *flags)
    sampled = samplings_of(monkeypatch)
    trainer = build(*flags)
    trainer.evaluate()
    assert [len(rows) for rows in sampled] == samplings
    apart = build(*flags)
    apart.evaluate(["What is number 99?"])
    assert trainer.evaluator.text == apart.evaluator.text and len(apart.evaluator.text.completions) == 40
    played = apart.evaluator.start_completions(apart.evaluation_prompts)
    assert trainer.evaluator.text.completions == [episode.ids for episode in played]
    sampled.clear()
    with torch.no_grad():
        trainer.actor.policy.get_input_embeddings().weight.mul_(1.1)
    trainer.evaluate()
    assert [len(rows) for rows in sampled] == samplings[:1]


@pytest.mark.parametrize("flags", [(), ("--use-lora",)])
def test_the_kl_of_the_start_model_is_0_without_a_pass(build, monkeypatch, tmp_path, flags):
    """Only while the policy has the weights of the reference: not after another change of its weights."""
    trainer = build(*flags)
    original = Reference.logprobs
    passes = []
    monkeypatch.setattr(Reference, "logprobs", lambda *a: passes.append(1) or original(*a))
    trainer.evaluate()
    assert trainer.evaluations[0].kl.tolist() == [[0.0]] * 6 and not passes
    trained = next(w for name, w in trainer.actor.policy.named_parameters() if "lora_B" in name or not flags)
    with torch.no_grad():
        trained.add_(0.05)
    trainer.evaluate()
    assert len(passes) == 1 and np.abs(trainer.evaluations[1].kl).min() > 0
    trainer.save_model(tmp_path / "changed")
    again = build(*flags)
    again.load_model(tmp_path / "changed")
    again.evaluate()
    assert again.evaluations[0].kl.tolist() == trainer.evaluations[1].kl.tolist()


def test_an_evaluation_computes_no_values(build, monkeypatch):
    """Nobody reads the values of the critic, which with a backbone of its own take a pass of another model."""
    trainer = build("--critic", "separate")
    with torch.no_grad():
        trainer.actor.policy.get_input_embeddings().weight.mul_(1.1)
    monkeypatch.setattr(type(trainer.actor), "forward_backbone", lambda *_: pytest.fail("the critic was called"))
    trainer.evaluate()
    assert np.abs(trainer.evaluations[0].kl).max() > 0


def test_equal_weights_are_evaluated_once(build, monkeypatch):
    """The policy does not change in the warm-up of the critic, so the three evaluations before update 3 have the same
    completions. A function that depends on the update gives each its own score."""

    def update_of(completions, trainer_state, **_):
        return [float(trainer_state.global_step)] * len(completions)

    trainer = build("--critic-warmup", 2, "--num-iterations", 3, "--eval-every", 1, rewards=[update_of])
    sampled = samplings_of(monkeypatch)
    texts = []
    original = evaluator.perplexity
    monkeypatch.setattr(evaluator, "perplexity", lambda *a: texts.append(1) or original(*a))
    trainer.train()
    first, *others, last = trainer.evaluations
    evaluated = [rows for rows in sampled if len(rows) == 6]
    assert len(evaluated) == len(texts) == 2
    assert [one.update for one in trainer.evaluations] == [one.score for one in trainer.evaluations] == [0, 1, 2, 3]
    for one in others:
        assert (one.texts, one.perplexity) == (first.texts, first.perplexity) and not one.kl.any()
    assert np.abs(last.kl).max() > 0
    with torch.no_grad():  # a return to evaluated weights is a change, too
        trainer.actor.policy.get_input_embeddings().weight[0, 0] += 1e-6
    trainer.evaluate()
    assert len(texts) == 3


def test_an_evaluation_without_kl_and_perplexity_is_not_reused_for_one_with_them(build):
    trainer = build()
    trainer.fix_text()
    episodes = list(enumerate(trainer.evaluation_prompts))
    scores = trainer.evaluator.evaluate(episodes, 1, scores_only=True)
    assert scores.kl is None and scores.perplexity is None
    whole = trainer.evaluator.evaluate(episodes, 1)
    assert whole.texts == scores.texts and not whole.kl.any() and whole.perplexity > 1


# --- the prompts on which the KL is measured -------------------------------------------------------------------------


def test_the_kl_is_measured_on_some_prompts_the_same_for_every_seed(build, monkeypatch):
    """Its values are those of an evaluation that measures all prompts, also with several completions of each."""
    found = {}
    for measured in (64, 2):
        monkeypatch.setattr(evaluator, "KL_PROMPTS", measured)
        trainer = build("--eval-samples", 2)
        with torch.no_grad():
            trainer.actor.policy.get_input_embeddings().weight.mul_(1.1)
        trainer.evaluate()
        (found[measured],) = trainer.evaluations
    some = ~np.isnan(found[2].kl)
    rows = sorted(set(np.nonzero(some)[0].tolist()))
    assert some.sum() == 4 and rows == shown_prompts(6, 0, 2)
    assert found[2].kl[some] == pytest.approx(found[64].kl[some], abs=1e-4)
    logged = found[2].metrics()
    assert logged["eval/kl_divergence"] == pytest.approx(found[2].kl[rows].mean())
    assert logged["eval/kl_divergence/token"] == pytest.approx(found[2].kl[rows].sum() / found[2].lengths[rows].sum())
    stored = [row["kl"] for row in found[2].rows(trainer.evaluation_prompts)]
    assert [kl is not None for kl in stored] == some.ravel().tolist()
    assert figures(found[2])["kl"] == pytest.approx(logged["eval/kl_divergence"])
    assert figures(found[2])["kl_per_token"] == pytest.approx(logged["eval/kl_divergence/token"])
    assert compare(found[2], found[2], seed=1)["kl_after"] == pytest.approx(logged["eval/kl_divergence"])
    again = _evaluation_from_json(json.loads(json.dumps(_evaluation_to_json(found[2]))))
    np.testing.assert_equal(again.kl, found[2].kl)


def test_the_prompts_of_the_kl_are_spread_over_all():
    """A file may be sorted by topic."""
    rows = shown_prompts(256, 0, KL_PROMPTS)
    assert len(rows) == 64 and min(sum(start <= row < start + 64 for row in rows) for start in (0, 64, 128, 192)) >= 8


def test_evaluation_metrics_match_values_computed_by_hand():
    result = evaluation([[1.0], [3.0]], kl=np.array([[2.0], [4.0]]), lengths=np.array([[10], [20]]),
                        ended=np.array([[True], [False]]))  # fmt: skip
    logged = result.metrics()
    assert (logged["eval/score"], logged["eval/kl_divergence"]) == (2.0, 3.0)
    assert logged["eval/kl_divergence/token"] == pytest.approx(6 / 30)
    assert (logged["eval/length"], logged["eval/eos_rate"], logged["eval/perplexity"]) == (15, 0.5, 2.0)


def test_report_figures_match_values_computed_by_hand():
    before = evaluation([[0.0], [2.0], [4.0]])
    after = evaluation([[3.0], [5.0], [7.0]], lengths=np.full((3, 1), 8))
    figures = compare(before, after, seed=1)
    assert (figures["score_before"], figures["score_after"]) == (2.0, 5.0)
    # the start model's scores have standard deviation 2
    assert figures["score_rise_in_start_sd"] == pytest.approx(3 / 2)
    low, high = figures["score_rise_interval"]
    assert low < 0 and high == 3.0, "every score rose by 3, but three prompts are too few to be significant"
    assert (figures["length_before"], figures["length_after"]) == (5, 8)
    assert "gold_before" not in figures


def test_gold_judge_receives_question_completion_and_ended_flag():
    calls = []
    result = evaluation([[0.0]], texts=[["plum"]], ended=np.array([[False]]))
    assert result.gold_of(prompts(1), lambda *a: calls.append(a) or 0.25).tolist() == [[0.25]]
    assert calls == [("q 0", "plum", False)]
    golds = [evaluation([[0.0]], gold=np.array([[quality]])) for quality in (0.0, 1.0)]
    figures = compare(*golds, seed=1)
    assert (figures["gold_before"], figures["gold_after"], figures["gold_rise_interval"]) == (0.0, 1.0, None)


def test_kl_is_printed_with_its_unit_and_without_exponent():
    assert [kl_text(nats, "sequence") for nats in (-7.23e-05, 2.996)] == ["0.00/sequence", "3.00/sequence"]
    assert kl_text(0.000702, "token") == "0.0007/token"


def test_last_kl_uses_the_unit_of_the_target():
    history = [{"kl_divergence": float(i), "kl_divergence/token": i / 100, "step": i + 1} for i in range(20)]
    history += [{"eval/score": 1.0, "step": 20}]
    assert last_kl(history, KLTarget(6, "sequence")) == pytest.approx(14.5)
    assert last_kl(history, KLTarget(0.05, "token")) == pytest.approx(0.145)


def test_kl_at_the_end_of_each_phase_matches_values_computed_by_hand():
    history = [{"kl_divergence": 9.0, "kl_divergence/token": float(i), "step": i} for i in range(1, 25)]
    phases = [(1, 20, KLTarget(0.5, "token")), (21, 24, KLTarget(0.2, "token"))]
    ends = kl_of_phases(history, phases)
    assert [e["kl_last_10_updates"] for e in ends] == [15.5, 22.5], (
        "updates 11 to 20, and all 4 updates of the short second phase"
    )
    assert [(e["updates"], e["target"]) for e in ends] == [([1, 20], 0.5), ([21, 24], 0.2)]


def test_skipped_updates_do_not_shift_the_phases():
    """Updates 3 and 4 of 6 were skipped and are not in the log. The phases 1-3 and 4-6 end at 0.34 and 1.7."""
    history = [{"kl_divergence": kl, "step": step} for step, kl in ((1, 0.0), (2, 0.68), (5, 1.6), (6, 1.8))]
    phases = [(1, 3, KLTarget(1, "sequence")), (4, 6, KLTarget(2, "sequence"))]
    assert [e["kl_last_10_updates"] for e in kl_of_phases(history, phases)] == pytest.approx([0.34, 1.7])
    assert last_kl(history, KLTarget(1, "sequence"), 3, 4) is None


# --- --eval-temperature ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["plain", "slots"])
def test_evaluations_at_temperature_0_are_greedy(build, engine):
    """The same completions as those of a loop that takes the largest logit of a plain forward pass."""
    trainer = build("--eval-temperature", 0, "--rollout-engine", engine)
    policy = trainer.actor.policy
    tokenizer = trainer.processing_class
    expected = []
    for prompt in trainer.evaluation_prompts:
        ids = list(prompt.ids)
        while len(ids) < len(prompt.ids) + 8 and tokenizer.eos_token_id not in ids[len(prompt.ids) :]:
            with torch.no_grad():
                ids.append(int(policy(torch.tensor([ids])).logits[0, -1].argmax()))
        expected.append(decode_completion(tokenizer, ids[len(prompt.ids) :]))
    trainer.evaluate()
    assert flat(trainer.evaluations[0].texts) == expected


def test_another_temperature_of_evaluations_is_that_of_the_sampling(build):
    """With the same random numbers, so the completions are those of a run with this temperature."""
    texts = []
    for flags in (["--eval-temperature", 0.3], ["--temperature", 0.3], []):
        trainer = build(*flags)
        trainer.evaluate()
        texts.append(trainer.evaluations[0].texts)
    assert texts[0] == texts[1] != texts[2]


def test_log_ratios_of_greedy_completions_are_over_all_tokens(build):
    """A mask with one allowed token would give log-probability 0 and a KL of 0."""
    trainer = build("--eval-temperature", 0)
    with torch.no_grad():
        trainer.actor.policy.get_output_embeddings().weight.mul_(1.5)
    trainer.evaluate()
    assert np.abs(trainer.evaluations[0].kl).max() > 0.01


def test_the_rollout_and_the_text_of_the_perplexity_keep_the_temperature_of_training(build):
    trainers = [build("--eval-temperature", 0), build()]
    rows = [trainer.collector.collect(trainer.episodes_of(1), 1).completions.rows() for trainer in trainers]
    played = [trainer.evaluator.start_completions(trainer.evaluation_prompts) for trainer in trainers]
    starts = [[episode.ids for episode in episodes] for episodes in played]
    assert rows[0] == rows[1] and starts[0] == starts[1]


# --- the result ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WithMore(Evaluation):
    """An evaluation with fields that this project does not have."""

    surprise: np.ndarray | None = None  # (P, K)
    notes: dict[str, list[list[str]]] = field(default_factory=dict)  # P lists of K
    topic: str = ""


def test_selected_completions_keep_every_field():
    scores = np.arange(6.0).reshape(2, 3)
    names = [["a", "b", "c"], ["d", "e", "f"]]
    whole = WithMore(
        names, scores, scores * 2, scores > 3, scores * 3, judged={"j": -scores}, gold=scores / 10,
        topics=[["t"] * 3, [None] * 3],
        surprise=scores + 1, notes={"n": names}, topic="sums",
    )  # fmt: skip
    found = whole.select(np.array([[2, 0], [1, 1]]))
    assert (found.texts, found.notes) == ([["c", "a"], ["e", "e"]], {"n": [["c", "a"], ["e", "e"]]})
    assert found.scores.tolist() == [[2, 0], [4, 4]] and found.surprise.tolist() == [[3, 1], [5, 5]]
    assert found.judged["j"].tolist() == [[-2, 0], [-4, -4]] and found.ended.tolist() == [[False, False], [True, True]]
    assert found.kl.tolist() == [[6, 0], [12, 12]] and found.gold.tolist() == [[0.2, 0.0], [0.4, 0.4]]
    assert (found.topics, found.topic, found.perplexity) == ([["t"] * 2, [None] * 2], "sums", None)


def test_an_evaluation_survives_a_checkpoint():
    """With and without a score, several samples, logged columns, gold quality and topics."""
    scores = [[1.5, None], [None, None]]
    whole = evaluation(
        scores, judged={"right": [[1, 0], [None, 1]]}, update=3, topics=[["a", "a"], [None, None]],
        gold=np.array([[0.0, 1], [1, 1]]),
        figures={"right": {"value": 0.75}}, extra={"column": [[{"x": 1}, None], [[2], "y"]]},
    )  # fmt: skip
    stored = json.loads(json.dumps(_evaluation_to_json(whole)))
    assert stored["scores"] == [1.5, None, None, None] and stored["topics"] == ["a", "a", None, None]
    again = _evaluation_from_json(stored)
    assert stored["values"] == {"right": [1, 0, None, 1]} and stored["samples"] == 2
    for name, value in vars(whole).items():
        np.testing.assert_equal(getattr(again, name), value)
    plain = evaluation([[1.0]])
    assert _evaluation_from_json(_evaluation_to_json(plain)).gold is None
