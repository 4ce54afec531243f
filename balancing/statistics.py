"""Figures of a plan; the same figures for the batch as it was given, and after Karmarkar-Karp alone."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from balancing.alignment import round_up
from balancing.differenced import differenced
from balancing.padded import take_in_order

if TYPE_CHECKING:
    from balancing.plan import MiniBatch, Plan

# A grid is float64 [steps, ranks] of one mini-batch: a sum over each micro-batch, 0 where it is empty.
Rows = list[list[NDArray[np.int64]]]
"""rows[s][r]: int64, the sequences of rank r in micro-step s of one mini-batch."""


def plan_statistics(plan: "Plan", width: int | None = None) -> dict[str, float]:
    """Plain floats by name; `before` is the given order, dealt to ranks in runs of equal count and cut at the cap.

    tokens_per_rank/{min,max,mean,difference} and tokens_per_rank_before/...: real tokens of a rank in the whole batch.
    imbalance_karmarkar_karp/...: after largest differencing over ranks, and over each rank's micro-batches, as many as
    planned, whatever caps say; all else is what refinement adds. from_karmarkar_karp: share of mini-batches whose plan
    was refined from there; the others end better from another start (schedule.py).
    imbalance/ranks: max / mean - 1 of the workload of ranks. imbalance/micro_steps: the time of synchronous
    micro-steps (sum over steps of the heaviest rank) over workload / ranks, - 1. imbalance_before/...: before.
    idle_share, idle_share_before: share of ranks' time spent waiting in micro-steps.
    predicted_time/{total,longest_micro_step} and predicted_time_before/...: sum and maximum over micro-steps of the
    heaviest rank, in the cost model's unit; padding, which `padding_share` tells, is not counted.
    cap_fill: mean share of max_tokens that a micro-batch takes, empty ones included. padding_share: share of
    computed tokens that are not real ones. padding_removed/longest_row: share of the cells of a tensor, its rows as
    wide as the longest sequence, that is not computed; padding_removed/width: of one with rows of `width` tokens,
    as systems pad that do not look at lengths; left out without `width`. micro_batches: their number per rank.
    empty_micro_batches: over ranks.
    """
    after = [rows_of(mini_batch) for mini_batch in plan.mini_batches]
    before = [_given_rows(indices_of(mini_batch), plan) for mini_batch in plan.mini_batches]
    return {
        **_token_spread("tokens_per_rank", after, plan.lengths),
        **_token_spread("tokens_per_rank_before", before, plan.lengths),
        **_waiting("", predicted_grids(plan)),
        **_waiting("_before", grids(before, plan.workloads)),
        **_imbalance("_karmarkar_karp", [_after_karmarkar_karp(part, plan) for part in plan.mini_batches]),
        "from_karmarkar_karp": float(np.mean([part.start == "karmarkar_karp" for part in plan.mini_batches])),
        **_filling(after, plan),
        **_padding_removed(after, plan, width),
    }


def predicted_grids(plan: "Plan") -> list[NDArray[np.float64]]:
    """float64 [steps, ranks] for each mini-batch: the workload of every micro-batch, padding not counted."""
    return [mini_batch.sums(plan.workloads) for mini_batch in plan.mini_batches]


def grids(mini_batches: Sequence[Rows], values: NDArray[np.int64] | NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """float64 [steps, ranks] for each mini-batch: `values` (one for each sequence) summed over each micro-batch."""
    return [_grid(rows, values) for rows in mini_batches]


def step_time(mini_batches: Sequence[NDArray[np.float64]]) -> float:
    """The sum over all micro-steps of the heaviest rank: the time of synchronous micro-steps."""
    return float(sum(grid.max(axis=1).sum() for grid in mini_batches))


def ideal_time(mini_batches: Sequence[NDArray[np.float64]]) -> float:
    """All workload over ranks: the time if no rank ever waited."""
    return float(sum(grid.mean(axis=1).sum() for grid in mini_batches))


def rows_of(mini_batch: "MiniBatch") -> Rows:
    """Who computes what in a mini-batch, as lists."""
    return [list(step.ranks) for step in mini_batch.micro_steps]


def indices_of(mini_batch: "MiniBatch") -> NDArray[np.int64]:
    """int64, ascending: the sequences of a mini-batch."""
    return np.sort(mini_batch.rows)


def _given_rows(indices: NDArray[np.int64], plan: "Plan") -> Rows:
    """Ascending index order: runs of equal count, each cut at the cap; ranks with fewer cuts wait at the end."""
    sizes = round_up(plan.lengths, plan.length_multiple)
    padded = plan.layout == "padded"
    local: list[list[NDArray[np.int64]]] = []
    for chunk in np.array_split(indices, plan.ranks):
        cuts = take_in_order(sizes[chunk], plan.max_tokens, len(indices), padded=padded) if len(chunk) else []
        local.append([chunk[start:stop] for start, stop in cuts])
    steps = max(len(rows) for rows in local)
    nothing = np.empty(0, np.int64)
    return [[rows[step] if step < len(rows) else nothing for rows in local] for step in range(steps)]


def _grid(rows: Rows, values: NDArray[np.int64] | NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([[values[group].sum() for group in step] for step in rows], np.float64)


def _token_spread(name: str, mini_batches: list[Rows], lengths: NDArray[np.int64]) -> dict[str, float]:
    per_rank = np.sum([grid.sum(axis=0) for grid in grids(mini_batches, lengths)], axis=0)
    lowest, highest = float(per_rank.min()), float(per_rank.max())
    return {
        f"{name}/min": lowest,
        f"{name}/max": highest,
        f"{name}/mean": float(per_rank.mean()),
        f"{name}/difference": highest - lowest,
    }


def _after_karmarkar_karp(mini_batch: "MiniBatch", plan: "Plan") -> NDArray[np.float64]:
    """float64 [steps, ranks]: the workload of every micro-batch after largest differencing alone, no cap looked at."""
    weights = np.sort(plan.workloads[mini_batch.rows])[::-1]
    return differenced(weights, plan.ranks, mini_batch.steps).sums(weights).reshape(mini_batch.steps, -1)


def _imbalance(suffix: str, mini_batches: list[NDArray[np.float64]]) -> dict[str, float]:
    per_rank = np.sum([grid.sum(axis=0) for grid in mini_batches], axis=0)
    ideal = ideal_time(mini_batches)
    return {
        f"imbalance{suffix}/ranks": float(per_rank.max()) / ideal - 1.0,
        f"imbalance{suffix}/micro_steps": step_time(mini_batches) / ideal - 1.0,
    }


def _waiting(suffix: str, mini_batches: list[NDArray[np.float64]]) -> dict[str, float]:
    time, ideal = step_time(mini_batches), ideal_time(mini_batches)
    return {
        **_imbalance(suffix, mini_batches),
        f"idle_share{suffix}": max(0.0, 1.0 - ideal / time),
        f"predicted_time{suffix}/total": time,
        f"predicted_time{suffix}/longest_micro_step": float(max(grid.max() for grid in mini_batches)),
    }


def _filling(mini_batches: list[Rows], plan: "Plan") -> dict[str, float]:
    taken = _taken(mini_batches, plan)
    return {
        "cap_fill": float(taken.mean()) / plan.max_tokens,
        "padding_share": 1.0 - float(plan.lengths.sum()) / float(taken.sum()),
        "micro_batches": float(sum(len(rows) for rows in mini_batches)),
        "empty_micro_batches": float((taken == 0).sum()),
    }


def _padding_removed(mini_batches: list[Rows], plan: "Plan", width: int | None) -> dict[str, float]:
    computed = float(_taken(mini_batches, plan).sum())
    widths = {"longest_row": int(plan.lengths.max()), "width": width}
    return {
        f"padding_removed/{name}": 1.0 - computed / (len(plan.lengths) * cells)
        for name, cells in widths.items()
        if cells is not None
    }


def padding_share(plan: "Plan") -> float:
    """Share of the computed tokens that are not real ones."""
    return _filling([rows_of(mini_batch) for mini_batch in plan.mini_batches], plan)["padding_share"]


def _taken(mini_batches: list[Rows], plan: "Plan") -> NDArray[np.float64]:
    """float64, tokens that each micro-batch takes of its cap, over all mini-batches, steps and ranks."""
    sizes = round_up(plan.lengths, plan.length_multiple)
    groups = (group for rows in mini_batches for step in rows for group in step)
    return np.array([computed_tokens(sizes[group], plan.layout) for group in groups], np.float64)


def computed_tokens(sizes: NDArray[np.int64], layout: str) -> int:
    """Tokens that a micro-batch of sequences of these aligned sizes takes: their sum, or rows times the longest."""
    if len(sizes) == 0:
        return 0
    return int(len(sizes) * sizes.max() if layout == "padded" else sizes.sum())
