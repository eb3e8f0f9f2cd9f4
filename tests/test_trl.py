"""TRL's trainers by one changed import: equal weights, every field of TRL's configurations, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import random

import pytest
import torch
import trl
import trl.experimental.ppo.ppo_trainer as trl_ppo
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
)

import rlhf.trl as ours
from rlhf.api import make_trainer
from rlhf.checkpoints.manifest import checkpoint_path
from rlhf.checkpoints.run_record import flat_settings
from rlhf.config import make_config
from rlhf.data.tokenizer import eos_ids, load_tokenizer
from rlhf.rollout import sampler
from rlhf.rollout.completions import Completions
from rlhf.run.given_models import stored_start_model
from rlhf.settings.fields import to_dict
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.errors import UserError
from tests.trl_fields import CONFIGS, PAGE, fields_by_use, page_with_tables

TINY = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8}
ROWS = [
    {"prompt": text} for text in ("the cat", "what is the capital of France?", "justify your steps", "numbers 1 2")
]
LENGTH = 8
GROUPS = {"grpo": (ours.GRPOTrainer, trl.GRPOTrainer), "rloo": (ours.RLOOTrainer, trl.RLOOTrainer)}
CONFIG_OF = {"grpo": trl.GRPOConfig, "rloo": trl.RLOOConfig}
QUIET = {"report_to": "none", "use_cpu": True, "save_strategy": "no", "bf16": False}


def by_length(completions, **_) -> list[float]:
    return [float(len(text) % 7) for text in completions]


def group_args(algorithm: str, output, **changed):
    settings = {"max_completion_length": LENGTH, "learning_rate": 1e-3, "max_steps": 3, **QUIET}
    return CONFIG_OF[algorithm](output_dir=str(output), **{**settings, **changed})


def group_trainer(algorithm: str, start_model, output, rows=ROWS, **changed):
    model = changed.pop("model", str(start_model))
    given = {name: changed.pop(name) for name in ("peft_config", "eval_dataset") if name in changed}
    args = group_args(algorithm, output, **{"num_generations": 2, **changed})
    return GROUPS[algorithm][0](model, by_length, args, Dataset.from_list(list(rows)), **given)


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def in_order(trainer: OnPolicyLoop) -> None:
    """Let minibatches be those of TRL without its shuffling."""
    size = trainer.config.minibatch_size
    count = trainer.config.episodes_per_update
    trainer.policy_optimizer.minibatches = lambda update, epoch: iter(torch.arange(count).view(-1, size).tolist())


# --- equal weights ---------------------------------------------------------------------------------------------------


class Replay:
    """TRL's GRPOTrainer or RLOOTrainer with the completions of one of our runs."""

    def __init__(self, algorithm: str, start_model, args, rollouts: list):
        self.rollouts = iter(rollouts)

        class Stock(GROUPS[algorithm][1]):
            """Of RLOO, whose trainer has no argument rollout_func."""

            def _generate(self, prompts):
                found = replay(prompts, self)
                texts = self.processing_class.batch_decode(found["completion_ids"], skip_special_tokens=True)
                return found["prompt_ids"], found["completion_ids"], texts

        def replay(prompts, _):
            now = next(self.rollouts)
            ids = now.completions.rows()
            return {
                "prompt_ids": [list(prompt.ids) for prompt in now.prompts],
                "completion_ids": ids,
                "logprobs": [[0.0] * len(row) for row in ids],
            }

        is_grpo = algorithm == "grpo"
        kind = trl.GRPOTrainer if is_grpo else Stock
        more = {"rollout_func": replay} if is_grpo else {}
        self.trainer = kind(
            model=AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32),
            reward_funcs=[by_length],
            args=args,
            train_dataset=Dataset.from_list(ROWS * 8),
            processing_class=load_tokenizer(str(start_model)),
            **more,
        )


@pytest.mark.parametrize(
    ("algorithm", "changed"),
    [
        ("grpo", {"num_generations": 8}),  # TRL's defaults
        ("grpo", {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 12,
                  "num_generations": 2, "per_device_train_batch_size": 2, "lr_scheduler_type": "constant",
                  "beta": 0.3}),
        ("rloo", {"num_generations": 2}),
        ("rloo", {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 12,
                  "num_generations": 2, "per_device_train_batch_size": 2, "lr_scheduler_type": "constant"}),
    ],
)  # fmt: skip
def test_three_updates_equal_trls(monkeypatch, start_model, tmp_path, algorithm, changed):
    changed = {**changed, "max_completion_length": LENGTH}
    adapter = group_trainer(algorithm, start_model, tmp_path / "ours", ROWS * 8, **changed)
    rollouts = []
    trainer = adapter.trainer
    in_order(trainer)
    advantages = trainer.advantages

    def recorded(rollout, scores):
        rollouts.append(rollout)
        return advantages(rollout, scores)

    trainer.advantages = recorded
    adapter.train()
    monkeypatch.setattr(f"trl.trainer.{algorithm}_trainer.shuffle_sequence_dict", lambda batch: batch)
    args = group_args(algorithm, tmp_path / "trl", **changed)
    stock = Replay(algorithm, start_model, args, rollouts).trainer
    stock.train()
    start = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32)
    assert len(rollouts) == 3
    assert float((weights_of(trainer.host.model) - weights_of(stock.model)).abs().max()) < 2e-5
    assert float((weights_of(stock.model) - weights_of(start)).abs().max()) > 1e-4


