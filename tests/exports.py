"""Exports of runs for tests: a run without training, and the options in the script of an export for verl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import export_model
from rlhf.run.record import start_run
from rlhf.settings.training import Config
from rlhf.setup.build import load_components
from rlhf.utils.console import Screen


def record_run(config: Config) -> Path:
    """Make the folder of a run with its run.json, as at the start of its training. Return the folder."""
    quiet = Screen(quiet=True)
    parts = load_components(config, torch.device("cpu"), quiet)
    with start_run(config, parts, 2, quiet):
        return Path(config.run.output)


def export(run: Path) -> Path:
    """Export a run for verl, and return the new folder."""
    export_model.main([str(run), "--to", "verl"])
    return run / "verl"


def options_in(script: Path, tmp_path: Path) -> dict[str, str]:
    """Return the options that a script gives to verl: run it with a python3 that prints its arguments."""
    if sys.platform == "win32":
        pytest.skip("run.sh is a bash script")
    fake = tmp_path / "bin" / "python3"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    fake.chmod(0o755)
    path = f"{fake.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", script, "last=1"], env={"PATH": path}, capture_output=True, text=True, check=True)
    module, name, *words = json.loads(done.stdout)
    assert (module, name, words.pop()) == ("-m", "verl.trainer.main_ppo", "last=1")
    options = dict(word.split("=", 1) for word in words)
    assert len(options) == len(words)
    return options
