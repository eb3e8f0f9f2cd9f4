"""Tests of sampling: random numbers by (seed, update, purpose, episode), top-k and top-p, masks, and the KL."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from rlhf.data.chat_template import encode_prompt
from rlhf.data.prompts import Prompt
from rlhf.data.row import Example
from rlhf.data.tokenizer import load_tokenizer
from rlhf.models.actor_critic import ActorCritic, with_value_head
from rlhf.models.packing import PackedMicroBatch
from rlhf.models.reference import Reference
from rlhf.rollout.engine import sample_completions
from rlhf.rollout.sampling import (
    pack_bits,
    sample_inverse_cdf,
    sample_tokens,
    top_k_top_p_mask,
    uniform_noise,
    unpack_bits,
)
from rlhf.rollout.stopping import StoppingCriterion
from rlhf.settings.training import SamplingSettings
from rlhf.trainer.passes import ForwardPasses

CPU = torch.device("cpu")


def sampling_settings(length: int, temperature: float, top_k: int = 0, top_p: float = 1.0) -> SamplingSettings:
    return SamplingSettings(length, temperature, top_k, top_p)


@pytest.fixture(scope="module")
def tokenizer(start_model):
    return load_tokenizer(str(start_model))


@pytest.fixture
def policy(start_model):
    return AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32).eval()


def make_prompts(tokenizer, *questions: str) -> list[Prompt]:
    examples = [Example(messages=({"role": "user", "content": q},)) for q in questions]
    return [Prompt(tuple(encode_prompt(tokenizer, e.messages)), e) for e in examples]


def sample(policy, tokenizer, prompts, episodes, sampling, seed=1):
    noise = uniform_noise(seed, 3, "rollout", episodes, sampling.max_new_tokens)
    eos = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    return sample_completions(policy, prompts, noise, sampling, eos=eos, pad=pad, device=CPU)


@pytest.mark.parametrize("top_p", [0.5, 0.9])
@pytest.mark.parametrize("spread", [0.1, 2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nucleus_equals_that_of_a_full_sort(dtype, spread, top_p):
    """Small and large nuclei; bfloat16 logits have many equal probabilities at the edge. Bad rows have no nucleus."""
    logits = torch.randn(16, 3_000, generator=torch.Generator().manual_seed(0)).mul(spread).to(dtype).float()
    logits[1, 5], logits[2], logits[3, 7] = torch.nan, -torch.inf, torch.inf
    probabilities = logits.softmax(-1)
    ordered, order = probabilities.sort(dim=-1, descending=True)
    expected = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, ordered.cumsum(-1) - ordered < top_p)
    assert torch.equal(top_k_top_p_mask(logits, 0, top_p), expected)
    assert expected[0].any() and not expected[1:4].any()


def test_completion_does_not_depend_on_its_batch(policy, tokenizer):
    prompts = make_prompts(tokenizer, "the cat", "what is the capital of France, and on which river does it lie?")
    sampling = sampling_settings(12, 1.0)
    together = sample(policy, tokenizer, prompts, [7, 8], sampling)
    for i, episode in enumerate((7, 8)):
        alone = sample(policy, tokenizer, prompts[i : i + 1], [episode], sampling)
        length = alone.completion_lengths[0]
        assert together.completion_ids[i, :length].tolist() == alone.completion_ids[0, :length].tolist()


def test_seed_update_purpose_and_episode_each_change_the_random_numbers():
    base = uniform_noise(1, 2, "rollout", [3], 5)
    others = [uniform_noise(9, 2, "rollout", [3], 5), uniform_noise(1, 9, "rollout", [3], 5),
              uniform_noise(1, 2, "evaluate", [3], 5), uniform_noise(1, 2, "rollout", [9], 5)]  # fmt: skip
    assert all((base != other).all() for other in others)
    assert_close(base, uniform_noise(1, 2, "rollout", [3], 5))


def test_inverse_cdf_sampling_follows_the_distribution():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().repeat(1000, 1)
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    assert torch.bincount(sample_inverse_cdf(logits, uniform)).tolist() == [500, 300, 200]


def test_inverse_cdf_sampling_never_returns_a_filtered_token():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).repeat(3, 1)
    assert sample_inverse_cdf(logits, torch.tensor([0.0, 0.5, 1 - 1e-16], dtype=torch.float64)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("bad", [[torch.nan, 0, 0], [torch.inf, 0, 0], [-torch.inf] * 3], ids=str)
@pytest.mark.parametrize("limits", [(0, 1.0), (2, 1.0), (0, 0.5)], ids=str)
def test_a_row_that_is_no_distribution_has_no_token_and_changes_no_other_row(bad, limits):
    good = torch.tensor([0.5, 0.3, 0.2]).log()
    logits = torch.stack([good, torch.tensor(bad), good])
    uniform = torch.tensor([0.1, 0.5, 0.7], dtype=torch.float64)
    found, _ = sample_tokens(logits, uniform, sampling_settings(1, 1.0, *limits))
    alone, _ = sample_tokens(logits[[0, 2]], uniform[[0, 2]], sampling_settings(1, 1.0, *limits))
    assert found[[0, 2]].tolist() == alone.tolist() and found[1] >= 3


def test_allowed_tokens_match_values_computed_by_hand():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert top_k_top_p_mask(logits, 0, 0.8).tolist() == [[True, True, False, False]], "0.5 + 0.3 is enough for 0.8"
    assert top_k_top_p_mask(logits, 0, 0.81).tolist() == [[True, True, True, False]]
    assert top_k_top_p_mask(logits, 0, 0.1).tolist() == [[True, False, False, False]], (
        "the most likely token is always allowed"
    )
    assert top_k_top_p_mask(logits, 1, 1.0).tolist() == [[True, False, False, False]]
    assert top_k_top_p_mask(logits, 0, 1.0).all()
    # top-k is applied first: the first of {0.5, 0.3} has 0.625 of their probability
    assert top_k_top_p_mask(logits, 2, 0.6).tolist() == [[True, False, False, False]]


@pytest.mark.parametrize("size", [1, 8, 13, 400])
def test_unpack_bits_reverses_pack_bits(size):
    flags = torch.rand(3, 2, size) < 0.5
    assert torch.equal(unpack_bits(pack_bits(flags), size), flags)


def test_mask_ends_with_the_first_eos():
    mask, ended = StoppingCriterion([2]).mask(torch.tensor([[5, 2, 0, 2], [5, 5, 5, 5], [2, 0, 0, 0]]))
    assert mask.tolist() == [[True, True, False, False], [True] * 4, [True, False, False, False]]
    assert ended.tolist() == [True, False, True]


def test_sampled_pad_token_does_not_end_a_completion():
    """The pad token is in the vocabulary and can be sampled, so masks must not be computed as `ids != pad`."""
    mask, _ = StoppingCriterion([2]).mask(torch.tensor([[5, 0, 5, 2]]))
    assert mask.all()


def expected_kl(policy, other, tokenizer, prompt, sampling) -> float:
    """Return the exact KL of the first token's sampling distribution from `policy` to `other`."""
    ids = torch.tensor([prompt.ids])
    with torch.no_grad():
        p, q = (m(ids).logits[:, -1] / sampling.temperature for m in (policy, other))
    allowed = top_k_top_p_mask(p, sampling.top_k, sampling.top_p)
    p, q = (x.masked_fill(~allowed, -torch.inf).log_softmax(-1)[allowed] for x in (p, q))
    return float((p.exp() * (p - q)).sum())


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_kl_is_that_of_the_sampling_distributions(policy, tokenizer, start_model, top_p):
    """The mean k1 over many samples must equal the exact KL to a different reference model. It would be wrong, and
    could be negative, if log-probs came from the full softmax although tokens are sampled with top-p."""
    other = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in (*policy.parameters(), *other.parameters()):
            weight.add_(0.2 * torch.randn_like(weight))
    actor_critic = ActorCritic(with_value_head(policy))
    reference = Reference.before_training(policy, None)
    reference.copy = other
    prompt = make_prompts(tokenizer, "the cat")[0]
    sampling = sampling_settings(1, 0.7, 0, top_p)
    completions = sample(policy, tokenizer, [prompt] * 3000, range(3000), sampling)
    passes = ForwardPasses(actor_critic, reference, sampling.temperature, max_rows=500)
    logprobs, ref_logprobs, _ = passes.logprobs(completions)
    samples = (logprobs - ref_logprobs)[:, 0]
    exact = expected_kl(policy, other, tokenizer, prompt, sampling)
    assert exact > 0.05
    assert float(samples.mean()) == pytest.approx(exact, abs=4 * float(samples.std()) / 3000**0.5)


