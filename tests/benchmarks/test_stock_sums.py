"""Tests the comparison with stock TRL on smollm2-sums: equal rewards and prompts, the curve, and the tables."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOConfig

from benchmarks import stock_sums
from benchmarks.constants import TIMES
from benchmarks.stock_sums import EPISODES, reached, with_times
from benchmarks.stock_sums_training import DIFFERENCES, SETTINGS, STEPS, Curve, build, chat, reward_function
from rlhf.config import make_config
from rlhf.data.chat_template import encode_prompt
from rlhf.data.prompts import ids_alone
from rlhf.data.tokenizer import load_tokenizer
from rlhf.demo.parts import question_files
from rlhf.demo.ready import WEIGHTS
from rlhf.rewards.eval_functions import last_number
from rlhf.rollout.completions import Completions
from rlhf.settings.fields import to_dict

# completion, whether EOS was sampled, reward for the answer 12
CASES = [
    ("7 and 5 are 12", True, 1.0),
    ("7 and 5 are 12", False, 0.0),  # "123" may follow
    ("12 is the sum", False, 1.0),
    ("12, not 13", True, 0.0),
    ("a sum", True, 0.0),
    ("", True, 0.0),
]

# name in TRL -> name in this project
SAME = {
    "num_generations": "K",
    "num_iterations": "ppo_epochs",
    "steps_per_generation": "minibatches",
    "max_completion_length": "max_new_tokens",
    "lr_scheduler_type": "lr_schedule",
    "epsilon": "clip_range",
    **{name: name for name in ("temperature", "learning_rate", "gradient_checkpointing", "loss_type", "weight_decay")},
    **{name: name for name in ("adam_beta1", "adam_beta2", "max_grad_norm", "warmup_steps", "top_k", "top_p")},
}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(WEIGHTS))


@pytest.mark.parametrize("text, ended, reward", CASES)
def test_reward_is_that_of_this_project(tokenizer, text, ended, reward):
    """TRL passes the ids of a completion up to EOS, and its text as a message."""
    eos = tokenizer.eos_token_id
    ids = tokenizer.encode(text, add_special_tokens=False) + [eos] * ended
    stock = reward_function(eos)([[{"role": "assistant", "content": text}]], completion_ids=[ids], answer=["12"])
    sampled = torch.tensor([[*ids, *[eos] * ended]])  # after EOS, a rollout has more tokens
    ours = Completions.of([ids_alone([5])], sampled, eos=eos, pad=eos, vocabulary=len(tokenizer))
    assert ours.texts(tokenizer) == [text]
    assert stock == last_number(ours.texts(tokenizer), ["12"], ours.ended.tolist()) == [reward]


def test_prompts_are_those_of_this_project(tokenizer):
    for row in question_files("smollm2-sums")["eval.jsonl"][:3]:
        stock = tokenizer.apply_chat_template(chat(row), add_generation_prompt=True, return_dict=True)["input_ids"]
        assert stock == encode_prompt(tokenizer, chat(row))


def test_settings_are_those_of_the_recipe(tmp_path):
    """Those that TRL is given, and those of its defaults that the recipe shares. DIFFERENCES has the others."""
    parts = to_dict(make_config(algorithm="grpo", recipe="smollm2-sums")).values()
    ours = {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}
    stock = vars(GRPOConfig(**SETTINGS, output_dir=str(tmp_path), bf16=False, use_cpu=True))
    assert {name: stock[name] for name in SAME} == {name: ours[other] for name, other in SAME.items()}
    assert stock["per_device_train_batch_size"] * ours["minibatches"] == ours["batch_size"] * ours["K"] == EPISODES
    assert DIFFERENCES["scale_rewards"] == [ours["scale_rewards"], stock["scale_rewards"]]
    assert stock["gradient_accumulation_steps"] == 1 and stock["beta"] == 0.0


@torch.no_grad()
def test_prompts_of_unlike_lengths_end_at_the_position_that_is_continued(tmp_path, monkeypatch):
    arguments = SimpleNamespace(model=str(WEIGHTS), questions=8, minutes=1.0, bf16=False, seed=1)
    trainer, curve = build(arguments, output_dir=str(tmp_path), seed=1, bf16=False, use_cpu=True)
    given = []

    def generate(input_ids, attention_mask, **_):
        given.append(attention_mask)
        return torch.cat([input_ids, input_ids[:, -1:]], dim=1)

    monkeypatch.setattr(trainer.model, "generate", generate)
    rows = [{"question": question} for question in ("How much is 7 plus 5?", "7 + 5?")]
    assert len(curve.sample(trainer.model, rows)) == 2
    assert given[0][:, -1].all() and not given[0].all()


@pytest.mark.parametrize(
    "curve, found",
    [
        ([(0, 60, 0.1), (6, 360, 0.3), (12, 660, 0.5)], {"update": 9, "seconds": 510}),
        ([(0, 60, 0.1), (6, 1400, 0.3), (12, 2600, 0.5)], None),  # after 33 minutes
        ([(0, 60, 0.1), (6, 360, 0.39)], None),
    ],
)
def test_the_goal_is_interpolated_between_evaluations_and_has_a_time_limit(curve, found):
    points = [dict(zip(("update", "seconds", "accuracy"), point, strict=True)) for point in curve]
    assert reached(points) == (found and pytest.approx(found))


def test_a_run_of_stock_trl_has_the_times_until_each_evaluation():
    """Two evaluations of 10 and 8 s, and three updates of 20 s: the first evaluation began after 5 s."""
    run = {
        "updates": [20.0, 20.0, 20.0],
        "evaluations": [
            {"update": 0, "seconds": 15.0, "evaluation_seconds": 10.0},
            {"update": 3, "seconds": 84.0, "evaluation_seconds": 8.0},
        ],
        "seconds": {"total": 85.0},
    }
    found = with_times(run)
    assert [[one[name] for name in TIMES] for one in found["evaluations"]] == [[5.0, 10.0, 0.0, 0.0],
                                                                              [5.0, 18.0, 0.0, 60.0]]  # fmt: skip
    assert found["seconds"] == {"total": 85.0, "start": 5.0, "measuring": 18.0, "checkpoints": 0.0, "learning": 60.0}
    assert with_times(found) == found and with_times({"kind": "grpo"}) == {"kind": "grpo"}


# --- the curve -------------------------------------------------------------------------------------------------------


@pytest.fixture
def curve(monkeypatch):
    """A curve whose evaluations find 10%, then 39%, then 41% right answers, without a model."""
    accuracies = iter((0.10, 0.39, 0.41))

    def evaluate(self, model, update):
        self.start = 0.0
        self.evaluations.append({"update": update, "seconds": 0.0, "accuracy": next(accuracies)})

    monkeypatch.setattr(Curve, "evaluate", evaluate)
    return Curve(SimpleNamespace(eos_token_id=2), [], SimpleNamespace(minutes=1e9, bf16=False, seed=1))


def train(curve: Curve, steps: int) -> list[int]:
    """Return the optimizer steps after which the training stops."""
    control = SimpleNamespace(should_training_stop=False)
    stops = []
    curve.on_train_begin(None, None, control, model=None)
    for step in range(1, steps + 1):
        curve.on_step_end(None, SimpleNamespace(global_step=step), control, model=None)
        stops += [step] if control.should_training_stop else []
    return stops


def test_training_stops_at_the_goal(curve):
    """An update has 4 optimizer steps, and every sixth update is evaluated: 41% after update 12."""
    assert train(curve, 12 * STEPS) == [48]
    assert [one["update"] for one in curve.evaluations] == [0, 6, 12] and len(curve.updates) == 12


def test_training_stops_at_the_time_limit(curve):
    curve.minutes = 0.0
    assert train(curve, STEPS) == [4]
    assert [one["update"] for one in curve.evaluations] == [0, 1]


# --- tables ----------------------------------------------------------------------------------------------------------


def write_run(folder, name, curve, update_median, **facts):
    """Write a JSON file. `curve` has (update, seconds, accuracy) and, of runs that record it, TIMES."""
    folder.mkdir(exist_ok=True)
    names = ("update", "seconds", "accuracy", *TIMES)
    facts |= {"machine": {"processor": "EPYC", "card": None}, "settings": {"bf16": False}}
    facts["seconds"] = {"update_median": update_median, "total": curve[-1][1] + 30, **facts.get("seconds", {})}
    facts["evaluations"] = [dict(zip(names, point, strict=False)) for point in curve]
    (folder / f"{name}.json").write_text(json.dumps(facts), encoding="utf-8")


def test_table_of_finished_runs(tmp_path, capsys):
    """Start, measuring, checkpoints and learning of a run are those that it recorded. Without them, learning is the
    number of updates times the median update, and the others are unknown."""
    ours = tmp_path / "ours"
    stock = tmp_path / "stock"
    memory = tmp_path / "memory.json"
    for seed, seconds in ((1, 300), (2, 600)):
        points = [(0, 60, 0.05), (6, seconds - 60, 0.39), (12, seconds, 0.40), (18, 2000, 0.5)]
        write_run(ours, f"grpo_{seed}", points, 20.0, kind="grpo", seed=seed)
    points = [(0, 60, 0.05, 30, 30, 0, 0), (6, 300, 0.3, 30, 60, 0, 210), (12, 600, 0.5, 30, 90, 12, 450)]
    whole = {"total": 660.0, "start": 30, "measuring": 96, "checkpoints": 48, "learning": 450}
    write_run(ours, "grpo_3", points, 40.0, kind="grpo", seed=3, seconds=whole)
    write_run(ours, "ppo_1", [(0, 1, 0.9)], 1.0, kind="ppo", seed=1)
    trl = {"versions": {"trl": "1.16.0"}, "set": []}
    write_run(stock, "trl-1_1", [(0, 60, 0.05), (6, 1200, 0.41)], 50.0, seed=1, **trl)
    for seed in (2, 3):
        write_run(stock, f"trl-1_{seed}", [(0, 60, 0.05), (6, 1500, 0.399)], 50.0, seed=seed, **trl)
    write_run(stock, "trl-1_beta=0_1", [(0, 60, 0.40)], 50.0, seed=1, versions=trl["versions"], set=["beta=0"])
    sides = {"ours": {"above_imports": 2**31}, "stock": {"above_imports": 3 * 2**31}}
    settings = {"algorithm": "grpo", "dtype": "float32"}
    memory.write_text(json.dumps({"memory": sides, "settings": settings, "stock_trl": "1.16.0"}), encoding="utf-8")
    stock_sums.main(["--table", "--ours", str(ours), "--results", str(stock), "--memory", str(memory)])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    here = ["float32, EPYC", "1, 2, 3"]
    assert rows[4][:3] == ["TRL 1.16.0, beta=0", "float32, EPYC", "1"]
    assert rows[0][5:9] == rows[6][5:9] == list(TIMES)
    assert rows[2:4] == [
        ["this project", *here, "5.00; 10.00; 7.50", "7.50", "-; -; 0.50", "-; -; 1.25", "-; -; 0.10",
         "4.00; 4.00; 5.50", "768; 768; 576", "768", "20.0"],
        ["TRL 1.16.0", *here, "19.47; not reached; not reached", "not reached", "-; -; -", "-; -; -", "-; -; -",
         "4.86; not reached; not reached", "373; not reached; not reached", "not reached", "50.0"],
    ]  # fmt: skip
    assert rows[8] == ["this project", *here, "33.83; 33.83; 11.00", "33.83", "-; -; 0.50", "-; -; 1.60", "-; -; 0.80",
                       "6.00; 6.00; 7.50", "18; 18; 12"]  # fmt: skip
    assert rows[-1] == ["GRPO, float32, TRL 1.16.0", "6.00 GiB", "2.00 GiB", "3.00"]


def test_finished_run_is_skipped(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(stock_sums, "version", lambda _: "1.12.0")
    (tmp_path / "trl-1.12.0_bfloat16_beta=0_7.json").write_text("{}", encoding="utf-8")
    stock_sums.main(["--seed", "7", "--bf16", "--set", "beta=0", "--results", str(tmp_path)])
    assert "trl-1.12.0_bfloat16_beta=0_7.json" in capsys.readouterr().out