def words(tokenizer, rng: random.Random) -> list[int]:
    ids = tokenizer(" ".join(rng.choices("the cat is on a table and helps with numbers".split(), k=LENGTH))).input_ids
    return ids[:LENGTH]


@pytest.fixture
def ppo_parts(start_model, reward_folder, tmp_path):
    """Return a function that returns the arguments of a PPOTrainer, new objects with equal weights at each call."""
    tokenizer = load_tokenizer(str(start_model))
    model = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32)
    reward = AutoModelForSequenceClassification.from_pretrained(reward_folder, dtype=torch.float32)
    torch.manual_seed(3)
    value = LlamaForSequenceClassification(copy.deepcopy(reward.config))
    value.config.pad_token_id = tokenizer.pad_token_id
    rows = [{"input_ids": tokenizer(row["prompt"]).input_ids} for row in ROWS]

    def parts(output: str, **changed):
        settings = {"per_device_train_batch_size": 4, "total_episodes": 12, "response_length": LENGTH,
                    "stop_token": "eos", "num_sample_generations": 0, "learning_rate": 1e-3,
                    "max_grad_norm": 1e9, "temperature": 0.7 - 1e-7, **QUIET}  # fmt: skip
        return {
            "args": trl_ppo.PPOConfig(output_dir=str(tmp_path / output), **{**settings, **changed}),
            "processing_class": tokenizer,
            "model": copy.deepcopy(model),
            "ref_model": copy.deepcopy(model),
            "reward_model": copy.deepcopy(reward),
            "value_model": copy.deepcopy(value),
            "train_dataset": Dataset.from_list(rows),
        }

    return parts


def test_three_updates_of_ppo_equal_trls(monkeypatch, ppo_parts):
    rng = random.Random(5)
    parts = ppo_parts("trl")
    tokenizer = parts["processing_class"]
    prompts = [row["input_ids"] for row in parts["train_dataset"]]
    table = [[words(tokenizer, rng) for _ in prompts] for _ in range(3)]
    orders = []

    def replay(model, queries, _rows, pad, _generation):
        order = [prompts.index([t for t in query if t != pad]) for query in queries.tolist()]
        completion = torch.tensor([table[len(orders)][i] for i in order])
        orders.append(order)
        ids = torch.cat([queries, completion], 1)
        return ids, trl_ppo.forward(model, ids, pad).logits[:, queries.shape[1] - 1 : -1] / 0.7

    monkeypatch.setattr(trl_ppo, "batch_generation", replay)
    stock = trl_ppo.PPOTrainer(**parts)
    stock.train()

    adapter = ours.PPOTrainer(**ppo_parts("ours"))
    trainer = adapter.trainer
    assert [list(prompt.ids) for prompt in trainer.train_prompts] == prompts

    def sample(policy, given, uniform, sampling, *, eos, pad, **_):
        completion = torch.tensor([table[trainer.update][trainer.train_prompts.index(p)] for p in given])
        return Completions.of(given, completion, eos=eos, pad=pad, vocabulary=len(tokenizer))

    monkeypatch.setattr(
        trainer, "episodes_of", lambda update: [(i, trainer.train_prompts[i]) for i in orders[update - 1]]
    )
    monkeypatch.setattr(sampler, "sample_completions", sample)
    assert adapter.train().global_step == 3
    for mine, its in ((trainer.actor.policy, stock.model.policy), (trainer.actor.critic, stock.value_model.model)):
        assert float((weights_of(mine) - weights_of(its)).abs().max()) < 2e-5
    head = trainer.actor.value_head.summary
    assert head.bias is None
    assert float((head.weight - stock.value_model.score.weight).detach().abs().max()) < 2e-5
    start = ppo_parts("start")["value_model"]
    assert float((weights_of(start.model) - weights_of(stock.value_model.model)).abs().max()) > 1e-4


# --- fields ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONFIGS)
def test_each_field_has_one_use(kind):
    """A field is used, or has no effect, or is refused: no name is in two lists, and no name is TRL's no more."""
    uses = fields_by_use(kind)
    names = [name for part in uses.values() for name in part]
    assert sorted(names) == sorted({field.name for field in dataclasses.fields(kind)})


