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
from functools import partial
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
from rlhf.algorithms.table import ALGORITHMS
from rlhf.api import make_trainer
from rlhf.callbacks import checkpointing
from rlhf.checkpoints.model_folder import METRICS_FILE
from rlhf.checkpoints.run_folder import INPUTS_FILE, read_status
from rlhf.checkpoints.run_log import RunLog
from rlhf.config import command_line, parse_cli
from rlhf.data.examples import load_examples
from rlhf.data.splits import question_hash
from rlhf.settings.reward_model import LINE, parse_reward_cli
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.optimize import PolicyOptimizer
from rlhf.utils import files, hub
from rlhf.utils.errors import Problem, RunError, UserError, run_command
from tests.advice import FLAG
from tests.models.test_models import Hub
from tests.records import facts_of
from tests.shapes import make_base_model, make_reward_model, smollm2_tokenizer
from tests.systems import link_to_full_device, make_link
from tests.test_advice import NAMES_TRAINING

FORM = re.compile(r"error: .+: .+\. [\w-].*|and \d+ more")  # problem: place. fix


class Inputs:
    """The inputs of a row's command: a separate folder, the tiny models and the pairs."""

    def __init__(self, folder: Path, start: Path, reward: Path, pairs: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder = folder
        self.start = start
        self.reward = reward
        self.pairs = pairs
        self.monkeypatch = monkeypatch

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def copy_of(self, model: Path) -> Path:
        return Path(shutil.copytree(model, self.folder / "copy"))

    def files(self) -> dict[Path, bytes]:
        """Return the contents of all files in the folder, without Python's caches of executed files."""
        paths = [path for path in self.folder.rglob("*") if "__pycache__" not in path.parts]
        return {path: path.read_bytes() for path in paths if path.is_file()}


Flags = str | Callable[[Inputs], Sequence[object]]  # flags, or a function that returns them


@dataclass(frozen=True)
class Row:
    number: int
    title: str
    bad_flags: Flags = ""
    parts: str = ""  # words of the message: names, places, numbers
    place: str = ""  # the beginning of the first problem's place
    settings: str = ""  # the first problem's settings
    status: int = 2
    main: Callable[[list[str]], None] = train_ppo.main
    loads: bool = False  # the error is found after models are loaded
    problems: int = 1

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


def short_context(inputs: Inputs) -> list[object]:
    folder = inputs.copy_of(inputs.start)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 50}))
    return ["--actor-model", folder]


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


def teacher(flags: Flags, *more: object) -> Flags:
    """A teacher in place of a bad start model or reward model."""
    return lambda inputs: ["--teacher", flags(inputs)[1], *more]


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
    inputs.monkeypatch.setattr("rlhf.setup.fit.available", lambda _: 8 * 2**30)
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

GRPO = train_grpo.main
ALGORITHM = {train_ppo.main: "ppo", GRPO: "grpo", from_python: "ppo"}
REWARD_MODEL = reward_model.train.main
NOT_FOUND = RepositoryNotFoundError("no", response=SimpleNamespace(headers={}, request=None))

