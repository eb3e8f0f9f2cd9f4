"""Functions that depend on the operating system."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import IO, TypeVar

from rlhf.utils.errors import RLHFWarning

WINDOWS = sys.platform == "win32"
Result = TypeVar("Result")


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its ended children, on all cores."""
    used = os.times()
    return time.process_time() + used.children_user + used.children_system


def threads_variable() -> bool:
    """True if a variable of the user or a launcher sets the number of threads."""
    return any(os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))


# --- memory ----------------------------------------------------------------------------------------------------------

# mallopt(3)
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST_THRESHOLDS = (2**31 - 1, 2**25)  # bytes: the limits of mallopt in recent and in older releases of glibc


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory for later allocations. Returns True if it does.

    By default glibc returns freed blocks of some MiB to the system. A training step allocates the same blocks again
    and again, and each time the system clears their pages, which takes a sixth of a step on a CPU. The setting is for
    the whole process. Other C libraries and Windows do not have it; this function then has no effect.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    kept = any(mallopt(M_MMAP_THRESHOLD, size) for size in LARGEST_THRESHOLDS)
    return bool(mallopt(M_TRIM_THRESHOLD, LARGEST_THRESHOLDS[0])) and kept


def release_freed_memory() -> None:
    """Return freed memory to the system, if the C library is glibc. Without it, the gaps that large temporary tensors
    leave in the heap stay resident, because later tensors have other sizes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def reset_resident_peak() -> None:
    """Make `resident_peak` start from the current memory, if the system can."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a container may forbid it
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def resident_peak() -> int:
    """Return the peak resident memory of this process in bytes.

    On Linux this is VmHWM: getrusage's ru_maxrss includes the parent process's size at the time of the fork.
    """
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource  # macOS; not available on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def gpu_memory_margin(total: int) -> int:
    """Return how many of the `total` bytes of a GPU torch must leave free: on Windows a sixteenth, and 0.5 to 1 GiB;
    0 on other systems.

    The CUDA context, cuBLAS and kernels that are loaded later use memory outside torch's allocator.
    """
    return min(max(total // 16, 2**29), 2**30) if WINDOWS else 0


def cap_gpu_memory() -> bool:
    """On Windows, limit torch to the GPU memory that it has and what is free, less a margin. Returns True if it did.

    If the GPU memory is full, the Windows driver moves data to system memory, and the run becomes many times slower
    without an error. With the limit torch releases its cached memory and tries again, then raises an out-of-memory
    error, which the run can handle. On other systems the driver raises it.
    """
    import torch

    if not WINDOWS or not torch.cuda.is_available():
        return False
    free, total = torch.cuda.mem_get_info()
    more = max(free - gpu_memory_margin(total), free // 2)
    torch.cuda.set_per_process_memory_fraction(min((torch.cuda.memory_reserved() + more) / total, 1.0))
    return True


def release_gpu_cache() -> bool:
    """On Windows, return torch's unused cached GPU memory to the driver. Returns True if it did.

    Call it when the shapes of the tensors change, between rollout and update: the cached blocks of the one do not fit
    the other. They would stay reserved, and Windows would move data to system memory as soon as another program
    needs GPU memory. On other systems an allocation that fails makes torch release them, so nothing is done.
    """
    import torch

    if not WINDOWS or not torch.cuda.is_available():
        return False
    torch.cuda.empty_cache()
    return True


def gpu_driver() -> str | None:
    """Return the version of the NVIDIA driver, or None if nvidia-smi is missing or fails."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        printed = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return printed.stdout.split("\n")[0].strip() or None if printed.returncode == 0 else None


# --- processes -------------------------------------------------------------------------------------------------------


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- network ---------------------------------------------------------------------------------------------------------


def connect_by_loopback() -> None:
    """Let the processes of one machine connect without its host name, which may not resolve. Sets environment
    variables: on Linux the network interface of gloo, on Windows the address, for which launchers write the name."""
    if WINDOWS:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    elif sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


# --- files -----------------------------------------------------------------------------------------------------------


# error numbers if the disk, such as a shared folder, cannot sync a file or a folder
NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM)


def sync_file(file: Path) -> None:
    """Wait until the content of a file is on the disk, if the disk supports this."""
    with file.open("rb+") as stream, _if_supported():  # Windows syncs writable files only
        os.fsync(stream.fileno())


@contextlib.contextmanager
def _if_supported() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise


def sync_folder(folder: Path) -> None:
    """Wait until the file names of a folder are on the disk, if the disk supports this. Windows has no such call; its
    journal keeps the order."""
    if WINDOWS:
        return
    with _if_supported():
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_tree(path: Path) -> None:
    """Wait until a file, or a folder with its content, is on the disk: a name can reach it before the content."""
    for inside in (*path.rglob("*"), path):
        (sync_folder if inside.is_dir() else sync_file)(inside)


RETRY_S = 5.0  # seconds


def retry_on_windows(action: Callable[[], Result]) -> Result:
    """Return the result of a file operation.

    Windows refuses to rename or remove a file that another program has open, such as a virus scanner or TensorBoard,
    and lists a removed file until that program closes it. There, the operation is tried again for some seconds.
    """
    deadline = time.monotonic() + RETRY_S
    while True:
        try:
            return action()
        except OSError as error:
            in_use = isinstance(error, PermissionError) or error.errno == errno.ENOTEMPTY
            if not WINDOWS or not in_use or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def replace(source: Path, target: Path) -> None:
    """Rename a file or folder to `target`, atomically. A folder can only be renamed to a new name."""
    retry_on_windows(lambda: os.replace(source, target))


def remove_folder(folder: Path, *, ignore_errors: bool = False) -> None:
    """Remove a folder with its content, if it exists. With `ignore_errors` files that cannot be removed are kept."""
    try:
        retry_on_windows(lambda: shutil.rmtree(folder) if folder.exists() else None)
    except OSError:
        if not ignore_errors:
            raise
        shutil.rmtree(folder, ignore_errors=True)


def programs_using(folder: Path) -> list[str]:
    """Return the other programs that have a file in a folder open, as "command (process 123)". Programs of other users
    are not found."""
    import psutil

    found = []
    inside = folder.resolve()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
            if process.pid != os.getpid() and any(Path(f.path).is_relative_to(inside) for f in process.open_files()):
                found.append(f"{' '.join(process.cmdline())[:80]} (process {process.pid})")
    return found


def add_umask_permissions(file: Path) -> None:
    """Give a file that was created for its owner only the permissions that the umask allows. Windows has none, and
    some file systems cannot change them, which is no error."""
    if WINDOWS:
        return
    mask = os.umask(0o077)  # the only way to read it is to set it
    os.umask(mask)
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode | (0o666 & ~mask) != mode:
        with contextlib.suppress(OSError):
            file.chmod(mode | (0o666 & ~mask))


LOCKED = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)  # error numbers if another process has the lock
LOCKED_AT = 2**20  # byte of the file that is locked on Windows: after the text, which others can still read


def lock(file: Path, mode: str = "ab+") -> IO[bytes] | None:
    """Lock a file until the returned stream is closed or the process ends. None if another process has the lock. With
    the mode "rb", which needs no permission to write, other such locks are allowed.

    The system releases the lock however the process ends, so a lock is never stale. If the disk does not support locks
    (some network mounts), nothing is locked and a warning is printed.
    """
    stream = file.open(mode)
    try:
        if WINDOWS:
            import msvcrt

            stream.seek(LOCKED_AT)
            msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(stream, (fcntl.LOCK_SH if mode == "rb" else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in LOCKED:
            stream.close()
            return None
        _warn_without_locks(file)
    return stream


@functools.cache  # once per file: a run locks its folder several times
def _warn_without_locks(file: Path) -> None:
    message = f"file locks are not supported here: {file}. Two runs with the same folder are not detected"
    warnings.warn(message, RLHFWarning, stacklevel=2)


@contextlib.contextmanager
def waiting_lock(file: Path) -> Iterator[None]:
    """Context manager that locks a file as `lock`. Waits while another process has the lock."""
    while (held := lock(file)) is None:
        time.sleep(0.1)
    with held:
        yield


# --- signals ---------------------------------------------------------------------------------------------------------


def keep_ctrl_c() -> None:
    """On Windows, prevent Intel's Fortran runtime, which conda's numpy and scipy load, from ending the process at
    Ctrl-C: the first Ctrl-C must save a checkpoint. Call it before they are imported."""
    if WINDOWS:
        os.environ.setdefault("FOR_DISABLE_CONSOLE_CTRL_HANDLER", "1")


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run: Ctrl-C, SIGTERM, SIGHUP (a closed terminal) and SIGUSR1 (SLURM's, if a job
    asks for it); on Windows Ctrl-C and Ctrl-Break. SIGHUP and SIGUSR1 only if this process neither ignores them, as
    under nohup, nor handles them in its own way."""
    if WINDOWS:
        return [signal.SIGINT, signal.SIGBREAK]
    unused = [one for one in (signal.SIGHUP, signal.SIGUSR1) if signal.getsignal(one) is signal.SIG_DFL]
    return [signal.SIGINT, signal.SIGTERM, *unused]


def before_sigterm(action: Callable[[], bool]) -> None:
    """Call `action` before a SIGTERM ends this process, if the process has no other handler. The signal has no effect
    if `action` returns False. Windows has no SIGTERM, and threads cannot set handlers."""

    def act_and_end(number: int, _: FrameType | None) -> None:
        if not action():
            return
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    in_main = threading.current_thread() is threading.main_thread()
    if not WINDOWS and in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, act_and_end)
