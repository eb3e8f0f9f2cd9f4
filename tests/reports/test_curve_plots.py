"""Tests the data, labels and legends of the plotted panels, and plot_training_progress.py end to end."""

from __future__ import annotations

import csv
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.image import imread

from plot_training_progress import main
from rlhf.analysis.curves import Curve, read_runs
from rlhf.config import make_config
from rlhf.reports.curve_chart import Chart, shortened
from rlhf.reports.curve_plots import draw, power_of_ten
from rlhf.reports.plot_style import colour_of
from rlhf.utils.errors import UserError
from tests.reports.conftest import TAGS

ROOT = Path(__file__).parents[2]
EVALUATION = "evaluation on held-out prompts"
TARGET = "KL target 3/sequence\n(band: 0.5 to 1.5 x)"


def panels(*runs: Path, x="updates", smooth=1) -> list:
    """Returns the axes of a figure: loss, learning rate, reward, KL."""
    return draw(Chart(read_runs(runs), x, smooth)).axes


def line(axes, label: str):
    return next(found for found in axes.lines if found.get_label() == label)


def points(axes, label: str) -> list[tuple[float, float]]:
    return list(zip(*(np.asarray(part).tolist() for part in line(axes, label).get_data()), strict=True))


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def panel_text(axes) -> str:
    return " | ".join(text.get_text() for text in axes.texts)


# one run


def test_one_run_has_raw_and_smoothed_lines(logged_run):
    loss, rate, reward, kl = panels(logged_run("run", 4, {tag: [4.0, 2.0, 6.0, 1.0] for tag in TAGS}), smooth=2)
    for axes in (loss, reward, kl):
        assert points(axes, "each update") == [(1, 4), (2, 2), (3, 6), (4, 1)]
        assert points(axes, "mean of the last 2 updates") == [(1, 4), (2, 3), (3, 4), (4, 3.5)]
        assert line(axes, "each update").get_linewidth() < line(axes, "mean of the last 2 updates").get_linewidth()
    assert [found.get_ydata().tolist() for found in rate.lines] == [[4, 2, 6, 1]], "the learning rate is not smoothed"


def test_each_panel_has_a_title_and_a_unit(logged_run):
    axes = panels(logged_run("run"))
    assert [a.get_title() for a in axes] == [
        "Loss", "Learning rate", "Mean reward", "KL to the start model",
    ]  # fmt: skip
    assert [a.get_ylabel() for a in axes] == ["", "", "score", "nats/sequence"]
    assert [a.get_xlabel() for a in axes[2:]] == ["updates", "updates"]


@pytest.mark.parametrize(
    ("x", "label", "expected"),
    [("updates", "updates", [1, 2, 3]), ("episodes", "episodes", [64, 128, 192]),
     ("time", "training time (minutes)", [1, 2, 3])],
)  # fmt: skip
def test_horizontal_axis_shows_the_chosen_unit(logged_run, x, label, expected):
    """An update of the demo recipe is 64 episodes. Here it takes a minute."""
    axes = panels(logged_run("run", 3, pace=60.0), x=x)
    assert axes[3].get_xlabel() == label
    assert all(a.lines[0].get_xdata().tolist() == expected for a in axes)


def test_topics_have_two_separate_panels(logged_run):
    """Ten topics with two updates each. The second algorithm is dashed, and only the first eight topics are drawn."""
    topics = {f"topic/t{i // 2}/{kind}": [math.nan] * 20 for i in range(20) for kind in ("score", "kl")}
    for i in range(20):
        for kind in ("score", "kl"):
            topics[f"topic/t{i // 2}/{kind}"][i] = float(i)
    several = {tag: np.arange(1.0, 21.0) for tag in TAGS} | topics
    runs = [logged_run(name, curves=several, algorithm=name) for name in ("ppo", "grpo")]
    figure = draw(Chart(read_runs(runs), "updates", 1))
    score, kl = figure.axes[4:]
    assert [a.get_title() for a in (score, kl)] == ["Score by topic (GRPO dashed)", "KL by topic (GRPO dashed)"]
    assert [a.get_ylabel() for a in (score, kl)] == ["score", "nats/sequence"]
    lines = [line(score, f"topic t{i}") for i in range(8)]
    assert len(score.lines) == 16 and {found.get_linestyle() for found in lines} == {"-"}
    assert len({tuple(found.get_color()) for found in lines}) == 8
    assert [found.get_linestyle() for found in score.lines] == ["-", "--"] * 8
    assert "2 more topics: see the CSV table" in panel_text(score)
    y = lines[3].get_ydata()
    assert y[np.isfinite(y)].tolist() == [6.0, 7.0]


