"""Plan a global batch: which rank computes which sequence in which micro-step.

    lengths, mini-batches of the caller
      -> each mini-batch: micro-batches under the caps -> micro-steps -> ranks     (search/schedule.py)
      -> Plan.mini_batches[m].micro_steps[s].ranks[r]                              for the driver
      -> Plan.for_rank(r)                                                          for a worker

Invariants:
  every index is computed exactly once, in the mini-batch that the caller chose
  every micro-batch keeps the caps on tokens and sequences
  all ranks have the same number of micro-batches: at least `min_count`, a multiple of `multiple_of`
  no micro-step is empty on all ranks
  the normalisers of a mini-batch are global numbers that do not depend on how it is split.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from balancing.basics.alignment import round_up
from balancing.basics.grouping import Floats, Integers
from balancing.basics.image_patches import Images, ImagesOf
from balancing.basics.validation import (
    check_fits,
    check_patches,
    group_names,
    loss_token_counts,
    membership,
    sequence_lengths,
)
from balancing.context_degrees import Classes, ContextDegrees, Part, fastest_parts
from balancing.cost_model import CostModel
from balancing.errors import OptionError
from balancing.mini_batch import MiniBatch, RankMiniBatch, RankPlan, degree_of
from balancing.pipelines.pipeline import Pipeline
from balancing.pipelines.pipeline_plan import Work, schedule_on_pipeline
from balancing.pipelines.pipeline_time import makespan
from balancing.plan_settings import PlanAlgorithm, Settings, default_order
from balancing.prefixes.groups import SharedPrefixes, checked_prefixes
from balancing.prefixes.packing import schedule_with_prefixes
from balancing.prefixes.patch_cap import MORE_STEPS, spread_patches
from balancing.search.assignment import Order, Schedule, computed_weights
from balancing.search.baselines import PUBLISHED, schedule_rank_locally
from balancing.search.lower_bounds import fewest_bins
from balancing.search.packing import Layout
from balancing.search.schedule import arranged, schedule_evenly, schedule_in_order


@dataclass(frozen=True, eq=False)
class Plan:
    """Result of `plan_batch`. lengths: int64 [n]. workloads: float64 [n], of each sequence alone, over all
    its ranks.

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
        if self.shared is None:
            return self.workloads
        return self.workloads - self.settings.workload(
            self.shared, self.images, degree_of(self.mini_batches)
        )

    @property
    def computed_patches(self) -> Floats:
        """Return the patches of each sequence's images, without those that another of the micro-batch
        computes.
        """
        patches = self.settings.patches(self.images, self.lengths)
        return (
            patches
            if self.shared is None
            else patches - self.settings.patches(self.images, self.shared)
        )

    @property
    def prefixes(self) -> dict[str, Any]:
        """Return the arguments of `plan_batch` about prefixes and images, empty without them."""
        arguments: dict[str, Any] = (
            {} if self.images is None else {"images": self.images.given}
        )
        if self.shared_prefixes is None:
            return arguments
        arguments |= {
            "prefix_groups": self.shared_prefixes.group,
            "prefix_lengths": self.shared_prefixes.tokens,
        }
        depths = self.shared_prefixes.tree
        return (
            arguments
            if depths is None
            else arguments | {"tree_order": depths.order, "tree_depths": depths.tokens}
        )

    def for_rank(self, rank: int) -> RankPlan:
        """Return one rank's part. Raises OptionError for an unknown rank."""
        if not 0 <= rank < self.ranks:
            raise OptionError(
                f"rank={rank} is outside this plan, which has ranks={self.ranks}"
            )
        rows = []
        parts = []
        position = 0
        for mini_batch in self.mini_batches:
            cuts = []
            first = mini_batch.first_ranks()[:, rank]
            starts = mini_batch.bounds[first]
            stops = mini_batch.bounds[first + 1]
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                rows.append(mini_batch.rows[start:stop])
                cuts.append((position, position + stop - start))
                position += stop - start
            counts = (
                mini_batch.tokens,
                mini_batch.loss_tokens,
                mini_batch.sequences,
                mini_batch.groups,
            )
            parts.append(
                RankMiniBatch(
                    tuple(cuts), *counts, tuple(mini_batch.degree_of_steps().tolist())
                )
            )
        return RankPlan(rank, np.concatenate(rows), tuple(parts))

    def predicted_times(self) -> list[Floats]:
        """Return the time of each micro-step, float64 [steps] per mini-batch: the time of its slowest rank.

        The unit is the cost model's: seconds if fitted to measurements, else FLOPs or tokens.
        """
        return [
            part.predicted_times(self.computed_workloads, self.layout).max(axis=1)
            for part in self.mini_batches
        ]

    def predicted_makespans(self) -> Floats:
        """Return each mini-batch's time on the pipeline, or else its summed micro-step times: float64
        [parts].
        """
        pipeline = self.settings.pipeline
        times = self.predicted_times()
        return np.array(
            [
                step_times.sum() if pipeline is None else makespan(pipeline, step_times)
                for step_times in times
            ]
        )


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
    context_degrees: ContextDegrees | None = None,
) -> Plan:
    """Plan all mini-batches, micro-steps and ranks of a global batch.

    lengths: n whole numbers >= 1, the real tokens of each sequence.
    mini_batches: index arrays that together contain every index once, or None for one mini-batch.
    loss_tokens: n whole numbers, 0 <= loss_tokens <= lengths, or None for `lengths`.
    groups: n whole numbers >= 0, the group of each sequence, counted for losses that divide by groups.
    prefix_groups, prefix_lengths: n whole numbers >= 0 each. Sequences of a group share their first tokens,
    fewer than any has (0: none), which a micro-batch computes once (prefixes/packing.py).
    tree_order, tree_depths: n whole numbers >= 0 each, for longer shared prefixes. In `tree_order` each
    sequence shares `tree_depths` tokens with the one before it in its group, fewer than either has.
    images: the images of each sequence, (first token, tokens) each, or None. A shared prefix shares the
    images that begin in it.

    Prefixes need the packed layout, and only whole multiples of `length_multiple` count. The other arguments
    are described in `plan_settings.Settings`. Raises LengthError, OptionError, MiniBatchError for bad values,
    OverCapError for a sequence above a cap, and CountError if the counts cannot be kept.
    """
    settings = Settings(
        ranks, max_tokens, max_sequences, min_count, multiple_of, cost_model or CostModel.tokens(), algorithm,
        order or default_order(algorithm, pipelined=pipeline is not None),
        allow_empty, layout, length_multiple, pipeline, max_patches,
        context_degrees,
    )  # fmt: skip
    tokens = sequence_lengths(lengths)
    sizes = round_up(tokens, settings.length_multiple)
    check_fits(tokens, sizes, settings.max_tokens * settings.most_shared)
    in_loss = loss_token_counts(loss_tokens, tokens)
    group_of = None if groups is None else group_names(groups, "groups", len(tokens))
    members = membership(mini_batches, len(tokens))
    prefixes = (prefix_groups, prefix_lengths, tree_order, tree_depths)
    batch = _make_batch(
        settings, tokens, in_loss, group_of, Images.of(images, len(tokens)), prefixes
    )
    at_degrees = {}
    if context_degrees is not None:
        at_degrees = {
            degree: batch.at_degree(settings, degree) for degree in context_degrees.choices
        }
    parts = [_mini_batch(rows, batch, settings, at_degrees) for rows in members]
    return _assemble(parts, batch, settings)


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

    def at_degree(self, settings: Settings, degree: int) -> "_Batch":
        """Return the batch with the work of one of `degree` ranks that share each sequence."""
        workload = partial(
            settings.at_degree(degree).cost_model.workload, images=self.images
        )
        shared = self.shared_prefixes and self.shared_prefixes.costing(workload)
        return replace(self, workloads=workload(self.tokens), shared_prefixes=shared)

    def used(
        self, rows: Integers, micro_batch: Integers | None = None
    ) -> tuple[Floats, Integers]:
        """Return tokens, work and patches, float64 [3, rows], and groups. micro_batch: None counts each row
        alone.
        """
        alone = np.stack([self.sizes[rows], self.workloads[rows], self.patches[rows]])
        shared = self.shared_prefixes
        if shared is None or self.shared_patches is None or micro_batch is None:
            return alone, np.arange(len(rows))
        prefixes = shared.select(rows)
        patches = self.shared_patches.select(rows)
        tokens, images = (
            measure.shared_tokens(micro_batch) for measure in (prefixes, patches)
        )
        return np.stack(
            [alone[0] - tokens, prefixes.computed(alone[1], micro_batch), alone[2] - images]
        ), prefixes.group


