"""Builds the configuration of a training run from Python, a command line or a run.json. Imports no torch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.algorithms.table import ALGORITHMS, DEFAULT_ALGORITHM, Algorithm
from rlhf.checkpoints.run_folder import folders_of
from rlhf.checkpoints.run_record import RUN_FILE, RunRecord, flat_settings
from rlhf.distributed.join import use_own_gpu
from rlhf.settings.fields import Layer, name_table, settings_of
from rlhf.settings.flags import CommandLine
from rlhf.settings.merge import build, merged, read_command
from rlhf.settings.next_commands import CODE, code_in, code_words, names_code, resume_line
from rlhf.settings.recipes import DEFAULT_RECIPE, find_recipe, normal_name, shipped_recipes
from rlhf.settings.training import Config
from rlhf.settings.translate import only
from rlhf.settings.types import IN_PYTHON
from rlhf.settings.user_file import edits_line, read_user_file
from rlhf.settings.validate import validate_training
from rlhf.utils.console import quiet_imports
from rlhf.utils.errors import Problem, UserError, did_you_mean, raise_if

# --- from Python -----------------------------------------------------------------------------------------------------


def make_config(recipe: str = DEFAULT_RECIPE, algorithm: str = DEFAULT_ALGORITHM, **settings: Any) -> Config:
    """Return a configuration from a recipe, by name or file, and settings by their names. Does not read config.py.
    Raises UserError for the same errors as the command line."""
    row = algorithm_row(algorithm, "make_config(algorithm=)")
    foreign = foreign_settings(algorithm)
    raise_if(
        [
            Problem(
                f"{name} belongs to {foreign[name]}", f"make_config({name}=), algorithm {algorithm!r}", "Remove it"
            )
            for name in settings
            if name in foreign
        ]
    )
    layer = {name: (value, f"make_config({name}=)") for name, value in settings.items()}
    layers = [*lower_layers(recipe, row, {}, "make_config"), layer]
    return _built(row, layers, normal_name(recipe), assumed=OF_MAKE_TRAINER, in_python=True)


# help() and the completion in notebooks show all settings in place of `**settings`
make_config.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [*inspect.signature(make_config).parameters.values()][:-1]
    + [
        inspect.Parameter(s.name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=s.type)
        for s in settings_of(Config).values()
    ],
    return_annotation=Config,
)

# given by arguments of make_trainer and check
OF_MAKE_TRAINER = ("rm_model", "reward_func", "eval_func", "environment")


def algorithm_row(name: str, where: str) -> Algorithm:
    """Return the row of an algorithm in the table. Raises UserError if there is none; `where` is the place in the
    error."""
    if name not in list(ALGORITHMS):  # it may not be hashable
        raise UserError(_unknown_algorithm(name, where))
    return ALGORITHMS[name]


def _unknown_algorithm(name: Any, where: str) -> Problem:
    known = f"Known: {', '.join(ALGORITHMS)}. Your own: FILE.py:CLASS, or in Python register(CLASS)"
    fix = f"{did_you_mean(str(name), ALGORITHMS)}{known}"
    return Problem(f"unknown algorithm {name!r}", where, fix)


def foreign_settings(algorithm: str) -> dict[str, str]:
    """Return all names of the settings that only other algorithms use -> the scripts that have their flags."""
    foreign = ALGORITHMS[algorithm].foreign
    settings = settings_of(Config)
    return {name: owner for setting, owner in foreign.items() for name in settings[setting].names}


def lower_layers(recipe: str, row: Algorithm, user: Layer, where: str = "--recipe") -> list[Layer]:
    """Return the layers below --config and the flags: the defaults of the algorithm, then the settings of config.py
    (`user`) with the default recipe, or otherwise those of the recipe."""
    defaults: Layer = {name: (value, "default") for name, value in row.all_defaults.items()}
    if recipe == DEFAULT_RECIPE:
        # config.py lists the declared defaults of all algorithms: only another value is the user's
        unedited = [n for n in row.defaults if n in user and user[n][0] == settings_of(Config)[n].default]
        return [defaults, {name: given for name, given in user.items() if name not in unedited}]
    found = find_recipe(recipe, where)
    places = {name: place for name, (_, place) in found.algorithms.items() if name not in ALGORITHMS}
    raise_if([_unknown_algorithm(name, place) for name, place in places.items()])
    return [defaults, *found.layers(row.name)]


def usual_config(recipe: str, user: Layer, algorithm: str = DEFAULT_ALGORITHM) -> Config:
    """Return the configuration that an algorithm's script uses without flags, with a recipe and the settings of
    config.py. Combinations of settings are not checked. Raises UserError if the recipe's file is missing or a value is
    invalid."""
    row = ALGORITHMS[algorithm]
    return _built(row, lower_layers(recipe, row, user), recipe, user, checked=False)


def _built(
    row: Algorithm,
    layers: Sequence[Layer],
    recipe: str,
    user: Layer | None = None,
    problems: Sequence[Problem] = (),
    assumed: Collection[str] = (),
    in_python: bool = False,
    checked: bool = True,
) -> Config:
    checks = (validate_training, row.validate) if checked else ()
    top = {"recipe": recipe, "algorithm": row.name, "user_file": user or {}, "in_python": in_python}
    of_row = {"label": row.label, "compares": row.group_size > 1, "greedy": row.greedy}
    return build(Config, layers, problems, row.foreign, checks, assumed, **top, **of_row)


# --- from a command line ---------------------------------------------------------------------------------------------


def command_line(row: Algorithm, chosen: bool = False) -> CommandLine:
    """Return the command line of an algorithm's script, or of the command whose --algorithm has `chosen` it."""
    name = "train" if chosen and row.name == DEFAULT_ALGORITHM else row.name
    run = f"./{row.name}_lora"
    examples = (
        ("--recipe demo", "the offline demo: takes minutes on a CPU"),
        (f"--use-lora --output {run}", "LoRA adapters, with the models and data of the default recipe"),
        (f"--resume --output {run}", "resume that run after an interruption"),
    )
    title = f"Trains a language model with {row.title} ({row.label}), based on TRL."
    algorithms = tuple(ALGORITHMS) if chosen else ()
    return CommandLine(Config, name, title, examples, row.foreign, shipped_recipes(), algorithms)


