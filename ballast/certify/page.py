"""The certificate as a page of 80 columns.

findings, certain ones first | rewards of the panel and other tables | what was checked, and what was not
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ballast.certify.certificate import Certificate
from ballast.certify.findings import Coverage, Finding, Level
from controller.config.training import count_noun
from workers.errors import without_control

WIDTH = 80
LABEL = 8  # columns of a label before a finding's text
PROMPT_LINES = 8
LONGEST = 240  # characters of evidence on the page: the file has all


def page_lines(certificate: Certificate) -> list[str]:
    seconds = sum(certificate.seconds.values())
    lines = [
        *_wrap(f"Certificate of {certificate.subject}", ""),
        f"level {certificate.level}, {seconds:.0f} s: {verdict(certificate)}",
    ]
    for level in (Level.CERTAIN, Level.LIKELY):
        for finding in certificate.findings:
            if finding.level is level:
                lines += ["", *_finding_lines(finding)]
    notes = [finding for finding in certificate.findings if finding.level is Level.NOTE]
    if notes:
        lines += ["", "Notes"]
    for note in notes:
        lines += _wrap(f"{note.name}: {note.problem}", "  ")
    for name, rows in certificate.tables.items():
        lines += ["", name.capitalize(), *table_lines(rows)]
    if certificate.first_prompt:
        lines += ["", "First prompt", *_prompt_lines(certificate.first_prompt)]
    lines += ["", "Checked"]
    for coverage in certificate.coverage:
        lines += _wrap(_coverage_text(coverage), "  ")
    if certificate.skipped:
        lines += ["", "Not checked"]
    for name, reason in certificate.skipped.items():
        lines += _wrap(f"{name}: {reason}", "  ")
    return lines


def verdict(certificate: Certificate) -> str:
    """Count the findings in words."""
    counts = certificate.counts
    if not counts[Level.CERTAIN] and not counts[Level.LIKELY]:
        return f"no defect found, {count_noun(counts[Level.NOTE], 'note')}"
    certain = count_noun(counts[Level.CERTAIN], "certain defect")
    return f"{certain}, {counts[Level.LIKELY]} likely, {count_noun(counts[Level.NOTE], 'note')}"


def _finding_lines(finding: Finding) -> list[str]:
    evidence = finding.evidence
    if len(evidence) > LONGEST:
        evidence = f"{evidence[:LONGEST]} ..."
    lines = [f"{finding.level.upper()}  {finding.name}", *_wrap(finding.problem, "  ")]
    for label, text in (
        ("where", finding.place),
        ("seen", evidence),
        ("to do", finding.advice),
    ):
        if text:
            lines += _wrap(text, f"  {label:{LABEL}}")
    return lines


def _prompt_lines(prompt: str) -> list[str]:
    lines = [row for line in prompt.splitlines() for row in _wrap(line, "  ")]
    return lines if len(lines) <= PROMPT_LINES else [*lines[:PROMPT_LINES], "  ..."]


def _coverage_text(coverage: Coverage) -> str:
    unseen = f" Cannot see {coverage.bound}." if coverage.bound else ""
    return f"{coverage.check}: {coverage.over}.{unseen}"


def _wrap(text: str, start: str) -> list[str]:
    """Wrap a text behind `start`, and indent the following lines by its width."""
    text = without_control(text.replace("\n", "\\n"))
    return textwrap.wrap(
        text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start)
    ) or [start]


def table_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tabulate rows of the same columns; numbers stand to the right."""
    if not rows:
        return []
    columns = list(rows[0])
    texts = [{name: _cell(row.get(name, "")) for name in columns} for row in rows]
    widths = {name: max(len(name), *(len(row[name]) for row in texts)) for name in columns}
    lines = []
    for row in ({name: name for name in columns}, *texts):
        cells = []
        for name in columns:
            is_text = isinstance(rows[0].get(name), str)
            cells.append(
                f"{row[name]:<{widths[name]}}"
                if is_text
                else f"{row[name]:>{widths[name]}}"
            )
        lines.append(f"  {'  '.join(cells)}".rstrip()[:WIDTH])
    return lines


def _cell(value: Any) -> str:
    return (
        f"{value:.4g}"
        if isinstance(value, float)
        else without_control(str(value)).replace("\n", "\\n")
    )
