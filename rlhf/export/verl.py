"""Writes a run's prompts, rewards and settings for a training by verl: `rlhf export RUN --to verl`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE

from rlhf.checkpoints.model_folder import find_recorded, read_object
from rlhf.checkpoints.run_folder import PROMPTS_FOLDER
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import config_of_run
from rlhf.data.chat_template import Messages, render_chat, template_for_others, with_shots
from rlhf.data.examples import worked_examples
from rlhf.data.prompts import Prompt, PromptSets, fingerprint, given_prompts, load_prompts
from rlhf.export.verl_options import ESTIMATORS, FILES, run_script, verl_options, without_option
from rlhf.rewards.find import code_print, find_rule
from rlhf.settings.evaluation import ExportConfig
from rlhf.settings.fields import flag_of, replaced
from rlhf.settings.next_commands import names_code
from rlhf.settings.training import Config, DataSettings
from rlhf.settings.types import FROM_PYTHON, IN_PYTHON
from rlhf.setup.load_inputs import find_start_model
from rlhf.utils.console import Screen
from rlhf.utils.errors import Say, UserError
from rlhf.utils.files import json_ready, read_jsonl, update_dir_atomically, write_json, write_text
from rlhf.utils.paths import local_path

REWARD = '''"""The reward functions of {run}, as verl calls them: one completion at a time."""

from pathlib import Path

from rlhf.export.verl_scores import reward_of_run

score = reward_of_run(
    {names},
    weights={weights},
    keywords={keywords},
    limit_s={limit_s},
    tokenizer=str(Path(__file__).parent / "tokenizer"),
    plain={plain},
    longest={longest},
)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return score(solution_str, extra_info)
'''
README = """# {run} for verl

Written from `run.json`, for verl 0.9.1. Install this project in verl's environment without its dependencies
(`pip install --no-deps`): `reward.py` calls it. Then start `bash run.sh`, with the number of machines and GPUs:

    NNODES=2 GPUS_PER_NODE=8 bash run.sh

- `train.parquet`, `val.parquet`: the prompts of the run, as messages. `extra_info.row` has the columns as JSON.
- `tokenizer/`: the run's tokenizer, with the chat template that gives the run's ids.
- `reward.py`: the run's reward functions. Files of your own stay where they are. A function that compares completions
  of a prompt, or needs log-probabilities, does not work: verl calls it with one completion.
- `run.sh`: the settings. Further options follow its name, as `bash run.sh trainer.total_epochs=3`.

## Settings without a counterpart in verl

