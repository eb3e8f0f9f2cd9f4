"""Scores completions with a reward model: loading, the record of accuracy and calibration, batched scoring.

The input is text, rendered by the same function as in the reward model's training. The policy may therefore have a
different tokenizer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from rlhf.checkpoints.model_folder import find_model, how_to_train, read_record, reward_config_problem, text_in
from rlhf.checkpoints.weight_names import INCOMPLETE, LM_HEADS, check_loaded
from rlhf.data.chat_template import SOME_CHAT, encode_completion, encode_prompt, encode_whole
from rlhf.data.tokenizer import check_vocabulary, context_of, ids_of, load_config, load_tokenizer
from rlhf.models import llama
from rlhf.models.budget import budget_of
from rlhf.models.device import autocast
from rlhf.models.load import check_weights, disable_dropout, read_model
from rlhf.models.packing import PackedMicroBatch, on_device
from rlhf.models.reference import release_mmap, store_frozen_weights
from rlhf.models.reward_critic import backbone_of_classifier, score_head
from rlhf.rollout.completions import padded, token_batch
from rlhf.utils.errors import RunError, raise_if


@dataclass(frozen=True)
class Calibration:
    """Calibrated score = (raw score - mean) / std."""

    mean: float = 0.0
    std: float = 1.0


def _key(messages: Sequence[dict[str, str]]) -> tuple:
    return tuple(tuple(m.items()) for m in messages)


def equal_start(rows: Sequence[Sequence[int]]) -> int:
    """Return the number of ids with which all rows begin."""
    # in the order of lists, these two differ first
    first = min(rows)
    last = max(rows)
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def without_pad(row: Sequence[int], pad: int) -> Sequence[int]:
    """Return the ids up to the last one that is not `pad`; the first id if all are."""
    last = next((i for i in reversed(range(len(row))) if row[i] != pad), 0)
    return row[: last + 1]


def can_pack(classifier: PreTrainedModel) -> bool:
    """True if `packed_logits` computes the same as this classifier: one linear layer on the last token's state."""
    return score_head(classifier) is not None and llama.supports(backbone_of_classifier(classifier))


def packed_logits(
    classifier: PreTrainedModel, rows: Sequence[Sequence[int]], groups: Sequence[int], pad: int, device: torch.device
) -> torch.Tensor:
    """Return the logits (R, 1) of id sequences at their last tokens that are not `pad`, computed in one packed row.

    Sequences with the same number in `groups` share their first ids, which are computed once.
    """
    # transformers reads there, too: if pad is EOS, before EOS
    rows = [without_pad(row, pad) for row in rows]
    members: dict[int, list[int]] = {}
    for at, group in enumerate(groups):
        members.setdefault(group, []).append(at)
    shared = {group: max(1, equal_start([rows[at] for at in ats])) for group, ats in members.items()}
    prompts = [list(row[: shared[group]]) for row, group in zip(rows, groups, strict=True)]
    # a packed row leaves out the last token of each completion, here the pad token
    completions = [[*row[shared[group] :], pad] for row, group in zip(rows, groups, strict=True)]
    batch = token_batch(prompts, completions, pad, device)
    batch.groups = list(groups)
    micro_batch = PackedMicroBatch(batch, range(len(rows)))
    last = on_device(device, np.cumsum([len(c) for c in completions]) - 1)
    return score_head(classifier)(micro_batch.forward(backbone_of_classifier(classifier)).index_select(0, last))


