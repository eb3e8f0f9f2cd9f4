"""The commands of docs/using_the_model.md: a saved model in lm-evaluation-harness, and converted to GGUF.

Both programs are optional: without them the tests are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import train_grpo
from tests.documents import ROOT, blocks
from tests.shapes import llama_config, mistral_tokenizer

PAGE = ROOT / "docs" / "using_the_model.md"
QUESTIONS = [f"What is {word} number {i}?" for i, word in enumerate(["cat", "table", "river", "step"])]


def needs(module: str, package: str):
    """Return the mark of a test that needs an optional package."""
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{package} is not installed")


def text_block(words: str) -> str:
    """Return the page's text block that contains `words`."""
    (block,) = [block for block in blocks(PAGE, "text") if words in block]
    return block


def run_in(folder: Path, *words: str) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=500
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done


# --- lm-evaluation-harness -------------------------------------------------------------------------------------------


def greedy_text(model: torch.nn.Module, tokenizer, question: str) -> str:
    """Return what a model answers greedily, without the harness."""
    chat = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**ids, do_sample=False, max_new_tokens=64, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def run(runs, tmp_path_factory) -> Path:
    """Return a finished run with an adapter and a merged model, with a task beside it. The merged model answers two of
    the task's four questions as expected."""
    folder = tmp_path_factory.mktemp("handing_on")
    run = Path(shutil.copytree(runs["grpo", 1], folder / "RUN"))
    train_grpo.main(["--resume", "--merge-lora", "--output", str(run)])
    file = run / "merged" / "generation_config.json"  # as the page says: the task has more tokens than the training
    generation = json.loads(file.read_text(encoding="utf-8"))
    del generation["max_new_tokens"]
    file.write_text(json.dumps(generation), encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(run / "merged")
    tokenizer = AutoTokenizer.from_pretrained(run)
    answers = [greedy_text(model, tokenizer, question) for question in QUESTIONS]
    answers[1:3] = ["nothing like this"] * 2
    rows = [{"question": question, "answer": answer} for question, answer in zip(QUESTIONS, answers, strict=True)]
    (folder / "my_questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "my_questions.yaml").write_text(text_block("task: my_questions"), encoding="utf-8")
    return run


@needs("lm_eval", "lm-eval")
@pytest.mark.ci
@pytest.mark.parametrize("number", range(3), ids=["full", "merged", "adapter"])
def test_lm_eval_scores_saved_models(run, runs, start_model, number):
    """The merged model, and the adapter on its base, answer two of four questions as recorded. A full model loads."""
    command = text_block("lm_eval --model").splitlines()[number]
    words = shlex.split(command.replace("--tasks gsm8k", "--include_path . --tasks my_questions"))
    whole = {"full": runs["ppo", 1]}.get(["full", "merged", "adapter"][number], run)
    words = [word.replace("RUN", whole.as_posix()).replace("BASE", start_model.as_posix()) for word in words]
    run_in(run.parent, "-m", *words, "--device", "cpu", "--output_path", f"out{number}")
    (file,) = (run.parent / f"out{number}").rglob("results_*.json")
    result = json.loads(file.read_text(encoding="utf-8"))["results"]["my_questions"]
    score = next(value for name, value in result.items() if name.startswith("exact_match,"))
    if number > 0:
        assert score == 0.5
    assert 0 <= score <= 1


# --- GGUF ------------------------------------------------------------------------------------------------------------


@needs("convert_hf_to_gguf", "llama.cpp's converter")
@needs("gguf", "gguf")
@pytest.mark.ci
def test_merged_model_is_converted_to_gguf(tmp_path):
    """The file has the model's shape, tokenizer, chat template and weights. The tokenizer is of a kind that the
    converter accepts without knowing its hash."""
    import gguf

    merged = tmp_path / "RUN" / "merged"
    tokenizer = mistral_tokenizer()
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config("tiny", len(tokenizer))).save_pretrained(merged)
    tokenizer.save_pretrained(merged)
    (command,) = text_block("convert_hf_to_gguf.py").splitlines()
    words = shlex.split(command)
    assert words[0] == "convert_hf_to_gguf.py"
    run_in(tmp_path, "-m", "convert_hf_to_gguf", *words[1:])
    reader = gguf.GGUFReader(merged / "model.gguf")
    config = json.loads((merged / "config.json").read_text(encoding="utf-8"))

    def field(name: str):
        return reader.fields[name].contents()

    assert field("general.architecture") == "llama"
    assert field("llama.block_count") == config["num_hidden_layers"]
    assert field("llama.embedding_length") == config["hidden_size"]
    assert field("tokenizer.ggml.tokens")[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert field("tokenizer.ggml.eos_token_id") == tokenizer.eos_token_id
    assert field("tokenizer.chat_template") == tokenizer.chat_template
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    weights = load_file(merged / "model.safetensors")
    same = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
    }
    for name, there in same.items():
        assert np.allclose(found[name].astype(np.float32), weights[there].float().numpy(), atol=2e-3), name


def test_commands_of_the_page_have_names_of_a_run():
    """The page's commands differ from the tested ones only in the names of folders and tasks."""
    lines = [
        line for block in blocks(PAGE, "text") for line in block.splitlines() if re.match(r"(lm_eval|convert)", line)
    ]
    assert len(lines) == 4 and all("RUN" in line for line in lines)
    assert all(",dtype=float32 " in line for line in lines if line.startswith("lm_eval")), "the same for every model"
