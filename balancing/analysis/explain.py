"""Explain in words where the ranks of a plan wait and why, and which settings would shorten the step.

plan --findings--> waiting by cause, number of micro-steps, padding --+--> text
     --advice----> changed arguments of plan_batch, planned again   --+
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from balancing.analysis.statistics import (
    computed_tokens,
    indices_of,
    padding_share,
    plan_statistics,
    predicted_grids,
    step_time,
)
from balancing.basics.grouping import Caps, Floats
from balancing.errors import BalancingError
from balancing.mini_batch import MicroStep
from balancing.plan import Plan, plan_batch
from balancing.search.packing import fewest_micro_batches

EVEN = 1e-6
"""No rank waits in a micro-step whose heaviest rank is within this share of the mean."""
NEGLIGIBLE = 1e-3
"""Smaller shares of the ranks' time are not reported or advised on."""


@dataclass(frozen=True)
class Finding:
    """waiting: share of the ranks' time that the cause costs, or 0. text: the evidence."""

    cause: str
    waiting: float
    text: str


@dataclass(frozen=True)
class Advice:
    """Changed arguments of `plan_batch` with which the step takes `after` instead of `before`.

    context_parallel: factor by which it grows. `changes` then count a context-parallel group as one rank.
    """

    words: str
    changes: Mapping[str, Any]
    context_parallel: int = 1
    before: float = np.nan
    after: float = np.nan
    micro_steps: int = 0

    @property
    def gain(self) -> float:
        return 1.0 - self.after / self.before

    def __str__(self) -> str:
        return f"{self.words}: {self.gain:.1%} less step time, micro-steps: {self.micro_steps:,}"


def explain(plan: Plan) -> str:
    """Return a headline, a line for each finding and a line for each setting that helps."""
    causes = [
        finding
        for finding in findings(plan)
        if finding.waiting == 0 or finding.waiting >= NEGLIGIBLE
    ]
    helpful = advice(plan)
    doubled = _changing(max_tokens=2 * plan.max_tokens).words
    lines = [_headline(plan), "", "Why:", *(f"- {finding.text}" for finding in causes)]
    lines += [
        "",
        "What would help, planned and compared:",
        *(f"- {suggestion}" for suggestion in helpful),
    ]
    if doubled not in [suggestion.words for suggestion in helpful]:
        lines.append(
            f"- not twice the cap: {doubled} saves less than {NEGLIGIBLE:.1%} of the step time"
        )
    return "\n".join(lines) + "\n"


def _headline(plan: Plan) -> str:
    numbers = plan_statistics(plan)
    over = numbers["imbalance/micro_steps"]
    above = numbers["over_bound"]
    steps = _count(sum(part.steps for part in plan.mini_batches), "micro-step")
    compared = f" (at best {(1 + over) / (1 + above) - 1:.2%} in as many micro-steps)"
    # The bound may be below this plan's workload / ranks.
    if plan.shared_prefixes is not None:
        compared = (
            f", and {above:.2%} longer than a lower bound for as many micro-steps, in which shared prefixes "
            "are computed again only where caps and ranks force it"
        )
    text = (
        f"{len(plan.lengths):,} sequences of {plan.lengths.sum():,} tokens on {_count(plan.ranks, 'rank')}: "
        f"{_count(len(plan.mini_batches), 'mini-batch')}, {steps}.\n"
        f"Imbalance: {numbers['imbalance_before/micro_steps']:.2%} in the given order, "
        f"{numbers['imbalance_karmarkar_karp/micro_steps']:.2%} after Karmarkar-Karp alone, without caps, "
        f"{over:.2%} as planned.\n"
        f"The step takes {over:.2%} longer than if no rank ever waited{compared}. Ranks wait "
        f"{numbers['idle_share']:.2%} of the time."
    )
    if plan.settings.context_degrees:
        degrees = np.concatenate([part.degree_of_steps() for part in plan.mini_batches])
        counts = ", ".join(
            f"{degree} in {(degrees == degree).sum():,}" for degree in np.unique(degrees)
        )
        share = numbers["exchange_share"]
        text += (
            f"\nRanks that share a sequence: {counts} micro-steps. Their exchange takes {share:.2%} of the "
            "work."
        )
    if pipeline := plan.settings.pipeline:
        virtual = (
            f" of {pipeline.virtual_stages} virtual stages each"
            if pipeline.virtual_stages > 1
            else ""
        )
        text += (
            f"\nOn a pipeline of {_count(pipeline.stages, 'stage')}{virtual}: bubble "
            f"{numbers['pipeline/bubble']:.2%} of the stages' time. Predicted time: "
            f"{numbers['pipeline/over_bound']:.2%} above a lower bound for all plans with as many "
            "micro-steps. With light micro-steps at both ends, the published order, these would take "
            f"{numbers['pipeline/small_ends']:.2%} longer."
        )
    return text


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def findings(plan: Plan) -> list[Finding]:
    """List the causes of waiting, costliest first, then the number of micro-steps, then any padding."""
    grids = predicted_grids(plan)
    by_cause: dict[str, list[tuple[float, str]]] = {}
    for number, (mini_batch, grid) in enumerate(zip(plan.mini_batches, grids, strict=True)):
        for position, (micro_step, loads) in enumerate(
            zip(mini_batch.micro_steps, grid, strict=True)
        ):
            waiting = float(loads.max() - loads.mean())
            if waiting > EVEN * loads.mean():
                cause, evidence = _why(
                    micro_step, loads, f"micro-step {position} of mini-batch {number}", plan
                )
                by_cause.setdefault(cause, []).append((waiting, evidence))
    causes = []
    for cause, steps in by_cause.items():
        share = sum(waiting for waiting, _ in steps) / step_time(grids)
        text = f"{share:.2%} of the ranks' time waits for {cause}, in {_count(len(steps), 'micro-step')}"
        causes.append(Finding(cause, share, f"{text}: {max(steps)[1]}."))
    causes.sort(key=lambda finding: -finding.waiting)
    causes.append(Finding("the number of micro-steps", 0.0, _about_count(plan)))
    if (padding := padding_share(plan)) > 0:
        source = 'layout="padded"' if plan.layout == "padded" else "alignment"
        text = f"{padding:.2%} of the computed tokens are padding, from {source} with "
        causes.append(
            Finding("padding", 0.0, f"{text}length_multiple={plan.length_multiple}.")
        )
    return causes


