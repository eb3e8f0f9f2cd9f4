"""Tests of dynamic sampling: groups with equal scores are replaced by groups of other prompts."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import train_grpo
import train_rloo
from rlhf.algorithms.normalizer import ScoreNormalizer
from rlhf.analysis.curves import read_curves, write_table
from rlhf.analysis.equal_budget import read_eval_points
from rlhf.callbacks.incidents import BATCH_FILE, save_incident
from rlhf.checkpoints.manifest import find_checkpoints
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import make_config
from rlhf.data.prompts import ids_alone
from rlhf.rewards.rewards import Rewards
from rlhf.rewards.scores import Scores
from rlhf.rollout.completions import Completions
from rlhf.setup.plan import budget
from rlhf.trainer.state import load_trainer_state, save_trainer_state

SCRIPTS = {"grpo": train_grpo, "rloo": train_rloo}
WITH_GROUPS = ["grpo", pytest.param("rloo", marks=pytest.mark.ci)]
CPU = torch.device("cpu")


def rewards_of(build, function, **more):
    return Rewards([function], None, build().processing_class, **more)


def by_prompt(prompts, completion_ids, **_):
    """Equal scores within a group for two prompts of three, otherwise the sum of the completion's ids."""
    return [1.0 if sum(map(ord, p)) % 3 else float(sum(ids)) for p, ids in zip(prompts, completion_ids, strict=True)]


def kept_prompts(batch) -> list[str]:
    return [p.example.messages[-1]["content"] for p in batch.prompts]


class Recorder:
    def __init__(self):
        self.batches = []
        self.scores = []

    def on_batch(self, update, batch, scores):
        self.batches.append(batch)
        self.scores.append(scores)


# --- parts -----------------------------------------------------------------------------------------------------------


def test_equal_groups_by_hand():
    """Groups of two: equal; different; one score; no score."""
    scores = torch.tensor([1.0, 1.0, 1.0, 2.0, 3.0, math.nan, math.nan, math.nan])
    assert Scores([], {}, shaped=scores).equal_groups(2).tolist() == [True, False, True, True]


def completions_of(prompts: list[tuple[int, ...]], rows: list[list[int]], eos=2, pad=0) -> Completions:
    width = max(map(len, rows))
    ids = torch.tensor([row + [eos] * (width - len(row)) for row in rows])
    filters = torch.arange(ids.numel(), dtype=torch.uint8).view(*ids.shape, 1)
    given = [ids_alone(p) for p in prompts]
    return Completions.of(given, ids, eos=eos, pad=pad, vocabulary=8, allowed_tokens=filters,
                          sampled_logprobs=ids * 1.5 * (ids != eos))  # fmt: skip


def test_select_by_hand():
    """The selected rows equal those of a batch that has only them."""
    both = completions_of([(5,), (5,), (6, 7, 6), (6, 7, 6)], [[3, 2], [4, 4, 4, 2], [5, 5, 2], [2]])
    assert both.prompt_mask.sum(1).tolist() == both.prompt_lengths == [1, 1, 3, 3]
    assert both.rows() == [[3, 2], [4, 4, 4, 2], [5, 5, 2], [2]] and both.ended.tolist() == [True] * 4
    assert both.completion_lengths == [2, 4, 3, 1] and both.groups == [0, 0, 1, 1]
    chosen = both.select([2, 0])
    assert chosen.completion_ids.tolist() == [[5, 5, 2], [3, 2, 0]]
    assert chosen.prompt_ids.tolist() == [[6, 7, 6], [0, 0, 5]] and chosen.groups == [1, 0]
    assert chosen.sampled_logprobs.tolist() == [[7.5, 7.5, 0], [4.5, 0, 0]]
    assert chosen.allowed_tokens[:, :, 0].tolist() == [[8, 9, 10], [0, 1, 2]]
    narrow = both.select([0])
    assert narrow.prompt_ids.tolist() == [[5]] and narrow.mask.shape == (1, 2)


@dataclass
class WithOwnFields(Completions):
    """As a part of an episode that is added later."""

    marks: list[int] = field(default_factory=list)  # (B,)
    weights: torch.Tensor | None = None  # (B, T)
    engine: str = "slots"  # of all


