"""Makes Markdown tables from the JSON files of benchmarks/reference_pipeline.py. Runs no model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.real_smollm2_report import Facts, markdown, percent
from benchmarks.reference_pipeline_runs import ARMS
from rlhf.reports.tables import figure_text
from rlhf.utils.errors import UserError

FIGURES = ("score", "judge", "kl", "length", "eos_rate", "perplexity")
SECONDS = ("seconds", "cpu_seconds")
START = "start"


def tables(results: Path) -> str:
    """Return the tables for which there are files, in Markdown. Raises UserError if there is no file."""
    files = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(results.glob("*.json"))]
    if not files:
        raise UserError("no JSON files", f"--results {results}", "Run a stage first")
    kinds = {kind: [f for f in files if f["kind"] == kind] for kind in ("reward model", "comparison", "recipe")}
    made = [reward_table(kinds["reward model"]), recipe_table(kinds["recipe"])]
    made[1:1] = [arm_table(report, files) for report in kinds["comparison"]]
    return "\n\n".join(filter(None, made))


def reward_table(models: Sequence[Facts]) -> str | None:
    """Return one row per reward model; None without any. The interval of the accuracy is Wilson's, over pairs."""
    rows = [
        [
            m["name"], str(m["train_pairs"]), str(m["pairs"]),
            f"{percent(m['accuracy'])} ({percent(m['low'])} to {percent(m['high'])})", percent(m["length_baseline"]),
            "-" if m["accuracy_against_baseline"] is None else percent(m["accuracy_against_baseline"]),
            f"{m['margin']:.2f}", "{mean:+.2f}, {std:.2f}".format(**m["calibration"]["scale"]),
            *(f"{m[name] / 60:.1f}" for name in SECONDS),
        ]
        for m in models
    ]  # fmt: skip
    columns = ["reward model", "training pairs", "held-out pairs", "accuracy, % (95% interval)", "length baseline, %"]
    columns += ["accuracy where the baseline is wrong, %", "margin", "raw score: mean, standard deviation"]
    return markdown("Reward models", [*columns, "minutes", "CPU minutes"], rows) if rows else None


def arm_table(report: Facts, files: Sequence[Facts]) -> str:
    """Return one row per arm of the comparison: means over seeds, warnings of the audit, and time of a command."""
    rows = []
    for arm, seeds in report["figures"].items():
        found = [seeds] if arm == START else list(seeds.values())
        warnings = [w for w in report["warnings"] if w.startswith(f"{arm}, seed ")]
        costs = [times_of(f) for f in files if ARMS.get(f["kind"]) == arm]
        rows.append([
            arm, str(len(found)), *(mean_of(found, name) for name in FIGURES),
            "-" if arm == START or arm.startswith("best-of-") else str(len(warnings)),  # only models are audited
            *(f"{fmean(times) / 60:.1f}" if costs else "-" for times in zip(*costs or [(0, 0)], strict=True)),
        ])  # fmt: skip
    columns = ["arm", "seeds", "score", "judge", "KL, nats/sequence", "tokens", "end with EOS", "perplexity"]
    columns += ["warnings of the audit", "minutes of a run", "CPU minutes of a run"]
    return markdown("Arms on the same held-out prompts: means over seeds (lowest to highest seed)", columns, rows)


def times_of(run: Facts) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of a run's command."""
    seconds = run["seconds"]
    return (seconds["total"], seconds["cpu"]) if run["kind"] != "dpo" else (seconds, run["cpu_seconds"])


def mean_of(figures: Sequence[Facts], name: str) -> str:
    """Return the mean of a figure, with its lowest and highest value if they differ."""
    known = [f[name] for f in figures if f.get(name) is not None]
    within = f" ({figure_text(name, min(known))} to {figure_text(name, max(known))})" if len(set(known)) > 1 else ""
    return figure_text(name, fmean(known) if known else None) + within


def recipe_table(runs: Sequence[Facts]) -> str | None:
    """Return one row per short run of a reference recipe; None without any."""
    rows = []
    for run in runs:
        first = run["evaluations"][0]
        last = run["evaluations"][-1]
        rows.append([
            run["recipe"], run["algorithm"].upper(), str(last["update"]),
            *(f"{run['accuracy'][name]:+.2f}" for name in ("before", "after")),
            f"{last['kl']:.2f}", f"{last['perplexity'] / first['perplexity']:.2f}",
            f"{run['seconds']['total'] / 60:.1f}",
        ])  # fmt: skip
    columns = ["recipe", "algorithm", "updates", "score before", "score after", "KL, nats/sequence"]
    title = "Short runs of the reference recipes: they show that the settings work, not what they reach"
    return markdown(title, [*columns, "perplexity, times the start's", "minutes"], rows) if rows else None
