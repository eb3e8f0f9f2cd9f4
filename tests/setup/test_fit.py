"""Tests of --fit: the chosen settings fit, change the result as little as possible, and are those of a resumed run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import train_ppo
from rlhf.checkpoints.run_record import RunRecord
from rlhf.data.prompts import ids_alone
from rlhf.settings.fields import replaced
from rlhf.settings.training import FITTED, FROM_FREE_MEMORY
from rlhf.settings.types import MemorySize
from rlhf.setup import fit as module
from rlhf.setup import memory
from rlhf.setup.fit import CONTEXT, MARGIN, choose_batches, choose_fitting, estimator, fit
from rlhf.setup.load_inputs import load_inputs
from rlhf.setup.memory import IMPORTED, Estimator
from rlhf.setup.shape import Shape
from rlhf.utils.console import Screen

CPU = torch.device("cpu")
GPU = torch.device("cuda")
GIB = 2**30
SMOLLM2 = Shape.of(
    {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
     "num_hidden_layers": 30, "vocab_size": 49_152, "tie_word_embeddings": True}, 134_515_008
)  # fmt: skip


def smollm2(updates: int = 2) -> Estimator:
    return Estimator(SMOLLM2, SMOLLM2, CPU, [ids_alone([5] * 200)] * 32, [200] * 20, updates, libraries=IMPORTED)


def chosen(config, gib: float, **options) -> dict:
    """Return the settings of FITTED that differ from the given ones."""
    found = choose_fitting(config, smollm2(), int(gib * GIB), **options)
    before = fitted(config)
    after = fitted(found)
    return {name: after[name] for name in FITTED if before[name] != after[name]}


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GB", 8 * GIB), ("8gb", 8 * GIB), ("8 GiB", 8 * GIB), ("1.5g", 1.5 * GIB), ("6000MB", 6000 * 2**20)],
)  # fmt: skip
def test_sizes(text, size):
    assert MemorySize.parse(text).bytes == size
    assert MemorySize.parse(str(MemorySize.parse(text))) == MemorySize.parse(text)


@pytest.mark.parametrize("text", ["8", "0GB", "GB", "-8GB", "8TB", "all"])
def test_wrong_sizes(text):
    with pytest.raises(ValueError, match=text):
        MemorySize.parse(text)


def test_less_memory_changes_more(configured):
    """With enough memory nothing changes; then only settings that change time; then 8-bit Adam; then LoRA."""
    config = configured("--batch-size", 32, "--max-new-tokens", 128)
    estimate = smollm2()
    whole = estimate(config).peak / GIB
    time_only = {"micro_batch_size", "rollout_slots", "gradient_checkpointing"}
    lowest = {  # the smallest peaks without 8-bit Adam, and without LoRA
        optim: estimate(
            replaced(config, optim=optim, gradient_checkpointing=True, micro_batch_size=1, rollout_slots=8)
        ).peak / GIB
        for optim in (config.optimizer.optim, "adamw_8bit")
    }  # fmt: skip
    assert chosen(config, whole) == {}
    found = chosen(config, whole - 0.01)
    assert found and set(found) <= time_only and "gradient_checkpointing" not in found
    assert set(chosen(config, lowest[config.optimizer.optim])) <= time_only
    found = chosen(config, lowest[config.optimizer.optim] - 0.01)
    assert found["optim"] == "adamw_8bit" and "use_lora" not in found
    assert chosen(config, lowest["adamw_8bit"] - 0.01)["use_lora"]
    assert "use_lora" not in chosen(config, lowest["adamw_8bit"] - 0.01, has_targets=False), "no module to adapt"


def test_every_choice_fits_and_a_larger_micro_batch_does_not(configured):
    config = configured("--batch-size", 32, "--max-new-tokens", 128)
    estimate = smollm2()
    for gib in (4.2, 3.6, 3.0, 2.6):
        found = choose_fitting(config, estimate, int(gib * GIB))
        assert estimate(found).peak <= gib * GIB
        size = found.batch.micro_batch_size
        if size:
            larger = estimate(replaced(found, micro_batch_size=size + 1))
            assert larger.peak > gib * GIB or larger.episodes == size


def test_slots_are_not_chosen_for_a_model_that_samples_with_the_plain_engine(configured):
    """All rows of a batch are then sampled at the same time, so slots save nothing, and micro-batches are padded."""
    config = configured("--batch-size", 32, "--max-new-tokens", 128)
    slots = smollm2()
    plain = replace(slots, packs=False)
    for estimate, flags in ((plain, {}), (slots, {"rollout_engine": "plain"})):
        given = replaced(config, **flags)
        for gib in (4.2, 3.6, 3.0, 2.6, 0.1):
            assert choose_fitting(given, estimate, int(gib * GIB)).speed.rollout_slots == given.speed.rollout_slots
        assert _rollout(estimate, given) == _rollout(estimate, replaced(given, rollout_slots=8))
    assert _rollout(slots, config) > _rollout(slots, replaced(config, rollout_slots=8))
    assert choose_fitting(config, slots, int(0.1 * GIB)).speed.rollout_slots == 8
    assert plain(config).tokens == plain(config).episodes * (200 + 128), "padded rows"
    assert slots(config).tokens == slots(config).episodes * (200 + 127)


def _rollout(estimate: Estimator, config) -> int:
    return sum(estimate(config).phases["sampling"].values())


def test_without_bitsandbytes_its_optimizer_is_not_chosen(configured, monkeypatch):
    config = configured("--batch-size", 32, "--max-new-tokens", 128)
    assert "optim" in chosen(config, 0.1)
    monkeypatch.setattr(module, "is_bitsandbytes_available", lambda: False)
    assert "optim" not in chosen(config, 0.1) and chosen(config, 0.1)["use_lora"]


def test_nothing_fits(configured, user_error):
    config = configured("--fit", "100MB")
    with user_error("--fit 100MB", "GiB"):
        fit(config, load_inputs(config, Screen()), CPU, Screen())


def test_a_memory_size_without_unit_is_an_error(configured, user_error):
    with user_error("--fit", "8GB", "6000MB"):
        configured("--fit", "8")


def test_the_choice_is_the_same_for_every_seed(configured, run_flags, tmp_path):
    found = []
    for seed in (1, 2, 3):
        config = configured("--fit", _tight(configured), "--seed", seed)
        found.append(fit(config, load_inputs(config, Screen()), CPU, Screen()))
    assert len({fitted(one)["micro_batch_size"] for one in found}) == 1
    assert fitted(found[0]) != fitted(configured())


def fitted(config) -> dict:
    return {name: getattr(group, name) for group in vars(config).values() for name in FITTED if hasattr(group, name)}


def _tight(configured) -> str:
    """Return a size into which the tests' model fits only with changes. Libraries take nearly all of it."""
    config = configured()
    most = replace(estimator(load_inputs(config, Screen()), 2, CPU), libraries=IMPORTED)(config).peak
    return f"{int(MARGIN * most / 2**20)}MB"


