"""Tests the shipped recipes, custom recipes (`--recipe FILE`), and the settings files in configs/ and the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import train_ppo
from rlhf.algorithms.table import ALGORITHMS
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import make_config, parse_cli
from rlhf.settings.fields import settings_of, to_dict
from rlhf.settings.next_commands import reward_model_line
from rlhf.settings.recipes import DEFAULT_RECIPE, FOLDER, Published, find_recipe, published_values, shipped_recipes
from rlhf.settings.reward_model import RewardModelConfig, parse_reward_cli
from rlhf.settings.training import Config
from rlhf.settings.translate import translate
from rlhf.utils.errors import UserError
from tests.conftest import algorithms_of
from tests.systems import words_of

ROOT = Path(__file__).resolve().parents[2]
CUSTOM = """
kind: recipe  # custom
sampling:
  temperature: 0.9
learning_rate: 1e-4
algorithms:
  ppo: {gamma: 0.5}
  grpo:
    K: 3
    learning_rate: 2e-4
reward_model_training:
  rm_epochs: 2
  temperature: 0.8
"""


@pytest.fixture
def custom_recipe(tmp_path) -> str:
    (tmp_path / "mine.yaml").write_text(CUSTOM)
    return str(tmp_path / "mine.yaml")


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_is_valid_for_every_command(name):
    """All names in it are settings, also those for other algorithms, and its values are consistent."""
    recipe = find_recipe(name)
    for algorithm in algorithms_of(name):
        assert parse_cli(["--recipe", name], algorithm).recipe == name
        for layer in recipe.layers(algorithm):
            assert translate(layer, settings_of(Config))[1] == []
    assert translate(recipe.reward_model_training, settings_of(RewardModelConfig))[1] == []
    assert parse_reward_cli(["--recipe", name]).recipe == name


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_algorithms_that_use_no_teacher_refuse_its_recipe(algorithm, user_error):
    with user_error("--rm-model none", "distill.yaml", "teacher") as caught:
        parse_cli(["--recipe", "distill"], algorithm)
    assert len(caught.value.problems) == 1


def test_the_shipped_recipes():
    assert shipped_recipes() == (
        "smollm2-orca",
        "demo",
        "demo-checker",
        "demo-game",
        "distill",
        "phased-kl",
        "qwen3-gsm8k",
        "qwen3-tldr",
        "rank1-voice",
        "smollm2-sums",
    )
    for name in shipped_recipes():
        text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
        assert text.startswith("kind: recipe\n# "), f"{name} must start with its source"


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if name != DEFAULT_RECIPE])
def test_shipped_recipe_sets_what_its_source_does_not_define(name):
    """So changed defaults do not change the recipe."""
    required = {"max_new_tokens", "prompt_length", "minibatches", "save_every", "temperature", "ppo_epochs"}
    assert required <= find_recipe(name).training.keys()


def test_default_recipe_equals_the_declared_defaults():
    recipe = find_recipe(DEFAULT_RECIPE)
    assert (recipe.training, recipe.algorithms, recipe.reward_model_training) == ({}, {}, {})
    declared = {name: s.default for name, s in settings_of(Config).items()}
    config = make_config()
    assert {n: getattr(getattr(config, s.group), n) for n, s in settings_of(Config).items()} == declared


def test_custom_recipe(custom_recipe):
    ppo = parse_cli(["--recipe", custom_recipe])
    grpo = parse_cli(["--recipe", custom_recipe], "grpo")
    assert (ppo.sampling.temperature, ppo.optimizer.learning_rate, ppo.critic.gamma) == (0.9, 1e-4, 0.5)
    assert (grpo.optimizer.learning_rate, grpo.batch.K, grpo.recipe) == (2e-4, 3, custom_recipe)
    assert parse_cli(["--recipe", custom_recipe], "rloo").optimizer.learning_rate == 1e-4
    assert parse_cli(["--recipe", custom_recipe, "--learning-rate", "1e-3"]).optimizer.learning_rate == 1e-3
    assert make_config(custom_recipe, "grpo") == grpo
    made = parse_reward_cli(["--recipe", custom_recipe])
    assert (made.training.rm_epochs, made.sampling.temperature) == (2, 0.8)


def test_a_run_resumes_without_the_file_of_its_recipe(custom_recipe, run_flags, tmp_path, capsys):
    train_ppo.main(run_flags("--recipe", custom_recipe, "--num-iterations", 2))
    Path(custom_recipe).unlink()
    words = ["--resume", "--resume-anyway", "--num-iterations", "3", "--output", str(tmp_path / "run")]
    train_ppo.main(words)
    run = RunRecord.read(tmp_path / "run")
    assert (run.spent.updates, run.recipe, run.settings["sampling"]["temperature"]) == (3, custom_recipe, 0.9)
    resumed = parse_cli(words)
    assert resumed.critic.gamma == 0.5


BAD = {  # text -> the line, and names in the error
    "no kind": ("gamma: 1\n", "", ["kind: recipe", "--config"]),
    "another kind": ("kind: receipt\n", "", ["kind: recipe"]),
    "an unknown setting": ("kind: recipe\nkl:\n  gama: 1\n", ":3", ["gama", "gamma"]),
    "an unknown algorithm": ("kind: recipe\nalgorithms:\n  dpo: {gamma: 1}\n", ":3", ["dpo", "ppo, grpo"]),
    "settings of an algorithm on one line": ("kind: recipe\nalgorithms:\n  ppo: 3\n", ":3", ["ppo"]),
    "algorithms without settings": ("kind: recipe\nalgorithms: ppo\n", ":2", ["algorithms"]),
    "out of range": ("kind: recipe\nalgorithms:\n  ppo: {gamma: 2}\n", ":3", ["gamma", "2"]),
    "a name that is not text": ("kind: recipe\n? [a, b]\n: 3\n", ":2:3", ["name"]),
    "algorithms twice": (
        "kind: recipe\nalgorithms:\n  ppo: {gamma: 0.5}\nalgorithms:\n  grpo: {K: 4}\n",
        ":4 and <file>:2",
        ["algorithms"],
    ),
    "an algorithm twice": (
        "kind: recipe\nalgorithms:\n  ppo: {gamma: 0.5}\n  ppo: {lam: 0.4}\n",
        ":4 and <file>:3",
        ["ppo"],
    ),
    "a name twice": ("kind: recipe\ngamma: 1\ncritic:\n  gamma: 0\n", ":4 and <file>:2", ["gamma"]),
    "published values without a source": (
        "kind: recipe\npublished:\n  {metric: eval/right, start: 0.1, end: 0.2}\n",
        ":2",
        ["published", "source"],
    ),
    "a published value that is not a number": (
        "kind: recipe\npublished: {metric: a, start: yes, end: 1, source: b}\n",
        ":2",
        ["published", "start"],
    ),
    "a published value that is a list": (
        "kind: recipe\npublished: {metric: [a], start: 0, end: 1, source: b}\n",
        ":2",
        ["published", "metric"],
    ),
    "an unknown published value": (
        "kind: recipe\npublished: {metric: a, start: 0, end: 1, source: b, middle: 0.5}\n",
        ":2",
        ["published"],
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_an_error_in_a_recipe_has_its_place(what, tmp_path, user_error):
    text, lines, parts = BAD[what]
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with user_error(*parts) as caught:
        parse_cli(["--recipe", str(file)])
    (problem,) = caught.value.problems
    assert problem.place == f"{file}{lines}".replace("<file>", str(file))


def test_all_errors_of_a_recipe_and_the_flags_are_reported_together(tmp_path):
    (tmp_path / "bad.yaml").write_text("kind: recipe\ngama: 1\ngamma: 2\nalgorithms:\n  ppo:\n    lam: x\n")
    with pytest.raises(UserError) as caught:
        parse_cli(["--recipe", str(tmp_path / "bad.yaml"), "--batch-size", "0"])
    assert len(caught.value.problems) == 4
    (tmp_path / "bad.yaml").write_text("kind: recipe\nalgorithms: {dpo: {}, kto: {}}\n")
    for recipe, count in ((str(tmp_path / "bad.yaml"), 4), ("demmo", 3)):
        with pytest.raises(UserError) as caught:
            parse_cli(["--recipe", recipe, "--batch-size", "0", "--gama", "1"])
        assert len(caught.value.problems) == count
    with pytest.raises(UserError) as caught:
        parse_cli(["--recipe", "demmo", "--help"])
    assert len(caught.value.problems) == 1


def test_missing_recipe(tmp_path, user_error):
    with user_error("none.yaml", "--recipe"):
        parse_cli(["--recipe", str(tmp_path / "none.yaml")])
    with user_error("none.yaml", "--recipe"):
        parse_cli(["--recipe", "none.yaml"])
    with user_error("'demi'", "make_config"):
        make_config("demi")
    with user_error("x.yaml"):
        parse_cli(["--recipe", "~nobody9/x.yaml"])
    with user_error("make_config"):
        make_config(None)
    for value in ("5", "null", "[demo]"):
        (tmp_path / "a.yaml").write_text(f"recipe: {value}\n")
        with user_error("a.yaml:1"):
            parse_cli(["--config", str(tmp_path / "a.yaml")])


def test_path_of_a_recipe_is_stored_normalized(custom_recipe, monkeypatch):
    monkeypatch.chdir(Path(custom_recipe).parent)
    assert parse_cli(["--recipe", "./mine.yaml"]).recipe == "mine.yaml" == make_config("./mine.yaml").recipe


def test_published_values_of_a_recipe(tmp_path):
    (tmp_path / "r.yaml").write_text("kind: recipe\npublished: {metric: eval/right, start: 0.1, end: 1, source: a}\n")
    assert published_values(str(tmp_path / "r.yaml")) == Published("eval/right", 0.1, 1, "a")
    assert published_values("demo") is None
    assert published_values(str(tmp_path / "deleted.yaml")) is None, "the plot of a run needs no recipe file"


def test_settings_of_qwen3_gsm8k_are_those_of_its_source():
    """train.sh of josancamon19/rl-scaling-laws: 4 epochs of 7,473 // 512 updates, 512 x 3 completions in one step."""
    config = parse_cli(["--recipe", "qwen3-gsm8k"], "grpo")
    assert config.run.num_iterations == 4 * (7_473 // 512) == 56
    assert (config.episodes_per_update, config.batch.minibatches, config.batch.ppo_epochs) == (1_536, 1, 1)
    assert (config.sampling.max_new_tokens, config.data.prompt_length) == (512, 512)
    assert (config.kl.kl_placement, config.kl.kl_coef, config.kl.steered) == ("loss", 0.001, False)
    assert parse_cli(["--recipe", "qwen3-gsm8k"], "ppo").batch.batch_size == 1_536, "equally many completions"


def test_recipe_can_switch_off_calibration(tmp_path):
    (tmp_path / "r.yaml").write_text(
        "kind: recipe\nactor_model: ./start\nreward_model_training: {base_model: ./start, actor_model: none}\n"
    )
    config = parse_cli(["--recipe", str(tmp_path / "r.yaml")])
    made = parse_reward_cli(words_of(reward_model_line(config))[3:])
    assert (made.training.base_model, made.calibration.actor_model) == ("./start", None)


@pytest.mark.parametrize("line", ["kind: recipe", "algorithms: {}", "published: 3", "reward_model_training: {}"])
def test_a_recipe_is_not_a_settings_file(line, tmp_path, user_error):
    (tmp_path / "mine.yaml").write_text(f"gamma: 1\n{line}\n")
    with user_error("mine.yaml:2", line.split(":")[0]):
        parse_cli(["--config", str(tmp_path / "mine.yaml")])


# --- configs/ and docs/settings.md -----------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_settings_file_in_configs_works_and_changes_settings(file, algorithm):
    config = parse_cli(["--config", str(file)], algorithm)
    assert to_dict(config) != to_dict(parse_cli([], algorithm))
    parse_cli(["--recipe", "demo", "--config", str(file)], algorithm)


def block_of_docs(language: str, word: str) -> str:
    """Return the only block of `language` in docs/settings.md that contains `word`."""
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    (block,) = [b for b in re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL) if word in b]
    return block


