"""From a hub dataset or a JSONL file to prompts in ids: read, checked, split, rendered. The only place that renders.

One render serves reward-model training, scoring and PPO. Text from the data never becomes a special token: the chat
template's own text and the messages' text are tokenized apart.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from rlhf.settings.types import Split
from rlhf.utils.errors import UserError, raise_if
from rlhf.utils.hub import require_hub
from rlhf.utils.paths import is_path, missing_path

_NOT_TEXT = re.compile("[\x00\ud800-\udfff]")
FORGIVEN_SHARE = 0.05  # of a hub dataset's rows
REPEATED_SHARE = 0.05  # of the rows, above which it is told
COLUMNS = ("system", "question", "prompt", "messages", "chosen", "rejected", "rejected_ended", "topic", "flaw")
ROLES = ("system", "user", "assistant", "tool")
READABLE = '"question" (or "prompt"), or "messages"; pairs have "chosen" and "rejected" beside it'


@dataclass(frozen=True)
class Example:
    """One row of data: a prompt, and for pairs its two replies."""

    messages: tuple[dict[str, str], ...]
    chosen: str | None = None
    rejected: str | None = None
    rejected_ended: bool = True  # False: the reply was cut off, so that no EOS follows it
    topic: str | None = None
    flaw: str | None = None  # what is wrong with the rejected reply, where the data says so
    columns: dict[str, Any] = field(default_factory=dict)  # the whole row, for reward functions

    @property
    def question(self) -> str:
        """What the user says, as the key for splits: case, spacing, invisible characters and the Unicode form (NFC or
        NFD) do not make it another question."""
        text = "\n".join(m["content"] for m in self.messages if m["role"] == "user")
        shown = "".join(c for c in unicodedata.normalize("NFC", text).casefold() if unicodedata.category(c) != "Cf")
        return unicodedata.normalize("NFC", " ".join(shown.split()))


# --- reading ---------------------------------------------------------------------------------------------------------


def load_examples(
    source: str, pairs: bool = False, say: Callable[[str], None] = print, topics: bool = False
) -> list[Example]:
    """All rows of a local JSONL file or of a hub dataset's train split, in order.

    `pairs` asks for a chosen and a rejected reply in every row, `topics` for a topic. Raises UserError with every bad
    row's place. Of a hub dataset, which its user cannot correct, up to 5% of bad rows are left out and told through
    `say`; so is a share of repeated rows above 5%.
    """
    file = Path(source).expanduser()
    is_local = is_path(source) or file.exists()
    rows = _read_jsonl(str(file)) if is_local else _read_hub(source)
    every = dict.fromkeys(name for _, row in rows if isinstance(row, dict) for name in row)
    columns = every.keys() & set(COLUMNS)
    examples, faults = [], []
    for where, row in rows:
        try:
            examples.append(_example(row, where, pairs, columns, topics, every))
        except UserError as error:
            faults += error.faults
    if faults and not is_local and len(faults) <= FORGIVEN_SHARE * len(rows):
        say(f"{len(faults)} of {len(rows):,} rows are left out, the first because {faults[0]}")
    else:
        raise_if(faults)
    if not examples:
        raise UserError(f"no rows: {source}. Each line is a JSON object with {READABLE}")
    repeated = len(examples) - len({json.dumps((e.messages, e.chosen, e.rejected)) for e in examples})
    if repeated > REPEATED_SHARE * len(examples):
        say(f"warning: {repeated} of {len(examples):,} rows repeat another: {source}. Remove them, if that is a slip")
    return examples


def read_text(file: Path) -> str:
    """A UTF-8 file's text, with or without a byte-order mark."""
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8: {file}, byte {error.start}. Save the file as UTF-8") from None


