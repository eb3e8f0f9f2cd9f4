"""The demo's preference pairs: the start model's OWN samples, ranked by gold quality, and some mismatched ones."""

import json
import random
from collections import Counter
from pathlib import Path

import torch

from rlhf.data.examples import Example
from rlhf.data.prompts import encode_prompts
from rlhf.demo.tasks import flaw_of, gold_quality
from rlhf.models.budget import budget_of
from rlhf.rollout.engine import sample_completions
from rlhf.rollout.sampling import uniform_noise
from rlhf.settings.training import SamplingSettings

SAMPLING = SamplingSettings(max_new_tokens=32, temperature=1.0)
CLEAR_DIFFERENCE = 0.25  # gold quality between chosen and rejected
MISMATCHED_SHARE = 0.15  # of the pairs: the rejected reply is a good answer to another question


def _row(question: str, chosen: str, rejected: str, ended: bool = True) -> dict:
    """One preference pair in the columns of `Intel/orca_dpo_pairs`, with the rejected reply's flaw and ending."""
    flaw = flaw_of(question, rejected, ended)
    columns = {"system": "", "question": question, "chosen": chosen, "rejected": rejected}
    return columns | {"flaw": flaw, "rejected_ended": ended}


def sampled_pairs(
    question: str, completions: list[tuple[str, bool]], seen: Counter, per_question: int = 2
) -> list[dict]:
    """Pairs among one question's own samples: the best that ended against clearly worse ones, one for each flaw.

    `seen` counts flaws over all questions and is brought up to date. Wrong answers, the hardest to tell, go first;
    then the rarer flaw.
    """
    graded = sorted({(gold_quality(question, text, ended), text, ended) for text, ended in completions}, reverse=True)
    best = next((row for row in graded if row[2]), None)
    if best is None:
        return []
    worse = {}
    for gold, text, ended in graded:
        flaw = flaw_of(question, text, ended)
        if flaw and best[0] - gold >= CLEAR_DIFFERENCE and text.strip():
            worse.setdefault(flaw, (text, ended))
    rows = []
    for flaw in sorted(worse, key=lambda flaw: (flaw != "wrong", seen[flaw], flaw))[:per_question]:
        seen[flaw] += 1
        rows.append(_row(question, best[1], *worse[flaw]))
    return rows


def mismatched_pairs(good: list[tuple[str, str]], count: int, rng: random.Random) -> list[dict]:
    """Pairs whose rejected reply is a good answer to another question, often of the same family.

    `good` holds (question, good reply); each question is used once at most.
    """
    rows = []
    for question, chosen in rng.sample(good, len(good)):
        if len(rows) == count:
            break
        rejected = rng.choice(good)[1]
        if flaw_of(question, rejected) == "off_topic":
            rows.append(_row(question, chosen, rejected))
    return rows


def sample_answers(model, tokenizer, asked: list[str], seed: int, device: torch.device) -> list[tuple[str, bool]]:
    """One reply to each question, at temperature 1: (text, ended). Questions of like length share a batch."""
    examples = [Example(messages=({"role": "user", "content": question},)) for question in asked]
    prompts, _ = encode_prompts(tokenizer, examples, longest=model.config.max_position_embeddings)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].ids))
    answers: list[tuple[str, bool]] = [("", False)] * len(prompts)
    size = budget_of(device).demo_batch_size
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        noise = uniform_noise(seed, 0, "demo pairs", rows, SAMPLING.max_new_tokens)
        tokens = {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
        completions = sample_completions(
            model, [prompts[row] for row in rows], noise, SAMPLING, **tokens, device=device
        )
        for row, text, ended in zip(rows, completions.texts(tokenizer), completions.ended.tolist(), strict=True):
            answers[row] = (text, ended)
    return answers


def make_pairs(
    model, tokenizer, asked: list[str], samples_per_question: int, seed: int, device: torch.device
) -> list[dict]:
    """Preference pairs among the model's own samples, ranked by gold quality, and mismatched ones.

    Each row: system (""), question, chosen, rejected, flaw (the rejected one's, of FLAWS), rejected_ended (False: it
    hit the length limit without stopping). Chosen replies have always ended. Rows are shuffled; a question has at
    most three of them.
    """
    repeated = [question for question in asked for _ in range(samples_per_question)]
    completions = sample_answers(model, tokenizer, repeated, seed, device)
    seen, rows, good = Counter(), [], []
    for index, question in enumerate(asked):
        own = completions[index * samples_per_question : (index + 1) * samples_per_question]
        rows += sampled_pairs(question, own, seen)
        good += [(question, text) for text, ended in own if flaw_of(question, text, ended) is None][:1]
    rng = random.Random(f"pairs {seed}")
    rows += mismatched_pairs(good, round(len(rows) * MISMATCHED_SHARE / (1 - MISMATCHED_SHARE)), rng)
    rng.shuffle(rows)
    return rows


def write_pairs(path: str | Path, rows: list[dict]) -> Path:
    """Write the pairs as UTF-8 JSON lines; returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8", newline="\n")
    return path
