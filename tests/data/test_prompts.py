"""Tests reading data files, splitting prompts into parts, and rendering them with the chat template."""

from __future__ import annotations

import gc
import json
import os
import re
import weakref
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken

from rlhf.data.chat_template import encode_completion, encode_prompt, encode_text
from rlhf.data.examples import examples_of, load_examples, load_pairs
from rlhf.data.lengths import length_that_keeps, warn_about_length
from rlhf.data.prompts import TOKEN_IDS, given_prompts, ids_in, load_every_row, load_prompts, select_examples
from rlhf.data.row import Example
from rlhf.data.splits import distinct_questions, part_of, split_examples
from rlhf.data.tokenizer import ids_of, load_tokenizer
from rlhf.settings.reward_model import RewardDataSettings
from rlhf.settings.training import DataSettings
from rlhf.settings.types import Renaming, Split
from rlhf.utils.errors import UserError
from tests.shapes import smollm2_tokenizer


@pytest.fixture(scope="module")
def tokenizer(start_model):
    return load_tokenizer(str(start_model))


def write(path, *rows) -> str:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")
    return str(path)


def user(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def test_three_row_formats(tmp_path):
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "c?"}]
    path = write(
        tmp_path / "rows.jsonl",
        {"system": "s", "question": "a?", "chosen": "yes", "rejected": "no"},
        {"prompt": "b?", "topic": "letters"},
        {"messages": [*chat, {"role": "assistant", "content": "an old answer"}]},
        "",
    )
    pair, prompt, third = load_examples(path)
    assert pair.messages == ({"role": "system", "content": "s"}, *user("a?"))
    assert (pair.chosen, pair.rejected) == ("yes", "no")
    assert (prompt.messages, prompt.topic, prompt.chosen) == (user("b?"), "letters", None)
    assert list(third.messages) == chat, "the prompt is the chat without its last assistant turn"


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [e.messages for e in load_examples(str(path))] == [user("a"), user("b")]


