"""`--chat`: a conversation with one model on the console, with the sampling settings of its run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from rlhf.analysis.loading import load_model_ref
from rlhf.analysis.models import ModelRef, find_models, in_4_bit, shared_settings
from rlhf.data.chat_template import Messages, decode_completion, encode_prompt
from rlhf.data.examples import examples_of, worked_examples
from rlhf.data.tokenizer import context_of, load_config, load_tokenizer
from rlhf.models.device import autocast, autocast_dtype, start_device
from rlhf.models.logprobs import base_of
from rlhf.rollout.sampling import BadLogits
from rlhf.rollout.stopping import stopping_criterion
from rlhf.settings.evaluation import EvaluationConfig
from rlhf.settings.training import Config
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError

NEW, EXIT = "/new", "/exit"


def chat(asked: EvaluationConfig, screen: Screen) -> None:
    """Replies to each line of standard input until `/exit`, the end of the input, or Ctrl-C.

    A line that cannot be used is reported, and the conversation continues without it. A base model has no chat
    template, so nothing is remembered: it continues each line as a separate text.
    """
    (model,) = find_models(asked.evaluation.model_path, asked.measure, "--model-path")
    config = shared_settings([model], asked.measure)
    tokenizer = load_tokenizer(model.source, config.data.plain_prompts)
    shots = worked_examples(config.data.few_shot)
    room = room_for_prompt(model, config)
    generator = StreamingGenerator(model, config, tokenizer, asked.measure.seed, screen)
    memory = "all of the conversation" if room is None else f"the newest {room:,} tokens of the conversation"
    if tokenizer.chat_template is None:
        memory = "none: the model has no chat template"
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
                ids, kept = newest_turns(tokenizer, [*turns, *examples_of([line])[0].messages], room, shots)
            except UserError as error:
                screen.say(error.report())
                continue
            if len(kept) <= len(turns):
                screen.say(f"(the context is full: dropped the {len(turns) + 1 - len(kept)} oldest messages)")
            reply = {"role": "assistant", "content": generator.generate(ids)}
            turns = [*kept, reply] if tokenizer.chat_template is not None else []
    except KeyboardInterrupt:
        screen.say()


def lines() -> Iterator[str]:
    """Yields the lines of standard input up to `/exit` or the end; empty lines are skipped."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # undecodable bytes become question marks
    try:
        while (line := input("> " if sys.stdin.isatty() else "").strip()) != EXIT:
            if line:
                yield line
    except EOFError:
        return


def newest_turns(
    tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]], room: int | None, shots: Messages = ()
) -> tuple[list[int], list[dict[str, str]]]:
    """Returns the token ids of the newest turns that fit into `room` tokens (None: no limit) after the worked examples
    `shots`, and these turns. Raises UserError if the last one is too long even alone."""
    ids = encode_prompt(tokenizer, turns, shots)
    if room is None or len(ids) <= room:
        return ids, turns
    if len(turns) == 1:
        raise UserError(f"your line is too long: {len(ids)} tokens, but the context has room for {room}. Shorten it")
    # without a question and its reply: chat templates expect a user message first
    return newest_turns(tokenizer, turns[2:], room, shots)


class StreamingGenerator(TextStreamer):
    """Samples a reply and prints each word as soon as it is complete; with stop strings, the whole reply."""

    def __init__(self, model: ModelRef, config: Config, tokenizer: PreTrainedTokenizerBase, seed: int, screen: Screen):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.screen, self.device = screen, start_device(screen)
        self.dtype = autocast_dtype(config.model.bf16, self.device)
        policy = load_model_ref(model, tokenizer, in_4_bit(model), self.dtype, self.device)
        self.model: PreTrainedModel = base_of(policy)  # a LoRA adapter is inside its modules
        # replaces the model's generation_config.json, which training does not use either
        self.criterion = stopping_criterion(tokenizer, config.sampling.stops)
        self.stop, values = self.criterion.stop, asdict(replace(config.sampling, stop=None))
        tokens = {"eos_token_id": self.criterion.eos_ids, "pad_token_id": tokenizer.pad_token_id}
        self.model.generation_config = GenerationConfig(do_sample=True, **values, **tokens)
        torch.manual_seed(seed)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.screen.write(text + ("\n" if stream_end else ""))

    def generate(self, ids: list[int]) -> str:
        prompt = torch.tensor([ids], device=self.device)

        def stopped(sampled: Tensor, *_, **__) -> Tensor:
            return torch.tensor([self.criterion.found(sampled[0, len(ids) :])], device=self.device)

        with autocast(self.device, self.dtype):
            whole = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), streamer=None if self.stop else self,
                logits_processor=[require_distribution], stopping_criteria=[stopped] if self.stop else None,
            )  # fmt: skip
        reply = decode_completion(self.tokenizer, whole[0, len(ids) :], self.stop)
        self.screen.write(f"{reply}\n" if self.stop else "")
        return reply


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
