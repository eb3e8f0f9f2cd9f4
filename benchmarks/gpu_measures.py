"""Sections of `benchmarks/on_gpu.py` that call the library: self-test, decoding, memory, epochs."""

from __future__ import annotations

import json
import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from benchmarks.constants import ROOT
from benchmarks.gpu_limits import decoding_bytes, gpu_named
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
    varied,
)
from benchmarks.worker import Worker
from rlhf.models.device import autocast
from rlhf.rollout.completions import Completions
from rlhf.rollout.engine import sample_completions
from rlhf.rollout.sampling import uniform_noise
from rlhf.settings.training import SamplingSettings
from rlhf.setup.shape import Shape

ENGINES = ("plain", "slots", "graph")
SLOTS = (64, 256)
MORE_SLOTS = (64, 128, 256, 512, 1024)  # with --full
REFILLS = 4  # prompts per slot, if the lengths are mixed
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
    lengths = LENGTHS[section.plan.size]
    at = {"device": section.device, "dtype": section.dtype}
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
        if report.when == "call" and report.passed:
            self.section.finished(report.nodeid)
        if report.skipped:
            self.reasons.add(report.longrepr[2])
        self.record()

    def pytest_runtest_logfinish(self) -> None:
        import pytest

        if self.section.left <= 0:
            self.section.error("the other GPU tests", OUT_OF_TIME)
            pytest.exit(OUT_OF_TIME, returncode=0)

    def record(self) -> None:
        counts = {name: list(self.ended.values()).count(name) for name in ("passed", "failed", "skipped")}
        counts["not run"], before = self.selected - len(self.ended), len(self.section.plan.done)
        counts["passed"] += before
        note = "; ".join([", ".join(f"{count} {name}" for name, count in counts.items()), *self.reasons])
        self.section.figure("GPU tests passed", counts["passed"], f"of {self.selected + before}", note)


def last_line(text: str) -> str:
    """Return the line with the error from a pytest report."""
    errors = [line for line in text.splitlines() if line.startswith("E ")]
    return (errors or text.splitlines() or [""])[0].removeprefix("E ").strip()


def self_test(section: Section) -> None:
    """Run the tests marked `gpu` that an earlier call has not passed. The slow ones of predicted memory run only with
    --full."""
    import pytest

    files = ["scripts/test_gpu.py", *(["setup/test_memory.py"] if section.plan.full else [])]
    passed = [word for name in section.plan.done for word in ("--deselect", name)]
    words = ["-o", "addopts=", "-m", "gpu", "-p", "no:cacheprovider", "-q", *(str(ROOT / "tests" / f) for f in files)]
    pytest.main([*words, "--rootdir", str(ROOT), *passed], plugins=[Outcomes(section)])


# --- decoding --------------------------------------------------------------------------------------------------------


def decoding(engine: str, section: Section) -> None:
    """Measure one engine: completions of one length, and of mixed lengths with EOS and waiting prompts, also with
    top-p and with adapters. With one length, each slot generates one completion."""
    if engine == "graph" and not section.on_gpu:
        return section.error("graph", "needs a CUDA GPU")
    if section.on_gpu:
        torch.backends.cuda.enable_cudnn_sdp(False)  # as every run does
    captures = Captures()
    cases = {f"{slots:,} slots": Case(slots) for slots in (MORE_SLOTS if section.plan.full else SLOTS)}
    if engine != "plain":  # in the longest completion's time, whatever the others' lengths are
        cases["64 slots, mixed lengths"] = Case(64, mixed=True)
        cases["64 slots, mixed lengths, top-p 0.9"] = Case(64, mixed=True, top_p=0.9)
        cases["64 slots, mixed lengths, LoRA"] = Case(64, mixed=True, lora=True)
    for name, case in cases.items():
        name = f"{name}, {engine}"
        section.attempt(name, partial(decode, section, name, case, engine, captures))
    return None


@dataclass(frozen=True)
class Case:
    """What is decoded."""

    slots: int
    mixed: bool = False  # prompts and completions of different lengths, and more prompts than slots
    top_p: float = 1.0
    lora: bool = False


class Captures:
    """Counts the captures of CUDA graphs in this process, and measures their seconds."""

    def __init__(self):
        self.count = 0
        self.seconds = 0.0
        captures = self

        class Counted(torch.cuda.graph):
            def __enter__(self):
                self.start = seconds("cuda")
                return super().__enter__()

            def __exit__(self, *error):
                result = super().__exit__(*error)
                captures.count, captures.seconds = captures.count + 1, captures.seconds + seconds("cuda") - self.start
                return result

        torch.cuda.graph = Counted


def policy_for(section: Section, work: Work, case: Case) -> torch.nn.Module:
    """Return the policy with random weights. With mixed lengths EOS is as likely as completions of half the length
    need on average."""
    torch.manual_seed(SEED)
    with torch.device(section.device):
        policy = LlamaForCausalLM(model_config(work)).eval()
    weights = policy.get_input_embeddings().weight.data
    rule_out_special(weights)
    if case.mixed:
        ids = torch.arange(EOS + 1, EOS + 257, device=policy.device).unsqueeze(0)
        with torch.no_grad():
            hidden = policy.model(input_ids=ids).last_hidden_state[0]
            others = (hidden @ weights.t()).div(TEMPERATURE).logsumexp(-1).mean()
        weights[EOS] = 0.0
        weights[EOS, 0] = TEMPERATURE * (others - math.log(work.reply_length / 2)) / hidden[:, 0].mean()
    if case.lora:
        policy = get_peft_model(policy, LoraConfig(r=16, target_modules=["q_proj", "v_proj"])).eval()
    return policy


