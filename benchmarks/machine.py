"""Measures time and memory of a process, and describes the machine (Linux, macOS and Windows, CPU and GPU)."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from rlhf.utils.system import resident_peak

BUSY = 20  # percent of the CPU used by other programs, above which times are uncertain


def seconds(device: str) -> float:
    """Return the time in seconds, after the GPU has finished all queued work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class MemoryMeter:
    """Measures the peak memory above that of the imports. Create it directly after the imports."""

    def __init__(self, device: str):
        self.device = device
        self.held = psutil.Process().memory_info().rss if device == "cpu" else 0

    def read(self) -> dict[str, int]:
        """Return the peak in bytes (CPU: process, GPU: tensors), and the peak minus the imports' memory; on a GPU also
        the peak that torch reserved, and what nvidia-smi reports for the whole GPU ("unknown" without it)."""
        if self.device == "cpu":
            peak = resident_peak()
            return {"peak": peak, "above_imports": peak - self.held}
        peak = torch.cuda.max_memory_allocated()
        used = gpu_state()["memory.used"]
        reserved = torch.cuda.max_memory_reserved()
        return {"peak": peak, "above_imports": peak, "reserved": reserved,
                "by_nvidia_smi": int(used) * 2**20 if used.isdigit() else "unknown"}  # fmt: skip


def cpu_name() -> str:
    """Return the CPU's model name."""
    if sys.platform == "win32":
        import winreg

        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine(device: str) -> dict[str, Any]:
    """Return CPU, cores, torch's threads and memory, and the GPU if it is used."""
    facts: dict[str, Any] = {
        "processor": cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "threads_used": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "card": None,
    }
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        facts |= {"card": gpu.name, "card_memory_bytes": gpu.total_memory, "cuda": torch.version.cuda}
    return facts


def gpu_machine(device: str) -> dict[str, Any]:
    """Return GPU, driver, CPU, Python, library versions and commit for a report."""
    from rlhf.checkpoints.run_record import environment

    facts = machine(device)
    software = environment()
    found = {
        "gpu": facts["card"],
        "gpu_memory_gib": facts["card_memory_bytes"] / 2**30 if facts["card"] else None,
        "gpu_state": gpu_state() if facts["card"] else None,
        "cuda": facts.get("cuda"),
    }
    return {
        **found,
        **{name: facts[name] for name in ("processor", "cores", "threads_used", "memory_bytes")},
        **{name: software[name] for name in ("python", "platform", "versions", "commit")},
    }


OF_GPU = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu",
          "memory.used", "driver_model.current")  # fmt: skip


def gpu_state() -> dict[str, str]:
    """Return the driver, clocks (MHz), power (W), temperature and used memory (MiB) of the visible GPU, as nvidia-smi
    prints them: "unknown" if it is missing or fails. On Windows the driver model is WDDM or TCC."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    command = ["nvidia-smi", f"--query-gpu={','.join(OF_GPU)}", "--format=csv,noheader,nounits", f"--id={gpu}"]
    try:
        printed = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=10)
        values = [value.strip() for value in printed.stdout.split("\n")[0].split(",")]
    except (OSError, subprocess.TimeoutExpired):
        values = []
    return dict(zip(OF_GPU, values, strict=True)) if len(values) == len(OF_GPU) else dict.fromkeys(OF_GPU, "unknown")


def busy() -> float:
    """Return the CPU use of all programs in percent, measured for 0.5 s while this one waits."""
    return psutil.cpu_percent(interval=0.5)


def machine_line(facts: dict[str, Any]) -> str:
    gpu = f"; {facts['card']}, {gib(facts['card_memory_bytes'])}" if facts["card"] else ""
    return (
        f"{facts['processor']}, {facts['cores']} cores, {facts['threads_used']} threads used, "
        f"{gib(facts['memory_bytes'])}{gpu}"
    )


def busy_line(facts: dict[str, Any]) -> str:
    return f"other programs used {facts['busy_before_percent']:.0f}% of the CPU at the start: times are uncertain"


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
