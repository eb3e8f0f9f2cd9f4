"""Tests of --check update: each check passes on a good run and fails on an injected error. Tests of the exit status. A
normal start prints no checks."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn

import train_grpo
import train_ppo
from rlhf.algorithms.table import ALGORITHMS
from rlhf.checkpoints.model_folder import VALUE_HEAD_FILE, WEIGHTS_FILE
from rlhf.checkpoints.run_record import SEEDS_MAY_DIFFER, differences
from rlhf.data.chat_template import encode_prompt
from rlhf.data.prompts import Prompt
from rlhf.models import load
from rlhf.models.load import check_nf4
from rlhf.rewards.rewards import Rewards
from rlhf.settings.fields import to_dict
from rlhf.setup import preflight, trial
from rlhf.setup.build import build_trainer, load_components
from rlhf.setup.preflight import (
    disk_has_room,
    padding_changes_no_score,
    prompt_is_rendered,
)
from rlhf.setup.trial import (
    check_run,
    first_kl_is_zero,
    first_ratio_is_one,
    make_update,
    memory_matches_estimate,
    outputs,
    weights_come_back,
)
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError, run_command
from tests.conftest import BY_TIER

CPU = torch.device("cpu")
NAMES = ["free disk", "first prompt", "padding", "first KL", "first ratio", "memory", "save and reload"]
SCRIPTS = {"ppo": train_ppo, "grpo": train_grpo}
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def loaded(configured):
    """Return a function that makes a configuration and its components from flags. GRPO's batch is 2 prompts x 2
    completions."""

    def make(*flags, algorithm="ppo"):
        groups = ("--batch-size", 2, "--K", 2) if algorithm == "grpo" else ()
        config = configured(*groups, *flags, algorithm=algorithm)
        return config, load_components(config, CPU, Screen())

    return make


@pytest.fixture
def with_rollout(loaded):
    """Return a function that makes a trainer, its components and its first rollout from flags."""

    def make(*flags, algorithm="ppo"):
        config, components = loaded(*flags, algorithm=algorithm)
        trainer = build_trainer(config, components)
        return trainer, components, trainer.collector.collect(trainer.episodes_of(1), 1)

    return make


def lines_of(output: str) -> dict[str, str]:
    """Return the lines of the printed table by the name of the check."""
    table = output.split("checks:\n")[1].splitlines()
    return {name: line for line in table for name in [*NAMES, "error"] if line.startswith(f"  {name} ")}


# --- the command -----------------------------------------------------------------------------------------------------

VARIANTS = {
    "ppo": ("ppo", []),
    "ppo, micro-batches": ("ppo", ["--minibatches", 2, "--micro-batch-size", 1, "--no-packed"]),
    "ppo, adapters, bfloat16": ("ppo", ["--use-lora", "--bf16", "--gradient-checkpointing"]),
    "grpo": ("grpo", ["--top-p", 0.9, "--normalize-scores"]),
    "grpo, 4-bit, rules": (
        "grpo",
        ["--use-lora", "--load-in-4bit", "--rm-model", "none", "--reward-func", "length_penalty"],
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_checks_pass_on_a_good_run_and_leave_its_weights_unchanged(loaded, capsys, monkeypatch, variant):
    algorithm, flags = VARIANTS[variant]
    config, components = loaded(*flags, algorithm=algorithm)
    before = {}

    def build(config, components):  # a copy after building: with 4-bit weights TRL rounds new adapters
        trainer = build_trainer(config, components)
        before.update((name, weight.clone()) for name, weight in trainer.actor.policy.state_dict().items())
        return trainer

    monkeypatch.setattr(trial, "build_trainer", build)
    assert check_run(config, components, Screen()) == []
    lines = lines_of(capsys.readouterr().out)
    assert list(lines) == NAMES
    assert all(line[2 + max(map(len, NAMES)) :].startswith("  ok      ") for line in lines.values()), lines
    after = components.policy.state_dict()
    assert before and [name for name, weight in before.items() if not torch.equal(weight, after[name])] == []
    assert not Path(config.run.output).exists()


def words(config, *flags) -> list[str]:
    """Return the command-line arguments of a configuration."""
    return ["--actor-model", config.model.actor_model, "--rm-model", config.model.rm_model, "--prompts",
            config.data.prompts, "--output", config.run.output, "--num-iterations", "1", "--max-new-tokens", "8",
            "--eval-prompts", "6", "--allow-weak-reward-model", *flags]  # fmt: skip


@pytest.mark.parametrize("algorithm", SCRIPTS)
def test_scripts_exit_after_the_checks(configured, capsys, algorithm):
    """The exit status is 0, and no run, run folder or table of seeds is written."""
    argv = words(configured(algorithm=algorithm), "--seeds", "1", "2", "--check", "update")
    run_command(lambda: SCRIPTS[algorithm].main(argv))
    assert capsys.readouterr().out.count("checks:\n") == 2
    assert list(Path(configured().run.output).parent.glob("run*")) == []


@pytest.mark.parametrize("algorithm", SCRIPTS)
def test_failed_check_exits_with_2_after_all_other_checks(configured, capsys, monkeypatch, algorithm):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 0))
    argv = words(configured(algorithm=algorithm), "--check", "update")
    with pytest.raises(SystemExit) as raised:
        run_command(lambda: SCRIPTS[algorithm].main(argv))
    printed = capsys.readouterr()
    assert raised.value.code == 2
    assert printed.err.startswith("error: 1 of 7 ") and "(free disk): --check update. " in printed.err
    assert printed.err.count("\n") == 1
    lines = lines_of(printed.out)
    assert list(lines) == NAMES
    assert "  FAILED  0.00 GiB free" in lines["free disk"] and lines["free disk"].endswith("--use-lora")
    assert not Path(configured().run.output).exists()


def test_exception_during_the_checks_is_a_failed_check(configured, tmp_path, capsys):
    """A reward function raises an exception. The line contains its name. The exit status is 2, not that of a failed
    run."""
    (tmp_path / "bad.py").write_text("def broken(completions, **_):\n    raise ValueError('test error')\n")
    argv = words(configured(), "--check", "update", "--reward-func", f"{tmp_path / 'bad.py'}:broken")
    with pytest.raises(SystemExit) as raised:
        run_command(lambda: train_ppo.main(argv))
    assert raised.value.code == 2
    output = " ".join(lines_of(capsys.readouterr().out)["error"].split())
    assert output.startswith("error FAILED bad.py:2 `raise ValueError('test error')` ") and "'broken'" in output


@pytest.mark.parametrize("algorithm", SCRIPTS)
def test_every_run_starts_with_the_check_of_the_disk(configured, capsys, monkeypatch, algorithm, user_error):
    config = configured(algorithm=algorithm)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 10**3))
    with user_error("GiB", 3):
        SCRIPTS[algorithm].main(words(config))
    assert not Path(config.run.output).exists(), "no incomplete run folder must be left"
    monkeypatch.undo()
    SCRIPTS[algorithm].main(words(config))
    assert "checks:\n" not in capsys.readouterr().out
    assert (Path(config.run.output) / WEIGHTS_FILE).is_file()


@pytest.mark.parametrize(("engine", "tried"), [("auto", True), ("graph", True), ("slots", False), ("plain", False)])
def test_cuda_graphs_are_tried_if_the_run_would_use_them(configured, monkeypatch, capsys, engine, tried):
    """A GPU on which they hang is simulated. The line names the engine that works."""
    hangs = "sampling with CUDA graphs did not end within 120 s, so it probably hangs"
    monkeypatch.setattr(preflight, "graph_problem", lambda *_: hangs)
    monkeypatch.setattr(trial, "default_engine", lambda policy, device: "graph")
    config = configured()
    components = load_components(config, CPU, Screen())
    config = dataclasses.replace(config, speed=dataclasses.replace(config.speed, rollout_engine=engine))
    built = []
    monkeypatch.setattr(trial, "build_trainer", lambda config, _: built.append(config.speed.rollout_engine))
    monkeypatch.setattr(trial, "update_checks", lambda *_: iter(()))
    problems = check_run(config, components, Screen())
    if not tried:
        assert problems == []
        assert "CUDA graphs" not in capsys.readouterr().out
        return
    assert [problem.what for problem in problems] == ["1 of 4 checks failed (CUDA graphs)"]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "CUDA graphs" in line]
    assert f"  FAILED  {hangs}. " in line and line.endswith("--rollout-engine slots")
    monkeypatch.setattr(preflight, "graph_problem", lambda *_: None)
    check_run(config, components, Screen())
    assert built == ["slots", engine], "graphs that hang would stop the other checks, too"


def test_4_bit_runs_check_one_layer(loaded, monkeypatch, user_error):
    """Weights of -1, -31/32, ..., 1 differ from NF4's values by at most half of its largest gap, 0.152."""
    monkeypatch.setattr(load, "NF4_ERROR", 0.14)
    with user_error("0.14", "--load-in-4bit"):
        check_nf4(CPU)
    monkeypatch.setattr(load, "NF4_ERROR", 0.16)
    check_nf4(CPU)

    def forward(*_):
        raise RuntimeError("Configured CUDA binary not found\nand 20 more lines")

    monkeypatch.setattr("bitsandbytes.nn.Linear4bit.forward", forward)
    with user_error("(Configured CUDA binary not found): --load-in-4bit. ", "torch 2"):
        loaded("--use-lora", "--load-in-4bit")


