"""Tests of exports: merged models, model cards and uploads.

A merged model must give the logits of its base model with the adapter. The code in a model card must run.
Uploads use a fake hub.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, ModelCard
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_grpo
import train_ppo
from rlhf.algorithms.table import label_of
from rlhf.analysis.loading import load_model_ref
from rlhf.analysis.models import find_model_ref, in_4_bit
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import config_of_run, parse_cli
from rlhf.data.tokenizer import eos_ids, load_tokenizer
from rlhf.run.export import files_of_model, merge_adapter, saved_models
from rlhf.run.model_card import model_card, settings_that_decide
from rlhf.settings.training import SamplingSettings
from rlhf.setup.build import load_components
from rlhf.setup.preflight import disk_has_room
from rlhf.utils import hub
from rlhf.utils.console import Screen
from rlhf.utils.errors import run_command
from rlhf.utils.files import hardlink_dir
from tests.scripts.test_bad_inputs import FORM, refuse_loading
from tests.shapes import make_base_model, with_named_templates

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 300, 17]])
SCRIPTS = {"ppo": train_ppo.main, "grpo": train_grpo.main}


@pytest.fixture(scope="module")
def train(start_model, reward_folder, pairs_file):
    """Return a function that trains a tiny run in a folder and returns the folder."""

    def make(output: Path, *flags: object, script=train_ppo.main) -> Path:
        words = ["--actor-model", start_model, "--rm-model", reward_folder, "--prompts", pairs_file, "--output",
                 output, "--num-iterations", 2, "--eval-every", 1, "--max-new-tokens", 8, "--eval-prompts", 6,
                 "--learning-rate", "1e-2", "--allow-weak-reward-model", *flags]  # fmt: skip
        script([str(word) for word in words])
        return output

    return make


@pytest.fixture
def finished(runs, tmp_path):
    """Return a function that copies a finished run of an algorithm. GRPO's run has an adapter."""
    return lambda algorithm: Path(shutil.copytree(runs[algorithm, 1], tmp_path / algorithm))


def read_run_json(run: Path) -> dict:
    return json.loads((run / "run.json").read_text(encoding="utf-8"))


def write_run_json(run: Path, content: dict) -> RunRecord:
    """Writes run.json and returns the record that is read from it."""
    (run / "run.json").write_text(json.dumps(content), encoding="utf-8")
    return RunRecord.read(run)


def load_adapter(adapter: Path, start: Path) -> torch.nn.Module:
    base = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter).eval()


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


def greedy(model) -> list[int]:
    output = model.generate(
        input_ids=IDS, attention_mask=torch.ones_like(IDS), do_sample=False, max_new_tokens=40, eos_token_id=None
    )
    return output[0].tolist()


# --- sampling with transformers --------------------------------------------------------------------------------------

# what generate() would apply, or refuse to save, if the start model's file were kept
PENALTIES = {
    "do_sample": False, "temperature": 1.9, "top_p": 0.3, "top_k": 2, "max_length": 9, "min_length": 60,
    "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[300], [17]], "suppress_tokens": [301],
    "begin_suppress_tokens": [302], "forced_eos_token_id": 2, "eos_token_id": [2, 0], "pad_token_id": 2,
}  # fmt: skip
SAMPLED = {
    "all tokens": (["--temperature", 0.9], train_ppo.main, ["", "best", "checkpoint-2"]),
    "top-k and top-p": (
        ["--temperature", 0.8, "--top-k", 20, "--top-p", 0.7, "--use-lora", "--merge-lora", "--K", 2],
        train_grpo.main,
        ["", "best", "merged"],
    ),
}  # fmt: skip


def expected_scores(logits: torch.Tensor, sampling) -> torch.Tensor:
    """The probabilities (tokens, vocabulary) with which the run samples after these logits."""
    scores = logits / sampling.temperature
    if sampling.top_k:
        scores[scores < scores.topk(sampling.top_k).values[:, -1:]] = -torch.inf
    ordered, places = scores.softmax(-1).sort(descending=True)
    beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
    probabilities = ordered.masked_fill(beyond, 0).gather(-1, places.argsort(-1))
    return probabilities / probabilities.sum(-1, keepdim=True)


