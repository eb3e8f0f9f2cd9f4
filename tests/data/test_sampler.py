"""Tests the prompt sampler: prompts and topics of each update, topic metrics, run length, and resume without state."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

import train_ppo
from rlhf.analysis.curves import read_runs
from rlhf.api import make_trainer
from rlhf.callbacks import token_recorder
from rlhf.checkpoints.run_record import RunRecord
from rlhf.checkpoints.token_record import read_tokens, recorded_updates
from rlhf.config import make_config, parse_cli
from rlhf.data.prompts import Prompt
from rlhf.data.row import Example
from rlhf.data.sampler import PromptSampler, metric_names, planned_updates
from rlhf.reports.curve_chart import Chart
from rlhf.reports.curve_plots import draw
from rlhf.setup.memory import longest_batch
from tests.conftest import BY_TIER, attach
from tests.kills import differing
from tests.run.test_resume import Killed, interrupt

COUNTS = {"tea": 7, "rain": 3, "long walks": 5}  # prompts by topic, in order of first appearance


def prompts_by_topic() -> list[Prompt]:
    """Return prompts with the topics interleaved. The first prompts of the topics differ in length."""
    rows = []
    for i in range(max(COUNTS.values())):
        for number, (topic, count) in enumerate(COUNTS.items()):
            if i < count:
                example = Example(({"role": "user", "content": f"{topic} {i}"},), topic=topic)
                rows.append(Prompt((number, i, *[9] * (number if i == 0 else 0)), example))
    return rows


def sampled(*flags: object, updates: int, algorithm: str = "ppo") -> list[list[Prompt]]:
    config = parse_cli(["--batch-size", "2", *map(str, flags)], algorithm)
    sampler = PromptSampler(config, prompts_by_topic())
    return [sampler.prompts_of(update) for update in range(1, updates + 1)]


def topics_of(batches: list[list[Prompt]]) -> list[str]:
    for batch in batches:
        assert len({p.example.topic for p in batch}) == 1 and len(batch) == 2
    return [batch[0].example.topic for batch in batches]


def test_topics_alternate_after_steps_per_topic_updates():
    order = ["tea"] * 3 + ["rain"] * 3 + ["long walks"] * 3
    assert topics_of(sampled("--steps-per-topic", 3, updates=20)) == (order * 3)[:20]


def test_topic_resumes_at_its_next_prompt():
    """Each pass over a topic contains each of its prompts once, also if other topics come in between."""
    batches = sampled("--steps-per-topic", 2, updates=60)
    for topic, count in COUNTS.items():
        stream = [p.ids for batch in batches for p in batch if p.example.topic == topic]
        passes = [stream[at : at + count] for at in range(0, len(stream) - count + 1, count)]
        assert len(passes) >= 5 and all(len(set(one)) == count for one in passes)
        assert len({tuple(one) for one in passes}) > 1, "each pass must have a different order"


def test_prompt_order_depends_on_seed_and_topic():
    one, again, other = (sampled("--steps-per-topic", 2, "--seed", seed, updates=12) for seed in (1, 1, 2))
    assert one == again != other
    same = [Prompt((i,), Example(({"role": "user", "content": "x"},), topic=t)) for t in "ab" for i in range(8)]
    sampler = PromptSampler(parse_cli(["--steps-per-topic", "4", "--batch-size", "2"]), same)
    orders = [[p.ids for u in range(first, first + 4) for p in sampler.prompts_of(u)] for first in (1, 5)]
    assert orders[0] != orders[1], "two topics of the same size must have different orders"


def test_topics_are_ignored_without_steps_per_topic():
    batches = sampled(updates=15)  # two passes of 15 prompts
    stream = [p.ids for batch in batches for p in batch]
    assert set(Counter(stream).values()) == {2} and len(set(stream[:15])) == 15
    bare = [Prompt(p.ids, Example(p.example.messages)) for p in prompts_by_topic()]
    sampler = PromptSampler(parse_cli(["--batch-size", "2"]), bare)
    assert [[p.ids for p in sampler.prompts_of(u)] for u in range(1, 16)] == [[p.ids for p in b] for b in batches]


@pytest.mark.parametrize("algorithm", BY_TIER)
def test_training_uses_the_sampler_and_keeps_groups_together(build, topic_file, algorithm):
    trainer = build("--prompts", topic_file, "--steps-per-topic", 2, "--num-iterations", 7, algorithm=algorithm)
    group = trainer.config.group_size
    for update in range(1, 8):
        episodes = trainer.episodes_of(update)
        assert [e for e, _ in episodes] == list(range((update - 1) * 4, update * 4))
        assert [p for _, p in episodes][::group] == trainer.sampler.prompts_of(update)
        assert {p.example.topic for _, p in episodes} == {trainer.sampler.topic_of(update)}


def test_longest_batch_is_one_of_the_sampled_batches():
    prompts = prompts_by_topic()
    for flags in ([], ["--steps-per-topic", 2]):
        for updates in (1, 4, 9):
            config = parse_cli(["--batch-size", "2", "--K", "3", *map(str, flags)], "grpo")
            batches = sampled(*flags, updates=updates, algorithm="grpo")
            most = max(batches, key=lambda batch: sum(len(p.ids) for p in batch))
            assert longest_batch(config, prompts, updates) == [p for p in most for _ in range(3)]


LENGTHS = {
    "one round": (["--steps-per-topic", "50"], 150),
    "instead of the recipe's length": (["--recipe", "demo", "--steps-per-topic", "50"], 150),
    "rounds": (["--steps-per-topic", "50", "--epochs", "2.5"], 375),
    "updates": (["--steps-per-topic", "50", "--num-iterations", "7"], 7),
    "episodes": (["--steps-per-topic", "50", "--batch-size", "4", "--episodes", "41"], 11),
    "none": (["--recipe", "demo", "--steps-per-topic", "none"], 150),
    "without topics": (["--batch-size", "4"], 12),  # 3 passes of 15 prompts
}


@pytest.mark.parametrize("case", LENGTHS)
def test_run_length(case):
    words, updates = LENGTHS[case]
    assert planned_updates(parse_cli(words), prompts_by_topic()) == updates


def test_one_epoch_is_one_round_of_topics():
    sampler = PromptSampler(parse_cli(["--steps-per-topic", "2"]), prompts_by_topic())
    assert [sampler.epochs(u) for u in (0, 3, 6, 12)] == [0, 0.5, 1, 2]


def test_topic_names_in_metrics():
    names = metric_names(["C++", "C#", "a/b c", "???", "Größe", None, "C++", "x" * 99])
    assert names == {"C++": "C", "C#": "C_2", "a/b c": "a_b_c", "???": "topic", "Größe": "Größe", "x" * 99: "x" * 40}
    assert all(re.fullmatch(r"[\w.-]+", name) for name in names.values())


# --- in a run --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def topic_file(tmp_path_factory) -> Path:
    """122 pairs of three topics, grouped by topic. One question appears twice, with two topics."""
    file = tmp_path_factory.mktemp("topics") / "pairs.jsonl"
    rows = [
        {"question": f"What is {topic} number {i}?", "chosen": f"a {topic}", "rejected": f"no {i}", "topic": topic}
        for topic, count in (("tea & cake", 60), ("rain", 50), ("c/d", 10))
        for i in range(count)
    ]
    rows += [{**rows[0], "question": "What is it?", "topic": topic} for topic in ("rain", "c/d")]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.fixture
def topic_flags(start_model, reward_folder, topic_file, tmp_path):
    def make(*more: object, output: str = "run") -> list[str]:
        flags = ["--actor-model", start_model, "--rm-model", reward_folder, "--prompts", topic_file,
                 "--max-new-tokens", 6, "--eval-prompts", 12, "--allow-weak-reward-model", "--steps-per-topic", 3,
                 "--save-every", 2, "--eval-every", 4, "--learning-rate", "1e-2",
                 "--output", tmp_path / output]  # fmt: skip
        return [str(word) for word in (*flags, *more)]

    return make


def test_run_by_topics_is_logged_plotted_and_recorded_by_topic(topic_flags, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(token_recorder, "UPDATES", 1)
    train_ppo.main(topic_flags("--record-tokens"))
    output = capsys.readouterr().out
    (topics,) = [line for line in output.splitlines() if line.strip().startswith("topics")]
    assert " 3, 3 updates" in topics and ": tea & cake (" in topics
    assert "update 1/9 | topic tea & cake | score" in output and "update 9/9 | topic c/d | score" in output
    run = read_runs([tmp_path / "run"])[0]
    for name, updates in {"tea_cake": [1, 2, 3], "rain": [4, 5, 6], "c_d": [7, 8, 9]}.items():
        assert run.scalars[f"topic/{name}/score"].updates.tolist() == updates
        for kind, whole in (("score", "rewards/mean"), ("kl", "kl_divergence")):
            of_topic = run.scalars[f"topic/{name}/{kind}"].values.tolist()
            assert of_topic == [run.scalars[whole].values.tolist()[u - 1] for u in updates]
    chart = Chart([run], "updates", 1)
    axes = draw(chart).axes
    assert chart.topics == ["tea_cake", "rain", "c_d"] and len(axes) == 6
    assert [[line.get_label() for line in a.lines] for a in axes[2:4]] == [
        ["topic tea_cake", "topic rain", "topic c_d"]
    ] * 2
    assert axes[2].lines[1].get_xdata().tolist() == [4, 5, 6]
    rows = [json.loads(r) for r in (tmp_path / "run" / "samples" / "update-000004.jsonl").read_text().splitlines()]
    for topic, name in (("tea & cake", "tea_cake"), ("rain", "rain")):
        scores = [row["score"] for row in rows if row["topic"] == topic]
        evaluated = run.scalars[f"topic/{name}/eval_score"]
        assert evaluated.updates.tolist() == [0, 4, 8, 9]
        assert evaluated.values[1] == pytest.approx(sum(scores) / len(scores), abs=1e-5)
    recorded = {f.stem: {row["topic"] for row in read_tokens(f)} for f in recorded_updates(tmp_path / "run", "-")}
    assert recorded["update-000003"] == {"tea & cake"} and recorded["update-000004"] == {"rain"}


def test_without_steps_per_topic_the_column_is_only_recorded(build, topic_file, tmp_path):
    flags = ("--prompts", topic_file, "--num-iterations", 1, "--record-tokens", "--max-new-tokens", 4)
    trainer = build(*flags)
    attach(trainer)
    trainer.train()
    assert trainer.sampler.topics == [] and trainer.sampler.topic_of(1) is None
    assert not [name for entry in trainer.host.state.log_history for name in entry if name.startswith("topic")]
    (file,) = (tmp_path / "run" / "tokens").iterdir()
    topics = {p.example.topic for p in trainer.train_prompts}
    assert {row["topic"] for row in read_tokens(file)} <= topics and len(topics) == 3
    sample = json.loads((tmp_path / "run" / "samples" / "update-000000.jsonl").read_text().splitlines()[0])
    assert sample["topic"] == trainer.evaluation_prompts[0].example.topic


def test_question_with_two_topics_is_a_prompt_of_each(configured, topic_file):
    import torch

    from rlhf.setup.build import load_components
    from rlhf.utils.console import Screen

    def topics_of_it(*flags):
        config = configured("--prompts", topic_file, "--split", "0/90/10", *flags)
        sets = load_components(config, torch.device("cpu"), Screen()).prompts
        return [p.example.topic for p in (*sets.train, *sets.evaluation) if p.example.question == "what is it?"]

    assert topics_of_it("--eval-prompts", 99, "--steps-per-topic", 2) == ["rain", "c/d"]
    assert topics_of_it("--eval-prompts", 99) == ["rain"], "without --steps-per-topic it is one prompt"


# 6: in the middle of a topic, 8: after the first update of a topic
@pytest.mark.ci
@pytest.mark.parametrize("update", [6, 8])
def test_resume_in_the_middle_of_a_topic(topic_flags, tmp_path, monkeypatch, update):
    more = ["--num-iterations", 11]  # reaches the second round
    train_ppo.main(topic_flags(*more, output="whole"))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        interrupt(patch, update, Killed())
        train_ppo.main(topic_flags(*more))
    train_ppo.main(["--resume", "--output", str(tmp_path / "run")])
    assert differing(tmp_path / "whole", tmp_path / "run") == []
    samples = [sorted((tmp_path / one / "samples").iterdir()) for one in ("whole", "run")]
    assert [f.read_bytes() for f in samples[0]] == [f.read_bytes() for f in samples[1]]


def test_resume_refuses_changed_topics(topic_flags, topic_file, tmp_path, monkeypatch, user_error):
    mine = tmp_path / "mine.jsonl"
    mine.write_text(topic_file.read_text())
    with monkeypatch.context() as patch, pytest.raises(Killed):
        interrupt(patch, 5, Killed())
        train_ppo.main(topic_flags("--prompts", mine))
    mine.write_text(topic_file.read_text().replace('"topic": "rain"', '"topic": "snow"'))
    with user_error("topics_sha256"):
        train_ppo.main(["--resume", "--output", str(tmp_path / "run")])
    assert "topics_sha256" in RunRecord.read(tmp_path / "run").data


def test_callbacks_receive_every_topic_after_a_round(build, topic_file):
    calls = []
    trainer = build("--prompts", topic_file, "--steps-per-topic", 1, "--num-iterations", 6,
                    callbacks=[lambda epoch, metrics: calls.append((epoch, metrics))])  # fmt: skip
    trainer.train()
    assert [epoch for epoch, _ in calls] == [1, 2]
    logged = [entry for entry in trainer.host.state.log_history if "topic/rain/score" in entry]
    assert [metrics["topic/rain/score"] for _, metrics in calls] == [e["topic/rain/score"] for e in logged]
    assert {"topic/tea_cake/kl", "topic/c_d/score"} <= calls[0][1].keys()


def test_python_prompts_can_have_topics(start_model, tmp_path, user_error):
    config = make_config(actor_model=str(start_model), batch_size=2, max_new_tokens=4, steps_per_topic=1, ppo_epochs=1,
                         output=str(tmp_path / "run"))  # fmt: skip
    rows = [
        {"prompt": "a cat?", "topic": "pets"},
        {"prompt": "a car?", "topic": "things"},
        {"prompt": "a dog?", "topic": "pets"},
    ]
    trainer = make_trainer(config, rows, [lambda completions, **_: [0.0] * len(completions)])
    assert trainer.sampler.topics == ["pets", "things"] and trainer.updates == 2
    metrics = trainer.train()
    assert {"topic/pets/score", "topic/things/score"} <= metrics.keys() | trainer.host.state.log_history[1].keys()
    with user_error("prompt 2", "['prompt']", "--steps-per-topic"):
        make_trainer(config, [rows[0], "a car?"], [lambda completions, **_: [0.0] * len(completions)])
