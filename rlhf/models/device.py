"""The device of a run, its precision and its memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings

import psutil
import torch
from accelerate import PartialState

from rlhf.distributed.join import TIMEOUT_S, cpu_is_selected, join
from rlhf.models.determinism import call_vector_functions_once, use_deterministic_algorithms
from rlhf.utils.command_lines import command
from rlhf.utils.console import Screen
from rlhf.utils.errors import RLHFWarning, UserError
from rlhf.utils.system import available_cores, cap_gpu_memory, gpu_memory_margin, reset_resident_peak, resident_peak
from rlhf.utils.timing import timed

OWN_THREADS = torch.get_num_threads()  # before `set_threads` changes it
CUDA_WHEELS = "https://download.pytorch.org/whl/cu130"  # PyTorch's own index of CUDA builds
# CUDA 13 supports GPUs from Turing (RTX 20) on; torch 2.14 is the last release with CUDA 12
OLDER_WHEELS = "https://download.pytorch.org/whl/cu126"
OLDER_TORCH = "torch<2.15"
TURING = (7, 5)


def free_and_warn(phase: str, reduced: str, same: str) -> None:
    """After an out-of-memory error in `phase`, free cached GPU memory, and warn of what is reduced and what is not."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    message = f"out of memory in {phase}: reduced the {reduced} for the rest of the run. {same}"
    warnings.warn(message, RLHFWarning, stacklevel=3)


def installed(device: torch.device) -> int:
    """Return the bytes of the GPU's memory, or of the machine's if `device` is a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def available(device: torch.device) -> int:
    """Return the bytes available to this process: free memory, and the memory that it already holds."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - gpu_memory_margin(total)
    return psutil.virtual_memory().available + psutil.Process().memory_info().rss


def autocast_dtype(wanted: bool | None, device: torch.device) -> torch.dtype | None:
    """Return bfloat16, or None for float32.

    If `wanted` is None, bfloat16 is used on a CUDA GPU that supports it natively. Raises UserError if it is wanted,
    and the GPU does not.
    """
    # without including_emulation=False the result is also True for GPUs that emulate bfloat16, which is slow
    has_it = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if wanted and not has_it:
        raise UserError(
            f"this GPU ({torch.cuda.get_device_name(device)}) has no bfloat16",
            "--bf16",
            "Remove the flag, or use another GPU",
        )
    use = wanted if wanted is not None else device.type == "cuda" and has_it
    return torch.bfloat16 if use else None


def autocast(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    """Return a context manager with the precision of the forward pass; `dtype` None: float32.

    Needed because PPOConfig(bf16=True) leaves accelerate's mixed precision at "no".
    """
    return torch.autocast(device.type, dtype=dtype) if dtype is not None else contextlib.nullcontext()


def set_threads(number: int | None) -> None:
    """Sets the number of torch's threads, at most one per core. None: it stays as it is."""
    if number is not None:
        torch.set_num_threads(min(number, available_cores()))


def start_device(screen: Screen, deterministic: bool = False, timeout_s: float = TIMEOUT_S) -> torch.device:
    """Return the device that accelerate selects. Enables deterministic algorithms if `deterministic`, and disables
    cuDNN's attention.

    Prints one line if the machine has an NVIDIA GPU that the installed torch cannot use. If a launcher started several
    processes, connects them, with `timeout_s` as in `join`; raises UserError as it does.
    """
    join(timeout_s)
    call_vector_functions_once()
    # On H100 and newer data-centre GPUs torch prefers it. It plans for up to a second for every new shape, and nearly
    # every micro-batch has a new one. Flash attention has no such plan.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if deterministic:
        use_deterministic_algorithms()
    if hint := unused_card():
        screen.say(hint)
    device = selected_device()
    cap_gpu_memory()
    if device.type == "cuda":
        timed.record = recorded_event
    return device


def recorded_event() -> torch.cuda.Event:
    """Return an event in the GPU's stream. It has a time when the GPU has done all work before it."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def selected_device() -> torch.device:
    """Return the device that accelerate selects: this process's GPU, or the CPU if ACCELERATE_USE_CPU is true."""
    # PartialState alone ignores the variable, but transformers' trainer reads it: a run would be on two devices
    return PartialState(cpu=cpu_is_selected()).device


def unused_card() -> str | None:
    """Return one line with a fix if the machine has an NVIDIA GPU that the installed torch cannot use, else None.

    The reason is a torch without CUDA, an old driver, or a torch without kernels for this GPU's architecture.
    """
    newer = command("pip", "install", "--force-reinstall", "torch", "--index-url", CUDA_WHEELS)
    older = command("pip", "install", "--force-reinstall", OLDER_TORCH, "--index-url", OLDER_WHEELS)
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            return None
        if torch.version.cuda is None:
            return (
                f"this machine has an NVIDIA GPU, but the installed torch ({torch.__version__}) has no CUDA. "
                f"Fix it with: {newer} (RTX 20 or newer; older GPUs: {older})"
            )
        return (
            "this machine has an NVIDIA GPU, but its driver is too old for the installed torch "
            f"(CUDA {torch.version.cuda}). Install a newer driver, then check it with: nvidia-smi"
        )
    major, minor = torch.cuda.get_device_capability()
    known = [int(arch.removeprefix("sm_")) for arch in torch.cuda.get_arch_list() if arch[3:].isdigit()]
    if known and not min(known) <= major * 10 + minor <= max(known) // 10 * 10 + 9:
        return (
            f"the installed torch ({torch.__version__}) does not support this GPU (sm_{major}{minor}). "
            f"Fix it with: {newer if (major, minor) >= TURING else older}"
        )
    return None


def memory_in_use(device: torch.device) -> int:
    """Return the peak in bytes: of torch's allocations on a GPU, of the process's resident memory on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident_peak()


def reset_peak_memory(device: torch.device) -> None:
    """Resets the peak, so that the peak of a run does not include earlier work of the process. macOS and Windows
    cannot reset the peak of the resident memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        reset_resident_peak()
