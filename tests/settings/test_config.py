"""Tests how the command line, YAML files and recipes are combined, and the errors in them."""

from __future__ import annotations

import pytest

from rlhf.config import config_of_run, make_config, parse_cli
from rlhf.settings.evaluation import parse_comparison_cli
from rlhf.settings.fields import name_table, settings_of
from rlhf.settings.reward_model import RewardModelConfig
from rlhf.settings.training import Config
from rlhf.settings.types import KLTarget, PathName
from rlhf.utils.errors import UserError, run_command
from tests.records import record_of
from tests.settings.test_dependent_settings import flags_for


def test_later_layers_replace_earlier_ones(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("learning_rate: 1e-4\nppo:\n  gamma: 0.5\n")
    assert parse_cli([]).optimizer.learning_rate == 5e-6
    assert parse_cli(["--recipe", "demo"]).batch.batch_size == 64
    from_file = parse_cli(["--recipe", "demo", "--config", str(file)])
    assert (from_file.optimizer.learning_rate, from_file.critic.gamma) == (1e-4, 0.5)
    both = parse_cli(["--recipe", "demo", "--config", str(file), "--learning-rate", "2e-4"])
    assert (both.optimizer.learning_rate, both.critic.gamma) == (2e-4, 0.5)


def test_names_of_the_reference_systems():
    config = parse_cli(
        "--init_kl_coef 0.2 --cliprange 0.1 --response-length 9 --target-kl 5/sequence --rank 2 --use-lora".split()
    )
    assert (config.kl.kl_coef, config.batch.clip_range, config.sampling.max_new_tokens) == (0.2, 0.1, 9)
    assert (
        parse_cli(["--reply-length", "7"]).sampling.max_new_tokens
        == make_config(reply_length=7).sampling.max_new_tokens
    )
    assert (config.kl.kl_target, config.model.lora_r) == ((KLTarget(5, "sequence"),), 2)


def booleans() -> list[str]:
    return [name for name, setting in settings_of(Config).items() if setting.kind is bool]


@pytest.mark.parametrize("name", booleans())
def test_all_spellings_of_boolean_flags(name):
    group = settings_of(Config)[name].group
    flag = "--" + name.replace("_", "-")
    need = flags_for(name, settings_of(Config))
    for words, value in (
        ([flag], True), ([flag, "false"], False), ([flag, "true"], True), (["--no-" + flag[2:]], False),
        ([f"--no_{name}"], False),
    ):  # fmt: skip
        assert getattr(getattr(parse_cli([*need, *words]), group), name) is value


def test_three_forms_of_lists(tmp_path):
    (tmp_path / "a.yaml").write_text("lora:\n  target_modules: [a, b]\n")
    for argv in (["--lora-targets", "a", "b"], ["--lora-targets", "a,b"], ["--config", str(tmp_path / "a.yaml")]):
        assert parse_cli([*argv, "--use-lora"]).model.lora_targets == ("a", "b")


def test_default_kl_targets_depend_on_the_schedule():
    def targets(*words):
        return [str(t) for t in parse_cli(list(words)).kl.targets]

    assert targets() == ["6/sequence"]
    assert targets("--kl-schedule", "phased") == ["0.05/token", "0.02/token", "0.01/token"], "as documented"
    assert targets("--kl-target", "5/sequence") == ["5/sequence"]


def test_run_length_comes_from_the_latest_layer(tmp_path):
    """One of --epochs, --num-iterations and --episodes in a later layer replaces the others."""

    def updates(*words, algorithm="ppo"):
        return parse_cli(list(words), algorithm).updates(100)

    (tmp_path / "a.yaml").write_text("episodes: 640")
    file = ["--recipe", "demo", "--config", str(tmp_path / "a.yaml")]
    assert updates("--recipe", "demo") == 150
    assert updates(*file) == updates(*file, algorithm="grpo") == 10
    assert updates(*file, "--num-iterations", "5") == 5
    assert updates("--recipe", "demo", "--epochs", "1.28") == 2
    assert updates("--recipe", "demo", "--episodes", "65") == 2, "rounded up to whole updates"
    (tmp_path / "a.yaml").write_text("epochs: 3\nepisodes: 40")
    assert updates("--config", str(tmp_path / "a.yaml")) == 10, "episodes are the first of two in one layer"


def test_flags_of_another_algorithm_are_refused(tmp_path, user_error):
    with user_error("--lam", "train_ppo.py"):
        parse_cli(["--lam", "0.9"], "grpo")
    with user_error("--dynamic-sampling", "train_grpo.py", "train_rloo.py"):
        parse_cli(["--dynamic-sampling", "4"], "ppo")
    (tmp_path / "both.yaml").write_text("lam: 0.5\ndynamic_sampling: 3\n")
    read = {"ppo": (0.5, 0), "grpo": (0.95, 3), "rloo": (0.95, 3)}
    for algorithm, (lam, draws) in read.items():
        config = parse_cli(["--config", str(tmp_path / "both.yaml")], algorithm)
        assert (config.critic.lam, config.group.dynamic_sampling) == (lam, draws), (
            "all algorithms may use one file: each reads its own groups"
        )
    (tmp_path / "wrong.yaml").write_text("lam: 7\n")
    with user_error("7", "wrong.yaml:1"):
        parse_cli(["--config", str(tmp_path / "wrong.yaml")], "grpo")


@pytest.mark.parametrize(
    ("algorithm", "setting", "value", "scripts"),
    [
        ("ppo", "dynamic_sampling", 4, ["train_grpo.py", "train_rloo.py"]),
        ("grpo", "gamma", 0.5, ["train_ppo.py"]),
        ("rloo", "loss_type", "cispo", ["train_grpo.py"]),
    ],
)
def test_from_python_a_setting_of_another_algorithm_is_refused(algorithm, setting, value, scripts, user_error):
    with user_error(f"make_config({setting}=)", *scripts):
        make_config(algorithm=algorithm, **{setting: value})


@pytest.mark.parametrize("name", ["toy", None, [], {}])
def test_an_unknown_algorithm_is_refused_in_python(name, user_error):
    with user_error("make_config(algorithm=)"):
        make_config(algorithm=name)
    with user_error("'PPO'", "mean ppo?"):
        make_config(algorithm="PPO")


def test_the_settings_of_an_unknown_algorithm_are_refused(user_error):
    with user_error("'toy'", "run.json"):
        config_of_run(record_of(algorithm="toy"))


def test_an_algorithm_that_compares_completions_needs_a_group(user_error):
    for algorithm in ("grpo", "rloo"):
        for size in ("none", "1"):
            with user_error("2"):
                parse_cli(["--K", size], algorithm)
    assert parse_cli([], "ppo").group_size == 1 and parse_cli([], "rloo").group_size == 8


@pytest.mark.parametrize(("algorithm", "compared"), [("ppo", 1), ("reinforce_pp", 1), ("grpo", 4), ("rloo", 4)])
def test_every_algorithm_samples_k_completions_and_only_some_compare_their_scores(algorithm, compared):
    for config in (parse_cli(["--num-generations", "4"], algorithm), make_config(algorithm=algorithm, K=4)):
        assert (config.group_size, config.compared, config.episodes_per_update) == (4, compared, 16)


DO_NOT_FIT = {  # command line -> the settings of the error
    "--rm-model none": ["rm_model"],
    "--reward-func length_penalty --reward-weights 1": ["reward_weights"],
    "--rollback-on-kl --save-every 2": ["rollback_on_kl", "keep", "save_every"],
    "--rollback-on-kl --keep 1 --save-every 50": ["rollback_on_kl", "keep", "save_every"],
    "--kl-coef 0": ["kl_coef", "kl_schedule"],
    "--kl-target 6/sequence 3/sequence": ["kl_target"],
    "--kl-schedule phased --kl-target 5/sequence": ["kl_target"],
    "--kl-schedule phased --kl-target 5/sequence 0.1/token": ["kl_target"],
}


@pytest.mark.parametrize("words", DO_NOT_FIT)
def test_settings_that_do_not_fit_together(words):
    with pytest.raises(UserError) as caught:
        parse_cli(words.split(), "grpo")
    (problem,) = caught.value.problems
    assert list(problem.settings) == DO_NOT_FIT[words]
    assert all(f"--{name.replace('_', '-')}" in problem.place for name in problem.settings)


def test_a_rollback_that_finds_a_checkpoint_is_accepted():
    parse_cli(["--rollback-on-kl", "--save-every", "3"])


BAD_FLAGS = {  # others are in tests/scripts/test_bad_inputs.py
    "abbreviated with =": ("--gam=3", ["--gam", "--gamma"]),
    "no value": ("--gamma", ["--gamma"]),
    "a bare KL target": ("--kl-target 6", ["kl_target", "'6'", "--kl-target", "0"]),
    "unknown choice": ("--kl-schedule adaptiv", ["adaptive"]),
    "a bad split": ("--split 50/50/50", ["'50/50/50'", "--split"]),
    "a stray word": ("demo", ["'demo'"]),
}


@pytest.mark.parametrize("what", BAD_FLAGS)
def test_errors_in_flags(what, user_error):
    words, parts = BAD_FLAGS[what]
    with user_error(*parts):
        parse_cli(words.split())


BAD_YAML = {  # others are in tests/scripts/test_bad_inputs.py
    "unknown key": ("learning_rat: 1\n", ["learning_rat", "a.yaml:1", "learning_rate"]),
    "twice by its alias": ("lam: 1\nppo:\n  gae_lambda: 0.5\n", ["gae_lambda", "a.yaml:3", "a.yaml:1"]),
    "twice with a dash": ("kl_coef: 1\nkl:\n  kl-coef: 0.5\n", ["kl_coef", "a.yaml:3", "a.yaml:1"]),
    "out of range": ("gamma: 2\n", ["2", "a.yaml:1", "0"]),
    "a wrong type": ("batch_size: [1, 2]\n", ["batch_size", "1", "2", "a.yaml:1"]),
    "a Python tag": ("seed: !!python/object/apply:os.getpid []\n", ["a.yaml:1"]),
    "a tag of a block": ("seed: 3\nkl: !x\n  kl_coef: 0.1\n", ["a.yaml:2"]),
    "a block for a text": ("columns: {prompt: {question: a}}\n", ["question", "a.yaml:1"]),
    "an alias": ("keep: &a 1\nseed: *a\n", ["a.yaml:2"]),
    "an alias that contains itself": ("stop: &a [*a]\n", ["a.yaml:1"]),
    "two documents": ("seed: 1\n---\nkeep: 1\n", ["a.yaml:2"]),
    "a control character": ("seed: \x07\n", ["a.yaml"]),
    "deep": ("a:\n" + "".join(" " * depth + "b:\n" for depth in range(1, 400)), ["a.yaml:21"]),
    "unknown recipe": ("recipe: demmo\n", ["'demmo'", "a.yaml:1", "demo"]),
}


@pytest.mark.parametrize("what", BAD_YAML)
def test_errors_in_yaml(what, tmp_path, user_error):
    text, parts = BAD_YAML[what]
    (tmp_path / "a.yaml").write_text(text)
    with user_error(*parts):
        parse_cli(["--config", str(tmp_path / "a.yaml")])


@pytest.mark.parametrize("line", ["batch_size: 1:30", "batch_size: 0x10", "gamma: 2001-01-01", "gamma: .inf"])
def test_yaml_numbers_are_read_as_the_text_of_a_flag(line, tmp_path, user_error):
    """YAML 1.1 would read 90, 16, a date and infinity."""
    (tmp_path / "a.yaml").write_text(line)
    with user_error(*line.split(": ", 1), "a.yaml:1"):
        parse_cli(["--config", str(tmp_path / "a.yaml")])


@pytest.mark.parametrize("line", ["rm_model: off", "output: yes", "stop: no", "gamma: on", "K: no"])
def test_a_yaml_truth_value_is_refused_for_other_settings(line, tmp_path, user_error):
    (tmp_path / "a.yaml").write_text(line)
    with user_error(line.split(":")[0], "a.yaml:1"):
        parse_cli(["--config", str(tmp_path / "a.yaml")])


def test_yaml_texts_stay_texts(tmp_path):
    (tmp_path / "a.yaml").write_text("stop: ['no', 1.50, 'null']\nmax_prompts: 010\noutput: 12_0\npacked: off\nK: ~\n")
    config = parse_cli(["--config", str(tmp_path / "a.yaml")])
    assert config.sampling.stop == ("no", "1.50", "null") and config.data.max_prompts == 10
    assert config.run.output == "12_0" and config.speed.packed is False and config.batch.K is None


@pytest.mark.parametrize("name", ["seed", "seeds", "gamma", "target_kl", "check", "packed", "output"])
def test_a_number_of_5000_digits_is_refused_in_python(name, user_error):
    with user_error(f"make_config({name}=)"):
        make_config(**{name: 10**5000})


def set_in(way: str, folder, name: str, value: str) -> Config:
    """Return the configuration in which a setting has this value, over a recipe that sets it to another one."""
    lines = {"kind": "recipe", "reward_func": "length_penalty", name: VALUES_OF_RECIPES[name]}
    (folder / "r.yaml").write_text("".join(f"{key}: {text}\n" for key, text in lines.items()))
    (folder / "a.yaml").write_text(f"{name}: {value!r}\n")
    recipe = str(folder / "r.yaml")
    assert getattr(getattr(make_config(recipe), settings_of(Config)[name].group), name)
    if way == "Python":
        return make_config(recipe, **{name: None if value == "none" else value})
    words = {"flag": [f"--{name}", value], "file": ["--config", str(folder / "a.yaml")]}
    return parse_cli(["--recipe", recipe, *words[way]])


VALUES_OF_RECIPES = {
    "reward_func": "[length_penalty, word_penalty]", "eval_func": "[exact_match]", "columns": "{prompt: question}",
    "reward_weights": "[1, 2]", "stop": '["\\n"]', "report_to": "[wandb]", "rm_model": "./judge", "eval_text": "a.txt",
    "eval_dataset": "a.jsonl", "few_shot": "a.jsonl", "kl_target": "3/sequence", "write_parts": "./parts",
    "teacher": "./teacher",
}  # fmt: skip


def test_the_lists_and_paths_that_a_recipe_can_set_are_known():
    unset = {name for name, s in settings_of(Config).items() if s.can_be_unset and (s.is_list or s.kind is PathName)}
    assert unset - VALUES_OF_RECIPES.keys() == {"check", "seeds"}  # of one command


@pytest.mark.parametrize("way", ["flag", "file", "Python"])
@pytest.mark.parametrize("name", VALUES_OF_RECIPES)
def test_none_unsets_what_a_recipe_sets_and_an_empty_text_is_refused(name, way, tmp_path, user_error):
    """An empty text is an unset variable of the shell."""
    config = set_in(way, tmp_path, name, "none")
    unset = () if name in ("reward_func", "eval_func", "columns") else None
    assert getattr(getattr(config, settings_of(Config)[name].group), name) == unset
    place = {"flag": f": --{name}. ", "file": "a.yaml:1", "Python": f"make_config({name}=)"}[way]
    with user_error(f"{name} is ''", place):
        set_in(way, tmp_path, name, "")


def test_errors_of_every_kind_are_reported_together(tmp_path):
    (tmp_path / "a.yaml").write_text("gama: 1\nlam: 7\n")
    with pytest.raises(UserError) as caught:
        file = ["--config", str(tmp_path / "a.yaml")]
        parse_cli(["--batch-sise", "1", "--loss-type", "x", "--learning-rate", "abc", *file])
    assert len(caught.value.problems) == 5
    with pytest.raises(UserError) as caught:
        parse_cli(["--learning-rate", "abc", "--config", str(tmp_path / "none.yaml")])
    assert len(caught.value.problems) == 2


def test_a_flag_without_a_value_does_not_hide_other_errors():
    with pytest.raises(UserError) as caught:
        parse_cli(["--gamma", "--no-use-lora=1", "--lam", "x", "--batch-sise", "1"])
    found = {(problem.what.split()[0], problem.place) for problem in caught.value.problems}
    place = "command line"
    assert found == {("--gamma", place), ("--no-use-lora", place), ("unknown", place), ("lam", "--lam")}


@pytest.mark.parametrize("value", ["-1", "-.5", "- one", "-"])
def test_a_value_may_begin_with_a_dash(value):
    config = parse_cli(["--stop", value, "--seeds", "1", "2"])
    assert (config.sampling.stop, config.run.seeds) == ((value,), (1, 2))


def test_words_after_two_dashes_are_run_folders():
    assert parse_comparison_cli(["one", "--", "two"]).comparison.runs == ("one", "two")


def test_run_folders_may_be_between_flags():
    config = parse_comparison_cli("--trust-reward-code one two --seed 3 three".split())
    assert config.comparison.runs == ("one", "two", "three")
    assert config.measure.trust_reward_code and config.measure.seed == 3
    assert parse_comparison_cli("one --no-trust-reward-code two".split()).comparison.runs == ("one", "two")


def test_errors_are_printed_on_stderr_with_exit_status_2(capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: parse_cli(["--gama", "1"]))
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.err == "error: unknown flag --gama: command line. Did you mean --gamma?\n"
    assert printed.out == ""


@pytest.mark.parametrize("config_class", [Config, RewardModelConfig])
def test_each_name_belongs_to_one_setting(config_class):
    settings = settings_of(config_class)
    names = [n for k in settings.values() for n in (k.name, *k.aliases)]
    assert len(names) == len(set(names)) == len(name_table(settings))
