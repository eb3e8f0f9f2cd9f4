"""Tests of a teacher (on-policy distillation): its scores of tokens against numbers of paper and of transformers, what
the runs log and record, and resume."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import train_ppo
import train_reinforce_pp
from rlhf.api import make_trainer
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import make_config
from rlhf.models.reference import Reference
from rlhf.rewards.scores import Scores
from rlhf.rollout.completions import Rollout
from rlhf.rollout.episodes import Episode
from rlhf.rollout.sampling import unpack_bits
from rlhf.trainer.safety import SkipUpdate
from rlhf.utils.errors import RunError
from tests.kills import differing
from tests.run.test_resume import Killed, interrupt
from tests.shapes import make_start_model

MASK = torch.tensor([[True, True, True], [True, True, False]])
ONLY = ("--rm-model", "none", "--kl-placement", "none")


def make_teacher(folder: Path) -> None:
    """Save a model of another width than the start model, with the same tokenizer and 64 more embeddings."""
    make_start_model(folder, size="wide", seed=5)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(model.config.vocab_size + 64, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(5)  # so that it differs clearly from the start model
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def teacher(made_once) -> Path:
    return made_once("teacher", make_teacher)


class Batches:
    """Stores the experience and the scores of each update."""

    def __init__(self):
        self.found = []

    def on_batch(self, update, batch, scores):
        self.found.append((batch, scores))


def worked(trainer, logprobs: float, scores: list[float], token_scores=None) -> tuple[Rollout, Scores]:
    """Return what `with_teacher` makes of completions of 3 and 2 tokens with given log-probs."""
    completions = SimpleNamespace(mask=MASK, action_mask=MASK)
    policy = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, 0.0]])
    of_teacher = torch.tensor([[-0.5, -3.0, logprobs], [-2.0, -0.5, 9.0]])
    trainer.teacher = SimpleNamespace(reference_logprobs=lambda given: of_teacher)
    rollout = Rollout(completions, [], policy, policy, None, token_scores)
    values = torch.tensor(scores)
    return trainer.with_teacher(rollout, Scores([], {}, raw=values + 1, shaped=values))


def test_scores_of_tokens_are_those_of_paper(build):
    """log p_teacher - log p_policy: 0.5, -1, 0.25 and -1, 0.5. Their sums are -0.25 and -0.5. The first completion has
    a score of 2, which is paid at its last token; the second one has none. The raw scores are higher by 1."""
    rollout, scores = worked(build(), -2.75, [2.0, math.nan])
    assert_close(rollout.token_scores, torch.tensor([[0.5, -1.0, 2.25], [-1.0, 0.5, 0.0]]))
    assert_close(scores.teacher_kl, torch.tensor([0.25, 0.5]))
    assert_close(scores.shaped, torch.tensor([1.75, -0.5]))
    assert_close(scores.raw, torch.tensor([2.75, -0.5]))


def test_scores_of_tokens_add_to_those_of_a_reward_function(build):
    own = torch.tensor([[1.0, 0.0, 1.0], [0.0, 3.0, 0.0]])
    rollout, scores = worked(build(), -2.75, [2.0, 3.0], own)
    assert_close(rollout.token_scores, torch.tensor([[1.5, -1.0, 1.25], [-1.0, 3.5, 0.0]]))
    assert_close(scores.shaped, rollout.token_scores.sum(1))


def test_a_score_that_is_not_finite_skips_the_update(build):
    with pytest.raises(SkipUpdate):
        worked(build(), -math.inf, [2.0, 1.0])


def of_transformers(model, batch, row: int, temperature: float) -> torch.Tensor:
    """Return the log-probs of a completion's tokens under a model of transformers, alone and without padding."""
    completions = batch.completions
    prompt = list(batch.prompts[row].ids)
    ids = prompt + completions.rows()[row]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1] / temperature
    if completions.allowed_tokens is not None:
        allowed = unpack_bits(completions.allowed_tokens[row, : len(logits)], completions.vocabulary)
        logits = logits[:, : completions.vocabulary].masked_fill(~allowed, -math.inf)
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[len(prompt) :]).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--no-packed",),
        ("--micro-batch-size", 1),
        ("--top-p", "0.9", "--temperature", "1.2"),
        ("--minibatches", 1, "--ppo-epochs", 1, "--use-lora"),
    ],
    ids=lambda flags: " ".join(map(str, flags)) or "default",
)
@pytest.mark.parametrize("algorithm", ["ppo", "reinforce_pp"])
def test_first_rollout_has_the_scores_of_transformers(build, teacher, start_model, algorithm, flags):
    read = Batches()
    trainer = build("--teacher", teacher, *ONLY, *flags, algorithm=algorithm, callbacks=[read])
    metrics = trainer.update_step(1)
    ((batch, _),) = read.found
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (teacher, start_model)]
    whole = []
    for row, length in enumerate(batch.completions.completion_lengths):
        by_teacher, by_policy = (of_transformers(m, batch, row, trainer.config.sampling.temperature) for m in models)
        assert_close(batch.rewards[row, :length], by_teacher - by_policy, atol=2e-4, rtol=1e-4)
        assert not batch.rewards[row, length:].any()
        whole.append(float((by_policy - by_teacher).sum()))
    assert min(map(abs, whole)) > 1, "the teacher differs from the policy"
    assert metrics["teacher_kl"] == pytest.approx(sum(whole) / len(whole), abs=1e-3)
    assert metrics["rewards/mean"] == pytest.approx(-metrics["teacher_kl"], rel=1e-5)
    assert metrics["kl_divergence"] == pytest.approx(0, abs=1e-3), "the start model stays the reference of the KL"


