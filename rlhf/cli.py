"""From defaults, recipe, YAML file and flags to a checked, frozen configuration. Later layers win.

All faults of one command are reported together. argparse reads the flags and PyYAML's safe loader the file; what
they do not do is here: the nearest known name, faults with their place, every boolean in every spelling.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from rlhf.knobs import Knob, convert, is_unset, knobs_of, name_table, range_text
from rlhf.utils.errors import UserError, did_you_mean, raise_if

Layer = dict[str, tuple[Any, str]]  # name -> (value, where it was set)
# what other trainers call it -> the setting
ELSEWHERE = {"lr": "learning_rate", "beta": "kl_coef", "kl_beta": "kl_coef", "max_completion_length": "reply_length"}
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
            faults.append(f"unknown key {key}: {where}. {_way_out(key, names)}")
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


def _way_out(name: str, known: Iterable[str]) -> str:
    """For a name that is not known: the nearest one; for float16, which other trainers have, what there is."""
    words = {word.lstrip("-") for word in known}
    if name.replace("-", "_").strip("_").removeprefix("no_") == "fp16" and "bf16" in words:
        return "Precision is bfloat16 (--bf16) or float32 (--no-bf16); float16 is not offered, its gradients underflow"
    meant = ELSEWHERE.get(name.replace("-", "_").strip("_"))
    if meant in words | {word.replace("-", "_") for word in words}:
        return f"Did you mean {'--' + meant.replace('_', '-') if name.startswith('--') else meant}?"
    return did_you_mean(name, known)


def _yaml_value(node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()


class _Help(argparse.HelpFormatter):
    """A flag once, its value once, then its other names; every dash may be an underscore."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        dashed = [name for name in action.option_strings if "_" not in name]
        if action.nargs == 0 or not dashed:
            return super()._format_action_invocation(action)
        also = f" (or {', '.join(dashed[1:])})" if len(dashed) > 1 else ""
        return f"{dashed[0]} {self._format_args(action, action.dest.upper())}{also}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(f"{message}: command line. --help shows how each flag is written")


def make_parser(
    config_class: type, prog: str, description: str, recipes: dict | None, defaults: dict | None = None, hidden=()
) -> argparse.ArgumentParser:
    """A flat flag for every knob (dashes or underscores, and its aliases); booleans have --x and --no-x.

    `defaults` replace fields' own in what --help says; groups named in `hidden` have no flags here. A command without
    `recipes` has no settings file either.
    """
    knobs = knobs_of(config_class)
    words = "".join(f"[{k.name.upper()} ...] " for k in knobs.values() if k.positional)
    files = "[--recipe NAME] [--config FILE.yaml] " if recipes is not None else ""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} {words}{files}[--FLAG VALUE ...]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_Help,
    )
    if recipes is not None:
        parser.add_argument("--recipe", metavar="NAME", help=f"settings to start from: {', '.join(recipes)}")
        parser.add_argument("--config", metavar="FILE.yaml", help="settings from a YAML file, over the recipe's")
    groups: dict[str, Any] = {}
    for k in knobs.values():
        if k.group in hidden:
            continue
        k = dataclasses.replace(k, default=(defaults or {}).get(k.name, k.default))
        if k.group not in groups:
            title = typing.get_type_hints(config_class)[k.group].__doc__.strip().rstrip(".")
            groups[k.group] = parser.add_argument_group(title)
        _add_flag(groups[k.group], k, _special(config_class))
    return parser


def _special(config_class: type) -> set[str]:
    """The references' names that say something else than the knobs' own."""
    return config_class.read_as.keys() | config_class.implied.keys()


