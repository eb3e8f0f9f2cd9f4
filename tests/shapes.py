"""Models and tokenizers with random weights, made on the spot: tiny ones for tests, and SmolLM2-135M's exact shape.

python -m tests.shapes smollm2 FOLDER
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from rlhf.console import quiet_libraries

# SmolLM2's form of chat template: a default system turn where the chat has none
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
    """Byte-level BPE with SmolLM2's special tokens and its quirk: pad is EOS, `<|endoftext|>` is free."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=special,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=SMOLLM2_TEMPLATE,
    )


def llama_config(size: str, vocabulary: int) -> LlamaConfig:
    """ "tiny", or "smollm2": HuggingFaceTB/SmolLM2-135M's shape, vocabulary 49,152 whatever the tokenizer has."""
    shape = {
        "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
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
    """A causal LM and tokenizer in `folder`, as the hub would give them: pad = EOS."""
    # for the real shape a tokenizer that compresses English about as the real one does: Python's own manual is at hand
    tokenizer = smollm2_tokenizer() if size == "tiny" else smollm2_tokenizer(16_000, pydoc_data.topics.topics.values())
    torch.manual_seed(seed)
    LlamaForCausalLM(llama_config(size, len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_base_model(folder: Path) -> Path:
    """A causal LM that was never tuned on chats: no template, no pad, EOS is `<|endoftext|>`."""
    make_start_model(folder)
    tokenizer = smollm2_tokenizer()
    tokenizer.chat_template, tokenizer.pad_token, tokenizer.eos_token = None, None, "<|endoftext|>"
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    return folder


def make_reward_model(folder: Path, seed: int = 1, outputs: int = 1, pad: int | None = 0) -> Path:
    """A tiny sequence classifier and tokenizer in `folder`; its pad is `<|endoftext|>` unless told otherwise."""
    tokenizer = smollm2_tokenizer()
    tokenizer.pad_token = "<|endoftext|>"
    config = llama_config("tiny", len(tokenizer))
    config.num_labels, config.pad_token_id = outputs, pad
    torch.manual_seed(seed)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=("tiny", "smollm2"))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    quiet_libraries()
    print(make_start_model(arguments.folder, arguments.size))
