"""The work that the benchmarks measure: models with random weights, prompts with random ids, and common flags."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf.algorithms.table import ALGORITHMS

# the same for both implementations
TEMPERATURE = 0.7
KL_COEF = 0.05
LEARNING_RATE = 5e-6
SEED = 42
TINY = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 2048}  # fmt: skip
PAD, BOS, EOS = range(3)
FIRST_LETTER = 0x20000  # start of a Unicode plane in which each character is one token


@dataclass(frozen=True)
class Work:
    """`updates` updates, each with `batch_size` prompts (GRPO, RLOO: x `K` completions) and `ppo_epochs` x
    `minibatches` optimizer steps."""

    folder: str  # of the models and outputs
    algorithm: str = "ppo"
    size: str = "tiny"
    device: str = "cpu"
    dtype: str = "float32"
    batch_size: int = 8  # prompts
    K: int = 6
    prompt_length: int = 64  # tokens
    reply_length: int = 64  # tokens
    ppo_epochs: int = 4  # epochs over each rollout
    minibatches: int = 1  # optimizer steps per epoch over the rollout
    varied: bool = False  # different prompt lengths, on average half of `prompt_length`
    updates: int = 2
    threads: int | None = None  # None: torch's choice
    lora: bool = False  # only ours
    load_in_4bit: bool = False  # only ours
    critic: str = "shared"  # only ours

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
    def has_groups(self) -> bool:
        return ALGORITHMS[self.algorithm].group_size > 1

    @property
    def episodes(self) -> int:
        """Completions per update."""
        return self.batch_size * (self.K if self.has_groups else 1)

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of the work, by name."""
        excluded = {"folder"} if self.has_groups else {"folder", "K"}
        settings = {name: value for name, value in asdict(self).items() if name not in excluded}
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


# --- common flags ----------------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser, algorithms: Sequence[str] = ("ppo", "grpo")) -> None:
    """Add the flags that all benchmarks share. By default `algorithms` are those that stock TRL is measured with."""
    parser.add_argument("--algorithm", choices=tuple(algorithms), default="ppo", help="algorithm (ppo)")
    parser.add_argument(
        "--size", choices=("tiny", "smollm2"), default="tiny", help="model shape: SmolLM2-135M's or a tiny one (tiny)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU if torch can use one")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the forward pass (float32)"
    )
    parser.add_argument("--K", type=at_least(2), default=6, help="completions per prompt with GRPO and RLOO (6)")
    parser.add_argument("--prompt-length", type=at_least(1), default=64, help="prompt length in tokens (64)")
    parser.add_argument("--threads", type=at_least(1), help="CPU threads (default: torch's choice)")
    parser.add_argument("--write", type=Path, help="JSON file for the results")


# prompts per update: without groups, and groups of completions
PROMPTS = 8
GROUPS = 2


def add_update_flags(parser: argparse.ArgumentParser, ppo_epochs: int) -> None:
    """Add the flags of the benchmarks that measure single updates; see `parse_update`."""
    parser.add_argument("--batch-size", type=at_least(1), help="prompts per update (PPO 8, others 2)")
    parser.add_argument("--reply-length", type=at_least(2), default=64, help="completion length in tokens (64)")
    parser.add_argument(
        "--ppo-epochs", type=at_least(1), default=ppo_epochs, help=f"epochs over each rollout ({ppo_epochs})"
    )
    parser.add_argument("--lora", action="store_true", help="train LoRA adapters (TRL trains all weights)")
    parser.add_argument(
        "--load-in-4bit", action="store_true", help="train LoRA adapters over 4-bit weights (TRL trains all weights)"
    )

    parser.add_argument(
        "--critic", choices=("shared", "separate", "reward-model"), default="shared", help="PPO's critic (shared)"
    )


