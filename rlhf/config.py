"""The configuration of a training run: from Python, from a command line, from a run.json. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from rlhf.algorithms.table import ALGORITHMS, DEFAULT_ALGORITHM, Algorithm
from rlhf.checkpoints.run_folder import seed_folder
from rlhf.checkpoints.run_record import RUN_FILE, RunRecord, flat_settings
from rlhf.settings.commands import names_code, resume_command
from rlhf.settings.fields import knobs_of
from rlhf.settings.merge import build, resolve
from rlhf.settings.recipes import RECIPES
from rlhf.settings.training import Config
from rlhf.utils.errors import UserError, raise_if


def recipes_for(algorithm: str) -> dict[str, dict[str, Any]]:
    """The recipes as one algorithm reads them: the values for all, then those for this one."""
    return {name: {**recipe["training"], **recipe.get(algorithm, {})} for name, recipe in RECIPES.items()}


def parse_cli(argv: list[str] | None = None, algorithm: str = DEFAULT_ALGORITHM) -> Config:
    """The configuration of `train_ppo.py`, or of another algorithm's script. Raises UserError with all faults of the
    command line."""
    row, said = ALGORITHMS[algorithm], sys.argv[1:] if argv is None else argv

    def resolved(beneath: dict, checks: tuple = (Config.faults, row.faults)) -> Config:
        return resolve(
            Config, recipes_for(algorithm), said, row.script, f"{row.title} on one workstation, on TRL.",
            defaults=row.defaults, foreign=row.foreign, beneath=beneath, checks=checks, algorithm=algorithm,
        )  # fmt: skip

    config = resolved({}, checks=())  # if it resumes, the rest of its settings is in the run's folder
    return resolved(settings_to_resume(config) if config.run.resume else {})


def settings_to_resume(config: Config) -> dict[str, tuple[Any, str]]:
    """Settings stored in the run.json of the run that is resumed, by name; empty if there is no run. Raises UserError
    if it is a run of another algorithm, or names reward code that the command line does not name."""
    run = config.run
    folders = [run.output] if run.seeds is None else [seed_folder(run.output, seed) for seed in run.seeds]
    begun, folder = next(((r, f) for f in folders if (r := RunRecord.read(Path(f))) is not None), (None, None))
    if begun is None:
        return {}
    begun.require_algorithm(config.algorithm, folder)
    aside = {"seeds", "output", "overwrite", "dry_run", "resume", "resume_anyway"}
    aside |= {"seed"} if run.seeds is not None else set()
    knobs = {n: v for n, v in known_settings(begun.settings).items() if n not in aside}
    only_exported = begun.status == "finished" and run.seeds is None and not run.resume_anyway
    require_named_code(config, knobs.get("reward_func", ()), only_exported)
    return {name: (value, RUN_FILE) for name, value in {**knobs, "recipe": begun.recipe}.items()}


def require_named_code(config: Config, rules: Sequence[str], only_exported: bool) -> None:
    """Raise UserError if a run's run.json names reward code that this command line does not name."""
    if only_exported or not names_code(rules) or names_code(config.reward.reward_func):
        return
    named = replace(config, reward=replace(config.reward, reward_func=tuple(rules)))
    raise UserError(
        f"reward code runs only if the command line names it: --resume, {', '.join(names_code(rules))} in the run's "
        f"{RUN_FILE}. Resume with: {resume_command(named)}"
    )


def make_config(recipe: str = "smollm2-orca", algorithm: str = DEFAULT_ALGORITHM, **knobs: Any) -> Config:
    """A configuration from Python: a recipe, and knobs by their names. Raises UserError as the command line does."""
    row, foreign = algorithm_row(algorithm, "make_config(algorithm=)"), foreign_knobs(algorithm)
    raise_if(
        [
            f"{name} belongs to {foreign[name]}: make_config({name}=), algorithm {algorithm!r}. Leave it out"
            for name in knobs
            if name in foreign
        ]
    )
    values = {name: (value, f"make_config({name}=)") for name, value in knobs.items()}
    layers = [{**values, "recipe": (recipe, "make_config")}]
    return build(
        Config, recipes_for(algorithm), layers, row.defaults, row.foreign, (Config.faults, row.faults),
        algorithm=algorithm,
    )  # fmt: skip


def algorithm_row(name: str, where: str) -> Algorithm:
    """The row of an algorithm in the table. Raises UserError with `where` it was named if there is none."""
    if name not in ALGORITHMS:
        raise UserError(f"unknown algorithm {name!r}: {where}. Known: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def foreign_knobs(algorithm: str) -> dict[str, str]:
    """Every name of the knobs that only other algorithms read -> the scripts that have their flags."""
    foreign = ALGORITHMS[algorithm].foreign
    knobs = [knob for knob in knobs_of(Config).values() if knob.group in foreign]
    return {name: foreign[knob.group] for knob in knobs for name in (knob.name, *knob.aliases)}


def config_of_run(run: RunRecord, **changed: Any) -> Config:
    """Return a run's configuration, with some knobs `changed`."""
    return config_of_settings(run.algorithm, run.settings, **changed)


def config_of_settings(algorithm: str, settings: dict[str, Any], **changed: Any) -> Config:
    """Return the configuration for stored `settings`, with some knobs `changed`. Settings that this version does not
    have, or that the algorithm does not read, are ignored. Raises UserError for an algorithm that is not in the
    table."""
    algorithm_row(algorithm, RUN_FILE)
    foreign = foreign_knobs(algorithm)
    known = {name: value for name, value in known_settings(settings).items() if name not in foreign}
    return make_config(settings["recipe"], algorithm, **{**known, **changed})


def known_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return stored settings without their groups, and without those that this version does not have."""
    known = {f.name for g in fields(Config) if is_dataclass(g.default_factory) for f in fields(g.default_factory)}
    return {name: value for name, value in flat_settings(settings).items() if name in known}
