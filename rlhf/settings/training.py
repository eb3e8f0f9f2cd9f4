"""The settings of a training run, each with its unit, its range and its meaning. Imports no torch.

A command's configuration is a frozen dataclass of groups; each field of a group is one setting, one YAML key and one
flat flag.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from rlhf.settings.fields import knob
from rlhf.settings.recipes import RECIPES
from rlhf.settings.types import HubName, KLTarget, Split, bare_targets

LARGEST_SEED = 2**32 - 1  # that numpy and transformers take
MOST_UPDATES = 10_000_000
MAX_CONSECUTIVE_SKIPS = 3  # updates that are dropped, or whose KL has run away, after which it is no chance


@dataclass(frozen=True)
class ModelSettings:
    """Which models, and how they are loaded."""

    actor_model: str = knob(
        "HuggingFaceTB/smollm2-135M-SFT-Only", "start model: a folder or a hub name", aliases=("model_name",)
    )
    rm_model: str | None = knob(
        "./reward_model_output",
        "reward model: a folder or a hub name; none: rules alone (--reward-func)",
        aliases=("reward_model",),
    )
    allow_weak_reward_model: bool = knob(
        False, "go on with a reward model whose held-out accuracy is under 0.6 or under its length baseline"
    )
    use_lora: bool = knob(
        False, "train low-rank adapters instead of all weights; in a YAML file, a block `lora:` turns them on"
    )
    lora_r: int = knob(16, "rank of the adapters", low=1, aliases=("rank", "r"))
    lora_alpha: float = knob(
        32.0, "scaling of the adapters: their output is multiplied by alpha / r", above=0, high=1e6, aliases=("alpha",)
    )
    lora_dropout: float = knob(
        0.0, "share of the adapters' inputs dropped at random in optimizer steps, never in measuring", low=0, below=1
    )
    lora_targets: tuple[str, ...] = knob(
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        "modules that get an adapter; all-linear: every linear layer but the head",
        aliases=("target_modules",),
    )
    load_in_4bit: bool = knob(False, "keep the frozen weights in 4 bits (NF4); needs --use-lora")
    bf16: bool | None = knob(None, "bfloat16 autocast; unset: on a CUDA card that really has it, else float32")
    gradient_checkpointing: bool = knob(False, "recompute activations in the backward pass: less memory, slower")

    @property
    def has_adapter_dropout(self) -> bool:
        """Whether optimizer steps drop some of the adapters' inputs."""
        return self.use_lora and self.lora_dropout > 0


@dataclass(frozen=True)
class DataSettings:
    """Where prompts and pairs come from."""

    prompts: str = knob(
        "Intel/orca_dpo_pairs", "pairs, prompts or chats: a JSONL file or a hub dataset", aliases=("dataset",)
    )
    split: Split | None = knob(
        None, "percent of questions for reward model / RL / evaluation; unset: 45/45/10, or 0/90/10 without pairs"
    )
    steps_per_topic: int | None = knob(
        None,
        "updates on the prompts of one topic (their column `topic`) before the next topic's, round and round; unset: "
        "topics are not looked at",
        low=1,
    )
    plain_prompts: bool = knob(
        False,
        "read prompts as plain text although the start model has a chat template: the reply follows at once, as base "
        "models are used",
    )
    max_prompts: int = knob(10_000, "training prompts used at most", low=1)
    prompt_length: int = knob(256, "tokens; longer prompts are left out and counted", low=1)
    eval_prompts: int = knob(128, "evaluation prompts used at most", low=1)
    eval_text: str | None = knob(
        None,
        "text file whose perplexity is followed; unset: the held-out chosen replies, and without pairs one sample of "
        "the start model's replies",
    )


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

    def __str__(self) -> str:
        limits = [f"top-k {self.top_k}"] if self.top_k else []
        limits += [f"top-p {self.top_p:g}"] if self.top_p < 1 else []
        return ", ".join([f"at most {self.reply_length} tokens", f"temperature {self.temperature:g}", *limits])


