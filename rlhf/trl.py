"""TRL's trainers by one changed import: `from rlhf.trl import GRPOConfig, GRPOTrainer`.

The configuration classes are TRL's own. The trainers take TRL's arguments and train with this project's loop. Every
value of a configuration counts, TRL's defaults too. A field is used (OF_ALL to COMPUTED_OF_PPO) or has no effect on
what is learned (NO_EFFECT); any other is refused if it is not TRL's default. docs/coming_from_trl.md has the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFT_TARGETS
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from trl import GRPOConfig, RLOOConfig

from rlhf.api import make_trainer
from rlhf.checkpoints.manifest import find_checkpoints
from rlhf.checkpoints.model_folder import find_model
from rlhf.checkpoints.run_record import RunRecord
from rlhf.checkpoints.weight_names import check_loaded
from rlhf.config import make_config
from rlhf.data.prompts import TOKEN_IDS
from rlhf.data.tokenizer import load_config, load_tokenizer
from rlhf.distributed.group import on_first
from rlhf.models.device import selected_device
from rlhf.models.load import read_model
from rlhf.models.trl_ppo import PPOConfig, get_reward
from rlhf.rewards.find import as_list
from rlhf.run.export import push, saved_models
from rlhf.run.given_models import check_given_model, same_tensors, stored_critic
from rlhf.settings.fields import replaced
from rlhf.settings.training import TRACKERS
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.console import Screen
from rlhf.utils.errors import Problem, UserError, raise_if
from rlhf.utils.processes import size

__all__ = ["GRPOConfig", "GRPOTrainer", "PPOConfig", "PPOTrainer", "RLOOConfig", "RLOOTrainer"]

# --- the fields of TRL's configurations ------------------------------------------------------------------------------

# a field -> the setting with the same meaning
OF_ALL = {
    **{name: name for name in ("temperature", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2")},
    **{name: name for name in ("max_grad_norm", "bf16", "gradient_checkpointing", "seed")},
    "full_determinism": "deterministic",
}
OF_GROUPS = {
    "num_generations": "K",
    "max_completion_length": "max_new_tokens",
    "top_p": "top_p",
    "top_k": "top_k",
    "num_iterations": "ppo_epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "epsilon": "clip_range",
    "mask_truncated_completions": "mask_truncated_completions",
    "chat_template_kwargs": "chat_template_kwargs",
}
OF_GRPO = {"delta": "delta", "entropy_coef": "entropy_coef"}
OF_PPO = {
    "response_length": "max_new_tokens",
    "num_ppo_epochs": "ppo_epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "cliprange": "clip_range",
    "vf_coef": "value_coef",
    "cliprange_value": "value_clip_range",
    **{name: name for name in ("gamma", "lam", "whiten_rewards")},
}
# fields that are computed into settings -> how, as the table on the page has it
OF_TRAINING = {
    "output_dir": "`--output`",
    "lr_scheduler_type": "`--lr-schedule`: linear, cosine, constant; constant_with_warmup is constant",
    "warmup_steps": "same, in updates; below 1 a share of the run",
    "optim": "adamw_torch and adamw_torch_fused are `adamw`, adamw_bnb_8bit and adamw_8bit are `adamw_8bit`",
    "save_strategy": "`--save-every`; no: only at the end",
    "save_steps": "`--save-every`, in updates; below 1 a share of the run",
    "save_total_limit": "`--keep`; None: all",
    "eval_strategy": "`--eval-every`; no: nothing is evaluated",
    "eval_steps": "`--eval-every`, in updates; below 1 a share of the run",
    "logging_steps": "`--eval-every` if `eval_steps` is None; every update is logged",
    "gradient_accumulation_steps": "divides `--minibatches`",
    "num_train_epochs": "`--epochs`; the import computes updates as TRL does, rounded up to whole ones",
    "report_to": "`--report-to wandb trackio`; TensorBoard is always written",
    "push_to_hub": "`--push-to-hub NAME`, at the end of the run",
    "hub_model_id": "`--push-to-hub NAME`",
}
COMPUTED_OF_GROUPS = {
    **OF_TRAINING,
    "generation_batch_size": "`--batch-size` = generation_batch_size / num_generations",
    "steps_per_generation": "`--minibatches` = steps_per_generation / gradient_accumulation_steps",
    "max_steps": "`--num-iterations` = max_steps / (`--ppo-epochs` x `--minibatches`)",
    "beta": "`--kl-coef`, `--kl-schedule fixed`; GRPO: `--kl-placement loss`, RLOO: `--kl-placement reward`; 0: none",
    "epsilon_high": "same; with cispo 1 less, because TRL's is the limit itself",
    "num_generations_eval": "`--eval-samples`",
    "router_aux_loss_coef": "must be 0 for a mixture of experts, which is trained without this loss",
    "reward_weights": "same",
}
COMPUTED_OF_GRPO = {
    **COMPUTED_OF_GROUPS,
    "loss_type": "same: dapo, grpo, dr_grpo, cispo; others are refused",
    "importance_sampling_level": "sequence with loss_type grpo: `--loss-type gspo`; others are refused",
    "scale_rewards": "same",
    "max_tool_calling_iterations": "`--max-turns`, one more: TRL counts the calls",
}
COMPUTED_OF_PPO = {
    **OF_TRAINING,
    "kl_coef": "same, with `--kl-schedule fixed`; 0: `--kl-placement none`",
    "num_mini_batches": "`--minibatches` = max(1, num_mini_batches / gradient_accumulation_steps)",
    "total_episodes": "same (`--episodes`), rounded up to whole updates",
    "missing_eos_penalty": "same",
    "remove_unused_columns": "no effect in PPO, in others refused: reward functions receive all columns",
    "stop_token": "must be eos: the ids in the model's generation config and the end of a turn. Texts: `--stop`",
}
# fields that change only time, memory or logging
NO_EFFECT = (
    *("logging_strategy", "logging_first_step", "logging_nan_inf_filter", "log_on_each_node"),
    *("log_level", "log_level_replica", "disable_tqdm", "run_name", "project", "trackio_space_id"),
    *("trackio_bucket_id", "trackio_static_space_id", "include_num_input_tokens_seen", "skip_memory_metrics"),
    *("log_completions", "log_multimodal", "num_completions_to_print", "log_unique_prompts"),
    *("num_sample_generations", "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object"),
    *("eval_accumulation_steps", "per_device_eval_batch_size", "batch_eval_metrics", "include_for_metrics"),
    *("eval_on_start", "bf16_full_eval", "save_only_model", "save_on_each_node", "enable_jit_checkpoint"),
    *("hub_token", "hub_private_repo", "hub_strategy", "hub_always_push", "use_cpu", "tf32", "torch_compile"),
    *("torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "liger_kernel_config", "use_cache"),
    *("gradient_checkpointing_kwargs", "activation_checkpointing", "activation_checkpointing_kwargs"),
    *("torch_empty_cache_steps", "pad_to_multiple_of", "cache_implementation", "ds3_gather_for_generation"),
    *("local_rollout_forward_batch_size", "cast_lm_head_to_fp32", "disable_dropout"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "local_rank"),
    *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order", "dataset_num_proc"),
    *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend"),
    *("ddp_timeout", "do_train", "do_eval", "do_predict", "debug", "sft_model_path", "reward_model_path"),
    *("use_transformers_continuous_batching", "transformers_continuous_batching_config", "use_transformers_paged"),
)
# what to do about a refused field, if it is not only to leave it at TRL's default
INSTEAD = {
    "max_steps": "Set total_episodes, here num_iterations",
    "fp16": "Use bf16",
    "use_vllm": "Leave it out, or use make_trainer() with rollout_engine='vllm', which weights the loss",
    "stop_token_id": "Use stop_token='eos'; for texts make_trainer() with stop",
    "kl_estimator": "Use k1, which is in the reward; k3 is in the loss",
    "load_best_model_at_end": "Read OUTPUT/best, which best_rule chooses",
    "auto_find_batch_size": "Use fit of make_config()",
    "normalize_advantages": "Use GRPO with scale_rewards, or PPO with whiten_advantages",
    "reward_clip_range": "Use normalize_scores of make_config()",
    "sync_ref_model": "The reference is the start model: use kl_schedule of make_config()",
    "model_init_kwargs": "Load the model, and give the object",
    "deepspeed": "Each GPU has the whole model: use torchrun",
    "fsdp": "Each GPU has the whole model: use torchrun",
    "router_aux_loss_coef": "Set 0: a mixture of experts has no auxiliary loss here",
    "data_seed": "Use seed, which orders the prompts, too",
    "use_bias_correction_kl": "Use True: the KL in the loss is k3 x ratio, kl_placement",
    "importance_sampling_level": "Use token, or sequence with loss_type='grpo', here loss_type gspo",
    "off_policy_mask_threshold": "Use delta",
    "model_adapter_name": "Give peft_config, here use_lora",
    "generation_kwargs": "Use temperature, top_p, top_k, and stop of make_config()",
}
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw_8bit": "adamw_8bit",
}
OF_LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
LORA_WITHOUT_EFFECT = (
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("runtime_config", "megatron_core"),
)
WITHOUT_LIMIT = 1_000_000  # of a setting
COLUMNS_WITH_A_MEANING = {"system", "messages", TOKEN_IDS}  # a chat's first message, an argument of rewards, a prompt
# what TRL's scripts read, of the transformers trainer with the run's optimizer, state and log
OF_HOST = ("accelerator", "is_world_process_zero", "log_metrics", "lr_scheduler", "model", "optimizer", "save_metrics",
           "save_state", "state")  # fmt: skip


def refused(name: str, value: Any, of: type, fix: str = "") -> Problem:
    """Return the problem of a value that is not offered, with TRL's name of it."""
    return Problem(f"{name}={value!r:.60} is not offered", f"{of.__name__}({name}=)", INSTEAD.get(name) or fix)


