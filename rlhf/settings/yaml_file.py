"""Reads YAML files of settings, with file and line of each value and each error.

Numbers are read as text, and converted like the text of a flag: YAML's own readings (1:30 is 90, 010 is 8) depend on
its version.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from rlhf.settings.fields import Layer
from rlhf.utils.errors import UserError
from rlhf.utils.paths import local_path

DEEPEST = 20  # blocks in blocks
# what words without quotes mean. A text setting refuses a truth value, as in `rm_model: off`
WORDS = dict.fromkeys(("", "~", "null")) | dict.fromkeys(("true", "yes", "on"), True)
WORDS |= dict.fromkeys(("false", "no", "off"), False)
TAGS = (None, *(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map")))
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")
MAPPINGS = ("columns", "chat_template_kwargs")  # settings whose value may be a mapping


class Block(dict[str, tuple[Any, str]]):
    """A mapping in a YAML file: key -> value and "file:line". A value is text, a truth, None, a list or a Block."""

    def add(self, name: str, value: Any, place: str) -> None:
        """Set a name. Raises UserError if the block has it."""
        if name in self:
            raise UserError(f"{name} is set twice", f"{place} and {self[name][1]}", "Keep one")
        self[name] = (value, place)


class _Loader(yaml.BaseLoader):
    """Makes text, lists and Blocks of a file. Refuses what could make an object, or contain itself."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.tag not in TAGS or self.depth > DEEPEST:
            problem = "an alias, a tag, or blocks in more than 20 blocks are not allowed"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_scalar(self, node: yaml.ScalarNode) -> str | bool | None:
        return WORDS.get(node.value.lower(), node.value) if node.style is None else node.value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Block:
        block = Block()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a name is not text", problem_mark=key.start_mark)
            mark = key.start_mark
            block.add(key.value, self.construct_object(value, deep=True), f"{mark.name}:{mark.line + 1}")
        return block


def settings_text(path: Path, shown: str, fix: str) -> str:
    """Return the text of a file. Raises UserError if it cannot be read, with the place `shown`."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError("not UTF-8", f"{shown}, byte {error.start}", "Save the file as UTF-8") from None
    except OSError as error:
        raise UserError("cannot be read", f"{shown} ({error.strerror})", fix) from None


def read_block(path: str, flag: str) -> Block:
    """Return the content of a YAML file. Raises UserError if it cannot be read, or is not a mapping of plain data.
    `flag` is the flag that gave the file."""
    text = settings_text(Path(local_path(path)), path, f"Check {flag}")
    try:
        loader = _Loader(text)
        loader.name = path
        content = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}"
        raise UserError(f"not YAML of plain data ({error.problem})", place, "Correct that line") from None
    except yaml.YAMLError as error:  # for example a control character: the error has no line
        raise UserError(f"not YAML ({str(error).splitlines()[0]})", path, "Save it as plain text") from None
    if content is not None and not isinstance(content, Block):
        raise UserError("not a mapping of names to values", f"{path}:1", "Write lines such as `learning_rate: 1e-5`")
    return content or Block()


def settings_in(block: Block) -> Layer:
    """Return the settings in a block and in its blocks. The names of its blocks are included, with a colon at their
    end. Raises UserError if a name is set twice."""
    found = Block()
    blocks = [block]
    for one in blocks:
        for key, (value, place) in one.items():
            name = key.replace("-", "_")
            if not isinstance(value, Block):
                found.add(name, value, place)
            elif name in MAPPINGS and not any(isinstance(old, Block) for old, _ in value.values()):
                values = {new: old for new, (old, _) in value.items()}
                if name == "chat_template_kwargs":
                    values = {key: json.loads(v) if NUMBER.fullmatch(str(v)) else v for key, v in values.items()}
                found.add(name, values, place)
            else:
                found[f"{name}:"] = (True, place)
                blocks.append(value)
    return found
