"""Recomputes every mean, difference, win rate and interval of three whole comparisons with other code: numpy loops,
scipy's BCa, and the formula over seeds."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from rlhf.analysis.models import ModelRef
from rlhf.analysis.verdict import START, Arm
from rlhf.config import config_of_run
from rlhf.data.row import Example
from rlhf.reports.comparison_report import make_comparison
from rlhf.settings.evaluation import MeasureSettings
from tests.evaluations import evaluation_of
from tests.records import record_of

SEED = 7
NAN = float("nan")


def evaluator_of(prompts: int, judge: str | None) -> SimpleNamespace:
    """Return what a comparison reads of an evaluator, without models."""
    return SimpleNamespace(
        settings=MeasureSettings(seed=SEED),
        config=config_of_run(record_of()),
        runs=[],
        screen=SimpleNamespace(warnings=["the prompts are odd"], notes=["one row is bad", "one row is bad"]),
        examples=[Example(({"role": "user", "content": f"{i}?"},)) for i in range(prompts)],
        judges=[SimpleNamespace(name=judge, independent=True)] if judge else [],
        judge_name=judge,
        score_name="the training reward",
        rate=None,
        drop_copies=lambda everyone: [],
        facts=lambda: [("prompts", str(prompts))],
    )


def report_of(arms: dict[str, list], start, judge: str | None = None) -> dict:
    """Return the report on arms: name -> evaluation of each seed."""
    made = [
        Arm(name, found, [ModelRef(name, name, run=record_of(seed=i), update=2) for i in range(len(found))])
        for name, found in arms.items()
    ]
    evaluator = evaluator_of(len(start.texts), judge)
    return make_comparison(evaluator, made, Arm(START, [start]), None, [], {})[1]


# --- the same numbers by other code ----------------------------------------------------------------------------------


def mean_of(row) -> float:
    known = [value for value in row if value == value]
    return sum(known) / len(known) if known else NAN


def win_rate_of(one, other) -> float:
    pairs = [(a > b) + (a == b) / 2 for a in one for b in other if a == a and b == b]
    return sum(pairs) / len(pairs) if pairs else NAN


def interval_over_prompts(values, level: float) -> tuple[float, float]:
    """scipy's BCa interval, widened by t / z and sqrt(P / (P - 1))."""
    rng = np.random.default_rng(SEED)
    found = stats.bootstrap((values,), np.mean, n_resamples=5000, confidence_level=level, method="BCa", rng=rng)
    ends = np.array(found.confidence_interval)
    count = len(values)
    wide = stats.t.ppf((1 + level) / 2, count - 1) / stats.norm.ppf((1 + level) / 2) * np.sqrt(count / (count - 1))
    return tuple(values.mean() + (ends - values.mean()) * wide)


def interval_over_seeds(values, level: float) -> tuple[float, float]:
    """The formula of docs/decisions/evaluation.md for values (S, T, P), a fixed group having a single seed."""
    prompts = values.shape[2]
    variances, noises, freedom = [], [], []
    for rows in (values.mean(axis=1), values.mean(axis=0)):
        count = len(rows)
        if count > 1:
            grand = rows.mean()
            rest = sum(
                (rows[s, p] - rows[s].mean() - rows[:, p].mean() + grand) ** 2
                for s in range(count)
                for p in range(prompts)
            )
            noises.append(rest / ((count - 1) * (prompts - 1)) / (prompts * count))
            variances.append(sum((row.mean() - grand) ** 2 for row in rows) / (count - 1) / count)
            freedom.append(count - 1)
    of_prompts = np.var(values.mean(axis=(0, 1)), ddof=1) / prompts
    variances = np.array([*variances, max(of_prompts - sum(noises), 0)])
    freedom = np.array([*freedom, prompts - 1])
    quantile = (1 + level) / 2
    alone = variances * stats.t.ppf(quantile, freedom) ** 2
    together = sum(
        v * stats.t.ppf(quantile, f / np.sqrt(a / alone.sum())) ** 2
        for v, f, a in zip(variances, freedom, alone, strict=True)
        if v
    )
    least = (variances[-1] + sum(noises)) * stats.t.ppf(quantile, prompts - 1) ** 2
    half = np.sqrt(max(together, least))
    return values.mean() - half, values.mean() + half


def estimate_of(values, over_seeds: bool, level: float, limits: tuple | None) -> list[float]:
    """Return the mean and both ends of its interval, from values (S, T, P)."""
    known = values[..., ~np.isnan(values).any(axis=(0, 1))]
    ends = interval_over_seeds(known, level) if over_seeds else interval_over_prompts(known.mean(axis=(0, 1)), level)
    low, high = limits or (-np.inf, np.inf)
    return [known.mean(), max(ends[0], low), min(ends[1], high)]


def rows_of(one, other, of) -> np.ndarray:
    """Return `of` for each prompt of each pair of seeds (S, T, P)."""
    return np.array([[[of(x, y) for x, y in zip(a, b, strict=True)] for b in other] for a in one])


def values_of(found: dict) -> list[float]:
    return [found["value"], found["low"], found["high"]]


