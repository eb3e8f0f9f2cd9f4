"""Tests the contrasts of the verdict and its caveats, on synthetic groups.

The sentences are in tests/sentences.txt, without their figures.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlhf.analysis.evaluator import GenerationResults
from rlhf.analysis.verdict import RunGroup, Verdict, contrast, judge_runs, kind_of
from rlhf.config import make_config
from tests.records import record_of

RNG = np.random.default_rng(0)
PROMPTS = RNG.normal(0, 1, (64, 1))


def completions(
    score: float, judged: float | None = None, kl: float = 2.0, perplexity: float | None = 3.0
) -> GenerationResults:
    """Returns four completions for each of 64 prompts, scored `score` plus an offset per prompt and noise of 0.3."""
    noise = RNG.normal(0, 0.3, (2, 64, 4))
    return GenerationResults(
        label="made",
        texts=[["a b c d"] * 4] * 64,
        scores=PROMPTS + score + noise[0],
        judged={} if judged is None else {"gold quality": PROMPTS + judged + noise[1]},
        kl=np.full((64, 4), kl),
        lengths=np.full((64, 4), 5),
        ended=np.full((64, 4), True),
        perplexity=perplexity,
    )


def group(algorithm: str, *measured: GenerationResults, episodes: int = 100) -> RunGroup:
    runs = [record_of(seed=i) for i in range(len(measured))]
    return RunGroup(algorithm, runs, list(measured), [episodes] * len(measured))


def three(score: float, judged: float | None = None) -> list[GenerationResults]:
    return [completions(score + shift, None if judged is None else judged + shift) for shift in (-0.02, 0.0, 0.02)]


def results(verdict: Verdict, measure: str = "scores") -> dict[str, str]:
    return {found.name: found.result for found in verdict.contrasts if found.measure == measure}


START = completions(0.0, 0.0, kl=0.0, perplexity=2.0)
STATE = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def same_numbers_in_every_order():
    """A test draws the same numbers whichever tests ran before it."""
    RNG.bit_generator.state = STATE


@pytest.mark.parametrize(("ppo", "grpo", "result"), [(1.0, 0.5, "better"), (0.5, 1.0, "worse")])
def test_verdict_reports_which_group_is_better(ppo, grpo, result, snapshot):
    verdict = judge_runs([group("ppo", *three(ppo)), group("grpo", *three(grpo))], completions(0.0), None, 1)
    assert results(verdict) == {"PPO - start model": "better", "GRPO - start model": "better", "PPO - GRPO": result}
    assert {(c.over, c.level) for c in verdict.contrasts} == {("seeds and prompts", 0.95)}
    snapshot(*verdict.sentences, *verdict.caveats)


def test_verdict_reports_worse_models_with_kl_and_perplexity(snapshot):
    groups = [group("ppo", *three(-1.0)), group("grpo", *three(0.0))]
    verdict = judge_runs(groups, completions(0.0, perplexity=2.0), None, 1)
    assert results(verdict) == {"PPO - start model": "worse", "GRPO - start model": "equal", "PPO - GRPO": "worse"}
    assert all("2.00/sequence" in sentence and "1.50" in sentence for sentence in verdict.sentences[1:])
    snapshot(*verdict.sentences)


def test_verdict_names_a_control_in_each_sentence_and_in_a_caveat(snapshot):
    records = [record_of(make_config("demo", "grpo", control="shuffled"), seed=i) for i in range(3)]
    control = RunGroup("grpo", records, three(0.1, 0.5), [100] * 3)
    groups = [group("ppo", *three(1.5, 0.2)), control]
    verdict = judge_runs(groups, START, "gold quality", 1)
    assert [control.name in sentence for sentence in verdict.sentences] == [True, False, True]
    assert verdict.contrasts[-1].name == f"PPO - {control.name}" and kind_of(groups) == "groups"
    assert [control.name in caveat for caveat in verdict.caveats].index(True) == 0
    assert not any("control" in caveat for caveat in judge_runs(groups[:1], START, "x", 1).caveats)
    snapshot(*verdict.sentences, *verdict.caveats)


def test_verdict_uses_the_judge_and_reports_a_contradicting_score(snapshot):
    groups = [group("ppo", *three(1.5, 0.2)), group("grpo", *three(1.0, 0.8))]
    verdict = judge_runs(groups, START, "gold quality", 1)
    assert results(verdict, "judged")["PPO - GRPO"] == "worse" and results(verdict)["PPO - GRPO"] == "better"
    assert kind_of(groups) == "algorithms" and "gold quality" in verdict.sentences[0]
    agree = judge_runs([group("ppo", *three(1.5, 0.8)), group("grpo", *three(1.0, 0.2))], START, "gold quality", 1)
    assert len(verdict.caveats) == len(agree.caveats) + 1
    snapshot(*verdict.sentences, *verdict.caveats)


def test_a_perfect_separation_is_significant_with_any_number_of_seeds(snapshot):
    """A saturated evaluation function gives 1 and 0: no prompt and no seed differs."""
    one, zero = (replace(START, judged={"gold quality": np.full((64, 4), value)}) for value in (1.0, 0.0))
    for seeds in (1, 3):
        verdict = judge_runs([group("ppo", *[one] * seeds), group("grpo", *[zero] * seeds)], zero, "gold quality", 1)
        found = [(c.result, c.difference.value) for c in verdict.contrasts if c.measure == "judged"]
        assert found == [("better", 1), ("equal", 0), ("better", 1)]
        snapshot(*verdict.sentences)


def test_a_difference_that_rounds_to_zero_has_no_sign():
    zero = replace(START, scores=np.zeros((64, 4)))
    little = replace(zero, scores=np.where(np.arange(256).reshape(64, 4) == 0, -1e-3, 0.0))
    sentence = judge_runs([group("ppo", little)], zero, None, 1).sentences[0]
    assert sentence.count("+0.000") == 3 and "-0.000" not in sentence, sentence


def test_equal_groups_have_no_significant_difference():
    groups = [group("ppo", *three(1.0, 0.5)), group("grpo", *three(1.0, 0.5))]
    assert results(judge_runs(groups, START, "gold quality", 1), "judged")["PPO - GRPO"] == "equal"


def test_difference_smaller_than_seed_variation_is_not_significant():
    """The mean difference is 0.5, but the seeds of each group are 1 apart."""
    ppo, grpo = ([completions(shift + s) for s in (-1.0, 0.0, 1.0)] for shift in (0.5, 0.0))
    verdict = judge_runs([group("ppo", *ppo), group("grpo", *grpo)], completions(0.0), None, 1)
    assert results(verdict)["PPO - GRPO"] == "equal"


def test_caveats_depend_on_the_number_of_seeds(snapshot):
    one, few, many = (group("ppo", *[completions(1.0) for _ in range(n)]) for n in (1, 3, 5))
    grpo = group("grpo", *[completions(0.5) for _ in range(5)])
    start = completions(0.0)
    of_one, of_three, of_five = (judge_runs([s, grpo], start, "judge x", 1).caveats for s in (one, few, many))
    assert [len(of_one), len(of_three), of_five] == [1, 1, []]
    assert "(PPO: 0)" in of_one[0] and "(PPO 3)" in of_three[0]
    without_judge = judge_runs([many, grpo], start, None, 1).caveats
    assert len(without_judge) == 1 and "--judge-model" in without_judge[0]
    first = judge_runs([one, grpo], start, None, 1)
    assert results(first)["PPO - GRPO"] == "better" and first.contrasts[-1].where
    assert [c.over for c in first.contrasts] == ["prompts", "seeds and prompts", "prompts"]
    snapshot(*of_one, *of_three, *without_judge, *first.sentences)


def test_verdict_reports_unequal_budgets_in_capitals(snapshot):
    groups = [group("ppo", *three(1.0), episodes=50), group("grpo", *three(0.5), episodes=800)]
    sentence = judge_runs(groups, completions(0.0), None, 1).sentences[0]
    assert "50" in sentence and "800" in sentence
    snapshot(sentence)


def test_contrast_matches_hand_computed_values():
    """Two seeds against the start model: the difference of means per prompt, and the win rate over all pairs."""
    a = GenerationResults("a", [], np.array([[1.0, 3.0], [0.0, 2.0]]), {}, None, None, None, None)
    b = GenerationResults("b", [], np.array([[2.0, 2.0], [2.0, 2.0]]), {}, None, None, None, None)
    start = GenerationResults("s", [], np.array([[0.0, 2.0], [2.0, 2.0]]), {}, None, None, None, None)
    found = contrast(group("ppo", a, b), start, "scores", 1)
    assert found.difference.value == pytest.approx(((2 - 1) + (1 - 2) + (2 - 1) + (2 - 2)) / 4)
    # a: prompt 1 (1 > 0, 1 < 2, 3 > 0, 3 > 2) 3/4, prompt 2 (0 < 2, 2 = 2) 1/4; b: (2 > 0, 2 = 2) 3/4, all equal 1/2
    assert found.win_rate.value == pytest.approx((3 / 4 + 1 / 4 + 3 / 4 + 1 / 2) / 4)
    assert found.name == "PPO - start model"


def test_caveat_if_only_the_judge_finds_a_difference(snapshot):
    groups = [group("ppo", *three(1.0, 0.8)), group("grpo", *three(1.0, 0.2))]
    verdict = judge_runs(groups, START, "gold quality", 1)
    assert results(verdict)["PPO - GRPO"] == "equal" and results(verdict, "judged")["PPO - GRPO"] == "better"
    assert len(verdict.caveats) == 2, "few seeds, and this one"
    snapshot(verdict.caveats[1])


def test_caveat_for_few_prompts(snapshot):
    ones = np.ones((4, 1))
    few = [GenerationResults("a", [["x"]] * 4, ones * shift, {}, None, ones, ones, None) for shift in range(4)]
    caveats = judge_runs([group("ppo", *few[:2]), group("grpo", *few[2:])], few[0], None, 1).caveats
    assert " 4 prompts" in caveats[-1]
    snapshot(caveats[-1])


# --- three and more groups -------------------------------------------------------------------------------------------


def constant(score: float, judged: float | None = None) -> GenerationResults:
    """Returns one completion for each of 20 prompts, all with the same score."""
    ones = np.ones((20, 1))
    rated = {"gold quality": ones * judged} if judged else {}
    return GenerationResults("made", [["x"]] * 20, ones * score, rated, None, ones, ones > 0, None)


def test_contrasts_of_three_groups_cover_every_pair():
    """Scores 3, 1 and 2, and 0 for the start model. "toy" is not a registered algorithm, so it appears as TOY."""
    groups = [group("ppo", constant(3.0)), group("grpo", constant(1.0)), group("toy", constant(2.0))]
    verdict = judge_runs(groups, constant(0.0), None, 1)
    assert [(c.name, c.difference.value) for c in verdict.contrasts] == [
        ("PPO - start model", 3), ("GRPO - start model", 1), ("TOY - start model", 2),
        ("PPO - GRPO", 2), ("PPO - TOY", 1), ("GRPO - TOY", -1),
    ]  # fmt: skip
    assert [c.level for c in verdict.contrasts] == [*[0.95] * 3, *[pytest.approx(1 - 0.05 / 3)] * 3]


def test_verdict_of_three_groups_has_one_sentence_per_pair(snapshot):
    groups = [group("ppo", *three(0, 0.8)), group("grpo", *three(0, 0.2)), group("toy", *three(0, 0.8))]
    groups[2].episodes[0] = 50
    verdict = judge_runs(groups, START, "gold quality", 1)
    found = results(verdict, "judged")
    assert [found[f"{name} - start model"] for name in ("PPO", "GRPO", "TOY")] == ["better"] * 3
    assert [found[name] for name in ("PPO - GRPO", "PPO - TOY", "GRPO - TOY")] == ["better", "equal", "worse"]
    assert [sentence.count("98.3%") for sentence in verdict.sentences] == [1, 1, 1, 0, 0, 0]
    assert ["50 to 100" in sentence for sentence in verdict.sentences] == [False, True, True, False, False, False]
    snapshot(*verdict.sentences)


def test_caveats_of_three_groups(snapshot):
    """PPO is better than TOY by score, but worse by the judge. GRPO and PPO differ by the judge only."""
    groups = [group("ppo", *three(1.0, 0.2)), group("grpo", *three(1.0, 0.8)), group("toy", *three(0.5, 0.8))]
    verdict = judge_runs(groups, START, "gold quality", 1)
    pairs = ("PPO - GRPO", "PPO - TOY", "GRPO - TOY")
    by_score, by_judge = results(verdict), results(verdict, "judged")
    assert [(by_score[p], by_judge[p]) for p in pairs] == [
        ("equal", "worse"), ("better", "worse"), ("better", "equal"),
    ]  # fmt: skip
    assert "98.3%" in verdict.caveats[0]
    assert [sum(c.startswith(p) for c in verdict.caveats) for p in pairs] == [1, 1, 0]
    assert not any("%" in caveat for caveat in judge_runs(groups[1:], START, "gold quality", 1).caveats)
    snapshot(*verdict.caveats)


def test_verdict_of_five_groups_compares_each_with_the_first(snapshot):
    """Scores 0, 0.2, 0.4, 0.6 and 0.8: the last one has the highest mean, which is partly chance."""
    names = ["low", "b", "c", "d", "high"]
    groups = [replace(group("ppo", *three(0.2 * i)), label=name) for i, name in enumerate(names)]
    verdict = judge_runs(groups, completions(0.0), None, 1)
    assert [c.name for c in verdict.contrasts[5:]] == [f"{name} - low" for name in names[1:]]
    assert [c.level for c in verdict.contrasts[5:]] == [pytest.approx(1 - 0.05 / 4)] * 4
    first, *others, better, no_difference = verdict.sentences
    assert [name for sentence in others for name in names if sentence.startswith(f"{name},")] == names[1:]
    assert results(verdict)["high - low"] == results(verdict)["high - start model"] == "better"
    assert "high" in better and "low" in no_difference
    assert "98.8%" in verdict.caveats[0] and verdict.caveats[1].startswith("high ")
    snapshot(first, others[3], *verdict.caveats[:2])


def test_verdict_of_two_groups_of_one_algorithm_names_groups(snapshot):
    groups = [replace(group("ppo", *three(1.5, 0.2)), label="A"), replace(group("ppo", *three(1.0, 0.8)), label="B")]
    verdict = judge_runs(groups, START, "gold quality", 1)
    assert results(verdict, "judged")["A - B"] == "worse" and kind_of(groups) == "groups"
    snapshot(*verdict.sentences, *verdict.caveats)


def test_verdict_of_one_group_reports_what_it_cannot_show(snapshot):
    verdict = judge_runs([group("toy", *three(1.0))], completions(0.0), None, 1)
    assert results(verdict) == {"TOY - start model": "better"} and len(verdict.sentences) == 2
    snapshot(*verdict.sentences)