def _read_jsonl(path: str) -> list[tuple[str, Any]]:
    if not Path(path).is_file():
        raise missing_path(path, "data file", "Give a JSONL file or a hub dataset's name")
    kind = _other_format(Path(path))
    if kind:
        raise UserError(f"{kind}, not JSONL: {path}:1. Convert it to a file with one JSON object per line")
    rows, faults, lines = [], [], read_text(Path(path)).split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}, {line.strip()[:40]!r}"
        try:
            rows.append((where, json.loads(line, object_pairs_hook=_without_repeats)))
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, too, or nesting as deep
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error
            cut = ". Was the file cut off there?" if number == len(lines) else ""
            faults.append(f"not JSON ({reason}): {where}. One JSON object per line{cut}")
    raise_if(faults)
    return rows


def _other_format(file: Path) -> str | None:
    """Names another format in which data comes, as far as the file's name and its beginning show it."""
    if file.suffix.lower() in (".csv", ".tsv"):
        return "a CSV file"
    with file.open("rb") as stream:
        start = stream.read(64)
    if start.startswith(b"PAR1"):
        return "a Parquet file"
    if start.startswith(b"ARROW1"):
        return "an Arrow file"
    return "a JSON array" if start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[") else None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; raises ValueError if a key stands in it twice, of which Python would keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is there twice")
    return found


def _read_hub(name: str) -> list[tuple[str, Any]]:
    from datasets import load_dataset

    source = require_hub(name, "dataset", "a JSONL file")
    return [(f"{name} row {i}", row) for i, row in enumerate(load_dataset(source, split="train"))]


def _example(
    row: Any,
    where: str,
    pairs: bool,
    columns: Set[str] = frozenset(),
    topics: bool = False,
    others: Iterable[str] = (),
) -> Example:
    """`columns`: those of COLUMNS that rows of this data have; `others`: all that they have, None in this row if it
    lacks one."""
    if not isinstance(row, dict):
        raise UserError(f"not a JSON object: {where}. Each row is an object with {READABLE}")
    _check_spelling(row, where, columns)
    messages = _messages(row, where)
    has_pair = "chosen" in row or "rejected" in row
    if pairs and not has_pair:
        raise UserError(
            f'no "chosen" and "rejected": {where}, columns {sorted(row)}. A reward model learns from pairs'
        )
    topic = _typed(row, "topic", str, None, where)
    if topics and not (topic or "").strip():
        raise UserError(
            f"no topic: {where}, columns {sorted(row)}. Give every row one, or leave out --steps-per-topic"
        )
    example = Example(
        messages=tuple(messages),
        chosen=_reply(row, "chosen", where) if has_pair else None,
        rejected=_reply(row, "rejected", where) if has_pair else None,
        rejected_ended=_typed(row, "rejected_ended", bool, True, where),
        topic=topic,
        flaw=_typed(row, "flaw", str, None, where),
        columns={**dict.fromkeys(others), **row},
    )
    if has_pair and example.chosen == example.rejected and example.rejected_ended:
        raise UserError(f"chosen equals rejected: {where}. Correct or remove that row")
    return example


def _check_spelling(row: dict, where: str, columns: Set[str]) -> None:
    """A column of the other rows that this one lacks, and one spelt much like it: a slip, no column to pass over."""
    for name in row.keys() - set(COLUMNS):
        near = difflib.get_close_matches(name, sorted(columns - row.keys()), n=1, cutoff=0.8)
        if near:
            raise UserError(f"unknown column {name!r}: {where}. Did you mean {near[0]!r}, as in other rows?")


def _messages(row: dict, where: str) -> list[dict[str, str]]:
    chat = row.get("messages", row.get("prompt") if isinstance(row.get("prompt"), list) else None)
    if chat is not None:
        return _chat(chat, where)
    key = next((k for k in ("question", "prompt") if k in row), None)
    if key is None:
        raise UserError(f"no prompt: {where}, columns {sorted(row)}. A row has {READABLE}")
    system = row.get("system")
    messages = [] if system in (None, "") else [{"role": "system", "content": _text(system, "system", where)}]
    return [*messages, {"role": "user", "content": _text(row[key], key, where)}]


