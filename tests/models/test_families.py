"""Tests model families of a workstation with every rollout engine that a run of them may use, and the table of
docs/performance.md."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    SmolLM3Config,
)

import evaluate_generations
import train_ppo
from rlhf.models import llama
from rlhf.models.load import load_policy
from rlhf.models.logprobs import backbone_of
from rlhf.rollout import continuous_batching, engine
from rlhf.rollout.choice import check_engine, choose_engine
from rlhf.rollout.completions import Completions
from rlhf.rollout.engine import sample_completions
from rlhf.rollout.sampling import sample_tokens, uniform_noise
from rlhf.setup.shape import is_packable
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.errors import UserError
from tests.kills import differing
from tests.models.test_architectures import transformers_logprobs
from tests.shapes import GROUPED, WIDTHS, WINDOW, make_family, qwen3_tokenizer

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
GPU = torch.device("cuda")
ENGINES = ("plain", "slots", "graph")  # vLLM has log-probs of its own, for which the loss is corrected
PAD = 9
HEADS = {"num_key_value_heads": 2}
HYBRID = {**GROUPED, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
          "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}  # fmt: skip
MIXED = {**GROUPED, "sliding_window": WINDOW, "query_pre_attn_scalar": 24,
         "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip


@dataclass(frozen=True)
class Family:
    kind: type[PretrainedConfig]
    settings: dict[str, Any]
    more: tuple[str, ...] = field(default=())  # other values of model_type: the same layers with image layers beside

    @property
    def types(self) -> str:
        return ", ".join(f"`{one}`" for one in (self.kind.model_type, *self.more))


FAMILIES = {
    "Llama, SmolLM2": Family(LlamaConfig, GROUPED),
    "Qwen2.5": Family(Qwen2Config, HEADS),
    "Qwen3": Family(Qwen3Config, GROUPED),
    "Qwen3.5": Family(Qwen3_5TextConfig, HYBRID, ("qwen3_5",)),
    "Gemma 3": Family(Gemma3TextConfig, MIXED, ("gemma3",)),
    "SmolLM3": Family(SmolLM3Config, {**HEADS, "no_rope_layers": [1, 0]}),
    "Phi-3": Family(Phi3Config, {**HEADS, "sliding_window": WINDOW, "pad_token_id": 0}),
}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Return a function that makes a family's start model, once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            family = FAMILIES[name]
            made[name] = tmp_path_factory.mktemp("start") / "model"
            make_family(made[name], qwen3_tokenizer(), family.kind, **family.settings)
        return made[name]

    return folder


@pytest.fixture(scope="module")
def flags(start, tmp_path_factory):
    """Return a function that makes the flags of a run of two updates. Prompts have different lengths."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = ({"prompt": f"What is {i}?" + " Step by step." * (i % 3)} for i in range(40))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(model: Path, output: Path, *more: object) -> list[str]:
        words = ["--actor-model", model, "--prompts", file, "--rm-model", "none", "--reward-func", "length_penalty",
                 "--num-iterations", 2, "--save-every", 1, "--batch-size", 4, "--minibatches", 2, "--ppo-epochs", 1,
                 "--max-new-tokens", 10, "--eval-prompts", 3, "--learning-rate", "1e-2", "--output", output,
                 *more]  # fmt: skip
        return [str(word) for word in words]

    return make


def trained(words: list[str], output: Path, killed: Path) -> OnPolicyLoop:
    """Run a training, and copy its folder before the last update to `killed`."""
    seen = []
    update = OnPolicyLoop.update_step

    def update_step(trainer, number):
        seen.append(trainer)
        if number == trainer.updates:
            shutil.copytree(output, killed)
        return update(trainer, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnPolicyLoop, "update_step", update_step)
        train_ppo.main(words)
    assert len(seen) == 2
    return seen[-1]


@torch.no_grad()
def sampled(trainer: OnPolicyLoop, engine_name: str) -> tuple[Completions, list[list[float]]]:
    """Return completions of the trained policy, and the log-prob of each of their tokens in the engine's own logits.

    Fewer slots than prompts, two equal prompts, and completions of different lengths. A random number names its token.
    The padding is an ordinary token: the pad token's embedding is 0, and would not change a recurrent state.
    """
    prompts = [trainer.train_prompts[n] for n in (0, 1, 2, 2, 3, 4, 5)]
    noise = uniform_noise(1, 2, "a test", range(7), 12)
    found: dict[float, float] = {}

    def recorded(logits, uniform, sampling):
        tokens, allowed = sample_tokens(logits, uniform, sampling)
        logprobs = logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
        found.update(zip(uniform.tolist(), logprobs.tolist(), strict=True))
        return tokens, allowed

    policy = trainer.actor.policy.eval()
    device = trainer.host.accelerator.device

    def run(eos: int) -> Completions:
        return sample_completions(
            policy,
            prompts,
            noise,
            trainer.config.sampling,
            eos=eos,
            pad=PAD,
            device=device,
            engine=engine_name,
            slots=4,
        )

    eos = run(-1).rows()[0][3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "sample_tokens", recorded)
        patch.setattr(continuous_batching, "sample_tokens", recorded)
        completions = run(eos)
    rows = completions.rows()
    assert len(set(map(len, rows))) > 1 and len(set(completions.prompt_lengths)) > 2
    numbers = [noise[row, : len(ids)].tolist() for row, ids in enumerate(rows)]
    return completions, [[found[number] for number in row] for row in numbers]


FIRST = {("Qwen3.5", "plain"), ("SmolLM3", "slots")}  # in the first tier
CASES = [
    pytest.param(name, one, marks=[] if (name, one) in FIRST else [pytest.mark.ci], id=f"{name}, {one}")
    for name in FAMILIES
    for one in ENGINES
]


