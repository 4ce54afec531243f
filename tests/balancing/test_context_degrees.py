"""Context-parallel degrees by micro-step: invariants over random batches, never slower than a fixed degree,
bounds.
"""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing import ContextDegrees, CostModel, Plan, explain, plan_batch, plan_statistics
from balancing.__main__ import main
from balancing.analysis.explain import replan
from balancing.analysis.lengths_file import plan_record, recorded_arguments
from balancing.cost_model import SEVEN_BILLION, exchange_share
from balancing.errors import CountError, OptionError, OverCapError
from balancing.mini_batch import degree_of

COSTS = CostModel(1000.0, 1.0)
OF_7B = CostModel.from_model_config(SEVEN_BILLION)


@st.composite
def batches(draw):
    degrees = ContextDegrees(
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([0.0, 0.05, 0.7])),
        draw(st.booleans()),
    )
    cap = draw(st.integers(60, 400))
    lengths = draw(
        st.lists(st.integers(1, cap * degrees.maximum // 8 * 8), min_size=1, max_size=40)
    )
    options = {
        "ranks": degrees.maximum * draw(st.integers(1, 3)),
        "max_tokens": cap // 8 * 8,
        "max_sequences": draw(st.none() | st.integers(2, 6)),
        "min_count": draw(st.integers(1, 2)),
        "cost_model": draw(st.sampled_from([None, COSTS])),
        "length_multiple": draw(st.sampled_from([1, 1, 8])),
        "mini_batches": np.array_split(
            draw(st.permutations(range(len(lengths)))),
            draw(st.integers(1, min(2, len(lengths)))),
        ),
    }
    if draw(st.booleans()):
        groups = np.sort(
            draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
        )
        shortest = np.array(
            [np.min(np.array(lengths)[groups == group]) for group in groups]
        )
        options |= {"prefix_groups": groups, "prefix_lengths": shortest // 2}
    return np.minimum(lengths, options["max_tokens"] * degrees.maximum), options, degrees


def planned(lengths, options, degrees) -> Plan | None:
    try:
        return plan_batch(lengths, **options, context_degrees=degrees)
    except CountError:
        assert options["min_count"] > 1
        return None


@settings(max_examples=100)
@given(batches())
def test_every_sequence_is_computed_once_by_neighbours_under_the_cap_of_as_many_ranks(
    batch,
):
    lengths, options, degrees = batch
    plan = planned(lengths, options, degrees)
    if plan is None:
        return
    parts = [plan.for_rank(rank) for rank in range(plan.ranks)]
    for number, (rows, mini_batch) in enumerate(
        zip(options["mini_batches"], plan.mini_batches, strict=True)
    ):
        seen = []
        assert mini_batch.steps >= options["min_count"]
        for position, step in enumerate(mini_batch.micro_steps):
            assert step.degree in degrees.choices
            for first in range(0, plan.ranks, step.degree):
                micro_batch = step.ranks[first]
                seen += micro_batch.tolist()
                assert plan.sizes[micro_batch].sum() <= plan.max_tokens * step.degree
                assert len(micro_batch) <= (options["max_sequences"] or len(lengths))
                for rank in range(first, first + step.degree):
                    part = parts[rank].mini_batches[number]
                    start, stop = part.micro_batches[position]
                    assert parts[rank].rows[start:stop].tolist() == micro_batch.tolist()
                    assert part.degrees[position] == step.degree
            assert any(len(micro_batch) for micro_batch in step.ranks)
        assert sorted(seen) == sorted(rows)
        assert mini_batch.tokens == lengths[rows].sum()
        assert mini_batch.sums(lengths).sum() == pytest.approx(lengths[rows].sum())


@settings(max_examples=60)
@given(batches())
def test_no_fixed_degree_is_faster_and_no_plan_beats_the_bound(batch):
    lengths, options, degrees = batch
    plan = planned(lengths, options, degrees)
    if plan is None:
        return
    numbers, time = plan_statistics(plan), plan.predicted_makespans()
    assert numbers["over_bound"] >= -1e-9
    assert numbers["exchange_share"] >= -1e-9
    assert np.concatenate(plan.predicted_times()).sum() == pytest.approx(
        numbers["predicted_time/total"]
    )
    assert (degree_of(plan.mini_batches) * plan.max_tokens >= plan.lengths).all()
    for degree in degrees.choices:
        costs = degrees.costs(options["cost_model"] or CostModel.tokens(), degree)
        fixed = {
            "ranks": plan.ranks // degree,
            "max_tokens": plan.max_tokens * degree,
            "cost_model": costs,
        }
        try:
            other = plan_batch(lengths, **options | fixed).predicted_makespans()
        except (CountError, OverCapError):
            continue
        assert (time <= other * (1 + 3e-3)).all()  # `NEAR` of the best estimate is enough


@pytest.mark.parametrize(("maximum", "most"), [(4, 0.12), (16, 0.01)])
def test_one_sequence_above_the_share_of_a_rank_is_shared(maximum, most):
    """1,024 chat responses on 16 ranks, and one of 80,000 tokens."""
    lengths = np.clip(
        np.random.default_rng(0).lognormal(np.log(600), 1, 1024), 16, 8192
    ).astype(int)
    lengths[0] = 80_000
    options = {"ranks": 16, "max_tokens": 90_000, "cost_model": OF_7B}
    ideal = OF_7B.workload(lengths).sum() / 16
    alone = plan_batch(lengths, **options).predicted_makespans()[0] / ideal - 1
    plan = plan_batch(
        lengths,
        **options,
        context_degrees=ContextDegrees(maximum, exchange_share(SEVEN_BILLION)),
    )
    assert alone > 1.0
    assert plan.predicted_makespans()[0] / ideal - 1 < most
    assert degree_of(plan.mini_batches)[0] == maximum
    assert np.median(degree_of(plan.mini_batches)) == 1


def test_a_frozen_towers_images_cost_every_rank_the_same():
    costs, images = CostModel(10.0, 0.1, image_linear=5.0), [[(0, 8)], []]
    degrees = ContextDegrees(2)
    options = {
        "ranks": 2,
        "max_tokens": 16,
        "cost_model": costs,
        "images": images,
        "context_degrees": degrees,
    }
    plan = plan_batch([20, 20], **options)  # above one rank's cap
    assert [part.degrees.tolist() for part in plan.mini_batches] == [[2, 2]]
    assert plan.workloads.tolist() == [20 * 10 + 400 * 0.1 + 2 * 8 * 5, 20 * 10 + 400 * 0.1]
    assert plan_statistics(plan)["image_share"] == pytest.approx(40 / 520)


def test_exchange_of_7b_by_hand():
    heads = 2 * (28 + 4) * 128  # queries and outputs, keys and values
    linear = 3 * 2 * (28 * (2 * 3584 * 128 * 32 + 3 * 3584 * 18944) + 3584 * 152064)
    assert exchange_share(SEVEN_BILLION) == pytest.approx(
        2 * 2 * heads * 28 * 1100 / linear
    )
    assert exchange_share(SEVEN_BILLION, ring=True) == pytest.approx(
        exchange_share(SEVEN_BILLION) / 8
    )
    assert ContextDegrees(4, 0.5).costs(COSTS, 4) == CostModel(
        1000 * (1 / 4 + 0.5 * 3 / 16), 1 / 4
    )
    assert ContextDegrees(4, 0.5, ring=True).costs(COSTS, 4) == CostModel(
        1000 * (1 / 4 + 0.5 * 3 / 4), 1 / 4
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ranks": 6}, "ranks=6 is not a multiple of context_degrees.maximum=4"),
        ({"layout": "padded"}, "context_degrees needs the packed layout"),
        ({"multiple_of": 2}, "multiple_of=1"),
        ({"algorithm": "verl"}, "algorithm='karmarkar_karp'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, said):
    with pytest.raises(OptionError, match=said):
        plan_batch(
            [9] * 8,
            **{"ranks": 8, "max_tokens": 10} | options,
            context_degrees=ContextDegrees(4),
        )
    with pytest.raises(
        OptionError, match="maximum=3 of ContextDegrees must be a power of two"
    ):
        ContextDegrees(3)
    with pytest.raises(OverCapError):
        plan_batch([41], ranks=8, max_tokens=10, context_degrees=ContextDegrees(4))


def test_records_explanations_and_the_command_know_degrees(tmp_path, capsys):
    lengths = [*[40] * 40, 700]
    plan = plan_batch(
        lengths,
        ranks=4,
        max_tokens=400,
        cost_model=COSTS,
        context_degrees=ContextDegrees(2, 0.1),
    )
    record = json.loads(json.dumps({"step": 1, "lengths": lengths, **plan_record(plan)}))
    again = plan_batch(lengths, **recorded_arguments(record))
    assert [part.rows.tolist() for part in again.mini_batches] == [
        part.rows.tolist() for part in plan.mini_batches
    ]
    found = np.concatenate([part.degrees for part in plan.mini_batches])
    assert set(found) == {1, 2}
    assert (
        f"Ranks that share a sequence: 1 in {(found == 1).sum()}, 2 in {(found == 2).sum()} micro-steps"
        in explain(plan)
    )
    assert replan(plan, {"context_degrees": ContextDegrees(4)}).settings.most_shared == 4
    (tmp_path / "lengths.json").write_text(json.dumps(lengths))
    options = [
        "--ranks",
        "4",
        "--max-tokens",
        "400",
        "--context-parallel",
        "2",
        "--mini-batches",
        "1",
    ]
    assert main([str(tmp_path / "lengths.json"), *options]) == 0
    shown = capsys.readouterr().out
    assert "degree 2" in shown  # the only fixed degree with room
    assert "degree 1" not in shown
