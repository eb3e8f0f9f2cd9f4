"""Tests training, scoring and calibrating reward models, and the errors for weak and invalid ones."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPTNeoXConfig,
    LlamaConfig,
    Qwen3Config,
)

from rlhf.checkpoints.model_folder import METRICS_FILE
from rlhf.data.prompts import Prompt
from rlhf.data.row import Example
from rlhf.data.splits import question_hash
from rlhf.rewards.calibration import show_record
from rlhf.rewards.checks import check_accuracy, check_leaks, check_unrecorded
from rlhf.rewards.functions import LearnedReward
from rlhf.rewards.pair_accuracy import pair_accuracy
from rlhf.rewards.reward_model import Calibration, RewardModel
from rlhf.rewards.rewards import Rewards
from rlhf.rewards.training import pair_ids, run_training, train_reward_model, usable_pairs
from rlhf.settings.reward_model import parse_reward_cli
from rlhf.utils.console import Screen
from tests.shapes import make_family, make_reward_model, make_start_model, smollm2_tokenizer
from tests.tensors import prefixed, rewritten, without

CPU = torch.device("cpu")
FRANCE = ({"role": "user", "content": "What is the capital of France?"},)


def pair(question: str, chosen: str, rejected: str, **more) -> Example:
    return Example(messages=({"role": "user", "content": question},), chosen=chosen, rejected=rejected, **more)


@pytest.fixture
def model(reward_folder) -> RewardModel:
    return RewardModel.load(str(reward_folder), CPU, None)


@pytest.fixture
def flags(start_model, tmp_path):
    """Return a function that makes the flags of a tiny training run on the given pairs."""

    def make(pairs, *more: object) -> list[str]:
        words = ["--pairs", pairs, "--base-model", start_model, "--actor-model", start_model,
                 "--rm-output", tmp_path / "rm", "--max-new-tokens", 6, "--rm-batch-size", 4, *more]  # fmt: skip
        return [str(word) for word in words]

    return make


@pytest.fixture(scope="module")
def learnable_pairs(tmp_path_factory):
    """Return a file of pairs in which the chosen completion contains "thanks". Length does not predict the choice."""
    path = tmp_path_factory.mktemp("pairs") / "polite.jsonl"
    with path.open("w") as file:
        for i in range(400):
            thanks = f"thanks {i % 7}"
            plain = f"go away {i % 5}"
            tail = " now" if i % 2 else ""
            row = {"question": f"question {i}", "chosen": thanks + tail, "rejected": plain, "flaw": f"kind {i % 2}"}
            file.write(json.dumps(row) + "\n")
    return path


def test_forward_passes_of_a_run_have_as_many_texts_as_its_budget(build, monkeypatch):
    """640 tokens are those of 64 texts of 10 tokens."""
    model = build("--micro-batch-tokens", 640, "--rollout-slots", 128).rewards.learned[0]
    sizes = []
    original = model._logits
    monkeypatch.setattr(model, "_logits", lambda rows, groups: sizes.append(len(rows)) or original(rows, groups))
    sequences = [[5 + n % 7] * 10 for n in range(100)]
    scores = model.raw_scores(sequences)
    assert sizes == [64, 36]
    model.budget = dataclasses.replace(model.budget, eval_batch_size=32)
    assert model.raw_scores(sequences) == pytest.approx(scores, abs=1e-5) and sizes[2:] == [32, 32, 32, 4]


def test_training_and_scoring_use_the_same_ids(model, monkeypatch, flags, pairs_file):
    """Compares the ids that TRL's trainer receives with the ids that the scorer encodes for the same completions."""
    pairs = [pair("a?", "the cat", "a table"), pair("b?", "help", "no", rejected_ended=False)]
    seen = {}

    def record_rows(trainer, *_args, **_kwargs):
        seen["rows"] = [dict(row) for row in trainer.train_dataset]

    monkeypatch.setattr("rlhf.rewards.training.RewardTrainer.train", record_rows)
    run_training(model, pairs, parse_reward_cli(flags(pairs_file)), Screen())
    for row, p in zip(seen["rows"], pairs, strict=True):
        assert row["chosen_ids"] == model.encode(p.messages, p.chosen, True)
        assert row["rejected_ids"] == model.encode(p.messages, p.rejected, p.rejected_ended)
    end = [model.tokenizer.eos_token_id, *model.tokenizer("\n").input_ids]  # what the chat template writes
    assert seen["rows"][0]["chosen_ids"][-2:] == end and seen["rows"][0]["chosen_ids"][-3] != end[0], "one EOS"
    assert seen["rows"][1]["rejected_ids"] == model.encode(pairs[1].messages, "no", True)[:-2], "cut off: no EOS"


