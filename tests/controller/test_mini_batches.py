import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from controller.mini_batches import draw_mini_batches


@given(st.integers(1, 200), st.integers(1, 20), st.integers(0, 5))
def test_mini_batches_hold_every_row_once_and_differ_by_at_most_one(rows: int, count: int, seed: int) -> None:
    drawn = draw_mini_batches(rows, count, seed, step=1)
    assert sorted(np.concatenate(drawn).tolist()) == list(range(rows))
    assert len(drawn) == min(rows, count)
    sizes = [len(part) for part in drawn]
    assert max(sizes) - min(sizes) <= 1


def test_p10_membership_is_random_but_repeats_with_the_seed() -> None:
    drawn = [draw_mini_batches(64, 4, seed, step=1) for seed in (1, 1, 2)]
    assert [part.tolist() for part in drawn[0]] == [part.tolist() for part in drawn[1]]
    assert drawn[0][0].tolist() != drawn[2][0].tolist()
    assert drawn[0][0].tolist() != list(range(16))
