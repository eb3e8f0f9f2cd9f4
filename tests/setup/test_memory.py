"""Tests that the predicted memory is at least that of the weights, of what autograd saves, and of measured peaks, and
not much more."""

from __future__ import annotations

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from rlhf.api import make_trainer
from rlhf.config import make_config
from rlhf.data.prompts import ids_alone
from rlhf.models.device import autocast
from rlhf.models.load import load_policy
from rlhf.models.logprobs import backbone_of, base_of
from rlhf.models.packing import PackedMicroBatch
from rlhf.rollout import continuous_batching
from rlhf.rollout.completions import token_batch
from rlhf.rollout.decoder import FusedDecoder
from rlhf.settings.fields import replaced
from rlhf.setup import fit
from rlhf.setup import memory as memory_module
from rlhf.setup.fit import estimator, estimator_of, what_helps
from rlhf.setup.load_inputs import load_inputs
from rlhf.setup.memory import IMPORTED, NOT_REUSED, Estimator, longest_batch
from rlhf.setup.plan import batch_line, show_plan
from rlhf.setup.shape import Row, Shape, base_parameters
from rlhf.utils.console import Screen
from tests.scripts.test_scripts import ROOT, run

CPU = torch.device("cpu")
SHAPE = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 48, "vocab_size": 64, "tie_word_embeddings": True}  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def policy(folder, layers: int, targets, load_in_4bit: bool, dtype, kind=LlamaConfig):
    torch.manual_seed(0)
    if not (folder / str(layers)).exists():
        AutoModelForCausalLM.from_config(kind(num_hidden_layers=layers, **SHAPE)).save_pretrained(folder / str(layers))
    lora = LoraConfig(r=5, task_type="CAUSAL_LM", target_modules=list(targets)) if targets else None
    options = {"load_in_4bit": load_in_4bit, "dtype": dtype}
    return load_policy(str(folder / str(layers)), lora=lora, device=CPU, vocabulary=64, **options).train()


def shape_of(model) -> Shape:
    return Shape.of(base_of(model).config, base_parameters(model))


def saved_bytes(modules, run) -> int:
    """Return the bytes that autograd saves while `run` computes with these modules. Weights and their rounded copies
    are not counted, and each storage is counted once."""
    every = [weight for module in modules for weight in module.parameters()]
    weights = {shape for w in every for shape in (tuple(w.shape), tuple(w.shape[::-1]))}
    storages: dict[int, torch.Tensor] = {}

    def record(tensor):
        if tuple(tensor.shape) not in weights:
            storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        assert run().requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