def test_a_resumed_run_keeps_what_fit_chose(configured, run_flags, tmp_path, capsys):
    """The settings of run.json are the chosen ones, and --resume with the same flags accepts them."""
    size = _tight(configured)
    flags = run_flags("--num-iterations", 1, "--fit", size, "--save-every", 1)
    train_ppo.main(flags)
    assert f"--fit {size}: " in capsys.readouterr().out
    before = RunRecord.read(tmp_path / "run").flat_settings
    assert {name: before[name] for name in FITTED} != fitted(configured())
    assert before["fit"] == size
    train_ppo.main([*flags, "--resume"])
    assert "already finished" in capsys.readouterr().out
    longer = run_flags("--num-iterations", 2, "--fit", size, "--save-every", 1, "--resume", "--resume-anyway")
    train_ppo.main(longer)
    after = RunRecord.read(tmp_path / "run").flat_settings
    assert {name: after[name] for name in FITTED} == {name: before[name] for name in FITTED}


def test_another_size_on_resume_is_an_error(run_flags, user_error):
    train_ppo.main(run_flags("--num-iterations", 1, "--fit", "64GB"))
    with user_error("--resume", "--fit 32GB"):
        train_ppo.main(run_flags("--num-iterations", 1, "--fit", "32GB", "--resume"))


@pytest.mark.ci
def test_seeds_with_fit_are_recognised_as_finished(run_flags, configured, capsys):
    flags = run_flags("--num-iterations", 1, "--fit", _tight(configured), "--seeds", 1, 2)
    train_ppo.main(flags)
    capsys.readouterr()
    train_ppo.main([*flags, "--resume"])
    assert capsys.readouterr().out.count("already finished") == 2


# --- batches that fit the free memory of a GPU -----------------------------------------------------------------------


