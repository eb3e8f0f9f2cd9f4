"""From prompts to a rollout: sample completions, score them, compute the log-probabilities of those that are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.algorithms.normalizer import ScoreNormalizer
from rlhf.algorithms.objectives import last_token
from rlhf.data.prompts import Prompt
from rlhf.data.tokenizer import context_of
from rlhf.distributed.group import agree
from rlhf.distributed.shares import by_group
from rlhf.models.budget import budget_of
from rlhf.models.logprobs import base_of
from rlhf.rewards.call import BadScore
from rlhf.rewards.rewards import Rewards
from rlhf.rewards.scores import Scores, score_tensor
from rlhf.rollout.completions import Completions, Rollout, padded, token_batch
from rlhf.rollout.episodes import Episode, EpisodeRules
from rlhf.rollout.exchange import exchange_completions
from rlhf.rollout.sampler import Sampler
from rlhf.rollout.vllm import VLLMEngine
from rlhf.settings.fields import flag_of
from rlhf.settings.training import Config, SamplingSettings
from rlhf.trainer.passes import ForwardPasses
from rlhf.trainer.progress import Progress
from rlhf.trainer.safety import SkipUpdate
from rlhf.trainer.trl_host import Host
from rlhf.utils.errors import Problem, RunError
from rlhf.utils.processes import rank
from rlhf.utils.system import release_gpu_cache
from rlhf.utils.timing import timed

Episodes = Sequence[tuple[int, Prompt]]  # (number in the stream of random numbers, prompt) of each completion


@timed("sampling")
def sample_shares(
    sampler: Sampler,
    passes: ForwardPasses,
    episodes: Episodes,
    seed: int,
    update: int,
    purpose: str,
    phase: str,
    sampling: SamplingSettings | None = None,
    sample: Callable[..., Completions] | None = None,
    first: Sequence[int] | None = None,
) -> Completions:
    """Sample one completion per episode. Each process samples its share, and receives the others'.

    Args:
        sampler: of the policy, which is put into eval mode.
        passes: for the advice if there is not enough memory.
        episodes: number and prompt of each completion.
        seed, update, purpose, sampling, first: as in `Sampler.sample`.
        phase: what the sampling is for, in an error.
        sample: in place of `Sampler.sample`.
    """
    prompts = [prompt for _, prompt in episodes]
    rows = by_group([prompt.ids for prompt in prompts])[rank()]
    sampler.policy.eval()  # in train mode, gradient checkpointing disables the KV cache

    def sample_share() -> Completions | None:
        own = [prompts[row] for row in rows]
        numbers = [episodes[row][0] for row in rows]
        starts = first and [first[row] for row in rows]
        with passes.raise_on_oom(phase):
            return (sample or sampler.sample)(own, seed, update, purpose, numbers, starts, sampling)

    share = agree(sample_share if rows else lambda: None)
    length = (sampling or sampler.sampling).max_new_tokens
    criterion = sampler.criterion_of(sampling)
    return exchange_completions(share, rows, prompts, criterion, sampler.pad, length, sampler.device)


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
        base = base_of(policy)
        context = context_of(base.config) or math.inf
        vocabulary = base.get_input_embeddings().num_embeddings
        longest = config.episode_tokens
        self.rules = EpisodeRules(self.tokenizer, self.sampler.criterion, longest, context, vocabulary)
        self.vllm = None
        if config.speed.rollout_engine == "vllm":
            self.vllm = VLLMEngine(policy, accelerator, self.tokenizer, config.sampling, config.data.prompt_length)

    def collect(self, episodes: Episodes, update: int, purpose: str = "rollout") -> Rollout:
        """Return a rollout with its log-probs: `sample`, then `logprobs`."""
        return self.logprobs(self.sample(episodes, update, purpose))

    def sample(self, episodes: Episodes, update: int, purpose: str = "rollout") -> Rollout:
        """Sample one completion per episode for training. The rollout has no log-probs yet.

        Args:
            episodes: (number in the stream of random numbers, prompt) of each completion.
            update: number of the update, from 1.
            purpose: name of the stream of random numbers: "rollout", or "draw" of dynamic sampling.
        """
        started = self.started(episodes, update, purpose)
        size = self.config.group_size
        for row, episode in enumerate(started):
            episode.greedy = row % size >= size - self.config.greedy
        self.turn([episode for episode in started if not episode.greedy])
        if self.config.greedy:
            most_likely = replace(self.config.sampling, top_k=1, top_p=1.0)
            self.turn([episode for episode in started if episode.greedy], most_likely)
        return self.rollout(started)

    def started(self, episodes: Episodes, update: int, purpose: str = "rollout") -> list[Episode]:
        """Return episodes without a turn. The arguments are those of `sample`; a number may be None, and follow."""
        size = self.config.group_size
        chat = self.tokenizer.chat_template is not None
        return [
            Episode(
                prompt, group=None if number is None else number // size, number=number, update=update, stream=update,
                purpose=purpose, rules=self.rules, chat=chat and bool(prompt.example.messages[-1]["content"]),
            )
            for number, prompt in episodes
        ]  # fmt: skip

    def turn(
        self, episodes: Sequence[Episode], sampling: SamplingSettings | None = None, logprobs: bool = False
    ) -> None:
        """Sample one turn of each episode, with at most as many tokens as it has room for. None of them may be done.
        `sampling` as in `Sampler.sample`. With `logprobs`, compute those of episodes whose earlier ones are known."""
        usual = self.config.sampling
        sampling = sampling or usual
        as_trained = (sampling.top_k, sampling.top_p) == (usual.top_k, usual.top_p)
        criterion = self.sampler.criterion_of(sampling)
        known = [episode.logprobs if episode.spans else [] for episode in episodes]
        calls: dict[tuple[int, str, int], list[Episode]] = {}
        for episode in episodes:
            length = min(sampling.max_new_tokens, episode.room)
            calls.setdefault((episode.stream, episode.purpose, length), []).append(episode)
        release_gpu_cache()  # of the last update
        for (update, purpose, length), own in calls.items():
            completions = sample_shares(
                self.sampler,
                self.passes,
                [(episode.number, episode.so_far) for episode in own],
                self.config.run.seed,
                update,
                purpose,
                "the rollout",
                replace(sampling, max_new_tokens=length),
                (self.vllm or self.sampler).sample,
                [episode.actions for episode in own],
            )
            self.progress.episodes += sum(not episode.spans for episode in own)
            self.progress.completion_tokens += completions.tokens
            for row, (episode, ids) in enumerate(zip(own, completions.rows(), strict=True)):
                before = episode.actions
                added = episode.wrote(ids, criterion)
                if completions.allowed_tokens is not None and as_trained and not episode.greedy:
                    episode.allowed_tokens[before] = completions.allowed_tokens[row, :added]
                if completions.sampled_logprobs is not None:
                    episode.sampled_logprobs[before] = completions.sampled_logprobs[row, :added]
        release_gpu_cache()  # of sampling
        if logprobs:
            completions = self.rollout(episodes).completions
            with timed("log-probs"):
                found = self.passes.token_logprobs(completions)
            for episode, earlier, row in zip(episodes, known, found, strict=True):
                if earlier is not None:
                    episode.logprobs = [*earlier, *row[len(earlier) :]]

    def rollout(self, episodes: Sequence[Episode]) -> Rollout:
        """Return the rollout of episodes, without log-probs."""
        prompts = [episode.prompt for episode in episodes]
        sampler = self.sampler
        rows = [episode.ids for episode in episodes]
        learned = [[] if episode.greedy else episode.spans for episode in episodes]
        batch = token_batch([prompt.ids for prompt in prompts], rows, sampler.pad, sampler.device)
        batch = replace(batch, turns=learned, action_mask=None)
        first: dict[tuple[int, ...], int] = {}
        given = vars(batch) | {"groups": [first.setdefault(prompt.ids, len(first)) for prompt in prompts]}
        completions = Completions(
            **given,
            ended=torch.tensor([episode.ended for episode in episodes], device=sampler.device),
            # bits: without masks, as after a greedy turn, all tokens were allowed
            allowed_tokens=batch.placed([episode.allowed_tokens for episode in episodes], 255),
            vocabulary=self.rules.vocabulary,
            sampled_logprobs=batch.placed([episode.sampled_logprobs for episode in episodes], 0),
            stop=sampler.criterion.stop,
        )
        return Rollout(completions, list(episodes))

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
