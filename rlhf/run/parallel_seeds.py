"""Trains several runs in separate processes: one per GPU at the same time, or on a CPU one per core."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from rlhf.checkpoints.model_folder import find_model
from rlhf.checkpoints.run_folder import is_in_use, read_status
from rlhf.demo.ready import is_ready
from rlhf.distributed.join import OF_LAUNCHERS, visible_gpus
from rlhf.run.resume_checks import in_one_precision
from rlhf.run.seeds import configs_of_seeds, is_finished, resumed_config, show_results
from rlhf.settings.next_commands import resume_command
from rlhf.settings.recipes import DEMOS
from rlhf.settings.training import Config
from rlhf.utils.console import Screen, quiet_imports
from rlhf.utils.errors import RunError, run_command
from rlhf.utils.libraries import check_libraries, import_libraries
from rlhf.utils.paths import exists, is_path
from rlhf.utils.signals import GracefulStop, TrainingInterrupted
from rlhf.utils.system import available_cores, new_process_group, send_stop, stop_signals

POLL_S, END_S = 0.2, 10.0
STOPPED = [128 + which for which in stop_signals()]  # exit statuses of a run that a signal stopped
# what a child process runs: it imports from the same folders as this process, wherever that was started
CHILD = "import sys; sys.path[:] = {path!r}; from rlhf.run.parallel_seeds import child; child()"


@dataclass
class Slot:
    """A place for one training process at a time."""

    name: str  # printed
    environment: dict[str, str]


@dataclass
class TrainingProcess:
    """The process of one run."""

    name: str  # printed
    config: Config
    slot: Slot
    process: subprocess.Popen
    line: str = "starting"  # its newest line of progress
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # those that are not printed yet

    @classmethod
    def start(cls, name: str, config: Config, slot: Slot) -> TrainingProcess:
        """Start the process. Its output is appended to the file of `log_of`."""
        log_of(config).parent.mkdir(parents=True, exist_ok=True)
        variables = {name: value for name, value in os.environ.items() if name not in OF_LAUNCHERS}
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**variables, **slot.environment, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"},
            **new_process_group(),  # Ctrl-C reaches this process only, which passes it on
        )
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # broken if the process has ended already
            pickle.dump((sys.argv, config), pipe)
        run = cls(name, config, slot, process)
        run.reader.start()
        return run

    @cached_property
    def reader(self) -> threading.Thread:
        """The thread that reads the process's output."""
        return threading.Thread(target=self._read, daemon=True)

    @property
    def problem(self) -> str:
        """Why the process ended, if it failed."""
        self.reader.join(END_S)
        if self.process.returncode in STOPPED:
            return "stopped"
        if self.errors:
            return self.errors[-1].removeprefix("error: ")
        return f"ended with status {self.process.returncode}: {log_of(self.config)}. Read this file"

    def _read(self) -> None:
        for line in self.process.stdout:
            text = line.decode("utf-8", errors="replace").rstrip()
            with contextlib.suppress(OSError), log_of(self.config).open("a", encoding="utf-8") as log:
                log.write(f"{text}\n")  # a full disk must not stop the process, which would wait for its reader
            if text.startswith("error: "):
                self.errors.append(text)
            elif text.startswith("warning: "):
                self.warnings.append(text)
            elif text.startswith(("update ", "evaluation after ", "loading ", "demo")):
                self.line = text


def log_of(config: Config) -> Path:
    """Return the file with the output of a run's process. It is beside the run's folder, which the run claims."""
    return Path(f"{config.run.output}.log")


