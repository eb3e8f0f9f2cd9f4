"""Tests of exports for verl: rows, tokenizer, script, reward functions, the settings without a counterpart, errors.

tests/real/test_verl.py reads an export with verl.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from string import Formatter
from types import SimpleNamespace

import pytest
from pyarrow import parquet
from transformers import AutoTokenizer, Qwen3Config

from rlhf.checkpoints.run_record import RESUME_MAY_CHANGE
from rlhf.config import parse_cli
from rlhf.data.prompts import load_prompts
from rlhf.data.tokenizer import load_tokenizer
from rlhf.export import verl
from rlhf.export.verl_options import ELSEWHERE, EVERY_PART, hydra_word, run_script, without_option
from rlhf.export.verl_scores import reward_of_run
from rlhf.run.session import write_prompts
from rlhf.settings.fields import flag_of, settings_of
from rlhf.settings.training import Config
from rlhf.settings.types import IN_PYTHON
from tests.documents import ROOT
from tests.exports import export, options_in, record_run
from tests.settings.test_settings_act import BY_GRPO_RUN, BY_RUN, IN_BOTH
from tests.shapes import GROUPED, make_family, qwen3_tokenizer

REWARD = """
def shared_words(completions, question, system, **_):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    shared = [len({*t.split()} & {*q.split()}) for t, q in zip(texts, question)]
    return [n + 10 * bool(s) for n, s in zip(shared, system)]
"""
FUNCTIONS = ("--rm-model", "none", "--reward-func")
PLAN = SimpleNamespace(plan=SimpleNamespace(updates=40))


@pytest.fixture
def reward_file(tmp_path) -> Path:
    file = tmp_path / "my rewards.py"
    file.write_text(REWARD)
    return file


@pytest.fixture
def recorded(configured):
    """Return a function that makes a run folder with a run.json from flags, without training."""
    return lambda *flags, algorithm="ppo": record_run(configured(*flags, algorithm=algorithm))


def listed(config: Config) -> dict[str, str]:
    """Return the options in the script of a run of 40 updates."""
    return dict(
        line.strip().split("=", 1) for line in run_script(config, PLAN, {}).splitlines() if line.startswith("    ")
    )


def rows_of(file: Path) -> list[dict]:
    return parquet.read_table(file).to_pylist()


# --- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(), ("--plain-prompts",)], ids=["chat template", "plain"])
def test_rows_give_the_prompts_of_the_run(recorded, tmp_path, flags):
    (tmp_path / "p.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"text {i}", "answer": i, "more": {f"k{i}": None}}) for i in range(40))
    )
    (tmp_path / "shots.jsonl").write_text(json.dumps({"prompt": "one", "answer": "two"}))
    flags = (*flags, "--few-shot", tmp_path / "shots.jsonl", "--prompts", tmp_path / "p.jsonl")
    run = recorded(*FUNCTIONS, "exact_match", *flags, "--max-prompts", 7)
    folder = export(run)
    config = parse_cli(["--resume", "--output", str(run)], "ppo")
    plain = config.data.plain_prompts
    sets = load_prompts(config.data, load_tokenizer(config.model.actor_model, plain), say=lambda _: None)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert len(sets.train) == 7
    for name, prompts in (("train", sets.train), ("val", sets.evaluation)):
        rows = rows_of(folder / f"{name}.parquet")
        chats = [row["prompt"] for row in rows]
        ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True).input_ids
        assert ids == [list(prompt.ids) for prompt in prompts]
        for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True), 7 if name == "val" else 0):
            columns = prompt.example.columns
            stored = json.loads(row["extra_info"]["row"])
            assert row["reward_model"] == {"style": "rule", "ground_truth": str(columns["answer"])}
            assert (row["extra_info"]["index"], stored["columns"]) == (i, columns)
            assert stored["messages"] == list(prompt.example.messages)
            assert len(row["prompt"]) == (2 if plain else 3)
            assert row["data_source"] == "rlhf"


def test_the_tokenizer_keeps_the_pre_tokenizers_of_its_file(recorded, start_model, tmp_path):
    """SmolLM2's class, with which transformers drops that for digits."""
    start = tmp_path / "digits"
    shutil.copytree(start_model, start)
    file = start / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = json.loads((start / "tokenizer.json").read_text())
    parts = [{"type": "Digits", "individual_digits": True}, tokenizer["pre_tokenizer"]]
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    (start / "tokenizer.json").write_text(json.dumps(tokenizer))
    folder = export(recorded("--actor-model", start))
    loaded = [AutoTokenizer.from_pretrained(path) for path in (folder / "tokenizer", start)]
    assert ["Digits" in repr(one.backend_tokenizer.pre_tokenizer) for one in loaded] == [True, False]