def check_sampling(output, config) -> None:
    logits, scores = (torch.cat(part).float() for part in (output.logits, output.scores))
    assert_close(scores.softmax(-1), expected_scores(logits, config.sampling), rtol=0, atol=1e-6)
    assert len(scores) <= config.sampling.max_new_tokens


@pytest.mark.parametrize("case", SAMPLED)
def test_saved_models_sample_as_their_run_in_transformers(train, start_model, tmp_path, case):
    """A start model's other settings, such as a repetition penalty, act neither in the saved folders nor in the code
    of their model cards."""
    flags, script, folders = SAMPLED[case]
    start = Path(shutil.copytree(start_model, tmp_path / "start"))
    (start / "generation_config.json").write_text(json.dumps(PENALTIES))
    run = train(tmp_path / "run", "--actor-model", start, *flags, script=script)
    config = config_of_run(RunRecord.read(run))
    kinds = set()
    values = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    for folder in (run / name for name in folders):
        saved = json.loads((folder / "generation_config.json").read_text())
        assert saved.keys() - {"transformers_version"} == {
            "do_sample", "temperature", "top_k", "top_p", "max_new_tokens", "eos_token_id", "pad_token_id"
        }  # fmt: skip
        assert (saved["eos_token_id"], saved["pad_token_id"]) == ([2, 0], load_tokenizer(str(folder)).pad_token_id)
        assert eos_ids(load_tokenizer(str(folder))) == [2, 0], "the same as the start model of another run"
        is_adapter = (folder / "adapter_config.json").exists()
        kinds.add(is_adapter)
        if not is_adapter:
            model = AutoModelForCausalLM.from_pretrained(folder)
            check_sampling(model.generate(IDS, attention_mask=torch.ones_like(IDS), **values), config)
        if (folder / "README.md").exists():
            (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL)
            code, replaced = re.subn(r"(output = model.generate\()(.*)", r"\1**values, \2", code)
            assert replaced == 1
            names = {"values": values}
            exec(compile(code.split("print(")[0], "snippet", "exec"), names)
            check_sampling(names["output"], config)
    assert kinds == ({True, False} if "--use-lora" in flags else {False})


def test_saved_model_keeps_the_sampling_of_its_run_after_a_resumption(train, start_model, tmp_path):
    start = Path(shutil.copytree(start_model, tmp_path / "start"))
    (start / "generation_config.json").write_text(json.dumps(PENALTIES))
    run = train(tmp_path / "run", "--actor-model", start, "--temperature", 0.9)
    first = (run / "generation_config.json").read_text()
    train_ppo.main(["--resume", "--resume-anyway", "--num-iterations", "3", "--output", str(run)])
    assert (run / "generation_config.json").read_text() == first and '"temperature": 0.9' in first


# --- tokenizers with several chat templates --------------------------------------------------------------------------


def test_run_of_a_model_with_named_templates_is_saved_and_exported(train, start_model, tmp_path):
    start = with_named_templates(start_model, tmp_path / "start")
    run = train(tmp_path / "run", "--actor-model", start, "--use-lora", "--merge-lora")
    for folder in (run, run / "best", run / "merged", run / "checkpoint-2" / "best"):
        templates = [path.name for path in folder.iterdir() if "template" in path.name]
        assert templates == ["chat_template.jinja"]
    assert {"chat_template.jinja", "adapter_config.json"} < files_of_model(run).keys()
    assert "TOOLS" not in (run / "chat_template.jinja").read_text()


