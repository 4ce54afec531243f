"""D: dynamic batching in the padded layout, from a configuration."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.designs.configured import SMALL, compute, configuration, micro_batches, plan_of, up_to
from tests.workers.model.ranks import RankPool

PADDED = ("model.layout=padded", "batch.mini_batches=1")


def test_d1_sorted_by_length_and_dealt_with_stride(file: str) -> None:
    """The worked example: ranks hold lengths 1, 5, 6, 8 and 3, 6, 7, 8, ties stable."""
    config = configuration(file, *up_to(8), *PADDED, "balance.algorithm=roll", "policy.ranks=2", "policy.max_tokens=12")
    steps = micro_batches(plan_of(config, [7, 6, 8, 5, 1, 3, 8, 6]))
    assert steps == [[[3, 4], [1, 5]], [[7], [0]], [[2], [6]]]


def test_d2_d4_rows_times_width_keep_the_cap_and_ranks_take_as_many_steps(file: str) -> None:
    config = configuration(file, *SMALL, *PADDED, "policy.ranks=3", "policy.max_tokens=100", "model.length_multiple=4")

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.integers(1, 40), min_size=3, max_size=40))
    def keeps_the_cap(lengths: list[int]) -> None:
        for step in micro_batches(plan_of(config, lengths)):
            for rows in step:
                width = max((-(-lengths[row] // 4) * 4 for row in rows), default=0)
                assert len(rows) * width <= 100

    keeps_the_cap()


def test_d3_widths_are_multiples(ranks: RankPool, file: str) -> None:
    """What the model read is rows of a multiple of 16 cells."""
    overrides = (*SMALL, *PADDED, "policy.ranks=1", "policy.max_tokens=128", "model.length_multiple=16")
    plan = plan_of(configuration(file, *up_to(240), "model.length_multiple=64", *PADDED), [200, 240])
    assert plan.length_multiple == 64
    cells = compute(ranks, file, *overrides).cells[0]
    assert all(len(batch) % 16 == 0 for batch in cells)
    assert np.gcd.reduce([len(batch) for batch in cells]) % 16 == 0
