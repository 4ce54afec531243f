"""The settings of a run as arguments of `balancing.plan_batch`: in one place, for the run and for its report."""

from typing import Any

from balancing import CostModel
from balancing.alignment import group_cap
from controller.config import TrainingConfig


def plan_arguments(config: TrainingConfig, cost_model: CostModel, max_tokens: int) -> dict[str, Any]:
    """All arguments of `plan_batch` but those of the batch itself. max_tokens: cap on a micro-batch of one rank."""
    policy = config.policy
    return {
        "ranks": policy.ranks,
        "max_tokens": group_cap(max_tokens, policy.parallel.context_parallel),
        "max_sequences": policy.max_sequences or None,
        "cost_model": cost_model,
        "algorithm": config.balance.algorithm,
        "layout": config.model.layout,
        "length_multiple": config.length_multiple,
    }
