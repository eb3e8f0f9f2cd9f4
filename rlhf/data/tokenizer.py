"""Loads tokenizers and configs of models, without their weights."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from rlhf.checkpoints.model_folder import ADAPTER_CONFIG, read_config, read_object
from rlhf.checkpoints.trust import check_no_code, code_problems, file_of, readable
from rlhf.data.chat_template import CLOCK, DATE, KWARGS, end_of_turn, today
from rlhf.utils.errors import Problem, UserError, raise_if

EOS_IDS = "completion_end_ids"  # key of tokenizer_config.json, which an adapter's folder has, too
SET_HERE = ("messages", "tools", "add_generation_prompt")  # variables of chat templates that each rendering sets
PAD_TOKENS = ("<|endoftext|>", "<|finetune_right_pad_id|>", "<|pad|>", "<pad>", "[PAD]", "<|PAD_TOKEN|>")


def load_tokenizer(
    name: str, plain: bool = False, date: str | None = None, kwargs: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, with left padding; `plain` removes its chat template. Raises UserError if it has
    no EOS, or no token for padding.

    Of several chat templates, only the one named default is kept: it renders all prompts, so it is the one to save.
    `date` (None: now) is the date for `render_chat`, if the template writes one. A model that was trained with a date
    keeps this date. `kwargs` (JSON) are variables of the chat template; None: those with which the model was trained.

    A pad token that equals EOS (SmolLM2) is replaced. EOS becomes the token that ends completions: chat models of
    Gemma end them with `<end_of_turn>`, but their tokenizer's EOS ends a document. The EOS ids of the generation
    config are stored for `eos_ids`.
    """
    with readable(name, "Give a model folder that includes its tokenizer"):
        check_no_code(name)
        tokenizer = AutoTokenizer.from_pretrained(
            name, config=_config_for_tokenizer(name), padding_side="left", trust_remote_code=False
        )
    _restore_pre_tokenizer(tokenizer, name)
    if isinstance(tokenizer.chat_template, dict):
        tokenizer.chat_template = tokenizer.chat_template.get("default", tokenizer.chat_template)
    if plain:
        tokenizer.chat_template = None
    trained_at = tokenizer.init_kwargs.pop(DATE, None)
    if CLOCK in (tokenizer.chat_template or ""):
        tokenizer.init_kwargs[DATE] = trained_at or date or today()
    trained_with = tokenizer.init_kwargs.pop(KWARGS, {})
    variables = trained_with if kwargs is None else json.loads(kwargs)
    if variables and not plain:
        tokenizer.init_kwargs[KWARGS] = variables
    if tokenizer.eos_token_id is None:
        raise UserError("no EOS token", f"tokenizer of {name}", "Set eos_token in its tokenizer_config.json")
    end = end_of_turn(tokenizer)
    stops = tokenizer.init_kwargs.get(EOS_IDS) or _stops(name)
    if end in stops:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    tokenizer.init_kwargs[EOS_IDS] = list(dict.fromkeys([tokenizer.eos_token_id, *stops]))
    # detail 1: pad is never EOS (N details). Otherwise masks of padding mask EOS, and the policy never learns to stop.
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = _free_token(tokenizer, name)
    return tokenizer


def check_kwargs(tokenizer: PreTrainedTokenizerBase, kwargs: str | None, place: str) -> None:
    """Raise UserError if the chat template of the model at `place` does not read all of --chat-template-kwargs."""
    for name in json.loads(kwargs or "{}"):
        if name in SET_HERE or not re.search(rf"\b{re.escape(name)}\b", tokenizer.chat_template or ""):
            raise UserError(
                f"no chat template with a variable {name} to set",
                f"--chat-template-kwargs {kwargs}, {place}",
                "Remove it, or give variables that the model's chat template reads",
            )


def _restore_pre_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Give a tokenizer the sequence of pre-tokenizers in the model's tokenizer.json, if loading has dropped it.

    transformers 5.23 builds the tokenizer of class GPT2Tokenizer with a ByteLevel pre-tokenizer only. SmolLM2's file
    names this class and has Digits before ByteLevel: without it, numbers have other ids than in its pretraining.
    """
    file = cached_file(name, "tokenizer.json", _raise_exceptions_for_missing_entries=False, local_files_only=True)
    stored = read_object(Path(file)).get("pre_tokenizer") or {} if file is not None else {}
    loaded = tokenizer.backend_tokenizer.pre_tokenizer if tokenizer.is_fast else None
    if stored.get("type") == "Sequence" and isinstance(loaded, ByteLevel):
        empty = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
        tokenizer.backend_tokenizer.pre_tokenizer = Tokenizer.from_str(
            json.dumps(empty | {"pre_tokenizer": stored})
        ).pre_tokenizer


def _config_for_tokenizer(name: str) -> PreTrainedConfig | None:
    """Return a config from which transformers selects the tokenizer's class; None: it loads the model's config.

    The import of a model's config class takes two seconds. It is not needed if a folder's tokenizer_config.json names
    a class of transformers: then only the model type counts.
    """
    file = Path(name, "tokenizer_config.json")
    settings = read_object(file) if file.is_file() and Path(name, "config.json").is_file() else {}
    if not settings.get("tokenizer_class") or "auto_map" in settings:
        return None
    model_type = read_config(Path(name)).get("model_type")
    return PreTrainedConfig(name_or_path=name, model_type=model_type) if model_type in CONFIG_MAPPING_NAMES else None


def eos_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of all tokens that end a completion: EOS, and the other EOS ids of the model's generation config,
    of which Llama 3 and Qwen have several."""
    return list(dict.fromkeys([tokenizer.eos_token_id, *tokenizer.init_kwargs.get(EOS_IDS, ())]))


