"""Builds the missing parts of the demo: start model, preference pairs, reward model."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rlhf.checkpoints.model_folder import WEIGHTS_FILE
from rlhf.checkpoints.replacing import foreign_files
from rlhf.checkpoints.run_folder import read_status
from rlhf.demo import families, pairs, start_model, tasks
from rlhf.demo.tasks import Gold
from rlhf.models.load import load_tokenizer
from rlhf.rewards.reward_model import METRICS_FILE
from rlhf.rewards.training import show_record, train_reward_model
from rlhf.settings.fields import to_dict
from rlhf.settings.recipes import find_recipe
from rlhf.settings.reward_model import parse_reward_cli
from rlhf.settings.training import Config
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError
from rlhf.utils.files import write_json

FOLDER = Path("demo_parts")
QUESTIONS = 3_000
SAMPLES_PER_QUESTION = 6
SEED = 42  # of questions, completions and reward model, independent of the run's seed


def prepare_demo(screen: Screen, device: torch.device) -> None:
    """Build `demo_parts/` unless it exists. It is rebuilt if the code or the settings that made it change."""
    reward = parse_reward_cli(["--recipe", "demo", "--rm-overwrite"])
    stamp_file, stamp = FOLDER / "stamp.json", {"made_from": _fingerprint(reward)}
    record = _record_of(stamp_file, stamp)
    if record is not None:
        screen.say(f"demo parts: cached in {FOLDER}. Their reward model:")
        return show_record(record, screen)
    stamp_file.unlink(missing_ok=True)
    _clear_incomplete(FOLDER / "reward_model", screen)
    shutil.copytree(start_model.WEIGHTS, FOLDER / "start_model", dirs_exist_ok=True)
    make_pairs(screen, device)
    train_reward_model(reward, screen, device)
    write_json(stamp_file, stamp)


def _record_of(stamp_file: Path, stamp: dict) -> dict | None:
    """Return the reward model's record if all parts exist and were made with this code, otherwise None."""
    files = (FOLDER / "pairs.jsonl", FOLDER / "start_model" / WEIGHTS_FILE, FOLDER / "reward_model" / WEIGHTS_FILE)
    try:
        if json.loads(stamp_file.read_text(encoding="utf-8")) != stamp or not all(file.is_file() for file in files):
            return None
        return json.loads((FOLDER / "reward_model" / METRICS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _clear_incomplete(folder: Path, screen: Screen) -> None:
    """Remove an incomplete reward model, which a killed build of an older release can leave."""
    if not folder.is_dir() or read_status(folder) is not None:
        return
    others = foreign_files(folder)
    if others:
        raise UserError(
            f"unknown files in the folder of the demo's reward model ({', '.join(others[:3])}): {folder}. Move them "
            "elsewhere, or delete the folder"
        )
    shutil.rmtree(folder)
    screen.say(f"removed an incomplete reward model: {folder}")


def make_pairs(screen: Screen, device: torch.device) -> None:
    """Sample several completions per question from the start model and rank them into pairs by gold quality."""
    folder = FOLDER / "start_model"
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)
    asked = tasks.questions(QUESTIONS, SEED)
    screen.say(f"demo: sampling {SAMPLES_PER_QUESTION} completions for each of {len(asked):,} questions ...")
    rows = pairs.make_pairs(policy, load_tokenizer(str(folder)), asked, SAMPLES_PER_QUESTION, SEED, device)
    pairs.write_pairs(FOLDER / "pairs.jsonl", rows)
    screen.say(f"demo: {len(rows):,} preference pairs from {len({r['question'] for r in rows}):,} questions")


def _fingerprint(reward) -> str:
    """Return a hash of the generator's code, the start model, and the settings of pairs and reward model."""
    digest = hashlib.sha256(repr((to_dict(reward), QUESTIONS, SAMPLES_PER_QUESTION, SEED)).encode())
    for file in (families.__file__, tasks.__file__, pairs.__file__, start_model.WEIGHTS / "model.safetensors"):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def gold_of(config: Config) -> Gold | None:
    """Return the gold quality function if the run uses the demo's own prompts, otherwise None."""
    is_demo = config.recipe == "demo" and config.data.prompts == find_recipe("demo").value("prompts")
    return tasks.gold_quality if is_demo else None
