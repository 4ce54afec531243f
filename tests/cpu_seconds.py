"""CPU seconds of tests by folder, for runs with --durations: on a busy machine they stay, and durations do
not.

tests/conftest.py has these hooks. Ray's actors are children of a daemon, and not counted.
"""

import inspect
import resource
from collections import Counter
from collections.abc import Iterable

import pytest

LONG_SECONDS = 20
STARTED = pytest.StashKey[float]()
SECONDS = "cpu_seconds"
UNEXPLAINED = "unexplained_seconds"


def count_seconds() -> float:
    """Return CPU seconds of this process, its threads and the children that it waited for."""
    usages = [
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[STARTED] = count_seconds()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Give reports what the terminal prints. Properties reach it from other processes, and JUnit's files."""
    if call.when == "teardown" and STARTED in item.stash:
        item.user_properties.append(
            (SECONDS, round(count_seconds() - item.stash[STARTED], 2))
        )
    # The first test with a session's fixture sets it up for all: set-ups are not named.
    if call.when == "call" and call.duration > LONG_SECONDS and not explains_itself(item):
        item.user_properties.append((UNEXPLAINED, round(call.duration)))


def explains_itself(item: pytest.Item) -> bool:
    """Tell whether the docstring of a test, or of its file, says what only this test can find."""
    documented = (getattr(item, "obj", None), getattr(item, "module", None))
    return any("only here" in (inspect.getdoc(thing) or "").lower() for thing in documented)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.config.getoption("durations") is None:
        return
    reports = [report for group in terminalreporter.stats.values() for report in group]
    ended = [report for report in reports if getattr(report, "when", None) == "teardown"]
    terminalreporter.section("CPU seconds by folder, without Ray's actors")
    for folder, seconds in sum_by_folder(ended).most_common():
        if seconds >= 1:
            terminalreporter.write_line(f"{seconds:6.0f} {folder}")
    for report in ended:
        for name, seconds in report.user_properties:
            if name == UNEXPLAINED:
                text = f"{report.nodeid}: {seconds} s, and no docstring says what is seen only here"
                terminalreporter.write_line(text)


def sum_by_folder(reports: Iterable[pytest.TestReport]) -> Counter[str]:
    """Return the CPU seconds of the folders of packages, and of files beside them."""
    sums: Counter[str] = Counter()
    for report in reports:
        path = report.nodeid.partition("::")[0]
        folder = "/".join(path.split("/")[:3])
        properties = dict(report.user_properties)
        sums[folder] += float(str(properties.get(SECONDS, 0.0)))
    return sums