# lengths of the prompts, and how many neighbours share one
ROWS = {"equal": ([6] * 4, 1), "different": ([17, 11, 6, 2], 1), "shared": ([17] * 3 + [6] * 3, 3)}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("targets", [(), ATTENTION, ALL], ids=["all weights", "attention", "five layers"])
@pytest.mark.parametrize("rows", ROWS)
def test_saved_activations_of_a_layer_match_autograd(tmp_path, rows, targets, dtype):
    models = [policy(tmp_path, layers, targets, False, dtype) for layers in (2, 3)]
    lengths, shared = ROWS[rows]
    given = token_batch([[5] * n for n in lengths], [[7] * 9] * len(lengths), 0, CPU)
    given.groups = [number // shared for number in range(len(lengths))]
    micro_batch = PackedMicroBatch(given, range(len(lengths)))
    row = Row.of(lengths, 9, True, shared)
    with autocast(CPU, dtype):
        two, three = (saved_bytes([m], lambda m=m: micro_batch.forward(backbone_of(m))) for m in models)
    assert (row.episodes, row.tokens) == (len(lengths), micro_batch.ids.numel())
    predicted = shape_of(models[0]).saved_by_layer(row, 4 if dtype is None else dtype.itemsize, 4, targets or None)
    assert three - two <= predicted <= 1.6 * (three - two)


@pytest.mark.parametrize(("draws", "sampled"), [(0, 4), (2, 3 * 4)])
def test_token_masks_of_a_draw_are_in_memory_with_those_of_the_batch(configured, draws, sampled):
    config = configured("--batch-size", 2, "--K", 2, "--top-p", 0.9, "--dynamic-sampling", draws, algorithm="grpo")
    estimate = estimator(load_inputs(config, Screen()), 2, CPU)
    forecast = dataclasses.replace(estimate, evaluation=[])(config)
    one = sampled * config.sampling.max_new_tokens * estimate.policy.vocabulary // 8
    assert forecast.held["token masks"] == 2 * one  # the sampler's and the rollout's


CRITICS = {"shared": [], "separate": ["--critic", "separate"], "reward-model": ["--critic", "reward-model"]}


ADAPTERS = {"all weights": [], "some": ["--use-lora", "--lora-r", 1]}
ADAPTERS["every linear layer"] = [*ADAPTERS["some"], "--lora-targets", "all-linear"]


@pytest.mark.parametrize("lora", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("critic", CRITICS)
def test_predicted_activations_cover_autograds_for_every_critic_and_adapter(configured, build, critic, lora):
    """Of the largest micro-batch, over all networks. The rank is 1: in a tiny model the products with A are large."""
    flags = ["--batch-size", 8, "--minibatches", 1, "--no-bf16", *CRITICS[critic], *lora]
    trainer = build(*flags)
    length = 8
    estimate = estimator(load_inputs(configured(*flags), Screen()), 2, CPU)
    prompts = longest_batch(trainer.config, trainer.train_prompts, 2)
    given = token_batch([p.ids for p in prompts], [[7] * length] * len(prompts), 0, CPU)
    micro_batch = PackedMicroBatch(given, range(len(prompts)))
    found = saved_bytes([trainer.host.model], lambda: trainer.actor.forward_backbone(micro_batch))
    predicted = estimate(trainer.config).phases["update"]["activations"] / (1 + NOT_REUSED["cpu"])
    assert found <= predicted <= 1.6 * found


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_predicted_activations_of_ppo_count_a_shared_prompt_once(configured, build, critic):
    """Two prompts with four completions each, in one micro-batch."""
    flags = ["--batch-size", 2, "--K", 4, "--minibatches", 1, "--no-bf16", *CRITICS[critic]]
    trainer = build(*flags)
    length = 8
    prompts = longest_batch(trainer.config, trainer.train_prompts, 2)
    given = token_batch([p.ids for p in prompts], [[7] * length] * len(prompts), 0, CPU)
    given.groups = [number // 4 for number in range(8)]
    micro_batch = PackedMicroBatch(given, range(8))
    forecast = estimator(load_inputs(configured(*flags), Screen()), 2, CPU)(trainer.config)
    assert forecast.tokens == micro_batch.ids.numel() == sum(len(p.ids) for p in prompts[::4]) + 8 * (length - 1)
    found = saved_bytes([trainer.host.model], lambda: trainer.actor.forward_backbone(micro_batch))
    assert found <= forecast.phases["update"]["activations"] / (1 + NOT_REUSED["cpu"]) <= 1.6 * found


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_numbers_of_weights_are_exact(tmp_path, kind):
    model = policy(tmp_path, 2, ALL, False, None, kind)
    linear = sum(m.weight.numel() for m in base_of(model).model.modules() if type(m) is torch.nn.Linear) - sum(
        w.numel() for name, w in model.named_parameters() if "lora_" in name
    )
    norms = sum(w.numel() for name, w in model.named_parameters() if "norm" in name)
    shape = shape_of(model)
    assert shape.parameters == linear + norms + 64 * 128
    assert shape.linear == linear + norms, "the norms are so small that they are counted with the linear layers"
    assert shape.adapters(5, ALL) == sum(w.numel() for name, w in model.named_parameters() if "lora_" in name)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("targets", [(), ("q_proj", "o_proj", "gate_proj"), ALL], ids=["full", "three", "five layers"])
def test_weights_that_a_decoder_copies_on_a_gpu(tmp_path, monkeypatch, targets, dtype):
    """The tensors of the decoder that do not share memory with the model. They stay between rollouts."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    model = policy(tmp_path, 2, targets, False, dtype)
    with autocast(CPU, dtype), torch.no_grad():
        decoder = FusedDecoder(model, 4, 16, static=True)
    shared = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    used = [tensor for product in decoder.products for tensor in product.kept.values()]
    copied = sum(tensor.nbytes for tensor in used if tensor.untyped_storage().data_ptr() not in shared)
    lora = {"use_lora": True, "lora_targets": list(targets), "lora_r": 5} if targets else {}
    config = make_config(bf16=dtype is not None, rollout_engine="slots", **lora)
    estimate = Estimator(shape_of(model), None, torch.device("cuda"), [ids_alone([5] * 8)] * 8, [], 2)
    predicted = estimate(config).phases["sampling"]["decoder's weights"]
    assert 0.95 * copied <= predicted <= 1.3 * copied  # B has zeros between the layers' blocks


def test_a_decoder_for_graphs_is_held_if_it_is_small(monkeypatch):
    """16 slots of 8 + 128 columns in float32: 2 layers x 16 x 136 x 2 x 96 x 4 bytes."""
    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape = Shape.of(
        {**sizes, "head_dim": 48, "num_hidden_layers": 2, "vocab_size": 64, "tie_word_embeddings": True}, 500_000
    )
    estimate = Estimator(shape, None, torch.device("cuda"), [ids_alone([5] * 8)] * 9, [], 1)
    config = make_config(bf16=False, rollout_engine="graph", batch_size=9, minibatches=1, max_new_tokens=128)
    for memory, held in ((2**40, True), (2**20, False)):
        monkeypatch.setattr(memory_module, "installed", lambda _, memory=memory: memory)
        found = estimate(config)
        sampling = found.phases["sampling"]
        assert ("KV cache" in found.held, "KV cache" in sampling) == (held, not held)
        assert {**found.held, **sampling}["KV cache"] == 2 * 16 * 136 * 2 * 96 * 4


def test_adapters_are_the_first_advice_for_a_real_shape(configured):
    """Training all weights of SmolLM2-135M needs gradients, moments and a reference, which adapters do not."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    shape = Shape.of(
        {**sizes, "num_hidden_layers": 30, "vocab_size": 49_152, "tie_word_embeddings": True}, 134_515_008
    )
    advice = what_helps(configured(), Estimator(shape, None, CPU, [ids_alone([5] * 64)] * 8, [], 2))
    assert re.match(r"[^-]*: --use-lora \([a-z]+ [1-9]\.\d\d GiB [a-z]+\), ", advice), advice


def test_advice_has_all_flags_of_a_change_and_none_that_the_run_has(configured):
    config = configured("--gradient-checkpointing", "--minibatches", 2)
    advice = what_helps(config, lambda changed: SimpleNamespace(peak=2**30 * changed.batch.batch_size))
    assert "--batch-size 2 --minibatches 1 (about 2.00 GiB less)" in advice
    assert "--gradient-checkpointing" not in advice


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_every_setting_that_saves_memory_lowers_the_estimate(configured, algorithm):
    """Without LoRA: in this tiny model the adapters' activations take as much as the frozen weights save. A real shape
    is in `test_adapters_are_the_first_advice_for_a_real_shape`."""
    config = configured("--minibatches", 1, algorithm=algorithm)
    estimate = estimator(load_inputs(config, Screen()), 2, CPU)
    most = estimate(config).peak
    assert most > sum(estimate(config).held.values()) > IMPORTED
    for setting in ({"max_new_tokens": 2}, {"micro_batch_size": 1}, {"optim": "adamw_8bit"},
                    {"gradient_checkpointing": True, "max_new_tokens": 64}):  # fmt: skip
        reference = estimate(replaced(config, max_new_tokens=64)).peak if len(setting) > 1 else most
        assert estimate(replaced(config, **setting)).peak < reference, setting
    if algorithm == "ppo":
        assert estimate(replaced(config, critic="separate")).peak > most


@pytest.mark.parametrize(("algorithm", "flags"), [("grpo", []), ("ppo", []), ("ppo", ["--critic", "separate"])])
def test_predicted_moments_of_eight_bit_adam(configured, build, wide_model, algorithm, flags):
    """Every tensor of the optimizer's state, without step counts and without the table that all weights share."""
    words = ("--optim", "adamw_8bit", "--actor-model", wide_model, *flags)
    trainer = build(*words, algorithm=algorithm)
    trainer.update_step(1)
    states = trainer.host.optimizer.optimizer.state.values()
    kept = sum(t.nbytes for s in states for name, t in s.items() if name.startswith(("state", "absmax")))
    config = configured(*words, algorithm=algorithm)
    predicted = estimator(load_inputs(config, Screen()), 2, CPU)(config).held["optimizer"]
    assert predicted == pytest.approx(kept, rel=0.15)
    assert predicted < 2 * sum(w.nbytes for w in trainer.host.model.parameters() if w.requires_grad)


@pytest.mark.parametrize(("slots", "texts"), [(8, 32), (64, 50), (128, 64)])
def test_predicted_scoring_has_as_many_texts_as_a_forward_pass_of_the_run(configured, slots, texts):
    """Texts of 12 + 8 tokens: 1,280 tokens are those of 64, and an update has 50 or 70 completions."""
    config = configured("--micro-batch-tokens", 1_280, "--rollout-slots", slots, "--max-new-tokens", 8,
                        "--batch-size", 70 if slots == 128 else 50)  # fmt: skip
    shape = Shape.of(LlamaConfig(**SHAPE), 10**6)
    forecast = Estimator(shape, shape, CPU, [ids_alone([5] * 12)] * 70, [], 1)(config)
    assert forecast.phases["scoring"]["reward model's forward pass"] == shape.forward_peak(20 * texts, 4)


def test_a_teacher_is_held_and_takes_a_forward_pass(configured, build, wide_model):
    """Its frozen weights, of a model that is larger than the policy, in float32 and in 16 bits."""
    trainer = build("--teacher", wide_model)
    (shape,) = {estimator_of(trainer).teacher, estimator(load_inputs(trainer.config, Screen()), 2, CPU).teacher}
    assert shape.parameters == trainer.teacher.reference.copy.num_parameters()
    for bf16 in (False, True):
        config = configured("--teacher", wide_model, "--bf16" if bf16 else "--no-bf16")
        estimate = estimator(load_inputs(config, Screen()), 2, CPU)
        frozen = load_policy(str(wide_model), frozen=True, dtype=torch.bfloat16 if bf16 else None, device=CPU,
                             vocabulary=1)  # fmt: skip
        assert not any(weight.requires_grad for weight in frozen.parameters())
        held = sum(weight.nbytes for weight in frozen.parameters())
        assert estimate(config).held["teacher"] == pytest.approx(held, rel=0.01)
        row = estimate(config).tokens
        passed = shape.forward_peak(row, 2 if bf16 else 4)
        assert estimate(config).phases["teacher"]["teacher's forward pass"] == passed
    assert estimator_of(build())(configured()).held["teacher"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [[], ["--lora"], ["--load-in-4bit"]], ids=" ".join)
def test_predicted_gpu_peak_covers_the_measured_peak(tmp_path, flags):
    """Runs the benchmark in a separate process on the GPU, because this test process uses the CPU. The peak is
    torch.cuda.max_memory_allocated()."""
    found = run_benchmark(tmp_path, "cuda", "smollm2", "--dtype", "bfloat16", *flags)
    assert 0.95 * found["measured"] <= found["predicted"] <= 1.4 * found["measured"]


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
        ("grpo", "float32"), ("grpo", "float32", "--lora"),
        ("ppo", "float32", "--critic", "separate"), ("ppo", "float32", "--lora", "--critic", "separate"),
        ("ppo", "bfloat16", "--lora", "--critic", "reward-model"),
    )
]  # fmt: skip


