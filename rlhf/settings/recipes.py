"""Recipes: YAML files with settings for all algorithms, for single algorithms, and for training a reward model.

The shipped recipes are rlhf/recipes/NAME.yaml. The default recipe, `smollm2-orca`, contains the declared defaults.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlhf.settings.fields import Layer
from rlhf.settings.yaml_file import (
    ALGORITHMS,
    KIND,
    PUBLISHED,
    RECIPE_KEYS,
    REWARD_MODEL,
    line_of,
    read_tree,
    settings_in,
)
from rlhf.utils.errors import Problem, UserError, did_you_mean, raise_if
from rlhf.utils.paths import is_path, resolve_path

DEFAULT_RECIPE = "smollm2-orca"
# recipes with parts that the project makes -> the settings that name these parts
DEMOS = {
    "demo": ("actor_model", "rm_model", "prompts"),
    "demo-checker": ("actor_model", "prompts"),
    "smollm2-sums": ("prompts", "eval_dataset"),
}
FOLDER = Path(__file__).parent.parent / "recipes"


@dataclass(frozen=True)
class Published:
    """Values that others report for the setup of a recipe. The training plot has them as marks."""

    metric: str  # tag in the logs, such as eval/exact_match
    start: float  # of the start model
    end: float  # after training
    source: str


@dataclass(frozen=True)
class Recipe:
    """The settings of one recipe."""

    training: Layer  # for all algorithms
    algorithms: dict[str, Layer]  # algorithm -> additional settings
    reward_model_training: Layer
    places: dict[str, str]  # algorithm -> file:line of its settings
    published: Published | None

    def layers(self, algorithm: str) -> list[Layer]:
        """Return the layers of a training run, the lower one first."""
        return [self.training, self.algorithms.get(algorithm, {})]

    def value(self, name: str) -> Any:
        """Return the value of a setting for all algorithms. Raises KeyError if the recipe does not set it."""
        return self.training[name][0]


@functools.cache
def shipped_recipes() -> tuple[str, ...]:
    """Return the names of the shipped recipes, the default first."""
    return (DEFAULT_RECIPE, *sorted({file.stem for file in FOLDER.glob("*.yaml")} - {DEFAULT_RECIPE}))


def normal_name(name: str) -> str:
    """Return the name of a recipe as run.json stores it; the path of a file is normalized."""
    return name if name in shipped_recipes() else os.path.normpath(name)


def find_recipe(name: str, algorithms: Collection[str] | None = None, where: str = "--recipe") -> Recipe:
    """Return a shipped recipe by its name, or a recipe of the user by its file. Raises UserError if it does not exist,
    if its file has errors, or if it has settings for an algorithm that is not in `algorithms` (None: not checked)."""
    known = shipped_recipes()
    if not isinstance(name, str):  # from Python
        raise UserError(f"recipe is {name!r}", where, "Give the name or the file of a recipe")
    if name in known:
        return _shipped(name)
    path = resolve_path(name)
    if not (path.is_file() or path.suffix in (".yaml", ".yml") or is_path(name)):
        raise UserError(f"unknown recipe {name!r}", where, f"{did_you_mean(name, known)}Known: {', '.join(known)}")
    recipe = _read(name)
    problems = [
        Problem(f"unknown algorithm {name}", place, f"{did_you_mean(name, algorithms)}Known: {', '.join(algorithms)}")
        for name, place in recipe.places.items()
        if algorithms is not None and name not in algorithms
    ]
    raise_if(problems)
    return recipe


@functools.cache
def _shipped(name: str) -> Recipe:
    return _read(str(FOLDER / f"{name}.yaml"))


def _read(path: str) -> Recipe:
    tree = read_tree(path, "--recipe")
    if getattr(_value(tree, KIND, path), "value", None) != "recipe":
        fix = "Add a line `kind: recipe`, or pass the file with --config if it has only settings"
        raise UserError("not a recipe", path, fix)
    per_algorithm = _block(tree, ALGORITHMS, path)
    places = {str(key.value): line_of(key, path) for key, _ in per_algorithm.value}
    return Recipe(
        training=settings_in(tree, path, without=RECIPE_KEYS),
        algorithms={name: settings_in(_block(per_algorithm, name, path), path) for name in places},
        reward_model_training=settings_in(_block(tree, REWARD_MODEL, path), path),
        places=places,
        published=_published(_block(tree, PUBLISHED, path), path),
    )


def _published(block: yaml.MappingNode, path: str) -> Published | None:
    """Return the published values of a recipe, None without any. Raises UserError if an entry is missing or wrong."""
    given = {name: value for name, (value, _) in settings_in(block, path).items()}
    if not given:
        return None
    kinds = {"metric": (str,), "start": (int, float), "end": (int, float), "source": (str,)}
    wrong = [name for name in {**kinds, **given} if type(given.get(name)) not in kinds.get(name, ())]
    if wrong:
        fix = "Give metric (text), start and end (numbers) and source (text)"
        raise UserError(", ".join(wrong), f"{PUBLISHED}, {line_of(block, path)}", fix)
    return Published(**given)


def published_values(name: str) -> Published | None:
    """Return the published values of a recipe, None if it has none, or if its file no longer exists or is invalid."""
    with contextlib.suppress(UserError):
        return find_recipe(name).published
    return None


def _value(tree: yaml.MappingNode, name: str, path: str) -> yaml.Node | None:
    """Return the value of a key, None if it is missing. Raises UserError if the key appears twice."""
    found = [(key, value) for key, value in tree.value if key.value == name]
    if len(found) > 1:
        raise UserError(f"{name} appears twice", line_of(found[-1][0], path), "Keep one")
    return found[0][1] if found else None


def _block(tree: yaml.MappingNode, name: str, path: str) -> yaml.MappingNode:
    """Return the mapping under a key, or an empty mapping if the key is missing or has no value."""
    node = _value(tree, name, path)
    if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
        return yaml.MappingNode("tag:yaml.org,2002:map", [])
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{name} is not a block of settings", line_of(node, path), "Write settings under it")
    return node
