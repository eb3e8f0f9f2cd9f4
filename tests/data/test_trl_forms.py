"""Tests that a row has the same prompt and completions here as in trl.data_utils, for each form that TRL knows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from trl.data_utils import is_conversational, maybe_convert_to_chatml, maybe_extract_prompt

from rlhf.data.examples import answer_of, examples_of
from rlhf.data.formats import parts_of

USER = {"role": "user", "content": "What color is the sky?"}
BLUE = {"role": "assistant", "content": "It is blue."}
GREEN = {"role": "assistant", "content": "It is green."}
SYSTEM = {"role": "system", "content": "Be brief."}
MORE = [USER, BLUE, {"role": "user", "content": "And the sea?"}]


def share_gpt(messages: list[dict]) -> list[dict]:
    return [{"from": m["role"], "value": m["content"]} for m in messages]


ROWS: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": "The sky is"},
    "prompt, chat": {"prompt": [USER]},
    "prompt, chat with a system message": {"prompt": [SYSTEM, USER]},
    "prompt and completion": {"prompt": "The sky is", "completion": " blue."},
    "prompt and completion, chats": {"prompt": [USER], "completion": [BLUE]},
    "pair": {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    "pair, chats": {"prompt": [SYSTEM, USER], "chosen": [BLUE], "rejected": [GREEN]},
    "pair after several turns": {"prompt": MORE, "chosen": [BLUE], "rejected": [GREEN]},
    "implicit prompt": {"chosen": "The sky is blue.", "rejected": "The sky is green."},
    "implicit prompt, two spaces": {"chosen": "a  b", "rejected": "a  c"},
    "implicit prompt, chats": {"chosen": [USER, BLUE], "rejected": [USER, GREEN]},
    "implicit prompt, several turns": {"chosen": [*MORE, BLUE], "rejected": [*MORE, GREEN]},
    "text prompt, and chats that contain it": {
        "prompt": USER["content"],
        "chosen": [USER, BLUE],
        "rejected": [USER, GREEN],
    },
    "from and value": {"conversations": share_gpt([SYSTEM, USER])},
    "pair, from and value": {"prompt": share_gpt([USER]), "chosen": share_gpt([BLUE]), "rejected": share_gpt([GREEN])},
}


def chat(value: Any, role: str) -> list[dict]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def by_trl(row: dict) -> tuple[list[dict], list[str | None]]:
    """Return prompt, chosen and rejected, or prompt and completion, as TRL splits a row."""
    found = maybe_extract_prompt(maybe_convert_to_chatml(copy.deepcopy(row)))
    texts = []
    for name in ("chosen", "rejected", "completion"):
        given = chat(found.get(name, []), "assistant")
        texts.append(given[0]["content"] if given else None)
        assert len(given) < 2
    return chat(found.get("prompt", found.get("messages")), "user"), texts


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_row_has_the_parts_that_trl_finds(row):
    messages, (chosen, rejected, completion) = by_trl(row)
    parts = parts_of(copy.deepcopy(row), "row 1")
    assert (list(parts.messages), parts.chosen, parts.rejected) == (messages, chosen, rejected)
    assert answer_of(examples_of([copy.deepcopy(row)])[0]) == (chosen or completion)
    assert parts.conversational == (is_conversational(maybe_convert_to_chatml(copy.deepcopy(row))) and not_mixed(row))


def not_mixed(row: dict) -> bool:
    """TRL's is_conversational reads one column of a row, in no order: a text prompt with chats gives either result."""
    return not isinstance(row.get("prompt"), str)


def test_the_last_answer_of_a_chat_is_no_part_of_its_prompt():
    """TRL trains on it: its column `messages` is for supervised training."""
    parts = parts_of({"messages": [*MORE, BLUE]}, "row 1")
    assert (list(parts.messages), parts.answer) == (MORE, BLUE["content"])


ODD = [
    {"prompt": []},
    {"prompt": [{}]},
    {"messages": [None]},
    {"chosen": "", "rejected": ""},
    {"prompt": "a?", "chosen": [], "rejected": []},
    {"conversations": []},
    {"conversations": [{"from": "stranger", "value": "a?"}]},
    {"prompt": [{"role": "user", "content": None}]},
    {"prompt": "a?", "chosen": "b", "rejected": None},
]


@pytest.mark.parametrize("row", ODD, ids=repr)
def test_rows_that_trl_accepts_or_fails_on_are_refused_with_their_position(row, user_error):
    """Of these nine, TRL returns seven as they are, and fails at two without the position of the row."""
    with user_error("row 7"):
        parts_of(copy.deepcopy(row), "row 7")
