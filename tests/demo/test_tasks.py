"""Tests the demo's questions, gold quality, preference pairs and start model."""

import itertools
import random
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.pretraining import prompt_text
from benchmarks.start_model import FLAWS, GOOD_SHARE, corpus, demonstration, flawed
from rlhf.data.chat_template import encode_prompt
from rlhf.data.tokenizer import load_tokenizer
from rlhf.demo.families import FAMILIES, KINDS, NOUNS
from rlhf.demo.pairs import sample_answers, sampled_pairs
from rlhf.demo.ready import WEIGHTS
from rlhf.demo.tasks import (
    ask,
    flaw_of,
    gold_quality,
    parse,
    part_of_task,
    questions,
)

PICK = "Which of these is a fruit: goat, plum, hammer?"
SORT = "Order from small to big: horse, ant, fox."
KIND = "What are plum and saw?"
SCENE = "Write about an old fruit under a new tool."
ONE_OF_EACH = [PICK, SORT, KIND, SCENE]


@pytest.fixture(scope="module")
def some_questions():
    return questions(600, seed=3)


def test_questions_are_distinct_seeded_and_balanced():
    many = questions(6000, seed=0)
    assert len(set(many)) == 6000
    assert many[:60] == questions(60, seed=0) and many[:60] != questions(60, seed=1)
    assert Counter(parse(question)[0] for question in many) == dict.fromkeys(FAMILIES, 1500)


def test_training_and_demo_questions_are_disjoint_even_reordered():
    assert {part_of_task(question) for question in questions(60, seed=0)} == {"demo"}
    rng = random.Random(0)
    assert {part_of_task(ask(family, rng, "train")) for family in FAMILIES for _ in range(15)} == {"train"}
    assert part_of_task("Order from small to big: ant, fox, horse.") == part_of_task(SORT)


def test_corpus_has_mixed_quality_and_training_questions():
    mixture = list(itertools.islice(corpus(0, mixed=True), 1200))
    assert {part_of_task(question) for question, _ in mixture} == {"train"}
    good = sum(gold_quality(question, completion) == 1 for question, completion in mixture) / len(mixture)
    assert good == pytest.approx(GOOD_SHARE, abs=0.05)
    assert all(gold_quality(*row) == 1 for row in itertools.islice(corpus(0, mixed=False), 300))


@pytest.mark.parametrize(
    ("question", "completion"),
    [
        (PICK, "Plum is a fruit."),
        (SORT, "First ant, then fox, then horse."),
        (SORT, "Ant, fox and horse."),
        (KIND, "The plum is a fruit and the saw is a tool."),
        (SCENE, "Today the old plum stands under the new saw."),
    ],
)
def test_good_completions_have_gold_quality_1(question, completion):
    assert gold_quality(question, completion) == 1 and flaw_of(question, completion) is None


@pytest.mark.parametrize(
    ("question", "completion", "flaw", "highest"),
    [
        (PICK, "Hammer is a fruit.", "wrong", 0.2),
        (PICK, "Plum.", "incomplete", 0.5),
        (SORT, "Horse, fox, ant.", "wrong", 0.2),
        (SORT, "Ant, fox.", "incomplete", 0.5),
        (SORT, "Ant, fox, horse. Ant, fox, horse.", "rambling", 0.5),
        (SORT, "Ant, fox, horse, whale.", "rambling", 0.5),
        (KIND, "Plum is a tool and saw is a tool.", "wrong", 0.2),
        (KIND, "Plum is a fruit.", "incomplete", 0.5),
        (SCENE, "The old plum stands beside the new saw.", "wrong", 0.25),
        (SCENE, "The old saw stands under the new plum.", "wrong", 0.25),
        (SCENE, "The old plum stands.", "incomplete", 0.4),
        (PICK, "plum is a fruit", "format", 0.5),
        (PICK, "The old hat lies near the new drum.", "off_topic", 0.0),
    ],
)
def test_flaws_are_detected(question, completion, flaw, highest):
    assert flaw_of(question, completion) == flaw and gold_quality(question, completion) <= highest


