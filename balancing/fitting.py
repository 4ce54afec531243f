"""Fits cost coefficients to measured micro-batches by non-negative least squares.

    seconds_i ~ overhead + linear * sum(L) + quadratic * sum(L**2)        L: lengths in micro-batch i

It minimises relative errors (each equation is divided by its seconds), because timing noise is proportional to the
time; with absolute errors, one micro-batch of a minute would outweigh a hundred of a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike

from balancing.errors import CostModelError
from balancing.grouping import Floats
from balancing.validation import weight_array, whole_numbers

FEWEST_MEASUREMENTS = 4
"""One more than there are terms; with fewer there is no residual to estimate the error."""
HIGHEST_CONDITION = 1_000.0
"""Above this condition number, 1 % of noise in the times exceeds the coefficients."""


@dataclass(frozen=True)
class FitQuality:
    """relative_error: root mean square of `predicted / measured - 1`. measurements: their number. condition: condition
    number of the design matrix with normalised columns, about the factor by which noise of the times is amplified in
    the coefficients."""

    relative_error: float
    measurements: int
    condition: float


def fit_terms(terms: Floats, seconds: ArrayLike) -> tuple[Floats, FitQuality]:
    """The non-negative coefficients of least squared relative error: float64 [3], overhead, linear and quadratic.

    terms: float64 [m, 3], 1, sum(L) and sum(L**2) of each micro-batch. seconds: m times, positive.
    Raises CostModelError if the data do not suffice.
    """
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
            f"{condition:.3g}, at most {HIGHEST_CONDITION:g}); measure small and large micro-batches, "
            "of short sequences and of long ones"
        )
    coefficients = _non_negative_least_squares(relative, np.ones(len(times)))
    if not coefficients[1:].any():
        raise CostModelError("the measured seconds do not grow with tokens; measure micro-batches of more tokens")
    predicted = terms @ coefficients
    relative_error = float(np.sqrt(np.mean((predicted / times - 1.0) ** 2)))
    return coefficients, FitQuality(relative_error, len(times), condition)


def regressors(micro_batches: Sequence[ArrayLike]) -> Floats:
    """float64 [m, 3]: 1, sum of lengths, sum of squared lengths of each micro-batch; LengthError for bad lengths."""
    rows = []
    for number, lengths in enumerate(micro_batches):
        tokens = whole_numbers(lengths, f"micro_batches[{number}]", minimum=1).astype(np.float64)
        rows.append((1.0, tokens.sum(), np.square(tokens).sum()))
    return np.array(rows, np.float64).reshape(len(rows), 3)


def _positive_times(seconds: ArrayLike) -> Floats:
    times = weight_array(seconds, "seconds")
    if (times == 0).any():
        raise CostModelError(f"seconds[{int(np.argmax(times == 0))}] is 0; a measured time is positive")
    return times


def _condition(design: Floats) -> float:
    norms = np.linalg.norm(design, axis=0)
    return float(np.linalg.cond(design / norms)) if (norms > 0).all() else float("inf")


def _non_negative_least_squares(design: Floats, target: Floats) -> Floats:
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
