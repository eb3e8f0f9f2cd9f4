"""Tests that code of the user changes neither torch's settings nor the random numbers of a run, and that processes
which a reward function starts can import its file."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import train_grpo
import train_ppo
from rlhf.data.tokenizer import load_tokenizer
from rlhf.rewards.find import find_rule
from rlhf.rewards.rewards import Rewards
from rlhf.utils.errors import RunError, UserError
from rlhf.utils.user_code import settings_restored, user_code
from tests.kills import differing
from tests.rewards.test_calls import COMPLETIONS, ROWS, score
from tests.scripts.test_scripts import ROOT

CHANGES = """\
import random
import numpy as np
import torch
def change():
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
"""
names: dict = {}
exec(CHANGES, names)
change = names["change"]


def state() -> list:
    """Return what code of the user must not change, in this thread."""
    numpy = np.random.get_state()
    settings = [torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device(),
                torch.get_num_threads(), torch.get_deterministic_debug_mode()]  # fmt: skip
    return [*settings, random.getstate(), numpy[1].tolist(), numpy[2:], torch.get_rng_state().tolist()]


@contextmanager
def unchanged():
    """Context manager that checks the state at its end. If it fails, the settings are restored for other tests."""
    with settings_restored():
        before = state()
        yield
        after = state()
    assert after == before


def plain(completions, **_):
    change()
    return [1.0, 2.0]


async def asynchronous(completions, **_):
    await asyncio.sleep(0)
    change()
    return [1.0, 2.0]


def lazy(completions, **_):
    yield 1.0
    change()
    yield 2.0


@pytest.mark.parametrize("function", [plain, asynchronous, lazy])
@pytest.mark.parametrize("limit_s", [None, 20.0])
def test_a_call_changes_no_state(function, limit_s):
    with unchanged():
        assert score(function, limit_s=limit_s) == [1.0, 2.0]


def test_a_call_on_another_thread_changes_no_state():
    """In a notebook and on Windows, a function with a time limit is called on a new thread."""
    seen = []

    def work():
        with unchanged():
            scores = score(plain)
        seen.append(scores)

    thread = threading.Thread(target=work)
    with unchanged():
        thread.start()
        thread.join()
    assert seen == [[1.0, 2.0]]


def test_a_call_that_fails_changes_no_state():
    def fails(completions, **_):
        change()
        raise GeneratorExit

    with unchanged(), pytest.raises(RunError, match="GeneratorExit"):
        score(fails)


def test_a_module_changes_no_state(start_model):
    class Module(nn.Module):
        def forward(self, input_ids, attention_mask):
            change()
            return torch.ones(len(input_ids), device="cpu")

    rewards = Rewards([Module()], None, load_tokenizer(str(start_model)))
    with unchanged():
        assert rewards.score(ROWS, *COMPLETIONS).total == [1.0, 1.0]


@pytest.mark.parametrize(
    "code",
    ["change()\ndef f(completions): pass", "class f:\n    def __init__(self): change()\n    def __call__(self): pass"],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_file_changes_no_state_when_it_is_loaded(tmp_path, code, fails):
    (tmp_path / "rules.py").write_text(CHANGES + code.replace("change()", "change(); 1 / 0" if fails else "change()"))
    with unchanged(), pytest.raises(UserError) if fails else nullcontext():
        find_rule(f"{tmp_path}/rules.py:f")


@pytest.mark.ci
def test_torch_has_its_defaults_after_a_file_has_imported_it(tmp_path):
    (tmp_path / "rules.py").write_text(f"{CHANGES}change()\ndef f(completions): pass")
    get = ("is_grad_enabled", "get_default_dtype", "get_default_device")
    code = "from rlhf.rewards.find import find_rule\n"
    code += f"find_rule({str(tmp_path / 'rules.py:f')!r})\n"
    code += f"import torch\nprint(*[getattr(torch, name)() for name in {get}])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "torch.float32", "cpu"]


# --- random numbers --------------------------------------------------------------------------------------------------


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), torch.rand(()).item()


def test_random_numbers_depend_on_the_key_only():
    def numbers(*key):
        with user_code(*key):
            return drawn()

    keys = [(0, "a"), (1, "a"), (0, "b"), (0, "a", ["1"])]
    found = [numbers(*key) for key in keys]
    assert len({number for row in found for number in row}) == 12
    drawn()
    assert [numbers(*key) for key in keys] == found


def test_functions_draw_other_numbers_in_each_update_and_for_each_batch():
    def noise(completions, **_):
        return [sum(drawn()) for _ in completions]

    def other(completions, **_):
        return noise(completions)

    rewards = Rewards([noise, other], None, None)

    def scores(update, *texts):
        rewards.trainer_state.global_step = update
        found = rewards.score(ROWS, list(texts), *COMPLETIONS[1:]).by_function
        return [*found["noise"], *found["other"]]

    batches = [scores(1, "4", "5"), scores(2, "4", "5"), scores(1, "4", "6")]
    assert len({number for batch in batches for number in batch}) == 12
    assert scores(1, "4", "5") == batches[0]


# --- whole runs ------------------------------------------------------------------------------------------------------

LENGTH = "def f(completions, **_):\n{}    return [0.01 * len(text) for text in completions]\n"


@pytest.mark.parametrize("script", [train_ppo, train_grpo])
def test_a_run_with_a_file_that_changes_everything_is_bit_identical(run_flags, tmp_path, script):
    codes = {"plain": LENGTH.format(""), "changes": CHANGES + "change()\n" + LENGTH.format("    change()\n")}
    groups = ["--batch-size", 2, "--K", 2] if script is train_grpo else []
    for name, code in codes.items():
        (tmp_path / f"{name}.py").write_text(code)
        rule = f"{tmp_path}/{name}.py:f"
        flags = ["--rm-model", "none", "--reward-func", rule, "--eval-func", rule, "--output", tmp_path / name]
        with settings_restored():  # for other tests, if this one fails
            script.main(run_flags(*groups, *flags, "--eval-every", 1))
    assert differing(tmp_path / "plain", tmp_path / "changes") == []


# --- modules ---------------------------------------------------------------------------------------------------------

POOL = """\
import multiprocessing
from pathlib import Path
def one(text):
    return len(text) / 100
