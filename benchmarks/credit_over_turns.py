"""Does a critic help if credit has to be assigned? Trains on Crossing with and without a critic, dense and sparse.

    python benchmarks/credit_over_turns.py --work credit_runs            train all arms and seeds
    python benchmarks/credit_over_turns.py --work credit_runs --report   print the tables

Every arm has the settings of the recipe demo-game. A finished run has a JSON file in the folder of --work and is not
repeated; an interrupted run starts again. Two runs train at a time, each with one thread: end other programs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder

from benchmarks.stock_sums import markdown
from rlhf.demo.crossing import GO, LEGAL, STOP, Seen, expected_pots, next_turn, prompts, random_play, reach, states
from rlhf.utils.console import Screen, quiet_libraries
from rlhf.utils.errors import run_command
from rlhf.utils.files import write_json

SEEDS = (42, 123, 777, 1, 2)
# name -> algorithm, game, other settings. The groups of GRPO and RLOO compare final pots: the sparse game is the same.
ARMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ppo_token_dense": ("ppo", "crossing", {"gae_unit": "token"}),
    "ppo_token_sparse": ("ppo", "crossing-sparse", {"gae_unit": "token"}),
    "ppo_turn_dense": ("ppo", "crossing", {"gae_unit": "turn"}),
    "ppo_turn_sparse": ("ppo", "crossing-sparse", {"gae_unit": "turn"}),
    "reinforce_pp_dense": ("reinforce_pp", "crossing", {}),
    "reinforce_pp_sparse": ("reinforce_pp", "crossing-sparse", {}),
    "grpo": ("grpo", "crossing", {}),
    "rloo": ("rloo", "crossing", {}),
}
SAMPLED = 256  # games of an evaluation, with prompts that training does not have
PROMPT = prompts(1)  # of the exact values: the policy and the critic read it, too
Facts = dict[str, Any]  # the content of a JSON file


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    work = arguments.work.resolve()
    if arguments.report:
        return print(report(work))
    if arguments.run is not None:
        return run_one(arguments.run, arguments.seeds[0], work, settings_of(arguments.set))
    work.mkdir(parents=True, exist_ok=True)
    os.chdir(work)  # the parts of the demo are made there
    os.environ["OMP_NUM_THREADS"] = "1"
    quiet_libraries()
    import torch

    from rlhf.demo.parts import prepare_parts

    prepare_parts("demo-game", Screen(), torch.device("cpu"))
    jobs = [(arm, seed) for seed in arguments.seeds for arm in arguments.arms if not file_of(work, arm, seed).exists()]
    with ThreadPoolExecutor(2) as pool:
        for line in pool.map(lambda job: in_a_process(*job, work, arguments.set), jobs):
            print(line, flush=True)
    return print(report(work))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--report", action="store_true", help="print the tables of the finished runs")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="names of arms (all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help=f"seeds {SEEDS}")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="other settings, in JSON")
    parser.add_argument("--run", choices=ARMS, help="train this arm in this process")
    return parser.parse_args(argv)


def settings_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings of --set."""
    pairs = [word.partition("=") for word in words]
    return {name: json.loads(value) for name, _, value in pairs}


def file_of(work: Path, arm: str, seed: int) -> Path:
    return work / f"{arm}_{seed}.json"


def in_a_process(arm: str, seed: int, work: Path, more: Sequence[str]) -> str:
    """Train one run in its own process. Returns a line about it. Raises CalledProcessError if it fails."""
    words = ["--work", str(work), "--run", arm, "--seeds", str(seed), *(["--set", *more] if more else [])]
    with file_of(work, arm, seed).with_suffix(".log").open("w", encoding="utf-8") as log:
        command = [sys.executable, str(Path(__file__).resolve()), *words]
        subprocess.run(command, cwd=work, stdout=log, stderr=subprocess.STDOUT, check=True)
    found = json.loads(file_of(work, arm, seed).read_text(encoding="utf-8"))
    end = found["end"]
    return (
        f"{arm} {seed}: exact {end['exact']:.3f}, sampled {end['sampled']:.3f} +- {end['error']:.3f}, "
        f"{found['seconds']:.0f} s"
    )


