"""Explains a plan in words: where ranks wait and why, and which settings would shorten the step.

    plan --+--> findings: waiting by cause, number of micro-steps, padding (findings.py)   --+--> text
           +--> other settings, each tried by planning again (advice.py)                   --+

It recommends only settings that it has planned with, and prints what they save.
"""

from collections.abc import Callable
from dataclasses import dataclass

from balancing.analysis.advice import LEAST_GAIN, Advice, capped, faster, less_padded, tried
from balancing.analysis.findings import Cause, Finding, findings
from balancing.analysis.statistics import ideal_time, lower_bound, plan_statistics, predicted_grids, step_time
from balancing.plan import Plan

NEGLIGIBLE = 1e-3
"""Waiting below this share of the ranks' time is not reported, and no advice is searched for."""


@dataclass(frozen=True)
class Explanation:
    """findings: causes of waiting, costliest first, then count and padding. advice: most helpful first.

    over_ideal: step time / (workload / ranks) - 1. bound: a lower bound on it for all plans with the same mini-batches,
    caps and number of micro-steps; below 0 if these could share more. waiting: share of the ranks' time.
    """

    findings: tuple[Finding, ...]
    advice: tuple[Advice, ...]
    over_ideal: float
    bound: float
    waiting: float


def explanation(plan: Plan) -> Explanation:
    """The explanation as data. If ranks or stages wait, it plans the batch up to eight more times."""
    grids = predicted_grids(plan)
    time, ideal = step_time(grids), ideal_time(grids)
    waiting = 1.0 - ideal / time
    # Stages of a pipeline wait also where no rank does.
    waits = waiting >= NEGLIGIBLE or plan.settings.pipeline is not None
    advice = tried(plan, faster(plan)) if waits else []
    advice += tried(plan, less_padded(plan), "padding")
    bound = lower_bound(plan) / ideal - 1.0
    return Explanation(tuple(findings(plan)), tuple(advice), time / ideal - 1.0, bound, waiting)


def explain(plan: Plan) -> str:
    """The explanation as text: a headline, a line for each finding and a line for each setting that helps."""
    result = explanation(plan)
    worth_saying = [found for found in result.findings if found.waiting == 0 or found.waiting >= NEGLIGIBLE]
    lines = [_headline(plan, result), "", "Why:"]
    lines += [f"- {_SENTENCES[finding.cause](finding, plan)}" for finding in worth_saying]
    lines += ["", "What would help, planned and compared:"]
    lines += [f"- {advice}" for advice in result.advice]
    doubled = capped(2 * plan.max_tokens)
    if doubled.words not in [advice.candidate.words for advice in result.advice]:
        lines.append(f"- not twice the cap: {doubled.words} saves less than {LEAST_GAIN:.1%} of the step time")
    return "\n".join(lines) + "\n"


def _headline(plan: Plan, result: Explanation) -> str:
    steps = sum(len(mini_batch.micro_steps) for mini_batch in plan.mini_batches)
    return (
        f"{len(plan.lengths):,} sequences of {plan.lengths.sum():,} tokens on {_count(plan.ranks, 'rank')}: "
        f"{_count(len(plan.mini_batches), 'mini-batch')}, {_count(steps, 'micro-step')}.\n"
        f"{_three_imbalances(plan)}\n"
        f"The step takes {result.over_ideal:.2%} longer than if no rank ever waited{_compared(plan, result)}; ranks "
        f"wait {result.waiting:.2%} of the time.{_on_pipeline(plan)}"
    )


def _on_pipeline(plan: Plan) -> str:
    """The waiting times of a pipeline's stages, explained; empty without a pipeline."""
    pipeline = plan.settings.pipeline
    if pipeline is None:
        return ""
    numbers = plan_statistics(plan)
    virtual = f" of {pipeline.virtual_stages} virtual stages each" if pipeline.virtual_stages > 1 else ""
    return (
        f"\nOn a pipeline of {_count(pipeline.stages, 'stage')}{virtual}: bubble {numbers['pipeline/bubble']:.2%} of "
        f"the stages' time; predicted time {numbers['pipeline/over_bound']:.2%} above a lower bound for all plans with "
        f"as many micro-steps. With light micro-steps at both ends, the published order, these would take "
        f"{numbers['pipeline/small_ends']:.2%} longer."
    )


def _compared(plan: Plan, result: Explanation) -> str:
    """The lower bound. With shared beginnings it may be less than this plan's workload / ranks."""
    if plan.beginnings is None:
        return f" (at best {result.bound:.2%} in as many micro-steps)"
    above = (1 + result.over_ideal) / (1 + result.bound) - 1
    return (
        f", and {above:.2%} longer than a lower bound for as many micro-steps, in which shared beginnings are computed "
        "again only where caps and ranks force it"
    )