@dataclass(frozen=True)
class BatchSettings:
    """One update: a rollout and the optimizer steps on it."""

    batch_size: int = knob(
        4, "prompts per update; with --K, so many completions of each", low=1, aliases=("per_device_train_batch_size",)
    )
    ppo_epochs: int = knob(4, "passes over each rollout, in every algorithm", low=1, aliases=("num_ppo_epochs",))
    minibatches: int = knob(
        1, "optimizer steps per pass; must divide the episodes of an update", low=1, aliases=("num_mini_batches",)
    )
    micro_batch_size: int = knob(
        0,
        "episodes per forward pass; 0: as many as 16,384 tokens hold on a card, 1,024 on a CPU. Changes memory, not "
        "the result",
        low=0,
        aliases=("mini_batch_size",),
    )
    gradient_accumulation_steps: int | None = knob(
        None,
        "micro-batches whose gradients add up to an optimizer step, in place of --minibatches: each step is on "
        "--micro-batch-size times as many episodes, or, where that is 0, in so many parts; unset: --minibatches",
        low=1,
    )
    clip_range: float = knob(
        0.2, "the ratio is clipped to 1 +- this", above=0, below=1, aliases=("cliprange", "clip_epsilon")
    )
    entropy_coef: float = knob(0.0, "weight of the entropy bonus, per nat per token", low=0)


@dataclass(frozen=True)
class SpeedSettings:
    """How the same result is reached faster; each has a plain twin."""

    rollout_engine: str = knob(
        "auto",
        "how replies are sampled: all to the end (plain), in slots that waiting prompts take over (slots), so with "
        "the decoding step as a CUDA graph (graph), or by an installed vLLM; auto: graph on a CUDA card, else slots",
        choices=("auto", "plain", "slots", "graph", "vllm"),
    )
    rollout_slots: int = knob(0, "replies sampled at a time; 0: 256 on a card, 32 on a CPU", low=0)
    packed: bool = knob(True, "run no padding through the layers, and a prompt once for all its replies")
    fused_head: bool = knob(True, "build the gradients of the language-model head chunk by chunk")


@dataclass(frozen=True)
class CriticSettings:
    """The critic, and generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438)."""

    critic: str = knob(
        "shared",
        "the value head reads the policy's hidden states (shared), or those of a second backbone, trained beside it: "
        "twice the weights and moments, and twice the backward pass (separate)",
        choices=("shared", "separate"),
    )
    value_coef: float = knob(0.1, "weight of the value loss (0.5 x mean squared error)", low=0, aliases=("vf_coef",))
    value_clip_range: float = knob(
        0.2, "the value moves at most this far per rollout, score units", above=0, aliases=("cliprange_value",)
    )
    gamma: float = knob(1.0, "discount per token", low=0, high=1, aliases=("gae_gamma",))
    lam: float = knob(0.95, "GAE lambda", low=0, high=1, aliases=("gae_lambda",))


@dataclass(frozen=True)
class PPOSettings:
    """PPO (Schulman et al. 2017, arXiv 1707.06347): rewards per token and advantages."""

    whiten_rewards: bool = knob(False, "divide the rewards by their standard deviation over the batch")
    whiten_advantages: bool = knob(True, "shift and scale the advantages to mean 0, variance 1 over the batch")
    kl_penalty_at: str = knob("token", "charge the KL at each token, or its sum at EOS", choices=("token", "eos"))


@dataclass(frozen=True)
class GroupSettings:
    """Groups of completions to one prompt."""

    K: int | None = knob(
        None, "completions per prompt: a group, compared with each other", low=2,
        aliases=("num_generations", "group_size"),
    )  # fmt: skip


@dataclass(frozen=True)
class GRPOSettings:
    """GRPO (Shao et al. 2024, arXiv 2402.03300): advantages relative to the group's mean."""

    scale_rewards: str = knob(
        "none",
        "divide the advantages r - mean(r) by the standard deviation of the group or of the batch, or not at all",
        choices=("none", "group", "batch"),
    )
    loss_type: str = knob(
        "dapo",
        "the clipped loss averaged over tokens (dapo), over each completion's tokens and then the completions (grpo), "
        "or over a constant length (dr_grpo); one ratio per completion (gspo); capped ratios as weights (cispo)",
        choices=("dapo", "grpo", "dr_grpo", "cispo", "gspo"),
    )