def _add_flag(group, k: Knob, special: Collection[str]) -> None:
    """`special` names have flags of their own: they keep their names until layers are merged."""
    names = (k.name, *(alias for alias in k.aliases if alias not in special))
    for alias in (alias for alias in k.aliases if alias in special):
        meant = f"as {k.flag}, said as another trainer says it: see Settings in README.md"
        nargs = "+" if k.is_list else None
        group.add_argument(*_spellings([alias]), dest=alias, metavar=alias.upper(), help=meant, nargs=nargs)
    spellings = _spellings(names)
    bounds = f", {range_text(k)}" if any(v is not None for v in k.bounds.values()) else ""
    help = f"{k.help} (default: {_show(k.default)}{bounds})".replace("%", "%%")
    if k.positional:
        group.add_argument(k.name, metavar=k.name.upper(), help=help, nargs="*")
    elif k.is_bool:
        group.add_argument(*spellings, dest=k.name, nargs="?", const="true", metavar="true|false", help=help)
        negative = _spellings([f"no_{name}" for name in names])
        group.add_argument(*negative, dest=k.name, action="store_const", const="false", help=argparse.SUPPRESS)
    else:
        shape = "|".join(k.choices) if k.choices else k.name.upper()
        group.add_argument(*spellings, dest=k.name, metavar=shape, help=help, nargs="+" if k.is_list else None)


def _spellings(names: Iterable[str]) -> list[str]:
    """Each name as a flag with dashes and, where that differs, with underscores."""
    return list(dict.fromkeys("--" + spelt for name in names for spelt in (name.replace("_", "-"), name)))


def _show(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value)) or "unset"
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def read_flags(
    parser: argparse.ArgumentParser, argv: list[str], elsewhere: dict[str, str] | None = None
) -> dict[str, tuple[Any, str]]:
    """name -> (text, flag) for every flag that was given. Unknown ones are reported together, with the nearest.

    `elsewhere`: flags of other commands -> the command that reads them.
    """
    namespace, unknown = parser.parse_known_args(argv)
    known = [s for action in parser._actions for s in action.option_strings]
    strange = [u.split("=")[0] for u in unknown if u.startswith("--")]
    theirs = elsewhere or {}
    raise_if(
        [
            f"{flag} belongs to {theirs[flag]}: command line. Leave it out here (a shared --config file may set it)"
            if flag in theirs
            else f"unknown flag {flag}: command line. {_way_out(flag, known)}"
            for flag in strange
        ]
    )
    raise_if([f"unexpected word {u!r}: command line. Every setting is a flag; --help lists them" for u in unknown])
    words = {action.dest for action in parser._actions if not action.option_strings}
    where = {name: "command line" if name in words else "--" + name.replace("_", "-") for name in vars(namespace)}
    return {name: (value, where[name]) for name, value in vars(namespace).items()}


def resolve(
    config_class: type,
    recipes: dict | None,
    argv: list[str],
    prog: str,
    description: str,
    *,
    defaults: dict | None = None,
    foreign: dict[str, str] | None = None,
    beneath: Layer | None = None,
    fit: bool = True,
    **top: Any,
) -> Any:
    """The configuration that defaults, recipe, `beneath`, YAML file and flags make together. All faults in one
    UserError.

    `foreign` groups (group -> the command that reads them) have no flags here; recipes and YAML files may set them,
    as one file serves both algorithms. `fit` as in build. `top` are fields beside the groups.
    """
    raise_if(
        [
            f"not valid text: command line, {word!a}. Name files with characters of this system's encoding"
            for word in argv
            if not _is_text(word)
        ]
    )
    knobs, foreign = knobs_of(config_class), foreign or {}
    usual = recipes[_default_recipe(config_class)] if recipes is not None else {}  # what runs if nothing is named
    parser = make_parser(config_class, prog, description, recipes, {**usual, **(defaults or {})}, foreign)
    elsewhere = {
        flag: foreign[k.group]
        for k in knobs.values()
        if k.group in foreign
        for flag in _spellings([*(n for name in (k.name, *k.aliases) for n in (name, f"no_{name}"))])
    }
    flags = read_flags(parser, argv, elsewhere)
    yaml_path = flags.pop("config", (None, ""))[0] if recipes is not None else None
    names = {**name_table(knobs), **{name: name for name in ("recipe", *_special(config_class))}}
    from_yaml = read_yaml(yaml_path, names, config_class.blocks) if yaml_path else {}
    return build(config_class, recipes, [beneath or {}, from_yaml, flags], defaults, fit, **top)


