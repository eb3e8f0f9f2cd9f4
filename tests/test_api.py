"""Tests the Python API: trainers from a config, held-out prompts, custom reward functions and callbacks."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from rlhf import config as config_module
from rlhf.algorithms.table import ALGORITHMS
from rlhf.api import check, make_trainer
from rlhf.callbacks.base import Callback
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import make_config, parse_cli
from rlhf.rewards.call import BadScore
from rlhf.run import python_run
from rlhf.run.python_run import OF_A_FOLDER, OF_THE_SCRIPTS
from rlhf.utils.console import SHOW_MESSAGES, quiet_in_program
from rlhf.utils.errors import RunError, UserError
from tests.conftest import BY_TIER
from tests.documents import ROOT, python_block


def words(completions):
    return [float(len(text.split())) for text in completions]


class LearnedSum(torch.nn.Module):
    def forward(self, input_ids, attention_mask):
        return (input_ids * attention_mask).sum(1) / 1000


@pytest.fixture
def config(start_model, reward_folder, tmp_path):
    def make(algorithm="ppo", **settings):
        tiny = {"actor_model": str(start_model), "rm_model": str(reward_folder), "output": str(tmp_path / "run"),
                "batch_size": 2, "max_new_tokens": 6, "num_iterations": 2, "ppo_epochs": 1}  # fmt: skip
        return make_config(
            algorithm=algorithm, **{**tiny, **({"K": 2} if ALGORITHMS[algorithm].group_size > 1 else {}), **settings}
        )

    return make


def test_a_file_that_a_program_changes_between_two_trainers_is_read_again(config, tmp_path):
    file = tmp_path / "rows.jsonl"
    lengths = []
    for count in (30, 31):
        file.write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(count)), encoding="utf-8")
        trainer = make_trainer(config(prompts=str(file)), None)
        lengths.append(len(trainer.train_prompts) + len(trainer.evaluation_prompts))
    assert lengths == [30, 31]


@pytest.mark.parametrize("algorithm", BY_TIER)
def test_trainer_from_a_config_and_a_list_of_prompts(config, algorithm, tmp_path):
    epochs = []
    trainer = make_trainer(
        config(algorithm, num_iterations=None, epochs=2),
        prompts=["What is a cat?", [{"role": "user", "content": "And a dog?"}]],
        rewards=[lambda completions, **_: [float(len(c)) for c in completions]],
        callbacks=[lambda epoch, metrics: epochs.append((epoch, metrics["rewards/mean"]))],
        evaluation_prompts=["What is a fox?"],
    )
    final = trainer.train()
    assert [e for e, _ in epochs] == [1, 2] and final["rewards/mean"] == epochs[-1][1]
    assert {"eval/score", "kl_divergence", "policy/loss"} <= set(final)
    trainer.save_model(tmp_path / "saved")
    trainer.load_model(tmp_path / "saved")
    assert trainer.evaluate()["eval/score"] == pytest.approx(final["eval/score"])
    assert not any(Path(trainer.config.run.output).iterdir()), "no files are written without a request"


def test_kl_controller_changes_beta_in_a_trainer_from_python(config):
    trainer = make_trainer(config(kl_coef=0.5, kl_horizon=4, kl_target="1/sequence"), prompts=["a cat?", "a dog?"],
                           rewards=[lambda completions, **_: [0.0] * len(completions)])  # fmt: skip
    trainer.train()
    assert trainer.kl_coef == pytest.approx(0.5 * (1 - 0.2 * 2 / 4) ** 2, rel=0.05), "the KL is far below its target"


def test_kl_coef_set_by_a_callback_is_used_in_the_next_update(config):
    class SetsKlCoef:
        def __init__(self, trainer=None):
            self.betas = []

        def on_train_begin(self, trainer):
            self.trainer = trainer

        def on_update_end(self, update, metrics):
            self.betas.append(metrics["kl_coef"])
            self.trainer.set_kl_coef(0.77)

    for schedule in ("fixed", "adaptive"):
        callback = SetsKlCoef()
        make_trainer(config(kl_coef=0.1, kl_schedule=schedule), ["a cat?"], [words], callbacks=[callback]).train()
        assert callback.betas == [0.1, 0.77]


def test_a_beta_that_was_set_once_lasts(config, tmp_path):
    class SetsItOnce(Callback):
        def __init__(self):
            self.betas = []

        def on_train_begin(self, trainer):
            self.trainer = trainer

        def on_update_end(self, update, metrics):
            self.betas.append(metrics["kl_coef"])
            if update == 1:
                self.trainer.set_kl_coef(0.77)

    def betas(schedule: str, **folder) -> list[float]:
        callback = SetsItOnce()
        settings = config(kl_coef=0.1, kl_schedule=schedule, num_iterations=3)
        make_trainer(settings, ["a cat?"], [words], callbacks=[callback], **folder).train()
        return callback.betas

    assert betas("fixed") == betas("fixed", output=tmp_path / "fixed") == [0.1, 0.77, 0.77]
    adaptive = betas("adaptive")
    assert adaptive == betas("adaptive", output=tmp_path / "adaptive")
    assert adaptive[:2] == [0.1, 0.77] and 0.77 / 2 <= adaptive[2] < 0.77, "the controller continues from it"


def test_a_callback_can_end_the_run(config):
    class Ends(Callback):
        def on_train_begin(self, trainer):
            self.trainer = trainer

        def on_update_end(self, update, metrics):
            if update == 2:
                self.trainer.request_stop()

    trainer = make_trainer(config(num_iterations=5), ["a cat?"], [words], callbacks=[Ends()])
    trainer.train()
    assert trainer.host.state.global_step == trainer.updates == 2
    assert [evaluation.update for evaluation in trainer.evaluations] == [0, 2], "the last update is evaluated"


def test_the_functions_of_the_package_import_no_torch():
    imports = "import sys; from rlhf import check, make_config, make_trainer; make_config()"
    subprocess.run([sys.executable, "-c", f"{imports}; assert 'torch' not in sys.modules"], cwd=ROOT, check=True)


def test_custom_rewards_have_weights(config, user_error):
    trainer = make_trainer(config(), ["a cat?"], rewards=[words, LearnedSum()], reward_weights=[1, 0.2])
    assert str(trainer.rewards) == "1 x words + 0.2 x LearnedSum"
    trainer.update_step(1)
    with user_error(1, 2):
        make_trainer(config(), ["a cat?"], rewards=[words, words], reward_weights=[1])
    with user_error("rewards="):
        make_trainer(config(), ["a cat?"], rewards=[])


def test_a_tenth_of_the_prompts_is_held_out(config, user_error):
    prompts = [f"What is number {i}?" for i in range(200)]
    trainer = make_trainer(config(allow_weak_reward_model=True), prompts)
    assert 8 <= len(trainer.evaluation_prompts) <= 35
    assert len(trainer.evaluation_prompts) + len(trainer.train_prompts) == 200
    separate = make_trainer(config(), ["a cat?"], evaluation_prompts=["a dog?"])
    with user_error("evaluate()"):
        separate.evaluate([])
    assert [p.example.question for p in separate.evaluation_prompts] == ["a dog?"]


def test_without_rewards_argument_the_configured_rewards_are_used(config):
    trainer = make_trainer(config(reward_func=["length_penalty"], reward_weights=[1, 0.5]), ["a cat?"])
    assert str(trainer.rewards) == "1 x reward_model + 0.5 x length_penalty"


def test_rewards_are_functions_modules_or_names(config, user_error):
    trainer = make_trainer(config(), ["a cat?"], "length_penalty", eval_functions=["word_penalty", words])
    (watched,) = trainer.evaluator.judges
    assert str(trainer.rewards) == "1 x length_penalty" and watched.names == ["word_penalty", "words"]
    with user_error("rewards length_penalti", "length_penalty"):
        make_trainer(config(), ["a cat?"], [words, "length_penalti"])
    for wrong in (0.5, [0.5]):
        with user_error("rewards, 0.5"):
            make_trainer(config(), ["a cat?"], wrong)
    with user_error("reward_weights=", "make_config(reward_weights="):
        make_trainer(config(), ["a cat?"], reward_weights=[0.5])


@pytest.mark.parametrize(
    "settings",
    [
        {"dry_run": True},
        {"write_parts": "parts"},
        {"seeds": [1, 2]},
        {"seeds": [1, 2], "dry_run": True, "memory": "8GB"},
    ],
)
def test_settings_that_only_the_scripts_use_are_refused(config, settings, user_error):
    given = config(**settings)
    for use in (make_trainer, check):
        with user_error() as refused:
            use(given, ["a cat?"], [words])
        assert [line.split(":")[0].split()[-1] for line in map(str, refused.value.problems)] == [
            name for name in OF_THE_SCRIPTS if name in settings
        ]


def test_check_is_refused_by_a_trainer(config, user_error):
    with user_error("make_config(check=)", "check()"):
        make_trainer(config(check=True), ["a cat?"], [words])


def test_the_removed_function_names_the_new_one():
    import rlhf

    with pytest.raises(AttributeError, match=r"rlhf\.check"):
        rlhf.scan  # noqa: B018


@pytest.mark.parametrize(
    "settings",
    [{"resume": True}, {"overwrite": True}, {"record_tokens": True}, {"push_to_hub": "me/model"},
     {"use_lora": True, "merge_lora": True}, {"rollback_on_kl": True, "save_every": 1, "keep": 5}],
)  # fmt: skip
def test_settings_about_files_are_refused_without_a_folder(config, settings, user_error):
    given = config(**settings)
    with user_error("output=") as refused:
        make_trainer(given, ["a cat?"], [words])
    assert [name for name in OF_A_FOLDER if f"make_config({name}=)" in str(refused.value)] == [
        name for name in OF_A_FOLDER if name in settings
    ]


# --- what a flag refuses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [[math.nan], [math.inf], [-math.inf], ["much"], [True], {1.0}])
@pytest.mark.parametrize("output", [None, "run"])
def test_weights_that_the_flag_refuses_are_refused(config, tmp_path, weights, output, user_error):
    for use in (make_trainer, check):
        more = {"output": tmp_path / output} if output and use is make_trainer else {}
        with user_error("reward_weights"):
            use(config(), ["a cat?"], [words], reward_weights=weights, **more)
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize(("score", "weight"), [(1.0, 1e10), (1e9, 2.0), (-1e5, 1e300)])
def test_weighted_score_that_is_too_large_ends_an_evaluation_and_skips_an_update(config, score, weight, user_error):
    trainer = make_trainer(config(), ["a cat?"], [lambda completions: [score] * len(completions)], [weight])
    with user_error("<lambda>", "1e+09", kind=BadScore):
        trainer.evaluate()
    assert trainer.update_step(1) == {"updates/skipped": 1.0}


@pytest.mark.parametrize("kind", [set, frozenset, lambda scores: dict.fromkeys(scores).keys(), dict.fromkeys])
def test_scores_without_an_order_are_refused(config, kind, user_error):
    def unordered(completions):
        return kind(float(i) for i in range(len(completions)))

    trainer = make_trainer(config(), ["a cat?", "a dog?"], [unordered])
    with user_error("unordered", 2, kind=RunError):
        trainer.evaluate()


@pytest.mark.parametrize("argument", ["rewards", "eval_functions"])
@pytest.mark.parametrize("functions", [{words}, {"words": words}, frozenset([words])])
def test_functions_without_an_order_are_refused(config, argument, functions, user_error):
    with user_error(argument):
        make_trainer(config(), ["a cat?"], **{"rewards": [words], argument: functions})
    if argument == "rewards":
        with user_error("rewards"):
            make_trainer(config(), ["a cat?"], [])


class Watch:
    def on_update_end(self, update, metrics):
        pass


@pytest.mark.parametrize(
    ("callbacks", "parts"),
    [
        ([Watch], ("callbacks, Watch.", "Watch()")),
        ([Callback], ("callbacks, Callback.", "Callback()")),
        ([words], ("(epoch, metrics): callbacks, <function words",)),
        ([object()], ("callbacks, <object",)),
        (Watch(), ("callbacks, <", "Watch")),
        ({Watch()}, ("callbacks, {<",)),
        (None, ("callbacks, None",)),
    ],
)
def test_callbacks_that_cannot_be_called_are_refused_before_models_are_loaded(
    config, monkeypatch, callbacks, parts, user_error
):
    monkeypatch.setattr(python_run, "load_inputs", lambda *_: pytest.fail("loaded"))
    with user_error(*parts):
        make_trainer(config(), ["a cat?"], [words], callbacks=callbacks)


def test_callback_without_methods_of_its_own_is_accepted(config):
    make_trainer(config(num_iterations=1), ["a cat?"], [words], callbacks=(Callback(), print)).train()


@pytest.mark.parametrize("none", ["none", None])
def test_reward_model_may_be_unset_if_rewards_are_given(config, none, user_error):
    unset = config(rm_model=none)
    assert str(make_trainer(unset, ["a cat?"], [words]).rewards) == "1 x words"
    assert check(config(rm_model=none, check="reward"), ["a cat?"], [words]).problems == []
    for use in (make_trainer, check):
        with user_error("rewards=", "make_trainer()"):
            use(unset, ["a cat?"])
    with user_error("--rm-model none"):
        parse_cli(["--rm-model", "none"])
    with user_error("--reward-weights", 2, 0):
        config(rm_model=none, reward_weights=[1, 2])


# --- messages of libraries -------------------------------------------------------------------------------------------

PROGRAM = """
import json, logging, threading, warnings
shown = []
warnings.showwarning = own = lambda message, *_, **__: shown.append(str(message))
warnings.filterwarnings("always", message="also this")
logging.getLogger("peft").setLevel(logging.INFO)
before = logging.getLogger().level, threading.excepthook
import rlhf.api
from huggingface_hub.utils import are_progress_bars_disabled
assert (logging.getLogger().level, threading.excepthook) == before and warnings.showwarning is own
def warn(module, text):
    exec(f"import warnings; warnings.warn({text!r}, FutureWarning)", {"__name__": module})