@pytest.fixture
def on_gpu(monkeypatch):
    """SmolLM2-135M on a GPU with bfloat16, 64 prompts of 200 tokens."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    monkeypatch.setattr(memory, "installed", lambda _: 80 * GIB)
    return replace(smollm2(1), device=GPU, train=[ids_alone([5] * 200)] * 64, libraries=0)


def batches(config) -> tuple[int, int]:
    return config.batch.micro_batch_tokens, config.speed.rollout_slots


def test_batches_are_the_largest_that_fit_the_free_memory(configured, on_gpu, capsys):
    config = configured("--batch-size", 64, "--max-new-tokens", 128)
    assert batches(choose_batches(config, on_gpu, 80 * GIB, Screen())) == (16_384, 1_024)
    assert capsys.readouterr().out == ""
    found = choose_batches(config, on_gpu, 8 * GIB, Screen())
    assert batches(found) == (4_096, 1_024) and "4096" in capsys.readouterr().out
    room = 8 * GIB / MARGIN - CONTEXT["cuda"]
    assert on_gpu(found).peak <= room < on_gpu(replaced(found, micro_batch_tokens=8_192)).peak


# GiB -> tokens and slots of the exact sums of commit 21adb3f6, for PPO with all weights and with LoRA
OF_THE_PAGE = {
    (): {8: (4_096, 1_024), 12: (8_192, 1_024), 24: (16_384, 1_024), 32: (16_384, 1_024), 80: (16_384, 1_024)},
    ("--use-lora",): {12: (8_192, 1_024), 24: (16_384, 1_024), 32: (16_384, 1_024), 80: (16_384, 1_024)},
}


@pytest.mark.parametrize("flags", OF_THE_PAGE, ids=" ".join)
def test_batches_are_those_of_the_page_or_half_of_them(configured, on_gpu, flags):
    """The shape of docs/performance.md: 64 completions of 128 tokens to prompts of 128 tokens, and a reward model."""
    estimate = replace(on_gpu, train=[ids_alone([5] * 128)] * 64, evaluation=[128] * 64)
    config = configured("--batch-size", 64, "--minibatches", 1, "--max-new-tokens", 128, "--bf16", *flags)
    for size, exact in OF_THE_PAGE[flags].items():
        given = replace(estimate, memory=size * GIB)
        found = batches(choose_batches(config, given, int(0.97 * size * GIB), Screen(quiet=True)))
        assert all(one in (other, other // 2) for one, other in zip(found, exact, strict=True)), (size, found)


def test_batches_do_not_shrink_below_what_makes_a_difference(configured, on_gpu):
    """Weights, gradients and moments alone do not fit."""
    config = configured("--batch-size", 1, "--max-new-tokens", 8, "--minibatches", 1)
    found = choose_batches(config, on_gpu, GIB, Screen(quiet=True))
    smallest = on_gpu(replaced(config, micro_batch_tokens=1_024, rollout_slots=8)).peak
    assert GIB < on_gpu(found).peak == smallest and found.batch.micro_batch_tokens == 16_384


def test_batches_of_flags_are_kept(configured, on_gpu):
    config = configured("--batch-size", 64, "--micro-batch-tokens", 5_000, "--rollout-slots", 7)
    assert choose_batches(config, on_gpu, 2 * GIB, Screen(quiet=True)) == config


def test_the_plain_engine_has_no_slots_to_choose(configured, on_gpu):
    config = configured("--batch-size", 64, "--rollout-engine", "plain")
    assert batches(choose_batches(config, on_gpu, 8 * GIB, Screen(quiet=True)))[1] == 0


def test_a_run_stores_the_chosen_batches_and_resumes_with_them(run_flags, tmp_path, monkeypatch):
    """Also if the free memory has changed, which would choose others."""
    flags = ("--save-every", 1, "--eval-every", 1)
    for free in (8, 1):

        def chosen(config, model, device, screen, free=free):
            return replaced(config, micro_batch_tokens=4 * free, rollout_slots=free)

        monkeypatch.setattr(module, "choose_precision", chosen)  # called for a new run only
        resumed = ("--resume", "--resume-anyway") if free == 1 else ()
        train_ppo.main(run_flags("--num-iterations", 2 - (free == 8), *flags, *resumed))
        stored = RunRecord.read(tmp_path / "run").flat_settings
        assert [stored[name] for name in FROM_FREE_MEMORY] == [32, 8]


def test_weights_do_not_depend_on_the_batches(build):
    """Micro-batches change the order of sums; slots change nothing else, because random numbers belong to episodes."""
    found = []
    for flags in ((), ("--micro-batch-tokens", 40, "--rollout-slots", 2)):
        trainer = build("--num-iterations", 1, *flags)
        trainer.update_step(1)
        found.append(torch.cat([weight.detach().flatten() for weight in trainer.host.model.parameters()]))
    # a wrong gradient moves weights by the learning rate, 1e-3
    assert 0 < float((found[0] - found[1]).abs().max()) < 1e-4
