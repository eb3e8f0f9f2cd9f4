"""Kill a training run, resume it, and compare what it ends with; over and over, in forks of one process.

python -m tests.kills KILLS SEED FOLDER train_ppo|train_grpo FLAG...   prints a JSON object. Not for Windows (fork).

A run is killed at an instant drawn uniformly, every second time from the whole run, else from a save: between the
moment at which a save begins and that at which it has ended, as an unharmed run took for it.
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

FIRST, BEGAN, ENDED = b"f", b"(", b")"


def child(script, argv: list[str], marks: int) -> None:
    """One training run, which marks the beginning of its first update, and the beginnings and ends of its saves."""
    from rlhf import callbacks
    from rlhf.loop import OnPolicyLoop

    save, update, quiet = callbacks.Checkpoints.save, OnPolicyLoop.one_update, os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)

    def marked_save(self, number):
        os.write(marks, BEGAN)
        save(self, number)
        os.write(marks, ENDED)

    def marked_update(self, number):
        os.write(marks, FIRST if number == 1 else b"")
        return update(self, number)

    callbacks.Checkpoints.save, OnPolicyLoop.one_update = marked_save, marked_update
    script.main(argv)


def start(script, argv: list[str]) -> tuple[int, int]:
    """A fork that runs, and the pipe on which it marks."""
    heard, marks = os.pipe()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            child(script, argv, marks)
            status = 0
        finally:
            os._exit(status)
    os.close(marks)
    return process, heard


def follow(heard: int, until: float | None = None, saves: int | None = None) -> list[tuple[bytes, float]]:
    """The marks with their times, until there are no more, until an instant, or until so many saves have begun."""
    seen: list[tuple[bytes, float]] = []
    while saves is None or sum(mark == BEGAN for mark, _ in seen) < saves:
        left = None if until is None else max(0.0, until - time.monotonic())
        if not select.select([heard], [], [], left)[0]:
            break
        mark = os.read(heard, 1)
        if not mark:
            break
        seen.append((mark, time.monotonic()))
    return seen


def whole_run(script, argv: list[str]) -> tuple[list[tuple[bytes, float]], int]:
    """An unharmed run's marks and exit status."""
    process, heard = start(script, argv)
    seen = follow(heard)
    os.close(heard)
    return seen, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kill(
    script, argv: list[str], draw: random.Random, plain: list[tuple[bytes, float]], in_save: bool
) -> list[bytes] | None:
    """A run killed at random: its marks; None where it had come to its end by then."""
    begun = [at for mark, at in plain if mark == BEGAN]
    lasted = [end - at for at, end in zip(begun, (at for mark, at in plain if mark == ENDED), strict=True)]
    process, heard = start(script, argv)
    if in_save:
        which = draw.randrange(len(begun))
        seen = follow(heard, saves=which + 1)
        seen += follow(heard, until=time.monotonic() + draw.random() * lasted[which])
    else:
        while os.read(heard, 1) not in (FIRST, b""):
            pass
        first = next(at for mark, at in plain if mark == FIRST)
        seen = follow(heard, until=time.monotonic() + draw.random() * (plain[-1][1] - first))
    os.kill(process, signal.SIGKILL)
    killed = os.WIFSIGNALED(os.waitpid(process, 0)[1])
    seen += follow(heard)
    os.close(heard)
    return [mark for mark, _ in seen] if killed else None


def differing(one: Path, other: Path) -> list[str]:
    """In what two finished runs are unlike: weights, value head, optimizer, metrics; a line each. To the bit."""
    import torch
    from safetensors.torch import load_file

    from rlhf.checkpoints import CHECKPOINTS, find_checkpoints
    from rlhf.curves import read_scalars
    from rlhf.runlogs import read_run

    faults = []
    ends = [find_checkpoints(run / CHECKPOINTS, read_run(run)["id"]).newest for run in (one, other)]
    pairs = [(one, other), (one / "best", other / "best"), (ends[0], ends[1])]
    for here, there in pairs:
        files = sorted(file.name for file in here.glob("*.safetensors"))
        if files != sorted(file.name for file in there.glob("*.safetensors")):
            faults.append(f"{there.name}: other files than {files}")
            continue
        for file in files:
            tensors, others = load_file(here / file), load_file(there / file)
            same = tensors.keys() == others.keys() and all(torch.equal(tensors[n], others[n]) for n in tensors)
            faults += [] if same else [f"{there.name}/{file} differs"]
    curves, others = (read_scalars(run / "logs")[0] for run in (one, other))
    for tag in curves.keys() | others.keys():
        if tag.startswith(("time/", "throughput/", "memory/")):
            continue
        same = (
            tag in curves
            and tag in others
            and all(
                list(getattr(curves[tag], name)) == list(getattr(others[tag], name)) for name in ("updates", "values")
            )
        )
        faults += [] if same else [f"{tag} differs, or has points twice"]
    return faults


def main(kills: int, seed: int, folder: Path, script_name: str, flags: list[str]) -> dict:
    from rlhf.checkpoints import CHECKPOINTS, find_checkpoints
    from rlhf.runlogs import read_run

    script, draw = importlib.import_module(script_name), random.Random(seed)
    importlib.import_module("rlhf.assembly")
    plain, status = whole_run(script, [*flags, "--output", str(folder / "plain")])
    assert status == 0, "the unharmed run failed"
    told = {"killed": 0, "in_a_save": 0, "resumed": 0, "begun_anew": 0, "faults": []}
    while told["killed"] < kills:
        output = folder / f"killed_{told['killed']}"
        marks = kill(script, [*flags, "--output", str(output)], draw, plain, told["killed"] % 2 == 0)
        if marks is None:
            shutil.rmtree(output)
            continue
        told["killed"] += 1
        inside = marks.count(BEGAN) > marks.count(ENDED)
        told["in_a_save"] += inside
        run = read_run(output)
        sound = find_checkpoints(output / CHECKPOINTS, run["id"]).newest
        if ENDED in marks and sound is None:
            told["faults"].append(f"kill {told['killed']}: no sound checkpoint after {marks}")
        told["begun_anew" if sound is None else "resumed"] += 1
        _, status = whole_run(script, ["--resume", "--output", str(output)])
        if status:
            told["faults"].append(f"kill {told['killed']}: resuming ended with {status}")
        told["faults"] += [f"kill {told['killed']}: {line}" for line in differing(folder / "plain", output)]
        shutil.rmtree(output)
    return told


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5:])))
