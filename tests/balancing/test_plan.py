"""The plan of a global batch: its invariants over random batches, what workers receive, what it buys."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing import BalancingError, CostModel, Plan, plan_batch, plan_statistics
from balancing.analysis.distributions import DEFAULT_CAP
from balancing.errors import (
    CountError,
    LengthError,
    MiniBatchError,
    OptionError,
    OverCapError,
)
from balancing.search.exchange import MANY
from balancing.search.schedule import ENOUGH_OF_MANY
from tests.benchmarks.balancing.plans import COST_MODEL, Batch

QUADRATIC = CostModel(1000.0, 1.0)
SEVEN_BILLION = CostModel(4.2e10, 6e5)


def lognormal(n, seed=0):
    return np.clip(
        np.random.default_rng(seed).lognormal(np.log(600), 1, n), 16, 8192
    ).astype(int)


def shuffled_mini_batches(n, count, seed=0):
    return np.array_split(np.random.default_rng(seed).permutation(n), count)


def as_lists(plan: Plan):
    return [
        [[rows.tolist() for rows in s.ranks] for s in m.micro_steps]
        for m in plan.mini_batches
    ]


def tokens_of(sizes, layout):
    return (
        0
        if len(sizes) == 0
        else int(len(sizes) * sizes.max() if layout == "padded" else sizes.sum())
    )


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(1, 200), min_size=1, max_size=60))
    mini_batches = draw(st.integers(1, min(4, len(lengths))))
    order = draw(st.permutations(range(len(lengths))))
    multiple = draw(st.sampled_from([1, 1, 8]))
    options = {
        "ranks": draw(st.integers(1, 6)),
        "mini_batches": [np.array(part) for part in np.array_split(order, mini_batches)],
        "max_tokens": draw(st.integers(200, 900)),
        "max_sequences": draw(st.none() | st.integers(1, 6)),
        "min_count": draw(st.integers(1, 3)),
        "multiple_of": draw(st.integers(1, 3)),
        "algorithm": draw(
            st.sampled_from(
                ["karmarkar_karp"] * 4 + ["none", "verl", "roll", "mindspeed_rl"]
            )
        ),
        "order": draw(st.sampled_from(["descending", "small_ends"])),
        "layout": draw(st.sampled_from(["packed", "packed", "padded"])),
        "length_multiple": multiple,
        "allow_empty": draw(st.booleans()),
        "cost_model": draw(st.sampled_from([None, QUADRATIC, CostModel(0.0, 1.0)])),
    }
    return lengths, options


@settings(max_examples=300)
@given(batches())
def test_v2_v6_p10_m6_every_invariant_holds_or_is_refused(batch):
    lengths, options = batch
    try:
        plan = plan_batch(lengths, **options)
    except CountError:
        rounded = (
            -(-options["min_count"] // options["multiple_of"]) * options["multiple_of"]
        )
        smallest = min(len(m) for m in options["mini_batches"])
        assert (
            not options["allow_empty"] or options["multiple_of"] > 1 or rounded > smallest
        )
        return
    sizes = -(-np.array(lengths) // options["length_multiple"]) * options["length_multiple"]
    for given_rows, mini_batch in zip(
        options["mini_batches"], plan.mini_batches, strict=True
    ):
        parts = [rows for step in mini_batch.micro_steps for rows in step.ranks]
        assert sorted(np.concatenate(parts)) == sorted(given_rows)
        assert all(rows.dtype == np.int64 and (np.diff(rows) > 0).all() for rows in parts)
        assert all(
            tokens_of(sizes[rows], options["layout"]) <= options["max_tokens"]
            for rows in parts
        )
        assert all(
            len(rows) <= (options["max_sequences"] or len(lengths)) for rows in parts
        )
        steps = len(mini_batch.micro_steps)
        assert steps >= options["min_count"]
        assert steps % options["multiple_of"] == 0
        assert all(len(step.ranks) == options["ranks"] for step in mini_batch.micro_steps)
        assert all(any(len(rows) for rows in step.ranks) for step in mini_batch.micro_steps)
        if not options["allow_empty"]:
            assert all(len(rows) for rows in parts)
        assert mini_batch.tokens == np.array(lengths)[given_rows].sum()
        assert mini_batch.sequences == len(given_rows)
    assert as_lists(plan_batch(lengths, **options)) == as_lists(plan)


@settings(max_examples=100)
@given(batches())
def test_v9_a_ranks_rows_and_cuts_restore_the_given_order(batch):
    lengths, options = batch
    plan = plan_batch(
        lengths, **{**options, "allow_empty": True, "min_count": 1, "multiple_of": 1}
    )
    result = np.zeros(len(lengths), np.int64)
    for rank in range(plan.ranks):
        part = plan.for_rank(rank)
        result[part.rows] = np.array(lengths)[part.rows]
        cuts = [cut for mini_batch in part.mini_batches for cut in mini_batch.micro_batches]
        assert [cuts[0][0], *(stop for _, stop in cuts)] == [
            0,
            *(start for start, _ in cuts[1:]),
            len(part.rows),
        ]
        for mini_batch, whole in zip(part.mini_batches, plan.mini_batches, strict=True):
            for (start, stop), step in zip(
                mini_batch.micro_batches, whole.micro_steps, strict=True
            ):
                assert part.rows[start:stop].tolist() == step.ranks[rank].tolist()
    assert result.tolist() == lengths


def test_p1_normalisers_do_not_depend_on_the_plan():
    lengths, responses = lognormal(64), lognormal(64) // 2
    mini_batches = shuffled_mini_batches(64, 3)
    expected = [(responses[m].sum(), lengths[m].sum(), len(m)) for m in mini_batches]
    for ranks, cap, algorithm in [
        (1, 8192, "none"),
        (2, 8192, "karmarkar_karp"),
        (5, 16384, "karmarkar_karp"),
    ]:
        plan = plan_batch(
            lengths,
            ranks=ranks,
            mini_batches=mini_batches,
            max_tokens=cap,
            loss_tokens=responses,
            algorithm=algorithm,
        )
        for rank in range(ranks):
            parts = plan.for_rank(rank).mini_batches
            assert [(m.loss_tokens, m.tokens, m.sequences) for m in parts] == expected


def test_v6_the_number_of_micro_steps_is_the_least_that_fits():
    # 16 of 3 at cap 9: three to a micro-batch, six micro-batches, two ranks, three steps.
    plan = plan_batch([3] * 16, ranks=2, max_tokens=9)
    assert plan.mini_batches[0].steps == 3


def test_thirds_of_the_cap_go_together_three_by_three():
    lengths = np.random.default_rng(0).integers(297, 304, 96)
    plan = plan_batch(lengths, ranks=4, max_tokens=906)
    assert plan.mini_batches[0].steps == 8


def test_fewer_sequences_than_ranks_are_solved_with_empty_micro_batches():
    plan = plan_batch([5, 9], ranks=4, mini_batches=[[0, 1]], max_tokens=10)
    (step,) = plan.mini_batches[0].micro_steps
    assert sorted(rows.tolist() for rows in step.ranks) == [[], [], [0], [1]]
    assert sum(len(plan.for_rank(rank).rows) for rank in range(4)) == 2
    assert plan_statistics(plan)["empty_micro_batches"] == 2


def test_p11_algorithm_none_keeps_the_given_order():
    plan = plan_batch(
        [4, 4, 4, 4, 4, 4], ranks=2, mini_batches=[range(6)], max_tokens=8, algorithm="none"
    )
    assert as_lists(plan) == [[[[0, 1], [3, 4]], [[2], [5]]]]


def step_loads(plan):
    return [
        [max(plan.workloads[rows].sum() for rows in step.ranks) for step in m.micro_steps]
        for m in plan.mini_batches
    ]


def test_v8_micro_steps_descend_or_are_small_at_the_ends():
    batch = np.concatenate([lognormal(40), np.full(6, 8192)])
    arguments = {"ranks": 2, "max_tokens": 8192, "cost_model": QUADRATIC}
    (descending,) = step_loads(plan_batch(batch, **arguments))
    assert descending == sorted(descending, reverse=True)
    (both_ends,) = step_loads(plan_batch(batch, order="small_ends", **arguments))
    assert sorted(both_ends) == sorted(descending)
    peak = int(np.argmax(both_ends))
    assert both_ends[: peak + 1] == sorted(both_ends[: peak + 1])
    assert both_ends[peak:] == sorted(both_ends[peak:], reverse=True)


def test_v10_what_runs_together_weighs_the_same():
    lengths = lognormal(1024)
    plan = plan_batch(
        lengths,
        ranks=8,
        mini_batches=shuffled_mini_batches(1024, 4),
        max_tokens=16384,
        cost_model=SEVEN_BILLION,
    )
    statistics = plan_statistics(plan)
    assert statistics["imbalance/micro_steps"] < 1e-3
    assert statistics["imbalance_before/micro_steps"] > 0.1


@settings(max_examples=50)
@given(st.permutations(range(40)))
def test_the_order_of_a_mini_batch_changes_nothing(order):
    arguments = {
        "lengths": lognormal(40),
        "ranks": 3,
        "max_tokens": 9000,
        "cost_model": QUADRATIC,
    }
    assert as_lists(plan_batch(mini_batches=[order], **arguments)) == as_lists(
        plan_batch(**arguments)
    )


@settings(max_examples=30)
@given(
    st.permutations(range(60)),
    st.sampled_from(["packed", "padded"]),
    st.sampled_from(["karmarkar_karp", "verl", "roll", "mindspeed_rl"]),
)
def test_the_order_of_lengths_changes_nothing_but_indices(order, layout, algorithm):
    lengths = np.unique(lognormal(90))[:60]
    arguments = {
        "ranks": 3,
        "max_tokens": 9000,
        "cost_model": QUADRATIC,
        "layout": layout,
        "algorithm": algorithm,
    }

    def computed(own):
        (mini_batch,) = plan_batch(own, **arguments).mini_batches
        return [
            [sorted(own[rows].tolist()) for rows in step.ranks]
            for step in mini_batch.micro_steps
        ]

    assert computed(lengths) == computed(lengths[np.array(order)])


def test_p8_giants_run_together_and_do_not_hold_up_the_rest():
    # Four giants on four ranks: one step for them; dealt apart they would make every step as long as a giant.
    lengths = [8000] * 4 + [500] * 48
    plan = plan_batch(lengths, ranks=4, max_tokens=8000, cost_model=CostModel(0.0, 1.0))
    steps = plan.mini_batches[0].micro_steps
    giants = [sum(int((rows < 4).sum()) for rows in step.ranks) for step in steps]
    assert sorted(giants) == [0] * (len(giants) - 1) + [4]
    assert plan_statistics(plan)["imbalance/micro_steps"] < 1e-3


def test_long_sequences_share_micro_batches_rather_than_hold_every_step_up():
    # Twelve of half the cap on four ranks: six pairs would leave ranks waiting in two steps; one step of four
    # pairs and one of four with company leave none.
    lengths = [1000] * 12 + [10] * 400
    plan = plan_batch(lengths, ranks=4, max_tokens=2000, cost_model=CostModel(0.0, 1.0))
    loads = plan.mini_batches[0].sums(plan.workloads)
    assert loads.max(axis=1).sum() / loads.mean(axis=1).sum() < 1.01


@pytest.mark.parametrize(
    ("lengths", "options", "expected"),
    [
        (
            [4, 4, 3, 1],
            {"ranks": 2, "max_tokens": 4, "cost_model": CostModel(1.0, 1.0)},
            [20.0, 12.0],
        ),
        ([4, 1, 1, 1], {"ranks": 1, "max_tokens": 16, "layout": "padded"}, [16.0]),
    ],
)
def test_predicted_times_are_those_of_the_slowest_rank_and_the_longest_row(
    lengths, options, expected
):
    assert [
        times.tolist() for times in plan_batch(lengths, **options).predicted_times()
    ] == [expected]


def test_v3_statistics_of_a_small_batch_counted_by_hand():
    plan = plan_batch([10, 10, 2, 2], ranks=2, mini_batches=[range(4)], max_tokens=20)
    statistics = plan_statistics(plan)
    assert all(type(value) is float for value in statistics.values())
    for name, expected in (
        ("tokens_per_rank", [12, 12, 12, 0]),
        ("tokens_per_rank_before", [4, 20, 12, 16]),
    ):
        keys = ("min", "max", "mean", "difference")
        assert [statistics[f"{name}/{key}"] for key in keys] == expected
    assert (
        statistics["imbalance/ranks"]
        == statistics["imbalance/micro_steps"]
        == statistics["idle_share"]
        == 0
    )
    assert (
        statistics["imbalance_before/ranks"]
        == statistics["imbalance_before/micro_steps"]
        == pytest.approx(20 / 12 - 1)
    )
    assert statistics["idle_share_before"] == pytest.approx(1 - 12 / 20)
    assert statistics["cap_fill"] == pytest.approx(12 / 20)
    assert (statistics["micro_batches"], statistics["padding_share"]) == (1, 0)


def test_a_plan_is_small_to_send():
    lengths = lognormal(2048)
    plan = plan_batch(
        lengths, ranks=8, mini_batches=shuffled_mini_batches(2048, 4), max_tokens=16384
    )
    sent = pickle.dumps(plan, protocol=5)
    assert len(sent) < 24 * len(lengths) + 4000  # indices, lengths, workloads
    received = pickle.loads(sent)
    assert as_lists(received) == as_lists(plan)
    assert received.settings == plan.settings
    part = plan.for_rank(3)
    assert len(pickle.dumps(part, protocol=5)) < 8 * len(part.rows) + 2000


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"lengths": []}, LengthError, "lengths is empty"),
        ({"lengths": [3, 0, 3]}, LengthError, r"lengths\[1\] is 0"),
        (
            {"lengths": [3, 3, 11]},
            OverCapError,
            r"lengths\[2\] is 11 tokens, above max_tokens=10",
        ),
        ({"ranks": 0}, OptionError, "ranks=0"),
        ({"max_tokens": 9.5}, OptionError, "max_tokens=9.5"),
        ({"max_tokens": True}, OptionError, "max_tokens=True"),
        ({"lengths": [3, float("nan"), 3]}, LengthError, r"lengths\[1\] is nan"),
        ({"lengths": [[3, 3], [3, 3]]}, LengthError, "lengths has 2 dimensions"),
        ({"max_sequences": 0}, OptionError, "max_sequences=0"),
        ({"min_count": 0}, OptionError, "min_count=0"),
        (
            {"min_count": 4},
            CountError,
            "3 sequences cannot fill 4 micro-batches .*min_count=4",
        ),
        (
            {"ranks": 4, "allow_empty": False},
            CountError,
            "3 sequences cannot fill 1 micro-batches on each of 4 ranks",
        ),
        ({"multiple_of": 0}, OptionError, "multiple_of=0"),
        (
            {"multiple_of": 4},
            CountError,
            "3 sequences cannot fill 4 micro-batches .*multiple_of=4",
        ),
        ({"length_multiple": -1}, OptionError, "length_multiple=-1"),
        (
            {"length_multiple": 11},
            OverCapError,
            r"3 tokens \(11 after alignment\), above max_tokens=10",
        ),
        ({"layout": "ragged"}, OptionError, "layout='ragged'"),
        ({"algorithm": "magic"}, OptionError, "algorithm='magic'"),
        ({"order": "up"}, OptionError, "order='up'"),
        ({"mini_batches": [[0, 1]]}, MiniBatchError, "index 2 is 0 times"),
        ({"mini_batches": [[0, 1], [1, 2]]}, MiniBatchError, "index 1 is 2 times"),
        (
            {"mini_batches": [[0, 1], [3]]},
            MiniBatchError,
            r"mini_batches\[1\] holds index 3",
        ),
        ({"mini_batches": [[0, 1, 2], []]}, MiniBatchError, r"mini_batches\[1\] is empty"),
        ({"mini_batches": [[0, 1, -1]]}, MiniBatchError, r"mini_batches\[0\]\[2\] is -1"),
        ({"loss_tokens": [1, 2]}, LengthError, "loss_tokens holds 2 values for 3"),
        (
            {"loss_tokens": [1, 2, 9]},
            LengthError,
            r"loss_tokens\[2\] is 9, above lengths\[2\]=3",
        ),
    ],
)
def test_bad_input_is_named(change, error, words):
    arguments = {
        "lengths": [3, 3, 3],
        "ranks": 2,
        "mini_batches": [[0, 1, 2]],
        "max_tokens": 10,
        **change,
    }
    with pytest.raises(error, match=words) as caught:
        plan_batch(**arguments)
    assert isinstance(caught.value, BalancingError)


def test_numpy_integers_are_counts_too():
    plan = plan_batch(
        [3, 3], ranks=np.int32(2), max_tokens=np.int16(10), max_sequences=np.uint8(1)
    )
    assert plan.mini_batches[0].steps == 1
    assert {
        type(value) for value in (plan.ranks, plan.max_tokens, plan.settings.max_sequences)
    } == {int}


def test_a_rank_outside_the_plan_is_refused():
    with pytest.raises(OptionError, match="rank=2"):
        plan_batch([3, 3], ranks=2, max_tokens=10).for_rank(2)


def test_sequences_without_a_loss_token_are_computed_but_not_counted():
    plan = plan_batch([5, 6, 7], ranks=2, max_tokens=20, loss_tokens=[2, 0, 3])
    assert (plan.mini_batches[0].sequences, len(plan.mini_batches[0].rows)) == (2, 3)
    assert [part.sequences for part in plan.for_rank(0).mini_batches] == [2]


def test_p8_p9_m5_a_default_plan_is_refined_from_karmarkar_karp():
    arguments = {
        "lengths": lognormal(512),
        "ranks": 8,
        "mini_batches": shuffled_mini_batches(512, 2),
        "max_tokens": 16384,
    }
    plan = plan_batch(**arguments)
    assert [part.start for part in plan.mini_batches] == ["karmarkar_karp"] * 2
    alias = plan_batch(**arguments, algorithm="load_balance")
    assert as_lists(alias) == as_lists(plan)


def test_groups_are_counted_where_they_have_a_loss_token():
    arguments = {
        "ranks": 2,
        "mini_batches": [[0, 1, 2], [3, 4, 5]],
        "max_tokens": 20,
        "loss_tokens": [1, 0, 1, 1, 1, 0],
    }
    plan = plan_batch([5, 6, 7, 8, 9, 4], **arguments, groups=[7, 3, 7, 3, 9, 4])
    assert [part.groups for part in plan.mini_batches] == [1, 2]
    assert [part.groups for part in plan.for_rank(1).mini_batches] == [1, 2]
    assert [part.groups for part in plan_batch([5] * 6, **arguments).mini_batches] == [
        None,
        None,
    ]
    with pytest.raises(LengthError, match="groups holds 2 values for 6 lengths"):
        plan_batch([5] * 6, **arguments, groups=[1, 2])


def test_v10_pairs_of_halves_of_the_cap_come_near_their_bound():
    """0.024 above without a step of pairs."""
    batch = Batch.draw("geometric", 4096, 32, 27, cap_over_longest=None)
    lengths = batch.lengths[batch.mini_batches[2]]
    plan = plan_batch(lengths, ranks=32, max_tokens=DEFAULT_CAP, cost_model=COST_MODEL)
    assert plan_statistics(plan)["over_bound"] < 0.001


@pytest.mark.parametrize("kind", ["lognormal", "agentic"])
def test_many_sequences_are_even_within_one_percent(kind):
    rng, count, cap = np.random.default_rng(0), MANY + 4_000, 32_768
    lengths = np.clip(rng.lognormal(7.3, 0.9, count), 16, 16_384).astype(np.int64)
    if kind == "agentic":
        long = np.minimum(16_384, rng.normal(14_000, 1_500, count)).astype(np.int64)
        lengths = np.where(rng.random(count) < 0.6, rng.integers(100, 2_000, count), long)
    plan = plan_batch(lengths, ranks=128, max_tokens=cap, cost_model=CostModel(1.0, 1e-5))
    assert max(part.sums(lengths).max() for part in plan.mini_batches) <= cap
    assert plan.predicted_makespans().sum() <= plan.workloads.sum() / 128 * (
        1 + ENOUGH_OF_MANY
    )


def test_many_padded_sequences_are_planned():
    lengths = np.random.default_rng(0).integers(10, 1000, MANY + 1)
    plan = plan_batch(lengths, ranks=8, max_tokens=4000, layout="padded")
    (part,) = plan.mini_batches
    assert all(
        tokens_of(lengths[rows], "padded") <= 4000
        for step in part.micro_steps
        for rows in step.ranks
    )
