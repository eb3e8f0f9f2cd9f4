"""Samples completions of training prompts with the start model and scores them, before a trainer exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import TrainerState

from rlhf.data.prompts import Prompt
from rlhf.data.sampler import planned_updates
from rlhf.models.actor_critic import Actor
from rlhf.models.device import autocast_dtype
from rlhf.models.logprobs import base_of
from rlhf.rollout.sampler import Sampler
from rlhf.settings.training import Config
from rlhf.setup.build import Components
from rlhf.trainer.passes import ForwardPasses
from rlhf.trainer.play import Player

PURPOSE = "scan"  # of the random numbers: independent of rollouts and evaluations


@dataclass(frozen=True)
class Sampled:
    """The scored completions of one prompt. Completions without a score (None) are not in the lists of scores."""

    prompt: Prompt
    raw: list[float]  # the weighted sum of the rewards
    shaped: list[float]  # after the missing-EOS penalty, as training uses them; without normalization
    ended: list[bool]  # per completion: EOS was sampled, or a stop string
    distinct: int  # number of distinct texts
    texts: list[str]  # of the completions with a score
    by_function: dict[str, list[float]]  # the values of each reward function, before its weight


def sample_and_score(config: Config, components: Components, indices: Sequence[int], samples: int) -> list[Sampled]:
    """Return `samples` scored completions of each of these training prompts. All are sampled at once. Reward functions
    receive the `trainer_state` of update 0.

    Uses the engines of the run, but vLLM as little as evaluations do: it has a separate random stream. The completions
    depend on the seed and the prompt's index only. Raises RunError as the reward functions do.

    Args:
        config: the settings of the run.
        components: the start model, the training prompts and the rewards.
        indices: indices of the training prompts to sample, in this order.
        samples: completions per prompt.
    """
    train = components.prompts.train
    components.rewards.trainer_state = TrainerState(global_step=0, max_steps=planned_updates(config, train))
    rows = [(sample * len(train) + i, train[i]) for i in indices for sample in range(samples)]
    policy = components.policy
    tokenizer = components.tokenizer
    device = base_of(policy).device
    sampler = Sampler.of(
        policy,
        tokenizer,
        config.sampling,
        device,
        dtype=autocast_dtype(config.model.bf16, device),
        engine=config.speed.own_engine,
        slots=config.speed.rollout_slots,
    )
    passes = ForwardPasses(Actor(policy), None, config.sampling.temperature, sampler.dtype)
    player = Player.of(sampler, passes, tokenizer, config.episode_tokens, config.run.seed, components.environment)
    was_training = policy.training
    episodes = player.started(rows, 0, PURPOSE, samples)
    player.play(episodes)
    prompts = [episode.prompt for episode in episodes]
    texts = [episode.text for episode in episodes]
    ended = [episode.ended for episode in episodes]
    given = components.rewards.score(
        prompts,
        texts,
        [episode.ids for episode in episodes],
        ended,
        samples,
        lambda: passes.token_logprobs(player.completions(episodes)),
        episodes,
    )
    policy.train(was_training)
    total = given.total
    functions = given.by_function.items()
    penalty = config.reward.missing_eos_penalty
    found = []
    for start in range(0, len(prompts), samples):
        rows = range(start, start + samples)
        scored = [i for i in rows if total[i] is not None]
        found.append(
            Sampled(
                prompt=train[indices[start // samples]],
                raw=[total[i] for i in scored],
                shaped=[total[i] - (0.0 if ended[i] else penalty) for i in scored],
                ended=[ended[i] for i in rows],
                distinct=len({texts[i] for i in rows}),
                texts=[texts[i] for i in scored],
                by_function={name: [found[i] for i in rows if found[i] is not None] for name, found in functions},
            )
        )
    return found
