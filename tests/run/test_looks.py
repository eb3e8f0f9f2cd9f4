"""Tests of --dry-run and --check in whole commands: what they import, load, print and refuse, and the exit status."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest

import rlhf.setup.build
import train_grpo
import train_ppo
from rlhf.api import check
from rlhf.commands.train import train_command
from rlhf.config import make_config, parse_cli
from rlhf.rewards.probes import RIGHT
from rlhf.settings.training import PARTS
from rlhf.setup import scan
from rlhf.utils.errors import UserError, run_command
from tests.rewards.test_probes import BROKEN, HACKS
from tests.scripts.test_scripts import ROOT
from tests.setup.test_preflight import Usage

# --- the plan --------------------------------------------------------------------------------------------------------

SLOW = ("trl", "peft", "bitsandbytes", "scipy", "transformers.modeling_utils", "transformers.activations")


@pytest.mark.ci
def test_dry_run_does_not_import_the_training_loop(run_flags):
    """These imports take most of the time of a start. The plan needs config.json, headers and the tokenizer."""
    plain = run_flags("--dry-run")
    fit = run_flags("--dry-run", "--use-lora", "--fit", "8GB")
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import train_ppo\n"
        f"train_ppo.main({plain!r})\ntrain_ppo.main({fit!r})\n"
        f"found = [name for name in {SLOW} if name in sys.modules]\nassert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("first prompt with special tokens") == 2


@pytest.mark.parametrize("more", [[], ["--use-lora"]])
def test_the_plan_of_a_dry_run_is_the_plan_of_the_run(run_flags, capsys, more):
    """Except for the memory of the libraries, which a dry run does not import."""
    plans = []
    for mode in (["--dry-run"], ["--check", "plan"], []):
        train_ppo.main(run_flags(*more, *mode))
        output = capsys.readouterr().out
        plans.append([line for line in output[output.index("  algorithm") : output.index("first prompt")].splitlines()
                      if not line.strip().startswith(("memory", "parts, GiB"))])  # fmt: skip
    assert plans[0] == plans[1] == plans[2] and len(plans[0]) > 8


def test_the_plan_for_another_machine_has_its_memory(run_flags, capsys):
    train_ppo.main(run_flags("--dry-run", "--memory", "8GB"))
    output = capsys.readouterr().out
    assert " of 8.00 GiB" in output and "warning: the predicted peak" not in output
    train_ppo.main(run_flags("--dry-run", "--memory", "100MB"))
    output = capsys.readouterr().out
    assert " of 0.10 GiB" in output and " 0.10 GiB free" in output and output.count("GiB less)") == 3


# --- the parts of a check --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ()),
        (["--check"], PARTS),
        (["--check", "true"], PARTS),
        (["--check", "--seed", "3"], PARTS),
        (["--check", "reward", "prompts"], ("reward", "prompts")),
        (["--check", "update,plan"], ("update", "plan")),
        (["--check=plan"], ("plan",)),
        (["--no-check"], ()),
        (["--check", "false"], ()),
        (["--check-reward"], ("reward",)),
        (["--scan"], ("prompts",)),
        (["--no-scan"], ()),
    ],
)
def test_parts_on_the_command_line(words, parts):
    assert parse_cli(words).run.check == parts


@pytest.mark.parametrize(
    ("line", "parts"),
    [("check: true", PARTS), ("check: false", ()), ("check: [reward, plan]", ("reward", "plan")),
     ("check: prompts", ("prompts",)), ("scan: true", ("prompts",)), ("check_reward: true", ("reward",))],
)  # fmt: skip
def test_parts_in_a_file(tmp_path, line, parts):
    (tmp_path / "settings.yaml").write_text(line)
    assert parse_cli(["--config", str(tmp_path / "settings.yaml")]).run.check == parts
    assert parse_cli(["--config", str(tmp_path / "settings.yaml"), "--no-check"]).run.check == ()


@pytest.mark.parametrize(
    ("value", "parts"), [(True, PARTS), (False, ()), (("reward",), ("reward",)), ("update", ("update",)), ([], ())]
)
def test_parts_in_python(value, parts):
    assert make_config(check=value).run.check == parts


@pytest.mark.parametrize("words", [["--check", "reward", "--dry-run"], ["--scan", "--resume"]])
def test_contradictions_are_refused(words, user_error):
    with user_error("--check", words[-1]):
        parse_cli(words)


@pytest.fixture
def flags(run_flags, tmp_path):
    """Return a function that makes flags of a tiny run with the column `answer` and one function of BROKEN."""
    rows = [{"prompt": f"What is {i} + 10?", "answer": str(i + 10)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "broken.py").write_text(BROKEN)

    def make(rule: str, *more: object) -> list[str]:
        reward = ["--rm-model", "none", "--reward-func", f"{tmp_path / 'broken.py'}:{rule}"]
        data = ["--prompts", tmp_path / "rows.jsonl", "--split", "0/80/20"]
        return run_flags(*reward, *data, "--max-new-tokens", 64, "--kl-schedule", "fixed", *more)

    return make


def timed(out: str) -> list[str]:
    """Return the parts whose seconds are printed."""
    return re.findall(r"^(\w+): checked in [0-9]+\.[0-9] s$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("parts", "rule", "status"),
    [
        (("reward",), "right", None),
        (("reward",), "longer", 2),  # a hack
        (("reward",), "last_word", 2),  # fails with an empty completion
        (("reward", "prompts"), "longer", 2),
        (("reward", "prompts"), "right", 2),  # the tiny model solves nothing
        (("plan", "update"), "right", None),
        ((), "longer", None),
        ((), "last_word", 2),
    ],
)
def test_exit_status_and_seconds(flags, tmp_path, capsys, monkeypatch, parts, rule, status):
    """In a whole check, a hack is a warning. All parts are checked, also after one with problems. Nothing is
    written."""
    monkeypatch.setattr(scan, "PROMPTS", 4)
    loaded = []
    load = rlhf.setup.build.load_models
    monkeypatch.setattr(rlhf.setup.build, "load_models", lambda *given: loaded.append(1) or load(*given))

    def command():
        train_grpo.main(flags(rule, "--K", 2, "--check", *parts))

    if status is None:
        command()
    else:
        with pytest.raises(SystemExit) as raised:
            run_command(command)
        assert raised.value.code == status
    printed = capsys.readouterr()
    parts = parts or PARTS
    assert timed(printed.out) == list(parts)
    assert len(loaded) == (parts not in (("reward",), ("plan",))), "once, if a part needs it"
    assert ("  algorithm  " in printed.out) == ("plan" in parts)
    assert ("checks:\n" in printed.out) == ("update" in parts)
    if "reward" in parts:
        lines = [*printed.out.splitlines(), *printed.err.splitlines()]
        hacks = [line.split(":")[0] for line in lines if "hacks are paid" in line]
        assert hacks == ([] if rule != "longer" else ["warning" if parts == PARTS else "error"])
    assert not (tmp_path / "run").exists()


def test_failed_update_fails_the_whole_check(flags, capsys, monkeypatch):
    monkeypatch.setattr(scan, "PROMPTS", 4)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 0))
    with pytest.raises(UserError) as raised:
        train_grpo.main(flags("longer", "--K", 2, "--check"))
    assert [problem.place for problem in raised.value.problems] == ["--check update"]
    assert timed(capsys.readouterr().out) == list(PARTS)


def test_table_of_the_reward(flags, capsys):
    train_grpo.main(flags("right", "--K", 2, "--check", "reward"))
    out = capsys.readouterr().out
    table = out[out.index("mean scores of the probes of 16") :].splitlines()
    assert [line.split()[0] for line in table[1 : 2 + len(RIGHT) + len(HACKS)]] == [
        "probe", *(name.split()[0] for name in [*RIGHT, *HACKS])
    ]  # fmt: skip
    assert table[-2] == "no probe is paid like the right answer"


@pytest.mark.parametrize("more", [[], ["--num-iterations", 2, "--critic-warmup", 2]])
def test_reward_needs_no_batch_and_no_run(flags, run_flags, tmp_path, capsys, user_error, more):
    """Twenty rows, of which 15 are for training, and batches of 64. The update that a run needs after the warm-up of
    its critic does not matter either."""
    rows = [{"prompt": f"What is {i} + 10?", "answer": str(i + 10)} for i in range(20)]
    argv = flags("right", "--batch-size", 64, *more)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train_ppo.main([*argv, "--check", "reward"])
    assert timed(capsys.readouterr().out) == ["reward"]
    with user_error("64"):
        train_ppo.main([*argv, *([] if not more else ["--critic-warmup", "0"]), "--check", "plan", "reward"])


def test_command_without_right_answers_says_so(run_flags, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"Why {i}?"}) for i in range(40)))
    reward = ["--rm-model", "none", "--reward-func", "length_penalty", "--prompts", tmp_path / "rows.jsonl"]
    train_ppo.main(run_flags(*reward, "--split", "0/80/20", "--check-reward"))
    out = capsys.readouterr().out
    assert "no right answer " in out and "no probe is paid" not in out


def test_reward_model_is_scored_on_pairs(run_flags, monkeypatch, capsys):
    """The chosen completion is the right answer. The policy is not loaded."""
    monkeypatch.setattr(rlhf.setup.build, "load_models", lambda *_: pytest.fail("loaded"))
    try:
        train_ppo.main(run_flags("--max-new-tokens", 40, "--check", "reward"))
    except UserError as error:  # of a model with random weights
        assert "1 x reward_model" in str(error)
    out = capsys.readouterr().out
    assert "  right answer  " in out and "reward_model" in out


def test_a_check_builds_the_missing_parts_of_a_demo(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    train_command("grpo", ["--recipe", "demo-checker", "--check", "plan"])
    assert timed(capsys.readouterr().out) == ["plan"]
    assert (tmp_path / "demo_checker_parts" / "stamp.json").exists()


def test_a_program_gets_the_results(configured, monkeypatch, capsys):
    """Without parts in the configuration, all are checked. Problems are returned."""
    monkeypatch.setattr(scan, "PROMPTS", 4)

    def length(completions, **_):
        return [float(len(text)) for text in completions]

    prompts = [{"prompt": f"What is {i} + 10?", "answer": str(i + 10)} for i in range(40)]
    found = check(configured(), prompts, [length])
    assert timed(capsys.readouterr().out) == list(PARTS)
    assert found.problems == [] and found.reward.hacks() and found.prompts.overall.figures.prompts == 4
    found = check(configured("--check", "reward"), prompts, [length])
    assert found.prompts is None and [problem.place for problem in found.problems] == ["1 x length"]