def _why(step: MicroStep, loads: Floats, place: str, plan: Plan) -> tuple[str, str]:
    how = plan.settings.at_degree(step.degree)
    mean = loads.mean()
    sizes = plan.sizes
    counts = [len(rows) for rows in step.ranks]
    uneven = f"in {place} the heaviest rank is {loads.max() / mean - 1:.2%} over the mean"
    sequences = sum(counts) // step.degree
    if 0 in counts and (how.algorithm == "karmarkar_karp" or sequences < plan.ranks):
        return (
            "empty micro-batches",
            f"{counts.count(0)} of {plan.ranks} ranks have none of the {sequences} "
            + (
                f"sequences of {place}, with min_count={how.min_count} and multiple_of={how.multiple_of}"
            ),
        )
    if how.algorithm != "karmarkar_karp":
        return f'algorithm="{how.algorithm}"', uneven
    heaviest = step.ranks[int(np.argmax(loads))]
    longest = heaviest[np.argmax(plan.workloads[heaviest])]
    if plan.workloads[longest] > mean * step.degree:
        fair = f"where a rank's fair share is {1 / plan.ranks:.1%}"
        fair += f", and {step.degree} ranks share it" if step.degree > 1 else ""
        share = f"{plan.workloads[longest] / loads.sum():.1%} of {place}, {fair}"
        images = (
            f" and {plan.computed_patches[longest]:,.0f} image patches"
            if plan.images
            else ""
        )
        return (
            "a long sequence",
            f"sequence {longest} of {plan.lengths[longest]:,} tokens{images} is {share}",
        )
    lighter = [rows for rows, load in zip(step.ranks, loads, strict=True) if load < mean]
    if all(len(rows) == how.max_sequences for rows in lighter):
        return (
            "the cap on sequences",
            f"lighter micro-batches hold max_sequences={how.max_sequences}, and {uneven}",
        )
    patches = plan.computed_patches
    if how.max_patches and all(
        patches[np.append(rows, heaviest)].sum() > how.max_patches for rows in lighter
    ):
        return (
            "the cap on patches",
            f"lighter micro-batches are full at max_patches={how.max_patches:,}, and {uneven}",
        )
    smallest = sizes[heaviest].min()
    if all(
        computed_tokens(np.append(sizes[rows], smallest), plan.layout) > how.max_tokens
        for rows in lighter
    ):
        return (
            "the cap on tokens",
            f"lighter micro-batches are full at max_tokens={how.max_tokens:,}, and {uneven}",
        )
    return "a remainder that no exchange evens out", f"{uneven}, of {sequences} sequences"


