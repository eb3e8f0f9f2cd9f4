"""Tests of the findings: from figures to their names, in the progress line, and at the end of a run."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from transformers import AddedToken

import train_ppo
from rlhf.api import make_trainer
from rlhf.callbacks.logging import FindingsWarning, speed_text
from rlhf.rewards.scores import Scores
from rlhf.settings.training import SamplingSettings
from rlhf.trainer.evaluation import shown_prompts
from rlhf.trainer.findings import (
    SampleFigures,
    findings_of,
    hardly_changed,
    run_figures,
    short_fields,
    show_run_findings,
)
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.progress import Progress
from rlhf.utils.console import Screen

SAMPLING = SamplingSettings(max_new_tokens=24)
GOOD = SampleFigures("8 prompts", "--check prompts", 0.2, 0.5, (0.0, 1.0), {"right": (0.0, 1.0)}, 0.1, 0.0, 0.25, 0.3)


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({}, []),  # all at their limits
        ({"truncated": 0.21}, ["cut_off"]),
        ({"equal_groups": 0.51}, ["equal_groups"]),
        ({"equal_groups": None}, []),
        ({"in_reach": 0.02}, ["out_of_reach"]),
        ({"functions": {"right": (0.0, 0.0), "other": (0.5, 0.5)}}, ["never_fires"]),
        ({"functions": {"form": (-1.0, -1.0)}}, ["never_fires"]),
        ({"functions": {"form": (-1.0, 0.0), "always": (1.0, 1.0), "none": ()}}, []),
        ({"scores": (1.0, 1.0), "functions": {"right": (1.0, 1.0)}, "equal_groups": 1.0}, ["nothing"]),
        ({"scores": (0.0, 0.0), "functions": {"right": (0.0, 0.0)}, "truncated": 0.7, "in_reach": 0.0},
         ["cut_off", "never_fires", "nothing"]),
        ({"signal": 0.0}, ["nothing"]),
        ({"equal_groups": 1.0}, ["equal_groups"]),  # of a run that has learned all, for example
        ({"scores": None, "functions": {}, "equal_groups": 1.0}, ["equal_groups"]),  # one update is no proof
    ],
)  # fmt: skip
def test_findings_of_figures(changed, names):
    assert [finding.name for finding in findings_of(replace(GOOD, **changed), SAMPLING)] == names


@pytest.mark.parametrize(("name", "recommends"), [("exact", True), ("last_number", False), ("last_number_2", False)])
def test_no_warning_recommends_the_function_that_it_is_about(name, recommends):
    (found,) = findings_of(replace(GOOD, functions={name: (0.0, 0.0)}), SAMPLING)
    after = found.text.partition("--reward-func")[2]
    assert ("last_number" in after) == recommends and "--max-new-tokens" in after


@pytest.mark.parametrize(
    ("changed", "fix"),
    [
        ({"scores": (0.0, 0.0)}, "--actor-model"),
        ({"scores": (1.0, 1.0)}, "harder prompts"),
        ({"signal": 0.0, "same_texts": 0.6}, "--temperature"),
        ({"signal": 0.0, "truncated": 0.6}, "--max-new-tokens"),
        ({"in_reach": 0.1, "pass_rate": 0.9}, "harder prompts"),
        ({"in_reach": 0.1, "pass_rate": 0.1}, "easier prompts"),
    ],
)
def test_the_fix_fits_the_cause(changed, fix):
    assert fix in findings_of(replace(GOOD, **changed), SAMPLING)[-1].text


@pytest.mark.parametrize(
    ("eos", "equal", "fields"),
    [
        (0.8, 0.5, []),
        (0.8, None, []),
        (0.07, 0.5, ["cut off 93%"]),
        (0.9, 0.66, ["equal groups 66%"]),
        (0.0, 1.0, ["cut off 100%", "equal groups 100%"]),
    ],
)
def test_progress_line_has_fields_only_above_the_limits(eos, equal, fields):
    metrics = {"completions/eos_rate": eos, **({} if equal is None else {"rewards/equal_groups": equal})}
    assert short_fields(metrics, SAMPLING) == fields


def test_ranges_of_scores_are_counted_over_updates():
    progress = Progress()
    first = Scores([0.5, None], {"f": [0.5, None], "g": [None]}, raw=torch.tensor([0.5, math.nan]))
    last = Scores([2.0, -1.0], {"f": [1.0, -1.0], "g": [None]}, raw=torch.tensor([2.0, -1.0]))
    for scores in (first, None, last):
        progress.count_update(scores)
    assert progress.scores == [-1.0, 2.0]
    assert progress.functions == {"f": [-1.0, 1.0], "g": []}
    assert (progress.skipped, progress.skipped_in_a_row) == (1, 0)


def history(kl: float, per_token: float = 0.0, updates: int = 12) -> list[dict]:
    """Return the log of a run whose policy was near the start model first."""
    rows = [{"kl_divergence": kl, "kl_divergence/token": per_token}] * updates
    return [{"kl_divergence": 0.0, "kl_divergence/token": 0.0}] * 2 + rows


@pytest.mark.parametrize(
    ("kl", "rate"),
    [(0.003, "0.001"), (-0.001, "0.001"), (0.035, "0.0005"), (0.049, "0.0005"), (0.06, None)],
)
def test_a_policy_that_has_hardly_changed_is_named_with_a_learning_rate(configured, kl, rate):
    """Times 1 / sqrt(KL), at most 10."""
    found = hardly_changed(history(kl), configured("--learning-rate", 1e-4))
    assert [finding.name for finding in found] == (["hardly_changed"] if rate else [])
    assert all(f"Try --learning-rate {rate} " in finding.text for finding in found)


def test_a_short_run_or_a_kl_at_its_target_has_not_hardly_changed(configured):
    assert hardly_changed(history(0.0, updates=7), configured()) == []
    small = "--kl-schedule", "adaptive", "--kl-target"
    assert hardly_changed(history(0.03, 0.01), configured(*small, "0.05/sequence")) == []
    assert hardly_changed(history(0.03, 0.01), configured(*small, "0.01/token")) == []
    assert hardly_changed(history(0.03, 0.01), configured(*small, "0.05/token")) != []


# --- in runs ---------------------------------------------------------------------------------------------------------

PROMPTS = [f"number {i}?" for i in range(8)]
HELD_OUT = ["one?", "two?", "three?"]


def zero(completions, **_):
    return [0.0] * len(completions)


def last_word(completions, **_):
    return [float(len(completion) % 3) for completion in completions]


def test_a_run_reports_its_findings_after_some_updates_and_at_the_end(configured, capsys):
    """With three completions each time. The tiny model never ends a completion."""
    config = configured("--K", 2, "--batch-size", 2, "--num-iterations", 11, "--max-new-tokens", 3, algorithm="grpo")
    trainer = make_trainer(config, PROMPTS, [zero, last_word], [1.0, 0.0], evaluation_prompts=HELD_OUT, progress=False)
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith("warning: ") for line in lines] == [*[True] * 3, *[False] * 3] * 2
    assert all(re.match(r"  score 0\.00: '", line) for line in lines if not line.startswith("warning"))
    names = [finding.name for finding in findings_of(run_figures(trainer), config.sampling)]
    assert names == ["cut_off", "never_fires", "nothing"]
    assert run_figures(trainer).functions.keys() == {"zero", "last_word"}
    assert max(run_figures(trainer).functions["last_word"]) > 0


def test_tags_that_the_tokenizer_removes_are_named_if_a_function_never_fires(configured, capsys):
    """A function that looks for them finds none in any completion."""
    config = configured("--num-iterations", 2, "--max-new-tokens", 3)
    trainer = make_trainer(config, PROMPTS, [zero], evaluation_prompts=HELD_OUT, progress=False)
    trainer.processing_class.add_tokens([AddedToken(tag, special=True) for tag in ("<think>", "</think>")])
    trainer.train()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "'zero'" in line]
    assert "</think> <think>" in line


@pytest.mark.parametrize(("rate", "reported"), [(1e-9, 1), (3e-2, 0)])
def test_a_run_that_changed_nothing_reports_it_once_at_its_end(configured, capsys, rate, reported):
    """Its first updates are near the start model in any case."""
    config = configured("--batch-size", 4, "--num-iterations", 12, "--max-new-tokens", 3, "--learning-rate", rate)
    make_trainer(config, PROMPTS, [last_word], evaluation_prompts=HELD_OUT, progress=False).train()
    lines = [line for line in capsys.readouterr().out.splitlines() if "hardly changed" in line]
    assert len(lines) == reported and all("--learning-rate 1e-08" in line for line in lines)


@pytest.mark.parametrize(
    ("updates", "evaluations", "reported"),
    [(300.0, [30.0, 45.1], True), (300.1, [30.0, 45.0], False), (1.0, [30.0, 29.9], False)],  # a fifth, and a minute
)
def test_evaluations_that_take_more_than_a_fifth_of_the_time_are_a_finding(
    build, capsys, updates, evaluations, reported
):
    trainer = build()
    trainer.evaluate()
    trainer.progress.seconds = {"updates": [updates], "evaluations": evaluations}
    show_run_findings(trainer, Screen())
    lines = [line for line in capsys.readouterr().out.splitlines() if "evaluations took" in line]
    assert len(lines) == reported and all(" 20% " in line and "--eval-prompts" in line for line in lines)
    show_run_findings(trainer, Screen(), ended=False)
    assert "evaluations took" not in capsys.readouterr().out


def best_of_group(completions, group, **_):
    """1 for the longest completion of a group, 0 for one alone: a reward that compares a group."""
    longest = {}
    for text, number in zip(completions, group, strict=True):
        longest[number] = max(longest.get(number, 0), len(text))
    pairs = zip(completions, group, strict=True)
    return [float(group.count(number) > 1 and len(text) == longest[number]) for text, number in pairs]


@pytest.mark.parametrize(
    ("function", "flags", "reported"),
    [(best_of_group, (), 2), (best_of_group, ("--eval-samples", 2), 0), (zero, (), 0), (last_word, (), 0)],
)
def test_scores_that_are_equal_in_evaluations_only_are_a_finding(configured, capsys, function, flags, reported):
    """After some updates and at the end. The line names both flags."""
    sizes = ("--K", 3, "--batch-size", 2, "--num-iterations", 11, "--max-new-tokens", 3)
    config = configured(*sizes, *flags, algorithm="grpo")
    make_trainer(config, PROMPTS, [function], evaluation_prompts=HELD_OUT, progress=False).train()
    lines = [line for line in capsys.readouterr().out.splitlines() if "--eval-samples" in line]
    assert len(lines) == reported and all("--eval-func" in line and "--eval-samples 3" in line for line in lines)


def test_a_short_run_reports_them_once(configured, capsys):
    config = configured("--num-iterations", 2, "--max-new-tokens", 3)
    make_trainer(config, PROMPTS, [zero], evaluation_prompts=HELD_OUT).train()
    out = capsys.readouterr().out
    assert out.count("warning: ") == 3 and "| cut off 100% |" in out and "equal groups" not in out


def rows_of(out: str) -> list[dict[str, str]]:
    """Return the rows below each evaluation line."""
    parts = re.findall(r"^evaluation after update .*\n((?:  .*\n)+)", out, re.MULTILINE)
    return [dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in part.splitlines()) for part in parts]


def test_every_evaluation_prints_one_question_with_both_answers(run_flags, tmp_path, capsys, monkeypatch):
    """Also after a resume. The question is the first of those that the samples at the end are drawn from."""
    flags = run_flags("--num-iterations", 3, "--eval-every", 1, "--save-every", 1)
    original = OnPolicyLoop.update_step
    seen = []

    def stopped(self, update):
        seen.append(self)
        if update == 3:
            raise KeyboardInterrupt
        return original(self, update)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(OnPolicyLoop, "update_step", stopped)
        train_ppo.main(flags)
    before = rows_of(capsys.readouterr().out)
    train_ppo.main(["--resume", "--output", str(tmp_path / "run")])
    (after,) = rows_of(capsys.readouterr().out)
    trainer = seen[0]
    drawn = shown_prompts(len(trainer.evaluation_prompts), trainer.config.run.seed)[0]
    start = trainer.evaluations[0]
    assert [set(rows) for rows in before] == [{"question", "start model", "score"}] + [set(after)] * 2
    assert "now" in after and {rows["question"] for rows in [*before, after]} == {
        trainer.evaluation_prompts[drawn].example.messages[-1]["content"]
    }
    assert {rows["start model"] for rows in before} == {after["start model"]}
    assert [rows["score"].split(" -> ")[0] for rows in [*before, after]] == [f"{start.scores[drawn, 0]:.2f}"] * 4
    assert before[1]["score"].split(" -> ")[1] == f"{trainer.evaluations[1].scores[drawn, 0]:.2f}"


# --- speed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speeds", "warned"),
    [
        ([(2, 1), (40, 20), (30, 15), (3.9, 1.9)], [4]),  # tokens and episodes per second; the first update warms up
        ([(40, 20)] * 3 + [(4, 2)], []),  # a tenth
        ([(40, 20)] * 3 + [(3.9, 11)], []),  # completions became short
        ([(4, 2)] * 3 + [(4000, 20), (390, 2)], []),  # as at the start
        ([(40, 20)] * 3 + [(1, 1), (5, 2), (3, 1), (21, 10), (3, 1)], [4, 8]),  # again after it was fast
    ],
)
def test_a_run_that_becomes_slow_is_reported_once(capsys, speeds, warned):
    callback = FindingsWarning(None, Screen())
    found = []
    for update, (tokens, episodes) in enumerate(speeds, start=1):
        callback.warn_if_slow(update, tokens, episodes)
        if f"warning: update {update} " in capsys.readouterr().out:
            found.append(update)
    assert found == warned


@pytest.mark.parametrize(
    ("speed", "text"), [(1234.5, "1,234"), (7.4, "7"), (0.96, "1"), (0.42, "0.4"), (0.04, "0.04")]
)
def test_slow_speeds_have_one_digit(speed, text):
    assert speed_text(speed) == text