def _is_text(word: str) -> bool:
    """Whether a word of the command line can be written into a file: a name with a byte that is not UTF-8 cannot."""
    try:
        word.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in word


def _default_recipe(config_class: type) -> str:
    return next(f.default for f in dataclasses.fields(config_class) if f.name == "recipe")


def build(
    config_class: type,
    recipes: dict | None,
    layers: list[Layer],
    defaults: dict | None = None,
    fit: bool = True,
    **top: Any,
) -> Any:
    """A configuration from layers, "recipe" among their names, over the recipe's settings, over `defaults`, over the
    fields' own. Checks every name and value, then how they `fit` (`config.faults()`)."""
    knobs = knobs_of(config_class)
    below: list[Layer] = [{name: (value, "default") for name, value in (defaults or {}).items()}]
    if recipes is not None:
        recipe = _find_recipe(config_class, recipes, layers)
        below.append({name: (value, f"recipe {recipe}") for name, value in recipes[recipe].items()})
        layers = [{name: found for name, found in layer.items() if name != "recipe"} for layer in layers]
        top["recipe"] = recipe
    layered = _merge([*below, *layers], name_table(knobs), config_class)
    faults, converted = [], {}
    for name, k in knobs.items():
        value, where = layered.get(name, (k.default, "default"))
        try:
            converted.setdefault(k.group, {})[name] = convert(k, value, where)
        except UserError as error:
            faults += error.faults
    raise_if(faults)
    hints = typing.get_type_hints(config_class)
    groups = {group: hints[group](**leaves) for group, leaves in converted.items()}
    config = config_class(**top, **groups)
    raise_if(config.faults() if fit else [])
    return config.settled()


def _find_recipe(config_class: type, recipes: dict, layers: list[Layer]) -> str:
    named = {k: v for layer in layers for k, v in layer.items()}
    recipe, where = named.get("recipe", (_default_recipe(config_class), ""))
    if recipe not in recipes:
        raise UserError(
            f"unknown recipe {recipe!r}: {where}. {did_you_mean(recipe, recipes)} Known: {', '.join(recipes)}"
        )
    return recipe


def _merge(layers: list[Layer], names: dict[str, str], config_class: type) -> Layer:
    """Later layers win. One of an `exclusive` group in a later layer removes the others of earlier ones; so does a
    `clearing` knob, where it is set."""
    unknown = {n: where for layer in layers for n, (_, where) in layer.items() if n not in names}
    raise_if([f"unknown setting {n}: {where}. {_way_out(n, names)}" for n, where in unknown.items()])
    merged: Layer = {}
    for layer in layers:
        known = _by_knob(layer, names, config_class)
        exclusive = (*config_class.exclusive, *config_class.rivals)
        groups = [group for group in exclusive if not known.keys().isdisjoint(group)]
        groups += [g for n, g in config_class.clearing.items() if n in known and not is_unset(known[n][0])]
        cleared = {name for group in groups for name in group}
        merged = {name: found for name, found in merged.items() if name not in cleared} | known
    return merged


def _by_knob(layer: Layer, names: dict[str, str], config_class: type) -> Layer:
    """One layer's settings by the knobs' own names. A reference's name is read as the reference means it, and brings
    what else it says where the layer does not say that itself."""
    known: Layer = {}
    for name, (value, where) in layer.items():
        if names[name] in known:
            raise UserError(f"{name} is set twice: {where} and {known[names[name]][1]}. Keep one")
        known[names[name]] = (config_class.read_as.get(name, lambda said: said)(value), where)
    for name, (_, where) in layer.items():
        for other, value in config_class.implied.get(name, {}).items():
            known.setdefault(other, (value, where))
    for group in config_class.rivals:
        said = [known[name] for name in group if name in known and not is_unset(known[name][0])]
        if len(said) > 1:
            raise UserError(
                f"{' and '.join(group)} say one thing twice: {' and '.join(where for _, where in said)}. Keep one"
            )
    return known