def test_the_lists_have_no_name_that_no_class_has():
    known = {field.name for kind in CONFIGS for field in dataclasses.fields(kind)}
    lists = [ours.OF_ALL, ours.OF_GROUPS, ours.OF_GRPO, ours.OF_PPO, ours.COMPUTED_OF_GRPO, ours.COMPUTED_OF_PPO,
             ours.NO_EFFECT, ours.INSTEAD]  # fmt: skip
    assert {name for names in lists for name in names} <= known
    lora = {field.name for field in dataclasses.fields(LoraConfig)}
    assert {*ours.OF_LORA, *ours.LORA_WITHOUT_EFFECT} <= lora


def test_the_page_has_the_table_of_the_code():
    assert PAGE.read_text("utf-8") == page_with_tables(PAGE.read_text("utf-8"))


def other_than(value):
    """Return a value that differs from a field's default."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else "other"


@pytest.mark.parametrize("kind", CONFIGS)
def test_each_refused_field_is_named(kind, tmp_path):
    fresh = kind(output_dir=str(tmp_path), use_cpu=True)
    for name in fields_by_use(kind)["refused"]:
        args = copy.deepcopy(fresh)
        vars(args)[name] = other_than(getattr(fresh, name))  # past transformers' own checks
        used = {field.name for field in dataclasses.fields(kind)} - {name}
        problems = ours.refused_fields(args, used, fresh)
        assert [name in str(p.place) and bool(p.fix) for p in problems] == [True], name


SEQUENCE = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
CONSTANT = {"lr_schedule": "constant"}
TWO_STEPS = {"steps_per_generation": 2, "lr_scheduler_type": "constant"}


# --- settings --------------------------------------------------------------------------------------------------------


def config_of(algorithm: str, start_model, tmp_path, rows: int = 16, **changed):
    """Return the settings of a trainer over so many rows, which is not constructed."""
    return group_trainer(algorithm, start_model, tmp_path / "run", [*ROWS * 8][:rows], max_steps=-1, **changed).config


def test_trls_defaults_and_nothing_else(start_model, tmp_path):
    """A trainer without any value has TRL's defaults, not those of a recipe."""
    args = trl.GRPOConfig(output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none")
    config = ours.GRPOTrainer(str(start_model), by_length, args, Dataset.from_list(ROWS * 8)).config
    assert (config.batch.batch_size, config.batch.K, config.batch.minibatches, config.batch.ppo_epochs) == (1, 8, 1, 1)
    assert (config.sampling.max_new_tokens, config.sampling.temperature) == (512, 1.0)
    assert (config.optimizer.learning_rate, config.optimizer.lr_schedule) == (1e-6, "linear")
    assert (config.kl.kl_placement, config.grpo.scale_rewards, config.grpo.loss_type) == ("none", "group", "dapo")
    assert config.run.num_iterations == 3 * 32
    assert (config.model.bf16, config.model.gradient_checkpointing, config.model.use_lora) == (True, True, False)
    assert config.run.save_every == 500


def test_batches_and_lengths(start_model, tmp_path):
    shape = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4,
             "num_iterations": 3, "num_generations": 4, "lr_scheduler_type": "constant"}  # fmt: skip
    config = config_of(
        "grpo", start_model, tmp_path, num_train_epochs=1.5, save_strategy="steps", save_steps=12, **shape
    )
    batch = config.batch
    assert (batch.batch_size, batch.minibatches, batch.micro_batch_size) == (4, 2, 4)
    assert config.run.num_iterations == 6  # ceil(1.5 x floor(16 / 4))
    assert config.run.save_every == 2  # an update has 6 optimizer steps
    assert config_of("grpo", start_model, tmp_path, rows=19, **shape).run.num_iterations == 12  # 3 x floor(19 / 4)


