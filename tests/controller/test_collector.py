import numpy as np
import pytest

from controller.collector import overlong_penalty


def test_the_penalty_falls_linearly_over_the_last_tokens() -> None:
    penalty = overlong_penalty(np.array([1, 60, 70, 80, 99, 100]), longest=100, overlong_tokens=40)
    assert penalty.tolist() == pytest.approx([0, 0, -0.25, -0.5, -0.975, -1])
