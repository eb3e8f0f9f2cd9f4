"""Tests the commands, files and Python calls of the five reference systems, with tiny models. One section each."""

from __future__ import annotations

import json
import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from transformers import AutoModelForCausalLM, AutoTokenizer

import evaluate_generations
import plot_training_progress
import reward_model.train
import train_grpo
import train_ppo
from rlhf.algorithms.kl_control import kl_controller
from rlhf.analysis.curves import read_curves
from rlhf.api import make_trainer
from rlhf.checkpoints.model_folder import METRICS_FILE
from rlhf.checkpoints.run_record import RunRecord
from rlhf.checkpoints.token_record import read_tokens, recorded_updates
from rlhf.config import make_config, parse_cli
from rlhf.data.chat_template import encode_prompt
from rlhf.rewards.find import find_rule
from rlhf.settings.fields import settings_of
from rlhf.settings.training import Config
from rlhf.settings.translate import LENGTHS
from tests.shapes import make_base_model, make_reward_model, make_start_model

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--num-iterations", "3", "--max-new-tokens", "6", "--eval-prompts", "6"]  # only the size of the run


def value(config: Config, name: str) -> object:
    return getattr(getattr(config, settings_of(Config)[name].group), name)


def values(config: Config, names) -> dict[str, object]:
    return {name: value(config, name) for name in names}


# --- SmolLM2-orca PPO: SmolLM2-135M on orca pairs, the default recipe ------------------------------------------------


@pytest.fixture
def orca(tmp_path, pairs_file, monkeypatch) -> Path:
    """A folder where the recipe's hub names are folders and files."""
    monkeypatch.chdir(tmp_path)
    make_start_model(tmp_path / "HuggingFaceTB" / "smollm2-135M-SFT-Only")
    (tmp_path / "Intel").mkdir()
    shutil.copy(pairs_file, tmp_path / "Intel" / "orca_dpo_pairs")
    return tmp_path


@pytest.mark.ci
def test_smollm2_orca_commands(orca, capsys):
    """Reward model, PPO with all weights and with LoRA, GRPO, evaluation and curves. Flags set only the size."""
    reward_model.train.main(["--max-new-tokens", "6"])
    record = orca / "reward_model_output" / METRICS_FILE
    record.write_text(json.dumps({**json.loads(record.read_text()), "accuracy": 0.95}))  # random weights learn little
    train_ppo.main(SMALL)
    run = RunRecord.read(orca / "ppo_training_output")
    output = orca / "ppo_training_output"
    AutoModelForCausalLM.from_pretrained(output)
    AutoTokenizer.from_pretrained(output)
    assert (output / "config.json").is_file() and (output / "checkpoint-3").is_dir()
    scalars = read_curves(output).scalars
    assert {"loss", "rewards/mean", "kl_divergence", "learning_rate", "advantage/mean"} <= scalars.keys()
    assert run.status == "finished" and run.recipe == "smollm2-orca"

    train_ppo.main(["--use-lora", *SMALL])
    assert " ppo_training_output_1\n" in capsys.readouterr().out, "the old run was moved"
    assert (output / "adapter_model.safetensors").is_file() and not (output / "model.safetensors").exists()
    train_grpo.main([*SMALL, "--batch-size", "2"])

    evaluate_generations.main(["--model-path", "./ppo_training_output", "--num-prompts", "5"])
    report = json.loads((orca / "evaluation_output" / "evaluation.json").read_text(encoding="utf-8"))
    sampled = [prompt["sides"][1]["completions"] for prompt in report["prompts"]]
    assert len(sampled) == 5 and all(len(completions) == 4 for completions in sampled)
    assert {c["label"] for completions in sampled for c in completions} >= {"BEST", "MEDIUM", "WORST"}
    assert all(c["text"] is not None and c["score"] is not None for c in sampled[0])
    assert {"score", "score_of_best", "score_of_worst"} <= report["models"][0]["figures"].keys()

    plot_training_progress.main([])
    assert imread(orca / "training_progress.png").shape[1] == 1280
    assert (orca / "training_progress.csv").read_text().splitlines()[0].startswith("run,algorithm,seed,update")


