"""Levels: what long sequences, which cannot be cut, ask of the times of micro-steps, and shapes that grant it.

    sequences, heaviest first --> every `ranks`-th --> its weight v_j: more than j * ranks sequences are as heavy
    best shape of times t --> sum over steps of min(q_j, floor(t / v_j)) above j, for every j?
                              no: raise the step that is nearest to the next multiple of v_j, best shape again --> times

A micro-batch of time t holds floor(t / v_j) such sequences at most, and no more than q_j under the caps, so that the
micro-steps of every plan pass this test. A shape that fails it cannot be dealt: its steps would come out longer.
"""

from dataclasses import dataclass

import numpy as np

from balancing.compiled import compiled
from balancing.grouping import Floats, Integers
from balancing.packing import Caps
from balancing.pipeline import Pipeline
from balancing.pipeline_shape import Shape, best_shape, split

REPAIRS = 4
"""A shape is repaired up to this many times."""
STRIDES = 6
"""The steps that are raised are first shifted by this share of all, then by less and less, as long as that helps."""
LEAST_GAIN = 1e-3
"""A shift helps if the makespan falls by more than this share."""
ROUNDS = 200
"""Rounds of the game for a repaired shape, about 1 ms of compiled code for 4 stages and 32 micro-steps."""
CLOSE = 1e-9
"""A time holds a sequence that is longer by this share: rounding errors."""


@dataclass(frozen=True, eq=False)
class Levels:
    """weights: float64 [levels], v_j, descending. together: int64 [levels], q_j >= 1."""

    weights: Floats
    together: Integers

    @property
    def arrays(self) -> tuple[Floats, Floats]:
        """Both as float64."""
        return self.weights, self.together.astype(np.float64)


def levels_of(sizes: Integers, weights: Floats, ranks: int, caps: Caps, most: int) -> Levels:
    """The first `most` levels of a mini-batch. sizes: int64 [n]. weights: float64 [n]; both in descending weight."""
    at = np.arange(0, len(weights), ranks)[:most]
    smallest = np.minimum.accumulate(sizes)[at]
    return Levels(weights[at], np.minimum(caps.max_tokens // smallest, caps.max_sequences))


def covered_shape(pipeline: Pipeline, steps: int, most: float, levels: Levels) -> Shape:
    """The best shape found that grants all levels; the mean of its times is 1, or above where the levels ask for more.

    pipeline, levels: in units of the mean micro-step. most: of a micro-step that no level raises. bound: 0, none.
    """
    free = best_shape(pipeline, steps, most)
    floor = _raised(free.times, np.zeros(steps), *levels.arrays)
    if not floor.any():
        return free
    best, floor = _granted(pipeline, most, levels, floor)
    stride = max(pipeline.stages, steps // STRIDES)
    while stride:
        for shift in (stride, -stride):
            other, raised = _granted(pipeline, most, levels, np.roll(floor, shift))
            if other.makespan < best.makespan * (1 - LEAST_GAIN):
                best, floor = other, raised
                break
        else:
            stride //= 2
    return best


def _granted(pipeline: Pipeline, most: float, levels: Levels, floor: Floats) -> tuple[Shape, Floats]:
    """The best shape found above `floor`, which is raised until all levels are granted, and the floor then."""
    for _ in range(REPAIRS):
        total = max(1.0, float(floor.mean()))
        shape = split(pipeline, floor / total, most, ROUNDS)
        shape = Shape(total * shape.times, total * shape.makespan, 0.0)
        raised = _raised(shape.times, floor, *levels.arrays)
        if (raised == floor).all():
            break
        floor = raised
    return shape, floor


@compiled
def _raised(times: Floats, floor: Floats, weights: Floats, together: Floats) -> Floats:
    """`floor`, raised until times above it grant all levels, or no step can hold more."""
    times, floor = np.maximum(times, floor), floor.copy()
    for level in range(len(weights)):
        weight, most = weights[level], together[level]
        if weight <= 0.0:
            break
        held = np.minimum(np.floor(times / weight * (1 + CLOSE)), most)
        missing = level + 1 - held.sum()
        while missing > 0 and held.min() < most:
            step = int(np.argmax(np.where(held < most, times / weight - held, -1.0)))
            held[step] += 1.0
            times[step] = floor[step] = weight * held[step]
            missing -= 1
    return floor
