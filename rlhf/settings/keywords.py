"""The keyword arguments of `make_config`, for editors and type checkers.

Written by `python -m tests.settings.write_keywords` from the declared settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict


class TrainingSettings(TypedDict, total=False):
    """All settings of a training run, by their first names. Other names of the settings work, too. `--help-all` of a
    training script prints their meanings."""

    actor_model: str
    rm_model: str | None
    allow_weak_reward_model: bool
    use_lora: bool
    lora_r: int
    lora_alpha: float
    lora_dropout: float
    lora_targets: Sequence[str] | str
    load_in_4bit: bool
    bf16: bool | None
    gradient_checkpointing: bool
    prompts: str
    split: str | None
    eval_dataset: str | None
    dataset_config: str | None
    dataset_split: str | None
    columns: Sequence[str] | str
    skip_bad_rows: float | None
    steps_per_topic: int | None
    plain_prompts: bool
    max_prompts: int
    keep_pass_rate: Sequence[float] | None
    prompt_length: int
    eval_prompts: int
    eval_text: str | None
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    batch_size: int
    ppo_epochs: int
    minibatches: int
    micro_batch_size: int
    gradient_accumulation_steps: int | None
    clip_range: float
    epsilon_high: float | None
    delta: float | None
    mask_truncated_completions: bool
    entropy_coef: float
    rollout_engine: Literal["auto", "plain", "slots", "graph", "vllm"]
    rollout_slots: int
    packed: bool
    fused_head: bool
    fit: str | None
    critic: Literal["shared", "separate", "reward-model"]
    value_coef: float
    value_clip_range: float
    gamma: float
    lam: float
    critic_warmup: int
    whiten_rewards: bool
    whiten_advantages: bool
    kl_penalty_at: Literal["token", "eos"]
    K: int | None
    dynamic_sampling: int
    scale_rewards: Literal["none", "group", "batch"]
    loss_type: Literal["dapo", "grpo", "dr_grpo", "cispo", "gspo"]
    reward_func: Sequence[str] | str
    eval_func: Sequence[str] | str
    reward_weights: Sequence[float] | None
    reward_timeout: float
    keywords: Sequence[str] | str
    missing_eos_penalty: float
    normalize_scores: bool
    score_ema: float
    control: Literal["none", "shuffled"]
    kl_coef: float
    kl_placement: Literal["reward", "loss", "none"]
    kl_schedule: Literal["fixed", "adaptive", "phased"]
    kl_target: Sequence[str] | str | None
    kl_boundaries: Sequence[float] | None
    kl_horizon: int | None
    learning_rate: float
    lr_schedule: Literal["cosine", "linear", "constant"]
    warmup_steps: float
    weight_decay: float
    optim: Literal["adamw", "adamw_8bit"]
    max_grad_norm: float
    seed: int
    deterministic: bool
    seeds: Sequence[int] | None
    epochs: float | None
    num_iterations: int | None
    episodes: int | None
    eval_every: int
    eval_samples: int
    best_rule: str
    perplexity_gate: float | None
    output: str
    overwrite: bool
    save_every: int
    keep: int
    resume: bool
    parallel: bool
    sweep: Sequence[str] | str
    ddp_timeout: float
    rollback_on_kl: bool
    replay: str | None
    resume_anyway: bool
    dry_run: bool
    check: bool
    scan: bool
    scan_samples: int
    scan_prompts: int
    report_to: Sequence[str] | str | None
    record_tokens: bool
    record_every: int
    record_prompts: int
    merge_lora: bool
    export_from: Literal["final", "best"]
    push_to_hub: str | None
    hub_private: bool
