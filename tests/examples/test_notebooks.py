"""The notebooks of examples/ run from the first cell to the last."""

import ast
import json
import shutil
from pathlib import Path

import nbformat
import pytest

from examples.addition.warm_start import create_model
from tests.documentation.blocks import ROOT
from tests.notebooks import executed

NOTEBOOKS = ROOT / "examples" / "notebooks"


def shown(notebook: nbformat.NotebookNode) -> list[str]:
    """The values that cells show."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [
        output.data["text/plain"]
        for output in outputs
        if output.output_type == "execute_result"
    ]


@pytest.mark.parametrize("of_a_run", [False, True])
def test_balancing_is_looked_at_in_a_notebook(of_a_run: bool, tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOKS / "balancing.ipynb", 4)
    if of_a_run:
        (tmp_path / "lengths.jsonl").write_text(
            json.dumps({"step": 1, "lengths": list(range(100, 300))}) + "\n"
        )
        notebook.cells[1].source = f"RUN = {str(tmp_path)!r}"
    imbalance = ast.literal_eval(shown(executed(notebook, tmp_path))[0])
    assert imbalance["karmarkar_karp"] == min(imbalance.values()) < 0.01


@pytest.mark.slow
def test_a_first_run_is_made_in_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_model(tmp_path / "tiny", seed=0)
    notebook = nbformat.read(NOTEBOOKS / "first_run.ipynb", 4)
    notebook.cells[1].source = "MODEL = 'tiny'"
    result, rewards, validation = shown(executed(notebook, tmp_path, timeout_s=600))
    assert result == "Result(folder='runs/run', steps=4)"
    assert [step for step, _ in ast.literal_eval(rewards)] == [1, 2, 3, 4]
    assert ast.literal_eval(validation).keys() == {"before", "after"}
    assert (tmp_path / "runs" / "run" / "model" / "README.md").is_file()


@pytest.mark.slow
def test_the_quickstart_is_made_in_a_notebook_with_samples_before_and_after(
    tmp_path: Path,
) -> None:
    """A copy of the examples keeps the clone's own model, and its warm start is short."""
    shutil.copytree(
        ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("cache")
    )
    warm_start = tmp_path / "examples" / "addition" / "warm_start.py"
    warm_start.write_text(warm_start.read_text().replace("STEPS = 600", "STEPS = 100"))
    notebook = nbformat.read(NOTEBOOKS / "quickstart.ipynb", 4)
    assert notebook.cells[1].source.endswith("STEPS = 20")
    notebook.cells[1].source = 'REPOSITORY = ""\nSTEPS = 3'
    cells = executed(notebook, tmp_path / "examples" / "notebooks", timeout_s=900).cells
    result, validation = shown(notebook)
    assert result == "Result(folder='runs/notebook', steps=3)"
    assert ast.literal_eval(validation).keys() == {"before", "after"}
    pictures = [
        output for cell in cells for output in cell.get("outputs", ()) if "data" in output
    ]
    assert any("image/png" in output.data for output in pictures)
    folder = tmp_path / "runs" / "notebook" / "validation"
    rows = [
        [
            json.loads(line)
            for line in (folder / f"step-{step}.jsonl").read_text().splitlines()
        ]
        for step in (0, 3)
    ]
    assert [row["prompt"] for row in rows[0]] == [row["prompt"] for row in rows[1]]
    last = cells[-1].outputs[0].text
    assert all(row["response"] in last for row in rows[0][:8] + rows[1][:8])
