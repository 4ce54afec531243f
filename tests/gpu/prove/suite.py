"""A part of the proof: one file of tests/gpu, with counts and the first failure.

python -m tests.gpu.prove.suite test_invariance
"""

import os
import sys
from pathlib import Path

import pytest

from tests.gpu.prove.outcome import LINE_WIDTH, NOTHING_RAN, write_facts

FOLDER = Path(__file__).parents[1]


class Counter:
    """Counts tests by their end, for pytest."""

    def __init__(self) -> None:
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.failures: list[str] = []
        self.skips: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Save the counts after every test, so that a crash later does not lose them."""
        if report.when != "call" and report.passed:
            return
        self.counts[report.outcome] += 1
        if report.failed:
            message = getattr(report.longrepr, "reprcrash", None)
            text = message.message.split("\n")[0] if message else str(report.longrepr)
            self.failures.append(f"{report.nodeid.rpartition('/')[2]}: {text}"[:LINE_WIDTH])
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skips.add(report.longrepr[2].removeprefix("Skipped: "))
        write_facts(tests=self.counts, failures=self.failures, skips=sorted(self.skips))


def main(name: str) -> int:
    counter = Counter()
    device = os.environ["BALLAST_PROOF_DEVICE"]
    marker = "gpu" if device == "cuda" else "not gpu and not slow"
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-m", marker]
    code = pytest.main([*options, str(FOLDER / f"{name}.py")], plugins=[counter])
    if counter.failures:
        print(counter.failures[0])
        return 1
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        print(f"pytest ended with {code!r}")
        return 1
    if not counter.counts["passed"]:
        print("; ".join(sorted(counter.skips)) or f"no test of {name} runs on this device")
        return NOTHING_RAN
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