@pytest.mark.proof
@pytest.mark.parametrize("flags", REAL_SHAPES, ids=" ".join)
def test_predicted_cpu_peak_covers_the_measured_peak_for_real_models(tmp_path, flags):
    """The measured value is the peak resident set size of two updates in a new process, minus that after imports."""
    found = run_benchmark(tmp_path, "cpu", "smollm2", *flags)
    assert 0.9 * found["measured"] <= found["predicted"] <= 1.4 * found["measured"]


# --- the plan --------------------------------------------------------------------------------------------------------


def test_longest_batch_is_a_batch_of_the_training_loop(build):
    trainer = build("--num-iterations", 7, "--K", 2, algorithm="grpo")
    batches = [[prompt for _, prompt in trainer.episodes_of(update)] for update in range(1, 8)]
    longest = longest_batch(trainer.config, trainer.train_prompts, 7)
    assert longest in batches
    assert sum(len(p.ids) for p in longest) == max(sum(len(p.ids) for p in batch) for batch in batches)


def test_batch_line_describes_the_batch(configured):
    line = batch_line(configured("--batch-size", 4, "--K", 3, "--minibatches", 2, algorithm="grpo"), 10, CPU)
    assert re.findall(r"[\d,]*\d", line) == ["4", "3", "12", "2", "6", "2", "4", "40", "2,048"]
    smaller = batch_line(configured("--micro-batch-size", 2), 10, CPU)
    assert smaller.endswith(" 2 episodes")


