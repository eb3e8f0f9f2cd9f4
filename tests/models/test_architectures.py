"""Tests every supported model family with every training method and algorithm: training, saving, loading with plain
transformers, resuming, and the errors that would otherwise go unnoticed."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch.testing import assert_close
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen3Config,
)

import train_grpo
import train_ppo
from rlhf.algorithms.table import ALGORITHMS
from rlhf.data.chat_template import encode_prompt
from rlhf.data.tokenizer import load_tokenizer
from rlhf.rollout.completions import Completions
from rlhf.rollout.engine import default_engine, sample_completions
from rlhf.rollout.sampling import uniform_noise
from rlhf.setup.fit import estimator_of
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.trainer.optimize import PolicyOptimizer
from rlhf.utils.errors import UserError
from tests import shapes
from tests.kills import differing
from tests.shapes import CAPS, GROUPED, WINDOW, make_family

CPU = torch.device("cpu")
SCRIPTS = {"ppo": train_ppo, "grpo": train_grpo}
METHODS = {"full": [], "LoRA": ["--use-lora"], "4-bit LoRA": ["--use-lora", "--load-in-4bit"]}


@dataclass(frozen=True)
class Family:
    """A model family: its configuration, its tokenizer and their expected properties."""

    features: str
    kind: type
    tokenizer: Any
    bos: bool  # True if every prompt starts with BOS
    pad: str  # the pad token that a run uses
    eos: str  # the token that ends a completion
    settings: dict[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    # settings that change the logits at this model size, each with a value that disables or replaces it
    matters: dict[str, Any] = field(default_factory=dict)

    def make(self, folder: Path) -> Path:
        return make_family(folder, self.tokenizer(), self.kind, **self.settings)


FAMILIES = {
    "llama": Family(
        "SmolLM2: tied embeddings; chat template adds a system turn; pad is EOS, <|endoftext|> is unused",
        LlamaConfig,
        shapes.smollm2_tokenizer,
        bos=True,  # its BOS is <|im_start|>, which starts every turn
        pad="<|endoftext|>",
        eos="<|im_end|>",
        settings={**GROUPED, "tie_word_embeddings": True},
    ),
    "qwen3": Family(
        "query and key norms; heads wider than the model; no BOS; separate pad token; chat template; untied",
        Qwen3Config,
        shapes.qwen3_tokenizer,
        bos=False,
        pad="<|endoftext|>",
        eos="<|im_end|>",
        settings={**GROUPED, "tie_word_embeddings": False},
    ),
    "mistral": Family(
        "sliding window in every layer; BOS in the chat template; tokenizer adds a leading space; no pad; untied",
        MistralConfig,
        shapes.mistral_tokenizer,
        bos=True,
        pad="<unk>",
        eos="</s>",
        settings={**GROUPED, "sliding_window": WINDOW, "tie_word_embeddings": False},
        matters={"sliding_window": None},
    ),
    "gemma2": Family(
        "soft caps on attention scores and logits; sliding window in every other layer; scaled, tied embeddings; "
        "separate query scale; BOS in the chat template, which has no system turn; turns end with <end_of_turn>",
        Gemma2Config,
        shapes.gemma_tokenizer,
        bos=True,
        pad="<pad>",
        eos="<end_of_turn>",
        settings={**GROUPED, **CAPS, "sliding_window": WINDOW, "query_pre_attn_scalar": 24,
                  "ends": ("<eos>", "<end_of_turn>")},
        matters={"sliding_window": 4096, "attn_logit_softcapping": None, "final_logit_softcapping": None,
                 "query_pre_attn_scalar": 256},
    ),
    "gemma3": Family(
        "sliding window and separate rotary embeddings in some layers; query and key norms; scaled, tied embeddings; "
        "a base model: BOS before plain text, no chat template",
        Gemma3TextConfig,
        shapes.gemma_base_tokenizer,
        bos=True,
        pad="<pad>",
        eos="<eos>",
        settings={**GROUPED, "sliding_window": WINDOW, "query_pre_attn_scalar": 24,
                  "layer_types": ["sliding_attention", "full_attention"]},
        matters={"sliding_window": 4096, "query_pre_attn_scalar": 256},
    ),
    "gpt_neox": Family(
        "parallel attention and feed-forward blocks; biases; rotary embeddings on a quarter of each head; one "
        "query_key_value layer; the head is stored as embed_out; no BOS, no pad, no chat template; untied; dropout",
        GPTNeoXConfig,
        shapes.gpt_neox_tokenizer,
        bos=False,
        pad="<|padding|>",
        eos="<|endoftext|>",
        settings={"tie_word_embeddings": False, "attention_dropout": 0.2, "hidden_dropout": 0.2},
        targets=("query_key_value", "dense"),
        matters={"use_parallel_residual": False},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Return a function that maps a family's name to the folder of its start model."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = FAMILIES[name].make(tmp_path_factory.mktemp(name))
        return made[name]

    return folder


@pytest.fixture(scope="module")
def make_flags(start, reward_folder, pairs_file, tmp_path_factory):
    """Return a function that makes the flags of a run of three updates.

    The prompts have one user turn and no system text, so every family's chat template accepts them.
    """
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [json.loads(line) for line in pairs_file.read_text(encoding="utf-8").splitlines()]
    for number, row in enumerate(rows):
        del row["system"]
        row["question"] += " Step by step." * (number % 3)
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def flags(name: str, method: str = "full", algorithm: str = "ppo", *more: object) -> list[str]:
        size = [4] if ALGORITHMS[algorithm].group_size == 1 else [2, "--K", 2]
        targets = ["--lora-targets", *FAMILIES[name].targets] if method != "full" else []
        common = ["--actor-model", start(name), "--rm-model", reward_folder, "--prompts", prompts,
                  "--allow-weak-reward-model", "--num-iterations", 3, "--save-every", 2, "--batch-size", *size,
                  "--max-new-tokens", 10, "--prompt-length", 100, "--eval-prompts", 4, "--learning-rate", "1e-2",
                  "--minibatches", 2, "--ppo-epochs", 1]  # fmt: skip
        return [str(word) for word in (*common, *METHODS[method], *targets, *more)]

    return flags


@dataclass
class Run:
    """A finished run of a script and the values recorded during it."""

    family: Family
    method: str
    algorithm: str
    start: Path
    output: Path
    killed: Path  # a copy of its folder from the start of the last update
    trainer: OnPolicyLoop
    steps: list[dict[str, torch.Tensor]]  # statistics of the optimizer steps
    first_kl: torch.Tensor  # per-token KL of the first batch

    def plain(self) -> AutoModelForCausalLM:
        """Return the saved model, loaded with plain transformers and peft."""
        if self.method == "full":
            return AutoModelForCausalLM.from_pretrained(self.output, dtype=torch.float32).eval()
        return PeftModel.from_pretrained(self.plain_start(), self.output).eval()

    def plain_start(self) -> AutoModelForCausalLM:
        more = {}
        if self.method == "4-bit LoRA":
            more["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
            more["device_map"] = "cpu"  # transformers would load 4-bit weights to a GPU
        model = AutoModelForCausalLM.from_pretrained(self.start, dtype=torch.float32, **more).eval()
        for module in model.modules():
            # bitsandbytes would round the scales here (rlhf/models/load.py, _disable_repacking)
            module.support_avx512bf16_for_cpu = False
        return model

    def completions(self, engine: str) -> Completions:
        """Return completions of the trained policy for prompts of different lengths, two of them identical.

        The fourth token of the first completion is used as EOS, so that completions differ in length.
        """
        prompts = [self.trainer.train_prompts[n] for n in (0, 1, 2, 2, 3, 4, 5)]
        noise = uniform_noise(1, 2, "a test", range(7), 12)  # (seed, update, purpose, episodes, tokens)

        def sampled(engine: str, eos: int) -> Completions:
            policy = self.trainer.actor.policy.eval()
            sampling = self.trainer.config.sampling
            return sample_completions(
                policy, prompts, noise, sampling, eos=eos, pad=0, device=CPU, engine=engine, slots=4
            )

        found = sampled(engine, sampled("plain", -1).rows()[0][3])
        assert len(set(found.completion_lengths)) > 1 and len(set(found.prompt_lengths)) > 2
        return found


def train(flags: list[str], algorithm: str, output: Path, killed: Path) -> dict[str, Any]:
    """Runs a script to its end. Returns recorded values and copies its folder before the last update to `killed`."""
    seen: dict[str, Any] = {"steps": []}
    update = OnPolicyLoop.update_step
    advantages = OnPolicyLoop.advantages
    step = PolicyOptimizer.step

    def update_step(trainer, number):
        seen["trainer"] = trainer
        if number == trainer.updates:
            shutil.copytree(output, killed)
        return update(trainer, number)

    def advantages_of(trainer, rollout, scores):
        experience = advantages(trainer, rollout, scores)
        seen.setdefault("first_kl", experience.kl)
        return experience

    def step_of(optimizer, *given):
        seen["steps"].append(step(optimizer, *given))
        return seen["steps"][-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnPolicyLoop, "update_step", update_step)
        patch.setattr(OnPolicyLoop, "advantages", advantages_of)
        patch.setattr(PolicyOptimizer, "step", step_of)
        SCRIPTS[algorithm].main([*flags, "--output", str(output)])
    return seen


# the first test tier runs these
FIRST = {("llama", "4-bit LoRA", "ppo"), ("gemma2", "full", "grpo"), ("gpt_neox", "LoRA", "ppo")}


def tier_of(family: str, method: str, algorithm: str) -> list[pytest.MarkDecorator]:
    """.ci/run has every family with PPO and every method, and with GRPO and all weights: adapters and the algorithm do
    not depend on each other."""
    if (family, method, algorithm) in FIRST:
        return []
    return [pytest.mark.proof if algorithm == "grpo" and method != "full" else pytest.mark.ci]


COMBINATIONS = [
    pytest.param(one, marks=tier_of(*one), id=", ".join(one)) for one in itertools.product(FAMILIES, METHODS, SCRIPTS)
]


@pytest.fixture(scope="module", params=COMBINATIONS)
def run(request, make_flags, start, tmp_path_factory) -> Run:
    name, method, algorithm = request.param
    folder = tmp_path_factory.mktemp("run")
    output = folder / "run"
    killed = folder / "killed"
    seen = train(make_flags(name, method, algorithm), algorithm, output, killed)
    return Run(FAMILIES[name], method, algorithm, start(name), output, killed, **seen)


# --- every family, method and algorithm ------------------------------------------------------------------------------


def test_training_starts_at_the_start_model(run):
    """The first ratio is 1 and the first KL is 0. Later ratios differ from 1."""
    assert float(run.steps[0]["policy/ratio"]) == pytest.approx(1, abs=1e-6)
    assert float(run.first_kl.abs().max()) == 0
    assert all(abs(float(step["policy/ratio"]) - 1) > 1e-4 for step in run.steps[1::2]), (
        "each step must change the weights"
    )


def test_logprobs_match_plain_transformers(run, engine="slots"):
    """Packed log-probs from our head equal those of each row alone in the saved model, loaded with transformers."""
    model = run.plain()
    completions = run.completions(engine)
    ours, _, _ = run.trainer.passes.logprobs(completions)
    temperature = run.trainer.config.sampling.temperature
    for row, ids in enumerate(completions.rows()):
        prompt = completions.prompt_ids[row][completions.prompt_mask[row]].tolist()
        theirs = transformers_logprobs(model, prompt, ids, temperature)
        assert_close(ours[row, : len(ids)], theirs, rtol=0, atol=1e-4)


@torch.no_grad()
def transformers_logprobs(model, prompt: list[int], completion: list[int], temperature: float) -> torch.Tensor:
    """Return the log-probs of one completion, computed alone and with transformers only."""
    ids = torch.tensor([[*prompt, *completion]])
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1)


@torch.no_grad()
def test_saved_model_has_the_trained_models_logits(run):
    ids = torch.tensor([run.trainer.train_prompts[0].ids])
    models = (run.trainer.actor.policy, run.plain(), run.plain_start())
    trained, saved, start = (model(input_ids=ids).logits for model in models)
    assert_close(saved, trained, rtol=0, atol=1e-5)
    assert float((trained - start).abs().max()) > 1e-2, "training did not change the logits: the test proves nothing"
    tokenizer = AutoTokenizer.from_pretrained(run.output)
    assert (tokenizer.pad_token, tokenizer.eos_token) == (run.family.pad, run.family.eos)


def test_resumed_run_equals_the_uninterrupted_run(run):
    SCRIPTS[run.algorithm].main(["--resume", "--output", str(run.killed)])
    assert differing(run.output, run.killed) == []


def test_slots_engine_samples_the_same_completions_as_plain(run):
    assert run.completions("slots").rows() == run.completions("plain").rows()


def test_critic_learns_under_ppo(run):
    """PPO has one value per token. GRPO has no critic."""
    logprobs, _, values = run.trainer.passes.logprobs(run.completions("slots"))
    if run.algorithm == "grpo":
        assert values is None
        return
    assert values.shape == logprobs.shape and float(values.abs().max()) > 1e-3
    assert all(0 < float(step["value/loss"]) < 100 for step in run.steps)


def test_memory_can_be_predicted(run):
    predicted = estimator_of(run.trainer)(run.trainer.config)
    parts = [*predicted.held.values(), *(size for parts in predicted.phases.values() for size in parts.values())]
    assert all(size >= 0 for size in parts)
    assert predicted.held["policy"] > 0 and predicted.peak > predicted.held["policy"] + predicted.held["optimizer"]


# --- properties of a family ------------------------------------------------------------------------------------------


@pytest.fixture(
    params=[pytest.param(n, marks=[] if n in {f for f, _, _ in FIRST} else pytest.mark.ci) for n in FAMILIES]
)
def name(request) -> str:
    return request.param


@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("grpo", marks=pytest.mark.ci)])
def test_slow_paths_are_as_exact(name, algorithm, make_flags, start, tmp_path, monkeypatch):
    """Covers models whose attention cannot be replaced: padded rows, plain decoding, and the model's own attention, in
    which dropout would act."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[FAMILIES[name].kind]
    monkeypatch.setattr(kind, "_supports_attention_backend", False)
    output = tmp_path / "run"
    killed = tmp_path / "killed"
    seen = train(make_flags(name, "full", algorithm), algorithm, output, killed)
    run = Run(FAMILIES[name], "full", algorithm, start(name), output, killed, **seen)
    assert not run.trainer.passes.packed and default_engine(run.trainer.actor.policy, CPU) == "plain"
    test_training_starts_at_the_start_model(run)
    test_logprobs_match_plain_transformers(run, engine="plain")


