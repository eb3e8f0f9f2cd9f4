"""Every knob with its unit, its range and its meaning, and the two commands that they configure.

This module imports no torch, so that `--help` and a typing mistake are answered at once. A command's configuration
is a frozen dataclass of groups; each field of a group is one knob, one YAML key and one flat flag. Later layers win:
defaults, recipe (`recipes.py`), YAML file (`--config`), flags.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from recipes import RECIPES
from rlhf.cli import resolve
from rlhf.knobs import KLTarget, Split, knob


@dataclass(frozen=True)
class ModelSettings:
    """Which models, and how they are loaded."""

    actor_model: str = knob(
        "HuggingFaceTB/smollm2-135M-SFT-Only", "start model: a folder or a hub name", aliases=("model_name",)
    )
    rm_model: str = knob("./reward_model_output", "reward model: a folder or a hub name", aliases=("reward_model",))
    allow_weak_reward_model: bool = knob(
        False, "go on with a reward model whose held-out accuracy is under 0.6 or under its length baseline"
    )
    use_lora: bool = knob(False, "train low-rank adapters instead of all weights")
    lora_r: int = knob(16, "rank of the adapters", low=1, aliases=("rank",))
    lora_alpha: float = knob(32.0, "scaling of the adapters: their output is multiplied by alpha / r", above=0)
    lora_targets: tuple[str, ...] = knob(
        ("q_proj", "k_proj", "v_proj", "o_proj"), "modules that get an adapter", aliases=("target_modules",)
    )
    load_in_4bit: bool = knob(False, "keep the frozen weights in 4 bits (NF4); needs --use-lora")
    bf16: bool | None = knob(None, "bfloat16 autocast; unset: on a CUDA card that really has it, else float32")
    gradient_checkpointing: bool = knob(False, "recompute activations in the backward pass: less memory, slower")


@dataclass(frozen=True)
class DataSettings:
    """Where prompts and pairs come from."""

    prompts: str = knob(
        "Intel/orca_dpo_pairs", "pairs, prompts or chats: a JSONL file or a hub dataset", aliases=("dataset",)
    )
    split: Split | None = knob(
        None, "percent of questions for reward model / RL / evaluation; unset: 45/45/10, or 0/90/10 without pairs"
    )
    max_prompts: int = knob(10_000, "training prompts used at most", low=1)
    prompt_length: int = knob(256, "tokens; longer prompts are left out and counted", low=1)
    eval_prompts: int = knob(128, "evaluation prompts used at most", low=1)


@dataclass(frozen=True)
class SamplingSettings:
    """How replies are sampled."""

    reply_length: int = knob(128, "new tokens per reply at most", low=1, aliases=("max_new_tokens", "response_length"))
    temperature: float = knob(0.7, "sampling temperature; log-probabilities and KL are taken at it too", above=0)
    top_k: int = knob(0, "sample among the k likeliest tokens; 0 is off", low=0)
    top_p: float = knob(
        1.0,
        "sample within the smallest set of tokens that holds this probability; "
        "below 1 the KL is taken within that set and sees less of the drift",
        above=0,
        high=1,
    )

    @property
    def filters(self) -> bool:
        """Whether any token is kept from being sampled."""
        return self.top_k > 0 or self.top_p < 1


@dataclass(frozen=True)
class PPOSettings:
    """The PPO objective (Schulman et al. 2017)."""

    batch_size: int = knob(4, "prompts per update", low=1, aliases=("per_device_train_batch_size",))
    ppo_epochs: int = knob(4, "passes over each rollout", low=1, aliases=("num_ppo_epochs",))
    minibatches: int = knob(1, "optimizer steps per pass; must divide the batch", low=1, aliases=("num_mini_batches",))
    micro_batch_size: int = knob(
        0, "episodes per forward pass; 0: the whole minibatch. Changes memory, not the result", low=0
    )
    clip_range: float = knob(0.2, "the ratio is clipped to 1 +- this", above=0, below=1, aliases=("cliprange",))
    value_coef: float = knob(0.1, "weight of the value loss (0.5 x mean squared error)", low=0, aliases=("vf_coef",))
    value_clip_range: float = knob(
        0.2, "the value moves at most this far per rollout, score units", above=0, aliases=("cliprange_value",)
    )
    entropy_coef: float = knob(0.0, "weight of the entropy bonus, per nat per token", low=0)
    gamma: float = knob(1.0, "discount per token", low=0, high=1, aliases=("gae_gamma",))
    lam: float = knob(0.95, "GAE lambda", low=0, high=1, aliases=("gae_lambda",))
    whiten_rewards: bool = knob(False, "divide the rewards by their standard deviation over the batch")
    whiten_advantages: bool = knob(True, "shift and scale the advantages to mean 0, variance 1 over the batch")
    missing_eos_penalty: float = knob(
        0.0, "subtracted from the score of a reply that does not end, score units", low=0
    )


@dataclass(frozen=True)
class KLSettings:
    """How the policy is held near the start model."""

    kl_coef: float = knob(0.05, "beta at the start, score units per nat", low=0, aliases=("init_kl_coef",))
    kl_schedule: str = knob("adaptive", "how beta is steered", choices=("fixed", "adaptive", "phased"))
    kl_target: tuple[KLTarget, ...] = knob(
        (KLTarget(6.0, "sequence"),),
        "KL to hold in nats, e.g. 6/sequence or 0.05/token; several, in equal phases, with --kl-schedule phased",
        aliases=("target", "target_kl"),
    )
    kl_horizon: int = knob(10_000, "episodes over which beta reacts: small acts fast", low=1)
    kl_penalty_at: str = knob("token", "charge the KL at each token, or its sum at EOS", choices=("token", "eos"))


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW."""

    learning_rate: float = knob(5e-6, "learning rate at the start", above=0)
    lr_schedule: str = knob("cosine", "learning rate over the run", choices=("cosine", "linear", "constant"))
    max_grad_norm: float = knob(1.0, "gradients are scaled down to this norm", above=0)


