"""Choose over how many ranks each sequence of a mini-batch is cut: the context-parallel degree of its
micro-step.

    4 ranks   degree 4   [ 0   0   0   0 ]   one micro-batch in a step, its cap and its speed those of 4 ranks
              degree 2   [ 1   1 | 2   2 ]   ranks that share a micro-batch are neighbours
              degree 1   [ 3 | 4 | 5 | 6 ]

    sequences, heaviest first --cut into classes of falling degree--> each planned as with a fixed degree
                                                                      (search/schedule.py)

All blocks of a micro-step have one degree. A class is cut where the heaviest sequences, each spread over its
ranks, fill whole micro-steps. A quick estimate compares the cuts. The best few and all fixed degrees are
planned, so that no fixed degree is faster.

A rank of d computes a sequence of L tokens in a L / d + b L^2 / d + a e s(d) L. The last term sends its heads
to the other ranks, which short sequences pay for little gain: s = (d - 1) / d^2 with Ulysses, (d - 1) / d on
a ring.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from balancing.basics.grouping import Floats, Integers
from balancing.basics.image_patches import Images
from balancing.basics.validation import positive_integer
from balancing.cost_model import CostModel
from balancing.errors import CountError, OptionError
from balancing.search.assignment import Schedule

PLANNED = 4
"""At most so many cuts are planned, of the least estimated time."""
NEAR = 3e-3
"""A plan within this share of the least estimate is final."""
SLACK = 0.05
"""Cuts are estimated up to this share above the best."""
STEPS_TRIED = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89)
"""Micro-steps of a class, counted from the fewest that the caps need."""


@dataclass(frozen=True)
class ContextDegrees:
    """maximum: the largest degree, a power of two. Degrees are 1, 2, 4, ... maximum.

    exchange: e, time to send what all heads of a token exchange, as a share of its `CostModel.linear`. ring:
    whether keys and values go from rank to rank, instead of heads to all. Raises OptionError for values out
    of range.
    """

    maximum: int
    exchange: float = 0.0
    ring: bool = False

    def __post_init__(self) -> None:
        most = positive_integer(self.maximum, "maximum")
        if most & (most - 1):
            raise OptionError(
                f"maximum={most} of ContextDegrees must be a power of two. Set 2, 4, 8, ..."
            )
        if not np.isfinite(self.exchange) or self.exchange < 0:
            raise OptionError(
                f"exchange={self.exchange!r} of ContextDegrees must be finite and >= 0"
            )

    @property
    def choices(self) -> tuple[int, ...]:
        """Return all degrees, the largest first."""
        return tuple(2**power for power in reversed(range(self.maximum.bit_length())))

    def costs(self, model: CostModel, degree: int) -> CostModel:
        """Return the costs on each of the `degree` ranks that share a sequence. Each computes all of its
        images.
        """
        sent = (degree - 1) / degree if self.ring else (degree - 1) / degree**2
        return replace(
            model,
            linear=model.linear * (1 / degree + self.exchange * sent),
            quadratic=model.quadratic / degree,
        )

    def workload(
        self,
        model: CostModel,
        lengths: Integers,
        images: Images | None,
        degree_of: Integers,
    ) -> Floats:
        """Return the cost of each sequence over all ranks that share it. degree_of: int64 [n]."""
        work = np.empty(len(lengths))
        for degree in np.unique(degree_of).tolist():
            costs = degree * self.costs(model, degree).workload(lengths, images)
            work[degree_of == degree] = costs[degree_of == degree]
        return work


class Part(NamedTuple):
    """Micro-steps of one degree. rows: int64, the sequences of `schedule`. time: its, 0 if unknown."""

    degree: int
    schedule: Schedule
    rows: Integers
    time: float = 0.0


PlanPart = Callable[[int, Integers, int], Part]
"""(degree, rows, fewest micro-steps) -> Part. Raises CountError."""
Cuts = tuple[tuple[int, int], ...]
"""(degree, stop) of each class. It begins where the class before stops."""


def fastest_parts(
    rows: Integers, classes: "Classes", min_count: int, plan: PlanPart
) -> list[Part]:
    """Return the fastest plan found. rows: int64 [n], as in `classes`. Raises CountError if no plan has
    `min_count`.
    """
    fixed = [
        (classes.bound(degree), ((degree, len(rows)),))
        for degree in classes.degrees
        if classes.least[0] <= degree
    ]
    best = list[Part]()
    time = np.inf
    problem = CountError("no degree has room for the longest sequence")
    promising = classes.promising()
    for least, cuts in [*promising, *reversed(fixed)]:
        if least >= time or (len(cuts) > 1 and time <= promising[0][0] * (1 + NEAR)):
            continue
        try:
            parts = _planned(rows, cuts, min_count, plan)
        except CountError as error:
            problem = error
            continue
        if sum(part.time for part in parts) < time:
            best = parts
            time = sum(part.time for part in parts)
    if not best:
        raise problem
    return best


def _planned(rows: Integers, cuts: Cuts, min_count: int, plan: PlanPart) -> list[Part]:
    parts = list[Part]()
    start = 0
    for number, (degree, stop) in enumerate(cuts, start=1):
        missing = (
            min_count - sum(part.schedule.steps for part in parts)
            if number == len(cuts)
            else 1
        )
        parts.append(plan(degree, rows[start:stop], max(1, missing)))
        start = stop
    return parts


class Classes:
    """Estimate the time of classes. n sequences, heaviest first.

    sizes: int64 [n], tokens. weights: by degree, float64 [n], time of each alone. tokens, work: what each
    adds if all share their prefixes. max_tokens: cap of one rank.
    """

    def __init__(
        self,
        sizes: Integers,
        weights: Mapping[int, Floats],
        tokens: Floats,
        work: Mapping[int, Floats],
        ranks: int,
        max_tokens: int,
    ) -> None:
        self.degrees = tuple(sorted(weights, reverse=True))
        self._ranks = ranks
        self._cap = max_tokens
        self._sizes = sizes
        self._weights = weights
        self._tokens = np.append(0.0, np.cumsum(tokens))
        self._work = {
            degree: np.append(0.0, np.cumsum(degree_work))
            for degree, degree_work in work.items()
        }
        needed = 2 ** np.ceil(np.log2(np.maximum(1, -(-sizes // max_tokens)))).astype(
            np.int64
        )
        self.least = np.append(np.maximum.accumulate(needed[::-1])[::-1], 1)
        """int64 [n + 1], the least degree whose cap holds every sequence from i on."""
        self._fastest: Any = cache(self._fastest_from)

    def bound(self, degree: int) -> float:
        """Bound the time of all sequences at a degree. Degree 1 bounds all plans."""
        evenly = float(self._work[degree][-1]) / (self._ranks // degree)
        return evenly if degree == 1 else max(evenly, float(self._weights[degree][0]))

    def promising(self) -> list[tuple[float, Cuts]]:
        """Return the cuts with the least estimated time, and that time."""
        options = sorted(self._options(self.degrees[0], 0))
        return [option for option in options[:PLANNED] if option[0] < np.inf]

    def _fastest_from(self, degree: int, start: int) -> tuple[float, Cuts]:
        return min(self._options(degree, start), default=(np.inf, ()))

    def _options(self, degree: int, start: int) -> Iterator[tuple[float, Cuts]]:
        """Yield (time, cuts) of the sequences from `start` on with at most this degree."""
        every = len(self._sizes)
        if start == every:
            yield 0.0, ()
            return
        if self.least[start] > degree:
            return
        yield self._whole(degree, start), ((degree, every),)
        if degree > 1:
            yield self._fastest(degree // 2, start)
            yield from self._divided(degree, start)

    def _divided(self, degree: int, start: int) -> Iterator[tuple[float, Cuts]]:
        attempts = 0
        least = self._fastest(degree // 2, start)[0]
        for stop, time in self._micro_steps(degree, start):
            evenly = time + float(self._work[1][-1] - self._work[1][stop]) / self._ranks
            # Later cuts are slower still.
            if evenly >= least * (1 + SLACK) or attempts > STEPS_TRIED[-1]:
                return
            if self.least[stop] <= degree // 2 and stop < len(self._sizes):
                attempts += 1
                if attempts in STEPS_TRIED:
                    rest_time, cuts = self._fastest(degree // 2, stop)
                    least = min(least, time + rest_time)
                    yield time + rest_time, ((degree, stop), *cuts)

    def _micro_steps(self, degree: int, start: int) -> Iterator[tuple[int, float]]:
        """Yield where each next micro-step ends, and the time until then: of the heaviest
        sequence of each.
        """
        time = 0.0
        every = len(self._sizes)
        while start < every:
            start, level = self._next(degree, start)
            time += level
            yield start, time

    def _next(self, degree: int, start: int) -> tuple[int, float]:
        """Return where a micro-step ends that lasts as long as the heaviest sequence left, and how long that
        is.
        """
        blocks = self._ranks // degree
        level = float(self._weights[degree][start])
        work = self._work[degree]
        full = np.searchsorted(work, work[start] + blocks * level * (1 + 1e-9), "right") - 1
        held = (
            np.searchsorted(
                self._tokens, self._tokens[start] + self._ranks * self._cap, "right"
            )
            - 1
        )
        stop = max(start + 1, int(min(full, held)))
        apart = start + blocks
        # No two of these fit together.
        if stop > apart and self._sizes[apart] > self._cap * degree // 2:
            stop = apart
        return stop, level

    def _whole(self, degree: int, start: int) -> float:
        """Estimate the time of one class of all sequences from `start` on: heavy ones first, the
        rest evenly.
        """
        blocks = self._ranks // degree
        work = self._work[degree]
        time = 0.0
        every = len(self._sizes)
        while start < every:
            rest_time = float(work[-1] - work[start]) / blocks
            steps = np.ceil(
                (self._tokens[-1] - self._tokens[start]) / (self._ranks * self._cap)
            )
            if self._weights[degree][start] * steps <= rest_time:
                return time + rest_time
            start, level = self._next(degree, start)
            time += level
        return time
