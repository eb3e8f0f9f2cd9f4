"""Trains the recipe smollm2-sums with PPO, GRPO and RLOO, and a control run; writes one JSON file per finished run.

    python benchmarks/real_smollm2.py                                   train
    python benchmarks/real_smollm2.py --verify ppo_123                  repeat updates 1 and 2 of a published run
    python benchmarks/real_smollm2.py --human svamp.jsonl               answers to 300 problems that people wrote
    python benchmarks/real_smollm2.py --probe                           what did the model learn?
    python benchmarks/real_smollm2.py --sweep learning_rate=1e-5,5e-5   short runs with other settings
    python benchmarks/real_smollm2.py --table --picture curves.png      tables and a picture of the JSON files

The runs are ordinary training commands, one after the other. After an interruption, start the same command again: a
run with a JSON file is skipped, an unfinished run is resumed. Flags after `--` are passed to every training command.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder

from benchmarks.constants import KINDS, ROOT
from rlhf.checkpoints.run_record import RunRecord
from rlhf.utils.console import Screen, quiet_libraries
from rlhf.utils.errors import RunError, UserError, run_command
from rlhf.utils.files import write_json
from rlhf.utils.statistics import over_prompts

RESULTS = ROOT / "benchmarks" / "results" / "real_smollm2"
SWEEP = "learning_rate=1e-5,2e-5,5e-5,1e-4"
STORED_SETTINGS = (
    *("learning_rate", "lr_schedule", "warmup_steps", "num_iterations", "episodes", "batch_size", "K", "ppo_epochs"),
    *("minibatches", "max_new_tokens", "temperature", "kl_placement", "kl_schedule", "kl_coef", "kl_target", "bf16"),
    *("use_lora", "reward_func", "control", "missing_eos_penalty", "eval_every"),
)
OF_THE_MACHINE = ("time/", "throughput/", "memory/")  # beginnings of names of figures
# TIMES -> parts in run.json. An evaluation of a better model writes best/
PARTS = {
    "start": ("imports", "checks", "demo parts", "models and data"),
    "measuring": ("evaluation", "best"),
    "checkpoints": ("checkpoints", "final save"),
    "learning": ("sampling", "scoring", "log-probs", "optimizer steps"),
}
SESSION = "# session "  # begins the first line of each session in a run's console log


@dataclass(frozen=True)
class Training:
    """One training command."""

    name: str  # of its run folder and of its JSON file
    kind: str  # a key of KINDS, or "sweep"
    algorithm: str
    seed: int
    words: tuple[str, ...]  # flags


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    quiet_libraries()
    screen = Screen()
    if arguments.table or arguments.picture:
        from benchmarks.real_smollm2_report import draw, tables

        if arguments.table:
            print(tables(arguments.results))
        if arguments.picture:
            draw(arguments.results, arguments.picture)
    elif arguments.verify:
        if not all([verify(name, arguments, screen.say) for name in arguments.verify]):
            raise SystemExit(1)
    elif arguments.human:
        from benchmarks.real_smollm2_probe import answer_human

        answer_human(arguments.human, arguments.runs, arguments.results, screen)
    elif arguments.probe is not None:
        from benchmarks.real_smollm2_probe import probe_models

        probe_models(arguments.probe, arguments.runs, arguments.results, screen)
    else:
        axes = arguments.sweep
        seeds = arguments.seeds
        trainings = trainings_of(arguments.kinds, seeds) if axes is None else sweep_of(axes, seeds, arguments.updates)
        for training in trainings:
            measure(training, arguments, screen.say)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42], help="seeds (42)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help=f"runs ({' '.join(KINDS)})")
    parser.add_argument("--runs", type=Path, default=Path("real_smollm2_runs"), help="folder of the run folders")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--recipe", default="smollm2-sums", help="the recipe (smollm2-sums)")
    parser.add_argument("--sweep", nargs="*", metavar="NAME=VALUE,VALUE", help=f"GRPO with each value ({SWEEP})")
    parser.add_argument("--updates", type=int, default=8, help="updates of each run of --sweep (8)")
    parser.add_argument("--probe", nargs="*", metavar="RUN", help="probe the start model and these runs (grpo_42)")
    parser.add_argument("--verify", nargs="+", metavar="RUN", help="repeat updates 1 and 2 of these published runs")
    parser.add_argument(
        "--human", type=Path, help="a file of problems: start model and finished runs answer 300 of them"
    )
    parser.add_argument("--table", action="store_true", help="print Markdown tables of the JSON files")
    parser.add_argument("--picture", type=Path, help="draw the JSON files into this file")
    parser.add_argument("more", nargs="*", help="after --: flags for every training command")
    return parser.parse_args(argv)


def trainings_of(kinds: Sequence[str], seeds: Sequence[int]) -> list[Training]:
    """Return one training per seed and kind, all kinds of the first seed first."""
    return [Training(f"{kind}_{seed}", kind, KINDS[kind][0], seed, KINDS[kind][1]) for seed in seeds for kind in kinds]


def sweep_of(axes: Sequence[str], seeds: Sequence[int], updates: int) -> list[Training]:
    """Return a short GRPO training per combination of values, evaluated before and after.

    An axis is `NAME=VALUE,VALUE`. Raises UserError for other texts.
    """
    axes = axes or [SWEEP]
    for axis in axes:
        if not all(axis.partition("=")):
            raise UserError("not a setting with values", f"--sweep {axis}", "Write NAME=VALUE,VALUE")
    names = [axis.partition("=")[0] for axis in axes]
    length = ("--num-iterations", str(updates), "--eval-every", str(updates))
    found = []
    for values in product(*(axis.partition("=")[2].split(",") for axis in axes)):
        point = dict(zip(names, values, strict=True))
        words = [word for name, value in point.items() for word in (f"--{name.replace('_', '-')}", value)]
        label = "_".join(f"{name}={value}" for name, value in point.items()).replace("/", "-")
        found += [Training(f"sweep_{label}_{updates}_{s}", "sweep", "grpo", s, (*length, *words)) for s in seeds]
    return found


# --- training --------------------------------------------------------------------------------------------------------


def measure(training: Training, arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Train, unless the training has a JSON file, and write that file."""
    file = arguments.results / f"{training.name}.json"
    if file.is_file():
        say(f"already measured: {file}")
        return
    folder = arguments.runs / training.name
    log = arguments.runs / f"{training.name}.log"
    words = ["--recipe", arguments.recipe, *training.words, *arguments.more, "--seed", str(training.seed)]
    command = [f"train_{training.algorithm}.py", *words]
    record = RunRecord.read(folder)
    if record is None or record.status != "finished":
        say(f"{'training' if record is None else 'resuming'} {training.name}, console output in {log}")
        train([*command, "--output", str(folder), *(["--resume"] if record is not None else [])], log)
    facts = {"name": training.name, "kind": training.kind, "command": command, **facts_of_run(folder, log)}
    write_json(file, facts)
    say(f"finished: {file}")