def pooled(completions, **_):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        Path({!r}).touch()
        return pool.map(one, completions)
"""


def rules_in(folder: Path, name: str, code: str = "def f(completions): pass\n"):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(code)
    return find_rule(f"{folder}/{name}.py:f")


@pytest.fixture
def own_modules(monkeypatch):
    """Restores the modules and their paths after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_a_file_is_the_module_of_its_name_if_the_name_is_free(own_modules, tmp_path):
    first = rules_in(tmp_path / "a", "rules_of_a_test")
    assert first.__module__ == "rules_of_a_test" and pickle.loads(pickle.dumps(first)) is first
    changed = rules_in(tmp_path / "a", "rules_of_a_test", "def f(completions): return []\n")
    assert changed.__module__ == "rules_of_a_test" and pickle.loads(pickle.dumps(changed)) is changed is not first
    second = rules_in(tmp_path / "b", "rules_of_a_test")
    assert second.__module__ != "rules_of_a_test" and sys.modules["rules_of_a_test"].f is changed
    assert pickle.loads(pickle.dumps(second)) is second


@pytest.mark.parametrize("name", ["random", "this", "antigravity", "torch", "pandas", "__main__", "with.dot"])
def test_a_taken_name_stays_with_its_module(own_modules, tmp_path, name):
    """Of the standard library and of installed packages, imported or not."""
    before = sys.modules.get(name)
    found = rules_in(tmp_path, name)
    assert found.__module__ != name and sys.modules.get(name) is before
    assert pickle.loads(pickle.dumps(found)) is found


def test_a_file_that_was_corrected_gets_its_name(own_modules, tmp_path):
    with pytest.raises(UserError):
        rules_in(tmp_path, "rules_to_correct", "1 / 0")
    assert rules_in(tmp_path, "rules_to_correct").__module__ == "rules_to_correct"


@pytest.mark.ci
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no POSIX signals")
def test_processes_of_a_function_import_its_file_and_sigterm_ends_the_run(run_flags, tmp_path):
    """The signal comes while the pool works."""
    started = tmp_path / "started"
    deadline = time.monotonic() + 200
    (tmp_path / "pool_rules.py").write_text(POOL.format(str(started)))
    rule = f"{tmp_path}/pool_rules.py:pooled"
    flags = run_flags("--rm-model", "none", "--reward-func", rule, "--num-iterations", 90)
    command = [sys.executable, str(ROOT / "train_ppo.py"), *flags]
    with (tmp_path / "printed").open("w") as file:
        run = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)

    def wait_for(path: Path) -> None:
        while not path.exists():
            assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "printed").read_text()[-3000:]
            time.sleep(0.01)

    try:
        wait_for(tmp_path / "run" / "metrics.jsonl")
        started.unlink()
        wait_for(started)
        run.terminate()
        status = run.wait(timeout=120)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)  # with the processes that it started
    printed = (tmp_path / "printed").read_text()
    assert status == 128 + signal.SIGTERM and "Traceback" not in printed and "stopped" in printed
