"""`--chat`: a conversation with one model on the console, with the sampling settings of its run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from rlhf.analysis.loading import load_model_ref
from rlhf.analysis.models import ModelRef, find_models, in_4_bit, shared_settings
from rlhf.data.chat_template import decode_completion, encode_prompt
from rlhf.data.examples import examples_of
from rlhf.data.tokenizer import context_of, load_config, load_tokenizer
from rlhf.models.device import autocast, autocast_dtype, start_device
from rlhf.models.logprobs import base_of
from rlhf.rollout.sampling import BadLogits
from rlhf.settings.evaluation import EvaluationConfig
from rlhf.settings.training import Config
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError

NEW, EXIT = "/new", "/exit"


def chat(asked: EvaluationConfig, screen: Screen) -> None:
    """Replies to each line of standard input until `/exit`, the end of the input, or Ctrl-C."""
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
                screen.say("(started a new conversation)")
            else:
                answer(line, conversation, generator, screen)
    except KeyboardInterrupt:
        screen.say()


def lines() -> Iterator[str]:
    """Yields the lines of standard input up to `/exit` or the end; empty lines are skipped."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # undecodable bytes become question marks
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
    """One turn. A line that cannot be used is reported, and the conversation continues without it."""
    try:
        ids, dropped = conversation.build_prompt(line)
    except UserError as error:
        screen.say(error.report())
        return
    if dropped:
        screen.say(f"(the context is full: dropped the {dropped} oldest messages)")
    conversation.add_reply(generator.generate(ids))


@dataclass
class Conversation:
    """The newest turns that fit the context.

    A base model has no chat template, so nothing is remembered: it continues each line as a separate text.
    """

    tokenizer: PreTrainedTokenizerBase
    room: int | None  # maximum prompt tokens; None: no limit
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def has_memory(self) -> bool:
        return self.tokenizer.chat_template is not None

    def build_prompt(self, line: str) -> tuple[list[int], int]:
        """Returns the prompt's token ids and the number of oldest messages that were dropped to fit the context.

        Raises UserError if the line is not valid text, or too long even alone. The turns are then unchanged.
        """
        (example,) = examples_of([line])
        turns, before = [*self.turns, *example.messages], len(self.turns)
        ids = encode_prompt(self.tokenizer, turns)
        while self.room is not None and len(ids) > self.room:
            if len(turns) == 1:
                raise UserError(
                    f"your line is too long: {len(ids)} tokens, but the context has room for {self.room}. Shorten it"
                )
            turns = turns[2:]  # a question and its reply: chat templates expect a user message first
            ids = encode_prompt(self.tokenizer, turns)
        self.turns = turns
        return ids, before + 1 - len(turns)

    def add_reply(self, reply: str) -> None:
        self.turns = [*self.turns, {"role": "assistant", "content": reply}] if self.has_memory else []


class StreamingGenerator(TextStreamer):
    """Samples a reply and prints each word as soon as it is complete."""

    def __init__(self, model: ModelRef, config: Config, tokenizer: PreTrainedTokenizerBase, seed: int, screen: Screen):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.screen, self.device = screen, start_device(screen)
        self.dtype = autocast_dtype(config.model.bf16, self.device)
        policy = load_model_ref(model, tokenizer, in_4_bit(model), self.dtype, self.device)
        self.model: PreTrainedModel = base_of(policy)  # a LoRA adapter is inside its modules
        # replaces the model's generation_config.json, which training does not use either
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
            whole = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), streamer=self, logits_processor=[require_distribution]
            )
        return decode_completion(self.tokenizer, whole[0, len(ids) :])


def require_distribution(ids: Tensor, logits: Tensor) -> Tensor:
    """Return the logits (B, V). Raises BadLogits if they are no distribution: on a GPU, sampling from them would end
    the process's use of the GPU."""
    if not logits.logsumexp(-1).isfinite().all():
        raise BadLogits("NaN or infinity in the logits: --chat. Check the weights of the model, and --temperature")
    return logits


def room_for_prompt(model: ModelRef, config: Config) -> int | None:
    """Returns the context length minus --max-new-tokens. Raises UserError if nothing is left for a prompt."""
    context, length = context_of(load_config(model.base or model.source)), config.sampling.max_new_tokens
    if context is not None and length >= context:
        raise UserError(
            f"no room for a prompt: --max-new-tokens {length} fills the model's context of {context} tokens. "
            f"Try --max-new-tokens {context // 2}"
        )
    return None if context is None else context - length


def facts(model: ModelRef, config: Config, conversation: Conversation) -> list[tuple[str, str]]:
    """Returns the lines printed at the start: the model, its sampling settings, its memory, and the commands."""
    room = conversation.room
    remembered = f"the newest {room:,} tokens" if room is not None else "all"
    memory = f"{remembered} of the conversation" if conversation.has_memory else "none: the model has no chat template"
    return [
        ("model", model.label),
        *([("base", model.base)] if model.base is not None else []),
        ("sampling", str(config.sampling)),
        ("memory", memory),
        (NEW, "starts a new conversation"),
        (EXIT, "ends the chat, as do Ctrl-C and the end of the input"),
    ]
