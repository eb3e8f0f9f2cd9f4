"""Predicts how long an update and an evaluation take on this machine's CPU, before the first of them is measured.

It counts products, tokens x weights, whose seconds are measured. Completions have --max-new-tokens tokens, and every
one its own prompt. Sampling, the log-probs, those of the reference and of a teacher, the critic's values and the
reward model take a forward pass each, in an evaluation the log-probs of the completions whose KL is measured. A pass
of the optimizer has three times the products. Nothing else is counted, such as attention scores, reward functions and
the draws of dynamic sampling.
"""

from __future__ import annotations

from statistics import fmean

from rlhf.settings.training import Config
from rlhf.setup.memory import Estimator
from rlhf.trainer.evaluation import KL_PROMPTS


def predicted_seconds(config: Config, given: Estimator, product: float) -> dict[str, list[float]]:
    """Return the seconds of one update and of one evaluation of a run with the `given` models and prompts. `product`:
    seconds per token and weight in a forward pass."""
    policy = given.policy.parameters
    learned = policy * (1 + config.separate_critic)
    judged = sum(model.parameters for model in (given.reward_model, given.teacher) if model is not None)
    length = config.sampling.max_new_tokens
    trained = config.episodes_per_update * (length + fmean(len(prompt.ids) for prompt in given.train))
    evaluated = config.run.eval_samples * sum(length + prompt for prompt in given.evaluation)
    measured = 1 if given.teacher else min(1, KL_PROMPTS / len(given.evaluation))  # share of the completions
    return {
        "updates": [product * trained * (2 * policy + learned + judged + 3 * config.batch.ppo_epochs * learned)],
        "evaluations": [product * evaluated * (policy + 2 * measured * policy + judged)],
    }
