"""Simulate continuous batching: how long engines sample a step's responses, and how full they are.

    responses of one engine --slots--> start and end of each, in steps --sums--> batch and tokens of a step
    an engine step = max(weights + keys and values read / bandwidth, FLOPs / peak) + host

A running request gets one token in each engine step, so that starts and ends depend only on lengths and
slots. Between two of these events the batch is constant, and the tokens that it reads grow evenly.
"""

from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace

import numpy as np

from balancing.basics.grouping import Floats
from balancing.basics.windows import attended_squares
from balancing.time_model.inputs import Layout, ModelShape, Workload
from balancing.time_model.machine import Efficiency, Machine

MOST_SIMULATED = 512
"""Requests simulated of an engine. Of more, every k-th stands for k."""


@dataclass(frozen=True)
class Generation:
    """Seconds of a step's generation on the engine with the longest response.

    prefill, decode: until the last response ends, if all begin together. steady: until as many responses end,
    if engines stay as full as slots and requests allow. busy: mean share of the decode time in which an
    engine has a request. bound: what an engine step waits for mostly.
    """

    prefill: float
    decode: float
    steady: float
    busy: float
    bound: str


def engine_step(
    shape: ModelShape,
    layout: Layout,
    machine: Machine,
    efficiency: Efficiency,
    batch: Floats,
    tokens: Floats,
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return seconds for weights, keys and values, FLOPs, and the host, of `batch` requests that read
    `tokens` tokens.

    An engine step takes `max(weights + keys and values, FLOPs) + host`, also for arrays.
    """
    rate = 1e9 * machine.bandwidth * efficiency.decode * layout.engine_tp
    unused = np.maximum(0.0, 1 - shape.experts_active / shape.experts) ** batch
    weights = (shape.parameters - shape.expert_parameters * unused) * layout.bytes / rate
    read = batch * shape.kept(tokens / np.maximum(batch, 1)) * layout.bytes / rate
    flops = (
        2
        * shape.active
        * batch
        / (machine.flops(layout.dtype) * efficiency.prefill * layout.engine_tp)
    )
    host = (
        machine.engine_step
        + machine.engine_layer * shape.layers
        + machine.engine_sequence * batch
    )
    if layout.engine_tp > 1:
        bus = machine.bus(layout.engine_tp, layout.gpus_per_node) * efficiency.link
        waits = machine.latency * (0.5 if layout.engine_tp <= layout.gpus_per_node else 2.0)
        host = host + shape.layers * (
            2 * waits + 4 * batch * shape.hidden * layout.bytes / bus
        )
    return weights, read, flops, host


def half_way(workload: Workload) -> float:
    """Return the mean tokens that a running request has sampled: E[R**2] / 2 E[R], as long ones
    run longer.
    """
    return float((workload.responses**2).mean() / (2 * workload.responses.mean()))


def slots_of(shape: ModelShape, layout: Layout, workload: Workload) -> int:
    """Return the requests that an engine runs at a time: at most max_concurrent, and what its
    memory holds.
    """
    room = layout.engine_gib * 2**30 * layout.engine_tp - shape.parameters * layout.bytes
    prompts = workload.prompts.mean() / (
        workload.samples_per_prompt if layout.shared_prompts else 1
    )
    kept = layout.bytes * shape.kept(half_way(workload) + prompts)
    held = room / kept if kept else layout.max_concurrent
    return int(min(layout.max_concurrent, max(1, held)))


@lru_cache(maxsize=4096)
def _starts(
    workload: Workload, engines: int, slots: int
) -> tuple[Floats, Floats, Floats, float]:
    """Return prompts, starts and ends of one engine's requests, in engine steps, and how many each stands
    for.

    The engine gets every `engines`-th request by length, from the longest on, and begins them in a fixed
    random order.
    """
    order = workload.order[::engines]
    weight = -(-len(order) // MOST_SIMULATED)
    order = order[::weight]
    order = np.random.default_rng(0).permutation(order)
    responses = workload.responses[order]
    room = max(1, slots // weight)
    starts = np.zeros(len(order))
    if len(order) > room:
        ends = responses[:room].tolist()
        heapify(ends)
        for number, length in enumerate(responses[room:].tolist(), start=room):
            starts[number] = ends[0]
            heapreplace(ends, ends[0] + length)
    return workload.prompts[order], starts, starts + responses, float(weight)


@lru_cache(maxsize=4096)
def batches(workload: Workload, engines: int, slots: int) -> tuple[Floats, Floats, Floats]:
    """Return engine steps between events, and there the requests and the mean tokens of keys and values."""
    prompts, starts, ends, weight = _starts(workload, engines, slots)
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    change = np.repeat([weight, -weight], len(starts))[order]
    held = np.concatenate([prompts - starts, starts - prompts])[order] * weight
    times = times[order]
    steps = np.diff(times)
    running = np.cumsum(change)[:-1]
    offset = np.cumsum(held)[:-1]
    mask = steps > 0
    middle = (times[:-1] + steps / 2)[mask]
    return steps[mask], running[mask], offset[mask] + running[mask] * middle


def generation(
    shape: ModelShape,
    layout: Layout,
    workload: Workload,
    machine: Machine,
    efficiency: Efficiency,
) -> Generation:
    """Predict a step's generation."""
    model = (shape, layout, machine, efficiency)
    slots = slots_of(shape, layout, workload)
    steps, running, tokens = batches(workload, layout.engines, slots)
    weights, read, flops, host = engine_step(*model, running, tokens)
    crowd = machine.contention ** layout.crowded(layout.engines * layout.engine_tp)
    decode = crowd * float(steps @ (np.maximum(weights + read, flops) + host))
    rate = (
        machine.flops(layout.dtype) * efficiency.prefill * layout.engines * layout.engine_tp
    )
    prefill = crowd * prefill_flops(shape, workload, machine) / rate
    # Engines that never drain run as many requests as the schedule keeps in flight.
    flight = min(slots, (layout.staleness + 1) * workload.samples / layout.engines)
    full = engine_step(
        *model,
        np.array([flight]),
        np.array([flight * (workload.prompts.mean() + half_way(workload))]),
    )
    step_seconds = crowd * float((np.maximum(full[0] + full[1], full[2]) + full[3])[0])
    steady = step_seconds * float(workload.responses.sum()) / layout.engines / flight
    parts = {
        "weights": weights,
        "keys and values": read,
        "host": host,
        "FLOPs": np.maximum(flops - weights - read, 0),
    }
    bound = max(parts, key=lambda name: float(steps @ parts[name]))
    longest = workload.responses[workload.order[: layout.engines]]
    busy = float(1 - (longest[0] - longest.mean()) / steps.sum())
    return Generation(prefill, decode, steady, busy, bound)


def prefill_flops(shape: ModelShape, workload: Workload, machine: Machine) -> float:
    """Count the FLOPs of prompts. Engines find a group's prompt in their cache, by whole blocks."""
    mean = float(workload.prompts.mean())
    cached_share = mean // machine.kv_block * machine.kv_block / mean if mean else 0.0
    computed = workload.samples * mean - cached_share * workload.repeated_tokens
    attended = float(attended_squares(mean, shape.windows)) / mean if mean else 0.0
    return computed * (2 * shape.active + shape.attention * attended)
