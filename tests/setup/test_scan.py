"""Tests of --scan in whole commands with a tiny model."""

from __future__ import annotations

import json
import re

import pytest
import torch

import train_grpo
import train_ppo
import train_rloo
from rlhf.api import scan
from rlhf.config import parse_cli
from rlhf.data.examples import Example
from rlhf.data.prompts import Prompt
from rlhf.settings.fields import replaced, to_dict
from rlhf.setup.build import load_components
from rlhf.setup.scan import results_of
from rlhf.setup.start_samples import Sampled, drawn, sample_and_score
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
    lines = out.split("scan of the start model:")[1].splitlines()[1:]
    return {cells[0]: cells[1:] for line in lines if len(cells := re.split(r"\s{2,}", line.strip())) > 5}


# --- the scan --------------------------------------------------------------------------------------------------------


def test_scan_prints_the_figures_and_a_command_that_trains_with_them(flags, tmp_path, capsys):
    """The figures are those of the same completions, scored here. The printed command has the run's settings, and the
    command of another scan comes first, because the tiny model never ends a completion."""
    argv = flags("--K", 2, "--scan", "--scan-prompts", 12)
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
    sampled = [one for part in sample_and_score(config, parts, indices, 8) for one in part]
    solved = [sum(one.raw) for one in sampled]
    assert float(cells["all"][1].split()[0]) == pytest.approx(sum(solved) / (12 * 8), abs=0.005)
    assert float(cells["all"][6]) == pytest.approx(sum(c * (8 - c) / 56 for c in solved) / 12, abs=0.0005)
    again, command = (parse_cli(typed(line.strip()), "grpo") for line in out.splitlines() if "--actor-model" in line)
    assert changes(again, config) == {("sampling", "max_new_tokens")}
    assert again.sampling.max_new_tokens > config.sampling.max_new_tokens
    allowed = {("batch", "K"), ("batch", "batch_size"), ("run", "scan"), ("run", "scan_prompts")}
    assert changes(command, config) <= allowed
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
    scan = results_of(config, rows, 8)
    assert [finding.name for finding in scan.findings] == names
    assert (scan.nothing is not None) == (share == 0)
    assert scan.examples == [("text 0", rows[0].raw[0])] + [("text 0", row.raw[0]) for row in rows[1:3]]


def test_scan_of_ppo_recommends_no_group_size(configured):
    """The critic is the baseline: groups with equal scores still teach."""
    rows = [sampled(HALF if i < 30 else NEVER, True) for i in range(100)]
    names = []
    for algorithm in ("ppo", "grpo"):
        scan = results_of(configured("--K", 2, "--batch-size", 8, algorithm=algorithm), rows, 8)
        names.append(("equal_groups" in [finding.name for finding in scan.findings], scan.recommendation.K))
    assert names == [(False, None), (True, 8)]


def test_scan_of_each_script_and_of_a_reward_model(flags, run_flags, tmp_path, capsys):
    for script, grouped in ((train_ppo, False), (train_rloo, True)):
        script.main(flags("--scan", "--scan-prompts", 6, "--scan-samples", 9))
        out = capsys.readouterr().out
        assert "6 training prompts x 9 " in out and ("groups of" in out) == grouped
    train_ppo.main(run_flags("--scan", "--scan-prompts", 6, "--missing-eos-penalty", 1))
    cells = table(capsys.readouterr().out)
    assert cells["topic"] == ["prompts", "score (95%)", "no difference", "signal", "no EOS"]
    assert list(tmp_path.glob("run*")) == []


def test_scan_uses_at_least_k_completions(flags, capsys):
    train_grpo.main(flags("--scan", "--scan-prompts", 3, "--scan-samples", 2, "--K", 4))
    assert "3 training prompts x 4 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rule", "more", "expected"),
    [
        ("zero", ["--max-new-tokens", 2], r"every score is 0 \(6 prompts\): --scan\. Fix: use a larger "
         r"--max-new-tokens; .*; use easier prompts"),
        ("one", [], r"every score is 1 .*every completion is solved: use harder prompts"),
        ("zero", ["--temperature", 0.01], r"all completions are equal for 100% of the prompts: raise --temperature"),
    ],
)  # fmt: skip
def test_nothing_to_learn_exits_with_2(flags, capsys, rule, more, expected):
    argv = flags("--scan", "--scan-prompts", 6, *more, rule=rule)
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
    one_way = [s.raw for part in sample_and_score(config, parts, [4, 7, 9], 4) for s in part]
    other = [s.raw for part in sample_and_score(config, parts, [9, 4], 6) for s in part]
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
    found = results_of(config, rows, 2)
    assert (found.overall.figures.prompts, found.overall.truncated) == (1, 0.5)
    assert "(1 prompt)" in found.nothing
    with user_error("--scan", 2, kind=RunError):
        results_of(config, rows[1:], 2)


def test_reward_functions_see_the_first_update(configured):
    seen = []

    def score(completions, trainer_state, **_):
        seen.append((trainer_state.global_step, trainer_state.max_steps))
        return [float(i % 2) for i, _ in enumerate(completions)]

    scan(configured("--num-iterations", 3), [f"question {i}?" for i in range(40)], rewards=[score])
    assert set(seen) == {(0, 3)}


# --- from Python -----------------------------------------------------------------------------------------------------


def test_python_functions_scan(configured):
    """Even prompts are solved by half of the completions, odd ones never."""
    config = replaced(configured("--K", 2, algorithm="grpo"), scan_prompts=10)
    prompts = [f"Number {i}?" for i in range(40)]

    def reward(prompts, completions, **_):
        return [
            float(len(c) % 2 and int(p.split()[1][:-1]) % 2 == 0) for p, c in zip(prompts, completions, strict=True)
        ]

    found = scan(config, prompts, [reward])
    assert found.binary and found.overall.figures.prompts == 10 and 0 < found.overall.figures.mean < 1


def test_train_scans_with_the_given_settings(flags, capsys):
    """The plan of a run sets the KL horizon. The recommended command does not contain it."""
    train_ppo.main([*flags("--scan", "--scan-prompts", 6), "--kl-schedule", "adaptive"])
    out = capsys.readouterr().out
    assert "horizon" in out and "--kl-horizon" not in out
