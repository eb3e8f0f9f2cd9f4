"""Probes the start model and trained models of real_smollm2.py on equal questions, and lets them answer problems that
people wrote. Writes one JSON file per model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.constants import KINDS
from benchmarks.machine import machine
from rlhf.analysis.loading import load_model_ref
from rlhf.analysis.models import find_model_ref, find_start, in_4_bit
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import config_of_run
from rlhf.data.examples import load_examples
from rlhf.data.prompts import Prompt, encode_prompts, load_prompts
from rlhf.data.row import Example
from rlhf.data.tokenizer import load_tokenizer
from rlhf.models.device import autocast_dtype, start_device
from rlhf.rewards.build import make_rewards
from rlhf.rewards.find import find_rewards
from rlhf.rollout.sampler import Sampler
from rlhf.settings.evaluation import MeasureSettings
from rlhf.settings.training import SamplingSettings
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError
from rlhf.utils.files import write_json
from rlhf.utils.statistics import mean_pass_at_k, over_prompts

QUESTIONS = 64
LONG = 128
ATTEMPTS = 8
EXAMPLES = 4
PROBLEMS = 300
START = "start"


def probe_models(names: Sequence[str], runs: Path, results: Path, screen: Screen) -> None:
    """Probe the start model and the final models of the named runs. A model with a JSON file is skipped."""
    names = list(names) or ["grpo_42"]
    for name, run in [(START, names[0]), *((name, name) for name in names)]:
        file = results / f"probe_{name}.json"
        if file.is_file():
            screen.say(f"already probed: {file}")
        else:
            write_json(file, Probe(runs / run, name == START, screen).facts())
            screen.say(f"finished: {file}")


def answer_human(problems: Path, runs: Path, results: Path, screen: Screen) -> None:
    """Let the final models of all finished runs answer the first 300 rows of a file, with a prompt and an `answer`
    each, and the start model once per seed, with the random numbers of the runs with this seed. A model with a JSON
    file is skipped."""
    names = [
        f.stem for f in sorted(results.glob("*.json")) if f.stem.split("_")[0] in KINDS and (runs / f.stem).is_dir()
    ]
    if not names:
        raise UserError("no run folders of finished runs", f"--runs {runs}", "Train first")
    starts = {f"{START}_{name.rpartition('_')[2]}": name for name in names}
    for name, run in {**starts, **{name: name for name in names}}.items():
        file = results / f"human_{name}.json"
        if file.is_file():
            screen.say(f"already answered: {file}")
            continue
        probe = Probe(runs / run, name in starts, screen)
        examples = load_examples(str(problems))[:PROBLEMS]
        probe.questions = encode_prompts(probe.tokenizer, examples, probe.tokenizer.model_max_length)
        short = probe.config.sampling.max_new_tokens
        cells = {way: probe.cell(probe.questions, short, greedy=way == "greedy") for way in ("sampled", "greedy")}
        write_json(file, {**probe.facts_of_model(), "file": problems.name, "cells": cells})
        screen.say(f"finished: {file}")


class Probe:
    """A model, and the evaluation questions of its run. The precision is that of the run."""

    def __init__(self, folder: Path, start: bool, screen: Screen):
        """`start` selects the start model of the run instead of its final model."""
        self.run = RunRecord.require(folder, "--probe")
        self.start = start
        self.screen = screen
        rule = self.run.flat_settings["reward_func"][0]
        self.config = config_of_run(self.run, reward_func=(rule,), reward_weights=None, eval_func=())
        self.device = start_device(screen)
        self.dtype = autocast_dtype(self.config.model.bf16, self.device)
        model = find_model_ref(str(folder), "final", None, "--probe")
        model = find_start(self.config, [model], MeasureSettings()) if start else model
        self.tokenizer = load_tokenizer(model.source, self.config.data.plain_prompts)
        policy = load_model_ref(model, self.tokenizer, in_4_bit(model), self.dtype, self.device)
        usual = SamplingSettings(max_new_tokens=LONG)
        self.sampler = Sampler.of(policy, self.tokenizer, usual, self.device, dtype=self.dtype)
        sets = load_prompts(self.config.data, self.tokenizer, screen.say)
        self.questions = sets.evaluation[:QUESTIONS]
        self.training = sets.train
        self.rewards, _ = make_rewards(self.config, find_rewards(self.config), self.tokenizer, self.device)

    def facts(self) -> dict[str, Any]:
        """Return the content of the JSON file: one cell per way of sampling."""
        short = self.config.sampling.max_new_tokens
        chats = self.questions
        cells = {
            "sampled": self.cell(chats, short, attempts=ATTEMPTS),
            "greedy": self.cell(chats, short, greedy=True),
            "sampled_long": self.cell(chats, LONG),
            "greedy_long": self.cell(chats, LONG, greedy=True),
        }
        if self.start:
            chats = with_examples(self.questions, self.training, self.tokenizer)
            cells["examples_sampled"] = self.cell(chats, short, attempts=ATTEMPTS)
            cells["examples_greedy"] = self.cell(chats, short, greedy=True)
        return {**self.facts_of_model(), "cells": cells}

    def facts_of_model(self) -> dict[str, Any]:
        return {
            "model": START if self.start else "final",
            "algorithm": self.run.algorithm,
            "seed": self.run.seed,
            "questions": len(self.questions),
            "bf16": self.dtype is torch.bfloat16,
            "machine": machine(self.device.type),
        }

    def cell(self, prompts: Sequence[Prompt], length: int, attempts: int = 1, greedy: bool = False) -> dict[str, Any]:
        """Return accuracy with its 95% interval over questions, length, share of cut-off completions, and pass@k.

        The random numbers of a question are the same in all cells, so a shorter completion is the beginning of the
        longer one. Greedy decoding is top-k sampling with k = 1.

        Args:
            prompts: one per question.
            length: largest length of a completion, in tokens.
            attempts: completions per question.
            greedy: take the most likely token.
        """
        sampling = SamplingSettings(max_new_tokens=length, temperature=1.0, top_k=1 if greedy else 0)
        rows = [
            (attempt * len(prompts) + i, prompt) for i, prompt in enumerate(prompts) for attempt in range(attempts)
        ]
        texts = []
        ids = []
        ended = []
        for call in self.sampler.calls(rows, sampling):
            episodes, part = zip(*call, strict=True)
            found = self.sampler.sample(part, self.run.seed, 0, "generations", episodes, sampling=sampling)
            texts = texts + found.texts(self.tokenizer)
            ids = ids + found.rows()
            ended = ended + found.ended.tolist()
            self.screen.progress(f"{len(ids)} of {len(rows)} completions", last=len(ids) == len(rows))
        scores = self.rewards.score([prompt for _, prompt in rows], texts, ids, ended).total
        right = np.array([score or 0.0 for score in scores]).reshape(len(prompts), attempts)
        found = over_prompts(right.mean(1), self.run.seed, limits=(0.0, 1.0))
        passed = mean_pass_at_k(right, attempts)
        return {
            "tokens": length,
            "attempts": attempts,
            "accuracy": found.value,
            "low": found.low,
            "high": found.high,
            **({f"pass_at_{attempts}": passed[attempts]} if attempts > 1 else {}),
            "length": float(np.mean([len(row) for row in ids])),
            "cut_off": 1 - float(np.mean(ended)),
            "right": digits(right.sum(1)),
        }


def with_examples(questions: Sequence[Prompt], training: Sequence[Prompt], tokenizer) -> list[Prompt]:
    """Return the questions after four training questions with their answers, as earlier turns of the chat.

    The examples are the first training question of each of four topics, or the first four without topics.
    """
    by_topic: dict[Any, Example] = {}
    for number, prompt in enumerate(training):
        by_topic.setdefault(prompt.example.topic or number, prompt.example)
    shots = []
    for example in list(by_topic.values())[:EXAMPLES]:
        shots += [example.messages[-1], {"role": "assistant", "content": str(example.columns["answer"])}]
    chats = [
        replace(p.example, messages=(*p.example.messages[:-1], *shots, p.example.messages[-1])) for p in questions
    ]
    prompts = encode_prompts(tokenizer, chats, tokenizer.model_max_length)
    return prompts


def digits(values) -> str:
    """Return one digit per question: how many of its completions are right."""
    return "".join(str(round(value)) for value in values)