@torch.no_grad()
def test_each_family_setting_changes_the_logits(name, start):
    """Changing any of these settings changes the logits, so the tests above can fail."""
    ids = torch.arange(10, 40).unsqueeze(0)
    folder = start(name)
    logits = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    for setting, value in FAMILIES[name].matters.items():
        without = AutoModelForCausalLM.from_pretrained(folder, **{setting: value})(ids).logits
        assert float((without - logits).abs().max()) > 1e-2, setting


def test_tokenizer_has_the_expected_pad_and_eos(name, start):
    family = FAMILIES[name]
    tokenizer = load_tokenizer(str(start(name)))
    assert (tokenizer.pad_token, tokenizer.eos_token) == (family.pad, family.eos)


def test_prompt_ids_are_those_of_the_chat_template(name, start):
    """The ids are those of the chat template or of the plain text, with one BOS if the tokenizer adds it."""
    tokenizer = load_tokenizer(str(start(name)))
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = encode_prompt(tokenizer, chat)
    if tokenizer.chat_template is not None:
        expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    else:
        expected = tokenizer(chat[0]["content"]).input_ids
    assert ids == expected
    starts_with_bos = ids[0] == tokenizer.bos_token_id and tokenizer.bos_token_id is not None
    assert starts_with_bos == FAMILIES[name].bos
    if tokenizer.bos_token != "<|im_start|>":  # <|im_start|> starts every turn
        assert ids.count(tokenizer.bos_token_id) == starts_with_bos


