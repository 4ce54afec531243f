"""Balancing: plans which rank computes which sequence, when, and within which caps. Needs NumPy; Numba makes it fast.

lengths --> CostModel --> workloads --> plan_batch --> Plan --> plan.for_rank(r)
                                                        +-----> plan_statistics, explain     (analysis/)

plan          global batches: mini-batches, micro-steps, ranks
schedule      one mini-batch; it starts from initial_assignment (Karmarkar-Karp), refines by dealing, step_filling,
              step_exchange, and measures itself against lower_bounds
packing       sequences into micro-batches under caps: filling, exchange, padded
prefix_packing  micro-batches that compute shared prefixes (prefixes.py) once
partition     k sets of equal weight: differencing, exchange, resplitting
workload      cost models, counted (model_config) or fitted (fitting)
alignment     padding and chunks for context parallelism
pipeline      what each stage of a pipeline computes, in order; pipeline_plan: plans for the least makespan, from the
              exact time (pipeline_time) of orders (pipeline_order) and shapes (pipeline_shape, pipeline_dealing)
published     the algorithms of other systems
analysis      statistics and explanations of plans, comparisons, charts, `python -m balancing`
"""

from balancing.analysis.explain import explain
from balancing.analysis.statistics import plan_statistics
from balancing.errors import BalancingError
from balancing.packing import pack
from balancing.partition import partition
from balancing.pipeline import Pipeline
from balancing.plan import Plan, RankMiniBatch, RankPlan, plan_batch
from balancing.workload import CostFit, CostModel

__all__ = [
    "BalancingError",
    "CostFit",
    "CostModel",
    "Pipeline",
    "Plan",
    "RankMiniBatch",
    "RankPlan",
    "explain",
    "pack",
    "partition",
    "plan_batch",
    "plan_statistics",
]
