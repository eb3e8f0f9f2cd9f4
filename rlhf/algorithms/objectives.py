"""The equations of the algorithms for text: pure functions of tensors and floats, without settings or trainer.

Shapes: B episodes, T completion tokens, n rows of a micro-batch. `mask` (B, T) is True on the policy's tokens, the EOS
of its turns included. An environment's tokens may lie between them. Values where `mask` is False are ignored. Tensors
are float32 unless noted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.algorithms.clipping import Clip, clipped_surrogate


def masked_mean(values: Tensor, mask: Tensor, total: Tensor | float | None = None) -> Tensor:
    """Return the mean of `values` (B, T) over the tokens where `mask` (B, T) is True, a scalar.

    `total` replaces the number of these tokens as the divisor. If every micro-batch divides by the tokens of its
    minibatch, the results add up to the minibatch's mean.
    """
    # detail 28: one divisor per minibatch (this project). Otherwise a token of a short micro-batch counts more.
    return values.masked_fill(~mask, 0.0).sum() / (mask.sum() if total is None else total)


def masked_share(condition: Tensor, mask: Tensor, total: Tensor | float | None = None) -> Tensor:
    """Return the share of the masked tokens whose `condition` (B, T) is True, a scalar. `total` as in
    `masked_mean`."""
    return (condition & mask).sum() / (mask.sum() if total is None else total)


def log_ratios(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return log r_t = log p_new - log p_old per token, (n, T) in nats, 0 where `mask` is False."""
    return (logprobs - old_logprobs).masked_fill(~mask, 0.0)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Return the unbiased variance of `values` (B, T) over the masked tokens, a scalar; 0 for a single token."""
    centered = torch.where(mask, values - masked_mean(values, mask), 0.0)
    return centered.square().sum() / (mask.sum() - 1).clamp(min=1)


def whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Return `values` (B, T) scaled to variance 1 over the masked tokens, to mean 0 if `shift_mean`; 0 elsewhere."""
    mean = masked_mean(values, mask)
    var = masked_var(values, mask)
    # (x - mean) / sqrt(var + 1e-8)
    whitened = (values - mean) * torch.rsqrt(var + 1e-8)
    return torch.where(mask, whitened if shift_mean else whitened + mean, 0.0)


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return the k1 estimate of the KL per token, log p - log q, (B, T) in nats, 0 where `mask` is False.

    Unbiased for samples from p; can be negative. Its sum over a completion estimates the KL of the sequence.
    Source: Schulman, "Approximating KL Divergence" (2020).
    """
    return torch.where(mask, logprobs - ref_logprobs, 0.0)


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return the k3 estimate of the KL per token, (B, T) in nats, 0 where `mask` is False. It is never negative.

    Source: Schulman, "Approximating KL Divergence" (2020).
    """
    log_ratio = torch.where(mask, ref_logprobs - logprobs, 0.0)
    # k3 = r - 1 - log r with r = q / p
    return torch.expm1(log_ratio) - log_ratio


