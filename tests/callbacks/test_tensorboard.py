"""Tests what TensorBoard shows: the samples of every evaluation, and the sessions of a resumed run in order."""

from __future__ import annotations

import re
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as ServerAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from rlhf.analysis.curves import read_scalars
from rlhf.callbacks.logging import TensorBoardLog
from rlhf.callbacks.samples import LONGEST_CELL, markdown, table_text
from tests.analysis.test_curves import at_update


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Return a function that returns the events that a trainer logs in a short run."""

    def read(trainer) -> EventAccumulator:
        logs = tmp_path_factory.mktemp("logs")
        trainer.add_callback(TensorBoardLog(logs, time.monotonic))
        trainer.train()
        return EventAccumulator(str(logs), size_guidance={"scalars": 0, "tensors": 0}).Reload()

    return read


def text_of(events: EventAccumulator, name: str) -> dict[int, str]:
    return {e.step: e.tensor_proto.string_val[0].decode() for e in events.Tensors(f"{name}/text_summary")}


def test_the_same_samples_of_every_evaluation_are_text(build, shown):
    trainer = build("--num-iterations", 2, "--eval-every", 1)
    events = shown(trainer)
    samples = text_of(events, "samples")
    assert list(samples) == [0, 1, 2]
    rows = {update: text.splitlines()[2:] for update, text in samples.items()}
    assert all(len(found) == 5 for found in rows.values()), "5 of 6 prompts"
    prompts = [[row.split(" | ")[0] for row in found] for found in rows.values()]
    assert prompts[0] == prompts[1] == prompts[2]
    asked = {markdown(p.example.messages[-1]["content"]) for p in trainer.evaluation_prompts}
    assert {prompt.removeprefix("| ") for prompt in prompts[0]} <= asked


CLOCKS = {"forward": [1000, 2000, 3000], "back": [3000, 2000, 1000], "equal": [10, 10, 10], "mixed": [9, 2000, 10]}


@pytest.mark.parametrize("clock", CLOCKS.values(), ids=CLOCKS)
def test_a_resumed_run_is_shown_in_order_without_interrupted_updates(tmp_path, monkeypatch, clock):
    """Three sessions: updates 1 to 5, 4 to 12 and 11 to 13. Each was interrupted two updates after its checkpoint."""
    logs = tmp_path / "logs"
    for number, (begin, end) in enumerate([(1, 5), (4, 12), (11, 13)]):
        monkeypatch.setattr(time, "time", lambda number=number: float(clock[number]))
        writer = TensorBoardLog(logs, time.time)
        writer.on_train_begin(at_update(begin - 1))
        for update in range(begin, end + 1):
            writer.on_update_end(update, {"loss": 100.0 * number + update})
            if update in (5, 12):
                writer.on_update_end(update, {"eval/score": float(number)})
        writer.close()
    session = [0] * 3 + [1] * 7 + [2] * 3
    expected = [(update, 100 * session[update - 1] + update) for update in range(1, 14)]
    shown = EventAccumulator(str(logs)).Reload()  # the reader that programs use
    assert [(event.step, event.value) for event in shown.Scalars("loss")] == expected
    assert [(event.step, event.value) for event in shown.Scalars("eval/score")] == [(5, 1), (12, 2)]
    served = ServerAccumulator(str(logs)).Reload()  # the reader of `tensorboard --logdir`
    assert [event.step for event in served.Tensors("loss")] == list(range(1, 14))
    assert [event.step for event in served.Tensors("eval/score")] == [5, 12]
    curves, remarks = read_scalars(logs)
    assert list(zip(curves["loss"].updates, curves["loss"].values, strict=True)) == expected
    assert remarks == []


@pytest.mark.parametrize(
    "text",
    [
        "a | b",
        "**bold** _it_ `code`",
        "# no title",
        "<script>x</script> & <b>",
        "[a](b) ![c](d)",
        "1\\2 \\* back",
        "~x~",
    ],
)
def test_markdown_shows_the_text_as_it_is(text):
    html = markdown_to_safe_html(table_text(["completion"], [[text]]))
    (cell,) = re.findall(r"<td>(.*)</td>", html)
    assert not re.search("<(?!br)", cell)
    unescaped = cell.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    assert unescaped == text


def test_markdown_keeps_line_breaks_and_cuts_long_texts():
    assert markdown("one\ntwo") == "one<br>two"
    assert len(markdown("x" * 5_000)) == LONGEST_CELL + len(" ...")
    assert markdown("a \ud83d b") == "a \\\\ud83d b", "lone surrogates cannot be written"
