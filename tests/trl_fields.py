"""The tables of docs/coming_from_trl.md about the fields of TRL's configurations, made from rlhf/trl.py.

`python -m tests.trl_fields` writes them into the page.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import rlhf.trl as ours

PAGE = Path(__file__).parent.parent / "docs" / "coming_from_trl.md"
CONFIGS = (ours.GRPOConfig, ours.RLOOConfig, ours.PPOConfig)
USED = {
    ours.GRPOConfig: ({**ours.OF_ALL, **ours.OF_GROUPS, **ours.OF_GRPO}, ours.COMPUTED_OF_GRPO),
    ours.RLOOConfig: ({**ours.OF_ALL, **ours.OF_GROUPS}, ours.COMPUTED_OF_GROUPS),
    ours.PPOConfig: ({**ours.OF_ALL, **ours.OF_PPO}, ours.COMPUTED_OF_PPO),
}
MARKS = re.compile(r"(?<=<!-- fields -->\n).*?(?=<!-- end of fields -->)", re.DOTALL)


def fields_by_use(kind: type) -> dict[str, list[str]]:
    """Return the fields of a class by what becomes of them. A name in two lists occurs twice."""
    same, computed = USED[kind]
    names = [field.name for field in dataclasses.fields(kind)]
    found = {
        "same": [name for name in names if name in same],
        "computed": [name for name in names if name in computed],
        "no effect": [name for name in names if name in ours.NO_EFFECT],
    }
    used = {name for part in found.values() for name in part}
    return {**found, "refused": [name for name in names if name not in used]}


def listed(names) -> str:
    return ", ".join(f"`{name}`" for name in names)


def table() -> str:
    """Return the table, as Markdown."""
    used: dict[tuple[str, str], list[str]] = {}
    for kind in CONFIGS:
        same, computed = USED[kind]
        of_kind = fields_by_use(kind)
        for name in (*of_kind["same"], *of_kind["computed"]):
            here = f"`{same[name]}`" if name in same else computed[name]
            used.setdefault((f"`{name}`", here), []).append(kind.__name__.removesuffix("Config"))
    unchanged: dict[str, list[str]] = {}
    others = []
    for (name, here), kinds in used.items():
        of = "" if len(kinds) == len(CONFIGS) else f" ({', '.join(kinds)})"
        if name == here:
            unchanged.setdefault(of, []).append(name)
        else:
            others.append(f"| {name}{of} | {here} |")
    rows = ["| TRL | here |", "|---|---|"]
    rows += [f"| {', '.join(names)}{of} | same |" for of, names in unchanged.items()]
    rows += others
    titles = {"no effect": "changes only time, memory or logging", "refused": "refused, if not TRL's default"}
    for use, title in titles.items():
        names = dict.fromkeys(name for kind in CONFIGS for name in fields_by_use(kind)[use])
        rows.append(f"| {listed(names)} | {title} |")
    rows.append(f"| LoraConfig: {listed(ours.OF_LORA)}, `target_modules` | `lora_r`, same, same, `lora_targets` |")
    rows.append(f"| LoraConfig: {listed(ours.LORA_WITHOUT_EFFECT)} | no effect |")
    rows.append("| LoraConfig: all others | refused, if not peft's default |")
    return "\n".join(rows) + "\n"


def page_with_tables(text: str) -> str:
    """Return the page with the table of the code between its marks."""
    assert len(MARKS.findall(text)) == 1
    return MARKS.sub(lambda _: table(), text)


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text("utf-8")), "utf-8", newline="\n")
