"""Squared tokens of layers with windows, against pairs counted one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancing.basics.windows import Window, attended_squares


def pairs(length: int, reach: int, *, chunked: bool) -> float:
    """Count pairs of a token and one that it sees, where half a pair is of a token with itself."""
    total = 0.0
    for token in range(length):
        first = token // reach * reach if chunked else max(0, token - reach)
        total += token - first + (0.5 if chunked or (first == 0 and token < reach) else 0.0)
    return total


@given(length=st.integers(0, 60), reach=st.integers(1, 70), chunked=st.booleans())
def test_squares_are_twice_the_pairs(length: int, reach: int, chunked: bool) -> None:
    squares = float(attended_squares(length, [Window(reach, 1.0, chunked)]))
    assert squares == pytest.approx(2 * pairs(length, reach, chunked=chunked))


def test_layers_count_by_their_share() -> None:
    lengths = np.array([10, 100, 1000])
    windows = (Window(100, 0.5), Window(50, 0.25, chunked=True))
    squares = attended_squares(lengths, windows)
    alone = [attended_squares(lengths, [window._replace(share=1.0)]) for window in windows]
    np.testing.assert_allclose(
        squares, 0.25 * lengths**2 + 0.5 * alone[0] + 0.25 * alone[1]
    )
    assert (attended_squares(lengths) == lengths**2).all()
