"""Tests of chat templates that write the present date, and of tokenizers with several templates."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from transformers import AddedToken, AutoTokenizer

from rlhf.data import chat_template
from rlhf.data.chat_template import decode_completion, encode_prompt, removed_tags
from rlhf.data.examples import examples_of
from rlhf.data.prompts import encode_all, fingerprint
from rlhf.data.tokenizer import load_tokenizer
from rlhf.rewards.checks import encodes_alike
from rlhf.rewards.reward_model import RewardModel
from rlhf.setup.build import load_components
from rlhf.setup.load_inputs import load_inputs
from rlhf.utils.console import Screen
from tests.shapes import smollm2_tokenizer, with_date, with_named_templates

CPU = torch.device("cpu")
CHAT = [{"role": "user", "content": "What is strftime_now('%Y')? 100%d"}]
TEMPLATES = {
    "llama": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n" }}{{- messages[0]['content'] }}""",
    "granite": "\n\n  Today's Date: {{ strftime_now('%B %d, %Y') }}.\n{{ messages[0]['content'] }}",
    "in a macro": "{%-macro day(x)%}{{ strftime_now(x) | upper }}{%endmacro%}{{ day('%A %H:' ~ '%M') }}",
    "rare codes": "{{ strftime_now('%F %T, %e %D %R') }} 5 % 2 {{ 7 %3 }}",
    "numbers": "{% set now = strftime_now %}{% for m in messages %}{{ now(format='%j')|int + 1 }}{% endfor %} %d",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_date_renders_as_transformers_renders_it_on_that_day(start_model, on_day, name):
    """The first day's text, on the first day and later."""
    on_day("2026-11-07T09:05:03")
    plain = AutoTokenizer.from_pretrained(start_model)
    tokenizer = load_tokenizer(str(start_model))
    plain.chat_template = tokenizer.chat_template = TEMPLATES[name]
    expected = plain.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    tokenizer.init_kwargs["chat_template_date"] = "2026-11-07T09:05:03"
    for day in ("2026-11-07T09:05:03", "2027-02-28T10:30:00"):
        on_day(day)
        assert chat_template.render_chat(tokenizer, CHAT, add_generation_prompt=True) == expected
    assert plain.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) != expected


def test_a_tokenizer_keeps_its_date(start_model, tmp_path, on_day):
    """A saved one keeps it after loading, whatever the day and the run's date; a new one has the run's date."""
    folder = with_date(start_model, tmp_path / "model")
    on_day("2026-11-07T09:05:03")
    first = load_tokenizer(str(folder))
    ids = encode_prompt(first, CHAT)
    first.save_pretrained(tmp_path / "saved")
    on_day("2027-02-28T10:30:00")
    assert encode_prompt(first, CHAT) == encode_prompt(load_tokenizer(str(tmp_path / "saved")), CHAT) == ids
    assert "strftime_now" in (tmp_path / "saved" / "chat_template.jinja").read_text(), "others get the present date"
    assert "28 Feb 2027" in first.decode(encode_prompt(load_tokenizer(str(folder)), CHAT))
    again = load_tokenizer(str(folder), date="2026-11-07T23:59:59")
    assert encode_prompt(again, CHAT) == ids
    assert not encodes_alike(again, load_tokenizer(str(folder)))
    later = load_tokenizer(str(tmp_path / "saved"), date="2027-01-01T00:00:00")
    assert encode_prompt(later, CHAT) == ids


def test_other_templates_have_no_date_and_the_same_hash(start_model, tmp_path):
    tokenizer = load_tokenizer(str(start_model), date="2026-11-07T09:05:03")
    plain = load_tokenizer(str(with_date(start_model, tmp_path / "dated")), plain=True)
    prompts = encode_all(tokenizer, examples_of(["one", "two"]))
    expected = hashlib.sha256(json.dumps([list(p.ids) for p in prompts]).encode()).hexdigest()
    assert fingerprint(prompts, tokenizer) == expected
    for number, one in enumerate((tokenizer, plain)):
        one.save_pretrained(tmp_path / str(number))
        assert "chat_template_date" not in (tmp_path / str(number) / "tokenizer_config.json").read_text()


