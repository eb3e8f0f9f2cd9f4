"""Tests of the rollout engines: each samples the same completions as the plain engine, for any batch and any slots."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import train_ppo
from rlhf.algorithms import objectives
from rlhf.checkpoints.run_record import RunRecord
from rlhf.data.prompts import Prompt
from rlhf.data.row import Example
from rlhf.models.actor_critic import Actor
from rlhf.models.device import autocast
from rlhf.models.packing import PackedMicroBatch, PaddedMicroBatch
from rlhf.rollout import continuous_batching
from rlhf.rollout.choice import choose_engine
from rlhf.rollout.continuous_batching import ContinuousBatcher, OutOfMemoryInCapture
from rlhf.rollout.cpu_weights import prepacked_weights, supports_prepacking
from rlhf.rollout.decoder import FusedDecoder, ModelDecoder
from rlhf.rollout.engine import KeptBatcher, default_engine, sample_completions
from rlhf.rollout.sampling import BadLogits, uniform_noise
from rlhf.rollout.stopping import StoppingCriterion
from rlhf.settings.training import SamplingSettings
from rlhf.utils.errors import RunError
from tests.models.test_packing import CONFIGS, make_model

CPU = torch.device("cpu")
EOS = 2


@pytest.fixture(params=CONFIGS, ids=lambda name: name.split(",")[0])
def model(request):
    return make_model(request.param, seed=3)


def prompts(count=9):
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 60, (n % 7 + 1,), generator=draw).tolist() for n in range(count)]
    ids[4] = ids[3]  # two completions of one prompt
    return [Prompt(tuple(i), Example(({"role": "user", "content": ""},))) for i in ids]


def sample(model, engine, slots=0, batch=None, length=14, episodes=None, **limits):
    batch = batch or prompts()
    noise = uniform_noise(1, 2, "rollout", episodes or range(len(batch)), length)
    sampling = SamplingSettings(length, 1.0, **limits)
    return sample_completions(model, batch, noise, sampling, eos=EOS, pad=0, device=CPU, engine=engine, slots=slots)


def make_eos_likely(model):
    """Adds 1.5 to the logit of EOS, so that completions have different lengths."""
    head = model.get_output_embeddings()
    model.set_output_embeddings(HeadWithLikelyEos(head))


class HeadWithLikelyEos(torch.nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, hidden):
        logits = self.head(hidden)
        logits[..., EOS] += 1.5
        return logits


def test_many_slots_sample_the_same_completions(slots=1_024):
    """With more waiting prompts than slots, so that slots are used again."""
    small = make_model(next(iter(CONFIGS)), seed=3)
    make_eos_likely(small)
    batch = prompts(1_200)
    assert sample(small, "slots", slots, batch).rows() == sample(small, "slots", 64, batch).rows()


@pytest.mark.parametrize("slots", [pytest.param(1, marks=pytest.mark.ci), 3, pytest.param(9, marks=pytest.mark.ci)])
@pytest.mark.parametrize("limits", [{}, {"top_k": 20, "top_p": 0.8}], ids=["free", "filtered"])
def test_continuous_batching_samples_the_same_completions_as_plain(model, slots, limits):
    """In float64 the tokens are the same, although slots are refilled and the batch shrinks at the end."""
    make_eos_likely(model)
    plain = sample(model, "plain", **limits)
    slotted = sample(model, "slots", slots, **limits)
    assert slotted.rows() == plain.rows()
    assert len({len(row) for row in plain.rows()}) > 3, "the completions must have different lengths"
    assert torch.equal(slotted.mask, plain.mask) and torch.equal(slotted.ended, plain.ended)
    if limits:
        assert torch.equal(slotted.allowed_tokens[plain.mask], plain.allowed_tokens[plain.mask])


def test_sampling_prompts_one_by_one_gives_the_same_completions(model):
    make_eos_likely(model)
    together = sample(model, "slots", 4).rows()
    alone = [sample(model, "slots", 1, [p], episodes=[e]).rows()[0] for e, p in enumerate(prompts())]
    assert alone == together


def test_prompt_of_several_completions_is_prefilled_once(model, monkeypatch):
    lengths = []
    run = continuous_batching.run_packed
    monkeypatch.setattr(
        continuous_batching, "run_packed", lambda b, ids, *a: lengths.append(ids.shape[1]) or run(b, ids, *a)
    )
    batch = [prompts()[6]] * 5
    sample(model, "slots", 5, batch)
    assert lengths == [len(batch[0].ids)]


def test_refilled_slots_save_decoding_steps(model, monkeypatch):
    """With 3 slots for 9 prompts, the work depends on the number of tokens, not on the longest completion."""
    make_eos_likely(model)
    steps = []
    decode = continuous_batching.ContinuousBatcher._decode
    monkeypatch.setattr(
        continuous_batching.ContinuousBatcher,
        "_decode",
        lambda self, span: steps.append(len(self.slots.token)) or decode(self, span),
    )
    completions = sample(model, "slots", 3, length=60)
    tokens = sum(completions.completion_lengths)
    longest = max(completions.completion_lengths)
    assert sum(steps) < 1.5 * tokens, "too many slots decode without a token of a completion"
    assert sum(steps) < 0.6 * 3 * 3 * longest


def test_completions_of_one_token(model):
    completions = sample(model, "slots", 2, length=1)
    assert completions.completion_lengths == [1] * 9 and completions.rows() == sample(model, "plain", length=1).rows()


def test_packed_and_padded_logprobs_agree_in_float32(model):
    """Compares the packed with the padded forward pass, over completions of continuous batching."""
    model.float()
    completions = sample(model, "slots", 3)
    with torch.no_grad():
        packed, _, _ = Actor(model)(PackedMicroBatch(completions, range(9)), 1.0)
        padded, _, _ = Actor(model)(PaddedMicroBatch(completions, range(9)), 1.0)
    assert_close(packed, padded, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_prepacked_weights_give_the_same_logits(model, dtype):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    model = model.float()
    ids = torch.arange(3, 19).unsqueeze(0)
    layers = [m for m in model.modules() if type(m) is torch.nn.Linear]
    with torch.no_grad(), autocast(CPU, dtype):
        plain = model(ids).logits
        with prepacked_weights(model, 16, CPU):
            changed = ["forward" in vars(layer) for layer in layers]
            assert changed == [supports_prepacking(dtype or torch.float32)] * len(layers) != []
            prepacked = model(ids).logits
    assert not any("forward" in vars(layer) for layer in layers), "the layers must be restored"
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is None else {"rtol": 0.02, "atol": 0.02}
    assert_close(prepacked, plain, **tolerance)


@pytest.mark.parametrize(
    ("flags", "decoder"),
    [
        ((), FusedDecoder),
        (("--bf16",), FusedDecoder),
        (("--use-lora",), FusedDecoder),
        (("--use-lora", "--bf16"), FusedDecoder),
        (("--use-lora", "--load-in-4bit"), ModelDecoder),
    ],
)
def test_decoding_on_the_cpu_uses_copied_weights(build, monkeypatch, flags, decoder):
    """Copies are used while a rollout is sampled, and in no other forward pass."""
    trainer = build("--num-iterations", 1, *flags)
    found = []
    layers = [m for m in trainer.actor.policy.modules() if type(m) is torch.nn.Linear]
    decode = continuous_batching.ContinuousBatcher._decode

    def recorded(batcher, span):
        found.append((type(batcher.decoder), sum("forward" in vars(layer) for layer in layers)))
        decode(batcher, span)

    monkeypatch.setattr(continuous_batching.ContinuousBatcher, "_decode", recorded)
    trainer.update_step(1)
    replaced = decoder is ModelDecoder and supports_prepacking(torch.bfloat16 if "--bf16" in flags else torch.float32)
    assert found and set(found) == {(decoder, len(layers) if replaced else 0)}
    assert not any("forward" in vars(layer) for layer in layers)


def test_prepacked_layers_are_restored_after_an_error(model):
    model = model.float()
    with pytest.raises(RuntimeError), prepacked_weights(model, 16, CPU):
        raise RuntimeError
    assert not any("forward" in vars(m) for m in model.modules() if type(m) is torch.nn.Linear)


def test_random_numbers_beyond_the_longest_completion_are_not_used(model):
    short = sample(model, "slots", 4, length=8).rows()
    noise = uniform_noise(1, 2, "rollout", range(9), 14)
    sampling = SamplingSettings(8, 1.0)
    found = sample_completions(model, prompts(), noise, sampling, eos=EOS, pad=0, device=CPU, engine="slots", slots=4)
    assert found.rows() == short


def test_default_engine_depends_on_device_and_model(model):
    assert default_engine(model, CPU) == "slots"
    assert default_engine(model, torch.device("cuda")) == "graph"
    model._supports_attention_backend = False
    assert default_engine(model, torch.device("cuda")) == "plain"


def test_unavailable_engine_is_rejected_before_training(build, user_error):
    with user_error("--rollout-engine graph"):
        build("--rollout-engine", "graph")


def test_unavailable_engine_is_rejected_when_sampling(model, user_error):
    with user_error("--rollout-engine graph"):
        sample(model, "graph")
    model._supports_attention_backend = False
    with user_error("--rollout-engine slots"):
        sample(model, "slots")
    assert sample(model, "auto").rows() == sample(model, "plain").rows()


def test_without_the_setting_no_cuda_graph_is_used(model):
    """Commands without --rollout-engine, such as the demo's parts, must not fail with a graph."""
    gpu = torch.device("cuda")
    assert [choose_engine(engine, True, gpu) for engine in ("auto", None)] == ["graph", "slots"]
    assert [choose_engine(None, packs, CPU) for packs in (True, False)] == ["slots", "plain"]


