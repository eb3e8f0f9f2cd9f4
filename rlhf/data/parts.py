"""Writes the parts of a run's data as folders for other programs, such as `trl sft` and `trl dpo`."""

from __future__ import annotations

import json

from rlhf.data.examples import answer_of
from rlhf.data.prompts import Selection, select_examples
from rlhf.data.row import Example
from rlhf.data.splits import distinct_questions, question_hash, shared_start
from rlhf.settings.training import DataSettings
from rlhf.utils.errors import Say, UserError, naming
from rlhf.utils.files import check_folder, json_ready, rename_synced, staged, write_jsonl


def write_parts(data: DataSettings, output: str, say: Say) -> None:
    """Write the parts of the data into a new folder, one JSONL file in a folder for each part. Training with the same
    data settings uses exactly the rows in `rl` and `evaluation`, unless they are too long or too many.

    Raises UserError if the folder contains files, or if no row is left for a part. `say` prints one line.
    A warning counts evaluation prompts that the other programs would train on.
    """
    folder = check_folder(output, "--write-parts")
    if folder.exists() and any(folder.iterdir()):
        raise UserError("the folder contains files", f"--write-parts {output}", "Give a new or an empty folder")
    selection = select_examples(data, say)
    pairs = [e for e in selection.parts["reward"] if e.chosen is not None]
    files = {
        "sft/train.jsonl": _supervised(selection, data, say),
        "pairs/train.jsonl": [_row(e, data, chosen=e.chosen, rejected=e.rejected) for e in pairs],
    }
    for part, name in (("rl", "rl/train.jsonl"), ("evaluation", "evaluation/test.jsonl")):
        prompts = distinct_questions(selection.parts[part], data.steps_per_topic is not None)
        files[name] = [example.columns for example in prompts]
    trained = {question_hash(example) for example in selection.parts["reward"]}
    known = sum(question_hash(example) in trained for example in selection.parts["evaluation"])
    if known:  # --eval-dataset makes it possible
        say(
            f"warning: {known} evaluation prompts are also in sft and pairs, so evaluation results are too good: "
            "--eval-dataset. Use other prompts for evaluation"
        )
    files = {name: rows for name, rows in files.items() if rows}
    with naming(folder), staged(folder) as staging:
        for name, rows in files.items():
            write_jsonl(staging / name, map(json_ready, rows))
        rename_synced(staging, folder)
    for name, rows in files.items():
        say(f"  {folder / name}: {len(rows):,} rows")
    say(f"train with the same data and --split {selection.split}: then no question is in two parts")


def _supervised(selection: Selection, data: DataSettings, say: Say) -> list[dict]:
    """Return the distinct prompts and answers of the reward model's part, in TRL's prompt-completion format."""
    part = selection.parts["reward"]
    place = f"--prompts {data.prompts}, {len(selection.examples)} rows, split {selection.split}"
    if not part:
        fix = "Add rows, or give another --split here and in training, such as 30/60/10"
        raise UserError(
            "no row left for supervised texts", f"{place}, this part is empty", fix + shared_start(selection.examples)
        )
    found = [_row(e, data, completion=answer) for e in part if (answer := answer_of(e))]
    if not found:
        fix = "Give the rows a column chosen, completion or answer, for example with --columns answer=NAME"
        raise UserError("no answers for supervised texts", f"{place}, {len(part)} rows in this part", fix)
    if len(found) < len(part):
        say(f"note: {len(part) - len(found)} of {len(part)} rows for supervised texts have no answer and are left out")
    return list({json.dumps(row): row for row in found}.values())


def _row(example: Example, data: DataSettings, **completions: str | None) -> dict:
    """Return a prompt and its completions as lists of messages, which TRL renders with the model's chat template; with
    --plain-prompts as texts."""
    if data.plain_prompts:
        return {"prompt": "\n\n".join(m["content"] for m in example.messages), **completions}
    chats = {name: [{"role": "assistant", "content": text}] for name, text in completions.items()}
    variables = data.chat_template_kwargs
    given = {} if variables is None else {"chat_template_kwargs": json.loads(variables)}  # TRL's column
    return {"prompt": list(example.messages), **chats, **given}
