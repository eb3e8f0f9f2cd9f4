"""PPO's equations, and the KL estimates and penalties of every algorithm: pure functions of tensors and floats.

They read no settings and no trainer. The group advantages and the losses of GRPO are TRL's, in its GRPOTrainer
(rlhf/trainer/grpo.py).

Shapes: B episodes, T reply tokens. `mask` (B, T) is True on the tokens of a reply up to and including its EOS; what
stands under a False is never read. Unless said otherwise all tensors are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor, total: Tensor | float | None = None) -> Tensor:
    """Mean of `values` (B, T) where `mask` (B, T) holds: a scalar.

    `total` replaces the number of masked tokens as the divisor. A micro-batch divided by its minibatch's tokens adds
    up to the minibatch's mean, so that the micro-batch changes memory and not the result.
    """
    return torch.where(mask, values, 0.0).sum() / (mask.sum() if total is None else total)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance of `values` where `mask` holds: a scalar; 0 for a single token."""
    centered = torch.where(mask, values - masked_mean(values, mask), 0.0)
    return centered.square().sum() / (mask.sum() - 1).clamp(min=1)


def whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """`values` (B, T) scaled to variance 1, and to mean 0 if `shift_mean`, over the masked tokens; 0 elsewhere."""
    mean, var = masked_mean(values, mask), masked_var(values, mask)
    whitened = (values - mean) * torch.rsqrt(var + 1e-8)
    return torch.where(mask, whitened if shift_mean else whitened + mean, 0.0)


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Per-token KL estimate log p - log q (B, T), nats; unbiased under samples of p, can be negative.

    Schulman, "Approximating KL Divergence" (2020), k1. Summed over a reply it estimates the sequence's KL.
    """
    return torch.where(mask, logprobs - ref_logprobs, 0.0)


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Per-token KL estimate (r - 1) - log r with r = q / p (B, T), nats; never negative.

    Schulman, "Approximating KL Divergence" (2020), k3.
    """
    log_ratio = torch.where(mask, ref_logprobs - logprobs, 0.0)
    return torch.expm1(log_ratio) - log_ratio


def kl_loss_per_token(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The KL penalty in the loss, per token: (p_new / p_old) * k3. All (B, T), nats, 0 off the mask.

    Its gradient is (p_new / p_old) * log(p_new / q) * grad log p_new: an importance-weighted estimate of the gradient
    of KL(policy || reference), the KL that is logged and steered. The gradient of k3 alone is that of
    KL(reference || policy). docs/kl.md has the derivation.
    """
    # rho_t = p_new / p_old; k3 = q / p_new - 1 - log(q / p_new)
    ratio = torch.exp(torch.where(mask, logprobs - old_logprobs, 0.0))
    return ratio * kl_k3(logprobs, ref_logprobs, mask)


def last_token(mask: Tensor) -> Tensor:
    """True at each reply's last token (B, T). A reply always has at least one."""
    after = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
    return mask & ~after


def shape_rewards(kl: Tensor, scores: Tensor, mask: Tensor, beta: float, kl_penalty_at: str = "token") -> Tensor:
    """Rewards per token (B, T), score units: the KL penalty, and the score (B,) at the last token.

    `token`: r_t = -beta * KL_t (Ziegler et al. 2019, eq. 2). `eos`: the reply's whole KL is charged with its score.
    """
    final = last_token(mask)
    if kl_penalty_at == "eos":
        return torch.where(final, (scores - beta * kl.sum(1)).unsqueeze(1), 0.0)
    return torch.where(mask, -beta * kl, 0.0) + torch.where(final, scores.unsqueeze(1), 0.0)


def td_errors(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Temporal-difference errors (B, T), score units, 0 off the mask (Schulman et al. 2016, arXiv 1506.02438, eq. 9).

    An episode ends at its last token: what follows has value 0, whether the reply ended or ran into the limit.
    """
    values, rewards = torch.where(mask, values, 0.0), torch.where(mask, rewards, 0.0)
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    # delta_t = r_t + gamma * V(s_{t+1}) - V(s_t)
    return rewards + gamma * next_values - values


def generalized_advantage_estimate(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both (B, T) and 0 off the mask (Schulman et al. 2016, arXiv 1506.02438, eq. 16)."""
    deltas = td_errors(rewards, values, mask, gamma)
    advantages = torch.zeros_like(deltas)
    running = torch.zeros_like(deltas[:, 0])
    for t in reversed(range(deltas.shape[1])):
        # A_t = delta_t + gamma * lambda * A_{t+1}
        running = deltas[:, t] + gamma * lam * running
        advantages[:, t] = running
    return torch.where(mask, advantages, 0.0), torch.where(mask, advantages + values, 0.0)


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_range: float, total=None
) -> tuple[Tensor, Tensor]:
    """PPO-clip objective (Schulman et al. 2017, eq. 7), as a loss.

    All tensors (B, T). `old_logprobs` come from the rollout policy, not from the reference. `total` as in
    `masked_mean`. Returns (loss, fraction of tokens where the clipped branch is the larger loss), both scalars.
    """
    ratio = torch.exp(torch.where(mask, logprobs - old_logprobs, 0.0))
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    loss = masked_mean(torch.maximum(unclipped, clipped), mask, total)
    return loss, masked_mean((clipped > unclipped).float(), mask, total)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip_range: float, total=None
) -> tuple[Tensor, Tensor]:
    """0.5 x mean squared error of the values, each held within `clip_range` of its value at rollout time.

    As in the PPO implementation of Dhariwal et al. ("OpenAI Baselines", 2017) and TRL. All tensors (B, T), score
    units. Returns (loss, fraction of tokens where the clipped branch is the larger loss), both scalars.
    """
    held = torch.clamp(values, old_values - clip_range, old_values + clip_range)
    free_error, held_error = (values - returns).square(), (held - returns).square()
    loss = 0.5 * masked_mean(torch.maximum(free_error, held_error), mask, total)
    return loss, masked_mean((held_error > free_error).float(), mask, total)


def sampler_weights(logprobs: Tensor, sampled_logprobs: Tensor, mask: Tensor, most: float) -> Tensor:
    """min(pi_train / pi_sample, most) per token, (B, T), 0 off the mask: truncated importance sampling.

    For replies whose sampler computed other probabilities than the training forward does (Ionides 2008; Yao et al.
    2025, "Your efficient RL framework secretly brings you off-policy RL training").
    """
    gap = torch.where(mask, logprobs - sampled_logprobs, 0.0)
    return torch.where(mask, gap.exp().clamp(max=most), 0.0)


def approximate_kl(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, total=None) -> Tensor:
    """How far an update has moved from the rollout policy: mean of 0.5 * (log ratio)^2 (k2), nats per token."""
    return masked_mean(0.5 * torch.where(mask, logprobs - old_logprobs, 0.0).square(), mask, total)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(returns - values) / Var(returns) over the masked tokens: 1 is a perfect critic, 0 one that says nothing.

    Where all returns are equal there is nothing to explain: 0.
    """
    spread = masked_var(returns, mask)
    return torch.where(spread > 0, 1 - masked_var(returns - values, mask) / spread, torch.zeros_like(spread))
