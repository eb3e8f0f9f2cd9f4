"""Calibrate a reward model: its scores get mean 0 and variance 1 over the start model's completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean, stdev

import torch

from rlhf.data.examples import Example
from rlhf.data.prompts import encode_prompts
from rlhf.models.budget import budget_of
from rlhf.models.device import autocast
from rlhf.models.load import context_of, find_model, load_config, load_policy, load_tokenizer
from rlhf.rewards.pair_accuracy import pair_accuracy, pairs_that_fit
from rlhf.rewards.reward_model import Calibration, RewardModel
from rlhf.rollout.engine import sample_completions
from rlhf.rollout.sampling import uniform_noise
from rlhf.settings.reward_model import RewardModelConfig
from rlhf.utils.errors import UserError

SMALLEST_STD = 1e-3  # raw scores that spread less than this are one score: nothing to calibrate
Completion = tuple[tuple[dict[str, str], ...], str, bool]  # messages, text, whether it ended


def evaluate_and_calibrate(
    model: RewardModel, held_out: Sequence[Example], completions: Sequence[Completion], source: str
) -> dict:
    """Scale the scores to mean 0, variance 1 on `completions`, then measure; the record to save."""
    raw = model.raw_scores([model.encode(*completion) for completion in completions])
    std = stdev(raw) if len(raw) > 1 else 0.0
    if std < SMALLEST_STD:
        std = 1.0  # a model that says the same of everything: accuracy will show it
    model.calibration = Calibration(fmean(raw), std)
    return {
        **asdict(pair_accuracy(model, held_out)),
        "calibration": {"scale": asdict(model.calibration), "replies": len(raw), "source": source},
    }


def calibration_completions(
    examples: Sequence[Example], config: RewardModelConfig, device: torch.device, model: RewardModel
) -> tuple[list[Completion], str]:
    """The start model's completions of some prompts that fit the contexts of both models, or the chosen ones if there
    is no start model; and which."""
    name, most = config.calibration.actor_model, config.calibration.calibration_prompts
    dtype, length = model.dtype, config.sampling.max_new_tokens
    if name is None:
        return [(e.messages, e.chosen, True) for e in pairs_that_fit(model, examples, None)[:most]], "chosen replies"
    folder = find_model(name, "--actor-model")
    tokenizer = load_tokenizer(folder, config.data.plain_prompts)
    room = [n - length for n in (context_of(load_config(folder)), model.context) if n is not None]
    longest = min(config.calibration.calibration_prompt_length, *room)
    prompts, _ = encode_prompts(tokenizer, examples, longest)
    if model.context is not None:
        prompts = [p for p in prompts if len(model.encode(p.example.messages, "")) + length <= model.context]
    if not prompts:
        raise UserError(
            f"no prompt to calibrate on, of at most {longest} tokens: --calibration-prompt-length. Raise it, use a "
            "smaller --max-new-tokens, or --actor-model none to calibrate on chosen replies"
        )
    policy = load_policy(folder, device=device, vocabulary=len(tokenizer)).eval()
    tokens = {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    written: list[Completion] = []
    size = budget_of(device).eval_batch_size
    for start in range(0, min(most, len(prompts)), size):
        batch = prompts[start : min(start + size, most)]
        rows = range(start, start + len(batch))
        noise = uniform_noise(config.training.rm_seed, 0, "calibrate", rows, config.sampling.max_new_tokens)
        with autocast(device, dtype):
            completions = sample_completions(policy, batch, noise, config.sampling, **tokens, device=device)
        texts = zip(batch, completions.texts(tokenizer), completions.ended.tolist(), strict=True)
        written += [(prompt.example.messages, text, ended) for prompt, text, ended in texts]
    return written, f"replies of {name}"
