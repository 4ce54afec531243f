"""Tables on k-way partitions: how near to the lower bound and the optimum, and how fast."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancing import partition
from balancing.analysis.distributions import DISTRIBUTIONS, draw
from balancing.exchange import TOLERANCE
from balancing.lower_bounds import pigeonhole_bound
from tests.benchmarks.balancing.differencing_by_the_book import with_objects, with_tuples
from tests.benchmarks.balancing.optimum import optimum
from tests.benchmarks.balancing.table import Table

MANY = ((1024, 16), (4096, 64), (32_768, 512))
FEW = ((64, 8), (512, 64), (4096, 512))
TINY = ((16, 2), (24, 3), (32, 4), (48, 6), (64, 8))
SPEEDS = ((4096, 64), (32_768, 512))
LARGEST = (262_144, 512)
SEEDS = 5
TINY_SEEDS = 10
REPETITIONS = 7

WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
import warnings
warnings.simplefilter("ignore")
from tests.benchmarks.balancing.partitions import speeds
import json
print(json.dumps(speeds(4096, 64, True)))
"""


def tables() -> list[Table]:
    """All of them, in the order of the reader's questions."""
    partition(np.arange(64) ** 1.5, 8, equal_size=True)  # compiles, or reads from disk
    return [many_per_set(), few_per_set(), against_the_optimum(), speed(), largest()]


def many_per_set() -> Table:
    """Equal counts, 64 weights in a set."""
    return _quality(
        "Partition, equal counts, n/k = 64: heaviest set over the lower bound, minus 1",
        MANY,
        "The bound is the larger of the mean (rounded up: weights are whole) and of what crowding forces.",
    )


def few_per_set() -> Table:
    """Equal counts, 8 weights in a set."""
    return _quality(
        "Partition, equal counts, n/k = 8: heaviest set over the lower bound, minus 1",
        FEW,
        "With eight weights in a set the optimum itself may be above the bound.",
    )


def against_the_optimum() -> Table:
    """Equal counts, 8 weights in a set, at most 64 weights."""
    rows = []
    for count, k in TINY:
        known, unknown = [], [0.0]
        for weights in (draw(name, count, seed) for name in DISTRIBUTIONS for seed in range(TINY_SEEDS)):
            reached, bound = _heaviest(weights, k, "refined"), _bound(weights, k)
            best = bound if reached <= bound * (1 + TOLERANCE) else optimum(weights, k, int(reached))
            (known if best else unknown).append(reached / (best or bound) - 1)
        shares = [_percent(share) for share in (np.mean(known), max(known), max(unknown))]
        rows.append([f"{count} x {k}", str(len(known)), *shares[:2], str(len(unknown) - 1), shares[2]])
    return Table(
        "Partition, equal counts, n/k = 8: heaviest set over the optimum, minus 1",
        ["n x k", "optimum known", "mean", "worst", "unknown", "worst of these over the bound"],
        rows,
        f"{TINY_SEEDS} batches of each of {len(DISTRIBUTIONS)} distributions. The optimum counts as known where the "
        "lower bound is reached within 1e-5 (it then stands for the optimum), or where an exact search ends.",
    )


def speed() -> Table:
    """Against plain Python."""
    measured = [(n, k, equal, "compiled", speeds(n, k, equal)) for n, k in SPEEDS for equal in (True, False)]
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], capture_output=True, text=True, check=True)
    measured.append((4096, 64, True, "no Numba", json.loads(done.stdout)))
    forms = ["objects", "tuples", "karmarkar_karp", "refined"]
    rows = []
    for n, k, equal, how, seconds in measured:
        objects, tuples, karmarkar_karp, refined = (seconds[form] for form in forms)
        ratios = (objects / karmarkar_karp, objects / refined, tuples / refined)
        times = [_milliseconds(seconds[form]) for form in forms]
        counts = "equal" if equal else "free"
        rows.append([f"{n} x {k}, {counts} counts, {how}", *times, *(f"{ratio:,.1f}x" for ratio in ratios)])
    return Table(
        "Partition: milliseconds, and how many times faster than plain Python",
        ["lognormal", *forms, "objects / karmarkar_karp", "objects / refined", "tuples / refined"],
        rows,
        "Plain Python is Karmarkar-Karp with heapq that sorts k sets at every join: with a class for a set and one for "
        "a partial solution, as training systems ship it, and with bare tuples.",
    )


def largest() -> Table:
    """262,144 weights into 512 sets."""
    rows = []
    for name in DISTRIBUTIONS:
        weights = draw(name, LARGEST[0], seed=0)
        rows.append([name, *_largest_cells(weights, True), *_largest_cells(weights, False)])
    return Table(
        f"Partition of {LARGEST[0]:,} weights into {LARGEST[1]} sets",
        ["", "equal counts, ms", "over the bound", "free counts, ms", "over the bound"],
        rows,
    )


def _largest_cells(weights: NDArray[np.int64], equal_size: bool) -> tuple[str, str]:
    k = LARGEST[1]
    seconds = _median_seconds(lambda: partition(weights, k, equal_size=equal_size), 3)
    gap = _heaviest(weights, k, "refined", equal_size) / _bound(weights, k, equal_size) - 1
    return _milliseconds(seconds), f"{gap:.1e}"


def speeds(count: int, k: int, equal_size: bool) -> dict[str, float]:
    """Median seconds of the two plain Python forms and of two of ours, on lognormal lengths."""
    weights = draw("lognormal", count, seed=1)
    plain = weights.tolist()
    once = 3 if equal_size else 1

    def ours(algorithm: Any) -> Callable[[], Any]:
        return lambda: partition(weights, k, equal_size=equal_size, algorithm=algorithm)

    forms: dict[str, tuple[Callable[[], Any], int]] = {
        "objects": (lambda: with_objects(plain, k, equal_size), once),
        "tuples": (lambda: with_tuples(plain, k, equal_size), once),
        "karmarkar_karp": (ours("karmarkar_karp"), REPETITIONS),
        "refined": (ours("refined"), REPETITIONS),
    }
    return {name: _median_seconds(form, repetitions) for name, (form, repetitions) in forms.items()}


def _quality(title: str, shapes: tuple[tuple[int, int], ...], note: str) -> Table:
    rows = []
    for name in DISTRIBUTIONS:
        cells = [name]
        for count, k in shapes:
            batches = [draw(name, count, seed) for seed in range(SEEDS)]
            bounds = [_bound(weights, k) for weights in batches]
            for algorithm in ("karmarkar_karp", "refined"):
                gaps = [_heaviest(w, k, algorithm) / bound - 1 for w, bound in zip(batches, bounds, strict=True)]
                cells.append(f"{np.median(gaps):.1e}")
            cells.append(f"{max(gaps):.1e}")
        rows.append(cells)
    headings = [f"{n} x {k} {what}" for n, k in shapes for what in ("karmarkar_karp", "refined", "its worst")]
    return Table(title, ["", *headings], rows, f"{note} Median and worst of {SEEDS} batches.")


def _heaviest(weights: NDArray[np.int64], k: int, algorithm: Any, equal_size: bool = True) -> float:
    sets = partition(weights, k, equal_size=equal_size, algorithm=algorithm)
    return float(max(weights[indices].sum() for indices in sets))


def _bound(weights: NDArray[np.int64], k: int, equal_size: bool = True) -> float:
    return pigeonhole_bound(np.sort(weights)[::-1].astype(np.float64), k, equal_size)


def _median_seconds(action: Callable[[], Any], repetitions: int) -> float:
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _percent(share: float) -> str:
    return f"{share:.4%}"
