"""Tests what the JSON files of a model folder tell about it, without its weights, and the identity of a model."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from rlhf.checkpoints.model_folder import METRICS_FILE, model_files, reward_model_problems, same_weights
from rlhf.utils import files, hub
from tests.shapes import change_first_weight


@pytest.mark.parametrize(
    ("config", "start"),
    [
        ({"architectures": ["LlamaForCausalLM"], "num_labels": 1}, "a language model (LlamaForCausalLM)"),
        ({"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}, "3 outputs"),
        ({"num_labels": 2}, "2 outputs"),
        ({"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "bad", "1": "good"}}, "2 outputs"),
    ],
)
def test_a_model_with_another_head_is_not_a_reward_model(config: dict, start: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"pad_token_id": 0, **config}))
    save_file({"score.weight": torch.zeros(1, 2)}, tmp_path / "model.safetensors")
    (problem,) = reward_model_problems(str(tmp_path), "--rm-model")
    assert problem.what.startswith(start) and str(tmp_path) in str(problem.place)


# --- the identity of a model -----------------------------------------------------------------------------------------


@pytest.fixture
def sharded(start_model, tmp_path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(start_model)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert not (tmp_path / "sharded" / "model.safetensors").exists()
    return tmp_path / "sharded"


def test_every_file_that_decides_the_output_is_in_the_identity(reward_folder, tmp_path):
    folder = Path(shutil.copytree(reward_folder, tmp_path / "copy"))
    (folder / METRICS_FILE).write_text("{}")
    (folder / "README.md").write_text("a note")
    found = model_files(str(folder))
    names = {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert names | {METRICS_FILE} <= set(found) and "README.md" not in found
    for name in found:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        changed = model_files(str(folder))
        assert [other for other in found if changed[other] != found[other]] == [name]
        (folder / name).write_bytes(content)


def test_shards_are_in_the_identity_and_files_of_a_critic_are_not(sharded, start_model, tmp_path):
    shards = sorted(file.name for file in sharded.glob("*.safetensors"))
    assert len(shards) > 1 and set(shards) <= set(model_files(str(sharded)))
    run = Path(shutil.copytree(start_model, tmp_path / "run"))
    shutil.copy(run / "model.safetensors", run / "critic.safetensors")
    assert model_files(str(run)) == model_files(str(start_model))
    before = model_files(str(run))
    (run / "vocab.json").write_text("{}")
    assert model_files(str(run)) == before, "beside a tokenizer.json it decides nothing; a hub cache may get it later"


def test_weights_of_two_folders_are_compared_file_by_file(sharded, tmp_path):
    copy = Path(shutil.copytree(sharded, tmp_path / "copy"))
    assert same_weights(str(sharded), str(copy))
    change_first_weight(sorted(copy.glob("*.safetensors"))[0])
    assert not same_weights(str(sharded), str(copy))
    assert same_weights(str(copy), str(copy))
    assert not same_weights(str(copy), str(copy), recorded=model_files(str(sharded))), "another model at its path"
    assert not same_weights(str(tmp_path / "gone"), str(tmp_path / "also gone"))


def test_a_hub_model_is_identified_by_its_files_in_the_local_cache(start_model, tmp_path, monkeypatch):
    cached = {"owner/whole": start_model, "owner/partial": tmp_path}
    monkeypatch.setattr(hub, "cached_folder", lambda name, kind="model": cached.get(name))
    assert model_files("owner/whole") == model_files(str(start_model))
    assert [model_files(name) for name in ("owner/partial", "owner/elsewhere", None)] == [None] * 3


def test_a_file_is_hashed_again_if_only_its_time_of_change_differs(tmp_path, monkeypatch):
    file = tmp_path / "weights"
    read = []
    original = files.sha256
    monkeypatch.setattr(files, "sha256", lambda one: read.append(one) or original(one))
    file.write_bytes(b"1" * 9)
    first = files.sha256_once(file)
    times = file.stat()
    (tmp_path / "link").symlink_to(file)
    assert files.sha256_once(file) == files.sha256_once(tmp_path / "link") == first and len(read) == 1
    time.sleep(0.02)  # the clock of some file systems has steps of 10 ms
    file.write_bytes(b"2" * 9)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a copy that preserves times does
    assert files.sha256_once(file) != first and len(read) == 2
