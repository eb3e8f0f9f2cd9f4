"""run.json: the settings of a run, its data, versions and machine, what it used, and how it ended. No torch."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import uuid
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

from rlhf.algorithms.table import ALGORITHMS, Algorithm, add_row
from rlhf.utils.command_lines import is_checkout, short_name, typed_words
from rlhf.utils.errors import UserError
from rlhf.utils.files import write_json
from rlhf.utils.libraries import version_of
from rlhf.utils.paths import note_names, same_value

RUN_FILE = "run.json"
FORMAT = 4  # of run.json: add 1 if a key gets another name or meaning, or if a new key is required
RESUME_MAY_CHANGE = (  # settings that do not affect what is learned
    *("seeds", "ddp_timeout", "output", "overwrite", "dry_run", "check", "save_every", "keep", "resume"),
    *("memory", "resume_anyway", "record_tokens", "record_every", "record_prompts"),  # the last two: of older versions
    *("merge_lora", "export_from", "push_to_hub", "report_to", "write_parts"),
    "threads",  # changes rounding only; `choose_threads` prints a warning
)
# between seeds of the same configuration: a GPU's free memory decides the last two, which change rounding only
SEEDS_MAY_DIFFER = ("seed", *RESUME_MAY_CHANGE, "micro_batch_tokens", "rollout_slots")
# settings that change what is measured, not what is learned
OF_EVALUATIONS = ("eval_func", "eval_samples", "eval_temperature")
PACKAGES = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "bitsandbytes")


# --- the content of run.json: the fields are its keys ----------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The budget of a run, known before its first update."""

    updates: int
    episodes: int
    optimizer_steps: int
    completion_tokens_at_most: int


@dataclass(frozen=True)
class Spent:
    """What a finished run used."""

    updates: int
    episodes: int
    optimizer_steps: int
    completion_tokens: int
    resampled_episodes: int = 0  # of the episodes, those that dynamic sampling drew


@dataclass(frozen=True)
class Best:
    """The evaluation of the model in best/, and all evaluations that it was chosen from."""

    update: int
    why: str
    rule: str
    kl_unit: str  # "nats/sequence" or "nats/token"
    perplexity_text: str
    evaluations: list  # dicts of the fields of checkpoints/best.Candidate and peak_memory_gib; the start model's first


@dataclass(frozen=True)
class Merged:
    """The weights in merged/: a model with its adapter merged into the base."""

    which: str  # "final" or "best"
    update: int  # the weights are those after this update


PARTS = {"plan": Plan, "best": Best, "spent": Spent, "merged": Merged, "row": Algorithm}


@dataclass(frozen=True)
class RunRecord:
    """The content of a run.json. Fields without a default exist from the start of a run. None: not set yet."""

    status: str  # "running", "finished", "stopped" or "failed"
    id: str  # also stored in the run's checkpoints
    started: str  # UTC
    pid: int
    command: list  # words of the command line
    python: str
    platform: str
    versions: dict  # package -> version; None if it is not installed
    commit: str | None  # None if this project is not a git checkout
    algorithm: str
    settings: dict  # by group, as in Config
    seed: int
    data: dict  # numbers of prompts, and hashes of prompts, models and reward functions
    plan: Plan
    prompts: dict  # rows and split of the data file
    on_hub: list  # names of the start model and the dataset, if they are from the Hugging Face Hub
    row: Algorithm | None = None  # of an algorithm that is not one of the library's
    best: Best | None = None
    figures: dict | None = None  # results of a finished run: name -> value; None for a value that is not finite
    spent: Spent | None = None
    time: dict | None = None  # part of the command -> seconds; inner parts as `outer/inner`
    merged: Merged | None = None
    ended: str | None = None  # UTC
    reason: str | None = None  # why the run stopped or failed
    sessions: list | None = None  # dicts of start, process and environment, one per --resume
    processes: int | None = None  # their number, since the start or the resumption of the run
    threads: int | None = None  # of torch, since the start or the resumption of the run
    console_lost: dict | None = None  # "stdout" or "stderr" -> why it could not be written; the run continued
    unknown: dict | None = None  # keys that the user added to the file; they are preserved

    @property
    def recipe(self) -> str:
        return self.settings["recipe"]

    @property
    def flat_settings(self) -> dict[str, Any]:
        """The settings of all groups: name -> value."""
        return flat_settings(self.settings)

    @property
    def date(self) -> str:
        """The local date and time with which the run renders chat templates that write them (ISO 8601). Versions that
        did not store it rendered with the present date, which at first was that of the start."""
        return self.data.get("date") or datetime.fromisoformat(self.started).astimezone().isoformat()

    @classmethod
    def begin(cls, **facts: Any) -> RunRecord:
        """Return the record of a run that starts now in this process."""
        return cls(status="running", id=uuid.uuid4().hex, started=now(), pid=os.getpid(), **environment(), **facts)

    @classmethod
    def read(cls, folder: Path) -> RunRecord | None:
        """Return the record of the run in `folder`; None if there is no run.json. An algorithm that the table does not
        have is added to it from the file; without its class, it cannot train.

        Raises UserError if run.json is incomplete or corrupted, has another format, or is not a training run's.
        """
        if not (folder / RUN_FILE).is_file():
            return None
        facts = read_json(folder)
        again = "Restore the file from a backup, or train the run again"
        if facts is None:
            (folder / RUN_FILE).open("rb").close()  # raises OSError if the system refuses to read it
            raise UserError(f"{RUN_FILE} is incomplete or corrupted", folder, again)
        if not facts.keys() & {"format", "settings"}:  # a reward model's folder
            raise UserError(f"{RUN_FILE} has no settings, so this is not a training run", folder, "Use another folder")
        if facts.get("format", 1) != FORMAT:
            raise UserError(
                f"{RUN_FILE} has format {facts.get('format', 1)}, and this version reads format {FORMAT}",
                folder,
                "Train the run again, or use the version that made it",
            )
        try:
            run = _from_json(facts)
            note_names(folder / RUN_FILE, run.flat_settings.values())
            if run.row is not None and run.algorithm not in ALGORITHMS:
                add_row(replace(run.row, name=run.algorithm, defaults={}))  # a file of others sets no default
            return run
        except ValueError as error:
            raise UserError(
                f"{RUN_FILE} is incomplete or corrupted, {str(error)!r} is missing or invalid", folder, again
            ) from None

    @classmethod
    def require(cls, folder: Path, flag: str) -> RunRecord:
        """Return the record of the run in `folder`. Raises UserError as `read`, and if there is no run."""
        run = cls.read(folder)
        if run is None:
            there = f"not a run folder (no {RUN_FILE})" if folder.is_dir() else "folder not found"
            known = ", ".join(map(str, runs_in(Path())))
            here = f"run folders in the current folder: {known}" if known else "the current folder has no run folder"
            words = f"{flag.split(', ')[-1]} RUN_FOLDER" if flag.startswith("--") else "a run folder"
            raise UserError(there, f"{flag} {folder}", f"Pass {words}; {here}")
        return run

    def require_algorithm(self, algorithm: str, folder: str) -> None:
        """Raise UserError if the run in `folder` is resumed with the command of another algorithm."""
        if self.algorithm != algorithm:
            of = short_name(self.algorithm)
            raise UserError(f"this is a run of {of}", f"--resume, --output {folder}", "Resume it with that command")

    def write(self, folder: Path) -> None:
        """Replace the run.json in `folder` atomically."""
        write_json(folder / RUN_FILE, self.as_json())

    def as_json(self) -> dict[str, Any]:
        """Return the keys and values of run.json, `format` first."""
        facts = asdict(self)
        more = facts.pop("unknown") or {}
        required = {f.name for f in fields(self) if f.default is MISSING}
        known = {name: value for name, value in facts.items() if name in required or value is not None}
        return {"format": FORMAT, **known, **more}


