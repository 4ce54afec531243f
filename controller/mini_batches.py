"""Which sequences share an optimiser step: a random choice, made before balancing and never changed by it."""

import numpy as np

MINI_BATCHES = 1  # sets this random stream apart from that of the data's order


def draw_mini_batches(sequences: int, mini_batches: int, seed: int, step: int) -> list[np.ndarray]:
    """A random split of row numbers into mini-batches whose sizes differ by at most one; fewer where rows are few.

    The same for the same `seed`, that of the run, and `step`. Returns int64 arrays, each ascending.
    """
    rng = np.random.default_rng((seed, MINI_BATCHES, step))
    parts = np.array_split(rng.permutation(sequences), min(mini_batches, sequences))
    return [np.sort(part) for part in parts]
