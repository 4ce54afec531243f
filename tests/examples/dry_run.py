"""Dry runs of examples with the data that they make."""

import json
from pathlib import Path
from typing import Any

import pytest

from controller import fit


def dry_run_page(
    name: str, data: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> str:
    """The page of an example's configuration, whose model is in `folder`. No problem is in both files."""
    overrides = [f"run.dir={folder}", f"model.path={folder / 'model'}"]
    prompts = []
    for file, held_out in (("train", False), ("validation", True)):
        path = folder / f"{file}.jsonl"
        data.write(path, 300, seed=0, held_out=held_out)
        overrides.append(f"data.{file}={path}")
        prompts.append({str(json.loads(line)["prompt"]) for line in path.open()})
    assert not prompts[0] & prompts[1]
    config = f"examples/{name}/config.yaml"
    assert fit.main(["--config", config, "--dry-run", *overrides]) == 0
    return capsys.readouterr().out
