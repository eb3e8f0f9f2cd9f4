"""Tests the answers to names of other trainers: every one gives a setting of ours, or the reason why there is none."""

from __future__ import annotations

import dataclasses
import re

import pytest
from transformers import TrainingArguments
from trl import GRPOConfig, ModelConfig, RewardConfig, RLOOConfig, ScriptArguments
from trl.experimental.ppo import PPOConfig
from trl.scripts.grpo import GRPOScriptArguments

from rlhf.algorithms.table import ALGORITHMS
from rlhf.config import command_line, make_config, parse_cli
from rlhf.settings.fields import name_table, settings_of
from rlhf.settings.flags import CommandLine
from rlhf.settings.reward_model import LINE, RewardModelConfig
from rlhf.settings.training import Config
from rlhf.settings.translate import ELSEWHERE, FAMILIES, OTHER_MEANINGS, SETTING, hint
from rlhf.utils.errors import UserError
from tests.documents import ROOT

NAMES = name_table(settings_of(Config))
REWARD_NAMES = name_table(settings_of(RewardModelConfig))
LINES = {name: command_line(row) for name, row in ALGORITHMS.items()} | {"reward model": LINE}
OF_TRAINING = (GRPOConfig, RLOOConfig, PPOConfig, ModelConfig, ScriptArguments, GRPOScriptArguments)
WRITTEN = {"--config", "--bf16", "--no-bf16", "--nproc-per-node", "--prompts"}  # flags in the texts themselves
ANSWERS = ("Use ", "Not offered, because ", "Not needed, because ")


def texts(answers: str | tuple[str, ...]) -> tuple[str, ...]:
    return (answers,) if isinstance(answers, str) else answers


@pytest.mark.parametrize("name", [*ELSEWHERE, *FAMILIES])
def test_the_table_names_settings_that_exist_and_gives_reasons(name):
    assert name not in NAMES, "this name is accepted, so the answer is never printed"
    for text in texts({**ELSEWHERE, **FAMILIES}[name]):
        assert text.startswith(("{", "--", *ANSWERS)), text
        assert set(SETTING.findall(text)) <= NAMES.keys() | REWARD_NAMES.keys(), text
        assert set(re.findall(r"--[a-z][\w-]*", text)) <= WRITTEN, text


def fields_of(config_class: type) -> list[str]:
    return [f.name for f in dataclasses.fields(config_class)]


def line_of(command: CommandLine, name: str) -> str | None:
    """Return the error line for a flag, or None if the command has it."""
    problems = command.read([f"--{name}", "1"])[1]
    return problems[0] if problems else None


@pytest.mark.parametrize("config_class", OF_TRAINING, ids=lambda c: c.__name__)
def test_every_field_of_trls_classes_is_accepted_or_answered(config_class):
    """Also those of transformers' TrainingArguments, from which they inherit. `report_to` is a setting."""
    assert len(fields_of(config_class)) >= 2
    wrong = {name: hint(name, NAMES) for name in fields_of(config_class) if name not in NAMES}
    assert {name: answer for name, answer in wrong.items() if not answer.startswith(ANSWERS)} == {}


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_the_scripts_answer_flags_of_every_class(algorithm):
    wrong = {}
    for name in dict.fromkeys(name for config_class in OF_TRAINING for name in fields_of(config_class)):
        line = line_of(LINES[algorithm], name)
        if line is not None and "belongs to" not in line and not line.split(". ", 1)[1].startswith(ANSWERS):
            wrong[name] = line
    assert wrong == {}


@pytest.mark.parametrize("config_class", [RewardConfig, ModelConfig, ScriptArguments, TrainingArguments])
def test_the_reward_models_command_answers_every_field(config_class):
    for name in fields_of(config_class):
        line = line_of(LINE, name)
        assert line is None or "belongs to the training scripts" in line or line.split(". ", 1)[1].startswith(ANSWERS)


