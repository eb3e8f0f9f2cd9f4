"""The start model of demo-game: the demo's model, trained on transcripts of random legal play of Crossing."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase

from rlhf.data.chat_template import encode_completion, encode_prompt, encode_reply
from rlhf.data.tokenizer import load_tokenizer
from rlhf.demo.crossing import GO, RISKS, STOP, TURNS, Seen, prompts, turn_text
from rlhf.models.load import load_policy
from rlhf.rollout.completions import padded
from rlhf.utils.console import Screen
from rlhf.utils.files import saving_tensors

STEPS = 160
LEARNING_RATE = 2e-3  # of AdamW; linear warm-up over a tenth of the steps, then linear decay to 0
PROMPTS = 512
SEED = 42
IGNORED = -100  # label of a token without loss
CPU = torch.device("cpu")


def train_start_model(folder: Path, screen: Screen) -> None:
    """Train the model of a folder in place: at each turn, its first token has the target 50% `go`, 50% `stop`.

    These are the probabilities of random play; samples of it would add noise, and have few late turns.
    """
    tokenizer = load_tokenizer(str(folder))
    model = load_policy(str(folder), device=CPU, vocabulary=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    warmup = max(1, STEPS // 10)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 1 - step / STEPS))
    rng = random.Random(SEED)
    texts = prompts(PROMPTS)
    for step in range(1, STEPS + 1):
        games = [tuple(rng.choices(list(RISKS), k=turn)) for turn in range(1, TURNS + 1)]
        rows = [transcript(tokenizer, rng.choice(texts), seen) for seen in games]
        fillings = tokenizer.pad_token_id, IGNORED, IGNORED
        parts = zip(*rows, strict=True)
        ids, labels, other_labels = (padded(*part, CPU) for part in zip(parts, fillings, strict=True))
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        losses = [cross_entropy(logits, which[:, 1:].flatten()) for which in (labels, other_labels)]
        loss = sum(losses) / 2
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        screen.progress(f"start model: step {step}/{STEPS} | loss {loss.item():.3f} nats/token", last=step == STEPS)
    with saving_tensors(folder):
        model.save_pretrained(folder)


def transcript(tokenizer: PreTrainedTokenizerBase, prompt: str, seen: Seen) -> tuple[list[int], list[int], list[int]]:
    """Return a game that goes until the last turn of `seen`, and stops there: its ids, the labels of the player's
    tokens, and the same labels with the first token of the other legal completion at each turn."""
    go = encode_completion(tokenizer, GO)
    stop = encode_completion(tokenizer, STOP)
    parts = [*[(go, stop)] * (len(seen) - 1), (stop, go)]
    ids = []
    labels = []
    other_labels = []
    for before, (completion, other) in zip(texts_before(tokenizer, prompt, seen), parts, strict=True):
        ignored = [IGNORED] * len(before)
        ids += before + completion
        labels += ignored + completion
        other_labels += [*ignored, other[0], *completion[1:]]
    return ids, labels, other_labels


def texts_before(tokenizer: PreTrainedTokenizerBase, prompt: str, seen: Seen) -> list[list[int]]:
    """Return the ids before each turn of a player who goes: the prompt with the first turn, then, after the end of
    each completion, what shows the next one."""
    first, *later = [{"role": "user", "content": turn_text(pot, risk)} for pot, risk in enumerate(seen)]
    opening = {**first, "content": f"{prompt} {first['content']}"}
    # a completion has its own end token
    return [encode_prompt(tokenizer, [opening]), *(encode_reply(tokenizer, [message])[1:] for message in later)]
