"""Balancing: plans which rank computes which sequence, when, and within which caps. Needs NumPy; Numba makes it fast.

lengths --> CostModel --> workloads --> plan_batch --> Plan --> plan.for_rank(r)
                                                        +-----> plan_statistics, explain     (analysis/)

plan             global batches: mini-batches, micro-steps, ranks
schedule         one mini-batch: starts from assignment (Karmarkar-Karp), fills long steps first, exchanges between
                 steps, and measures itself against lower_bounds
prefix_packing   one mini-batch whose sequences share prefixes (prefixes), computed once in a micro-batch
packing          sequences into micro-batches under caps: filling, exchange, padded
partition        k sets of equal weight: largest differencing, exchange
cost_model       costs of sequences, counted from a model's config or fitted to measurements
alignment        padding and chunks for context parallelism
pipeline         what each stage of a pipeline computes, in order; pipeline_plan: plans for the least makespan, from the
                 exact time of orders (pipeline_time) and the best weights of micro-steps (micro_step_targets)
baselines        the algorithms of other systems
analysis         statistics and explanations of plans, comparisons, charts, `python -m balancing`
"""

from balancing.analysis.explain import explain
from balancing.analysis.statistics import plan_statistics
from balancing.cost_model import CostFit, CostModel
from balancing.errors import BalancingError
from balancing.packing import pack
from balancing.partition import partition
from balancing.pipeline import Pipeline
from balancing.plan import Plan, RankMiniBatch, RankPlan, plan_batch

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
