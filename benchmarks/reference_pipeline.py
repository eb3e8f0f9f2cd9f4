"""Runs the reference pipeline with real weights: reward models, RL, DPO, a comparison. One JSON file per finished run.

    python benchmarks/reference_pipeline.py pairs.jsonl                     all stages but recipes, in order
    python benchmarks/reference_pipeline.py pairs.jsonl --stage runs        one stage
    python benchmarks/reference_pipeline.py pairs.jsonl --stage recipes     the other reference recipes, a few updates
    python benchmarks/reference_pipeline.py --table                         Markdown tables of the JSON files

The file has preference pairs. After an interruption, start the same command again: a run with a JSON file is skipped.
Flags after `--` are passed to every command of the stage. The settings are in benchmarks/reference_pipeline.yaml.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder

from benchmarks.demo_runs import PROJECT, SEEDS
from benchmarks.real_smollm2 import Training, measure, sessions_of, train
from benchmarks.reference_pipeline_data import MODEL, REWARD_MODELS, SPLIT, pairs_file, prepare
from rlhf.utils.console import Screen, quiet_libraries
from rlhf.utils.errors import UserError, run_command
from rlhf.utils.files import write_json

RESULTS = PROJECT / "benchmarks" / "results" / "reference_pipeline"
RECIPE = os.path.relpath(PROJECT / "benchmarks" / "reference_pipeline.yaml")  # relative: JSON files have the command
ALL_WEIGHTS = ("--no-use-lora", "--learning-rate", "3e-5")
# kind -> algorithm, flags. GRPO is first, because the comparison compares each arm with the first one
KINDS = {
    "grpo": ("grpo", ()),
    "ppo": ("ppo", ()),
    "rloo": ("rloo", ()),
    "grpo_all_weights": ("grpo", ALL_WEIGHTS),
}
ADAPTER = ("--use_peft", "--lora_r", "16", "--lora_alpha", "32")  # as in RL
DPO = (
    *("dpo", *ADAPTER, "--lora_target_modules", "q_proj", "k_proj", "v_proj", "o_proj", "--learning_rate", "1e-4"),
    *("--num_train_epochs", "1", "--per_device_train_batch_size", "8", "--gradient_checkpointing", "false"),
    *("--logging_steps", "5", "--use_cpu", "--bf16", "false", "--report_to", "none"),
)
# recipe -> algorithms, settings that are replaced in addition to those of all recipes
RECIPES = {
    "phased-kl": (("ppo", "grpo"), ()),
    "rank1-voice": (("ppo",), ("--steps-per-topic", "3")),
    "qwen3-tldr": (("ppo",), ("--no-plain-prompts",)),
    "smollm2-orca": (("ppo",), ()),
}
SHORT = (
    *("--actor-model", MODEL, "--allow-weak-reward-model", "--split", str(SPLIT), "--prompt-length", "64"),
    *("--max-new-tokens", "32", "--num-iterations", "6", "--eval-prompts", "32", "--eval-every", "3"),
)


def main(argv: list[str] | None = None) -> None:
    arguments = parse(sys.argv[1:] if argv is None else argv)
    quiet_libraries()
    screen = Screen()
    if arguments.table:
        from benchmarks.reference_pipeline_report import tables

        print(tables(arguments.results))
        return
    if arguments.file is None:
        raise UserError("no file of preference pairs: command line. Give its path first")
    prepare(arguments.file, arguments.runs)
    for stage in [arguments.stage] if arguments.stage else list(STAGES)[:-1]:
        STAGES[stage](arguments, screen.say)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("file", type=Path, nargs="?", help="file of preference pairs")
    parser.add_argument("--stage", choices=STAGES, help="run this stage only")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="seeds of RL and DPO (42 123 777)")
    parser.add_argument("--runs", type=Path, default=Path("reference_pipeline_runs"), help="folder of all runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--table", action="store_true", help="print Markdown tables of the JSON files")
    end = argv.index("--") if "--" in argv else len(argv)
    found = parser.parse_args(argv[:end])
    found.more = list(argv[end + 1 :])
    return found


# --- stages ----------------------------------------------------------------------------------------------------------

Say = Callable[[str], None]


def once(arguments: argparse.Namespace, name: str, words: Sequence[str], say: Say) -> dict[str, Any]:
    """Run a command unless it has a JSON file. Returns the beginning of that file, or {} if it exists."""
    from benchmarks.machine import machine
    from rlhf.checkpoints.run_record import environment

    file, log = arguments.results / f"{name}.json", arguments.runs / f"{name}.log"
    if file.is_file():
        say(f"already measured: {file}")
        return {}
    say(f"running {name}, console output in {log}")
    before = os.times()
    train([*words, *arguments.more], log)
    after = os.times()
    times = {
        "seconds": after.elapsed - before.elapsed,
        "cpu_seconds": sum(after[2:4]) - sum(before[2:4]),  # of finished child processes
        "busy_before_percent": sessions_of(log)[-1]["busy_before_percent"],
    }
    shown = [os.path.basename(words[0]), *words[1:], *arguments.more]
    return {**environment(), "name": name, "command": shown, **times, "machine": machine("cpu")}


def reward_models(arguments: argparse.Namespace, say: Say) -> None:
    from scipy.stats import binomtest

    for part in REWARD_MODELS:
        name = f"{part}_model"
        folder = arguments.runs / name
        words = ["reward_model/train.py", "--recipe", RECIPE, "--pairs", str(pairs_file(arguments.runs, part))]
        words += ["--rm-output", str(folder), "--rm-overwrite"]
        found = once(arguments, name, words, say)
        if not found:
            continue
        record = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        trained = len(record.pop("train_questions"))
        record.pop("settings")
        right = round(record["accuracy"] * record["pairs"])
        low, high = binomtest(right, record["pairs"]).proportion_ci(method="wilson")
        facts = {**found, "kind": "reward model", "train_pairs": trained, **record, "low": low, "high": high}
        write_json(arguments.results / f"{name}.json", facts)


def trainings(folder: Path, seeds: Sequence[int]) -> list[Training]:
    """Return the RL runs, all kinds of the first seed first."""
    files = ("--prompts", str(pairs_file(folder, "reward")), "--rm-model", str(folder / "reward_model"))
    return [
        Training(f"{kind}_{seed}", kind, algorithm, seed, (*files, *flags))
        for seed in seeds
        for kind, (algorithm, flags) in KINDS.items()
        if kind != "grpo_all_weights" or seed == seeds[0]
    ]


def rl_runs(arguments: argparse.Namespace, say: Say) -> None:
    for training in trainings(arguments.runs, arguments.seeds):
        measure(training, argparse.Namespace(**vars(arguments), recipe=RECIPE), say)


def dpo(arguments: argparse.Namespace, say: Say) -> None:
    from rlhf.checkpoints.model_folder import find_model

    for seed in arguments.seeds:
        name, folder = f"dpo_{seed}", arguments.runs / f"dpo_{seed}"
        words = [str(Path(sysconfig.get_path("scripts"), "trl")), *DPO, "--model_name_or_path"]
        words += [find_model(MODEL, "--actor-model"), "--dataset_name", str(arguments.runs / "dpo_pairs")]
        words += ["--output_dir", str(folder), "--seed", str(seed)]
        found = once(arguments, name, words, say)
        if found:
            found["command"][found["command"].index("--model_name_or_path") + 1] = MODEL
            pairs = (arguments.runs / "dpo_pairs" / "train.jsonl").read_text(encoding="utf-8").count("\n")
            write_json(arguments.results / f"{name}.json", {**found, "kind": "dpo", "train_pairs": pairs})


def compare(arguments: argparse.Namespace, say: Say) -> None:
    """Compare all finished runs. The page stays in the folder of the runs, because it has texts of the pairs."""
    folder, work = arguments.runs / "comparison", arguments.runs
    names = [f"{kind}_{seed}" for kind in (*KINDS, "dpo") for seed in SEEDS]
    done = [name for name in names if (arguments.results / f"{name}.json").is_file()]
    runs = [str(work / name) for name in done if not name.startswith("dpo")]
    arms = [f"DPO={work / name}" for name in done if name.startswith("dpo")]
    words = ["compare_runs.py", *runs, "--arm", *arms, "best-of-4"]
    words += ["--judge-model", str(work / "judge_model"), "--num-prompts", "64", "--output", str(folder)]
    found = once(arguments, "comparison", words, say)
    if found:
        report = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
        del report["samples"]
        write_json(arguments.results / "comparison.json", {**report, **found, "kind": "comparison"})


def recipe_trainings(folder: Path) -> list[tuple[str, Training]]:
    """Return one short run per reference recipe and algorithm, with the recipe's name."""
    files = ("--prompts", str(pairs_file(folder, "reward")), "--rm-model", str(folder / "reward_model"))
    return [
        (recipe, Training(f"recipe_{recipe}_{algorithm}", "recipe", algorithm, SEEDS[0], (*SHORT, *files, *flags)))
        for recipe, (algorithms, flags) in RECIPES.items()
        for algorithm in algorithms
    ]


def recipes(arguments: argparse.Namespace, say: Say) -> None:
    for recipe, training in recipe_trainings(arguments.runs):
        measure(training, argparse.Namespace(**vars(arguments), recipe=recipe), say)


STAGES = {"reward-models": reward_models, "runs": rl_runs, "dpo": dpo, "compare": compare, "recipes": recipes}

if __name__ == "__main__":
    run_command(main)