def parse_update(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parse the flags. Sets the algorithm's default batch size, and --lora if --load-in-4bit is set."""
    arguments = parser.parse_args(argv)
    usual = GROUPS if ALGORITHMS[arguments.algorithm].group_size > 1 else PROMPTS
    arguments.batch_size = arguments.batch_size or usual
    arguments.lora = arguments.lora or arguments.load_in_4bit
    return arguments


def at_least(low: int):
    """Return an argparse type: an integer of at least `low`."""

    def number(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is below {low}")
        return value

    return number


def work_of(arguments: argparse.Namespace, **more) -> Work:
    """Return the Work for the flags and `more`."""
    given = {**vars(arguments), **more}
    return Work(**{name: given[name] for name in Work.__dataclass_fields__ if name in given})


def choose_device(wanted: str | None) -> str:
    """Return the device, and set the environment so that accelerate (and TRL) use it. At most one GPU is visible.

    Must be called before accelerate is imported. Raises UserError if the device does not exist.
    """
    # offline: no request to the hub; one GPU: transformers would split batches over several
    gpus = "-1" if wanted == "cpu" else os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES=gpus)
    import torch  # here because it is slow, and --help does not need it

    from rlhf.utils.errors import UserError

    if torch.cuda.is_available():
        os.environ.pop("ACCELERATE_USE_CPU", None)
        return "cuda"
    if wanted == "cuda":
        raise UserError("no GPU that this torch can use", "--device cuda", "Use --device cpu")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    return "cpu"


# --- models and prompts ----------------------------------------------------------------------------------------------


def letter(token: int) -> str:
    return chr(FIRST_LETTER + token)


def make_tokenizer(vocabulary: int):
    """Return a tokenizer with one token per letter, so that text and ids match, however they are joined or cut."""
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
    """Save a policy and a reward model of the same shape, with random weights, in the work's folder."""
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
    """Return the LlamaConfig for the work's size, for a policy or a reward model."""
    from tests.shapes import llama_config

    config = llama_config("smollm2", 0)
    if work.size == "tiny":
        config.update(TINY)
    config.pad_token_id = PAD
    config.num_labels = 1
    return config


def rule_out_special(embeddings) -> None:
    """Change the embeddings so that special tokens are never sampled and every completion has its full length.

    One dimension is +1 for all ordinary tokens and -1 for special ones. The hidden states point in the direction of
    the tokens read, so the logits (the embeddings are tied) of special tokens are low.
    """
    embeddings[:, 0] = 1.0
    embeddings[: EOS + 1, 0] = -1.0


def random_prompts(lengths: Sequence[int], vocabulary: int, seed: int) -> list:
    """Return prompts with random ids, and with the text that the tokenizer encodes to the same ids."""
    from rlhf.data.prompts import Prompt
    from rlhf.data.row import Example

    return [
        Prompt(tuple(ids), Example(messages=({"role": "user", "content": "".join(map(letter, ids))},)))
        for ids in random_rows(lengths, vocabulary, seed)
    ]


def prompt_ids(work: Work, vocabulary: int) -> list[list[int]]:
    """Return prompts for all updates, with random ids without special tokens."""
    return random_rows(prompt_lengths(work), vocabulary, SEED)


def prompt_lengths(work: Work) -> list[int]:
    """Return the lengths in tokens of all updates' prompts: `prompt_length`, or if `varied` half of it on average."""
    count = work.updates * work.batch_size
    return (
        varied(work.prompt_length / 2, work.prompt_length, count, SEED)
        if work.varied
        else [work.prompt_length] * count
    )


def varied(mean: float, most: int, count: int, seed: int) -> list[int]:
    """Return `count` lengths in [1, most], in random order: quantiles of an exponential distribution, clipped.

    The scale s is chosen so that the mean is correct after clipping: E min(X, most) = s (1 - exp(-most / s)).
    """
    import numpy as np

    scale = mean
    for _ in range(50):
        scale = mean / -np.expm1(-most / scale)
    quantiles = (np.arange(count) + 0.5) / count
    lengths = np.rint(-scale * np.log1p(-quantiles)).clip(1, most).astype(int)
    return np.random.default_rng(seed).permutation(lengths).tolist()


def random_rows(lengths: Sequence[int], vocabulary: int, seed: int) -> list[list[int]]:
    """Return rows of random ids without special tokens."""
    import numpy as np

    generator = np.random.default_rng(seed)
    return [generator.integers(EOS + 1, vocabulary, length).tolist() for length in lengths]
