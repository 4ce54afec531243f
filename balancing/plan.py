"""Plan a global batch: which rank computes which sequence in which micro-step.

    lengths, mini-batches of the caller
      -> each mini-batch: micro-batches under the caps -> micro-steps -> ranks     (schedule.py)
      -> Plan.mini_batches[m].micro_steps[s].ranks[r]                              for the driver
      -> Plan.for_rank(r)                                                          for a worker

Invariants:
  every index is computed exactly once, in the mini-batch that the caller chose
  every micro-batch keeps the caps on tokens and sequences
  all ranks have the same number of micro-batches: at least `min_count`, a multiple of `multiple_of`
  no micro-step is empty on all ranks
  the normalisers of a mini-batch are global numbers that do not depend on how it is split.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import lcm
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from balancing.alignment import round_up
from balancing.assignment import Order, Request, Schedule, Start, computed_weights
from balancing.baselines import PUBLISHED, schedule_rank_locally
from balancing.cost_model import CostModel
from balancing.errors import LengthError, OptionError
from balancing.grouping import Caps, Floats, Grouping, Integers
from balancing.image_patches import Images, ImagesOf
from balancing.lower_bounds import fewest_bins
from balancing.packing import CountRule, Layout
from balancing.patch_cap import MORE_STEPS, spread_patches
from balancing.pipeline import Pipeline
from balancing.pipeline_plan import Work, schedule_on_pipeline
from balancing.pipeline_time import makespan
from balancing.prefix_packing import schedule_with_prefixes
from balancing.prefixes import PrefixTree, SharedPrefixes
from balancing.schedule import arranged, schedule_evenly, schedule_in_order
from balancing.validation import (
    check_fits,
    check_patches,
    group_names,
    loss_token_counts,
    membership,
    one_of,
    positive_integer,
    sequence_lengths,
)

PlanAlgorithm = Literal["karmarkar_karp", "load_balance", "none", "verl", "roll", "mindspeed_rl"]
"""`load_balance` is an alias of `karmarkar_karp`."""


@dataclass(frozen=True, eq=False)
class MicroStep:
    """Micro-batches that run at the same time. ranks[r]: int64, ascending, may be empty."""

    ranks: tuple[Integers, ...]


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """One optimiser step.

    rows: int64 [sequences], by micro-step, then rank, ascending in each micro-batch.
    bounds: int64 [steps * ranks + 1]. Micro-batch `i = step * ranks + rank` is `rows[bounds[i] : bounds[i + 1]]`.
    start: the initial assignment before refinement, or the algorithm.
    tokens, loss_tokens, sequences, groups: totals over all ranks, by which losses divide. Sequences and groups without
    a loss token do not count.
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
        """Return views of `rows`. They are built at every access, so that a pickled plan has only two arrays."""
        parts = [self.rows[start:stop] for start, stop in pairwise(self.bounds.tolist())]
        ranks = len(parts) // self.steps
        return tuple(MicroStep(tuple(parts[first : first + ranks])) for first in range(0, len(parts), ranks))

    def sums(self, values: Integers | Floats) -> Floats:
        """Sum `values`, one per sequence of the global batch, over micro-batches: float64 [steps, ranks]."""
        return self._micro_batches().sums(values[self.rows]).reshape(self.steps, -1)

    def predicted_times(self, workloads: Floats, layout: Layout) -> Floats:
        """Return micro-batch times, float64 [steps, ranks]. A padded row costs as much as its longest neighbour."""
        micro_batches, times = self._micro_batches(), workloads[self.rows]
        times = micro_batches.heaviest(times) if layout == "padded" else times
        return micro_batches.sums(times).reshape(self.steps, -1)

    def micro_batch_of_rows(self) -> Integers:
        return np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))

    def _micro_batches(self) -> Grouping:
        return Grouping(self.micro_batch_of_rows(), len(self.bounds) - 1)


@dataclass(frozen=True)
class RankMiniBatch:
    """One rank's part of a mini-batch.

    micro_batches: (start, stop) in `RankPlan.rows`. tokens, loss_tokens, sequences, groups: as in `MiniBatch`.
    """

    micro_batches: tuple[tuple[int, int], ...]
    tokens: int
    loss_tokens: int
    sequences: int
    groups: int | None = None


@dataclass(frozen=True, eq=False)
class RankPlan:
    """One rank's part of a plan. rows: int64, its sequences in order of execution."""

    rank: int
    rows: Integers
    mini_batches: tuple[RankMiniBatch, ...]