# name -> the answer in a command, without "unknown flag --NAME: command line. "
ASKED = {
    "lr": "Use --learning-rate",
    "beta": "Use --kl-coef with --kl-schedule fixed; --kl-placement is loss in GRPOConfig and reward in RLOOConfig",
    "max_completion_length": "Use --max-new-tokens",
    "max-completion-length": "Use --max-new-tokens",
    "deepspeed": "Not offered, because DeepSpeed",
    "device": "Not needed, because a GPU is used if there is one",
    "wandb": "Not offered, because|Use --report-to wandb",
    "version": "Not offered, because",
    "max_length": "Use --prompt-length and --max-new-tokens",
    "stop_token": "Not needed, because a completion always ends at EOS",
    "eval_steps": "Use --eval-every, in updates",
    "save_steps": "Use --save-every, in updates",
    "total_episodes": "Use --episodes",
    "lr_scheduler_type": "Use --lr-schedule",
    "reward_funcs": "Use --reward-func",
    "model_name_or_path": "Use --actor-model",
    "n_samples_per_prompt": "Use --K",
    "actor_rollout_ref.actor.ppo_epochs": "Use --ppo-epochs",
    "algorithm.kl_ctrl.kl_coef": "Use --kl-coef",
    "actor_rollout_ref.actor.optim.lr": "Use --learning-rate",
    "actor_rollout_ref.rollout.n": "Use --K",
    "data.train_batch_size": "Use --batch-size",
    "train_batch_size": "Use --minibatches = .* for OpenRLHF's, --batch-size for verl's",
    # the same word with another unit, place or count there: each was looked up in the trainer's source
    "algorithm.kl_ctrl.target_kl": "Use --kl-target N/token",
    "ppo_target": "Use --kl-target N/sequence",
    "actor_rollout_ref.actor.kl_loss_coef": "Use --kl-coef with --kl-placement loss and --kl-schedule fixed",
    "trainer.critic_warmup": "Use --critic-warmup N-1",
    "max_num_gen_batches": "Use --dynamic-sampling N-1",
    "total_timesteps": "Use --episodes = total_timesteps / tokens per completion",
    "ppo_buffer_size": "Use --minibatches, and --batch-size = ",
    "micro_rollout_batch_size": "Use --micro-batch-size for log-probabilities",
    "prompt_max_len": "Use --prompt-length: longer prompts are skipped, not cut",
    "no_cuda": "Not needed, because",
    "eval_n_samples_per_prompt": "Use --eval-samples$",
    "eval_split": "Use --eval-dataset ",
    "dataset_test_split": "Use --eval-dataset ",
    "val_size": "Use --split, ",
    "eval_temperature": "Not offered, because evaluations during training sample as training does",
    "eval_num_beams": "Not offered, because evaluations during training sample as training does",
    "eval_interval": "Use --eval-every, in updates",
    "per_device_eval_batch_size": "Not offered, because the batch size of evaluations is fixed",
    "top_entropy_quantile": "Not offered, because the loss does not select tokens",
    "off_policy_mask_threshold": "Not offered, because completions are not masked",
    "cast_lm_head_to_fp32": "Not offered, because the head computes in the precision of the model",
    "steps_per_generation": "Use --minibatches: steps_per_generation / gradient_accumulation_steps",
    "generation_batch_size": "Use --batch-size, in prompts: generation_batch_size / --K",
    "logging_dir": "Not needed, because TensorBoard is always written, in RUN/logs",
    "export_dir": "Use --merge-lora: ",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "Not offered, because evaluations during training",
    "actor_rollout_ref.rollout.val_kwargs.n": "Use --eval-samples",
    "reward_model.enable": "Use --rm-model, or --rm-model none",
    "reward_model.overlong_buffer.len": "Use --reward-func trl:get_soft_overlong_punishment",
    "learning_rat": r"Did you mean --learning-rate\?",
    "completely_unknown": "--help-all lists all settings",
}


@pytest.mark.parametrize("name", ASKED)
def test_a_flag_of_another_trainer_is_answered(name):
    line = line_of(LINES["ppo"], name)
    assert re.match(rf"unknown flag --{re.escape(name)}: command line\. ({ASKED[name]})", line), line


def test_blocks_of_verl_are_answered_by_their_name():
    for name in ("enable", "metric"):
        line = line_of(LINES["grpo"], f"algorithm.filter_groups.{name}")
        assert line.endswith("Use --dynamic-sampling"), line
    line = line_of(LINES["grpo"], "algorithm.filter_groups.max_num_gen_batches")
    assert "Use --dynamic-sampling N-1" in line, "verl counts the first batch, too"


def test_a_kl_target_without_a_unit_is_accepted_only_if_its_unit_is_known():
    """verl's target_kl is per token, that of the documents with TRL's first PPO per completion."""
    for words in (["--target-kl", "0.1"], ["--sweep", "target_kl=0.1,6"]):
        with pytest.raises(UserError, match=r"target_kl 0\.1 has no unit: --\S+.*0\.1/token .*0\.1/sequence"):
            parse_cli(words)
    with pytest.raises(UserError, match=r"target_kl 0\.1 has no unit: make_config\(target_kl=\)"):
        make_config(target_kl=0.1)
    assert str(parse_cli(["--target-kl", "0.1/token"]).kl.targets[0]) == "0.1/token"
    assert str(parse_cli(["--init-kl-coef", "0.2", "--target-kl", "6"]).kl.targets[0]) == "6/sequence"
    assert str(make_config(target=6).kl.targets[0]) == "6/sequence", "a name of TRL's first PPO only"


