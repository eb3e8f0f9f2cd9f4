"""Words of early texts that readers did not understand do not come back (CONTRIBUTING.md, "Plain English")."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("rlhf", "tests", "benchmarks", "reward_model", "configs", "docs", "examples")
KINDS = {".py", ".md", ".yaml", ".html"}
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


@pytest.mark.parametrize("word", INSTEAD)
def test_no_text_has_the_word(word):
    pattern = re.compile(rf"\b({word})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == [], f"write: {INSTEAD[word]}"