def test_without_discount_the_advantages_are_the_scores_of_the_tokens(build, teacher):
    read = Batches()
    for gamma in (0, 1):
        build("--teacher", teacher, *ONLY, "--gamma", gamma, algorithm="reinforce_pp", callbacks=[read]).update_step(1)
    (myopic, _), (to_go, _) = read.found
    assert torch.equal(myopic.raw_advantages, myopic.rewards) and torch.equal(myopic.rewards, to_go.rewards)
    assert_close(to_go.raw_advantages[:, 0], to_go.rewards.sum(1))
    assert not torch.equal(myopic.raw_advantages, to_go.raw_advantages)


def test_rewards_and_the_teacher_add_up(build, teacher, start_model):
    def ten(completions, **_):
        return [10.0] * len(completions)

    flags = ("--kl-placement", "none")
    metrics = build("--teacher", teacher, *flags, rewards=[ten]).update_step(1)
    assert metrics["rewards/mean"] == pytest.approx(10 - metrics["teacher_kl"], rel=1e-5)
    assert metrics["rewards/each/ten"] == 10
    trainer = build("--teacher", start_model, *flags, rewards=[ten])
    assert trainer.evaluate()["eval/teacher_kl"] == 0 and trainer.evaluations[0].score == 10
    assert trainer.update_step(1)["teacher_kl"] == 0, "the teacher is the start model"
    assert "teacher_kl" not in build(*flags, rewards=[ten]).update_step(1)


def test_an_evaluation_has_the_kl_to_the_teacher(build, teacher, start_model):
    trainer = build("--teacher", teacher, *ONLY, algorithm="reinforce_pp")
    found = trainer.evaluate()
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (teacher, start_model)]
    evaluation = trainer.evaluations[0]
    read = []
    trainer.evaluator._played, played = lambda *a: read.append(played(*a)) or read[-1], trainer.evaluator._played
    trainer.evaluator.latest = ()
    assert trainer.evaluate() == found and evaluation.scores.shape == (6, 1)
    (part,) = read[0][-1]
    batch = SimpleNamespace(completions=part, prompts=trainer.evaluation_prompts)
    for row in range(6):
        by_teacher, by_policy = (of_transformers(m, batch, row, trainer.config.sampling.temperature) for m in models)
        assert evaluation.teacher_kl[row, 0] == pytest.approx(float((by_policy - by_teacher).sum()), abs=1e-3)
    assert found["eval/score"] == pytest.approx(-found["eval/teacher_kl"])
    assert found["eval/kl_divergence"] == 0


def test_smaller_micro_batches_of_the_teacher_after_too_little_memory(build, teacher, monkeypatch, user_error):
    trainer = build("--teacher", teacher, *ONLY)
    completions = trainer.collector.sample(trainer.episodes_of(1), 1).completions
    found = trainer.teacher.reference_logprobs(completions)
    original = Reference.logprobs

    def of_few(most):
        def logprobs(self, micro_batch, temperature, allowed):
            if len(micro_batch.rows) > most:
                raise torch.OutOfMemoryError("out of memory")
            return original(self, micro_batch, temperature, allowed)

        monkeypatch.setattr(Reference, "logprobs", logprobs)

    of_few(1)
    assert_close(trainer.teacher.reference_logprobs(completions), found)
    assert (trainer.teacher.max_rows, trainer.passes.max_rows) == (1, 0)
    of_few(0)
    with user_error("the teacher's", kind=RunError):
        trainer.teacher.reference_logprobs(completions)


