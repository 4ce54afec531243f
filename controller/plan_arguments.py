"""Plan arguments: the settings of a run in the words of `balancing.plan_batch`.

Config, "policy.update" --> ranks, caps, counts, algorithm, layout --> the planner, and the report, which plans again
"""

from typing import Any

from balancing.alignment import group_cap
from controller.config import TrainingConfig


def plan_arguments(config: TrainingConfig, of: str) -> dict[str, Any]:
    """Arguments of `balancing.plan_batch` that follow from the settings alone. of: a pass in `config.limits`."""
    limits, policy, balance = config.limits[of], config.policy, config.balance
    return {
        "ranks": policy.ranks,
        "max_tokens": group_cap(limits.max_tokens, policy.parallel.context_parallel),
        "max_sequences": limits.max_sequences or None,
        "min_count": limits.min_micro_batches,
        "multiple_of": balance.count_multiple,
        "algorithm": balance.algorithm,
        "order": balance.order,
        "layout": limits.layout,
        "length_multiple": limits.length_multiple,
    }