SMOLLM2_ORCA_YAML = """
per_device_train_batch_size: 4
mini_batch_size: 2
gradient_accumulation_steps: 2
ppo_epochs: 4
init_kl_coef: 0.05
target: 6.0
gamma: 1.0
lam: 0.95
temperature: 0.7
top_p: 0.9
max_new_tokens: 128
gradient_checkpointing: true
bf16: false
save_total_limit: 1
use_lora: true
r: 16
lora_alpha: 32
target_modules: [q_proj, k_proj, v_proj, o_proj]
"""


def test_smollm2_orca_settings_file(tmp_path):
    (tmp_path / "a.yaml").write_text(SMOLLM2_ORCA_YAML)
    config = parse_cli(["--config", str(tmp_path / "a.yaml")])
    expected = {
        "batch_size": 4, "ppo_epochs": 4, "kl_coef": 0.05, "gamma": 1.0, "lam": 0.95, "temperature": 0.7,
        "top_p": 0.9, "max_new_tokens": 128, "gradient_checkpointing": True, "bf16": False, "keep": 1,
        "use_lora": True, "lora_r": 16, "lora_alpha": 32, "lora_targets": ("q_proj", "k_proj", "v_proj", "o_proj"),
        "micro_batch_size": 2, "minibatches": 1,
    }  # fmt: skip
    assert values(config, expected) == expected
    assert [str(t) for t in config.kl.targets] == ["6/sequence"] and config.kl.kl_schedule == "adaptive"


# flags -> (optimizer steps per pass over 8 episodes, episodes per forward pass). In TRL's first PPO, which has these
# names, an optimizer step uses mini_batch_size x gradient_accumulation_steps episodes, mini_batch_size at a time
ACCUMULATION = {
    "--mini-batch-size 2 --gradient-accumulation-steps 4": (1, 2),
    "--mini-batch-size 2 --gradient-accumulation-steps 2": (2, 2),
    "--mini-batch-size 2": (4, 2),
    "--gradient-accumulation-steps 4": (1, 2),
    "--micro-batch-size 2": (1, 2),
    "--minibatches 2 --micro-batch-size 1": (2, 1),
}


@pytest.mark.parametrize("words", ACCUMULATION)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_gradient_accumulation_with_smollm2_orca_names(words, algorithm):
    size = ["--batch-size", "8"] if algorithm == "ppo" else ["--batch-size", "2", "--K", "4"]
    config = parse_cli([*size, *words.split()], algorithm)
    assert (config.batch.minibatches, config.batch.micro_batch_size) == ACCUMULATION[words]
    assert config.batch.gradient_accumulation_steps is None, "only minibatches and micro_batch_size are stored"


def test_gradient_accumulation_may_be_set_in_one_way_only(tmp_path, user_error):
    (tmp_path / "a.yaml").write_text("batch_size: 8\nmini_batch_size: 2\nminibatches: 1\n")
    with user_error("gradient_accumulation_steps", "a.yaml:3"):
        parse_cli(["--config", str(tmp_path / "a.yaml")])
    (tmp_path / "a.yaml").write_text("batch_size: 8\nmini_batch_size: 2\n")
    later = parse_cli(["--config", str(tmp_path / "a.yaml"), "--minibatches", "2"])
    assert (later.batch.minibatches, later.batch.micro_batch_size) == (2, 2), (
        "the later layer replaces the earlier one"
    )
    with user_error("--micro-batch-size", "--gradient-accumulation-steps"):
        parse_cli(["--mini-batch-size", "3"])
    with user_error("mini_batch_size", "--mini-batch-size", "--micro-batch-size"):
        parse_cli(["--micro-batch-size", "1", "--mini-batch-size", "1"])


# --- MLX phased-KL PPO and MLX phased-KL GRPO ------------------------------------------------------------------------

PHASED = {
    "ppo": """--actor-model checkpoints/sft_merged_model --rm-model checkpoints/rm_model_bt
        --prompts data/processed/rl/rl_prompts.jsonl --seed 42 --num-iterations 800
        --clip-range 0.2 --value-coef 0.5 --entropy-coef 0.01 --kl-schedule phased --output checkpoints/ppo_seed42""",
    "grpo": """--actor-model checkpoints/sft_merged_model --rm-model checkpoints/rm_model_bt
        --prompts data/processed/rl/rl_prompts.jsonl --seed 42 --K 6 --num-iterations 800
        --clip-range 0.2 --kl-schedule phased --output checkpoints/grpo_seed42""",
}
MAINS = {"ppo": train_ppo.main, "grpo": train_grpo.main}


