"""Compares each technique that makes training faster with its reference implementation, in one process.

python benchmarks/techniques.py --size smollm2 --device cuda --dtype bfloat16 --pairs 5 --json techniques.json

rollout            continuous batching / static batches that always run to the maximum length
rollout_stopping   continuous batching / static batches that stop when all rows have ended
rollout_graph      continuous batching with a CUDA graph (GPU only) / static batches that run to the maximum length
packed             optimizer step with packing / with padded rows
fused_head         output head and loss that keep only the probabilities for the backward pass / autograd
fused_head_frozen  the same with a frozen head
shared_prompt      GRPO step that runs each prompt once / once per completion
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder

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

VARIANTS = ("ours", "plain")  # plain: the reference implementation
ROUNDS = 4  # prompts per rollout / batch size
MEAN_LENGTH = 0.3  # mean completion length in a rollout / maximum length
SHORT = {"prompt": 40 / 128, "reply": 18 / 64}  # mean lengths in an optimizer step / maximum lengths
GROUPS, K = 2, 6  # prompts per GRPO step, completions per prompt


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)  # before importing torch, so that --help and errors are fast
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
    parser = argparse.ArgumentParser(
        description="Compare each technique with its reference implementation, in one process."
    )
    parser.add_argument(
        "--only", nargs="+", choices=TECHNIQUES, metavar="NAME", help=f"run only these: {', '.join(TECHNIQUES)}"
    )
    parser.add_argument(
        "--size", choices=("tiny", "smollm2"), default="tiny", help="model shape: SmolLM2-135M's or a tiny one (tiny)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU if torch can use one")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the forward pass (float32)"
    )
    parser.add_argument(
        "--batch-size", type=at_least(1), default=32, help="completions per batch or optimizer step (32)"
    )
    parser.add_argument("--prompt-length", type=at_least(2), default=128, help="longest prompt, in tokens (128)")
    parser.add_argument("--reply-length", type=at_least(2), default=64, help="longest completion, in tokens (64)")
    parser.add_argument("--positions", type=at_least(1), default=512, help="tokens for the output head (512)")
    parser.add_argument("--pairs", type=at_least(1), default=5, help="measured pairs, after a warm-up pair (5)")
    parser.add_argument("--threads", type=at_least(1), help="CPU threads (default: torch's choice)")
    parser.add_argument("--json", type=Path, help="JSON file for the results")
    return parser.parse_args(argv)


# --- the work --------------------------------------------------------------------------------------------------------


@dataclass
class Context:
    """Work, settings and trainer that all techniques share."""

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
    """Return the results of all selected techniques, with settings, versions and machine."""
    import torch

    from benchmarks.machine import busy, machine
    from rlhf.checkpoints.run_record import environment

    if work.threads is not None:
        torch.set_num_threads(work.threads)
    facts = {**environment(), "machine": {**machine(work.device), "busy_before_percent": busy()}}
    context = Context(work, arguments.pairs, arguments.positions, screen)
    names = arguments.only or [name for name in TECHNIQUES if name != "rollout_graph" or work.device == "cuda"]
    settings = {**work.settings, "positions": arguments.positions, "pairs": arguments.pairs}
    for unused in ("algorithm", "updates", "lora", "load_in_4bit"):
        del settings[unused]
    return {**facts, "settings": settings, "techniques": {name: TECHNIQUES[name](context, name) for name in names}}


def in_pairs(
    context: Context, trainer: OnPolicyLoop, name: str, variants: dict[str, Callable[[], int]]
) -> dict[str, Any]:
    """Measure both variants alternately, after a warm-up pair. Time ratios are plain / ours.

    Each variant returns the number of completion tokens it processed. Raises RunError if the numbers differ.
    """
    results: list[dict[str, dict[str, Any]]] = []
    for number in range(1 + context.pairs):
        order = VARIANTS if number % 2 else VARIANTS[::-1]
        results.append({variant: timed(context.work.device, trainer, variants[variant]) for variant in order})
        context.screen.progress(f"{name}: pair {number}/{context.pairs}", last=number == context.pairs)
    each = {
        variant: {key: [pair[variant][key] for pair in results[1:]] for key in results[0][variant]}
        for variant in VARIANTS
    }
    if each["ours"]["completion_tokens"] != each["plain"]["completion_tokens"]:
        raise RunError(f"the variants did different work: {name}. This is a bug, please report it")
    return {
        "ratio": spread([pair["plain"]["seconds"] / pair["ours"]["seconds"] for pair in results[1:]]),
        **{key: {variant: median(each[variant][key]) for variant in VARIANTS} for key in each["ours"]},
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": median(values), "lowest": min(values), "highest": max(values), "pairs": list(values)}


def timed(device: str, trainer: OnPolicyLoop, run: Callable[[], int]) -> dict[str, Any]:
    """Return seconds, completion tokens, forward passes ("steps"), and tokens in the layers including padding."""
    from benchmarks.machine import seconds

    with count_layer_tokens(trainer) as counts:
        start = seconds(device)
        tokens = run()
        spent = seconds(device) - start
    return {"seconds": spent, "completion_tokens": tokens, "steps": len(counts), "layer_tokens": sum(counts)}


@contextmanager
def count_layer_tokens(trainer: OnPolicyLoop) -> Iterator[list[int]]:
    """Yield a list that receives the tokens of each forward pass of the policy's layers, except CUDA graph replays."""
    from rlhf.models.logprobs import backbone_of

    counts: list[int] = []
    embeddings = backbone_of(trainer.actor.policy).get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(lambda module, ids: counts.append(ids[0].numel()))
    try:
        yield counts
    finally:
        hook.remove()


