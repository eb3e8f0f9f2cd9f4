"""Shared fixtures: tiny models made once per session, and configurations for them. The hub is switched off."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
# the same results with and without a GPU; tests marked gpu use the GPU explicitly
os.environ["ACCELERATE_USE_CPU"] = "true"
# the tests compare results to the last bit, which depends on the number of threads; more than one slows tiny models
os.environ.setdefault("OMP_NUM_THREADS", "1")
# tests that take two threads share the cores with other workers: a thread that waits must not keep its core busy
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# --deterministic refuses a process that has used CUDA without it, and tests marked gpu run in the same process
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import copy
import dataclasses
import gc
import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from filelock import FileLock

from rlhf.algorithms.table import ALGORITHMS
from rlhf.callbacks.reward_warning import RewardWarning
from rlhf.checkpoints.run_log import RunLog
from rlhf.config import parse_cli
from rlhf.data.prompts import PromptSets, load_prompts
from rlhf.models.load import read_model
from rlhf.run.session import RunSession
from rlhf.settings.recipes import find_recipe, shipped_recipes
from rlhf.settings.training import Config, DataSettings
from rlhf.trainer.session import Session
from rlhf.utils.command_lines import OF_USERS
from rlhf.utils.console import Screen, quiet_libraries
from rlhf.utils.errors import UserError
from rlhf.utils.signals import GracefulStop
from tests.forks import Forks
from tests.records import facts_of
from tests.shapes import make_reward_model, make_start_model
from tests.systems import words_of

quiet_libraries()


class OpenedSession(RunSession):
    """A session that `attach` has opened already."""

    opened = Session.opened


def attach(trainer) -> RunLog:
    """Give a trainer the session of a script, without opening it. Return the run's log."""
    output = Path(trainer.config.run.output)
    output.mkdir(parents=True, exist_ok=True)
    trainer.session = session = OpenedSession(trainer.config, None, Screen(), folder=output)
    session.trainer, session.log = trainer, RunLog(output, **facts_of(trainer.config, trainer.updates))
    trainer.passes.oom_hint = session.memory_advice
    for callback in session.callbacks(trainer, GracefulStop()):
        if not isinstance(callback, RewardWarning):  # its probes take a fifth of the time, and only print
            trainer.add_callback(callback)
    return session.log


# PPO has a critic and GRPO has groups; with the other algorithms, tests of shared code run in the ci tier
BY_TIER = [pytest.param(name, marks=[] if name in ("ppo", "grpo") else pytest.mark.ci) for name in ALGORITHMS]


def algorithms_of(recipe: str) -> list[str]:
    """Return the algorithms that train with a recipe: all of them, but with a teacher those that use one."""
    has_teacher = recipe in shipped_recipes() and "teacher" in find_recipe(recipe).training
    return [name for name, row in ALGORITHMS.items() if not (has_teacher and "teacher" in row.foreign)]


