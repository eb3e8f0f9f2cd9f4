"""The page that shows replies token by token, as colour and number: the values that the trainer saw."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from rlhf.checkpoints.run_record import RunRecord
from rlhf.checkpoints.token_record import QUANTITIES, read_tokens, recorded_updates
from rlhf.reports.plot_style import COLOURS
from rlhf.utils.console import Screen
from rlhf.utils.files import check_folder, write_text
from rlhf.utils.html import render

MOST_UPDATES = 8  # on one page: the first, the last, and some between
STRIPS = ("kl", "advantage")  # shown as coloured text; everything is in the table beneath
STRONGEST = 0.75  # share of the full colour: dark text stays readable on it


def write_token_page(run: str, output: str, screen: Screen) -> None:
    """tokens.html in `output`, from a run's records. Raises UserError where it has none."""
    record, folder = RunRecord.require(Path(run), "--tokens"), check_folder(output)
    files = recorded_updates(Path(run), "--tokens")
    chosen = [files[i] for i in sorted({round(i) for i in np.linspace(0, len(files) - 1, MOST_UPDATES)})]
    rows = [row for file in chosen for row in read_tokens(file)]
    names = [name for name in QUANTITIES if name in rows[0]]
    scales = {name: _scale([row[name] for row in rows]) for name in names}
    page = render(
        "tokens.html",
        title="Token by token",
        facts=[
            ("run", f"{run}: {record.algorithm.upper()}, recipe {record.recipe}, seed {record.seed}"),
            ("shown", f"{len(chosen)} of {len(files)} recorded updates"),
        ],
        quantities={name: (QUANTITIES[name], scales[name]) for name in names},
        strips=[name for name in STRIPS if name in names],
        replies=[_reply(list(tokens), names, scales) for _, tokens in groupby(rows, _episode_of)],
        everything=rows,
        colours=(colour(-1.0, 1.0), colour(1.0, 1.0)),
    )
    write_text(folder / "tokens.html", page)
    screen.say(f"saved: {folder / 'tokens.html'} ({len(chosen)} of {len(files)} recorded updates of {run})")


def _episode_of(row: dict[str, Any]) -> tuple[int, int]:
    return row["update"], row["episode"]


def _scale(values: Sequence[float]) -> float:
    """The value that gets the strongest colour: the 98th percentile of the sizes, so that one outlier does not make
    all others pale."""
    return float(np.quantile(np.abs(values), 0.98)) or 1.0


def _reply(tokens: list[dict[str, Any]], names: Sequence[str], scales: dict[str, float]) -> dict[str, Any]:
    """One reply as the template takes it: of every token its text, numbers and colours."""
    first = tokens[0]
    return {
        **{key: first[key] for key in ("update", "episode", "prompt", "prompt_index", "score")},
        "tokens": [
            {
                "text": row["token"],
                "id": row["token_id"],
                "step": row["step"],
                "values": {name: (f"{row[name]:+.3f}", colour(row[name], scales[name])) for name in names},
            }
            for row in tokens
        ],
    }


def colour(value: float, scale: float) -> str:
    """Orange below 0, blue above, white at 0, as CSS: told apart with any kind of colour vision."""
    strength = STRONGEST * min(abs(value) / scale, 1.0)
    strongest = COLOURS["above" if value > 0 else "below"]
    parts = [int(strongest[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 + (part - 255) * strength):02x}" for part in parts)
