"""Rollout engines against the plain one: the same replies, whoever sits beside them and whenever they get a slot."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from rlhf.algorithms import objectives
from rlhf.data.examples import Example
from rlhf.data.prompts import Prompt
from rlhf.models.actor_critic import Actor
from rlhf.models.device import autocast
from rlhf.rollout import continuous_batching
from rlhf.rollout.cpu_weights import prepacked_weights, supports_prepacking
from rlhf.rollout.engine import default_engine, sample_completions
from rlhf.rollout.sampling import uniform_noise
from rlhf.settings.training import SamplingSettings
from rlhf.utils.errors import UserError
from tests.models.test_packing import CONFIGS, make_model

CPU = torch.device("cpu")
EOS = 2


@pytest.fixture(params=CONFIGS, ids=lambda name: name.split(",")[0])
def model(request):
    return make_model(request.param, seed=3)


def prompts(count=9):
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 60, (n % 7 + 1,), generator=draw).tolist() for n in range(count)]
    ids[4] = ids[3]  # two replies to one prompt
    return [Prompt(tuple(i), Example(({"role": "user", "content": ""},))) for i in ids]


def sample(model, engine, slots=0, given=None, length=14, episodes=None, **limits):
    given = given or prompts()
    noise = uniform_noise(1, 2, "rollout", episodes or range(len(given)), length)
    sampling = SamplingSettings(length, 1.0, **limits)
    return sample_completions(model, given, noise, sampling, eos=EOS, pad=0, device=CPU, engine=engine, slots=slots)


def make_eos_likely(model):
    """Every token is nearly as likely as any other, EOS eight times."""
    head = model.get_output_embeddings()
    model.set_output_embeddings(Biased(head))


class Biased(torch.nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, hidden):
        logits = self.head(hidden)
        logits[..., EOS] += 1.5
        return logits


@pytest.mark.parametrize("slots", [1, 3, 9])
@pytest.mark.parametrize("limits", [{}, {"top_k": 20, "top_p": 0.8}], ids=["free", "filtered"])
def test_continuous_batching_samples_the_plain_completions(model, slots, limits):
    """Float64: the same tokens, although rows leave, others take their slots, and the batch shrinks at the end."""
    make_eos_likely(model)
    plain, slotted = sample(model, "plain", **limits), sample(model, "slots", slots, **limits)
    assert slotted.rows() == plain.rows()
    assert len({len(row) for row in plain.rows()}) > 3, "replies of unlike length, or this shows nothing"
    assert torch.equal(slotted.mask, plain.mask) and torch.equal(slotted.ended, plain.ended)
    if limits:
        assert torch.equal(slotted.allowed_tokens[plain.mask], plain.allowed_tokens[plain.mask])


def test_one_by_one_is_all_together(model):
    make_eos_likely(model)
    together = sample(model, "slots", 4).rows()
    alone = [sample(model, "slots", 1, [p], episodes=[e]).rows()[0] for e, p in enumerate(prompts())]
    assert alone == together


def test_a_prompt_of_several_replies_runs_once(model, monkeypatch):
    lengths, run = [], continuous_batching.run_packed
    monkeypatch.setattr(
        continuous_batching, "run_packed", lambda b, ids, *a: lengths.append(ids.shape[1]) or run(b, ids, *a)
    )
    given = [prompts()[6]] * 5
    sample(model, "slots", 5, given)
    assert lengths == [len(given[0].ids)]


def test_steps_are_saved(model, monkeypatch):
    """With three slots for nine prompts, the steps are about those of the tokens written, not of the longest row."""
    make_eos_likely(model)
    steps, decode = [], continuous_batching.ContinuousBatcher._decode
    monkeypatch.setattr(
        continuous_batching.ContinuousBatcher,
        "_decode",
        lambda self, span: steps.append(len(self.token)) or decode(self, span),
    )
    completions = sample(model, "slots", 3, length=60)
    written, longest = sum(completions.completion_lengths), max(completions.completion_lengths)
    assert sum(steps) < 1.5 * written, "slots that stepped, against tokens"
    assert sum(steps) < 0.6 * 3 * 3 * longest


def test_a_reply_of_one_token_and_no_eos(model):
    completions = sample(model, "slots", 2, length=1)
    assert completions.completion_lengths == [1] * 9 and completions.rows() == sample(model, "plain", length=1).rows()


def test_log_probs_of_both_agree_in_float32(model):
    """On the way a decoder sees each token over its cache; the training forward sees all at once."""
    model.float()
    completions = sample(model, "slots", 3)
    with torch.no_grad():
        packed, _, _ = Actor(model)(completions.micro_batch(range(9), True), 1.0)
        padded, _, _ = Actor(model)(completions.micro_batch(range(9), False), 1.0)
    assert_close(packed, padded, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_in_blocks_multiply_as_the_layers_do(model, dtype):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    model, ids = model.float(), torch.arange(3, 19).unsqueeze(0)
    layers = [m for m in model.modules() if type(m) is torch.nn.Linear]
    with torch.no_grad(), autocast(CPU, dtype):
        plain = model(ids).logits
        with prepacked_weights(model, 16, CPU):
            changed = ["forward" in vars(layer) for layer in layers]
            assert changed == [supports_prepacking(dtype or torch.float32)] * len(layers) != []
            blocked = model(ids).logits
    assert not any("forward" in vars(layer) for layer in layers), "layers are themselves again"
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype is None else {"rtol": 0.02, "atol": 0.02}
    assert_close(blocked, plain, **near)


@pytest.mark.parametrize("flags", [(), ("--bf16",), ("--use-lora", "--bf16"), ("--use-lora", "--load-in-4bit")])
def test_decoding_on_a_processor_is_by_blocks(build, monkeypatch, flags):
    """While a rollout samples, and in none of the passes around it."""
    trainer, seen = build("--num-iterations", 1, *flags), []
    layers = [m for m in trainer.actor.policy.modules() if type(m) is torch.nn.Linear]
    decode = continuous_batching.ContinuousBatcher._decode

    def watched(desk, span):
        seen.append(sum("forward" in vars(layer) for layer in layers))
        decode(desk, span)

    monkeypatch.setattr(continuous_batching.ContinuousBatcher, "_decode", watched)
    trainer.update_step(1)
    blocks = supports_prepacking(torch.bfloat16 if "--bf16" in flags else torch.float32)
    assert seen and set(seen) == {len(layers) if blocks else 0}
    assert not any("forward" in vars(layer) for layer in layers)


def test_layers_are_themselves_again_after_a_fault(model):
    model = model.float()
    with pytest.raises(RuntimeError), prepacked_weights(model, 16, CPU):
        raise RuntimeError
    assert not any("forward" in vars(m) for m in model.modules())


def test_the_engine_by_device(model):
    assert default_engine(model, CPU) == "slots"
    assert default_engine(model, torch.device("cuda")) == "graph"
    model._supports_attention_backend = False
    assert default_engine(model, torch.device("cuda")) == "plain"


def test_an_engine_that_cannot_be_had_is_said_before_training(build):
    with pytest.raises(UserError, match="require a CUDA GPU"):
        build("--rollout-engine", "graph")


def test_an_engine_that_cannot_be_had_is_a_line(model):
    with pytest.raises(UserError, match="require a CUDA GPU: --rollout-engine graph"):
        sample(model, "graph")
    model._supports_attention_backend = False
    with pytest.raises(UserError, match="cannot be replaced: --rollout-engine slots"):
        sample(model, "slots")
    assert sample(model, "auto").rows() == sample(model, "plain").rows()


# --- vLLM ------------------------------------------------------------------------------------------------------------


class StandIn:
    """In place of TRL's VLLMGeneration: our own replies, with log-probs that are half a nat too low."""

    def __init__(self, policy, accelerator, tokenizer, **settings):
        self.policy, self.tokenizer, self.settings, self.synced = policy, tokenizer, settings, 0

    def sync_weights(self):
        self.synced += 1

    def generate(self, prompts, images, num_generations):
        given = [Prompt(tuple(p), Example(({"role": "user", "content": ""},))) for p in prompts]
        length, temperature = self.settings["max_completion_length"], self.settings["temperature"]
        noise = uniform_noise(9, self.synced, "vllm", range(len(given)), length)
        eos = self.tokenizer.eos_token_id
        completions = sample_completions(
            self.policy, given, noise, SamplingSettings(length, temperature), eos=eos, pad=0, device=CPU
        )
        with torch.no_grad():
            logprobs, _, _ = Actor(self.policy)(completions.micro_batch(range(len(given)), True), temperature)
        rows = completions.rows()
        text = [[[float(p) - 0.5] for p in row[: len(ids)]] for row, ids in zip(logprobs, rows, strict=True)]
        return prompts, rows, text, None


