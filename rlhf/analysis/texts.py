"""Statistics of texts: distinct-n and repetition."""

from __future__ import annotations

import re
from collections.abc import Sequence


def words_of(text: str) -> list[str]:
    """Return words and single punctuation characters in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.casefold())


def _grams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return list(zip(*(words[i:] for i in range(n)), strict=False))


def distinct(texts: Sequence[str], n: int) -> float:
    """Return distinct-n (Li et al. 2016, arXiv 1510.03055): unique word n-grams / all word n-grams, over all texts.

    It falls with the amount of text, so compare equal amounts. It is 0 if there are no n-grams.
    """
    grams = [gram for text in texts for gram in _grams(words_of(text), n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repetition(text: str, n: int = 4) -> float:
    """Return the share of a text's word n-grams that are repetitions; 0 for fewer than n words.

    This is seq-rep-n of Welleck et al. 2020, arXiv 1908.04319.
    """
    grams = _grams(words_of(text), n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
