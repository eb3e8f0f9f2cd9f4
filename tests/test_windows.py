"""What Windows needs of the source: encodings, no compiler, no process group by hand, no memory-mapped files.

Tests of functions with another behaviour on Windows are in tests/utils/test_system.py.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlhf.models.device import start_device
from rlhf.utils.console import Screen
from rlhf.utils.files import LONGEST_BELOW, check_folder
from tests.documents import ROOT

SOURCES = [
    path for part in ("*.py", "rlhf/**/*.py", "reward_model/*.py", "benchmarks/*.py") for path in ROOT.glob(part)
]
TEXT_CALLS = {"open", "read_text", "write_text", "fdopen", "NamedTemporaryFile", "TemporaryFile"}
PROCESSES = {"run", "Popen", "check_output", "check_call"}  # of subprocess
TEXT_ARGUMENTS = {"text", "universal_newlines", "encoding"}
OTHER_OPEN = {"os", "Image", "webbrowser", "tarfile", "zipfile"}  # modules whose open() is not that of a text file
# Triton has no Windows release: torch.compile, FlexAttention and Liger's kernels need it. A store made by hand would
# request libuv, which PyTorch for Windows does not have.
LACKING = re.compile(
    r"\b(triton|torch\.compile|torch\._inductor|flex_attention|liger_kernel|TCPStore|FileStore|HashStore|use_libuv)\b"
)


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def calls(path: Path) -> Iterator[tuple[ast.Call, str, str]]:
    """Yield the calls in a file that may handle text, with the name of the function and what it is an attribute of."""
    for node in nodes_of(path):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in TEXT_CALLS | PROCESSES:
                yield node, name, ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""


def is_binary(call: ast.Call, name: str, owner: str) -> bool:
    """True if a call of open() names a binary mode. Methods (`path.open("rb")`) have the mode as first argument."""
    if name not in ("open", "fdopen"):
        return "TemporaryFile" in name and not any(k.arg == "mode" for k in call.keywords)
    place = 0 if owner and owner != "io" and name == "open" else 1
    modes = [*call.args[place : place + 1], *(k.value for k in call.keywords if k.arg == "mode")]
    return any(isinstance(mode, ast.Constant) and "b" in str(mode.value) for mode in modes)


def without_encoding(path: Path) -> list[str]:
    """Return the calls in a file that read or write text in the encoding of the system, such as cp1252."""
    text = path.read_text(encoding="utf-8")
    ours = set(re.findall(r"^(?:from rlhf\.\S+ import .*|def )\b(read_text|write_text)\b", text, re.MULTILINE))
    found = []
    for call, name, owner in calls(path):
        names = {keyword.arg for keyword in call.keywords}
        if name in TEXT_CALLS and owner not in OTHER_OPEN and (owner or name not in ours):
            given = "encoding" in names or (name == "read_text" and call.args)
            if not given and not is_binary(call, name, owner):
                found.append(f"{path.name}:{call.lineno} {ast.unparse(call):.80}")
        if name in PROCESSES and owner == "subprocess" and names & TEXT_ARGUMENTS and "encoding" not in names:
            found.append(f"{path.name}:{call.lineno} {ast.unparse(call):.80}")
    return found


WITHOUT_ENCODING = [
    *("open('a')", "open('a', 'w')", "path.open()", "path.read_text()", "path.write_text(text)"),
    "subprocess.run(words, text=True)",
]
WITH_ENCODING = [
    *("open('a', 'rb')", "open('a', encoding='utf-8')", "path.open('rb')", "path.read_text('utf-8')"),
    *("path.write_text(text, encoding='utf-8')", "subprocess.run(words, encoding='utf-8')", "subprocess.run(words)"),
]


def test_the_check_of_encodings_finds_calls_without_one(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("\n".join([*WITH_ENCODING, *WITHOUT_ENCODING]), encoding="utf-8")
    assert [line.partition(" ")[2] for line in without_encoding(file)] == WITHOUT_ENCODING


def test_every_text_file_and_pipe_has_an_encoding():
    assert len(SOURCES) > 150
    assert [line for path in SOURCES for line in without_encoding(path)] == []


def names_in(path: Path) -> str:
    """Return the imports and the dotted names of a file, without comments and texts."""
    imports = [ast.unparse(node) for node in nodes_of(path) if isinstance(node, ast.Import | ast.ImportFrom)]
    return "\n".join([*imports, *(ast.unparse(n) for n in nodes_of(path) if isinstance(n, ast.Attribute | ast.Name))])


SAMPLES = ["import triton", "torch.compile(f)", "from torch.nn.attention.flex_attention import x", "dist.TCPStore(1)"]


def test_the_check_of_names_finds_those_that_windows_lacks(tmp_path):
    for number, sample in enumerate(SAMPLES):
        file = tmp_path / f"{number}.py"
        file.write_text(sample, encoding="utf-8")
        assert LACKING.search(names_in(file)), sample


def test_nothing_that_windows_lacks_is_used():
    """First the text of a file is searched, because most files contain no such word at all."""
    suspects = [path for path in SOURCES if LACKING.search(path.read_text(encoding="utf-8"))]
    assert [path.name for path in suspects if "benchmarks" not in path.parts and LACKING.search(names_in(path))] == []


def test_every_save_of_tensors_is_inside_saving_tensors():
    """It gives the files the umask's permissions, and converts disk errors."""
    found = []
    count = 0
    for path in ROOT.glob("rlhf/**/*.py"):
        if "saving_tensors" not in (text := path.read_text(encoding="utf-8")) and "save_" not in text:
            continue
        inside = {
            id(node)
            for block in nodes_of(path)
            if isinstance(block, ast.With) and "saving_tensors" in ast.unparse(block.items[0])
            for node in ast.walk(block)
        }
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and re.search(r"(^|\.)(save_file|save_pretrained)$", ast.unparse(node.func)):
                count += 1
                found += [f"{path.name}:{node.lineno}"] * (id(node) not in inside)
    assert count >= 10 and found == []


