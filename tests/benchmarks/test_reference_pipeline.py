"""Tests of benchmarks/reference_pipeline.py without real weights: the parts of the data are disjoint, the commands of
all stages are valid, finished runs are skipped, and the tables have the figures of the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import reference_pipeline, reference_pipeline_data
from benchmarks.real_smollm2 import SESSION
from benchmarks.reference_pipeline import STAGES, main
from benchmarks.reference_pipeline_data import DPO_LENGTH, MODEL, SPLIT, prepare
from benchmarks.reference_pipeline_report import tables
from benchmarks.reference_pipeline_runs import KINDS, RECIPE, RECIPES
from rlhf.config import parse_cli
from rlhf.data.examples import load_examples
from rlhf.data.splits import question_hash, split_examples
from rlhf.settings.evaluation import parse_comparison_cli
from rlhf.settings.reward_model import parse_reward_cli
from rlhf.utils.errors import RunError
from rlhf.utils.files import write_json

RECORD = {
    "accuracy": 0.75, "margin": 0.5, "length_baseline": 0.5, "accuracy_against_baseline": None, "pairs": 8,
    "calibration": {"scale": {"mean": 0.25, "std": 2.0}}, "train_questions": ["a", "b"], "settings": {},
}  # fmt: skip
FIGURES = {"score": 1.0, "judge": 0.5, "kl": 2.0, "length": 30.0, "eos_rate": 0.5, "perplexity": 4.0}
COMPARISON = {
    "figures": {
        "start": FIGURES | {"kl": 0.0},
        "GRPO": {"42": FIGURES, "123": FIGURES | {"score": 3.0}},
        "DPO": {"42": FIGURES},
        "best-of-4": {"best-of-4": {"score": 1.5, "judge": None}},
    },
    "warnings": ["GRPO, seed 42: longer", "GRPO, seed 123: longer", "DPO, seed 42: less variety"],
    "samples": [{"messages": "a text of the pairs"}],
}  # fmt: skip


@pytest.fixture
def tokenizer_of_tests(start_model, monkeypatch):
    """Use the tests' start model in place of SmolLM2."""
    for module in (reference_pipeline, reference_pipeline_data):
        monkeypatch.setattr(module, "MODEL", str(start_model))


@pytest.fixture
def commands(tokenizer_of_tests, monkeypatch) -> list[list[str]]:
    """Return the list of the commands that the script runs. They write what the script reads afterwards."""
    started: list[list[str]] = []

    def train(words, log: Path, environment):
        assert int(environment["OMP_NUM_THREADS"]) == torch.get_num_threads()
        started.append(list(words))
        log.write_text(f"{SESSION}{json.dumps({'busy_before_percent': 1.0})}\n")
        if "--rm-output" in words:
            write_json(Path(words[words.index("--rm-output") + 1], "metrics.json"), RECORD)
        elif Path(words[0]).name == "trl":
            Path(words[words.index("--output_dir") + 1]).mkdir()
        elif words[0] == "compare_runs.py":
            write_json(Path(words[words.index("--output") + 1], "comparison.json"), COMPARISON)

    def measure(training, arguments, say):
        if (arguments.results / f"{training.name}.json").is_file():
            return
        words = ["--recipe", arguments.recipe, *training.words, *arguments.more, "--seed", str(training.seed)]
        started.append([f"train_{training.algorithm}.py", *words])
        write_json(arguments.results / f"{training.name}.json", {"kind": training.kind})
        (arguments.runs / training.name).mkdir()

    monkeypatch.setattr(reference_pipeline, "train", train)
    monkeypatch.setattr(reference_pipeline, "measure", measure)
    return started


