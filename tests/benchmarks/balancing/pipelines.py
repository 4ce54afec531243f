"""Plans for pipelines: predicted time against its lower bound, the published order and the given one;
planning time.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancing import Plan, plan_batch
from balancing.analysis.comparison import ON_PIPELINES, OURS
from balancing.analysis.distributions import draw
from balancing.analysis.statistics import plan_statistics
from balancing.pipelines.pipeline import Pipeline
from tests.benchmarks.balancing.plans import COST_MODEL
from tests.benchmarks.balancing.table import Table, cpu_seconds

STAGES, RANKS = 4, 64
LENGTHS = ("lognormal", "reasoning", "agentic", "grouped", "uniform")
BATCHES = ((8192, 1), (8192, 4))
"""Sequences and mini-batches of a global batch."""
REPETITIONS = 3


def tables() -> list[Table]:
    """One without interleaving, one with two virtual stages, for each number of mini-batches."""
    return [_table(count, parts, virtual) for count, parts in BATCHES for virtual in (1, 2)]


def plan_of(
    name: str, count: int, mini_batches: int, pipeline: Pipeline, **changes: Any
) -> Plan:
    """A seeded batch on a pipeline; the cap is twice the longest sequence."""
    lengths = draw(name, count, 0)
    members: list[NDArray[np.int64]] = np.array_split(
        np.random.default_rng(0).permutation(count), mini_batches
    )
    how = {
        "ranks": RANKS,
        "mini_batches": members,
        "max_tokens": 2 * int(lengths.max()),
        "cost_model": COST_MODEL,
    }
    return plan_batch(lengths, pipeline=pipeline, **how, **changes)  # type: ignore[arg-type]


def _table(count: int, mini_batches: int, virtual: int) -> Table:
    pipeline = Pipeline(STAGES, virtual)
    rows = [
        _row(name, title, count, mini_batches, pipeline)
        for name in LENGTHS
        for title in ON_PIPELINES
    ]
    parts = "1 mini-batch" if mini_batches == 1 else f"{mini_batches} mini-batches"
    interleaved = f", {virtual} virtual stages each" if virtual > 1 else ""
    return Table(
        f"Pipeline of {STAGES} stages{interleaved}: {count:,} sequences in {parts} on {RANKS} data-parallel "
        "ranks",
        [
            "lengths",
            "plan",
            "micro-steps",
            "over ideal",
            "bubble",
            "over bound",
            "plan_batch",
        ],
        rows,
        "Over ideal: predicted makespans / (workload / ranks / stages), - 1. Bubble: share of their time "
        "that stages wait. Over bound: above the lower bound for all plans with as many micro-steps of the "
        "same mini-batches. It need not be reachable (micro_step_targets.py). Small ends: the published "
        "order, of micro-steps of equal weight. plan_batch: CPU time of its one thread, median of "
        f"{REPETITIONS}.",
    )


def _row(
    name: str, title: str, count: int, mini_batches: int, pipeline: Pipeline
) -> list[str]:
    changes = ON_PIPELINES[title]
    plan = plan_of(name, count, mini_batches, pipeline, **changes)
    seconds = cpu_seconds(
        lambda: plan_of(name, count, mini_batches, pipeline, **changes), REPETITIONS
    )
    numbers = plan_statistics(plan)
    ideal = float(plan.workloads.sum()) / plan.ranks / pipeline.stages
    shares = (numbers["pipeline/predicted_time"] / ideal - 1.0, numbers["pipeline/bubble"])
    over_bound = max(0.0, numbers["pipeline/over_bound"])
    steps = ", ".join(str(part.steps) for part in plan.mini_batches)
    figures = [
        *(f"{100 * share:.1f} %" for share in shares),
        f"{100 * over_bound:.2f} %",
        f"{1e3 * seconds:.0f} ms",
    ]
    return [name, "Ballast" if title == OURS else title, steps, *figures]