def test_a_folder_inside_a_saved_model_is_not_copied(tmp_path):
    """The user, or a tool that uploads, may have made one."""
    (tmp_path / "best" / ".cache").mkdir(parents=True)
    (tmp_path / "best" / "config.json").write_text("{}")
    hardlink_dir(tmp_path / "best", tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["config.json"]


# --- merging ---------------------------------------------------------------------------------------------------------


KINDS = {
    "lora": [],
    "4 bits": ["--load-in-4bit"],
    "bfloat16": ["--bf16"],
    "a tied head": ["--lora-targets", "q_proj", "lm_head"],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "algorithm", ["ppo", *(pytest.param(name, marks=pytest.mark.ci) for name in SCRIPTS if name != "ppo")]
)
def test_merged_model_equals_base_model_with_adapter(train, start_model, tmp_path, kind, algorithm):
    groups = ["--batch-size", 2, "--K", 2] if algorithm == "grpo" else []
    run = train(tmp_path / "run", "--use-lora", "--merge-lora", *groups, *KINDS[kind], script=SCRIPTS[algorithm])
    adapter = load_adapter(run, start_model)
    merged = AutoModelForCausalLM.from_pretrained(run / "merged").eval()
    assert_close(logits(merged), logits(adapter), rtol=0, atol=1e-5)
    assert greedy(merged) == greedy(adapter)
    start = AutoModelForCausalLM.from_pretrained(start_model)
    assert float((logits(merged) - logits(start)).abs().max()) > 1e-2, "training must have changed the weights"
    assert merged.dtype == torch.float32
    assert merged.config.tie_word_embeddings == (kind != "a tied head")
    assert AutoTokenizer.from_pretrained(run / "merged").pad_token == "<|endoftext|>"
    files = sorted(p.name for p in (run / "merged").iterdir())
    assert files == ["README.md", "chat_template.jinja", "config.json", "generation_config.json",
                     "model.safetensors", "tokenizer.json", "tokenizer_config.json"]  # fmt: skip
    assert not re.search("peft|lora|quanti|bitsandbytes", (run / "merged" / "config.json").read_text())
    assert read_run_json(run)["status"] == "finished" and read_run_json(run)["merged"] == {
        "which": "final",
        "update": 2,
    }


def test_merged_model_differs_from_the_4_bit_model_in_training(train, start_model, tmp_path):
    """The merged model differs from the model in training, because training used the base model in 4 bits."""
    run = train(tmp_path / "run", "--use-lora", "--load-in-4bit", "--merge-lora")
    found = find_model_ref(str(run), "final", None)
    trained = load_model_ref(found, load_tokenizer(found.source), in_4_bit(found), None, CPU)
    merged = AutoModelForCausalLM.from_pretrained(run / "merged").eval()
    difference = float((logits(trained) - logits(merged)).abs().max())
    assert difference > 1e-3, "otherwise nothing was quantized, and the test of merging would be void"


def test_merged_model_is_evaluated_in_full_precision(train, start_model, tmp_path):
    run = train(tmp_path / "run", "--use-lora", "--load-in-4bit", "--merge-lora")
    adapter, merged = (find_model_ref(str(folder), "final", None) for folder in (run, run / "merged"))
    assert in_4_bit(adapter) and not in_4_bit(merged)
    assert (merged.label, merged.base) == ("run/merged (final, merged, after update 2)", None)
    policy = load_model_ref(merged, load_tokenizer(merged.source), in_4_bit(merged), None, CPU)
    assert_close(logits(policy), logits(load_adapter(run, start_model)), rtol=0, atol=1e-5)


@pytest.mark.ci
def test_finished_run_can_be_merged_later_without_other_changes(finished, start_model, capsys):
    run = finished("grpo")
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.suffix in (".safetensors", ".jsonl")}
    train_grpo.main(["--resume", "--merge-lora", "--output", str(run)])
    output = capsys.readouterr().out
    assert "evaluation after" not in output and str(run / "merged") in output and f"finished: {run}. " in output
    assert {p: p.read_bytes() for p in before} == before and read_run_json(run)["status"] == "finished"
    merged = AutoModelForCausalLM.from_pretrained(run / "merged").eval()
    assert_close(logits(merged), logits(load_adapter(run, start_model)), rtol=0, atol=1e-5)


