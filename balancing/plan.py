"""Plan: who computes what, and when, for a whole global batch.

    lengths, mini-batches of the caller
      -> per mini-batch: micro-batches under the caps -> micro-steps -> ranks      (schedule.py)
      -> Plan.mini_batches[m].micro_steps[s].ranks[r]                              what the driver looks at
      -> Plan.for_rank(r)                                                          what a worker receives

Invariants:
  every index is computed exactly once;
  every micro-batch keeps the cap on tokens and the cap on sequences;
  within a mini-batch every rank has the same number of micro-batches: at least `min_count`, a multiple of
  `multiple_of`, and no micro-step is empty on all ranks;
  which mini-batch a sequence belongs to is the caller's decision and never changes;
  the normalisers of a mini-batch are global numbers that do not depend on how it is cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancing.alignment import round_up
from balancing.errors import LengthError, MiniBatchError, OptionError
from balancing.packing import Caps, CountRule, Layout
from balancing.schedule import Order, Request, Steps, schedule_evenly, schedule_in_order
from balancing.statistics import plan_statistics
from balancing.validation import check_fits, one_of, positive_integer, sequence_lengths, whole_numbers
from balancing.workload import CostModel

PlanAlgorithm = Literal["load_balance", "none"]


@dataclass(frozen=True, eq=False)
class MicroStep:
    """What all ranks compute at the same time. ranks[r]: int64, ascending, the sequences of rank r; may be empty."""

    ranks: tuple[NDArray[np.int64], ...]


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """One optimiser step.

    tokens, loss_tokens, sequences: over all ranks, what losses divide by whatever the plan.
    """

    micro_steps: tuple[MicroStep, ...]
    tokens: int
    loss_tokens: int
    sequences: int


@dataclass(frozen=True)
class RankMiniBatch:
    """One rank's part of a mini-batch.

    micro_batches: (start, stop) of each micro-batch into `RankPlan.rows`; start == stop for an empty one, which the
    rank still takes part in (collectives).
    tokens, loss_tokens, sequences: normalisers of the whole mini-batch over all ranks, not of this part.
    """

    micro_batches: tuple[tuple[int, int], ...]
    tokens: int
    loss_tokens: int
    sequences: int


@dataclass(frozen=True, eq=False)
class RankPlan:
    """What one rank computes. rows: int64, its sequences in order of execution, mini-batch after mini-batch."""

    rank: int
    rows: NDArray[np.int64]
    mini_batches: tuple[RankMiniBatch, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """Made by `plan_batch`.

    lengths: int64 [n]. workloads: float64 [n], in the cost model's unit. ranks: data-parallel ranks.
    max_tokens, layout, length_multiple: how tokens count against the cap.
    """

    mini_batches: tuple[MiniBatch, ...]
    ranks: int
    max_tokens: int
    layout: Layout
    length_multiple: int
    lengths: NDArray[np.int64] = field(repr=False)
    workloads: NDArray[np.float64] = field(repr=False)

    def for_rank(self, rank: int) -> RankPlan:
        """The rows and cuts of one rank; OptionError if there is no such rank."""
        if not 0 <= rank < self.ranks:
            raise OptionError(f"rank={rank} is outside this plan, which has ranks={self.ranks}")
        rows, parts, position = [], [], 0
        for mini_batch in self.mini_batches:
            cuts = []
            for step in mini_batch.micro_steps:
                rows.append(step.ranks[rank])
                cuts.append((position, position + len(rows[-1])))
                position = cuts[-1][1]
            parts.append(RankMiniBatch(tuple(cuts), mini_batch.tokens, mini_batch.loss_tokens, mini_batch.sequences))
        return RankPlan(rank, np.concatenate(rows), tuple(parts))

    def statistics(self) -> dict[str, float]:
        """What the plan bought, by name; see `balancing.statistics.plan_statistics`."""
        return plan_statistics(self)


def plan_batch(
    lengths: ArrayLike,
    *,
    ranks: int,
    mini_batches: Sequence[ArrayLike] | None = None,
    max_tokens: int,
    loss_tokens: ArrayLike | None = None,
    max_sequences: int | None = None,
    min_count: int = 1,
    multiple_of: int = 1,
    cost_model: CostModel | None = None,
    algorithm: PlanAlgorithm = "load_balance",
    order: Order = "descending",
    allow_empty: bool = True,
    layout: Layout = "packed",
    length_multiple: int = 1,
) -> Plan:
    """Plan all mini-batches, micro-steps and ranks of a global batch.

    lengths: n whole numbers >= 1, real tokens of each sequence.
    ranks: data-parallel ranks; n need not divide by it.
    mini_batches: index arrays that together hold every index once; None is one mini-batch of all.
    max_tokens: cap on tokens of a micro-batch (of a context-parallel group: `alignment.group_cap`).
    loss_tokens: n whole numbers, 0 <= loss_tokens <= lengths, tokens that the loss counts; None takes lengths.
    max_sequences: cap on sequences of a micro-batch. min_count: least number of micro-batches of a rank in each
    mini-batch. multiple_of: what that number must divide by.
    cost_model: what is evened; None evens tokens.
    algorithm: `load_balance`, or `none`: given order, an equal count of sequences for each rank, cut at the caps.
    order: micro-steps of `load_balance` by descending workload, or with small ones at both ends (pipelines).
    allow_empty: a rank may have an empty micro-batch where sequences are fewer than micro-batches over all ranks.
    layout, length_multiple: as in `pack`.
    Raises LengthError, OptionError, MiniBatchError for bad values; OverCapError for a sequence above the cap;
    CountError where the counts cannot be kept.
    """
    tokens = sequence_lengths(lengths)
    one_of(layout, "layout", ("packed", "padded"))
    one_of(algorithm, "algorithm", ("load_balance", "none"))
    one_of(order, "order", ("descending", "small_ends"))
    sizes = round_up(tokens, positive_integer(length_multiple, "length_multiple"))
    cap = positive_integer(max_tokens, "max_tokens")
    check_fits(tokens, sizes, cap)
    in_loss = _loss_tokens(loss_tokens, tokens)
    members = _membership(mini_batches, len(tokens))
    workloads = (cost_model or CostModel.tokens()).workload(tokens)
    sequences = len(tokens) if max_sequences is None else positive_integer(max_sequences, "max_sequences")
    request = Request(
        ranks=positive_integer(ranks, "ranks"),
        caps=Caps(cap, sequences, layout == "padded"),
        count=CountRule(positive_integer(min_count, "min_count"), positive_integer(multiple_of, "multiple_of")),
        allow_empty=allow_empty,
        order=order,
    )
    planned = []
    for rows in members:
        steps, ordered = _schedule(rows, sizes, workloads, request, algorithm)
        planned.append(_mini_batch(steps, ordered, tokens, in_loss))
    return Plan(tuple(planned), request.ranks, cap, layout, int(length_multiple), tokens, workloads)


def _schedule(
    rows: NDArray[np.int64],
    sizes: NDArray[np.int64],
    workloads: NDArray[np.float64],
    request: Request,
    algorithm: PlanAlgorithm,
) -> tuple[Steps, NDArray[np.int64]]:
    """The micro-steps of one mini-batch, and the rows that their numbers stand for."""
    if algorithm == "none":
        return schedule_in_order(sizes[rows], request), rows
    ordered = rows[np.lexsort((rows, -sizes[rows], -workloads[rows]))]  # the same plan in whatever order given
    return schedule_evenly(sizes[ordered], workloads[ordered], request), ordered


def _mini_batch(
    steps: Steps, rows: NDArray[np.int64], tokens: NDArray[np.int64], in_loss: NDArray[np.int64]
) -> MiniBatch:
    micro_steps = tuple(
        MicroStep(tuple(np.sort(rows[np.asarray(group, np.int64)]) for group in step)) for step in steps
    )
    return MiniBatch(micro_steps, int(tokens[rows].sum()), int(in_loss[rows].sum()), len(rows))


def _loss_tokens(loss_tokens: ArrayLike | None, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    if loss_tokens is None:
        return tokens
    checked = whole_numbers(loss_tokens, "loss_tokens", minimum=0)
    if len(checked) != len(tokens):
        raise LengthError(f"loss_tokens holds {len(checked)} values for {len(tokens)} lengths; pass one for each")
    above = checked > tokens
    if above.any():
        index = int(np.argmax(above))
        raise LengthError(
            f"loss_tokens[{index}] is {checked[index]}, above lengths[{index}]={tokens[index]}; "
            "loss_tokens counts the tokens of a sequence that the loss sees"
        )
    return checked


def _membership(mini_batches: Sequence[ArrayLike] | None, count: int) -> list[NDArray[np.int64]]:
    """The caller's mini-batches as int64 arrays; MiniBatchError unless each index 0..count is in exactly one."""
    if mini_batches is None:
        return [np.arange(count)]
    members = [
        whole_numbers(rows, f"mini_batches[{number}]", minimum=0, error=MiniBatchError)
        for number, rows in enumerate(mini_batches)
    ]
    seen = np.zeros(count, np.int64)
    for number, rows in enumerate(members):
        if len(rows) == 0:
            raise MiniBatchError(f"mini_batches[{number}] is empty; leave it out")
        if rows.max() >= count:
            raise MiniBatchError(f"mini_batches[{number}] holds index {rows.max()}, but there are {count} lengths")
        np.add.at(seen, rows, 1)
    if (seen != 1).any():
        index = int(np.argmax(seen != 1))
        raise MiniBatchError(
            f"index {index} is {seen[index]} times in mini_batches; every index of lengths must be in exactly one"
        )
    return members
