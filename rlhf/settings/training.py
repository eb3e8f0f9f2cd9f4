"""The settings of a training run, each with its unit, its range and its meaning. Imports no torch.

A command's configuration is a frozen dataclass of groups; each field of a group is one setting, one YAML key and one
flat flag.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from rlhf.settings.fields import Layer, setting
from rlhf.settings.merge import Command
from rlhf.settings.recipes import DEFAULT_RECIPE
from rlhf.settings.types import HubName, KLTarget, Split

LARGEST_SEED = 2**32 - 1  # that numpy and transformers take
MOST_UPDATES = 10_000_000
MAX_CONSECUTIVE_SKIPS = 3  # updates that are skipped, or whose KL has run away, before the run acts


@dataclass(frozen=True)
class ModelSettings:
    """Which models, and how they are loaded."""

    actor_model: str = setting(
        "HuggingFaceTB/smollm2-135M-SFT-Only",
        "start model: a folder or a hub name",
        aliases=("model_name",),
        brief="start model: a folder or a hub name",
    )
    rm_model: str | None = setting(
        "./reward_model_output",
        "reward model: a folder or a hub name; none: rules alone (--reward-func)",
        aliases=("reward_model",),
        brief="reward model: a folder or a hub name",
    )
    allow_weak_reward_model: bool = setting(
        False, "go on with a reward model whose held-out accuracy is under 0.6 or under its length baseline"
    )
    use_lora: bool = setting(
        False,
        "train low-rank adapters instead of all weights; in a YAML file, a block `lora:` turns them on",
        brief="train LoRA adapters instead of all weights",
    )
    lora_r: int = setting(16, "rank of the adapters", ge=1, aliases=("rank", "r"))
    lora_alpha: float = setting(
        32.0, "scaling of the adapters: their output is multiplied by alpha / r", gt=0, le=1e6, aliases=("alpha",)
    )
    lora_dropout: float = setting(
        0.0, "share of the adapters' inputs dropped at random in optimizer steps, never in measuring", ge=0, lt=1
    )
    lora_targets: tuple[str, ...] = setting(
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        "modules that get an adapter; all-linear: every linear layer but the head",
        aliases=("target_modules",),
    )
    load_in_4bit: bool = setting(False, "keep the frozen weights in 4 bits (NF4); needs --use-lora")
    bf16: bool | None = setting(None, "bfloat16 autocast; unset: on a CUDA card that really has it, else float32")
    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass: less memory, slower")

    @property
    def has_adapter_dropout(self) -> bool:
        """Whether optimizer steps drop some of the adapters' inputs."""
        return self.use_lora and self.lora_dropout > 0


@dataclass(frozen=True)
class DataSettings:
    """Where prompts and pairs come from."""

    prompts: str = setting(
        "Intel/orca_dpo_pairs",
        "pairs, prompts or chats: a JSONL file or a hub dataset",
        aliases=("dataset",),
        brief="prompts: a JSONL file or a hub dataset",
    )
    split: Split | None = setting(
        None, "percent of questions for reward model / RL / evaluation; unset: 45/45/10, or 0/90/10 without pairs"
    )
    steps_per_topic: int | None = setting(
        None,
        "updates on the prompts of one topic (their column `topic`) before the next topic's, round and round; unset: "
        "topics are not looked at",
        ge=1,
    )
    plain_prompts: bool = setting(
        False,
        "read prompts as plain text although the start model has a chat template: the reply follows at once, as base "
        "models are used",
    )
    max_prompts: int = setting(10_000, "training prompts used at most", ge=1)
    prompt_length: int = setting(256, "tokens; longer prompts are left out and counted", ge=1)
    eval_prompts: int = setting(128, "evaluation prompts used at most", ge=1)
    eval_text: str | None = setting(
        None,
        "text file whose perplexity is followed; unset: the held-out chosen replies, and without pairs one sample of "
        "the start model's replies",
    )


