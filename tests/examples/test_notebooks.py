"""The notebooks of examples/ run from the first cell to the last."""

import ast
import json
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
    return [output.data["text/plain"] for output in outputs if output.output_type == "execute_result"]


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
def test_a_first_run_is_made_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_model(tmp_path / "tiny", seed=0)
    notebook = nbformat.read(NOTEBOOKS / "first_run.ipynb", 4)
    notebook.cells[1].source = "MODEL = 'tiny'"
    result, rewards, validation = shown(executed(notebook, tmp_path, timeout_s=600))
    assert result == "Result(folder='runs/run', steps=4)"
    assert [step for step, _ in ast.literal_eval(rewards)] == [1, 2, 3, 4]
    assert ast.literal_eval(validation).keys() == {"before", "after"}
    assert (tmp_path / "runs" / "run" / "model" / "README.md").is_file()
