"""Kills a training run, resumes it, and compares the result with an uninterrupted run, many times, in forks.

python -m tests.kills KILLS SEED FOLDER train_ppo|train_grpo FLAG...   prints a JSON object. Not for Windows (fork).

A run is killed in turn during a save, between two parts of a save, anywhere in the run, and during an update of best/.
The instant is uniform over the time that this took in an uninterrupted run. A run that was killed between two parts is
resumed, and killed between two parts of its next save. A run keeps one checkpoint, so every save except the first one
removes a checkpoint.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import select
import shutil
import signal
import sys
import time
from pathlib import Path

# events: the first update; the start and the end of a save and of an update of best/
FIRST = b"f"
SAVE = (b"(", b")")
BEST = (b"[", b"]")
PART = b"p"  # the start or the end of a part of a save
METRICS_LOG = "metrics.jsonl"
MEASURED = ("time/", "throughput/", "memory/")
AIMS = (SAVE, PART, None, BEST)


def child(script, argv: list[str], events: int, last_part: int | None) -> None:
    """Run a training script that writes an event at its first update, and at the start and end of saves, their parts,
    and of best/. It kills itself at the event `last_part` of the parts."""
    from rlhf.callbacks import checkpointing
    from rlhf.checkpoints import manifest
    from rlhf.trainer.loop import OnPolicyLoop

    seen = []

    def at_part():
        os.write(events, PART)
        seen.append(PART)
        if len(seen) == last_part:
            os.kill(os.getpid(), signal.SIGKILL)

    def with_parts(part):
        def run(*given):
            at_part()
            result = part(*given)
            at_part()
            return result

        return run

    for owner, name in (
        (checkpointing, "save_trainer_state"),
        (checkpointing, "hardlink_dir"),
        (manifest, "_write_manifest"),
        (manifest, "rename_synced"),
        (manifest, "_remove"),
    ):
        setattr(owner, name, with_parts(getattr(owner, name)))
    update = OnPolicyLoop.update_step
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)

    def with_events(part, started, ended):
        def run(*given):
            os.write(events, started)
            part(*given)
            os.write(events, ended)

        return run

    def update_with_event(self, number):
        os.write(events, FIRST if number == 1 else b"")
        return update(self, number)

    checkpointing.Checkpoints.save = with_events(checkpointing.Checkpoints.save, *SAVE)
    checkpointing.update_dir_atomically = with_events(checkpointing.update_dir_atomically, *BEST)
    OnPolicyLoop.update_step = update_with_event
    script.main(argv)


def start(script, argv: list[str], last_part: int | None = None) -> tuple[int, int]:
    """Fork a run, as `child`. Return its process id and the pipe from which its events are read."""
    pipe, events = os.pipe()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            child(script, argv, events, last_part)
            status = 0
        finally:
            os._exit(status)
    os.close(events)
    return process, pipe


def follow(
    pipe: int, until: float | None = None, until_event: tuple[bytes, int] = (b"", 1)
) -> list[tuple[bytes, float]]:
    """Return the events with their times: until the pipe ends, until a time, or until one event came that often."""
    seen: list[tuple[bytes, float]] = []
    while sum(event == until_event[0] for event, _ in seen) < until_event[1]:
        left = None if until is None else max(0.0, until - time.monotonic())
        if not select.select([pipe], [], [], left)[0]:
            break
        event = os.read(pipe, 1)
        if not event:
            break
        seen.append((event, time.monotonic()))
    return seen


def whole_run(script, argv: list[str], last_part: int | None = None) -> tuple[list[tuple[bytes, float]], int]:
    """Return the events and the exit status of a run that nothing else interrupts."""
    process, pipe = start(script, argv, last_part)
    seen = follow(pipe)
    os.close(pipe)
    return seen, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kill(
    script,
    argv: list[str],
    draw: random.Random,
    plain: list[tuple[bytes, float]],
    aim: tuple[bytes, bytes] | bytes | None,
) -> list[bytes] | None:
    """Kill a run at a random instant of one part, or of the whole run. Return its events, or None if it had ended."""
    parts = sum(event == PART for event, _ in plain)
    process, pipe = start(script, argv, 1 + draw.randrange(parts) if aim == PART else None)
    if aim == PART:
        seen = follow(pipe)
    elif aim is not None:
        starts, ends = ([at for event, at in plain if event == which] for which in aim)
        lasted = [end - at for at, end in zip(starts, ends, strict=True)]
        which = draw.randrange(len(starts))
        seen = follow(pipe, until_event=(aim[0], which + 1))
        seen += follow(pipe, until=time.monotonic() + draw.random() * lasted[which])
    else:
        while os.read(pipe, 1) not in (FIRST, b""):
            pass
        first = next(at for event, at in plain if event == FIRST)
        seen = follow(pipe, until=time.monotonic() + draw.random() * (plain[-1][1] - first))
    if aim != PART:
        os.kill(process, signal.SIGKILL)
    killed = os.WIFSIGNALED(os.waitpid(process, 0)[1])
    seen += follow(pipe)
    os.close(pipe)
    return [event for event, _ in seen] if killed else None


def scalars(logs: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the points of every scalar as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(logs), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(p.step, p.value) for p in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def metrics_of(run: Path) -> list[dict]:
    """Return the lines of a run's metrics.jsonl, without what differs between two identical runs."""
    lines = (run / METRICS_LOG).read_text(encoding="utf-8").splitlines()
    return [{tag: v for tag, v in json.loads(line).items() if not tag.startswith(MEASURED)} for line in lines]


