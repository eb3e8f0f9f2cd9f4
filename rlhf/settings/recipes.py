"""Recipes: YAML files with settings for all algorithms, for single algorithms, and for training a reward model.

The shipped recipes are rlhf/recipes/NAME.yaml. The default recipe, `smollm2-orca`, contains the declared defaults.
"""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass
from pathlib import Path

from rlhf.settings.fields import Layer
from rlhf.settings.yaml_file import Block, read_block, settings_in
from rlhf.utils.errors import UserError, did_you_mean
from rlhf.utils.paths import is_path, resolve_path

DEFAULT_RECIPE = "smollm2-orca"
# recipes with parts that the project makes -> the settings that name these parts
DEMOS = {
    "demo": ("actor_model", "rm_model", "prompts"),
    "demo-checker": ("actor_model", "prompts"),
    "demo-game": ("actor_model", "prompts"),
    "smollm2-sums": ("prompts", "eval_dataset"),
}
FOLDER = Path(__file__).parent.parent / "recipes"
# keys that only recipes have
KEYS = KIND, ALGORITHMS, PUBLISHED, REWARD_MODEL = "kind", "algorithms", "published", "reward_model_training"


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
    algorithms: dict[str, tuple[Layer, str]]  # algorithm -> additional settings, and their file:line
    reward_model_training: Layer
    published: Published | None

    def layers(self, algorithm: str) -> list[Layer]:
        """Return the layers of a training run, the lower one first."""
        return [self.training, self.algorithms.get(algorithm, ({}, ""))[0]]


@functools.cache
def shipped_recipes() -> tuple[str, ...]:
    """Return the names of the shipped recipes, the default first."""
    return (DEFAULT_RECIPE, *sorted({file.stem for file in FOLDER.glob("*.yaml")} - {DEFAULT_RECIPE}))


def normal_name(name: str) -> str:
    """Return the name of a recipe as run.json stores it; the path of a file is normalized."""
    return os.path.normpath(name) if isinstance(name, str) and name not in shipped_recipes() else name


def read_settings(path: str) -> Layer:
    """Return the settings of a file of --config. Raises UserError for a recipe."""
    content = read_block(path, "--config")
    for key, (_, place) in content.items():
        if key in KEYS:
            raise UserError(
                f"{key} is allowed in recipes only", place, f"Remove it, or pass the file with --recipe {path}"
            )
    return settings_in(content)


def find_recipe(name: str, where: str = "--recipe") -> Recipe:
    """Return a shipped recipe by its name, or a recipe of the user by its file. Raises UserError if it does not exist,
    or if its file has errors."""
    known = shipped_recipes()
    if not isinstance(name, str):
        raise UserError(f"recipe is {name!r}", where, "Give the name or the file of a recipe")
    if name in known:
        return _shipped(name)
    path = resolve_path(name)
    if not (path.is_file() or path.suffix in (".yaml", ".yml") or is_path(name)):
        raise UserError(f"unknown recipe {name!r}", where, f"{did_you_mean(name, known)}Known: {', '.join(known)}")
    return _read(name)


@functools.cache
def _shipped(name: str) -> Recipe:
    return _read(str(FOLDER / f"{name}.yaml"))


def _read(path: str) -> Recipe:
    content = read_block(path, "--recipe")
    if content.get(KIND, ("", ""))[0] != "recipe":
        fix = "Add a line `kind: recipe`, or pass the file with --config if it has only settings"
        raise UserError("not a recipe", path, fix)
    algorithms = _block(content, ALGORITHMS)
    return Recipe(
        training=settings_in(Block({key: found for key, found in content.items() if key not in KEYS})),
        algorithms={name: (settings_in(_block(algorithms, name)), algorithms[name][1]) for name in algorithms},
        reward_model_training=settings_in(_block(content, REWARD_MODEL)),
        published=_published(content),
    )


def _block(content: Block, key: str) -> Block:
    """Return the block under a key; an empty one if the key is missing or has no value."""
    value, place = content.get(key, (None, ""))
    if value is not None and not isinstance(value, Block):
        raise UserError(f"{key} is not a block of settings", place, "Write settings under it")
    return value or Block()


def _published(content: Block) -> Published | None:
    values = {name: value for name, (value, _) in _block(content, PUBLISHED).items()}
    if not values:
        return None
    try:
        if not all(isinstance(value, str) for value in values.values()):
            raise TypeError(values)
        return Published(**values | {name: float(values[name]) for name in ("start", "end")})
    except (KeyError, TypeError, ValueError):
        fix = "Give metric (text), start and end (numbers) and source (text)"
        raise UserError("the published values are incomplete or wrong", content[PUBLISHED][1], fix) from None


def published_values(name: str) -> Published | None:
    """Return the published values of a recipe, None if it has none, or if its file no longer exists or is invalid."""
    with contextlib.suppress(UserError):
        return find_recipe(name).published
    return None
