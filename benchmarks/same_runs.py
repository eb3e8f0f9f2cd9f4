"""Compares 16 short runs of two checkouts: weights, sampled tokens and metrics must be equal to the last bit.

Then both checkouts evaluate and compare three of the old runs: each number of the old JSON files must be in the new
ones.

    python -m benchmarks.same_runs OLD_CHECKOUT NEW_CHECKOUT --work FOLDER [--only NAME ...]

A change of the code that should change no result is proven with it. Each run is a command line of the training
scripts with the offline demo's models, on a CPU with one thread. A finished run in FOLDER is not trained again, so an
interrupted comparison continues where it stopped; use another FOLDER for other checkouts. Exit status 1: a difference.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

UPDATES = 20
SHARED = (
    "--recipe", "demo", "--num-iterations", str(UPDATES), "--batch-size", "4", "--max-new-tokens", "12",
    "--eval-every", "10", "--eval-prompts", "8", "--save-every", "10", "--keep", "1", "--record-tokens",
)  # fmt: skip
GROUPS = ("--K", "2")
TOPICS = "TOPICS"  # stands for the file of `write_topics`
# name -> processes, and the words after `python`
RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "ppo": (1, ("train_ppo.py", "--minibatches", "2")),
    "ppo_separate_critic": (1, ("train_ppo.py", "--critic", "separate", "--critic-warmup", "5")),
    "ppo_reward_model_critic": (1, ("train_ppo.py", "--critic", "reward-model", "--critic-lam", "1")),
    "ppo_lora_dropout": (1, ("train_ppo.py", "--use-lora", "--lora-dropout", "0.1", "--learning-rate", "1e-3")),
    "ppo_whitened": (1, ("train_ppo.py", "--whiten-rewards", "--kl-penalty-at", "eos", "--normalize-scores")),
    "ppo_topics": (1, ("train_ppo.py", "--prompts", TOPICS, "--steps-per-topic", "3")),
    "ppo_phased_kl": (1, ("train_ppo.py", "--kl-schedule", "phased", "--kl-target", "0.05/token", "0.01/token")),
    "grpo": (1, ("train_grpo.py", *GROUPS, "--eval-samples", "2")),
    "grpo_top_p": (1, ("train_grpo.py", *GROUPS, "--top-p", "0.9", "--top-k", "20")),
    "grpo_stop": (1, ("train_grpo.py", *GROUPS, "--stop", ".", "--missing-eos-penalty", "0.5")),
    "grpo_padded": (1, ("train_grpo.py", *GROUPS, "--rollout-engine", "plain", "--no-packed")),
    "grpo_lora_kl_in_loss": (1, ("train_grpo.py", *GROUPS, "--use-lora", "--kl-placement", "loss", "--delta", "3")),
    "rloo": (
        1,
        ("train_rloo.py", *GROUPS, "--micro-batch-size", "2", "--weight-decay", "0.1", "--learning-rate", "5e-5"),
    ),
    "reinforce_pp": (1, ("train_reinforce_pp.py", *GROUPS, "--warmup-steps", "5", "--lr-schedule", "linear")),
    "ppo_two_processes": (2, ("train_ppo.py",)),
    "grpo_lora_two_processes": (2, ("train_grpo.py", *GROUPS, "--use-lora", "--dynamic-sampling", "1")),
}
JUDGED = ("ppo", "grpo", "rloo")  # are evaluated and compared, too
MEASURED = ("time/", "throughput/", "memory/")  # metrics that differ between two runs of one checkout
OF_TIME = ("minutes", "seconds")  # in the JSON files of an evaluation


def write_topics(file: Path) -> None:
    """Write prompts with a column `topic`."""
    rows = [{"prompt": f"What is {n} plus {n + k}?", "topic": f"plus {k}"} for k in range(3) for n in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train(checkout: Path, name: str, folder: Path, topics: Path) -> None:
    """Train one run of a checkout in `folder`, unless it has finished there. Raises CalledProcessError if it fails."""
    record = folder / "run.json"
    if record.is_file() and json.loads(record.read_text(encoding="utf-8"))["status"] == "finished":
        return
    processes, (script, *flags) = RUNS[name]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    words = [str(topics) if word == TOPICS else word for word in flags]
    command = [sys.executable, *(launcher if processes > 1 else []), script, *SHARED, *words]
    _run(checkout, [*command, "--output", str(folder), "--overwrite"], folder)


def _run(checkout: Path, command: list[str], folder: Path) -> None:
    """Run a command of a checkout on one thread. Its output is in the file `folder`.log."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout), "ACCELERATE_USE_CPU": "true"}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("w", encoding="utf-8") as log:
        subprocess.run(command, cwd=checkout, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)


