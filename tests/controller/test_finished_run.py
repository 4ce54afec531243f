"""A run that has made all its steps is not resumed: the command says so at once."""

import json
from pathlib import Path

import pytest

from controller import fit
from controller.config import load
from controller.fit import main

RESUME = ("--config", "config.yaml", "run.resume=auto")


def end_run(steps: int) -> None:
    folder = load("config.yaml").run_folder
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"steps": steps}))


@pytest.mark.parametrize("steps", [10, 12])
def test_a_finished_run_is_left_as_it_is(workspace: Path, capsys: pytest.CaptureFixture[str], steps: int) -> None:
    end_run(steps)
    assert main(RESUME) == 0
    shown = capsys.readouterr()
    assert shown.out == f"runs/test has ended after step {steps}; raise run.steps=10 to go on with it\n"
    assert shown.err == ""


@pytest.mark.parametrize("summary", ['{"steps": 9}', "", "[]", "{}"])
def test_a_run_with_steps_left_goes_on(workspace: Path, monkeypatch: pytest.MonkeyPatch, summary: str) -> None:
    end_run(0)
    (workspace / "runs" / "test" / "summary.json").write_text(summary)
    begun: list[object] = []
    monkeypatch.setattr(fit, "read_inputs", lambda config, log, given: "inputs")
    monkeypatch.setattr(fit, "run", lambda config, inputs, *_: begun.append(inputs))
    assert main(RESUME) == 0
    assert begun == ["inputs"]
