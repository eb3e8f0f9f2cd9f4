"""Tests that model and adapter folders of other people run no code: what would load code or kernels is refused by its
name, and configurations as they are published load."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rlhf.analysis.models import find_model_ref
from rlhf.checkpoints.trust import check_no_code, read_adapter_config, readable
from rlhf.data.tokenizer import config_values, load_config, load_tokenizer
from rlhf.models.load import load_adapter, load_policy
from rlhf.models.save import load_policy_weights
from rlhf.utils.errors import UserError
from tests.shapes import make_start_model

CPU = torch.device("cpu")
PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text(encoding="utf-8"))
Change = Callable[[str, dict[str, Any]], Path]


@pytest.fixture
def changed(start_model, tmp_path) -> Change:
    """Return a function that copies the start model and changes values in one of its JSON files."""

    def change(file: str, values: dict[str, Any]) -> Path:
        folder = Path(shutil.copytree(start_model, tmp_path / "copy", dirs_exist_ok=True))
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return folder

    return change


# --- adapters --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_adapter(made_once) -> Path:
    """An adapter that peft has saved, in the folder `adapter` beside its base model."""

    def fill(folder: Path) -> None:
        base = AutoModelForCausalLM.from_pretrained(make_start_model(folder / "base"))
        lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        get_peft_model(base, lora).save_pretrained(folder / "adapter")

    return made_once("saved_adapter", fill) / "adapter"


@pytest.fixture
def adapter(saved_adapter, tmp_path) -> Callable[..., Path]:
    """Return a function that copies the adapter with other values in adapter_config.json."""

    def make(folder: str = "adapter", **values: Any) -> Path:
        copy = Path(shutil.copytree(saved_adapter, tmp_path / folder))
        file = copy / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))
        return copy

    return make


def base_of(folder: Path) -> Any:
    name = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    return load_policy(name, device=CPU, vocabulary=0)


def test_an_adapter_cannot_import_a_module_of_its_folder(adapter, tmp_path, monkeypatch):
    """peft imports the module in `megatron_core`, and permits every name that starts with "megatron."."""
    folder = adapter("megatron", megatron_config={"a": 1}, megatron_core="megatron.payload")
    (folder / "payload.py").write_text(f"open({str(tmp_path / 'it_ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("megatron")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"megatron_config .*adapter_config\.json"):
        load_adapter(base_of(folder), str(folder))
    assert not (tmp_path / "it_ran").exists()


REFUSED = {
    "megatron_core": "megatron.payload",
    "auto_mapping": {"base_model_class": "Model", "parent_library": "payload"},
    "peft_type": "ADALORA",
    "use_dora": True,
    "lora_bias": True,
    "init_lora_weights": "pissa",
    "eva_config": {"rho": 2.0},
    "layer_replication": [[0, 1]],
    "a_key_of_the_future": {"module": "payload"},
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_is_no_plain_lora_is_refused_by_its_name(adapter, key):
    with pytest.raises(UserError, match=rf"^{key} .*adapter_config\.json") as error:
        read_adapter_config(adapter(**{key: REFUSED[key]}))
    assert len(error.value.problems) == 1


# what other programs write: null, empty and default values of peft's newer and older settings, and harmless additions
ORDINARY = {
    "auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers.models.llama"},
    "megatron_core": "megatron.core",
    "loftq_config": {},
    "init_lora_weights": "gaussian",
    "lora_dropout": 0.05,
    "rank_pattern": {},
    "modules_to_save": None,
    "a_key_of_the_future": None,
    "another": False,
}


def test_an_ordinary_adapter_loads(adapter):
    folder = adapter(**ORDINARY)
    loaded = load_adapter(base_of(folder), str(folder)).peft_config["default"]
    assert (loaded.r, loaded.target_modules, loaded.auto_mapping) == (2, {"q_proj", "v_proj"}, None)
    assert read_adapter_config(folder).inference_mode is True


@pytest.mark.parametrize("values", [{"r": "many"}, {"target_modules": 3}, {"task_type": "NOTHING"}])
def test_odd_values_of_known_keys_are_one_error(adapter, values):
    folder = adapter(**values)
    with pytest.raises(UserError):
        load_adapter(base_of(folder), str(folder))


def test_saved_weights_are_read_with_the_same_check(build, adapter):
    """load_policy_weights, which a resumed run uses."""
    actor = build("--use-lora", "--lora-targets", "q_proj", "v_proj").actor
    with pytest.raises(UserError, match=r"^megatron_config "):
        load_policy_weights(actor, adapter(megatron_config={"a": 1}))


def test_a_base_in_another_computers_cache_is_found_by_its_hub_name(adapter):
    """The message names it, and not a folder that does not exist."""
    path = "/home/someone/.cache/huggingface/hub/models--owner--a-base/snapshots/0123/"
    folder = adapter(base_model_name_or_path=path)
    with pytest.raises(UserError, match=r"\(owner/a-base\)"):
        find_model_ref(str(folder), "final", None)


# --- configurations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_load(tmp_path, name):
    """Also those with an auto_map for code that transformers has itself, and with bitsandbytes."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config = load_config(str(tmp_path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    assert config.model_type == PUBLISHED[name]["model_type"] and type(model).__module__.startswith("transformers.")


def test_the_published_configurations_are_of_many_families():
    assert len({config["model_type"] for config in PUBLISHED.values()}) >= 20
    assert sum("auto_map" in config for config in PUBLISHED.values()) >= 4


