"""Sections of `benchmarks/on_gpu.py` that call the library: self-test, decoding, memory, epochs."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import torch
from transformers import LlamaForCausalLM

from benchmarks.gpu_section import OUT_OF_TIME, OutOfTime, Section
from benchmarks.machine import gib, seconds
from benchmarks.work import (
    EOS,
    PAD,
    SEED,
    TEMPERATURE,
    Work,
    make_models,
    model_config,
    random_prompts,
    rule_out_special,
)
from benchmarks.worker import ROOT, Worker
from rlhf.models.device import autocast
from rlhf.rollout.engine import sample_completions
from rlhf.rollout.sampling import uniform_noise
from rlhf.settings.training import SamplingSettings

ENGINES = ("plain", "slots", "graph")
SLOTS = (64, 128, 256, 512, 1024)
REPEATS = 3  # measurements of each decoding, if there is time
EPOCH = 10_000  # prompts per epoch
RECORD_EVERY = 5  # updates of a whole epoch
# work per update; TRL's GRPO has no minibatches
UPDATE = {"ppo": {"batch_size": 8, "minibatches": 2}, "grpo": {"batch_size": 4, "K": 6}}
LENGTHS = {"smollm2": {"prompt_length": 128, "reply_length": 64}, "tiny": {"prompt_length": 16, "reply_length": 16}}
_GROUPS = {"batch_size": 16, "minibatches": 4, "K": 6}
WHOLE_EPOCH = {"ppo": {"batch_size": 64, "minibatches": 16}, "grpo": _GROUPS, "rloo": _GROUPS}
MEMORY = {"full": {}, "LoRA": {"lora": True}, "4-bit LoRA": {"lora": True, "load_in_4bit": True}}


def work_for(section: Section, **more) -> Work:
    """Return Work with this section's size and device, and with models in the folder that all sections share."""
    lengths, at = LENGTHS[section.plan.size], {"device": section.device, "dtype": section.dtype}
    return Work(section.plan.models, size=section.plan.size, **at, **lengths, **more)


def make_shared_models(work: Work) -> None:
    """Make the work's models unless an earlier section made them."""
    made = Path(work.folder, "made")
    if not made.exists():
        make_models(work)
        made.touch()  # last, so that models of an interrupted section are not used


# --- self-test -------------------------------------------------------------------------------------------------------


class Outcomes:
    """A pytest plugin that counts outcomes, records each failure, and stops when the section's time is over."""

    def __init__(self, section: Section):
        self.section, self.ended, self.selected, self.reasons = section, {}, 0, set()

    def pytest_collection_finish(self, session) -> None:
        self.selected = len(session.items)

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.section.error(f"collecting {report.nodeid}", last_line(report.longreprtext))

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.ended[report.nodeid] = report.outcome
        if report.failed:
            self.section.error(report.nodeid, last_line(report.longreprtext))
        if report.skipped:
            self.reasons.add(report.longrepr[2])
        self.record()

    def pytest_runtest_logfinish(self) -> None:
        import pytest

        if self.section.left <= 0:
            pytest.exit(OUT_OF_TIME, returncode=0)

    def record(self) -> None:
        counts = {name: list(self.ended.values()).count(name) for name in ("passed", "failed", "skipped")}
        counts["not run"] = self.selected - len(self.ended)
        note = "; ".join([", ".join(f"{count} {name}" for name, count in counts.items()), *self.reasons])
        self.section.figure("GPU tests passed", counts["passed"], f"of {self.selected}", note)


def last_line(text: str) -> str:
    """Return the line with the error from a pytest report."""
    errors = [line for line in text.splitlines() if line.startswith("E ")]
    return (errors or text.splitlines() or [""])[0].removeprefix("E ").strip()


def self_test(section: Section) -> None:
    """Run the tests marked `gpu`. The slow ones of predicted memory run only with --full."""
    import pytest

    files = ["scripts/test_gpu.py", *(["setup/test_memory.py"] if section.plan.full else [])]
    words = ["-o", "addopts=", "-m", "gpu", "-p", "no:cacheprovider", "-q", *(str(ROOT / "tests" / f) for f in files)]
    pytest.main(words, plugins=[Outcomes(section)])


# --- decoding --------------------------------------------------------------------------------------------------------


def decoding(section: Section) -> None:
    """Measure completion tokens per second of each engine. Each slot generates one completion of the full length.

    The time includes the prefill and, for `graph`, the capture of the CUDA graph.
    """
    work = Work("", size=section.plan.size, **LENGTHS[section.plan.size])
    device = torch.device(section.device)
    torch.manual_seed(SEED)
    with device:
        policy = LlamaForCausalLM(model_config(work)).eval()
    rule_out_special(policy.get_input_embeddings().weight.data)
    for slots in SLOTS:
        for engine in ENGINES if section.on_gpu else ENGINES[:-1]:  # a CUDA graph needs a GPU
            name = f"{slots:,} slots, {engine}"
            section.attempt(name, partial(decode, section, name, policy, work, slots, engine))


