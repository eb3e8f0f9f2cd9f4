"""Translates names and meanings of other trainers into the settings of this project.

TRL 1.12, transformers, OpenRLHF, verl, LLaMA-Factory, Unsloth and CleanRL. docs/coming_from_trl.md explains the names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rlhf.settings.fields import UNREADABLE, Layer, Setting, as_text, is_unset, name_table
from rlhf.settings.types import bare_targets, is_bare_number
from rlhf.utils.errors import did_you_mean

LENGTHS = ("epochs", "num_iterations", "episodes")  # the length of a run: exactly one of them is in effect
BARE_TARGETS = ("target", "target_kl")  # names of other trainers for a KL target without a unit
FIRST_TRL = "init_kl_coef"  # next to this name of TRL before 0.12, a bare target_kl has the unit of its KL


def translate(layer: Layer, settings: dict[str, Setting]) -> tuple[Layer, list[str]]:
    """Return a layer with the first names of its settings, and the errors in its names, one line each.

    A name of another trainer keeps its meaning there, and can set more than one setting. A setting that replaces
    others (for example one length of the run) unsets those in lower layers. A name that ends with a colon is a block
    of a YAML file (`lora:`).
    """
    known, problems = _under_first_names(layer, settings)

    def add(name: str, value: Any, because: str) -> None:
        """Set `name` because of the setting `because`, unless the layer sets it or the command does not have it."""
        if name in settings:
            known.setdefault(name, (value, (layer.get(because) or known[because])[1]))

    def is_set(name: str) -> bool:
        return name in known and not is_unset(known[name][0])

    if "mini_batch_size" in layer:  # in TRL's first PPO, an optimizer step follows each one
        add("gradient_accumulation_steps", 1, "mini_batch_size")
    if "normalizer_alpha" in layer:
        add("normalize_scores", True, "normalizer_alpha")
    if "lora:" in layer:
        add("use_lora", True, "lora:")
    for length in filter(is_set, ("steps_per_topic", *LENGTHS)):
        for other in LENGTHS:
            add(other, None, length)
    if is_set("minibatches") and is_set("gradient_accumulation_steps"):
        places = " and ".join(known[name][1] for name in ("minibatches", "gradient_accumulation_steps"))
        problems.append(f"minibatches and gradient_accumulation_steps exclude each other: {places}. Keep one")
    elif is_set("minibatches"):
        add("gradient_accumulation_steps", None, "minibatches")
    elif is_set("gradient_accumulation_steps"):
        add("minibatches", 1, "gradient_accumulation_steps")
    if is_set("kl_schedule") and known["kl_schedule"][0] != "adaptive":
        add("kl_target", None, "kl_schedule")  # a lower layer's target belongs to its adaptive schedule
    return known, problems


def only(layer: Layer, settings: dict[str, Setting], names: Collection[str]) -> Layer:
    """Return the part of a layer that sets one of `names`, under any name of the setting."""
    first = name_table(settings)
    return {name: found for name, found in layer.items() if first.get(name) in names}


def _under_first_names(layer: Layer, settings: dict[str, Setting]) -> tuple[Layer, list[str]]:
    """Return the layer with the first name of each setting instead of the written name, and the errors in the names,
    one line each."""
    names, problems, known = name_table(settings), [], {}
    for name, (value, where) in layer.items():
        if name.endswith(":"):
            continue
        if name == UNREADABLE:
            problems.append(value)
        elif name not in names:
            helper = ". Start the names of helper variables with _" if ".py" in where else ""
            problems.append(f"unknown setting {name}: {where}. {hint(name, names)}{helper}")
        elif names[name] in known:
            problems.append(f"{name} is set twice: {where} and {known[names[name]][1]}. Keep one")
        elif name == "target_kl" and FIRST_TRL not in layer and is_bare_number(value):
            number = as_text(value)
            problems.append(
                f"target_kl {number} has no unit: {where}. Give {number}/token as in verl, or {number}/sequence as in "
                "TRL before 0.12"
            )
        else:
            known[names[name]] = (bare_targets(value) if name in BARE_TARGETS else value, where)
    return known, problems


# --- the same name with another meaning ------------------------------------------------------------------------------

# name -> its meaning here, and what has TRL's meaning
OTHER_MEANINGS = {
    "num_iterations": "{value} updates here. In TRL it would be the passes over each rollout, which {ppo_epochs} sets",
    "per_device_train_batch_size": "{value} prompts per update here. In TRL it would be the completions per forward "
    "pass, which {micro_batch_size} sets",
}


def ambiguous_names(layers: Iterable[Layer]) -> dict[str, str]:
    """Return the names in these layers that mean something else in TRL -> as they were written. A name in a later
    layer replaces other names of its setting in earlier ones."""
    return {
        name: f"--{name.replace('_', '-')}" if str(where).startswith("--") else name
        for layer in layers
        for name, (value, where) in layer.items()
        if name in OTHER_MEANINGS and not is_unset(value)
    }


def meanings(written: dict[str, str], values: dict[str, Any]) -> list[str]:
    """Return one note for each of the `ambiguous_names`: its meaning here, and the setting with TRL's meaning.
    `values` are the values in effect by these names; without a value, there is no note."""
    notes = []
    for name, spelled in written.items():
        if values[name] is not None:
            text = _with_settings(OTHER_MEANINGS[name].replace("{value}", f"{values[name]:,}"), spelled[:2] == "--")
            notes.append(f"{spelled} {values[name]} means {text}")
    return notes


# --- arguments of train() --------------------------------------------------------------------------------------------

# arguments of make_trainer
OF_THE_TRAINER = ("prompts", "rewards", "reward_weights", "callbacks", "evaluation_prompts", "eval_functions")
OF_THE_TRAINER += ("output", "progress")
OF_TRAIN = {  # argument of another trainer's train() -> the setting here
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_steps": "num_iterations",
    "resume_from_checkpoint": "resume",
}


def refused_arguments(unexpected: Sequence[Any], named: dict[str, Any], known: Collection[str]) -> str:
    """Return the error for arguments of train(), with what to write instead. Arguments without a name are prompts.
    `known` are all names of settings."""
    given = {**dict(zip(("prompts", "rewards"), unexpected, strict=False)), **named}
    of_trainer = {name for name in given if name in OF_THE_TRAINER}
    settings = {OF_TRAIN.get(name, name): value for name, value in given.items() if name not in of_trainer}
    unknown = [name for name in settings if name not in known]
    settings = {name: value for name, value in settings.items() if name in known and (name != "resume" or value)}
    if "resume" in settings:
        settings["resume"] = True
        of_trainer.add("output")

    def shown(value: Any) -> str:
        return repr(value) if isinstance(value, (int, float)) else "..."

    config = f"make_config({', '.join(f'{name}={shown(value)}' for name, value in settings.items())})"
    trainer = f"make_trainer(config, {', '.join(f'{name}=...' for name in OF_THE_TRAINER if name in of_trainer)})"
    calls = ", ".join([*([config] if settings else []), *([trainer] if of_trainer else [])])
    answers = [f"{n}: {hint(n, known)}" if n in ELSEWHERE else f"{n} has no counterpart here" for n in unknown]
    write = f"Write {calls} and then train()" if calls else "Write train()"
    return ". ".join([f"train() takes no arguments: {', '.join(given)}", *answers, write])


# --- unknown names ---------------------------------------------------------------------------------------------------


def hint(name: str, known: Iterable[str], of_others: Iterable[str] = ()) -> str:
    """Return how to fix an unknown name: the setting with this meaning or why there is none, if it is a name of
    another trainer; otherwise the closest known name. A flag gets flags as the answer.

    Args:
        name: as it was written; may be dotted, as in verl: `--actor_rollout_ref.actor.optim.lr`.
        known: the names that could be written in its place.
        of_others: names that the commands of other algorithms have.
    """
    known, is_flag = list(known), name.startswith("--")
    settings = {word.strip("-").replace("-", "_") for word in (*known, *of_others)}
    plain = name.replace("-", "_").strip("_").removeprefix("no_")
    other = "--help-all lists all settings; docs/coming_from_trl.md lists other trainers' names"
    parts = plain.split(".")
    for key in dict.fromkeys([plain, ".".join(parts[-2:]), parts[-1]]):
        found = ELSEWHERE.get(key, ()) if key not in settings else f"{{{key}}}"
        family = next((text for start, text in FAMILIES.items() if key.startswith(start)), ())
        for text in (*_texts(found), *_texts(family)):
            if set(SETTING.findall(text)) <= settings:
                start = "Use " if text.startswith(("{", "--")) else ""
                return start + _with_settings(text, is_flag)
        if found or family:
            other = "Not offered, because this command has no such setting. --help-all lists all settings"
    return did_you_mean(name, known, other).strip()


def _texts(answers: str | tuple[str, ...]) -> tuple[str, ...]:
    return (answers,) if isinstance(answers, str) else answers


SETTING = re.compile(r"\{(\w+)\}")


def _with_settings(text: str, as_flags: bool) -> str:
    """Return a text with its {settings} as flags or as names."""
    return SETTING.sub(lambda found: "--" + found[1].replace("_", "-") if as_flags else found[1], text)


# --- names of other trainers that are no names of settings here ------------------------------------------------------

NO_CODE = "Not offered, because code and options of model folders are never run (SECURITY.md)"
NO_DEEPSPEED = "Not offered, because DeepSpeed and FSDP are not used; torchrun starts one process per GPU"
NO_SERVER = "Not offered, because there is no vLLM server: vLLM samples in the same process ({rollout_engine} vllm)"
OWN_VLLM = "Not offered, because TRL's default is used for vLLM ({rollout_engine} vllm)"
ALWAYS_CORRECTED = "Not needed, because with vLLM the loss is always weighted by min(p_train / p_vllm, 2)"
OTHER_LOSS = "Not offered, because its loss is not offered; {loss_type} has the offered ones"
FIXED_BONUS = "Not offered, because the entropy bonus is fixed: {entropy_coef}"
FIXED_REFERENCE = "Not offered, because the reference model is always the start model"
SAMPLES_SAVED = "Not needed, because completions are saved in RUN/samples at every evaluation ({eval_every})"
ADAM = "Not offered, because AdamW uses 0.9, 0.999 and 1e-8, the defaults of transformers"
ONLY_FILTERS = "Not offered, because the log-probabilities would have to follow it; {top_k} and {top_p} are offered"
NO_COMPILE = "Not offered, because torch.compile and Liger kernels are not used; {rollout_engine} graph is"
OWN_BATCHES = "Not needed, because prompts are read once and are kept in memory: there is no data loader"
EVERY_UPDATE = "Not needed, because every update is logged"
WHOLE_STATE = "Not needed, because a checkpoint always has the whole state"
ONE_DEVICE = "Not needed, because a GPU is used if there is one; with an empty CUDA_VISIBLE_DEVICES the CPU is used"
LAUNCHER = "Not needed, because a launcher starts the processes: torchrun --nproc-per-node 2 (docs/several_gpus.md)"
TRACKER = ("{report_to}", "Not offered, because runs are logged to TensorBoard, in RUN/logs")
TO_HUB = "{push_to_hub} OWNER/NAME"
START_MODEL = ("{base_model}", "{actor_model}")
BY_SCRIPT = "Not needed, because each algorithm has a script, train_NAME.py"
FOUR_BITS = "Not offered, because only 4 bits are: {load_in_4bit}"
ONLY_LORA = "Not offered, because only plain LoRA is: {use_lora}"
ALWAYS_PACKED = "Not needed, because micro-batches are always packed and counted in tokens ({micro_batch_size})"
ATTENTION = "Not needed, because packed attention is chosen for the device ({packed})"
CHAT_TEMPLATE = "Not needed, because the chat template of the start model is used; {plain_prompts} turns it off"
EVAL_EVERY = "{eval_every}, in updates"
HELD_OUT = "{split}, which holds out a part of the questions"
OTHER_SPLIT = ("{eval_dataset} with the file of that split; of a hub dataset it reads the split test", HELD_OUT)
WHOLE_EVALUATION = "Not needed, because results are always collected over all evaluation prompts ({eval_every})"
EVALUATED_AS_SAMPLED = "Not offered, because evaluations during training sample as training does ({temperature})"
EVALUATION_BATCH = "Not offered, because the batch size of evaluations is fixed; it does not change their results"
TENSORBOARD = "Not needed, because TensorBoard is always written, in RUN/logs"
OVERLONG = "{reward_func} trl:get_soft_overlong_punishment; {mask_truncated_completions} is DAPO's other rule for them"
SKIPPED_PROMPTS = "{prompt_length}: longer prompts are skipped, not cut"
ONE_FEWER_BATCH = "{dynamic_sampling} N-1: the first batch does not count, and after the last one equal groups stay"
TRAIN_ONLY = "Not needed, because each command does one thing: training, evaluation or a plot"

# name -> the settings to use here, as {setting}, or why there is none. A tuple: the first text whose settings the
# command has
ELSEWHERE: dict[str, str | tuple[str, ...]] = {
    # TRL: GRPOConfig, RLOOConfig
    "beta": "{kl_coef} with {kl_schedule} fixed; {kl_placement} is loss in GRPOConfig and reward in RLOOConfig",
    "max_completion_length": "{max_new_tokens}",
    "max_prompt_length": SKIPPED_PROMPTS,
    "steps_per_generation": "{minibatches}: steps_per_generation / gradient_accumulation_steps",
    "generation_batch_size": "{batch_size}, in prompts: generation_batch_size / {K}",
    "importance_sampling_level": "{loss_type} gspo for one ratio per completion",
    "normalize_advantages": ("{whiten_advantages}", "{scale_rewards}"),
    "multi_objective_aggregation": "Not offered, because scores are always weighted, added and then centred per group",
    "reward_clip_range": "Not offered, because scores are not clipped; {normalize_scores} scales them",
    "use_vllm": "{rollout_engine} vllm",
    "use_transformers_continuous_batching": "{rollout_engine} slots",
    "use_transformers_paged": "{rollout_engine} slots",
    "transformers_continuous_batching_config": "{rollout_slots}",
    "use_bias_correction_kl": "Not needed, because a KL in the loss is always k3 times the ratio (docs/kl.md)",
    "off_policy_mask_threshold": "Not offered, because completions are not masked by their KL; {delta} limits ratios",
    "top_entropy_quantile": "Not offered, because the loss does not select tokens by their entropy",
    "use_adaptive_entropy": FIXED_BONUS,
    "entropy_target": FIXED_BONUS,
    "sync_ref_model": FIXED_REFERENCE,
    "max_tool_calling_iterations": "Not offered, because completions call no tools",
    "log_multimodal": "Not offered, because only text models are trained",
    "log_completions": SAMPLES_SAVED,
    "log_completions_hub_repo": SAMPLES_SAVED,
    "num_completions_to_print": SAMPLES_SAVED,
    "log_unique_prompts": SAMPLES_SAVED,
    "model_init_kwargs": NO_CODE,
    "trust_remote_code": NO_CODE,
    "chat_template_kwargs": NO_CODE,
    "router_aux_loss_coef": "Not offered, because mixture-of-experts models are not supported",
    "cast_lm_head_to_fp32": "Not offered, because the head computes in the precision of the model ({bf16})",
    "disable_dropout": "Not needed, because the model's dropout is always off; {lora_dropout} is the adapters'",
    "remove_unused_columns": "Not needed, because reward functions receive every column",
    "shuffle_dataset": "Not needed, because the prompts are always shuffled, from {seed}",
    "pad_to_multiple_of": "Not needed, because padding does not reach the layers ({packed})",
    "min_p": ONLY_FILTERS,
    "repetition_penalty": ONLY_FILTERS,
    "generation_kwargs": ONLY_FILTERS,
    "cache_implementation": ONLY_FILTERS,
    "ds3_gather_for_generation": NO_DEEPSPEED,
    # TRL: PPOConfig
    "sft_model_path": "{actor_model}",
    "reward_model_path": "{rm_model}",
    "total_episodes": "{episodes}",
    "num_total_batches": "{num_iterations}",
    "world_size": LAUNCHER,
    "local_batch_size": "{batch_size}",
    "local_mini_batch_size": "{minibatches} (optimizer steps per pass)",
    "local_rollout_forward_batch_size": "{rollout_slots} for sampling, {micro_batch_size} for log-probabilities",
    "num_sample_generations": "{eval_every}: completions are saved in RUN/samples at every evaluation",
    "kl_estimator": "Not offered, because the KL is k1 in the reward and k3 in the loss; {kl_placement} chooses",
    "stop_token": "Not needed, because a completion always ends at EOS",
    "stop_token_id": "Not needed, because a completion always ends at EOS",
    "model_adapter_name": FIXED_REFERENCE + "; {use_lora} trains one adapter",
    "ref_adapter_name": FIXED_REFERENCE,
    "dataset_num_proc": "Not offered, because tokenizing 10,000 prompts takes seconds",
    # TRL: RewardConfig
    "max_length": ("{pair_length}", "{prompt_length} and {max_new_tokens}"),
    "center_rewards_coefficient": "Not needed, because scores are calibrated to mean 0 and variance 1",
    "chat_template_path": CHAT_TEMPLATE,
    "eos_token": "Not offered, because the EOS token of the tokenizer is used",
    "pad_token": "Not needed, because padding does not reach the layers",
    "activation_offloading": ("{gradient_checkpointing}", "Not offered, because activations stay on the device"),
    # TRL: ModelConfig, ScriptArguments
    "model_name_or_path": START_MODEL,
    "model": START_MODEL,
    "model_revision": "Not offered, because hub models are read at their main revision; give a folder for another one",
    "dtype": ("{bf16} true or false", "{rm_bf16} true or false"),
    "torch_dtype": ("{bf16} true or false", "{rm_bf16} true or false"),
    "attn_implementation": ATTENTION,
    "use_peft": "{use_lora}",
    "lora_target_modules": "{lora_targets}",
    "lora_target_parameters": "{lora_targets}",
    "lora_modules_to_save": ONLY_LORA,
    "lora_task_type": "Not needed, because the policy is always a causal language model",
    "use_rslora": ONLY_LORA,
    "use_dora": ONLY_LORA,
    "load_in_8bit": FOUR_BITS,
    "bnb_4bit_quant_type": "Not needed, because the type is always NF4 ({load_in_4bit})",
    "bnb_4bit_quant_storage": "Not needed, because the type is always NF4 ({load_in_4bit})",
    "use_bnb_nested_quant": "Not offered, because nested quantization is not used ({load_in_4bit})",
    "dataset_test_split": OTHER_SPLIT,
    "dataset_streaming": "Not offered, because the rows are split before training; {max_prompts} limits them",
    "ignore_bias_buffers": LAUNCHER,
    "reward_model_name_or_path": "{rm_model}",
    "reward_funcs": "{reward_func}",
    "config_file": "--config FILE.yaml",
    # transformers: TrainingArguments
    "lr": ("{learning_rate}", "{rm_learning_rate}"),
    "lr_scheduler_type": "{lr_schedule}",
    "lr_scheduler_kwargs": "Not offered, because the schedules have no options; {lr_schedule} chooses one",
    "max_steps": ("{num_iterations}, in updates", "{rm_epochs}"),
    "save_steps": "{save_every}, in updates",
    "eval_steps": EVAL_EVERY,
    "load_best_model_at_end": "{best_rule}: the best model is always saved in RUN/best",
    "metric_for_best_model": "{best_rule}",
    "greater_is_better": "{best_rule}",
    "resume_from_checkpoint": "{resume} with the run's {output}",
    "overwrite_output_dir": ("{overwrite}", "{rm_overwrite}"),
    "fp16": "Use bfloat16 (--bf16) or float32 (--no-bf16). float16 is not available, because its gradients underflow",
    "bf16_full_eval": "{bf16}",
    "fp16_full_eval": "{bf16}",
    "tf32": "Not needed, because bfloat16 is used if the GPU has it ({bf16})",
    "activation_checkpointing": "{gradient_checkpointing}",
    "activation_checkpointing_kwargs": "{gradient_checkpointing}",
    "gradient_checkpointing_kwargs": "{gradient_checkpointing}",
    "use_gradient_checkpointing": "{gradient_checkpointing}",
    "full_determinism": "{deterministic}",
    "data_seed": ("{seed}", "{rm_seed}"),
    "random_state": ("{seed}", "{rm_seed}"),
    "auto_find_batch_size": "{fit} with a size, such as 8GB",
    "per_device_eval_batch_size": EVALUATION_BATCH,
    "eval_batch_size": EVALUATION_BATCH,
    "eval_strategy": EVAL_EVERY,
    "evaluation_strategy": EVAL_EVERY,
    "eval_freq": EVAL_EVERY,
    "eval_frequency": EVAL_EVERY,
    "eval_interval": EVAL_EVERY,
    "eval_delay": "Not offered, because the first evaluation is that of the start model; {eval_every} sets how often",
    "eval_accumulation_steps": WHOLE_EVALUATION,
    "eval_do_concat_batches": WHOLE_EVALUATION,
    "eval_use_gather_object": WHOLE_EVALUATION,
    "eval_split": OTHER_SPLIT,
    "eval_num_beams": EVALUATED_AS_SAMPLED,
    "save_strategy": "{save_every}, in updates",
    "eval_on_start": "Not needed, because the start model is always evaluated",
    "prediction_loss_only": "{eval_func}",
    "include_for_metrics": "{eval_func}",
    "batch_eval_metrics": "{eval_func}",
    "adam_beta1": ADAM,
    "adam_beta2": ADAM,
    "adam_betas": ADAM,
    "adam_epsilon": ADAM,
    "optim_args": "Not offered, because optimizers have no further options; {optim} chooses one",
    "optim_target_modules": "Not offered, because every trained weight has the same optimizer; {optim} chooses it",
    "label_smoothing_factor": "Not offered, because no labels are learned: the loss is that of the algorithm",
    "label_names": "Not offered, because no labels are learned: reward functions receive every column",
    "average_tokens_across_devices": "Not needed, because a loss is always averaged over the tokens of all processes",
    "neftune_noise_alpha": "Not offered, because noise in the embeddings would change the policy ratio",
    "use_liger_kernel": NO_COMPILE,
    "liger_kernel_config": NO_COMPILE,
    "use_cache": "Not needed, because sampling always uses a cache and training never does",
    "torch_empty_cache_steps": "Not needed, because memory is freed between the phases of an update",
    "log_on_each_node": EVERY_UPDATE,
    "log_level": "Not offered, because messages of libraries are turned off",
    "log_level_replica": "Not offered, because messages of libraries are turned off",
    "include_num_input_tokens_seen": "Not needed, because tokens and episodes are always in run.json",
    "disable_tqdm": "Not needed, because a run prints one line that is updated, or a line every few seconds in a file",
    "run_name": ("{output}", "{rm_output}"),
    "project": TRACKER,
    "save_only_model": WHOLE_STATE,
    "restore_callback_states_from_checkpoint": WHOLE_STATE,
    "ignore_data_skip": WHOLE_STATE,
    "enable_jit_checkpoint": "Not needed, because Ctrl-C and SIGTERM save a checkpoint before the run ends",
    "save_on_each_node": "Not needed, because only the first process writes",
    "skip_memory_metrics": "Not needed, because the peak memory is always logged",
    "use_cpu": ONE_DEVICE,
    "no_cuda": ONE_DEVICE,
    "device": ONE_DEVICE,
    "local_rank": LAUNCHER,
    "deepspeed": NO_DEEPSPEED,
    "parallelism_config": NO_DEEPSPEED,
    "accelerator_config": LAUNCHER,
    "debug": "{check}: it tries one update and prints each result",
    "do_train": TRAIN_ONLY,
    "do_eval": TRAIN_ONLY,
    "do_predict": TRAIN_ONLY,
    "train_sampling_strategy": "Not offered, because the order of the prompts depends on {seed} only",
    "group_by_length": "Not offered, because the order of the prompts depends on {seed} only",
    "length_column_name": "Not offered, because the order of the prompts depends on {seed} only",
    "hub_token": "Not offered, because tokens do not belong in commands; run `hf auth login`",
    "hub_strategy": TO_HUB,
    "hub_always_push": TO_HUB,
    "hub_revision": TO_HUB,
    "version": "Not offered, because the versions are in each run.json; `pip list` prints them",
    # loggers
    "wandb": ("{report_to} wandb", TRACKER[1]),
    "mlflow": ("{report_to} mlflow", TRACKER[1]),
    "trackio": ("{report_to} trackio", TRACKER[1]),
    "log_with": TRACKER,
    "logger": TRACKER,
    "use_wandb": ("{report_to} wandb", TRACKER[1]),
    "track": TRACKER,
    "logging_dir": TENSORBOARD,
    "tensorboard": TENSORBOARD,
    "use_tensorboard": TENSORBOARD,
    # OpenRLHF
    "pretrain": START_MODEL,
    "reward_pretrain": "{rm_model}",
    "critic_pretrain": "{critic} separate, or {critic} reward-model",
    "remote_rm_url": "{reward_func} FILE.py:NAME",
    "agent_func_path": "{reward_func} FILE.py:NAME",
    "prompt_data": ("{prompts}", "{pairs}"),
    "max_samples": "{max_prompts}",
    "prompt_max_len": SKIPPED_PROMPTS,
    "generate_max_len": "{max_new_tokens}",
    "max_len": ("{pair_length}", "{prompt_length} and {max_new_tokens}"),
    "input_key": "{columns} prompt=NAME",
    "label_key": "Not needed, because reward functions receive every column by its name",
    "apply_chat_template": CHAT_TEMPLATE,
    "input_template": CHAT_TEMPLATE,
    "advantage_estimator": BY_SCRIPT,
    "rollout_batch_size": "{batch_size}",
    "n_samples_per_prompt": "{K}",
    "eval_n_samples_per_prompt": "{eval_samples}",
    "eval_temperature": EVALUATED_AS_SAMPLED,
    "train_batch_size": "{minibatches} = episodes per update / train_batch_size for OpenRLHF's, {batch_size} for "
    "verl's",
    "micro_train_batch_size": ("{micro_batch_size}", "{rm_batch_size}"),
    "micro_rollout_batch_size": "{micro_batch_size} for log-probabilities, {rollout_slots} for sampling",
    "max_epochs": ("{ppo_epochs}", "{rm_epochs}"),
    "num_episodes": "{epochs}; an episode is one completion here",
    "value_clip": "{value_clip_range}",
    "lambd": "{lam}",
    "eps_clip_low_high": "{clip_range} and {epsilon_high}",
    "use_kl_loss": "{kl_placement} loss",
    "dynamic_filtering": "{dynamic_sampling}",
    "dynamic_filtering_reward_range": "{keep_pass_rate}, which selects prompts once, before training",
    "overlong_buffer_len": OVERLONG,
    "overlong_penalty_factor": "{reward_weights}, the weight of trl:get_soft_overlong_punishment",
    "max_norm": "{max_grad_norm}",
    "normalize_reward": "{normalize_scores}",
    "entropy_loss_coef": "{entropy_coef}",
    "actor_learning_rate": "{learning_rate}",
    "critic_learning_rate": "{learning_rate}, which the policy and the critic share",
    "lr_scheduler": "{lr_schedule}",
    "lora_rank": "{use_lora} and {lora_r}",
    "packing_samples": ALWAYS_PACKED,
    "use_dynamic_batch": ALWAYS_PACKED,
    "ptx_coef": "Not offered, because no pretraining loss is mixed in; {kl_target} limits the distance",
    "enable_ema": "Not offered, because no moving average of the weights is kept",
    "async_train": "Not offered, because every update samples from the newest policy",
    "colocate_all_models": "Not needed, because all models are in one process",
    "zero_stage": NO_DEEPSPEED,
    "ring_attn_size": NO_DEEPSPEED,
    "save_path": ("{output}", "{rm_output}"),
    "ckpt_path": "{output}: checkpoints are in the run's folder",
    "load_checkpoint": "{resume} with the run's {output}",
    "max_ckpt_num": "{keep}",
    "flash_attn": ATTENTION,
    # verl
    "ppo_mini_batch_size": "{minibatches}: prompts per update / ppo_mini_batch_size",
    "data.train_batch_size": "{batch_size}",
    "rollout.n": "{K}",
    "rollout.name": "{rollout_engine}",
    "val_kwargs.n": "{eval_samples}",
    "model.path": START_MODEL,
    "reward_model.enable": "{rm_model}, or {rm_model} none",
    "reward_model.model.path": "{rm_model}",
    "critic.model.path": "{critic} separate, or {critic} reward-model",
    "critic.optim.lr": "{learning_rate}, which the policy and the critic share",
    "critic.cliprange_value": "{value_clip_range}",
    "critic.ppo_epochs": "{ppo_epochs}",
    "kl_ctrl.type": "{kl_schedule}",
    "kl_ctrl.horizon": "{kl_horizon}",
    "kl_ctrl.target_kl": "{kl_target} N/token: verl's KL is a mean per token",
    "kl_loss_coef": "{kl_coef} with {kl_placement} loss and {kl_schedule} fixed",
    "kl_loss_type": "Not offered, because the KL in the loss is k3 ({kl_placement} loss)",
    "kl_penalty": "Not offered, because the KL in the reward is k1 ({kl_placement} reward)",
    "use_kl_in_reward": "{kl_placement} reward",
    "adv_estimator": BY_SCRIPT,
    "norm_adv_by_std_in_grpo": "{scale_rewards} group",
    "loss_agg_mode": "{loss_type} dapo for token-mean; docs/coming_from_trl.md has the other modes",
    "entropy_coeff": "{entropy_coef}",
    "grad_clip": "{max_grad_norm}",
    "use_dynamic_bsz": ALWAYS_PACKED,
    "use_remove_padding": ALWAYS_PACKED,
    "ppo_max_token_len_per_gpu": ALWAYS_PACKED,
    "ppo_micro_batch_size": "{micro_batch_size}",
    "ppo_micro_batch_size_per_gpu": "{micro_batch_size}",
    "log_prob_micro_batch_size": "{micro_batch_size}",
    "log_prob_micro_batch_size_per_gpu": "{micro_batch_size}",
    "tensor_model_parallel_size": "Not offered, because a model is not split over several GPUs",
    "gpu_memory_utilization": OWN_VLLM,
    "enforce_eager": "{rollout_engine} slots",
    "enable_gradient_checkpointing": "{gradient_checkpointing}",
    "train_files": ("{prompts}", "{pairs}"),
    "prompt_key": "{columns} prompt=NAME",
    "max_response_length": "{max_new_tokens}",
    "custom_reward_function.path": "{reward_func} FILE.py:NAME",
    "max_num_gen_batches": ONE_FEWER_BATCH,
    "filter_groups.max_num_gen_batches": ONE_FEWER_BATCH,
    "filter_groups": "{dynamic_sampling}",
    "overlong_buffer": OVERLONG,
    "total_epochs": ("{epochs}", "{rm_epochs}"),
    "total_training_steps": "{num_iterations}",
    "save_freq": "{save_every}",
    "test_freq": "{eval_every}",
    "val_before_train": "Not needed, because the start model is always evaluated",
    "trainer.critic_warmup": "{critic_warmup} N-1: verl trains the policy in update N",
    "critic_warmup_steps": "{critic_warmup}",
    "resume_mode": "{resume}",
    "default_local_dir": ("{output}", "{rm_output}"),
    "project_name": TRACKER,
    "experiment_name": ("{output}", "{rm_output}"),
    "n_gpus_per_node": LAUNCHER,
    "nnodes": LAUNCHER,
    "max_ckpt_to_keep": "{keep}",
    "max_actor_ckpt_to_keep": "{keep}",
    # LLaMA-Factory, Unsloth
    "stage": BY_SCRIPT,
    "finetuning_type": "{use_lora} for lora; without it all weights are trained",
    "lora_target": "{lora_targets}",
    "quantization_bit": "{load_in_4bit}",
    "dataset_dir": ("{prompts}, which may be a folder", "{pairs}, which may be a folder"),
    "template": CHAT_TEMPLATE,
    "cutoff_len": ("{pair_length}", "{prompt_length}"),
    "max_seq_length": ("{pair_length}", "{prompt_length} and {max_new_tokens}"),
    "ppo_buffer_size": "{minibatches}, and {batch_size} = per_device_train_batch_size x gradient_accumulation_steps x "
    "ppo_buffer_size",
    "ppo_score_norm": "{normalize_scores}",
    "ppo_target": "{kl_target} N/sequence",
    "ppo_whiten_rewards": "{whiten_rewards}",
    "reward_model_type": "Not offered, because the reward model is a whole model ({rm_model})",
    "ref_model": FIXED_REFERENCE,
    "ref_model_adapters": FIXED_REFERENCE,
    "ref_model_quantization_bit": FIXED_REFERENCE,
    "adapter_name_or_path": "Not offered, because a run starts from a whole model: merge the adapter first",
    "export_dir": "{merge_lora}: the merged model is in RUN/merged",
    "plot_loss": "Not needed, because the plot command draws the curves",
    "preprocessing_num_workers": "Not offered, because tokenizing 10,000 prompts takes seconds",
    "overwrite_cache": "Not needed, because nothing is cached",
    "pure_bf16": "Not offered, because trained weights stay in float32; {bf16} computes in bfloat16",
    "val_size": HELD_OUT,
    "fast_inference": "{rollout_engine} vllm",
    "max_lora_rank": "{lora_r}",
    # CleanRL, and TRL before 0.12
    "kl_beta": "{kl_coef}",
    "adap_kl_ctrl": "{kl_schedule} adaptive or fixed",
    "horizon": "{kl_horizon}",
    "early_stopping": "Not offered, because beta enforces the KL target ({kl_target}) instead of stopping a pass",
    "use_score_scaling": "{normalize_scores}",
    "use_score_norm": "{normalize_scores}",
    "total_timesteps": "{episodes} = total_timesteps / tokens per completion",
    "num_envs": "{batch_size}",
    "num_steps": "{max_new_tokens}",
    "num_minibatches": "{minibatches}",
    "update_epochs": "{ppo_epochs}",
    "nminibatches": "{minibatches}",
    "noptepochs": "{ppo_epochs}",
    "clip_coef": "{clip_range}",
    "clip_vloss": "{value_clip_range}: the value is always clipped; CleanRL's limit is clip_coef",
    "ent_coef": "{entropy_coef}",
    "norm_adv": "{whiten_advantages}",
    "anneal_lr": "{lr_schedule} linear",
    "torch_deterministic": "{deterministic}",
    "cuda": ONE_DEVICE,
    "exp_name": ("{output}", "{rm_output}"),
    "save_model": "Not needed, because the final and the best model are always saved",
    "capture_video": "Not offered, because the environment is a language model",
    "env_id": "Not offered, because the environment is a language model: {prompts} and {reward_func}",
}
# the same for all names with this beginning
FAMILIES = {
    "vllm_importance_sampling_": ALWAYS_CORRECTED,
    "vllm_server_": NO_SERVER,
    "vllm_group_": NO_SERVER,
    "vllm_structured_": NO_SERVER,
    "vllm_": OWN_VLLM,
    "sapo_": OTHER_LOSS,
    "vespo_": OTHER_LOSS,
    "entropy_coef_": FIXED_BONUS,
    "ref_model_": FIXED_REFERENCE,
    "torch_compile": NO_COMPILE,
    "logging_": EVERY_UPDATE,
    "dataloader_": OWN_BATCHES,
    "ddp_": LAUNCHER,
    "fsdp": NO_DEEPSPEED,
    "wandb_": TRACKER,
    "trackio_": TRACKER,
    # blocks of verl's settings
    "filter_groups.": "{dynamic_sampling}",
    "overlong_buffer.": OVERLONG,
    "overlong_buffer_cfg.": OVERLONG,
    "val_kwargs.": EVALUATED_AS_SAMPLED,
    "mlflow_": TRACKER,
}
