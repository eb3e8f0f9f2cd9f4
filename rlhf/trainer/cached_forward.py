"""The forward pass that the rollout's log-probabilities and the first optimizer step share."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf.rollout.completions import Completions, ForwardPass


class CachedForward:
    """Keeps one forward pass with its graph, from the rollout to the first optimizer step on that rollout."""

    def __init__(self):
        self._kept: tuple[Completions, ForwardPass] | None = None

    def keep(self, replies: Completions, forward: ForwardPass) -> ForwardPass:
        """Keep `forward`, a pass over all of `replies`, and return it."""
        self._kept = replies, forward
        return forward

    def take(self, replies: Completions, rows: Sequence[int]) -> ForwardPass | None:
        """Return the kept pass if it covers exactly these rows of `replies`, else None. It is valid once: the weights
        change afterwards."""
        kept, self._kept = self._kept, None
        if kept is None or kept[0] is not replies or kept[1][0].rows != list(rows):
            return None
        return kept[1]

    def clear(self) -> None:
        """Free the memory of the kept pass."""
        self._kept = None

    def __bool__(self) -> bool:
        return self._kept is not None
