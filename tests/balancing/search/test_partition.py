"""k-way partitioning: coverage, counts, quality against brute force and against a plain Karmarkar-Karp."""

import heapq
import json
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancing import BalancingError, partition
from balancing.errors import CountError, OptionError, WeightError
from balancing.search.partition import _heaviest_first

ALGORITHMS = ("refined", "karmarkar_karp", "longest_first")

weight_lists = st.lists(st.integers(0, 10_000), min_size=1, max_size=60)


def sums(weights, sets):
    return np.array([np.asarray(weights)[indices].sum() for indices in sets])


@given(
    st.lists(st.integers(0, 2**18), min_size=1) | st.lists(st.floats(0, 2**18), min_size=1)
)
def test_weights_are_taken_from_the_heaviest_on_equal_ones_in_their_order(weights):
    assert _heaviest_first(np.array(weights, np.float64)).tolist() == sorted(
        range(len(weights)), key=lambda index: -weights[index]
    )


def differencing_by_the_book(weights, k):
    """Largest differencing as published, every weight with k - 1 empty sets at first. Returns the sorted
    sums.
    """
    return join_solutions([[0] * (k - 1) + [w] for w in sorted(weights, reverse=True)])


def join_solutions(solutions):
    """k sums copied and sorted at every join, until one solution is left."""
    heap = [
        (min(sums_) - max(sums_), number, sorted(sums_))
        for number, sums_ in enumerate(solutions)
    ]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = sorted(a + b for a, b in zip(first, reversed(second), strict=True))
        heapq.heappush(heap, (joined[0] - joined[-1], number, joined))
        number += 1
    return heap[0][2]


@given(
    weights=weight_lists,
    k=st.integers(1, 12),
    equal_size=st.booleans(),
    algorithm=st.sampled_from(ALGORITHMS),
)
def test_v2_every_index_is_in_one_set_sorted_and_empty_ones_are_those_allowed(
    weights, k, equal_size, algorithm
):
    k = min(k, len(weights))
    sets = partition(weights, k, equal_size=equal_size, algorithm=algorithm)
    assert len(sets) == k
    assert sorted(np.concatenate(sets)) == list(range(len(weights)))
    assert all(
        indices.dtype == np.int64 and (np.diff(indices) > 0).all() for indices in sets
    )
    counts = [len(indices) for indices in sets]
    assert min(counts) >= 1
    if equal_size:
        assert max(counts) - min(counts) <= 1
    more = partition(
        weights,
        len(weights) + k,
        equal_size=equal_size,
        algorithm=algorithm,
        allow_empty=True,
    )
    assert sorted(map(len, more)) == [0] * k + [1] * len(weights)


@given(
    weights=st.permutations([3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]),
    algorithm=st.sampled_from(ALGORITHMS),
)
def test_distinct_weights_are_split_alike_in_any_order(weights, algorithm):
    ordered = sorted(weights)
    expected = {
        frozenset(np.array(ordered)[s].tolist())
        for s in partition(ordered, 3, algorithm=algorithm)
    }
    assert {
        frozenset(np.array(weights)[s].tolist())
        for s in partition(weights, 3, algorithm=algorithm)
    } == expected


def test_p8_differencing_of_the_textbook_example():
    # 8, 7, 6, 5, 4 in two sets: differencing ends at 16 and 14 (the optimum is 15 and 15).
    assert sorted(
        sums([8, 7, 6, 5, 4], partition([8, 7, 6, 5, 4], 2, algorithm="karmarkar_karp"))
    ) == [
        14,
        16,
    ]
    assert sorted(sums([8, 7, 6, 5, 4], partition([8, 7, 6, 5, 4], 2))) == [15, 15]


@pytest.mark.parametrize("k", [2, 3, 5, 8, 40])
def test_p8_m5_sparse_differencing_reaches_the_sums_of_the_published_method(k):
    # Large random weights: no two differences tie, so both must join the same solutions all the way.
    for weights in np.random.default_rng(k).integers(1, 2**40, (20, 50)).tolist():
        ours = sums(weights, partition(weights, k, algorithm="karmarkar_karp"))
        assert sorted(ours) == sorted(differencing_by_the_book(weights, k))


