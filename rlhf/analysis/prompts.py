"""Chooses the prompts of an evaluation: held-out prompts of the runs, or every row of --prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from rlhf.analysis.models import ModelRef
from rlhf.checkpoints.run_record import RUN_FILE
from rlhf.config import config_of_run
from rlhf.data.examples import load_examples, worked_examples
from rlhf.data.prompts import Prompt, encode_all, fingerprint, load_every_row, load_prompts
from rlhf.data.row import Example
from rlhf.data.source import DataSource
from rlhf.data.splits import part_of, question_hash
from rlhf.settings.evaluation import MeasureSettings
from rlhf.settings.training import Config, DataSettings
from rlhf.settings.types import Split
from rlhf.utils.console import listed
from rlhf.utils.errors import Problem, Say, UserError
from rlhf.utils.paths import path_on_page
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
    own: Mapping[str, PreTrainedTokenizerBase],
    say: Say,
) -> EvaluationPrompts:
    """Return every row of --prompts if it is given without --split, otherwise held-out prompts.

    Prints warnings about prompts that were trained on. Raises UserError if no prompt is left. `usual` is the number
    of held-out prompts without --num-prompts; `tokenizer` is that of the start model, `own` has that of each model by
    its source.
    """
    every = takes_every_row(settings)
    topics = config.data.steps_per_topic if settings.prompts is None else None
    data = replace(config.data, eval_prompts=EVERY_PROMPT, steps_per_topic=topics)
    if every:
        sets = load_every_row(data, tokenizer, say)
        pool = sets.evaluation
        of_text = sets.evaluation
        count = settings.num_prompts or len(sets.evaluation)
        of = f"all {sets.rows} rows of {path_on_page(data.prompts)}"
        skipped = [f"{sets.too_long} longer than --prompt-length {data.prompt_length}"] if sets.too_long else []
        skipped += [f"{sets.repeated} that repeat a prompt"] if sets.repeated else []
        if skipped:
            of = f"{len(pool)} of the {sets.rows} rows of {path_on_page(data.prompts)} (skipped: {listed(skipped)})"
    else:
        try:
            sets = load_prompts(data, tokenizer, say, evaluation_alone=True)
        except UserError as error:
            fix = "Restore the data, or give other prompts with --prompts"
            error.problems.insert(0, Problem("the data of the runs gives no evaluation prompts", data.prompts, fix))
            raise
        count = settings.num_prompts or usual
        pool, unseen = _unused(sets.evaluation, () if settings.chosen_prompts else models, count, own, say)
        of_text = sets.evaluation[: config.data.eval_prompts]  # that of the runs: their own evaluation prompts
        of = f"{len(pool)} held-out prompts{unseen} ({path_on_page(data.eval_dataset or data.prompts)})"
    order = rng_for(settings.seed, 0, "prompts").permutation(len(pool))
    drawn = [pool[i].example for i in sorted(order[:count].tolist())]
    line = of
    if not every or settings.num_prompts is not None:
        line = f"{len(drawn)} drawn at random from {of}, seed {settings.seed}"
    if len(drawn) < count:
        line += f" (--num-prompts {count} is more than there are)"
    for warning in _trained_on(drawn, config.data, models) if every else ():
        say(warning)
    return EvaluationPrompts(drawn, of_text, sets.evaluation, line)


def takes_every_row(settings: MeasureSettings) -> bool:
    """True if the prompts are all rows of --prompts, without a split."""
    return settings.prompts is not None and settings.split in (None, "none")


def _unused(
    prompts: list[Prompt],
    models: Sequence[ModelRef],
    count: int,
    own: Mapping[str, PreTrainedTokenizerBase],
    say: Say,
) -> tuple[list[Prompt], str]:
    """Return the held-out prompts that no run used for its own evaluations, or all if there are fewer than `count`;
    and words for the line about them."""
    used = 0
    for model in models:
        if model.run is not None:
            number = model.run.data.get("evaluation_prompts")
            recorded = model.run.data.get("evaluation_sha256")
            if None in (number, recorded):
                say(f"warning: {RUN_FILE} of {model.name} lacks its evaluation prompts, which may be among these")
                continue
            used = max(used, number)
            tokenizer = own[model.source]  # ids of the start model's tokenizer, which --baseline chooses, may differ
            shots = worked_examples(config_of_run(model.run).data.few_shot)
            encoded = encode_all(tokenizer, [p.example for p in prompts[:number]], shots)
            of_date = tokenizer if model.run.data.get("date") else None  # older versions hashed ids with a date
            if recorded != fingerprint(encoded, of_date):
                say(f"warning: the evaluation prompts have changed since the run {model.name}")
    if not used or len(prompts) - used < count:
        return prompts, ""
    return prompts[used:], " that no run used for its own evaluations"


def _trained_on(examples: Sequence[Example], data: DataSettings, models: Sequence[ModelRef]) -> list[str]:
    """Return a warning for each group of runs with the same data, if they or their reward models used some of the
    prompts."""
    groups: dict[tuple[DataSource, str], list[str]] = {}
    for model in models:
        split = str(model.run.prompts.get("split", "unknown")) if model.run is not None else "None"
        if split != "None":  # a run whose prompts were given in Python has none
            groups.setdefault((DataSource.of(config_of_run(model.run).data), split), []).append(model.name)
    warnings = []
    for (source, split), names in groups.items():
        try:
            known = _rows_of(source, examples, DataSource.of(data))
            part = {question_hash(e): part_of(e, Split.parse(split)) for e in known}
        except (UserError, ValueError):  # the data, or the split
            warnings.append(
                f"warning: the data of {listed(names)} or its split cannot be read any more, so it is not known "
                f"whether the training used these prompts: {source.name}. Restore that file, or start this command in "
                "the folder in which the training was started"
            )
            continue
        parts = [part.get(question_hash(e)) for e in examples]
        used = {"RL training": parts.count("rl"), "the reward model": parts.count("reward")}
        counts = " and ".join(f"{count} are in the part for {what}" for what, count in used.items() if count)
        if counts:
            warnings.append(
                f"warning: of the {len(examples)} prompts, {counts} of the data of {listed(names)}, so scores on them "
                f"are too optimistic: --prompts {data.prompts}. Leave --prompts out to evaluate on held-out prompts "
                "only"
            )
    return warnings


def _rows_of(source: DataSource, examples: Sequence[Example], given: DataSource) -> Sequence[Example]:
    """Return the rows of a run's data: `examples` if these are from the same source, none of other hub datasets.
    Raises UserError for data that was moved or changed since the run."""
    if replace(source, skip_bad_rows=None) == replace(given, skip_bad_rows=None):
        return examples
    return load_examples(source, say=lambda _: None) if source.is_local else []
