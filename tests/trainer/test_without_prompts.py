"""Tests of trainers without training prompts, for a loop by hand, and of runs without evaluations."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

import compare_runs
import evaluate_generations
import plot_training_progress
from rlhf.algorithms.table import ALGORITHMS
from rlhf.api import check, make_trainer
from rlhf.config import make_config
from rlhf.rewards.functions import length_penalty
from rlhf.run.figures import results_of
from rlhf.setup.fit import estimator_of
from rlhf.utils.signals import TrainingInterrupted
from tests.conftest import LEARN_FROM_ALL

PROMPTS = [f"What is {word}?" for word in ("a cat", "a table", "the river", "Paris", "a number", "help")]


@pytest.fixture
def made(start_model, tmp_path, monkeypatch):
    """Return a function that makes a trainer of 4 episodes per update and 2 updates."""
    monkeypatch.chdir(tmp_path)

    def make(
        algorithm="ppo",
        prompts=PROMPTS,
        evaluation=(),
        output=None,
        rewards=length_penalty,
        progress=False,
        **settings,
    ):
        groups = {"batch_size": 2, "K": 2} if ALGORITHMS[algorithm].group_size > 1 else {"batch_size": 4}
        config = make_config(
            algorithm=algorithm,
            **{"actor_model": str(start_model), "rm_model": None, "max_new_tokens": 6, "num_iterations": 2}
            | {"temperature": 1.0, "learning_rate": 1e-3, "save_every": 1, "prompt_length": 60}
            | groups
            | settings,
        )
        return make_trainer(
            config, prompts, [rewards], evaluation_prompts=evaluation, output=output, progress=progress
        )

    return make


def by_hand(trainer, updates=2):
    """Take the updates of a run on prompts that do not depend on the trainer's."""
    for update in range(trainer.update + 1, updates + 1):
        count = 4 // trainer.config.group_size
        trainer.step(trainer.generate(PROMPTS[update : update + count]))
        trainer.after_step()
    return trainer


