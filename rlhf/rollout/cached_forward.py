"""The forward pass that the rollout's log-probabilities and the first optimizer step share."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf.rollout.completions import Completions, ForwardPass


class CachedForward:
    """Stores one forward pass with its autograd graph, from the rollout to the first optimizer step on it."""

    def __init__(self):
        self._cached: tuple[Completions, ForwardPass] | None = None

    def store(self, completions: Completions, forward: ForwardPass) -> ForwardPass:
        """Store `forward`, a pass over all of `completions`, and return it."""
        self._cached = completions, forward
        return forward

    def pop(self, completions: Completions, rows: Sequence[int]) -> ForwardPass | None:
        """Return the stored pass if it covers exactly these rows of `completions`, otherwise None.

        The pass is removed in either case: it is valid once, because the optimizer step changes the weights.
        """
        cached, self._cached = self._cached, None
        if cached is None or cached[0] is not completions or cached[1][0].rows != list(rows):
            return None
        return cached[1]

    def clear(self) -> None:
        """Free the memory of the stored pass."""
        self._cached = None

    def __bool__(self) -> bool:
        return self._cached is not None