def test_prompt_text_cannot_create_special_tokens(name, start):
    tokenizer = load_tokenizer(str(start(name)))
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    texts = ["hello", "hello " + " ".join(special.values()) + " world"]
    clean, hostile = (encode_prompt(tokenizer, [{"role": "user", "content": text}]) for text in texts)
    assert [i for i in hostile if i in special] == [i for i in clean if i in special]


def test_lora_targets_missing_in_the_model_are_refused(name, make_flags):
    """The error lists the modules that exist."""
    wrong = "query_key_value" if FAMILIES[name].targets[0] != "query_key_value" else "q_proj"
    with pytest.raises(UserError) as raised:
        train_ppo.main([*make_flags(name, "LoRA"), "--lora-targets", wrong, "--output", "nowhere"])
    choices = str(raised.value).split("Choose from ")[1]
    assert f"no module named {wrong}: --lora-targets" in str(raised.value)
    assert {*FAMILIES[name].targets, "all-linear"} <= set(choices.replace(",", " ").split())


@pytest.mark.ci
def test_lora_on_all_linear_layers(name, make_flags, start, tmp_path):
    """`all-linear` adapts every linear layer except the head. Saving and resuming work as with named targets."""
    output = tmp_path / "run"
    killed = tmp_path / "killed"
    flags = [*make_flags(name, "LoRA"), "--lora-targets", "all-linear"]
    run = Run(FAMILIES[name], "LoRA", "ppo", start(name), output, killed, **train(flags, "ppo", output, killed))
    adapted = {n.split(".")[-1] for n, m in run.trainer.actor.policy.named_modules() if isinstance(m, LoraLayer)}
    linear = {n.split(".")[-1] for n, m in run.plain_start().named_modules() if isinstance(m, torch.nn.Linear)}
    assert adapted == linear - {"lm_head"} > set(FAMILIES[name].targets)
    test_logprobs_match_plain_transformers(run)
    test_resumed_run_equals_the_uninterrupted_run(run)
    test_memory_can_be_predicted(run)


