"""Metrics that carry their own reduction, so that micro-batches and ranks merge correctly.

Also the log-prob tolerances that model loading, runs and the doctor share. Imports nothing heavy.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum


class Reduction(Enum):
    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True)
class Metric:
    """One number and how it joins others.

    `value` is the total for SUM, the weighted total for MEAN, and the extreme for MAX and MIN. `weight`
    counts the items behind a MEAN and `count` names their kind (`tokens`, `sequences`, `steps`). Both are 0
    or empty otherwise.
    """

    reduction: Reduction
    value: float
    weight: float = 0.0
    count: str = ""

    @staticmethod
    def sum(value: float) -> "Metric":
        return Metric(Reduction.SUM, float(value))

    @staticmethod
    def mean(total: float, weight: float, count: str = "") -> "Metric":
        return Metric(Reduction.MEAN, float(total), float(weight), count)

    @staticmethod
    def max(value: float) -> "Metric":
        return Metric(Reduction.MAX, float(value))

    @staticmethod
    def min(value: float) -> "Metric":
        return Metric(Reduction.MIN, float(value))

    def result(self) -> float:
        """Return the number to log, NaN for a mean over nothing."""
        if self.reduction is not Reduction.MEAN:
            return self.value
        return self.value / self.weight if self.weight else math.nan

    def merge_with(self, other: "Metric") -> "Metric":
        if self.reduction is not other.reduction:
            raise ValueError(
                f"cannot merge a {self.reduction.value} with a {other.reduction.value}"
            )
        if self.count != other.count:
            raise ValueError(
                f"cannot merge a mean over {self.count or 'items'} with one over {other.count or 'items'}"
            )
        if self.reduction is Reduction.MAX:
            return Metric.max(max(self.value, other.value))
        if self.reduction is Reduction.MIN:
            return Metric.min(min(self.value, other.value))
        return Metric(
            self.reduction, self.value + other.value, self.weight + other.weight, self.count
        )


Metrics = dict[str, Metric]


def merge(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    joined: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            joined[name] = joined[name].merge_with(metric) if name in joined else metric
    return joined


def results(metrics: Mapping[str, Metric]) -> dict[str, float]:
    return {name: metric.result() for name, metric in metrics.items()}


TOLERANCE = {"float32": 1e-3, "float64": 1e-3, "bfloat16": 1e-1}
"""Mean difference of a token's log-prob, nats, by the type that both sides compute in.

float32: exact models reach 1e-6 within one process and 3e-5 between engine and trainer. bfloat16 keeps 8
bits: means of 0.01 to 0.1 are usual, the larger ones for mixtures of experts, where rounding sends a token to
another expert.
"""


def add_prefix(role: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{role}/{name}": value for name, value in metrics.items()}