# --- logits that are no distribution ---------------------------------------------------------------------------------


class HeadWithBadLogits(torch.nn.Module):
    """Replaces the logits of some tokens, `places`, in the first row."""

    def __init__(self, head, value, places):
        super().__init__()
        self.head = head
        self.weight = head.weight
        self.value = value
        self.places = places

    def forward(self, hidden):
        logits = self.head(hidden)
        logits[:1, ..., self.places] = self.value
        return logits


@pytest.mark.parametrize("engine", ["plain", "slots"])
@pytest.mark.parametrize("limits", [{}, {"top_k": 20, "top_p": 0.8}], ids=["free", "filtered"])
@pytest.mark.parametrize(
    ("value", "places"), [(torch.nan, 7), (torch.inf, 7), (-torch.inf, slice(None))], ids=["nan", "inf", "all -inf"]
)
def test_logits_that_are_no_distribution_end_in_one_line(engine, limits, value, places):
    small = make_model(next(iter(CONFIGS)), seed=3)
    small.set_output_embeddings(HeadWithBadLogits(small.get_output_embeddings(), value, places))
    with pytest.raises(BadLogits, match="of 1 of 9 completions: sampling") as error:
        sample(small, engine, 9, **limits)
    assert isinstance(error.value, RunError) and len(error.value.problems) == 1


