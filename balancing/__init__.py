"""Lengths in, plans out: who computes which sequence, when, and within which caps. NumPy, and Numba if it is there."""

from balancing.errors import BalancingError
from balancing.packing import pack
from balancing.partition import partition
from balancing.plan import Plan, RankMiniBatch, RankPlan, plan_batch
from balancing.workload import CostFit, CostModel

__all__ = [
    "BalancingError",
    "CostFit",
    "CostModel",
    "Plan",
    "RankMiniBatch",
    "RankPlan",
    "pack",
    "partition",
    "plan_batch",
]
