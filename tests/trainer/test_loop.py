"""Tests of the training loop with every algorithm: first step, step counts, clipping, seeds, micro-batches, EOS and
callbacks."""

from __future__ import annotations

import functools
import json
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from transformers import TrainerCallback

from rlhf.algorithms.kl_control import LOWEST_BETA
from rlhf.algorithms.objectives import kl_k3
from rlhf.algorithms.table import ALGORITHMS
from rlhf.callbacks.base import Callback
from rlhf.callbacks.logging import ProgressLine
from rlhf.data.prompts import PromptSets
from rlhf.models.logprobs import backbone_of
from rlhf.models.packing import PackedMicroBatch
from rlhf.rewards.scores import Scores
from rlhf.rollout.completions import Rollout
from rlhf.settings.fields import settings_of
from rlhf.settings.training import Config
from rlhf.trainer.metrics import rollout_metrics
from rlhf.trainer.state import load_trainer_state, save_trainer_state
from rlhf.utils.console import Screen
from rlhf.utils.errors import RunError
from tests.conftest import BY_TIER, LEARN_FROM_ALL, attach, whole_gradient


@pytest.fixture(params=BY_TIER)
def make(build, request):
    """`build` for each algorithm: 4 prompts, or 2 prompts x 2 completions."""
    return functools.partial(build, algorithm=request.param)


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: w.detach().clone() for name, w in trainer.host.model.named_parameters()}


def largest_difference(one: dict, other: dict) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("flags", [(), ("--use-lora",), ("--bf16",), ("--top-p", "0.7"), ("--top-k", "9")])
def test_first_step_has_ratio_1_and_zero_kl(make, flags):
    trainer = make("--ppo-epochs", "1", *flags)
    logged = trainer.update_step(1)
    per_token = 1e-3 if "--bf16" in flags else 1e-6
    assert logged["policy/ratio"] == pytest.approx(1, abs=1e-6)
    assert logged["policy/approx_kl"] == pytest.approx(0, abs=1e-9)
    assert logged["policy/clipfrac"] == 0
    assert abs(logged["kl_divergence/token"]) <= per_token
    assert abs(logged["kl_divergence/k3"]) <= per_token * logged["completions/mean_length"]


def test_completions_are_scored_before_any_log_probs(make, monkeypatch):
    order = []
    trainer = make(rewards=[lambda completions, **_: order.append("score") or [1.0] * len(completions)])
    for owner, name in ((trainer.reference, "logprobs"), (trainer.actor, "forward_heads")):
        compute = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, of=name, run=compute, **k: order.append(of) or run(*a, **k))
    trainer.update_step(1)
    assert order[0] == "score" and order.count("score") == 1 and {"logprobs", "forward_heads"} <= {*order}


def test_kl_grows_when_the_policy_changes(make):
    trainer = make("--learning-rate", "3e-3")
    assert trainer.update_step(1)["kl_divergence/k3"] < 1e-6
    assert trainer.update_step(2)["kl_divergence/k3"] > 1e-3


@pytest.mark.parametrize(("updates", "epochs", "minibatches"), [(2, 2, 1), (2, 3, 2), (1, 2, 4)])
def test_optimizer_steps_are_updates_x_epochs_x_minibatches(make, updates, epochs, minibatches):
    trainer = make("--num-iterations", updates, "--ppo-epochs", epochs, "--minibatches", minibatches)
    steps = []
    step = trainer.host.optimizer.optimizer.step
    trainer.host.optimizer.optimizer.step = lambda *a, **k: (steps.append(1), step(*a, **k))[1]
    trainer.train()
    assert len(steps) == trainer.progress.optimizer_steps == updates * epochs * minibatches


def test_fewer_prompts_than_a_batch_does_not_hang(make):
    """The scripts reject this, but the Python API allows it."""
    full = make()
    three = PromptSets(train=full.train_prompts[:3], evaluation=full.evaluation_prompts, too_long=0)
    trainer = make("--num-iterations", "1", prompts=three)
    assert len(trainer.train_prompts) == 3
    assert trainer.update_step(1)["optimizer_steps"] == 2


def test_gradient_norm_is_clipped(make):
    """With plain SGD the weights move by learning rate x gradient. The gradient norm is clipped to 1e-3."""
    trainer = make("--ppo-epochs", "1", "--max-grad-norm", "1e-3")
    trainer.host.optimizer.optimizer = torch.optim.SGD(trainer.host.model.parameters(), lr=1.0)
    before = weights(trainer)
    logged = trainer.update_step(1)
    after = weights(trainer)
    distance = torch.stack([(after[n] - before[n]).norm() for n in before]).norm()
    assert logged["policy/grad_norm"] > 1e-2, (
        "the gradient before clipping must be larger, otherwise nothing is clipped"
    )
    assert float(distance) == pytest.approx(1e-3, rel=1e-2)


