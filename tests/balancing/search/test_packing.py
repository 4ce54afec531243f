"""Micro-batches under caps: worked examples, failings of earlier systems, and invariants over
random batches.
"""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing import BalancingError, pack
from balancing.basics.grouping import Caps
from balancing.errors import CountError, LengthError, OptionError, OverCapError, WeightError
from balancing.search.lower_bounds import fewest_bins
from balancing.search.packing import fewest_by_best_fit, keeps_caps, most_by_best_fit

FIRST = [100, 900, 50, 950, 400, 600]


def as_lists(groups):
    return [group.tolist() for group in groups]


def tokens_of(lengths, group, layout, multiple):
    sizes = -(-np.asarray(lengths)[group] // multiple) * multiple
    return len(group) * sizes.max() if layout == "padded" else sizes.sum()


@pytest.mark.parametrize(
    ("lengths", "cap", "options", "expected"),
    [
        (FIRST, 2000, {}, [[1, 5], [0, 2, 3, 4]]),  # of 1,500 tokens each
        # 1,170,000 and 1,075,000.
        (FIRST, 2000, {"workloads": np.square(FIRST)}, [[1, 5], [0, 2, 3, 4]]),
        (FIRST, 2000, {"algorithm": "none"}, [[0, 1, 2], [3, 4, 5]]),
        # Systems that count tokens / cap pack two together.
        ([7] * 8, 8, {}, [[i] for i in range(8)]),
        ([4096, 2000, 2000, 2000], 5050, {}, [[0], [1, 3], [2]]),
        ([5] * 4, 100, {"min_count": 3}, [[0, 3], [1], [2]]),
        ([200, 240], 512, {"layout": "padded", "length_multiple": 64}, [[0, 1]]),
        ([200, 240], 511, {"layout": "padded", "length_multiple": 64}, [[0], [1]]),
    ],
)
def test_worked_examples(lengths, cap, options, expected):
    assert as_lists(pack(lengths, cap, **options)) == expected


@st.composite
def requests(draw, max_size=40):
    lengths = draw(st.lists(st.integers(1, 100), min_size=1, max_size=max_size))
    multiple = draw(st.sampled_from([1, 1, 4, 16]))
    longest = -(-max(lengths) // multiple) * multiple
    options = {
        "max_sequences": draw(st.none() | st.integers(1, 8)),
        "layout": draw(st.sampled_from(["packed", "padded"])),
        "length_multiple": multiple,
    }
    return lengths, draw(st.integers(longest, 4 * longest)), options


@settings(max_examples=300)
@given(
    requests(),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from(["none", "load_balance"]),
    st.booleans(),
)
def test_d2_m3_v6_every_promise_holds_or_is_refused(
    request_, min_count, multiple_of, algorithm, weighted
):
    lengths, cap, options = request_
    workloads = np.square(lengths) if weighted else None
    arguments = {
        **options,
        "min_count": min_count,
        "multiple_of": multiple_of,
        "algorithm": algorithm,
    }
    try:
        groups = pack(lengths, cap, workloads=workloads, **arguments)
    except CountError:
        fewest = len(pack(lengths, cap, algorithm=algorithm, **options))
        assert -(-max(fewest, min_count) // multiple_of) * multiple_of > len(lengths)
        return
    assert sorted(np.concatenate(groups)) == list(range(len(lengths)))
    assert all(
        tokens_of(lengths, g, options["layout"], options["length_multiple"]) <= cap
        for g in groups
    )
    assert all(1 <= len(g) <= (options["max_sequences"] or len(lengths)) for g in groups)
    assert len(groups) >= min_count
    assert len(groups) % multiple_of == 0
    again = pack(lengths, cap, workloads=workloads, **arguments)
    assert as_lists(groups) == as_lists(again)


def fewest_by_force(lengths, cap, max_sequences, layout, multiple):
    n = len(lengths)
    for count in range(1, n + 1):
        for choice in product(range(count), repeat=n):
            groups = [[i for i in range(n) if choice[i] == c] for c in range(count)]
            if all(
                g
                and len(g) <= max_sequences
                and tokens_of(lengths, np.array(g), layout, multiple) <= cap
                for g in groups
            ):
                return count
    raise AssertionError("one sequence each always fits")


@settings(max_examples=100)
@given(requests(max_size=6))
def test_v6_the_count_is_the_smallest_that_fits(request_):
    lengths, cap, options = request_
    fewest = fewest_by_force(
        lengths,
        cap,
        options["max_sequences"] or 99,
        options["layout"],
        options["length_multiple"],
    )
    assert len(pack(lengths, cap, **options)) == fewest
    if options["layout"] == "packed":
        sizes = (
            -(-np.asarray(lengths) // options["length_multiple"])
            * options["length_multiple"]
        )
        assert fewest_bins(sizes, cap, options["max_sequences"] or 99) <= fewest


def test_caps_are_kept_up_to_their_own_value() -> None:
    sizes = np.array([5, 5, 5])
    assert keeps_caps(sizes, Caps(15, 3))
    assert not keeps_caps(sizes, Caps(14, 3))
    assert not keeps_caps(sizes, Caps(15, 2))
    assert keeps_caps(np.array([5, 4, 3]), Caps(15, 3, padded=True))
    assert not keeps_caps(np.array([5, 4, 3]), Caps(14, 3, padded=True))


@pytest.mark.parametrize("algorithm", ["load_balance", "none"])
def test_one_more_micro_batch_is_tried_where_the_bound_cannot_be_attained(
    algorithm: str,
) -> None:
    """Three of six tokens are 18 of two caps of 10, and fit into three."""
    assert len(pack([6, 6, 6], max_tokens=10, algorithm=algorithm)) == 3
    assert len(pack([6, 6, 6, 6, 6], max_tokens=10, algorithm=algorithm)) == 5


def test_no_micro_batch_is_opened_beyond_the_first_count_that_fits() -> None:
    """The bound of three is not attained."""
    assert len(pack([5, 9, 2, 7, 7, 4, 2], max_tokens=12)) == 4


@settings(max_examples=50)
@given(st.permutations(range(30)), st.sampled_from(["packed", "padded"]))
def test_the_order_of_lengths_changes_nothing_but_indices(order, layout):
    lengths = np.arange(20, 50)
    shuffled = lengths[np.array(order)]
    grouped = [
        [sorted(own[group].tolist()) for group in pack(own, 120, layout=layout)]
        for own in (lengths, shuffled)
    ]
    assert grouped[0] == grouped[1]


@settings(max_examples=300)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=60),
    st.integers(60, 200),
    st.integers(1, 80),
)
def test_best_fit_takes_at_most_its_bound(lengths, cap, most):
    sizes, caps = np.array(lengths), Caps(cap, most)
    assert fewest_by_best_fit(sizes, caps) <= most_by_best_fit(sizes, caps)


def test_the_bound_of_best_fit_is_near_the_fewest_if_short_sequences_fill_what_long_ones_leave():
    sizes, cap = (
        np.clip(
            np.random.default_rng(0).lognormal(np.log(1500), 0.9, 1 << 16), 16, 16_384
        ).astype(int),
        32_768,
    )
    fewest = fewest_bins(sizes, cap, len(sizes))
    assert fewest <= most_by_best_fit(sizes, Caps(cap, len(sizes))) <= 1.01 * fewest


def test_v6_full_micro_batches_are_found_and_even():
    # 99.9 % full: neither longest-first nor best-fit-decreasing alone gives even loads in the fewest
    # micro-batches.
    lengths = np.clip(
        np.random.default_rng(0).lognormal(np.log(600), 1, 4096), 16, 8192
    ).astype(int)
    workloads = lengths * (7e4 + lengths.astype(float))
    groups = pack(lengths, 16384, workloads=workloads)
    loads = np.array([workloads[group].sum() for group in groups])
    assert len(groups) == fewest_bins(lengths, 16384, 4096)
    assert loads.max() / loads.mean() <= 1.04


@pytest.mark.parametrize(
    ("lengths", "cap", "options", "error", "words"),
    [
        ([], 10, {}, LengthError, "lengths is empty"),
        ([3, 2.5], 10, {}, LengthError, r"lengths\[1\] is 2.5"),
        ([[1], [2, 3]], 10, {}, LengthError, "not an array"),
        (["a"], 10, {}, LengthError, "Pass whole numbers"),
        ([3, 12], 10, {}, OverCapError, r"lengths\[1\] is 12 tokens, above max_tokens=10"),
        (
            [3, 9],
            10,
            {"length_multiple": 8},
            OverCapError,
            r"9 tokens \(16 after alignment\).*at least 16",
        ),
        ([3], 10, {"min_count": 2}, CountError, "1 sequences cannot fill 2 micro-batches"),
        ([3, 3, 3], 10, {"min_count": 2, "multiple_of": 4}, CountError, "multiple_of=4"),
        ([3, 3], 10, {"workloads": [1]}, WeightError, "workloads holds 1 values for 2"),
        (
            [3, 3],
            10,
            {"workloads": [1, float("nan")]},
            WeightError,
            r"workloads\[1\] is nan",
        ),
        ([3], 10, {"algorithm": "magic"}, OptionError, "algorithm='magic'"),
    ],
)
def test_m2_bad_input_is_named(lengths, cap, options, error, words):
    with pytest.raises(error, match=words) as caught:
        pack(lengths, cap, **options)
    assert isinstance(caught.value, BalancingError)
