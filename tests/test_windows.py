"""What Windows needs of the source: encodings, no compiler, no process group by hand, no memory-mapped files.

Tests of functions with another behaviour on Windows are in tests/utils/test_system.py.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
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
# Triton has no Windows release: torch.compile, FlexAttention and Liger's kernels need it. A store made by hand would
# request libuv, which PyTorch for Windows does not have.
LACKING = re.compile(
    r"\b(triton|torch\.compile|torch\._inductor|flex_attention|liger_kernel|TCPStore|FileStore|HashStore|use_libuv)\b"
)


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def test_pipes_of_text_have_an_encoding():
    """Ruff's rule PLW1514 (.ci/run) finds files without one; it does not know subprocess."""
    assert len(SOURCES) > 150
    texts = {path.name: path.read_text(encoding="utf-8") for path in SOURCES}
    assert [name for name, text in texts.items() if re.search(r"\b(text|universal_newlines)=True", text)] == []


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
    trainer.fix_text()
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
