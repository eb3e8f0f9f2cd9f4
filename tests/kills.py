"""Kill a training run, resume it, and compare what it ends with; over and over, in forks of one process.

python -m tests.kills KILLS SEED FOLDER train_ppo|train_grpo FLAG...   prints a JSON object. Not for Windows (fork).

A run is killed at an instant drawn uniformly, in turn from a save, the whole run, a save, and a renewal of best/: from
the moment at which that begins to the one at which it has ended, as an unharmed run took for it. It keeps one
checkpoint, so every save but the first removes one.
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

# marks: the first update; where a part of a run begins, and where it has ended
FIRST, SAVE, BEST = b"f", (b"(", b")"), (b"[", b"]")
AIMS = (SAVE, None, SAVE, BEST)


def child(script, argv: list[str], marks: int) -> None:
    """One training run, which marks the beginning of its first update, and where parts of it begin and end."""
    from rlhf.callbacks import checkpointing
    from rlhf.trainer.loop import OnPolicyLoop

    update, quiet = OnPolicyLoop.update_step, os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)

    def marked(part, began, ended):
        def run(*given):
            os.write(marks, began)
            part(*given)
            os.write(marks, ended)

        return run

    def marked_update(self, number):
        os.write(marks, FIRST if number == 1 else b"")
        return update(self, number)

    checkpointing.Checkpoints.save = marked(checkpointing.Checkpoints.save, *SAVE)
    checkpointing.update_dir_atomically = marked(checkpointing.update_dir_atomically, *BEST)
    OnPolicyLoop.update_step = marked_update
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


def follow(heard: int, until: float | None = None, begun: tuple[bytes, int] = (b"", 1)) -> list[tuple[bytes, float]]:
    """The marks with their times, until there are no more, until an instant, or until one has come so often."""
    seen: list[tuple[bytes, float]] = []
    while sum(mark == begun[0] for mark, _ in seen) < begun[1]:
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
    script, argv: list[str], draw: random.Random, plain: list[tuple[bytes, float]], aim: tuple[bytes, bytes] | None
) -> list[bytes] | None:
    """A run killed at random, in one part or anywhere: its marks; None where it had come to its end by then."""
    process, heard = start(script, argv)
    if aim is not None:
        begun, ended = ([at for mark, at in plain if mark == which] for which in aim)
        lasted = [end - at for at, end in zip(begun, ended, strict=True)]
        which = draw.randrange(len(begun))
        seen = follow(heard, begun=(aim[0], which + 1))
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


def shown(logs: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar's points, as TensorBoard itself shows a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(logs), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(p.step, p.value) for p in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def best_is_whole(plain: Path, killed: Path, start: Path) -> bool:
    """A killed run's best/, where there is one, loads, and holds the policy of one of the run's evaluations."""
    from peft import load_peft_weights
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    from rlhf.checkpoints.run_folder import BEST_FOLDER
    from rlhf.models.save import ADAPTER_FILE, WEIGHTS_FILE

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
        return True  # the start model's: B begins with zeros
    known = [*([] if adapter else [start]), *plain.glob("checkpoint-*")]
    return any(all(torch.equal(found[n], one[n]) for n in found) for one in map(policy, known))


def differing(one: Path, other: Path) -> list[str]:
    """In what two finished runs are unlike: weights, value head, optimizer, metrics; a line each. To the bit."""
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
            problems.append(f"{there.name}: other files than {files}")
            continue
        for file in files:
            tensors, others = load_file(here / file), load_file(there / file)
            same = tensors.keys() == others.keys() and all(torch.equal(tensors[n], others[n]) for n in tensors)
            problems += [] if same else [f"{there.name}/{file} differs"]
    curves, others = (shown(run / "logs") for run in (one, other))
    for tag in curves.keys() | others.keys():
        if tag.startswith(("time/", "throughput/", "memory/")):
            continue
        problems += [] if curves.get(tag) == others.get(tag) else [f"{tag} differs, or has points twice"]
    return problems


def main(kills: int, seed: int, folder: Path, script_name: str, flags: list[str]) -> dict:
    from rlhf.checkpoints.manifest import find_checkpoints
    from rlhf.checkpoints.run_record import RunRecord

    script, draw = importlib.import_module(script_name), random.Random(seed)
    importlib.import_module("rlhf.run.train")
    plain, status = whole_run(script, [*flags, "--keep", "99", "--output", str(folder / "plain")])
    assert status == 0, "the unharmed run failed"
    told = {"killed": 0, "in_a_save": 0, "in_best": 0, "resumed": 0, "begun_anew": 0, "problems": []}
    first_model = Path(flags[flags.index("--actor-model") + 1])
    while told["killed"] < kills or told["in_a_save"] < kills * 10 // 25:
        output = folder / f"killed_{told['killed']}"
        aim = AIMS[told["killed"] % len(AIMS)] if told["killed"] < kills else SAVE
        marks = kill(script, [*flags, "--keep", "1", "--output", str(output)], draw, plain, aim)
        if marks is None:
            shutil.rmtree(output)
            continue
        told["killed"] += 1
        for name, (began, ended) in (("in_a_save", SAVE), ("in_best", BEST)):
            told[name] += marks.count(began) > marks.count(ended)
        if not best_is_whole(folder / "plain", output, first_model):
            told["problems"].append(f"kill {told['killed']}: best/ is no evaluation's model after {marks}")
        run = RunRecord.read(output)
        sound = find_checkpoints(output, run.id).newest
        if SAVE[1] in marks and sound is None:
            told["problems"].append(f"kill {told['killed']}: no sound checkpoint after {marks}")
        told["begun_anew" if sound is None else "resumed"] += 1
        _, status = whole_run(script, ["--resume", "--output", str(output)])
        if status:
            told["problems"].append(f"kill {told['killed']}: resuming ended with {status}")
        told["problems"] += [f"kill {told['killed']}: {line}" for line in differing(folder / "plain", output)]
        shutil.rmtree(output)
    return told


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5:])))
