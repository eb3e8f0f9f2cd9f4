"""Tests statistics of texts against values worked out by hand."""

from __future__ import annotations

from rlhf.analysis.texts import distinct, repetition


def test_distinct_matches_hand_computed_values():
    """The first text has 3 different words of 4. Both texts have 4 different words of 6 and 4 different pairs of 4."""
    assert distinct(["the cat the dog"], 1) == 3 / 4
    assert distinct(["The cat the dog", "cat runs"], 1) == 4 / 6
    assert distinct(["The cat the dog", "cat runs"], 2) == 1.0
    assert distinct(["", "one"], 2) == 0.0


def test_repetition_matches_hand_computed_values():
    """Seven times "yes" has four 4-grams; three repeat the first. A text of fewer than four words has no 4-gram."""
    assert repetition("yes yes yes yes yes yes yes") == 3 / 4
    assert repetition("a b c d e f g") == 0.0
    assert repetition("a b c") == repetition("") == 0.0
