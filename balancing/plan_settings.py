"""Check the settings of a plan: caps, counts, cost model, algorithm and order, without the batch."""

from dataclasses import dataclass, replace
from math import lcm
from typing import Literal

import numpy as np

from balancing.basics.grouping import Caps, Floats, Integers
from balancing.basics.image_patches import Images
from balancing.basics.validation import one_of, positive_integer
from balancing.context_degrees import ContextDegrees
from balancing.cost_model import CostModel
from balancing.errors import OptionError
from balancing.pipelines.pipeline import Pipeline
from balancing.search.assignment import Order, Request
from balancing.search.baselines import PUBLISHED
from balancing.search.packing import CountRule, Layout

PlanAlgorithm = Literal[
    "karmarkar_karp", "load_balance", "none", "verl", "roll", "mindspeed_rl"
]
"""`load_balance` is an alias of `karmarkar_karp`."""


@dataclass(frozen=True)
class Settings:
    """Arguments of `plan_batch` that do not describe the batch. `analysis.explain` plans again with them.

    ranks: number of data-parallel ranks. It need not divide the number of sequences.
    max_tokens: cap on tokens of a micro-batch (of a context-parallel group: `alignment.group_cap`). Twice the
    longest sequence is a good choice.
    max_sequences: cap on sequences of a micro-batch, or None. max_patches: cap on patches of a micro-batch,
    `cost_model.patches` an image token. Packed layout only.
    min_count, multiple_of: each rank's micro-batches in a mini-batch are at least the first, a multiple of
    the second.
    cost_model: the workload to balance, tokens by default.
    algorithm: `karmarkar_karp` is largest differencing, refined under the caps (search/schedule.py). `none`
    keeps the given order with equal counts per rank, cut at the caps. `verl`, `roll` and `mindspeed_rl` plan
    rank by rank as these systems do, but keep the caps (search/baselines.py). Only `karmarkar_karp` plans
    with prefixes.
    order: micro-steps of `karmarkar_karp` by `descending` workload, with light ones at both ends
    (`small_ends`), or for the least pipeline `makespan` (pipelines/pipeline_plan.py). The default is
    `makespan` with a pipeline, else `descending`.
    allow_empty: allow empty micro-batches if there are fewer sequences than micro-batches over all ranks.
    layout, length_multiple: as in `pack`.
    pipeline: each rank is a pipeline of stages. Counts are also multiples of its `count_multiple`.
    context_degrees: each micro-step has one of these degrees. Then `ranks` counts each rank of a
    context-parallel group and `max_tokens` is the cap of one. Needs `karmarkar_karp`, packed rows,
    `multiple_of=1` and no pipeline.
    """

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
    context_degrees: ContextDegrees | None = None

    def __post_init__(self) -> None:
        optional = ("max_sequences", "max_patches")
        for name in (
            "ranks",
            "max_tokens",
            "min_count",
            "multiple_of",
            "length_multiple",
            *optional,
        ):
            value = getattr(self, name)
            if value is not None or name not in optional:
                object.__setattr__(self, name, positive_integer(value, name))
        one_of(self.layout, "layout", ("packed", "padded"))
        if self.max_patches and self.layout == "padded":
            raise OptionError(
                f"max_patches={self.max_patches}: requires layout='packed'. Leave it out."
            )
        if self.algorithm == "load_balance":
            object.__setattr__(self, "algorithm", "karmarkar_karp")
        one_of(self.algorithm, "algorithm", ("karmarkar_karp", "none", *PUBLISHED))
        one_of(self.order, "order", ("descending", "small_ends", "makespan"))
        if self.order == "makespan" and (
            self.pipeline is None or self.algorithm != "karmarkar_karp"
        ):
            raise OptionError(
                "order='makespan' plans for a pipeline. Pass pipeline and algorithm='karmarkar_karp'."
            )
        if self.context_degrees is not None:
            self._check_degrees(self.context_degrees)

    def _check_degrees(self, degrees: ContextDegrees) -> None:
        if self.ranks % degrees.maximum:
            raise OptionError(
                f"ranks={self.ranks} is not a multiple of context_degrees.maximum={degrees.maximum}"
            )
        if (
            self.pipeline
            or self.layout == "padded"
            or self.algorithm != "karmarkar_karp"
            or self.multiple_of > 1
        ):
            raise OptionError(
                "context_degrees needs the packed layout, algorithm='karmarkar_karp', multiple_of=1 and no "
                "pipeline"
            )

    @property
    def most_shared(self) -> int:
        """Return how many ranks may share a micro-batch."""
        return self.context_degrees.maximum if self.context_degrees else 1

    def at_degree(self, degree: int) -> "Settings":
        """Return the settings of micro-steps in which so many ranks count as one."""
        degrees = self.context_degrees
        costs = degrees.costs(self.cost_model, degree) if degrees else self.cost_model
        ranks = self.ranks // degree
        cap = self.max_tokens * degree
        return replace(
            self, ranks=ranks, max_tokens=cap, cost_model=costs, context_degrees=None
        )

    def workload(
        self, lengths: Integers, images: Images | None, degree_of: Integers
    ) -> Floats:
        if self.context_degrees is None:
            return self.cost_model.workload(lengths, images)
        return self.context_degrees.workload(self.cost_model, lengths, images, degree_of)

    def request(self, sequences: int) -> Request:
        multiple_of = lcm(
            self.multiple_of, self.pipeline.count_multiple if self.pipeline else 1
        )
        return Request(
            ranks=self.ranks,
            caps=Caps(
                self.max_tokens, self.max_sequences or sequences, self.layout == "padded"
            ),
            count=CountRule(self.min_count, multiple_of),
            allow_empty=self.allow_empty,
            order=self.order,
        )

    def patches(self, images: Images | None, depths: Integers) -> Floats:
        """Return the patches of the images that begin in each sequence's first tokens, float64 [n]."""
        return (
            np.zeros(len(depths))
            if images is None
            else self.cost_model.patches * images.within(depths, images.tokens)
        )


def default_order(algorithm: str, *, pipelined: bool) -> Order:
    return (
        "makespan"
        if pipelined and algorithm in ("karmarkar_karp", "load_balance")
        else "descending"
    )
