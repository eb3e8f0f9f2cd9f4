"""Tests the sentences and caveats of the verdict, and comparisons at equal budgets, on synthetic groups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlhf.analysis.equal_budget import EvalPoint, at_equal
from rlhf.analysis.evaluator import GenerationResults
from rlhf.analysis.judges import Judge, rate_stored
from rlhf.analysis.verdict import RunGroup, contrast, judge_runs
from rlhf.config import make_config
from rlhf.reports.comparison_report import at_equal_in_words
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


START = completions(0.0, 0.0, kl=0.0, perplexity=2.0)


@pytest.mark.parametrize(("ppo", "grpo", "better"), [(1.0, 0.5, "PPO"), (0.5, 1.0, "GRPO")])
def test_verdict_reports_which_group_is_better(ppo, grpo, better):
    worse = {"PPO": "GRPO", "GRPO": "PPO"}[better]
    start = completions(0.0)
    first, *others = judge_runs([group("ppo", *three(ppo)), group("grpo", *three(grpo))], start, None, 1).sentences
    assert first.startswith(f"{better} is better than {worse} by score (the training reward): PPO - GRPO = ")
    assert "95% confidence interval over seeds and prompts" in first and first.endswith("after 100 episodes each.")
    assert [s.partition(": +")[0] for s in others] == [
        f"{name} is better than the start model by score" for name in ("PPO", "GRPO")
    ]
    assert f": PPO - GRPO = {'+' if better == 'PPO' else '-'}0." in first


def test_verdict_reports_worse_models_with_kl_and_perplexity():
    _, ppo, grpo = judge_runs(
        [group("ppo", *three(-1.0)), group("grpo", *three(0.0))], completions(0.0, perplexity=2.0), None, 1
    ).sentences
    assert ppo.startswith("PPO is worse than the start model by score: -")
    assert grpo.startswith("No significant difference between GRPO and the start model by score: ")
    assert all(sentence.endswith(", KL 2.00/sequence, perplexity x 1.50.") for sentence in (ppo, grpo))


def test_verdict_names_a_control_in_each_sentence_and_in_a_caveat():
    records = [record_of(make_config("demo", "grpo", control="shuffled"), seed=i) for i in range(3)]
    control = RunGroup("grpo", records, three(0.1, 0.5), [100] * 3)
    verdict = judge_runs([group("ppo", *three(1.5, 0.2)), control], START, "gold quality", 1)
    name = "GRPO control (scores shuffled)"
    assert [name in sentence for sentence in verdict.sentences] == [True, False, True]
    assert verdict.contrasts[-1].name == f"PPO - {name}"
    assert verdict.caveats[0].startswith(f"controls ({name}): ")
    assert not any(
        "control" in caveat for caveat in judge_runs([group("ppo", *three(1.5, 0.2))], START, "x", 1).caveats
    )
    assert not any("algorithms" in caveat for caveat in verdict.caveats)


def test_verdict_uses_the_judge_and_reports_a_contradicting_score():
    groups = [group("ppo", *three(1.5, 0.2)), group("grpo", *three(1.0, 0.8))]
    verdict = judge_runs(groups, START, "gold quality", 1)
    assert verdict.sentences[0].startswith(
        "GRPO is better than PPO by the judge (gold quality, not used in RL training): "
    )
    assert any("score and judge prefer different algorithms" in caveat for caveat in verdict.caveats)
    agree = judge_runs([group("ppo", *three(1.5, 0.8)), group("grpo", *three(1.0, 0.2))], START, "gold quality", 1)
    assert not any("prefer different algorithms" in caveat for caveat in agree.caveats)


def test_a_perfect_separation_is_significant_with_any_number_of_seeds():
    """A saturated evaluation function gives 1 and 0: no prompt and no seed differs."""
    one, zero = (replace(START, judged={"gold quality": np.full((64, 4), value)}) for value in (1.0, 0.0))
    for seeds in (1, 3):
        groups = [group("ppo", *[one] * seeds), group("grpo", *[zero] * seeds)]
        pair, ppo, grpo = judge_runs(groups, zero, "gold quality", 1).sentences
        assert "PPO is better than GRPO by the judge" in pair and "PPO - GRPO = +1.000 (95%" in pair
        assert "PPO is better than the start model by the judge: +1.000 (95%" in ppo
        assert grpo.startswith("No significant difference between GRPO and the start model by the judge: +0.000 (95%")


def test_a_difference_that_rounds_to_zero_has_no_sign():
    zero = replace(START, scores=np.zeros((64, 4)))
    little = replace(zero, scores=np.where(np.arange(256).reshape(64, 4) == 0, -1e-3, 0.0))
    sentence = judge_runs([group("ppo", little)], zero, None, 1).sentences[0]
    assert ": +0.000 (95% confidence interval over prompts: +0.000 to +0.000)" in sentence, sentence


def test_equal_groups_have_no_significant_difference():
    groups = [group("ppo", *three(1.0, 0.5)), group("grpo", *three(1.0, 0.5))]
    assert (
        judge_runs(groups, START, "gold quality", 1)
        .sentences[0]
        .startswith("No significant difference between PPO and GRPO")
    )


def test_difference_smaller_than_seed_variation_is_not_significant():
    """The mean difference is 0.5, but the seeds of each group are 1 apart."""
    ppo, grpo = ([completions(shift + s) for s in (-1.0, 0.0, 1.0)] for shift in (0.5, 0.0))
    assert (
        judge_runs([group("ppo", *ppo), group("grpo", *grpo)], completions(0.0), None, 1)
        .sentences[0]
        .startswith("No significant diff")
    )


def test_caveats_depend_on_the_number_of_seeds():
    one, few, many = (group("ppo", *[completions(1.0) for _ in range(n)]) for n in (1, 3, 5))
    grpo = group("grpo", *[completions(0.5) for _ in range(5)])
    start = completions(0.0)
    message = {n: judge_runs([s, grpo], start, "judge x", 1).caveats for n, s in ((1, one), (3, few), (5, many))}
    assert any("one seed (PPO: 0) does not show" in c for c in message[1])
    assert (
        message[3] == ["few seeds (PPO 3): intervals over so few seeds are wide and approximate"] and message[5] == []
    )
    assert any(c.startswith("no judge") for c in judge_runs([many, grpo], start, None, 1).caveats)
    first = judge_runs([one, grpo], start, None, 1)
    assert first.sentences[0].startswith("In these runs PPO is better than GRPO")
    assert [c.over for c in first.contrasts] == ["prompts", "seeds and prompts", "prompts"]


def test_verdict_reports_unequal_budgets_in_capitals():
    groups = [group("ppo", *three(1.0), episodes=50), group("grpo", *three(0.5), episodes=800)]
    assert "after UNEQUAL budgets (50 to 800 episodes)" in judge_runs(groups, completions(0.0), None, 1).sentences[0]


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


# --- equal budgets ---------------------------------------------------------------------------------------------------


def eval_point(update: int, seconds: float, scores, prompts=("a", "b"), per_update: int = 10) -> EvalPoint:
    rows = [
        {"prompt": [{"role": "user", "content": p}], "reply": "x", "score": s, "kl": update / 10, "ended": True}
        for p, s in zip(prompts, scores, strict=True)
    ]
    return EvalPoint(update, update * per_update, seconds, rows)


def test_equal_budgets_match_hand_computed_values():
    """PPO trains 40 episodes in 90 s and GRPO 60 in 30 s, so the equal budgets are 40 episodes and 30 s."""
    ppo = [eval_point(0, 0, (0, 0)), eval_point(2, 25, (1, 3)), eval_point(4, 90, (2, 4))]
    grpo = [eval_point(0, 0, (0, 0)), eval_point(2, 10, (1, 1)), eval_point(4, 20, (1, 2)), eval_point(6, 30, (5, 5))]
    by_episodes, by_time = at_equal({"PPO": [ppo], "GRPO": [grpo]}, None, seed=1)
    assert (by_episodes["budget"], by_time["budget"]) == ("40 episodes", "30 s of training")
    assert by_episodes["sides"]["PPO"] == {"update": 4, "score": 3, "judge": None, "kl": 0.4}
    assert by_episodes["sides"]["GRPO"] == {"update": 4, "score": 1.5, "judge": None, "kl": 0.4}
    assert by_time["sides"]["PPO"]["score"] == 2 and by_time["sides"]["GRPO"]["score"] == 5
    [of_episodes], [of_time] = by_episodes["differences"], by_time["differences"]
    assert (of_episodes["name"], of_episodes["value"], of_time["value"]) == ("PPO - GRPO", 1.5, -3)
    assert of_time["over"] == "prompts" and of_time["level"] == 0.95


def test_equal_budgets_over_seeds_require_the_same_prompts():
    ends = [[eval_point(2, 5, (1, 2))], [eval_point(2, 5, (2, 3))]]
    rows = at_equal({"PPO": ends, "GRPO": [[eval_point(2, 5, (0, 0))], [eval_point(2, 5, (0, 1))]]}, None, seed=1)
    [found] = rows[0]["differences"]
    assert found["over"] == "seeds and prompts" and found["value"] == 1.75
    other = at_equal({"PPO": ends, "GRPO": [[eval_point(2, 5, (0, 0), prompts=("b", "a"))]]}, None, seed=1)
    missing = "PPO and GRPO used different evaluation prompts"
    assert other[0]["differences"] == [{"name": "PPO - GRPO", "missing": missing}]
    assert at_equal_in_words(other)[0] == f"no comparison at 20 episodes: {missing}"
    assert at_equal({"PPO": ends, "GRPO": [[]]}, None, seed=1) == []


def test_equal_budget_ignores_the_evaluation_of_the_start_model():
    """If a run has no evaluation after the start, its last evaluation within the budget is that of the start model."""
    ppo, grpo = (
        [eval_point(0, 0, (0, 0)), eval_point(1, 9, (1, 3))],
        [eval_point(0, 0, (0, 0)), eval_point(5, 50, (2, 4))],
    )
    rows = at_equal({"PPO": [ppo], "GRPO": [grpo]}, None, seed=1)
    assert rows[0]["sides"]["GRPO"]["update"] == 0 and all("missing" in row["differences"][0] for row in rows)
    assert at_equal_in_words(rows)[0] == "no comparison at 10 episodes: GRPO had no evaluation after the start yet"


def test_equal_budgets_with_several_completions_per_prompt():
    """Two completions per prompt are one value: with scores 0, 2 and 4, 6 the means are 1 and 5, of two prompts."""
    ppo, grpo = (eval_point(2, 5, scores, prompts=("a", "a", "b", "b")) for scores in ((0, 2, 4, 6), (0, 0, 4, 4)))
    assert ppo.samples == 2 and len(ppo.prompts) == 2 and ppo.by_prompt("scores").tolist() == [1, 5]
    rows = at_equal({"PPO": [[ppo]], "GRPO": [[grpo]]}, None, seed=1)
    assert rows[0]["differences"][0]["value"] == 1.0
    assert "(their own prompts, 2 completions each): " in at_equal_in_words(rows)[0]
    of_one = eval_point(2, 5, (1, 5))
    mixed = at_equal({"PPO": [[ppo]], "GRPO": [[of_one]]}, None, seed=1)
    assert mixed[0]["differences"][0]["value"] == 0.0, "means per prompt can be compared"
    assert "(their own prompts, 1 or 2 completions each): " in at_equal_in_words(mixed)[0]


def test_equal_budgets_use_the_ratings_that_the_runs_stored():
    """The evaluation function is that of the runs, so its values are read, not computed again."""
    judge = Judge("f", None, is_function=True)
    rows = [
        {"prompt": [{"role": "user", "content": p}], "metrics": {"f": value}} for p, value in (("a", 1), ("b", None))
    ]
    assert np.array_equal(rate_stored(judge, rows, {}, None, as_logged=True), [1, np.nan], equal_nan=True)
    assert rate_stored(judge, rows, {}, None, as_logged=False) is None, "another function needs the data's columns"


def test_caveat_if_only_the_judge_finds_a_difference():
    groups = [group("ppo", *three(1.0, 0.8)), group("grpo", *three(1.0, 0.2))]
    caveats = judge_runs(groups, START, "gold quality", 1).caveats
    assert any(c.startswith("no significant difference by score: ") for c in caveats)


def test_caveat_for_few_prompts():
    ones = np.ones((4, 1))
    few = [GenerationResults("a", [["x"]] * 4, ones * shift, {}, None, ones, ones, None) for shift in range(4)]
    caveats = judge_runs([group("ppo", *few[:2]), group("grpo", *few[2:])], few[0], None, 1).caveats
    assert "only 4 prompts: intervals over so few prompts are approximate. Evaluate on more" in caveats


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


def test_verdict_of_three_groups_has_one_sentence_per_pair():
    groups = [group("ppo", *three(0, 0.8)), group("grpo", *three(0, 0.2)), group("toy", *three(0, 0.8))]
    groups[2].episodes[0] = 50
    sentences = judge_runs(groups, START, "gold quality", 1).sentences
    assert len(sentences) == 6
    assert sentences[0].startswith(
        "PPO is better than GRPO by the judge (gold quality, not used in RL training): PPO - GRPO = +0."
    )
    assert sentences[1].startswith("No significant difference between PPO and TOY by the judge: PPO - TOY = ")
    assert sentences[2].startswith("TOY is better than GRPO by the judge: GRPO - TOY = -0.")
    assert all("98.3% confidence interval over seeds and prompts" in sentence for sentence in sentences[:3])
    assert sentences[0].endswith("after 100 episodes each.")
    assert all(sentence.endswith("after UNEQUAL budgets (50 to 100 episodes).") for sentence in sentences[1:3])
    assert all("95% confidence interval" in s and "better than the start model" in s for s in sentences[3:])


def test_caveats_of_three_groups():
    """PPO is better than TOY by score, but worse by the judge. GRPO and PPO differ by the judge only."""
    groups = [group("ppo", *three(1.0, 0.2)), group("grpo", *three(1.0, 0.8)), group("toy", *three(0.5, 0.8))]
    caveats = judge_runs(groups, START, "gold quality", 1).caveats
    assert caveats[0] == (
        "3 pairs of algorithms are compared, so each pair has a 98.3% interval (Bonferroni correction): all 3 "
        "intervals hold together with 95% confidence. The 95% intervals against the start model are not corrected"
    )
    assert any(c.startswith("PPO - GRPO: no significant difference by score: ") for c in caveats)
    opposite = (
        "PPO - TOY: score and judge prefer different algorithms: a sign that the one with the higher score exploits"
    )
    assert f"{opposite} the reward model" in caveats
    assert not any(c.startswith("GRPO - TOY") for c in caveats), "GRPO and TOY are equal by the judge"
    assert not any("Bonferroni" in c for c in judge_runs(groups[:2], START, "gold quality", 1).caveats)


def test_verdict_of_five_groups_compares_each_with_the_first():
    """Scores 0, 0.2, 0.4, 0.6 and 0.8: the last one has the highest mean, which is partly chance."""
    names = ["low", "b", "c", "d", "high"]
    groups = [replace(group("ppo", *three(0.2 * i)), label=name) for i, name in enumerate(names)]
    verdict = judge_runs(groups, completions(0.0), None, 1)
    assert [c.name for c in verdict.contrasts[5:]] == [f"{name} - low" for name in names[1:]]
    assert [c.level for c in verdict.contrasts[5:]] == [pytest.approx(1 - 0.05 / 4)] * 4
    first, *others, better, no_difference = verdict.sentences
    assert first == (
        "Each group is compared with low, the first one, by score (the training reward): the others minus this one."
    )
    assert len(others) == 4 and others[3].startswith("high, better than the first one: +0.")
    assert "(98.8% confidence interval over seeds and prompts: " in others[3]
    assert others[3].endswith("after 100 episodes each.")
    assert better.startswith("Better than the start model by score: ") and better.endswith("c; d; high.")
    assert no_difference.startswith("No significant difference to the start model by score: low")
    assert verdict.caveats[0].startswith(
        "each of 4 groups is compared with the first one only, so each pair has a 98.8% interval (Bonferroni"
    )
    assert verdict.caveats[1].startswith("high has the highest mean by score (+0.") and "chance" in verdict.caveats[1]


def test_verdict_of_two_groups_of_one_algorithm_names_groups():
    groups = [replace(group("ppo", *three(1.5, 0.2)), label="A"), replace(group("ppo", *three(1.0, 0.8)), label="B")]
    verdict = judge_runs(groups, START, "gold quality", 1)
    assert verdict.sentences[0].startswith("B is better than A by the judge (gold quality")
    assert any("score and judge prefer different groups" in caveat for caveat in verdict.caveats)


def test_verdict_of_one_group_reports_what_it_cannot_show():
    by_score, alone = judge_runs([group("toy", *three(1.0))], completions(0.0), None, 1).sentences
    assert by_score.startswith("TOY is better than the start model by score (the training reward): +")
    assert alone == "All runs are in one group, so there is nothing to compare it with."


def test_equal_budgets_of_three_groups_match_hand_computed_values():
    """All groups reached 40 episodes. Within 20 s GRPO had evaluated only the start model."""
    ppo = [eval_point(0, 0, (0, 0)), eval_point(2, 10, (1, 3)), eval_point(4, 20, (2, 4))]
    grpo = [eval_point(0, 0, (0, 0)), eval_point(4, 90, (1, 2))]
    toy = [eval_point(0, 0, (0, 0)), eval_point(4, 20, (4, 4))]
    rows = at_equal({"PPO": [ppo], "GRPO": [grpo], "TOY": [toy]}, None, seed=1)
    assert [(d["name"], d["value"]) for d in rows[0]["differences"]] == [
        ("PPO - GRPO", 1.5), ("PPO - TOY", -1), ("GRPO - TOY", -2.5),
    ]  # fmt: skip
    assert [d["level"] for d in rows[0]["differences"]] == [pytest.approx(1 - 0.05 / 3)] * 3
    late = "GRPO had no evaluation after the start yet"
    assert [d.get("missing") for d in rows[1]["differences"]] == [late, None, late]
    by_episodes, by_time = at_equal_in_words(rows)
    assert (
        "by the score in the evaluations during training (their own prompts, one completion each), 98.3% intervals: "
        in (by_episodes)
    )
    assert "intervals: PPO - GRPO = +1.500 (" in by_episodes
    assert by_time.startswith("at 20 s of training, by the score in the evaluations during training")
    assert f": PPO - GRPO not compared ({late}); PPO - TOY = -1.000 (" in by_time
    assert by_time.endswith(f"; GRPO - TOY not compared ({late})")
