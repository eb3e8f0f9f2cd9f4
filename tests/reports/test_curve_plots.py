"""Tests the data, labels and legends of the plotted panels, and plot_training_progress.py end to end."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.image import imread

from plot_training_progress import main
from rlhf.analysis.curves import read_runs
from rlhf.checkpoints.run_folder import RunLock
from rlhf.reports.curve_chart import Chart
from rlhf.reports.curve_plots import draw
from rlhf.reports.plot_style import line_styles_of
from tests.reports.conftest import TAGS

ROOT = Path(__file__).parents[2]
EVALUATION = "evaluation on held-out prompts"
TARGET = "KL target 3/sequence (band: 0.5 to 1.5 x)"


def panels(*runs: Path, x="updates", smooth=1) -> list:
    """Return the axes of a figure: those of the last row, loss and learning rate, then reward, others, KL."""
    *rows, loss, rate = draw(Chart(read_runs(runs), x, smooth)).axes
    return [loss, rate, *rows]


def line(axes, label: str):
    return next(found for found in axes.lines if found.get_label() == label)


def points(axes, label: str) -> list[tuple[float, float]]:
    return list(zip(*(np.asarray(part).tolist() for part in line(axes, label).get_data()), strict=True))


def colour_of(algorithm: str) -> str:
    return line_styles_of([algorithm])[algorithm].colour


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


# one run


def test_one_run_has_raw_and_smoothed_lines(logged_run):
    loss, rate, reward, kl = panels(logged_run("run", 4, {tag: [4.0, 2.0, 6.0, 1.0] for tag in TAGS}), smooth=2)
    for axes in (loss, reward, kl):
        assert points(axes, "each update") == [(1, 4), (2, 2), (3, 6), (4, 1)]
        assert points(axes, "mean of the last 2 updates") == [(1, 4), (2, 3), (3, 4), (4, 3.5)]
        assert line(axes, "each update").get_linewidth() < line(axes, "mean of the last 2 updates").get_linewidth()
    assert [found.get_ydata().tolist() for found in rate.lines] == [[4, 2, 6, 1]], "the learning rate is not smoothed"


@pytest.mark.parametrize(
    ("x", "label", "expected"),
    [("updates", "updates", [1, 2, 3]), ("episodes", "episodes", [64, 128, 192]),
     ("time", "training time (minutes)", [1, 2, 3])],
)  # fmt: skip
def test_horizontal_axis_shows_the_chosen_unit(logged_run, x, label, expected):
    """An update of the demo recipe is 64 episodes. Here it takes a minute."""
    axes = panels(logged_run("run", 3, pace=60.0), x=x)
    assert [panel.get_xlabel() for panel in axes] == [label, label, "", ""]
    assert all(a.lines[0].get_xdata().tolist() == expected for a in axes)


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
    target = line(kl, "KL target 0.05, 0.02, 0.01/token (band: 0.5 to 1.5 x)")
    assert target.get_drawstyle() == "steps-pre"  # a value holds from the previous update up to its own update
    assert target.get_xdata().tolist() == [64 * u for u in range(7)]
    assert target.get_ydata().tolist() == [0.05, 0.05, 0.05, 0.02, 0.02, 0.01, 0.01]


# missing and unusual values


def test_panel_reports_runs_that_did_not_log_its_scalar(logged_run):
    runs = [logged_run("a", 3, {"loss": [1.0, 2.0, 3.0]}), logged_run("b", 3, algorithm="grpo")]
    one = panels(runs[0])
    two = panels(*runs)
    assert [axes.get_title() for axes in one] == [
        "Loss", *(f"{name}\nnot logged by PPO" for name in ("Learning rate", "Mean reward", "KL to the start model")),
    ]  # fmt: skip
    assert [len(axes.lines) for axes in one] == [1, 0, 0, 0]
    assert two[2].get_title() == "Mean reward\nnot logged by PPO" and len(two[2].lines) == 1


def test_mean_rewards_of_different_functions_have_different_panels(logged_run):
    """Equal weights are equal rewards, however they were given."""
    other = {"rm_model": None, "reward_func": ["length_penalty"]}
    runs = [
        logged_run("a", 3), logged_run("b", 3, learning_rate=1e-6, reward_weights=[1.0]),
        logged_run("c", 3, evaluations={0: 1.0, 3: 2.0}, algorithm="grpo", **other),
    ]  # fmt: skip
    first, second, kl = panels(*runs)[2:]
    assert first.get_title().startswith("Mean reward, PPO ") and second.get_title() == "Mean reward, GRPO"
    assert [len(axes.lines) for axes in (first, second)] == [2, 2], "two groups; one group with evaluations"
    assert len([found for found in kl.lines if ", seed " in found.get_label()]) == 3, "all groups"
    assert len(panels(*runs[:2])[2:]) == 2, "one panel for the rewards"


def test_evaluations_under_other_conditions_are_not_drawn(logged_run):
    """The reward of training is drawn: its temperature is a setting of the run."""
    of = {"evaluations": {0: 1.0, 3: 2.0}}
    runs = [logged_run("a", 3, **of), logged_run("b", 3, **of, algorithm="grpo", eval_temperature=0.0)]
    reward = panels(*runs)[2]
    assert [found.get_label() for found in reward.lines].count("evaluation on held-out prompts") == 1
    assert "GRPO" in reward.get_title() and "top-k 1" in reward.get_title() and len(reward.lines) == 3


def evaluated(panel) -> int:
    """Return the number of groups with evaluations in a panel."""
    return [found.get_label() for found in panel.lines].count(EVALUATION)


def test_evaluations_are_compared_with_the_first_group_that_has_them(logged_run, tmp_path):
    """The first group has no q. The judge r of the last two groups has other code, which matters only for r."""
    facts = {}
    for name, rules in (("a", ""), ("b", "qr"), ("c", "qr"), ("d", "qr")):
        curves = {"loss": [1.0, 2.0], **{f"eval/{rule}": [0.0, 1.0] for rule in rules}}
        run = logged_run(name, 2, curves, learning_rate=ord(name) / 1e6, eval_func=[f"{r}.py:{r}" for r in rules])
        facts[name] = json.loads((run / "run.json").read_text())
        facts[name]["data"]["rules"] = {f"{rule}.py:{rule}": f"{rule}1" for rule in rules}
    facts["d"]["data"]["rules"]["q.py:q"] = "q2"
    facts["c"]["data"]["rules"]["r.py:r"] = facts["d"]["data"]["rules"]["r.py:r"] = "r2"
    for name, of in facts.items():
        (tmp_path / name / "run.json").write_text(json.dumps(of))
    _, _, _, q, r, _ = panels(*(tmp_path / name for name in facts))
    assert q.get_title().count("other code") == 1 and evaluated(q) == 2
    assert r.get_title().count("other code") == 2 and evaluated(r) == 1


def test_evaluations_of_a_group_are_not_averaged_if_their_conditions_differ(logged_run):
    """Two seeds of one arm. The reward of their training is drawn."""
    of = {"evaluations": {0: 1.0, 3: 2.0}}
    seeds = [logged_run("a", 3, **of), logged_run("b", 3, **of, seed=7, eval_temperature=0.0)]
    reward = panels(*seeds)[2]
    assert evaluated(reward) == 0 and "top-k 1" in reward.get_title() and len(reward.lines) == 1


def test_rewards_of_a_named_group_are_not_averaged_if_they_differ(logged_run):
    runs = [logged_run("a", 3), logged_run("b", 3, rm_model=None, reward_func=["length_penalty"])]
    reward = draw(Chart(read_runs(runs), "updates", 1, ["X", "X"])).axes[0]
    assert not reward.lines and "other rewards" in reward.get_title()


def test_a_kl_to_another_start_model_is_named(logged_run):
    runs = [logged_run(name, 3, learning_rate=rate) for name, rate in (("a", 1e-5), ("b", 2e-5), ("c", 3e-5))]
    for run, files in zip(runs, ("one", "one", "other"), strict=True):
        facts = json.loads((run / "run.json").read_text())
        facts["data"]["start_model_files"] = {"model.safetensors": files}
        (run / "run.json").write_text(json.dumps(facts))
    kl = next(panel for panel in panels(*runs) if "KL" in panel.get_title())
    assert kl.get_title().count("another start model") == 1 and len(kl.lines) >= 3


def test_extreme_value_is_drawn_at_the_edge(logged_run):
    """0, 0.1, ..., 9.8, and 1e6. Without 2% at each end 0.1 to 9.8 remain. The axis has 30% more."""
    values = [*np.arange(99) / 10, 1e6]
    reward = panels(logged_run("run", 100, {"rewards/mean": values}), smooth=10)[2]
    assert reward.get_title() == "Mean reward\n0 to 1e+06; extreme values are drawn at the edge"
    assert reward.get_ylim()[1] == pytest.approx(9.8 + 0.3 * 9.7)
    for found in reward.lines:
        assert found.get_ydata()[-1] == reward.get_ylim()[1] and found.get_ydata()[-2] < 9.9


def test_non_finite_values_are_gaps(logged_run):
    values = [1.0, math.nan, 3.0, math.inf, 5.0, 6.0]
    loss = panels(logged_run("run", 6, {"loss": values}), smooth=2)[0]
    for label in ("each update", "mean of the last 2 updates"):
        assert np.isnan(line(loss, label).get_ydata()).tolist() == [False, True, False, True, False, False]
        assert line(loss, label).get_markevery() == [0, 2], "a single value between gaps is drawn as a dot"
    assert panels(logged_run("none", 2, {"loss": [math.nan] * 2}))[0].get_title() == "Loss\nno value of loss is finite"


# several runs


def test_group_has_a_mean_and_a_band_up_to_its_shortest_run(logged_run):
    runs = [
        logged_run("a", 4, {"loss": [1.0, 2, 3, 4]}, seed=1),
        logged_run("b", 4, {"loss": [3.0, 2, 5, 4]}, seed=2),
        logged_run("c", 3, {"loss": [5.0, 2, 1]}, seed=3),
    ]
    loss = panels(*runs)[0]
    assert points(loss, "PPO, mean of 3 runs") == [(1, 3), (2, 2), (3, 3)]
    vertices = {tuple(v) for v in loss.collections[0].get_paths()[0].vertices.tolist()}
    assert vertices == {(1, 1), (1, 5), (2, 2), (3, 1), (3, 5)}


def test_ppo_and_grpo_have_separate_colours_and_names(logged_run):
    runs = [logged_run(f"{a}{s}", algorithm=a, seed=s, evaluations={0: s}) for a in ("grpo", "ppo") for s in (1, 2)]
    figure = draw(Chart(read_runs(runs), "updates", 10))
    names = {a: f"{a.upper()}, mean of 2 runs" for a in ("ppo", "grpo")}
    for axes in figure.axes:
        assert {a: line(axes, n).get_color() for a, n in names.items()} == {a: colour_of(a) for a in names}
        assert {tuple(c.get_facecolor()[0]) for c in axes.collections} >= {to_rgba(colour_of(a), 0.2) for a in names}
    evaluated = [found for found in figure.axes[0].lines if found.get_label() == EVALUATION]
    assert [(f.get_markeredgecolor(), f.get_xydata().tolist()) for f in evaluated] == [
        (colour_of(a), [[0, 1.5]]) for a in ("ppo", "grpo")
    ]  # fmt: skip
    assert legend(figure) == [names["ppo"], EVALUATION, names["grpo"], TARGET]
    lines = "lines: mean of the last 10 updates; bands: lowest to highest run"
    assert figure.get_suptitle() == f"PPO and GRPO, recipe demo\n{lines}"
    assert ["not comparable" in axes.get_title() for axes in figure.axes] == [False, False, True, False]


def test_mean_over_time_uses_values_at_the_same_time(logged_run):
    """One run takes 1 s per update, the other 2 s. After 4 s they have finished updates 4 and 2."""
    runs = [logged_run("a", 10, pace=1.0), logged_run("b", 10, pace=2.0)]
    found = dict(points(panels(*runs, x="time")[0], "PPO, mean of 2 runs"))
    assert found[4] == 3 and min(found) == 2 and max(found) == 10


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
        for target, rate, of in ((3, "0.0003", "mean of 2 runs"), (3, "0.01", "seed 42"), (6, "0.01", "seed 42"))
    ]
    lines = [line(figure.axes[2], name) for name in names]
    assert len({found.get_color() for found in lines}) == 3 and lines[0].get_color() == colour_of("ppo")
    assert figure.axes[2].get_title() == "Loss", "one algorithm's losses can be compared"
    targets = [found for found in figure.axes[1].lines if found.get_linestyle() == ":"]
    assert [(t.get_color(), t.get_ydata()[0]) for t in targets] == [
        (found.get_color(), nats) for found, nats in zip(lines, (3, 3, 6), strict=True)
    ]
    shown = [text.replace("\n", " ") for text in legend(figure)]
    assert "dotted: KL target of a group" in shown and set(names) < set(shown)


def test_names_of_groups_are_in_legend_table_and_output(logged_run, tmp_path, capsys):
    runs = [logged_run("a", algorithm="grpo"), logged_run("b", learning_rate=1e-2)]
    output = run_script(capsys, "--arm", f"new, K 4={runs[0]}", f"old={runs[1]}", "--output", tmp_path / "plot")
    assert f"new, K 4  {runs[0]}\n" in output and f"old       {runs[1]}\n" in output
    with (tmp_path / "plot.csv").open(newline="", encoding="utf-8") as file:
        assert {row["run"]: row["group"] for row in csv.DictReader(file)} == {
            str(runs[0]): "new, K 4", str(runs[1]): "old",
        }  # fmt: skip


# other judges


def test_gold_quality_and_evaluation_functions_have_a_panel_each(logged_run):
    curves = {"loss": [1.0, 2.0], "eval/gold": [0.25, 0.5], "eval/right": [0.5, 1.0], "eval/right/low": [0.0, 0.0]}
    runs = [logged_run("a", 2, curves), logged_run("b", 2, {**curves, "eval/gold": [0.75, 1.0]}, seed=2)]
    axes = panels(*runs, smooth=10)
    assert [panel.get_title() for panel in axes[3:-1]] == [
        "Gold quality on held-out prompts",
        "right on held-out prompts",
    ]
    assert points(axes[3], "PPO, mean of 2 runs") == points(axes[3], EVALUATION) == [(1, 0.5), (2, 0.75)]


# values that a recipe reports from others


def with_published(logged_run, tmp_path, metric: str, values: list[float]) -> list:
    """Return the axes of a run whose recipe has published values 0.25 and 0.75 of this metric."""
    published = f"published: {{metric: {metric}, start: 0.25, end: 0.75, source: a paper}}\n"
    (tmp_path / "mine.yaml").write_text(f"kind: recipe\nactor_model: a\nrm_model: b\n{published}")
    curves = {"loss": [1.0, 2.0], "rewards/mean": [0.0, 0.1], "eval/right": [0.5, 0.6], "eval/other": [0.5, 0.6]}
    curves[metric] = values
    return panels(logged_run("a", len(values), curves, recipe=str(tmp_path / "mine.yaml")), x="time")


def test_published_values_are_marks_at_the_edges_of_the_panel_of_their_metric(logged_run, tmp_path):
    axes = with_published(logged_run, tmp_path, "eval/right", [0.5, 0.6])
    label = "reported by a paper, not reproduced here"
    marked = [panel for panel in axes if label in [found.get_label() for found in panel.lines]]
    assert [panel.get_title() for panel in marked] == ["right on held-out prompts"]
    assert points(marked[0], label) == [(0.015, 0.25), (0.985, 0.75)]
    low, high = marked[0].get_ylim()
    assert low < 0.25 and high > 0.75, "the curve alone would end at 0.6"
    left, right = line(marked[0], label).get_transform().transform([[0.015, 0.25], [0.985, 0.75]])[:, 0]
    box = marked[0].bbox
    assert (left - box.x0, box.x1 - right) == pytest.approx([0.015 * box.width] * 2), "whatever the x axis shows"


def test_published_values_are_not_moved_if_extreme_values_are(logged_run, tmp_path):
    """0.5 to 0.598, and 1e6. The axis would end at 0.6 and clip a mark at 0.75."""
    axes = with_published(logged_run, tmp_path, "rewards/mean", [*(0.5 + np.arange(99) / 1000), 1e6])
    reward = axes[2]
    assert "extreme values" in reward.get_title()
    assert points(reward, "reported by a paper, not reproduced here") == [(0.015, 0.25), (0.985, 0.75)]
    assert reward.get_ylim()[0] <= 0.25 and 0.75 <= reward.get_ylim()[1] < 10


@pytest.mark.parametrize("label", ["a long label of a group " * 6, "without_any_space_" * 9])
def test_long_labels_fit_into_the_figure(logged_run, label):
    runs = read_runs([logged_run("a"), logged_run("b", algorithm="grpo")])
    figure = draw(Chart(runs, "updates", 10, [label, "b"]))
    figure.draw_without_rendering()
    boxes = [found.get_window_extent() for found in (figure.legends[0], *figure.axes, *figure.texts)]
    assert min(box.x0 for box in boxes) >= 0 and max(box.x1 for box in boxes) <= figure.bbox.width
    assert min(axes.get_tightbbox().y0 for axes in figure.axes) > boxes[0].y1 and boxes[0].y0 >= 0
    assert all(axes.get_window_extent().height > 0.8 * figure.dpi for axes in figure.axes)


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
    assert "new  20 of 20 updates, rewards/mean 15.5" in output and "old" not in output
    assert "wrote training_progress.png (4 panels over updates) and training_progress.csv (21 rows)" in output
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
    assert output.count("20 of 20 updates, rewards/mean 19, kl_divergence 19, loss 19, learning_rate 20") == 6
    assert (tmp_path / "plot.png").is_file() and (tmp_path / "plot.csv").is_file()


def test_script_reports_updates_and_target_of_each_run(logged_run, tmp_path, capsys):
    runs = [
        logged_run("a", 20), logged_run("b", 15, seed=2), logged_run("c", 20, algorithm="grpo", recipe="phased-kl"),
    ]  # fmt: skip
    output = run_script(capsys, *runs, "--output", tmp_path / "plot")
    assert output.count("20 of 20 updates") == 2 and output.count("15 of 15 updates") == 1
    assert output.count("KL target 3/sequence") == 2 and output.count("/token") == 1
    kl = panels(*runs)[4]  # after the mean rewards of two reward models
    assert kl.get_ylabel() == "nats/sequence"
    assert [f.get_color() for f in kl.lines if f.get_linestyle() == ":"] == [colour_of("ppo")], "not that per token"


def test_script_reports_incomplete_files_and_non_finite_values(logged_run, tmp_path, capsys):
    run = logged_run("run", 4, {"loss": [1.0, math.nan, 3.0, 4.0]}, status="running")
    [file] = (run / "logs").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    output = run_script(capsys, run, "--output", tmp_path / "plot")
    assert output.count(f"{file.name}: ") == 1
    assert output.count("values that are not finite (loss 1 of 3) are gaps in the plot") == 1
    assert "3 of 4 updates (killed)" in output and "rewards/mean not logged" in output
    with RunLock(run):
        assert "3 of 4 updates (running)" in run_script(capsys, run, "--output", tmp_path / "plot")


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
