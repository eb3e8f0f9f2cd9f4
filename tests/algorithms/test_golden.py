"""Golden tests: updates match TRL's PPOTrainer, GRPOTrainer and RLOOTrainer for the same prompts and completions."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
import trl.experimental.ppo.ppo_trainer as trl_ppo
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

import rlhf.models.trl_ppo  # noqa: F401  (silences TRL's warning that its PPO is experimental)
from rlhf.data.chat_template import encode_prompt, encode_text
from rlhf.data.prompts import Prompt, PromptSets
from rlhf.data.row import Example
from rlhf.data.tokenizer import load_tokenizer
from rlhf.models.actor_critic import with_value_head
from rlhf.rollout import sampler
from rlhf.rollout.completions import Completions
from rlhf.trainer.trl_host import _SharedBackboneCritic

BATCH = 4
LENGTH = 8
UPDATES = 3
EPOCHS = 2
SETTINGS = {"kl_coef": 0.3, "cliprange": 0.2, "vf_coef": 0.5, "cliprange_value": 0.2, "gamma": 0.97, "lam": 0.9}
FLAGS = [
    "--kl-coef", "0.3", "--kl-schedule", "fixed", "--value-coef", "0.5", "--gamma", "0.97", "--lam", "0.9",
    "--temperature", "0.7", "--top-p", "1", "--max-grad-norm", "1e9", "--lr-schedule", "constant",
    "--batch-size", str(BATCH), "--ppo-epochs", str(EPOCHS), "--max-new-tokens", str(LENGTH),
    "--num-iterations", str(UPDATES),
]  # fmt: skip


def make_prompts(tokenizer) -> list[Prompt]:
    questions = ["the cat", "what is the capital of France?", "justify your steps", "numbers 1 2 3 4 5"]
    examples = [Example(messages=({"role": "user", "content": q},)) for q in questions]
    return [Prompt(tuple(encode_prompt(tokenizer, e.messages)), e) for e in examples]


def round_trip_completion(tokenizer, rng: random.Random) -> list[int]:
    """Return LENGTH token ids that decoding and encoding preserve, so that both trainers score the same text."""
    words = "the cat is on a table and lies near Paris which helps you answer step by step with numbers".split()
    while True:
        ids = encode_text(tokenizer, " " + " ".join(rng.choices(words, k=LENGTH)))[:LENGTH]
        if len(ids) == LENGTH and encode_text(tokenizer, tokenizer.decode(ids)) == ids:
            return ids


class StockRun:
    """TRL's PPOTrainer with completions from a table. The critic has the policy's backbone or a separate one."""

    def __init__(
        self, monkeypatch, start_model, reward_folder, completions, tmp_path, dtype=torch.float32, critic="shared",
        **settings,
    ):  # fmt: skip
        self.tokenizer = load_tokenizer(str(start_model))
        self.prompts = make_prompts(self.tokenizer)
        # completions[update][prompt]
        self.completions = completions
        self.orders = []
        policy = AutoModelForCausalLM.from_pretrained(start_model, dtype=dtype)
        container = with_value_head(policy).to(dtype)
        monkeypatch.setattr(trl_ppo, "batch_generation", self.replay)
        self.trainer = trl_ppo.PPOTrainer(
            args=trl_ppo.PPOConfig(
                output_dir=str(tmp_path / "stock"), per_device_train_batch_size=len(self.prompts),
                total_episodes=len(completions) * len(self.prompts), learning_rate=1e-3, lr_scheduler_type="constant",
                temperature=0.7 - 1e-7,  # TRL adds 1e-7
                response_length=LENGTH, stop_token="eos", num_sample_generations=0, report_to="none",
                save_strategy="no", gradient_checkpointing=False, bf16=False, seed=3, **settings,
            ),
            processing_class=self.tokenizer,
            model=policy,
            ref_model=copy.deepcopy(policy),
            reward_model=AutoModelForSequenceClassification.from_pretrained(reward_folder, dtype=torch.float32),
            value_model=_SharedBackboneCritic(
                policy if critic == "shared" else copy.deepcopy(policy), container.v_head
            ),
            train_dataset=Dataset.from_list([{"input_ids": list(p.ids)} for p in self.prompts]),
        )  # fmt: skip

    def replay(self, model, queries, _rows, pad, _generation):
        order = [next(i for i, p in enumerate(self.prompts) if list(p.ids) == [t for t in q if t != pad])
                 for q in queries.tolist()]  # fmt: skip
        completion = torch.tensor([self.completions[len(self.orders)][i] for i in order])
        self.orders.append(order)
        ids = torch.cat([queries, completion], 1)
        logits = trl_ppo.forward(model, ids, pad).logits[:, queries.shape[1] - 1 : -1] / 0.7
        return ids, logits


@pytest.fixture
def replayed(monkeypatch):
    """Return a function that makes our trainer use the prompts and completions of a finished StockRun."""

    def replay(trainer, stock: StockRun):
        def episodes_of(update):
            return [(i, stock.prompts[i]) for i in stock.orders[update - 1]]

        def sample(policy, prompts, uniform, sampling, *, eos, pad, **_):
            table = stock.completions[trainer.host.state.global_step]
            completion = torch.tensor([table[stock.prompts.index(p)] for p in prompts])
            return Completions.of(prompts, completion, eos=eos, pad=pad, vocabulary=len(stock.tokenizer))

        monkeypatch.setattr(trainer, "episodes_of", episodes_of)
        monkeypatch.setattr(sampler, "sample_completions", sample)
        monkeypatch.setattr(trainer, "evaluate", lambda: None)

    return replay


@pytest.mark.parametrize("critic", ["shared", pytest.param("separate", marks=pytest.mark.ci)])
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.ci)])
def test_three_updates_of_two_epochs_match_trl(
    monkeypatch, build, start_model, reward_folder, replayed, tmp_path, dtype, critic
):
    rng = random.Random(5)
    tokenizer = load_tokenizer(str(start_model))
    completions = [[round_trip_completion(tokenizer, rng) for _ in range(BATCH)] for _ in range(UPDATES)]
    stock = StockRun(
        monkeypatch,
        start_model,
        reward_folder,
        completions,
        tmp_path,
        dtype,
        critic,
        num_ppo_epochs=EPOCHS,
        **SETTINGS,
    )
    stock.trainer.train()

    policy = AutoModelForCausalLM.from_pretrained(start_model, dtype=dtype)
    prompts = PromptSets(train=stock.prompts, evaluation=stock.prompts, too_long=0)
    ours = build(*FLAGS, "--critic", critic, prompts=prompts, policy=policy)
    ours.host.model.to(dtype)
    replayed(ours, stock)
    logged = [ours.update_step(update) for update in range(1, UPDATES + 1)]

    trl_logged = [entry for entry in stock.trainer.state.log_history if "objective/kl" in entry]
    names = {
        "rewards/mean": "objective/scores",
        "kl_divergence": "objective/kl",
        "policy/loss": "loss/policy_avg",
        "value/loss": "loss/value_avg",
    }
    differences = {
        name: max(abs(ours[name] - trl[trl_name]) for ours, trl in zip(logged, trl_logged, strict=True))
        for name, trl_name in names.items()
    }
    print(f"largest differences from TRL in {dtype}:", differences)
    assert len(trl_logged) == UPDATES
    assert abs(trl_logged[-1]["objective/kl"]) > 1e-3, "the policy must change, otherwise the test proves nothing"
    # the float32 rounding error of a KL over 8 tokens varies between runs: 3.6e-7 to 1.1e-6 were observed
    assert max(differences.values()) <= (1e-6 if dtype == torch.float64 else 4e-6), differences


def test_score_is_placed_at_eos_and_not_one_position_later_as_in_trl(
    monkeypatch, build, start_model, reward_folder, replayed, tmp_path
):
    """A completion of two tokens (EOS at index 1) with V = 0, beta = 0, gamma = 0.5, lambda = 1 and one epoch.

    Ours puts the score s at EOS. The returns are s/2, s: value loss 0.5 * (1/4 + 1) / 2 * s^2 = 0.3125 s^2.
    TRL puts s one position after EOS, which is a value target, too. The returns are s/4, s/2, s:
                                                          value loss 0.5 * (1/16 + 1/4 + 1) / 3 * s^2 = 0.21875 s^2.
    """
    tokenizer = load_tokenizer(str(start_model))
    word = encode_text(tokenizer, " cat")[0]
    eos = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    completions = [[[word, eos, *[pad] * (LENGTH - 2)]] * BATCH]
    settings = {"kl_coef": 0.0, "gamma": 0.5, "lam": 1.0, "num_ppo_epochs": 1}
    stock = StockRun(monkeypatch, start_model, reward_folder, completions, tmp_path, **settings)
    stock.trainer.train()

    flags = [*FLAGS, "--kl-coef", "0", "--gamma", "0.5", "--lam", "1", "--ppo-epochs", "1", "--num-iterations", "1"]
    ours = build(
        *flags,
        prompts=PromptSets(train=stock.prompts, evaluation=stock.prompts, too_long=0),
        rewards=[lambda completions, **_: [2.0] * BATCH],
    )
    replayed(ours, stock)
    logged = ours.update_step(1)

    trl_logged = next(entry for entry in stock.trainer.state.log_history if "objective/kl" in entry)
    mean_square = mean_squared_score(stock)
    assert logged["value/loss"] == pytest.approx(0.3125 * 2.0**2, rel=1e-6)
    assert trl_logged["loss/value_avg"] == pytest.approx(0.21875 * mean_square, rel=1e-5)


def mean_squared_score(stock: StockRun) -> float:
    """Return the mean square of the reward model's scores in the stock run, computed without either trainer."""
    model = stock.trainer.reward_model
    squares = []
    for i, prompt in enumerate(stock.prompts):
        completion = [t for t in stock.completions[0][i] if t != stock.tokenizer.pad_token_id]
        with torch.no_grad():
            squares.append(model(torch.tensor([[*prompt.ids, *completion]])).logits.item() ** 2)
    return sum(squares) / len(squares)


