"""Messages and texts of the data: chats with `role` and `content`, ShareGPT, and checks of texts."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from typing import Any

from rlhf.utils.errors import UserError

Message = dict[str, str]
# role -> role of the chat; developer is OpenAI's newer name
ROLES = {**{role: role for role in ("system", "user", "assistant", "tool")}, "developer": "system"}
# "from" of a ShareGPT message -> role
SHAREGPT_ROLES = {
    **ROLES,
    **dict.fromkeys(("human",), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("observation", "function", "function_response", "tool_response"), "tool"),
}
MAX_CHAT_TEXT = 1_000_000  # characters; a longer text is not parsed
_NOT_TEXT = re.compile("[\x00\ud800-\udfff]")
# a quoted text, or the gap between two messages of an array, which numpy prints without a comma
_TEXT_OR_GAP = re.compile(r"""(\\.|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|\}\s+\{""", re.DOTALL)


def messages_of(chat: Any, where: str, name: str = "content") -> list[Message]:
    """Return a chat as messages with the keys role and content, without empty system messages. `name` names the
    contents in errors. A chat may be a text, as in CSV."""
    chat = chat_in(chat) or chat
    if not isinstance(chat, list) or not all(isinstance(m, dict) for m in chat):
        raise UserError('not a list of {"role", "content"} messages', where, "Correct or remove that row")
    return [_message(m, where, name) for m in chat if not _is_empty_system(m)]


def chat_in(text: Any) -> list[dict] | None:
    """Return the messages of a text that is a chat, as JSON or as Python and numpy print lists; None for any other
    value. Such texts come from json.dumps, and from chats that were saved as CSV."""
    if not isinstance(text, str) or len(text) > MAX_CHAT_TEXT or not re.match(r"\s*\[\s*\{", text):
        return None
    with_commas = _TEXT_OR_GAP.sub(lambda found: found[1] or "}, {", text.strip())
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, AttributeError, SyntaxError, TypeError, RecursionError, MemoryError):
            chat = read(with_commas)
            if all(len(m.keys() & {"role", "content", "from", "value"}) > 1 for m in chat):
                return chat
    return None


def _is_empty_system(message: dict) -> bool:
    """True for a system message without text, which many ShareGPT files contain."""
    role, content, _ = _form_of(message)
    text = message.get(content)
    return message.get(role) == "system" and isinstance(text, str) and not text.strip()


def _form_of(message: dict) -> tuple[str, str, dict[str, str]]:
    """Return the names of role and content in a message, and the known roles. In a table that contains both forms,
    the names of the other form have null."""
    if message.get("role") is None and message.get("from") is not None:
        return "from", "value", SHAREGPT_ROLES
    return "role", "content", ROLES


def _message(message: dict, where: str, name: str) -> Message:
    if message.get("tool_calls"):
        raise UserError("a message with tool_calls", where, "Remove that row, because completions cannot call tools")
    role_name, content_name, roles = _form_of(message)
    if not {role_name, content_name} <= message.keys():
        raise UserError('not a list of {"role", "content"} messages', where, "Correct or remove that row")
    role = message[role_name]
    if not isinstance(role, str) or role not in roles:
        raise UserError(f"unknown chat role {row_value(role, repr)}", where, f"Use one of {', '.join(roles)}")
    return {"role": roles[role], "content": check_text(_joined(message[content_name]), name, where)}


def _joined(content: Any) -> Any:
    """Return the text of a content that is a list of text parts. Other contents are returned as they are."""
    if isinstance(content, list) and content:
        parts = [part if isinstance(part, dict) and part.get("type") == "text" else {} for part in content]
        texts = [part.get("text") for part in parts]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    return content


def check_text(value: Any, key: str, where: str) -> str:
    """Return a text from the data. Raises UserError if it is not text, empty, or not valid Unicode."""
    if not isinstance(value, str):
        raise UserError(f"{key} is {row_value(value)}, not text", where, "Correct or remove that row")
    if not value.strip():
        raise UserError(f"{key} is empty", where, "Correct or remove that row")
    found = _NOT_TEXT.search(value)
    if found:
        what = "a NUL character" if found[0] == "\0" else "a lone surrogate"
        raise UserError(f"{key} contains {what} (character {found.start() + 1})", where, "Correct or remove that row")
    return value


def row_value(value: Any, as_text: Any = None) -> str:
    """Return a value for an error message. Lists and objects are shown by their type only: they may be deep."""
    kinds = {list: "a list", dict: "an object"}
    as_text = as_text or (lambda v: json.dumps(v, default=str))
    return kinds.get(type(value)) or as_text(value)[:40]