@dataclass(frozen=True)
class RunSettings:
    """Length of the run, and what it leaves behind."""

    seed: int = knob(42, "all randomness derives from it", low=0)
    epochs: float = knob(3.0, "passes over the training prompts", above=0, aliases=("num_train_epochs",))
    num_iterations: int | None = knob(None, "updates; overrides --epochs", low=1)
    eval_every: int = knob(50, "updates between evaluations; the start and the end are always evaluated", low=1)
    output: str = knob("./ppo_training_output", "folder of the run", aliases=("output_dir",))
    overwrite: bool = knob(False, "delete the run that is in the output folder")
    dry_run: bool = knob(False, "print the plan and stop")


@dataclass(frozen=True)
class Config:
    """Everything `train_ppo.py` can be told."""

    recipe: str = "smollm2-orca"
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    ppo: PPOSettings = field(default_factory=PPOSettings)
    kl: KLSettings = field(default_factory=KLSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    run: RunSettings = field(default_factory=RunSettings)

    def faults(self) -> list[str]:
        """What is wrong with the settings taken together, a line each."""
        faults = []
        batch, parts = self.ppo.batch_size, self.ppo.minibatches
        if batch % parts:
            nearest = min((d for d in range(1, batch + 1) if batch % d == 0), key=lambda d: (abs(d - parts), d))
            faults.append(f"minibatches {parts} does not divide batch_size {batch}: --minibatches. Try {nearest}")
        if self.model.load_in_4bit and not self.model.use_lora:
            faults.append("4-bit weights cannot be trained: --load-in-4bit. Add --use-lora")
        if self.kl.kl_coef == 0 and self.kl.kl_schedule != "fixed":
            faults.append(
                f"beta starts at 0 and is steered by factors, so it would stay there: --kl-coef 0, kl_schedule "
                f"{self.kl.kl_schedule}. Add --kl-schedule fixed, or start above 0"
            )
        if len(self.kl.kl_target) > 1 and self.kl.kl_schedule != "phased":
            faults.append(
                f"several KL targets under kl_schedule {self.kl.kl_schedule}: --kl-target. "
                "Give one, or --kl-schedule phased"
            )
        return faults


@dataclass(frozen=True)
class RewardDataSettings:
    """Where the pairs come from."""

    pairs: str = knob("Intel/orca_dpo_pairs", "a JSONL file or a hub dataset", aliases=("prompts", "dataset"))
    split: Split | None = knob(None, "percent of questions for reward model / RL / evaluation; unset: 45/45/10")
    pair_length: int = knob(1024, "tokens; pairs with a longer side are left out and counted", low=2)


@dataclass(frozen=True)
class RewardTrainingSettings:
    """Bradley-Terry training of the reward model."""

    base_model: str = knob("HuggingFaceTB/smollm2-135M-SFT-Only", "model that gets a score head: folder or hub name")
    rm_output: str = knob("./reward_model_output", "folder of the reward model", aliases=("output", "output_dir"))
    rm_overwrite: bool = knob(False, "replace what is in the output folder", aliases=("overwrite",))
    rm_learning_rate: float = knob(2e-5, "AdamW's learning rate at the start", above=0, aliases=("learning_rate",))
    rm_epochs: float = knob(1.0, "passes over the pairs", above=0, aliases=("epochs", "num_train_epochs"))
    rm_batch_size: int = knob(8, "pairs per optimizer step", low=1, aliases=("batch_size",))
    rm_bf16: bool | None = knob(None, "bfloat16 autocast; unset: on a CUDA card that really has it", aliases=("bf16",))
    rm_seed: int = knob(42, "order of the pairs and the new head", low=0, aliases=("seed",))


@dataclass(frozen=True)
class CalibrationSettings:
    """Replies on which the scores are brought to mean 0, variance 1."""

    actor_model: str | None = knob(
        "HuggingFaceTB/smollm2-135M-SFT-Only", "start model that writes the replies; none: the chosen replies"
    )
    calibration_prompts: int = knob(128, "replies used at most", low=2)
    calibration_prompt_length: int = knob(256, "tokens of a prompt at most", low=1, aliases=("prompt_length",))


@dataclass(frozen=True)
class RewardModelConfig:
    """Everything `python -m reward_model.train` can be told."""

    recipe: str = "smollm2-orca"
    data: RewardDataSettings = field(default_factory=RewardDataSettings)
    training: RewardTrainingSettings = field(default_factory=RewardTrainingSettings)
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)

    def faults(self) -> list[str]:
        """Nothing here depends on two knobs at once."""
        return []


def parse_cli(argv: list[str] | None = None) -> Config:
    """The configuration of `train_ppo.py`. Raises UserError with all faults of the command line."""
    recipes = {name: recipe["training"] for name, recipe in RECIPES.items()}
    argv = sys.argv[1:] if argv is None else argv
    return resolve(Config, recipes, argv, "train_ppo.py", "PPO on one workstation, on TRL's PPOTrainer.")


def parse_reward_cli(argv: list[str] | None = None) -> RewardModelConfig:
    """The configuration of `python -m reward_model.train`. Raises UserError with all faults of the command line."""
    recipes = {name: recipe["reward_model"] for name, recipe in RECIPES.items()}
    argv = sys.argv[1:] if argv is None else argv
    return resolve(
        RewardModelConfig, recipes, argv, "python -m reward_model.train", "A Bradley-Terry reward model from pairs."
    )
