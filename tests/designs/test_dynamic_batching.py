"""D: dynamic batching in the padded layout, from a configuration."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.controller.config_workspace import refusal
from tests.designs.configured import (
    SMALL,
    compute,
    configuration,
    micro_batches,
    plan_of,
    up_to,
)
from tests.workers.model.ranks import RankPool

CP = ("policy.parallel.context_parallel=2", "policy.parallel.context_parallel_method=ring")
PADDED = ("model.layout=padded", "batch.mini_batches=1")


def test_d1_sorted_by_length_and_dealt_with_stride(file: str) -> None:
    """The worked example: ranks hold lengths 1, 5, 6, 8 and 3, 6, 7, 8, ties stable."""
    config = configuration(
        file,
        *up_to(8),
        *PADDED,
        "balance.algorithm=roll",
        "policy.data_parallel=2",
        "policy.max_tokens_per_micro_batch=12",
    )
    steps = micro_batches(plan_of(config, [7, 6, 8, 5, 1, 3, 8, 6]))
    by_rank = [sorted(rows) for rows in zip(*steps, strict=True)]
    assert by_rank == [[[2], [3, 4], [7]], [[0], [1, 5], [6]]]


def test_d2_d4_rows_times_width_keep_the_cap_and_ranks_take_as_many_steps(
    file: str,
) -> None:
    config = configuration(
        file,
        *SMALL,
        *PADDED,
        "policy.data_parallel=3",
        "policy.max_tokens_per_micro_batch=100",
        "model.length_multiple=4",
    )

    @settings(max_examples=50)
    @given(st.lists(st.integers(1, 40), min_size=3, max_size=40))
    def keeps_the_cap(lengths: list[int]) -> None:
        for step in micro_batches(plan_of(config, lengths)):
            for rows in step:
                width = max((-(-lengths[row] // 4) * 4 for row in rows), default=0)
                assert len(rows) * width <= 100

    keeps_the_cap()


def test_d3_widths_are_multiples(ranks: RankPool, file: str) -> None:
    """What the model read is rows of a multiple of 16 cells."""
    overrides = (
        *SMALL,
        *PADDED,
        "policy.data_parallel=1",
        "policy.max_tokens_per_micro_batch=128",
        "model.length_multiple=16",
    )
    plan = plan_of(
        configuration(file, *up_to(240), "model.length_multiple=64", *PADDED), [200, 240]
    )
    assert plan.length_multiple == 64
    cells = compute(ranks, file, *overrides).cells[0]
    assert all(len(batch) % 16 == 0 for batch in cells)
    assert np.gcd.reduce([len(batch) for batch in cells]) % 16 == 0


@pytest.mark.parametrize(
    ("cut", "count"),
    [
        (("balance.count_multiple=2",), 4),
        (
            (
                "model.path=deep",
                "policy.parallel.pipeline_parallel=4",
                "policy.parallel.virtual_stages=1",
            ),
            3,
        ),
        (
            (
                "model.path=eight",
                "policy.parallel.pipeline_parallel=4",
                "policy.parallel.virtual_stages=2",
            ),
            4,
        ),
    ],
)
def test_d5_virtual_stages_need_a_multiple_of_the_stages_and_get_it(
    file: str, cut: tuple[str, ...], count: int
) -> None:
    """The published lengths and cap, which need 3: the widest micro-batches are split until their count
    divides.
    """
    how = (
        "policy.data_parallel=2",
        "policy.max_tokens_per_micro_batch=12",
        "model.length_multiple=2",
        "balance.algorithm=roll",
    )
    config = configuration(file, *up_to(8), *PADDED, *how, *cut)
    for of in ("policy.update", "policy.log_probs"):
        assert len(micro_batches(plan_of(config, [7, 6, 8, 5, 1, 3, 8, 6], of=of))) == count
    assert "ask for 4000 micro-batches" in refusal(*cut, "policy.min_micro_batches=4000")
    # A full step can; one of which dropping has left too little goes on.
    assert len(micro_batches(plan_of(config, [5, 5, 5]))) <= 3


def test_d6_layout_cap_and_rounding_are_separate_for_training_and_forward_passes(
    ranks: RankPool, file: str
) -> None:
    """What the model read in the forward pass is padded to 16; the update is packed and padded to nothing."""
    own = (
        "model.forward_layout=padded",
        "model.forward_length_multiple=16",
        "policy.forward_max_tokens_per_micro_batch=96",
    )
    overrides = (
        *SMALL,
        "policy.data_parallel=1",
        "policy.max_tokens_per_micro_batch=64",
        *own,
    )
    config = configuration(file, *overrides)
    update, forward = (
        plan_of(config, [5] * 8, of=of).settings
        for of in ("policy.update", "policy.log_probs")
    )
    assert (update.layout, update.length_multiple, update.max_tokens) == ("packed", 1, 64)
    assert (forward.layout, forward.length_multiple, forward.max_tokens) == (
        "padded",
        16,
        96,
    )
    result, packed = (
        compute(ranks, file, *overrides),
        compute(ranks, file, *SMALL, "policy.data_parallel=1"),
    )
    assert all(len(cells) % 16 == 0 for cells in result.cells[0])
    assert result.metrics["loss"] == pytest.approx(packed.metrics["loss"], rel=1e-9)


@pytest.mark.parametrize(
    "way", [CP, ("policy.parallel.tensor_parallel=2",)], ids=["cp", "tp"]
)
def test_d8_padded_rows_are_shared_by_ranks_with_the_losses_of_one(
    ranks: RankPool, file: str, way: tuple[str, ...]
) -> None:
    alone = compute(ranks, file, *SMALL, *PADDED, "policy.data_parallel=1")
    shared = compute(ranks, file, *SMALL, *PADDED, "policy.data_parallel=1", *way)
    for name in ("loss", "grad_norm", "entropy"):
        assert shared.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-9)
    for row, log_probs in alone.log_probs.items():
        np.testing.assert_allclose(shared.log_probs[row], log_probs, atol=1e-6)
    flash = configuration(
        file, *SMALL, *PADDED, "model.attention=flash", "resources.device=cuda"
    )
    # Kernels for GPUs take padded rows too.
    assert flash.model.attention_layout() == "packed"
