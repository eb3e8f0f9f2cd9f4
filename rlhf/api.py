"""Python API: builds a trainer from a configuration, prompts, and custom rewards and callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.distributed.group import agree
from rlhf.distributed.join import use_own_gpu
from rlhf.settings.training import Config
from rlhf.utils.console import quiet_in_program
from rlhf.utils.libraries import check_trackers
from rlhf.utils.paths import local_path

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlhf.data.examples import GivenPrompt
    from rlhf.rewards.functions import RewardFunction
    from rlhf.run.looks import CheckResult
    from rlhf.trainer.loop import OnPolicyLoop

    Prompts = Sequence[GivenPrompt]
    Functions = Sequence[RewardFunction | nn.Module | str]

use_own_gpu()  # before bitsandbytes is imported, which initializes CUDA
quiet_in_program()  # before the libraries are imported: bitsandbytes prints a message at import


def make_trainer(
    config: Config,
    prompts: Prompts,
    rewards: Functions | None = None,
    reward_weights: Sequence[float] | None = None,
    callbacks: Sequence = (),
    evaluation_prompts: Prompts | None = None,
    eval_functions: Functions | None = None,
    output: str | Path | None = None,
    progress: bool = True,
    environment: Any = None,
    model: PreTrainedModel | str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    repeats: bool = False,
) -> OnPolicyLoop:
    """Return a trainer of `config.algorithm`, with the methods `train()`, `evaluate()`, `save_model(folder)` and
    `load_model(folder)`. The run length and the seed come from `config`. Without `output`, only `save_model` writes
    files. Raises UserError.

    Args:
        prompts: texts, chats (lists of {"role", "content"}), or rows as in a data file. An empty list is for a loop by
            hand: it needs `num_iterations`, and `prompt_length` is the room for its prompts.
        rewards: reward functions, modules, or names as in --reward-func, used instead of the reward model and reward
            functions in `config`.
        reward_weights: one weight for each of `rewards`; None: all 1.
        callbacks: objects with methods of rlhf.callbacks.base.Callback, or functions of (epoch, metrics).
        evaluation_prompts: like `prompts`. None: the rows of the setting `eval_dataset`; if it is not set, 10% of the
            prompts are held out, selected by the hash of the question; if there are fewer than 20 prompts, the
            training prompts are also used for evaluation. An empty list: there are no evaluations and no `best/`.
        eval_functions: functions with the signature of reward functions, used instead of --eval-func in `config`:
            metrics eval/NAME of every evaluation, which training never sees.
        output: folder of the run, instead of that in `config`. `train()` writes there what a script's run writes:
            run.json, TensorBoard, checkpoints, samples, incidents, best/ and the final model. With `resume` in
            `config`, it resumes the run in that folder.
        progress: False: `train()` prints warnings, but no lines about updates, evaluations and results.
        environment: a class with the methods reset and observe, or one for `environment_factory` of TRL's GRPOTrainer,
            used instead of --environment in `config`.
        model: the start model, instead of `actor_model` in `config`: a name, or a causal model of transformers, which
            is stored beside `output`, in a folder whose name has the hash of its tensors. The run trains a copy in
            float32.
        tokenizer: instead of the one in the start model's folder.
        repeats: use every prompt, also those that occur several times.
    """
    from rlhf.run.python_run import check_given, trainer_of

    check_given(config, callbacks, without_folder=output is None)
    check_trackers(config.record.report_to or ())
    folder = None if output is None else Path(local_path(output))
    given = {"prompts": prompts, "evaluation_prompts": evaluation_prompts, "rewards": rewards,
             "reward_weights": reward_weights, "eval_functions": eval_functions,
             "environment": environment, "model": model, "tokenizer": tokenizer, "repeats": repeats}  # fmt: skip
    trainer = agree(lambda: trainer_of(config, folder, progress, **given))
    for callback in callbacks:
        trainer.add_callback(callback)
    return trainer


def check(
    config: Config,
    prompts: Prompts,
    rewards: Functions | None = None,
    reward_weights: Sequence[float] | None = None,
) -> CheckResult:
    """Check a run before it is trained, as --check does: print the results, and return them with their problems, an
    empty list if all is well. `make_config(check=("reward", "prompts"))` checks these parts only. Trains and writes
    nothing. Raises UserError. The arguments are those of `make_trainer`."""
    from rlhf.run.looks import check_program
    from rlhf.run.python_run import check_given

    check_given(config, trains=False)
    return agree(lambda: check_program(config, prompts=prompts, rewards=rewards, reward_weights=reward_weights))
