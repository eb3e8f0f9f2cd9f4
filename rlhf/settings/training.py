"""The settings of a training run, each with its unit, its range and its meaning. Imports no torch.

A command's configuration is a frozen dataclass of groups. The docstring of a group is its title in --help-all. Each
field of a group is one setting, one YAML key and one flag.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlhf.settings.fields import Layer, setting
from rlhf.settings.merge import Command
from rlhf.settings.recipes import DEFAULT_RECIPE
from rlhf.settings.types import (
    FROM_TRL,
    CriticName,
    HubName,
    JsonObject,
    KLTarget,
    MemorySize,
    PathName,
    Renaming,
    Split,
    StopText,
)

LARGEST_SEED = 2**32 - 1  # the limit of numpy and transformers
MOST_UPDATES = 10_000_000
BEST_RULES = ("score", "perplexity")  # --best-rule may also be the name of an --eval-func
TRACKERS = ("wandb", "trackio")
# eval/NAME of every evaluation, one of them only with a teacher
EVAL_METRICS = ("score", "kl_divergence", "teacher_kl", "perplexity", "length", "eos_rate")
CRITIC_FILE = "critic.safetensors"  # in a run folder: trainable weights of a critic that is a second network
MAX_CONSECUTIVE_SKIPS = 3  # updates in a row that are skipped, or whose KL is above 4x its target, before the run acts
SAVE_SECONDS = 300  # between two checkpoints if --save-every is unset
PARTS = ("plan", "reward", "prompts", "update")  # of --check, in this order
RM_TEXTS = ("template", "eos")  # forms of the text that a reward model scores


@dataclass(frozen=True)
class ModelSettings:
    """Models"""

    actor_model: PathName = setting(
        "HuggingFaceTB/smollm2-135M-SFT-Only",
        "start model: a folder, a GGUF file, package:NAME (an installed package with one GGUF file) or a hub name",
        aliases=("model_name",),
        brief="start model: a folder, a GGUF file or a hub name",
    )
    rm_model: PathName | None = setting(
        "./reward_model_output",
        "reward model: a folder or a hub name; none: use only the reward functions (--reward-func)",
        aliases=("reward_model",),
        brief="reward model: a folder or a hub name; none: only reward functions",
    )
    rm_text: str | None = setting(
        None,
        "text that reward and judge models without a record of their training score; template: the whole chat as "
        "their chat template renders it, as TRL trains them; eos: without what the template writes after EOS",
        unset="template",
        choices=RM_TEXTS,
        needs="rm_model",
    )
    teacher: PathName | None = setting(
        None,
        "teacher of on-policy distillation, named as --actor-model: a causal LM with the start model's tokenizer. "
        "Each token gets the score log p_teacher - log p_policy, in nats. Rewards are optional then: --rm-model none",
        aliases=("teacher_model", "teacher_model_name_or_path"),
    )
    allow_weak_reward_model: bool = setting(
        False,
        "accept a reward model whose held-out accuracy is below 0.6, or below that of a choice by length alone",
    )
    use_lora: bool = setting(
        False,
        "train low-rank adapters (LoRA) instead of all weights; a block `lora:` in a YAML file also turns this on",
        brief="train LoRA adapters instead of all weights",
    )
    lora_r: int = setting(16, "rank of the LoRA adapters", ge=1, aliases=("rank", "r"), needs="use_lora")
    lora_alpha: float = setting(
        32.0,
        "scaling of the LoRA adapters: their output is multiplied by alpha / r",
        gt=0,
        le=1_000_000,
        aliases=("alpha",),
        needs="use_lora",
    )
    lora_dropout: float = setting(
        0.0, "dropout on the inputs of the LoRA adapters, in optimizer steps only", ge=0, lt=1, needs="use_lora"
    )
    lora_targets: tuple[str, ...] = setting(
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        "modules that get a LoRA adapter; all-linear: every linear layer except the language-model head",
        aliases=("target_modules",),
        needs="use_lora",
    )
    load_in_4bit: bool = setting(
        False, "load the frozen weights in 4 bits (NF4), which cannot be trained", needs="use_lora", strict=True
    )
    bf16: bool | None = setting(
        None,
        "bfloat16 autocast; unset: on for a GPU that computes in bfloat16, and on a CPU if a measurement at the start "
        "finds it at least 1.2 times as fast as float32 (tiny models and --deterministic: float32)",
    )
    gradient_checkpointing: bool = setting(
        False, "recompute activations in the backward pass: uses less memory, is slower"
    )

    @property
    def has_adapter_dropout(self) -> bool:
        """True if optimizer steps use dropout on the inputs of the adapters."""
        return self.use_lora and self.lora_dropout > 0


@dataclass(frozen=True)
class DataSettings:
    """Data"""

    prompts: PathName = setting(
        "Intel/orca_dpo_pairs",
        "prompts, chats or preference pairs: a file (JSONL, JSON, CSV, TSV, Parquet), a folder or a hub dataset",
        aliases=("dataset", "dataset_name"),
        brief="prompts: a data file, a folder or a hub dataset",
    )
    split: Split | None = setting(
        None,
        "percent of the questions for reward model / RL / evaluation",
        unset="45/45/10, or 0/90/10 for data without preference pairs. With --eval-dataset, the questions for "
        "evaluation are trained on",
    )
    eval_dataset: PathName | None = setting(
        None,
        "evaluation prompts: a data file, a folder or a hub dataset, read with the same --columns (and for a hub "
        "dataset --dataset-config); its split `test`, if it has splits; unset: the questions of --prompts that "
        "--split holds out",
        aliases=("val_files",),
    )
    dataset_config: str | None = setting(None, "configuration of a hub dataset, such as `main` of openai/gsm8k")
    dataset_split: str | None = setting(
        None,
        "split of a hub dataset or a folder that is read",
        unset="train, or the only split of a folder",
        aliases=("dataset_train_split",),
    )
    columns: tuple[Renaming, ...] = setting(
        (), "new names for columns of the data, as NEW=OLD: `--columns prompt=question answer=solution`"
    )
    skip_bad_rows: float | None = setting(
        None,
        "percent of the rows that may be skipped because they cannot be used, for example because the prompt is empty",
        unset="0 for files, 1 for hub datasets",
        ge=0,
        lt=100,
    )
    steps_per_topic: int | None = setting(
        None,
        "train by topic (column `topic` of the prompts): this many updates on one topic, then on the next one, in "
        "rounds; unset: topics are ignored",
        ge=1,
    )
    plain_prompts: bool = setting(
        False,
        "do not apply the start model's chat template: the completion continues the text of the prompt, as with a "
        "base model",
    )
    chat_template_kwargs: JsonObject | None = setting(
        None,
        "JSON object of variables of the chat template, such as '{\"enable_thinking\": false}' for Qwen3, for all "
        "prompts of the run, its evaluations and chats",
        unset="those with which the model was trained",
        needs="!plain_prompts",
        strict=True,
    )
    few_shot: PathName | None = setting(
        None,
        "file with worked examples (prompt, and chosen, completion or answer), which precede each prompt in training "
        "and evaluations; reward functions receive the prompt without them",
    )
    max_prompts: int = setting(10_000, "largest number of training prompts", ge=1)
    prompt_length: int = setting(
        256, "largest length of a prompt, in tokens; longer prompts are skipped and counted", ge=1
    )
    eval_prompts: int = setting(128, "largest number of evaluation prompts", ge=1)
    eval_text: PathName | None = setting(
        None,
        "text file on which the perplexity is computed",
        unset="the chosen completions of held-out pairs, or without pairs, completions that the start model generated "
        "once",
    )


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling"""

    max_new_tokens: int = setting(
        128,
        "largest length of a completion, in tokens",
        ge=1,
        aliases=("reply_length", "response_length", "max_completion_length"),
        brief="largest length of a completion, in tokens",
    )
    temperature: float = setting(
        0.7, "sampling temperature; log-probabilities and KL are computed at the same temperature", gt=0
    )
    top_k: int = setting(0, "sample from the k most likely tokens only; 0: off", ge=0)
    top_p: float = setting(
        1.0,
        "nucleus sampling: sample from the smallest set of tokens with this total probability; below 1, the KL is "
        "computed within that set and underestimates the distance to the start model",
        gt=0,
        le=1,
    )

    stop: tuple[StopText, ...] | None = setting(
        None,
        r"texts that end a completion, in addition to EOS, for a base model: `--stop '\n\n' Question:`; \n is a line "
        "break. The tokens of the text belong to the completion, but reward functions receive it without the text",
        unset="only EOS",
        aliases=("stop_strings", "stop_sequences"),
    )

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return tuple(stop.text for stop in self.stop or ())

    @property
    def filters(self) -> bool:
        """True if some tokens are never sampled."""
        return self.top_k > 0 or self.top_p < 1

    def __str__(self) -> str:
        limits = [f"top-k {self.top_k}"] if self.top_k else []
        limits += [f"top-p {self.top_p:g}"] if self.top_p < 1 else []
        limits += [f"stop {' '.join(map(repr, self.stops))}"] if self.stop else []
        return ", ".join([f"at most {self.max_new_tokens} tokens", f"temperature {self.temperature:g}", *limits])


