"""Tests that the memory figures of the pages are those of the prediction."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from rlhf.config import parse_cli
from rlhf.data.prompts import ids_alone
from rlhf.setup.fit import MARGIN, changed_flags, choose_fitting
from rlhf.setup.memory import IMPORTED, Estimator
from tests.documents import ROOT
from tests.setup.test_fit import SMOLLM2

CPU = torch.device("cpu")
GIB = 2**30
# an update of the default recipe: 4 prompts of 95 tokens, without a reward model, evaluations and libraries
UPDATE = Estimator(SMOLLM2, None, CPU, [ids_alone([5] * 95)] * 64, [], 2)


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def rows(text: str, header: str) -> list[list[str]]:
    """Return the cells of the table that has this header."""
    (table,) = re.findall(rf"^{re.escape(header)}\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]


def predicted(setting: str, estimator: Estimator = UPDATE) -> str:
    """Return the predicted peak in GiB of the default recipe with the flags in backticks."""
    flags = [word for part in re.findall(r"`([^`]+)`", setting) for word in part.split()]
    return f"{estimator(parse_cli(['--bf16', *flags], 'ppo')).peak / GIB:.2f}"


def test_predicted_peaks_of_the_settings_are_those_of_the_pages():
    table = rows(page("docs/performance.md"), "| setting | peak, GiB | result |")
    assert len(table) > 5
    assert {cells[0]: cells[1] for cells in table} == {cells[0]: predicted(cells[0]) for cells in table}
    assert re.findall(r"([\d.]+) GiB predicted", page("docs/reference_systems.md")) == [predicted("")]


def test_memory_of_the_reward_model_and_of_the_libraries_is_that_of_the_page():
    scored = replace(UPDATE, reward_model=SMOLLM2)
    config = parse_cli(["--bf16"], "ppo")
    assert f"{(scored(config).peak - UPDATE(config).peak) / GIB:.1f} GiB" == "0.3 GiB"
    assert f"{IMPORTED / GIB:.1f} GiB" == "0.6 GiB"
    assert {"0.3", "0.6"} <= set(re.findall(r"\b(0\.\d) GiB", page("docs/performance.md")))


def test_settings_that_fit_are_those_of_the_page():
    config = parse_cli(["--no-bf16", "--batch-size", "32"], "ppo")
    given = Estimator(SMOLLM2, SMOLLM2, CPU, [ids_alone([5] * 256)] * 32, [256] * 20, 1, libraries=IMPORTED)
    table = rows(page("docs/performance.md"), "| `--fit` | chosen | predicted peak, GiB |")
    found = []
    for size, _, _ in table:
        chosen = choose_fitting(config, given, int(float(size.removesuffix("GB")) * GIB / MARGIN))
        flags = f"`{changed_flags(config, chosen)}`".replace("``", "nothing is changed")
        found.append([size, flags, f"{given(chosen).peak / GIB:.2f}"])
    assert found == table


def test_measured_peaks_of_the_readme_are_those_of_the_page():
    measured, in_readme = (re.findall(r"\d+\.\d+ GiB", page(name)) for name in ("docs/performance.md", "README.md"))
    assert len(in_readme) == 5 and set(in_readme) <= set(measured)
