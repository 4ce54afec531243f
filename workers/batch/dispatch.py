"""`@dispatch`: splits a worker method's arguments over ranks and joins its results.

    @dispatch(Split.PLAN, Join.TOKENS, returns=("log_probs",))
    def log_probs(self, batch, plan): ...         # on the worker: its own rows and its own part of the plan

    result = policy.log_probs(batch, plan)        # on the driver: a RemoteBatch and the whole Plan
    batch = batch.with_tokens(old_log_probs=result.tokens["log_probs"])

The functions are pure except for `put`, which the caller passes.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from balancing import Plan
from workers.batch.dataproto import CONTEXT_DEGREE
from workers.batch.metrics import Metrics, merge
from workers.batch.remote_batch import RemoteBatch, places
from workers.errors import DataError

DISPATCH_ATTRIBUTE = "dispatch_mode"


class Split(Enum):
    """Which arguments each rank receives."""

    ALL = "the same arguments"
    PLAN = "the rows of the batch that the plan gives its dp rank, and its part of the plan"


class Join(Enum):
    """How the ranks' results become one."""

    LIST = "a list with the result of every rank, in rank order"
    RANK_ZERO = "the result of rank zero, although all ranks take part"
    METRICS = (
        "the metrics of one rank for each share of the plan, or of each dp group, merged"
    )
    RANK_ZERO_REFERENCE = (
        "a reference to the first result of rank zero, which stays there, and "
        "merged metrics"
    )
    ROWS = "one number a sequence, in the order of the batch, from one rank for each share of the plan"
    TOKENS = "token columns that stay where they were made, in the order of the batch, and merged metrics"

    @property
    def keeps_first(self) -> bool:
        """Whether the method returns `(kept, Metrics)` and `kept` stays in the object store."""
        return self in (Join.RANK_ZERO_REFERENCE, Join.TOKENS)


@dataclass(frozen=True)
class DispatchMode:
    split: Split
    join: Join
    returns: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankCoordinates:
    """A worker's coordinates: `index` counts all workers, the others count within their dimension."""

    index: int
    dp: int
    tp: int = 0
    cp: int = 0
    pp: int = 0

    @property
    def leads_dp_group(self) -> bool:
        """Whether this rank's result counts among the ranks with the same rows."""
        return self.tp == self.cp == self.pp == 0

    def share(self, plan: Plan, cp_size: int) -> int:
        """Return the rank of the plan whose rows this rank gets: its dp group's, or its own within it."""
        return (
            self.dp
            if plan.settings.context_degrees is None
            else self.dp * cp_size + self.cp
        )


@dataclass(frozen=True)
class PlanResult:
    tokens: dict[str, np.ndarray]
    metrics: Metrics


def dispatch(
    split: Split, join: Join = Join.LIST, *, returns: tuple[str, ...] = ()
) -> Callable[[Callable], Callable]:
    """Mark a worker method as callable on the whole group.

    Split.PLAN methods take `(batch, plan, ...)`: the caller passes a RemoteBatch and a Plan. The method
    receives its rows, in the plan's order, and its RankPlan. Join.TOKENS methods return `(DataProto,
    Metrics)` with the columns `returns`, a row for each row received. Join.ROWS methods return one number for
    each row. Token columns in a worker's attribute `unread` are left out.
    """
    if (join is Join.TOKENS) != bool(returns):
        raise ValueError("Join.TOKENS, and it alone, names the columns that it returns")
    if join is Join.ROWS and split is not Split.PLAN:
        raise ValueError(f"{join} needs Split.PLAN")

    def mark(method: Callable) -> Callable:
        @functools.wraps(method)
        def receive(self: Any, *args: Any, **kwargs: Any) -> Any:
            if split is Split.PLAN and isinstance(args[0], RemoteBatch):
                args = (args[0].gather(getattr(self, "unread", ())), *args[1:])
            return method(self, *args, **kwargs)

        setattr(receive, DISPATCH_ATTRIBUTE, DispatchMode(split, join, returns))
        return receive

    return mark


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def split_arguments(
    mode: DispatchMode,
    ranks: Sequence[RankCoordinates],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    put: Callable[[Any], Any],
) -> list[Arguments]:
    """Return every rank's arguments. `put` stores an object, once per dp rank. Raises DataError if they do
    not fit.
    """
    if mode.split is Split.ALL:
        return [(args, kwargs)] * len(ranks)
    if (
        len(args) < 2
        or not isinstance(args[0], RemoteBatch)
        or not isinstance(args[1], Plan)
    ):
        kinds = [type(argument).__name__ for argument in args]
        raise DataError(
            f"a method split by plan takes a RemoteBatch and a Plan first, got {kinds}."
        )
    batch = args[0]
    plan = args[1]
    cp_size = 1 + max(rank.cp for rank in ranks)
    of_ranks = [rank.share(plan, cp_size) for rank in ranks]
    if plan.ranks != 1 + max(of_ranks):
        raise DataError(
            f"a plan for {plan.ranks} ranks cannot run on a group of {1 + max(of_ranks)} dp ranks."
        )
    shares = []
    for number in range(plan.ranks):
        rank_plan = plan.for_rank(number)
        rows = batch.select(rank_plan.rows)
        if plan.settings.context_degrees is not None:
            rows = rows.with_columns(**{CONTEXT_DEGREE: rank_plan.degree_of_rows()})
        shares.append((put(rows), rank_plan))
    return [((*shares[share], *args[2:]), kwargs) for share in of_ranks]


def leaders(ranks: Sequence[RankCoordinates], args: tuple[Any, ...]) -> list[int]:
    """Return the ranks whose results count: one for each share of the plan in `args`, or of each dp group."""
    plan = args[1] if len(args) > 1 and isinstance(args[1], Plan) else None
    by_step = plan is not None and plan.settings.context_degrees is not None
    return [
        rank.index
        for rank in ranks
        if replace(rank, cp=0 if by_step else rank.cp).leads_dp_group
    ]


def join_tokens(
    mode: DispatchMode,
    plan: Plan,
    rows: int,
    blocks: Sequence[Any],
    metrics: Sequence[Metrics],
) -> PlanResult:
    """Join a block and metrics per dp rank. Raises DataError if the plan omits any of the `rows`
    sequences.
    """
    rank, row = _places(plan, rows)
    locations = [blocks[dp] for dp in rank], row.tolist()
    columns = {name: places(name, *locations) for name in mode.returns}
    return PlanResult(columns, merge(metrics))


def join_rows(plan: Plan, rows: int, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return numbers in the order of the batch, from an array per dp rank. Raises as `join_tokens`."""
    block, row = _places(plan, rows)
    starts = np.cumsum([0, *(len(part) for part in parts)])
    return np.concatenate(parts)[starts[block] + row]


def _places(plan: Plan, rows: int) -> tuple[np.ndarray, np.ndarray]:
    block = np.full(rows, -1, dtype=np.int32)
    row = np.zeros(rows, dtype=np.int32)
    for dp in range(plan.ranks):
        indices = plan.for_rank(dp).rows
        block[indices] = dp
        row[indices] = np.arange(len(indices))
    missing = np.flatnonzero(block < 0)
    if len(missing):
        raise DataError(
            f"the plan leaves out {len(missing)} of {rows} sequences, the first is {missing[0]}."
        )
    return block, row
