"""`--chat`: a conversation with one model on the console, sampled as its run sampled."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from rlhf.analysis.models import ModelRef, find_models, in_4_bit, load_model_ref, shared_settings
from rlhf.data.chat_template import decode_completion, encode_prompt
from rlhf.data.examples import examples_of
from rlhf.models.device import autocast, autocast_dtype, start_device
from rlhf.models.load import context_of, load_config, load_tokenizer
from rlhf.models.logprobs import base_of
from rlhf.settings.evaluation import EvaluationConfig
from rlhf.settings.training import Config
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError

NEW, EXIT = "/new", "/exit"


def chat(asked: EvaluationConfig, screen: Screen) -> None:
    """Lines from standard input, a reply to each, until `/exit`, the end of the input, or Ctrl-C."""
    (model,) = find_models(asked.evaluation.model_path, asked.measure, "--model-path")
    config = shared_settings([model], asked.measure)
    tokenizer = load_tokenizer(model.source)
    conversation = Conversation(tokenizer, room_for_prompt(model, config))
    generator = StreamingGenerator(model, config, tokenizer, asked.measure.seed, screen)
    screen.facts(facts(model, config, conversation))
    try:
        for line in lines():
            if line == NEW:
                conversation.turns.clear()
                screen.say("a new conversation")
            else:
                answer(line, conversation, generator, screen)
    except KeyboardInterrupt:
        screen.say()


def lines() -> Iterator[str]:
    """What is typed or piped in, without empty lines, up to `/exit` or the end."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no text become a question mark, not an error
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line == EXIT:
            return
        if line:
            yield line


def answer(line: str, conversation: Conversation, generator: StreamingGenerator, screen: Screen) -> None:
    """One turn. A line that cannot be read is told, and the conversation goes on without it."""
    try:
        ids, left_out = conversation.build_prompt(line)
    except UserError as error:
        screen.say(error.report())
        return
    if left_out:
        screen.say(f"(the context is full: the {left_out} oldest turns are left out)")
    conversation.add_reply(generator.generate(ids))


@dataclass
class Conversation:
    """The turns so far, as many of the newest as the context holds. A base model, without a chat template, has none:
    each line is a text of its own that it goes on with."""

    tokenizer: PreTrainedTokenizerBase
    room: int | None  # tokens of a prompt at most; None: no limit
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def has_memory(self) -> bool:
        return self.tokenizer.chat_template is not None

    def build_prompt(self, line: str) -> tuple[list[int], int]:
        """The ids that the model reads next, and how many of the oldest turns were left out for them. Raises UserError
        for a line that is no text, or too long even alone; the turns are then as before."""
        (example,) = examples_of([line])
        turns, before = [*self.turns, *example.messages], len(self.turns)
        ids = encode_prompt(self.tokenizer, turns)
        while self.room is not None and len(ids) > self.room:
            if len(turns) == 1:
                raise UserError(f"{len(ids)} tokens, there is room for {self.room}: your line. Write a shorter one")
            turns = turns[2:]  # a question and its reply: templates want the user first
            ids = encode_prompt(self.tokenizer, turns)
        self.turns = turns
        return ids, before + 1 - len(turns)

    def add_reply(self, reply: str) -> None:
        self.turns = [*self.turns, {"role": "assistant", "content": reply}] if self.has_memory else []


class StreamingGenerator(TextStreamer):
    """A model that replies, each word on the screen as soon as it is there."""

    def __init__(self, model: ModelRef, config: Config, tokenizer: PreTrainedTokenizerBase, seed: int, screen: Screen):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.screen, self.device = screen, start_device(screen)
        self.dtype = autocast_dtype(config.model.bf16, self.device)
        policy = load_model_ref(model, tokenizer, in_4_bit(model), self.dtype, self.device)
        self.model: PreTrainedModel = base_of(policy)  # an adapter lives inside its modules
        # the run's way of sampling alone: what the start model's own file says besides was not in force in training
        self.model.generation_config = GenerationConfig(
            do_sample=True,
            temperature=config.sampling.temperature,
            top_k=config.sampling.top_k,
            top_p=config.sampling.top_p,
            max_new_tokens=config.sampling.max_new_tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        torch.manual_seed(seed)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.screen.write(text + ("\n" if stream_end else ""))

    def generate(self, ids: list[int]) -> str:
        prompt = torch.tensor([ids], device=self.device)
        with autocast(self.device, self.dtype):
            whole = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=self)
        return decode_completion(self.tokenizer, whole[0, len(ids) :])


def room_for_prompt(model: ModelRef, config: Config) -> int | None:
    """Tokens of the context that a reply leaves. Raises UserError where it leaves none."""
    context, length = context_of(load_config(model.base or model.source)), config.sampling.max_new_tokens
    if context is not None and length >= context:
        raise UserError(
            f"replies of {length} tokens leave no room for a prompt in a context of {context}: --max-new-tokens. "
            f"Try {context // 2}"
        )
    return None if context is None else context - length


def facts(model: ModelRef, config: Config, conversation: Conversation) -> list[tuple[str, str]]:
    """Who is talked to, how it replies, and how to end it."""
    room = conversation.room
    remembered = f"the newest {room:,} tokens" if room is not None else "all"
    memory = f"{remembered} of the conversation" if conversation.has_memory else "nothing: it has no chat template"
    return [
        ("model", model.label),
        *([("base", model.base)] if model.base is not None else []),
        ("replies", str(config.sampling)),
        ("remembers", memory),
        (NEW, "begins a new conversation"),
        (EXIT, "ends; so does Ctrl-C, or the end of the input"),
    ]