def test_same_seed_gives_identical_weights_and_another_seed_does_not(make):
    runs = []
    for seed in (7, 7, 8):
        trainer = make("--seed", seed, "--minibatches", "2")
        torch.manual_seed(len(runs))  # the global random state must have no effect
        trainer.train()
        runs.append(weights(trainer))
    assert largest_difference(runs[0], runs[1]) == 0
    assert largest_difference(runs[0], runs[2]) > 0


OF_ONE_ALGORITHM = {
    "grpo": [f"--loss-type {name}" for name in settings_of(Config)["loss_type"].choices],
    "rloo": ["--ppo-epochs 2 --kl-placement reward", "--ppo-epochs 2 --kl-placement loss"],
}


@pytest.mark.parametrize(
    ("algorithm", "flags"),
    [
        pytest.param(name, flags, marks=[] if name == "ppo" or flags else pytest.mark.ci)
        for name in ALGORITHMS
        for flags in OF_ONE_ALGORITHM.get(name, [""])
    ],
)
def test_micro_batch_size_does_not_change_the_result(build, algorithm, flags):
    """One SGD step with the whole minibatch, and with micro-batches of 1 and 3 completions. The completions have
    different lengths, so a mean of micro-batch means would differ."""
    updated = []
    for size in (0, 1, 3):
        more = ("--micro-batch-size", size, "--max-new-tokens", 24, "--entropy-coef", 0.5)
        trainer = build("--ppo-epochs", 1, *more, *flags.split(), algorithm=algorithm)
        trainer.host.optimizer.optimizer = torch.optim.SGD(trainer.host.model.parameters(), lr=1.0)
        trainer.update_step(1)
        updated.append(weights(trainer))
    assert largest_difference(updated[0], updated[1]) < 1e-6
    assert largest_difference(updated[0], updated[2]) < 1e-6


def batch_with_early_eos(trainer):
    """Return a rollout with an EOS as the third token of its first completion, and the batch made from it."""
    rollout: Rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    completions = rollout.completions
    completions.allowed_tokens = None
    completions.completion_lengths[0] = 3
    completions.turns[0] = [range(3)]
    completions.action_mask[0, 3:] = False
    completions.completion_ids[0, 2], completions.mask[0, 3:], completions.ended[0] = (
        trainer.processing_class.eos_token_id,
        False,
        True,
    )
    rollout.logprobs, rollout.ref_logprobs, rollout.values = trainer.passes.logprobs(completions)
    return rollout, trainer.advantages(rollout, torch.arange(1.0, 5.0))


@pytest.mark.parametrize("flags", [(), ("--use-lora", "--bf16")], ids=" ".join)
def test_shared_first_pass_does_not_change_the_weights(make, monkeypatch, flags):
    """The final weights are bit-identical if the first optimizer step repeats the forward pass of the rollout."""
    final_weights = []
    passes = []
    for shared in (True, False):
        trainer = make(*flags)
        count = []
        assert trainer.passes.share_first
        trainer.passes.share_first = shared
        with monkeypatch.context() as patch:
            forward = PackedMicroBatch.forward
            patch.setattr(
                PackedMicroBatch, "forward", lambda self, b, count=count, run=forward: count.append(1) or run(self, b)
            )
            trainer.update_step(1)
        final_weights.append(
            torch.cat([w.detach().flatten() for w in trainer.host.model.parameters() if w.requires_grad])
        )
        passes.append(len(count))
    assert torch.equal(*final_weights)
    assert passes[0] == passes[1] - 1


@pytest.mark.parametrize(
    "flags", [("--minibatches", 2), ("--micro-batch-size", 1), ("--gradient-checkpointing",)], ids=lambda f: f[0]
)
def test_pass_is_kept_only_if_it_covers_the_whole_first_step(make, flags):
    trainer = make(*flags)
    default = make()
    for one in (trainer, default):
        one.collector.collect(one.episodes_of(1), 1)
    assert (trainer.passes._kept is None, default.passes._kept is None) == (True, False)
    default.passes.logprobs(default.collector.sample(default.episodes_of(1), 1).completions)
    assert default.passes._kept is None, "of an evaluation"