# --- GRPO and RLOO ---------------------------------------------------------------------------------------------------


class StockRLOO(RLOOTrainer):
    """TRL's RLOOTrainer with completions from `rollout_func`."""

    def __init__(self, rollout_func, **kwargs):
        self.rollout_func = rollout_func
        super().__init__(**kwargs)

    def _generate(self, prompts: list):
        output = self.rollout_func(prompts, self)
        texts = self.processing_class.batch_decode(output["completion_ids"], skip_special_tokens=True)
        return output["prompt_ids"], output["completion_ids"], texts


STOCK = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (StockRLOO, RLOOConfig)}
STOCK_SETTINGS = {"grpo": {"beta": 0.0, "scale_rewards": "none"}, "rloo": {"beta": 0.0}}


class StockGroups:
    """TRL's GRPOTrainer or RLOOTrainer with the prompts, completions and scores of one of our runs."""

    def __init__(self, algorithm, start_model, tmp_path, rollouts: list, scores: list, **settings):
        self.rollouts = rollouts
        self.scores = scores
        self.index = -1
        tokenizer = load_tokenizer(str(start_model))
        episodes = len(rollouts[0].texts)
        trainer_class, config_class = STOCK[algorithm]
        self.trainer = trainer_class(
            model=AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32),
            reward_funcs=[self.score],
            args=config_class(
                output_dir=str(tmp_path / "stock"), generation_batch_size=episodes, num_generations=2,
                num_iterations=EPOCHS, learning_rate=1e-3,
                max_steps=UPDATES * EPOCHS * episodes // settings["per_device_train_batch_size"],
                lr_scheduler_type="constant",
                max_grad_norm=0.5, bf16=False, gradient_checkpointing=False, report_to="none", use_cpu=True,
                max_completion_length=LENGTH, save_strategy="no", **settings,
            ),
            train_dataset=Dataset.from_list([{"prompt": "x"}] * 8),
            processing_class=tokenizer,
            rollout_func=self.replay,
        )  # fmt: skip

    def replay(self, prompts, trainer) -> dict:
        self.index += 1
        rollout = self.rollouts[self.index]
        return {
            "prompt_ids": [list(p.ids) for p in rollout.prompts],
            "completion_ids": rollout.completions.rows(),
            "logprobs": [[0.0] * len(row) for row in rollout.completions.rows()],
        }

    def score(self, completions, **_) -> list[float | None]:
        return [None if math.isnan(score) else score for score in self.scores[self.index].tolist()]


GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence"}


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("", {"loss_type": "dapo"}),
        (
            "--kl-placement loss --kl-coef 0.4 --scale-rewards group --loss-type grpo",
            {"beta": 0.4, "scale_rewards": "group", "loss_type": "grpo"},
        ),
        (
            "--scale-rewards batch --loss-type dr_grpo --entropy-coef 0.1",
            {"scale_rewards": "batch", "loss_type": "dr_grpo", "entropy_coef": 0.1},
        ),
        ("--kl-placement loss --kl-coef 0.4 --minibatches 2", {"beta": 0.4}),
        ("--loss-type cispo", {"loss_type": "cispo", "epsilon_high": 1.2}),
        ("--loss-type gspo --minibatches 2", GSPO),
        # clipped ratios
        ("--clip-range 0.002", {"loss_type": "dapo", "epsilon": 0.002}),
        ("--loss-type cispo --clip-range 0.002", {"loss_type": "cispo", "epsilon_high": 1.002}),
        ("--loss-type gspo --clip-range 0.002", {**GSPO, "epsilon": 0.002}),
        # clip-higher and two-sided clipping
        ("--clip-range 0.002 --epsilon-high 0.05", {"loss_type": "dapo", "epsilon": 0.002, "epsilon_high": 0.05}),
        ("--clip-range 0.002 --delta 1.003 --minibatches 2", {"epsilon": 0.002, "delta": 1.003}),
        (
            "--clip-range 0.002 --delta 1.003 --loss-type gspo --minibatches 2",
            {**GSPO, "epsilon": 0.002, "delta": 1.003},
        ),
        ("--loss-type cispo --epsilon-high 0.002", {"loss_type": "cispo", "epsilon_high": 1.002}),
    ],
)
def test_three_updates_of_two_epochs_match_trls_grpo(compare_with_stock, flags, settings):
    """The weights equal TRL's with each loss type, a KL in the loss, scaled rewards, entropy bonus and clipping."""
    compare_with_stock("grpo", flags, settings)


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("", {}),
        ("--kl-placement reward --kl-coef 0.4", {"beta": 0.4}),
        ("--minibatches 2 --clip-range 0.01", {"epsilon": 0.01}),
        ("--clip-range 0.01 --epsilon-high 0.3", {"epsilon": 0.01, "epsilon_high": 0.3}),
    ],
)
def test_three_updates_of_two_epochs_match_trls_rloo(compare_with_stock, flags, settings):
    """The weights equal TRL's without a KL, with a KL in the reward, and with minibatches and clipped ratios."""
    compare_with_stock("rloo", flags, settings)


