"""The completions of every evaluation, as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf.callbacks.base import Callback
from rlhf.data.prompts import Prompt


class Samples(Callback):
    """Every evaluation's replies, as files."""

    def __init__(self, folder: Path, prompts: Sequence[Prompt]):
        self.folder, self.prompts = folder, prompts

    def on_evaluation(self, evaluation):
        evaluation.write(self.folder, self.prompts)