for module in ("trl.trainer", "transformers", "torch.nn", "rlhf.trainer.loop"):
    warn(module, "of a library")
warn("trl.trainer", "also this")
warn("torch_of_mine", "mine")
warn("__main__", "of the program")
levels = {name: logging.getLogger(name).level for name in ("peft", "trl", "transformers")}
print(json.dumps({"shown": shown, "levels": levels, "no_bars": are_progress_bars_disabled()}))
"""
VARIABLES = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TRANSFORMERS_VERBOSITY")


def test_importing_the_api_silences_libraries_and_nothing_of_the_program():
    environment = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, SHOW_MESSAGES)}
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert ended.returncode == 0 and ended.stderr == "", ended.stderr
    found = json.loads(ended.stdout)
    assert found["shown"] == ["also this", "mine", "of the program"] and found["no_bars"]
    assert found["levels"] == {"peft": logging.INFO, "trl": logging.ERROR, "transformers": logging.ERROR}


@pytest.mark.parametrize(("value", "shown"), [("1", True), ("0", False), (None, False)])
def test_a_variable_keeps_the_messages_of_libraries(monkeypatch, value, shown):
    monkeypatch.delenv(SHOW_MESSAGES, raising=False)
    monkeypatch.setattr(sys, "warnoptions", [])
    if value is not None:
        monkeypatch.setenv(SHOW_MESSAGES, value)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    logger = logging.getLogger("trl")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        quiet_in_program()
        assert (warnings.filters == []) == shown
    assert (logger.level == logging.NOTSET) == shown
    assert all((name not in os.environ) == shown for name in VARIABLES)


@pytest.mark.parametrize("given", [None, {"batch_size": 2}, "demo"])
def test_what_is_not_a_configuration_is_refused(given, user_error):
    for use in (make_trainer, check):
        with user_error("config", "make_config()"):
            use(given, ["a cat?"], [words])


def test_without_a_folder_the_disk_is_not_checked(config, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: pytest.fail("the disk was checked"))
    make_trainer(config(), ["a cat?"], [words])


def test_too_few_prompts_for_a_batch_are_a_warning(config, capsys):
    for prompts, batch_size, warned in ((["a cat?"], 2, True), (["a cat?", "a dog?"], 2, False)):
        make_trainer(config(batch_size=batch_size), prompts, [words])
        lines = [line for line in capsys.readouterr().out.splitlines() if "batches of 2" in line]
        assert len(lines) == warned


def test_metrics_have_the_names_of_the_token_level_ppo_too(config):
    epochs = []
    trainer = make_trainer(
        config(), ["a cat?", "a dog?"], [words], callbacks=[lambda _, metrics: epochs.append(metrics)]
    )
    for metrics in (trainer.train(), *epochs):
        assert metrics["avg_reward"] == metrics["rewards/mean"] and metrics["policy_loss"] == metrics["policy/loss"]
        assert metrics["kl_div"] == metrics["kl_divergence"] and metrics["value_loss"] == metrics["value/loss"]
        assert "avg_reward" in metrics and metrics.get("avg_reward") == metrics["avg_reward"]
        assert not {"avg_reward", "policy_loss", "value_loss", "kl_div"} & set(metrics), "a logger writes each once"
        assert "entropy" not in metrics and metrics.get("entropy") is None and metrics.get("entropy", 1.0) == 1.0
    assert len(epochs) == 2
    group = make_trainer(config("grpo"), ["a cat?", "a dog?"], [words]).train()
    assert "value_loss" not in group
    with pytest.raises(KeyError, match="value_loss"):
        group["value_loss"]


def test_progress_is_printed_and_can_be_turned_off(config, start_model, tmp_path, capsys):
    tiny = {"actor_model": str(start_model), "output": str(tmp_path / "run"), "max_new_tokens": 6}
    tiny |= {"per_device_train_batch_size": 1, "num_iterations": 2, "ppo_epochs": 1}
    make_trainer(make_config(**tiny), ["a cat?"], [words]).train()
    printed = capsys.readouterr().out
    assert "PPO: 2 updates x 1 = 2 episodes" in printed
    assert "update 2/2 | score" in printed and "evaluation after update 2: score" in printed
    quiet = make_trainer(config(), ["a cat?", "a dog?"], [words], evaluation_prompts=["a fox?"], progress=False)
    quiet.train()
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.startswith("warning: ") for line in lines), "the tiny model never ends a completion"


@pytest.mark.parametrize("progress", [True, False])
def test_beta_is_doubled_if_the_kl_is_far_too_high(config, capsys, progress):
    settings = {"kl_target": "0.000001/sequence", "kl_coef": 0.5, "kl_horizon": 10**9, "learning_rate": 0.1}
    settings |= {"num_iterations": 4}
    trainer = make_trainer(config(**settings), ["a cat?", "a dog?"], [words], progress=progress)
    trainer.train()
    assert "warning: KL " in capsys.readouterr().out
    assert trainer.kl_coef >= 1.0


def test_an_error_is_one_line_in_a_notebook():
    assert UserError("a: b. c")._render_traceback_() == ["error: a: b. c"]
    assert UserError(["one", "two"])._render_traceback_() == ["error: one", "error: two"]


def test_errors_in_prompts_and_settings(config, user_error):
    with user_error("prompt 2"):
        make_trainer(config(), ["fine", " "])
    with user_error(2):
        make_trainer(config(prompt_length=2), ["a long prompt"])
    with user_error("make_config", "learning_rat", "learning_rate"):
        make_config(learning_rat=1)
    with user_error("batch_size", "make_config", 0):
        make_config(batch_size=0)


def test_the_loops_by_hand_of_the_page_run(start_model, monkeypatch, tmp_path):
    """The page's PPO loop in 15 lines, then its episodes of two turns, with two updates of short turns."""
    make = config_module.make_config
    small = {"actor_model": str(start_model), "rm_model": None, "num_iterations": 2, "max_new_tokens": 8}
    monkeypatch.setattr(config_module, "make_config", lambda *given, **settings: make(*given, **settings | small))
    monkeypatch.chdir(tmp_path)
    loop = python_block("trainer.generate(batch)")
    assert len(loop.strip().splitlines()) <= 15
    names: dict = {}
    exec(loop, names)
    run = RunRecord.read(Path("my_loop"))
    assert (run.status, run.spent.updates, names["trainer"].update) == ("finished", 2, 2)
    assert names["metrics"]["rewards/mean"] == pytest.approx(sum(names["scores"]) / 2)
    exec(python_block("Shorter, please."), names)
    episodes = names["episodes"]
    assert [len(episode.turns) for episode in episodes] == [2, 2] and names["trainer"].update == 1
    assert all(False in episode.action_mask and len(episode.ids) <= 160 for episode in episodes)
    assert names["metrics"]["rewards/mean"] == pytest.approx(sum(map(sum, names["turn_scores"])) / 2)