@pytest.mark.parametrize(
    ("algorithm", "changed", "expected"),
    [
        ("grpo", {"beta": 0.1}, {"kl_placement": "loss", "kl_coef": 0.1, "kl_schedule": "fixed"}),
        ("rloo", {}, {"kl_placement": "reward", "kl_coef": 0.05, "kl_schedule": "fixed"}),
        ("rloo", {"beta": 0}, {"kl_placement": "none"}),
        ("grpo", {"loss_type": "cispo", "epsilon_high": 5.0}, {"loss_type": "cispo", "epsilon_high": 4.0}),
        ("grpo", SEQUENCE, {"loss_type": "gspo"}),
        ("grpo", {"scale_rewards": False}, {"scale_rewards": "none"}),
        ("grpo", {"max_tool_calling_iterations": None}, {"max_turns": None}),
        ("grpo", {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3}, {**CONSTANT, "warmup_steps": 3}),
        ("grpo", {"lr_scheduler_type": "constant", "warmup_steps": 3}, {**CONSTANT, "warmup_steps": 0}),
        ("grpo", {"save_strategy": "no"}, {"save_every": 12}),
        ("grpo", {"save_strategy": "steps", "save_steps": 0.5}, {"save_every": 6, "keep": 2}),
        ("grpo", {"save_strategy": "epoch", "save_total_limit": 1}, {"save_every": 4, "keep": 1}),
        ("grpo", {"optim": "adamw_torch"}, {"optim": "adamw"}),
        ("grpo", {"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": '{"a": 1}'}),
    ],
)  # fmt: skip
def test_values_become_settings(start_model, tmp_path, algorithm, changed, expected):
    chats = [{"prompt": [{"role": "user", "content": "a"}]}] * 4 if "chat_template_kwargs" in changed else ROWS
    trainer = group_trainer(algorithm, start_model, tmp_path / "run", chats * 4, max_steps=-1, **changed)
    config = trainer.config
    found = flat_settings(to_dict(config))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("algorithm", "changed", "named"),
    [
        ("grpo", {"loss_type": "sapo"}, ["loss_type", "dapo"]),
        ("grpo", {"loss_type": "cispo"}, ["epsilon_high", "1 + epsilon_high"]),
        ("grpo", {"importance_sampling_level": "sequence"}, ["importance_sampling_level", "gspo"]),
        ("grpo", {**SEQUENCE, "beta": 0.1}, ["beta=0.1", "kl_placement"]),
        ("grpo", {"beta": 0.1, "use_bias_correction_kl": False}, ["use_bias_correction_kl", "kl_placement"]),
        ("grpo", {"multi_objective_aggregation": "normalize_then_sum"}, ["multi_objective_aggregation"]),
        ("grpo", {"top_entropy_quantile": 0.2}, ["top_entropy_quantile"]),
        ("grpo", {"lr_scheduler_type": "polynomial"}, ["lr_scheduler_type", "cosine"]),
        ("grpo", {"optim": "sgd"}, ["optim", "adamw_8bit"]),
        ("grpo", {"steps_per_generation": 2}, ["lr_scheduler_type", "constant"]),
        ("grpo", {**TWO_STEPS, "save_strategy": "steps", "save_steps": 3}, ["save_steps=3", "2"]),
        ("rloo", {"normalize_advantages": True}, ["normalize_advantages", "scale_rewards"]),
        ("rloo", {"reward_clip_range": (-1.0, 1.0)}, ["reward_clip_range"]),
        ("grpo", {"push_to_hub": True}, ["push_to_hub", "hub_model_id"]),
        ("grpo", {"report_to": "mlflow"}, ["report_to", "trackio"]),
        ("grpo", {"shuffle_dataset": False}, ["shuffle_dataset"]),
        ("rloo", {"remove_unused_columns": True}, ["remove_unused_columns"]),
        ("grpo", {"max_completion_length": 0}, ["GRPOConfig(max_completion_length=)", "max_new_tokens"]),
        ("grpo", {"num_iterations": 0}, ["GRPOConfig(num_iterations=)", "ppo_epochs"]),
        ("rloo", {"beta": -1.0}, ["RLOOConfig(beta=)", "kl_coef"]),
        ("grpo", {"per_device_train_batch_size": 64, "generation_batch_size": 64}, ["train_dataset", "rows"]),
    ],
)  # fmt: skip
def test_values_that_are_refused(start_model, tmp_path, user_error, algorithm, changed, named):
    with user_error(*named):
        config_of(algorithm, start_model, tmp_path, **changed)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"kl_estimator": "k3"}, ["kl_estimator", "k1"]),
        ({"stop_token": None}, ["stop_token", "eos"]),
        ({"max_steps": 5}, ["max_steps", "total_episodes"]),
        ({"num_mini_batches": 3, "gradient_accumulation_steps": 2}, ["num_mini_batches=3", "2"]),
        ({"num_mini_batches": 2, "gradient_accumulation_steps": 3}, ["num_mini_batches=2", "minibatches"]),
    ],
)
def test_values_of_ppo_that_are_refused(ppo_parts, user_error, changed, named):
    with user_error(*named):
        ours.PPOTrainer(**ppo_parts("run", **changed))


