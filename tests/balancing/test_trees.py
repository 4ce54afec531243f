"""Sequences that share more than their group's prefix: what a micro-batch computes of them, and plans that
know it.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing import CostModel, plan_batch
from balancing.analysis.statistics import lower_bound, predicted_grids, step_time
from balancing.errors import LengthError, OptionError
from balancing.plan import Plan

COSTS = CostModel(1.0, 0.01)


def common(one: list[int], other: list[int]) -> int:
    """The tokens with which both begin, fewer than either has."""
    equal = [a == b for a, b in zip(one, other, strict=False)]
    return min(
        equal.index(False) if False in equal else len(equal), len(one) - 1, len(other) - 1
    )


def cells(sequences: list[list[int]]) -> int:
    """The nodes of their tree, by definition: prefixes that are different; each sequence has its last token
    alone.
    """
    nodes = {
        tuple(sequence[: place + 1])
        for sequence in sequences
        for place in range(len(sequence) - 1)
    }
    return len(nodes) + len(sequences)


def grown(seed: int, groups: int, size: int) -> list[list[int]]:
    """Sequences of groups, each group with its prompt, which continue one another up to some token."""
    rng = np.random.default_rng(seed)
    found = []
    for group in range(groups):
        prompt = [1000 + group] * int(rng.integers(1, 40))
        of_group = [[*prompt, *rng.integers(0, 3, rng.integers(1, 60)).tolist()]]
        for _ in range(size - 1):
            before = of_group[rng.integers(len(of_group))]
            kept = before[: rng.integers(len(prompt), len(before) + 1)]
            of_group.append([*kept, *rng.integers(0, 3, rng.integers(0, 30)).tolist(), 7])
        found += of_group
    return found


def tree_of(sequences: list[list[int]], groups: int) -> dict[str, np.ndarray]:
    """Arguments of `plan_batch`."""
    size = len(sequences) // groups
    ranked = sorted(range(len(sequences)), key=lambda row: (row // size, sequences[row]))
    order = np.empty(len(sequences), np.int64)
    order[ranked] = np.arange(len(sequences))
    depths = np.zeros(len(sequences), np.int64)
    for before, row in itertools.pairwise(ranked):
        depths[row] = common(sequences[before], sequences[row])
    prompts = np.array([sum(token >= 1000 for token in sequence) for sequence in sequences])
    return {
        "prefix_groups": np.arange(len(sequences)) // size,
        "prefix_lengths": prompts,
        "tree_order": order,
        "tree_depths": depths,
    }


def micro_batches(plan: Plan) -> list[np.ndarray]:
    return [
        rows
        for part in plan.mini_batches
        for step in part.micro_steps
        for rows in step.ranks
    ]


@given(
    st.integers(0, 2**31),
    st.integers(1, 6),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 3),
)
@settings(max_examples=150)
def test_a_plan_counts_the_tokens_of_a_micro_batchs_tree(
    seed, groups, size, ranks, mini_batches
):
    sequences = grown(seed, groups, size)
    rows = np.random.default_rng(seed).permutation(len(sequences))
    parts = [part for part in np.array_split(rows, mini_batches) if len(part)]
    plan = plan_batch(
        [len(sequence) for sequence in sequences],
        ranks=ranks,
        mini_batches=parts,
        max_tokens=240,
        cost_model=COSTS,
        **tree_of(sequences, groups),
    )
    assert sorted(np.concatenate(micro_batches(plan))) == list(range(len(sequences)))
    for rows in micro_batches(plan):
        counted = int(plan.computed_lengths[rows].sum())
        assert counted == cells([sequences[row] for row in rows])
        assert counted <= 240
    assert step_time(predicted_grids(plan)) >= lower_bound(plan) * (1 - 1e-9)


def alike(groups: int, size: int) -> tuple[list[int], dict[str, np.ndarray]]:
    """Groups with prompts of 20 tokens, and responses of 80 that begin alike for 0 (first half of each group)
    or 60.
    """
    rows = np.arange(groups * size)
    depths = np.where(rows % size > size // 2, 80, 20)
    return [100] * len(rows), {
        "prefix_groups": rows // size,
        "prefix_lengths": np.full(len(rows), 20),
        "tree_order": rows,
        "tree_depths": depths,
    }


def test_a_plan_that_knows_responses_computes_each_token_once_on_even_ranks():
    lengths, tree = alike(16, 8)
    prompts = {name: tree[name] for name in ("prefix_groups", "prefix_lengths")}
    known = plan_batch(lengths, ranks=2, max_tokens=800, **tree)
    unknown = plan_batch(lengths, ranks=2, max_tokens=800, **prompts)
    # 16 groups of a prompt, 5 responses alone and 3 after 60 tokens that one of the 5 has
    assert known.computed_lengths.sum() == 16 * (20 + 5 * 80 + 3 * 20)
    assert unknown.computed_lengths.sum() >= 16 * (20 + 8 * 80)
    assert step_time(predicted_grids(known)) == 16 * 480 / 2


def test_few_sequences_on_many_ranks_are_not_kept_together():
    """Eight equal sequences on eight ranks: one each, though together they would have few tokens."""
    tree = {
        "prefix_groups": [0] * 8,
        "prefix_lengths": [10] * 8,
        "tree_order": range(8),
        "tree_depths": [99] * 8,
    }
    plan = plan_batch([100] * 8, ranks=8, max_tokens=1000, **tree)
    assert [len(rows) for rows in micro_batches(plan)] == [1] * 8


def test_a_cap_on_sequences_holds():
    lengths, tree = alike(4, 8)
    plan = plan_batch(lengths, ranks=2, max_tokens=800, max_sequences=3, **tree)
    assert max(len(rows) for rows in micro_batches(plan)) <= 3


def test_of_depths_whole_multiples_count():
    tree = {
        "prefix_groups": [0, 0],
        "prefix_lengths": [10, 10],
        "tree_order": [0, 1],
        "tree_depths": [0, 31],
    }
    plan = plan_batch([40, 40], ranks=1, max_tokens=100, length_multiple=8, **tree)
    assert plan.shared.tolist() == [0, 24]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tree_depths": None}, OptionError, "tree_order and tree_depths go together"),
        (
            {"prefix_groups": None, "prefix_lengths": None},
            OptionError,
            "Pass prefix_groups and prefix_lengths, too",
        ),
        (
            {"tree_depths": [0, 4]},
            LengthError,
            r"tree_depths\[1\] is 4, not below lengths\[1\]=4",
        ),
        ({"tree_order": [0]}, LengthError, "tree_order holds 1 values for 2 lengths"),
    ],
)
def test_trees_that_cannot_be_are_refused(arguments, error, message):
    tree = {
        "prefix_groups": [0, 0],
        "prefix_lengths": [1, 1],
        "tree_order": [0, 1],
        "tree_depths": [0, 2],
    }
    with pytest.raises(error, match=message):
        plan_batch([4, 4], ranks=1, max_tokens=100, **tree | arguments)
