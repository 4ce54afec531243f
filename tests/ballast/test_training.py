"""A result's tables, from the folder of a finished run."""

from pathlib import Path

from ballast.training import Result
from tests.controller.observability.recorded_run import write_run


def test_tables_of_a_result_have_no_empty_cells(tmp_path: Path) -> None:
    """Step 0 is a validation alone, and not every step validates."""
    write_run(tmp_path / "run", steps=5)
    (tmp_path / "run" / "summary.json").write_text("{}")
    result = Result.read(tmp_path / "run")
    assert [row["step"] for row in result.metrics] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in result.validations] == [0, 4]
    for table in (result.metrics, result.validations):
        assert all(
            row.keys() == table[0].keys() and None not in row.values() for row in table
        )
