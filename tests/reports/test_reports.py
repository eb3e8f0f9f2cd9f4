"""Tests evaluate_generations.py and compare_runs.py end to end."""

from __future__ import annotations

import json
import re
import shutil

import pytest

import compare_runs
import evaluate_generations
from rlhf.utils.errors import UserError


def arguments(*values: object) -> list[str]:
    return [str(value) for value in values]


@pytest.fixture
def evaluation(runs, tmp_path, capsys):
    """Return a function that runs `evaluate_generations.py` and returns evaluation.json and the console output."""

    def run(*flags: object) -> tuple[dict, str]:
        evaluate_generations.main(arguments(*flags, "--output", tmp_path / "out"))
        output = re.sub(r"\s+", " ", capsys.readouterr().out)
        return json.loads((tmp_path / "out" / "evaluation.json").read_text(encoding="utf-8")), output

    return run


def test_evaluation_of_two_runs_with_default_settings(evaluation, runs):
    """Four ranked completions for each of up to 20 prompts, for a full model and an adapter."""
    report, facts = evaluation("--model-path", runs["ppo", 1], runs["grpo", 1])
    counts = re.search(
        r"(\d+) drawn at random from (\d+) held-out prompts.*?--num-prompts 20 is more than there are", facts
    )
    assert int(counts[1]) == int(counts[2]) == len(report["prompts"]) < 20, "all held-out prompts are used"
    assert [m["which"] for m in report["models"]] == ["final", "final"]
    assert "(final, after update 2)" in facts and "evaluation.html" in facts
    for prompt in report["prompts"]:
        assert prompt["sides"][0]["model"] == "start model" and len(prompt["sides"]) == 3
        for side in prompt["sides"]:
            rows = side["completions"]
            assert len(rows) == 4 and rows[0]["label"] == "BEST"
            scores = [row["score"] for row in rows]
            assert scores == sorted(scores, reverse=True)
            assert [row["rank"] for row in rows] == [1 + sum(s > score for s in scores) for score in scores]
    one = report["models"][0]
    assert one["figures"]["score"] == pytest.approx(
        sum(r["score"] for p in report["prompts"] for r in p["sides"][1]["completions"]) / (4 * len(report["prompts"]))
    )
    assert one["base"] is None and report["models"][1]["base"] is not None
    assert report["start"]["figures"]["kl"] == 0
    found = {c["name"]: c for c in report["contrasts"] if c["measure"] == "score"}
    assert list(found) == [f"{m['label']} - start model" for m in report["models"]]
    gain = one["figures"]["score"] - report["start"]["figures"]["score"]
    assert found[f"{one['label']} - start model"]["difference"]["value"] == pytest.approx(gain)


def test_checkpoint_is_evaluated_with_the_settings_of_its_run(evaluation, runs):
    report, facts = evaluation("--model-path", runs["grpo", 1] / "checkpoint-2", "--num-prompts", 2)
    assert report["models"][0]["which"] == "checkpoint-2" and "(checkpoint-2, after update 2)" in facts


def test_which_best_evaluates_the_best_checkpoint(evaluation, runs, tmp_path):
    folder = shutil.copytree(runs["ppo", 1], tmp_path / "run")
    facts = json.loads((folder / "run.json").read_text())  # on some CPUs, the best one is the start model
    (folder / "run.json").write_text(json.dumps({**facts, "best": {**facts["best"], "update": 1}}))
    report, shown = evaluation("--model-path", folder, "--which", "best", "--num-prompts", 2)
    assert report["models"][0]["which"] == "best" and "(best, after update 1)" in shown