def test_parts_are_disjoint_and_complete(pairs_file, tokenizer_of_tests, tmp_path):
    """Both reward models have other pairs, and share the prompts of RL and of the evaluation."""
    prepare(pairs_file, tmp_path)
    reward, judge = (
        split_examples(load_examples(str(tmp_path / f"pairs_{name}.jsonl")), SPLIT) for name in ("reward", "judge")
    )
    hashes = {part: [{question_hash(p) for p in parts[part]} for parts in (reward, judge)] for part in reward}
    assert hashes["rl"][0] == hashes["rl"][1] and hashes["evaluation"][0] == hashes["evaluation"][1]
    every = [*hashes["reward"], hashes["rl"][0], hashes["evaluation"][0]]
    assert min(map(len, every)) > 5
    assert sum(map(len, every)) == len(set.union(*every)) == 120
    trained = load_examples(str(tmp_path / "dpo_pairs"), pairs=True)
    assert {question_hash(p) for p in trained} == hashes["reward"][0]


def test_dpo_gets_no_long_pair(pairs_file, tokenizer_of_tests, tmp_path, monkeypatch):
    monkeypatch.setattr(reference_pipeline_data, "DPO_LENGTH", 1)
    prepare(pairs_file, tmp_path)
    assert (tmp_path / "dpo_pairs" / "train.jsonl").read_text() == ""


def test_script_and_recipe_have_the_same_split_lengths_and_model():
    reward = parse_reward_cli(["--recipe", RECIPE])
    run = parse_cli(["--recipe", RECIPE], "grpo")
    assert reward.data.split == run.data.split == SPLIT
    assert reward.data.pair_length >= DPO_LENGTH
    assert {reward.training.base_model, reward.calibration.actor_model, run.model.actor_model} == {MODEL}
    assert reward.sampling.max_new_tokens == run.sampling.max_new_tokens


def test_commands_of_all_stages_are_valid(pairs_file, commands, tmp_path):
    """The first call runs every command once, the second one none."""
    from trl import DPOConfig, ModelConfig, ScriptArguments, TrlParser

    results = tmp_path / "results"
    for _ in range(2):
        for stage in STAGES:
            main([str(pairs_file), "--stage", stage, "--runs", str(tmp_path), "--results", str(results)])
    scripts = [Path(words[0]).name for words in commands]
    seeds = set()
    algorithms = [name for names, _ in RECIPES.values() for name in names]
    assert scripts[:2] == ["train.py"] * 2
    for name, words in zip(scripts, commands, strict=True):
        if name == "train.py":
            config = parse_reward_cli(words[1:])
            seeds.add(config.training.rm_seed)
            assert "reward" in config.data.pairs or "judge" in config.data.pairs
        elif name == "trl":
            parsed = TrlParser((ScriptArguments, DPOConfig, ModelConfig)).parse_args_and_config(words[2:])
            assert parsed[2].use_peft and parsed[0].dataset_name == str(tmp_path / "dpo_pairs")
        elif name == "compare_runs.py":
            config = parse_comparison_cli(words[1:])
            arms = [arm.name for arm in config.comparison.arm]
            assert arms == [*["GRPO"] * 3, *["PPO"] * 3, *["RLOO"] * 3, "GRPO all weights", *["DPO"] * 3, "best-of-4"]
        else:
            config = parse_cli(words[1:], name.removeprefix("train_").removesuffix(".py"))
            assert config.model.rm_model == str(tmp_path / "reward_model") and config.data.split == SPLIT
            assert config.data.prompt_length == 64 and config.sampling.max_new_tokens == 32
    assert len(seeds) == 2, "the judge has another initial head"
    assert scripts.count("trl") == 3 and scripts.count("compare_runs.py") == 1
    assert len(scripts) == 2 + 3 * (len(KINDS) - 1) + 1 + 3 + 1 + len(algorithms)
    assert "samples" not in json.loads((results / "comparison.json").read_text())


