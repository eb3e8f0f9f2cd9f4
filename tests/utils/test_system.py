"""Tests the code that depends on the operating system: memory, signals, file locks and replacing files."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
import tokenize
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf.checkpoints.manifest import find_checkpoints, write_checkpoint
from rlhf.checkpoints.run_folder import RunLock, claim_output
from rlhf.checkpoints.run_log import RunLog
from rlhf.models.device import available
from rlhf.utils import system
from rlhf.utils.errors import RLHFWarning
from rlhf.utils.files import update_dir_atomically, write_text
from tests.records import facts_of
from tests.scripts.test_scripts import ROOT

# prints the number of page faults when 64 MiB are filled for the second time
PROGRAM = """
import resource, sys
from rlhf.utils.system import keep_freed_memory
if sys.argv[1] == "keep":
    print(keep_freed_memory())
def fill():
    bytearray(b"x") * 2**26
fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this setting")
def test_freed_memory_is_kept_for_reuse():
    kept, faults = page_faults("keep")
    assert kept == "True"
    assert int(faults) < 100 < 10_000 < int(page_faults("leave")[0])


def test_trainer_on_a_cpu_keeps_freed_memory(build, monkeypatch):
    from rlhf.trainer import loop

    called = []
    monkeypatch.setattr(loop, "keep_freed_memory", lambda: called.append(1))
    build()
    assert called


# --- behaviour on Windows, simulated on any system -------------------------------------------------------------------

ONLY_IN_SYSTEM = ("fcntl", "msvcrt", "SIGTERM", "SIGBREAK", "os.fork", "fsync", "sys.platform")


def test_platform_specific_functions_are_used_in_one_file():
    users = {
        path.name
        for path in (*ROOT.glob("*.py"), *ROOT.glob("rlhf/**/*.py"), *ROOT.glob("reward_model/*.py"))
        if any(word in path.read_text("utf-8") and word in code_of(path) for word in ONLY_IN_SYSTEM)
    }
    assert users == {"system.py"}


def code_of(path: Path) -> str:
    """Return the code of a file without comments and strings."""
    tokens = tokenize.generate_tokens(path.open(encoding="utf-8").readline)
    return "".join(t.string for t in tokens if t.type in (tokenize.NAME, tokenize.OP))


@pytest.fixture
def windows(monkeypatch):
    monkeypatch.setattr(system, "WINDOWS", True)


@pytest.mark.parametrize(
    ("free", "total", "limit"), [(9, 12, 8.25), (7, 8, 6.5), (3, 4, 2.5), (30, 32, 29), (0.6, 8, 0.3)]
)
def test_gpu_memory_is_capped_on_windows_only(monkeypatch, free, total, limit):
    """The cap is what torch has (1 GiB here) and the free memory less a sixteenth of the GPU, and 0.5 to 1 GiB: the
    CUDA context and kernels that are loaded later are not torch's. Beyond it, Windows moves data into the machine's
    memory."""
    fractions = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free * 2**30, total * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 2**30)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    assert system.cap_gpu_memory() is False and fractions == []
    assert available(torch.device("cuda")) == pytest.approx((free + 1) * 2**30)
    monkeypatch.setattr(system, "WINDOWS", True)
    assert system.cap_gpu_memory() is True and fractions == [pytest.approx((limit + 1) / total)]
    margin = min(max(total / 16, 0.5), 1)
    assert available(torch.device("cuda")) == pytest.approx((free + 1 - margin) * 2**30)


def test_gpu_cache_is_released_between_rollout_and_update_on_windows_only(build, monkeypatch):
    """Twice per update: before sampling, and before the log-probs."""
    released = []
    trainer = build()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append(sampled[:]))
    sampled = []
    sampler = trainer.collector.sampler
    sample = sampler.sample
    monkeypatch.setattr(sampler, "sample", lambda *parts, **more: sampled.append(1) or sample(*parts, **more))
    trainer.collector.collect(trainer.episodes_of(1), 1)
    assert released == [] and sampled == [1]
    monkeypatch.setattr(system, "WINDOWS", True)
    trainer.collector.collect(trainer.episodes_of(1), 1)
    assert released == [[1], [1, 1]]


