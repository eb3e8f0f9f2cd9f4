"""What all algorithms share: the KL to the reference, and the entropy, the KL and the statistics of the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.algorithms import objectives
from rlhf.algorithms.clipping import Clip
from rlhf.algorithms.experience import Experience, scored_mask, tokens_of_loss
from rlhf.models.actor_critic import PolicyOutputs
from rlhf.rewards.scores import have_equal_scores
from rlhf.rollout.completions import Rollout
from rlhf.settings.training import Config


class PolicyGradient:
    """Base of the algorithms: the terms that their equations have in common. An algorithm adds `advantages` and
    `loss`."""

    compares_groups = False  # True: with equal scores, the completions of a group have advantage 0
    per_completion = ()  # the statistics among MEANS that are means over completions

    def __init__(self, config: Config):
        self.config = config
        self.clip = Clip(*config.batch.clip)

    def kl_and_loss_mask(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Return the KL to the reference (k1, nats) and the mask of the tokens in the loss, both (B, T). The KL is NaN
        in rows that the reference has not scored: only the logged KL needs it then."""
        kl = objectives.kl_k1(rollout.logprobs, rollout.ref_logprobs, rollout.mask)
        return kl, tokens_of_loss(rollout, self.config.batch.mask_truncated_completions)

    def turn_ends(self, rollout: Rollout) -> Tensor | None:
        """Return where a unit of time ends, (B, T): at the last token of each turn. None: at every token."""
        return rollout.completions.turn_ends if self.config.critic.gae_unit == "turn" else None

    def beta_in_reward(self, kl_coef: float) -> float:
        """Return beta if the KL is charged in the reward (kl_placement "reward"), else 0."""
        return self.config.kl.coef_in("reward", kl_coef)

    def counted(self, rollout: Rollout, scores: Tensor, kl_coef: float) -> Tensor:
        """Return which completions can have a gradient, (B,), from what `advantages` receives. The optimizer steps
        compute only these.

        With a KL penalty in the loss or an entropy bonus, these are the completions with a token in the loss.
        Otherwise they also need a score, and with `compares_groups` one that differs from another of their group.
        """
        config = self.config
        loss_mask = tokens_of_loss(rollout, config.batch.mask_truncated_completions)
        if config.batch.entropy_coef or config.kl.coef_in("loss", kl_coef):
            return loss_mask.any(1)
        found = scored_mask(loss_mask, scores).any(1)
        if not self.compares_groups or self.beta_in_reward(kl_coef):
            return found
        # by the scores: the mean of three times 0.1 is rounded, so that an advantage of equal scores need not be 0
        return found & ~have_equal_scores(scores, config.group_size).repeat_interleave(config.group_size)

    def kl_in_loss(self, experience: Experience, rows: Tensor, outputs: PolicyOutputs) -> tuple[float, Tensor]:
        """Return beta and the KL of the loss per token, (n, T) in nats; both are 0 unless kl_placement is "loss"."""
        beta = self.config.kl.coef_in("loss", experience.kl_coef)
        mask = experience.loss_mask[rows]
        if not beta:
            return 0.0, torch.zeros_like(outputs.logprobs)
        old = experience.logprobs[rows]
        reference = experience.ref_logprobs[rows]
        return beta, objectives.kl_loss_per_token(outputs.logprobs, old, reference, mask)

    def entropy_bonus(self, outputs: PolicyOutputs, mask: Tensor, total_tokens: Tensor) -> Tensor | float:
        """Return entropy_coef * mean entropy: the sum over the tokens of `mask` (n, T), divided by `total_tokens`,
        those of the minibatch. 0 without the coefficient."""
        coef = self.config.batch.entropy_coef
        # detail 32: over the minibatch (37 details, 10). Otherwise the micro-batch size changes the result.
        return coef * objectives.masked_mean(outputs.entropy, mask, total_tokens) if coef else 0.0


MEANS = ("policy/approx_kl", "policy/clipfrac", "policy/entropy", "policy/ratio")  # statistics that are means


@torch.no_grad()
def policy_stats(
    experience: Experience,
    rows: Tensor,
    outputs: PolicyOutputs,
    total_tokens: Tensor,
    *,
    loss: Tensor,
    policy_loss: Tensor,
    clipfrac: Tensor,
) -> dict[str, Tensor]:
    """Return detached statistics of the micro-batch `rows` (n,) by TensorBoard tag.

    `loss`, `policy_loss` and `clipfrac` are returned as given. The approximate KL to the rollout policy (k2, nats per
    token), the entropy and the ratio are sums over the rows' tokens in the loss, divided by `total_tokens`, their
    number in the minibatch. The values of its micro-batches therefore add up to the minibatch's mean.
    """
    mask = experience.loss_mask[rows]
    old = experience.logprobs[rows]
    log_ratio = objectives.log_ratios(outputs.logprobs, old, mask)
    per_token = torch.stack([0.5 * log_ratio.square(), outputs.entropy * mask, log_ratio.exp() * mask])
    approx_kl, entropy, ratio = (per_token.sum((1, 2)) / total_tokens).unbind()
    return {
        "loss": loss.detach(),
        "policy/loss": policy_loss.detach(),
        "policy/clipfrac": clipfrac.detach(),
        "policy/approx_kl": approx_kl,
        "policy/entropy": entropy,
        "policy/ratio": ratio,
    }
