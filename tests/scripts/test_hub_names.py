"""Runs the commands of docs/data_and_rewards.md with the hub's names, as dry runs and with two updates, against a hub
on this machine (tests/hub_server.py) that has a tiny model and made-up pairs in their place."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from rlhf.settings.reward_model import RewardModelConfig
from rlhf.settings.training import Config
from tests.documents import ROOT
from tests.forks import Forks
from tests.hub_server import USER, Hub
from tests.scripts.test_scripts import copy_project, run
from tests.shapes import make_start_model

pytestmark = [pytest.mark.ci, pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")]
MODEL = Config().model.actor_model
PAIRS = RewardModelConfig().data.pairs
SHORT = ["--max-new-tokens", "8"]
TWO_UPDATES = ["--num-iterations", "2", *SHORT, "--allow-weak-reward-model"]
LENGTHS = {"train_ppo.py": TWO_UPDATES, "train_grpo.py": TWO_UPDATES, "-m": SHORT,
           "compare_runs.py": ["--limit-minutes", "0.01"]}  # fmt: skip
BARS = re.compile(r"\d%\||it/s|B/s\b")


def page_commands() -> list[list[str]]:
    """Return the python commands of the page's section on the default recipe."""
    page = (ROOT / "docs" / "data_and_rewards.md").read_text("utf-8")
    section = page.partition("## A reward model from preference pairs")[2].partition("\n### ")[0]
    return [shlex.split(line)[1:] for line in section.splitlines() if line.startswith("python ")]


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Iterator[Hub]:
    root = tmp_path_factory.mktemp("hub")
    make_start_model(root / "models" / MODEL)
    data = root / "datasets" / PAIRS
    data.mkdir(parents=True)
    rows = [{"system": "", "question": f"What is number {i}?", "chosen": f"It is {i}.", "rejected": f"cat {i}"}
            for i in range(40)]  # fmt: skip
    (data / "orca_rlhf.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    served = Hub(root)
    yield served
    served.close()


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return copy_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def online(hub, project, home):
    """Return a function that runs a command with the hub, and returns what it printed."""
    forks = Forks(**hub.variables(home))

    def start(*words: str) -> CompletedProcess:
        done = forks.run([*words], project)
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr}"
        assert not BARS.search(done.stdout + done.stderr), "no download bars"
        assert done.stderr == "" or "--json" in words, "no messages of libraries"
        return done

    yield start
    forks.close()


def test_the_commands_run_as_printed(hub, project, home, online):
    commands = page_commands()
    assert [MODEL, PAIRS] == ["HuggingFaceTB/smollm2-135M-SFT-Only", "Intel/orca_dpo_pairs"] and len(commands) > 8
    assert {"--use-lora", "--check", "--dry-run"} <= {word for words in commands for word in words}
    for words in commands:
        trains = words[0].startswith("train_")
        if trains and not {"--dry-run", "--check"} & set(words):
            planned = online(*words, "--dry-run", "--allow-weak-reward-model")
            assert MODEL in planned.stdout and len(hub.requests) < 35, len(hub.requests)
            assert hub.downloads() == [], "all of it is in the cache"
        printed = online(*words, *LENGTHS.get(words[0], [])).stdout
        downloads = hub.downloads()
        assert ("downloading" in printed) == ("model.safetensors" in downloads)
        if words == ["-m", "reward_model.train"]:
            assert {"model.safetensors", "tokenizer.json", "orca_rlhf.jsonl"} <= set(downloads)
            assert len(downloads) == len(set(downloads)), "each file once"
        else:
            assert downloads == [], words
    for name in ("ppo_training_output", "grpo_training_output", "tryout"):
        record = json.loads((project / name / "run.json").read_text("utf-8"))
        assert (record["status"], record["spent"]["updates"]) == ("finished", 2)

    page = (project / "evaluation_output" / "evaluation.json").read_text("utf-8")
    assert MODEL in page and "snapshots" not in page, "the name on the hub, not the folder of the cache"
    online("train_ppo.py", *TWO_UPDATES, "--output", "pushed", "--push-to-hub", f"{USER}/pushed")
    pushed = hub.root / "models" / USER / "pushed"
    assert (pushed / "model.safetensors").read_bytes() == (project / "pushed" / "model.safetensors").read_bytes()
    assert MODEL in (pushed / "README.md").read_text("utf-8")
    found = online("evaluate_generations.py", "--model-path", f"{USER}/pushed", "--num-prompts", "2", *SHORT, "--json",
                   "--rm-model", "reward_model_output", "--prompts", PAIRS, "--baseline", MODEL)  # fmt: skip
    assert json.loads(found.stdout)["page"]


def test_a_dry_run_downloads_no_weights_and_offline_says_what_is_missing(hub, project, tmp_path):
    """With an empty cache, and then without the hub."""
    words = ["train_grpo.py", "--rm-model", "none", "--reward-func", "rewards.py:longer", "--dry-run"]
    (project / "rewards.py").write_text("def longer(completions, **_): return list(map(len, completions))")
    variables = hub.variables(tmp_path)
    hub.requests.clear()
    done = run(words, project, **variables)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "31,392 parameters" in done.stdout, "from the headers of the weights"
    assert len(hub.requests) < 60 and "model.safetensors" not in hub.downloads()
    offline = {**variables, "HF_HUB_OFFLINE": "1"}
    failed = run(words, project, **offline)
    assert failed.returncode == 2 and "safetensors" in failed.stderr and "go online" in failed.stderr
    failed = run(words, project, **{**offline, "HF_HOME": str(tmp_path / "empty")})
    assert failed.returncode == 2 and MODEL in failed.stderr and "HF_HUB_OFFLINE" in failed.stderr
    assert failed.stderr.count("\n") == 1 and hub.requests == []