def test_only_the_policys_tokens_of_an_episode_are_scored(build, teacher, start_model):
    """Turns of two tokens and of one, and two tokens of an environment between them. The first episode has a score of
    3, which is paid at its last token. The second one gives its own log-probs."""
    read = Batches()
    flags = ("--batch-size", 2, "--max-episode-tokens", 8, "--learning-rate", "1e-30", "--kl-coef", 0, "--kl-schedule")
    trainer = build("--teacher", teacher, "--rm-model", "none", *flags, "fixed", callbacks=[read])
    wrote = [True, True, False, False, True]
    own = [-0.5, -1.0, 9.0, 9.0, -2.0]
    given = [Episode.of([5, 6, 7], [11, 12, 13, 14, 15], wrote, logprobs) for logprobs in (None, own)]
    metrics = trainer.step(given, [3.0, 0.0], assume_on_policy=True)
    own_and_given = [*trainer.generate(["a cat?"]), Episode.of([5], [11], None, [-1.0])]
    mixed = trainer.step(own_and_given)
    trainer.finish()
    (batch, _), (second, _) = read.found
    by_teacher, by_policy = (
        of_transformers(AutoModelForCausalLM.from_pretrained(folder), batch, 0, trainer.config.sampling.temperature)
        for folder in (teacher, start_model)
    )
    for row, logprobs, score in ((0, by_policy, 3.0), (1, torch.tensor(own), 0.0)):
        expected = torch.where(torch.tensor(wrote), by_teacher - logprobs, 0.0)
        expected[-1] += score
        assert_close(batch.rewards[row], expected, atol=2e-4, rtol=1e-4)
    assert "teacher_kl" not in metrics, "this policy did not sample them"
    assert mixed["teacher_kl"] == pytest.approx(-float(second.rewards[0].sum()), rel=1e-5)


def test_the_policy_moves_towards_the_teacher(build, teacher):
    flags = ("--gamma", 0, "--learning-rate", "1e-2", "--batch-size", 16, "--num-iterations", 30)
    trainer = build("--teacher", teacher, *ONLY, *flags, algorithm="reinforce_pp")
    trainer.train()
    first, *_, last = (one.metrics()["eval/teacher_kl"] for one in trainer.evaluations)
    assert last < first / 2


def test_a_program_needs_no_reward_with_a_teacher(teacher, start_model, user_error):
    settings = {"actor_model": str(start_model), "rm_model": None, "batch_size": 2, "num_iterations": 1}
    settings |= {"max_new_tokens": 4, "gamma": 0, "ppo_epochs": 1}
    prompts = ["a cat?", "a table?"]
    config = make_config(algorithm="reinforce_pp", teacher=str(teacher), **settings)
    trainer = make_trainer(config, prompts, evaluation_prompts=["a river?"], progress=False)
    metrics = trainer.train()
    assert metrics["rewards/mean"] == pytest.approx(-metrics["teacher_kl"]) and metrics["eval/teacher_kl"] != 0
    with user_error("teacher", "algorithm 'rloo'"):
        make_config(algorithm="rloo", teacher=str(teacher))
    with user_error("teacher in make_config()"):
        make_trainer(make_config(algorithm="reinforce_pp", **settings), prompts)


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def words(run_flags, teacher, tmp_path):
    """Return a function that makes the flags of a run with a copy of the teacher and no reward."""
    shutil.copytree(teacher, tmp_path / "teacher")

    def make(output: Path, *more: object) -> list[str]:
        flags = ("--teacher", tmp_path / "teacher", *ONLY, "--save-every", 1, "--num-iterations", 4, *more)
        return [*run_flags(*flags), "--output", str(output)]

    return make


def interrupted(main, argv: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        interrupt(patch, 3, Killed())
        main(argv)


@pytest.mark.parametrize("script", [train_reinforce_pp, train_ppo], ids=lambda script: script.__name__)
def test_resume_is_bit_identical(words, tmp_path, script):
    output = tmp_path / "run"
    script.main(words(tmp_path / "uninterrupted"))
    interrupted(script.main, words(output))
    script.main(["--resume", "--output", str(output)])
    assert differing(tmp_path / "uninterrupted", output) == []
    figures = RunRecord.read(output).figures
    assert figures["teacher_kl_before"] == pytest.approx(-figures["score_before"]) and figures["teacher_kl_after"]


def test_resume_refuses_another_teacher(words, tmp_path, user_error):
    output = tmp_path / "run"
    interrupted(train_ppo.main, words(output))
    file = tmp_path / "teacher" / "model.safetensors"
    save_file({name: weight + 1 for name, weight in load_file(file).items()}, file, metadata={"format": "pt"})
    with user_error("teacher_files model.safetensors", "--resume-anyway"):
        train_ppo.main(["--resume", "--output", str(output)])


def test_a_run_without_rewards_is_shown_recorded_and_evaluated(words, tmp_path, capsys):
    import evaluate_generations

    output = tmp_path / "run"
    train_ppo.main(words(output, "--num-iterations", 2))
    shown = capsys.readouterr().out
    (row,) = [line.split() for line in shown.splitlines() if line.startswith("  teacher ")]
    assert row[1] == str(tmp_path / "teacher")
    assert "warning: nothing can be learned" not in shown and "hacks" not in shown
    run = RunRecord.read(output)
    assert run.data["teacher_files"].keys() >= {"model.safetensors", "tokenizer.json"}
    assert "Reward: teacher " in (output / "README.md").read_text(encoding="utf-8")
    evaluate_generations.main(["--model-path", str(output), "--output", str(tmp_path / "page"), "--num-prompts", "3"])
    train_ppo.main(words(tmp_path / "checked", "--check"))
    shown = capsys.readouterr().out
    assert "first KL" in shown and "FAILED" not in shown