@pytest.fixture
def phased(tmp_path, start_model, monkeypatch) -> Path:
    """The folders of the two systems, with tiny models and 200 prompts without pairs."""
    monkeypatch.chdir(tmp_path)
    make_start_model(tmp_path / "checkpoints" / "sft_merged_model")
    make_reward_model(tmp_path / "checkpoints" / "rm_model_bt")
    prompts = tmp_path / "data" / "processed" / "rl" / "rl_prompts.jsonl"
    prompts.parent.mkdir(parents=True)
    prompts.write_text("\n".join(json.dumps({"prompt": f"question {i}?"}) for i in range(200)))
    return tmp_path


@pytest.mark.parametrize("algorithm", MAINS)
def test_mlx_phased_kl_flags(algorithm):
    """Without the recipe, `--kl-schedule phased` sets their three targets, one per third of the run."""
    config = parse_cli(shlex.split(PHASED[algorithm]), algorithm)
    expected = {"actor_model": "checkpoints/sft_merged_model", "num_iterations": 800, "clip_range": 0.2, "seed": 42}
    assert values(config, expected) == expected
    phases = kl_controller(config, 800).phases
    assert [(a, b, str(target)) for a, b, target in phases] == [
        (1, 267, "0.05/token"), (268, 533, "0.02/token"), (534, 800, "0.01/token")
    ]  # fmt: skip
    specific = {"K": 6} if algorithm == "grpo" else {"value_coef": 0.5, "entropy_coef": 0.01}
    assert values(config, specific) == specific


@pytest.mark.parametrize("algorithm", MAINS)
def test_mlx_phased_kl_commands_run(phased, algorithm):
    """Every evaluation (in the recipe every 50 updates) records perplexity, KL and peak memory."""
    words = [*shlex.split(PHASED[algorithm]), *SMALL, "--batch-size", "2", "--eval-every", "2"]
    MAINS[algorithm](words)
    output = phased / "checkpoints" / f"{algorithm}_seed42"
    assert parse_cli(["--recipe", "phased-kl"], algorithm).run.eval_every == 50
    evaluations = RunRecord.read(output).best.evaluations
    assert [e["update"] for e in evaluations] == [0, 2, 3]
    assert all(e["perplexity"] > 1 and e["kl"] is not None and e["peak_memory_gib"] > 0 for e in evaluations)
    scalars = read_curves(output).scalars
    assert {"eval/perplexity", "eval/kl_divergence/token", "memory/peak_gib"} <= scalars.keys()


@pytest.mark.ci
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_mlx_phased_kl_recipe_matches_their_tables(phased, algorithm):
    """4-bit weights, LoRA r 16, score at EOS, best checkpoint by KL gate and perplexity. Two seeds in one command."""
    config = parse_cli(["--recipe", "phased-kl"], algorithm)
    table = {"clip_range": 0.2, "ppo_epochs": 1, "max_grad_norm": 0.5, "lora_r": 16, "load_in_4bit": True,
             "use_lora": True, "normalize_scores": True, "score_ema": 0.99, "best_rule": "perplexity",
             "num_iterations": 800, "entropy_coef": 0.01 if algorithm == "ppo" else 0.0}  # fmt: skip
    table |= {"gamma": 0.99, "lam": 0.95, "kl_penalty_at": "eos"} if algorithm == "ppo" else {"K": 6}
    assert values(config, table) == table
    MAINS[algorithm](["--recipe", "phased-kl", *SMALL, "--batch-size", "2", "--seeds", "42", "123"])
    outputs = [phased / f"{algorithm}_training_output_seed{seed}" for seed in (42, 123)]
    assert all(RunRecord.read(output).status == "finished" for output in outputs)
    assert (outputs[0] / "adapter_model.safetensors").is_file()


