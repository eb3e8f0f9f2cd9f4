"""Imports the slow libraries, with a progress line."""

from __future__ import annotations

import importlib
import os
import sys
import time

from rlhf.utils.console import Screen, clock, quiet_libraries

LIBRARIES = {"torch": 0.2, "transformers.modeling_utils": 0.6, "peft": 0.8, "trl": 1.0}  # share of the time until then
NO_COMPILER = "TORCHDYNAMO_DISABLE"


def import_libraries(screen: Screen) -> None:
    """Import torch, transformers, peft and trl. They take up to 10 seconds.

    bitsandbytes, which peft imports, would import torch's compiler, which takes a fifth of the time: it compiles
    functions that its native library replaces. Afterwards torch.compile works as usual.
    """
    quiet_libraries()  # before the import of libraries that print at import
    without = "torch._dynamo" not in sys.modules and NO_COMPILER not in os.environ
    began, share = time.monotonic(), 0.0
    with screen:
        try:
            if without:
                os.environ[NO_COMPILER] = "1"
            for name, reached in LIBRARIES.items():
                left = f", about {clock((time.monotonic() - began) * (1 / share - 1))} left" if share else ""
                screen.progress(f"loading the libraries: {name.partition('.')[0]}{left}")
                importlib.import_module(name)
                share = reached
        finally:
            if without:
                del os.environ[NO_COMPILER]
