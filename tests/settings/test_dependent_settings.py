"""Tests settings that have an effect only with others: a flag without an effect is refused, from the declarations."""

from __future__ import annotations

import pytest

from rlhf.algorithms.table import ALGORITHMS
from rlhf.config import config_of_run, make_config, parse_cli
from rlhf.settings.evaluation import (
    ComparisonConfig,
    EvaluationConfig,
    ExportConfig,
    PlotConfig,
    parse_comparison_cli,
    parse_evaluation_cli,
    parse_export_cli,
    parse_plot_cli,
)
from rlhf.settings.fields import Setting, alternatives, in_words, is_met, settings_of
from rlhf.settings.recipes import shipped_recipes
from rlhf.settings.reward_model import RewardModelConfig, parse_reward_cli
from rlhf.settings.training import Config
from rlhf.utils.errors import UserError
from tests.conftest import algorithms_of
from tests.records import record_of

# settings without `needs`: they act in every command that has them
ACT_ALWAYS = {
    Config: {
        *("actor_model", "rm_model", "teacher", "use_lora", "bf16", "gradient_checkpointing"),
        "allow_weak_reward_model",  # a permission: without a reward model it is not used, and nobody misses it
        *("prompts", "split", "eval_dataset", "columns", "skip_bad_rows", "steps_per_topic", "plain_prompts"),
        *("max_prompts", "prompt_length", "eval_prompts", "eval_text", "few_shot"),
        *("dataset_config", "dataset_split"),  # refused for a file, when the data is read
        *("max_new_tokens", "max_episode_tokens", "temperature", "top_k", "top_p", "stop"),
        *("batch_size", "K", "ppo_epochs", "minibatches", "micro_batch_size", "micro_batch_tokens"),
        *("gradient_accumulation_steps", "clip_range", "epsilon_high", "mask_truncated_completions", "entropy_coef"),
        *("rollout_engine", "threads", "packed", "fit"),
        *("critic", "value_coef", "value_clip_range", "gamma", "lam", "gae_unit", "critic_warmup"),
        *("critic_learning_rate", "critic_lam", "adam_beta1", "adam_beta2"),
        *("whiten_rewards", "whiten_advantages", "dynamic_sampling", "scale_rewards", "loss_type"),
        *("reward_func", "eval_func", "reward_weights", "missing_eos_penalty", "normalize_scores", "control"),
        *("environment", "kl_placement"),
        *("learning_rate", "lr_schedule", "warmup_steps", "weight_decay", "optim", "max_grad_norm"),
        *("deterministic", "seeds", "episodes", "eval_every", "eval_samples", "eval_temperature"),
        *("best_rule", "output", "overwrite"),
        *("save_every", "keep", "resume", "dry_run", "check", "write_parts"),
        "ddp_timeout",  # acts with several processes, which a launcher starts
        *("report_to", "record_tokens", "push_to_hub"),
    },
    RewardModelConfig: {
        *("pairs", "split", "dataset_config", "dataset_split", "columns", "skip_bad_rows", "plain_prompts"),
        *("pair_length", "base_model", "rm_output", "rm_overwrite", "rm_learning_rate", "rm_epochs"),
        *("rm_batch_size", "rm_bf16", "rm_seed", "actor_model", "calibration_prompts"),
    },
    EvaluationConfig: {"tokens"},
    ComparisonConfig: {
        "runs",
        "arm",
        "few_shot",
        "limit_minutes",
        "full",
        *settings_of(EvaluationConfig).keys() & settings_of(ComparisonConfig).keys(),
    },
    PlotConfig: {"runs", "arm", "x", "smooth", "output"},
    ExportConfig: {"run", "to", "output"},
}
ACT_ALWAYS[ComparisonConfig] -= {"dataset_config", "dataset_split", "columns", "skip_bad_rows"}  # need --prompts
PARSERS = {
    RewardModelConfig: parse_reward_cli,
    EvaluationConfig: parse_evaluation_cli,
    ComparisonConfig: lambda words: parse_comparison_cli(["RUN", *words]),
    PlotConfig: parse_plot_cli,
    ExportConfig: lambda words: parse_export_cli(["RUN", *words]),
}
VALUES = {  # of settings whose type does not give one
    "chat_template_kwargs": '{"enable_thinking":false}',
    "kl_target": "3/sequence", "push_to_hub": "ada/model", "memory": "8GB",
    "reward_func": "length_penalty", "lora_targets": "q_proj", "split": "10/80/10",
    "columns": "prompt=question", "top_p": "0.5", "skip_bad_rows": "2", "score_ema": "0.5", "lora_dropout": "0.1",
    "critic": "separate", "critic_warmup": "9", "critic_lam": "1", "adam_beta1": "0.5", "adam_beta2": "0.5",
    "calibration_prompt_length": "9", "rollout_engine": "slots", "environment": "crossing --rm-model none",
}  # fmt: skip