# algorithms that learn from all completions: without greedy ones
LEARN_FROM_ALL = [one for one in BY_TIER if not ALGORITHMS[one.values[0]].greedy]
MEMORY_PER_WORKER = 3 * 2**30  # bytes; the largest tests start one or two more processes
MOST_WORKERS = 8  # each imports torch and transformers: with more workers that takes longer than they save


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's, for `-n auto`
def pytest_xdist_auto_num_workers() -> int:
    """Return one worker per core, or fewer if memory is short."""
    cores = psutil.cpu_count(logical=False) or 1
    memory = psutil.virtual_memory().available
    return max(1, min(cores, MOST_WORKERS, memory // MEMORY_PER_WORKER))


def pytest_collection_modifyitems(items):
    """Skip tests marked `gpu` on a machine without a GPU, with the reason."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # keywords also contain the name of a folder
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU on this machine"))


def pytest_collection_finish():
    """Exclude what the imports and the collection made from garbage collections, each of which would visit it."""
    gc.collect()
    gc.freeze()


def forget() -> None:
    """Remove the algorithms of users from the tables, as in a new process."""
    from rlhf.algorithms.classes import CLASSES

    for name in [*OF_USERS]:
        for table in (ALGORITHMS, CLASSES, OF_USERS):
            table.pop(name, None)


@pytest.fixture(autouse=True)
def algorithms_of_the_library():
    yield
    if OF_USERS:
        forget()


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk():
    """Files of tests need not survive a power failure. tests/utils/test_system.py tests the calls of `fsync`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """Return a function that returns a folder. The first worker that requests it fills it; all workers share it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def make(name: str, fill: Callable[[Path], object]) -> Path:
        folder = shared / name
        filled = shared / f"{name}.filled"
        with FileLock(shared / f"{name}.lock"):
            if not filled.exists():
                shutil.rmtree(folder, ignore_errors=True)  # left by a worker whose `fill` failed
                folder.mkdir()
                fill(folder)
                filled.touch()
        return folder

    return make


@pytest.fixture(scope="session")
def start_model(made_once) -> Path:
    return made_once("start", make_start_model)


@pytest.fixture(scope="session")
def wide_model(made_once) -> Path:
    return made_once("wide", partial(make_start_model, size="wide"))


@pytest.fixture(scope="session")
def reward_folder(made_once) -> Path:
    return made_once("reward", make_reward_model)


@pytest.fixture(scope="session")
def pairs_file(made_once) -> Path:
    """Return a file of 120 pairs in orca's columns. The chosen completion is the longer one in half of them."""
    return made_once("data", write_pairs) / "pairs.jsonl"


def write_pairs(folder: Path) -> None:
    rng = random.Random(0)
    words = "cat table river step answer question capital France number sign chat help".split()
    with (folder / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for i in range(120):
            chosen = " ".join(rng.choices(words, k=rng.randint(2, 9)))
            rejected = " ".join(rng.choices(words, k=rng.randint(2, 9)))
            system = "Answer step by step." if i % 3 == 0 else ""
            row = {"system": system, "question": f"What is {rng.choice(words)} number {i}?"}
            file.write(json.dumps({**row, "chosen": chosen, "rejected": rejected}) + "\n")


@pytest.fixture(scope="session")
def forks():
    """Run commands in forks of one process per worker, which imports the slow libraries once."""
    started = Forks()
    yield started
    started.close()


@pytest.fixture
def user_error() -> Callable:
    """Return a context manager, as `pytest.raises`. The error must contain every one of `parts`: flags, files with
    lines, names, numbers."""

    @contextmanager
    def expect(*parts: object, kind: type[Exception] = UserError) -> Iterator[pytest.ExceptionInfo]:
        with pytest.raises(kind) as error:
            yield error
        missing = [part for part in map(str, parts) if part not in str(error.value)]
        assert not missing, str(error.value)

    return expect


@pytest.fixture
def on_day(monkeypatch):
    """Return a function that sets the date and time (ISO 8601) for chat templates."""

    def make(text: str) -> None:
        class Clock(datetime):
            @classmethod
            def now(cls, tz=None):
                return datetime.fromisoformat(text).replace(tzinfo=tz)

        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
        monkeypatch.setattr("rlhf.data.chat_template.datetime", Clock, raising=False)

    return make


@pytest.fixture
def run_flags(start_model, reward_folder, pairs_file, tmp_path):
    """Return a function that adds flags to those of a tiny run in the folder `run`."""

    def make(*flags: object) -> list[str]:
        words = {
            "--actor-model": start_model, "--rm-model": reward_folder, "--prompts": pairs_file,
            "--output": tmp_path / "run", "--batch-size": 4, "--num-iterations": 2, "--ppo-epochs": 2,
            "--max-new-tokens": 8, "--prompt-length": 100, "--eval-prompts": 6, "--learning-rate": 1e-3,
            "--eval-every": 50,
        }  # fmt: skip
        if "--episodes" in flags:
            del words["--num-iterations"]
        argv = [str(word) for pair in words.items() for word in pair]
        return [*argv, "--allow-weak-reward-model", *map(str, flags)]

    return make


@pytest.fixture
def configured(run_flags):
    """Return a function that makes the Config of a tiny run in a separate folder from flags."""

    def make(*flags: object, algorithm: str = "ppo") -> Config:
        return parse_cli(run_flags(*flags), algorithm)

    return make


def typed(line: str) -> list[str]:
    """Return the arguments of a printed command `python SCRIPT ...`."""
    words = words_of(line)
    assert words[0] == "python" and words[1].endswith(".py"), line
    return words[2:]


@pytest.fixture(scope="session")
def runs(start_model, reward_folder, pairs_file, made_once) -> dict[tuple[str, int], Path]:
    """Return finished runs by (algorithm, seed): PPO with all weights, GRPO with adapters, both with token records."""
    folder = made_once("runs", partial(train_runs, start_model, reward_folder, pairs_file))
    return {(algorithm, seed): folder / f"{algorithm}_{seed}" for algorithm in ("ppo", "grpo") for seed in (1, 2)}


def train_runs(start_model: Path, reward_folder: Path, pairs_file: Path, folder: Path) -> None:
    import train_grpo
    import train_ppo

    more = {"ppo": ["--batch-size", 4], "grpo": ["--batch-size", 2, "--K", 2, "--use-lora"]}
    for algorithm, script in (("ppo", train_ppo), ("grpo", train_grpo)):
        for seed in (1, 2):
            words = ["--actor-model", start_model, "--rm-model", reward_folder, "--prompts", pairs_file,
                     "--output", folder / f"{algorithm}_{seed}", "--seed", seed, "--num-iterations", 2,
                     "--max-new-tokens", 8, "--eval-every", 1, "--prompt-length", 100, "--eval-prompts", 6,
                     "--learning-rate", "1e-2", "--allow-weak-reward-model", "--record-tokens",
                     *more[algorithm]]  # fmt: skip
            script.main([str(word) for word in words])


@pytest.fixture(scope="session")
def load_prompts_once(pairs_file):
    """Return load_prompts, which encodes the rows of `pairs_file` once for all tests with the same settings."""
    encoded: dict[str, PromptSets] = {}

    def load(data: DataSettings, tokenizer, say, **more) -> PromptSets:
        key = repr((data, tokenizer.name_or_path, more))
        if key not in encoded:
            lines: list[str] = []
            sets = load_prompts(data, tokenizer, lines.append, **more)
            for line in lines:
                say(line)
            if lines or data.prompts != str(pairs_file) or data.eval_dataset is not None:
                return sets
            encoded[key] = sets
        sets = encoded[key]
        return dataclasses.replace(sets, train=[*sets.train], evaluation=[*sets.evaluation])

    return load


@pytest.fixture(scope="session")
def read_model_once(start_model, reward_folder):
    """Return read_model, which reads the two tiny models once for all tests, and returns copies."""
    read: dict[tuple, tuple] = {}

    def copy_of(kind: type, name: str, *, quantization_config=None, **more):
        if str(name) not in (str(start_model), str(reward_folder)) or quantization_config is not None:
            return read_model(kind, name, quantization_config=quantization_config, **more)
        if (kind, name) not in read:
            read[kind, name] = read_model(kind, name, **more)
        return copy.deepcopy(read[kind, name])

    return copy_of


@pytest.fixture
def build(configured, load_prompts_once, read_model_once, monkeypatch):
    """Return a function that makes a trainer from flags, with only the given callbacks. `parts_changed` replaces
    fields of Components.

    For an algorithm with groups the default batch is 2 prompts x 2 completions: as many episodes as PPO's 4.
    """
    from rlhf.setup.build import build_trainer, load_components

    monkeypatch.setattr("rlhf.setup.load_inputs.load_prompts", load_prompts_once)
    for user in ("rlhf.models.load", "rlhf.rewards.reward_model"):
        monkeypatch.setattr(f"{user}.read_model", read_model_once)
    # the accuracy of a reward model without a record costs a quarter of the time and changes nothing in the trainer
    monkeypatch.setattr("rlhf.setup.build.check_unrecorded", lambda *_: None)

    def make(*flags: object, algorithm: str = "ppo", callbacks=(), **parts_changed):
        groups = ("--batch-size", 2, "--K", 2) if ALGORITHMS[algorithm].group_size > 1 else ()
        config = configured(*groups, *flags, algorithm=algorithm)
        parts = load_components(config, torch.device("cpu"), Screen())
        trainer = build_trainer(config, dataclasses.replace(parts, **parts_changed))
        for callback in callbacks:
            trainer.add_callback(callback)
        return trainer

    return make


def whole_gradient(trainer, batch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the statistics and the flat gradient of all weights for one micro-batch of all rows."""
    trainer.host.model.zero_grad()
    forward = trainer.passes.run(batch.completions, range(len(batch.mask)))
    stats = trainer.policy_optimizer.gradients(batch, forward, batch.mask.sum().float())
    return stats, torch.cat([w.grad.flatten() for w in trainer.host.model.parameters() if w.grad is not None])