def test_numpy_and_scipy_are_not_imported_before_quiet_imports():
    """Intel's Fortran runtime, which conda's numpy and scipy load, reads its setting when it is loaded."""
    commands = [path.stem for path in (ROOT / "rlhf" / "commands").glob("[!_]*.py")]
    assert {"train", "evaluate", "compare", "plot", "reward_model"} <= set(commands)
    program = "".join(f"import rlhf.commands.{name}\n" for name in commands) + (
        "import sys\nfrom rlhf.config import parse_cli\nparse_cli(['--recipe', 'demo'], 'ppo')\n"
        "print([name for name in ('numpy', 'scipy', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    assert done.stdout == "[]\n"


def test_one_process_opens_no_process_group(build):
    """gloo fails on some Windows machines."""
    import torch

    start_device(Screen())
    trainer = build("--num-iterations", 1, "--max-new-tokens", 4)
    trainer.train()
    assert trainer.host.state.global_step == 1 and not torch.distributed.is_initialized()


def mapped_files(folder: Path) -> list[str]:
    """Return the files in a folder that this process has mapped into its memory."""
    paths = {entry.path for entry in psutil.Process().memory_maps()}
    return sorted(Path(path).name for path in paths if Path(path).is_relative_to(folder.resolve()))


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS lists no memory maps")
def test_loaded_weights_map_no_files(build, tmp_path):
    """Windows can neither replace nor remove a file that a process has mapped."""
    from safetensors.torch import load_file

    from rlhf.trainer.state import load_trainer_state, save_trainer_state

    trainer = build("--use-lora", "--critic", "separate")
    trainer.evaluator.fix_text()
    (tmp_path / "saved").mkdir()
    save_trainer_state(trainer, tmp_path / "saved")
    kept = load_file(tmp_path / "saved" / "training.safetensors")
    assert mapped_files(tmp_path / "saved") == ["training.safetensors"], "otherwise this test would find no map"
    del kept
    other = build("--use-lora", "--critic", "separate")
    load_trainer_state(other, tmp_path / "saved")
    assert mapped_files(tmp_path / "saved") == []


def test_longest_path_inside_an_output_folder_is_within_the_limit():
    """`check_folder` refuses a folder whose files would exceed Windows' 259 characters. The longest names: that of
    TensorBoard with a host name of 15 characters (the limit on Windows), and those of a checkpoint being written."""
    inside = [
        f"logs/events.out.tfevents.{2**31}.{'H' * 15}.{2**22}.0",
        "checkpoint-1000000.new-12345678/best/special_tokens_map.json",
        "incidents/update-1000000/tensors.safetensors",
        "tokens/update-1000000.jsonl.new-12345678",
    ]
    assert max(map(len, inside)) < LONGEST_BELOW
    assert check_folder("a" * 20) == Path("a" * 20)