def words_of(setting: Setting) -> list[str]:
    """Return the flag with a value that is not the default."""
    if setting.kind is bool:
        return [setting.flag, str(not setting.default).lower()]
    if setting.name in VALUES:
        return [setting.flag, *VALUES[setting.name].split()]
    if setting.choices:
        return [setting.flag, next(choice for choice in setting.choices if choice != setting.default)]
    return [setting.flag, "3" if setting.kind in (int, float) else "thing"]


def met(condition: str, settings: dict[str, Setting]) -> list[str]:
    """Return flags that meet a condition."""
    name, value = alternatives(condition)[0]
    if condition.startswith("!"):
        return []
    return [settings[name].flag, value] if value else [*flags_for(name, settings), *words_of(settings[name])]


def broken(condition: str, settings: dict[str, Setting]) -> list[str]:
    """Return flags that do not meet a condition."""
    name, value = alternatives(condition)[0]
    other = settings[name]
    if condition.startswith("!"):
        return [other.flag, value] if value else words_of(other)
    if value:
        return words_of(other) if other.default == value else []
    return [other.flag, "none"] if other.default not in (None, False, ()) else []


def flags_for(name: str, settings: dict[str, Setting], without: str | None = None) -> list[str]:
    """Return flags that meet all conditions of a setting, except for `without`."""
    others = [one for one in settings[name].conditions if one != without and alternatives(one)[0][0] in settings]
    words = [word for one in others for word in met(one, settings)]
    return [*words, *(broken(without, settings) if without is not None else [])]


def cases() -> list:
    """Return one case per command, setting and condition on a setting that the command has."""
    found = []
    for config_class in ACT_ALWAYS:
        settings = settings_of(config_class)
        for setting in settings.values():
            for condition in setting.conditions:
                if alternatives(condition)[0][0] in settings:
                    found.append(pytest.param(config_class, setting, condition, id=f"{config_class.__name__} "
                                              f"{setting.name} {in_words(condition)}"))  # fmt: skip
    return found


def parser_of(config_class: type, setting: Setting, condition: str):
    """Return the parser of a command that has the setting and those of the condition."""
    if config_class is not Config:
        return PARSERS[config_class]
    names = {setting.name, *(name for name, _ in alternatives(condition))}
    algorithm = next(name for name, row in ALGORITHMS.items() if not names & row.foreign.keys())
    return lambda words: parse_cli(words, algorithm)


def errors(parse, words: list[str]) -> list[str]:
    try:
        parse(words)
    except UserError as error:
        return [*map(str, error.problems)]
    return []


@pytest.mark.parametrize("config_class", ACT_ALWAYS, ids=lambda c: c.__name__)
def test_every_setting_declares_whether_it_depends_on_another_one(config_class):
    settings = settings_of(config_class)
    own = {
        name for name, s in settings.items() if {n for c in s.conditions for n, _ in alternatives(c)} & settings.keys()
    }
    assert not own & ACT_ALWAYS[config_class]
    assert own | ACT_ALWAYS[config_class] == settings.keys()


@pytest.mark.parametrize(("config_class", "setting", "condition"), cases())
def test_a_flag_without_an_effect_is_refused_and_with_it_accepted(config_class, setting, condition):
    settings = settings_of(config_class)
    parse = parser_of(config_class, setting, condition)
    own = words_of(setting)
    refused = [e for e in errors(parse, [*flags_for(setting.name, settings, condition), *own]) if " no effect " in e]
    (line,) = (line for line in refused if line.startswith(f"{setting.name} has no effect {in_words(condition)}"))
    assert f": {setting.flag}. " in line and line.endswith(f", or remove {setting.flag}")
    assert errors(parse, [*flags_for(setting.name, settings), *own]) == []