@dataclass(frozen=True)
class Settings:
    """Arguments of `plan_batch` that do not describe the batch. `analysis.explain` plans again with them."""

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
    max_patches: int | None = None

    def __post_init__(self) -> None:
        optional = ("max_sequences", "max_patches")
        for name in ("ranks", "max_tokens", "min_count", "multiple_of", "length_multiple", *optional):
            value = getattr(self, name)
            if value is not None or name not in optional:
                object.__setattr__(self, name, positive_integer(value, name))
        one_of(self.layout, "layout", ("packed", "padded"))
        if self.max_patches and self.layout == "padded":
            raise OptionError(f"max_patches={self.max_patches}: requires layout='packed'. Leave it out.")
        if self.algorithm == "load_balance":
            object.__setattr__(self, "algorithm", "karmarkar_karp")
        one_of(self.algorithm, "algorithm", ("karmarkar_karp", "none", *PUBLISHED))
        one_of(self.order, "order", ("descending", "small_ends", "makespan"))
        if self.order == "makespan" and (self.pipeline is None or self.algorithm != "karmarkar_karp"):
            raise OptionError("order='makespan' plans for a pipeline. Pass pipeline and algorithm='karmarkar_karp'.")

    def request(self, sequences: int) -> Request:
        multiple_of = lcm(self.multiple_of, self.pipeline.count_multiple if self.pipeline else 1)
        return Request(
            ranks=self.ranks,
            caps=Caps(self.max_tokens, self.max_sequences or sequences, self.layout == "padded"),
            count=CountRule(self.min_count, multiple_of),
            allow_empty=self.allow_empty,
            order=self.order,
        )

    def patches(self, images: Images | None, depths: Integers) -> Floats:
        """Return the patches of the images that begin in each sequence's first tokens, float64 [n]."""
        return (
            np.zeros(len(depths)) if images is None else self.cost_model.patches * images.within(depths, images.tokens)
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """Result of `plan_batch`. lengths: int64 [n]. workloads: float64 [n], of each sequence alone.

    shared: int64 [n], tokens of each sequence that another sequence of its micro-batch computes.
    shared_prefixes, shared, images: None without them.
    """

    mini_batches: tuple[MiniBatch, ...]
    lengths: Integers = field(repr=False)
    workloads: Floats = field(repr=False)
    settings: Settings = field(repr=False)
    shared_prefixes: SharedPrefixes | None = field(default=None, repr=False)
    shared: Integers | None = field(default=None, repr=False)
    images: Images | None = field(default=None, repr=False)

    @property
    def ranks(self) -> int:
        return self.settings.ranks

    @property
    def max_tokens(self) -> int:
        return self.settings.max_tokens

    @property
    def layout(self) -> Layout:
        return self.settings.layout

    @property
    def length_multiple(self) -> int:
        return self.settings.length_multiple

    @property
    def sizes(self) -> Integers:
        """Return the tokens that count towards the cap, int64 [n]: aligned, without shared ones."""
        return round_up(self.computed_lengths, self.length_multiple)

    @property
    def computed_lengths(self) -> Integers:
        """Return `lengths` without tokens that another sequence of the micro-batch computes."""
        return self.lengths if self.shared is None else self.lengths - self.shared

    @property
    def computed_workloads(self) -> Floats:
        """Return `workloads` without the work that another sequence of the micro-batch does."""
        return self.workloads if self.shared is None else self.workloads - self._workload(self.shared)

    @property
    def computed_patches(self) -> Floats:
        """Return the patches of each sequence's images, without those that another of the micro-batch computes."""
        found = self.settings.patches(self.images, self.lengths)
        return found if self.shared is None else found - self.settings.patches(self.images, self.shared)

    def _workload(self, lengths: Integers) -> Floats:
        return self.settings.cost_model.workload(lengths, self.images)

    @property
    def prefixes(self) -> dict[str, Any]:
        """Return the arguments of `plan_batch` about prefixes and images, empty without them."""
        found: dict[str, Any] = {} if self.images is None else {"images": self.images.given}
        if self.shared_prefixes is None:
            return found
        found |= {"prefix_groups": self.shared_prefixes.group, "prefix_lengths": self.shared_prefixes.tokens}
        depths = self.shared_prefixes.tree
        return found if depths is None else found | {"tree_order": depths.order, "tree_depths": depths.tokens}

    def for_rank(self, rank: int) -> RankPlan:
        """Return one rank's part. Raises OptionError for an unknown rank."""
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
        """Return the time of each micro-step, float64 [steps] per mini-batch: the time of its slowest rank.

        The unit is the cost model's: seconds if fitted to measurements, else FLOPs or tokens.
        """
        return [part.predicted_times(self.computed_workloads, self.layout).max(axis=1) for part in self.mini_batches]

    def predicted_makespans(self) -> Floats:
        """Return each mini-batch's time on the pipeline, or else its summed micro-step times: float64 [parts]."""
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
    images: ImagesOf | None = None,
    max_patches: int | None = None,
) -> Plan:
    """Plan all mini-batches, micro-steps and ranks of a global batch.

    lengths: n whole numbers >= 1, the real tokens of each sequence.
    ranks: number of data-parallel ranks. It need not divide n.
    mini_batches: index arrays that together contain every index once, or None for one mini-batch.
    max_tokens: cap on tokens of a micro-batch (of a context-parallel group: `alignment.group_cap`). Twice the longest
    sequence is a good choice.
    loss_tokens: n whole numbers, 0 <= loss_tokens <= lengths, or None for `lengths`.
    min_count, multiple_of: each rank's micro-batches in a mini-batch are at least the first, a multiple of the second.
    cost_model: the workload to balance, or None for tokens.
    algorithm: `karmarkar_karp` is largest differencing, refined under the caps (schedule.py). `none` keeps the given
    order with equal counts per rank, cut at the caps. `verl`, `roll` and `mindspeed_rl` plan rank by rank as these
    systems do, but keep the caps (baselines.py).
    order: micro-steps of `karmarkar_karp` by `descending` workload, with light ones at both ends (`small_ends`), or for
    the least pipeline `makespan` (pipeline_plan.py). None is `makespan` with a pipeline, else `descending`.
    allow_empty: allow empty micro-batches if there are fewer sequences than micro-batches over all ranks.
    layout, length_multiple: as in `pack`.
    pipeline: each rank is a pipeline of stages. Counts are also multiples of its `count_multiple`.
    groups: n whole numbers >= 0, the group of each sequence, counted for losses that divide by groups.
    prefix_groups, prefix_lengths: n whole numbers >= 0 each. Sequences of a group share their first tokens, fewer than
    any has (0: none), which a micro-batch computes once (prefix_packing.py). Packed layout only. Only whole multiples
    of `length_multiple` count. Algorithms other than `karmarkar_karp` ignore prefixes when they plan.
    tree_order, tree_depths: n whole numbers >= 0 each, for longer shared prefixes. In `tree_order` each sequence shares
    `tree_depths` tokens with the one before it in its group, fewer than either has.
    images: the images of each sequence, (first token, tokens) each, or None. A shared prefix shares the images that
    begin in it. max_patches: cap on patches of a micro-batch, `cost_model.patches` an image token. Packed layout only.
    Raises LengthError, OptionError, MiniBatchError for bad values, OverCapError for a sequence above a cap, and
    CountError if the counts cannot be kept.
    """
    settings = Settings(
        ranks, max_tokens, max_sequences, min_count, multiple_of, cost_model or CostModel.tokens(), algorithm,
        order or _default_order(pipeline, algorithm), allow_empty, layout, length_multiple, pipeline, max_patches,
    )  # fmt: skip
    tokens = sequence_lengths(lengths)
    sizes = round_up(tokens, settings.length_multiple)
    check_fits(tokens, sizes, settings.max_tokens)
    in_loss = loss_token_counts(loss_tokens, tokens)
    group_of = None if groups is None else group_names(groups, "groups", len(tokens))
    members = membership(mini_batches, len(tokens))
    found = Images.of(images, len(tokens))
    workloads, patches = settings.cost_model.workload(tokens, found), settings.patches(found, tokens)
    check_patches(patches, settings.max_patches)
    tree = (tree_order, tree_depths)
    shared_prefixes = _checked_prefixes(prefix_groups, prefix_lengths, tree, tokens, settings, found)
    shared_patches = shared_prefixes and shared_prefixes.measured(partial(settings.patches, found))
    batch = _Batch(tokens, sizes, workloads, in_loss, group_of, shared_prefixes, found, patches, shared_patches)
    planned = [_mini_batch(rows, batch, settings) for rows in members]
    if shared_prefixes is None:
        return Plan(tuple(planned), tokens, workloads, settings, images=found)
    shared = np.zeros_like(tokens)
    for part in planned:
        shared[part.rows] = shared_prefixes.select(part.rows).shared_tokens(part.micro_batch_of_rows())
    return Plan(tuple(planned), tokens, workloads, settings, shared_prefixes, shared, found)


