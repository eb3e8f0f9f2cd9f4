"""Exports a run with SmolLM2-135M-Instruct's weights and an adapter, and generates from the file with llama.cpp."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

import export_model
import train_grpo
from rlhf.analysis.models import find_model_ref
from rlhf.data.chat_template import encode_prompt, render_chat
from rlhf.data.tokenizer import load_tokenizer
from rlhf.export.gguf import whole_model
from tests.export.test_gguf import FAMILIES, LLAMA3, LLAMA3_STEPS, SHAPE, put_model, put_tokenizer
from tests.real.conftest import QUESTIONS

pytestmark = pytest.mark.proof
LENGTH = 48
NEAR = 0.05  # of two logits: below this, rounding weights to 16 bits may exchange the two most likely tokens
LIMITS = {"f16": 0.003, "q8_0": 0.06}  # nats per token
TEXTS = ["In 2024, 1234567 + 89 = ?", "It's  a\n\n\ttest:\r\n naïve, 日本 🙂!", "def f(x):\n    return x ** 2"]
GENERATE = """
import json, sys
from llama_cpp import Llama
asked = json.load(sys.stdin)
model = Llama(asked["file"], n_ctx=512, n_threads=1, verbose=False, logits_all=True)
generated = []
for text in asked["prompts"]:
    ids = model.tokenize(text.encode(), add_bos=True, special=True)
    found = []
    for token in model.generate(ids, temp=0.0, repeat_penalty=1.0, min_p=0.0):
        found.append(token)
        if token == model.token_eos() or len(found) == asked["length"]:
            break
    generated.append([ids, found])
texts = [model.tokenize(text.encode(), add_bos=True, special=False) for text in asked["texts"]]
model.reset()
model.eval(asked["ids"])
logits = model.scores[:len(asked["ids"])].tolist()
json.dump({"generated": generated, "texts": texts, "metadata": model.metadata, "logits": logits}, sys.stdout)
"""


@pytest.fixture
def run(real_flags, large_folder):
    train_grpo.main(real_flags("--K", 2, "--batch-size", 2, "--use-lora", "--learning-rate", 1e-3))
    return large_folder / "run"


def greedy(model, prompt: list[int], eos: int) -> tuple[list[int], list[float]]:
    """Return the most likely tokens, and how far each of them is above the second most likely one."""
    ids = torch.tensor([prompt])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=LENGTH,
                          eos_token_id=eos, output_logits=True, return_dict_in_generate=True)  # fmt: skip
    best = torch.cat(made.logits).topk(2).values
    return made.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


@pytest.mark.parametrize("kind", LIMITS)
def test_log_probabilities_change_little(run, capsys, kind):
    export_model.main([str(run), "--to", "gguf", "--type", kind])
    mean = float(re.search(r"mean (\S+),", capsys.readouterr().out)[1])
    print(kind, mean)
    assert 0 < mean < LIMITS[kind]


def in_llama_cpp(python: str, file: Path, prompts: Sequence[str] = (), ids: Sequence[int] = (1,)) -> dict:
    """Return what llama.cpp generates after prompts, its token ids of TEXTS, and its logits of `ids`."""
    asked = {"file": str(file), "prompts": prompts, "texts": TEXTS, "length": LENGTH, "ids": ids}
    done = subprocess.run([python, "-c", GENERATE], input=json.dumps(asked), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_llama_cpp_generates_the_same_tokens(run, llama_python):
    """Of greedy sampling, up to the first near tie."""
    export_model.main([str(run), "--to", "gguf"])
    source = find_model_ref(str(run), "final", None, "run")
    tokenizer = load_tokenizer(source.source)
    model = whole_model(source, tokenizer)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [render_chat(tokenizer, chat, add_generation_prompt=True) for chat in chats]
    found = in_llama_cpp(llama_python, run / "gguf" / "run.gguf", prompts)
    assert found["texts"] == [tokenizer(text).input_ids for text in TEXTS]
    assert found["metadata"]["tokenizer.chat_template"] == tokenizer.chat_template
    equal = []
    for chat, (ids, tokens) in zip(chats, found["generated"], strict=True):
        assert ids == encode_prompt(tokenizer, chat)
        expected, gaps = greedy(model, ids, tokenizer.eos_token_id)
        same = next((i for i, pair in enumerate(zip(tokens, expected, strict=False)) if pair[0] != pair[1]), None)
        if same is None:
            assert tokens == expected
        else:
            assert gaps[same] < NEAR, f"token {same} of {chat}"
        equal.append(same is None)
    print("equal completions:", equal)
    assert sum(equal) > len(QUESTIONS) / 2


@pytest.mark.parametrize("family", [*FAMILIES, "llama-3"])
def test_llama_cpp_computes_the_same_logits(runs, llama_python, tmp_path, family):
    """Of tiny models with random weights, large enough that the positions matter: without Llama 3's rope scaling, the
    logits differ by 1."""
    folder = Path(shutil.copytree(runs["ppo", 1], tmp_path / "run"))
    model = put_model(folder, FAMILIES.get(family) or LlamaConfig(**SHAPE, rope_parameters=LLAMA3))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.ndim == 2 else 1)
    model.save_pretrained(folder)
    if family == "llama-3":
        put_tokenizer(folder, LLAMA3_STEPS)
    export_model.main([str(folder), "--to", "gguf"])
    ids = [(7 * i) % 400 for i in range(200)]
    found = in_llama_cpp(llama_python, folder / "gguf" / "run.gguf", ids=ids)
    assert found["texts"] == [load_tokenizer(str(folder))(text).input_ids for text in TEXTS]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    difference = (torch.tensor(found["logits"]) - expected).abs().max()
    print(family, float(difference), float(expected.std()))
    assert difference < 0.05 < expected.std() / 4
