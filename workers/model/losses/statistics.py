"""Metrics of a loss while they are still on the device, and how they become `workers.metrics`.

Statistic (0-d tensor, reduction) of each micro-batch --to_metrics: one copy for all--> Metrics, merged
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workers.metrics import Metric, Metrics, Reduction, merge


@dataclass(frozen=True)
class Statistic:
    """A metric still on the device: `value` is 0-d; `weight` and `count` as in `Metric`."""

    reduction: Reduction
    value: Tensor
    weight: float = 0.0
    count: str = ""

    def merged_with(self, other: "Statistic") -> "Statistic":
        """As `Metric.merged_with`, without leaving the device."""
        if self.reduction is Reduction.MAX:
            return replace(self, value=torch.maximum(self.value, other.value))
        if self.reduction is Reduction.MIN:
            return replace(self, value=torch.minimum(self.value, other.value))
        return replace(self, value=self.value + other.value, weight=self.weight + other.weight)


Statistics = dict[str, Statistic]


def total(value: Tensor) -> Statistic:
    """Adds up over micro-batches and ranks."""
    return Statistic(Reduction.SUM, value.detach())


def mean(values: Tensor, count: str = "tokens") -> Statistic:
    """Mean over the items of `values`, weighted by their number when joined with those of other micro-batches.

    count: what is counted, `tokens` or `sequences`.
    """
    return Statistic(Reduction.MEAN, values.detach().sum(), len(values), count)


def extreme(name: str, values: Tensor, reduction: Reduction) -> Statistics:
    """Largest (MAX) or smallest (MIN) of the values under `name`; nothing of none."""
    if not len(values):
        return {}
    value = values.max() if reduction is Reduction.MAX else values.min()
    return {name: Statistic(reduction, value.detach())}


def joined(parts: Iterable[Mapping[str, Statistic]]) -> Statistics:
    """Join the statistics of parts of a micro-batch by name, on the device."""
    result: Statistics = {}
    for part in parts:
        for name, statistic in part.items():
            result[name] = result[name].merged_with(statistic) if name in result else statistic
    return result


def to_metrics(parts: Iterable[Mapping[str, Statistic]]) -> Metrics:
    """Join the statistics of micro-batches, with one copy from the device for all of them."""
    named = [(name, statistic) for part in parts for name, statistic in part.items()]
    if not named:
        return {}
    values = torch.stack([statistic.value.double() for _, statistic in named]).tolist()
    return merge(
        {name: Metric(statistic.reduction, value, statistic.weight, statistic.count)}
        for (name, statistic), value in zip(named, values, strict=True)
    )
