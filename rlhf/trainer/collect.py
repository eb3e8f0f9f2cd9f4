"""From prompts to a rollout: sample completions, score them, compute the log-probabilities of those that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.algorithms.normalizer import ScoreNormalizer
from rlhf.algorithms.objectives import last_token
from rlhf.data.prompts import Prompt
from rlhf.environments.environment import Environment
from rlhf.models.budget import budget_of
from rlhf.rewards.call import BadScore
from rlhf.rewards.rewards import Rewards
from rlhf.rewards.scores import Scores, score_tensor
from rlhf.rollout.completions import Rollout, padded
from rlhf.rollout.episodes import Episode
from rlhf.rollout.sampler import Sampler
from rlhf.rollout.vllm import VLLMEngine
from rlhf.settings.fields import flag_of
from rlhf.settings.training import Config, SamplingSettings
from rlhf.trainer.passes import ForwardPasses
from rlhf.trainer.play import Numbered, Player
from rlhf.trainer.progress import Progress
from rlhf.trainer.safety import SkipUpdate
from rlhf.trainer.trl_host import Host
from rlhf.utils.errors import Problem, RunError, Say, print_line
from rlhf.utils.timing import timed

Episodes = Sequence[tuple[int, Prompt]]  # (number in the stream of random numbers, prompt) of each completion


@dataclass
class RolloutCollector:
    """Collects rollouts with the current policy. Random numbers depend on (seed, update, purpose, episode) only."""

    config: Config
    host: Host
    tokenizer: PreTrainedTokenizerBase
    rewards: Rewards
    passes: ForwardPasses
    progress: Progress  # counts what is sampled for training
    longest_prompt: int = 0  # tokens of the run's longest prompt, for which the KV cache has room from the start
    environment: Environment | None = None
    say: Say = print_line

    def __post_init__(self):
        config = self.config
        reward = config.reward
        self.normalizer = ScoreNormalizer(reward.score_ema) if reward.normalize_scores else None
        accelerator = self.host.accelerator
        device = accelerator.device
        policy = self.host.actor.policy
        self.sampler = Sampler.of(
            policy,
            self.tokenizer,
            config.sampling,
            device,
            dtype=self.passes.dtype,
            engine=config.speed.own_engine,
            slots=budget_of(device, config).rollout_slots,
            longest_text=self.longest_prompt + config.episode_tokens,
        )
        self.vllm = None
        if config.speed.rollout_engine == "vllm":
            self.vllm = VLLMEngine(policy, accelerator, self.tokenizer, config.sampling, config.data.prompt_length)
        self.player = Player.of(
            self.sampler,
            self.passes,
            self.tokenizer,
            config.episode_tokens,
            config.run.seed,
            self.environment,
            engine=self.vllm and self.vllm.sample,
            say=self.say,
        )
        self.rules = self.player.rules

    def collect(self, prompts: Numbered, update: int, purpose: str = "rollout") -> Rollout:
        """Return a rollout with its log-probs: `sample`, then `logprobs`."""
        return self.logprobs(self.sample(prompts, update, purpose))

    def sample(self, prompts: Numbered, update: int, purpose: str = "rollout") -> Rollout:
        """Play one episode per prompt for training. The rollout has no log-probs yet.

        Args:
            prompts: (number in the stream of random numbers, prompt) of each episode.
            update: number of the update, from 1.
            purpose: name of the stream of random numbers: "rollout", or "draw" of dynamic sampling.
        """
        started = self.started(prompts, update, purpose)
        size = self.config.group_size
        for row, episode in enumerate(started):
            episode.greedy = row % size >= size - self.config.greedy
        self.play(started)
        return self.rollout(started)

    def started(self, prompts: Numbered, update: int, purpose: str = "rollout") -> list[Episode]:
        """Return episodes without a turn. The arguments are those of `sample`; a number may be None, and follow."""
        return self.player.started(prompts, update, purpose, self.config.group_size, update)

    def play(self, episodes: Sequence[Episode]) -> None:
        """Play new episodes to their end."""
        self.player.play(episodes)
        self.progress.episodes += len(episodes)
        self.progress.completion_tokens += sum(episode.actions for episode in episodes)

    def turn(
        self, episodes: Sequence[Episode], sampling: SamplingSettings | None = None, logprobs: bool = False
    ) -> None:
        """Sample one turn of each episode, as `Player.turn`. With `logprobs`, compute those of episodes whose earlier
        ones are known."""
        usual = self.config.sampling
        as_trained = sampling is None or (sampling.top_k, sampling.top_p) == (usual.top_k, usual.top_p)
        known = [episode.logprobs if episode.spans else [] for episode in episodes]
        self.progress.episodes += sum(not episode.spans for episode in episodes)
        before = sum(episode.actions for episode in episodes)
        self.player.turn(episodes, sampling, None if as_trained else [])
        self.progress.completion_tokens += sum(episode.actions for episode in episodes) - before
        if logprobs:
            completions = self.player.completions(episodes)
            with timed("log-probs"):
                found = self.passes.token_logprobs(completions)
            for episode, earlier, row in zip(episodes, known, found, strict=True):
                if earlier is not None:
                    episode.logprobs = [*earlier, *row[len(earlier) :]]

    def rollout(self, episodes: Sequence[Episode]) -> Rollout:
        """Return the rollout of episodes, without log-probs."""
        return Rollout(self.player.completions(episodes), list(episodes))

    def logprobs(self, rollout: Rollout, reference_every: int = 1, rows: Sequence[int] | None = None) -> Rollout:
        """Return the rollout with what `ForwardPasses.logprobs` computes. The forward pass is stored for the first
        optimizer step, if it is shared."""
        found = self.passes.logprobs(rollout.completions, True, reference_every, rows)
        return replace(rollout, **found._asdict())

    @timed("scoring")
    def score(self, rollout: Rollout, drawn_again: bool = False, given: Scores | None = None) -> Scores:
        """Score the completions. NaN marks a completion without a score. Raises SkipUpdate, with the rollout, if a
        score is not finite, and RunError for turn or token scores with settings that need one score. `drawn_again` as
        in `_shaped`; `given`: scores in place of those of the functions."""
        completions = rollout.completions
        try:
            with self.passes.raise_on_oom("scoring"):
                given = given or self.rewards.score(
                    rollout.prompts,
                    rollout.texts,
                    completions.rows(),
                    completions.ended.tolist(),
                    self.config.group_size,
                    # not those of the update, which are computed later, as without a function that reads them
                    lambda: self.passes.token_logprobs(completions),
                    rollout.episodes,
                )
        except BadScore as error:
            raise SkipUpdate(str(error), by_score=True, rollout=rollout) from None
        device = completions.ended.device
        raw = score_tensor(given.total, device)
        columns = [raw, *(score_tensor(scores, device) for scores in given.by_function.values())]
        each = torch.stack(columns, 1)[:, 1:]  # without functions, (B, 0)
        shaped = self._shaped(raw, completions.ended, drawn_again)
        if given.by_token is not None:
            reward = self.config.reward
            needs_sums = {
                "dynamic_sampling": self.config.group.dynamic_sampling,
                "control": reward.control != "none",
                "normalize_scores": reward.normalize_scores,
            }
            names = tuple(filter(needs_sums.get, needs_sums))
            if names:
                what = f"turn and token scores cannot be used with {', '.join(map(flag_of, names))}"
                raise RunError([Problem(what, str(self.rewards), "Give one score per completion", names)])
            paid = padded(given.by_token, 0.0, raw.device)
            penalty = (shaped - raw).nan_to_num().unsqueeze(1)
            rollout.token_scores = paid + torch.where(last_token(rollout.mask), penalty, 0.0)
        return replace(given, raw=raw, shaped=shaped, each=each)

    def _shaped(self, raw: Tensor, ended: Tensor, drawn_again: bool) -> Tensor:
        """Return what the algorithm receives, (B,): the raw scores minus the missing-EOS penalty, then normalized. NaN
        stays NaN.

        `drawn_again`: the completions were sampled in place of others of the same update. They are normalized with the
        estimates of the first ones: a second step of the estimates would give a few completions the weight of a whole
        batch.
        """
        # detail 17: 0 by default (N details). Without a penalty, only the reward can teach the policy to stop.
        scores = raw - self.config.reward.missing_eos_penalty * (~ended).float()
        known = scores.isfinite().nonzero().flatten()
        if self.normalizer is not None and len(known):
            normalize = self.normalizer.normalized if drawn_again and self.normalizer.batches else self.normalizer
            scores[known] = score_tensor(normalize(scores[known].tolist()), scores.device)
        return scores
