"""Tests that hostile model output in HTML pages, Markdown and console output is escaped and fully visible."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from rlhf.analysis.curves import read_curves
from rlhf.analysis.equal_budget import read_eval_points
from rlhf.analysis.evaluator import ModelEvaluator
from rlhf.analysis.models import find_models
from rlhf.analysis.verdict import START, Arm
from rlhf.checkpoints.run_folder import RunLock
from rlhf.checkpoints.token_record import read_tokens, recorded_updates, write_tokens
from rlhf.commands import compare, evaluate
from rlhf.reports import page as of_commands
from rlhf.reports.comparison_report import comparison_page, make_comparison
from rlhf.reports.evaluation_report import evaluation_page, make_report, show_prompts
from rlhf.reports.token_page import write_token_page
from rlhf.settings.evaluation import MeasureSettings
from rlhf.utils import files
from rlhf.utils.console import Screen
from rlhf.utils.errors import visible
from rlhf.utils.html import markdown_cell

HOSTILE = [
    "<script>alert(1)</script>",
    '<img src=x onerror="alert(1)">',
    "<a href=\"javascript:alert(1)\" onmouseover='x'>click</a>",
    "</script><script>alert(2)</script>",
    '{"a": "</script>"} <!-- --> ]]> {{ 7 * 7 }} {% raw %}',
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J",
    "abc \u202eevil\u202c \u2066x\u2069 \u200f\u200b\ufeff end",
    "| cell | `code` **bold** [link](javascript:alert(1)) ![i](http://x/y) https://evil.x @user www.evil.x",
]
CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200f\u202a-\u202e\u2066-\u2069\ufeff]")


class Page(HTMLParser):
    """Collects the tags, the text and the embedded data of an HTML page."""

    def __init__(self, file: Path):
        super().__init__()
        self.source = file.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.data = ""
        self._inside = ""
        self.feed(self.source)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.data += data
        elif not self._inside:
            self.text += data


def check_page_is_safe(page: Page) -> None:
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}], "only data, no executable script"
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        assert "href" not in attributes
        assert attributes.get("src", "data:image/png;").startswith("data:image/png;")
    assert not {tag for tag, _ in page.tags} & {"a", "iframe", "object", "embed", "link", "form", "base"}
    assert not CONTROL_CHARACTERS.search(page.source), "control and direction characters are escaped"
    assert "default-src 'none'" in page.source


def with_hostile_texts(results):
    """Return the results with hostile completions; the figures are unchanged."""
    rows, count = results.scores.shape
    texts = [[HOSTILE[(i * count + k) % len(HOSTILE)] for k in range(count)] for i in range(rows)]
    return dataclasses.replace(results, texts=texts)


@pytest.fixture(scope="module")
def evaluator(runs):
    names = [str(folder) for folder in runs.values()]
    settings = MeasureSettings(num_prompts=4, completions=2)
    models = find_models(names, settings, "RUN")
    made = ModelEvaluator(models, settings, torch.device("cpu"), Screen())
    made.examples = [
        dataclasses.replace(e, messages=({"role": "user", "content": text},))
        for e, text in zip(made.examples, HOSTILE[:4], strict=True)
    ]
    start = made.evaluate_start(Screen())
    return made, models, start, [made.evaluate(model, Screen()) for model in models]


def make_arms(models, measured, names) -> list[Arm]:
    """Return the arm of the PPO runs and that of the GRPO runs."""
    both = list(zip(models, measured, strict=True))
    of = [[pair for pair in both if pair[0].run.algorithm == algorithm] for algorithm in ("ppo", "grpo")]
    settings = {"use_lora": "false"}, {"use_lora": "true"}
    return [
        Arm(name, [results for _, results in pairs], [model for model, _ in pairs], differ)
        for name, pairs, differ in zip(names, of, settings, strict=True)
    ]


def test_evaluation_page_escapes_hostile_completions(evaluator, tmp_path, capsys):
    made, models, start, measured = evaluator
    start, *replies = [Arm(START, [with_hostile_texts(m)]) for m in (start, *measured)]
    arms = [dataclasses.replace(arm, name=str(i), models=[model])
            for i, (arm, model) in enumerate(zip(replies, models, strict=True))]  # fmt: skip
    arms[0] = dataclasses.replace(arms[0], name='<b onclick="x">run</b>\u202e')
    report = make_report(made, arms, start)
    made_page = evaluation_page(report, arms, start)
    made_page.write(tmp_path)
    page = Page(tmp_path / "evaluation.html")
    check_page_is_safe(page)
    assert json.loads(page.data) == json.loads((tmp_path / "evaluation.json").read_text()) == report
    for text in HOSTILE:
        assert visible(text) in page.text, "every character is visible"
    assert "<U+202E>evil" in page.text and "<U+001B>[31m" in page.text
    capsys.readouterr()
    show_prompts(report, Screen())
    made_page.show(Screen(), tmp_path)
    assert not CONTROL_CHARACTERS.search(capsys.readouterr().out), "no control characters reach the terminal"


def test_comparison_page_escapes_hostile_completions(evaluator, runs, tmp_path):
    made, models, start, measured = evaluator
    names = ('<b onclick="x">A</b>', "[B](javascript:alert(1)) | $x$")
    arms = make_arms(models, [with_hostile_texts(m) for m in measured], names)
    curves = [(names[run.algorithm == "grpo"], run) for run in map(read_curves, runs.values())]
    eval_points = {name: [read_eval_points(run) for of, run in curves if of == name] for name in names}
    start = Arm(START, [with_hostile_texts(start)])
    arms, report = make_comparison(made, arms, start, None, [], eval_points)
    comparison_page(report, start, arms, curves).write(tmp_path)
    page = Page(tmp_path / "comparison.html")
    check_page_is_safe(page)
    assert json.loads(page.data) == json.loads((tmp_path / "comparison.json").read_text()) == report


@pytest.mark.parametrize("name", ["comparison.html", "evaluation.html"])
def test_a_full_disk_leaves_all_files_of_the_report_before(evaluator, runs, tmp_path, monkeypatch, name):
    """The disk is full at one file of the second report. Its other files do not stand beside the first one's."""
    made, models, start, measured = evaluator
    arms = make_arms(models, measured, ("PPO", "GRPO"))
    singles = [Arm(model.label, [results], [model]) for model, results in zip(models, measured, strict=True)]
    start = Arm(START, [start])
    curves = [(run.algorithm.upper(), run) for run in map(read_curves, runs.values())]
    eval_points = {arm.name: [read_eval_points(run) for of, run in curves if of == arm.name] for arm in arms}

    def write() -> None:
        if name == "comparison.html":
            found, report = make_comparison(made, arms, start, None, [], eval_points)
            comparison_page(report, start, found, curves).write(tmp_path)
        else:
            report = make_report(made, singles, start) | {"second": True}
            evaluation_page(report, singles, start).write(tmp_path)

    write()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert name in before

    def write_text(file: Path, text: str) -> None:
        if file.name == name:
            raise OSError(28, "No space left on device", str(file))
        files.write_text(file, text)

    monkeypatch.setattr(of_commands, "write_text", write_text)
    with pytest.raises(OSError, match="No space left"):
        write()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(("module", "flag"), [(compare, ""), (evaluate, "--model-path")])