def decode(section: Section, name: str, policy: LlamaForCausalLM, work: Work, slots: int, engine: str) -> None:
    device = policy.device
    prompts = random_prompts([work.prompt_length] * slots, policy.config.vocab_size, SEED)
    noise = uniform_noise(SEED, 0, "rollout", range(slots), work.reply_length)

    def sample(length: int) -> tuple[int, float]:
        sampling = SamplingSettings(length, TEMPERATURE)
        start = seconds(device.type)
        with autocast(device, torch.bfloat16 if section.on_gpu else None):
            completions = sample_completions(
                policy, prompts, noise[:, :length], sampling,
                eos=EOS, pad=PAD, device=device, engine=engine, slots=slots,
            )  # fmt: skip
        tokens = sum(completions.completion_lengths)
        return tokens, seconds(device.type) - start

    sample(4)  # warm-up: selects kernels, allocates memory
    rates = []
    while len(rates) < REPEATS and (not rates or section.left > work.reply_length * slots / rates[-1]):
        tokens, spent = sample(work.reply_length)
        rates.append(tokens / spent)
    lengths = f"{work.prompt_length} prompt and {work.reply_length} completion tokens"
    note = f"median of {len(rates)}, including prefill, {lengths}, {section.dtype}"
    section.figure(name, median(rates), "tokens/s", note, all=rates)


# --- peak memory -----------------------------------------------------------------------------------------------------


def memory(section: Section) -> None:
    """Measure the peak memory of two PPO updates per kind of training, and compare it with the prediction."""
    with ExitStack() as stack:
        workers, works = {}, {}
        for kind, more in MEMORY.items():
            works[kind] = work_for(section, updates=2, **UPDATE["ppo"], **more)
            work_file = works[kind].write(section.folder(f"workers/{kind.replace(' ', '_')}") / "work.json")
            workers[kind] = stack.enter_context(Worker("ours", work_file))  # all import at the same time
        make_shared_models(works["full"])
        for kind, worker in workers.items():
            section.attempt(f"PPO, {kind}", partial(peak, section, kind, works[kind], worker))


def peak(section: Section, kind: str, work: Work, worker: Worker) -> None:
    from benchmarks import ours
    from rlhf.setup.fit import estimator_of

    worker.go()
    measured = [worker.go()["memory"]["above_imports"] for _ in range(work.updates)][-1]
    trainer = ours.build(work)
    predicted = estimator_of(trainer)(trainer.config)
    section.figure(
        f"PPO, {kind}, measured / predicted", measured / predicted.peak, "",
        f"measured {gib(measured)}, predicted {gib(predicted.peak)} (largest in the {predicted.largest.name}); "
        f"{work.episodes} episodes of {work.prompt_length} + {work.reply_length} tokens, {work.dtype}",
        measured_bytes=measured, predicted_bytes=predicted.peak,
    )  # fmt: skip


# --- whole epochs ----------------------------------------------------------------------------------------------------


def epochs(section: Section) -> None:
    for number, algorithm in enumerate(WHOLE_EPOCH):
        until = time.monotonic() + section.left / (len(WHOLE_EPOCH) - number)
        section.attempt(f"{algorithm.upper()}, one epoch", partial(epoch_of, section, algorithm, until))


def epoch_of(section: Section, algorithm: str, until: float) -> None:
    """Measure all updates of an epoch. If the time is too short, extrapolate, and state so in the note."""
    settings = WHOLE_EPOCH[algorithm]
    whole = -(-EPOCH // settings["batch_size"])
    work = work_for(section, algorithm=algorithm, updates=1 + whole, **settings)
    make_shared_models(work)
    name = f"{algorithm.upper()}, one epoch of {EPOCH:,} prompts"
    with Worker("ours", work.write(section.folder(f"workers/epoch_{algorithm}") / "work.json")) as worker:
        worker.go()
        worker.go()  # a warm-up
        spent: list[float] = []
        while len(spent) < whole and time.monotonic() < until:
            spent.append(worker.go()["seconds"])
            if len(spent) % RECORD_EVERY == 0 or len(spent) == whole:
                note = f"measured over all {whole:,} updates"
                if len(spent) < whole:
                    note = f"extrapolated from {len(spent):,} of {whole:,} updates"
                minutes = sum(spent) / len(spent) * whole / 60
                section.figure(name, minutes, "min", f"{note}; {settings['batch_size']} prompts per update")
    if len(spent) < RECORD_EVERY:
        raise OutOfTime


SECTIONS = {"self-test": self_test, "decoding": decoding, "memory": memory, "epochs": epochs}
