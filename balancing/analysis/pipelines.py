"""Plans for pipelines in numbers: predicted time, bubble, and distance to a lower bound.

times of micro-steps --> makespan (pipeline_time.py) --+
sequences, caps, number of micro-steps --> bound ------+--> statistics
other orders of the same plan --> makespans -----------+
"""

from collections.abc import Sequence

import numpy as np

from balancing.grouping import Floats
from balancing.lower_bounds import minimum_step_times
from balancing.packing import Caps
from balancing.pipeline import Pipeline
from balancing.pipeline_order import small_ends
from balancing.pipeline_plan import most_in_a_step
from balancing.pipeline_shape import least_makespan
from balancing.pipeline_time import makespan
from balancing.plan import MiniBatch, Plan


def pipeline_statistics(plan: Plan, pipeline: Pipeline, step_times: Sequence[float]) -> dict[str, float]:
    """Floats by name. step_times: of each mini-batch, a lower bound on the time of its micro-steps without a pipeline.

    pipeline/predicted_time: the makespans of all mini-batches, in the cost model's unit. pipeline/bubble: the share of
    it in which a stage waits, mean of the stages. pipeline/over_bound: predicted time / `pipeline_bound` - 1.
    pipeline/small_ends: makespan with these micro-steps in the published order, light ones at both ends / predicted
    time - 1.
    """
    times, spans = plan.predicted_times(), float(plan.predicted_makespans().sum())
    work = sum(float((each + pipeline.overhead).sum()) for each in times)
    bound = sum(pipeline_bound(part, plan, pipeline, t) for part, t in zip(plan.mini_batches, step_times, strict=True))
    published = sum(makespan(pipeline, each[small_ends(each)]) for each in times)
    return {
        "pipeline/predicted_time": spans,
        "pipeline/bubble": max(0.0, 1.0 - work / (pipeline.stages * spans)),
        "pipeline/over_bound": spans / bound - 1.0,
        "pipeline/small_ends": published / spans - 1.0,
    }


def pipeline_bound(mini_batch: MiniBatch, plan: Plan, pipeline: Pipeline, step_time: float) -> float:
    """A lower bound on the makespan of a mini-batch, for all plans with its number of micro-steps and the caps.

    step_time: a lower bound on the sum over its micro-steps of the heaviest rank. See `pipeline_shape.least_makespan`.
    """
    if plan.beginnings is not None:
        return least_makespan(pipeline, mini_batch.steps, step_time, step_time)
    rows = mini_batch.rows
    sizes, weights = plan.sizes[rows], plan.workloads[rows]
    caps = Caps(plan.max_tokens, plan.settings.max_sequences or len(rows))
    forced = minimum_step_times(sizes, weights, plan.ranks, mini_batch.steps, caps.max_tokens, caps.max_sequences)
    return least_makespan(
        pipeline,
        mini_batch.steps,
        work=float(weights.sum()) / plan.ranks,
        time=step_time,
        most=most_in_a_step(sizes, weights, plan.ranks, caps),
        longest=float(forced.max(initial=0.0)),
    )


def orders(plan: Plan, pipeline: Pipeline) -> dict[str, Floats]:
    """The makespans of all mini-batches, with their micro-steps in other orders, by name: float64 [mini_batches]."""
    times = plan.predicted_times()
    by_name = {
        "as planned": times,
        "small ends": [each[small_ends(each)] for each in times],
        "descending": [-np.sort(-each) for each in times],
    }
    return {name: np.array([makespan(pipeline, each) for each in each_times]) for name, each_times in by_name.items()}