# --- rollout ---------------------------------------------------------------------------------------------------------


def rollout(context: Context, name: str) -> dict[str, Any]:
    """Measure continuous batching against static batches, with completions of different lengths.

    The random numbers set the ends: 0 samples the vocabulary's first token, PAD, which is EOS in these rollouts. The
    engines are unchanged. If the static engine must run to the maximum length, its random numbers contain no ends, and
    its completions are cut afterwards.
    """
    from rlhf.rollout.sampling import uniform_noise

    work, trainer = context.work, context.trainer
    prompts, length = context.short_prompts(ROUNDS * work.batch_size), work.reply_length
    ends = varied(MEAN_LENGTH * length, length, len(prompts), SEED + 1)
    endless = uniform_noise(SEED, 0, name, range(len(prompts)), length)
    ending = endless.clone()
    for row, end in enumerate(ends):
        if end < length:
            ending[row, end - 1] = 0.0
    sampled: dict[str, list[list[int]]] = {}
    trainer.model.eval()

    def sample(variant: str, engine: str, uniform, batch_size: int) -> int:
        rows = sampled[variant] = []
        for start in range(0, len(prompts), batch_size):
            part = slice(start, start + batch_size)
            rows += completions(context, engine, prompts[part], uniform[part]).rows()
        if uniform is endless:
            sampled[variant] = [row[: end - 1] + ([PAD] if end < length else row[-1:])
                             for row, end in zip(rows, ends, strict=True)]  # fmt: skip
        return sum(map(len, sampled[variant]))

    engine, stopping = "graph" if name == "rollout_graph" else "slots", name == "rollout_stopping"
    variants = {
        "ours": lambda: sample("ours", engine, ending, len(prompts)),
        "plain": lambda: sample("plain", "plain", ending if stopping else endless, work.batch_size),
    }
    found = in_pairs(context, trainer, name, variants)
    if engine == "graph":
        found["steps"]["ours"] = found["layer_tokens"]["ours"] = None
    rows = zip(sampled["ours"], sampled["plain"], strict=True)
    same = [token == other for ours, plain in rows for token, other in zip(ours, plain, strict=True)]
    return {**found, "same_tokens": sum(same) / len(same)}


def completions(context: Context, engine: str, prompts: Sequence[Prompt], uniform):
    from rlhf.rollout.engine import sample_completions

    trainer = context.trainer
    with context.autocast:
        return sample_completions(
            trainer.actor.policy,
            prompts,
            uniform,
            trainer.config.sampling,
            eos=PAD,
            pad=PAD,
            device=trainer.accelerator.device,
            engine=engine,
            slots=context.work.batch_size,
        )


# --- optimizer steps -------------------------------------------------------------------------------------------------


def make_batch(
    context: Context, trainer: OnPolicyLoop, prompts: Sequence[Prompt], lengths: Sequence[int]
) -> Experience:
    """Return a batch as if from a rollout: completions with random ids of these lengths, and random scores."""
    import torch

    from rlhf.rollout.completions import Completions, Rollout, padded

    vocabulary, device = context.vocabulary, trainer.accelerator.device
    rows = [[*row, EOS] for row in random_rows([n - 1 for n in lengths], vocabulary, SEED + 2)]
    completions = Completions.of(prompts, padded(rows, EOS, device), eos=EOS, pad=PAD, vocabulary=vocabulary)
    logprobs = trainer.passes.logprobs(completions)
    rollout = Rollout(completions, list(prompts), completions.texts(trainer.processing_class), *logprobs)
    scores = torch.randn(len(rows), generator=torch.Generator().manual_seed(SEED))
    return trainer.advantages(rollout, scores.to(device))