@pytest.mark.parametrize("k", [2, 3, 5, 8])
def test_p8_differencing_of_equal_counts_starts_from_runs(k):
    # By the book: runs of k in sorted order, then k sums joined and sorted anew each time.
    for weights in np.random.default_rng(k).integers(1, 2**40, (20, 6 * k)).tolist():
        ordered = sorted(weights, reverse=True)
        runs = [ordered[start : start + k] for start in range(0, len(ordered), k)]
        ours = sums(
            weights, partition(weights, k, equal_size=True, algorithm="karmarkar_karp")
        )
        assert sorted(ours) == sorted(join_solutions(runs))


WITHOUT_NUMBA = """
import json, sys, warnings
sys.modules["numba"] = None  # importing it now raises ImportError
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from balancing import partition
    requests = json.loads(sys.argv[1])
    plans = [[s.tolist() for s in partition(weights, k, **options)] for weights, k, options in requests]
print(json.dumps([plans, [str(w.message) for w in caught if w.category is RuntimeWarning]]))
"""


def test_without_numba_there_is_one_warning_and_the_same_partitions():
    random = np.random.default_rng(3)
    requests = [
        (
            random.integers(1, 2000, count).tolist(),
            k,
            {"equal_size": equal_size, "algorithm": algorithm},
        )
        for count, k in [(9, 2), (30, 4), (50, 7), (7, 7)]
        for equal_size in (True, False)
        for algorithm in ALGORITHMS
    ]
    command = [sys.executable, "-c", WITHOUT_NUMBA, json.dumps(requests)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    plans, messages = json.loads(done.stdout)
    assert len(messages) == 1
    assert "Numba cannot be imported" in messages[0]
    assert plans == [
        [s.tolist() for s in partition(weights, k, **options)]
        for weights, k, options in requests
    ]


@given(
    weights=st.lists(st.integers(1, 100), min_size=3, max_size=7), equal_size=st.booleans()
)
def test_refined_is_never_far_from_the_optimum(weights, equal_size):
    k, least = 3, len(weights) // 3
    best = min(
        max(
            sum(w for w, c in zip(weights, choice, strict=True) if c == s) for s in range(k)
        )
        for choice in product(range(k), repeat=len(weights))
        if not equal_size
        or all(least <= choice.count(s) <= least + (len(weights) % k > 0) for s in range(k))
    )
    heaviest = sums(weights, partition(weights, k, equal_size=equal_size)).max()
    longest = sums(
        weights, partition(weights, k, equal_size=equal_size, algorithm="longest_first")
    ).max()
    assert best <= heaviest <= longest


def test_many_weights_per_set_come_within_1e_5_of_the_mean_with_equal_counts():
    weights = np.clip(
        np.random.default_rng(1).lognormal(np.log(600), 1, 4096), 16, 8192
    ).astype(int)
    sets = partition(weights, 64, equal_size=True)
    assert {len(s) for s in sets} == {64}
    heaviest = sums(weights, sets).max()
    assert heaviest <= np.ceil(weights.sum() / 64) * (1 + 1e-5)


@pytest.mark.parametrize(
    ("weights", "k", "options", "error", "words"),
    [
        ([], 2, {}, WeightError, "weights is empty"),
        ([1, 2], 0, {}, OptionError, "k=0"),
        ([1, 2], 1.5, {}, OptionError, "k=1.5"),
        ([1, 2], 3, {}, CountError, "k=3 is more than the 2 weights"),
        ([1, float("nan")], 2, {}, WeightError, r"weights\[1\] is nan"),
        ([1, -2], 2, {}, WeightError, r"weights\[1\] is -2"),
        ([[1, 2]], 1, {}, WeightError, "2 dimensions"),
        ([1, 2], 2, {"algorithm": "magic"}, OptionError, "algorithm='magic'"),
    ],
)
def test_bad_input_is_named(weights, k, options, error, words):
    with pytest.raises(error, match=words) as caught:
        partition(weights, k, **options)
    assert isinstance(caught.value, BalancingError)
