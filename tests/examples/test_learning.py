"""Examples learn what their pages say: from the warm start to the last validation, by their own commands."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers.sandbox.conftest import needs_bubblewrap

ROOT = Path(__file__).parents[2]
SANDBOXED = needs_bubblewrap


@pytest.mark.slow
@pytest.mark.parametrize("name", ["agent", pytest.param("code", marks=SANDBOXED)])
def test_an_example_learns_to_call(tmp_path: Path, name: str) -> None:
    shutil.copytree(
        ROOT / "examples",
        tmp_path / "examples",
        ignore=shutil.ignore_patterns("cache", "__pycache__"),
    )
    fit = ["controller.fit", "--config", f"examples/{name}/config.yaml", "run.name=learns"]
    for command in ([f"examples.{name}.warm_start"], fit):
        subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, check=True)
    lines = (tmp_path / "runs" / "learns" / "metrics.jsonl").read_text().splitlines()
    validated = [step for step in map(json.loads, lines) if "validation/reward" in step]
    first, last = validated[0], validated[-1]
    assert last["validation/reward"] > first["validation/reward"] + 0.25
    assert last["validation/called"] > 0.9
