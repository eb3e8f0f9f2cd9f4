"""Tests `--help` (one screen) and `--help-all` (all settings). Both show the values that the command would use."""

from __future__ import annotations

import inspect
import re
import shlex

import pytest

from rlhf.algorithms.table import ALGORITHMS
from rlhf.config import command_line, make_config, parse_cli
from rlhf.settings import evaluation, reward_model
from rlhf.settings.fields import settings_of
from rlhf.settings.training import Config

PARSERS = {
    **{
        f"train_{a}": (command_line(row), lambda argv, a=a: parse_cli(argv, algorithm=a))
        for a, row in ALGORITHMS.items()
    },
    "reward_model": (reward_model.LINE, reward_model.parse_reward_cli),
    "evaluate": (evaluation.EVALUATION, evaluation.parse_evaluation_cli),
    "compare": (evaluation.COMPARISON, evaluation.parse_comparison_cli),
    "plot": (evaluation.PLOT, evaluation.parse_plot_cli),
    "export": (evaluation.EXPORT, evaluation.parse_export_cli),
}


@pytest.fixture
def help_of(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")

    def show(command: str, *words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            PARSERS[command][1](list(words))
        assert ended.value.code == 0
        return capsys.readouterr().out

    return show


def shown(text: str, flag: str) -> str:
    """Return the value of a flag in a help text with single spaces: in []."""
    return re.search(rf"{flag} [^\[\]]*?\[([^\],]*)", text)[1]


def flags_in(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line.startswith("  --")]


@pytest.mark.parametrize("command", PARSERS)
def test_help_is_one_screen_with_valid_examples(help_of, command):
    text = help_of(command, "--help")
    assert len(text.splitlines()) <= 40 and max(map(len, text.splitlines())) <= 100
    assert len(flags_in(text)) <= 21
    assert text == help_of(command, "-h")
    line, parse = PARSERS[command]
    assert len(line.examples) == 3
    for words, _ in line.examples:
        assert words in text
        parse(shlex.split(words))


@pytest.mark.parametrize("command", PARSERS)
def test_help_fits_a_narrow_terminal(help_of, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(command, "--help")
    assert max(map(len, text.splitlines())) <= 80 and len(text.splitlines()) <= 50


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_help_of_training_has_about_20_flags(help_of, algorithm):
    flags = flags_in(help_of(f"train_{algorithm}", "--help"))
    assert 15 <= len(flags) <= 22
    assert {"--recipe", "--use-lora", "--learning-rate", "--K", "--kl-target", "--resume", "--help-all"} <= set(flags)
    assert {"--dry-run", "--check", "--fit"} <= set(flags), "what to try before a run"


@pytest.mark.parametrize("command", PARSERS)
def test_help_all_has_every_setting_in_its_group(help_of, command):
    text = help_of(command, "--help-all")
    line = PARSERS[command][0]
    for s in line.settings.values():
        assert s.positional or f"  {s.flag}" in text, s.name
    titles = {s.group for s in line.settings.values()}
    assert sum(row.endswith(":") and not row.startswith(" ") for row in text.splitlines()) >= len(titles)
    foreign = [s.flag for s in settings_of(line.config_class).values() if s.name in line.foreign]
    assert not set(foreign) & set(text.split())


def test_help_shows_the_values_of_recipe_and_file(help_of, tmp_path):
    def spaced(*words, algorithm="grpo"):
        return " ".join(help_of(f"train_{algorithm}", *words).split())

    def sizes(text: str) -> tuple[str, str]:
        return shown(text, "--batch-size"), shown(text, "--K")

    assert sizes(spaced("--help")) == ("4", "8")
    demo = spaced("--recipe", "demo", "--help")
    assert sizes(demo) == ("16", "4") and "recipe demo" in demo
    assert shown(spaced("--help", "--recipe", "demo", algorithm="ppo"), "--batch-size") == "64"
    (batch_size,) = re.findall(r" --batch-size N .*?\[.*?\]", spaced("--recipe", "demo", "--help-all"))
    assert "[16, at least 1]" in batch_size
    (tmp_path / "a.yaml").write_text("recipe: demo\nupdate:\n  per_device_train_batch_size: 6\n")
    text = spaced("--help", "--config", str(tmp_path / "a.yaml"))
    assert sizes(text) == ("6", "4") and "recipe demo" in text
    (tmp_path / "b.yaml").write_text("kind: recipe\nalgorithms:\n  grpo: {K: 5}\n")
    assert shown(spaced("--help", "--recipe", str(tmp_path / "b.yaml")), "--K") == "5"
    compare = " ".join(help_of("compare", "--help").split())
    assert shown(compare, "--completions") == "4"
    (prompts,) = re.findall(r"--num-prompts N .*?(?= --completions )", compare)
    assert "20" in prompts and "128" in prompts


def test_help_is_printed_despite_errors_in_other_flags(help_of):
    assert "--learning-rate X" in help_of("train_ppo", "--learning-rat", "1", "--help")
    assert "--learning-rate X" in help_of("train_ppo", "--help", "--batch-size")


def test_signature_of_make_config_has_all_settings():
    names = list(inspect.signature(make_config).parameters)
    assert names == ["recipe", "algorithm", *settings_of(Config)]
    assert "learning_rate: float = Ellipsis" in str(inspect.signature(make_config))
