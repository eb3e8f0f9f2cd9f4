"""Environments: instances of a user's class that answer the policy's turns.

Two forms. A class with the method `observe` is the plain form, for any model. Any other is TRL's form (GRPOTrainer's
`environment_factory`): its public methods are tools, which the model calls as its chat template describes them.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from rlhf.data.chat_template import Messages, decode_completion, encode_prompt, encode_text
from rlhf.data.examples import worked_examples
from rlhf.data.messages import Message
from rlhf.environments.calls import Call, Failure, call_all
from rlhf.environments.find import OF_THE_ENVIRONMENT, Instance
from rlhf.rewards.arguments import parameters_of
from rlhf.rewards.call import accepted, copied, score_problem
from rlhf.rollout.episodes import Episode
from rlhf.settings.training import Config, EnvironmentSettings
from rlhf.utils.errors import UserError, first_line
from rlhf.utils.rng import rng_for

PLAIN_FORM = "Use a model whose chat template has tools, or write the plain form: a class with observe(completion)"
CUT = " [...]"  # behind an observation that was cut at --max-observation-tokens


class EnvironmentAnswer(NamedTuple):
    """What an environment answers to a turn."""

    observation: str | list[Message] | None = None  # None: the episode ends
    reward: float = 0.0  # of the turn
    message: Message | None = None  # the turn with its tool calls; None: its text
    cut: int = 0  # observations that were cut
    failure: str = ""  # what the environment raised, and where


class Environment(ABC):
    """The instances of one class in this process. They are constructed once, and reset for each episode."""

    tools: Sequence[dict] = ()  # JSON schemas of the tools

    def __init__(
        self,
        construct: Callable[[], Instance],
        first: Instance,
        tokenizer: PreTrainedTokenizerBase,
        settings: EnvironmentSettings,
        seed: int,
        limit_s: float | None,
        shots: Messages,
        longest: int,
    ):
        """
        Args:
            construct: returns an instance.
            first: the first one.
            tokenizer: the policy's.
            settings: the limits of turns and observations.
            seed: of its random numbers.
            limit_s: time limit of one call, in seconds; None: no limit.
            shots: worked examples before each prompt.
            longest: tokens of the longest prompt.
        """
        self.construct = construct
        self.pool = [first]
        self.tokenizer = tokenizer
        self.settings = settings
        self.seed = seed
        self.limit_s = limit_s
        self.shots = shots
        self.longest = longest
        self.name = type(first).__name__
        self.has_played = False

    def reset(self, episodes: Sequence[Episode]) -> list[str | Failure | None]:
        """Give each of this process's new episodes its instance, and return what their `reset` returns."""
        calls = []
        for number, episode in enumerate(episodes):
            if number == len(self.pool):
                self.pool.append(self.construct())
            episode.environment = self.pool[number]
            row = {name: copied(value) for name, value in episode.prompt.example.columns.items()}
            reset = episode.environment.reset
            if "seed" not in row and "seed" in {parameter.name for parameter in parameters_of(reset)}:
                row["seed"] = self._seed_of(episode)
            calls.append(self._call(episode, partial(reset, **accepted(reset, row))))
        return [
            text if isinstance(text, str | None) else Failure(f"reset returned {text!r:.60}, which is no text")
            for text in call_all(calls, self.limit_s)
        ]

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Return the ids of a prompt, with the tools. Raises UserError if it is too long."""
        how = {"tools": list(self.tools)} if self.tools else {}
        ids = encode_prompt(self.tokenizer, messages, self.shots, **how)
        if len(ids) > self.longest:
            raise UserError(
                f"a prompt of {len(ids)} tokens with the text of reset",
                f"{self.name}.reset(), --prompt-length {self.longest}",
                "Shorten it, or raise --prompt-length",
            )
        return ids

    @abstractmethod
    def answers(self, episodes: Sequence[Episode]) -> list[EnvironmentAnswer]:
        """Return the answers to the last turns of this process's episodes."""

    def outcomes(self, episodes: Sequence[Episode]) -> list[float | Failure | None]:
        """Return what `get_reward` returns for this process's episodes; None without this method."""
        if not hasattr(self.pool[0], "get_reward"):
            return [None] * len(episodes)
        calls = [self._call(episode, episode.environment.get_reward) for episode in episodes]
        found = call_all(calls, self.limit_s)
        return [given if given is None or isinstance(given, Failure) else as_reward(given) for given in found]

    def _call(self, episode: Episode, call: Callable[[], Any]) -> Call:
        key = self.seed, self.name, episode.purpose, episode.stream, episode.number, len(episode.spans)
        return key, call

    def _seed_of(self, episode: Episode) -> int:
        """Return the seed for `reset`, from 0 to 2^31 - 1: equal within a group, and in all evaluations."""
        purpose = f"environment of {episode.purpose}"
        return int(rng_for(self.seed, episode.stream, purpose, episode.group).integers(2**31))

    def _cut(self, text: str) -> str:
        """Return an observation of at most --max-observation-tokens."""
        most = self.settings.max_observation_tokens
        ids = [] if most is None else encode_text(self.tokenizer, text)
        return text if not ids[most:] else decode_completion(self.tokenizer, ids[:most]) + CUT


