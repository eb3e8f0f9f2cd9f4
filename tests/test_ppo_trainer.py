"""What one update does and leaves alone: first step, step counts, clipping, seeds, micro-batches, EOS."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from rlhf.callbacks import attach_callbacks
from rlhf.console import Screen
from rlhf.rollout import Rollout, measure


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: w.detach().clone() for name, w in trainer.model.named_parameters()}


def largest_difference(one: dict, other: dict) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("flags", [(), ("--use-lora",), ("--bf16",), ("--top-p", "1", "--temperature", "1")])
def test_first_step_has_ratio_1_and_no_kl(build, flags):
    trainer = build("--ppo-epochs", "1", *flags)
    logged = trainer.one_update(1)
    per_token = 1e-3 if "--bf16" in flags else 1e-6
    assert logged["policy/ratio"] == pytest.approx(1, abs=1e-6)
    assert logged["policy/approx_kl"] == pytest.approx(0, abs=1e-9)
    assert logged["policy/clipfrac"] == 0
    assert abs(logged["kl_divergence/token"]) <= per_token
    assert abs(logged["kl_divergence/k3"]) <= per_token * logged["reply/length"]


def test_kl_grows_once_the_policy_moves(build):
    trainer = build("--learning-rate", "1e-2")
    assert trainer.one_update(1)["kl_divergence/k3"] < 1e-6
    assert trainer.one_update(2)["kl_divergence/k3"] > 1e-3


@pytest.mark.parametrize(("updates", "epochs", "minibatches"), [(2, 2, 1), (2, 3, 2), (1, 2, 4)])
def test_optimizer_steps_are_updates_x_epochs_x_minibatches(build, updates, epochs, minibatches):
    trainer = build("--num-iterations", updates, "--ppo-epochs", epochs, "--minibatches", minibatches)
    counted = []
    step = trainer.optimizer.optimizer.step
    trainer.optimizer.optimizer.step = lambda *a, **k: (counted.append(1), step(*a, **k))[1]
    trainer.train()
    assert len(counted) == trainer.optimizer_steps == updates * epochs * minibatches


def test_batches_stay_full_past_the_end_of_the_prompts(build):
    """14 prompts in batches of 4: the fourth batch spans two passes, and nothing hangs or shrinks."""
    trainer = build()
    trainer.train_prompts = trainer.train_prompts[:14]
    batches = [trainer.prompts_of(update) for update in range(1, 8)]
    assert [len(batch) for batch in batches] == [4] * 7
    flat = [prompt.ids for batch in batches for _, prompt in batch]
    assert sorted(flat[:14]) == sorted(flat[14:28]) == sorted(p.ids for p in trainer.train_prompts)
    assert flat[:14] != flat[14:28], "each pass has an order of its own"


def test_fewer_prompts_than_a_batch_does_not_hang(build):
    trainer = build("--num-iterations", "1")
    trainer.train_prompts = trainer.train_prompts[:3]
    assert trainer.one_update(1)["optimizer_steps"] == 2


def test_gradient_norm_is_really_clipped(build):
    """With plain SGD the weights move by learning rate x gradient: clipped to 1e-3, by at most that norm."""
    trainer = build("--ppo-epochs", "1", "--max-grad-norm", "1e-3")
    trainer.optimizer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    before = weights(trainer)
    logged = trainer.one_update(1)
    after = weights(trainer)
    moved = torch.stack([(after[n] - before[n]).norm() for n in before]).norm()
    assert logged["policy/grad_norm"] > 1e-2, "the gradient before clipping must be larger, or this shows nothing"
    assert float(moved) == pytest.approx(1e-3, rel=1e-2)


def test_same_seed_gives_identical_weights_and_another_does_not(build):
    runs = []
    for seed in (7, 7, 8):
        torch.manual_seed(len(runs))  # the global stream must not matter
        trainer = build("--seed", seed, "--minibatches", "2")
        trainer.train()
        runs.append(weights(trainer))
    assert largest_difference(runs[0], runs[1]) == 0
    assert largest_difference(runs[0], runs[2]) > 0


def test_the_micro_batch_changes_memory_and_not_the_result(build):
    """One gradient step of SGD, whole against micro-batches of one: replies of unlike length, so that a mean of means
    would differ."""
    moved = []
    for size in (0, 1, 3):
        trainer = build("--ppo-epochs", "1", "--micro-batch-size", size, "--reply-length", "24")
        trainer.optimizer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
        trainer.one_update(1)
        moved.append(weights(trainer))
    assert largest_difference(moved[0], moved[1]) < 1e-6
    assert largest_difference(moved[0], moved[2]) < 1e-6


def batch_with_early_eos(trainer):
    """A rollout of which the first reply ends at its third token, and the batch made from it."""
    rollout: Rollout = trainer.rollout(trainer.prompts_of(1), 1, "rollout")
    replies = rollout.replies
    replies.nucleus = None
    replies.reply_ids[0, 2], replies.mask[0, 3:], replies.ended[0] = trainer.processing_class.eos_token_id, False, True
    measured = measure(trainer.model, trainer.reference, replies, trainer.sampling.temperature, 4)
    rollout.logprobs, rollout.ref_logprobs, rollout.entropy, rollout.values = measured
    return rollout, trainer.advantages(rollout, torch.arange(1.0, 5.0))


def gradients(trainer, batch) -> torch.Tensor:
    rows = torch.arange(4)
    loss, _ = trainer.losses(batch, rows, batch.rollout.mask.sum())
    trainer.model.zero_grad()
    loss.backward()
    return torch.cat([w.grad.flatten() for w in trainer.model.parameters() if w.grad is not None])


def test_eos_is_in_the_loss_and_nothing_after_it_is(build):
    trainer = build("--top-p", "1")
    rollout, batch = batch_with_early_eos(trainer)
    base = gradients(trainer, batch)
    rollout.replies.reply_ids[0, 3:] = 17
    for values in (rollout.logprobs, rollout.ref_logprobs, rollout.values, batch.weights, batch.returns):
        values[0, 3:] = 1e3
    assert_close(gradients(trainer, batch), base, rtol=0, atol=0)
    batch.weights[0, 2] += 1.0  # EOS itself
    assert float((gradients(trainer, batch) - base).abs().max()) > 1e-6


def test_a_reply_without_eos_pays_the_penalty(build):
    trainer = build(
        "--missing-eos-penalty", "2.5", reward_functions=[lambda completions, **_: [1.0] * len(completions)]
    )
    rollout, _ = batch_with_early_eos(trainer)
    scores, raw = trainer.score(rollout)
    assert raw.tolist() == [1.0] * 4
    assert scores.tolist() == [1.0 if ended else -1.5 for ended in rollout.replies.ended.tolist()]
    assert not rollout.replies.ended.all()


def test_the_controller_sets_the_next_updates_beta(build):
    trainer = build("--num-iterations", "3", "--kl-horizon", "8", "--kl-target", "1/sequence", "--kl-coef", "0.5")
    attach_callbacks(trainer, trainer.config, Screen())
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "kl_coef" in entry]
    expected = 0.5
    for entry in logged:
        assert entry["kl_coef"] == pytest.approx(expected)
        error = min(max(entry["kl_divergence"] - 1, -0.2), 0.2)
        expected *= 1 + error * 4 / 8
    assert logged[1]["kl_coef"] != 0.5


def test_the_score_rises_on_an_easy_reward(build):
    """Thirty updates towards more letters e: the whole loop learns, not only runs."""

    def letters_e(completions, **_):
        return [text.count("e") / 4 for text in completions]

    trainer = build(
        "--num-iterations", 30, "--batch-size", 16, "--learning-rate", "1e-2", "--kl-coef", "0", "--kl-schedule",
        "fixed", "--temperature", "1", "--top-p", "1", "--value-coef", "0.1", "--eval-every", 30,
        reward_functions=[letters_e],
    )  # fmt: skip
    trainer.train()
    scores = [entry["rewards/mean"] for entry in trainer.state.log_history if "rewards/mean" in entry]
    assert sum(scores[-5:]) / 5 > 3 * sum(scores[:5]) / 5 + 0.1


def test_every_metric_of_the_glossary_is_logged(build):
    trainer = build()
    trainer.train()
    logged = set().union(*trainer.state.log_history)
    wanted = set(
        "loss learning_rate rewards/mean rewards/std kl_divergence kl_divergence/token kl_divergence/k3 "
        "kl_coef advantage/mean advantage/std policy/loss policy/clipfrac policy/approx_kl "
        "policy/entropy policy/ratio value/loss value/clipfrac value/explained_variance reply/length "
        "reply/eos_rate eval/perplexity eval/kl_divergence eval/score time/rollout_s time/score_s "
        "time/update_s throughput/tokens_per_s throughput/episodes_per_s optimizer_steps memory/peak_gib".split()
    )
    assert wanted - logged == set()


@pytest.mark.gpu
def test_an_update_on_a_card_in_bfloat16(build):
    trainer = build("--ppo-epochs", "1")
    assert trainer.accelerator.device.type == "cuda"
    logged = trainer.one_update(1)
    assert logged["policy/ratio"] == pytest.approx(1, abs=1e-4)
    assert logged["memory/peak_gib"] > 0