@dataclass(frozen=True)
class BatchSettings:
    """Batch: the rollout of one update, and the optimizer steps on it"""

    batch_size: int = setting(
        4,
        "prompts per update; K completions are sampled for each",
        ge=1,
        aliases=("per_device_train_batch_size",),
        brief="prompts per update",
    )
    K: int | None = setting(
        None,
        "completions per prompt. GRPO, RLOO (default: 8) and ReMax (2: one of them greedy) compare their scores and "
        "need at least 2; unset in other algorithms: 1",
        ge=1,
        aliases=("num_generations", "group_size"),
        brief="completions per prompt",
    )
    max_episode_tokens: int | None = setting(
        None,
        "largest length of an episode of several turns after its prompt, in tokens, with those of the environment; "
        "unset: --max-new-tokens",
        ge=1,
    )
    ppo_epochs: int = setting(
        4, "passes over each rollout; every algorithm uses it", ge=1, aliases=("num_ppo_epochs",)
    )
    minibatches: int = setting(
        1,
        "optimizer steps per pass over the rollout; must divide the number of episodes per update",
        ge=1,
        aliases=("num_mini_batches",),
    )
    micro_batch_size: int = setting(
        0,
        "episodes per forward pass; 0: as many as fit into --micro-batch-tokens. Changes the memory use, not the "
        "result",
        ge=0,
        aliases=("mini_batch_size",),
    )
    micro_batch_tokens: int = setting(
        0,
        "prompt and completion tokens per forward pass, also if --micro-batch-size is set; 0: on a GPU as many as the "
        "free memory allows when the run starts, up to 16,384; 2,048 on a CPU. Changes the memory use, not the result",
        ge=0,
        aliases=("ppo_max_token_len_per_gpu", "max_tokens_per_gpu"),
    )
    gradient_accumulation_steps: int | None = setting(
        None,
        "micro-batches per optimizer step, instead of --minibatches: a step uses this number times --micro-batch-size "
        "episodes; if --micro-batch-size is 0, all episodes in this number of parts; unset: --minibatches is used",
        ge=1,
    )
    clip_range: float = setting(
        0.2,
        "clip range of the policy ratio: it is clipped to 1 +- this value",
        gt=0,
        lt=1,
        aliases=("cliprange", "clip_epsilon", "epsilon", "clip_ratio", "clip_ratio_low", "eps_clip"),
    )
    epsilon_high: float | None = setting(
        None,
        "clip range of the policy ratio above 1, if it differs from the one below 1: the ratio is clipped to "
        "[1 - --clip-range, 1 + this value] (DAPO, arXiv 2503.14476: 0.28); unset: --clip-range",
        gt=0,
        le=100,
        aliases=("clip_range_high", "clip_ratio_high"),
    )
    delta: float | None = setting(
        None,
        "two-sided clip: largest policy ratio at a negative advantage, so that the loss is bounded (INTELLECT-2, "
        "arXiv 2505.07291; dual-clip PPO, arXiv 1912.09729: 3); above 1 + --epsilon-high; unset: no limit",
        gt=1,
        le=1_000_000,
        aliases=("clip_ratio_c", "dual_clip"),
        needs="!loss_type=cispo",  # it limits every ratio
        strict=True,
    )
    mask_truncated_completions: bool = setting(
        False,
        "leave completions without EOS out of the loss (overlong filtering, DAPO, arXiv 2503.14476); their scores "
        "still count in the mean of their group",
    )
    entropy_coef: float = setting(0.0, "weight of the entropy bonus (mean entropy per token, nats)", ge=0)

    @property
    def clip(self) -> tuple[float, float, float | None]:
        """Clip range below 1, clip range above 1, and `delta`: the fields of `rlhf.algorithms.clipping.Clip`."""
        return self.clip_range, self.clip_range if self.epsilon_high is None else self.epsilon_high, self.delta


