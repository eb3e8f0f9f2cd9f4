"""Episodes: what follows a prompt. The policy writes its turns, and an environment the tokens between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.data.chat_template import decode_completion, encode_reply, encode_text
from rlhf.data.messages import Message
from rlhf.data.prompts import Prompt, ids_alone
from rlhf.rollout.stopping import StoppingCriterion
from rlhf.utils.errors import UserError

LIMIT = "limit"  # reasons why an episode has ended: no token is left
END = "end"  # `end()`
MAX_TURNS = "max_turns"  # --max-turns
FAILED = "failed"  # the environment raised an exception


class Turn(NamedTuple):
    """One turn of the policy, and what the environment answered."""

    completion: str  # without EOS and stop string
    observation: str | None  # None: no answer yet
    ended: bool  # at EOS or a stop string; False: cut off


@dataclass(frozen=True)
class EpisodeRules:
    """What all episodes of a trainer share."""

    tokenizer: PreTrainedTokenizerBase
    criterion: StoppingCriterion  # what ends a turn
    longest: int  # tokens after a prompt
    context: float  # positions of the model; infinity: no limit
    vocabulary: int  # of the model


def token_ids(given: Any, rules: EpisodeRules | None, where: str) -> list[int]:
    """Return token ids, such as a list or a tensor of them, as numbers. Raises UserError for what is none, or not in
    the vocabulary, which is unknown without rules."""
    most = math.inf if rules is None else rules.vocabulary
    found = list(given) if isinstance(given, Iterable) else [given]
    for token in found:
        if not hasattr(token, "__index__") or not 0 <= token < most:
            raise UserError(f"no token id: {token!r:.60}", where, "Give ids of the model's vocabulary")
    return [int(token) for token in found]


@dataclass(eq=False)
class Episode:
    """What follows a prompt, token by token. `Trainer.generate` makes episodes, and `Episode.of` from given tokens.

    `ids` and `action_mask` have one entry per token, `logprobs` too: 0 at an environment's tokens.
    """

    prompt: Prompt
    ids: list[int] = field(default_factory=list)  # all tokens after the prompt
    spans: list[range] = field(default_factory=list)  # where the policy's turns are in `ids`
    logprobs: list[float] | None = None  # nats, under the policy that sampled it; None: not known
    group: int | None = None  # episodes of one prompt that are compared have the same number
    number: int | None = None  # in its random numbers
    update: int | None = None  # it was sampled with the weights before this update; None: not by this trainer
    stream: int | None = None  # the update in its random numbers
    purpose: str = "rollout"  # name of its stream of random numbers
    stop_reason: str = ""  # LIMIT or END; empty: more turns can follow
    rules: EpisodeRules | None = None  # of the trainer that it belongs to
    chat: bool = False  # the chat template rendered the prompt
    added: dict[int, list[Message]] = field(default_factory=dict)  # number of a turn -> the observations after it
    criteria: dict[int, StoppingCriterion] = field(default_factory=dict)  # number of a turn -> what ends it, if known
    # number of the policy's tokens before -> of those that follow: (N, ceil(V / 8)) as in `Completions`, if not all
    # were allowed, and (N,) the log-probs of vLLM
    allowed_tokens: dict[int, Tensor] = field(default_factory=dict)
    sampled_logprobs: dict[int, Tensor] = field(default_factory=dict)
    environment: Any = None  # the instance that answers it; None: there is none, or another process has it
    opening: str = ""  # the text of `reset`, which is a part of the prompt
    messages_of_turns: dict[int, Message] = field(default_factory=dict)  # number of a turn -> it with its tool calls
    rewards: list[float] = field(default_factory=list)  # of the environment, per turn
    outcome: float | None = None  # what `get_reward` returned
    failure: str = ""  # what the environment raised
    cut: int = 0  # its observations that were cut at --max-observation-tokens
    trained: bool = False  # an update has used it
    greedy: bool = False  # only its score is used: nothing learns from its tokens

    @classmethod
    def of(
        cls,
        prompt_ids: Sequence[int],
        ids: Sequence[int],
        action_mask: Sequence[bool] | None = None,
        logprobs: Sequence[float] | None = None,
        group: int | None = None,
    ) -> Episode:
        """Return an episode of given tokens. Raises UserError if the lists have different lengths or are empty.

        Args:
            prompt_ids: ids of the prompt.
            ids: ids of all tokens after it.
            action_mask: True on the policy's tokens; None: all of them. Neighbours are one turn.
            logprobs: nats, one per token of `ids`, under the policy that wrote them; ignored at other tokens.
            group: episodes that are compared with each other have the same number.
        """
        prompt_ids = token_ids(prompt_ids, None, "Episode.of()")
        ids = token_ids(ids, None, "Episode.of()")
        mask = [True] * len(ids) if action_mask is None else [bool(wrote) for wrote in action_mask]
        known = len(ids) if logprobs is None else len(logprobs)
        finite = logprobs is None or all(map(math.isfinite, logprobs))
        if not prompt_ids or not ids or not len(mask) == known == len(ids) or not finite:
            found = f"{len(prompt_ids)} prompt ids, {len(ids)} ids, {len(mask)} in the mask, {known} log-probs"
            raise UserError("lists that do not fit", f"Episode.of(), {found}", "Give one finite entry per token")
        spans = []
        start = 0
        for wrote, run in groupby(mask):
            end = start + len(list(run))
            spans += [range(start, end)] if wrote else []
            start = end
        own = None if logprobs is None else [float(p) if m else 0.0 for p, m in zip(logprobs, mask, strict=True)]
        return cls(ids_alone(prompt_ids), ids, spans, own, group)

    @property
    def known(self) -> EpisodeRules:
        """The rules of its trainer. Raises UserError if it has none yet."""
        if self.rules is None:
            raise UserError("an episode of no trainer", "Episode.of()", "Pass it to generate() or step() first")
        return self.rules

    @property
    def prompt_ids(self) -> list[int]:
        """The ids of the prompt."""
        return list(self.prompt.ids)

    @property
    def action_mask(self) -> list[bool]:
        """True on the policy's tokens."""
        wrote = {place for span in self.spans for place in span}
        return [place in wrote for place in range(len(self.ids))]

    @property
    def actions(self) -> int:
        """The number of the policy's tokens."""
        return sum(map(len, self.spans))

    @property
    def so_far(self) -> Prompt:
        """The prompt of the next turn: all tokens."""
        return Prompt((*self.prompt.ids, *self.ids), self.prompt.example, self.room)

    @property
    def room(self) -> int:
        """The number of tokens that can still follow."""
        return min(self.known.longest, self.known.context - len(self.prompt.ids)) - len(self.ids)

    @property
    def done(self) -> bool:
        """True if no turn can follow: after `end()`, or if no token is left. EOS ends a turn and not the episode."""
        return bool(self.stop_reason)

    @property
    def observations(self) -> list[list[Message]]:
        """The messages that follow each turn: what `add` received, or the text of given tokens."""
        ends = [*(span.start for span in self.spans[1:]), len(self.ids)]
        found = []
        for number, (span, end) in enumerate(zip(self.spans, ends, strict=True)):
            between = self.ids[span.stop : end]
            if between and number not in self.added:
                found.append([{"role": "user", "content": decode_completion(self.known.tokenizer, between)}])
            else:
                found.append(self.added.get(number, []))
        return found

    @property
    def turns(self) -> list[Turn]:
        """The policy's turns, each with the observation that followed."""
        found = []
        for number, (span, messages) in enumerate(zip(self.spans, self.observations, strict=True)):
            own = self.ids[span.start : span.stop]
            completion = decode_completion(self.known.tokenizer, own, self._criterion(number).stop)
            observation = "\n".join(message["content"] for message in messages) if messages else None
            found.append(Turn(completion, observation, self._ended(number)))
        return found

    @property
    def messages(self) -> list[Message]:
        """The turns and observations as messages."""
        found = []
        for number, (turn, messages) in enumerate(zip(self.turns, self.observations, strict=True)):
            own = {"role": "assistant", "content": turn.completion}
            found += [self.messages_of_turns.get(number, own), *messages]
        return found

    @property
    def shown(self) -> str:
        """The text for readers: with the environment's texts in brackets."""
        parts = [f"[{self.opening.strip()}]"] if self.opening else []
        for turn in self.turns:
            parts += [turn.completion, *([] if turn.observation is None else [f"[{turn.observation}]"])]
        return " ".join(parts) if self.opening or len(self.spans) > 1 else self.text

    @property
    def environment_reward(self) -> float | dict[str, list[float]] | None:
        """The environment's reward in the form of a reward function: one number if none of an earlier turn differs
        from 0, otherwise one per turn. None: it gave none."""
        if self.failure or (not self.rewards and self.outcome is None):
            return None
        *earlier, last = self.rewards or [0.0]
        last += self.outcome or 0.0
        return {"turn_scores": [*earlier, last]} if any(earlier) else last

    @property
    def text(self) -> str:
        """The text of all tokens after the prompt, without special tokens; at its end without a stop string."""
        last = self.spans[-1].start if self.spans and self.spans[-1].stop == len(self.ids) else len(self.ids)
        tokenizer = self.known.tokenizer
        before = decode_completion(tokenizer, self.ids[:last]) if last else ""
        return before + decode_completion(tokenizer, self.ids[last:], self._criterion(len(self.spans) - 1).stop)

    @property
    def ended(self) -> bool:
        """True if the last turn ended at EOS or a stop string, and the limit of tokens did not cut off another one."""
        if not self.spans or not self._ended(len(self.spans) - 1):
            return False
        return self.stop_reason == END or self.spans[-1].stop == len(self.ids)

    def _criterion(self, turn: int) -> StoppingCriterion:
        return self.criteria.get(turn, self.known.criterion)

    def _ended(self, turn: int) -> bool:
        criterion = self._criterion(turn)
        own = self.ids[self.spans[turn].start : self.spans[turn].stop]
        return own[-1] in criterion.eos_ids or bool(criterion.stop and criterion.found(own))

    def wrote(self, ids: Sequence[int], criterion: StoppingCriterion) -> int:
        """Append sampled tokens and return their number: a new turn, or more of one that was cut off and has no
        observation. It is less than given if they complete a stop string that the turn's earlier tokens began.
        `criterion` ends the turn. The log-probs are then unknown."""
        start = before = len(self.ids)
        if self.spans and self.spans[-1].stop == before and not self._ended(len(self.spans) - 1):
            start = self.spans.pop().start
        self.criteria[len(self.spans)] = criterion
        self.logprobs = None
        whole = [*self.ids[start:], *ids]
        length = (criterion.stop and criterion.stop_length(whole)) or len(whole)
        self.ids[start:] = whole[:length]
        self.spans.append(range(start, start + length))
        self._close()
        return len(self.ids) - before

    @property
    def last_completion(self) -> str:
        """The text of the last turn, without EOS and stop string."""
        own = self.ids[self.spans[-1].start : self.spans[-1].stop]
        return decode_completion(self.known.tokenizer, own, self._criterion(len(self.spans) - 1).stop)

    def add(self, observation: str | Sequence[int] | Message | Sequence[Message]) -> None:
        """Append what an environment answers to the last turn. Raises UserError, and changes nothing, if it does not
        fit, or if the episode is done or has no turn.

        Args:
            observation: ids, which are appended unchanged; one or several messages {"role", "content"}, which the
                chat template renders; or a text: a message of the user if the chat template rendered the prompt,
                otherwise plain text. Nothing in a text or a message becomes a special token. If the turn lacks its end
                token, that is appended first.
        """
        if self.done or not self.spans:
            what = f"the episode is done ({self.stop_reason})" if self.done else "the episode has no turn"
            raise UserError(what, f"add(), episode {self.number}", "Add an observation after a turn, before end()")
        ids, messages = self._rendered(observation)
        if self.rules and len(ids) > self.room:
            raise UserError(
                f"the observation does not fit: {len(ids)} tokens, and {self.room} are left",
                f"add(), episode {self.number}",
                "Shorten it, end() the episode, or raise max_episode_tokens",
            )
        self._append(ids, messages)

    def take(self, observation: str | Sequence[Message]) -> None:
        """Append an observation as `add`. One that does not fit ends the episode without it, as in TRL."""
        ids, messages = self._rendered(observation)
        if len(ids) > self.room:
            self.stop_reason = LIMIT
        else:
            self._append(ids, messages)

    def _append(self, ids: Sequence[int], messages: Sequence[Message]) -> None:
        self.ids += ids
        if self.logprobs is not None:
            self.logprobs += [0.0] * len(ids)
        if messages:
            self.added.setdefault(len(self.spans) - 1, []).extend(messages)
        self._close()

    def _rendered(
        self, observation: str | Sequence[int] | Message | Sequence[Message]
    ) -> tuple[list[int], list[Message]]:
        """Return the ids of an observation, and it as messages; none for ids."""
        several = isinstance(observation, list) and observation and isinstance(observation[0], dict)
        given = observation if several else [observation]
        if not isinstance(given[0], (str, dict)):
            return token_ids(observation, self.rules, "add()"), []
        messages = [{"role": "user", "content": one} if isinstance(one, str) else one for one in given]
        for message in messages:
            if not all(isinstance(message.get(name), str) for name in ("role", "content")):
                raise UserError("no texts as role and content", f"add(), {message!r:.60}", "Give both")
        tokenizer = self.known.tokenizer
        last = self.spans[-1]
        follows = last.stop == len(self.ids)  # not after another observation
        ended = not follows or self._ended(len(self.spans) - 1)
        if self.chat or not isinstance(observation, str):
            ids = encode_reply(tokenizer, messages)
            return ids[1:] if follows and ids[0] == self.ids[-1] else ids, messages
        end = [] if ended else [self.rules.criterion.eos]
        return [*end, *encode_text(tokenizer, observation)], messages

    def end(self) -> None:
        """End the episode: no turn follows."""
        self.stop_reason = self.stop_reason or END

    def _close(self) -> None:
        if self.rules and self.room <= 0:
            self.stop_reason = LIMIT
