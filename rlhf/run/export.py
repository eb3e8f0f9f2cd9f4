"""Exports a finished run: merges an adapter into its base, writes model cards, uploads to the Hugging Face Hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.tokenization_utils_base import (
    ADDED_TOKENS_FILE,
    CHAT_TEMPLATE_FILE,
    SPECIAL_TOKENS_MAP_FILE,
    TOKENIZER_CONFIG_FILE,
)

from rlhf.analysis.groups import title_of
from rlhf.checkpoints.model_folder import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    WEIGHTS_FILE,
    base_of_adapter,
    find_base,
    read_object,
)
from rlhf.checkpoints.run_folder import BEST_FOLDER, MERGED_FOLDER, RunLock
from rlhf.checkpoints.run_record import RUN_FILE, Merged, RunRecord
from rlhf.data.tokenizer import load_config, load_tokenizer
from rlhf.models.load import load_adapter, load_policy
from rlhf.models.save import ONE_FILE, generation_config
from rlhf.run.model_card import CARD_FILE, Saved, model_card
from rlhf.run.summary import show_where
from rlhf.settings.fields import changed_words
from rlhf.settings.next_commands import resume_line
from rlhf.settings.training import Config, ExportSettings, SamplingSettings
from rlhf.setup.inputs import PUSH
from rlhf.utils.console import Screen
from rlhf.utils.errors import RunError, UserError
from rlhf.utils.files import saving_tensors, update_dir_atomically, write_text
from rlhf.utils.hub import push_failed, push_files

WEIGHTS = (WEIGHTS_FILE, "config.json", "generation_config.json", ADAPTER_FILE, ADAPTER_CONFIG)


def export_run(config: Config, screen: Screen) -> None:
    """Export a finished run as its settings request, and print where its files are and the next commands."""
    folder = Path(config.run.output)
    export = config.export
    with RunLock(folder) as lock:
        run = RunRecord.require(folder, "--output")
        if export.merge_lora:
            screen.say("merging the adapter into its base model (float32)")
            source = _chosen(saved_models(folder, run), export.export_from, "--merge-lora")
            merge_adapter(source.folder, folder / MERGED_FOLDER, config.sampling, run, lock.check)
            run = replace(run, merged=Merged(source.which, source.update))
            run.write(folder)
        saved = saved_models(folder, run)
        for one in saved.values():
            write_text(one.folder / CARD_FILE, model_card(run, one, one.folder.as_posix()))
        show_where(config, run, screen)
        if export.push_to_hub is not None:
            push(config, run, _chosen(saved, MERGED_FOLDER if export.merge_lora else export.export_from, PUSH), screen)


def saved_models(folder: Path, run: RunRecord) -> dict[str, Saved]:
    """Return the models of a finished run that still exist, by name: "final", "best", "merged"."""
    found = {"final": Saved(folder, "final", run.spent.updates)}
    if run.best is not None:
        found["best"] = Saved(folder / BEST_FOLDER, "best", run.best.update)
    if run.merged is not None:
        merged = run.merged
        found[MERGED_FOLDER] = Saved(folder / MERGED_FOLDER, merged.which, merged.update, merged=True)
    return {name: one for name, one in found.items() if one.is_adapter or (one.folder / WEIGHTS_FILE).is_file()}


def _chosen(saved: dict[str, Saved], name: str, flag: str) -> Saved:
    if name not in saved:
        raise UserError(
            f"the {name} weights of this run no longer exist",
            flag,
            f"Use --export-from with one of: {', '.join(saved) or 'none exist'}",
        )
    return saved[name]


# --- merging ---------------------------------------------------------------------------------------------------------


def merge_adapter(
    adapter: Path,
    folder: Path,
    sampling: SamplingSettings,
    run: RunRecord | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Merge an adapter, which `run` trained with this `sampling`, into its base and write the model into `folder`, if
    `check` raises nothing. Raises UserError.

    Loads the base in full precision, because the run may hold it in bfloat16 or 4 bits. The merged weights are float32
    even if the base is stored in bfloat16: bfloat16 would round most of a small change away.
    """
    if not (adapter / ADAPTER_CONFIG).is_file():
        raise UserError(f"no adapter to merge (no {ADAPTER_CONFIG})", adapter, "Remove --merge-lora")
    tokenizer = load_tokenizer(str(adapter), date=run.date if run else None)
    base_name = base_of_adapter(adapter)
    fix = "Restore it, then run the training command with --resume --merge-lora"
    found = find_base(adapter, "--merge-lora,", fix, run)
    if getattr(load_config(found), "quantization_config", None) is not None:
        raise RunError(
            "cannot merge into a quantized base model",
            f"--merge-lora, {base_name}",
            f"Remove the flag; the adapter is in {adapter}",
        )
    base = load_policy(found, device=torch.device("cpu"), vocabulary=len(tokenizer))
    model = load_adapter(base, str(adapter))
    untie_adapted_head(model)
    whole = model.merge_and_unload()
    whole.generation_config = generation_config(sampling, tokenizer)

    def write(staging: Path) -> None:
        with saving_tensors(staging):
            whole.save_pretrained(staging, max_shard_size=ONE_FILE)
            tokenizer.save_pretrained(staging)

    update_dir_atomically(folder, write, check)


def untie_adapted_head(model: PeftModel) -> None:
    """Give a head that has an adapter and is tied to the embeddings a separate weight. Otherwise merging would change
    the embeddings, too."""
    base = model.get_base_model()
    head = base.get_output_embeddings()
    if isinstance(head, BaseTunerLayer) and head.weight is base.get_input_embeddings().weight:
        head.get_base_layer().weight = nn.Parameter(head.weight.detach().clone())
        base.config.tie_word_embeddings = False


# --- uploading -------------------------------------------------------------------------------------------------------


def push(config: Config, run: RunRecord, saved: Saved, screen: Screen) -> None:
    """Upload one of a run's models. Raises RunError with the command that tries again."""
    name = config.export.push_to_hub
    folder = Path(config.run.output)
    files: dict[str, Path | bytes] = dict(files_of_model(saved.folder))
    if saved.is_adapter:  # the saved config may point to a local cache: on the hub the base is found by its name
        named = read_object(saved.folder / ADAPTER_CONFIG)
        named["base_model_name_or_path"] = run.flat_settings["actor_model"]
        files[ADAPTER_CONFIG] = json.dumps(named, indent=2).encode()
    files[RUN_FILE] = folder / RUN_FILE
    files[CARD_FILE] = model_card(run, saved, name).encode()
    message = f"{title_of(run)}, {saved.what}"
    try:
        url = push_files(name, files, WEIGHTS, message)
    except Exception as error:  # the exception classes of the hub's HTTP library change between releases
        raise push_failed(error, name, PUSH, saved.folder, command_to_push(config)) from None
    screen.say(f"uploaded: {', '.join(sorted(files))}")
    screen.say(f"to {url}")


def files_of_model(folder: Path) -> dict[str, Path]:
    """Return the files of a saved model by name: weights, configs and tokenizer. Excludes the value head (only
    training uses it), logs, checkpoints and all other files in the folder."""
    tokenizer = load_tokenizer(str(folder)).vocab_files_names.values()
    others = (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_MAP_FILE, ADDED_TOKENS_FILE, CHAT_TEMPLATE_FILE)
    return {name: folder / name for name in sorted({*WEIGHTS, *tokenizer, *others}) if (folder / name).is_file()}


def command_to_push(config: Config) -> str:
    """Return the command that only uploads the finished run."""
    words = changed_words(vars(config.export), vars(ExportSettings()))
    return resume_line(config.algorithm, config.run.output, None, words)