def test_a_new_field_is_selected_with_the_others():
    of = completions_of([(5,)] * 3, [[3, 2], [4, 4, 2], [2]])
    both = WithOwnFields(**vars(of), marks=[1, 2, 3], weights=10.0 * of.completion_ids, engine="graph")
    chosen = both.select([2, 0])
    assert chosen.marks == [3, 1] and chosen.engine == "graph"
    assert chosen.weights.tolist() == [[20, 0], [30, 20]]


@dataclass
class WithRank(Scores):
    """Scores with a field that this project does not have."""

    rank: list[int] | None = None


def test_scores_and_logged_columns_stay_aligned():
    old = WithRank([1, 1, 2, 3], {"a": [1, 1, 2, 3], "b": [None] * 4}, {"x": ["p", "q", "r", "s"]}, {"m": 1.0},
                   torch.tensor([1.0, 1, 2, 3]), torch.tensor([0.0, 0, 1, 2]), rank=[4, 3, 2, 1])  # fmt: skip
    new = WithRank([7, 8], {"a": [7, 8], "b": [0.5, None]}, {"y": [10, 20]}, {"m": 2.0, "n": 3.0},
                   torch.tensor([7.0, 8]), torch.tensor([6.0, 7]), rank=[6, 5])  # fmt: skip
    both = old.joined(new, [4, 5, 2, 3])
    assert (both.total, both.rank) == ([7, 8, 2, 3], [6, 5, 2, 1])
    assert both.logged == {"m": pytest.approx((4 * 1 + 2 * 2) / 6), "n": 3.0}, "over all completions"
    assert both.raw.tolist() == [7, 8, 2, 3] and both.shaped.tolist() == [6, 7, 1, 2]
    assert both.by_function == {"a": [7, 8, 2, 3], "b": [0.5, None, None, None]}
    assert both.per_function == {"a": 5.0, "b": 0.5}
    assert both.extra == {"x": [None, None, "r", "s"], "y": [10, 20, None, None]}
    assert old.raw.tolist() == [1, 1, 2, 3], "the old scores are unchanged"


def test_normalizer_uses_the_estimates_of_the_first_draw():
    """Estimates of 1 and 3: mean 2, variance 2."""
    normalizer = ScoreNormalizer(0.5)
    normalizer([1.0, 3.0])
    state = normalizer.state_dict()
    assert normalizer.normalized([2.0, 4.0]) == pytest.approx([0.0, math.sqrt(2)])
    assert normalizer.state_dict() == state


def test_other_prompts_come_before_drawn_ones(build):
    sampler = build(algorithm="grpo").sampler
    prompts = sampler.by_topic[None]
    drawn = prompts[:-3]
    first = sampler.other_prompts(1, 2, drawn)
    assert {id(p) for p in first} <= {id(p) for p in prompts[-3:]} and len({id(p) for p in first}) == 2
    assert sampler.other_prompts(1, 2, drawn) == first, "without state"
    every = sampler.other_prompts(1, len(prompts) + 1, [*drawn, *drawn, prompts[-1]])
    assert {id(p) for p in every[:2]} == {id(p) for p in prompts[-3:-1]} and every[2] is prompts[-1]
    assert Counter(map(id, every[:-1])) == Counter(map(id, prompts)) and every[-1] is every[0]
    orders = {tuple(map(id, sampler.other_prompts(update, 9, []))) for update in (1, 2)}
    assert len(orders) == 2, "each update has another order"


@pytest.mark.parametrize(
    ("batch", "limit", "equal", "drawn"),
    [
        (8, 1, 5, 5),  # one for each
        (7, 2, 4, 6),  # 4 + 4 x 4/8
        (7, 3, 4, 7),  # 4 + 2 + 1
        (3, 2, 3, 6),  # 3 + 3 x 3/4, rounded up
        (7, 9, 0, 0),
        (7, 0, 4, 0),
        (1, 100, 1, 2),  # 1 + 1/2 + 1/4 and so on
    ],
)
def test_number_of_groups_to_draw_by_hand(build, batch, limit, equal, drawn):
    trainer = build("--batch-size", batch, "--minibatches", 1, "--dynamic-sampling", limit, algorithm="grpo")
    assert trainer.dynamic_sampler._groups_to_draw(equal) == drawn <= limit * equal


