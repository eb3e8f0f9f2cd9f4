"""The code of docs/environments.md runs, and both of its games are one."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch

import rlhf

BLOCKS = re.findall(r"```python\n(.*?)```", Path("docs/environments.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def names(start_model, tmp_path, monkeypatch):
    """The names that the blocks define, after the first two."""
    (tmp_path / "river.py").write_text(BLOCKS[0], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    made = functools.partial(rlhf.make_config, actor_model=str(start_model), learning_rate=1e-3)
    monkeypatch.setattr(rlhf, "make_config", made)
    found: dict = {}
    for block in BLOCKS[:2]:
        exec(block, found)
    return found


def test_the_class_and_the_loop_by_hand_are_one_game(names):
    assert len(BLOCKS[0].strip().splitlines()) <= 30
    trained = names["trainer"]
    assert trained.update == 2
    again = names["make_trainer"](names["config"], names["prompts"], environment=names["River"])
    again.step(again.play(names["prompts"][:2]))
    exec(BLOCKS[2], names)
    by_hand = names["trainer"]
    assert by_hand.update == 1 and "environment/turns" not in names["metrics"]
    pairs = zip(again.host.model.parameters(), by_hand.host.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_parts_of_an_agent_can_share_a_score(names):
    exec(BLOCKS[2], names)
    exec(BLOCKS[3], names)
    assert names["trainer"].update == 2
