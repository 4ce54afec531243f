"""A range of engines on a real Ray cluster, whose nodes come and go during the run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_run_takes_an_engine_on_a_node_that_joins_and_goes_on_without_it(
    tmp_path: Path,
) -> None:
    """Three engines start, in two runs. Every sample is there once, and as one engine draws it."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.end_to_end.changing_cluster", str(tmp_path)],
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    assert process.returncode == 0, process.stderr
    run = json.loads(process.stdout.splitlines()[-1])
    assert run["engines"][0] == run["engines"][-1] == 1.0
    assert run["engines"][2] == 2.0
    assert run["samples"] == [15.0] * 5
    assert run["restarts"] == [0.0, 0.0]
    assert run["differences"] == []
    assert any("2 of 1..2 engines" in line for line in run["log"])
    assert any("1 of 1..2 engines are left" in line for line in run["log"])
