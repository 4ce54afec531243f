"""A sixth of the tests that last longest is drawn by the commit for `make test`. CI runs them all.

    pytest --write-long --> long_tests.txt: seconds and name of each test of at least 1 s
    pytest --draw-long ---> five of six of them, next to each other in the list, are marked as slow

Whole runs in tests/end_to_end have a draw of their own, in conftest.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("long_tests.txt")
LEAST_SECONDS = 1.0
ONE_OF = 6


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--draw-long",
        action="store_true",
        help="leave five of six of the longest tests to `make test-slow`",
    )
    parser.addoption(
        "--write-long", action="store_true", help=f"write {LIST.name} from this run"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.config.getoption("write_long"):
        reports = [report for group in terminalreporter.stats.values() for report in group]
        LIST.write_text(format_list(sum_by_test(reports)))


def sum_by_test(reports: Iterable[pytest.TestReport]) -> Counter[str]:
    """Return the seconds of tests without their set-up, which may be for others too. All cases of one count."""
    sums: Counter[str] = Counter()
    for report in reports:
        if getattr(report, "when", None) == "call" and "end_to_end" not in report.nodeid:
            sums[name_test(report.nodeid)] += report.duration
    return sums


def format_list(seconds: Counter[str]) -> str:
    """Return the long tests in lines, the longest first."""
    lines = [
        f"{duration:.0f} {name}\n"
        for name, duration in seconds.most_common()
        if duration >= LEAST_SECONDS
    ]
    return "".join(lines)


def read_list() -> list[str]:
    """Return the names of long tests, the longest first."""
    return [line.partition(" ")[2] for line in LIST.read_text().splitlines()]


def draw_tests(names: Sequence[str], seed: str) -> set[str]:
    """Return one of each six. Neighbours last alike, and so do all draws."""
    generator = random.Random(f"{seed} long tests")
    groups = [names[first : first + ONE_OF] for first in range(0, len(names), ONE_OF)]
    return {generator.choice(group) for group in groups}


def leave_long_to_slow(
    items: Iterable[pytest.Item], names: Sequence[str], seed: str
) -> None:
    """Mark the long tests as slow that this commit does not draw."""
    left = set(names) - draw_tests(names, seed)
    for item in items:
        if name_test(item.nodeid) in left:
            item.add_marker("slow")


def name_test(nodeid: str) -> str:
    return nodeid.partition("[")[0]
