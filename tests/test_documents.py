"""README and docs/: links, anchors, flags, tests, functions and settings that they name exist; README stays short."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
from pathlib import Path

import pytest
import yaml

from rlhf.algorithms.table import ALGORITHMS
from rlhf.config import parse_cli
from rlhf.settings.evaluation import ComparisonConfig, EvaluationConfig, ExportConfig, PlotConfig
from rlhf.settings.fields import flag_of, settings_of
from rlhf.settings.reward_model import RewardModelConfig
from rlhf.settings.training import Config
from rlhf.settings.translate import REMOVED
from rlhf.trainer.evaluation import tag_of
from rlhf.utils.results import FLAG as JSON
from tests.documents import PAGES, README, ROOT, blocks, commands, name_of, prose

LARGEST_README = 7_000  # bytes
LARGEST_DOCS = 320_000  # bytes
MOST_PAGES = 28  # of docs/
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of the page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", LINK.sub(lambda m: m.group().split("]")[0][1:], h).lower()) for h in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


def test_the_pages_stay_within_their_sizes():
    """Figures that only document a run go into the experiment log."""
    pages = list((ROOT / "docs").rglob("*.md"))
    assert len(README.read_bytes()) <= LARGEST_README
    assert len((ROOT / "AGENTS.md").read_text("utf-8").splitlines()) <= 30
    assert len(pages) <= MOST_PAGES and sum(len(page.read_bytes()) for page in pages) <= LARGEST_DOCS


OTHER_TEXTS = [ROOT / "benchmarks" / "experiment_log.md", ROOT / "examples" / "train_in_a_notebook.ipynb"]


@pytest.mark.parametrize("page", [*PAGES, *OTHER_TEXTS], ids=name_of)
def test_every_link_leads_to_a_file_and_every_anchor_to_a_heading(page):
    for target in LINK.findall(prose(page)):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}: {sorted(anchors(file))}"


def test_every_page_is_linked_from_another_one():
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in LINK.findall(prose(page))
        if "://" not in target
    }
    assert {name_of(page) for page in PAGES if page not in linked} <= {"README.md"}


def defined(file: Path) -> set[str]:
    """Return the names that a Python file defines: functions, classes, methods, fields and constants."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@each_page
def test_functions_named_after_a_link_to_a_file_are_in_that_file(page):
    """Names after a link to a file, or before " in [file.py](../file.py)", are defined in that file."""
    named = re.findall(r"\]\(([^)\s]+\.py)\)[:,]?\s\(?((?:`[A-Za-z_][\w.]*`(?:,\s| and )?)+)(?! in \[)", prose(page))
    named += [(file, name) for name, file in re.findall(r"(`[\w.]+`) in \[[^\]]*\]\(([^)\s]+\.py)\)", prose(page))]
    for target, names in named:
        known = defined(page.parent / target)
        for name in re.findall(r"`([\w.]+)`", names):
            assert set(name.split(".")) <= known, f"{target}: {name}"


def details_of_the_page() -> dict[int, set[str]]:
    """Return the files that each numbered implementation detail links to."""
    section = (ROOT / "docs" / "how_it_works.md").read_text("utf-8").partition("## Implementation details")[2]
    parts = re.split(r"^(\d+)\. \*\*", section, flags=re.MULTILINE)
    links = [re.findall(r"\]\(\.\./(rlhf/[^)]+)\)", text) for text in parts[2::2]]
    return dict(zip(map(int, parts[1::2]), map(set, links), strict=True))


def test_every_detail_is_named_once_at_a_line_of_a_file_that_the_page_links_to():
    details = details_of_the_page()
    named = []
    for path in (ROOT / "rlhf").rglob("*.py"):
        file = path.relative_to(ROOT).as_posix()
        lines = path.read_text("utf-8").splitlines()
        named += [(int(number), file) for line in lines for number in re.findall(r"#.*\bdetail (\d+)\b", line)]
    assert list(details) == list(range(1, len(details) + 1))
    assert sorted(number for number, _ in named) == list(details)
    assert [(number, file) for number, file in named if file not in details[number]] == []