@pytest.mark.parametrize(("episodes", "drawn"), [(100, 4), (7, 4), (6, 3), (5, 3), (1, 1), (0, 0), (-3, 0)])
def test_episodes_limit_the_groups_to_draw(build, episodes, drawn):
    """Two prompts x 2 completions, all groups are equal: 2 + 2 x 2/3 groups, if as many episodes are left."""
    trainer = build("--episodes", 100, "--dynamic-sampling", 2, algorithm="grpo")
    trainer.progress.episodes = 100 - episodes
    assert trainer.dynamic_sampler._groups_to_draw(2) == drawn


# --- updates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", WITH_GROUPS)
@pytest.mark.parametrize("flags", [(), ("--top-p", 0.8), ("--no-packed",), ("--minibatches", 2)])
def test_groups_with_equal_scores_are_replaced(build, algorithm, flags):
    """The batch keeps its size and its other groups. The new ones are sampled at once, before any log-probs, which are
    those of the kept completions."""
    seen = []
    events = []

    def score(prompts, completion_ids, **_):
        seen.append(list(prompts))
        events.append("score")
        return by_prompt(prompts, completion_ids)

    recorder = Recorder()
    common = ("--batch-size", 4, "--K", 2, *flags)
    trainer = build(*common, "--dynamic-sampling", 9, algorithm=algorithm, rewards=rewards_of(build, score),
                    callbacks=[recorder])  # fmt: skip
    compute = trainer.passes.logprobs

    def logprobs(completions, *given, **named):
        events.append(completions.rows())
        return compute(completions, *given, **named)

    trainer.passes.logprobs = logprobs
    metrics = trainer.update_step(1)
    (batch,), (scores,) = recorder.batches, recorder.scores
    assert events == ["score", "score", batch.completions.rows()]
    first, drawn = seen
    assert len(first) == len(batch.prompts) == 8 and len(drawn) == trainer.progress.resampled_episodes > 0
    texts = kept_prompts(batch)
    assert scores.raw.tolist() == by_prompt(texts, batch.completions.rows())
    assert len(scores.by_function["score"]) == 8
    useful = iter([prompt for prompt in drawn[::2] if sum(map(ord, prompt)) % 3 == 0])
    expected = [p if sum(map(ord, p)) % 3 == 0 else next(useful, p) for p in first[::2]]
    assert texts[::2] == expected != first[::2], "in their order, as far as there are new ones"
    assert metrics["rewards/resampled_groups"] == len(drawn) / 2
    assert metrics["episodes"] == 8 + len(drawn) == trainer.host.state.episode == trainer.episodes
    fresh = build(*common, algorithm=algorithm)
    for name, value in zip(("logprobs", "ref_logprobs"), fresh.passes.logprobs(batch.completions), strict=False):
        assert_close(getattr(batch, name)[batch.mask], value[batch.mask], rtol=0, atol=1e-5)
    tokens = trainer.progress.completion_tokens
    assert tokens > int(batch.mask.sum()), "replaced completions count"
    assert metrics["policy/ratio"] == pytest.approx(1, abs=0.5)


@pytest.mark.parametrize("algorithm", WITH_GROUPS)
def test_first_step_of_a_mixed_rollout_has_ratio_1(build, algorithm):
    flags = ("--batch-size", 4, "--K", 2, "--dynamic-sampling", 3, "--ppo-epochs", 1)
    metrics = build(*flags, algorithm=algorithm, rewards=rewards_of(build, by_prompt)).update_step(1)
    assert metrics["rewards/resampled_groups"] > 0
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-6) and metrics["policy/clipfrac"] == 0


def test_groups_that_stay_equal_are_kept_and_counted(build):
    """Two prompts, three draws: 2 + 2 x 2/3 + 2 x 4/9 groups are sampled, and the advantages are 0."""
    recorder = Recorder()
    trainer = build("--dynamic-sampling", 3, algorithm="grpo", callbacks=[recorder],
                    rewards=rewards_of(build, lambda completions, **_: [1.0] * len(completions)))  # fmt: skip
    metrics = trainer.update_step(1)
    assert metrics["rewards/equal_groups"] == 1 and metrics["rewards/resampled_groups"] == 5
    assert metrics["episodes"] == 4 + 10 and trainer.progress.resampled_episodes == 10
    assert [id(p) for p in recorder.batches[0].prompts] == [id(p) for _, p in trainer.episodes_of(1)]
    assert float(recorder.batches[0].raw_advantages.abs().max()) == 0


