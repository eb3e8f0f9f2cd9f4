"""The four panels, looked at as data: where the lines stand, what the legend says. And the script end to end."""

from __future__ import annotations

import csv
import json
import math
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
from rlhf.reports.curve_chart import Chart
from rlhf.reports.curve_plots import draw, power_of_ten, shortened
from rlhf.reports.plot_style import colour_of
from tests.reports.conftest import TAGS

ROOT = Path(__file__).parents[2]
EVALUATION = "evaluation on held-out prompts"
TARGET = "KL target 3/sequence\n(band: 0.5 to 1.5 x)"


def panels(*runs: Path, x="updates", smooth=1) -> list:
    """The axes of a picture: loss, learning rate, reward, KL."""
    return draw(Chart(read_runs(runs), x, smooth)).axes


def line(axes, label: str):
    return next(found for found in axes.lines if found.get_label() == label)


def points(axes, label: str) -> list[tuple[float, float]]:
    return list(zip(*(np.asarray(part).tolist() for part in line(axes, label).get_data()), strict=True))


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def words(axes) -> str:
    return " | ".join(text.get_text() for text in axes.texts)


# one run


def test_one_run_raw_and_smoothed(made):
    loss, rate, reward, kl = panels(made("run", 4, {tag: [4.0, 2.0, 6.0, 1.0] for tag in TAGS}), smooth=2)
    for axes in (loss, reward, kl):
        assert points(axes, "each update") == [(1, 4), (2, 2), (3, 6), (4, 1)]
        assert points(axes, "mean of the last 2 updates") == [(1, 4), (2, 3), (3, 4), (4, 3.5)]
        assert line(axes, "each update").get_linewidth() < line(axes, "mean of the last 2 updates").get_linewidth()
    assert [found.get_ydata().tolist() for found in rate.lines] == [[4, 2, 6, 1]], "what is set needs no smoothing"


def test_each_panel_has_a_title_and_a_unit(made):
    axes = panels(made("run"))
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
def test_the_horizontal_axis(made, x, label, expected):
    """The demo recipe's update is 64 episodes; here it takes a minute."""
    axes = panels(made("run", 3, pace=60.0), x=x)
    assert axes[3].get_xlabel() == label
    assert all(a.lines[0].get_xdata().tolist() == expected for a in axes)


def test_topics_have_two_panels_of_their_own(made):
    """t0 in updates 1 to 5, t1 in 6 to 10, ...; a second algorithm is dashed; what is too much is in the table."""
    topics = {f"topic/t{i // 2}/{kind}": [math.nan] * 20 for i in range(20) for kind in ("score", "kl")}
    for i in range(20):
        for kind in ("score", "kl"):
            topics[f"topic/t{i // 2}/{kind}"][i] = float(i)
    several = {tag: np.arange(1.0, 21.0) for tag in TAGS} | topics
    runs = [made(name, curves=several, algorithm=name) for name in ("ppo", "grpo")]
    figure = draw(Chart(read_runs(runs), "updates", 1))
    score, kl = figure.axes[4:]
    assert [a.get_title() for a in (score, kl)] == ["Score by topic (GRPO dashed)", "KL by topic (GRPO dashed)"]
    assert [a.get_ylabel() for a in (score, kl)] == ["score", "nats/sequence"]
    lines = [line(score, f"topic t{i}") for i in range(8)]
    assert len(score.lines) == 16 and {found.get_linestyle() for found in lines} == {"-"}
    assert len({tuple(found.get_color()) for found in lines}) == 8
    assert [found.get_linestyle() for found in score.lines] == ["-", "--"] * 8
    assert "2 more topics: see the CSV table" in words(score)
    y = lines[3].get_ydata()
    assert y[np.isfinite(y)].tolist() == [6.0, 7.0]


def test_a_topics_line_is_broken_where_others_were_trained(made):
    run = made("run", 6, {**{tag: [1.0] * 6 for tag in TAGS}, "topic/t/score": [3.0, 4.0]})
    figure = draw(Chart(read_runs([run]), "updates", 1))
    assert points(figure.axes[4], "topic t") == [(1, 3), (2, 4)]
    gap = Curve(np.array([1, 2, 5, 6]), np.array([1.0, 2, 3, 4]), np.arange(4.0))
    found = read_runs([run])[0]
    found.scalars["topic/t/score"] = gap
    xs, ys = line(draw(Chart([found], "updates", 1)).axes[4], "topic t").get_data()
    assert np.isnan(ys).tolist() == [False, False, True, False, False] and np.nansum(xs) == 14