REFUSED_IN_CONFIG = {
    "attn_implementation": "evil-org/evil-kernel",
    "_attn_implementation": "kernels-community/flash-attn2",
    "_attn_implementation_internal": "evil-org/evil-kernel@v1:attention",
    "experts_implementation": "sonicmoe",
    "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
    "quantization_config": {"quant_method": "mxfp4"},
    "tokenizer_class": "AutoModelForCausalLM",
}
OTHERS = [
    ("attn_implementation", {"": "eager", "text_config": "evil-org/evil-kernel"}),
    ("attn_implementation", "flash_attention_2"),  # from the hub, if the package is not installed
    ("attn_implementation", ["eager"]),
    ("quantization_config", {"quant_method": "a method of the future"}),
    ("quantization_config", {"bits": 4}),
    ("quantization_config", "fp8"),
]


@pytest.mark.parametrize(("key", "value"), [*REFUSED_IN_CONFIG.items(), *OTHERS])
def test_code_and_kernels_in_config_json_are_refused_by_their_name(changed, key, value):
    folder = changed("config.json", {key: value, **({"model_type": "homemade"} if key == "auto_map" else {})})
    named = "quantization method" if key == "quantization_config" else key
    for load in (load_config, load_tokenizer, lambda name: load_policy(name, device=CPU, vocabulary=0)):
        with pytest.raises(UserError, match=rf"{named}.*config\.json of .*copy"):
            load(str(folder))


@pytest.mark.parametrize("key", [key for key in REFUSED_IN_CONFIG if key not in ("auto_map", "tokenizer_class")])
def test_the_plan_refuses_the_same_values(changed, key, user_error):
    """It reads the config.json of a usual model without transformers."""
    with user_error("config.json"):
        config_values(str(changed("config.json", {key: REFUSED_IN_CONFIG[key]})))


@pytest.mark.parametrize("key", ["auto_map", "attn_implementation", "quantization_config"])
def test_the_config_of_a_part_of_a_model_is_checked_too(changed, key, user_error):
    """transformers builds parts with AutoModel, and offers to run the code of their auto_map."""
    part = {"model_type": "llama", key: REFUSED_IN_CONFIG[key]}
    for values in ({"text_config": part}, {"parts": [{"vision": part}]}):
        with user_error("config.json"):
            load_config(str(changed("config.json", values)))


def test_a_config_json_that_names_another_file_is_checked_there(changed):
    folder = changed("config.json", {"configuration_files": ["config.4.0.0.json"]})
    values = json.loads((folder / "config.json").read_text()) | {"attn_implementation": "evil-org/evil-kernel"}
    del values["configuration_files"]
    (folder / "config.4.0.0.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="attn_implementation 'evil-org/evil-kernel'"):
        load_config(str(folder))


@pytest.mark.parametrize(
    "values", [{"hidden_size": -4}, {"hidden_act": "nothing"}, {"num_attention_heads": "four"}, {"dtype": "hub"}]
)
def test_odd_values_in_config_json_are_one_error(changed, values):
    folder = changed("config.json", values)
    with pytest.raises(UserError, match="copy"):
        load_policy(str(folder), device=CPU, vocabulary=0)


@pytest.mark.parametrize("error", [ImportError("kernels is not installed"), TypeError("x"), KeyError("y")])
def test_errors_of_any_class_while_a_model_is_read_are_one_error(error, user_error):
    with user_error("the model"), readable("the model"):
        raise error


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: not enough memory")])
def test_errors_of_memory_are_not_those_of_the_model(error):
    with pytest.raises(type(error)) as found, readable("the model"):
        raise error
    assert found.value is error


# --- tokenizers ------------------------------------------------------------------------------------------------------

CODE = {"AutoTokenizer": ["tokenization_home.HomeTokenizer", None]}


@pytest.mark.parametrize(
    "values",
    [
        {"tokenizer_class": "AutoModelForCausalLM"},  # transformers would call its from_pretrained
        {"tokenizer_class": "AutoTokenizer"},
        {"tokenizer_class": "pipeline"},
        {"tokenizer_class": ["PreTrainedTokenizerFast"]},
        {"tokenizer_class": "HomeTokenizer", "auto_map": CODE},
        {"tokenizer_class": None, "auto_map": CODE},
        {"tokenizer_class": "HomeTokenizer", "auto_map": CODE["AutoTokenizer"]},  # an older form
    ],
)
def test_code_in_tokenizer_config_json_is_refused_by_its_name(changed, values, user_error):
    folder = changed("tokenizer_config.json", values)
    (folder / "tokenization_home.py").write_text("raise SystemExit('this code was run')")
    with user_error("auto_map" if "auto_map" in values else "tokenizer_class", "tokenizer_config.json"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    "values",
    [
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"tokenizer_class": "PreTrainedTokenizerFast", "auto_map": CODE},
        {"tokenizer_class": "GPT2Tokenizer"},
        {"tokenizer_class": "GPTNeoXTokenizerFast", "auto_map": CODE},
        {"tokenizer_class": "Qwen2Tokenizer"},
        {"tokenizer_class": "TokenizersBackend"},
        {"tokenizer_class": None},
        {"tokenizer_class": "BloomTokenizerFast"},
        {"tokenizer_class": "UnknownTokenizer"},  # transformers reads its tokenizer.json
    ],
)
def test_published_forms_of_tokenizer_config_json_load(changed, start_model, values):
    loaded = load_tokenizer(str(changed("tokenizer_config.json", values)))
    assert loaded.get_vocab() == load_tokenizer(str(start_model)).get_vocab()


def test_a_model_without_code_has_no_problem(start_model):
    check_no_code(str(start_model))


def test_an_adapter_of_the_hub_is_not_loaded_as_a_model(adapter, changed, monkeypatch, user_error):
    """transformers would load the adapter through peft, with every key of its adapter_config.json. A local folder is
    refused by find_model."""
    folder = changed("config.json", {})
    shutil.copy(adapter() / "adapter_config.json", folder)
    with user_error("copy"):
        load_policy(str(folder), device=CPU, vocabulary=0)
