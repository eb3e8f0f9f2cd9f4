"""Makes Markdown tables and a picture from the JSON files of benchmarks/real_smollm2.py. Runs no model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from benchmarks.constants import TIMES
from rlhf.algorithms.table import ALGORITHMS
from rlhf.reports.plot_style import COLOURS, LineStyle, line_styles_of, new_figure, save_picture, style
from rlhf.utils.errors import UserError
from rlhf.utils.statistics import Estimate, over_prompts, over_seeds

MODEL = "SmolLM2-135M-Instruct (4-bit weights, dequantized)"
KINDS = (*ALGORITHMS, "control")
LABELS = {name: name.upper() for name in ALGORITHMS} | {"control": "control: GRPO, shuffled scores"}
CELLS = {
    "sampled": "sampled",
    "greedy": "greedy",
    "sampled_long": "sampled",
    "greedy_long": "greedy",
    "examples_sampled": "sampled, 4 examples in the prompt",
    "examples_greedy": "greedy, 4 examples in the prompt",
}
Facts = dict[str, Any]  # the content of a JSON file


def read(results: Path) -> tuple[list[Facts], list[Facts], dict[str, Facts]]:
    """Return the finished runs, those of sweeps, and the probes by model. Raises UserError if there is no file."""
    files = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(results.glob("*.json"))}
    files = {name: facts for name, facts in files.items() if not name.startswith("human_")}
    if not files:
        raise UserError("no JSON files", f"--results {results}", "Train first: python benchmarks/real_smollm2.py")
    probes = {name.removeprefix("probe_"): facts for name, facts in files.items() if name.startswith("probe_")}
    trained = [facts for name, facts in files.items() if not name.startswith("probe_")]
    runs = [facts for kind in KINDS for facts in trained if facts["kind"] == kind]
    return runs, [facts for facts in trained if facts["kind"] == "sweep"], probes


def tables(results: Path) -> str:
    """Return all tables for which there are files, in Markdown."""
    runs, sweep, probes = read(results)
    start = probes.pop("start", None)
    trained = probes
    answers = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in results.glob("human_*.json")}
    parts = [seeds_table(runs, answers), run_table(runs), minutes_table(runs), topic_table(runs)] if runs else []
    parts += [sweep_table(sweep)] if sweep else []
    if start is not None:
        parts += [probe_table({"start": start, **trained})]
        parts += [gain_table(start, trained)] if trained else []
    return "\n\n".join(parts)


def markdown(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return f"{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def points(found: Estimate) -> str:
    """Return a difference in percentage points with its interval."""
    within = "" if found.low is None else f" ({100 * found.low:+.1f} to {100 * found.high:+.1f})"
    return f"{100 * found.value:+.1f}{within}"


def counts(cell: Facts) -> np.ndarray:
    """Return the share of right completions of each question of a probe's cell, (P,)."""
    return np.array([int(digit) for digit in cell["right"]]) / cell["attempts"]


# --- runs ------------------------------------------------------------------------------------------------------------


def rises(run: Facts) -> np.ndarray:
    """Return the change of each question, (P,): 1, 0 or -1."""
    before, after = (np.array([int(digit) for digit in run["right"][name]]) for name in ("before", "after"))
    return (after - before).astype(float)