def _chat(chat: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(chat, list) or not all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in chat):
        raise UserError(f'messages are not a list of {{"role", "content"}}: {where}. Write them as a chat')
    messages = [{"role": m["role"], "content": _text(m["content"], "content", where)} for m in chat]
    unknown = [m["role"] for m in messages if m["role"] not in ROLES]
    if unknown:
        raise UserError(f"unknown chat role {unknown[0]!r}: {where}. Roles are {', '.join(ROLES)}")
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]  # a finished chat: what we want is the prompt before its last reply
    if not any(m["role"] == "user" for m in messages):
        raise UserError(f"a chat without a user's message: {where}. Add one")
    return messages


def _reply(row: dict, key: str, where: str) -> str:
    if key not in row:
        raise UserError(f"no {key!r}: {where}, columns {sorted(row)}. A pair has both replies")
    value = row[key]
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    return _text(value, key, where)


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{key} is {_shown(value)}, not text: {where}. Correct or remove that row")
    if not value.strip():
        raise UserError(f"{key} is empty: {where}. Correct or remove that row")
    found = _NOT_TEXT.search(value)
    if found:
        what = "a NUL character" if found[0] == "\0" else "a lone surrogate"
        raise UserError(f"{key} holds {what} (character {found.start() + 1}): {where}. Correct or remove that row")
    return value


def _typed(row: dict, key: str, kind: type, default: Any, where: str) -> Any:
    """What a row may say beside its texts: of `kind`, or the default where it says nothing."""
    value = row.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        expected = {bool: "true or false", str: "text"}[kind]
        raise UserError(f"{key} is {_shown(value)}, not {expected}: {where}. Correct or remove that row")
    return value


def _shown(value: Any) -> str:
    """A value in a fault: one that holds others, however deep, by its kind."""
    kinds = {list: "a list", dict: "an object"}
    return kinds.get(type(value)) or json.dumps(value, default=str)[:40]


# --- splitting -------------------------------------------------------------------------------------------------------


def part_of(example: Example, split: Split) -> str:
    """ "reward", "rl" or "evaluation": from a hash of the question, so that a question is in one part only, always."""
    bucket = int(question_hash(example)[:8], 16) % 100
    return "reward" if bucket < split.reward else "rl" if bucket < split.reward + split.rl else "evaluation"


def split_examples(examples: Sequence[Example], split: Split) -> dict[str, list[Example]]:
    """The three parts by name. The part follows from the question alone, so none stands in two of them."""
    parts: dict[str, list[Example]] = {"reward": [], "rl": [], "evaluation": []}
    for example in examples:
        parts[part_of(example, split)].append(example)
    return parts


def question_hash(example: Example) -> str:
    """Twelve hexadecimal digits that tell questions apart."""
    return hashlib.sha256(example.question.encode()).hexdigest()[:12]


def distinct_questions(examples: Iterable[Example], by_topic: bool = False) -> list[Example]:
    """The first example of every distinct prompt (system text counts, and if asked the topic), in order."""

    def key(example: Example) -> str:
        return json.dumps((example.messages, example.topic if by_topic else None))

    return list({key(e): e for e in reversed(list(examples))}.values())[::-1]


# --- rendering -------------------------------------------------------------------------------------------------------

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


def encode_reply(tokenizer: PreTrainedTokenizerBase, text: str, ended: bool = True) -> list[int]:
    """Ids of a reply; a reply that ended has its EOS."""
    return encode_text(tokenizer, text) + ([tokenizer.eos_token_id] if ended else [])


def decode_reply(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of a reply's ids, without special tokens."""
    return tokenizer.decode(ids, skip_special_tokens=True)


@dataclass(frozen=True)
class Prompt:
    """A prompt that fits: its ids and the row that it came from."""

    ids: tuple[int, ...]
    example: Example


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], longest: int
) -> tuple[list[Prompt], int]:
    """The prompts of at most `longest` tokens, in order, and how many were left out. None is ever cut."""
    prompts = [Prompt(tuple(encode_prompt(tokenizer, e.messages)), e) for e in examples]
    fitting = [p for p in prompts if len(p.ids) <= longest]
    return fitting, len(prompts) - len(fitting)


