"""Tests every text that the library can print: a flag, a value, a class, a package, a page or a command in it exists,
in each command that can print the text. The texts are found by tests/advice.py.

A fix that needs a state is typed in tests/scripts/test_fixes.py.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
import tomllib

import pytest

from rlhf.api import check, make_trainer
from rlhf.config import make_config
from rlhf.settings.fields import convert, name_table
from rlhf.utils.errors import UserError
from tests.advice import (
    COMMANDS,
    FLAG,
    ROOT,
    Message,
    fixes,
    known_flags,
    messages,
    own_flags,
    printed_commands,
    reached,
)

# flags of other programs that a text names
OF_OTHERS = {
    "--no-deps": "pip", "--upgrade": "pip", "--force-reinstall": "pip", "--index-url": "pip",
    "--logdir": "tensorboard", "--merge": "llama-gguf-split", "--query-gpu": "nvidia-smi", "--format": "nvidia-smi",
    "--version": "rlhf", "--no": "the beginning of a flag",
}  # fmt: skip
# the text is about another command, or about the run that a training command makes
NAMES_TRAINING = re.compile(r"\b(re)?train|\bresum|if the run has a checkpoint", re.IGNORECASE)
OTHERS = {"evaluate", "compare", "plot", "export"}  # commands that train nothing
# units whose texts some commands cannot print, although they use the unit -> these commands, and the reason
BY_VALUE = {
    ("rlhf.settings.validate", ""): (OTHERS | {"reward-model"}, "the settings of a finished run "
        "are valid; tests/scripts/test_fixes.py changes those that an evaluation can change"),
    ("rlhf.settings.recipes", ""): (OTHERS, "--like takes only shipped recipes"),
    ("rlhf.settings.flags", "CommandLine.read"): (OTHERS, "they have no foreign groups"),
    ("rlhf.settings.flags", "CommandLine.help"): (OTHERS, "they have no recipes"),
    ("rlhf.settings.translate", "REMOVED"): (OTHERS | {"reward-model"}, "only training commands "
        "had these settings"),
    ("rlhf.data.prompts", "_warn_about_lost_topics"): ({"evaluate", "compare"}, "they train on no prompt"),
    **dict.fromkeys(
        [("rlhf.data.prompts", "_selected"), ("rlhf.data.prompts", "_no_prompts"),
         *((f"rlhf.data.{name}", "") for name in ("examples", "folders", "formats", "notices", "source", "tables"))],
        ({"export"}, "it prints what is wrong with the data of a run, and its own fix"),
    ),
    ("rlhf.checkpoints.run_folder", "_check_content"): ({"train", "reward-model"}, "each has its own --output"),
    ("rlhf.checkpoints.model_folder", "missing_targets"): ({"reward-model", "evaluate", "compare"}, "no LoRA targets"),
    ("rlhf.models.load", "load_adapter"): ({"train"}, "it loads the adapter that it has saved, onto its own base"),
    ("rlhf.rollout.continuous_batching", "ContinuousBatcher._replay"): ({"reward-model"}, "it uses no CUDA graphs"),
    ("rlhf.rollout.choice", "check_engine"): ({"reward-model"}, "it uses the engine of the model and the device"),
    ("rlhf.rewards.training", ""): ({"train"}, "it trains the reward model of a demo, whose settings are valid"),
    ("rlhf.utils.errors", "torch_error"): ({"reward-model", "evaluate", "compare"}, "they have no --deterministic"),
}  # fmt: skip
STOP_WORDS = {"and", "or", "to", "with", "from", "of", "if", "in", "on", "is", "for", "the", "it", "that", "one"}
STOP_WORDS |= {"here", "by", "chooses", "once", "records", "above", "uses"}
STOP_WORDS |= {"has", "may", "takes", "prints", "replaces", "was", "needs", "are", "as", "instead", "again", "alone"}


def exceptions(message: Message) -> set[str]:
    module, name = message.key
    return set().union(*(BY_VALUE[key][0] for key in ((module, name), (module, "")) if key in BY_VALUE))


def is_place(text: str) -> bool:
    """True for the place of an error, or a word of a command: a flag with nothing but its value."""
    return re.fullmatch(r"\W*--[\w-]+((, | )[\w\d{}=-]+)*[, =(:]*", text) is not None


def wrong_flags(message: Message) -> list[str]:
    """Return the flags in a text that no command has, or that one of the commands that can print it lacks."""
    every = frozenset().union(*map(known_flags, COMMANDS))
    commands = [c for c in COMMANDS if message.key in reached(c) and c not in exceptions(message)]
    found = []
    for flag in FLAG.findall(message.text):
        if flag not in every:
            found += [f"{flag}, which no command has"] if flag not in OF_OTHERS else []
        elif not is_place(message.text) and not NAMES_TRAINING.search(message.text):
            lacking = [command for command in commands if flag not in known_flags(command)]
            found += [f"{flag}, which {', '.join(lacking)} lacks"] if lacking else []
    return [f"{message.place} ({message.key[1]}): {one}: {message.text!r:.90}" for one in found]


def test_flags_exist_in_every_command_that_can_print_them():
    wrong = [line for message in messages() for line in wrong_flags(message)]
    assert wrong == []


# flags that only some algorithms have -> the units that name them, and why another algorithm cannot print the text
OF_ALGORITHMS = {
    "--dynamic-sampling": {"equal_groups": "it is a figure of algorithms that compare the completions of a prompt"},
    "--scale-rewards": {"_kl": "only GRPO's scale_rewards can differ from its default"},
    "--critic": dict.fromkeys(
        ("load_critic", "_rewards", "check_critic", "check_critic_of_run", "_check_backbone"), "only PPO has a critic"
    ),
}


def test_flags_of_some_algorithms_are_printed_by_these_only():
    flags = list(map(own_flags, COMMANDS["train"][1]))
    found: dict[str, set[str]] = {}
    for message in messages():
        if message.key in reached("train") and not is_place(message.text):
            for flag in FLAG.findall(message.text):
                if 0 < sum(flag in of for of in flags) < len(flags):
                    found.setdefault(flag, set()).add(message.key[1])
    assert found == {flag: set(units) for flag, units in OF_ALGORITHMS.items()}


def test_every_exception_is_needed():
    needed = {
        key
        for key in BY_VALUE
        for message in messages()
        if key in (message.key, (message.key[0], "")) and FLAG.search(message.text)
    }
    assert needed == BY_VALUE.keys()


def test_the_walk_finds_wrong_flags():
    here = ("rlhf.analysis.arms", "find_arms")
    assert here in reached("compare") and here not in reached("evaluate")
    assert len(wrong_flags(Message(here, 1, "Give --no-such-flag"))) == 1
    assert len(wrong_flags(Message(here, 1, "Raise --batch-size, please"))) == 1
    assert wrong_flags(Message(here, 1, "Train with a larger --batch-size, or give --baseline")) == []
    both = ("rlhf.analysis.models", "shared_settings")
    assert both in reached("compare") and both in reached("evaluate") and both not in reached("plot")


def test_flags_of_printed_commands_exist():
    commands = list(printed_commands())
    assert {name for _, name in commands} >= {"train", "evaluate", "compare", "plot", "reward-model"}
    wrong = [
        f"{message.place}: {flag} of {name}"
        for message, name in commands
        for flag in FLAG.findall(message.text)
        if flag not in known_flags(name)
    ]
    assert wrong == []


def test_examples_of_the_help_are_read():
    for name, (_, lines) in COMMANDS.items():
        for line in lines:
            for words, _ in line.examples:
                given, problems = line.read(words.split())
                assert problems == [], f"{name} {words}"
                for typed, (value, place) in given.items():
                    first = name_table(line.settings).get(typed)
                    assert first is not None or typed == "recipe"
                    if first is not None:
                        convert(line.settings[first], value, place)  # raises UserError


def values_of_flags() -> list[tuple[Message, str, str]]:
    """Return the flags in texts that are followed by a value: a word in small letters, a number, none."""
    pattern = re.compile(rf"({FLAG.pattern}) ([a-z0-9][\w.-]*)(?![\w.={{}}-])")
    found = [(message, *pair) for message in messages() for pair in pattern.findall(message.text)]
    return [(message, flag, value.rstrip(".")) for message, flag, value in found if value not in STOP_WORDS]


def test_values_of_flags_are_accepted():
    wrong = []
    used = values_of_flags()
    for message, flag, value in used:
        results = []
        for name, (_, lines) in COMMANDS.items():
            settings = {alias: s for line in lines for alias, s in line.settings.items()}
            first = name_table(settings).get(flag[2:].replace("-", "_"))
            if first is not None and message.key in reached(name):
                try:
                    convert(settings[first], value, flag)
                    results.append("")
                except UserError as error:
                    results.append(str(error))
        wrong += [f"{message.place}: {flag} {value}: {results}"] if any(results) else []
    assert len(used) > 20 and wrong == []


def test_named_python_objects_exist():
    pattern = re.compile(r"\b((?:peft|transformers|datasets|pandas|torch|DataFrame|Table)\.[A-Za-z_.]+[a-z])\b\(")
    homes = {"DataFrame": "pandas.DataFrame", "Table": "pyarrow.Table"}
    names = sorted({name for message in messages() for name in pattern.findall(message.text)})
    assert len(names) >= 5
    for name in names:
        first, *rest = name.replace("{}", "").split(".")
        parts = homes.get(first, first).split(".") + rest
        found = importlib.import_module(parts[0])
        for part in parts[1:]:
            found = getattr(found, part)
        assert callable(found), name


@pytest.mark.parametrize("function", [make_config, make_trainer, check])
def test_named_arguments_exist(function):
    pattern = re.compile(rf"\b{function.__name__}\([^()]*?\b(\w+)=")
    known = inspect.signature(function).parameters
    wrong = [f"{m.place}: {name}" for m in messages() for name in pattern.findall(m.text) if name not in known]
    assert wrong == []


def test_named_extras_and_programs_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    source = "".join(file.read_text("utf-8") for file in (ROOT / "rlhf").rglob("*.py"))
    named = set(re.findall(r"pip_install\(['\"](\w+)['\"]\)", source))
    assert {"gguf", "4bit"} <= named <= extras.keys()
    programs = {entry.name for entry in importlib.metadata.entry_points(group="console_scripts")}
    programs |= {"python", "pip", "llama-gguf-split"}  # the last one is of llama.cpp
    quoted = {text for m in fixes() for text in re.findall(r"`([a-z][\w-]+) [^`]*`", m.text)}
    assert "hf" in quoted and quoted <= programs


def test_named_pages_exist():
    found = {link for m in messages() for link in re.findall(r"docs/[\w/]+\.md(?:#[\w-]+)?", m.text)}
    assert len(found) >= 2
    for link in found:
        page, _, anchor = link.partition("#")
        heads = re.findall(r"^#+ (.+)$", (ROOT / page).read_text("utf-8"), flags=re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
        assert not anchor or anchor in anchors, link


def test_every_fix_is_read():
    """The counts show that the walk has found the texts; the numbers may only grow."""
    with_flags = [message for message in fixes() if FLAG.search(message.text)]
    assert len(fixes()) > 320 and len(with_flags) >= 70
