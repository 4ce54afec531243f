"""How good and how fast partitions and plans are.

    python -m tests.benchmarks.balancing [--output docs/balancing-benchmark.md]
                                         [--only partitions|plans|shared_prompts|pipelines]

Prints the tables, and writes them with the command and the machine they were measured on. `make bench` does
it.
"""

import argparse
import importlib
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

from balancing.basics.compiled import COMPILED
from tests.benchmarks.balancing.table import Table

MODULES = ("partitions", "plans", "shared_prompts", "pipelines")
"""Each offers `tables() -> list[Table]`."""
INTRODUCTION = """# Balancing: how good, how fast

Made by `{command}` on {machine}. Seconds are CPU seconds of one thread, medians with compiled code warm.
Batches are seeded (`balancing/analysis/distributions.py`).

"""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="markdown file to write, for example docs/balancing-benchmark.md",
    )
    parser.add_argument(
        "--only", choices=MODULES, help="some of the tables; all unless given"
    )
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    tables: list[Table] = []
    for name in [options.only] if options.only else MODULES:
        tables += _printed(
            importlib.import_module(f"tests.benchmarks.balancing.{name}").tables()
        )
    if options.output:
        text = INTRODUCTION.format(command=_command(options), machine=machine())
        options.output.write_text(
            text + "\n".join(table.markdown() for table in tables), encoding="utf-8"
        )


def machine() -> str:
    """Cores and versions; nothing that names the machine."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    )
    compiler = f"Numba {version('numba')}" if COMPILED else "without Numba"
    versions = f"Python {platform.python_version()}, NumPy {np.__version__}, {compiler}"
    return f"{platform.machine()}, {cores} cores, {versions}"


def _printed(tables: list[Table]) -> list[Table]:
    for table in tables:
        sys.stdout.write(table.markdown() + "\n")
        sys.stdout.flush()
    return tables


def _command(options: argparse.Namespace) -> str:
    given = [f"--only {options.only}"] if options.only else []
    return " ".join(
        ["python -m tests.benchmarks.balancing", *given, f"--output {options.output}"]
    )


if __name__ == "__main__":
    main()