def test_a_run_that_fails_does_not_stop_the_others_and_is_missed_by_the_comparison(
    pairs_file, commands, tmp_path, monkeypatch, user_error
):
    good = reference_pipeline.measure

    def measure(training, arguments, say):
        if training.name == "grpo_42":
            raise RunError("the training failed")
        good(training, arguments, say)

    monkeypatch.setattr(reference_pipeline, "measure", measure)
    words = [str(pairs_file), "--runs", str(tmp_path), "--results", str(tmp_path / "results"), "--seeds", "42"]
    with pytest.raises(RunError, match="the training failed"):
        main([*words, "--stage", "runs"])
    assert {Path(name).stem for name in (tmp_path / "results").iterdir()} == {
        "ppo_42",
        "rloo_42",
        "grpo_all_weights_42",
    }
    main([*words, "--stage", "dpo"])
    with user_error("--runs", "grpo_42"):
        main([*words, "--stage", "compare"])


def test_conversations_with_one_beginning_have_one_pair(tokenizer_of_tests, tmp_path):
    turns = [[{"role": "user", "content": f"question {i}"}] for i in range(40)]
    longer = [[*chat, {"role": "assistant", "content": "a"}, {"role": "user", "content": "more?"}] for chat in turns]
    rows = [{"prompt": chat, "chosen": "yes", "rejected": "no"} for chat in (*turns, *longer)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    prepare(tmp_path / "pairs.jsonl", tmp_path)
    written = [load_examples(str(tmp_path / f"pairs_{name}.jsonl"), pairs=True) for name in ("reward", "judge")]
    assert len({question_hash(pair) for pairs in written for pair in pairs}) == 40


def test_every_run_has_32_completions_per_update_and_one_kl_target():
    for algorithm, flags in KINDS.values():
        config = parse_cli(["--recipe", RECIPE, *flags], algorithm)
        assert config.batch.batch_size * (config.batch.K or 1) == 32
        assert [str(target) for target in config.kl.targets] == ["2/sequence"]
        assert config.model.use_lora == (not flags)


def test_tables_have_the_figures_of_the_files(tmp_path):
    low_high = {"low": 0.4, "high": 0.9}
    times = {"seconds": 90.0, "cpu_seconds": 180.0}
    model = {"name": "judge_model", "kind": "reward model", "train_pairs": 2, **RECORD, **low_high, **times}
    evaluations = [{"update": 0, "kl": 0.0, "perplexity": 4.0}, {"update": 6, "kl": 1.5, "perplexity": 5.0}]
    run = {"kind": "recipe", "recipe": "phased-kl", "algorithm": "ppo", "evaluations": evaluations}
    run |= {"accuracy": {"before": -0.5, "after": 0.25}, "seconds": {"total": 30.0}}
    files = {"judge_model": model, "comparison": {**COMPARISON, "kind": "comparison"}, "recipe_phased-kl_ppo": run}
    files |= {"dpo_42": {"name": "dpo_42", "kind": "dpo", **times}}
    files |= {f"grpo_{s}": {"kind": "grpo", "seconds": {"total": s, "cpu": 2 * s}} for s in (60.0, 120.0)}
    for name, facts in files.items():
        write_json(tmp_path / f"{name}.json", facts)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables(tmp_path).splitlines()]
    found = {row[0]: row[1:] for row in rows}
    assert found["judge_model"] == ["2", "8", "75.0 (40.0 to 90.0)", "50.0", "-", "0.50", "+0.25, 2.00", "1.5", "3.0"]
    assert found["GRPO"][:3] == ["2", "+2.000 (+1.000 to +3.000)", "0.500"]
    assert found["GRPO"][-3:] == ["2", "1.5", "3.0"]
    assert found["DPO"][-3:] == ["1", "1.5", "3.0"]
    assert found["start"][-3:] == ["-", "-", "-"] and found["best-of-4"][2] == "-"
    assert found["best-of-4"][-3:] == ["-", "-", "-"]
    assert found["phased-kl"] == ["PPO", "6", "-0.50", "+0.25", "1.50", "1.25", "0.5"]


def test_no_file_is_a_user_error(tmp_path, user_error):
    with user_error("--results", "no JSON files"):
        tables(tmp_path)