@dataclass(frozen=True)
class SpeedSettings:
    """Speed: these settings change time and memory, not the result"""

    rollout_engine: str = setting(
        "auto",
        "how completions are sampled. plain: the whole batch until its longest completion ends; slots: continuous "
        "batching, a finished completion makes room for the next prompt; graph: slots, with the decoding step as a "
        "CUDA graph; vllm: by vLLM, if it is installed; auto: graph on a GPU, slots on a CPU",
        choices=("auto", "plain", "slots", "graph", "vllm"),
    )
    rollout_slots: int = setting(
        0,
        "completions sampled at the same time; 0: on a GPU as many as the free memory allows when the run starts, up "
        "to 1,024; 64 on a CPU",
        ge=0,
        needs=("!rollout_engine=plain", "!rollout_engine=vllm"),
    )
    threads: int | None = setting(
        None,
        "threads of torch. Runs on a CPU are bit-identical at equal numbers only; unset: OMP_NUM_THREADS or "
        "MKL_NUM_THREADS, if one is set; otherwise on a CPU one per core, or 1 if a measurement at the start finds it "
        "at least twice as fast, because other programs use the cores (not with --deterministic and in Python)",
        ge=1,
    )
    packed: bool = setting(
        True, "sequence packing: no computation on padding, and a prompt is computed once for all of its completions"
    )
    fit: MemorySize | None = setting(
        None,
        "choose settings whose predicted peak memory fits this size, such as 8GB: the micro-batch, the rollout slots, "
        "gradient checkpointing, 8-bit Adam and, if it must be, LoRA; prints what it chose; unset: nothing is chosen",
        brief="choose settings that fit this memory size, such as 8GB",
    )

    @property
    def own_engine(self) -> str:
        """The engine that samples where vLLM does not: before training, and in evaluations."""
        return "auto" if self.rollout_engine == "vllm" else self.rollout_engine


