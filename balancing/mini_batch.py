"""Hold a planned mini-batch: its rows by micro-step and rank, and the part that one rank gets."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from balancing.basics.grouping import Floats, Grouping, Integers
from balancing.search.assignment import Start
from balancing.search.packing import Layout


@dataclass(frozen=True, eq=False)
class MicroStep:
    """Micro-batches that run at the same time. ranks[r]: int64, ascending, may be empty.

    degree: neighbours that share a micro-batch. Each of them lists it.
    """

    ranks: tuple[Integers, ...]
    degree: int = 1


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """One optimiser step.

    rows: int64 [sequences], by micro-step, then rank, ascending in each micro-batch.
    bounds: int64 [steps * ranks + 1]. Micro-batch `i = step * ranks + rank` is
    `rows[bounds[i] : bounds[i + 1]]`.
    start: the initial assignment before refinement, or the algorithm.
    degrees: int64 [steps], ranks that share a micro-batch, or None for 1. Its rows are at the first of these
    ranks.
    tokens, loss_tokens, sequences, groups: totals over all ranks, by which losses divide. Sequences and
    groups without a loss token do not count.
    """

    rows: Integers = field(repr=False)
    bounds: Integers = field(repr=False)
    steps: int
    start: Start
    tokens: int
    loss_tokens: int
    sequences: int
    groups: int | None = None
    degrees: Integers | None = None

    @property
    def micro_steps(self) -> tuple[MicroStep, ...]:
        """Return views of `rows`. They are built at every access, so that a pickled plan has only
        two arrays.
        """
        parts = [self.rows[start:stop] for start, stop in pairwise(self.bounds.tolist())]
        steps = zip(
            self.first_ranks().tolist(), self.degree_of_steps().tolist(), strict=True
        )
        micro_steps = []
        for places, degree in steps:
            micro_steps.append(MicroStep(tuple(parts[place] for place in places), degree))
        return tuple(micro_steps)

    def degree_of_steps(self) -> Integers:
        return np.ones(self.steps, np.int64) if self.degrees is None else self.degrees

    def degree_of_rows(self) -> Integers:
        ranks = (len(self.bounds) - 1) // self.steps
        return self.degree_of_steps()[self.micro_batch_of_rows() // ranks]

    def first_ranks(self) -> Integers:
        """Return the number of the micro-batch that each rank computes: int64 [steps, ranks]."""
        numbers = np.arange(len(self.bounds) - 1).reshape(self.steps, -1)
        return (
            numbers
            if self.degrees is None
            else numbers - numbers % numbers.shape[1] % self.degrees[:, None]
        )

    def sums(self, values: Integers | Floats) -> Floats:
        """Sum `values`, one per sequence of the global batch, over micro-batches: float64 [steps, ranks].

        Ranks that share a micro-batch have equal parts of its sum.
        """
        return self._parts(self._micro_batches().sums(values[self.rows]))

    def predicted_times(self, workloads: Floats, layout: Layout) -> Floats:
        """Return micro-batch times, float64 [steps, ranks]. A padded row costs as much as its longest
        neighbour.
        """
        micro_batches = self._micro_batches()
        times = workloads[self.rows]
        times = micro_batches.heaviest(times) if layout == "padded" else times
        return self._parts(micro_batches.sums(times))

    def _parts(self, sums: Floats) -> Floats:
        parts: Floats = sums[self.first_ranks()] / self.degree_of_steps()[:, None]
        return parts

    def micro_batch_of_rows(self) -> Integers:
        return np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))

    def _micro_batches(self) -> Grouping:
        return Grouping(self.micro_batch_of_rows(), len(self.bounds) - 1)


@dataclass(frozen=True)
class RankMiniBatch:
    """One rank's part of a mini-batch.

    micro_batches: (start, stop) in `RankPlan.rows`. tokens, loss_tokens, sequences, groups: as in
    `MiniBatch`.
    degrees: ranks that share each micro-batch.
    """

    micro_batches: tuple[tuple[int, int], ...]
    tokens: int
    loss_tokens: int
    sequences: int
    groups: int | None = None
    degrees: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class RankPlan:
    """One rank's part of a plan. rows: int64, its sequences in order of execution."""

    rank: int
    rows: Integers
    mini_batches: tuple[RankMiniBatch, ...]

    def degree_of_rows(self) -> Integers:
        """Return how many ranks share each row, int64."""
        cuts = [cut for part in self.mini_batches for cut in part.micro_batches]
        degrees = np.array(
            [degree for part in self.mini_batches for degree in part.degrees], np.int64
        )
        return np.repeat(degrees, [stop - start for start, stop in cuts])


def degree_of(mini_batches: Iterable[MiniBatch]) -> Integers:
    """Return how many ranks share each sequence of the global batch, int64 [n]."""
    rows, degrees = zip(
        *((part.rows, part.degree_of_rows()) for part in mini_batches), strict=True
    )
    row_degrees: Integers = np.concatenate(degrees)[np.argsort(np.concatenate(rows))]
    return row_degrees