@pytest.mark.ci
def test_adapter_trained_on_4_bit_weights_is_evaluated_on_4_bit_weights(
    start_model, reward_folder, pairs_file, tmp_path
):
    """Perplexities before and after training equal those of the run, which had 4-bit frozen weights."""
    import train_ppo

    train_ppo.main(arguments("--actor-model", start_model, "--rm-model", reward_folder, "--prompts", pairs_file,
                         "--output", tmp_path / "run", "--num-iterations", 2, "--max-new-tokens", 8, "--use-lora",
                         "--load-in-4bit", "--learning-rate", "1e-2", "--allow-weak-reward-model"))  # fmt: skip
    evaluate_generations.main(
        arguments("--model-path", tmp_path / "run", "--num-prompts", 3, "--output", tmp_path / "out")
    )
    report = json.loads((tmp_path / "out" / "evaluation.json").read_text(encoding="utf-8"))
    run = json.loads((tmp_path / "run" / "run.json").read_text())["figures"]
    after = report["models"][0]["figures"]
    assert report["start"]["figures"]["perplexity"] == pytest.approx(run["perplexity_before"], rel=1e-4)
    assert after["perplexity"] == pytest.approx(run["perplexity_after"], rel=1e-4)
    assert after["perplexity"] != pytest.approx(run["perplexity_before"], rel=1e-4) and after["kl"] != 0


def test_latest_run_in_the_current_folder_is_the_default(evaluation, runs, monkeypatch, tmp_path):
    monkeypatch.chdir(runs["ppo", 1].parent)
    report, _ = evaluation("--num-prompts", 2)
    assert report["models"][0]["label"].startswith("grpo_2"), "the run that started last"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run in the current folder: --model-path"):
        evaluation()


def test_tokens_flag_writes_a_token_page(runs, tmp_path, capsys):
    evaluate_generations.main(arguments("--tokens", runs["grpo", 1], "--output", tmp_path / "out"))
    assert "1 of 1 recorded updates" in capsys.readouterr().out
    page = (tmp_path / "out" / "tokens.html").read_text(encoding="utf-8")
    assert "GRPO, recipe smollm2-orca, seed 1" in page


# --- compare_runs.py -------------------------------------------------------------------------------------------------


@pytest.fixture
def comparison(tmp_path, capsys):
    def run(*flags: object, full: bool = True) -> tuple[dict, str]:
        flags += ("--full",) if full else ()
        limit = () if "--limit-minutes" in flags else ("--limit-minutes", 0)
        sizes = "--num-prompts", 4, "--completions", 2
        compare_runs.main(arguments(*flags, *limit, *sizes, "--output", tmp_path / "out"))
        output = re.sub(r"\s+", " ", capsys.readouterr().out)
        return json.loads((tmp_path / "out" / "comparison.json").read_text(encoding="utf-8")), output

    return run


def test_ppo_against_grpo_over_seeds(comparison, runs, tmp_path):
    report, message = comparison(*runs.values())
    assert len(report["verdict"]) == 3
    assert "PPO" in report["verdict"][0] and "GRPO" in report["verdict"][0]
    assert "after 8 episodes each" in report["verdict"][0]
    assert all("95% confidence interval over seeds and prompts" in sentence for sentence in report["verdict"])
    assert all("start model" in sentence and "perplexity x" in sentence for sentence in report["verdict"][1:])
    for sentence in report["verdict"]:
        assert re.sub(r"\s+", " ", sentence) in message
    assert {c["name"] for c in report["contrasts"]} == {"PPO - start model", "GRPO - start model", "PPO - GRPO"}
    assert {c["over"] for c in report["contrasts"]} == {"seeds and prompts"}
    assert [list(report["figures"][name]) for name in ("PPO", "GRPO")] == [["1", "2"], ["1", "2"]]
    assert report["spent"]["PPO"]["1"]["episodes"] == 8 and report["spent"]["GRPO"]["2"]["completion_tokens"] > 0
    costs = report["spent"]["PPO"]["1"]
    assert 0 < costs["cpu_seconds"] < 100 * costs["seconds"]
    assert [report["arms"][name]["settings"]["use_lora"] for name in ("PPO", "GRPO")] == ["false", "true"]
    page = (tmp_path / "out" / "comparison.html").read_text(encoding="utf-8")
    assert str(tmp_path.parent) not in page and str(runs["ppo", 1].parent) not in page, "no path of this machine"
    for words in ("over prompts", "peak memory", "win rate", "distinct-2", "completion tokens"):
        assert words in page
    assert all((tmp_path / "out" / f"{name}.png").is_file() for name in ("score_against_kl", "forest"))


