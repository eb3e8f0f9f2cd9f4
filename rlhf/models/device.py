"""The device that a run uses: which one, its precision, and its memory."""

from __future__ import annotations

import contextlib
import os
import shutil

import psutil
import torch
from accelerate import PartialState

from rlhf.models.determinism import call_vector_functions_once, use_deterministic_algorithms
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError
from rlhf.utils.system import cap_card_memory

CUDA_WHEELS = "https://download.pytorch.org/whl/cu130"  # PyTorch's own index of CUDA builds


def installed(device: torch.device) -> int:
    """Bytes of the card's memory, or of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def available(device: torch.device) -> int:
    """Bytes that this process may come to hold: what nobody has, and what it has itself."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return psutil.virtual_memory().available + psutil.Process().memory_info().rss


def autocast_dtype(wanted: bool | None, device: torch.device) -> torch.dtype | None:
    """bfloat16, or None for float32. `wanted` None: on a CUDA card that really has it.

    `is_bf16_supported()` says yes on cards that only emulate it, slowly: hence including_emulation=False.
    """
    has_it = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if wanted and not has_it:
        raise UserError(f"this GPU ({torch.cuda.get_device_name(device)}) has no bfloat16: --bf16. Remove the flag")
    use = wanted if wanted is not None else device.type == "cuda" and has_it
    return torch.bfloat16 if use else None


def autocast(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    """The forward's precision. PPOConfig(bf16=True) leaves accelerate's mixed precision at "no": so we set it here."""
    return torch.autocast(device.type, dtype=dtype) if dtype is not None else contextlib.nullcontext()


def start_device(screen: Screen, deterministic: bool = False) -> torch.device:
    """Return the device that accelerate picks, with deterministic algorithms on if they are wanted.

    Prints one line if there is an NVIDIA GPU that this torch cannot use. Raises UserError if there are several
    processes.
    """
    call_vector_functions_once()
    if deterministic:
        use_deterministic_algorithms()
    hint = unused_card()
    if hint:
        screen.say(hint)
    state = PartialState()
    if state.num_processes > 1:
        raise UserError(
            f"multi-process training is not supported: the launcher started {state.num_processes} processes. "
            "Start the command with python, without a launcher"
        )
    cap_card_memory()
    return state.device


def unused_card() -> str | None:
    """One line, with the command that mends it, for a torch without CUDA beside an NVIDIA card, or one that has no
    code for the card's architecture."""
    command = f"pip install --force-reinstall torch --index-url {CUDA_WHEELS}"
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            return None
        if torch.version.cuda is None:
            return (
                f"this machine has an NVIDIA GPU, but the installed torch ({torch.__version__}) has no CUDA. "
                f"Fix it with: {command}"
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
            f"Fix it with: {command}"
        )
    return None


def memory_in_use(device: torch.device) -> int:
    """Bytes: the peak of the card's allocations; on a CPU what the process holds now."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


def reset_peak_memory(device: torch.device) -> None:
    """A run's peak is its own: not that of the run before it, or of what was built for it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
