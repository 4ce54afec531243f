"""Fit a machine's overheads and efficiencies to measured runs.

    micro-steps, generations, transfers of a run --terms, linear in what is fitted--> Machine, Efficiency

Each kind of work is fitted by least squares of relative errors, drawn towards the stated values, so that what
the runs do not show stays as it was: minimise mean (predicted / measured - 1)**2 + PRIOR * mean (value /
stated - 1)**2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from balancing.basics.grouping import Floats
from balancing.cost_model import non_negative_least_squares
from balancing.time_model.generation import batches, engine_step, prefill_flops, slots_of
from balancing.time_model.inputs import Layout, ModelShape, Workload
from balancing.time_model.machine import Efficiency, Machine
from balancing.time_model.step_time import transfer_terms
from balancing.time_model.training import micro_step_terms, sharding_seconds, training

PRIOR = 0.003
LEAST_SPREAD, REST_SPREAD = 0.1, 0.3
"""Smallest relative error that a fit claims, and that of phases' starts and ends."""
Rows = tuple[Floats, Floats]
"""Terms, float64 [n, k], and measured seconds, float64 [n]."""


@dataclass(frozen=True)
class Measured:
    """What a run showed. micro_steps: float64 [n, 3], tokens, squared tokens and seconds of updates on one
    rank.

    generations: each the samples of one step on all engines, which began together, and their seconds.
    transfers: seconds of each weight transfer. rest: seconds of each step outside of engines, micro-steps and
    transfers.
    """

    shape: ModelShape
    layout: Layout
    micro_steps: Floats
    generations: Sequence[tuple[Workload, float]] = ()
    transfers: Sequence[float] = ()
    rest: Sequence[float] = ()


def fit(
    runs: Sequence[Measured], machine: Machine, efficiency: Efficiency | None = None
) -> tuple[Machine, Efficiency]:
    """Fit to all runs together. Different model sizes tell products from overheads.

    Roles that had a CPU's memory for themselves show how fast they are, and the others `Machine.contention`.
    """
    efficiency = efficiency or Efficiency()
    spread = dict(efficiency.spread)
    crowds: list[float] = []
    for kind, processes, rows_of, names in KINDS:
        found_rows = [
            (run.layout.crowded(processes(run.layout)), rows_of(run, machine, efficiency))
            for run in runs
        ]
        rows = [
            (crowded, (x, y / machine.contention**crowded))
            for crowded, (x, y) in found_rows
            if len(y)
        ]
        if rows:
            alone = [row for crowded, row in rows if not crowded]
            prior = [_value(name, machine, efficiency) for name in names]
            values, spread[kind] = _fitted(alone or [row for _, row in rows], prior)
            crowds += [
                float(np.median(y / (x @ values)))
                for crowded, (x, y) in rows
                if crowded and alone
            ]
            parameters: dict[str, Any] = {
                name: 1 / value if name in INVERSE else value
                for name, value in zip(names, values, strict=True)
            }
            shares = {
                name: value
                for name, value in parameters.items()
                if hasattr(efficiency, name)
            }
            efficiency = replace(efficiency, **shares)
            machine = replace(
                machine,
                **{name: value for name, value in parameters.items() if name not in shares},
            )
    if crowds:
        machine = replace(
            machine, contention=max(1.0, machine.contention * float(np.mean(crowds)))
        )
    if rest := [_rest(run, machine, efficiency) for run in runs if len(run.rest)]:
        machine, spread["overheads"] = (
            replace(machine, phase=float(np.mean(rest))),
            REST_SPREAD,
        )
    return machine, replace(efficiency, spread=spread)


def _value(name: str, machine: Machine, efficiency: Efficiency) -> float:
    value = float(getattr(efficiency, name, None) or getattr(machine, name))
    return 1 / value if name in INVERSE else value


