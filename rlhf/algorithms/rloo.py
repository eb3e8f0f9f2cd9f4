"""REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740): a whole completion is one action, no critic."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.algorithms import objectives
from rlhf.algorithms.clipping import Clip
from rlhf.algorithms.experience import Experience, PolicyOutputs, policy_stats, tokens_of_loss
from rlhf.rollout.completions import Rollout
from rlhf.settings.training import Config


class RLOO:
    """Advantages relative to the mean of the group's other completions, and PPO-clip on whole-completion ratios."""

    def __init__(self, config: Config):
        self.config, self.clip = config, Clip(*config.batch.clip)

    def advantages(self, rollout: Rollout, scores: Tensor, kl_coef: float) -> Experience:
        """Computes one advantage per completion, the same for all its tokens.

        Args:
            rollout: B completions; the `group_size` completions of one prompt are neighbours.
            scores: (B,) score units. NaN: no score, so the completion's advantage is 0.
            kl_coef: beta, score units per nat. It is charged here only if kl_placement is "reward".
        """
        kl = objectives.kl_k1(rollout.logprobs, rollout.ref_logprobs, rollout.mask)
        loss_mask = tokens_of_loss(rollout, self.config.batch.mask_truncated_completions)
        # R_i = score_i - beta * sum_t KL_it, the sum over tokens in the loss
        rewards = scores - self.config.kl.coef_in("reward", kl_coef) * torch.where(loss_mask, kl, 0.0).sum(1)
        # A_i = R_i - mean of the group's other R_j
        per_completion = objectives.leave_one_out_advantages(rewards, self.config.group_size)
        advantages = torch.where(loss_mask, per_completion.unsqueeze(1), 0.0)
        return Experience.of(
            rollout,
            scores=scores,
            kl=kl,
            kl_coef=kl_coef,
            raw_advantages=advantages,
            advantages=advantages,
            loss_mask=loss_mask,
            one_action=True,
        )

    def loss(
        self, experience: Experience, rows: Tensor, outputs: PolicyOutputs, total_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the RLOO loss of a micro-batch, `rows` (n,), and its detached statistics by TensorBoard tag.

            L = sum_i (L_policy_i + beta * sum_t KL_it) / minibatch_size - entropy_coef * mean entropy

        The mean entropy is a sum over the rows' tokens, divided by the tokens of the minibatch in the loss,
        `total_tokens`. The losses of the minibatch's micro-batches therefore add up to its loss. `outputs` are those
        of the current policy. beta is 0 here unless kl_placement is "loss".
        """
        config, mask, old = self.config, experience.loss_mask[rows], experience.logprobs[rows]
        # every token has its completion's advantage, so the first one is enough
        per_completion, clipped, ratio = objectives.rloo_policy_loss(
            outputs.logprobs, old, experience.advantages[rows, 0], mask, self.clip
        )
        policy_loss = per_completion.sum() / config.minibatch_size
        clipfrac = clipped.float().sum() / config.minibatch_size
        loss = policy_loss
        if config.batch.entropy_coef:
            loss = loss - config.batch.entropy_coef * objectives.masked_mean(outputs.entropy, mask, total_tokens)
        beta = config.kl.coef_in("loss", experience.kl_coef)
        if beta:
            kl = objectives.kl_loss_per_token(outputs.logprobs, old, experience.ref_logprobs[rows], mask)
            loss = loss + beta * kl.sum() / config.minibatch_size
        return loss, {
            "loss": loss.detach(),
            **policy_stats(policy_loss, clipfrac, outputs, experience, rows, total_tokens),
            "policy/ratio": ratio.detach().sum() / config.minibatch_size,  # of completions, as the loss uses it
        }
