"""Plan which rank computes which sequence, when, and within which caps. Needs NumPy. Numba makes it fast.

lengths --> CostModel --> workloads --> plan_batch --> Plan --> plan.for_rank(r)
                                                        +-----> plan_statistics, explain     (analysis/)

plan             global batches: mini-batches, micro-steps, ranks schedule         one mini-batch:
Karmarkar-Karp (assignment), long steps first, lower_bounds prefix_packing   one mini-batch with shared
prefixes (prefixes), each computed once per micro-batch packing          sequences into micro-batches under
caps: filling, exchange, padded partition        k sets of equal weight cost_model       costs of sequences,
counted from a model config or fitted to measurements model_counts     weights of a model's layers, read under
its family's names (model_fields) context_degrees  by micro-step: how many ranks share a sequence alignment
padding and chunks for context parallelism pipeline         order of passes on each stage (pipeline_plan,
pipeline_time, micro_step_targets: least makespan) time_model       seconds of a step on a described cluster
baselines        algorithms of other systems analysis         statistics, explanations, comparisons, charts,
`python -m balancing`
"""

from balancing.analysis.explain import explain
from balancing.analysis.statistics import plan_statistics
from balancing.context_degrees import ContextDegrees
from balancing.cost_model import CostFit, CostModel
from balancing.errors import BalancingError
from balancing.mini_batch import RankMiniBatch, RankPlan
from balancing.pipelines.pipeline import Pipeline
from balancing.plan import Plan, plan_batch
from balancing.search.packing import pack
from balancing.search.partition import partition

__all__ = [
    "BalancingError",
    "ContextDegrees",
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
