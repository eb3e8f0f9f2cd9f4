"""The README's commands as written there, in a copy of the project, with small stand-ins under the hub names."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import on_gpu
from benchmarks.work import add_flags
from rlhf.algorithms.table import ALGORITHMS
from rlhf.config import parse_cli
from rlhf.settings.evaluation import ComparisonConfig, EvaluationConfig, PlotConfig
from rlhf.settings.fields import settings_of
from rlhf.settings.flags import spellings
from rlhf.settings.reward_model import RewardModelConfig
from rlhf.settings.training import Config
from tests.scripts.test_scripts import ROOT, copy_project, run
from tests.shapes import make_base_model, make_start_model

README = (ROOT / "README.md").read_text(encoding="utf-8")
WITHOUT_A_CARD = [] if torch.cuda.is_available() else ["--use_cpu"]  # as the README says above the command
# installing, this very test, and what tests/benchmarks/test_on_gpu.py runs
NOT_RUN_HERE = ("pip ", "python -m pytest", "python benchmarks/on_gpu.py")
OF_THE_DEMO = re.compile(
    r"--recipe demo|_seed\d|recorded"
)  # minutes: tests/demo/test_demo.py runs these on real demo runs


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    """Every command of every bash block, in order; `a && b` is two."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [part.strip() for line in lines for part in line.split("&&") if part.strip()]


def runnable() -> list[str]:
    return [c for c in commands() if not c.startswith(NOT_RUN_HERE)]


@pytest.fixture(scope="module")
def project(tmp_path_factory, pairs_file) -> Path:
    """A copy in which the hub's names are folders and files: a user with a hub gets the same, only larger."""
    folder = copy_project(tmp_path_factory.mktemp("readme"))
    make_start_model(folder / "HuggingFaceTB" / "smollm2-135M-SFT-Only")
    make_start_model(folder / "HuggingFaceTB" / "SmolLM2-135M-Instruct")
    make_base_model(folder / "HuggingFaceTB" / "SmolLM2-135M")
    (folder / "Intel").mkdir()
    shutil.copy(pairs_file, folder / "Intel" / "orca_dpo_pairs")
    (folder / "my_chats").mkdir()
    chat = [{"role": "user", "content": "the capital of France?"}, {"role": "assistant", "content": "Paris"}]
    (folder / "my_chats" / "train.jsonl").write_text("\n".join([json.dumps({"messages": chat})] * 40))
    pairs = [[f"question {i}?", f"step {i}" + " now" * (i % 2), f"cat {i}" + " now" * (i % 3)] for i in range(90)]
    (folder / "my_data.py").write_text(f"pairs = {pairs!r}\n")
    return folder


def python_block(word: str) -> str:
    """The one python block in which `word` stands."""
    (block,) = [b for b in blocks("python") if word in b]
    return block


def test_your_own_pairs_take_five_lines():
    assert len(python_block("my_data").strip().splitlines()) == 5


@pytest.mark.ci
def test_the_example_in_python_runs(project):
    """As it stands, only smaller: two updates of short replies."""
    (project / "example.py").write_text(
        "from rlhf import config\nmake = config.make_config\n"
        "config.make_config = lambda *a, **k: make(*a, **{**k, 'num_iterations': 2, 'max_new_tokens': 8})\n"
        + python_block("make_trainer")
    )
    done = run(["example.py"], project)
    assert done.returncode == 0, done.stderr
    assert "epoch 1: score" in done.stdout and "update 2" in done.stdout
    assert (project / "my_python_run" / "model" / "model.safetensors").is_file()


@pytest.mark.ci
def test_every_command_of_the_readme_runs(project):
    """In the README's order. The stand-ins' random weights cannot be trained at the real learning rate in seconds: so
    after each reward model its record is put right: the refusal of weak ones is tested elsewhere."""
    assert any("--recipe demo" in c for c in runnable()) and any(c.startswith("trl sft") for c in runnable())
    (project / "my_rewards.py").write_text(python_block("# my_rewards.py"))
    (project / "write_pairs.py").write_text(python_block("my_data"))
    (project / "make_topics.py").write_text(python_block("# make_topics.py"))
    assert run(["write_pairs.py"], project).returncode == 0
    for command in runnable():
        words = shlex.split(command)
        if OF_THE_DEMO.search(command):
            continue
        if words[0] == "tensorboard":
            assert "http://" in serve(words[1:], project)
            continue
        if words[0] == "trl":
            words = ["python", "-c", "from trl.cli import main; main()", *words[1:], *WITHOUT_A_CARD]
        program = words[1:]
        done = run(program, project)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        for record in project.glob("*reward_model*/metrics.json"):
            record.write_text(json.dumps({**json.loads(record.read_text()), "accuracy": 0.95}))


def serve(arguments: list[str], project: Path) -> str:
    """Start TensorBoard until it names its address, on a free port of this machine; returns what it said."""
    words = [sys.executable, "-m", "tensorboard.main", *arguments, "--port", "0"]
    with subprocess.Popen(words, cwd=project, stderr=subprocess.PIPE, text=True) as server:
        found = ""
        for line in server.stderr:
            found += line
            if "http://" in line:
                break
        server.kill()
    return found


def test_the_yaml_block_is_a_configuration(tmp_path):
    (block,) = blocks("yaml")
    (tmp_path / "a.yaml").write_text(block)
    config = parse_cli(["--config", str(tmp_path / "a.yaml")])
    assert len(config.kl.kl_target) == 3 and config.optimizer.learning_rate == 1e-5


def test_every_test_that_the_readme_names_exists():
    files = (ROOT / "tests").rglob("test_*.py")
    known = {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text("utf-8"), re.MULTILINE)}
    named = re.findall(r"`(test_[^`/]*)`", README)
    assert len(named) > 5 and set(named) - known == set()


def test_every_flag_that_the_readme_names_exists():
    commands = (Config, RewardModelConfig, EvaluationConfig, ComparisonConfig, PlotConfig)
    settings = [s for command in commands for s in settings_of(command).values()]
    known = {flag for s in settings for flag in spellings([*s.names, *(f"no_{name}" for name in s.names)])}
    known |= {"--recipe", "--config", "--help-all"}
    benchmarks = argparse.ArgumentParser()
    add_flags(benchmarks)
    known |= {*benchmarks._option_string_actions, "--pairs", "--json"}
    known |= set(on_gpu.make_parser()._option_string_actions)
    outside = {"--index-url", "--logdir", "--model_name_or_path", "--dataset_name", "--output_dir", "--use_cpu",
               "--chat_template_path", "--help", "--x", "--no-x"}  # fmt: skip
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", README))
    assert named - known - outside == set()


def test_the_page_on_metrics_names_what_is_logged(build):
    """In the first column of its tables; the other columns have TRL's names."""
    logged = {"rewards/each/NAME"}  # where there are several reward functions
    logged |= {f"topic/NAME/{kind}" for kind in ("score", "kl", "eval_score")}  # with --steps-per-topic
    for algorithm in ALGORITHMS:
        trainer = build(algorithm=algorithm)
        trainer.train()
        logged |= set().union(*trainer.state.log_history) - {"epoch", "step"}
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    first_columns = re.findall(r"^\| (`[^|]+) \|", page, flags=re.MULTILINE)
    assert logged == set(re.findall(r"`([^`]+)`", " ".join(first_columns)))
