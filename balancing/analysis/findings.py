"""Findings about a plan: the waiting of ranks by cause, the number of micro-steps, and padding.

    plan --> each micro-step: the heaviest rank, and why it is not lighter       --> waiting by cause   --+
         --> micro-steps that the cap, min_count and multiple_of require         --> count              --+--> Finding
         --> computed tokens that are not real                                   --> padding            --+

The waiting of all findings adds up to the `idle_share` of the plan's statistics.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from balancing.analysis.statistics import computed_tokens, indices_of, padding_share, predicted_grids, step_time
from balancing.grouping import Floats, Integers
from balancing.packing import Caps, fewest_micro_batches
from balancing.plan import Plan

EVEN = 1e-6
"""No rank waits in a micro-step whose heaviest rank is within this share of the mean."""


class Cause(StrEnum):
    """The reason why ranks wait in a micro-step; COUNT and PADDING are no waiting."""

    LONG_SEQUENCE = "a long sequence"
    FEW_SEQUENCES = "fewer sequences than ranks"
    EMPTY_MICRO_BATCHES = "empty micro-batches"
    GIVEN_ORDER = "the given order"
    RANK_BY_RANK = "ranks that were planned one by one"
    MAX_SEQUENCES = "the cap on sequences"
    MAX_TOKENS = "the cap on tokens"
    REMAINDER = "a remainder that no exchange evens out"
    COUNT = "the number of micro-steps"
    PADDING = "padding"


@dataclass(frozen=True)
class Finding:
    """waiting: share of the ranks' time that the cause costs, 0 for COUNT and PADDING.

    numbers: the evidence, by name; mini_batch, micro_step and sequence are indices of the costliest case.
    """

    cause: Cause
    waiting: float
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class _Step:
    """A micro-step. loads: float64 [ranks]. rows: the sequences of each rank."""

    mini_batch: int
    number: int
    rows: tuple[Integers, ...]
    loads: Floats

    @property
    def waiting(self) -> float:
        """Mean waiting time of a rank, in the cost model's unit."""
        return float(self.loads.max() - self.loads.mean())


def findings(plan: Plan) -> list[Finding]:
    """Causes of waiting, costliest first; then the count; then padding, if there is any."""
    grids = predicted_grids(plan)
    total = step_time(grids)
    by_cause: dict[Cause, list[_Step]] = {}
    for number, (mini_batch, grid) in enumerate(zip(plan.mini_batches, grids, strict=True)):
        for position, (micro_step, loads) in enumerate(zip(mini_batch.micro_steps, grid, strict=True)):
            step = _Step(number, position, micro_step.ranks, loads)
            if step.waiting > EVEN * loads.mean():
                by_cause.setdefault(_cause(step, plan), []).append(step)
    waiting = [_waiting_finding(cause, steps, total, plan) for cause, steps in by_cause.items()]
    padding = padding_share(plan)
    about_padding = [Finding(Cause.PADDING, 0.0, {"share": padding})] if padding > 0 else []
    return [*sorted(waiting, key=lambda finding: -finding.waiting), _count_finding(plan), *about_padding]


def _cause(step: _Step, plan: Plan) -> Cause:
    """The first cause that applies; causes that no cap could change come before the caps."""
    if len(plan.mini_batches[step.mini_batch].rows) < plan.ranks:
        return Cause.FEW_SEQUENCES
    if plan.settings.algorithm != "karmarkar_karp":
        return Cause.GIVEN_ORDER if plan.settings.algorithm == "none" else Cause.RANK_BY_RANK
    if any(len(rows) == 0 for rows in step.rows):
        return Cause.EMPTY_MICRO_BATCHES
    heaviest = step.rows[int(np.argmax(step.loads))]
    if plan.workloads[heaviest].max() > step.loads.mean():
        return Cause.LONG_SEQUENCE
    lighter = [rows for rows, load in zip(step.rows, step.loads, strict=True) if load < step.loads.mean()]
    if all(len(rows) == plan.settings.max_sequences for rows in lighter):
        return Cause.MAX_SEQUENCES
    sizes = plan.sizes
    smallest = int(sizes[heaviest].min())
    if all(_is_full(sizes[rows], smallest, plan) for rows in lighter):
        return Cause.MAX_TOKENS
    return Cause.REMAINDER


def _is_full(sizes: Integers, smallest: int, plan: Plan) -> bool:
    """Whether a sequence of `smallest` tokens does not fit in a micro-batch of these aligned sizes."""
    return computed_tokens(np.append(sizes, smallest), plan.layout) > plan.max_tokens


def _waiting_finding(cause: Cause, steps: list[_Step], total: float, plan: Plan) -> Finding:
    worst = max(steps, key=lambda step: step.waiting)
    numbers: dict[str, float] = {
        "micro_steps": len(steps),
        "mini_batch": worst.mini_batch,
        "micro_step": worst.number,
        "over_mean": worst.loads.max() / worst.loads.mean() - 1.0,
        "sequences": sum(len(rows) for rows in worst.rows),
        "empty": sum(1 for rows in worst.rows if len(rows) == 0),
    }
    if cause is Cause.LONG_SEQUENCE:
        numbers |= _longest_sequence(worst, plan)
    waiting = sum(step.waiting for step in steps) / total
    return Finding(cause, waiting, {name: float(value) for name, value in numbers.items()})


def _longest_sequence(step: _Step, plan: Plan) -> dict[str, float]:
    """The costliest sequence of the heaviest rank, and its share of the micro-step's work."""
    rows = step.rows[int(np.argmax(step.loads))]
    sequence = int(rows[np.argmax(plan.workloads[rows])])
    return {
        "sequence": float(sequence),
        "tokens": float(plan.lengths[sequence]),
        "share": float(plan.workloads[sequence] / step.loads.sum()),
        "fair_share": 1.0 / plan.ranks,
    }


def _count_finding(plan: Plan) -> Finding:
    """For the mini-batch with most micro-steps: their number, and those that caps and arguments require."""
    steps = [len(mini_batch.micro_steps) for mini_batch in plan.mini_batches]
    most = int(np.argmax(steps))
    sizes = plan.sizes
    taken = [
        computed_tokens(sizes[rows], plan.layout) for step in plan.mini_batches[most].micro_steps for rows in step.ranks
    ]
    caps = Caps(plan.max_tokens, plan.settings.max_sequences or len(plan.lengths), plan.layout == "padded")
    numbers: dict[str, float] = {
        "mini_batch": most,
        "micro_steps": steps[most],
        "needed": -(-fewest_micro_batches(sizes[indices_of(plan.mini_batches[most])], caps) // plan.ranks),
        "asked": -(-plan.settings.min_count // plan.settings.multiple_of) * plan.settings.multiple_of,
        "fill": float(np.mean(taken)) / plan.max_tokens,
    }
    return Finding(Cause.COUNT, 0.0, {name: float(value) for name, value in numbers.items()})