def _make_batch(
    settings: Settings,
    tokens: Integers,
    in_loss: Integers,
    group_of: Integers | None,
    images: Images | None,
    prefixes: tuple[ArrayLike | None, ArrayLike | None, ArrayLike | None, ArrayLike | None],
) -> _Batch:
    """Check images and prefixes, and measure the work of each sequence alone."""
    sizes = round_up(tokens, settings.length_multiple)
    workloads = settings.cost_model.workload(tokens, images)
    patches = settings.patches(images, tokens)
    check_patches(patches, settings.max_patches)
    if settings.layout == "padded" and any(
        prefix_array is not None for prefix_array in prefixes[:2]
    ):
        raise OptionError("prefix_lengths are shared with layout='packed' only")
    measure = partial(settings.cost_model.workload, images=images)
    shared_prefixes = checked_prefixes(*prefixes, tokens, settings.length_multiple, measure)
    shared_patches = shared_prefixes and shared_prefixes.measured(
        partial(settings.patches, images)
    )
    return _Batch(
        tokens,
        sizes,
        workloads,
        in_loss,
        group_of,
        shared_prefixes,
        images,
        patches,
        shared_patches,
    )


def _assemble(parts: Sequence[MiniBatch], batch: _Batch, settings: Settings) -> Plan:
    """Return the plan, with the tokens that its micro-batches share."""
    workloads = batch.workloads
    if settings.context_degrees is not None:
        workloads = settings.workload(batch.tokens, batch.images, degree_of(parts))
    shared_prefixes = batch.shared_prefixes
    if shared_prefixes is None:
        return Plan(tuple(parts), batch.tokens, workloads, settings, images=batch.images)
    shared = np.zeros_like(batch.tokens)
    for part in parts:
        shared[part.rows] = shared_prefixes.select(part.rows).shared_tokens(
            part.micro_batch_of_rows()
        )
    return Plan(
        tuple(parts),
        batch.tokens,
        workloads,
        settings,
        shared_prefixes,
        shared,
        batch.images,
    )


