"""Notebooks run as a user runs them: in a kernel of this environment."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient


def executed(
    notebook: nbformat.NotebookNode, folder: Path, *, timeout_s: int = 300
) -> nbformat.NotebookNode:
    """The notebook with its outputs, after all cells ran in `folder`. Raises what nbclient does where one
    fails.
    """
    client = NotebookClient(
        notebook,
        timeout=timeout_s,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    return client.execute()


def notebook_of(*cells: str) -> nbformat.NotebookNode:
    """A notebook of these cells of code."""
    return nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells]
    )
