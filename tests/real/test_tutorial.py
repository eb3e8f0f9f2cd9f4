"""Runs docs/tutorial.md, README's command for the reader's file, and the example notebook in order, with one small
update per training and few prompts."""

from __future__ import annotations

import importlib
import shlex

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from rlhf.checkpoints.run_record import RunRecord
from tests.documents import README, ROOT, commands, python_block
from tests.notebooks import EXAMPLE, executed

pytestmark = pytest.mark.ci
SMALL = {"num_iterations": 1, "batch_size": 2, "K": 2, "minibatches": 1, "eval_prompts": 4}
TRAINING = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in SMALL.items()) + " --no-bf16 --use-lora"
FEW = {
    "train_grpo": TRAINING,
    "train_rloo": TRAINING,
    "compare_runs": "--num-prompts 2 --completions 2 --limit-minutes 0",
    "evaluate_generations": "--num-prompts 2 --completions 2",
}
SETTINGS = SMALL | {"bf16": False, "use_lora": True}


def test_the_tutorial_runs_in_order_with_one_update(smollm2, large_folder, monkeypatch):
    monkeypatch.chdir(large_folder)
    (large_folder / "my_questions.jsonl").write_text(
        "".join(f'{{"question": "How much is {a} plus 3?", "answer": "{a + 3}"}}\n' for a in range(40)),
        encoding="utf-8",
    )
    (large_folder / "my.csv").write_text(
        "question,answer\n" + "".join(f"How much is {a} plus 3?,{a + 3}\n" for a in range(40)), encoding="utf-8"
    )
    (large_folder / "my_reward.py").write_text(python_block("# my_reward.py"), encoding="utf-8")
    own = [command for command in commands(README) if "my.csv" in command]
    done = []
    for command in [*commands(ROOT / "docs" / "tutorial.md"), *own]:
        program, *words = shlex.split(command)
        if program != "python":  # pip: .ci/run installs the same packages
            continue
        script = words[0].removesuffix(".py")
        few = [] if "--check" in words else FEW[script].split()
        importlib.import_module(script).main([*words[1:], *few])
        done.append(script)
    trained = ["train_grpo", "train_grpo", "train_rloo"]
    assert done == [*trained, "compare_runs", "evaluate_generations", "train_grpo", "train_grpo"]
    for name in ("tutorial_grpo", "tutorial_rloo", "my_run", "mine"):
        assert RunRecord.read(large_folder / name).status == "finished"
    assert (large_folder / "tutorial_verdict" / "comparison.json").is_file()


def test_the_notebook_runs_in_order_with_one_update(smollm2, large_folder):
    notebook = nbformat.read(EXAMPLE, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert '".."' in code[0].source
    code[0].source = code[0].source.replace('".."', repr(str(ROOT))) + f"\nsettings |= {SETTINGS}"
    for cell in code:
        for script in ("compare_runs", "evaluate_generations"):
            if cell.source.startswith(f"%run ../{script}.py "):
                cell.source = f"{cell.source.replace('..', str(ROOT), 1)} {FEW[script]}"
    with pytest.raises(CellExecutionError):  # the last cell shows an error
        executed(notebook, large_folder)
    assert [output.output_type for output in code[-1].outputs] == ["error"]
    assert code[-1].outputs[0].traceback == [
        "error: unknown setting max_new_token: make_config(max_new_token=). Did you mean max_new_tokens?"
    ]
    (training,) = (cell for cell in code if "callbacks=[Watch()]" in cell.source)
    kinds = [output.output_type for output in training.outputs]
    assert kinds.count("display_data") == 1 and len(kinds) <= 3, "one output is updated, with text above and below it"
    shown = next(output for output in training.outputs if output.output_type == "display_data")
    assert shown.data["text/plain"].startswith("update 1/1 | score")
    for name in ("grpo_training_output", "rloo_training_output"):
        assert RunRecord.read(large_folder / name).status == "finished"
    assert (large_folder / "comparison_output" / "comparison.json").is_file()
    assert (large_folder / "evaluation_output" / "evaluation.html").is_file()