def test_the_page_gives_kl_targets_and_beta_with_their_unit_and_place():
    text = (ROOT / "docs" / "coming_from_trl.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    (verl,) = (row for row in rows if "`kl_ctrl.target_kl`" in row)
    (openrlhf,) = (row for row in rows if "`--kl_target`" in row)
    assert "N/token" in verl and "N/token" in openrlhf and "sequence" not in verl + openrlhf
    (beta,) = (row for row in rows if row.startswith("| `beta`"))
    assert re.search(r"GRPO.*--kl-placement loss", beta) and re.search(r"RLOO.*--kl-placement reward", beta)


@pytest.mark.parametrize("name", ["optim", "weight_decay", "warmup_ratio", "epsilon_high", "gae_lambda", "vf_coef",
                                  "cliprange", "dataset_name", "num_train_epochs"])  # fmt: skip
def test_names_that_are_accepted(name):
    assert line_of(LINES["ppo"], name) is None


def test_settings_in_files_and_in_python_are_answered_without_dashes(tmp_path):
    with pytest.raises(UserError, match=r"unknown setting beta: make_config\(beta=\)\. Use kl_coef with kl_schedule"):
        make_config(beta=0.1)
    file = tmp_path / "grpo.yaml"
    file.write_text("trainer:\n  max_completion_length: 64\n  deepspeed: zero3.json\n")
    with pytest.raises(UserError) as caught:
        parse_cli(["--config", str(file)])
    assert re.fullmatch(
        r"unknown setting max_completion_length: .*:2\. Use max_new_tokens\n"
        r"unknown setting deepspeed: .*:3\. Not offered, because .*",
        str(caught.value),
    )


def test_assignments_as_in_verl_are_answered_with_the_flag():
    words = ["actor_rollout_ref.actor.ppo_epochs=4", "+algorithm.adv_estimator=gae", "learning_rate=1e-5"]
    with pytest.raises(UserError) as caught:
        parse_cli(words)
    first, second, third = str(caught.value).split("\n")
    assert first.endswith("Settings are given as flags. Use --ppo-epochs")
    assert "each algorithm has a script" in second and third.endswith("Use --learning-rate")


# --- the same name with another meaning ------------------------------------------------------------------------------


def test_names_with_another_meaning_are_explained_where_they_are_used(tmp_path):
    as_flags = parse_cli(["--num_iterations", "2", "--per-device-train-batch-size", "8"]).meanings
    assert as_flags == [
        "--num-iterations 2 means 2 updates here. In TRL it would be the passes over each rollout, which --ppo-epochs "
        "sets",
        "--per-device-train-batch-size 8 means 8 prompts per update here. In TRL it would be the completions per "
        "forward pass, which --micro-batch-size sets",
    ]
    in_python = make_config(num_iterations=1_000, episodes=None).meanings
    assert in_python == [
        "num_iterations 1000 means 1,000 updates here. In TRL it would be the passes over each rollout, which "
        "ppo_epochs sets"
    ]
    file = tmp_path / "a.yaml"
    file.write_text("num_iterations: 3\n")
    assert parse_cli(["--config", str(file)]).meanings[0].startswith("num_iterations 3 means 3 updates")
    assert parse_cli(["--config", str(file), "--episodes", "400"]).meanings == [], "the flag replaces it"


def test_no_explanation_for_values_of_recipes_and_our_own_names():
    assert parse_cli(["--recipe", "demo"]).meanings == [] and parse_cli(["--batch-size", "8"]).meanings == []
    assert all(name in NAMES for name in OTHER_MEANINGS)


# --- the page --------------------------------------------------------------------------------------------------------


def names_on_the_page() -> list[str]:
    """Return the names in the first columns of the tables of docs/coming_from_trl.md."""
    text = (ROOT / "docs" / "coming_from_trl.md").read_text(encoding="utf-8").split("## PPOConfig")[1]
    cells = re.findall(r"^\| ((?:[^|])*`[^|]*) \|", text, re.MULTILINE)
    spans = [span for cell in cells for span in re.findall(r"`([^`]+)`", re.sub(r"\([^)]*\)", "", cell))]
    return [re.split(r"[ :=]", span.lstrip("-"))[0] for span in spans]


def test_every_name_on_the_page_is_accepted_or_answered():
    values = {"group_norm", "dr_grpo", "rloo", "reinforce_baseline", "oft", "kto", "dataset_info.json"}
    names = [name for name in dict.fromkeys(names_on_the_page()) if name not in values]
    assert len(names) > 150
    answers = {name: hint(name, NAMES) for name in names if name.rsplit(".")[-1] not in NAMES}
    assert {name: answer for name, answer in answers.items() if not answer.startswith(ANSWERS)} == {}