def test_variables_of_the_chat_template(recorded, tmp_path):
    """Qwen3's template without its thinking switch, and with it."""
    start = make_family(tmp_path / "qwen3", qwen3_tokenizer(), Qwen3Config, **GROUPED)
    flags = (
        "--actor-model",
        start,
        *FUNCTIONS,
        "length_penalty",
        "--chat-template-kwargs",
        '{"enable_thinking": false}',
    )
    folder = export(recorded(*flags))
    options = options_in(folder / "run.sh", tmp_path)
    assert options["+data.apply_chat_template_kwargs.enable_thinking"] == "False"
    text = (folder / "README.md").read_text()
    assert "chat-template-kwargs" not in text and "special tokens" not in text
    assert not any(
        "apply_chat_template_kwargs" in name
        for name in options_in(export(recorded("--overwrite")) / "run.sh", tmp_path)
    )


def test_a_chat_template_with_the_date_gets_that_of_the_run(recorded, start_model, tmp_path, on_day):
    start = tmp_path / "dated"
    shutil.copytree(start_model, start)
    file = start / "chat_template.jinja"
    file.write_text("{{ strftime_now('%d %b %Y') }}\n" + file.read_text())
    on_day("2026-02-03T04:05:06")
    run = recorded("--actor-model", start)
    on_day("2027-01-01T00:00:00")
    tokenizer = AutoTokenizer.from_pretrained(export(run) / "tokenizer")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False).startswith("03 Feb 2026")


def test_prompts_with_special_tokens_are_counted(recorded, tmp_path, capsys):
    texts = [f"text {i}" + " <|im_end|>" * (i == 3) for i in range(30)]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    export(recorded(*FUNCTIONS, "length_penalty", "--prompts", tmp_path / "p.jsonl", "--eval-prompts", 30))
    assert "1 of 30 prompts" in capsys.readouterr().out


def test_prompts_of_a_program(recorded, tmp_path, start_model):
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": f"text {i}", "n": i}) for i in range(40)))
    run = recorded(*FUNCTIONS, "length_penalty", "--prompts", tmp_path / "p.jsonl")
    facts = json.loads((run / "run.json").read_text())
    data = parse_cli(["--resume", "--output", str(run)], "ppo").data
    sets = load_prompts(data, load_tokenizer(str(start_model)), say=lambda _: None)
    write_prompts(run, SimpleNamespace(train_prompts=sets.train, evaluation_prompts=sets.evaluation))
    facts["settings"]["data"] |= {"prompts": IN_PYTHON, "split": None}
    (run / "run.json").write_text(json.dumps(facts))
    (tmp_path / "p.jsonl").unlink()
    rows = rows_of(export(run) / "train.parquet")
    assert [json.loads(row["extra_info"]["row"])["columns"]["n"] for row in rows] == [
        prompt.example.columns["n"] for prompt in sets.train
    ]


# --- the script ------------------------------------------------------------------------------------------------------


def test_the_options_of_grpo(configured):
    flags = "--batch-size 6 --K 8 --minibatches 3 --clip-range 0.1 --epsilon-high 0.3 --loss-type dr_grpo"
    more = "--scale-rewards group --kl-placement loss --kl-schedule fixed --kl-coef 0.02 --dynamic-sampling 2"
    config = configured(*flags.split(), *more.split(), algorithm="grpo")
    options = listed(config)
    expected = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": "True",
        "algorithm.use_kl_in_reward": "False",
        "algorithm.filter_groups.enable": "True",
        "algorithm.filter_groups.max_num_gen_batches": "3",
        "data.train_batch_size": "6",
        "actor_rollout_ref.rollout.n": "8",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "2",
        "actor_rollout_ref.actor.clip_ratio_low": "0.1",
        "actor_rollout_ref.actor.clip_ratio_high": "0.3",
        "actor_rollout_ref.actor.clip_ratio_c": "1000000.0",
        "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm",
        "actor_rollout_ref.actor.loss_scale_factor": "8",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
        "actor_rollout_ref.actor.use_kl_loss": "True",
        "actor_rollout_ref.actor.kl_loss_coef": "0.02",
        "actor_rollout_ref.actor.kl_loss_type": "low_var_kl+",
        "trainer.total_training_steps": "40",
        "trainer.test_freq": "50",
        "trainer.save_freq": "10",
    }
    assert {name: options[name] for name in expected} == expected
    assert not any(name.startswith("critic.") for name in options)
    assert list(without_option(config)) == ["rm_model"]


