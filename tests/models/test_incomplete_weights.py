"""Tests that no weight is random in silence: files with missing, unknown or other tensors are refused before the first
step, and files whose names differ only as transformers expects them load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Gemma3Config,
    GPT2Config,
    GPTNeoXConfig,
    Qwen3Config,
)

import compare_runs
import evaluate_generations
import train_ppo
from rlhf.models.load import load_adapter, load_policy
from rlhf.models.save import load_policy_weights
from rlhf.utils.errors import UserError
from tests import shapes
from tests.shapes import GROUPED, make_family
from tests.tensors import Tensors, prefixed, rewritten, without

CPU = torch.device("cpu")
LAYER = "model.layers.1.self_attn.q_proj.weight"


def named(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n.replace(old, new): t for n, t in tensors.items()}


BIAS = "model.layers.0.self_attn.q_proj.bias"
CHANGED = {
    "missing": (without(LAYER), ["1 missing", LAYER, "shard"]),
    "unknown": (lambda tensors: tensors | {BIAS: torch.zeros(64)}, ["1 unknown", BIAS]),
    "another shape": (
        lambda tensors: tensors | {LAYER: tensors[LAYER][:32]},
        ["1 of another shape", LAYER, "[32, 64]"],
    ),
    "torch.compile": (prefixed("_orig_mod."), ["_orig_mod.model.embed_tokens.weight", "wrapper"]),
    "TRL's value head": (prefixed("pretrained_model."), ["pretrained_model.model", "wrapper"]),
    "DataParallel": (prefixed("module."), ["module.model.embed_tokens.weight", "wrapper"]),
    "peft": (prefixed("base_model.model."), ["base_model.model.model", "wrapper"]),
    "multimodal": (named("model.", "model.language_model."), ["model.language_model.embed_tokens.weight", "wrapper"]),
    "compiled layers": (named("layers.1.", "layers.1._orig_mod."), ["9 missing", "9 unknown", "wrapper"]),
    "a value head": (lambda tensors: tensors | {"v_head.summary.weight": torch.zeros(1, 64)}, ["v_head", "critic"]),
    "a reward head": (
        lambda tensors: tensors | {"score.weight": torch.zeros(1, 64)},
        ["score.weight", "reward model"],
    ),
}


@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize("case", CHANGED)
def test_a_start_model_with_other_tensors_is_refused(case, four_bit, wide_model, tmp_path):
    change, parts = CHANGED[case]
    folder = rewritten(wide_model, tmp_path / "changed", change)
    with pytest.raises(UserError) as error:
        load_policy(str(folder), load_in_4bit=four_bit, device=CPU, vocabulary=0)
    assert len(error.value.problems) == 1
    assert all(part in str(error.value) for part in [*parts, str(folder)]), str(error.value)


def test_a_shard_that_the_index_does_not_name_is_missed(start_model, tmp_path, user_error):
    folder = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(start_model).save_pretrained(folder, max_shard_size="40KB")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    last = sorted(folder.glob("model-*.safetensors"))[-1]
    lost = [name for name, file in content["weight_map"].items() if file == last.name]
    load_policy(str(folder), device=CPU, vocabulary=0)  # whole
    content["weight_map"] = {name: file for name, file in content["weight_map"].items() if name not in lost}
    index.write_text(json.dumps(content))
    with user_error(f"{len(lost)} missing", min(lost)):
        load_policy(str(folder), device=CPU, vocabulary=0)
    last.unlink()
    index.write_text(json.dumps(content | {"weight_map": content["weight_map"] | dict.fromkeys(lost, last.name)}))
    with user_error(str(folder)):
        load_policy(str(folder), device=CPU, vocabulary=0)


def test_saved_four_bit_weights_load_whole_only(wide_model, tmp_path):
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    more = {"quantization_config": bits, "device_map": "cpu"}
    AutoModelForCausalLM.from_pretrained(wide_model, **more).save_pretrained(tmp_path / "saved")
    load_policy(str(tmp_path / "saved"), device=CPU, vocabulary=0)
    folder = rewritten(tmp_path / "saved", tmp_path / "changed", without("model.norm.weight"))
    with pytest.raises(UserError, match="1 missing, first model.norm.weight"):
        load_policy(str(folder), device=CPU, vocabulary=0)


# --- files that transformers reads as they are -----------------------------------------------------------------------


def with_old_buffers(tensors: Tensors, *names: str) -> Tensors:
    """Adds buffers as older releases saved them."""
    return tensors | {name: torch.zeros(4) for name in names}


GEMMA3 = {
    "text_config": {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "sliding_window": 6,
        "num_attention_heads": 4, "max_position_embeddings": 256, **GROUPED,
    },
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
}  # fmt: skip
UNTIED = {"tie_word_embeddings": False}
AS_PUBLISHED = {
    "Llama 2 with inv_freq": (
        shapes.LlamaConfig,
        UNTIED,
        lambda t: with_old_buffers(t, "model.layers.0.self_attn.rotary_emb.inv_freq"),
    ),
    "Qwen3, tied, with the head": (
        Qwen3Config,
        {**GROUPED, "tie_word_embeddings": True},
        lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"]},
    ),
    "GPT-2 with attn.bias": (
        GPT2Config,
        {},
        lambda t: with_old_buffers(t, "transformer.h.0.attn.bias", "transformer.h.1.attn.bias"),
    ),
    "GPT-2 with masks of an older release": (
        GPT2Config,
        {},
        lambda t: with_old_buffers(t, "transformer.h.0.attn.masked_bias", "transformer.h.1.attn.causal_mask"),
    ),
    "GPT-2 without a prefix": (GPT2Config, {}, named("transformer.", "")),
    "GPT-NeoX with its mask": (
        GPTNeoXConfig,
        UNTIED,
        lambda t: with_old_buffers(t, "gpt_neox.layers.0.attention.bias", "gpt_neox.layers.1.attention.masked_bias"),
    ),
    "Gemma 3 with its images": (Gemma3Config, GEMMA3, lambda t: t),
    "Gemma 3 with older names": (
        Gemma3Config,
        GEMMA3,
        lambda t: {
            n.replace("model.language_model.", "language_model.model.")
            .replace("model.vision_tower.", "vision_tower.")
            .replace("model.multi_modal_projector.", "multi_modal_projector."): w
            for n, w in t.items()
        },
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("case", AS_PUBLISHED)
def test_files_as_they_are_published_load(case, tmp_path):
    kind, settings, change = AS_PUBLISHED[case]
    if kind is Gemma3Config:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(Gemma3Config(**settings)).save_pretrained(tmp_path / "start")
    else:
        make_family(tmp_path / "start", shapes.smollm2_tokenizer(), kind, **settings)
    folder = rewritten(tmp_path / "start", tmp_path / "published", change)
    ids = torch.arange(3, 20).unsqueeze(0)
    expected, found = (
        load_policy(str(name), device=CPU, vocabulary=0)(input_ids=ids).logits for name in (tmp_path / "start", folder)
    )
    assert torch.equal(found, expected)


# --- adapters --------------------------------------------------------------------------------------------------------


def make_adapter(base: Path, folder: Path, **more) -> Path:
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **more)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora).save_pretrained(folder)
    return folder


IN_LAYER_1 = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
ADAPTERS = {
    "missing": (without(IN_LAYER_1), ["1 missing", IN_LAYER_1]),
    "unknown": (
        lambda t: t | {IN_LAYER_1.replace("layers.1", "layers.7"): t[IN_LAYER_1]},
        ["1 unknown", "layers.7.self_attn.q_proj"],
    ),
    "renamed": (named("self_attn", "attention"), ["8 missing", "8 unknown", "attention.q_proj"]),
    "torch.compile": (
        named("base_model.model.", "base_model.model._orig_mod."),
        ["8 missing", "wrapper"],
    ),
    "another width": (named("q_proj", "k_proj"), []),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_with_other_tensors_is_refused(case, start_model, tmp_path):
    change, parts = ADAPTERS[case]
    whole = make_adapter(start_model, tmp_path / "whole")
    base = load_policy(str(start_model), device=CPU, vocabulary=0)
    folder = rewritten(whole, tmp_path / "adapter", change, "adapter_model.safetensors")
    with pytest.raises(UserError) as error:
        load_adapter(base, str(folder))
    assert len(error.value.problems) == 1
    assert all(part in str(error.value) for part in [*parts, str(folder)]), str(error.value)


def test_an_adapter_of_a_deeper_base_is_refused(start_model, tmp_path, user_error):
    config = AutoModelForCausalLM.from_pretrained(start_model).config
    config.num_hidden_layers = 3
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "deep")
    folder = make_adapter(tmp_path / "deep", tmp_path / "adapter")
    with user_error("4 unknown", "layers.2", "--baseline"):
        load_adapter(load_policy(str(start_model), device=CPU, vocabulary=0), str(folder))


def test_a_saved_module_that_is_missing_is_refused(start_model, tmp_path, user_error):
    """An adapter with modules_to_save has whole weights, too."""
    whole = make_adapter(start_model, tmp_path / "whole", modules_to_save=["norm"])
    base = load_policy(str(start_model), device=CPU, vocabulary=0)
    name = next(n for n in load_file(whole / "adapter_model.safetensors") if n.endswith(".norm.weight"))
    folder = rewritten(whole, tmp_path / "adapter", without(name), "adapter_model.safetensors")
    with user_error(name, str(folder)):
        load_adapter(base, str(folder))


@torch.no_grad()
def test_a_whole_adapter_gives_the_logits_of_peft(start_model, tmp_path):
    folder = rewritten(
        make_adapter(start_model, tmp_path / "zero"),
        tmp_path / "adapter",
        lambda t: {n: torch.randn(w.shape, generator=torch.Generator().manual_seed(1)) for n, w in t.items()},
        "adapter_model.safetensors",
    )
    from peft import PeftModel

    plain = AutoModelForCausalLM.from_pretrained(start_model)
    ids = torch.arange(3, 20).unsqueeze(0)
    start = plain(input_ids=ids).logits
    expected = PeftModel.from_pretrained(plain, folder)(input_ids=ids).logits
    model = load_adapter(load_policy(str(start_model), device=CPU, vocabulary=0), str(folder))
    assert torch.allclose(model.eval()(input_ids=ids).logits, expected, atol=1e-5)
    assert not torch.allclose(start, expected, atol=1e-2)
    assert not any(weight.requires_grad for name, weight in model.named_parameters() if "lora_" in name)


# --- a run's own files -----------------------------------------------------------------------------------------------

SAVED = {
    "policy": ((), "model.safetensors", LAYER),
    "adapter": (("--use-lora",), "adapter_model.safetensors", IN_LAYER_1),
    "value head": ((), "value_head.safetensors", "summary.bias"),
    "critic": (("--critic", "separate"), "critic.safetensors", "layers.1.self_attn.q_proj.weight"),
}


@pytest.mark.parametrize("change", ["missing", "renamed"])
@pytest.mark.parametrize("kind", SAVED)
def test_saved_weights_with_other_names_are_not_loaded(kind, change, build, tmp_path):
    """best/, checkpoints, --critic RUN: load_policy_weights reads all of them."""
    flags, file, name = SAVED[kind]
    trainer = build(*flags, *(["--lora-targets", "q_proj", "v_proj"] if "--use-lora" in flags else []))
    trainer.save_model(tmp_path / "saved")
    load_policy_weights(trainer.actor, tmp_path / "saved")
    changes = {"missing": without(name), "renamed": named(name, f"other.{name}")}
    folder = rewritten(tmp_path / "saved", tmp_path / "changed", changes[change], file)
    with pytest.raises(UserError) as error:
        load_policy_weights(trainer.actor, folder)
    assert f"1 missing, first {name}" in str(error.value) and str(folder) in str(error.value)
    assert (f"1 unknown, first other.{name}" in str(error.value)) == (change == "renamed")


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.fixture
def incomplete(start_model, tmp_path) -> Path:
    return rewritten(start_model, tmp_path / "incomplete", without(LAYER))


@pytest.mark.parametrize("more", [(), ("--check",), ("--use-lora",)])
def test_training_and_its_check_refuse_an_incomplete_start_model(more, incomplete, run_flags, tmp_path, user_error):
    with user_error("1 missing", LAYER, str(incomplete)) as error:
        train_ppo.main(run_flags("--actor-model", incomplete, *more))
    assert error.value.exit_status == 2
    assert not list((tmp_path / "run").glob("metrics*"))


def test_evaluations_and_comparisons_refuse_incomplete_weights(runs, incomplete, tmp_path, user_error):
    page = str(tmp_path / "page")
    run = rewritten(runs["ppo", 1], tmp_path / "ppo", without(LAYER))
    with user_error("1 missing", LAYER, str(run)):
        evaluate_generations.main(["--model-path", str(run), "--output", page])
    with user_error("1 missing", LAYER, str(run)):
        compare_runs.main([str(run), str(runs["ppo", 2]), "--output", str(tmp_path / "comparison")])
    grpo = runs["grpo", 1]
    name = sorted(load_file(grpo / "adapter_model.safetensors"))[-1]
    adapter = rewritten(grpo, tmp_path / "grpo", without(name), "adapter_model.safetensors")
    with user_error("1 missing", name, str(adapter)):
        evaluate_generations.main(["--model-path", str(adapter), "--output", page])
    with user_error("1 missing", LAYER, str(incomplete)):
        evaluate_generations.main(["--model-path", str(grpo), "--baseline", str(incomplete), "--output", page])
