"""The token page: the recorded values of every token of a completion, as colours and numbers."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import numpy as np

from rlhf.analysis.groups import title_of
from rlhf.checkpoints.run_record import RunRecord
from rlhf.checkpoints.token_record import QUANTITIES, read_tokens, recorded_updates
from rlhf.reports.page import Page
from rlhf.reports.plot_style import COLOURS
from rlhf.reports.tables import TextTable
from rlhf.utils.console import Screen
from rlhf.utils.files import check_folder
from rlhf.utils.paths import path_on_page

MOST_UPDATES = 8  # on one page: the first, the last, and some in between
STRIPS = ("kl", "advantage")  # shown as coloured text; the table below has all quantities
STRONGEST = 0.75  # share of the full colour, so that dark text stays readable


def write_token_page(run: str, output: str, screen: Screen) -> None:
    """Writes the page into `output` from a run's token records. Raises UserError if there are none."""
    record = RunRecord.require(Path(run), "--tokens")
    folder = check_folder(output)
    files = recorded_updates(Path(run), "--tokens")
    chosen = [files[i] for i in sorted({round(i) for i in np.linspace(0, len(files) - 1, MOST_UPDATES)})]
    rows = [row for file in chosen for row in read_tokens(file)]
    names = [name for name in QUANTITIES if name in rows[0]]
    # the strongest colour is that of the 98th percentile, so that one outlier does not make all other values pale
    scales = {name: float(np.quantile([abs(row[name]) for row in rows], 0.98)) or 1.0 for name in names}
    completions = [list(tokens) for _, tokens in groupby(rows, lambda row: (row["update"], row["episode"]))]
    # without a quantity that is equal for all tokens of each completion, such as GRPO's advantages
    strips = [name for name in STRIPS if any(len({token[name] for token in tokens}) > 1 for tokens in completions)]
    report = {
        "headline": f"{path_on_page(run)}: {title_of(record)}, recipe {record.recipe}, seed {record.seed}",
        "warnings": [],
        "notes": [],
        "prompts": [],
        "facts": {"updates": f"{len(chosen)} of {len(files)} recorded updates are shown"},
        "rows": rows,
    }
    cells = [[f"{name}: {QUANTITIES[name]}", f"{scale:.3g}"] for name, scale in scales.items()]
    table = TextTable("Quantities", ["", "strongest colour at"], cells)
    tokens = {"scales": scales, "strips": strips, "completions": completions, "colour": colour}
    title = "Token records: what the trainer computed for each token"
    Page("tokens", title, report, [table], tokens=tokens).write(folder)
    screen.say(f"saved: {folder / 'tokens.html'} ({len(chosen)} of {len(files)} recorded updates of {run})")


def colour(value: float, scale: float) -> str:
    """Return a CSS colour: orange below 0, white at 0, blue above 0. Safe for colour-blind readers."""
    strength = STRONGEST * min(abs(value) / scale, 1.0)
    strongest = COLOURS["above" if value > 0 else "below"]
    parts = [int(strongest[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 + (part - 255) * strength):02x}" for part in parts)