def by_length(completions, **_) -> list[float]:
    return [float(len(text) % 7) for text in completions]


def some_none(completions, **_) -> list[float | None]:
    """The second completion has no score. In update 3, only the fourth has one."""
    some_none.calls += 1
    missing = (0, 1, 2) if some_none.calls == UPDATES else (1,)
    return [None if i in missing else score for i, score in enumerate(by_length(completions))]


@pytest.mark.parametrize(
    ("algorithm", "flags", "settings"),
    [
        ("grpo", "--kl-placement loss --kl-coef 0.4", {"beta": 0.4}),
        ("grpo", "--scale-rewards batch", {"scale_rewards": "batch"}),
        ("rloo", "--kl-placement reward --kl-coef 0.4", {"beta": 0.4}),
    ],
)
def test_completions_without_a_score_match_trl(compare_with_stock, algorithm, flags, settings):
    """Weights equal TRL's if the reward function returns None for some completions."""
    some_none.calls = 0
    compare_with_stock(algorithm, flags, settings, some_none)


def half_end(monkeypatch) -> None:
    """Completions 1 and 3 of each rollout end with EOS, after 3 and 6 tokens. The others are truncated."""
    sample = sampler.sample_completions

    def sample_with_eos(policy, prompts, uniform, sampling, *, eos, pad, **rest):
        ids = sample(policy, prompts, uniform, sampling, eos=eos, pad=pad, **rest).completion_ids
        ids = torch.where((ids == eos.eos) | (ids == pad), pad + 1, ids)
        ids[1, 2] = ids[3, 5] = eos.eos
        return Completions.of(prompts, ids, eos=eos, pad=pad, vocabulary=policy.config.vocab_size)

    monkeypatch.setattr(sampler, "sample_completions", sample_with_eos)


