"""Finds reward functions by name: built-in ones, those of `trl.rewards`, and functions in a user's file.

Imports no torch, so that a missing function is reported at once.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.checkpoints.model_folder import find_model
from rlhf.settings.next_commands import in_a_file, names_code
from rlhf.settings.training import Config, function_name
from rlhf.settings.types import FROM_PYTHON, FROM_TRL
from rlhf.settings.validate import name_problems
from rlhf.utils.errors import Problem, UserError, did_you_mean, raise_if
from rlhf.utils.files import sha256_once
from rlhf.utils.libraries import pip_install
from rlhf.utils.paths import local_path

if TYPE_CHECKING:
    from torch import nn

    from rlhf.rewards.functions import RewardFunction

    Given = RewardFunction | nn.Module | str
    Functions = Sequence[Given] | Given

EVAL_FUNCTION = "evaluation function"  # the kind of `Rewards` that training never calls
BUILT_IN = ("length_penalty", "word_penalty", "keyword_bonus", "exact_match", "last_number")
NEED_MATH_VERIFY = ("accuracy_reward", "reasoning_accuracy_reward", "get_cosine_scaled_reward")


@dataclass
class RewardSources:
    """The reward model's folder and the reward functions of a run. The reward model is not loaded yet."""

    folder: str | None  # the reward model's folder; None: no reward model
    rules: list[RewardFunction | nn.Module]  # reward functions, from the settings or given in Python
    weights: Sequence[float] | None = None  # the reward model's first, if there is one; None: all 1

    def and_also(self, function: RewardFunction) -> RewardSources:
        """Return the rewards with one more function, whose weight is 1."""
        weights = None if self.weights is None else (*self.weights, 1.0)
        return RewardSources(self.folder, [*self.rules, function], weights)

    @property
    def is_empty(self) -> bool:
        """True if only a teacher gives scores."""
        return self.folder is None and not self.rules

    def __str__(self) -> str:
        from rlhf.rewards.arguments import distinct_names, name_of, weighted_sum  # imports torch

        names = ["reward_model"] * (self.folder is not None) + [name_of(rule) for rule in self.rules]
        return weighted_sum(distinct_names(names), self.weights if self.weights is not None else [1.0] * len(names))


def find_rewards(config: Config) -> RewardSources:
    """Find the reward model and the reward functions of the settings. Raises UserError if one does not exist."""
    name = config.model.rm_model
    return RewardSources(
        folder=find_model(name, "--rm-model") if name is not None else None,
        rules=[find_rule(rule, config.reward.keywords) for rule in config.reward.reward_func],
        weights=config.reward.reward_weights,
    )


def as_list(functions: Functions) -> list[Given]:
    """Return what was given in Python as a list: one or several functions. A set is refused as one that cannot be
    called: it has no order, in which weights would apply."""
    one = callable(functions) or isinstance(functions, str) or not isinstance(functions, Sequence)
    return [functions] if one else list(functions)


def find_given(functions: Functions, config: Config, argument: str) -> list[RewardFunction | nn.Module]:
    """Return the functions given in Python, and those that are given by name. Raises UserError for a name without a
    function, and for what cannot be called. `argument` is the argument in messages."""
    keywords = config.reward.keywords
    found = [find_rule(f, keywords, argument) if isinstance(f, str) else f for f in as_list(functions)]
    wanted = "Give functions, nn.Modules, or names as in make_config(reward_func=)"
    raise_if([Problem("not a function", f"{argument}, {f!r:.60}", wanted) for f in found if not callable(f)])
    return found


def find_eval_functions(config: Config) -> dict[str, RewardFunction | nn.Module]:
    """Find the evaluation functions of the settings, by their names in metrics. Raises UserError if one does not
    exist. Executes their files."""
    keywords = config.reward.keywords
    return {function_name(rule): find_rule(rule, keywords, "--eval-func") for rule in config.reward.eval_func}


def given_eval_functions(config: Config, functions: Functions) -> dict[str, RewardFunction | nn.Module]:
    """Return evaluation functions given in Python, by their names in metrics. Raises UserError as `find_given`, and
    for a name that cannot be used."""
    from rlhf.rewards.arguments import name_of

    given = find_given(functions, config, "eval_functions")
    names = [name_of(f) for f in given]
    raise_if(name_problems(names, "eval_functions"))
    return dict(zip(names, given, strict=True))


