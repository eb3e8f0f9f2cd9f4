"""Peak memory as the plan of a run predicts it against what a fresh process takes; and phase by phase, in tensors.

python benchmarks/memory.py --algorithm ppo --size smollm2 --load-in-4bit --json memory.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # a script's own folder is on the path, not the project

from benchmarks.side import Side
from benchmarks.work import Work, add_flags, add_update_flags, choose_device, make_models, parse_update, work_of
from rlhf.utils.errors import run_command
from rlhf.utils.files import write_json

UPDATES = 2
# methods of a trainer's parts, and the phases of the forecast that each contains
METHODS = {
    "collector.collect": ("rollout", "log-probs"),
    "collector.score": ("scoring",),
    "learner.step": ("backward pass", "optimizer step"),
}


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)  # before torch is imported: --help and mistakes are answered at once
    device = choose_device(arguments.device)
    from rlhf.utils.console import Screen, quiet_libraries

    quiet_libraries()
    screen = Screen()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = work_of(arguments, folder=folder, device=device, updates=UPDATES)
        make_models(work)
        found = compare(work)
    show(found, screen)
    if arguments.json:
        write_json(arguments.json, found)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Peak memory as predicted, and as measured over two updates.")
    add_flags(parser)
    add_update_flags(parser, ppo_epochs=2)
    return parse_update(parser, argv)


def compare(work: Work) -> dict[str, Any]:
    """The process first, so that it has the machine's memory to itself; then the forecast and its phases here."""
    from rlhf.checkpoints.run_record import environment

    with Side("ours", work.write(Path(work.folder, "work.json"))) as side:
        machine = side.go()["machine"]
        measured = [side.go()["memory"] for _ in range(work.updates)][-1]["above_imports"]
    predicted, tensors = here(work)
    return {
        **environment(),
        "settings": work.settings,
        "machine": machine,
        "predicted": predicted.peak,
        "measured": measured,
        "ratio": predicted.peak / measured,
        "phase": predicted.largest.name,
        "parts": {**predicted.held, **predicted.largest.parts},
        "tensors": {
            method: {"predicted": max(tensors_of(phase) for phase in predicted.phases if phase.name in names),
                     "measured": tensors[method]}
            for method, names in METHODS.items()
        },
    }  # fmt: skip


def tensors_of(phase) -> int:
    """What of a phase are tensors of its own."""
    from rlhf.setup.peak_memory import CACHED_FORWARD, GAPS_LEFT

    # no tensors; found there when it begins
    aside = {GAPS_LEFT, *([CACHED_FORWARD] if phase.name == "scoring" else [])}
    return sum(size for name, size in phase.parts.items() if name not in aside)


def here(work: Work) -> tuple[Any, dict[str, int]]:
    """The forecast of a trainer, and the most that the tensors of each method took in its second update."""
    from benchmarks import ours

    trainer = ours.build(work)
    predicted = estimate(trainer)
    trainer.update_step(1)  # the optimizer's moments are there after it
    return predicted, tensors_in(trainer, METHODS, lambda: trainer.update_step(2))


def estimate(trainer):
    """The forecast of a trainer's updates, without evaluations."""
    from rlhf.rewards.build import find_rewards, make_rewards
    from rlhf.setup.memory import forecast

    device = trainer.accelerator.device
    _, judge = make_rewards(trainer.config, find_rewards(trainer.config), trainer.processing_class, device)
    return forecast(
        trainer.config,
        trainer.updates,
        device,
        policy=trainer.actor.policy,
        reward_model=judge.model,
        tokenizer=trainer.processing_class,
        train=trainer.train_prompts,
        evaluation=[],
    )


def tensors_in(trainer, methods: Iterable[str], run: Callable[[], Any]) -> dict[str, int]:
    """Bytes: the most that tensors took in each of some `methods` (PART.METHOD) while `run` ran, above what they took
    before it."""
    from benchmarks.machine import tensor_peak

    most, device = dict.fromkeys(methods, 0), trainer.accelerator.device.type

    def watched(name: str, plain: Callable) -> Callable:
        def method(*arguments, **named):
            answer, size = tensor_peak(device, lambda: plain(*arguments, **named))
            most[name] = max(most[name], size)
            return answer

        return method

    with ExitStack() as stack:
        for name in most:
            part, method = name.split(".")
            owner = getattr(trainer, part)
            stack.enter_context(patch.object(owner, method, watched(name, getattr(owner, method))))
        run()
    return most


# --- for people ------------------------------------------------------------------------------------------------------


def show(found: dict[str, Any], screen) -> None:
    """The peak and its parts, then the phases, then what was run where."""
    from benchmarks.machine import machine_line

    settings = found["settings"]
    how = "4-bit, adapters" if settings["load_in_4bit"] else "adapters" if settings["lora"] else "all trained"
    title = f"{settings['algorithm'].upper()}, {settings['size']}, {how}, {settings['device']}, {settings['dtype']}"
    rows = [["peak above imports", mib(found["predicted"]), mib(found["measured"]), f"{found['ratio']:.2f}"]]
    rows += [[f"  {name}", mib(size), "", ""] for name, size in found["parts"].items() if size]
    for name, sizes in found["tensors"].items():
        share = f"{sizes['predicted'] / sizes['measured']:.2f}"
        rows.append([f"tensors in {name}", mib(sizes["predicted"]), mib(sizes["measured"]), share])
    screen.table(title, ["", "predicted", "measured", "ratio"], rows, lines=False)
    screen.facts([("machine", machine_line(found["machine"])), ("torch", found["versions"]["torch"])])


def mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


if __name__ == "__main__":
    run_command(main)
