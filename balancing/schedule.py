"""Which micro-batches run at the same time, and on which rank.

    sequences of a mini-batch -> micro-batches (ranks * steps of them) -> rows of `ranks` that weigh the same -> ranks

All ranks wait for the heaviest micro-batch of a micro-step (gradients or gathered parameters meet there), so the time
of a mini-batch is the sum over its steps of the heaviest, and the best that can be hoped for is workload / ranks.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from balancing.errors import CountError
from balancing.exchange import TOLERANCE, Groups, Limits, even_out
from balancing.packing import (
    Caps,
    CountRule,
    fewest_micro_batches,
    fill_evenly,
    heaviest_first,
    pack_evenly,
    pack_in_order,
)

Steps = list[Groups]
"""steps[s][r]: the sequences of rank r in micro-step s."""
Order = Literal["descending", "small_ends"]


@dataclass(frozen=True)
class Request:
    """What a schedule must keep: `steps` per rank follows from the caps, at least `count` allows, none wholly empty."""

    ranks: int
    caps: Caps
    count: CountRule
    allow_empty: bool
    order: Order


def schedule_in_order(sizes: NDArray[np.int64], request: Request) -> Steps:
    """The given order, one run of equal count for each rank, each cut where a cap is met."""
    chunks = np.array_split(np.arange(len(sizes)), request.ranks)
    needed = max(len(pack_in_order(sizes[chunk], request.caps, CountRule())) for chunk in chunks if len(chunk))
    steps = _steps(needed, min(len(chunk) for chunk in chunks), len(sizes), request)
    schedule: Steps = [[[] for _ in chunks] for _ in range(steps)]
    first = 0  # of a rank with fewer micro-batches than steps: where the rank before it ended, so that no step is empty
    for rank, chunk in enumerate(chunks):
        filled = CountRule(max(1, min(steps, len(chunk))))
        cuts = pack_in_order(sizes[chunk], request.caps, filled) if len(chunk) else []
        for step, cut in zip(sorted((first + i) % steps for i in range(len(cuts))), cuts, strict=True):
            schedule[step][rank] = chunk[cut].tolist()
        first = (first + len(cuts)) % steps
    return schedule


def schedule_evenly(sizes: NDArray[np.int64], weights: NDArray[np.float64], request: Request) -> Steps:
    """All micro-batches of the mini-batch, over all ranks, planned at once; the better of two ways.

    Dealt: micro-batches of equal weight, sorted, one row of `ranks` for each step. Levelled: where a few long
    sequences outweigh a fair share, the steps that hold them are filled up to their level, and later steps get less.
    """
    candidates = [_dealt(sizes, weights, request)]
    steps = len(candidates[0])
    if _may_be_levelled(candidates[0], weights, request):
        levelled = _levelled(sizes, weights, steps, request)
        candidates += [levelled] if levelled is not None else []
    best = min(candidates, key=lambda schedule: time_of(schedule, weights))
    return _to_ranks(_in_order(best, weights, request.order), weights)


def time_of(steps: Steps, weights: NDArray[np.float64]) -> float:
    """The sum over micro-steps of the heaviest rank's weight."""
    return float(sum(max(weights[group].sum() for group in step) for step in steps))


def _may_be_levelled(steps: Steps, weights: NDArray[np.float64], request: Request) -> bool:
    """Packed, no empty micro-batch, and more than 0.1 % over the ideal of workload / ranks."""
    if request.caps.padded or len(weights) < len(steps) * request.ranks:
        return False
    return time_of(steps, weights) > float(weights.sum()) / request.ranks * (1 + 1e-3)


def _steps(needed: int, fewest_on_a_rank: int, sequences: int, request: Request) -> int:
    """Micro-batches per rank; CountError if a step, or without `allow_empty` a micro-batch, would have no sequence."""
    steps = request.count.at_least(needed, sequences)
    if not request.allow_empty and steps > fewest_on_a_rank:
        raise CountError(
            f"a mini-batch of {sequences} sequences cannot fill {steps} micro-batches on each of "
            f"{request.ranks} ranks; set allow_empty=True, or lower ranks, min_count or multiple_of"
        )
    return steps


