"""The certificate: findings, what was checked, and tables, as a page of a terminal and as JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ballast.certify.findings import Coverage, Finding, Level


@dataclass
class Certificate:
    """subject: what was certified. level: quick, default or train. data: its training files.

    tables: numbers of a check by its name, such as rewards of the panel, with a row a mapping.
    skipped: a check, and why it did not run. first_prompt: as the model reads it.
    """

    subject: str
    level: str
    data: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    coverage: list[Coverage] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    first_prompt: str = ""

    def add(self, *findings: Finding) -> None:
        self.findings.extend(findings)

    def add_coverage(self, check: str, over: str, bound: str = "") -> None:
        self.coverage.append(Coverage(check, over, bound))

    def add_table(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        self.tables[name] = list(rows)

    def skip(self, check: str, reason: str) -> None:
        self.skipped[check] = reason

    @property
    def counts(self) -> Counter[Level]:
        """Return the number of findings of each level."""
        return Counter(finding.level for finding in self.findings)

    @property
    def is_certain(self) -> bool:
        """Whether a defect is certain."""
        return any(finding.level is Level.CERTAIN for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