def verify(name: str, arguments: argparse.Namespace, say: Callable[[str], None]) -> bool:
    """Repeat updates 1 and 2 of a published run. Returns True if all their figures are equal."""
    file = arguments.results / f"{name}.json"
    if not file.is_file():
        raise UserError("file not found", file, "--verify needs the name of a published run")
    facts = json.loads(file.read_text(encoding="utf-8"))
    if "first_updates" not in facts:
        raise UserError("no figures of updates 1 and 2", file, "It was measured by an earlier release")
    folder = arguments.runs / f"verify_{name}"
    log = arguments.runs / f"verify_{name}.log"
    shutil.rmtree(folder, ignore_errors=True)
    precision = "--bf16" if facts["settings"]["bf16"] else "--no-bf16"
    threads = {"OMP_NUM_THREADS": str(facts["machine"]["threads_used"])}
    say(f"repeating updates 1 and 2 of {name}, console output in {log}")
    more = ["--num-iterations", "2", "--eval-prompts", "1", precision, "--output", str(folder)]
    train([*facts["command"], *more], log, {**os.environ, **threads})
    published = facts["first_updates"]
    found = first_updates(folder)
    equal = found["sha256"] == published["sha256"]
    say(f"{name}: {'equal' if equal else 'not equal'}, SHA-256 {found['sha256']}, published {published['sha256']}")
    for one, other in zip(published["figures"], found["figures"], strict=True):
        for figure in sorted(one):
            if one[figure] != other.get(figure):
                say(f"  update {one['update']}, {figure}: {other.get(figure)}, published {one[figure]}")
    return equal


