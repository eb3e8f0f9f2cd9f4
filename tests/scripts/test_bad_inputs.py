"""Tests bad inputs, by number. Each must give a one-line error with a fix, the right exit status and no traceback.

A row with exit status 2 is an error before the run: no files may be written, and no model may be loaded if the error
can be found without it. Exit status 1 is an error that ends a started run, and 0 is a warning.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import reward_model.train
import train_grpo
import train_ppo
from rlhf.api import make_trainer
from rlhf.callbacks import checkpointing
from rlhf.checkpoints.model_folder import METRICS_FILE
from rlhf.checkpoints.run_folder import INPUTS_FILE, read_status
from rlhf.checkpoints.run_log import RunLog
from rlhf.config import parse_cli
from rlhf.data.examples import load_examples
from rlhf.data.splits import question_hash
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.optimize import PolicyOptimizer
from rlhf.utils import files, hub
from rlhf.utils.errors import run_command
from tests.models.test_models import Hub
from tests.records import facts_of
from tests.shapes import make_base_model, make_reward_model, smollm2_tokenizer
from tests.systems import link_to_full_device, make_link

FORM = re.compile(r"error: .+: .+\. \S.*|and \d+ more")  # problem: place. fix


class Inputs:
    """The inputs of a row's command: a separate folder, the tiny models and the pairs."""

    def __init__(self, folder: Path, start: Path, reward: Path, pairs: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.start, self.reward, self.pairs = folder, start, reward, pairs
        self.monkeypatch = monkeypatch

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def copy_of(self, model: Path) -> Path:
        return Path(shutil.copytree(model, self.folder / "copy"))

    def files(self) -> dict[Path, bytes]:
        """Returns the contents of all files in the folder, without Python's caches of executed files."""
        paths = [path for path in self.folder.rglob("*") if "__pycache__" not in path.parts]
        return {path: path.read_bytes() for path in paths if path.is_file()}


Flags = str | Callable[[Inputs], Sequence[object]]  # flags, or a function that returns them


@dataclass(frozen=True)
class Row:
    number: int
    title: str
    bad_flags: Flags = ""
    message: str = ""  # a regular expression
    status: int = 2
    main: Callable[[list[str]], None] = train_ppo.main
    loads: bool = False  # the error is found after models are loaded

    def flags(self, inputs: Inputs) -> list[str]:
        bad_flags = self.bad_flags.split() if isinstance(self.bad_flags, str) else self.bad_flags(inputs)
        return [str(word) for word in [*BASE[self.main](inputs), *bad_flags]]


def training(inputs: Inputs) -> list[object]:
    return ["--actor-model", inputs.start, "--rm-model", inputs.reward, "--allow-weak-reward-model", "--prompts",
            inputs.pairs, "--output", inputs.folder / "run", "--batch-size", 4, "--num-iterations", 2,
            "--ppo-epochs", 1, "--max-new-tokens", 6, "--prompt-length", 100, "--eval-prompts", 6]  # fmt: skip


def reward_training(inputs: Inputs) -> list[object]:
    return ["--base-model", inputs.start, "--actor-model", inputs.start, "--pairs", inputs.pairs, "--rm-output",
            inputs.folder / "run", "--max-new-tokens", 6]  # fmt: skip


def from_python(argv: list[str]) -> None:
    """Makes a trainer whose evaluation prompts are also training prompts."""
    make_trainer(parse_cli(argv), ["a cat?", "a dog?", "a fox?", "a cow?"], evaluation_prompts=["A  cat?", "a hen?"])


BASE = {
    train_ppo.main: training,
    train_grpo.main: lambda inputs: [*training(inputs), "--K", 2, "--batch-size", 2],
    reward_model.train.main: reward_training,
    from_python: training,
}


# --- functions that return the flags of bad inputs -------------------------------------------------------------------


def yaml(text: str) -> Flags:
    return lambda inputs: ["--config", inputs.write("a.yaml", text)]


def data(*rows: object, flag: str = "--prompts", end: str = "\n") -> Flags:
    """A JSONL file with one valid row and `rows`."""
    good = {"prompt": "fine?", "chosen": "yes", "rejected": "no"}
    lines = [row if isinstance(row, str) else json.dumps(row) for row in (good, *rows)]
    return lambda inputs: [flag, inputs.write("rows.jsonl", "\n".join(lines) + end)]


def pairs(*rows: object) -> Flags:
    return data(*rows, flag="--pairs")


def prompts(count: int, repeated: int = 0, words: str = "") -> Flags:
    """Prompts without pairs, some of them repeated."""
    rows = [{"prompt": f"question {i % count}{words}"} for i in range(count + repeated)]
    return lambda inputs: ["--prompts", inputs.write("rows.jsonl", "\n".join(map(json.dumps, rows)))]


def topics(rare: int) -> Flags:
    """Sixty prompts of one topic and a few of another."""
    rows = [{"prompt": f"question {i}?", "topic": "rare" if i >= 60 else "common"} for i in range(60 + rare)]
    return lambda inputs: ["--prompts", inputs.write("rows.jsonl", "\n".join(map(json.dumps, rows))),
                          "--steps-per-topic", 2]  # fmt: skip


def tokenizer(flag: str, change: Callable, **attributes: object) -> Flags:
    """A model with a changed tokenizer, on which `attributes` are set."""

    def make(inputs: Inputs) -> list[object]:
        folder = inputs.copy_of(inputs.start if flag == "--actor-model" else inputs.reward)
        changed = change(AutoTokenizer.from_pretrained(folder))
        for name, value in attributes.items():
            setattr(changed, name, value)
        changed.save_pretrained(folder)
        return [flag, folder]

    return make


def larger(tokenizer):
    tokenizer.add_tokens([f"<extra {i}>" for i in range(9)])
    return tokenizer


def without_unused_token(tokenizer):
    tokenizer.chat_template += "<|endoftext|>"  # the only unused special token
    return tokenizer


def weights(flag: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Flags:
    """A model with changed tensors."""

    def make(inputs: Inputs) -> list[object]:
        folder = inputs.copy_of(inputs.start if flag == "--actor-model" else inputs.reward)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return [flag, folder]

    return make


def pickled(inputs: Inputs) -> list[object]:
    folder = inputs.copy_of(inputs.start)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return ["--actor-model", folder]


def with_code(inputs: Inputs) -> list[object]:
    folder = inputs.copy_of(inputs.start)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "homemade",
        "auto_map": {"AutoConfig": "home.Config", "AutoModelForCausalLM": "home.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "home.py").write_text("raise SystemExit('this code was run')")
    return ["--actor-model", folder]


def adapter(inputs: Inputs) -> list[object]:
    (inputs.folder / "adapter").mkdir()
    inputs.write("adapter/adapter_config.json", json.dumps({"base_model_name_or_path": "some/base"}))
    return ["--actor-model", inputs.folder / "adapter"]


def reward_folder(**changes: object) -> Flags:
    return lambda inputs: ["--rm-model", make_reward_model(inputs.folder / "bad", **changes)]


def trained_on_all_questions(inputs: Inputs) -> list[object]:
    """A reward model that was trained on all questions."""
    folder = inputs.copy_of(inputs.reward)
    record = {"accuracy": 0.9, "length_baseline": 0.5, "calibration": {}}
    record["train_questions"] = [question_hash(e) for e in load_examples(str(inputs.pairs))]
    (folder / METRICS_FILE).write_text(json.dumps(record))
    return ["--rm-model", folder, "--dry-run"]


def other_tokenizer(inputs: Inputs) -> list[object]:
    folder = inputs.copy_of(inputs.reward)
    other = smollm2_tokenizer(300)
    other.pad_token = "<|endoftext|>"
    other.save_pretrained(folder)
    return ["--rm-model", folder, "--dry-run"]


def critic(inputs: Inputs, reward: Flags, *more: object) -> list[object]:
    """A critic that starts from this reward model."""
    return [*reward(inputs), "--critic", "reward-model", *more]


def renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    """Changes a part of the tensors' names."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def with_sinks(inputs: Inputs) -> list[object]:
    """The reward model with the config of an architecture whose attention cannot be replaced."""
    folder = inputs.copy_of(inputs.reward)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "gpt_oss", "architectures": ["GptOssForSequenceClassification"], "num_local_experts": 2}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    (folder / "config.json").write_text(json.dumps(config))
    return ["--rm-model", folder]


def base_model(*more: object) -> Flags:
    return lambda inputs: ["--actor-model", make_base_model(inputs.folder / "base"), *more]


def hub_response(response: object) -> Flags:
    """A start model on a simulated hub."""

    def make(inputs: Inputs) -> list[object]:
        inputs.monkeypatch.setattr(hub, "HfApi", lambda: Hub(response))
        return ["--actor-model", "someone/model"]

    return make


def reward_function(code: str, *more: object) -> Flags:
    """A reward function f(completions) with these lines."""
    source = "import time\n\ndef f(completions):\n" + "".join(f"    {line}\n" for line in code.splitlines())
    return lambda inputs: ["--rm-model", "none", "--reward-func", f"{inputs.write('my_rewards.py', source)}:f", *more]


def old_gpu(inputs: Inputs) -> list[object]:
    """A simulated GPU without bfloat16."""
    inputs.monkeypatch.setattr("rlhf.run.train.start_device", lambda *_: torch.device("cuda"))
    inputs.monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    inputs.monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GTX 1080")
    return ["--bf16"]


def read_only(inputs: Inputs) -> list[object]:
    inputs.monkeypatch.setattr(os, "access", lambda *_: False)  # simulated: root may write everywhere
    return []


def windows(inputs: Inputs) -> list[object]:
    inputs.monkeypatch.setattr(files, "LONGEST_PATH", 259)  # simulated: the limit on Windows
    return ["--output", inputs.folder / ("a" * 90) / ("b" * 90)]


def output_holds(name: str, finished: bool | None = None) -> Flags:
    """The folder of a finished or unfinished run, or with `finished` None, a folder with other files."""

    def make(inputs: Inputs) -> list[object]:
        folder = inputs.folder / name
        folder.mkdir()
        if finished is None:
            (folder / "thesis.txt").write_text("years of work")
        else:
            log = RunLog(folder, **facts_of())
            log.add(status="finished" if finished else "running")
        return ["--output", folder]

    return make


def output_is_a_file(inputs: Inputs) -> list[object]:
    return ["--output", inputs.write("taken", "words")]


def little_space(inputs: Inputs) -> list[object]:
    usage = shutil.disk_usage(inputs.folder)
    inputs.monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**20))  # simulated
    return []


def full_during_a_save(inputs: Inputs) -> list[object]:
    """Makes a file of the second checkpoint a link to /dev/full, a device without free space."""
    original = checkpointing.write_checkpoint

    def write_checkpoint(folder, run, update, keep, write):
        def fill(temporary):
            if update == 2:
                link_to_full_device(temporary / "training.json")
            write(temporary)

        return original(folder, run, update, keep, fill)

    inputs.monkeypatch.setattr(checkpointing, "write_checkpoint", write_checkpoint)
    return ["--save-every", 1]


def live_run(inputs: Inputs) -> list[object]:
    (inputs.folder / "run").mkdir()
    inputs.log = RunLog(inputs.folder / "run", **facts_of())  # holds the lock until the test ends
    return []


def interrupted(change: Callable[[Inputs, Path], object] = lambda inputs, run: None, *more: object) -> Flags:
    """Resumes a run that ended in its fourth update with three checkpoints. `change` may change its files before."""

    class Killed(BaseException):
        """Simulates SIGKILL, which a process cannot catch."""

    def make(inputs: Inputs) -> list[object]:
        pairs = inputs.write("pairs.jsonl", inputs.pairs.read_text())
        flags = ["--num-iterations", 4, "--save-every", 1, "--keep", 3, "--prompts", pairs]
        original = OnPolicyLoop.update_step

        def update_step(trainer, number):
            if number == 4:
                raise Killed
            return original(trainer, number)

        with inputs.monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(OnPolicyLoop, "update_step", update_step)
            train_ppo.main([str(word) for word in [*training(inputs), *flags]])
        change(inputs, inputs.folder / "run")
        return [*flags, "--resume", *more]

    return make


def truncate(*updates: int) -> Callable[[Inputs, Path], object]:
    def change(inputs: Inputs, run: Path) -> None:
        for update in updates:
            file = run / f"checkpoint-{update}" / "training.safetensors"
            file.write_bytes(file.read_bytes()[:-1])

    return change


def other_version(inputs: Inputs, run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    record["versions"]["peft"] = "0.0.1"
    (run / "run.json").write_text(json.dumps(record))


def other_data(inputs: Inputs, run: Path) -> None:
    inputs.write("pairs.jsonl", inputs.pairs.read_text().replace("number", "No."))


def no_memory(inputs: Inputs) -> list[object]:
    """A simulated out-of-memory error of a GPU."""

    def gradients(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    inputs.monkeypatch.setattr(PolicyOptimizer, "gradients", gradients)
    return ["--micro-batch-size", 1]


def installed(name: str, version: str | None) -> Flags:
    """Simulates another version of a library, or with None, that it is not installed."""
    original = importlib.metadata.version

    def find_version(library: str) -> str:
        if library == name and version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version if library == name else original(library)

    def make(inputs: Inputs) -> list[object]:
        inputs.monkeypatch.setattr(importlib.metadata, "version", find_version)
        return []

    return make


# --- the table -------------------------------------------------------------------------------------------------------

GRPO, REWARD_MODEL = train_grpo.main, reward_model.train.main
NOT_FOUND = RepositoryNotFoundError("no", response=SimpleNamespace(headers={}, request=None))

CONFIGURATION = [
    Row(1, "misspelt flag", "--learning-rat 1",
        r"unknown flag --learning-rat: command line\. Did you mean --learning-rate\?"),
    Row(2, "abbreviated flag", "--learning_r 3", r"unknown flag --learning_r: .* Did you mean --learning-rate\?"),
    Row(3, "text for a number", "--gamma much", r"gamma is 'much': --gamma\. Give a number"),
    Row(3, "a fraction for a count", "--batch-size 2.5", r"batch_size is '2.5': --batch-size\. Give a whole number"),
    Row(4, "unknown recipe", "--recipe smolm2-orca", r"unknown recipe 'smolm2-orca': --recipe\. Did you mean smollm2"),
    Row(5, "unknown YAML key", yaml("ppo:\n  gama: 1\n"), r"unknown setting gama: .*a\.yaml:2\. Did you mean gamma\?"),
    Row(6, "YAML syntax", yaml("gamma: 1\nlam: [1\nb: 2\n"),
        r"not YAML \(.*\): .*a\.yaml:\d+:\d+\. Correct that line"),
    Row(7, "YAML missing", "--config nowhere.yaml",
        r"cannot read the configuration file: nowhere\.yaml \(.*\)\. Check --config"),
    Row(8, "YAML is a list", yaml("- 1\n- 2\n"),
        r"not a mapping of names to values: .*a\.yaml:1\. Write lines such as"),
    Row(9, "a key twice", yaml("gamma: 1\ngamma: 0.5\n"),
        r"gamma is set twice: .*a\.yaml:2 and .*a\.yaml:1\. Keep one"),
    Row(10, "learning rate 0", "--learning-rate 0", r"learning_rate is 0: --learning-rate\. It must be above 0"),
    Row(10, "learning rate below 0", "--learning-rate=-1e-4", r"learning_rate is -1e-4: .*\. It must be above 0"),
    Row(10, "learning rate NaN", "--learning-rate nan", r"learning_rate is nan: --learning-rate\. It must be above 0"),
    Row(10, "warm-up of half an update", "--warmup-steps 2.5",
        r"warmup_steps 2.5 is not a number of updates: --warmup-steps\. Give a whole number, or a share of the run"),
    Row(10, "warm-up longer than the run", "--warmup-steps 2 --num-iterations 2",
        r"the learning rate would rise for 2 of 2 updates and never reach its value: --warmup-steps\. Give a smaller"),
    Row(10, "warm-up share that is rounded up to the run", "--warmup-steps 0.9 --num-iterations 2",
        r"the learning rate would rise for 2 of 2 updates and never reach its value: --warmup-steps\. Give a smaller"),
    Row(10, "unknown optimizer", "--optim adamw_bnb_8bit",
        r"optim is adamw_bnb_8bit: --optim\. Did you mean adamw_8bit\? Choices: adamw, adamw_8bit"),
    Row(11, "temperature 0", "--temperature 0", r"temperature is 0: --temperature\. It must be above 0"),
    Row(12, "negative KL coefficient", "--kl-coef -0.1", r"kl_coef is -0.1: --kl-coef\. It must be at least 0"),
    Row(13, "negative missing-EOS penalty", "--missing-eos-penalty -1",
        r"missing_eos_penalty is -1: --missing-eos-penalty\. It must be at least 0"),
    Row(14, "completion length 0", "--max-new-tokens 0",
        r"max_new_tokens is 0: --max-new-tokens\. It must be at least 1"),
    Row(15, "K is 1", "--K 1", r"K is 1: --K\. It must be at least 2", main=GRPO),
    Row(16, "minibatches do not divide batch size x K", "--K 3 --batch-size 4 --minibatches 8",
        r"minibatches 8 does not divide batch_size x K = 12: --minibatches\. Try 6", main=GRPO),
    Row(17, "minibatches do not divide the batch", "--batch-size 8 --minibatches 3",
        r"minibatches 3 does not divide batch_size 8: --minibatches\. Try 2"),
    Row(18, "fewer episodes than a batch", "--episodes 3",
        r"episodes 3 is less than one update of 4: --episodes\. Try 4, or a smaller --batch-size"),
    Row(19, "clip range 1", "--clip-range 1", r"clip_range is 1: --clip-range\. It must be above 0 and below 1"),
    Row(19, "upper clip range 0", "--epsilon-high 0",
        r"epsilon_high is 0: --epsilon-high\. It must be above 0 and at most 100"),
    Row(19, "delta within the clip range", "--clip-ratio-high 0.5 --delta 1.5",
        r"delta 1.5 is not above 1 \+ epsilon_high = 1.5, .*: --delta\. Give a larger value, such as 3, or remove it"),
    Row(19, "delta with cispo", "--loss-type cispo --delta 4",
        r"delta has no effect with --loss-type cispo: --delta\. Change --loss-type cispo, or remove --delta",
        main=GRPO),
    Row(13, "a control with one prompt per update", "--control shuffled --batch-size 1",
        r"the scores of one prompt cannot be exchanged with those of others: --control with --batch-size 1\. Give a"),
    Row(13, "a penalty without an effect", "--missing-eos-penalty 1 --mask-truncated-completions",
        r"the penalty is for completions that are left out of the loss: --missing-eos-penalty with --mask-trunc"),
    Row(19, "gamma above 1", "--gamma 1.1", r"gamma is 1.1: --gamma\. It must be at least 0 and at most 1"),
    Row(19, "lambda below 0", "--lam -0.5", r"lam is -0.5: --lam\. It must be at least 0 and at most 1"),
    Row(19, "no update after the value warm-up", "--freezing-actor-steps 2",
        r"only the critic is trained in all 2 updates of the run: --critic-warmup 2\. Give a smaller number"),
    Row(19, "value warm-up without a critic", "--critic-warmup 2", r"--critic-warmup.*train_ppo\.py", main=GRPO),
    Row(15, "dynamic sampling without groups", "--dynamic-sampling 2",
        r"--dynamic-sampling.*train_grpo\.py and train_rloo\.py"),
    Row(15, "a negative number of draws", "--dynamic-sampling -1",
        r"dynamic_sampling is -1: --dynamic-sampling\. It must be at least 0", main=GRPO),
    Row(24, "critic from no reward model", "--critic reward-model --rm-model none --reward-func length_penalty",
        r"no reward model to start from: --critic reward-model, --rm-model none\. Give a reward model, or"),
    Row(24, "4-bit critic from the reward model", "--critic reward-model --use-lora --load-in-4bit",
        r"the reward model is not loaded in 4 bits: --critic reward-model with --load-in-4bit\. Remove one of them"),
    Row(24, "critic from a reward model with another tokenizer", lambda inputs: critic(inputs, other_tokenizer),
        r"the reward model's tokenizer or chat template differs from the start model's: --critic reward-model, --rm-"
        r"model .*\. Use a reward model that was trained from the start model's family, or --critic separate"),
    Row(24, "critic from a reward model with another head",
        lambda inputs: critic(inputs, weights("--rm-model", renamed("score.", "score.dense."))),
        r"the head is not one linear layer on a causal model: --critic reward-model, --rm-model .*\. Use --critic se"),
    Row(24, "critic from a reward model with another head, dry run",
        lambda inputs: critic(inputs, weights("--rm-model", renamed("score.", "score.dense.")), "--dry-run"),
        r"the head is not one linear layer on a causal model: --critic reward-model, --rm-model .*\. Use --critic se"),
    Row(24, "critic from a reward model with other modules",
        lambda inputs: critic(inputs, weights("--rm-model", renamed("q_proj", "query")),
                              "--use-lora", "--lora-targets", "q_proj", "--dry-run"),
        r"the reward model has no module named q_proj: --critic reward-model, --rm-model .*, --lora-targets\. Give"),
    Row(24, "critic from a reward model with other attention", lambda inputs: critic(inputs, with_sinks, "--dry-run"),
        r"the reward model's attention cannot be replaced: --critic reward-model, --rm-model .*\. Add --no-packed"),
    Row(24, "CUDA graphs on a CPU", "--rollout-engine graph",
        r"CUDA graphs require a CUDA GPU: --rollout-engine graph\. Remove the flag"),
    Row(24, "CUDA graphs on a CPU, dry run", "--rollout-engine graph --dry-run",
        r"CUDA graphs require a CUDA GPU: --rollout-engine graph\. Remove the flag"),
    Row(20, "bf16 and fp16", "--bf16 --fp16", r"unknown flag --fp16: command line\. Did you mean --bf16\?"),
    Row(20, "fp16 in YAML", yaml("fp16: true"), r"unknown setting fp16: .*a\.yaml:1\. Did you mean bf16\?"),
    Row(21, "bf16 on a device without it", old_gpu,
        r"this GPU \(GTX 1080\) has no bfloat16: --bf16\. Remove the flag"),
    Row(22, "LoRA targets match nothing", "--use-lora --lora-targets qproj",
        r"no module named qproj: --lora-targets, .*\. Did you mean q_proj\? Choose from down_proj, .*, v_proj"),
    Row(23, "4-bit without LoRA", "--load-in-4bit",
        r"load_in_4bit has no effect without --use-lora \(.*\): --load-in-4bit\. Add --use-lora, or remove"),
    Row(23, "a setting of LoRA without LoRA", "--lora-r 8",
        r"lora_r has no effect without --use-lora \(.*\): --lora-r\. Add --use-lora, or remove --lora-r$"),
    Row(25, "a KL target with a fixed beta", "--kl-schedule fixed --kl-target 3/sequence",
        r"kl_target has no effect with --kl-schedule fixed: --kl-target\. Change --kl-schedule fixed, or remove"),
    Row(25, "KL boundaries in the wrong order", "--kl-schedule phased --kl-boundaries 0.5 0.4",
        r"the boundaries 0\.5 0\.4 are not in increasing order: --kl-boundaries\. Give them in increasing order"),
    Row(25, "one KL boundary for three targets", "--kl-schedule phased --kl-boundaries 0.5",
        r"1 boundaries for 3 KL targets: --kl-boundaries\. Give 2$"),
    Row(24, "one weight for two rewards", "--reward-func length_penalty --reward-weights 1",
        r"1 weights for 2 rewards: --reward-weights\. Give one for each, in this order: reward model, length_pen"),
]  # fmt: skip

NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
AT_LINE_2 = r".*rows\.jsonl:2, '.+'"  # with an excerpt
DATA = [
    Row(25, "file missing",
        lambda inputs: ["--prompts", inputs.write("prompts.jsonl", "{}").with_name("promts.jsonl")],
        r"data file not found: .*promts\.jsonl\. Did you mean .*prompts\.jsonl\? --prompts takes"),
    Row(25, "evaluation file missing",
        lambda inputs: ["--eval-dataset", inputs.write("prompts.jsonl", "{}").with_name("promts.jsonl")],
        r"data file not found: .*promts\.jsonl\. Did you mean .*prompts\.jsonl\? --eval-dataset takes"),
    Row(26, "malformed line of the evaluation file", data("{oops", flag="--eval-dataset"),
        r"not JSON \(.+\): .*rows\.jsonl:2, '\{oops'\. Write one JSON object per line$"),
    Row(26, "empty file", lambda inputs: ["--prompts", inputs.write("empty.jsonl", "")],
        r"no rows: .*empty\.jsonl\. Each row must be an object with"),
    Row(27, "malformed line", data("{oops", {"prompt": "b"}),
        r"not JSON \(.+\): .*rows\.jsonl:2, '\{oops'\. Write one JSON object per line$"),
    Row(27, "a number of 5,000 digits", data(f'{{"prompt": {"1" * 5000}}}'),
        rf"not JSON \(.+\): {AT_LINE_2}\. Write one JSON"),
    Row(27, "twelve malformed lines", data(*["{oops"] * 12), r"rows\.jsonl:6, '\{oops'.*\nand 7 more\n"),
    Row(28, "last line cut off", data('{"prompt": "is it', end=""),
        rf"not JSON \(Unterminated string.*\): {AT_LINE_2}\. Write one JSON object per line\. Is the file incomp"),
    Row(29, "not UTF-8", lambda inputs: ["--prompts", inputs.write("latin.jsonl", b'{"prompt": "caf\xe9"}')],
        r"not UTF-8: .*latin\.jsonl, byte 15\. Save the file as UTF-8"),
    Row(30, "no prompt column", data({"text": "a"}),
        rf"no prompt: {AT_LINE_2}, columns \['text'\]\. Each row needs \"question\".*\. If 'text' is the pr"),
    Row(30, "no topic in some rows",
        lambda inputs: [*data({"prompt": "a", "topic": " "})(inputs), "--steps-per-topic", 2],
        r"no \"topic\": .*rows\.jsonl:1, '.+', columns \['chosen', 'prompt', 'rejected'\]\. Add a topic to every row, "
        r"or remove --steps-per-topic\n.*no \"topic\": .*rows\.jsonl:2, '.+', columns \['prompt', 'topic'\]"),
    Row(30, "a topic of fewer prompts than a batch", lambda inputs: [*topics(2)(inputs), "--dry-run"],
        r"warning: 1 topics have fewer prompts than a batch of 4 \(rare [12]\), so batches repeat prompts: --steps-"
        r"per-topic\. Use",
        status=0),
    Row(30, "a topic without training prompts after the split",
        lambda inputs: [*topics(2)(inputs), "--max-prompts", 30, "--dry-run"],
        r"warning: no prompt left to train on for 1 topics \(rare\): .*rows\.jsonl\. Add rows for them, change --spl",
        status=0),
    Row(31, "prompt misspelt in some rows", data({"promt": "a", "chosen": "b", "rejected": "c"}),
        rf"no prompt: {AT_LINE_2}, columns .*If 'promt' is the prompt, add --columns prompt=promt"),
    Row(31, "chosen misspelt in some rows", pairs({"prompt": "a", "choosen": "b", "rejected": "c"}),
        rf"no \"chosen\": {AT_LINE_2}, columns \['choosen', .*A pair needs both", main=REWARD_MODEL),
    Row(32, "null prompt", data({"prompt": None}), rf"prompt is null, not text: {AT_LINE_2}\. Correct or remove that"),
    Row(33, "prompt is a number", data({"prompt": 7}),
        rf"prompt is 7, not text: {AT_LINE_2}\. Correct or remove that"),
    Row(33, "prompt is NaN", data('{"prompt": NaN}'), rf"prompt is NaN, not text: {AT_LINE_2}\. Correct or remove"),
    Row(34, "empty prompt", data({"prompt": "  "}), rf"prompt is empty: {AT_LINE_2}\. Correct or remove that row"),
    Row(35, "prompts longer than the context",
        lambda inputs: [*prompts(40, words=" and so on" * 200)(inputs), "--prompt-length", 5000],
        r"(\d+) of \1 prompts are longer than the start model's context of 512 tokens \(the longest: \d{3,}\): "
        r"--prompts .*\. Try --prompt-length 506 \(longer prompts are skipped\)"),
    Row(36, "prompt and completion longer than the context", "--max-new-tokens 490",
        r"\d+ of \d+ prompts plus --max-new-tokens 490 are longer than the start model's context of 512 tokens \(the "
        r"longest: \d+ \+ 490\): --prompts .*\. Try --max-new-tokens \d+ or --prompt-length 22 \(longer"),
    Row(37, "fewer prompts than a batch", "--max-prompts 3",
        r"the number of training prompts \(3\) is below the batch size \(4\): --prompts .*\. Use more .* or "
        r"a smaller --batch-size"),
    Row(37, "fewer prompts than GRPO's batch", "--max-prompts 1",
        r"the number of training prompts \(1\) is below the batch size \(2\): --prompts .*\. Use more .* or "
        r"a smaller", main=GRPO),
    Row(38, "chosen equals rejected", pairs({"prompt": "a", "chosen": "b", "rejected": "b"}),
        rf"chosen equals rejected: {AT_LINE_2}\. Correct or remove that row", main=REWARD_MODEL),
    Row(39, "rejected missing", pairs({"prompt": "a", "chosen": "b"}),
        rf"no \"rejected\": {AT_LINE_2}, columns \['chosen', 'prompt'\]\. A pair needs both \"chosen\" and \"rej",
        main=REWARD_MODEL),
    Row(39, "chosen and rejected missing", pairs({"prompt": "a"}),
        rf"no \"chosen\" and \"rejected\": {AT_LINE_2}, columns \['prompt'\]\. A reward model", main=REWARD_MODEL),
    Row(40, "unknown chat role", data({"messages": [{"role": "robot", "content": "a"}]}),
        rf"unknown chat role 'robot': {AT_LINE_2}\. Use one of system, user, assistant, tool"),
    Row(41, "chats without a chat template", base_model(),
        r"\d+ prompts are chats of several messages, and the start model has no chat template: --prompts .*, start "
        r"model .*base\. Use"),
    Row(41, "a chat template that refuses a chat",
        tokenizer("--actor-model", lambda unchanged: unchanged, chat_template=NO_SYSTEM),
        r"the chat template rejects it \(no system messages\): prompt with the roles system, user, '.*'\. Write chat"),
    Row(41, "plain prompts without a chat template",
        lambda inputs: [*base_model("--dry-run")(inputs), *prompts(60)(inputs)],
        r"note: .*base has no chat template, so prompts are used as plain text", status=0),
    Row(42, "evaluation file also trained on", lambda inputs: ["--eval-dataset", inputs.pairs],
        r"warning: \d+ of the \d+ evaluation prompts are also training prompts, .*: --eval-dataset .*\. Use other",
        status=0),
    Row(42, "evaluation file without the column of a reward function",
        lambda inputs: [*data(*({"prompt": p, "answer": "1"} for p in "bcd"))(inputs), "--batch-size", 1, "--rm-model",
                        "none", "--reward-func", "last_number", "--eval-dataset",
                        inputs.write("eval.jsonl", '{"prompt": "e"}')],
        r"'last_number' requires the column 'answer', which the data lacks: --eval-dataset .*eval\.jsonl\."),
    Row(42, "evaluation prompts also trained on", "",
        r"warning: 1 of the 2 evaluation prompts are also training prompts, .*\. Use other", status=0,
        main=from_python),
    Row(42, "the reward model was trained on them", trained_on_all_questions,
        r"warning: the reward model was trained on 6 of the 6 evaluation prompts' questions, so its scores",
        status=0),
    Row(43, "over 5% duplicates", lambda inputs: [*prompts(60, repeated=10)(inputs), "--dry-run"],
        r"warning: 10 of 70 rows are duplicates: .*rows\.jsonl\. Remove them", status=0),
    Row(44, "NUL", data({"prompt": "a\0b"}),
        rf"prompt contains a NUL character \(character 2\): {AT_LINE_2}\. Correct"),
    Row(44, "no paragraph in the evaluation text",
        lambda inputs: ["--eval-text", inputs.write("text.txt", "a\n\n \n\nb")],
        r"no paragraph with at least 2 tokens: --eval-text .*text\.txt\. Give a longer text"),
    Row(44, "no paragraph in the evaluation text, dry run",
        lambda inputs: ["--eval-text", inputs.write("text.txt", "\n\n \n"), "--dry-run"],
        r"no paragraph with at least 2 tokens: --eval-text .*text\.txt\. Give a longer text"),
    Row(44, "a lone surrogate", data({"prompt": "a?", "chosen": "b", "rejected": "\ud800"}),
        rf"rejected contains a lone surrogate \(character 1\): {AT_LINE_2}\. Correct or remove that row"),
]  # fmt: skip

MODELS = [
    Row(45, "not found", hub_response(NOT_FOUND),
        r"model not found: someone/model is neither a local folder nor on the hub\. Check the name, or use --actor"),
    Row(45, "gated", hub_response("manual"),
        r"model is gated: someone/model\. Accept its terms on the hub and run `hf auth"),
    Row(45, "offline", "--actor-model someone/model",
        r"cannot download the model: someone/model \(not in the local cache, and .*offline.*\)\. Go online, or use"),
    Row(46, "a LoRA folder as a full model", adapter,
        r"an adapter, not a full model: --actor-model .*adapter\. Merge it into its base \(some/base\): peft\.Auto"),
    Row(47, "tokenizer larger than the policy", tokenizer("--actor-model", larger),
        r"the tokenizer has \d+ tokens, but the model has only \d+ embeddings: .*copy\. Use a model with its own"),
    Row(48, "tokenizer larger than the reward model", tokenizer("--rm-model", larger),
        r"the tokenizer has \d+ tokens, but the model has only \d+ embeddings: .*copy\. Use a model with its own"),
    Row(49, "tokenizers differ", other_tokenizer,
        r"warning: the reward model's tokenizer differs from the start model's: --rm-model .*\. Completions are "
        r"decoded to text and encoded again", status=0),
    Row(50, "reward model with 2 outputs", reward_folder(outputs=2),
        r"2 outputs, but a reward model has exactly one: --rm-model .*\. Train one with", main=GRPO),
    Row(51, "reward head freshly initialised", weights("--rm-model", lambda tensors: tensors.pop("score.weight")),
        r"no trained score head \(score\.weight is missing\): .*\. Train one with", loads=True),
    Row(52, "reward model without pad", reward_folder(pad=None),
        r"no pad token, .*: --rm-model .*\. Set pad_token_id in its config\.json to a token other than EOS"),
    Row(53, "no pad token", tokenizer("--actor-model", without_unused_token, pad_token=None),
        r"no pad token other than EOS, and no unused special token: tokenizer of .*\. Set pad_token in its"),
    Row(54, "pad equals EOS", tokenizer("--actor-model", without_unused_token, pad_token="<|im_end|>"),
        r"no pad token other than EOS, and no unused special token: tokenizer of .*\. Set pad_token in its"),
    Row(55, "no EOS", tokenizer("--actor-model", lambda unchanged: unchanged, eos_token=None),
        r"no EOS token: tokenizer of .*\. Set eos_token in its tokenizer_config\.json"),
    Row(56, "reward model is a causal LM", lambda inputs: ["--rm-model", inputs.start],
        r"a language model \(LlamaForCausalLM\), not a reward model: --rm-model .*\. Train one with"),
    Row(57, "policy's weights with NaN",
        weights("--actor-model", lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"][3].fill_(float("nan"))),
        r"NaN or infinity in model\.layers\.1\.mlp\.up_proj\.weight: weights of .*\. Use an earlier", loads=True),
    Row(57, "reward model's weights with infinity",
        weights("--rm-model", lambda tensors: tensors["score.weight"][0, 1:3].fill_(float("inf"))),
        r"NaN or infinity in score\.weight: weights of .*\. Use an earlier checkpoint of it", loads=True),
    Row(58, "pickled weights only", pickled,
        r"cannot be loaded: .*copy \(.*safetensors.*\)\. Give a complete model folder with safetensors", loads=True),
    Row(59, "needs trust_remote_code", with_code,
        r"the model needs trust_remote_code, which is not supported: .*copy\. Use a model whose architecture"),
]  # fmt: skip

SAVED = r"\. Fix the function; its inputs are saved in .*failed_inputs\.json$"
REWARDS = [
    Row(60, "NaN", reward_function("return [0.0] * (len(completions) - 1) + [float('nan')]"),
        rf"score nan is not a finite number \(None .*\): reward function 'f', .*{SAVED}", status=1),
    Row(60, "NaN under GRPO", reward_function("return [float('nan')] * len(completions)"),
        rf"score nan is not a finite number \(None .*\): reward function 'f', .*{SAVED}", status=1, main=GRPO),
    Row(61, "infinity", reward_function("return [float('-inf')] * len(completions)"),
        rf"score -inf is not a finite number: reward function 'f', completion '.*'{SAVED}", status=1),
    Row(61, "1e38", reward_function("return [1e38] * len(completions)"),
        rf"score 1e\+38 is too large \(the limit is 1e\+09\): reward function 'f', completion '.*'{SAVED}", status=1),
    Row(63, "text", reward_function("return 'good'"),
        r"expected 6 scores, got 'good', which is not a list: reward function 'f', first completion '.*'\. Return one",
        status=1),
    Row(63, "a scalar", reward_function("return 1.0"),
        r"expected 6 scores, got 1\.0, which is not a list: reward function 'f', first completion", status=1),
    Row(63, "nothing", reward_function("return None"),
        r"expected 6 scores, got None, which is not a list: reward function 'f', first completion", status=1),
    Row(64, "wrong count", reward_function("return [1.0] * 4"),
        r"expected 6 scores, got 4: \[1\.0, 1\.0, 1\.0, 1\.0\]: reward function 'f', first completion '.*'\. "
        r"Return one", status=1),
    Row(65, "raises", reward_function("return [1 / (len(c) - len(c)) for c in completions]"),
        r"^error: my_rewards\.py:4 `return \[1 / \(len\(c\) - len\(c\)\) for c in completions\]` raised "
        rf"ZeroDivisionError: .*: reward function 'f', completion '.*'{SAVED}", status=1),
    Row(65, "raises inside a library",
        reward_function("import json\nreturn [json.loads('\\n{') for c in completions]"),
        rf"^error: my_rewards\.py:5 `return .*` raised JSONDecodeError: .*: reward function 'f', "
        rf"completion '.*'{SAVED}", status=1),
    Row(66, "hangs", reward_function("time.sleep(20)", "--reward-timeout", 0.1),
        r"no result after 0\.1 s: reward function 'f', 6 completions, the first is '.*'\. Make it faster, or raise "
        r"--reward-timeout; its inputs are saved in .*failed_inputs\.json$", status=1),
    Row(67, "the same for the whole run", reward_function("return [1.0] * len(completions)"),
        r"warning: nothing can be learned, every score is 1 \(last 2 updates\): 1 x f\. Fix: .*use harder prompts",
        status=0),
]  # fmt: skip

DISK_AND_ENVIRONMENT = [
    Row(68, "read-only output", read_only,
        r"no permission to write: --output .*run \(.* is read-only\)\. Give another folder"),
    Row(69, "too little space for the checkpoints", little_space,
        r"0\.00 GiB free in .*, 0\.00 GiB needed for 3 checkpoints, best/ and the final weights: free disk\. "
        r"Free disk space",
        loads=True),
    Row(70, "full during a save", full_during_a_save,
        r"the checkpoint of update 2 could not be saved \(.*No space left.*\): .*run; "
        r"the newest checkpoint is checkpoint-1\. Free disk space\. Resume with: python train_ppo\.py --resume --out",
        status=1),
    Row(71, "output in use by a live run", live_run,
        rf"the folder is in use by a running process \(PID {os.getpid()}, started 20.*\): --output .*run\. "
        r"Stop that process, or use"),
    Row(72, "output holds a finished run", output_holds("mine", finished=True),
        r"the folder already contains a finished run: --output .*mine\. Add --overwrite to replace it, or "
        r"use another folder with"),
    Row(72, "output holds an unfinished run", output_holds("mine", finished=False),
        r"the folder already contains an unfinished run: --output .*mine\. Add --resume to continue it, "
        r"--overwrite to"),
    Row(72, "output holds something else", output_holds("mine"),
        r"the folder contains files but no run\.json, so it is not replaced: --output .*mine\. Use another "
        r"folder with --output"),
    Row(73, "newest checkpoint is incomplete", interrupted(truncate(3)),
        r"warning: skipped an invalid checkpoint: checkpoint-3: training\.safetensors has [\d,]+ bytes instead of "
        r"[\d,]+\. Using checkpoint-2", status=0),
    Row(74, "no valid checkpoint", interrupted(truncate(1, 2, 3)),
        r"no valid checkpoint: --output .*run, checkpoint-1: training\.safetensors has .* by --overwrite"
        r"\n.*checkpoint-2.*\n.*checkpoint-3"),
    Row(75, "settings changed on resume", interrupted(lambda *_: None, "--learning-rate", 0.5, "--gamma", 0.5),
        r"cannot resume: gamma was 1\.0 in this run and is 0\.5 now\. Restore it, or add --resume-anyway\n"
        r"error: cannot resume: learning_rate was .* in this run and is 0\.5 now\. Restore it, or add"),
    Row(75, "data changed on resume", interrupted(other_data),
        r"cannot resume: train_sha256 was .* in this run and is .* now\. Restore it, or add", loads=True),
    Row(75, "versions changed on resume", interrupted(other_version),
        r"cannot resume: peft was 0\.0\.1 in this run and is .* now\. Restore it, or add --resume-anyway"),
    Row(76, "output is a file", output_is_a_file,
        r"not a folder: --output .*taken \(.*taken is a file\)\. Give another folder"),
    Row(76, "output is too long for Windows", windows,
        r"the path is too long \(\d+ .* 259.*\): --output .*\. Give a short"),
    Row(76, "a name is too long", lambda inputs: ["--output", inputs.folder / ("a" * 300)],
        r"the path is too long \(.* 255 for a name\): --output .*\. Give a shorter one"),
    Row(77, "out of memory", no_memory,
        r"out of memory with one completion at a time: the backward pass \(CUDA out of memory\..*\)\. To reduce "
        r"memory: (--[a-z0-9 _-]+ \(about \d+\.\d\d GiB less\)(, )?){3}$", status=1),
    Row(78, "another trl", installed("trl", "1.13.0"),
        r'wrong version of trl \(1\.13\.0\): rlhf-workstation requires trl==1\.12\.0\. '
        r'Fix it with: pip install "trl==1\.12\.0"$'),
    Row(78, "requests missing", installed("requests", None),
        r'requests is not installed: rlhf-workstation requires it\. '
        r'Install it with: pip install "requests>=2\.32,<3"$'),
    Row(78, "trl missing for the reward model", installed("trl", None),
        r'trl is not installed: rlhf-workstation requires it\. Install it with: pip install "trl==1\.12\.0"$',
        main=REWARD_MODEL),
]  # fmt: skip


def template(text: str) -> Flags:
    """A start model with this chat template."""

    def make(inputs: Inputs) -> list[object]:
        model = inputs.copy_of(inputs.start)
        (model / "chat_template.jinja").write_text(text)
        return ["--actor-model", model]

    return make


def link(target: str) -> Flags:
    """An output folder that is a link."""

    def make(inputs: Inputs) -> list[object]:
        make_link(inputs.folder / "linked", target)
        return ["--output", inputs.folder / "linked"]

    return make


def link_to_itself(flag: str) -> Flags:
    def make(inputs: Inputs) -> list[object]:
        make_link(inputs.folder / "circle", "circle")
        return [flag, inputs.folder / "circle"]

    return make


def file(name: str, content: str | bytes) -> Flags:
    return lambda inputs: ["--prompts", inputs.write(name, content)]


def folder_of_data(inputs: Inputs) -> list[object]:
    (inputs.folder / "saved").mkdir()
    return ["--prompts", inputs.folder / "saved"]


TEMPLATE_FAILS = (
    r"the chat template fails with {} \(.*\): prompt with the roles .*Write chats in the form that the start"
)
MORE_ERRORS = [
    Row(79, "a template that divides by zero", template("{{ 1/0 }}"), TEMPLATE_FAILS.format("ZeroDivisionError")),
    Row(79, "a template with a huge range", template("{{ range(10000000)|list }}"),
        TEMPLATE_FAILS.format("OverflowError")),
    Row(79, "a template that adds text and a number", template("{{ messages[0]['content'] + 1 }}"),
        TEMPLATE_FAILS.format("TypeError")),
    Row(80, "output is a link to itself", link("linked"),
        r"a broken link: --output .*linked.*Remove it"),
    Row(80, "output is a link to nothing", link("nowhere"),
        r"a broken link: --output .*linked.*Remove it"),
    Row(80, "data is a link to itself", link_to_itself("--prompts"),
        r"not a valid path \(.*\): .*circle\. Give another"),
    Row(80, "the start model is a link to itself", link_to_itself("--actor-model"),
        r"not a valid path \(.*circle.*\): "),
    Row(80, "home folder of an unknown user", "--actor-model ~nobody_here/model",
        r"actor_model is '~nobody_here/model': --actor-model\. Give .*~NAME is the home folder of a user"),
    Row(81, "a name that is not UTF-8", lambda inputs: ["--output", f"{inputs.folder}/\udcff"],
        r"not valid text: command line, '.*\\udcff'\. Use only"),
    Row(82, "a seed too large for numpy", "--seed 1e30",
        r"seed is 1e30: --seed\. It must be at least 0 and at most 4,294,967,295"),
    Row(82, "a seed that a float would round", "--seed 9007199254740993",
        r"seed is 9007199254740993: --seed\. It must be at"),
    Row(82, "one of several seeds too large", "--seeds 1 4294967296",
        r"seeds is 4294967296: --seeds\. It must be at least 0 and"),
    Row(83, "too many updates", "--num-iterations 1e18",
        r"num_iterations is 1e18: --num-iterations\. It must be at least 1 and at most 10,000,000"),
    Row(83, "too many episodes", "--episodes 1e9 --batch-size 1",
        r"episodes 1000000000 is more than 10,000,000 upd"),
    Row(83, "a huge batch", "--batch-size 1e12",
        r"batch_size is 1e12: --batch-size\. It must be at most 1,000,0"),
    Row(84, "lora_alpha too large for float32", "--use-lora --lora-alpha 1e308",
        r"lora_alpha is 1e308: --lora-alpha\. It must be above 0 and at most 1,?e?"),
    Row(85, "a CSV file without prompts", file("a.csv", "text,answer\na,b\n"),
        r"no prompt: .*a\.csv row 0, columns \['answer', 'text'\]\. Each row needs .*add --columns prompt=text"),
    Row(85, "a broken Parquet file", file("a.jsonl", b"PAR1\x15\x04"),
        r"not Parquet \(.*\): .*a\.jsonl\. Correct the file, or write it again"),
    Row(85, "a truncated JSON array", file("a.json", '[\n{"prompt": "a"},\n{"pro'),
        r"not JSON \(.*\): .*a\.json:3, '.*'\. Write a JSON array of objects\. Is the file incomplete\?"),
    Row(85, "an empty folder of data", folder_of_data,
        r"no data files in this folder: --prompts .*saved\. Data files end with \.jsonl, "),
    Row(86, "many bad rows", data(*['{"prompt": ""}'] * 9), r"(error: prompt is empty: .*\n){5}and 4 more$"),
    Row(87, "unknown names", "--learning-rat 1 --never-seen none",
        r"unknown flag --learning-rat: command line\. Did you mean --learning-rate\?\n"
        r"error: unknown flag --never-seen: command line\. --help-all lists all settings; docs/coming_from_trl\.md "
        r"lists other trainers' names"),
    Row(88, "a scan and a check", "--scan --check",
        r"a scan looks at the start model before a run and then stops: --scan with --check\. Remove one of them"),
    Row(88, "one pass rate", "--keep-pass-rate 0.2",
        r"a lowest and a highest pass rate are needed, got 0\.2: --keep-pass-rate\. Give two numbers from 0 to 1"),
    Row(88, "pass rates in the wrong order", "--keep-pass-rate 0.8 0.2",
        r"a lowest and a highest pass rate are needed, got 0\.8 0\.2: --keep-pass-rate\. Give two"),
    Row(88, "a pass rate above 1", "--keep-pass-rate 20 80",
        r"keep_pass_rate is 20: --keep-pass-rate\. It must be at least 0 and at most 1"),
    Row(88, "one completion has no variance", "--scan --scan-samples 1",
        r"scan_samples is 1: --scan-samples\. It must be at least 2"),
    Row(88, "no pass rate of a reward model", "--keep-pass-rate 0.2 0.8",
        r"the score \S+ is not between 0 and 1, so there is no pass rate: --keep-pass-rate\. Remove it, or use",
        loads=True),
    Row(88, "nothing to learn", lambda inputs: [*reward_function("return [0.0] * len(completions)")(inputs), "--scan"],
        r"nothing can be learned, every score is 0 \(\d+ prompts\): --scan\. Fix: ", loads=True),
    Row(62, "all None", reward_function("return [None] * len(completions)"),
        r"no completion has a score, because every reward function returned None \(f\): the evaluation after update "
        r"0\. Use prompts to which a reward function applies", status=1),
    Row(88, "a best rule without its function", "--best-rule right",
        r"best_rule is 'right': --best-rule\. Give one of score, perplexity$"),
    Row(88, "an evaluation function with the name of a metric", "--eval-func my.py:perplexity",
        r"every evaluation has a metric named 'perplexity': --eval-func\. Rename the function"),
    Row(88, "two evaluation functions with one name", "--eval-func a.py:f b.py:f",
        r"2 evaluation functions are named 'f': --eval-func\. Rename them"),
    Row(88, "an evaluation function that does not exist", "--eval-func exact_mach",
        r"no such reward function: --eval-func exact_mach\. Did you mean exact_match\?"),
    Row(88, "no column for an evaluation function", "--eval-func exact_match",
        r"evaluation function 'exact_match' requires the column 'answer', which the data lacks: the eval"),
]  # fmt: skip

# errors that need the tokenizer, the hub, the weights, a checkpoint or the GPU, so they come after the import of torch
LATE = {
    "evaluation file without the column of a reward function",
    *("bf16 on a device without it", "no valid checkpoint", "data changed on resume"),
    *("prompts longer than the context", "prompt and completion longer than the context"),
    *("chats without a chat template", "a chat template that refuses a chat", "a template that divides by zero"),
    *("a template with a huge range", "a template that adds text and a number"),
    *("not found", "gated", "offline", "needs trust_remote_code", "no pad token", "pad equals EOS"),
    *("policy's weights with NaN", "reward model's weights with infinity", "too little space for the checkpoints"),
    *("no column for an evaluation function", "nothing to learn", "no pass rate of a reward model"),
}
LATE |= {
    row.title
    for row in (*CONFIGURATION, *DATA)
    if row.title.startswith(("critic from a reward model", "CUDA graphs on a CPU", "no paragraph in"))
}
ROWS = [*CONFIGURATION, *DATA, *MODELS, *REWARDS, *DISK_AND_ENVIRONMENT, *MORE_ERRORS]


# --- the checks of every row -----------------------------------------------------------------------------------------


@pytest.fixture
def inputs(tmp_path, start_model, reward_folder, pairs_file, monkeypatch) -> Inputs:
    return Inputs(tmp_path, start_model, reward_folder, pairs_file, monkeypatch)


def refuse_loading(monkeypatch) -> None:
    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        monkeypatch.setattr(kind, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{row.number} {row.title}") for row in ROWS])
def test_bad_input_gives_one_line_with_a_fix(row, inputs, capsys):
    argv = row.flags(inputs)
    if row.status == 2 and not row.loads:
        refuse_loading(inputs.monkeypatch)
    before, imported = inputs.files(), []
    for name in ("rlhf.commands.train.import_libraries", "rlhf.commands.train.quiet_libraries",
                 "rlhf.commands.reward_model.import_libraries"):  # fmt: skip
        inputs.monkeypatch.setattr(name, lambda *_, **__: imported.append(True))
    capsys.readouterr()
    status = 0
    try:
        run_command(lambda: row.main(argv))
    except SystemExit as ended:
        status = ended.code
    output = capsys.readouterr()
    assert status == row.status, output.err
    assert "Traceback" not in output.out + output.err
    if status == 0:
        assert re.search(row.message, output.out), output.out
        assert output.err == ""
        return
    assert re.search(row.message, output.err, flags=re.MULTILINE), output.err
    assert all(FORM.fullmatch(line) for line in output.err.splitlines()), output.err
    if status == 2:
        assert inputs.files() == before, "no files may be written"
        assert bool(imported) == (row.title in LATE), "reported before or after the import of torch"
        return
    assert read_status(inputs.folder / "run") == "failed"
    if row in REWARDS:
        saved = json.loads((inputs.folder / "run" / INPUTS_FILE).read_text(encoding="utf-8"))
        assert len(saved["completions"]) == len(saved["messages"]) == 6, "the inputs of the function"


def test_every_number_has_a_row():
    assert {row.number for row in ROWS} == set(range(1, 89))
    assert all(row.message for row in ROWS)
    assert len({(row.number, row.title) for row in ROWS}) == len(ROWS)