@pytest.mark.parametrize(("name", "one"), CASES)
def test_two_updates_with_each_engine(name, one, start, flags, tmp_path):
    """The engine's log-probs are those of the training's forward pass, and those of each episode alone in the saved
    model with plain transformers. A killed run ends with the same weights. An engine that the CPU or the family does
    not have is refused in one line."""
    words = flags(start(name), tmp_path / "run", "--rollout-engine", one)
    try:
        check_engine(one, is_packable(str(start(name))), "", CPU)
    except UserError:
        with pytest.raises(UserError) as refused:
            train_ppo.main(words)
        assert len(refused.value.problems) == 1 and f"--rollout-engine {one}" in refused.value.report()
        return
    trainer = trained(words, tmp_path / "run", tmp_path / "killed")
    completions, by_engine = sampled(trainer, one)
    by_trainer, _, _ = trainer.passes.logprobs(completions)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run", dtype=torch.float32).eval()
    temperature = trainer.config.sampling.temperature
    for row, ids in enumerate(completions.rows()):
        prompt = completions.prompt_ids[row][completions.prompt_mask[row]].tolist()
        alone = transformers_logprobs(model, prompt, ids, temperature)
        assert_close(torch.tensor(by_engine[row]), alone, rtol=0, atol=1e-4)
        assert_close(by_trainer[row, : len(ids)].cpu(), alone, rtol=0, atol=1e-4)
    train_ppo.main(["--resume", "--output", str(tmp_path / "killed")])
    assert differing(tmp_path / "run", tmp_path / "killed") == []


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


def test_phi_3_with_long_rotary_factors_stays_below_the_length_at_which_they_act(flags, tmp_path, user_error):
    """Above it, a forward pass has other rotary factors for all its tokens: the log-probs of a short episode would
    depend on a long one beside it, and those of a sampler on the tokens that follow."""
    more = {**FAMILIES["Phi-3"].settings, "rope_parameters": LONGROPE, "original_max_position_embeddings": 64}
    model = make_family(tmp_path / "start", qwen3_tokenizer(), Phi3Config, **more)
    with user_error("--max-new-tokens", "64"):
        train_ppo.main(flags(model, tmp_path / "run", "--max-new-tokens", 60))
    assert load_policy(str(model), device=CPU, vocabulary=10).config.max_position_embeddings == 256
    train_ppo.main(flags(model, tmp_path / "run"))
    with user_error("--max-new-tokens 64"):
        evaluate_generations.main(["--chat", "--model-path", str(tmp_path / "run"), "--max-new-tokens", "64"])


# --- models with image layers ----------------------------------------------------------------------------------------

VISION = {"hidden_size": 32, "intermediate_size": 32}
WITH_IMAGES = {
    "Qwen3.5": (
        Qwen3_5ForConditionalGeneration,
        Qwen3_5Config,
        {**VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16, "patch_size": 2},
        {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8},
    ),
    "Gemma 3": (
        Gemma3ForConditionalGeneration,
        Gemma3Config,
        {**VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 2},
        {"image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7, "mm_tokens_per_image": 4},
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", WITH_IMAGES)
def test_checkpoints_with_image_layers_train_their_language_model(name, flags, tmp_path):
    """As the larger Gemma 3 and all Qwen3.5 are published."""
    kind, config, vision, ids = WITH_IMAGES[name]
    tokenizer = qwen3_tokenizer()
    text = {**WIDTHS, **FAMILIES[name].settings, "vocab_size": len(tokenizer) + 5, "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}  # fmt: skip
    torch.manual_seed(0)
    kind(config(text_config=text, vision_config=vision, **ids)).save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    trainer = trained(flags(tmp_path / "start", tmp_path / "run"), tmp_path / "run", tmp_path / "killed")
    packs = is_packable(str(tmp_path / "start"))
    assert trainer.passes.packed == packs == is_packable(str(tmp_path / "run"))
    completions, by_engine = sampled(trainer, choose_engine("auto", packs, CPU))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run", dtype=torch.float32).eval()
    for row, tokens in enumerate(completions.rows()):
        prompt = completions.prompt_ids[row][completions.prompt_mask[row]].tolist()
        alone = transformers_logprobs(model, prompt, tokens, trainer.config.sampling.temperature)
        assert_close(torch.tensor(by_engine[row]), alone, rtol=0, atol=1e-4)
    train_ppo.main(["--resume", "--output", str(tmp_path / "killed")])
    assert differing(tmp_path / "run", tmp_path / "killed") == []


# --- the table in docs -----------------------------------------------------------------------------------------------


def row_of(name: str, folder: Path) -> str:
    """Return the row of a family as the code decides it, after its weights are loaded."""
    packs = is_packable(str(folder))
    policy = load_policy(str(folder), device=CPU, vocabulary=10)
    own = llama.supports(backbone_of(policy))
    refused = []
    for one in ENGINES:
        try:
            check_engine(one, packs, name, GPU)
        except UserError:
            refused.append(f"`{one}`")
    layers = f"{'packed' if packs else 'padded'}, layers of {'this project' if own else 'transformers'}"
    engines = [f"`{choose_engine('auto', packs, device)}`" for device in (CPU, GPU)]
    cells = (name, FAMILIES[name].types, layers, *engines, ", ".join(refused) or "-")
    return f"| {' | '.join(cells)} |"


def test_the_table_is_what_the_code_decides(start):
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    section = page.split("## Model families\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert rows == [row_of(name, start(name)) for name in FAMILIES]
