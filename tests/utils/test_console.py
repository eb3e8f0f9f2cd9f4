"""Tests console output: times, encodings, markup, the progress line, and the warning about an unused GPU."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf.models import device
from rlhf.utils.console import Screen, clock

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (61, "1:01"), (3725, "1:02:05")])
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_any_text_can_be_printed_on_a_cp1252_console():
    code = (
        "from rlhf.utils.console import Screen\n"
        "s = Screen()\n"
        "s.say('caf\\u00e9 \\u4f60\\u597d \\ufffd [/red] [bold]')\n"
        "s.table('t', ['a'], [['\\u4f60 [/] \\u2192']])\n"
        "s.progress('KL \\u4f60', last=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "cp1252"}
    )
    assert done.returncode == 0, done.stderr.decode()
    assert "café ?? ? [/red] [bold]" in done.stdout.decode("cp1252")


def test_markup_in_a_models_text_is_printed_as_text(capsys):
    Screen().table("completions", ["completion"], [["[link=x]click[/link] [bold red]loud"]])
    assert "[link=x]click[/link] [bold red]loud" in " ".join(capsys.readouterr().out.split())


def test_in_a_pipe_the_progress_line_is_printed_rarely_and_at_the_end(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    screen = Screen()
    for i in range(50):
        screen.progress(f"update {i}")
    screen.progress("update 50", last=True)
    assert sys.stdout.getvalue().split("\n") == ["update 0", "update 50", ""]


def test_in_a_notebook_one_output_is_updated_and_lines_are_plain_text(monkeypatch, capsys):
    """With stand-ins for IPython's functions. tests/scripts/test_notebooks.py has a real kernel."""
    shown = []

    class Handle:
        def update(self, content, raw):
            shown[-1].append(content["text/plain"])

    def display(content, raw, display_id):
        shown.append([content["text/plain"]])
        return Handle()

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    screen = Screen()
    for i in range(50):
        screen.progress(f"update {i}")
    screen.progress("update 50\x1b", last=True)
    screen.say("a line")
    screen.progress("the next run")
    Screen(quiet=True).progress("not shown")
    assert shown == [[*(f"update {i}" for i in range(50)), "update 50<U+001B>"], ["the next run"]]
    assert capsys.readouterr().out == "a line\n"


# --- a GPU that torch cannot use (simulated) -------------------------------------------------------------------------


def test_torch_without_cuda_next_to_a_gpu_gives_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(device.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    line = device.unused_card()
    assert "NVIDIA GPU" in line and "pip install --force-reinstall torch --index-url" in line
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "driver" in device.unused_card()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device.unused_card() is None, "hidden on purpose"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    assert device.unused_card() is None


@pytest.mark.parametrize(("capability", "bad"), [((12, 0), True), ((9, 0), False), ((8, 9), False), ((6, 1), True)])
def test_gpu_architecture_missing_in_torch_gives_one_line(monkeypatch, capability, bad):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_86", "sm_90"])
    assert (device.unused_card() is not None) is bad


@pytest.mark.parametrize(
    ("capability", "command"),
    [
        ((12, 0), f"pip install --force-reinstall torch --index-url {device.CUDA_WHEELS}"),
        ((7, 5), f"pip install --force-reinstall torch --index-url {device.CUDA_WHEELS}"),
        ((7, 0), f"pip install --force-reinstall 'torch<2.15' --index-url {device.OLDER_WHEELS}"),
        ((6, 1), f"pip install --force-reinstall 'torch<2.15' --index-url {device.OLDER_WHEELS}"),
    ],
)
def test_gpus_before_rtx_20_get_a_torch_with_cuda_12(monkeypatch, capability, command):
    """CUDA 13 does not support them. The hint for a torch without CUDA has both commands."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_86", "sm_90"])
    assert device.unused_card().endswith(f": {command}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(device.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert command in device.unused_card()
