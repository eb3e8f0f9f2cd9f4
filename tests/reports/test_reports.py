"""The scripts that look at runs, as a user runs them: evaluate_generations.py and compare_runs.py end to end."""

from __future__ import annotations

import json
import re

import pytest

import compare_runs
import evaluate_generations
from rlhf.utils.errors import UserError


def words(*given: object) -> list[str]:
    return [str(word) for word in given]


@pytest.fixture
def evaluation(runs, tmp_path, capsys):
    """(evaluation.json, what the console said) of `evaluate_generations.py` with flags."""

    def run(*flags: object) -> tuple[dict, str]:
        evaluate_generations.main(words(*flags, "--output", tmp_path / "out"))
        output = re.sub(r"\s+", " ", capsys.readouterr().out)
        return json.loads((tmp_path / "out" / "evaluation.json").read_text(encoding="utf-8")), output

    return run


def test_the_references_command(evaluation, runs):
    """20 prompts x 4 completions, ranked, as far as there are prompts; adapter and whole model side by side."""
    report, facts = evaluation("--model-path", runs["ppo", 1], runs["grpo", 1])
    asked = re.search(
        r"(\d+) drawn at random from (\d+) held-out prompts.*?--num-prompts 20 is more than there are", facts
    )
    assert int(asked[1]) == int(asked[2]) == len(report["prompts"]) < 20, "all that there are"
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
    assert {"win_rate", "score", "perplexity_ratio"} <= set(one["against_start"])
    assert report["start"]["figures"]["kl"] == 0


def test_a_checkpoint_is_evaluated_with_its_runs_settings(evaluation, runs):
    report, facts = evaluation("--model-path", runs["grpo", 1] / "checkpoint-2", "--num-prompts", 2)
    assert report["models"][0]["which"] == "checkpoint-2" and "(checkpoint-2, after update 2)" in facts


def test_the_best_checkpoint_is_evaluated_on_demand(evaluation, runs):
    report, facts = evaluation("--model-path", runs["ppo", 1], "--which", "best", "--num-prompts", 2)
    update = json.loads((runs["ppo", 1] / "run.json").read_text())["best"]["update"]
    assert report["models"][0]["which"] == "best" and f"(best, after update {update})" in facts


def test_one_completion_of_one_prompt(evaluation, runs):
    report, _ = evaluation("--model-path", runs["ppo", 1], "--num-prompts", 1, "--completions", 1)
    (prompt,) = report["prompts"]
    assert [side["completions"][0]["label"] for side in prompt["sides"]] == ["BEST", "BEST"]
    assert report["models"][0]["against_start"]["score"]["low"] is None


def test_the_same_command_gives_the_same_figures(evaluation, runs):
    flags = ("--model-path", runs["grpo", 2], "--num-prompts", 3)
    first, again, other = evaluation(*flags)[0], evaluation(*flags)[0], evaluation(*flags, "--seed", 9)[0]
    assert first["models"] == again["models"] and first["prompts"] == again["prompts"] != other["prompts"]


def test_an_adapter_over_4_bit_weights_is_measured_over_4_bit_weights(
    start_model, reward_folder, pairs_file, tmp_path
):
    """Perplexity before and after is that of the run itself, whose frozen weights were in 4 bits."""
    import train_ppo

    train_ppo.main(words("--actor-model", start_model, "--rm-model", reward_folder, "--prompts", pairs_file,
                         "--output", tmp_path / "run", "--num-iterations", 2, "--max-new-tokens", 8, "--use-lora",
                         "--load-in-4bit", "--learning-rate", "1e-2", "--allow-weak-reward-model"))  # fmt: skip
    evaluate_generations.main(
        words("--model-path", tmp_path / "run", "--num-prompts", 3, "--output", tmp_path / "out")
    )
    report = json.loads((tmp_path / "out" / "evaluation.json").read_text(encoding="utf-8"))
    run = json.loads((tmp_path / "run" / "run.json").read_text())["figures"]
    after = report["models"][0]["figures"]
    assert report["start"]["figures"]["perplexity"] == pytest.approx(run["perplexity_before"], rel=1e-4)
    assert after["perplexity"] == pytest.approx(run["perplexity_after"], rel=1e-4)
    assert after["perplexity"] != pytest.approx(run["perplexity_before"], rel=1e-4) and after["kl"] != 0


def test_the_last_run_here_is_the_default(evaluation, runs, monkeypatch, tmp_path):
    monkeypatch.chdir(runs["ppo", 1].parent)
    report, _ = evaluation("--num-prompts", 2)
    assert report["models"][0]["label"].startswith("grpo_2"), "the one that was started last"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run in the current folder: --model-path"):
        evaluation()