@dataclass(frozen=True)
class PromptSets:
    """What a run trains and evaluates on, and the count of everything that was left out."""

    train: list[Prompt]
    evaluation: list[Prompt]
    too_long: int
    rows: int = 0
    split: Split | None = None  # None: the two lists were given
    parts: dict[str, int] = field(default_factory=dict)  # rows per part


def load_prompts(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    split: Split | None,
    longest: int,
    most: int,
    most_evaluation: int,
    say: Callable[[str], None] = print,
    topics: bool = False,
    evaluation_alone: bool = False,
) -> PromptSets:
    """Read, split and render; with `topics` each row has one. Raises UserError if no prompt remains to train on (not
    with `evaluation_alone`) or to evaluate on. Prints a warning for a topic of which none remains to train on."""
    examples = load_examples(source, say=say, topics=topics)
    has_pairs = any(e.chosen is not None for e in examples)
    split = split or (Split(45, 45, 10) if has_pairs else Split(0, 90, 10))
    parts = split_examples(examples, split)
    sets = render_sets(tokenizer, parts["rl"], parts["evaluation"], longest, topics)
    for name, kept, part in (("train", sets.train, parts["rl"]), ("evaluate", sets.evaluation, parts["evaluation"])):
        if not kept and not (evaluation_alone and name == "train"):
            shortest = min((len(encode_prompt(tokenizer, e.messages)) for e in part), default=0)
            raise UserError(
                f"no prompt left to {name} on: {source}, {len(examples)} rows, split {split}, {len(part)} in this "
                f"part, the shortest of {shortest} tokens. Give more rows, another --split or a larger --prompt-length"
            )
    train = sets.train[:most]
    left = {p.example.topic for p in train}
    gone = [topic for topic in dict.fromkeys(e.topic for e in examples) if topic not in left] if topics else []
    if gone:
        say(
            f"warning: no prompt left to train on of {len(gone)} topics ({', '.join(gone)}): {source}. Give more rows "
            "of them, another --split, or a larger --max-prompts or --prompt-length"
        )
    return dataclasses.replace(
        sets,
        train=train,
        evaluation=sets.evaluation[:most_evaluation],
        rows=len(examples),
        split=split,
        parts={name: len(part) for name, part in parts.items()},
    )


def render_sets(
    tokenizer: PreTrainedTokenizerBase,
    train: Sequence[Example],
    evaluation: Sequence[Example],
    longest: int,
    by_topic: bool = False,
) -> PromptSets:
    """The distinct prompts of two lists, as ids; `by_topic`, a prompt of two topics is two."""
    kept, too_long = encode_prompts(tokenizer, distinct_questions(train, by_topic), longest)
    held_out, too_long_evaluation = encode_prompts(tokenizer, distinct_questions(evaluation, by_topic), longest)
    return PromptSets(kept, held_out, too_long=too_long + too_long_evaluation)


GivenPrompt = str | Sequence[dict[str, str]] | dict[str, Any]


def examples_of(prompts: Sequence[GivenPrompt], topics: bool = False) -> list[Example]:
    """Prompts given in Python, each a text, a chat of {"role", "content"}, or a row with a data file's columns, which
    it must be to have a topic. Raises UserError with every fault."""
    examples, faults = [], []
    every = dict.fromkeys(name for prompt in prompts if isinstance(prompt, dict) for name in prompt)
    for i, prompt in enumerate(prompts):
        is_chat = isinstance(prompt, Sequence) and not isinstance(prompt, str)
        row = prompt if isinstance(prompt, dict) else {"messages": list(prompt)} if is_chat else {"prompt": prompt}
        try:
            examples.append(_example(row, f"prompt {i + 1}", pairs=False, topics=topics, others=every))
        except UserError as error:
            faults += error.faults
    raise_if(faults)
    return examples