def find_rule(name: str, keywords: Sequence[str] = (), flag: str = "--reward-func") -> RewardFunction | nn.Module:
    """Return a reward function by name. Raises UserError if there is no such function.

    Args:
        name: a built-in function; `trl:NAME` or `trl:NAME(argument=value, ...)`, a function of trl.rewards; or
            `FILE.py:NAME`, which runs that file. If NAME is a class, it is instantiated without arguments.
        keywords: for keyword_bonus.
        flag: the setting in error messages.
    """
    if name in BUILT_IN:
        from rlhf.rewards import eval_functions, functions  # they import torch

        if name == "keyword_bonus":
            return functions.keyword_bonus(keywords)
        return getattr(functions if hasattr(functions, name) else eval_functions, name)
    if name.startswith(FROM_TRL):
        return _of_trl(name, flag)
    if name.startswith(FROM_PYTHON):
        function = name.removeprefix(FROM_PYTHON)
        raise UserError(
            f"the function {function} was defined in a Python program or a notebook",
            flag,
            f"Save it in a file, and add {flag} {in_a_file(name)}",
        )
    if ":" not in name:
        wanted = f"{did_you_mean(name, BUILT_IN)}Write FILE.py:NAME, trl:NAME or one of {', '.join(BUILT_IN)}"
        raise UserError("no such reward function", f"{flag} {name}", wanted)
    rule = of_users_file(name, flag)
    if inspect.isclass(rule):
        with users_code(f"{rule.__name__}() failed", f"{flag} {name}", "Give it a constructor without arguments"):
            rule = rule()
    if not callable(rule):
        raise UserError("not callable", f"{flag} {name}", "Name a function or a class")
    return rule


def check_rules(rules: Sequence[str], flag: str) -> None:
    """Raise UserError for the first reward function that does not exist, without importing torch or TRL.

    Files of the user are executed, as in training. Of functions of trl.rewards only the form is checked.
    """
    for rule in rules:
        if rule.startswith(FROM_TRL):
            _parsed(rule, flag)
        elif rule not in BUILT_IN:
            find_rule(rule, flag=flag)


# --- functions of trl.rewards ----------------------------------------------------------------------------------------


def _of_trl(name: str, flag: str) -> RewardFunction:
    """Return a function of trl.rewards.

    A `get_...` function is called with the arguments and returns the reward function. Other functions get them in
    addition to those of every reward function.
    """
    function_name, given = _parsed(name, flag)
    import trl.rewards

    offered = [n for n in trl.rewards.__all__ if inspect.isroutine(getattr(trl.rewards, n))]
    if function_name not in offered:
        nearest = did_you_mean(function_name, offered, f"It has {', '.join(offered)}")
        raise UserError(f"no {function_name!r} in trl.rewards", f"{flag} {name}", nearest)
    if function_name in NEED_MATH_VERIFY and importlib.util.find_spec("math_verify") is None:
        raise UserError("math-verify is not installed", f"{flag} {name}", f"Install it with: {pip_install('math')}")
    function = getattr(trl.rewards, function_name)
    known = inspect.signature(function).parameters
    unknown = [n for n in given if n not in known]
    if unknown:
        names = ", ".join(n for n, p in known.items() if p.kind is not p.VAR_KEYWORD)
        raise UserError(f"{function_name} has no argument {unknown[0]!r}", f"{flag} {name}", f"It has {names}")
    if not function_name.startswith("get_"):
        return partial(function, **given) if given else function
    try:
        return function(**given)
    except (TypeError, ValueError) as error:
        raise UserError(f"{function_name}() failed ({error})", f"{flag} {name}", "Correct its arguments") from None


def _parsed(name: str, flag: str) -> tuple[str, dict[str, Any]]:
    """Return the function's name and its arguments from `trl:NAME` or `trl:NAME(argument=value, ...)`."""
    try:
        node = ast.parse(name.removeprefix(FROM_TRL).strip(), mode="eval").body
        function, keywords = (node.func, node.keywords) if isinstance(node, ast.Call) else (node, [])
        if not isinstance(function, ast.Name) or (isinstance(node, ast.Call) and node.args):
            raise ValueError
        return function.id, {keyword.arg: ast.literal_eval(keyword.value) for keyword in keywords}
    except (SyntaxError, ValueError):
        example = f'"{FROM_TRL}get_repetition_penalty_reward(ngram_size=2)"'
        raise UserError(
            "not a function of trl.rewards", f"{flag} {name}", f"Write {FROM_TRL}NAME, or with arguments {example}"
        ) from None