def _default_order(pipeline: Pipeline | None, algorithm: PlanAlgorithm) -> Order:
    return "makespan" if pipeline is not None and algorithm in ("karmarkar_karp", "load_balance") else "descending"


@dataclass(frozen=True, eq=False)
class _Batch:
    tokens: Integers
    sizes: Integers
    workloads: Floats
    in_loss: Integers
    group_of: Integers | None
    shared_prefixes: SharedPrefixes | None
    images: Images | None
    patches: Floats
    shared_patches: SharedPrefixes | None

    def used(self, rows: Integers, micro_batch: Integers | None = None) -> tuple[Floats, Integers]:
        """Return tokens, work and patches, float64 [3, rows], and groups. micro_batch: None counts each row alone."""
        alone, shared = np.stack([self.sizes[rows], self.workloads[rows], self.patches[rows]]), self.shared_prefixes
        if shared is None or self.shared_patches is None or micro_batch is None:
            return alone, np.arange(len(rows))
        found, patches = shared.select(rows), self.shared_patches.select(rows)
        tokens, images = (each.shared_tokens(micro_batch) for each in (found, patches))
        return np.stack([alone[0] - tokens, found.computed(alone[1], micro_batch), alone[2] - images]), found.group


def _checked_prefixes(
    groups: ArrayLike | None,
    lengths: ArrayLike | None,
    tree: tuple[ArrayLike | None, ArrayLike | None],
    tokens: Integers,
    settings: Settings,
    images: Images | None,
) -> SharedPrefixes | None:
    if groups is None and lengths is None:
        if any(each is not None for each in tree):
            raise OptionError("tree_order and tree_depths need groups. Pass prefix_groups and prefix_lengths, too.")
        return None
    if groups is None or lengths is None:
        raise OptionError("prefix_groups and prefix_lengths go together. Pass both, or neither.")
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
            f"{largest[names[index]]}. A group has one."
        )
    # Only whole multiples: then padding a shared row once and padding each sequence keep the same cap.
    shared = shared - shared % settings.length_multiple
    found = _tree(*tree, tokens, shared, settings, images)
    return SharedPrefixes.of(names, shared, settings.cost_model.workload(shared, images), found)


