"""Order micro-steps without simulating a pipeline."""

import numpy as np

from balancing.basics.grouping import Floats, Integers


def small_ends(times: Floats) -> Integers:
    """Return the published order, heaviest in the middle, light ones at both ends: int64 [m]."""
    descending = np.argsort(-times, kind="stable")
    return np.concatenate([descending[1::2][::-1], descending[0::2]])