def test_topic_line_has_a_gap_while_other_topics_are_trained(logged_run):
    run = logged_run("run", 6, {**{tag: [1.0] * 6 for tag in TAGS}, "topic/t/score": [3.0, 4.0]})
    figure = draw(Chart(read_runs([run]), "updates", 1))
    assert points(figure.axes[4], "topic t") == [(1, 3), (2, 4)]
    gap = Curve(np.array([1, 2, 5, 6]), np.array([1.0, 2, 3, 4]), np.arange(4.0))
    found = read_runs([run])[0]
    found.scalars["topic/t/score"] = gap
    xs, ys = line(draw(Chart([found], "updates", 1)).axes[4], "topic t").get_data()
    assert np.isnan(ys).tolist() == [False, False, True, False, False] and np.nansum(xs) == 14


def test_evaluations_are_markers_with_a_legend_entry(logged_run):
    figure = draw(Chart(read_runs([logged_run("run", evaluations={0: -1.0, 10: 0.5, 20: 0.75})]), "updates", 10))
    reward = figure.axes[2]
    assert points(reward, EVALUATION) == [(0, -1), (10, 0.5), (20, 0.75)]
    assert line(reward, EVALUATION).get_linestyle() == "None" and line(reward, EVALUATION).get_marker() == "o"
    assert legend(figure) == [
        "each update", "mean of the last 10 updates", EVALUATION, TARGET,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "expected"),
    [("finished", "PPO, recipe demo, seed 7\n{run}: 20 updates"),
     ("running", "PPO, recipe demo, seed 7\n{run}: running, 15 of 20 updates"),
     ("failed", "PPO, recipe demo, seed 7\n{run}: failed, 15 of 20 updates")],
)  # fmt: skip
def test_title_shows_the_run_and_its_status(logged_run, status, expected, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    logged_run("run", curves={"loss": [1.0] * 15}, status=status, seed=7)
    figure = draw(Chart(read_runs([Path("run")]), "updates", 10))
    assert figure.get_suptitle() == expected.format(run="run")


def test_long_name_is_shortened_in_the_middle():
    assert shortened("a" * 50) == "a" * 50
    assert shortened("a" * 50 + "b" * 50) == "a" * 16 + "…" + "b" * 33


def test_learning_rate_ticks_use_exponent_notation():
    write = power_of_ten(3.15e-4)
    assert [write(v, 0) for v in (0.0, 5e-5, 1.5e-4, 3e-4)] == ["0", "0.5e-4", "1.5e-4", "3e-4"]


# the KL target


def test_kl_target_has_a_band(logged_run):
    kl = panels(logged_run("run", 4))[3]
    assert points(kl, TARGET) == [(0, 3), (1, 3), (2, 3), (3, 3), (4, 3)]
    [band] = [c.get_paths()[0].vertices for c in kl.collections]
    assert (band[:, 1].min(), band[:, 1].max()) == (1.5, 4.5)


def test_phased_targets_per_token_are_drawn_as_steps(logged_run):
    curves = {tag: np.full(6, 9.0) for tag in TAGS} | {"kl_divergence/token": np.full(6, 1 / 32)}
    phased = {"kl_schedule": "phased", "kl_target": ["0.05/token", "0.02/token", "0.01/token"]}
    kl = panels(logged_run("run", 6, curves, **phased), x="episodes")[3]
    assert kl.get_ylabel() == "nats/token" and points(kl, "each update")[0] == (64, 1 / 32)
    target = line(kl, "KL target 0.05, 0.02, 0.01/token\n(band: 0.5 to 1.5 x)")
    assert target.get_drawstyle() == "steps-pre"  # a value holds from the previous update up to its own update
    assert target.get_xdata().tolist() == [64 * u for u in range(7)]
    assert target.get_ydata().tolist() == [0.05, 0.05, 0.05, 0.02, 0.02, 0.01, 0.01]


@pytest.mark.parametrize(
    ("target", "expected"), [(["2/sequence"], ["KL target 2/sequence\n(beta fixed)"]), (None, [])]
)
def test_fixed_beta_has_no_band_and_only_an_explicit_target(logged_run, tmp_path, target, expected):
    recipe = tmp_path / "fixed.yaml"  # in a file, a target without an effect is accepted
    recipe.write_text(f"kind: recipe\nkl_schedule: fixed\nkl_target: {'none' if target is None else target[0]}\n")
    kl = panels(logged_run("run", recipe=str(recipe)))[3]
    assert [found.get_label() for found in kl.lines if "target" in found.get_label()] == expected
    assert not kl.collections
    assert kl.get_title().endswith("(beta fixed)") == (target is None)


# missing and unusual values


def test_panel_reports_a_scalar_that_was_not_logged(logged_run):
    axes = panels(logged_run("run", 3, {"loss": [1.0, 2.0, 3.0]}))
    assert panel_text(axes[0]) == ""
    for panel, tag in zip(axes[1:], ("learning_rate", "rewards/mean", "kl_divergence"), strict=True):
        assert panel_text(panel) == f"{tag}\nwas not logged" and not panel.lines


def test_non_finite_values_are_gaps(logged_run):
    values = [1.0, math.nan, 3.0, math.inf, 5.0, 6.0]
    loss = panels(logged_run("run", 6, {"loss": values}), smooth=2)[0]
    for label in ("each update", "mean of the last 2 updates"):
        assert np.isnan(line(loss, label).get_ydata()).tolist() == [False, True, False, True, False, False]
        assert line(loss, label).get_markevery() == [0, 2], "a single value between gaps is drawn as a dot"
    assert "no value of loss\nis finite" in panel_text(panels(logged_run("none", 2, {"loss": [math.nan] * 2}))[0])


def test_run_with_one_update_is_a_dot(logged_run):
    assert all(axes.lines[0].get_marker() == "." for axes in panels(logged_run("run", 1)))


def test_spike_does_not_set_the_range_of_the_loss_axis(logged_run):
    values = np.sin(np.arange(200.0))
    values[50] = 1000
    loss = panels(logged_run("run", 200, {"loss": values}))[0]
    low, high = loss.get_ylim()
    assert -2 < low < -1 and 1 < high < 2
    assert panel_text(loss) == "arrows: values up to 1e+03\nare outside the axis"
    assert [a.get_xdata().tolist() for a in loss.lines if a.get_marker() == "^"] == [[51, 51]]
    values[50] = 4
    small_spike = panels(logged_run("small_spike", 200, {"loss": values}))[0]
    assert small_spike.get_ylim()[1] > 4 and panel_text(small_spike) == ""


def test_drawing_many_points_is_fast(logged_run, tmp_path):
    many = {tag: np.random.default_rng(0).standard_normal(12_000) for tag in TAGS}
    chart = Chart(read_runs([logged_run("run", 12_000, many)]), "updates", 50)
    started = time.process_time()
    figure = draw(chart)
    figure.savefig(tmp_path / "many.png")
    assert len(figure.axes[0].lines[0].get_xdata()) == 12_000
    assert time.process_time() - started < 10, "CPU seconds; usually about 1"


# several runs


def test_group_has_a_mean_and_a_band_up_to_its_shortest_run(logged_run):
    runs = [
        logged_run("a", 4, {"loss": [1.0, 2, 3, 4]}, seed=1),
        logged_run("b", 4, {"loss": [3.0, 2, 5, 4]}, seed=2),
        logged_run("c", 3, {"loss": [5.0, 2, 1]}, seed=3),
    ]
    loss = panels(*runs)[0]
    assert points(loss, "PPO, mean of 3 seeds") == [(1, 3), (2, 2), (3, 3)]
    vertices = {tuple(v) for v in loss.collections[0].get_paths()[0].vertices.tolist()}
    assert vertices == {(1, 1), (1, 5), (2, 2), (3, 1), (3, 5)}


def test_ppo_and_grpo_have_separate_colours_and_names(logged_run):
    runs = [logged_run(f"{a}{s}", algorithm=a, seed=s, evaluations={0: s}) for a in ("grpo", "ppo") for s in (1, 2)]
    figure = draw(Chart(read_runs(runs), "updates", 10))
    names = {a: f"{a.upper()}, mean of 2 seeds" for a in ("ppo", "grpo")}
    for axes in figure.axes:
        assert {a: line(axes, n).get_color() for a, n in names.items()} == {a: colour_of(a) for a in names}
        assert {tuple(c.get_facecolor()[0]) for c in axes.collections} >= {to_rgba(colour_of(a), 0.2) for a in names}
    assert points(figure.axes[2], "GRPO, held-out prompts") == [(0, 1.5)]
    assert legend(figure) == [
        names["ppo"], "PPO, held-out prompts", names["grpo"], "GRPO, held-out prompts", TARGET,
    ]  # fmt: skip
    lines = "lines: mean of the last 10 updates; bands: lowest to highest run"
    assert figure.get_suptitle() == f"PPO and GRPO, recipe demo\n{lines}"
    assert "not comparable" in figure.axes[0].get_title()


def test_script_reports_unequal_durations_only_over_time(logged_run, tmp_path, capsys):
    runs = [logged_run("a", 100, seed=1), logged_run("b", 100, seed=2, pace=2.0)]
    output = [run_script(capsys, *runs, "--x", x, "--output", tmp_path / "plot") for x in ("updates", "time")]
    assert "differ" not in output[0] and "the PPO runs differ in length, 1:40 to 3:20: their mean ends" in output[1]


def test_one_run_per_algorithm_is_a_line_without_a_band(logged_run):
    loss = panels(logged_run("p", seed=1), logged_run("g", algorithm="grpo", seed=2, status="running"))[0]
    assert [found.get_label() for found in loss.lines] == ["PPO, seed 1", "GRPO, seed 2"] and not loss.collections
    assert loss.figure.get_suptitle().startswith("PPO and GRPO, recipe demo, 1 of 2 runs running\n")


def test_label_counts_runs_instead_of_seeds_if_a_seed_is_repeated(logged_run):
    assert panels(logged_run("a"), logged_run("b"))[0].lines[0].get_label() == "PPO, mean of 2 runs"


def test_mean_over_time_uses_values_at_the_same_time(logged_run):
    """One run takes 1 s per update, the other 2 s. After 4 s they have finished updates 4 and 2."""
    runs = [logged_run("a", 10, pace=1.0), logged_run("b", 10, pace=2.0)]
    found = dict(points(panels(*runs, x="time")[0], "PPO, mean of 2 runs"))
    assert found[4] == 3 and min(found) == 2 and max(found) == 10


def test_phased_targets_with_different_phase_ends_are_two_lines(logged_run):
    phased = {"kl_schedule": "phased", "kl_target": ["4/sequence", "2/sequence"]}
    runs = [logged_run("p", 8, **phased), logged_run("g", 4, algorithm="grpo", **phased)]
    kl = panels(*runs)[3]
    label = "{}, KL target 4, 2/sequence\n(band: 0.5 to 1.5 x)"
    assert [y for _, y in points(kl, label.format("PPO"))] == [4, 4, 4, 4, 4, 2, 2, 2, 2]
    assert [y for _, y in points(kl, label.format("GRPO"))] == [4, 4, 4, 2, 2]
    same = panels(logged_run("p2", 8, **phased), logged_run("g2", 8, algorithm="grpo", **phased))[3]
    assert len([found for found in same.lines if "target" in found.get_label()]) == 1


def test_shared_target_is_drawn_to_the_end_of_the_longest_run(logged_run):
    kl = panels(logged_run("a", 5, pace=10.0), logged_run("b", 8, algorithm="grpo"), x="time")[3]
    assert points(kl, TARGET)[-1] == (50, 3)


def test_panel_reports_runs_of_a_group_without_the_scalar(logged_run):
    loss = panels(logged_run("a"), logged_run("b", 3, {"learning_rate": [1.0] * 3}))[0]
    assert panel_text(loss) == "loss\nwas not logged\nby 1 of 2 PPO runs"


# groups with different settings


def test_settings_of_one_algorithm_are_separate_lines_with_their_names(logged_run):
    """Two seeds with one learning rate, and two KL targets with another one."""
    high = {"learning_rate": 1e-2}
    runs = [
        logged_run("a", seed=1, evaluations={0: 1.0}), logged_run("b", seed=2, evaluations={0: 3.0}),
        logged_run("c", **high), logged_run("d", kl_target=["6/sequence"], **high),
    ]  # fmt: skip
    figure = draw(Chart(read_runs(runs), "updates", 1))
    names = [
        f"PPO kl_target {target}/sequence, learning_rate {rate}, {of}"
        for target, rate, of in ((3, "0.0003", "mean of 2 seeds"), (3, "0.01", "seed 42"), (6, "0.01", "seed 42"))
    ]
    lines = [line(figure.axes[0], name) for name in names]
    assert len({found.get_color() for found in lines}) == 3 and lines[0].get_color() == colour_of("ppo")
    assert figure.axes[0].get_title() == "Loss", "one algorithm's losses can be compared"
    targets = [found for found in figure.axes[3].lines if found.get_linestyle() == ":"]
    assert [(t.get_color(), t.get_ydata()[0]) for t in targets] == [
        (found.get_color(), nats) for found, nats in zip(lines, (3, 3, 6), strict=True)
    ]
    assert "dotted: KL target of a group" in legend(figure) and set(names) < set(legend(figure))


def test_labels_are_the_names_in_legend_table_and_output(logged_run, tmp_path, capsys):
    runs = [logged_run("a", algorithm="grpo"), logged_run("b", learning_rate=1e-2)]
    output = run_script(capsys, *runs, "--label", "new, K 4", "old", "--output", tmp_path / "plot")
    assert f"new, K 4  {runs[0]}\n" in output and f"old       {runs[1]}\n" in output
    with (tmp_path / "plot.csv").open(newline="", encoding="utf-8") as file:
        assert {row["run"]: row["group"] for row in csv.DictReader(file)} == {
            str(runs[0]): "new, K 4", str(runs[1]): "old",
        }  # fmt: skip
    with pytest.raises(UserError, match=r"3 label\(s\) for 2 group\(s\) of runs: --label x y z\. .*GRPO .*; PPO "):
        run_script(capsys, *runs, "--label", "x", "y", "z")


def test_nine_groups_have_distinct_lines_and_one_legend_entry_each(logged_run):
    runs = [logged_run(str(i), learning_rate=1e-4 * i, evaluations={0: 1.0}) for i in range(1, 10)]
    figure = draw(Chart(read_runs(runs), "updates", 1))
    drawn = [found for found in figure.axes[0].lines if "learning_rate" in found.get_label()]
    assert len({(found.get_color(), found.get_linestyle()) for found in drawn}) == len(drawn) == 9
    assert max(found.get_linewidth() for found in drawn) < 7
    assert len(legend(figure)) == 9 + 2, "the evaluations and the target have one entry each"
    assert figure.get_suptitle().startswith("PPO, 9 groups, recipe demo\n")


# the script


def run_script(capsys, *argv: object) -> str:
    main([str(word) for word in argv])
    return capsys.readouterr().out


def test_script_without_arguments_plots_the_latest_run(logged_run, tmp_path, monkeypatch, capsys):
    """Without arguments, the script plots the run that started last. It writes a PNG and a CSV file."""
    monkeypatch.chdir(tmp_path)
    for name, hour in (("old", 1), ("new", 2)):
        facts = logged_run(name) / "run.json"
        facts.write_text(json.dumps({**json.loads(facts.read_text()), "started": f"2026-01-01T0{hour}:00:00"}))
    output = run_script(capsys)
    assert "new  20 of 20 updates, loss 15.5" in output and "old" not in output
    assert "wrote training_progress.png (four panels over updates) and training_progress.csv (21 rows)" in output
    height, width, _ = imread("training_progress.png").shape
    assert width >= 1200 and height >= 1000
    with open("training_progress.csv", newline="", encoding="utf-8") as file:
        assert [row["loss"] for row in csv.DictReader(file)] == ["", *(f"{u}.0" for u in range(1, 21))]


@pytest.mark.parametrize("x", ["updates", "episodes", "time"])
def test_script_plots_six_runs(logged_run, tmp_path, capsys, x):
    runs = [
        logged_run(f"{a}{s}", algorithm=a, seed=s, evaluations={0: 0.0}) for a in ("ppo", "grpo") for s in (1, 2, 3)
    ]
    output = run_script(capsys, *runs, "--x", x, "--smooth", 3, "--output", tmp_path / "plot.png")
    assert output.count("20 of 20 updates, loss 19, learning_rate 20, rewards/mean 19, kl_divergence 19") == 6
    assert "differ" not in output
    assert (tmp_path / "plot.png").is_file() and (tmp_path / "plot.csv").is_file()


def test_script_reports_differences_between_runs(logged_run, tmp_path, capsys):
    runs = [
        logged_run("a", 20), logged_run("b", 15, seed=2), logged_run("c", 20, algorithm="grpo", recipe="phased-kl"),
    ]  # fmt: skip
    output = run_script(capsys, *runs, "--output", tmp_path / "plot")
    assert "the runs use different recipes: demo, phased-kl\n" in output
    assert "the runs have different KL targets: " in output and ", 3/sequence; none is drawn; " in output
    assert "the KL is shown in nats per sequence\n" in output
    assert re.search(
        "the PPO .* runs differ in length, 15 to 20 updates: their mean ends with the shortest, and", output
    )
    assert "GRPO runs differ" not in output
    kl = panels(*runs)[3]
    assert kl.get_ylabel() == "nats/sequence" and not any("target" in f.get_label() for f in kl.lines)


def test_script_reports_incomplete_files_and_non_finite_values(logged_run, tmp_path, capsys):
    run = logged_run("run", 4, {"loss": [1.0, math.nan, 3.0, 4.0]}, status="running")
    [file] = (run / "logs").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    output = run_script(capsys, run, "--output", tmp_path / "plot")
    assert output.count("the last record is incomplete (still being written, or the file is cut off)") == 1
    assert output.count("values that are not finite (loss 1 of 3) are gaps in the plot") == 1
    assert "3 of 4 updates (running)" in output and "rewards/mean not logged" in output


def test_script_does_not_import_torch(logged_run, tmp_path):
    run = logged_run("run")
    code = "import sys, plot_training_progress as p; p.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, str(run), "--output", str(tmp_path / "plot")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("argument", ["--help", "--smoth"])
def test_help_and_invalid_flags_import_no_slow_packages(argument):
    code = "import sys, runpy\ntry: runpy.run_path('plot_training_progress.py', run_name='__main__')\n"
    code += "except SystemExit: pass\nassert not {'torch', 'matplotlib', 'tensorboard'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, argument], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_demo_recipe_has_64_episodes_per_update():
    assert [make_config("demo", a).episodes_per_update for a in ("ppo", "grpo")] == [64, 64]