def test_equal_budgets_use_the_evaluations_during_training(comparison, runs):
    report, _ = comparison(runs["ppo", 1], runs["grpo", 1])
    by_episodes, by_time, *_ = report["at_equal"]
    assert by_episodes["budget"] == "8 episodes" and by_time["budget"].endswith("of training")
    means = {}
    for name, run in (("PPO", runs["ppo", 1]), ("GRPO", runs["grpo", 1])):
        rows = [json.loads(line) for line in (run / "samples" / "update-000002.jsonl").open()]
        means[name] = sum(row["score"] for row in rows) / len(rows)
    [found] = by_episodes["differences"]
    assert (found["name"], found["over"]) == ("PPO - GRPO", "prompts")
    assert found["value"] == pytest.approx(means["PPO"] - means["GRPO"])


def test_comparison_of_single_seeds_has_a_caveat(comparison, runs):
    report, facts = comparison(runs["ppo", 1], runs["grpo", 2], full=False)
    assert report["headline"] in facts and not any(sentence in facts for sentence in report["verdict"])
    assert {c["over"] for c in report["contrasts"]} == {"prompts"}
    assert "one model (PPO: seed 1, GRPO: seed 2) does not show how much the result depends on the seed" in facts
    assert not any("over seeds" in sentence for sentence in report["verdict"])


def copy_with_settings(run, folder, **settings):
    """Copies a run and changes settings in the copy's run.json."""

    shutil.copytree(run, folder)
    facts = json.loads((folder / "run.json").read_text())
    for name, value in settings.items():
        group = next(g for g in facts["settings"].values() if isinstance(g, dict) and name in g)
        group[name] = value
    facts["seed"] = settings.get("seed", facts["seed"])
    if settings:  # otherwise it is a copy of the run
        facts["id"] += folder.name
    (folder / "run.json").write_text(json.dumps(facts))
    return folder


def test_runs_that_cannot_be_pooled_are_refused(comparison, runs, start_model, tmp_path):
    twice = copy_with_settings(runs["ppo", 1], tmp_path / "twice")
    with pytest.raises(UserError, match=r"two runs of PPO have the seed 1: .*ppo_1 and .*twice\. Give each seed once"):
        comparison(runs["ppo", 1], twice)


@pytest.mark.ci
def test_two_settings_of_one_algorithm_and_another_algorithm(comparison, runs, tmp_path):
    """Names, verdict, tables and JSON have the settings in which the groups differ."""
    other = [copy_with_settings(runs["ppo", s], tmp_path / f"other{s}", learning_rate=0.5) for s in (1, 2)]
    report, text = comparison(runs["ppo", 1], runs["ppo", 2], *other, runs["grpo", 1])
    names = ["PPO learning_rate 0.01", "PPO learning_rate 0.5", "GRPO"]
    assert list(report["arms"]) == names and list(report["figures"]) == ["start", *names]
    settings = [report["arms"][name]["settings"] for name in names]
    found = [(each["learning_rate"], each["use_lora"]) for each in settings]
    assert found == [("0.01", "false"), ("0.5", "false"), ("0.01", "true")]
    assert [c["name"] for c in report["contrasts"][3:]] == [
        f"{names[0]} - {names[1]}", f"{names[0]} - {names[2]}", f"{names[1]} - {names[2]}",
    ]  # fmt: skip
    same = f"No significant difference between {names[0]} and {names[1]} by score"
    assert report["verdict"][0].startswith(same) and "3 pairs are compared" in text


