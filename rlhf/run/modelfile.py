"""Writes a Modelfile, from which Ollama creates a model with the run's chat template and sampling settings.

Ollama's templates are Go's text/template, and tokenizers have Jinja templates. A Jinja template is not parsed: it
renders a few chats, the text around the messages is read from the results, and the template made from it must render
other chats in the same way. A chat template that does more than write text around messages is not translated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf.data.chat_template import end_of_turn
from rlhf.data.messages import Message
from rlhf.utils.html import render

MODELFILE = "Modelfile"
SLOT = "\ue000{}\ue001"  # private-use characters, which no chat template writes
# chats for the comparison, as role and content; the first letters of the roles are enough
CONTENTS = ("What is 2 + 3?", " a space on both sides ", "two\n\nlines\n", '"quotes" and {{ braces }}', "<b>&amp;</b>")
CHATS = ("u", "su", "uau", "suau", "uauau", "suauau")
ROLES = {"s": "system", "u": "user", "a": "assistant"}


class NotTranslated(Exception):
    """A chat template that a Go template cannot reproduce. The message is the reason."""


@dataclass(frozen=True)
class Turns:
    """A chat template that only writes text around messages."""

    default_system: str  # written first if the first message is not a system message
    before: Mapping[str, str]  # role -> text before the content
    after: Mapping[str, str]  # role -> text after the content
    generation_prompt: str

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text of a chat, up to the position where the completion starts."""
        first = "" if messages[0]["role"] == "system" else self.default_system
        turns = "".join(f"{self.before[m['role']]}{m['content']}{self.after[m['role']]}" for m in messages)
        return first + turns + self.generation_prompt

    def to_go(self) -> str:
        """Return the same template for Ollama."""
        cases = "{{ else ".join(
            f'if eq .Role "{role}" }}}}{_literal(self.before[role])}{{{{ .Content }}}}{_literal(self.after[role])}'
            for role in self.before
        )
        default = f'{{{{ if and (eq $i 0) (ne .Role "system") }}}}{_literal(self.default_system)}{{{{ end }}}}'
        start = "{{ range $i, $_ := .Messages }}" + (default if self.default_system else "")
        return f"{start}{{{{ {cases}{{{{ end }}}}{{{{ end }}}}{_literal(self.generation_prompt)}"


# for base models: the contents, joined with blank lines, as rlhf.data.chat_template.encode_prompt joins them
PLAIN = "{{ range $i, $_ := .Messages }}{{ if $i }}\n\n{{ end }}{{ .Content }}{{ end }}"


def _literal(text: str) -> str:
    """Return text for a Go template. A `{` at its end would become a part of the action after it."""
    return re.sub(r"\{{2,}|\{\Z", r'{{ "\g<0>" }}', text)


def modelfile(tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any]) -> str:
    """Return the Modelfile of a saved model. `settings` are the run's, by name."""
    try:
        template, reason = go_template(tokenizer), None
    except NotTranslated as error:
        template, reason = None, str(error)
    ends = dict.fromkeys([tokenizer.eos_token_id, end_of_turn(tokenizer)])
    stops = [tokenizer.decode([token]) for token in ends if token is not None]
    stops = [stop for stop in stops if not set(stop) & {'"', "\n"}]  # Ollama cannot read them
    return render("Modelfile", go=template, reason=reason, stops=stops, settings=settings)


def go_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the tokenizer's chat template for Ollama. Raises NotTranslated."""
    if tokenizer.chat_template is None:
        return PLAIN
    try:
        turns = read_turns(tokenizer)
        wrong = next((chat for chat in _chats() if turns.render(chat) != _rendered(tokenizer, chat)), None)
    except NotTranslated:
        raise
    except Exception as error:  # a chat template is code, and may raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise NotTranslated(f"the chat template rejects chats that Ollama may send ({reason:.100})") from None
    if wrong is not None:
        roles = ", ".join(message["role"] for message in wrong)
        raise NotTranslated(f"the chat template does more than write text around messages (roles {roles})")
    template = turns.to_go()
    if '"""' in template:
        raise NotTranslated('the chat template contains """, which ends a text in a Modelfile')
    return template


def _chats() -> list[list[Message]]:
    """Return chats with all contents in all places."""
    return [
        [{"role": ROLES[letter], "content": CONTENTS[(i + first) % len(CONTENTS)]} for i, letter in enumerate(chat)]
        for chat in CHATS
        for first in range(len(CONTENTS))
    ]


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], prompt: bool = True) -> str:
    """Return a chat as Ollama must render it: without BOS if the tokenizer adds it, because Ollama adds it, too."""
    text, bos = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt), ""
    if tokenizer.bos_token_id is not None and tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]:
        bos = tokenizer.bos_token
    if not text.startswith(bos):
        raise NotTranslated(f"Ollama starts every prompt with {bos}, and the chat template does not")
    return text.removeprefix(bos)


def read_turns(tokenizer: PreTrainedTokenizerBase) -> Turns:
    """Return the text that the chat template writes around messages. Raises NotTranslated, or what the template
    raises."""
    user = _around(tokenizer, "u", prompt=False)
    user_prompt = _around(tokenizer, "u")
    chat, answered, system = (_around(tokenizer, roles, prompt=False) for roles in ("uau", "ua", "su"))
    after = {"user": user[1], "assistant": answered[-1]}
    before = {"assistant": _without(chat[1], start=after["user"]), "user": _without(chat[2], start=after["assistant"])}
    before["system"], after["system"] = system[0], _without(system[1], end=before["user"])
    roles = ("system", "user", "assistant")
    return Turns(
        default_system=_without(user[0], end=before["user"]),
        before={role: before[role] for role in roles},
        after={role: after[role] for role in roles},
        generation_prompt=_without(user_prompt[1], start=after["user"]),
    )


def _around(tokenizer: PreTrainedTokenizerBase, roles: str, prompt: bool = True) -> list[str]:
    """Return the pieces of text before, between and after the messages of a chat."""
    slots = [SLOT.format(i) for i in range(len(roles))]
    messages = [{"role": ROLES[letter], "content": slot} for letter, slot in zip(roles, slots, strict=True)]
    pieces, rest = [], _rendered(tokenizer, messages, prompt)
    for slot in slots:
        piece, found, rest = rest.partition(slot)
        if not found:
            raise NotTranslated("the chat template omits or moves messages")
        pieces.append(piece)
    return [*pieces, rest]


def _without(text: str, start: str = "", end: str = "") -> str:
    """Return a text without its `start` and `end`. Raises NotTranslated if it does not have them."""
    if not (text.startswith(start) and text.endswith(end) and len(text) >= len(start) + len(end)):
        raise NotTranslated("the text that the chat template writes around a message depends on other messages")
    return text[len(start) : len(text) - len(end)]
