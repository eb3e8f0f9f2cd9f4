"""The demo's preference pairs: completions of the start model ranked by gold quality, and some mismatched ones."""

import random
from collections import Counter
from collections.abc import Callable

import torch

from rlhf.data.prompts import encode_prompts
from rlhf.data.row import Example
from rlhf.demo.tasks import flaw_of, gold_quality
from rlhf.rollout.sampler import Sampler
from rlhf.settings.training import SamplingSettings

SAMPLING = SamplingSettings(max_new_tokens=32, temperature=1.0)
CLEAR_DIFFERENCE = 0.25  # minimum difference in gold quality between chosen and rejected
SLOTS = 256  # completions sampled at a time: many, because the model is tiny
PER_REPORT = 4  # completions sampled between two progress lines, per slot
PER_QUESTION = 2  # pairs of sampled completions
MISMATCHED_SHARE = 0.15  # of the pairs; their rejected completion is a good answer to another question


def _row(question: str, chosen: str, rejected: str, ended: bool = True) -> dict:
    """Return one preference pair with the columns of `Intel/orca_dpo_pairs`, plus `flaw` and `rejected_ended`."""
    flaw = flaw_of(question, rejected, ended)
    columns = {"system": "", "question": question, "chosen": chosen, "rejected": rejected}
    return columns | {"flaw": flaw, "rejected_ended": ended}


def sampled_pairs(question: str, completions: list[tuple[str, bool]], seen: Counter) -> list[dict]:
    """Return pairs of one question's completions: the best one that ended against clearly worse ones, one per flaw.

    `seen` counts the flaws over all questions and is updated. Wrong answers come first because they are the hardest to
    distinguish, then the rarer flaws.
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
    for flaw in sorted(worse, key=lambda flaw: (flaw != "wrong", seen[flaw], flaw))[:PER_QUESTION]:
        seen[flaw] += 1
        rows.append(_row(question, best[1], *worse[flaw]))
    return rows


def mismatched_pairs(good: list[tuple[str, str]], count: int, rng: random.Random) -> list[dict]:
    """Return pairs in which the rejected completion is a good answer to another question, often of the same family.

    `good` contains (question, good completion). Each question is used at most once.
    """
    rows = []
    for question, chosen in rng.sample(good, len(good)):
        if len(rows) == count:
            break
        rejected = rng.choice(good)[1]
        if flaw_of(question, rejected) == "off_topic":
            rows.append(_row(question, chosen, rejected))
    return rows


def sample_answers(
    model,
    tokenizer,
    asked: list[str],
    repeats: int,
    seed: int,
    device: torch.device,
    report: Callable[[int, int], None] = lambda done, wanted: None,
) -> list[tuple[str, bool]]:
    """Sample `repeats` completions per question at temperature 1: (text, ended), one question after another.

    Samples questions of similar length together. `report` receives the numbers of completions sampled and wanted.
    """
    examples = [Example(messages=({"role": "user", "content": question},)) for question in asked]
    encoded = encode_prompts(tokenizer, examples, longest=model.config.max_position_embeddings)
    prompts = [prompt for prompt in encoded for _ in range(repeats)]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].ids))
    answers: list[tuple[str, bool]] = [("", False)] * len(prompts)
    sampler = Sampler.of(model, tokenizer, SAMPLING, device, slots=SLOTS)
    with sampler.same_weights():
        for start in range(0, len(order), PER_REPORT * SLOTS):
            rows = order[start : start + PER_REPORT * SLOTS]
            completions = sampler.sample([prompts[row] for row in rows], seed, 0, "demo pairs", rows)
            for row, text, ended in zip(rows, completions.texts(tokenizer), completions.ended.tolist(), strict=True):
                answers[row] = (text, ended)
            report(start + len(rows), len(order))
    return answers


def make_pairs(
    model,
    tokenizer,
    asked: list[str],
    samples_per_question: int,
    seed: int,
    device: torch.device,
    report: Callable[[int, int], None],
) -> list[dict]:
    """Return shuffled preference pairs: the model's completions ranked by gold quality, and mismatched ones.

    Each row has: system (""), question, chosen, rejected, flaw (of the rejected completion, `flaw_of`) and
    rejected_ended (False: the rejected completion reached the length limit). Chosen completions have always ended. A
    question has at most three rows.

    Args:
        model: the start model.
        tokenizer: its tokenizer.
        asked: the questions.
        samples_per_question: completions sampled per question.
        seed: seed of sampling, mismatching and shuffling.
        device: the model's device.
        report: as in `sample_answers`.
    """
    completions = sample_answers(model, tokenizer, asked, samples_per_question, seed, device, report)
    seen = Counter()
    rows = []
    good = []
    for index, question in enumerate(asked):
        own = completions[index * samples_per_question : (index + 1) * samples_per_question]
        rows += sampled_pairs(question, own, seen)
        good += [(question, text) for text, ended in own if flaw_of(question, text, ended) is None][:1]
    rng = random.Random(f"pairs {seed}")
    rows += mismatched_pairs(good, round(len(rows) * MISMATCHED_SHARE / (1 - MISMATCHED_SHARE)), rng)
    rng.shuffle(rows)
    return rows
