"""From prompts to episodes: training, evaluations, comparisons and chat play them here."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from rlhf.data.prompts import Prompt
from rlhf.data.tokenizer import context_of
from rlhf.distributed.group import agree, gather
from rlhf.distributed.shares import by_group, merge_rows
from rlhf.environments.calls import Failure
from rlhf.environments.environment import Environment, EnvironmentAnswer
from rlhf.models.logprobs import base_of
from rlhf.rollout.completions import Completions, token_batch
from rlhf.rollout.episodes import FAILED, LIMIT, MAX_TURNS, Episode, EpisodeRules
from rlhf.rollout.exchange import exchange_completions
from rlhf.rollout.sampler import Sampler
from rlhf.settings.training import SamplingSettings
from rlhf.trainer.passes import ForwardPasses
from rlhf.utils.errors import RunError, Say, print_line
from rlhf.utils.processes import rank
from rlhf.utils.system import release_gpu_cache
from rlhf.utils.timing import timed

Numbered = Sequence[tuple[int | None, Prompt]]  # (number in the stream of random numbers, prompt) of each episode


@dataclass
class Player:
    """Plays episodes of one policy. What it samples depends on the weights and on (seed, stream, purpose, number,
    tokens of the policy before) only. Each process samples its share, and answers its share of the turns."""

    sampler: Sampler
    passes: ForwardPasses  # for the advice if there is not enough memory
    rules: EpisodeRules
    seed: int
    environment: Environment | None = None  # None: an episode is one turn
    engine: Callable[..., Completions] | None = None  # in place of `Sampler.sample`
    phase: str = "the rollout"  # what the sampling is for, in an error
    in_parts: bool = False  # sample as many episodes together as `Sampler.calls`
    say: Say = print_line

    @classmethod
    def of(
        cls,
        sampler: Sampler,
        passes: ForwardPasses,
        tokenizer: PreTrainedTokenizerBase,
        longest: int,
        seed: int,
        environment: Environment | None = None,
        **more: object,
    ) -> Player:
        """Return the player of a sampler's policy. `longest`: tokens after a prompt. `more`: other fields."""
        base = base_of(sampler.policy)
        context = context_of(base.config) or math.inf
        vocabulary = base.get_input_embeddings().num_embeddings
        of_episodes = tokenizer if environment is None else environment.tokenizer
        rules = EpisodeRules(of_episodes, sampler.criterion, longest, context, vocabulary)
        return cls(sampler, passes, rules, seed, environment, **more)

    def started(
        self, prompts: Numbered, stream: int, purpose: str, group_size: int, update: int | None = None
    ) -> list[Episode]:
        """Return episodes without a turn.

        Args:
            prompts: number and prompt of each; a number may be None, and follow.
            stream: the update in their random numbers.
            purpose: name of the stream of random numbers.
            group_size: so many neighbours are compared.
            update: the weights before this update sample them; None: those of no update.
        """
        chat = self.rules.tokenizer.chat_template is not None
        return [
            Episode(
                prompt, group=None if number is None else row // group_size, number=number, update=update,
                stream=stream, purpose=purpose, rules=self.rules,
                chat=chat and bool(prompt.example.messages[-1]["content"]),
            )
            for row, (number, prompt) in enumerate(prompts)
        ]  # fmt: skip

    def of_ids(self, prompt: Prompt, ids: Sequence[int]) -> Episode:
        """Return an episode of one given turn."""
        return Episode(prompt, list(ids), [range(len(ids))], rules=self.rules)

    def play(
        self,
        episodes: Sequence[Episode],
        sampling: SamplingSettings | None = None,
        masked: Collection[Episode] | None = None,
    ) -> None:
        """Play new episodes to their end, with the environment if there is one. The arguments are those of `turn`.
        Raises RunError if the environment fails in all of them."""
        if self.environment is None:
            return self.turn(episodes, sampling, masked)
        shares = by_group([episode.group for episode in episodes])
        owner = {id(episodes[row]): process for process, rows in enumerate(shares) for row in rows}
        self._reset(episodes, owner)
        while waiting := [episode for episode in episodes if not episode.done]:
            self.turn(waiting, sampling, masked)
            self._answer(waiting, owner)
        played = [episode for episode in episodes if not episode.failure]
        for episode, outcome in zip(played, self._each(played, owner, self.environment.outcomes), strict=True):
            if isinstance(outcome, Failure):
                self._fail(episode, outcome)
            else:
                episode.outcome = outcome
        self._report(episodes)
        return None

    @timed("sampling")
    def turn(
        self,
        episodes: Sequence[Episode],
        sampling: SamplingSettings | None = None,
        masked: Collection[Episode] | None = None,
    ) -> None:
        """Sample one turn of each episode, with at most as many tokens as it has room for. None of them may be done.

        Args:
            episodes: new ones, or episodes whose last turn has an answer.
            sampling: as in `Sampler.sample`.
            masked: episodes that store which tokens were allowed, if not all were; None: those that are not greedy.
        """
        sampling = sampling or self.sampler.sampling
        most = sampling.max_new_tokens
        calls: dict[tuple, list[Episode]] = {}
        for episode in episodes:
            length = most if self.sampler.has_slots else min(most, episode.room)
            calls.setdefault((episode.stream, episode.purpose, episode.greedy, length), []).append(episode)
        again = any(episode.spans for episode in episodes)
        release_gpu_cache()  # of the last update
        with timed("later turns") if again else nullcontext():
            for (stream, purpose, greedy, length), own in calls.items():
                most_likely = {"top_k": 1, "top_p": 1.0} if greedy else {}
                how = replace(sampling, max_new_tokens=length, **most_likely)
                for part in self.sampler.calls(own, how) if self.in_parts else [own]:
                    self._append(part, self._sampled(part, stream, purpose, how), how, [] if greedy else masked)
        release_gpu_cache()  # of sampling

    def _append(
        self,
        episodes: Sequence[Episode],
        completions: Completions,
        sampling: SamplingSettings,
        masked: Collection[Episode] | None,
    ) -> None:
        """Append sampled tokens to episodes."""
        criterion = self.sampler.criterion_of(sampling)
        for row, (episode, ids) in enumerate(zip(episodes, completions.rows(), strict=True)):
            before = episode.actions
            added = episode.wrote(ids[: episode.room], criterion)
            if completions.allowed_tokens is not None and (masked is None or episode in masked):
                episode.allowed_tokens[before] = completions.allowed_tokens[row, :added]
            if completions.sampled_logprobs is not None:
                episode.sampled_logprobs[before] = completions.sampled_logprobs[row, :added]

    def _sampled(
        self, episodes: Sequence[Episode], stream: int, purpose: str, sampling: SamplingSettings
    ) -> Completions:
        """Return the next turns of episodes. Each process samples its share, and receives the others'."""
        sampler = self.sampler
        prompts = [episode.so_far for episode in episodes]
        rows = by_group([prompt.ids for prompt in prompts])[rank()]
        sampler.policy.eval()  # in train mode, gradient checkpointing disables the KV cache

        def sample_share() -> Completions | None:
            own = [episodes[row] for row in rows]
            how = self.seed, stream, purpose, [e.number for e in own], [e.actions for e in own], sampling
            with self.passes.raise_on_oom(self.phase):
                return (self.engine or sampler.sample)([prompts[row] for row in rows], *how)

        share = agree(sample_share if rows else lambda: None)
        criterion = sampler.criterion_of(sampling)
        length = sampling.max_new_tokens
        return exchange_completions(share, rows, prompts, criterion, sampler.pad, length, sampler.device)

    def completions(self, episodes: Sequence[Episode]) -> Completions:
        """Return episodes as one batch. Nothing is learned from greedy ones."""
        prompts = [episode.prompt for episode in episodes]
        sampler = self.sampler
        rows = [episode.ids for episode in episodes]
        learned = [[] if episode.greedy else episode.spans for episode in episodes]
        batch = token_batch([prompt.ids for prompt in prompts], rows, sampler.pad, sampler.device)
        batch = replace(batch, turns=learned, action_mask=None)
        first: dict[tuple[int, ...], int] = {}
        given = vars(batch) | {"groups": [first.setdefault(prompt.ids, len(first)) for prompt in prompts]}
        return Completions(
            **given,
            ended=torch.tensor([episode.ended for episode in episodes], device=sampler.device),
            # bits: without masks, as after a greedy turn, all tokens were allowed
            allowed_tokens=batch.placed([episode.allowed_tokens for episode in episodes], 255),
            vocabulary=self.rules.vocabulary,
            sampled_logprobs=batch.placed([episode.sampled_logprobs for episode in episodes], 0),
            stop=sampler.criterion.stop,
        )

    # --- the environment ---------------------------------------------------------------------------------------------

    @timed("environment")
    def _each(self, episodes: Sequence[Episode], owner: dict[int, int], work: Callable[[list[Episode]], list]) -> list:
        """Return `work` of each episode, done by the process that has its environment."""
        rows = [row for row, episode in enumerate(episodes) if owner[id(episode)] == rank()]
        found = agree(lambda: work([episodes[row] for row in rows]))
        return merge_rows(gather((rows, found)), len(episodes))

    def _reset(self, episodes: Sequence[Episode], owner: dict[int, int]) -> None:
        """Begin the episodes: the text of `reset` is appended to the last message of the prompt."""
        openings = self._each(episodes, owner, self.environment.reset)
        for episode, opening in zip(episodes, openings, strict=True):
            if isinstance(opening, Failure):
                self._fail(episode, opening)
                continue
            episode.opening = opening or ""
            example = episode.prompt.example
            *earlier, last = example.messages
            messages = (*earlier, {**last, "content": last["content"] + episode.opening})
            ids = self.environment.prompt_ids(messages)
            episode.prompt = Prompt(tuple(ids), replace(example, messages=messages))

    def _answer(self, episodes: Sequence[Episode], owner: dict[int, int]) -> None:
        """Append the environment's answers to the last turns, and end episodes."""
        most = self.environment.settings.max_turns
        answers: list[EnvironmentAnswer] = self._each(episodes, owner, self.environment.answers)
        for episode, answer in zip(episodes, answers, strict=True):
            episode.rewards.append(answer.reward)
            episode.cut += answer.cut
            if answer.message is not None:
                episode.messages_of_turns[len(episode.spans) - 1] = answer.message
            if answer.failure:
                self._fail(episode, answer.failure)
            elif answer.observation is None:
                episode.end()
            elif most is not None and len(episode.spans) >= most:
                episode.stop_reason = MAX_TURNS
            else:
                episode.take(answer.observation)

    def _fail(self, episode: Episode, failure: str) -> None:
        episode.failure = failure
        episode.stop_reason = FAILED

    def _report(self, episodes: Sequence[Episode]) -> None:
        """Print a warning if the environment failed in some episodes, and one if it ended none of the first episodes.
        Raises RunError if it failed in all."""
        failed = [episode for episode in episodes if episode.failure]
        ends = {episode.stop_reason for episode in episodes}
        if not self.environment.has_played and ends == {LIMIT}:
            self.say(
                f"warning: all {len(episodes)} episodes ended at max_episode_tokens, {self.rules.longest}, and none "
                f"by the environment {self.environment.name}. Raise it, set max_turns, or end them in the environment"
            )
        self.environment.has_played = True
        if not failed:
            return
        first = failed[0]
        where = f"environment {self.environment.name}, {first.prompt.example.where or f'episode {first.number}'}"
        if len(failed) == len(episodes):
            fix = "Correct the environment" + (f"; all {len(failed)} episodes failed" if failed[1:] else "")
            raise RunError(first.failure, where, fix)
        self.say(
            f"warning: {len(failed)} of {len(episodes)} episodes have no score, because the environment failed: "
            f"{first.failure}: {where}"
        )
