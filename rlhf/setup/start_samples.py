"""Samples completions of training prompts with the start model and scores them, before a trainer exists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import TrainerState

from rlhf.data.prompts import Prompt
from rlhf.data.sampler import planned_updates
from rlhf.models.device import autocast, autocast_dtype
from rlhf.models.logprobs import base_of
from rlhf.rollout.engine import sample_completions
from rlhf.rollout.sampling import uniform_noise
from rlhf.rollout.stopping import stopping_criterion
from rlhf.settings.training import Config
from rlhf.setup.build import Components
from rlhf.utils.rng import rng_for

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


def drawn(prompts: Sequence[Prompt], seed: int) -> list[int]:
    """Return the indices of all prompts in a random order. The topics alternate, so that the first ones are spread
    evenly over the topics."""
    topics: dict[str | None, list[int]] = {}
    for i, prompt in enumerate(prompts):
        topics.setdefault(prompt.example.topic, []).append(i)
    orders = [rng_for(seed, 0, "draw", n).permutation(len(rows)) for n, rows in enumerate(topics.values())]
    mixed = [[rows[i] for i in order] for rows, order in zip(topics.values(), orders, strict=True)]
    return [rows[turn] for turn in range(max(map(len, mixed), default=0)) for rows in mixed if turn < len(rows)]


def sample_and_score(
    config: Config, components: Components, indices: Sequence[int], samples: int
) -> Iterator[list[Sampled]]:
    """Yield `samples` scored completions of each training prompt, some prompts at a time: at most as many completions
    as an update samples, so that they need no more memory, but always those of at least one prompt. Reward functions
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
    at_once = max(1, config.episodes_per_update // samples)
    components.rewards.trainer_state = TrainerState(global_step=0, max_steps=planned_updates(config, train))
    for start in range(0, len(indices), at_once):
        part = indices[start : start + at_once]
        episodes = [(sample * len(train) + i, train[i]) for i in part for sample in range(samples)]
        yield _scored(config, components, episodes, samples)


def _scored(
    config: Config, components: Components, episodes: Sequence[tuple[int, Prompt]], samples: int
) -> list[Sampled]:
    prompts = [p for _, p in episodes]
    policy = components.policy
    tokenizer = components.tokenizer
    device = base_of(policy).device
    speed = config.speed
    numbers = [number for number, _ in episodes]
    uniform = uniform_noise(config.run.seed, 0, PURPOSE, numbers, config.sampling.max_new_tokens)
    was_training = policy.training
    policy.eval()
    with torch.no_grad(), autocast(device, autocast_dtype(config.model.bf16, device)):
        completions = sample_completions(
            policy, prompts, uniform, config.sampling, eos=stopping_criterion(tokenizer, config.sampling.stops),
            pad=tokenizer.pad_token_id, device=device, engine=speed.own_engine, slots=speed.rollout_slots,
        )  # fmt: skip
    policy.train(was_training)
    texts = completions.texts(tokenizer)
    ended = completions.ended.tolist()
    given = components.rewards.score(prompts, texts, completions.rows(), ended)
    total = given.total
    functions = given.by_function.items()
    penalty = config.reward.missing_eos_penalty
    found = []
    for start in range(0, len(prompts), samples):
        rows = range(start, start + samples)
        scored = [i for i in rows if total[i] is not None]
        found.append(
            Sampled(
                prompt=prompts[start],
                raw=[total[i] for i in scored],
                shaped=[total[i] - (0.0 if ended[i] else penalty) for i in scored],
                ended=[ended[i] for i in rows],
                distinct=len({texts[i] for i in rows}),
                texts=[texts[i] for i in scored],
                by_function={name: [found[i] for i in rows if found[i] is not None] for name, found in functions},
            )
        )
    return found
