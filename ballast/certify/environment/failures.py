"""Name the failures of environments, agents and tools by kind, one finding for a kind."""

from collections.abc import Sequence

from ballast.certify.environment.play import PlayedEpisode
from ballast.certify.findings import Finding, Level

KINDS = {
    "took more than": (
        "hangs",
        "does not answer in time",
        "give every wait a limit, and load what is large at the import",
    ),
    "ended its process": (
        "ends_process",
        "ends its process",
        "raise an exception, or return Observation(done=True), in place of exit",
    ),
    "must be a finite": (
        "reward_not_finite",
        "returns a reward that is not a finite number",
        "return a finite number, also after a division by nothing",
    ),
    "must return": (
        "wrong_answer_type",
        "returns another type than Observation",
        "return workers.environment.Observation from every path of step",
    ),
    "must be": (
        "wrong_answer_type",
        "returns a field of the wrong type",
        "return text or messages, a number as reward, and True or False as done",
    ),
    "is not JSON serializable": (
        "wrong_answer_type",
        "returns what JSON cannot hold",
        "return text or messages of text",
    ),
    "raised": (
        "raises",
        "raises an exception",
        "catch it and answer with an observation that says what was wrong with the turn",
    ),
}

OTHER = (
    "fails",
    "fails",
    "score whatever a policy may write, and fail only where the task itself is broken",
)


def kind_of(failure: str) -> tuple[str, str, str]:
    """Return name, problem and advice of a failure's text."""
    kinds = (kind for text, kind in KINDS.items() if text in failure)
    return next(kinds, OTHER)


def failure_findings(
    kind: str, place: str, episodes: Sequence[PlayedEpisode]
) -> list[Finding]:
    """Name failed episodes, a finding a kind of failure. kind: environment, agent or tools."""
    by_name: dict[str, list[PlayedEpisode]] = {}
    for episode in episodes:
        if episode.failure:
            by_name.setdefault(kind_of(episode.failure)[0], []).append(episode)
    findings = []
    for name, failed in by_name.items():
        first = failed[0]
        _, problem, advice = kind_of(first.failure)
        policies = ", ".join(sorted({repr(episode.policy) for episode in failed}))
        findings.append(
            Finding(
                name=f"{kind}.{name}",
                level=Level.CERTAIN,
                problem=f"{place} {problem} in {len(failed)} of {len(episodes)} episodes "
                f"of policies {policies}",
                place=f"{place}, record {first.record}",
                advice=advice,
                evidence=first.failure,
            )
        )
    return findings
