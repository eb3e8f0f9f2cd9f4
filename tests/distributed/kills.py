"""Kills a random process of a run on two processes, resumes the run, and compares it with an uninterrupted one.

python -m tests.distributed.kills KILLS SEED FOLDER ALGORITHM     prints a JSON object. Not for Windows (fork).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from tests.distributed import runs
from tests.distributed.proof import Inputs
from tests.kills import differing

PROCESSES = 2
BOUND_S = 30.0


def start_of(output: Path) -> float:
    """Wait until a run has claimed its folder. Return the time."""
    while not (output / "run.json").exists():
        time.sleep(0.005)
    return time.monotonic()


def main(kills: int, seed: int, folder: Path, algorithm: str) -> dict:
    import torch

    torch.set_num_threads(1)
    import rlhf.run.train  # noqa: F401  (the processes are forked after the slow imports)
    from rlhf.checkpoints.manifest import find_checkpoints
    from rlhf.checkpoints.run_record import RunRecord

    inputs = Inputs.make(folder / "inputs")
    draw = random.Random(seed)
    printed = folder / "printed"
    plain = folder / "plain"
    began = []
    words = runs.words(algorithm, inputs, plain, "--keep", "99")
    whole = runs.run(algorithm, words, printed, PROCESSES, meanwhile=lambda _: began.append(start_of(plain)))
    lasted = time.monotonic() - began[0]
    assert whole.statuses == [0] * PROCESSES, whole
    found = {"killed": 0, "first": 0, "resumed": 0, "started_again": 0, "slowest_end_s": 0.0, "problems": []}
    while found["killed"] < kills:
        output = folder / "killed"
        victim = draw.randrange(PROCESSES)
        after = draw.random() * lasted
        shutil.rmtree(output, ignore_errors=True)
        at: list[float] = []

        def kill(pids: list[int], victim=victim, after=after, at=at) -> None:
            start_of(folder / "killed")
            time.sleep(after)
            os.kill(pids[victim], signal.SIGKILL)
            at.append(time.monotonic())

        ended = runs.run(algorithm, runs.words(algorithm, inputs, output), printed, PROCESSES, None, BOUND_S, kill)
        took = time.monotonic() - at[0]
        run = RunRecord.read(output)
        if ended.statuses[victim] != -signal.SIGKILL or run.status == "finished":
            continue  # it had ended before the kill
        found["killed"] += 1
        found["first"] += victim == 0
        found["slowest_end_s"] = max(found["slowest_end_s"], took)
        name = f"kill {found['killed']} of process {victim} after {after:.2f} s"
        other = 1 - victim
        lines = [line for line in ended.errors[other].splitlines() if "error:" in line]
        if ended.statuses[other] != 1 or len(lines) != 1 or "has ended or does not answer" not in lines[0]:
            found["problems"].append(f"{name}: the other process ended with {ended.statuses}, {ended.errors}")
        newest = find_checkpoints(output, run.id).newest
        found["started_again" if newest is None else "resumed"] += 1
        again = runs.run(algorithm, ["--resume", "--output", str(output)], printed, PROCESSES)
        if again.statuses != [0] * PROCESSES:
            found["problems"].append(f"{name}: resuming ended with {again.statuses}, {again.errors}")
        else:
            found["problems"] += [f"{name}: {line}" for line in differing(plain, output)]
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])))