def test_export_from_chooses_final_or_best_weights(finished, start_model):
    """best/ gets random weights, so that it differs from the final weights."""
    run = finished("grpo")
    weights = load_file(run / "best" / "adapter_model.safetensors")
    generator = torch.Generator().manual_seed(0)
    changed = {n: torch.randn(w.shape, generator=generator) * 0.1 for n, w in weights.items()}
    save_file(changed, run / "best" / "adapter_model.safetensors", metadata={"format": "pt"})
    for which in ("final", "best"):
        train_grpo.main(["--resume", "--merge-lora", "--export-from", which, "--output", str(run)])
        assert read_run_json(run)["merged"]["which"] == which
        merged = AutoModelForCausalLM.from_pretrained(run / "merged").eval()
        folder = run if which == "final" else run / "best"
        assert_close(logits(merged), logits(load_adapter(folder, start_model)), rtol=0, atol=1e-5)
    assert float((logits(merged) - logits(load_adapter(run, start_model))).abs().max()) > 1e-2


def test_missing_or_quantized_base_model_is_one_error_line(finished, start_model, tmp_path, user_error):
    run = finished("grpo")
    config = json.loads((run / "adapter_config.json").read_text())
    shutil.copytree(start_model, tmp_path / "small")
    stored = json.loads((start_model / "config.json").read_text())
    stored["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "small" / "config.json").write_text(json.dumps(stored))
    for base, parts in (
        ("nowhere", ("nowhere): --merge-lora, ", " --resume")),
        ("small", ("--merge-lora, ", "small. ")),
    ):
        config["base_model_name_or_path"] = str(tmp_path / base)
        (run / "adapter_config.json").write_text(json.dumps(config))
        with user_error(*parts):
            merge_adapter(run, run / "merged", SamplingSettings())
        assert not (run / "merged").exists()


@pytest.mark.parametrize("flags", [(), ("--load-in-4bit",)])
def test_free_disk_check_includes_the_merged_model(configured, monkeypatch, flags):
    needed = []
    for more in ((), ("--merge-lora",)):
        config = configured("--use-lora", *flags, *more)
        policy = load_components(config, CPU, Screen()).policy
        found = disk_has_room(config, policy)
        needed.append(float(re.search(r"([\d.]+) GiB needed", found.found)[1]))
        assert ("the merged model" in found.found) == bool(more)
        full = sum(w.numel() for w in AutoModelForCausalLM.from_pretrained(config.model.actor_model).parameters())
        adapters = sum(w.numel() for w in policy.parameters() if w.requires_grad)
        expected = 4 * adapters * 11 + (4 * (full + adapters) if more else 0)
        for free, ok in ((expected, True), (expected - 1, False)):
            with monkeypatch.context() as patch:
                patch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
                assert disk_has_room(config, policy).ok is ok


# --- model cards -----------------------------------------------------------------------------------------------------


def run_snippet(card: str, capsys) -> str:
    """Runs the code in a model card and returns its output."""
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    capsys.readouterr()
    exec(compile(code, "snippet", "exec"), {})
    return capsys.readouterr().out


def test_code_of_every_model_card_runs(finished, train, tmp_path, capsys, monkeypatch):
    """Runs the code of a full model, an adapter, a merged model, best/ and a base model without a chat template. The
    current folder is the one in which the training command was run."""
    base = make_base_model(tmp_path / "base")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"number {i}"}) for i in range(60)))
    monkeypatch.chdir(tmp_path)
    train(Path("plain"), "--actor-model", base, "--prompts", prompts, "--use-lora", "--merge-lora")
    full_model = finished("ppo")
    adapter = finished("grpo")
    for folder, chat, peft in (
        (full_model, True, False),
        (adapter, True, True),
        (adapter / "best", True, True),
        (tmp_path / "plain", False, True),
        (tmp_path / "plain" / "merged", False, False),
    ):
        card = (folder / "README.md").read_text(encoding="utf-8")
        assert ("apply_chat_template" in card) == chat and ("AutoPeftModelForCausalLM" in card) == peft
        if "plain" in folder.parts:
            assert f"name = '{folder.relative_to(tmp_path).as_posix()}'" in card, (
                "the path as it was given in the command"
            )
        assert run_snippet(card, capsys).endswith("\n")


