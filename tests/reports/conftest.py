"""A fixture that writes run folders with logs, without training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.analysis.test_curves import make_run, write_events

TAGS = ("loss", "learning_rate", "rewards/mean", "kl_divergence", "kl_divergence/token")


@pytest.fixture
def logged_run(tmp_path):
    """Return a function that writes a run with logs. `curves` has one value per update for each tag."""

    def make(name: str, updates=20, curves=None, evaluations=None, pace=1.0, **facts) -> Path:
        run = make_run(tmp_path / name, **{"updates": updates, **facts})
        curves = {tag: np.arange(1.0, updates + 1) for tag in TAGS} if curves is None else curves
        points = [(pace * u, "eval/score", u, score) for u, score in (evaluations or {}).items()]
        points += [(pace * (i + 1), tag, i + 1, v) for tag, values in curves.items() for i, v in enumerate(values)]
        write_events(run / "logs", "1", 0, [(0.0, "start", 0, 0.0), *sorted(points)])
        return run

    return make
