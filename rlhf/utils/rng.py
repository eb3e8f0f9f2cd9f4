"""Random numbers that depend only on the seed, the update, the purpose and the episode.

So a completion does not depend on the batch in which it is sampled, and a resumed run needs no stored random state.
"""

from __future__ import annotations

import numpy as np


def rng_for(seed: int, update: int, purpose: str, episode: int = 0) -> np.random.Generator:
    """Return the random generator for a purpose in an update (and episode). Equal arguments give equal numbers."""
    return np.random.default_rng([seed, update, *purpose.encode(), episode])
