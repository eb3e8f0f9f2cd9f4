"""The settings of a run as options of verl 0.9.1 (`verl.trainer.main_ppo`), and those that verl has no option for."""

from __future__ import annotations

import math
import re
import shlex
from typing import Any

from rlhf.algorithms.kl_control import kl_controller
from rlhf.algorithms.table import ALGORITHMS
from rlhf.checkpoints.model_folder import ALL_LINEAR
from rlhf.checkpoints.run_record import RESUME_MAY_CHANGE, RunRecord
from rlhf.settings.fields import as_text, settings_of, values_in
from rlhf.settings.training import Config

ESTIMATORS = {
    "ppo": "gae",
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_pp": "reinforce_plus_plus",
    "remax": "remax",
}
# verl's names without this word in front
PREFIXED = re.compile(r"^(actor|rollout|ref|model)\b")
# setting -> the options that get its value, as `values_of` converts it; docs/several_gpus.md has these rows
MAPPED = {
    "actor_model": "model.path critic.model.path critic.model.tokenizer_path",
    "batch_size": "data.train_batch_size",
    "K": "rollout.n",
    "minibatches": "actor.ppo_mini_batch_size",
    "gradient_accumulation_steps": "actor.ppo_mini_batch_size",
    "ppo_epochs": "actor.ppo_epochs",
    "micro_batch_size": "actor.ppo_micro_batch_size_per_gpu rollout.log_prob_micro_batch_size_per_gpu "
    "ref.log_prob_micro_batch_size_per_gpu critic.ppo_micro_batch_size_per_gpu",
    "micro_batch_tokens": "actor.ppo_max_token_len_per_gpu critic.ppo_max_token_len_per_gpu",
    "prompt_length": "data.max_prompt_length",
    "max_new_tokens": "data.max_response_length",
    "max_episode_tokens": "data.max_response_length",
    "temperature": "rollout.temperature",
    "top_k": "rollout.top_k rollout.val_kwargs.top_k",
    "top_p": "rollout.top_p rollout.val_kwargs.top_p",
    "eval_samples": "rollout.val_kwargs.n",
    "eval_temperature": "rollout.val_kwargs.temperature",
    "clip_range": "actor.clip_ratio",
    "epsilon_high": "actor.clip_ratio_high",
    "delta": "actor.clip_ratio_c",
    "entropy_coef": "actor.entropy_coeff",
    "loss_type": "actor.policy_loss.loss_mode",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "dynamic_sampling": "algorithm.filter_groups.enable",
    "gamma": "algorithm.gamma",
    "lam": "algorithm.lam",
    "value_clip_range": "critic.cliprange_value",
    "critic_learning_rate": "critic.optim.lr",
    "critic_warmup": "trainer.critic_warmup",
    "kl_placement": "algorithm.use_kl_in_reward",
    "kl_coef": "algorithm.kl_ctrl.kl_coef actor.kl_loss_coef",
    "kl_schedule": "algorithm.kl_ctrl.type",
    "kl_target": "algorithm.kl_ctrl.target_kl",
    "kl_horizon": "algorithm.kl_ctrl.horizon",
    "learning_rate": "actor.optim.lr",
    "lr_schedule": "actor.optim.lr_scheduler_type critic.optim.lr_scheduler_type",
    "warmup_steps": "actor.optim.lr_warmup_steps critic.optim.lr_warmup_steps",
    "weight_decay": "actor.optim.weight_decay critic.optim.weight_decay",
    "adam_beta1": "actor.optim.betas critic.optim.betas",
    "adam_beta2": "actor.optim.betas critic.optim.betas",
    "max_grad_norm": "actor.optim.clip_grad critic.optim.clip_grad",
    "optim": "actor.optim.optimizer_impl critic.optim.optimizer_impl",
    "use_lora": "model.lora_rank critic.model.lora_rank",
    "lora_r": "model.lora_rank critic.model.lora_rank",
    "lora_alpha": "model.lora_alpha critic.model.lora_alpha",
    "lora_targets": "model.target_modules critic.model.target_modules",
    "bf16": "actor.fsdp_config.dtype ref.fsdp_config.dtype critic.fsdp.dtype rollout.dtype",
    "gradient_checkpointing": "model.enable_gradient_checkpointing critic.model.enable_gradient_checkpointing",
    "deterministic": "actor.fsdp_config.full_determinism rollout.full_determinism",
    "seed": "data.seed rollout.seed actor.data_loader_seed critic.data_loader_seed",
    "epochs": "trainer.total_epochs",
    "num_iterations": "trainer.total_training_steps",
    "episodes": "trainer.total_training_steps",
    "eval_every": "trainer.test_freq",
    "save_every": "trainer.save_freq",
    "keep": "trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep",
    "report_to": "trainer.logger",
    "rm_model": "reward.reward_model.model_path",
}
# settings that the files of an export contain
IN_THE_FILES = (
    *("prompts", "split", "eval_dataset", "dataset_config", "dataset_split", "columns", "skip_bad_rows"),
    *("plain_prompts", "few_shot", "max_prompts", "eval_prompts", "reward_func", "keywords", "reward_timeout"),
    "reward_weights",
)
OF_NO_EFFECT = (*RESUME_MAY_CHANGE, "allow_weak_reward_model", "value_coef")  # value_coef: of a critic with the policy
AGGREGATED = {"grpo": "seq-mean-token-mean", "gspo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
NO_LIMIT = 1_000_000.0  # for the ratio of the dual clip, which verl always has


def verl_options(config: Config, run: RunRecord) -> dict[str, Any]:
    """Return verl's options for a run: name -> value. Batches are prompts, because verl multiplies them by
    `rollout.n`. Options that the run's settings do not decide are those that a model on each GPU needs."""
    row = ALGORITHMS[config.algorithm]
    values = values_in(config) | _converted(config, run)
    options = {}
    for setting, names in MAPPED.items():
        for name in names.split() if setting not in row.foreign else ():
            if values[setting] is not None:
                options[name] = values[setting]
    options |= {
        "algorithm.adv_estimator": ESTIMATORS[config.algorithm],
        "data.filter_overlong_prompts": False,
        "actor.use_dynamic_bsz": not config.batch.micro_batch_size,
        "actor.clip_ratio_low": options["actor.clip_ratio"],
        "actor.loss_agg_mode": "token-mean",
        "actor.use_kl_loss": config.kl.coef_in("loss", config.kl.kl_coef) > 0,
        "actor.kl_loss_type": "low_var_kl+",  # the value of k3, and the gradient of k2, which is that of our KL loss
        "algorithm.kl_penalty": "kl",
        "rollout.name": "vllm",
        "rollout.tensor_model_parallel_size": 1,
        "rollout.load_format": "safetensors" if config.model.use_lora else "dummy",
        "rollout.val_kwargs.do_sample": config.run.eval_temperature != 0,
        "trainer.use_v1": config.algorithm != "remax",  # verl's new trainer has no greedy baseline
    }
    options |= _of_the_loss(config) | _of_the_reward_model(config)
    if config.optimizer.optim == "adamw_8bit":
        options |= dict.fromkeys(("actor.optim.optimizer", "critic.optim.optimizer"), "AdamW8bit")
    if config.group.dynamic_sampling:
        options["algorithm.filter_groups.max_num_gen_batches"] = config.group.dynamic_sampling + 1
    options = {name: value for name, value in options.items() if row.has_critic or not name.startswith("critic.")}
    return {PREFIXED.sub(r"actor_rollout_ref.\1", name): value for name, value in options.items()}


def _converted(config: Config, run: RunRecord) -> dict[str, Any]:
    """Return the values of settings that are other values in verl; None: no option gets them."""
    batch = config.batch
    model = config.model
    updates = run.plan.updates
    prompts = run.data["train_prompts"]
    horizon = kl_controller(config, updates).horizon
    follows_kl = follows_target(config)
    quarter = max(1, updates // 4)
    temperature = config.run.eval_temperature
    tokens = config.data.prompt_length + config.episode_tokens
    return {
        "K": config.group_size - config.greedy,
        "minibatches": max(1, batch.batch_size // batch.minibatches),
        "micro_batch_size": batch.micro_batch_size or None,
        "micro_batch_tokens": max(batch.micro_batch_tokens, tokens),
        "max_new_tokens": config.episode_tokens,
        "max_episode_tokens": None,
        "top_k": config.sampling.top_k or -1,
        "eval_temperature": config.sampling.temperature if temperature is None else temperature,
        "epsilon_high": batch.clip[1],
        "delta": batch.delta or NO_LIMIT,
        "loss_type": None,
        "scale_rewards": config.grpo.scale_rewards == "group",
        "dynamic_sampling": config.group.dynamic_sampling > 0,
        "critic_learning_rate": config.critic.critic_learning_rate or config.optimizer.learning_rate,
        # verl trains the policy from this update on
        "critic_warmup": config.critic.critic_warmup + 1 if config.critic.critic_warmup else 0,
        "kl_placement": config.kl.coef_in("reward", config.kl.kl_coef) > 0,
        "kl_schedule": "adaptive" if follows_kl else "fixed",
        "kl_target": config.kl.targets[0].nats if follows_kl else None,
        "kl_horizon": horizon if follows_kl else None,
        "lr_schedule": "cosine" if config.optimizer.lr_schedule == "cosine" else "constant",
        "warmup_steps": config.optimizer.warmup_updates(updates),
        "adam_beta1": [config.optimizer.adam_beta1, config.optimizer.adam_beta2],
        "adam_beta2": None,
        "optim": "bitsandbytes.optim" if config.optimizer.optim == "adamw_8bit" else "torch.optim",
        "use_lora": None,
        "lora_r": model.lora_r if model.use_lora else 0,
        "lora_alpha": round(model.lora_alpha),
        "lora_targets": "all-linear" if ALL_LINEAR in model.lora_targets else list(model.lora_targets),
        "bf16": "float32" if model.bf16 is False else "bfloat16",
        "epochs": math.ceil(updates / max(1, prompts // batch.batch_size)),
        "num_iterations": updates,
        "episodes": None,
        "eval_every": config.run.eval_every or quarter,
        "save_every": config.run.save_every or quarter,
        "report_to": ["console", *(["wandb"] if "wandb" in (config.record.report_to or ()) else [])],
        "rm_model": None,
    }


def _of_the_loss(config: Config) -> dict[str, Any]:
    """Return the options of the policy loss, which depend on the algorithm."""
    if config.algorithm == "rloo":
        return {"actor.loss_agg_mode": "seq-mean-token-sum"}
    if config.algorithm != "grpo":
        return {}
    kind = config.grpo.loss_type
    options = {"actor.loss_agg_mode": AGGREGATED.get(kind, "token-mean")}
    if kind in ("gspo", "cispo"):
        options["actor.policy_loss.loss_mode"] = kind
    if kind == "cispo":
        options["actor.clip_ratio_low"] = 1.0  # its ratios are only clipped from above
    if kind == "dr_grpo":
        options["actor.loss_scale_factor"] = config.episode_tokens
    return options


def _of_the_reward_model(config: Config) -> dict[str, Any]:
    """Return the options of a reward model, which verl uses if there is no compute_score."""
    if config.model.rm_model is None or config.reward.reward_func:
        return {}
    start = "reward.reward_model."
    return {
        f"{start}enable": True,
        f"{start}model_path": config.model.rm_model,
        f"{start}rollout.name": "vllm",
        f"{start}rollout.tensor_model_parallel_size": 1,
    }


def without_option(config: Config) -> dict[str, str]:
    """Return the settings of a run that verl has no option for, or not for this value, by flag: what is lost. Settings
    with their default are not among them, unless verl's behaviour differs from it."""
    row = ALGORITHMS[config.algorithm]
    known = {*MAPPED, *IN_THE_FILES, *OF_NO_EFFECT, *row.foreign}
    found = {}
    for name, s in settings_of(Config).items():
        value = getattr(getattr(config, s.group), name)
        if name not in known and s.group != "speed" and value != row.all_defaults.get(name, s.default):
            found[name] = f"{as_text(value, ' ')} here, verl has no such option"
    batch = config.batch
    lora = config.model.lora_alpha if config.model.use_lora else 0.0
    has_model = config.model.rm_model is not None
    rules = config.reward.reward_func
    special = {
        "critic": (
            row.has_critic and config.critic.critic != "separate",
            "verl's critic is a second network that starts from the start model, with its own optimizer",
        ),
        "kl_schedule": (
            config.kl.steered and not follows_target(config),
            "beta stays --kl-coef: verl only follows one target per token, with the KL in the reward",
        ),
        "clip_range": (config.algorithm == "rloo", "verl clips the ratio of each token, not of whole completions"),
        "scale_rewards": (config.grpo.scale_rewards == "batch", "not divided: verl has no scale of the batch"),
        "lr_schedule": (config.optimizer.lr_schedule == "linear", "constant: verl has no linear schedule"),
        "weight_decay": (config.optimizer.weight_decay > 0, "verl decays biases and norms, too"),
        "minibatches": (batch.batch_size % batch.minibatches > 0, "verl's minibatches are whole prompts"),
        "lora_alpha": (lora % 1 > 0, "rounded: verl takes whole numbers"),
        "rm_model": (
            has_model,
            "not used: the reward functions replace it" if rules else "verl does not calibrate its scores",
        ),
        "reward_weights": (has_model and not rules and config.reward.reward_weights is not None, "the weight is 1"),
    }
    return found | {name: why for name, (applies, why) in special.items() if applies}


def follows_target(config: Config) -> bool:
    """True if verl can steer beta as the run does."""
    kl = config.kl
    of_verl = kl.kl_placement == "reward" and kl.kl_schedule == "adaptive"
    return of_verl and kl.targets[0].per == "token"


# --- the script ------------------------------------------------------------------------------------------------------

# options whose values are files of the export
FILES = {
    "data.train_files": "train.parquet",
    "data.val_files": "val.parquet",
    "actor_rollout_ref.model.tokenizer_path": "tokenizer",
    "critic.model.tokenizer_path": "tokenizer",
    "reward.custom_reward_function.path": "reward.py",
    "trainer.default_local_dir": "checkpoints",
}
HEAD = """#!/usr/bin/env bash
# The settings of a run as options of verl. Options behind the name of this script replace those below.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python3 -m verl.trainer.main_ppo"""
TAIL = 'trainer.nnodes="${NNODES:-1}" trainer.n_gpus_per_node="${GPUS_PER_NODE:-8}" "$@"'


def hydra_word(value: Any) -> str:
    """Return a value as hydra reads it on a command line. A text is quoted if it has other characters than a path."""
    if isinstance(value, list):
        return f"[{','.join(map(hydra_word, value))}]"
    if not isinstance(value, str) or re.fullmatch(r"[\w./-]+", value):
        return str(value)
    # hydra reads a backslash as itself, except in front of a quote
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f"'{escaped}'"


def run_script(options: dict[str, Any], files: dict[str, str]) -> str:
    """Return a bash script that starts verl with these options, and with `files` in the script's folder."""
    words = [shlex.quote(f"{name}={hydra_word(value)}") for name, value in options.items()]
    words += [f"{name}=\"'$here/{file}'\"" for name, file in files.items()]
    return " \\\n    ".join([HEAD, *words, TAIL]) + "\n"