BAD_ROWS = {
    "not JSON": ("{broken", ["JSON ", "'{broken'"]),
    "not an object": ("[1, 2]", ["JSON object: "]),
    "no prompt": ({"text": "x"}, ["prompt among the columns ['text']: ", "'{"]),
    "a null prompt": ({"prompt": None}, ["prompt is null"]),
    "a number": ({"prompt": 7}, ["prompt is 7"]),
    "an empty prompt": ({"prompt": "  "}, ["prompt is empty: "]),
    "rejected is missing": ({"prompt": "a", "chosen": "b"}, ['"rejected" ']),
    "an unknown role": ({"messages": [{"role": "robot", "content": "x"}]}, ["role 'robot': "]),
    "no user": ({"messages": [{"role": "system", "content": "x"}]}, ["user message"]),
    "a lone surrogate": ('{"prompt": "\\ud800"}', ["prompt ", "surrogate"]),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_invalid_row_is_reported_with_file_and_line(tmp_path, case, user_error):
    row, parts = BAD_ROWS[case]
    with user_error(*parts, "rows.jsonl:2"):
        load_examples(write(tmp_path / "rows.jsonl", {"prompt": "fine"}, row))


def test_all_invalid_rows_are_reported_together(tmp_path):
    rows = [{"prompt": "" if i % 2 else None} for i in range(13)]
    with pytest.raises(UserError) as caught:
        load_examples(write(tmp_path / "rows.jsonl", *rows))
    lines = caught.value.report().splitlines()
    assert len(lines) == 6 and lines[-1] == "and 8 more"


def test_a_problem_of_all_rows_is_one_line(tmp_path, user_error):
    with user_error("rows.jsonl:1", "All 13 rows") as caught:
        load_examples(write(tmp_path / "rows.jsonl", *({"prompt": ""} for _ in range(13))))
    assert len(caught.value.problems) == 1


def test_missing_empty_and_non_utf8_files_are_refused(tmp_path, user_error):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}')
    with user_error("promts.jsonl", "prompts.jsonl"):
        load_examples(str(tmp_path / "promts.jsonl"))
    with user_error("empty.jsonl"):
        load_examples(write(tmp_path / "empty.jsonl", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    with user_error("latin.jsonl, byte 15"):
        load_examples(str(tmp_path / "latin.jsonl"))


def test_no_prompt_left_after_filtering_is_an_error(tmp_path, tokenizer, user_error):
    path = write(tmp_path / "rows.jsonl", *({"prompt": f"question {i}"} for i in range(40)))
    with user_error():
        load_prompts(DataSettings(path, prompt_length=3), tokenizer)
    with user_error("0", "100"):
        load_prompts(DataSettings(path, Split(0, 100, 0)), tokenizer)


def test_long_prompts_are_skipped_and_counted(tmp_path, tokenizer):
    rows = [{"prompt": f"question {i}" + " and so on" * (100 if i % 4 == 0 else 0)} for i in range(80)]
    sets = load_prompts(DataSettings(write(tmp_path / "rows.jsonl", *rows), prompt_length=120), tokenizer)
    assert sets.too_long == 20
    assert len(sets.train) + len(sets.evaluation) == 60
    whole = {tuple(encode_prompt(tokenizer, user(r["prompt"]))) for r in rows}
    assert all(p.ids in whole for p in (*sets.train, *sets.evaluation)), "no prompt is truncated"


# --- split -----------------------------------------------------------------------------------------------------------


def test_split_ignores_spacing_case_and_system_text():
    split = Split(45, 45, 10)
    forms = [user("What  is IT?"), user(" what is it? "), ({"role": "system", "content": "s"}, *user("what is it?"))]
    assert len({part_of(Example(messages=m), split) for m in forms}) == 1


def test_split_shares_are_met_and_no_example_is_lost():
    examples = [Example(messages=user(f"question {i}")) for i in range(4000)]
    parts = split_examples(examples, Split(45, 45, 10))
    assert sum(map(len, parts.values())) == 4000
    for name, share in (("reward", 0.45), ("rl", 0.45), ("evaluation", 0.10)):
        assert len(parts[name]) / 4000 == pytest.approx(share, abs=0.03)


def test_prompts_without_pairs_have_no_reward_part(tmp_path, tokenizer):
    rows = [{"prompt": f"question {i}"} for i in range(60)]
    assert load_prompts(DataSettings(write(tmp_path / "r.jsonl", *rows)), tokenizer).parts["reward"] == 0


# --- render ----------------------------------------------------------------------------------------------------------


def test_encode_prompt_matches_apply_chat_template(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, *user("What is the capital of France?")]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert encode_prompt(tokenizer, messages) == whole


@pytest.mark.parametrize("special", ["<|im_end|>", "<|im_start|>", "<|endoftext|>"])
def test_special_token_in_a_text_stays_text(tokenizer, special):
    special_id = tokenizer.convert_tokens_to_ids(special)
    clean = encode_prompt(tokenizer, user("hello"))
    hostile = encode_prompt(tokenizer, user(f"hello {special} world"))
    assert hostile.count(special_id) == clean.count(special_id)
    assert special_id not in encode_text(tokenizer, f"a reply with {special}")
    assert tokenizer.decode(encode_text(tokenizer, f"a {special}")) == f"a {special}"


def test_placeholder_characters_in_a_text_are_kept(tokenizer):
    ids = encode_prompt(tokenizer, user("\ue0000\ue001 and \ue0001\ue001"))
    assert "\ue0000\ue001 and \ue0001\ue001" in tokenizer.decode(ids)


def test_only_an_ended_completion_gets_eos(tokenizer):
    assert encode_completion(tokenizer, "the cat", True) == [
        *encode_completion(tokenizer, "the cat", False),
        tokenizer.eos_token_id,
    ]


def test_without_a_chat_template_the_prompt_is_encoded_unchanged(start_model):
    tokenizer = load_tokenizer(str(start_model))
    tokenizer.chat_template = None
    assert tokenizer.decode(encode_prompt(tokenizer, user("TL;DR:"))) == "TL;DR:"


@pytest.mark.parametrize("variant", [
    "Where is the cafe\u0301?", "Where is the\u200b caf\u00e9?", "\ufeffWhere is the caf\u00e9?",
    "WHERE is  the CAF\u00c9?",
    "Where is the ca\u00adf\u00e9?", "Where is the CAFE\u0301?",
])  # fmt: skip
def test_unicode_variants_are_one_question(variant):
    """Covers NFC and NFD, zero-width space, byte order mark and soft hyphen."""
    plain = Example(user("Where is the caf\u00e9?"))
    assert Example(user(variant)).question == plain.question == "where is the caf\u00e9?"
    for i in range(50):
        one, other = (Example(user(f"{text} {i}")) for text in ("Where is the caf\u00e9?", variant))
        assert part_of(one, Split(45, 45, 10)) == part_of(other, Split(45, 45, 10))


def test_different_questions_stay_different():
    assert Example(user("x\u00b2")).question != Example(user("x2")).question
    assert Example(user("cafe?")).question != Example(user("caf\u00e9?")).question


def test_evaluation_needs_no_training_prompts(tokenizer, tmp_path, user_error):
    file = write(tmp_path / "mine.jsonl", *({"prompt": f"question {i}?"} for i in range(10)))
    sets = load_prompts(DataSettings(file, Split(0, 0, 100)), tokenizer, evaluation_alone=True)
    assert len(sets.evaluation) == 10 and sets.train == []
    with user_error():
        load_prompts(DataSettings(file, Split(0, 0, 100)), tokenizer)


def test_evaluation_prompts_of_another_file(tokenizer, tmp_path):
    train = write(tmp_path / "train.jsonl", *({"prompt": f"question {i}?"} for i in range(40)))
    other = write(tmp_path / "eval.jsonl", *({"prompt": f"another {i}?"} for i in range(7)))
    for split, counts in ((None, (0, 40)), (Split(0, 60, 40), (0, 40)), (Split(50, 30, 20), (50, 50))):
        sets = load_prompts(DataSettings(train, split, eval_dataset=other), tokenizer)
        assert [p.example.question for p in sets.evaluation] == [f"another {i}?" for i in range(7)]
        assert str(sets.split).endswith("/0") and sets.split.reward == counts[0]
        assert len(sets.train) + sets.parts["reward"] == 40 == sets.rows and sets.parts["evaluation"] == 7
    python = given_prompts(DataSettings(eval_dataset=other), tokenizer, ["a?", "b?"], None)
    assert (len(python.train), len(python.evaluation)) == (2, 7)
    assert given_prompts(DataSettings(eval_dataset=other), tokenizer, ["a?", "b?"], []).evaluation == []
    replaced = given_prompts(DataSettings(eval_dataset=other), tokenizer, ["a?", "b?"], ["c?"])
    assert [p.example.question for p in replaced.evaluation] == ["c?"]


def test_evaluation_alone_does_not_read_the_training_file(tokenizer, tmp_path, user_error):
    other = write(tmp_path / "eval.jsonl", {"prompt": "another?"})
    data = DataSettings(str(tmp_path / "moved.jsonl"), eval_dataset=other)
    assert len(load_prompts(data, tokenizer, evaluation_alone=True).evaluation) == 1
    with user_error("moved.jsonl"):
        load_prompts(data, tokenizer)


def test_the_evaluation_file_of_a_folder_is_its_split_test(tokenizer, tmp_path, user_error):
    folder = tmp_path / "both"
    folder.mkdir()
    write(folder / "train.jsonl", *({"prompt": f"question {i}?"} for i in range(5)))
    write(folder / "test.jsonl", {"prompt": "another?"})
    sets = load_prompts(DataSettings(str(folder), eval_dataset=str(folder)), tokenizer)
    assert (len(sets.train), [p.example.question for p in sets.evaluation]) == (5, ["another?"])
    (folder / "test.jsonl").rename(folder / "validation.jsonl")
    with user_error("'test'", "--eval-dataset"):
        load_prompts(DataSettings(str(folder), eval_dataset=str(folder)), tokenizer)


# --- reading once ----------------------------------------------------------------------------------------------------


def test_rows_are_read_once_until_a_file_changes(tmp_path):
    """Also in a folder, in which a file is new; and notes are printed when rows are read."""
    rows = [{"prompt": f"question {i}?"} for i in range(40)]
    folder = tmp_path / "rows"
    folder.mkdir()
    write(folder / "a.jsonl", *rows, *rows)
    said: list[str] = []
    first = select_examples(DataSettings(str(folder)), said.append)
    assert select_examples(DataSettings(str(folder)), said.append) is first
    assert [line.startswith("warning: 40 of 80 rows are duplicates") for line in said] == [True]
    others: list[str] = []  # of another trainer of a program
    select_examples(DataSettings(str(folder)), others.append)
    assert others == said
    write(folder / "b.jsonl", {"prompt": "another?"})
    second = select_examples(DataSettings(str(folder)), said.append)
    assert (len(first.examples), len(second.examples)) == (80, 81)
    times = (folder / "b.jsonl").stat()
    write(folder / "b.jsonl", {"prompt": "certain?"})  # of the same size
    os.utime(folder / "b.jsonl", ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert select_examples(DataSettings(str(folder)), said.append).examples[-1].question == "certain?"
    assert select_examples(DataSettings(str(folder), Split(0, 50, 50)), said.append).split == Split(0, 50, 50)


def test_the_evaluation_file_and_pairs_are_read_again_after_a_change(tmp_path):
    train = write(tmp_path / "train.jsonl", {"prompt": "one?"})
    data = DataSettings(train, eval_dataset=write(tmp_path / "other.jsonl", {"prompt": "two?"}))
    assert len(select_examples(data).parts["evaluation"]) == 1
    write(tmp_path / "other.jsonl", {"prompt": "two?"}, {"prompt": "three?"})
    assert len(select_examples(data).parts["evaluation"]) == 2
    pair = {"prompt": "one?", "chosen": "yes", "rejected": "no"}
    pairs = RewardDataSettings(write(tmp_path / "pairs.jsonl", pair))
    assert load_pairs(pairs) is load_pairs(pairs)
    write(tmp_path / "pairs.jsonl", pair, {**pair, "prompt": "two?"})
    assert len(load_pairs(pairs)) == 2


def test_only_the_last_data_is_kept(tmp_path):
    files = [write(tmp_path / f"{name}.jsonl", {"prompt": "a?"}, {"prompt": "b?"}) for name in "ab"]
    splits = Split(0, 50, 50)
    kept = [weakref.ref(select_examples(DataSettings(file, splits))) for file in files]
    gc.collect()
    assert [one() is None for one in kept] == [True, False]


# --- lengths ---------------------------------------------------------------------------------------------------------


def test_length_that_keeps_a_share():
    assert length_that_keeps(95, range(1, 101)) == 95
    assert length_that_keeps(95, [7] * 19 + [9]) == 7 and length_that_keeps(95, [7] * 18 + [9] * 2) == 9
    assert length_that_keeps(95, [3]) == 3


@pytest.mark.parametrize(("too_long", "warned"), [(0, False), (20, False), (21, True), (90, True)])
def test_many_long_rows_give_a_warning_with_a_flag_to_copy(too_long, warned):
    text = []
    lengths = [400 + i for i in range(too_long)] + [100] * (100 - too_long)
    warn_about_length(lengths, 256, "prompts", "--prompts a", "--prompt-length", text.append)
    assert bool(text) == warned
    if too_long == 21:  # 95 of the rows have at most 415 tokens: 79 short ones, and 16 of 400 to 415
        (warning,) = text
        for part in ("warning: 21 of 100 prompts (21%) ", " 256 tokens", ": --prompts a. --prompt-length 415 ", "95%"):
            assert part in warning


def test_long_prompts_are_warned_about_and_the_printed_length_keeps_95_percent(tmp_path, tokenizer):
    rows = [{"prompt": f"question {i}" + " and so on" * (i % 10)} for i in range(100)]
    file = write(tmp_path / "rows.jsonl", *rows)
    text = []
    short = load_prompts(DataSettings(file, prompt_length=70), tokenizer, text.append)
    pattern = r"warning: (\d+) of 100 prompts .*: --prompts .*\. --prompt-length (\d+) .*95%.*"
    found = re.fullmatch(pattern, text[0])
    assert int(found[1]) == short.too_long > 20
    longer = load_prompts(DataSettings(file, prompt_length=int(found[2])), tokenizer, text.append)
    assert longer.too_long <= 5 and len(text) == 1
    given_prompts(DataSettings(prompt_length=70), tokenizer, [row["prompt"] for row in rows], None, text.append)
    assert len(text) == 2 and " of 100 prompts " in text[1] and ": prompts. " in text[1]


def test_rows_given_in_python_have_the_formats_and_columns_of_files(tokenizer, user_error):
    rows = [{"problem": f"{i} + 1?", "answer": str(i + 1)} for i in range(3)]
    sets = given_prompts(DataSettings(columns=(Renaming("prompt=problem"),)), tokenizer, rows, None)
    assert [p.example.question for p in sets.train] == ["0 + 1?", "1 + 1?", "2 + 1?"]
    assert sets.train[0].example.columns == {"prompt": "0 + 1?", "answer": "1"}
    with user_error("'problm'", "--columns"):
        given_prompts(DataSettings(columns=(Renaming("prompt=problm"),)), tokenizer, rows, None)
    texts = given_prompts(DataSettings(columns=(Renaming("prompt=problem"),)), tokenizer, ["a?"], None)
    assert texts.train[0].example.question == "a?", "the new names are for rows"


def test_rows_with_equal_prompts_and_other_answers_are_reported(tmp_path, tokenizer):
    """Only the first row of a prompt is used. Rows of pairs are expected to repeat a prompt."""
    rows = [{"prompt": f"question {i % 20}", "answer": i if i < 40 else i % 20, "source": "x"} for i in range(60)]
    path = write(tmp_path / "rows.jsonl", *rows)
    data = DataSettings(path, Split(0, 100, 0), eval_dataset=write(tmp_path / "eval.jsonl", {"prompt": "e"}))
    text = []
    sets = load_prompts(data, tokenizer, text.append)
    assert [p.example.columns["answer"] for p in sets.train] == list(range(20)) and sets.repeated == 40
    (warning,) = [line for line in text if "'answer'" in line]
    assert warning.startswith("warning: 20 rows ") and re.search(r"rows\.jsonl:21, .* .*rows\.jsonl:1, ", warning)

    pairs = write(
        tmp_path / "pairs.jsonl", *({"prompt": "q?", "chosen": str(i), "rejected": "x", "margin": i} for i in range(3))
    )
    of_pairs: list[str] = []
    load_prompts(DataSettings(pairs, Split(0, 100, 0), eval_dataset=pairs), tokenizer, of_pairs.append)
    assert not any("margin" in line or " rows " in line for line in of_pairs)

    in_python: list[str] = []
    given = [*rows[:2], {"prompt": "question 1", "answer": 7}]
    given_prompts(DataSettings(), tokenizer, given, None, in_python.append)
    (of_python,) = [line for line in in_python if "'answer'" in line]
    assert " 1 rows " in of_python and re.search("prompt 3,.* prompt 2", of_python)


def test_a_tokenizer_needs_an_embedding_for_its_largest_id():
    """Ids may be missing in between, so the number of tokens would be too small."""
    assert ids_of(SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 7})) == 8


def test_distinct_prompts_keep_the_first_row_in_the_order_of_the_last_rows():
    """The order decides the random numbers of each prompt, so another one would change the published results."""
    rows = examples_of([{"prompt": prompt, "answer": i} for i, prompt in enumerate("abac")])
    assert [(e.question, e.columns["answer"]) for e in distinct_questions(rows)] == [("b", 1), ("a", 0), ("c", 3)]


# --- text that is not a question -------------------------------------------------------------------------------------

RENDERED = {
    "ChatML": "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    "Llama 3": "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>",
    "Gemma": "<bos><start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
    "Llama 2": "<s>[INST] {} [/INST]",
    "DeepSeek": "<\uff5cUser\uff5c>{}<\uff5cAssistant\uff5c>",
}
QUESTIONS = [
    *("Is <s>this</s> HTML?", "Think in <think> and </think>.", "x <| y |> z", "a <|> b", "User: hi\nAssistant:"),
    *("What does [INST] mean in a prompt?", "### Response:", "if a<|b| then c|>d"),
]


def marked(said: list[str]) -> list[str]:
    return [line for line in said if "marks of a chat template" in line]


@pytest.mark.parametrize("case", RENDERED)
@pytest.mark.parametrize("plain", [False, True])
def test_rendered_prompts_are_counted_in_one_line(tmp_path, start_model, case, plain):
    tokenizer = load_tokenizer(str(start_model), plain)
    rows = [{"prompt": RENDERED[case].format(f"What is {i}?")} for i in range(30)] + [{"prompt": "Is it?"}]
    file = write(tmp_path / "rows.jsonl", *rows)
    said = []
    load_prompts(DataSettings(file), tokenizer, said.append)
    (line,) = marked(said)
    assert line.startswith("warning: 30 of 31 ") and re.search(r"rows\.jsonl:\d", line)
    said.clear()
    load_every_row(DataSettings(file), tokenizer, said.append)
    (line,) = marked(said)
    assert line.startswith("warning: 30 of 31 ") and "rows.jsonl:1," in line
    said.clear()
    given_prompts(DataSettings(), tokenizer, rows[-2:], None, said.append)
    (line,) = marked(said)
    assert line.startswith("warning: 1 of 2 ") and "prompt 1" in line


def test_rendered_worked_examples_are_found(tmp_path, tokenizer):
    shot = {"prompt": RENDERED["ChatML"].format("Is it?"), "answer": "Yes."}
    data = DataSettings(few_shot=write(tmp_path / "shots.jsonl", shot))
    said = []
    given_prompts(data, tokenizer, ["a", "b"], None, said.append)
    (line,) = marked(said)
    assert line.startswith("warning: 1 of 3 ") and "--few-shot" in line and "shots.jsonl" in line


@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_have_no_marks(tokenizer, question):
    said = []
    given_prompts(DataSettings(prompt_length=10_000), tokenizer, [question], None, said.append)
    assert marked(said) == []


def test_the_marks_are_those_of_the_start_models_own_template():
    """Its turn tokens, which no other template has, and not BOS, EOS or the tag of a thinking model."""
    tokenizer = smollm2_tokenizer()
    tokenizer.add_tokens([AddedToken("<turn_of_user>", special=True), AddedToken("<think>", special=False)])
    tokenizer.chat_template = (
        "<|endoftext|>{% for m in messages %}<turn_of_user>{{ m['content'] }}<|im_end|>{% endfor %}<think>\n"
    )
    tokenizer.bos_token = tokenizer.eos_token = "<|endoftext|>"
    said = []
    texts = ["<turn_of_user>Is it?", "Think in <think>.", "Is it?"]
    given_prompts(DataSettings(), tokenizer, texts, None, said.append)
    (line,) = marked(said)
    assert line.startswith("warning: 1 of 3 ") and "'<turn_of_user>'" in line


def test_ids_of_a_row_are_used_as_they_are(start_model, user_error):
    tokenizer = load_tokenizer(str(start_model))
    chat = ({"role": "user", "content": "a"},)
    assert ids_in(Example(chat, columns={TOKEN_IDS: [1, 0]}), tokenizer) == (1, 0)
    assert ids_in(Example(chat, columns={TOKEN_IDS: None}), tokenizer) == ()
    for wrong, named in (
        ([1, -1], "-1"),
        ([len(tokenizer)], len(tokenizer)),
        ([0.5], "0.5"),
        ("12", "'12'"),
        (5, "'5'"),
    ):
        with user_error(named, TOKEN_IDS, "row 3"):
            ids_in(Example(chat, columns={TOKEN_IDS: wrong}, where="row 3"), tokenizer)