@dataclass(frozen=True)
class RewardSettings:
    """What a reply is worth: the reward model's score, rules, or both."""

    reward_func: tuple[str, ...] = knob(
        (),
        "rules beside the reward model: length_penalty, word_penalty, keyword_bonus, or FILE.py:NAME in TRL's "
        "signature",
    )
    reward_weights: tuple[float, ...] | None = knob(
        None, "weights of the reward model (where there is one) and of each --reward-func, in order; unset: all 1"
    )
    reward_timeout: float = knob(
        600.0, "seconds that a rule may take for a batch of replies, or the run stops", above=0
    )
    keywords: tuple[str, ...] = knob(("helpful",), "words of which one earns keyword_bonus, in any case")
    missing_eos_penalty: float = knob(
        0.0, "subtracted from the score of a reply that does not end, score units", low=0
    )
    normalize_scores: bool = knob(False, "divide the scores by running estimates of their mean and spread")
    score_ema: float = knob(
        0.99, "weight of the old estimates in the running ones", low=0, below=1, aliases=("normalizer_alpha",)
    )


ADAPTIVE_TARGET = "6/sequence"  # Ziegler et al. 2019, and reference systems seed_001 and seed_004
PHASED_TARGETS = ("0.05/token", "0.02/token", "0.01/token")  # reference systems seed_000 and seed_002


