"""Compares the tensors of prompts and completions of different lengths with values written down by hand."""

from __future__ import annotations

import torch

from rlhf.rollout.completions import token_batch

PAD = 0


def test_prompts_are_padded_on_the_left_and_completions_on_the_right():
    batch = token_batch([[5], [6, 7, 8]], [[1, 2], [3]], PAD, torch.device("cpu"))
    assert batch.prompt_ids.tolist() == [[0, 0, 5], [6, 7, 8]]
    assert batch.prompt_mask.tolist() == [[False, False, True], [True, True, True]]
    assert batch.completion_ids.tolist() == [[1, 2], [3, 0]]
    assert batch.mask.tolist() == [[True, True], [True, False]]
    assert (batch.prompt_lengths, batch.completion_lengths, batch.groups) == ([1, 3], [2, 1], [0, 1])
