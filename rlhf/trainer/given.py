"""What a loop by hand gives to a trainer: prompts, episodes and scores, with their checks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf.data.chat_template import Messages
from rlhf.data.examples import examples_of
from rlhf.data.prompts import Prompt, encode_all, ids_alone
from rlhf.rewards.call import MAX_ABS_SCORE
from rlhf.rewards.scores import Scores
from rlhf.rollout.episodes import LIMIT, Episode, EpisodeRules, token_ids
from rlhf.settings.fields import convert, settings_of
from rlhf.settings.training import Config, SamplingSettings
from rlhf.utils.errors import UserError

GENERATE = "generate()"
PLAY = "play()"
STEP = "step()"


def items_of(given: Any, where: str) -> list:
    """Return a list of what is given. Raises UserError for a text, one prompt or one episode."""
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise UserError(f"not a list: {type(given).__name__}", where, "Give a list")
    return given.tolist() if hasattr(given, "tolist") else list(given)


def prompts_of(given: Sequence, rules: EpisodeRules, longest: int, shots: Messages) -> list[Prompt]:
    """Return prompts in a form that `examples_of` reads, or as ids, or as they are, in order. Raises UserError for one
    that cannot be read, has more than `longest` tokens, or leaves no room in the context."""
    found = []
    longest = min(longest, rules.context - 1)
    for number, prompt in enumerate(given):
        if isinstance(prompt, Prompt):
            found.append(prompt)
        elif isinstance(prompt, Iterable) and all(hasattr(token, "__index__") for token in prompt):
            found.append(ids_alone(token_ids(prompt, rules, f"{GENERATE}, prompt {number}")))
        else:
            found += encode_all(rules.tokenizer, examples_of([prompt]), shots)
        size = len(found[-1].ids)
        if not 0 < size <= longest:
            raise UserError(
                f"{size} tokens", f"{GENERATE}, prompt {number}", f"Give 1 to {longest} tokens, or raise prompt_length"
            )
    return found


def sampling_of(
    settings: SamplingSettings, max_new_tokens: int | None, stop: Sequence[str] | None, greedy: bool
) -> SamplingSettings:
    """Return the settings for one call of `generate`. Raises UserError for what their flags refuse."""
    declared = settings_of(Config)
    given = {"max_new_tokens": max_new_tokens, "stop": stop}
    changes = {name: convert(declared[name], of, GENERATE) for name, of in given.items() if of is not None}
    found = replace(settings, **changes)
    return replace(found, top_k=1, top_p=1.0) if greedy else found


def bind(episodes: Sequence[Episode], rules: EpisodeRules, where: str) -> None:
    """Give episodes of no trainer the rules of this one. Raises UserError for what is no episode, has another trainer,
    or is too long."""
    for episode in episodes:
        if not isinstance(episode, Episode):
            raise UserError(f"no episode: {episode!r:.60}", where, "Use generate(), or Episode.of()")
        if episode.rules not in (None, rules):
            raise UserError("an episode of another trainer", where, "Use Episode.of() with its ids and log-probs")
    if len(set(map(id, episodes))) < len(episodes):
        raise UserError("the same episode twice", where, "Give each episode once")
    for episode in episodes:
        if episode.rules is None:
            token_ids([*episode.prompt_ids, *episode.ids], rules, where)
            episode.rules = rules
            if episode.room < 0:
                room = len(episode.ids) + episode.room
                episode.rules = None
                raise UserError(
                    f"an episode of {len(episode.ids)} tokens, and there is room for {room}",
                    where,
                    "Give shorter ones, or raise max_episode_tokens",
                )
            if not episode.room:
                episode.stop_reason = LIMIT


def order_of(episodes: Sequence[Episode], count: int, group_size: int) -> list[int]:
    """Return the order of one update's episodes in which groups are neighbours. Raises UserError if they are not
    `count` different ones with a token of the policy, in groups of `group_size`, that no update has used."""
    if len(episodes) != count:
        raise UserError(
            f"{len(episodes)} episodes, and an update has {count}", STEP, "Give batch_size x K episodes: make_config()"
        )
    for number, episode in enumerate(episodes):
        if episode.trained:
            raise UserError("an earlier step() has used it", f"{STEP}, episode {number}", "Generate new episodes")
        if not episode.spans and not episode.failure:
            raise UserError("no token of the policy", f"{STEP}, episode {number}", "Call generate() on it first")
    if group_size == 1:
        return list(range(count))
    sizes = Counter(episode.group for episode in episodes)
    wrong = [group for group, size in sizes.items() if group is None or size != group_size]
    if wrong:
        raise UserError(
            f"group {wrong[0]} has {sizes[wrong[0]]} episodes, and the algorithm compares {group_size}",
            STEP,
            "Give Episode.of(group=) the same number for the episodes of a prompt, K of them",
        )
    first = {group: number for number, group in enumerate(sizes)}
    return sorted(range(count), key=lambda row: first[episodes[row].group])


def given_scores(
    episodes: Sequence[Episode],
    scores: Sequence[float | None] | None,
    turn_scores: Sequence[Sequence[float]] | None,
    token_scores: Sequence[Sequence[float]] | None,
    order: Sequence[int],
) -> Scores | None:
    """Return given scores, the episodes in this order; None without any. A score is paid at the last token of the
    policy, that of a turn at the turn's last one. Raises UserError for lists that do not fit, for a number that is not
    finite, and for a score on an environment's token."""
    if scores is turn_scores is token_scores is None:
        return None
    count = len(episodes)
    for name, given in (("scores", scores), ("turn_scores", turn_scores), ("token_scores", token_scores)):
        if given is not None and len(given) != count:
            raise UserError(f"{len(given)} {name} for {count} episodes", STEP, "Give one per episode")
    dense = turn_scores is not None or token_scores is not None
    rows = []
    total: list[float | None] = []
    for number in order:
        episode = episodes[number]
        row = [0.0] * len(episode.ids)
        if token_scores is not None:
            row = list(map(float, fitting(token_scores[number], len(row), "token", number)))
            if any(score and not wrote for score, wrote in zip(row, episode.action_mask, strict=True)):
                raise UserError(
                    "a score on a token that the policy has not written",
                    f"{STEP}, token_scores, episode {number}",
                    "Give 0 where action_mask is False",
                )
        if turn_scores is not None:
            given = fitting(turn_scores[number], len(episode.spans), "turn", number)
            for span, score in zip(episode.spans, given, strict=True):
                row[span[-1]] += float(score)
        score = None if scores is None else scores[number]
        if episode.spans:
            row[episode.spans[-1][-1]] += float(score or 0)
        rows.append(row)
        total.append(math.fsum(row) if dense or score is not None else None)
        if not abs(total[-1] or 0.0) <= MAX_ABS_SCORE:
            raise UserError(f"the score {total[-1]}", f"{STEP}, episode {number}", "Give finite numbers")
    return Scores(total, {"score": total}, by_token=rows if dense else None)


def fitting(values: Sequence[float], count: int, name: str, number: int) -> Sequence[float]:
    """Return the scores of one episode. Raises UserError if they are not `count`."""
    if len(values) != count:
        raise UserError(
            f"{len(values)} scores for {count} {name}s",
            f"{STEP}, {name}_scores, episode {number}",
            f"Give one per {name}",
        )
    return values
