import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing.grouping import Integers
from balancing.shared_exchange import PARTNERS, exchange_shared
from balancing.shared_filling import Groups
from balancing.shared_loads import filled_by
from balancing.shared_swaps import best_swap


def random_groups(seed: int) -> tuple[Groups, Integers, int]:
    """Groups, the micro-batch of each sequence, and the number of micro-batches, none of them empty."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 4, generator.integers(2, 8))
    group, count = np.repeat(np.arange(len(sizes)), sizes), int(generator.integers(2, len(sizes) + 1))
    tokens = generator.integers(1, 20, len(group))
    shared = generator.integers(0, 30, len(sizes))
    start = np.concatenate([[0], np.cumsum(sizes)])
    micro_batch_of = np.concatenate([np.arange(count), generator.integers(0, count, len(group) - count)])
    own_work, shared_work = tokens * generator.uniform(1, 2), shared.astype(float)
    return Groups(own_work, tokens, group, start, shared_work, shared), generator.permutation(micro_batch_of), count


def sums(groups: Groups, micro_batch_of: Integers, count: int) -> tuple[list[float], list[int], list[int]]:
    """The workload, tokens and sequences of each micro-batch, by definition."""
    members = [np.flatnonzero(micro_batch_of == place) for place in range(count)]
    present = [np.unique(groups.group[rows]) for rows in members]
    return (
        [groups.own[rows].sum() + groups.shared[of].sum() for rows, of in zip(members, present, strict=True)],
        [
            int(groups.own_tokens[rows].sum() + groups.shared_tokens[of].sum())
            for rows, of in zip(members, present, strict=True)
        ],
        [len(rows) for rows in members],
    )


@given(st.integers(0, 2**31), st.integers(40, 200), st.integers(1, 8))
@settings(deadline=None, max_examples=150)
def test_the_best_swap_is_that_of_all_swaps_of_whole_groups(seed, max_tokens, max_sequences):
    groups, before, count = random_groups(seed)
    levels = np.full(count, 50.0)
    loads = np.array(sums(groups, before, count)[0])
    heavy = int(np.argmax(loads - levels))
    of_heavy = np.unique(groups.group[before == heavy])
    related = np.array([bool(np.isin(groups.group[before == place], of_heavy).any()) for place in range(count)])
    found = best_swap(
        groups,
        filled_by(groups, before, count),
        heavy,
        related,
        levels,
        loads[heavy] - levels[heavy],
        max_tokens,
        max_sequences,
    )
    best = loads[heavy] - levels[heavy]
    for light in np.flatnonzero(~related):
        for given_group in of_heavy:
            for returned in (-1, *np.unique(groups.group[before == light])):
                after = before.copy()
                after[(before == heavy) & (groups.group == given_group)] = light
                after[(before == light) & (groups.group == returned)] = heavy
                work, tokens, sequences = sums(groups, after, count)
                both = [heavy, int(light)]
                if all(tokens[place] <= max_tokens and 1 <= sequences[place] <= max_sequences for place in both):
                    best = min(best, max(work[place] - levels[place] for place in both))
                if (light, given_group, returned) == (found.light, found.given, found.returned):
                    np.testing.assert_allclose(max(work[place] - levels[place] for place in both), found.higher)
    np.testing.assert_allclose(found.higher, best)
    assert (found.light >= 0) == bool(best < loads[heavy] - levels[heavy])


def test_groups_trade_places_with_a_micro_batch_that_is_not_among_the_lightest():
    """The first micro-batch is one above its level; the last has a group that is lighter by one, and room."""
    light = PARTNERS + 2
    own = np.array([6.0, 5.0, *[9.0] * light, 5.0, 4.0])
    count = light + 2
    groups = Groups(
        own,
        np.ones(len(own), np.int64),
        np.arange(len(own)),
        np.arange(len(own) + 1),
        np.zeros(len(own)),
        np.zeros(len(own), np.int64),
    )
    before = np.array([0, 0, *range(1, light + 1), light + 1, light + 1])
    levels = np.array([10.0, *[10.5] * light, 10.0])  # those between are lighter for their levels, and of no help
    after, _ = exchange_shared(groups, before, levels, 100, 100, 10_000)
    loads = np.bincount(after, own, count)
    assert (loads <= levels).all()
    assert sorted(np.bincount(after)) == sorted(np.bincount(before))
