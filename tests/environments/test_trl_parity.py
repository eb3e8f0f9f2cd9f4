"""An environment of TRL's `environment_factory` plays here as in TRL 1.12: the same calls, ids, masks and rewards."""

from __future__ import annotations

import pytest

from rlhf.utils.errors import RunError, UserError
from tests.environments.trl_parity import LONGEST, make_model, run_ours, run_trl


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


LOOK = call("look", '{"place": "box"}')
SCRIPT = [
    [
        [LOOK, "I have it."],
        [call("wait", '{"turns": 2}') + "\n" + LOOK, call("look", '{"place": "pit"}'), "It is dark."],
        [f"First. {LOOK[:-20]}</tool_call>"],  # malformed
        [call("look", '{"place": "far"}')],  # its result is longer than the limit
    ],
    [
        ["Nothing to do."],
        [call("fly", '{"to": "box"}'), "No."],  # an unknown tool
        ["x " + call("look", '{"where": "box"}'), LOOK, LOOK, "Enough."],  # an unknown argument
        [call("wait", "{}"), "Waited."],
    ],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("most", [None, 1])
def test_calls_ids_masks_and_rewards_are_those_of_trl(model, tmp_path, monkeypatch, most):
    theirs = run_trl(model, SCRIPT, most, tmp_path)
    ours = run_ours(model, SCRIPT, most, monkeypatch)
    assert len(theirs.ids) == 8 and len(theirs.instances) == len(ours.instances) == 4
    methods = {name for _, name, _ in theirs.calls}
    assert methods == {"reset", "look", "wait"}
    if most is None:
        assert any(0 in mask and mask[-1] == 1 for mask in theirs.masks)  # a result, and a turn after it
        assert max(map(len, theirs.ids)) <= LONGEST and set(theirs.masks[3]) == {1}  # rolled back
    # TRL awaits the async tools of one episode after the other, this project those of all episodes together
    assert sorted(ours.calls, key=lambda one: one[0]) == sorted(theirs.calls, key=lambda one: one[0])
    assert ours.prompts == theirs.prompts
    assert ours.ids == theirs.ids
    assert ours.masks == theirs.masks
    assert ours.completions == theirs.completions
    assert ours.rewards == theirs.rewards


def test_a_tools_result_never_becomes_a_special_token(model, monkeypatch):
    """Here this project differs from TRL, in which a result can end its own turn."""
    counts = []
    for turn in (call("look", '{"place": "end"}'), LOOK):
        record = run_ours(model, [[[f"{row} {turn}", "End."] for row in range(4)]], None, monkeypatch)
        counts.append([ids.count(ids[-1]) for ids in record.ids])
    assert counts[0] == counts[1] and record.ids[0][-1] == record.ids[0][record.masks[0].index(0) - 1]


class Undescribed:
    def reset(self, **row):
        return None

    def look(self, place):
        return place


class Pictures:
    def reset(self, **row):
        return None

    def look(self) -> list:
        """Look."""
        return [{"type": "image", "image": "x"}]


def test_a_tool_without_a_schema_is_refused_in_one_line(model, monkeypatch):
    monkeypatch.setattr("tests.environments.trl_parity.environment_of", lambda record: Undescribed)
    with pytest.raises(UserError) as raised:
        run_ours(model, SCRIPT, None, monkeypatch)
    (problem,) = raised.value.problems
    assert "look" in str(problem)


def test_images_end_the_run_in_one_line(model, monkeypatch):
    monkeypatch.setattr("tests.environments.trl_parity.environment_of", lambda record: Pictures)
    with pytest.raises(RunError) as raised:
        run_ours(model, [[[f"{row} {call('look', '{}')}", "End."] for row in range(4)]], None, monkeypatch)
    (problem,) = raised.value.problems
    assert "look" in str(problem) and "Pictures" in str(problem)
