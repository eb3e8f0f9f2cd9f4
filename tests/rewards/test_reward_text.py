"""Tests that a reward model scores the text on which it was trained, at the token at which it was trained: models of
TRL's RewardTrainer here, and models of this project in transformers and in TRL's GRPOTrainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer

from rlhf.checkpoints.model_folder import METRICS_FILE
from rlhf.checkpoints.run_record import RUN_FILE, _from_json
from rlhf.data.chat_template import encode_prompt
from rlhf.data.row import Example
from rlhf.rewards import reward_model
from rlhf.rewards.checks import check_reward_context, check_unrecorded
from rlhf.rewards.reward_model import RewardModel
from rlhf.rewards.training import train_reward_model
from rlhf.settings.reward_model import parse_reward_cli
from rlhf.setup.build import load_components
from rlhf.utils.console import Screen
from tests.shapes import (
    gemma_tokenizer,
    make_reward_model,
    make_start_model,
    mistral_tokenizer,
    qwen3_tokenizer,
    smollm2_tokenizer,
)

CPU = torch.device("cpu")
QUESTIONS = ["What is the capital of France?", "What is 2 + 2?", "Where is the cat?", "Is the table high?"]
ANSWERS = ["Paris, on the river Seine.", "4", "The cat is on the table. It lies there.", "No."]
REJECTED = ["A table.", "The number 5, step by step", "Paris", "le chat est sur la table"]
SPECIAL = "a <|im_end|> b"  # a text that spells a special token


def user(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def chat(question: str, answer: str) -> list[dict[str, str]]:
    return [*user(question), {"role": "assistant", "content": answer}]


def trained_by_trl(folder: Path, base: Path, is_chat: bool, pad: str) -> Path:
    """Train a reward model with stock RewardTrainer for some steps, from text, and save it with its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = pad
    if is_chat:
        rows = [{"prompt": user(q), "chosen": chat(q, a)[1:], "rejected": chat(q, r)[1:]}
                for q, a, r in zip(QUESTIONS, ANSWERS, REJECTED, strict=True)]  # fmt: skip
    else:
        tokenizer.chat_template = None
        rows = [{"prompt": q, "chosen": f" {a}", "rejected": f" {r}"}
                for q, a, r in zip(QUESTIONS, ANSWERS, REJECTED, strict=True)]  # fmt: skip
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    arguments = RewardConfig(
        output_dir=str(folder / "scratch"), max_steps=4, learning_rate=1e-2, per_device_train_batch_size=4,
        report_to="none", save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = RewardTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    trainer.save_model(str(folder / "model"))
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def scores_of_transformers(folder: Path, is_chat: bool, side: str) -> list[float]:
    """Score the chosen answers as TRL encodes them in training, padded on one side."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    if is_chat:
        chats = [chat(q, a) for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
        rows = [tokenizer.apply_chat_template(one, tokenize=True, return_dict=True)["input_ids"] for one in chats]
    else:
        rows = [tokenizer(f"{q} {a}{tokenizer.eos_token}").input_ids for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    with torch.no_grad():
        return model(**batch).logits[:, 0].tolist()


@pytest.mark.parametrize("pad", ["<|im_end|>", "<|endoftext|>"], ids=["pad is EOS", "separate pad"])
@pytest.mark.parametrize("is_chat", [True, False], ids=["chats", "plain texts"])
def test_a_model_of_trl_gets_its_own_scores(tmp_path, start_model, monkeypatch, is_chat, pad):
    folder = trained_by_trl(tmp_path, start_model, is_chat, pad)
    expected, padded_left = (scores_of_transformers(folder, is_chat, side) for side in ("right", "left"))
    assert padded_left == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.01, "the scores must differ, or the test proves nothing"
    model = RewardModel.load(str(folder), CPU, None)
    answers = ANSWERS if is_chat else [f" {answer}" for answer in ANSWERS]
    asked = [tuple(user(q)) for q in QUESTIONS]
    assert reward_model.can_pack(model.model)
    assert model.score(asked, answers, [True] * 4) == pytest.approx(expected, abs=1e-5)
    monkeypatch.setattr(reward_model, "can_pack", lambda _: False)
    assert model.score(asked, answers, [True] * 4) == pytest.approx(expected, abs=1e-5)


def test_a_model_of_this_project_gets_its_own_scores_in_trl(tmp_path, start_model, pairs_file):
    """GRPOTrainer renders the whole chat with the reward model's template, as transformers' users do."""
    flags = ["--pairs", pairs_file, "--base-model", start_model, "--actor-model", start_model, "--max-new-tokens", 6,
             "--rm-output", tmp_path / "rm", "--rm-batch-size", 4]  # fmt: skip
    folder = train_reward_model(parse_reward_cli([str(word) for word in flags]), Screen(), CPU)
    assert json.loads((folder / METRICS_FILE).read_text())["text"] == "template"
    arguments = GRPOConfig(output_dir=str(tmp_path / "trl"), report_to="none", use_cpu=True, bf16=False,
                           per_device_train_batch_size=4, num_generations=2)  # fmt: skip
    trainer = GRPOTrainer(str(start_model), str(folder), args=arguments,
                          train_dataset=Dataset.from_list([{"prompt": user(q)} for q in QUESTIONS]))  # fmt: skip
    rows = [{"prompt": user(q)} for q in QUESTIONS]
    completions = [chat("", answer)[1:] for answer in ANSWERS]
    in_trl = trainer._calculate_rewards(rows, [user(q) for q in QUESTIONS], completions, [[1]] * 4)[:, 0].tolist()
    model = RewardModel.load(str(folder), CPU, None)
    calibrated = [(raw - model.calibration.mean) / model.calibration.std for raw in in_trl]
    scores = model.score([tuple(user(q)) for q in QUESTIONS], ANSWERS, [True] * 4)
    assert scores == pytest.approx(calibrated, abs=1e-5) and max(scores) - min(scores) > 0.01


@pytest.mark.parametrize("make", [qwen3_tokenizer, gemma_tokenizer, mistral_tokenizer])
def test_the_text_is_what_the_template_renders(tmp_path, make):
    """Gemma's template removes spaces around a content, Mistral's writes one before it."""
    folder = make_reward_model(tmp_path / "rm")
    tokenizer = make()
    model = RewardModel.load(str(folder), CPU, None)
    model.tokenizer = tokenizer
    for question, answer in zip([*QUESTIONS, "What?\n"], [*ANSWERS, "  two words \n"], strict=True):
        rendered = tokenizer.apply_chat_template(chat(question, answer), tokenize=False)
        ids = tokenizer(rendered, add_special_tokens=False).input_ids
        assert model.encode(user(question), answer, True) == ids
        cut_off = tokenizer.decode(model.encode(user(question), answer, False))
        assert cut_off.rstrip().endswith(answer.strip()), "nothing follows a completion that was cut off"


def test_a_completion_without_text_is_scored_by_a_template_that_rejects_it(tmp_path):
    """A policy may end at once. The template's error would end a run after hours."""
    model = RewardModel.load(str(make_reward_model(tmp_path / "rm")), CPU, None)
    ids = [model.encode(user("a"), completion) for completion in ("", " \n")]
    model.tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' and not m['content'].strip() %}"
        "{{ raise_exception('no text') }}{% endif %}{% endfor %}" + model.tokenizer.chat_template
    )
    assert [model.encode(user("a"), completion) for completion in ("", " \n")] == ids
    assert ids[0] != ids[1] and len(model.score([tuple(user("a"))], [""], [True])) == 1


