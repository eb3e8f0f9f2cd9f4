"""Pictures of measured models: how scores and lengths are distributed, and what score each run has for its KL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from rlhf.curves import RunCurves
from rlhf.measuring import Generations
from rlhf.pictures import COLOURS, OTHER_COLOURS, new_figure, style


def colours_of(kinds: Sequence[str]) -> list[str]:
    """A colour a model: "start", "ppo" and "grpo" have their own, once; others and repeats take further ones."""
    spare, taken = iter(OTHER_COLOURS), []
    for kind in kinds:
        own = COLOURS.get(kind)
        taken.append(own if own is not None and own not in taken else next(spare, COLOURS["start"]))
    return taken


def distributions(models: Sequence[Generations], kinds: Sequence[str], score_name: str = "score") -> Figure:
    """Scores and lengths of all replies, as steps over shared bins; a dashed line at each mean."""
    with style():
        figure = new_figure(10, 4.2)
        panels = figure.subplots(1, 2)
        for axes, name, label in zip(
            panels, ("scores", "lengths"), (f"{score_name}, score units", "reply, tokens"), strict=True
        ):
            values = [np.ravel(getattr(m, name)) for m in models]
            low, high = min(v.min() for v in values), max(v.max() for v in values)
            edges = (
                np.linspace(low - 0.5, high + 0.5, 25)
                if name == "lengths" or low == high
                else np.linspace(low, high, 25)
            )
            for model, colour, of_model in zip(models, colours_of(kinds), values, strict=True):
                shares, _ = np.histogram(of_model, edges)
                axes.stairs(shares / len(of_model), edges, color=colour, linewidth=2, label=model.label)
                axes.axvline(of_model.mean(), color=colour, linestyle="--", linewidth=1.2)
            axes.set_xlabel(label)
            axes.set_ylabel("share of replies")
            axes.set_ylim(bottom=0)
        panels[0].set_title("Score (dashed: mean)")
        panels[1].set_title("Length (dashed: mean)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=1 if max(map(len, labels)) > 30 else 4)
    return figure


def score_against_kl(runs: Sequence[RunCurves]) -> Figure:
    """What each run got for how far it went: evaluation score over KL, a dot each, from its start to its end."""
    with style():
        figure = new_figure(8, 5)
        axes = figure.subplots()
        named: set[str] = set()
        for run in runs:
            if not {"eval/score", "eval/kl_divergence"} <= run.scalars.keys():
                continue
            kl, score = run.scalars["eval/kl_divergence"].values, run.scalars["eval/score"].values
            count = min(len(kl), len(score))  # of a run that is being written
            colour, label = COLOURS[run.algorithm], run.algorithm.upper()
            marker = {"ppo": "o", "grpo": "s"}[run.algorithm]
            axes.plot(kl[:count], score[:count], ".-", color=colour, linewidth=1.5, markersize=7, alpha=0.7)
            axes.plot(kl[0], score[0], "D", color=COLOURS["start"], markersize=8, zorder=3,
                      label=None if named else "start model")  # fmt: skip
            axes.plot(kl[count - 1], score[count - 1], marker, color=colour, markersize=9,
                      label=label if label not in named else None)  # fmt: skip
            named.add(label)
        axes.set_xlabel("KL to the start model, nats per sequence")
        axes.set_ylabel("evaluation score, score units")
        axes.set_title("Score against KL: a line a run, a dot an evaluation, the end large")
        axes.legend(loc="lower right")
    return figure
