"""Writes a run's prompts, rewards and settings for a training by verl: `rlhf export RUN --to verl`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE

from rlhf.algorithms.verl_names import ESTIMATORS
from rlhf.checkpoints.model_folder import read_object
from rlhf.checkpoints.run_folder import PROMPTS_FOLDER
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import config_of_run
from rlhf.data.chat_template import Messages, kwargs_of, template_for_others, with_shots
from rlhf.data.examples import worked_examples
from rlhf.data.prompts import Prompt, PromptSets, fingerprint, given_prompts, load_prompts
from rlhf.export.verl_options import run_script, without_option
from rlhf.rewards.find import code_print, find_rule
from rlhf.settings.evaluation import ExportConfig
from rlhf.settings.fields import flag_of, replaced
from rlhf.settings.next_commands import names_code
from rlhf.settings.training import Config
from rlhf.settings.types import IN_PYTHON
from rlhf.setup.load_inputs import find_start_model
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError
from rlhf.utils.files import json_ready, read_jsonl, saving_tensors, update_dir_atomically, write_json, write_text
from rlhf.utils.paths import local_path
from rlhf.utils.results import result

REWARD = '''"""The reward functions of a run, as verl calls them: with one completion at a time."""

from pathlib import Path

from rlhf.export.verl_scores import reward_of_run

score = reward_of_run(
    {config.reward.reward_func!r},
    weights={config.reward.reward_weights!r},
    keywords={config.reward.keywords!r},
    limit_s={config.reward.reward_timeout!r},
    longest={config.episode_tokens!r},
    is_plain={is_plain!r},
    tokenizer=str(Path(__file__).parent / "tokenizer"),
)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return score(solution_str, extra_info)
'''
README = """# {run} for verl

Written from `run.json`, for verl 0.9.1. `reward.py` imports this project: install it in verl's environment, without
its dependencies (`pip install --no-deps`). Then start the training, here on two machines with 8 GPUs each:

    NNODES=2 GPUS_PER_NODE=8 bash run.sh

- `run.sh`: the settings. Options after its name replace them: `bash run.sh trainer.total_epochs=3`.
- `train.parquet`, `val.parquet`: the prompts of the run, as messages. `extra_info.row` has their columns as JSON.
- `tokenizer`: the run's tokenizer, with a chat template that gives the ids of the run. Without a chat template, it
  writes the texts alone.
- `reward.py`: the sum of the run's reward functions. Those in files of your own are read from these files. verl calls
  them with the text of one completion: `completion_ids` are those of the text, and a text of fewer tokens than a
  completion can have counts as ended. Functions that compare completions, or need log-probabilities, do not work.

## Settings without a counterpart in verl

