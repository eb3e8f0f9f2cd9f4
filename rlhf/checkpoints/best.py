"""Chooses the best evaluation of a run, and returns the reason. Uses only floats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

KL_GATE = 1.5  # largest KL, times the target in force
PERPLEXITY_GATE = 1.15  # largest perplexity, times the start model's: 0.14 nats per token


@dataclass(frozen=True)
class Candidate:
    """One evaluation. Update 0 is the start model."""

    update: int
    score: float
    kl: float  # in the target's unit: nats/sequence or nats/token
    # KL target in force, same unit; None (no limit): beta is not steered, or `kl` is not that of the policy
    target: float | None
    perplexity: float
    # of each evaluation function: value, low, high, pass_at_K
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)

    def value(self, rule: str) -> float:
        """Return the number that a rule maximizes; minus infinity if this evaluation has no value of the function."""
        return self.score if rule == "score" else self.metrics.get(rule, {}).get("value", -math.inf)


def why_no_perplexity_limit(learned: bool, by_start: bool, kl_limited: bool) -> str:
    """Return why the rules that choose a highest value have no limit of perplexity; "" if they have it.

    Only learned scores have one: they can rise while the text gets worse. A checker's score cannot, and with a checker
    the perplexity rises while answers change as they should. The perplexity of the start model's own sample measures
    the distance from the start model, as the KL does, and no damage. So it is the limit only if there is no other.

    Args:
        learned: a reward model or a module gives scores.
        by_start: the start model sampled the text of the perplexity.
        kl_limited: there is a KL target, and evaluations measure the policy's KL, so there is a KL limit.
    """
    if not learned:
        return "no limit of perplexity, because reward functions give all scores"
    if by_start and kl_limited:
        return "no limit of perplexity, because its text is the start model's own"
    return ""


def choose(candidates: Sequence[Candidate], rule: str, unlimited: str) -> tuple[int, str]:
    """Return the index of the best candidate, and the reason in words.

    The rule "score" chooses the highest score among the candidates with KL <= 1.5 x their target and perplexity <=
    1.15 x the start model's. The name of an evaluation function chooses its highest value among the same
    candidates. The rule "perplexity" (used by the reference systems) chooses the lowest perplexity among the
    candidates with KL <= 1.5 x their target. Ties go to the earlier one. If no candidate is within the limits, the one
    that exceeds them least is chosen.

    Args:
        candidates: the evaluations; the first is the start model.
        rule: "score", "perplexity" or the name of an evaluation function.
        unlimited: `why_no_perplexity_limit`; the rule "perplexity" has none in any case.
    """
    limited = rule != "perplexity" and not unlimited
    most = PERPLEXITY_GATE * candidates[0].perplexity if limited else None
    excess = [_excess(c, most) for c in candidates]
    gates = [f"KL at most {KL_GATE:g} x the target"] if any(c.target is not None for c in candidates) else []
    gates += [f"perplexity at most {PERPLEXITY_GATE:g} x the start model's"] if limited else []
    gate = " and ".join(gates) or "any KL (there is no KL target, or evaluations do not sample as training)"
    gate += f"; {unlimited}" if unlimited and rule != "perplexity" else ""
    passing = [i for i, far in enumerate(excess) if far <= 1]
    if not passing:
        nearest = excess.index(min(excess))
        return (
            nearest,
            f"none of {len(excess)} evaluations has {gate}; this one is closest ({excess[nearest]:.2f} x its limit)",
        )
    if rule == "perplexity":
        best = min(passing, key=lambda i: (candidates[i].perplexity, i))
        what = f"the lowest perplexity ({candidates[best].perplexity:.3f})"
    else:
        best = max(passing, key=lambda i: (candidates[i].value(rule), -i))
        value = candidates[best].value(rule)
        given = f"{value:+z.3f}" if rule == "score" else f"{value:.3f}"
        what = f"the highest {rule} ({given})" if math.isfinite(value) else f"the first ({rule} has no value)"
    return best, f"{what} among {len(passing)} of {len(candidates)} evaluations with {gate}"


def _excess(candidate: Candidate, most_perplexity: float | None) -> float:
    """Return the larger of KL and perplexity, each divided by its limit: above 1 is outside the limits."""
    kl = 0.0 if candidate.target is None else candidate.kl / (KL_GATE * candidate.target)
    return kl if most_perplexity is None else max(kl, candidate.perplexity / most_perplexity)