def chosen_row(argv: Sequence[str]) -> Algorithm:
    """Return the algorithm of --algorithm, without it the default one: that of a name, or of FILE.py:CLASS, whose file
    is run. Raises UserError if there is none."""
    flags, _ = command_line(ALGORITHMS[DEFAULT_ALGORITHM], chosen=True).read(argv)
    name, _ = flags.get("algorithm", (DEFAULT_ALGORITHM, ""))
    if not names_code([name]):
        return algorithm_row(name, "--algorithm")
    quiet_imports()
    use_own_gpu()
    from rlhf.algorithms.classes import load_algorithm  # imports torch

    return load_algorithm(name)


def parse_cli(
    argv: Sequence[str] | None = None, algorithm: str | None = DEFAULT_ALGORITHM, user_file: Path | None = None
) -> Config:
    """Return the configuration of an algorithm's script; with `algorithm` None, of the command with --algorithm.
    `user_file` is the config.py, which is used with the default recipe. With --resume, run.json replaces the recipe
    and config.py. Raises UserError that lists all errors."""
    argv = sys.argv[1:] if argv is None else argv
    row = chosen_row(argv) if algorithm is None else ALGORITHMS[algorithm]
    user = read_user_file(user_file, name_table(settings_of(Config)))

    def lower(recipe: str, place: str) -> list[Layer]:
        return lower_layers(recipe, row, user, place)

    def edits(recipe: str) -> str | None:
        return user_file_line(user, row, None if recipe == DEFAULT_RECIPE else f"--recipe {recipe}")

    given = read_command(command_line(row, algorithm is None), argv, lower, edits)
    layers = given.layers
    recipe = given.recipe
    of_command = [only(layer, settings_of(Config), OF_THE_COMMAND) for layer in layers]
    stored = stored_run(row, [*of_command, given.file, given.flags])
    if stored is not None:
        layers = [layers[0], *of_command, stored[0]]
        recipe = recipe if given.recipe_place else stored[1]
    return _built(row, [*layers, given.file, given.flags], recipe, user, given.problems)


