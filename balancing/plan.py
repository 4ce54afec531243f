"""The plan of a global batch: which rank computes which sequence in which micro-step.

    lengths, mini-batches of the caller
      -> each mini-batch: micro-batches under the caps -> micro-steps -> ranks     (schedule.py)
      -> Plan.mini_batches[m].micro_steps[s].ranks[r]                              for the driver
      -> Plan.for_rank(r)                                                          for a worker

Invariants:
  every index is computed exactly once;
  every micro-batch keeps the cap on tokens and the cap on sequences;
  within a mini-batch every rank has the same number of micro-batches: at least `min_count`, a multiple of
  `multiple_of`, and no micro-step is empty on all ranks;
  the caller decides which mini-batch a sequence belongs to, and the plan never changes it;
  the normalisers of a mini-batch are global numbers that do not depend on how it is split.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import lcm
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from balancing.alignment import round_up
from balancing.assignment import Order, Request, Schedule, Start
from balancing.baselines import PUBLISHED, schedule_rank_locally
from balancing.cost_model import CostModel
from balancing.errors import LengthError, OptionError
from balancing.grouping import Floats, Grouping, Integers
from balancing.packing import Caps, CountRule, Layout
from balancing.pipeline import Pipeline
from balancing.pipeline_plan import Work, computed_alone, schedule_on_pipeline
from balancing.pipeline_time import makespan
from balancing.prefix_packing import schedule_with_prefixes
from balancing.prefixes import PrefixTree, SharedPrefixes
from balancing.schedule import schedule_evenly, schedule_in_order
from balancing.validation import (
    check_fits,
    group_names,
    loss_token_counts,
    membership,
    one_of,
    positive_integer,
    sequence_lengths,
)

PlanAlgorithm = Literal["karmarkar_karp", "load_balance", "none", "verl", "roll", "mindspeed_rl"]
"""`load_balance` is another name of `karmarkar_karp`."""


@dataclass(frozen=True, eq=False)
class MicroStep:
    """Micro-batches that run at the same time. ranks[r]: int64, ascending, the sequences of rank r; may be empty."""

    ranks: tuple[Integers, ...]


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """One optimiser step.

    rows: int64 [sequences], in order of micro-step, then rank, ascending in each micro-batch.
    bounds: int64 [steps * ranks + 1]; micro-batch `i = step * ranks + rank` is `rows[bounds[i] : bounds[i + 1]]`.
    start: the initial assignment that it was refined from, or the algorithm if it was not refined.
    tokens, loss_tokens, sequences, groups: totals over all ranks, by which losses divide. Sequences and groups count
    only with a loss token: a mean of sequence means (GRPO, 1/|o_i| of each) has no term for the others.
    groups is None unless the caller named groups.
    """

    rows: Integers = field(repr=False)
    bounds: Integers = field(repr=False)
    steps: int
    start: Start
    tokens: int
    loss_tokens: int
    sequences: int
    groups: int | None = None

    @property
    def micro_steps(self) -> tuple[MicroStep, ...]:
        """In order of execution; views of `rows`. Built at every access, so that a pickled plan has two arrays only."""
        parts = [self.rows[start:stop] for start, stop in pairwise(self.bounds.tolist())]
        ranks = len(parts) // self.steps
        return tuple(MicroStep(tuple(parts[first : first + ranks])) for first in range(0, len(parts), ranks))

    def sums(self, values: Integers | Floats) -> Floats:
        """float64 [steps, ranks]: `values` (one for each sequence of the global batch), summed over micro-batches."""
        return self._micro_batches().sums(values[self.rows]).reshape(self.steps, -1)

    def predicted_times(self, workloads: Floats, layout: Layout) -> Floats:
        """float64 [steps, ranks], the time of each micro-batch; a padded row costs as much as its longest neighbour."""
        micro_batches, times = self._micro_batches(), workloads[self.rows]
        times = micro_batches.heaviest(times) if layout == "padded" else times
        return micro_batches.sums(times).reshape(self.steps, -1)

    def micro_batch_of_rows(self) -> Integers:
        """int64 [sequences]: the micro-batch of each entry of `rows`."""
        return np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))

    def _micro_batches(self) -> Grouping:
        return Grouping(self.micro_batch_of_rows(), len(self.bounds) - 1)


@dataclass(frozen=True)
class RankMiniBatch:
    """One rank's part of a mini-batch.

    micro_batches: (start, stop) of each micro-batch in `RankPlan.rows`. start == stop for an empty one, in whose
    collectives the rank still takes part.
    tokens, loss_tokens, sequences, groups: of the whole mini-batch over all ranks, as in `MiniBatch`.
    """

    micro_batches: tuple[tuple[int, int], ...]
    tokens: int
    loss_tokens: int
    sequences: int
    groups: int | None = None


@dataclass(frozen=True, eq=False)
class RankPlan:
    """One rank's part of a plan. rows: int64, its sequences in order of execution, mini-batch after mini-batch."""

    rank: int
    rows: Integers
    mini_batches: tuple[RankMiniBatch, ...]


