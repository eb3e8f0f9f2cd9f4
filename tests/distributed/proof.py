"""Trains the same run with one process and with several, and compares the results.

python -m tests.distributed.proof PROCESSES FOLDER CASE...     prints a JSON object
"""

from __future__ import annotations

import json
import sys
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UPDATES = 2
COMMON = [
    "--num-iterations", UPDATES, "--ppo-epochs", 2, "--minibatches", 2, "--max-new-tokens", 12, "--prompt-length", 100,
    "--eval-prompts", 6, "--learning-rate", "2e-5", "--kl-coef", 0.1,
    "--allow-weak-reward-model",
]  # fmt: skip
PPO = ["ppo", "--missing-eos-penalty", 0.5, "--batch-size", 6]
GROUPS = ["--batch-size", 4, "--K", 4]
GRPO = ["grpo", *GROUPS]
RLOO = ["rloo", *GROUPS]
TURNS = ["--max-new-tokens", 5, "--max-episode-tokens", 40, "--eval-samples", 2]
EQUAL = [*GRPO, "--kl-schedule", "fixed", "--kl-coef", 0, "--reward-func", "RULE:has_an_a"]  # every second group
# name -> algorithm and flags
CASES: dict[str, list] = {
    "ppo": PPO,
    "ppo-separate-critic": [*PPO, "--critic", "separate"],
    "ppo-reward-model-critic": [*PPO, "--critic", "reward-model"],
    "ppo-lora": [*PPO, "--use-lora", "--lora-r", 4],
    "ppo-lora-dropout": [*PPO, "--use-lora", "--lora-r", 4, "--lora-dropout", 0.2],
    "ppo-kl-in-loss": [*PPO, "--kl-placement", "loss"],
    "ppo-entropy": [*PPO, "--entropy-coef", 0.01],
    "ppo-whiten-normalize": [*PPO, "--whiten-rewards", "--normalize-scores"],
    "ppo-top-p": [*PPO, "--top-p", 0.9, "--top-k", 20],
    "ppo-stop": [*PPO, "--stop", "e", "at", "\n"],
    "ppo-token-scores": [*PPO, "--reward-func", "RULE:at_tokens"],
    "ppo-truncated-masked": [*PPO, "--missing-eos-penalty", 0, "--mask-truncated-completions"],
    "ppo-shared-prompts": [*PPO, "--batch-size", 2, "--K", 3],
    "ppo-warmup": [*PPO, "--critic-warmup", 1],
    "ppo-critic-rate": [*PPO, "--critic-learning-rate", "1e-3", "--critic-lam", 1, "--adam-beta2", 0.95],
    "grpo-batch-scaling": [*GRPO, "--kl-placement", "loss", "--scale-rewards", "batch"],
    "grpo-kl-in-reward": [*GRPO, "--kl-placement", "reward"],
    "grpo-kl-in-loss": [*GRPO, "--kl-placement", "loss"],
    "grpo-kl-logged": [*GRPO, "--kl-schedule", "fixed", "--kl-coef", 0],
    "grpo-lora-dropout": [*GRPO, "--use-lora", "--lora-r", 4, "--lora-dropout", 0.2],
    "grpo-dynamic": [*GRPO, "--dynamic-sampling", 2, "--reward-func", "RULE:has_an_a"],
    "grpo-named-arguments": [*GRPO, "--reward-func", "RULE:named"],
    "grpo-environment": [*GRPO, "--environment", "RULE:Talks", *TURNS, "--reward-func", "RULE:seen"],
    "ppo-environment": [*PPO, "--environment", "RULE:Talks", *TURNS, "--gae-unit", "turn"],
    "grpo-equal-groups": EQUAL,
    "grpo-one-pass": [*GRPO, "--kl-placement", "loss", "--minibatches", 1],
    "grpo-one-pass-equal-groups": [*EQUAL, "--minibatches", 1],
    "grpo-control": [*GRPO, "--control", "shuffled"],
    "rloo": RLOO,
    "rloo-lora": [*RLOO, "--use-lora", "--lora-r", 4],
    "rloo-one-pass": [*RLOO, "--ppo-epochs", 1, "--minibatches", 1],
    "ppo-one-pass": [*PPO, "--minibatches", 1],
    "ppo-teacher": [*PPO, "--teacher", "TEACHER"],
    "reinforce-teacher": ["reinforce_pp", "--batch-size", 5, "--teacher", "TEACHER", "--gamma", 0, "--minibatches", 1],
    "ppo-empty-share": [*PPO, "--batch-size", 2],  # minibatches of one completion
    "grpo-divided-group": [*GRPO, "--batch-size", 1],
}
FLOAT32 = ("ppo", "ppo-lora", "grpo-kl-in-loss", "rloo")  # cases that are also trained in the usual precision
RULE = '''
import random

def has_an_a(prompts, completions, **_):
    """1.0 for every second prompt, so that its group has equal scores, else the share of the letter a."""
    return [1.0 if len(str(p)) % 2 else sum(c in "aeiou" for c in str(t)) / max(1, len(str(t)))
            for p, t in zip(prompts, completions)]

def named(completion_ids, completion_logprobs, group, **_):
    """The share of the group's log-probs, plus the size of the group: it differs if a process has a part of one."""
    assert all(len(ids) == len(numbers) for ids, numbers in zip(completion_ids, completion_logprobs))
    means = [sum(numbers) / len(numbers) for numbers in completion_logprobs]
    whole = [[mean for mean, other in zip(means, group) if other == mine] for mine in group]
    return [mean / sum(of) + len(of) for mean, of in zip(means, whole)]

class Talks:
    """Fails for some prompts, and pays for turns; its random numbers and its seed are in what it answers."""

    def reset(self, seed, **row):
        self.turns = 0
        return f" {seed % 7}"

    def observe(self, completion):
        self.turns += 1
        if len(completion) % 11 == 10:
            raise ValueError(completion)
        return (None if self.turns == 3 else str(random.random())[:5]), len(set(completion)) / 10

def seen(environments, **_):
    return [float(one.turns) for one in environments]

def at_tokens(completion_ids, **_):
    """Half of the completions have a score per token, by its id; the others have their length."""
    return [{"token_scores": [token % 5 / 5 for token in ids]} if ids[0] % 2 else len(ids) / 9
            for ids in completion_ids]
'''


