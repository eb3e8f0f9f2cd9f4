"""The drawing of mutations: which tokens are changed, and that the same seed draws the same ones."""

from __future__ import annotations

import ast

import pytest

from tests.mutations import COUNT, ROOT, TESTS, drawn, mutations_of

CODE = '''def f(*rows: A | B, last: int = 0) -> C | D:
    """Return 0 and not 1."""
    if not rows:
        raise ValueError("0" if last == 0 else "1")
    return rows[0] * 5, f"{last + 1}", *rows
'''


def test_tokens_of_texts_annotations_and_errors_stay():
    found = list(mutations_of("f.py", CODE))
    assert [(m.line, m.before, m.after) for m in found] == [
        (1, "0", "1"), (3, "not", ""), (5, "0", "1"), (5, "*", "/")
    ]  # fmt: skip
    assert found[3].apply(CODE) == CODE.replace("rows[0] * 5", "rows[0] / 5")


@pytest.mark.ci
def test_the_same_seed_draws_the_same_mutations_and_each_compiles():
    mutations = drawn()
    assert mutations == drawn() and len(set(mutations)) == COUNT
    for mutation in mutations:
        text = (ROOT / mutation.file).read_text("utf-8")
        assert mutation.file.split("/")[1] in TESTS
        assert ast.dump(ast.parse(mutation.apply(text))) != ast.dump(ast.parse(text)), mutation
