"""Predicted memory: every tensor of a layer against what autograd keeps, phases against what tensors take."""

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
from rlhf.setup.memory import longest_batch
from rlhf.setup.plan import batch_line, show_plan
from rlhf.utils.console import Screen
from tests.scripts.test_scripts import ROOT, run

CPU = torch.device("cpu")
SHAPE = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 48, "vocab_size": 64, "tie_word_embeddings": True}  # fmt: skip
ATTENTION, ALL = ("q_proj", "k_proj", "v_proj", "o_proj"), ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
LENGTHS = {"alike": [6, 6, 6, 6], "unlike": [6, 4, 5, 6], "one prompt": [6, 6, 6, 6]}


def policy(folder, layers: int, kind, targets, load_in_4bit: bool, dtype, dropout: float = 0.0):
    torch.manual_seed(0)
    if not (folder / str(layers)).exists():
        AutoModelForCausalLM.from_config(kind(num_hidden_layers=layers, **SHAPE)).save_pretrained(folder / str(layers))
    shape = {"r": 5, "lora_dropout": dropout, "task_type": "CAUSAL_LM"}
    lora = LoraConfig(target_modules=list(targets), **shape) if targets else None
    more = {"load_in_4bit": load_in_4bit, "dtype": dtype}
    return load_policy(str(folder / str(layers)), lora=lora, device=CPU, vocabulary=64, **more).train()


def passage_of(lengths: str) -> PackedMicroBatch:
    """Four replies of 9 tokens."""
    prompts = [[5] * length for length in LENGTHS[lengths]]
    episodes = token_batch(prompts, [[7] * 9] * 4, 0, CPU)
    if lengths == "one prompt":
        episodes.groups = [0] * 4
    return PackedMicroBatch(episodes, range(4))


def saved(model, micro_batch: PackedMicroBatch, dtype) -> int:
    """Bytes that autograd keeps of a pass, weights and their rounded copies aside, each place in memory once."""
    weights = {shape for w in model.parameters() for shape in (tuple(w.shape), tuple(w.shape[::-1]))}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor):
        if tuple(tensor.shape) not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast(CPU, dtype):
        hidden = micro_batch.forward(backbone_of(model))
    assert hidden.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("targets", "load_in_4bit"), [((), False), (ATTENTION, False), (ALL, False), (ATTENTION, True)]
)
def test_a_layer_keeps_what_autograd_saves(tmp_path, targets, load_in_4bit, dtype, lengths):
    micro_batch, counted = passage_of(lengths), []
    for layers in (2, 3):
        model = policy(tmp_path, layers, LlamaConfig, targets, load_in_4bit, dtype)
        counted.append(saved(model, micro_batch, dtype))
    network = Network.of(base_of(model), dtype)
    assert network.saved_by_layer(micro_batch) == counted[1] - counted[0]
    assert network.saved_activations(micro_batch) == pytest.approx(counted[1], rel=0.05)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("targets", [ATTENTION, ALL], ids=["attention", "all"])
def test_a_layer_keeps_what_dropout_saves(tmp_path, targets, dtype, lengths):
    micro_batch = passage_of(lengths)
    models = [policy(tmp_path, layers, LlamaConfig, targets, False, dtype, dropout=0.1) for layers in (2, 3)]
    counted = [saved(model, micro_batch, dtype) for model in models]
    assert Network.of(base_of(models[0]), dtype).saved_by_layer(micro_batch) == counted[1] - counted[0]


def test_norms_of_single_heads_are_layers_norms_too(tmp_path):
    network = Network.of(policy(tmp_path, 2, Qwen3Config, (), False, None), None)
    assert sorted(network.norms) == [(1, 128), (1, 128), (2, 2 * 48), (4, 4 * 48)]
    counted = [saved(policy(tmp_path, n, Qwen3Config, (), False, None), passage_of("unlike"), None) for n in (2, 3)]
    assert network.saved_by_layer(passage_of("unlike")) == counted[1] - counted[0]


# --- phases ----------------------------------------------------------------------------------------------------------

