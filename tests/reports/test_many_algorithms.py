"""Tests figures of three or more algorithms, including unregistered ones: each is drawn or reported as not drawn."""

from __future__ import annotations

from dataclasses import replace

from rlhf.algorithms.table import ALGORITHMS
from rlhf.analysis.curves import read_runs
from rlhf.reports.curve_chart import Chart, title
from rlhf.reports.curve_plots import draw
from rlhf.reports.plot_style import COLOURS, group_styles, line_styles_of
from tests.reports.test_curve_plots import EVALUATION, legend, line


def with_algorithm(run, algorithm: str):
    """Return the curves of a run under another, possibly unregistered, algorithm."""
    return replace(run, run=replace(run.run, algorithm=algorithm), config=replace(run.config, algorithm=algorithm))


def runs_of_three(logged_run, **facts) -> list:
    """Return one run of PPO, one of GRPO and one of an unregistered algorithm."""
    runs = read_runs([logged_run(name, **facts) for name in ("p", "g", "t")])
    return [with_algorithm(run, name) for run, name in zip(runs, ("ppo", "grpo", "toy"), strict=True)]


def test_three_algorithms_are_drawn_and_labelled(logged_run):
    figure = draw(Chart(runs_of_three(logged_run, evaluations={0: 1.0}), "updates", 10))
    names = ["PPO, seed 42", "GRPO, seed 42", "TOY, seed 42"]
    for axes in figure.axes:
        drawn = [line(axes, name) for name in names]
        assert len({found.get_color() for found in drawn}) == 3
    widths = [line(figure.axes[-1], name).get_linewidth() for name in names]
    assert widths == sorted(widths, reverse=True) and len(set(widths)) == 3, "the learning rates overlap"
    markers = [found.get_marker() for found in figure.axes[0].lines if found.get_label() == EVALUATION]
    assert len(set(markers)) == 3 and len(legend(figure)) == 5
    assert figure.get_suptitle().startswith("PPO, GRPO and TOY, recipe demo\n")


def test_controls_are_named_in_legend_and_title(logged_run):
    """A long title has only the names of the algorithms and of the controls."""
    runs = [logged_run("g", algorithm="grpo"), logged_run("c", algorithm="grpo", control="shuffled")]
    figure = draw(Chart(read_runs(runs), "updates", 10))
    control = "GRPO control (scores shuffled)"
    assert [found.get_label() for found in figure.axes[-1].lines] == ["GRPO, seed 42", f"{control}, seed 42"]
    assert control in figure.get_suptitle()
    more = [logged_run(f"c{rate}", algorithm="grpo", control="shuffled", learning_rate=rate) for rate in (1e-5, 2e-5)]
    assert f"GRPO and {control}, 3 groups" in title(Chart(read_runs([runs[0], *more]), "updates", 10))


def test_any_number_of_algorithms_has_distinct_styles():
    names = [*ALGORITHMS, *"abcdefgh"]
    line_styles = line_styles_of(names)
    found = [line_styles[name] for name in names]
    for six in (found[:6], found[6:12]):
        assert len({style.colour for style in six}) == len({style.marker for style in six}) == 6
        assert len({style.line for style in six}) == 1
    assert len({(style.colour, style.line) for style in found}) == len(found)
    assert line_styles_of(ALGORITHMS) == {name: line_styles[name] for name in ALGORITHMS}
    groups = [(style.colour, style.line) for style in group_styles(["start", *names, "a", "ppo"])]
    assert len(set(groups)) == len(groups) and groups[0] == (COLOURS["start"], "-")
    assert len(group_styles([f"algorithm_{i}" for i in range(30)] * 2)) == 60, "styles are used again"


def test_groups_of_one_algorithm_have_distinct_styles():
    """The first group of an algorithm keeps its colour. After six colours, lines are dashed."""
    styles = group_styles(["ppo", "grpo", "ppo", "ppo", *["grpo"] * 20])
    assert len({(s.colour, s.line) for s in styles}) == 24
    assert styles[:2] == [*line_styles_of(["ppo", "grpo"]).values()]
    assert styles[1].colour not in {s.colour for s in styles[2:6]} and {s.line for s in styles[:6]} == {"-"}
    assert len({s.marker for s in styles[:6]}) == 6
    assert COLOURS["target"] not in {s.colour for s in styles}
    assert group_styles(["grpo", "ppo"]) == [line_styles_of([name])[name] for name in ("grpo", "ppo")]