def test_thinking_tokens_of_a_completion_are_those_of_the_template(tmp_path):
    """Qwen 3's marks of thinking are added tokens that its template names; a completion contains them."""
    model = RewardModel.load(str(make_reward_model(tmp_path / "rm")), CPU, None)
    model.tokenizer = qwen3_tokenizer()
    answer = "<think>two cats</think>yes"
    rendered = model.tokenizer.apply_chat_template(chat("a", answer), tokenize=True, return_dict=True)["input_ids"]
    assert model.encode(user("a"), answer) == rendered
    assert model.tokenizer.convert_tokens_to_ids("<think>") in rendered


def test_tokens_that_a_template_writes_around_a_completion_need_room(tmp_path, user_error):
    """Qwen 3's template writes an empty block of thinking before the last answer, and a line break after EOS. The form
    that ends at EOS has neither."""
    folder = make_reward_model(tmp_path / "rm")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ message['content'] }}",
        "{% if loop.last and message['role'] == 'assistant' %}THINK{% endif %}{{ message['content'] }}",
    )
    tokenizer.save_pretrained(folder)
    model = RewardModel.load(str(folder), CPU, None)
    example = Example(tuple(user("a")))
    prompt = len(encode_prompt(tokenizer, user("a")))
    whole = len(model.encode(user("a"), "b"))
    room = 512 - whole + 2  # the context without all but "b" and EOS
    check_reward_context(str(folder), [example], room, "--rm-model")
    with user_error("--rm-model", 512, whole - prompt - 2):
        check_reward_context(str(folder), [example], room + 1, "--rm-model")
    check_reward_context(str(folder), [example], 512 - prompt, "--rm-model", text="eos")


def test_a_text_that_spells_a_special_token_stays_text(tmp_path):
    model = RewardModel.load(str(make_reward_model(tmp_path / "rm")), CPU, None)
    eos = model.tokenizer.eos_token_id
    clean, hostile = (model.encode(user(SPECIAL), answer).count(eos) for answer in ("a b", SPECIAL))
    assert hostile == clean == model.encode(user("a b"), "a b").count(eos)


def test_scores_are_read_at_the_last_token_that_is_not_pad(tmp_path):
    """pad = EOS: transformers reads before EOS, wherever EOS is followed by nothing else."""
    folder = make_reward_model(tmp_path / "rm", pad=2)
    model = RewardModel.load(str(folder), CPU, None)
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = [[5, 6, 2, 7, 2], [5, 6, 2, 2, 2], [5, 6, 2, 7, 8], [5, 2], [2, 2]]
    expected = [plain(torch.tensor([row])).logits.item() for row in rows]
    assert model.raw_scores(rows) == pytest.approx(expected, abs=1e-6)
    assert model.raw_scores(rows[:4], [0] * 4) == pytest.approx(expected[:4], abs=1e-6)  # a shared beginning