FITTED = ("micro_batch_size", "rollout_slots", "gradient_checkpointing", "optim", "use_lora")  # that --fit chooses
FROM_FREE_MEMORY = ("micro_batch_tokens", "rollout_slots")  # that a run on a GPU chooses if they are 0


@dataclass(frozen=True)
class CriticSettings:
    """Critic and generalized advantage estimation, GAE (Schulman et al. 2016, arXiv 1506.02438)"""

    critic: CriticName = setting(
        CriticName("shared"),
        "network of the critic. shared: a value head on the policy's hidden states; separate: a second network, which "
        "doubles the weights, the optimizer state and the backward pass; reward-model: a second network that starts "
        "from the reward model (--rm-model), which must have the start model's tokenizer; or the folder of a run: its "
        "critic, shared or separate as it was there",
    )
    critic_learning_rate: float | None = setting(
        None,
        "learning rate of the critic: of the value head and, if the critic is a second network, of its weights; same "
        "schedule as --learning-rate; unset: --learning-rate",
        gt=0,
    )
    value_coef: float = setting(0.1, "weight of the value loss (0.5 x mean squared error)", ge=0, aliases=("vf_coef",))
    value_clip_range: float = setting(
        0.2,
        "clip range of the value: it is clipped to its value at the rollout +- this value, in score units",
        gt=0,
        aliases=("cliprange_value",),
    )
    gamma: float = setting(1.0, "discount per --gae-unit", ge=0, le=1, aliases=("gae_gamma",))
    lam: float = setting(0.95, "GAE lambda", ge=0, le=1, aliases=("gae_lambda",))
    gae_unit: str = setting(
        "token",
        "unit of time of --gamma and --lam. token: they act between one token of the policy and its next; turn: only "
        "between the turns of an episode (Turn-PPO, arXiv 2512.17008)",
        choices=("token", "turn"),
        aliases=("gae_timestep_unit",),
    )
    critic_lam: float | None = setting(
        None,
        "GAE lambda of the critic's targets, if it differs from that of the advantages (decoupled GAE, VC-PPO, arXiv "
        "2503.01491: 1, so that the targets are the rewards to go); unset: --lam",
        ge=0,
        le=1,
    )
    critic_warmup: int = setting(
        0,
        "updates at the start of the run in which only the critic is trained: the policy and beta do not change",
        ge=0,
        aliases=("value_warmup", "freezing_actor_steps"),
    )

    @property
    def run(self) -> str | None:
        """The folder of the run whose critic is loaded; None: the critic is a new one."""
        return None if self.critic in CriticName.KINDS else self.critic


@dataclass(frozen=True)
class PPOSettings:
    """PPO (Schulman et al. 2017, arXiv 1707.06347)"""

    whiten_rewards: bool = setting(
        False,
        "scale the rewards of all tokens in the batch to variance 1 and keep their mean, as in TRL: (r - mean) / std "
        "+ mean. A token whose reward is 0 then gets mean - mean / std",
    )
    whiten_advantages: bool = setting(True, "shift and scale the advantages to mean 0 and variance 1 in the batch")
    kl_penalty_at: str = setting(
        "token",
        "where the reward contains the KL penalty: at each token, or its sum at the last token (eos)",
        choices=("token", "eos"),
        needs="kl_placement=reward",
    )


@dataclass(frozen=True)
class GroupSettings:
    """Groups of completions whose scores are compared (GRPO, RLOO)"""

    dynamic_sampling: int = setting(
        0,
        "groups whose scores are all equal teach nothing about the score: replace them by groups of other prompts, of "
        "which one rollout samples at most this many for each; 0: off. The additional episodes count for --episodes",
        ge=0,
        le=100,
    )


@dataclass(frozen=True)
class GRPOSettings:
    """GRPO (Shao et al. 2024, arXiv 2402.03300)"""

    scale_rewards: str = setting(
        "none",
        "divide the advantages, r - mean(r) of the group, by the standard deviation of the group, of the batch, or "
        "not (none)",
        choices=("none", "group", "batch"),
    )
    loss_type: str = setting(
        "dapo",
        "policy loss. dapo: clipped loss, averaged over all tokens; grpo: over the tokens of each completion, then "
        "over the completions; dr_grpo: summed over tokens and divided by a constant length; gspo: one ratio per "
        "completion; cispo: clipped ratios as weights of the log-probabilities",
        choices=("dapo", "grpo", "dr_grpo", "cispo", "gspo"),
    )


CONTROLS = {"none": "", "shuffled": " control (scores shuffled)"}  # --control -> the end of the run's name
CONTROL_MEANS = (  # in texts
    "in training the scores of each update are exchanged between its completions at random; evaluations and logged "
    "rewards are the true scores"
)


def name_with_control(name: str, control: str) -> str:
    """Return the name of a run or of a group of runs: that of a control contains the word control."""
    return name if "control" in name.lower() else name + CONTROLS.get(control, f" control ({control})")