# --- one run ---------------------------------------------------------------------------------------------------------


class Curve:
    """Stores the mean score of each update's games."""

    def __init__(self):
        self.scores: list[float] = []

    def on_update_end(self, update: int, metrics: dict[str, float]) -> None:
        self.scores.append(metrics["rewards/mean"])


def run_one(arm: str, seed: int, work: Path, more: dict[str, Any]) -> None:
    """Train one run, measure it and write its JSON file."""
    from rlhf import make_config, make_trainer
    from rlhf.demo.ready import GAMES

    algorithm, game, own = ARMS[arm]
    settings = {"environment": game, "seed": seed, "eval_prompts": SAMPLED, **own, **more}
    # evaluations only before and after the training
    config = make_config("demo-game", algorithm=algorithm, eval_every=10**6, **settings)
    texts = prompts(GAMES + SAMPLED)
    curve = Curve()
    trainer = make_trainer(config, texts[:GAMES], callbacks=[curve], evaluation_prompts=texts[GAMES:])
    start, _ = measure(trainer, game)
    began = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - began
    end, critic = measure(trainer, game)
    for found, evaluation in zip((start, end), (trainer.evaluations[0], trainer.evaluations[-1]), strict=True):
        scores = evaluation.scores.ravel().tolist()
        found |= {"sampled": fmean(scores), "error": stdev(scores) / math.sqrt(len(scores)), "games": len(scores)}
    facts = {"arm": arm, "seed": seed, "settings": settings, "seconds": seconds, "curve": curve.scores}
    write_json(file_of(work, arm, seed), {**facts, "start": start, "end": end, "critic": critic})


def measure(trainer: Any, game: str) -> tuple[Facts, Facts | None]:
    """Return the exact figures of a trainer's policy, and those of its critic, None without one.

    The probabilities of both legal completions are computed in all states, so the expected score is exact for this
    prompt.
    """
    chances, values = choices(trainer)

    def play(seen: Seen) -> tuple[float, float]:
        return chances[seen]

    pots = expected_pots(play)
    reached = reach(play)
    groups = by_turn_and_risk(reached)
    found = {
        "exact": next_turn(pots),
        # share of games with a completion that is not legal
        "illegal": sum(reached[seen] * max(1 - sum(play(seen)), 0.0) for seen in reached),
        "go": {name: mean(lambda seen: chances[seen][0], own) for name, own in groups.items()},
    }
    if values is None:
        return found, None
    paid = {seen: 0 if game == "crossing-sparse" else len(seen) - 1 for seen in pots}  # rewards of earlier turns
    exact = {seen: pots[seen] - paid[seen] for seen in pots}
    critic = compared(values, exact, reached)
    both = {name: [mean(of.get, own) for of in (values, exact)] for name, own in groups.items()}
    return found, {**critic, "mean value and exact value": both}


