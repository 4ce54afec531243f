"""The pages of `ballast audit` in a terminal."""

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ballast.audit.bundle import Bundle
from ballast.audit.comparison import Difference, Parting
from ballast.audit.finding import Finding, Verdict
from workers.errors import without_control

MARKS = {
    Verdict.PASSED: ("ok", "green"),
    Verdict.FAILED: ("WRONG", "bold red"),
    Verdict.UNKNOWN: ("unknown", "yellow"),
}
INDENT = 9
WIDTH = 80


def print_step(
    console: Console, label: str, bundle: Bundle, findings: Sequence[Finding]
) -> None:
    title = f"{label}: step {bundle.facts.step}, {bundle.row_count:,} rows, {bundle.token_count:,} tokens"
    if bundle.facts.writer:
        title += f", written by {bundle.facts.writer}"
    print_findings(console, title, findings)
    if bundle.unread_columns:
        _print_below(console, f"no check reads: {', '.join(bundle.unread_columns)}")


def print_findings(console: Console, title: str, findings: Sequence[Finding]) -> None:
    """Print what passed, what is missing, and last what is wrong."""
    console.print(Text(without_control(title), style="bold"))
    for finding in findings:
        if finding.verdict is Verdict.PASSED:
            _print_finding(console, finding)
    _print_unknown(console, findings)
    for finding in findings:
        if finding.verdict is Verdict.FAILED:
            _print_finding(console, finding)
    counts = [f"{_count(findings, verdict)} {verdict.value}" for verdict in Verdict]
    console.print(Text(", ".join(counts), style="bold"))


def _count(findings: Sequence[Finding], verdict: Verdict) -> int:
    return sum(finding.verdict is verdict for finding in findings)


def _print_finding(console: Console, finding: Finding) -> None:
    mark, style = MARKS[finding.verdict]
    console.print(Text.assemble((f"{mark:<{INDENT}}", style), finding.name))
    _print_below(console, _describe(finding))
    if finding.verdict is Verdict.FAILED:
        _print_below(console, f"{finding.text}. {finding.advice}")
        if finding.rows:
            _print_below(console, f"rows {_list_rows(finding)}")


def _print_unknown(console: Console, findings: Sequence[Finding]) -> None:
    """Print what is missing, and the checks that need it."""
    mark, style = MARKS[Verdict.UNKNOWN]
    names: dict[str, list[str]] = {}
    for finding in findings:
        if finding.verdict is Verdict.UNKNOWN:
            names.setdefault(finding.missing, []).append(finding.name)
    for missing, checks in names.items():
        console.print(
            Text.assemble(
                (f"{mark:<{INDENT}}", style), without_control(f"without {missing}")
            )
        )
        _print_below(console, ", ".join(checks))


def _describe(finding: Finding) -> str:
    parts = [finding.checked, f"{finding.count:,} {finding.unit}"]
    if finding.residual is not None and finding.bound is not None:
        parts.append(f"{finding.residual:.3g}, bound {finding.bound:.3g}")
    elif finding.residual is not None:
        parts.append(f"{finding.residual:.3g}")
    return "; ".join(parts)


def _list_rows(finding: Finding) -> str:
    rows = ", ".join(map(str, finding.rows))
    more = finding.row_total - len(finding.rows)
    return f"{rows} and {more:,} more" if more > 0 else rows


def _print_below(console: Console, text: str) -> None:
    for line in textwrap.wrap(without_control(text), console.width - INDENT):
        console.print(Text(" " * INDENT + line))


def print_parting(console: Console, parting: Parting) -> None:
    """Print where two runs part, or that they do not."""
    steps = (
        f"{len(parting.compared)} steps ({parting.compared[0]} to {parting.compared[-1]})"
    )
    if not parting.differences:
        console.print(Text(f"equal to the bit: {steps}", style="bold green"))
        _print_below(
            console, f"compared: {', '.join(parting.columns)}, loss and gradient norm"
        )
    else:
        first = parting.differences[0]
        console.print(
            Text(f"they part at step {first.step}, in {first.stage}", style="bold red")
        )
        for difference in parting.differences:
            console.print(
                Text.assemble((f"{difference.stage:<12}", "red"), _place(difference))
            )
    if parting.missing:
        console.print(f"only one has: {', '.join(parting.missing)}")


def _place(difference: Difference) -> str:
    place = difference.column
    if difference.row >= 0:
        place += f", row {difference.row}"
    if difference.token >= 0:
        place += f", token {difference.token}"
    values = f"{difference.first:.9g} and {difference.second:.9g}"
    return f"{place}: {values} ({difference.count:,} differ, by up to {difference.largest:.3g})"