@dataclass(frozen=True)
class Settings:
    """The arguments of `plan_batch` that do not describe the batch; `analysis.explain` plans again with them."""

    ranks: int
    max_tokens: int
    max_sequences: int | None
    min_count: int
    multiple_of: int
    cost_model: CostModel
    algorithm: PlanAlgorithm
    order: Order
    allow_empty: bool
    layout: Layout
    length_multiple: int
    pipeline: Pipeline | None = None

    def __post_init__(self) -> None:
        """Convert counts to plain ints; OptionError for the first argument with an invalid value."""
        for name in ("ranks", "max_tokens", "max_sequences", "min_count", "multiple_of", "length_multiple"):
            value = getattr(self, name)
            if value is not None or name != "max_sequences":
                object.__setattr__(self, name, positive_integer(value, name))
        one_of(self.layout, "layout", ("packed", "padded"))
        if self.algorithm == "load_balance":
            object.__setattr__(self, "algorithm", "karmarkar_karp")
        one_of(self.algorithm, "algorithm", ("karmarkar_karp", "none", *PUBLISHED))
        one_of(self.order, "order", ("descending", "small_ends", "makespan"))
        if self.order == "makespan" and (self.pipeline is None or self.algorithm != "karmarkar_karp"):
            raise OptionError("order='makespan' plans for a pipeline; pass pipeline and algorithm='karmarkar_karp'")

    def request(self, sequences: int) -> Request:
        """The constraints of a schedule, for a global batch of `sequences` sequences."""
        multiple_of = lcm(self.multiple_of, self.pipeline.count_multiple if self.pipeline else 1)
        return Request(
            ranks=self.ranks,
            caps=Caps(self.max_tokens, self.max_sequences or sequences, self.layout == "padded"),
            count=CountRule(self.min_count, multiple_of),
            allow_empty=self.allow_empty,
            order=self.order,
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """The result of `plan_batch`. lengths: int64 [n]. workloads: float64 [n], in the cost model's unit, of each alone.

    shared_prefixes: what sequences share at their start. shared: int64 [n], tokens of each sequence that another one of
    its micro-batch computes. Both are None for a batch without prefixes.
    """

    mini_batches: tuple[MiniBatch, ...]
    lengths: Integers = field(repr=False)
    workloads: Floats = field(repr=False)
    settings: Settings = field(repr=False)
    shared_prefixes: SharedPrefixes | None = field(default=None, repr=False)
    shared: Integers | None = field(default=None, repr=False)

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self.settings.ranks

    @property
    def max_tokens(self) -> int:
        """Cap on the tokens of a micro-batch."""
        return self.settings.max_tokens

    @property
    def layout(self) -> Layout:
        """`packed` or `padded`, which decides how tokens count towards the cap."""
        return self.settings.layout

    @property
    def length_multiple(self) -> int:
        """Lengths are rounded up to a multiple of it before they count towards the cap."""
        return self.settings.length_multiple

    @property
    def sizes(self) -> Integers:
        """int64 [n]: the tokens of each sequence that count towards the cap, aligned and without those shared."""
        return round_up(self.computed_lengths, self.length_multiple)

    @property
    def computed_lengths(self) -> Integers:
        """int64 [n]: `lengths` without tokens that another sequence of the micro-batch computes."""
        return self.lengths if self.shared is None else self.lengths - self.shared

    @property
    def computed_workloads(self) -> Floats:
        """float64 [n]: `workloads` without the work that another sequence of the micro-batch does."""
        return self.workloads if self.shared is None else self.workloads - self._workload(self.shared)

    def _workload(self, lengths: Integers) -> Floats:
        return self.settings.cost_model.workload(lengths)

    @property
    def prefixes(self) -> dict[str, Integers]:
        """The arguments of `plan_batch` about what sequences begin with alike; empty for a batch without prefixes."""
        if self.shared_prefixes is None:
            return {}
        found = {"prefix_groups": self.shared_prefixes.group, "prefix_lengths": self.shared_prefixes.tokens}
        depths = self.shared_prefixes.tree
        return found if depths is None else found | {"tree_order": depths.order, "tree_depths": depths.tokens}

    def for_rank(self, rank: int) -> RankPlan:
        """The part of one rank; OptionError if there is no such rank."""
        if not 0 <= rank < self.ranks:
            raise OptionError(f"rank={rank} is outside this plan, which has ranks={self.ranks}")
        rows, parts, position = [], [], 0
        for mini_batch in self.mini_batches:
            cuts = []
            starts, stops = mini_batch.bounds[rank : -1 : self.ranks], mini_batch.bounds[rank + 1 :: self.ranks]
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                rows.append(mini_batch.rows[start:stop])
                cuts.append((position, position + stop - start))
                position += stop - start
            counts = (mini_batch.tokens, mini_batch.loss_tokens, mini_batch.sequences, mini_batch.groups)
            parts.append(RankMiniBatch(tuple(cuts), *counts))
        return RankPlan(rank, np.concatenate(rows), tuple(parts))

    def predicted_times(self) -> list[Floats]:
        """float64 [steps] for each mini-batch: the time of each micro-step, that of its slowest rank.

        In the unit of `settings.cost_model`: seconds if it was fitted to measurements, else FLOPs or tokens.
        """
        return [part.predicted_times(self.computed_workloads, self.layout).max(axis=1) for part in self.mini_batches]

    def predicted_makespans(self) -> Floats:
        """float64 [mini_batches]: the time of each on the pipeline, or without one the sum over its micro-steps.

        In the unit of `predicted_times`, which are those of the whole model.
        """
        pipeline = self.settings.pipeline
        times = self.predicted_times()
        return np.array([each.sum() if pipeline is None else makespan(pipeline, each) for each in times])


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
    algorithm: PlanAlgorithm = "karmarkar_karp",
    order: Order | None = None,
    allow_empty: bool = True,
    layout: Layout = "packed",
    length_multiple: int = 1,
    pipeline: Pipeline | None = None,
    groups: ArrayLike | None = None,
    prefix_groups: ArrayLike | None = None,
    prefix_lengths: ArrayLike | None = None,
    tree_order: ArrayLike | None = None,
    tree_depths: ArrayLike | None = None,
) -> Plan:
    """Plan all mini-batches, micro-steps and ranks of a global batch.

    lengths: n whole numbers >= 1, the real tokens of each sequence.
    ranks: number of data-parallel ranks; it need not divide n.
    mini_batches: index arrays that together contain every index once; None is one mini-batch of all sequences.
    max_tokens: cap on tokens of a micro-batch (of a context-parallel group: `alignment.group_cap`); twice the longest
    sequence is a good choice. loss_tokens: n whole numbers, 0 <= loss_tokens <= lengths, the tokens in the loss; None
    takes lengths. max_sequences: cap on sequences of a micro-batch. min_count: least number of micro-batches of a rank
    in each mini-batch. multiple_of: a divisor of that number. cost_model: the workload to balance; None is tokens.
    algorithm: `karmarkar_karp` (or `load_balance`) is largest differencing over ranks and micro-batches, refined under
    the caps (schedule.py). `none` keeps the given order, with equal counts of sequences for all ranks, cut at the caps.
    `verl`, `roll` and `mindspeed_rl` plan rank by rank as these systems do, but keep the caps (baselines.py).
    order: micro-steps of `karmarkar_karp` by `descending` workload, or with small ones at both ends (`small_ends`), or,
    with a pipeline, so that its `makespan` is short: then their number and weights are chosen for it too
    (pipeline_plan.py). None is `makespan` with a pipeline, else `descending`.
    allow_empty: a rank may have an empty micro-batch if there are fewer sequences than micro-batches over all ranks.
    layout, length_multiple: as in `pack`.
    pipeline: `ranks` are data-parallel ranks, each a pipeline of stages; the number of micro-batches is then also a
    multiple of its `count_multiple`. None is no pipeline.
    groups: n whole numbers >= 0, the group of each sequence; the plan counts them for losses that divide by groups.
    prefix_groups, prefix_lengths: n whole numbers >= 0 each. The sequences of a group begin with the same tokens, so
    many (fewer than a sequence has; 0 is none), which a micro-batch computes once (prefix_packing.py). Packed layout
    only; of each beginning whole multiples of `length_multiple` count. Algorithms other than `karmarkar_karp` plan as
    if nothing were shared.
    tree_order, tree_depths: n whole numbers >= 0 each, for sequences that share more than their group's prefix. In the
    order of `tree_order` those of a group that begin alike are neighbours; each begins like the one before it with
    `tree_depths` tokens (fewer than either has). None is that they share the prefix alone.
    Raises LengthError, OptionError, MiniBatchError for bad values; OverCapError for a sequence above the cap;
    CountError if the counts cannot be kept.
    """
    settings = Settings(
        ranks, max_tokens, max_sequences, min_count, multiple_of, cost_model or CostModel.tokens(), algorithm,
        order or _default_order(pipeline, algorithm), allow_empty, layout, length_multiple, pipeline,
    )  # fmt: skip
    tokens = sequence_lengths(lengths)
    sizes = round_up(tokens, settings.length_multiple)
    check_fits(tokens, sizes, settings.max_tokens)
    in_loss = loss_token_counts(loss_tokens, tokens)
    group_of = None if groups is None else group_names(groups, "groups", len(tokens))
    members = membership(mini_batches, len(tokens))
    workloads = settings.cost_model.workload(tokens)
    shared_prefixes = _checked_prefixes(prefix_groups, prefix_lengths, (tree_order, tree_depths), tokens, settings)
    batch = _Batch(tokens, sizes, workloads, in_loss, group_of, shared_prefixes)
    planned = [_mini_batch(rows, batch, settings) for rows in members]
    if shared_prefixes is None:
        return Plan(tuple(planned), tokens, workloads, settings)
    shared = np.zeros_like(tokens)
    for part in planned:
        shared[part.rows] = shared_prefixes.select(part.rows).shared_tokens(part.micro_batch_of_rows())
    return Plan(tuple(planned), tokens, workloads, settings, shared_prefixes, shared)


