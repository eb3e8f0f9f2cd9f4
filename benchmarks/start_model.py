"""The demo's start model: a small Llama trained on completions of mixed quality.

It is first trained on good completions, then on a mixture. Most completions of the mixture have a flaw, like human
demonstrations. As a result it can solve the tasks, and about one completion in three is good. The weights are shipped
in `rlhf/demo/weights/`. Rebuild them with

    python -m benchmarks.start_model --rebuild
"""

import itertools
import random
from collections.abc import Iterator

from benchmarks.pretraining import Pretraining, rebuild_command
from rlhf.demo.families import FAMILIES
from rlhf.demo.ready import WEIGHTS
from rlhf.demo.tasks import FLAWS, ask, demonstration, flawed

GOOD_SHARE = 0.35  # of the mixture; the other completions have one flaw each. Reasons: docs/decisions/demo.md


def corpus(seed: int, mixed: bool) -> Iterator[tuple[str, str]]:
    """Yield (question, completion) endlessly, from the 'train' split. If not `mixed`, only good completions."""
    rng = random.Random(f"corpus {seed} {mixed}")
    for family in itertools.cycle(FAMILIES):
        question = ask(family, rng, "train")
        good = not mixed or rng.random() < GOOD_SHARE
        yield question, demonstration(question, rng) if good else flawed(question, rng.choice(FLAWS), rng)


PRETRAINING = Pretraining(corpus, clean_share=0.6, steps=4000, vocabulary=768)

if __name__ == "__main__":
    rebuild_command(PRETRAINING, WEIGHTS, "benchmarks.start_model")