CONFIGURATION = [
    Row(1, "misspelt flag", "--learning-rat 1", "--learning-rat --learning-rate", place="command line"),
    Row(2, "abbreviated flag", "--learning_r 3", "--learning_r --learning-rate", place="command line"),
    Row(3, "text for a number", "--gamma much", "gamma 'much' --gamma", place="--gamma"),
    Row(3, "a fraction for a count", "--batch-size 2.5", "batch_size '2.5' --batch-size", place="--batch-size"),
    Row(4, "unknown recipe", "--recipe smolm2-orca", "'smolm2-orca' --recipe smollm2-orca", place="--recipe"),
    Row(5, "unknown YAML key", yaml("ppo:\n  gama: 1\n"), "gama a.yaml:2 gamma", place="<tmp>/a.yaml:2"),
    Row(6, "YAML syntax", yaml("gamma: 1\nlam: [1\nb: 2\n"), "a.yaml:3:2", place="<tmp>/a.yaml:3:2"),
    Row(7, "YAML missing", "--config nowhere.yaml", "nowhere.yaml --config", place="nowhere.yaml"),
    Row(8, "YAML is a list", yaml("- 1\n- 2\n"), "a.yaml:1", place="<tmp>/a.yaml:1"),
    Row(5, "a YAML number of 5,000 digits", yaml(f"save_every: {'9' * 5000}"), "save_every a.yaml:1",
        place="<tmp>/a.yaml:1"),
    Row(5, "a YAML number with a colon", yaml("save_every: 1:30"), "save_every '1:30' a.yaml:1",
        place="<tmp>/a.yaml:1"),
    Row(5, "an empty stop string", lambda inputs: ["--stop", ""], "stop ''", place="--stop"),
    Row(9, "a key twice", yaml("gamma: 1\ngamma: 0.5\n"), "gamma a.yaml:2 a.yaml:1",
        place="<tmp>/a.yaml:2 and <tmp>/a.yaml:1"),
    Row(10, "learning rate 0", "--learning-rate 0", "learning_rate 0 --learning-rate", place="--learning-rate"),
    Row(10, "learning rate below 0", "--learning-rate=-1e-4", "learning_rate -1e-4 --learning-rate",
        place="--learning-rate"),
    Row(10, "learning rate NaN", "--learning-rate nan", "learning_rate nan --learning-rate", place="--learning-rate"),
    Row(10, "warm-up of half an update", "--warmup-steps 2.5", "warmup_steps 2.5 --warmup-steps",
        place="--warmup-steps 2.5", settings="warmup_steps"),
    Row(10, "warm-up longer than the run", "--warmup-steps 2 --num-iterations 2", "2 --warmup-steps",
        place="--warmup-steps 2.0", settings="warmup_steps"),
    Row(10, "warm-up share that is rounded up to the run", "--warmup-steps 0.9 --num-iterations 2",
        "2 --warmup-steps", place="--warmup-steps 0.9", settings="warmup_steps"),
    Row(10, "unknown optimizer", "--optim adamw_bnb_8bit", "adamw_bnb_8bit --optim adamw_8bit adamw", place="--optim"),
    Row(11, "temperature 0", "--temperature 0", "temperature 0 --temperature", place="--temperature"),
    Row(12, "negative KL coefficient", "--kl-coef -0.1", "kl_coef -0.1 --kl-coef 0", place="--kl-coef"),
    Row(13, "negative missing-EOS penalty", "--missing-eos-penalty -1",
        "missing_eos_penalty -1 --missing-eos-penalty 0", place="--missing-eos-penalty"),
    Row(14, "completion length 0", "--max-new-tokens 0", "max_new_tokens 0 --max-new-tokens 1",
        place="--max-new-tokens"),
    Row(15, "K is 1", "--K 1", "K 1 --K 2", place="--K 1", settings="K", main=GRPO),
    Row(16, "minibatches do not divide batch size x K", "--K 3 --batch-size 4 --minibatches 8",
        "minibatches 8 batch_size K 12 --minibatches 6", place="--minibatches 8", settings="minibatches", main=GRPO),
    Row(17, "minibatches do not divide the batch", "--batch-size 8 --minibatches 3",
        "minibatches 3 batch_size 8 --minibatches 2", place="--minibatches 3", settings="minibatches"),
    Row(18, "fewer episodes than a batch", "--episodes 3", "episodes 3 4 --episodes --batch-size",
        place="--episodes 3", settings="episodes", problems=2),
    Row(19, "clip range 1", "--clip-range 1", "clip_range 1 --clip-range 0", place="--clip-range"),
    Row(19, "upper clip range 0", "--epsilon-high 0", "epsilon_high 0 --epsilon-high 100", place="--epsilon-high"),
    Row(19, "delta within the clip range", "--clip-ratio-high 0.5 --delta 1.5", "delta 1.5 epsilon_high --delta",
        place="--delta 1.5", settings="delta"),
    Row(19, "delta with cispo", "--loss-type cispo --delta 4", "delta --loss-type cispo --delta",
        place="--delta", main=GRPO),
    Row(13, "a control with one prompt per update", "--control shuffled --batch-size 1", "--control --batch-size 1",
        place="--control shuffled, --batch-size 1", settings="control batch_size"),
    Row(13, "a penalty without an effect", "--missing-eos-penalty 1 --mask-truncated-completions",
        "--missing-eos-penalty --mask-truncated-completions",
        place="--missing-eos-penalty 1.0, --mask-truncated-completions",
        settings="missing_eos_penalty mask_truncated_completions"),
    Row(19, "gamma above 1", "--gamma 1.1", "gamma 1.1 --gamma 0 1", place="--gamma"),
    Row(19, "lambda below 0", "--lam -0.5", "lam -0.5 --lam 0 1", place="--lam"),
    Row(19, "no update after the value warm-up", "--freezing-actor-steps 2", "2 --critic-warmup",
        place="--critic-warmup 2"),
    Row(19, "value warm-up without a critic", "--critic-warmup 2", "--critic-warmup train_ppo.py",
        place="command line", main=GRPO),
    Row(19, "a learning rate of the critic of 0", "--critic-learning-rate 0",
        "critic_learning_rate 0 --critic-learning-rate", place="--critic-learning-rate"),
    Row(19, "beta2 of 1", "--adam-beta2 1", "adam_beta2 1 --adam-beta2 0", place="--adam-beta2"),
    Row(15, "dynamic sampling without groups", "--dynamic-sampling 2",
        "--dynamic-sampling train_grpo.py train_rloo.py", place="command line"),
    Row(15, "a negative number of draws", "--dynamic-sampling -1",
        "dynamic_sampling -1 --dynamic-sampling 0", place="--dynamic-sampling", main=GRPO),
    Row(24, "critic of a missing run", lambda inputs: ["--critic", inputs.folder / "gone"], "--critic shared",
        place="<tmp>/gone"),
    Row(24, "an unknown kind of critic", "--critic seperate", "critic 'seperate' --critic shared", place="--critic"),
    Row(24, "critic from a run without one, dry run",
        lambda inputs: ["--critic", inputs.copy_of(inputs.start), "--dry-run"], "--critic value_head.safetensors",
        place="--critic <tmp>/copy"),
    Row(24, "critic from no reward model", "--critic reward-model --rm-model none --reward-func length_penalty",
        "--critic reward-model --rm-model none",
        place="--critic reward-model, --rm-model none", settings="critic rm_model"),
    Row(24, "4-bit critic from the reward model", "--critic reward-model --use-lora --load-in-4bit",
        "--critic reward-model --load-in-4bit",
        place="--critic reward-model, --load-in-4bit", settings="critic load_in_4bit"),
    Row(24, "critic from a reward model with another tokenizer", lambda inputs: critic(inputs, other_tokenizer),
        "--critic reward-model --rm-model <tmp>/copy separate", place="--critic reward-model, --rm-model <tmp>/copy"),
    Row(24, "critic from a reward model with another head",
        lambda inputs: critic(inputs, weights("--rm-model", renamed("score.", "score.dense."))),
        "--critic reward-model --rm-model <tmp>/copy separate", place="--critic reward-model, --rm-model <tmp>/copy"),
    Row(24, "critic from a reward model with another head, dry run",
        lambda inputs: critic(inputs, weights("--rm-model", renamed("score.", "score.dense.")), "--dry-run"),
        "--critic reward-model --rm-model <tmp>/copy separate", place="--critic reward-model, --rm-model <tmp>/copy"),
    Row(24, "critic from a reward model with other modules",
        lambda inputs: critic(inputs, weights("--rm-model", renamed("q_proj", "query")),
                              "--use-lora", "--lora-targets", "q_proj", "--dry-run"),
        "q_proj --critic --rm-model --lora-targets",
        place="--critic reward-model, --rm-model <tmp>/copy, --lora-targets"),
    Row(24, "critic from a reward model with other attention", lambda inputs: critic(inputs, with_sinks, "--dry-run"),
        "--critic reward-model --rm-model <tmp>/copy --no-packed",
        place="--critic reward-model, --rm-model <tmp>/copy"),
    Row(24, "a missing teacher", lambda inputs: ["--teacher", inputs.folder / "gone"], "--teacher",
        place="<tmp>/gone"),
    Row(24, "a teacher for GRPO", lambda inputs: ["--teacher", inputs.start],
        "--teacher train_ppo.py train_reinforce_pp.py", place="command line", main=GRPO),
    Row(24, "a teacher with another tokenizer", teacher(other_tokenizer),
        "--teacher <tmp>/copy --actor-model", place="--teacher <tmp>/copy, --actor-model"),
    Row(24, "a teacher with more tokens", teacher(tokenizer("--actor-model", larger), "--dry-run"),
        "--teacher <tmp>/copy --actor-model", place="--teacher <tmp>/copy, --actor-model"),
    Row(24, "a teacher with a shorter context", teacher(short_context), "50 --teacher <tmp>/copy --max-new-tokens",
        place="--teacher <tmp>/copy"),
    Row(24, "an adapter as the teacher", teacher(adapter), "--teacher <tmp>/adapter some/base",
        place="--teacher <tmp>/adapter"),
    Row(24, "a reward model as the teacher", lambda inputs: ["--teacher", inputs.copy_of(inputs.reward)],
        "score.weight <tmp>/copy", place="<tmp>/copy", loads=True),
    Row(24, "a teacher of a control", lambda inputs: ["--teacher", inputs.start, "--control", "shuffled"],
        "--control --teacher", place="--control shuffled, --teacher", settings="control teacher"),
    Row(24, "no reward and no teacher", "--rm-model none", "--rm-model none --reward-func teacher",
        place="--rm-model none", settings="rm_model"),
    Row(24, "CUDA graphs on a CPU", "--rollout-engine graph", "--rollout-engine graph",
        place="--rollout-engine graph"),
    Row(24, "CUDA graphs on a CPU, dry run", "--rollout-engine graph --dry-run", "--rollout-engine graph",
        place="--rollout-engine graph"),
    Row(20, "bf16 and fp16", "--bf16 --fp16", "--fp16 --bf16", place="command line"),
    Row(20, "fp16 in YAML", yaml("fp16: true"), "fp16 a.yaml:1 bf16", place="<tmp>/a.yaml:1"),
    Row(21, "bf16 on a device without it", old_gpu, "GTX 1080 --bf16", place="--bf16"),
    Row(22, "LoRA targets match nothing", "--use-lora --lora-targets qproj",
        "qproj --lora-targets q_proj down_proj v_proj", place="--lora-targets"),
    Row(23, "4-bit without LoRA", "--load-in-4bit", "load_in_4bit --use-lora --load-in-4bit", place="--load-in-4bit"),
    Row(23, "a setting of LoRA without LoRA", "--lora-r 8", "lora_r --use-lora --lora-r", place="--lora-r"),
    Row(25, "a KL target with a fixed beta", "--kl-schedule fixed --kl-target 3/sequence",
        "kl_target --kl-schedule fixed --kl-target", place="--kl-target"),
    Row(24, "one weight for two rewards", "--reward-func length_penalty --reward-weights 1",
        "1 2 --reward-weights length_penalty", place="--reward-weights 1.0", settings="reward_weights"),
]  # fmt: skip