# --- code in a user's file -------------------------------------------------------------------------------------------


def of_users_file(name: str, flag: str) -> Any:
    """Return what NAME is in a file, from `FILE.py:NAME`, the value of `flag`. Runs the file, once. Raises UserError
    if the file or the name does not exist, or if the file fails."""
    path, _, attribute = name.rpartition(":")
    file = Path(local_path(path))
    if not file.is_file():
        raise UserError("no such file", f"{flag} {name}", "Write FILE.py:NAME")
    found = _load_file(file, flag)
    if not hasattr(found, attribute):
        names = [n for n, value in vars(found).items() if callable(value)]
        nearest = did_you_mean(attribute, names, f"The file defines {', '.join(names) or 'no functions'}")
        raise UserError(f"no {attribute!r} in {path!r}", f"{flag} {name}", nearest)
    return getattr(found, attribute)


@contextmanager
def users_code(failed: str, place: str, hint: str) -> Iterator[None]:
    """Context manager around code of the user's file, as `user_code`. Raises UserError for whatever the code raises,
    sys.exit() included."""
    from rlhf.utils.user_code import user_code  # imports torch before the file does: a file may change its settings

    try:
        with user_code(failed):
            yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UserError(f"{failed} ({type(error).__name__}: {error})", place, hint) from None


def name_in_settings(function: Given) -> str:
    """Return the value of --reward-func that finds a function given in Python: a built-in name, trl:NAME or
    FILE.py:NAME. If none does, because the function is defined in the program itself, in a notebook or inside another
    function, return python:NAME. The name of a function that was given by name is that name."""
    from rlhf.rewards.arguments import name_of

    if isinstance(function, str):
        return function
    name = name_of(function)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or getattr(module, name, None) is not function:
        return FROM_PYTHON + name
    if name in BUILT_IN and module.__name__.startswith("rlhf."):
        return name
    if module.__name__.startswith("trl.rewards"):
        return FROM_TRL + name
    file = getattr(module, "__file__", None)
    if file is None or module.__name__ == "__main__":  # loading the program's file would run the program
        return FROM_PYTHON + name
    return f"{Path(os.path.relpath(file)).as_posix() if Path(file).is_relative_to(Path.cwd()) else file}:{name}"


def code_print(rule: str) -> str | None:
    """Return a SHA-256 of the name, the size and the content of the file that defines a function. None for a function
    that is not the user's."""
    if not names_code([rule]):
        return None
    file = Path(local_path(rule.rpartition(":")[0]))
    content = file.read_bytes()
    return hashlib.sha256(f"{file.name} {len(content)}\n".encode() + content).hexdigest()


_loaded: dict[tuple, Any] = {}  # (path, SHA-256) -> module


def _load_file(file: Path, flag: str) -> Any:
    """Return the module of a file. It is executed once, so its functions share what it loads."""
    key = (file.resolve(), sha256_once(file))
    if key not in _loaded:
        _loaded[key] = _execute(file, flag)
    return _loaded[key]


def _execute(file: Path, flag: str) -> Any:
    folder = str(file.parent.resolve())
    if folder not in sys.path:  # the file and its functions can import files next to it
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(_module_name(file), file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    try:
        with users_code("the file fails on import", f"{flag} {file}", "Fix the file"):
            # not exec_module: Python's cache of bytecode takes a file of the same size and second for the old one
            exec(spec.loader.source_to_code(file.read_bytes(), spec.origin), vars(module))
    except UserError:
        del sys.modules[spec.name]  # a corrected file gets the name
        raise
    return module


def _module_name(file: Path) -> str:
    """Return the file's own name if `import` finds the file by it: then processes that a function starts can import
    the module. Otherwise, a name that no other module has."""
    name = file.stem
    if "." not in name and sys.modules.get(name) in (None, *_loaded.values()):
        found = importlib.util.find_spec(name)
        if found is not None and Path(found.origin or "").resolve() == file.resolve():
            return name
    return f"reward_func_{len(_loaded)}"