def test_padding_does_not_change_logprobs_or_values(policy, tokenizer):
    container = with_value_head(policy)
    torch.nn.init.normal_(container.v_head.summary.weight)
    actor_critic = ActorCritic(container)
    reference = Reference.before_training(policy, None)
    prompts = make_prompts(tokenizer, "the cat", "what is the capital of France, and on which river does it lie?")
    sampling = sampling_settings(10, 1.0, 0, 0.9)
    passes = ForwardPasses(actor_critic, reference, 1.0)
    together = passes.logprobs(sample(policy, tokenizer, prompts, [1, 2], sampling))
    for i in range(2):
        alone = passes.logprobs(sample(policy, tokenizer, prompts[i : i + 1], [1 + i], sampling))
        for whole, part in zip(together, alone, strict=True):
            assert_close(whole[i, : part.shape[1]], part[0], atol=1e-5, rtol=1e-5)


def test_entropy_matches_a_plain_forward_pass(policy, tokenizer):
    """The entropy is that of the full distribution at the same positions."""
    completions = sample(policy, tokenizer, make_prompts(tokenizer, "the cat"), [0], sampling_settings(4, 0.7))
    _, entropy, _ = ActorCritic(with_value_head(policy))(PackedMicroBatch(completions, [0]), 0.7, entropy="value")
    context = completions.prompt_ids.shape[1]
    with torch.no_grad():
        logp = (policy(completions.ids).logits[:, context - 1 : -1] / 0.7).log_softmax(-1)
    assert_close(entropy, -(logp.exp() * logp).sum(-1), atol=1e-5, rtol=1e-5)


