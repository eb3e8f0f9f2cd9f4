"""Tests of what ends a completion: stop strings at any token boundary, in every engine, and all EOS ids."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf.data.chat_template import decode_completion, encode_text
from rlhf.data.prompts import ids_alone
from rlhf.data.tokenizer import eos_ids, load_tokenizer
from rlhf.rollout.completions import Completions
from rlhf.rollout.continuous_batching import ContinuousBatcher
from rlhf.rollout.engine import sample_completions
from rlhf.rollout.sampling import uniform_noise
from rlhf.rollout.stopping import StoppingCriterion, stopping_criterion
from rlhf.settings.training import SamplingSettings
from rlhf.settings.types import StopText
from tests.rollout.test_engine import FakeVLLMGeneration
from tests.shapes import (
    gemma_tokenizer,
    gpt_neox_tokenizer,
    make_base_model,
    make_family,
    mistral_tokenizer,
    qwen3_tokenizer,
    smollm2_tokenizer,
)

CPU = torch.device("cpu")
FAMILIES = (smollm2_tokenizer, qwen3_tokenizer, gpt_neox_tokenizer, mistral_tokenizer, gemma_tokenizer)


def letters(tokenizer, text: str) -> list[int]:
    """Return one token per byte of a text, for a byte-level tokenizer."""
    return [i for letter in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
            for i in tokenizer.convert_tokens_to_ids(list(letter[0]))]  # fmt: skip


def cut(tokenizer, rows: list[list[int]], *stop: str) -> tuple[list[list[int]], list[bool], list[str]]:
    """Return ids, ended and texts of the completions of rows that are padded with EOS."""
    width = max(map(len, rows))
    eos = tokenizer.eos_token_id
    ids = torch.tensor([[*row, *[eos] * (width - len(row))] for row in rows])
    vocabulary = int(ids.max()) + 1
    prompts = [ids_alone([1])] * len(rows)
    criterion = stopping_criterion(tokenizer, stop)
    made = Completions.of(prompts, ids, eos=criterion, pad=0, vocabulary=vocabulary)
    return made.rows(), made.ended.tolist(), made.texts(tokenizer)


# --- where a completion ends ----------------------------------------------------------------------------------------


def test_completion_ends_with_the_token_that_completes_the_stop_string():
    """`ab` + newline + `Q:xy`, one token per letter: the stop string ends with the fifth token."""
    tokenizer = smollm2_tokenizer()
    row = letters(tokenizer, "ab\nQ:xy")
    assert len(row) == 7
    assert cut(tokenizer, [row], "\nQ:") == ([row[:5]], [True], ["ab"])


def test_stop_string_at_the_last_token_ends_the_completion():
    tokenizer = smollm2_tokenizer()
    row = letters(tokenizer, "ab\nQ:")
    assert cut(tokenizer, [row], "\nQ:") == ([row], [True], ["ab"])


def test_stop_string_without_its_last_letter_ends_nothing():
    tokenizer = smollm2_tokenizer()
    row = letters(tokenizer, "ab\nQ")
    assert cut(tokenizer, [row], "\nQ:") == ([row], [False], ["ab\nQ"])


def test_stop_string_inside_a_token_takes_the_whole_token():
    """` capital` is one token. Its text before the stop string belongs to the completion's text."""
    tokenizer = smollm2_tokenizer()
    (token,) = tokenizer.convert_tokens_to_ids(["Ġcapital"])
    first = letters(tokenizer, "a")[0]
    last = letters(tokenizer, "b")[0]
    assert cut(tokenizer, [[first, token, last]], "pit") == ([[first, token]], [True], ["a ca"])


def test_failed_beginning_of_a_stop_string_can_begin_it():
    """`aab` is in `aaab`, although the first three letters do not match."""
    tokenizer = smollm2_tokenizer()
    row = letters(tokenizer, "aaabc")
    assert cut(tokenizer, [row], "aab") == ([row[:4]], [True], ["a"])


def test_character_of_two_tokens_is_found():
    tokenizer = smollm2_tokenizer()
    row = letters(tokenizer, "xéy")
    assert len(row) == 4, "é has two bytes"
    assert cut(tokenizer, [row], "é") == ([row[:3]], [True], ["x"])


def test_the_first_of_several_stop_strings_counts():
    tokenizer = smollm2_tokenizer()
    row = letters(tokenizer, "one two three")
    assert cut(tokenizer, [row], "three", "two") == ([row[:7]], [True], ["one "])


