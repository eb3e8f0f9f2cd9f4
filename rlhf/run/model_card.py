"""Writes the model card of a saved model from the template `rlhf/utils/templates/card.md`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from rlhf.algorithms.table import ALGORITHMS, label_of
from rlhf.analysis.groups import control_of, title_of
from rlhf.checkpoints.model_folder import ADAPTER_CONFIG
from rlhf.checkpoints.run_record import RESUME_MAY_CHANGE, RunRecord
from rlhf.config import config_of_run
from rlhf.data.chat_template import date_of, kwargs_of, with_shots
from rlhf.data.tokenizer import load_tokenizer
from rlhf.models.save import generation_config
from rlhf.reports.tables import TextTable, before_and_after, rows_of_run
from rlhf.settings.fields import as_text, settings_of
from rlhf.settings.training import CONTROL_MEANS, Config
from rlhf.utils.command_lines import CONSOLE_COMMAND, command
from rlhf.utils.html import render

CARD_FILE = "README.md"
ADAPTER_SETTINGS = ("lora_r", "lora_alpha", "lora_targets")
PLACEHOLDER = "Write your prompt here."
SHOWN_DIGITS = 12  # printed hex digits of a SHA-256


@dataclass(frozen=True)
class Saved:
    """One of a finished run's saved models."""

    folder: Path
    which: str  # "final" or "best"
    update: int  # the weights are those after this update
    merged: bool = False

    @property
    def is_adapter(self) -> bool:
        return (self.folder / ADAPTER_CONFIG).is_file()

    @property
    def what(self) -> str:
        """Which weights these are, in words."""
        return f"{self.which} weights, after update {self.update}" + (", adapter merged" if self.merged else "")


def model_card(run: RunRecord, saved: Saved, name: str) -> str:
    """Return the model card of one of a run's models. Its code loads the model by `name`: a folder or a hub name."""
    settings = run.flat_settings
    tokenizer = load_tokenizer(str(saved.folder), date=run.date)
    chat = tokenizer.chat_template is not None
    sampling = config_of_run(run).sampling
    asked = with_shots(tokenizer, [{"role": "user", "content": PLACEHOLDER}], run.data.get("few_shot", ()))
    return render(
        "card.md",
        front_matter=front_matter(run, saved).to_yaml(),
        name=name,
        literal=repr(name),
        run=run,
        settings=settings,
        saved=saved,
        algorithm=f"{label_of(run.algorithm)} ({ALGORITHMS[run.algorithm].title})",
        control=title_of(run) if control_of(run) != "none" else None,
        control_means=CONTROL_MEANS,
        chat=chat,
        prompt=asked if chat else "\n\n".join(m["content"] for m in asked),
        date=date_of(tokenizer),
        kwargs="".join(f", {name}={value!r}" for name, value in kwargs_of(tokenizer).items() if name.isidentifier()),
        generation=generation_config(sampling, tokenizer).to_diff_dict(),
        stops=list(sampling.stops),
        rewards=reward_line(settings),
        results=None if run.best is None else results(run),
        fingerprints={k: v[:SHOWN_DIGITS] for k, v in run.data.items() if k.endswith("sha256")},
        decisive_settings=settings_that_decide(run),
        command=model_card_command(run.command),
    )


def model_card_command(words: Sequence[str]) -> str:
    """Return the command that started a run, on one line, from the words in its run.json."""
    program = () if words[0] == CONSOLE_COMMAND else ("python",)
    return command(*program, *words).replace("\n", " ")


def front_matter(run: RunRecord, saved: Saved) -> ModelCardData:
    """Return the card's metadata for the hub. Base model and dataset are included only if they came from the hub."""
    settings = run.flat_settings
    base = settings["actor_model"]
    data = settings["prompts"]
    on_hub = run.on_hub
    return ModelCardData(
        base_model=base if base in on_hub else None,
        datasets=[data] if data in on_hub else None,
        library_name="peft" if saved.is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["trl", run.algorithm, "rlhf", *(["lora"] if settings["use_lora"] else [])],
    )


def reward_line(settings: dict[str, Any]) -> str:
    """Return the rewards of a run in words, with each weight that is not 1."""
    names = [f"reward model {settings['rm_model']}"] if settings["rm_model"] is not None else []
    names += [f"reward function {rule}" for rule in settings["reward_func"]]
    weights = settings["reward_weights"] or [1.0] * len(names)
    parts = [n if w == 1 else f"{w:g} x {n}" for n, w in zip(names, weights, strict=True)]
    teacher = settings.get("teacher")
    return " + ".join([*parts, *([f"teacher {teacher}"] if teacher else [])])


def results(run: RunRecord) -> TextTable:
    """Return the figures of the start model, the best checkpoint and the final weights."""
    evaluations = run.best.evaluations
    best = next(e for e in evaluations if e["update"] == run.best.update)
    kl = "kl" if run.best.kl_unit == "nats/sequence" else "kl_per_token"
    figures = run.figures | {f"{kl}_before": evaluations[0]["kl"], f"{kl}_after": evaluations[-1]["kl"]}
    metrics = {f"eval/{name}": found.get("value") for name, found in best.get("metrics", {}).items()}
    between = {"score": best["score"], kl: best["kl"], "perplexity": best["perplexity"], **metrics}
    last = (run.spent or run.plan).updates
    columns = ["start model", f"best, after update {best['update']}", f"final, after update {last}"]
    return before_and_after("", columns, rows_of_run(figures, between))


def settings_that_decide(run: RunRecord) -> list[tuple[str, str]]:
    """Return name and value of the settings that affect what is learned: not speed, not other algorithms'."""
    settings = run.flat_settings
    declared = settings_of(Config)
    foreign = ALGORITHMS[run.algorithm].foreign
    aside = {*foreign, *RESUME_MAY_CHANGE, *([] if settings["use_lora"] else ADAPTER_SETTINGS)}
    shown = [n for n, s in declared.items() if n in settings and n not in aside and s.group != "speed"]
    return [("recipe", settings["recipe"]), *((name, as_text(settings[name], " ", "none")) for name in shown)]