def test_hash_of_prompts_is_that_of_their_texts_if_the_template_writes_the_date(start_model, tmp_path):
    folder = str(with_date(start_model, tmp_path / "dated"))
    hashes = set()
    for texts, date in ((["one"], "2026-11-07"), (["one"], "2027-02-28"), (["two"], "2026-11-07")):
        tokenizer = load_tokenizer(folder, date=date)
        hashes.add(fingerprint(encode_all(tokenizer, examples_of(texts)), tokenizer))
    assert len(hashes) == 2


def test_the_date_is_that_of_the_first_process(start_model, tmp_path, configured, monkeypatch):
    config = configured("--actor-model", with_date(start_model, tmp_path / "dated"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("rlhf.distributed.group.gather", lambda value: ["2001-02-03T04:05:06", value])
    inputs = load_inputs(config, Screen(quiet=True))
    assert inputs.start.date == "2001-02-03T04:05:06"
    assert "03 Feb 2001" in inputs.start.tokenizer.decode(list(inputs.prompts.train[0].ids))


def test_a_reward_model_has_the_date_of_its_training_or_of_the_run(reward_folder, tmp_path, configured, on_day):
    """A model of the hub has no date of its own."""
    folder = with_date(reward_folder, tmp_path / "judge")
    on_day("2026-11-07T09:05:03")
    parts = load_components(configured("--rm-model", folder), CPU, Screen(quiet=True))
    on_day("2027-02-28T10:30:00")
    ids = parts.reward_model.encode(CHAT, "yes")
    assert "07 Nov 2026" in parts.tokenizer.decode(ids)
    assert RewardModel.load(str(folder), CPU, None, date=parts.date).encode(CHAT, "yes") == ids
    parts.reward_model.tokenizer.save_pretrained(folder)
    assert RewardModel.load(str(folder), CPU, None, date="2027-02-28").encode(CHAT, "yes") == ids


def test_of_named_templates_the_default_one_is_kept(start_model, tmp_path):
    tokenizer = load_tokenizer(str(with_named_templates(start_model, tmp_path / "named")))
    expected = encode_prompt(load_tokenizer(str(start_model)), CHAT)
    assert encode_prompt(tokenizer, CHAT) == expected
    tokenizer.save_pretrained(tmp_path / "saved")
    assert all(path.is_file() for path in (tmp_path / "saved").iterdir())
    assert encode_prompt(load_tokenizer(str(tmp_path / "saved")), CHAT) == expected
    assert "TOOLS" not in (tmp_path / "saved" / "tokenizer_config.json").read_text()


@pytest.mark.parametrize(
    ("special", "removed"),
    [
        (["<think>", "</think>", "<answer>", "<pad>", "<s>", "</s>"], ["</think>", "<think>"]),
        (["<|start|>", "<|end|>", "<eos>"], []),
    ],
)
def test_tags_that_are_special_tokens_are_removed_from_completions(special, removed):
    """Not those of the model itself, and not ordinary tokens such as Qwen 3's thinking tokens."""
    tokenizer = smollm2_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in ("<tool_call>", "</tool_call>")])
    tokenizer.add_tokens([AddedToken(tag, special=True) for tag in special])
    tokenizer.bos_token, tokenizer.eos_token = ("<s>", "</s>") if "<s>" in special else ("<|im_start|>", "<eos>")
    assert removed_tags(tokenizer) == removed
    text = "<tool_call> <think> a </think> </tool_call>"
    kept = decode_completion(tokenizer, tokenizer(text, add_special_tokens=False).input_ids)
    assert "<tool_call>" in kept and all(tag not in kept for tag in removed)
    assert ("<think>" in kept) == (not removed)
