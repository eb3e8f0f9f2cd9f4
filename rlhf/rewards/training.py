"""Trains a Bradley-Terry reward model on preference pairs with TRL's RewardTrainer.

RewardTrainer receives ids from the same render function as scoring and RL. If it received text, it would silently
ignore the `question` and `system` columns, add a second EOS after SmolLM2's template, and skip long pairs.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel, TrainerCallback, set_seed
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.trainer_callback import PrinterCallback
from trl import RewardConfig, RewardTrainer

from rlhf.checkpoints.model_folder import METRICS_FILE, find_model
from rlhf.checkpoints.replacing import check_inputs_outside
from rlhf.checkpoints.run_folder import LOCK_FILE, check_output
from rlhf.checkpoints.run_record import RUN_FILE, environment, flat_settings
from rlhf.checkpoints.weight_names import LM_HEADS, NEW_HEADS, check_loaded
from rlhf.data.chat_template import today
from rlhf.data.examples import load_pairs
from rlhf.data.lengths import warn_about_length
from rlhf.data.notices import warn_about_marks
from rlhf.data.row import Example
from rlhf.data.splits import pairs_hash, question_hash, shared_start, split_examples
from rlhf.data.tokenizer import check_kwargs, check_vocabulary, load_config, load_tokenizer
from rlhf.distributed.gradients import add_up_gradients, exchange_rows
from rlhf.distributed.group import from_first, on_first, require_equal
from rlhf.distributed.shares import by_tokens, own_share
from rlhf.distributed.weights import require_equal_weights
from rlhf.models.device import autocast_dtype
from rlhf.models.load import bad_weights, check_weights, read_model
from rlhf.rewards.calibration import calibration_completions, evaluate_and_calibrate, show_record
from rlhf.rewards.checks import DEFAULT_SPLIT
from rlhf.rewards.pair_accuracy import pair_ids, pair_length
from rlhf.rewards.reward_model import RewardModel, can_pack, packed_logits
from rlhf.settings.fields import to_dict
from rlhf.settings.reward_model import RewardModelConfig, RewardTrainingSettings
from rlhf.utils.console import Screen, clock
from rlhf.utils.errors import RunError, UserError
from rlhf.utils.files import make_folder, numbered_name, rename_synced, saving_tensors, write_json
from rlhf.utils.paths import interrupted_saves, new_name
from rlhf.utils.processes import size
from rlhf.utils.system import lock, remove_folder, replace, sync_tree

MARGIN = "margin"  # column of the pairs


def train_reward_model(config: RewardModelConfig, screen: Screen, device: torch.device) -> Path:
    """Train, calibrate, evaluate on held-out pairs and save. Returns the folder.

    The folder is a Hugging Face `AutoModelForSequenceClassification` folder with an additional metrics.json. Raises
    UserError before training if the data, a model or the output folder is not usable.
    """
    folder = Path(config.training.rm_output)
    placing = {
        "overwrite": config.training.rm_overwrite,
        "is_default": config.training.rm_output == RewardTrainingSettings().rm_output,
        "flag": "--rm-output",
    }
    inputs = [("--pairs", config.data.pairs), ("--base-model", config.training.base_model)]
    inputs += [("--actor-model", config.calibration.actor_model)] if config.calibration.actor_model else []
    check_inputs_outside(str(folder), inputs, "--rm-output")
    require_equal({**environment()["versions"], **flat_settings(to_dict(config))}, "Give all machines the same")
    on_first(lambda: check_output(folder, **placing))
    on_first(lambda: remove_interrupted_saves(folder, screen))
    pairs = load_pairs(config.data, screen.say)
    require_equal({"the hash of the pairs": pairs_hash(pairs)}, "Give all machines the same files")
    parts = split_examples(pairs, config.data.split or DEFAULT_SPLIT)
    model = new_reward_model(config, device)
    train, held_out = usable_pairs(config, model, parts, screen)
    completions, source = calibration_completions(parts["rl"] or parts["reward"], config, device, model)
    run_training(model, train, config, screen)
    record = evaluate_and_calibrate(model, held_out, completions, source)
    show_record(record, screen)
    questions = sorted({question_hash(p) for p in train})
    record |= {"text": model.text, "train_questions": questions, "settings": to_dict(config)}
    on_first(lambda: _place(model, record, folder, placing, screen))
    return folder


def _place(model: RewardModel, record: dict, folder: Path, placing: dict, screen: Screen) -> None:
    """Save the reward model in its folder. A model that is there is moved aside."""
    check_output(folder, **placing)  # again, because the folder may have changed during training
    older = save_reward_model(model, record, folder)
    if older is not None:
        screen.say(f"moved the reward model that was in {folder} to {older}")
    screen.say(f"reward model saved in {folder}")


def usable_pairs(
    config: RewardModelConfig, model: RewardModel, parts: dict[str, list[Example]], screen: Screen
) -> tuple[list[Example], list[Example]]:
    """Return the training pairs and the held-out pairs that are short enough. Prints the number of skipped pairs.

    Raises UserError if no training pair or no held-out pair is left.
    """
    limit = config.data.pair_length
    flag = "--pair-length"
    shown = f"{limit:,} tokens"
    if model.context is not None and model.context < limit:
        limit = model.context
        flag = None
        shown = f"{model.context:,} tokens (the base model's context)"
    pairs = {name: [(pair_length(model, p), p) for p in parts[name]] for name in ("reward", "evaluation")}
    train, held_out = ([p for length, p in part if length <= limit] for part in pairs.values())
    for name, use, left in (("reward", "train", train), ("evaluation", "evaluate", held_out)):
        if left:
            continue
        if not parts[name]:
            shared = shared_start([pair for part in parts.values() for pair in part])
            raise UserError(
                f"no pairs to {use} on",
                f"{config.data.pairs}, this part is empty",
                f"Add pairs or change --split{shared}",
            )
        longer = "raise --pair-length" if flag else "use a base model with a longer context"
        raise UserError(
            f"no pairs left to {use} on",
            f"{config.data.pairs}, all {len(parts[name])} are longer than {shown}",
            f"Add pairs, change --split or {longer}",
        )
    if margins_of(train):
        screen.say(f"note: the loss uses the column {MARGIN!r}, as in TRL: -log sigmoid(chosen - rejected - margin)")
    split = config.data.split or DEFAULT_SPLIT
    others = len(parts["rl"])
    rest = f"; {others} pairs are for the prompts of RL (--split {split})" if others else ""
    screen.say(f"reward model: {len(train)} training pairs, {len(held_out)} held-out pairs{rest}")
    too_long = len(parts["reward"]) - len(train)
    skipped = too_long + len(parts["evaluation"]) - len(held_out)
    if skipped:
        screen.say(f"  skipped {skipped} pairs longer than {shown} ({too_long} of them training pairs)")
    lengths = [length for part in pairs.values() for length, _ in part]
    warn_about_marks(model.tokenizer, [*parts["reward"], *parts["evaluation"]], screen.say)
    warn_about_length(lengths, limit, "pairs", f"--pairs {config.data.pairs}", flag, screen.say)
    return train, held_out


def new_reward_model(config: RewardModelConfig, device: torch.device) -> RewardModel:
    """Return the base model with a new score head. Its pad token is never EOS."""
    base = find_model(config.training.base_model, "--base-model")
    data = config.data
    tokenizer = load_tokenizer(base, data.plain_prompts, from_first(today), data.chat_template_kwargs)
    check_kwargs(tokenizer, data.chat_template_kwargs, f"--base-model {config.training.base_model}")
    set_seed(config.training.rm_seed)  # the new head is initialised from torch's global generator
    model_config = load_config(base)
    model_config.num_labels = 1
    model, found = read_model(AutoModelForSequenceClassification, base, config=model_config)
    check_loaded(found, base, new=NEW_HEADS, unused=LM_HEADS)
    check_vocabulary(len(tokenizer), model.get_input_embeddings().num_embeddings, base)
    check_weights(model, base)
    model.config.pad_token_id = tokenizer.pad_token_id
    return RewardModel(model, tokenizer, device, autocast_dtype(config.training.rm_bf16, device))


class _Progress(TrainerCallback):
    """Prints RewardTrainer's log as one progress line."""

    def __init__(self, screen: Screen):
        self.screen = screen
        self.started = time.monotonic()

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in (logs or {}):
            left = (time.monotonic() - self.started) / state.global_step * (state.max_steps - state.global_step)
            self.screen.progress(
                f"step {state.global_step}/{state.max_steps} | loss {logs['loss']:.3f} | "
                f"accuracy {logs['accuracy']:.2f} (training pairs) | margin {logs['margin']:+.2f} | {clock(left)} left"
            )

    def on_train_end(self, args, state, control, **_):
        self.screen.progress(f"trained for {state.global_step} steps", last=True)


