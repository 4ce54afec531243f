"""Fit a machine's overheads and efficiencies to measured runs.

micro-steps, generations, transfers of a run --terms of the model, linear in what is fitted--> Machine, Efficiency

Each kind of work is fitted by least squares of relative errors, drawn towards the stated values, so that what the runs
do not show stays as it was: minimise mean (predicted / measured - 1)**2 + PRIOR * mean (value / stated - 1)**2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from balancing.cost_model import non_negative_least_squares
from balancing.grouping import Floats
from balancing.time_model.generation import batches, engine_step, prefill_flops, slots_of
from balancing.time_model.inputs import Layout, ModelShape, Workload
from balancing.time_model.machine import Efficiency, Machine
from balancing.time_model.step_time import transfer_bytes
from balancing.time_model.training import micro_step_terms, training

PRIOR = 0.003
LEAST_SPREAD = 0.1
"""Smallest relative error that a fit claims."""


@dataclass(frozen=True)
class Measured:
    """What a run showed. micro_steps: float64 [n, 3], tokens, squared tokens and seconds of updates on one rank.

    generations: each the samples of one step on all engines, which began together, and their seconds. transfers:
    seconds of each weight transfer. rest: seconds of each step outside of engines, micro-steps and transfers.
    """

    shape: ModelShape
    layout: Layout
    micro_steps: Floats
    generations: Sequence[tuple[Workload, float]] = ()
    transfers: Sequence[float] = ()
    rest: Sequence[float] = field(default=())


def fit(runs: Sequence[Measured], machine: Machine, efficiency: Efficiency | None = None) -> tuple[Machine, Efficiency]:
    """Fit to all runs together. Different model sizes tell products from overheads."""
    stated = efficiency or Efficiency()
    spread = dict(stated.spread)
    training_rows = [_micro_steps(run, machine) for run in runs if len(run.micro_steps)]
    if training_rows:
        names = ("matmul", "attention", "elementwise")
        prior = [1 / getattr(stated, name) for name in names] + [machine.kernel, machine.micro_batch]
        values, spread["training"] = _fitted(training_rows, prior)
        stated = replace(stated, **dict(zip(names, (1 / values[:3]).tolist(), strict=True)))
        machine = replace(machine, kernel=float(values[3]), micro_batch=float(values[4]))
    engine_rows = [_generations(run, machine, stated) for run in runs if run.generations]
    if engine_rows:
        names = ("engine_step", "engine_layer", "engine_sequence")
        prior = [getattr(machine, name) for name in names] + [1 / stated.decode, 1 / stated.prefill]
        values, spread["generation"] = _fitted(engine_rows, prior)
        machine = replace(machine, **dict(zip(names, values[:3].tolist(), strict=True)))
        stated = replace(stated, decode=1 / float(values[3]), prefill=1 / float(values[4]))
    transfers = [_transfers(run, stated) for run in runs if run.transfers]
    if transfers:
        values, _ = _fitted(transfers, [machine.transfer, 1 / machine.host])
        machine = replace(machine, transfer=float(values[0]), host=1 / float(values[1]))
    rest = [_rest(run, machine, stated) for run in runs if len(run.rest)]
    if rest:
        machine = replace(machine, phase=float(np.mean(rest)))
        spread["overheads"] = 0.3
    return machine, replace(stated, spread=spread)


Rows = tuple[Floats, Floats]
"""Terms, float64 [n, k], and measured seconds, float64 [n]."""


def _fitted(rows: Sequence[Rows], prior: Sequence[float]) -> tuple[Floats, float]:
    """Return a positive value for each term, and the root mean square of relative errors."""
    terms = np.concatenate([each for each, _ in rows])
    seconds = np.concatenate([each for _, each in rows])
    stated = np.maximum(np.asarray(prior, np.float64), 1e-12)
    relative = terms * stated / seconds[:, None] / np.sqrt(len(seconds))
    pull = np.sqrt(PRIOR / len(stated)) * np.eye(len(stated))
    target = np.concatenate([np.full(len(seconds), 1 / np.sqrt(len(seconds))), np.diag(pull)])
    found = np.maximum(non_negative_least_squares(np.concatenate([relative, pull]), target), 0.01)
    values: Floats = found * stated
    error = float(np.sqrt(np.mean((terms @ values / seconds - 1) ** 2)))
    return values, max(LEAST_SPREAD, error)


def _micro_steps(run: Measured, machine: Machine) -> Rows:
    tokens, squared, seconds = run.micro_steps.T
    return np.stack(micro_step_terms(run.shape, run.layout, machine, tokens, squared), axis=1), seconds


def _generations(run: Measured, machine: Machine, efficiency: Efficiency) -> Rows:
    """Terms count engine steps, layers of them, requests in them, bytes, and FLOPs where bytes do not hide them."""
    rows = []
    for workload, _ in run.generations:
        slots = slots_of(run.shape, run.layout, workload)
        steps, running, tokens = batches(workload, run.layout.engines, slots)
        weights, read, flops, _ = engine_step(run.shape, run.layout, machine, efficiency, running, tokens)
        slow = flops > weights + read
        peak = machine.flops(run.layout.dtype) * run.layout.engines * run.layout.engine_tp
        moved = float(steps @ np.where(slow, 0.0, weights + read)) * efficiency.decode
        computed = float(steps @ np.where(slow, flops, 0.0)) * efficiency.prefill
        computed += prefill_flops(run.shape, workload, machine) / peak
        count = float(steps.sum())
        rows.append([count, count * run.shape.layers, float(steps @ running), moved, computed])
    return np.array(rows), np.array([seconds for _, seconds in run.generations])


def _transfers(run: Measured, efficiency: Efficiency) -> Rows:
    seconds = np.asarray(run.transfers, np.float64)
    size = transfer_bytes(run.shape, run.layout) / 1e9 / efficiency.decode
    return np.tile([1.0, size], (len(seconds), 1)), seconds


def _rest(run: Measured, machine: Machine, efficiency: Efficiency) -> float:
    """Return seconds of a phase's start and end, without the optimiser."""
    workload = run.generations[0][0]
    optimizer = training(run.shape, run.layout, workload, machine, efficiency).optimizer
    return max(0.001, float(np.median(run.rest)) - optimizer) / (3 + (workload.forward_passes > 0))