def test_eos_before_the_stop_string_ends_the_completion():
    tokenizer = smollm2_tokenizer()
    row = [*letters(tokenizer, "ab"), tokenizer.eos_token_id, *letters(tokenizer, "Q:")]
    assert cut(tokenizer, [row], "Q:") == ([row[:3]], [True], ["ab"])


def test_special_token_inside_a_stop_string_adds_no_text():
    tokenizer = smollm2_tokenizer()
    row = [*letters(tokenizer, "aQ"), tokenizer.bos_token_id, *letters(tokenizer, ":b")]
    assert cut(tokenizer, [row], "Q:") == ([row[:4]], [True], ["a"])


def test_name_of_a_special_token_is_its_id():
    tokenizer = smollm2_tokenizer()
    row = [*letters(tokenizer, "ab"), tokenizer.convert_tokens_to_ids("<|endoftext|>"), *letters(tokenizer, "c")]
    assert cut(tokenizer, [row], "<|endoftext|>") == ([row[:3]], [True], ["ab"])


def test_stop_string_at_the_beginning_leaves_an_empty_text():
    tokenizer = smollm2_tokenizer()
    row = letters(tokenizer, "\nab")
    assert cut(tokenizer, [row], "\n") == ([row[:1]], [True], [""])


@pytest.mark.parametrize("make", FAMILIES)
def test_every_tokenizer_family_ends_at_the_first_prefix_with_the_stop_string(make):
    tokenizer = make()
    text = "the capital of France\n\nQuestion: is Paris on the Seine?"
    row = encode_text(tokenizer, text)
    first = next(n for n in range(len(row)) if "\n\nQuestion:" in tokenizer.decode(row[:n]))
    assert 0 < first < len(row)
    assert cut(tokenizer, [row], "\n\nQuestion:") == ([row[:first]], [True], ["the capital of France"])


def test_stop_text_is_one_line_and_is_read_twice_without_a_change():
    """A line break and a backslash with an n are the same; two backslashes are one."""
    written = [StopText.parse(text) for text in ("\n\nQ:", r"\n\nQ:", r"\\n", "a,b ")]
    assert written == [r"\n\nQ:", r"\n\nQ:", r"\\n", "a,b "]
    assert [StopText.parse(text) for text in written] == written
    assert [one.text for one in written] == ["\n\nQ:", "\n\nQ:", r"\n", "a,b "]


# --- engines ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy():
    config = LlamaConfig(vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).double().eval()


def sampled(
    policy, engine: str, stop: tuple[str, ...], slots: int = 0, length: int = 40, device: torch.device = CPU, **limits
) -> Completions:
    tokenizer = smollm2_tokenizer()
    prompts = [ids_alone(range(3, 5 + n % 4)) for n in range(24)]
    noise = uniform_noise(1, 2, "rollout", range(24), length)
    criterion = stopping_criterion(tokenizer, stop)
    return sample_completions(policy, prompts, noise, SamplingSettings(length, 1.0, **limits), eos=criterion, pad=0,
                              device=device, engine=engine, slots=slots)  # fmt: skip


STOPS = ("on", "e ", "\n", "is", "?")


@pytest.mark.parametrize(("engine", "slots"), [("plain", 0), ("slots", 5), ("slots", 24)])
def test_engines_sample_the_completions_without_stop_strings_up_to_them(policy, engine, slots):
    """Expected: the same completions sampled without stop strings, each up to its first prefix that contains one."""
    tokenizer = smollm2_tokenizer()
    expected = []
    for row in sampled(policy, "plain", ()).rows():
        ends = (n for n in range(len(row)) if any(s in decode_completion(tokenizer, row[:n]) for s in STOPS))
        expected.append(row[: next(ends, len(row))])
    found = sampled(policy, engine, STOPS, slots)
    assert found.rows() == expected
    assert len({len(row) for row in expected}) > 8, "stop strings must be found at different places"
    assert sum(found.ended.tolist()) > sum(sampled(policy, "plain", ()).ended.tolist()) + 10
    assert not any(stop in text for text in found.texts(tokenizer) for stop in STOPS)


def test_engine_with_several_steps_between_checks(policy, monkeypatch):
    """As on a GPU: a stop string may be found up to 3 tokens late."""
    expected = sampled(policy, "slots", STOPS, 5, top_k=50).rows()
    decode = ContinuousBatcher.decode
    batcher = "rlhf.rollout.continuous_batching.ContinuousBatcher"
    monkeypatch.setattr(f"{batcher}.decode", lambda self: [decode(self) for _ in range(4)])
    assert sampled(policy, "slots", STOPS, 5, top_k=50).rows() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["plain", "slots", "graph"])