def _mini_batch(
    rows: Integers, batch: _Batch, settings: Settings, at_degrees: Mapping[int, _Batch]
) -> MiniBatch:
    if at_degrees:
        parts = _by_degree(rows, batch, settings, at_degrees)
    else:
        parts = [Part(1, *_schedule(rows, batch, settings))]
    steps = [part.schedule.steps for part in parts]
    first = np.cumsum([0, *steps]) * settings.ranks
    places = [
        at + part.degree * part.schedule.grouping.group_of
        for at, part in zip(first, parts, strict=False)
    ]
    micro_batch = np.concatenate(places)
    ordered = np.concatenate([part.rows for part in parts])
    bounds = np.concatenate([[0], np.cumsum(np.bincount(micro_batch, minlength=first[-1]))])
    in_order = ordered[np.lexsort((ordered, micro_batch))]
    learned = rows[batch.in_loss[rows] > 0]
    groups = None if batch.group_of is None else len(np.unique(batch.group_of[learned]))
    counts = (
        int(batch.tokens[rows].sum()),
        int(batch.in_loss[rows].sum()),
        len(learned),
        groups,
    )
    degrees = np.repeat([part.degree for part in parts], steps) if at_degrees else None
    return MiniBatch(
        in_order, bounds, sum(steps), parts[0].schedule.start, *counts, degrees
    )


