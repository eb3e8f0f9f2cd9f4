"""Starts the record of a run, run.json, in a folder that it claims, or continues it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf.algorithms.table import ALGORITHMS
from rlhf.checkpoints.gguf import gguf_record
from rlhf.checkpoints.model_folder import find_model, model_files
from rlhf.checkpoints.run_folder import claim_output
from rlhf.checkpoints.run_log import FollowingLog, RunLog
from rlhf.checkpoints.run_record import RunRecord
from rlhf.data.examples import worked_examples
from rlhf.data.prompts import fingerprint, topics_fingerprint
from rlhf.distributed.group import gather, on_first, require_equal
from rlhf.rewards.find import code_print
from rlhf.run.resume_checks import check_same_run
from rlhf.settings.fields import to_dict
from rlhf.settings.training import Config
from rlhf.settings.types import IN_PYTHON
from rlhf.setup.build import Components
from rlhf.setup.inputs import placing
from rlhf.setup.plan import budget
from rlhf.utils.command_lines import OF_USERS
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError
from rlhf.utils.files import sha256_once
from rlhf.utils.paths import is_gguf, is_on_hub


def start_run(config: Config, components: Components, updates: int, screen: Screen) -> RunLog:
    """Claim the output folder and write a new run.json. With --resume continue the existing run.json; raises UserError
    if its data differs."""
    data = data_of(config, components)
    folder = Path(config.run.output)
    require_equal(data, "Give all machines the same files")
    if config.run.resume:
        log = on_first(lambda: continued(config, data, screen))
    else:
        log = on_first(lambda: claimed(config, components, data, updates, screen))
    record = gather(None if log is None else log.record)[0]
    return FollowingLog(folder, record) if log is None else log


def continued(config: Config, data: dict, screen: Screen) -> RunLog:
    """Continue the run.json in the output folder. Raises UserError if the run's data differs."""
    folder = Path(config.run.output)
    before = RunRecord.require(folder, "--resume, --output").data
    if bool(before.get("evaluation_prompts", 1)) != bool(data["evaluation_prompts"]):
        raise UserError("with and without evaluations", "--resume, evaluation_prompts", "Give those of the start")
    changed = [line for name in data if name in before for line in _differences(name, before[name], data[name])]
    check_same_run(config, changed, screen)
    return RunLog(folder, resume=True)


def _differences(name: str, before: Any, now: Any) -> list[str]:
    """Return one line for each difference between two values of run.json's data: of a dict, for each of its keys."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = {**before, **now}
        return [line for key in keys for line in _differences(f"{name} {key}", before.get(key), now.get(key))]
    return [] if before == now else [f"{name} was {before} in this run and is {now} now"]


def claimed(config: Config, components: Components, data: dict, updates: int, screen: Screen) -> RunLog:
    """Claim the output folder and write a new run.json."""
    folder = Path(config.run.output)
    used = (config.model.actor_model, config.model.teacher, config.data.prompts, config.data.eval_dataset)
    held, moved = claim_output(folder, **placing(config))
    if moved:
        screen.say(moved)
    return RunLog(
        folder,
        held,
        algorithm=config.algorithm,
        row=ALGORITHMS[config.algorithm] if config.algorithm in OF_USERS else None,
        settings=to_dict(config),
        seed=config.run.seed,
        data=data,
        plan=budget(config, updates),
        prompts={"rows": components.prompts.rows, "split": str(components.prompts.split)},
        on_hub=[name for name in used if name and name != IN_PYTHON and is_on_hub(name)],
    )


def data_of(config: Config, components: Components) -> dict:
    """Return what run.json stores of a run's data: numbers of prompts, and hashes of prompts, models, reward functions
    and an algorithm of the user."""
    start = config.model.actor_model
    start = find_model(start, "--actor-model") if is_gguf(start) else start
    data = {
        "train_prompts": len(components.prompts.train),
        "evaluation_prompts": len(components.prompts.evaluation),
        "too_long": components.prompts.too_long,
        "train_sha256": fingerprint(components.prompts.train, components.tokenizer),
        "evaluation_sha256": fingerprint(components.prompts.evaluation, components.tokenizer),
        "date": components.date,
        "start_model_files": model_files(config.model.actor_model),
        "reward_model_files": model_files(config.model.rm_model),
        "rules": {rule: code_print(rule) for rule in config.rules},
    }
    if (code := code_print(ALGORITHMS[config.algorithm].source)) is not None:
        data["algorithm_sha256"] = code
    if (source := gguf_record(start)) is not None:
        data["start_model_gguf"] = source
    if config.model.teacher is not None:  # of a GGUF file, those of the converted folder
        data["teacher_files"] = model_files(find_model(config.model.teacher, "--teacher"))
    if config.data.eval_text is not None:
        data["eval_text_sha256"] = sha256_once(Path(config.data.eval_text))
    if config.data.few_shot is not None:
        data["few_shot"] = worked_examples(config.data.few_shot)
    if config.data.steps_per_topic is not None:
        data["topics_sha256"] = topics_fingerprint(components.prompts.train)
    return data