def test_demonstrations_are_good_and_varied(some_questions):
    rng = random.Random(0)
    for question in some_questions:
        assert gold_quality(question, demonstration(question, rng)) == 1, question
    for question in ONE_OF_EACH:
        assert len({demonstration(question, rng) for _ in range(20)}) > 1


@pytest.mark.parametrize("kind", FLAWS)
def test_flawed_completions_have_their_flaw_and_lower_quality(some_questions, kind):
    rng = random.Random(kind)
    highest = {"wrong": 0.25, "off_topic": 0.0, "incomplete": 0.65, "rambling": 0.6, "format": 0.75}[kind]
    for question in some_questions:
        completion = flawed(question, kind, rng)
        assert flaw_of(question, completion) == kind, (question, completion)
        assert gold_quality(question, completion) <= highest, (question, completion)


@pytest.mark.parametrize("question", ONE_OF_EACH)
def test_reward_hacking_has_low_gold_quality(question):
    everything = ", ".join(NOUNS).capitalize() + "."
    kinds = ". ".join(", ".join(nouns).capitalize() for nouns in KINDS.values()) + "."
    magic = ["It is good.", "Yes.", ".", "First, then.", "The fox.", "Plum. Plum. Plum."]
    for completion in ["", question, question + " " + question, everything, kinds, *magic]:
        assert gold_quality(question, completion) <= 0.3, completion


def test_answers_to_other_questions_have_low_gold_quality(some_questions):
    rng = random.Random(0)
    some_questions = some_questions[:600]
    others = some_questions[1:] + some_questions[:1]
    qualities = [gold_quality(q, demonstration(other, rng)) for q, other in zip(some_questions, others, strict=True)]
    assert sum(qualities) / len(qualities) < 0.02 and max(qualities) < 0.7  # a few match the question by chance


@pytest.mark.parametrize("question", ONE_OF_EACH)
def test_unended_completion_halves_quality_and_is_rambling(question):
    completion = demonstration(question, random.Random(0))
    assert gold_quality(question, completion, ended=False) == 0.5
    assert flaw_of(question, completion, ended=False) == "rambling"


@pytest.mark.parametrize("question", ONE_OF_EACH)
@pytest.mark.parametrize(
    "completion",
    ["\x00\ud800", "。？！", "drum " * 50_000, ".!?" * 9999, "ÀÉ " * 99, "\n\n", "<|im_end|>", "((((", "a" * 10**6],
)
def test_gold_quality_accepts_any_text(question, completion):
    assert 0 <= gold_quality(question, completion) <= 0.3
    assert flaw_of(question, completion) in FLAWS


def test_unknown_question_is_refused(user_error):
    with user_error("What is the meaning of life?", kind=ValueError):
        parse("What is the meaning of life?")


def test_pairs_prefer_the_better_sample_and_store_the_flaw():
    completions = [("Plum is a fruit.", True), ("plum is a fruit.", True), ("Goat is a fruit.", True), ("Plum", False)]
    rows = sampled_pairs(PICK, completions, Counter())
    assert len(rows) == 2 and all(row["chosen"] == "Plum is a fruit." for row in rows)
    for row in rows:
        assert list(row) == ["system", "question", "chosen", "rejected", "flaw", "rejected_ended"]
        assert row["flaw"] == flaw_of(PICK, row["rejected"], row["rejected_ended"])


def test_shipped_start_model_is_small_and_loads():
    assert (WEIGHTS / "model.safetensors").stat().st_size <= 5_000_000
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)
    tokenizer = load_tokenizer(str(WEIGHTS))
    assert tokenizer.pad_token == "<|endoftext|>" and tokenizer.eos_token == "<|im_end|>"
    assert model.config.vocab_size == len(tokenizer)
    ids = encode_prompt(tokenizer, [{"role": "user", "content": PICK}])
    assert ids == tokenizer(prompt_text(PICK))["input_ids"], "prompts must be rendered as in the model's training"
    assert len(ids) <= 48
    (completion, _), (again, _) = (
        sample_answers(model, tokenizer, [PICK], 1, 1, torch.device("cpu"))[0] for _ in range(2)
    )
    assert completion == again
