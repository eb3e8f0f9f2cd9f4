"""Tests the export to GGUF: transformers' own reader must find the run's model and tokenizer in the file."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from tokenizers import Regex, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

import export_model
from rlhf.checkpoints.model_folder import find_model
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import config_of_run
from rlhf.data.tokenizer import load_tokenizer
from rlhf.export import gguf as export_gguf
from rlhf.export.gguf import WORDS
from rlhf.export.modelfile import modelfile
from rlhf.utils.errors import RunError
from tests.shapes import smollm2_tokenizer

gguf = pytest.importorskip("gguf", reason="the library gguf is not installed")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 300, 17, 1, 4, 200, 301]])
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": 410}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
FAMILIES = {
    "llama": LlamaConfig(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 3e4}),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=128),
}
SMOLLM = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
BYTES_ALONE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
QWEN = [pre_tokenizers.Split(Regex(WORDS), "isolated"), BYTES_ALONE]
LLAMA3_STEPS = [pre_tokenizers.Split(Regex(WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), "isolated"), BYTES_ALONE]
SHOTS = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
TEXTS = ["What is 12345 + 678?", "It's  a\n\n\ttest: naïve, 日本!", "<|im_start|>user\nx<|im_end|>\n"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The file is read through a new cache."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


@pytest.fixture
def finished(runs, tmp_path):
    """Return a function that copies a finished run of an algorithm. GRPO's run has an adapter."""
    return lambda algorithm: Path(shutil.copytree(runs[algorithm, 1], tmp_path / f"My {algorithm} run"))


def put_tokenizer(folder: Path, steps: list | None) -> None:
    tokenizer = smollm2_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = steps and pre_tokenizers.Sequence(steps)
    tokenizer.save_pretrained(folder)


