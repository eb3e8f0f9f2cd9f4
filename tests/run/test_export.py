"""What a run hands out: a merged model that replies as base and adapter do, cards whose code runs, uploads.

There is no hub here: a stand-in takes its place.
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
from rlhf.analysis.models import find_model_ref, in_4_bit, load_model_ref
from rlhf.checkpoints.run_record import RunRecord
from rlhf.config import config_of_run, parse_cli
from rlhf.models.load import load_tokenizer
from rlhf.run.export import files_of_model, merge_adapter, saved_models
from rlhf.run.model_card import model_card, settings_that_decide
from rlhf.setup.build import load_components
from rlhf.setup.preflight import disk_has_room
from rlhf.utils import hub
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError, run_command
from tests.scripts.test_bad_inputs import FORM, refuse_loading
from tests.shapes import make_base_model

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 300, 17]])
SCRIPTS = {"ppo": train_ppo.main, "grpo": train_grpo.main}


@pytest.fixture(scope="module")
def train(start_model, reward_folder, pairs_file):
    """A function that trains a tiny run in a folder, and returns the folder."""

    def make(output: Path, *flags: object, script=train_ppo.main) -> Path:
        words = ["--actor-model", start_model, "--rm-model", reward_folder, "--prompts", pairs_file, "--output",
                 output, "--num-iterations", 2, "--eval-every", 1, "--max-new-tokens", 8, "--eval-prompts", 6,
                 "--learning-rate", "1e-2", "--allow-weak-reward-model", *flags]  # fmt: skip
        script([str(word) for word in words])
        return output

    return make


@pytest.fixture
def finished(runs, tmp_path):
    """A function that copies a finished run of an algorithm (GRPO's has adapters) into a folder of its own."""
    return lambda algorithm: Path(shutil.copytree(runs[algorithm, 1], tmp_path / algorithm))


def told(run: Path) -> dict:
    return json.loads((run / "run.json").read_text(encoding="utf-8"))


def rewritten(run: Path, facts: dict) -> RunRecord:
    """The record of a run whose run.json was changed."""
    (run / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    return RunRecord.read(run)


def over_its_base(adapter: Path, start: Path) -> torch.nn.Module:
    base = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter).eval()


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


def greedy(model) -> list[int]:
    replied = model.generate(
        input_ids=IDS, attention_mask=torch.ones_like(IDS), do_sample=False, max_new_tokens=40, eos_token_id=None
    )
    return replied[0].tolist()


# --- merging ---------------------------------------------------------------------------------------------------------


KINDS = {
    "lora": [],
    "4 bits": ["--load-in-4bit"],
    "bfloat16": ["--bf16"],
    "a tied head": ["--lora-targets", "q_proj", "lm_head"],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", SCRIPTS)
def test_a_merged_model_is_base_and_adapter(train, start_model, tmp_path, kind, algorithm):
    groups = ["--batch-size", 2, "--K", 2] if algorithm == "grpo" else []
    run = train(tmp_path / "run", "--use-lora", "--merge-lora", *groups, *KINDS[kind], script=SCRIPTS[algorithm])
    both = over_its_base(run, start_model)
    whole = AutoModelForCausalLM.from_pretrained(run / "merged").eval()
    assert_close(logits(whole), logits(both), rtol=0, atol=1e-5)
    assert greedy(whole) == greedy(both)
    start = AutoModelForCausalLM.from_pretrained(start_model)
    assert float((logits(whole) - logits(start)).abs().max()) > 1e-2, "training must have moved it"
    assert whole.dtype == torch.float32
    assert whole.config.tie_word_embeddings == (kind != "a tied head")
    assert AutoTokenizer.from_pretrained(run / "merged").pad_token == "<|endoftext|>"
    files = sorted(p.name for p in (run / "merged").iterdir())
    assert files == ["README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
                     "tokenizer.json", "tokenizer_config.json"]  # fmt: skip
    assert not re.search("peft|lora|quanti|bitsandbytes", (run / "merged" / "config.json").read_text())
    assert told(run)["status"] == "finished" and told(run)["merged"] == {"which": "final", "update": 2}


def test_over_4_bit_weights_an_adapter_replies_otherwise(train, start_model, tmp_path):
    """What is merged is not what training saw: as far apart as 4-bit weights are from the base's own."""
    run = train(tmp_path / "run", "--use-lora", "--load-in-4bit", "--merge-lora")
    found = find_model_ref(str(run), "final", None)
    trained = load_model_ref(found, load_tokenizer(found.source), in_4_bit(found), None, CPU)
    merged = AutoModelForCausalLM.from_pretrained(run / "merged").eval()
    apart = float((logits(trained) - logits(merged)).abs().max())
    assert apart > 1e-3, "else nothing was quantized, and the other test shows nothing"


def test_a_merged_model_is_measured_in_full_precision(train, start_model, tmp_path):
    run = train(tmp_path / "run", "--use-lora", "--load-in-4bit", "--merge-lora")
    adapter, merged = (find_model_ref(str(folder), "final", None) for folder in (run, run / "merged"))
    assert in_4_bit(adapter) and not in_4_bit(merged)
    assert (merged.label, merged.base) == (f"{run / 'merged'} (final, merged, after update 2)", None)
    policy = load_model_ref(merged, load_tokenizer(merged.source), in_4_bit(merged), None, CPU)
    assert_close(logits(policy), logits(over_its_base(run, start_model)), rtol=0, atol=1e-5)


def test_a_finished_run_is_merged_later_and_nothing_else_is_done(finished, start_model, capsys):
    run = finished("grpo")
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.suffix in (".safetensors", ".jsonl")}
    train_grpo.main(["--resume", "--merge-lora", "--output", str(run)])
    output = capsys.readouterr().out
    assert (
        "this run is already finished" in output and "evaluation after" not in output and str(run / "merged") in output
    )
    assert {p: p.read_bytes() for p in before} == before and told(run)["status"] == "finished"
    whole = AutoModelForCausalLM.from_pretrained(run / "merged").eval()
    assert_close(logits(whole), logits(over_its_base(run, start_model)), rtol=0, atol=1e-5)


def test_the_best_weights_are_merged_on_demand_in_place_of_the_last(finished, start_model):
    """best/ is made unlike the last weights, whatever this run's best update was."""
    run = finished("grpo")
    weights = load_file(run / "best" / "adapter_model.safetensors")
    drawn = torch.Generator().manual_seed(0)
    changed = {n: torch.randn(w.shape, generator=drawn) * 0.1 for n, w in weights.items()}
    save_file(changed, run / "best" / "adapter_model.safetensors", metadata={"format": "pt"})
    for which in ("final", "best"):
        train_grpo.main(["--resume", "--merge-lora", "--export-from", which, "--output", str(run)])
        assert told(run)["merged"]["which"] == which
        whole = AutoModelForCausalLM.from_pretrained(run / "merged").eval()
        folder = run if which == "final" else run / "best"
        assert_close(logits(whole), logits(over_its_base(folder, start_model)), rtol=0, atol=1e-5)
    assert float((logits(whole) - logits(over_its_base(run, start_model))).abs().max()) > 1e-2


def test_a_base_that_is_gone_or_quantized_is_one_line(finished, start_model, tmp_path):
    run = finished("grpo")
    config = json.loads((run / "adapter_config.json").read_text())
    shutil.copytree(start_model, tmp_path / "small")
    stored = json.loads((start_model / "config.json").read_text())
    stored["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "small" / "config.json").write_text(json.dumps(stored))
    for base, says in (
        (
            "nowhere",
            r"the adapter's base model is missing \(.*nowhere\): --merge-lora, .*\. Restore it, then run .* --resume",
        ),
        (
            "small",
            r"cannot merge into a quantized base model: --merge-lora, .*small\. Remove the flag; the adapter is in",
        ),
    ):
        config["base_model_name_or_path"] = str(tmp_path / base)
        (run / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=says):
            merge_adapter(run, run / "merged")
        assert not (run / "merged").exists()


@pytest.mark.parametrize("flags", [(), ("--load-in-4bit",)])
def test_the_disk_must_hold_the_merged_model_too(configured, monkeypatch, flags):
    needed = []
    for more in ((), ("--merge-lora",)):
        config = configured("--use-lora", *flags, *more)
        policy = load_components(config, CPU, Screen()).policy
        found = disk_has_room(config, policy)
        needed.append(float(re.search(r"([\d.]+) GiB needed", found.found)[1]))
        assert ("the merged model" in found.found) == bool(more)
        whole = sum(w.numel() for w in AutoModelForCausalLM.from_pretrained(config.model.actor_model).parameters())
        adapters = sum(w.numel() for w in policy.parameters() if w.requires_grad)
        expected = 4 * adapters * 11 + (4 * (whole + adapters) if more else 0)
        for free, ok in ((expected, True), (expected - 1, False)):
            with monkeypatch.context() as patch:
                patch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
                assert disk_has_room(config, policy).ok is ok


# --- cards -----------------------------------------------------------------------------------------------------------


def run_snippet(card: str, capsys) -> str:
    """The card's code, as it stands; returns what it printed."""
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    capsys.readouterr()
    exec(compile(code, "snippet", "exec"), {})
    return capsys.readouterr().out


def test_the_code_of_every_card_runs(finished, train, tmp_path, capsys, monkeypatch):
    """A whole model, an adapter, a merged one, best/, and a base model that has no chat template; from where the
    command was typed."""
    base, prompts = make_base_model(tmp_path / "base"), tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"number {i}"}) for i in range(60)))
    monkeypatch.chdir(tmp_path)
    train(Path("plain"), "--actor-model", base, "--prompts", prompts, "--use-lora", "--merge-lora")
    whole, adapter = finished("ppo"), finished("grpo")
    for folder, chat, peft in (
        (whole, True, False),
        (adapter, True, True),
        (adapter / "best", True, True),
        (tmp_path / "plain", False, True),
        (tmp_path / "plain" / "merged", False, False),
    ):
        card = (folder / "README.md").read_text(encoding="utf-8")
        assert ("apply_chat_template" in card) == chat and ("AutoPeftModelForCausalLM" in card) == peft
        if "plain" in folder.parts:
            assert f"name = '{folder.relative_to(tmp_path).as_posix()}'" in card, "as it was typed"
        assert run_snippet(card, capsys).endswith("\n")