def test_sampling_for_training_is_counted_where_it_is_done(make):
    """So no caller can forget the budget. Evaluations do not count."""
    trainer = make()
    trainer.evaluate()
    assert trainer.episodes == 0
    rollouts = [trainer.collector.collect(trainer.episodes_of(1), 1, purpose) for purpose in ("rollout", "other")]
    assert trainer.episodes == sum(len(rollout.prompts) for rollout in rollouts) > 0
    lengths = [length for rollout in rollouts for length in rollout.completions.completion_lengths]
    assert trainer.progress.completion_tokens == sum(lengths)


def test_kept_pass_is_used_once_and_only_for_its_completions(build):
    trainer = build()
    passes = trainer.passes
    completions = trainer.collector.collect(trainer.episodes_of(1), 1).completions
    order = passes._kept[1].micro_batch.rows
    assert sorted(order) == [0, 1, 2, 3]

    def kept(of, rows):
        """Run a pass over these rows, and return whether it is the kept one."""
        before = passes._kept and passes._kept[1].hidden
        (used,) = passes.over(of, rows, lambda found: [one.hidden is before for one in found], "a test")
        assert passes._kept is None
        return used

    assert not kept(replace(completions), order), "different completions with the same rows"
    passes.logprobs(completions, keep_first=True)
    assert not kept(completions, order[:2]) and not kept(completions, order), "the first pass frees it"
    passes.logprobs(completions, keep_first=True)
    assert passes._kept[1].hidden.requires_grad
    assert kept(completions, order) and not kept(completions, order)


@pytest.mark.parametrize("error", [None, ValueError])
def test_kept_pass_is_freed_after_a_skipped_update_and_after_an_error(build, error):
    trainer = build("--num-iterations", 3, "--eval-every", 100)
    kept = []

    class Bad:
        def on_batch(self, update, batch, scores):
            kept.append(trainer.passes._kept is not None)
            if error is not None:
                raise error("a test")
            batch.advantages.fill_(math.inf)

    trainer.add_callback(Bad())
    with pytest.raises(error) if error is not None else nullcontext():
        trainer.update_step(1)
    assert kept[0] and trainer.passes._kept is None


def test_loss_includes_eos_and_ignores_tokens_after_it(make):
    trainer = make("--top-p", "1")
    rollout, batch = batch_with_early_eos(trainer)
    base = whole_gradient(trainer, batch)[1]
    rollout.completions.completion_ids[0, 3:] = 17
    for values in (rollout.logprobs, rollout.ref_logprobs, rollout.values, batch.advantages, batch.returns):
        if values is not None:  # GRPO has no critic
            values[0, 3:] = 1e3
    assert_close(whole_gradient(trainer, batch)[1], base, rtol=0, atol=0)
    batch.logprobs[0, 2] += 0.1  # EOS itself
    assert float((whole_gradient(trainer, batch)[1] - base).abs().max()) > 1e-6


def test_the_only_allowed_token_has_probability_1(make):
    """Log-probs are those of the sampling, also if it is greedy throughout the run."""
    trainer = make("--top-k", "1")
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    assert rollout.mask.any() and not rollout.logprobs[rollout.mask].any()


def test_completion_without_eos_gets_the_penalty(make):
    trainer = make("--missing-eos-penalty", "2.5", rewards=[lambda completions, **_: [1.0] * len(completions)])
    rollout, _ = batch_with_early_eos(trainer)
    scored = trainer.collector.score(rollout)
    assert scored.raw.tolist() == [1.0] * 4
    assert scored.shaped.tolist() == [1.0 if ended else -1.5 for ended in rollout.completions.ended.tolist()]
    assert not rollout.completions.ended.all()


def test_controller_sets_beta_of_the_next_update(make):
    trainer = make("--num-iterations", "3", "--kl-horizon", "8", "--kl-target", "1/sequence", "--kl-coef", "0.5")
    attach(trainer)
    trainer.train()
    logged = [entry for entry in trainer.host.state.log_history if "kl_coef" in entry]
    expected = 0.5
    for entry in logged:
        assert entry["kl_coef"] == pytest.approx(expected)
        error = min(max(entry["kl_divergence"] - 1, -0.2), 0.2)
        expected *= 1 + error * 4 / 8
    assert logged[1]["kl_coef"] != 0.5


