"""Calibrates a reward model: its scores get mean 0 and variance 1 over the start model's completions. Prints its
record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean, stdev

import torch

from rlhf.checkpoints.model_folder import find_model
from rlhf.data.prompts import encode_prompts
from rlhf.data.row import Example
from rlhf.data.splits import distinct_questions
from rlhf.data.tokenizer import context_of, load_config, load_tokenizer
from rlhf.models.load import load_policy
from rlhf.rewards.checks import accuracy_in, show_doubts
from rlhf.rewards.pair_accuracy import pair_accuracy, pairs_that_fit
from rlhf.rewards.reward_model import Calibration, RewardModel
from rlhf.rollout.sampler import Sampler
from rlhf.settings.reward_model import RewardModelConfig
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError
from rlhf.utils.rng import rng_for

SMALLEST_STD = 1e-3  # with a smaller standard deviation of the raw scores there is nothing to calibrate
Completion = tuple[tuple[dict[str, str], ...], str, bool]  # messages, text, True if it ended


def evaluate_and_calibrate(
    model: RewardModel, held_out: Sequence[Example], completions: Sequence[Completion], source: str
) -> dict:
    """Calibrate on `completions` (mean 0, variance 1), then evaluate on held-out pairs. Return the record to save."""
    raw = model.raw_scores([model.encode(*completion) for completion in completions])
    std = stdev(raw) if len(raw) > 1 else 0.0
    if std < SMALLEST_STD:
        std = 1.0  # all scores are equal; the accuracy will show it
    # detail 14: mean 0, standard deviation 1 (Ziegler et al. 2019, arXiv 1909.08593). Otherwise beta and the value
    # clip mean something else with each reward model.
    model.calibration = Calibration(fmean(raw), std)
    return {
        **pair_accuracy(model, held_out),
        "calibration": {"scale": asdict(model.calibration), "completions": len(raw), "source": source},
    }


def calibration_completions(
    examples: Sequence[Example], config: RewardModelConfig, device: torch.device, model: RewardModel
) -> tuple[list[Completion], str]:
    """Return completions to calibrate on, and their source as text.

    Samples the start model on prompts that fit the contexts of both models. Without a start model, returns the chosen
    completions of the pairs.
    """
    name = config.calibration.actor_model
    most = config.calibration.calibration_prompts
    dtype = model.dtype
    length = config.sampling.max_new_tokens
    # in a random order, which does not depend on their order
    distinct = sorted(distinct_questions(examples), key=lambda example: repr(example.messages))
    order = rng_for(config.training.rm_seed, 0, "calibration prompts").permutation(len(distinct))
    examples = [distinct[i] for i in order]
    if name is None:
        return [(e.messages, e.chosen, True) for e in pairs_that_fit(model, examples)[:most]], "chosen completions"
    folder = find_model(name, "--actor-model")
    tokenizer = load_tokenizer(folder, config.data.plain_prompts, kwargs=config.data.chat_template_kwargs)
    room = [n - length for n in (context_of(load_config(folder)), model.context) if n is not None]
    longest = min(config.calibration.calibration_prompt_length, *room)
    prompts = encode_prompts(tokenizer, examples, longest)
    if model.context is not None:
        prompts = [p for p in prompts if len(model.encode(p.example.messages, "")) + length <= model.context]
    if not prompts:
        raise UserError(
            f"no prompt of at most {longest} tokens to calibrate on",
            "--calibration-prompt-length",
            "Raise it, lower --max-new-tokens, or pass --actor-model none to calibrate on the chosen completions",
        )
    policy = load_policy(folder, device=device, vocabulary=len(tokenizer)).eval()
    sampler = Sampler.of(policy, tokenizer, config.sampling, device, dtype=dtype)
    written: list[Completion] = []
    with sampler.same_weights():
        for rows in sampler.calls(range(min(most, len(prompts)))):
            batch = [prompts[row] for row in rows]
            completions = sampler.sample(batch, config.training.rm_seed, 0, "calibrate", rows)
            texts = zip(batch, completions.texts(tokenizer), completions.ended.tolist(), strict=True)
            written += [(prompt.example.messages, text, ended) for prompt, text, ended in texts]
    return written, f"completions of {name}"


def show_record(record: dict, screen: Screen) -> None:
    """Print the accuracy next to the length baseline, and what it cannot show."""
    against = record["accuracy_against_baseline"]
    shown = "no pairs" if against is None else f"{against:.3f}"
    rows = [
        ("reward model", f"{accuracy_in(record)} (the better of 'longer wins' and 'shorter wins')"),
        ("against baseline", f"{shown} (on the pairs that the length baseline gets wrong)"),
        ("margin", f"{record['margin']:.2f} (mean of chosen - rejected, in score units)"),
        *((f"flaw {name}", f"{value:.3f}") for name, value in record["by_flaw"].items()),
        ("calibrated on", f"{record['calibration']['completions']} {record['calibration']['source']}"),
    ]
    screen.facts(rows)
    show_doubts(record, "the reward model", screen)