def test_what_a_card_says(finished):
    run = finished("grpo")
    train_grpo.main(["--resume", "--merge-lora", "--output", str(run)])
    facts = told(run)
    card = ModelCard.load(run / "README.md")
    assert card.data.to_dict() == {
        "library_name": "peft", "pipeline_tag": "text-generation", "tags": ["trl", "grpo", "rlhf", "lora"]
    }, "base and data are on this disk, and nobody knows a licence"  # fmt: skip
    figures, first, last = facts["figures"], facts["best"]["evaluations"][0], facts["best"]["evaluations"][-1]
    rows = {line.split(" | ")[0].strip("| "): line for line in card.text.splitlines() if line.startswith("| ")}
    assert f"{first['score']:+.3f}" in rows["score, mean"] and f"{last['score']:+.3f}" in rows["score, mean"]
    assert f"{last['kl']:.3g}" in rows["KL to the start model, nats/sequence"]
    assert f"{last['perplexity']:.2f}" in rows["perplexity on 6 held-out chosen completions"]
    assert f"{figures['length_after']:.1f}" in rows["completion length, tokens"]
    assert facts["best"]["why"].split(" (")[0] in card.text
    assert facts["data"]["train_sha256"][:12] in card.text and facts["data"]["train_sha256"] not in card.text
    assert "120, split 45/45/10" in card.text and "rank 16. The code below also loads its base model" in card.text
    assert shlex.join(["python", *facts["command"]]) in card.text and "transformers 5." in card.text
    assert "| `K` | 2 |" in card.text and "| `lora_r` | 16 |" in card.text and "`value_coef`" not in card.text
    merged = ModelCard.load(run / "merged" / "README.md")
    assert (
        merged.data.library_name == "transformers" and "rank 16, merged into its base model in float32" in merged.text
    )
    best = (run / "best" / "README.md").read_text()
    assert f"These are the best weights (after update {facts['best']['update']} of 2)" in best