@pytest.mark.parametrize("flags", [[], ["--rm-model", "none", "--reward-func", "length_penalty", "--use-lora"]])
def test_plan_prints_the_predicted_peak_and_its_parts(configured, capsys, flags):
    config = configured(*flags)
    inputs = load_inputs(config, Screen())
    show_plan(config, inputs, CPU, Screen())
    output = " ".join(capsys.readouterr().out.split())
    assert "memory predicted peak " in output and "GiB; largest micro-batch 4 epi" in output
    assert "parts, GiB" in output and "libraries" in output
    assert "warning: the predicted peak" not in output.partition("algorithm")[2]


def test_plan_warns_if_the_predicted_peak_exceeds_free_memory(configured, capsys, monkeypatch):
    config = configured()
    inputs = load_inputs(config, Screen())
    monkeypatch.setattr(fit, "available", lambda _: 2**20)
    show_plan(config, inputs, CPU, Screen())
    (warning,) = [
        line for line in capsys.readouterr().out.splitlines() if "warning: " in line and " 0.00 GiB " in line
    ]
    assert warning.count("GiB less)") == 3


# --- environments ----------------------------------------------------------------------------------------------------


class Talkative:
    """`reset` and `observe` return texts that are much longer than the rows and the turns."""

    def reset(self, **row):
        return " yes" * 20

    def observe(self, completion):
        return "no " * 6


