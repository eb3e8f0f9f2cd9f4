"""Tests that the predicted memory agrees with the tensors that autograd saves and with the tensors in each phase."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from benchmarks import ours
from benchmarks.memory import METHODS, estimate, tensors_in, tensors_of
from benchmarks.work import Work, make_models
from rlhf.config import make_config
from rlhf.models.device import autocast
from rlhf.models.load import load_policy
from rlhf.models.logprobs import backbone_of, base_of
from rlhf.models.packing import PackedMicroBatch
from rlhf.rollout.completions import token_batch
from rlhf.setup import plan
from rlhf.setup.build import load_components
from rlhf.setup.footprint import Network
from rlhf.setup.memory import forecaster_of, longest_batch
from rlhf.setup.plan import batch_line, show_plan
from rlhf.utils.console import Screen
from tests.scripts.test_scripts import ROOT, run

CPU = torch.device("cpu")
SHAPE = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 48, "vocab_size": 64, "tie_word_embeddings": True}  # fmt: skip
ATTENTION, ALL = ("q_proj", "k_proj", "v_proj", "o_proj"), ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
LENGTHS = {"equal": [6, 6, 6, 6], "different": [6, 4, 5, 6], "one prompt": [6, 6, 6, 6]}


def policy(folder, layers: int, kind, targets, load_in_4bit: bool, dtype, dropout: float = 0.0):
    torch.manual_seed(0)
    if not (folder / str(layers)).exists():
        AutoModelForCausalLM.from_config(kind(num_hidden_layers=layers, **SHAPE)).save_pretrained(folder / str(layers))
    shape = {"r": 5, "lora_dropout": dropout, "task_type": "CAUSAL_LM"}
    lora = LoraConfig(target_modules=list(targets), **shape) if targets else None
    options = {"load_in_4bit": load_in_4bit, "dtype": dtype}
    return load_policy(str(folder / str(layers)), lora=lora, device=CPU, vocabulary=64, **options).train()


def make_micro_batch(lengths: str) -> PackedMicroBatch:
    """Returns a micro-batch of four completions of 9 tokens each."""
    prompts = [[5] * length for length in LENGTHS[lengths]]
    episodes = token_batch(prompts, [[7] * 9] * 4, 0, CPU)
    if lengths == "one prompt":
        episodes.groups = [0] * 4
    return PackedMicroBatch(episodes, range(4))


def saved_bytes(model, micro_batch: PackedMicroBatch, dtype) -> int:
    """Returns the bytes that autograd saves in a forward pass. Weights and their rounded copies are not counted, and
    each storage is counted once."""
    weights = {shape for w in model.parameters() for shape in (tuple(w.shape), tuple(w.shape[::-1]))}
    storages: dict[int, torch.Tensor] = {}

    def record(tensor):
        if tuple(tensor.shape) not in weights:
            storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor), autocast(CPU, dtype):
        hidden = micro_batch.forward(backbone_of(model))
    assert hidden.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("targets", "load_in_4bit"), [((), False), (ATTENTION, False), (ALL, False), (ATTENTION, True)]
)
def test_saved_activations_of_a_layer_match_autograd(tmp_path, targets, load_in_4bit, dtype, lengths):
    micro_batch, measured = make_micro_batch(lengths), []
    for layers in (2, 3):
        model = policy(tmp_path, layers, LlamaConfig, targets, load_in_4bit, dtype)
        measured.append(saved_bytes(model, micro_batch, dtype))
    network = Network.of(base_of(model), dtype)
    assert network.saved_by_layer(micro_batch) == measured[1] - measured[0]
    assert network.saved_activations(micro_batch) == pytest.approx(measured[1], rel=0.05)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("targets", [ATTENTION, ALL], ids=["attention", "all"])
def test_saved_activations_include_dropout_masks(tmp_path, targets, dtype, lengths):
    micro_batch = make_micro_batch(lengths)
    models = [policy(tmp_path, layers, LlamaConfig, targets, False, dtype, dropout=0.1) for layers in (2, 3)]
    measured = [saved_bytes(model, micro_batch, dtype) for model in models]
    assert Network.of(base_of(models[0]), dtype).saved_by_layer(micro_batch) == measured[1] - measured[0]


def test_qk_norms_are_counted(tmp_path):
    network = Network.of(policy(tmp_path, 2, Qwen3Config, (), False, None), None)
    assert sorted(network.norms) == [(1, 128), (1, 128), (2, 2 * 48), (4, 4 * 48)]
    measured = [
        saved_bytes(policy(tmp_path, n, Qwen3Config, (), False, None), make_micro_batch("different"), None)
        for n in (2, 3)
    ]
    assert network.saved_by_layer(make_micro_batch("different")) == measured[1] - measured[0]


# --- phases ----------------------------------------------------------------------------------------------------------

VARIANTS = {
    "ppo": {
        "entropy bonus": {"entropy_coef": 0.01},
        "checkpointing": {"gradient_checkpointing": True},
        "bfloat16": {"bf16": True},
        "4-bit": {"use_lora": True, "load_in_4bit": True},
        "separate critic": {"critic": "separate"},
        "critic from the reward model": {"critic": "reward-model"},
        "critic from the reward model, adapters": {"critic": "reward-model", "use_lora": True, "bf16": True},
        "separate critic, 4-bit": {"critic": "separate", "use_lora": True, "load_in_4bit": True, "bf16": True},
    },
    "grpo": {
        "filters, no fused head": {"top_p": 0.9, "fused_head": False},
        "adapters": {"use_lora": True, "bf16": True},
        "micro-batches": {"micro_batch_size": 1},
        "dropout": {"use_lora": True, "lora_dropout": 0.1},
        "minibatches, padded": {"minibatches": 2, "packed": False, "rollout_engine": "plain"},
    },
}


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Work:
    work = Work(str(tmp_path_factory.mktemp("models")), batch_size=2, K=2, prompt_length=32, reply_length=32)
    make_models(work)
    return work


def make_trainer(work: Work, monkeypatch, algorithm: str, settings: dict):
    """Returns a benchmark's trainer with changed settings. All completions have the maximum length, and all prompts
    have the same length."""
    monkeypatch.setattr(ours, "make_config", lambda **given: make_config(**{**given, **settings}))
    return ours.build(replace(work, algorithm=algorithm))


@pytest.mark.parametrize(("algorithm", "variant"), [(a, v) for a, variants in VARIANTS.items() for v in variants])
def test_predicted_phases_match_the_measured_tensors(work, monkeypatch, algorithm, variant):
    trainer = make_trainer(work, monkeypatch, algorithm, {"ppo_epochs": 2, **VARIANTS[algorithm][variant]})
    trainer.update_step(1)  # allocates the optimizer's moments
    predicted, measured = estimate(trainer), tensors_in(trainer, METHODS, lambda: trainer.update_step(2))
    for method, names in METHODS.items():
        size = max(tensors_of(phase) for phase in predicted.phases if phase.name in names)
        assert size == pytest.approx(measured[method], rel=0.1), method


@pytest.mark.parametrize(("algorithm", "flags"), [
    ("grpo", []), ("ppo", []), ("ppo", ["--critic", "separate"]), ("ppo", ["--use-lora", "--lora-r", 64]),
])  # fmt: skip
def test_predicted_moments_of_eight_bit_adam_are_exact(build, wide_model, algorithm, flags):
    """Every tensor of the optimizer's state, without step counts and without the table that all weights share."""
    trainer = build("--optim", "adamw_8bit", "--actor-model", wide_model, *flags, algorithm=algorithm)
    trainer.update_step(1)
    states = trainer.optimizer.optimizer.state.values()
    kept = sum(t.nbytes for s in states for name, t in s.items() if name.startswith(("state", "absmax")))
    predicted = forecaster_of(trainer)(trainer.config).held["optimizer"]
    assert predicted == kept
    assert predicted < 2 * sum(w.nbytes for w in trainer.model.parameters() if w.requires_grad)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [[], ["--lora"], ["--load-in-4bit"]], ids=" ".join)
