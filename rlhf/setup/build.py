"""Builds a trainer from the settings: `load_components` loads data, models and rewards, `build_trainer` the trainer.

The scripts, the Python API, the benchmarks and the tests build their trainers here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft import LoraConfig
from transformers import PreTrainedTokenizerBase

from rlhf.checkpoints.model_folder import METRICS_FILE
from rlhf.data.prompts import PromptSets
from rlhf.demo import ready
from rlhf.demo.parts import prepare_parts
from rlhf.demo.tasks import Gold
from rlhf.environments.environment import Environment
from rlhf.models.device import autocast_dtype, memory_in_use, reset_peak_memory
from rlhf.models.load import load_policy, lora_modules
from rlhf.models.logprobs import base_of
from rlhf.models.reference import Reference
from rlhf.rewards.build import make_rewards
from rlhf.rewards.checks import check_unrecorded
from rlhf.rewards.find import EVAL_FUNCTION
from rlhf.rewards.reward_model import RewardModel
from rlhf.rewards.rewards import Rewards
from rlhf.rollout.engine import default_engine
from rlhf.settings.recipes import DEMOS
from rlhf.settings.training import Config
from rlhf.setup.load_inputs import RunInputs, check_device, load_inputs
from rlhf.setup.precision import choose_threads
from rlhf.setup.preflight import graphs_do_not_hang
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.session import Session
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError


def prepare_demo_components(config: Config, screen: Screen, device: torch.device) -> None:
    """With a recipe that has parts, make those that do not exist yet: prompts, start model, reward model."""
    if config.recipe not in DEMOS:
        return
    if config.recipe in ("demo", "demo-game") and not ready.is_ready(config.recipe):
        choose_threads(config, str(ready.WEIGHTS), device, Screen(quiet=True))  # the run prints its choice
    prepare_parts(config.recipe, screen, device)


@dataclass
class Components:
    """The parts that a trainer is built from."""

    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSets
    reward_model: RewardModel | None
    rewards: Rewards
    policy: torch.nn.Module
    memory_before: int  # bytes in use before any of this was loaded
    eval_functions: Rewards | None = None  # evaluation functions; None: there are none
    gold: Gold | None = None  # the demo's judge; None: the run has other prompts, or is of a program
    date: str | None = None  # as in StartModel
    teacher: Reference | None = None
    environment: Environment | None = None


def load_components(config: Config, device: torch.device, screen: Screen, *given, **named) -> Components:
    """Load and check the parts of the run that the settings describe. Raises UserError.

    Data is loaded before models, and small models before large ones, so that errors are found before the slow work.
    The arguments after `screen` are those of `load_inputs`.
    """
    return load_models(config, load_inputs(config, screen, *given, **named), device, screen)


def load_models(config: Config, inputs: RunInputs, device: torch.device, screen: Screen) -> Components:
    """Load the reward model and the start model, and check them against the inputs. Raises UserError."""
    check_device(config, inputs.start, device)
    reset_peak_memory(device)
    before = 0 if device.type == "cuda" else memory_in_use(device)
    m = config.model
    start = inputs.start
    sets = inputs.prompts
    watched = inputs.eval_functions
    tokenizer = start.tokenizer
    evaluated = None
    rewards, reward_model = make_rewards(config, inputs.rewards, tokenizer, device, start.date)
    if reward_model is not None:
        if m.rm_text not in (None, reward_model.text):
            raise UserError(
                f"its {METRICS_FILE} has the text {reward_model.text}",
                f"--rm-text {m.rm_text}, --rm-model {m.rm_model}",
                "Remove --rm-text",
            )
        pairs = [prompt.example for prompt in sets.evaluation]
        check_unrecorded(reward_model, m.rm_model, pairs, m.allow_weak_reward_model, screen)
    policy = load_start_policy(config, start.folder, tokenizer, device)
    teacher = None
    if inputs.teacher is not None:
        dtype = autocast_dtype(m.bf16, device)
        model = load_policy(inputs.teacher, frozen=True, dtype=dtype, device=device, vocabulary=len(tokenizer))
        teacher = Reference(None, model, name="teacher")
    if watched:
        limit_s = config.reward.reward_timeout
        unused = [0.0] * len(watched)  # weights: their sum means nothing
        evaluated = Rewards(list(watched.values()), unused, tokenizer, limit_s, list(watched), EVAL_FUNCTION)
    return Components(
        tokenizer,
        sets,
        reward_model,
        rewards,
        policy,
        before,
        evaluated,
        date=start.date,
        teacher=teacher,
        environment=inputs.environment,
    )


def build_trainer(config: Config, components: Components, session: Session | None = None) -> OnPolicyLoop:
    """Return a trainer for `config.algorithm`. `session` saves, prints and stops; None: nothing is saved. Raises
    UserError if the run would sample with CUDA graphs, and they do not work."""
    policy = components.policy
    device = base_of(policy).device
    engine = config.speed.rollout_engine
    if device.type == "cuda" and (default_engine(policy, device) if engine == "auto" else engine) == "graph":
        graphs = graphs_do_not_hang(policy, autocast_dtype(config.model.bf16, device), again=False)
        if not graphs.ok:
            raise UserError(graphs.problem)
    return OnPolicyLoop(
        config,
        policy=policy,
        tokenizer=components.tokenizer,
        train=components.prompts.train,
        evaluation=components.prompts.evaluation,
        rewards=components.rewards,
        eval_functions=components.eval_functions,
        gold=components.gold,
        teacher=components.teacher,
        environment=components.environment,
        session=session,
    )


def load_start_policy(config: Config, start: str, tokenizer: PreTrainedTokenizerBase, device: torch.device):
    """Load the start model for training: with all weights trainable, or with LoRA adapters (the base may be 4-bit)."""
    m = config.model
    lora = LoraConfig(
        r=m.lora_r, lora_alpha=m.lora_alpha, lora_dropout=m.lora_dropout, target_modules=lora_modules(m.lora_targets),
        task_type="CAUSAL_LM",
    )  # fmt: skip
    torch.manual_seed(config.run.seed)  # peft initialises adapters with torch's global generator
    return load_policy(
        start,
        lora=lora if m.use_lora else None,
        load_in_4bit=m.load_in_4bit,
        dtype=autocast_dtype(m.bf16, device),
        gradient_checkpointing=m.gradient_checkpointing,
        device=device,
        vocabulary=len(tokenizer),
    )
