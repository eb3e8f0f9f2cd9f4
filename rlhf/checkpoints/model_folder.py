"""Finds model folders, and checks what their JSON files tell, before torch is imported."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rlhf.checkpoints.gguf import cached_gguf, gguf_folder, gguf_record
from rlhf.checkpoints.run_record import RUN_FILE, RunRecord
from rlhf.settings.training import RM_TEXTS
from rlhf.utils.command_lines import command, script_command
from rlhf.utils.errors import Problem, UserError, did_you_mean, print_line
from rlhf.utils.files import sha256_once
from rlhf.utils.paths import (
    exists,
    file_with,
    interrupted_saves,
    is_gguf,
    is_interrupted_save,
    is_on_hub,
    is_path,
    missing_path,
    note_names,
    resolve_path,
)
from rlhf.utils.processes import is_first

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
METRICS_FILE = "metrics.json"  # of a reward model
WEIGHTS_FILE = "model.safetensors"
VALUE_HEAD_FILE = "value_head.safetensors"
ALL_LINEAR = "all-linear"  # peft's name for every linear layer except the head
CACHED = re.compile(r"models--([^/\\]+)[/\\]snapshots[/\\]")  # in the path of a hub model in the local cache
# files of a model that decide its output, in addition to its weights: a reward model's scale is in its metrics
OF_MODEL = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    METRICS_FILE,
)
# of tokenizers without a tokenizer.json; beside it they decide nothing, and a hub cache may get them later
OF_SLOW_TOKENIZER = ("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model")
Hashes = dict[str, str]  # name of a file -> SHA-256 of its bytes
NOT_DATA = ("README.md", ".gitattributes")  # files of a dataset


def how_to_train() -> str:
    """Return the end of an error message about a model that is not a reward model."""
    return f"Train one with `{script_command('reward-model')}`"


def find_model(name: str, flag: str) -> str:
    """Return where to load a model from: a hub name, or the absolute path of a folder (adapters store it as their
    base). For a GGUF file or `package:NAME` it is the folder with its converted weights (`gguf_folder`). Raises
    UserError if `name` is none of these, or is the folder of an adapter; the message contains `flag`."""
    if is_gguf(name):
        return str(gguf_folder(name, flag))
    folder = resolve_path(name)
    if folder.is_dir():
        if (folder / ADAPTER_CONFIG).is_file():  # transformers would load the adapter's base model without a warning
            raise UserError("an adapter, not a full model", f"{flag} {name}", _how_to_merge(folder))
        if is_interrupted_save(folder) and not (folder / RUN_FILE).is_file():
            raise UserError("an interrupted save, not a complete model", f"{flag} {name}", "Train it again")
        if not (folder / "config.json").is_file():
            raise UserError(
                "no model in this folder (no config.json)", name, f"{flag} takes a Hugging Face model folder"
            )
        return str(folder)
    if is_path(name) or interrupted_saves(folder):
        raise missing_path(name, "model", f"{flag} takes a Hugging Face model folder, a GGUF file or a hub name")
    return find_on_hub(name, "model", f"{flag} FOLDER")


def _how_to_merge(adapter: Path) -> str:
    """Return the end of an error message about an adapter in place of a model: the command that merges it."""
    base = base_of_adapter(adapter)
    task = read_object(adapter / ADAPTER_CONFIG).get("task_type")
    # peft refuses a class with a task for an adapter without one, and the other way round
    model = {"SEQ_CLS": "ForSequenceClassification", None: ""}.get(task, "ForCausalLM")
    more = ", num_labels=1" if task == "SEQ_CLS" else ""
    folder = json.dumps(str(adapter))
    tokenizer = folder if (adapter / "tokenizer_config.json").is_file() else json.dumps(base)
    code = (
        "import peft, transformers; "
        f'peft.AutoPeftModel{model}.from_pretrained({folder}{more}).merge_and_unload().save_pretrained("FOLDER"); '
        f'transformers.AutoTokenizer.from_pretrained({tokenizer}).save_pretrained("FOLDER")'
    )
    return f"Merge it into its base ({base}), and give FOLDER: {command('python', '-c', code)}"


def find_on_hub(name: str, kind: str, hint: str) -> str:
    """Return where to load a "model" or "dataset" (`kind`) of the hub from, as `require_hub`.

    If the name comes from a file, such as the run.json or the adapter of another person, the local cache is used, and
    the hub is only requested if it is not there. This is printed before.
    """
    from rlhf.utils.hub import cached_folder, require_hub  # slow to import, and only hub names need it

    file = file_with(name)
    if file is not None:
        cached = cached_folder(name, kind)
        if cached is not None and _is_complete(cached, kind):
            return str(cached)
        if is_first():
            print_line(f"{file} names the {kind} {name}, which is not in the local cache: requesting it from the hub")
    return require_hub(name, kind, hint, file)


def _is_complete(folder: Path, kind: str) -> bool:
    """True if a folder of the local cache has the weights of its model, or a data file."""
    if kind == "dataset":
        return any(file.is_file() and file.name not in NOT_DATA for file in folder.rglob("*"))
    try:
        return (folder / "config.json").is_file() and bool(tensors_of(folder))
    except UserError:
        return False


def find_base(adapter: Path, flag: str, fix: str, run: RunRecord | None) -> str:
    """Return where to load an adapter's base model from: `run` trained the adapter. Raises UserError if it is missing,
    or is not the start model of the run. The message contains `flag` and ends with `fix`."""
    base = base_of_adapter(adapter) or "nothing"
    try:
        return find_model(base, flag) if run is None else find_recorded(run, "start_model", base, flag)
    except UserError:
        state = "was replaced" if exists(base) else "is missing"
        raise UserError(f"the adapter's base model {state} ({base})", f"{flag} {adapter}", fix) from None


def find_recorded(run: RunRecord, kind: str, name: str, flag: str) -> str:
    """Return where to load the "start_model" or the "reward_model" (`kind`) of a run from, now at `name`. For a GGUF
    file it is a folder with the weights of the recorded file. Raises UserError if it is missing, or has other bytes
    than the run recorded. Runs of older versions recorded nothing to compare with."""
    source = run.data.get(f"{kind}_gguf")
    if source is not None:
        cached = cached_gguf(source)
        if cached is not None:
            return str(cached)
        name = run.flat_settings["actor_model"]
    folder = find_model(name, flag)
    now = model_files(folder) if source is None else gguf_record(folder)
    recorded = source or run.data.get(f"{kind}_files")
    if recorded and now and recorded != now:
        changed = [key for key in {**recorded, **now} if recorded.get(key) != now.get(key)]
        raise UserError(
            f"not the {kind.replace('_', ' ')} of the run that started {run.started[:19]}, because "
            f"{', '.join(changed)} changed",
            f"{flag} {name}",
            f"Restore it, or choose a model with {flag} FOLDER",
        )
    return folder


def base_of_adapter(folder: Path) -> str | None:
    """Return the base model that an adapter's config names; its hub name if it was in the local cache of another
    computer. Raises UserError if that file is not valid JSON."""
    file = folder / ADAPTER_CONFIG
    base = read_object(file).get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise UserError("base_model_name_or_path is not a text", file, "Save the adapter again")
    cached = CACHED.search(base or "")
    if cached is not None and not Path(base).exists():
        base = cached[1].replace("--", "/")
    note_names(file, [base])
    return base


# --- checks of the JSON files ----------------------------------------------------------------------------------------


def policy_problems(name: str, flag: str, targets: Collection[str] = ()) -> list[Problem]:
    """Return what is wrong with a local start model, one line each, as far as its JSON files tell. `targets` are the
    LoRA target modules."""
    folder = Path(find_model(name, flag))
    config = read_config(folder)
    tensors = tensors_of(folder)
    problems = tokenizer_problems(folder)
    quantized = "quantization_config" in config
    missing = [] if quantized or ALL_LINEAR in targets else missing_targets(linear_modules(tensors), targets, folder)
    return [*problems, *missing]


def reward_model_problems(name: str, flag: str) -> list[Problem]:
    """Return what is wrong with a local reward model, one line each, as far as its JSON files tell."""
    folder = Path(find_model(name, flag))
    config = read_config(folder)
    labels = config.get("num_labels", len(config.get("id2label", "12")))  # transformers' default is two labels
    architecture = (config.get("architectures") or ["?"])[0]
    problem = reward_config_problem(architecture, labels, config.get("pad_token_id"), f"{flag} {name}")
    tensors = tensors_of(folder)
    if problem is None and not any("score" in tensor or "classifier" in tensor for tensor in tensors):
        problem = Problem("no trained score head (score.weight is missing)", f"{flag} {name}", how_to_train())
    return [problem] if problem else tokenizer_problems(folder)


def reward_config_problem(architecture: str, labels: int, pad: int | None, place: str) -> Problem | None:
    """Return why a model cannot be a reward model, or None. `labels` is the number of its outputs."""
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return Problem(f"a language model ({architecture}), not a reward model", place, how_to_train())
    if labels != 1:
        return Problem(f"{labels} outputs, but a reward model has exactly one", place, how_to_train())
    if pad is None:
        return Problem(
            "no pad token, so padding cannot be distinguished from completions",
            place,
            "Set pad_token_id in its config.json to a token other than EOS",
        )
    return None


def read_config(folder: Path) -> dict[str, Any]:
    """Return a model's config.json. Raises UserError if it is not valid JSON."""
    return read_object(folder / "config.json")


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UserError if the file is not valid JSON or contains no object."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError("not valid JSON", f"{file} ({error})", "Download or save the model again") from None
    if not isinstance(found, dict):
        raise UserError("not a JSON object", file, "Download or save the model again")
    return found