def test_the_options_of_ppo(configured):
    flags = "--use-lora --lora-r 4 --lora-alpha 8 --critic separate --critic-learning-rate 1e-4 --critic-warmup 2"
    more = "--kl-target 0.05/token --kl-horizon 400 --delta 3 --gamma 0.9 --lam 0.8 --adam-beta1 0.8"
    sampling = "--top-k 5 --eval-temperature 0 --warmup-steps 0.1 --micro-batch-size 2 --bf16 --K 2"
    config = configured(*flags.split(), *more.split(), *sampling.split(), *FUNCTIONS, "word_penalty")
    options = listed(config)
    expected = {
        "algorithm.adv_estimator": "gae",
        "algorithm.gamma": "0.9",
        "algorithm.lam": "0.8",
        "algorithm.use_kl_in_reward": "True",
        "algorithm.kl_ctrl.type": "adaptive",
        "algorithm.kl_ctrl.target_kl": "0.05",
        "algorithm.kl_ctrl.horizon": "400",
        "critic.optim.lr": "0.0001",
        "critic.cliprange_value": "0.2",
        "critic.model.lora_rank": "4",
        "trainer.critic_warmup": "3",
        "actor_rollout_ref.model.lora_rank": "4",
        "actor_rollout_ref.model.lora_alpha": "8",
        "actor_rollout_ref.model.target_modules": "'[q_proj,k_proj,v_proj,o_proj]'",
        "actor_rollout_ref.rollout.load_format": "safetensors",
        "actor_rollout_ref.rollout.n": "2",
        "actor_rollout_ref.rollout.top_k": "5",
        "actor_rollout_ref.rollout.val_kwargs.do_sample": "True",
        "actor_rollout_ref.rollout.val_kwargs.temperature": "0.7",
        "actor_rollout_ref.rollout.val_kwargs.top_k": "1",  # greedy
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "216",  # 2 episodes of 100 + 8 tokens
        "actor_rollout_ref.actor.clip_ratio_c": "3.0",
        "actor_rollout_ref.actor.optim.lr": "0.001",
        "actor_rollout_ref.actor.optim.lr_warmup_steps": "4",
        "actor_rollout_ref.actor.optim.betas": '"[0.8,0.999]"',
        "reward.custom_reward_function.path": "\"'$here/reward.py'\"",
    }
    assert {name: options[name] for name in expected} == expected
    assert without_option(config) == {}


@pytest.mark.parametrize(
    ("algorithm", "flags", "expected"),
    [
        (
            "rloo",
            "",
            {"algorithm.adv_estimator": "rloo", "actor.loss_agg_mode": "seq-mean-token-sum", "rollout.n": "2"},
        ),
        ("reinforce_pp", "", {"adv_estimator": "reinforce_plus_plus", "loss_agg_mode": "token-mean"}),
        # of 3 completions one is greedy; verl's newer trainer has no greedy baseline
        ("remax", "--K 3", {"adv_estimator": "remax", "rollout.n": "2", "trainer.use_v1": "False"}),
        ("grpo", "--loss-type cispo", {"loss_mode": "cispo", "clip_ratio_low": "1.0", "trainer.use_v1": "True"}),
        ("grpo", "--loss-type gspo", {"loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean"}),
        ("grpo", "--loss-type grpo", {"loss_mode": "vanilla", "loss_agg_mode": "seq-mean-token-mean"}),
        ("ppo", "--optim adamw_8bit", {"actor.optim.optimizer": "AdamW8bit", "optimizer_impl": "bitsandbytes.optim"}),
        ("ppo", "", {"reward_model.enable": "True", "actor.optim.optimizer": "AdamW", "kl_ctrl.type": "fixed"}),
    ],
)
def test_the_options_of_each_algorithm(configured, algorithm, flags, expected):
    groups = ("--K", 2) if algorithm in ("grpo", "rloo") else ()
    options = listed(configured(*groups, *flags.split(), algorithm=algorithm))
    for end, value in expected.items():
        assert {options[name] for name in options if f".{name}".endswith(f".{end}")} == {value}, end