VARIANTS = {
    "ppo": {
        "entropy bonus": {"entropy_coef": 0.01},
        "checkpointing": {"gradient_checkpointing": True},
        "bfloat16": {"bf16": True},
        "4-bit": {"use_lora": True, "load_in_4bit": True},
        "a critic of its own": {"critic": "separate"},
        "a critic of its own, 4-bit": {"critic": "separate", "use_lora": True, "load_in_4bit": True, "bf16": True},
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


def trainer_of(work: Work, monkeypatch, algorithm: str, settings: dict):
    """A benchmark's trainer with other settings: replies that never end early, prompts of one length."""
    monkeypatch.setattr(ours, "make_config", lambda **given: make_config(**{**given, **settings}))
    return ours.build(replace(work, algorithm=algorithm))


@pytest.mark.parametrize(("algorithm", "variant"), [(a, v) for a, variants in VARIANTS.items() for v in variants])
def test_phases_take_the_tensors_predicted(work, monkeypatch, algorithm, variant):
    trainer = trainer_of(work, monkeypatch, algorithm, {"ppo_epochs": 2, **VARIANTS[algorithm][variant]})
    trainer.update_step(1)  # the optimizer's moments are there after it
    predicted, taken = estimate(trainer), tensors_in(trainer, METHODS, lambda: trainer.update_step(2))
    for method, names in METHODS.items():
        size = max(tensors_of(phase) for phase in predicted.phases if phase.name in names)
        assert size == pytest.approx(taken[method], rel=0.1), method


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [[], ["--lora"], ["--load-in-4bit"]], ids=" ".join)
def test_a_gpus_peak_is_predicted(tmp_path, flags):
    """In processes of their own, on the card: here everything runs on the processor. The peak is what torch
    allocates (max_memory_allocated)."""
    found = compared(tmp_path, "cuda", "smollm2", "--dtype", "bfloat16", *flags)
    assert found["predicted"] == pytest.approx(found["measured"], rel=0.15)


def compared(folder, device: str, size: str, *flags: str) -> dict:
    """What the benchmark finds."""
    file = folder / "memory.json"
    words = ["benchmarks/memory.py", "--device", device, "--size", size, *flags, "--json", str(file)]
    done = run(words, ROOT, ACCELERATE_USE_CPU=str(device == "cpu").lower())
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["predicted"] == sum(found["parts"].values()) and "peak above imports" in done.stdout
    return found


REAL = [
    ["--algorithm", algorithm, "--dtype", dtype, *more]
    for algorithm, dtype, *more in (
        ("ppo", "float32"), ("ppo", "bfloat16"),
        ("ppo", "float32", "--lora"), ("ppo", "bfloat16", "--lora"),
        ("ppo", "float32", "--load-in-4bit"), ("ppo", "bfloat16", "--load-in-4bit"),
        ("grpo", "float32"),
    )
]  # fmt: skip


@pytest.mark.proof
@pytest.mark.parametrize("flags", REAL, ids=" ".join)
def test_the_real_shapes_peak_is_predicted(tmp_path, flags):
    """Resident size above that after the imports, over two updates in a fresh process."""
    found = compared(tmp_path, "cpu", "smollm2", *flags)
    assert found["predicted"] == pytest.approx(found["measured"], rel=0.15)


# --- the plan --------------------------------------------------------------------------------------------------------


def test_the_longest_batch_is_one_of_the_loops(build):
    trainer = build("--num-iterations", 7, "--K", 2, algorithm="grpo")
    batches = [[prompt for _, prompt in trainer.prompts_of(update)] for update in range(1, 8)]
    longest = longest_batch(trainer.config, trainer.train_prompts, 7)
    assert longest in batches
    assert sum(len(p.ids) for p in longest) == max(sum(len(p.ids) for p in batch) for batch in batches)


def test_what_a_batch_means_in_words(configured):
    line = batch_line(configured("--batch-size", 4, "--K", 3, "--minibatches", 2, algorithm="grpo"), 10, CPU)
    assert line == (
        "4 prompts x 3 completions = 12 episodes per update; minibatches: 2 of 6 episodes; passes over each rollout: "
        "2; optimizer steps: 4 per update, 40 in total; micro-batch: at most 1,024 tokens"
    )
    assert "micro-batch: at most 2 episodes" in batch_line(configured("--micro-batch-size", 2), 10, CPU)


@pytest.mark.parametrize("flags", [[], ["--rm-model", "none", "--reward-func", "length_penalty", "--use-lora"]])
def test_the_plan_tells_the_peak_its_parts_and_phases(configured, capsys, flags):
    config = configured(*flags)
    parts = load_components(config, CPU, Screen())
    show_plan(config, parts, 2, CPU, Screen())
    output = " ".join(capsys.readouterr().out.split())
    assert "memory predicted peak 0." in output and "GiB (phase: " in output and "largest micro-batch 4 epi" in output
    for phase in ("rollout", "log-probs", "backward pass", "optimizer step", "evaluation perplexity"):
        assert phase in output
    assert ("scoring" in output) == (not flags)
    assert "warning: the predicted peak" not in output.partition("algorithm")[2]


def test_the_plan_warns_where_less_memory_is_free(configured, capsys, monkeypatch):
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
