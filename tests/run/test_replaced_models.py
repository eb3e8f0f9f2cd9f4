"""Tests that a model whose files were replaced since a run started is not used as if it were the same model: resume,
evaluation, comparison, chat, merging, judges."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import compare_runs
import evaluate_generations
import train_grpo
import train_ppo
from rlhf.analysis.evaluator import ModelEvaluator
from rlhf.analysis.groups import group_runs
from rlhf.analysis.models import find_models
from rlhf.checkpoints.run_record import RunRecord
from rlhf.settings.evaluation import MeasureSettings
from rlhf.utils import files
from rlhf.utils.console import Screen
from tests.run.test_resume import Killed, interrupt
from tests.shapes import change_first_weight, llama_config, make_reward_model, smollm2_tokenizer

MIB = 2**20


def change_layer_of(file: Path) -> None:
    """The same in a file whose last MiB does not change."""
    assert file.stat().st_size > MIB + 64 * 1024
    before = file.read_bytes()[-MIB:]
    change_first_weight(file)
    assert file.read_bytes()[-MIB:] == before


def edit_json(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | values), "utf-8")


@pytest.fixture
def large_model(tmp_path) -> Callable[[int], Path]:
    """Return a function that saves a start model in one file or in two shards. Each file is larger than 1 MiB."""

    def make(shards: int) -> Path:
        tokenizer = smollm2_tokenizer()
        config = llama_config("wide", len(tokenizer))
        config.intermediate_size = 2048
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(tmp_path / "large", max_shard_size="2MB" if shards == 2 else "1GB")
        tokenizer.save_pretrained(tmp_path / "large")
        return tmp_path / "large"

    return make


# --- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "changed"),
    [
        (1, "model.safetensors"),
        (2, "model-00001-of-00002.safetensors"),
        (2, "config.json"),
        (2, "generation_config.json"),
    ],
)
def test_resume_refuses_a_start_model_with_any_other_byte(
    run_flags, large_model, tmp_path, shards, changed, user_error
):
    folder = large_model(shards)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        interrupt(patch, 2, Killed())
        train_ppo.main(run_flags("--actor-model", folder, "--save-every", 1))
    if changed.endswith(".safetensors"):
        change_layer_of(folder / changed)
    else:  # the same weights compute something else, or completions end elsewhere
        values = {"config.json": {"rms_norm_eps": 1e-3}, "generation_config.json": {"eos_token_id": [2, 7]}}
        edit_json(folder / changed, **values[changed])
    with user_error(f"start_model_files {changed}", "--resume-anyway"):
        train_ppo.main(["--resume", "--output", str(tmp_path / "run")])
    assert RunRecord.read(tmp_path / "run").status != "finished"


def test_resume_refuses_another_evaluation_text(run_flags, tmp_path, user_error):
    text = tmp_path / "text.txt"
    text.write_text("The capital of France is Paris.\n\nThe cat is on the table.\n", "utf-8")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        interrupt(patch, 2, Killed())
        train_ppo.main(run_flags("--eval-text", text, "--save-every", 1))
    text.write_text(text.read_text("utf-8").replace("Paris", "Seine"), "utf-8")
    with user_error("eval_text_sha256"):
        train_ppo.main(["--resume", "--output", str(tmp_path / "run")])


def test_a_run_that_recorded_no_files_is_resumed(run_flags, tmp_path):
    """Versions until 12a316f6 recorded hashes of the last MiB, which nothing compares any more."""
    output = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        interrupt(patch, 2, Killed())
        train_ppo.main(run_flags("--save-every", 1))
    forget_files(output)
    train_ppo.main(["--resume", "--output", str(output)])
    assert RunRecord.read(output).status == "finished"


def forget_files(run: Path) -> None:
    facts = json.loads((run / "run.json").read_text("utf-8"))
    old = {name: value for name, value in facts["data"].items() if not name.endswith("_files")}
    edit_json(run / "run.json", data=old | {"start_model": "0" * 64, "reward_model": "0" * 64})


def test_a_run_reads_each_file_of_its_models_once_to_hash_it(run_flags, start_model, reward_folder, monkeypatch):
    read = Counter()
    original = files.sha256
    monkeypatch.setattr(files, "_hashes", {})
    monkeypatch.setattr(files, "sha256", lambda file: read.update([Path(file)]) or original(file))
    train_grpo.main(run_flags("--K", 2, "--batch-size", 2, "--use-lora", "--merge-lora"))
    assert read[start_model / "model.safetensors"] == read[reward_folder / "model.safetensors"] == 1
    assert set(read.values()) == {1}


def test_a_plan_reads_no_weights_to_hash_them(run_flags, monkeypatch):
    monkeypatch.setattr(files, "_hashes", {})
    monkeypatch.setattr(files, "sha256", lambda file: pytest.fail(f"hashed {file}"))
    train_ppo.main(run_flags("--dry-run"))


# --- evaluation ------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(runs, start_model, reward_folder, tmp_path):
    """Return a function that copies a finished run, and its models to `start` and `reward` in the same folder."""

    def copy(algorithm: str, name: str = "run", seed: int = 1) -> Path:
        run = Path(shutil.copytree(runs[algorithm, seed], tmp_path / name))
        for model, folder in ((start_model, "start"), (reward_folder, "reward")):
            shutil.copytree(model, tmp_path / folder, dirs_exist_ok=True)
        facts = json.loads((run / "run.json").read_text("utf-8"))
        facts["settings"]["model"] |= {"actor_model": str(tmp_path / "start"), "rm_model": str(tmp_path / "reward")}
        edit_json(run / "run.json", settings=facts["settings"])
        if algorithm == "grpo":
            for folder in (run, run / "best"):
                edit_json(folder / "adapter_config.json", base_model_name_or_path=str(tmp_path / "start"))
        return run

    return copy


def evaluator_of(runs: list[Path], **settings: object) -> ModelEvaluator:
    measure = MeasureSettings(num_prompts=2, completions=1, **settings)
    models = find_models([str(run) for run in runs], measure, "--model-path")
    return ModelEvaluator(models, measure, torch.device("cpu"), Screen())


def test_an_evaluation_refuses_a_replaced_start_model(copied, start_model, tmp_path, user_error):
    run = copied("ppo")
    assert evaluator_of([run]).start.source == str(tmp_path / "start")
    change_first_weight(tmp_path / "start" / "model.safetensors")
    with user_error("start model", "model.safetensors", f"--baseline {tmp_path / 'start'}"):
        evaluator_of([run])
    assert evaluator_of([run], baseline=str(start_model)).start.source == str(start_model)
    assert evaluator_of([run], baseline=str(tmp_path / "start")).start is not None, "the user's choice"
    forget_files(run)
    assert evaluator_of([run]).start is not None, "a run of an older version"


def test_an_evaluation_refuses_a_replaced_reward_model(copied, reward_folder, tmp_path, user_error):
    run = copied("ppo")
    assert evaluator_of([run]).score_name == "the training reward"
    change_first_weight(tmp_path / "reward" / "model.safetensors")
    with user_error("reward model", "model.safetensors", f"--rm-model {tmp_path / 'reward'}"):
        evaluator_of([run])
    assert evaluator_of([run], rm_model=str(tmp_path / "reward")).score_name == "not the training reward"
    assert evaluator_of([run], rm_model=str(reward_folder)).score_name == "the training reward", "the same bytes"


def test_a_changed_reward_function_is_not_called_the_training_reward(run_flags, tmp_path):
    rule = tmp_path / "rule.py"
    rule.write_text("def words(completions, **_):\n    return [float(len(c.split())) for c in completions]\n")
    code = (f"{rule}:words",)
    train_ppo.main(run_flags("--rm-model", "none", "--reward-func", *code, "--num-iterations", 1))
    assert evaluator_of([tmp_path / "run"], reward_func=code).score_name == "the training reward"
    rule.write_text(rule.read_text().replace("len", "2 * len"))
    assert evaluator_of([tmp_path / "run"], reward_func=code).score_name == "not the training reward"


def test_chat_and_evaluation_refuse_an_adapter_on_a_replaced_base(
    copied, start_model, tmp_path, monkeypatch, user_error
):
    run = copied("grpo")
    change_first_weight(tmp_path / "start" / "model.safetensors")
    monkeypatch.setattr(sys, "stdin", io.StringIO("/exit\n"))
    page = ["--num-prompts", "1", "--completions", "1", "--output", str(tmp_path / "page")]
    for flags in (["--chat"], page):
        with user_error("base model", f"--model-path {run}", "--baseline FOLDER"):
            evaluate_generations.main(["--model-path", str(run), *flags])
    evaluate_generations.main(["--chat", "--model-path", str(run), "--baseline", str(start_model)])


def test_merging_refuses_a_replaced_base(copied, tmp_path, user_error):
    run = copied("grpo")
    merge = ["--resume", "--merge-lora", "--output", str(run)]
    train_grpo.main(merge)
    shutil.rmtree(run / "merged")
    change_first_weight(tmp_path / "start" / "model.safetensors")
    with user_error("base model", str(tmp_path / "start"), "--merge-lora"):
        train_grpo.main(merge)
    assert not (run / "merged").exists()


def test_the_reward_model_of_training_is_no_judge_after_it_was_moved(copied, tmp_path, user_error):
    run = copied("ppo")
    judge = shutil.copytree(tmp_path / "reward", tmp_path / "judge")
    edit_json(judge / "tokenizer_config.json", note="other files than weights may differ")
    score = make_reward_model(tmp_path / "score", seed=8)
    for path_of_the_run in ("has other weights", "is gone"):
        if path_of_the_run == "is gone":
            shutil.rmtree(tmp_path / "reward")
        else:
            change_first_weight(tmp_path / "reward" / "model.safetensors")
        with user_error(f"reward model of {run}", f"--judge-model {judge}"):
            evaluator_of([run], rm_model=str(score), judge_model=str(judge))


# --- comparison ------------------------------------------------------------------------------------------------------


def test_runs_from_two_models_of_one_path_are_not_one_arm(copied, tmp_path, user_error):
    first = copied("ppo", "first")
    second = copied("ppo", "second", seed=2)
    (group,) = group_runs([RunRecord.read(run) for run in (first, second)])
    assert group.settings == {}
    change_first_weight(tmp_path / "start" / "model.safetensors")
    recorded = RunRecord.read(second).data
    hashes = {"model.safetensors": files.sha256(tmp_path / "start" / "model.safetensors")}
    edit_json(second / "run.json", data=recorded | {"start_model_files": recorded["start_model_files"] | hashes})
    groups = group_runs([RunRecord.read(run) for run in (first, second)])
    assert [group.members for group in groups] == [(0,), (1,)]
    assert all(list(group.settings) == ["start_model_files"] for group in groups)
    flags = ["--num-prompts", "2", "--completions", "1", "--limit-minutes", "0", "--output", str(tmp_path / "out")]
    with user_error("start model", f"--baseline {tmp_path / 'start'}"):
        compare_runs.main([str(first), str(second), *flags])


def test_models_with_other_names_are_not_also_told_apart_by_their_hashes(copied, runs):
    first = RunRecord.read(copied("ppo"))
    second = RunRecord.read(runs["ppo", 2])
    second.data["start_model_files"] = {"model.safetensors": "0" * 64}
    groups = group_runs([first, second])
    assert all(list(group.settings) == ["actor_model", "rm_model"] for group in groups)