{lacking}
"""


def export_verl(config: ExportConfig, screen: Screen) -> None:
    """Write the folder of an export for verl, and print what verl has no option for. Raises UserError if the run or
    its data cannot be exported, or have changed."""
    source = config.export.run[0]
    run = RunRecord.require(Path(source), "run")
    settings = config_of_run(run, output=source).resolved()
    check_for_verl(settings, run)
    start_model = find_recorded(run, "start_model", settings.model.actor_model, "--to verl,")
    settings = replaced(settings, actor_model=start_model, resume=True)  # with the date of the run
    tokenizer = find_start_model(settings, "--to verl, --actor-model").tokenizer
    in_python = settings.data.prompts == IN_PYTHON
    load = prompts_of_program if in_python else load_prompts
    prompts = load(settings.data, tokenizer, screen.say, *([Path(source)] if in_python else []))
    if fingerprint(prompts.train, tokenizer) != run.data["train_sha256"]:
        fix = "Restore the data"
        raise UserError("the training prompts have changed since the run", f"--to verl, {settings.data.prompts}", fix)
    if Path(start_model).is_dir():
        settings = replaced(settings, actor_model=str(Path(start_model).resolve()))
    shots = worked_examples(settings.data.few_shot)
    parts = {"train": prompts.train, "val": prompts.evaluation}
    rows = {name: rows_for_verl(part, name, tokenizer, shots) for name, part in parts.items()}
    plain = tokenizer.chat_template is None
    tokenizer.chat_template = template_for_others(tokenizer)
    lacking = [f"`{flag_of(name)}`: {why}" for name, why in without_option(settings).items()]
    other = sum(other_ids(rows[name], part, tokenizer) for name, part in parts.items())
    if other:
        lacking.append(f"{other} prompts contain the text of special tokens, which verl reads as these tokens")

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        for name, part in rows.items():
            write_parquet(folder / f"{name}.parquet", part)
        save_tokenizer(tokenizer, folder / "tokenizer")
        write_settings(folder, settings, run, lacking, plain)

    update_dir_atomically(config.folder, write)
    screen.say(f"{config.folder}: {len(prompts.train):,} training and {len(prompts.evaluation):,} evaluation prompts")
    for line in lacking:
        screen.say(f"without a counterpart in verl: {line}")
    screen.say(f"train on the cluster: bash {config.folder / 'run.sh'}")


def check_for_verl(config: Config, run: RunRecord) -> None:
    """Raise UserError for a run that verl cannot train, or whose reward functions are missing or have changed. Runs no
    code of the user."""
    place = "--to verl"
    if config.environment.environment is not None:
        fix = "Write an agent loop of verl for it, or export a run without an environment"
        raise UserError("verl cannot play this environment", f"{place}, {config.environment.environment}", fix)
    if config.algorithm not in ESTIMATORS:
        fix = f"Export a run of {', '.join(ESTIMATORS)}"
        raise UserError("verl does not have this algorithm", f"{place}, {config.label}", fix)
    rules = config.reward.reward_func
    if config.model.rm_model is None and not rules:
        raise UserError("only a teacher gives scores", place, "Export a run with a reward function or a reward model")
    for rule in rules:
        if rule.startswith(FROM_PYTHON):
            find_rule(rule)  # raises
    for rule in names_code(rules):
        file = Path(local_path(rule.rpartition(":")[0]))
        if not file.is_file() or code_print(rule) != run.data["rules"].get(rule):
            fix = "Restore it, and start this command in the folder in which the run was started"
            raise UserError("not the file of the run's reward function", f"{place}, {rule}", fix)


def prompts_of_program(data: DataSettings, tokenizer: PreTrainedTokenizerBase, say: Say, folder: Path) -> PromptSets:
    """Return the prompts that a Python program gave to the run in `folder`."""
    files = [folder / PROMPTS_FOLDER / f"{name}.jsonl" for name in ("train", "evaluation")]
    train, evaluation = (read_jsonl(file, "Restore the run's folder") for file in files)
    return given_prompts(replace(data, columns=()), tokenizer, train, evaluation, say)


def rows_for_verl(
    prompts: Sequence[Prompt], split: str, tokenizer: PreTrainedTokenizerBase, shots: Messages
) -> list[dict[str, Any]]:
    """Return verl's rows of prompts, after the worked examples `shots`. What reward functions receive is one JSON
    text: Parquet would give all rows the same keys."""
    rows = []
    for i, prompt in enumerate(prompts):
        example = prompt.example
        answer = example.columns.get("answer")
        row = {
            "messages": example.messages,
            "conversational": example.conversational,
            "columns": json_ready(example.columns),
        }
        rows.append(
            {
                "data_source": "rlhf",
                "prompt": with_shots(tokenizer, example.messages, shots),
                "ability": example.topic or "",
                "reward_model": {"style": "rule", "ground_truth": "" if answer is None else str(answer)},
                "extra_info": {"index": i, "split": split, "row": json.dumps(row, default=str)},
            }
        )
    return rows


def other_ids(rows: Sequence[dict], prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many prompts get other ids than in the run if they are rendered without the care of
    `encode_prompt`."""
    same = 0
    for row, prompt in zip(rows, prompts, strict=True):
        text = render_chat(tokenizer, row["prompt"], add_generation_prompt=True)
        same += tokenizer(text, add_special_tokens=False).input_ids == list(prompt.ids)
    return len(rows) - same


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as a Parquet file."""
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer so that transformers reads the pre-tokenizer in its file, as `load_tokenizer` does."""
    tokenizer.save_pretrained(folder)
    file = folder / TOKENIZER_CONFIG_FILE
    if tokenizer.is_fast:
        write_json(file, read_object(file) | {"tokenizer_class": "PreTrainedTokenizerFast"})


def write_settings(folder: Path, config: Config, run: RunRecord, lacking: Sequence[str], plain: bool) -> None:
    """Write the reward functions, the script and the README. `plain`: the run has no chat template."""
    options = verl_options(config, run)
    name = Path(config.run.output).resolve().name
    options |= {"trainer.project_name": "rlhf", "trainer.experiment_name": name}
    files = {option: file for option, file in FILES.items() if not option.startswith("critic.") or option in options}
    rules = config.reward.reward_func
    weights = config.reward.reward_weights
    if weights is not None and config.model.rm_model is not None:
        weights = weights[1:]  # the first one is that of the reward model
    if rules:
        own = names_code(rules)
        content = REWARD.format(
            run=name,
            names=[str(Path(local_path(rule)).resolve()) if rule in own else rule for rule in rules],
            weights=weights,
            keywords=config.reward.keywords,
            limit_s=config.reward.reward_timeout,
            plain=plain,
            longest=config.episode_tokens,
        )
        write_text(folder / "reward.py", content)
    else:
        del files["reward.custom_reward_function.path"]
    write_text(folder / "run.sh", run_script(options, files))
    found = "\n".join(f"- {line}" for line in lacking) or "none"
    write_text(folder / "README.md", README.format(run=name, lacking=found))
