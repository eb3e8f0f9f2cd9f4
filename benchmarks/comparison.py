"""What the turns of both sides say together: ratios, their spread, a table and a file."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.machine import BUSY, busy_line, gib, machine_line
from benchmarks.work import Work
from rlhf.checkpoints.run_record import environment
from rlhf.utils.console import Screen
from rlhf.utils.errors import RunError

SIDES = ("ours", "stock")


def compare(work: Work, facts: dict[str, dict], pairs: Sequence[dict[str, dict]]) -> dict[str, Any]:
    """The figures of all pairs of updates, by side. Raises RunError where the sides took unlike optimizer steps.

    Ratios of time are TRL's over ours, those of memory ours over TRL's.
    """
    steps = {side: pairs[-1][side]["optimizer_steps"] for side in SIDES}
    if len(set(steps.values())) > 1:
        raise RunError(
            f"unlike work, so nothing is compared: optimizer steps {steps}. This is a fault of the benchmark"
        )
    ratios = [pair["stock"]["seconds"] / pair["ours"]["seconds"] for pair in pairs]
    spent = {side: {"whole": median(pair[side]["seconds"] for pair in pairs)} for side in SIDES}
    for part in pairs[0]["ours"]["parts"]:
        spent["ours"][part] = median(pair["ours"]["parts"][part] for pair in pairs)
    memory = {side: pairs[-1][side]["memory"] for side in SIDES}
    return {
        **environment(),
        "settings": work.settings,
        "machine": facts["ours"]["machine"],
        "mixed_precision": {side: facts[side]["mixed_precision"] for side in SIDES},
        "update_ratio": {"median": median(ratios), "lowest": min(ratios), "highest": max(ratios), "pairs": ratios},
        "memory_ratio": memory["ours"]["peak"] / memory["stock"]["peak"],
        "memory_ratio_above_imports": memory["ours"]["above_imports"] / memory["stock"]["above_imports"],
        "seconds": spent,
        "memory": memory,
        "optimizer_steps": steps,
        "reply_tokens": {side: [pair[side]["reply_tokens"] for pair in pairs] for side in SIDES},
        "notes": notes(work, facts),
    }


def notes(work: Work, facts: dict[str, dict]) -> list[str]:
    """What a reader must know of the comparison."""
    lines = [
        "an update is one rollout and all its optimizer steps; the first of each side is a warm-up and not counted",
        "each side is a process of its own, in turn; memory is that process's peak, "
        + ("of all that it holds" if work.device == "cpu" else "of the card's tensors"),
    ]
    if work.bf16 and facts["stock"]["mixed_precision"] == "no":
        lines.append("TRL was given bf16=True, which its PPO does not act on: its forward pass stays in float32")
    if work.lora or work.load_in_4bit:
        lines.append(
            "ours trains adapters" + (" over 4-bit weights" if work.load_in_4bit else "") + ", TRL all weights"
        )
    if facts["ours"]["machine"]["busy_before_percent"] > BUSY:
        lines.append(busy_line(facts["ours"]["machine"]))
    return lines


# --- for people ------------------------------------------------------------------------------------------------------


def show(found: dict[str, Any], screen: Screen) -> None:
    """The table, and below it what was run where."""
    settings, versions, ratio = found["settings"], found["versions"], found["update_ratio"]
    title = f"{settings['algorithm'].upper()}, {settings['size']}, {settings['device']}, {settings['dtype']}"
    screen.table(title, ["", "ours", "TRL", "ratio"], rows(found), lines=False)
    spread = f"{ratio['lowest']:.2f} to {ratio['highest']:.2f} over {len(ratio['pairs'])} pairs"
    screen.facts(
        [
            ("spread", f"TRL's time over ours in single pairs: {spread}"),
            ("settings", ", ".join(f"{name} {value}" for name, value in settings.items())),
            ("versions", ", ".join(f"{n} {versions[n]}" for n in ("torch", "transformers", "trl", "peft"))),
            ("machine", f"{machine_line(found['machine'])}; {found['platform']}, Python {found['python']}"),
            *(("note", note) for note in found["notes"]),
        ]
    )


def rows(found: dict[str, Any]) -> list[list[str]]:
    spent, memory, tokens = found["seconds"], found["memory"], found["reply_tokens"]
    parts = [[f"  {part}", f"{value:.3f} s", "", ""] for part, value in spent["ours"].items() if part != "whole"]
    above = found["memory_ratio_above_imports"]
    return [
        [
            "an update, median",
            *(f"{spent[s]['whole']:.3f} s" for s in SIDES),
            f"{found['update_ratio']['median']:.2f}",
        ],
        *parts,
        ["peak memory", *(gib(memory[s]["peak"]) for s in SIDES), f"{found['memory_ratio']:.2f}"],
        ["  above the imports", *(gib(memory[s]["above_imports"]) for s in SIDES), f"{above:.2f}"],
        ["optimizer steps", *(str(found["optimizer_steps"][s]) for s in SIDES), ""],
        ["reply tokens, counted pairs", *(f"{sum(tokens[s]):,}" for s in SIDES), ""],
    ]
