"""K-way partitions: how near to the lower bound, and how fast."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancing import partition
from balancing.analysis.distributions import DISTRIBUTIONS, draw
from balancing.search.lower_bounds import mean_bound
from tests.benchmarks.balancing.table import Table, cpu_seconds

SHAPES = ((512, 64), (4096, 64), (32_768, 512), (262_144, 512))
ALGORITHMS = ("karmarkar_karp", "refined")
REPETITIONS = 3


def tables() -> list[Table]:
    rows = [_row(name, count, k) for name in DISTRIBUTIONS for count, k in SHAPES]
    columns = [
        "weights",
        "n x k",
        *(f"{name}{what}" for name in ALGORITHMS for what in (", over the bound", ", ms")),
    ]
    note = (
        "Equal counts. Heaviest set over the mean (rounded up: weights are whole) or the heaviest weight, "
        "minus 1. With eight weights in a set the optimum itself may be above it. Milliseconds: median of "
        f"{REPETITIONS}."
    )
    return [Table("Partition", columns, rows, note)]


def _row(name: str, count: int, k: int) -> list[str]:
    weights = draw(name, count, seed=0)
    bound = mean_bound(np.sort(weights)[::-1].astype(np.float64), k)
    cells = [name, f"{count} x {k}"]
    for algorithm in ALGORITHMS:
        heaviest, seconds = _measured(weights, k, algorithm)
        cells += [f"{heaviest / bound - 1:.1e}", f"{1e3 * seconds:,.2f}"]
    return cells


def _measured(weights: NDArray[np.int64], k: int, algorithm: Any) -> tuple[float, float]:
    seconds = cpu_seconds(
        lambda: partition(weights, k, equal_size=True, algorithm=algorithm), REPETITIONS
    )
    sets = partition(weights, k, equal_size=True, algorithm=algorithm)
    return float(max(weights[indices].sum() for indices in sets)), seconds