def test_what_a_condition_means():
    values = {"a": None, "b": False, "c": (), "d": "x", "e": ("x", "y"), "f": 3}
    kept = ["d", "d=x", "e=y", "f", "!a", "!b", "!c", "!d=y", "a or d", "missing", "!missing"]
    assert [text for text in kept if not is_met(text, values)] == []
    unmet = ["a", "b", "c", "d=y", "e=z", "!d", "!d=x", "!e=x", "a or b"]
    assert [text for text in unmet if is_met(text, values)] == []
    assert all(is_met(text, {"e": "x"}) for text in ("a", "!d=x", "a or b"))


# --- where a value comes from ----------------------------------------------------------------------------------------


def test_files_may_contain_settings_that_have_no_effect(tmp_path, user_error):
    """Commands and algorithms share files; a value that would stop the run is refused there, too."""
    file = tmp_path / "shared.yaml"
    file.write_text("lora_r: 4\nkl_schedule: fixed\nkl_target: 3/sequence\nkeywords: [please]\nmemory: 8GB\n")
    config = parse_cli(["--config", str(file)])
    assert config.model.lora_r == 4 and not config.model.use_lora
    for line, parts in {
        "load_in_4bit: true": ("load_in_4bit", "--use-lora", "shared.yaml:1"),
        "merge_lora: true": ("merge_lora", "--use-lora", "shared.yaml:1"),
        "kl_placement: none\nrollback_on_kl: true": ("rollback_on_kl", "--kl-placement none", "shared.yaml:2"),
        "rollback_on_kl: true": ("rollback_on_kl", "--save-every", "shared.yaml:1"),
    }.items():
        file.write_text(line)
        with user_error(*parts):
            parse_cli(["--config", str(file)])
    with user_error("kl_target", "--kl-schedule fixed (", "shared.yaml:1): --kl-target. "):
        file.write_text("kl_schedule: fixed")
        parse_cli(["--config", str(file), "--kl-target", "3/sequence"])


def test_config_py_may_contain_them_and_the_plan_says_so(tmp_path):
    from rlhf.setup.plan import user_file_rows

    file = tmp_path / "config.py"
    file.write_text("lora_r = 4\nlearning_rate = 1e-4\n")
    ((_, line),) = user_file_rows(parse_cli([], "ppo", file))
    assert "lora_r 4 (default 16, " in line and "use_lora)" in line and "(default 5e-06)" in line
    file.write_text("lora_r = 4\nuse_lora = True\n")
    ((_, line),) = user_file_rows(parse_cli([], "ppo", file))
    assert "lora_r 4 (default 16)" in line


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_recipes_and_the_settings_of_a_run_are_accepted(recipe):
    for algorithm in algorithms_of(recipe):
        config = make_config(recipe, algorithm)
        for words in (
            [],
            ["--kl-schedule", "fixed"],
            ["--kl-placement", "none"],
            ["--no-use-lora", "--no-load-in-4bit"],
        ):
            assert [e for e in errors(lambda w, a=algorithm: parse_cli(w, a), ["--recipe", recipe, *words])] == []
        run = record_of(make_config(recipe, algorithm, kl_schedule="fixed"))
        run.settings["kl"]["kl_horizon"] = 7
        assert config_of_run(run).kl.kl_horizon == 7
        assert config.recipe == recipe


def test_python_keywords_are_refused_by_their_names(user_error):
    with user_error("lora_r", "use_lora", "make_config"):
        make_config(lora_r=4)
    with user_error("kl_target", "kl_schedule", "make_config"):
        make_config(kl_schedule="fixed", kl_target="3/sequence")
    assert make_config(reward_timeout=5).reward.reward_timeout == 5, "make_trainer may receive reward functions"


def test_a_setting_that_is_turned_off_is_accepted():
    for words in (["--no-merge-lora"], ["--lora-dropout", "0"], ["--kl-target", "none", "--kl-schedule", "fixed"]):
        assert errors(parse_cli, words) == []
