"""Writes a run's model as a GGUF file with a Modelfile for Ollama, and compares the file with the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf.analysis.loading import load_model_ref
from rlhf.analysis.models import ModelRef, find_model_ref
from rlhf.checkpoints.gguf import SMOLLM
from rlhf.checkpoints.run_folder import SAMPLES_FOLDER
from rlhf.config import config_of_run
from rlhf.data.chat_template import SOME_CHAT, encode_completion, encode_prompt
from rlhf.data.tokenizer import load_config, load_tokenizer
from rlhf.export.modelfile import modelfile
from rlhf.run.export import untie_adapted_head
from rlhf.settings.evaluation import ExportConfig
from rlhf.utils.command_lines import command
from rlhf.utils.console import Screen
from rlhf.utils.errors import RunError, UserError, naming
from rlhf.utils.files import make_folder, read_jsonl, rename_synced, staged, write_text
from rlhf.utils.libraries import pip_install, version_of
from rlhf.utils.paths import GGUF_SUFFIX
from rlhf.utils.results import result

if TYPE_CHECKING:
    from gguf import GGUFWriter

CONVERTER = "llama.cpp's convert_hf_to_gguf.py"
FAMILIES = ("llama", "qwen2", "qwen3")  # transformers' model types, which are also llama.cpp's names
COMPARED = 16  # completions whose log-probabilities are compared
MOST_CHANGED = 0.5  # nats per token, on average: 8 bits change models of these families by up to 0.05
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# steps of a pre-tokenizer (a regular expression, or a type) -> value of tokenizer.ggml.pre
PRE_TOKENIZERS = {
    ("ByteLevel",): "gpt-2",
    ("Digits", "ByteLevel"): SMOLLM,
    (WORDS, "ByteLevel"): "qwen2",
    (WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|"), "ByteLevel"): "llama-bpe",
}
Row = tuple[list[int], list[int]]  # token ids of a prompt and its completion


def export_gguf(config: ExportConfig, screen: Screen) -> None:
    """Write the model of a run into a new folder, with a Modelfile. Raises UserError before anything is written, and
    RunError if the file does not contain the model."""
    asked = config.export
    folder = config.folder
    if version_of("gguf") is None:
        raise UserError("gguf is not installed", "--to gguf", f"Install it with: {pip_install('gguf')}")
    source = find_model_ref(asked.run[0], asked.which, asked.baseline, "run")
    settings = config_of_run(source.run)
    tokenizer = load_tokenizer(source.source, settings.data.plain_prompts, source.run.date)
    shots = source.run.data.get("few_shot", ())
    check_family(load_config(source.base or source.source), tokenizer, source.name)
    screen.say(f"loading {source.label} in float32")
    model = whole_model(source, tokenizer)
    files = sorted((source.run_folder / SAMPLES_FOLDER).glob("update-*.jsonl"))
    rows = []
    for sample in read_jsonl(files[-1], "Remove it")[:COMPARED] if files else []:
        completion = encode_completion(tokenizer, sample["completion"], sample["ended"])
        rows.append((encode_prompt(tokenizer, sample["prompt"], shots), completion))
    before = logprobs_of(model, rows)
    name = re.sub(r"[^a-z0-9_.]+", "-", Path(asked.run[0]).resolve().name.lower())
    with naming(folder), staged(folder) as staging:
        make_folder(staging)
        file = staging / f"{name}{GGUF_SUFFIX}"
        screen.say(f"writing {folder / file.name} ({asked.type})")
        write_gguf(model, tokenizer, source.source, file, asked.type)
        read_back(model, file)
        changes = (logprobs_of(model, rows) - before).abs()
        if rows and not changes.mean() < MOST_CHANGED:
            what = f"the file changes log-probabilities by {changes.mean():.3g} nats per token, and is not kept"
            raise RunError(what, f"--type {asked.type}", f"Use --type f16, or {CONVERTER}")
        text = modelfile(file.name, tokenizer, settings, shots)
        write_text(staging / "Modelfile", text)
        rename_synced(staging, folder)
    compared = {"tokens": len(changes), "mean": changes.mean(), "largest": changes.max()} if rows else None
    result(folder=folder, file=file.name, difference_nats=compared)
    if "TEMPLATE" not in text:
        screen.say("note: no TEMPLATE in the Modelfile, because the chat template is not ChatML: Ollama translates it")
    if rows:
        screen.say(f"compared the file with the model: {len(changes):,} tokens of {len(rows)} completions of the run")
        screen.say(f"difference of log-probabilities: mean {changes.mean():.2g}, largest {changes.max():.2g} nats")
    else:
        screen.say(f"warning: not compared with the model: no completions in {source.run_folder / SAMPLES_FOLDER}")
    screen.say("for Ollama:")
    screen.say(f"  {command('ollama', 'create', name, '-f', str(folder / 'Modelfile'))}")
    screen.say(f"  {command('ollama', 'run', name)}")


# --- the model -------------------------------------------------------------------------------------------------------


def check_family(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise UserError if the file cannot contain all of a model, or its tokenizer."""
    kind = config.model_type
    scaling = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    problems = {
        f"models of type {kind}": kind not in FAMILIES,
        "quantized models": getattr(config, "quantization_config", None) is not None,
        f"rope scaling {scaling}": scaling != "default" and (kind, scaling) != ("llama", "llama3"),
        "sliding windows": "sliding_attention" in (getattr(config, "layer_types", None) or ()),
        "biases": kind != "qwen2" and getattr(config, "attention_bias", False),
        "this tokenizer": steps_of(tokenizer) not in PRE_TOKENIZERS,
    }
    found = [what for what, is_there in problems.items() if is_there]
    if found:
        raise UserError(
            f"cannot write {', '.join(found)}",
            f"--to gguf, {name}",
            f"Use {CONVERTER}; an adapter must be merged first: resume the run with --merge-lora",
        )


