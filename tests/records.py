"""Records of runs for tests that make a run.json without a training run."""

from __future__ import annotations

import uuid
from typing import Any

from rlhf.checkpoints.run_record import Plan, RunRecord
from rlhf.config import make_config
from rlhf.settings.fields import to_dict
from rlhf.settings.training import Config


def facts_of(config: Config | None = None, updates: int = 2, **changed: Any) -> dict[str, Any]:
    """Return the facts for RunLog or RunRecord.begin, some of them `changed`; the demo's by default."""
    config = config or make_config("demo")
    episodes = updates * config.episodes_per_update
    return {
        "algorithm": config.algorithm,
        "settings": to_dict(config),
        "seed": config.run.seed,
        "data": {"evaluation_prompts": 6, "evaluation_sha256": "0" * 64},
        "plan": Plan(updates, episodes, config.optimizer_steps(updates), episodes * config.sampling.max_new_tokens),
        "prompts": {"rows": 120, "split": "30/60/10"},
        "on_hub": [],
        **changed,
    }


def record_of(config: Config | None = None, updates: int = 2, **changed: Any) -> RunRecord:
    """Return the record of a finished run, with some fields `changed`."""
    machine = {"python": "3.12.0", "platform": "Linux", "versions": {"torch": "2.8.0"}, "commit": None}
    start = {"id": uuid.uuid4().hex, "started": "2026-01-01T00:00:00.000+00:00", "pid": 1, "command": ["train_ppo.py"]}
    return RunRecord(**{"status": "finished", **start, **machine, **facts_of(config, updates, **changed)})