def _dealt(sizes: NDArray[np.int64], weights: NDArray[np.float64], request: Request) -> Steps:
    ranks, sequences = request.ranks, len(sizes)
    needed = -(-fewest_micro_batches(sizes, request.caps) // ranks)
    steps = _steps(needed, sequences // ranks, sequences, request)
    rule = CountRule(min(steps * ranks, sequences), 1)
    groups = pack_evenly(sizes, weights, request.caps, rule)
    while len(groups) > steps * ranks:  # the lower bound could not be reached
        steps = _steps(-(-len(groups) // ranks), sequences // ranks, sequences, request)
        groups = pack_evenly(sizes, weights, request.caps, CountRule(min(steps * ranks, sequences), 1))
    groups += [[] for _ in range(steps * ranks - len(groups))]
    ordered = heaviest_first(groups, sizes, weights)
    rows = [ordered[start : start + ranks] for start in range(0, len(ordered), ranks)]
    rows = _without_empty_steps(rows)
    return rows if request.caps.padded else [_evened(row, sizes, weights, request.caps) for row in rows]


def _without_empty_steps(rows: Steps) -> Steps:
    """Give every step a sequence: a step with none takes a micro-batch of the step with most."""
    for row in rows:
        if not any(row):
            donor = max(rows, key=lambda other: sum(1 for group in other if group))
            position = max(index for index, group in enumerate(donor) if group)
            row[0], donor[position] = donor[position], row[0]
    return rows


def _levelled(sizes: NDArray[np.int64], weights: NDArray[np.float64], steps: int, request: Request) -> Steps | None:
    """Fill step after step, longest sequences first, to the level that its longest or a fair share sets."""
    left = np.argsort(-weights, kind="stable")
    rows: Steps = []
    for step in range(steps - 1):
        if len(left) == 0:
            return None
        fair = weights[left].sum() / (request.ranks * (steps - step))
        row = _fill_to_level(left, sizes, weights, request, max(weights[left[0]], fair))
        taken = np.concatenate([np.asarray(group, np.int64) for group in row])
        left = left[~np.isin(left, taken)]
        rows.append(row)
    last = fill_evenly(sizes[left], weights[left], request.caps, request.ranks) if len(left) else None
    if last is None:
        return None
    rows.append([left[group].tolist() for group in last])
    if not all(all(row) for row in rows):
        return None
    return [_evened(row, sizes, weights, request.caps) for row in rows]


def _fill_to_level(
    left: NDArray[np.int64],
    sizes: NDArray[np.int64],
    weights: NDArray[np.float64],
    request: Request,
    level: float,
) -> Groups:
    """Longest first into the lightest rank that stays within level and caps; what finds no place is left out."""
    row: Groups = [[] for _ in range(request.ranks)]
    loads, room = np.zeros(request.ranks), np.full(request.ranks, request.caps.max_tokens)
    places = np.full(request.ranks, request.caps.max_sequences)
    limit = level * (1 + TOLERANCE)
    for index in left.tolist():
        fits = (loads + weights[index] <= limit) & (room >= sizes[index]) & (places > 0)
        if not fits.any():
            continue
        rank = int(np.argmin(np.where(fits, loads, np.inf)))
        row[rank].append(index)
        loads[rank] += weights[index]
        room[rank] -= sizes[index]
        places[rank] -= 1
    return row


def _evened(row: Groups, sizes: NDArray[np.int64], weights: NDArray[np.float64], caps: Caps) -> Groups:
    """Exchanges between the ranks of one micro-step."""
    return even_out(row, weights, sizes, Limits(caps.max_tokens, caps.max_sequences), only_heaviest=True)


def _in_order(steps: Steps, weights: NDArray[np.float64], order: Order) -> Steps:
    """Heaviest step first; or, for pipelines, small ones at both ends where they keep the bubbles short."""
    descending = sorted(steps, key=lambda step: -max(weights[group].sum() for group in step))
    return descending if order == "descending" else descending[1::2][::-1] + descending[0::2]


def _to_ranks(steps: Steps, weights: NDArray[np.float64]) -> Steps:
    """Within each step the heaviest micro-batch goes to the rank with least so far."""
    so_far = np.zeros(len(steps[0]))
    placed = []
    for step in steps:
        loads = np.array([weights[group].sum() for group in step])
        row: Groups = [[] for _ in step]
        for rank, position in zip(np.argsort(so_far, kind="stable"), np.argsort(-loads, kind="stable"), strict=True):
            row[rank] = step[position]
            so_far[rank] += loads[position]
        placed.append(row)
    return placed
