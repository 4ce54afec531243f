"""Other settings for a plan, each tried before it is recommended.

    plan + changed arguments of plan_batch --> planned again --> better by how much, or not recommended

Trying costs one plan for each candidate.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from balancing.errors import BalancingError
from balancing.statistics import indices_of, padding_share, predicted_grids, step_time

if TYPE_CHECKING:
    from balancing.plan import Plan

LEAST_GAIN = 1e-3
"""Advice that makes its measure less than this share smaller is not given."""
ROUND_CAP = 1_024
"""Recommended caps, but for the doubled one, are multiples of this."""

Measure = Literal["step time", "padding"]


@dataclass(frozen=True)
class Candidate:
    """Arguments of `plan_batch` to change; `words` say so.

    context_parallel: into how many ranks each sequence is cut more than in the plan; each then takes that share of
    the time, and `changes` count groups of them as one rank.
    """

    words: str
    changes: Mapping[str, Any]
    context_parallel: int = 1


@dataclass(frozen=True)
class Advice:
    """A candidate that was tried: `measure` falls from `before` to `after`.

    measure: `step time`, in the cost model's unit; or `padding`, the share of computed tokens that are not real.
    micro_steps: their number over all mini-batches with the changes.
    """

    candidate: Candidate
    measure: Measure
    before: float
    after: float
    micro_steps: int

    @property
    def gain(self) -> float:
        """Share of the step time that is saved, or of computed tokens that are no longer padding."""
        return 1.0 - self.after / self.before if self.measure == "step time" else self.before - self.after

    def __str__(self) -> str:
        if self.measure == "step time":
            effect = f"{self.gain:.1%} less step time, micro-steps: {self.micro_steps:,}"
        else:
            effect = f"padding {self.after:.1%} instead of {self.before:.1%}"
        return f"{self.candidate.words}: {effect}"


def replan(plan: "Plan", changes: Mapping[str, Any]) -> "Plan":
    """The plan of the same batch with other arguments of `plan_batch`; raises what `plan_batch` raises."""
    from balancing.plan import plan_batch

    arguments = {field.name: getattr(plan.settings, field.name) for field in fields(plan.settings)}
    arguments["mini_batches"] = [indices_of(mini_batch) for mini_batch in plan.mini_batches]
    return plan_batch(plan.lengths, **{**arguments, **changes})


def measured(plan: "Plan", measure: Measure, context_parallel: int = 1) -> float:
    """The measure of a plan."""
    return step_time(predicted_grids(plan)) / context_parallel if measure == "step time" else padding_share(plan)


def tried(plan: "Plan", candidates: Iterable[Candidate], measure: Measure = "step time") -> list[Advice]:
    """Those that help, most helpful first; what cannot be planned is left out."""
    before = measured(plan, measure)
    found = []
    for candidate in candidates:
        try:
            other = replan(plan, candidate.changes)
        except BalancingError:
            continue  # for example a divisor that the batch cannot keep: not advice
        steps = sum(len(mini_batch.micro_steps) for mini_batch in other.mini_batches)
        found.append(Advice(candidate, measure, before, measured(other, measure, candidate.context_parallel), steps))
    return sorted((advice for advice in found if advice.gain >= LEAST_GAIN), key=lambda advice: -advice.gain)


def less_padded(plan: "Plan") -> Iterator[Candidate]:
    """What may lower the padding."""
    if plan.layout == "padded":
        yield Candidate('layout="packed"', {"layout": "packed"})


def faster(plan: "Plan") -> Iterator[Candidate]:
    """What may shorten the step: everything that the plan's settings leave to try."""
    if plan.settings.algorithm != "karmarkar_karp":
        yield Candidate('algorithm="karmarkar_karp"', {"algorithm": "karmarkar_karp"})
    yield from _higher_caps(plan)
    if plan.settings.min_count > 1 or plan.settings.multiple_of > 1:
        yield Candidate("min_count=1, multiple_of=1", {"min_count": 1, "multiple_of": 1})
    if plan.settings.max_sequences is not None:
        for limit in (2 * plan.settings.max_sequences, None):
            yield Candidate(f"max_sequences={limit}", {"max_sequences": limit})
    if len(plan.mini_batches) > 1:
        words = "sequences re-dealt between mini-batches, which changes the optimiser steps (redeal_groups=range(n))"
        yield Candidate(words, {"redeal_groups": np.arange(len(plan.lengths))})
        yield _fewer_mini_batches(plan)
    if plan.ranks % 2 == 0:
        yield _twice_the_context_parallelism(plan)


def _higher_caps(plan: "Plan") -> Iterator[Candidate]:
    """Twice the cap; and the cap that leaves so few micro-steps that a fair share is no lighter than the longest."""
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
    """Another cap."""
    return Candidate(f"max_tokens={tokens:,}", {"max_tokens": tokens})


def _fewer_mini_batches(plan: "Plan") -> Candidate:
    """Neighbouring mini-batches joined in pairs."""
    members = [indices_of(mini_batch) for mini_batch in plan.mini_batches]
    pairs = [np.concatenate(members[start : start + 2]) for start in range(0, len(members), 2)]
    words = f"{len(pairs)} instead of {len(members)} mini-batches, which changes the optimiser steps"
    return Candidate(words, {"mini_batches": pairs})


def _twice_the_context_parallelism(plan: "Plan") -> Candidate:
    """From cp = 1 the alignment `tp` becomes `4*tp`, later `2*cp*tp` doubles: four times serves both."""
    changes = {
        "ranks": plan.ranks // 2,
        "max_tokens": 2 * plan.max_tokens,
        "length_multiple": 4 * plan.length_multiple,
    }
    arguments = ", ".join(f"{name}={value:,}" for name, value in changes.items())
    words = f"twice the context parallelism, whose communication is not counted ({arguments})"
    return Candidate(words, changes, context_parallel=2)
