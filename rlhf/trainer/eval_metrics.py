"""The metrics of an evaluation function: its mean over prompts with an interval, and pass@k. Uses only floats."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rlhf.rewards.eval_functions import mean_pass_at_k
from rlhf.utils.intervals import over_prompts


def per_prompt(values: Sequence[float | None], samples: int) -> list[float | None]:
    """Return the mean of each prompt's completions, of those that have a value; None for a prompt without one.

    `values` has `samples` entries for each prompt, one prompt after the other.
    """
    return [fmean(group) if group else None for group in _known(values, samples)]


def _known(values: Sequence[float | None], samples: int) -> list[list[float]]:
    """Return the values of each prompt that are not None."""
    groups = (values[start : start + samples] for start in range(0, len(values), samples))
    return [[value for value in group if value is not None] for group in groups]


def figures_of(values: Sequence[float | None], samples: int, seed: int) -> dict[str, float]:
    """Return the metrics of one evaluation function.

    `value` is the mean over the prompts' means, `low` and `high` its 95% interval over prompts. With several samples
    and only the values 0 and 1, `pass_at_K` is the mean of pass@k over the prompts with at least K values. A prompt
    without a value is left out. Empty if no completion has a value; without interval for one prompt.

    Args:
        values: `samples` entries for each prompt, one prompt after the other; None if the function does not apply.
        samples: completions per prompt.
        seed: of the bootstrap.
    """
    means = [mean for mean in per_prompt(values, samples) if mean is not None]
    if not means:
        return {}
    is_right = all(v in (None, 0.0, 1.0) for v in values)
    found = over_prompts(means, seed, limits=(0.0, 1.0) if is_right else None)
    figures = {"value": found.value, "low": found.low, "high": found.high}
    if is_right and samples > 1:
        figures |= {f"pass_at_{k}": mean for k, mean in mean_pass_at_k(_known(values, samples), samples).items()}
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