def test_a_minibatch_of_less_than_a_prompt(configured):
    config = configured("--batch-size", 3, "--K", 4, "--minibatches", 4, algorithm="grpo")
    assert listed(config)["actor_rollout_ref.actor.ppo_mini_batch_size"] == "1"
    assert "minibatches" in without_option(config)


def test_bash_and_hydra_read_each_value(recorded, start_model, tmp_path):
    odd = tmp_path / "it's a $model"
    shutil.copytree(start_model, odd)
    folder = export(recorded("--actor-model", odd, "--use-lora"))
    options = options_in(folder / "run.sh", tmp_path)
    escaped = str(odd).replace("'", r"\'")
    assert options["actor_rollout_ref.model.path"] == options["critic.model.path"] == f"'{escaped}'"
    assert options["data.train_files"] == f"'{folder}/train.parquet'"
    assert options["actor_rollout_ref.model.target_modules"] == "[q_proj,k_proj,v_proj,o_proj]"
    assert options["trainer.n_gpus_per_node"] == "8"


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (True, "True"),
        (5e-06, "5e-06"),
        (["a", "b c"], "[a,'b c']"),
        ("/a-b/c.d", "/a-b/c.d"),
        ("a=b", "'a=b'"),
        (r"a\'b", r"'a\\\'b'"),
    ],
)
def test_hydra_words(value, word):
    assert hydra_word(value) == word


# --- the settings without a counterpart ------------------------------------------------------------------------------

SHOWN = {name for _, name, _, _ in Formatter().parse(EVERY_PART)} & settings_of(Config).keys()
FLAGS = {**BY_RUN, **BY_GRPO_RUN, "micro_batch_size": "--micro-batch-size 1000", "bf16": "--no-bf16"}


def test_every_setting_is_in_the_script_or_listed_or_named():
    assert not SHOWN & {*ELSEWHERE}.difference(RESUME_MAY_CHANGE)
    assert {*ELSEWHERE}.difference(RESUME_MAY_CHANGE) <= settings_of(Config).keys()


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_a_changed_setting_changes_the_script_or_is_listed(configured, name):
    algorithm = "grpo" if name in BY_GRPO_RUN else "ppo"
    both = [*IN_BOTH.get(name, "").split(), "--max-new-tokens", 40]
    both += ["--critic", "separate"] if algorithm == "ppo" else []
    both += ["--kl-target", "1/token"] if name != "kl_schedule" else []
    length = () if name == "episodes" else ("--num-iterations", 9)
    one, other = (configured(*length, *both, *flags, algorithm=algorithm) for flags in ((), FLAGS[name].split()))
    changed = run_script(one, PLAN, {}) != run_script(other, PLAN, {})
    lost = without_option(other).keys() - without_option(one).keys()
    length_of_run = ("num_iterations", "episodes")  # the run's own number of updates
    if name in ("critic", *length_of_run):
        return
    assert changed or name in lost or name in ELSEWHERE, name
    assert not (name in SHOWN and not changed) or name in lost, name


def test_a_setting_that_the_script_does_not_name_is_listed(configured, monkeypatch):
    assert "eval_prompts" not in without_option(configured())
    monkeypatch.setattr("rlhf.export.verl_options.ELSEWHERE", ())
    assert "eval_prompts" in without_option(configured())


def test_what_is_lost_is_printed_and_in_the_readme(recorded, reward_folder, tmp_path, monkeypatch, capsys):
    shutil.copytree(reward_folder, tmp_path / "rm")
    monkeypatch.chdir(tmp_path)
    folder = export(recorded("--rm-model", "./rm", "--missing-eos-penalty", 2, "--stop", "x", "--weight-decay", 0.1))
    text = (folder / "README.md").read_text()
    out = capsys.readouterr().out
    for name in ("missing_eos_penalty", "stop", "weight_decay", "critic", "kl_schedule", "rm_model"):
        assert flag_of(name) in text and flag_of(name) in out
    assert "--output" not in text and "--eval-prompts" not in text
    assert not (folder / "reward.py").exists()
    assert options_in(folder / "run.sh", tmp_path)["reward.reward_model.model_path"] == str(tmp_path / "rm")


# --- rewards ---------------------------------------------------------------------------------------------------------