def test_a_card_names_base_and_data_that_the_hub_has(finished):
    run = finished("ppo")
    facts = told(run)
    facts["settings"]["model"]["actor_model"], facts["settings"]["data"]["prompts"] = "some/base", "some/data"
    record = rewritten(run, facts)
    saved = saved_models(run, record)["final"]
    card = ModelCard(model_card(record, saved, "me/mine"))
    assert (card.data.base_model, card.data.datasets) == (None, None), "folders that are not here today"
    record = dataclasses.replace(record, on_hub=["some/base", "some/data"])
    card = ModelCard(model_card(record, saved, "me/mine"))
    assert (card.data.base_model, card.data.datasets) == ("some/base", ["some/data"])
    assert card.data.library_name == "transformers" and "name = 'me/mine'" in card.text
    assert "adapter" not in card.text and "lora_r" not in dict(settings_that_decide(record))


def test_nothing_in_a_card_acts(finished):
    run = finished("ppo")
    facts = told(run)
    evil = "<script>alert(1)</script> [x](http://evil.example) | @everyone\n# heading {{ 7 * 7 }}\x1b[31m"
    facts["settings"]["model"]["actor_model"] = facts["settings"]["model"]["rm_model"] = f"./{evil}"
    facts["settings"]["data"]["prompts"], facts["best"]["why"] = f"./{evil}", evil
    record = rewritten(run, facts)
    card = model_card(record, saved_models(run, record)["final"], f"./{evil}")
    shown = re.sub(r"```(python|bash)\n.*?```", "", card, flags=re.DOTALL)
    assert "<script>" not in shown and "](http://" not in shown and "49" not in shown and "\x1b" not in card
    assert "@everyone" not in shown and "\n# heading" not in shown
    assert ModelCard(card).data.tags == ["trl", "ppo", "rlhf"], "the front matter is whole"