# --- without a forward pass ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["--use-lora"], ["--critic", "separate"]])
def test_free_disk_check_matches_hand_computed_size(loaded, monkeypatch, flags):
    """11 times the trained weights in float32: three checkpoints (two saved, one being written) with weights and two
    moments each, best/ and the final weights."""
    config, components = loaded(*flags)
    trained = sum(w.numel() for w in components.policy.parameters() if w.requires_grad)
    trained *= 2 if "separate" in flags else 1
    places = []
    for free, ok in ((trained * 4 * 11, True), (trained * 4 * 11 - 1, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda place, free=free: places.append(place) or Usage(0, 0, free))
        assert disk_has_room(config, components.policy).ok is ok
    assert places == [Path(config.run.output).parent] * 2, "the nearest existing parent folder"


def test_prompt_text_missing_from_the_chat_template_fails(loaded):
    _, components = loaded()
    prompt = components.prompts.train[0]
    check = prompt_is_rendered(components.tokenizer, prompt)
    assert check.ok
    assert check.found == f"{len(prompt.ids)} tokens, {components.tokenizer.decode(prompt.ids)!r}"
    components.tokenizer.chat_template = components.tokenizer.chat_template.replace(
        "message['content']", "message['role']"
    )
    incomplete = Prompt(tuple(encode_prompt(components.tokenizer, prompt.example.messages)), prompt.example)
    check = prompt_is_rendered(components.tokenizer, incomplete)
    assert not check.ok and check.found.endswith(": user")


# --- padding ---------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A reward model that counts tokens. It counts padding, too, unless `uses_mask`."""

    def __init__(self, uses_mask: bool):
        super().__init__()
        self.uses_mask = uses_mask

    def forward(self, input_ids, attention_mask):
        return (attention_mask if self.uses_mask else torch.ones_like(input_ids)).sum(1).float()


def test_module_that_depends_on_padding_fails(loaded):
    _, components = loaded("--reward-func", "length_penalty")
    prompt = components.prompts.train[0]
    for uses_mask in (True, False):
        rewards = Rewards([Counting(uses_mask)], None, components.tokenizer)
        check = padding_changes_no_score(rewards, prompt, None)
        assert check.ok is uses_mask and "Counting" in check.found
    check = padding_changes_no_score(components.rewards, prompt, None)
    assert check.ok


# --- before the first step -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", BY_TIER)
def test_reference_model_that_differs_from_the_start_model_fails(with_rollout, algorithm):
    trainer, _, rollout = with_rollout(algorithm=algorithm)
    assert first_kl_is_zero(rollout, None).ok
    with torch.no_grad():
        next(trainer.reference.copy.parameters()).mul_(1.5)
    changed = trainer.collector.collect(trainer.episodes_of(1), 1)
    check = first_kl_is_zero(changed, None)
    assert not check.ok and "nats/sequence" in check.found
    assert not first_kl_is_zero(dataclasses.replace(changed, ref_logprobs=changed.logprobs * torch.nan), None).ok


@pytest.mark.parametrize("algorithm", BY_TIER)
def test_training_forward_that_differs_from_the_rollout_fails(with_rollout, algorithm):
    """Two injected errors: dropout that is active only in train mode, and an episode that attends to its neighbour."""
    trainer, _, rollout = with_rollout("--minibatches", 2, algorithm=algorithm)
    assert first_ratio_is_one(trainer, rollout).ok
    layer = trainer.actor.policy.model.layers[0].self_attn.o_proj
    hook = layer.register_forward_hook(lambda _m, _i, out: nn.functional.dropout(out, 0.5, training=layer.training))
    check = first_ratio_is_one(trainer, rollout)
    assert not check.ok and check.found.startswith("difference from 1: mean ")
    hook.remove()
    assert first_ratio_is_one(trainer, rollout).ok
    last = trainer.actor.policy.model.layers[1].self_attn.o_proj
    last.register_forward_hook(lambda _m, _i, out: out + out.mean(0, keepdim=True))
    assert not first_ratio_is_one(trainer, rollout).ok


# --- one update ------------------------------------------------------------------------------------------------------


def test_check_trains_the_policy_in_spite_of_a_critic_warm_up(with_rollout):
    trainer, _, rollout = with_rollout("--critic-warmup", 1)
    make_update(trainer, rollout)
    weights = {id(weight) for weight in trainer.actor.policy.parameters()}
    assert weights <= {id(weight) for weight in trainer.host.optimizer.optimizer.state}


def test_memory_above_the_prediction_or_the_available_memory_fails(with_rollout, monkeypatch):
    trainer, components, rollout = with_rollout()
    make_update(trainer, rollout)
    assert memory_matches_estimate(trainer, components).ok
    with monkeypatch.context() as patch:
        patch.setattr(trial, "available", lambda _: 2**20)
        check = memory_matches_estimate(trainer, components)
        assert not check.ok and "0.00 GiB available" in check.found
    original = trial.memory_in_use
    monkeypatch.setattr(trial, "memory_in_use", lambda device: original(device) + 2**30)
    check = memory_matches_estimate(trainer, components)
    assert not check.ok and "--micro-batch-size 1" in check.hint


@pytest.mark.parametrize("algorithm", BY_TIER)
def test_weights_that_are_not_restored_fail(with_rollout, tmp_path, monkeypatch, algorithm):
    trainer, _, rollout = with_rollout(algorithm=algorithm)
    with torch.no_grad():
        for weight in trainer.host.model.parameters():
            weight.add_(0.01)  # the value head starts at zero, which a failed reload could also return
    before = outputs(trainer, rollout)
    assert len(before) == 1 + ALGORITHMS[algorithm].has_critic and all(float(part.abs().max()) > 0 for part in before)
    folder = tmp_path / "saved"
    trainer.save_model(folder)
    assert weights_come_back(trainer, rollout, before, folder).ok
    for file in [WEIGHTS_FILE, *([VALUE_HEAD_FILE] if ALGORITHMS[algorithm].has_critic else [])]:
        shutil.copytree(folder, broken := tmp_path / f"without {file}")
        (broken / file).unlink()
        try:
            assert not weights_come_back(trainer, rollout, before, broken).ok and file == VALUE_HEAD_FILE
        except UserError as error:
            assert file == WEIGHTS_FILE and str(broken) in str(error)
    assert weights_come_back(trainer, rollout, before, folder).ok
    assert not weights_come_back(trainer, rollout, [part * torch.nan for part in before], folder).ok
    monkeypatch.setattr(trial, "load_policy_weights", lambda *_: None)  # nothing is restored
    assert not weights_come_back(trainer, rollout, before, folder).ok


def test_check_flag_may_differ_between_seeds(configured):
    assert differences(to_dict(configured("--check")), to_dict(configured()), SEEDS_MAY_DIFFER) == []
    assert json.dumps(to_dict(configured("--check", "reward"))["run"]["check"]) == '["reward"]'
