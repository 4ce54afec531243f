"""Alignment and zig-zag chunks: the published example to the letter, and that every token is held once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancing.basics.alignment import (
    cumulative_lengths,
    group_cap,
    length_multiple,
    round_up,
    zigzag_positions,
)
from balancing.errors import LengthError, OptionError


def test_p2_multiple():
    assert length_multiple(2, 1) == 4
    assert length_multiple(2, 4) == 16
    assert length_multiple(1, 4) == 4
    assert length_multiple(1, 1) == 1


def test_p3_p4_p5_worked_example():
    lengths = np.array([2, 4, 6, 1])
    padded = round_up(lengths, length_multiple(2, 1))
    assert padded.tolist() == [4, 4, 8, 4]
    assert cumulative_lengths(lengths).tolist() == [0, 2, 6, 12, 13]
    assert cumulative_lengths(padded).tolist() == [0, 4, 8, 16, 20]
    assert (cumulative_lengths(padded) // 2).tolist() == [0, 2, 4, 8, 10]
    row = np.concatenate(
        [
            [str(i)] * n + ["p"] * (p - n)
            for i, (n, p) in enumerate(zip(lengths, padded, strict=True))
        ]
    )
    assert "".join(row[zigzag_positions(padded, 2, 0)]) == "0p1122pp3p"
    assert "".join(row[zigzag_positions(padded, 2, 1)]) == "0p112222pp"


def test_p4_halves_would_cost_6_and_15_zigzag_halves_of_8_cost_the_same():
    cost = np.arange(1, 9)  # causal: token t meets t tokens
    assert (cost[:3].sum(), cost[3:6].sum()) == (6, 15)
    assert (
        cost[zigzag_positions([8], 2, 0)].sum() == cost[zigzag_positions([8], 2, 1)].sum()
    )


def test_v5_cap_counts_per_context_parallel_group():
    assert group_cap(4096, 4) == 16384


@given(st.lists(st.integers(1, 50), max_size=10), st.integers(1, 5))
def test_p4_every_token_is_held_by_one_context_rank(lengths, cp):
    padded = round_up(np.array(lengths, np.int64), length_multiple(cp, 1))
    held = [zigzag_positions(padded, cp, rank) for rank in range(cp)]
    assert {len(positions) for positions in held} == {int(padded.sum()) // cp}
    assert sorted(np.concatenate(held)) == list(range(padded.sum()))


def test_bad_input_is_named():
    with pytest.raises(
        LengthError,
        match=r"padded_lengths\[1\] is 6, not a multiple of 2\*context_parallel=4",
    ):
        zigzag_positions([4, 6], 2, 0)
    with pytest.raises(OptionError, match="context_rank=2"):
        zigzag_positions([4], 2, 2)
