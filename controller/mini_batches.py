"""Which sequences share an optimiser step: a random choice, made before balancing and never changed by it."""

from collections.abc import Sequence

import numpy as np

from workers.remote_batch import RemoteBatch

MINI_BATCHES = 1  # sets this random stream apart from that of the data's order


def draw_mini_batches(sequences: int, mini_batches: int, seed: int, step: int, epoch: int = 0) -> list[np.ndarray]:
    """A random split of row numbers into mini-batches whose sizes differ by at most one; fewer where rows are few.

    The same for the same `seed`, that of the run, `step` and `epoch`, the pass over the step's samples, from 0. Returns
    int64 arrays, each ascending.
    """
    rng = np.random.default_rng((seed, MINI_BATCHES, step, epoch))
    parts = np.array_split(rng.permutation(sequences), min(mini_batches, sequences))
    return [np.sort(part) for part in parts]


def with_group_tokens(batch: RemoteBatch, mini_batches: Sequence[np.ndarray]) -> RemoteBatch:
    """The batch with the column `group_tokens`: loss tokens of each sequence's group in its mini-batch, int64 [B].

    batch: light columns `uid`, equal within a group, and `response_tokens`. A group that is spread over several
    mini-batches counts in each of them for what it has there.
    """
    counts = np.zeros(len(batch), dtype=np.int64)
    for rows in mini_batches:
        names, group = np.unique(batch["uid"][rows], return_inverse=True)
        totals = np.zeros(len(names), dtype=np.int64)
        np.add.at(totals, group, batch["response_tokens"][rows])
        counts[rows] = totals[group]
    return batch.with_columns(group_tokens=counts)