def slots_for(runs: int) -> list[Slot]:
    """Return the places for training processes: the visible GPUs, or without one equal shares of the CPU's cores."""
    gpus = visible_gpus()
    if gpus:
        return [Slot(f"GPU {gpu}", {"CUDA_VISIBLE_DEVICES": gpu}) for gpu in gpus]
    cores = available_cores()
    count = min(runs, cores)
    threads = str(cores // count)
    return [Slot(f"{threads} of {cores} CPU cores", {"OMP_NUM_THREADS": threads}) for _ in range(count)]


def train_in_parallel(config: Config, screen: Screen) -> None:
    """Train the seeds of `config`, one process each, and print a table over seeds.

    Finished seeds, and those that another machine trains in the same folder, are skipped. Raises as `train_runs` and
    `report_rest`.
    """
    build_demo(config, screen)
    configs, finished = configs_of_seeds(config, with_others=True)
    names = {f"seed {seed}": seed for seed in configs}
    runs = {name: configs[seed] for name, seed in names.items()}
    done = {name for name, seed in names.items() if finished[seed]}
    ended = train_runs(runs, done, screen, resume_command(config, "--parallel"))
    done = {seed: one for seed, one in configs.items() if read_status(Path(one.run.output)) == "finished"}
    if done:
        show_results(config, done, screen)
    report_rest(runs, ended, screen)


def train_runs(
    runs: dict[str, Config], finished: Container[str], screen: Screen, resume: str, parallel: bool = True
) -> list[TrainingProcess]:
    """Train runs in separate processes. Returns the processes that were started, when all have ended.

    A stop signal is passed on to all processes, which save their runs. Raises TrainingInterrupted after it.

    Args:
        runs: the configuration of each run by its name, which is printed.
        finished: the names of the runs that are finished, and are skipped.
        screen: prints the progress.
        resume: the command that resumes the runs.
        parallel: train several runs at the same time.
    """
    for name, one in runs.items():
        if name in finished:
            screen.say(f"{name}: already finished in {one.run.output} (delete the folder to train it again)")
    if not all(name in finished for name in runs) and not visible_gpus():
        runs = in_one_precision(runs, lambda one: _precision_here(one, screen))
    waiting = {name: one for name, one in runs.items() if name not in finished}
    with screen, GracefulStop(screen.say) as stop:
        ended = Processes(waiting, screen, stop, parallel).run() if waiting else []
    if stop.by is not None:
        raise TrainingInterrupted(stop.by, f"stopped. Resume with: {resume}")
    return ended


def _precision_here(config: Config, screen: Screen) -> bool | None:
    """Return bf16 as this CPU's measurement sets it. The processes of the runs would disturb each other's."""
    import torch

    from rlhf.setup.precision import choose_precision

    name = config.model.actor_model
    if is_path(name) and not exists(name):  # the run's process builds it (the demos' are tiny), or reports it
        return None
    model = find_model(name, "--actor-model")
    return choose_precision(config, model, torch.device("cpu"), screen).model.bf16


def report_rest(runs: dict[str, Config], ended: Sequence[TrainingProcess], screen: Screen) -> None:
    """Print the runs that other processes train. Raises RunError for the runs that have failed."""
    started = {run.name for run in ended}
    others = [
        name for name, one in runs.items() if name not in started and read_status(Path(one.run.output)) != "finished"
    ]
    if others:
        screen.say(f"another process trains {'; '.join(others)}. Run this command again when it has finished")
    if any(run.process.returncode for run in ended):
        raise RunError([f"{run.name}: {run.problem}" for run in ended if run.process.returncode])


def build_demo(config: Config, screen: Screen) -> None:
    """Build the parts of a demo, which all runs share, if they do not exist."""
    if config.recipe in DEMOS and not is_ready(config.recipe):
        import_libraries(screen)
        from rlhf.models.device import start_device
        from rlhf.setup.build import prepare_demo_components

        prepare_demo_components(config, screen, start_device(screen))


class Processes:
    """The processes of several runs."""

    def __init__(self, waiting: dict[str, Config], screen: Screen, stop: GracefulStop, parallel: bool = True):
        """`waiting`: name -> configuration of its run. `parallel`: train several at the same time."""
        self.waiting, self.screen, self.stop = dict(waiting), screen, stop
        self.free, self.running, self.ended = slots_for(len(waiting)) if parallel else slots_for(1)[:1], [], []
        self.stopping = False

    def run(self) -> list[TrainingProcess]:
        """Train all runs. Returns those that were started, when all have ended."""
        places = ", ".join(dict.fromkeys(slot.name for slot in self.free))
        self.screen.say(f"training {len(self.waiting)} runs, at most {len(self.free)} at a time, each on: {places}")
        first = next(iter(self.waiting.values()))
        self.screen.say(f"their output is beside each run folder, such as {log_of(first)}")
        try:
            while self.running or (self.waiting and self.stop.by is None):
                try:
                    self.step()
                except KeyboardInterrupt:  # a second stop signal
                    self.pass_on()
        finally:  # no process is left behind, whatever happened
            self.pass_on()
            for run in self.running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.process.wait(END_S)
                run.process.kill()
        self.screen.end_progress()
        return self.ended

    def step(self) -> None:
        """Start, stop and report processes, and show the progress of those that run."""
        self.start_next()
        time.sleep(POLL_S)
        if self.stop.by is not None and not self.stopping:
            self.stopping = True
            self.pass_on()
        for run in self.running:
            self.show_warnings(run)
        self.collect()
        if self.running:
            self.screen.progress("\n".join(f"{run.name} | {run.line}" for run in self.running))

    def start_next(self) -> None:
        """Start waiting runs in the free places. A run that another process trains, or has trained, is skipped."""
        while self.free and self.waiting and self.stop.by is None:
            name = next(iter(self.waiting))
            config = self.waiting.pop(name)
            if not is_in_use(Path(config.run.output)) and not is_finished(config):
                self.running.append(TrainingProcess.start(name, config, self.free.pop(0)))

    def pass_on(self) -> None:
        """Send the stop signal to all processes."""
        for run in self.running:
            send_stop(run.process)

    def show_warnings(self, run: TrainingProcess) -> None:
        """Print the warnings that a process has printed since the last call."""
        while run.warnings:
            self.screen.end_progress()
            self.screen.say(f"{run.name}: {run.warnings.pop(0)}")

    def collect(self) -> None:
        """Report the processes that have ended, and free their places."""
        for run in [run for run in self.running if run.process.poll() is not None]:
            self.running.remove(run)
            self.free.append(run.slot)
            run.reader.join(END_S)
            self.show_warnings(run)
            self.screen.end_progress()
            if run.process.returncode and is_in_use(Path(run.config.run.output)):
                continue  # another process has started this run before
            self.ended.append(run)
            self.screen.say(f"{run.name}: {run.problem if run.process.returncode else 'finished'}")


def child() -> None:
    """Train the run whose configuration the parent process has written to stdin."""
    sys.argv, config = pickle.load(sys.stdin.buffer)
    run_command(lambda: _train(config))


def _train(config: Config) -> None:
    quiet_imports()
    screen = Screen()
    check_libraries()
    import_libraries(screen)
    from rlhf.run.train import train

    resumed = resumed_config(config, screen)
    if resumed is not None:
        train(resumed, screen)