def test_every_test_that_a_page_names_exists():
    files = (ROOT / "tests").rglob("test_*.py")
    known = {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text("utf-8"), re.MULTILINE)}
    known |= {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    known |= {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    text = "".join(prose(page) for page in PAGES)
    named = set(re.findall(r"`(test_[^`/:]*)`", text))
    assert len(named) > 5 and named - known == set()
    paths = set(re.findall(r"`((?:tests|rlhf|benchmarks|docs|configs|examples|reward_model)/[\w/.]*)`", text))
    assert {path for path in paths if not list(ROOT.glob(path.replace("NAME", "*").rstrip("/")))} == set()


def test_every_flag_that_a_page_names_exists():
    """The first columns of docs/coming_from_trl.md, and the set `outside`, hold flags of other programs. CHANGELOG.md
    names flags of older versions."""
    known_commands = (Config, RewardModelConfig, EvaluationConfig, ComparisonConfig, PlotConfig, ExportConfig)
    settings = [s for command in known_commands for s in settings_of(command).values()]
    names = {name for s in settings for name in s.names}
    known = {flag for name in names for flag in (flag_of(name), f"--{name}", flag_of(f"no_{name}"))}
    known |= {"--recipe", "--config", "--help", "--help-all", JSON}
    removed = {flag for name in REMOVED for flag in (flag_of(name), f"--{name}")}
    files = [path for folder in ("benchmarks", "examples") for path in (ROOT / folder).glob("*.py")]
    sources = "".join(path.read_text("utf-8") for path in files)
    known |= set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', sources))
    outside = {"--index-url", "--logdir", "--model_name_or_path", "--dataset_name", "--output_dir", "--use_cpu",
               "--chat_template_path", "--x", "--no-x", "--no-index", "--find-links", "--check", "--dist",
               "--nproc-per-node", "--num_processes", "--nnodes", "--node-rank", "--master-addr", "--master-port",
                "--shutdown-timeout", "--nodes", "--time", "--signal", "--requeue", "--open-mode",
                "--signals-to-handle", "--ntasks-per-node", "--version", "--no-deps", "--wheel-dir",
                "--no-build-isolation", "--model", "--model_args", "--tasks", "--apply_chat_template", "--batch_size",
                "--gen_kwargs", "--include_path", "--outfile", "--outtype", "--merge", "--jinja", "--upgrade",
               "--critics", "--learning_rate", "--per_device_train_batch_size"}  # fmt: skip
    for page in PAGES:
        text = LINK.sub("", page.read_text("utf-8"))
        if page.name == "coming_from_trl.md":  # the first column of its tables holds other programs' flags
            text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
        named = set(re.findall(r"(?<![\w-])--[a-z](?:[a-z0-9_-]*[a-z0-9])?(?![\w-])", text))
        past = removed if name_of(page) == "CHANGELOG.md" else set()
        assert named - known - outside - past == set(), name_of(page)


def test_windows_forms_are_of_commands_that_the_pages_have():
    """A PowerShell block runs the same programs as a bash block of its page."""
    count = 0
    for page in PAGES:
        loops = "\n".join(blocks(page, "sh")).splitlines()
        known = {*commands(page), *(line.strip() for line in loops)}
        for line in "\n".join(blocks(page, "powershell")).splitlines():
            for part in re.split(r"; if \(\$\?\) \{|\}|;", line.split(" #")[0]):
                if part.strip().startswith(("python ", "pip ")):
                    count += 1
                    assert part.strip() in known, part
    assert count > 1


@each_page
def test_blocks_of_text_hold_no_commands(page):
    """What looks like a command is in a bash block, and is run."""
    lines = "\n".join(blocks(page, "text") + blocks(page, "")).splitlines()
    assert [line for line in lines if line.startswith(("python ", "pip ", "bash "))] == []


@each_page
def test_yaml_blocks_are_settings(page, tmp_path):
    for number, block in enumerate(blocks(page, "yaml")):
        (tmp_path / f"{number}.yaml").write_text(block, encoding="utf-8")
        kind = yaml.safe_load(block).get("kind")
        parse_cli(["--recipe" if kind == "recipe" else "--config", str(tmp_path / f"{number}.yaml")])


def test_the_yaml_block_of_the_settings_page_sets_what_it_shows(tmp_path):
    (block,) = [b for b in blocks(ROOT / "docs" / "settings.md", "yaml") if "kl_target" in b]
    (tmp_path / "a.yaml").write_text(block)
    config = parse_cli(["--config", str(tmp_path / "a.yaml")])
    assert len(config.kl.kl_target) == 3 and config.optimizer.learning_rate == 1e-5


def test_the_pages_list_every_folder_of_the_library_and_every_recipe():
    folders = {path.parent.name for path in (ROOT / "rlhf").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)/` \|", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE)) == folders
    shipped = {path.stem for path in (ROOT / "rlhf" / "recipes").glob("*.yaml")}
    paragraph = re.search(r"The shipped recipes.*?Use a recipe", prose(ROOT / "docs" / "settings.md"), re.DOTALL)
    assert set(re.findall(r"`([a-z0-9-]+)`", paragraph.group())) == shipped


def test_the_page_for_users_of_trl_has_every_setting_of_its_trainers():
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from transformers import TrainingArguments
    from trl import GRPOConfig, RLOOConfig
    from trl.experimental.ppo import PPOConfig

    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    own = {f.name for c in (PPOConfig, GRPOConfig, RLOOConfig) for f in dataclasses.fields(c)} - inherited
    named = set(re.findall(r"`([a-z0-9_]+)(?:=[^`]*)?`", (ROOT / "docs" / "coming_from_trl.md").read_text("utf-8")))
    assert len(own) > 80 and own - named == set()


def test_the_metrics_page_names_what_is_logged(build):
    logged = {"rewards/each/NAME"}  # if there are several reward functions
    logged |= {"rewards/logged/NAME", "rewards/unscored"}  # if they call log_metric, or return None
    logged |= {tag_of("NAME", figure) for figure in ("value", "low", "high", "pass_at_K")}  # with --eval-func
    logged |= {f"topic/NAME/{kind}" for kind in ("score", "kl", "eval_score")}  # with --steps-per-topic
    logged |= {"rewards/resampled_groups", "episodes"}  # with --dynamic-sampling
    logged |= {"kl_divergence/completions"}  # with --kl-placement none
    logged |= {"eval/gold"}  # in the demo
    logged |= {"teacher_kl", "eval/teacher_kl"}  # with --teacher
    logged |= {"learning_rate/critic"}  # with --critic-learning-rate
    logged |= {"episodes/stale", "episodes/assumed_on_policy"}  # in a loop by hand
    logged |= {f"environment/{name}" for name in ("turns", "max_turns", "failed", "cut_observations")}
    for algorithm in ALGORITHMS:
        trainer = build(algorithm=algorithm)
        trainer.train()
        logged |= set().union(*trainer.host.state.log_history) - {"epoch", "step"}
    rows = [row for row in prose(ROOT / "docs" / "metrics.md").splitlines() if row.startswith("| `")]
    first_cells = " ".join(row.split("|")[1] for row in rows)
    assert set(re.findall(r"`([a-z0-9_]+(?:/[A-Za-z0-9_]+)*)`", first_cells)) == logged
