"""From defaults, recipe, YAML file and flags to a checked, frozen configuration. Later layers win.

All errors of one command are reported together. argparse reads the flags and PyYAML's safe loader the file; these
modules add the nearest known name, the place of each error, and booleans in every spelling.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any

from rlhf.settings.fields import Layer, convert, is_unset, knobs_of, name_table, way_out
from rlhf.settings.flags import make_parser, read_flags, special_names, spellings
from rlhf.settings.yaml_file import read_yaml
from rlhf.utils.errors import UserError, did_you_mean, raise_if

Check = Callable[[Any], list[str]]  # from a configuration to its faults, one line each


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
    checks: Sequence[Check] | None = None,
    **top: Any,
) -> Any:
    """The configuration that defaults, recipe, `beneath`, YAML file and flags make together. All faults in one
    UserError.

    `foreign` groups (group -> the commands that read them) have no flags here; recipes and YAML files may set them,
    because one file serves all algorithms. `checks` as in build. `top` are fields beside the groups.
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
        for flag in spellings([*(n for name in (k.name, *k.aliases) for n in (name, f"no_{name}"))])
    }
    flags = read_flags(parser, argv, elsewhere)
    yaml_path = flags.pop("config", (None, ""))[0] if recipes is not None else None
    names = {**name_table(knobs), **{name: name for name in ("recipe", *special_names(config_class))}}
    from_yaml = read_yaml(yaml_path, names, config_class.blocks) if yaml_path else {}
    return build(config_class, recipes, [beneath or {}, from_yaml, flags], defaults, foreign, checks, **top)


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
    foreign: Collection[str] = (),
    checks: Sequence[Check] | None = None,
    **top: Any,
) -> Any:
    """A configuration from layers, "recipe" among their names, over the recipe's settings, over `defaults`, over the
    fields' own.

    Every name and value is checked; `foreign` groups then keep the fields' own defaults. `checks` return the faults
    of the whole configuration, one line each (None: its own `faults`).
    """
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
    groups = {group: hints[group](**leaves) for group, leaves in converted.items() if group not in foreign}
    config = config_class(**top, **groups)
    raise_if([fault for check in ((config_class.faults,) if checks is None else checks) for fault in check(config)])
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
    raise_if([f"unknown setting {n}: {where}. {way_out(n, names)}" for n, where in unknown.items()])
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
