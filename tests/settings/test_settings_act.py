"""Tests that each setting has an effect: another value must change an output. All settings must be listed here."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import Qwen3Config

import evaluate_generations
from rlhf.algorithms.table import ALGORITHMS
from rlhf.checkpoints.model_folder import METRICS_FILE
from rlhf.checkpoints.run_log import RunLog
from rlhf.data.prompts import Prompt
from rlhf.data.row import Example
from rlhf.models import logprobs
from rlhf.models.device import start_device
from rlhf.rewards.build import make_rewards
from rlhf.rewards.find import find_rewards
from rlhf.rewards.training import train_reward_model
from rlhf.rollout import continuous_batching, engine
from rlhf.run.seeds import for_each_seed
from rlhf.settings.evaluation import ComparisonConfig, EvaluationConfig, ExportConfig, PlotConfig
from rlhf.settings.fields import settings_of
from rlhf.settings.reward_model import RewardModelConfig, parse_reward_cli
from rlhf.settings.training import Config
from rlhf.setup.build import load_components
from rlhf.setup.inputs import check_run_folder
from rlhf.utils.console import Screen
from rlhf.utils.errors import RunError, UserError
from tests.conftest import BY_TIER, attach
from tests.records import facts_of
from tests.shapes import GROUPED, make_family, make_reward_model, make_start_model, qwen3_tokenizer

CPU = torch.device("cpu")
NOT_COMPARED = ("time/", "throughput/", "memory/")  # these differ between two identical runs


@pytest.fixture
def run(build):
    """Return a function that does a short run and returns its metrics, sum of weights and best update as JSON."""

    def observe(*flags, algorithm="ppo") -> str:
        length = [] if "--episodes" in flags else ["--num-iterations", 2]
        horizon = [] if "fixed" in flags else ["--kl-horizon", 40]
        trainer = build(*length, "--learning-rate", "1e-2", *horizon, *flags, algorithm=algorithm)
        with attach(trainer) as log:
            trainer.train()
        logged = [{k: v for k, v in entry.items() if not k.startswith(NOT_COMPARED)}
                  for entry in trainer.host.state.log_history]  # fmt: skip
        weights = sum(float(w.detach().double().abs().sum()) for w in trainer.host.model.parameters())
        return json.dumps([logged, weights, log.record.best.update])

    return observe


# setting -> flags with which a run must differ from the run without them
BY_RUN = {
    "use_lora": "--use-lora",
    "lora_r": "--lora-r 2",
    "lora_alpha": "--lora-alpha 2",
    "lora_targets": "--lora-targets down_proj",
    "lora_dropout": "--lora-dropout 0.3",
    "load_in_4bit": "--load-in-4bit",
    "bf16": "--bf16",
    "split": "--split 10/80/10",
    "prompt_length": "--prompt-length 40",
    "eval_text": "--eval-text README.md",
    "max_prompts": "--max-prompts 5",
    "eval_prompts": "--eval-prompts 2",
    "max_new_tokens": "--max-new-tokens 5",
    "temperature": "--temperature 0.9",
    "top_k": "--top-k 5",
    "top_p": "--top-p 0.5",
    "stop": "--stop e",
    "batch_size": "--batch-size 6",
    "K": "--K 4",
    "ppo_epochs": "--ppo-epochs 3",
    "minibatches": "--minibatches 2",
    "clip_range": "--clip-range 0.01",
    "epsilon_high": "--epsilon-high 0.5",
    "delta": "--delta 1.011",
    "critic": "--critic separate",
    "value_coef": "--value-coef 0.7",
    "value_clip_range": "--value-clip-range 0.001",
    "mask_truncated_completions": "--mask-truncated-completions",
    "entropy_coef": "--entropy-coef 0.1",
    "gamma": "--gamma 0.8",
    "lam": "--lam 0.5",
    "critic_learning_rate": "--critic-learning-rate 3e-2",
    "critic_lam": "--critic-lam 1",
    "critic_warmup": "--critic-warmup 1",
    "gae_unit": "--gae-unit turn",
    "max_episode_tokens": "--max-episode-tokens 4",
    "whiten_rewards": "--whiten-rewards",
    "whiten_advantages": "--no-whiten-advantages",
    "missing_eos_penalty": "--missing-eos-penalty 2",
    "reward_func": "--reward-func length_penalty",
    "reward_weights": "--reward-weights 0.5",
    "eval_func": "--eval-func length_penalty",
    "keywords": "--keywords e",
    "normalize_scores": "--normalize-scores",
    "score_ema": "--score-ema 0.1",
    "control": "--control shuffled",
    "kl_coef": "--kl-coef 0.5",
    "kl_placement": "--kl-placement loss",
    "kl_schedule": "--kl-schedule fixed",
    "kl_target": "--kl-target 0.001/token",
    "kl_horizon": "--kl-horizon 20",
    "kl_penalty_at": "--kl-penalty-at eos",
    "learning_rate": "--learning-rate 3e-3",
    "warmup_steps": "--warmup-steps 1",
    "weight_decay": "--weight-decay 0.1",
    "optim": "--optim adamw_8bit",
    "lr_schedule": "--lr-schedule constant",
    "adam_beta1": "--adam-beta1 0.5",
    "adam_beta2": "--adam-beta2 0.9",
    "max_grad_norm": "--max-grad-norm 0.01",
    "seed": "--seed 7",
    "num_iterations": "--num-iterations 1",
    "episodes": "--episodes 4",
    "eval_every": "--eval-every 1",
    "eval_samples": "--eval-samples 2",
    "eval_temperature": "--eval-temperature 0",
}

# the same for settings that only GRPO reads
BY_GRPO_RUN = {
    "dynamic_sampling": "--dynamic-sampling 2",
    "scale_rewards": "--scale-rewards group",
    "loss_type": "--loss-type dr_grpo",
}
# the same for settings that choose the best of two evaluations: score 1, perplexity 10 and score 2, perplexity 12
BY_BEST = {
    "best_rule": "--best-rule perplexity",
}

# flags of both runs
IN_BOTH = {
    "lora_r": "--use-lora",
    "lora_alpha": "--use-lora",
    "lora_targets": "--use-lora",
    "lora_dropout": "--use-lora",
    "load_in_4bit": "--use-lora",
    "epsilon_high": "--clip-range 0.01",
    "delta": "--clip-range 0.01 --minibatches 2",
    "critic_lam": "--lam 0.5",
    "gae_unit": "--gamma 0.5",
    "keywords": "--reward-func keyword_bonus",
    "score_ema": "--normalize-scores",
    "kl_penalty_at": "--kl-coef 0.5",
    "dynamic_sampling": "--rm-model none --reward-func keyword_bonus",
    "scale_rewards": "--kl-placement loss",
}


@pytest.fixture
def differs(run):
    """Return a function: True if flags change a run. The run without them is done once and cached for all tests."""

    def compare(flags: str, name: str, *more: object, algorithm="ppo") -> bool:
        both = (*IN_BOTH.get(name, "").split(), *more)
        key = (*both, algorithm)
        if key not in RUNS_WITHOUT_FLAGS:
            RUNS_WITHOUT_FLAGS[key] = run(*both, algorithm=algorithm)
        return run(*both, *flags.split(), algorithm=algorithm) != RUNS_WITHOUT_FLAGS[key]

    return compare


READ_BY_ALGORITHMS = ("batch", "kl", "reward")  # groups that files of rlhf/algorithms read; all share the others' code
RUNS_WITHOUT_FLAGS: dict[tuple[str, ...], str] = {}


@pytest.mark.parametrize("name", BY_RUN)
def test_setting_changes_a_ppo_run(differs, name):
    assert differs(BY_RUN[name], name)


@pytest.mark.parametrize("name", BY_GRPO_RUN)
def test_setting_changes_a_grpo_run(differs, name):
    assert differs(BY_GRPO_RUN[name], name, algorithm="grpo")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        (algorithm, name)
        for algorithm in ALGORITHMS
        if algorithm != "ppo"
        for name in BY_RUN
        if name not in ALGORITHMS[algorithm].foreign and settings_of(Config)[name].group in READ_BY_ALGORITHMS
    ],
)
def test_shared_setting_changes_other_algorithms_runs(differs, algorithm, name):
    """For settings in groups that the algorithm reads."""
    both = ["--seed", 2]  # with this seed the KL is above 0 after the first update
    if ALGORITHMS[algorithm].group_size > 1:  # after larger steps, ratios are outside the clip range
        both += ["--K", 4] if ALGORITHMS[algorithm].greedy and name != "K" else []
        both += ["--learning-rate", "5e-3", "--num-iterations", 3]
    assert differs(BY_RUN[name], name, *both, algorithm=algorithm)


@pytest.mark.parametrize("name", BY_BEST)
def test_setting_changes_the_best_checkpoint(build, monkeypatch, name):
    def best(*flags):
        scores = iter([1.0, 2.0])
        perplexities = iter([10.0, 12.0])
        monkeypatch.setattr("rlhf.trainer.evaluator.perplexity", lambda *_: next(perplexities))
        scripted = [lambda completions, **_: [next(scores) if len(completions) == 6 else 0.0] * len(completions)]
        trainer = build("--num-iterations", 1, "--kl-schedule", "fixed", *flags, rewards=scripted)
        with attach(trainer) as log:
            trainer.train()
        return log.record.best.update

    assert best(*BY_BEST[name].split()) != best()


@pytest.mark.parametrize("algorithm", BY_TIER)
def test_repeated_run_does_not_differ(run, algorithm):
    assert run(algorithm=algorithm) == run(algorithm=algorithm)


def outcomes_actor_model(configured, tmp_path):
    def first_weight(*flags):
        policy = load_components(configured(*flags), CPU, Screen()).policy
        return float(next(policy.parameters()).detach().flatten()[0])

    return first_weight("--actor-model", make_start_model(tmp_path / "other", seed=9)), first_weight()


def outcomes_teacher(configured, tmp_path):
    def name(*flags):
        teacher = load_components(configured(*flags), CPU, Screen()).teacher
        return teacher and teacher.name

    return name("--teacher", make_start_model(tmp_path / "other", seed=9)), name()


def outcomes_rm_model(configured, tmp_path):
    def score(*flags):
        parts = load_components(configured(*flags), CPU, Screen())
        return parts.reward_model.score([({"role": "user", "content": "a"},)], ["b"], [True])

    return score("--rm-model", make_reward_model(tmp_path / "other", seed=9)), score()


def outcomes_rm_text(configured, tmp_path):
    def ids(*flags):
        parts = load_components(configured(*flags), CPU, Screen())
        return parts.reward_model.encode(({"role": "user", "content": "a"},), "b")

    return ids("--rm-text", "eos"), ids()


def outcomes_allow_weak_reward_model(configured, tmp_path):
    folder = make_reward_model(tmp_path / "weak")
    (folder / METRICS_FILE).write_text(json.dumps({"accuracy": 0.5, "length_baseline": 0.9, "calibration": {}}))

    def outcome(*flags):
        try:
            return type(load_components(configured("--rm-model", folder, *flags), CPU, Screen())).__name__
        except UserError as error:
            return str(error)

    return outcome(), outcome("--no-allow-weak-reward-model")


def outcomes_reward_timeout(configured, tmp_path):
    (tmp_path / "slow.py").write_text("import time\ndef f(completions):\n    time.sleep(0.5)\n    return [1.0]\n")

    def outcome(*flags):
        config = configured("--rm-model", "none", "--reward-func", f"{tmp_path / 'slow.py'}:f", *flags)
        rewards, _ = make_rewards(config, find_rewards(config), None, CPU)
        try:
            return rewards.score([Prompt((1,), Example(({"role": "user", "content": "a"},)))], ["b"], [[1]], [True])
        except RunError as error:
            return str(error)

    return outcome("--reward-timeout", 0.01), outcome()


def outcomes_eval_dataset(configured, tmp_path):
    (tmp_path / "e.jsonl").write_text("\n".join(json.dumps({"prompt": f"another {i}"}) for i in range(9)))

    def evaluated(*flags):
        return [p.example for p in load_components(configured(*flags), CPU, Screen()).prompts.evaluation]

    return evaluated("--eval-dataset", tmp_path / "e.jsonl"), evaluated()


def outcomes_prompts(configured, tmp_path):
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": f"another {i}"}) for i in range(50)))

    def first(*flags):
        return load_components(configured(*flags), CPU, Screen()).prompts.train[0].example

    return first("--prompts", tmp_path / "p.jsonl"), first()


def test_prompts_of_another_shape_give_the_same_run(run, pairs_file, tmp_path):
    """A saved DatasetDict with other names of the columns, and one row that is skipped."""
    rows = [json.loads(line) for line in pairs_file.read_text().splitlines()]
    renamed = [
        {"system": r["system"], "ask": r["question"], "chosen": r["chosen"], "bad": r["rejected"]} for r in rows
    ]
    parts = {
        "first": Dataset.from_list([*renamed, {**renamed[0], "ask": ""}]),
        "other": Dataset.from_list(renamed[:1]),
    }
    DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    words = ["--dataset-split", "first", "--columns", "prompt=ask", "rejected=bad", "--skip-bad-rows", "1"]
    assert run("--prompts", tmp_path / "saved", *words) == run()


def outcomes_plain_prompts(configured, tmp_path):
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": f"text {i} TL;DR:"}) for i in range(50)))

    def first(*flags):
        parts = load_components(configured("--prompts", tmp_path / "p.jsonl", *flags), CPU, Screen())
        return parts.tokenizer.decode(list(parts.prompts.train[0].ids))

    return first("--plain-prompts"), first()


def outcomes_chat_template_kwargs(configured, tmp_path):
    start = make_family(tmp_path / "qwen3", qwen3_tokenizer(), Qwen3Config, **GROUPED)
    rows = "\n".join(json.dumps({"prompt": f"text {i}"}) for i in range(50))
    (tmp_path / "p.jsonl").write_text(rows)

    def first(*flags):
        config = configured("--actor-model", start, "--prompts", tmp_path / "p.jsonl", *flags)
        return load_components(config, CPU, Screen()).prompts.train[0].ids

    return first("--chat-template-kwargs", '{"enable_thinking": false}'), first()


def outcomes_few_shot(configured, tmp_path):
    (tmp_path / "shots.jsonl").write_text(json.dumps({"prompt": "1 + 1?", "answer": "2"}) + "\n")

    def first(*flags):
        parts = load_components(configured(*flags), CPU, Screen())
        return [part[0].ids for part in (parts.prompts.train, parts.prompts.evaluation)]

    return first("--few-shot", tmp_path / "shots.jsonl"), first()


def outcomes_epochs(configured, tmp_path):
    def updates(epochs):
        return configured("--num-iterations", "none", "--epochs", epochs).updates(100)

    return updates(3), updates(1)


def forward_passes(build, *flags):
    trainer = build("--num-iterations", 1, *flags)
    passes = []
    losses = trainer.algorithm.loss
    trainer.algorithm.loss = lambda *a: passes.append(1) or losses(*a)
    trainer.update_step(1)
    return len(passes)


def outcomes_overwrite(configured, tmp_path):
    (tmp_path / "run").mkdir()
    RunLog(tmp_path / "run", **facts_of())

    def outcome(*flags):
        try:
            return check_run_folder(configured(*flags))
        except UserError as error:
            return str(error)

    return outcome("--overwrite"), outcome()


def outcomes_seeds(configured, tmp_path):
    def folders(*flags):
        outputs = []
        for_each_seed(
            lambda config, screen: outputs.append(config.run.output), configured("--dry-run", *flags), Screen()
        )
        return outputs

    return folders("--seeds", 1, 2), folders()


def outcomes_deterministic(configured, tmp_path):
    def switched_on(*flags):
        try:
            start_device(Screen(), configured(*flags).run.deterministic)
            return torch.are_deterministic_algorithms_enabled()
        finally:
            torch.use_deterministic_algorithms(False)

    return switched_on("--deterministic"), switched_on()


OUTCOMES = {name.removeprefix("outcomes_"): f for name, f in [*globals().items()] if name.startswith("outcomes_")}


@pytest.mark.parametrize("name", OUTCOMES)
def test_setting_changes_something_else(configured, tmp_path, name):
    changed, default = OUTCOMES[name](configured, tmp_path)
    assert changed != default


def test_micro_batch_size_changes_the_number_of_passes(build):
    assert forward_passes(build, "--micro-batch-size", "1") == 4 * forward_passes(build)


def test_micro_batch_tokens_changes_the_number_of_passes(build):
    assert forward_passes(build, "--micro-batch-tokens", "1") == 4 * forward_passes(build)


def test_gradient_accumulation_steps_is_micro_batches_per_optimizer_step(build):
    """Four episodes in micro-batches of two: two forward passes, and two optimizer steps or one."""

    def steps_and_passes(*flags):
        flags = ("--ppo-epochs", 1, *flags)
        return build(*flags).update_step(1)["optimizer_steps"], forward_passes(build, *flags)

    assert steps_and_passes("--micro-batch-size", 2, "--gradient-accumulation-steps", 1) == (2, 2)
    assert steps_and_passes("--micro-batch-size", 2, "--gradient-accumulation-steps", 2) == (1, 2)
    assert steps_and_passes("--gradient-accumulation-steps", 4) == (1, 4)
    assert steps_and_passes() == (1, 1)


def test_gradient_checkpointing_recomputes_layers(build):
    def layer_passes(*flags):
        trainer = build("--num-iterations", 1, *flags)
        passes = []
        trainer.host.model.policy.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *_: passes.append(1))
        trainer.update_step(1)
        return len(passes)

    assert layer_passes("--gradient-checkpointing") > layer_passes()


def test_samples_are_written_to_output(build, tmp_path):
    trainer = build("--output", tmp_path / "elsewhere", "--num-iterations", 1)
    attach(trainer)
    trainer.train()
    assert (tmp_path / "elsewhere" / "samples").is_dir()


def test_dry_run_writes_no_folder(configured, tmp_path, capsys):
    import train_ppo

    config = configured("--dry-run")
    words = [f"--{f.name.replace('_', '-')}={getattr(config.model, f.name)}" for f in dataclasses.fields(config.model)
             if f.name in ("actor_model", "rm_model")]  # fmt: skip
    train_ppo.main([*words, "--prompts", config.data.prompts, "--output", config.run.output, "--dry-run",
                    "--allow-weak-reward-model"])  # fmt: skip
    assert "budget" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_rollout_engine_selects_the_plain_loop(build, monkeypatch):
    plain = engine._sample_plain
    called = []
    monkeypatch.setattr(engine, "_sample_plain", lambda *a: called.append(1) or plain(*a))
    build("--num-iterations", 1).update_step(1)
    assert not called
    build("--num-iterations", 1, "--rollout-engine", "plain").update_step(1)
    assert called


def test_rollout_slots_is_the_number_of_rows_in_a_step(build, monkeypatch):
    rows = []
    decode = continuous_batching.ContinuousBatcher._decode
    monkeypatch.setattr(
        continuous_batching.ContinuousBatcher,
        "_decode",
        lambda batcher, span: rows.append(len(batcher.slots.token)) or decode(batcher, span),
    )
    for slots in (0, 3):
        rows.clear()
        build("--num-iterations", 1, "--rollout-slots", slots).train()
        assert max(rows) == (slots or 6), "the evaluation has six prompts"


def test_packed_removes_padding_before_the_layers(build):
    def tokens(*flags):
        trainer = build("--num-iterations", 1, *flags)
        seen = []
        rollout = trainer.collector.collect(trainer.episodes_of(1), 1)
        batch = trainer.advantages(rollout, torch.arange(4.0))
        trainer.host.model.policy.model.layers[0].self_attn.o_proj.register_forward_hook(
            lambda _m, inputs, _o: seen.append(inputs[0].numel() // inputs[0].shape[-1])
        )
        trainer.policy_optimizer.run(batch, 1)
        return seen[0]

    assert tokens() < tokens("--no-packed")


def test_the_head_in_chunks_trains_as_autograd_does(build, monkeypatch):
    def by_autograd(hidden, head, tokens, temperature, allowed, entropy):
        return logprobs._logprobs_of(logprobs.upcast(hidden @ head.t()) / temperature, tokens, allowed, entropy)

    fused = logprobs._FusedLogprobs.apply
    called = []
    weights = []
    for compute in (fused, by_autograd):
        monkeypatch.setattr(logprobs._FusedLogprobs, "apply", lambda *a, c=compute: called.append(c) or c(*a))
        trainer = build("--num-iterations", 1)
        trainer.update_step(1)
        weights.append(torch.cat([w.detach().flatten() for w in trainer.host.model.parameters()]))
    assert set(called) == {fused, by_autograd}
    # a wrong gradient moves weights by the learning rate, 1e-3
    assert float((weights[0] - weights[1]).abs().max()) < 1e-4


def test_check_prints_checks_and_writes_no_folder(configured, capsys):
    import train_ppo

    config = configured()
    words = ["--actor-model", config.model.actor_model, "--rm-model", config.model.rm_model, "--prompts",
             config.data.prompts, "--output", config.run.output, "--max-new-tokens", "8", "--eval-prompts", "6",
             "--allow-weak-reward-model", "--num-iterations", "1"]  # fmt: skip
    train_ppo.main([*words, "--check"])
    assert "save and reload  ok" in capsys.readouterr().out and not Path(config.run.output).exists()
    train_ppo.main(words)
    assert "save and reload  ok" not in capsys.readouterr().out and Path(config.run.output).exists()


SEPARATE = {
    *("micro_batch_size", "micro_batch_tokens", "gradient_accumulation_steps", "gradient_checkpointing", "output"),
    *("dry_run", "check", "rollout_engine", "rollout_slots", "packed"),
}  # each has its own test above
DATA = {"dataset_config", "dataset_split", "columns", "skip_bad_rows"}  # tests/data/test_readers.py
SAMPLER = {"steps_per_topic"}  # tests/data/test_sampler.py
RESUMED = {"save_every", "keep", "resume", "resume_anyway"}  # tests/run/test_resume.py
GUARDED = {"rollback_on_kl"}  # tests/trainer/test_safety.py
RECORDED = {"record_tokens"}  # tests/callbacks/test_token_recorder.py
THREADS = {"threads"}  # tests/setup/test_threads.py
FITTED_TO = {"fit", "memory"}  # tests/setup/test_fit.py, tests/run/test_dry_run.py
WRITTEN = {"write_parts"}  # tests/data/test_parts.py
PROCESSES = {"ddp_timeout"}  # tests/distributed
TRACKED = {"report_to"}  # tests/callbacks/test_trackers.py
PLAYED = {"environment", "max_turns", "max_observation_tokens"}  # tests/environments
EXPORTED = {"merge_lora", "export_from", "push_to_hub"}  # tests/run/test_export.py


def test_every_setting_is_tested():
    elsewhere = {
        *RECORDED, *TRACKED, *RESUMED, *GUARDED, *EXPORTED, *FITTED_TO, *PROCESSES,
        *SAMPLER, *DATA, *THREADS, *WRITTEN, *PLAYED,
    }  # fmt: skip
    assert set(settings_of(Config)) == {*BY_RUN, *BY_GRPO_RUN, *BY_BEST, *OUTCOMES, *SEPARATE, *elsewhere}


# --- python -m reward_model.train ------------------------------------------------------------------------------------

REWARD_SETTINGS = {
    "split": "--split 60/30/10",
    "plain_prompts": "--plain-prompts",
    "pair_length": "--pair-length 50",
    "rm_learning_rate": "--rm-learning-rate 1e-2",
    "rm_epochs": "--rm-epochs 2",
    "rm_batch_size": "--rm-batch-size 2",
    "rm_bf16": "--rm-bf16",
    "rm_seed": "--rm-seed 5",
    "actor_model": "--actor-model none",
    "calibration_prompts": "--calibration-prompts 7",
    "calibration_prompt_length": "--calibration-prompt-length 40",
    "max_new_tokens": "--max-new-tokens 3",
    "temperature": "--temperature 0.1",
    "top_k": "--top-k 2",
    "top_p": "--top-p 0.2",
    "stop": "--stop e",
}


@pytest.fixture(scope="module")
def reward_record(start_model, pairs_file, tmp_path_factory):
    """Return a function that trains a tiny reward model and returns its metrics.json without the settings."""

    def observe(*flags) -> str:
        folder = tmp_path_factory.mktemp("rm") / "out"
        length = [] if "none" in flags else ["--max-new-tokens", 6]
        words = ["--base-model", start_model, "--actor-model", start_model, "--pairs", pairs_file, "--rm-output",
                 folder, *length, *flags]  # fmt: skip
        train_reward_model(parse_reward_cli([str(w) for w in words]), Screen(), CPU)
        record = json.loads((folder / METRICS_FILE).read_text())
        record.pop("settings")
        return json.dumps(record)

    return observe


@pytest.fixture(scope="module")
def default_record(reward_record):
    return reward_record()


@pytest.mark.ci
@pytest.mark.parametrize("name", REWARD_SETTINGS)
def test_setting_changes_a_reward_model(reward_record, default_record, name):
    assert reward_record(*REWARD_SETTINGS[name].split()) != default_record


def test_repeated_reward_model_training_does_not_differ(reward_record, default_record):
    assert reward_record() == default_record


def test_pairs_of_another_shape_give_the_same_reward_model(reward_record, default_record, pairs_file, tmp_path):
    """CSV with other names of the columns, and one row that is skipped."""
    rows = [json.loads(line) for line in pairs_file.read_text().splitlines()]
    with (tmp_path / "pairs.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["system", "input", "good", "rejected"])
        writer.writerows(row.values() for row in rows)
        writer.writerow(["", "no completions?", "", "no"])
    words = ["--columns", "question=input", "chosen=good", "--skip-bad-rows", "1"]
    assert reward_record("--pairs", tmp_path / "pairs.csv", *words) == default_record


def test_base_model_and_pairs_change_a_reward_model(reward_record, default_record, tmp_path, pairs_file):
    other = make_start_model(tmp_path / "base", seed=8)
    assert reward_record("--base-model", other) != default_record
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("\n".join(pairs_file.read_text().splitlines()[:80]))
    assert reward_record("--pairs", fewer) != default_record


def test_rm_output_and_rm_overwrite(start_model, pairs_file, tmp_path, user_error):
    def train(*flags):
        words = ["--base-model", start_model, "--actor-model", "none", "--pairs", pairs_file, *flags]
        return train_reward_model(parse_reward_cli([str(w) for w in words]), Screen(), CPU)

    folder = tmp_path / "mine"
    assert train("--rm-output", folder) == folder and (folder / METRICS_FILE).is_file()
    with user_error("--rm-output", "--rm-overwrite"):
        train("--rm-output", folder)
    train("--rm-output", folder, "--rm-overwrite")


def test_every_reward_model_setting_is_tested():
    separate = {"pairs", "base_model", "rm_output", "rm_overwrite"}
    separate |= {"chat_template_kwargs"}  # tests/run/test_template_kwargs.py
    assert set(settings_of(RewardModelConfig)) == {*REWARD_SETTINGS, *separate, *DATA}


# --- commands that evaluate, compare and plot runs -------------------------------------------------------------------

# setting of an evaluation -> flags that must change its report; `folders` replaces the names in capitals
EVALUATION_SETTINGS = {
    "which": "--which best",
    "baseline": "--baseline START",
    "judge_model": "--judge-model REWARD",
    "eval_func": "--eval-func length_penalty",
    "num_prompts": "--num-prompts 2",
    "completions": "--completions 1",
    "seed": "--seed 7",
    "rm_model": "--rm-model REWARD",
    "prompts": "--prompts FEWER",
    "split": "--split 45/25/30",
    "prompt_length": "--prompt-length 44",
    "eval_text": "--eval-text README.md",
    "max_new_tokens": "--max-new-tokens 4",
    "temperature": "--temperature 2",
    "top_k": "--top-k 3",
    "top_p": "--top-p 0.2",
    "stop": "--stop e",
    "reward_func": "--reward-func length_penalty",
    "reward_weights": "--reward-weights 3",
}


@pytest.fixture(scope="module")
def evaluated(runs, start_model, reward_folder, pairs_file, tmp_path_factory):
    """Return a function that evaluates a run or a model and returns its report without date and command."""
    folder = tmp_path_factory.mktemp("evaluations")
    fewer = folder / "fewer.jsonl"
    fewer.write_text("\n".join(pairs_file.read_text().splitlines()[40:]))
    folders = {
        "START": make_start_model(folder / "start", seed=6),
        "REWARD": make_reward_model(folder / "reward", seed=6),
        "FEWER": fewer,
    }

    def observe(*flags, model=runs["ppo", 1]) -> str:
        words = ["--model-path", model, "--num-prompts", 4, "--completions", 2, "--output", folder / "out"]
        changed = {flag for flag in flags if str(flag).startswith("--")}
        kept = [w for pair in zip(words[::2], words[1::2], strict=True) if pair[0] not in changed for w in pair]
        evaluate_generations.main([str(folders.get(w, w)) for w in [*kept, *flags]])
        report = json.loads((folder / "out" / "evaluation.json").read_text(encoding="utf-8"))
        return json.dumps({k: v for k, v in report.items() if k in ("models", "start", "prompts")})

    return observe


@pytest.fixture(scope="module")
def default_report(evaluated):
    return evaluated()


@pytest.mark.ci
@pytest.mark.parametrize("name", EVALUATION_SETTINGS)
def test_setting_changes_an_evaluation(evaluated, default_report, name):
    assert evaluated(*EVALUATION_SETTINGS[name].split()) != default_report


def test_repeated_evaluation_does_not_differ(evaluated, default_report):
    assert evaluated() == default_report


def test_rollout_engine_of_an_evaluation(evaluated, default_report, monkeypatch):
    plain = engine._sample_plain
    called = []
    monkeypatch.setattr(engine, "_sample_plain", lambda *a: called.append(1) or plain(*a))
    evaluated()
    assert not called
    assert evaluated("--rollout-engine", "plain") == default_report and called


def test_like_selects_the_settings_for_a_model_without_a_run(evaluated, start_model, reward_folder, pairs_file):
    """The demo's temperature is 1, the default recipe's 0.7."""
    words = ["--rm-model", reward_folder, "--prompts", pairs_file, "--split", "45/45/10"]
    one, other = (evaluated(*words, "--like", name, model=start_model) for name in ("demo", "smollm2-orca"))
    assert one != other


def test_every_setting_of_the_evaluation_commands_is_tested():
    evaluation = {*EVALUATION_SETTINGS, *DATA, "like"}  # DATA: tests/analysis/test_own_prompts.py, too
    evaluation.add("trust_reward_code")  # tests/rewards/test_reward_code.py
    evaluation.add("rm_text")  # tests/analysis/test_judges.py
    evaluation.add("rollout_engine")  # test_rollout_engine_of_an_evaluation
    evaluation |= {"environment", "max_turns"}  # tests/environments/test_commands.py
    separate = {"model_path", "output", "tokens", "chat"}  # tests/reports/test_reports.py, tests/analysis/test_chat.py
    assert set(settings_of(EvaluationConfig)) == {*evaluation, *separate}
    assert set(settings_of(ComparisonConfig)) == {
        *evaluation,
        "runs",
        "arm",
        "few_shot",
        "limit_minutes",
        "full",
        "output",
    }  # tests/reports/test_reports.py
    assert set(settings_of(PlotConfig)) == {
        "runs",
        "arm",
        "x",
        "smooth",
        "output",
    }  # tests/reports/test_curve_plots.py
    assert set(settings_of(ExportConfig)) == {"run", "to", "output", "type", "which", "baseline"}  # tests/export
