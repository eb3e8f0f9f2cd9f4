"""Tests of PPO: full batches of prompts, logged metrics and whitened rewards."""

from __future__ import annotations

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
    logged = set().union(*trainer.state.log_history)
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
    rollout.completions.mask = torch.zeros_like(rollout.mask)
    rollout.completions.mask[:, :2] = True
    batch = trainer.advantages(rollout, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    rewards = torch.tensor([0.0, 1, 0, 2, 0, 3, 0, 4])
    mean, std = rewards.mean(), rewards.std()
    assert_close(batch.raw_advantages[:, 1], (torch.tensor([1.0, 2, 3, 4]) - mean) / std + mean)