class PlainEnvironment(Environment):
    """The plain form: `observe(completion)` returns an observation, or None to end the episode, or one of them with
    the reward of the turn."""

    def answers(self, episodes: Sequence[Episode]) -> list[EnvironmentAnswer]:
        calls = [self._call(e, partial(e.environment.observe, e.last_completion)) for e in episodes]
        return list(map(self._answer, call_all(calls, self.limit_s)))

    def _answer(self, result: Any) -> EnvironmentAnswer:
        text, given = result if isinstance(result, tuple) and len(result) == 2 else (result, 0.0)
        reward = as_reward(given)
        for failure in (text, reward):
            if isinstance(failure, Failure):
                return EnvironmentAnswer(failure=failure)
        if not isinstance(text, str | None):
            return EnvironmentAnswer(failure=f"observe returned {text!r:.60}, which is no text")
        shown = text and self._cut(text)
        return EnvironmentAnswer(shown, reward, cut=int(shown != text))


class ToolEnvironment(Environment):
    """TRL's form: the episode ends with a turn without a tool call that can be parsed."""

    def __init__(self, construct: Callable[[], Instance], first: Instance, tokenizer: PreTrainedTokenizerBase, *more):
        super().__init__(construct, first, with_tools(tokenizer), *more)
        self.tools = [schema_of(getattr(first, name)) for name in tools_of(first)]

    def answers(self, episodes: Sequence[Episode]) -> list[EnvironmentAnswer]:
        from trl.chat_template_utils import parse_response  # imports TRL's trainers

        most = self.settings.max_turns
        messages = []
        calls = []
        for episode in episodes:
            turn = episode.spans[-1]
            before = [*episode.prompt.ids, *episode.ids[: turn.start]]
            message = parse_response(self.tokenizer, episode.ids[turn.start : turn.stop], prefix=before)
            messages.append(message)
            asked = message.get("tool_calls") or []
            is_last = most is not None and len(episode.spans) >= most
            calls.append([self._tool_call(episode, call) for call in ([] if is_last else asked)])
        results = iter(call_all([one[1] for each in calls for one in each], self.limit_s))
        answers = []
        for message, own in zip(messages, calls, strict=True):
            found = [(name, is_async, next(results)) for name, _, is_async in own]
            found.sort(key=lambda one: one[1])  # as in TRL, the results of async tools follow the others
            answers.append(self._answer(message, [(name, result) for name, _, result in found]))
        return answers

    def _tool_call(self, episode: Episode, call: dict) -> tuple[str, Call, bool]:
        """Return the name of a tool call, what it calls, and whether that is async."""
        asked = call.get("function") or call
        name = asked["name"]
        if name not in tools_of(episode.environment):
            return name, self._call(episode, partial(not_found, name)), False
        tool = getattr(episode.environment, name)
        called = self._call(episode, lambda: tool(**asked["arguments"]))  # the model may give no dict
        return name, called, inspect.iscoroutinefunction(tool)

    def _answer(self, message: Message, results: list[tuple[str, Any]]) -> EnvironmentAnswer:
        messages = []
        cut = 0
        for name, result in results:
            if isinstance(result, list) and any(isinstance(part, dict) and "image" in part for part in result):
                return EnvironmentAnswer(
                    message=message, failure=f"the tool {name} returned an image, which is not supported"
                )
            text = str({"error": result.message} if isinstance(result, Failure) else result)
            shown = self._cut(text)
            cut += shown != text
            messages.append({"role": "tool", "name": name, "content": shown})
        return EnvironmentAnswer(messages or None, message=message, cut=cut)


def make_environment(
    config: Config, construct: Callable[[], Instance], first: Instance, tokenizer: PreTrainedTokenizerBase, seed: int
) -> Environment:
    """Return the environment of a run, in the form of its class. `seed` is that of its random numbers. Raises
    UserError if the tokenizer cannot be used."""
    form = PlainEnvironment if hasattr(first, "observe") else ToolEnvironment
    data = config.data
    shots = worked_examples(data.few_shot)
    limit_s = config.reward.reward_timeout
    return form(construct, first, tokenizer, config.environment, seed, limit_s, shots, data.prompt_length)


def not_found(name: str) -> None:
    """Raise ValueError: TRL's answer to a call of an unknown tool."""
    raise ValueError(f"Tool {name} not found.")


def tools_of(instance: Instance) -> list[str]:
    """Return the names of an instance's tools: its public methods."""
    methods = inspect.getmembers(instance, predicate=inspect.ismethod)
    return [name for name, _ in methods if not name.startswith("_") and name not in OF_THE_ENVIRONMENT]


def with_tools(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy of a tokenizer that parses tool calls, and whose chat template keeps earlier turns unchanged, as
    GRPOTrainer prepares it. Raises UserError if the chat template has no tools."""
    from trl import chat_template_utils as of_trl

    if not of_trl.supports_tool_calling(tokenizer):
        raise UserError("the model's chat template has no tools", "environment", PLAIN_FORM)
    own = copy.copy(tokenizer)
    try:
        if not any(getattr(own, name, None) for name in ("response_template", "response_schema")):
            of_trl.add_response_schema(own)
        if not of_trl.is_chat_template_prefix_preserving(own):
            own.chat_template = of_trl.get_training_chat_template(own)
    except ValueError as error:
        raise UserError(f"tool calls cannot be read ({first_line(error):.200})", "environment", PLAIN_FORM) from None
    return own


def schema_of(tool: Callable[..., Any]) -> dict:
    """Return the JSON schema of a tool from its docstring and annotations. Raises UserError without them."""
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:  # of the parser of docstrings, or of the annotations
        raise UserError(
            f"the tool has no schema ({first_line(error):.200})",
            f"environment, {tool.__qualname__}()",
            "Annotate its parameters, and describe each in its docstring under Args:",
        ) from None


def as_reward(given: Any) -> float | Failure:
    """Return a reward as a number; a Failure if it is none."""
    given = given.item() if hasattr(given, "item") else given
    problem, _ = score_problem(given)
    return float(given) if problem is None else Failure(f"a reward that cannot be used: {problem}")