def model_files(name: str | None) -> Hashes | None:
    """Return the identity of a model: the SHA-256 of each of its files that decides its output, by file name.
    None without a name, for a GGUF file, and for a hub model that is not in the local cache."""
    if name is None or is_gguf(name):
        return None
    folder = resolve_path(name)
    if is_on_hub(name):
        from rlhf.utils.hub import cached_folder

        folder = cached_folder(name)
        if folder is None or not _is_complete(folder, "model"):
            return None
    others = OF_MODEL if (folder / "tokenizer.json").is_file() else (*OF_MODEL, *OF_SLOW_TOKENIZER)
    files = [*weights_files(folder), *(folder / other for other in others)]
    return {file.name: sha256_once(file) for file in files if file.is_file()}


def weights_in(files: Hashes | None) -> list[str]:
    """Return the hashes of the weights files among `model_files`."""
    return [value for name, value in (files or {}).items() if name.endswith(".safetensors")]


def same_weights(one: str, other: str, recorded: Hashes | None = None) -> bool:
    """True if two names are of one model, or if all weights files in two folders are equal to the bit. `recorded`:
    the `model_files` of `one` in the record of a run, which are compared instead of those at its path now."""
    if recorded is None and resolve_path(one) == resolve_path(other):
        return True
    weights = weights_in(recorded or model_files(one))
    return bool(weights) and weights == weights_in(model_files(other))


