"""Plan which rank computes which sequence, when, and within which caps. Needs NumPy. Numba makes it fast.

    lengths --> CostModel --> workloads --> plan_batch --> Plan --> plan.for_rank(r)
                                                            +-----> plan_statistics, explain     (analysis/)

plan             global batches: mini-batches, micro-steps, ranks (and plan_settings)
mini_batch       the micro-steps of a mini-batch, and the part of a rank
context_degrees  by micro-step: how many ranks share a sequence
cost_model       costs of sequences, counted from a model config or fitted to measurements
model_counts     weights of a model's layers, read under its family's names (model_fields)
search/          one mini-batch: Karmarkar-Karp (assignment), long steps first, packing
prefixes/        one mini-batch with shared prefixes: each is computed once per micro-batch
pipelines/       the least makespan: order of passes on each stage, and of micro-steps
basics/          alignment, groups, images and checks of arguments
time_model/      seconds of a step on a described cluster
analysis/        statistics, explanations, comparisons, charts, `python -m balancing`
"""

import importlib
from typing import TYPE_CHECKING, Any

from balancing.context_degrees import ContextDegrees
from balancing.cost_model import CostFit, CostModel
from balancing.errors import BalancingError
from balancing.mini_batch import RankMiniBatch, RankPlan
from balancing.pipelines.pipeline import Pipeline
from balancing.plan import Plan, plan_batch
from balancing.search.packing import pack
from balancing.search.partition import partition

if TYPE_CHECKING:
    from balancing.analysis.explain import explain
    from balancing.analysis.statistics import plan_statistics

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

_ANALYSIS = {
    "explain": "balancing.analysis.explain",
    "plan_statistics": "balancing.analysis.statistics",
}


def __getattr__(name: str) -> Any:
    """Load what explains plans at its first use: planning does without."""
    if name not in _ANALYSIS:
        raise AttributeError(f"module 'balancing' has no attribute {name!r}")
    return getattr(importlib.import_module(_ANALYSIS[name]), name)