class _PackedTrainer(RewardTrainer):
    """RewardTrainer without padding: the prompt of a pair is computed once, for both completions. Several processes
    share the pairs of a batch; each computes the loss from the logits of all."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        classifier = self.accelerator.unwrap_model(model)
        outputs = partial(_packed_outputs, classifier) if can_pack(classifier) else model
        with self.accelerator.autocast():  # accelerate has put it into the model's own forward(), which is not called
            return super().compute_loss(partial(_shared_outputs, outputs), inputs, *args, **kwargs)

    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        add_up_gradients(model.parameters(), {})
        return loss


def _shared_outputs(
    outputs: Callable, input_ids: Tensor, attention_mask: Tensor, **more
) -> SequenceClassifierOutputWithPast:
    """Return the logits of all pairs of TRL's batch, of which each process computes a share."""
    if size() == 1:
        return outputs(input_ids=input_ids, attention_mask=attention_mask, **more)
    pairs = len(input_ids) // 2
    lengths = attention_mask.sum(1).tolist()
    by_pairs = by_tokens(range(pairs), lengths[:pairs], lengths[pairs:], range(pairs))
    shares = [[*share, *(pairs + i for i in share)] for share in by_pairs]
    rows, own = own_share(
        shares, lambda rows: outputs(input_ids=input_ids[rows], attention_mask=attention_mask[rows], **more)
    )
    logits = exchange_rows(None if own is None else own.logits.float(), rows, len(input_ids), input_ids.device)
    return SequenceClassifierOutputWithPast(logits=logits)


