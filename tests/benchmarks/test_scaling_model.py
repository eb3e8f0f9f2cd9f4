"""Tests the estimate for several GPUs, and the table of it in docs/several_gpus.md."""

from __future__ import annotations

import pytest

from benchmarks.scaling_model import LINKS, LORA_WEIGHTS, WEIGHTS, Link, Update, sum_seconds, table
from tests.scripts.test_scripts import ROOT


def test_table_is_in_the_docs():
    assert "\n".join(table()) in (ROOT / "docs" / "several_gpus.md").read_text(encoding="utf-8")


def test_sum_of_gradients_takes_the_time_of_a_ring():
    link = Link("a link", bytes_per_s=10.0, latency_s=0.5)
    assert sum_seconds(40.0, 1, link) == 0
    assert sum_seconds(40.0, 2, link) == pytest.approx(2 * (20 / 10 + 0.5))
    assert sum_seconds(40.0, 4, link) == pytest.approx(6 * (10 / 10 + 0.5))


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.name)
def test_lora_scales_better_and_nothing_scales_beyond_the_number_of_gpus(link):
    update, ratios = Update(), {}
    for trained in (WEIGHTS, LORA_WEIGHTS):
        alone = update.seconds(1, trained, link)
        ratios[trained] = [alone / update.seconds(count, trained, link) for count in (2, 4, 8)]
        assert all(ratio < count for ratio, count in zip(ratios[trained], (2, 4, 8), strict=True))
    assert all(lora > full for lora, full in zip(ratios[LORA_WEIGHTS], ratios[WEIGHTS], strict=True))