@pytest.mark.parametrize("algorithm", WITH_GROUPS)
def test_advantages_of_an_equal_group_contain_only_the_kl(build, algorithm):
    """The first update changes the policy. In the second one all scores are equal, and the KL is in the reward."""
    recorder = Recorder()
    calls = []

    def score(completion_ids, **_):
        calls.append(1)
        return [float(sum(ids) % 7) if len(calls) == 1 else 1.0 for ids in completion_ids]

    flags = ("--dynamic-sampling", 2, "--kl-schedule", "fixed", "--learning-rate", "1e-2")
    for beta, largest in ((0.5, 0.0), (0.0, None)):
        calls.clear()
        trainer = build(*flags, "--kl-coef", beta, algorithm=algorithm, callbacks=[recorder],
                        rewards=rewards_of(build, score))  # fmt: skip
        trainer.update_step(1)
        assert trainer.update_step(2)["rewards/equal_groups"] == 1
        found = float(recorder.batches[-1].raw_advantages.abs().max())
        assert found > largest if largest is not None else found == 0


def test_groups_left_out_of_the_loss_are_replaced(build):
    """All completions are truncated, and their scores differ: the groups teach nothing, and are drawn again."""
    scores = rewards_of(build, lambda completion_ids, **_: [float(i) for i, _ in enumerate(completion_ids)])
    flags = ("--dynamic-sampling", 2, "--max-new-tokens", 2)
    trainer = build(*flags, "--mask-truncated-completions", algorithm="grpo", rewards=scores)
    metrics = trainer.update_step(1)
    assert metrics["completions/eos_rate"] == 0 and metrics["rewards/equal_groups"] == 0
    assert metrics["rewards/resampled_groups"] == 2 * 2, "2 + 2 x 2/3, rounded up"
    most = budget(trainer.config, 1).completion_tokens_at_most
    assert trainer.progress.completion_tokens == most == 3 * 4 * 2, "three times four completions of two tokens"
    assert build(*flags, algorithm="grpo", rewards=scores).update_step(1)["rewards/resampled_groups"] == 0


def test_speed_counts_everything_that_was_sampled(build):
    trainer = build("--dynamic-sampling", 1, algorithm="grpo",
                    rewards=rewards_of(build, lambda completions, **_: [1.0] * len(completions)))  # fmt: skip
    metrics = trainer.update_step(1)
    seconds = sum(metrics[f"time/{part}_s"] for part in ("rollout", "score", "update"))
    assert metrics["throughput/episodes_per_s"] * seconds == pytest.approx(8)
    assert metrics["throughput/tokens_per_s"] * seconds == pytest.approx(trainer.progress.completion_tokens)
    assert metrics["time/rollout_s"] > metrics["time/score_s"] > 0, "a draw is a rollout"


