"""Compare strategies that plan the same batch.

    batch --> each strategy: a plan --> times of micro-batches, or makespans on a pipeline --> Outcome

A padded micro-batch takes the time of as many rows of its longest length. The ideal time is the same for all
strategies: workload of the real tokens / ranks (/ stages).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from types import MappingProxyType
from typing import Any

import numpy as np

from balancing.analysis.statistics import (
    micro_batch_tokens,
    padding_share,
    plan_statistics,
    step_time,
    time_grids,
)
from balancing.basics.alignment import round_up
from balancing.basics.grouping import Floats, Integers
from balancing.basics.image_patches import Images
from balancing.context_degrees import ContextDegrees
from balancing.mini_batch import MiniBatch
from balancing.pipelines.pipeline import Pipeline
from balancing.plan import Plan, plan_batch
from balancing.plan_settings import Settings
from balancing.search.baselines import PADDED, Published, Steps, published_steps

GIVEN, SMALL_ENDS, OURS, SHARED = "given order", "small ends", "Ballast", "Ballast, shared"
PUBLISHED_TITLES: dict[str, Published] = {
    "verl": "verl",
    "ROLL": "roll",
    "MindSpeed-RL": "mindspeed_rl",
}
STRATEGIES = (GIVEN, *PUBLISHED_TITLES, OURS)
ON_PIPELINES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        GIVEN: {"algorithm": "none", "order": None},
        SMALL_ENDS: {"algorithm": "karmarkar_karp", "order": "small_ends"},
        OURS: {"algorithm": "karmarkar_karp", "order": "makespan"},
    }
)
"""Arguments of `plan_batch` by strategy. `small ends` is the published order of equal micro-steps."""
REPETITIONS = 3


@dataclass(frozen=True, eq=False)
class Batch:
    """lengths: int64 [n]. arguments: of `plan_batch`, at least ranks, mini_batches, max_tokens and cost_model
    (the published systems use only these). prefixes: the arguments about shared prefixes.
    """

    lengths: Integers
    arguments: Mapping[str, Any]
    prefixes: Mapping[str, Integers] = field(default_factory=dict)

    @property
    def pipeline(self) -> Pipeline | None:
        return self.arguments.get("pipeline")

    @property
    def ideal(self) -> float:
        """Return the step time without waiting or padding, in the cost model's unit."""
        stages = self.pipeline.stages if self.pipeline else 1
        return (
            float(self.workload(self.lengths).sum()) / int(self.arguments["ranks"]) / stages
        )

    def workload(self, lengths: Integers) -> Floats:
        images = Images.of(self.arguments.get("images"), len(lengths))
        return np.asarray(self.arguments["cost_model"].workload(lengths, images))

    def fixed(self, degrees: ContextDegrees, degree: int) -> dict[str, Any]:
        """Return the arguments with which all micro-steps have one context-parallel degree."""
        ranks = self.arguments["ranks"] // degree
        cap = self.arguments["max_tokens"] * degree
        costs = degrees.costs(self.arguments["cost_model"], degree)
        return {
            **self.prefixes,
            "ranks": ranks,
            "max_tokens": cap,
            "cost_model": costs,
            "context_degrees": None,
        }

    def fits(self, arguments: Mapping[str, Any]) -> bool:
        multiple = int(self.arguments.get("length_multiple", 1))
        return int(round_up(self.lengths, multiple).max()) <= int(arguments["max_tokens"])

    def plan(self, **changes: Any) -> Plan:
        return plan_batch(self.lengths, **{**self.arguments, **changes})


@dataclass(frozen=True, eq=False)
class Outcome:
    """One row of the comparison. figures: by column. Shares are floats, numbers of micro-batches are
    integers.

    over ideal: step time / `Batch.ideal` - 1. over cap: number of micro-batches. padding: share of computed
    tokens. micro-steps: over all mini-batches. idle, bubble: share of the step time that a rank, or a stage,
    waits. over bound: predicted time / a lower bound for as many micro-steps - 1. seconds: median planning
    time.
    """

    name: str
    plan: Plan
    figures: Mapping[str, float]
    seconds: float


