"""Read a settings file: YAML's safe loader, with file and line for every value and every fault."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rlhf.settings.fields import way_out
from rlhf.utils.errors import UserError, raise_if

_PLAIN_MAPPING = "tag:yaml.org,2002:map"


def read_yaml(path: str, names: dict[str, str], blocks: dict[str, dict[str, Any]]) -> dict[str, tuple[Any, str]]:
    """The knobs that a YAML file sets: name -> (value, 'file:line'). Nesting is free: only the leaves' names count.

    `blocks` say something by being there: name -> what such a block sets where the file does not.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        _check_aliases(text, path)
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"cannot read the configuration file: {path} ({error.strerror}). Check --config") from None
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8: {path}, byte {error.start}. Save the file as UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise UserError(
            f"not YAML ({error.problem}): {path}:{mark.line + 1}:{mark.column + 1}. Correct that line"
        ) from None
    except RecursionError:
        raise UserError(f"not a file of settings (nested too deep): {path}. Write lines such as `gamma: 1`") from None
    except yaml.YAMLError as error:  # a control character: no place to name
        raise UserError(f"not YAML ({str(error).splitlines()[0]}): {path}. Save it as plain text") from None
    if tree is None:
        return {}
    if not isinstance(tree, yaml.MappingNode):
        raise UserError(f"not a mapping of names to values: {path}:1. Write lines such as `learning_rate: 1e-5`")
    found: dict[str, tuple[Any, str]] = {}
    faults: list[str] = []
    _collect_yaml(tree, path, names, found, faults)
    raise_if(faults)
    for key_node in _block_names(tree):
        for name, value in blocks.get(str(key_node.value), {}).items():
            found.setdefault(name, (value, f"{path}:{key_node.start_mark.line + 1}"))
    return found


def _check_aliases(text: str, path: str) -> None:
    """Lists and mappings are written out: aliases of them can hold themselves, or grow without end. A value's alias
    is just that value."""
    anchored = set()
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, (yaml.SequenceStartEvent, yaml.MappingStartEvent)):
            anchored.add(event.anchor)
        elif isinstance(event, yaml.AliasEvent) and event.anchor in anchored:
            where = f"{path}:{event.start_mark.line + 1}"
            raise UserError(f"an alias of a list or a mapping (*{event.anchor}): {where}. Write it out")


def _collect_yaml(tree: yaml.MappingNode, path: str, names: dict[str, str], found: dict, faults: list[str]) -> None:
    if tree.tag != _PLAIN_MAPPING:
        faults.append(f"a mapping is not plain data ({tree.tag}): {path}:{tree.start_mark.line + 1}. Remove its tag")
        return
    for key_node, value_node in tree.value:
        key = str(key_node.value).replace("-", "_")
        where = f"{path}:{key_node.start_mark.line + 1}"
        if isinstance(value_node, yaml.MappingNode):
            _collect_yaml(value_node, path, names, found, faults)
        elif key not in names:
            faults.append(f"unknown key {key}: {where}. {way_out(key, names)}")
        elif names[key] in found:
            faults.append(f"{key} is set twice: {where} and {found[names[key]][1]}. Keep one")
        else:
            try:
                found[names[key]] = (_yaml_value(value_node), where)
            except yaml.constructor.ConstructorError as error:
                faults.append(f"{key} is not plain data ({error.problem}): {where}. Write plain text or numbers")


def _block_names(tree: yaml.MappingNode) -> Iterator[yaml.Node]:
    """The keys of all mappings in a mapping, however deep."""
    for key_node, value_node in tree.value:
        if isinstance(value_node, yaml.MappingNode):
            yield key_node
            yield from _block_names(value_node)


def _yaml_value(node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()
