"""Pictures of three and more algorithms, some of which the table lacks: all are drawn, or said not to be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlhf.algorithms.table import ALGORITHMS
from rlhf.analysis.curves import read_runs
from rlhf.reports.curve_chart import Chart
from rlhf.reports.curve_plots import draw
from rlhf.reports.plot_style import line_styles_of
from rlhf.reports.report_plots import colours_of, score_against_kl
from tests.reports.conftest import TAGS
from tests.reports.test_curve_plots import legend, line, words


def of_algorithm(run, algorithm: str):
    """A run that was read, as one of another algorithm: one that the table may lack."""
    return replace(run, config=replace(run.config, algorithm=algorithm))


def runs_of_three(made, **facts) -> list:
    """PPO, GRPO, and one that the table lacks; one seed each."""
    runs = read_runs([made(name, **facts) for name in ("p", "g", "t")])
    return [of_algorithm(run, name) for run, name in zip(runs, ("ppo", "grpo", "toy"), strict=True)]


def test_three_algorithms_are_all_drawn_and_named(made):
    figure = draw(Chart(runs_of_three(made, evaluations={0: 1.0}), "updates", 10))
    names = ["PPO, seed 42", "GRPO, seed 42", "TOY, seed 42"]
    for axes in figure.axes:
        drawn = [line(axes, name) for name in names]
        assert len({found.get_color() for found in drawn}) == 3
    widths = [line(figure.axes[1], name).get_linewidth() for name in names]
    assert widths == sorted(widths, reverse=True) and len(set(widths)) == 3, "learning rates lie on each other"
    marks = [line(figure.axes[2], f"{name}, held-out prompts").get_marker() for name in ("PPO", "GRPO", "TOY")]
    assert len(set(marks)) == 3 and len(legend(figure)) == 7
    assert figure.get_suptitle().startswith("PPO, GRPO and TOY, recipe demo\n")


def test_topics_of_five_algorithms_are_drawn_or_said_not_to_be(made):
    curves = {tag: np.arange(1.0, 4.0) for tag in (*TAGS, "topic/t/score", "topic/t/kl")}
    runs = read_runs([made(str(i), 3, curves) for i in range(5)])
    named = [of_algorithm(run, name) for run, name in zip(runs, ("ppo", "grpo", "a", "b", "c"), strict=True)]
    three, five = (draw(Chart(some, "updates", 1)).axes[4] for some in (named[:3], named))
    assert three.get_title() == "Score by topic (GRPO dashed, A dotted)"
    assert [found.get_linestyle() for found in three.lines] == ["-", "--", ":"]
    assert three.lines[0].get_label() == "topic t" and words(three) == ""
    assert len(five.lines) == 4 and words(five) == "C is not drawn: see the CSV table"


def test_phases_that_two_of_three_algorithms_share_are_named_after_both(made):
    phased = {"kl_schedule": "phased", "kl_target": ["4/sequence", "2/sequence"]}
    runs = read_runs([made("p", 8, **phased), made("g", 4, **phased), made("t", 8, **phased)])
    named = [of_algorithm(run, name) for run, name in zip(runs, ("ppo", "grpo", "toy"), strict=True)]
    labels = [found.get_label() for found in draw(Chart(named, "updates", 1)).axes[3].lines]
    target = "KL target 4, 2/sequence\n(band: 0.5 to 1.5 x)"
    assert [label for label in labels if target in label] == [f"PPO and TOY, {target}", f"GRPO, {target}"]


def test_score_against_kl_has_every_algorithm_and_names_a_run_without_evaluations(made):
    curves = {"eval/kl_divergence": [1.0, 2.0], "eval/score": [0.0, 1.0]}
    runs = runs_of_three(made, updates=2, curves=curves)
    axes = score_against_kl(runs).axes[0]
    ends = [line(axes, name) for name in ("PPO", "GRPO", "TOY")]
    assert len({end.get_marker() for end in ends}) == len({end.get_color() for end in ends}) == 3
    assert [text.get_text() for text in axes.texts] == ["42"] * 3
    [bare] = read_runs([made("bare", 2, {"loss": [1.0, 2.0]}, seed=7)])
    lacking = score_against_kl([*runs, of_algorithm(bare, "new")]).axes[0]
    assert words(lacking) == "no evaluation was logged by\nNEW, seed 7 | 42 | 42 | 42"


def test_algorithms_that_the_table_lacks_look_like_no_other():
    line_styles = line_styles_of([*ALGORITHMS, "a", "b"])
    assert (
        len({line_style.colour for line_style in line_styles.values()})
        == len({line_style.marker for line_style in line_styles.values()})
        == len(line_styles)
    )
    assert {name: line_style.colour for name, line_style in line_styles.items() if name in ALGORITHMS} == {
        name: row.colour for name, row in ALGORITHMS.items()
    }
    colours = colours_of(["start", *ALGORITHMS, "a", "ppo"])
    assert len(set(colours)) == len(colours)
