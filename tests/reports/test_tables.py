"""Tests of the tables of figures: cells worked out by hand, and the same cells on console, page and model card."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.reports.page import Page
from rlhf.reports.tables import FigureRow, before_and_after, figure_label, figure_text, rows_of_run, without_empty
from rlhf.run.summary import show_figures
from rlhf.utils.console import Screen

FIGURES = {
    "perplexity_before": 5.95, "perplexity_after": None, "eos_rate_before": 0.25, "eos_rate_after": 0.2,
    "eval/right_before": 0.5, "eval/right_after": 0.25, "eval/right_rise_interval": None,
    "score_before": -0.5, "score_after": 1.25, "score_rise_interval": [1.0, 2.5], "kl_after": 3.0,
}  # fmt: skip


def test_cells_of_a_run_are_worked_out_by_hand():
    """The score is first. Null in run.json is a number that is not finite."""
    table = before_and_after("", ["before", "after"], rows_of_run(FIGURES))
    assert table.columns == ["", "before", "after", "change (95% interval)"]
    assert table.rows == [
        ["score", "-0.500", "+1.250", "+1.750 (+1.000 to +2.500)"],
        ["right", "0.500", "0.250", "-0.250"],
        ["perplexity", "5.95", "not finite", "not finite"],
        ["ended with EOS", "25%", "20%", "-5%"],
    ]


def test_a_model_in_between_has_the_figures_that_it_recorded():
    rows = rows_of_run(FIGURES, {"score": 2.0, "perplexity": None, "kl": 1.0})
    table = before_and_after("", ["first", "best", "last"], rows)
    assert [row[2] for row in table.rows] == ["+2.000", "-", "not finite", "-"]
    assert table.rows[0][4] == "+1.750 (+1.000 to +2.500)", "from the first to the last"


def test_a_figure_that_one_model_lacks_has_no_change_and_an_empty_column_is_left_out():
    table = before_and_after(
        "", ["a", "b"], [FigureRow("kl", [None, 1.0]), FigureRow("judge/x", [None, 0.5])], ["y", "x"]
    )
    assert table.columns == ["", "b"] and table.rows == [["KL (nats/sequence)", "1.00"], ["judge x", "0.500"]]
    assert without_empty("c", ["", "one"], [["r", "-"]]) == ("c", [""], [["r"]])


@pytest.mark.parametrize(
    ("figure", "value", "sign", "text"),
    [
        ("score", -1e-17, "", "+0.000"),
        ("score", 0.0, "", "+0.000"),
        ("score", -0.0001, "", "-1.000e-04"),
        ("score", 1.234e-5, "", "+1.234e-05"),
        ("score", 0.0005, "", "+0.001"),
        ("judge/x", 1.234e-5, "+", "+1.234e-05"),
        ("eval/right", 1e-4, "", "1.000e-04"),
        ("perplexity", -0.004, "+", "+0.00"),
        ("kl", 0.001, "", "0.00"),
        ("length", 2.5, "+", "+2.5"),
        ("eos_rate", -0.125, "+", "-12%"),
        ("score", 0.5, "+", "+0.500"),
        ("score", -19_355_833.333, "", "-1.936e+07"),
        ("length", 123_456.0, "", "1.235e+05"),
        ("seconds", 200, "", "3:20"),
        ("perplexity", 1.465, "", "1.47"),
        ("perplexity", 1234567.0, "+", "+1.235e+06"),
        ("gold_after", 0.5, "", "0.500"),
        ("eval/right/pass_at_4_before", 0.5, "", "0.500"),
        ("kl", float("inf"), "", "not finite"),
        ("kl", None, "", "-"),
    ],
)
def test_formats(figure, value, sign, text):
    assert figure_text(figure, value, sign) == text


def test_labels():
    names = ("pass@2/exact", "variant/greedy", "eval/right", "length_before", "eval/right/pass_at_4_after")
    assert [figure_label(name) for name in names] == [
        "pass@2, exact", "greedy", "right", "completion length (tokens) before", "right/pass_at_4 after",
    ]  # fmt: skip


def test_console_and_page_have_the_same_cells(tmp_path, capsys):
    more = {"prompts": 4, "score_rise_in_start_sd": 1.5, "perplexity_text": "a text", "kl_unit": "nats/sequence",
            "kl_last_10_updates": 2.0, "kl_target": None, "kl_phases": []}  # fmt: skip
    show_figures(FIGURES | more, 2, Screen())
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    table = before_and_after("caption", ["before", "after"], rows_of_run(FIGURES))
    report = {"headline": "", "warnings": [], "notes": [], "prompts": [], "facts": {}}
    Page("table", "title", report, [table]).write(tmp_path)
    page = (tmp_path / "table.html").read_text(encoding="utf-8")
    for row in table.rows:
        assert " ".join(row) in printed
        name, *cells = row
        assert f"<td>{name}</td>" + "".join(f'<td class="n">{cell}</td>' for cell in cells) in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.html", "table.json"]


def test_warnings_and_notes_of_the_console_are_printed_once(capsys):
    """The page has all of them."""
    screen = Screen()
    screen.say("warning: from /a/b/model")
    screen.say("note: first")
    report = {"headline": "", "warnings": [*screen.warnings, "second"], "notes": [*screen.notes, "third"]}
    Page("page", "title", report, []).show(screen, Path("folder"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["warning: from /a/b/model", "note: first", "warning: second", "note: third"]
    assert len(lines) == 5
