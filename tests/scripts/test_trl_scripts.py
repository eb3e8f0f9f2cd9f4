"""Runs TRL's examples with one changed import, against a hub on this machine that has a tiny model and two rows."""

from __future__ import annotations

import importlib.util
import json
import os

import pytest
from datasets import Dataset

from tests.forks import Forks
from tests.hub_server import USER, Hub
from tests.scripts.test_scripts import copy_project
from tests.shapes import make_start_model

pytestmark = [pytest.mark.ci, pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")]

README = """
from datasets import load_dataset
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
)
trainer.train()
"""
# of TRL's page on GRPO, made short, and with an upload
QUICKSTART = f"""
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

def reward_num_unique_letters(completions, **kwargs):
    completion_contents = [completion[0]["content"] for completion in completions]
    return [float(len(set(content))) for content in completion_contents]

training_args = GRPOConfig(
    output_dir="Qwen2-0.5B-GRPO", use_cpu=True, max_steps=2, max_completion_length=8, num_generations=4,
    push_to_hub=True, hub_model_id="{USER}/Qwen2-0.5B-GRPO",
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=reward_num_unique_letters,
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
"""


@pytest.fixture
def run_changed(tmp_path):
    """Return a function that runs an example with its import of the trainers changed, and returns the hub's and the
    program's folder."""
    hub = Hub(tmp_path / "hub")
    model = tmp_path / "hub" / "models" / "Qwen" / "Qwen2.5-0.5B-Instruct"
    make_start_model(model)
    config = json.loads((model / "config.json").read_text("utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}), encoding="utf-8")
    data = tmp_path / "hub" / "datasets" / "trl-lib" / "DeepMath-103K"
    data.mkdir(parents=True)
    chat = [{"role": "user", "content": "What is 1 + 1?"}]
    Dataset.from_list([{"prompt": chat, "solution": "$2$"}] * 2).to_parquet(data / "train.parquet")
    (tmp_path / "project").mkdir()
    project = copy_project(tmp_path / "project")
    forks = Forks(**hub.variables(tmp_path / "home"))

    def run(example: str):
        changed = example.replace("from trl import", "from rlhf.trl import")
        assert changed != example
        (project / "example.py").write_text(changed, encoding="utf-8")
        done = forks.run(["example.py"], project)
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return tmp_path / "hub", project

    yield run
    forks.close()
    hub.close()


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
def test_the_example_of_trls_readme(run_changed):
    """TRL's defaults: 8 completions per prompt, 3 epochs."""
    _, project = run_changed(README)
    run = json.loads((project / "Qwen2.5-0.5B-Instruct-GRPO" / "run.json").read_text("utf-8"))
    assert (run["status"], run["spent"]["updates"], run["spent"]["episodes"]) == ("finished", 6, 48)


def test_the_quickstart_with_an_upload(run_changed):
    hub, project = run_changed(QUICKSTART)
    run = json.loads((project / "Qwen2-0.5B-GRPO" / "run.json").read_text("utf-8"))
    assert (run["status"], run["spent"]["updates"]) == ("finished", 2)
    uploaded = hub / "models" / USER / "Qwen2-0.5B-GRPO" / "model.safetensors"
    assert uploaded.read_bytes() == (project / "Qwen2-0.5B-GRPO" / "model.safetensors").read_bytes()
