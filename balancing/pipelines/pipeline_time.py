"""Simulate a mini-batch on a pipeline, and search for the order of micro-steps with the least makespan.

    Pipeline, m --> passes: what each waits for, whose micro-batch, which share    (built once for each m)
    times of m micro-steps --> every pass ends at its cost + the later of
                                 the end of the pass before it on its stage
                                 the arrival of its input from another stage    --> makespan, bubble, timeline

A micro-step of time t takes `share * t / (1 + backward)` forward in a part of the model, and `backward` times
that back. Data-parallel ranks of a stage gather its parameters together, so t is the most over the ranks.

    micro-steps in the order given, descending, light at both ends --> the fastest of these
      --> move one, or exchange two, as long as the simulated makespan falls --> order
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from balancing.basics.compiled import compiled
from balancing.basics.grouping import Floats, Integers
from balancing.errors import WeightError
from balancing.pipelines.pipeline import Action, Pipeline, actions, needs
from balancing.search.orders import small_ends

NOTHING = -1


@dataclass(frozen=True, eq=False)
class Passes:
    """All passes of a mini-batch, each behind the passes that it waits for, as int64 and float64 [passes].

    before: place of the pass before it on its stage. needed: place of the pass whose result it takes, or
    NOTHING.
    sent: time from the end of the needed pass until its result arrives. cost: share of the micro-batch's
    time.
    """

    before: Integers
    needed: Integers
    sent: Floats
    micro_batch: Integers
    stage: Integers
    part: Integers
    cost: Floats
    forward: Integers


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of every pass: float64 [passes], in the unit of the times."""

    passes: Passes
    starts: Floats
    ends: Floats


@lru_cache(maxsize=64)
def passes_of(pipeline: Pipeline, micro_batches: int) -> Passes:
    done = _in_order(pipeline, micro_batches)
    place = {key: number for number, key in enumerate(done)}
    last = dict.fromkeys(range(pipeline.stages), NOTHING)
    predecessor = []
    needed = []
    sent = []
    for number, (stage, action) in enumerate(done):
        source = needs(pipeline, stage, action)
        predecessor.append(last[stage])
        needed.append(NOTHING if source is None else place[source])
        sent.append(pipeline.transfer if source is not None and source[0] != stage else 0.0)
        last[stage] = number
    forward = np.array([action.kind == "forward" for _, action in done])
    part = np.array([action.chunk * pipeline.stages + stage for stage, action in done])
    cost = (
        np.array(pipeline.shares)[part]
        * np.where(forward, 1.0, pipeline.backward)
        / (1.0 + pipeline.backward)
    )
    return Passes(
        before=np.array(predecessor),
        needed=np.array(needed),
        sent=np.array(sent),
        micro_batch=np.array([action.micro_batch for _, action in done]),
        stage=np.array([stage for stage, _ in done]),
        part=part,
        cost=cost,
        forward=forward.astype(np.int64),
    )


def _in_order(pipeline: Pipeline, micro_batches: int) -> list[tuple[int, Action]]:
    orders = [actions(pipeline, stage, micro_batches) for stage in range(pipeline.stages)]
    at = [0] * pipeline.stages
    done = dict[tuple[int, Action], None]()
    while len(done) < sum(map(len, orders)):
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                source = needs(pipeline, stage, order[at[stage]])
                if source is not None and source not in done:
                    break
                done[stage, order[at[stage]]] = None
                at[stage] += 1
    return list(done)


def timeline(pipeline: Pipeline, times: ArrayLike) -> Timeline:
    """Return start and end of every pass.

    times: m numbers >= 0, each micro-step on the whole model, or [m, ranks], of which the most counts.
    Raises WeightError for other times, and CountError unless the schedule takes m micro-batches.
    """
    total = micro_step_times(pipeline, times)
    passes = passes_of(pipeline, len(total))
    ends = ends_of(
        passes.before, passes.needed, passes.sent, passes.micro_batch, passes.cost, total
    )
    return Timeline(passes, ends - passes.cost * total[passes.micro_batch], ends)