def test_vllm_samples_and_the_loss_is_corrected_for_its_probabilities(build, monkeypatch):
    monkeypatch.setattr("trl.generation.vllm_generation.VLLMGeneration", StandIn)
    monkeypatch.setattr("rlhf.rollout.vllm.is_installed", lambda: True)
    trainer = build("--rollout-engine", "vllm", "--num-iterations", 2, "--ppo-epochs", 1)
    seen = []
    trainer.add_callback(type("Ear", (), {"on_batch": lambda _, update, batch, scored: seen.append(batch)})())
    metrics = trainer.train()
    assert trainer.collector.vllm.generation.synced == 2, "before each rollout; evaluations sample with our own engine"
    for batch in seen:
        plain = objectives.whiten(batch.raw_advantages, batch.mask)
        expected = plain * torch.where(batch.mask, 0.5, 0.0).exp()
        assert_close(batch.advantages[batch.mask], expected[batch.mask], rtol=1e-4, atol=1e-5)
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-3), "the ratio is against the training forward"


def test_without_vllm_the_flag_is_a_line(build):
    with pytest.raises(UserError, match="vLLM is not installed: --rollout-engine vllm"):
        build("--rollout-engine", "vllm")


def test_vllm_and_a_filter_are_refused(configured):
    with pytest.raises(UserError, match="which tokens a filter let through"):
        configured("--rollout-engine", "vllm", "--top-p", "0.9")
