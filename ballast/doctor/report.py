"""Print findings as they come, one line each."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from controller.engines.engine_calls import cause_of
from controller.observability.slow_work import log_if_slow

LONGEST_TEXT = 400  # characters of an error


class Status(Enum):
    """WARN: a run is slower or riskier. FAIL: a run fails."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    name: str
    status: Status
    text: str
    advice: str = ""

    @property
    def line(self) -> str:
        """`warn  /dev/shm: 0.1 GiB; start containers with ...`"""
        return f"{self.status.value:<4}  {self.name}: {self.text}" + (
            f"; {self.advice}" if self.advice else ""
        )


def ok(name: str, text: str) -> Finding:
    return Finding(name, Status.OK, text)


def warn(name: str, text: str, advice: str) -> Finding:
    return Finding(name, Status.WARN, text, advice)


def fail(name: str, text: str, advice: str) -> Finding:
    return Finding(name, Status.FAIL, text, advice)


class Report:
    """Prints every finding when it is added."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.as_json = False

    def add(self, *findings: Finding) -> None:
        for finding in findings:
            print(finding.line, file=sys.stderr if self.as_json else sys.stdout, flush=True)
        self.findings += findings

    @contextmanager
    def guarding(self, name: str, advice: str, *, verbose: bool = True) -> Iterator[None]:
        """Turn an exception of the block into a finding, so that later checks still run.

        verbose: print the name of a slow check, as `looking_at` does.
        """
        try:
            with looking_at(name) if verbose else nullcontext():
                yield
        except Exception as error:  # a check may fail in any way, and Ctrl-C passes
            self.add(fail(name, cause_of(error)[:LONGEST_TEXT], advice))

    def to_json(self) -> dict[str, Any]:
        findings = [
            asdict(finding) | {"status": finding.status.value.lower()}
            for finding in self.findings
        ]
        return {"exit_code": self.exit_code, "findings": findings}

    @property
    def exit_code(self) -> int:
        """1 if any check failed."""
        return int(any(finding.status is Status.FAIL for finding in self.findings))


def looking_at(name: str) -> AbstractContextManager[None]:
    """Print the name of a slow block on standard error."""
    return log_if_slow(partial(print, file=sys.stderr, flush=True), f"...   {name}")


def merge_findings(by_node: dict[str, list[Finding]]) -> list[Finding]:
    """Merge equal findings of several nodes, and name the nodes."""
    if len(by_node) == 1:
        return next(iter(by_node.values()))
    nodes: dict[Finding, list[str]] = {}
    for node, findings in by_node.items():
        for finding in findings:
            nodes.setdefault(finding, []).append(node)
    order = list(
        dict.fromkeys(finding.name for findings in by_node.values() for finding in findings)
    )
    return [
        replace(finding, name=f"{finding.name} ({_of(node_names, len(by_node))})")
        for finding, node_names in sorted(
            nodes.items(), key=lambda item: order.index(item[0].name)
        )
    ]


def _of(nodes: list[str], count: int) -> str:
    if len(nodes) == count:
        return f"all {count} nodes"
    return nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes, {nodes[0]} first"