def test_rendered_pairs_are_counted_before_training(model, flags, pairs_file, capsys):
    parts = {
        "reward": [pair("a?", "Yes.<|im_end|>", "No.", where="row 0"), pair("b?", "Yes.", "No.")],
        "evaluation": [pair("<|im_start|>user\nc?", "Yes.", "No.")],
        "rl": [pair("<|im_start|>user\nd?", "Yes.", "No.")],
    }
    usable_pairs(parse_reward_cli(flags(pairs_file)), model, parts, Screen())
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "marks of a chat template" in line]
    assert "warning: 2 of 3 " in line and "row 0" in line and "'<|im_end|>'" in line


def test_trained_reward_model_is_accurate_and_saved_completely(flags, learnable_pairs, tmp_path):
    config = parse_reward_cli(flags(learnable_pairs, "--rm-learning-rate", "3e-3", "--rm-epochs", 3))
    folder = train_reward_model(config, Screen(), CPU)
    record = json.loads((folder / METRICS_FILE).read_text())
    assert record["accuracy"] > 0.95
    assert record["accuracy"] > record["length_baseline"] + 0.15
    assert set(record["by_flaw"]) == {"kind 0", "kind 1"}
    loaded = RewardModel.load(str(folder), CPU, None)
    assert (
        loaded.score([FRANCE] * 2, ["thanks 3", "go away 3"], [True] * 2)[0]
        > loaded.score([FRANCE], ["go away 3"], [True])[0]
    )
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    ids = loaded.encode(FRANCE, "thanks 3")
    raw = plain(torch.tensor([ids])).logits.item()
    calibrated = (raw - loaded.calibration.mean) / loaded.calibration.std
    assert loaded.score([FRANCE], ["thanks 3"], [True])[0] == pytest.approx(calibrated, abs=1e-5)


def test_scores_are_calibrated_on_start_model_completions(flags, learnable_pairs, monkeypatch):
    """The saved model's scores of the calibration completions have mean 0 and variance 1."""
    recorded = {}
    original = RewardModel.raw_scores

    def record_first(self, sequences, groups=None):
        recorded.setdefault("first", [list(s) for s in sequences])
        return original(self, sequences, groups)

    monkeypatch.setattr(RewardModel, "raw_scores", record_first)
    config = parse_reward_cli(flags(learnable_pairs, "--calibration-prompts", 30))
    folder = train_reward_model(config, Screen(), CPU)
    loaded = RewardModel.load(str(folder), CPU, None)
    scale = loaded.calibration
    scores = [(raw - scale.mean) / scale.std for raw in original(loaded, recorded["first"])]
    assert len(scores) == 30
    assert sum(scores) / 30 == pytest.approx(0, abs=1e-4)
    assert torch.tensor(scores).var().item() == pytest.approx(1, abs=1e-3)
    assert json.loads((folder / METRICS_FILE).read_text())["calibration"]["source"].startswith("completions of")


def test_without_a_start_model_chosen_completions_calibrate(flags, learnable_pairs):
    words = flags(learnable_pairs, "--actor-model", "none")
    at = words.index("--max-new-tokens")  # nothing is sampled
    config = parse_reward_cli(words[:at] + words[at + 2 :])
    folder = train_reward_model(config, Screen(), CPU)
    assert json.loads((folder / METRICS_FILE).read_text())["calibration"]["source"] == "chosen completions"


def test_padding_does_not_change_a_score(model):
    completions = ["yes", "the cat is on the table and it lies near the river Seine, which helps", "no"]
    together = model.score([FRANCE] * 3, completions, [True] * 3)
    alone = [model.score([FRANCE], [completion], [True])[0] for completion in completions]
    assert together == pytest.approx(alone, abs=1e-5)
    assert len({round(s, 4) for s in alone}) == 3, "the scores must differ, or the test proves nothing"


def test_unended_completion_has_a_different_score(model):
    assert model.score([FRANCE], ["yes"], [True]) != model.score([FRANCE], ["yes"], [False])


def test_reward_model_with_another_tokenizer_scores_the_text(tmp_path, model):
    """The reward model uses its own tokenizer and chat template, not the policy's."""
    folder = make_reward_model(tmp_path / "other")
    other = RewardModel.load(str(folder), CPU, None)
    other.tokenizer.chat_template = "{% for m in messages %}Q {{ m['content'] }} A {% endfor %}"
    prompt = Prompt(ids=(1, 2, 3), example=Example(messages=FRANCE))  # ids of a policy's tokenizer
    scores = Rewards([LearnedReward(other)], None, model.tokenizer).score([prompt], ["yes"], [[9]], [True]).total
    ids = other.tokenizer("Q What is the capital of France? A Q yes A ", add_special_tokens=False).input_ids
    assert scores[0] == pytest.approx(other.model(torch.tensor([ids])).logits.item(), abs=1e-5)


