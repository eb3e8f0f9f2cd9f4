"""What is measured: one piece of work that both sides do, with models of random weights and prompts of random ids."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TEMPERATURE, KL_COEF, LEARNING_RATE, SEED = 0.7, 0.05, 5e-6, 42  # the same on both sides
TINY = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 2048}  # fmt: skip
PAD, BOS, EOS = range(3)
FIRST_LETTER = 0x20000  # of a plane whose characters are all alike to a tokenizer: one a token


@dataclass(frozen=True)
class Work:
    """`updates` updates, each of `batch_size` prompts (x `K` replies under GRPO) and `ppo_epochs` optimizer steps."""

    folder: str  # of the models
    algorithm: str = "ppo"
    size: str = "tiny"
    device: str = "cpu"
    dtype: str = "float32"
    batch_size: int = 8  # prompts
    K: int = 6
    prompt_length: int = 64  # tokens
    reply_length: int = 64  # tokens
    ppo_epochs: int = 4  # passes over a rollout, an optimizer step each
    minibatches: int = 1  # optimizer steps per pass
    varied: bool = False  # prompts of unlike lengths, half of `prompt_length` in the mean
    updates: int = 2
    threads: int | None = None  # None: torch's own choice
    lora: bool = False  # ours alone
    load_in_4bit: bool = False  # ours alone

    @classmethod
    def read(cls, file: str | Path) -> Work:
        return cls(**json.loads(Path(file).read_text(encoding="utf-8")))

    def write(self, file: Path) -> Path:
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return file

    @property
    def bf16(self) -> bool:
        return self.dtype == "bfloat16"

    @property
    def episodes(self) -> int:
        """Replies per update."""
        return self.batch_size * (self.K if self.algorithm == "grpo" else 1)

    @property
    def settings(self) -> dict[str, Any]:
        """All that governs the work, by name."""
        aside = {"folder"} if self.algorithm == "grpo" else {"folder", "K"}
        settings = {name: value for name, value in asdict(self).items() if name not in aside}
        same = {"temperature": TEMPERATURE, "kl_coef": KL_COEF, "learning_rate": LEARNING_RATE, "seed": SEED}
        return {**settings, **same}

    @property
    def policy(self) -> Path:
        return Path(self.folder, "policy")

    @property
    def reward_model(self) -> Path:
        return Path(self.folder, "reward")

    @property
    def output(self) -> str:
        return str(Path(self.folder, "output"))


# --- the command line's part that all benchmarks have ----------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a Work that every benchmark has."""
    parser.add_argument("--algorithm", choices=("ppo", "grpo"), default="ppo")
    parser.add_argument("--size", choices=("tiny", "smollm2"), default="tiny", help="SmolLM2-135M's shape, or less")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="unset: the card where torch can use one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the forward pass")
    parser.add_argument("--K", type=at_least(2), default=6, help="replies per prompt under GRPO (6)")
    parser.add_argument("--prompt-length", type=at_least(1), default=64, help="tokens (64)")
    parser.add_argument("--threads", type=at_least(1), help="CPU threads; unset: torch's own choice")
    parser.add_argument("--json", type=Path, help="file for the figures")


PROMPTS = {"ppo": 8, "grpo": 2}


def add_update_flags(parser: argparse.ArgumentParser, ppo_epochs: int) -> None:
    """Flags of the benchmarks that look at single updates, for `parse_update`."""
    parser.add_argument("--batch-size", type=at_least(1), help="prompts per update (ppo 8, grpo 2)")
    parser.add_argument("--reply-length", type=at_least(2), default=64, help="tokens (64)")
    parser.add_argument(
        "--ppo-epochs", type=at_least(1), default=ppo_epochs, help=f"passes over a rollout ({ppo_epochs})"
    )
    parser.add_argument("--lora", action="store_true", help="ours with adapters (TRL trains all weights)")
    parser.add_argument("--load-in-4bit", action="store_true", help="ours with adapters over 4-bit weights")


