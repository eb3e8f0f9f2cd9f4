"""Trains smollm2-sums with stock TRL's GRPOTrainer as in its documentation, with a callback that evaluates."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import psutil
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.constants import EPISODES, GOAL
from benchmarks.machine import busy, machine
from rlhf.checkpoints.gguf import gguf_record
from rlhf.checkpoints.model_folder import find_model
from rlhf.checkpoints.run_record import environment
from rlhf.demo.parts import question_files
from rlhf.rewards.eval_functions import last_number
from rlhf.utils.console import quiet_libraries
from rlhf.utils.system import resident_peak

# the recipe's; EVERY: updates between evaluations
K = 8
PASSES = 2
MINIBATCHES = 2
TOKENS = 24
EVERY = 6
Facts = dict[str, Any]  # the content of a JSON file
STEPS = PASSES * MINIBATCHES  # optimizer steps per update
SETTINGS = {
    "per_device_train_batch_size": EPISODES // MINIBATCHES,
    "steps_per_generation": MINIBATCHES,
    "num_generations": K,
    "num_iterations": PASSES,
    "max_completion_length": TOKENS,
    "temperature": 1.0,
    "learning_rate": 3e-5,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,  # as in the recipe; on, TRL's default, is slower and needs less memory
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
# what still differs: setting -> its values in this project's recipe and in stock TRL
DIFFERENCES = {
    "KL": ["in the reward, adaptive coefficient from 0.05, target 10/sequence", "none: beta 0, TRL's default"],
    "scale_rewards": ["none", "group"],
    "checkpoints": ["every 6 updates", "none"],
}


def measure(arguments: argparse.Namespace) -> Facts:
    """Train and return the content of the run's JSON file."""
    quiet_libraries()
    busy_before = busy()
    changes = {name: json.loads(value) for name, _, value in (change.partition("=") for change in arguments.set)}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        given = {"output_dir": folder, "seed": arguments.seed, "bf16": arguments.bf16}
        trainer, curve = build(arguments, **given, use_cpu=not torch.cuda.is_available(), **changes)
        trainer.train()
    return {
        **environment(),
        "machine": machine(trainer.accelerator.device.type),
        "start_model": {"name": arguments.model} | (gguf_record(trainer.model.name_or_path) or {}),
        "questions": len(curve.rows),
        "seed": arguments.seed,
        "settings": {"bf16": arguments.bf16, "minutes": arguments.minutes, **SETTINGS, **changes},
        "set": sorted(arguments.set),
        "differences": DIFFERENCES,
        "seconds": {
            "total": seconds(),
            "cpu": time.process_time(),
            "update_median": median(curve.updates),
            "busy_before_percent": busy_before,
        },
        "peak_memory_bytes": resident_peak(),
        "evaluations": curve.evaluations,
        "updates": curve.updates,
    }


def build(arguments: argparse.Namespace, **changes) -> tuple[GRPOTrainer, Curve]:
    model = find_model(arguments.model, "--model")
    rows = question_files("smollm2-sums")
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")  # generate continues the last position
    curve = Curve(tokenizer, rows["eval.jsonl"][: arguments.questions], arguments)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward_function(tokenizer.eos_token_id),
        args=GRPOConfig(**SETTINGS | changes),
        train_dataset=Dataset.from_list([{"prompt": chat(r), "answer": r["answer"]} for r in rows["train.jsonl"]]),
        processing_class=tokenizer,
        callbacks=[curve],
    )
    return trainer, curve


def chat(row: Facts) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["question"]}]


def reward_function(eos: int):
    """Return the recipe's checker as a reward function of TRL, which passes the ids of a completion up to its EOS."""

    def reward(completions, completion_ids, answer, **_) -> list[float | None]:
        return last_number(completions, answer, ended=[ids[-1] == eos for ids in completion_ids])

    return reward


class Curve(TrainerCallback):
    """Evaluates before training, every EVERY updates and at the end. Stops at the goal or at the time limit."""

    def __init__(self, tokenizer, rows: Sequence[Facts], arguments: argparse.Namespace):
        self.tokenizer = tokenizer
        self.rows = rows
        self.seed = arguments.seed
        self.minutes = arguments.minutes
        self.bf16 = arguments.bf16
        self.reward = reward_function(tokenizer.eos_token_id)
        # facts; seconds of each update
        self.evaluations = []
        self.updates = []

    def on_train_begin(self, args, state, control, model, **_):
        self.evaluate(model, update=0)

    def on_step_end(self, args, state, control, model, **_):
        if state.global_step % STEPS:
            return
        update = state.global_step // STEPS
        over = seconds() > 60 * self.minutes
        self.updates.append(seconds() - self.start)
        if over or update % EVERY == 0:
            self.evaluate(model, update)
        control.should_training_stop = over or self.evaluations[-1]["accuracy"] >= GOAL
        self.start = seconds()  # of the next update

    def evaluate(self, model, update: int) -> None:
        start = seconds()
        together = 256 if model.device.type == "cuda" else 32  # questions per call of generate
        groups = [self.rows[at : at + together] for at in range(0, len(self.rows), together)]
        with torch.random.fork_rng():  # the same random numbers each time; those of the training stay unchanged
            torch.manual_seed(self.seed)
            ids = [row for group in groups for row in self.sample(model, group)]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        accuracy = fmean(self.reward(texts, ids, [row["answer"] for row in self.rows]))
        self.start = now = seconds()
        found = {"update": update, "completions": update * EPISODES, "seconds": now, "accuracy": accuracy}
        self.evaluations.append(found | {"evaluation_seconds": now - start})
        print(f"update {update}: {accuracy:.1%} of the answers are right, {now / 60:.1f} minutes", flush=True)

    @torch.no_grad()
    def sample(self, model, rows: Sequence[Facts]) -> list[list[int]]:
        """Return the ids of one completion for each question, up to EOS, at temperature 1."""
        prompts = [chat(row) for row in rows]
        given = self.tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
        ).to(model.device)
        model.eval()
        with torch.autocast(model.device.type, torch.bfloat16, enabled=self.bf16):
            plain = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
            ids = model.generate(**given, **plain, max_new_tokens=TOKENS, pad_token_id=self.tokenizer.pad_token_id)
        model.train()
        rows = ids[:, given["input_ids"].shape[1] :].tolist()
        eos = self.tokenizer.eos_token_id
        return [row[: row.index(eos) + 1] if eos in row else row for row in rows]


def seconds() -> float:
    """Return the seconds since the start of the command."""
    return time.time() - psutil.Process().create_time()
