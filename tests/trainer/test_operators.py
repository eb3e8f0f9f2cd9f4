"""Counts the operators of an optimizer step on a GPU, on fake tensors, so that no GPU is needed."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.fake_gpu import optimizer_step

BEFORE = 2791  # with every weight converted in every pass: commit 6784a37, the same micro-batch
LAYERS = 30


@pytest.fixture(scope="module")
def counted() -> Counter:
    """Every layer has the same operators, so two depths give those of 30 layers."""
    two = optimizer_step(2)
    three = optimizer_step(3)
    return Counter({name: two[name] + (LAYERS - 2) * (three[name] - two[name]) for name in two | three})


def test_an_optimizer_step_has_at_least_600_operators_fewer(counted):
    assert BEFORE - 1200 < counted.total() <= BEFORE - 600


def test_no_weight_is_converted_alone(counted):
    """Per layer, forward: the rows of both norms, queries with keys. Backward: the gradients of both outputs, of
    queries with keys, of both rows; and both rows again. Outside of the layers: the head's rows and gradients."""
    assert counted["aten._to_copy.default"] <= LAYERS * 10 + 10


def test_gradients_of_matrices_are_written_in_float32(counted):
    """Per layer: q, k and v together, out, gate and up together, down. The head: its logits and two gradients."""
    assert counted["aten.mm.dtype"] == LAYERS * 4 + 3


def test_operators_over_all_weights_or_logits_occur_once(counted):
    names = "_foreach_copy_.default", "_fused_adamw_.default", "_log_softmax.default", "_foreach_norm.Scalar"
    assert [counted[f"aten.{name}"] for name in names] == [1] * 4
