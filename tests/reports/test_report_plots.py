"""Tests the pictures of the pages: contrasts, score over KL with best-of-n, histograms, colours."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb

import rlhf.utils
from rlhf.analysis.curves import read_runs
from rlhf.reports.plot_style import COLOURS, WIDTH
from rlhf.reports.report_plots import forest, score_against_kl
from tests.reports.test_curve_plots import colour_of, legend, line, points

STYLE = (Path(rlhf.utils.__file__).parent / "templates" / "page.html").read_text(encoding="utf-8")
BEST_OF = {"n": [1, 2, 3, 4, 64], "kl": [0.0, 0.2, 0.4, 0.6, 3.2], "exact": False,
           "measures": {"score": [0.0, 1.0, 1.5, 2.0, 3.0]}}  # fmt: skip


def contrast(name: str, measure="score", value=1.0, low=0.5, high=1.5, visible=0.25) -> dict:
    difference = {"value": value, "low": low, "high": high}
    return {"name": name, "measure": measure, "difference": difference, "win_rate": {}, "over": "prompts",
            "level": 0.983, "power": {"visible": visible, "seeds": 3, "first_wins": 0.9}}  # fmt: skip


def evaluated_run(logged_run, name: str, kl, score, more=None, **facts) -> Path:
    """Writes a run with evaluations after update 1, 2, and so on."""
    curves = {"eval/kl_divergence": kl, "eval/score": score, **(more or {})}
    return logged_run(name, len(kl), curves, **facts)


# contrasts


def intervals(axes) -> list:
    """Return the ends of the horizontal lines."""
    segments = [segment.tolist() for found in axes.collections for segment in found.get_segments()]
    return [segment for segment in segments if segment[0][1] == segment[1][1]]


def test_forest_has_a_row_per_contrast_by_the_measure_that_decides():
    contrasts = [contrast("A - B", "judge"), contrast("A - C", "judge", value=2.0, low=1.0, high=4.0),
                 contrast("A - B", "judge/x"), contrast("A - B")]  # fmt: skip
    figure = forest(contrasts, ["exact match", "x"])
    [axes] = figure.axes
    assert "exact match" in axes.get_xlabel()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["A - B (98.3%)", "A - C (98.3%)"]
    first, second = axes.get_yticks()
    assert first > second
    assert [f.get_xydata().tolist() for f in axes.lines if f.get_marker() == "o"] == [[[1, first]], [[2, second]]]
    assert intervals(axes) == [[[0.5, first], [1.5, first]], [[1, second], [4, second]]]
    assert axes.lines[0].get_xdata() == [0, 0]
    [by_score] = forest([contrast("A - B", "judge"), contrast("A - B", value=3.0)], []).axes
    assert [f.get_xdata() for f in by_score.lines if f.get_marker() == "o"] == [[3.0]], "no judge: the score decides"
    assert sorted(legend(figure), key=len) == [
        "difference",
        "confidence interval (level)",
        "smallest visible difference (80% power)",
    ]


def test_forest_marks_the_smallest_visible_difference_of_each_row():
    """Marks, because an area would look like an interval. A difference that no comparison can see has none."""
    unseen = contrast("C - D", visible=float("inf"))
    rows = [contrast("A - B"), contrast("A - C", visible=None), contrast("B - C", visible=2.0), unseen]
    [axes] = forest(rows, []).axes
    segments = [segment for found in axes.collections for segment in found.get_segments()]
    marks = [(float(x), (low + high) / 2) for (x, low), (end, high) in segments if x == end]
    first, _, third, _ = axes.get_yticks()
    assert marks == [pytest.approx(mark) for mark in ((-0.25, first), (0.25, first), (-2, third), (2, third))]


def test_forest_draws_what_is_known():
    """A difference may have no interval, or no value."""
    unknown = contrast("A - C", value=None, low=None, high=None, visible=None)
    [axes] = forest([contrast("A - B", low=None, high=None, visible=None), unknown], []).axes
    assert len(axes.collections) == 0 and [f.get_xdata() for f in axes.lines if f.get_marker() == "o"] == [[1.0]]
    assert [text.get_text() for text in axes.texts] == [" no value"]


@pytest.mark.parametrize("count", [1, 30])
def test_rows_of_a_forest_have_space_for_their_labels(count):
    figure = forest(
        [contrast(f"group {i} with a long name - another group with a long name") for i in range(count)], []
    )
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert all(above.y0 > below.y1 for above, below in pairwise(boxes))
    assert min(box.x0 for box in boxes) >= 0 and figure.get_figwidth() == WIDTH
    assert figure.axes[0].get_tightbbox().y0 > figure.legends[0].get_window_extent().y1


# score over KL


def test_runs_and_the_mean_of_their_group_are_drawn_over_kl(logged_run):
    runs = [
        evaluated_run(logged_run, "a", [0.0, 1.0], [0.0, 2.0], seed=1),
        evaluated_run(logged_run, "b", [0.0, 3.0], [1.0, 4.0], seed=2),
    ]
    figure = score_against_kl(read_runs(runs))
    [axes] = figure.axes
    assert points(axes, "PPO") == [(0, 0.5), (2, 3)]
    thin = [f.get_xydata().tolist() for f in axes.lines if f.get_linewidth() < 1 and f.get_color() == colour_of("ppo")]
    assert thin == [[[0, 0], [1, 2]], [[0, 1], [3, 4]]]
    assert axes.get_xlim()[1] == pytest.approx(1.15 * 3)
    assert legend(figure) == ["PPO"]


def test_best_of_n_ends_with_the_axis(logged_run):
    run = evaluated_run(logged_run, "a", [0.0, 2.0], [0.0, 1.0])
    [axes] = score_against_kl(read_runs([run]), best_of=BEST_OF).axes
    assert points(axes, "best-of-n, with n (KL at most)") == [(0, 0), (0.2, 1), (0.4, 1.5), (0.6, 2)]
    assert [(text.get_text(), *text.xy) for text in axes.texts] == [("2", 0.2, 1), ("4", 0.6, 2)]


def test_labels_of_best_of_n_are_apart(logged_run):
    """At 16 nats, 2 and 4 are too near to each other."""
    run = evaluated_run(logged_run, "a", [0.0, 16.0], [0.0, 1.0])
    [axes] = score_against_kl(read_runs([run]), best_of=BEST_OF | {"exact": True}).axes
    assert [text.get_text() for text in axes.texts] == ["2", "64"]
    assert "best-of-n, with n" in {found.get_label() for found in axes.lines}


def test_arms_without_a_curve_are_points(logged_run):
    ends = [{"name": "DPO", "kl": 2.0, "score": 3.0, "judge": None}, {"name": "SFT", "kl": 0.5, "score": 1.0}]
    figure = score_against_kl([], ends=ends)
    found = [(f.get_label(), *f.get_xydata()[0]) for f in figure.axes[0].lines]
    assert found == [("DPO", 2, 3), ("SFT", 0.5, 1)]
    assert len({f.get_marker() for f in figure.axes[0].lines}) == 2
    assert figure.axes[0].get_xlim()[1] == pytest.approx(2.3)


def test_far_evaluation_is_drawn_at_the_edge(logged_run):
    kl = [*(i / 10 for i in range(20)), 500.0]
    figure = score_against_kl(read_runs([evaluated_run(logged_run, "a", kl, [1.0] * 21)]))
    assert figure.axes[0].get_xlim()[1] == line(figure.axes[0], "PPO").get_xdata()[-1] == pytest.approx(1.15 * 1.9)
    assert "KL up to 500" in figure.get_suptitle()


@pytest.mark.parametrize(("tag", "judge"), [("eval/gold", "gold quality"), ("eval/exact", "exact")])
def test_a_judge_has_a_panel_over_kl_with_best_of_n_and_arms_without_a_curve(logged_run, tag, judge):
    runs = read_runs([evaluated_run(logged_run, "a", [0.0, 2.0], [0.0, 1.0], {tag: [0.25, 0.75]})])
    best_of = BEST_OF | {"measures": BEST_OF["measures"] | {"judge": [0.0, 0.1, 0.2, 0.3, 0.4]}}
    figure = score_against_kl(runs, best_of=best_of, ends=[{"name": "DPO", "kl": 1.0, "judge": 0.5}], judge=judge)
    score, judged = figure.axes
    assert score.get_ylabel() == "score" and "held-out prompts" in judged.get_ylabel()
    assert points(judged, "PPO") == [(0, 0.25), (2, 0.75)]
    assert points(judged, "best-of-n, with n (KL at most)") == [(0, 0), (0.2, 0.1), (0.4, 0.2), (0.6, 0.3)]
    assert points(judged, "DPO") == [(1, 0.5)] and "DPO" not in {found.get_label() for found in score.lines}


def test_a_judge_whose_values_are_the_scores_has_no_panel(logged_run):
    runs = read_runs([evaluated_run(logged_run, "a", [0.0, 2.0], [0.0, 1.0], {"eval/exact": [0.0, 1.0]})])
    assert len(score_against_kl(runs).axes) == 1
    assert len(score_against_kl([*runs, *read_runs([logged_run("b", seed=2)])]).axes) == 1, "without evaluations"


def test_runs_without_evaluations_are_named(logged_run):
    figure = score_against_kl(read_runs([logged_run("a"), logged_run("b", algorithm="grpo")]))
    assert "no evaluation was logged by PPO and GRPO" in figure.get_suptitle().replace("\n", " ")


# the page's colours


def luminance(colour: str) -> float:
    """Return the relative luminance (WCAG 2.2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ratio(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_has_a_contrast_of_4_5_in_both_schemes():
    assert ratio("#ffffff", "#000000") == pytest.approx(21) and ratio("#ffffff", "#767676") == pytest.approx(
        4.54, abs=0.01
    )
    schemes = [dict(re.findall(r"--(\w+): (#\w{6});", block)) for block in re.findall(r":root {(.*?)}", STYLE, re.S)]
    assert len(schemes) == 2 and schemes[0].keys() == schemes[1].keys()
    for scheme in schemes:
        behind = [scheme[name] for name in ("paper", "soft", "alarming", "best", "worst")]
        assert min(ratio(scheme["ink"], colour) for colour in behind) >= 4.5
        assert min(ratio(scheme["dim"], colour) for colour in behind[:3]) >= 4.5
    rules = re.sub(r":root {.*?}", "", STYLE, flags=re.S)
    assert set(re.findall(r"#[0-9a-fA-F]{3,6}\b", rules)) == {schemes[0]["ink"]}, "other colours are variables"


def test_colours_are_distinct_on_white_and_on_an_inverted_picture():
    """The dark scheme inverts pictures and turns the hue by 180 degrees (W3C filter effects, hue-rotate)."""
    turn = np.array([[-0.574, 1.430, 0.144], [0.426, 0.430, 0.144], [0.426, 1.430, -0.856]])
    colours = np.array([to_rgb(COLOURS[name]) for name in ("start", "target", "above", "below")])
    inverted = np.clip((1 - colours) @ turn.T, 0, 1)
    for found, paper in ((colours, (1, 1, 1)), (inverted, (0, 0, 0))):
        apart = np.linalg.norm(found[:, None] - np.array([*found, paper])[None], axis=2)
        assert apart[apart > 0].min() > 0.25 and (apart == 0).sum() == len(found)