def test_mlx_phased_kl_setting_names(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "kl_schedule: phased\ngae_gamma: 0.99\ngae_lambda: 0.9\ntarget_kl: [0.05, 0.02, 0.01]\nnormalizer_alpha: 0.9\n"
        "max_grad_norm: 0.5\nclip_range: 0.1\nvalue_coef: 0.5\nentropy_coef: 0.01\nppo_epochs: 1\ngroup_size: 6\n"
    )
    config = parse_cli(["--config", str(tmp_path / "a.yaml")])
    assert parse_cli(["--config", str(tmp_path / "a.yaml")], "grpo").batch.K == 6
    expected = {"gamma": 0.99, "lam": 0.9, "score_ema": 0.9, "normalize_scores": True, "max_grad_norm": 0.5,
                "clip_range": 0.1, "value_coef": 0.5, "entropy_coef": 0.01, "ppo_epochs": 1}  # fmt: skip
    assert values(config, expected) == expected
    assert [str(target) for target in config.kl.targets] == ["0.05/token", "0.02/token", "0.01/token"]


# --- MLX token-level PPO: tokens, Python, plain text -----------------------------------------------------------------

TLDR = [f"SUBREDDIT: r/advice\nTITLE: question {i}\nPOST: it is a long story about {i}\nTL;DR:" for i in range(30)]


