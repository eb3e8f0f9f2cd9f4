"""Runs the reference pipeline with real weights: reward models, RL, DPO, a comparison. One JSON file per finished run.

    python benchmarks/reference_pipeline.py pairs.jsonl                     all stages but recipes, in order
    python benchmarks/reference_pipeline.py pairs.jsonl --stage runs        one stage
    python benchmarks/reference_pipeline.py pairs.jsonl --stage recipes     the other reference recipes, a few updates
    python benchmarks/reference_pipeline.py --table                         Markdown tables of the JSON files

All stages need the same --runs, and --bf16 in all of them or in none. The file has preference pairs. After an
interruption, start the same command again: a run with a JSON file is skipped. Flags after `--` are passed to every
command of the stage. The settings are in benchmarks/reference_pipeline.yaml.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder

from scipy.stats import binomtest

from benchmarks.constants import ROOT, SEEDS
from benchmarks.real_smollm2 import measure, sessions_of, train
from benchmarks.reference_pipeline_data import MODEL, REWARD_MODELS, pairs_file, prepare
from benchmarks.reference_pipeline_runs import ARMS, RECIPE, recipe_trainings, trainings
from rlhf.checkpoints.model_folder import find_model
from rlhf.checkpoints.run_record import environment
from rlhf.utils.console import Screen, quiet_libraries
from rlhf.utils.errors import RunError, UserError, run_command
from rlhf.utils.files import write_json

Facts = dict[str, Any]  # the content of a JSON file
RESULTS = ROOT / "benchmarks" / "results" / "reference_pipeline"
DPO = (  # adapters as in RL
    *("dpo", "--use_peft", "--lora_r", "16", "--lora_alpha", "32", "--learning_rate", "3e-4"),
    *("--lora_target_modules", "q_proj", "k_proj", "v_proj", "o_proj"),
    *("--num_train_epochs", "1", "--per_device_train_batch_size", "8", "--gradient_checkpointing", "false"),
    *("--logging_steps", "5", "--report_to", "none"),
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
        raise UserError("no file of preference pairs", "command line", "Give its path first")
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
    parser.add_argument("--bf16", action="store_true", help="bfloat16 in all trainings (default: float32)")
    parser.add_argument("--table", action="store_true", help="print Markdown tables of the JSON files")
    end = argv.index("--") if "--" in argv else len(argv)
    found = parser.parse_args(argv[:end])
    found.more = list(argv[end + 1 :])
    found.precision = "--bf16" if found.bf16 else "--no-bf16"
    return found


# --- stages ----------------------------------------------------------------------------------------------------------

Say = Callable[[str], None]


def once(arguments: argparse.Namespace, name: str, words: Sequence[str], read: Callable[[], Facts], say: Say) -> None:
    """Run a command and write its JSON file, unless the file exists. `read` returns what the command made."""
    import torch

    from benchmarks.machine import machine

    file = arguments.results / f"{name}.json"
    log = arguments.runs / f"{name}.log"
    if file.is_file():
        say(f"already measured: {file}")
        return
    say(f"running {name}, console output in {log}")
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # without a GPU, trl's launcher would set 1
    words = [*words, *arguments.more]
    before = os.times()
    train(words, log, {**os.environ, **threads})
    after = os.times()
    times = {"seconds": after[4] - before[4], "cpu_seconds": sum(after[2:4]) - sum(before[2:4])}  # CPU: of children
    facts = {
        **environment(),
        **read(),
        **times,
        "name": name,
        "command": [os.path.basename(words[0]) if os.path.isabs(words[0]) else words[0], *words[1:]],
        "busy_before_percent": sessions_of(log)[-1]["busy_before_percent"],
        "machine": machine("cuda" if torch.cuda.is_available() else "cpu"),
    }
    start = json.dumps(find_model(MODEL, "--actor-model"))[1:-1]  # its folder in the cache of this machine
    write_json(file, json.loads(json.dumps(facts).replace(start, MODEL)))
    say(f"finished: {file}")


def run_all(works: Iterable[Callable[[], None]], say: Say) -> None:
    """Do all works, also after one that fails. Raises the last RunError at the end."""
    failure = None
    for work in works:
        try:
            work()
        except RunError as error:
            failure = error
            say(str(error))
    if failure:
        raise failure


def reward_models(arguments: argparse.Namespace, say: Say) -> None:
    for part, seed in REWARD_MODELS.items():
        name = f"{part}_model"
        words = ["reward_model/train.py", "--recipe", RECIPE, "--pairs", str(pairs_file(arguments.runs, part))]
        words += ["--rm-output", str(arguments.runs / name), "--rm-overwrite", "--rm-seed", str(seed)]
        words.append(arguments.precision)
        once(arguments, name, words, partial(reward_facts, arguments.runs / name), say)


def reward_facts(folder: Path) -> Facts:
    """Return the record of a reward model, with Wilson's interval of its accuracy over held-out pairs."""
    record = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    trained = len(record.pop("train_questions"))
    _ = record.pop("settings")
    found = binomtest(round(record["accuracy"] * record["pairs"]), record["pairs"]).proportion_ci(method="wilson")
    return {"kind": "reward model", "train_pairs": trained, **record, "low": found.low, "high": found.high}