def seeds_table(runs: Sequence[Facts], answers: dict[str, Facts]) -> str:
    """Return one row per kind of run, over its seeds. The last column needs the files of --human, `answers`."""
    kinds = {kind: [run for run in runs if run["kind"] == kind] for kind in KINDS}
    control = [rises(run) for run in kinds["control"]]
    rows = []
    for kind, found in kinds.items():
        if not found:
            continue
        rise = np.stack([rises(run) for run in found])  # (seeds, questions)
        cells = [range_of([100 * run["accuracy"][name] for run in found], 1) for name in ("before", "after")]
        cells.append(points(over_seeds(rise[:, None], runs[0]["seed"], (True, False))[0]))
        if kind == "control" or not control:
            cells.append("")
        else:
            cells.append(points(over_seeds(rise[:, None] - np.stack(control), runs[0]["seed"])[0]))
        last = [run["evaluations"][-1] for run in found]
        cells += [range_of([run["kl_per_sequence"] for run in found], 1)]
        cells += [range_of([e["length"] for e in last], 1), range_of([100 * e["eos_rate"] for e in last], 0)]
        rows.append([LABELS[kind], str(len(found)), *cells, *human_cell(found, answers)])
    columns = ["run", "seeds", "before, %", "after, %", "rise, points (95% interval)", "rise minus the control's"]
    columns += ["KL, nats/sequence", "tokens", "end with EOS, %"]
    if answers:
        questions = next(iter(answers.values()))["questions"]
        columns.append(f"{questions} problems that people wrote, before and after, %")
    return markdown(f"{MODEL}: mean over seeds (lowest to highest)", columns, rows)


def human_cell(runs: Sequence[Facts], answers: dict[str, Facts]) -> list[str]:
    """Return the accuracy before and after of those runs that have both, and how many they are."""
    if not answers:
        return []
    pairs = [(f"human_start_{run['seed']}", f"human_{run['name']}") for run in runs]
    found = [
        [100 * answers[name]["cells"]["sampled"]["accuracy"] for name in pair]
        for pair in pairs
        if all(name in answers for name in pair)
    ]
    if not found:
        return [""]
    before, after = (range_of(values, 1) for values in zip(*found, strict=True))
    return [f"{before} -> {after}" + (f", {len(found)} of the seeds" if len(found) < len(runs) else "")]


def range_of(values: Sequence[float], digits: int) -> str:
    """Return the mean, and the lowest and highest value if there are several."""
    mean, low, high = (f"{value:.{digits}f}" for value in (fmean(values), min(values), max(values)))
    return mean if len(values) == 1 else f"{mean} ({low} to {high})"


def above_control(run: Facts, runs: Sequence[Facts]) -> Estimate | None:
    """Return the run's rise minus that of the control with the same seed, paired by question; None without one."""
    control = next((r for r in runs if r["kind"] == "control" and r["seed"] == run["seed"]), None)
    return None if control in (None, run) else over_prompts(rises(run) - rises(control), run["seed"])


def run_table(runs: Sequence[Facts]) -> str:
    """Return one row per run: accuracy, its rise, the rise above the control's, and what else changed."""
    rows = []
    for run in runs:
        a = run["accuracy"]
        first = run["evaluations"][0]
        last = run["evaluations"][-1]
        above = above_control(run, runs)
        rows.append([
            LABELS[run["kind"]], str(run["seed"]), percent(a["before"]), percent(a["after"]),
            points(Estimate(a["rise"], a["low"], a["high"])), "" if above is None else points(above),
            f"{run['kl_per_sequence']:.1f}", *(f"{e['length']:.1f}, {e['eos_rate']:.0%}" for e in (first, last)),
            f"{last['perplexity'] / first['perplexity']:.2f}",
        ])  # fmt: skip
    columns = [
        "run",
        "seed",
        "before, %",
        "after, %",
        "rise, points (95% interval)",
        "rise minus GRPO control's, points",
    ]
    columns += ["KL, nats/sequence", "tokens, EOS before", "tokens, EOS after", "perplexity, times the start's"]
    title = f"{MODEL}: held-out accuracy on {runs[0]['accuracy']['questions']} questions"
    return markdown(title, columns, rows)


