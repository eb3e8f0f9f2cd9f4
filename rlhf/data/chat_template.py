"""Text to ids and back, through the chat template. The only place that renders.

One render serves reward-model training, scoring and RL. Text from the data never becomes a special token: the chat
template's own text and the messages' text are tokenized apart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import jinja2
from transformers import PreTrainedTokenizerBase

from rlhf.utils.errors import UserError

_SLOT = "\ue000{}\ue001"  # private-use characters: no template writes them


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> list[int]:
    """Ids of a prompt, up to where the reply begins.

    With the tokenizer's chat template if it has one; else (a base model) the contents, a blank line between them,
    and the reply follows at once. Template and contents are tokenized as one text, as the model was tuned on it,
    unless a content would write special tokens so: then apart.
    """
    contents = [m["content"] for m in messages]
    if tokenizer.chat_template is None:
        start = tokenizer("").input_ids  # BOS, where this tokenizer sets one
        bos = start[:1] if start and start[0] == tokenizer.bos_token_id else []
        return bos + encode_text(tokenizer, "\n\n".join(contents))
    slots = [{**m, "content": _SLOT.format(i)} for i, m in enumerate(messages)]
    try:
        text, whole = (
            tokenizer.apply_chat_template(list(chat), tokenize=False, add_generation_prompt=True)
            for chat in (slots, messages)
        )
    except Exception as error:  # some refuse a system message; and a template is code, which may raise anything
        roles, reason = ", ".join(m["role"] for m in messages), (str(error).splitlines() or [""])[0]
        kind = "refuses it" if isinstance(error, jinja2.TemplateError) else f"fails, {type(error).__name__}"
        raise UserError(
            f"the chat template {kind} ({reason:.200}): a prompt of {roles}, {contents[-1]!r:.40}. Give chats as the "
            "start model's template wants them"
        ) from None
    ids: list[int] = []
    for i, piece in enumerate(re.split("\ue000([0-9]+)\ue001", text)):
        if i % 2:
            ids += encode_text(tokenizer, contents[int(piece)])
        elif piece:
            ids += tokenizer(piece, add_special_tokens=False).input_ids
    together, marks = tokenizer(whole, add_special_tokens=False).input_ids, _marks(tokenizer)
    return together if [i for i in together if i in marks] == [i for i in ids if i in marks] else ids


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The first mark that the chat template writes behind a reply; None where it writes none, or fails (which is said
    where a prompt is rendered)."""
    if tokenizer.chat_template is None:
        return None
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SLOT.format(0)}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception:  # a template may raise anything: it is reported if a prompt is rendered
        return None
    ids, marks = tokenizer(text.split(_SLOT.format(0))[-1], add_special_tokens=False).input_ids, _marks(tokenizer)
    return next((i for i in ids if i in marks), None)


def _marks(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that no content may write."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special | set(tokenizer.all_special_ids) | _turn_marks(tokenizer)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of text that came from data or a model: no special token is added, and none can be written into it."""
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    return ids if _turn_marks(tokenizer).isdisjoint(ids) else _encode_by_pieces(tokenizer, text)


def _turn_marks(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens of the chat template that the tokenizer does not call special, as DeepSeek's `<｜User｜>`: those are not
    split, and a text could write them."""
    if not tokenizer.is_fast or tokenizer.chat_template is None:
        return set()
    template, added = str(tokenizer.chat_template), tokenizer.added_tokens_decoder.items()
    return {i for i, token in added if not token.special and token.content.strip() and token.content in template}


def _encode_by_pieces(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a text by the tokenizer's steps, but for the one that looks for added tokens."""
    backend = tokenizer.backend_tokenizer
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    words = [text]
    if backend.pre_tokenizer is not None:
        words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return [token.id for word in words for token in backend.model.tokenize(word)]


def encode_completion(tokenizer: PreTrainedTokenizerBase, text: str, ended: bool = True) -> list[int]:
    """Ids of a reply; a reply that ended has its EOS."""
    return encode_text(tokenizer, text) + ([tokenizer.eos_token_id] if ended else [])


def decode_completion(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of a reply's ids, without special tokens."""
    return tokenizer.decode(ids, skip_special_tokens=True)