def refused_fields(args: Any, used: Collection[str], fresh: Any) -> list[Problem]:
    """Return a problem for each field that is not `used` and differs from the `fresh` configuration of its class."""
    return [
        refused(field.name, getattr(args, field.name), type(args), f"Leave it at {getattr(fresh, field.name)!r:.60}")
        for field in fields(args)
        if field.name not in used and repr(getattr(args, field.name)) != repr(getattr(fresh, field.name))
    ]


def value_of(choice: Any) -> Any:
    """Return the value of a member of one of transformers' enumerations."""
    return getattr(choice, "value", choice)


class Fields:
    """Settings from a configuration of TRL, with the problems of its values."""

    def __init__(self, args: GRPOConfig | RLOOConfig | PPOConfig, same: dict[str, str], computed: Collection[str]):
        self.args = args
        self.same = {**OF_ALL, **same}
        self.settings: dict[str, Any] = {here: getattr(args, there) for there, here in self.same.items()}
        fresh = type(args)(output_dir=args.output_dir, use_cpu=args.use_cpu, bf16=args.bf16)
        self.problems = refused_fields(args, {*OF_ALL, *same, *computed, *NO_EFFECT}, fresh)

    def refuse(self, name: str, fix: str = "") -> None:
        self.problems.append(refused(name, getattr(self.args, name), type(self.args), fix))

    def with_trls_name(self, problem: Problem) -> Problem:
        """Return the problem of a setting, with the field that has its value in its place."""
        place = str(problem.place)
        names = [name for name, here in {**self.same, "beta": "kl_coef"}.items() if f"({here}=" in place]
        if not names or not hasattr(self.args, names[0]):
            return problem
        return replace(problem, place=f"{type(self.args).__name__}({names[0]}=), {place}")

    def choice(self, name: str, table: dict[Any, Any]) -> Any:
        """Return what a field's value is in `table`."""
        value = value_of(getattr(self.args, name))
        if value not in table:
            self.refuse(name, f"Use one of {', '.join(map(str, table))}")
        return table.get(value)

    def whole(self, name: str, divisor: int) -> int:
        """Return a field's value divided by a number."""
        value = getattr(self.args, name)
        if value % divisor:
            self.problems.append(
                Problem(
                    f"{name}={value} is not a multiple of {divisor}",
                    f"{type(self.args).__name__}({name}=)",
                    f"{name} is divided by {divisor} for the settings here: give a multiple",
                )
            )
        return max(1, int(value // divisor))

    def use_schedule(self, steps: int) -> None:
        """Use optimizer, schedule and warm-up of a run with so many optimizer steps per update."""
        args = self.args
        kind = value_of(args.lr_scheduler_type)
        self.settings["lr_schedule"] = self.choice("lr_scheduler_type", SCHEDULES)
        self.settings["optim"] = self.choice("optim", OPTIMIZERS)
        if steps > 1 and kind != "constant":
            fix = f"An update has {steps} optimizer steps, and lr_schedule acts once per update: use constant"
            self.problems.append(
                Problem(f"{kind} changes within an update", f"{type(args).__name__}(lr_scheduler_type=)", fix)
            )
        warmup = 0 if kind == "constant" else args.warmup_steps  # transformers' constant ignores it
        self.settings["warmup_steps"] = self.whole("warmup_steps", steps) if warmup >= 1 else warmup

    def every(self, strategy: str, name: str, steps: int, updates: int, per_epoch: int) -> int | None:
        """Return the number of updates between two evaluations or checkpoints; None: never.

        Args:
            strategy: the field with no, steps or epoch.
            name: the field with the number of optimizer steps, or a share of the run.
            steps: optimizer steps per update.
            updates: of the run.
            per_epoch: updates of an epoch.
        """
        kind = self.choice(strategy, {kind: kind for kind in ("no", "steps", "epoch")})
        if kind == "epoch":
            return max(1, per_epoch)
        if kind != "steps":
            return None
        name = "logging_steps" if getattr(self.args, name) is None else name
        share = getattr(self.args, name)
        return math.ceil(share * updates) if share < 1 else self.whole(name, steps)

    def use_kl(self, placement: str, beta: float) -> None:
        """Use a fixed beta; 0: no KL."""
        fixed = {"kl_placement": placement, "kl_schedule": "fixed", "kl_coef": beta}
        self.settings |= fixed if beta else {"kl_placement": "none"}

    def use_length(self, updates: int, per_epoch: int, steps: int) -> None:
        """Use the length of the run, its evaluations and its files."""
        args = self.args
        if updates < 1:
            self.problems.append(
                Problem("fewer rows than one update has", "train_dataset", "Give more rows, or a smaller batch")
            )
        save = self.every("save_strategy", "save_steps", steps, updates, per_epoch) or max(1, updates)
        trackers = [name for name in as_list(args.report_to or []) if name not in ("none", "tensorboard")]
        if not {*trackers} <= {*TRACKERS}:
            self.refuse("report_to", f"Use {' or '.join(TRACKERS)}")
        if args.push_to_hub and args.hub_model_id is None:
            self.refuse("push_to_hub", "Add hub_model_id='owner/name', here push_to_hub")
        self.settings |= {
            "num_iterations": max(1, updates),
            "eval_every": self.every("eval_strategy", "eval_steps", steps, updates, per_epoch),
            "save_every": save,
            "keep": args.save_total_limit or math.ceil(updates / save),
            "report_to": trackers or None,
            "push_to_hub": args.hub_model_id if args.push_to_hub else None,
        }


def settings_of_groups(args: GRPOConfig | RLOOConfig, rows: int) -> Fields:
    """Return the settings of GRPO or RLOO over so many rows, without its loss."""
    is_grpo = isinstance(args, GRPOConfig)
    same = {**OF_GROUPS, **(OF_GRPO if is_grpo else {})}
    found = Fields(args, same, COMPUTED_OF_GRPO if is_grpo else COMPUTED_OF_GROUPS)
    batch_size = found.whole("generation_batch_size", args.num_generations)
    minibatches = found.whole("steps_per_generation", args.gradient_accumulation_steps)
    steps = minibatches * max(1, args.num_iterations)
    found.use_schedule(steps)
    per_epoch = rows // batch_size
    updates = math.ceil(args.num_train_epochs * per_epoch)
    if args.max_steps > 0:
        updates = found.whole("max_steps", steps)
    found.use_length(updates, per_epoch, steps)
    found.use_kl("loss" if is_grpo else "reward", args.beta)
    found.settings |= {
        "batch_size": batch_size,
        "minibatches": minibatches,
        "epsilon_high": args.epsilon_high,
        "eval_samples": args.num_generations_eval or args.num_generations,
    }
    return found


def settings_of_grpo(args: GRPOConfig, rows: int) -> Fields:
    """Return the settings of GRPO over so many rows."""
    found = settings_of_groups(args, rows)
    loss = found.choice("loss_type", {name: name for name in ("dapo", "grpo", "dr_grpo", "cispo")})
    level = found.choice("importance_sampling_level", {"token": "token", "sequence": "sequence"})
    if level == "sequence":
        loss = "gspo"
        if args.beta:
            found.refuse(
                "beta", "With ratios of completions TRL's KL has another factor: use 0, here kl_placement none"
            )
        if args.loss_type != "grpo":
            found.refuse("importance_sampling_level")
    if loss == "cispo":
        high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        found.settings["epsilon_high"] = high - 1
        if high <= 1:
            found.problems.append(
                Problem(
                    f"a ratio of at most {high}",
                    "GRPOConfig(epsilon_high=)",
                    "cispo's epsilon_high is the limit itself, here it is 1 + epsilon_high: give more than 1",
                )
            )
    if args.beta and not args.use_bias_correction_kl:
        found.refuse("use_bias_correction_kl")
    names = {"group": "group", "batch": "batch", "none": "none", True: "group", False: "none"}
    turns = args.max_tool_calling_iterations
    found.settings |= {"loss_type": loss, "scale_rewards": found.choice("scale_rewards", names)}
    if turns is not None:
        found.settings["max_turns"] = turns + 1
    return found


def settings_of_ppo(args: PPOConfig, rows: int) -> Fields:
    """Return the settings of PPO over so many rows."""
    found = Fields(args, OF_PPO, COMPUTED_OF_PPO)
    accumulation = args.gradient_accumulation_steps
    batch_size = args.per_device_train_batch_size * accumulation * size()
    minibatches = 1
    if args.num_mini_batches > accumulation:
        minibatches = found.whole("num_mini_batches", accumulation)
    elif accumulation % args.num_mini_batches:  # TRL's optimizer steps would not end with the passes
        found.refuse("num_mini_batches", "Give a divisor of gradient_accumulation_steps, here minibatches is then 1")
    total = int(args.num_train_epochs * rows) if args.total_episodes is None else args.total_episodes
    if args.stop_token != "eos":
        found.refuse("stop_token", "Use stop_token='eos': without it, no completion ends in TRL")
    found.use_schedule(1)  # TRL's PPO changes the rate once per update, too
    found.use_length(math.ceil(total / batch_size), rows // batch_size, 1)
    found.use_kl("reward", args.kl_coef)
    found.settings |= {
        "K": 1,
        "batch_size": batch_size,
        "minibatches": minibatches,
        "missing_eos_penalty": args.missing_eos_penalty or 0.0,
    }
    return found


def config_of(model: PreTrainedModel | str) -> PretrainedConfig:
    """Return the configuration of a model, or of a name."""
    return model.config if isinstance(model, PreTrainedModel) else load_config(find_model(model, "model"))


def settings_of_lora(peft_config: Any, model: PreTrainedModel | str) -> tuple[dict[str, Any], list[Problem]]:
    """Return the settings of an adapter, with the problems of its configuration."""
    if not isinstance(peft_config, LoraConfig):
        raise UserError(f"a {type(peft_config).__name__}", "peft_config", "Use a LoraConfig, here use_lora")
    problems = refused_fields(peft_config, {*OF_LORA, *LORA_WITHOUT_EFFECT, "target_modules"}, LoraConfig())
    targets = peft_config.target_modules
    if targets is None:  # peft's own choice
        targets = PEFT_TARGETS.get(config_of(model).model_type)
    if targets is None or (isinstance(targets, str) and targets != "all-linear"):
        fix = "Give a list of names, or all-linear, here lora_targets"
        problems.append(refused("target_modules", peft_config.target_modules, LoraConfig, fix))
    names = [targets] if isinstance(targets, str) else sorted(targets or ())
    found = {here: getattr(peft_config, there) for there, here in OF_LORA.items()}
    return {"use_lora": True, "lora_targets": names, **found}, problems


# --- rewards of models -----------------------------------------------------------------------------------------------


def on_own_device(model: PreTrainedModel) -> PreTrainedModel:
    """Move a model from the CPU to the device of this process, as TRL does."""
    return model.to(selected_device()) if model.device.type == "cpu" else model


class TextReward:
    """A reward model as in TRL's GRPO and RLOO: it scores prompt and completion as one text, or as a chat."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, variables: dict[str, Any]):
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        model.config.pad_token_id = tokenizer.pad_token_id
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.variables = variables
        self.__name__ = Path(model.config.name_or_path).name or type(model).__name__

    @torch.no_grad()
    def __call__(self, prompts, completions, **_) -> list[float]:
        """Return one score per completion."""
        texts = [
            prompt + completion
            if isinstance(prompt, str)
            else self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False, **self.variables)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        rows = self.tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
        model = on_own_device(self.model)
        return model(**rows.to(model.device)).logits[:, 0].tolist()


class IdsReward:
    """A reward model as in TRL's PPO: it scores the policy's ids, at the last one of the completion."""

    def __init__(self, model: PreTrainedModel, pad: int):
        self.model = model.eval()
        self.pad = pad
        self.__name__ = "reward_model"

    @torch.no_grad()
    def __call__(self, prompt_ids, completion_ids, **_) -> list[float]:
        """Return one score per completion."""
        model = on_own_device(self.model)
        parts = [
            pad_sequence([torch.tensor(row, device=model.device) for row in rows], True, self.pad, padding_side=side)
            for rows, side in ((prompt_ids, "left"), (completion_ids, "right"))
        ]
        _, scores, _ = get_reward(model, torch.cat(parts, 1), self.pad, parts[0].shape[1])
        return scores.tolist()


def reward_models(functions: Any, tokenizers: Any, variables: dict[str, Any] | None = None) -> list[Any]:
    """Return reward functions with a TextReward for each model, which may be given by name. `variables` are
    chat_template_kwargs."""
    functions = as_list(functions)
    tokenizers = [None] * len(functions) if tokenizers is None else as_list(tokenizers)
    if len(tokenizers) != len(functions):
        raise UserError(
            f"{len(tokenizers)} for {len(functions)} reward functions",
            "reward_processing_classes",
            "Give one for each",
        )
    found = []
    for function, tokenizer in zip(functions, tokenizers, strict=True):
        model = function
        if isinstance(function, str):
            name = find_model(function, "reward_funcs")
            model, tensors = read_model(AutoModelForSequenceClassification, name, num_labels=1)
            check_loaded(tensors, name)
        if not isinstance(model, PreTrainedModel):
            found.append(function)
            continue
        if tokenizer is None:
            tokenizer = load_tokenizer(model.config.name_or_path)
        found.append(TextReward(model, tokenizer, variables or {}))
    return found


# --- data ------------------------------------------------------------------------------------------------------------


def rows_of(
    dataset: Any, name: str, tokenizer: PreTrainedTokenizerBase, input_ids: bool = False
) -> list[dict[str, Any]]:
    """Return the rows of a dataset, each text with the ids that TRL's trainers make of it: the names of special tokens
    in it are these tokens. With `input_ids` (PPO), a column of this name is used in place of a prompt. Raises
    UserError."""
    if not isinstance(dataset, Dataset):
        raise UserError(f"a {type(dataset).__name__}", name, "Give one Dataset, not streamed")
    has_ids = input_ids and "input_ids" in dataset.column_names
    if not len(dataset) or not (has_ids or "prompt" in dataset.column_names):
        raise UserError("no column prompt", name, "Give rows with a prompt: a text, or a chat; in PPO also input_ids")
    for column in COLUMNS_WITH_A_MEANING.intersection(dataset.column_names):
        raise UserError(f"the column {column!r} has a meaning here and none in TRL", name, "Rename or remove it")
    rows = list(dataset.with_format(None))
    if has_ids:
        return [{"prompt": tokenizer.decode(row["input_ids"]), **row, TOKEN_IDS: row["input_ids"]} for row in rows]
    if len({isinstance(row["prompt"], str) for row in rows}) > 1:
        raise UserError("texts and chats", name, "Give one kind of prompts")
    if isinstance(rows[0]["prompt"], str):
        every = tokenizer([row["prompt"] for row in rows]).input_ids
        rows = [{**row, TOKEN_IDS: ids} for row, ids in zip(rows, every, strict=True)]
    return rows


def check_model(model: PreTrainedModel | str, args: GRPOConfig | RLOOConfig) -> None:
    """Raise UserError if TRL would train with dropout, because the values of a rollout would be random, or with the
    auxiliary loss of a mixture of experts."""
    values = vars(config_of(model).get_text_config())
    problems = []
    active = [n for n, p in values.items() if "drop" in n and isinstance(p, float) and p > 0]
    if active and not args.disable_dropout:
        what = f"the model has {active[0]}, and disable_dropout=False"
        problems.append(Problem(what, "disable_dropout", "Set disable_dropout=True"))
    if values.get("output_router_logits") is not None and args.router_aux_loss_coef:
        problems.append(refused("router_aux_loss_coef", args.router_aux_loss_coef, type(args)))
    raise_if(problems)


# --- the trainers ----------------------------------------------------------------------------------------------------


class _Trainer:
    """What the three trainers share: the methods of TRL's trainers over the trainer of `make_trainer`."""

    def __init__(
        self,
        algorithm: str,
        found: Fields,
        peft_config: Any,
        callbacks: Sequence | None,
        given: dict[str, Any],
        evaluation: Sequence[dict[str, Any]],
        more: dict[str, Any],
    ):
        """
        Args:
            algorithm: its name here.
            found: the settings of `args`, and their problems.
            peft_config: a LoraConfig; None: all weights are trained.
            callbacks: of transformers, or of this project.
            given: arguments of `make_trainer`, with the prompts.
            evaluation: rows of eval_dataset.
            more: further settings.
        """
        problems = found.problems
        settings = {**found.settings, **more}
        model = given["model"]
        if peft_config is not None:
            of_lora, more_problems = settings_of_lora(peft_config, model)
            settings |= of_lora
            problems += more_problems
        elif isinstance(model, PreTrainedModel) and not all(weight.requires_grad for weight in model.parameters()):
            problems.append(Problem("frozen weights", "model", "Call requires_grad_(True), or give peft_config"))
        raise_if(problems)
        prompts = given["prompts"]
        self.args = found.args
        self.given = {**given, "callbacks": callbacks or (), "repeats": True,
                      "evaluation_prompts": evaluation if settings["eval_every"] else []}  # fmt: skip
        self.settings = {
            **settings,
            "rm_model": None,
            "plain_prompts": isinstance(prompts[0]["prompt"], str),
            "prompt_length": WITHOUT_LIMIT,
            "max_prompts": len(prompts),
            "eval_prompts": max(1, len(evaluation)),
            "overwrite": True,  # TRL starts anew in an old folder; here the old run is kept as OUTPUT_1
        }
        try:
            self.config = make_config(algorithm=algorithm, **self.settings)
        except UserError as error:
            raise UserError([found.with_trls_name(problem) for problem in error.problems]) from None

    @cached_property
    def trainer(self) -> OnPolicyLoop:
        """The trainer of `make_trainer`, which is constructed when it is first used."""
        return make_trainer(self.config, output=self.args.output_dir, **self.given)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the trainer, such as `generate` and `step`, or one of OF_HOST."""
        if name.startswith("_") or name in ("config", "args", "given", "trainer"):
            raise AttributeError(name)
        return getattr(self.trainer.host if name in OF_HOST else self.trainer, name)

    def train(self, resume_from_checkpoint: bool | str | None = None) -> SimpleNamespace:
        """Train, or continue from the newest checkpoint in output_dir. Returns the number of updates, the loss and the
        metrics, under the names of transformers' TrainOutput. Raises UserError for another checkpoint."""
        if resume_from_checkpoint:
            self.resume(resume_from_checkpoint)
        metrics = self.trainer.train()
        return SimpleNamespace(
            global_step=self.trainer.update, training_loss=metrics.get("policy/loss", math.nan), metrics=metrics
        )

    def resume(self, checkpoint: bool | str) -> None:
        """Construct the trainer so that it continues the run in output_dir. Raises UserError for another checkpoint
        than the newest, or if the trainer was used before."""
        output = Path(self.args.output_dir)
        if checkpoint is not True:
            run = RunRecord.require(output, "resume_from_checkpoint, output_dir")
            newest = find_checkpoints(output, run.id).newest or output
            if Path(checkpoint).resolve() not in (output.resolve(), newest.resolve()):
                raise UserError(
                    f"not the newest checkpoint of output_dir, which is {newest}",
                    f"resume_from_checkpoint={str(checkpoint)!r}",
                    "Give True, here resume",
                )
        if "trainer" in vars(self):
            raise UserError("this trainer was used before", "train(resume_from_checkpoint=)", "Create a new one")
        self.config = make_config(
            algorithm=self.config.algorithm, **{**self.settings, "overwrite": False, "resume": True}
        )

    def evaluate(self, eval_dataset: Dataset | None = None) -> dict[str, float]:
        """Evaluate the present weights, also on another dataset than the trainer's. Returns the metrics."""
        if eval_dataset is None:
            return self.trainer.evaluate()
        is_ppo = self.config.algorithm == "ppo"
        return self.trainer.evaluate(rows_of(eval_dataset, "eval_dataset", self.processing_class, is_ppo))

    def save_model(self, output_dir: str | None = None) -> None:
        """Save the model, or the adapter, and the tokenizer; None: in output_dir of the configuration."""
        self.trainer.save_model(output_dir)

    def push_to_hub(
        self, commit_message: str = "", blocking: bool = True, token: Any = None, revision: Any = None, **card: Any
    ) -> None:
        """Upload the trained model to hub_model_id, with the run's own message and model card. Raises UserError
        without this name, or without a run."""
        check_others({"token": token, "revision": revision})
        folder = Path(self.args.output_dir)
        if self.args.hub_model_id is None:
            raise UserError("no name on the hub", "push_to_hub()", "Set hub_model_id='owner/name'")
        run = RunRecord.require(folder, "push_to_hub()")
        config = replaced(self.trainer.config, push_to_hub=self.args.hub_model_id)
        on_first(lambda: push(config, run, saved_models(folder, run)["final"], Screen()))


def model_name(model: Any) -> str:
    """Return the name of a model, or of the one from which an object was loaded."""
    return model.config.name_or_path if isinstance(model, PreTrainedModel) else str(model)


def check_arguments(args: Any, kind: type, model: Any, tokenizer: Any, others: dict[str, Any]) -> None:
    """Raise UserError for arguments of another kind, and for those that are not offered."""
    if not isinstance(args, kind):
        raise UserError(f"a {type(args).__name__}", "args", f"Give a {kind.__name__} of rlhf.trl")
    if model is None:
        raise UserError("no start model", "model", "Give a name or a model, here actor_model")
    check_given_model(model, tokenizer)
    check_others(others)


def check_others(others: dict[str, Any]) -> None:
    """Raise UserError for arguments that are not offered."""
    given = [name for name, value in others.items() if value not in (None, (None, None))]
    raise_if([Problem(f"{name}= is not offered", f"{name}=", NOT_ARGUMENTS.get(name, "Remove it")) for name in given])


NOT_ARGUMENTS = {
    "optimizers": "Set optim and learning_rate, here optim and learning_rate",
    "tools": "Give environment_factory=, here environment, a class whose methods are the tools",
    "rollout_func": "Call generate() and step() of the trainer",
    "quantization_config": "Use make_trainer() with load_in_4bit=True",
    "data_collator": "Remove it: prompts are not padded",
    "token": "Log in: hf auth login",
}


class _GroupTrainer(_Trainer):
    """TRL's GRPOTrainer or RLOOTrainer."""

    kind: type
    algorithm: str
    settings_of: Callable[[Any, int], Fields]

    def __init__(
        self,
        model: PreTrainedModel | str,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence | None = None,
        *,
        peft_config: LoraConfig | None = None,
        environment_factory: type | None = None,
        **others: Any,
    ):
        """The arguments are those of TRL 1.12. Raises UserError for values that are not offered."""
        name = model_name(model)
        if args is None:  # TRL's own default; without a GPU, its bf16 needs use_cpu
            without_gpu = not torch.cuda.is_available()
            args = self.kind(f"{Path(name).name}-{self.algorithm.upper()}", use_cpu=without_gpu)
        check_arguments(args, self.kind, model, processing_class, others)
        check_model(model, args)
        tokenizer = processing_class or load_tokenizer(find_model(name, "model"))
        rows = rows_of(train_dataset, "train_dataset", tokenizer)
        evaluation = [] if eval_dataset is None else rows_of(eval_dataset, "eval_dataset", tokenizer)
        found = type(self).settings_of(args, len(rows))
        rewards = None
        if reward_funcs is not None:
            rewards = reward_models(reward_funcs, reward_processing_classes, args.chat_template_kwargs)
        given = {"prompts": rows, "rewards": rewards, "model": model, "tokenizer": processing_class,
                 "reward_weights": args.reward_weights, "environment": environment_factory}  # fmt: skip
        longest = {} if environment_factory is None else {"max_episode_tokens": args.max_completion_length}
        super().__init__(self.algorithm, found, peft_config, callbacks, given, evaluation, longest)


class GRPOTrainer(_GroupTrainer):
    """TRL's GRPOTrainer: its arguments, and this project's training loop."""

    kind = GRPOConfig
    algorithm = "grpo"
    settings_of = staticmethod(settings_of_grpo)


class RLOOTrainer(_GroupTrainer):
    """TRL's RLOOTrainer: its arguments, and this project's training loop."""

    kind = RLOOConfig
    algorithm = "rloo"
    settings_of = staticmethod(settings_of_groups)


class PPOTrainer(_Trainer):
    """TRL's PPOTrainer: its arguments, and this project's training loop."""

    def __init__(
        self,
        args: PPOConfig,
        processing_class: PreTrainedTokenizerBase,
        model: PreTrainedModel | str,
        ref_model: PreTrainedModel | None = None,
        reward_model: PreTrainedModel | None = None,
        train_dataset: Dataset | None = None,
        value_model: PreTrainedModel | None = None,
        *,
        eval_dataset: Dataset | None = None,
        callbacks: Sequence | None = None,
        peft_config: LoraConfig | None = None,
        reward_funcs: Any = None,
        **others: Any,
    ):
        """The arguments are those of TRL 1.12, and `reward_funcs` in place of `reward_model`. Without `value_model`,
        the critic is a value head on the policy. Raises UserError for values that are not offered."""
        check_arguments(args, PPOConfig, model, processing_class, others)
        tokenizer = processing_class or load_tokenizer(find_model(model_name(model), "model"))
        if not isinstance(reward_model, PreTrainedModel | None):
            raise UserError(f"a {type(reward_model).__name__}", "reward_model", "Give a model, or use reward_funcs")
        if tokenizer.pad_token_id is None:
            raise UserError("no pad token", "processing_class", "Set its pad_token")
        rows = rows_of(train_dataset, "train_dataset", tokenizer, input_ids=True)
        evaluation = [] if eval_dataset is None else rows_of(eval_dataset, "eval_dataset", tokenizer, input_ids=True)
        found = settings_of_ppo(args, len(rows))
        if ref_model is not None and not (isinstance(ref_model, type(model)) and same_tensors(model, ref_model)):
            raise UserError(
                "other weights than the model's", "ref_model", "Give None: the reference is the start model"
            )
        if (reward_model is None) == (reward_funcs is None):
            raise UserError("one of both is needed", "reward_model, reward_funcs", "Give a model, or functions")
        more = {}
        if value_model is not None and peft_config is not None:
            raise UserError(
                "an adapter of the policy, and a critic with all weights",
                "value_model, peft_config",
                "Give value_model=None for a value head on the policy, or no peft_config",
            )
        if value_model is not None:
            more["critic"] = stored_critic(value_model, Path(args.output_dir))
        rewards = (
            [IdsReward(reward_model, tokenizer.pad_token_id)]
            if reward_funcs is None
            else reward_models(reward_funcs, None)
        )
        given = {"prompts": rows, "rewards": rewards, "model": model, "tokenizer": processing_class}
        super().__init__("ppo", found, peft_config, callbacks, given, evaluation, more)
