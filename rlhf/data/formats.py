"""Row formats: finds the prompt and the two completions in a row. TRL's formats, chats and ShareGPT."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from rlhf.data.messages import Message, check_text, messages_of
from rlhf.data.row import Example
from rlhf.utils.command_lines import command
from rlhf.utils.errors import UserError

EXPECTED_COLUMNS = '"question", "prompt" or "messages" (a preference pair also needs "chosen" and "rejected")'
PROMPT_COLUMNS = ("prompt", "question", "messages", "conversations")  # the first one that a row has is its prompt
CHATS = ("messages", "conversations")  # prompts with the last answer, which is not part of the prompt
# columns that hold the prompt in other trainers' data, for hints
PROMPT_LIKE = ("instruction", "input", "query", "problem", "user", "task", "text", "context", "request")
_UNSUPPORTED = {  # column -> why a row that has it would lose something
    "tools": "completions cannot call tools",
    "image": "prompts with images are not supported",
    "images": "prompts with images are not supported",
}
_NOTHING = ("[]", "{}", "null", "None")  # an empty column that was saved as text


Sides = dict[str, str | list[Message]]  # "chosen" and "rejected" -> a text or a chat


def parts_of(row: dict, where: str) -> Example:
    """Return the prompt and the completions of a row, and nothing else of it. Raises UserError if the row is invalid;
    `where` is its position.

    The prompt is the first of PROMPT_COLUMNS that has a value. A pair without any of them has an implicit prompt: the
    common beginning of `chosen` and `rejected`.
    """
    for name, why in _UNSUPPORTED.items():
        if row.get(name) and row[name] not in _NOTHING:
            raise UserError(
                f"column {name!r}", f"{where}, and {why}", f"Remove it, or rename it: --columns NEW={name}"
            )
    present = [key for key in PROMPT_COLUMNS if key in row]
    key = next((key for key in present if row[key] is not None), present[0] if present else None)
    sides = _sides(row, where)
    if key is not None and (key in CHATS or isinstance(row[key], list)):
        chat = messages_of(row[key], where)
        messages = _with_system(_prompt_chat(chat, key, sides, where), row, where)
        answer = chat[-1]["content"] if chat[-1]["role"] == "assistant" else None
        return Example(messages, **_completions(sides, messages, where), conversational=True, answer=answer)
    if key is not None:
        return _with_text_prompt(row, key, sides, where)
    if not sides:
        raise _no_prompt(row, where)
    return _with_implicit_prompt(row, sides, where)


def _with_implicit_prompt(row: dict, sides: Sides, where: str) -> Example:
    """Return the parts of a pair whose prompt is the common beginning of its two sides."""
    chosen, rejected = sides.values()
    if isinstance(chosen, list) and isinstance(rejected, list):
        messages, *both = _split_chats(chosen, rejected, where)
        return Example(_with_system(messages, row, where), *both, conversational=True)
    if isinstance(chosen, str) and isinstance(rejected, str):
        if _prompt_like(row):
            raise _no_prompt(row, where)
        prompt, *both = _split_texts(chosen, rejected, row, where)
        return Example(_with_system([{"role": "user", "content": prompt}], row, where), *both)
    raise UserError("one of chosen and rejected is text and the other one is a chat", where, "Use one form for both")


def _with_text_prompt(row: dict, key: str, sides: Sides, where: str) -> Example:
    """Return the parts of a row whose prompt is a text. Its completions may be chats that begin with the prompt."""
    text = check_text(row[key], key, where)
    messages = _with_system([{"role": "user", "content": text}], row, where)
    if sides and all(isinstance(side, list) and len(side) > 1 for side in sides.values()):
        head, *both = _split_chats(*sides.values(), where)
        if not any(m["role"] == "user" and m["content"].split() == text.split() for m in head):
            raise UserError(f"the chats in chosen and rejected do not contain the {key}", where, "Correct that row")
        return Example(_with_system(head, row, where), *both)
    return Example(messages, **_completions(sides, messages, where))


# --- prompts ---------------------------------------------------------------------------------------------------------


def _prompt_chat(messages: list[Message], key: str, sides: Sides, where: str) -> list[Message]:
    """Return the messages of a prompt. A last assistant message of a chat is removed, because the model writes its
    own. Raises UserError if that would lose the beginning of a completion."""
    if messages and messages[-1]["role"] == "assistant":
        last = (messages, messages[-1:], messages[-1]["content"])
        if key not in CHATS or (sides and not any(side in last for side in sides.values())):
            raise UserError(
                f"an assistant message at the end of {key}",
                where,
                "Remove that message: the model starts its own, and cannot continue one",
            )
        messages = messages[:-1]
    return _require_user(messages, where)


def _require_user(messages: list[Message], where: str) -> list[Message]:
    if not any(m["role"] == "user" for m in messages):
        raise UserError("no user message in the chat", where, "Add one")
    return messages


def _with_system(messages: list[Message], row: dict, where: str) -> tuple[Message, ...]:
    """Return the messages, with the text of the column `system` in front."""
    if row.get("system") in (None, ""):
        return tuple(messages)
    system = {"role": "system", "content": check_text(row["system"], "system", where)}
    others = [m for m in messages if m["role"] == "system"]
    if not others:
        return (system, *messages)
    if others[0]["content"].strip() != system["content"].strip():
        raise UserError("the column system and the chat have different system messages", where, "Keep one")
    return tuple(messages)


def _no_prompt(row: dict, where: str) -> UserError:
    """Return the error for a row without a prompt, with the column that may be the prompt."""
    like = _prompt_like(row)
    columns = sorted(map(str, row))
    fix = ""
    if like:
        new = like[0].lower() if like[0].lower() in PROMPT_COLUMNS else "prompt"
        fix = f". If {like[0]!r} is the prompt, add {columns_flag(new, like[0])}"
    if "instruction" in row and row.get("input"):
        fix = ". If the prompt is 'instruction' and 'input' together, write both into one column 'prompt'"
    elif "conversation" in row:
        fix = f". If 'conversation' is a chat, add {columns_flag('messages', 'conversation')}"
    return UserError(f"no prompt among the columns {columns}", where, f"Each row needs {EXPECTED_COLUMNS}{fix}")


def columns_flag(new: str, old: str) -> str:
    """Return the flag that renames a column, quoted for the shell if necessary."""
    return command("--columns", f"{new}={old}")


def _prompt_like(row: dict) -> list[str]:
    """Return the columns whose name suggests that they contain the prompt."""
    names = {name.lower(): name for name in row if isinstance(name, str)}
    known = [*PROMPT_COLUMNS, *PROMPT_LIKE, *difflib.get_close_matches("prompt", names, cutoff=0.82)]
    return [names[name] for name in known if name in names]


# --- completions -----------------------------------------------------------------------------------------------------


def _sides(row: dict, where: str) -> Sides:
    """Return what is in chosen and rejected; {} for a row without a pair: both are missing or null."""
    if row.get("chosen") is None and row.get("rejected") is None:
        return {}
    for name in ("chosen", "rejected"):
        if name not in row:
            raise UserError(
                f'no "{name}" among the columns {sorted(map(str, row))}',
                where,
                'A pair needs both "chosen" and "rejected"',
            )
    return {name: _side(row[name], name, where) for name in ("chosen", "rejected")}


def completion_of(chat: Any, prompt: Sequence[Message], where: str) -> str:
    """Return a completion that is a chat as text. Raises UserError if it is not one message after the prompt."""
    return _completion(_side(chat, "completion", where), "completion", prompt, where)


def _side(value: Any, name: str, where: str) -> str | list[Message]:
    chat = [value] if isinstance(value, dict) else value  # LLaMA-Factory writes one message
    if isinstance(chat, list) and chat and all(isinstance(m, dict) for m in chat):
        return messages_of(chat, where, name)
    return check_text(value, name, where)


def _completions(sides: Sides, prompt: Sequence[Message], where: str) -> dict[str, str]:
    """Return the completions of a pair by name."""
    return {name: _completion(side, name, prompt, where) for name, side in sides.items()}


def _completion(side: str | list[Message], name: str, prompt: Sequence[Message], where: str) -> str:
    """Return one completion as text. A chat may repeat the prompt before it, with or without its system message."""
    if isinstance(side, str):
        return side
    for head in (list(prompt), [m for m in prompt if m["role"] != "system"]):
        if len(side) > len(head) and side[: len(head)] == head:
            return _only_message(side[len(head) :], name, where)
    return _only_message(side, name, where)


def _only_message(messages: list[Message], name: str, where: str) -> str:
    """Return the text of the one assistant message after a prompt."""
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        roles = ", ".join(m["role"] for m in messages)
        raise UserError(
            f"{name} is not one assistant message after the prompt (roles: {roles})",
            where,
            "Put all messages before the last one into the prompt, or remove that row",
        )
    return check_text(messages[0]["content"], name, where)


def _split_chats(chosen: list[Message], rejected: list[Message], where: str) -> tuple[list[Message], str, str]:
    """Return the common messages of two chats, and the message after them in each."""
    longest = min(len(chosen), len(rejected)) - 1
    common = next((i for i in range(longest) if chosen[i] != rejected[i]), longest)
    if not any(m["role"] == "user" for m in chosen[:common]) and any(m["role"] == "user" for m in chosen[common:]):
        raise UserError(
            "chosen and rejected have no user message in common",
            where,
            "The chats of a pair must begin with the same messages",
        )
    prompt = _require_user(chosen[:common], where)
    return prompt, _only_message(chosen[common:], "chosen", where), _only_message(rejected[common:], "rejected", where)


def _split_texts(chosen: str, rejected: str, row: dict, where: str) -> tuple[str, str, str]:
    """Return the common beginning of two texts, and the rest of each. A space before the rest belongs to the rest, as
    in TRL's `extract_prompt`."""
    if chosen == rejected:
        raise UserError("chosen equals rejected", where, "Correct or remove that row")
    common = next((i for i, (c, r) in enumerate(zip(chosen, rejected, strict=False)) if c != r), None)
    prompt = chosen[:common] if common is not None else min(chosen, rejected, key=len)
    prompt = prompt.removesuffix(" ")
    if not prompt.strip():
        raise _no_prompt(row, where)
    rests = chosen[len(prompt) :], rejected[len(prompt) :]
    if not all(rest.strip() for rest in rests):
        raise UserError(
            "no prompt, and chosen or rejected is the beginning of the other one", where, "Add a column prompt"
        )
    return (prompt, *rests)
