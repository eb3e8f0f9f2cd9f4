"""Results of a comparison with stock TRL: ratios with their range, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.machine import BUSY, busy_line, gib, machine_line
from benchmarks.work import Work
from rlhf.checkpoints.run_record import environment
from rlhf.utils.console import Screen
from rlhf.utils.errors import RunError

IMPLEMENTATIONS = ("ours", "stock")


def compare(work: Work, facts: dict[str, dict], pairs: Sequence[dict[str, dict]]) -> dict[str, Any]:
    """Return the results of all pairs of updates. Raises RunError if the numbers of optimizer steps differ.

    Time ratios are TRL / ours. Memory ratios are ours / TRL.
    """
    steps = {name: pairs[-1][name]["optimizer_steps"] for name in IMPLEMENTATIONS}
    if len(set(steps.values())) > 1:
        raise RunError(
            "the implementations did different work", f"optimizer steps {steps}", "This is a bug, please report it"
        )
    ratios = [pair["stock"]["seconds"] / pair["ours"]["seconds"] for pair in pairs]
    spent = {name: {"whole": median(pair[name]["seconds"] for pair in pairs)} for name in IMPLEMENTATIONS}
    for part in pairs[0]["ours"]["parts"]:
        spent["ours"][part] = median(pair["ours"]["parts"][part] for pair in pairs)
    memory = {name: pairs[-1][name]["memory"] for name in IMPLEMENTATIONS}
    return {
        **environment(),
        "stock_trl": facts["stock"]["trl"],
        "settings": work.settings,
        "machine": facts["ours"]["machine"],
        "mixed_precision": {name: facts[name]["mixed_precision"] for name in IMPLEMENTATIONS},
        "update_ratio": {"median": median(ratios), "lowest": min(ratios), "highest": max(ratios), "pairs": ratios},
        "memory_ratio": memory["ours"]["peak"] / memory["stock"]["peak"],
        "memory_ratio_above_imports": memory["ours"]["above_imports"] / memory["stock"]["above_imports"],
        "seconds": spent,
        "memory": memory,
        "optimizer_steps": steps,
        "completion_tokens": {name: [pair[name]["completion_tokens"] for pair in pairs] for name in IMPLEMENTATIONS},
        "notes": notes(work, facts),
    }


def notes(work: Work, facts: dict[str, dict]) -> list[str]:
    """Return the conditions of the comparison, one sentence each."""
    lines = [
        "one update is one rollout with all its optimizer steps; each implementation's first update is a warm-up and "
        "is excluded",
        "each implementation runs in a separate process, and their updates alternate; memory is the process's peak of "
        + ("resident memory" if work.device == "cpu" else "CUDA tensors"),
    ]
    if work.bf16 and facts["stock"]["mixed_precision"] == "no":
        lines.append("TRL's PPO ignores bf16=True: its forward pass runs in float32")
    if work.lora or work.load_in_4bit:
        lines.append(
            "ours trains adapters" + (" over 4-bit weights" if work.load_in_4bit else "") + ", TRL trains all weights"
        )
    if facts["ours"]["machine"]["busy_before_percent"] > BUSY:
        lines.append(busy_line(facts["ours"]["machine"]))
    return lines


# --- console ---------------------------------------------------------------------------------------------------------


def show(found: dict[str, Any], screen: Screen) -> None:
    """Print the table, and below it the settings, versions and machine."""
    settings = found["settings"]
    versions = found["versions"]
    ratio = found["update_ratio"]
    title = f"{settings['algorithm'].upper()}, {settings['size']}, {settings['device']}, {settings['dtype']}"
    screen.table(title, ["", "ours", "TRL", "ratio"], rows(found), lines=False)
    pairs = f"{ratio['lowest']:.2f} to {ratio['highest']:.2f} in {len(ratio['pairs'])} pairs"
    screen.facts(
        [
            ("pairs", f"TRL's time / ours: {pairs}"),
            ("settings", ", ".join(f"{name} {value}" for name, value in settings.items())),
            ("versions", ", ".join(f"{n} {versions[n]}" for n in ("torch", "transformers", "trl", "peft"))),
            ("stock TRL", found["stock_trl"]),
            ("machine", f"{machine_line(found['machine'])}; {found['platform']}, Python {found['python']}"),
            *(("note", note) for note in found["notes"]),
        ]
    )


def rows(found: dict[str, Any]) -> list[list[str]]:
    spent = found["seconds"]
    memory = found["memory"]
    tokens = found["completion_tokens"]
    parts = [[f"  {part}", f"{value:.3f} s", "", ""] for part, value in spent["ours"].items() if part != "whole"]
    above = found["memory_ratio_above_imports"]
    return [
        [
            "one update, median",
            *(f"{spent[s]['whole']:.3f} s" for s in IMPLEMENTATIONS),
            f"{found['update_ratio']['median']:.2f}",
        ],
        *parts,
        ["peak memory", *(gib(memory[s]["peak"]) for s in IMPLEMENTATIONS), f"{found['memory_ratio']:.2f}"],
        ["  above the imports", *(gib(memory[s]["above_imports"]) for s in IMPLEMENTATIONS), f"{above:.2f}"],
        ["optimizer steps", *(str(found["optimizer_steps"][s]) for s in IMPLEMENTATIONS), ""],
        ["completion tokens", *(f"{sum(tokens[s]):,}" for s in IMPLEMENTATIONS), ""],
    ]