def test_settings_of_ppo(ppo_parts):
    parts = ppo_parts(
        "run", gradient_accumulation_steps=2, num_mini_batches=4, total_episodes=17, missing_eos_penalty=1.5
    )
    config = ours.PPOTrainer(**parts).config
    assert (config.batch.batch_size, config.batch.minibatches, config.run.num_iterations) == (8, 2, 3)
    assert (config.kl.kl_coef, config.reward.missing_eos_penalty, config.batch.K) == (0.05, 1.5, 1)
    assert (config.critic.value_coef, config.critic.lam, config.optimizer.learning_rate) == (0.1, 0.95, 1e-3)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"optimizers": (object(), None)}, ["optimizers", "learning_rate"]),
        ({"data_collator": object()}, ["data_collator"]),
        ({"reward_model": None}, ["reward_model", "reward_funcs"]),
        ({"args": trl.GRPOConfig("x", use_cpu=True, bf16=False)}, ["GRPOConfig", "PPOConfig"]),
        ({"train_dataset": {"a": Dataset.from_list(ROWS)}}, ["train_dataset", "dict"]),
        ({"train_dataset": [Dataset.from_list(ROWS)] * 2}, ["train_dataset", "list"]),
        ({"train_dataset": Dataset.from_list([{"text": "a"}])}, ["train_dataset", "prompt"]),
        ({"train_dataset": Dataset.from_list([{"prompt": "a", "system": "b"}])}, ["train_dataset", "system"]),
        ({"train_dataset": Dataset.from_list([{"prompt": "a", "messages": "b"}])}, ["train_dataset", "messages"]),
        ({"model": None}, ["model"]),
        ({"model": 3}, ["model", "3"]),
        ({"model": LlamaForSequenceClassification(LlamaConfig(**TINY))}, ["model", "causal"]),
        ({"ref_model": "name"}, ["ref_model"]),
        ({"reward_model": "name"}, ["reward_model", "reward_funcs"]),
        ({"processing_class": object()}, ["processing_class", "tokenizer"]),
        ({"args": None}, ["args", "PPOConfig"]),
        ({"peft_config": LoraConfig()}, ["value_model", "peft_config"]),
    ],
)
def test_arguments_that_are_refused(ppo_parts, user_error, changed, named):
    with user_error(*named):
        ours.PPOTrainer(**{**ppo_parts("run"), **changed})


def test_a_reference_with_other_weights_is_refused(ppo_parts, user_error):
    parts = ppo_parts("run")
    with torch.no_grad():
        next(parts["ref_model"].parameters()).add_(1)
    with user_error("ref_model"):
        ours.PPOTrainer(**parts)


def test_a_value_model_with_another_head_is_refused(ppo_parts, user_error):
    parts = ppo_parts("run")
    parts["value_model"].score = torch.nn.Linear(32, 2)
    with user_error("value_model", "num_labels=1"):
        ours.PPOTrainer(**parts)


# --- LoRA ------------------------------------------------------------------------------------------------------------


def test_lora(start_model, tmp_path):
    config = config_of("grpo", start_model, tmp_path, peft_config=LoraConfig(task_type="CAUSAL_LM"))
    model = config.model
    assert (model.use_lora, model.lora_r, model.lora_alpha, model.lora_dropout) == (True, 8, 8, 0.0)
    assert model.lora_targets == ("q_proj", "v_proj")  # peft's own for Llama


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"use_dora": True}, ["use_dora", "LoraConfig"]),
        ({"bias": "all"}, ["bias"]),
        ({"rank_pattern": {"q_proj": 4}}, ["rank_pattern"]),
        ({"target_modules": ".*q_proj"}, ["target_modules", "lora_targets"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights"]),
        ({"inference_mode": True}, ["inference_mode"]),
    ],
)
def test_values_of_lora_that_are_refused(start_model, tmp_path, user_error, changed, named):
    with user_error(*named):
        config_of("grpo", start_model, tmp_path, peft_config=LoraConfig(**changed))


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_resumes_from_its_last_checkpoint(start_model, tmp_path, user_error):
    """A run of four updates equals one that is stopped after two and resumed by a new trainer."""
    shape = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = group_trainer("grpo", start_model, tmp_path / "whole", **shape)
    whole.train()
    first = group_trainer("grpo", start_model, tmp_path / "run", **shape)
    first.add_callback(lambda epoch, metrics: None)
    update = first.trainer.update_step

    def interrupted(number: int):
        if number == 3:
            raise KeyboardInterrupt
        return update(number)

    first.trainer.update_step = interrupted
    with pytest.raises(KeyboardInterrupt):
        first.train()
    other = checkpoint_path(tmp_path / "run", 1)
    other.mkdir()
    for place in (tmp_path / "other", tmp_path / "run" / "none", other):
        with user_error("resume_from_checkpoint", "output_dir", "checkpoint-2"):
            group_trainer("grpo", start_model, tmp_path / "run", **shape).train(str(place))
    again = group_trainer("grpo", start_model, tmp_path / "run", **shape)
    assert again.train(str(checkpoint_path(tmp_path / "run", 2))).global_step == 4
    assert torch.equal(weights_of(again.host.model), weights_of(whole.host.model))


