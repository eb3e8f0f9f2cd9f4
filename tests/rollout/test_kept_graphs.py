"""Tests of CUDA graphs that are kept between rollouts, without a GPU.

`Tape` takes the place of a CUDA graph. A capture records the operators of a step and changes nothing; a replay runs
them again on the same tensors, with the same Python numbers. So a tensor that moves, or a number that changes after
the capture, gives other tokens than sampling without graphs.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoModelForCausalLM

from rlhf.data.prompts import ids_alone
from rlhf.rollout import engine
from rlhf.rollout.engine import KeptBatcher, sample_completions
from rlhf.rollout.sampling import BadLogits
from rlhf.settings.training import SamplingSettings
from tests.models.test_llama import CONFIGS
from tests.models.test_packing import CONFIGS as LLAMA
from tests.models.test_packing import make_model
from tests.rollout.test_engine import CPU, EOS

LENGTH = 24


class Tape:
    """The operators of a captured step."""

    def __init__(self):
        self.operators = []
        self.replays = 0

    def pool(self):
        return None

    def replay(self):
        self.replays += 1
        fresh = {}
        for operator, given, result in self.operators:
            arguments, named = tree_map(lambda x, fresh=fresh: fresh.get(id(x), x), given)
            again = operator(*arguments, **named)
            fresh |= {id(old): new for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True)}


class Capture(TorchDispatchMode):
    """Records operators, and restores what they wrote at the end."""

    def __init__(self, tape, pool):
        super().__init__()
        self.tape = tape
        self.before = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        named = kwargs or {}
        schema = operator._schema.arguments
        for argument, value in zip(schema, args, strict=False):
            self._remember(argument, value)
        for argument in schema:
            self._remember(argument, named.get(argument.name))
        result = operator(*args, **named)
        self.tape.operators.append((operator, (args, named), result))
        return result

    def _remember(self, argument, value):
        if argument.alias_info is not None and argument.alias_info.is_write and value is not None:
            storage = value.untyped_storage()
            self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))

    def __exit__(self, *error):
        super().__exit__(*error)
        for storage, values in self.before.values():
            storage.copy_(values)


@pytest.fixture(autouse=True)
def tapes(monkeypatch):
    """Return the tapes that are captured."""
    made = []
    monkeypatch.setattr(engine, "check_engine", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made.append(Tape()) or made[-1])
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    return made


def prompts(count, longest=9):
    draw = torch.Generator().manual_seed(count)
    return [ids_alone(torch.randint(3, 60, (n % longest + 1,), generator=draw).tolist()) for n in range(count)]


def rows(model, batch, kept, seed, name="graph", length=LENGTH, temperature=1.0, **limits):
    noise = torch.rand(len(batch), length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    sampling = SamplingSettings(length, temperature, **limits)
    found = sample_completions(
        model, batch, noise, sampling, eos=EOS, pad=0, device=CPU, engine=name, slots=32, kept=kept
    )
    return found


def change(model, number):
    """Changes the weights as an optimizer step does: in place."""
    draw = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=draw, dtype=weight.dtype), alpha=0.05)


ROLLOUTS = [
    {"batch": prompts(40)},  # more prompts than slots
    {"batch": prompts(7, 3), "temperature": 0.7, "length": 12},  # an evaluation, with other sampling settings
    {"batch": prompts(20, 4)},  # fewer and shorter ones
    {"batch": prompts(7, 3), "top_k": 20, "top_p": 0.8},
]


def adapted(model, **more):
    """Return the model with LoRA on some layers, as after some optimizer steps."""
    lora = LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"], **more)
    found = get_peft_model(model, lora).eval().to(model.dtype)
    change(found, 9)
    return found


@pytest.mark.parametrize(
    ("name", "lora"),
    [("llama", True), ("qwen2 with a window", False), pytest.param("qwen3", False, marks=pytest.mark.ci)],
)
def test_a_graph_is_captured_once_and_samples_with_the_present_weights(name, lora, tapes):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).double().eval()
    model = adapted(model) if lora else model
    kept = KeptBatcher(9 + LENGTH)
    expected = KeptBatcher()
    for number in range(2):
        for place, how in enumerate(ROLLOUTS):
            found = rows(model, kept=kept, seed=number, **how)
            plain = rows(model, kept=expected, seed=number, name="slots", **how)
            assert found.rows() == plain.rows(), (number, place)
            change(model, number)
    kinds = Counter(key[:2] for key in kept.batcher.captured)  # (slots, columns attended to)
    assert len(tapes) == len(kept.batcher.captured) and expected.batcher is None
    assert {slots for slots, _ in kinds} == {8, 16, 32} and len(kinds) >= 4
    assert sum(tape.replays for tape in tapes) > 5 * len(tapes)


def equal_share(model, name, **how):
    """Return the share of completions in bfloat16 that are those of `slots`, for mixed lengths with EOS and top-p."""
    batch = prompts(48)
    found = {}
    for engine_name in ("slots", name):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            kept = KeptBatcher()
            rows(model, batch, kept, 0, engine_name, **how)  # captures
            found[engine_name] = rows(model, batch, kept, 1, engine_name, **how).rows()
    assert len({len(row) for row in found["slots"]}) > 5
    return sum(a == b for a, b in zip(found["slots"], found[name], strict=True)) / len(batch)


@pytest.mark.parametrize("name", ["graph", "plain"])
@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "lora"])
def test_engines_in_bfloat16_sample_almost_the_same(name, lora):
    """Rounding changes a token whose cumulative probability is at its random number: about one in a few hundred."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    model = adapted(model, use_rslora=True) if lora else model
    model.get_output_embeddings().weight.data.mul_(8)
    assert equal_share(model, name, top_p=0.9) > 0.6


def test_nothing_is_kept_after_bad_logits():
    """A cache with NaN would change the completions of later rollouts."""
    model = make_model(next(iter(LLAMA)), seed=3)
    kept = KeptBatcher()
    rows(model, prompts(9), kept, 0)
    assert kept.batcher is not None
    with torch.no_grad():
        model.get_output_embeddings().weight[7] = torch.nan
    with pytest.raises(BadLogits):
        rows(model, prompts(9), kept, 0)
    model = make_model(next(iter(LLAMA)), seed=3)
    assert rows(model, prompts(9), kept, 0).rows() == rows(model, prompts(9), None, 0, "slots").rows()


def test_what_is_kept_is_limited(monkeypatch):
    model = make_model(next(iter(LLAMA)), seed=3)
    kept = KeptBatcher()
    rows(model, prompts(9), kept, 0)
    size = kept.batcher.size
    monkeypatch.setattr(engine, "installed", lambda _: size / engine.KEPT_SHARE - 1)
    kept.hold()
    rows(model, prompts(9), kept, 0)
    assert kept.batcher is None and kept.decoder is None


def test_more_completions_need_new_tensors_and_captures_once(tapes):
    model = make_model(next(iter(LLAMA)), seed=3)
    kept = KeptBatcher()
    found = []
    for count in (9, 30, 9, 30):
        assert rows(model, prompts(count), kept, 0).rows() == rows(model, prompts(count), None, 0, "slots").rows()
        found.append((kept.slots, len(tapes)))
    assert [slots for slots, _ in found] == [16, 32, 32, 32] and found[2][1] == found[3][1]
