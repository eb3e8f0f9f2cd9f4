"""The settings of a run as a script that starts verl 0.9.1, and the settings that verl has no option for."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from string import Formatter
from types import SimpleNamespace
from typing import Any

from rlhf.algorithms.kl_control import kl_controller
from rlhf.algorithms.table import ALGORITHMS
from rlhf.algorithms.verl_names import ESTIMATORS, OF_COMPLETIONS, loss_of
from rlhf.checkpoints.run_record import RESUME_MAY_CHANGE, RunRecord
from rlhf.settings.fields import as_text, settings_of, values_in
from rlhf.settings.training import Config

NO_LIMIT = 1e6  # for the ratio of the dual clip, which verl always has
USUAL_TOKENS = 16_384  # per micro-batch: verl's default
# the names in braces are those of settings, with their values in verl, and of `_values`
SCRIPT = """#!/usr/bin/env bash
# The settings of a run as options of verl. Options after the name of this script replace those below.
set -euo pipefail
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
options=(
    data.train_files="'$here/train.parquet'"
    data.val_files="'$here/val.parquet'"
    data.train_batch_size={batch_size}
    data.max_prompt_length={prompt_length}
    data.max_response_length={max_new_tokens}
    data.seed={seed}
    actor_rollout_ref.model.path={actor_model}
    actor_rollout_ref.model.tokenizer_path="'$here/tokenizer'"
    actor_rollout_ref.model.enable_gradient_checkpointing={gradient_checkpointing}
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.n={K}
    actor_rollout_ref.rollout.temperature={temperature}
    actor_rollout_ref.rollout.top_p={top_p}
    actor_rollout_ref.rollout.top_k={top_k}
    actor_rollout_ref.rollout.seed={seed}
    actor_rollout_ref.rollout.dtype={bf16}
    actor_rollout_ref.rollout.full_determinism={deterministic}
    actor_rollout_ref.rollout.val_kwargs.n={eval_samples}
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.temperature={eval_temperature}
    actor_rollout_ref.rollout.val_kwargs.top_p={top_p}
    actor_rollout_ref.rollout.val_kwargs.top_k={eval_top_k}
    actor_rollout_ref.actor.ppo_mini_batch_size={minibatches}
    actor_rollout_ref.actor.ppo_epochs={ppo_epochs}
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu={micro_batch_tokens}
    actor_rollout_ref.actor.data_loader_seed={seed}
    actor_rollout_ref.actor.clip_ratio={clip_range}
    actor_rollout_ref.actor.clip_ratio_low={clip_low}
    actor_rollout_ref.actor.clip_ratio_high={epsilon_high}
    actor_rollout_ref.actor.clip_ratio_c={delta}
    actor_rollout_ref.actor.policy_loss.loss_mode={loss_type}
    actor_rollout_ref.actor.loss_agg_mode={aggregated}
    actor_rollout_ref.actor.loss_scale_factor={max_new_tokens}
    actor_rollout_ref.actor.entropy_coeff={entropy_coef}
    actor_rollout_ref.actor.use_kl_loss={in_loss}
    actor_rollout_ref.actor.kl_loss_coef={kl_coef}
    actor_rollout_ref.actor.kl_loss_type=low_var_kl+
    actor_rollout_ref.actor.optim.lr={learning_rate}
    actor_rollout_ref.actor.optim.lr_scheduler_type={lr_schedule}
    actor_rollout_ref.actor.optim.lr_warmup_steps={warmup_steps}
    actor_rollout_ref.actor.optim.weight_decay={weight_decay}
    actor_rollout_ref.actor.optim.betas="[{adam_beta1},{adam_beta2}]"
    actor_rollout_ref.actor.optim.clip_grad={max_grad_norm}
    actor_rollout_ref.actor.optim.optimizer_impl={optim}.optim
    actor_rollout_ref.actor.optim.optimizer={optimizer}
    actor_rollout_ref.actor.fsdp_config.dtype={bf16}
    actor_rollout_ref.actor.fsdp_config.full_determinism={deterministic}
    actor_rollout_ref.ref.fsdp_config.dtype={bf16}
    algorithm.adv_estimator={estimator}
    algorithm.gamma={gamma}
    algorithm.lam={lam}
    algorithm.norm_adv_by_std_in_grpo={scale_rewards}
    algorithm.filter_groups.enable={dynamic_sampling}
    algorithm.filter_groups.max_num_gen_batches={batches}
    algorithm.use_kl_in_reward={kl_placement}
    algorithm.kl_penalty=kl
    algorithm.kl_ctrl.type={kl_schedule}
    algorithm.kl_ctrl.kl_coef={kl_coef}
    algorithm.kl_ctrl.target_kl={kl_target}
    algorithm.kl_ctrl.horizon={kl_horizon}
    trainer.use_v1={is_v1}
    trainer.total_training_steps={num_iterations}
    trainer.total_epochs={num_iterations}
    trainer.test_freq={eval_every}
    trainer.save_freq={save_every}
    trainer.max_actor_ckpt_to_keep={keep}
    trainer.default_local_dir="'$here/checkpoints'"
    trainer.logger="[console]"
    trainer.project_name=rlhf
    trainer.experiment_name={output}
    trainer.nnodes="${{NNODES:-1}}"
    trainer.n_gpus_per_node="${{GPUS_PER_NODE:-8}}"
"""
LORA = """    actor_rollout_ref.rollout.load_format=safetensors
    actor_rollout_ref.model.lora_rank={lora_r}
    actor_rollout_ref.model.lora_alpha={lora_alpha}
    actor_rollout_ref.model.target_modules={lora_targets}
"""
CRITIC = """    critic.model.path={actor_model}
    critic.model.tokenizer_path="'$here/tokenizer'"
    critic.model.enable_gradient_checkpointing={gradient_checkpointing}
    critic.fsdp.dtype={bf16}
    critic.fsdp.full_determinism={deterministic}
    critic.ppo_max_token_len_per_gpu={micro_batch_tokens}
    critic.data_loader_seed={seed}
    critic.cliprange_value={value_clip_range}
    critic.optim.lr={critic_learning_rate}
    critic.optim.lr_scheduler_type={lr_schedule}
    critic.optim.lr_warmup_steps={warmup_steps}
    critic.optim.weight_decay={weight_decay}
    critic.optim.betas="[{adam_beta1},{adam_beta2}]"
    critic.optim.clip_grad={max_grad_norm}
    critic.optim.optimizer_impl={optim}.optim
    critic.optim.optimizer={optimizer}
    trainer.critic_warmup={critic_warmup}
    trainer.max_critic_ckpt_to_keep={keep}
"""
LORA_OF_CRITIC = """    critic.model.lora_rank={lora_r}
    critic.model.lora_alpha={lora_alpha}
    critic.model.target_modules={lora_targets}
"""
REWARD_FUNCTIONS = """    reward.custom_reward_function.path="'$here/reward.py'"
"""
REWARD_MODEL = """    reward.reward_model.enable=True
    reward.reward_model.model_path={rm_model}
    reward.reward_model.rollout.name=vllm
    reward.reward_model.rollout.tensor_model_parallel_size=1
"""
END = """)
python3 -m verl.trainer.main_ppo "${options[@]}" "$@"
"""
EVERY_PART = SCRIPT + CRITIC + LORA + REWARD_MODEL
# settings that other files of an export contain, or that have no effect in verl
ELSEWHERE = (
    *("prompts", "split", "eval_dataset", "dataset_config", "dataset_split", "columns", "skip_bad_rows"),
    *("plain_prompts", "chat_template_kwargs", "few_shot", "max_prompts", "eval_prompts"),
    *("reward_func", "reward_weights", "keywords", "reward_timeout", "allow_weak_reward_model"),
    *("use_lora", "gradient_accumulation_steps", "micro_batch_size", "max_episode_tokens", "epochs", "episodes"),
    "value_coef",  # of a critic with the policy's optimizer
    *RESUME_MAY_CHANGE,
)


def run_script(config: Config, run: RunRecord, variables: dict[str, Any]) -> str:
    """Return a bash script that starts verl with a run's settings. verl counts prompts in batches and minibatches, and
    multiplies them by `rollout.n`. `variables` are those of the chat template."""
    lora = config.model.use_lora
    has_critic = ALGORITHMS[config.algorithm].has_critic
    rules = config.reward.reward_func
    parts = {
        SCRIPT: True,
        LORA: lora,
        CRITIC: has_critic,
        LORA_OF_CRITIC: lora and has_critic,
        REWARD_FUNCTIONS: rules,
        REWARD_MODEL: not rules,
    }
    values = values_in(config) | _values(config, run)
    words = {name: shlex.quote(hydra_word(value)) for name, value in values.items()}
    script = "".join(part for part, is_used in parts.items() if is_used).format_map(words)
    for name, value in variables.items():
        script += f"    +data.apply_chat_template_kwargs.{name}={shlex.quote(hydra_word(value))}\n"
    return script + END


def hydra_word(value: Any) -> str:
    """Return a value as hydra reads it on a command line. A text is quoted if it has other characters than a path."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(hydra_word, value))}]"
    if not isinstance(value, str) or re.fullmatch(r"[\w./+@-]+", value):
        return str(value)
    # hydra reads a backslash as itself, except in front of a quote
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", value) + "'"


