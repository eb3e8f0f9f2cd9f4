"""Pictures of measured models: how scores and lengths are distributed, and what score each run has for its KL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlhf.algorithms.table import ALGORITHMS, in_order
from rlhf.analysis.curves import RunCurves
from rlhf.analysis.evaluator import GenerationResults
from rlhf.reports.plot_style import COLOURS, colour_of, line_styles_of, new_figure, spare_colours, style

BINS = 24
LEGEND_WIDTH, LINE_WIDTH = 100, 9  # letters that fit beside each other, and that a legend's line and gaps take
SEED_AT = ((5, 6), (5, -15), (-16, 6), (-16, -15))  # points from a run's end, algorithm by algorithm: so that the
# seeds of runs that ended alike can be read
FAR = 3  # times the KL of nine tenths of the evaluations


def colours_of(kinds: Sequence[str]) -> list[str]:
    """One colour per model: "start" and each algorithm have their own, once; others and repeats take further ones."""
    spare, taken = iter(spare_colours()), []
    for kind in kinds:
        own = colour_of(kind) if kind in COLOURS or kind in ALGORITHMS else None
        taken.append(own if own is not None and own not in taken else next(spare, COLOURS["start"]))
    return taken


def distributions(models: Sequence[GenerationResults], kinds: Sequence[str]) -> Figure:
    """Scores and lengths of all replies, as steps over shared bins; a dashed line at each mean."""
    with style():
        figure = new_figure(10, 4.2)
        panels = figure.subplots(1, 2)
        for axes, name, unit in zip(panels, ("scores", "lengths"), ("score units", "tokens"), strict=True):
            values = [np.ravel(getattr(m, name)) for m in models]
            edges = _edges(np.concatenate(values))
            for model, colour, of_model in zip(models, colours_of(kinds), values, strict=True):
                shares, _ = np.histogram(of_model, edges)
                axes.stairs(shares / len(of_model), edges, color=colour, linewidth=2, label=model.label)
                axes.axvline(of_model.mean(), color=colour, linestyle="--", linewidth=1.2)
            axes.set_xlabel(unit)
            axes.set_ylabel("share of replies")
            axes.set_ylim(bottom=0)
        panels[0].set_title("Score (dashed: mean)")
        panels[1].set_title("Reply's length (dashed: mean)")
        handles, labels = panels[0].get_legend_handles_labels()
        columns = max(1, min(4, LEGEND_WIDTH // (max(map(len, labels)) + LINE_WIDTH)))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return figure


def _edges(values: np.ndarray) -> np.ndarray:
    """About 24 bins; of whole numbers, as many of them in each."""
    low, high = values.min(), values.max()
    if np.issubdtype(values.dtype, np.integer):
        step = -(-(high - low + 1) // BINS)
        return np.arange(low, high + step + 1, step) - 0.5
    return np.linspace(low, high, BINS + 1) if high > low else np.array([low - 0.5, low + 0.5])


def score_against_kl(runs: Sequence[RunCurves]) -> Figure:
    """What each run got for how far it went: evaluation score over KL, a dot each, from its start to its end.

    An evaluation at more than 3 times the KL that nine tenths of them stay under is out of sight, and said to be.
    """
    with style():
        figure = new_figure(8, 5)
        axes = figure.subplots()
        drawn, lacking = [], []
        for run in runs:
            if {"eval/kl_divergence", "eval/score"} <= run.scalars.keys():
                kl, score = (run.scalars[tag].values for tag in ("eval/kl_divergence", "eval/score"))
                count = min(len(kl), len(score))  # of a run that is being written
                drawn.append((run, kl[:count], score[:count]))
            else:
                lacking.append(f"{run.algorithm.upper()}, seed {run.run.seed}")
        line_styles = line_styles_of(in_order(run.algorithm for run in runs))
        for i, (run, kl, score) in enumerate(drawn):
            first = run.algorithm not in [other.algorithm for other, _, _ in drawn[:i]]
            colour, marker = line_styles[run.algorithm]
            line_style = {"color": colour, "label": run.algorithm.upper() if first else None}
            axes.plot(kl, score, ".-", color=colour, linewidth=1.5, markersize=7, alpha=0.7)
            axes.plot(kl[0], score[0], "D", color=COLOURS["start"], markersize=8, zorder=3,
                      label=None if i else "start model")  # fmt: skip
            axes.plot(kl[-1], score[-1], marker, markersize=9, **line_style)
            place = SEED_AT[list(line_styles).index(run.algorithm) % len(SEED_AT)]
            where = {"xytext": place, "textcoords": "offset points", "fontsize": 10}
            axes.annotate(str(run.run.seed), (kl[-1], score[-1]), color=colour, **where)
        if drawn:
            _keep_in_sight(axes, np.concatenate([kl for _, kl, _ in drawn]))
            axes.legend(loc="lower right")
        if lacking:
            text = "no evaluation was logged by\n" + "\n".join(lacking)
            axes.text(0.01, 0.99, text, transform=axes.transAxes, va="top", fontsize=10)
        axes.set_xlabel("KL to the start model, nats per sequence")
        axes.set_ylabel("evaluation score, score units")
        axes.set_title("Score against KL: a line a run, its end large, with its seed")
    return figure


def _keep_in_sight(axes: Axes, kl: np.ndarray) -> None:
    far = kl > FAR * np.quantile(kl, 0.9)
    if far.any():
        axes.set_xlim(-0.05 * kl[~far].max(), 1.2 * kl[~far].max())
        text = ", ".join(f"{value:.3g}" for value in sorted(kl[far]))
        axes.text(
            0.99, 0.5, f"out of sight to the right:\nKL {text}", transform=axes.transAxes, ha="right", fontsize=10
        )