@pytest.mark.parametrize("algorithm", LEARN_FROM_ALL)
def test_score_rises_with_an_easy_reward_function(build, algorithm):
    """Thirty updates with a reward for the letter e: the training loop must learn."""

    def letters_e(completions, **_):
        return [text.count("e") / 4 for text in completions]

    trainer = build(
        "--num-iterations", 30, "--batch-size", 16, "--learning-rate", "1e-2", "--kl-coef", "0", "--kl-schedule",
        "fixed", "--temperature", "1", "--top-p", "1", "--eval-every", 30,
        rewards=[letters_e], algorithm=algorithm,
    )  # fmt: skip
    trainer.train()
    scores = [entry["rewards/mean"] for entry in trainer.host.state.log_history if "rewards/mean" in entry]
    assert sum(scores[-5:]) / 5 > 3 * sum(scores[:5]) / 5 + 0.1


def test_learning_rate_follows_the_cosine_schedule(make):
    trainer = make("--num-iterations", "4", "--learning-rate", "1e-3")
    rates = [trainer.update_step(update)["learning_rate"] for update in range(1, 5)]
    assert rates == pytest.approx([1e-3 * 0.5 * (1 + math.cos(math.pi * u / 4)) for u in range(4)])


@pytest.mark.parametrize(
    ("flags", "shares"),
    [
        (["--warmup-steps", 2, "--lr-schedule", "linear"], [0, 0.5, 1, 0.5]),
        (["--warmup-ratio", 0.5, "--lr-schedule", "linear"], [0, 0.5, 1, 0.5]),
        (["--warmup-steps", 2, "--lr-schedule", "constant"], [0, 0.5, 1, 1]),
        (["--warmup-steps", 1], [0, 1, 0.75, 0.25]),  # then cosine: 0.5 * (1 + cos(pi * u / 3))
    ],
)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_learning_rate_rises_in_the_warm_up(build, algorithm, flags, shares):
    trainer = build("--num-iterations", 4, "--learning-rate", "1e-3", *flags, algorithm=algorithm)
    rates = [trainer.update_step(update)["learning_rate"] for update in range(1, 5)]
    assert rates == pytest.approx([1e-3 * share for share in shares])


