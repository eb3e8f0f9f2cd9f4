"""Which evaluation's model is the best one, and why. Floats only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KL_GATE = 1.5  # times the target in force


@dataclass(frozen=True)
class Candidate:
    """One evaluation, update 0 (the start model) among them."""

    update: int
    score: float
    kl: float  # nats, in the target's unit
    target: float | None  # KL target in force, same unit; None where beta is not steered: no KL gate
    perplexity: float


def choose(candidates: Sequence[Candidate], rule: str, perplexity_gate: float) -> tuple[int, str]:
    """The index of the best candidate, and the reason in words. The first candidate is the start.

    "score": among those with KL <= 1.5 x the target then in force and perplexity <= `perplexity_gate` x the start's,
    the highest score. "perplexity" (the references' rule): among those with KL <= 1.5 x the target, the lowest
    perplexity. The earlier of equals. Where none passes, the one nearest to its gates, and the reason says so.
    """
    most = perplexity_gate * candidates[0].perplexity if rule == "score" else None
    excess = [_excess(c, most) for c in candidates]
    gates = [f"KL within {KL_GATE:g} x the target"] if any(c.target is not None for c in candidates) else []
    gates += [f"perplexity within {perplexity_gate:g} x the start's"] if rule == "score" else []
    gate = " and ".join(gates) or "any KL, as no target is in force"
    passing = [i for i, far in enumerate(excess) if far <= 1]
    if not passing:
        nearest = excess.index(min(excess))
        return (
            nearest,
            f"none of {len(excess)} evaluations has {gate}; this one is nearest, at {excess[nearest]:.2f} x its gate",
        )
    if rule == "score":
        best = max(passing, key=lambda i: (candidates[i].score, -i))
        what = f"the highest score ({candidates[best].score:+.3f})"
    else:
        best = min(passing, key=lambda i: (candidates[i].perplexity, i))
        what = f"the lowest perplexity ({candidates[best].perplexity:.3f})"
    return best, f"{what} among {len(passing)} of {len(candidates)} evaluations with {gate}"


def _excess(candidate: Candidate, most_perplexity: float | None) -> float:
    """How far out the worse of a candidate's gates is: 1 is on the gate, more is outside."""
    kl = 0.0 if candidate.target is None else candidate.kl / (KL_GATE * candidate.target)
    return kl if most_perplexity is None else max(kl, candidate.perplexity / most_perplexity)
