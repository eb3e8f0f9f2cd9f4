"""Words of early texts that readers did not understand do not come back (CONTRIBUTING.md, "Plain English")."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("rlhf", "tests", "benchmarks", "reward_model", "configs", "docs", "examples")
KINDS = {".py", ".md", ".yaml", ".html", ".txt"}
FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in KINDS]
FILES += [path for path in ROOT.glob("*") if path.suffix in KINDS and path.name != "CONTRIBUTING.md"]
INSTEAD = {
    r"mend(s|ed|ing)?": "fix",
    r"foret(ell|ells|old)": "predict",
    r"begun": "started",
    r"(goes|go|going|went|gone) on": "resume, continue",
    r"passed over": "skipped, ignored",
    r"smells?": "shows signs of",
    r"whoever": "name the user or the program",
    r"hears|heard": "receives",
    r"plain twins?": "reference implementation",
    r"seed_00\d": "the reference system's name",
}


def words_of(line: str) -> list[str]:
    """Return the rules for which a line has a wrong word."""
    return [word for word in INSTEAD if re.search(rf"\b({word})\b", line, re.IGNORECASE)]


def test_no_text_has_one_of_the_words():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()} -> {INSTEAD[word]}"
        for path in FILES
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1)
        for word in words_of(line)
    ]
    assert found == []


def test_the_check_finds_a_word():
    assert words_of("It Hears and goes on.") == [r"(goes|go|going|went|gone) on", r"hears|heard"]
    assert words_of("It amends the recommended line.") == []
