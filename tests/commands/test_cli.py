"""Tests the command `rlhf`: its subcommands, its errors, and the form of the commands that are printed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.algorithms.table import ALGORITHMS, DEFAULT_ALGORITHM
from rlhf.checkpoints.model_folder import how_to_train
from rlhf.checkpoints.run_record import environment
from rlhf.commands import cli
from rlhf.config import parse_cli
from rlhf.run.model_card import model_card_command
from rlhf.settings.next_commands import resume_command, reward_model_line
from rlhf.utils import command_lines
from tests.test_structure import HEAVY, PACKAGE, ROOT, module_of, strings_of

MODULE = str(ROOT / "rlhf" / "__main__.py")
OTHER_SCRIPTS = {
    "train": "train.py",
    "reward-model": "-m reward_model.train",
    "evaluate": "evaluate_generations.py",
    "compare": "compare_runs.py",
    "plot": "plot_training_progress.py",
    "export": "export_model.py",
}


@pytest.fixture
def started_as(monkeypatch):
    def start(program: str, *words: str) -> None:
        monkeypatch.setattr(sys, "argv", [program, *words])

    return start


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess:
    """Run `python -m rlhf` in a folder outside the project."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "rlhf", *words], cwd=cwd, env=environment, capture_output=True, text=True
    )


# --- subcommands -----------------------------------------------------------------------------------------------------


def test_help_lists_every_command(capsys, started_as):
    started_as("/venv/bin/rlhf")
    cli.main([])
    text = capsys.readouterr().out
    cli.main(["--help"])
    assert text == capsys.readouterr().out
    assert text.startswith("usage: rlhf COMMAND") and max(map(len, text.splitlines())) <= 100
    listed = [line.split()[0] for line in text.splitlines() if line.startswith("  ")]
    assert listed == [*ALGORITHMS, *OTHER_SCRIPTS] == list(cli.COMMANDS)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["evaluat"], *([name, "-h"] for name in OTHER_SCRIPTS)])
