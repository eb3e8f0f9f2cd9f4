"""Chooses the prompts of an evaluation: held-out prompts of the runs, or every row of --prompts."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from rlhf.analysis.models import ModelRef
from rlhf.config import config_of_run
from rlhf.data.examples import Example, load_examples
from rlhf.data.prompts import Prompt, PromptSets, fingerprint, load_every_row, load_prompts
from rlhf.data.source import DataSource
from rlhf.data.splits import part_of, question_hash
from rlhf.settings.evaluation import MeasureSettings
from rlhf.settings.training import Config, DataSettings
from rlhf.settings.types import Split
from rlhf.utils.console import listed
from rlhf.utils.errors import UserError
from rlhf.utils.rng import rng_for

EVERY_PROMPT = 10**9


@dataclass(frozen=True)
class EvaluationPrompts:
    """The prompts of an evaluation."""

    examples: list[Example]  # sampled and scored
    of_text: list[Prompt]  # their chosen completions, if they have some, are the text for the perplexity
    known: list[Prompt]  # all that were loaded
    line: str  # how they were chosen


def choose_prompts(
    config: Config,
    models: Sequence[ModelRef],
    settings: MeasureSettings,
    usual: int,
    tokenizer: PreTrainedTokenizerBase,
    say: Callable[[str], None],
) -> EvaluationPrompts:
    """Returns every row of --prompts if it is given without --split, otherwise held-out prompts.

    Prints warnings about prompts that were trained on. Raises UserError if no prompt is left.

    Args:
        config: the settings of the evaluation.
        models: the models to evaluate.
        settings: the settings of the command line.
        usual: number of held-out prompts without --num-prompts.
        tokenizer: of the start model.
        say: prints one line.
    """
    topics = config.data.steps_per_topic if settings.prompts is None else None
    data = replace(config.data, eval_prompts=EVERY_PROMPT, steps_per_topic=topics)
    if takes_every_row(settings):
        try:
            sets = load_every_row(data, tokenizer, say)
        except UserError as error:
            raise _with_columns_of_runs(error, models, settings) from None
        return _every_row(sets, config.data, models, settings, say)
    sets = load_prompts(data, tokenizer, say, evaluation_alone=True)
    return _held_out(sets, config.data, models, settings, usual, say)


def takes_every_row(settings: MeasureSettings) -> bool:
    """True if the prompts are all rows of --prompts, without a split."""
    return settings.prompts is not None and settings.split is None


def _with_columns_of_runs(error: UserError, models: Sequence[ModelRef], settings: MeasureSettings) -> UserError:
    """Returns the error about rows without a prompt with the --columns of a run, which do not apply to --prompts."""
    columns = next((c for m in models if m.run is not None and (c := config_of_run(m.run).data.columns)), ())
    if settings.columns is not None or not columns or not error.problems[0].startswith("no prompt: "):
        return error
    fix = f". If the file has the columns of the run's data, add --columns {shlex.join(columns)}"
    return UserError([error.problems[0] + fix, *error.problems[1:]])


def _drawn(pool: Sequence[Prompt], count: int, seed: int) -> list[Example]:
    """Returns `count` prompts, drawn at random, in their order."""
    order = rng_for(seed, 0, "prompts").permutation(len(pool))
    return [pool[i].example for i in sorted(order[:count].tolist())]


# --- held-out prompts ------------------------------------------------------------------------------------------------


def _held_out(
    sets: PromptSets,
    data: DataSettings,
    models: Sequence[ModelRef],
    settings: MeasureSettings,
    usual: int,
    say: Callable[[str], None],
) -> EvaluationPrompts:
    """Returns prompts that the runs did not use for their own evaluations, if there are enough of them.

    The text for the perplexity is that of the runs: their own evaluation prompts.
    """
    used, count = 0, settings.num_prompts or usual
    for model in models:
        if model.run is not None:
            used = max(used, model.run.data["evaluation_prompts"])
            followed = sets.evaluation[: model.run.data["evaluation_prompts"]]
            if model.run.data["evaluation_sha256"] != fingerprint(followed):
                say(f"warning: the evaluation prompts have changed since the run {model.name}")
    fresh = sets.evaluation[used:]
    pool = fresh if len(fresh) >= count else sets.evaluation
    drawn = _drawn(pool, count, settings.seed)
    unseen = " that no run used for its own evaluations" if used and pool is fresh else ""
    line = f"{len(drawn)} drawn at random from {len(pool)} held-out prompts{unseen}"
    if len(drawn) < count:
        line += f" (--num-prompts {count} is more than there are)"
    line += f" ({data.eval_dataset or data.prompts}, seed {settings.seed})"
    return EvaluationPrompts(drawn, sets.evaluation[: data.eval_prompts], sets.evaluation, line)


# --- every row of a file ---------------------------------------------------------------------------------------------


def _every_row(
    sets: PromptSets,
    data: DataSettings,
    models: Sequence[ModelRef],
    settings: MeasureSettings,
    say: Callable[[str], None],
) -> EvaluationPrompts:
    """Returns all prompts in order, or --num-prompts of them, without rows that are too long."""
    prompts, count = sets.evaluation, settings.num_prompts
    line = f"all {sets.rows} rows of {data.prompts}"
    if sets.too_long:
        skipped = f"{sets.too_long} longer than --prompt-length {data.prompt_length}"
        line = f"{len(prompts)} of the {sets.rows} rows of {data.prompts} (skipped: {skipped})"
    drawn = [p.example for p in prompts] if count is None else _drawn(prompts, count, settings.seed)
    if count is not None:
        line = f"{len(drawn)} drawn at random (seed {settings.seed}) from {line}"
        if len(drawn) < count:
            line += f" (--num-prompts {count} is more than there are)"
    for warning in _trained_on(drawn, data, models):
        say(warning)
    return EvaluationPrompts(drawn, prompts, prompts, line)


def _trained_on(examples: Sequence[Example], data: DataSettings, models: Sequence[ModelRef]) -> list[str]:
    """Returns a warning for each group of runs with the same data, if they or their reward models used some of the
    prompts."""
    runs: dict[tuple[DataSource, str], list[ModelRef]] = {}
    for model in models:
        if model.run is not None:
            runs.setdefault(
                (DataSource.of(config_of_run(model.run).data), str(model.run.prompts["split"])), []
            ).append(model)
    warnings = []
    for (source, split), same in runs.items():
        known = _questions(source, examples, DataSource.of(data)) if split != "None" else set()  # given in Python
        if known is None:
            warnings.append(
                f"warning: the data of {listed([m.name for m in same])} cannot be read any more, so it is not known "
                f"whether the training used these prompts: {source.name}. Restore that file, or start this command in "
                "the folder in which the training was started"
            )
            continue
        parts = [part_of(e, Split.parse(split)) for e in examples if question_hash(e) in known]
        used = {"RL training": parts.count("rl"), "the reward model": parts.count("reward")}
        counts = " and ".join(f"{count} are in the part for {what}" for what, count in used.items() if count)
        if counts:
            warnings.append(
                f"warning: of the {len(examples)} prompts, {counts} of the data of {listed([m.name for m in same])}, "
                f"so scores on them are too optimistic: --prompts {data.prompts}. Leave --prompts out to evaluate on "
                "held-out prompts only"
            )
    return warnings


def _questions(source: DataSource, examples: Sequence[Example], given: DataSource) -> set[str] | None:
    """Returns the hashes of the questions in a run's data. They are those of `examples` if these are from the same
    source. Empty for other hub datasets; None for data that cannot be read any more."""
    if replace(source, skip_bad_rows=None) == replace(given, skip_bad_rows=None):
        return {question_hash(e) for e in examples}
    if not source.is_local:
        return set()
    try:
        return {question_hash(e) for e in load_examples(source, say=lambda _: None)}
    except UserError:  # the data was moved or changed since the run
        return None


def worked_examples(file: str) -> list[dict[str, str]]:
    """Returns the prompts and answers of a file as messages: the column chosen, completion or answer. Raises UserError
    for a row without one."""
    shots, missing = [], []
    for example in load_examples(DataSource(file, flag="--few-shot"), say=lambda _: None):
        answers = (example.chosen, example.columns.get("completion"), example.columns.get("answer"))
        answer = next((str(one) for one in answers if one is not None), None)
        missing += [] if answer else [example.where]
        shots += [*example.messages, {"role": "assistant", "content": answer}]
    if missing:
        raise UserError(
            f"no answer: --few-shot {file}, {missing[0]}. Give each row a column chosen, completion or answer"
        )
    return shots