def makespan(pipeline: Pipeline, times: ArrayLike) -> float:
    """Return the time from the first pass to the end of the last. times, raises: as `timeline`."""
    return float(timeline(pipeline, times).ends.max())


def micro_step_times(pipeline: Pipeline, times: ArrayLike) -> Floats:
    """Return the most over ranks plus the overhead, float64 [m]. times, raises WeightError: as `timeline`."""
    array = np.asarray(times, np.float64)
    if array.ndim == 2 and array.size:
        array = array.max(axis=1)
    if array.ndim != 1 or array.size == 0:
        raise WeightError(
            f"times has shape {np.shape(times)}. Pass one for each micro-step, or [steps, ranks]."
        )
    bad = ~(np.isfinite(array) & (array >= 0))
    if bad.any():
        index = int(np.argmax(bad))
        raise WeightError(
            f"times[{index}] is {array[index]}. Every time must be finite and >= 0."
        )
    return array + pipeline.overhead


@compiled
def ends_of(
    predecessor: Integers,
    needed: Integers,
    sent: Floats,
    micro_batch: Integers,
    cost: Floats,
    times: Floats,
) -> Floats:
    """Return when each pass ends: float64 [passes]. times: float64 [m], overhead included."""
    ends = np.empty(len(predecessor))
    for number in range(len(predecessor)):
        start = 0.0
        if predecessor[number] >= 0:
            start = ends[predecessor[number]]
        if needed[number] >= 0:
            start = max(start, ends[needed[number]] + sent[number])
        ends[number] = start + cost[number] * times[micro_batch[number]]
    return ends


EFFORT = 10_000_000
"""Limit of one search: passes simulated, about 30 ms of compiled code."""
LEAST_GAIN = 1e-9
"""A change must reduce the makespan by more than this share."""


def fastest_order(pipeline: Pipeline, times: ArrayLike, effort: int = EFFORT) -> Integers:
    """Return the order of execution, never slower than as given, descending or `small_ends`: int64 [m].

    times, raises: as `timeline`.
    """
    total = micro_step_times(pipeline, times)
    passes = passes_of(pipeline, len(total))
    graph = (passes.before, passes.needed, passes.sent, passes.micro_batch, passes.cost)
    descending = np.argsort(-total, kind="stable")
    starts = [np.arange(len(total)), small_ends(total), descending, descending[::-1]]
    if np.ptp(total) == 0:
        return starts[0]
    simulations = max(1, effort // len(passes.cost) // len(starts))
    orders = [improved(*graph, total, start.copy(), simulations) for start in starts]
    return min(orders, key=lambda order: float(ends_of(*graph, total[order]).max()))


@compiled
def improved(
    predecessor: Integers,
    needed: Integers,
    sent: Floats,
    micro_batch: Integers,
    cost: Floats,
    times: Floats,
    order: Integers,
    simulations: int,
) -> Integers:
    """Move and exchange steps of `order` while the makespan falls, up to `simulations`."""
    best = ends_of(predecessor, needed, sent, micro_batch, cost, times[order]).max()
    steps = len(order)
    moved = True
    while moved and simulations > 0:
        moved = False
        for first in range(steps):
            for second in range(steps):
                for exchange in range(2):
                    if (
                        first == second
                        or (exchange == 1 and first > second)
                        or simulations <= 0
                    ):
                        continue
                    candidate = order.copy()
                    if exchange == 1:
                        candidate[first], candidate[second] = order[second], order[first]
                    elif first < second:
                        candidate[first:second] = order[first + 1 : second + 1]
                        candidate[second] = order[first]
                    else:
                        candidate[second + 1 : first + 1] = order[second:first]
                        candidate[second] = order[first]
                    time = ends_of(
                        predecessor, needed, sent, micro_batch, cost, times[candidate]
                    ).max()
                    simulations -= 1
                    if time < best * (1 - LEAST_GAIN):
                        best = time
                        order = candidate
                        moved = True
    return order