def test_help_version_and_errors_import_no_slow_library(words, tmp_path):
    """And take less than a second of CPU time, on a slow machine too: torch alone takes more."""
    code = (
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['rlhf', *{words}]\n"
        "from rlhf.commands.cli import main\ntry: main()\nexcept SystemExit: pass\n"
        f"assert not [name for name in {HEAVY} if name in sys.modules]\n"
        "assert time.process_time() < 1, time.process_time()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [*ALGORITHMS, *OTHER_SCRIPTS])
def test_a_subcommand_prints_the_help_of_its_script(name, capsys, started_as):
    """With its own name in usage and examples."""
    texts = {}
    for program in ("train.py", "rlhf"):
        started_as(program)
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help-all"])
        assert ended.value.code == 0
        texts[program] = " ".join(capsys.readouterr().out.split())
    script = f"python {OTHER_SCRIPTS.get(name, f'train_{name}.py')}"
    assert texts["rlhf"].startswith(f"usage: rlhf {name} ") and script not in texts["rlhf"]
    assert texts["train.py"].startswith(f"usage: {script} ")


@pytest.mark.parametrize(
    "word, nearest",
    [
        ("evaluat", "evaluate"),
        (f"train_{DEFAULT_ALGORITHM}", None),
        ("reward_model", "reward-model"),
        ("PLOTS", "plot"),
        ("comapre", "compare"),
        ("serve", None),
    ],
)
def test_an_unknown_command_is_one_line_with_the_nearest_one(word, nearest, tmp_path):
    done = run(word, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and f" {word!r}: python -m rlhf. " in line
    assert line.endswith(", ".join(cli.COMMANDS)) and (f" {nearest}? " in line) == (nearest is not None)


def test_a_flag_before_the_command_is_one_line(capsys, started_as):
    started_as("rlhf")
    with pytest.raises(SystemExit) as ended:
        cli.main(["--recipe", "demo"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and " --recipe: rlhf. " in error and error.count("\n") == 1


def test_an_error_in_the_flags_of_a_command_is_one_line(capsys, started_as):
    started_as("rlhf")
    group = next(row.name for row in ALGORITHMS.values() if row.group_size > 1)
    with pytest.raises(SystemExit) as ended:
        cli.main([group, "--lam", "0.9"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --lam ") and f" rlhf {DEFAULT_ALGORITHM}: " in error


def test_no_config_file_is_read(capsys, started_as, monkeypatch, tmp_path):
    """In the folder of a project whose config.py has nothing to do with this one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text("raise SystemExit('a config.py of another project')\n")
    started_as("rlhf")
    cli.main([DEFAULT_ALGORITHM, "--recipe", "demo", "--dry-run"])
    printed = capsys.readouterr().out
    assert "demo parts: " in printed and "config.py" not in printed
    assert [file.name for file in tmp_path.iterdir()] == ["config.py"]


# --- the words of printed commands -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program, prefix",
    [
        ("/home/me/.venv/bin/rlhf", "rlhf"),
        ("rlhf.exe", "rlhf"),
        (MODULE, "python -m rlhf"),
        ("train_ppo.py", None),
        ("", None),  # a notebook or `python -c`
        ("/usr/lib/python3/pytest/__main__.py", None),
    ],
)
def test_the_words_of_a_command(program, prefix, started_as, monkeypatch):
    """Those of the scripts in a checkout, unless `rlhf` was started."""
    started_as(program)
    for name in cli.COMMANDS:
        script = f"python {OTHER_SCRIPTS.get(name, f'train_{name}.py')}"
        assert " ".join(command_lines.script_words(name)) == (script if prefix is None else f"{prefix} {name}")
    monkeypatch.setattr(command_lines, "is_checkout", lambda: False)
    assert command_lines.script_words("plot")[-2:] == ("rlhf", "plot")


@pytest.mark.parametrize("program", ["{root}/train_ppo.py", "", "/usr/lib/ipykernel.py"])
def test_in_another_folder_the_scripts_have_their_path(program, started_as, monkeypatch, tmp_path):
    """The text of a message has the script's name only."""
    monkeypatch.chdir(tmp_path)
    started_as(program.format(root=ROOT))
    for name in cli.COMMANDS:
        python, script = command_lines.script_words(name)
        plain = OTHER_SCRIPTS.get(name, f"train_{name}.py").replace("-m reward_model.train", "reward_model/train.py")
        assert (python, script) == ("python", f"{ROOT}/{plain}") and Path(script).is_file()
        assert command_lines.short_name(name) == Path(plain).name


@pytest.mark.ci
@pytest.mark.parametrize("name", [*ALGORITHMS, *OTHER_SCRIPTS])
def test_a_printed_script_starts_in_another_folder(name, tmp_path):
    script = "reward_model/train.py" if name == "reward-model" else OTHER_SCRIPTS.get(name, f"train_{name}.py")
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(ROOT / script), "--help"], cwd=tmp_path, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith(f"usage: python {ROOT}/{script} "), done.stderr


def test_the_scripts_exist():
    for words in command_lines.SCRIPTS.values():
        script = words[1] if words[1] != "-m" else f"{words[2].replace('.', '/')}.py"
        assert (ROOT / script).is_file()
    assert all((ROOT / row.script).is_file() for row in ALGORITHMS.values())


@pytest.mark.parametrize(
    "program, training, reward_model",
    [
        ("rlhf", "rlhf ppo", "rlhf reward-model"),
        (MODULE, "python -m rlhf ppo", "python -m rlhf reward-model"),
        ("train.py", "python train_ppo.py", "python -m reward_model.train"),
    ],
    ids=["command", "module", "script"],
)
def test_commands_for_the_next_step_have_the_form_that_was_used(program, training, reward_model, started_as):
    started_as(program, "ppo")
    config = parse_cli(["--recipe", "demo", "--output", "./run"])
    assert resume_command(config) == f"{training} --resume --output ./run"
    assert reward_model_line(config).split(" --recipe")[0] == reward_model
    assert f"`{reward_model}`" in how_to_train()


def test_one_file_has_the_names_of_the_scripts():
    names = (*(words[-1] for words in command_lines.SCRIPTS.values()), "train_{")
    found = {
        (module_of(path), text)
        for path in PACKAGE.glob("**/*.py")
        for text in texts_of(path)
        if any(name in text for name in names)
    }
    assert {module for module, _ in found} <= {"rlhf.utils.command_lines"}, found


def texts_of(path: Path) -> list[str]:
    """Return the strings of a file without docstrings. An f-string is one text, with {} for its values."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    joined = [node.values for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    whole = ["".join(v.value if isinstance(v, ast.Constant) else "{}" for v in values) for values in joined]
    return [*whole, *strings_of(tree)]


@pytest.mark.parametrize(
    "program, stored, printed",
    [
        ("/venv/bin/rlhf", ["rlhf", "ppo", "--seed", "3"], "rlhf ppo --seed 3"),
        (MODULE, ["-m", "rlhf", "ppo", "--seed", "3"], "python -m rlhf ppo --seed 3"),
        ("/home/me/train_ppo.py", ["train_ppo.py", "ppo", "--seed", "3"], "python train_ppo.py ppo --seed 3"),
    ],
)
def test_the_run_record_and_the_model_card_have_the_command(program, stored, printed, started_as):
    started_as(program, "ppo", "--seed", "3")
    assert environment()["command"] == stored
    assert model_card_command(stored) == printed