def _stops(name: str) -> list[int]:
    """Return the EOS ids in the model's generation_config.json; [] if it has none."""
    try:
        file = file_of(name, GENERATION_CONFIG_NAME)
    except OSError:  # the file is optional
        return []
    stops = read_object(Path(file)).get("eos_token_id") if file is not None else None
    return [stop for stop in (stops if isinstance(stops, list) else [stops]) if type(stop) is int and stop >= 0]


def _free_token(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    """Return a special token that is not EOS or BOS, and is not part of the chat template."""
    vocabulary = tokenizer.get_vocab()
    template = tokenizer.chat_template or ""
    special = [t for t in tokenizer.all_special_tokens if t in vocabulary]
    added = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]  # others are text, such as spaces
    for token in (*(t for t in PAD_TOKENS if t in vocabulary), *special, *added):
        if token not in (tokenizer.eos_token, tokenizer.bos_token) and token not in template:
            return token
    raise UserError(
        "no pad token other than EOS, and no unused special token",
        f"tokenizer of {name}",
        "Set pad_token in its tokenizer_config.json to a token that no text needs",
    )


def load_config(name: str) -> PreTrainedConfig:
    """Load a model's config.json. Raises UserError if it cannot be loaded, or names code or kernels."""
    with readable(name):
        if file_of(name, ADAPTER_CONFIG) is not None:  # transformers would load it without the checks of load_adapter
            raise UserError("an adapter, not a full model", name, "Give its folder on this computer, or a full model")
        check_no_code(name)
        return AutoConfig.from_pretrained(name, trust_remote_code=False)


def context_of(config: PreTrainedConfig) -> int | None:
    """Return the context length of a model in tokens; None if its config has none."""
    return values_of(config).get("max_position_embeddings")


# what the JSON files of these model types must contain to be read without transformers' config class and its defaults
TYPES = ("llama", "mistral", "qwen2", "qwen3")
SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
         "vocab_size", "max_position_embeddings")  # fmt: skip
TIED = "tie_word_embeddings"


def config_values(name: str) -> dict[str, Any]:
    """Return the values of a model's config, for a plan. Raises UserError as `load_config` does.

    The config.json of a usual model is read directly, because the import of its config class takes two seconds.
    """
    values = read_config(Path(name)) if Path(name).is_dir() else {}
    raise_if(code_problems(values, name) if values else [])
    has_sizes = all(type(values.get(key)) is int and values[key] > 0 for key in SIZES)
    has_heads = "head_dim" in values or values.get("model_type") != "qwen3"  # Qwen 3's default is not H / heads
    if values.get("model_type") in TYPES and has_sizes and has_heads and type(values.get(TIED)) is bool:
        return values
    return values_of(load_config(name))


def values_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the values of a language model's config, with the usual names: GPT-2 calls them n_layer and so on.

    With longrope (Phi-3) the context is that of its short factors: one longer text would change all log-probs of a
    forward pass.
    """
    text = config.get_text_config()
    values = {**text.to_dict(), **{key: getattr(text, key) for key in (*SIZES, TIED) if hasattr(text, key)}}
    rotary = getattr(text, "rope_parameters", None) or {}
    if rotary.get("rope_type") == "longrope":
        values["max_position_embeddings"] = rotary["original_max_position_embeddings"]
    return values


def context_problems(
    lengths: Sequence[int],
    context: int | None,
    max_new_tokens: int,
    source: str,
    model: str = "start model",
    added: int = 0,
) -> list[Problem]:
    """Return an error if prompts of these lengths (tokens), alone or with completions of `max_new_tokens`, exceed a
    model's context (None: no limit) without the `added` tokens that a chat template writes around a completion. The
    message contains `source` and `model`."""
    longest = max(lengths)
    if context is None or longest + max_new_tokens <= context - added:
        return []
    size = f"{context} tokens" + (f" minus {added} for its chat template" if added else "")
    context -= added
    alone = longest > context
    room = context if alone else context - max_new_tokens
    flag, more = ("", "") if alone else (f" plus --max-new-tokens {max_new_tokens}", f" + {max_new_tokens}")
    fixes = [f"--max-new-tokens {context - longest}"] if longest < context else []
    if max_new_tokens < context:
        fixes.append(f"--prompt-length {context - max_new_tokens} (longer prompts are skipped)")
    return [
        Problem(
            f"{sum(n > room for n in lengths)} of {len(lengths)} prompts{flag} are longer than the "
            f"{model}'s context of {size} (the longest: {longest}{more})",
            source,
            f"Try {' or '.join(fixes) or 'shorter completions'}",
        )
    ]


def ids_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many embeddings a tokenizer needs: its largest id + 1, because ids may be missing in between."""
    return max(tokenizer.get_vocab().values()) + 1


def check_vocabulary(tokens: int, embeddings: int, name: str) -> None:
    """Raise UserError if a tokenizer has more tokens than its model has embeddings."""
    if tokens > embeddings:
        raise UserError(
            f"the tokenizer has {tokens} tokens, but the model has only {embeddings} embeddings",
            name,
            "Use a model with its own tokenizer, in one folder",
        )