def _packed_outputs(
    classifier: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, **_
) -> SequenceClassifierOutputWithPast:
    """Return the logits of TRL's batch: the chosen sides of all pairs, then the rejected ones, padded on the right."""
    lengths = attention_mask.sum(1).tolist()
    pairs = len(input_ids) // 2
    rows = [ids[:length] for ids, length in zip(input_ids.tolist(), lengths, strict=True)]
    logits = packed_logits(classifier, rows, [*range(pairs)] * 2, classifier.config.pad_token_id, input_ids.device)
    return SequenceClassifierOutputWithPast(logits=logits)


def training_rows(model: RewardModel, pairs: Sequence[Example]) -> list[dict[str, Any]]:
    """Return the rows of RewardTrainer's dataset: the ids of both sides and, if the data has it, the margin of its
    loss -log sigmoid(chosen - rejected - margin) (Llama 2, arXiv 2307.09288, eq. 2)."""
    rows = [pair_ids(model, pair) for pair in pairs]
    margins = margins_of(pairs)
    return [{**row, MARGIN: margin} for row, margin in zip(rows, margins, strict=True)] if margins else rows


def margins_of(pairs: Sequence[Example]) -> list[float]:
    """Return the column `margin` of the pairs; an empty list if no pair has one. Raises UserError if only some do, or
    one is not a finite number."""
    given = [pair.columns.get(MARGIN) for pair in pairs]
    if all(margin is None for margin in given):
        return []
    margins = []
    for pair, margin in zip(pairs, given, strict=True):
        try:
            margins.append(float(margin))  # cells of CSV files are text
        except (TypeError, ValueError):
            margins.append(math.nan)
        if not math.isfinite(margins[-1]):
            raise UserError(
                f"{MARGIN} is not a finite number",
                pair.where,
                "Give every pair a margin, by which the chosen completion should be better, or rename the column: "
                f"--columns NEW={MARGIN}",
            )
    return margins


