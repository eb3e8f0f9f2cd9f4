"""Makes models and tokenizers with random weights: tiny ones for tests, several model families, and SmolLM2-135M's
exact shape.

python -m tests.shapes smollm2 FOLDER
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from rlhf.utils.console import quiet_libraries

# SmolLM2's form of chat template: a default system turn if the chat has none
SMOLLM2_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant<|im_end|>\n"
    "{% endif %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = [
    "Translate to English: le chat est sur la table. The cat is on the table.",
    "You are a helpful assistant. Answer the question step by step and justify your steps.",
    "What is the capital of France? The capital of France is Paris, which lies on the river Seine.",
    "Numbers: 0 1 2 3 4 5 6 7 8 9; signs: . , ; : ! ? ( ) [ ] { } < > | / \\ @ # $ % & * + - = _ ~",
]


def smollm2_tokenizer(vocabulary: int = 400, texts: Iterable[str] = TEXT) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with SmolLM2's special tokens: pad is EOS, `<|endoftext|>` is unused."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], vocabulary, texts),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=SMOLLM2_TEMPLATE,
    )


def _byte_level(special: Sequence[str], vocabulary: int = 400, texts: Iterable[str] = TEXT) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=list(special),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return tokenizer


def llama_config(size: str, vocabulary: int) -> LlamaConfig:
    """Return a config: "tiny", "wide" (matrices of 4,096 weights, which 8-bit AdamW quantizes), or "smollm2",
    HuggingFaceTB/SmolLM2-135M's shape with a vocabulary of 49,152."""
    shape = {
        "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": vocabulary},
        "wide": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": vocabulary},
        "smollm2": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                    "num_key_value_heads": 3, "max_position_embeddings": 8192, "vocab_size": 49_152},
    }[size]  # fmt: skip
    return LlamaConfig(
        **shape,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )


def make_start_model(folder: Path, size: str = "tiny", seed: int = 0) -> Path:
    """Save a causal LM and its tokenizer in `folder`, in the form of a hub download: pad = EOS."""
    # the real shape needs a tokenizer that compresses English about as well as the real one: it learns Python's manual
    tokenizer = smollm2_tokenizer(*((16_000, pydoc_data.topics.topics.values()) if size == "smollm2" else ()))
    torch.manual_seed(seed)
    LlamaForCausalLM(llama_config(size, len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_base_model(folder: Path) -> Path:
    """Save a base model: no chat template, no pad, EOS is `<|endoftext|>`."""
    make_start_model(folder)
    tokenizer = smollm2_tokenizer()
    tokenizer.chat_template = None
    tokenizer.pad_token = None
    tokenizer.eos_token = "<|endoftext|>"
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    return folder


def make_reward_model(folder: Path, seed: int = 1, outputs: int = 1, pad: int | None = 0) -> Path:
    """Save a tiny sequence classifier and its tokenizer in `folder`. The pad is `<|endoftext|>` by default."""
    tokenizer = smollm2_tokenizer()
    tokenizer.pad_token = "<|endoftext|>"
    config = llama_config("tiny", len(tokenizer))
    config.num_labels = outputs
    config.pad_token_id = pad
    torch.manual_seed(seed)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def change_first_weight(file: Path) -> None:
    """Change the first number of the first tensor in a safetensors file, in place."""
    with file.open("r+b") as stream:
        at = 8 + int.from_bytes(stream.read(8), "little")
        stream.seek(at)
        old = stream.read(4)
        stream.seek(at)
        stream.write(torch.tensor([0.25]).numpy().tobytes())
    assert old != torch.tensor([0.25]).numpy().tobytes()


def with_date(source: Path, folder: Path) -> Path:
    """Copy a model, whose chat template then begins with the present date, as Llama 3.2's does."""
    shutil.copytree(source, folder)
    template = folder / "chat_template.jinja"
    dated = "{%- if strftime_now is defined %}{%- set date = strftime_now('%d %b %Y') %}{%- endif %}\n{{ date }}\n"
    template.write_text(dated + template.read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def with_named_templates(source: Path, folder: Path) -> Path:
    """Copy a model, with a second chat template beside the one named default, as Command-R and Hermes have."""
    shutil.copytree(source, folder)
    file = folder / "tokenizer_config.json"
    default = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    templates = [{"name": "default", "template": default}, {"name": "tool_use", "template": "TOOLS " + default}]
    settings = json.loads(file.read_text(encoding="utf-8")) | {"chat_template": templates}
    file.write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").unlink()
    return folder


# --- families --------------------------------------------------------------------------------------------------------

# as Qwen 3: no default system turn; its thinking tokens are added tokens, but not special tokens
QWEN3_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# as Gemma 2: the template adds BOS, there is no system turn, and a turn ends with a token that is not EOS
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# as Mistral: the template adds BOS, ordinary text separates turns, a completion ends with EOS
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)


def qwen3_tokenizer() -> PreTrainedTokenizerFast:
    """No BOS. EOS ends a turn, and the pad is another token."""
    tokenizer = _byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in ("<think>", "</think>")])
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named, chat_template=QWEN3_TEMPLATE)