def check(arms: dict[str, list], start, judge: str | None = None) -> dict:
    """Compare every number of the report with the ones by other code, and return the report."""
    report = report_of(arms, start, judge)
    sides = {START: [start], **arms}
    measures = ["score", *(["judge"] if judge else [])]
    pairs = list(itertools.combinations(arms, 2))
    expected = [(m, pair, level) for m in measures
                for pair, level in [*(((name, START), 0.95) for name in arms),
                                    *((pair, 1 - 0.05 / len(pairs)) for pair in pairs)]]  # fmt: skip
    assert [(c["measure"], c["name"]) for c in report["contrasts"]] == [(m, " - ".join(p)) for m, p, _ in expected]
    for found, (measure, pair, level) in zip(report["contrasts"], expected, strict=True):
        one, other = ([results.measures[measure].tolist() for results in sides[name]] for name in pair)
        several = min(len(sides[name]) for name in pair if name != START) > 1
        values = list(itertools.chain(*one, *other))
        known = [value for row in values for value in row if value == value]
        limits = (-1, 1) if min(known) >= 0 and max(known) <= 1 else None
        gaps = rows_of(one, other, lambda a, b: mean_of(a) - mean_of(b))
        wins = rows_of(one, other, win_rate_of)
        exact = {"rel": 1e-12, "abs": 1e-12}
        assert values_of(found["difference"]) == pytest.approx(estimate_of(gaps, several, level, limits), **exact)
        assert values_of(found["win_rate"]) == pytest.approx(estimate_of(wins, several, level, (0, 1)), **exact)
        assert found["over"] == ("seeds and prompts" if several else "prompts") and found["level"] == level
    for summary, (name, seeds) in zip(report["summary"], sides.items(), strict=True):
        means = np.array([[[mean_of(row) for row in results.measures[measures[-1]].tolist()]] for results in seeds])
        known = [value for results in seeds for value in results.measures[measures[-1]].ravel() if value == value]
        limits = (0, 1) if min(known) >= 0 and max(known) <= 1 else None
        several = name != START and len(seeds) > 1
        assert values_of(summary) == pytest.approx(estimate_of(means, several, 0.95, limits), rel=1e-12, abs=1e-12)
        figures = report["figures"]["start" if name == START else name]
        for found, results in zip([figures] if name == START else figures.values(), seeds, strict=True):
            scores = [value for value in results.scores.ravel() if value == value]
            assert found["score"] == pytest.approx(sum(scores) / len(scores), rel=1e-12)
            assert found["score_sd"] == pytest.approx(np.std(scores, ddof=1), rel=1e-12)
            assert found["kl"] == pytest.approx(sum(results.kl.ravel()) / results.kl.size, rel=1e-12)
    return report


def made(rng, scores, judged=None):
    rated = {} if judged is None else {"j": judged}
    return evaluation_of(scores, rated, kl=rng.gamma(2.0, 1.0, np.shape(scores)))


def test_single_seeds_with_an_unbounded_score():
    rng = np.random.default_rng(1)
    prompts = rng.normal(0, 2, (24, 1))
    start, ppo, grpo = (made(rng, prompts + shift + rng.normal(0, 1, (24, 4))) for shift in (0, 0.8, 0.5))
    report = check({"PPO": [ppo], "GRPO": [grpo]}, start)
    assert report["warnings"][0] == "the prompts are odd" and report["notes"][:1] == ["one row is bad"]
    assert report["notes"].count("one row is bad") == 1


def test_seeds_with_a_score_of_0_or_1_and_ties():
    """Half of the pairs tie. The interval over two seeds is wider than the range of a difference, and is cut there."""
    rng = np.random.default_rng(2)
    solved = rng.uniform(0, 1, (30, 1))

    def of(shift: float):
        return made(rng, (rng.uniform(0, 1, (30, 2)) < solved + shift).astype(float))

    start = of(0)
    report = check({"PPO": [of(s) for s in (0.1, 0.3, 0.0)], "GRPO": [of(s) for s in (-0.5, 0.5)]}, start)
    wide = next(c for c in report["contrasts"] if c["name"] == "GRPO - start model")
    assert (wide["difference"]["low"], wide["difference"]["high"]) == (-1, 1) and wide["power"]["visible"] is None


def test_three_arms_with_a_judge_and_completions_without_a_score():
    rng = np.random.default_rng(3)

    def of(shift: float):
        scores = rng.normal(shift, 1, (26, 4))
        scores[rng.uniform(0, 1, scores.shape) < 0.2] = NAN
        scores[int(rng.integers(26))] = NAN  # a prompt without a score
        judged = np.clip(np.round(8 * rng.normal(0.4 + shift / 4, 0.3, scores.shape)) / 8, 0, 1)  # with ties
        return made(rng, scores, judged)

    start = of(0)
    report = check({"PPO": [of(0.5)], "GRPO": [of(0.2), of(0.4)], "RLOO": [of(1), of(0.9)]}, start, "j")
    assert {round(c["level"], 4) for c in report["contrasts"]} == {0.95, 0.9833}
    assert any("no score" in note for note in report["notes"])