{lost}
"""


def export_verl(config: ExportConfig, screen: Screen) -> None:
    """Write the folder of an export for verl, and print which settings verl has no option for. Raises UserError for a
    run that verl cannot train, and if its prompts or its reward functions have changed."""
    source = config.export.run[0]
    run = RunRecord.require(Path(source), "run")
    settings = checked_for_verl(config_of_run(run, output=source).resolved(), run)
    settings = replaced(settings, resume=True)  # with the date of the run
    start = find_start_model(settings, "--to verl, --actor-model")
    settings = replaced(settings, actor_model=absolute(start.folder), rm_model=absolute(settings.model.rm_model))
    tokenizer = start.tokenizer
    prompts = prompts_of_run(settings, run, tokenizer)
    is_plain = tokenizer.chat_template is None
    every = [*prompts.train, *prompts.evaluation]
    rows = rows_for_verl(every, tokenizer, worked_examples(settings.data.few_shot))
    tokenizer.chat_template = template_for_others(tokenizer)
    variables = kwargs_of(tokenizer)
    chats = [row["prompt"] for row in rows]
    ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True, **variables).input_ids
    other = sum(list(prompt.ids) != row for prompt, row in zip(every, ids, strict=True))
    lost = [f"`{flag_of(name)}`: {why}" for name, why in without_option(settings).items()]
    if other:
        lost.append(f"{other} of {len(every)} prompts have other ids in verl: they contain special tokens as text")

    def write(folder: Path) -> None:
        save_tokenizer(tokenizer, folder / "tokenizer")
        write_parquet(folder / "train.parquet", rows[: len(prompts.train)])
        write_parquet(folder / "val.parquet", rows[len(prompts.train) :])
        if settings.reward.reward_func:
            write_text(folder / "reward.py", REWARD.format(config=settings, is_plain=is_plain))
        write_text(folder / "run.sh", run_script(settings, run, variables))
        listed = "\n".join(f"- {line}" for line in lost) or "None."
        write_text(folder / "README.md", README.format(run=settings.title, lost=listed))

    update_dir_atomically(config.folder, write)
    result(folder=config.folder, prompts=len(prompts.train), evaluation=len(prompts.evaluation), no_counterpart=lost)
    for line in lost:
        screen.say(f"no counterpart in verl: {line}")
    screen.say(f"prompts: {len(prompts.train):,} for training, {len(prompts.evaluation):,} for evaluation")
    screen.say(f"on the cluster: bash {config.folder / 'run.sh'}")


def checked_for_verl(config: Config, run: RunRecord) -> Config:
    """Return the settings with absolute paths of reward functions. Raises UserError for a run that verl cannot train,
    or whose reward functions are missing or have changed. Runs no code of the user."""
    rules = config.reward.reward_func
    refused = {
        f"--environment {config.environment.environment}": config.environment.environment is not None,
        f"algorithm {config.algorithm}": config.algorithm not in ESTIMATORS,
        f"--teacher {config.model.teacher}": not rules and config.model.rm_model is None,
    }
    for what, applies in refused.items():
        if applies:
            fix = "Export a run of one turn, with a reward and an algorithm of this project"
            raise UserError("verl cannot train this run", f"--to verl, {what}", fix)
    found = []
    for rule in rules:
        file, _, name = rule.rpartition(":")
        path = Path(local_path(file)).resolve()
        is_own = bool(names_code([rule]))
        if not is_own:
            find_rule(rule, config.reward.keywords)
        elif not path.is_file() or code_print(rule) != run.data["rules"].get(rule):
            fix = "Restore the file, and start this command in the folder in which the run was started"
            raise UserError("the reward function is not that of the run", f"--to verl, {rule}", fix)
        found.append(f"{path}:{name}" if is_own else rule)
    return replaced(config, reward_func=tuple(found))


def absolute(model: str | None) -> str | None:
    """Return the absolute path of a model's folder; a hub name, or None, as it is."""
    return str(Path(model).resolve()) if model is not None and Path(model).is_dir() else model


def prompts_of_run(config: Config, run: RunRecord, tokenizer: PreTrainedTokenizerBase) -> PromptSets:
    """Return the prompts of a run, of a data file or of a Python program. Raises UserError if they have changed."""
    data = config.data
    folder = Path(config.run.output) / PROMPTS_FOLDER
    fix = "Restore the data of the run"
    quiet = Screen(quiet=True).say  # the run has printed the warnings
    reason = "other texts"
    try:
        if data.prompts == IN_PYTHON:
            given = [read_jsonl(folder / f"{name}.jsonl", fix) for name in ("train", "evaluation")]
            prompts = given_prompts(replace(data, columns=()), tokenizer, *given, quiet)
        else:
            prompts = load_prompts(data, tokenizer, quiet)
        if fingerprint(prompts.train, tokenizer) == run.data["train_sha256"]:
            return prompts
    except UserError as error:  # its fix is that of a training command
        reason = error.problems[0].what
    raise UserError(f"the prompts have changed since the run ({reason})", f"--to verl, {data.prompts}", fix)


def rows_for_verl(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, shots: Messages
) -> list[dict[str, Any]]:
    """Return verl's rows of prompts, each after the worked examples `shots`. What reward functions receive is one JSON
    text, because in Parquet each column has one type."""
    rows = []
    for i, example in enumerate(prompt.example for prompt in prompts):
        columns = json_ready(example.columns)
        row = {"messages": example.messages, "conversational": example.conversational, "columns": columns}
        answer = columns.get("answer")
        rows.append(
            {
                "data_source": "rlhf",
                "prompt": with_shots(tokenizer, example.messages, shots),
                "ability": "",
                "reward_model": {"style": "rule", "ground_truth": "" if answer is None else str(answer)},
                "extra_info": {"index": i, "row": json.dumps(row, default=str)},
            }
        )
    return rows


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as a Parquet file."""
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer with a class that does not drop a pre-tokenizer of its file, as GPT2Tokenizer does."""
    with saving_tensors(folder):
        tokenizer.save_pretrained(folder)
    file = folder / TOKENIZER_CONFIG_FILE
    if tokenizer.is_fast:
        write_json(file, read_object(file) | {"tokenizer_class": "PreTrainedTokenizerFast"})
