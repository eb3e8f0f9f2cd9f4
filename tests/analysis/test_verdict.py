"""Tests the contrasts of the verdict and its caveats, on synthetic groups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlhf.analysis.best_of_n import best_of_n
from rlhf.analysis.models import ModelRef
from rlhf.analysis.verdict import START as START_NAME
from rlhf.analysis.verdict import Arm, Evidence, Verdict, best_of_arm, contrast, judge_arms
from rlhf.checkpoints.run_record import Plan
from rlhf.config import make_config
from rlhf.reports.comparison_tables import figure_table
from rlhf.settings.training import Config
from rlhf.trainer.evaluation import Evaluation
from tests.evaluations import LENGTH, evaluation_of
from tests.records import record_of

RNG = np.random.default_rng(0)
PROMPTS = RNG.normal(0, 1, (64, 1))


def completions(
    score: float, judged: float | None = None, kl: float = 2.0, perplexity: float | None = 3.0
) -> Evaluation:
    """Return four completions for each of 64 prompts, scored `score` plus an offset per prompt and noise of 0.3."""
    noise = RNG.normal(0, 0.3, (2, 64, 4))
    rated = {} if judged is None else {"gold quality": PROMPTS + judged + noise[1]}
    return evaluation_of(PROMPTS + score + noise[0], rated, kl=np.full((64, 4), kl), perplexity=perplexity)


def group(name: str, *measured: Evaluation, episodes: int = 100, config: Config | None = None) -> Arm:
    """Return an arm with one run for each of `measured`."""
    plan = Plan(2, episodes, 2, episodes)
    records = [record_of(config, seed=i, plan=plan) for i in range(len(measured))]
    return Arm(name, list(measured), [ModelRef(name, name, run=record, update=2) for record in records])


def judge_runs(arms: list[Arm], start: Evaluation, judge: str | None, seed: int, **evidence) -> Verdict:
    return judge_arms(arms, Arm(START_NAME, [start]), seed, Evidence(judge, **evidence))


def three(score: float, judged: float | None = None) -> list[Evaluation]:
    return [completions(score + shift, None if judged is None else judged + shift) for shift in (-0.02, 0.0, 0.02)]


def results(verdict: Verdict, measure: str = "score") -> dict[str, str]:
    return {found.name: found.result for found in verdict.contrasts if found.measure == measure}


START = completions(0.0, 0.0, kl=0.0, perplexity=2.0)
STATE = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def same_numbers_in_every_order():
    """A test draws the same numbers whichever tests ran before it."""
    RNG.bit_generator.state = STATE


@pytest.mark.parametrize(("ppo", "grpo", "result"), [(1.0, 0.5, "better"), (0.5, 1.0, "worse")])
def test_verdict_reports_which_group_is_better(ppo, grpo, result):
    verdict = judge_runs([group("PPO", *three(ppo)), group("GRPO", *three(grpo))], completions(0.0), None, 1)
    assert results(verdict) == {"PPO - start model": "better", "GRPO - start model": "better", "PPO - GRPO": result}
    assert {(c.over, c.level) for c in verdict.contrasts} == {("seeds and prompts", 0.95)}


def test_verdict_reports_worse_models_with_kl_and_perplexity():
    groups = [group("PPO", *three(-1.0)), group("GRPO", *three(0.0))]
    verdict = judge_runs(groups, completions(0.0, perplexity=2.0), None, 1)
    assert results(verdict) == {"PPO - start model": "worse", "GRPO - start model": "equal", "PPO - GRPO": "worse"}
    assert all("2.00/sequence" in sentence and "1.50" in sentence for sentence in verdict.sentences[1:])


def decided(arms: list[Arm], **evidence) -> tuple:
    """Return the decision with the names of arms: the best one, the winners of pairs, the number of pairs that are not
    shown at equal KL, and those better than the start model. Its sentence is short and names the best one."""
    verdict = judge_runs(arms, completions(0.0, kl=0.0), None, 1, **evidence)
    words = verdict.headline.split()
    found = verdict.decision
    assert len(words) <= 30 and verdict.headline.endswith(".") and ". " not in verdict.headline
    assert found.best is None or found.best.name in verdict.headline
    names = [[arm.name for arm in some] for some in (found.winners, found.better)]
    return found.best and found.best.name, names[0], found.unlike, names[1]


@pytest.mark.parametrize(
    ("scores", "best", "winners", "better"),
    [
        ((1.0,), None, "", "A"),
        ((0.0,), None, "", ""),
        ((1.0, 0.5), "A", "A", "AB"),
        ((0.5, 1.0), "B", "B", "AB"),
        ((1.0, 0.0), "A", "A", "A"),
        ((0.0, 0.0), None, "", ""),
        ((1.0, 0.5, 0.5), "A", "AA", "ABC"),
        ((1.0, 1.0, 0.5), None, "AB", "ABC"),
        ((1.0, 1.0, 1.0, 0.0), None, "ABC", "ABC"),
    ],
)
def test_a_decision_has_a_winner_if_one_arm_is_better_than_each_other_one(scores, best, winners, better):
    arms = [group(name, *three(score)) for name, score in zip("ABCD", scores, strict=False)]
    assert decided(arms) == (best, list(winners), 0, list(better))


def test_headline_of_long_names_stays_short():
    names = [f"GRPO batch_size 32, kl_coef 0.05, learning_rate 1e-{n}, 4 more settings" for n in range(5)]
    assert decided([group(name, *three(0.0)) for name in names]) == (None, [], 0, [])
    arms = [group(name, *three(score)) for name, score in zip(names, (1.0, 0.0), strict=False)]
    assert decided(arms) == (names[0], names[:1], 0, names[:1])


def test_headline_without_seeds_holds_for_these_runs():
    """Also if the two arms differ only at unlike KL."""
    for ppo, grpo, kl in ((1.0, 0.2, 2.0), (1.0, 1.0, 2.0), (1.0, 0.2, 9.0)):
        arms = [group("PPO", completions(ppo, kl=kl)), group("GRPO", completions(grpo))]
        verdict = judge_runs(arms, completions(0.0, kl=0.0), None, 1)
        where = next(found.where for found in verdict.contrasts if found.where)
        assert where.strip().lower() in verdict.headline.lower()


def test_an_arm_that_is_better_at_unlike_kl_is_no_winner():
    far = group("PPO", *[replace(results, kl=np.full((64, 4), 9.0)) for results in three(1.0)])
    assert decided([far, group("GRPO", *three(0.2))]) == (None, [], 1, ["PPO", "GRPO"])


def test_verdict_names_a_control_in_each_sentence():
    config = make_config("demo", "grpo", control="shuffled")
    control = group("GRPO control", *three(0.1, 0.5), config=config)
    groups = [group("PPO", *three(1.5, 0.2)), control]
    verdict = judge_runs(groups, START, "gold quality", 1)
    assert [control.name in sentence for sentence in verdict.sentences] == [True, False, True]
    assert verdict.contrasts[-1].name == f"PPO - {control.name}"


def test_verdict_uses_the_judge_and_reports_a_contradicting_score():
    groups = [group("PPO", *three(1.5, 0.2)), group("GRPO", *three(1.0, 0.8))]
    verdict = judge_runs(groups, START, "gold quality", 1)
    assert results(verdict, "judge")["PPO - GRPO"] == "worse" and results(verdict)["PPO - GRPO"] == "better"
    assert "gold quality" in verdict.sentences[0]
    agree = judge_runs([group("PPO", *three(1.5, 0.8)), group("GRPO", *three(1.0, 0.2))], START, "gold quality", 1)
    assert len(verdict.caveats) == len(agree.caveats) + 1


def test_a_perfect_separation_is_significant_with_any_number_of_seeds():
    """A saturated evaluation function gives 1 and 0: no prompt and no seed differs."""
    one, zero = (replace(START, judged={"gold quality": np.full((64, 4), value)}) for value in (1.0, 0.0))
    for seeds in (1, 3):
        verdict = judge_runs([group("PPO", *[one] * seeds), group("GRPO", *[zero] * seeds)], zero, "gold quality", 1)
        found = [(c.result, c.difference.value) for c in verdict.contrasts if c.measure == "judge"]
        assert found == [("better", 1), ("equal", 0), ("better", 1)]


def test_a_rounding_error_of_zero_has_no_sign():
    zero = replace(START, scores=np.zeros((64, 4)), judged={})
    little = replace(zero, scores=np.where(np.arange(256).reshape(64, 4) == 0, -1e-13, 0.0))
    sentence = judge_runs([group("PPO", little)], zero, None, 1).sentences[0]
    assert sentence.count("+0.000") == 3 and "-0.000" not in sentence, sentence


def test_difference_smaller_than_seed_variation_is_not_significant():
    """The mean difference is 0.5, but the seeds of each group are 1 apart."""
    ppo, grpo = ([completions(shift + s) for s in (-1.0, 0.0, 1.0)] for shift in (0.5, 0.0))
    verdict = judge_runs([group("PPO", *ppo), group("GRPO", *grpo)], completions(0.0), None, 1)
    assert results(verdict)["PPO - GRPO"] == "equal"


def test_caveats_depend_on_the_number_of_seeds():
    one, two = (group("PPO", *[completions(1.0) for _ in range(n)]) for n in (1, 2))
    grpo = group("GRPO", *[completions(0.5) for _ in range(5)])
    start = completions(0.0)
    of_one, of_two = (judge_runs([seeds, grpo], start, "judge x", 1).caveats for seeds in (one, two))
    assert [len(of_one), of_two] == [1, []] and "(PPO: seed 0)" in of_one[0]
    without_judge = judge_runs([two, grpo], start, None, 1).caveats
    assert len(without_judge) == 1 and "--judge-model" in without_judge[0]
    first = judge_runs([one, grpo], start, None, 1)
    assert results(first)["PPO - GRPO"] == "better" and first.contrasts[-1].where
    assert [c.over for c in first.contrasts] == ["prompts", "seeds and prompts", "prompts"]


def test_contrast_matches_hand_computed_values():
    """Two seeds against the start model: the difference of means per prompt, and the win rate over all pairs."""
    a = evaluation_of([[1.0, 3.0], [0.0, 2.0]])
    b = evaluation_of([[2.0, 2.0], [2.0, 2.0]])
    start = evaluation_of([[0.0, 2.0], [2.0, 2.0]])
    found = contrast(group("PPO", a, b), Arm(START_NAME, [start]), "score", 1)
    assert found.difference.value == pytest.approx(((2 - 1) + (1 - 2) + (2 - 1) + (2 - 2)) / 4)
    # a: prompt 1 (1 > 0, 1 < 2, 3 > 0, 3 > 2) 3/4, prompt 2 (0 < 2, 2 = 2) 1/4; b: (2 > 0, 2 = 2) 3/4, all equal 1/2
    assert found.win_rate.value == pytest.approx((3 / 4 + 1 / 4 + 3 / 4 + 1 / 2) / 4)
    assert found.name == "PPO - start model"


def test_caveat_for_few_prompts():
    few = [evaluation_of(np.full((4, 1), shift)) for shift in range(4)]
    caveats = judge_runs([group("PPO", *few[:2]), group("GRPO", *few[2:])], few[0], None, 1).caveats
    assert " 4 prompts" in caveats[-1] and " 349: --num-prompts" in caveats[-1]


# --- three and more groups -------------------------------------------------------------------------------------------


def constant(score: float, judged: float | None = None) -> Evaluation:
    """Return one completion for each of 20 prompts, all with the same score."""
    return evaluation_of([[score]] * 20, {"gold quality": [[judged]] * 20} if judged else {})


def test_contrasts_of_three_groups_cover_every_pair():
    """Scores 3, 1 and 2, and 0 for the start model."""
    groups = [group("PPO", constant(3.0)), group("GRPO", constant(1.0)), group("TOY", constant(2.0))]
    verdict = judge_runs(groups, constant(0.0), None, 1)
    assert [(c.name, c.difference.value) for c in verdict.contrasts] == [
        ("PPO - start model", 3), ("GRPO - start model", 1), ("TOY - start model", 2),
        ("PPO - GRPO", 2), ("PPO - TOY", 1), ("GRPO - TOY", -1),
    ]  # fmt: skip
    assert [c.level for c in verdict.contrasts] == [*[0.95] * 3, *[pytest.approx(1 - 0.05 / 3)] * 3]


def test_verdict_of_three_groups_has_one_sentence_per_pair():
    toy = group("TOY", *three(0, 0.8), episodes=50)
    groups = [group("PPO", *three(0, 0.8)), group("GRPO", *three(0, 0.2)), toy]
    verdict = judge_runs(groups, START, "gold quality", 1)
    found = results(verdict, "judge")
    assert [found[f"{name} - start model"] for name in ("PPO", "GRPO", "TOY")] == ["better"] * 3
    assert [found[name] for name in ("PPO - GRPO", "PPO - TOY", "GRPO - TOY")] == ["better", "equal", "worse"]
    assert [sentence.count("98.3%") for sentence in verdict.sentences] == [1, 1, 1, 0, 0, 0]
    assert ["50 to 100" in sentence for sentence in verdict.sentences] == [False, True, True, False, False, False]


def test_caveats_of_three_groups():
    """PPO is better than TOY by score, but worse by the judge. GRPO and PPO differ by the judge only."""
    groups = [group("PPO", *three(1.0, 0.2)), group("GRPO", *three(1.0, 0.8)), group("TOY", *three(0.5, 0.8))]
    verdict = judge_runs(groups, START, "gold quality", 1)
    pairs = ("PPO - GRPO", "PPO - TOY", "GRPO - TOY")
    by_score = results(verdict)
    by_judge = results(verdict, "judge")
    assert [(by_score[p], by_judge[p]) for p in pairs] == [
        ("equal", "worse"), ("better", "worse"), ("better", "equal"),
    ]  # fmt: skip
    assert "98.3%" in verdict.caveats[0]
    assert [sum(c.startswith(p) for c in verdict.caveats) for p in pairs] == [1, 1, 0]
    assert not any("%" in caveat for caveat in judge_runs(groups[1:], START, "gold quality", 1).caveats)


def test_verdict_of_five_groups_compares_each_with_the_first():
    names = ["low", "b", "c", "d", "high"]
    verdict = judge_runs([group(name, *three(0.2 * i)) for i, name in enumerate(names)], completions(0.0), None, 1)
    assert [c.name for c in verdict.contrasts[5:]] == [f"{name} - low" for name in names[1:]]
    assert [c.level for c in verdict.contrasts[5:]] == [pytest.approx(1 - 0.05 / 4)] * 4
    assert len(verdict.sentences) == 9 and results(verdict)["high - low"] == "better"
    assert "98.8%" in verdict.caveats[0] and "low" in verdict.caveats[0]


def test_verdict_uses_the_names_of_the_arms():
    groups = [group("A", *three(1.5, 0.2)), group("B", *three(1.0, 0.8))]
    verdict = judge_runs(groups, START, "gold quality", 1)
    assert results(verdict, "judge")["A - B"] == "worse"
    assert [sentence[:2] for sentence in verdict.sentences] == ["B ", "A ", "B "]


# --- KL and baselines ------------------------------------------------------------------------------------------------


def at_kl(*differences: tuple[float, float]) -> list[dict]:
    """Return rows at KL 1, 2, ... with the intervals of PPO - GRPO."""
    return [
        {"kind": "kl", "number": kl, "differences": [{"name": "PPO - GRPO", "value": 0.0, "low": low, "high": high}]}
        for kl, (low, high) in enumerate(differences, 1)
    ]


@pytest.mark.parametrize(
    ("rows", "better"),
    [
        (at_kl((0.1, 0.2), (-0.1, 0.2)), "PPO"),
        (at_kl((-0.1, 0.2), (-0.1, 0.2)), None),
        (at_kl((-0.2, -0.1), (-0.1, 0.2)), None),
        (at_kl((-0.2, -0.1), (0.1, 0.2)), None),
        ([], None),
    ],
)
def test_arms_at_unlike_kl_are_better_only_if_they_are_at_equal_kl(rows, better):
    ppo, grpo = (replace(r, kl=r.kl + n) for r, n in ((completions(1.0), 1.0), (completions(0.5), 0.0)))
    arms = [group("PPO", ppo), group("GRPO", grpo)]
    sentence = judge_runs(arms, completions(0.0), None, 1, equal=rows).sentences[0]
    assert ("better than" in sentence) == (better is not None)


def test_the_worth_in_samples():
    """Scores of the start model are 0 or 1 with probability 1/2, those of the arm are 1 with 3/4, as of best-of-2."""
    start = replace(START, scores=np.tile([0.0, 1.0], (64, 2)), judged={}, kl=np.zeros((64, 4)))
    samples = replace(start, scores=np.tile([0.0, 1.0], (64, 32)))
    best = best_of_n(samples.scores, {})
    arm = replace(start, scores=np.tile([0.0, 1.0, 1.0, 1.0], (64, 1)), kl=np.full((64, 4), 0.2))
    sentence = judge_runs([group("PPO", arm)], start, None, 1, best=best).sentences[0]
    assert "best-of-2" in sentence
    above = replace(arm, scores=np.full((64, 4), 2.0))
    same = judge_runs([group("PPO", start)], start, None, 1, best=best).sentences[0]
    assert "best-of" not in same, "a model that is not better than the start model is not worth best-of-n"
    beyond = judge_runs([group("PPO", above)], start, None, 1, best=best).sentences[0]
    assert f"all n up to {samples.scores.shape[1]}" in beyond


def test_the_start_model_has_the_value_of_its_many_samples():
    """Of 4 lucky completions of each prompt 3 are right, of 64 others half: 1/2 counts in every sentence and figure,
    pass@k included, as in best-of-n. What is printed of completions, such as their lengths, is of the 4."""
    checked = {"judged": {}, "functions": ("exact",)}
    few = replace(START, scores=np.tile([0.0, 1.0, 1.0, 1.0], (64, 1)), **checked)
    many = replace(START, scores=np.tile([0.0, 1.0], (64, 32)), lengths=np.full((64, 64), 9), **checked)
    start = Arm(START_NAME, [replace(few, more=many)])
    better = replace(few, scores=np.ones((64, 4)))
    verdict = judge_arms([group("PPO", better)], start, 1, Evidence(None, best=best_of_n(many.scores, {})))
    assert "+0.500" in verdict.sentences[0]
    assert start.mean("score") == best_of_n(many.scores, {}).measures["score"][0] == 0.5
    assert start.mean("pass@1/exact") == pytest.approx(0.5) and start.mean("pass@8/exact") is None
    assert (start.mean("length"), start.mean("score_of_worst")) == (LENGTH, 0)


@pytest.mark.parametrize("greedy", [None, 0.9])
def test_greedy_decoding_is_in_the_sentence_on_the_start_model(greedy):
    variants = {} if greedy is None else {"greedy": greedy}
    arms = [group("PPO", *(replace(completions(1.0), variants=variants) for _ in range(2)))]
    start = replace(completions(0.0), variants={"greedy": 0.25} if variants else {})
    sentence = judge_runs(arms, start, None, 1).sentences[0]
    assert ("greedy decoding 0.900, start model 0.250" in sentence) == (greedy is not None)


def test_a_comparison_that_could_not_have_seen_any_difference():
    """A score of 0 or 1 on two prompts."""
    right, wrong = (evaluation_of(scores) for scores in ([[0], [1]], [[1], [0]]))
    verdict = judge_runs([group("PPO", right), group("GRPO", wrong)], right, None, 1)
    assert "any possible difference" in verdict.sentences[0] and "inf" not in verdict.sentences[0]


def test_best_of_n_is_an_arm_of_real_completions():
    scores = np.array([[1.0, 3.0, 2.0, 0.0]])
    samples = evaluation_of(scores, {"j": scores * 2}, texts=[["a", "b", "c", "d"]])
    arm = best_of_arm(samples, 2, best_of_n(scores, {}))
    (found,) = arm.measured
    assert (found.texts, found.scores.tolist()) == ([["b", "c"]], [[3.0, 2.0]])
    assert found.judged["j"].tolist() == [[6.0, 4.0]] and found.kl == pytest.approx(np.log(2) - 0.5)
    assert arm.name == "best-of-2" and not arm.trained
    assert arm.mean("score") == 2.5 and arm.mean("score_of_best") is None  # two blocks, not two completions


def test_the_k_with_which_the_start_model_is_ahead():
    """pass@1 is 1/2 and 3/4, pass@2 is 1 and 3/4: the arm solves fewer prompts, but these always."""

    def checked(rows: list[list[float]]) -> Evaluation:
        return evaluation_of(rows * 16, {"exact": rows * 16}, functions=("exact",))

    start = checked([[0, 1], [0, 1], [0, 1], [0, 1]])
    arm = checked([[1, 1], [1, 1], [1, 1], [0, 0]])
    (note,) = [c for c in judge_runs([group("PPO", arm)], start, "exact", 1).caveats if "pass@" in c]
    assert "pass@2" in note and "1.000" in note and "0.750" in note


def test_comparison_without_any_score_has_an_unknown_kl_of_best_of_n():
    nothing = replace(START, scores=np.full((64, 4), np.nan), judged={})
    assert best_of_n(nothing.scores, {}) is None
    arm = best_of_arm(nothing, 2, None)
    assert arm.measured[0].kl is None
    verdict = judge_runs([group("PPO", completions(1.0)), arm], nothing, None, 1)
    assert set(results(verdict).values()) == {"unknown"}


@pytest.mark.parametrize("which", ["arm", "start"])
def test_greedy_decoding_is_shown_if_both_sides_have_it(which):
    """A model has it only if all values are 0 or 1, and that of the other side may have a 0.5."""
    greedy = {"greedy": 0.75}
    start = replace(START, variants=greedy if which == "start" else {})
    arm = group("PPO", replace(completions(1.0, 1.0), variants=greedy if which == "arm" else {}))
    assert "greedy" not in judge_runs([arm], start, "gold quality", 1).sentences[0]
    both = group("PPO", replace(completions(1.0, 1.0), variants=greedy))
    (sentence,) = judge_runs([both], replace(START, variants={"greedy": 0.25}), "gold quality", 1).sentences
    assert "greedy decoding 0.750, start model 0.250" in sentence


def test_a_difference_of_small_scores_is_readable():
    arm, start = ([replace(found, scores=found.scores * 1e-5) for found in some] for some in (three(1.0), [START]))
    (sentence,) = judge_runs([group("PPO", *arm)], replace(start[0], judged={}), None, 1).sentences
    assert "better" in sentence and sentence.count("e-0") == 3 and "+0.000" not in sentence


def test_models_without_a_run_are_not_seeds():
    dpo = [ModelRef(name, name) for name in ("a", "b")]
    arms = [group("PPO", *three(1.0)), Arm("DPO", three(0.5)[:2], dpo)]
    start = Arm(START_NAME, [completions(0.0)])
    assert figure_table([start, *arms], []).columns == ["", START_NAME, "PPO (3 seeds)", "DPO (2 models)"]
    arms = [group("PPO", completions(1.0)), Arm("DPO", [completions(0.5)], dpo[:1])]
    (line,) = (line for line in judge_arms(arms, start, 1, Evidence(None)).caveats if "depends on the seed" in line)
    assert "(PPO: seed 0, DPO: model a)" in line and "one seed" not in line
