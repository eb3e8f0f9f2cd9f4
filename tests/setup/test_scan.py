"""Tests of --scan and --keep-pass-rate in whole commands with a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train_grpo
import train_ppo
import train_rloo
from rlhf.api import make_trainer, scan
from rlhf.checkpoints.model_folder import WEIGHTS_FILE
from rlhf.checkpoints.run_log import RunLog
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import parse_cli
from rlhf.data.examples import Example
from rlhf.data.prompts import Prompt
from rlhf.settings.fields import replaced, to_dict
from rlhf.setup.build import load_components
from rlhf.setup.pass_rates import PASS_RATES_FILE, PassRates
from rlhf.setup.scan import results_of
from rlhf.setup.start_samples import Sampled, drawn, sample_and_score
from rlhf.trainer.loop import OnPolicyLoop
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
    indices = drawn(parts.prompts.train, config.run.seed, by_topic=True)[:12]
    sampled = [one for part in sample_and_score(config, parts, indices, 8) for one in part]
    solved = [sum(one.raw) for one in sampled]
    assert float(cells["all"][1].split()[0]) == pytest.approx(sum(solved) / (12 * 8), abs=0.005)
    assert float(cells["all"][6]) == pytest.approx(sum(c * (8 - c) / 56 for c in solved) / 12, abs=0.0005)
    again, command = (parse_cli(typed(line.strip()), "grpo") for line in out.splitlines() if "--actor-model" in line)
    assert changes(again, config) == {("sampling", "max_new_tokens")}
    assert again.sampling.max_new_tokens > config.sampling.max_new_tokens
    allowed = {("batch", "K"), ("batch", "batch_size"), ("run", "scan"), ("run", "scan_prompts")}
    assert changes(command, config) <= allowed, "no filter: the pass rates are those of cut-off completions"
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
    ends, texts = [ended] * len(scores), [f"text {i}" for i in range(len(scores))]
    return Sampled(Prompt((1,), Example(())), scores, scores, ends, len(texts), texts, {"right": scores})


HALF, NEVER = [1.0, 0.0] * 4, [0.0] * 8


@pytest.mark.parametrize(
    ("share", "ended", "available", "names", "filtered"),
    [
        (50, True, 1000, ["equal_groups"], True),
        (50, False, 1000, ["cut_off", "equal_groups"], False),  # the pass rates of unfinished completions
        (24, True, 100_000, ["equal_groups", "out_of_reach"], False),  # a few percent of the prompts
        (50, True, 40, ["equal_groups"], False),  # fewer than three batches
        (0, False, 1000, ["cut_off", "never_fires", "nothing"], None),
    ],
)
def test_scan_keeps_no_few_percent_of_the_prompts(configured, share, ended, available, names, filtered):
    config = configured("--K", 2, "--batch-size", 8, algorithm="grpo")
    rows = [sampled(HALF if i < share else NEVER, ended) for i in range(100)]
    scan = results_of(config, rows, available, 8)
    assert [finding.name for finding in scan.findings] == names
    assert (scan.recommendation and scan.recommendation.keep_pass_rate is not None) == filtered
    assert (scan.nothing is not None) == (share == 0)
    assert scan.examples == [("text 0", rows[0].raw[0])] + [("text 0", row.raw[0]) for row in rows[1:3]]


def test_scan_of_ppo_recommends_no_group_size(configured):
    """The critic is the baseline: groups with equal scores still teach."""
    rows = [sampled(HALF if i < 30 else NEVER, True) for i in range(100)]
    names = []
    for algorithm in ("ppo", "grpo"):
        scan = results_of(configured("--K", 2, "--batch-size", 8, algorithm=algorithm), rows, 1000, 8)
        names.append(("equal_groups" in [finding.name for finding in scan.findings], scan.recommendation.K))
    assert names == [(False, None), (True, 4)]


def test_scan_of_each_script_and_of_a_reward_model(flags, run_flags, tmp_path, capsys, snapshot):
    for script, grouped in ((train_ppo, False), (train_rloo, True)):
        script.main(flags("--scan", "--scan-prompts", 6, "--scan-samples", 9))
        out = capsys.readouterr().out
        (line,) = [line for line in out.splitlines() if "6 training prompts x 9 " in line]
        assert ("groups of" in out) == grouped
        snapshot(line)
    train_ppo.main(run_flags("--scan", "--scan-prompts", 6, "--missing-eos-penalty", 1))
    cells = table(capsys.readouterr().out)
    assert cells["topic"] == ["prompts", "score (95%)", "no difference", "signal", "no EOS"]
    assert list(tmp_path.glob("run*")) == []


def test_scan_uses_at_least_k_completions(flags, capsys, snapshot):
    train_grpo.main(flags("--scan", "--scan-prompts", 3, "--scan-samples", 2, "--K", 4))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "3 training prompts x 4 " in line]
    snapshot(line)


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
    order = drawn(prompts, 1, by_topic=True)
    assert sorted(order) == list(range(25))
    assert [prompts[i].example.topic for i in order[:10]] == ["a", "b"] * 5
    assert drawn(prompts, 2, by_topic=True) != order
    assert [prompts[i].example.topic for i in drawn(prompts, 1, by_topic=False)[:10]] != ["a", "b"] * 5


def test_penalty_and_missing_scores(configured, user_error, snapshot):
    """Scores None are left out. A missing EOS costs the penalty in the signal, not in the pass rate."""
    config = configured("--K", 2, "--batch-size", 2, algorithm="grpo")
    prompt = Prompt((1,), Example(()))
    rows = [
        Sampled(prompt, [1.0, 0.0], [0.0, 0.0], [False, True], 2, ["a", "b"], {}),
        Sampled(prompt, [1.0], [1.0], [True] * 2, 1, ["c"], {}),
    ]
    found = results_of(config, rows, 10, 2)
    assert (found.overall.figures.prompts, found.overall.truncated) == (1, 0.5)
    assert "(1 prompt)" in found.nothing
    snapshot(found.nothing)
    with user_error("--scan", 2, kind=RunError):
        results_of(config, rows[1:], 10, 2)


# --- --keep-pass-rate ------------------------------------------------------------------------------------------------


def rates(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / PASS_RATES_FILE).read_text().splitlines()]


def test_kept_prompts_are_trained_on_and_resumed_without_sampling(flags, tmp_path, capsys, monkeypatch, snapshot):
    """An interrupted and resumed run ends with the same weights as an uninterrupted one, bit by bit."""
    argv = flags("--keep-pass-rate", 0.2, 0.8, "--save-every", 1, "--num-iterations", 3, "--scan-samples", 4)
    train_ppo.main([*argv, "--output", str(tmp_path / "whole")])
    out = capsys.readouterr().out
    run = RunRecord.read(tmp_path / "whole")
    rows = rates(tmp_path / "whole")
    kept = [row for row in rows if row["kept"]]
    assert all((0.2 <= row["pass_rate"] <= 0.8) == row["kept"] for row in rows)
    assert {row["topic"] for row in kept} == {"easy", "mid"}
    assert run.pass_rates == {"prompts": len(rows), "episodes": 4 * len(rows), "kept": len(kept)}
    assert run.data["train_prompts"] == len(kept) < len(rows)
    (line,) = [line for line in out.splitlines() if f"kept {len(kept)} of {len(rows)} " in line]
    assert "from 0.2 to 0.8 (" in line and "hard 0 of " in out
    snapshot(line, varying=r"\d+ of \d+")
    original = OnPolicyLoop.update_step
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(OnPolicyLoop, "update_step", lambda self, n: interrupted() if n == 3 else original(self, n))
        train_ppo.main(argv)
    monkeypatch.setattr("rlhf.setup.pass_rates.sample_pass_rates", lambda *_: pytest.fail("sampled again"))
    rule = argv[argv.index("--reward-func") + 1]
    train_ppo.main(["--resume", "--output", str(tmp_path / "run"), "--reward-func", rule])
    weights = [load_file(tmp_path / name / WEIGHTS_FILE) for name in ("whole", "run")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert rates(tmp_path / "run") == rows
    assert RunRecord.read(tmp_path / "run").pass_rates == run.pass_rates


def interrupted():
    raise KeyboardInterrupt


def test_resume_refuses_lost_or_changed_pass_rates(flags, tmp_path, user_error):
    argv = flags("--keep-pass-rate", 0.2, 0.8, "--save-every", 1, "--num-iterations", 1)
    train_ppo.main(argv)
    file = tmp_path / "run" / PASS_RATES_FILE
    rule = argv[argv.index("--reward-func") + 1]
    more = ["--resume", "--resume-anyway", "--num-iterations", "2", "--output", str(tmp_path / "run")]
    resume = lambda *words: train_ppo.main([*more, "--reward-func", rule, *words])  # noqa: E731
    text = file.read_text()
    file.write_text(text.replace("true", "false").replace('"pass_rate": 0', '"pass_rate": 2'))
    with user_error("0.2", "0.8", 8):
        resume()
    file.write_text(text[: len(text) // 2])
    with user_error("--resume"):
        resume()
    file.unlink()
    with user_error("--resume", "--keep-pass-rate"):
        resume()


def test_sampling_stops_when_the_run_has_enough_prompts(flags, tmp_path):
    """One update of 8 prompts needs 8 of the 72."""
    train_ppo.main(flags("--keep-pass-rate", 0, 1, "--num-iterations", 1, "--scan-samples", 2))
    assert [row["kept"] for row in rates(tmp_path / "run")] == [True] * 8


def test_checks_of_the_prompts_are_repeated_for_the_kept_ones(flags, tmp_path, capsys, user_error):
    """With all prompts the run has more updates than --critic-warmup, with the kept ones it has not."""
    words = flags("--keep-pass-rate", 0.2, 0.8, "--critic-warmup", 5, "--epochs", 1, "--scan-samples", 4)
    at = words.index("--num-iterations")
    del words[at : at + 2]
    with user_error("--critic-warmup 5"):
        train_ppo.main(words)
    assert not (tmp_path / "run").exists()


def test_topics_without_a_kept_prompt_are_counted(flags, capsys):
    words = flags("--keep-pass-rate", 0.2, 0.8, "--steps-per-topic", 1, "--scan-samples", 4, "--epochs", 1)
    at = words.index("--num-iterations")
    del words[at : at + 2]
    train_ppo.main(words)
    assert "hard 0 of " in capsys.readouterr().out


def test_reward_functions_see_the_first_update(configured):
    seen = []

    def score(completions, trainer_state, **_):
        seen.append((trainer_state.global_step, trainer_state.max_steps))
        return [float(i % 2) for i, _ in enumerate(completions)]

    scan(configured("--num-iterations", 3), [f"question {i}?" for i in range(40)], rewards=[score])
    assert set(seen) == {(0, 3)}


@pytest.mark.ci
def test_seeds_have_their_own_pass_rates(flags, tmp_path):
    train_grpo.main(flags("--keep-pass-rate", 0.2, 0.8, "--K", 2, "--batch-size", 4, "--seeds", 1, 2))
    one, two = (rates(tmp_path / f"run_seed{seed}") for seed in (1, 2))
    assert one and two and one != two


@pytest.mark.parametrize("look", ["--dry-run", "--check", "--scan"])
def test_a_look_samples_no_pass_rates(flags, tmp_path, capsys, monkeypatch, look, snapshot):
    monkeypatch.setattr("rlhf.setup.pass_rates.sample_pass_rates", lambda *_: pytest.fail("sampled"))
    train_ppo.main(flags("--keep-pass-rate", 0.2, 0.8, look))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  pass rates ")]
    snapshot(line)
    assert not (tmp_path / "run").exists()


def test_a_run_without_the_setting_samples_nothing(flags, tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf.setup.pass_rates.sample_and_score", lambda *_: pytest.fail("sampled"))
    train_ppo.main(flags("--num-iterations", 1))
    assert not (tmp_path / "run" / PASS_RATES_FILE).exists()
    assert "pass_rates" not in json.loads((tmp_path / "run" / "run.json").read_text())


@pytest.mark.parametrize(
    ("rule", "limits", "parts"),
    [("large", (0.2, 0.8), [": --keep-pass-rate. "]), ("zero", (0.2, 0.8), ["0 of ", "0.2", "0.8", "8: "])],
)
def test_refusals_leave_no_run_folder(flags, tmp_path, rule, limits, parts, user_error):
    with user_error(*parts, varying=r"(?<=score )\d|(?<=0 of )\d+"):
        train_ppo.main(flags("--keep-pass-rate", *limits, rule=rule))
    assert not (tmp_path / "run").exists()


# --- from Python -----------------------------------------------------------------------------------------------------


def test_python_functions_scan_and_filter(configured):
    """Even prompts are solved by half of the completions, odd ones never."""
    config = replaced(configured("--keep-pass-rate", 0.1, 0.9, "--K", 2, algorithm="grpo"), scan_prompts=10)
    prompts = [f"Number {i}?" for i in range(40)]

    def reward(prompts, completions, **_):
        return [
            float(len(c) % 2 and int(p.split()[1][:-1]) % 2 == 0) for p, c in zip(prompts, completions, strict=True)
        ]

    found = scan(config, prompts, [reward])
    assert found.binary and found.overall.figures.prompts == 10 and 0 < found.overall.figures.mean < 1
    trainer = make_trainer(config, prompts, [reward])
    numbers = [int(p.example.question.split()[1][:-1]) for p in trainer.train_prompts]
    assert len(numbers) >= 4 and all(number % 2 == 0 for number in numbers)


def test_train_scans_with_the_given_settings(flags, capsys):
    """The plan of a run sets the KL horizon. The recommended command does not contain it."""
    train_ppo.main([*flags("--scan", "--scan-prompts", 6), "--kl-schedule", "adaptive"])
    out = capsys.readouterr().out
    assert "horizon" in out and "--kl-horizon" not in out


@pytest.mark.parametrize("killed_in", [(PassRates, "write"), (RunLog, "add")], ids=["pass rates", "run.json"])
def test_run_that_was_killed_between_two_files_at_its_start_resumes(flags, tmp_path, monkeypatch, killed_in):
    """The second file is pass_rates.jsonl, the third one run.json with the numbers of pass rates. The run has no
    checkpoint, so it starts again, and samples again. An error ends the start of a run as a kill does."""
    argv = flags("--keep-pass-rate", 0.2, 0.8, "--num-iterations", 1, "--scan-samples", 4)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*killed_in, lambda *_, **__: interrupted())
        train_ppo.main(argv)
    assert (tmp_path / "run" / PASS_RATES_FILE).exists() == (killed_in[0] is RunLog)
    train_ppo.main(["--resume", "--output", str(tmp_path / "run"), "--reward-func", f"{tmp_path / 'scores.py'}:odd"])
    run = RunRecord.read(tmp_path / "run")
    assert run.status == "finished" and run.pass_rates["prompts"] == len(rates(tmp_path / "run"))