THINKING = '{"enable_thinking": false}'
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
DATA = [
    Row(25, "file missing",
        lambda inputs: ["--prompts", inputs.write("prompts.jsonl", "{}").with_name("promts.jsonl")],
        "promts.jsonl prompts.jsonl --prompts", place="<tmp>/promts.jsonl"),
    Row(25, "evaluation file missing",
        lambda inputs: ["--eval-dataset", inputs.write("prompts.jsonl", "{}").with_name("promts.jsonl")],
        "promts.jsonl prompts.jsonl --eval-dataset", place="<tmp>/promts.jsonl"),
    Row(26, "malformed line of the evaluation file", data("{oops", flag="--eval-dataset"), "rows.jsonl:2 '{oops'",
        place="<tmp>/rows.jsonl:2"),
    Row(26, "empty file", lambda inputs: ["--prompts", inputs.write("empty.jsonl", "")], "empty.jsonl",
        place="<tmp>/empty.jsonl"),
    Row(27, "malformed line", data("{oops", {"prompt": "b"}), "rows.jsonl:2 '{oops'", place="<tmp>/rows.jsonl:2"),
    Row(27, "a number of 5,000 digits", data(f'{{"prompt": {"1" * 5000}}}'), "rows.jsonl:2",
        place="<tmp>/rows.jsonl:2"),
    Row(27, "twelve malformed lines", data(*["{oops"] * 12), "rows.jsonl:6 '{oops' 7",
        place="<tmp>/rows.jsonl:2", problems=12),
    Row(28, "last line cut off", data('{"prompt": "is it', end=""), "rows.jsonl:2", place="<tmp>/rows.jsonl:2"),
    Row(29, "not UTF-8", lambda inputs: ["--prompts", inputs.write("latin.jsonl", b'{"prompt": "caf\xe9"}')],
        "latin.jsonl 15", place="<tmp>/latin.jsonl, byte 15"),
    Row(30, "no prompt column", data({"text": "a"}), "rows.jsonl:2 'text' \"question\"", place="<tmp>/rows.jsonl:2"),
    Row(30, "no topic in some rows",
        lambda inputs: [*data({"prompt": "a", "topic": " "})(inputs), "--steps-per-topic", 2],
        "\"topic\" rows.jsonl:1 'chosen' 'prompt' 'rejected' --steps-per-topic rows.jsonl:2 'topic'",
        place="<tmp>/rows.jsonl:1", problems=2),
    Row(30, "a topic of fewer prompts than a batch", lambda inputs: [*topics(2)(inputs), "--dry-run"],
        "1 4 rare --steps-per-topic", status=0),
    Row(30, "a topic without training prompts after the split",
        lambda inputs: [*topics(2)(inputs), "--max-prompts", 30, "--dry-run"],
        "1 rare rows.jsonl --split", status=0),
    Row(31, "prompt misspelt in some rows", data({"promt": "a", "chosen": "b", "rejected": "c"}),
        "rows.jsonl:2 'promt' --columns", place="<tmp>/rows.jsonl:2"),
    Row(31, "chosen misspelt in some rows", pairs({"prompt": "a", "choosen": "b", "rejected": "c"}),
        "\"chosen\" rows.jsonl:2 'choosen'", place="<tmp>/rows.jsonl:2", main=REWARD_MODEL),
    Row(32, "null prompt", data({"prompt": None}), "null rows.jsonl:2", place="<tmp>/rows.jsonl:2"),
    Row(33, "prompt is a number", data({"prompt": 7}), "7 rows.jsonl:2", place="<tmp>/rows.jsonl:2"),
    Row(33, "prompt is NaN", data('{"prompt": NaN}'), "NaN rows.jsonl:2", place="<tmp>/rows.jsonl:2"),
    Row(34, "empty prompt", data({"prompt": "  "}), "prompt rows.jsonl:2", place="<tmp>/rows.jsonl:2"),
    Row(35, "prompts longer than the context",
        lambda inputs: [*prompts(40, words=" and so on" * 200)(inputs), "--prompt-length", 5000],
        "512 --prompts --prompt-length 506", place="--prompts <tmp>/rows.jsonl"),
    Row(36, "prompt and completion longer than the context", "--max-new-tokens 490",
        "--max-new-tokens 490 512 --prompts --prompt-length 22", place="--prompts"),
    Row(37, "fewer prompts than a batch", "--max-prompts 3", "3 4 --prompts --batch-size", place="--prompts"),
    Row(37, "fewer prompts than GRPO's batch", "--max-prompts 1", "1 2 --prompts", place="--prompts", main=GRPO),
    Row(38, "chosen equals rejected", pairs({"prompt": "a", "chosen": "b", "rejected": "b"}),
        "chosen rejected rows.jsonl:2", place="<tmp>/rows.jsonl:2", main=REWARD_MODEL),
    Row(39, "rejected missing", pairs({"prompt": "a", "chosen": "b"}),
        "\"rejected\" rows.jsonl:2 'chosen' 'prompt' \"chosen\"", place="<tmp>/rows.jsonl:2", main=REWARD_MODEL),
    Row(39, "chosen and rejected missing", pairs({"prompt": "a"}),
        "\"chosen\" \"rejected\" rows.jsonl:2 'prompt'", place="<tmp>/rows.jsonl:2", main=REWARD_MODEL),
    Row(40, "unknown chat role", data({"messages": [{"role": "robot", "content": "a"}]}), "'robot' rows.jsonl:2",
        place="<tmp>/rows.jsonl:2"),
    Row(41, "chats without a chat template", base_model(), "--prompts <tmp>/base", place="--prompts"),
    Row(41, "a chat template that refuses a chat",
        tokenizer("--actor-model", lambda unchanged: unchanged, chat_template=NO_SYSTEM),
        "system, user,", place="prompt with the roles system, user"),
    Row(41, "plain prompts without a chat template",
        lambda inputs: [*base_model("--dry-run")(inputs), *prompts(60)(inputs)],
        "<tmp>/base", status=0),
    Row(41, "chat template variables that are not JSON", "--chat-template-kwargs enable_thinking=false",
        "chat_template_kwargs 'enable_thinking=false' JSON", place="--chat-template-kwargs"),
    Row(41, "chat template variables that are a list", "--chat-template-kwargs [false]",
        "chat_template_kwargs '[false]' JSON", place="--chat-template-kwargs"),
    Row(41, "a variable that the chat template does not read", lambda inputs: ["--chat-template-kwargs", THINKING],
        "enable_thinking --chat-template-kwargs --actor-model", place=f"--chat-template-kwargs {THINKING}"),
    Row(41, "a variable that the base model's chat template does not read",
        lambda inputs: ["--chat-template-kwargs", THINKING], "enable_thinking --chat-template-kwargs --base-model",
        place=f"--chat-template-kwargs {THINKING}", main=REWARD_MODEL),
    Row(41, "the messages as a variable", lambda inputs: ["--chat-template-kwargs", '{"messages": []}'],
        "messages --chat-template-kwargs", place="--chat-template-kwargs"),
    Row(41, "chat template variables without a chat template",
        lambda inputs: [*base_model("--chat-template-kwargs", THINKING)(inputs), *prompts(60)(inputs)],
        "enable_thinking <tmp>/base", place=f"--chat-template-kwargs {THINKING}"),
    Row(41, "chat template variables with plain prompts",
        lambda inputs: ["--plain-prompts", "--chat-template-kwargs", THINKING],
        "chat_template_kwargs --plain-prompts", place="--chat-template-kwargs"),
    Row(42, "evaluation file also trained on", lambda inputs: ["--eval-dataset", inputs.pairs],
        "--eval-dataset", status=0),
    Row(42, "evaluation file without the column of a reward function",
        lambda inputs: [*data(*({"prompt": p, "answer": "1"} for p in "bcd"))(inputs), "--batch-size", 1, "--rm-model",
                        "none", "--reward-func", "last_number", "--eval-dataset",
                        inputs.write("eval.jsonl", '{"prompt": "e"}')],
        "'last_number' 'answer' --eval-dataset eval.jsonl", place="--eval-dataset <tmp>/eval.jsonl"),
    Row(42, "evaluation prompts also trained on", "", "1 2", status=0, main=from_python),
    Row(42, "the reward model was trained on them", trained_on_all_questions, "6 reward", status=0),
    Row(43, "over 5% duplicates", lambda inputs: [*prompts(60, repeated=10)(inputs), "--dry-run"],
        "10 70 rows.jsonl", status=0),
    Row(44, "NUL", data({"prompt": "a\0b"}), "NUL 2 rows.jsonl:2", place="<tmp>/rows.jsonl:2"),
    Row(44, "no paragraph in the evaluation text",
        lambda inputs: ["--eval-text", inputs.write("text.txt", "a\n\n \n\nb")],
        "2 --eval-text text.txt", place="--eval-text <tmp>/text.txt"),
    Row(44, "no paragraph in the evaluation text, dry run",
        lambda inputs: ["--eval-text", inputs.write("text.txt", "\n\n \n"), "--dry-run"],
        "2 --eval-text text.txt", place="--eval-text <tmp>/text.txt"),
    Row(44, "a lone surrogate", data({"prompt": "a?", "chosen": "b", "rejected": "\ud800"}), "1 rows.jsonl:2",
        place="<tmp>/rows.jsonl:2"),
]  # fmt: skip

