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


def flag(setting: str) -> str:
    return f"`--{setting.replace('_', '-')}`"


def table() -> str:
    """Return the table, as Markdown."""
    used: dict[tuple[str, str], list[str]] = {}
    for kind in CONFIGS:
        same, computed = USED[kind]
        of_kind = fields_by_use(kind)
        for name in (*of_kind["same"], *of_kind["computed"]):
            here = computed.get(name) or ("same" if same[name] == name else flag(same[name]))
            used.setdefault((here, name), []).append(kind.__name__.removesuffix("Config"))
    rows: dict[tuple[str, str], list[str]] = {}
    for (here, name), kinds in used.items():
        of = "" if len(kinds) == len(CONFIGS) else f" ({', '.join(kinds)})"
        rows.setdefault((here, of), []).append(name)
    refused = dict.fromkeys(name for kind in CONFIGS for name in fields_by_use(kind)["refused"])
    rows |= {(f"refused. {ours.INSTEAD[name]}", ""): [name] for name in refused if name in ours.INSTEAD}
    rows["refused, if not TRL's default", ""] = [name for name in refused if name not in ours.INSTEAD]
    no_effect = dict.fromkeys(name for kind in CONFIGS for name in fields_by_use(kind)["no effect"])
    rows["changes only time, memory or logging", ""] = list(no_effect)
    rows["`--lora-r`, same, same, `--lora-targets`", " (LoraConfig)"] = [*ours.OF_LORA, "target_modules"]
    rows["no effect; all others are refused, if not peft's default", " (LoraConfig)"] = [*ours.LORA_WITHOUT_EFFECT]
    lines = [f"| {listed(names)}{of} | {here} |" for (here, of), names in rows.items()]
    return "\n".join(["| TRL 1.12 | here |", "|---|---|", *lines]) + "\n"


def page_with_tables(text: str) -> str:
    """Return the page with the table of the code between its marks."""
    assert len(MARKS.findall(text)) == 1
    return MARKS.sub(lambda _: table(), text)


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text("utf-8")), "utf-8", newline="\n")