def test_a_figure_that_was_not_finite_is_told(finished):
    run = finished("ppo")
    facts = told(run)
    facts["best"]["evaluations"][-1]["perplexity"] = facts["figures"]["score_rise_interval"][0] = None
    record = rewritten(run, facts)
    card = model_card(record, saved_models(run, record)["final"], "x")
    assert card.count("not finite") == (3 if facts["best"]["update"] == 2 else 2)


# --- uploads ---------------------------------------------------------------------------------------------------------

ME = {"name": "ada", "orgs": [{"name": "lab"}], "auth": {"accessToken": {"role": "write"}}}
RESPONSE = SimpleNamespace(headers={}, request=None, status_code=401)


class HubStandIn:
    """An HfApi that remembers what it was told; `there` are files that the repository has already."""

    def __init__(self, me=ME, there=(), info=None, fails=None):
        self.me, self.there, self.info, self.fails = me, there, info, fails
        self.made, self.commits = [], []

    def repo_info(self, name, timeout):
        if isinstance(self.info, Exception):
            raise self.info
        return SimpleNamespace(id=name)

    def whoami(self):
        if isinstance(self.me, Exception):
            raise self.me
        return self.me

    def create_repo(self, name, *, private, exist_ok):
        self.made.append((name, private, exist_ok))
        return f"https://hub.example/{name}"

    def list_repo_files(self, name):
        return list(self.there)

    def create_commit(self, name, operations, *, commit_message):
        if self.fails is not None:
            raise self.fails
        self.commits.append((name, list(operations), commit_message))


@pytest.fixture
def stand_in(monkeypatch):
    """A function that puts a HubStandIn in the hub's place, logged in unless told otherwise."""

    def make(token: str | None = "hf_secret", **answers) -> HubStandIn:
        made = HubStandIn(**answers)
        monkeypatch.setattr(hub, "HfApi", lambda: made)
        monkeypatch.setattr(hub, "get_token", lambda: token)
        return made

    return make


def added(operations) -> dict[str, bytes]:
    """What a commit puts into a repository, by name."""
    given = {o.path_in_repo: o.path_or_fileobj for o in operations if isinstance(o, CommitOperationAdd)}
    return {name: file if isinstance(file, bytes) else Path(file).read_bytes() for name, file in given.items()}