@dataclass(frozen=True)
class RewardSettings:
    """Rewards"""

    reward_func: tuple[str, ...] = setting(
        (),
        "reward functions, in addition to the reward model: length_penalty, word_penalty, keyword_bonus, exact_match, "
        "last_number, trl:NAME for a function of trl.rewards, or FILE.py:NAME with the signature of TRL's reward "
        "functions",
        brief="reward functions: a built-in name, trl:NAME or FILE.py:NAME",
    )
    eval_func: tuple[str, ...] = setting(
        (),
        "evaluation functions: metrics that training never sees, logged as eval/NAME at every evaluation. The same "
        "names and signature as --reward-func, for example exact_match, which compares with the column answer",
    )
    reward_weights: tuple[float, ...] | None = setting(
        None,
        "weights of the reward model (if there is one) and of each --reward-func, in this order",
        unset="all 1",
    )
    reward_timeout: float = setting(
        600.0,
        "time limit in seconds: of a reward function for one batch of completions, after which the run stops, and of "
        "one call of an environment, after which the episode has no score",
        gt=0,
        needs="reward_func or eval_func or environment",
    )
    keywords: tuple[str, ...] = setting(
        ("helpful",),
        "keyword_bonus gives 1 to a completion that contains one of these words, in upper or lower case",
        needs="reward_func=keyword_bonus or eval_func=keyword_bonus",
    )
    missing_eos_penalty: float = setting(
        0.0, "subtracted from the score of a completion without EOS, in score units", ge=0
    )
    normalize_scores: bool = setting(
        False, "normalize the scores with running estimates of their mean and standard deviation"
    )
    score_ema: float = setting(
        0.99,
        "decay of the running estimates of --normalize-scores: the weight of the old estimate",
        ge=0,
        lt=1,
        aliases=("normalizer_alpha",),
        needs="normalize_scores",
    )
    control: str = setting(
        "none",
        "train a control run. shuffled: in each update, exchange the scores between all completions at random, across "
        "prompts, before they reach the algorithm. Mean and spread of the scores stay, and the signal is gone. "
        "Evaluations use the true scores (Shao et al. 2025, arXiv 2506.10947)",
        choices=tuple(CONTROLS),
    )


@dataclass(frozen=True)
class EnvironmentSettings:
    """Environment: answers the policy's turns"""

    environment: str | None = setting(
        None,
        "environment of several turns: crossing or crossing-sparse (a game), or FILE.py:CLASS, a class with reset and "
        "observe, or one for environment_factory of TRL's GRPOTrainer (docs/environments.md)",
        brief="environment of several turns: a built-in name or FILE.py:CLASS",
    )
    max_turns: int | None = setting(
        None,
        "largest number of the policy's turns in an episode (max_tool_calling_iterations of TRL, plus 1)",
        unset="only --max-episode-tokens limits them",
        ge=1,
        needs="environment",
    )
    max_observation_tokens: int | None = setting(
        None, "cut the environment's texts to so many tokens", unset="no limit", ge=1, needs="environment"
    )


def function_name(rule: str) -> str:
    """Return the name of a function in --eval-func: NAME of FILE.py:NAME or trl:NAME(...), or a built-in function."""
    if rule.startswith(FROM_TRL):
        return rule.removeprefix(FROM_TRL).partition("(")[0].strip()
    return rule.rpartition(":")[2]


ADAPTIVE_TARGET = "6/sequence"  # Ziegler et al. 2019, and the SmolLM2-orca and rank-1 documents
PHASED_TARGETS = ("0.05/token", "0.02/token", "0.01/token")  # the phased-KL documents
STEERED = ("!kl_schedule=fixed", "!kl_placement=none")  # needs of the settings that steer beta


