"""Recipes: YAML files with settings for all algorithms, for one of them, and for the reward model's training.

The shipped ones are rlhf/recipes/NAME.yaml. `smollm2-orca`, the default, is the declared defaults.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlhf.settings.fields import Layer
from rlhf.settings.yaml_file import ALGORITHMS, KIND, REWARD_MODEL, read_tree, settings_in
from rlhf.utils.errors import UserError, did_you_mean, raise_if
from rlhf.utils.paths import is_path

DEFAULT_RECIPE = "smollm2-orca"
FOLDER = Path(__file__).parent.parent / "recipes"


@dataclass(frozen=True)
class Recipe:
    """The settings of one recipe."""

    training: Layer  # for all algorithms, so that they are compared under one recipe
    algorithms: dict[str, Layer]  # for one of them
    reward_model_training: Layer

    def layers(self, algorithm: str) -> list[Layer]:
        """The layers of a training run, the lower one first."""
        return [self.training, self.algorithms.get(algorithm, {})]

    def value(self, name: str) -> Any:
        """The value of a setting for all algorithms. Raises KeyError if the recipe does not set it."""
        return self.training[name][0]


@functools.cache
def shipped_recipes() -> tuple[str, ...]:
    """The names of the shipped recipes, the default first."""
    return (DEFAULT_RECIPE, *sorted({file.stem for file in FOLDER.glob("*.yaml")} - {DEFAULT_RECIPE}))


def find_recipe(name: str, algorithms: Collection[str] | None = None, where: str = "--recipe") -> Recipe:
    """Return a shipped recipe by its name, or one of the user by its file. Raises UserError if there is none, if its
    file has errors, or if it has settings for an algorithm that is not among `algorithms` (None: not checked)."""
    known, path = shipped_recipes(), Path(name).expanduser()
    if not (name in known or path.is_file() or path.suffix in (".yaml", ".yml") or is_path(name)):
        raise UserError(f"unknown recipe {name!r}: {where}. {did_you_mean(name, known)} Known: {', '.join(known)}")
    recipe = _shipped(name) if name in known else _read(path)
    if algorithms is None:
        return recipe
    raise_if(
        [
            f"unknown algorithm {algorithm}: {path}, {ALGORITHMS}. {did_you_mean(algorithm, algorithms)} "
            f"Known: {', '.join(algorithms)}"
            for algorithm in recipe.algorithms
            if algorithm not in algorithms
        ]
    )
    return recipe


@functools.cache
def _shipped(name: str) -> Recipe:
    return _read(FOLDER / f"{name}.yaml")


def _read(file: Path) -> Recipe:
    path = str(file)
    tree = read_tree(path, "--recipe")
    top = {str(key.value): value for key, value in tree.value}
    if getattr(top.get(KIND), "value", None) != "recipe":
        raise UserError(
            f"not a recipe: {path}. Add a line `kind: recipe`, or pass the file with --config if it has settings alone"
        )
    per_algorithm = _block(top, ALGORITHMS, path)
    return Recipe(
        training=settings_in(tree, path, without=(KIND, ALGORITHMS, REWARD_MODEL)),
        algorithms={str(key.value): _settings(value, str(key.value), path) for key, value in per_algorithm.value},
        reward_model_training=settings_in(_block(top, REWARD_MODEL, path), path),
    )


def _block(top: dict[str, yaml.Node], key: str, path: str) -> yaml.MappingNode:
    """Return the mapping under a top-level key; an empty one if the key is missing or has no value."""
    node = top.get(key)
    if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
        return yaml.MappingNode("tag:yaml.org,2002:map", [])
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{key} holds no settings: {path}:{node.start_mark.line + 1}. Write settings under it")
    return node


def _settings(node: yaml.Node, key: str, path: str) -> Layer:
    return settings_in(_block({key: node}, key, path), path)
