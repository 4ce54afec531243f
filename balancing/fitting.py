"""Fits cost coefficients to measured micro-batches by non-negative least squares.

    seconds_i ~ overhead + linear * sum(L) + quadratic * sum(L**2)        L: lengths in micro-batch i

It minimises relative errors (each equation is divided by its seconds), because timing noise is proportional to the
time; with absolute errors, one micro-batch of a minute would outweigh a hundred of a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancing.errors import CostModelError
from balancing.validation import weight_array, whole_numbers

FEWEST_MEASUREMENTS = 4
"""One more than there are terms; with fewer there is no residual to estimate the error."""
HIGHEST_CONDITION = 1_000.0
"""Above this condition number, 1 % of noise in the times exceeds the coefficients."""


@dataclass(frozen=True)
class Coefficients:
    """Seconds per micro-batch, per token and per squared token, and the quality of their fit; see `CostFit`."""

    overhead: float
    linear: float
    quadratic: float
    relative_error: float
    r_squared: float
    measurements: int
    condition: float


def fit_coefficients(micro_batches: Sequence[ArrayLike], seconds: ArrayLike) -> Coefficients:
    """The non-negative coefficients of least squared relative error; CostModelError if data do not suffice."""
    if len(micro_batches) != np.size(seconds):
        raise CostModelError(
            f"{len(micro_batches)} micro-batches with {np.size(seconds)} seconds; pass one time for each"
        )
    return fit_terms(regressors(micro_batches), seconds)


def fit_terms(terms: NDArray[np.float64], seconds: ArrayLike) -> Coefficients:
    """As `fit_coefficients`, from the terms of each micro-batch, float64 [m, 3]: 1, sum(L), sum(L**2)."""
    times = _positive_times(seconds)
    if len(times) < FEWEST_MEASUREMENTS:
        raise CostModelError(
            f"{len(times)} measurements are too few to fit three terms and estimate the error; "
            f"pass at least {FEWEST_MEASUREMENTS}"
        )
    relative = terms / times[:, None]
    condition = _condition(relative)
    if not condition <= HIGHEST_CONDITION:
        raise CostModelError(
            f"the measured micro-batches are too similar to separate overhead, linear and quadratic cost (condition "
            f"{condition:.3g}, at most {HIGHEST_CONDITION:g}); measure small and large micro-batches, of short and of "
            "long sequences"
        )
    overhead, linear, quadratic = _non_negative_least_squares(relative, np.ones(len(times)))
    if linear == 0 and quadratic == 0:
        raise CostModelError("the measured seconds do not grow with tokens; measure micro-batches of more tokens")
    predicted = terms @ np.array([overhead, linear, quadratic])
    return Coefficients(
        float(overhead),
        float(linear),
        float(quadratic),
        relative_error=float(np.sqrt(np.mean((predicted / times - 1.0) ** 2))),
        r_squared=_r_squared(times, predicted),
        measurements=len(times),
        condition=condition,
    )


def regressors(micro_batches: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """float64 [m, 3]: 1, sum of lengths, sum of squared lengths of each micro-batch; LengthError for bad lengths."""
    rows = []
    for number, lengths in enumerate(micro_batches):
        tokens = whole_numbers(lengths, f"micro_batches[{number}]", minimum=1).astype(np.float64)
        rows.append((1.0, tokens.sum(), np.square(tokens).sum()))
    return np.array(rows, np.float64).reshape(len(rows), 3)


def _positive_times(seconds: ArrayLike) -> NDArray[np.float64]:
    times = weight_array(seconds, "seconds")
    if (times == 0).any():
        raise CostModelError(f"seconds[{int(np.argmax(times == 0))}] is 0; a measured time is positive")
    return times


def _condition(design: NDArray[np.float64]) -> float:
    norms = np.linalg.norm(design, axis=0)
    return float(np.linalg.cond(design / norms)) if (norms > 0).all() else float("inf")


def _non_negative_least_squares(design: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """The exact minimiser over coefficients >= 0, which is the unconstrained one of some subset of the columns.

    Three columns have only seven subsets, so it solves all and takes the best without a negative coefficient, instead
    of the active-set method of Lawson and Hanson (1974).
    """
    columns = design.shape[1]
    norms = np.linalg.norm(design, axis=0)
    best, lowest = np.zeros(columns), float(target @ target)
    for count in range(columns, 0, -1):
        for subset in combinations(range(columns), count):
            chosen = list(subset)
            solution = np.linalg.lstsq(design[:, chosen] / norms[chosen], target, rcond=None)[0] / norms[chosen]
            residual = target - design[:, chosen] @ solution
            if (solution >= 0).all() and residual @ residual < lowest:
                best, lowest = np.zeros(columns), float(residual @ residual)
                best[chosen] = solution
    return best


def _r_squared(times: NDArray[np.float64], predicted: NDArray[np.float64]) -> float:
    spread = float(np.square(times - times.mean()).sum())
    return 1.0 - float(np.square(times - predicted).sum()) / spread if spread > 0 else 0.0