def parse_update(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The flags, with what follows from them: the algorithm's batch, and adapters over 4-bit weights."""
    arguments = parser.parse_args(argv)
    arguments.batch_size = arguments.batch_size or PROMPTS[arguments.algorithm]
    arguments.lora = arguments.lora or arguments.load_in_4bit
    return arguments


def at_least(low: int):
    """For argparse: a whole number from `low` on."""

    def number(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is below {low}")
        return value

    return number


def work_of(arguments: argparse.Namespace, **more) -> Work:
    """The Work that flags and `more` describe."""
    given = {**vars(arguments), **more}
    return Work(**{name: given[name] for name in Work.__dataclass_fields__ if name in given})


def choose_device(wanted: str | None) -> str:
    """The device, and the environment that makes accelerate (and so TRL) take it, and one card at most.

    Call it before anything imports accelerate. Raises UserError where there is no such device.
    """
    # nothing is asked of the hub; and of several cards one, over all of which transformers would split batches
    cards = "-1" if wanted == "cpu" else os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES=cards)
    import torch  # slow to import: not at the top, where `--help` would wait for it

    from rlhf.utils.errors import UserError

    if torch.cuda.is_available():
        os.environ.pop("ACCELERATE_USE_CPU", None)
        return "cuda"
    if wanted == "cuda":
        raise UserError("no GPU that this torch can use: --device cuda. Use --device cpu")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    return "cpu"


# --- models and prompts ----------------------------------------------------------------------------------------------


def letter(token: int) -> str:
    return chr(FIRST_LETTER + token)


def make_tokenizer(vocabulary: int):
    """A letter a token: text and ids are the same whoever renders, joins or cuts them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"<|pad|>": PAD, "<|bos|>": BOS, "<|eos|>": EOS}
    words = special | {letter(token): token for token in range(len(special), vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|bos|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    names = {"pad_token": "<|pad|>", "bos_token": "<|bos|>", "eos_token": "<|eos|>", "unk_token": "<|bos|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **names)


def make_models(work: Work) -> None:
    """Policy and reward model of one shape, random weights, in the work's folder, each with the tokenizer."""
    import torch
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification

    config = model_config(work)
    tokenizer = make_tokenizer(config.vocab_size)
    for kind, folder in ((LlamaForCausalLM, work.policy), (LlamaForSequenceClassification, work.reward_model)):
        torch.manual_seed(SEED)
        model = kind(config)
        rule_out_special(model.get_input_embeddings().weight.data)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def model_config(work: Work):
    """The LlamaConfig of the work's size, for a policy or a reward model."""
    from tests.shapes import llama_config

    config = llama_config("smollm2", 0)
    if work.size == "tiny":
        config.update(TINY)
    config.pad_token_id, config.num_labels = PAD, 1
    return config


def rule_out_special(embeddings) -> None:
    """Every reply shall have its full length: in one direction all tokens lie one way, the special ones the other.

    The hidden states then lie with the tokens read, and the logits (the embeddings are tied) against special tokens.
    """
    embeddings[:, 0] = 1.0
    embeddings[: EOS + 1, 0] = -1.0


def random_prompts(lengths: Sequence[int], vocabulary: int, seed: int) -> list:
    """Prompts of random ids, with the text that the tokenizer turns into the same ids."""
    from rlhf.data.examples import Example
    from rlhf.data.prompts import Prompt

    return [
        Prompt(tuple(ids), Example(messages=({"role": "user", "content": "".join(map(letter, ids))},)))
        for ids in random_rows(lengths, vocabulary, seed)
    ]


def prompt_ids(work: Work, vocabulary: int) -> list[list[int]]:
    """Prompts for all updates, of random ids, none of them special."""
    return random_rows(prompt_lengths(work), vocabulary, SEED)


def prompt_lengths(work: Work) -> list[int]:
    """Of all updates' prompts, in tokens: all the same, or half of that in the mean."""
    count = work.updates * work.batch_size
    return (
        varied(work.prompt_length / 2, work.prompt_length, count, SEED)
        if work.varied
        else [work.prompt_length] * count
    )


def varied(mean: float, most: int, count: int, seed: int) -> list[int]:
    """`count` lengths in [1, most], in random order: even quantiles of an exponential distribution cut at `most`.

    Its scale s is such that the mean is right after the cut: E min(X, most) = s (1 - exp(-most / s)).
    """
    import numpy as np

    scale = mean
    for _ in range(50):
        scale = mean / -np.expm1(-most / scale)
    quantiles = (np.arange(count) + 0.5) / count
    lengths = np.rint(-scale * np.log1p(-quantiles)).clip(1, most).astype(int)
    return np.random.default_rng(seed).permutation(lengths).tolist()


def random_rows(lengths: Sequence[int], vocabulary: int, seed: int) -> list[list[int]]:
    """Random ids, none of them special."""
    import numpy as np

    generator = np.random.default_rng(seed)
    return [generator.integers(EOS + 1, vocabulary, length).tolist() for length in lengths]
