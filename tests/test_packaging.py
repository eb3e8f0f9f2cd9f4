"""Tests the package: its declared libraries, the wheel, its installation, and the workflow that runs the tests."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import on_gpu
from rlhf.algorithms.table import ALGORITHMS, DEFAULT_ALGORITHM
from rlhf.commands import cli
from rlhf.config import parse_cli
from tests.documents import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
# declared, although no file of rlhf/ imports it -> the file of another library that does, without declaring it
FOR_ANOTHER_LIBRARY = {"requests": "trl/generation/vllm_client.py"}
OTHER_NAMES = {"yaml": "PyYAML"}  # module -> its distribution, if the names differ
WORKFLOW = ROOT / ".github" / "workflows" / "tests.yml"


def names_of(lines: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in lines}


def file_lines(name: str) -> list[str]:
    """Return the lines of a requirements file without comments and options."""
    lines = (line.partition(" #")[0].strip() for line in (ROOT / name).read_text("utf-8").splitlines())
    return [line for line in lines if line and not line.startswith(("#", "-"))]


# --- declared libraries ----------------------------------------------------------------------------------------------


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the top-level modules that code imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


IN_NOTEBOOKS = "ipython"  # imported in a notebook only, where it runs already


def distributions_of(trees: list[ast.AST]) -> set[str]:
    """Return the distributions that code imports, without Python's own modules and this project."""
    found = {module for tree in trees for module in imported(tree)} - set(sys.stdlib_module_names) - {"rlhf"}
    return {canonicalize_name(OTHER_NAMES.get(module, module)) for module in found}


def trees_of_the_package() -> list[ast.Module]:
    return [ast.parse(path.read_text("utf-8")) for path in (ROOT / "rlhf").glob("**/*.py")]


def test_every_declared_library_is_imported_and_every_imported_one_is_declared():
    declared = names_of(PROJECT["dependencies"])
    used = distributions_of(trees_of_the_package())
    assert declared - used == set(FOR_ANOTHER_LIBRARY), "remove what nothing imports"
    optional = names_of([line for name in EXTRAS for line in EXTRAS[name]])
    assert used - declared - {IN_NOTEBOOKS} <= optional, "declare it in pyproject"