TOKENIZER = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
WHOLE = {"model.safetensors", "config.json", "generation_config.json"}
CASES = {
    "ppo": ([], WHOLE, "", True),
    "grpo": (["--no-hub-private"], {"adapter_model.safetensors", "adapter_config.json"}, "", False),
    "grpo best": (["--export-from", "best"], {"adapter_model.safetensors", "adapter_config.json"}, "best", True),
    "grpo merged": (["--merge-lora"], WHOLE, "merged", True),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_uploaded(finished, stand_in, capsys, monkeypatch, case):
    """Model, tokenizer, card and run.json of the chosen weights, and nothing else that lies in a run's folder."""
    flags, weights, folder, private = CASES[case]
    algorithm = case.split()[0]
    run, there = finished(algorithm), ["adapter_config.json", "model.safetensors", "notes.md"]
    for name in ("failed_inputs.json", "diary.txt", "run.json.new"):
        (run / name).write_text("private")
    assert (run / "tokens").is_dir() and (run / "checkpoint-2").is_dir() and (run / "logs").is_dir()
    facts = told(run)
    facts["settings"]["model"]["actor_model"], facts["on_hub"] = "some/base", ["some/base"]
    rewritten(run, facts)
    api = stand_in(there=there, info=RepositoryNotFoundError("no", response=RESPONSE))
    SCRIPTS[algorithm](["--resume", "--push-to-hub", "ada/mine", "--output", str(run), *flags])
    ((name, operations, message),) = api.commits
    files = added(operations)
    assert set(files) == {*weights, *TOKENIZER, "README.md", "run.json"}
    for file in {*weights, *TOKENIZER} - {"adapter_config.json"}:
        assert files[file] == (run / folder / file).read_bytes()
    if "adapter_config.json" in files:
        config = json.loads(files["adapter_config.json"])
        assert config["base_model_name_or_path"] == "some/base", "by its name, not by its place in a cache here"
        assert config["r"] == 16
    assert files["run.json"] == (run / "run.json").read_bytes()
    assert "name = 'ada/mine'" in files["README.md"].decode(), "the card's code loads it from the hub"
    gone = {o.path_in_repo for o in operations if isinstance(o, CommitOperationDelete)}
    assert gone == {"adapter_config.json", "model.safetensors"} - set(files), "or both kinds would be loaded at once"
    assert (name, api.made) == ("ada/mine", [("ada/mine", private, True)])
    assert message.startswith(f"{algorithm.upper()}, {'best' if folder == 'best' else 'final'} weights, after update")
    output = capsys.readouterr().out
    assert "https://hub.example/ada/mine" in output and "hf_secret" not in output


def test_a_slow_tokenizers_files_are_uploaded(finished):
    run = finished("ppo")
    (run / "special_tokens_map.json").write_text("{}")
    assert "special_tokens_map.json" in files_of_model(run)


def test_an_upload_that_fails_loses_nothing_and_says_how_to_go_on(finished, stand_in, capsys):
    run = finished("ppo")
    stand_in(fails=ConnectionError("the line\nwent dead"))
    words = [
        "--resume",
        "--push-to-hub",
        "ada/mine",
        "--no-hub-private",
        "--export-from",
        "best",
        "--output",
        str(run),
    ]
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: train_ppo.main(words))
    output = capsys.readouterr().err
    assert ended.value.code == 1 and FORM.fullmatch(output.strip()), output
    assert output.startswith(
        "error: the upload failed (the line): --push-to-hub ada/mine. The run is finished and its "
    )
    assert told(run)["status"] == "finished"
    again = re.search(r"python train_ppo\.py (.*)$", output.strip())[1].split()
    api = stand_in()
    train_ppo.main(again)
    assert api.made == [("ada/mine", False, True)] and len(api.commits) == 1


def test_a_new_run_is_uploaded_once_it_is_finished(train, stand_in, tmp_path, capsys):
    api = stand_in()
    run = train(tmp_path / "run", "--use-lora", "--merge-lora", "--push-to-hub", "lab/mine")
    ((_, operations, _),) = api.commits
    assert json.loads(added(operations)["run.json"])["status"] == "finished"
    assert added(operations)["model.safetensors"] == (run / "merged" / "model.safetensors").read_bytes()