def weights_files(folder: Path) -> list[Path]:
    """Return the safetensors files with the weights of a model, which may be missing. A run folder also has the
    critic's files."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in read_object(index).get("weight_map", {}).values()})
    whole = folder / WEIGHTS_FILE
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def tensors_of(folder: Path) -> dict[str, list[int]]:
    """Return the names and shapes of the tensors in a model's safetensors files. Raises UserError if there are none,
    or a file is missing or incomplete."""
    files = weights_files(folder)
    hint = "Give a complete model folder with safetensors weights. If it is a part of a hub model, go online once"
    if not files:
        raise UserError("cannot be loaded", f"{folder} (no safetensors file)", hint)
    tensors = {}
    for file in files:
        found = _header(file) if file.is_file() else None
        if found is None:
            raise UserError("cannot be loaded", f"{folder} ({file.name} is missing or incomplete)", hint)
        tensors |= found
    return tensors


def _header(file: Path) -> dict[str, list[int]] | None:
    """Return the names and shapes of a safetensors file's tensors; None if the file is not complete."""
    try:
        with safe_open(file, "numpy") as tensors:
            return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError:
        return None


def linear_modules(tensors: dict[str, list[int]]) -> set[str]:
    """Return the last names of the modules with a weight matrix, such as q_proj. A head that is tied to the embeddings
    has no tensor in the file."""
    parts = (name.split(".") for name, shape in tensors.items() if len(shape) == 2 and name.endswith(".weight"))
    return {"lm_head", *(names[-2] for names in parts if "embed" not in names[-2])}


def missing_targets(leaves: Collection[str], targets: Collection[str], name: str | Path) -> list[Problem]:
    """Return an error line if a model with the linear modules `leaves` lacks some LoRA targets."""
    missing = [target for target in targets if target not in leaves]
    if not missing:
        return []
    return [
        Problem(
            f"no module named {', '.join(missing)}",
            f"--lora-targets, {name}",
            f"{did_you_mean(missing[0], leaves)}Choose from {', '.join(sorted(leaves))}, or give {ALL_LINEAR}",
        )
    ]


def tokenizer_problems(folder: Path) -> list[Problem]:
    """Return an error line if a tokenizer has no EOS."""
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and read_object(settings).get("eos_token", "not given") is None:
        return [Problem("no EOS token", f"tokenizer of {folder}", "Set eos_token in its tokenizer_config.json")]
    return []


def read_record(folder: Path) -> dict | None:
    """Return a reward model's metrics.json, or None if there is none or another tool wrote it.

    Raises UserError if the file is not valid JSON or its accuracy or calibration is invalid.
    """
    file = folder / METRICS_FILE
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            "not valid JSON", f"{file} ({error})", "Train the reward model again, or delete that file"
        ) from None
    if not isinstance(record, dict) or not {"accuracy", "length_baseline", "calibration"} <= set(record):
        return None
    scale = record["calibration"].get("scale", {}) if isinstance(record["calibration"], dict) else {"mean": None}
    figures = [record["accuracy"], record["length_baseline"], *scale.values()]
    is_valid = all(type(figure) in (int, float) and math.isfinite(figure) for figure in figures)
    if not is_valid or not set(scale) <= {"mean", "std"} or scale.get("std", 1) <= 0:
        raise UserError("invalid accuracy or calibration", file, "Train the reward model again, or delete that file")
    return record


def text_in(record: dict | None) -> str | None:
    """Return the form of the text that a reward model was trained on, one of RM_TEXTS; None without a record. Records
    of this project's older versions do not contain it: they ended at EOS. Raises UserError for an unknown form."""
    if record is None:
        return None
    text = record.get("text", "eos")
    if text not in RM_TEXTS:
        raise UserError(
            f"unknown text {text!r:.40}", f"{METRICS_FILE} of the reward model", "Train the reward model again"
        )
    return text
