"""Compute statistics of a plan, compared with the given order, with Karmarkar-Karp alone, and with lower
bounds.
"""

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from balancing.basics.alignment import round_up
from balancing.basics.grouping import Caps, Floats, Integers
from balancing.mini_batch import MiniBatch, degree_of
from balancing.pipelines.micro_step_targets import least_makespan
from balancing.pipelines.pipeline import Pipeline
from balancing.pipelines.pipeline_plan import most_in_a_step
from balancing.pipelines.pipeline_time import makespan
from balancing.plan import Plan
from balancing.prefixes.bounds import prefix_step_time_bound
from balancing.search.assignment import karmarkar_karp_twice
from balancing.search.lower_bounds import minimum_step_times, step_time_bound
from balancing.search.orders import small_ends
from balancing.search.padded import take_in_order

# A grid is float64 [steps, ranks] of one mini-batch: a sum over each micro-batch, 0 for an empty one.
Rows = list[list[Integers]]
"""rows[s][r]: int64, the sequences of rank r in micro-step s of one mini-batch."""


def plan_statistics(plan: Plan, width: int | None = None) -> dict[str, float]:
    """Return floats by name, as docs/metrics.md explains.

    `_before`: the given order, dealt to ranks in runs of equal count and cut at the cap. `_karmarkar_karp`:
    largest differencing over ranks and their micro-batches, without caps or refinement. imbalance/ranks: max
    / mean - 1 of the workload of ranks. imbalance/micro_steps: time of synchronous micro-steps / (workload /
    ranks) - 1.
    over_bound: time of synchronous micro-steps / `lower_bound` - 1.
    predicted_time: of the heaviest rank, in the cost model's unit, without padding.
    cap_fill: mean share of max_tokens that a micro-batch takes, including empty ones.
    padding_removed: share of cells not computed, of a tensor as wide as the longest sequence, or as `width`.
    context_degree: ranks that share a token, on average. exchange_share: share of the predicted work that
    they add.
    image_share: share of the predicted work that is the vision tower's. most_patches: of a micro-batch.
    pipeline/over_bound: predicted time / a lower bound for as many micro-steps - 1. pipeline/small_ends:
    makespan in the published order / predicted time - 1.
    """
    planned = predicted_grids(plan)
    baseline = [_given_rows(indices_of(part), plan) for part in plan.mini_batches]
    alone = _without_exchange(plan)
    return {
        **_token_spread(
            "tokens_per_rank", [part.sums(plan.lengths) for part in plan.mini_batches]
        ),
        **_token_spread(
            "tokens_per_rank_before",
            _grids(baseline, plan.lengths / plan.settings.most_shared),
        ),
        **_waiting("", planned),
        "over_bound": step_time(planned) / lower_bound(plan) - 1.0,
        **_waiting("_before", _grids(baseline, alone)),
        **_imbalance(
            "_karmarkar_karp",
            [_after_karmarkar_karp(part, plan, alone) for part in plan.mini_batches],
        ),
        "from_karmarkar_karp": float(
            np.mean([part.start == "karmarkar_karp" for part in plan.mini_batches])
        ),
        **_filling(plan, width),
        **(_of_degrees(plan, alone) if plan.settings.context_degrees else {}),
        **(_of_images(plan) if plan.images else {}),
        **(_on_pipeline(plan, plan.settings.pipeline) if plan.settings.pipeline else {}),
    }


def _without_exchange(plan: Plan) -> Floats:
    """Return the work of each sequence, for one of the ranks that may share it: float64 [n]."""
    return (
        plan.settings.cost_model.workload(plan.lengths, plan.images)
        / plan.settings.most_shared
    )


def _of_degrees(plan: Plan, alone: Floats) -> dict[str, float]:
    degrees = degree_of(plan.mini_batches)
    added = 1.0 - plan.settings.most_shared * float(alone.sum() / plan.workloads.sum())
    return {
        "context_degree": float(np.average(degrees, weights=plan.lengths)),
        "exchange_share": added,
    }


def _of_images(plan: Plan) -> dict[str, float]:
    cost_model = plan.settings.cost_model
    shared = np.zeros_like(plan.lengths) if plan.shared is None else plan.shared
    every, text = (
        float(
            (
                costs.workload(plan.lengths, plan.images)
                - costs.workload(shared, plan.images)
            ).sum()
        )
        for costs in (cost_model, cost_model.with_images(0.0))
    )
    share = 1.0 - text / every
    most = max(float(part.sums(plan.computed_patches).max()) for part in plan.mini_batches)
    return {"image_share": share, "most_patches": most}