def test_processes_of_one_machine_connect_without_the_host_name(monkeypatch):
    for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "desktop-7f3k")
    monkeypatch.setattr(system.sys, "platform", "linux")
    system.connect_by_loopback()
    assert (os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"]) == ("desktop-7f3k", "desktop-7f3k")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    system.connect_by_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_on_windows_replacing_a_file_in_use_is_retried(windows, monkeypatch, tmp_path):
    original = os.replace
    calls = []

    def replace(source, target):
        calls.append(source)
        if len(calls) < 4:
            raise PermissionError(errno.EACCES, "used by another process")
        original(source, target)

    monkeypatch.setattr(system.os, "replace", replace)
    (tmp_path / "a").write_text("new")
    system.replace(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "new" and len(calls) == 4
    monkeypatch.setattr(system, "RETRY_S", 0.0)
    calls[:] = []
    with pytest.raises(PermissionError):
        system.replace(tmp_path / "b", tmp_path / "c")


def test_files_have_the_same_line_ends_on_every_system(tmp_path, monkeypatch):
    """In text mode, Windows writes CR LF."""
    monkeypatch.setattr(Path, "write_text", None)
    write_text(tmp_path / "a.txt", "a\nb \udc80\n")
    assert (tmp_path / "a.txt").read_bytes() == b"a\nb \\udc80\n"


IN_USE = PermissionError(errno.EACCES, "used by another process")
NOT_EMPTY = OSError(errno.ENOTEMPTY, "a removed file is still listed")


@pytest.mark.parametrize("error", [IN_USE, NOT_EMPTY], ids=["in use", "not empty"])
def test_on_windows_removing_a_folder_in_use_is_retried(windows, monkeypatch, tmp_path, error):
    original = shutil.rmtree
    calls = []

    def rmtree(folder):
        calls.append(folder)
        if len(calls) < 4:
            raise error
        original(folder)

    monkeypatch.setattr(system.shutil, "rmtree", rmtree)
    (tmp_path / "old").mkdir()
    system.remove_folder(tmp_path / "old")
    assert not (tmp_path / "old").exists() and len(calls) == 4


def keep_folder_in_use(monkeypatch, folder: Path) -> None:
    """Let a folder be one that a program uses for longer than the retries."""
    original = shutil.rmtree

    def rmtree(path, ignore_errors=False):
        if Path(path) != folder:
            original(path, ignore_errors)
        elif not ignore_errors:
            raise IN_USE

    monkeypatch.setattr(system, "RETRY_S", 0.0)
    monkeypatch.setattr(system.shutil, "rmtree", rmtree)


@pytest.mark.skipif(sys.platform != "linux", reason="the folder of an unlink is known on Linux only")
def test_a_file_that_stays_locked_keeps_only_itself(monkeypatch, tmp_path):
    """One file of a left-over cannot be removed: all others are removed, such as the weights."""
    for name in "abcdef":
        (tmp_path / "left" / name).mkdir(parents=True)
        (tmp_path / "left" / name / "weights").write_text("x", encoding="utf-8")
    original = os.unlink

    def unlink(path, *rest, **named):
        if str(path).endswith("weights") and locked(named.get("dir_fd")):
            raise PermissionError(13, "in use")
        original(path, *rest, **named)

    def locked(folder):
        return folder is not None and os.readlink(f"/proc/self/fd/{folder}").endswith("/c")

    monkeypatch.setattr(os, "unlink", unlink)
    system.remove_folder(tmp_path / "left", ignore_errors=True)
    assert [file.parent.name for file in (tmp_path / "left").glob("*/weights")] == ["c"]


def test_on_windows_a_left_over_in_use_stops_neither_the_lock_nor_a_save(windows, monkeypatch, tmp_path):
    """A virus scanner reads what a killed run was writing."""
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(LK_NBLCK=0, locking=lambda *_: None))
    left_over = [tmp_path / "checkpoint-2.new-12345678", tmp_path / "best.new-12345678"]
    for folder in left_over:
        folder.mkdir()
        keep_folder_in_use(monkeypatch, folder)

    def write(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "weights").write_text("new")

    with RunLock(tmp_path):
        for update in (1, 2):
            write_checkpoint(tmp_path, "a", update, 2, write)
            update_dir_atomically(tmp_path / "best", write)
    assert list(find_checkpoints(tmp_path, "a").valid) == [1, 2]
    assert (tmp_path / "best" / "weights").read_text() == "new"
    assert all(folder.exists() for folder in left_over)


@pytest.fixture
def reader(tmp_path):
    """Another program that has a file in the folder `run` open, as TensorBoard has the logs."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events").write_text("scalars")
    words = [sys.executable, "-c", f"file = open({str(tmp_path / 'run' / 'events')!r}); print(1, flush=True); input()"]
    program = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    program.stdout.readline()
    yield program
    program.kill()
    program.wait()


def test_programs_that_use_a_folder_are_named(reader, tmp_path):
    (found,) = system.programs_using(tmp_path / "run")
    assert found.startswith(sys.executable) and found.endswith(f"(process {reader.pid})")
    assert system.programs_using(tmp_path / "other") == []


def test_overwrite_names_the_program_that_uses_the_old_run(reader, monkeypatch, tmp_path, user_error):
    """Windows does not rename the logs while TensorBoard has them open."""
    with RunLog(tmp_path / "run", **facts_of()):
        pass
    original = os.replace

    def replace(source, target):
        if Path(source).name == "events":
            raise IN_USE
        original(source, target)

    monkeypatch.setattr(system, "RETRY_S", 0.0)
    monkeypatch.setattr(system.os, "replace", replace)
    with user_error(": --output ", f"(process {reader.pid})). "):
        claim_output(tmp_path / "run", overwrite=True, is_default=False)
    assert (tmp_path / "run" / "run.json").is_file(), "what was moved is moved back"


@pytest.mark.skipif(system.WINDOWS, reason="Windows does not sync folders")
@pytest.mark.parametrize("sync", [system.sync_file, system.sync_folder])
def test_only_a_sync_that_the_disk_does_not_support_is_ignored(monkeypatch, tmp_path, sync):
    """EINVAL: some shared folders; ENOTSUP, EBADF and EACCES: other servers. After EIO the content may be lost."""
    (tmp_path / "file").touch()
    place = tmp_path / "file" if sync is system.sync_file else tmp_path
    for number in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EIO):

        def fsync(_, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(system.os, "fsync", fsync)
        lost = number in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        with pytest.raises(OSError, match=os.strerror(number)) if lost else contextlib.nullcontext():
            sync(place)


@pytest.mark.skipif(system.WINDOWS, reason="Windows has no flock")
def test_warning_about_missing_locks_is_printed_once_per_folder(monkeypatch, tmp_path):
    import fcntl

    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(RLHFWarning, match="locks") as caught:
        for _ in range(3):
            system.lock(tmp_path / "run.lock").close()
        with system.waiting_lock(tmp_path / "run.lock"):
            pass
    assert len(caught) == 1


def test_waiting_lock_waits_for_the_other_process(tmp_path):
    held = system.lock(tmp_path / "file")
    threading.Timer(0.3, held.close).start()
    started = time.monotonic()
    with system.waiting_lock(tmp_path / "file"):
        assert time.monotonic() - started > 0.2 and system.lock(tmp_path / "file") is None
    system.lock(tmp_path / "file").close()


def test_lock_is_released_when_its_process_dies(tmp_path):
    file = tmp_path / "run.lock"
    program = (
        f"from pathlib import Path; from rlhf.utils import system; held = system.lock(Path({str(file)!r})); input()"
    )
    holder = subprocess.Popen([sys.executable, "-c", "print(1, flush=True);" + program + ";"], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, cwd=ROOT, text=True)  # fmt: skip
    holder.stdout.readline()
    deadline = time.monotonic() + 30
    while (held := system.lock(file)) is not None and time.monotonic() < deadline:
        held.close()
        time.sleep(0.05)
    assert held is None
    holder.kill()
    holder.wait()
    system.lock(file).close()