def test_evaluations_are_marks_with_their_own_entry(made):
    figure = draw(Chart(read_runs([made("run", evaluations={0: -1.0, 10: 0.5, 20: 0.75})]), "updates", 10))
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
def test_the_title_names_the_run_and_how_it_stands(made, status, expected, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    made("run", curves={"loss": [1.0] * 15}, status=status, seed=7)
    figure = draw(Chart(read_runs([Path("run")]), "updates", 10))
    assert figure.get_suptitle() == expected.format(run="run")


def test_a_long_name_loses_its_middle():
    assert shortened("a" * 50) == "a" * 50
    assert shortened("a" * 50 + "b" * 50) == "a" * 16 + "…" + "b" * 33


def test_ticks_of_the_learning_rate_can_be_typed():
    write = power_of_ten(3.15e-4)
    assert [write(v, 0) for v in (0.0, 5e-5, 1.5e-4, 3e-4)] == ["0", "0.5e-4", "1.5e-4", "3e-4"]


# the KL target


def test_the_target_and_its_band(made):
    kl = panels(made("run", 4))[3]
    assert points(kl, TARGET) == [(0, 3), (1, 3), (2, 3), (3, 3), (4, 3)]
    [band] = [c.get_paths()[0].vertices for c in kl.collections]
    assert (band[:, 1].min(), band[:, 1].max()) == (1.5, 4.5)


def test_phased_targets_per_token_are_steps(made):
    curves = {tag: np.full(6, 9.0) for tag in TAGS} | {"kl_divergence/token": np.full(6, 1 / 32)}
    phased = {"kl_schedule": "phased", "kl_target": ["0.05/token", "0.02/token", "0.01/token"]}
    kl = panels(made("run", 6, curves, **phased), x="episodes")[3]
    assert kl.get_ylabel() == "nats/token" and points(kl, "each update")[0] == (64, 1 / 32)
    target = line(kl, "KL target 0.05, 0.02, 0.01/token\n(band: 0.5 to 1.5 x)")
    assert target.get_drawstyle() == "steps-pre"  # a value holds from the update before up to its own
    assert target.get_xdata().tolist() == [64 * u for u in range(7)]
    assert target.get_ydata().tolist() == [0.05, 0.05, 0.05, 0.02, 0.02, 0.01, 0.01]


@pytest.mark.parametrize(("named", "shown"), [(["2/sequence"], ["KL target 2/sequence\n(beta fixed)"]), (None, [])])
def test_a_fixed_beta_has_no_band_and_no_target_that_nobody_named(made, named, shown):
    kl = panels(made("run", kl_schedule="fixed", kl_target=named))[3]
    assert [found.get_label() for found in kl.lines if "target" in found.get_label()] == shown
    assert not kl.collections
    assert kl.get_title().endswith("(beta fixed)") == (named is None)


# what is missing, or odd


def test_a_panel_says_that_its_scalar_was_not_logged(made):
    axes = panels(made("run", 3, {"loss": [1.0, 2.0, 3.0]}))
    assert words(axes[0]) == ""
    for panel, tag in zip(axes[1:], ("learning_rate", "rewards/mean", "kl_divergence"), strict=True):
        assert words(panel) == f"{tag}\nwas not logged" and not panel.lines


def test_values_that_are_not_finite_are_gaps(made):
    values = [1.0, math.nan, 3.0, math.inf, 5.0, 6.0]
    loss = panels(made("run", 6, {"loss": values}), smooth=2)[0]
    for label in ("each update", "mean of the last 2 updates"):
        assert np.isnan(line(loss, label).get_ydata()).tolist() == [False, True, False, True, False, False]
        assert line(loss, label).get_markevery() == [0, 2], "a value between gaps has no line: it is a dot"
    assert "no value of loss\nis finite" in words(panels(made("none", 2, {"loss": [math.nan] * 2}))[0])


def test_a_run_of_one_update_is_a_dot(made):
    assert all(axes.lines[0].get_marker() == "." for axes in panels(made("run", 1)))


def test_a_spike_does_not_flatten_the_loss(made):
    values = np.sin(np.arange(200.0))
    values[50] = 1000
    loss = panels(made("run", 200, {"loss": values}))[0]
    low, high = loss.get_ylim()
    assert -2 < low < -1 and 1 < high < 2
    assert words(loss) == "arrows: values up to 1e+03\nare outside the axis"
    assert [a.get_xdata().tolist() for a in loss.lines if a.get_marker() == "^"] == [[51, 51]]
    values[50] = 4
    calm = panels(made("calm", 200, {"loss": values}))[0]
    assert calm.get_ylim()[1] > 4 and words(calm) == ""


def test_drawing_many_points_stays_quick(made, tmp_path):
    many = {tag: np.random.default_rng(0).standard_normal(12_000) for tag in TAGS}
    chart = Chart(read_runs([made("run", 12_000, many)]), "updates", 50)
    began = time.process_time()
    figure = draw(chart)
    figure.savefig(tmp_path / "many.png")
    assert len(figure.axes[0].lines[0].get_xdata()) == 12_000
    assert time.process_time() - began < 10, "seconds of computing; it takes about 1"


# several runs


def test_a_group_is_a_mean_and_a_band_up_to_its_shortest_run(made):
    runs = [
        made("a", 4, {"loss": [1.0, 2, 3, 4]}, seed=1),
        made("b", 4, {"loss": [3.0, 2, 5, 4]}, seed=2),
        made("c", 3, {"loss": [5.0, 2, 1]}, seed=3),
    ]
    loss = panels(*runs)[0]
    assert points(loss, "PPO, mean of 3 seeds") == [(1, 3), (2, 2), (3, 3)]
    vertices = {tuple(v) for v in loss.collections[0].get_paths()[0].vertices.tolist()}
    assert vertices == {(1, 1), (1, 5), (2, 2), (3, 1), (3, 5)}


def test_ppo_and_grpo_have_their_colours_and_names(made):
    runs = [made(f"{a}{s}", algorithm=a, seed=s, evaluations={0: s}) for a in ("grpo", "ppo") for s in (1, 2)]
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


def test_over_time_the_script_tells_of_runs_that_took_longer(made, tmp_path, capsys):
    runs = [made("a", 100, seed=1), made("b", 100, seed=2, pace=2.0)]
    output = [run_script(capsys, *runs, "--x", x, "--output", tmp_path / "plot") for x in ("updates", "time")]
    assert "differ" not in output[0] and "the PPO runs differ in length, 1:40 to 3:20: their mean ends" in output[1]


def test_one_run_of_each_is_a_line_of_its_own(made):
    loss = panels(made("p", seed=1), made("g", algorithm="grpo", seed=2, status="running"))[0]
    assert [found.get_label() for found in loss.lines] == ["PPO, seed 1", "GRPO, seed 2"] and not loss.collections
    assert loss.figure.get_suptitle().startswith("PPO and GRPO, recipe demo, 1 of 2 runs running\n")


def test_the_same_seed_twice_is_not_two_seeds(made):
    assert panels(made("a"), made("b"))[0].lines[0].get_label() == "PPO, mean of 2 runs"


def test_seeds_over_time_are_compared_at_the_same_time(made):
    """One run takes a second an update, one takes two: after 4 s they have come to updates 4 and 2."""
    runs = [made("a", 10, pace=1.0), made("b", 10, pace=2.0)]
    found = dict(points(panels(*runs, x="time")[0], "PPO, mean of 2 runs"))
    assert found[4] == 3 and min(found) == 2 and max(found) == 10


def test_phases_of_ppo_and_grpo_that_differ_in_place_are_two_lines(made):
    phased = {"kl_schedule": "phased", "kl_target": ["4/sequence", "2/sequence"]}
    runs = [made("p", 8, **phased), made("g", 4, algorithm="grpo", **phased)]
    kl = panels(*runs)[3]
    label = "{}, KL target 4, 2/sequence\n(band: 0.5 to 1.5 x)"
    assert [y for _, y in points(kl, label.format("PPO"))] == [4, 4, 4, 4, 4, 2, 2, 2, 2]
    assert [y for _, y in points(kl, label.format("GRPO"))] == [4, 4, 4, 2, 2]
    same = panels(made("p2", 8, **phased), made("g2", 8, algorithm="grpo", **phased))[3]
    assert len([found for found in same.lines if "target" in found.get_label()]) == 1


def test_a_target_that_serves_all_reaches_to_the_end_of_the_longest(made):
    kl = panels(made("a", 5, pace=10.0), made("b", 8, algorithm="grpo"), x="time")[3]
    assert points(kl, TARGET)[-1] == (50, 3)


def test_a_run_of_a_group_that_lacks_a_scalar_is_told(made):
    loss = panels(made("a"), made("b", 3, {"learning_rate": [1.0] * 3}))[0]
    assert words(loss) == "loss\nwas not logged\nby 1 of 2 PPO runs"


# the script


def run_script(capsys, *argv: object) -> str:
    main([str(word) for word in argv])
    return capsys.readouterr().out


def test_the_script_end_to_end(made, tmp_path, monkeypatch, capsys):
    """No run named: the one that was started last. Two files, a picture that can be put on a page."""
    monkeypatch.chdir(tmp_path)
    for name, hour in (("old", 1), ("new", 2)):
        facts = made(name) / "run.json"
        facts.write_text(json.dumps({**json.loads(facts.read_text()), "started": f"2026-01-01T0{hour}:00:00"}))
    output = run_script(capsys)
    assert "new  20 of 20 updates, loss 15.5" in output and "old" not in output
    assert "wrote training_progress.png (four panels over updates) and training_progress.csv (21 rows)" in output
    height, width, _ = imread("training_progress.png").shape
    assert width >= 1200 and height >= 1000
    with open("training_progress.csv", newline="", encoding="utf-8") as file:
        assert [row["loss"] for row in csv.DictReader(file)] == ["", *(f"{u}.0" for u in range(1, 21))]


@pytest.mark.parametrize("x", ["updates", "episodes", "time"])
def test_the_script_on_six_runs(made, tmp_path, capsys, x):
    runs = [made(f"{a}{s}", algorithm=a, seed=s, evaluations={0: 0.0}) for a in ("ppo", "grpo") for s in (1, 2, 3)]
    output = run_script(capsys, *runs, "--x", x, "--smooth", 3, "--output", tmp_path / "plot.png")
    assert output.count("20 of 20 updates, loss 19, learning_rate 20, rewards/mean 19, kl_divergence 19") == 6
    assert "differ" not in output
    assert (tmp_path / "plot.png").is_file() and (tmp_path / "plot.csv").is_file()


def test_the_script_says_what_is_unlike(made, tmp_path, capsys):
    runs = [
        made("a", 20), made("b", 15, kl_target=["2/sequence"], seed=2),
        made("c", 20, algorithm="grpo", recipe="phased-kl"),
    ]  # fmt: skip
    output = run_script(capsys, *runs, "--output", tmp_path / "plot")
    assert "the runs use different recipes: demo, phased-kl\n" in output
    assert "the runs have different KL targets: " in output and "2/sequence, 3/sequence; none is drawn; " in output
    assert "the KL is shown in nats per sequence\n" in output
    assert "the PPO runs differ in length, 15 to 20 updates: their mean ends with the shortest, and the" in output
    assert "GRPO runs differ" not in output
    kl = panels(*runs)[3]
    assert kl.get_ylabel() == "nats/sequence" and not any("target" in f.get_label() for f in kl.lines)


def test_the_script_says_what_is_torn_and_what_is_not_finite(made, tmp_path, capsys):
    run = made("run", 4, {"loss": [1.0, math.nan, 3.0, 4.0]}, status="running")
    [file] = (run / "logs").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    output = run_script(capsys, run, "--output", tmp_path / "plot")
    assert output.count("the last record is incomplete (still being written, or the file is cut off)") == 1
    assert output.count("values that are not finite (loss 1 of 3) are gaps in the plot") == 1
    assert "3 of 4 updates (running)" in output and "rewards/mean not logged" in output


def test_the_script_does_without_torch(made, tmp_path):
    run = made("run")
    code = "import sys, plot_training_progress as p; p.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, str(run), "--output", str(tmp_path / "plot")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("argument", ["--help", "--smoth"])
def test_help_and_mistakes_wait_for_nothing(argument):
    code = "import sys, runpy\ntry: runpy.run_path('plot_training_progress.py', run_name='__main__')\n"
    code += "except SystemExit: pass\nassert not {'torch', 'matplotlib', 'tensorboard'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, argument], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_recipes_episodes_per_update_are_as_these_tests_take_them():
    assert [make_config("demo", a).episodes_per_update for a in ("ppo", "grpo")] == [64, 64]
