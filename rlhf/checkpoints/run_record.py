"""run.json: the settings of a run, its data, versions and machine, what it spent, and how it ended.

Imports no torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import uuid
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

from rlhf.utils.errors import UserError
from rlhf.utils.files import write_json

RUN_FILE = "run.json"
FORMAT = 2  # of run.json: add 1 if a key gets another name or meaning, or if a new key is required
RESUME_MAY_CHANGE = (  # settings that change nothing of what is learned
    *("seeds", "output", "overwrite", "dry_run", "check", "save_every", "keep", "resume", "resume_anyway"),
    *("record_tokens", "record_format", "record_every", "record_prompts"),
    *("merge_lora", "export_from", "push_to_hub", "hub_private", "replay"),
)
SEEDS_MAY_DIFFER = ("seed", *RESUME_MAY_CHANGE)  # between runs that are seeds of the same
RENAMED = {"reply_length": "max_new_tokens"}  # setting in older runs -> its name today
PACKAGES = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "bitsandbytes")


# --- what run.json holds: the fields are its keys --------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The budget of a run, known before its first update."""

    updates: int
    episodes: int
    optimizer_steps: int
    reply_tokens_at_most: int


@dataclass(frozen=True)
class Spent:
    """What a finished run used."""

    updates: int
    episodes: int
    optimizer_steps: int
    reply_tokens: int


@dataclass(frozen=True)
class Best:
    """The evaluation whose model is in best/, and all evaluations that it was chosen from."""

    update: int
    why: str
    rule: str
    kl_unit: str  # "nats/sequence" or "nats/token"
    perplexity_text: str
    evaluations: list  # of dicts: update, score, kl, target, perplexity, peak_memory_gib; the start model's first


@dataclass(frozen=True)
class Merged:
    """The weights in merged/: an adapter and its base as one model."""

    which: str  # "final" or "best"
    update: int  # after which they were saved


PARTS = {"plan": Plan, "best": Best, "spent": Spent, "merged": Merged}


@dataclass(frozen=True)
class RunRecord:
    """The content of a run.json. A field without a default is there from the start of a run; None: not there yet."""

    status: str  # "running", "finished", "stopped" or "failed"
    id: str  # the checkpoints of a run carry it
    started: str  # UTC
    pid: int
    command: list  # of words
    python: str
    platform: str
    versions: dict  # package -> version; None if it is not installed
    commit: str | None  # None if this project is not a git checkout
    algorithm: str
    settings: dict  # by group, as in Config
    seed: int
    data: dict  # numbers of prompts, and fingerprints of prompts, models and reward functions
    plan: Plan
    prompts: dict  # rows and split of the data file
    on_hub: list  # of the names of model and data, those that are on the Hugging Face Hub
    best: Best | None = None
    figures: dict | None = None  # of a finished run: name -> value; None for a value that is not finite
    spent: Spent | None = None
    merged: Merged | None = None
    ended: str | None = None  # UTC
    reason: str | None = None  # why the run stopped or failed
    sessions: list | None = None  # of dicts: start, process and environment of each --resume
    unknown: dict | None = None  # keys that the user added to the file; they are written back

    @property
    def recipe(self) -> str:
        return self.settings["recipe"]

    @property
    def flat_settings(self) -> dict[str, Any]:
        """The settings without their groups: name -> value."""
        return flat_settings(self.settings)

    @classmethod
    def begin(cls, **facts: Any) -> RunRecord:
        """Return the record of a run that starts now in this process."""
        return cls(status="running", id=uuid.uuid4().hex, started=now(), pid=os.getpid(), **environment(), **facts)

    @classmethod
    def read(cls, folder: Path) -> RunRecord | None:
        """Return the record of the run in `folder`; None if there is no run.json.

        Raises UserError if run.json is incomplete or corrupted, has another format, or is not a training run's.
        """
        if not (folder / RUN_FILE).is_file():
            return None
        facts = read_json(folder)
        again = "Restore the file from a copy, or train the run again"
        if facts is None:
            raise UserError(f"{RUN_FILE} is incomplete or corrupted: {folder}. {again}")
        if not facts.keys() & {"format", "settings"}:  # a reward model's
            raise UserError(
                f"{RUN_FILE} has no settings, so this is not a training run: {folder}. Name another folder"
            )
        if facts.get("format", 1) != FORMAT:
            raise UserError(
                f"{RUN_FILE} has format {facts.get('format', 1)}, and this version reads format {FORMAT}: {folder}. "
                "Train the run again, or use the version that made it"
            )
        try:
            return _from_json(facts)
        except ValueError as error:
            name = str(error)
            raise UserError(
                f"{RUN_FILE} is incomplete or corrupted, without a valid {name!r}: {folder}. {again}"
            ) from None

    @classmethod
    def require(cls, folder: Path, flag: str) -> RunRecord:
        """Return the record of the run in `folder`. Raises UserError as `read`, and if there is no run."""
        run = cls.read(folder)
        if run is None:
            there = f"not a run (no {RUN_FILE})" if folder.is_dir() else "no such folder"
            known = ", ".join(map(str, runs_in(Path()))) or "none here"
            raise UserError(f"{there}: {flag} {folder}. Give the folder of a run ({known})")
        return run

    def require_algorithm(self, algorithm: str, folder: str) -> None:
        """Raise UserError if another algorithm's command resumes this run, which is in `folder`."""
        if self.algorithm != algorithm:
            raise UserError(
                f"a run of train_{self.algorithm}.py: --resume, --output {folder}. Resume it with that command"
            )

    def write(self, folder: Path) -> None:
        """Replace the run.json in `folder`, complete or not at all."""
        write_json(folder / RUN_FILE, self.as_json())

    def as_json(self) -> dict[str, Any]:
        """The keys and values of run.json, `format` first."""
        facts = asdict(self)
        more = facts.pop("unknown") or {}
        required = {f.name for f in fields(self) if f.default is MISSING}
        known = {name: value for name, value in facts.items() if name in required or value is not None}
        return {"format": FORMAT, **known, **more}