def test_an_evaluation_only_with_eval_strategy(start_model, tmp_path, user_error):
    rows = Dataset.from_list([{"prompt": "the dog"}] * 3)
    off = group_trainer("grpo", start_model, tmp_path / "off", eval_dataset=rows, max_steps=1)
    assert off.evaluation_prompts == []
    on = group_trainer("grpo", start_model, tmp_path / "on", eval_dataset=rows, max_steps=1, eval_strategy="steps")
    assert len(on.evaluation_prompts) == 3
    on.train()
    with user_error("evaluate"):
        off.evaluate()
    assert off.evaluate(rows)["eval/score"] == on.evaluations[0].metrics()["eval/score"]
    assert [e.update for e in on.evaluations] == [0, 1]
    assert on.evaluate()["eval/score"] == on.evaluations[-1].metrics()["eval/score"]


def test_all_rows_train(start_model, tmp_path):
    trainer = group_trainer("grpo", start_model, tmp_path / "run", ROWS * 3)
    assert len(trainer.train_prompts) == 12
    assert trainer.processing_class.chat_template is None
    tokenizer = AutoTokenizer.from_pretrained(start_model)
    assert list(trainer.train_prompts[0].ids) == tokenizer(ROWS[0]["prompt"]).input_ids


def test_special_tokens_in_texts_are_those_tokens(start_model, tmp_path):
    """A prompt that was made with a chat template is encoded as in TRL, also in evaluations."""
    tokenizer = AutoTokenizer.from_pretrained(start_model)
    chat = [{"role": "user", "content": "the cat"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    rows = Dataset.from_list([{"prompt": text}] * 4)
    trainer = group_trainer("grpo", start_model, tmp_path / "run", rows, eval_dataset=rows, eval_strategy="steps")
    expected = tokenizer(text).input_ids
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") in expected
    assert {tuple(prompt.ids) for prompt in (*trainer.train_prompts, *trainer.evaluation_prompts)} == {tuple(expected)}


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_ids_of_every_format_are_used(ppo_parts, kind):
    rows = Dataset.from_list([{"input_ids": [5, 6, 7]}] * 4).with_format(kind)
    trainer = ours.PPOTrainer(**{**ppo_parts("run"), "train_dataset": rows})
    assert {tuple(prompt.ids) for prompt in trainer.train_prompts} == {(5, 6, 7)}


def test_chats_get_the_template(start_model, tmp_path):
    chat = [{"role": "user", "content": "the cat"}]
    trainer = group_trainer("grpo", start_model, tmp_path / "run", [{"prompt": chat}] * 4)
    tokenizer = AutoTokenizer.from_pretrained(start_model)
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert list(trainer.train_prompts[0].ids) == list(expected)


def test_an_object_is_stored_and_found_again(start_model, tmp_path):
    """Models that are objects have a folder by the hash of their tensors, so that an equal one resumes the run."""
    model = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(start_model)
    args = group_args("grpo", tmp_path / "run", num_generations=2, max_steps=1)
    parts = {"reward_funcs": by_length, "train_dataset": Dataset.from_list(ROWS), "processing_class": tokenizer}
    one = ours.GRPOTrainer(copy.deepcopy(model), args=args, **parts)
    one.train()
    folder = one.trainer.config.model.actor_model
    assert folder.startswith(str(tmp_path / "run_start_model_"))
    assert one.trainer.reference is not None
    other = ours.GRPOTrainer(model, args=group_args("grpo", tmp_path / "run", num_generations=2, max_steps=1), **parts)
    assert other.trainer.config.model.actor_model == folder
    with torch.no_grad():
        next(model.parameters()).add_(1)
    changed = ours.GRPOTrainer(model, args=group_args("grpo", tmp_path / "run", num_generations=2), **parts)
    assert changed.trainer.config.model.actor_model != folder


def test_another_end_of_completions_is_another_start_model(start_model, tmp_path):
    """The hash has all that a run reads: also the tokens that end a completion."""
    model = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32)
    folders = set()
    for change in (
        lambda tokenizer: None,
        lambda tokenizer: setattr(tokenizer, "eos_token", "<|endoftext|>"),
        lambda tokenizer: setattr(model.generation_config, "eos_token_id", [0, 7]),
    ):
        tokenizer = AutoTokenizer.from_pretrained(start_model)
        change(tokenizer)
        folders.add(stored_start_model(model, tokenizer, "", tmp_path / "run"))
    assert len(folders) == 3


def test_the_ends_of_an_objects_completions_are_in_its_generation_config(start_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(start_model)
    ends = [model.generation_config.eos_token_id, 0]
    model.generation_config.eos_token_id = ends
    trainer = group_trainer("grpo", start_model, tmp_path / "run", model=model)
    assert eos_ids(trainer.processing_class) == ends


def test_a_generation_config_that_cannot_be_saved_is_refused(start_model, tmp_path, user_error):
    model = AutoModelForCausalLM.from_pretrained(start_model)
    tokenizer = AutoTokenizer.from_pretrained(start_model)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    tokenizer.chat_template = "{{ messages[0].content }}"  # another one, with which a model is stored
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 0.6}')
    model.generation_config.temperature = 0.6
    for start in (model, str(tmp_path / "model")):
        with user_error("model.generation_config", "temperature"):
            stored_start_model(start, tokenizer, "", tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_reward_models_are_on_the_device_of_the_run(start_model, reward_folder, monkeypatch):
    """Only the CPU is here: the model is moved to the device that is selected."""
    model = AutoModelForSequenceClassification.from_pretrained(reward_folder, dtype=torch.float32)
    moved = []
    monkeypatch.setattr(model, "to", lambda device: moved.append(device) or model)
    monkeypatch.setattr(ours, "selected_device", lambda: "the device")
    ours.reward_models(model, load_tokenizer(str(reward_folder)))[0](prompts=["a"], completions=["b"])
    ours.IdsReward(model, 0)(prompt_ids=[[5]], completion_ids=[[6]])
    assert moved == ["the device"] * 2


def test_tokenizers_of_rewards_have_the_length_of_the_rewards(reward_folder, user_error):
    tokenizer = load_tokenizer(str(reward_folder))
    with user_error("reward_processing_classes"):
        ours.reward_models([str(reward_folder), by_length], tokenizer)


def test_a_model_as_a_reward_scores_as_trl(start_model, reward_folder, tmp_path):
    """A reward model by name scores prompt and completion as TRL's GRPOTrainer does."""
    function = ours.reward_models(str(reward_folder), None)[0]
    stock = trl.GRPOTrainer(
        str(start_model), str(reward_folder), group_args("grpo", tmp_path, num_generations=2), Dataset.from_list(ROWS),
        processing_class=load_tokenizer(str(start_model)),
    )  # fmt: skip
    prompts = [row["prompt"] for row in ROWS]
    completions = [" a table", " Paris", " step by step", " 3"]
    inputs = [{"prompt": prompt} for prompt in prompts]
    expected = stock._calculate_rewards(inputs, prompts, completions, [[1]] * 4)
    assert function(prompts=prompts, completions=completions) == pytest.approx(expected[:, 0].tolist(), abs=1e-5)


def test_frozen_weights_are_refused_without_an_adapter(start_model, tmp_path, user_error):
    """TRL trains the others only, the loop here all of them."""
    model = AutoModelForCausalLM.from_pretrained(start_model)
    next(model.parameters()).requires_grad_(False)
    with user_error("model", "requires_grad_", "peft_config"):
        config_of("grpo", start_model, tmp_path, model=model)
    config_of("grpo", start_model, tmp_path, model=model, peft_config=LoraConfig())


def test_dropout_that_trl_would_use_is_refused(start_model, tmp_path, user_error):
    model = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.float32)
    model.config.attention_dropout = 0.1
    with user_error("disable_dropout", "attention_dropout"):
        config_of("grpo", start_model, tmp_path, model=model)
    config_of("grpo", start_model, tmp_path, model=model, disable_dropout=True)


def test_the_auxiliary_loss_of_experts_is_refused(start_model, tmp_path, user_error):
    """TRL's default adds it; other models have none."""
    model = MixtralForCausalLM(MixtralConfig(**TINY))
    tokenizer = AutoTokenizer.from_pretrained(start_model)
    parts = {"reward_funcs": by_length, "train_dataset": Dataset.from_list(ROWS), "processing_class": tokenizer}
    args = group_args("rloo", tmp_path / "run", num_generations=2)
    with user_error("router_aux_loss_coef", "0"):
        ours.RLOOTrainer(model, args=args, **parts)
    args.router_aux_loss_coef = 0.0
    assert ours.RLOOTrainer(model, args=args, **parts).config.batch.K == 2


def test_save_and_upload(start_model, tmp_path, monkeypatch, user_error):
    trainer = group_trainer("grpo", start_model, tmp_path / "run", max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "copy"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    assert torch.equal(weights_of(saved), weights_of(trainer.host.model))
    with user_error("hub_model_id"):
        trainer.push_to_hub()
    sent = []
    monkeypatch.setattr("rlhf.run.export.push_files", lambda name, files, *_: sent.append((name, files)) or "url")
    trainer.args.hub_model_id = "owner/name"
    trainer.push_to_hub(dataset_name="name")  # as TRL's scripts
    with user_error("revision"):
        trainer.push_to_hub(revision="other")
    assert len(sent) == 1
    assert sent[0][0] == "owner/name"
    assert "model.safetensors" in sent[0][1]


def test_what_trls_scripts_read_after_training(start_model, tmp_path, user_error):
    trainer = group_trainer("grpo", start_model, tmp_path / "run", max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    assert "score" in " ".join(trainer.state.log_history[-1])
    assert torch.equal(weights_of(trainer.model), weights_of(trainer.host.model))
    assert trainer.accelerator.is_main_process
    with user_error("callbacks"):
        ours.GRPOTrainer(
            str(start_model), by_length, group_args("grpo", tmp_path / "other"), Dataset.from_list(ROWS * 4),
            callbacks=print,
        ).train()  # fmt: skip


def test_generate_and_step(start_model, tmp_path):
    trainer = group_trainer("grpo", start_model, tmp_path / "run")
    trainer.begin()
    episodes = trainer.generate([row["prompt"] for row in ROWS])
    assert len(episodes) == 8
    metrics = trainer.step(episodes, scores=[float(len(e.ids)) for e in episodes])
    assert "policy/loss" in metrics
    assert trainer.update == 1


def test_the_critic_of_a_value_model_serves_another_run(ppo_parts, build, start_model, tmp_path):
    """A head without a bias is saved as such, and `--critic RUN` loads it."""
    adapter = ours.PPOTrainer(**ppo_parts("run", total_episodes=4))
    adapter.train()
    head = adapter.trainer.actor.value_head.summary
    other = build("--critic", tmp_path / "run").actor.value_head.summary
    assert other.bias is None
    assert torch.equal(other.weight, head.weight)
    file = tmp_path / "run" / "value_head.safetensors"
    save_file({"summary.weight": head.weight.detach()}, file)  # not marked: the bias may be lost
    with pytest.raises(UserError, match="summary.bias"):
        build("--critic", tmp_path / "run")


def test_ids_that_the_tokenizer_does_not_have_are_refused(ppo_parts, user_error):
    parts = ppo_parts("run")
    parts["processing_class"].decode = lambda ids: "a"
    rows = Dataset.from_list([{"input_ids": [1, 100_000]}] * 4)
    with user_error("100000", "prompt_token_ids", "prompt 1"):
        assert ours.PPOTrainer(**{**parts, "train_dataset": rows}).trainer


def test_a_tokenizer_without_padding_is_refused(ppo_parts, user_error):
    parts = ppo_parts("run")
    parts["processing_class"].pad_token = None
    with user_error("processing_class", "pad_token"):
        ours.PPOTrainer(**parts)


def test_a_name_with_its_own_tokenizer_is_not_copied(start_model, tmp_path):
    """TRL's usual call. A tokenizer with another chat template is another one."""
    tokenizer = AutoTokenizer.from_pretrained(start_model)
    parts = {"reward_funcs": by_length, "train_dataset": Dataset.from_list(ROWS), "processing_class": tokenizer}
    name = str(start_model)
    one = ours.GRPOTrainer(name, args=group_args("grpo", tmp_path / "run", num_generations=2), **parts)
    assert one.trainer.config.model.actor_model == name
    tokenizer.chat_template = "{{ messages[0].content }}"
    other = ours.GRPOTrainer(name, args=group_args("grpo", tmp_path / "other", num_generations=2), **parts)
    assert "other_start_model_" in other.trainer.config.model.actor_model


# --- make_trainer ----------------------------------------------------------------------------------------------------


def test_make_trainer_takes_objects_without_a_folder(start_model):
    model = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.bfloat16)
    config = make_config(num_iterations=1, batch_size=2, max_new_tokens=4, bf16=False)
    trainer = make_trainer(
        config,
        ["the cat", "numbers"],
        by_length,
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(start_model),
        evaluation_prompts=[],
    )
    assert {weight.dtype for weight in trainer.actor.policy.parameters()} == {torch.float32}
    assert torch.equal(weights_of(trainer.actor.policy).bfloat16(), weights_of(model))
    assert trainer.train()["policy/loss"] is not None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"model": 3}, ["model="]),
        ({"model": "no/such"}, ["no/such"]),
        ({"tokenizer": "x"}, ["tokenizer="]),
        ({"model": "adapter"}, ["model=", "merge_and_unload"]),
    ],
)
def test_what_is_no_model_is_refused(start_model, user_error, given, named):
    if given.get("model") == "adapter":
        base = AutoModelForCausalLM.from_pretrained(start_model)
        given = {"model": get_peft_model(base, LoraConfig(task_type="CAUSAL_LM"))}
    config = make_config(num_iterations=1, actor_model=str(start_model))
    with user_error(*named):
        make_trainer(config, ["a"], by_length, **given)


def test_a_prompt_that_occurs_twice_trains_twice_only_with_repeats(start_model):
    config = make_config(num_iterations=1, actor_model=str(start_model), batch_size=1)
    for repeats, count in ((False, 1), (True, 3)):
        trainer = make_trainer(config, ["a cat"] * 3, by_length, evaluation_prompts=[], repeats=repeats)
        assert len(trainer.train_prompts) == count
