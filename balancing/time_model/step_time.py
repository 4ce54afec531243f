"""Predict the seconds of a training step, and what it waits for.

    generation (prefill, decode) + reward --+
    log_probs + update + collectives -------+--> schedule --> step seconds, idle shares, limit
    transfer, sleep_wake, overheads --------+

Without staleness the parts follow each other. With staleness S, the step is the longest of: training,
generation on engines that stay full, and (slowest group + training) / (S + 1), because a group is in flight
for S + 1 steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from balancing.time_model.generation import Generation, generation
from balancing.time_model.inputs import Layout, ModelShape, Workload
from balancing.time_model.machine import Efficiency, Machine
from balancing.time_model.training import training

ENGINES = {"prefill": "generation", "decode": "generation", "reward": "overheads"}
TRAINER = {
    "log_probs": "training",
    "update": "training",
    "optimizer": "training",
    "collectives": "collectives",
}
TRAINER |= {"other": "overheads"}
BOTH = {"transfer": "overheads", "sleep_wake": "overheads"}
"""Phases by where they run, with what their error follows, see `Efficiency.spread`."""

WEIGHTS = 12
"""Weights of a layer, without experts: seven products, norms and biases."""


class Interval(NamedTuple):
    """Seconds, and the lowest and highest that measurements may show."""

    seconds: float
    low: float
    high: float


@dataclass(frozen=True)
class StepTime:
    """Prediction of a step. phases: by name, in the order of a step. trainer_idle, engine_idle: shares of the
    step.

    limit: what the step waits for mostly, such as `decode: keys and values`.
    """

    phases: Mapping[str, Interval]
    step: Interval
    trainer_idle: float
    engine_idle: float
    limit: str

    @property
    def seconds(self) -> float:
        return self.step.seconds


def step_time(
    shape: ModelShape,
    layout: Layout,
    workload: Workload,
    machine: Machine,
    efficiency: Efficiency = Efficiency(),  # noqa: B008 - frozen
) -> StepTime:
    """Predict a step. The layout must be valid and fit into memory, which nothing here checks."""
    sampling = generation(shape, layout, workload, machine, efficiency)
    trained = training(shape, layout, workload, machine, efficiency)
    reward = workload.samples * workload.reward_seconds / workload.reward_workers
    seconds = {
        "prefill": sampling.prefill,
        "decode": sampling.decode,
        "reward": max(workload.reward_seconds, reward - sampling.decode),
        "log_probs": trained.forward,
        "update": trained.update,
        "optimizer": trained.optimizer,
        "collectives": trained.collectives,
        "transfer": _transfer(shape, layout, machine, efficiency),
        "sleep_wake": machine.sleep if layout.placement == "colocated" else 0.0,
        "other": machine.phase * (3 + (workload.forward_passes > 0)),
    }
    errors = {
        name: efficiency.spread[kind] for name, kind in (ENGINES | TRAINER | BOTH).items()
    }
    phases = {
        name: Interval(s, s * (1 - errors[name]), s * (1 + errors[name]))
        for name, s in seconds.items()
    }
    steps = []
    for bound in range(3):  # expected, lowest, highest
        bound_seconds = {name: phase[bound] for name, phase in phases.items()}
        steps.append(_scheduled(bound_seconds, sampling, layout, workload))
    total, limit = steps[0]
    on_trainer = sum(seconds[name] for name in (*TRAINER, *BOTH))
    on_engines = (
        (sampling.prefill + sampling.decode) * sampling.busy
        if not layout.staleness
        else sampling.steady + sampling.prefill
    )
    bounds = {"decode": sampling.bound, "update": trained.bound}
    return StepTime(
        phases,
        Interval(*(step for step, _ in steps)),
        max(0.0, 1 - on_trainer / total),
        max(0.0, 1 - min(total, on_engines) / total),
        f"{limit}: {bounds[limit]}" if limit in bounds else limit,
    )


def _scheduled(
    seconds: Mapping[str, float], sampling: Generation, layout: Layout, workload: Workload
) -> tuple[float, str]:
    """Return the step's seconds and the phase that limits it."""
    engines = sum(seconds[name] for name in ENGINES)
    trainer = sum(seconds[name] for name in TRAINER)
    both = sum(seconds[name] for name in BOTH)
    if not layout.staleness:
        return engines + trainer + both, max(seconds, key=lambda name: seconds[name])
    steady = seconds["prefill"] + sampling.steady * seconds["decode"] / sampling.decode
    groups = workload.samples / workload.samples_per_prompt
    window = max(1.0, layout.window * (layout.staleness + 1) * groups) / groups
    flight = layout.staleness + 1 + max(0.0, window - 1)
    slowest = (engines * max(1.0, steady / engines) + trainer + both) / flight
    bounds = {
        "update": trainer + both,
        "decode": steady + both,
        "the slowest group": slowest,
    }
    if layout.placement == "shared_memory":  # engines and ranks share cores
        cores = layout.nodes * layout.gpus_per_node
        bounds["cores"] = (
            both
            + (steady * layout.engines * layout.engine_tp + trainer * layout.ranks) / cores
        )
    limit = max(bounds, key=lambda name: bounds[name])
    return bounds[limit], limit


def _transfer(
    shape: ModelShape, layout: Layout, machine: Machine, efficiency: Efficiency
) -> float:
    """Gather all weights, then send them to the engines: on the same GPU, over the network, or through host
    memory.
    """
    _, weights, moved, collectives, sent = transfer_terms(shape, layout, machine)
    near = machine.bandwidth if layout.placement == "colocated" else machine.host
    loaded = 0.0 if layout.placement == "apart" else moved / (near * efficiency.decode)
    overheads = machine.transfer + weights * machine.weight
    return overheads + loaded + collectives * machine.latency + sent / efficiency.link


def transfer_terms(
    shape: ModelShape, layout: Layout, machine: Machine
) -> tuple[float, float, float, float, float]:
    """Return what a transfer's seconds are linear in.

    1, weights, GB that a GPU or host writes and reads to load an engine's weights, collectives (one gathers
    each weight), and seconds at peak of links.
    """
    size = shape.parameters * layout.bytes
    ranks = layout.dp * layout.cp * layout.tp
    sent = 0.0
    if ranks > 1:
        sent = size / machine.bus(ranks, layout.gpus_per_node)
    if layout.placement == "apart":
        sent += size / (1e9 * (machine.network if layout.nodes > 1 else machine.link))
    weights = float(WEIGHTS * shape.layers)
    return 1.0, weights, 2 * size / layout.engine_tp / 1e9, weights * (ranks > 1), sent