@dataclass(frozen=True)
class KLSettings:
    """KL control: keeps the policy close to the start model"""

    kl_coef: float = setting(
        0.05,
        "beta, the KL coefficient, at the start of the run, in score units per nat",
        ge=0,
        aliases=("init_kl_coef",),
        needs="!kl_placement=none",
    )
    kl_placement: str = setting(
        "reward",
        "add the KL penalty to the reward, or to the loss (k3 x ratio, docs/how_it_works.md); none: only log the KL",
        choices=("reward", "loss", "none"),
    )
    kl_schedule: str = setting(
        "adaptive",
        "how beta changes. fixed: not at all; adaptive: towards one KL target; phased: several targets, one after the "
        "other",
        choices=("fixed", "adaptive", "phased"),
        needs="!kl_placement=none",
    )
    kl_target: tuple[KLTarget, ...] | None = setting(
        (KLTarget.parse(ADAPTIVE_TARGET),),
        "KL to the start model to aim at, in nats with a unit (6/sequence or 0.05/token); several targets with "
        "--kl-schedule phased; unset: 6/sequence, or for phased 0.05/token 0.02/token 0.01/token",
        aliases=("target", "target_kl"),
        brief="KL to the start model to aim at, in nats with a unit",
        needs=STEERED,
    )
    kl_horizon: int | None = setting(
        None,
        "episodes over which beta reacts; a smaller number reacts faster; unset: 1/12 of the episodes of the shortest "
        "phase, at least those of two updates and at most 10,000, so that beta can change about 11-fold in a phase",
        ge=1,
        needs=STEERED,
    )

    @property
    def targets(self) -> tuple[KLTarget, ...]:
        """The KL targets in their order. With a fixed beta, the target is only shown next to the KL."""
        phased = self.kl_schedule == "phased"
        return self.kl_target or tuple(map(KLTarget.parse, PHASED_TARGETS if phased else (ADAPTIVE_TARGET,)))

    def coef_in(self, placement: str, kl_coef: float) -> float:
        """Return `kl_coef` if the KL penalty is in `placement` ("reward" or "loss"), otherwise 0."""
        return kl_coef if self.kl_placement == placement else 0.0

    @property
    def steered(self) -> bool:
        """True if beta follows the measured KL, so that the KL target has an effect."""
        return self.kl_schedule != "fixed" and self.kl_placement != "none"


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimizer (AdamW)"""

    learning_rate: float = setting(
        5e-6,
        "learning rate at the start, or after the warm-up",
        gt=0,
        aliases=("lr",),
        brief="learning rate at the start",
    )
    lr_schedule: str = setting(
        "cosine", "schedule of the learning rate over the run", choices=("cosine", "linear", "constant")
    )
    warmup_steps: float = setting(
        0.0,
        "updates in which the learning rate rises linearly from 0; below 1: their share of the run",
        ge=0,
        le=MOST_UPDATES,
        aliases=("warmup_ratio", "lr_warmup_ratio", "lr_warmup_steps_ratio", "lr_warmup_steps"),
    )
    weight_decay: float = setting(
        0.0,
        "weight decay of AdamW: each optimizer step shrinks the weights by this value times the learning rate; biases "
        "and norms are excluded",
        ge=0,
        le=1,
        aliases=("l2",),
    )
    optim: str = setting(
        "adamw",
        "optimizer. adamw: AdamW of torch, 8 bytes of state per trained weight; adamw_8bit: AdamW of bitsandbytes "
        "(Dettmers et al. 2022, arXiv 2110.02861), about 2 bytes per weight; embeddings and small tensors keep 8",
        choices=("adamw", "adamw_8bit"),
    )
    adam_beta1: float = setting(0.9, "beta1 of AdamW: decay of the mean of the gradients", ge=0, lt=1)
    adam_beta2: float = setting(0.999, "beta2 of AdamW: decay of the mean of the squared gradients", ge=0, lt=1)
    max_grad_norm: float = setting(1.0, "gradient clipping: largest norm of the gradient", gt=0)

    def warmup_updates(self, updates: int) -> int:
        """Return in how many of `updates` updates the learning rate rises. transformers rounds a share up."""
        return int(self.warmup_steps) if self.warmup_steps >= 1 else math.ceil(self.warmup_steps * updates)


# default length of a run: passes over the prompts, or rounds over all topics
EPOCHS = 3.0
ROUNDS = 1.0


@dataclass(frozen=True)
class RunSettings:
    """Run: length, seeds, evaluation, checkpoints, output folder"""

    seed: int = setting(
        42, "random seed; all random numbers of the run depend on it", ge=0, le=LARGEST_SEED, needs="!seeds"
    )
    deterministic: bool = setting(
        False,
        "use deterministic algorithms: on one GPU, the same seed gives bit-identical weights, and a run is slower. On "
        "a CPU, runs with equal --threads and --bf16 are bit-identical without it; with it, neither is measured",
    )
    seeds: tuple[int, ...] | None = setting(
        None,
        "train one run per seed, one after the other, into OUTPUT_seed42 and so on. Seeds that are finished, or that "
        "another process trains, are skipped: the same command, started once per GPU, shares the seeds",
        ge=0,
        le=LARGEST_SEED,
        brief="train one run per seed, one after the other",
    )
    epochs: float | None = setting(
        EPOCHS,
        "length of the run: passes over the training prompts, or rounds over all topics with --steps-per-topic; "
        "unset: 3 passes, or 1 round",
        gt=0,
        le=100_000,
        aliases=("num_train_epochs", "num_epochs"),
        needs=("!num_iterations", "!episodes"),
    )
    num_iterations: int | None = setting(
        None,
        "length of the run in updates, instead of --epochs",
        ge=1,
        le=MOST_UPDATES,
        brief="length of the run in updates, instead of --epochs",
        needs="!episodes",
    )
    episodes: int | None = setting(
        None,
        "length of the run in generated completions, instead of --num-iterations: an equal budget for all algorithms",
        ge=1,
        aliases=("total_episodes",),
    )
    eval_every: int | None = setting(
        None,
        "updates between evaluations; the start model and the final weights are always evaluated; unset: after a "
        "quarter, half and three quarters of the run, too",
        ge=1,
    )
    eval_samples: int = setting(
        1,
        "completions per evaluation prompt; above 1, pass@k is logged for --eval-func functions with values 0 and 1",
        ge=1,
        aliases=("num_generations_eval",),
    )
    eval_temperature: float | None = setting(
        None,
        "sampling temperature of the evaluations during training; 0: greedy decoding, the most likely token. "
        "Log-probabilities are still computed at --temperature; unset: that of --temperature",
        ge=0,
    )
    best_rule: str = setting(
        "score",
        "how the best checkpoint is chosen, among those with a KL of at most 1.5 times the target (no such limit if "
        "beta is fixed). perplexity: the lowest perplexity; score: the highest score; the name of an --eval-func: its "
        "highest value. If a reward model gives scores, the last two also need a perplexity of at most 1.15 times the "
        "start model's, unless the text is the start model's own and there is a KL target",
    )
    output: PathName = setting("./ppo_training_output", "run folder", aliases=("output_dir",), brief="run folder")
    overwrite: bool = setting(
        False, "use the output folder also if it has a run; the old run is moved to OUTPUT_1, OUTPUT_2 and so on"
    )
    save_every: int | None = setting(
        None,
        "updates between checkpoints; the last update and one that a signal stops are always saved; unset: a "
        "checkpoint every 5 minutes",
        ge=1,
    )
    keep: int = setting(2, "number of checkpoints to keep, the newest ones", ge=1, aliases=("save_total_limit",))
    resume: bool = setting(
        False,
        "resume the run in the output folder from its newest valid checkpoint, with its settings",
        brief="resume the run in --output",
    )
    ddp_timeout: float = setting(
        1800.0,
        "seconds after which a run on several processes ends if one of them does not answer",
        gt=0,
    )
    rollback_on_kl: bool = setting(
        False,
        "after 3 updates in a row with a KL above 4 times the target, load the newest checkpoint from before them",
        needs=(*STEERED, "save_every"),
        strict=True,
    )
    resume_anyway: bool = setting(
        False, "accept settings, data or library versions that differ from those of the resumed run", needs="resume"
    )
    dry_run: bool = setting(False, "print the plan and stop", brief=True)
    memory: MemorySize | None = setting(
        None, "plan as if the device had this memory, such as 8GB, all of it free; unset: that of this machine",
        needs="dry_run",
    )  # fmt: skip
    write_parts: PathName | None = setting(
        None,
        "write the parts of the data into this folder, for `trl sft`, `trl dpo` and other programs, and stop; no "
        "question is in two parts",
    )
    check: tuple[str, ...] = setting(
        (),
        "check these parts of the run and stop; without a part: all. plan: what --dry-run prints; reward (or "
        "--check-reward): what the rewards pay for right answers and for hacks; prompts (or --scan): what can be "
        "learned from samples of the start model, with recommended settings; update: one trial update, with its "
        "memory. The exit status is 2 if a check or a reward function fails, if nothing can be learned, or if a hack "
        "is paid as much as the right answer (a warning if all parts are checked). Nothing is written to the output "
        "folder",
        choices=PARTS,
        alone=PARTS,
        aliases=("check_reward", "scan"),
        brief="check plan, reward, prompts, update (or some of these), and stop",
    )

    @property
    def only_looks(self) -> bool:
        """True if the command prints something and trains nothing."""
        return self.dry_run or bool(self.check) or self.write_parts is not None

    @property
    def only_reward(self) -> bool:
        """True if only the reward is checked: batches and the length of a run do not matter then."""
        return set(self.check) == {"reward"}


@dataclass(frozen=True)
class RecordSettings:
    """Trackers, and the token record for a page of the tokens of a run (evaluate with --tokens RUN)"""

    report_to: tuple[str, ...] | None = setting(
        None,
        "trackers that receive the run, in addition to TensorBoard, which is always written: wandb, trackio "
        "(docs/metrics.md)",
        choices=("tensorboard", *TRACKERS),
    )
    record_tokens: bool = setting(
        False,
        "save the log-probabilities, KL, advantage and other values of each token, in RUN/tokens: for all completions "
        "of 2 prompts, in update 1 and every 50 updates",
    )


@dataclass(frozen=True)
class ExportSettings:
    """Export at the end of a run; for a finished run, add --resume"""

    merge_lora: bool = setting(
        False,
        "merge the LoRA adapter into its base model, in float32, and save the result in RUN/merged",
        needs="use_lora",
        strict=True,
    )
    export_from: str = setting(
        "final",
        "weights to merge and to upload: those of the last update, or the best checkpoint",
        choices=("final", "best"),
        needs="merge_lora or push_to_hub",
    )
    push_to_hub: HubName | None = setting(
        None,
        "upload weights (the merged model with --merge-lora), tokenizer, model card and run.json to the Hugging Face "
        "hub, as owner/name; a new repository is private",
        aliases=("hub_model_id",),
    )


@dataclass(frozen=True)
class Config(Command):
    """All settings of a training run. Groups that the algorithm does not use keep their defaults."""

    recipe: str = DEFAULT_RECIPE  # name of a shipped recipe, or the file of a user's recipe
    algorithm: str = "ppo"
    # from the algorithm's row in the table: its name in texts, whether it compares the completions of a prompt, and
    # how many of them are greedy
    label: str = field(default="PPO", compare=False, repr=False)
    compares: bool = field(default=False, compare=False, repr=False)
    greedy: int = field(default=0, compare=False, repr=False)
    user_file: Layer = field(default_factory=dict, compare=False, repr=False)  # settings in config.py, used or not
    in_python: bool = field(default=False, compare=False, repr=False)  # made by make_config, not by a command
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
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    kl: KLSettings = field(default_factory=KLSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    run: RunSettings = field(default_factory=RunSettings)
    record: RecordSettings = field(default_factory=RecordSettings)
    export: ExportSettings = field(default_factory=ExportSettings)

    @property
    def title(self) -> str:
        """The algorithm's name in texts, with the control: `GRPO control (scores shuffled)`."""
        return name_with_control(self.label, self.reward.control)

    @property
    def separate_critic(self) -> bool:
        """True if the critic is a second network."""
        run = self.critic.run
        return self.critic.critic != "shared" if run is None else (Path(run) / CRITIC_FILE).is_file()

    @property
    def critic_from_reward_model(self) -> bool:
        """True if the critic starts from the reward model."""
        return self.critic.critic == "reward-model"

    @property
    def group_size(self) -> int:
        """Completions per prompt."""
        return self.batch.K or 1

    @property
    def rules(self) -> tuple[str, ...]:
        """What may be code of the user: the reward functions, the evaluation functions and the environment."""
        environment = self.environment.environment
        return (*self.reward.reward_func, *self.reward.eval_func, *([] if environment is None else [environment]))

    @property
    def episode_tokens(self) -> int:
        """The largest number of tokens after a prompt."""
        return self.batch.max_episode_tokens or self.sampling.max_new_tokens

    @property
    def eval_sampling(self) -> SamplingSettings:
        """How evaluations during training sample. Greedy decoding is top-k 1."""
        temperature = self.run.eval_temperature
        if temperature is None:
            return self.sampling
        return replace(self.sampling, **({"temperature": temperature} if temperature else {"top_k": 1}))

    @property
    def compared(self) -> int:
        """Completions of a prompt whose scores the algorithm compares; 1 if it compares none."""
        return self.group_size if self.compares else 1

    @property
    def episodes_per_update(self) -> int:
        return self.batch.batch_size * self.group_size

    def reference_every(self, beta: float) -> int:
        """Return N: the reference scores one completion in N of an update with this beta.

        N is 1 if the KL of each completion is used: beta follows it, or it is in the reward, in the loss or in token
        records. Otherwise N is 8, because the KL is only logged. These completions are from as many prompts as
        possible, so their mean is closer to that of all than the mean of whole groups.
        """
        is_charged = self.kl.kl_placement != "none" and beta > 0
        return 1 if self.kl.steered or is_charged or self.record.record_tokens else 8

    @property
    def minibatch_size(self) -> int:
        """Episodes per optimizer step."""
        return self.episodes_per_update // self.batch.minibatches

    def updates(self, prompts: int, topics: int = 1) -> int:
        """Return the number of updates of a run over `prompts` training prompts in `topics` topics: from episodes, or
        num_iterations, or epochs, rounded up. With --steps-per-topic, an epoch is one round over all topics."""
        if self.run.episodes is not None:
            return -(-self.run.episodes // self.episodes_per_update)
        if self.run.num_iterations is not None:
            return self.run.num_iterations
        if self.data.steps_per_topic is not None:
            return max(1, math.ceil((self.run.epochs or ROUNDS) * self.data.steps_per_topic * topics))
        return max(1, -(-int((self.run.epochs or EPOCHS) * prompts) // self.batch.batch_size))

    def optimizer_steps(self, updates: int) -> int:
        return updates * self.batch.ppo_epochs * self.batch.minibatches

    def most_episodes(self, updates: int) -> int:
        """Return the largest number of episodes of a run of `updates`, with those that --dynamic-sampling may draw."""
        batch = self.episodes_per_update
        goal = self.run.episodes
        most = updates * batch * (1 + self.group.dynamic_sampling)
        # after `goal` episodes no update starts and nothing is drawn; groups are whole
        return most if goal is None else min(most, (goal - 1) // self.group_size * self.group_size + batch)

    def resolved(self) -> Config:
        """Return the configuration with minibatches and a micro-batch size in place of accumulation steps."""
        batch = self.batch
        episodes = self.episodes_per_update
        steps = batch.gradient_accumulation_steps
        at_once = batch.micro_batch_size
        if steps is None:
            return self
        same = {"minibatches": episodes // (steps * at_once)} if at_once else {"micro_batch_size": episodes // steps}
        return replace(self, batch=replace(batch, gradient_accumulation_steps=None, **same))