def is_for_annotations(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def test_libraries_of_extras_are_imported_inside_functions_only():
    trees = trees_of_the_package()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_for_annotations(node):
            node.body = []
    found = distributions_of(trees)
    assert "torch" in found and found <= names_of(PROJECT["dependencies"])


@pytest.mark.parametrize("name", FOR_ANOTHER_LIBRARY)
def test_a_library_without_an_import_is_needed_by_another_one(name):
    library, _, file = FOR_ANOTHER_LIBRARY[name].partition("/")
    source = Path(importlib.util.find_spec(library).submodule_search_locations[0], file).read_text("utf-8")
    assert re.search(rf"^(from|import) {name}\b", source, re.MULTILINE)
    assert name not in names_of([r for r in importlib.metadata.requires(library) if "extra ==" not in r])


def test_only_trl_is_exact_and_its_extras_have_the_same_version():
    every = [Requirement(line) for line in [*PROJECT["dependencies"], *(r for n in EXTRAS for r in EXTRAS[n])]]
    exact = {str(r.specifier) for r in every if r.name == "trl"}
    assert exact == {"==1.12.0"}
    tools = {"ruff", "mypy"}  # another version reports other errors
    assert {r.name for r in every if "==" in str(r.specifier)} == {"trl", *tools}


def test_the_installed_versions_are_in_the_declared_ranges():
    for line in PROJECT["dependencies"]:
        wanted = Requirement(line)
        assert wanted.specifier.contains(importlib.metadata.version(wanted.name), prereleases=True), line


def test_requirements_have_the_libraries_of_pyproject():
    """The run-time libraries, bitsandbytes and the tools for tests, in the versions of constraints.txt."""
    lines = file_lines("requirements.txt")
    wanted = [*PROJECT["dependencies"], *EXTRAS["4bit"], *EXTRAS["dev"]]
    assert names_of(lines) == names_of(wanted) and len(lines) == len(set(lines))
    assert "-c constraints.txt" in (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    (torch,) = (line for line in lines if Requirement(line).name == "torch")
    assert torch in PROJECT["dependencies"], "a range, because the wheel depends on the machine"
    assert [line for line in lines if Requirement(line).specifier] == [torch]


def test_the_lowest_torch_is_the_same_everywhere_and_has_the_fused_norm():
    """On CUDA, rlhf.models.llama calls `_fused_rms_norm` in the form that torch has since 2.9."""
    (declared,) = (Requirement(line) for line in PROJECT["dependencies"] if Requirement(line).name == "torch")
    assert not declared.specifier.contains("2.8.0") and declared.specifier.contains("2.9.0")
    named = [
        (path.name, version)
        for path in [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]
        for version in re.findall(r"torch(?: from |>=| >= )(\d+\.\d+)", path.read_text("utf-8"))
    ]
    assert named and {version for _, version in named} == {"2.9"}, named
    schema = torch.ops.aten._fused_rms_norm.default._schema
    assert str(schema.arguments[1].type) == "List[int]" and len(schema.returns) == 2


def test_constraints_are_exact_and_in_the_declared_ranges():
    pinned = {canonicalize_name(r.name): r for r in map(Requirement, file_lines("constraints.txt"))}
    assert "torch" not in pinned and all(re.fullmatch(r"==[\w.]+", str(r.specifier)) for r in pinned.values())
    assert names_of(file_lines("requirements.txt")) - set(pinned) == {"torch"}
    ranges = [Requirement(line) for line in [*PROJECT["dependencies"], *EXTRAS["4bit"], *EXTRAS["dev"]]]
    for wanted in (r for r in ranges if r.name != "torch"):
        version = str(pinned[canonicalize_name(wanted.name)].specifier).removeprefix("==")
        assert wanted.specifier.contains(version), f"{wanted} and constraints.txt: {version}"


def test_the_version_is_the_same_everywhere():
    version = PROJECT["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))["version"] == version
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest[1].strip(":,") == version


# --- the wheel, built and installed without an index -----------------------------------------------------------------

IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info")
IN_THE_WHEEL = [
    "rlhf/py.typed",
    "rlhf/__main__.py",
    "rlhf/recipes/demo.yaml",
    "rlhf/utils/templates/card.md",
    "rlhf/demo/weights/model.safetensors",
    "rlhf/demo/checker_weights/model.safetensors",
]


def copy_of_the_sources(folder: Path) -> Path:
    """Copy what a build could take by mistake, too. Building writes into the source folder."""
    for name in ("rlhf", "reward_model", "benchmarks", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=IGNORED)
    for file in [
        *ROOT.glob("*.py"),
        *(ROOT / n for n in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt")),
    ]:
        shutil.copy(file, folder)
    return folder


def python(folder: Path, *words: object, **environment: str) -> str:
    """Run Python in a folder. Return what it printed."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def new_environment(folder: Path) -> Path:
    """Make a virtual environment that sees the libraries of this one. Return its folder of programs."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("Lib/site-packages" if os.name == "nt" else "lib/python*/site-packages")
    (site / "of_the_tests.pth").write_text("\n".join(p for p in sys.path if Path(p).name.endswith("-packages")))
    return folder / ("Scripts" if os.name == "nt" else "bin")


PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    sources = copy_of_the_sources(tmp_path_factory.mktemp("sources"))
    python(sources, *PIP, "wheel", ".", "--no-build-isolation", "--no-deps", "--wheel-dir", "dist")
    (found,) = (sources / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def programs(tmp_path_factory, wheel) -> Path:
    """Return the folder of programs of an environment in which the wheel is installed."""
    folder = new_environment(tmp_path_factory.mktemp("installed") / "venv")
    python(folder, PIP[0], "-m", "pip", "--python", folder / "python", "install", "--no-deps", "--quiet", wheel)
    return folder


@pytest.fixture
def foreign(tmp_path) -> Path:
    """Return a folder with a config.py and modules of another project, which must not be imported."""
    for name in ("config.py", "reward_model.py", "statistics.py", "train_ppo.py"):
        (tmp_path / name).write_text(f"raise SystemExit('{name} of another project')\n")
    return tmp_path


@pytest.mark.ci
def test_the_wheel_has_one_package_with_its_data(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    info = f"rlhf_workstation-{PROJECT['version']}.dist-info"
    assert wheel.name == f"rlhf_workstation-{PROJECT['version']}-py3-none-any.whl"
    assert {name.split("/")[0] for name in names} == {"rlhf", info}
    tracked = {p.relative_to(ROOT).as_posix() for p in (ROOT / "rlhf").rglob("*") if p.is_file()}
    tracked = {name for name in tracked if "__pycache__" not in name}
    assert {name for name in names if name.startswith("rlhf/")} == tracked >= set(IN_THE_WHEEL)
    assert wheel.stat().st_size < 5 * 2**20


@pytest.mark.ci
def test_the_installed_command_in_the_folder_of_another_project(programs, foreign):
    rlhf = programs / "rlhf"
    assert python(foreign, rlhf, "--version") == f"rlhf {PROJECT['version']}\n"
    assert all(f"  {name} " in python(foreign, rlhf, "--help") for name in ALGORITHMS)
    printed = python(foreign, rlhf, DEFAULT_ALGORITHM, "--recipe", "demo", "--dry-run")
    assert "not built yet; a run builds them first" in printed and "config.py" not in printed
    assert f"usage: rlhf {DEFAULT_ALGORITHM} " in python(foreign, rlhf, DEFAULT_ALGORITHM, "--help")
    assert f"usage: python -m rlhf {DEFAULT_ALGORITHM} " in python(
        foreign, programs / "python", "-m", "rlhf", DEFAULT_ALGORITHM, "--help"
    )
    code = "from rlhf.utils.libraries import requirements as r; print(*r(), *r('4bit'), *r('math'), sep='\\n')"
    lines = python(foreign, programs / "python", "-P", "-c", code).split("\n")[:-1]
    assert {(r.name, r.specifier) for r in map(Requirement, lines)} == {
        (r.name, r.specifier) for r in map(Requirement, [*PROJECT["dependencies"], *EXTRAS["4bit"], *EXTRAS["math"]])
    }


@pytest.mark.ci
def test_the_installed_command_trains_and_plots(programs, foreign, start_model, reward_folder, pairs_file):
    """Two seeds, and the commands that are printed after them."""
    flags = ["--actor-model", start_model, "--rm-model", reward_folder, "--prompts", pairs_file, "--batch-size", 4,
             "--num-iterations", 1, "--max-new-tokens", 8, "--eval-prompts", 4, "--allow-weak-reward-model",
             "--output", "./run"]  # fmt: skip
    printed = python(foreign, programs / "rlhf", DEFAULT_ALGORITHM, *flags, "--seeds", 1, 2)
    *_, command = re.findall(r"rlhf plot .*", printed)  # after those of the single seeds
    assert "rlhf compare ./" in printed or "rlhf compare run" in printed
    assert not re.search(r"\w\.py\b", printed), "no name of a script"
    assert "at the end" in python(foreign, programs / command.split()[0], *command.split()[1:])
    card = (foreign / "run_seed1" / "README.md").read_text("utf-8")
    assert f"rlhf {DEFAULT_ALGORITHM} --actor-model" in card


@pytest.mark.ci
def test_an_editable_installation_uses_the_checkout(tmp_path):
    """From any folder. The scripts work as before."""
    sources = copy_of_the_sources(tmp_path / "sources")
    programs = new_environment(tmp_path / "venv")
    install = ("-m", "pip", "--python", programs / "python", "install", "--no-deps", "--no-build-isolation", "--quiet")
    python(sources, PIP[0], *install, "-e", ".")
    version = sources / "pyproject.toml"
    version.write_text(version.read_text("utf-8").replace(f'"{PROJECT["version"]}"', '"9.9.9"'), "utf-8")
    assert python(tmp_path, programs / "rlhf", "--version") == "rlhf 9.9.9\n"
    printed = python(tmp_path, programs / "python", sources / f"train_{DEFAULT_ALGORITHM}.py", "--help")
    script = sources / f"train_{DEFAULT_ALGORITHM}.py"
    assert " ".join(printed.split()).startswith(f"usage: python {script} "), "the path works in this folder, too"


# --- the type checker ------------------------------------------------------------------------------------------------

USER_PROGRAM = """
from rlhf.callbacks.base import Callback
from rlhf.config import make_config

class Watch(Callback):
    def on_update_end(self, update: int, metrics: dict[str, float]) -> None:
        reveal_type(update)

config = make_config("demo", batch_size=4, learning_rate=1e-5)
reveal_type(config)
make_config("demo", algorithm=4)
"""


@pytest.mark.ci
def test_a_program_of_a_user_is_checked_against_the_declared_types(tmp_path):
    """py.typed tells type checkers to read the package's annotations."""
    (tmp_path / "program.py").write_text(USER_PROGRAM)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]["overrides"][0]
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nfollow_imports = silent\n"
        + "".join(f"[mypy-{m}]\nfollow_imports = skip\nignore_missing_imports = True\n" for m in settings["module"])
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "program.py"],
        cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    lines = done.stdout
    assert 'Revealed type is "rlhf.settings.training.Config"' in lines
    assert 'Argument "algorithm" to "make_config" has incompatible type "int"' in lines
    assert "Found 1 error in 1 file" in lines


def test_the_form_for_a_machine_takes_the_block_of_the_report():
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "machine_report.yml").read_text("utf-8"))
    assert form["name"] in (ROOT / "benchmarks" / "on_gpu.py").read_text("utf-8")
    inputs = {part["id"]: part for part in form["body"] if part["type"] != "markdown"}
    assert inputs["block"]["validations"]["required"] and len(inputs) == len(form["body"]) - 1
    script, *flags = re.search(r"`python (.+?)`", form["body"][0]["attributes"]["value"])[1].split()
    assert (ROOT / script).is_file() and on_gpu.parse(flags).report


# --- the workflow ----------------------------------------------------------------------------------------------------


def steps() -> Iterator[tuple[dict, dict]]:
    """Yield (job, step) of every job in the workflow."""
    jobs = yaml.safe_load(WORKFLOW.read_text("utf-8"))["jobs"]
    for job in jobs.values():
        yield from ((job, step) for step in job["steps"])


def commands() -> list[str]:
    return [line.strip() for _, step in steps() for line in step.get("run", "").splitlines() if line.strip()]


def test_the_workflow_runs_on_both_systems_and_on_declared_python_versions():
    (job,) = yaml.safe_load(WORKFLOW.read_text("utf-8"))["jobs"].values()
    runs = [(row["os"].split("-")[0], str(row["python"])) for row in job["strategy"]["matrix"]["include"]]
    assert {system for system, _ in runs} == {"ubuntu", "windows"} and len(runs) >= 3
    classifiers = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c}
    assert {version for _, version in runs} <= classifiers
    assert all(isinstance(row["python"], str) for row in job["strategy"]["matrix"]["include"]), "3.10 is not 3.1"


def test_the_workflow_runs_commands_that_exist():
    """Those of README and .ci/run, and commands of the project with flags that they have."""
    known = "\n".join((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/installation.md", ".ci/run"))
    lines = commands()
    for line in lines:
        program, *flags = shlex.split(line)
        if program == "rlhf":
            assert flags[0] in cli.COMMANDS and parse_cli(flags[1:], flags[0]).run
        else:
            assert line in known or program == "pip", line
    tools = ("pip install -r requirements.txt", "ruff check .", "ruff format --check .", "mypy", "python -m pytest")
    assert all(tool in lines for tool in tools)
    assert "python train_ppo.py --recipe demo" in lines
    (torch,) = (line for line in lines if line.startswith("pip install torch"))
    assert torch.split(" --")[0].split()[-1] in (ROOT / ".ci" / "run").read_text("utf-8"), "the version of .ci/run"
    assert torch.split(" --")[1] in (ROOT / "README.md").read_text("utf-8"), "the address of README"