def _about_count(plan: Plan) -> str:
    most = int(np.argmax([part.steps for part in plan.mini_batches]))
    part = plan.mini_batches[most]
    how = plan.settings
    sizes = plan.sizes
    together = how.most_shared
    caps = Caps(
        plan.max_tokens * together,
        how.max_sequences or len(plan.lengths),
        plan.layout == "padded",
    )
    needed = -(
        -fewest_micro_batches(sizes[indices_of(part)], caps) // (plan.ranks // together)
    )
    requested_steps = -(-how.min_count // how.multiple_of) * how.multiple_of
    if part.steps == needed:
        reason = f"the fewest that max_tokens={plan.max_tokens:,} allows"
    elif part.steps == requested_steps:
        reason = (
            f"as min_count={how.min_count} and multiple_of={how.multiple_of} ask, while the caps need "
            f"{needed}"
        )
    else:
        reason = f"where the caps need at least {needed}"
    if how.order == "makespan" and part.steps > max(needed, requested_steps):
        reason += ", because more of them fill and drain the pipeline sooner"
    fill = part.predicted_times(sizes.astype(np.float64), plan.layout).mean()
    return (
        f"Mini-batch {most} takes {_count(part.steps, 'micro-step')}, {reason}. Its micro-batches fill "
        f"{fill / plan.max_tokens:.1%} of the cap on average."
    )


def advice(plan: Plan) -> list[Advice]:
    """List the changes that help, most helpful first. If ranks or stages wait, this plans up to nine more
    times.
    """
    old_time = float(plan.predicted_makespans().sum())
    suggestions = []
    # Pipeline stages and padded rows also cost time if no rank waits.
    slow = plan.settings.pipeline is not None or plan.layout == "padded"
    slow = slow or plan_statistics(plan)["idle_share"] >= NEGLIGIBLE
    for candidate in _candidates(plan) if slow else ():
        try:
            new_plan = replan(plan, candidate.changes)
        except BalancingError:
            continue  # the batch cannot be planned with these changes, for example because of a count
        new_time = float(new_plan.predicted_makespans().sum()) / candidate.context_parallel
        steps = sum(part.steps for part in new_plan.mini_batches)
        suggestions.append(
            replace(candidate, before=old_time, after=new_time, micro_steps=steps)
        )
    return sorted(
        (suggestion for suggestion in suggestions if suggestion.gain >= NEGLIGIBLE),
        key=lambda suggestion: -suggestion.gain,
    )


def replan(plan: Plan, changes: Mapping[str, Any]) -> Plan:
    """Plan the same batch with other arguments of `plan_batch`. Raises as `plan_batch`."""
    arguments = {
        field.name: getattr(plan.settings, field.name) for field in fields(plan.settings)
    }
    arguments["mini_batches"] = [indices_of(mini_batch) for mini_batch in plan.mini_batches]
    return plan_batch(plan.lengths, **{**arguments, **plan.prefixes, **changes})


def _candidates(plan: Plan) -> Iterator[Advice]:
    how = plan.settings
    best = None if plan.settings.pipeline is None else "makespan"
    if how.algorithm != "karmarkar_karp":
        yield Advice(
            'algorithm="karmarkar_karp"', {"algorithm": "karmarkar_karp", "order": best}
        )
    elif best and how.order != best:
        yield _changing(order=best)
    if how.layout == "padded":
        yield _changing(layout="packed")
    yield _changing(max_tokens=2 * plan.max_tokens)
    yield _changing(max_tokens=4 * plan.max_tokens)
    if how.min_count > 1 or how.multiple_of > 1:
        yield _changing(min_count=1, multiple_of=1)
    if how.max_patches is not None:
        yield _changing(max_patches=2 * how.max_patches)
    if how.max_sequences is not None:
        yield _changing(max_sequences=2 * how.max_sequences)
        yield _changing(max_sequences=None)
    members = [indices_of(part) for part in plan.mini_batches]
    if len(members) > 1:
        pairs = [
            np.concatenate(members[start : start + 2])
            for start in range(0, len(members), 2)
        ]
        words = f"{len(pairs)} instead of {len(members)} mini-batches, which changes the optimiser steps"
        yield Advice(words, {"mini_batches": pairs})
    if how.context_degrees is not None:
        doubled = replace(how.context_degrees, maximum=2 * how.most_shared)
        yield Advice(
            f"up to {doubled.maximum} ranks share a sequence", {"context_degrees": doubled}
        )
    elif plan.ranks % 2 == 0:
        # Alignment grows from `tp` to `4*tp` for cp = 1, and doubles for larger cp. Four times covers both.
        aligned = 4 * plan.length_multiple
        grown = _changing(
            ranks=plan.ranks // 2, max_tokens=2 * plan.max_tokens, length_multiple=aligned
        )
        words = f"twice the context parallelism, whose communication is not counted ({grown.words})"
        yield Advice(words, grown.changes, context_parallel=2)


def _changing(**changes: Any) -> Advice:
    words = {
        k: f"{v:,}" if isinstance(v, int) else f'"{v}"' if v else "None"
        for k, v in changes.items()
    }
    return Advice(", ".join(f"{name}={value}" for name, value in words.items()), changes)