def _on_pipeline(plan: Plan, pipeline: Pipeline) -> dict[str, float]:
    times = plan.predicted_times()
    spans = float(plan.predicted_makespans().sum())
    published = sum(
        makespan(pipeline, part_times[small_ends(part_times)]) for part_times in times
    )
    return {
        "pipeline/predicted_time": spans,
        "pipeline/bubble": bubble(plan, pipeline),
        "pipeline/over_bound": spans
        / sum(_makespan_bound(part, plan, pipeline) for part in plan.mini_batches)
        - 1.0,
        "pipeline/small_ends": published / spans - 1.0,
    }


def bubble(plan: Plan, pipeline: Pipeline) -> float:
    """Return the share of time in which a stage waits. The overhead of micro-batches counts as work."""
    work = sum(float((times + pipeline.overhead).sum()) for times in plan.predicted_times())
    return max(
        0.0, 1.0 - work / (pipeline.stages * float(plan.predicted_makespans().sum()))
    )


def _makespan_bound(mini_batch: MiniBatch, plan: Plan, pipeline: Pipeline) -> float:
    time = _lower_bound(mini_batch, plan)
    rows = mini_batch.rows
    if plan.shared_prefixes is not None:
        return least_makespan(pipeline, mini_batch.steps, time, time)
    sizes = plan.sizes[rows]
    weights = plan.workloads[rows]
    caps = Caps(plan.max_tokens, plan.settings.max_sequences or len(rows))
    forced = minimum_step_times(
        sizes, weights, plan.ranks, mini_batch.steps, caps.max_tokens, caps.max_sequences
    )
    return least_makespan(
        pipeline,
        mini_batch.steps,
        work=float(weights.sum()) / plan.ranks,
        time=time,
        most=most_in_a_step(sizes, weights, plan.ranks, caps),
        longest=float(forced.max(initial=0.0)),
    )


def predicted_grids(plan: Plan) -> list[Floats]:
    """Return the workload of every micro-batch, without padding: float64 [steps, ranks] per mini-batch."""
    return [mini_batch.sums(plan.computed_workloads) for mini_batch in plan.mini_batches]


def time_grids(plan: Plan) -> list[Floats]:
    """Return the time of every micro-batch, with padding: float64 [steps, ranks] per mini-batch."""
    return [
        part.predicted_times(plan.computed_workloads, plan.layout)
        for part in plan.mini_batches
    ]


def _grids(mini_batches: Sequence[Rows], values: Integers | Floats) -> list[Floats]:
    def rank_sums(step: Sequence[Integers]) -> list[float]:
        return [values[group].sum() for group in step]

    return [np.array(list(map(rank_sums, rows)), np.float64) for rows in mini_batches]


def step_time(mini_batches: Sequence[Floats]) -> float:
    """Return the time of synchronous micro-steps: the sum over micro-steps of the heaviest rank."""
    return float(sum(grid.max(axis=1).sum() for grid in mini_batches))


def ideal_time(mini_batches: Sequence[Floats]) -> float:
    return float(sum(grid.mean(axis=1).sum() for grid in mini_batches))


def lower_bound(plan: Plan) -> float:
    """Bound the step time of all plans with the same mini-batches, caps, shared prefixes and micro-step
    counts.
    """
    return sum(_lower_bound(part, plan) for part in plan.mini_batches)


def _lower_bound(mini_batch: MiniBatch, plan: Plan) -> float:
    # Micro-batches of a context-parallel group that run at the same time could be one, which all its ranks
    # share.
    rows = indices_of(mini_batch)
    together = plan.settings.most_shared
    steps = mini_batch.steps
    ranks = plan.ranks // together
    work = plan.settings.cost_model.workload(plan.lengths, plan.images)[rows] / together
    caps = Caps(
        plan.max_tokens * together, (plan.settings.max_sequences or len(rows)) * together
    )
    if plan.shared_prefixes is not None:
        groups, _ = plan.shared_prefixes.select(rows).in_groups(
            plan.lengths[rows], work * together
        )
        bound = prefix_step_time_bound(
            groups, ranks, steps, caps.max_tokens, caps.max_sequences
        )
        return bound.time / together
    sizes = plan.sizes[rows]
    limits = {"max_tokens": caps.max_tokens, "max_sequences": caps.max_sequences}
    return step_time_bound(sizes, work, ranks=ranks, steps=steps, **limits).time


