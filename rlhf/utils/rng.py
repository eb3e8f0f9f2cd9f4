"""Random numbers: each one depends on the seed, the update, the purpose and the episode, and on nothing else.

So a completion does not depend on the batch that it is sampled in, and a resumed run needs no stored random state.
"""

from __future__ import annotations

import numpy as np


def rng_for(seed: int, update: int, purpose: str, episode: int = 0) -> np.random.Generator:
    """The random numbers of one purpose in one update (and episode), the same whenever and wherever it is asked."""
    return np.random.default_rng([seed, update, *purpose.encode(), episode])