def test_the_recipe_in_the_docs_works(tmp_path):
    (tmp_path / "docs.yaml").write_text(block_of_docs("yaml", "kind: recipe"))
    recipe = str(tmp_path / "docs.yaml")
    ppo = parse_cli(["--recipe", recipe])
    grpo = parse_cli(["--recipe", recipe], "grpo")
    assert (ppo.critic.gamma, grpo.batch.K, ppo.model.actor_model) == (0.99, 4, "./my_start_model")
    assert parse_reward_cli(["--recipe", recipe]).training.base_model == "./my_start_model"


def test_the_settings_file_in_the_docs_works(tmp_path):
    (tmp_path / "docs.yaml").write_text(block_of_docs("yaml", "recipe: smollm2-orca"))
    config = parse_cli(["--config", str(tmp_path / "docs.yaml")])
    assert (len(config.kl.kl_target), config.kl.kl_horizon, config.optimizer.learning_rate) == (3, 80, 1e-5)


def test_the_edited_config_py_in_the_docs_works(tmp_path):
    (tmp_path / "config.py").write_text(block_of_docs("python", "learning_rate"))
    config = parse_cli([], user_file=tmp_path / "config.py")
    assert (config.optimizer.learning_rate, config.model.lora_dropout) == (1e-5, 0.05)