class RewardModel:
    """A sequence classifier with one output. `score` returns calibrated scores; `record` is metrics.json or None.

    `text` is the form of what it reads, one of RM_TEXTS: that of its training. Without a record it is --rm-text, the
    argument `text` (None: "template").
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        dtype: torch.dtype | None = None,
        record: dict | None = None,
        text: str | None = None,
    ):
        self.model = model.eval().requires_grad_(False).to(device)
        self.tokenizer = tokenizer
        self.device = device
        self.dtype = dtype
        self.record = record
        self.model.config.use_cache = False  # the model does not generate
        store_frozen_weights(self.model, dtype)
        release_mmap(self.model)
        self.context = context_of(self.model.config)  # tokens; None: no limit
        self.budget = budget_of(device)  # that of a run follows from its settings
        self.calibration = Calibration(**(record or {}).get("calibration", {}).get("scale", {}))
        self.text = text_in(record) or text or "template"

    @classmethod
    def load(
        cls,
        name: str,
        device: torch.device,
        dtype: torch.dtype | None,
        flag: str = "--rm-model",
        text: str | None = None,
        date: str | None = None,
        kwargs: str | None = None,
    ) -> RewardModel:
        """Load a reward model from a folder or the hub. `flag` is for error messages, `text` is --rm-text; `date`,
        `kwargs`: as in `load_tokenizer`.

        Raises UserError if it does not exist or does not return one score per completion.
        """
        folder = find_model(name, flag)
        config = load_config(folder)
        architecture = (config.architectures or ["?"])[0]
        problem = reward_config_problem(architecture, config.num_labels, config.pad_token_id, f"{flag} {name}")
        raise_if([problem] if problem else [])
        disable_dropout(config)  # a critic that starts from it is in train mode
        tokenizer = load_tokenizer(folder, date=date, kwargs=kwargs)
        check_vocabulary(ids_of(tokenizer), config.get_text_config().vocab_size, name)
        model, found = read_model(AutoModelForSequenceClassification, folder, config=config)
        check_loaded(found, name, unused=LM_HEADS, fix=f"{INCOMPLETE}. {how_to_train()}")
        check_weights(model, name)
        return cls(model, tokenizer, device, dtype, read_record(Path(folder)), text)

    def encode(self, messages: Sequence[dict[str, str]], completion: str, ended: bool = True) -> list[int]:
        """Return the ids of a prompt with its completion, rendered as in the model's training."""
        # detail 13: the text is tokenized again (this project). The policy's ids may be other words in this tokenizer.
        if self.text == "template":
            return encode_whole(self.tokenizer, messages, completion, ended)
        return encode_prompt(self.tokenizer, messages) + encode_completion(self.tokenizer, completion, ended)

    @property
    def sees_end(self) -> bool:
        """True if the score of a completion depends on whether it ended."""
        pad = self.model.config.pad_token_id
        ended, cut_off = (without_pad(self.encode(SOME_CHAT, "yes", end), pad) for end in (True, False))
        return ended != cut_off

    @torch.no_grad()
    def raw_scores(self, sequences: Sequence[Sequence[int]], groups: Sequence[Hashable] | None = None) -> list[float]:
        """Return uncalibrated scores of id sequences, in the given order. Batches by length; padding changes no score.

        Sequences of one group share a prompt, which is then computed once; None: no two do.

        Raises RunError if a sequence exceeds the model's context: its score would be wrong, or the GPU would fail.
        """
        too_long = [len(s) for s in sequences if self.context is not None and len(s) > self.context]
        if too_long:
            raise RunError(
                f"{len(too_long)} of {len(sequences)} prompts with their completions are longer than the reward "
                f"model's context of {self.context} tokens (longest: {max(too_long)})",
                "scoring",
                "Use a smaller --prompt-length or --max-new-tokens, or a reward model with a larger context",
            )
        scores = [0.0] * len(sequences)
        groups = range(len(sequences)) if groups is None else groups
        longest: dict[Hashable, int] = {}
        for group, sequence in zip(groups, sequences, strict=True):
            longest[group] = max(len(sequence), longest.get(group, 0))
        numbers = {group: number for number, group in enumerate(longest)}
        order = sorted(range(len(sequences)), key=lambda i: (longest[groups[i]], numbers[groups[i]]))
        size = self.budget.scored_together(max(map(len, sequences), default=1))
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            with autocast(self.device, self.dtype):
                logits = self._logits([sequences[i] for i in rows], [numbers[groups[i]] for i in rows])
            for i, value in zip(rows, logits[:, 0].float().tolist(), strict=True):
                scores[i] = value
        return scores

    def _logits(self, rows: Sequence[Sequence[int]], groups: Sequence[int]) -> torch.Tensor:
        """Return the outputs of the score head for id sequences, (R, 1)."""
        pad = self.model.config.pad_token_id
        if can_pack(self.model):
            return packed_logits(self.model, rows, groups, pad, self.device)
        attention = padded([[1] * len(row) for row in rows], 0, self.device)
        return self.model(input_ids=padded(rows, pad, self.device), attention_mask=attention).logits

    def score(
        self, messages: Sequence[Sequence[dict[str, str]]], completions: Sequence[str], ended: Sequence[bool]
    ) -> list[float]:
        """Return calibrated scores, one per completion. On the start model's completions: about mean 0, variance 1."""
        sequences = [self.encode(m, r, e) for m, r, e in zip(messages, completions, ended, strict=True)]
        raw = self.raw_scores(sequences, [_key(m) for m in messages])
        return [(score - self.calibration.mean) / self.calibration.std for score in raw]
