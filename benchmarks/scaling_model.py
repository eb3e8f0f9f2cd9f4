"""Estimates the time of an update on 1 to 64 GPUs from compute, bandwidth and latency. Measures nothing.

python benchmarks/scaling_model.py
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python adds only the script's own folder

WEIGHTS, LORA_WEIGHTS = 134.5e6, 4.88e6  # SmolLM2-135M; adapters of rank 16 on all linear layers
COUNTS = (1, 2, 4, 8, 16, 64)


@dataclass(frozen=True)
class Link:
    """A connection between GPUs."""

    name: str
    bytes_per_s: float  # of one direction
    latency_s: float  # of one message


LINKS = (
    Link("PCIe 4.0 x16", 12e9, 20e-6),
    Link("10 Gbit/s Ethernet", 1.1e9, 50e-6),
)


@dataclass(frozen=True)
class Update:
    """A PPO update: `episodes` completions, `epochs` optimizer steps over all of them."""

    episodes: int = 256
    prompt_tokens: int = 256
    completion_tokens: int = 128
    epochs: int = 4
    flop_per_s: float = 65e12  # 40% of an RTX 4090's 163 TFLOP/s in bfloat16
    decoding_step_s: float = 1.5e-3  # bounded by the latency of kernels, not by the number of completions
    exchange_s: float = 2e-3  # completions, log-probabilities and scores

    def seconds(self, count: int, trained: float, link: Link) -> float:
        """Return the seconds of the update on `count` GPUs with `trained` trainable weights."""
        tokens = self.episodes * (self.prompt_tokens + self.completion_tokens)
        # 2 FLOP per weight and token forward, 4 backward; three forward passes for log-probabilities and scores
        flop = WEIGHTS * tokens * (3 * 2 + self.epochs * (2 + (2 + 2 * trained / WEIGHTS)))
        decoding = self.completion_tokens * self.decoding_step_s
        exchanged = 0.0 if count == 1 else self.exchange_s + self.epochs * sum_seconds(4 * trained, count, link)
        return flop / self.flop_per_s / count + decoding + exchanged


def sum_seconds(size: float, count: int, link: Link) -> float:
    """Return the seconds to add up `size` bytes over `count` GPUs in a ring.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    # 2 (N - 1) messages of size / N each
    return 2 * (count - 1) * (size / count / link.bytes_per_s + link.latency_s)


def table() -> list[str]:
    """Return the rows of a Markdown table: the speed-up over one GPU."""
    update, rows = Update(), ["| GPUs | " + " | ".join(str(n) for n in COUNTS) + " |", "|---|" + "---|" * len(COUNTS)]
    for link in LINKS:
        for name, trained in (("all weights", WEIGHTS), ("LoRA", LORA_WEIGHTS)):
            alone = update.seconds(1, trained, link)
            cells = [f"{alone / update.seconds(count, trained, link):.1f}x" for count in COUNTS]
            rows.append(f"| {link.name}, {name} | " + " | ".join([f"{alone:.1f} s", *cells[1:]]) + " |")
    return rows


if __name__ == "__main__":
    print("\n".join(table()))
