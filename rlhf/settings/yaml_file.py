"""Reads YAML files of settings with PyYAML's safe loader, with file and line of each value and each error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from rlhf.settings.fields import Layer
from rlhf.utils.errors import Problem, UserError, raise_if
from rlhf.utils.paths import local_path

_PLAIN_MAPPING = "tag:yaml.org,2002:map"
DEEPEST = 20  # blocks in blocks
MAPPINGS = ("columns",)  # settings whose value may be a mapping
# keys that only recipes have
RECIPE_KEYS = KIND, ALGORITHMS, PUBLISHED, REWARD_MODEL = "kind", "algorithms", "published", "reward_model_training"


def read_settings(path: str, flag: str = "--config") -> Layer:
    """Return the settings of a YAML file: name -> (value, "file:line"). Only the innermost keys are settings, at any
    depth. The name of each block is included, too, with a colon at its end. Raises UserError with all errors of the
    file."""
    tree = read_tree(path, flag)
    for key, _ in tree.value:
        if key.value in RECIPE_KEYS:
            fix = f"Remove it, or pass the file with --recipe {path}"
            raise UserError(f"{key.value} is allowed in recipes only", line_of(key, path), fix)
    return settings_in(tree, path)


def read_tree(path: str, flag: str) -> yaml.MappingNode:
    """Return the mapping in a YAML file. Raises UserError if it cannot be read or is not a mapping. `flag` is the flag
    that gave the file."""
    try:
        with open(local_path(path), encoding="utf-8-sig") as stream:
            text = stream.read()
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                where = line_of(event, path)
                raise UserError("not a file of settings (nested too deeply)", where, "Write lines such as `gamma: 1`")
            if isinstance(event, yaml.AliasEvent):  # it can contain itself, or expand without limit
                where = line_of(event, path)
                raise UserError(f"an alias (*{event.anchor})", where, "Write the value instead")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError("cannot read the configuration file", f"{path} ({error.strerror})", f"Check {flag}") from None
    except UnicodeDecodeError as error:
        raise UserError("not UTF-8", f"{path}, byte {error.start}", "Save the file as UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise UserError(
            f"not YAML ({error.problem})", f"{path}:{mark.line + 1}:{mark.column + 1}", "Correct that line"
        ) from None
    except yaml.YAMLError as error:  # for example a control character: the error has no line
        raise UserError(f"not YAML ({str(error).splitlines()[0]})", path, "Save it as plain text") from None
    if tree is None:
        return yaml.MappingNode(_PLAIN_MAPPING, [])
    if not isinstance(tree, yaml.MappingNode):
        raise UserError("not a mapping of names to values", f"{path}:1", "Write lines such as `learning_rate: 1e-5`")
    return tree


def line_of(node: yaml.Node | yaml.Event, path: str) -> str:
    """Return the place of a node, "file:line"."""
    return f"{path}:{node.start_mark.line + 1}"


def settings_in(tree: yaml.MappingNode, path: str, without: Iterable[str] = ()) -> Layer:
    """Return the settings in a mapping, at any depth, without the top-level keys in `without`."""
    found: Layer = {}
    problems: list[Problem] = []
    kept = [(key, value) for key, value in tree.value if key.value not in without]
    _collect(yaml.MappingNode(tree.tag, kept, tree.start_mark), path, found, problems)
    raise_if(problems)
    return found


def _collect(tree: yaml.MappingNode, path: str, found: Layer, problems: list[Problem]) -> None:
    if tree.tag != _PLAIN_MAPPING:
        problems.append(Problem(f"a mapping is not plain data ({tree.tag})", line_of(tree, path), "Remove its tag"))
        return
    for key_node, value_node in tree.value:
        where = line_of(key_node, path)
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(Problem("a name is not text", where, "Write lines such as `gamma: 1`"))
            continue
        key = str(key_node.value).replace("-", "_")
        if isinstance(value_node, yaml.MappingNode) and key not in MAPPINGS:
            found.setdefault(f"{key}:", (None, where))
            _collect(value_node, path, found, problems)
        elif key in found:
            problems.append(Problem(f"{key} is set twice", f"{where} and {found[key][1]}", "Keep one"))
        else:
            try:
                found[key] = (yaml_value(value_node), where)
            except yaml.constructor.ConstructorError as error:
                problems.append(
                    Problem(f"{key} is not plain data ({error.problem})", where, "Write plain text or numbers")
                )


def yaml_value(node: yaml.Node) -> Any:
    """Return the plain data of a node. Raises ConstructorError for any other tag."""
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()