@pytest.mark.ci
def test_models_of_other_trainers_and_baselines_are_arms(comparison, runs, start_model, tmp_path):
    flags = runs["ppo", 1], "--arm", f"DPO={start_model}", "best-of-2", "start", "--limit-minutes", 0.01
    report, _ = comparison(*flags)
    assert list(report["arms"]) == ["PPO", "DPO", "best-of-2"]
    assert [c["name"] for c in report["contrasts"]] == [
        *(f"{name} - start model" for name in report["arms"]), "PPO - DPO", "PPO - best-of-2", "DPO - best-of-2",
    ]  # fmt: skip
    for start, _, same, _ in (prompt["sides"] for prompt in report["samples"]):
        assert start["completions"] == same["completions"], "the same random numbers"
    assert report["figures"]["start"]["score"] == pytest.approx(report["best_of"]["measures"]["score"][0])
    assert report["figures"]["best-of-2"]["best-of-2"]["score"] >= report["figures"]["start"]["score"]
    samples = report["best_of"]["n"][-1]
    assert samples >= 8 and len(report["best_of"]["measures"]["score"]) == samples
    before = (tmp_path / "out" / "start_samples.json").stat().st_mtime_ns
    again, _ = comparison(*flags)
    assert (tmp_path / "out" / "start_samples.json").stat().st_mtime_ns == before, "used again"
    assert again["best_of"] == report["best_of"] and again["verdict"] == report["verdict"]
    comparison(*flags, "--seed", 1)
    assert (tmp_path / "out" / "start_samples.json").stat().st_mtime_ns != before, "other random numbers"


def test_comparison_reports_unequal_budgets(comparison, runs, tmp_path):
    longer = copy_with_settings(runs["grpo", 1], tmp_path / "longer")
    facts = json.loads((longer / "run.json").read_text())
    facts["plan"]["episodes"] = 800
    (longer / "run.json").write_text(json.dumps(facts))
    report, _ = comparison(runs["ppo", 1], longer)
    assert "after UNEQUAL budgets (8 to 800 episodes)" in report["verdict"][0]


def test_budget_counts_the_episodes_of_the_evaluated_weights(comparison, runs):
    """With `--which best`, the episodes up to the best checkpoint count, not those of the whole run."""
    best_update = {name: json.loads((run / "run.json").read_text())["best"]["update"] for name, run in runs.items()}
    one = ("ppo", 1)
    two = ("grpo", 1)
    report, _ = comparison(runs[one], runs[two], "--which", "best")
    low, high = sorted((best_update[one] * 4, best_update[two] * 4))
    message = f"after {low} episodes each" if low == high else f"after UNEQUAL budgets ({low} to {high} episodes)"
    assert message in report["verdict"][0]


@pytest.mark.parametrize("case", ["corrupted samples", "no samples", "output is a file", "output under a file"])
def test_comparison_reports_errors_before_sampling(runs, tmp_path, capsys, case):

    run = shutil.copytree(runs["ppo", 1], tmp_path / "run")
    output = tmp_path / "out"
    flags = arguments(run, runs["grpo", 1], "--num-prompts", 2, "--completions", 1, "--limit-minutes", 0)
    (tmp_path / "file").write_text("")
    if case == "no samples":
        shutil.rmtree(run / "samples")
        compare_runs.main([*flags, "--output", str(output)])
        printed = re.sub(r"\s+", " ", capsys.readouterr().out)
        assert "a run has no stored evaluations, so there is no comparison at equal episodes" in printed
        return
    if case == "corrupted samples":
        (run / "samples" / "update-000001.jsonl").write_text('{"prompt": [')
        message = "incomplete or corrupted: .*update-000001.jsonl"
    else:
        output = tmp_path / "file" if case == "output is a file" else tmp_path / "file" / "x"
        message = "not a folder: --output"
    with pytest.raises(UserError, match=message):
        compare_runs.main([*flags, "--output", str(output)])
    assert "completions" not in capsys.readouterr().out, "nothing was sampled"


