"""How true predicted times of pipelines are: stages are processes that sleep as long as the plan says.

python -m tests.benchmarks.pipeline [--seconds 4] [--repeats 5] [--output docs/pipeline-benchmark.md]

plan --> times of micro-steps --> each stage, a process: its actions in order --> seconds, measured / predicted
                                  waits for what it needs (a pipe), sleeps, sends on
"""

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from statistics import median
from time import monotonic, sleep

import numpy as np
from numpy.typing import NDArray

from balancing.pipelines.pipeline import Action, Pipeline, actions, needs
from balancing.pipelines.pipeline_time import makespan
from tests.benchmarks.balancing.__main__ import machine
from tests.benchmarks.balancing.pipelines import STAGES, plan_of
from tests.benchmarks.balancing.table import Table
from tests.benchmarks.command import read_options, write_page

CASES = tuple(
    (name, how, virtual)
    for virtual in (1, 2)
    for name in ("lognormal", "agentic")
    for how in ("small_ends", "makespan")
)
INTRODUCTION = """# Pipelines: predicted and emulated time

Made by `python -m tests.benchmarks.pipeline --output {output}` on {machine}.

"""
Key = tuple[str, int, int, int]
"""Kind, micro-batch, chunk and stage of a pass."""


def main() -> None:
    """Emulate, print, write."""
    options = read_options(__doc__, seconds=4.0, repeats=5, output=None)
    text = _table(options.seconds, options.repeats).markdown()
    sys.stdout.write(text)
    introduction = INTRODUCTION.format(output=options.output, machine=machine())
    write_page(options.output, introduction + text)


def _table(seconds: float, repeats: int) -> Table:
    return Table(
        f"{STAGES} stages, each a process that sleeps",
        [
            "lengths",
            "virtual stages",
            "plan",
            "micro-steps",
            "predicted",
            "measured, median",
            "measured / predicted",
            "worst",
        ],
        [_row(*case, seconds, repeats) for case in CASES],
        "The plans of the first mini-batch of 8,192 sequences on 64 ranks (docs/balancing-benchmark.md), "
        f"scaled to a predicted time of {seconds:g} s. Each stage waits on a pipe for its input, sleeps for "
        f"the predicted time of its heaviest rank, and sends the result on. {repeats} runs of each. Worst: "
        "the run whose time is farthest from the prediction. Stages have real-time priority where the "
        "system grants it, so that other programs do not delay them. Sleeping passes, unlike computing "
        "ones, do not slow each other down.",
    )


def _row(name: str, order: str, virtual: int, seconds: float, repeats: int) -> list[str]:
    pipeline = Pipeline(STAGES, virtual)
    times = plan_of(name, 8192, 1, pipeline, order=order).predicted_times()[0]
    times = times * (seconds / makespan(pipeline, times))
    ratios = [emulated(pipeline, times) / seconds for _ in range(repeats)]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1.0))
    figures = [
        f"{seconds:.2f} s",
        f"{seconds * median(ratios):.3f} s",
        f"{median(ratios):.4f}",
        f"{worst:.4f}",
    ]
    return [name, str(virtual), order.replace("_", " "), str(len(times)), *figures]


def emulated(pipeline: Pipeline, times: NDArray[np.float64]) -> float:
    """Seconds from the start of all stages to the end of the last, each in a process of its own.

    times: float64 [m], seconds of each micro-step on the whole model.
    """
    context = multiprocessing.get_context("fork")
    # The stages in a ring: number s joins s and s + 1.
    pipes = [context.Pipe() for _ in range(pipeline.stages)]
    ready, ended = context.Barrier(pipeline.stages), context.SimpleQueue()
    stages = [
        context.Process(
            target=_stage, args=(pipeline, stage, times, pipes, ready, ended), daemon=True
        )
        for stage in range(pipeline.stages)
    ]
    for stage in stages:
        stage.start()
    spans = [ended.get() for _ in stages]
    for stage in stages:
        stage.join()
    return float(max(end for _, end in spans) - min(start for start, _ in spans))


def _stage(
    pipeline: Pipeline,
    stage: int,
    times: NDArray[np.float64],
    pipes: list[tuple[Connection, Connection]],
    ready: Barrier,
    ended: SimpleQueue,
) -> None:
    after, before = pipes[stage][0], pipes[stage - 1][1]
    plan = list(_durations(pipeline, stage, times))
    arrived: set[Key] = set()
    # Other programs then do not delay its waking; it only sleeps.
    with suppress(AttributeError, PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ready.wait()
    start = monotonic()
    for action, duration in plan:
        source = needs(pipeline, stage, action)
        if source is not None and source[0] != stage:
            _receive(_key(*source), [after, before], arrived)
        sleep(duration)
        (after if action.kind == "forward" else before).send(_key(stage, action))
    ended.put((start, monotonic()))


def _receive(key: Key, neighbours: list[Connection], arrived: set[Key]) -> None:
    """Wait until `key` has arrived; results that are not needed yet are kept."""
    while key not in arrived:
        for neighbour in wait(neighbours):
            arrived.add(neighbour.recv())


def _key(stage: int, action: Action) -> Key:
    return action.kind, action.micro_batch, action.chunk, stage


def _durations(
    pipeline: Pipeline, stage: int, times: NDArray[np.float64]
) -> Iterator[tuple[Action, float]]:
    """Each action of a stage, and its seconds."""
    for action in actions(pipeline, stage, len(times)):
        share = pipeline.shares[action.chunk * pipeline.stages + stage] / (
            1.0 + pipeline.backward
        )
        factor = 1.0 if action.kind == "forward" else pipeline.backward
        yield action, float(times[action.micro_batch] * share * factor)


if __name__ == "__main__":
    main()