def _default_order(pipeline: Pipeline | None, algorithm: PlanAlgorithm) -> Order:
    return "makespan" if pipeline is not None and algorithm in ("karmarkar_karp", "load_balance") else "descending"


@dataclass(frozen=True, eq=False)
class _Batch:
    """The sequences of a global batch, one row each."""

    tokens: Integers
    sizes: Integers
    workloads: Floats
    in_loss: Integers
    group_of: Integers | None
    shared_prefixes: SharedPrefixes | None


def _checked_prefixes(
    groups: ArrayLike | None,
    lengths: ArrayLike | None,
    tree: tuple[ArrayLike | None, ArrayLike | None],
    tokens: Integers,
    settings: Settings,
) -> SharedPrefixes | None:
    if groups is None and lengths is None:
        if any(each is not None for each in tree):
            raise OptionError("tree_order and tree_depths are of groups; pass prefix_groups and prefix_lengths, too")
        return None
    if groups is None or lengths is None:
        raise OptionError("prefix_groups and prefix_lengths go together; pass both, or neither")
    if settings.layout == "padded":
        raise OptionError("prefix_lengths are shared with layout='packed' only")
    names = group_names(groups, "prefix_groups", len(tokens))
    shared = _shorter(lengths, "prefix_lengths", tokens)
    largest = np.zeros(names.max() + 1, np.int64)
    np.maximum.at(largest, names, shared)
    differs = (largest[names] != shared) & (shared > 0)
    if differs.any():
        index = int(np.argmax(differs))
        raise LengthError(
            f"prefix_lengths[{index}] is {shared[index]}, but another of prefix_groups={names[index]} has "
            f"{largest[names[index]]}; a group has one"
        )
    # Whole multiples: then the cap holds for a row that is padded once, and for one of sequences that are padded each.
    shared = shared - shared % settings.length_multiple
    found = _tree(*tree, tokens, shared, settings)
    return SharedPrefixes.of(names, shared, settings.cost_model.workload(shared), found)


