"""What a process takes, and the machine it runs on: time and memory, on Linux and Windows, with a card or without."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

BUSY = 20  # percent


def seconds(device: str) -> float:
    """The clock, read when the card has done all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def resident_peak() -> int:
    """Bytes: the most that this process has held in memory.

    On Linux VmHWM, not getrusage's ru_maxrss: that one begins with the size of the process that started this one.
    """
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # macOS; Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class MemoryMeter:
    """Made after the imports and before anything else, it tells later what was taken on top of them."""

    def __init__(self, device: str):
        self.device = device
        self.held = psutil.Process().memory_info().rss if device == "cpu" else 0

    def read(self) -> dict[str, int]:
        """Bytes: peak of the process on a CPU, of the tensors on a card; and that above what the imports held."""
        peak = resident_peak() if self.device == "cpu" else torch.cuda.max_memory_allocated()
        return {"peak": peak, "above_imports": peak - self.held}


def processor() -> str:
    """The processor's name, as its maker has it."""
    if sys.platform == "win32":
        import winreg

        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine(device: str) -> dict[str, Any]:
    """Processor, cores, threads that torch uses, memory; the card, where one is used."""
    facts: dict[str, Any] = {
        "processor": processor(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "threads_used": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "card": None,
    }
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        facts |= {"card": card.name, "card_memory_bytes": card.total_memory, "cuda": torch.version.cuda}
    return facts


def gpu_machine(device: str) -> dict[str, Any]:
    """GPU with its driver, CPU, Python, libraries and commit, for a report."""
    from rlhf.checkpoints.run_record import environment

    facts, software = machine(device), environment()
    found = {
        "gpu": facts["card"],
        "gpu_memory_gib": facts["card_memory_bytes"] / 2**30 if facts["card"] else None,
        "driver": driver() if facts["card"] else None,
        "cuda": facts.get("cuda"),
    }
    return {
        **found,
        **{name: facts[name] for name in ("processor", "cores", "threads_used")},
        **{name: software[name] for name in ("python", "platform", "versions", "commit")},
    }


def driver() -> str | None:
    """The version of NVIDIA's driver; None if nvidia-smi is missing or fails."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return printed.stdout.split("\n")[0].strip() or None if printed.returncode == 0 else None


def busy() -> float:
    """Percent of the processor that other programs take just now."""
    return psutil.cpu_percent(interval=0.5)


def machine_line(facts: dict[str, Any]) -> str:
    card = f"; {facts['card']}, {gib(facts['card_memory_bytes'])}" if facts["card"] else ""
    return (
        f"{facts['processor']}, {facts['cores']} cores, {facts['threads_used']} threads used, "
        f"{gib(facts['memory_bytes'])}{card}"
    )


def busy_line(facts: dict[str, Any]) -> str:
    return (
        f"other programs took {facts['busy_before_percent']:.0f}% of the processor as this began: times are uncertain"
    )


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def tensor_peak(device: str, run: Callable[[], Any]) -> tuple[Any, int]:
    """What `run` returns, and the most bytes that torch's tensors took in it above what they took before."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        answer = run()
        return answer, torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as watched:
        answer = run()
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return answer, most