def minutes_table(runs: Sequence[Facts]) -> str:
    """Return one row per run: minutes from the start of the command to each evaluation, with its accuracy, and those
    of the parts of the whole run. Older runs recorded no parts."""
    updates = sorted({e["update"] for run in runs for e in run["evaluations"]})
    rows = []
    for run in runs:
        at = {e["update"]: f"{e['seconds'] / 60:.1f} min: {percent(e['accuracy'])}%" for e in run["evaluations"]}
        s = run["seconds"]
        busy = run["seconds"]["busy_before_percent"]
        rows.append([
            LABELS[run["kind"]], str(run["seed"]), *(at.get(update, "") for update in updates),
            f"{s['total'] / 60:.1f}", *(f"{s[name] / 60:.1f}" if name in s else "-" for name in TIMES),
            f"{s['update_median']:.1f}", "" if busy is None else f"{busy:.0f}",
            "bfloat16" if run["settings"]["bf16"] else "float32",
            run["machine"]["card"] or f"{run['machine']['processor']}, {run['machine']['cores']} cores",
        ])  # fmt: skip
    columns = ["run", "seed", *(f"update {update}" for update in updates)]
    columns += ["whole run, min", *(f"{name}, min" for name in TIMES), "update, s (median)"]
    return markdown("Time", [*columns, "CPU used by others at the start, %", "precision", "device"], rows)


def topic_table(runs: Sequence[Facts]) -> str:
    """Return one row per topic: accuracy of the start model, and of each kind of run (mean over seeds)."""
    kinds = list(dict.fromkeys(run["kind"] for run in runs))
    rows = []
    for topic, found in runs[0]["topics"].items():
        after = [fmean(r["topics"][topic]["after"] for r in runs if r["kind"] == kind) for kind in kinds]
        rows.append([topic, str(found["questions"]), percent(found["before"]), *map(percent, after)])
    columns = ["topic", "questions", "start model, %", *(f"{LABELS[kind]}, %" for kind in kinds)]
    return markdown("Held-out accuracy by topic", columns, rows)


def sweep_table(sweep: Sequence[Facts]) -> str:
    """Return one row per point of a sweep, the highest rise first."""
    rows = []
    for run in sorted(sweep, key=lambda run: -run["accuracy"]["rise"]):
        a = run["accuracy"]
        last = run["evaluations"][-1]
        minutes = run["seconds"]["total"] / 60
        rows.append([
            f"`{run['name'].removeprefix('sweep_')}`", percent(a["before"]), percent(a["after"]),
            points(Estimate(a["rise"], a["low"], a["high"])), f"{run['kl_per_sequence']:.1f}",
            f"{last['length']:.1f}, {last['eos_rate']:.0%}", f"{minutes:.1f}",
        ])  # fmt: skip
    columns = ["setting, updates, seed", "before, %", "after, %", "rise, points (95% interval)", "KL, nats/sequence"]
    return markdown("Sweep, GRPO", [*columns, "tokens, EOS after", "minutes"], rows)


# --- what was learned ------------------------------------------------------------------------------------------------


class Gain(NamedTuple):
    """A gain within the training length, and its three parts, whose sum it is. Accuracies of each question, (P,)."""

    gain: np.ndarray
    brevity: np.ndarray
    sharpening: np.ndarray
    ability: np.ndarray


def split_gain(start: Facts, trained: Facts, greedy: bool) -> Gain:
    """Split the gain of training, sampled or `greedy` within the training length, into three parts.

    S is the start model's accuracy sampled and G its greedy accuracy; S_long and G_long are the same with 128 tokens;
    T is the trained model's accuracy within the training length.

    - brevity and format: S_long - S (greedy: G_long - G). The start model finds this answer, but not in time.
    - sharpening: G_long - S_long (greedy: 0). The start model prefers this answer, but samples others.
    - ability: T - G_long, the rest. It is negative if the trained model is worse than the start model's long greedy
      answers.

    The order is a choice: sharpening is measured with 128 tokens, where few completions are cut off.
    """
    cells = {name: counts(cell) for name, cell in start["cells"].items()}
    way = "greedy" if greedy else "sampled"
    short = cells[way]
    long = cells[f"{way}_long"]
    best = cells["greedy_long"]
    after = counts(trained["cells"][way])
    return Gain(after - short, long - short, best - long, after - best)