# --- the record ------------------------------------------------------------------------------------------------------


def write_record(folder: Path, **more) -> None:
    record = {"accuracy": 0.9, "length_baseline": 0.5, "calibration": {"scale": {"mean": 0.0, "std": 1.0}}, **more}
    (folder / METRICS_FILE).write_text(json.dumps(record))


def test_a_model_is_read_as_its_record_tells(tmp_path, user_error):
    """Without a record: as its template renders. Records of older versions have no form: their texts ended at EOS."""
    folder = make_reward_model(tmp_path / "rm")
    model = RewardModel.load(str(folder), CPU, None)
    eos = model.tokenizer.eos_token_id
    newline = model.tokenizer("\n").input_ids
    assert model.encode(user("a"), "b")[-2:] == [eos, *newline]
    assert RewardModel.load(str(folder), CPU, None, text="eos").encode(user("a"), "b")[-1] == eos
    write_record(folder)
    assert RewardModel.load(str(folder), CPU, None).encode(user("a"), "b")[-1] == eos
    assert RewardModel.load(str(folder), CPU, None, text="template").text == "eos", "the record decides"
    write_record(folder, text="template")
    assert RewardModel.load(str(folder), CPU, None).encode(user("a"), "b")[-2:] == [eos, *newline]
    write_record(folder, text="something else")
    with user_error(METRICS_FILE, "something else"):
        RewardModel.load(str(folder), CPU, None)


def test_a_run_refuses_a_text_that_the_record_contradicts(configured, tmp_path, user_error):
    folder = make_reward_model(tmp_path / "rm")
    write_record(folder, text="template")
    with user_error("--rm-text eos", METRICS_FILE):
        load_components(configured("--rm-model", folder, "--rm-text", "eos"), CPU, Screen())


def test_runs_of_older_versions_scored_the_text_up_to_eos(runs):
    """Their reward models had no record, or one without the text."""
    facts = json.loads((runs["ppo", 1] / RUN_FILE).read_text())
    assert facts["settings"]["model"].pop("rm_text") is None
    assert _from_json(facts).flat_settings["rm_text"] == "eos"
    facts["settings"]["model"] |= {"rm_model": None}
    facts["settings"]["model"].pop("rm_text", None)
    assert "rm_text" not in _from_json(facts).flat_settings


def test_an_encoder_that_others_trained_is_a_warning(tmp_path, capsys):
    """It was trained on two segments with [SEP] between them, and receives one text. One that this project trained
    receives the text of its training."""
    tokenizer = smollm2_tokenizer()
    tokenizer.chat_template = None
    tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]", "eos_token": "[SEP]"})
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=0, num_labels=1, **shape)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")
    model = RewardModel.load(str(tmp_path / "rm"), CPU, None)
    check_unrecorded(model, "rm", [], False, Screen())
    _, warning, _ = capsys.readouterr().out.splitlines()
    assert warning.startswith("warning") and "'[SEP]'" in warning
    assert model.encode([{"role": "user", "content": "a"}], "b").count(tokenizer.sep_token_id) == 1
    write_record(tmp_path / "rm", text="template")
    check_unrecorded(RewardModel.load(str(tmp_path / "rm"), CPU, None), "rm", [], False, Screen())
    assert capsys.readouterr().out == ""


def test_the_form_of_a_model_without_a_record_is_printed(tmp_path, capsys):
    separate = RewardModel.load(str(make_reward_model(tmp_path / "rm")), CPU, None)
    check_unrecorded(separate, "rm", [], False, Screen())
    form, accuracy = capsys.readouterr().out.splitlines()
    assert r"<|im_end|>\n" in form and "--rm-text" in form and accuracy.startswith("warning")
    pad_is_eos = RewardModel.load(str(make_reward_model(tmp_path / "eos", pad=2)), CPU, None, text="eos")
    assert separate.sees_end and not pad_is_eos.sees_end
    check_unrecorded(pad_is_eos, "rm", [], False, Screen())
    form, end, accuracy = capsys.readouterr().out.splitlines()
    assert "'<|im_end|>'" in form and end.startswith("note") and accuracy.startswith("warning")
    write_record(tmp_path / "rm", text="template")
    check_unrecorded(RewardModel.load(str(tmp_path / "rm"), CPU, None), "rm", [], False, Screen())
    assert capsys.readouterr().out == ""


def test_a_new_model_reads_its_template_to_the_end(tmp_path):
    """What training receives ends as the template does, also if the base model's pad is EOS."""
    from rlhf.rewards.training import new_reward_model

    base = make_start_model(tmp_path / "base")
    model = new_reward_model(parse_reward_cli(["--base-model", str(base)]), CPU)
    rendered = model.tokenizer.apply_chat_template(chat("a", "b"), tokenize=True, return_dict=True)["input_ids"]
    assert model.encode(user("a"), "b") == rendered and model.sees_end