def rl_runs(arguments: argparse.Namespace, say: Say) -> None:
    given = argparse.Namespace(**vars(arguments), recipe=RECIPE)
    run_all((partial(measure, training, given, say) for training in trainings(given)), say)


def dpo(arguments: argparse.Namespace, say: Say) -> None:
    import torch

    pairs = arguments.runs / "dpo_pairs"
    facts = {"kind": "dpo", "train_pairs": (pairs / "train.jsonl").read_text(encoding="utf-8").count("\n")}
    device = () if torch.cuda.is_available() else ("--use_cpu",)
    command = [str(Path(sysconfig.get_path("scripts"), "trl")), *DPO, *device, "--dataset_name", str(pairs)]
    command += ["--model_name_or_path", find_model(MODEL, "--actor-model"), "--bf16", str(arguments.bf16).lower()]

    def train_dpo(seed: int) -> None:
        words = [*command, "--output_dir", str(arguments.runs / f"dpo_{seed}"), "--seed", str(seed)]
        once(arguments, f"dpo_{seed}", words, lambda: facts, say)

    run_all((partial(train_dpo, seed) for seed in arguments.seeds), say)


def compare(arguments: argparse.Namespace, say: Say) -> None:
    """Compare all runs with the start model, and each arm with the first one. Raises UserError if a run is missing."""
    folder = arguments.runs / "comparison"
    work = arguments.runs
    names = [t.name for t in trainings(arguments)] + [f"dpo_{seed}" for seed in arguments.seeds]
    missing = [n for n in names if not ((work / n).is_dir() and (arguments.results / f"{n}.json").is_file())]
    if missing:
        raise UserError(f"not finished: {', '.join(missing)}", f"--runs {work}", "Run the stages runs and dpo first")
    arms = [
        f"{label}={work / name}" for kind, label in ARMS.items() for name in names if name.rpartition("_")[0] == kind
    ]
    words = ["compare_runs.py", "--arm", *arms, "best-of-4"]
    words += ["--judge-model", str(work / "judge_model"), "--num-prompts", "64", "--completions", "2"]
    words += ["--output", str(folder)]
    once(arguments, "comparison", words, partial(comparison_facts, folder), say)


def comparison_facts(folder: Path) -> Facts:
    """Return the report without its completions: they stay in the page, because they contain texts of the pairs."""
    report = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    return {"kind": "comparison"} | {name: found for name, found in report.items() if name != "samples"}


def recipes(arguments: argparse.Namespace, say: Say) -> None:
    works = [
        partial(measure, training, argparse.Namespace(**vars(arguments), recipe=recipe), say)
        for recipe, training in recipe_trainings(arguments)
    ]
    run_all(works, say)


STAGES = {"reward-models": reward_models, "runs": rl_runs, "dpo": dpo, "compare": compare, "recipes": recipes}

if __name__ == "__main__":
    run_command(main)
