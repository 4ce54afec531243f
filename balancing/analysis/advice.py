"""Advice: changes of settings that shorten the step, each tried by planning the batch again.

plan + changed arguments of plan_batch --> planned again --> how much better, or not recommended
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from balancing.analysis.statistics import indices_of, padding_share, predicted_grids, step_time
from balancing.errors import BalancingError
from balancing.plan import Plan, plan_batch

LEAST_GAIN = 1e-3
"""Advice that gains less than this share is not given."""
ROUND_CAP = 1_024
"""Recommended caps, except twice the cap, are multiples of this."""

Measure = Literal["step time", "padding"]


@dataclass(frozen=True)
class Candidate:
    """Arguments of `plan_batch` to change, and the same in words.

    context_parallel: factor by which context parallelism grows. `changes` then count a context-parallel group as one
    rank, and its time is divided by the factor.
    """

    words: str
    changes: Mapping[str, Any]
    context_parallel: int = 1


@dataclass(frozen=True)
class Advice:
    """A candidate that helps: `measure` falls from `before` to `after`.

    measure: `step time`, in the cost model's unit; or `padding`, the share of computed tokens that are not real.
    micro_steps: over all mini-batches, with the changes.
    """

    candidate: Candidate
    measure: Measure
    before: float
    after: float
    micro_steps: int

    @property
    def gain(self) -> float:
        """Saved share of the step time, or reduction of the padding share."""
        return 1.0 - self.after / self.before if self.measure == "step time" else self.before - self.after

    def __str__(self) -> str:
        if self.measure == "step time":
            effect = f"{self.gain:.1%} less step time, micro-steps: {self.micro_steps:,}"
        else:
            effect = f"padding {self.after:.1%} instead of {self.before:.1%}"
        return f"{self.candidate.words}: {effect}"


def replan(plan: Plan, changes: Mapping[str, Any]) -> Plan:
    """Plan the same batch with other arguments of `plan_batch`; raises as `plan_batch`."""
    arguments = {field.name: getattr(plan.settings, field.name) for field in fields(plan.settings)}
    arguments |= plan.prefixes
    arguments["mini_batches"] = [indices_of(mini_batch) for mini_batch in plan.mini_batches]
    return plan_batch(plan.lengths, **{**arguments, **changes})


def measured(plan: Plan, measure: Measure, context_parallel: int = 1) -> float:
    """Step time or padding of a plan."""
    if measure == "padding":
        return padding_share(plan)
    on_pipeline = plan.settings.pipeline is not None
    time = float(plan.predicted_makespans().sum()) if on_pipeline else step_time(predicted_grids(plan))
    return time / context_parallel


def tried(plan: Plan, candidates: Iterable[Candidate], measure: Measure = "step time") -> list[Advice]:
    """The candidates that help, most helpful first; one plan for each candidate."""
    before = measured(plan, measure)
    found = []
    for candidate in candidates:
        try:
            other = replan(plan, candidate.changes)
        except BalancingError:
            continue  # the batch cannot be planned so, for example because of a count
        steps = sum(len(mini_batch.micro_steps) for mini_batch in other.mini_batches)
        found.append(Advice(candidate, measure, before, measured(other, measure, candidate.context_parallel), steps))
    return sorted((advice for advice in found if advice.gain >= LEAST_GAIN), key=lambda advice: -advice.gain)


def less_padded(plan: Plan) -> Iterator[Candidate]:
    """Candidates that may reduce padding."""
    if plan.layout == "padded":
        yield Candidate('layout="packed"', {"layout": "packed"})


def faster(plan: Plan) -> Iterator[Candidate]:
    """Candidates that may shorten the step."""
    best = None if plan.settings.pipeline is None else "makespan"
    if plan.settings.algorithm != "karmarkar_karp":
        changes = {"algorithm": "karmarkar_karp", "order": best}
        yield Candidate('algorithm="karmarkar_karp"', changes)
    elif best and plan.settings.order != best:
        yield Candidate('order="makespan"', {"order": best})
    yield from _higher_caps(plan)
    if plan.settings.min_count > 1 or plan.settings.multiple_of > 1:
        yield Candidate("min_count=1, multiple_of=1", {"min_count": 1, "multiple_of": 1})
    if plan.settings.max_sequences is not None:
        for limit in (2 * plan.settings.max_sequences, None):
            yield Candidate(f"max_sequences={limit}", {"max_sequences": limit})
    if len(plan.mini_batches) > 1:
        yield _fewer_mini_batches(plan)
    if plan.ranks % 2 == 0:
        yield _twice_the_context_parallelism(plan)


def _higher_caps(plan: Plan) -> Iterator[Candidate]:
    """Twice the cap, and the cap with so few micro-steps that the longest sequence is within a rank's fair share."""
    doubled = capped(2 * plan.max_tokens)
    yield doubled
    needed = plan.max_tokens
    for mini_batch in plan.mini_batches:
        rows = indices_of(mini_batch)
        fair = plan.workloads[rows].sum() / plan.ranks
        steps = max(1, int(fair / plan.workloads[rows].max()))
        needed = max(needed, int(np.ceil(1.05 * plan.lengths[rows].sum() / plan.ranks / steps)))
    levelled = capped(-(-needed // ROUND_CAP) * ROUND_CAP)
    if needed > plan.max_tokens and levelled != doubled:
        yield levelled


def capped(tokens: int) -> Candidate:
    """The candidate with a cap of `tokens`."""
    return Candidate(f"max_tokens={tokens:,}", {"max_tokens": tokens})


def _fewer_mini_batches(plan: Plan) -> Candidate:
    """The candidate with pairs of mini-batches joined."""
    members = [indices_of(mini_batch) for mini_batch in plan.mini_batches]
    pairs = [np.concatenate(members[start : start + 2]) for start in range(0, len(members), 2)]
    words = f"{len(pairs)} instead of {len(members)} mini-batches, which changes the optimiser steps"
    return Candidate(words, {"mini_batches": pairs})


def _twice_the_context_parallelism(plan: Plan) -> Candidate:
    """Alignment grows from `tp` to `4*tp` for cp = 1, and doubles for larger cp; four times covers both."""
    changes = {
        "ranks": plan.ranks // 2,
        "max_tokens": 2 * plan.max_tokens,
        "length_multiple": 4 * plan.length_multiple,
    }
    arguments = ", ".join(f"{name}={value:,}" for name, value in changes.items())
    words = f"twice the context parallelism, whose communication is not counted ({arguments})"
    return Candidate(words, changes, context_parallel=2)
