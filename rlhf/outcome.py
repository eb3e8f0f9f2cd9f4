"""The end of a run: what it came to, where everything is, and what to type next."""

from __future__ import annotations

from typing import Any

from config import ALGORITHMS, LENGTHS, Config, make_config
from rlhf.console import Screen
from rlhf.controllers import kl_controller
from rlhf.demo.parts import gold_of
from rlhf.knobs import as_plain
from rlhf.loop import OnPolicyLoop
from rlhf.report import compare, kl_of_phases, last_kl, show_figures, show_samples
from rlhf.runlogs import MAY_DIFFER, RunLog, differences
from rlhf.weights import BEST_FOLDER, MERGED_FOLDER


def finish_run(config: Config, trainer: OnPolicyLoop, log: RunLog, screen: Screen) -> None:
    """Before and after, side by side; figures and what was spent go to run.json."""
    before, after, prompts = trainer.evaluations[0], trainer.evaluations[-1], trainer.evaluation_prompts
    gold = gold_of(config)
    target = config.kl.targets[-1]
    figures = compare(before, after, prompts, gold, config.run.seed) | {
        "kl_last_10_updates": last_kl(trainer.state.log_history, target),
        "kl_target": target.nats if config.kl.steered else None,
        "kl_unit": f"nats/{target.per}",
        "kl_phases": kl_of_phases(trainer.state.log_history, kl_controller(config, trainer.updates).phases),
        "perplexity_text": trainer.text.source,
        "peak_memory_gib": trainer.peak_memory / 2**30,
        "seconds": log.seconds(),
    }
    spent = {
        "updates": trainer.updates,
        "episodes": trainer.updates * config.episodes_per_update,
        "optimizer_steps": trainer.optimizer_steps,
        "reply_tokens": trainer.reply_tokens,
    }
    log.add(figures=figures, spent=spent)
    show_samples(before, after, prompts, gold, config.run.seed, screen)
    show_figures(figures, screen)


def show_where(config: Config, run: dict[str, Any], screen: Screen) -> None:
    """What of a finished run (its run.json) lies where, and the next commands."""
    output, best, merged = config.run.output, run["best"], run.get("merged")
    loader = "peft.AutoPeftModelForCausalLM" if config.model.use_lora else "transformers.AutoModelForCausalLM"
    whole = f"{output}/{MERGED_FOLDER}"
    load_whole = f"transformers.AutoModelForCausalLM.from_pretrained({whole!r})"
    best_model = (
        "the start model, no later evaluation is better"
        if best["update"] == 0
        else (f"the model after update {best['update']}")
    )
    screen.say("saved:")
    screen.facts(
        [
            (output, f"model and tokenizer; load with {loader}.from_pretrained({output!r})"),
            (f"{output}/{BEST_FOLDER}", f"{best_model}: {best['why']}"),
            *([(whole, f"the {merged['which']} weights as a whole model; load with {load_whole}")] if merged else []),
            (f"{output}/README.md", "model card: figures, settings, and code to load it"),
            (f"{output}/samples", "every evaluation's replies with their scores"),
            (f"{output}/run.json", "settings, versions, figures"),
        ]
    )
    tokens = f"python evaluate_generations.py --tokens {output}"
    screen.say("next:")
    screen.facts(
        [
            ("its replies, audited", f"python evaluate_generations.py --model-path {output}"),
            *([("every token", tokens)] if config.record.record_tokens else []),
            ("the curves", f"python plot_training_progress.py {output} (live: tensorboard --logdir {output}/logs)"),
            ("the other algorithm, same budget", other_algorithm(config, run["spent"]["episodes"])),
            ("the verdict on both", f"python compare_runs.py {output} OTHER_RUN ..."),
            ("talk to it", f"python evaluate_generations.py --chat --model-path {output}"),
        ]
    )


def other_algorithm(config: Config, episodes: int) -> str:
    """The command that trains by the other algorithm on as many episodes; in words, where the run had settings that
    a recipe and a seed do not say."""
    other = next(name for name in ALGORITHMS if name != config.algorithm)
    plain = make_config(config.recipe, config.algorithm)
    if differences(as_plain(config), as_plain(plain), (*MAY_DIFFER, *LENGTHS)):
        return f"python train_{other}.py with the settings that both have, and --episodes {episodes}"
    return f"python train_{other}.py --recipe {config.recipe} --seed {config.run.seed} --episodes {episodes}"
