"""Times of plans of fixed batches, which each room compares with what they were.

A search can lose quality without a plan that is wrong. The times are those of all micro-steps, each as long as
on its heaviest rank, or of a pipeline. The cost model has whole numbers, whose sums are exact. A better plan is
a new number, in the commit that makes it better.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from balancing import CostModel, plan_batch
from balancing.analysis.distributions import draw

COST_MODEL = CostModel(1000.0, 1.0, image_linear=500.0, image_quadratic=2.0, patches=4.0)
LENGTHS = ("lognormal", "reasoning", "agentic", "uniform", "grouped")


def recorded_times(
    options: dict[str, dict[str, Any]], recorded: dict[str, tuple[int, ...]]
) -> Callable[..., None]:
    """Return a test of plans with each of the options. recorded: times of `LENGTHS`, in turn."""

    @pytest.mark.parametrize("lengths", LENGTHS)
    @pytest.mark.parametrize("name", options)
    def test(name: str, lengths: str) -> None:
        time = plan_time(lengths, **options[name])
        assert time == recorded[name][LENGTHS.index(lengths)]

    return test


def plan_time(
    lengths_name: str, cap: float, *, sequences: int = 96, ranks: int = 4, **options: Any
) -> int:
    lengths = draw(lengths_name, sequences, 5)
    if options.pop("shares", False):
        prompts = np.repeat(draw("uniform", sequences // 8, 6) // 2, 8)
        options["prefix_groups"] = np.repeat(np.arange(sequences // 8), 8)
        options["prefix_lengths"] = prompts
        lengths = lengths + prompts
    if options.pop("has_images", False):
        lengths = lengths + 1200
        options["images"] = [
            [(2, 100)] * (row % 5 > 2) + [(200, 10 * row)]
            for row in range(1, sequences + 1)
        ]
    longest = round_to_64(int(lengths.max()))
    return total_time(lengths, ranks=ranks, max_tokens=int(cap * longest), **options)


def round_to_64(tokens: int) -> int:
    return -(-tokens // 64) * 64


def total_time(lengths: Any, **options: Any) -> int:
    plan = plan_batch(lengths, cost_model=COST_MODEL, **options)
    return round(plan.predicted_makespans().sum())
