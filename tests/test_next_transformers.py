"""The trainer's half with a transformers that vLLM does not allow yet, so that an upgrade is one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NEXT = "5.24.0"
TESTS = (
    "tests/test_contracts.py",
    "tests/workers/model/rules/test_families.py",
    "tests/workers/model/test_exactness.py",
    "tests/workers/model/moe/test_expert_parallel.py",
    "tests/controller/preflight/test_memory.py::test_shared_experts_are_measured[1-2]",
)


@pytest.mark.slow
def test_contracts_and_families_hold_with_the_next_transformers(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", *arguments]
        found = subprocess.run(
            command,
            env=environment,
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
        )
        assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
        return found.stdout

    run(
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(tmp_path),
        f"transformers=={NEXT}",
    )
    assert f"transformers {NEXT}" in run(
        "pip", "list", "--path", str(tmp_path), "--format", "freeze"
    ).replace("==", " ")
    run("pytest", "-q", "-p", "no:cacheprovider", *TESTS)
