"""Runs one section of `benchmarks/on_gpu.py` as a separate process that prints one JSON object per figure.

python -m benchmarks.run_section PLAN    (PLAN: a Plan as JSON; it ends when its standard input is closed)
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import suppress

import psutil

from benchmarks.gpu_section import Plan, Section


def end_with_the_call() -> None:
    """End this process and all that it has started when standard input is closed, as it is when the process that
    started this one ends, even if it is killed. Otherwise they would use the GPU during the next call."""
    given = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # processes that this one starts read nothing

    def wait() -> None:
        os.read(given, 1)  # returns when no process can write any more
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    end_with_the_call()
    plan = Plan(**json.loads(sys.argv[1]))
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print to the log file
    from benchmarks.work import choose_device
    from rlhf.utils.console import quiet_libraries

    section = Section(plan, channel)
    choose_device(plan.device)
    quiet_libraries()
    from benchmarks import gpu_measures, gpu_profile, gpu_trainings, gpu_updates  # after the choice of the device

    modules = (gpu_measures, gpu_updates, gpu_profile, gpu_trainings)
    sections = {name: measure for module in modules for name, measure in module.SECTIONS.items()}
    section.machine()
    sections[plan.section](section)
    if section.on_gpu:
        from benchmarks.machine import gpu_state

        state = gpu_state()
        clock = state.pop("clocks.sm")
        others = ", ".join(map(" ".join, state.items()))
        section.figure("clock at the end of the section", clock, "MHz", others)


if __name__ == "__main__":
    main()