def _from_json(facts: dict[str, Any]) -> RunRecord:
    """Raises ValueError with the name of a key that is missing or has a value of another type."""
    run = _build(RunRecord, facts)
    run = replace(run, settings=_with_todays_names(run.settings))
    if not isinstance(run.settings.get("recipe"), str):
        raise ValueError("settings.recipe")
    names = {"format", *(f.name for f in fields(RunRecord))}
    return replace(run, unknown={name: value for name, value in facts.items() if name not in names} or None)


def _with_todays_names(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a run's settings with today's names in place of those that older versions wrote."""
    renamed = {g: {RENAMED.get(n, n): v for n, v in s.items()} for g, s in settings.items() if isinstance(s, dict)}
    if renamed.get("kl", {}).get("kl_target", "") is None and renamed["kl"].get("kl_schedule") == "adaptive":
        renamed["kl"]["kl_target"] = ["6/sequence"]  # the target that "unset" meant
    return settings | renamed


def _build(kind: type, facts: dict[str, Any], path: str = "") -> Any:
    """Return a dataclass `kind` with the values of `facts`. Raises ValueError as `_from_json`."""
    types, values = get_type_hints(kind), {}
    for field in fields(kind):
        if field.name not in facts and field.default is not MISSING:
            continue
        value = facts.get(field.name)
        if field.name in PARTS and isinstance(value, dict):
            value = _build(PARTS[field.name], value, f"{path}{field.name}.")
        if field.name not in facts or not isinstance(value, types[field.name]):
            raise ValueError(path + field.name)
        values[field.name] = value
    return kind(**values)


# --- finding runs ----------------------------------------------------------------------------------------------------


def read_json(folder: Path) -> dict[str, Any] | None:
    """Return the content of a run.json of any format, also a reward model's; None if it cannot be read."""
    try:
        facts = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) and "status" in facts else None


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of runs in `folder`, runs of another format included; the one that was started last comes
    last."""
    found = {file.parent: facts for file in folder.glob(f"*/{RUN_FILE}") if (facts := read_json(file.parent))}
    runs = {place: str(facts.get("started", "")) for place, facts in found.items() if "settings" in facts}
    return sorted(runs, key=lambda place: (runs[place], place.name))


def last_run(flag: str) -> Path:
    """Return the run in this folder that was started last. Raises UserError if there is none.

    A run of another format is not skipped: reading it is an error, and no older run is taken for the last one.
    """
    here = runs_in(Path())
    if not here:
        raise UserError(f"no run in this folder: {flag}. Name a run's folder, or train one first")
    return here[-1]


# --- settings --------------------------------------------------------------------------------------------------------


def flat_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without their groups: name -> value."""
    leaves = {k: v for group in settings.values() if isinstance(group, dict) for k, v in group.items()}
    return leaves | {k: v for k, v in settings.items() if not isinstance(v, dict)}


def differences(one: dict[str, Any], other: dict[str, Any], aside: Iterable[str] = ()) -> list[str]:
    """Return the names of the settings in which two runs differ, without those in `aside`.

    A setting that only one of them has is ignored: the runs were made by different versions of this project.
    """
    here, there = flat_settings(one), flat_settings(other)
    return [n for n in sorted(here.keys() & there.keys()) if n not in aside and here[n] != there[n]]


# --- time and machine ------------------------------------------------------------------------------------------------


def now() -> str:
    """Return the time, UTC, in milliseconds: two runs have an order."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def environment() -> dict[str, Any]:
    """Return command, versions, commit and machine."""
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    """Return the installed version; None if the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return this project's commit; None if it is not a git checkout or git is not installed."""
    here = Path(__file__).resolve().parent
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
