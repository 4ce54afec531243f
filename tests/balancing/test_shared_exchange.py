import numpy as np

from balancing.shared_exchange import exchange_shared
from balancing.shared_filling import Groups


def test_an_exchange_that_computes_no_beginning_again_is_preferred_to_a_more_even_one():
    # Micro-batch 0 is above its level of 9. Group 0 is in 0 and 1; 2 is lighter, but would compute its beginning again.
    own, group = np.array([4.0, 4.0, 1.0, 1.0, 0.5]), np.array([0, 0, 0, 1, 2])
    shared = np.array([2.0, 0.5, 0.5])
    groups = Groups(own, np.ones(5, np.int64), group, np.array([0, 3, 4, 5]), shared, np.ones(3, np.int64))
    before = np.array([0, 0, 1, 1, 2])
    after, _ = exchange_shared(groups, before, np.full(3, 9.0), 100, 100, 10_000)
    assert after.tolist() != before.tolist()
    assert set(after[group == 0].tolist()) == {0, 1}