def kl_loss_per_token(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return the KL penalty of the loss per token, (p_new / p_old) * k3, (n, T) in nats, 0 where `mask` is False.

    Its gradient is (p_new / p_old) * log(p_new / q) * grad log p_new, an importance-weighted estimate of the gradient
    of KL(policy || reference). This is the KL that is logged and controlled. docs/how_it_works.md has the derivation.
    """
    # detail 20: (p_new / p_old) * (q / p_new - 1 - log(q / p_new)) (DeepSeek-V3.2, arXiv 2512.02556). Without the
    # ratio, the gradient is that of KL(reference || policy).
    ratio = torch.exp(log_ratios(logprobs, old_logprobs, mask))
    return ratio * kl_k3(logprobs, ref_logprobs, mask)


def last_token(mask: Tensor) -> Tensor:
    """Return a mask (B, T) that is True at the last token of each completion that has one."""
    from_here_on = mask.flip(1).cumsum(1).flip(1)
    return mask & (from_here_on == 1)


def charged(kl: Tensor, beta: float) -> Tensor:
    """Return the penalty beta * KL, in score units. Without beta it is 0, also if the KL is not known (NaN)."""
    return beta * kl if beta else torch.zeros_like(kl)


def completion_rewards(kl: Tensor, scores: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Return one reward per completion, (B,) in score units: the score (B,) minus beta times the KL of the sequence.

    `kl` is (B, T) in nats. Source: Ahmadian et al. 2024, arXiv 2402.14740, sec. 2.
    """
    # R_i = score_i - beta * sum_t KL_it
    return scores - charged(torch.where(mask, kl, 0.0).sum(1), beta)


def shape_rewards(
    kl: Tensor,
    scores: Tensor,
    mask: Tensor,
    beta: float,
    kl_penalty_at: str = "token",
    token_scores: Tensor | None = None,
) -> Tensor:
    """Return one reward per token, (B, T) in score units: the score (B,) at the last token, and the KL penalty.

    `token_scores` (B, T) replaces the score at the last token: the part of the score that is paid at each token.
    `kl_penalty_at` is "token", a penalty at every token (Ziegler et al. 2019, arXiv 1909.08593, eq. 2), or "eos", the
    penalty of the whole completion at its last token.
    """
    final = last_token(mask)
    paid = torch.where(final, scores.unsqueeze(1), 0.0) if token_scores is None else token_scores.masked_fill(~mask, 0)
    if kl_penalty_at == "eos":
        # r_T = score - beta * sum_t KL_t
        return paid - torch.where(final, charged(kl.sum(1), beta).unsqueeze(1), 0.0)
    # detail 19: r_t = -beta * KL_t, and at EOS r_T = score - beta * KL_T (Ziegler et al. 2019, eq. 2). One position
    # later, the critic would have one more target.
    return torch.where(mask, -charged(kl, beta), 0.0) + paid


def following(values: Tensor, mask: Tensor) -> Tensor:
    """Return the value (B, T) at the next token where `mask` is True, 0 after the last one and where it is False."""
    order = (~mask).int().argsort(dim=1, stable=True)  # the masked tokens first, in their order
    together = torch.where(mask, values, 0.0).gather(1, order)
    shifted = torch.cat([together[:, 1:], torch.zeros_like(together[:, :1])], dim=1)
    return torch.zeros_like(values).scatter(1, order, shifted)


def per_step(factor: float, values: Tensor, mask: Tensor, turn_ends: Tensor | None) -> Tensor:
    """Return a factor (B, T) that acts once per unit of time, between a token and the next one: 1 inside a unit.

    The unit is a token of `mask`, or with `turn_ends` (B, T), which is True on the last token of each turn, a turn.
    """
    return torch.ones_like(values).masked_fill(mask if turn_ends is None else turn_ends, factor)


def td_errors(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, turn_ends: Tensor | None = None) -> Tensor:
    """Return temporal-difference errors, (B, T) in score units, 0 where `mask` is False.

    A step leads from one token of the policy to its next one: the value after a turn is that after the observation.
    The value after the last token is 0, whether the completion ended with EOS or reached max_new_tokens. With
    `turn_ends`, gamma acts between turns only, as in `generalized_advantage_estimate`.
    Source: Schulman et al. 2016, arXiv 1506.02438, section 3; Schulman et al. 2017, arXiv 1707.06347, eq. 12.
    """
    values = torch.where(mask, values, 0.0)
    rewards = torch.where(mask, rewards, 0.0)
    # detail 24: 0 after the last token (37 details, 5). No reward follows that a value could predict.
    # delta_t = r_t + gamma * V(s_{t+1}) - V(s_t)
    return rewards + per_step(gamma, values, mask, turn_ends) * following(values, mask) - values


def generalized_advantage_estimate(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, turn_ends: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return GAE's advantages and the returns, both (B, T) in score units, 0 where `mask` is False.

    The returns are the critic's targets. With `turn_ends` (B, T), True on the last token of each turn, gamma and
    lambda act between turns only, and are 1 inside a turn (Turn-PPO, arXiv 2512.17008; `gae_timestep_unit` in AReaL).
    Source: Schulman et al. 2016, arXiv 1506.02438, eq. 16.
    """
    # on a GPU the loop has three kernels per token
    deltas = td_errors(rewards, values, mask, gamma, turn_ends).cpu()
    decay = per_step(gamma * lam, values, mask, turn_ends).cpu()  # 1 on an environment's tokens: no time passes there
    advantages = torch.zeros_like(deltas)
    running = torch.zeros_like(deltas[:, 0])
    for t in reversed(range(deltas.shape[1])):
        # A_t = delta_t + gamma * lambda * A_{t+1}
        running = deltas[:, t] + decay[:, t] * running
        advantages[:, t] = running
    advantages = advantages.to(values.device)
    # return_t = A_t + V(s_t)
    return torch.where(mask, advantages, 0.0), torch.where(mask, advantages + values, 0.0)


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: Clip, total=None
) -> tuple[Tensor, Tensor]:
    """Computes PPO's policy loss, the mean of `clipped_surrogate` over the tokens.

    Tensors are (n, T). `old_logprobs` are from the rollout policy, not from the reference. `total` as in
    `masked_mean`. Returns the loss, and the fraction of tokens whose clipped branch is the larger one, both scalars.
    """
    # r_t = p_new / p_old
    ratio = torch.exp(log_ratios(logprobs, old_logprobs, mask))
    loss, is_clipped = clipped_surrogate(ratio, advantages, clip)
    return masked_mean(loss, mask, total), masked_share(is_clipped, mask, total)


def group_advantages(scores: Tensor, group_size: int, scale: str = "none") -> Tensor:
    """Return GRPO's advantages (B,) from scores (B,): relative to the mean of the group, then scaled.

    The `group_size` completions of one prompt are neighbours in the batch. Completions without a score (NaN) get
    advantage 0 and are left out of means and standard deviations. `scale` is the divisor:

    group:  the group's standard deviation + 1e-4 (Shao et al. 2024, arXiv 2402.03300, sec. 4.1.2)
    batch:  the batch's standard deviation + 1e-4 (Liu et al. 2025, arXiv 2508.08221)
    none:   1. Liu et al. 2025, arXiv 2503.20783: "group" favours prompts that are too easy or too hard
    """
    groups = scores.view(-1, group_size)
    # A_i = (score_i - mean of the group) / scale
    advantages = _centered(groups)
    # detail 26: no division by default (arXiv 2503.20783). It favours groups whose completions hardly differ.
    if scale != "none":
        rows = groups if scale == "group" else scores.unsqueeze(0)
        freedom = ((~rows.isnan()).sum(1, keepdim=True) - 1).clamp(min=1)
        advantages = advantages / ((_centered(rows).square().sum(1, keepdim=True) / freedom).sqrt() + 1e-4)
    return advantages.flatten()


def _centered(groups: Tensor) -> Tensor:
    """Return the distance of each value of (G, K) from the mean of its row; NaN becomes 0 and is not averaged."""
    known = ~groups.isnan()
    mean = torch.where(known, groups, 0.0).sum(1, keepdim=True) / known.sum(1, keepdim=True).clamp(min=1)
    return torch.where(known, groups - mean, 0.0)


def grpo_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: Clip, loss_type: str
) -> tuple[Tensor, Tensor]:
    """Computes GRPO's policy loss per token, not yet multiplied by `grpo_token_weights`.

    Tensors are (n, T). Returns the loss, and True where the ratio is clipped, both (n, T). `loss_type`:

    dapo, grpo, dr_grpo:  `clipped_surrogate` with one ratio per token; only the weights differ
    gspo:   `clipped_surrogate` with one ratio per completion (Zheng et al. 2025, arXiv 2507.18071)
    cispo:  REINFORCE weighted by the ratio, clipped from above at 1 + clip.high, without gradient (MiniMax 2025, arXiv
            2506.13585)
    """
    log_ratio = log_ratios(logprobs, old_logprobs, mask)
    if loss_type == "gspo":
        # geometric mean of the token ratios: r = exp(mean_t log r_t)
        log_ratio = (log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).expand_as(mask)
    ratio = torch.exp(log_ratio)
    if loss_type == "cispo":
        # detail 30: -stop_gradient(min(r_t, 1 + high)) * A * log p_t (MiniMax 2025). Clipped as in PPO, tokens with a
        # large ratio would have no gradient.
        loss = -ratio.clamp(max=1 + clip.high).detach() * advantages * logprobs
        is_clipped = ratio > 1 + clip.high
    else:
        loss, is_clipped = clipped_surrogate(ratio, advantages, clip)
    return loss.masked_fill(~mask, 0.0), mask & is_clipped


def grpo_token_weights(
    loss_type: str, lengths: Tensor, completions: int, rollout_tokens: Tensor, longest: int
) -> Tensor:
    """Return the weight of each token's loss in its minibatch, (n, 1): one weight per completion.

    dapo, cispo:  1 / rollout_tokens             (Yu et al. 2025, arXiv 2503.14476)
    grpo, gspo:   1 / (completions * length_i)   (Shao et al. 2024, arXiv 2402.03300)
    dr_grpo:      1 / (completions * longest)    (Liu et al. 2025, arXiv 2503.20783)

    Args:
        lengths: (n,) tokens of each completion in the loss, 0 if it is masked.
        completions: number of completions in the minibatch.
        rollout_tokens: tokens of the whole rollout in the loss, divided by the number of minibatches, as in TRL.
        longest: the tokens of the longest possible completion.
    """
    if loss_type in ("dapo", "cispo"):
        return (1 / rollout_tokens).expand(len(lengths), 1)
    tokens = torch.full_like(lengths, longest) if loss_type == "dr_grpo" else lengths.clamp(min=1)
    return 1 / (tokens.unsqueeze(1) * completions)


def leave_one_out_advantages(scores: Tensor, group_size: int) -> Tensor:
    """Return RLOO's advantages (B,) from scores (B,), both in score units: relative to the other scores of the group.

    Groups and NaN are as in `group_advantages`. A group with a single score has advantage 0.
    Source: Ahmadian et al. 2024, arXiv 2402.14740, eq. 8.
    """
    groups = scores.view(-1, group_size)
    known = ~groups.isnan()
    values = torch.where(known, groups, 0.0)
    others = known.sum(1, keepdim=True) - 1
    # A_i = R_i - mean of R_j over the other completions j of the group
    advantages = values - (values.sum(1, keepdim=True) - values) / others.clamp(min=1)
    return torch.where(known & (others > 0), advantages, 0.0).flatten()


LARGEST_LOG_RATIO = 20.0  # nats


def completion_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return the ratio of the probabilities of whole completions under two policies, (n,), from (n, T) nats.

    The log-ratio is clamped to [-20, 20]; its gradient is 0 outside.
    """
    # p_new(completion) / p_old(completion) = exp(sum_t log r_t)
    log_ratio = log_ratios(logprobs, old_logprobs, mask).sum(1)
    # detail 31: the log ratio is limited (this project). Otherwise exp can overflow, even where the clip acts.
    return torch.exp(log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip_range: float, total=None
) -> tuple[Tensor, Tensor]:
    """Computes the critic's loss: half the mean squared error, with each value's change since the rollout clipped.

    Tensors are (n, T), in score units. `total` as in `masked_mean`. Returns the loss, and the fraction of tokens whose
    clipped branch is the larger one, both scalars.
    Source: the PPO implementation of Dhariwal et al. ("OpenAI Baselines", 2017); TRL has the same.
    """
    # detail 27: V_clip = clip(V, V_old - c, V_old + c);  L = 0.5 * mean(max((V - R)^2, (V_clip - R)^2)) (Dhariwal et
    # al. 2017). Without the clip, one update can move the values far.
    # the clipped error is the larger one only if V is outside the limits, so it has no gradient
    clipped = torch.clamp(values.detach(), old_values - clip_range, old_values + clip_range)
    error = (values - returns).square()
    clipped_error = (clipped - returns).square()
    is_clipped = clipped_error > error
    loss = 0.5 * masked_mean(torch.where(is_clipped, clipped_error, error), mask, total)
    return loss, masked_share(is_clipped, mask, total)


TIS_CAP = 2.0  # the largest importance weight


def truncated_importance_weights(logprobs: Tensor, sampled_logprobs: Tensor, mask: Tensor, one_action: bool) -> Tensor:
    """Return truncated importance weights (B, T), 0 where `mask` is False.

    They correct for a sampler whose probabilities differ from those of the training forward pass, such as vLLM.
    With `one_action`, all tokens of a completion have the ratio of the whole completion.
    Source: Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    # detail 12: min(p_train / p_sampler, cap) (Ionides 2008). Without it, the gradient is biased towards the sampler.
    gap = torch.where(mask, logprobs - sampled_logprobs, 0.0)
    gap = gap.sum(1, keepdim=True) if one_action else gap
    return torch.where(mask, gap.exp().clamp(max=TIS_CAP), 0.0)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Return the share of the returns' variance that the values explain, a scalar; 0 if all returns are equal."""
    variance = masked_var(returns, mask)
    # 1 - Var(returns - values) / Var(returns)
    return torch.where(variance > 0, 1 - masked_var(returns - values, mask) / variance, torch.zeros_like(variance))