def steps_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the regular expressions and types of a byte-level BPE tokenizer's steps before the merges."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    first = backend["pre_tokenizer"] or {}
    steps = first.get("pretokenizers", [first]) if backend["model"]["type"] == "BPE" else []
    return tuple(step.get("pattern", step).get("Regex") or step.get("type") for step in steps)


def whole_model(source: ModelRef, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return a model in float32 on the CPU; an adapter is merged into its base model in full precision."""
    model = load_model_ref(source, tokenizer, False, None, torch.device("cpu"))
    if source.base is None:
        return model
    untie_adapted_head(model)
    return model.merge_and_unload()


@torch.no_grad()
def logprobs_of(model: PreTrainedModel, rows: list[Row]) -> torch.Tensor:
    """Return the log-probabilities of the completions' tokens in nats, (tokens,)."""
    found = [torch.zeros(0)]
    for prompt, completion in rows:
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1)[range(len(completion)), completion])
    return torch.cat(found)


# --- the file --------------------------------------------------------------------------------------------------------


def tensors_of_model(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Yield name in the file, weight, and number of heads in another order than in the file (0: none) of each tensor.

    The file does not contain a head that is tied to the embeddings. It contains the divisors of the frequencies of the
    rotation, which Llama 3.1 and later have.
    """
    from gguf import MODEL_ARCH, get_tensor_name_map

    config = model.config
    names = get_tensor_name_map(MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if not (config.tie_word_embeddings and name == "lm_head.weight"):
            reordered = heads.get(name.split(".")[-2], 0) if config.model_type == "llama" else 0
            yield names.get_name(name, (".weight", ".bias")), weight, reordered
    rope = config.rope_parameters
    if rope["rope_type"] == "llama3":
        scaled = model.model.rotary_emb.inv_freq
        usual = rope["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))
        yield "rope_freqs.weight", usual / scaled, 0


def in_pairs(weight: torch.Tensor, heads: int, back: bool = False) -> torch.Tensor:
    """Return a weight of queries or keys in llama.cpp's order for Llama: it rotates neighbors, and transformers the
    two halves of a head. `back`: from llama.cpp's order to that of transformers."""
    if not heads:
        return weight
    parts = (heads, -1, 2) if back else (heads, 2, len(weight) // heads // 2)
    return weight.reshape(*parts, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str, file: Path, kind: str) -> None:
    """Write a model with its tokenizer, which is saved in `folder`. Vectors are float32, and matrices have the type
    `kind`, or float16 if their rows cannot be divided into blocks."""
    import gguf

    types = gguf.GGMLQuantizationType
    # a temporary file, so that memory for one converted tensor is enough
    writer = gguf.GGUFWriter(file, model.config.model_type, use_temp_file=True)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_shape(writer, model.config)
    add_tokenizer(writer, tokenizer, folder, model.get_input_embeddings().num_embeddings)
    for name, weight, heads in tensors_of_model(model):
        one = types.F32 if weight.ndim == 1 else types.F16 if weight.shape[-1] % 32 else types[kind.upper()]
        values = gguf.quants.quantize(in_pairs(weight, heads).numpy(), one)
        writer.add_tensor(name, values, raw_dtype=one)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_shape(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    """Add the sizes of a model to the metadata."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def add_tokenizer(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, folder: str, size: int) -> None:
    """Add a saved tokenizer to the metadata, with unused tokens up to the `size` of the embeddings."""
    from gguf import SpecialVocab, TokenType

    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = [TokenType.UNUSED] * size
    for token, number in tokenizer.get_vocab().items():
        tokens[number] = token
        kinds[number] = TokenType.NORMAL
    for number, token in tokenizer.added_tokens_decoder.items():
        kinds[number] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZERS[steps_of(tokenizer)])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    saved = SpecialVocab(folder, load_merges=True)
    saved.chat_template = tokenizer.chat_template  # old releases do not read its file
    # BOS if the tokenizer adds it, and the run's prompts have it: a chat template may not write it
    saved.add_special_token["bos"] = encode_prompt(tokenizer, SOME_CHAT)[:1] == tokenizer("").input_ids[:1]
    saved.add_to_gguf(writer)


def read_back(model: PreTrainedModel, file: Path) -> None:
    """Replace the weights of a model by those of its file."""
    from gguf import GGUFReader, dequantize

    stored = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    for name, weight, heads in tensors_of_model(model):
        values = torch.tensor(dequantize(stored[name].data, stored[name].tensor_type))
        weight.copy_(in_pairs(values, heads, back=True))