@pytest.fixture
def base_model(tmp_path) -> Path:
    """A base model with a chat template in its tokenizer, as Qwen's base model has."""
    folder = make_base_model(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tldr(base_model, reward_folder, tmp_path):
    """Return a function that makes the recipe's Config for a tiny run. Settings have the names of its PPOConfig."""

    def make(**settings):
        tiny = {"model_name": str(base_model), "rm_model": str(reward_folder), "max_new_tokens": 6, "save_every": 1,
                "num_iterations": 2, "output": str(tmp_path / "run"), "allow_weak_reward_model": True}  # fmt: skip
        return make_config("qwen3-tldr", **{**tiny, **settings})

    return make


def test_mlx_token_level_setting_names():
    names = {"model_name": "Qwen/Qwen3-0.6B-Base", "max_new_tokens": 50, "batch_size": 4, "learning_rate": 1e-5,
             "kl_coef": 0.1, "gamma": 0.99, "lam": 0.95, "clip_epsilon": 0.2, "lora_r": 16, "lora_alpha": 32,
             "lora_dropout": 0.1}  # fmt: skip
    assert make_config("qwen3-tldr") == make_config("qwen3-tldr", **names), "the recipe equals its PPOConfig"
    other = make_config("qwen3-tldr", max_new_tokens=100, kl_coef=0.2, clip_epsilon=0.1, num_epochs=20)
    assert (other.sampling.max_new_tokens, other.batch.clip_range, other.run.epochs) == (100, 0.1, 20)
    assert not other.kl.steered, "its beta is fixed"


def test_mlx_token_level_reward_functions_equal_its_reward_model(tldr):
    """-0.1 per word and +0.2 for "helpful", in addition to the score. Expected values are computed by hand."""
    config = tldr()
    assert config.reward.reward_weights == (1.0, 0.1, 0.2)
    rules = [find_rule(name, config.reward.keywords) for name in config.reward.reward_func]
    for text, expected in (("a helpful, short one", -0.4 + 0.2), ("two words", -0.2), ("", 0.0)):
        scores = [rule(completions=[text])[0] for rule in rules]
        assert sum(w * s for w, s in zip((0.1, 0.2), scores, strict=True)) == pytest.approx(expected)


def test_mlx_token_level_command(base_model, reward_folder, tmp_path):
    """Prompts are plain text despite the tokenizer's template, also in the saved one. Every token is recorded."""
    (tmp_path / "posts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in TLDR))
    words = ["--recipe", "qwen3-tldr", "--actor-model", base_model, "--rm-model", reward_folder, "--prompts",
             tmp_path / "posts.jsonl", "--output", tmp_path / "run", "--record-tokens", *SMALL]  # fmt: skip
    train_ppo.main([str(word) for word in words])
    run = RunRecord.read(tmp_path / "run")
    assert run.status == "finished" and run.flat_settings["lora_dropout"] == 0.1
    row = read_tokens(recorded_updates(tmp_path / "run", "-")[0])[0]
    assert row["state"].endswith("TL;DR:") and "<|im_start|>" not in row["state"]
    saved = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert saved.chat_template is None
    assert saved.decode(encode_prompt(saved, [{"role": "user", "content": TLDR[0]}])).endswith("TL;DR:")


# fields of its SAPair and of its advantage module -> our column
SAPAIR = {
    "state_text": "state", "action_token": "token", "action_token_id": "token_id", "logprob": "logprob",
    "ref_logprob": "ref_logprob", "kl_div": "kl", "value": "value", "advantage": "advantage",
    "reward_to_go": "return", "prompt_idx": "prompt_index", "step": "step", "td_error": "td_error",
}  # fmt: skip


def test_mlx_token_level_state_action_pairs_are_in_the_token_record(runs):
    rows = read_tokens(recorded_updates(runs["ppo", 1], "-")[0])
    for theirs, ours in SAPAIR.items():
        kind = (str,) if theirs in ("state_text", "action_token") else (int, float)
        assert all(isinstance(row[ours], kind) for row in rows), theirs
    for row, after in pairwise(rows):
        if row["episode"] == after["episode"]:
            assert (after["step"], after["prompt_index"]) == (row["step"] + 1, row["prompt_index"])
            assert after["state"].startswith(row["state"][:20])
        assert row["kl"] == pytest.approx(row["logprob"] - row["ref_logprob"], abs=1e-6)
        assert row["return"] == pytest.approx(row["advantage"] + row["value"], abs=1e-5), "G_t = A_t + V(s_t)"


# its metrics -> ours
METRICS = {"avg_reward": "rewards/mean", "policy_loss": "policy/loss", "value_loss": "value/loss",
           "kl_div": "kl_divergence"}  # fmt: skip


class CustomRewardModel(torch.nn.Module):
    """As in that system: a learned part and rules, computed from token ids. This one scores all rows of a batch."""

    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer, self.weight = tokenizer, torch.nn.Parameter(torch.tensor(0.01))

    def forward(self, input_ids, attention_mask=None):
        texts = [self.tokenizer.decode(row) for row in input_ids]
        rules = torch.tensor([-0.1 * len(text.split()) + 0.2 * ("helpful" in text.lower()) for text in texts])
        return self.weight * (input_ids * attention_mask).sum(1) / 1000 + rules


def test_mlx_token_level_python_api(tldr, base_model, tmp_path):
    """prompts, num_epochs, a custom reward model, on_epoch_end, evaluate(prompts), save_model and load_model."""
    received = []

    def on_epoch_end(epoch, metrics):
        received.append((epoch, {theirs: metrics[ours] for theirs, ours in METRICS.items()}))

    tokenizer = AutoTokenizer.from_pretrained(base_model)
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.chat_template = None
    trainer = make_trainer(
        tldr(num_epochs=2, num_iterations=None), TLDR[:8], rewards=[CustomRewardModel(tokenizer)],
        callbacks=[on_epoch_end],
    )  # fmt: skip
    results = trainer.train()
    assert [epoch for epoch, _ in received] == [1, 2]
    assert all(isinstance(number, float) for _, metrics in received for number in metrics.values())
    assert set(METRICS.values()) <= results.keys()
    before = trainer.evaluate(TLDR[8:12])
    assert {"eval/score", "eval/kl_divergence"} <= before.keys()
    trainer.save_model(tmp_path / "saved")
    with torch.no_grad():
        for weight in trainer.host.model.parameters():
            if weight.requires_grad:
                weight.add_(0.1)
    assert trainer.evaluate(TLDR[8:12]) != before
    trainer.load_model(tmp_path / "saved")
    assert trainer.evaluate(TLDR[8:12])["eval/score"] == pytest.approx(before["eval/score"], abs=1e-6)


# --- rank-1 voice PPO: rank 1, topic by topic ------------------------------------------------------------------------

RANK_1_VOICE_YAML = """
# configs/ppo.yaml

ppo:
  learning_rate: 1.41e-5
  batch_size: 4
  ppo_epochs: 4
  init_kl_coef: 0.2
  target_kl: 6.0
  cliprange: 0.2
  steps_per_topic: 50

lora:
  rank: 1
  alpha: 1.0
  target_modules: ["o_proj", "v_proj", "up_proj", "down_proj"]
"""
RANK_1_VOICE_SETTINGS = {
    "learning_rate": 1.41e-5, "batch_size": 4, "ppo_epochs": 4, "kl_coef": 0.2, "clip_range": 0.2,
    "steps_per_topic": 50, "use_lora": True, "lora_r": 1, "lora_alpha": 1.0,
    "lora_targets": ("o_proj", "v_proj", "up_proj", "down_proj"),
}  # fmt: skip


@pytest.fixture
def rank_1_file(tmp_path) -> Path:
    file = tmp_path / "configs" / "ppo.yaml"
    file.parent.mkdir()
    file.write_text(RANK_1_VOICE_YAML)
    return file


@pytest.mark.parametrize("algorithm", MAINS)
def test_rank_1_voice_file_nested_or_flat(rank_1_file, tmp_path, algorithm):
    flat = tmp_path / "flat.yaml"
    lines = [line.strip() for line in RANK_1_VOICE_YAML.splitlines() if line.startswith("  ")]
    flat.write_text("\n".join([*lines, "use_lora: true"]))
    recipe = parse_cli(["--recipe", "rank1-voice"], algorithm)
    for config in (*(parse_cli(["--config", str(file)], algorithm) for file in (rank_1_file, flat)), recipe):
        assert values(config, RANK_1_VOICE_SETTINGS) == RANK_1_VOICE_SETTINGS
        assert [str(target) for target in config.kl.targets] == ["6/sequence"]
        assert config.kl.kl_schedule == "adaptive" and values(config, LENGTHS) == dict.fromkeys(LENGTHS)
        assert config.updates(1_000, topics=7) == 350


def test_shipped_file_equals_rank_1_voice_file():
    assert (ROOT / "configs" / "ppo.yaml").read_text(encoding="utf-8") == RANK_1_VOICE_YAML.lstrip("\n")


def test_lora_block_turns_adapters_on_unless_use_lora_is_false(rank_1_file, tmp_path):
    def use_lora(text, *words):
        rank_1_file.write_text(text)
        return parse_cli(["--config", str(rank_1_file), *words]).model.use_lora

    assert use_lora(RANK_1_VOICE_YAML) and not use_lora(RANK_1_VOICE_YAML, "--no-use-lora")
    assert not use_lora(RANK_1_VOICE_YAML + "  use_lora: false\n") and not use_lora(
        "use_lora: false" + RANK_1_VOICE_YAML
    )
    assert not use_lora("rank: 1\n") and use_lora("model:\n  lora:\n    rank: 1\n")


def test_bare_kl_target_is_allowed_only_with_reference_names(rank_1_file, user_error):
    for text, expected in (("init_kl_coef: 0.2\ntarget_kl: 6.0", ["6/sequence"]), ("target: 5", ["5/sequence"]),
                           ("target_kl: 0.1/token", ["0.1/token"])):  # fmt: skip
        rank_1_file.write_text(text)
        assert [str(t) for t in parse_cli(["--config", str(rank_1_file)]).kl.targets] == expected
    for words in (["--kl-target", "6"], ["--target-kl", "-6"], ["--target", "six"]):
        with user_error("/sequence", "/token"):
            parse_cli(words)


def test_rank_1_voice_command(rank_1_file, start_model, reward_folder, tmp_path, capsys):
    rows = [{"prompt": f"Say {i} about {topic}.", "topic": topic} for i in range(20) for topic in ("bread", "boats")]
    (tmp_path / "voice.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["--config", rank_1_file, "--actor-model", start_model, "--rm-model", reward_folder, "--prompts",
             tmp_path / "voice.jsonl", "--output", tmp_path / "run", *SMALL, "--steps-per-topic", 2,
             "--num-iterations", 5]  # fmt: skip
    train_ppo.main([str(word) for word in words])
    output = capsys.readouterr().out
    assert "LoRA r 1, alpha 1 on o_proj, v_proj, up_proj, down_proj" in output
    (line,) = [line for line in output.splitlines() if "2, 2 updates per topic" in line]
    assert ": bread (" in line
    scalars = read_curves(tmp_path / "run").scalars
    assert scalars["topic/bread/score"].updates.tolist() == [1, 2, 5]
    assert scalars["topic/boats/score"].updates.tolist() == [3, 4]
    adapter = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (1, 1.0)