def train(words: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
    """Run a training command and append its console output to `log`. Raises RunError with the end of the output.

    The first word is a script of the project. `environment` None: that of this process, with torch's number of
    threads, so that a run on a busy machine does not choose another one.
    """
    import torch

    from benchmarks.machine import busy

    environment = environment or {"OMP_NUM_THREADS": str(torch.get_num_threads()), **os.environ}
    log.parent.mkdir(parents=True, exist_ok=True)
    session = {"start": time.time(), "busy_before_percent": busy()}
    with log.open("a", encoding="utf-8") as opened:
        opened.write(f"\n{SESSION}{json.dumps(session)}\n")
        opened.flush()
        words = [sys.executable, str(ROOT / words[0]), *words[1:]]
        with subprocess.Popen(words, stdout=opened, stderr=subprocess.STDOUT, env=environment) as process:
            try:
                status = process.wait()
            except KeyboardInterrupt:  # Ctrl-C reaches the training, too, which then saves a checkpoint
                process.wait()
                raise
    if status != 0:
        output = log.read_text(encoding="utf-8", errors="replace").rpartition(SESSION)[2]
        raise RunError("the training failed", log, f"Its last output: {output[-1500:]}")


# --- the JSON file of a run ------------------------------------------------------------------------------------------


def facts_of_run(folder: Path, log: Path) -> dict[str, Any]:
    """Return the figures of a finished run. Raises UserError if the run is not finished.

    `accuracy` is the mean of the first reward function, or of the score of a run with a reward model.
    """
    import torch

    from benchmarks.machine import machine
    from rlhf.models.device import autocast_dtype

    run = RunRecord.require(folder, "--runs")
    if run.status != "finished":
        raise UserError(f"the run is {run.status}", folder, "Start this command again to resume it")
    settings = run.flat_settings
    rule = "score" if settings["rm_model"] else settings["reward_func"][0]
    files = sorted((folder / "samples").glob("update-*.jsonl"))
    before, after = (samples_of(file, rule) for file in (files[0], files[-1]))
    evaluations, seconds = evaluations_of(folder, log, run, rule, files)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings["bf16"] = autocast_dtype(settings["bf16"], device) is torch.bfloat16  # unset: the device's default
    return {
        "recipe": run.recipe,
        "algorithm": run.algorithm,
        "seed": run.seed,
        "machine": machine(device.type),
        **{name: getattr(run, name) for name in ("python", "platform", "versions", "commit")},
        "start_model": {"name": settings["actor_model"], "files": run.data["start_model_files"]}
        | (run.data.get("start_model_gguf") or {}),
        "settings": {name: settings[name] for name in STORED_SETTINGS if name in settings},
        "sessions": 1 + len(run.sessions or ()),
        "seconds": {**seconds, "cpu": run.figures.get("cpu_seconds")},
        "kl_per_sequence": run.figures["kl_after"],
        "accuracy": {"questions": len(before), **rise_of(before, after, run.seed)},
        "evaluations": evaluations,
        "topics": topics_of(before, after),
        **values_of(rule, before, after),
        "first_updates": first_updates(folder),
    }


Samples = list[tuple[float, str]]  # per question: 1 if the completion is right, and the topic


def samples_of(file: Path, rule: str) -> Samples:
    """Return the values of the reward function `rule` in an evaluation's samples. A missing score counts as wrong."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [(row.get("metrics", {}).get(rule, row["score"]) or 0.0, row.get("topic", "all")) for row in rows]


def rise_of(before: Samples, after: Samples, seed: int) -> dict[str, float]:
    """Return accuracy before and after, and the rise with its paired 95% bootstrap interval over questions."""
    rises = [b - a for (a, _), (b, _) in zip(before, after, strict=True)]
    found = over_prompts(rises, seed)
    means = {"before": fmean(value for value, _ in before), "after": fmean(value for value, _ in after)}
    return {**means, "rise": found.value, "low": found.low, "high": found.high}


def topics_of(before: Samples, after: Samples) -> dict[str, dict[str, float]]:
    """Return the number of questions and the accuracy before and after, per topic."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for (was, topic), (now, _) in zip(before, after, strict=True):
        pairs.setdefault(topic, []).append((was, now))
    return {
        topic: {"questions": len(found), "before": fmean(a for a, _ in found), "after": fmean(b for _, b in found)}
        for topic, found in sorted(pairs.items())
    }


def values_of(rule: str, before: Samples, after: Samples) -> dict[str, dict[str, Any]]:
    """Return the value of each question, before and after: 1 if the completion is right, or the score."""
    from benchmarks.real_smollm2_probe import digits

    both = {"before": [value for value, _ in before], "after": [value for value, _ in after]}
    return {"scores": both} if rule == "score" else {"right": {name: digits(values) for name, values in both.items()}}


def first_updates(folder: Path) -> dict[str, Any]:
    """Return the figures of updates 1 and 2, without times and memory, and their SHA-256.

    They depend on all completions and gradients of these updates, so two runs with one hash computed the same bits.
    """
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    figures = [
        {name: value for name, value in sorted(row.items()) if not name.startswith((*OF_THE_MACHINE, "eval/"))}
        for row in rows
        if row["update"] in (1, 2) and "loss" in row  # evaluations have rows of their own
    ]
    return {"sha256": hashlib.sha256(json.dumps(figures).encode()).hexdigest(), "figures": figures}


def evaluations_of(folder: Path, log: Path, run: RunRecord, rule: str, files: Sequence[Path]):
    """Return the evaluation curve, and the run's times in seconds since the start of the command.

    Event files have no time of the command's start. The log of this script has it; the file of the first evaluation's
    samples connects both clocks. Pauses between sessions do not count.
    """
    from rlhf.analysis.curves import read_scalars

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    curve = read_scalars(folder / "logs")[0]["eval/score"]
    first, last = (file.stat().st_mtime for file in (files[0], files[-1]))
    start = max((s["start"] for s in sessions_of(log) if s["start"] <= first), default=_seconds(run.started))
    at = {int(u): float(s) + first - start for u, s in zip(curve.updates, curve.seconds, strict=True)}
    names = {"length": "length", "eos_rate": "eos_rate", "perplexity": "perplexity", "kl": "kl_divergence"}
    found = [
        {"update": row["update"], "seconds": at[row["update"]], "accuracy": row.get(f"eval/{rule}", row["eval/score"])}
        | {name: row[f"eval/{tag}"] for name, tag in names.items()}
        for row in rows
        if "eval/score" in row
    ]
    updates = [sum(v for name, v in row.items() if name.startswith("time/")) for row in rows if "loss" in row]
    total = found[-1]["seconds"] + _seconds(run.ended) - last
    busy = [s["busy_before_percent"] for s in sessions_of(log)]
    seconds = {"total": total, "update_median": median(updates), "busy_before_percent": max(busy, default=None)}
    return with_times(found, folder), {**seconds, **times_of(run.time or {})}


def times_of(time: dict[str, float]) -> dict[str, float]:
    """Return TIMES of a whole run in seconds, from those of its run.json; {} for a run of an older release."""
    found = {
        name: sum(seconds for part, seconds in time.items() if part.split("/")[0] in parts)
        for name, parts in PARTS.items()
    }
    return found if time else {}


def with_times(evaluations: Sequence[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run, each with TIMES: the seconds of the run until this evaluation has ended. An
    evaluation includes writing best/. Unchanged if the run was resumed, or has no record of its times. A run that
    saves by the clock has no "checkpoints": their updates are not recorded.

    The newest checkpoint has the seconds of each update, evaluation and checkpoint.
    """
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    files = sorted(folder.glob("checkpoint-*/training.json"), key=lambda file: int(file.parent.name.split("-")[1]))
    spent = json.loads(files[-1].read_text(encoding="utf-8"))["progress"].get("seconds") if files else None
    if record.get("sessions") or not spent:
        return list(evaluations)
    every = record["settings"]["run"]["save_every"]
    start = evaluations[0]["seconds"] - spent["evaluations"][0]
    found = []
    for number, one in enumerate(evaluations, 1):
        measuring = sum(spent["evaluations"][:number])
        times = {"start": start, "measuring": measuring, "learning": sum(spent["updates"][: one["update"]])}
        if every:
            saves = max(0, one["update"] - 1) // every
            times["checkpoints"] = sum(spent.get("checkpoints", [])[:saves])  # the first one has no time of one yet
        found.append({**one, **times})
    return found


def sessions_of(log: Path) -> list[dict[str, float]]:
    """Return start (Unix time) and CPU use of other programs before each session of a run."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return [json.loads(line.removeprefix(SESSION)) for line in lines if line.startswith(SESSION)]


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


if __name__ == "__main__":
    run_command(main)