# --- the search in two levels ----------------------------------------------------------------------------------------


def one_level(logits, uniform):
    """The reference: one search among cumulative float64 probabilities."""
    cumulative = logits.double().softmax(-1).cumsum(-1)
    return torch.searchsorted(cumulative, uniform.unsqueeze(1) * cumulative[:, -1:], right=True).squeeze(1)


@pytest.mark.parametrize("vocabulary", [3, 256, 768, 1000, 49_152])
def test_each_probability_is_exact_to_a_millionth(vocabulary):
    """The probability of a token is the length of the interval of random numbers that give it. Its ends are found by
    bisection of the sampler."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(1, vocabulary, generator=generator)
    likely = logits[0].topk(min(vocabulary, 20)).indices
    tokens = torch.cat([likely, torch.randint(vocabulary, (20,), generator=generator)])

    def first(token):
        """The smallest random number whose token is at least `token`."""
        low = torch.zeros(len(token), dtype=torch.float64)
        high = torch.ones(len(token), dtype=torch.float64)
        for _ in range(50):
            middle = (low + high) / 2
            beyond = sample_inverse_cdf(logits.expand(len(token), -1), middle) >= token
            low = torch.where(beyond, low, middle)
            high = torch.where(beyond, middle, high)
        return high

    found = first(tokens + 1) - first(tokens)
    assert_close(found, logits[0].double().softmax(-1)[tokens], rtol=1e-4, atol=1e-6)


@pytest.mark.ci
def test_few_tokens_change_compared_to_a_search_in_float64():
    """Only random numbers next to the end of an interval can give another token."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(1_000, 49_152, generator=generator)
    uniform = torch.rand(1_000, dtype=torch.float64, generator=generator)
    changed = float((sample_inverse_cdf(logits, uniform) != one_level(logits, uniform)).float().mean())
    print(f"share of changed tokens: {changed:.4%}")
    assert changed <= 0.002


def test_the_end_of_the_range_gives_the_last_possible_token():
    logits = torch.full((3, 1_000), -torch.inf)
    logits[:, 300] = logits[:, 700] = 0.0
    uniform = torch.tensor([0.0, 0.5 - 1e-9, 1 - 2**-53], dtype=torch.float64)
    assert sample_inverse_cdf(logits, uniform).tolist() == [300, 300, 700]


def test_no_float64_number_per_token_of_the_vocabulary():
    """Consumer GPUs compute float64 at 1/64 of the speed of float32."""
    largest = 0

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            nonlocal largest
            result = operator(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
                largest = max(largest, result.numel())
            return result

    logits = torch.randn(4, 49_152)
    uniform = torch.rand(4, dtype=torch.float64)
    with Recorder():
        sample_inverse_cdf(logits, uniform)
    assert 4 < largest <= 4 * 256
