"""SmolLM2-135M-Instruct as a base model: plain prompts after worked examples, and stop strings."""

from __future__ import annotations

import json

import pytest
import torch

import train_grpo
from rlhf.checkpoints.run_record import RunRecord
from rlhf.data.chat_template import encode_prompt
from rlhf.data.prompts import ids_alone
from rlhf.data.tokenizer import load_tokenizer
from rlhf.rollout.engine import sample_completions
from rlhf.rollout.sampling import uniform_noise
from rlhf.rollout.stopping import stopping_criterion
from rlhf.settings.training import SamplingSettings
from tests.real.conftest import QUESTIONS

pytestmark = pytest.mark.ci
LENGTH = 32
STOP = ("\n\nQuestion:", ".\n")
SHOTS = [
    {"role": "user", "content": "Question: What is 2 plus 3?\nAnswer:"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "Question: Is the sun cold?\nAnswer:"},
    {"role": "assistant", "content": "No."},
]


def test_greedy_completions_with_stop_strings_equal_generate(smollm2, plain_model):
    """transformers searches its stop strings in another way. Both keep the whole token that completes one."""
    tokenizer = load_tokenizer(str(smollm2), plain=True)
    asked = [[{"role": "user", "content": f"Question: {question}\nAnswer:"}] for question in QUESTIONS]
    prompts = [encode_prompt(tokenizer, messages, SHOTS) for messages in asked]
    found = sample_completions(
        plain_model, [ids_alone(p) for p in prompts], uniform_noise(1, 1, "rollout", range(8), LENGTH),
        SamplingSettings(LENGTH, 0.7, top_k=1), eos=stopping_criterion(tokenizer, STOP), pad=0,
        device=torch.device("cpu"), slots=5,
    )  # fmt: skip
    expected = []
    for prompt in prompts:
        whole = plain_model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=LENGTH, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=0, stop_strings=list(STOP), tokenizer=tokenizer,
        )  # fmt: skip
        expected.append(whole[0, len(prompt) :].tolist())
    assert found.rows() == expected
    texts = found.texts(tokenizer)
    assert sum(found.ended.tolist()) > 4 and not any(stop in text for text in texts for stop in STOP)


def test_run_of_a_base_model(smollm2, large_folder, capsys):
    """One GRPO update with adapters. Every completion that ended has an answer without the stop string."""
    rows = [{"prompt": f"Question: What is {a} plus {b}?\nAnswer:", "answer": str(a + b)}
            for a in range(2, 6) for b in range(2, 8)]  # fmt: skip
    shots = [{"prompt": "Question: What is 2 plus 1?\nAnswer:", "answer": "3"}]
    for name, given in (("prompts", rows), ("shots", shots)):
        (large_folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    words = [
        *("--actor-model", smollm2, "--plain-prompts", "--prompts", large_folder / "prompts.jsonl", "--use-lora"),
        *("--few-shot", large_folder / "shots.jsonl", "--stop", "\n", "--rm-model", "none"),
        *("--reward-func", "exact_match", "--output", large_folder / "run", "--num-iterations", 1),
        *("--batch-size", 2, "--K", 4, "--max-new-tokens", 12, "--eval-prompts", 4, "--ppo-epochs", 1),
    ]
    train_grpo.main([str(word) for word in words])
    record = RunRecord.read(large_folder / "run")
    assert record.status == "finished" and record.figures["eos_rate_before"] > 0.5
    files = list((large_folder / "run" / "samples").glob("update-*.jsonl"))
    samples = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert samples and not any("\n" in one["completion"] for one in samples)
