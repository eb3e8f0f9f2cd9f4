"""Tests of the KL penalty in the loss, one formula for PPO and GRPO, against gradients computed separately."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from rlhf.algorithms.objectives import kl_loss_per_token
from rlhf.settings.fields import settings_of
from rlhf.settings.training import Config

LENGTH = 8
LOSS_TYPES = settings_of(Config)["loss_type"].choices


def test_penalty_of_one_token_matches_the_value_computed_by_hand():
    """p 0.5, p_old 0.25, q 0.125: ratio 2, k3 = 0.25 - 1 + ln 4."""
    new, old, ref = (torch.log(torch.tensor([[p, 0.9]])) for p in (0.5, 0.25, 0.125))
    mask = torch.tensor([[True, False]])
    expected = 2 * (0.25 - 1 + math.log(4))
    assert_close(kl_loss_per_token(new, old, ref, mask), torch.tensor([[expected, 0.0]]))


def test_expected_gradient_is_that_of_the_kl_to_the_reference_model():
    """The exact expectation under p_old over a vocabulary of 7 is grad KL(p || q), also if p differs from p_old."""
    generator = torch.Generator().manual_seed(0)
    logits, old, ref = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    p, p_old, q = (x.log_softmax(-1) for x in (logits, old, ref))
    mask = torch.ones(1, 7, dtype=torch.bool)
    penalty = kl_loss_per_token(p[None], p_old[None], q[None], mask)[0]
    (estimated,) = torch.autograd.grad((p_old.exp() * penalty).sum(), logits, retain_graph=True)
    (exact,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    (other,) = torch.autograd.grad((q.exp() * (q - p)).sum(), logits)
    assert_close(estimated, exact)
    assert float((exact - other).abs().max()) > 0.1, "the two KLs must differ, otherwise the test proves nothing"


def divisor(loss_type: str | None, length: int, tokens: int, completions: int, rollout_tokens: float) -> float:
    """Return the divisor of the loss of one token, as in docs/how_it_works.md.

    `tokens` and `completions` are counts of the minibatch. `rollout_tokens` is the rollout's count / minibatches.
    """
    return {
        None: tokens, "dapo": rollout_tokens, "cispo": rollout_tokens,
        "grpo": completions * length, "gspo": completions * length, "dr_grpo": completions * LENGTH,
    }[loss_type]  # fmt: skip


@pytest.mark.parametrize(("minibatches", "micro_batch", "rows"), [(1, 0, [0, 1, 2, 3]), (2, 1, [0, 3])])
@pytest.mark.parametrize("loss_type", [None, *LOSS_TYPES])
def test_gradient_matches_a_plain_forward_pass_after_the_policy_changed(
    build, loss_type, minibatches, micro_batch, rows
):
    """The advantages and the value coefficient are 0, so only the penalty has a gradient. Loss type None is PPO."""
    beta = 0.7
    flags = ["--kl-placement", "loss", "--kl-schedule", "fixed", "--kl-coef", beta, "--learning-rate", "3e-3",
             "--max-new-tokens", LENGTH, "--minibatches", minibatches, "--micro-batch-size", micro_batch,
             "--max-grad-norm", 1e9]  # fmt: skip
    flags += ["--value-coef", 0] if loss_type is None else ["--loss-type", loss_type]
    trainer = build(*flags, algorithm="ppo" if loss_type is None else "grpo")
    with torch.no_grad():
        for weight in trainer.reference.copy.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    batch = trainer.advantages(rollout, torch.tensor([0.0, 1.0, 3.0, 2.0]))
    trainer.policy_optimizer.run(batch, 1)  # now the policy differs from the rollout policy
    batch.advantages.zero_()
    trainer.host.model.train()
    stats = trainer.policy_optimizer.minibatch_gradients(batch, rows)
    policy = trainer.actor.policy
    gradients = {name: weight.grad.clone() for name, weight in policy.named_parameters()}
    assert float(stats["policy/approx_kl"]) > 1e-5, "the ratios must differ from 1, otherwise the test proves nothing"

    policy.zero_grad()
    completions = rollout.completions.rows()
    tokens = sum(len(completions[i]) for i in rows)
    all_tokens = sum(map(len, completions)) / minibatches
    loss = torch.zeros(())
    for i in rows:
        prompt = rollout.prompts[i]
        completion = completions[i]
        ids = torch.tensor([[*prompt.ids, *completion]])
        at = torch.arange(len(prompt.ids) - 1, ids.shape[1] - 1)
        p, q = (
            (model(ids).logits[0, at] / 0.7).log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            for model in (policy, trainer.reference.copy)
        )
        p_old = rollout.logprobs[i, : len(completion)]
        k3 = (q.detach() - p).exp() - 1 - (q.detach() - p)
        loss = loss + ((p - p_old).exp() * k3).sum() / divisor(
            loss_type, len(completion), tokens, len(rows), all_tokens
        )
    (beta * loss).backward()
    scale = max(float(weight.grad.abs().max()) for weight in policy.parameters())
    for name, weight in policy.named_parameters():
        assert_close(gradients[name], weight.grad, rtol=0, atol=2e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")
