"""Each technique that makes training faster against its plain twin, by turns in one process.

python benchmarks/techniques.py --size smollm2 --device cuda --dtype bfloat16 --pairs 5 --json techniques.json

rollout           replies of unlike length in slots that waiting prompts take over; all run to the maximum
rollout_stopping  the same, against a plain engine that stops when the last of its rows has ended
rollout_graph     the same in slots with the decoding step as a CUDA graph (on a card); all run to the maximum
packed            an optimizer step over real tokens; over padded rows
fused_head        head and loss that keep the probabilities alone; by autograd
fused_head_frozen the same where the head is not trained
shared_prompt     a GRPO step that runs each prompt once; once for each of its replies
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # a script's own folder is on the path, not the project

from benchmarks.work import (
    EOS,
    PAD,
    SEED,
    TEMPERATURE,
    Work,
    at_least,
    choose_device,
    make_models,
    random_prompts,
    random_rows,
    varied,
    work_of,
)
from rlhf.utils.errors import RunError, run_command
from rlhf.utils.files import write_json

if TYPE_CHECKING:
    from rlhf.algorithms.experience import Experience
    from rlhf.data.prompts import Prompt
    from rlhf.trainer.loop import OnPolicyLoop

TWINS = ("ours", "plain")
ROUNDS = 4  # prompts of a rollout, times the batch
ENDS = 0.3  # mean length of a rollout's replies, of the longest
SHORT = {"prompt": 40 / 128, "reply": 18 / 64}  # mean lengths in an optimizer step, of the longest
GROUPS, K = 2, 6  # prompts of a GRPO step, and replies to each


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)  # before torch is imported: --help and mistakes are answered at once
    device = choose_device(arguments.device)
    from rlhf.utils.console import Screen, quiet_libraries

    quiet_libraries()
    screen = Screen()
    with screen, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = work_of(arguments, folder=folder, device=device, ppo_epochs=1)
        make_models(work)
        found = measure(work, arguments, screen)
    show(found, screen)
    if arguments.json:
        write_json(arguments.json, found)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Each technique against its plain twin, by turns in one process.")
    parser.add_argument("--only", nargs="+", choices=TECHNIQUES, metavar="NAME", help=", ".join(TECHNIQUES))
    parser.add_argument("--size", choices=("tiny", "smollm2"), default="tiny", help="SmolLM2-135M's shape, or less")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="unset: the card where torch can use one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the forward pass")
    parser.add_argument("--batch-size", type=at_least(1), default=32, help="replies at a time, or of a step (32)")
    parser.add_argument("--prompt-length", type=at_least(2), default=128, help="of the longest prompt, tokens (128)")
    parser.add_argument("--reply-length", type=at_least(2), default=64, help="of the longest reply, tokens (64)")
    parser.add_argument("--positions", type=at_least(1), default=512, help="reply tokens under the head (512)")
    parser.add_argument("--pairs", type=at_least(1), default=5, help="pairs that count, after a warm-up (5)")
    parser.add_argument("--threads", type=at_least(1), help="CPU threads; unset: torch's own choice")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args(argv)


# --- the work --------------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """What all techniques are measured with."""

    work: Work
    pairs: int
    positions: int
    screen: Any

    @cached_property
    def trainer(self) -> OnPolicyLoop:
        from benchmarks import ours

        return ours.build(self.work)

    @property
    def vocabulary(self) -> int:
        return self.trainer.actor.config.vocab_size

    def prompts(self, lengths: Sequence[int]) -> list[Prompt]:
        return random_prompts(lengths, self.vocabulary, SEED)

    def short_prompts(self, count: int) -> list[Prompt]:
        most = self.work.prompt_length
        return self.prompts(varied(SHORT["prompt"] * most, most, count, SEED))

    @property
    def autocast(self):
        from rlhf.models.device import autocast

        return autocast(self.trainer.accelerator.device, self.trainer.dtype)


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(work: Work, arguments: argparse.Namespace, screen) -> dict[str, Any]:
    """All techniques asked for, with what was run where."""
    import torch

    from benchmarks.machine import busy, machine
    from rlhf.checkpoints.run_record import environment

    if work.threads is not None:
        torch.set_num_threads(work.threads)
    facts = {**environment(), "machine": {**machine(work.device), "busy_before_percent": busy()}}
    bench = Bench(work, arguments.pairs, arguments.positions, screen)
    names = arguments.only or [name for name in TECHNIQUES if name != "rollout_graph" or work.device == "cuda"]
    settings = {**work.settings, "positions": arguments.positions, "pairs": arguments.pairs}
    for unused in ("algorithm", "updates", "lora", "load_in_4bit"):
        del settings[unused]
    return {**facts, "settings": settings, "techniques": {name: TECHNIQUES[name](bench, name) for name in names}}


def in_pairs(bench: Bench, trainer: OnPolicyLoop, name: str, twins: dict[str, Callable[[], int]]) -> dict[str, Any]:
    """Both twins by turns, the first pair a warm-up; each returns the reply tokens that it dealt with.

    Raises RunError where they differ. Ratios are of time, plain over ours.
    """
    results: list[dict[str, dict[str, Any]]] = []
    for number in range(1 + bench.pairs):
        order = TWINS if number % 2 else TWINS[::-1]
        results.append({twin: timed(bench.work.device, trainer, twins[twin]) for twin in order})
        bench.screen.progress(f"{name}: pair {number}/{bench.pairs}", last=number == bench.pairs)
    each = {twin: {key: [pair[twin][key] for pair in results[1:]] for key in results[0][twin]} for twin in TWINS}
    if each["ours"]["reply_tokens"] != each["plain"]["reply_tokens"]:
        raise RunError(f"unlike work, so nothing is compared: {name}. This is a fault of the benchmark")
    return {
        "ratio": spread([pair["plain"]["seconds"] / pair["ours"]["seconds"] for pair in results[1:]]),
        **{key: {twin: median(each[twin][key]) for twin in TWINS} for key in each["ours"]},
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": median(values), "lowest": min(values), "highest": max(values), "pairs": list(values)}


def timed(device: str, trainer: OnPolicyLoop, do: Callable[[], int]) -> dict[str, Any]:
    """Seconds, reply tokens, and what went through the layers: forward passes ("steps"), tokens with all padding."""
    from benchmarks.machine import seconds

    with layers_watched(trainer) as seen:
        begun = seconds(device)
        tokens = do()
        spent = seconds(device) - begun
    return {"seconds": spent, "reply_tokens": tokens, "steps": len(seen), "layer_tokens": sum(seen)}


@contextmanager
def layers_watched(trainer: OnPolicyLoop) -> Iterator[list[int]]:
    """Tokens of each forward pass of the policy's layers; a CUDA graph's replays pass unseen."""
    from rlhf.models.logprobs import backbone_of

    seen: list[int] = []
    hook = backbone_of(trainer.actor.policy).register_forward_pre_hook(
        lambda module, _, given: seen.append(given["input_ids"].numel()), with_kwargs=True
    )
    try:
        yield seen
    finally:
        hook.remove()


# --- rollout ---------------------------------------------------------------------------------------------------------


def rollout(bench: Bench, name: str) -> dict[str, Any]:
    """Where the replies are to end stands in the random numbers: 0 draws the vocabulary's first token, PAD, which
    these rollouts take for the end. Both engines stay as they are. Run to the maximum, the plain one is not told the
    ends, and its replies are cut afterwards."""
    from rlhf.rollout.sampling import uniform_noise

    work, trainer = bench.work, bench.trainer
    prompts, length = bench.short_prompts(ROUNDS * work.batch_size), work.reply_length
    ends = varied(ENDS * length, length, len(prompts), SEED + 1)
    free = uniform_noise(SEED, 0, name, range(len(prompts)), length)
    bound = free.clone()
    for row, end in enumerate(ends):
        if end < length:
            bound[row, end - 1] = 0.0
    sampled: dict[str, list[list[int]]] = {}
    trainer.model.eval()

    def sample(twin: str, engine: str, uniform, at_once: int) -> int:
        rows = sampled[twin] = []
        for start in range(0, len(prompts), at_once):
            part = slice(start, start + at_once)
            rows += completions(bench, engine, prompts[part], uniform[part]).rows()
        if uniform is free:
            sampled[twin] = [row[: end - 1] + ([PAD] if end < length else row[-1:])
                             for row, end in zip(rows, ends, strict=True)]  # fmt: skip
        return sum(map(len, sampled[twin]))

    engine, stopping = "graph" if name == "rollout_graph" else "slots", name == "rollout_stopping"
    twins = {
        "ours": lambda: sample("ours", engine, bound, len(prompts)),
        "plain": lambda: sample("plain", "plain", bound if stopping else free, work.batch_size),
    }
    found = in_pairs(bench, trainer, name, twins)
    if engine == "graph":
        found["steps"]["ours"] = found["layer_tokens"]["ours"] = None
    rows = zip(sampled["ours"], sampled["plain"], strict=True)
    same = [token == other for ours, plain in rows for token, other in zip(ours, plain, strict=True)]
    return {**found, "same_tokens": sum(same) / len(same)}


def completions(bench: Bench, engine: str, prompts: Sequence[Prompt], uniform):
    from rlhf.rollout.engine import sample_completions

    trainer = bench.trainer
    with bench.autocast:
        return sample_completions(
            trainer.actor.policy,
            prompts,
            uniform,
            trainer.config.sampling,
            eos=PAD,
            pad=PAD,
            device=trainer.accelerator.device,
            engine=engine,
            slots=bench.work.batch_size,
        )


# --- optimizer steps -------------------------------------------------------------------------------------------------


def made_batch(bench: Bench, trainer: OnPolicyLoop, prompts: Sequence[Prompt], lengths: Sequence[int]) -> Experience:
    """A batch as a rollout would have left it, of replies of random ids with these lengths and random scores."""
    import torch

    from rlhf.rollout.completions import Completions, Rollout, padded
    from rlhf.rollout.logprobs import compute_logprobs_and_values

    vocabulary, device = bench.vocabulary, trainer.accelerator.device
    rows = [[*row, EOS] for row in random_rows([n - 1 for n in lengths], vocabulary, SEED + 2)]
    completions = Completions.of(prompts, padded(rows, EOS, device), eos=EOS, pad=PAD, vocabulary=vocabulary)
    with bench.autocast:
        measured = compute_logprobs_and_values(
            trainer.actor, trainer.reference, completions, TEMPERATURE, packed=trainer.micro_batch_budget.packed
        )
    made = Rollout(completions, list(prompts), completions.texts(trainer.processing_class), *measured)
    scores = torch.randn(len(rows), generator=torch.Generator().manual_seed(SEED))
    return trainer.advantages(made, scores.to(device))


def step(trainer: OnPolicyLoop, batch: Experience, packed: bool = True) -> int:
    """One pass over the batch as one minibatch."""
    lengths = batch.completions.completion_lengths
    trainer.micro_batch_budget.packed = packed
    trainer.learner.step(batch, range(len(lengths)))
    return sum(lengths)


def packed(bench: Bench, name: str) -> dict[str, Any]:
    rows, most = bench.work.batch_size, bench.work.reply_length
    lengths = varied(SHORT["reply"] * most, most, rows, SEED + 1)
    trainer = bench.trainer
    batch = made_batch(bench, trainer, bench.short_prompts(rows), lengths)
    trainer.model.train()
    return in_pairs(
        bench,
        trainer,
        name,
        {"ours": lambda: step(trainer, batch), "plain": lambda: step(trainer, batch, packed=False)},
    )


def shared_prompt(bench: Bench, name: str) -> dict[str, Any]:
    """Packed on both sides; the plain one does not know which replies have a prompt in common."""
    from benchmarks import ours

    length = max(1, bench.work.prompt_length // 2)
    trainer = ours.build(replace(bench.work, algorithm="grpo", batch_size=GROUPS, K=K, prompt_length=length))
    prompts = [prompt for prompt in bench.prompts([length] * GROUPS) for _ in range(K)]
    batch = made_batch(bench, trainer, prompts, [bench.work.reply_length] * len(prompts))
    alone = replace(batch, completions=replace(batch.completions, groups=list(range(len(prompts)))))
    trainer.model.train()
    return in_pairs(
        bench, trainer, name, {"ours": lambda: step(trainer, batch), "plain": lambda: step(trainer, alone)}
    )


# --- the head --------------------------------------------------------------------------------------------------------


def fused_head(bench: Bench, name: str) -> dict[str, Any]:
    """Head and loss alone, from hidden states to their gradient (and the head's where it is trained)."""
    import torch

    from benchmarks.machine import tensor_peak

    trainer, count = bench.trainer, bench.positions
    device, head = trainer.accelerator.device, trainer.actor.policy.get_output_embeddings().weight
    torch.manual_seed(SEED)
    states = torch.randn(count, trainer.actor.config.hidden_size, device=device)
    tokens = torch.randint(EOS + 1, bench.vocabulary, (count,), device=device)
    weights, mask = torch.randn(1, count, device=device), torch.ones(1, count, dtype=torch.bool, device=device)

    def go(fused: bool) -> int:
        leaf = states.detach().requires_grad_()
        with bench.autocast:
            logprobs, _, _ = trainer.actor.forward_heads(leaf, tokens, mask, TEMPERATURE, None, "value", fused)
        (logprobs * weights).mean().backward()
        head.grad = None
        return count

    twins = {"ours": lambda: go(True), "plain": lambda: go(False)}
    trained = head.requires_grad
    head.requires_grad_(name != "fused_head_frozen")
    found = in_pairs(bench, trainer, name, twins)
    memory = {twin: tensor_peak(bench.work.device, do)[1] for twin, do in twins.items()}
    head.requires_grad_(trained)
    return {**found, "peak_bytes": memory, "memory_ratio": memory["plain"] / memory["ours"]}


TECHNIQUES = {
    "rollout": rollout,
    "rollout_stopping": rollout,
    "rollout_graph": rollout,
    "packed": packed,
    "fused_head": fused_head,
    "fused_head_frozen": fused_head,
    "shared_prompt": shared_prompt,
}


# --- for people ------------------------------------------------------------------------------------------------------


def show(found: dict[str, Any], screen) -> None:
    """The table, and below it what was run where."""
    from benchmarks.machine import BUSY, busy_line, machine_line

    settings = found["settings"]
    title = f"plain over ours, {settings['size']}, {settings['device']}, {settings['dtype']}"
    columns = ["", "ours", "plain", "ratio", "of single pairs", "reply tokens", "steps", "tokens through the layers"]
    screen.table(title, columns, rows(found["techniques"]), lines=False)
    screen.facts(
        [
            ("settings", ", ".join(f"{name} {value}" for name, value in settings.items())),
            ("machine", machine_line(found["machine"])),
            ("torch", found["versions"]["torch"]),
        ]
    )
    if found["machine"]["busy_before_percent"] > BUSY:
        screen.say(busy_line(found["machine"]))


def rows(techniques: dict[str, dict[str, Any]]) -> list[list[str]]:
    lines = []
    for name, results in techniques.items():
        ratio, spent = results["ratio"], [f"{results['seconds'][twin] * 1e3:,.1f} ms" for twin in TWINS]
        single = f"{ratio['lowest']:.2f} to {ratio['highest']:.2f}"
        tokens = f"{results['reply_tokens']['ours']:,.0f}"
        lines.append([name, *spent, f"{ratio['median']:.2f}", single, tokens, both(results, "steps"),
                      both(results, "layer_tokens")])  # fmt: skip
        if "peak_bytes" in results:
            memory = [f"{results['peak_bytes'][twin] / 2**20:,.1f} MiB" for twin in TWINS]
            lines.append(["  peak memory", *memory, f"{results['memory_ratio']:.2f}", "", "", "", ""])
    return lines


def both(results: dict[str, Any], key: str) -> str:
    if not results[key]["plain"]:
        return ""
    return " / ".join("unseen" if results[key][twin] is None else f"{results[key][twin]:,.0f}" for twin in TWINS)


if __name__ == "__main__":
    run_command(main)
