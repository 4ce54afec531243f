"""Compares strategies: plans one batch with each and measures all in the same way.

    batch --> each strategy: rows[s][r] for each mini-batch --> times of micro-batches --> Outcome

A packed micro-batch takes the time of its sequences; a padded one that of its rows at the longest length of its
micro-step. The ideal time is the same for all strategies: workload of the real tokens / ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancing.analysis.statistics import Rows, grids, rows_of, step_time
from balancing.plan import Plan, plan_batch
from balancing.published import PADDED, Published, published_steps
from balancing.workload import CostModel

OURS = "Ballast"
SHARED = "Ballast, shared"
GIVEN = "given order"
PUBLISHED_TITLES: dict[str, Published] = {"verl": "verl", "ROLL": "roll", "MindSpeed-RL": "mindspeed_rl"}
REPETITIONS = 3
"""Number of timed runs of each strategy."""
STRATEGIES = (GIVEN, *PUBLISHED_TITLES, OURS)


@dataclass(frozen=True, eq=False)
class Batch:
    """The batch to plan. lengths: int64 [n]. mini_batches: index arrays.

    prefixes: arguments of `plan_batch` about what sequences begin with alike, for the strategy that shares it; empty
    without it.
    arguments: further ones of `plan_batch`, such as those that a run planned with; the published systems have none.
    """

    lengths: NDArray[np.int64]
    mini_batches: tuple[NDArray[np.int64], ...]
    ranks: int
    max_tokens: int
    cost_model: CostModel
    prefixes: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ideal(self) -> float:
        """The step time without waiting or padding, in the cost model's unit."""
        return float(self.cost_model.workload(self.lengths).sum()) / self.ranks

    def plan(self, **changes: object) -> Plan:
        """`plan_batch` for this batch, with other arguments in `changes`."""
        arguments: dict[str, object] = {
            "ranks": self.ranks,
            "mini_batches": self.mini_batches,
            "max_tokens": self.max_tokens,
            "cost_model": self.cost_model,
            **self.arguments,
        }
        return plan_batch(self.lengths, **{**arguments, **changes})  # type: ignore[arg-type]

    def shared_plan(self, **changes: object) -> Plan:
        """The plan in which a micro-batch computes what its sequences begin with once."""
        return self.plan(**self.prefixes, **changes)


@dataclass(frozen=True, eq=False)
class Schedule:
    """The result of a strategy. padded: rows are as wide as the longest sequence of their micro-step.

    shared: int64 [n], tokens of each sequence that another of its micro-batch computes; None is none.
    """

    mini_batches: Sequence[Rows]
    padded: bool = False
    shared: NDArray[np.int64] | None = None


@dataclass(frozen=True, eq=False)
class Outcome:
    """One row of the comparison.

    grids: float64 [steps, ranks] for each mini-batch, the time of every micro-batch, in the cost model's unit.
    over_ideal: step time / (workload / ranks) - 1. violations: number of micro-batches above the cap.
    padding: share of computed tokens that are not real. micro_batches: on each rank, over all mini-batches.
    idle_mean, idle_worst: share of the step time that a rank waits. seconds: median planning time.
    """

    name: str
    grids: list[NDArray[np.float64]]
    over_ideal: float
    violations: int
    padding: float
    micro_batches: int
    idle_mean: float
    idle_worst: float
    seconds: float


def measure(name: str, batch: Batch, strategy: Callable[[], Schedule]) -> Outcome:
    """Run a strategy once, which may compile, then several times for its planning time, and measure its result."""
    schedule = strategy()
    seconds = median(_seconds(strategy) for _ in range(REPETITIONS))
    times, tokens = _times_and_tokens(schedule, batch)
    time = step_time(times)
    waiting = 1.0 - np.sum([grid.sum(axis=0) for grid in times], axis=0) / time
    computed = float(sum(grid.sum() for grid in tokens))
    real = batch.lengths.sum() - (0 if schedule.shared is None else schedule.shared.sum())
    return Outcome(
        name=name,
        grids=times,
        over_ideal=time / batch.ideal - 1.0,
        violations=int(sum((grid > batch.max_tokens).sum() for grid in tokens)),
        padding=1.0 - float(real) / computed,
        micro_batches=sum(len(rows) for rows in schedule.mini_batches),
        idle_mean=float(waiting.mean()),
        idle_worst=float(waiting.max()),
        seconds=seconds,
    )


def _seconds(strategy: Callable[[], Schedule]) -> float:
    start = perf_counter()
    strategy()
    return perf_counter() - start


def of_plan(plan: Plan) -> Schedule:
    """The schedule of a plan."""
    rows = [rows_of(mini_batch) for mini_batch in plan.mini_batches]
    return Schedule(rows, padded=plan.layout == "padded", shared=plan.shared)


def compare(batch: Batch) -> tuple[list[Outcome], Plan]:
    """The outcomes of all strategies, and the plan by `batch.arguments`, with shared prefixes where there are any."""
    ours = {"algorithm": "karmarkar_karp"}
    strategies: dict[str, Callable[[], Schedule]] = {GIVEN: lambda: of_plan(batch.plan(algorithm="none"))}
    strategies |= {title: partial(_published, name, batch) for title, name in PUBLISHED_TITLES.items()}
    strategies[OURS] = lambda: of_plan(batch.plan(**ours))
    if batch.prefixes:
        strategies[SHARED] = lambda: of_plan(batch.shared_plan(**ours))
    plan = batch.shared_plan() if batch.prefixes else batch.plan()
    return [measure(name, batch, strategy) for name, strategy in strategies.items()], plan


def _published(name: Published, batch: Batch) -> Schedule:
    steps = published_steps(
        name,
        batch.lengths,
        ranks=batch.ranks,
        mini_batches=batch.mini_batches,
        max_tokens=batch.max_tokens,
        workloads=batch.cost_model.workload(batch.lengths),
    )
    return Schedule(steps, padded=name in PADDED)


def _times_and_tokens(schedule: Schedule, batch: Batch) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]:
    """Grids of times and of computed tokens, including padding."""
    if not schedule.padded:
        shared = np.zeros_like(batch.lengths) if schedule.shared is None else schedule.shared
        workloads = batch.cost_model.workload(batch.lengths) - batch.cost_model.workload(shared)
        return grids(schedule.mini_batches, workloads), grids(schedule.mini_batches, batch.lengths - shared)
    counts = grids(schedule.mini_batches, np.ones_like(batch.lengths))
    widths = [_widest(rows, batch.lengths) for rows in schedule.mini_batches]
    times = [count * batch.cost_model.workload(width)[:, None] for count, width in zip(counts, widths, strict=True)]
    return times, [count * width[:, None] for count, width in zip(counts, widths, strict=True)]


def _widest(rows: Rows, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [steps], the length of the longest sequence of each micro-step."""
    return np.array([max(lengths[group].max(initial=0) for group in step) for step in rows], np.int64)