def test_predicted_gpu_peak_matches_the_measured_peak(tmp_path, flags):
    """Runs the benchmark in a separate process on the GPU, because this test process uses the CPU. The peak is
    torch.cuda.max_memory_allocated()."""
    found = run_benchmark(tmp_path, "cuda", "smollm2", "--dtype", "bfloat16", *flags)
    assert found["predicted"] == pytest.approx(found["measured"], rel=0.15)


def run_benchmark(folder, device: str, size: str, *flags: str) -> dict:
    """Runs the memory benchmark and returns its result."""
    file = folder / "memory.json"
    words = ["benchmarks/memory.py", "--device", device, "--size", size, *flags, "--json", str(file)]
    done = run(words, ROOT, ACCELERATE_USE_CPU=str(device == "cpu").lower())
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["predicted"] == sum(found["parts"].values()) and "peak above imports" in done.stdout
    return found


REAL_SHAPES = [
    ["--algorithm", algorithm, "--dtype", dtype, *options]
    for algorithm, dtype, *options in (
        ("ppo", "float32"), ("ppo", "bfloat16"),
        ("ppo", "float32", "--lora"), ("ppo", "bfloat16", "--lora"),
        ("ppo", "float32", "--load-in-4bit"), ("ppo", "bfloat16", "--load-in-4bit"),
        ("grpo", "float32"),
    )
]  # fmt: skip


