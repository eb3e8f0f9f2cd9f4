"""Runs with a fault in one process, and what became of them.

python -m tests.distributed.faults FOLDER NAME...     prints a JSON object per fault
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tests.distributed import runs
from tests.distributed.proof import Inputs
from tests.distributed.runs import at_update, send_self

AT = 3  # the update with the fault; the newest checkpoint before it is checkpoint-2


def on_second(action: Callable[[], None]) -> Callable[[int], None]:
    """Return a fault that acts in process 1 only."""
    return lambda rank: action() if rank == 1 else None


def reward_raises() -> None:
    from rlhf.rewards import rewards
    from rlhf.utils.errors import RunError

    def fail(*_):
        raise RunError("the reward function failed on purpose: a test. Fix it")

    at_update(AT, lambda: setattr(rewards, "call_function", fail))


def bad_score() -> None:
    from rlhf.rewards import rewards
    from rlhf.rewards.call import BadScore

    original = rewards.call_function
    calls = []

    def once(*given):
        calls.append(1)
        if len(calls) == 1:
            raise BadScore("score nan is not a finite number: a test. Fix it")
        return original(*given)

    at_update(AT, lambda: setattr(rewards, "call_function", once))


def gradients_are(change: Callable) -> Callable[[], None]:
    """Return a fault that calls `change(optimizer, original, arguments)` instead of computing gradients."""

    def install() -> None:
        from rlhf.trainer.optimize import PolicyOptimizer

        original = PolicyOptimizer.gradients

        def gradients(self, *given):
            if self.host.state.global_step == AT - 1:
                return change(self, original, given)
            return original(self, *given)

        PolicyOptimizer.gradients = gradients

    return install


def callback_raises() -> None:
    from rlhf.callbacks.checkpointing import Checkpoints
    from rlhf.utils.errors import RunError

    def fail(*_):
        raise RunError("the callback failed on purpose: a test. Fix it")

    at_update(AT, lambda: setattr(Checkpoints, "on_batch", fail))


def loading_raises() -> None:
    from rlhf.run import session
    from rlhf.utils.errors import UserError

    def fail(*_, **__):
        raise UserError("loading failed on purpose: a test. Fix it")

    session.disk_has_room = fail


def with_nan(optimizer, original, given):
    stats = original(optimizer, *given)
    next(w for w in optimizer.host.model.parameters() if w.grad is not None).grad.fill_(float("nan"))
    return stats


def out_of_memory(optimizer, original, given):
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory, a test")


def out_of_memory_if_large(optimizer, original, given):
    return (
        original(optimizer, *given)
        if len(given[1].micro_batch.rows) == 1
        else out_of_memory(optimizer, original, given)
    )


def disk_is_full(rank: int) -> None:
    from rlhf.callbacks import checkpointing

    if rank == 0:

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device", "a test")

        at_update(AT, lambda: setattr(checkpointing, "write_checkpoint", full))


def other_weights() -> None:
    from rlhf.trainer.loop import OnPolicyLoop

    original = OnPolicyLoop.finish_epoch

    def finish_epoch(self, update):
        if update == AT:
            next(w for w in self.host.model.parameters() if w.requires_grad).data.view(-1)[0] += 1e-3
        return original(self, update)

    OnPolicyLoop.finish_epoch = finish_epoch


def other_versions() -> None:
    from rlhf.run import train

    original = train.environment
    train.environment = lambda: {**original(), "versions": {"torch": "0.1"}}


def other_data() -> None:
    from rlhf.run import record

    original = record.data_of
    record.data_of = lambda *given: {**original(*given), "train_sha256": "of other rows"}


def own_clock(rank: int) -> None:
    """Let the clock that decides about checkpoints leap in update 3 of process 0, and in update 2 of process 1."""
    from rlhf.callbacks import checkpointing

    at_update(AT - rank, lambda: setattr(checkpointing, "perf_counter", lambda: time.perf_counter() + 400))


def interrupted_by_launcher(rank: int) -> None:
    """Send what Ctrl-C in a terminal causes: SIGINT to all processes, then SIGTERM from the launcher."""

    def both():
        send_self(signal.SIGINT)
        send_self(signal.SIGTERM)

    at_update(AT, both)


def unknown_host(rank: int) -> None:
    os.environ["MASTER_ADDR"] = "no-such-host.invalid"


def taken_port(rank: int) -> None:
    if rank == 0:
        taken_port.server = socket.socket()
        taken_port.server.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        taken_port.server.listen()


def killed(signal_number: int) -> Callable[[], None]:
    return lambda: at_update(AT, lambda: send_self(signal_number))


def first_killed_at_start(rank: int) -> None:
    """Kill the first process while the models are loaded. The other one does not find that out itself."""
    from rlhf.run import train

    train.load_models = lambda *_: send_self(signal.SIGKILL) if rank == 0 else time.sleep(60)


def launcher_ends_others(pids: list[int]) -> None:
    """Send SIGTERM to the other processes when the first one has ended, as torchrun does, at every moment until they
    have ended, too."""
    os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)
    until = time.monotonic() + 15
    for pid in pids[1:]:
        while time.monotonic() < until and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.002)


BY_LAUNCHER = ("first-killed-by-launcher", "first-killed-at-start")
FAULTS: dict[str, Callable[[int], None] | None] = {
    "none": None,
    "reward-raises": on_second(reward_raises),
    "bad-score": on_second(bad_score),
    "callback-raises": on_second(callback_raises),
    "loading-raises": on_second(loading_raises),
    "nan": on_second(gradients_are(with_nan)),
    "out-of-memory": on_second(gradients_are(out_of_memory)),
    "out-of-memory-if-large": on_second(gradients_are(out_of_memory_if_large)),
    "disk-full": disk_is_full,
    "other-weights": on_second(other_weights),
    "other-versions": on_second(other_versions),
    "other-data": on_second(other_data),
    "own-clock": own_clock,
    "stopped": on_second(killed(signal.SIGTERM)),
    "ctrl-c": interrupted_by_launcher,
    "killed": on_second(killed(signal.SIGKILL)),
    "first-killed": lambda rank: killed(signal.SIGKILL)() if rank == 0 else None,
    "first-killed-by-launcher": lambda rank: killed(signal.SIGKILL)() if rank == 0 else None,
    "first-killed-at-start": first_killed_at_start,
    "unknown-host": unknown_host,
    "taken-port": taken_port,
}


def outcome(name: str, inputs: Inputs, folder: Path) -> dict:
    from rlhf.checkpoints.manifest import find_checkpoints
    from rlhf.checkpoints.run_record import RunRecord

    output = folder / name
    began = time.monotonic()
    more = ["--ddp-timeout", "6"] if name in ("unknown-host", "taken-port") else []
    more += ["--save-every", "none"] if name == "own-clock" else []
    ended = runs.run(
        "ppo",
        runs.words("ppo", inputs, output, *more),
        folder / f"{name}.printed",
        fault=FAULTS[name],
        meanwhile=launcher_ends_others if name in BY_LAUNCHER else None,
    )
    run = RunRecord.read(output)
    return {
        **asdict(ended),
        "seconds": time.monotonic() - began,
        "checkpoints": sorted(find_checkpoints(output, run.id).valid) if run else [],
        "status": run and run.status,
        "processes": run and run.processes,
    }


def main(argv: list[str]) -> None:
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # as the commands set it; torch reads it when it is imported
    import torch

    torch.set_num_threads(1)
    import rlhf.run.train  # noqa: F401  (the processes are forked after the slow imports)

    inputs = Inputs.make(Path(argv[0]) / "inputs")
    folder = Path(argv[0])
    for name in argv[1:] or FAULTS:
        print(json.dumps({"name": name, **outcome(name, inputs, folder)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
