"""Count drops, retries and failures by kind and cause: each cause has a line, with the place of the first
one.

add(kind, ["prompt 3, sample 1: ...", ...]) --once a step--> take() --> "KIND: COUNT, the first: PLACE: CAUSE"
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.engine.requests import SampleResult

MOST_CAUSES = 8  # of a kind that have a line each. Further ones share a line
FURTHER = "further causes"
DIFFERENT = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")


@dataclass(frozen=True)
class Failures:
    """Failures of one kind and cause. first: place and cause of the first."""

    kind: str
    count: int
    first: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.count}, the first: {self.first}"


class FailureCounts:
    """Failures by kind and cause, until they are taken."""

    def __init__(self) -> None:
        self._by_kind: dict[str, dict[str, Failures]] = {}

    def add(self, kind: str, failures: Iterable[str]) -> None:
        """Count failures, each a text of its place and cause."""
        by_cause = self._by_kind.setdefault(kind, {})
        for text in failures:
            cause = cause_of(text)
            of_kind = kind
            if cause not in by_cause and len(by_cause) >= MOST_CAUSES:
                cause = FURTHER
                of_kind = f"{kind}, {FURTHER}"
            before = by_cause.get(cause, Failures(of_kind, 0, text.rstrip(".")))
            by_cause[cause] = replace(before, count=before.count + 1)

    def take(self) -> list[Failures]:
        by_kind = self._by_kind
        self._by_kind = {}
        return [failures for by_cause in by_kind.values() for failures in by_cause.values()]


def cause_of(text: str) -> str:
    """Return a failure's text without its numbers and quotes, which differ between failures of one cause."""
    return DIFFERENT.sub("...", text)


def place_of(key: tuple[str, int]) -> str:
    uid, sample = key
    return f"prompt {uid}, sample {sample}"


def failed_sample(result: "SampleResult") -> str:
    """Return place and cause of a sample that an engine could not make."""
    engine = f", rollout replica {result.replica}" if result.replica >= 0 else ""
    return f"{place_of(result.key)}{engine}: {result.error}"