def test_compute_score_is_the_reward_of_the_run(recorded, reward_file, configured, tmp_path):
    weights = ("--reward-weights", 0.5, 0.25)
    run = recorded(*FUNCTIONS, f"{reward_file}:shared_words", "length_penalty", *weights)
    folder = export(run)
    spec = importlib.util.spec_from_file_location("exported_reward", folder / "reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    row = next(r for r in rows_of(folder / "train.parquet") if '"Answer step by step."' in r["extra_info"]["row"])
    arguments = {"data_source": "rlhf", "ground_truth": "", "extra_info": {**row["extra_info"], "num_turns": None}}
    # "What" and "is" are in the question, and the row has a system message; 2 words are fewer than 8 tokens: with EOS
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    ids = tokenizer("What is", add_special_tokens=False).input_ids
    expected = 0.5 * (2 + 10) - 0.25 * (len(ids) + 1)
    assert len(ids) < 8
    assert module.compute_score(solution_str="What is", **arguments) == pytest.approx(expected)
    cut = module.compute_score(solution_str="zz " * 50, **arguments)  # longer than 8 tokens: no EOS
    assert cut == pytest.approx(5 - 0.25 * len(tokenizer("zz " * 50, add_special_tokens=False).input_ids))


def test_a_function_that_needs_more_than_a_text_is_refused_in_verl(recorded, tmp_path, user_error):
    """`group` and `prompt_ids` are not known there; without the error they would be wrong."""
    (tmp_path / "more.py").write_text("def ranked(completions, group, prompt_ids, **_):\n    return group\n")
    folder = export(recorded("--rm-model", "none", "--reward-func", f"{tmp_path / 'more.py'}:ranked"))
    with user_error("group, prompt_ids", "ranked"):
        reward_of_run([f"{tmp_path / 'more.py'}:ranked"], None, (), 1.0, 8, False, str(folder / "tokenizer"))


# --- errors ----------------------------------------------------------------------------------------------------------


def test_an_existing_folder_is_refused(recorded, user_error):
    run = recorded()
    (run / "verl").mkdir()
    with user_error("--output", run / "verl"):
        export(run)
    assert list((run / "verl").iterdir()) == []


def test_a_folder_without_a_run_is_refused(tmp_path, user_error):
    with user_error("run.json", tmp_path):
        export(tmp_path)


def test_a_run_with_an_environment_is_refused(recorded, tmp_path, user_error):
    run = recorded()
    facts = json.loads((run / "run.json").read_text())
    facts["settings"]["environment"]["environment"] = "crossing"
    facts["settings"]["model"]["rm_model"] = None
    (run / "run.json").write_text(json.dumps(facts))
    with user_error("--to verl", "--environment crossing"):
        export(run)


def test_changed_data_and_reward_functions_are_refused(recorded, reward_file, tmp_path, user_error):
    (tmp_path / "p.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"t {i}", "question": "", "system": ""}) for i in range(40))
    )
    run = recorded(*FUNCTIONS, f"{reward_file}:shared_words", "--prompts", tmp_path / "p.jsonl")
    reward_file.write_text(REWARD + "\n")
    with user_error("--to verl", f"{reward_file}:shared_words"):
        export(run)
    reward_file.write_text(REWARD)
    with (tmp_path / "p.jsonl").open("a") as file:
        file.writelines("\n" + json.dumps({"prompt": f"u {i}", "question": "", "system": ""}) for i in range(9))
    with user_error("--to verl", "p.jsonl"):
        export(run)
    (tmp_path / "p.jsonl").write_text('{"prompt": ""}')
    with user_error("--to verl", "p.jsonl") as error:
        export(run)
    assert "--skip-bad-rows" not in str(error.value)
    assert not (run / "verl").exists()


def test_nothing_is_left_of_a_failed_export(recorded, monkeypatch):
    run = recorded()
    before = sorted(file.name for file in run.iterdir())

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(verl, "run_script", fail)
    with pytest.raises(OSError):
        export(run)
    assert sorted(file.name for file in run.iterdir()) == before


# --- docs ------------------------------------------------------------------------------------------------------------


def test_the_table_of_settings_is_that_of_the_script():
    """Each row names settings and, in the same order, the first option of each."""
    page = (ROOT / "docs" / "several_gpus.md").read_text(encoding="utf-8")
    table = page.partition("\n## A cluster: verl")[2].partition("\n\nWhat ")[0]
    shown = {}
    for line in table.splitlines():
        if line.startswith("| `"):
            settings, options = (re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:3])
            shown |= dict(zip(settings, options, strict=True))
    written = {}
    for line in EVERY_PART.splitlines():
        option = line.strip().split("=")[0].removeprefix("actor_rollout_ref.")
        for name in re.findall(r"\{(\w+)\}", line):
            if name in SHOWN:
                written.setdefault(flag_of(name), option)
    assert shown == written
