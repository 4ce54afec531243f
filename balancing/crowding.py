"""What the heaviest of k sets weighs at least: the mean, and what crowding of the heaviest weights adds to it.

    t heaviest weights, k sets, at most j of them in a set -> no;  so g sets hold j + 1 or more of them,
    (other k - g sets: at most j each)                             at least t - j (k - g) together

Those g sets weigh at least that many of the t heaviest, the lightest of them, and with equal counts the lightest of
all others besides: the mean over the g sets, least over g, is a bound for every t and j. With t = j k + 1 it holds the
classical one for identical machines (j + 1 jobs of the j k + 1 longest share a machine).
"""

import numpy as np

from balancing.threaded import Floats, Integers

THRESHOLDS = 48
"""Values of t that are tried, evenly spaced; the largest drops from one weight to the next are tried too."""
DROPS = 16
MOST_SHARED = 16
"""Values of j that are tried."""


def lower_bound(weights: Floats, k: int) -> float:
    """The mean, rounded up where weights are whole, or the heaviest weight. weights: float64 [n], descending."""
    return max(_rounded(float(weights.sum()) / k, weights), float(weights[0]))


def crowded_bound(weights: Floats, k: int, equal_size: bool) -> float:
    """The bound of this module's picture, never below `lower_bound`; takes some milliseconds. k <= n."""
    before = np.concatenate([[0.0], np.cumsum(weights)])
    best = lower_bound(weights, k)
    for shared in range(min(MOST_SHARED, (len(weights) - 1) // k + 1)):
        best = max(best, _least_mean(before, k, shared, _thresholds(weights, shared * k, k), equal_size))
    return _rounded(best, weights)


def _least_mean(before: Floats, k: int, shared: int, heaviest: Integers, equal_size: bool) -> float:
    """The bound for j = `shared`, the most over the t of `heaviest`. before: float64 [n + 1], sums of the heaviest."""
    count, sets, top = len(before) - 1, np.arange(1, k + 1), heaviest[:, None]
    crowd = np.maximum(top - shared * (k - sets), (shared + 1) * sets)
    possible = crowd <= top
    if equal_size:
        possible &= crowd <= -(-count // k) * sets
    crowd = np.where(possible, crowd, 0)
    others = np.clip(count // k * sets - crowd, 0, count - top) if equal_size else 0
    weight = before[top] - before[top - crowd] + before[count] - before[count - others]
    return float(np.where(possible, weight / sets, np.inf).min(axis=1).max())


def _thresholds(weights: Floats, crowded: int, k: int) -> Integers:
    """Values of t above j * k = `crowded`."""
    count = len(weights)
    spaced = np.linspace(crowded + 1, min(count, crowded + k), THRESHOLDS).astype(np.int64)
    drops = np.argsort(np.diff(weights), kind="stable")[:DROPS] + 1
    return np.unique(np.concatenate([spaced, drops[drops > crowded], [count]]))


def _rounded(bound: float, weights: Floats) -> float:
    """Sums of whole numbers are whole."""
    return float(np.ceil(bound)) if (weights == np.floor(weights)).all() else bound
