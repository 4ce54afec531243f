"""What a sandbox costs: start, a command, 10 MiB written and read, stop.

    python -m tests.benchmarks.sandboxes [--kind bubblewrap] [--rounds 20] [--output docs/sandboxes.md]

Its table is the last section of docs/sandboxes.md. The first sandbox tries Python and breakouts, so it is not
counted.
"""

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.command import read_options
from workers.config.sandbox import SandboxConfig
from workers.sandbox.kinds import open_sandbox

SIZE = 10 * 2**20
CONTENT = bytes(range(256)) * (SIZE // 256)
SECTION = "## Cost\n"
HEADER = """## Cost

Written by `python -m tests.benchmarks.sandboxes` on {cores} cores: medians of {rounds} sandboxes, {kind}, one
after another.

| | ms |
| --- | ---: |
"""


def measure(kind: str, rounds: int) -> dict[str, float]:
    """Return the median of each step in milliseconds."""
    spent: dict[str, list[float]] = defaultdict(list)

    def timed(step: str, action: Callable[[], object]) -> None:
        start = time.perf_counter()
        action()
        spent[step].append((time.perf_counter() - start) * 1000)

    settings = SandboxConfig(kind=kind)
    with open_sandbox(settings, "first"):
        pass
    for number in range(rounds):
        sandbox = open_sandbox(settings, f"round-{number}")
        timed("start", sandbox.start)
        timed("a command, `true`", lambda sandbox=sandbox: sandbox.run("true"))
        timed("write 10 MiB", lambda sandbox=sandbox: sandbox.write("content", CONTENT))
        timed("read 10 MiB", lambda sandbox=sandbox: sandbox.read("content"))
        timed("stop", sandbox.stop)
    return {step: statistics.median(values) for step, values in spent.items()}


def describe(kind: str, rounds: int, medians: dict[str, float]) -> str:
    rows = [f"| {step} | {value:.0f} |\n" for step, value in medians.items()]
    header = HEADER.format(cores=os.cpu_count(), rounds=rounds, kind=kind)
    return header + "".join(rows)


def write_section(path: Path, section: str) -> None:
    """Put the section in the place of the old one, which ends with the page's last paragraph."""
    page = path.read_text()
    before, _, old = page.partition(SECTION)
    last = old.rstrip().rpartition("\n\n")[2]
    path.write_text(f"{before}{section}\n{last}\n")


def main() -> None:
    options = read_options(__doc__, kind="bubblewrap", rounds=20, output=None)
    section = describe(options.kind, options.rounds, measure(options.kind, options.rounds))
    if options.output:
        write_section(options.output, section)
    print(section)


if __name__ == "__main__":
    main()