# --- a CUDA graph that cannot be captured ----------------------------------------------------------------------------


class FailedCapture:
    """Takes the place of torch.cuda.graph: `error` occurs in the capture, and ending the capture fails, too."""

    error: Exception

    def __init__(self, graph, pool):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *_):
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


@pytest.mark.parametrize(
    ("error", "kind"),
    [(RuntimeError("CUDA error: operation not permitted"), RunError), (torch.OutOfMemoryError("full"), None)],
    ids=["synchronization", "memory"],
)
def test_a_failed_capture_ends_the_run(monkeypatch, error, kind):
    """The process cannot continue on its GPU. Out of memory remains an out-of-memory error, for its own advice."""
    batch = prompts()
    decode = ContinuousBatcher._decode
    steps = []

    def failing(batcher, span):
        steps.append(span)
        if len(steps) == 2:  # the first step is the warm-up before the capture
            raise error
        decode(batcher, span)

    monkeypatch.setattr(ContinuousBatcher, "_decode", failing)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", FailedCapture)
    small = make_model(next(iter(CONFIGS)), seed=3)
    noise = uniform_noise(1, 2, "rollout", range(9), 14)
    kept = KeptBatcher()
    with pytest.raises(kind or torch.OutOfMemoryError) as found, torch.no_grad():
        kept.run(small, batch, noise, SamplingSettings(14, 1.0), StoppingCriterion([EOS]), 9, graph=True)
    assert len(steps) == 2, "no step after the capture"
    assert kept.batcher is None
    if kind is None:
        assert isinstance(found.value, OutOfMemoryInCapture) and str(found.value) == "full"
    else:
        assert "operation not permitted" in str(found.value) and "Use --rollout-engine slots" in str(found.value)


