"""The equations of PPO, GRPO and RLOO on text: pure functions of tensors and floats, without settings or trainer.

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


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_range: float) -> tuple[Tensor, Tensor]:
    """PPO-clip per token (Schulman et al. 2017, eq. 7), as a loss: max(-A r, -A clip(r, 1 - c, 1 + c)).

    Returns the loss and whether the clipped branch is the larger one, both of the shape of `ratio` (B, T).
    """
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_range: float, total=None
) -> tuple[Tensor, Tensor]:
    """PPO's policy term: the mean of `clipped_surrogate` over tokens.

    All tensors (B, T). `old_logprobs` come from the rollout policy, not from the reference. `total` as in
    `masked_mean`. Returns (loss, fraction of tokens where the clipped branch is the larger loss), both scalars.
    """
    ratio = torch.exp(torch.where(mask, logprobs - old_logprobs, 0.0))
    loss, is_clipped = clipped_surrogate(ratio, advantages, clip_range)
    return masked_mean(loss, mask, total), masked_mean(is_clipped.float(), mask, total)


def group_advantages(scores: Tensor, group_size: int, scale: str = "none") -> Tensor:
    """GRPO's advantages of scores, both (B,), score units: A = score - mean of its group (Shao et al. 2024, arXiv
    2402.03300, sec. 4.1.2).

    A group's `group_size` completions of one prompt are neighbours. `scale`: divide by the standard deviation + 1e-4
    of the "group" (Shao et al.) or of the "batch", or by nothing, "none" (Liu et al. 2025, arXiv 2503.20783: division
    by the group's favours prompts that are too easy or too hard).
    """
    groups = scores.view(-1, group_size)
    advantages = (groups - groups.mean(1, keepdim=True)).flatten()
    if scale == "none":
        return advantages
    spread = groups.std(1).repeat_interleave(group_size) if scale == "group" else scores.std()
    return advantages / (spread + 1e-4)


def grpo_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_range: float, loss_type: str
) -> tuple[Tensor, Tensor]:
    """GRPO's policy term per token, as a loss, before `grpo_token_weights`: PPO-clip with the group's advantages.

    All tensors (n, T). `dapo`, `grpo` and `dr_grpo` differ in their weights alone. `gspo` has one ratio per
    completion, the geometric mean of its tokens' (Zheng et al. 2025, arXiv 2507.18071). `cispo` weights the
    log-probability by the ratio, clipped from above and without a gradient (MiniMax 2025, arXiv 2506.13585). Returns
    the loss and whether the ratio was clipped, both (n, T), 0 and False off the mask.
    """
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    if loss_type == "gspo":
        log_ratio = (log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True)).expand_as(mask)
    ratio = torch.exp(log_ratio)
    if loss_type == "cispo":
        loss, is_clipped = -ratio.clamp(max=1 + clip_range).detach() * advantages * logprobs, ratio > 1 + clip_range
    else:
        loss, is_clipped = clipped_surrogate(ratio, advantages, clip_range)
    return torch.where(mask, loss, 0.0), mask & is_clipped


def grpo_token_weights(
    loss_type: str, lengths: Tensor, completions: int, rollout_tokens: Tensor, longest: int
) -> Tensor:
    """The weight of one token's loss in its minibatch, (n, 1), for completions of `lengths` (n,) tokens.

    dapo, cispo:  1 / tokens                                           (Yu et al. 2025, arXiv 2503.14476)
    grpo, gspo:   1 / (completions x the completion's tokens)          (Shao et al. 2024, arXiv 2402.03300)
    dr_grpo:      1 / (completions x the longest completion possible)  (Liu et al. 2025, arXiv 2503.20783)

    `completions` is the number in the minibatch; `rollout_tokens` those of the whole rollout / minibatches, as in TRL.
    """
    if loss_type in ("dapo", "cispo"):
        return (1 / rollout_tokens).expand(len(lengths), 1)
    tokens = torch.full_like(lengths, longest) if loss_type == "dr_grpo" else lengths
    return 1 / (tokens.unsqueeze(1) * completions)


def leave_one_out_advantages(scores: Tensor, group_size: int) -> Tensor:
    """RLOO's advantages of scores, both (B,), score units: A_i = R_i - mean of the other R_j of its group (Ahmadian
    et al. 2024, arXiv 2402.14740, eq. 8). A group's `group_size` completions of one prompt are neighbours.
    """
    groups = scores.view(-1, group_size)
    others = (groups.sum(1, keepdim=True) - groups) / (group_size - 1)
    return (groups - others).flatten()


LARGEST_LOG_RATIO = 20.0  # exp of more would end in infinite numbers, also where the clip makes the gradient 0


def completion_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """pi_new(completion) / pi_rollout(completion) = exp(sum_t log r_t), (n,), from log-probabilities (n, T); held
    between exp(-20) and exp(20), without a gradient outside."""
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0).sum(1)
    return torch.exp(log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def rloo_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_range: float
) -> tuple[Tensor, Tensor, Tensor]:
    """RLOO's policy term per completion, as a loss: PPO-clip with the completion as one action (Ahmadian et al. 2024,
    arXiv 2402.14740, sec. 3.2; clipped as in TRL's RLOOTrainer).

    Log-probabilities and mask (n, T), advantages (n,). Returns the loss, whether it was clipped, and the ratio, each
    (n,).
    """
    ratio = completion_ratio(logprobs, old_logprobs, mask)
    return *clipped_surrogate(ratio, advantages, clip_range), ratio


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


TIS_CAP = 2.0


def truncated_importance_weights(
    logprobs: Tensor,
    sampled_logprobs: Tensor,
    mask: Tensor,
    one_action: bool = False,
    cap: float = TIS_CAP,
) -> Tensor:
    """min(pi_train / pi_sample, cap) per token, (B, T), 0 off the mask: truncated importance sampling. If the
    completion is `one_action`, the ratio is that of the whole completion, at all its tokens.

    For completions whose sampler computed other probabilities than the training forward does (Ionides 2008; Yao et
    al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").
    """
    gap = torch.where(mask, logprobs - sampled_logprobs, 0.0)
    gap = gap.sum(1, keepdim=True) if one_action else gap
    return torch.where(mask, gap.exp().clamp(max=cap), 0.0)


def approximate_kl(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, total=None) -> Tensor:
    """How far an update has moved from the rollout policy: mean of 0.5 * (log ratio)^2 (k2), nats per token."""
    return masked_mean(0.5 * torch.where(mask, logprobs - old_logprobs, 0.0).square(), mask, total)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(returns - values) / Var(returns) over the masked tokens: 1 is a perfect critic, 0 one that says nothing.

    Where all returns are equal there is nothing to explain: 0.
    """
    variance = masked_var(returns, mask)
    return torch.where(variance > 0, 1 - masked_var(returns - values, mask) / variance, torch.zeros_like(variance))
