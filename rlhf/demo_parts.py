"""Builds what the demo recipe names and does not find: start model, preference pairs, reward model."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import torch

from config import parse_reward_cli
from reward_model.scorer import METRICS_FILE
from reward_model.training import show_record, train_reward_model
from rlhf import demo, demo_tasks
from rlhf.console import Screen
from rlhf.runlogs import write_json

FOLDER = Path("demo_parts")
QUESTIONS = 2_600
SAMPLES_PER_QUESTION = 6
SEED = 42  # of questions, samples and reward model: the same for every PPO seed


def prepare_demo(screen: Screen, device: torch.device) -> None:
    """Build `demo_parts/`, or say that it is there. It is built anew when the code or settings behind it change."""
    reward = parse_reward_cli(["--recipe", "demo", "--rm-overwrite"])
    stamp_file, stamp = FOLDER / "stamp.json", {"made_from": _fingerprint(reward)}
    if stamp_file.is_file() and json.loads(stamp_file.read_text(encoding="utf-8")) == stamp:
        screen.say(f"demo parts: cached in {FOLDER}")
        record = FOLDER / "reward_model" / METRICS_FILE
        show_record(json.loads(record.read_text(encoding="utf-8")), screen)
        return
    stamp_file.unlink(missing_ok=True)
    shutil.copytree(demo.start_model(), FOLDER / "start_model", dirs_exist_ok=True)
    make_pairs(screen, device)
    train_reward_model(reward, screen, device)
    write_json(stamp_file, stamp)


def make_pairs(screen: Screen, device: torch.device) -> None:
    """The start model answers each question several times; the gold quality ranks its replies into pairs."""
    model, tokenizer = demo.load_start_model(FOLDER / "start_model")
    asked = demo_tasks.questions(QUESTIONS, SEED)
    screen.say(f"demo: the start model answers {len(asked)} questions, {SAMPLES_PER_QUESTION} times each ...")
    rows = demo.make_pairs(model.to(device).eval(), tokenizer, asked, SAMPLES_PER_QUESTION, SEED)
    demo.write_pairs(FOLDER / "pairs.jsonl", rows)
    screen.say(f"demo: {len(rows)} preference pairs from {len({r['question'] for r in rows})} questions")


def _fingerprint(reward) -> str:
    """Changes with the generator, the start model, the pairs' settings and the reward model's."""
    digest = hashlib.sha256(repr((reward, QUESTIONS, SAMPLES_PER_QUESTION, SEED)).encode())
    for file in (demo.__file__, demo_tasks.__file__, demo.start_model() / "model.safetensors"):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()
