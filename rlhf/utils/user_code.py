"""Runs code of the user without a change of the global state of torch, NumPy and Python's `random`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

import numpy as np
import torch

SETTINGS = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, torch.set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
)


@contextmanager
def settings_restored() -> Iterator[None]:
    """Context manager that restores torch's settings at the end: gradient mode, default dtype, default device, number
    of threads and deterministic algorithms. Some belong to a thread: use it on the thread that runs the user's code.
    """
    before = [get() for get, _ in SETTINGS]
    try:
        yield
    finally:
        for (get, put), value in zip(SETTINGS, before, strict=True):
            if get() != value:
                # None is the CPU. The device "cpu" would slow down each later call of torch
                put(value if value != torch.device("cpu") else None)


@contextmanager
def user_code(*key: object) -> Iterator[None]:
    """Context manager that restores torch's settings and all states of random generators at the end.

    The code inside draws random numbers that depend only on the text of `key`: a resumed run repeats them.
    """
    with random_states_restored(), settings_restored():
        seed_all(key)
        yield


@contextmanager
def random_states_restored() -> Iterator[None]:
    """Context manager that restores all states of random generators at the end. With NumPy's this takes 0.1 ms."""
    python = random.getstate()
    numpy = np.random.get_state()
    states = {generator: generator.get_state() for generator in generators().values()}
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, state in states.items():
            generator.set_state(state)


def seed_all(key: object) -> None:
    """Seed all random generators with the text of `key`."""
    seed = crc32(repr(key).encode())
    random.seed(seed)
    np.random.seed(seed)
    for generator in generators().values():
        generator.manual_seed(seed)


def generators() -> dict[str, torch.Generator]:
    """Return torch's global random generators by their names in checkpoints. Those of GPUs exist after CUDA was
    initialized. No call of them waits for a GPU: their states are on the CPU."""
    gpus = torch.cuda.default_generators
    return {"random/torch": torch.default_generator, **{f"random/cuda/{n}": g for n, g in enumerate(gpus)}}