def run_training(model: RewardModel, pairs: Sequence[Example], config: RewardModelConfig, screen: Screen) -> None:
    """Train in place with the Bradley-Terry loss -log sigmoid(chosen - rejected)."""
    settings = config.training
    per_epoch = math.ceil(len(pairs) / settings.rm_batch_size)  # the last batch of an epoch can be smaller
    steps = max(1, math.ceil(round(settings.rm_epochs * per_epoch, 6)))
    with tempfile.TemporaryDirectory() as scratch:
        trainer = _PackedTrainer(
            model=model.model.requires_grad_(True),
            args=RewardConfig(
                output_dir=scratch,
                learning_rate=settings.rm_learning_rate,
                lr_scheduler_type="cosine",
                warmup_steps=steps // 20,
                max_steps=steps,
                per_device_train_batch_size=settings.rm_batch_size,
                max_length=None,  # usable_pairs has already skipped long pairs
                bf16=model.dtype is not None,
                use_cpu=model.device.type == "cpu",
                dataloader_pin_memory=model.device.type == "cuda",
                gradient_checkpointing=False,
                logging_steps=max(1, steps // 20),
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                seed=settings.rm_seed,
            ),
            train_dataset=Dataset.from_list(training_rows(model, pairs)),
            processing_class=model.tokenizer,
            callbacks=[_Progress(screen)],
        )
        trainer.args._n_gpu = min(1, trainer.args.n_gpu)  # transformers would divide a batch over all visible GPUs
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    require_equal_weights(model.model, "the training")
    model.model.eval().requires_grad_(False)
    bad = bad_weights(model.model, frozen=True)
    if bad:
        raise RunError(
            f"{len(bad)} weights are not finite after training, the first is {bad[0]}",
            "reward model, not saved",
            "Train again with a smaller --rm-learning-rate",
        )


def save_reward_model(model: RewardModel, record: dict, folder: Path) -> Path | None:
    """Write the model into a staging folder, then replace `folder` with it. Returns where the old model was moved.

    An interruption leaves the old model complete, in `folder` or where it was moved.
    """
    folder = folder.resolve()
    staging = new_name(folder)  # no folder of the user has this name
    make_folder(staging)
    try:
        with lock(staging / LOCK_FILE):  # another training must not remove it
            with saving_tensors(staging):
                model.model.save_pretrained(staging)
                model.tokenizer.save_pretrained(staging)
            write_json(staging / METRICS_FILE, record)
            sync_tree(staging)
            write_json(staging / RUN_FILE, {"status": "finished", **environment()})  # last: now it is complete
    except BaseException:
        remove_folder(staging, ignore_errors=True)
        raise
    (staging / LOCK_FILE).unlink()
    return rename_synced(staging, folder)


def remove_interrupted_saves(folder: Path, screen: Screen) -> None:
    """Remove what killed trainings left of their models for `folder`, and print it. A complete model is kept under a
    free name. A folder that another training is writing is not changed."""
    for staging in interrupted_saves(folder.resolve()):
        lock_file = staging / LOCK_FILE
        is_complete = all((staging / name).is_file() for name in (METRICS_FILE, RUN_FILE))
        is_ours = is_complete or lock_file.is_file()
        held = lock(lock_file) if is_ours else None
        if held is None or lock(lock_file) is not None:  # in use; or perhaps in use, because this disk has no locks
            continue
        held.close()
        lock_file.unlink()
        if is_complete:
            kept = numbered_name(folder.resolve())
            replace(staging, kept)
            screen.say(f"an interrupted training left a complete reward model: {staging}. It is now {kept}")
        else:
            remove_folder(staging)
            screen.say(f"removed what an interrupted training left: {staging}")