def test_content_of_model_cards(finished):
    run = finished("grpo")
    train_grpo.main(["--resume", "--merge-lora", "--output", str(run)])
    content = read_run_json(run)
    card = ModelCard.load(run / "README.md")
    assert card.data.to_dict() == {
        "library_name": "peft", "pipeline_tag": "text-generation", "tags": ["trl", "grpo", "rlhf", "lora"]
    }, "the base model and the data are local, and no licence is known"  # fmt: skip
    figures = content["figures"]
    first, *_, last = evaluations = content["best"]["evaluations"]
    best = next(e for e in evaluations if e["update"] == content["best"]["update"])
    rows = [line.strip("| ").split(" | ") for line in card.text.splitlines() if line.startswith("| ")]
    of = {name: cells for name, *cells in rows}
    low, high = figures["score_rise_interval"]
    assert of["score"] == [
        *(f"{e['score']:+.3f}" for e in (first, best, last)),
        f"{last['score'] - first['score']:+z.3f} ({low:+z.3f} to {high:+z.3f})",
    ]
    assert of["KL (nats/sequence)"][1:3] == [f"{e['kl']:z.2f}" for e in (best, last)]
    assert of["perplexity"][:3] == [f"{e['perplexity']:.2f}" for e in (first, best, last)]
    assert of["completion length (tokens)"][1:3] == ["-", f"{figures['length_after']:.1f}"]
    assert "on 6 held-out chosen completions" in " ".join(card.text.split())
    assert content["best"]["why"].split(" (")[0] in card.text
    assert content["data"]["train_sha256"][:12] in card.text and content["data"]["train_sha256"] not in card.text
    assert "120, split 45/45/10" in card.text
    assert shlex.join(["python", *content["command"]]) in card.text and "transformers 5." in card.text
    assert "| `K` | 2 |" in card.text and "| `lora_r` | 16 |" in card.text and "`value_coef`" not in card.text
    merged = ModelCard.load(run / "merged" / "README.md")
    assert merged.data.library_name == "transformers"
    best = (run / "best" / "README.md").read_text()
    for text, part in (
        (card.text, "rank 16. "),
        (merged.text, "rank 16, "),
        (best, f"(after update {content['best']['update']} of 2)"),
    ):
        assert text.count(part) == 1


def test_model_card_links_base_model_and_data_on_the_hub(finished):
    run = finished("ppo")
    content = read_run_json(run)
    content["settings"]["model"]["actor_model"], content["settings"]["data"]["prompts"] = "some/base", "some/data"
    record = write_run_json(run, content)
    saved = saved_models(run, record)["final"]
    card = ModelCard(model_card(record, saved, "me/mine"))
    assert (card.data.base_model, card.data.datasets) == (None, None), (
        "run.json does not list these names as being on the hub"
    )
    record = dataclasses.replace(record, on_hub=["some/base", "some/data"])
    card = ModelCard(model_card(record, saved, "me/mine"))
    assert (card.data.base_model, card.data.datasets) == ("some/base", ["some/data"])
    assert card.data.library_name == "transformers" and "name = 'me/mine'" in card.text
    assert "adapter" not in card.text and "lora_r" not in dict(settings_that_decide(record))


def test_model_card_escapes_markup(finished):
    run = finished("ppo")
    content = read_run_json(run)
    evil = "<script>alert(1)</script> [x](http://evil.example) | @everyone\n# heading {{ 7 * 7 }}\x1b[31m"
    content["settings"]["model"]["actor_model"] = content["settings"]["model"]["rm_model"] = f"./{evil}"
    content["settings"]["data"]["prompts"], content["best"]["why"] = f"./{evil}", evil
    record = write_run_json(run, content)
    card = model_card(record, saved_models(run, record)["final"], f"./{evil}")
    text = re.sub(r"```(python|bash)\n.*?```", "", card, flags=re.DOTALL)
    assert "<script>" not in text and "](http://" not in text and "49" not in text and "\x1b" not in card
    assert "@everyone" not in text and "\n# heading" not in text
    assert ModelCard(card).data.tags == ["trl", "ppo", "rlhf"], "the front matter must be intact"


