"""Tests the questions of demo-checker, its start model, and that each algorithm learns the task.

`.ci/run` trains GRPO once. The other algorithms and seeds, the control with exchanged scores and the pass rates of the
start model have the marker `proof`: `python -m pytest -n 0 -m proof tests/demo/test_checker.py`.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import checker_start_model
from benchmarks.checker_start_model import PRETRAINING, corpus, misread, right_share, unreliable_answer
from benchmarks.pretraining import rebuild_command
from rlhf.algorithms.table import ALGORITHMS
from rlhf.data.examples import load_examples
from rlhf.data.row import Example
from rlhf.data.splits import split_examples
from rlhf.data.tokenizer import load_tokenizer
from rlhf.demo import parts, ready
from rlhf.demo.checker_questions import CELLS, FAMILIES, LEVELS, Question, ask, part_of_key, questions
from rlhf.demo.pairs import sample_answers
from rlhf.demo.ready import CHECKER_WEIGHTS as WEIGHTS
from rlhf.rewards.eval_functions import exact_match
from rlhf.settings.types import Split
from rlhf.utils.console import Screen
from tests.scripts.test_scripts import copy_project, run

SPLIT = Split(0, 85, 15)  # of the recipe
SEEDS = ("42", "123", "777")


@pytest.fixture(scope="module")
def asked() -> list[Question]:
    return questions(ready.PER_CELL, ready.SEED)


def example_of(family: str, level: int) -> Question:
    return ask(family, level, random.Random(0), "prompts")


# --- questions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Next letter of each: a z k.", "b a l"),
        ("Sort by alphabet: m a k.", "a k m"),
        ("Reverse: m a k.", "k a m"),
        ("Remove k: m k a f.", "m a f"),
        ("The letter after m: m k a f.", "k"),
        ("The 2 letters after k: m k a f d.", "a f"),
        ("Alternate: m a and f k.", "m f a k"),
    ],
)
def test_a_second_solver_agrees_with_the_examples(text, answer):
    assert solved(text) == answer


def solved(text: str) -> str:
    """A solver that reads only the text of a question, written independently of the generator."""
    task, _, rest = text.rstrip(".").partition(": ")
    letters = rest.split()
    words = task.split()
    if words[0] == "Alternate":
        middle = letters.index("and")
        return " ".join(letters[at + step] for at in range(middle) for step in (0, middle + 1))
    if words[0] == "The":
        number = int(words[1]) if words[1].isdigit() else 1
        return rest.partition(words[-1])[2][1 : 2 * number]
    found = {
        "Next": ["a" if letter == "z" else chr(ord(letter) + 1) for letter in letters],
        "Sort": sorted(letters),
        "Reverse": letters[::-1],
        "Remove": [letter for letter in letters if letter != words[-1]],
    }
    return " ".join(found[words[0]])


def test_every_answer_is_right(asked):
    assert [question.answer for question in asked] == [solved(question.text) for question in asked]


def test_cells_have_equally_many_questions_and_longer_ones_at_higher_levels(asked):
    assert len(CELLS) == 24
    assert set(Counter((q.family, q.level) for q in asked).values()) == {ready.PER_CELL}
    for family in FAMILIES:
        lengths = [fmean(len(q.text) for q in asked if (q.family, q.level) == (family, level)) for level in LEVELS]
        assert lengths == sorted(lengths) and len(set(lengths)) == len(LEVELS)


def test_questions_are_seeded(asked):
    assert questions(20, 1) == questions(20, 1) != questions(20, 2)


def test_no_two_questions_share_their_material(asked):
    assert len({question.key for question in asked}) == len(asked)
    assert {part_of_key(question) for question in asked} == {"prompts"}
    with pytest.raises(ValueError, match="shift 1 has too few distinct questions"):
        questions(2000, 0)


@pytest.mark.parametrize("mixed", [True, False])
def test_corpus_has_no_question_of_the_prompts(asked, monkeypatch, mixed):
    seen = []
    monkeypatch.setattr(checker_start_model, "ask", lambda *a: seen.append(ask(*a)) or seen[-1])
    texts = [text for text, _ in itertools.islice(corpus(0, mixed), 24 * 500)]
    assert [question.text for question in seen] == texts
    assert {part_of_key(question) for question in seen} == {"corpus"}
    assert not {question.key for question in seen} & {question.key for question in asked}


def test_held_out_questions_cannot_be_answered_from_training_questions(asked):
    """The most similar training question of the same cell has another answer. For `after`, a tenth of them may have
    the same one, which is a single letter at level 1."""
    rows = {q.text.lower(): q for q in asked}
    training, held_out = parts_of(asked)
    assert len(held_out) >= 640
    by_cell = defaultdict(list)
    for text in sorted(training):  # a fixed order: the first of several nearest questions counts
        by_cell[rows[text].topic].append(rows[text])
    hits = defaultdict(list)
    for text in held_out:
        one = rows[text]
        nearest = max(by_cell[one.topic], key=lambda other: len(set(one.given) & set(other.given)))
        hits[one.family].append(nearest.answer == one.answer)
    shares = {family: fmean(found) for family, found in hits.items()}
    assert shares.pop("after") < 0.1 and shares == dict.fromkeys(set(FAMILIES) - {"after"}, 0)


def parts_of(asked: list[Question]) -> tuple[set[str], set[str]]:
    """Return the training and the held-out questions, in lower case, as the recipe splits them."""
    examples = [Example(messages=({"role": "user", "content": q.text},)) for q in asked]
    parts = split_examples(examples, SPLIT)
    training, held_out = ({e.question for e in parts[name]} for name in ("rl", "evaluation"))
    assert not training & held_out
    return training, held_out


@pytest.mark.parametrize(("family", "level"), CELLS)
def test_unreliable_answers_are_right_with_the_given_share(family, level):
    rng = random.Random(f"{family} {level}")
    question = ask(family, level, rng, "prompts")
    answers = [unreliable_answer(question, 0.4, rng) for _ in range(3000)]
    assert fmean(answer == question.answer for answer in answers) == pytest.approx(0.4, abs=0.04)
    assert fmean(answer == misread(question) for answer in answers) == pytest.approx(0.3, abs=0.04)
    assert {len(answer) for answer in answers} == {len(question.answer)}
    assert {unreliable_answer(question, 1.0, rng) for _ in range(50)} == {question.answer}


def test_misread_answers_are_wrong_and_follow_their_method(asked):
    assert all(misread(question) != question.answer for question in asked)
    by_hand = {
        "Next letter of each: c f m.": "b e l",
        "Sort by alphabet: m a k.": "m k a",
        "Reverse: m a k.": "a m k",
        "Remove k: m k a f.": "m k f",
        "The letter after m: m k a f.": "m",
        "Alternate: m a and f k.": "f m k a",
    }
    for text, expected in by_hand.items():
        assert misread_by(text) == expected
    assert all(misread_by(q.text) == misread(q) for q in asked)


def misread_by(text: str) -> str:
    """The answer of the wrong method, computed from the text by the second solver."""
    task, _, rest = text.rstrip(".").partition(": ")
    letters = rest.split()
    words = task.split()
    right = solved(text)
    if words[0] == "Next":
        return " ".join("z" if letter == "a" else chr(ord(letter) - 1) for letter in letters)
    if words[0] == "Sort":
        return right[::-1]
    if words[0] == "Reverse":
        return " ".join([letters[1], letters[0], *letters[2:]])
    if words[0] == "Remove":
        gone = letters[(letters.index(words[-1]) + 1) % len(letters)]
        return " ".join(letter for letter in letters if letter != gone)
    if words[0] == "The":
        return f"{words[-1]} {right}"[: len(right)]
    second = rest.partition(" and ")[0].split()
    first = rest.partition(" and ")[2].split()
    return " ".join(letter for pair in zip(first, second, strict=True) for letter in pair)


# --- start model -----------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_corpus_has_the_stated_share_of_right_answers():
    right = defaultdict(list)
    rows = itertools.islice(corpus(0, mixed=True), 24 * 4000)
    for (text, answer), cell in zip(rows, itertools.cycle(CELLS), strict=False):
        right[cell].append(answer == solved(text))
    for cell in CELLS:
        share = right_share(*cell)
        assert fmean(right[cell]) == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 4000))
    assert all(answer == solved(text) for text, answer in itertools.islice(corpus(0, mixed=False), 1000))


def test_shipped_start_model_is_small_and_ends_its_answers():
    assert (WEIGHTS / "model.safetensors").stat().st_size <= 5_000_000
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32).eval()
    texts = [example_of(family, level).text for family, level in CELLS for _ in range(5)]
    answers = sample_answers(model, load_tokenizer(str(WEIGHTS)), texts, 1, 1, torch.device("cpu"))
    assert fmean(ended for _, ended in answers) >= 0.95


@pytest.mark.ci
def test_rebuild_command_trains_and_saves_a_start_model(tmp_path, capsys):
    """Two steps; the tokenizer is that of the shipped model."""
    few = replace(PRETRAINING, steps=2)
    rebuild_command(few, WEIGHTS, "benchmarks.checker_start_model", ["--rebuild", "--folder", str(tmp_path)])
    assert f"rebuilt {tmp_path}" in capsys.readouterr().out
    shipped = AutoModelForCausalLM.from_pretrained(WEIGHTS)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() == shipped.num_parameters()
    for file in ("tokenizer.json", "config.json", "chat_template.jinja"):
        assert (tmp_path / file).read_bytes() == (WEIGHTS / file).read_bytes(), file


@pytest.mark.proof
def test_pass_rates_of_the_start_model(asked):
    """64 samples per question: at least half of the questions have a pass rate of 5 to 80%, and 3 to 20% are never
    solved."""
    chosen = asked[:640]
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32).eval()
    texts = [question.text for question in chosen for _ in range(64)]
    answers = sample_answers(model, load_tokenizer(str(WEIGHTS)), texts, 1, 7, torch.device("cpu"))
    right = exact_match([text for text, _ in answers], [question.answer for question in chosen for _ in range(64)])
    rates = [fmean(right[start : start + 64]) for start in range(0, len(right), 64)]
    reach = fmean(0.05 <= rate <= 0.8 for rate in rates)
    never = fmean(rate == 0 for rate in rates)
    print(f"mean {fmean(rates):.3f}, 5 to 80%: {reach:.3f}, never: {never:.3f}")
    assert reach >= 0.5 and 0.03 <= never <= 0.2


# --- parts -----------------------------------------------------------------------------------------------------------


def test_parts_are_written_once_and_again_after_a_change(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ready, "PER_CELL", 2)
    parts.prepare_parts("demo-checker", Screen(), torch.device("cpu"))
    file = Path(ready.CHECKER_FOLDER, ready.QUESTIONS_FILE)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 48 and all(solved(row["question"]) == row["answer"] for row in rows)
    assert {row["topic"] for row in rows} == {f"{family} {level}" for family, level in CELLS}
    assert len(load_examples(str(file))) == 48
    written = file.stat().st_mtime_ns
    parts.prepare_parts("demo-checker", Screen(), torch.device("cpu"))
    assert file.stat().st_mtime_ns == written
    monkeypatch.setattr(ready, "PER_CELL", 3)
    parts.prepare_parts("demo-checker", Screen(), torch.device("cpu"))
    assert len(file.read_text(encoding="utf-8").splitlines()) == 72
    for lost in (file, ready.CHECKER_FOLDER / "start_model" / "tokenizer.json"):
        lost.write_text("")
        parts.prepare_parts("demo-checker", Screen(), torch.device("cpu"))
        assert lost.stat().st_size
    assert capsys.readouterr().out.count("wrote the parts") == 4


def test_complete_parts_need_no_write_access(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ready, "PER_CELL", 2)
    parts.prepare_parts("demo-checker", Screen(), torch.device("cpu"))
    monkeypatch.setattr(parts, "waiting_lock", None)
    parts.prepare_parts("demo-checker", Screen(), torch.device("cpu"))


# --- training --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return copy_project(tmp_path_factory.mktemp("checker"))


def trained(project: Path, algorithm: str, seed: str, *flags: str) -> tuple[float, dict]:
    """Trains from nothing. Returns the seconds and the figures of run.json."""
    shutil.rmtree(project / ready.CHECKER_FOLDER, ignore_errors=True)
    started = time.monotonic()
    output = f"{algorithm}_{seed}"
    words = [f"train_{algorithm}.py", "--recipe", "demo-checker", "--seed", seed, "--output", output, "--overwrite"]
    done = run([*words, *flags], project, OMP_NUM_THREADS="2", OMP_WAIT_POLICY=None)
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    figures = json.loads((project / output / "run.json").read_text(encoding="utf-8"))["figures"]
    print(f"{algorithm}, seed {seed}: {seconds:.0f} s", json.dumps(figures))
    return seconds, figures


def check_rise(figures: dict) -> None:
    assert figures["prompts"] >= 512
    assert figures["score_after"] - figures["score_before"] >= 0.30
    assert figures["score_rise_interval"][0] > 0.20


@pytest.mark.demo
def test_grpo_learns_within_four_minutes_from_nothing(project):
    seconds, figures = trained(project, "grpo", "42")
    check_rise(figures)
    assert seconds <= 4 * 60


@pytest.mark.proof
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_and_seed_learns_within_four_minutes(project, algorithm, seed):
    seconds, figures = trained(project, algorithm, seed)
    check_rise(figures)
    assert seconds <= 4 * 60


@pytest.mark.proof
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_exchanged_scores_teach_nothing(project, algorithm, seed):
    _, figures = trained(project, algorithm, seed, "--control", "shuffled", "--eval-func", "exact_match")
    assert abs(figures["eval/exact_match_after"] - figures["eval/exact_match_before"]) <= 0.05