def gain_table(start: Facts, trained: dict[str, Facts]) -> str:
    """Return two rows per model: the gain and its parts (`split_gain`) in points, and their shares of the gain."""
    rows = []
    for name, facts in trained.items():
        for greedy in (False, True):
            split = split_gain(start, facts, greedy)
            found = [over_prompts(part, facts["seed"]) for part in split]
            gain = found[0].value
            shares = [f", {part.value / gain:.0%} of the gain" if gain > 0 else "" for part in found[1:]]
            cells = [points(found[0]), *(points(p) + share for p, share in zip(found[1:], shares, strict=True))]
            rows.append([name, "greedy" if greedy else "sampled", *cells])
    columns = ["model", "decoding", "gain, points (95% interval)", "brevity and format", "sharpening", "ability"]
    return markdown(f"What was learned ({start['questions']} questions)", columns, rows)


def probe_table(probes: dict[str, Facts]) -> str:
    """Return one row per model and cell: accuracy, pass@k, length and cut-off share."""
    rows = []
    for name, facts in probes.items():
        for key, cell in facts["cells"].items():
            k = cell["attempts"]
            rows.append([
                name, CELLS[key], str(cell["tokens"]),
                f"{percent(cell['accuracy'])} ({percent(cell['low'])} to {percent(cell['high'])})",
                f"{percent(cell[f'pass_at_{k}'])} (k = {k})" if k > 1 else "",
                f"{cell['length']:.1f}", percent(cell["cut_off"]),
            ])  # fmt: skip
    columns = ["model", "decoding", "tokens at most", "accuracy, % (95% interval)", "pass@k, %"]
    title = f"Start model and trained models on {next(iter(probes.values()))['questions']} held-out questions"
    return markdown(title, [*columns, "mean tokens", "cut off, %"], rows)


# --- picture ---------------------------------------------------------------------------------------------------------


def draw(results: Path, file: Path) -> None:
    """Draw the held-out accuracy over the updates, one line per kind of run. Minutes are in the table, because runs on
    different machines can share a picture.

    A line is the mean over seeds, and its band their range.
    """
    runs, _, _ = read(results)
    with style():
        figure = new_figure(9, 5.5)
        axes = figure.subplots()
        for kind in dict.fromkeys(run["kind"] for run in runs):
            draw_kind(axes, kind, [run for run in runs if run["kind"] == kind])
        axes.set(xlabel="updates", xlim=(0, None), ylim=(0, None))
        axes.set_ylabel(f"held-out accuracy, % of {runs[0]['accuracy']['questions']} questions")
        axes.set_title(f"{MODEL}: sums\nmean over seeds; band: lowest to highest")
        axes.legend(loc="upper left")
    save_picture(figure, file)


def curve_of(run: Facts) -> tuple[list[int], list[float]]:
    """Return the updates and the accuracies of a run's evaluations."""
    return [e["update"] for e in run["evaluations"]], [e["accuracy"] for e in run["evaluations"]]


def draw_kind(axes, kind: str, runs: Sequence[Facts]) -> None:
    control = kind == "control"
    colour, marker, _ = LineStyle(COLOURS["start"], "x") if control else line_styles_of([kind])[kind]
    updates = sorted({e["update"] for run in runs for e in run["evaluations"]})
    # (seeds, evaluations), with straight lines between the evaluations of a run: an older run has others
    accuracy = 100 * np.array([np.interp(updates, *curve_of(run)) for run in runs])
    mean = accuracy.mean(0)
    axes.plot(updates, mean, color=colour, marker=marker, ls=":" if control else "-", label=LABELS[kind])
    axes.fill_between(updates, accuracy.min(0), accuracy.max(0), color=colour, alpha=0.2, lw=0)