def test_a_second_report_into_one_folder_is_refused_before_models_load(
    runs, tmp_path, monkeypatch, user_error, module, flag
):
    """A chat writes nothing, so it may run at the same time."""
    monkeypatch.setattr(module, "import_libraries", lambda screen: pytest.fail("it would load the models"))
    words = [*flag.split(), str(runs["ppo", 1]), "--output", str(tmp_path / "reports")]
    command = compare.compare_command if module is compare else evaluate.evaluate_command
    (tmp_path / "reports").mkdir()
    with RunLock(tmp_path / "reports"), user_error("in use", "--output"):
        command(words)
    with pytest.raises(pytest.fail.Exception):
        command(words)


def test_comparison_page_of_three_algorithms(evaluator, runs, tmp_path, capsys):
    """An unregistered algorithm (a copy of a GRPO run) appears in every table, sentence and sample."""
    made, models, start, measured = evaluator
    ppo, grpo = make_arms(models, measured, ("PPO", "GRPO"))
    arms = [ppo, grpo, dataclasses.replace(grpo, name="TOY")]
    start = Arm(START, [start])
    curves = [(run.algorithm.upper(), run) for run in map(read_curves, runs.values())]
    curves[3] = ("TOY", curves[3][1])
    eval_points = {arm.name: [read_eval_points(run) for of, run in curves if of == arm.name] for arm in arms}
    arms, report = make_comparison(made, arms, start, None, [], eval_points)
    of_three = comparison_page(report, start, arms, curves)
    of_three.write(tmp_path)
    assert len(report["verdict"]) == 6 and len(report["notes"]) >= 3
    pairs = ["PPO - GRPO", "PPO - TOY", "GRPO - TOY"]
    assert [found["name"] for found in report["at_equal"][0]["differences"]] == pairs
    summary, _, differences, _ = of_three.blocks
    figures, contrasts, equal, cost, settings = of_three.folded
    assert [row[0] for row in summary.rows] == ["start model", "PPO", "GRPO", "TOY"]
    assert [row[0] for row in differences.rows][3:] == pairs
    assert settings.columns == ["", "PPO", "GRPO", "TOY"]
    assert ["use_lora", "false", "true", "true"] in settings.rows
    assert [column.split(" (")[0] for column in figures.columns[1:]] == ["start model", "PPO", "GRPO", "TOY"]
    assert cost.columns == ["", "PPO", "GRPO", "TOY"]
    kind = contrasts.columns.index("confidence interval")
    over = {row[0]: row[kind] for row in contrasts.rows}
    assert all(over[f"{pair}, score"] == "98.3% over seeds and prompts" for pair in pairs)
    assert (
        over["TOY - start model, score"] == "95% over seeds and prompts"
        and "difference (interval)" in contrasts.columns
    )
    assert [row[0] for row in equal.rows][:3] == [f"8 episodes: {pair}" for pair in pairs]
    assert {len(prompt["sides"]) for prompt in report["samples"]} == {4}
    page = Page(tmp_path / "comparison.html")
    assert "Comparison of PPO, GRPO and TOY" in page.text
    assert all(sentence in page.text for sentence in [report["headline"], *report["verdict"]])
    assert "3 pairs are compared" in page.text


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("a|b\nc", r"a\|b<br>c"),
        ("[x](y) *b* `c`", r"\[x\](y) \*b\* \`c\`"),
        ("<b>&", "&lt;b&gt;&amp;"),
        ("https://x.y @z WWW.a", "https:&#47;&#47;x.y &#64;z WWW&#46;a"),
        ("$x$ #12 :tada: a: b", r"\$x\$ \#12 \:tada: a: b"),
        ("+0.5 (it's)", "+0.5 (it's)"),
    ],
)
def test_markdown_cell_escapes_special_characters(text, cell):
    assert markdown_cell(text) == cell


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_token_page_escapes_hostile_tokens(runs, tmp_path):
    row = read_tokens(recorded_updates(runs["ppo", 1], "--tokens")[0])[0]
    rows = [{**row, "step": i, "token": text, "state": text, "prompt": text} for i, text in enumerate(HOSTILE)]
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text((runs["ppo", 1] / "run.json").read_text())
    assert read_tokens(write_tokens(run / "tokens", 1, rows)) == rows
    write_token_page(str(run), str(tmp_path / "out"), Screen())
    page = Page(tmp_path / "out" / "tokens.html")
    check_page_is_safe(page)
    assert json.loads(page.data) == json.loads((tmp_path / "out" / "tokens.json").read_text())
    assert json.loads(page.data)["rows"] == rows
    for text in HOSTILE:
        assert visible(text) in page.text
