"""Compares strategies: each plans the same batch, and all are measured alike.

    batch --> each strategy: rows[s][r] for each mini-batch --> times of micro-batches      --> Outcome
          --> on a pipeline: a plan                         --> makespans, bubble, bound    --> Outcome

A packed micro-batch takes the time of its sequences; a padded one takes the time of as many rows of its micro-step's
longest length. The ideal time is the same for all strategies: workload of the real tokens / ranks (/ stages).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from balancing.analysis.statistics import Rows, grids, plan_statistics, rows_of, step_time
from balancing.grouping import Floats, Integers
from balancing.pipeline import Pipeline
from balancing.plan import Plan, plan_batch
from balancing.published import PADDED, Published, published_steps

GIVEN, SMALL_ENDS, OURS, SHARED = "given order", "small ends", "Ballast", "Ballast, shared"
PUBLISHED_TITLES: dict[str, Published] = {"verl": "verl", "ROLL": "roll", "MindSpeed-RL": "mindspeed_rl"}
STRATEGIES = (GIVEN, *PUBLISHED_TITLES, OURS)
ON_PIPELINES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        GIVEN: {"algorithm": "none", "order": None},
        SMALL_ENDS: {"algorithm": "karmarkar_karp", "order": "small_ends"},
        OURS: {"algorithm": "karmarkar_karp", "order": "makespan"},
    }
)
"""Arguments of `plan_batch` by strategy. `small ends` is the published order of micro-steps of equal weight."""
REPETITIONS = 3
"""Number of timed runs of each strategy."""
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Batch:
    """The batch to plan. lengths: int64 [n].

    arguments: of `plan_batch`, at least ranks, mini_batches, max_tokens and cost_model; the published systems use only
    these four. prefixes: the arguments about shared prefixes; may be empty.
    """

    lengths: Integers
    arguments: Mapping[str, Any]
    prefixes: Mapping[str, Integers] = field(default_factory=dict)

    @property
    def pipeline(self) -> Pipeline | None:
        return self.arguments.get("pipeline")

    @property
    def ideal(self) -> float:
        """The step time without waiting or padding, in the cost model's unit."""
        stages = self.pipeline.stages if self.pipeline else 1
        return float(self.workload(self.lengths).sum()) / int(self.arguments["ranks"]) / stages

    def workload(self, lengths: Integers) -> Floats:
        """float64 [n], in the cost model's unit."""
        return np.asarray(self.arguments["cost_model"].workload(lengths))

    def plan(self, **changes: Any) -> Plan:
        """Plan this batch, with other arguments in `changes`."""
        return plan_batch(self.lengths, **{**self.arguments, **changes})


@dataclass(frozen=True, eq=False)
class Outcome:
    """One row of the comparison. figures: by column; shares are floats, numbers of micro-batches are integers.

    over ideal: step time / `Batch.ideal` - 1. over cap: number of micro-batches. padding: share of computed tokens.
    micro-steps: over all mini-batches. idle: share of the step time that a rank waits. bubble: the same of stages.
    over bound: predicted time / a lower bound for as many micro-steps - 1.
    seconds: median planning time. grids: float64 [steps, ranks] for each mini-batch, the time of every micro-batch.
    plan: only on a pipeline.
    """

    name: str
    figures: Mapping[str, float]
    seconds: float
    grids: Sequence[Floats] = ()
    plan: Plan | None = None


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """The result of a strategy. padded: rows are as wide as the longest sequence of their micro-step.

    shared: int64 [n], tokens of each sequence that another of its micro-batch computes; None is none.
    """

    rows: Sequence[Rows]
    padded: bool = False
    shared: Integers | None = None


def compare(batch: Batch) -> list[Outcome]:
    """Return the outcomes of all strategies, ours last; raises as `plan_batch`."""
    if batch.pipeline is not None:
        return [_on_pipeline(name, batch, batch.pipeline, changes) for name, changes in ON_PIPELINES.items()]
    strategies: dict[str, Callable[[], MicroBatches]] = {GIVEN: lambda: _planned(batch, algorithm="none")}
    strategies |= {title: partial(_published, name, batch) for title, name in PUBLISHED_TITLES.items()}
    strategies[OURS] = lambda: _planned(batch, algorithm="karmarkar_karp")
    if batch.prefixes:
        strategies[SHARED] = lambda: _planned(batch, algorithm="karmarkar_karp", **batch.prefixes)
    return [measure(name, batch, strategy) for name, strategy in strategies.items()]


def measure(name: str, batch: Batch, strategy: Callable[[], MicroBatches]) -> Outcome:
    """Run a strategy once, which may compile, then several times for its planning time, and measure its result."""
    found, seconds = _timed(strategy)
    times, tokens = _times_and_tokens(found, batch)
    time = step_time(times)
    waiting = 1.0 - np.sum([grid.sum(axis=0) for grid in times], axis=0) / time
    real = batch.lengths.sum() - (0 if found.shared is None else found.shared.sum())
    figures = {
        "over ideal": time / batch.ideal - 1.0,
        "over cap": int(sum((grid > batch.arguments["max_tokens"]).sum() for grid in tokens)),
        "padding": 1.0 - float(real) / float(sum(grid.sum() for grid in tokens)),
        "micro-steps": sum(len(rows) for rows in found.rows),
        "idle, mean": float(waiting.mean()),
        "idle, worst": float(waiting.max()),
    }
    return Outcome(name, figures, seconds, grids=times)


def _on_pipeline(name: str, batch: Batch, pipeline: Pipeline, changes: Mapping[str, Any]) -> Outcome:
    plan, seconds = _timed(partial(batch.plan, **batch.prefixes, **changes))
    numbers = plan_statistics(plan)
    figures = {
        "over ideal": numbers["pipeline/predicted_time"] / batch.ideal - 1.0,
        "bubble": numbers["pipeline/bubble"],
        "over bound": numbers["pipeline/over_bound"],
        "micro-steps": sum(part.steps for part in plan.mini_batches),
    }
    return Outcome(name, figures, seconds, plan=plan)


def _timed(strategy: Callable[[], Result]) -> tuple[Result, float]:
    result, seconds = strategy(), []
    for _ in range(REPETITIONS):
        start = perf_counter()
        strategy()
        seconds.append(perf_counter() - start)
    return result, median(seconds)


def _planned(batch: Batch, **changes: Any) -> MicroBatches:
    plan = batch.plan(**changes)
    return MicroBatches([rows_of(part) for part in plan.mini_batches], plan.layout == "padded", plan.shared)


def _published(name: Published, batch: Batch) -> MicroBatches:
    arguments = {key: batch.arguments[key] for key in ("ranks", "mini_batches", "max_tokens")}
    return MicroBatches(
        published_steps(name, batch.lengths, workloads=batch.workload(batch.lengths), **arguments), name in PADDED
    )


def _times_and_tokens(found: MicroBatches, batch: Batch) -> tuple[list[Floats], list[Floats]]:
    """Return two grids for each mini-batch: times, and computed tokens with padding."""
    if not found.padded:
        shared = np.zeros_like(batch.lengths) if found.shared is None else found.shared
        work = batch.workload(batch.lengths) - batch.workload(shared)
        return grids(found.rows, work), grids(found.rows, batch.lengths - shared)
    counts = grids(found.rows, np.ones_like(batch.lengths))
    widths = [np.array([batch.lengths[np.concatenate(step)].max() for step in rows]) for rows in found.rows]
    times = [count * batch.workload(width)[:, None] for count, width in zip(counts, widths, strict=True)]
    return times, [count * width[:, None] for count, width in zip(counts, widths, strict=True)]