def test_mistyped_run_is_not_searched_on_the_hub(comparison, runs, monkeypatch):
    monkeypatch.chdir(runs["ppo", 1].parent)
    with pytest.raises(UserError, match="run not found: ppo_l. Did you mean ppo_"):
        comparison("ppo_l", "grpo_1")


def test_model_without_a_run_reports_the_recipe_of_its_settings(evaluation, start_model, pairs_file, user_error):
    with user_error(start_model, ": --like smollm2-orca. ", "--rm-model"):
        evaluation("--model-path", start_model, "--prompts", pairs_file)


def test_model_without_a_start_model_reports_what_is_missing(evaluation, start_model, reward_folder, pairs_file):
    _, text = evaluation("--model-path", start_model, "--prompts", pairs_file, "--rm-model", reward_folder,
                         "--num-prompts", 3, "--completions", 2)  # fmt: skip
    assert "no start model: no comparison and no audit (give one with --baseline)" in text
    assert "only 3 prompts: figures and intervals are approximate" in text


def test_runs_of_different_versions_can_be_pooled(comparison, runs, tmp_path):
    """Settings that are missing in one of the runs, and recording settings, do not prevent pooling."""
    other = copy_with_settings(runs["ppo", 2], tmp_path / "other", record_tokens=True)
    facts = json.loads((other / "run.json").read_text())
    del facts["settings"]["optimizer"]["max_grad_norm"]
    facts["settings"]["optimizer"]["of_another_release"] = 1
    (other / "run.json").write_text(json.dumps(facts))
    report, _ = comparison(runs["ppo", 1], other)
    assert {name: list(runs) for name, runs in report["figures"].items() if name != "start"} == {"PPO": ["1", "2"]}


# --- completions without a score -------------------------------------------------------------------------------------

SOMETIMES = """
def sometimes(completions, want):
    return [None if w == "none" else float(len(text)) for text, w in zip(completions, want)]


def never(completions, **_):
    return [None] * len(completions)
"""


@pytest.fixture
def partly_scored(tmp_path):
    """Flags of an evaluation in which the reward function applies to four of six prompts."""
    rows = [{"question": f"What is number {i}?", "want": "none" if i in (1, 4) else "text"} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rules.py").write_text(SOMETIMES)
    rules = tmp_path / "rules.py"
    return ["--prompts", tmp_path / "rows.jsonl", "--reward-func", f"{rules}:sometimes"], rules


def one_reward(run, folder):
    """Copies a run that has a reward model into one without."""
    return copy_with_settings(run, folder, rm_model=None, reward_func=["length_penalty"])


def test_prompts_without_a_score_are_counted_and_shown(evaluation, runs, partly_scored, tmp_path):
    flags, _ = partly_scored
    run = one_reward(runs["ppo", 1], tmp_path / "run")
    report, text = evaluation("--model-path", run, *flags)
    _, note = report["notes"]
    assert note.startswith("16 of 48 completions have no score") and "2 of 6 prompts are left out" in note
    assert note in text and "no score: " in text
    unscored = [row for i in (1, 4) for side in report["prompts"][i]["sides"] for row in side["completions"]]
    assert {(row["score"], row["rank"], row["label"]) for row in unscored} == {(None, None, None)}
    assert all(row["rank"] for row in report["prompts"][0]["sides"][0]["completions"])
    scores = [
        row["score"] for p in report["prompts"] for row in p["sides"][1]["completions"] if row["score"] is not None
    ]
    assert len(scores) == 16 and report["models"][0]["figures"]["score"] == pytest.approx(sum(scores) / 16)
    page = (tmp_path / "out" / "evaluation.html").read_text(encoding="utf-8")
    assert page.count('<span class="tag MEDIUM">no score</span>') == 16
    assert ": NaN" not in page
