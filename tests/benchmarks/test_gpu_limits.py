"""Tests the arithmetic of benchmarks/gpu_limits.py against hand-worked numbers."""

from __future__ import annotations

import pytest

from benchmarks import gpu_limits
from benchmarks.gpu_limits import GPU, GPUS, gpu_named
from rlhf.setup.shape import Shape
from tests.documents import ROOT

# 2 layers; a layer has 4 * 4 * 2 (q, o) + 4 * 2 * 2 (k, v) + 3 * 4 * 8 weights = 128 + 16 in other matrices
SMALL = Shape(layers=2, hidden=4, inner=8, q=4, kv=2, heads=2, vocabulary=10, tied=True, parameters=340)


def test_bytes_and_flops_of_a_decoding_step():
    assert SMALL.matrices == 340 - 40 == 300
    # weights 2 * 340; cache 2 bytes * 3 slots * 5 columns * 2 layers * 2 * 2; logits 5 * 4 bytes * 3 * 10
    assert gpu_limits.decoding_bytes(SMALL, slots=3, columns=5) == 680 + 240 + 600
    # products 2 * 340 per slot; scores and values 4 * 2 layers * 4 * 5 per slot
    assert gpu_limits.decoding_flops(SMALL, slots=3, columns=5) == 3 * (680 + 160)


def test_flops_of_an_update():
    # 2 episodes of 3 + 4 tokens: 2 * 300 * 7 for the layers, 2 * 2 * 4 * 49 for attention, 2 * 40 * 4 for the logits
    once = 2 * (4_200 + 784 + 320)
    assert gpu_limits.forward_flops(SMALL, 2, 3, 4) == once
    assert gpu_limits.forward_flops(SMALL, 2, 3, 4, head=False) == once - 2 * 320
    # five columns on average
    prefill = 2 * (1_800 + 144)
    decoding = 4 * 2 * (680 + 160)
    expected = prefill + decoding + 2 * once + (once - 640) + 3 * 4 * once
    assert gpu_limits.update_flops(SMALL, 2, 3, 4, passes=4, reward=True) == expected


def test_times_are_those_of_the_slower_part():
    """At 100 bytes/s and 10 FLOP/s the products decide, at 10 bytes/s and 1,000 FLOP/s the memory."""
    assert gpu_limits.decoding_seconds(SMALL, GPU(100, 10), 3, 5)[0] == 252
    assert gpu_limits.decoding_seconds(SMALL, GPU(10, 1_000), 3, 5)[0] == 152
    fast = gpu_limits.decoding_seconds(SMALL, GPU(1e15, 1e15), 3, 5)[1]
    assert fast == pytest.approx(525 * 2 / 30 * 2e-6), "the kernels of two layers are started one after another"


def test_gpus_are_found_by_the_names_of_the_driver():
    assert gpu_named("NVIDIA GeForce RTX 4090") == GPUS["RTX 4090"]
    assert gpu_named("NVIDIA H100 80GB HBM3") == GPUS["H100"]
    assert gpu_named("NVIDIA GeForce RTX 4090 Laptop GPU") is gpu_named("NVIDIA A40") is None


def test_the_log_has_the_printed_table(capsys):
    gpu_limits.main([])
    printed = capsys.readouterr().out.splitlines()[2:]
    page = (ROOT / "benchmarks" / "experiment_log.md").read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in printed]
    missing = [row for row in cells if f"| {' | '.join(row[1:])} |" not in page]
    assert len(cells) == 8 and not missing