@dataclass(frozen=True)
class KLSettings:
    """How the policy is held near the start model."""

    kl_coef: float = knob(0.05, "beta at the start, score units per nat", low=0, aliases=("init_kl_coef",))
    kl_placement: str = knob(
        "reward",
        "charge the KL in the reward, in the loss (k3 x ratio, docs/kl.md), or only log it",
        choices=("reward", "loss", "none"),
    )
    kl_schedule: str = knob("adaptive", "how beta is steered", choices=("fixed", "adaptive", "phased"))
    kl_target: tuple[KLTarget, ...] | None = knob(
        None,
        "KL to hold in nats, e.g. 6/sequence, and several under phased; unset: 6/sequence, and under phased "
        "0.05/token 0.02/token 0.01/token",
        aliases=("target", "target_kl"),
    )
    kl_boundaries: tuple[float, ...] | None = knob(
        None, "shares of the run at which the next target comes into force; unset: equal phases", above=0, below=1
    )
    kl_horizon: int | None = knob(
        None,
        "episodes over which beta reacts: a small number reacts fast; unset: a twelfth of the episodes of the "
        "shortest phase, at least two updates' and at most 10,000, so that beta can move about 11-fold in a phase",
        low=1,
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

    learning_rate: float = knob(5e-6, "learning rate at the start", above=0)
    lr_schedule: str = knob("cosine", "learning rate over the run", choices=("cosine", "linear", "constant"))
    max_grad_norm: float = knob(1.0, "gradients are scaled down to this norm", above=0)


EPOCHS, ROUNDS = 3.0, 1.0  # a run's length where none is named: passes over the prompts, rounds of all topics


@dataclass(frozen=True)
class RunSettings:
    """Length of the run, and what it leaves behind."""

    seed: int = knob(42, "all randomness derives from it", low=0, high=LARGEST_SEED)
    deterministic: bool = knob(
        False,
        "use deterministic algorithms: on one GPU the same seed then gives the same weights to the bit, and a run is "
        "slower. On a CPU runs repeat to the bit without it",
    )
    seeds: tuple[int, ...] | None = knob(
        None,
        "one run after another with these seeds, into OUTPUT_seed42 and so on; finished ones are skipped",
        low=0,
        high=LARGEST_SEED,
    )
    epochs: float | None = knob(
        None,
        "passes over the training prompts, with --steps-per-topic rounds of all topics; unset: 3 passes, or one round",
        above=0,
        high=100_000,
        aliases=("num_train_epochs", "num_epochs"),
    )
    num_iterations: int | None = knob(None, "updates, in place of --epochs", low=1, high=MOST_UPDATES)
    episodes: int | None = knob(
        None, "generated replies, in place of --num-iterations: an equal budget for all algorithms", low=1
    )
    eval_every: int = knob(50, "updates between evaluations; the start and the end are always evaluated", low=1)
    best_rule: str = knob(
        "score",
        "what makes the best checkpoint, among those of at most 1.5 times the KL target (where beta is steered): the "
        "highest score (within --perplexity-gate), or the lowest perplexity",
        choices=("score", "perplexity"),
    )
    perplexity_gate: float = knob(
        1.1, "largest perplexity of a best checkpoint under --best-rule score, times the start's", above=0
    )
    output: str = knob("./ppo_training_output", "folder of the run", aliases=("output_dir",))
    overwrite: bool = knob(
        False, "replace the run that is in the output folder; it is removed when the new run is finished"
    )
    save_every: int = knob(50, "updates between checkpoints; the last update is always saved", low=1)
    keep: int = knob(2, "checkpoints kept, the newest ones", low=1, aliases=("save_total_limit",))
    resume: bool = knob(False, "go on from the output folder's newest sound checkpoint, with that run's settings")
    rollback_on_kl: bool = knob(
        False,
        "after 3 updates in a row beyond 4 times the KL target: back to the last checkpoint's weights from before",
    )
    replay: str | None = knob(None, "an incident's folder: do its update again, look for the fault, and stop")
    resume_anyway: bool = knob(False, "with --resume: go on although settings, data or versions are not the run's")
    dry_run: bool = knob(False, "print the plan and stop")
    check: bool = knob(
        False,
        "load everything, try one update out, print what each check found and stop; exit status 2 where one fails. "
        "Nothing is written into the output folder",
    )


@dataclass(frozen=True)
class RecordSettings:
    """What is kept of single tokens, for `evaluate_generations.py --tokens RUN`."""

    record_tokens: bool = knob(False, "keep what the trainer saw of every token of some episodes, in RUN/tokens")
    record_format: str = knob("jsonl", "a JSON object a line, or a Parquet table", choices=("jsonl", "parquet"))
    record_every: int = knob(50, "updates between records; the first update is always recorded", low=1)
    record_prompts: int = knob(2, "prompts recorded of such an update, each with all its replies", low=1)


@dataclass(frozen=True)
class ExportSettings:
    """What a run hands out at its end. With --resume, one that has ended already does this alone."""

    merge_lora: bool = knob(
        False, "merge the adapter into its base, in float32, and save that whole model in RUN/merged; needs --use-lora"
    )
    export_from: str = knob("final", "of a run's weights, those that are merged and pushed", choices=("final", "best"))
    push_to_hub: HubName | None = knob(
        None,
        "upload weights (with --merge-lora the merged model's), tokenizer, model card and run.json to the Hugging "
        "Face hub, as owner/name",
        aliases=("hub_model_id",),
    )
    hub_private: bool = knob(
        True,
        "a repository that --push-to-hub makes is private; one that is there stays as it is",
        aliases=("hub_private_repo",),
    )


class Command:
    """What a command can be told: groups of knobs."""

    # groups of knobs of which one, named in a later layer, puts the others of earlier layers out of force
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = ()
    # the same, and no layer may set two of a group
    rivals: ClassVar[tuple[tuple[str, ...], ...]] = ()
    # knob -> the knobs of earlier layers that it puts out of force where it is set
    clearing: ClassVar[dict[str, tuple[str, ...]]] = {}
    # a reference's name -> how its value is to be read; -> what else it sets, where its layer does not
    read_as: ClassVar[dict[str, Callable[[Any], Any]]] = {}
    implied: ClassVar[dict[str, dict[str, Any]]] = {}
    # a block of a YAML file -> what it sets by being there, where the file does not
    blocks: ClassVar[dict[str, dict[str, Any]]] = {}

    def faults(self) -> list[str]:
        """What is wrong with the settings taken together, a line each."""
        return []

    def settled(self) -> Command:
        """The settings in the words that everything else reads, where some were said in others."""
        return self


LENGTHS = ("epochs", "num_iterations", "episodes")


@dataclass(frozen=True)
class Config(Command):
    """All settings of a training run. Groups that the algorithm does not read keep their defaults."""

    exclusive: ClassVar = (LENGTHS,)
    rivals: ClassVar = (("minibatches", "gradient_accumulation_steps"),)
    clearing: ClassVar = {"steps_per_topic": LENGTHS}  # under topics a run's length is another
    read_as: ClassVar = {"target": bare_targets, "target_kl": bare_targets}
    implied: ClassVar = {
        "mini_batch_size": {"gradient_accumulation_steps": 1},  # the default of TRL's first PPO, whose name it is
        "normalizer_alpha": {"normalize_scores": True},
    }
    blocks: ClassVar = {"lora": {"use_lora": True}}  # whoever writes down an adapter's shape wants one

    recipe: str = "smollm2-orca"
    algorithm: str = "ppo"
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
    def built_by_recipe(self) -> tuple[str, ...]:
        """The inputs that the demo recipe builds if they are not there."""
        if self.recipe != "demo":
            return ()
        return tuple(RECIPES["demo"]["training"][name] for name in ("actor_model", "rm_model", "prompts"))

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
        """Updates in a run over `prompts` training prompts of so many topics: by episodes, else num_iterations, else
        epochs (of which a later layer of settings puts an earlier one's out of force); what does not fill an update is
        rounded up. Under topics an epoch is a round of all of them."""
        if self.run.episodes is not None:
            return -(-self.run.episodes // self.episodes_per_update)
        if self.run.num_iterations is not None:
            return self.run.num_iterations
        if self.data.steps_per_topic is not None:
            return max(1, math.ceil((self.run.epochs or ROUNDS) * self.data.steps_per_topic * topics))
        return max(1, -(-int((self.run.epochs or EPOCHS) * prompts) // self.batch.batch_size))

    def optimizer_steps(self, updates: int) -> int:
        return updates * self.batch.ppo_epochs * self.batch.minibatches

    def faults(self) -> list[str]:
        return [*self._batch_faults(), *self._kl_faults(), *self._reward_faults(), *self._export_faults()]

    def settled(self) -> Config:
        """Accumulation steps as minibatches and micro-batches."""
        batch, episodes = self.batch, self.episodes_per_update
        steps, at_once = batch.gradient_accumulation_steps, batch.micro_batch_size
        if steps is None:
            return self
        said = {"minibatches": episodes // (steps * at_once)} if at_once else {"micro_batch_size": episodes // steps}
        return replace(self, batch=replace(batch, gradient_accumulation_steps=None, **said))

    def _batch_faults(self) -> list[str]:
        faults = []
        episodes, parts = self.episodes_per_update, self.batch.minibatches
        steps, at_once = self.batch.gradient_accumulation_steps, self.batch.micro_batch_size
        if steps is not None and episodes % (steps * (at_once or 1)):
            of = f"{at_once} episodes (--micro-batch-size) x {steps}" if at_once else f"{steps}"
            faults.append(
                f"{of} micro-batches of an optimizer step do not divide an update's {episodes} episodes: "
                "--gradient-accumulation-steps. Give a divisor, or say it with --minibatches and --micro-batch-size"
            )
        if episodes % parts:
            nearest = min((d for d in range(1, episodes + 1) if episodes % d == 0), key=lambda d: (abs(d - parts), d))
            of = "batch_size" if self.group_size == 1 else "batch_size x K ="
            faults.append(f"minibatches {parts} does not divide {of} {episodes}: --minibatches. Try {nearest}")
        if self.run.episodes is not None and self.run.episodes < episodes:
            faults.append(
                f"episodes {self.run.episodes} do not fill one update of {episodes}: --episodes. "
                f"Try {episodes}, or a smaller --batch-size"
            )
        if self.run.episodes is not None and self.run.episodes > MOST_UPDATES * episodes:
            faults.append(
                f"episodes {self.run.episodes} are more than {MOST_UPDATES:,} updates of {episodes}: --episodes. "
                "Give fewer"
            )
        if self.speed.rollout_engine == "vllm" and self.sampling.filters:
            faults.append(
                "vLLM does not say which tokens a filter let through, so no KL within them can be taken: "
                "--rollout-engine vllm with --top-k or --top-p. Leave one of them out"
            )
        if self.model.load_in_4bit and not self.model.use_lora:
            faults.append("4-bit weights cannot be trained: --load-in-4bit. Add --use-lora")
        seeds = self.run.seeds or ()
        if len(set(seeds)) != len(seeds):
            faults.append("a seed is named twice: --seeds. Name each once")
        return faults

    def _kl_faults(self) -> list[str]:
        faults, kl = [], self.kl
        if kl.kl_coef == 0 and kl.steered:
            faults.append(
                f"beta starts at 0 and is steered by factors, so it would stay there: --kl-coef 0, kl_schedule "
                f"{kl.kl_schedule}. Add --kl-schedule fixed, or start above 0"
            )
        count = len(kl.targets)
        if (count > 1) != (kl.kl_schedule == "phased"):
            faults.append(
                f"{count} KL target{'s' if count > 1 else ''} under kl_schedule {kl.kl_schedule}: --kl-target. "
                "Name several under phased, else one"
            )
        if len({target.per for target in kl.targets}) > 1:
            faults.append("KL targets per sequence and per token in one run: --kl-target. Name all in one unit")
        run = self.run
        if run.rollback_on_kl and not kl.steered:
            faults.append(
                "no KL is held here, so none runs away: --rollback-on-kl. Leave it out, or let beta be steered"
            )
        if run.rollback_on_kl and (run.keep - 1) * run.save_every < MAX_CONSECUTIVE_SKIPS:
            faults.append(
                f"checkpoints from before a KL ran away are gone when {MAX_CONSECUTIVE_SKIPS} updates have shown it: "
                f"--rollback-on-kl, --keep {run.keep}, --save-every {run.save_every}. Raise one of these two"
            )
        marks = kl.kl_boundaries
        if marks is not None and (len(marks) != count - 1 or list(marks) != sorted(set(marks))):
            faults.append(
                f"{len(marks)} boundaries for {count} KL targets: --kl-boundaries. "
                "Give one fewer than targets, rising, such as 0.33 0.67"
            )
        if kl.kl_placement == "reward" and self.grpo.scale_rewards != "none":
            faults.append(
                f"a KL in the reward would be divided by the spread of the {self.grpo.scale_rewards}, and beta would "
                f"have no unit: --scale-rewards {self.grpo.scale_rewards}. "
                "Add --kl-placement loss, or --scale-rewards none"
            )
        return faults

    def _reward_faults(self) -> list[str]:
        faults = []
        learned, rules, weights = self.model.rm_model is not None, self.reward.reward_func, self.reward.reward_weights
        if not learned and not rules:
            faults.append("nothing to reward: --rm-model none. Name a --reward-func, or a reward model")
        if weights is not None and len(weights) != learned + len(rules):
            faults.append(
                f"{len(weights)} weights for {learned + len(rules)} rewards: --reward-weights. "
                f"Give one for each of, in this order: {', '.join([*(['reward model'] if learned else []), *rules])}"
            )
        return faults

    def _export_faults(self) -> list[str]:
        faults, name = [], self.export.push_to_hub
        if self.export.merge_lora and not self.model.use_lora:
            faults.append(
                "no adapter to merge: --merge-lora. Add --use-lora, or leave it out: without adapters the run saves a "
                "whole model"
            )
        if name is not None and self.run.seeds is not None:
            faults.append(
                f"several runs and one repository: --seeds, --push-to-hub {name}. Push the one you choose afterwards: "
                f"--resume --push-to-hub {name} --output RUN"
            )
        return faults
