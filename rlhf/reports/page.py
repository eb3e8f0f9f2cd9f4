"""The page of a command: one template, with the data in a JSON file of the same name beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from rlhf.reports.plot_style import as_data_url, save_picture
from rlhf.reports.tables import TextTable
from rlhf.utils.console import Screen
from rlhf.utils.files import update_dir_atomically, write_json, write_text
from rlhf.utils.html import render
from rlhf.utils.results import result


class Picture(NamedTuple):
    """A picture of a page, which is also a PNG file of this name."""

    name: str
    caption: str
    figure: Figure


class Page(NamedTuple):
    """What a command found, for the page and the console."""

    name: str  # of the files, without suffix
    title: str
    # JSON-ready, with the keys "headline" (one text), "warnings", "notes", "facts" (name -> text), "prompts" or
    # "samples" (prompts with completions), and optionally "verdict" (sentences)
    report: dict[str, Any]
    blocks: Sequence[TextTable | Picture]
    folded: Sequence[TextTable] = ()
    tokens: dict[str, Any] | None = None  # what `tokens.html` shows

    def write(self, folder: Path, check: Callable[[], None] = lambda: None) -> None:
        """Write the page, its data and its pictures into the folder, or after an error none of them. `check` is called
        before files are written, as in `update_dir_atomically`."""
        pictures = {block.name: block.figure for block in self.blocks if isinstance(block, Picture)}
        urls = {name: as_data_url(figure) for name, figure in pictures.items()}
        html = render("page.html", page=self, urls=urls)

        def write(staging: Path) -> None:
            for name, figure in pictures.items():
                save_picture(figure, staging / f"{name}.png")
            write_json(staging / f"{self.name}.json", self.report)
            write_text(staging / f"{self.name}.html", html)

        update_dir_atomically(folder, write, check)
        result(**self.report, page=folder / f"{self.name}.html")

    def show(self, screen: Screen, folder: Path, full: bool = False) -> None:
        """Print what is new on the page, without pictures and completions, and where it is; with `full`, also what is
        folded."""
        report = self.report
        if report["headline"]:
            screen.say(f"verdict: {report['headline']}")
        for table in [*self.blocks, *(self.folded if full else [])]:
            if isinstance(table, TextTable):
                screen.table(*table, lines=False)
        kept = {"warning": screen.warnings, "note": screen.notes}  # printed before
        lines = [f"{kind}: {line}" for kind in kept for line in report[f"{kind}s"] if line not in kept[kind]]
        for line in [*lines, *(report.get("verdict", []) if full else [])]:
            screen.say(line)
        screen.say(f"saved: {folder / self.name}.html and {folder / self.name}.json")
