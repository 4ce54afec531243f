"""Re-dealing whole groups between mini-batches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing import CostModel, plan_batch
from balancing.errors import CountError, LengthError
from balancing.redeal import redealt


def split(sequences, count):
    return np.array_split(np.random.default_rng(sequences).permutation(sequences), count)


@st.composite
def batches(draw):
    groups = draw(st.lists(st.integers(0, 12), min_size=4, max_size=60))
    count = draw(st.integers(1, min(4, len(set(groups)))))
    workloads = draw(st.lists(st.integers(1, 1000), min_size=len(groups), max_size=len(groups)))
    return groups, split(len(groups), count), np.array(workloads, float)


@settings(max_examples=200, deadline=None)
@given(batches())
def test_groups_stay_whole_and_counts_stay_as_equal(batch):
    groups, members, workloads = batch
    dealt = redealt(members, groups, workloads)
    assert sorted(np.concatenate(dealt)) == list(range(len(groups)))
    where = {index: number for number, rows in enumerate(dealt) for index in rows.tolist()}
    for group in set(groups):
        assert len({where[index] for index, own in enumerate(groups) if own == group}) == 1
    counts = [len(rows) for rows in dealt]
    given_counts = [len(rows) for rows in members]
    largest = max(groups.count(group) for group in set(groups))
    assert max(counts) - min(counts) <= max(max(given_counts) - min(given_counts), largest)
    assert min(counts) >= 1
    assert [rows.tolist() for rows in dealt] == [rows.tolist() for rows in redealt(members, groups, workloads)]


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(8)))
def test_names_of_groups_do_not_matter(names):
    workloads = np.random.default_rng(1).random(64)
    groups = np.repeat(np.arange(8), 8)
    loads = [sorted(workloads[rows].sum() for rows in redealt(split(64, 4), own, workloads))
             for own in (groups, np.array(names)[groups])]  # fmt: skip
    assert loads[0] == pytest.approx(loads[1])


def test_mini_batches_weigh_the_same_afterwards():
    workloads = np.random.default_rng(0).lognormal(0, 1, 1024)
    groups = np.arange(1024) // 8
    members = np.array_split(np.argsort(workloads), 4)
    dealt = redealt(members, groups, workloads)
    loads = np.array([workloads[rows].sum() for rows in dealt])
    assert [len(rows) for rows in dealt] == [256] * 4
    assert loads.max() / loads.mean() < 1 + 1e-4


def test_p10_membership_is_kept_unless_re_dealing_is_asked_for():
    lengths = np.repeat([100, 10], 8)
    members = [np.arange(8), np.arange(8, 16)]
    arguments = {"ranks": 2, "mini_batches": members, "max_tokens": 400, "cost_model": CostModel(1.0, 0.0)}
    kept = plan_batch(lengths, **arguments)
    assert [sorted(m.rows.tolist()) for m in kept.mini_batches] == [m.tolist() for m in members]
    moved = plan_batch(lengths, **arguments, redeal_groups=np.arange(16) // 2)
    assert [m.tokens for m in moved.mini_batches] == [440, 440]
    assert [m.sequences for m in moved.mini_batches] == [8, 8]


@pytest.mark.parametrize(
    ("groups", "error", "words"),
    [
        ([0, 1, 2], LengthError, "redeal_groups holds 3 values for 4 lengths"),
        ([0, 1, 2, -1], LengthError, r"redeal_groups\[3\] is -1"),
        ([0, 1, 2, 0.5], LengthError, r"redeal_groups\[3\] is 0.5"),
        ([7, 7, 7, 7], CountError, "redeal_groups names 1 groups for 2 mini_batches"),
    ],
)
def test_nonsense_is_refused(groups, error, words):
    with pytest.raises(error, match=words):
        plan_batch([5, 6, 7, 8], ranks=1, mini_batches=[[0, 1], [2, 3]], max_tokens=20, redeal_groups=groups)