def _fitted(rows: Sequence[Rows], prior: Sequence[float]) -> tuple[list[float], float]:
    """Return a positive value for each term, and the root mean square of relative errors."""
    terms, seconds = (np.concatenate(column) for column in zip(*rows, strict=True))
    stated = np.maximum(np.asarray(prior, np.float64), 1e-12)
    relative = terms * stated / seconds[:, None] / np.sqrt(len(seconds))
    pull = np.sqrt(PRIOR / len(stated)) * np.eye(len(stated))
    target = np.concatenate(
        [np.full(len(seconds), 1 / np.sqrt(len(seconds))), np.diag(pull)]
    )
    values = stated * np.maximum(
        non_negative_least_squares(np.concatenate([relative, pull]), target), 0.01
    )
    error = float(np.sqrt(np.mean((terms @ values / seconds - 1) ** 2)))
    return values.tolist(), max(LEAST_SPREAD, error)


def _micro_steps(run: Measured, machine: Machine, efficiency: Efficiency) -> Rows:
    """On CPUs micro-steps wait for collectives, which are deducted."""
    (tokens, squared, seconds), layout = run.micro_steps.T, run.layout
    if not machine.launches_ahead:
        gathers = 2.0 * layout.reshard_after_forward
        reductions = 1.0 - layout.defer_gradient_reduction
        sent, waits = sharding_seconds(run.shape, layout, machine, gathers, reductions)
        seconds = np.maximum(seconds / 3, seconds - sent / efficiency.link - waits)
    return np.stack(
        micro_step_terms(run.shape, layout, machine, tokens, squared), axis=1
    ), seconds


def _generations(run: Measured, machine: Machine, efficiency: Efficiency) -> Rows:
    """Terms count engine steps, layers of them, requests in them, bytes, and FLOPs where bytes do not hide
    them.
    """
    rows = []
    for workload, _ in run.generations:
        slots = slots_of(run.shape, run.layout, workload)
        steps, running, tokens = batches(workload, run.layout.engines, slots)
        weights, read, flops, _ = engine_step(
            run.shape, run.layout, machine, efficiency, running, tokens
        )
        slow = flops > weights + read
        peak = machine.flops(run.layout.dtype) * run.layout.engines * run.layout.engine_tp
        moved = float(steps @ np.where(slow, 0.0, weights + read)) * efficiency.decode
        computed = float(steps @ np.where(slow, flops, 0.0)) * efficiency.prefill
        computed += prefill_flops(run.shape, workload, machine) / peak
        count = float(steps.sum())
        rows.append(
            [count, count * run.shape.layers, float(steps @ running), moved, computed]
        )
    return np.array(rows), np.array([seconds for _, seconds in run.generations])


def _transfers(run: Measured, machine: Machine, efficiency: Efficiency) -> Rows:
    once, weights, moved, *gathered = transfer_terms(run.shape, run.layout, machine)
    terms = [once, weights, moved / efficiency.decode, *gathered]
    return np.tile(terms, (len(run.transfers), 1)), np.asarray(run.transfers, np.float64)


def _rest(run: Measured, machine: Machine, efficiency: Efficiency) -> float:
    """Return seconds of a phase's start and end, without the optimiser."""
    workload = run.generations[0][0]
    optimizer = training(run.shape, run.layout, workload, machine, efficiency).optimizer
    return max(0.001, float(np.median(run.rest)) - optimizer) / (
        3 + (workload.forward_passes > 0)
    )


INVERSE = ("matmul", "attention", "elementwise", "decode", "prefill", "link", "host")
"""What seconds are in inverse proportion to."""
Kind = tuple[
    str,
    Callable[[Layout], int],
    Callable[[Measured, Machine, Efficiency], Rows],
    tuple[str, ...],
]
OF_ENGINES = ("engine_step", "engine_layer", "engine_sequence", "decode", "prefill")
OF_TRAINING = ("matmul", "attention", "elementwise", "kernel", "micro_batch")
KINDS: tuple[Kind, ...] = (
    (
        "generation",
        lambda layout: layout.engines * layout.engine_tp,
        _generations,
        OF_ENGINES,
    ),
    (
        "overheads",
        lambda layout: 1,
        _transfers,
        ("transfer", "weight", "host", "latency", "link"),
    ),
    ("training", lambda layout: layout.ranks, _micro_steps, OF_TRAINING),
)
"""Kinds of work, their processes, terms, and the fields of Machine and Efficiency that terms are multiplied
by.
"""
