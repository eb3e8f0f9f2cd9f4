"""Trains a small Llama from scratch on questions and completions: the start models of the demos."""

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf.rollout.completions import padded
from rlhf.utils.errors import print_line
from rlhf.utils.files import saving_tensors

CPU = torch.device("cpu")
PAD = "<|endoftext|>"
TURN = "<|im_start|>"
EOS = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_COMPLETION_TOKENS = 40  # a longer training completion is cut here and has no EOS
SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    # 1 / sqrt(width). With the usual 0.02 a model this narrow needs more than twice as long to learn to copy.
    "initializer_range": 0.088,
}


@dataclass(frozen=True)
class Pretraining:
    """What a start model is trained on, and for how long."""

    corpus: Callable[[int, bool], Iterator[tuple[str, str]]]  # (seed, mixed) -> (question, completion), endlessly
    clean_share: float  # of the steps: the first ones use only good completions (not `mixed`)
    steps: int
    vocabulary: int  # tokens
    batch: int = 32
    learning_rate: float = 1.5e-3


def build_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with ChatML turns. Pad is `<|endoftext|>`, EOS is `<|im_end|>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, TURN, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[TURN],
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=SHAPE["max_position_embeddings"],
    )


def prompt_text(question: str) -> str:
    """Return the question in ChatML, up to the position where the completion starts."""
    return f"{TURN}user\n{question}{EOS}\n{TURN}assistant\n"


def encode_example(tokenizer, question: str, completion: str) -> tuple[list[int], list[int]]:
    """Return (ids, labels) of one example. Labels are -100 on the prompt. A long completion is cut, without EOS."""
    prompt = tokenizer(prompt_text(question))["input_ids"]
    kept = [*tokenizer(completion)["input_ids"], tokenizer.eos_token_id][:MAX_COMPLETION_TOKENS]
    return prompt + kept, [-100] * len(prompt) + kept


def training_batches(
    tokenizer, source: Iterator[tuple[str, str]], seed: int, batch: int, pool: int = 16
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (ids, labels) endlessly, each (batch, T), right-padded. Labels are -100 outside the completion.

    Sorts the examples of `pool` batches by length, which saves a third of the padding.
    """
    rng = random.Random(f"order {seed}")
    while True:
        rows = [encode_example(tokenizer, *next(source)) for _ in range(batch * pool)]
        rows.sort(key=lambda row: len(row[0]))
        starts = list(range(0, len(rows), batch))
        rng.shuffle(starts)
        for start in starts:
            ids, labels = zip(*rows[start : start + batch], strict=True)
            yield padded(ids, tokenizer.pad_token_id, CPU), padded(labels, -100, CPU)


def new_model(tokenizer) -> LlamaForCausalLM:
    """Return an untrained Llama with the demo's shape."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        **SHAPE,
    )
    return LlamaForCausalLM(config)


def learning_rate_at(step: int, steps: int, peak: float) -> float:
    """Return the learning rate: linear warm-up over 100 steps, constant for half of the steps, linear decay to zero.

    `step` counts from 1.
    """
    return peak * min(step / 100, 1.0, 2 * (1 - (step - 1) / steps))


def pretrain(plan: Pretraining, folder: str | Path, seed: int = 0) -> None:
    """Train a start model and save it as a Hugging Face folder.

    Runs `plan.steps` optimizer steps on `plan.batch` new examples each, first good completions, then the mixture. The
    loss covers only the assistant's tokens. Weights are stored in bfloat16 and load as float32.
    """
    start = time.monotonic()
    torch.manual_seed(seed)
    texts = [text for row in itertools.islice(plan.corpus(seed + 1, True), 20_000) for text in row]
    tokenizer = build_tokenizer(texts + ["user", "assistant", "system"] * 2000, plan.vocabulary)
    model = new_model(tokenizer)
    print_line(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {plan.steps} steps")
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.98), weight_decay=0.05)
    recent = 0.0
    for step, (ids, labels) in enumerate(_batches(plan, tokenizer, seed), start=1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, plan.steps, plan.learning_rate)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent = loss.item() if step == 1 else 0.98 * recent + 0.02 * loss.item()
        if step % 200 == 0 or step == plan.steps:
            print_line(f"step {step}/{plan.steps}  loss {recent:.3f} nats/token  {time.monotonic() - start:.0f} s")
    save_start_model(model, tokenizer, folder)


def _batches(plan: Pretraining, tokenizer, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches of all steps: those of good completions, then those of the mixture."""
    clean_steps = round(plan.clean_share * plan.steps)
    clean = training_batches(tokenizer, plan.corpus(seed, False), seed, plan.batch)
    mixed = training_batches(tokenizer, plan.corpus(seed, True), seed, plan.batch)
    return itertools.chain(itertools.islice(clean, clean_steps), itertools.islice(mixed, plan.steps - clean_steps))


def save_start_model(model, tokenizer, folder: str | Path) -> None:
    """Save the weights in bfloat16 to halve the file. config.json has dtype float32, so that they load as float32."""
    with saving_tensors(Path(folder)):
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = "float32"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def rebuild_command(plan: Pretraining, weights: Path, module: str, argv: list[str] | None = None) -> None:
    """Run `python -m MODULE --rebuild`: retrain the shipped start model in `weights`."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Rebuild a start model of the demos.")
    parser.add_argument("--rebuild", action="store_true", required=True, help="retrain the shipped start model")
    parser.add_argument("--folder", default=weights, help="output folder (default: the shipped weights)")
    args = parser.parse_args(argv)
    # one summation order, so that the same seed gives the same weights; a second thread is hardly faster
    torch.set_num_threads(1)
    pretrain(plan, args.folder)
    print_line(f"rebuilt {args.folder}")