def judge(checkout: Path, runs: list[Path], folder: Path) -> dict[str, Any]:
    """Evaluate each run with the code of a checkout, and compare all of them. Return the numbers of its JSON files."""
    commands = {run.name: ["evaluate_generations.py", "--model-path", str(run)] for run in runs}
    commands["compare"] = ["compare_runs.py", *map(str, runs)]
    found = {}
    for name, words in commands.items():
        output = folder / name
        _run(checkout, [sys.executable, *words, "--num-prompts", "16", "--output", str(output)], output)
        file = next(output.glob("[ce]*.json"))  # evaluation.json or comparison.json
        found |= numbers(json.loads(file.read_text(encoding="utf-8")), name)
    return found


def numbers(value: Any, place: str) -> dict[str, Any]:
    """Return all numbers of a JSON value by their place, except times."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = {} if parts or isinstance(value, str | dict | list) else {place: value}
    for key, part in parts:
        if not any(word in str(key) for word in OF_TIME):
            found |= numbers(part, f"{place}/{key}")
    return found


def differences(old: Path, new: Path) -> list[str]:
    """Return what differs between two run folders: weights, sampled tokens and metrics. Empty: they are equal."""
    return [*_weights_differ(old, new), *_lines_differ(old, new)]


def _weights_differ(old: Path, new: Path) -> list[str]:
    names = [{file.relative_to(run).as_posix() for file in run.rglob("*.safetensors")} for run in (old, new)]
    found = [f"{name}: only in one of the runs" for name in sorted(names[0] ^ names[1])]
    if not names[0]:
        found.append("no weights")
    for name in sorted(names[0] & names[1]):
        first = load_file(old / name)
        second = load_file(new / name)
        found += [f"{name}: other tensors"] if first.keys() != second.keys() else []
        found += [f"{name}: {key}" for key in first.keys() & second.keys() if not torch.equal(first[key], second[key])]
    return found


def _lines_differ(old: Path, new: Path) -> list[str]:
    """Compare the metrics, the samples of the evaluations and the token records, line by line."""
    found = []
    for pattern in ("metrics.jsonl", "samples/*", "tokens/*.jsonl"):
        files = [sorted(run.glob(pattern)) for run in (old, new)]
        if [file.name for file in files[0]] != [file.name for file in files[1]] or not files[0]:
            found.append(f"{pattern}: other files, or none")
            continue
        for first, second in zip(*files, strict=True):
            rows = [list(map(_comparable, file.read_text(encoding="utf-8").splitlines())) for file in (first, second)]
            unequal = [n for n, (a, b) in enumerate(zip(*rows, strict=False), 1) if a != b]
            if len(rows[0]) != len(rows[1]):
                found.append(f"{first.name}: {len(rows[0])} and {len(rows[1])} lines")
            elif unequal:
                found.append(f"{first.name}: line {unequal[0]}{_keys(rows, unequal[0])}")
    return found


def _comparable(line: str) -> Any:
    """Return a line of JSON without what is measured, or another line as it is."""
    try:
        row = json.loads(line)
    except ValueError:
        return line
    return {k: v for k, v in row.items() if not k.startswith(MEASURED)} if isinstance(row, dict) else row


def _keys(rows: list[list[Any]], line: int) -> str:
    """Return the first keys whose values differ in a line, as text."""
    first, second = (part[line - 1] for part in rows)
    if not isinstance(first, dict) or not isinstance(second, dict):
        return ""
    return ": " + ", ".join([key for key in first.keys() | second.keys() if first.get(key) != second.get(key)][:5])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout")
    parser.add_argument("new", type=Path, help="the checkout to compare with it")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), help="names of runs")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    topics = (given.work / "topics.jsonl").resolve()
    write_topics(topics)
    failed = 0
    for name in given.only:
        folders = [(given.work / which / name).resolve() for which in ("old", "new")]
        for checkout, folder in zip((given.old, given.new), folders, strict=True):
            train(checkout.resolve(), name, folder, topics)
        found = differences(*folders)
        failed += bool(found)
        print(f"{name}: {'equal' if not found else '; '.join(found[:5])}", flush=True)
    print(f"{len(given.only) - failed} of {len(given.only)} runs are equal")
    judged = [(given.work / "old" / name).resolve() for name in JUDGED if name in given.only]
    if judged:
        old, new = (
            judge(checkout.resolve(), judged, (given.work / f"judged_{which}").resolve())
            for which, checkout in (("old", given.old), ("new", given.new))
        )
        other = [place for place, number in old.items() if place not in new or new[place] != number]
        failed += bool(other)
        print(f"evaluations and comparison: {len(old) - len(other)} of {len(old)} numbers are equal", *other[:20])
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
