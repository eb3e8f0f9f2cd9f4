"""Checks the installed libraries, before any of them is imported, and imports the slow ones."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import tomllib
from collections.abc import Iterable
from typing import Any

from rlhf.utils.command_lines import CHECKOUT, is_checkout
from rlhf.utils.console import Screen, quiet_libraries
from rlhf.utils.errors import Problem, UserError, raise_if

LIBRARIES = ("torch", "transformers.modeling_utils", "peft", "trl")
NO_COMPILER = "TORCHDYNAMO_DISABLE"
NAME = "rlhf-workstation"  # of the distribution; the package is `rlhf`
IMPORTED_BY_SOME = ("matplotlib",)  # the commands that import it check it


@functools.cache
def project() -> dict[str, Any]:
    """Return the table [project] of the checkout's pyproject.toml, or the same entries of the installed package's
    metadata: "version", "dependencies" and "optional-dependencies". Raises UserError if there is neither."""
    if is_checkout():
        return tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    try:
        found = importlib.metadata.distribution(NAME)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"no pyproject.toml, and {NAME} is not installed", CHECKOUT, "Copy the whole project, or install it"
        ) from None
    every: dict[str, list[str]] = {"": []}
    for line in found.requires or []:  # for example: bitsandbytes<1,>=0.49; extra == "4bit"
        extra = re.search(r"extra == ['\"]([\w.-]+)", line)
        every.setdefault(extra[1] if extra else "", []).append(line)
    return {"version": found.version, "dependencies": every.pop(""), "optional-dependencies": every}


def requirements(extra: str | None = None) -> list[str]:
    """Return what pip installs for the package, or for one of its extras: lines such as `trl==1.12.0`."""
    lines = project()["dependencies"] if extra is None else project()["optional-dependencies"][extra]
    return [line.partition(";")[0].strip() for line in lines]


def pip_install(extra: str) -> str:
    """Return the command that installs the libraries of an extra."""
    return " ".join(["pip install", *(f'"{line}"' for line in requirements(extra))])


def check_libraries(*names: str) -> None:
    """Raise UserError, with the pip command, if a library is missing, or if trl is not the required version, the last
    one with PPO. Versions of other libraries are not checked. Also raises it if Python removes docstrings,
    with which transformers cannot be imported.

    `names`: the libraries to check. None given: all that training uses; extras are checked where they are used.
    """
    problems = []
    if sys.flags.optimize > 1 and not names:
        problems.append(
            Problem(
                "Python removes docstrings, which transformers reads",
                "PYTHONOPTIMIZE=2 or python -OO",
                "Unset the variable, or start python without -OO",
            )
        )
    for line in requirements():
        name = re.match(r"[\w.-]+", line)[0]
        if (name not in names) if names else (name in IMPORTED_BY_SOME):
            continue
        version = version_of(name)
        if version is None:
            problems.append(
                Problem(f"{name} is not installed", f"{NAME} requires it", f'Install it with: pip install "{line}"')
            )
        elif name == "trl" and line != f"trl=={version}":
            problems.append(
                Problem(
                    f"wrong version of trl ({version})",
                    f"{NAME} requires {line}",
                    f'Fix it with: pip install "{line}"',
                )
            )
    raise_if(problems)


def version_of(package: str) -> str | None:
    """Return the installed version; None if no distribution with this name is installed. Does not import it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_trackers(names: Iterable[str]) -> None:
    """Raise UserError, with the pip command, if the library of a tracker of --report-to is missing. Imports none."""
    line_of = {re.match(r"[\w.-]+", line)[0]: line for line in requirements("tracking")}
    missing = [name for name in names if version_of(name) is None]  # a folder with this name could be imported, too
    raise_if(
        [
            Problem(
                f"{name} is not installed", f"--report-to {name}", f'Install it with: pip install "{line_of[name]}"'
            )
            for name in missing
        ]
    )


def import_libraries(screen: Screen, *modules: str) -> None:
    """Import torch, transformers, peft, trl and `modules`. They take up to 10 seconds.

    bitsandbytes, which peft imports, would import torch's compiler, which takes a fifth of the time: it compiles
    functions that its native library replaces. Afterwards torch.compile works as usual.

    Searching for garbage takes another fifth of the time. Nearly all objects that imports make are kept, so Python
    searches neither during the imports nor later among these objects. In a program that has torch nothing changes,
    because others of its objects may become garbage.
    """
    quiet_libraries()  # before the import of libraries that print at import
    without = "torch._dynamo" not in sys.modules and NO_COMPILER not in os.environ
    is_first = "torch" not in sys.modules
    with screen:
        try:
            if is_first:
                gc.disable()
            if without:
                os.environ[NO_COMPILER] = "1"
            for name in (*LIBRARIES, *modules):
                screen.progress(f"loading the libraries: {name.partition('.')[0]}")
                importlib.import_module(name)
        finally:
            if without:
                del os.environ[NO_COMPILER]
            if is_first:
                gc.freeze()
                gc.enable()