def compare(batch: Batch) -> list[Outcome]:
    """Return the outcomes of all strategies, ours last. Raises as `plan_batch`."""
    strategies: dict[str, Callable[[], Plan]]
    if batch.pipeline is not None:
        how = {
            name: {**batch.prefixes, **changes} for name, changes in ON_PIPELINES.items()
        }
        strategies = {name: partial(batch.plan, **changes) for name, changes in how.items()}
    elif degrees := batch.arguments.get("context_degrees"):
        fixed = {
            degree: batch.fixed(degrees, degree) for degree in reversed(degrees.choices)
        }
        strategies = {
            f"degree {degree}": partial(batch.plan, **how)
            for degree, how in fixed.items()
            if batch.fits(how)
        }
        strategies[OURS] = partial(batch.plan, **batch.prefixes)
    else:
        strategies = {GIVEN: partial(batch.plan, algorithm="none")}
        strategies |= {
            title: partial(_published, name, batch)
            for title, name in PUBLISHED_TITLES.items()
        }
        strategies[OURS] = partial(batch.plan, algorithm="karmarkar_karp")
        if batch.prefixes:
            strategies[SHARED] = partial(
                batch.plan, algorithm="karmarkar_karp", **batch.prefixes
            )
    outcomes = []
    for name, strategy in strategies.items():
        # the first call may compile
        plan = strategy()
        seconds = []
        for _ in range(REPETITIONS):
            start = perf_counter()
            strategy()
            seconds.append(perf_counter() - start)
        outcomes.append(Outcome(name, plan, figures(plan, batch), median(seconds)))
    return outcomes


def figures(plan: Plan, batch: Batch) -> dict[str, float]:
    over_ideal = {"over ideal": float(plan.predicted_makespans().sum()) / batch.ideal - 1.0}
    micro_steps = {"micro-steps": sum(part.steps for part in plan.mini_batches)}
    if batch.pipeline is not None:
        numbers = plan_statistics(plan)
        on_pipeline = {
            "bubble": numbers["pipeline/bubble"],
            "over bound": numbers["pipeline/over_bound"],
        }
        return over_ideal | on_pipeline | micro_steps
    times = time_grids(plan)
    waiting = 1.0 - np.sum([grid.sum(axis=0) for grid in times], axis=0) / step_time(times)
    over_cap = int((micro_batch_tokens(plan) > plan.max_tokens).sum())
    idle = {"idle, mean": float(waiting.mean()), "idle, worst": float(waiting.max())}
    return (
        over_ideal
        | {"over cap": over_cap, "padding": padding_share(plan)}
        | micro_steps
        | idle
    )


def _published(name: Published, batch: Batch) -> Plan:
    arguments = {
        key: batch.arguments[key] for key in ("ranks", "mini_batches", "max_tokens")
    }
    steps = published_steps(
        name, batch.lengths, workloads=batch.workload(batch.lengths), **arguments
    )
    return plan_of(steps, batch, name)


def plan_of(mini_batches: Sequence[Steps], batch: Batch, name: Published) -> Plan:
    """Convert a published algorithm's micro-batches to a plan, which may break the batch's caps."""
    parts = []
    for steps in mini_batches:
        groups = [rows for step in steps for rows in step]
        bounds = np.cumsum([0, *map(len, groups)])
        parts.append(
            MiniBatch(
                np.concatenate(groups),
                bounds,
                len(steps),
                name,
                tokens=0,
                loss_tokens=0,
                sequences=0,
            )
        )
    arguments = {key: batch.arguments[key] for key in ("ranks", "max_tokens", "cost_model")}
    settings = Settings(
        **arguments, max_sequences=None, min_count=1, multiple_of=1, algorithm=name, order="descending",
        allow_empty=True, layout="padded" if name in PADDED else "packed", length_multiple=1,
    )  # fmt: skip
    return Plan(tuple(parts), batch.lengths, batch.workload(batch.lengths), settings)
