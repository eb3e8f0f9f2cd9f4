"""Tests hub names that stand in files of other people: the local cache comes first, and the file is printed before the
hub is requested."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlhf.checkpoints.model_folder import base_of_adapter, find_model, find_on_hub
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import config_of_run, make_config
from rlhf.data.examples import load_examples
from rlhf.data.source import DataSource
from rlhf.rewards.find import find_rewards
from rlhf.utils import hub, paths
from rlhf.utils.errors import UserError
from tests.records import record_of

NAMES = {"actor_model": "owner/a-model", "rm_model": "owner/a-reward", "prompts": "owner/a-dataset"}


@pytest.fixture(autouse=True)
def asked(monkeypatch, capsys) -> list[tuple[str, str]]:
    """Return the requests to a hub without these names, each with what was printed before it. Nothing is cached."""
    requests = []

    class NoHub:
        def repo_info(self, name, **_):
            requests.append((name, capsys.readouterr().out))
            raise ConnectionError("no route")

    monkeypatch.setattr(paths, "_named_in", {})
    monkeypatch.setattr(hub, "HfApi", NoHub)
    monkeypatch.setattr(hub, "cached_folder", lambda name, kind="model": None)
    return requests


@pytest.fixture
def theirs(tmp_path) -> Path:
    record_of(make_config("demo", **NAMES)).write(tmp_path)
    return tmp_path


def find_each(config) -> dict[str, object]:
    """Return functions that look each name of NAMES up, as training and evaluations do."""
    return {
        "actor_model": lambda: find_model(config.model.actor_model, "--actor-model"),
        "rm_model": lambda: find_rewards(config),
        "prompts": lambda: load_examples(DataSource.of(config.data)),
    }


@pytest.mark.parametrize("setting", NAMES)
def test_a_name_in_run_json_is_printed_with_the_file_before_the_hub_is_requested(theirs, asked, setting, user_error):
    find = find_each(config_of_run(RunRecord.read(theirs)))[setting]
    file = theirs / "run.json"
    name = NAMES[setting]
    with user_error(f"{name} (in {file})"):
        find()
    assert [one for one, _ in asked] == [name]
    assert f"{file} names the " in asked[0][1] and name in asked[0][1]


@pytest.mark.parametrize("setting", NAMES)
def test_a_name_of_the_user_is_not_said_to_be_in_a_file(asked, setting):
    with pytest.raises(UserError) as error:
        find_each(make_config("demo", **NAMES))[setting]()
    assert asked == [(NAMES[setting], "")] and "(in " not in str(error.value)


@pytest.mark.parametrize("setting", ["actor_model", "rm_model"])
def test_the_local_cache_comes_first(theirs, asked, start_model, monkeypatch, capsys, setting):
    monkeypatch.setattr(hub, "cached_folder", lambda name, kind="model": start_model)
    found = find_each(config_of_run(RunRecord.read(theirs)))[setting]()
    assert (found if setting == "actor_model" else found.folder) == str(start_model)
    assert asked == [] and capsys.readouterr().out == ""


def test_an_incomplete_model_in_the_cache_is_requested(theirs, asked, start_model, monkeypatch, tmp_path):
    partial = tmp_path / "snapshot"
    shutil.copytree(start_model, partial, ignore=shutil.ignore_patterns("*.safetensors"))
    monkeypatch.setattr(hub, "cached_folder", lambda name, kind="model": partial)
    RunRecord.read(theirs)
    find_model(NAMES["actor_model"], "--actor-model")
    assert [name for name, _ in asked] == [NAMES["actor_model"]]


def test_a_dataset_in_the_cache_needs_a_data_file(theirs, asked, monkeypatch, tmp_path):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "README.md").write_text("")
    monkeypatch.setattr(hub, "cached_folder", lambda name, kind="model": snapshot if kind == "dataset" else None)
    RunRecord.read(theirs)
    find_on_hub(NAMES["prompts"], "dataset", "a data file")
    assert len(asked) == 1
    (snapshot / "train.jsonl").write_text("{}")
    assert find_on_hub(NAMES["prompts"], "dataset", "a data file") == str(snapshot)
    assert len(asked) == 1


def test_the_base_of_an_adapter_is_a_name_in_a_file(asked, tmp_path, user_error):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/a-base"}))
    with user_error("owner/a-base", "adapter_config.json"):
        find_model(base_of_adapter(tmp_path), "--model-path")
    assert "adapter_config.json" in asked[0][1] and "owner/a-base" in asked[0][1]


@pytest.mark.parametrize("base", [3, ["a/b"], {"a": "b"}])
def test_a_base_that_is_no_text_is_one_error(tmp_path, base, user_error):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    with user_error("base_model_name_or_path ", "adapter_config.json"):
        base_of_adapter(tmp_path)