# settings of the command that resumes a run, which are not restored from the run
OF_THE_COMMAND = (
    "seeds",
    "ddp_timeout",
    "output",
    "overwrite",
    "dry_run",
    "memory",
    "resume",
    "resume_anyway",
)


def stored_run(row: Algorithm, layers: Sequence[Layer]) -> tuple[Layer, str] | None:
    """Return the settings in run.json of the run that a command resumes, and its recipe; None if it does not resume
    one. Raises UserError for a run of another algorithm, and for reward code that is not on the command line.

    `layers` are the command line's, above the settings of recipe and config.py that are in OF_THE_COMMAND.
    """
    settings = settings_of(Config)
    asked = merged(Config, [only(layer, settings, (*OF_THE_COMMAND, *CODE)) for layer in layers])
    run = {name: value for name, (value, _) in asked.items()}
    if not run["resume"]:
        return None
    folders = folders_of(run["output"], run["seeds"])
    found = next(((r, f) for f in folders if (r := RunRecord.read(Path(f))) is not None), None)
    if found is None:
        return None
    stored, folder = found
    stored.require_algorithm(row.name, folder)
    aside = {*OF_THE_COMMAND, *(["seed"] if run["seeds"] is not None else [])}
    layer = {name: value for name, value in stored_layer(stored.settings).items() if name not in aside}
    only_exported = stored.status == "finished" and run["seeds"] is None and not run["resume_anyway"]
    if layer["prompts"][0] == IN_PYTHON and not only_exported:
        raise UserError(
            "this run was started in Python",
            f"--resume, --output {folder}",
            "Resume it there, with make_config(..., resume=True) and the same make_trainer(...)",
        )
    rules = {name: layer[name][0] for name in CODE if name in layer}
    given = code_in(run)
    untrusted = [rule for name, of in code_in(rules).items() if not names_code(given[name]) for rule in names_code(of)]
    if not only_exported and untrusted:
        resume = resume_line(row.name, run["output"], run["seeds"], code_words(rules))
        raise UserError(
            "reward code must be given on the command line",
            f"--resume, {', '.join(untrusted)} in the run's {RUN_FILE}",
            f"Resume with: {resume}",
        )
    return layer, stored.recipe


def user_file_line(user: Layer, row: Algorithm, unused_because: str | None) -> str | None:
    """Return one line with the changes that config.py makes for an algorithm, and whether they are used; None if it
    contains the declared defaults."""
    return edits_line(Config, partial(lower_layers, DEFAULT_RECIPE, row), user, unused_because, row.foreign)


# --- from a run.json -------------------------------------------------------------------------------------------------


def config_of_run(run: RunRecord, **changed: Any) -> Config:
    """Return the configuration of a run, with some settings `changed`. Settings that this version does not have, or
    that the algorithm does not use, are ignored. Raises UserError for an unknown algorithm."""
    row = algorithm_row(run.algorithm, RUN_FILE)
    if "eval_func" in changed:  # without it, the run's best rule may have no function, and its critic no reward model
        changed = {"best_rule": "score", "critic": "shared", **changed}
    layer = {name: (value, "a changed setting") for name, value in changed.items()}
    stored = stored_layer(run.settings)
    return _built(row, [*lower_layers(DEFAULT_RECIPE, row, {}), stored, layer], run.settings["recipe"])


def stored_layer(settings: dict[str, Any]) -> Layer:
    """Return stored settings as a layer, without those that this version does not have."""
    known = settings_of(Config)  # run.json has no other names of a setting
    return {name: (value, RUN_FILE) for name, value in flat_settings(settings).items() if name in known}
