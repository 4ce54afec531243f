"""What sequences of a tree share, after its costs were replaced."""

import numpy as np

from balancing.prefixes.groups import PrefixTree, SharedPrefixes


def test_the_work_of_a_whole_tree_is_replaced_and_not_that_of_its_prefixes_alone():
    tree = PrefixTree(np.array([0, 1]), np.array([0, 7]), np.zeros(2))
    prefixes = SharedPrefixes.of(np.array([0, 0]), np.array([4, 4]), np.zeros(2), tree)
    priced = prefixes.costing(lambda tokens: tokens * 10.0)
    together = priced.computed(np.array([100.0, 100.0]), np.array([0, 0]))
    apart = priced.computed(np.array([100.0, 100.0]), np.array([0, 1]))
    assert together.tolist() == [100.0, 30.0]  # seven tokens are shared, not four
    assert apart.tolist() == [100.0, 100.0]