def decode(section: Section, name: str, case: Case, engine: str, captures: Captures) -> None:
    work = Work("", size=section.plan.size, **LENGTHS[section.plan.size])
    device = torch.device(section.device)
    policy = policy_for(section, work, case)
    count = case.slots * (REFILLS if case.mixed else 1)
    longest = work.prompt_length
    lengths = varied(longest / 2, longest, count, SEED) if case.mixed else [longest] * count
    prompts = random_prompts(lengths, policy.config.vocab_size, SEED)
    noise = uniform_noise(SEED, 0, "rollout", range(count), work.reply_length)

    def sample(length: int) -> tuple[Completions, float, float]:
        """Return the completions, the seconds without captures, and those of captures."""
        sampling = SamplingSettings(length, TEMPERATURE, 0, case.top_p)
        before = captures.seconds
        start = seconds(device.type)
        with autocast(device, torch.bfloat16 if section.on_gpu else None):
            completions = sample_completions(
                policy, prompts, noise[:, :length], sampling,
                eos=EOS, pad=PAD, device=device, engine=engine, slots=case.slots,
            )  # fmt: skip
        captured = captures.seconds - before
        return completions, seconds(device.type) - start - captured, captured

    sample(4)  # warm-up: selects kernels, allocates memory
    first = sample(1)[1]
    found = []
    while len(found) < REPEATS and (not found or section.left > 2 * sum(found[-1][1:])):
        found.append(sample(work.reply_length))
    completions = found[-1][0]
    rates = [one.tokens / (spent + captured) for one, spent, captured in found]
    tokens = f"{sum(lengths) / count:.0f} prompt and {completions.tokens / count:.0f} completion tokens on average"
    notes = [f"median of {len(found)}, with prefill and captures", tokens, section.dtype]
    if section.on_gpu:
        notes.append(f"{captures.count} captures in all, {median(one[2] for one in found):.3f} s per measurement")
    if not case.mixed:
        step = (median(one[1] for one in found) - first) / (work.reply_length - 1)
        notes.append(f"{1000 * step:.3g} ms per step{share_of_bandwidth(section, policy, work, case.slots, step)}")
    notes.append(equal_to_slots(section, name, engine, completions))
    section.figure(name, median(rates), "tokens/s", "; ".join(filter(None, notes)), all=rates)


def share_of_bandwidth(section: Section, policy: LlamaForCausalLM, work: Work, slots: int, step: float) -> str:
    """Return the share of the GPU's memory bandwidth that a decoding step uses (MBU); "" for an unknown GPU."""
    gpu = gpu_named(torch.cuda.get_device_name(0)) if section.on_gpu else None
    if gpu is None:
        return ""
    columns = work.prompt_length + work.reply_length / 2
    moved = decoding_bytes(Shape.of(policy.config, policy.num_parameters()), slots, columns)
    return f", MBU {moved / step / gpu.bandwidth:.0%}"


def equal_to_slots(section: Section, name: str, engine: str, completions: Completions) -> str:
    """Store the completions of `slots`. For `graph`, return how many are equal to them."""
    rows = completions.rows()
    file = section.folder("tokens") / f"{name.removesuffix(f', {engine}')}.json"
    if engine == "slots":
        file.write_text(json.dumps(rows), encoding="utf-8")
    if engine != "graph" or not file.is_file():
        return ""
    equal = sum(a == b for a, b in zip(rows, json.loads(file.read_text(encoding="utf-8")), strict=True))
    return f"{equal} of {len(rows)} completions equal those of slots"


# --- peak memory -----------------------------------------------------------------------------------------------------


def memory(section: Section) -> None:
    """Measure the peak memory of two PPO updates per kind of training, and compare it with the prediction."""
    with ExitStack() as stack:
        workers = {}
        works = {}
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
    memory = [worker.go()["memory"] for _ in range(work.updates)][-1]
    measured = memory["above_imports"]
    outside = [f"{name.replace('_', ' ')} {gib(memory[name]) if isinstance(memory[name], int) else memory[name]}"
               for name in ("reserved", "by_nvidia_smi") if name in memory]  # fmt: skip
    trainer = ours.build(work)
    predicted = estimator_of(trainer)(trainer.config)
    section.figure(
        f"PPO, {kind}, measured / predicted", measured / predicted.peak, "",
        f"measured {gib(measured)}, predicted {gib(predicted.peak)}; "
        + "".join(f"{one}; " for one in outside)
        + f"{work.episodes} episodes of {work.prompt_length} + {work.reply_length} tokens, {work.dtype}",
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


SECTIONS = {
    "self-test": self_test,
    **{f"decoding-{engine}": partial(decoding, engine) for engine in ENGINES},
    "memory": memory,
    "epochs": epochs,
}