def _tree(
    order: ArrayLike | None, depths: ArrayLike | None, tokens: Integers, prefixes: Integers, settings: Settings
) -> PrefixTree | None:
    if order is None and depths is None:
        return None
    if order is None or depths is None:
        raise OptionError("tree_order and tree_depths go together; pass both, or neither")
    places = group_names(order, "tree_order", len(tokens))
    shared = _shorter(depths, "tree_depths", tokens)
    shared = np.maximum(shared - shared % settings.length_multiple, prefixes)
    return PrefixTree(places, shared, settings.cost_model.workload(shared))


def _shorter(values: ArrayLike, name: str, tokens: Integers) -> Integers:
    """int64 [n], tokens at the beginning of each sequence; LengthError for one that is all of it."""
    shared = group_names(values, name, len(tokens))
    if (shared >= tokens).any():
        index = int(np.argmax(shared >= tokens))
        raise LengthError(f"{name}[{index}] is {shared[index]}, not below lengths[{index}]={tokens[index]}")
    return shared


def _mini_batch(rows: Integers, batch: _Batch, settings: Settings) -> MiniBatch:
    schedule, ordered = _schedule(rows, batch, settings)
    micro_batch = schedule.grouping.group_of
    bounds = np.concatenate([[0], np.cumsum(schedule.grouping.sizes())])
    in_order = ordered[np.lexsort((ordered, micro_batch))]
    learned = rows[batch.in_loss[rows] > 0]
    groups = None if batch.group_of is None else len(np.unique(batch.group_of[learned]))
    counts = (int(batch.tokens[rows].sum()), int(batch.in_loss[rows].sum()), len(learned), groups)
    return MiniBatch(in_order, bounds, schedule.steps, schedule.start, *counts)