def test_changed_weight_decay_of_a_resumed_run_acts(build, tmp_path):
    first = build("--weight-decay", 0.1)
    first.update_step(1)
    first.fix_text()
    save_trainer_state(first, tmp_path)
    resumed = build("--weight-decay", 0.5)
    load_trainer_state(resumed, tmp_path)
    assert {group["weight_decay"] for group in resumed.host.optimizer.param_groups} == {0.0, 0.5}


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit"])
def test_weight_decay_shrinks_matrices_but_not_norms_and_biases(build, algorithm, optim):
    """Without a score, all gradients are 0: two steps multiply each matrix by (1 - 0.01 * 0.5)^2 = 0.990025."""
    trainer = build(
        "--learning-rate", 0.01, "--weight-decay", 0.5, "--kl-placement", "none", "--optim", optim,
        algorithm=algorithm, rewards=[lambda completions, **_: [None] * len(completions)],
    )  # fmt: skip
    before = {name: weight.detach().clone() for name, weight in trainer.host.model.named_parameters()}
    trainer.update_step(1)
    excluded = [name for name in before if "norm" in name or name.endswith("bias")]
    assert 0 < len(excluded) < len(before)
    for name, weight in trainer.host.model.named_parameters():
        factor = 1 if name in excluded else 0.990025
        torch.testing.assert_close(weight.detach(), before[name] * factor, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_eight_bit_adam_quantizes_matrices_but_not_embeddings_and_small_weights(build, wide_model, algorithm):
    trainer = build("--optim", "adamw_8bit", "--actor-model", wide_model, algorithm=algorithm)
    trainer.update_step(1)
    embeddings = trainer.actor.policy.get_input_embeddings().weight
    kinds = {True: 0, False: 0}
    for weight, state in trainer.host.optimizer.optimizer.state.items():
        quantized = weight.numel() >= 4096 and weight is not embeddings
        assert state["state1"].dtype == state["state2"].dtype == (torch.uint8 if quantized else torch.float32)
        kinds[quantized] += 1
    assert min(kinds.values()) > 0


def test_eight_bit_adam_is_close_to_adam(build, wide_model):
    """The first step of Adam moves each weight by the learning rate. Later steps differ by the moments' rounding."""
    moved = {}
    for optim in ("adamw", "adamw_8bit"):
        trainer = build("--optim", optim, "--actor-model", wide_model, algorithm="grpo")
        before = torch.cat([w.detach().flatten().clone() for w in trainer.host.model.parameters()])
        for update in (1, 2):
            trainer.update_step(update)
        moved[optim] = torch.cat([w.detach().flatten() for w in trainer.host.model.parameters()]) - before
    likeness = torch.nn.functional.cosine_similarity(*moved.values(), dim=0)
    assert 0.95 < float(likeness) < 1 - 1e-6


def test_eight_bit_trainers_keep_no_earlier_weights(build):
    """transformers adds embeddings to a list of the process; each of our optimizers has a separate one."""
    import bitsandbytes

    first, second = (build("--optim", "adamw_8bit", algorithm="grpo") for _ in range(2))
    shared = bitsandbytes.optim.GlobalOptimManager.get_instance()
    assert shared.module_weight_config_triple == []
    for trainer in (first, second):
        own = trainer.host.optimizer.optimizer.mng
        assert own is not shared
        assert [m for m, *_ in own.module_weight_config_triple] == [trainer.actor.policy.get_input_embeddings()]


def test_eight_bit_adam_without_bitsandbytes_is_one_line(build, monkeypatch, user_error):
    monkeypatch.setattr("rlhf.setup.load_inputs.is_bitsandbytes_available", lambda: False)
    with user_error("--optim adamw_8bit", "pip"):
        build("--optim", "adamw_8bit")


def test_entropy_bonus_lowers_the_loss_by_coefficient_times_entropy(make):
    losses = {}
    grads = {}
    for coef in (0.0, 0.5):
        trainer = make("--entropy-coef", coef)
        rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
        batch = trainer.advantages(rollout, torch.arange(4.0))
        stats, grads[coef] = whole_gradient(trainer, batch)
        losses[coef], entropy = float(stats["loss"]), float(stats["policy/entropy"])
    assert losses[0.5] == pytest.approx(losses[0.0] - 0.5 * entropy, rel=1e-5)
    assert float((grads[0.5] - grads[0.0]).abs().max()) > 1e-5, "the entropy bonus must have a gradient"


def test_rollout_metrics_match_values_computed_by_hand(make):
    trainer = make()
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    mask = torch.zeros_like(rollout.mask)
    mask[0, :2], mask[1:, :1] = True, True  # five tokens in four completions
    rollout.completions.action_mask, rollout.completions.ended = mask, torch.tensor([True, False, False, False])
    rollout.completions.turns = [[range(2)], *([[range(1)]] * 3)]
    rollout.logprobs, rollout.ref_logprobs = torch.zeros_like(rollout.logprobs), torch.zeros_like(rollout.logprobs)
    rollout.logprobs[0, :2] = torch.tensor([0.5, 0.25])
    batch = trainer.advantages(rollout, torch.ones(4))
    scores = torch.tensor([1.0, 3, 1, 3])
    metrics = rollout_metrics(batch, Scores(scores.tolist(), {}, raw=scores, shaped=scores), 1)
    assert metrics["kl_divergence"] == pytest.approx(0.75 / 4)
    assert metrics["kl_divergence/token"] == pytest.approx(0.75 / 5)
    k3 = (math.exp(-0.5) - 1 + 0.5) + (math.exp(-0.25) - 1 + 0.25)
    assert metrics["kl_divergence/k3"] == pytest.approx(k3 / 4)
    assert (metrics["completions/mean_length"], metrics["completions/eos_rate"]) == (1.25, 0.25)
    assert (metrics["rewards/mean"], metrics["rewards/std"]) == (2.0, 1.0)


class EventRecorder(Callback):
    """Records the events that it receives."""

    def __init__(self):
        self.events = []

    def on_update_end(self, update, metrics):
        self.events.append(("update", update, metrics["rewards/mean"]))

    def on_evaluation(self, evaluation):
        self.events.append(("evaluation", evaluation.update))

    def on_epoch_end(self, epoch, metrics):
        self.events.append(("epoch", epoch, metrics["rewards/mean"]))

    def on_train_end(self):
        self.events.append(("end",))


def test_callbacks_receive_updates_evaluations_and_epochs(make):
    """An epoch is two updates. Its metrics are the means of the metrics of its updates."""
    recorder = EventRecorder()
    epoch_numbers = []
    batch = ("--batch-size", 2, "--max-prompts", 4, "--num-iterations", 5, "--eval-every", 3)
    trainer = make(*batch, callbacks=[recorder, lambda epoch, metrics: epoch_numbers.append(epoch)])
    final = trainer.train()
    kinds = [(kind, n) for kind, n, *_ in [(*t, None) for t in recorder.events]]
    assert kinds == [("evaluation", 0), ("update", 1), ("update", 2), ("epoch", 1), ("update", 3), ("evaluation", 3),
                     ("update", 4), ("epoch", 2), ("update", 5), ("evaluation", 5), ("end", None)]  # fmt: skip
    means = {n: mean for kind, n, mean in [t for t in recorder.events if len(t) == 3] if kind == "update"}
    epochs = [t[2] for t in recorder.events if t[0] == "epoch"]
    assert epochs == pytest.approx([(means[1] + means[2]) / 2, (means[3] + means[4]) / 2])
    assert epoch_numbers == [1, 2]
    assert final["rewards/mean"] == means[5] and "eval/score" in final


def test_normalize_scores_normalises_the_scores(make):
    """Scores 3, 3, 5, 9: mean 5, variance 8. With a decay of 0 only the current batch counts."""
    score_batches = iter([[3.0, 3, 5, 9], [4.0, 4, 6, 10]])
    trainer = make("--normalize-scores", "--score-ema", 0, rewards=[lambda **_: next(score_batches)])
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    first = trainer.collector.score(rollout)
    second = trainer.collector.score(rollout)
    assert first.raw.tolist() == [3, 3, 5, 9], "raw scores, which are logged, are not normalised"
    assert_close(first.shaped, torch.tensor([-2.0, -2, 0, 4]) / 8**0.5)
    assert_close(second.shaped, first.shaped)


@pytest.mark.parametrize("drift", [0.0, 3.0, -40.0])
def test_drifting_scores_do_not_change_their_scale(make, drift):
    """Scores rise or fall by a constant in each update. With the normaliser, the differences between the scores that
    the algorithm receives are those of scores with variance 1, and its advantages depend on these scores only."""
    base = [0.0, 1.0, 2.0, 5.0]
    updates = iter(range(40))
    trainer = make(
        "--normalize-scores",
        "--kl-placement",
        "none",
        rewards=[lambda **_: [b + drift * u for u in [next(updates)] for b in base]],
    )
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    for _ in range(40):
        shaped = trainer.collector.score(rollout).shaped
    deviation = (14 / 3) ** 0.5  # of 0, 1, 2, 5 (mean 2)
    expected = (torch.tensor(base) - 2) / deviation
    assert_close(shaped - shaped.mean(), expected, atol=1e-4, rtol=1e-4)
    found = trainer.advantages(rollout, shaped).raw_advantages
    assert_close(found, trainer.advantages(rollout, expected + shaped.mean()).raw_advantages, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("placement", ["reward", "loss", "none"])
def test_beta_changes_the_weights_unless_kl_placement_is_none(make, placement):
    """The reference model is changed, so the KL is above 0 from the first update."""
    updated = {}
    for beta in (1e-3, 2.0):
        trainer = make("--kl-placement", placement, "--num-iterations", 1)
        trainer.set_kl_coef(beta)
        with torch.no_grad():
            next(trainer.reference.copy.parameters()).mul_(0.5)
        logged = trainer.update_step(1)
        assert logged["kl_divergence/k3"] > 1e-3, "the KL is logged for every placement"
        assert logged["kl_coef"] == (0 if placement == "none" else pytest.approx(beta))
        updated[beta] = weights(trainer)
    assert (largest_difference(updated[1e-3], updated[2.0]) > 0) == (placement != "none")


def test_kl_in_the_loss_moves_the_policy_towards_the_reference_model(make):
    """One SGD step with advantages of 0 reduces the KL to a changed reference model."""
    flags = ("--kl-placement", "loss", "--kl-schedule", "fixed", "--kl-coef", "1", "--ppo-epochs", 1)
    trainer = make(*flags, rewards=[lambda completions, **_: [0.0] * len(completions)])
    trainer.host.optimizer.optimizer = torch.optim.SGD(trainer.host.model.parameters(), lr=0.1)
    with torch.no_grad():
        for weight in trainer.reference.copy.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    batch = trainer.advantages(rollout, torch.zeros(4))
    batch.advantages.zero_()  # only the KL penalty acts

    def kl() -> float:
        logprobs, ref_logprobs, _ = trainer.passes.logprobs(rollout.completions)
        return float(kl_k3(logprobs, ref_logprobs, rollout.mask).sum())

    before = kl()
    trainer.policy_optimizer.run(batch, 1)
    assert kl() < 0.99 * before


def test_beta_rises_again_from_its_minimum_with_kl_in_the_loss(make):
    """The KL is below its target until beta reaches its minimum. The KL is still logged, and beta rises again."""
    flags = ("--kl-placement", "loss", "--kl-coef", "0.01", "--kl-target", "1000/sequence", "--kl-horizon", 1)
    trainer = make(*flags, "--num-iterations", 12)
    attach(trainer)
    trainer._begin()
    for update in range(1, 11):
        logged = trainer.update_step(update)
    assert trainer.kl_coef == LOWEST_BETA
    assert logged["kl_divergence/k3"] > 0
    trainer.adjust_beta(11, {**logged, "kl_divergence": 2000.0})
    assert trainer.kl_coef == pytest.approx(LOWEST_BETA * (1 + 0.2 * 4 / 1))
    assert trainer.config.kl.coef_in("loss", trainer.kl_coef) == trainer.kl_coef


def test_reference_model_runs_once_per_rollout(make):
    """Also with GRPO: TRL's second pass and second copy of the reference model are not used."""
    for placement in ("reward", "loss", "none"):
        trainer = make("--kl-placement", placement, "--ppo-epochs", 2)
        passes = []
        backbone_of(trainer.reference.copy).embed_tokens.register_forward_hook(lambda *_, seen=passes: seen.append(1))
        trainer.update_step(1)
        assert len(passes) == 1
        assert getattr(trainer, "ref_model", None) in (None, trainer.reference.copy)


class Kept(Callback):
    def __init__(self):
        self.batches = []

    def on_batch(self, update, batch, scores):
        self.batches.append(batch)


FIXED = "--kl-schedule fixed --kl-coef"


@pytest.mark.parametrize(
    ("flags", "every"),
    [
        ("", 1),
        ("--kl-placement loss", 1),
        (f"{FIXED} 0.1", 1),
        (f"--kl-placement loss {FIXED} 0.1", 1),
        (f"{FIXED} 0", 8),
        (f"--kl-placement loss {FIXED} 0", 8),
        ("--kl-placement none", 8),
        ("--kl-placement none --record-tokens", 1),
    ],
)
def test_a_kl_that_is_only_logged_is_that_of_an_eighth_of_the_completions(make, monkeypatch, flags, every):
    """The weights are bit-identical to those of a run in which the reference scores all completions. With 10 prompts,
    or 5 x 2 completions, the rows are 0 and 8."""
    runs = []
    prompts = 10 if ALGORITHMS[make.keywords["algorithm"]].group_size == 1 else 5
    for own in (True, False):
        kept = Kept()
        trainer = make("--batch-size", prompts, "--learning-rate", "1e-3", *flags.split(), callbacks=[kept])
        scored = []
        reference = trainer.reference.logprobs

        def logprobs(micro_batch, *given, scored=scored, run=reference):
            scored += micro_batch.rows
            return run(micro_batch, *given)

        trainer.reference.logprobs = logprobs
        with monkeypatch.context() as patch:
            if not own:
                patch.setattr(Config, "reference_every", lambda *_: 1)
            trainer.update_step(1)
            scored.clear()
            metrics = trainer.update_step(2)
        turns = kept.batches[-1].completions.turns  # none of greedy completions
        assert sorted(scored) == [row for row in range(0, 10, every if own else 1) if turns[row]]
        runs.append((weights(trainer), metrics, kept.batches[-1]))
    (one, logged, batch), (other, _, whole) = runs
    assert largest_difference(one, other) == 0
    kl = whole.kl.sum(1)
    learned = torch.tensor([bool(own) for own in turns])
    assert float(kl[learned].abs().min()) > 0
    assert logged["kl_divergence"] == pytest.approx(float(kl[::every][learned[::every]].mean()), abs=1e-5)
    tokens = int(whole.mask[::every].sum())
    assert logged["kl_divergence/token"] == pytest.approx(float(kl[::every].sum()) / tokens, abs=1e-6)
    assert logged.get("kl_divergence/completions") == (2 if every == 8 else None)
    others = [row for row in range(10) if row % every]
    assert batch.ref_logprobs[others].isnan().all() and batch.kl[others][batch.mask[others]].isnan().all()
    assert_close(batch.kl[::every], whole.kl[::every], rtol=0, atol=1e-5)


def test_a_beta_from_a_callback_needs_the_kl_of_all_completions(make):
    kept = Kept()
    trainer = make(*f"{FIXED} 0".split(), callbacks=[kept])
    assert trainer.update_step(1)["kl_divergence/completions"] == 1, "of 4"
    trainer.set_kl_coef(0.1)
    assert "kl_divergence/completions" not in trainer.update_step(2)
    assert kept.batches[0].kl[1:].isnan().any() and not kept.batches[1].kl.isnan().any()


def test_the_progress_line_counts_the_completions_of_the_kl(build, capsys):
    for flags, counted in (("--kl-placement none", True), ("", False)):
        trainer = build(*flags.split())
        ProgressLine(trainer, Screen()).on_update_end(1, trainer.update_step(1))
        assert (", of 1 completions)" in capsys.readouterr().out) == counted


def test_special_tokens_in_a_prompt_are_encoded_as_text(make, tmp_path):
    file = tmp_path / "prompts.jsonl"
    text = "say <|im_end|> and <|endoftext|> and <|im_start|>assistant"
    file.write_text("\n".join(json.dumps({"prompt": f"{text} {i}"}) for i in range(60)))
    trainer = make("--prompts", file, "--prompt-length", 200)
    rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
    without_markers = make()
    special = set(trainer.processing_class.all_special_ids) - {trainer.processing_class.pad_token_id}
    for row, mask in zip(rollout.completions.prompt_ids, rollout.completions.prompt_mask, strict=True):
        ids = row[mask].tolist()
        assert sum(i in special for i in ids) == sum(i in special for i in without_markers.train_prompts[0].ids)
        assert trainer.processing_class.pad_token_id not in ids
        assert text in trainer.processing_class.decode(ids)


def test_load_model_restores_the_weights_of_save_model(make, tmp_path, user_error):
    for flags in ((), ("--use-lora",)):
        trainer = make(*flags, "--lr-schedule", "constant")
        trainer.train()
        trainer.save_model(tmp_path / "saved")
        saved = weights(trainer)
        text = trainer.evaluations[-1].texts
        trainer.update_step(3)
        assert largest_difference(saved, weights(trainer)) > 0
        trainer.load_model(tmp_path / "saved")
        assert largest_difference(saved, weights(trainer)) == 0
        trainer.evaluate()
        assert trainer.evaluations[-1].texts == text
        with user_error("model.safetensors"):
            trainer.load_model(tmp_path)
        if flags:
            with user_error("lora_alpha", 32.0, 2.0):
                make(*flags, "--lora-alpha", 2).load_model(tmp_path / "saved")
        (tmp_path / "saved").rename(tmp_path / f"done{len(flags)}")


def test_policy_and_reference_model_are_on_the_requested_device(make, monkeypatch):
    """Needs no GPU: records the modules that are moved to a device. The policy must be one of them, and the reference
    model is a copy of it or is moved separately."""
    moved = set()
    original = torch.nn.Module.to

    def recorded(module, *args, **kwargs):
        moved.add(id(module))
        return original(module, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "to", recorded)
    trainer = make()
    assert id(trainer.actor.policy) in moved, "the policy was not moved to a device"
    devices = {w.device for m in (trainer.actor.policy, trainer.reference.copy) for w in m.parameters()}
    assert devices == {trainer.host.accelerator.device}


def test_transformers_callbacks_work_and_invalid_callbacks_are_rejected(make, user_error):
    class LogCounter(TrainerCallback):
        logged = 0

        def on_log(self, args, state, control, **_):
            LogCounter.logged += 1

    with user_error("callbacks", "on_train_begin"):
        make(callbacks=[object()])
    make("--num-iterations", 1, callbacks=[LogCounter()]).train()
    assert LogCounter.logged == 3, "two evaluations and one update"


def test_second_call_of_train_is_rejected(make, user_error):
    trainer = make("--num-iterations", 1)
    trainer.train()
    with user_error("train()", 1, kind=RunError):
        trainer.train()


def test_evaluating_other_prompts_adds_nothing_to_the_history(make, user_error):
    trainer = make()
    metrics = trainer.evaluate(["What is a cat?", [{"role": "user", "content": "And a dog?"}]])
    assert {"eval/score", "eval/kl_divergence", "eval/perplexity"} <= set(metrics)
    assert trainer.evaluations == [] and trainer.host.state.log_history == []
    assert metrics == trainer.evaluate(["What is a cat?", "And a dog?"]), "the same random numbers"
    with user_error(100):
        trainer.evaluate(["word " * 200])


def test_optimizer_steps_read_the_device_once_each(make, monkeypatch):
    """On a GPU each read waits for all queued work. Agreed: one read per optimizer step, which protects the weights,
    and one per update for its statistics."""
    reads = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "nonzero"):
        original = getattr(torch.Tensor, name)

        def counted(tensor, *args, name=name, original=original, **kwargs):
            reads.append(name)
            return original(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    trainer = make("--ppo-epochs", 2, "--minibatches", 2)
    run = trainer.policy_optimizer.run

    def recorded(*arguments):
        reads.clear()
        result = run(*arguments)
        found.append(list(reads))
        return result

    found = []
    trainer.policy_optimizer.run = recorded
    trainer.update_step(1)
    assert found == [["tolist"] * (4 + 1)]