# --- other families --------------------------------------------------------------------------------------------------

MIXED = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": WINDOW}
UNPACKED = {
    "attention with sinks": (GptOssConfig, EXPERTS),
    "a convolution over the sequence": (Lfm2Config, MIXED),
}


@pytest.mark.parametrize("case", UNPACKED)
def test_unpackable_models_use_padded_rows(case, make_flags, tmp_path):
    kind, settings = UNPACKED[case]
    folder = make_family(tmp_path / "start", shapes.smollm2_tokenizer(), kind, **{**GROUPED, **settings})
    output = tmp_path / "run"
    killed = tmp_path / "killed"
    seen = train([*make_flags("llama"), "--actor-model", str(folder)], "ppo", output, killed)
    run = Run(FAMILIES["llama"], "full", "ppo", folder, output, killed, **seen)
    assert not run.trainer.passes.packed
    test_training_starts_at_the_start_model(run)
    test_logprobs_match_plain_transformers(run, engine="plain")


def test_learned_positions_and_functional_dropout(make_flags, tmp_path):
    """OPT's position embeddings are learned, so absolute positions must be right (rotary embeddings encode only
    distances). Its dropout is a function call, so it does not appear among the modules."""
    more = {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.2, "attention_dropout": 0.2, "init_std": 0.15}
    folder = make_family(tmp_path / "start", shapes.smollm2_tokenizer(), OPTConfig, **more)
    output = tmp_path / "run"
    killed = tmp_path / "killed"
    seen = train([*make_flags("llama"), "--actor-model", str(folder)], "ppo", output, killed)
    run = Run(FAMILIES["llama"], "full", "ppo", folder, output, killed, **seen)
    test_training_starts_at_the_start_model(run)
    test_logprobs_match_plain_transformers(run)
    test_slots_engine_samples_the_same_completions_as_plain(run)


def test_models_that_change_logits_after_the_head_are_refused(make_flags, tmp_path, user_error):
    folder = make_family(tmp_path / "start", shapes.smollm2_tokenizer(), CohereConfig, num_key_value_heads=2)
    with user_error("CohereForCausalLM"):
        train_ppo.main([*make_flags("llama"), "--actor-model", str(folder), "--output", str(tmp_path / "run")])