NO_ANSWER = ConnectionError("[Errno 111] Connection refused")
INVALID = HfHubHTTPError("Invalid user token.\nmore", response=RESPONSE)
REFUSED = {
    "not logged in": ({"token": None}, r"not logged in to the hub: --push-to-hub ada/mine\. Log in .*: hf auth"),
    "away": ({"info": NO_ANSWER}, r"the hub cannot be reached \(.*refused\): --push-to-hub ada/mine\. Go online, or"),
    "offline": ({"info": OfflineModeIsEnabled("no")}, r"the hub cannot be reached \(offline mode is on\): --push"),
    "a bad token": ({"me": INVALID},
                    r"the hub rejects the request \(Invalid user token\.\): --push-to-hub ada/mine\. Log in"),
    "a token that reads": ({"me": {**ME, "auth": {"accessToken": {"role": "read"}}}},
                           r"the token has read access only: --push-to-hub ada/mine\. Log in with a token that has"),
    "somebody else's": ({"me": {**ME, "name": "bob"}},
                        r"ada is not one of your accounts on the hub: --push-to-hub ada/mine\. Yours: bob, lab"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_forbids_an_upload_is_said_before_anything_is_loaded(
    train, stand_in, tmp_path, monkeypatch, capsys, what
):
    answers, says = REFUSED[what]
    stand_in(**answers)
    refuse_loading(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: train(tmp_path / "run", "--push-to-hub", "ada/mine"))
    output = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and re.search(says, output) and FORM.fullmatch(output), output
    assert not (tmp_path / "run").exists()


FAULTS = {
    "merging without adapters": (["--merge-lora"], r"no adapter to merge: --merge-lora\. Add --use-lora, or remove"),
    "no owner": (["--push-to-hub", "mine"], r"push_to_hub is 'mine': --push-to-hub\. Give owner/name, with letters"),
    "no name": (["--push-to-hub", "ada/--"], 
                r"push_to_hub is 'ada/--': --push-to-hub\. Give owner/name, with letters"),
    "three parts": (["--push-to-hub", "a/b/c"], r"push_to_hub is 'a/b/c': --push-to-hub\. Give owner/name"),
    "a repository for several seeds": (["--push-to-hub", "ada/mine", "--seeds", "1", "2"],
                                       r"several runs and one repository: --seeds, --push-to-hub ada/mine\. Push one"),
    "an adapter over a folder": (["--push-to-hub", "ada/mine", "--use-lora"],
                                 r"nobody else could load this adapter, because its base model is a local folder: "
                                 r"--push-to-hub ada/mine, --actor-model .*\. Add --merge-lora"),
    "weights of no kind": (["--export-from", "last"], r"export_from is last: --export-from\. Choices: final, best"),
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.parametrize("algorithm", SCRIPTS)
def test_faults_of_configuration(train, stand_in, tmp_path, monkeypatch, capsys, what, algorithm):
    flags, says = FAULTS[what]
    stand_in()
    refuse_loading(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: train(tmp_path / "run", *flags, script=SCRIPTS[algorithm]))
    output = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and re.search(says, output) and FORM.fullmatch(output), output
    assert not (tmp_path / "run").exists()


def test_merging_a_finished_run_of_whole_weights_is_a_fault_of_configuration(finished, capsys):
    run = finished("ppo")
    with pytest.raises(UserError, match="no adapter to merge: --merge-lora"):
        train_ppo.main(["--resume", "--merge-lora", "--output", str(run)])
    assert not (run / "merged").exists()


def test_weights_that_were_deleted_cannot_be_handed_out(finished):
    run = finished("grpo")
    shutil.rmtree(run / "best")
    train_grpo.main(["--resume", "--output", str(run)])
    with pytest.raises(
        UserError,
        match=r"the best weights of this run no longer exist: --merge-lora\. Use --export-from with one of: final",
    ):
        train_grpo.main(["--resume", "--merge-lora", "--export-from", "best", "--output", str(run)])


def test_settings_of_an_export_are_harmless(finished):
    """A run may be gone on with to hand it out, and a run's settings come back without the flags."""
    run = finished("grpo")
    config = parse_cli(["--resume", "--merge-lora", "--output", str(run)], "grpo")
    assert config.model.use_lora and config.export.merge_lora, "the first from the run, the second from the flags"
    assert not config_of_run(RunRecord.read(run)).export.merge_lora


def test_a_run_remembers_what_it_had_from_the_hub(train, start_model, tmp_path, monkeypatch):
    """A folder's name that is written as a hub's is a folder's, wherever the run is looked at later."""
    shutil.copytree(start_model, tmp_path / "some" / "base")
    monkeypatch.chdir(tmp_path)
    run = train(tmp_path / "run", "--actor-model", "some/base", "--use-lora")
    assert told(run)["on_hub"] == []
    monkeypatch.chdir("/")
    with pytest.raises(
        UserError, match="nobody else could load this adapter, because its base model is a local folder"
    ):
        train_ppo.main(["--resume", "--push-to-hub", "ada/mine", "--output", str(run)])
    train_ppo.main(["--resume", "--output", str(run)])
    assert ModelCard.load(run / "README.md").data.base_model is None
    monkeypatch.setattr("rlhf.run.train.is_on_hub", lambda name: True)
    run = train(tmp_path / "other")
    assert ModelCard.load(run / "README.md").data.base_model == str(start_model)
