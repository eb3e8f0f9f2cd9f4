"""Tests of the best checkpoint: which evaluation is chosen, and that best/ always contains a loadable model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf.checkpoints.best import PERPLEXITY_GATE, Candidate, choose, why_no_perplexity_limit
from rlhf.checkpoints.run_record import RUN_FILE
from rlhf.utils.files import update_dir_atomically
from rlhf.utils.paths import NEW
from tests.conftest import BY_TIER, attach


def candidates(*rows) -> list[Candidate]:
    """Return one candidate per row of (score, KL, perplexity), every 50 updates. The KL target is 6."""
    return [Candidate(50 * i, score, kl, 6.0, ppl) for i, (score, kl, ppl) in enumerate(rows)]


GATE = ""  # there is a limit of perplexity


def test_highest_score_within_the_kl_and_perplexity_limits_is_chosen():
    run = candidates((0.0, 0.0, 10.0), (0.5, 3.0, 10.2), (0.9, 8.9, 11.4), (1.4, 9.1, 10.5), (1.2, 5.0, 11.6))
    best, why = choose(run, "score", GATE)
    assert best == 2, "KL 9.1 is over 1.5 x 6, perplexity 11.6 over 1.15 x 10"
    assert "score (+0.900)" in why and "3 of 5" in why and "1.5 x" in why and "1.15 x" in why
    assert choose(run, "score", "no limit")[0] == 4


def test_start_model_is_chosen_for_a_collapsed_run():
    """The score rises while the text becomes useless. Every evaluation after the first exceeds the limits."""
    run = candidates((0.0, 0.0, 10.0), (2.0, 30.0, 14.0), (4.0, 90.0, 80.0), (5.0, 200.0, 500.0))
    assert choose(run, "score", GATE)[0] == 0
    assert choose(run, "perplexity", GATE)[0] == 0


def test_start_model_is_chosen_if_all_scores_are_lower():
    assert choose(candidates((0.0, 0.0, 10.0), (-0.5, 2.0, 10.0)), "score", GATE)[0] == 0


def test_evaluation_nearest_to_the_limits_is_chosen_if_all_exceed_them():
    """This happens if the reference model is not the start model. Then update 0 exceeds the limits, too."""
    run = candidates((0.0, 30.0, 10.0), (0.4, 9.9, 10.5), (0.9, 9.5, 13.0))
    best, why = choose(run, "score", GATE)
    assert best == 1, "9.9 / 9 = 1.10 x the KL limit; the third has 13 / 11.5 = 1.13 x the perplexity limit"
    assert "of 3 " in why and "1.5 x" in why and "1.10 x" in why


def test_perplexity_rule_chooses_the_lowest_perplexity():
    """The rule `perplexity` applies the KL limit and then chooses the lowest perplexity. It ignores the score."""
    run = candidates((0.0, 0.0, 10.0), (0.9, 5.0, 9.5), (0.5, 8.0, 9.2), (2.0, 9.5, 8.0))
    best, why = choose(run, "perplexity", GATE)
    assert best == 2 and "perplexity (9.200)" in why and "3 of 4" in why


def test_earlier_of_two_equal_evaluations_is_chosen():
    run = candidates((0.0, 0.0, 10.0), (0.5, 3.0, 10.0), (0.5, 3.0, 10.0))
    assert choose(run, "score", GATE)[0] == 1
    assert choose(run, "perplexity", GATE)[0] == 0


def test_each_evaluation_is_compared_with_the_kl_target_of_its_update():
    """A KL of 0.06 nats/token is below 1.5 x 0.05 and above 1.5 x 0.02."""
    run = [
        Candidate(0, 0.0, 0.0, 0.05, 10.0),
        Candidate(50, 1.0, 0.06, 0.05, 10.0),
        Candidate(100, 2.0, 0.06, 0.02, 10.0),
    ]
    assert choose(run, "score", GATE)[0] == 1


def test_without_a_kl_target_there_is_no_kl_limit():
    run = [Candidate(0, 0.0, 0.0, None, 10.0), Candidate(50, 1.0, 99.0, None, 10.0)]
    best, why = choose(run, "score", GATE)
    assert best == 1 and "KL" not in why


# --- the limit of perplexity ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("learned", "by_start", "kl_limited", "limited"),
    [
        (False, False, True, False),  # a checker: an answer that changes as it should has another perplexity
        (False, True, False, False),
        (True, False, True, True),
        (True, False, False, True),
        (True, True, True, False),  # the KL measures the distance from the start model already
        (True, True, False, True),  # the only limit
    ],
)
def test_limit_of_perplexity(learned, by_start, kl_limited, limited):
    assert (why_no_perplexity_limit(learned, by_start, kl_limited) == "") is limited


def test_checker_on_a_real_model_gives_its_last_evaluation():
    """SmolLM2-135M-Instruct, GRPO with a checker, KL target 10/sequence: accuracy, KL, perplexity on the start model's
    own completions. The start model was chosen when this perplexity had a limit."""
    rows = [(0.039, 0.0, 5.39), (0.258, 4.6, 6.42), (0.422, 6.8, 7.70), (0.49, 6.9, 8.81)]
    run = [Candidate(10 * i, score, kl, 10.0, perplexity) for i, (score, kl, perplexity) in enumerate(rows)]
    assert choose(run, "score", GATE)[0] == 0
    best, why = choose(run, "score", why_no_perplexity_limit(learned=False, by_start=True, kl_limited=True))
    assert best == 3 and "1.5 x" in why and "1.15 x" not in why


def test_checker_without_a_kl_target_gives_the_evaluation_before_a_collapse():
    rows = [(0.25, 0.0, 3.0), (0.6, 4.0, 4.0), (0.02, 90.0, 900.0), (0.0, 200.0, 9e9)]
    run = [Candidate(10 * i, score, kl, None, perplexity) for i, (score, kl, perplexity) in enumerate(rows)]
    assert choose(run, "score", why_no_perplexity_limit(False, True, False))[0] == 1


@pytest.mark.parametrize(("by_start", "target"), [(False, None), (False, 6.0), (True, None), (True, 6.0)])
def test_learned_score_that_rises_in_a_collapse_is_never_the_best(by_start, target):
    """A learned score has at least one limit: KL, perplexity, or both."""
    rows = [(0.0, 0.0, 5.0), (0.5, 4.0, 5.5), (1.4, 90.0, 50.0), (1.9, 200.0, 900.0)]
    run = [Candidate(10 * i, score, kl, target, perplexity) for i, (score, kl, perplexity) in enumerate(rows)]
    assert choose(run, "score", why_no_perplexity_limit(True, by_start, target is not None))[0] == 1


@pytest.mark.parametrize(
    ("kind", "ratio"), [("function", None), ("module", PERPLEXITY_GATE), ("model", PERPLEXITY_GATE)]
)
def test_run_has_the_limit_of_its_rewards(build, kind, ratio):
    """The evaluation prompts have chosen completions, which others wrote. A module's scores are learned, too."""

    class Module(torch.nn.Module):
        def forward(self, input_ids, attention_mask):
            return (input_ids * attention_mask).float().sum(1)

    given = {"function": {"rewards": [lambda completions, **_: [float(len(c)) for c in completions]]}}
    given |= {"module": {"rewards": [Module()]}, "model": {}}
    trainer = build("--eval-every", 9, **given[kind])
    run_log = attach(trainer)
    trainer.train()
    why = json.loads((run_log.folder / RUN_FILE).read_text())["best"]["why"]
    assert (f" {PERPLEXITY_GATE} x" in why) == (ratio is not None)


