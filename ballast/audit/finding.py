"""Finding: the outcome of one check."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import numpy as np

LISTED_ROWS = 10


class Verdict(Enum):
    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """name: of the check. checked: what was compared. count: tokens or rows that it covers, see `unit`.

    residual: largest difference, which must not exceed `bound`. rows: the first that are wrong, of
    `row_total`. cause: what explains a failure, a word for programs. text: a sentence about it. missing:
    column or fact that the check needs.
    """

    name: str
    verdict: Verdict
    checked: str = ""
    count: int = 0
    unit: str = "tokens"
    bound: float | None = None
    residual: float | None = None
    rows: tuple[int, ...] = ()
    row_total: int = 0
    cause: str = ""
    text: str = ""
    advice: str = ""
    missing: str = ""

    @property
    def record(self) -> dict[str, Any]:
        """Return the finding as JSON has it. A number that is not finite becomes None."""
        record = asdict(self) | {"verdict": self.verdict.value, "rows": list(self.rows)}
        for name in ("bound", "residual"):
            value = record[name]
            record[name] = (
                float(value) if value is not None and np.isfinite(value) else None
            )
        return record


@dataclass(frozen=True)
class Problem:
    """Why a check failed. rows: all rows that are wrong, int64."""

    cause: str
    text: str
    advice: str
    rows: np.ndarray | None = None


def has_failed(findings: Iterable[Finding]) -> bool:
    return any(finding.verdict is Verdict.FAILED for finding in findings)


def passed(name: str, checked: str, count: int, **details: Any) -> Finding:
    return Finding(name, Verdict.PASSED, checked, int(count), **details)


def failed(
    name: str, checked: str, count: int, problem: Problem, **details: Any
) -> Finding:
    rows = np.empty(0, np.int64) if problem.rows is None else np.asarray(problem.rows)
    return Finding(
        name,
        Verdict.FAILED,
        checked,
        int(count),
        rows=tuple(int(row) for row in rows[:LISTED_ROWS]),
        row_total=len(rows),
        cause=problem.cause,
        text=problem.text,
        advice=problem.advice,
        **details,
    )


def unknown(name: str, checked: str, missing: str) -> Finding:
    return Finding(name, Verdict.UNKNOWN, checked, missing=missing)
