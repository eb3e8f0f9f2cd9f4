"""Tests of --check prompts in whole commands with a tiny model."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from transformers import AddedToken

import train_grpo
import train_ppo
import train_rloo
from rlhf.api import check
from rlhf.config import parse_cli
from rlhf.data.prompts import Prompt
from rlhf.data.row import Example
from rlhf.data.sampler import drawn
from rlhf.settings.fields import to_dict
from rlhf.setup import scan as scanning
from rlhf.setup.build import load_components
from rlhf.setup.scan import scan_prompts, scan_results
from rlhf.setup.start_samples import Sampled, sample_and_score
from rlhf.utils.console import Screen
from rlhf.utils.errors import RunError, run_command
from tests.conftest import typed

CPU = torch.device("cpu")
FUNCTIONS = """
def odd(completions, completion_ids, topic, **_):
    return [float(sum(ids) % 2 and t != "hard") for ids, t in zip(completion_ids, topic)]
def zero(completions, **_):
    return [0.0] * len(completions)
def one(completions, **_):
    return [1.0] * len(completions)
def large(completions, completion_ids, **_):
    return [float(sum(ids) % 5) for ids in completion_ids]
"""


@pytest.fixture
def flags(run_flags, tmp_path):
    """Return a function that makes flags of a tiny run with topics and a reward function, named `rule`."""
    rows = [{"prompt": f"What is number {i}?", "topic": ("easy", "hard", "mid")[i % 3]} for i in range(90)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "scores.py").write_text(FUNCTIONS)

    def make(*more: object, rule: str = "odd") -> list[str]:
        reward = ["--rm-model", "none", "--reward-func", f"{tmp_path / 'scores.py'}:{rule}"]
        base = run_flags(*reward, "--prompts", tmp_path / "rows.jsonl", "--split", "0/80/20", "--batch-size", 8)
        return [*base, "--kl-schedule", "fixed", *map(str, more)]

    return make


def table(out: str) -> dict[str, list[str]]:
    """Return the cells of the printed table by the first one."""
    lines = out.split("samples of the start model:")[1].splitlines()[1:]
    return {cells[0]: cells[1:] for line in lines if len(cells := re.split(r"\s{2,}", line.strip())) > 5}


# --- the scan --------------------------------------------------------------------------------------------------------


def test_scan_prints_the_figures_and_a_command_that_trains_with_them(flags, tmp_path, capsys, monkeypatch):
    """The figures are those of the same completions, scored here. The printed command has the run's settings, and the
    command of another scan comes first, because the tiny model never ends a completion."""
    monkeypatch.setattr(scanning, "PROMPTS", 12)
    argv = flags("--K", 2, "--check", "prompts")
    train_grpo.main(argv)
    out = capsys.readouterr().out
    cells = table(out)
    assert cells["topic"] == ["prompts", "pass rate (95%)", "no difference", "never", "always", "in reach", "signal",
                              "no EOS"]  # fmt: skip
    assert {name: row[0] for name, row in cells.items()} == {"topic": "prompts", "easy": "4", "hard": "4", "mid": "4",
                                                             "all": "12"}  # fmt: skip
    assert cells["hard"][1].startswith("0.00 (0.00 to ")
    assert cells["hard"][2:7] == ["100%", "100%", "0%", "0%", "0"]
    config = parse_cli(argv, "grpo")
    parts = load_components(config, CPU, Screen())
    indices = drawn(parts.prompts.train, config.run.seed)[:12]
    sampled = sample_and_score(config, parts, indices, 8)
    solved = [sum(one.raw) for one in sampled]
    assert float(cells["all"][1].split()[0]) == pytest.approx(sum(solved) / (12 * 8), abs=0.005)
    assert float(cells["all"][6]) == pytest.approx(sum(c * (8 - c) / 56 for c in solved) / 12, abs=0.0005)
    again, command = (parse_cli(typed(line.strip()), "grpo") for line in out.splitlines() if "--actor-model" in line)
    assert changes(again, config) == {("sampling", "max_new_tokens")}
    assert again.sampling.max_new_tokens > config.sampling.max_new_tokens
    assert again.run.check == ("prompts",)
    assert ("run", "check") in changes(command, config) <= {("batch", "K"), ("batch", "batch_size"), ("run", "check")}
    assert command.episodes_per_update == config.episodes_per_update
    assert list(tmp_path.glob("run*")) == []


def changes(command, config) -> set[tuple[str, str]]:
    """Return (group, name) of the settings that differ."""
    return {
        (group, name)
        for group, values in to_dict(command).items()
        if isinstance(values, dict)
        for name, value in values.items()
        if value != to_dict(config)[group][name]
    }


def sampled(scores: list[float], ended: bool = True) -> Sampled:
    """Return the completions of one prompt with these scores of one function."""
    ends = [ended] * len(scores)
    texts = [f"text {i}" for i in range(len(scores))]
    return Sampled(Prompt((1,), Example(())), scores, scores, ends, len(texts), texts, {"right": scores})


HALF = [1.0, 0.0] * 4
NEVER = [0.0] * 8


@pytest.mark.parametrize(
    ("share", "ended", "names"),
    [
        (50, True, ["equal_groups"]),
        (50, False, ["cut_off", "equal_groups"]),
        (24, True, ["equal_groups", "out_of_reach"]),
        (0, False, ["cut_off", "never_fires", "nothing"]),
    ],
)
def test_findings_of_a_scan(configured, share, ended, names):
    config = configured("--K", 2, "--batch-size", 8, algorithm="grpo")
    rows = [sampled(HALF if i < share else NEVER, ended) for i in range(100)]
    scan = scan_results(config, rows, 8)
    assert [finding.name for finding in scan.findings] == names
    assert (scan.nothing is not None) == (share == 0)
    assert scan.examples == [("text 0", rows[0].raw[0])] + [("text 0", row.raw[0]) for row in rows[1:3]]


def test_scan_of_ppo_recommends_no_group_size(configured):
    """The critic is the baseline: groups with equal scores still teach."""
    rows = [sampled(HALF if i < 30 else NEVER, True) for i in range(100)]
    names = []
    for algorithm in ("ppo", "grpo"):
        scan = scan_results(configured("--K", 2, "--batch-size", 8, algorithm=algorithm), rows, 8)
        names.append(("equal_groups" in [finding.name for finding in scan.findings], scan.recommendation.K))
    assert names == [(False, None), (True, 8)]


def test_scan_of_each_script_and_of_a_reward_model(flags, run_flags, tmp_path, capsys, monkeypatch):
    """The old name of the flag has the same meaning."""
    monkeypatch.setattr(scanning, "PROMPTS", 6)
    monkeypatch.setattr(scanning, "SAMPLES", 9)
    for script, grouped in ((train_ppo, False), (train_rloo, True)):
        script.main(flags("--scan"))
        out = capsys.readouterr().out
        assert len([line for line in out.splitlines() if "6 training prompts x 9 " in line]) == 1
        assert ("groups of" in out) == grouped and "  algorithm  " not in out, "the plan is another part"
    train_ppo.main(run_flags("--scan", "--missing-eos-penalty", 1))
    cells = table(capsys.readouterr().out)
    assert cells["topic"] == ["prompts", "score (95%)", "no difference", "signal", "no EOS"]
    assert list(tmp_path.glob("run*")) == []


def test_scan_uses_at_least_k_completions(flags, capsys, monkeypatch):
    monkeypatch.setattr(scanning, "PROMPTS", 3)
    monkeypatch.setattr(scanning, "SAMPLES", 2)
    train_grpo.main(flags("--check", "prompts", "--K", 4))
    assert "3 training prompts x 4 " in capsys.readouterr().out


@pytest.mark.parametrize(("limit", "sizes"), [(100.0, [1, 2, 4, 4, 4, 4, 1]), (20.0, [1, 2, 4, 3]), (1.0, [1])])
def test_a_slow_machine_samples_fewer_prompts(configured, monkeypatch, capsys, limit, sizes):
    """With 2 seconds per prompt and a limit of 20, 10 of 20 prompts are sampled. A part has at most the episodes of an
    update, here 4 prompts x 8. One prompt is always sampled."""
    now = [0.0]
    found = []

    def sample(config, components, indices, samples):
        now[0] += 2.0 * len(indices)
        found.append(len(indices))
        return [sampled(HALF)] * len(indices)

    monkeypatch.setattr(scanning, "PROMPTS", 20)
    monkeypatch.setattr(scanning, "MOST_SECONDS", limit)
    monkeypatch.setattr(scanning, "sample_and_score", sample)
    monkeypatch.setattr(scanning.time, "monotonic", lambda: now[0])
    config = configured("--batch-size", 8, "--K", 4, algorithm="grpo")
    parts = load_components(config, CPU, Screen(quiet=True))
    scan = scan_prompts(config, parts, Screen())
    assert found == sizes and scan.overall.figures.prompts == sum(sizes)
    assert (f"note: {sum(sizes)} instead of 20 prompts" in capsys.readouterr().out) == (sum(sizes) < 20)


@pytest.mark.parametrize(
    ("rule", "more", "expected"),
    [
        ("zero", ["--max-new-tokens", 2], r"every score is 0 \(6 prompts\): --check prompts\. Fix: use a larger "
         r"--max-new-tokens; .*; use easier prompts"),
        ("one", [], r"every score is 1 .*every completion is solved: use harder prompts"),
        ("zero", ["--temperature", 0.01], r"all completions are equal for 100% of the prompts: raise --temperature"),
    ],
)  # fmt: skip
def test_nothing_to_learn_exits_with_2(flags, capsys, monkeypatch, rule, more, expected):
    monkeypatch.setattr(scanning, "PROMPTS", 6)
    argv = flags("--check", "prompts", *more, rule=rule)
    with pytest.raises(SystemExit) as raised:
        run_command(lambda: train_grpo.main([*argv, "--K", "2"]))
    printed = capsys.readouterr()
    assert raised.value.code == 2
    assert re.search(expected, printed.err), printed.err
    assert table(printed.out)["all"][2] == "100%"
    assert "train with" not in printed.out


def test_completions_depend_on_the_prompt_alone(flags):
    """Not on the other prompts, their order or the number of samples."""
    config = parse_cli(flags("--batch-size", 2), "ppo")
    parts = load_components(config, CPU, Screen())
    one_way = [s.raw for s in sample_and_score(config, parts, [4, 7, 9], 4)]
    other = [s.raw for s in sample_and_score(config, parts, [9, 4], 6)]
    assert [scores[:4] for scores in other] == [one_way[2], one_way[0]]


def test_drawn_prompts_are_spread_over_topics():
    prompts = [Prompt((i,), Example((), topic="a" if i < 20 else "b")) for i in range(25)]
    order = drawn(prompts, 1)
    assert sorted(order) == list(range(25))
    assert [prompts[i].example.topic for i in order[:10]] == ["a", "b"] * 5
    assert drawn(prompts, 2) != order


def test_penalty_and_missing_scores(configured, user_error):
    """Scores None are left out. A missing EOS costs the penalty in the signal, not in the pass rate."""
    config = configured("--K", 2, "--batch-size", 2, algorithm="grpo")
    prompt = Prompt((1,), Example(()))
    rows = [
        Sampled(prompt, [1.0, 0.0], [0.0, 0.0], [False, True], 2, ["a", "b"], {}),
        Sampled(prompt, [1.0], [1.0], [True] * 2, 1, ["c"], {}),
    ]
    found = scan_results(config, rows, 2)
    assert (found.overall.figures.prompts, found.overall.truncated) == (1, 0.5)
    assert "(1 prompt)" in found.nothing
    with user_error("--check prompts", 2, kind=RunError):
        scan_results(config, rows[1:], 2)


def test_tags_that_the_tokenizer_removes_are_named_if_a_function_never_fires(flags):
    config = parse_cli(flags(rule="zero"), "ppo")
    parts = load_components(config, CPU, Screen())
    parts.tokenizer.add_tokens([AddedToken(tag, special=True) for tag in ("<think>", "</think>")])
    found = {finding.name: finding.text for finding in scan_prompts(config, parts, Screen()).findings}
    assert "</think> <think>" in found["never_fires"]


def test_reward_functions_see_the_first_update(configured):
    seen = []

    def score(completions, trainer_state, **_):
        seen.append((trainer_state.global_step, trainer_state.max_steps))
        return [float(i % 2) for i, _ in enumerate(completions)]

    config = configured("--num-iterations", 3, "--check", "prompts")
    check(config, [f"question {i}?" for i in range(40)], rewards=[score])
    assert set(seen) == {(0, 3)}


# --- from Python -----------------------------------------------------------------------------------------------------


def test_python_functions_scan(configured, monkeypatch, capsys):
    """Even prompts are solved by half of the completions, odd ones never."""
    monkeypatch.setattr(scanning, "PROMPTS", 10)
    config = configured("--K", 2, "--check", "prompts", algorithm="grpo")
    prompts = [f"Number {i}?" for i in range(40)]

    def reward(prompts, completions, **_):
        return [
            float(len(c) % 2 and int(p.split()[1][:-1]) % 2 == 0) for p, c in zip(prompts, completions, strict=True)
        ]

    result = check(replace(config, in_python=True), prompts, [reward])
    out = capsys.readouterr().out
    assert "train_grpo.py" not in out and "make_config(..., max_new_tokens=16, check=('prompts',))" in out
    found = result.prompts
    assert result.reward is None and result.problems == []
    assert found.overall.figures.binary and found.overall.figures.prompts == 10 and 0 < found.overall.figures.mean < 1


def test_train_scans_with_the_given_settings(flags, capsys, monkeypatch):
    """The plan of a run sets the KL horizon. The recommended command does not contain it."""
    monkeypatch.setattr(scanning, "PROMPTS", 6)
    train_ppo.main([*flags("--check", "plan", "prompts"), "--kl-schedule", "adaptive"])
    out = capsys.readouterr().out
    assert "horizon" in out and "--kl-horizon" not in out