@pytest.fixture
def talkative(start_model):
    """Return a function that makes a trainer with an environment of long texts."""

    def make(**settings):
        usual = {"batch_size": 4, "minibatches": 1, "num_iterations": 1, "prompt_length": 100, "max_new_tokens": 4}
        usual |= {"max_episode_tokens": 90, "rm_model": None, "actor_model": str(start_model), "bf16": False}
        rows = [{"prompt": f"{word}?"} for word in ("a cat", "it", "no", "help")]
        config = make_config(**usual | settings)
        return make_trainer(config, rows, environment=Talkative, evaluation_prompts=rows[:2], progress=False)

    return make


@pytest.mark.parametrize("slots", [2, 4])
def test_texts_of_an_environment_are_in_the_predicted_memory(talkative, monkeypatch, slots):
    """The KV cache that the sampler reserves, and the tokens of the largest passes that a run makes."""
    trainer = talkative(rollout_slots=slots)
    read = []
    trained = []
    pack = continuous_batching.pack_prompts
    forward = trainer.actor.forward_backbone

    def packed(*given):
        found = pack(*given)
        read.append(found.ids.numel())
        return found

    def forwarded(micro_batch):
        trained.append(micro_batch.ids.numel())
        return forward(micro_batch)

    monkeypatch.setattr(continuous_batching, "pack_prompts", packed)
    monkeypatch.setattr(trainer.actor, "forward_backbone", forwarded)
    trainer.train()
    config = trainer.config
    rows = max(len(prompt.ids) for prompt in trainer.train_prompts)
    assert max(read) > slots * rows, "otherwise this test shows nothing"
    estimate = dataclasses.replace(estimator_of(trainer), evaluation=[rows] * 2)
    forecast = estimate(config)
    shape = estimate.policy
    longest = trainer.collector.sampler.longest_text
    sampling = forecast.phases["sampling"]
    assert sampling["KV cache"] == shape.layers * slots * longest * 2 * shape.kv * 4
    assert sampling["prompt pass or sampling"] >= shape.forward_peak(max(read), 4)
    assert forecast.tokens >= max(trained)
    assert forecast.phases["evaluation"]["forward pass"] == shape.forward_peak(2 * longest, 4)


def test_later_turns_of_a_loop_by_hand_are_in_the_predicted_memory(configured):
    shape = Shape.of(LlamaConfig(**SHAPE), 10**6)
    estimate = Estimator(shape, None, CPU, [ids_alone([5] * 12)] * 8, [], 1)
    flags = ["--batch-size", 8, "--max-new-tokens", 8]
    for more, tokens in (([], 12), (["--max-episode-tokens", 50], 12 + 50)):
        passed = estimate(configured(*flags, *more)).phases["sampling"]["prompt pass or sampling"]
        assert passed == shape.forward_peak(8 * tokens, 4)


def test_the_advice_for_long_episodes_is_to_shorten_them(talkative):
    trainer = talkative(max_episode_tokens=400)
    assert "--max-episode-tokens 200 " in what_helps(trainer.config, estimator_of(trainer))