# --- accuracy, checks and loading ------------------------------------------------------------------------------------


def test_pair_accuracy_of_known_scores(model, monkeypatch):
    """Scores are the first digits. The shorter completion is chosen in 2 of 4 pairs, with one tie: baseline 0.625."""
    monkeypatch.setattr(RewardModel, "score", lambda self, m, completions, e: [float(r[0]) for r in completions])
    pairs = [pair("a", "5", "1 long", flaw="x"), pair("b", "2", "4 long", flaw="x"),
             pair("c", "9 long", "1", flaw="y"), pair("d", "3", "3", flaw="y")]  # fmt: skip
    found = pair_accuracy(model, pairs)
    assert found == dict(
        accuracy=2.5 / 4, margin=(4 - 2 + 8 + 0) / 4, length_baseline=0.625, accuracy_against_baseline=1.0,
        by_flaw={"x": 0.5, "y": 0.75}, pairs=4,
    )  # fmt: skip


def test_a_length_baseline_without_a_wrong_pair(model, monkeypatch, capsys):
    """3 pairs in which the longer completion is chosen, and 2 ties: baseline 0.8."""
    monkeypatch.setattr(RewardModel, "score", lambda self, m, completions, e: [float(len(c)) for c in completions])
    found = pair_accuracy(model, [*[pair("a", "long", "b")] * 3, *[pair("a", "b", "c")] * 2])
    assert found["length_baseline"] == pytest.approx(0.8) and found["accuracy_against_baseline"] is None
    show_record(found | {"calibration": {"completions": 1, "source": "x"}}, Screen())
    printed = capsys.readouterr().out
    assert "against baseline  no pairs" in printed
    assert "may know only the length" in printed and "95% interval" in printed


@pytest.mark.parametrize(
    ("accuracy", "baseline", "good"), [(0.59, 0.5, False), (0.7, 0.87, False), (0.6, 0.6, True), (0.9, 0.6, True)]
)
def test_weak_reward_models_are_refused(capsys, accuracy, baseline, good, user_error):
    record = {"accuracy": accuracy, "length_baseline": baseline}
    if good:
        check_accuracy(record, METRICS_FILE, "rm", False, Screen())
        return
    with user_error(f"{accuracy:.3f}", f"{baseline:.3f}", "--allow-weak"):
        check_accuracy(record, METRICS_FILE, "rm", False, Screen())
    check_accuracy(record, METRICS_FILE, "rm", True, Screen())
    assert "Continuing because of --allow-weak-reward-model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("accuracy", "pairs", "baseline", "against", "parts"),
    [
        (7 / 11, 11, 0.5, None, [["coin", "0.308 to 0.891"]]),  # equal lengths
        (1.0, 14, 1.0, None, [["only the length", "1.000"]]),  # right answers are shorter in all pairs
        (0.9, 100, 0.9, 0.0, [["only the length"]]),
        (0.7, 10, 0.7, 0.0, [["coin"], ["only the length"]]),
        (0.9, 100, 0.9, 0.6, []),
        (0.9, 100, 0.6, None, []),  # 80 ties of the length, and the model is right in most of them
        (0.6, 20, 0.6, None, [["coin"], ["only the length"]]),
        (0.9, 671, 0.533, 0.88, []),  # the demo's
        (0.7, 20, 0.5, 0.5, [["coin"]]),
    ],
)
def test_weak_evidence_for_a_reward_model_is_a_warning(capsys, accuracy, pairs, baseline, against, parts):
    record = {"accuracy": accuracy, "pairs": pairs, "length_baseline": baseline, "accuracy_against_baseline": against}
    check_accuracy(record, METRICS_FILE, "rm", False, Screen())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(parts) and all(line.startswith("warning: ") and "--rm-model rm" in line for line in lines)
    assert all(part in line for line, found in zip(lines, parts, strict=True) for part in found)


def test_a_record_without_the_number_of_pairs_has_no_warning(capsys):
    check_accuracy({"accuracy": 0.6, "length_baseline": 0.6}, METRICS_FILE, "rm", False, Screen())
    assert capsys.readouterr().out == ""