@dataclass(frozen=True)
class SamplingSettings:
    """How replies are sampled."""

    max_new_tokens: int = setting(
        128,
        "new tokens per reply at most",
        ge=1,
        aliases=("reply_length", "response_length"),
        brief="new tokens per completion at most",
    )
    temperature: float = setting(0.7, "sampling temperature; log-probabilities and KL are taken at it too", gt=0)
    top_k: int = setting(0, "sample among the k likeliest tokens; 0 is off", ge=0)
    top_p: float = setting(
        1.0,
        "sample within the smallest set of tokens that holds this probability; "
        "below 1 the KL is taken within that set and sees less of the drift",
        gt=0,
        le=1,
    )

    @property
    def filters(self) -> bool:
        """Whether any token is kept from being sampled."""
        return self.top_k > 0 or self.top_p < 1

    def __str__(self) -> str:
        limits = [f"top-k {self.top_k}"] if self.top_k else []
        limits += [f"top-p {self.top_p:g}"] if self.top_p < 1 else []
        return ", ".join([f"at most {self.max_new_tokens} tokens", f"temperature {self.temperature:g}", *limits])


@dataclass(frozen=True)
class BatchSettings:
    """One update: a rollout and the optimizer steps on it."""

    batch_size: int = setting(
        4,
        "prompts per update; with --K, so many completions of each",
        ge=1,
        aliases=("per_device_train_batch_size",),
        brief="prompts per update",
    )
    ppo_epochs: int = setting(4, "passes over each rollout, in every algorithm", ge=1, aliases=("num_ppo_epochs",))
    minibatches: int = setting(
        1, "optimizer steps per pass; must divide the episodes of an update", ge=1, aliases=("num_mini_batches",)
    )
    micro_batch_size: int = setting(
        0,
        "episodes per forward pass; 0: as many as 16,384 tokens hold on a card, 1,024 on a CPU. Changes memory, not "
        "the result",
        ge=0,
        aliases=("mini_batch_size",),
    )
    gradient_accumulation_steps: int | None = setting(
        None,
        "micro-batches whose gradients add up to an optimizer step, in place of --minibatches: each step is on "
        "--micro-batch-size times as many episodes, or, where that is 0, in so many parts; unset: --minibatches",
        ge=1,
    )
    clip_range: float = setting(
        0.2, "the ratio is clipped to 1 +- this", gt=0, lt=1, aliases=("cliprange", "clip_epsilon")
    )
    entropy_coef: float = setting(0.0, "weight of the entropy bonus, per nat per token", ge=0)


@dataclass(frozen=True)
class SpeedSettings:
    """How the same result is reached faster; each has a plain twin."""

    rollout_engine: str = setting(
        "auto",
        "how replies are sampled: all to the end (plain), in slots that waiting prompts take over (slots), so with "
        "the decoding step as a CUDA graph (graph), or by an installed vLLM; auto: graph on a CUDA card, else slots",
        choices=("auto", "plain", "slots", "graph", "vllm"),
    )
    rollout_slots: int = setting(0, "replies sampled at a time; 0: 256 on a card, 32 on a CPU", ge=0)
    packed: bool = setting(True, "run no padding through the layers, and a prompt once for all its replies")
    fused_head: bool = setting(True, "build the gradients of the language-model head chunk by chunk")


@dataclass(frozen=True)
class CriticSettings:
    """The critic, and generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438)."""

    critic: str = setting(
        "shared",
        "the value head reads the policy's hidden states (shared), or those of a second backbone, trained beside it: "
        "twice the weights and moments, and twice the backward pass (separate)",
        choices=("shared", "separate"),
    )
    value_coef: float = setting(0.1, "weight of the value loss (0.5 x mean squared error)", ge=0, aliases=("vf_coef",))
    value_clip_range: float = setting(
        0.2, "the value moves at most this far per rollout, score units", gt=0, aliases=("cliprange_value",)
    )
    gamma: float = setting(1.0, "discount per token", ge=0, le=1, aliases=("gae_gamma",))
    lam: float = setting(0.95, "GAE lambda", ge=0, le=1, aliases=("gae_lambda",))


