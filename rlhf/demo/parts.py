"""Builds the missing parts of the demo: start model, preference pairs, reward model."""

from __future__ import annotations

import json
import shutil
import time
from functools import partial

import torch

from rlhf.data.tokenizer import load_tokenizer
from rlhf.demo import pairs, ready, tasks
from rlhf.demo.tasks import Gold
from rlhf.models.load import load_policy
from rlhf.rewards.calibration import show_record
from rlhf.rewards.training import train_reward_model
from rlhf.settings.recipes import find_recipe
from rlhf.settings.reward_model import parse_reward_cli
from rlhf.settings.training import Config
from rlhf.utils.console import Screen, clock
from rlhf.utils.files import atomic_write, numbered_name, write_json, write_text
from rlhf.utils.system import replace, waiting_lock


def prepare_demo(screen: Screen, device: torch.device) -> None:
    """Build `demo_parts/` unless it exists. It is rebuilt if the code or the settings that made it change."""
    record = ready.record_of_demo()
    if record is None:  # complete parts are only read: they may belong to another user
        ready.FOLDER.mkdir(exist_ok=True)
        with waiting_lock(ready.FOLDER / ".lock"):  # runs may start at the same time
            record = ready.record_of_demo()
            if record is None:
                return _build_demo(screen, device)
    screen.say(f"demo parts: cached in {ready.FOLDER}. Their reward model:")
    show_record(record, screen)


def _build_demo(screen: Screen, device: torch.device) -> None:
    stamp_file = ready.FOLDER / ready.STAMP_FILE
    stamp_file.unlink(missing_ok=True)
    for file in ready.WEIGHTS.iterdir():
        atomic_write(ready.FOLDER / "start_model" / file.name, partial(shutil.copyfile, file))
    if (older := ready.FOLDER / "reward_model").exists():
        replace(older, numbered_name(older))  # it may contain files of the user
    build_pairs(screen, device)
    train_reward_model(parse_reward_cli(["--recipe", "demo"]), screen, device)
    write_json(stamp_file, ready.demo_stamp())


def build_pairs(screen: Screen, device: torch.device) -> None:
    """Sample several completions per question from the start model and rank them into pairs by gold quality."""
    folder = ready.FOLDER / "start_model"
    policy = load_policy(str(folder), device=device, vocabulary=0)
    asked = tasks.questions(ready.QUESTIONS, ready.SEED)
    screen.say(f"demo: sampling {ready.SAMPLES_PER_QUESTION} completions for each of {ready.QUESTIONS:,} questions")
    started = time.monotonic()

    def report(done: int, wanted: int) -> None:
        left = (time.monotonic() - started) / done * (wanted - done)
        screen.progress(f"sampled {done:,} of {wanted:,} completions | {clock(left)} left", last=done == wanted)

    wanted = (ready.SAMPLES_PER_QUESTION, ready.SEED, device)
    rows = pairs.make_pairs(policy, load_tokenizer(str(folder)), asked, *wanted, report)
    write_text(ready.FOLDER / "pairs.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    screen.say(f"demo: {len(rows):,} preference pairs from {len({r['question'] for r in rows}):,} questions")


def gold_of(config: Config) -> Gold | None:
    """Return the gold quality function if the run uses the demo's own prompts, otherwise None."""
    is_demo = config.recipe == "demo" and config.data.prompts == find_recipe("demo").training["prompts"][0]
    return tasks.gold_quality if is_demo else None