def _values(config: Config, run: RunRecord) -> dict[str, Any]:
    """Return the values that differ in verl from those of the settings, and those of no single setting."""
    s = SimpleNamespace(**values_in(config))
    updates = run.plan.updates
    evaluated = config.eval_sampling
    longest = s.prompt_length + config.episode_tokens
    tokens = s.micro_batch_size * longest or s.micro_batch_tokens or USUAL_TOKENS
    kind, aggregated = loss_of(config)
    in_8_bit = s.optim == "adamw_8bit"
    return {
        "estimator": ESTIMATORS[config.algorithm],
        "is_v1": not config.greedy,  # verl's newer trainer has no greedy baseline
        "K": config.group_size - config.greedy,
        "minibatches": max(1, s.batch_size // s.minibatches),
        "micro_batch_tokens": max(tokens, longest),
        "max_new_tokens": config.episode_tokens,
        "top_k": s.top_k or -1,
        "eval_temperature": evaluated.temperature,
        "eval_top_k": evaluated.top_k or -1,
        "clip_low": 1.0 if kind == "cispo" else s.clip_range,  # CISPO only clips from above
        "epsilon_high": s.epsilon_high or s.clip_range,
        "delta": s.delta or NO_LIMIT,
        "loss_type": kind if kind in ("gspo", "cispo") else "vanilla",
        "aggregated": aggregated,
        "scale_rewards": s.scale_rewards == "group",
        "dynamic_sampling": s.dynamic_sampling > 0,
        "batches": s.dynamic_sampling + 1,
        "in_loss": s.kl_placement == "loss",
        "kl_placement": s.kl_placement == "reward",
        "kl_schedule": "adaptive" if follows_kl(config) else "fixed",
        "kl_target": config.kl.targets[0].nats,
        "kl_horizon": kl_controller(config, updates).horizon or 1,
        "lr_schedule": "cosine" if s.lr_schedule == "cosine" else "constant",
        "warmup_steps": config.optimizer.warmup_updates(updates),
        "optim": "bitsandbytes" if in_8_bit else "torch",
        "optimizer": "AdamW8bit" if in_8_bit else "AdamW",
        "bf16": "float32" if s.bf16 is False else "bfloat16",
        "lora_alpha": round(s.lora_alpha),
        "critic_learning_rate": s.critic_learning_rate or s.learning_rate,
        "critic_warmup": s.critic_warmup and s.critic_warmup + 1,  # verl trains the policy from this update on
        "num_iterations": updates,
        "eval_every": s.eval_every or max(1, updates // 4),
        "save_every": s.save_every or max(1, updates // 4),
        "output": Path(s.output).resolve().name,
    }


def follows_kl(config: Config) -> bool:
    """True if verl can steer beta as the run does."""
    kl = config.kl
    return kl.kl_placement == "reward" and kl.kl_schedule == "adaptive" and kl.targets[0].per == "token"


def without_option(config: Config) -> dict[str, str]:
    """Return the settings of a run that verl has no option for, or not for this value -> what verl does. A setting
    with its default is among these only if verl's behaviour differs from it."""
    row = ALGORITHMS[config.algorithm]
    values = values_in(config)
    s = SimpleNamespace(**values)
    replaces = "not used: the reward functions replace it"
    cases = {
        "critic": (s.critic != "separate", "a second network that starts from the start model"),
        "kl_schedule": (
            config.kl.steered and not follows_kl(config),
            "beta stays kl_coef: only one target per token can be followed, with the KL in the reward",
        ),
        "clip_range": (
            loss_of(config)[1] == OF_COMPLETIONS,
            "the ratio of each token is clipped, not of the completion",
        ),
        "scale_rewards": (s.scale_rewards == "batch", "not divided"),
        "lr_schedule": (s.lr_schedule == "linear", "constant"),
        "weight_decay": (s.weight_decay > 0, "biases and norms decay, too"),
        "minibatches": (s.batch_size % s.minibatches > 0, "whole prompts per optimizer step"),
        "lora_alpha": (s.lora_alpha % 1 > 0, "rounded"),
        "rm_model": (s.rm_model is not None, replaces if s.reward_func else "its scores are not calibrated"),
    }
    found = {name: why for name, (differs, why) in cases.items() if differs and name not in row.foreign}
    known = {name for _, name, _, _ in Formatter().parse(EVERY_PART)} | {*ELSEWHERE, *cases, *row.foreign}
    for name, setting in settings_of(Config).items():
        default = row.all_defaults.get(name, setting.default)
        if name not in known and setting.group != "speed" and values[name] != default:
            found[name] = f"no option for {as_text(values[name], ' ')}"
    return found
