"""The metrics of an evaluation function: its mean over prompts with an interval, and pass@k."""

from __future__ import annotations

import numpy as np

from rlhf.utils.statistics import A_SHARE, interval_of, is_binary, mean_pass_at_k, over_prompts, per_prompt, scored


def figures_of(values: np.ndarray, seed: int) -> dict[str, float]:
    """Return the metrics of one evaluation function.

    `value` is the mean over the prompts' means, `low` and `high` its 95% interval over prompts. With several samples
    and only the values 0 and 1, `pass_at_K` is the mean of pass@k over the prompts with at least K values. A prompt
    without a value is left out. Empty if no completion has a value; without interval for one prompt.

    Args:
        values: (P, K) of each completion; NaN if the function does not apply.
        seed: of the bootstrap.
    """
    means = scored(per_prompt(values, exact=True))
    if not means.size:
        return {}
    samples = values.shape[1]
    is_right = is_binary(values)
    found = over_prompts(means, seed, limits=A_SHARE if is_right else None)
    figures = {"value": found.value, "low": found.low, "high": found.high}
    if is_right and samples > 1:
        figures |= {f"pass_at_{k}": mean for k, mean in mean_pass_at_k(values, samples).items()}
    return {name: figure for name, figure in figures.items() if figure is not None}


def tag_of(name: str, figure: str) -> str:
    """Return the TensorBoard tag of a figure of `figures_of`, of the evaluation function `name`."""
    return f"eval/{name}" if figure == "value" else f"eval/{name}/{figure}"


def shown(figures: dict[str, float]) -> str:
    """Return the figures in words, for the console."""
    if not figures:
        return "no value"
    most = max((int(name.removeprefix("pass_at_")) for name in figures if name.startswith("pass_at_")), default=None)
    passed = "" if most is None else f", pass@{most} {figures[f'pass_at_{most}']:.3f}"
    return interval_of({"low": None, **figures}, "") + passed