def put_model(folder: Path, config) -> torch.nn.Module:
    """Replaces the model in a folder by one of another family, whose norms and biases are random, too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, 1.0, 0.2)
    model.save_pretrained(folder)
    put_tokenizer(folder, SMOLLM if config.model_type == "llama" else QWEN)
    return model


def export(run: Path, *flags: object, name: str = "gguf") -> Path:
    """Exports a run into a folder inside it, and returns the model file."""
    export_model.main([str(run), "--output", str(run / name), *map(str, flags)])
    (file,) = (run / name).glob("*.gguf")
    return file


def fields(file: Path) -> dict:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def tensors(file: Path) -> dict:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


def load(folder: str | Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder)


@torch.no_grad()
def logprobs(model) -> torch.Tensor:
    return model(IDS).logits.log_softmax(-1)


# --- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_same_model_and_tokenizer(finished, family, capsys):
    run = finished("ppo")
    model = put_model(run, FAMILIES[family])
    file = export(run)
    printed = re.search(r"mean (\S+), largest (\S+) nats", capsys.readouterr().out)
    mean, largest = map(float, printed.groups())
    assert 0 < mean < largest < 0.01
    read = find_model(str(file), "--actor-model")
    assert_close(logprobs(load(read)), logprobs(model), rtol=0, atol=5e-3)
    one, other = load_tokenizer(str(run)), load_tokenizer(str(read))
    assert [other(text).input_ids for text in TEXTS] == [one(text).input_ids for text in TEXTS]
    assert other.chat_template == one.chat_template
    assert (other.eos_token, other.bos_token, other.pad_token) == (one.eos_token, one.bos_token, one.pad_token)
    metadata = fields(file)
    assert metadata["tokenizer.ggml.pre"] == ("smollm" if family == "llama" else "qwen2")
    assert metadata["tokenizer.ggml.tokens"][-1] == "[PAD409]"
    assert metadata["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]  # three control tokens
    assert metadata["tokenizer.ggml.token_type"][-1] == 5  # unused
    assert metadata["tokenizer.ggml.add_bos_token"] is False


def test_an_adapter_is_merged(finished, start_model):
    """Also with weights of 8 bits, which change the model more than those of 16 bits."""
    run = finished("grpo")
    merged = logprobs(PeftModel.from_pretrained(load(start_model), run))
    assert (merged - logprobs(load(start_model))).abs().max() > 0.05
    errors = {}
    for kind in ("f16", "q8_0"):
        file = export(run, "--type", kind, name=kind)
        errors[kind] = (logprobs(load(find_model(str(file), "--actor-model"))) - merged).abs().mean()
        assert gguf.LlamaFileType(fields(file)["general.file_type"]).name == f"MOSTLY_{kind.upper()}"
    assert errors["f16"] < 1e-3 < errors["q8_0"] < 0.03
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors(file).items()}
    assert kinds["blk.1.ffn_down.weight"] == "Q8_0" and kinds["blk.1.ffn_norm.weight"] == "F32"
    assert "output.weight" not in kinds, "the head is tied to the embeddings"


def test_the_best_weights_are_others(finished):
    run = finished("ppo")
    final = load(run)
    with torch.no_grad():
        final.model.norm.weight += 1
    final.save_pretrained(run)
    best = tensors(export(run, "--from", "best"))["output_norm.weight"].data
    assert np.array_equal(best, load(run / "best").model.norm.weight.detach().numpy())


def test_rope_scaling_of_llama_3(finished):
    """Divisors worked out by hand: wavelengths up to 64 / 4 are unchanged, from 64 / 1 on divided by 8."""
    run = finished("ppo")
    put_model(run, LlamaConfig(**SHAPE, rope_parameters=LLAMA3))
    put_tokenizer(run, LLAMA3_STEPS)
    file = export(run)
    factors = tensors(file)["rope_freqs.weight"].data
    assert factors.shape == (8,) and np.allclose(factors[[0, 1, 7]], [1, 2.442, 8], atol=1e-3)
    assert fields(file)["tokenizer.ggml.pre"] == "llama-bpe"


@pytest.mark.parametrize(("template", "adds"), [(None, True), ("{{ bos_token }}x", True), ("x", False)])
def test_bos_is_added_to_prompts_as_in_training(finished, template, adds):
    """A tokenizer that adds BOS to texts does not add it to a chat template's text, so the file must not either."""
    run = finished("ppo")
    tokenizer = smollm2_tokenizer()
    tokenizer.chat_template = template
    special = [("<|im_start|>", tokenizer.bos_token_id)]
    processor = TemplateProcessing("<|im_start|> $A", "<|im_start|> $A $B", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = processor
    (run / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(run)
    metadata = fields(export(run))
    assert metadata["tokenizer.ggml.add_bos_token"] is adds
    assert metadata.get("tokenizer.chat_template") == template


# --- Ollama ----------------------------------------------------------------------------------------------------------

MODELFILE = '''FROM ./my-ppo-run.gguf
TEMPLATE """{{ if not .System }}<|im_start|>system
You are a helpful assistant<|im_end|>
{{ end }}{{ range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
"""
MESSAGE user """1 + 1?"""
MESSAGE assistant """2"""
PARAMETER temperature 0.9
PARAMETER top_k 0
PARAMETER top_p 1
PARAMETER min_p 0
PARAMETER repeat_penalty 1
PARAMETER num_predict 8
PARAMETER num_ctx 4096
PARAMETER stop """<|im_end|>"""
PARAMETER stop """
Question:"""
'''


def test_modelfile_has_template_examples_stop_strings_and_sampling(finished, capsys):
    run = finished("ppo")
    record = json.loads((run / "run.json").read_text("utf-8"))
    record["settings"]["sampling"] |= {"temperature": 0.9, "stop": ["\\nQuestion:"]}
    record["data"]["few_shot"] = SHOTS
    (run / "run.json").write_text(json.dumps(record), "utf-8")
    export_model.main([str(run), "--to", "gguf"])
    assert (run / "gguf" / "Modelfile").read_text("utf-8") == MODELFILE
    lines = capsys.readouterr().out.splitlines()
    create = shlex.split(next(line for line in lines if "ollama create" in line))
    assert create == ["ollama", "create", "my-ppo-run", "-f", str(run / "gguf" / "Modelfile")]
    assert "  ollama run my-ppo-run" in lines


def test_templates_of_a_base_model_of_thinking_and_of_others(runs):
    run = runs["ppo", 1]
    tokenizer = AutoTokenizer.from_pretrained(run)
    settings = config_of_run(RunRecord.read(run))
    chatml = tokenizer.chat_template
    thought = "assistant\n<think>\n\n</think>\n\n"
    reject = "{{ raise_exception('no system') if messages[0]['role'] == 'system' }}"
    for template, text in (
        (None, 'TEMPLATE """1 + 1? 2\n\n{{ .Prompt }}"""'),
        (chatml.replace("assistant\n{% endif", thought + "{% endif"), f"{{{{ end }}}}<|im_start|>{thought}"),
        (reject + chatml, ""),
        ("{% for m in messages %}<s>{{ m['content'] }}{% endfor %}", ""),
    ):
        tokenizer.chat_template = template
        found = modelfile("x.gguf", tokenizer, settings, SHOTS)
        assert text in found and ("TEMPLATE" in found) == (text != "")


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def refused(user_error):
    """Return a function that expects an export to be refused, with these parts in its error, and nothing written."""

    def check(run: Path, *parts: object, **more: object) -> None:
        before = sorted(run.rglob("*"))
        with user_error(*parts, **more):
            export_model.main([str(run)])
        assert sorted(run.rglob("*")) == before

    return check


def test_existing_files_are_not_replaced(finished, refused):
    run = finished("ppo")
    (run / "gguf").mkdir()
    refused(run, f"--output {run / 'gguf'}")


@pytest.mark.parametrize("runs", [[], ["one", "two"]])
def test_number_of_runs(user_error, runs):
    with user_error("command line", len(runs)):
        export_model.main(runs)


def test_a_run_without_weights(finished, refused):
    run = finished("ppo")
    (run / "model.safetensors").unlink()
    refused(run, f"run {run}", "no final weights")


def test_what_a_file_cannot_contain(finished, refused):
    """Other families and tokenizers, and other forms of the families."""
    run = finished("ppo")
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    for config, part in (
        (MistralConfig(**SHAPE), "mistral"),
        (LlamaConfig(**SHAPE, attention_bias=True), "biases"),
        (Qwen2Config(**SHAPE, rope_parameters=yarn), "yarn"),
        (Qwen2Config(**SHAPE, **windows), "sliding"),
    ):
        put_model(run, config)
        refused(run, "--to gguf", part, "convert_hf_to_gguf.py", "--merge-lora")
    put_model(run, FAMILIES["llama"])
    for steps in ([pre_tokenizers.Whitespace()], None):
        put_tokenizer(run, steps)
        refused(run, "--to gguf", "tokenizer")


def test_without_the_library(finished, refused, monkeypatch):
    monkeypatch.setattr("rlhf.export.gguf.version_of", lambda _: None)
    refused(finished("ppo"), "--to gguf", "pip install", "gguf>=")


def test_a_file_that_is_not_the_model_is_not_kept(finished, refused, monkeypatch):
    """The heads are read in another order than they are written."""
    run = finished("ppo")
    model = put_model(run, FAMILIES["llama"])
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8 if weight.ndim == 2 else 1)
    model.save_pretrained(run)
    monkeypatch.setattr(export_gguf, "in_pairs", lambda weight, heads, back=False: weight.flip(0) if back else weight)
    refused(run, "nats", "--type f16", "convert_hf_to_gguf.py", kind=RunError)


def test_a_run_without_completions_is_not_compared(finished, capsys):
    run = finished("ppo")
    shutil.rmtree(run / "samples")
    export(run)
    assert "warning: not compared" in capsys.readouterr().out
