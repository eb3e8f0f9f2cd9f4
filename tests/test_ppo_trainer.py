"""What one update does and leaves alone: first step, step counts, clipping, seeds, micro-batches, EOS."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from rlhf.callbacks import attach_callbacks
from rlhf.console import Screen
from rlhf.errors import RunError
from rlhf.metrics import rollout_metrics
from rlhf.rollout import Rollout, measure
from tests.test_scripts import ROOT, run


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: w.detach().clone() for name, w in trainer.model.named_parameters()}


def largest_difference(one: dict, other: dict) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("flags", [(), ("--use-lora",), ("--bf16",), ("--top-p", "0.7"), ("--top-k", "9")])
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
    trainer = build("--num-iterations", "1", "--max-prompts", "3")
    assert len(trainer.train_prompts) == 3
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
        trainer = build("--seed", seed, "--minibatches", "2")
        torch.manual_seed(len(runs))  # the global stream must not matter
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
    rollout.logprobs, rollout.ref_logprobs, rollout.values = measured
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


def test_a_loss_that_is_not_finite_stops_the_run(build):
    trainer = build("--num-iterations", "1")
    trainer.score = lambda rollout: (torch.full((4,), float("nan")),) * 2
    with pytest.raises(RunError, match="not finite: update 1"):
        trainer.one_update(1)


def test_the_learning_rate_follows_the_cosine(build):
    trainer = build("--num-iterations", "4", "--learning-rate", "1e-3")
    rates = [trainer.one_update(update)["learning_rate"] for update in range(1, 5)]
    assert rates == pytest.approx([1e-3 * 0.5 * (1 + math.cos(math.pi * u / 4)) for u in range(4)])


def test_the_entropy_bonus_lowers_the_loss_by_coefficient_times_entropy(build):
    losses, grads = {}, {}
    for coef in (0.0, 0.5):
        trainer = build("--entropy-coef", coef)
        rollout = trainer.rollout(trainer.prompts_of(1), 1, "rollout")
        batch = trainer.advantages(rollout, torch.arange(4.0))
        loss, stats = trainer.losses(batch, torch.arange(4), rollout.mask.sum())
        trainer.model.zero_grad()
        loss.backward()
        losses[coef], entropy = float(loss.detach()), float(stats["policy/entropy"])
        grads[coef] = torch.cat([w.grad.flatten() for w in trainer.model.parameters() if w.grad is not None])
    assert losses[0.5] == pytest.approx(losses[0.0] - 0.5 * entropy, rel=1e-5)
    assert float((grads[0.5] - grads[0.0]).abs().max()) > 1e-5, "and it has a gradient"


def test_whitened_rewards_keep_their_mean(build):
    """Two-token replies by hand: without a shift r becomes (r - mean) / std + mean; then GAE with V = 0."""
    trainer = build("--whiten-rewards", "--no-whiten-advantages", "--kl-coef", "1e-9", "--gamma", "1", "--lam", "1")
    rollout = trainer.rollout(trainer.prompts_of(1), 1, "rollout")
    rollout.replies.mask = torch.zeros_like(rollout.mask)
    rollout.replies.mask[:, :2] = True
    batch = trainer.advantages(rollout, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    rewards = torch.tensor([0.0, 1, 0, 2, 0, 3, 0, 4])
    mean, std = rewards.mean(), rewards.std()
    assert_close(batch.advantages[:, 1], (torch.tensor([1.0, 2, 3, 4]) - mean) / std + mean)


def test_what_a_rollout_says_of_itself_by_hand(build):
    trainer = build()
    rollout = trainer.rollout(trainer.prompts_of(1), 1, "rollout")
    mask = torch.zeros_like(rollout.mask)
    mask[0, :2], mask[1:, :1] = True, True  # five reply tokens in four replies
    rollout.replies.mask, rollout.replies.ended = mask, torch.tensor([True, False, False, False])
    rollout.logprobs, rollout.ref_logprobs = torch.zeros_like(rollout.logprobs), torch.zeros_like(rollout.logprobs)
    rollout.logprobs[0, :2] = torch.tensor([0.5, 0.25])
    batch = trainer.advantages(rollout, torch.ones(4))
    said = rollout_metrics(batch, torch.tensor([1.0, 3, 1, 3]), trainer.accelerator)
    assert said["kl_divergence"] == pytest.approx(0.75 / 4)
    assert said["kl_divergence/token"] == pytest.approx(0.75 / 5)
    k3 = (math.exp(-0.5) - 1 + 0.5) + (math.exp(-0.25) - 1 + 0.25)
    assert said["kl_divergence/k3"] == pytest.approx(k3 / 4)
    assert (said["reply/length"], said["reply/eos_rate"]) == (1.25, 0.25)
    assert (said["rewards/mean"], said["rewards/std"]) == (2.0, 1.0)


@pytest.mark.gpu
def test_a_run_on_a_card(start_model, reward_folder, pairs_file, tmp_path):
    """In a process of its own, as the other tests keep to the CPU."""
    words = ["train_ppo.py", "--actor-model", start_model, "--rm-model", reward_folder, "--prompts", pairs_file,
             "--output", tmp_path / "run", "--num-iterations", 2, "--reply-length", 8,
             "--allow-weak-reward-model"]  # fmt: skip
    done = run([str(w) for w in words], ROOT, ACCELERATE_USE_CPU="false")
    assert done.returncode == 0, done.stderr
    capable = torch.cuda.is_bf16_supported(including_emulation=False)
    assert f"cuda, {'bfloat16 autocast' if capable else 'float32'}" in done.stdout.replace("cuda:0", "cuda")
