"""One row of data."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Example:
    """One row of data: a prompt and, for preference pairs, its two completions."""

    messages: tuple[dict[str, str], ...]
    chosen: str | None = None
    rejected: str | None = None
    rejected_ended: bool = True  # False: the completion was cut off, so no EOS follows it
    topic: str | None = None
    flaw: str | None = None  # what is wrong with the rejected completion, if the data contains it
    columns: dict[str, Any] = field(default_factory=dict)  # all columns of the row, for reward functions
    conversational: bool = False  # the row's prompt is a list of messages, so reward functions receive messages
    answer: str | None = field(default=None, compare=False)  # the last message of a chat
    where: str = field(default="", compare=False)  # the row's position, for messages

    @property
    def question(self) -> str:
        """The text of the user messages, normalised as the key for splits.

        Questions that differ only in case, spacing, invisible characters or Unicode form (NFC or NFD) are equal.
        """
        return normalised("\n".join(self._user_turns))

    @property
    def first_turn(self) -> str:
        """The text of the first user message, normalised as `question`."""
        return normalised(self._user_turns[0])

    @property
    def _user_turns(self) -> list[str]:
        return [m["content"] for m in self.messages if m["role"] == "user"]


def normalised(text: str) -> str:
    """Return a text without differences in case, spacing, invisible characters and Unicode form."""
    visible = "".join(c for c in unicodedata.normalize("NFC", text).casefold() if unicodedata.category(c) != "Cf")
    return unicodedata.normalize("NFC", " ".join(visible.split()))