@pytest.mark.parametrize("algorithm", WITH_GROUPS)
def test_unequal_groups_are_not_sampled_again(build, algorithm):
    """A run in which no group is equal is the same as without dynamic sampling."""

    def unequal(completion_ids, **_):
        return [float(i) for i, _ in enumerate(completion_ids)]

    runs = []
    for flags in ((), ("--dynamic-sampling", 2)):
        trainer = build(*flags, algorithm=algorithm, rewards=rewards_of(build, unequal))
        trainer.update_step(1)
        runs.append([w.detach().clone() for w in trainer.host.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_topic_is_kept(build, tmp_path):
    file = tmp_path / "topics.jsonl"
    rows = [{"prompt": f"question {i} of {t}?", "topic": t} for t in ("cats", "dogs") for i in range(20)]
    file.write_text("\n".join(map(json.dumps, rows)))
    recorder = Recorder()
    trainer = build("--prompts", file, "--steps-per-topic", 1, "--dynamic-sampling", 2, algorithm="grpo",
                    callbacks=[recorder], rewards=rewards_of(build, by_prompt))  # fmt: skip
    for update in (1, 2):
        trainer.update_step(update)
    topics = [{p.example.topic for p in batch.prompts} for batch in recorder.batches]
    assert topics == [{trainer.sampler.topic_of(1)}, {trainer.sampler.topic_of(2)}] and topics[0] != topics[1]


def test_vllm_importance_weights_belong_to_their_completions(build, monkeypatch):
    """The sampler's log-probs of every completion are 0.25 below the trainer's, so each weight is exp(0.25)."""
    recorder = Recorder()
    trainer = build("--dynamic-sampling", 4, "--batch-size", 4, algorithm="grpo", callbacks=[recorder],
                    rewards=rewards_of(build, by_prompt))  # fmt: skip
    sample = trainer.collector.sample

    def as_vllm(*given, **named):
        rollout = sample(*given, **named)
        sampled = trainer.passes.logprobs(rollout.completions).logprobs - 0.25
        for episode, row in zip(rollout.episodes, sampled, strict=True):
            episode.sampled_logprobs = {0: row[: len(episode.ids)]}
        return trainer.collector.rollout(rollout.episodes)

    monkeypatch.setattr(trainer.collector, "sample", as_vllm)
    assert trainer.update_step(1)["rewards/resampled_groups"] > 0
    (batch,) = recorder.batches
    used = batch.mask & (batch.raw_advantages != 0)
    assert used.any()
    weights = (batch.advantages / batch.raw_advantages)[used]
    assert_close(weights, torch.full_like(weights, math.exp(0.25)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_score_in_a_new_group_skips_the_update_with_its_rollout(build, bad, tmp_path):
    calls = []
    skipped = []

    class Watch:
        def on_update_skipped(self, update, rollout, batch, reason):
            skipped.append((rollout, reason))

    def score(completion_ids, **_):
        calls.append(len(completion_ids))
        return [1.0 if len(calls) == 1 else bad] * len(completion_ids)

    trainer = build("--dynamic-sampling", 2, algorithm="grpo", callbacks=[Watch()], rewards=rewards_of(build, score))
    plain = [p for _, p in trainer.episodes_of(1)]
    trainer.update_step(1)
    ((rollout, reason),) = skipped
    assert reason.by_score and len(rollout.prompts) == 2 * 4 == trainer.progress.resampled_episodes
    assert rollout.logprobs is None
    save_incident(trainer, tmp_path, 1, rollout, None, reason)
    assert len((tmp_path / BATCH_FILE).read_text().splitlines()) == 8
    assert not {*map(id, rollout.prompts)} & {*map(id, plain)}, "the new groups are in the incident"


# --- checkpoints and budget ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", WITH_GROUPS)
def test_resumed_run_is_exact(build, tmp_path, algorithm):
    flags = ("--dynamic-sampling", 2, "--batch-size", 4, "--num-iterations", 4, "--normalize-scores")
    rewards = rewards_of(build, by_prompt)
    straight = build(*flags, algorithm=algorithm, rewards=rewards)
    for update in range(1, 5):
        metrics = straight.update_step(update)
        if update == 2:
            (tmp_path / "state").mkdir()
            straight.fix_text()
            save_trainer_state(straight, tmp_path / "state")
    resumed = build(*flags, algorithm=algorithm, rewards=rewards)
    load_trainer_state(resumed, tmp_path / "state")
    for update in (3, 4):
        again = resumed.update_step(update)
    timed = ("time/", "throughput/", "memory/")
    assert {k: v for k, v in again.items() if not k.startswith(timed)} == {
        k: v for k, v in metrics.items() if not k.startswith(timed)
    }
    assert resumed.progress.resampled_episodes == straight.progress.resampled_episodes > 0
    assert all(
        torch.equal(a, b)
        for a, b in zip(straight.host.model.parameters(), resumed.host.model.parameters(), strict=True)
    )


def command_flags(run_flags, tmp_path: Path, *more) -> list[str]:
    (tmp_path / "score.py").write_text(
        "def score(prompts, completion_ids, **_):\n"
        "    return [1.0 if len(str(p)) % 2 else float(sum(c)) for p, c in zip(prompts, completion_ids)]\n"
    )
    words = ["--rm-model", "none", "--reward-func", f"{tmp_path / 'score.py'}:score", "--batch-size", 4, "--K", 2]
    return run_flags(*words, "--eval-every", 2, "--save-every", 1, *more)


def test_episodes_is_a_budget_of_sampled_episodes(run_flags, tmp_path, capsys):
    """The run ends in the update in which 40 episodes are spent, and everything at its end is there."""
    train_grpo.main(command_flags(run_flags, tmp_path, "--episodes", 40, "--dynamic-sampling", 3))
    output = tmp_path / "run"
    record = RunRecord.read(output)
    curves = read_curves(output)
    spent = record.spent
    assert record.status == "finished" and record.plan.updates == 5 and spent.updates < 5
    assert spent.resampled_episodes > 0 and spent.episodes == 8 * spent.updates + spent.resampled_episodes
    assert 40 <= spent.episodes <= 46, "nothing is sampled after 40 episodes: at most 38, and then a batch of 8"
    length = record.flat_settings["max_new_tokens"]
    assert spent.completion_tokens <= record.plan.completion_tokens_at_most == 46 * length
    assert record.best.evaluations[-1]["update"] == spent.updates
    assert record.best.evaluations[-1]["episodes"] == spent.episodes
    counts = curves.scalars["episodes"]
    assert counts.values[-1] == spent.episodes and counts.updates[-1] == spent.updates
    points = read_eval_points(curves)
    assert [p.episodes for p in points] == [e["episodes"] for e in record.best.evaluations]
    assert points[0].episodes == 0
    write_table([curves], tmp_path / "table.csv", {output: "PPO"})
    assert f",{spent.updates},{spent.episodes}," in (tmp_path / "table.csv").read_text()
    printed = " ".join(capsys.readouterr().out.split())
    assert "dynamic sampling ends the run after 40 episodes, maybe in fewer updates" in printed
    assert f"update {spent.updates}/{spent.updates} |" in printed
    assert (output / f"checkpoint-{spent.updates}").is_dir() and (output / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("settings", "updates", "most"),
    [
        ({"num_iterations": 5}, 5, 5 * 12),
        ({"num_iterations": 5, "dynamic_sampling": 2}, 5, 3 * 5 * 12),
        ({"episodes": 96}, 8, 96),
        ({"episodes": 96, "dynamic_sampling": 2}, 8, 92 + 12),
        ({"episodes": 97, "dynamic_sampling": 2}, 9, 96 + 12),
        ({"episodes": 12, "dynamic_sampling": 2}, 1, 8 + 12),
        ({"episodes": 24, "dynamic_sampling": 1, "batch_size": 1}, 6, 20 + 4),
    ],
)
def test_the_limit_of_tokens_includes_draws(settings, updates, most):
    """Batches of 3 prompts with 4 completions of at most 7 tokens."""
    usual = {"batch_size": 3, "K": 4, "max_new_tokens": 7, "minibatches": 1}
    config = make_config(algorithm="grpo", **usual | settings)
    assert config.updates(prompts=100) == updates
    assert budget(config, updates).completion_tokens_at_most == 7 * most


def test_resume_of_a_run_that_has_spent_its_budget(run_flags, tmp_path, monkeypatch):
    """The process ends after the last checkpoint and before the run is finished."""
    from rlhf.run import session

    flags = command_flags(run_flags, tmp_path, "--episodes", 40, "--dynamic-sampling", 3)
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(session, "finish_run", lambda *_: {}["killed"])
        train_grpo.main(flags)
    before = find_checkpoints(tmp_path / "run", RunRecord.read(tmp_path / "run").id).newest / "model.safetensors"
    weights = before.read_bytes()
    train_grpo.main(["--resume", "--output", str(tmp_path / "run"), "--reward-func", f"{tmp_path / 'score.py'}:score"])
    record = RunRecord.read(tmp_path / "run")
    assert record.status == "finished" and record.plan.updates == 5 and record.spent.updates < 5
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights


def test_plan_says_how_many_episodes_may_be_drawn(run_flags, tmp_path, capsys):
    flags = command_flags(run_flags, tmp_path, "--num-iterations", 3, "--dynamic-sampling", 2, "--dry-run")
    train_grpo.main(flags)
    (budget,) = re.findall(r"3 updates x 8 = 24 episodes; [^,]*", " ".join(capsys.readouterr().out.split()))
    assert " 48 " in budget


def test_default_run_has_no_new_metrics(build):
    metrics = build(algorithm="grpo").update_step(1)
    assert "episodes" not in metrics and "rewards/resampled_groups" not in metrics