def test_model_card_leaves_out_packages_that_are_not_installed(finished):
    """Without bitsandbytes, which is optional, the card ended every run with an AttributeError."""
    run = finished("ppo")
    content = read_run_json(run)
    content["versions"]["bitsandbytes"] = None
    record = write_run_json(run, content)
    assert "bitsandbytes" not in model_card(record, saved_models(run, record)["final"], "x")


def test_model_card_prints_not_finite_for_missing_figures(finished):
    run = finished("ppo")
    content = read_run_json(run)
    content["best"]["evaluations"][-1]["perplexity"] = content["figures"]["perplexity_after"] = None
    record = write_run_json(run, content)
    card = model_card(record, saved_models(run, record)["final"], "x")
    assert card.count("not finite") == (3 if content["best"]["update"] == 2 else 2), "the change, too"


# --- uploads ---------------------------------------------------------------------------------------------------------

ME = {"name": "ada", "orgs": [{"name": "lab"}], "auth": {"accessToken": {"role": "write"}}}
RESPONSE = SimpleNamespace(headers={}, request=None, status_code=401)


class FakeHub:
    """A fake HfApi that records its calls. `existing_files` are the files that are already in the repository."""

    def __init__(self, me=ME, existing_files=(), info=None, fails=None):
        self.me = me
        self.existing_files = existing_files
        self.info = info
        self.fails = fails
        self.created = []
        self.commits = []

    def repo_info(self, name, timeout):
        if isinstance(self.info, Exception):
            raise self.info
        return SimpleNamespace(id=name)

    def whoami(self):
        if isinstance(self.me, Exception):
            raise self.me
        return self.me

    def create_repo(self, name, *, private, exist_ok):
        self.created.append((name, private, exist_ok))
        return f"https://hub.example/{name}"

    def list_repo_files(self, name):
        return list(self.existing_files)

    def create_commit(self, name, operations, *, commit_message):
        if self.fails is not None:
            raise self.fails
        self.commits.append((name, list(operations), commit_message))


@pytest.fixture
def fake_hub(monkeypatch):
    """Return a function that replaces the hub by a FakeHub. By default the user is logged in."""

    def make(token: str | None = "hf_secret", **responses) -> FakeHub:
        fake = FakeHub(**responses)
        monkeypatch.setattr(hub, "HfApi", lambda: fake)
        monkeypatch.setattr(hub, "get_token", lambda: token)
        return fake

    return make


def added(operations) -> dict[str, bytes]:
    """Return the files that a commit adds, by name."""
    given = {o.path_in_repo: o.path_or_fileobj for o in operations if isinstance(o, CommitOperationAdd)}
    return {name: file if isinstance(file, bytes) else Path(file).read_bytes() for name, file in given.items()}


TOKENIZER = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
FULL_MODEL = {"model.safetensors", "config.json", "generation_config.json"}
ADAPTER = {"adapter_model.safetensors", "adapter_config.json", "generation_config.json"}
CASES = {
    "ppo": ([], FULL_MODEL, ""),
    "grpo": ([], ADAPTER, ""),
    "grpo best": (["--export-from", "best"], ADAPTER, "best"),
    "grpo merged": (["--merge-lora"], FULL_MODEL, "merged"),
}


