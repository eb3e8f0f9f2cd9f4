"""Tests of --critic RUN: the critic of another run, saved and loaded with checks."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import train_ppo
from rlhf.config import parse_cli
from rlhf.setup.shape import weights_of
from tests.shapes import change_first_weight, make_start_model

FAST = ("--learning-rate", "1e-2")


@pytest.fixture
def trained(build, tmp_path):
    """Return a function that trains two updates with these flags and returns the folder with the model."""

    def make(*flags, name: str = "saved"):
        trainer = build(*FAST, *flags)
        for update in (1, 2):
            trainer.update_step(update)
        trainer.save_model(tmp_path / name)
        return tmp_path / name, trainer

    return make


def values_of(trainer, completions) -> torch.Tensor:
    return trainer.passes.logprobs(completions)[2]


def completions_of(trainer):
    return trainer.collector.collect(trainer.episodes_of(1), 1).completions


def test_value_head_gives_the_values_of_its_run_on_its_policy(build, trained):
    folder, trainer = trained()
    other = build("--critic", folder, "--actor-model", folder)
    completions = completions_of(other)
    values = values_of(other, completions)
    assert torch.equal(values, values_of(trainer, completions)) and float(values.abs().max()) > 0


def test_value_head_on_a_copy_of_the_policy_is_accepted(build, trained, tmp_path):
    folder, _ = trained()
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "value_head.safetensors").unlink()
    assert build("--critic", folder, "--actor-model", tmp_path / "copy").actor.value_head.summary.weight.any()


@pytest.mark.parametrize("lora", [(), ("--use-lora",)], ids=["all weights", "adapters"])
def test_separate_critic_gives_the_values_of_its_run_on_another_policy(build, trained, lora):
    """The policy starts again from the start model. The values do not depend on it."""
    folder, trainer = trained("--critic", "separate", *lora)
    other = build("--critic", folder, *lora)
    completions = completions_of(other)
    assert torch.equal(values_of(other, completions), values_of(trainer, completions))
    before = {name: weight.detach().clone() for name, weight in other.actor.critic.named_parameters()}
    other.update_step(1)
    assert any(not torch.equal(weight, before[name]) for name, weight in other.actor.critic.named_parameters())


def test_critic_of_a_reward_model_is_reused_with_all_weights(build, trained):
    """It has the architecture of the start model, so names and shapes are equal."""
    folder, trainer = trained("--critic", "reward-model")
    other = build("--critic", folder)
    completions = completions_of(other)
    assert torch.equal(values_of(other, completions), values_of(trainer, completions))


# --- what is refused -------------------------------------------------------------------------------------------------


def test_folder_without_a_critic_is_refused(build, start_model, user_error):
    with user_error("value_head.safetensors", "--critic", str(start_model)):
        build("--critic", start_model)


def test_value_head_of_another_policy_is_refused(build, trained, user_error):
    folder, _ = trained()
    with user_error("--critic", "--actor-model", f"--actor-model {folder}"):
        build("--critic", folder)


def test_value_head_of_a_lora_run_is_refused(build, trained, user_error):
    folder, _ = trained("--use-lora")
    with user_error("--critic separate") as error:
        build("--critic", folder, "--use-lora")
    assert f"Use --actor-model {folder}" not in str(error.value), "no run starts from an adapter"


@pytest.mark.parametrize(("before", "after", "fix"), [((), ("--use-lora",), "Remove"), (("--use-lora",), (), "Add")])
def test_adapters_and_all_weights_are_not_mixed(build, trained, before, after, fix, user_error):
    folder, _ = trained("--critic", "separate", *before)
    with user_error(f"{fix} --use-lora"):
        build("--critic", folder, *after)


def test_adapters_on_another_base_model_are_refused(build, trained, tmp_path, user_error):
    folder, _ = trained("--critic", "separate", "--use-lora")
    other = make_start_model(tmp_path / "other", seed=9)
    with user_error("base model", str(other)):
        build("--critic", folder, "--use-lora", "--actor-model", other)


def test_adapters_on_a_base_model_that_was_replaced_are_refused(run_flags, build, start_model, tmp_path, user_error):
    start = shutil.copytree(start_model, tmp_path / "replaced")
    flags = ("--actor-model", start, "--critic", "separate", "--use-lora", "--output", tmp_path / "before")
    train_ppo.main(run_flags(*flags, "--num-iterations", 1))
    flags = ("--critic", tmp_path / "before", "--use-lora", "--actor-model", start)
    assert build(*flags).actor.critic is not None
    change_first_weight(start / "model.safetensors")
    with user_error("base model", str(start)):
        build(*flags)


def test_adapters_on_a_reward_model_are_refused(build, trained, reward_folder, user_error):
    """Their base is the reward model, and the base of the new critic is the start model."""
    folder, _ = trained("--critic", "reward-model", "--use-lora")
    with user_error("base model", str(reward_folder)):
        build("--critic", folder, "--use-lora")


def test_adapters_of_another_shape_are_refused(build, trained, user_error):
    folder, _ = trained("--critic", "separate", "--use-lora")
    with user_error("lora_alpha", str(folder)):
        build("--critic", folder, "--use-lora", "--lora-alpha", 2)


def test_weights_of_another_architecture_are_refused(build, trained, wide_model, user_error):
    folder, _ = trained("--critic", "separate")
    with user_error("another model", str(folder)):
        build("--critic", folder, "--actor-model", wide_model)


def test_missing_weights_and_incomplete_files_are_refused(build, trained, user_error):
    folder, _ = trained("--critic", "separate")
    file = folder / "critic.safetensors"
    tensors = load_file(file)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, file)
    with user_error("another model", str(folder)):
        build("--critic", folder)
    file.write_bytes(file.read_bytes()[:100])
    with user_error("critic.safetensors"):
        build("--critic", folder)
    file.unlink()
    (folder / "value_head.safetensors").write_bytes(b"short")
    with user_error("not a complete file", str(folder)):
        build("--critic", folder, "--actor-model", folder)


def test_values_that_are_neither_a_kind_nor_a_folder_are_refused(user_error):
    with user_error("critic", "seperate", "shared, separate, reward-model"):
        parse_cli(["--critic", "seperate"])


# --- commands --------------------------------------------------------------------------------------------------------


def test_command_reuses_a_finished_run_and_resumes_exactly(run_flags, runs, tmp_path, capsys):
    first = runs["ppo", 1]
    flags = run_flags("--actor-model", first, "--critic", first, "--save-every", 1)
    train_ppo.main(flags)
    assert f"from the run {first}" in " ".join(capsys.readouterr().out.split())
    run = tmp_path / "run"
    names = ("model.safetensors", "value_head.safetensors")
    saved = [(run / name).read_bytes() for name in names]
    shutil.rmtree(run / "checkpoint-2")
    facts = json.loads((run / "run.json").read_text())
    assert facts["settings"]["critic"]["critic"] == str(first)
    (run / "run.json").write_text(json.dumps(facts | {"status": "failed"}))
    train_ppo.main(["--resume", "--output", str(run)])
    assert [(run / name).read_bytes() for name in names] == saved


def test_missing_run_is_refused_before_anything_is_loaded(run_flags, tmp_path, user_error):
    with user_error("--critic", "not_there"):
        train_ppo.main(run_flags("--critic", tmp_path / "not_there"))


def test_critic_of_a_run_is_not_counted_as_weights_of_its_policy(trained, start_model):
    """A run folder has the files of the critic next to the policy's."""
    folder, _ = trained("--critic", "separate")
    assert weights_of(str(folder)).keys() == weights_of(str(start_model)).keys()
