"""Search the layouts of a cluster for the fastest steps, best first, by branch and bound.

    training halves, by seconds --+--> pairs by lower bound --step_time--> the fastest layouts
    engine halves, by GPUs -------+

A layout is a training half and an engine half. Each half's seconds depend on it alone, and bound the step
from below: their sum without staleness, the larger with it. An engine half meets the training halves in the
order of their seconds, so that a pair is evaluated only when no pair with a lower bound is left.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

from balancing.time_model.generation import generation
from balancing.time_model.inputs import Layout, ModelShape, Workload
from balancing.time_model.machine import Efficiency, Machine
from balancing.time_model.step_time import StepTime, step_time
from balancing.time_model.training import training

Half = Mapping[str, Any]
"""Fields of a Layout."""
MOST_STAGES, MOST_SHARING = 16, 16
"""Largest pipeline and context-parallel degrees that are tried."""
STALENESS = (0, 1, 2)


@dataclass(frozen=True)
class Problem:
    """What a step does, and on which GPUs. See `step_time`."""

    shape: ModelShape
    workload: Workload
    machine: Machine
    efficiency: Efficiency

    def seconds(self, layout: Layout) -> StepTime:
        return step_time(self.shape, layout, self.workload, self.machine, self.efficiency)


def powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(max(1, most).bit_length())]


def training_halves(base: Layout, ranks: int, experts: int) -> Iterator[Half]:
    """Yield every way in which `ranks` GPUs share a model. experts: of a layer, 1 if dense."""
    nodes = max(1, ranks // base.gpus_per_node)
    for tp in powers(min(base.gpus_per_node, ranks)):
        for pp in powers(min(MOST_STAGES, ranks // tp)):
            for cp in powers(min(MOST_SHARING, ranks // tp // pp)):
                dp, remainder = divmod(ranks, tp * pp * cp)
                for replicate in sorted(
                    {1, nodes} if not remainder and dp % nodes == 0 else {1}
                ):
                    for ep in powers(min(experts, dp // replicate * cp * tp)):
                        if not remainder and dp // replicate * cp * tp % ep == 0:
                            half = {
                                "dp": dp,
                                "cp": cp,
                                "tp": tp,
                                "pp": pp,
                                "ep": ep,
                                "replicate": replicate,
                            }
                            yield half | {"compiled": base.compiled and tp == 1}


def engine_halves(base: Layout, shares: Mapping[str, float]) -> Iterator[tuple[int, Half]]:
    """Yield ranks of the training half, and engines on all GPUs of their placement.

    shares: GiB of a GPU for an engine, by placement. On several nodes, a node has either ranks or engines.
    """
    gpus = base.nodes * base.gpus_per_node
    node = base.gpus_per_node
    splits = range(node, gpus, node) if base.nodes > 1 else range(1, gpus)
    placed = {
        "colocated": [(gpus, gpus)],
        "apart": [(ranks, gpus - ranks) for ranks in splits],
    }
    for placement, share in shares.items():
        for ranks, engine_gpus in placed[placement]:
            for tp in powers(min(node, engine_gpus)):
                for staleness in STALENESS if placement == "apart" else STALENESS[:1]:
                    half = {
                        "placement": placement,
                        "staleness": staleness,
                        "engine_gib": share,
                    }
                    yield ranks, half | {"engines": engine_gpus // tp, "engine_tp": tp}


def best_layouts(
    problem: Problem,
    base: Layout,
    engines: Iterable[tuple[int, Half]],
    halves: Callable[[int], Iterable[Half]],
    fits: Callable[[Layout], bool],
) -> Iterator[tuple[StepTime, Layout]]:
    """Yield layouts that fit, fastest first. halves: allowed training halves of so many ranks, without
    duplicates.
    """
    trainers: dict[int, list[tuple[float, Layout]]] = {}
    bounds: list[
        tuple[float, int, int]
    ] = []  # (lower bound, engine half, place among its training halves)
    candidates: list[tuple[float, int, StepTime, Layout]] = []
    placed = list(engines)
    lowest = [_engine_bound(problem, replace(base, **half)) for _, half in placed]

    def push(number: int, place: int) -> None:
        ranks, _ = placed[number]
        if ranks not in trainers:
            trainers[ranks] = _by_seconds(problem, base, halves(ranks))
        if place < len(trainers[ranks]):
            heappush(bounds, (lowest[number](trainers[ranks][place][0]), number, place))

    for number in range(len(placed)):
        push(number, 0)
    evaluated = 0
    while bounds or candidates:
        if candidates and (not bounds or candidates[0][0] <= bounds[0][0]):
            _, _, seconds, layout = heappop(candidates)
            yield seconds, layout
            continue
        _, number, place = heappop(bounds)
        ranks, half = placed[number]
        layout = replace(trainers[ranks][place][1], **half)
        push(number, place + 1)
        if fits(layout):
            evaluated += 1
            step = problem.seconds(layout)
            heappush(candidates, (step.seconds, evaluated, step, layout))


def _by_seconds(
    problem: Problem, base: Layout, halves: Iterable[Half]
) -> list[tuple[float, Layout]]:
    timed_layouts = []
    for half in halves:
        layout = replace(base, **half)
        training_time = training(
            problem.shape, layout, problem.workload, problem.machine, problem.efficiency
        )
        timed_layouts.append(
            (
                training_time.forward
                + training_time.update
                + training_time.collectives
                + training_time.optimizer,
                layout,
            )
        )
    return sorted(timed_layouts, key=lambda timed_layout: timed_layout[0])


def _engine_bound(problem: Problem, layout: Layout) -> Callable[[float], float]:
    """Return the least seconds of a step from those of its training half."""
    generation_time = generation(
        problem.shape, layout, problem.workload, problem.machine, problem.efficiency
    )
    if layout.staleness:
        return lambda trained: max(
            trained, generation_time.prefill + generation_time.steady
        )
    return lambda trained: trained + generation_time.prefill + generation_time.decode