def test_reward_model_without_record_is_checked_on_held_out_pairs(model, monkeypatch, capsys, user_error):
    weak = {"accuracy": 0.5, "length_baseline": 0.6, "pairs": 9}
    monkeypatch.setattr("rlhf.rewards.pair_accuracy.pair_accuracy", lambda *_: weak)
    with user_error(1):
        check_unrecorded(model, "rm", [pair("a", "b", "c")], False, Screen())
    monkeypatch.setattr("rlhf.rewards.pair_accuracy.pair_accuracy", lambda *_: weak | {"accuracy": 0.8})
    check_unrecorded(model, "rm", [pair("a", "b", "c")], False, Screen())
    check_unrecorded(model, "rm", [Example(messages=FRANCE)], False, Screen())
    assert "its accuracy is unknown" in capsys.readouterr().out


def test_models_without_exactly_one_score_are_refused(tmp_path, start_model, user_error):
    two = make_reward_model(tmp_path / "two", outputs=2)
    with user_error(2):
        RewardModel.load(str(two), CPU, None)
    no_pad = make_reward_model(tmp_path / "nopad", pad=None)
    with user_error():
        RewardModel.load(str(no_pad), CPU, None)
    with user_error("LlamaForCausalLM"):
        RewardModel.load(str(start_model), CPU, None)
    with user_error("nowhere"):
        RewardModel.load(str(tmp_path / "nowhere"), CPU, None)


def test_untrained_score_head_is_refused(reward_folder, tmp_path, user_error):
    folder = rewritten(reward_folder, tmp_path / "rm", without("score.weight"))
    with user_error("score.weight"):
        RewardModel.load(str(folder), CPU, None)


LAYER = "model.layers.1.self_attn.q_proj.weight"
OTHER_TENSORS = {
    "missing": (without(LAYER), ["1 missing", LAYER]),
    "unknown": (lambda t: t | {"model.layers.2.mlp.up_proj.weight": t[LAYER]}, ["1 unknown", "layers.2.mlp"]),
    "another shape": (lambda t: t | {LAYER: t[LAYER][:8]}, ["1 of another shape", LAYER]),
    "torch.compile": (prefixed("_orig_mod."), ["_orig_mod.", "wrapper"]),
}


@pytest.mark.parametrize("case", OTHER_TENSORS)
def test_a_reward_model_with_other_tensors_is_refused(case, reward_folder, tmp_path, user_error):
    change, parts = OTHER_TENSORS[case]
    folder = rewritten(reward_folder, tmp_path / "rm", change)
    with user_error(*parts, folder):
        RewardModel.load(str(folder), CPU, None)


def test_a_bias_of_the_score_head_is_refused(reward_folder, tmp_path, user_error):
    """transformers' head has no bias: the scores would be others than those of the model that was saved."""
    folder = rewritten(reward_folder, tmp_path / "rm", lambda t: t | {"score.bias": torch.ones(1)})
    with user_error("1 unknown", "score.bias"):
        RewardModel.load(str(folder), CPU, None)


def test_a_run_with_an_incomplete_reward_model_is_refused(reward_folder, run_flags, tmp_path, user_error):
    import train_grpo

    folder = rewritten(reward_folder, tmp_path / "rm", without(LAYER))
    for more in ((), ("--check",)):
        with user_error("1 missing", LAYER, folder) as error:
            train_grpo.main(run_flags("--rm-model", folder, "--K", 2, *more))
        assert error.value.exit_status == 2


@pytest.mark.parametrize("case", OTHER_TENSORS)
def test_a_base_model_with_other_tensors_is_refused(case, start_model, flags, pairs_file, tmp_path, user_error):
    change, parts = OTHER_TENSORS[case]
    base = rewritten(start_model, tmp_path / "base", change)
    with user_error(*parts, base):
        train_reward_model(parse_reward_cli(flags(pairs_file, "--base-model", base)), Screen(), CPU)