def _from_json(facts: dict[str, Any]) -> RunRecord:
    """Return the record with these keys. Raises ValueError with the name of a missing or invalid key."""
    run = _build(RunRecord, facts)
    if not isinstance(run.settings.get("recipe"), str):
        raise ValueError("settings.recipe")
    models = run.settings.get("model", {})
    if models.get("rm_model") is not None:
        models.setdefault("rm_text", "eos")  # runs of older versions scored the text up to EOS
    names = {"format", *(f.name for f in fields(RunRecord))}
    return replace(run, unknown={name: value for name, value in facts.items() if name not in names} or None)


def _build(kind: type, facts: dict[str, Any], path: str = "") -> Any:
    """Return a dataclass `kind` with the values of `facts`. Raises ValueError as `_from_json`."""
    types = get_type_hints(kind)
    values = {}
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
    """Return the run folders in `folder`, including runs of another format, sorted by the time when they started."""
    found = {file.parent: facts for file in folder.glob(f"*/{RUN_FILE}") if (facts := read_json(file.parent))}
    runs = {place: str(facts.get("started", "")) for place, facts in found.items() if "settings" in facts}
    return sorted(runs, key=lambda place: (runs[place], place.name))


def last_run(flag: str) -> Path:
    """Return the most recently started run in the current folder. Raises UserError if there is none.

    A run of another format is not skipped, so that reading it raises an error instead of using an older run.
    """
    here = runs_in(Path())
    if not here:
        raise UserError("no run in the current folder", flag, "Give the path of a run folder, or train a run first")
    return here[-1]


# --- settings --------------------------------------------------------------------------------------------------------


def flat_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of all groups: name -> value."""
    leaves = {k: v for group in settings.values() if isinstance(group, dict) for k, v in group.items()}
    return leaves | {k: v for k, v in settings.items() if not isinstance(v, dict)}


def differences(one: dict[str, Any], other: dict[str, Any], aside: Iterable[str] = ()) -> list[str]:
    """Return the names of the settings in which two runs differ, without those in `aside`.

    Ignores settings that only one run has, because different versions of this project wrote the runs.
    """
    here = flat_settings(one)
    there = flat_settings(other)
    return [n for n in sorted(here.keys() & there.keys()) if n not in aside and not same_value(here[n], there[n])]


# --- time and machine ------------------------------------------------------------------------------------------------


def now() -> str:
    """Return the UTC time with milliseconds, so that runs can be sorted."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def environment() -> dict[str, Any]:
    """Return command line, Python, platform, package versions and commit."""
    return {
        "command": typed_words(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version_of(name) for name in PACKAGES},
        "commit": _commit() if is_checkout() else None,
    }


def _commit() -> str | None:
    """Return the commit of a checkout; None without git."""
    here = Path(__file__).resolve().parent
    silent = subprocess.DEVNULL
    try:
        return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=here, stderr=silent, encoding="utf-8").strip()
    except (OSError, subprocess.CalledProcessError):
        return None