@pytest.mark.proof
@pytest.mark.parametrize("flags", REAL_SHAPES, ids=" ".join)
def test_predicted_cpu_peak_matches_the_measured_peak_for_real_models(tmp_path, flags):
    """The measured value is the peak resident set size of two updates in a new process, minus that after imports."""
    found = run_benchmark(tmp_path, "cpu", "smollm2", *flags)
    assert found["predicted"] == pytest.approx(found["measured"], rel=0.15)


# --- the plan --------------------------------------------------------------------------------------------------------


def test_longest_batch_is_a_batch_of_the_training_loop(build):
    trainer = build("--num-iterations", 7, "--K", 2, algorithm="grpo")
    batches = [[prompt for _, prompt in trainer.prompts_of(update)] for update in range(1, 8)]
    longest = longest_batch(trainer.config, trainer.train_prompts, 7)
    assert longest in batches
    assert sum(len(p.ids) for p in longest) == max(sum(len(p.ids) for p in batch) for batch in batches)


def test_batch_line_describes_the_batch(configured):
    line = batch_line(configured("--batch-size", 4, "--K", 3, "--minibatches", 2, algorithm="grpo"), 10, CPU)
    assert line == (
        "4 prompts x 3 completions = 12 episodes per update; minibatches: 2 of 6 episodes; passes over each rollout: "
        "2; optimizer steps: 4 per update, 40 in total; micro-batch: at most 1,024 tokens"
    )
    assert "micro-batch: at most 2 episodes" in batch_line(configured("--micro-batch-size", 2), 10, CPU)


@pytest.mark.parametrize("flags", [[], ["--rm-model", "none", "--reward-func", "length_penalty", "--use-lora"]])
def test_plan_prints_the_predicted_peak_and_its_phases(configured, capsys, flags):
    config = configured(*flags)
    parts = load_components(config, CPU, Screen())
    show_plan(config, parts, 2, CPU, Screen())
    output = " ".join(capsys.readouterr().out.split())
    assert "memory predicted peak 0." in output and "GiB (phase: " in output and "largest micro-batch 4 epi" in output
    for phase in ("rollout", "log-probs", "backward pass", "optimizer step", "evaluation perplexity"):
        assert phase in output
    assert ("scoring" in output) == (not flags)
    assert "warning: the predicted peak" not in output.partition("algorithm")[2]


def test_plan_warns_if_the_predicted_peak_exceeds_free_memory(configured, capsys, monkeypatch):
    config = configured()
    parts = load_components(config, CPU, Screen())
    monkeypatch.setattr(plan, "available", lambda _: 2**20)
    show_plan(config, parts, 2, CPU, Screen())
    output = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"warning: the predicted peak memory is 0\.\d\d GiB, but cpu has only 0\.00 GiB free\. "
        r"To reduce memory: --",
        output,
    )
    assert output.count("GiB less)") == 3
