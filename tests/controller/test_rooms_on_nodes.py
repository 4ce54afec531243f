"""On a real Ray cluster, an engine of a range follows a node that comes, dies and comes again.

About 15 CPU seconds: only here does Ray itself grant the rooms of engines.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_an_engine_follows_its_node_and_gets_the_current_weights() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.controller.joining_nodes"],
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    assert process.returncode == 0, process.stderr
    history = json.loads(process.stdout.splitlines()[-1])
    # The second room is asked for, and not granted.
    assert history["alone"] == [[0], [0, 1]]
    assert history["joined"] == [1]
    assert history["left"] == [0]
    assert history["returned"] == [2]
    assert history["first"] == [1, 2]
    assert (history["restarts"], history["released"]) == (1, [])
