"""The lines of errors of the operating system: they name the place, and how to fix this error."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rlhf.utils import errors
from rlhf.utils.errors import WriteError, as_os_error, first_line, is_raised_by_all, naming, os_advice, run_command

FIXES = {errno.EACCES: "permission", errno.EPERM: "permission", errno.EROFS: "read-only", errno.ENOSPC: "Free disk",
         errno.EDQUOT: "quota", errno.EFBIG: "ulimit -f", errno.EMFILE: "ulimit -n", errno.ENFILE: "open",
         errno.ENOENT: "mounted", errno.ESTALE: "mounted", errno.EIO: "disk", errno.ENOLCK: "locks"}  # fmt: skip


def line_of(action, capsys) -> tuple[str, int]:
    """Return the line of a failed command, and its exit status."""
    with pytest.raises(SystemExit) as ended:
        run_command(action)
    (line,) = capsys.readouterr().err.splitlines()
    return line, ended.value.code


@pytest.mark.parametrize("number", FIXES, ids=errno.errorcode.get)
def test_error_of_the_system_names_its_file_or_the_output_and_fits(number, capsys, tmp_path):
    def fails(*place):
        raise OSError(number, os.strerror(number), *place)

    def writes(*place):
        with naming(tmp_path / "output"):
            fails(*place)

    for action, place, status in (
        (lambda: writes(), tmp_path / "output", 1),
        (lambda: writes("a file"), "a file", 1),
        (lambda: fails("a file"), "a file", 2),  # nothing had started
    ):
        line, code = line_of(action, capsys)
        assert line.startswith(f"error: {os.strerror(number)}: {place}. ") and FIXES[number] in line
        assert code == status and ("--resume" in line) == (status == 1)
    assert (number in (errno.ENOSPC, errno.EDQUOT)) == ("Free disk space" in os_advice(OSError(number, "")))


def test_number_of_an_error_in_rust_is_read_from_its_text():
    found = as_os_error(ValueError("Error while serializing: I/O error: No space left on device (os error 28)"))
    assert found.errno == errno.ENOSPC and os_advice(found) == os_advice(OSError(errno.ENOSPC, ""))
    assert as_os_error(ValueError("28")) is None and as_os_error(OSError("no number")) is None


@pytest.mark.skipif(os.name == "nt", reason="Windows does not remove the current folder")
def test_removed_current_folder_is_one_line(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    line, status = line_of(Path.cwd, capsys)
    assert status == 2 and "current folder" in line


def test_traceback_that_cannot_be_written_hides_no_error(capsys, monkeypatch):
    def missing():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(errors.Path, "cwd", missing)
    monkeypatch.setattr(errors.tempfile, "gettempdir", missing)
    line, status = line_of(lambda: [1][2], capsys)
    assert status == 1 and "IndexError" in line


def test_error_whose_text_fails_has_a_line(capsys, tmp_path, monkeypatch):
    class Odd(Exception):
        def __str__(self):
            raise ValueError("no text")

    def raise_odd():
        raise Odd

    monkeypatch.chdir(tmp_path)
    assert first_line(Odd(), "none") == "none"
    line, status = line_of(raise_odd, capsys)
    assert status == 1 and "Odd" in line


def test_a_program_catches_an_error_of_writing_by_its_class(tmp_path):
    for kind, number in ((PermissionError, errno.EACCES), (OSError, errno.ENOSPC)):
        with pytest.raises(kind) as found, naming(tmp_path / "output"):
            raise OSError(number, "no")
        assert isinstance(found.value, WriteError) and found.value.filename == str(tmp_path / "output")


def test_an_error_that_is_its_own_cause_ends():
    error = ValueError("no")
    error.__cause__ = error
    assert not is_raised_by_all(error)