def _tree(
    order: ArrayLike | None,
    depths: ArrayLike | None,
    tokens: Integers,
    prefixes: Integers,
    settings: Settings,
    images: Images | None,
) -> PrefixTree | None:
    if order is None and depths is None:
        return None
    if order is None or depths is None:
        raise OptionError("tree_order and tree_depths go together. Pass both, or neither.")
    places = group_names(order, "tree_order", len(tokens))
    shared = _shorter(depths, "tree_depths", tokens)
    shared = np.maximum(shared - shared % settings.length_multiple, prefixes)
    return PrefixTree(places, shared, settings.cost_model.workload(shared, images))


def _shorter(values: ArrayLike, name: str, tokens: Integers) -> Integers:
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
    if settings.max_patches is None or batch.images is None:
        return _scheduled(rows, batch, settings)
    caps, once = settings.request(len(batch.sizes)).caps, np.ceil(batch.used(rows, np.zeros_like(rows))[0][2])
    least = fewest_bins(once[once > 0].astype(np.int64), settings.max_patches, len(rows))
    steps = max(settings.min_count, -(-least // settings.ranks))
    while True:
        schedule, ordered = _scheduled(rows, batch, replace(settings, min_count=steps))
        used = batch.used(ordered, schedule.grouping.group_of)
        found = spread_patches(schedule, batch.used(ordered)[0], *used, caps, settings.max_patches)
        if found is not None:
            if found is not schedule and settings.order != "makespan":
                found = arranged(found, batch.used(ordered, found.grouping.group_of)[0][1], settings.order)
            return found, ordered
        steps = schedule.steps + 1 + schedule.steps // MORE_STEPS


def _scheduled(rows: Integers, batch: _Batch, settings: Settings) -> tuple[Schedule, Integers]:
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
    sizes, workloads = batch.sizes[ordered], batch.workloads[ordered]
    if batch.shared_prefixes is None:
        request = settings.request(len(batch.sizes))

        def computed(schedule: Schedule) -> Floats:
            return computed_weights(schedule.grouping, workloads, request)

        packed = settings.layout == "packed"
        return Work(sizes, workloads, partial(schedule_evenly, sizes, workloads), computed, divisible=packed)
    shared_prefixes = batch.shared_prefixes.select(ordered)

    def computed_once(schedule: Schedule) -> Floats:
        return shared_prefixes.computed(workloads, schedule.grouping.group_of)

    plan = partial(schedule_with_prefixes, sizes, workloads, shared_prefixes)
    return Work(sizes, workloads, plan, computed_once, divisible=False)