@pytest.mark.parametrize("case", CASES)
def test_uploaded_files(finished, fake_hub, capsys, monkeypatch, case):
    """Only the model, tokenizer, model card and run.json of the chosen weights are uploaded."""
    flags, weights, folder = CASES[case]
    algorithm = case.split()[0]
    run = finished(algorithm)
    existing_files = ["adapter_config.json", "model.safetensors", "notes.md"]
    for name in ("failed_inputs.json", "diary.txt", "run.json.new"):
        (run / name).write_text("private")
    assert (run / "tokens").is_dir() and (run / "checkpoint-2").is_dir() and (run / "logs").is_dir()
    content = read_run_json(run)
    content["settings"]["model"]["actor_model"], content["on_hub"] = "some/base", ["some/base"]
    write_run_json(run, content)
    api = fake_hub(existing_files=existing_files, info=RepositoryNotFoundError("no", response=RESPONSE))
    SCRIPTS[algorithm](["--resume", "--push-to-hub", "ada/mine", "--output", str(run), *flags])
    ((name, operations, message),) = api.commits
    files = added(operations)
    assert set(files) == {*weights, *TOKENIZER, "README.md", "run.json"}
    for file in {*weights, *TOKENIZER} - {"adapter_config.json"}:
        assert files[file] == (run / folder / file).read_bytes()
    if "adapter_config.json" in files:
        config = json.loads(files["adapter_config.json"])
        assert config["base_model_name_or_path"] == "some/base", "the name on the hub, not the path in the local cache"
        assert config["r"] == 16
    assert files["run.json"] == (run / "run.json").read_bytes()
    assert "name = 'ada/mine'" in files["README.md"].decode(), (
        "the code in the model card loads the model from the hub"
    )
    deleted = {o.path_in_repo for o in operations if isinstance(o, CommitOperationDelete)}
    assert deleted == {"adapter_config.json", "model.safetensors"} - set(files), (
        "otherwise the repository would contain both a full model and an adapter"
    )
    assert (name, api.created) == ("ada/mine", [("ada/mine", True, True)])
    assert message.startswith(f"{label_of(algorithm)}, {'best' if folder == 'best' else 'final'} ")
    output = capsys.readouterr().out
    assert "https://hub.example/ada/mine" in output and "hf_secret" not in output


def test_files_of_a_slow_tokenizer_are_uploaded(finished):
    run = finished("ppo")
    (run / "special_tokens_map.json").write_text("{}")
    assert "special_tokens_map.json" in files_of_model(run)


def test_failed_upload_keeps_the_run_and_prints_the_command_to_repeat_it(finished, fake_hub, capsys):
    run = finished("ppo")
    fake_hub(fails=ConnectionError("connection\nlost"))
    words = [
        "--resume",
        "--push-to-hub",
        "ada/mine",
        "--export-from",
        "best",
        "--output",
        str(run),
    ]
    with pytest.raises(SystemExit) as raised:
        run_command(lambda: train_ppo.main(words))
    output = capsys.readouterr().err
    assert raised.value.code == 1 and FORM.fullmatch(output.strip()), output
    assert "(connection): --push-to-hub ada/mine. " in output
    assert read_run_json(run)["status"] == "finished"
    again = re.search(r"python train_ppo\.py (.*)$", output.strip())[1].split()
    api = fake_hub()
    train_ppo.main(again)
    assert api.created == [("ada/mine", True, True)] and len(api.commits) == 1


def test_new_run_is_uploaded_after_it_is_finished(train, fake_hub, tmp_path, capsys):
    api = fake_hub()
    run = train(tmp_path / "run", "--use-lora", "--merge-lora", "--push-to-hub", "lab/mine")
    ((_, operations, _),) = api.commits
    assert json.loads(added(operations)["run.json"])["status"] == "finished"
    assert added(operations)["model.safetensors"] == (run / "merged" / "model.safetensors").read_bytes()


