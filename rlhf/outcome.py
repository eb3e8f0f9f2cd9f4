"""The end of a run: what it came to, where everything is, and what to type next."""

from __future__ import annotations

from typing import Any

from config import ALGORITHMS, LENGTHS, Config, make_config, parse_cli
from rlhf.algorithms.kl_control import kl_controller, with_horizon
from rlhf.checkpoints.run_folder import BEST_FOLDER, MERGED_FOLDER
from rlhf.checkpoints.run_record import MAY_DIFFER, RunLog, differences
from rlhf.demo.parts import gold_of
from rlhf.report import compare, kl_of_phases, last_kl, show_figures, show_samples
from rlhf.settings.commands import flag_words
from rlhf.settings.fields import as_plain, knobs_of
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError
from rlhf.utils.system import command


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
    best_model = f"the model after update {best['update']}"
    if best["update"] == 0:
        best_model = "the start model, because no later evaluation is better"
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
    tokens = command("python", "evaluate_generations.py", "--tokens", output)
    other = other_algorithm(config, run["spent"])
    screen.say("next:")
    screen.facts(
        [
            ("its completions, audited", command("python", "evaluate_generations.py", "--model-path", output)),
            *([("every token", tokens)] if config.record.record_tokens else []),
            ("the curves", command("python", "plot_training_progress.py", output)),
            ("the curves, live", command("tensorboard", "--logdir", f"{output}/logs")),
            *([("the other algorithm, same budget", other)] if other else []),
            ("the verdict; add the other algorithm's run", command("python", "compare_runs.py", output)),
            ("talk to it", command("python", "evaluate_generations.py", "--chat", "--model-path", output)),
        ]
    )


def other_algorithm(config: Config, spent: dict[str, int]) -> str | None:
    """The command that trains with the other algorithm under the same settings, on as many episodes as were `spent`;
    None if there is no such command."""
    other = next(name for name in ALGORITHMS if name != config.algorithm)
    plain = with_horizon(make_config(config.recipe, config.algorithm), spent["updates"])
    differ = differences(as_plain(config), as_plain(plain), (*MAY_DIFFER, *LENGTHS, "batch_size"))
    knobs = knobs_of(Config)
    words = ["--recipe", config.recipe, "--seed", str(config.run.seed), "--episodes", str(spent["episodes"])]
    for name in differ:
        group = knobs[name].group
        if group not in ALGORITHMS:
            words += flag_words(name, getattr(getattr(config, group), name))
    prompts = max(1, config.episodes_per_update // make_config(config.recipe, other).group_size)
    as_many = ["--batch-size", str(prompts)]  # as many episodes per update as here
    own_batch = config.batch.batch_size != plain.batch.batch_size
    for more in [as_many] if own_batch else [[], as_many]:
        try:
            parse_cli([*words, *more], other)
        except UserError:
            continue
        return command("python", f"train_{other}.py", *words, *more)
    return None
