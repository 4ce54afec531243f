"""Compares plans of one batch for a pipeline: the given order, the published order, and ours.

batch, pipeline --> a plan for each strategy --> makespans, bubble, bound --> PipelineOutcome
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from types import MappingProxyType
from typing import Any

from balancing.analysis.statistics import plan_statistics
from balancing.analysis.strategies import GIVEN, OURS, REPETITIONS, Batch
from balancing.pipeline import Pipeline
from balancing.plan import Plan

SMALL_ENDS = "small ends"
ON_PIPELINES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        GIVEN: {"algorithm": "none", "order": None},
        SMALL_ENDS: {"algorithm": "karmarkar_karp", "order": "small_ends"},
        OURS: {"algorithm": "karmarkar_karp", "order": "makespan"},
    }
)
"""Arguments of `plan_batch` by strategy. `small ends` is the published order of micro-steps of equal weight."""
PIPELINE_COLUMNS = ("strategy", "over ideal", "bubble", "over bound", "micro-steps", "to plan")


@dataclass(frozen=True, eq=False)
class PipelineOutcome:
    """A strategy's plan. over_ideal: predicted time / (workload / ranks / stages) - 1. bubble, over_bound: as of
    `pipelines.pipeline_statistics`. seconds: median planning time."""

    name: str
    plan: Plan
    over_ideal: float
    bubble: float
    over_bound: float
    seconds: float

    @property
    def micro_steps(self) -> int:
        """Over all mini-batches."""
        return sum(part.steps for part in self.plan.mini_batches)

    def cells(self) -> list[str]:
        """The texts for `PIPELINE_COLUMNS`."""
        shares = [f"{self.over_ideal:+.1%}", f"{self.bubble:.1%}", f"{self.over_bound:+.1%}"]
        return [self.name, *shares, f"{self.micro_steps:,}", f"{1e3 * self.seconds:,.0f} ms"]


def compare_on_pipeline(batch: Batch, pipeline: Pipeline) -> list[PipelineOutcome]:
    """The outcomes of all strategies, ours last; raises as `plan_batch`."""
    return [_outcome(name, batch, pipeline, changes) for name, changes in ON_PIPELINES.items()]


def _outcome(name: str, batch: Batch, pipeline: Pipeline, changes: Mapping[str, Any]) -> PipelineOutcome:
    plan = batch.shared_plan(pipeline=pipeline, **changes)
    seconds = []
    for _ in range(REPETITIONS):
        start = perf_counter()
        batch.shared_plan(pipeline=pipeline, **changes)
        seconds.append(perf_counter() - start)
    numbers = plan_statistics(plan)
    over_ideal = pipeline.stages * numbers["pipeline/predicted_time"] / batch.ideal - 1.0
    return PipelineOutcome(
        name, plan, over_ideal, numbers["pipeline/bubble"], numbers["pipeline/over_bound"], median(seconds)
    )