NO_CONNECTION = ConnectionError("[Errno 111] Connection refused")
INVALID_TOKEN = HfHubHTTPError("Invalid user token.\nmore", response=RESPONSE)
REFUSED_UPLOADS = {
    "not logged in": ({"token": None}, "hf auth"),
    "no connection": ({"info": NO_CONNECTION}, "refused)"),
    "offline": ({"info": OfflineModeIsEnabled("no")}, "HF_HUB_OFFLINE"),
    "a bad token": ({"me": INVALID_TOKEN}, "(Invalid user token.)"),
    "a read-only token": ({"me": {**ME, "auth": {"accessToken": {"role": "read"}}}}, "read"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_UPLOADS)
def test_upload_that_cannot_work_is_refused_before_loading(train, fake_hub, tmp_path, monkeypatch, capsys, case):
    responses, part = REFUSED_UPLOADS[case]
    fake_hub(**responses)
    refuse_loading(monkeypatch)
    with pytest.raises(SystemExit) as raised:
        run_command(lambda: train(tmp_path / "run", "--push-to-hub", "ada/mine"))
    output = capsys.readouterr().err.strip()
    assert raised.value.code == 2 and FORM.fullmatch(output), output
    assert part in output and ": --push-to-hub ada/mine. " in output, output
    assert not (tmp_path / "run").exists()


INVALID_SETTINGS = {
    "merging without adapters": (["--merge-lora"], ["merge_lora", "--use-lora", ": --merge-lora. "]),
    "no owner": (["--push-to-hub", "mine"], ["push_to_hub", "'mine': --push-to-hub. ", "owner/name"]),
    "no name": (["--push-to-hub", "ada/--"], ["push_to_hub", "'ada/--': --push-to-hub. ", "owner/name"]),
    "three parts": (["--push-to-hub", "a/b/c"], ["push_to_hub", "'a/b/c': --push-to-hub. ", "owner/name"]),
    "a repository for several seeds": (["--push-to-hub", "ada/mine", "--seeds", "1", "2"],
                                       [": --seeds 1 2, --push-to-hub ada/mine. "]),
    "an adapter over a folder": (["--push-to-hub", "ada/mine", "--use-lora"],
                                 [": --push-to-hub ada/mine, --actor-model ", "--merge-lora"]),
    "unknown weights": (["--export-from", "last"], ["export_from", "'last': --export-from. ", "final, best"]),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID_SETTINGS)
@pytest.mark.parametrize("algorithm", SCRIPTS)
def test_invalid_export_settings_are_refused_before_loading(
    train, fake_hub, tmp_path, monkeypatch, capsys, case, algorithm
):
    flags, parts = INVALID_SETTINGS[case]
    fake_hub()
    refuse_loading(monkeypatch)
    with pytest.raises(SystemExit) as raised:
        run_command(lambda: train(tmp_path / "run", *flags, script=SCRIPTS[algorithm]))
    output = capsys.readouterr().err.strip()
    assert raised.value.code == 2 and FORM.fullmatch(output), output
    assert all(part in output for part in parts), output
    assert not (tmp_path / "run").exists()


def test_merging_a_finished_run_without_adapter_is_refused(finished, capsys, user_error):
    run = finished("ppo")
    with user_error("merge_lora", "--use-lora", "--merge-lora"):
        train_ppo.main(["--resume", "--merge-lora", "--output", str(run)])
    assert not (run / "merged").exists()


def test_deleted_weights_cannot_be_exported(finished, user_error):
    run = finished("grpo")
    shutil.rmtree(run / "best")
    train_grpo.main(["--resume", "--output", str(run)])
    with user_error("--merge-lora", "--export-from with"):
        train_grpo.main(["--resume", "--merge-lora", "--export-from", "best", "--output", str(run)])


def test_export_flags_may_change_on_resume(finished):
    """A run may be resumed to export it. The settings that are read from the run do not contain the export flags."""
    run = finished("grpo")
    config = parse_cli(["--resume", "--merge-lora", "--output", str(run)], "grpo")
    assert config.model.use_lora and config.export.merge_lora, "use_lora comes from the run, merge_lora from the flags"
    assert not config_of_run(RunRecord.read(run)).export.merge_lora


def test_run_json_records_what_came_from_the_hub(train, start_model, tmp_path, monkeypatch, user_error):
    """A local folder with a name like `owner/name` is treated as local, also if the current folder changes later."""
    shutil.copytree(start_model, tmp_path / "some" / "base")
    monkeypatch.chdir(tmp_path)
    run = train(tmp_path / "run", "--actor-model", "some/base", "--use-lora")
    assert read_run_json(run)["on_hub"] == []
    monkeypatch.chdir("/")
    with user_error("some/base"):
        train_ppo.main(["--resume", "--push-to-hub", "ada/mine", "--output", str(run)])
    train_ppo.main(["--resume", "--output", str(run)])
    assert ModelCard.load(run / "README.md").data.base_model is None
    monkeypatch.setattr("rlhf.run.record.is_on_hub", lambda name: True)
    run = train(tmp_path / "other")
    assert ModelCard.load(run / "README.md").data.base_model == str(start_model)