def test_stop_strings_on_a_gpu(policy, engine):
    """Both use float32, so a token differs only if a random number falls between two rounded probabilities."""
    small = copy.deepcopy(policy).float()
    expected = sampled(small, "plain", STOPS).rows()
    assert sampled(small.to("cuda"), engine, STOPS, 5, device=torch.device("cuda")).rows() == expected


def test_stopped_completions_free_their_slots(policy, monkeypatch):
    steps = []
    decode = ContinuousBatcher.decode
    monkeypatch.setattr(ContinuousBatcher, "decode", lambda self: steps.append(1) or decode(self))
    sampled(policy, "slots", (), 5)
    without, steps[:] = len(steps), []
    sampled(policy, "slots", STOPS, 5)
    assert len(steps) < 0.8 * without


def test_plain_engine_ends_when_all_completions_have_stopped(policy, monkeypatch):
    """Every text contains one of 95 letters soon; each call of the model is one token."""
    calls = []
    handle = policy.model.register_forward_hook(lambda *_: calls.append(1))
    every = tuple(map(chr, range(32, 127)))
    sampled(policy, "plain", every)
    handle.remove()
    assert len(calls) <= 8


def test_vllm_receives_the_stop_strings_and_its_completions_are_cut(build, monkeypatch):
    monkeypatch.setattr("trl.generation.vllm_generation.VLLMGeneration", FakeVLLMGeneration)
    monkeypatch.setattr("rlhf.rollout.vllm.is_installed", lambda: True)
    trainer = build("--rollout-engine", "vllm", "--num-iterations", 1, "--stop", "e", "a", "n")
    batches = []
    trainer.add_callback(type("Recorder", (), {"on_batch": lambda _, update, batch, scored: batches.append(batch)})())
    trainer.train()
    given = trainer.collector.vllm.generation.settings["generation_kwargs"]
    assert given == {"stop": ["e", "a", "n"], "stop_token_ids": eos_ids(trainer.processing_class)}
    (batch,), tokenizer = batches, trainer.processing_class
    rows = batch.completions.rows()
    assert all(not set("ean") & set(decode_completion(tokenizer, row[:-1])) for row in rows)
    assert batch.completions.sampled_logprobs.shape == batch.mask.shape


# --- EOS ids ---------------------------------------------------------------------------------------------------------


def test_every_eos_id_of_the_generation_config_ends_a_completion(tmp_path):
    """As Qwen 3: the end of a turn is EOS, and the end of a document ends a completion, too."""
    folder = make_family(tmp_path / "model", qwen3_tokenizer(), LlamaConfig, ("<|im_end|>", "<|endoftext|>"))
    tokenizer = load_tokenizer(str(folder))
    turn, document = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>"))
    assert eos_ids(tokenizer) == [turn, document]
    rows, ended, _ = cut(tokenizer, [[9, document, 8, 7], [9, 8, turn, 7], [9, 8, 7, 6]])
    assert rows == [[9, document], [9, 8, turn], [9, 8, 7, 6]] and ended == [True, True, False]


def test_saved_tokenizer_keeps_the_eos_ids_without_a_generation_config(tmp_path):
    """An adapter's folder has no generation config."""
    folder = make_family(tmp_path / "model", qwen3_tokenizer(), LlamaConfig, ("<|im_end|>", "<|endoftext|>"))
    tokenizer = load_tokenizer(str(folder))
    tokenizer.save_pretrained(tmp_path / "saved")
    assert eos_ids(load_tokenizer(str(tmp_path / "saved"))) == eos_ids(tokenizer)


def test_generation_config_of_a_saved_run_adds_no_eos_id(tmp_path):
    """transformers writes one with the default of the config class, here 2, if the start model had none."""
    folder = make_base_model(tmp_path / "base")
    (folder / "generation_config.json").unlink()
    tokenizer = load_tokenizer(str(folder))
    assert eos_ids(tokenizer) == [0]
    tokenizer.save_pretrained(tmp_path / "run")
    (tmp_path / "run" / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert eos_ids(load_tokenizer(str(tmp_path / "run"))) == [0]


def test_criterion_without_a_tokenizer_has_one_id():
    mask, ended = StoppingCriterion.of(2).mask(torch.tensor([[5, 2, 2]]))
    assert (mask.tolist(), ended.tolist()) == ([[True, True, False]], [True])
