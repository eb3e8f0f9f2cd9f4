"""How verl 0.9.1 names the advantages and losses of the algorithms."""

from __future__ import annotations

from rlhf.settings.training import Config

# algorithm -> algorithm.adv_estimator
ESTIMATORS = {
    "ppo": "gae",
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_pp": "reinforce_plus_plus",
    "remax": "remax",
}
OF_COMPLETIONS = "seq-mean-token-sum"
# loss_type of GRPO, or algorithm -> actor.loss_agg_mode, if it is not token-mean
AGGREGATED = {
    "grpo": "seq-mean-token-mean",
    "gspo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "rloo": OF_COMPLETIONS,
}


def loss_of(config: Config) -> tuple[str, str]:
    """Return the kind of the policy loss, loss_type of GRPO or the algorithm, and its actor.loss_agg_mode."""
    kind = config.grpo.loss_type if config.algorithm == "grpo" else config.algorithm
    return kind, AGGREGATED.get(kind, "token-mean")
