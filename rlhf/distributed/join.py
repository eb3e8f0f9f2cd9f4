"""Connects the processes that `accelerate launch` or `torchrun` started.

accelerate and TRL do not see the other processes. They would wrap the model in DistributedDataParallel, whose hooks
the training loop's backward pass does not reach, and average what the loop sums.
"""

from __future__ import annotations

import atexit
import datetime
import os
import socket
import sys

from rlhf.distributed import group
from rlhf.utils import processes
from rlhf.utils.errors import UserError, print_in_handler
from rlhf.utils.processes import connected, is_first, launched, rank, size
from rlhf.utils.system import before_sigterm, connect_by_loopback

TIMEOUT_S = 1800.0  # default of ddp_timeout in transformers
# variables from which accelerate, transformers and TRL conclude that there are several processes
OF_LAUNCHERS = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK",
)  # fmt: skip
OTHER_METHODS = {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_FSDP": "FSDP"}


def leave_others() -> bool:
    """Make the first process the only one, for a command that needs no others. Returns True in those, which end."""
    if size() == 1:
        return False
    check_launcher()
    first = is_first()
    group.local["processes"] = size()  # for the plan
    if first:
        _hide_from_libraries()
    return not first


def check_launcher() -> None:
    """Raise UserError if WORLD_SIZE is set, but not what a launcher sets with it: it may be left from another job."""
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UserError(
            "no launcher has started this process",
            f"WORLD_SIZE={size()} is set, without {', '.join(missing)}",
            f"Remove WORLD_SIZE from the environment, or start all {size()} processes with torchrun",
        )


def select_gpu(number: int) -> None:
    """Let this process see only the GPU with this number among the visible ones. Call it before CUDA is initialized.

    With one visible GPU, torch, accelerate and transformers all use it. Raises UserError if there is no such GPU.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number)
        return
    names = [name for name in visible.split(",") if name.strip() and not name.startswith("-")]
    if not names:  # the user has hidden all GPUs
        return
    if number >= len(names):
        raise UserError(
            f"process {number + 1} of this machine has no GPU, only {len(names)} are visible",
            f"CUDA_VISIBLE_DEVICES={visible}",
            "Start one process per GPU",
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = names[number]


def cpu_is_selected() -> bool:
    """True if ACCELERATE_USE_CPU is true, in one of the spellings that accelerate accepts."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "t", "yes", "y", "on")


def use_own_gpu() -> None:
    """Select this process's GPU, if a launcher started several processes. Call it before CUDA is initialized.

    Raises UserError if the launcher's variables are incomplete.
    """
    if size() > 1 and connected() is None and "number" not in group.local:
        check_launcher()
        group.local["number"] = group.local_rank()
        if cpu_is_selected():
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        else:
            select_gpu(group.local["number"])


def join(timeout_s: float = TIMEOUT_S) -> None:
    """Connect this process to the others, if a launcher started several. Imports torch.

    Raises UserError if they cannot be reached, if two processes would share a GPU, or if only some have one.

    Args:
        timeout_s: seconds after which an exchange fails, if a process does not take part in it.
    """
    if size() == 1:
        _hide_from_libraries()  # a launcher that started one process has set them, too
    if size() == 1 or connected():
        return
    for variable, name in OTHER_METHODS.items():
        if os.environ.get(variable, "").lower() == "true":
            raise UserError(
                f"{name} is not supported",
                "the settings of accelerate",
                "Choose multi-GPU or multi-CPU in `accelerate config`",
            )
    use_own_gpu()
    if launched("LOCAL_WORLD_SIZE", 0) == launched("WORLD_SIZE", 1):  # all processes are on this machine
        connect_by_loopback()
    import torch

    on_gpu = torch.cuda.is_available()
    _connect(rank(), size(), timeout_s, on_gpu)
    _hide_from_libraries()
    atexit.register(leave)  # a Python program's process could otherwise abort while gloo's threads are still running
    _report_sigterm()
    _check_devices(on_gpu)


def _connect(number: int, count: int, timeout_s: float, on_gpu: bool) -> None:
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    both = on_gpu and distributed.is_nccl_available()
    timeout = datetime.timedelta(seconds=timeout_s)
    host = os.environ["MASTER_ADDR"]
    port = os.environ["MASTER_PORT"]
    try:
        socket.getaddrinfo(host, port)  # torch would try again and again until the timeout
        processes.store, _, _ = next(rendezvous("env://", number, count, timeout=timeout))
        processes.store.set_timeout(timeout)
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if both else "gloo",  # small objects are exchanged by gloo, gradients by NCCL
            store=distributed.PrefixStore("group", processes.store),
            rank=number,
            world_size=count,
            timeout=timeout,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"the processes cannot be connected ({group.reason_of(error)})",
            f"{host}:{port}, from {socket.gethostname()}",
            "Check that the address is that of the first machine, that the port is free, and that all "
            f"{count} processes were started",
        ) from None


def _report_sigterm() -> None:
    """Print a line before a SIGTERM ends this process, if no process of the run has printed why the run ends.

    If a process is killed, the launcher sends SIGTERM to the others at once. In training, GracefulStop receives it.
    """
    mine = os.getpid()

    def report() -> bool:
        if os.getpid() != mine:  # a process that this one started has the handler, too
            return True
        if processes.has_reported():  # launchers send it again and again, also while an error is being printed
            return False
        if processes.is_first_to_report():
            line = (
                f"{processes.process_prefix()}error: ended by SIGTERM, which a launcher sends if another process has "
                f"ended: process {rank()} of {size()}. Start all again, with --resume if the run has a checkpoint"
            )
            print_in_handler(line)
        return True

    before_sigterm(report)


def _hide_from_libraries() -> None:
    for name in OF_LAUNCHERS:
        os.environ.pop(name, None)


def _check_devices(on_gpu: bool) -> None:
    """Raise UserError if only some processes have a GPU, or if two have the same one."""
    import torch

    gpu = str(getattr(torch.cuda.get_device_properties(0), "uuid", group.local["number"])) if on_gpu else None
    found = group.gather((socket.gethostname(), gpu))
    without = [f"process {number} on {host}" for number, (host, one) in enumerate(found) if one is None]
    if without and len(without) < len(found):
        raise UserError("no GPU that torch can use", ", ".join(without), "Start one process per GPU")
    if not without and len({one for _, one in found}) < len(found):
        raise UserError("two processes have the same GPU", str(found), "Start one process per GPU")


def leave() -> None:
    """Close the connections, if there are any, unless the process ends because of an error: closing could wait for a
    process that is lost."""
    if connected() and not (processes.has_reported() or hasattr(sys, "last_value")):
        from torch import distributed

        distributed.destroy_process_group()
        processes.store = None