def choices(trainer: Any) -> tuple[dict[Seen, tuple[float, float]], dict[Seen, float] | None]:
    """Return the policy's probabilities of `go` and `stop` in each state, and the critic's value V of each state."""
    from rlhf.data.chat_template import encode_completion
    from rlhf.data.prompts import ids_alone
    from rlhf.demo.crossing_start import texts_before
    from rlhf.rollout.completions import Completions, padded

    tokenizer = trainer.processing_class
    legal = {text: encode_completion(tokenizer, text) for text in LEGAL}
    rows = []
    for seen in states():
        first, *later = texts_before(tokenizer, PROMPT[0], seen)
        ids = [*first, *(i for after in later for i in (*legal[GO], *after))]
        rows += [ids_alone(ids)] * 2
    completions = Completions.of(
        rows,
        padded([legal[GO], legal[STOP]] * (len(rows) // 2), tokenizer.pad_token_id, trainer.passes.device),
        eos=tokenizer.eos_token_id,
        pad=tokenizer.pad_token_id,
        vocabulary=len(tokenizer),
    )
    with trainer.passes.weights.in_use():
        found = trainer.passes.policy_logprobs(completions)
    sums = found.logprobs.masked_fill(~completions.mask, 0).sum(1).double().exp().tolist()
    chances = dict(zip(states(), zip(sums[::2], sums[1::2], strict=True), strict=True))
    if found.values is None:
        return chances, None
    return chances, dict(zip(states(), found.values[::2, 0].double().tolist(), strict=True))


def by_turn_and_risk(reached: dict[Seen, float]) -> dict[str, dict[Seen, float]]:
    """Return the states, with their probabilities, of each pot and risk, such as `3 safe`."""
    found: dict[str, dict[Seen, float]] = {}
    for seen, chance in reached.items():
        found.setdefault(f"{len(seen) - 1} {seen[-1]}", {})[seen] = chance
    return found


def mean(value: Callable[[Seen], float], chances: dict[Seen, float]) -> float:
    """Return the mean of a value over states, weighted with their probabilities."""
    total = sum(chances.values())
    return sum(chance * value(seen) for seen, chance in chances.items()) / total if total else math.nan


def compared(values: dict[Seen, float], exact: dict[Seen, float], reached: dict[Seen, float]) -> Facts:
    """Return the correlation of values with the exact ones, the root of the mean squared error, and the standard
    deviation of the exact values, over all states, weighted by how often the policy reaches them. The correlation is
    nan if one side is constant."""
    center = mean(values.get, reached)
    exact_center = mean(exact.get, reached)
    std = math.sqrt(mean(lambda seen: (values[seen] - center) ** 2, reached))
    exact_std = math.sqrt(mean(lambda seen: (exact[seen] - exact_center) ** 2, reached))
    both = mean(lambda seen: (values[seen] - center) * (exact[seen] - exact_center), reached)
    error = mean(lambda seen: (values[seen] - exact[seen]) ** 2, reached)
    return {
        "correlation": both / (std * exact_std) if std * exact_std else math.nan,
        "rmse": math.sqrt(error),
        "exact_std": exact_std,
    }


# --- report ----------------------------------------------------------------------------------------------------------


def report(work: Path) -> str:
    """Return the tables of the finished runs."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(work.glob("*_[0-9]*.json"))]
    columns = [
        "arm",
        "seeds",
        "expected score",
        "mean (95%)",
        "sampled",
        "half way",
        "illegal",
        "V: r",
        "V: RMSE",
        "s",
    ]
    rows = [columns]
    for arm in ARMS:
        own = [run for run in runs if run["arm"] == arm]
        if own:
            rows.append([arm, *cells(own)])
    return markdown(rows)


def cells(runs: Sequence[Facts]) -> list[str]:
    """Return the cells of the runs of one arm."""
    ends = [run["end"] for run in runs]
    exact = [end["exact"] for end in ends]
    halves = [half_way(run["curve"]) for run in runs]
    critics = [run["critic"] for run in runs if run["critic"]]
    of_critic = [f"{fmean(one[name] for one in critics):.2f}" if critics else "" for name in ("correlation", "rmse")]
    return [
        ", ".join(str(run["seed"]) for run in runs),
        "; ".join(f"{value:.2f}" for value in exact),
        with_interval(exact),
        f"{fmean(end['sampled'] for end in ends):.2f}",
        f"{fmean(halves):.0f}" if all(map(math.isfinite, halves)) else "not reached",
        f"{fmean(end['illegal'] for end in ends):.1%}",
        *of_critic,
        f"{fmean(run['seconds'] for run in runs):.0f}",
    ]


def half_way(curve: Sequence[float], window: int = 5) -> float:
    """Return the first update at which the mean score of `window` updates is half way from random to the best play;
    infinity if there is none."""
    goal = (next_turn(expected_pots(random_play)) + next_turn(expected_pots())) / 2
    ends = range(window, len(curve) + 1)
    return next((end for end in ends if fmean(curve[end - window : end]) >= goal), math.inf)


def with_interval(values: Sequence[float]) -> str:
    """Return the mean with its 95% interval over seeds (Student's t)."""
    if len(values) < 2:
        return f"{fmean(values):.2f}"
    from scipy import stats

    half = stats.t.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return f"{fmean(values):.2f} ({fmean(values) - half:.2f} to {fmean(values) + half:.2f})"


if __name__ == "__main__":
    run_command(main)