@dataclass(frozen=True)
class PPOSettings:
    """PPO (Schulman et al. 2017, arXiv 1707.06347): rewards per token and advantages."""

    whiten_rewards: bool = setting(False, "divide the rewards by their standard deviation over the batch")
    whiten_advantages: bool = setting(True, "shift and scale the advantages to mean 0, variance 1 over the batch")
    kl_penalty_at: str = setting("token", "charge the KL at each token, or its sum at EOS", choices=("token", "eos"))


@dataclass(frozen=True)
class GroupSettings:
    """Groups of completions to one prompt."""

    K: int | None = setting(
        None, "completions per prompt: a group, compared with each other", ge=2,
        aliases=("num_generations", "group_size"), brief="completions per prompt")  # fmt: skip


@dataclass(frozen=True)
class GRPOSettings:
    """GRPO (Shao et al. 2024, arXiv 2402.03300): advantages relative to the group's mean."""

    scale_rewards: str = setting(
        "none",
        "divide the advantages r - mean(r) by the standard deviation of the group or of the batch, or not at all",
        choices=("none", "group", "batch"),
    )
    loss_type: str = setting(
        "dapo",
        "the clipped loss averaged over tokens (dapo), over each completion's tokens and then the completions (grpo), "
        "or over a constant length (dr_grpo); one ratio per completion (gspo); capped ratios as weights (cispo)",
        choices=("dapo", "grpo", "dr_grpo", "cispo", "gspo"),
    )


@dataclass(frozen=True)
class RewardSettings:
    """What a reply is worth: the reward model's score, rules, or both."""

    reward_func: tuple[str, ...] = setting(
        (),
        "rules beside the reward model: length_penalty, word_penalty, keyword_bonus, or FILE.py:NAME in TRL's "
        "signature",
        brief="reward functions: a built-in name, or FILE.py:NAME",
    )
    reward_weights: tuple[float, ...] | None = setting(
        None, "weights of the reward model (where there is one) and of each --reward-func, in order; unset: all 1"
    )
    reward_timeout: float = setting(
        600.0, "seconds that a rule may take for a batch of replies, or the run stops", gt=0
    )
    keywords: tuple[str, ...] = setting(("helpful",), "words of which one earns keyword_bonus, in any case")
    missing_eos_penalty: float = setting(
        0.0, "subtracted from the score of a reply that does not end, score units", ge=0
    )
    normalize_scores: bool = setting(False, "divide the scores by running estimates of their mean and spread")
    score_ema: float = setting(
        0.99, "weight of the old estimates in the running ones", ge=0, lt=1, aliases=("normalizer_alpha",)
    )


ADAPTIVE_TARGET = "6/sequence"  # Ziegler et al. 2019, and the SmolLM2-orca and rank-1 documents
PHASED_TARGETS = ("0.05/token", "0.02/token", "0.01/token")  # the phased-KL documents


