"""Hashes of a sample's prefixes, by which the driver finds shared tokens without reading any.

    prompt | 1 | 2 | 3 | ... | 64 | 65 .. 68 | 69 .. 72 | ...   a hash of the tokens up to each later bar

Two samples of a prompt share tokens up to their last equal hash. At most a 16th more stays unseen, and
nothing within the first 64 tokens after the prompt.
"""

import numpy as np

EACH = 64
"""This many tokens after the prompt have a hash each. Later steps are a 16th of the tokens before them."""
# 2^64 / golden ratio: multiples of it spread over all bits (Knuth 6.4).
_ODD = np.uint64(0x9E3779B97F4A7C15)


def hashed_places(tokens: int) -> np.ndarray:
    """Return response lengths that have hashes, int64, ascending and below `tokens`."""
    places = list(range(1, min(tokens, EACH + 1)))
    while places and (following := places[-1] + max(1, places[-1] // 16)) < tokens:
        places.append(following)
    return np.array(places, np.int64)


def prefix_hashes(ids: np.ndarray, prompt_tokens: int) -> bytes:
    """Return uint32 numbers, one per entry of `hashed_places`, the same in every process.

    ids: a sample's tokens, int32 [n], or their `workers.batch.placed_images.keys`. A hash is the upper half
    of sum_j (x_j + 1) a_j mod 2^64 over the tokens x_j, with fixed a_j. Different prefixes collide with a
    probability of about 2^-32.
    """
    places = hashed_places(len(ids) - prompt_tokens) + prompt_tokens
    numbers = np.arange(1, len(ids) + 1, dtype=np.uint64) * _ODD
    numbers ^= numbers >> np.uint64(29)
    numbers *= np.uint64(0xBF58476D1CE4E5B9)  # the multiplier of SplitMix64
    sums = np.cumsum(
        (ids.astype(np.uint64) + np.uint64(1)) * (numbers | np.uint64(1)), dtype=np.uint64
    )
    return (sums[places - 1] >> np.uint64(32)).astype("<u4").tobytes()