@pytest.mark.parametrize(
    ("algorithm", "flags", "settings"),
    [
        ("grpo", "--kl-placement loss --kl-coef 0.4 --entropy-coef 0.1", {"beta": 0.4, "entropy_coef": 0.1}),
        ("grpo", "--loss-type grpo --minibatches 2 --entropy-coef 0.2", {"loss_type": "grpo", "entropy_coef": 0.2}),
        ("grpo", "--loss-type dr_grpo", {"loss_type": "dr_grpo"}),
        ("grpo", "--loss-type gspo", GSPO),
        ("rloo", "--kl-placement reward --kl-coef 0.4", {"beta": 0.4}),
    ],
)
def test_masked_truncated_completions_match_trl(compare_with_stock, monkeypatch, algorithm, flags, settings):
    """Weights equal TRL's if two of four completions are truncated and left out of the loss."""
    half_end(monkeypatch)
    settings = {**settings, "mask_truncated_completions": True}
    compare_with_stock(algorithm, f"{flags} --mask-truncated-completions", settings)


@pytest.fixture
def compare_with_stock(build, start_model, tmp_path, monkeypatch):
    """Return a function that trains with the flags, and with TRL and the settings, and compares the weights. Both have
    no KL and no scaled rewards if the flags and the settings do not have them."""

    def compare(algorithm: str, flags: str, settings: dict, reward=by_length) -> None:
        fixed = "--kl-schedule fixed" if "--kl-placement" in flags else "--kl-placement none"
        ours = build(
            *f"{flags} {fixed} --temperature 1 --max-grad-norm 0.5 --lr-schedule constant".split(),
            "--learning-rate", 1e-3, "--ppo-epochs", EPOCHS, "--num-iterations", UPDATES, "--max-new-tokens", LENGTH,
            algorithm=algorithm, rewards=[reward],
        )  # fmt: skip
        rollouts = []
        scores = []
        advantages = ours.advantages

        def recorded(rollout, rollout_scores):
            rollouts.append(rollout)
            scores.append(rollout_scores)
            return advantages(rollout, rollout_scores)

        ours.advantages = recorded
        ours.evaluate = lambda: None
        # TRL shuffles with torch's global generator. Neither trainer shuffles here, so that minibatches are the same.
        monkeypatch.setattr(f"trl.trainer.{algorithm}_trainer.shuffle_sequence_dict", lambda batch: batch)
        ours.policy_optimizer.minibatches = lambda update, epoch: iter(
            torch.arange(4).view(-1, ours.config.minibatch_size).tolist()
        )
        for update in range(1, UPDATES + 1):
            ours.update_step(update)
        stock = StockGroups(
            algorithm, start_model, tmp_path, rollouts, scores,
            **{"per_device_train_batch_size": ours.config.minibatch_size, **STOCK_SETTINGS[algorithm], **settings},
        )  # fmt: skip
        stock.trainer.train()
        start = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32)
        our_weights, trl_weights, start_weights = (
            torch.cat([w.detach().flatten() for w in model.parameters()])
            for model in (ours.host.model, stock.trainer.model, start)
        )
        assert stock.index == UPDATES - 1
        assert float((our_weights - trl_weights).abs().max()) < 2e-5, (
            "differs by more than rounding errors amplified by Adam"
        )
        assert float((our_weights - start_weights).abs().max()) > 1e-3

    return compare
