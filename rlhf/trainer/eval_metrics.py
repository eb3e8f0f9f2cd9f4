"""The metrics of an evaluation function: its mean over prompts with an interval, and pass@k."""

from __future__ import annotations

from statistics import fmean

import numpy as np

from rlhf.rewards.eval_functions import mean_pass_at_k
from rlhf.utils.intervals import over_prompts


def per_prompt(values: np.ndarray) -> list[float | None]:
    """Return the mean of each prompt's completions, of those that have a value; None for a prompt without one.

    `values` is (P, K).
    """
    return [fmean(group) if group else None for group in _known(values)]


def _known(values: np.ndarray) -> list[list[float]]:
    """Return the values of each prompt that are not NaN."""
    return [row[~np.isnan(row)].tolist() for row in values]


def figures_of(values: np.ndarray, seed: int) -> dict[str, float]:
    """Return the metrics of one evaluation function.

    `value` is the mean over the prompts' means, `low` and `high` its 95% interval over prompts. With several samples
    and only the values 0 and 1, `pass_at_K` is the mean of pass@k over the prompts with at least K values. A prompt
    without a value is left out. Empty if no completion has a value; without interval for one prompt.

    Args:
        values: (P, K) of each completion; NaN if the function does not apply.
        seed: of the bootstrap.
    """
    means = [mean for mean in per_prompt(values) if mean is not None]
    if not means:
        return {}
    known = _known(values)
    samples = values.shape[1]
    is_right = all(value in (0.0, 1.0) for row in known for value in row)
    found = over_prompts(means, seed, limits=(0.0, 1.0) if is_right else None)
    figures = {"value": found.value, "low": found.low, "high": found.high}
    if is_right and samples > 1:
        figures |= {f"pass_at_{k}": mean for k, mean in mean_pass_at_k(known, samples).items()}
    return {name: figure for name, figure in figures.items() if figure is not None}


def tag_of(name: str, figure: str) -> str:
    """Return the TensorBoard tag of a figure of `figures_of`, of the evaluation function `name`."""
    return f"eval/{name}" if figure == "value" else f"eval/{name}/{figure}"


def shown(figures: dict[str, float]) -> str:
    """Return the figures in words, for the console."""
    if not figures:
        return "no value"
    within = f" ({figures['low']:.3f} to {figures['high']:.3f})" if "low" in figures else ""
    most = max((int(name.removeprefix("pass_at_")) for name in figures if name.startswith("pass_at_")), default=None)
    passed = "" if most is None else f", pass@{most} {figures[f'pass_at_{most}']:.3f}"
    return f"{figures['value']:.3f}{within}{passed}"
