"""Tests loading and saving models, the reference model, the critic, logits in chunks, and model download errors."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.checkpoints.model_folder import find_model
from rlhf.data.tokenizer import load_tokenizer
from rlhf.distributed.weights import checksums
from rlhf.models import logprobs
from rlhf.models.actor_critic import ActorCritic, with_value_head
from rlhf.models.budget import BUDGETS
from rlhf.models.device import autocast
from rlhf.models.load import four_bit, load_policy
from rlhf.models.packing import PaddedMicroBatch
from rlhf.models.reference import Reference
from rlhf.models.save import load_policy_weights, trained_of
from rlhf.rewards.reward_model import RewardModel
from rlhf.rollout.completions import token_batch
from rlhf.utils import hub
from rlhf.utils.errors import UserError
from tests.conftest import whole_gradient
from tests.shapes import make_start_model, smollm2_tokenizer

CPU = torch.device("cpu")


def test_pad_token_is_never_eos(start_model):
    assert AutoTokenizer.from_pretrained(start_model).pad_token == "<|im_end|>", "load_tokenizer must fix pad == EOS"
    tokenizer = load_tokenizer(str(start_model))
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.padding_side == "left"


def test_tokenizer_without_an_unused_special_token_is_refused(tmp_path, user_error):
    tokenizer = smollm2_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template + "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path)
    with user_error("EOS"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("lora", [False, True])
def test_saved_model_gives_the_trained_models_logits(build, start_model, tmp_path, lora):
    trainer = build("--learning-rate", "1e-2", *(["--use-lora"] if lora else []))
    trainer.train()
    trainer.save_model()
    folder = tmp_path / "run"
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        trained = trainer.host.model.policy(ids).logits
        plain = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32).eval()
        start = plain(ids).logits
        loaded = (PeftModel.from_pretrained(plain, folder) if lora else
                  AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).eval()  # fmt: skip
        assert_close(loaded(ids).logits, trained, rtol=0, atol=0 if not lora else 1e-6)
    assert float((trained - start).abs().max()) > 1e-2, "training did not change the logits: the test proves nothing"
    assert not list(folder.rglob("*.bin")) and not list(folder.rglob("*.pt")), "no pickled weights"
    assert AutoTokenizer.from_pretrained(folder).pad_token == "<|endoftext|>"

    fresh = ActorCritic(with_value_head(loaded))
    load_policy_weights(fresh, folder)
    for name, tensor in trainer.host.model.value_head.state_dict().items():
        assert torch.equal(fresh.value_head.state_dict()[name], tensor)
        assert float(tensor.abs().max()) > 0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_reference_is_bit_identical_to_the_start_model(start_model, dtype):
    """Also under autocast, although the copy is stored in bfloat16."""
    policy = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32).eval()
    actor_critic = ActorCritic(with_value_head(policy))
    reference = Reference.before_training(policy, dtype)
    ids = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(0))
    micro_batch = PaddedMicroBatch(token_batch(ids[:, :7].tolist(), ids[:, 7:].tolist(), 0, CPU), [0, 1])
    with torch.no_grad(), autocast(CPU, dtype):
        assert torch.equal(actor_critic(micro_batch, 0.7)[0], reference.logprobs(micro_batch, 0.7, None))
        for weight in policy.parameters():
            weight.add_(0.1)
        assert not torch.equal(actor_critic(micro_batch, 0.7)[0], reference.logprobs(micro_batch, 0.7, None)), (
            "the reference must be a copy, not the policy"
        )


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of mapped files on this system")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_rounded_weights_release_the_mapped_file(reward_folder, tmp_path, dtype):
    folder = shutil.copytree(reward_folder, tmp_path / "reward")  # models of other tests still map reward_folder
    model = RewardModel.load(str(folder), CPU, dtype)
    mapped = str(folder / "model.safetensors") in Path("/proc/self/maps").read_text()
    assert mapped == (dtype is None), "float32 weights use the mapped file directly"
    assert model.dtype == dtype


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of mapped files on this system")
@pytest.mark.parametrize(("dtype", "load_in_4bit"), [(torch.bfloat16, False), (None, True)])
def test_adapters_release_the_mapped_base_file(tmp_path, dtype, load_in_4bit):
    make_start_model(tmp_path / "start")
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    more = {"lora": lora, "dtype": dtype, "load_in_4bit": load_in_4bit}
    policy = load_policy(str(tmp_path / "start"), device=CPU, vocabulary=10, **more)
    assert str(tmp_path / "start") not in Path("/proc/self/maps").read_text()
    base = policy.get_base_model()
    assert base.get_input_embeddings().weight is base.get_output_embeddings().weight, "embeddings must stay tied"


def test_checksums_are_those_of_the_trained_weights(start_model):
    """The smallest change of one weight changes them. The reference has those of the start."""
    policy = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32)
    policy.model.embed_tokens.requires_grad_(False)
    before = checksums(policy)
    assert Reference.before_training(policy, None).start == before
    weight = policy.model.norm.weight.data
    original = weight[3].clone()
    weight[3] = torch.nextafter(original, torch.tensor(2.0))
    assert sum(one != other for one, other in zip(before, checksums(policy), strict=True)) == 1
    weight[3] = original
    policy.model.embed_tokens.weight.data[0, 0] = 7
    assert checksums(policy) == before


def test_reference_copy_is_smaller_under_bfloat16(start_model):
    policy = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32)

    def size(model):
        return sum(p.numel() * p.element_size() for p in model.parameters())

    assert size(Reference.before_training(policy, torch.bfloat16).copy) < size(policy)


def test_lora_reference_is_the_policy_without_its_adapter(build, start_model):
    trainer = build("--use-lora", "--learning-rate", "1e-2")
    assert trainer.reference.copy is None
    trainer.train()
    names = [name for name, w in trainer.host.model.named_parameters() if w.requires_grad]
    assert names and all("lora" in name or "value_head" in name for name in names)
    plain = Reference.before_training(AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32), None)
    ids = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(0))
    micro_batch = PaddedMicroBatch(token_batch(ids[:, :7].tolist(), ids[:, 7:].tolist(), 0, CPU), [0, 1])
    with torch.no_grad():
        expected = plain.logprobs(micro_batch, 0.7, None)
        assert_close(trainer.reference.logprobs(micro_batch, 0.7, None), expected, rtol=0, atol=1e-6)
        assert float((trainer.host.model(micro_batch, 0.7)[0] - expected).abs().max()) > 1e-3


def test_actor_and_critic_share_one_backbone_pass(build):
    trainer = build()
    passes = []
    trainer.host.model.policy.model.embed_tokens.register_forward_hook(lambda *_: passes.append(1))
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    batch = trainer.advantages(rollout, torch.ones(4))
    passes.clear()
    whole_gradient(trainer, batch)
    assert len(passes) == 1


CRITICS = {
    "whole": [],
    "adapters": ["--use-lora"],
    "adapters on 4-bit weights": ["--use-lora", "--load-in-4bit"],
    "recomputed": ["--gradient-checkpointing"],
    "adapters, recomputed": ["--use-lora", "--gradient-checkpointing"],
}


@pytest.mark.parametrize("kind", CRITICS)
def test_value_loss_trains_only_a_separate_critic(build, tmp_path, kind):
    """The value loss has gradients in the critic's backbone and not in the policy's. Saving keeps the values."""
    flags = ["--critic", "separate", *CRITICS[kind], "--learning-rate", "1e-2"]
    trainer = build(*flags)
    actor = trainer.actor
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    batch = trainer.advantages(rollout, torch.ones(4))
    batch.advantages.zero_()  # removes the policy gradient
    trainer.host.model.train()
    torch.nn.init.normal_(actor.value_head.summary.weight)  # a zero value head blocks the gradient
    whole_gradient(trainer, batch)
    reached = {part: max(float(w.grad.abs().max()) for w in module.parameters() if w.grad is not None)
               for part, module in (("policy", actor.policy), ("critic", actor.critic))}  # fmt: skip
    assert reached["critic"] > 0 and reached["policy"] == 0
    trainer.host.optimizer.zero_grad()
    trainer.update_step(1)
    trainer.save_model(tmp_path / "saved")
    assert set(load_file(tmp_path / "saved" / "critic.safetensors")) == set(trained_of(actor.critic))
    values = trainer.passes.logprobs(rollout.completions)[2]
    assert float((values - rollout.values).abs().max()) > 1e-4
    other = build(*flags)
    assert not torch.equal(other.passes.logprobs(rollout.completions)[2], values)
    other.load_model(tmp_path / "saved")
    assert torch.equal(other.passes.logprobs(rollout.completions)[2], values)


def test_saved_critic_of_another_kind_is_refused(build, tmp_path, user_error):
    build().save_model(tmp_path / "shared")
    with user_error("critic.safetensors", "shared"):
        build("--critic", "separate").load_model(tmp_path / "shared")
    build("--critic", "separate", "--use-lora", "--lora-targets", "q_proj").save_model(tmp_path / "other")
    (tmp_path / "shared" / "critic.safetensors").write_bytes((tmp_path / "other" / "critic.safetensors").read_bytes())
    with user_error():
        build("--critic", "separate").load_model(tmp_path / "shared")


def limit_chunks(monkeypatch):
    """Limits chunks to eight positions of this vocabulary, two of them in float32."""
    few = dataclasses.replace(BUDGETS["cpu"], logits_per_chunk=8 * 400, floats_per_chunk=2 * 400)
    monkeypatch.setitem(BUDGETS, "cpu", few)


def test_full_logits_are_never_materialized(build, monkeypatch):
    """With default flags, logits exist for a few completions at a time, and in float32 for a few positions."""
    limit_chunks(monkeypatch)
    probabilities = logprobs._probabilities
    seen = []
    monkeypatch.setattr(logprobs, "_probabilities", lambda z, *a: seen.append(len(z)) or probabilities(z, *a))
    trainer = build("--max-new-tokens", 8)
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    batch = trainer.advantages(rollout, torch.arange(4.0))
    assert max(seen) <= 8 and sum(seen) == 2 * rollout.mask.sum(), "policy and reference, all positions, in parts"
    seen.clear()
    whole_gradient(trainer, batch)
    assert max(seen) <= 8 and sum(seen) == rollout.mask.sum()


@pytest.mark.parametrize("flags", [(), ("--top-p", "0.7", "--entropy-coef", "0.1")])
def test_chunks_do_not_change_the_gradient(build, monkeypatch, flags):
    grads = [gradient(build(*flags))]
    limit_chunks(monkeypatch)
    grads.append(gradient(build(*flags)))
    assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-7)


def gradient(trainer) -> torch.Tensor:
    """Return the gradient of the loss on the first batch, flattened, in the mode of a real update."""
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    batch = trainer.advantages(rollout, torch.arange(4.0))
    trainer.host.model.train(trainer.config.model.gradient_checkpointing)
    return whole_gradient(trainer, batch)[1]


def test_gradient_checkpointing_recomputes_with_the_same_gradient(build):
    grads = []
    passes = []
    for flags in ((), ("--gradient-checkpointing",)):
        grads.append(gradient(build("--ppo-epochs", "1", *flags)))
        trainer = build("--ppo-epochs", "1", *flags)
        count = []
        rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
        batch = trainer.advantages(rollout, torch.arange(4.0))
        trainer.host.model.policy.model.layers[0].self_attn.o_proj.register_forward_hook(
            lambda *_, c=count: c.append(1)
        )
        trainer.policy_optimizer.run(batch, 1)
        passes.append(len(count))
    assert passes == [0, 2], "0: the cached forward pass is reused. 2: one forward, recomputed in the backward pass"
    assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-7)


def test_four_bit_weights_train_with_lora(build):
    """The frozen weights are 4-bit and an update trains the adapters. bitsandbytes also quantizes on a CPU."""
    import bitsandbytes

    trainer = build("--use-lora", "--load-in-4bit")
    assert any(isinstance(m, bitsandbytes.nn.Linear4bit) for m in trainer.host.model.modules())
    before = {n: w.detach().clone() for n, w in trainer.host.model.named_parameters() if w.requires_grad}
    trainer.update_step(1)
    after = {n: w.detach() for n, w in trainer.host.model.named_parameters() if n in before}
    assert any(not torch.equal(after[n], before[n]) for n in before)


def test_lora_targets_that_match_nothing_are_refused(start_model, user_error):
    with user_error("qproj", "q_proj"):
        load_policy(str(start_model), lora=LoraConfig(target_modules=["qproj"]), device=CPU, vocabulary=10)


def test_tokenizer_larger_than_the_model_is_refused(start_model, user_error):
    with user_error(9999):
        load_policy(str(start_model), device=CPU, vocabulary=9999)


def test_pickled_weights_are_refused(start_model, tmp_path, user_error):
    model = AutoModelForCausalLM.from_pretrained(start_model)
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with user_error(".safetensors"):
        load_policy(str(tmp_path), device=CPU, vocabulary=10)


def test_truncated_weights_are_reported_in_one_line(start_model, tmp_path, user_error):
    folder = Path(shutil.copytree(start_model, tmp_path / "truncated"))
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with user_error("truncated"):
        load_policy(str(folder), device=CPU, vocabulary=10)


def test_adapter_finds_its_base_from_any_folder(build, start_model, monkeypatch, tmp_path):
    """The adapter stores its base model's absolute path, also if the flag gave a relative path."""
    monkeypatch.chdir(start_model.parent)
    trainer = build("--use-lora", "--actor-model", f"./{start_model.name}")
    trainer.save_model()
    config = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(start_model.resolve())


