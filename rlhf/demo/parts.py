"""Makes the missing parts of a demo: start model, and pairs with a reward model, or files of prompts."""

from __future__ import annotations

import shutil
import time
from functools import partial

import torch

from rlhf.checkpoints.model_folder import read_record
from rlhf.data.tokenizer import load_tokenizer
from rlhf.demo import checker_questions, crossing, pairs, ready, sums_questions, tasks
from rlhf.demo.crossing_start import train_start_model
from rlhf.demo.tasks import Gold
from rlhf.models.load import load_policy
from rlhf.rewards.calibration import show_record
from rlhf.rewards.training import train_reward_model
from rlhf.settings.recipes import find_recipe
from rlhf.settings.reward_model import parse_reward_cli
from rlhf.settings.training import Config
from rlhf.utils.console import Screen, clock
from rlhf.utils.files import atomic_write, numbered_name, write_json, write_jsonl
from rlhf.utils.system import replace, waiting_lock

Rows = list[dict[str, str]]


def prepare_parts(recipe: str, screen: Screen, device: torch.device) -> None:
    """Make the folder of a demo's parts unless it is complete. It is made again if the start model, or the code or the
    settings that made it, change."""
    parts = ready.parts_of_demo(recipe)
    if not parts.are_complete():  # complete parts are only read: they may belong to another user
        parts.folder.mkdir(exist_ok=True)
        with waiting_lock(parts.folder / ".lock"):  # runs may start at the same time
            if not parts.are_complete():
                return _make(parts, screen, device)
    screen.say(f"{recipe} parts: cached in {parts.folder}")
    if recipe == "demo":
        show_record(read_record(parts.folder / "reward_model"), screen)


def _make(parts: ready.DemoParts, screen: Screen, device: torch.device) -> None:
    """Make all parts, each file in one step, because a run may be reading the old one. The stamp comes last."""
    folder = parts.folder
    (folder / ready.STAMP_FILE).unlink(missing_ok=True)
    for file in parts.start_model_files:
        atomic_write(folder / "start_model" / file.name, partial(shutil.copyfile, file))
    if parts.recipe == "demo":
        if (older := folder / "reward_model").exists():
            replace(older, numbered_name(older))  # it may contain files of the user
        build_pairs(screen, device)
        train_reward_model(parse_reward_cli(["--recipe", "demo"]), screen, device)
    else:
        if parts.recipe == "demo-game":
            train_start_model(folder / "start_model", screen)
        for name, rows in question_files(parts.recipe).items():
            write_jsonl(folder / name, rows)
    write_json(folder / ready.STAMP_FILE, parts.stamp())
    screen.say(f"{parts.recipe}: wrote the parts to {folder}")


def question_files(recipe: str) -> dict[str, Rows]:
    """Return the rows of the files of demo-checker or smollm2-sums, which are question, answer and topic (family and
    level, or kind and size), or of demo-game, which are prompts."""
    if recipe == "demo-game":
        return {ready.GAMES_FILE: [{"prompt": text} for text in crossing.prompts(ready.GAMES)]}
    if recipe == "demo-checker":
        files = {ready.QUESTIONS_FILE: checker_questions.questions(ready.PER_CELL, ready.SEED)}
    else:
        files = {
            ready.SUMS_FILES[part]: sums_questions.questions(part, per_topic, ready.SEED)
            for part, per_topic in ready.SUMS_PER_TOPIC.items()
        }
    return {
        name: [{"question": one.text, "answer": str(one.answer), "topic": one.topic} for one in questions]
        for name, questions in files.items()
    }


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
    write_jsonl(ready.FOLDER / "pairs.jsonl", rows)
    screen.say(f"demo: {len(rows):,} preference pairs from {len({r['question'] for r in rows}):,} questions")


def gold_of(config: Config) -> Gold | None:
    """Return the gold quality function if the run uses the demo's own prompts, otherwise None."""
    return tasks.gold_quality if config.data.prompts == find_recipe("demo").training["prompts"][0] else None
