"""Plans of sequences that share prefixes."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing import CostModel, Plan, explain, plan_batch, plan_statistics
from balancing.analysis.explain import replan
from balancing.analysis.statistics import lower_bound, predicted_grids, step_time
from balancing.cost_model import SEVEN_BILLION
from balancing.errors import CountError, LengthError, OptionError
from balancing.prefixes.groups import LARGEST, Groups, checked_prefixes, subtrees
from balancing.prefixes.packing import fill_groups
from tests.balancing.test_trees import cells, grown, tree_of
from tests.benchmarks.balancing.shared_prompts import Batch

COSTS = CostModel(1.0, 0.001)
SEVEN_B = CostModel.from_model_config(SEVEN_BILLION)


def planned(lengths, prefixes, size, **arguments) -> Plan:
    """Groups of `size` sequences one after another, each with its prefix."""
    groups = np.repeat(np.arange(len(prefixes)), size)
    arguments = {"cost_model": COSTS, "max_tokens": 2 * int(np.max(lengths))} | arguments
    return plan_batch(
        lengths, prefix_groups=groups, prefix_lengths=np.repeat(prefixes, size), **arguments
    )


def test_a_beginning_is_computed_once_in_a_micro_batch():
    """Prompts of 100 and 50 tokens with two responses each, on one rank."""
    plan = planned([110, 120, 60, 70], [100, 50], 2, ranks=1, max_tokens=1000)
    assert plan.mini_batches[0].steps == 1
    assert plan.shared.tolist() == [0, 100, 0, 50]
    assert plan.sizes.sum() == 110 + 20 + 60 + 20
    alone = COSTS.workload([110, 120, 60, 70]).sum()
    assert plan.predicted_times()[0].sum() == pytest.approx(
        alone - COSTS.workload([100, 50]).sum()
    )
    assert plan_statistics(plan)["shared_tokens"] == pytest.approx(150 / 360)
    assert plan_statistics(plan)["padding_share"] == 0


def test_the_cap_counts_a_beginning_once():
    """Sixteen responses of 10 tokens to a prompt of 900 fit under 1,100 tokens."""
    plan = planned([910] * 16, [900], 16, ranks=1, max_tokens=1100)
    assert plan.mini_batches[0].steps == 1


def test_a_group_is_divided_where_balance_is_worth_more():
    """One group on four ranks: a rank that computes it alone lets three wait."""
    plan = planned([1100] * 16, [100], 16, ranks=4, max_tokens=20_000)
    assert plan.shared.sum() == 12 * 100
    assert [int(load) for load in predicted_grids(plan)[0].sum(axis=0)] == [
        int(4 * COSTS.workload([1100])[0] - 3 * COSTS.workload([100])[0])
    ] * 4


def test_a_group_stays_together_where_that_is_worth_more():
    """Long prompts and short responses, as many groups as ranks."""
    plan = planned([1010] * 64, [1000] * 4, 16, ranks=4, max_tokens=20_000)
    assert plan.shared.sum() == 4 * 15 * 1000


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 2**31),
)
@settings(max_examples=60)
def test_every_micro_batch_keeps_the_cap_and_every_sequence_is_computed_once(
    prefixes, size, ranks, seed
):
    generator = np.random.default_rng(seed)
    lengths = np.repeat(prefixes, size) + generator.integers(1, 300, len(prefixes) * size)
    halves = np.array_split(generator.permutation(len(lengths)), min(2, len(lengths)))
    plan = planned(
        lengths, prefixes, size, ranks=ranks, max_tokens=600, mini_batches=halves
    )
    assert sorted(np.concatenate([part.rows for part in plan.mini_batches])) == list(
        range(len(lengths))
    )
    for part in plan.mini_batches:
        for step in part.micro_steps:
            for rows in step.ranks:
                groups = rows // size
                unique = sum(prefixes[group] for group in set(groups.tolist()))
                tokens = (
                    unique + int(sum(lengths[rows] - np.array(prefixes)[groups]))
                    if len(rows)
                    else 0
                )
                assert tokens == plan.sizes[rows].sum() <= 600
    unshared = plan_batch(
        lengths, ranks=ranks, max_tokens=600, mini_batches=halves, cost_model=COSTS
    )
    assert step_time(predicted_grids(plan)) <= step_time(predicted_grids(unshared)) * (
        1 + 1e-9
    )


@given(st.integers(0, 2**31))
@settings(max_examples=40)
def test_every_count_and_cap_holds_for_what_is_shared(seed):
    """Caps on sequences, counts of micro-batches and multiples, with and without empty micro-batches."""
    generator = np.random.default_rng(seed)
    size, ranks, most = generator.integers(1, 5, 3).tolist()
    prefixes = generator.integers(0, 80, generator.integers(4, 12))
    lengths = np.repeat(prefixes, size) + generator.integers(1, 100, len(prefixes) * size)
    counts = {
        "min_count": int(generator.integers(1, 3)),
        "multiple_of": int(generator.integers(1, 3)),
    }
    empty = bool(generator.random() < 0.5)
    try:
        plan = planned(
            lengths,
            prefixes,
            size,
            ranks=ranks,
            max_sequences=most,
            allow_empty=empty,
            **counts,
        )
    except CountError:
        return
    part = plan.mini_batches[0]
    assert sorted(part.rows) == list(range(len(lengths)))
    sequences = np.diff(part.bounds)
    assert sequences.max() <= most
    assert part.sums(plan.sizes).max() <= plan.max_tokens
    assert part.steps >= counts["min_count"]
    assert part.steps % counts["multiple_of"] == 0
    assert (sequences.reshape(part.steps, ranks).sum(axis=1) > 0).all()
    assert empty or sequences.min() > 0
    assert step_time(predicted_grids(plan)) >= lower_bound(plan) * (1 - 1e-9)


def filled_one_by_one(
    groups: Groups, order, levels, max_tokens: int, max_sequences: int
) -> list[int]:
    """`fill_groups`, which looks at every micro-batch for every part."""
    left_of = [[level, max_tokens, max_sequences] for level in levels]
    found = [-1] * len(groups.own)
    for group in order:
        shared, shared_tokens = groups.shared[group], groups.shared_tokens[group]
        rows, cut_for = list(range(groups.start[group], groups.start[group + 1])), set()
        divisible = len(rows) > 1
        while rows:
            own, tokens = sum(groups.own[rows]), sum(groups.own_tokens[rows])
            whole, parts = [], []
            for place, (load, room, sequences) in enumerate(left_of):
                if (
                    load >= shared + groups.own[rows[-1]]
                    and place not in cut_for
                    and sequences
                ):
                    free, free_tokens = load - shared, room - shared_tokens
                    if free >= own and free_tokens >= tokens and sequences >= len(rows):
                        whole.append((load, place))
                    parts.append((-min(free, free_tokens * (own / tokens)), place))
                    if sequences == max_sequences:
                        break
            taken = rows
            if whole:
                place = min(whole)[1]
            elif divisible and parts and min(parts)[0] < 0:
                place = min(parts)[1]
                cut_for.add(place)
                load, room, sequences = left_of[place]
                taken = max(
                    (
                        cut(
                            groups,
                            rows[start:],
                            load - shared,
                            room - shared_tokens,
                            sequences,
                        )
                        for start in range(8)
                    ),
                    key=lambda part: sum(groups.own[part]),
                )
            else:
                return found
            for row in taken:
                found[row] = place
            rows = [row for row in rows if row not in taken]
            left_of[place][0] -= shared + sum(groups.own[taken])
            left_of[place][1] -= shared_tokens + sum(groups.own_tokens[taken])
            left_of[place][2] -= len(taken)
    return found


def cut(groups: Groups, rows, load, tokens, sequences) -> list[int]:
    taken: list[int] = []
    for row in rows:
        fits = (
            sum(groups.own[[*taken, row]]) <= load
            and sum(groups.own_tokens[[*taken, row]]) <= tokens
        )
        if fits and len(taken) < sequences:
            taken.append(row)
    return taken


@given(st.integers(0, 2**31))
@settings(max_examples=150)
def test_groups_fill_the_micro_batches_that_a_search_of_all_finds(seed):
    """Whole numbers as work, so that no rounding differs, and many equal ones."""
    generator = np.random.default_rng(seed)
    counts = generator.integers(1, 7, generator.integers(1, 30))
    own_tokens = generator.integers(1, generator.choice([4, 60]), counts.sum())
    group = np.repeat(np.arange(len(counts)), counts)
    rows = np.lexsort((-own_tokens, group))
    shared_tokens = generator.integers(0, generator.choice([2, 40]), len(counts))
    own_tokens, own = own_tokens[rows], own_tokens[rows] * (20.0 + own_tokens[rows])
    shared = shared_tokens * (20.0 + shared_tokens)
    groups = Groups(
        own, own_tokens, group, np.append(0, np.cumsum(counts)), shared, shared_tokens
    )
    least = float((own + shared[group]).max())
    levels = -np.sort(-np.rint(least * generator.uniform(1, 4, generator.integers(1, 40))))
    max_tokens, most = int(generator.integers(100, 300)), int(generator.choice([3, 1000]))
    order = generator.permutation(len(counts))
    expected = filled_one_by_one(groups, order, levels, max_tokens, most)
    assert fill_groups(groups, order, levels, max_tokens, most).tolist() == expected


@given(st.integers(0, 2**31), st.integers(10, 300), st.integers(10, 300))
@settings(max_examples=60)
def test_a_subtree_keeps_its_share_of_the_cap_and_of_a_ranks_work(
    seed, max_tokens, of_a_rank
):
    """Unless it is one sequence. Work is in tokens, so that no sum rounds."""
    sequences = grown(seed, 3, 6)
    sizes = np.array([len(sequence) for sequence in sequences])
    prefixes = checked_prefixes(
        *tree_of(sequences, 3).values(), sizes, 1, lambda tokens: tokens.astype(np.float64)
    )
    for division in subtrees(
        sizes, sizes.astype(np.float64), prefixes, max_tokens, float(of_a_rank)
    ):
        for number, size in enumerate(division.sizes):
            rows = np.flatnonzero(division.of == number)
            assert (
                size == division.weights[number] == cells([sequences[row] for row in rows])
            )
            assert len(rows) == 1 or size <= min(max_tokens, of_a_rank) * LARGEST[0]


@pytest.mark.parametrize(
    ("max_tokens", "of_a_rank", "count"), [(0, 0, 1), (-1, 0, 2), (0, -1, 2)]
)
def test_a_tree_of_exactly_the_cap_is_not_divided(max_tokens, of_a_rank, count):
    sequences = [[1000, 1, 2, 3], [1000, 1, 2, 4], [1000, 1, 5, 6], [1000, 1, 5, 7]]
    sizes = np.full(4, 4)
    prefixes = checked_prefixes(
        *tree_of(sequences, 1).values(), sizes, 1, lambda tokens: tokens.astype(np.float64)
    )
    whole = cells(sequences) / LARGEST[0]
    division = next(
        subtrees(
            sizes, sizes.astype(np.float64), prefixes, whole + max_tokens, whole + of_a_rank
        )
    )
    assert len(division.sizes) == count


def test_a_group_is_cut_where_a_micro_batch_is_full():
    """Three groups of 50 tokens on two ranks: one of them is divided, so that no rank computes two whole
    ones.
    """
    plan = planned([20] * 12, [10] * 3, 4, ranks=2, max_tokens=100)
    assert plan.mini_batches[0].steps == 1
    assert plan.shared.sum() == (12 - 4) * 10


def test_the_same_plan_for_every_order_of_the_sequences():
    lengths, prefixes = np.arange(60, 140), np.repeat(np.arange(10, 50, 2), 4)
    order = np.random.default_rng(0).permutation(80)
    plan = planned(lengths, prefixes[::4], 4, ranks=4, max_tokens=400)
    other = plan_batch(
        lengths[order],
        ranks=4,
        max_tokens=400,
        cost_model=COSTS,
        prefix_groups=np.repeat(np.arange(20), 4)[order],
        prefix_lengths=prefixes[order],
    )
    assert step_time(predicted_grids(other)) == pytest.approx(
        step_time(predicted_grids(plan))
    )


def test_512_groups_of_16_on_64_ranks_end_near_the_bound():
    generator = np.random.default_rng(0)
    prefixes = generator.integers(16, 2049, 512)
    own = np.clip(np.rint(generator.lognormal(np.log(600), 1.0, 8192)), 1, 8192).astype(
        np.int64
    )
    lengths = own + np.repeat(prefixes, 16)
    plan = planned(
        lengths,
        prefixes,
        16,
        ranks=64,
        max_tokens=4 * int(lengths.max()),
        cost_model=SEVEN_B,
    )
    assert plan_statistics(plan)["over_bound"] <= 0.015
    assert plan.mini_batches[0].sums(plan.sizes).max() <= plan.max_tokens


@pytest.mark.parametrize(
    ("responses", "prompts", "most"),
    [
        ("geometric", (256, 2048), 0.0125),
        ("lognormal", (256, 2048), 0.0155),
        ("short", (16, 256), 0.0145),
    ],
)
def test_512_groups_that_are_about_as_heavy_as_a_micro_batch_end_near_the_bound(
    responses, prompts, most
):
    plan = Batch.draw(responses, prompts, "1", cap=2.0).plan()
    assert 440 < plan.mini_batches[0].steps * plan.ranks <= 512
    assert plan_statistics(plan)["over_bound"] <= most
    assert plan.mini_batches[0].sums(plan.sizes).max() <= plan.max_tokens


def test_without_numba_the_plan_of_shared_prompts_is_the_same():
    """About as many micro-batches as groups, so that groups are cut."""
    script = """
