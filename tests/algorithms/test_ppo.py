"""Tests of PPO: full batches of prompts, logged metrics, whitened rewards, and several completions per prompt."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close


def test_batches_stay_full_past_the_end_of_the_prompts(build):
    """14 prompts in batches of 4: the fourth batch spans two passes and also has 4 prompts."""
    trainer = build("--max-prompts", 14)
    batches = [trainer.episodes_of(update) for update in range(1, 8)]
    assert [len(batch) for batch in batches] == [4] * 7
    flat = [prompt.ids for batch in batches for _, prompt in batch]
    assert sorted(flat[:14]) == sorted(flat[14:28]) == sorted(p.ids for p in trainer.train_prompts)
    assert flat[:14] != flat[14:28], "each pass must have a different order"


def test_ppo_logs_all_of_its_metrics(build):
    trainer = build()
    trainer.train()
    logged = set().union(*trainer.host.state.log_history)
    expected = set(
        "loss learning_rate rewards/mean rewards/std kl_divergence kl_divergence/token kl_divergence/k3 "
        "kl_coef advantage/mean advantage/std policy/loss policy/clipfrac policy/approx_kl "
        "policy/entropy policy/ratio value/loss value/clipfrac value/explained_variance completions/mean_length "
        "completions/eos_rate eval/perplexity eval/kl_divergence eval/score time/rollout_s time/score_s "
        "time/update_s throughput/tokens_per_s throughput/episodes_per_s optimizer_steps memory/peak_gib".split()
    )
    assert expected - logged == set()


def test_whitened_rewards_keep_their_mean(build):
    """Completions of two tokens, V = 0: whitening without a shift of the mean gives (r - mean) / std + mean."""
    trainer = build("--whiten-rewards", "--no-whiten-advantages", "--kl-coef", "1e-9", "--gamma", "1", "--lam", "1")
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    rollout.completions.action_mask = torch.zeros_like(rollout.mask)
    rollout.completions.action_mask[:, :2] = True
    batch = trainer.advantages(rollout, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    rewards = torch.tensor([0.0, 1, 0, 2, 0, 3, 0, 4])
    mean = rewards.mean()
    std = rewards.std()
    assert_close(batch.raw_advantages[:, 1], (torch.tensor([1.0, 2, 3, 4]) - mean) / std + mean)


def by_hand(trainer):
    """Return a rollout of 2 prompts x 2 completions with 2, 1, 1 and 2 tokens, KL 0 and given values."""
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    rollout.completions.action_mask = torch.zeros_like(rollout.mask)
    rollout.completions.action_mask[:, 0] = True
    rollout.completions.action_mask[[0, 3], 1] = True
    rollout.values = torch.zeros_like(rollout.values)
    rollout.values[:, :2] = torch.tensor([[0.5, 1.0], [0.5, 0.0], [0.0, 0.0], [0.0, 0.5]])
    rollout.ref_logprobs = rollout.logprobs.clone()
    return rollout


def test_advantages_of_several_completions_per_prompt_match_values_computed_by_hand(build):
    """gamma 1, lambda 1/2, scores 2, 0, 1, 0 at the last tokens.

    First completion: delta_2 = 2 - 1 = 1, delta_1 = 1 - 1/2 = 1/2, so A_2 = 1 and A_1 = 1/2 + 1/2 = 1. Last one:
    delta_2 = -1/2, delta_1 = 1/2, so A_1 = 1/2 - 1/4 = 1/4.

    The six advantages 1, 1, -1/2, 1, 1/4, -1/2 have mean 3/8 and variance 2.71875 / 5: all tokens of the batch are
    whitened together, not those of a prompt.
    """
    trainer = build("--batch-size", 2, "--K", 2, "--gamma", "1", "--lam", "0.5")
    batch = trainer.advantages(by_hand(trainer), torch.tensor([2.0, 0, 1, 0]))
    expected = torch.tensor([[1, 1], [-0.5, 0], [1, 0], [0.25, -0.5]])
    assert_close(batch.raw_advantages[:, :2], expected)
    assert_close(batch.returns[:, :2], torch.tensor([[1.5, 2.0], [0.0, 0.0], [1.0, 0.0], [0.25, 0.0]]))
    whitened = torch.where(batch.mask[:, :2], (expected - 0.375) / 0.54375**0.5, 0.0)
    assert_close(batch.advantages[:, :2], whitened)


def test_scores_of_the_other_completions_of_a_prompt_do_not_change_an_advantage(build):
    trainer = build("--batch-size", 2, "--K", 2)
    rollout = by_hand(trainer)
    first, other = (
        trainer.advantages(rollout, torch.tensor(s)).raw_advantages for s in ([2.0, 0, 1, 0], [2.0, 9, 1, 0])
    )
    assert_close(first[[0, 2, 3]], other[[0, 2, 3]])
    assert not torch.equal(first[1], other[1])


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_k_completions_per_prompt_are_k_copies_of_the_prompt(build, critic):
    """Two prompts with four completions each, against eight prompts that are computed one by one, padded."""
    one = build("--batch-size", 2, "--K", 4, "--critic", critic)
    copies = build("--batch-size", 8, "--critic", critic, "--no-packed", "--rollout-engine", "plain")
    sampled = one.sampler.prompts_of
    copies.sampler.prompts_of = lambda update: [prompt for prompt in sampled(update) for _ in range(4)]
    rollouts = [trainer.collector.collect(trainer.episodes_of(1), 1) for trainer in (one, copies)]
    assert rollouts[0].completions.rows() == rollouts[1].completions.rows()
    assert len({tuple(row) for row in rollouts[0].completions.rows()[:4]}) > 1, "a prompt's completions differ"
    metrics = [trainer.update_step(1) for trainer in (one, copies)]
    for name in ("rewards/mean", "advantage/std", "value/loss", "policy/loss", "kl_divergence"):
        assert metrics[0][name] == pytest.approx(metrics[1][name], abs=1e-4), name
    weights = [torch.cat([w.detach().flatten() for w in trainer.host.model.parameters()]) for trainer in (one, copies)]
    # a wrong gradient moves weights by the learning rate, 1e-3
    assert float((weights[0] - weights[1]).abs().max()) < 3e-5


def test_a_prompt_is_computed_once_for_its_completions(build):
    trainer = build("--batch-size", 2, "--K", 4)
    seen = []
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    batch = trainer.advantages(rollout, torch.arange(8.0))
    trainer.passes.clear()
    trainer.host.model.policy.model.layers[0].self_attn.o_proj.register_forward_hook(
        lambda _m, inputs, _o: seen.append(inputs[0].numel() // inputs[0].shape[-1])
    )
    trainer.policy_optimizer.run(batch, 1)
    prompts = sum(len(prompt.ids) for prompt in rollout.prompts[::4])
    assert set(seen) == {prompts + rollout.completions.tokens - 8}, "without the last token of each completion"


def test_equal_groups_are_not_logged_because_the_critic_is_the_baseline(build):
    assert "rewards/equal_groups" not in build("--batch-size", 2, "--K", 2).update_step(1)
