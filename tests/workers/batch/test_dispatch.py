from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing import ContextDegrees, plan_batch
from workers.batch.dataproto import CONTEXT_DEGREE, DataProto
from workers.batch.dispatch import (
    DispatchMode,
    Join,
    RankCoordinates,
    Split,
    dispatch,
    join_rows,
    join_tokens,
    leaders,
    split_arguments,
)
from workers.batch.metrics import Metric
from workers.batch.remote_batch import RemoteBatch, places
from workers.errors import DataError

BY_PLAN = DispatchMode(Split.PLAN, Join.TOKENS, ("log_probs",))


def ranks_of(dp: int, tp: int = 1) -> list[RankCoordinates]:
    return [RankCoordinates(index=i, dp=i // tp, tp=i % tp) for i in range(dp * tp)]


def whole_plan(lengths: list[int], ranks: int):
    return plan_batch(
        lengths,
        ranks=ranks,
        mini_batches=[np.arange(len(lengths))],
        max_tokens=max(lengths),
    )


def test_arguments_are_the_same_or_each_dp_groups_share_which_is_put_once() -> None:
    arguments = split_arguments(
        DispatchMode(Split.ALL, Join.LIST), ranks_of(3), (1,), {"k": 2}, put=id
    )
    assert arguments == [((1,), {"k": 2})] * 3
    lengths = [5, 3, 4, 2, 6]
    batch, plan = RemoteBatch({"length": np.array(lengths)}, {}), whole_plan(lengths, 2)
    stored: list[RemoteBatch] = []

    def put(value: RemoteBatch) -> int:
        stored.append(value)
        return len(stored) - 1

    arguments = split_arguments(
        BY_PLAN, ranks_of(2, tp=2), (batch, plan, "third", 4), {"k": 2}, put
    )
    for rank, (positional, keywords) in enumerate(arguments):
        share, rank_plan, *others = positional
        assert share == rank // 2
        assert rank_plan.rows.tolist() == plan.for_rank(share).rows.tolist()
        assert stored[share]["length"].tolist() == [lengths[i] for i in rank_plan.rows]
        assert (others, keywords) == (["third", 4], {"k": 2})
    assert len(stored) == 2


def test_a_plan_with_degrees_gives_each_rank_of_a_group_its_own_share() -> None:
    """Of two dp groups of two ranks, which share the sequence of 90 tokens. Every rank's results count."""
    ranks = [RankCoordinates(index=i, dp=i // 4, cp=i // 2 % 2, tp=i % 2) for i in range(8)]
    lengths = [90, 20, 20, 20, 20]
    batch = RemoteBatch({"length": np.array(lengths)}, {})
    plan = plan_batch(lengths, ranks=4, max_tokens=50, context_degrees=ContextDegrees(2))
    arguments = split_arguments(BY_PLAN, ranks, (batch, plan), {}, put=lambda share: share)
    shares = [positional[0] for positional, _ in arguments]
    assert [
        share is other for share, other in zip(shares[::2], shares[1::2], strict=True)
    ] == [True] * 4
    holders = [index for index, share in enumerate(shares) if 90 in share["length"]]
    assert holders in ([0, 1, 2, 3], [4, 5, 6, 7])
    for share in shares:
        long = share["length"] == 90
        assert (share[CONTEXT_DEGREE][long] == 2).all()
    assert leaders(ranks, (batch, plan)) == [0, 2, 4, 6]
    assert leaders(ranks, (batch, whole_plan(lengths, 2))) == [0, 4]
    for arguments_without_plan in ((), (batch,), (batch, "a plan")):
        assert leaders(ranks, arguments_without_plan) == [0, 4]
    found = [np.array(lengths)[plan.for_rank(rank).rows] for rank in range(4)]
    assert join_rows(plan, 5, found).tolist() == lengths
    with pytest.raises(DataError):  # without the other rank of each group
        split_arguments(BY_PLAN, ranks_of(2), (batch, plan), {}, put=id)


def test_a_rank_leads_its_dp_group_unless_it_has_another_place_in_it() -> None:
    assert RankCoordinates(index=3, dp=3).leads_dp_group
    for dimension in ("tp", "cp", "pp"):
        assert not RankCoordinates(index=3, dp=1, **{dimension: 1}).leads_dp_group


class RankMethods:
    """Methods of a worker. Its model does not read the column `hidden`."""

    unread = ("hidden",)

    @dispatch(Split.PLAN, Join.ROWS)
    def read_rows(self, batch: Any, plan: Any, scale: int) -> tuple[Any, ...]:
        return batch, plan, scale

    @dispatch(Split.ALL)
    def read_batch(self, batch: Any) -> Any:
        return batch


def test_a_method_split_by_plan_reads_the_rows_of_its_batch(ray_session: None) -> None:
    import ray

    rows = [{"input_ids": np.array([7, 8, 9]), "hidden": np.zeros(3)}]
    block = ray.put(DataProto.from_rows(rows))
    tokens = {name: places(name, [block], [0]) for name in ("input_ids", "hidden")}
    batch = RemoteBatch({"reward": np.array([0.5])}, tokens)
    worker = RankMethods()
    read, *others = worker.read_rows(batch, "plan", scale=2)
    assert list(read.tokens) == ["input_ids"] and others == ["plan", 2]
    assert read.tokens["input_ids"].tolist() == [7, 8, 9]
    # A batch that was read before, and one that all ranks get, are passed on.
    assert worker.read_rows(read, "plan", 2)[0] is read
    assert worker.read_batch(batch) is batch


@settings(deadline=None)  # the first plan compiles the planner
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 5))
def test_joining_what_was_split_restores_the_order(lengths: list[int], ranks: int) -> None:
    plan = whole_plan(lengths, ranks)
    shares = [np.array(lengths)[plan.for_rank(r).rows] for r in range(ranks)]
    result = join_tokens(
        BY_PLAN, plan, len(lengths), list(range(ranks)), [{"n": Metric.sum(1)}] * ranks
    )
    restored = [shares[rank][row] for rank, _, row in result.tokens["log_probs"]]
    assert restored == lengths
    assert result.metrics["n"].value == ranks
    assert join_rows(plan, len(lengths), shares).tolist() == lengths


def test_plans_that_do_not_fit_and_modes_that_cannot_be_joined_are_refused() -> None:
    plan, batch = whole_plan([3, 3], 1), RemoteBatch({"length": np.array([3, 3])}, {})
    with pytest.raises(DataError):  # it leaves a row out
        join_rows(plan, 4, [np.zeros(2)])
    with pytest.raises(DataError):
        join_tokens(BY_PLAN, plan, 4, ["block"], [{}])
    with pytest.raises(DataError):  # it is for another number of ranks
        split_arguments(BY_PLAN, ranks_of(2), (batch, plan), {}, put=id)
    with pytest.raises(DataError):  # there is none
        split_arguments(BY_PLAN, ranks_of(1), (1,), {}, put=id)
    with pytest.raises(ValueError):
        dispatch(Split.PLAN, Join.TOKENS)
    with pytest.raises(ValueError):
        dispatch(Split.ALL, Join.ROWS)
    for split, join in ((Split.ALL, Join.LIST), (Split.PLAN, Join.ROWS)):
        dispatch(split, join)