import numpy as np
from tests.balancing.prefixes.test_packing import planned

generator = np.random.default_rng(0)
prefixes = generator.integers(256, 2048, 32)
lengths = np.repeat(prefixes, 8) + generator.integers(16, 2500, 256)
part = planned(lengths, prefixes, 8, ranks=4).mini_batches[0]
print(part.micro_batch_of_rows().tolist())
"""
    plans = [
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"NUMBA_DISABLE_JIT": disabled},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for disabled in "01"
    ]
    assert plans[0] == plans[1] != ""


def test_replanning_and_explaining_know_what_is_shared():
    plan = planned([110, 120, 60, 70] * 8, [50] * 16, 2, ranks=2, max_tokens=300)
    assert replan(plan, {}).shared.tolist() == plan.shared.tolist()
    over_bound = plan_statistics(plan)["over_bound"]
    assert f"{over_bound:.2%} longer than a lower bound for as many micro-steps" in explain(
        plan
    )


def test_algorithms_that_plan_without_beginnings_still_compute_them_once():
    plan = planned(
        [110, 120, 60, 70], [100, 50], 2, ranks=1, max_tokens=1000, algorithm="none"
    )
    assert plan.shared.tolist() == [0, 100, 0, 50]


def test_of_a_beginning_whole_multiples_of_the_alignment_count():
    plan = planned(
        [110, 120, 60, 70], [99, 50], 2, ranks=1, max_tokens=1000, length_multiple=8
    )
    assert plan.shared.tolist() == [0, 96, 0, 48]
    assert plan.sizes.tolist() == [112, 24, 64, 24]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"prefix_lengths": None}, OptionError, "go together"),
        ({"layout": "padded"}, OptionError, "layout='packed'"),
        ({"prefix_lengths": [4, 4]}, LengthError, "not below"),
        ({"prefix_lengths": [3, 2]}, LengthError, "A group has one"),
    ],
)
def test_contradictions_are_refused(arguments, error, text):
    given_arguments = {
        "prefix_groups": [0, 0],
        "prefix_lengths": [3, 3],
        "ranks": 1,
        "max_tokens": 100,
    } | arguments
    with pytest.raises(error, match=text):
        plan_batch([4, 5], **given_arguments)
