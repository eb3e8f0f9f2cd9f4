"""Saves the completions of every evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf.callbacks.base import Callback
from rlhf.data.prompts import Prompt


class Samples(Callback):
    """Writes the completions of every evaluation to files."""

    def __init__(self, folder: Path, prompts: Sequence[Prompt]):
        self.folder, self.prompts = folder, prompts

    def on_evaluation(self, evaluation):
        evaluation.write(self.folder, self.prompts)