def _three_imbalances(plan: Plan) -> str:
    statistics = plan_statistics(plan)
    given, alone, planned = (statistics[f"imbalance{when}/micro_steps"] for when in ("_before", "_karmarkar_karp", ""))
    return (
        f"Imbalance: {given:.2%} in the given order, {alone:.2%} after Karmarkar-Karp alone, without caps, "
        f"{planned:.2%} as planned."
    )


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _waiting(finding: Finding) -> str:
    """The beginning of every sentence about waiting."""
    steps = int(finding.numbers["micro_steps"])
    return f"{finding.waiting:.2%} of the ranks' time waits for {finding.cause}, in {_count(steps, 'micro-step')}"


def _place(finding: Finding) -> str:
    numbers = finding.numbers
    return f"micro-step {numbers['micro_step']:.0f} of mini-batch {numbers['mini_batch']:.0f}"


def _about_long_sequence(finding: Finding, plan: Plan) -> str:
    numbers = finding.numbers
    return (
        f"{_waiting(finding)}. Worst: sequence {numbers['sequence']:.0f} of {numbers['tokens']:,.0f} tokens is "
        f"{numbers['share']:.1%} of {_place(finding)}, where a rank's fair share is {numbers['fair_share']:.1%}."
    )


def _about_few_sequences(finding: Finding, plan: Plan) -> str:
    numbers = finding.numbers
    sequences = len(plan.mini_batches[int(numbers["mini_batch"])].rows)
    return (
        f"{_waiting(finding)}: mini-batch {numbers['mini_batch']:.0f} holds {sequences} for {plan.ranks} ranks; "
        f"{numbers['empty']:.0f} have nothing to do in {_place(finding)}."
    )


def _about_empty(finding: Finding, plan: Plan) -> str:
    numbers = finding.numbers
    return (
        f"{_waiting(finding)}: {numbers['empty']:.0f} of {plan.ranks} ranks have nothing to do in {_place(finding)}; "
        f"min_count={plan.settings.min_count} and multiple_of={plan.settings.multiple_of} were asked for."
    )


def _about_cap_on_sequences(finding: Finding, plan: Plan) -> str:
    return (
        f"{_waiting(finding)}: the lighter micro-batches hold max_sequences={plan.settings.max_sequences} already; "
        f"in {_place(finding)} the heaviest rank is {finding.numbers['over_mean']:.1%} over the mean."
    )


def _about_cap_on_tokens(finding: Finding, plan: Plan) -> str:
    return (
        f"{_waiting(finding)}: the lighter micro-batches are full at max_tokens={plan.max_tokens:,}; "
        f"in {_place(finding)} the heaviest rank is {finding.numbers['over_mean']:.1%} over the mean."
    )


def _about_rest(finding: Finding, plan: Plan) -> str:
    return (
        f"{_waiting(finding)}; in {_place(finding)}, of {finding.numbers['sequences']:.0f} sequences, the heaviest "
        f"rank is {finding.numbers['over_mean']:.2%} over the mean."
    )


def _about_count(finding: Finding, plan: Plan) -> str:
    numbers = finding.numbers
    needed, asked, steps = (int(numbers[name]) for name in ("needed", "asked", "micro_steps"))
    if steps == needed:
        reason = f"the fewest that max_tokens={plan.max_tokens:,} allows"
    elif steps == asked:
        asks = f"min_count={plan.settings.min_count} and multiple_of={plan.settings.multiple_of}"
        reason = f"as {asks} ask; the caps need {needed}"
    else:
        reason = f"where the caps need at least {needed}"
    if plan.settings.order == "makespan" and steps > max(needed, asked):
        reason += ", because more of them fill and drain the pipeline sooner"
    return (
        f"Mini-batch {numbers['mini_batch']:.0f} takes {_count(steps, 'micro-step')}, {reason}; "
        f"its micro-batches fill {numbers['fill']:.1%} of the cap on average."
    )


def _about_padding(finding: Finding, plan: Plan) -> str:
    source = 'layout="padded"' if plan.layout == "padded" else "alignment"
    return (
        f"{finding.numbers['share']:.2%} of the computed tokens are padding, from {source} with "
        f"length_multiple={plan.length_multiple}."
    )


_SENTENCES: dict[Cause, Callable[[Finding, Plan], str]] = {
    Cause.LONG_SEQUENCE: _about_long_sequence,
    Cause.FEW_SEQUENCES: _about_few_sequences,
    Cause.EMPTY_MICRO_BATCHES: _about_empty,
    Cause.GIVEN_ORDER: _about_rest,
    Cause.RANK_BY_RANK: _about_rest,
    Cause.MAX_SEQUENCES: _about_cap_on_sequences,
    Cause.MAX_TOKENS: _about_cap_on_tokens,
    Cause.REMAINDER: _about_rest,
    Cause.COUNT: _about_count,
    Cause.PADDING: _about_padding,
}