def test_a_run_resumes_with_the_engine_that_the_error_names(run_flags, tmp_path):
    train_ppo.main(run_flags("--num-iterations", 1, "--save-every", 1, "--rollout-engine", "plain"))
    more = ("--num-iterations", 2, "--rollout-engine", "slots", "--resume", "--resume-anyway")
    train_ppo.main(run_flags("--save-every", 1, *more))
    record = RunRecord.read(tmp_path / "run")
    assert (record.status, record.spent.updates) == ("finished", 2)
    assert record.flat_settings["rollout_engine"] == "slots"


# --- vLLM ------------------------------------------------------------------------------------------------------------


class FakeVLLMGeneration:
    """Replaces TRL's VLLMGeneration: samples with our engine and reports log-probs that are 0.5 nats too low."""

    def __init__(self, policy, accelerator, tokenizer, **settings):
        self.policy = policy
        self.tokenizer = tokenizer
        self.settings = settings
        self.synced = 0

    def sync_weights(self):
        self.synced += 1

    def generate(self, prompts, images, num_generations):
        batch = [Prompt(tuple(p), Example(({"role": "user", "content": ""},))) for p in prompts]
        length = self.settings["max_completion_length"]
        temperature = self.settings["temperature"]
        noise = uniform_noise(9, self.synced, "vllm", range(len(batch)), length)
        eos = self.tokenizer.eos_token_id
        completions = sample_completions(
            self.policy, batch, noise, SamplingSettings(length, temperature), eos=eos, pad=0, device=CPU
        )
        with torch.no_grad():
            logprobs, _, _ = Actor(self.policy)(PackedMicroBatch(completions, range(len(batch))), temperature)
        rows = completions.rows()
        reported = [[[float(p) - 0.5] for p in row[: len(ids)]] for row, ids in zip(logprobs, rows, strict=True)]
        return prompts, rows, reported, None


def test_vllm_samples_and_advantages_are_corrected_for_its_logprobs(build, monkeypatch):
    monkeypatch.setattr("trl.generation.vllm_generation.VLLMGeneration", FakeVLLMGeneration)
    monkeypatch.setattr("rlhf.rollout.vllm.is_installed", lambda: True)
    trainer = build("--rollout-engine", "vllm", "--num-iterations", 2, "--ppo-epochs", 1)
    batches = []
    trainer.add_callback(
        type("BatchRecorder", (), {"on_batch": lambda _, update, batch, scored: batches.append(batch)})()
    )
    metrics = trainer.train()
    assert trainer.collector.vllm.generation.synced == 2, "once before each rollout; evaluations use our own engine"
    for batch in batches:
        whitened = objectives.whiten(batch.raw_advantages, batch.mask)
        expected = whitened * torch.where(batch.mask, 0.5, 0.0).exp()
        assert_close(batch.advantages[batch.mask], expected[batch.mask], rtol=1e-4, atol=1e-5)
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-3), "the ratio is relative to the training forward pass"


def test_vllm_engine_is_rejected_if_vllm_is_not_installed(build, user_error):
    with user_error("--rollout-engine vllm"):
        build("--rollout-engine", "vllm")


def test_vllm_with_top_p_is_rejected(configured, user_error):
    with user_error("--rollout-engine vllm"):
        configured("--rollout-engine", "vllm", "--top-p", "0.9")