def gpt_neox_tokenizer() -> PreTrainedTokenizerFast:
    """One token is BOS, EOS and unknown; no token is added before a text. No pad, no template; runs of spaces are
    added tokens."""
    tokenizer = _byte_level(["<|endoftext|>", "<|padding|>"])
    tokenizer.add_tokens([AddedToken(" " * n, special=False, normalized=True) for n in (4, 8)])
    named = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def mistral_tokenizer() -> PreTrainedTokenizerFast:
    """BOS before every text, and a space before every piece of ordinary text. No pad."""
    tokenizer = _pieces(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([*_FROM_PIECES, decoders.Strip(" ", 1, 0)])
    _set_bos(tokenizer, "<s>")
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named, chat_template=MISTRAL_TEMPLATE)


def gemma_tokenizer(template: str | None = GEMMA_TEMPLATE) -> PreTrainedTokenizerFast:
    """BOS before every text, a separate pad. The tokens that separate turns are special."""
    tokenizer = _pieces(["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(_FROM_PIECES)
    _set_bos(tokenizer, "<bos>")
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named, chat_template=template)


def gemma_base_tokenizer() -> PreTrainedTokenizerFast:
    """The same as a base model, not tuned on chats."""
    return gemma_tokenizer(template=None)


_FROM_PIECES = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def _pieces(special: Sequence[str]) -> Tokenizer:
    """BPE over words that start with their space, as SentencePiece does. Unknown characters become bytes."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=180, show_progress=False))
    learned = json.loads(learner.to_str())["model"]
    vocabulary = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    merges = [tuple(merge) for merge in learned["merges"]]
    ids = {token: number for number, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(ids, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def _set_bos(tokenizer: Tokenizer, bos: str) -> None:
    ids = [(bos, tokenizer.token_to_id(bos))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=ids)


# at least 64 features per linear layer, so that all can be stored in 4 bits; weights large enough that attention
# differs between positions, and windows and soft caps small enough to change the results
WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
          "max_position_embeddings": 256, "initializer_range": 0.15}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 32}
WINDOW = 6
CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 6.0}


def make_family(
    folder: Path, tokenizer: PreTrainedTokenizerFast, kind: type[PretrainedConfig], ends: Sequence[str] = (), **more
) -> Path:
    """Save a start model of one family. `ends` are the tokens at which its generation_config stops, if not only EOS.

    Norms and biases are random, too, so that a test fails if one is ignored. The head has more rows than the tokenizer
    has tokens, as padded vocabularies do.
    """
    config = kind(vocab_size=len(tokenizer) + 5, **{**WIDTHS, **more})
    for name in ("bos", "eos", "pad"):
        setattr(config, f"{name}_token_id", getattr(tokenizer, f"{name}_token_id"))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight), alpha=0.2)
    stops = tokenizer.convert_tokens_to_ids(list(ends))
    model.generation_config.eos_token_id = stops or tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=("tiny", "smollm2"))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    quiet_libraries()
    print(make_start_model(arguments.folder, arguments.size))