def stop(trainer):
    """End a run as Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(TrainingInterrupted):
        trainer.after_step()


def assert_equal_weights(one, other):
    pairs = zip(one.host.model.named_parameters(), other.host.model.named_parameters(), strict=True)
    assert not [name for (name, weight), (_, twin) in pairs if not torch.equal(weight, twin)]


# --- without training prompts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", LEARN_FROM_ALL)
def test_a_loop_by_hand_needs_no_training_prompts(made, algorithm):
    alone = by_hand(made(algorithm, prompts=[], evaluation=PROMPTS[:2]))
    other = by_hand(made(algorithm, evaluation=PROMPTS[:2]))
    assert_equal_weights(alone, other)
    assert alone.finish()["eval/score"] == other.finish()["eval/score"]
    assert alone.updates == 2 and alone.episodes == 8 and alone.host.state.epoch == 0


def test_prompts_may_be_ids(made):
    one, other = (made(prompts=[]) for _ in range(2))
    tokenizer = one.processing_class
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:4]]
    ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    from_text = one.generate(PROMPTS[:4])
    from_ids = other.generate(ids)
    assert [e.prompt_ids for e in from_ids] == ids == [e.prompt_ids for e in from_text]
    assert [e.ids for e in from_ids] == [e.ids for e in from_text]
    one.step(from_text)
    other.step(from_ids)
    assert_equal_weights(one, other)


def test_the_room_is_that_of_the_longest_prompt(made):
    trainer = made(prompts=[], prompt_length=70)
    assert trainer.collector.longest_prompt == 70
    longest = made(prompts=["x " * 90], prompt_length=300)
    size = len(longest.train_prompts[0].ids)
    alone = made(prompts=[], prompt_length=size)
    assert estimator_of(alone)(alone.config) == estimator_of(longest)(longest.config)
    (episode, *_) = trainer.generate([list(range(5, 75))])
    assert len(episode.prompt_ids) == 70


def test_an_empty_list_of_prompts_is_refused_where_it_has_no_meaning(made, user_error, monkeypatch):
    with user_error("num_iterations", "prompts"):
        made(prompts=[], num_iterations=None)
    with user_error("num_iterations", "prompts"):
        made(prompts=[], num_iterations=None, epochs=3)
    with user_error("steps_per_topic"):
        made(prompts=[], steps_per_topic=1)
    with user_error("--prompt-length"):  # the context of the start model
        made(prompts=[], prompt_length=100_000)
    for given in ({"prompts": ["x " * 90]}, {"prompts": [], "evaluation": ["x " * 90]}):
        with user_error("prompt_length"):
            made(**given)
    with user_error("train()", "prompts"):
        made(prompts=[]).train()
    trainer = made(prompts=[], num_iterations=None, episodes=8)
    assert trainer.updates == 2
    with user_error("check()", "prompts"):
        check(trainer.config, [], [length_penalty])


# --- without evaluations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", [None, "run"], ids=str)
def test_training_without_evaluations_gives_the_same_weights(made, output, capsys):
    alone = made(output=output, progress=True, num_iterations=11)
    found = alone.train()
    assert alone.evaluations == [] and not [name for name in found if name.startswith("eval")]
    assert "before -> after" not in capsys.readouterr().out
    other = made(evaluation=PROMPTS[:2], num_iterations=11)
    other.train()
    assert_equal_weights(alone, other)


def test_the_folder_of_a_run_without_evaluations(made, capsys):
    made(output="run", progress=True, use_lora=True, merge_lora=True).train()
    run = json.loads(Path("run/run.json").read_text(encoding="utf-8"))
    assert run["status"] == "finished" and "best" not in run and run["merged"]["which"] == "final"
    assert run["figures"]["kl_last_10_updates"] is not None and "score_before" not in run["figures"]
    assert results_of([], 1) == {}
    names = {path.name for path in Path("run").iterdir()}
    assert {"checkpoint-2", "logs", "prompts", "merged", "adapter_model.safetensors"} <= names and "best" not in names
    assert not (Path("run") / "checkpoint-2" / "best").exists()
    for folder in ("run", "run/merged"):
        card = Path(folder, "README.md").read_text(encoding="utf-8")
        assert "## Use" in card and "## Data" in card and "## Evaluation" not in card
    out = capsys.readouterr().out
    assert "run/best" not in out and "--prompts FILE.jsonl" in out


def test_evaluate_takes_other_prompts_only(made, user_error):
    trainer = made()
    with user_error("evaluate()", "prompts"):
        trainer.evaluate()
    found = trainer.evaluate(PROMPTS[:2])
    assert "eval/score" in found and "eval/perplexity" not in found and trainer.evaluations == []
    trainer.train()
    assert trainer.evaluate(PROMPTS[:2])["eval/kl_divergence"] > 0


def test_a_text_gives_the_perplexity_without_evaluation_prompts(made, tmp_path):
    (tmp_path / "text.txt").write_text("What is a cat?\n\nA cat is an animal.", encoding="utf-8")
    assert made(eval_text="text.txt").evaluate(PROMPTS[:2])["eval/perplexity"] > 1


def test_a_run_without_evaluations_resumes_bit_identically(made, user_error):
    straight = by_hand(made(prompts=[], output="straight"))
    straight.finish()
    first = by_hand(made(prompts=[], output="run"), updates=1)
    stop(first)
    with user_error("--resume", "evaluation_prompts"):
        made(prompts=[], evaluation=PROMPTS[:2], output="run", resume=True, resume_anyway=True).begin()
    second = made(prompts=[], output="run", resume=True)
    second.begin()
    assert second.update == 1
    by_hand(second).finish()
    assert_equal_weights(straight, second)


@pytest.mark.ci
def test_other_commands_read_a_run_without_evaluations(made, user_error, capsys):
    for seed in (1, 2):
        made(output=f"run-{seed}", seed=seed).train()
    plot_training_progress.main(["run-1", "run-2", "--output", "curves"])
    reward = ["--reward-func", "length_penalty"]
    with user_error("run-1/prompts", "--prompts"):
        evaluate_generations.main(["--model-path", "run-1", *reward, "--output", "none"])
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS), encoding="utf-8")
    asked = ["--prompts", "rows.jsonl", *reward]
    evaluate_generations.main(["--model-path", "run-1", *asked, "--output", "page"])
    capsys.readouterr()
    compare_runs.main(["run-1", "run-2", *asked, "--output", "compared"])
    assert "no stored evaluations" in capsys.readouterr().out
    with user_error("best", "run-1"):
        evaluate_generations.main(["--model-path", "run-1", "--which", "best", *asked, "--output", "other"])


def test_without_training_prompts_the_reward_is_probed_on_the_evaluation_prompts(made, capsys):
    rows = [{"prompt": prompt, "answer": "yes"} for prompt in PROMPTS[:3]]
    made(prompts=[], evaluation=rows, rewards=lambda completions, **_: [1.0] * len(completions)).begin()
    assert "hacks" in capsys.readouterr().out
