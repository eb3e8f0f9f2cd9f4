"""The project's pages (README, docs/ and the files beside them) as tests read them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
# in the order in which a newcomer reads them, and in which the commands are run
FIRST = ["README.md", "docs/tutorial.md", "docs/data_and_rewards.md"]
PAGES = [ROOT / name for name in FIRST] + sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if path.relative_to(ROOT).as_posix() not in FIRST
)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def python_block(words: str) -> str:
    """Return the one python block of all pages that contains `words`."""
    (block,) = [b for page in PAGES for b in blocks(page, "python") if words in b]
    return block


def commands(page: Path) -> list[str]:
    """Return every command of the page's bash blocks, in order. `a && b` is two commands."""
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    parts = [part.split(" #")[0].strip() for line in lines for part in line.split("&&")]
    return [part for part in parts if part and not part.startswith("#")]


def all_commands() -> list[str]:
    """Return the commands of all pages in order, each once."""
    return list(dict.fromkeys(command for page in PAGES for command in commands(page)))


def prose(page: Path) -> str:
    """Return the page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
