"""Saves the completions of every evaluation, and those of updates whose reward functions log columns."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlhf.callbacks.base import Callback
from rlhf.data.prompts import Prompt


class Samples(Callback):
    """Writes the completions of every evaluation to files, and of every update in which a function calls log_extra.

    An update that is trained again after a resume replaces its file.
    """

    def __init__(self, folder: Path, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase):
        """`prompts` are the evaluation prompts, `tokenizer` the policy's."""
        self.folder, self.prompts, self.tokenizer = folder, prompts, tokenizer

    def on_batch(self, update, batch, scores):
        if not scores.extra:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        texts = batch.completions.texts(self.tokenizer)
        with (self.folder / f"rollout-{update:06d}.jsonl").open(
            "w", encoding="utf-8", errors="backslashreplace"
        ) as file:
            for i, (prompt, text, score) in enumerate(zip(batch.prompts, texts, scores.raw.tolist(), strict=True)):
                row = {"prompt": prompt.example.messages, "reply": text, "score": None if math.isnan(score) else score}
                row["extra"] = {name: values[i] for name, values in scores.extra.items()}
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")

    def on_evaluation(self, evaluation):
        evaluation.write(self.folder, self.prompts)