@pytest.mark.parametrize("name", ["Bert", "DebertaV2", "Albert", "Electra"])
def test_an_encoder_can_be_the_base_model(name, tmp_path):
    """Its file has the head of a masked language model, and no pooler and no classifier: both are new."""
    import transformers

    from rlhf.rewards.training import new_reward_model

    tokenizer = smollm2_tokenizer()
    shape = {
        **{"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"intermediate_size": 32, "embedding_size": 32, "max_position_embeddings": 64, "pad_token_id": 0},
    }
    config = getattr(transformers, f"{name}Config")(**shape)
    base = getattr(transformers, f"{name}ForMaskedLM")(config)
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    fresh = new_reward_model(parse_reward_cli(["--base-model", str(tmp_path / "base")]), CPU)
    kept = {name: weight for name, weight in base.base_model.named_parameters() if "pooler" not in name}
    found = dict(fresh.model.base_model.named_parameters())
    assert kept and all(torch.equal(weight, found[name]) for name, weight in kept.items())


@pytest.mark.parametrize(("kind", "tied"), [(Qwen3Config, True), (LlamaConfig, False), (GPTNeoXConfig, False)])
def test_a_base_model_has_a_language_model_head_and_no_score_head(kind, tied, tmp_path):
    """Also a head that is tied and nevertheless in the file, and GPT-NeoX's, which has another name there."""
    from rlhf.rewards.training import new_reward_model

    start = make_family(tmp_path / "start", smollm2_tokenizer(), kind, tie_word_embeddings=tied)
    change = (lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"]}) if tied else (lambda t: t)
    base = rewritten(start, tmp_path / "base", change)
    fresh = new_reward_model(parse_reward_cli(["--base-model", str(base)]), CPU)
    saved = AutoModelForCausalLM.from_pretrained(start)
    for name, weight in fresh.model.base_model.named_parameters():
        assert torch.equal(weight, saved.base_model.get_parameter(name)), name
    assert fresh.model.score.weight.shape[0] == 1


def test_base_model_with_pad_as_eos_gets_another_pad(tmp_path):
    """A new reward model has pad != EOS. Otherwise transformers would read the score one token before EOS."""
    from rlhf.rewards.training import new_reward_model

    base = make_start_model(tmp_path / "base")
    config = parse_reward_cli(["--base-model", str(base)])
    fresh = new_reward_model(config, CPU)
    assert fresh.model.config.pad_token_id != fresh.tokenizer.eos_token_id
    assert fresh.tokenizer.eos_token_id in pair_ids(fresh, pair("a", "b", "c"))["chosen_ids"][-2:]
    assert fresh.calibration == Calibration()


def test_questions_in_the_reward_models_training_data_are_reported(capsys):
    pairs = [pair(q, "x", "y") for q in ("a?", "b?", "c?")]
    parts = {"evaluation": pairs[:2], "training": pairs[2:]}
    check_leaks({"train_questions": [question_hash(pairs[0])]}, parts, "reward model", Screen())
    output = capsys.readouterr().out
    assert "trained on 1 of the 2 evaluation prompts' questions" in output and "training prompts" not in output
    check_leaks({}, parts, "reward model", Screen())
    assert capsys.readouterr().out == ""


def test_metrics_file_of_another_tool_is_ignored(tmp_path):
    folder = make_reward_model(tmp_path / "rm")
    (folder / METRICS_FILE).write_text('{"eval_loss": 0.3}')
    assert RewardModel.load(str(folder), CPU, None).record is None


def test_errors_are_found_before_training(flags, learnable_pairs, monkeypatch, tmp_path, user_error):
    monkeypatch.setattr("rlhf.rewards.training.run_training", lambda *_: pytest.fail("trained first"))
    with user_error("--actor-model", "nowhere"):
        train_reward_model(parse_reward_cli(flags(learnable_pairs, "--actor-model", "./nowhere")), Screen(), CPU)
    with user_error():
        train_reward_model(parse_reward_cli(flags(learnable_pairs, "--calibration-prompt-length", 2)), Screen(), CPU)
    assert not (tmp_path / "rm").exists()


class Rounding:
    """A reward model whose rounding depends on the batch. It counts the completions that it scores."""

    def __init__(self):
        self.calls = []

    def score(self, messages, completions, ended):
        self.calls.append(len(completions))
        return [len(m[0]["content"]) + len(text) + end + 1e-7 * i for i, (m, text, end) in
                enumerate(zip(messages, completions, ended, strict=True))]  # fmt: skip


def test_equal_completions_of_an_evaluation_have_one_score():
    """Across batches, too; another prompt, or the same text that was cut off, is another completion. In training each
    completion is scored."""
    rows = {"messages": [[{"role": "user", "content": c}] for c in ("a", "a", "bb", "a")]}
    given = ["yes", "yes", "yes", "yes"], [True, True, True, False]
    once = LearnedReward(Rounding())
    once.known = {}
    first = once(given[0], ended=given[1], **rows)
    again = once(given[0][::-1], messages=rows["messages"][::-1], ended=given[1][::-1])
    assert first == again[::-1] and first[0] == first[1] and len(set(first)) == 3 and once.model.calls == [3]
    training = LearnedReward(Rounding())
    scores = training(given[0], ended=given[1], **rows)
    assert scores[0] != scores[1] and training.model.calls == [4]
