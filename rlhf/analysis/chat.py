"""`--chat`: a conversation with one model on the console, with the sampling settings of its run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from transformers import PreTrainedTokenizerBase

from rlhf.analysis.loading import load_model_ref
from rlhf.analysis.models import ModelRef, find_models, in_4_bit, require_trusted_code, shared_settings
from rlhf.data.chat_template import Messages, encode_prompt
from rlhf.data.examples import examples_of, worked_examples
from rlhf.data.prompts import Prompt, encode_all, ids_alone
from rlhf.data.row import Example
from rlhf.data.tokenizer import context_of, load_config, load_tokenizer
from rlhf.environments.environment import make_environment
from rlhf.environments.find import find_instance
from rlhf.models.actor_critic import Actor
from rlhf.models.device import autocast_dtype, start_device
from rlhf.rollout.episodes import Episode
from rlhf.rollout.sampler import Sampler
from rlhf.settings.evaluation import EvaluationConfig
from rlhf.settings.training import Config
from rlhf.trainer.passes import ForwardPasses
from rlhf.trainer.play import Player
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError
from rlhf.utils.streams import lost_streams

NEW = "/new"
EXIT = "/exit"


def chat(asked: EvaluationConfig, screen: Screen) -> None:
    """Replies to each line of standard input until `/exit`, the end of the input, or Ctrl-C.

    A line that cannot be used is reported, and the conversation continues without it. A base model has no chat
    template, so nothing is remembered: it continues each line as a separate text. With an environment, each line is
    the prompt of a new episode, which is played to its end.
    """
    (model,) = find_models(asked.evaluation.model_path, asked.measure, "--model-path")
    require_trusted_code([model], asked.measure, ("environment",))
    config = shared_settings([model], asked.measure)
    date = model.run.date if model.run is not None else None
    data = config.data
    tokenizer = load_tokenizer(model.source, data.plain_prompts, date, data.chat_template_kwargs)
    shots = worked_examples(data.few_shot)
    room = room_for_prompt(model, config)
    generator = ReplyGenerator(model, config, tokenizer, asked.measure.seed, screen)
    memory = "all of the conversation" if room is None else f"the newest {room:,} tokens of the conversation"
    if tokenizer.chat_template is None:
        memory = "none: the model has no chat template"
    if generator.player.environment is not None:
        memory = f"none: each line begins an episode of {generator.player.environment.name}"
    screen.facts([("model", model.label), ("sampling", str(config.sampling)), ("memory", memory)])
    screen.facts([(NEW, "starts a new conversation"), (EXIT, "ends the chat, as do Ctrl-C and the end of the input")])
    turns: list[dict[str, str]] = []
    try:
        for line in lines():
            if line == NEW:
                turns = []
                screen.say("(started a new conversation)")
                continue
            try:
                (example,) = examples_of([line])
                if generator.player.environment is not None:
                    screen.write(f"{generator.play(example, shots)}\n")
                    continue
                ids, kept = newest_turns(tokenizer, [*turns, *example.messages], room, shots)
            except UserError as error:
                screen.say(error.report())
                continue
            if len(kept) <= len(turns):
                screen.say(f"(the context is full: dropped the {len(turns) + 1 - len(kept)} oldest messages)")
            reply = generator.generate(ids)
            screen.write(f"{reply}\n")
            turns = [*kept, {"role": "assistant", "content": reply}] if tokenizer.chat_template is not None else []
    except KeyboardInterrupt:
        screen.say()


def lines() -> Iterator[str]:
    """Yields the lines of standard input up to `/exit` or the end, or until nobody sees the replies; empty lines are
    skipped."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # undecodable bytes become question marks
    try:
        while (line := input("> " if sys.stdin.isatty() else "").strip()) != EXIT:
            if line:
                yield line
            if "stdout" in lost_streams:
                return
    except EOFError:
        return


def newest_turns(
    tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]], room: int | None, shots: Messages = ()
) -> tuple[list[int], list[dict[str, str]]]:
    """Return the token ids of the newest turns that fit into `room` tokens (None: no limit) after the worked examples
    `shots`, and these turns. Raises UserError if the last one is too long even alone."""
    ids = encode_prompt(tokenizer, turns, shots)
    if room is None or len(ids) <= room:
        return ids, turns
    if len(turns) == 1:
        raise UserError(
            "your line is too long", f"{len(ids)} tokens, but the context has room for {room}", "Shorten it"
        )
    # without a question and its reply: chat templates expect a user message first
    return newest_turns(tokenizer, turns[2:], room, shots)


class ReplyGenerator:
    """Samples replies as training and evaluations do."""

    def __init__(self, model: ModelRef, config: Config, tokenizer: PreTrainedTokenizerBase, seed: int, screen: Screen):
        self.tokenizer = tokenizer
        self.replies = 0
        device = start_device(screen)
        dtype = autocast_dtype(config.model.bf16, device)
        policy = load_model_ref(model, tokenizer, in_4_bit(model), dtype, device)
        engine = config.speed.own_engine
        sampler = Sampler.of(policy, tokenizer, config.sampling, device, dtype=dtype, engine=engine)
        construct, instance = find_instance(config)
        environment = None if instance is None else make_environment(config, construct, instance, tokenizer, seed)
        passes = ForwardPasses(Actor(policy), None, config.sampling.temperature, dtype)
        how = config.episode_tokens, seed, environment
        self.player = Player.of(sampler, passes, tokenizer, *how, phase="a reply", say=screen.say)

    def generate(self, ids: list[int]) -> str:
        """Return a reply to a conversation."""
        episode = self._played(ids_alone(ids), self.player.turn)
        return episode.last_completion

    def play(self, example: Example, shots: Messages) -> str:
        """Return the turns of an episode, with the environment's answers in brackets. Raises RunError if it fails."""
        (prompt,) = encode_all(self.tokenizer, [example], shots)
        return self._played(prompt, self.player.play).shown

    def _played(self, prompt: Prompt, play: Callable[[list[Episode]], None]) -> Episode:
        episodes = self.player.started([(0, prompt)], self.replies, "chat", 1)
        self.replies += 1
        play(episodes)
        return episodes[0]


def room_for_prompt(model: ModelRef, config: Config) -> int | None:
    """Return the context length minus --max-new-tokens. Raises UserError if nothing is left for a prompt."""
    context = context_of(load_config(model.base or model.source))
    length = config.sampling.max_new_tokens
    if context is not None and length >= context:
        raise UserError(
            "no room for a prompt",
            f"--max-new-tokens {length} fills the model's context of {context} tokens",
            f"Try --max-new-tokens {context // 2}",
        )
    return None if context is None else context - length