MODELS = [
    Row(45, "not found", hub_response(NOT_FOUND), "someone/model --actor-model",
        place="someone/model is neither a local folder nor on the hub"),
    Row(45, "gated", hub_response("manual"), "someone/model", place="someone/model"),
    Row(45, "offline", "--actor-model someone/model", "someone/model", place="someone/model"),
    Row(46, "a LoRA folder as a full model", adapter, "--actor-model <tmp>/adapter some/base",
        place="--actor-model <tmp>/adapter"),
    Row(47, "tokenizer larger than the policy", tokenizer("--actor-model", larger), "<tmp>/copy", place="<tmp>/copy"),
    Row(48, "tokenizer larger than the reward model", tokenizer("--rm-model", larger), "<tmp>/copy",
        place="<tmp>/copy"),
    Row(49, "tokenizers differ", other_tokenizer, "--rm-model <tmp>/copy", status=0),
    Row(50, "reward model with 2 outputs", reward_folder(outputs=2), "2 --rm-model <tmp>/bad",
        place="--rm-model <tmp>/bad", main=GRPO),
    Row(51, "reward head freshly initialised", weights("--rm-model", lambda tensors: tensors.pop("score.weight")),
        "score.weight", place="--rm-model <tmp>/copy", loads=True),
    Row(52, "reward model without pad", reward_folder(pad=None), "--rm-model pad_token_id config.json",
        place="--rm-model <tmp>/bad"),
    Row(53, "no pad token", tokenizer("--actor-model", without_unused_token, pad_token=None), "EOS pad_token",
        place="tokenizer of <tmp>/copy"),
    Row(54, "pad equals EOS", tokenizer("--actor-model", without_unused_token, pad_token="<|im_end|>"),
        "EOS pad_token", place="tokenizer of <tmp>/copy"),
    Row(55, "no EOS", tokenizer("--actor-model", lambda unchanged: unchanged, eos_token=None),
        "EOS eos_token tokenizer_config.json", place="tokenizer of <tmp>/copy"),
    Row(56, "reward model is a causal LM", lambda inputs: ["--rm-model", inputs.start], "LlamaForCausalLM --rm-model",
        place="--rm-model"),
    Row(57, "policy's weights with NaN",
        weights("--actor-model", lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"][3].fill_(float("nan"))),
        "model.layers.1.mlp.up_proj.weight <tmp>/copy", place="weights of <tmp>/copy", loads=True),
    Row(57, "reward model's weights with infinity",
        weights("--rm-model", lambda tensors: tensors["score.weight"][0, 1:3].fill_(float("inf"))),
        "score.weight <tmp>/copy", place="weights of <tmp>/copy", loads=True),
    Row(58, "pickled weights only", pickled, "<tmp>/copy safetensors", place="<tmp>/copy", loads=True),
    Row(59, "needs trust_remote_code", with_code, "trust_remote_code <tmp>/copy",
        place="auto_map in config.json of <tmp>/copy"),
]  # fmt: skip

REWARDS = [
    Row(60, "NaN", reward_function("return [0.0] * (len(completions) - 1) + [float('nan')]"),
        "nan 'f' failed_inputs.json", place="reward function 'f'", status=1),
    Row(60, "NaN under GRPO", reward_function("return [float('nan')] * len(completions)"),
        "nan 'f' failed_inputs.json", place="reward function 'f'", status=1, main=GRPO),
    Row(61, "infinity", reward_function("return [float('-inf')] * len(completions)"),
        "-inf 'f' failed_inputs.json", place="reward function 'f'", status=1),
    Row(61, "1e38", reward_function("return [1e38] * len(completions)"),
        "1e+38 1e+09 'f' failed_inputs.json", place="reward function 'f'", status=1),
    Row(63, "text", reward_function("return 'good'"), "6 'good' 'f'", place="reward function 'f'", status=1),
    Row(63, "a scalar", reward_function("return 1.0"), "6 1.0 'f'", place="reward function 'f'", status=1),
    Row(63, "nothing", reward_function("return None"), "6 None 'f'", place="reward function 'f'", status=1),
    Row(64, "wrong count", reward_function("return [1.0] * 4"), "6 4 1.0 'f'", place="reward function 'f'", status=1),
    Row(65, "raises", reward_function("return [1 / (len(c) - len(c)) for c in completions]"),
        "my_rewards.py:4 ZeroDivisionError 'f' failed_inputs.json", place="reward function 'f', 6", status=1),
    Row(65, "raises inside a library",
        reward_function("import json\nreturn [json.loads('\\n{') for c in completions]"),
        "my_rewards.py:5 JSONDecodeError 'f' failed_inputs.json", place="reward function 'f', 6", status=1),
    Row(66, "hangs", reward_function("time.sleep(20)", "--reward-timeout", 0.1),
        "0.1 'f' 6 --reward-timeout failed_inputs.json", place="reward function 'f', 6", status=1),
    Row(62, "takes chats for texts", lambda inputs: [
            *data(*({"messages": [{"role": "user", "content": f"{n}?"}]} for n in range(30)))(inputs),
            *reward_function("return [float(len(c.strip())) for c in completions]")(inputs)],
        "my_rewards.py:4 AttributeError 'f' completion", place="reward function 'f', 1"),
    Row(67, "the same for the whole run", reward_function("return [1.0] * len(completions)"), "1 2 f", status=0),
]  # fmt: skip

DISK_AND_ENVIRONMENT = [
    Row(68, "read-only output", read_only, "--output <tmp>/run", place="--output <tmp>/run"),
    Row(69, "too little space for the checkpoints", little_space, "0.00 3", place="free disk", loads=True),
    Row(70, "full during a save", full_during_a_save, "2 checkpoint-1 train_ppo.py --resume --output",
        place="<tmp>/run", status=1),
    Row(71, "output in use by a live run", live_run, "<pid> --output <tmp>/run", place="--output <tmp>/run"),
    Row(72, "output holds a finished run", output_holds("mine", finished=True), "--output <tmp>/mine --overwrite",
        place="--output <tmp>/mine"),
    Row(72, "output holds an unfinished run", output_holds("mine", finished=False),
        "--output <tmp>/mine --resume --overwrite", place="--output <tmp>/mine"),
    Row(72, "output holds something else", output_holds("mine"), "run.json --output <tmp>/mine",
        place="--output <tmp>/mine"),
    Row(73, "newest checkpoint is incomplete", interrupted(truncate(3)),
        "checkpoint-3 training.safetensors checkpoint-2", status=0),
    Row(74, "no valid checkpoint", interrupted(truncate(1, 2, 3)),
        "--output checkpoint-1 training.safetensors --overwrite checkpoint-2 checkpoint-3",
        place="--output <tmp>/run, checkpoint-1", problems=3),
    Row(75, "settings changed on resume", interrupted(lambda *_: None, "--learning-rate", 0.5, "--gamma", 0.5),
        "gamma 1.0 0.5 --resume-anyway learning_rate", place="gamma was 1.0 in this run and is 0.5 now", problems=2),
    Row(75, "data changed on resume", interrupted(other_data), "train_sha256 --resume-anyway",
        place="train_prompts", loads=True, problems=3),
    Row(75, "versions changed on resume", interrupted(other_version), "peft 0.0.1 --resume-anyway", place="peft"),
    Row(76, "output is a file", output_is_a_file, "--output <tmp>/taken", place="--output <tmp>/taken"),
    Row(76, "output is too long for Windows", windows, "259 --output", place="--output <tmp>/aaa"),
    Row(76, "a name is too long", lambda inputs: ["--output", inputs.folder / ("a" * 300)], "255 --output",
        place="--output <tmp>/aaa"),
    Row(77, "out of memory", no_memory, "--use-lora", place="the backward pass", status=1),
    Row(78, "another trl", installed("trl", "1.13.0"), 'trl 1.13.0 1.12.0 "trl==1.12.0"',
        place="rlhf-workstation requires trl==1.12.0"),
    Row(78, "requests missing", installed("requests", None), 'requests "requests>=2.32,<3"',
        place="rlhf-workstation requires it"),
    Row(78, "trl missing for the reward model", installed("trl", None), 'trl "trl==1.12.0"',
        place="rlhf-workstation requires it", main=REWARD_MODEL),
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


MORE_ERRORS = [
    Row(79, "a template that divides by zero", template("{{ 1/0 }}"), "ZeroDivisionError",
        place="prompt with the roles user"),
    Row(79, "a template with a huge range", template("{{ range(10000000)|list }}"), "OverflowError",
        place="prompt with the roles user"),
    Row(79, "a template that adds text and a number", template("{{ messages[0]['content'] + 1 }}"), "TypeError",
        place="prompt with the roles user"),
    Row(80, "output is a link to itself", link("linked"), "--output <tmp>/linked", place="--output <tmp>/linked"),
    Row(80, "output is a link to nothing", link("nowhere"), "--output <tmp>/linked", place="--output <tmp>/linked"),
    Row(80, "data is a link to itself", link_to_itself("--prompts"), "<tmp>/circle", place="<tmp>/circle"),
    Row(80, "the start model is a link to itself", link_to_itself("--actor-model"), "<tmp>/circle",
        place="<tmp>/circle"),
    Row(80, "home folder of an unknown user", "--actor-model ~nobody_here/model",
        "actor_model '~nobody_here/model' --actor-model", place="--actor-model"),
    Row(81, "a name that is not UTF-8", lambda inputs: ["--output", f"{inputs.folder}/\udcff"],
        r"\udcff'", place="command line"),
    Row(82, "a seed too large for numpy", "--seed 1e30", "seed 1e30 --seed 0 4,294,967,295", place="--seed"),
    Row(82, "a seed that a float would round", "--seed 9007199254740993", "seed 9007199254740993 --seed",
        place="--seed"),
    Row(82, "one of several seeds too large", "--seeds 1 4294967296", "seeds 4294967296 --seeds 0", place="--seeds"),
    Row(83, "too many updates", "--num-iterations 1e18", "num_iterations 1e18 --num-iterations 1 10,000,000",
        place="--num-iterations"),
    Row(83, "a huge batch", "--batch-size 1e12", "batch_size 1e12 --batch-size 1,000,000", place="--batch-size"),
    Row(84, "lora_alpha too large for float32", "--use-lora --lora-alpha 1e308", "lora_alpha 1e308 --lora-alpha 0",
        place="--lora-alpha"),
    Row(85, "a CSV file without prompts", file("a.csv", "text,answer\na,b\n"), "a.csv 0 'answer' 'text' --columns",
        place="<tmp>/a.csv row 0"),
    Row(85, "a broken Parquet file", file("a.jsonl", b"PAR1\x15\x04"), "Parquet a.jsonl", place="<tmp>/a.jsonl"),
    Row(85, "a truncated JSON array", file("a.json", '[\n{"prompt": "a"},\n{"pro'), "a.json:3",
        place="<tmp>/a.json:3"),
    Row(85, "an empty folder of data", folder_of_data, "--prompts <tmp>/saved", place="--prompts <tmp>/saved"),
    Row(86, "many bad rows", data(*['{"prompt": ""}'] * 9), "prompt 4", place="<tmp>/rows.jsonl:2", problems=9),
    Row(87, "unknown names", "--learning-rat 1 --never-seen none",
        "--learning-rat --learning-rate --never-seen --help-all coming_from_trl.md", place="command line", problems=2),
    Row(88, "a scan and a check", "--scan --check", "--scan --check", place="--check and --scan"),
    Row(88, "a check of the reward and a scan", "--check-reward --scan", "--check-reward --scan",
        place="--scan and --check-reward"),
    Row(88, "a check and a dry run", "--check plan --dry-run", "--check plan --dry-run",
        place="--check plan, --dry-run", settings="check dry_run"),
    Row(88, "a check of a resumed run", "--check update --resume", "--check update --resume",
        place="--check update, --resume", settings="check resume"),
    Row(88, "an unknown part of a check", "--check rewards", "check rewards reward plan update", place="--check"),
    Row(88, "nothing to learn", lambda inputs: [*reward_function("return [0.0] * len(completions)")(inputs), "--scan"],
        "0 --check prompts", loads=True),
    Row(62, "all None", reward_function("return [None] * len(completions)"), "None f 0",
        place="the evaluation after update 0", status=1),
    Row(88, "a best rule without its function", "--best-rule right", "best_rule 'right' --best-rule score",
        place="--best-rule right", settings="best_rule"),
    Row(88, "an evaluation function with the name of a metric", "--eval-func my.py:perplexity",
        "'perplexity' --eval-func", place="--eval-func my.py:perplexity", settings="eval_func"),
    Row(88, "two evaluation functions with one name", "--eval-func a.py:f b.py:f", "2 'f' --eval-func",
        place="--eval-func a.py:f b.py:f", settings="eval_func"),
    Row(88, "an evaluation function that does not exist", "--eval-func exact_mach",
        "--eval-func exact_mach exact_match", place="--eval-func exact_mach"),
    Row(88, "no column for an evaluation function", "--eval-func exact_match", "'exact_match' 'answer'",
        place="the evaluation prompts"),
]  # fmt: skip

# errors that need the tokenizer, the hub, the weights, a checkpoint or the GPU, so they come after the import of torch
LATE = {
    *("evaluation file without the column of a reward function", "a reward model as the teacher"),
    *("bf16 on a device without it", "no valid checkpoint", "data changed on resume"),
    *("prompts longer than the context", "prompt and completion longer than the context"),
    *("chats without a chat template", "a chat template that refuses a chat", "a template that divides by zero"),
    *("a template with a huge range", "a template that adds text and a number"),
    *("not found", "gated", "offline", "needs trust_remote_code", "no pad token", "pad equals EOS"),
    *("policy's weights with NaN", "reward model's weights with infinity", "too little space for the checkpoints"),
    *("no column for an evaluation function", "nothing to learn", "takes chats for texts"),
    *("a variable that the chat template does not read", "chat template variables without a chat template"),
    *("a variable that the base model's chat template does not read", "the messages as a variable"),
    *("tokenizer larger than the policy", "tokenizer larger than the reward model"),
}
LATE |= {
    row.title
    for row in (*CONFIGURATION, *DATA)
    if row.title.startswith(("critic from a r", "CUDA graphs on a CPU", "no paragraph in", "a teacher with "))
}
ROWS = [*CONFIGURATION, *DATA, *MODELS, *REWARDS, *DISK_AND_ENVIRONMENT, *MORE_ERRORS]


# --- the checks of every row -----------------------------------------------------------------------------------------


@pytest.fixture
def inputs(tmp_path, start_model, reward_folder, pairs_file, monkeypatch) -> Inputs:
    return Inputs(tmp_path, start_model, reward_folder, pairs_file, monkeypatch)


def refuse_loading(monkeypatch) -> None:
    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        monkeypatch.setattr(kind, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))


VALUE = r"(?: (?!to\b|or\b|and\b)(?:[a-z0-9][\w.=/-]*\w|\d+|[A-Z]+\b))?"
TYPED = re.compile(rf"(?<=[Aa]dd |[Uu]se )--[\w-]+{VALUE}(?: --[\w-]+{VALUE})*")


def wrong_in_fix(row: Row, argv: list[str], problem: Problem) -> list[str]:
    """Return the flags in a fix that the command lacks, and the new errors of the command line if the flags that the
    fix adds are typed after it."""
    parse = parse_reward_cli if row.main is REWARD_MODEL else partial(parse_cli, algorithm=ALGORITHM.get(row.main))
    line = LINE if row.main is REWARD_MODEL else command_line(ALGORITHMS[ALGORITHM[row.main]])
    found = [f for f in FLAG.findall(problem.fix) if f not in line.flags and not NAMES_TRAINING.search(problem.fix)]

    def errors(words: list[str]) -> set[str]:
        try:
            parse(words)
        except UserError as error:
            return {str(problem) for problem in error.problems}
        return set()

    for flags in TYPED.findall(problem.fix):
        found += sorted(errors([*argv, *flags.split()]) - errors(argv))
    return found


def missing_parts(parts: str, text: str) -> list[str]:
    """Return the parts that are not in the text as whole words."""
    return [part for part in parts.split() if not re.search(rf"(?<![\w-]){re.escape(part)}(?![\w-])", text)]


def count_problems(text: str) -> int:
    """Return the number of problems: those that are printed, and those that are counted in the last line."""
    more = re.findall(r"^and (\d+) more$", text, re.MULTILINE)
    return len(re.findall(r"^error: ", text, re.MULTILINE)) + sum(map(int, more))


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{row.number} {row.title}") for row in ROWS])
def test_bad_input(row, inputs, capsys):
    argv = row.flags(inputs)
    if row.status == 2 and not row.loads:
        refuse_loading(inputs.monkeypatch)
    before = inputs.files()
    imported = []
    for name in ("rlhf.commands.train.import_libraries", "rlhf.commands.train.quiet_libraries",
                 "rlhf.commands.reward_model.import_libraries"):  # fmt: skip
        inputs.monkeypatch.setattr(name, lambda *_, **__: imported.append(True))
    capsys.readouterr()
    status = 0
    found: list[UserError] = []

    def main() -> None:
        try:
            row.main(argv)
        except UserError as error:
            found.append(error)
            raise

    try:
        run_command(main)
    except SystemExit as ended:
        status = ended.code
    output = capsys.readouterr()
    assert status == row.status, output.err
    assert "Traceback" not in output.out + output.err
    parts = row.parts.replace("<tmp>", str(inputs.folder)).replace("<pid>", str(os.getpid()))
    if status == 0:
        warnings = [line for line in output.out.splitlines() if line.startswith(("warning: ", "note: "))]
        named = [line for line in warnings if not missing_parts(parts, line)]
        assert named and output.err == "", warnings
        return
    lines = output.err.splitlines()
    assert missing_parts(parts, output.err) == [], lines
    (error,) = found
    assert [wrong for problem in error.problems for wrong in wrong_in_fix(row, argv, problem)] == []
    assert isinstance(error, RunError) == (row.status == 1), type(error)
    first = error.problems[0]
    place = str(first.place).replace(str(inputs.folder), "<tmp>")
    assert place.startswith(row.place) and " ".join(first.settings) == row.settings, first
    assert all(FORM.fullmatch(line) for line in lines), lines
    assert count_problems(output.err) == row.problems, lines
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
    assert all(row.parts for row in ROWS)
    assert len({(row.number, row.title) for row in ROWS}) == len(ROWS)


def test_parts_are_whole_words():
    assert missing_parts("--lr 0 a.py:2", "--lr-x 0.5 a.py:21") == ["--lr", "a.py:2"]
    assert count_problems("error: a\nerror: b\nand 3 more\n") == 5