@pytest.mark.parametrize(("temperature", "limited"), [(0.7, True), (0.3, False), (0, False)])
def test_kl_of_evaluations_that_do_not_sample_as_training_is_no_limit(build, temperature, limited):
    """Their KL is not that of the policy."""
    trainer = build("--eval-every", 9, "--temperature", 0.7, "--eval-temperature", temperature)
    run_log = attach(trainer)
    trainer.train()
    best = json.loads((run_log.folder / RUN_FILE).read_text())["best"]
    assert all((one["target"] is not None) is limited for one in best["evaluations"])
    assert (" 1.5 x" in best["why"]) is limited


# --- the folder ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", BY_TIER)
@pytest.mark.parametrize("flags", [(), ("--use-lora",)])
def test_best_contains_the_chosen_model_and_run_json_the_reason(build, algorithm, flags):
    """The scores are scripted. The second of three evaluations is the best, and the third does not replace it."""
    script = iter([0.0, 2.0, 1.0])

    def scripted(completions, **_):  # six evaluation prompts; in training, scores must differ
        return [next(script)] * 6 if len(completions) == 6 else [float(i) for i in range(len(completions))]

    trainer = build("--eval-every", 1, *flags, algorithm=algorithm, rewards=[scripted])
    run_log = attach(trainer)
    best = Path(trainer.config.run.output) / "best"
    weights = []

    def save_weights(trainer=trainer):
        weights.append([w.detach().clone() for w in trainer.host.model.parameters() if w.requires_grad])

    trainer.add_callback(type("Note", (), {"on_evaluation": lambda self, evaluation: save_weights()})())
    trainer.train()
    best_record = json.loads((run_log.folder / RUN_FILE).read_text())["best"]
    assert best_record["update"] == 1 and "score (+2.000)" in best_record["why"] and "3 of 3" in best_record["why"]
    assert [e["score"] for e in best_record["evaluations"]] == [0, 2, 1]
    assert {"kl", "target", "perplexity", "peak_memory_gib", "update"} <= set(best_record["evaluations"][0])
    trainer.load_model(best)
    loaded = [w for w in trainer.host.model.parameters() if w.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(loaded, weights[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(loaded, weights[2], strict=True))
    assert not list(best.parent.rglob(f"*{NEW}*"))


def test_best_folder_is_loadable_after_each_replaced_file(build, tmp_path, monkeypatch):
    """Loads the folder after each file is replaced: it must contain the old weights or the new weights."""
    trainer = build("--lr-schedule", "constant")
    folder = tmp_path / "best"
    update_dir_atomically(folder, trainer.save_model)
    old = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    trainer.update_step(1)
    new = {name: w.detach().clone() for name, w in trainer.actor.policy.state_dict().items()}
    from rlhf.utils import system

    original = system.os.replace
    files = []

    def replace_and_load(source, target):
        original(source, target)
        files.append(Path(target).name)
        found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        expected = new if "model.safetensors" in files else old
        assert all(torch.equal(found[name], expected[name]) for name in found)

    monkeypatch.setattr(system.os, "replace", replace_and_load)
    update_dir_atomically(folder, trainer.save_model)
    assert "model.safetensors" in files and files.index("model.safetensors") > 0
