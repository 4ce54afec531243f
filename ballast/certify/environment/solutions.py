"""Checks of tasks that bring their own solution: it is paid in full, and an empty answer is not.

record --reset, solve--> reward of the solution     record --reset, an empty turn--> reward of nothing
"""

from collections.abc import Sequence

from ballast.certify.environment.checks import TriedEnvironment
from ballast.certify.environment.play import Record
from ballast.certify.findings import Finding, Level
from workers.environment import Observation, Turn
from workers.errors import EpisodeError
from workers.user_code.environments import EnvironmentPool

FULL = 1.0
SOLUTION_SECONDS = 3600.0  # a solution may take as long as an agent


async def check_solutions(
    target: TriedEnvironment, records: Sequence[Record]
) -> tuple[list[Finding], int]:
    """Return the findings of all records, and how many were solved. None are if the class has no `solve`."""
    pool = EnvironmentPool(target.packed, max(target.timeout_s, SOLUTION_SECONDS))
    findings = []
    try:
        for number, record in enumerate(records, start=1):
            place = f"{target.place}, record {number}"
            try:
                solution = await _solve(pool, record)
            except EpisodeError as error:
                findings.append(_failing(place, str(error)))
                continue
            if solution is None:
                return [], 0
            if solution.reward < FULL:
                findings.append(_unpaid(place, solution))
            findings += await _empty_findings(pool, place, record, solution)
    finally:
        await pool.stop()
    return findings, len(records)


async def _solve(pool: EnvironmentPool, record: Record) -> Observation | None:
    async with pool.episode() as environment:
        await environment.reset(record)
        return await environment.solve()


async def _empty_findings(
    pool: EnvironmentPool, place: str, record: Record, solution: Observation
) -> list[Finding]:
    try:
        async with pool.episode() as environment:
            await environment.reset(record)
            empty = await environment.step(Turn(""))
    except EpisodeError:  # named by the panel's episodes
        return []
    if empty.reward < solution.reward:
        return []
    return [
        Finding(
            name="environment.empty_answer_is_paid",
            level=Level.CERTAIN,
            problem="an empty answer is paid as the task's own solution",
            place=place,
            advice="let the tests fail where nothing was done",
            evidence=f"{empty.reward:g}, the solution {solution.reward:g}",
        )
    ]


def _failing(place: str, reason: str) -> Finding:
    return Finding(
        name="environment.solution_fails",
        level=Level.CERTAIN,
        problem="the task's own solution fails",
        place=place,
        advice="mend the solution or the tests, or leave the task out",
        evidence=reason,
    )


def _unpaid(place: str, solution: Observation) -> Finding:
    nothing = solution.reward <= 0
    return Finding(
        name="environment.solution_is_not_paid",
        level=Level.CERTAIN if nothing else Level.NOTE,
        problem=f"the task's own solution has a reward of {solution.reward:g}, below {FULL:g}",
        place=place,
        advice="mend the solution or the tests, or leave the task out"
        if nothing
        else "is it the maximum?",
        evidence=f"reward {solution.reward:g}",
    )