def best_is_whole(plain: Path, killed: Path, start: Path) -> bool:
    """True if a killed run has no best/, or if best/ loads and is the policy of one of the run's evaluations."""
    from peft import load_peft_weights
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    from rlhf.checkpoints.model_folder import ADAPTER_FILE, WEIGHTS_FILE
    from rlhf.checkpoints.run_folder import BEST_FOLDER

    best = killed / BEST_FOLDER
    if not best.exists():
        return True
    adapter = (best / ADAPTER_FILE).exists()

    def policy(folder: Path) -> dict:
        return load_peft_weights(str(folder), device="cpu") if adapter else load_file(folder / WEIGHTS_FILE)

    import torch

    try:
        AutoTokenizer.from_pretrained(best)
        found = policy(best)
    except (OSError, ValueError, SafetensorError):
        return False
    if adapter and not any(found[name].any() for name in found if "lora_B" in name):
        return True  # the start model's: the B matrices are zero
    known = [*([] if adapter else [start]), *plain.glob("checkpoint-*")]
    return any(all(torch.equal(found[n], one[n]) for n in found) for one in map(policy, known))


def differing(one: Path, other: Path) -> list[str]:
    """Return one line per bit-exact difference between two finished runs: weights, optimizer state, metrics."""
    import torch
    from safetensors.torch import load_file

    from rlhf.checkpoints.manifest import find_checkpoints
    from rlhf.checkpoints.run_record import RunRecord

    problems = []
    ends = [find_checkpoints(run, RunRecord.read(run).id).newest for run in (one, other)]
    pairs = [(one, other), (one / "best", other / "best"), (ends[0], ends[1])]
    for here, there in pairs:
        files = sorted(file.name for file in here.glob("*.safetensors"))
        if files != sorted(file.name for file in there.glob("*.safetensors")):
            problems.append(f"{there.name}: its files are not {files}")
            continue
        for file in files:
            tensors = load_file(here / file)
            others = load_file(there / file)
            same = tensors.keys() == others.keys() and all(torch.equal(tensors[n], others[n]) for n in tensors)
            problems += [] if same else [f"{there.name}/{file} differs"]
    if metrics_of(one) != metrics_of(other):
        problems.append(f"{METRICS_LOG} differs")
    curves, others = (scalars(run / "logs") for run in (one, other))
    for tag in curves.keys() | others.keys():
        if tag.startswith(MEASURED):
            continue
        problems += [] if curves.get(tag) == others.get(tag) else [f"{tag} differs, or has duplicate points"]
    return problems


def main(kills: int, seed: int, folder: Path, script_name: str, flags: list[str]) -> dict:
    from rlhf.checkpoints.manifest import find_checkpoints
    from rlhf.checkpoints.run_record import RunRecord

    script = importlib.import_module(script_name)
    draw = random.Random(seed)
    importlib.import_module("rlhf.run.train")
    plain, status = whole_run(script, [*flags, "--keep", "99", "--output", str(folder / "plain")])
    assert status == 0, "the uninterrupted run failed"
    result = dict.fromkeys(("killed", "in_a_save", "in_best", "twice", "resumed", "started_again"), 0) | {
        "problems": []
    }
    saves, parts = (sum(event == which for event, _ in plain) for which in (SAVE[0], PART))
    first_model = Path(flags[flags.index("--actor-model") + 1])
    while result["killed"] < kills or result["in_a_save"] < kills * 10 // 25:
        output = folder / f"killed_{result['killed']}"
        aim = AIMS[result["killed"] % len(AIMS)] if result["killed"] < kills else SAVE
        events = kill(script, [*flags, "--keep", "1", "--output", str(output)], draw, plain, aim)
        if events is None:
            shutil.rmtree(output)
            continue
        result["killed"] += 1
        for name, (started, ended) in (("in_a_save", SAVE), ("in_best", BEST)):
            result[name] += events.count(started) > events.count(ended)
        if not best_is_whole(folder / "plain", output, first_model):
            result["problems"].append(
                f"kill {result['killed']}: best/ is not the model of an evaluation after {events}"
            )
        run = RunRecord.read(output)
        newest = find_checkpoints(output, run.id).newest
        if SAVE[1] in events and newest is None:
            result["problems"].append(f"kill {result['killed']}: no valid checkpoint after {events}")
        result["started_again" if newest is None else "resumed"] += 1
        if aim == PART:
            _, status = whole_run(script, ["--resume", "--output", str(output)], 1 + draw.randrange(parts // saves))
            result["twice"] += status == -signal.SIGKILL
        _, status = whole_run(script, ["--resume", "--output", str(output)])
        if status:
            result["problems"].append(f"kill {result['killed']}: resuming ended with {status}")
        result["problems"] += [f"kill {result['killed']}: {line}" for line in differing(folder / "plain", output)]
        shutil.rmtree(output)
    return result


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5:])))