def test_a_tokens_page_from_the_command_line(runs, tmp_path, capsys):
    evaluate_generations.main(words("--tokens", runs["grpo", 1], "--output", tmp_path / "out"))
    assert "1 of 1 recorded updates" in capsys.readouterr().out
    page = (tmp_path / "out" / "tokens.html").read_text(encoding="utf-8")
    assert "GRPO, recipe smollm2-orca, seed 1" in page


# --- compare_runs.py -------------------------------------------------------------------------------------------------


@pytest.fixture
def comparison(tmp_path, capsys):
    def run(*flags: object) -> tuple[dict, str]:
        compare_runs.main(words(*flags, "--output", tmp_path / "out", "--num-prompts", 4, "--completions", 2))
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
    assert [row["run"] for row in report["within"]] == ["PPO, seed 1", "PPO, seed 2", "GRPO, seed 1", "GRPO, seed 2"]
    assert report["spent"]["PPO"]["1"]["episodes"] == 8 and report["spent"]["GRPO"]["2"]["reply_tokens"] > 0
    assert "use_lora: PPO False, GRPO True" in report["facts"]["settings that differ, PPO and GRPO"]
    assert report["facts"]["settings that differ, PPO and GRPO"].endswith("; K: GRPO 2")
    markdown = (tmp_path / "out" / "comparison.md").read_text(encoding="utf-8")
    for words in (
        "over prompts",
        "peak memory",
        "win rate",
        "distinct-2",
        "completion tokens",
        "score\\_against\\_kl",
    ):
        assert words.replace("\\", "") in markdown
    assert (tmp_path / "out" / "score_against_kl.png").is_file()


def test_equal_budgets_are_taken_from_the_runs_own_evaluations(comparison, runs):
    report, _ = comparison(runs["ppo", 1], runs["grpo", 1])
    by_episodes, by_time = report["at_equal"]
    assert by_episodes["budget"] == "8 episodes" and by_time["budget"].endswith("of training")
    for name, run in (("PPO", runs["ppo", 1]), ("GRPO", runs["grpo", 1])):
        rows = [json.loads(line) for line in (run / "samples" / "update-000002.jsonl").open()]
        assert by_episodes["sides"][name]["update"] == 2
        assert by_episodes["sides"][name]["score"] == pytest.approx(sum(r["score"] for r in rows) / len(rows))
    [found] = by_episodes["differences"]
    assert (found["name"], found["over"]) == ("PPO - GRPO", "prompts")
    assert found["value"] == pytest.approx(
        by_episodes["sides"]["PPO"]["score"] - by_episodes["sides"]["GRPO"]["score"]
    )


def test_one_seed_says_what_it_cannot_tell(comparison, runs):
    report, facts = comparison(runs["ppo", 1], runs["grpo", 2])
    assert {c["over"] for c in report["contrasts"]} == {"prompts"}
    assert "one seed (PPO: 1, GRPO: 2) does not show how much the result depends on the seed" in facts
    assert not any("over seeds" in sentence for sentence in report["verdict"])


def test_one_algorithm_alone(comparison, runs):
    report, _ = comparison(runs["ppo", 1], runs["ppo", 2])
    assert report["verdict"][1] == "All runs are PPO runs, so they cannot show whether another algorithm is better."
    assert [c["name"] for c in report["contrasts"]] == ["PPO - start model"]


def test_a_judge_decides_where_there_is_one(comparison, runs, tmp_path):
    from tests.shapes import make_reward_model

    judge = make_reward_model(tmp_path / "judge", seed=4)
    report, _ = comparison(*runs.values(), "--judge-model", judge)
    assert f"by the judge ({judge}, not used in RL training)" in report["verdict"][0]
    assert {c["measure"] for c in report["contrasts"]} == {"scores", "judged"}
    assert report["at_equal"][0]["differences"][0]["by"] == "judge"


def changed(run, folder, **settings):
    """A copy of a run whose run.json says other settings."""
    import shutil

    shutil.copytree(run, folder)
    facts = json.loads((folder / "run.json").read_text())
    for name, value in settings.items():
        group = next(g for g in facts["settings"].values() if isinstance(g, dict) and name in g)
        group[name] = value
    facts["seed"] = settings.get("seed", facts["seed"])
    (folder / "run.json").write_text(json.dumps(facts))
    return folder


def test_runs_that_cannot_be_pooled_are_refused(comparison, runs, start_model, tmp_path):
    other = changed(runs["ppo", 2], tmp_path / "other", learning_rate=0.5)
    with pytest.raises(UserError, match=r"ppo_1 and .*other differ in learning_rate\. Runs of one"):
        comparison(runs["ppo", 1], other)
    twice = changed(runs["ppo", 1], tmp_path / "twice")
    with pytest.raises(UserError, match=r"two runs of PPO have the seed 1\. Give each seed once"):
        comparison(runs["ppo", 1], twice)
    with pytest.raises(UserError, match="not a run: .*compare_runs.py takes run folders"):
        comparison(runs["ppo", 1], start_model)