@dataclass(frozen=True)
class KLSettings:
    """How the policy is held near the start model."""

    kl_coef: float = setting(0.05, "beta at the start, score units per nat", ge=0, aliases=("init_kl_coef",))
    kl_placement: str = setting(
        "reward",
        "charge the KL in the reward, in the loss (k3 x ratio, docs/kl.md), or only log it",
        choices=("reward", "loss", "none"),
    )
    kl_schedule: str = setting("adaptive", "how beta is steered", choices=("fixed", "adaptive", "phased"))
    kl_target: tuple[KLTarget, ...] | None = setting(
        (KLTarget.parse(ADAPTIVE_TARGET),),
        "KL to hold, in nats with the unit, and several under phased; unset: 6/sequence, and under phased "
        "0.05/token 0.02/token 0.01/token",
        aliases=("target", "target_kl"),
        brief="KL to the start model to hold, in nats",
    )
    kl_boundaries: tuple[float, ...] | None = setting(
        None, "shares of the run at which the next target comes into force; unset: equal phases", gt=0, lt=1
    )
    kl_horizon: int | None = setting(
        None,
        "episodes over which beta reacts: a small number reacts fast; unset: a twelfth of the episodes of the "
        "shortest phase, at least two updates' and at most 10,000, so that beta can move about 11-fold in a phase",
        ge=1,
    )

    @property
    def targets(self) -> tuple[KLTarget, ...]:
        """The targets, one after another; under a fixed beta the one that a KL is shown against."""
        phased = self.kl_schedule == "phased"
        return self.kl_target or tuple(map(KLTarget.parse, PHASED_TARGETS if phased else (ADAPTIVE_TARGET,)))

    def coef_in(self, placement: str, kl_coef: float) -> float:
        """`kl_coef` at the placement where it is charged, "reward" or "loss"; 0 elsewhere."""
        return kl_coef if self.kl_placement == placement else 0.0

    @property
    def steered(self) -> bool:
        """Whether beta follows the measured KL, so that a target is in force."""
        return self.kl_schedule != "fixed" and self.kl_placement != "none"


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW."""

    learning_rate: float = setting(5e-6, "learning rate at the start", gt=0, brief="learning rate at the start")
    lr_schedule: str = setting("cosine", "learning rate over the run", choices=("cosine", "linear", "constant"))
    max_grad_norm: float = setting(1.0, "gradients are scaled down to this norm", gt=0)


EPOCHS, ROUNDS = 3.0, 1.0  # length of a run if none is set: passes over the prompts, rounds of all topics


@dataclass(frozen=True)
class RunSettings:
    """Length of the run, and what it leaves behind."""

    seed: int = setting(42, "all randomness derives from it", ge=0, le=LARGEST_SEED)
    deterministic: bool = setting(
        False,
        "use deterministic algorithms: on one GPU the same seed then gives the same weights to the bit, and a run is "
        "slower. On a CPU runs repeat to the bit without it",
    )
    seeds: tuple[int, ...] | None = setting(
        None,
        "one run after another with these seeds, into OUTPUT_seed42 and so on; finished ones are skipped",
        ge=0,
        le=LARGEST_SEED,
        brief="train one run after another with these seeds",
    )
    epochs: float | None = setting(
        EPOCHS,
        "passes over the training prompts, with --steps-per-topic rounds of all topics; unset: 3 passes, or one round",
        gt=0,
        le=100_000,
        aliases=("num_train_epochs", "num_epochs"),
    )
    num_iterations: int | None = setting(
        None,
        "updates, in place of --epochs",
        ge=1,
        le=MOST_UPDATES,
        brief="updates, in place of passes over the prompts (--epochs)",
    )
    episodes: int | None = setting(
        None, "generated replies, in place of --num-iterations: an equal budget for all algorithms", ge=1
    )
    eval_every: int = setting(50, "updates between evaluations; the start and the end are always evaluated", ge=1)
    best_rule: str = setting(
        "score",
        "what makes the best checkpoint, among those of at most 1.5 times the KL target (where beta is steered): the "
        "highest score (within --perplexity-gate), or the lowest perplexity",
        choices=("score", "perplexity"),
    )
    perplexity_gate: float = setting(
        1.1, "largest perplexity of a best checkpoint under --best-rule score, times the start's", gt=0
    )
    output: str = setting(
        "./ppo_training_output", "folder of the run", aliases=("output_dir",), brief="folder of the run"
    )
    overwrite: bool = setting(
        False, "replace the run that is in the output folder; it is removed when the new run is finished"
    )
    save_every: int = setting(50, "updates between checkpoints; the last update is always saved", ge=1)
    keep: int = setting(2, "checkpoints kept, the newest ones", ge=1, aliases=("save_total_limit",))
    resume: bool = setting(
        False,
        "go on from the output folder's newest sound checkpoint, with that run's settings",
        brief="resume the run in --output",
    )
    rollback_on_kl: bool = setting(
        False,
        "after 3 updates in a row beyond 4 times the KL target: back to the last checkpoint's weights from before",
    )
    replay: str | None = setting(None, "an incident's folder: do its update again, look for the fault, and stop")
    resume_anyway: bool = setting(False, "with --resume: go on although settings, data or versions are not the run's")
    dry_run: bool = setting(False, "print the plan and stop")
    check: bool = setting(
        False,
        "load everything, try one update out, print what each check found and stop; exit status 2 where one fails. "
        "Nothing is written into the output folder",
        brief="load everything, try one update, print what was found, and stop",
    )


@dataclass(frozen=True)
class RecordSettings:
    """What is kept of single tokens, for `evaluate_generations.py --tokens RUN`."""

    record_tokens: bool = setting(False, "keep what the trainer saw of every token of some episodes, in RUN/tokens")
    record_format: str = setting("jsonl", "a JSON object a line, or a Parquet table", choices=("jsonl", "parquet"))
    record_every: int = setting(50, "updates between records; the first update is always recorded", ge=1)
    record_prompts: int = setting(2, "prompts recorded of such an update, each with all its replies", ge=1)


@dataclass(frozen=True)
class ExportSettings:
    """What a run hands out at its end. With --resume, one that has ended already does this alone."""

    merge_lora: bool = setting(
        False, "merge the adapter into its base, in float32, and save that whole model in RUN/merged; needs --use-lora"
    )
    export_from: str = setting(
        "final", "of a run's weights, those that are merged and pushed", choices=("final", "best")
    )
    push_to_hub: HubName | None = setting(
        None,
        "upload weights (with --merge-lora the merged model's), tokenizer, model card and run.json to the Hugging "
        "Face hub, as owner/name",
        aliases=("hub_model_id",),
    )
    hub_private: bool = setting(
        True,
        "a repository that --push-to-hub makes is private; one that is there stays as it is",
        aliases=("hub_private_repo",),
    )


@dataclass(frozen=True)
class Config(Command):
    """All settings of a training run. Groups that the algorithm does not read keep their defaults."""

    recipe: str = DEFAULT_RECIPE  # or the file of a user's own
    algorithm: str = "ppo"
    user_file: Layer = field(default_factory=dict, compare=False, repr=False)  # what config.py sets, used or not
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    speed: SpeedSettings = field(default_factory=SpeedSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)
    ppo: PPOSettings = field(default_factory=PPOSettings)
    group: GroupSettings = field(default_factory=GroupSettings)
    grpo: GRPOSettings = field(default_factory=GRPOSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    kl: KLSettings = field(default_factory=KLSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    run: RunSettings = field(default_factory=RunSettings)
    record: RecordSettings = field(default_factory=RecordSettings)
    export: ExportSettings = field(default_factory=ExportSettings)

    @property
    def separate_critic(self) -> bool:
        """Whether there is a critic with a backbone of its own."""
        return self.critic.critic == "separate"

    @property
    def group_size(self) -> int:
        """Completions per prompt."""
        return self.group.K or 1

    @property
    def episodes_per_update(self) -> int:
        return self.batch.batch_size * self.group_size

    @property
    def minibatch_size(self) -> int:
        """Episodes per optimizer step."""
        return self.episodes_per_update // self.batch.minibatches

    def updates(self, prompts: int, topics: int = 1) -> int:
        """Return the updates of a run over `prompts` training prompts of so many topics: by episodes, else
        num_iterations, else epochs. What does not fill an update is rounded up. Under topics an epoch is a round of
        all of them."""
        if self.run.episodes is not None:
            return -(-self.run.episodes // self.episodes_per_update)
        if self.run.num_iterations is not None:
            return self.run.num_iterations
        if self.data.steps_per_topic is not None:
            return max(1, math.ceil((self.run.epochs or ROUNDS) * self.data.steps_per_topic * topics))
        return max(1, -(-int((self.run.epochs or EPOCHS) * prompts) // self.batch.batch_size))

    def optimizer_steps(self, updates: int) -> int:
        return updates * self.batch.ppo_epochs * self.batch.minibatches

    def resolved(self) -> Config:
        """Return the configuration with accumulation steps replaced by minibatches and micro-batches."""
        batch, episodes = self.batch, self.episodes_per_update
        steps, at_once = batch.gradient_accumulation_steps, batch.micro_batch_size
        if steps is None:
            return self
        same = {"minibatches": episodes // (steps * at_once)} if at_once else {"micro_batch_size": episodes // steps}
        return replace(self, batch=replace(batch, gradient_accumulation_steps=None, **same))