def _schedule(rows: Integers, batch: _Batch, settings: Settings) -> tuple[Schedule, Integers]:
    """The schedule of one mini-batch, and the row of each of its sequences."""
    tokens, sizes, workloads = batch.tokens, batch.sizes, batch.workloads
    request = settings.request(len(sizes))
    if settings.algorithm == "none":
        return schedule_in_order(sizes[rows], request), rows
    if settings.algorithm in PUBLISHED:
        return schedule_rank_locally(settings.algorithm, tokens[rows], sizes[rows], workloads[rows], request), rows
    ordered = rows[np.lexsort((rows, -sizes[rows], -workloads[rows]))]  # the given order does not matter
    work = _work(ordered, batch, settings)
    if settings.order == "makespan" and settings.pipeline is not None:
        return schedule_on_pipeline(work, request, settings.pipeline), ordered
    return work.plan(request), ordered


def _work(ordered: Integers, batch: _Batch, settings: Settings) -> Work:
    """The sequences of one mini-batch, in descending order of workload, and how they are planned."""
    sizes, workloads = batch.sizes[ordered], batch.workloads[ordered]
    if batch.shared_prefixes is None:
        computed = computed_alone(workloads, settings.request(len(batch.sizes)))
        packed = settings.layout == "packed"
        return Work(sizes, workloads, partial(schedule_evenly, sizes, workloads), computed, divisible=packed)
    shared_prefixes = batch.shared_prefixes.select(ordered)

    def computed_once(schedule: Schedule) -> Floats:
        return shared_prefixes.computed(workloads, schedule.grouping.group_of)

    plan = partial(schedule_with_prefixes, sizes, workloads, shared_prefixes)
    return Work(sizes, workloads, plan, computed_once, divisible=False)