# --- the hub: tests run offline, so its responses are fakes ----------------------------------------------------------


NO_RESPONSE = SimpleNamespace(headers={}, request=None, status_code=403)


class Hub:
    """A fake HfApi: repo_info raises the given exception or returns the given value of `gated`."""

    def __init__(self, response):
        self.response = response

    def repo_info(self, *_, **__):
        if isinstance(self.response, Exception):
            raise self.response
        return SimpleNamespace(gated=self.response)

    def auth_check(self, *_, **__):
        raise GatedRepoError("no", response=NO_RESPONSE)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (
            RepositoryNotFoundError("no", response=SimpleNamespace(headers={}, request=None)),
            "model not found: a/b is neither a local",
        ),
        ("manual", "model is gated: a/b. Accept its terms"),
        (
            ConnectionError("no route"),
            r"cannot download the model: a/b \(not in the local cache, and the hub cannot be reached: no route",
        ),
    ],
)
def test_missing_gated_and_offline_models_have_separate_errors(monkeypatch, response, message):
    monkeypatch.setattr(hub, "HfApi", lambda: Hub(response))
    with pytest.raises(UserError, match=message):
        find_model("a/b", "--actor-model")


def test_cached_model_is_loaded_from_its_folder_if_the_hub_is_offline(monkeypatch):
    """With the model's name, transformers would request every file from the hub, which takes minutes."""
    monkeypatch.setattr(hub, "HfApi", lambda: Hub(ConnectionError("no route")))
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: "/cache/snapshot")
    assert find_model("a/b", "--actor-model") == "/cache/snapshot"
    monkeypatch.setattr(hub, "HfApi", lambda: Hub(False))
    assert find_model("a/b", "--actor-model") == "a/b"


def test_four_bit_without_bitsandbytes_is_one_line(monkeypatch, user_error):
    monkeypatch.setattr("rlhf.models.load.is_bitsandbytes_available", lambda: False)
    with user_error("--load-in-4bit", "pip"):
        four_bit(None)


def test_value_head_on_a_4_bit_model_prints_no_warning(build, caplog):
    """TRL warns on the root logger if it cannot find the model's device."""
    build("--use-lora", "--load-in-4bit", "--critic", "separate")
    assert [record.message for record in caplog.records if record.name == "root"] == []