LOSSES = ("dapo", "grpo", "dr_grpo", "cispo", "gspo")
CASES |= {f"grpo-{loss}": [*GRPO, "--loss-type", loss] for loss in LOSSES}


@dataclass
class Inputs:
    start: Path
    reward: Path
    pairs: Path
    rule: Path
    teacher: Path

    @classmethod
    def make(cls, folder: Path) -> Inputs:
        """Make the models and the data in a new folder, or return those that are there."""
        from tests.conftest import write_pairs
        from tests.shapes import make_reward_model, make_start_model

        names = ("start", "reward", "pairs.jsonl", "rule.py", "teacher")
        made = cls(*(folder / name for name in names))
        if not made.rule.exists():
            for part, make in ((made.start, make_start_model), (made.reward, make_reward_model)):
                part.mkdir(parents=True)
                make(part)
            make_start_model(made.teacher, size="wide", seed=5)
            write_pairs(folder)
            made.rule.write_text(RULE, encoding="utf-8")
        return made

    def flags(self, name: str, output: Path, *more: object) -> list[str]:
        own = [str({"TEACHER": self.teacher}.get(word, word)) for word in CASES[name][1:]]
        own = [word.replace("RULE", str(self.rule)) for word in own]
        given = ["--actor-model", self.start, "--prompts", self.pairs, "--output", output]
        given += ["--rm-model", "none" if {"--reward-func", "--environment"} & {*own} else self.reward]
        return [str(word) for word in (*COMMON, *given, *own, *more)]


def uneven(trainer) -> None:
    """Make EOS likely at some positions, so that completions have different lengths."""
    import torch

    with torch.no_grad():
        head = trainer.actor.policy.get_output_embeddings().weight
        head[trainer.processing_class.eos_token_id] = 30 * head[5]  # the row of another token, with larger logits


