"""Plan which rank computes which sequence, when, and within which caps. Needs NumPy. Numba makes it fast.

    lengths --> CostModel --> workloads --> plan_batch --> Plan --> plan.for_rank(r)
                                                            +-----> plan_statistics, explain     (analysis/)

    plan             global batches: mini-batches, micro-steps, ranks (mini_batch: the rows of one rank)
    search/          one mini-batch: Karmarkar-Karp (partition), long steps first, micro-batches under caps
    prefixes/        one mini-batch whose sequences share prefixes, each computed once per micro-batch
    pipelines/       order of passes on each pipeline stage, with the least makespan
    basics/          arguments, caps, groups, alignment, images, and loops that Numba compiles
    cost_model       costs of sequences, counted from a model config or fitted to measurements
    model_counts     weights of a model's layers, read under its family's names (model_fields)
    context_degrees  by micro-step: how many ranks share a sequence
    time_model/      seconds of a step on a described cluster
    analysis/        statistics, explanations, comparisons, charts, `python -m balancing`

Read `plan` first. Planning imports neither `analysis` nor `time_model`.
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

_ANALYSIS = {"explain": "balancing.analysis.explain", "plan_statistics": "balancing.analysis.statistics"}


def __getattr__(name: str) -> Any:
    """Load what explains plans at its first use: planning does without."""
    if name not in _ANALYSIS:
        raise AttributeError(f"module 'balancing' has no attribute {name!r}")
    return getattr(importlib.import_module(_ANALYSIS[name]), name)
