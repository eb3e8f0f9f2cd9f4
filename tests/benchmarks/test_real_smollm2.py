"""Tests of the benchmark that trains SmolLM2: the documented results are those of the files."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.constants import TIMES
from benchmarks.real_smollm2 import facts_of_run, first_updates
from benchmarks.real_smollm2_report import draw, tables
from tests.scripts.test_scripts import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "real_smollm2"
RESULTS_OF_GPU = RESULTS.with_name("real_smollm2_h200")
LOG = ROOT / "benchmarks" / "experiment_log.md"


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_documented_results_of_smollm2_are_those_of_the_files(tmp_path):
    """Accuracies, rises with intervals, and KL of seed 42 in the log; the gain of the probe in docs/results.md."""
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    log = LOG.read_text(encoding="utf-8").partition("### smollm2-sums on two CPU cores")[2].partition("seed 42")[2]
    made = tables(RESULTS)
    for name in ("PPO", "GRPO", "RLOO", "control: GRPO, shuffled scores"):
        _, before, after, rise, above_control, _, kl, lengths = cells(re.search(rf"^\| {name} \|.*$", log, re.M)[0])
        found = cells(re.search(rf"^\| {name} \| 42 \| [^m]*$", made, re.M)[0])
        assert [before, after, rise, above_control] == [f"{found[2]}%", f"{found[3]}%", *found[4:6]]
        assert [kl, lengths] == [found[6], f"{found[7]} -> {found[8]}"]
    sampled = re.search(r"^\| grpo_42 \| sampled \| .* of the gain.*$", made, re.M)[0]
    assert re.findall(r"(\d+)% of the gain", sampled) == ["3", "29", "68"]
    assert "3% is brevity and format, 29% is sharpening, and 68% is ability" in " ".join(page.split())
    gpu = tables(RESULTS_OF_GPU)
    for name in ("PPO", "GRPO", "RLOO"):
        sampled = re.search(rf"^\| {name.lower()}_42 \| sampled \| .* of the gain.*$", gpu, re.M)[0]
        gain, *parts = re.findall(r"\+([\d.]+) \(", sampled)
        shares = re.findall(r"(\d+)% of the gain", sampled)
        row = [name, gain, *(f"{part} ({share}%)" for part, share in zip(parts, shares, strict=True))]
        assert f"| {' | '.join(row)} |" in page
    draw(RESULTS, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("results", "page"),
    [(RESULTS, LOG), (RESULTS_OF_GPU, ROOT / "docs" / "results.md")],
    ids=lambda path: path.name,
)
def test_a_page_has_the_table_over_seeds(results, page):
    table = tables(results).split("\n\n")[1]
    assert len(table.splitlines()) == 6 and table in page.read_text(encoding="utf-8")


def test_times_of_a_whole_run_are_in_the_table(tmp_path):
    """The published runs recorded none: a dash."""
    facts = json.loads((RESULTS / "grpo_42.json").read_text(encoding="utf-8"))
    facts["seconds"] |= {"total": 600.0, "start": 6.0, "measuring": 120.0, "checkpoints": 30.0, "learning": 360.0}
    (tmp_path / "grpo_42.json").write_text(json.dumps(facts), encoding="utf-8")

    def times(results):
        head, _, *runs = tables(results).split("Time\n\n")[1].split("\n\n")[0].splitlines()
        first = cells(head).index("whole run, min")
        assert cells(head)[first + 1 : first + 5] == [f"{name}, min" for name in TIMES]
        return [cells(run)[first : first + 5] for run in runs]

    assert times(tmp_path) == [["10.0", "0.1", "2.0", "0.5", "6.0"]]
    assert all(run[1:] == ["-"] * 4 for run in times(RESULTS))


@pytest.mark.parametrize("run", [("ppo", 1), ("grpo", 1)])
def test_facts_of_a_finished_run_have_its_times(runs, tmp_path, run):
    """Two updates, each evaluated."""
    facts = facts_of_run(runs[run], tmp_path / "run.log")
    folder = runs[run]
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert facts["start_model"] == {"name": record["settings"]["model"]["actor_model"],
                                    "files": record["data"]["start_model_files"]}  # fmt: skip
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    updates = sum(value for row in rows for name, value in row.items() if name.startswith("time/"))
    assert all(facts["seconds"][name] > 0 for name in TIMES)
    assert [one["update"] for one in facts["evaluations"]] == [0, 1, 2]
    assert [one["learning"] > 0 for one in facts["evaluations"]] == [False, True, True]
    last = facts["evaluations"][-1]
    assert 0 < 0.99 * updates <= last["learning"]
    # saves by the clock have no time at an evaluation
    assert sum(last.get(name, 0) for name in TIMES) <= 1.01 * last["seconds"]


def test_the_hash_of_the_first_updates_ignores_times_and_evaluations(tmp_path):
    def hash_of(**figures):
        rows = [
            {"update": 0, "eval/score": 0.1},
            {"update": 1, "loss": 0.5, **figures},
            {"update": 2, "eval/score": 1},
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
        return first_updates(tmp_path)["sha256"]

    first = hash_of(**{"policy/grad_norm": 0.25, "time/update_s": 1.0})
    assert hash_of(**{"time/update_s": 2.0, "policy/grad_norm": 0.25, "eval/kl": 1}) == first
    assert hash_of(**{"policy/grad_norm": 0.2500001, "time/update_s": 1.0}) != first