def _by_degree(
    rows: Integers, batch: _Batch, settings: Settings, at_degrees: Mapping[int, _Batch]
) -> list[Part]:
    rows = rows[np.lexsort((rows, -batch.sizes[rows], -batch.workloads[rows]))]
    once = np.zeros_like(rows)
    used = {
        degree: degree_batch.used(rows, once)[0]
        for degree, degree_batch in at_degrees.items()
    }
    weights = {
        degree: degree_batch.workloads[rows] for degree, degree_batch in at_degrees.items()
    }
    work = {degree: measures[1] for degree, measures in used.items()}
    classes = Classes(
        batch.sizes[rows], weights, used[1][0], work, settings.ranks, settings.max_tokens
    )

    def plan(degree: int, part: Integers, min_count: int) -> Part:
        shared = at_degrees[degree]
        schedule, ordered = _schedule(
            part, shared, replace(settings.at_degree(degree), min_count=min_count)
        )
        work = shared.used(ordered, schedule.grouping.group_of)[0][1]
        return Part(degree, schedule, ordered, schedule.time(work))

    return fastest_parts(rows, classes, settings.min_count, plan)


def _schedule(
    rows: Integers, batch: _Batch, settings: Settings
) -> tuple[Schedule, Integers]:
    if settings.max_patches is None or batch.images is None:
        return _scheduled(rows, batch, settings)
    caps = settings.request(len(batch.sizes)).caps
    once = np.ceil(batch.used(rows, np.zeros_like(rows))[0][2])
    least = fewest_bins(once[once > 0].astype(np.int64), settings.max_patches, len(rows))
    steps = max(settings.min_count, -(-least // settings.ranks))
    while True:
        schedule, ordered = _scheduled(rows, batch, replace(settings, min_count=steps))
        used = batch.used(ordered, schedule.grouping.group_of)
        spread_schedule = spread_patches(
            schedule, batch.used(ordered)[0], *used, caps, settings.max_patches
        )
        if spread_schedule is not None:
            if spread_schedule is not schedule and settings.order != "makespan":
                spread_schedule = arranged(
                    spread_schedule,
                    batch.used(ordered, spread_schedule.grouping.group_of)[0][1],
                    settings.order,
                )
            return spread_schedule, ordered
        steps = schedule.steps + 1 + schedule.steps // MORE_STEPS


def _scheduled(
    rows: Integers, batch: _Batch, settings: Settings
) -> tuple[Schedule, Integers]:
    tokens = batch.tokens
    sizes = batch.sizes
    workloads = batch.workloads
    request = settings.request(len(sizes))
    if settings.algorithm == "none":
        return schedule_in_order(sizes[rows], request), rows
    if settings.algorithm in PUBLISHED:
        return schedule_rank_locally(
            settings.algorithm, tokens[rows], sizes[rows], workloads[rows], request
        ), rows
    # The given order does not matter.
    ordered = rows[np.lexsort((rows, -sizes[rows], -workloads[rows]))]
    work = _work(ordered, batch, settings)
    if settings.order == "makespan" and settings.pipeline is not None:
        return schedule_on_pipeline(work, request, settings.pipeline), ordered
    return work.plan(request), ordered


def _work(ordered: Integers, batch: _Batch, settings: Settings) -> Work:
    sizes = batch.sizes[ordered]
    workloads = batch.workloads[ordered]
    if batch.shared_prefixes is None:
        request = settings.request(len(batch.sizes))

        def computed(schedule: Schedule) -> Floats:
            return computed_weights(schedule.grouping, workloads, request)

        packed = settings.layout == "packed"
        return Work(
            sizes,
            workloads,
            partial(schedule_evenly, sizes, workloads),
            computed,
            divisible=packed,
        )
    shared_prefixes = batch.shared_prefixes.select(ordered)

    def computed_once(schedule: Schedule) -> Floats:
        return shared_prefixes.computed(workloads, schedule.grouping.group_of)

    plan = partial(schedule_with_prefixes, sizes, workloads, shared_prefixes)
    return Work(sizes, workloads, plan, computed_once, divisible=False)