def train_case(name: str, inputs: Inputs, output: Path, double: bool, updates: int) -> dict[str, Any]:
    """Train one case in this process, and return what the proof compares."""

    from rlhf.config import parse_cli
    from rlhf.models.device import start_device
    from rlhf.setup.build import build_trainer, load_components
    from rlhf.utils.console import Screen

    config = parse_cli(inputs.flags(name, output), CASES[name][0])
    components = load_components(config, start_device(Screen()), Screen())
    if double:
        components.policy.double()
        if components.reward_model is not None:
            components.reward_model.model.double()
        if components.teacher is not None:
            components.teacher.copy.double()
    trainer = build_trainer(config, components)
    if double:
        trainer.host.model.double()  # the value head
    uneven(trainer)
    found: dict[str, Any] = {"ids": [], "advantages": [], "metrics": [], "beta": []}

    class Watch:
        def on_batch(self, update, batch, scores):
            found["ids"].append(batch.completions.rows())
            found["advantages"].append(batch.advantages.clone())

        def on_update_end(self, update, metrics):
            kept = {k: v for k, v in metrics.items() if not k.startswith(("time", "throughput", "memory"))}
            found["metrics"].append(kept)
            found["beta"].append(trainer.kl_coef)

    trainer.add_callback(Watch())
    trainer.events.read_batches = False  # `Watch` reads no log-probs, which may be computed later
    zero = {name for name, weight in trainer.host.model.named_parameters() if not weight.any()}
    trainer.evaluate()
    for update in range(1, updates + 1):
        trainer.update_step(update)
    found["evaluation"] = trainer.evaluate()
    found["weights"] = {n: w.detach().clone() for n, w in trainer.host.model.named_parameters() if w.requires_grad}
    found["zero"] = zero  # the value head and the B matrices of LoRA start at 0
    return found


def both(name: str, count: int, inputs: Inputs, folder: Path, double: bool, updates: int) -> dict[str, Any]:
    """Return how far a run with `count` processes is from one with a single process."""
    import torch

    from tests.distributed.ranks import results

    def work(rank: int):
        torch.set_num_threads(1)
        return train_case(name, inputs, folder / f"{name}-{count}", double, updates)

    (alone,), ranks = results(1, work), results(count, work)
    same = ("ids", "metrics", "beta", "evaluation")
    first = ranks[0]
    return {
        "equal_on_ranks": all(
            all(rank[key] == first[key] for key in same)
            and all(torch.equal(a, b) for a, b in zip(rank["advantages"], first["advantages"], strict=True))
            and all(torch.equal(rank["weights"][n], first["weights"][n]) for n in first["weights"])
            for rank in ranks[1:]
        ),
        "same_ids": alone["ids"] == first["ids"],
        "weights": largest_gap(alone["weights"], first["weights"], alone["zero"]),
        "from_zero": largest_gap(alone["weights"], first["weights"], alone["weights"].keys() - alone["zero"]),
        "gradient_norm": sum(m["policy/grad_norm"] for m in first["metrics"]) / len(first["metrics"]),
        "lengths": len({len(row) for rows in alone["ids"] for row in rows}),
        "updates": len(first["metrics"]),
        "resampled": sum(m.get("rewards/resampled_groups", 0) for m in first["metrics"]),
    }


def largest_gap(one: dict, other: dict, without: Container[str] = ()) -> float:
    """Return the largest relative difference of a tensor: its norm over the norm of the tensor. 0 if there is none."""
    assert one.keys() == other.keys()
    gaps = [float((one[n] - other[n]).norm() / one[n].norm().clamp(min=1e-12)) for n in one if n not in without]
    return max(gaps, default=0.0)


def main(argv: Sequence[str]) -> None:
    count = int(argv[0])
    folder = Path(argv[1])
    names = argv[2:]
    import torch

    torch.set_num_threads(1)
    import rlhf.run.train  # noqa: F401  (the processes are forked after the slow imports)

    inputs = Inputs.make(folder)
    for name in names or CASES:
        table = {"float64": both(name, count, inputs, folder, double=True, updates=UPDATES)}
        if name in FLOAT32:
            table["float32"] = both(name, count, inputs, folder, double=False, updates=1)
        print(json.dumps({name: table}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