def indices_of(mini_batch: MiniBatch) -> Integers:
    return np.sort(mini_batch.rows)


def _given_rows(indices: Integers, plan: Plan) -> Rows:
    sizes = round_up(plan.lengths, plan.length_multiple)
    together = plan.settings.most_shared
    padded = plan.layout == "padded"
    cap = plan.max_tokens * together
    local: list[list[Integers]] = []
    for chunk in np.array_split(indices, plan.ranks // together):
        cuts = (
            take_in_order(sizes[chunk], cap, len(indices), padded=padded)
            if len(chunk)
            else []
        )
        local.append([chunk[start:stop] for start, stop in cuts])
    nothing = np.empty(0, np.int64)
    return [list(step) for step in zip_longest(*local, fillvalue=nothing)]


def _token_spread(name: str, mini_batches: list[Floats]) -> dict[str, float]:
    per_rank = np.sum([grid.sum(axis=0) for grid in mini_batches], axis=0)
    lowest = float(per_rank.min())
    highest = float(per_rank.max())
    return {
        f"{name}/min": lowest,
        f"{name}/max": highest,
        f"{name}/mean": float(per_rank.mean()),
        f"{name}/difference": highest - lowest,
    }


def _after_karmarkar_karp(mini_batch: MiniBatch, plan: Plan, alone: Floats) -> Floats:
    weights = -np.sort(-alone[mini_batch.rows])
    groups = plan.ranks // plan.settings.most_shared
    return (
        karmarkar_karp_twice(weights, groups, mini_batch.steps)
        .sums(weights)
        .reshape(mini_batch.steps, -1)
    )


def _imbalance(suffix: str, mini_batches: list[Floats]) -> dict[str, float]:
    per_rank = np.sum([grid.sum(axis=0) for grid in mini_batches], axis=0)
    ideal = ideal_time(mini_batches)
    return {
        f"imbalance{suffix}/ranks": float(per_rank.max()) / ideal - 1.0,
        f"imbalance{suffix}/micro_steps": step_time(mini_batches) / ideal - 1.0,
    }


def _waiting(suffix: str, mini_batches: list[Floats]) -> dict[str, float]:
    time = step_time(mini_batches)
    ideal = ideal_time(mini_batches)
    return {
        **_imbalance(suffix, mini_batches),
        f"idle_share{suffix}": max(0.0, 1.0 - ideal / time),
        f"predicted_time{suffix}/total": time,
        f"predicted_time{suffix}/longest_micro_step": float(
            max(grid.max() for grid in mini_batches)
        ),
    }


def _filling(plan: Plan, width: int | None) -> dict[str, float]:
    tokens = micro_batch_tokens(plan)
    real = float(plan.computed_lengths.sum())
    statistics = {
        "cap_fill": float(tokens.mean()) / plan.max_tokens,
        "padding_share": 1.0 - real / float(tokens.sum()),
        "shared_tokens": 1.0 - real / float(plan.lengths.sum()),
        "micro_batches": float(sum(part.steps for part in plan.mini_batches)),
        "empty_micro_batches": float((tokens == 0).sum()),
    }
    # Padding counts each sequence by itself, regardless of shared tokens.
    computed = float(tokens.sum() + (plan.lengths - plan.computed_lengths).sum())
    for name, cells in {"longest_row": int(plan.lengths.max()), "width": width}.items():
        if cells is not None:
            statistics[f"padding_removed/{name}"] = 1.0 - computed / (
                len(plan.lengths) * cells
            )
    return statistics


def padding_share(plan: Plan) -> float:
    return 1.0 - float(plan.computed_lengths.sum()) / float(micro_batch_tokens(plan).sum())


def micro_batch_tokens(plan: Plan) -> Floats:
    """Return the tokens of each micro-batch that count towards its cap, over all mini-batches, steps and
    ranks.
    """
    sizes = plan.sizes.astype(np.float64)
    return np.concatenate(
        [part.predicted_times(sizes, plan.layout).ravel() for part in plan.mini_batches]
    )


def computed_tokens(sizes: Integers, layout: str) -> int:
    """Count a micro-batch's computed tokens: the sum of aligned sizes, or for `padded` rows times the
    longest.
    """
    if len(sizes) == 0:
        return 0
    return int(len(sizes) * sizes.max() if layout == "padded" else sizes.sum())