def test_unequal_budgets_are_said(comparison, runs, tmp_path):
    longer = changed(runs["grpo", 1], tmp_path / "longer")
    facts = json.loads((longer / "run.json").read_text())
    facts["plan"]["episodes"] = 800
    (longer / "run.json").write_text(json.dumps(facts))
    report, _ = comparison(runs["ppo", 1], longer)
    assert "after UNEQUAL budgets (8 to 800 episodes)" in report["verdict"][0]


def test_the_budget_is_that_of_the_weights_measured(comparison, runs):
    """`best/` was kept earlier than the end: its episodes count, not the run's."""
    kept = {name: json.loads((run / "run.json").read_text())["best"]["update"] for name, run in runs.items()}
    (one, two) = ("ppo", 1), ("grpo", 1)
    report, _ = comparison(runs[one], runs[two], "--which", "best")
    low, high = sorted((kept[one] * 4, kept[two] * 4))
    message = f"after {low} episodes each" if low == high else f"after UNEQUAL budgets ({low} to {high} episodes)"
    assert message in report["verdict"][0]


@pytest.mark.parametrize("make_bad", ["torn samples", "no samples", "output is a file", "output under a file"])
def test_faults_of_a_comparison_are_said_before_the_work(runs, tmp_path, capsys, make_bad):
    import shutil

    run, output = shutil.copytree(runs["ppo", 1], tmp_path / "run"), tmp_path / "out"
    words_of_it = words(run, runs["grpo", 1], "--num-prompts", 2, "--completions", 1)
    (tmp_path / "file").write_text("")
    if make_bad == "no samples":
        shutil.rmtree(run / "samples")
        compare_runs.main([*words_of_it, "--output", str(output)])
        printed = re.sub(r"\s+", " ", capsys.readouterr().out)
        assert "a run has no stored evaluations, so there is no comparison at equal training time" in printed
        return
    if make_bad == "torn samples":
        (run / "samples" / "update-000001.jsonl").write_text('{"prompt": [')
        fault = "incomplete or corrupted: .*update-000001.jsonl"
    else:
        output = tmp_path / "file" if make_bad == "output is a file" else tmp_path / "file" / "x"
        fault = "not a folder: --output"
    with pytest.raises(UserError, match=fault):
        compare_runs.main([*words_of_it, "--output", str(output)])
    assert "completions" not in capsys.readouterr().out, "nothing was sampled"


def test_faults_of_an_evaluation_are_said_before_the_work(runs, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for command in (["--model-path", runs["ppo", 1]], ["--tokens", runs["ppo", 1]]):
        with pytest.raises(UserError, match="not a folder: --output"):
            evaluate_generations.main(words(*command, "--output", tmp_path / "file"))
    with pytest.raises(UserError, match="--tokens and --model-path exclude each other: command line"):
        evaluate_generations.main(words("--tokens", runs["ppo", 1], "--model-path", runs["ppo", 1]))
    assert "of 24 completions" not in capsys.readouterr().out


def test_a_mistyped_run_is_not_looked_for_on_the_hub(comparison, runs, monkeypatch):
    monkeypatch.chdir(runs["ppo", 1].parent)
    with pytest.raises(UserError, match="run not found: ppo_l. Did you mean ppo_"):
        comparison("ppo_l", "grpo_1")


def test_a_model_that_is_not_of_a_run_says_whose_settings_it_is_measured_with(evaluation, start_model, pairs_file):
    with pytest.raises(
        UserError, match=r"does not belong to a run, so the settings are those of the recipe --like smollm2-orca"
    ):
        evaluation("--model-path", start_model, "--prompts", pairs_file)


def test_a_model_alone_says_what_is_missing(evaluation, start_model, reward_folder, pairs_file):
    _, text = evaluation("--model-path", start_model, "--prompts", pairs_file, "--rm-model", reward_folder,
                         "--num-prompts", 3, "--completions", 2)  # fmt: skip
    assert "no start model: no comparison and no audit (give one with --baseline)" in text
    assert "only 3 prompts: figures and intervals are approximate" in text


def test_runs_of_another_release_can_be_pooled(comparison, runs, tmp_path):
    """A setting that one of them does not know tells nothing; a recording setting never does."""
    other = changed(runs["ppo", 2], tmp_path / "other", record_every=7)
    facts = json.loads((other / "run.json").read_text())
    del facts["settings"]["optimizer"]["max_grad_norm"]
    facts["settings"]["optimizer"]["of_another_release"] = 1
    (other / "run.json").write_text(json.dumps(facts))
    report, _ = comparison(runs["ppo", 1], other)
    assert [row["run"] for row in report["within"]] == ["PPO, seed 1", "PPO, seed 2"]
