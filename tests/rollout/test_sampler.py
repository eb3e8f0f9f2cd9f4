"""Tests of the sampler: its streams of random numbers, and the copies of the weights that it keeps."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf.data.prompts import ids_alone
from rlhf.rollout import continuous_batching
from rlhf.rollout.sampler import Sampler
from rlhf.rollout.sampling import uniform_noise
from rlhf.rollout.vllm import VLLMEngine
from rlhf.settings.training import SamplingSettings
from tests.models.test_llama import CONFIGS
from tests.rollout.test_engine import CPU, EOS
from tests.rollout.test_kept_graphs import change

SAMPLING = SamplingSettings(max_new_tokens=12)
PROMPTS = [ids_alone(range(3, 6 + row % 3)) for row in range(6)]


@pytest.fixture
def model():
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()


@pytest.fixture
def sampler(model):
    return Sampler(model, SAMPLING, EOS, 0, CPU)


@pytest.fixture
def copies(monkeypatch):
    """Return a list with one entry per decoder that copied the weights."""
    made = []
    make = continuous_batching.make_decoder
    monkeypatch.setattr(continuous_batching, "make_decoder", lambda *a, **k: made.append(1) or make(*a, **k))
    return made


def test_each_part_of_the_name_gives_other_completions(sampler):
    def rows(seed=1, update=2, purpose="a", **more):
        return sampler.sample(PROMPTS, seed, update, purpose, **more).rows()

    base = rows()
    assert rows() == base == rows(episodes=range(6)) and rows(episodes=[5, 4, 3, 2, 1, 0]) != base
    others = [rows(seed=2), rows(update=3), rows(purpose="b"), rows(first=[1] * 6)]
    assert all(other != base for other in others)


def test_a_later_turn_continues_its_stream_of_random_numbers():
    whole = uniform_noise(1, 2, "rollout", [7, 9], 10)
    assert torch.equal(uniform_noise(1, 2, "rollout", [7, 9], 6, first=[4, 4]), whole[:, 4:])


def test_settings_of_a_call_replace_those_of_the_sampler(sampler):
    greedy = SamplingSettings(max_new_tokens=3, top_k=1)
    first, second = (sampler.sample(PROMPTS, seed, 0, "a", sampling=greedy) for seed in (1, 2))
    assert first.rows() == second.rows() and max(first.completion_lengths) <= 3
    assert max(sampler.sample(PROMPTS, 1, 0, "a").completion_lengths) > 3


def test_one_call_samples_all_rows_unless_they_take_memory(model):
    """Masks of allowed tokens, or the cache of an engine without slots."""
    top_p = SamplingSettings(max_new_tokens=12, top_p=0.9)
    sampler = Sampler(model, SAMPLING, EOS, 0, CPU, slots=4)
    assert sampler.calls(range(10)) == [range(10)]
    assert sampler.calls(range(10), top_p) == [range(4), range(4, 8), range(8, 10)]
    plain = Sampler(model, SAMPLING, EOS, 0, CPU, slots=4, engine="plain")
    assert plain.calls(range(10)) == [range(4), range(4, 8), range(8, 10)]


def test_weights_are_copied_once_while_they_do_not_change(sampler, model, copies):
    parts = [PROMPTS[:4], [ids_alone(range(3, 20))], PROMPTS[4:]]  # a longer prompt, then a smaller part
    sampler.kept.columns = 20 + SAMPLING.max_new_tokens

    def rows():
        return [sampler.sample(part, 1, 2, "a").rows() for part in parts]

    apart = rows()
    assert len(copies) == 3
    with sampler.same_weights():
        together = rows()
    assert together == apart and len(copies) == 4
    change(model, 3)
    with sampler.same_weights():
        changed = rows()
    assert changed == rows() and changed != apart, "the present weights"
    assert len(copies) == 8 and sampler.kept.decoder is None


def test_a_longer_text_than_expected_is_copied_for_again(sampler, copies):
    with sampler.same_weights():
        found = [sampler.sample([ids_alone(range(3, length))], 1, 2, "a").rows() for length in (5, 40)]
    assert len(copies) == 2
    assert found == [sampler.sample([ids_alone(range(3, length))], 1, 2, "a").rows() for length in (5, 40)]


@pytest.mark.parametrize("asked", [{"first": [1] * 6}, {"sampling": SamplingSettings(max_new_tokens=3)}])
def test_vllm_refuses_what_it_cannot_be_given_per_call(asked):
    engine = object.__new__(VLLMEngine)
    engine.sampling = SAMPLING
    with pytest.raises(ValueError):
        engine.sample(PROMPTS, 1, 2, "rollout", **asked)