def step(trainer: OnPolicyLoop, batch: Experience, packed: bool = True) -> int:
    """Run one optimizer step with the whole batch as one minibatch."""
    lengths = batch.completions.completion_lengths
    trainer.passes.packed = packed
    trainer.policy_optimizer.step(batch, range(len(lengths)))
    return sum(lengths)


def packed(context: Context, name: str) -> dict[str, Any]:
    rows, most = context.work.batch_size, context.work.reply_length
    lengths = varied(SHORT["reply"] * most, most, rows, SEED + 1)
    trainer = context.trainer
    batch = make_batch(context, trainer, context.short_prompts(rows), lengths)
    trainer.model.train()
    return in_pairs(
        context,
        trainer,
        name,
        {"ours": lambda: step(trainer, batch), "plain": lambda: step(trainer, batch, packed=False)},
    )


def shared_prompt(context: Context, name: str) -> dict[str, Any]:
    """Measure prompt sharing. Both variants are packed; in the plain one every completion is a separate group."""
    from benchmarks import ours

    length = max(1, context.work.prompt_length // 2)
    trainer = ours.build(replace(context.work, algorithm="grpo", batch_size=GROUPS, K=K, prompt_length=length))
    prompts = [prompt for prompt in context.prompts([length] * GROUPS) for _ in range(K)]
    batch = make_batch(context, trainer, prompts, [context.work.reply_length] * len(prompts))
    ungrouped = replace(batch, completions=replace(batch.completions, groups=list(range(len(prompts)))))
    trainer.model.train()
    return in_pairs(
        context, trainer, name, {"ours": lambda: step(trainer, batch), "plain": lambda: step(trainer, ungrouped)}
    )


# --- the head --------------------------------------------------------------------------------------------------------


def fused_head(context: Context, name: str) -> dict[str, Any]:
    """Measure only head and loss, from hidden states to their gradient (and to the head's if it is trained)."""
    import torch

    from benchmarks.machine import tensor_peak

    trainer, count = context.trainer, context.positions
    device, head = trainer.accelerator.device, trainer.actor.policy.get_output_embeddings().weight
    torch.manual_seed(SEED)
    states = torch.randn(count, trainer.actor.config.hidden_size, device=device)
    tokens = torch.randint(EOS + 1, context.vocabulary, (count,), device=device)
    weights, mask = torch.randn(1, count, device=device), torch.ones(1, count, dtype=torch.bool, device=device)

    def run(fused: bool) -> int:
        leaf = states.detach().requires_grad_()
        with context.autocast:
            outputs = trainer.actor.forward_heads(leaf, tokens, mask, TEMPERATURE, None, "value", fused)
        (outputs.logprobs * weights).mean().backward()
        head.grad = None
        return count

    variants = {"ours": lambda: run(True), "plain": lambda: run(False)}
    trained = head.requires_grad
    head.requires_grad_(name != "fused_head_frozen")
    found = in_pairs(context, trainer, name, variants)
    memory = {variant: tensor_peak(context.work.device, run)[1] for variant, run in variants.items()}
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


# --- console ---------------------------------------------------------------------------------------------------------


def show(found: dict[str, Any], screen) -> None:
    """Print the table, and below it the settings, machine and torch version."""
    from benchmarks.machine import BUSY, busy_line, machine_line

    settings = found["settings"]
    title = f"reference / ours, {settings['size']}, {settings['device']}, {settings['dtype']}"
    columns = ["", "ours", "reference", "ratio", "range", "completion tokens", "steps", "tokens in the layers"]
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
        ratio, spent = results["ratio"], [f"{results['seconds'][variant] * 1e3:,.1f} ms" for variant in VARIANTS]
        range_text = f"{ratio['lowest']:.2f} to {ratio['highest']:.2f}"
        tokens = f"{results['completion_tokens']['ours']:,.0f}"
        lines.append([name, *spent, f"{ratio['median']:.2f}", range_text, tokens, both(results, "steps"),
                      both(results, "layer_tokens")])  # fmt: skip
        if "peak_bytes" in results:
            memory = [f"{results['peak_bytes'][variant] / 2**20:,.1f} MiB" for variant in VARIANTS]
            lines.append(["  peak memory", *memory, f"{results['memory_ratio']:.2f}", "", "", "", ""])
    return lines


def both(results: dict[str, Any], key: str) -> str:
    if not results[key]["plain"]:
        return ""
    return " / ".join(
        "n/a" if results[key][variant] is None else f"{results[key][variant]:,.0f}" for variant in VARIANTS
    )


if __name__ == "__main__":
    run_command(main)
